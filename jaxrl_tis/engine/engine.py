"""The rollout engine: prefill, insert, generate over fixed slots, and the records it writes.

A prompt of P tokens is prefilled up to its last token; the last one is the first input of decode.
So every token, the first included, is drawn by one and the same decode program.
"""

import dataclasses
import functools
import hashlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis import sharding
from jaxrl_tis.engine import cache, sampling
from jaxrl_tis.engine.sampling import SamplingParams, SamplingRows
from jaxrl_tis.models import quant, transformer, transforms
from jaxrl_tis.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to be sampled. `id` is unique among live requests and seeds its noise."""

    id: str
    prompt: np.ndarray
    seed: int
    sampling: SamplingParams

    @property
    def hash(self) -> int:
        """32 bits of the id; the sampling key is fold_in(fold_in(seed, hash), position)."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The record of one finished sequence, written as its tokens were drawn.

    Arrays have one entry per sampled token: `tokens` int32, `mask` bool (True: the policy chose
    it), `turn` int32, `logp_behav` (of the filtered, renormalised distribution), `logp_raw`
    (unfiltered), `entropy` (nats) float32, `version` int32 (weights that drew the token), and
    `logits` [n,V] float32, log-probs of the distribution it was drawn from, V = 0 unless recorded.
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
    logits: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Keys and values of R prefilled prompts (all but their last tokens), padded to one length."""

    kv: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Decode state that belongs to a slot, arrays with leading axis B.

    Attributes:
      token, position: [B] int32, last token (not yet in the cache) and its absolute position.
      remaining: [B] int32 tokens that may still be sampled; 0 is a finished or free slot.
      key: [B,2] uint32, see sampling.row_keys.
      stop_ids: [B,n] int32 padded with -1.
      rows: sampling parameters.
    """

    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    rows: SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    cache: Any
    slots: Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """What one `generate` call drew, arrays [K,B]; entries with `valid` False are meaningless.

    `logits` [K,B,V] are log-probs of the distributions drawn from, V = 0 unless recorded.
    `remaining` [B] is the count after the call: a slot that drew tokens and has 0 has finished.
    """

    tokens: jax.Array
    logp_behav: jax.Array
    logp_raw: jax.Array
    entropy: jax.Array
    logits: jax.Array
    valid: jax.Array
    remaining: jax.Array


class EngineProtocol(Protocol):
    """What the scheduler needs; the tests drive it with an engine made of arithmetic."""

    slots: int
    max_length: int
    max_stop_ids: int
    prefill_batch: int
    quant_id: str

    def bucket(self, prompt_length: int) -> int: ...
    def init_state(self) -> Any: ...
    def prefill(self, params: Any, prompts: list[np.ndarray]) -> Any: ...
    def insert(self, prefix: Any, state: Any, rows: dict[int, tuple[int, Request]]) -> Any: ...
    def release(self, state: Any, slots: list[int]) -> Any: ...
    def generate(self, params: Any, state: Any) -> tuple[Any, ResultTokens]: ...


