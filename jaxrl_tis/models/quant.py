"""Weights of 8 and 4 bits as leaf types, and one matrix product for every kind of weight.

The 8-bit schemes are symmetric: scale = absmax / bound per output channel (weights) or per token
(activations). q = x (1 / scale) is rounded half to even and clipped to +-bound. The bound is the
format's largest number, 127 or 448 (float8_e4m3fn). A channel's largest magnitude thus lies on a
code and not between two codes, where the last bit of a float would decide. int8 has no code -128. A
channel of zeros has scale 1.

With "a16" the activations keep their dtype. With "a8" they are quantized at run time, and the
product has two 8-bit matrices: s8 x s8 -> s32, which is exact in any order, or f8 x f8 -> f32,
which depends on the order of its sums.

"mxfp4" is of experts alone: blocks of 32 inputs with one power of two (kernels/mxfp4.py). Products are
those of the dequantized weight.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.kernels import mxfp4
from jaxrl_tis.models import lora
from jaxrl_tis.models.config import ModelConfig, by_stack


class Scheme(NamedTuple):
    """The format of the weights, whether activations are quantized to it too, and whether experts
    alone have it, in MXFP4."""

    dtype: Any
    has_activations: bool
    is_mxfp4: bool = False


SCHEMES = {
    "none": Scheme(None, False),
    "w8a16": Scheme(jnp.int8, False),
    "w8a8": Scheme(jnp.int8, True),
    "fp8_w8a16": Scheme(jnp.float8_e4m3fn, False),
    "fp8_w8a8": Scheme(jnp.float8_e4m3fn, True),
    "mxfp4": Scheme(jnp.uint8, False, is_mxfp4=True),
}
QUANTIZED = (
    "q", "k", "v", "o", "gate", "up", "down", "expert_gate", "expert_up", "expert_down",
)
# What the largest of a channel is scaled to.
BOUND = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.float8_e4m3fn): 448}
# Channels with a smaller scale count as zeros: products of two scales then never underflow.
MIN_SCALE = float(jnp.finfo(jnp.float32).tiny) ** 0.5


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The quantized projections of the layers and their scheme.

    Attributes:
      scheme: a name in `SCHEMES`.
      unquantized: names in `QUANTIZED` that keep their dtype in every layer; layers are one stacked
        array with one format.
    """

    scheme: str = "none"
    unquantized: tuple[str, ...] = ()

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            raise ValueError(f"quantization {self.scheme!r} is none of {', '.join(SCHEMES)}")
        unknown = [name for name in self.unquantized if name not in QUANTIZED]
        if unknown:
            raise ValueError(
                f"unquantized names {', '.join(unknown)}; choose among the projections "
                f"{', '.join(QUANTIZED)}"
            )

    def covers(self, name: str) -> bool:
        """Whether the layers' parameter of this name is quantized."""
        is_projection = name in QUANTIZED and name not in self.unquantized
        is_meant = name.startswith("expert_") or not SCHEMES[self.scheme].is_mxfp4
        return self.scheme != "none" and is_projection and is_meant

    def check(self, config: ModelConfig, tensor: int) -> None:
        """Raises ValueError for a model or a degree of tensor parallelism that the scheme does not fit."""
        if not SCHEMES[self.scheme].is_mxfp4:
            return
        if config.moe is None:
            raise ValueError(
                f"quantization {self.scheme!r} is of experts, and the model has none; use "
                f"{', '.join(n for n, scheme in SCHEMES.items() if not scheme.is_mxfp4)}"
            )
        for name, size in (("width", config.embed_dim), ("experts' width", config.moe.expert_dim)):
            parts = tensor if name != "width" else 1
            if size % (parts * mxfp4.BLOCK):
                raise ValueError(
                    f"quantization {self.scheme!r} has blocks of {mxfp4.BLOCK} inputs, and the model's "
                    f"{name} {size} in {parts} tensor shards is no multiple; use another scheme or mesh"
                )

    @property
    def id(self) -> str:
        """The recipe as text: "w8a8", or "w8a8 except o,down"; equal for equal recipes."""
        whole = [name for name in QUANTIZED if name in self.unquantized]
        return self.scheme + (f" except {','.join(whole)}" if whole else "")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantArray:
    """An 8-bit matrix with one float32 scale per output channel, in place of a float weight. Experts
    have a leading axis, and each expert has scales of its own.

    Attributes:
      q: [..., in, out] in the scheme's dtype; of "mxfp4" [..., in / 2, out], two numbers in a byte.
      scale: [..., 1, out] float32; the weight is q * scale. Of "mxfp4" [..., in / 32, out] uint8, the
        exponents of the blocks.
      scheme: a name in `SCHEMES` (static).
    """

    q: Any
    scale: Any
    scheme: str = dataclasses.field(metadata=dict(static=True))

    @property
    def is_mxfp4(self) -> bool:
        return SCHEMES[self.scheme].is_mxfp4


