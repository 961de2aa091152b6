"""Cost model of sampling and training, in seconds, for `experiments.virtual_clock`."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Costs:
    """The machine and the time of each operation. Fields that end in `_s` are seconds.

    The defaults are AReaL's run of 1.5B parameters (2505.24298 and blog/AReaL_v0_3.md of its
    repository: R1-Distill-Qwen-1.5B, 16 nodes of 8 H800), at a sixteenth of its machines and of its
    batch, which leaves the load of each device as it was.

    Attributes:
      workers: samplers with one device each. trainers: devices of the learner. Three quarters of the
        devices sample, as in AReaL at every size.
      slots: sequences that a sampler generates at once. Assumed: twice those of a synchronous run.
      prompts, group_size: groups of a batch and samples of a group; AReaL has 512 and 16.
      prompt_tokens: tokens of a prompt. Assumed: a quarter of AReaL's limit of 1,024.
      median_tokens, sigma: of the log-normal response lengths; AReaL gives neither. sigma is assumed: a
        99th percentile of ten medians, reported for Laminar (2510.12633). The median is fitted to the
        147.6 s of AReaL's synchronous step (41.0 hours for 1,000). Asynchronous steps were not fitted.
      max_tokens: limit of a response; AReaL's 27 K.
      call_steps: decode steps between two checks for commands.
      step_s: a decode step of any batch. Assumed: 4 ms. Reading 3 GB of weights at an H800's 3.35 TB/s
        is 0.9 ms; the rest is launching and sampling.
      sequence_s: a decode step, per sequence. Assumed: 10 us, of which 3 GFLOP at 40 % of 990 TFLOP/s
        are 7.6 us; the rest is sampling the token.
      cached_s: a decode step, per token in the cache: 28 layers of 2 heads of 128 in bfloat16, keys and
        values, are 28,672 bytes, read at 70 % of 3.35 TB/s.
      prefill_s: prefill, per token: 3 GFLOP at 40 % of 990 TFLOP/s.
      train_s: training, per token on one device: 8 FLOP per parameter (forward and backward pass, and
        another forward pass for log-probs) at 40 % of 990 TFLOP/s.
      update_s: an update, for any number of devices and tokens.
      weights_gib, gib_s: size of a weight sync, and time per GiB (3 GB at 10 GB/s). swap_s: additional
        time of the swap. Both assumed. The learner does not wait for the sync.
      reward_s: from the end of a response to its reward. Assumed: 1 s.
    """

    workers: int = 6
    trainers: int = 2
    slots: int = 128
    prompts: int = 32
    group_size: int = 16
    prompt_tokens: int = 256
    median_tokens: float = 2560.0
    sigma: float = 0.99
    max_tokens: int = 27_648
    call_steps: int = 4
    step_s: float = 4e-3
    sequence_s: float = 1e-5
    cached_s: float = 1.2e-8
    prefill_s: float = 7.6e-6
    train_s: float = 3.0e-5
    update_s: float = 0.0
    weights_gib: float = 2.9
    gib_s: float = 0.1
    swap_s: float = 0.5
    reward_s: float = 1.0

    def decode_s(self, running: int, cached: int, steps: int) -> float:
        """Returns the time of some decode steps of `running` sequences with `cached` tokens at the
        start, each of which grows by a token a step."""
        first = self.step_s + self.sequence_s * running + self.cached_s * cached
        return steps * first + self.cached_s * running * steps * (steps - 1) / 2

    @property
    def sync_s(self) -> float:
        """Returns the time of one weight sync of a sampler, in seconds."""
        return self.swap_s + self.weights_gib * self.gib_s

    def colocated(self) -> "Costs":
        """Returns the costs of a synchronous run: all devices sample, then all devices train."""
        total = self.workers + self.trainers
        return dataclasses.replace(self, workers=total, trainers=total)

    def lengths(self, seed: int, group: int, count: int) -> list[int]:
        """Draws the lengths of a group's responses, the same for every schedule."""
        normal = np.random.default_rng((seed, group)).standard_normal(count)
        drawn = np.round(self.median_tokens * np.exp(self.sigma * normal))
        return np.clip(drawn, 1, self.max_tokens).astype(int).tolist()
