"""Products of sorted rows with the weight of their expert, for every kind of weight.

`grouped_matmul` is `quant.dot` for the weights of all experts. `grouped_matmul_invariant` has the
numerics of models/invariant.py. In a program over several devices, call both inside a shard_map.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import mxfp4, tiles
from jaxrl_tis.kernels.grouped_matmul import (
    by_tiles, group_of_rows, outer_by_tiles, outer_kernel, product_kernel, tile_sizes,
)
from jaxrl_tis.models import invariant, lora, quant

INVARIANT_TILES = 16 * tiles.ROWS, 2 * tiles.ROWS  # a product of fewer rows is padded to two tiles
Split = tuple[str | None, int]


def grouped_matmul(
    x_mi: jax.Array, w: Any, sizes_e: jax.Array, cut: str | None = None
) -> jax.Array:
    """Returns each row's `quant.dot` with the weight of its expert, [M,o] in x's dtype.

    Args:
      x_mi: [M,i] rows sorted by expert.
      w: any weight of `quant.dot` with a leading axis E, for example float [E,i,o].
      sizes_e: [E] int32 number of consecutive rows of each expert. Rows after the last expert have
        the result 0.
      cut: the mesh axis that cuts i, inside a shard_map. The result is one term of a sum over this
        axis, and 8-bit values have the scales of whole rows and columns.

    Gradient: that of the float product, for x and for float weights and masters. Sums are float32.
    A QuantArray gets no gradient, and x gets that of the product with the dequantized weight.
    """
    if isinstance(w, lora.Adapted):
        dot = functools.partial(grouped_matmul, sizes_e=sizes_e, cut=cut)
        return lora.product(x_mi, w, dot, dot)
    _check(x_mi, w, sizes_e)
    return _grouped(x_mi, w, sizes_e, None, cut)


def grouped_matmul_invariant(
    x_mi: jax.Array, w: Any, sizes_e: jax.Array, split: Split = (None, 1)
) -> jax.Array:
    """Returns `grouped_matmul` by the products of kernels/tiles.py. Other rows, their number and the
    sizes change no bit of a row. The gradient is that of `grouped_matmul`. w is not transposed.

    Args:
      split: the mesh axis that cuts i, and its size; the products of all parts are summed by
        `tiles.butterfly`. 8-bit weights cannot be cut: their activations have one scale.
    """
    if isinstance(w, lora.Adapted):
        dot = functools.partial(grouped_matmul_invariant, sizes_e=sizes_e, split=split)
        thin = functools.partial(grouped_matmul_invariant, sizes_e=sizes_e)
        return lora.product(x_mi, w, dot, thin)
    _check(x_mi, w, sizes_e)
    if isinstance(w, quant.Transposed):
        raise ValueError("An invariant product has no transposed weights.")
    if split[1] > 1 and isinstance(w, (quant.QuantArray, quant.Master)):
        raise ValueError("An invariant product of 8 bits is not cut along its inputs.")
    return _grouped(x_mi, w, sizes_e, split, None)


def _check(x_mi, w, sizes_e):
    values = _values(w)
    shape = values.shape[:1] + values.shape[:0:-1] if _is_transposed(w) else values.shape
    if _is_mxfp4(w):
        shape = shape[0], 2 * shape[1], shape[2]
    if x_mi.ndim != 2 or len(shape) != 3 or sizes_e.ndim != 1:
        raise ValueError(
            f"grouped_matmul needs x [M,i], weights [E,i,o] and sizes [E]; the shapes are "
            f"{x_mi.shape}, {shape} and {sizes_e.shape}."
        )
    if shape[0] != sizes_e.shape[0]:
        raise ValueError(f"There are weights of {shape[0]} experts and {sizes_e.shape[0]} sizes.")
    if shape[1] != x_mi.shape[1]:
        raise ValueError(f"Rows of width {x_mi.shape[1]} meet weights with {shape[1]} inputs.")


def _is_transposed(w) -> bool:
    return isinstance(w, quant.Transposed)


def _is_mxfp4(w) -> bool:
    return isinstance(w, quant.QuantArray) and w.is_mxfp4


def _values(w) -> jax.Array:
    """Returns the array of a weight: its 8-bit values if it is a QuantArray."""
    if isinstance(w, (quant.Transposed, quant.Master)):
        w = w.w
    return w.q if isinstance(w, quant.QuantArray) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x_mi, w, sizes_e, split: Split | None, cut: str | None):
    if isinstance(w, quant.Master):
        w = quant.quantize_weight(w.w, w.scheme, cut)
    if split is None:
        return _product(x_mi, w, sizes_e, cut)
    if split[1] == 1:
        dot = lambda x_ri, w: invariant.dot(x_ri[None], w, None, False)[0]
        return by_tiles(dot, x_mi, w, sizes_e, INVARIANT_TILES)
    part = lambda x_ri, w: tiles.product(x_ri, w.astype(x_ri.dtype))
    y_mo = by_tiles(part, x_mi, w, sizes_e, INVARIANT_TILES)
    return tiles.butterfly(y_mo, *split).astype(x_mi.dtype)


def _product(x_mi, w, sizes_e, cut=None):
    """Returns the product by the TPU kernel or by tiles of `quant.dot`. w is no master."""
    in_axis, dtype = int(_is_transposed(w)), x_mi.dtype
    bare, x_scale_m1 = w.w if in_axis else w, None
    if isinstance(bare, quant.QuantArray) and quant.SCHEMES[bare.scheme].has_activations:
        x_mi, x_scale_m1 = quant.quantize(x_mi, -1, quant.SCHEMES[bare.scheme].dtype, cut)

    def kernel(x_mi, x_scale_m1, w, sizes_e):
        if _is_mxfp4(w):
            return product_kernel(x_mi, w.q, sizes_e, 0, dtype, exponents_ebo=w.scale)
        values, scale = (w.q, w.scale) if isinstance(w, quant.QuantArray) else (w, None)
        return product_kernel(x_mi, values, sizes_e, in_axis, dtype, x_scale_m1, scale)

    def loop(x_mi, x_scale_m1, w, sizes_e):
        w = quant.Transposed(w) if in_axis else w
        sizes = tile_sizes(len(x_mi), len(sizes_e))
        if x_scale_m1 is None:
            return by_tiles(quant.dot, x_mi, w, sizes_e, sizes)
        dot = lambda x, w: quant.dot_of_codes(x[0], x[1], w).astype(dtype)
        return by_tiles(dot, (x_mi, x_scale_m1), w, sizes_e, sizes)

    return jax.lax.platform_dependent(
        x_mi, x_scale_m1, bare, sizes_e, tpu=kernel, default=loop
    )


def _outer(x_mi, y_mo, sizes_e, dtype):
    """Returns x^T y [E,i,o] over the rows of each expert, summed in float32."""
    sizes = tile_sizes(len(x_mi), len(sizes_e))
    loop = lambda x, y, sizes_e: outer_by_tiles(x, y, sizes_e, sizes).astype(dtype)
    kernel = functools.partial(outer_kernel, dtype=dtype)
    return jax.lax.platform_dependent(x_mi, y_mo, sizes_e, tpu=kernel, default=loop)


def _grouped_fwd(x_mi, w, sizes_e, *plan):
    return _grouped(x_mi, w, sizes_e, *plan), (x_mi, w, sizes_e)


def _grouped_bwd(split, cut, operands, y_mo):
    del split, cut
    x_mi, w, sizes_e = operands
    values, is_transposed = _values(w), _is_transposed(w)
    inner = w.w if is_transposed else w
    if _is_mxfp4(inner):
        dequantize = functools.partial(mxfp4.dequantize, dtype=y_mo.dtype)
        whole = jax.vmap(dequantize)(inner.q, inner.scale)
        return _product(y_mo, quant.Transposed(whole), sizes_e), None, None
    if isinstance(inner, quant.QuantArray):
        group_m = group_of_rows(sizes_e, len(x_mi))
        scale_mo = jnp.take(inner.scale[:, 0], group_m, axis=0, mode="clip")
        y_mo = (y_mo * scale_mo).astype(y_mo.dtype)
    x_bar = _product(y_mo, values if is_transposed else quant.Transposed(values), sizes_e)
    if isinstance(inner, quant.QuantArray):
        return x_bar, None, None
    pair = (y_mo, x_mi) if is_transposed else (x_mi, y_mo)
    w_bar = _outer(*pair, sizes_e, values.dtype)
    return x_bar, jax.tree.unflatten(jax.tree.structure(w), [w_bar]), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)