class Engine:
    """Jitted programs of one model on fixed slots; holds no parameters and no cache.

    Args:
      config: the model.
      slots: sequences decoded together.
      max_length: prompt plus sampled tokens of a sequence.
      dtype: compute dtype; cache_dtype: dtype of keys and values.
      quantization: a name in `quant.SCHEMES`, for the layers' projections but `unquantized`.
      steps: decode steps per `generate` call.
      prefill_batch: prompts per prefill call.
      unroll: unroll the layers (faster on CPU) instead of scanning them (compiles once per layer).
      layout: mesh and rules; None runs on one device.
      records_logits: keep the whole distribution of every token; for small models.
    """

    max_stop_ids = 8

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_length: int,
        dtype: str = "float32",
        cache_dtype: str = "float32",
        quantization: str = "none",
        unquantized: tuple[str, ...] = (),
        highest_head: bool = False,
        steps: int = 8,
        prefill_batch: int = 8,
        unroll: bool = True,
        layout: sharding.Layout | None = None,
        records_logits: bool = False,
    ):
        self.config, self.slots, self.max_length = config, slots, max_length
        self.recipe = quant.Recipe(quantization, tuple(unquantized))
        self.dtype, self.cache_dtype = dtype, cache_dtype
        self.steps, self.prefill_batch, self.unroll = steps, prefill_batch, unroll
        self.layout = layout or sharding.single_device()
        self.num_logits = config.vocab_size if records_logits else 0
        self.quant_id = self.recipe.id if quantization != "none" else dtype
        self.program = transformer.Program(
            dtype=dtype, highest_head=highest_head, layout=self.layout
        )
        self._shardings = self._state_shardings()
        self._init = jax.jit(self._empty_state, out_shardings=self._shardings)
        self._load = jax.jit(self._serving_params, out_shardings=self._params_shardings())
        rows = self.layout.sharding(("batch", None))
        self._prefill = jax.jit(self._prefill_rows, in_shardings=(None, rows, rows))
        self._insert = jax.jit(self._insert_rows, donate_argnums=(1,))
        self._generate = jax.jit(self._decode, donate_argnums=(1,))

    # Weights

    def load(
        self, params: transformer.Params, noise: transforms.Noise | None = None
    ) -> transformer.Params:
        """Learner's parameters -> serving parameters: noise added to the norms, quantised once,
        cast, laid out to serve."""
        if not self._holds(params):
            params = self.layout.put_params(params, self.config)
        return self._load(params, noise)

    def _holds(self, params) -> bool:
        """Whether the parameters lie on this mesh's devices, in whatever layout."""
        devices = tuple(self.layout.mesh.devices.flat)
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
        return all(
            isinstance(s, jax.sharding.NamedSharding) and tuple(s.mesh.devices.flat) == devices
            for s in shardings
        )

    def _params_shardings(self):
        """Shardings of the parameters that `load` returns; a scale has no input axis to split."""
        scale = lambda axes: self.layout.sharding((*axes[:-2], None, axes[-1]))

        def place(path, axes):
            sharding, is_layer = self.layout.sharding(axes), path[0].key == "layers"
            if is_layer and self.recipe.covers(path[-1].key):
                return quant.QuantArray(sharding, scale(axes), scheme=self.recipe.scheme)
            return sharding

        is_axes = lambda x: isinstance(x, tuple)
        axes = transformer.logical_axes(self.config)
        if self.unroll:
            layer = {name: axes[1:] for name, axes in axes["layers"].items()}
            axes["layers"] = [layer] * self.config.num_layers
        placed = jax.tree_util.tree_map_with_path(place, axes, is_leaf=is_axes)
        return placed | {"layers": tuple(placed["layers"])} if self.unroll else placed

    def _serving_params(self, params, noise=None):
        """Casts or quantises on the learner's shards, then moves the result, layer by layer."""
        is_quant = lambda w: isinstance(w, quant.QuantArray)
        cast = lambda w: w if is_quant(w) else w.astype(self.dtype)
        serve = lambda tree: jax.tree.map(cast, tree, is_leaf=is_quant)
        if noise is not None:
            params = transforms.add_noise(params, noise)
        if self.unroll:
            params = quant.quantize_params(params, self.recipe)
            return transformer.unstack(serve(params)) | self._outer(params)
        layer = lambda w: serve(quant.quantize_params({"layers": w}, self.recipe)["layers"])
        return self._outer(params) | {"layers": jax.lax.map(layer, params["layers"])}

    def _outer(self, params):
        """The parameters outside the layers, cast; a float32 head multiplies float32 weights."""
        head = "head" if "head" in params else "embed"
        is_kept = lambda name: name == head and self.program.highest_head
        return {
            name: w.astype("float32" if is_kept(name) else self.dtype)
            for name, w in params.items() if name != "layers"
        }

    # Prefill

    def bucket(self, prompt_length: int) -> int:
        """Padded length of the prefix of a prompt: the next of 16, 24, 32, 48, 64, 96, 128, ..."""
        length = 16
        while length < prompt_length - 1:
            length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
        return min(length, self.max_length)

    def prefill(self, params: transformer.Params, prompts: list[np.ndarray]) -> Prefix:
        """Prefix of at most `prefill_batch` prompts that share a bucket; row r is prompts[r]."""
        length = self.bucket(max(len(p) for p in prompts))
        tokens = np.zeros((self.prefill_batch, length), np.int32)
        segment_ids = np.zeros((self.prefill_batch, length), np.int32)
        for r, prompt in enumerate(prompts):
            tokens[r, : len(prompt) - 1] = prompt[:-1]
            segment_ids[r, : len(prompt) - 1] = 1
        return self._prefill(params, tokens, segment_ids)

    def _prefill_rows(self, params, tokens_rt, segment_ids_rt) -> Prefix:
        positions = jnp.broadcast_to(jnp.arange(tokens_rt.shape[1])[None], tokens_rt.shape)
        attend = cache.keep_rows(segment_ids_rt, self.unroll, self.layout)
        _, kv = transformer.hidden(
            params, self.config, self.program, tokens_rt, positions, attend
        )
        return Prefix(jax.tree.map(lambda x: self.layout.constrain(x, cache.axes(x)), kv))

    # Insert

    def init_state(self) -> DecodeState:
        """Empty slots, each device holding its own part."""
        return self._init()

    def _empty_state(self) -> DecodeState:
        b = self.slots
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        rows = SamplingRows.of([SamplingParams()] * b)
        kv = cache.empty(self.config, b, self.max_length, self.cache_dtype, self.unroll)
        slots = Slots(
            zeros(b), zeros(b), zeros(b), jnp.zeros((b, 2), jnp.uint32),
            jnp.full((b, self.max_stop_ids), -1), jax.tree.map(jnp.asarray, rows),
        )
        return DecodeState(kv, slots)

    def _state_shardings(self) -> DecodeState:
        """Slots over the data axes, key/value heads [..., B,N,S,K] over tensor."""
        state = jax.eval_shape(self._empty_state)
        of_slots = lambda x: ("batch",) + (None,) * (x.ndim - 1)
        place = lambda tree, axes: jax.tree.map(lambda x: self.layout.sharding(axes(x)), tree)
        return DecodeState(place(state.cache, cache.axes), place(state.slots, of_slots))

    def insert(
        self, prefix: Prefix, state: DecodeState, rows: dict[int, tuple[int, Request]]
    ) -> DecodeState:
        """Puts requests into slots: rows maps a slot to (row of the prefix, request)."""
        return self._insert(prefix, state, *self._insertion(rows))

    def _insertion(self, rows: dict[int, tuple[int, Request]]) -> tuple:
        """New content of the slots, their seeds and hashes, and the prefix row of each or -1."""
        b = self.slots
        source = np.full(b, -1, np.int32)
        token, position, remaining = (np.zeros(b, np.int32) for _ in range(3))
        seeds, hashes = (np.zeros(b, np.uint32) for _ in range(2))
        stop_ids = np.full((b, self.max_stop_ids), -1, np.int32)
        params = [SamplingParams()] * b
        for slot, (row, request) in rows.items():
            source[slot] = row
            token[slot], position[slot] = request.prompt[-1], len(request.prompt) - 1
            remaining[slot] = request.sampling.max_tokens
            seeds[slot], hashes[slot] = request.seed & 0xFFFFFFFF, request.hash
            stop_ids[slot, : len(request.sampling.stop_ids)] = request.sampling.stop_ids
            params[slot] = request.sampling
        new = Slots(token, position, remaining, None, stop_ids, SamplingRows.of(params))
        return new, seeds, hashes, source

    def _insert_rows(self, prefix, state, new, seeds_b, hashes_b, source_b) -> DecodeState:
        new = dataclasses.replace(new, key=sampling.row_keys(seeds_b, hashes_b))

        def choose(old, fresh):
            is_new = (source_b >= 0).reshape((-1,) + (1,) * (old.ndim - 1))
            return jnp.where(is_new, fresh, old)

        slots = jax.tree.map(choose, state.slots, new)
        return DecodeState(self._insert_kv(state.cache, prefix.kv, source_b), slots)

    def _insert_kv(self, kv, prefix_kv, source_b):
        """`cache.insert` on the slots of each device; any slot may take any row of the prefix."""
        spec = lambda x, row_axis: self.layout.sharding(
            (None,) * (x.ndim - 4) + (row_axis, "kv_heads", None, None)
        ).spec
        specs = lambda tree, row_axis: jax.tree.map(lambda x: spec(x, row_axis), tree)
        own = specs(kv, "batch")
        slots = self.layout.sharding(("batch",)).spec
        insert = self.layout.shard(cache.insert, (own, specs(prefix_kv, None), slots), own)
        return insert(kv, prefix_kv, source_b)

    def release(self, state: DecodeState, slots: list[int]) -> DecodeState:
        """Stops the given slots, so that they are free for the next insert."""
        remaining = state.slots.remaining.at[np.array(slots, np.int32)].set(0)
        return DecodeState(state.cache, dataclasses.replace(state.slots, remaining=remaining))

    # Generate

    def generate(self, params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Up to `steps` tokens for every running slot."""
        return self._generate(params, state)

    def _decode(self, params, state: DecodeState):
        empty = lambda dtype: jnp.zeros((self.steps, self.slots), dtype)
        floats = empty(jnp.float32)
        result = ResultTokens(
            empty(jnp.int32), floats, floats, floats,
            jnp.zeros((*floats.shape, self.num_logits)), empty(bool), state.slots.remaining,
        )

        def running(carry):
            i, state, _ = carry
            return (i < self.steps) & jnp.any(state.slots.remaining > 0)

        def body(carry):
            i, state, result = carry
            state, drawn, logits, valid = self._decode_one(params, state)
            write = lambda buffer, row: buffer.at[i].set(row)
            result = ResultTokens(
                write(result.tokens, drawn.token), write(result.logp_behav, drawn.logp_behav),
                write(result.logp_raw, drawn.logp_raw), write(result.entropy, drawn.entropy),
                write(result.logits, logits), write(result.valid, valid), state.slots.remaining,
            )
            return i + 1, state, result

        _, state, result = jax.lax.while_loop(running, body, (0, state, result))
        return state, result

    def _decode_one(self, params, state: DecodeState):
        slots = state.slots
        if self.unroll:
            attend = cache.append(slots.position)
        else:
            attend = cache.append_stacked(slots.position, self.layout)
        x_b1d, kv = transformer.hidden(
            params, self.config, self.program, slots.token[:, None], slots.position[:, None],
            attend, state.cache,
        )
        logits_bv = transformer.head_logits(params, self.program, x_b1d[:, 0])
        drawn = sampling.sample(
            logits_bv, slots.rows, slots.key, slots.position + 1, self.layout
        )
        recorded_bv = jnp.zeros((self.slots, 0))
        if self.num_logits:
            recorded_bv = sampling.distribution(logits_bv, slots.rows)
        is_running = slots.remaining > 0
        is_stop = jnp.any(drawn.token[:, None] == slots.stop_ids, axis=-1)
        remaining = jnp.where(is_stop | ~is_running, 0, slots.remaining - 1)
        slots = dataclasses.replace(
            slots,
            token=jnp.where(is_running, drawn.token, slots.token),
            position=slots.position + (remaining > 0),
            remaining=remaining,
        )
        return DecodeState(kv, slots), drawn, recorded_bv, is_running

    # Programs from shapes alone

    def programs(self, params: transformer.Params | None = None) -> dict[str, tuple[Any, tuple]]:
        """Every jitted program with abstract arguments: `fn.lower(*args)` allocates nothing.

        Args:
          params: the learner's abstract parameters with their shardings; None takes float32 in the
            serving layout.

        Returns: {"load", "prefill", "insert", "decode"} -> (jitted function, arguments). Prompts
        are of the largest bucket.
        """
        if params is None:
            params = _abstract(
                transformer.abstract_params(self.config), self.layout.params(self.config)
            )
        serving = _abstract(jax.eval_shape(self._load, params), self._params_shardings())
        state = _abstract(jax.eval_shape(self._empty_state), self._shardings)
        host = lambda *shape: np.zeros(shape, np.int32)
        length = self.bucket(self.max_length)
        rows = host(self.prefill_batch, length), host(self.prefill_batch, length)
        prefix = jax.eval_shape(self._prefill, serving, *rows)
        return {
            "load": (self._load, (params,)),
            "prefill": (self._prefill, (serving, *rows)),
            "insert": (self._insert, (prefix, state, *self._insertion({}))),
            "decode": (self._generate, (serving, state)),
        }


def _abstract(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
