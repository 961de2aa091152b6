"""What the driver asks of an engine, whatever its kind."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external.client import EngineError

Pair = tuple[int, float]  # a token and its log-prob


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
      routes: [m,L,k] experts of the tokens of prompt and answer; None where the engine says none.
      kept: for each token the ids with positive probability; None where the engine says none.
    """

    tokens: np.ndarray
    logps: np.ndarray
    stop_reason: str
    spans: Sequence[tuple[str, int, int]] | None
    top_ids: np.ndarray
    top_logps: np.ndarray
    routes: np.ndarray | None = None
    kept: Sequence[Sequence[int]] | None = None


class Kind(Protocol):
    """The protocol of one kind of engines. A call raises client.EngineError where an answer is not
    as it says.

    Attributes:
      filters_logps: whether log-probs are those after top_k, top_p and min_p.
    """

    filters_logps: bool

    def facts(self) -> Facts: ...

    def numerics(self) -> Numerics: ...

    def reset_cache(self) -> None:
        """Empties the prefix cache of an engine without requests."""

    def generate(
        self, id: str, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, seed: int | None,
        top_n: int, adapter: str | None,
    ) -> Answer:
        """Samples after `tokens`, by the engine's own seed where there is none; waits for the end."""

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

    def tokenize(self, text: str) -> list[int] | None:
        """Returns the ids of a text without special tokens, None where the engine does not say."""


def part(answer: Any, *names: str) -> Mapping[str, Any]:
    """Returns an object within an answer, {} where there is none."""
    for name in names:
        answer = answer.get(name) if isinstance(answer, Mapping) else None
    return answer if isinstance(answer, Mapping) else {}


def read(
    where: str, tokens: Sequence[int], own: Sequence[Pair], likely: Sequence[Sequence[Pair]],
    top_n: int, stop_reason: str, spans: Sequence[tuple[str, int, int]] | None,
    routes: np.ndarray | None = None, kept: Sequence[Sequence[int]] | None = None,
) -> Answer:
    """Returns the answer of tokens. EngineError where one of them has no log-prob.

    Args:
      where: of the answer, for messages.
      own: each token and its log-prob.
      likely: the likely tokens at each position, of which the first `top_n` are kept.
    """
    for what, found in {"log-probs": own, "lists of likely tokens": likely}.items():
        if len(found) != len(tokens):
            raise EngineError(f"{where}: {len(tokens)} tokens and {len(found)} {what}")
    ids = np.full((len(tokens), top_n), -1, np.int32)
    logps = np.full((len(tokens), top_n), -np.inf, np.float32)
    for i, (id, logp) in enumerate(own):
        if id != tokens[i]:
            raise EngineError(f"{where}: token {i} is {tokens[i]} and its log-prob is of {id}")
        if not isinstance(logp, (int, float)):
            raise EngineError(f"{where}: the log-prob of token {i} is {logp}")
        ranked = sorted(likely[i], key=lambda pair: -pair[1])[:top_n]
        for k, pair in enumerate(ranked):
            ids[i, k], logps[i, k] = pair
    return Answer(
        np.array(tokens, np.int32), np.array([logp for _, logp in own], np.float32), stop_reason,
        spans, ids, logps, routes, kept,
    )
