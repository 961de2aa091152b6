"""Groups: from an example to the requests of its samples, and from what they drew to rewards."""

import dataclasses
import math

import ml_collections
import numpy as np

from jaxrl_tis.data.rewards import RewardWorker, Scored, soft_overlong_penalty
from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.rollouts.prompts import Prompter


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished trajectory with the example it answers, its reward and its group in the batch.

    `score` is the reward function's value; `reward` adds the overlong penalty; both are NaN where
    there is none. `components` are parts of it by name, NaN where one is void; `is_failed` says that
    the reward could not be had, whatever `score` then is. `greedy_reward` is the reward of the greedy
    answer to the same prompt, where an advantage asks for it.
    """

    trajectory: Trajectory
    record: dict[str, str]
    text: str
    score: float
    reward: float
    group: int
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    greedy_reward: float = math.nan
    is_failed: bool = False


def components(samples: list[Sample]) -> dict[str, np.ndarray]:
    """Returns each component of the rewards, [N]; NaN where it is void, or its reward unknown."""
    names = dict.fromkeys(name for s in samples for name in s.components)
    is_there = lambda sample, name: name in sample.components and not math.isnan(sample.reward)
    value = lambda sample, name: sample.components[name] if is_there(sample, name) else math.nan
    return {name: np.array([value(s, name) for s in samples], np.float32) for name in names}


def is_equal(samples: list[Sample]) -> bool:
    """Whether a group teaches nothing: its known rewards are all equal, or there are fewer than
    two."""
    return len({s.reward for s in samples if not math.isnan(s.reward)}) < 2


def sampling_params(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer, temperature: float, is_filtered: bool
) -> SamplingParams:
    """Returns parameters that stop at the tokenizer's end ids or after max_new_tokens, with the
    rollouts' filters or without."""
    rollout = config.rollout
    filters = dict(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)
    return SamplingParams(
        temperature=temperature, stop_ids=tuple(tokenizer.eos_ids),
        max_tokens=rollout.max_new_tokens, **(filters if is_filtered else {}),
    )


def kept_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Measures, over all tokens, how often what could be drawn was too wide to be recorded, and the
    mean mass that the filters dropped there: by so much the ratios stay below 1. {} without kept
    sets."""
    drawn = [t for t in trajectories if len(t.tokens)]
    if not any(t.kept.shape[-1] for t in drawn):
        return {}
    is_wide = np.concatenate([np.all(t.kept < 0, axis=-1) for t in drawn])
    dropped = np.concatenate([1 - np.exp(t.logp_raw - t.logp_behav) for t in drawn])
    return {
        "rollout/kept_overflow": is_wide.mean(),
        "rollout/kept_overflow_mass": np.where(is_wide, dropped, 0.0).mean(),
    }


def unknown_ids(trajectories: list[Trajectory], tokenizer: Tokenizer) -> dict[str, float]:
    """Counts the sampled ids that the tokenizer does not have, as the padding of an embedding gives:
    they are tokens of the answer like others, and no part of its text."""
    drawn = [t.tokens for t in trajectories if len(t.tokens)]
    known = np.isin(np.concatenate(drawn), tokenizer.ids) if drawn else np.ones(0)
    return {"rollout/unknown_ids": float(known.size - known.sum())}


class Groups:
    """Makes the requests of a group and its rewarded samples.

    Args:
      with_greedy: also answer each prompt once at temperature 0, for the baseline of ReMax.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, prompter: Prompter, rewards: RewardWorker,
        with_greedy: bool,
    ):
        self._config, self._prompter, self._rewards = config, prompter, rewards
        self._with_greedy = with_greedy
        tokenizer, rollout = prompter.tokenizer, config.rollout
        sampling = sampling_params(config, tokenizer, rollout.temperature, is_filtered=True)
        greedy = sampling_params(config, tokenizer, 0.0, is_filtered=False)
        self._samplings = [sampling] * rollout.group_size + [greedy] * with_greedy

    @property
    def size(self) -> int:
        """The number of requests of a group."""
        return len(self._samplings)

    def requests(self, record: dict[str, str], name: str, redundant: int = 0) -> list[Request]:
        """Makes the requests of an example, and redundant ones; `name` is that of the group, unique
        in a run, which the noise of its samples depends on."""
        ids = self._prompter.ids(record)
        return [
            Request(f"{name}/{record['id']}/{g}", ids, self._config.seed, sampling)
            for g, sampling in enumerate(self._samplings + self._samplings[:1] * redundant)
        ]

    def rewarded(
        self, records: list[dict[str, str]], trajectories: list[Trajectory]
    ) -> list[list[Sample]]:
        """Returns the groups of these examples, from the records of all of their requests in
        order."""
        repeated = [record for record in records for _ in self._samplings]
        samples = self.samples(repeated, trajectories)
        return [
            self.group(samples[i : i + self.size]) for i in range(0, len(samples), self.size)
        ]

    def samples(
        self, records: list[dict[str, str]], trajectories: list[Trajectory]
    ) -> list[Sample]:
        """Returns a rewarded sample for each trajectory and the example that it answers; the reward
        is called once for all."""
        texts = [self._prompter.tokenizer.decode(t.tokens) for t in trajectories]
        scored = self._rewards.results(texts, records, [t.tokens for t in trajectories])
        return [
            self._sample(*sample)
            for sample in zip(trajectories, records, texts, scored, strict=True)
        ]

    def group(self, samples: list[Sample]) -> list[Sample]:
        """Returns the samples of a group that are trained on, of those of all its requests."""
        if not self._with_greedy:
            return samples
        return [dataclasses.replace(s, greedy_reward=samples[-1].reward) for s in samples[:-1]]

    @property
    def counts(self) -> dict[str, int]:
        """How many rewards have failed, by the reason."""
        return self._rewards.counts

    def _sample(self, trajectory, record, text, scored: Scored) -> Sample:
        rollout, components, reward = self._config.rollout, scored.components, scored.score
        if rollout.overlong_buffer:
            if "overlong" in components:
                raise ValueError(
                    "the reward has a component 'overlong', which is the name of the penalty of "
                    "rollout.overlong_buffer; rename the component"
                )
            penalty = soft_overlong_penalty(
                len(trajectory.tokens), rollout.max_new_tokens, rollout.overlong_buffer
            )
            reward, components = reward + penalty, components | {"overlong": penalty}
        return Sample(
            trajectory, record, text, scored.score, reward, group=0, components=components,
            is_failed=scored.is_failed,
        )
