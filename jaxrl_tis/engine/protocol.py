"""What passes between scheduler and engine, and what the scheduler asks of any engine."""

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_tis.engine.records import Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a sequence that is to be prefilled: its tokens from position `start` on, which
    begins a page, and the pages of the sequence so far, in the shard of the cache that holds it.
    The pages before `start` may be those that an earlier chunk of the same call writes: each layer
    writes the keys of all chunks, or of those before, before it reads them. `targets` are the
    tokens that follow each of its own, where their log-probs are asked for; after the last token of
    the sequence, any."""

    shard: int
    tokens: np.ndarray
    start: int
    pages: list[int]
    targets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Insertion:
    """What goes into a slot: a sequence whose first `cached` positions lie in the slot's pages, of
    which the page `copy[1]` is to become a copy of the page `copy[0]` (0, 0: none)."""

    request: Request
    tokens: np.ndarray
    remaining: int
    cached: int
    copy: tuple[int, int] = (0, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Sampled tokens and their record, see `fields.DRAWN`: arrays with the same leading axes.

    Attributes:
      tokens: int32.
      logp_behav: log-probability under what it was drawn from: penalised, filtered, renormalised.
      logp_raw: log-probability under the model's own logits at the same temperature (1 if greedy),
        without filters, penalties and bias; so that, where nothing is penalised,
        logp_raw - logp_behav is the log of the kept mass.
      entropy: nats, of the distribution it was drawn from.
      logits: [...,V] log-probs of that distribution; None unless recorded, as are all that follow.
      top_ids, top_logps: [...,n] the likeliest tokens, see capture.top.
      kept: [...,n] int32 tokens that could be drawn, see capture.support.
    """

    tokens: jax.Array
    logp_behav: jax.Array
    logp_raw: jax.Array
    entropy: jax.Array
    logits: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logps: jax.Array | None = None
    kept: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultTokens(Draw):
    """The tokens of one `generate` or `verify` call and their record, arrays [K,B].

    Attributes:
      valid: [K,B] bool; where it is False, the entries of all others mean nothing.
      remaining: [B] the count after the call: a slot that drew tokens and has 0 has finished.
    """

    valid: jax.Array
    remaining: jax.Array


class EngineProtocol(Protocol):
    """The interface between scheduler and engine. Tests implement it with an engine made of
    arithmetic.

    Slots, prefill rows and pages are cut into `shards` equal parts in order; a sequence lives in
    one of them. `table` [slots, n] holds the pages of each slot in order, `shift` [slots] how many
    of its positions were evicted. Requests may change the logits of the first `num_penalised`
    tokens, all or none. Results hold `num_logits`, `top_n` and `num_kept` numbers of a draw beside
    its token.
    """

    slots: int
    shards: int
    max_length: int
    max_stop_ids: int
    vocab_size: int
    num_penalised: int
    num_logits: int
    top_n: int
    num_kept: int
    steps: int
    page_size: int
    num_pages: int
    prefill_batch: int
    prefill_chunk: int
    quant_id: str

    def bucket(self, length: int) -> int: ...
    def init_state(self) -> Any: ...
    def prefill(self, params: Any, state: Any, chunks: list[Chunk]) -> Any: ...
    def prefill_scored(
        self, params: Any, state: Any, chunks: list[Chunk]
    ) -> tuple[Any, list[np.ndarray]]: ...
    def insert(self, state: Any, rows: dict[int, Insertion]) -> Any: ...
    def release(self, state: Any, slots: list[int]) -> Any: ...
    def generate(
        self, params: Any, state: Any, table: np.ndarray, shift: np.ndarray
    ) -> tuple[Any, ResultTokens]: ...
    def verify(
        self, params: Any, state: Any, drafts: np.ndarray, counts: np.ndarray, table: np.ndarray,
        shift: np.ndarray,
    ) -> tuple[Any, ResultTokens]: ...
