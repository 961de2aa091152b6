"""The decoder for Llama, SmolLM2, Qwen2/2.5 and Qwen3 (dense).

Flax NNX declares the parameters with their logical axis names. Elsewhere they are a plain nested
dict, and pure functions merge them into the module while tracing. Layers are stacked on a leading
axis and scanned. A tuple of per-layer dicts (see `unstack`) is unrolled instead.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.models import attention, fsdp, invariant, quant
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.rope import rope_frequencies
from jaxrl_tis.sharding import Layout

Params = dict[str, Any]
NUMERICS = ("fast", "invariant")
PROJECTION, LAYER_INPUT = "projection", "layer_input"
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTION, attention.SPLASH_RESIDUALS),
    "full": jax.checkpoint_policies.nothing_saveable,
    "host": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device", offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """The settings of a forward pass; the same parameters run under all of them.

    Attributes:
      dtype: compute dtype of activations and dots ("float32", "bfloat16" or "float16"); sums,
        norms, softmax and logits are always float32.
      remat: recomputation in the backward pass: "none", "dots" (keeps projections and the results
        of an attention kernel), "full" (keeps the input of each layer) or "host" (keeps it in host
        memory).
      fp32_head: float32 head with precision HIGHEST; on TPU a float32 dot of default precision is
        one bfloat16 pass.
      layout: `sharding.Layout` that places the activations; None leaves them on one device.
      quantization: recipe of a sampler whose products the learner computes, with the gradients of
        the float products.
      numerics: "fast", or "invariant": see models/invariant.py.
      kv_dtype: rounds keys and values of rows as a cache of this dtype, such as "bfloat16" or
        "int8"; None does not round.
    """

    dtype: str = "float32"
    remat: str = "none"
    fp32_head: bool = False
    layout: Layout | None = None
    quantization: quant.Recipe = quant.Recipe()
    numerics: str = "fast"
    kv_dtype: str | None = None

    def __post_init__(self):
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics {self.numerics!r} is none of {', '.join(NUMERICS)}")

    @property
    def is_invariant(self) -> bool:
        return self.numerics == "invariant"

    def products(self) -> contextlib.AbstractContextManager:
        """Context in which products keep the precision of float16 operands. By default a TPU
        multiplies them in one bfloat16 pass."""
        if self.dtype == "float16":
            return jax.default_matmul_precision("highest")
        return contextlib.nullcontext()

    @property
    def compiler_options(self) -> dict | None:
        """The compiler options of every jitted function with this program."""
        return tiles.COMPILER_OPTIONS if self.is_invariant else None

    def dot(self, x: jax.Array, w: Any, is_split_in: bool = False) -> jax.Array:
        """Returns `quant.dot`; a mesh shards w along its input or, by default, its output."""
        if self.is_invariant:
            y = invariant.dot(x, w, self.layout, is_split_in)
        elif fsdp.is_cut(self.layout):
            y = fsdp.dot(x, w, self.layout, is_split_in)
        else:
            y = quant.dot(x, w)
        return checkpoint_name(y, PROJECTION)

    def embedded(self, table_vd: jax.Array, tokens_bt: jax.Array) -> jax.Array:
        """Returns the embeddings [B,T,D] of tokens in the compute dtype."""
        if not self.is_invariant and fsdp.is_cut(self.layout):
            return fsdp.take(table_vd, tokens_bt, self.layout, self.dtype)
        return _embedded(table_vd, tokens_bt).astype(self.dtype)

    def rms_norm(self, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        if self.is_invariant:
            return invariant.rms_norm(x, scale, eps, self.layout, rms_norm)
        return rms_norm(x, scale, eps)

    def rotation(self, config: ModelConfig, positions_bt: jax.Array) -> tuple:
        angles = functools.partial(_rotation, config)
        if self.is_invariant:
            return invariant.rotation(angles, positions_bt, self.layout)
        return angles(positions_bt)

    def rotate(self, x_bthk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        if self.is_invariant:
            return invariant.rotate(x_bthk, cos, sin, self.layout, _rotate)
        return _rotate(x_bthk, cos, sin)

    def row_attention(self, q, k, v, segment_ids_bt, unseen_bt) -> jax.Array:
        """Returns attention within rows; ValueError for evicted keys with invariant numerics."""
        if not self.is_invariant:
            return attention.row_attention(q, k, v, segment_ids_bt, self.layout, unseen_bt)
        if unseen_bt is not None:
            raise ValueError(
                "numerics='invariant' attends to all keys, and none can be evicted; set "
                "engine.retention to (0, 0)"
            )
        return invariant.row_attention(q, k, v, segment_ids_bt, self.layout)

    def constrain(self, x: jax.Array, axes: tuple) -> jax.Array:
        """Returns an activation constrained to the mesh by its logical axes."""
        return x if self.layout is None else self.layout.constrain(x, axes)


class Embedding(nnx.Module):
    """The parameters outside the layers: token table, last norm, output head unless tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        v, d = config.vocab_size, config.embed_dim
        self.embed = _normal(rngs, (v, d), d, ("vocab", "embed"))
        self.final_norm = nnx.Param(jnp.ones((d,)), axes=("norm",))
        if not config.tie_embeddings:
            self.head = _normal(rngs, (d, v), d, ("embed", "vocab"))


