"""int8 weights as a leaf type, and the one matrix product that accepts both kinds of weight.

Scheme (symmetric): scale = absmax / 127.5 per output channel (weights) or per token (activations),
q = clip(round_half_even(x / scale), -128, 127); an all-zero channel has scale 1. W8A16 keeps the
activations in their own dtype; W8A8 quantises them per token at run time and multiplies
s8 x s8 -> s32, whose accumulation is associative and therefore exact in any order.
"""

import dataclasses

import jax
import jax.numpy as jnp

SCHEMES = ("none", "w8a16", "w8a8")
QUANTIZED = ("q", "k", "v", "o", "gate", "up", "down")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantArray:
    """An int8 matrix with one f32 scale per output channel; stands where a float weight would.

    Attributes:
      q: [..., in, out] int8.
      scale: [..., 1, out] float32; the weight is q * scale.
      scheme: "w8a16" or "w8a8" (static).
    """

    q: jax.Array
    scale: jax.Array
    scheme: str = dataclasses.field(metadata=dict(static=True))


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns (int8 values, float32 scale with `axis` kept as 1) of `x` reduced over `axis`."""
    x = x.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = jnp.where(absmax > 0, absmax / 127.5, 1.0)
    return jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8), scale


def dot(x: jax.Array, w: jax.Array | QuantArray) -> jax.Array:
    """x [..., i] @ w [i, o] -> [..., o] in x's dtype, accumulated in float32 (int32 for W8A8)."""
    if not isinstance(w, QuantArray):
        return _matmul(x, w.astype(x.dtype), jnp.float32).astype(x.dtype)
    if w.scheme == "w8a16":
        return (_matmul(x, w.q.astype(x.dtype), jnp.float32) * _rows(w.scale, x)).astype(x.dtype)
    x_q, x_scale = quantize(x, axis=-1)
    product = _matmul(x_q, w.q, jnp.int32).astype(jnp.float32)
    return (product * x_scale * _rows(w.scale, x)).astype(x.dtype)


def _matmul(x: jax.Array, w: jax.Array, accumulate) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=accumulate)


def _rows(scale: jax.Array, x: jax.Array) -> jax.Array:
    return scale.reshape((1,) * (x.ndim - 1) + (-1,))


def quantize_params(params: dict, scheme: str) -> dict:
    """The same tree with every projection of the layers as a QuantArray; embedding, norms, biases
    and the output head keep their dtype. Call it once per weight sync, inside jit."""
    if scheme == "none":
        return params

    def leaf(name: str, w: jax.Array):
        return QuantArray(*quantize(w, axis=-2), scheme=scheme) if name in QUANTIZED else w

    return {**params, "layers": {name: leaf(name, w) for name, w in params["layers"].items()}}
