"""The decoder for Llama, SmolLM2, Qwen2/2.5, Qwen3, Gemma 3, Qwen3-MoE, GLM-4.5 and GPT-OSS.

Flax NNX declares the parameters with their logical axis names. Elsewhere they are a plain nested
dict, and pure functions merge them into the module while tracing. Layers of one kind are stacked on
a leading axis (`ModelConfig.stacks`) and scanned. A tuple of per-layer dicts (see `unstack`) is
unrolled instead.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.models import attention, expert_parallel, fsdp, invariant, lora, moe, quant
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.models.rope import rope_frequencies
from jaxrl_tis.sharding import Layout

Params = dict[str, Any]
NUMERICS = ("fast", "invariant")
PROJECTION, LAYER_INPUT = "projection", "layer_input"
QKV = ("q", "k", "v")
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
        """Returns `quant.dot`, or `lora.product`; a mesh shards w along its input or, by default, its
        output."""
        dot = functools.partial(self._dot, is_split_in=is_split_in)
        y = lora.product(x, w, dot, self.thin) if isinstance(w, lora.Adapted) else dot(x, w)
        return checkpoint_name(y, PROJECTION)

    def _dot(self, x: jax.Array, w: Any, is_split_in: bool) -> jax.Array:
        if self.is_invariant:
            return invariant.dot(x, w, self.layout, is_split_in)
        if fsdp.is_cut(self.layout):
            return fsdp.dot(x, w, self.layout, is_split_in)
        return quant.dot(x, w)

    def thin(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """Returns the product of x [B,T,i] with a factor of LoRA."""
        if self.is_invariant:
            return invariant.dot(x, factor, self.layout, False)
        return quant.dot(x, factor)

    def embedded(self, table_vd: jax.Array, tokens_bt: jax.Array) -> jax.Array:
        """Returns the embeddings [B,T,D] of tokens in the compute dtype."""
        if not self.is_invariant and fsdp.is_cut(self.layout):
            return fsdp.take(table_vd, tokens_bt, self.layout, self.dtype)
        return _embedded(table_vd, tokens_bt).astype(self.dtype)

    def rms_norm(self, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        if self.is_invariant:
            return invariant.rms_norm(x, scale, eps, self.layout, rms_norm)
        return rms_norm(x, scale, eps)

    def rotation(self, rope: RopeConfig, head_dim: int, positions_bt: jax.Array) -> tuple:
        angles = functools.partial(_rotation, rope, head_dim)
        if self.is_invariant:
            return invariant.rotation(angles, positions_bt, self.layout)
        return angles(positions_bt)

    def rotate(self, x_bthk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        if self.is_invariant:
            return invariant.rotate(x_bthk, cos, sin, self.layout, _rotate)
        return _rotate(x_bthk, cos, sin)

    def row_attention(self, q, k, v, segment_ids_bt, unseen_bt, window, sinks_h) -> jax.Array:
        """Returns attention within rows; ValueError for evicted keys with invariant numerics."""
        if not self.is_invariant:
            return attention.row_attention(
                q, k, v, segment_ids_bt, self.layout, unseen_bt, window, sinks_h
            )
        if unseen_bt is not None:
            raise ValueError(
                "numerics='invariant' attends to all keys, and none can be evicted; set "
                "engine.retention to (0, 0)"
            )
        return invariant.row_attention(q, k, v, segment_ids_bt, self.layout)

    def router_logits(self, x_btd: jax.Array, router_de: jax.Array) -> jax.Array:
        """Returns the logits [B,T,E] of a router, always in float32."""
        if self.is_invariant:
            return invariant.router_logits(x_btd, router_de, self.layout, moe.router_logits)
        return moe.router_logits(x_btd, router_de)

    def by_row(self, f: Callable, *arrays: jax.Array) -> jax.Array:
        """Returns f of arrays [B,T,...], a function of each token."""
        return invariant.by_row(f, self.layout, *arrays) if self.is_invariant else f(*arrays)

    def experts(self, x_btd, ids_btk, gates_btk, weights: tuple, config: MoeConfig) -> jax.Array:
        """Returns the weighted sum [B,T,D] of each token's experts, see `moe.experts`."""
        num_experts, unit = config.num_experts, moe.unit(config)
        if self.layout is not None and self.layout.mesh.size > 1:
            return expert_parallel.experts(
                x_btd, ids_btk, gates_btk, weights, num_experts, self.layout, self.is_invariant, unit
            )
        flat = lambda x: x.reshape(-1, x.shape[-1])
        multiply, combine = moe.INVARIANT if self.is_invariant else moe.FAST
        y_md = moe.experts(
            flat(x_btd), flat(ids_btk), flat(gates_btk), weights, num_experts,
            functools.partial(multiply, unit=unit), combine,
        )
        return y_md.reshape(x_btd.shape).astype(x_btd.dtype)

    def balanced(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Returns tokens of rows [B,T,...] in the order of the forward pass, `Layout.balanced`."""
        return x if self.layout is None else self.layout.balanced(x, lead)

    def in_order(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Returns tokens in the order of their rows again."""
        return x if self.layout is None else self.layout.in_order(x, lead)

    def constrain(self, x: jax.Array, axes: tuple) -> jax.Array:
        """Returns an activation constrained to the mesh by its logical axes."""
        return x if self.layout is None else self.layout.constrain(x, axes)


class Embedding(nnx.Module):
    """The parameters outside the layers: token table, last norm, output head unless tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        v, d = config.vocab_size, config.embed_dim
        self.embed = _normal(rngs, (v, d), d, ("vocab", "embed"))
        self.final_norm = _norm_scale(config, d)
        if not config.tie_embeddings:
            self.head = _normal(rngs, (d, v), d, ("embed", "vocab"))


class Block(nnx.Module):
    """One layer: attention and gated MLP, both pre-normed and residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, q = config.embed_dim, config.num_heads * config.head_dim
        self.attn_norm = _norm_scale(config, d)
        self._add_qkv(config, rngs)
        self.o = _normal(rngs, (q, d), q * 2 * config.num_layers, ("heads", "embed"))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros((d,)), axes=("norm",))
        if config.has_sinks:
            self.sinks = nnx.Param(jnp.zeros((config.num_heads,)), axes=("heads",))
        if config.qk_norm:
            self.q_norm = _norm_scale(config, config.head_dim)
            self.k_norm = _norm_scale(config, config.head_dim)
        self.mlp_norm = _norm_scale(config, d)
        if config.post_norms:
            self.attn_post_norm = _norm_scale(config, d)
            self.mlp_post_norm = _norm_scale(config, d)
        self._add_mlp(config, rngs)

    def _add_qkv(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        d = config.embed_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = _normal(rngs, (d, q), d, ("embed", "heads"))
        self.k = _normal(rngs, (d, kv), d, ("embed", "kv_heads"))
        self.v = _normal(rngs, (d, kv), d, ("embed", "kv_heads"))
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((q,)), axes=("heads",))
            self.k_bias = nnx.Param(jnp.zeros((kv,)), axes=("kv_heads",))
            self.v_bias = nnx.Param(jnp.zeros((kv,)), axes=("kv_heads",))

    def _add_mlp(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self._add_gated(config, rngs, config.mlp_dim)

    def _add_gated(self, config: ModelConfig, rngs: nnx.Rngs, width: int) -> None:
        d = config.embed_dim
        self.gate = _normal(rngs, (d, width), d, ("embed", "mlp"))
        self.up = _normal(rngs, (d, width), d, ("embed", "mlp"))
        self.down = _normal(rngs, (width, d), width * 2 * config.num_layers, ("mlp", "embed"))

    def __call__(
        self, x_btd, config: ModelConfig, program: Program, rotation, attend,
        replay: moe.Replay | None = None, asked: moe.Asked = moe.NOTHING, is_token_bt=None,
    ):
        """Returns the new residual stream, the carried output of `attend` (keys/values or a cache)
        and what the router did, see `moe.Routed`."""
        h_btd = _norm(program, config, x_btd, self.attn_norm[...])
        heads = self._qkv(h_btd, config, program, rotation)
        sinks_h = self.sinks[...] if config.has_sinks else None
        out_bthk, carried = attend(sinks_h, *heads)
        out_btq = out_bthk.reshape(*x_btd.shape[:2], -1)
        y_btd = program.dot(out_btq, self.o.get_value(), is_split_in=True)
        if config.o_bias:
            y_btd = y_btd + self.o_bias[...].astype(y_btd.dtype).reshape(1, 1, -1)
        if config.post_norms:
            y_btd = _norm(program, config, y_btd, self.attn_post_norm[...])
        x_btd = program.constrain(x_btd + y_btd, ("batch", "length", None))
        h_btd = _norm(program, config, x_btd, self.mlp_norm[...])
        y_btd, routed = self._mlp(h_btd, config, program, replay, asked, is_token_bt)
        if config.post_norms:
            y_btd = _norm(program, config, y_btd, self.mlp_post_norm[...])
        return program.constrain(x_btd + y_btd, ("batch", "length", None)), carried, routed

    def _mlp(self, h_btd, config, program, replay, asked, is_token_bt):
        return self._gated(h_btd, config, program), None

    def _gated(self, h_btd, config: ModelConfig, program: Program) -> jax.Array:
        gate = program.dot(h_btd, self.gate.get_value())
        up = program.dot(h_btd, self.up.get_value())
        gated = ACTIVATE[config.activation](gate) * up
        return program.dot(gated, self.down.get_value(), is_split_in=True)

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
            q = _norm(program, config, q, self.q_norm[...])
            k = _norm(program, config, k, self.k_norm[...])
        return program.rotate(q, *rotation), program.rotate(k, *rotation), v


class MoeBlock(Block):
    """A layer whose MLP is the experts that its router chooses, and the shared ones if any."""

    def _add_mlp(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        d, e, f = config.embed_dim, config.experts.num_experts, config.experts.expert_dim
        self.router = _normal(rngs, (d, e), d, ("router", "router"))
        if config.experts.has_bias:
            self.router_bias = nnx.Param(jnp.zeros((e,)), axes=("router",))
        into = ("expert", "expert_embed", "mlp")
        self.expert_gate = _normal(rngs, (e, d, f), d, into)
        self.expert_up = _normal(rngs, (e, d, f), d, into)
        self.expert_down = _normal(
            rngs, (e, f, d), f * 2 * config.num_layers, ("expert", "mlp", "expert_embed")
        )
        if config.experts.has_biases:
            bias = lambda *axes: nnx.Param(jnp.zeros((e, {"mlp": f, "norm": d}[axes[1]])), axes=axes)
            self.router_logits_bias = nnx.Param(jnp.zeros((e,)), axes=("router",))
            self.expert_gate_bias, self.expert_up_bias = (bias("expert", "mlp") for _ in range(2))
            self.expert_down_bias = bias("router", "norm")  # every device has those of its tokens
        if config.experts.shared_dim:
            self._add_gated(config, rngs, config.experts.shared_dim)

    def _mlp(self, h_btd, config, program, replay, asked, is_token_bt):
        logits_bte = program.router_logits(h_btd, self.router[...])
        if config.moe.has_biases:
            logits_bte = logits_bte + self.router_logits_bias[...].astype(jnp.float32).reshape(1, 1, -1)
        bias_e = self.router_bias[...] if config.moe.has_bias else None
        ids_btk, gates_btk, routed = moe.route(
            logits_bte, bias_e, config.moe, replay, asked, is_token_bt, program.by_row
        )
        weights: tuple = self.expert_gate, self.expert_up, self.expert_down
        if config.moe.has_biases:
            weights += self.expert_gate_bias, self.expert_up_bias
        values = tuple(w.get_value() for w in weights)
        y_btd = program.experts(h_btd, ids_btk, gates_btk, values, config.moe)
        if config.moe.has_biases:
            bias_btd = moe.output_biases(ids_btk, gates_btk, self.expert_down_bias[...])
            y_btd = (y_btd + bias_btd).astype(y_btd.dtype)
        if config.moe.shared_dim:
            y_btd = y_btd + self._gated(h_btd, config, program)
        return y_btd, routed


class Joined:
    """Of a layer whose queries, keys and values are one product, see `joined`."""

    q_norm: Any
    k_norm: Any

    def _add_qkv(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        d, n, k = config.embed_dim, config.num_kv_heads, config.head_dim
        rows = config.num_heads // n + 2
        self.qkv = _normal(rngs, (d, n * rows * k), d, ("embed", "kv_heads"))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((n, rows, k)), axes=("kv_heads", None, None))

    def _qkv(self, h_btd, config: ModelConfig, program: Program, rotation):
        lead, k = h_btd.shape[:2], config.head_dim
        rows_btnjk = program.dot(h_btd, self.qkv.get_value()).reshape(*lead, config.num_kv_heads, -1, k)
        if config.qkv_bias:
            rows_btnjk = rows_btnjk + self.qkv_bias[...].astype(rows_btnjk.dtype)[None, None]
        if config.qk_norm:
            q, key, v = _parts(rows_btnjk)
            q = _norm(program, config, q, self.q_norm[...])
            key = _norm(program, config, key, self.k_norm[...])
            rows_btnjk = jnp.concatenate([q, key, v], axis=3)
        q, key, v = (x.reshape(*lead, -1, k) for x in _parts(rows_btnjk))
        turned = program.rotate(q, *rotation), program.rotate(key, *rotation), v
        return *turned, attention.Unrotated(rows_btnjk, *rotation)


def _parts(rows_btnjk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the rows of the queries, the key and the value of each head."""
    return rows_btnjk[:, :, :, :-2], rows_btnjk[:, :, :, -2:-1], rows_btnjk[:, :, :, -1:]


class JoinedBlock(Joined, Block):
    """A Block with one product for queries, keys and values."""


class JoinedMoeBlock(Joined, MoeBlock):
    """A MoeBlock with one product for queries, keys and values."""


def _normal(rngs: nnx.Rngs, shape: tuple, fan_in: int, axes: tuple) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5, axes=axes)


def _norm_scale(config: ModelConfig, size: int) -> nnx.Param:
    init = jnp.zeros if config.zero_centered_norms else jnp.ones
    return nnx.Param(init((size,)), axes=("norm",))


def _norm(program: Program, config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    if config.zero_centered_norms:
        scale = 1 + scale.astype(jnp.float32)
    return program.rms_norm(x, scale, config.norm_eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * scale over the last axis, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def _rotation(rope: RopeConfig, head_dim: int, positions_bt: jax.Array):
    """Returns cos and sin [B,T,1,R/2] of the R rotated dimensions in float32, scaled by the
    attention factor of yarn."""
    inv_freq, scale = rope_frequencies(rope, rope.rotary_dim(head_dim))
    angles = positions_bt[..., None, None].astype(jnp.float32) * jnp.asarray(
        inv_freq, jnp.float32
    ).reshape(1, 1, 1, -1)
    # As one array, or XLA on CPU computes them again for every layer and head.
    cos, sin = jax.lax.optimization_barrier(jnp.stack([jnp.cos(angles), jnp.sin(angles)]))
    return cos * scale, sin * scale


def _rotate(x_bthk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    size = 2 * cos.shape[-1]
    rotated, rest = x_bthk[..., :size], x_bthk[..., size:]
    halves = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], 2, -1)
    a, b = halves[..., 0, :], halves[..., 1, :]
    # Stacked, not concatenated: XLA on CPU reads and writes whole halves.
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-2)
    turned = turned.reshape(rotated.shape).astype(x_bthk.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


# By whether a layer has experts, and whether its queries, keys and values are one product.
BLOCKS: dict[tuple[bool, bool], type[Block]] = {
    (False, False): Block, (True, False): MoeBlock, (False, True): JoinedBlock, (True, True): JoinedMoeBlock,
}
ACTIVATE: dict[str, Callable] = {
    "silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _blocks(config: ModelConfig, is_joined: bool = False) -> dict[str, type[Block]]:
    """Returns the kind of layer in each stack of the parameters."""
    has_experts = lambda stack: config.moe is not None and stack == "layers"
    return {name: BLOCKS[has_experts(name), is_joined] for name in config.stacks}


@functools.cache
def _graph(module: Callable[..., nnx.Module], config: ModelConfig):
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
    keys = jax.random.split(layers_key, config.num_layers)
    params, blocks = _values(Embedding(config, nnx.Rngs(outer_key))), _blocks(config)
    for name, indices in config.stacks.items():
        layer = lambda k, block=blocks[name]: _values(block(config, nnx.Rngs(k)))
        params[name] = jax.vmap(layer)(keys[jnp.array(indices)])
    return params


def abstract_params(config: ModelConfig, dtype: str = "float32") -> Params:
    """Returns the parameters of `init`, in a dtype as of `cast`, as a tree of
    jax.ShapeDtypeStruct."""
    struct = lambda s, *lead: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype)
    params, blocks = jax.tree.map(struct, _graph(Embedding, config)[1]), _blocks(config)
    for name, indices in config.stacks.items():
        layer, n = _graph(blocks[name], config)[1], len(indices)
        params[name] = jax.tree.map(lambda s, n=n: struct(s, n), layer)
    return jax.eval_shape(lambda params: cast(params, dtype), params)


def cast(params: Params, dtype: str) -> Params:
    """Returns the parameters in a dtype, but for the router's bias: it keeps float32, as in
    published checkpoints, since a rounded bias chooses other experts."""

    def leaf(path, x):
        return x.astype("float32" if path[-1].key == "router_bias" else dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


def joined(layer: Params, config: ModelConfig) -> Params:
    """Returns a layer, or stacked ones, with q, k and v as one matrix "qkv" for one product.

    The columns of a key/value head stand together: of its queries, its key and its value. So a shard of
    the heads has the same ones as before. Biases are [..., N, J, K], one row for each of these.
    """
    def by_head(*parts):
        rows = [x.reshape(*x.shape[:-1], config.num_kv_heads, -1, config.head_dim) for x in parts]
        return jnp.concatenate(rows, axis=-2)

    layer = dict(layer)
    flat = lambda *parts: by_head(*parts).reshape(*parts[0].shape[:-1], -1)
    layer["qkv"] = jax.tree.map(flat, *(layer.pop(name) for name in QKV))
    if config.qkv_bias:
        layer["qkv_bias"] = by_head(*(layer.pop(f"{name}_bias") for name in QKV))
    return layer


def logical_axes(config: ModelConfig, is_joined: bool = False) -> Params:
    """Returns the tree of parameters, or of `joined` ones, with a tuple of logical axis names for each."""
    tree, blocks = dict(_graph(Embedding, config)[2]), _blocks(config, is_joined)
    for name in config.stacks:
        axes = _graph(blocks[name], config)[2]
        tree[name] = {leaf: ("layers", *of_leaf) for leaf, of_leaf in axes.items()}
    return tree


def unstack(params: Params, config: ModelConfig) -> Params:
    """Returns the layers as a tuple of per-layer dicts in order, for programs that unroll them."""
    layers = {}
    for name, indices in config.stacks.items():
        for i, index in enumerate(indices):
            layers[index] = jax.tree.map(lambda x, i=i: x[i], params[name])
    outer = {name: x for name, x in params.items() if name not in config.stacks}
    return {**outer, "layers": tuple(layers[i] for i in range(config.num_layers))}


class Run(NamedTuple):
    """Consecutive layers of one kind: their stack, where it begins and ends there, and the index of
    the first layer in the model."""

    stack: str
    start: int
    stop: int
    first: int


@functools.cache
def runs(config: ModelConfig) -> tuple[Run, ...]:
    """Returns the longest runs of layers of one kind, in order."""
    home = {i: (name, n) for name, indices in config.stacks.items() for n, i in enumerate(indices)}
    found = []
    for index in range(config.num_layers):
        name, place = home[index]
        if found and found[-1].stack == name:
            found[-1] = found[-1]._replace(stop=place + 1)
        else:
            found.append(Run(name, place, place + 1, index))
    return tuple(found)


class Hidden(NamedTuple):
    """The result of `hidden`.

    Attributes:
      x: [B,T,D] after the last norm, in the compute dtype.
      carried: the carried output of every layer, as a tuple or stacked like the layers; the last
        cache where scanned layers pass one on.
      routed: what the routers did, see `moe.Routed`; None unless asked for.
    """

    x: jax.Array
    carried: Any
    routed: moe.Routed | None


def hidden(
    params: Params, config: ModelConfig, program: Program, tokens_bt: jax.Array,
    positions_bt: jax.Array, attend: Callable, cache: Any = None, seed_b: jax.Array | None = None,
    replay: moe.Replay | None = None, asked: moe.Asked = moe.NOTHING,
    is_token_bt: jax.Array | None = None,
) -> Hidden:
    """Computes the hidden states after the last norm.

    Args:
      tokens_bt, positions_bt: [B,T] int32; positions are absolute.
      attend: (q, k, v, layer_cache, window, sinks [H]) -> ([B,T,H,K], carried) for one layer, whose
        window is an `attention.Window`; window and sinks are None in models without. In `joined` layers
        also an `attention.Unrotated`, for kernels that rotate queries and keys themselves.
      cache: a tuple with the cache of every unrolled layer. Scanned layers carry one cache from
        layer to layer: `layer_cache` is (cache, index of the layer), `carried` the next cache.
      seed_b: [B] uint32 of the noise on the input of the layers, where the parameters have
        "perturbation" [L], the log of its deviations; layers are then scanned.
      replay: routes [L,B,T,k] of the layers with experts, in place of the routers' own.
      asked: what is returned of the routers; statistics count the tokens of `is_token_bt`.
    """
    with program.products():
        return _hidden(
            params, config, program, tokens_bt, positions_bt, attend, cache, seed_b,
            replay, asked if config.moe else moe.NOTHING, is_token_bt,
        )


def _hidden(
    params, config, program, tokens_bt, positions_bt, attend, cache, seed_b, replay, asked,
    is_token_bt,
):
    layer = _layer(
        config, program, positions_bt, attend, seed_b, replay, asked, is_token_bt
    )
    x_btd = _embeddings(params, config, program, tokens_bt)
    ids_lbtk = None if replay is None else replay.ids
    run_layers = _unrolled if isinstance(params["layers"], tuple) else _scanned
    x_btd, carried, routed = run_layers(layer, params, config, x_btd, cache, ids_lbtk)
    x_btd = _norm(program, config, x_btd, params["final_norm"])
    return Hidden(x_btd, carried, routed)


def _layer(
    config, program, positions_bt, attend, seed_b=None, replay=None, asked=moe.NOTHING,
    is_token_bt=None,
) -> Callable:
    """Returns the function of one layer: (x [B,T,D], its parameters, its cache, its noise, its
    routes, whether it has the sliding window) -> (x, carried output, what its router did)."""
    if program.is_invariant and (config.sliding is not None or config.has_sinks):
        raise ValueError(
            "numerics='invariant' has no layers with a sliding window and no attention sinks; set "
            "model.numerics to 'fast'"
        )
    rotate = lambda rope: program.rotation(rope, config.head_dim, positions_bt)
    of_full = rotate(config.rope)
    has_other = config.sliding is not None and config.sliding.rope != config.rope
    of_sliding = rotate(config.sliding.rope) if has_other else None

    def layer(x_btd, layer_params, layer_cache, noise=None, ids_btk=None, is_sliding=None):
        x_btd = checkpoint_name(x_btd, LAYER_INPUT)
        if noise is not None:
            log_std, index = noise
            x_btd = _perturbed(program, x_btd, log_std, index, seed_b)
        graphdef = _graph(BLOCKS["router" in layer_params, "qkv" in layer_params], config)[0]
        block = nnx.merge(graphdef, quant.masters(layer_params, program.quantization))
        replayed = None if ids_btk is None else moe.Replay(ids_btk, replay.is_given)
        rotation, window = of_full, None
        if config.sliding is not None:
            window = attention.Window(config.sliding.window, is_sliding)
        if of_sliding is not None:
            select = lambda sliding, full: jnp.where(is_sliding, sliding, full)
            rotation = jax.tree.map(select, of_sliding, of_full)
        of_layer = lambda sinks_h, q, k, v, *rows: attend(q, k, v, layer_cache, window, sinks_h, *rows)
        return block(x_btd, config, program, rotation, of_layer, replayed, asked, is_token_bt)

    if program.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[program.remat])
    return layer


def _embeddings(params, config, program, tokens_bt) -> jax.Array:
    """Returns the residual stream [B,T,D] before the first layer."""
    x_btd = program.embedded(params["embed"], tokens_bt)
    if config.scales_embeddings:
        x_btd = x_btd * jnp.asarray(config.embed_dim**0.5, x_btd.dtype)
    return program.constrain(x_btd, ("batch", "length", None))


def _unrolled(layer, params, config, x_btd, cache, ids_lbtk):
    """Returns the residual stream, the carried outputs and what the routers did."""
    carried, routed, places = [], [], {i: n for n, i in enumerate(config.stacks["layers"])}
    for i, of_layer in enumerate(params["layers"]):
        ids_btk = ids_lbtk[places[i]] if ids_lbtk is not None and "router" in of_layer else None
        of_cache = None if cache is None else cache[i]
        is_sliding = None if config.sliding is None else i in config.sliding.layers
        x_btd, out, own = layer(x_btd, of_layer, of_cache, None, ids_btk, is_sliding)
        carried.append(out)
        routed += [jax.tree.map(lambda x: x[None], own)] if own is not None else []
    return x_btd, tuple(carried), _joined(routed)


def _joined(trees: list) -> Any:
    """Returns trees of arrays of layers, joined; None for none."""
    if len(trees) < 2:
        return trees[0] if trees else None
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *trees)


def _scanned(layer, params, config, x_btd, cache, ids_lbtk):
    """Returns what `_unrolled` does, after scans of the runs of equal layers."""
    carried, routed = [], []
    for run in runs(config):
        whole = run.stop - run.start == len(config.stacks[run.stack])
        cut = operator.itemgetter(slice(run.start, run.stop))
        layers = params[run.stack] if whole else jax.tree.map(cut, params[run.stack])
        index_l = run.first + jnp.arange(run.stop - run.start)
        noise = ids = None
        if "perturbation" in params:
            noise = params["perturbation"][run.first : run.first + len(index_l)], index_l
        if ids_lbtk is not None and "router" in layers:
            ids = ids_lbtk if whole else cut(ids_lbtk)
        is_sliding = None
        if config.sliding is not None:
            is_sliding = jnp.isin(index_l, jnp.array(config.sliding.layers))
        if cache is None:
            def step(x_btd, inputs):
                x_btd, out, own = layer(x_btd, inputs[0], None, *inputs[1:])
                return x_btd, (out, own)

            x_btd, (out, own) = jax.lax.scan(step, x_btd, (layers, noise, ids, is_sliding))
            carried.append(out)
        else:
            def step(carry, inputs):
                of_layer, noise, ids, is_sliding, index = inputs
                of_cache = carry[1], index
                x_btd, kv, own = layer(carry[0], of_layer, of_cache, noise, ids, is_sliding)
                return (x_btd, kv), own

            inputs = layers, noise, ids, is_sliding, index_l
            (x_btd, cache), own = jax.lax.scan(step, (x_btd, cache), inputs)
        routed += [own] if own is not None else []
    return x_btd, _joined(carried) if cache is None else cache, _joined(routed)


def _perturbed(program, x_btd, log_std, layer, seed_b):
    """Returns x with noise of this deviation; a row's noise depends on its seed and the layer."""
    row = lambda seed: jax.random.normal(
        jax.random.fold_in(jax.random.key(seed), layer), x_btd.shape[1:], jnp.float32
    )
    noise_btd = program.balanced(jax.vmap(row)(seed_b))
    noisy = x_btd.astype(jnp.float32) + jnp.exp(log_std) * noise_btd
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
    params, config, program, tokens_bt, positions_bt, segment_ids_bt, evict_step_bt=None,
    seed_b=None, replay=None,
) -> jax.Array:
    """Returns the hidden states [B,T,D] of whole rows. Tokens attend within their segment. With
    `evict_step_bt` they attend only to tokens with a step above their own position, or with
    [B,T,G] to those of the layer's group. `hidden`
    explains `seed_b` and `replay`."""
    return rows_routed(
        params, config, program, tokens_bt, positions_bt, segment_ids_bt, evict_step_bt, seed_b,
        replay,
    ).x


def rows_routed(
    params, config, program, tokens_bt, positions_bt, segment_ids_bt, evict_step_bt=None,
    seed_b=None, replay=None, asked=moe.NOTHING,
) -> Hidden:
    """Returns `rows_hidden` and what the routers did. Statistics count the tokens of a segment."""
    unseen_bt = cache = None
    if evict_step_bt is not None:
        start_bt = jnp.arange(tokens_bt.shape[1])[None] - positions_bt
        has_groups = evict_step_bt.ndim == 3
        unseen_bt = (start_bt[..., None] if has_groups else start_bt) + evict_step_bt
        if has_groups:  # a layer's "cache" is its number alone
            is_unrolled = isinstance(params["layers"], tuple)
            cache = tuple(((), i) for i in range(config.num_layers)) if is_unrolled else ()
    rows = tokens_bt, positions_bt, segment_ids_bt, unseen_bt
    tokens_bt, positions_bt, segment_ids_bt, unseen_bt = jax.tree.map(program.balanced, rows)
    if replay is not None:
        ids_lbtk = program.balanced(replay.ids, lead=1)
        replay = moe.Replay(ids_lbtk, program.balanced(replay.is_given))
    attend = _row_attention(program, segment_ids_bt, unseen_bt, config.num_layers)
    x_btd, carried, routed = hidden(
        params, config, program, tokens_bt, positions_bt, attend, cache, seed_b=seed_b, replay=replay,
        asked=asked, is_token_bt=segment_ids_bt > 0,
    )
    if routed is not None and routed.ids is not None:
        routed = dataclasses.replace(routed, ids=program.in_order(routed.ids, lead=1))
    return Hidden(program.in_order(x_btd), carried, routed)


def group_of(layer: Any, groups: int, num_layers: int) -> Any:
    """Returns the group of a layer where so many groups of consecutive layers see keys of their own."""
    return layer * groups // num_layers


def _row_attention(program, segment_ids_bt, unseen_bt, num_layers: int = 1) -> Callable:
    """Returns the `attend` of `hidden` for whole rows. `unseen_bt` may have groups of consecutive layers
    [B,T,G]; the cache of a layer is then ((), its number)."""

    def attend(q, k, v, cache, window, sinks_h, unrotated=None):
        if program.kv_dtype is not None:
            k, v = (quant.stored(x, program.kv_dtype) for x in (k, v))
        own_bt = unseen_bt
        if cache is not None:
            own_bt = jnp.take(unseen_bt, group_of(cache[1], unseen_bt.shape[2], num_layers), axis=2)
        out = program.row_attention(q, k, v, segment_ids_bt, own_bt, window, sinks_h)
        return out, None if cache is None else ()

    return attend


def residuals(
    params: Params, config: ModelConfig, program: Program, tokens_bt: jax.Array
) -> Iterator[jax.Array]:
    """Yields the residual stream [B,T,D] of rows of one segment: the embeddings, then the output of
    each layer. A layer is computed when it is asked for. Its router chooses by itself.

    It is for the search of a fault: it waits between the layers, and reads each from its stack.
    """
    shape, compiler_options = tokens_bt.shape, program.compiler_options
    positions_bt = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
    tokens_bt, positions_bt = map(program.balanced, (tokens_bt, positions_bt))

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def one(x_btd, layer_params, n, is_sliding):
        if n is not None:
            layer_params = jax.tree.map(lambda x: x[n], layer_params)
        attend = _row_attention(program, jnp.ones(shape, jnp.int32), None)
        layer = _layer(config, program, positions_bt, attend)
        with program.products():
            return layer(x_btd, layer_params, None, None, None, is_sliding)[0]

    embed = functools.partial(_embeddings, config=config, program=program, tokens_bt=tokens_bt)
    outer = {name: x for name, x in params.items() if name not in config.stacks}
    x_btd = jax.jit(embed, compiler_options=compiler_options)(outer)
    yield program.in_order(x_btd)
    places = {i: (name, n) for name, ids in config.stacks.items() for n, i in enumerate(ids)}
    for i in range(config.num_layers):
        is_sliding = None if config.sliding is None else i in config.sliding.layers
        if isinstance(params["layers"], tuple):
            x_btd = one(x_btd, params["layers"][i], None, is_sliding)
        else:
            name, n = places[i]
            x_btd = one(x_btd, params[name], n, is_sliding)
        yield program.in_order(x_btd)


def output_head(params: Params, program: Program, x: jax.Array) -> tuple[Head, jax.Array]:
    """Returns the output head, which is the token table if tied, and its input x [B,T,D]. The factors
    of an adapted head become further rows of its matrix, and x A further columns of x."""
    if "head" not in params:
        return Head(params["embed"], vocab_axis=0, highest=program.fp32_head), x
    w = params["head"]
    if isinstance(w, lora.Adapted):
        x_a = program.thin(x.astype(jnp.float32), w.a)
        x = jnp.concatenate([x, x_a.astype(x.dtype)], axis=-1)
        w = jnp.concatenate([w.w, w.scaled_b.astype(w.w.dtype)], axis=0)
    return Head(w, vocab_axis=1, highest=program.fp32_head), x


def head_logits(params: Params, program: Program, x: jax.Array) -> jax.Array:
    """Returns the logits [..., V] of x [..., D] in float32."""
    head, x = output_head(params, program, x)
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