class Block(nnx.Module):
    """One layer: attention and gated MLP, both pre-normed and residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f = config.embed_dim, config.mlp_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attn_norm = nnx.Param(jnp.ones((d,)), axes=("norm",))
        self.q = _normal(rngs, (d, q), d, ("embed", "heads"))
        self.k = _normal(rngs, (d, kv), d, ("embed", "kv_heads"))
        self.v = _normal(rngs, (d, kv), d, ("embed", "kv_heads"))
        self.o = _normal(rngs, (q, d), q * 2 * config.num_layers, ("heads", "embed"))
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((q,)), axes=("heads",))
            self.k_bias = nnx.Param(jnp.zeros((kv,)), axes=("kv_heads",))
            self.v_bias = nnx.Param(jnp.zeros((kv,)), axes=("kv_heads",))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones((config.head_dim,)), axes=("norm",))
            self.k_norm = nnx.Param(jnp.ones((config.head_dim,)), axes=("norm",))
        self.mlp_norm = nnx.Param(jnp.ones((d,)), axes=("norm",))
        self.gate = _normal(rngs, (d, f), d, ("embed", "mlp"))
        self.up = _normal(rngs, (d, f), d, ("embed", "mlp"))
        self.down = _normal(rngs, (f, d), f * 2 * config.num_layers, ("mlp", "embed"))

    def __call__(self, x_btd, config: ModelConfig, program: Program, rotation, attend):
        """Returns the new residual stream and the carried output of `attend` (keys/values or a
        cache)."""
        h_btd = program.rms_norm(x_btd, self.attn_norm[...], config.norm_eps)
        q, k, v = self._qkv(h_btd, config, program, rotation)
        out_bthk, carried = attend(q, k, v)
        out_btq = out_bthk.reshape(*x_btd.shape[:2], -1)
        x_btd = x_btd + program.dot(out_btq, self.o.get_value(), is_split_in=True)
        x_btd = program.constrain(x_btd, ("batch", "length", None))
        h_btd = program.rms_norm(x_btd, self.mlp_norm[...], config.norm_eps)
        gate = program.dot(h_btd, self.gate.get_value())
        up = program.dot(h_btd, self.up.get_value())
        gated = jax.nn.silu(gate) * up
        x_btd = x_btd + program.dot(gated, self.down.get_value(), is_split_in=True)
        return program.constrain(x_btd, ("batch", "length", None)), carried

    def _qkv(self, h_btd, config: ModelConfig, program: Program, rotation):
        def project(w, bias, heads):
            y = program.dot(h_btd, w.get_value())
            y = y if bias is None else y + bias[...].astype(y.dtype).reshape(1, 1, -1)
            return y.reshape(*h_btd.shape[:2], heads, config.head_dim)

        biases = (self.q_bias, self.k_bias, self.v_bias) if config.qkv_bias else (None,) * 3
        q = project(self.q, biases[0], config.num_heads)
        k = project(self.k, biases[1], config.num_kv_heads)
        v = project(self.v, biases[2], config.num_kv_heads)
        if config.qk_norm:
            q = program.rms_norm(q, self.q_norm[...], config.norm_eps)
            k = program.rms_norm(k, self.k_norm[...], config.norm_eps)
        return program.rotate(q, *rotation), program.rotate(k, *rotation), v


def _normal(rngs: nnx.Rngs, shape: tuple, fan_in: int, axes: tuple) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5, axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * scale over the last axis, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def _rotation(config: ModelConfig, positions_bt: jax.Array):
    """Returns cos and sin [B,T,1,K/2] in float32, scaled by the attention factor of yarn."""
    inv_freq, scale = rope_frequencies(config.rope, config.head_dim)
    angles = positions_bt[..., None, None].astype(jnp.float32) * jnp.asarray(
        inv_freq, jnp.float32
    ).reshape(1, 1, 1, -1)
    # As one array, or XLA on CPU computes them again for every layer and head.
    cos, sin = jax.lax.optimization_barrier(jnp.stack([jnp.cos(angles), jnp.sin(angles)]))
    return cos * scale, sin * scale


def _rotate(x_bthk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    halves = x_bthk.astype(jnp.float32).reshape(*x_bthk.shape[:-1], 2, -1)
    a, b = halves[..., 0, :], halves[..., 1, :]
    # Stacked, not concatenated: XLA on CPU reads and writes whole halves.
    rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-2)
    return rotated.reshape(x_bthk.shape).astype(x_bthk.dtype)


@functools.cache
def _graph(module: type[nnx.Module], config: ModelConfig):
    """Returns (graphdef, abstract parameters, logical axes) of a module, as plain trees."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda v: v.get_metadata()["axes"], state, is_leaf=is_variable)
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)


