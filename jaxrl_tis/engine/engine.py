"""The rollout engine: prefill, insert, generate over fixed slots and pages of keys and values.

A prompt is prefilled in chunks into pages that its samples share; its last token is then the first
input of decode. So every token, the first included, is drawn by one and the same decode program.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine import cache, sampling
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.protocol import Chunk, Draw, Insertion, ResultTokens
from jaxrl_tis.engine.records import MAX_STOP_IDS, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.shards import Shards
from jaxrl_tis.engine.weights import Weights
from jaxrl_tis.fields import DRAWN
from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.logprob import token_logprob
from jaxrl_tis.models import invariant, placement, transformer, transforms
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout, single_device

LOGPROB_CHUNK = 256  # positions of prompts whose logits are alive at a time
BLOCK_TOKENS = 256  # from so many on a CPU takes no less time for each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode state that belongs to the slots, arrays with leading axis B.

    Attributes:
      token, position: [B] int32, last token (not yet in the cache) and its absolute position.
      remaining: [B] int32 tokens that may still be sampled; 0 is a finished or free slot.
      cached: [B] int32 positions whose keys lay in the pages when the sequence came.
      key: [B,2] uint32, see sampling.row_keys.
      stop_ids: [B,n] int32 padded with -1.
      rows: sampling parameters.
      penalties: and tokens seen; None in an engine without.
    """

    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    cached: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    rows: SamplingRows
    penalties: Penalties | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    cache: Any
    slots: Slots


