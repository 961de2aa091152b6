"""Matrix products and embedding look-ups of the learner with FSDP-sharded weights.

A device gathers a weight in the compute dtype, multiplies its own rows, and frees the gathered
weight. The backward pass gathers it again. Each device's gradient is that of its own rows: they are
summed in `Layout.grad_reduce_dtype` by a reduce-scatter, which leaves a device the sum for its own part and
makes no array of all of it. Left to the partitioner, some shapes get an all-reduce, which sends
twice the bytes. The table of the tokens is never gathered: its rows travel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_tis.models import quant
from jaxrl_tis.sharding import Layout


def is_cut(layout: Layout | None) -> bool:
    """Whether the layout shards the rows of a learner and may shard the width of its weights."""
    if layout is None:
        return False
    rows = layout.axes("batch") + layout.axes("length")
    return bool(rows and layout.axes("embed")) and layout.count(rows) > 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(x: jax.Array, w: jax.Array | quant.Master, layout: Layout, is_split_in: bool) -> jax.Array:
    """Returns `quant.dot`: x [B,T,i] @ w [i,o] -> [B,T,o] in x's dtype.

    Args:
      w: sharded as ("embed", "mlp") in the layout, or with `is_split_in` as ("mlp", "embed").
    """
    if isinstance(w, quant.Master):  # its scales are those of whole columns
        return quant.dot(x, w)
    x_spec, w_spec, y_spec = _specs(layout, is_split_in)

    def local(x, w):
        y = _product(x, _gathered(w, layout, is_split_in, x.dtype), (((2,), (0,)), ((), ())))
        return layout.summed(y, "mlp" if is_split_in else None).astype(x.dtype)

    return layout.shard(local, (x_spec, w_spec), y_spec)(x, w)


def _dot_fwd(x, w, layout, is_split_in):
    return dot(x, w, layout, is_split_in), (x, w)


def _dot_bwd(layout, is_split_in, operands, y_bar):
    x, w = operands
    x_spec, w_spec, y_spec = _specs(layout, is_split_in)

    def local(x, w, y_bar):
        w_all = _gathered(w, layout, is_split_in, x.dtype)
        x_bar = _product(y_bar, w_all, (((2,), (1,)), ((), ())))
        x_bar = layout.summed(x_bar, None if is_split_in else "mlp")
        # The width comes first: a TPU scatters parts of rows, and not of columns below its 128 lanes.
        pair = (y_bar, x) if is_split_in else (x, y_bar)
        w_bar = layout.scatter(_product(*pair, (((0, 1), (0, 1)), ((), ()))), 0)
        w_bar = layout.sum_rows(w_bar).astype(w.dtype)
        return x_bar.astype(x.dtype), w_bar.T if is_split_in else w_bar

    values = w.w if isinstance(w, quant.Master) else w
    x_bar, w_bar = layout.shard(local, (x_spec, w_spec, y_spec), (x_spec, w_spec))(x, values, y_bar)
    return x_bar, jax.tree.unflatten(jax.tree.structure(w), [w_bar])


dot.defvjp(_dot_fwd, _dot_bwd)


_product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)


def _specs(layout: Layout, is_split_in: bool) -> tuple[PartitionSpec, ...]:
    """Returns the PartitionSpecs of x, w and the product."""
    spec = lambda *axes: layout.sharding(axes).spec
    inner, outer = spec("batch", "length", None), spec("batch", "length", "mlp")
    if is_split_in:
        return outer, spec("mlp", "embed"), inner
    return inner, spec("embed", "mlp"), outer


def _gathered(w: jax.Array, layout: Layout, is_split_in: bool, dtype: Any) -> jax.Array:
    return layout.gather(w.astype(dtype), int(is_split_in))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def take(table_vd: jax.Array, tokens_bt: jax.Array, layout: Layout, dtype: str) -> jax.Array:
    """Returns rows [B,T,D] of a table sharded as ("vocab", "embed"), in the compute dtype.

    A device looks up its part of the width for all rows of the devices that share the width, and
    sends each device its rows. Gradients return the same way.
    """
    spec = lambda *axes: layout.sharding(axes).spec
    width = layout.axes("embed")

    def local(table_vd, tokens_bt):
        ids, is_here = _local_ids(table_vd, tokens_bt, layout)
        x = jnp.take(table_vd, ids, axis=0).astype(dtype)
        x = layout.summed(jnp.where(is_here[..., None], x, 0), "vocab")
        return jax.lax.all_to_all(x, width, split_axis=0, concat_axis=2, tiled=True)

    in_specs = spec("vocab", "embed"), spec("batch", "length")
    return layout.shard(local, in_specs, spec("batch", "length", None))(table_vd, tokens_bt)


def _take_fwd(table_vd, tokens_bt, layout, dtype):
    return take(table_vd, tokens_bt, layout, dtype), (table_vd, tokens_bt)


def _take_bwd(layout, dtype, operands, x_bar):
    table_vd, tokens_bt = operands
    spec = lambda *axes: layout.sharding(axes).spec
    width = layout.axes("embed")

    def local(table_vd, tokens_bt, x_bar):
        ids, is_here = _local_ids(table_vd, tokens_bt, layout)
        x_bar = jax.lax.all_to_all(x_bar, width, split_axis=2, concat_axis=0, tiled=True)
        x_bar = jnp.where(is_here[..., None], x_bar.astype(jnp.float32), 0)
        table_bar = jnp.zeros(table_vd.shape, jnp.float32).at[ids].add(x_bar)
        return layout.sum_rows(table_bar).astype(table_vd.dtype)

    table_spec, token_spec = spec("vocab", "embed"), spec("batch", "length")
    in_specs = table_spec, token_spec, spec("batch", "length", None)
    return layout.shard(local, in_specs, table_spec)(table_vd, tokens_bt, x_bar), None


take.defvjp(_take_fwd, _take_bwd)


def _local_ids(table_vd: jax.Array, tokens_bt: jax.Array, layout: Layout):
    """Returns the token ids of all rows that share the width, relative to this device's vocabulary,
    and whether they belong to it."""
    ids = layout.gather(tokens_bt, 0)
    size, axes = table_vd.shape[0], layout.axes("vocab")
    if layout.count(axes) > 1:
        ids = ids - jax.lax.axis_index(axes) * size
    return jnp.clip(ids, 0, size - 1), (ids >= 0) & (ids < size)
