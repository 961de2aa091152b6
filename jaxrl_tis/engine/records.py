"""What goes into the engine and what comes out: requests and the records of finished sequences."""

import dataclasses
import hashlib

import numpy as np

from jaxrl_tis.engine.sampling import SamplingParams

NEVER = 2**31 - 1  # evict_step of a key that stayed


def _no(dtype, dims: int = 1):
    return dataclasses.field(default_factory=lambda: np.zeros((0,) * dims, dtype))


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The record of one sequence, written as its tokens were drawn.

    Arrays have one entry per sampled token: `tokens` int32, `mask` bool (True: the policy chose
    it), `turn` int32, `logp_behav` (of what it was drawn from: penalised, filtered, renormalised),
    `logp_raw` (of the model's logits at the temperature, 1 if greedy), `entropy` (nats) float32,
    `version` int32 (weights that drew the token), `kv_version` int32 (the oldest weights that wrote
    keys it looked at), `segment` int32 (how often the sequence's cache had been rebuilt before it),
    and `logits` [n,V] float32, log-probs of the distribution it was drawn from, V = 0 unless
    recorded. `top_ids` int32 and `top_logps` float32 [n,k] are the k likeliest tokens of that
    distribution, -1 and -inf where fewer were possible. `kept` [n,K] int32 are the tokens that
    could be drawn, ascending, then -1; a row of nothing but -1 says that more than K could. k and K
    are 0 unless recorded.
    `evict_step` [prompt + n] int32: a query at position t saw position s iff
    s <= t < evict_step[s]; empty where nothing is ever evicted.
    `stop_reason` is "stop", "length" or "abort"; `quant_id` names the weights' format.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    turn: np.ndarray
    logp_behav: np.ndarray
    logp_raw: np.ndarray
    entropy: np.ndarray
    version: np.ndarray
    stop_reason: str
    seed: int
    request: int
    quant_id: str
    temperature: float
    kv_version: np.ndarray = _no(np.int32)
    segment: np.ndarray = _no(np.int32)
    logits: np.ndarray = _no(np.float32, 2)
    evict_step: np.ndarray = _no(np.int32)
    top_ids: np.ndarray = _no(np.int32, 2)
    top_logps: np.ndarray = _no(np.float32, 2)
    kept: np.ndarray = _no(np.int32, 2)


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to be sampled. `id` is unique among live requests and seeds its noise.

    `partial` is the aborted trajectory of the same request, which goes on where it was cut:
    sampling.max_tokens counts its tokens too.
    """

    id: str
    prompt: np.ndarray
    seed: int
    sampling: SamplingParams
    partial: Trajectory | None = None

    @property
    def hash(self) -> int:
        """32 bits of the id; the sampling key is fold_in(fold_in(seed, hash), position)."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=4).digest(), "little")