class Engine:
    """Jitted programs of one model on fixed slots; holds no parameters and no cache.

    Args:
      model: the model.
      config: sizes, formats and what is recorded.
      layout: mesh and rules; None runs on one device.
    """

    max_stop_ids = MAX_STOP_IDS

    def __init__(self, model: ModelConfig, config: EngineConfig, layout: Layout | None = None):
        self.model, self.config = model, config
        self.layout = layout or single_device()
        self.slots, self.max_length, self.steps = config.slots, config.max_length, config.steps
        self.page_size, self.pages_per_slot = config.page_size, config.pages_per_slot
        self.prefill_batch, self.prefill_chunk = config.prefill_batch, config.whole_chunk
        self.top_n, self.num_kept = config.top_n, config.num_kept
        self.shards, self.vocab_size = self.layout.shards, model.vocab_size
        self.num_pages = config.num_pages
        if config.num_pages is None:
            self.num_pages = self.slots // self.shards * self.pages_per_slot + 2
        self.num_penalised = model.vocab_size if config.penalties else 0
        self.num_logits = model.vocab_size if config.records_logits else 0
        self.quant_id = config.recipe.id if config.quantization != "none" else config.dtype
        self._check_sizes()
        self.program = transformer.Program(
            dtype=config.dtype, highest_head=config.highest_head, layout=self.layout,
            numerics=config.numerics,
        )
        if self.program.is_invariant:
            self._check_invariant()
        self._injection = config.injected
        self._weights = Weights(
            model, config.recipe, self.program, config.unroll, self._injection.weights
        )
        options = dict(compiler_options=self.program.compiler_options)
        self._shardings = self._state_shardings()
        self._init = jax.jit(self._empty_state, out_shardings=self._shardings)
        rows, row = self.layout.sharding(("batch", None)), self.layout.sharding(("batch",))
        self._prefill = jax.jit(
            self._prefill_rows, in_shardings=(None, None, rows, row, row, rows, None),
            donate_argnums=(1,), **options,
        )
        self._prefill_scored = jax.jit(
            self._prefill_scored_rows, in_shardings=(None, None, rows, row, row, rows, rows),
            donate_argnums=(1,), **options,
        )
        self._insert = jax.jit(self._insert_rows, donate_argnums=(0,))
        self._generate = jax.jit(self._decode, donate_argnums=(1,), **options)
        self._verify = jax.jit(self._decode_drafts, donate_argnums=(1,), **options)

    def load(
        self, params: transformer.Params, noise: transforms.Noise | None = None
    ) -> transformer.Params:
        """Turns the learner's parameters into serving parameters, see weights.Weights."""
        return self._weights.load(params, noise)

    @property
    def serving_shardings(self) -> Any:
        """Where serving parameters lie, in their tree."""
        return self._weights.shardings

    def shardings_in(self, layout: Layout) -> Any:
        """Returns where the learner, in its layout, has serving parameters before they move."""
        return self._weights.shardings_in(layout)

    def abstract_params(self) -> Any:
        """Returns the shapes of serving parameters, and where they lie."""
        params = self._abstract_policy()
        shapes, _ = jax.eval_shape(self._weights.loader(params), params)
        return _abstract(shapes, self._weights.shardings)

    def _abstract_policy(self) -> Any:
        """Returns the shapes of the learner's parameters in the serving layout."""
        return _abstract(
            transformer.abstract_params(self.model), placement.shardings(self.layout, self.model)
        )

    def _check_sizes(self) -> None:
        for name, count in (("slots", self.slots), ("prefill_batch", self.prefill_batch)):
            if count % self.shards:
                raise ValueError(
                    f"engine.{name}={count} cannot be cut into the {self.shards} data shards of "
                    f"mesh {dict(self.layout.mesh.shape)}; make it a multiple"
                )
        if self.num_pages < self.pages_per_slot + 2:
            raise ValueError(
                f"{self.num_pages} pages of {self.page_size} positions cannot hold a sequence of "
                f"{self.max_length}; give engine.num_pages at least {self.pages_per_slot + 2}"
            )
        vocab = self.vocab_size // Shards.of(self.layout).count
        if self.top_n > vocab:
            raise ValueError(
                f"top_n = {self.top_n} tokens of every draw, of the {vocab} that a device has"
            )

    def _check_invariant(self) -> None:
        invariant.check(self.model, dict(self.layout.mesh.shape), self.config.recipe.scheme)
        if self.page_size != tiles.PAGE:
            raise ValueError(
                f"numerics='invariant' attends to pages of {tiles.PAGE} positions, "
                f"engine.page_size is {self.page_size}"
            )
        if self.config.cache_dtype not in (self.config.dtype, "float32"):
            raise ValueError(
                f"numerics='invariant' needs keys as they were computed, in {self.config.dtype}; "
                f"engine.cache_dtype is {self.config.cache_dtype}"
            )

    # Prefill

    def bucket(self, length: int) -> int:
        """Returns the padded length of a chunk: the next of 1, 1.5, 2, 3, 4, 6, 8, ... pages."""
        pages, needed = 1, -(-length // self.page_size)
        while pages < needed:
            pages = pages * 3 // 2 if pages & (pages - 1) == 0 and pages > 1 else -(-pages * 4 // 3)
        return min(pages * self.page_size, self.prefill_chunk)

    def prefill(self, params, state: DecodeState, chunks: list[Chunk]) -> DecodeState:
        """Writes the keys of the chunks, of which each shard has at most prefill_batch / shards."""
        _, arrays = self._chunk_rows(chunks)
        most = max(np.bincount([c.shard for c in chunks]))
        blocks = -(-most // self._block_rows(arrays[0].shape[1]))
        return self._prefill(params, state, *arrays, np.int32(blocks))

    def _block_rows(self, length: int) -> int:
        """Returns how many rows of a shard a prefill computes at a time, a divisor of all that it
        has. On CPU so many that they have BLOCK_TOKENS tokens: prompts that come late come alone,
        and blocks without one cost nothing. Every prompt is computed in a block of this size,
        whatever its company, so that this changes no bit."""
        rows = self.prefill_batch // self.shards
        if self.layout.platform != "cpu":
            return rows
        return next(n for n in range(1, rows + 1) if rows % n == 0 and n * length >= BLOCK_TOKENS
                    or n == rows)

    def prefill_scored(
        self, params, state: DecodeState, chunks: list[Chunk]
    ) -> tuple[DecodeState, list[np.ndarray]]:
        """Prefills, and returns the log-probs of the targets of each chunk, under the model's own
        logits at temperature 1."""
        rows, (tokens, *arrays) = self._chunk_rows(chunks)
        targets = np.zeros(tokens.shape, np.int32)
        for row, chunk in zip(rows, chunks):
            targets[row, : len(chunk.targets)] = chunk.targets
        targets = self.layout.put(targets, ("batch", None))
        state, logps = self._prefill_scored(params, state, tokens, *arrays, targets)
        logps = np.asarray(logps)
        return state, [logps[row, : len(chunk.tokens)] for row, chunk in zip(rows, chunks)]

    def _chunk_rows(self, chunks: list[Chunk]) -> tuple[list[int], tuple]:
        """Lays chunks into the rows of a prefill: which row each has, and (tokens, starts, lengths,
        table)."""
        per_shard = self.prefill_batch // self.shards
        length = self.bucket(max(len(c.tokens) for c in chunks))
        tokens = np.zeros((self.prefill_batch, length), np.int32)
        starts, lengths = (np.zeros(self.prefill_batch, np.int32) for _ in range(2))
        table = np.zeros((self.prefill_batch, self.pages_per_slot), np.int32)
        taken, used = [0] * self.shards, []
        for chunk in chunks:
            row = chunk.shard * per_shard + taken[chunk.shard]
            taken[chunk.shard] += 1
            used.append(row)
            tokens[row, : len(chunk.tokens)] = chunk.tokens
            starts[row], lengths[row] = chunk.start, len(chunk.tokens)
            table[row, : len(chunk.pages)] = chunk.pages
        rows = lambda x: self.layout.put(x, ("batch",) + (None,) * (x.ndim - 1))
        return used, tuple(map(rows, (tokens, starts, lengths, table)))

    def _prefill_rows(self, params, state, *arrays_and_blocks) -> DecodeState:
        """Prefills the first blocks of the rows of each shard."""
        *arrays, blocks = arrays_and_blocks
        size = self._block_rows(arrays[0].shape[1])
        if size == self.prefill_batch // self.shards:
            return self._read(params, state, *arrays)[0]

        def block(i, x):
            rows = x.reshape(self.shards, -1, *x.shape[1:])
            rows = jax.lax.dynamic_slice_in_dim(rows, i * size, size, axis=1)
            return rows.reshape(-1, *x.shape[1:])

        read = lambda i, state: self._read(params, state, *[block(i, x) for x in arrays])[0]
        return jax.lax.fori_loop(0, blocks, read, state)

    def _prefill_scored_rows(self, params, state, *rows_and_targets):
        *rows, targets_rt = rows_and_targets
        state, x_rtd = self._read(params, state, *rows)
        logp_rt = token_logprob(
            transformer.output_head(params, self.program), x_rtd, targets_rt,
            jnp.ones(targets_rt.shape), LOGPROB_CHUNK, layout=self.layout,
            numerics=self.program.numerics,
        ).logp
        return state, self._read_by_all(logp_rt)

    def _read(self, params, state, tokens_rt, starts_r, lengths_r, table_rp):
        """Returns (the state with the keys of the rows, their hidden states)."""
        positions_rt = starts_r[:, None] + jnp.arange(tokens_rt.shape[1])[None]
        numerics = self.program.numerics
        attend = cache.fill(starts_r, lengths_r, table_rp, self.layout, numerics)
        x_rtd, kv = transformer.hidden(
            params, self.model, self.program, tokens_rt, positions_rt, attend, state.cache
        )
        return DecodeState(kv, state.slots), x_rtd

    # Insert

    def init_state(self) -> DecodeState:
        """Makes empty slots and pages, of which each device holds its own part."""
        return self._init()

    def _empty_state(self) -> DecodeState:
        b = self.slots
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        params = [SamplingParams()] * b
        penalties = None
        if self.num_penalised:
            penalties = Penalties.of(params).seen(
                zeros((b, 0)), zeros(b), zeros(b), self.num_penalised, self.layout
            )
        kv = cache.empty(
            self.model, self.shards * self.num_pages, self.page_size, self.config.cache_dtype,
            self.config.unroll,
        )
        slots = Slots(
            zeros(b), zeros(b), zeros(b), zeros(b), jnp.zeros((b, 2), jnp.uint32),
            jnp.full((b, self.max_stop_ids), -1, jnp.int32),
            *jax.tree.map(jnp.asarray, (SamplingRows.of(params), penalties)),
        )
        return DecodeState(kv, slots)

    def _state_shardings(self) -> DecodeState:
        """Cuts slots and pages over the data axes, and key/value heads over the tensor axis."""
        state = jax.eval_shape(self._empty_state)
        of_slots = lambda x: ("batch",) + (None,) * (x.ndim - 1)
        place = lambda tree, axes: jax.tree.map(lambda x: self.layout.sharding(axes(x)), tree)
        slots = place(state.slots, of_slots)
        if self.num_penalised:
            slots = dataclasses.replace(slots, penalties=Penalties.places(self.layout.sharding))
        return DecodeState(place(state.cache, cache.axes), slots)

    def insert(self, state: DecodeState, rows: dict[int, Insertion]) -> DecodeState:
        """Puts sequences into slots."""
        return self._insert(state, *self._insertion(rows))

    def _insertion(self, rows: dict[int, Insertion]) -> tuple:
        """Collects what an insert writes: the new content of the slots, their seeds and hashes, the
        copies of pages, which slots are new, and the tokens that penalties count, as (tokens, how
        many are prompt, how many there are)."""
        b = self.slots
        is_new = np.zeros(b, bool)
        token, position, remaining, cached = (np.zeros(b, np.int32) for _ in range(4))
        seeds, hashes = (np.zeros(b, np.uint32) for _ in range(2))
        stop_ids = np.full((b, self.max_stop_ids), -1, np.int32)
        copies = np.zeros((2, b), np.int32)
        tokens = np.zeros((b, self.max_length if self.num_penalised else 0), np.int32)
        prompts = np.zeros(b, np.int32)
        params = [SamplingParams()] * b
        for slot, row in rows.items():
            sampling, is_new[slot] = row.request.sampling, True
            token[slot], position[slot] = row.tokens[-1], len(row.tokens) - 1
            remaining[slot], cached[slot] = row.remaining, row.cached
            seeds[slot], hashes[slot] = row.request.seed & 0xFFFFFFFF, row.request.hash
            stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids
            copies[:, slot] = row.copy
            params[slot], prompts[slot] = sampling, len(row.request.prompt)
            if self.num_penalised:
                tokens[slot, : len(row.tokens)] = row.tokens
        penalties = Penalties.of(params) if self.num_penalised else None
        new = Slots(
            token, position, remaining, cached, None, stop_ids, SamplingRows.of(params), penalties
        )
        return new, seeds, hashes, *copies, is_new, (tokens, prompts, position + 1)

    def _insert_rows(
        self, state, new, seeds_b, hashes_b, sources_b, targets_b, is_new_b, seen
    ) -> DecodeState:
        new = dataclasses.replace(new, key=sampling.row_keys(seeds_b, hashes_b))
        if self.num_penalised:
            penalties = new.penalties.seen(*seen, self.num_penalised, self.layout)
            new = dataclasses.replace(new, penalties=penalties)

        def choose(old, fresh):
            return jnp.where(is_new_b.reshape((-1,) + (1,) * (old.ndim - 1)), fresh, old)

        slots = jax.tree.map(choose, state.slots, new)
        return DecodeState(self._copy_pages(state.cache, sources_b, targets_b), slots)

    def _copy_pages(self, kv, sources_b, targets_b):
        """Copies pages on every device, for the slots that it holds."""
        pools = jax.tree.map(lambda sharding: sharding.spec, self._shardings.cache)
        slots = self.layout.sharding(("batch",)).spec
        is_pool = lambda x: isinstance(x, (cache.KV, cache.StackedKV))
        copy = lambda kv, sources, targets: jax.tree.map(
            lambda pool: pool.copy(sources, targets), kv, is_leaf=is_pool
        )
        return self.layout.shard(copy, (pools, slots, slots), pools)(kv, sources_b, targets_b)

    def release(self, state: DecodeState, slots: list[int]) -> DecodeState:
        """Stops the given slots, so that they are free for the next insert."""
        is_left = np.isin(np.arange(self.slots), slots)
        remaining = jnp.where(is_left, 0, state.slots.remaining)
        return DecodeState(state.cache, dataclasses.replace(state.slots, remaining=remaining))

    # Generate

    def generate(
        self, params, state: DecodeState, table: np.ndarray, shift: np.ndarray
    ) -> tuple[DecodeState, ResultTokens]:
        """Draws up to `steps` tokens for every running slot, whose pages must have room for
        them."""
        return self._generate(params, state, table, shift)

    def verify(
        self, params, state: DecodeState, drafts: np.ndarray, counts: np.ndarray,
        table: np.ndarray, shift: np.ndarray,
    ) -> tuple[DecodeState, ResultTokens]:
        """Runs one pass over the last token of every running slot and its draft, `counts` [slots]
        tokens of `drafts` [slots, n]. It draws a token after each as long as the draft says the
        same, so at least one and at most counts + 1; in the result K is n + 1."""
        return self._verify(params, state, drafts, counts, table, shift)

    def _decode(self, params, state: DecodeState, table_bp, shift_b):
        nothing = jnp.zeros((self.slots, 0), jnp.int32), jnp.zeros(self.slots, jnp.int32)

        def running(carry):
            i, state, _ = carry
            return (i < self.steps) & jnp.any(state.slots.remaining > 0)

        def body(carry):
            i, state, rows = carry
            state, row = self._pass(params, state, *nothing, table_bp, shift_b)
            write = lambda buffer, new: buffer.at[i].set(new[:, 0])
            return i + 1, state, jax.tree.map(write, rows, row)

        _, state, rows = jax.lax.while_loop(running, body, (0, state, self._empty_draws()))
        return state, self._result(state, *rows)

    def _decode_drafts(self, params, state, drafts_bg, counts_b, table_bp, shift_b):
        state, rows = self._pass(params, state, drafts_bg, counts_b, table_bp, shift_b)
        return state, self._result(state, *jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows))

    def _result(self, state: DecodeState, drawn: Draw, valid) -> ResultTokens:
        fields = {name: getattr(drawn, name) for name in DRAWN}
        return self._read_by_all(
            ResultTokens(valid=valid, remaining=state.slots.remaining, **fields)
        )

    def _read_by_all(self, result: Any) -> Any:
        """Lays what the schedulers of all processes read whole onto every device."""
        if not self.layout.is_shared:
            return result
        return jax.lax.with_sharding_constraint(result, self.layout.replicated())

    def _empty_draws(self) -> tuple[Draw, jax.Array]:
        """Makes zeros in the place of the draws of a whole call, and of the booleans that say which
        of them count."""
        shape = self.steps, self.slots

        def zeros(field):
            width = (getattr(self, field.width),) if field.width else ()
            return None if 0 in width else jnp.zeros((*shape, *width), field.dtype)

        return Draw(**{name: zeros(f) for name, f in DRAWN.items()}), jnp.zeros(shape, bool)

    def _pass(self, params, state: DecodeState, drafts_bg, counts_b, table_bp, shift_b):
        """Draws a token after the last one and after each drafted one, [B,T] with T = g + 1, as far
        as the drafted tokens are those that are drawn. Returns (state, (draws, which of them
        count))."""
        slots, numerics = state.slots, self.program.numerics
        width = drafts_bg.shape[1] + 1
        step_t, is_running = jnp.arange(width)[None], slots.remaining > 0
        limit_b = jnp.where(is_running, jnp.minimum(counts_b + 1, slots.remaining), 0)
        is_live_bt = step_t < limit_b[:, None]
        tokens_bt = jnp.concatenate([slots.token[:, None], drafts_bg], axis=1)
        position_bt = slots.position[:, None] + step_t
        index_bt = jnp.where(is_live_bt, position_bt - shift_b[:, None], 0)
        is_written_bt = is_live_bt & (position_bt >= slots.cached[:, None])
        attend = cache.append(index_bt, is_written_bt, table_bp, self.layout, numerics)
        x_btd, kv = transformer.hidden(
            params, self.model, self.program, tokens_bt, position_bt, attend, state.cache
        )
        rows = lambda x: x.reshape(-1, *x.shape[2:])
        each = lambda x: jnp.repeat(x, width, axis=0)
        logits_mv = transformer.head_logits(params, self.program, rows(x_btd))
        logits_mv = self._injection.logits(logits_mv, rows(position_bt + 1))
        sampling_m = jax.tree.map(each, slots.rows)
        penalties_m = self._penalties_along(slots.penalties, drafts_bg, is_live_bt)
        drawn_m = sampling.sample(
            logits_mv, sampling_m, each(slots.key), rows(position_bt + 1), self.layout,
            penalties=penalties_m, top_n=self.top_n, num_kept=self.num_kept, numerics=numerics,
        )
        if self.num_logits:
            logits_mv = sampling.distribution(logits_mv, sampling_m, penalties_m)
            drawn_m = dataclasses.replace(drawn_m, logits=logits_mv)
        drawn = jax.tree.map(lambda x: x.reshape(self.slots, width, *x.shape[1:]), drawn_m)
        slots, is_valid_bt = self._advance(slots, drawn.tokens, drafts_bg, is_live_bt)
        return DecodeState(kv, slots), (drawn, is_valid_bt)

    def _penalties_along(self, penalties: Penalties | None, drafts_bg, is_live_bt):
        """Returns the penalties of the rows [B*T] of a pass: those after each token of the
        draft."""
        if penalties is None:
            return None
        along = [penalties]
        for t in range(drafts_bg.shape[1]):
            along.append(along[-1].draw(drafts_bg[:, t], is_live_bt[:, t + 1], self.layout))
        rows = lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:])
        return jax.tree.map(rows, *along)

    def _advance(self, slots: Slots, drawn_bt, drafts_bg, is_live_bt) -> tuple[Slots, jax.Array]:
        """Moves the slots behind those draws [B,T] that count: all up to the first that is a stop
        id or differs from the draft."""
        is_stop_bt = jnp.any(drawn_bt[..., None] == slots.stop_ids[:, None], axis=-1)
        goes_on_bg = (drawn_bt[:, :-1] == drafts_bg) & ~is_stop_bt[:, :-1] & is_live_bt[:, 1:]
        goes_on_bg = jnp.cumprod(goes_on_bg, axis=1, dtype=jnp.int32).astype(bool)
        is_valid_bt = jnp.concatenate([is_live_bt[:, :1], goes_on_bg], axis=1)
        count_b = jnp.sum(is_valid_bt, axis=1)
        last = lambda x_bt: jnp.take_along_axis(
            x_bt, jnp.maximum(count_b - 1, 0)[:, None], axis=1
        )[:, 0]
        is_ended = last(is_stop_bt) | (count_b == 0)
        remaining = jnp.where(is_ended, 0, slots.remaining - count_b)
        penalties = slots.penalties
        if penalties is not None:
            for t in range(drawn_bt.shape[1]):
                penalties = penalties.draw(drawn_bt[:, t], is_valid_bt[:, t], self.layout)
        slots = dataclasses.replace(
            slots,
            penalties=penalties,
            token=jnp.where(count_b > 0, last(drawn_bt), slots.token),
            position=slots.position + jnp.where(remaining > 0, count_b, 0),
            remaining=remaining,
        )
        return slots, is_valid_bt

    # Programs from shapes alone

    def programs(self, params: transformer.Params | None = None) -> dict[str, tuple[Any, tuple]]:
        """Returns every jitted program with abstract arguments: `fn.lower(*args)` allocates
        nothing.

        Args:
          params: the learner's abstract parameters with their shardings; None takes float32 in the
            serving layout.

        Returns: {"load", "prefill", "insert", "decode", "verify" if there are drafts} -> (jitted
        function, arguments). Prompts are of the largest bucket, drafts as long as they may be.
        """
        if params is None:
            params = self._abstract_policy()
        load = self._weights.loader(params)
        serving = _abstract(jax.eval_shape(load, params)[0], self._weights.shardings)
        state = _abstract(jax.eval_shape(self._empty_state), self._shardings)
        r, table = self.prefill_batch, (self.pages_per_slot,)
        host = lambda *shape: np.zeros(shape, np.int32)
        rows = host(r, self.prefill_chunk), host(r), host(r), host(r, *table)
        pages = host(self.slots, *table), host(self.slots)
        drafts = host(self.slots, self.config.max_draft), host(self.slots)
        found = {
            "load": (load, (params,)),
            "prefill": (self._prefill, (serving, state, *rows, host())),
            "insert": (self._insert, (state, *self._insertion({}))),
            "decode": (self._generate, (serving, state, *pages)),
        }
        if self.config.max_draft:
            found["verify"] = self._verify, (serving, state, *drafts, *pages)
        return found


def _abstract(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
