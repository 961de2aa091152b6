"""Products of sorted rows with the weight of their expert, for every kind of weight.

`grouped_matmul` is `quant.dot` for a stack of weights. `grouped_matmul_invariant` has the numerics
of models/invariant.py: a row's result depends on the row and on its expert's weight, bit by bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.grouped_matmul import (
    by_tiles, group_of_rows, outer_by_tiles, outer_kernel, product_kernel, tile_sizes,
)
from jaxrl_tis.models import invariant, quant

INVARIANT_TILES = 16 * tiles.ROWS, 2 * tiles.ROWS  # a product of fewer rows is padded to two tiles


def grouped_matmul(x_mi: jax.Array, w: Any, sizes_e: jax.Array) -> jax.Array:
    """Returns each row's `quant.dot` with the weight of its expert, [M,o] in x's dtype.

    Args:
      x_mi: [M,i] rows sorted by expert.
      w: weight of `quant.dot` with a leading axis E, such as float [E,i,o].
      sizes_e: [E] int32 number of consecutive rows of each expert. Rows after the last expert have
        the result 0.

    Gradient: of x and of w (float weights and masters) as of the float product, with sums in
    float32. A QuantArray has none, and x's gradient is that of the dequantized weight.
    """
    _check(x_mi, w, sizes_e)
    return _grouped(x_mi, w, sizes_e, False)


def grouped_matmul_invariant(x_mi: jax.Array, w: Any, sizes_e: jax.Array) -> jax.Array:
    """Returns `grouped_matmul` by the products of kernels/tiles.py. Other rows, their number and the
    sizes change no bit of a row. The gradient is that of `grouped_matmul`. w is not transposed."""
    _check(x_mi, w, sizes_e)
    if isinstance(w, quant.Transposed):
        raise ValueError("An invariant product has no transposed weights.")
    return _grouped(x_mi, w, sizes_e, True)


def _check(x_mi, w, sizes_e):
    values = _values(w)
    shape = values.shape[:1] + values.shape[:0:-1] if _is_transposed(w) else values.shape
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


def _values(w) -> jax.Array:
    """Returns the array of a weight: its 8-bit values if it is a QuantArray."""
    if isinstance(w, (quant.Transposed, quant.Master)):
        w = w.w
    return w.q if isinstance(w, quant.QuantArray) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x_mi, w, sizes_e, is_invariant: bool):
    if isinstance(w, quant.Master):
        w = quant.quantize_weight(w.w, w.scheme)
    if is_invariant:
        dot = lambda x_ri, w: invariant.dot(x_ri[None], w, None, False)[0]
        return by_tiles(dot, x_mi, w, sizes_e, INVARIANT_TILES)
    return _product(x_mi, w, sizes_e)


def _product(x_mi, w, sizes_e):
    """Returns the product by the TPU kernel or by tiles of `quant.dot`. w is no master."""
    loop = functools.partial(
        by_tiles, quant.dot, tiles=tile_sizes(len(x_mi), len(sizes_e))
    )
    return jax.lax.platform_dependent(x_mi, w, sizes_e, tpu=_on_tpu, default=loop)


def _on_tpu(x_mi, w, sizes_e):
    in_axis, dtype = int(_is_transposed(w)), x_mi.dtype
    w = w.w if _is_transposed(w) else w
    if not isinstance(w, quant.QuantArray):
        return product_kernel(x_mi, w, sizes_e, in_axis, dtype)
    scheme, x_scale_m1 = quant.SCHEMES[w.scheme], None
    if scheme.has_activations:
        x_mi, x_scale_m1 = quant.quantize(x_mi, -1, scheme.dtype)
    return product_kernel(x_mi, w.q, sizes_e, in_axis, dtype, x_scale_m1, w.scale)


def _outer(x_mi, y_mo, sizes_e, dtype):
    """Returns x^T y [E,i,o] over the rows of each expert, summed in float32."""
    sizes = tile_sizes(len(x_mi), len(sizes_e))
    loop = lambda *arrays: outer_by_tiles(*arrays, sizes).astype(dtype)
    kernel = functools.partial(outer_kernel, dtype=dtype)
    return jax.lax.platform_dependent(x_mi, y_mo, sizes_e, tpu=kernel, default=loop)


def _grouped_fwd(x_mi, w, sizes_e, is_invariant):
    return _grouped(x_mi, w, sizes_e, is_invariant), (x_mi, w, sizes_e)


def _grouped_bwd(is_invariant, operands, y_mo):
    del is_invariant
    x_mi, w, sizes_e = operands
    values, is_transposed = _values(w), _is_transposed(w)
    inner = w.w if is_transposed else w
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