def _values(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.split(module)[1])


@functools.partial(jax.jit, static_argnums=0)
def init(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random float32 parameters; residual outputs are scaled down by sqrt(2 * layers)."""
    outer_key, layers_key = jax.random.split(key)
    layers = jax.vmap(lambda k: _values(Block(config, nnx.Rngs(k))))(
        jax.random.split(layers_key, config.num_layers)
    )
    return {**_values(Embedding(config, nnx.Rngs(outer_key))), "layers": layers}


def abstract_params(config: ModelConfig, dtype: str = "float32") -> Params:
    """Returns the parameters of `init` as a tree of jax.ShapeDtypeStruct."""
    stack = lambda s: jax.ShapeDtypeStruct((config.num_layers, *s.shape), jnp.dtype(dtype))
    outer = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), _graph(Embedding, config)[1]
    )
    return {**outer, "layers": jax.tree.map(stack, _graph(Block, config)[1])}


def logical_axes(config: ModelConfig) -> Params:
    """Returns the tree of parameters with a tuple of logical axis names for each."""
    layers = {name: ("layers", *axes) for name, axes in _graph(Block, config)[2].items()}
    return {**_graph(Embedding, config)[2], "layers": layers}


def unstack(params: Params) -> Params:
    """Returns the layers as a tuple of per-layer dicts, for programs that unroll them."""
    layers = params["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x: x[i], layers) for i in range(count))}


def hidden(
    params: Params, config: ModelConfig, program: Program, tokens_bt: jax.Array,
    positions_bt: jax.Array, attend: Callable, cache: Any = None, seed_b: jax.Array | None = None,
):
    """Returns the hidden states [B,T,D] after the last norm, and the carried caches.

    Args:
      tokens_bt, positions_bt: [B,T] int32; positions are absolute.
      attend: (q, k, v, layer_cache) -> ([B,T,H,K], carried) for one layer.
      cache: a tuple with the cache of every unrolled layer. Scanned layers carry one cache from
        layer to layer: `layer_cache` is (cache, index of the layer), `carried` the next cache.
      seed_b: [B] uint32 of the noise on the input of the layers, where the parameters have
        "perturbation" [L], the log of its deviations; layers are then scanned without a cache.

    Returns: ([B,T,D] after the last norm in the compute dtype, `carried` of every layer, as a tuple
    or stacked like the layers; the last cache where scanned layers pass one on).
    """
    with program.products():
        return _hidden(params, config, program, tokens_bt, positions_bt, attend, cache, seed_b)


def _hidden(params, config, program, tokens_bt, positions_bt, attend, cache, seed_b):
    graphdef = _graph(Block, config)[0]
    rotation = program.rotation(config, positions_bt)

    def layer(x_btd, layer_params, layer_cache, noise=None):
        x_btd = checkpoint_name(x_btd, LAYER_INPUT)
        if noise is not None:
            x_btd = _perturbed(x_btd, *noise, seed_b)
        block = nnx.merge(graphdef, quant.masters(layer_params, program.quantization))
        return block(x_btd, config, program, rotation, lambda q, k, v: attend(q, k, v, layer_cache))

    if program.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[program.remat])
    x_btd = program.embedded(params["embed"], tokens_bt)
    x_btd = program.constrain(x_btd, ("batch", "length", None))
    layers = params["layers"]
    if isinstance(layers, tuple):
        carried = []
        for inputs in zip(layers, cache if cache is not None else (None,) * len(layers)):
            x_btd, out = layer(x_btd, *inputs)
            carried.append(out)
        carried = tuple(carried)
    elif cache is None:
        noise = None
        if "perturbation" in params:
            noise = params["perturbation"], jnp.arange(config.num_layers)
        x_btd, carried = jax.lax.scan(
            lambda x, inputs: layer(x, inputs[0], None, inputs[1]), x_btd, (layers, noise)
        )
    else:
        step = lambda carry, inputs: (layer(carry[0], inputs[0], (carry[1], inputs[1])), None)
        index_l = jnp.arange(config.num_layers)
        (x_btd, carried), _ = jax.lax.scan(step, (x_btd, cache), (layers, index_l))
    return program.rms_norm(x_btd, params["final_norm"], config.norm_eps), carried


def _perturbed(x_btd, log_std, layer, seed_b):
    """Returns x with noise of this deviation; a row's noise depends on its seed and the layer."""
    row = lambda seed: jax.random.normal(
        jax.random.fold_in(jax.random.key(seed), layer), x_btd.shape[1:], jnp.float32
    )
    noisy = x_btd.astype(jnp.float32) + jnp.exp(log_std) * jax.vmap(row)(seed_b)
    return noisy.astype(x_btd.dtype)


def _embedded(table_vd: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns rows [..., D] of the table, looked up as bits. Otherwise XLA on CPU converts a whole
    bfloat16 table to float32 for each look-up."""
    take = functools.partial(jnp.take, axis=0)
    if table_vd.dtype != jnp.bfloat16:
        return take(table_vd, tokens)
    return jax.lax.platform_dependent(table_vd, tokens, cpu=_taken_bits, default=take)


@jax.custom_vjp
def _taken_bits(table_vd: jax.Array, tokens: jax.Array) -> jax.Array:
    # Together, so that no loop is left without them: the bits of a whole table would be a copy.
    table_vd, tokens = jax.lax.optimization_barrier((table_vd, tokens))
    bits = jax.lax.bitcast_convert_type(table_vd, jnp.uint16)
    return jax.lax.bitcast_convert_type(jnp.take(bits, tokens, axis=0), table_vd.dtype)


def _taken_bits_fwd(table_vd, tokens):
    return _taken_bits(table_vd, tokens), (table_vd, tokens)


def _taken_bits_bwd(operands, gradient):
    table_vd, tokens = operands
    return jax.vjp(lambda table: jnp.take(table, tokens, axis=0), table_vd)[1](gradient)[0], None


_taken_bits.defvjp(_taken_bits_fwd, _taken_bits_bwd)


def rows_hidden(
    params, config, program, tokens_bt, positions_bt, segment_ids_bt, evict_step_bt=None, seed_b=None
) -> jax.Array:
    """Returns the hidden states [B,T,D] of whole rows. Tokens attend within their segment. With
    `evict_step_bt` they attend only to tokens with a step above their own position. `hidden`
    explains `seed_b`."""
    unseen_bt = None
    if evict_step_bt is not None:
        unseen_bt = jnp.arange(tokens_bt.shape[1])[None] - positions_bt + evict_step_bt

    def attend(q, k, v, _):
        if program.kv_dtype is not None:
            k, v = (quant.stored(x, program.kv_dtype) for x in (k, v))
        return program.row_attention(q, k, v, segment_ids_bt, unseen_bt), None

    return hidden(params, config, program, tokens_bt, positions_bt, attend, seed_b=seed_b)[0]


def output_head(params: Params, program: Program) -> Head:
    """Returns the output head, which is the token table if tied."""
    if "head" in params:
        return Head(params["head"], vocab_axis=1, highest=program.fp32_head)
    return Head(params["embed"], vocab_axis=0, highest=program.fp32_head)


def head_logits(params: Params, program: Program, x: jax.Array) -> jax.Array:
    """Returns the logits [..., V] of x [..., D] in float32."""
    head = output_head(params, program)
    return invariant.logits(x, head, program.layout) if program.is_invariant else head.logits(x)


def logits(params, config, tokens, positions=None, segment_ids=None, program=Program()):
    """Returns the logits [B,T,V] of rows of tokens [B,T] in float32.

    Args:
      positions: [B,T] int32, default 0..T-1 in each row.
      segment_ids: [B,T] int32, default one segment per row.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    x_btd = rows_hidden(params, config, program, tokens, positions, segment_ids)
    return head_logits(params, program, x_btd)