def scale_axes(axes: tuple, scheme: str) -> tuple:
    """Returns the logical axes of the scale of a weight with these axes (..., in, out)."""
    return axes if SCHEMES[scheme].is_mxfp4 else (*axes[:-2], None, axes[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Master:
    """A float weight of the learner [..., in, out] with the products of its QuantArray."""

    w: Any
    scheme: str = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A weight, or its QuantArray, stored as [..., out, in]. XLA on CPU rearranges a matrix for every
    product, and this layout takes less time."""

    w: jax.Array | QuantArray


def transposed(w: jax.Array | QuantArray) -> Transposed:
    """Returns the same weight [..., in, out] stored as [..., out, in]; scales do not change."""
    if isinstance(w, QuantArray):
        return Transposed(dataclasses.replace(w, q=jnp.swapaxes(w.q, -1, -2)))
    return Transposed(jnp.swapaxes(w, -1, -2))


def quantize(
    x: jax.Array, axis: int, dtype: Any = jnp.int8, cut: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (`dtype` values, float32 scale with `axis` kept as 1) of `x` reduced over `axis`.

    Args:
      cut: the mesh axis over which `axis` is cut, inside a shard_map. The scale is that of all parts.
    """
    bound = BOUND[jnp.dtype(dtype)]
    x = x.astype(jnp.float32)
    # XLA replaces a division by the product with the reciprocal in some programs and not in others,
    # which moves values that lie half-way: both reciprocals are written out.
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    largest = jax.lax.pmax(largest, cut) if cut else largest
    scale = largest * np.float32(1 / bound)
    scale = jnp.where(scale < MIN_SCALE, 1.0, scale)
    x = x * (1 / scale)
    x = jnp.round(x) if dtype == jnp.int8 else x  # the conversion to a float type rounds by itself
    return jnp.clip(x, -bound, bound).astype(dtype), scale


def stored(x: jax.Array, dtype: str) -> jax.Array:
    """Returns keys or values [..., K] rounded as by a cache of this dtype, in x's dtype."""
    # XLA may drop a conversion and its inverse: not across a barrier, nor this reduction.
    if jnp.dtype(dtype) in BOUND:
        codes, scale = quantize(x, -1, jnp.dtype(dtype))
        codes = jax.lax.optimization_barrier(codes)
        return (codes.astype(jnp.float32) * scale).astype(x.dtype)
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def quantize_weight(w: jax.Array, scheme: str, cut: str | None = None) -> QuantArray:
    """Returns the QuantArray of a float weight [..., in, out]. `cut` is as in `quantize`; blocks of
    MXFP4 are whole on a device."""
    if SCHEMES[scheme].is_mxfp4:
        return QuantArray(*mxfp4.quantize(w), scheme=scheme)
    return QuantArray(*quantize(w, -2, SCHEMES[scheme].dtype, cut), scheme=scheme)


def dot(x: jax.Array, w: jax.Array | QuantArray | Master | Transposed) -> jax.Array:
    """Returns x [..., i] @ w [i, o] -> [..., o] in x's dtype. Sums are float32, or int32 for
    s8 x s8."""
    if isinstance(w, Master):
        return _straight_through(x, w.w, w.scheme)
    bare: Any = w.w if isinstance(w, Transposed) else w
    if not isinstance(bare, QuantArray):
        if isinstance(w, Transposed) or x.dtype == jnp.float32:
            return _product(x, w, jnp.float32).astype(x.dtype)
        return _narrow_product(x, bare.astype(x.dtype))
    scheme = SCHEMES[bare.scheme]
    if scheme.is_mxfp4:
        whole = mxfp4.dequantize(bare.q, bare.scale, x.dtype)
        return _product(x, whole, jnp.float32).astype(x.dtype)
    if not scheme.has_activations:
        return (_product(x, w, jnp.float32) * _scale(bare, x.ndim)).astype(x.dtype)
    return dot_of_codes(*quantize(x, -1, scheme.dtype), w).astype(x.dtype)


def dot_of_codes(
    x_q: jax.Array, x_scale: jax.Array, w: Any
) -> jax.Array:
    """Returns `dot` of the rows that `quantize` made these 8-bit values and scales of, in
    float32."""
    bare: Any = w.w if isinstance(w, Transposed) else w
    scale = _scale(bare, x_q.ndim)
    y = _product(x_q, w, jnp.int32 if x_q.dtype == jnp.int8 else jnp.float32)
    return y.astype(jnp.float32) * x_scale * scale


def _scale(w: QuantArray, ndim: int) -> jax.Array:
    return w.scale.reshape((1,) * (ndim - 1) + (-1,))


def _product(x: jax.Array, w: Any, accumulator: type) -> jax.Array:
    """Returns the product of x with the values of w, without scales."""
    is_transposed = isinstance(w, Transposed)
    w = w.w if is_transposed else w
    values = w.q if isinstance(w, QuantArray) else w
    if is_transposed:
        # Else XLA transposes it back before a loop, which is what this saves.
        x, values = jax.lax.optimization_barrier((x, values))
    dims = (((x.ndim - 1,), (int(is_transposed),)), ((), ()))
    return jax.lax.dot_general(x, values.astype(x.dtype), dims, preferred_element_type=accumulator)


@jax.custom_vjp
def _narrow_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x [..., i] @ w [i, o] -> [..., o] of one narrow dtype, with float32 sums.

    Its gradient has the products that JAX derives, of the same narrow values. But JAX widens the
    incoming gradient before them, and a GPU then multiplies in TF32, at half the rate of bfloat16."""
    return _product(x, w, jnp.float32).astype(x.dtype)


def _narrow_product_fwd(x, w):
    return _narrow_product(x, w), (x, w)


def _narrow_product_bwd(operands, y_bar):
    x, w = operands
    rows = tuple(range(x.ndim - 1))
    dot_general = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    x_bar = dot_general(y_bar, w, (((y_bar.ndim - 1,), (1,)), ((), ())))
    w_bar = dot_general(x, y_bar, ((rows, rows), ((), ())))
    return x_bar.astype(x.dtype), w_bar.astype(w.dtype)


_narrow_product.defvjp(_narrow_product_fwd, _narrow_product_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _straight_through(x: jax.Array, w: jax.Array, scheme: str) -> jax.Array:
    """Returns the sampler's product of x and the quantized w. Its gradient is that of the float
    product x @ w before quantization."""
    return dot(x, quantize_weight(w, scheme))


def _straight_through_fwd(x, w, scheme):
    return _straight_through(x, w, scheme), (x, w)


def _straight_through_bwd(scheme, operands, gradient):
    return jax.vjp(dot, *operands)[1](gradient)


_straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def quantize_params(params: dict, recipe: Recipe) -> dict:
    """Returns parameters with the recipe's projections as QuantArrays. Embedding, norms, biases and
    output head keep their dtype. Call it once per weight sync, inside jit."""
    quantized = lambda name, w: quantize_weight(w, recipe.scheme) if recipe.covers(name) else w
    return by_stack(lambda layers, _: {n: quantized(n, w) for n, w in layers.items()}, params)


def masters(layer: dict, recipe: Recipe) -> dict:
    """Returns parameters with the recipe's projections as `Master`s: the learner computes the
    sampler's products and gets gradients of the float weights (Jet-RL, arXiv:2601.14243; QaRL,
    arXiv:2604.07853)."""
    master = lambda w: Master(w, recipe.scheme)
    of = lambda name, w: lora.on_base(master, w) if recipe.covers(name) else w
    return {name: of(name, w) for name, w in layer.items()}
