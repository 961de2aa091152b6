"""Our engine behind JetStream's interface, jetstream.engine.engine_api.Engine of google-jetstream
0.2.2. `./launch/jetstream.sh` installs that package and tests this module with it.

`prefill` fills the pages of a cache for one sequence (`Prefilled`), `insert` copies them to the fixed
pages of a slot, and `generate` samples every token, including the first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine import cache
from jaxrl_tis.engine import engine as ours
from jaxrl_tis.engine.protocol import Chunk, Insertion, ResultTokens
from jaxrl_tis.engine.records import Request, SamplingParams

MIN_PREFILL, MAX_PREFILL = 16, 32768  # JetStream pads prompts to powers of two between these


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A prefilled prompt: its tokens [T] without padding, and a cache with their keys in its first
    pages."""

    tokens: Any
    cache: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The engine's state, and the number of sampled tokens of each slot [B]."""

    engine: ours.DecodeState
    lengths: jax.Array


class Engine(engine_api.Engine):
    """One of our engines, with one tokenizer and one way of sampling.

    Args:
      engine: an engine with one data shard and one step per call, because JetStream counts tokens
        per call.
      tokenizer: its end tokens end a sequence.
      sampling: sampling parameters of every request; JetStream itself stops at a client's
        max_tokens.
      seed: seed of the sampling keys; the i-th inserted request, from 0, has the id str(i).
    """

    def __init__(
        self, engine: ours.Engine, tokenizer: Tokenizer, sampling: SamplingParams, seed: int = 0
    ):
        pages = engine.slots * engine.pages_per_slot
        stop_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *sampling.stop_ids]))
        sampling = dataclasses.replace(sampling, stop_ids=stop_ids)
        problems = {
            f"steps={engine.steps}, JetStream needs 1": engine.steps != 1,
            f"{engine.shards} data shards, the adapter takes 1": engine.shards != 1,
            f"{engine.num_pages} pages, the slots need {pages + 1}": engine.num_pages <= pages,
            f"max_length={engine.max_length}, JetStream pads prompts to {MIN_PREFILL} at least":
                engine.max_length <= MIN_PREFILL,
            "no counts of tokens for the penalties of `sampling`":
                sampling.is_penalised and not engine.num_penalised,
            f"{len(stop_ids)} stop ids, at most {engine.max_stop_ids} are possible":
                len(stop_ids) > engine.max_stop_ids,
            "prompt_logprobs, and JetStream's results have no place for them":
                sampling.prompt_logprobs,
            "stop strings, which only our scheduler searches": bool(sampling.stop_strings),
            "record_routes, and JetStream's results have no place for routes":
                any(engine.route_shape),
        }
        if any(problems.values()):
            named = "; ".join(problem for problem, is_so in problems.items() if is_so)
            raise ValueError(f"this engine cannot be driven by JetStream: {named}")
        self._engine, self._tokenizer, self._seed = engine, tokenizer, seed
        self._sampling = sampling
        self._inserted = 0
        self._table = 1 + np.arange(pages, dtype=np.int32).reshape(engine.slots, -1)
        self._shift = np.zeros(engine.slots, np.int32)
        self._empty = jax.jit(self._empty_cache, out_shardings=self._cache_shardings())
        self._place = jax.jit(_place, donate_argnums=(0,))
        self._count = jax.jit(_count)

    def load_params(self, params: Any) -> Any:
        """Turns the learner's parameters into serving parameters."""
        return self._engine.load(params)

    def init_decode_state(self) -> DecodeState:
        return DecodeState(self._engine.init_state(), jnp.zeros(self._engine.slots, jnp.int32))

    def prefill(
        self, *, params: Any, existing_prefix: Prefilled | None = None, padded_tokens: Any,
        true_length: int,
    ) -> Prefilled:
        """Fills the pages of a prompt. ValueError for an empty prompt, NotImplementedError for an
        existing prefix."""
        if existing_prefix is not None:
            raise NotImplementedError(
                "chunked prefill is not supported; prefill the whole prompt in one call"
            )
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        if not 1 <= len(tokens) <= self.max_prefill_length:
            raise ValueError(f"{len(tokens)} prompt tokens; give 1 to {self.max_prefill_length}")
        pages = list(range(1, 1 + -(-len(tokens) // self._engine.page_size)))
        no_slots: Any = None
        state = ours.DecodeState(self._empty(), no_slots)
        for start in range(0, len(tokens), self._engine.prefill_chunk):
            part = tokens[start : start + self._engine.prefill_chunk]
            state, _ = self._engine.prefill(params, state, [Chunk(0, part, start, pages)])
        return Prefilled(jnp.asarray(tokens), state.cache)

    def insert(self, prefix: Prefilled, decode_state: DecodeState, slot: int) -> DecodeState:
        tokens, slot, state = np.asarray(prefix.tokens), int(slot), decode_state.engine
        request = Request(str(self._inserted), tokens, self._seed, self._sampling)
        self._inserted += 1
        remaining = min(self._sampling.max_tokens, self._engine.max_length - len(tokens))
        kv = self._place(state.cache, prefix.cache, self._table[slot, 0])
        state = self._engine.insert(
            ours.DecodeState(kv, state.slots),
            {slot: Insertion(request, tokens, remaining, cached=len(tokens))},
        )
        return DecodeState(state, decode_state.lengths.at[slot].set(0))

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Samples a token of every running slot; the entries of other slots are not valid."""
        state, result = self._engine.generate(
            params, decode_state.engine, self._table, self._shift
        )
        data, lengths = self._count(result, decode_state.lengths)
        tokens = engine_api.ResultTokens(
            data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return DecodeState(state, lengths), tokens

    def get_prefix_destination_sharding(self) -> Prefilled:
        return Prefilled(self._engine.layout.replicated(), self._cache_shardings())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Returns empty parameters: `build_tokenizer` needs none."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> "PaddingTokenizer":
        return PaddingTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest prompt: a power of two that leaves room for one sampled token."""
        longest = min(self._engine.max_length - 1, MAX_PREFILL)
        return 1 << (longest.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._engine.layout.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def _empty_cache(self) -> Any:
        engine = self._engine
        return cache.empty(
            engine.model, 1 + engine.pages_per_slot, engine.page_size,
            engine.config.cache_dtype,
            engine.config.unroll,
        )

    def _cache_shardings(self) -> Any:
        place = lambda path, x: self._engine.layout.sharding(cache.axes(path, x))
        return jax.tree_util.tree_map_with_path(place, jax.eval_shape(self._empty_cache))


def _place(pools: Any, prefix: Any, first: jax.Array) -> Any:
    """Writes the pages of a prefilled prompt, without its page 0, into the pools from page `first`
    on."""

    def place(pool, pages):
        axis = int(pool.ndim == 5)  # behind the layers, where they are stacked
        rest = jax.lax.slice_in_dim(pages, 1, None, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(pool, rest, first, axis)

    return jax.tree.map(place, pools, prefix)


def _count(result: ResultTokens, lengths_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ([B,3]: token, whether it is valid, number of sampled tokens so far; [B]: these
    numbers alone)."""
    valid_b = result.valid[0].astype(jnp.int32)
    lengths_b = lengths_b + valid_b
    return jnp.stack([result.tokens[0], valid_b, lengths_b], axis=1), lengths_b


class PaddingTokenizer(tokenizer_api.Tokenizer):
    """One of our tokenizers behind JetStream's tokenizer interface."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs) -> tuple[Any, int]:
        """Returns (padded tokens, their number without padding); see token_utils.pad_tokens."""
        has_start = kwargs.pop("is_bos", True)
        tokens = np.array(self._tokenizer.encode(s, add_special=has_start), np.int32)
        return token_utils.pad_tokens(tokens, None, self.pad_id, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self._tokenizer.eos_ids[0]

    @property
    def bos_id(self) -> int:
        """The id that JetStream begins prompts with; ValueError where the tokenizer has none."""
        if self._tokenizer.bos_id is None:
            raise ValueError("the tokenizer has no start token; give prompts as text")
        return self._tokenizer.bos_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.eos_ids)
