"""The interface between scheduler and engine, and the data that they exchange."""

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_tis.engine.records import Request

Array = Any  # of jax on the device, of numpy on the host


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a sequence to prefill.

    Attributes:
      shard: shard of the cache that holds the sequence.
      tokens: [n] the tokens from position `start` on.
      start: a multiple of the page size.
      pages: the pages of the sequence up to the end of the chunk. Pages before `start` may be
        written by an earlier chunk of the same call: each layer writes the keys of the chunks
        before it reads them.
      targets: [n] the next token after each of `tokens`, for log-probs of the prompt; any value
        after the last token of the sequence. None: no log-probs.
    """

    shard: int
    tokens: np.ndarray
    start: int
    pages: list[int]
    targets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Insertion:
    """A sequence to insert into a slot. Its first `cached` positions are in the slot's pages. Page
    `copy[1]` of these becomes a copy of page `copy[0]`; (0, 0): no copy."""

    request: Request
    tokens: np.ndarray
    remaining: int
    cached: int
    copy: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """What a prefill call returns beside the state, of its chunks in order.

    Attributes:
      logps: [n] log-probs of the targets of each chunk; None where it has none.
      routes: [R,T,L,k] the experts of each token in each layer that has some, on the device; None
        unless recorded.
      rows: the row of each chunk in `routes`.
    """

    logps: list[np.ndarray] | None = None
    routes: Any = None
    rows: list[int] = dataclasses.field(default_factory=list)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Sampled tokens and the recorded fields of each (`fields.DRAWN`), with equal leading axes.

    Attributes:
      tokens: int32.
      logp_behav: log-prob under the sampling distribution: penalised, filtered, renormalised.
      logp_raw: log-prob under the model's own logits at the same temperature (1 if greedy), without
        filters, penalties, bias and teacher. Without penalties and teacher, logp_raw - logp_behav is
        the log of the mass that the filters kept.
      entropy: nats, of the sampling distribution.
      logits: [...,V] log-probs of that distribution. This field and the next are None unless
        recorded.
      top_ids, top_logps: [...,n] the likeliest tokens, see capture.top.
      kept: [...,n] int32 tokens with positive probability, see capture.support.
      logp_student: [...,1] log-prob under the policy's logits alone, where a teacher's are mixed in:
        `logp_raw`, and over `kept` where that is recorded.
    """

    tokens: Array
    logp_behav: Array
    logp_raw: Array
    entropy: Array
    logits: Array | None = None
    top_ids: Array | None = None
    top_logps: Array | None = None
    kept: Array | None = None
    logp_student: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultTokens(Draw):
    """The tokens that one `generate` or `verify` call sampled, arrays [K,B].

    Attributes:
      valid: [K,B] bool; where it is False, the other fields have no meaning.
      remaining: [B] tokens left after the call; 0 in a slot that sampled tokens: it has finished.
      routes: [K,B,L,k] the experts of the token before each sampled one, the input of its pass;
        None unless recorded.
      page_mass: [B,G,P] attention to each page of a slot's table, summed over the layers of a group, heads
        and the queries of valid tokens; None unless recorded.
    """

    valid: Array
    remaining: Array
    routes: Array | None = None
    page_mass: Array | None = None


class EngineProtocol(Protocol):
    """The methods and sizes that the scheduler uses. Tests drive it with an engine of arithmetic.

    Slots, prefill rows and pages are cut into `shards` equal parts in order, and a sequence lives
    in one of them. `table` [slots, n] holds the pages of each slot in order, or [slots, G, n] those of each
    group of layers; `shift` [slots] the number of its evicted positions. Requests may change the logits of
    the first `num_penalised` tokens of the vocabulary, which are all or none. Results have `num_logits`, `top_n` and
    `num_kept` entries per sampled token, and routes of `route_shape` (layers, experts) with ids
    below `num_experts`; (0, 0) records none. `non_finite` says where the values of a sequence stop
    being finite. With `num_teachers` = 1 requests may have an alpha. `weighs_pages`: results have
    `page_mass`.
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
    num_teachers: int
    weighs_pages: bool
    route_shape: tuple[int, int]
    num_experts: int
    steps: int
    page_size: int
    num_pages: int
    prefill_batch: int
    prefill_chunk: int
    quant_id: str

    def bucket(self, length: int) -> int: ...
    def non_finite(self, params: Any, tokens: np.ndarray) -> str: ...
    def init_state(self) -> Any: ...
    def prefill(
        self, params: Any, state: Any, chunks: list[Chunk]
    ) -> tuple[Any, Prefilled]: ...
    def insert(self, state: Any, rows: dict[int, Insertion]) -> Any: ...
    def release(self, state: Any, slots: list[int]) -> Any: ...
    def generate(
        self, params: Any, state: Any, table: np.ndarray, shift: np.ndarray
    ) -> tuple[Any, ResultTokens]: ...
    def verify(
        self, params: Any, state: Any, drafts: np.ndarray, counts: np.ndarray, table: np.ndarray,
        shift: np.ndarray,
    ) -> tuple[Any, ResultTokens]: ...
