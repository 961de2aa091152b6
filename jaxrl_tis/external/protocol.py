"""What the driver asks of an engine, whatever its kind."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_tis.engine.records import SamplingParams


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an engine says of itself; None where it does not say.

    Attributes:
      model: the name that requests give; max_length: tokens of prompt and answer.
      dtype: of its weights; logprobs: whether they are those of the sampling distribution, or why not.
      max_logprobs: the most likely tokens of a request, -1 without a bound.
      vocab_size: of its model's config.
    """

    model: str
    max_length: int | None
    dtype: str | None
    logprobs: str | None
    max_logprobs: int | None
    vocab_size: int | None


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How an engine computes; None where it does not say.

    Attributes:
      program: the engine's own version.
      cache_dtype: of keys and values; "auto": that of its weights.
      block: tokens that its prefix cache finds together; 0 without a prefix cache.
      chunk: most tokens of prompts in one forward pass; 0 where prompts are not cut into chunks.
    """

    program: str | None
    cache_dtype: str | None
    block: int | None
    chunk: int | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of one request, as the engine recorded them.

    Attributes:
      tokens: int32 [n], with the stop token.
      logps: float32 [n] log-probs of the sampling distribution.
      stop_reason: "stop", "length" or "abort".
      spans: (version, start, end) of the weights that sampled tokens, in their order; None where the
        engine does not say.
      top_ids, top_logps: [n,k] the k likeliest tokens.
      routes: [m,L,k] experts of the tokens; None without.
    """

    tokens: np.ndarray
    logps: np.ndarray
    stop_reason: str
    spans: Sequence[tuple[str, int, int]] | None
    top_ids: np.ndarray
    top_logps: np.ndarray
    routes: np.ndarray | None = None


class Kind(Protocol):
    """The protocol of one kind of engines. A call raises client.EngineError where an answer is not
    as it says."""

    def facts(self) -> Facts: ...

    def numerics(self) -> Numerics: ...

    def reset_cache(self) -> None:
        """Empties the prefix cache of an engine without requests."""

    def generate(
        self, id: str, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, seed: int, top_n: int,
        adapter: str | None,
    ) -> Answer:
        """Samples after `tokens`; waits for the end."""

    def abort(self, ids: Sequence[str]) -> None:
        """Ends requests, which answer with what they have."""

    def pause(self) -> None:
        """Keeps running requests where they are until `resume`."""

    def resume(self) -> None: ...

    def load(self, path: str, version: int) -> None:
        """Reads weights from a folder, names their version, and drops every key of older ones. Call
        it between `pause` and `resume`."""

    def load_adapter(self, name: str, path: str, older: str | None) -> None:
        """Reads an adapter in place of an older one."""

    def version(self) -> int | None:
        """Returns the version that the last `load` named, None before any."""

    def close(self) -> None: ...
