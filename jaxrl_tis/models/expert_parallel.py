"""Experts on several devices: each token travels to the devices of its experts and back.

A device holds E / N experts, N the size of the mesh axis "expert", and its own tokens. It sorts the
copies of its tokens by expert, sends each device those of its experts, multiplies what it receives,
and sends the results back. The exchange is ragged and nothing is dropped: the buffer of a device has
room for all tokens of the N devices. CHUNK tokens of a device travel at a time, which bounds it.

On large v5e slices every device gets all tokens of the N devices once and adds the share of its own
experts, with fast numerics; with invariant ones, and on a CPU, the exchange is in blocks of equal
size.

Shapes: b row, t token, k expert of a token, e expert, d embed, s source, n copy of a token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels.grouped_matmul import group_of_rows
from jaxrl_tis.models import lora, moe, quant
from jaxrl_tis.models.grouped import grouped_matmul, grouped_matmul_invariant
from jaxrl_tis.sharding import Layout

AXES = (
    ("expert", "expert_embed", "mlp"), ("expert", "expert_embed", "mlp"),
    ("expert", "mlp", "expert_embed"), ("expert", "mlp"), ("expert", "mlp"),
)
WIDTH = (1, 1, 2, None, None)  # axis of the embedding width; biases have none
CHUNK = 1024  # tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def experts(
    x_btd, ids_btk, gates_btk, weights: tuple, num_experts: int, layout: Layout,
    is_invariant: bool = False, unit: Callable = moe.swiglu,
):
    """Returns `moe.experts` of rows [B,T,D] on a mesh, in x's dtype.

    Args:
      weights: gate, up and down, and biases of the first two if any, sharded as `AXES` in the layout.
      unit: `moe.unit` of the model.

    Gradient: as of one device. Those of the weights are summed over devices in
    `Layout.grad_reduce_dtype`.
    """
    x_spec, w_specs = _specs(layout, weights)

    def local(x_btd, ids_btk, gates_btk, weights):
        gathered = _gathered(weights, layout, x_btd.dtype)
        plan: tuple = gathered, num_experts, layout, is_invariant, unit
        run = lambda rows: _summed(*rows, *plan)
        y_cmd = jax.lax.map(run, _chunks(x_btd, ids_btk, gates_btk))
        y_btd = _whole(y_cmd, x_btd.shape)
        if not is_invariant:
            y_btd = layout.summed(y_btd, "mlp")
        return y_btd.astype(x_btd.dtype)

    specs = x_spec, x_spec, x_spec, w_specs
    return layout.shard(local, specs, x_spec)(x_btd, ids_btk, gates_btk, weights)


def _experts_fwd(x, ids, gates, weights, *plan):
    return experts(x, ids, gates, weights, *plan), (x, ids, gates, weights)


def _experts_bwd(num_experts, layout, is_invariant, unit, operands, y_bar):
    x_spec, w_specs = _specs(layout, operands[3])

    def local(x, ids, gates, weights, y_bar):
        gathered = _gathered(weights, layout, x.dtype)

        def chunk(sums, rows):
            x_md, ids_mk, gates_mk, y_md = rows
            run = lambda x, gates, w: _summed(
                x, ids_mk, gates, w, num_experts, layout, is_invariant, unit
            )
            *bars, w_bars = jax.vjp(run, x_md, gates_mk, gathered)[1](y_md.astype(jnp.float32))
            return jax.tree.map(jnp.add, sums, w_bars), bars

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), gathered)
        bars, (x_bar, gates_bar) = jax.lax.scan(chunk, zeros, _chunks(x, ids, gates, y_bar))
        x_bar = layout.summed(_whole(x_bar, x.shape).astype(jnp.float32), "mlp")
        gates_bar = _whole(gates_bar, gates.shape)
        if not is_invariant:  # there each device has the sum over the width already
            gates_bar = layout.summed(gates_bar, "mlp")
        return x_bar.astype(x.dtype), gates_bar, _scattered(bars, weights, layout)

    specs = x_spec, x_spec, x_spec, w_specs, x_spec
    run = layout.shard(local, specs, (x_spec, x_spec, w_specs))
    x_bar, gates_bar, w_bars = run(*operands, y_bar)
    return x_bar, None, gates_bar, w_bars


experts.defvjp(_experts_fwd, _experts_bwd)


def _specs(layout: Layout, weights: tuple) -> tuple[Any, tuple]:
    """Returns the PartitionSpecs of the tokens, and those of the weights in their trees."""
    spec = lambda *axes: layout.sharding(axes).spec

    def of(w, axes):
        if isinstance(w, lora.Adapted):
            a, b = spec(*axes[:2], None), spec(axes[0], None, axes[2])
            return lora.Adapted(of(w.w, axes), a, b, w.scale)
        if isinstance(w, quant.QuantArray):
            scale = spec(*quant.scale_axes(axes, w.scheme))
            return quant.QuantArray(spec(*axes), scale, scheme=w.scheme)
        if isinstance(w, quant.Master):
            return quant.Master(spec(*axes), scheme=w.scheme)
        return spec(*axes)

    return spec("batch", "length", None), tuple(map(of, weights, AXES[: len(weights)]))


def _gathered(weights: tuple, layout: Layout, dtype: Any) -> tuple:
    """Returns the weights with their whole width, in the compute dtype where they are floats. A
    master keeps its dtype, of which a sampler makes its 8-bit values."""
    if not layout.count(layout.axes("expert_embed")) > 1:
        return weights

    def whole(w, axis):
        if axis is None:
            return w
        if isinstance(w, lora.Adapted):  # one of the factors has the width
            name = "ab"[axis - 1]
            factor: dict[str, Any] = {name: layout.gather(getattr(w, name), axis, "expert_embed")}
            return dataclasses.replace(w, w=whole(w.w, axis), **factor)
        w = w if isinstance(w, quant.Master) else w.astype(dtype)
        return jax.tree.map(lambda x: layout.gather(x, axis, "expert_embed"), w)

    return tuple(map(whole, weights, WIDTH[: len(weights)]))


def _scattered(bars: tuple, weights: tuple, layout: Layout) -> tuple:
    """Returns the gradients of the weights, summed over the devices with other tokens; a device
    keeps its own part of the width."""

    def summed(bar, w, axis):
        if isinstance(w, lora.Adapted):
            # The factor with the embedding width is whole on the devices that "mlp" is cut over.
            wide, cut = ("a", "b") if axis == 1 else ("b", "a")
            of_wide = layout.summed(getattr(bar, wide), "mlp")
            parts = {
                wide: summed(of_wide, getattr(w, wide), axis),
                cut: summed(getattr(bar, cut), getattr(w, cut), None),
            }
            base = jax.tree.map(jnp.zeros_like, w.w)
            return dataclasses.replace(w, w=base, **parts)
        if axis is None:
            return layout.sum_rows(bar, ("expert",)).astype(w.dtype)
        if layout.count(layout.axes("expert_embed")) > 1:
            bar = layout.scatter(bar, axis, "expert_embed")
        return layout.sum_rows(bar, ("expert_embed", "expert")).astype(w.dtype)

    of = lambda axis: functools.partial(summed, axis=axis)
    return tuple(
        jax.tree.map(of(axis), bar, w, is_leaf=lambda x: isinstance(x, lora.Adapted))
        for bar, w, axis in zip(bars, weights, WIDTH[: len(weights)], strict=True)
    )


def _chunks(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays [B,T,...] of tokens as equal chunks [C,M,...] of at most CHUNK tokens. Zeros fill
    the last one where no small number of chunks divides the tokens."""
    tokens = arrays[0].shape[0] * arrays[0].shape[1]
    least = -(-tokens // CHUNK)
    count = next((n for n in range(least, 2 * least) if tokens % n == 0), least)
    size = -(-tokens // count)

    def chunks(x):
        rows = x.reshape(tokens, *x.shape[2:])
        rows = jnp.pad(rows, [(0, count * size - tokens)] + [(0, 0)] * (rows.ndim - 1))
        return rows.reshape(count, size, *x.shape[2:])

    return tuple(map(chunks, arrays))


def _whole(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns chunks [C,M,...] as the array [B,T,...] of this shape that `_chunks` has cut."""
    rows = chunks.reshape(-1, *chunks.shape[2:])
    return rows[: shape[0] * shape[1]].reshape(shape)


def _summed(
    x_md, ids_mk, gates_mk, weights, num_experts, layout: Layout, is_invariant: bool, unit: Callable
) -> jax.Array:
    """Returns `moe.experts` [M,D] of this device's tokens: the sum over its part of the experts'
    width, or over all of the width with invariant numerics."""
    multiply, combine = moe.INVARIANT if is_invariant else moe.FAST
    multiply = functools.partial(multiply, unit=unit)
    tensor = layout.axes("mlp")
    if (parts := layout.count(tensor)) > 1:
        down = functools.partial(grouped_matmul, cut=tensor[0])
        if is_invariant:
            down = functools.partial(grouped_matmul_invariant, split=(tensor[0], parts))
        multiply = functools.partial(multiply, matmul_down=down)
    axes = layout.axes("expert")
    if (count := layout.count(axes)) > 1:
        is_ragged = _is_ragged(layout)
        if not is_invariant and not is_ragged:
            rows = x_md, ids_mk, gates_mk
            return _by_all(*rows, weights, num_experts // count, multiply, combine, axes[0])
        move = functools.partial(exchanged, axis=axes[0], is_ragged=is_ragged)
        multiply = functools.partial(_elsewhere, multiply=multiply, axis=axes[0], move=move)
    return moe.experts(x_md, ids_mk, gates_mk, weights, num_experts, multiply, combine)


def _is_ragged(layout: Layout) -> bool:
    """Whether a TPU mesh can have ragged exchanges. libtpu refuses them on a v5e slice of more than
    16 chips."""
    first = layout.mesh.devices.flat[0]
    is_v5e = first.device_kind == "TPU v5 lite"
    return not (is_v5e and max(max(d.coords) for d in layout.mesh.devices.flat) > 3)


def _by_all(
    x_md, ids_mk, gates_mk, weights, here: int, multiply: Callable, combine: Callable, axis: str
) -> jax.Array:
    """Returns `moe.experts` where every device has all tokens of a mesh axis and `here` experts:
    tokens are gathered, and the sums over each device's experts are scattered back."""
    whole = lambda x: jax.lax.all_gather(x, axis, tiled=True)
    x_nd, ids_nk, gates_nk = map(whole, (x_md, ids_mk, gates_mk))
    ids_nk = ids_nk - jax.lax.axis_index(axis) * here
    is_here_nk = (ids_nk >= 0) & (ids_nk < here)
    # Rows of the id `here` come after those of all experts, which none of them counts.
    ids_nk, gates_nk = jnp.where(is_here_nk, ids_nk, here), jnp.where(is_here_nk, gates_nk, 0.0)
    y_nd = moe.experts(x_nd, ids_nk, gates_nk, weights, here, multiply, combine)
    return jax.lax.psum_scatter(y_nd, axis, tiled=True)


def _elsewhere(rows_nd, sizes_e, weights, multiply: Callable, axis: str, move: Callable) -> jax.Array:
    """Returns `multiply` of rows sorted by expert, computed on the devices of the experts.

    `move` is `exchanged` on this axis.
    """
    counts_se = jax.lax.all_gather(sizes_e, axis)
    count = len(counts_se)
    here = len(sizes_e) // count
    sizes_sd = jnp.sum(counts_se.reshape(count, count, here), axis=-1)
    mine_se = jax.lax.dynamic_slice_in_dim(
        counts_se, jax.lax.axis_index(axis) * here, here, axis=1
    )
    room = count * len(rows_nd)
    received_nd = move(rows_nd, sizes_sd, room)
    place_n = group_of_rows(mine_se.reshape(-1), room)
    expert_n = jnp.where(place_n < mine_se.size, place_n % here, here)
    order_n, back_n = moe.sorted_by(expert_n, here)
    sorted_nd = moe.permuted(received_nd, order_n, back_n)
    out_nd = multiply(sorted_nd, jnp.sum(mine_se, axis=0), weights)
    out_nd = moe.permuted(out_nd, back_n, order_n)
    return move(out_nd, sizes_sd.T, len(rows_nd))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchanged(
    x_nd: jax.Array, sizes_sd: jax.Array, room: int, axis: str, is_ragged: bool
) -> jax.Array:
    """Returns the rows [room, D] that the devices of a mesh axis send this one, in their order, and
    zeros after them.

    Args:
      x_nd: this device's rows, in the order of their destinations.
      sizes_sd: int32, how many rows device s sends device d, at most `room` and the rows of x.
      is_ragged: whether a TPU sends these rows alone. Else each device sends each other device a
        block of the largest possible size.
    """
    me = jax.lax.axis_index(axis)
    before = lambda x, axis: jnp.cumsum(x, axis=axis) - x
    first_sd = before(sizes_sd, 1)  # in the rows of the source
    place_sd = before(sizes_sd, 0)  # in the rows of the destination

    def ragged(x_nd, sizes_sd):
        empty = jnp.zeros((room, x_nd.shape[1]), x_nd.dtype)
        return jax.lax.ragged_all_to_all(
            x_nd, empty, first_sd[me], sizes_sd[me], place_sd[me], sizes_sd[:, me], axis_name=axis
        )

    def in_blocks(x_nd, sizes_sd):
        block = min(len(x_nd), room)
        row_dn = first_sd[me][:, None] + jnp.arange(block)[None]
        sent_dnd = x_nd[jnp.minimum(row_dn, len(x_nd) - 1)]
        received_snd = jax.lax.all_to_all(sent_dnd, axis, 0, 0, tiled=True)
        source_n = group_of_rows(sizes_sd[:, me], room)
        is_sent_n = source_n < len(sizes_sd)
        source_n = jnp.minimum(source_n, len(sizes_sd) - 1)
        row_n = jnp.arange(room) - place_sd[source_n, me]
        rows_nd = received_snd[source_n, jnp.minimum(row_n, block - 1)]
        return jnp.where(is_sent_n[:, None], rows_nd, 0)

    tpu = ragged if is_ragged else in_blocks
    return jax.lax.platform_dependent(x_nd, sizes_sd, tpu=tpu, default=in_blocks)


def _exchanged_fwd(x_nd, sizes_sd, room, *plan):
    return exchanged(x_nd, sizes_sd, room, *plan), (sizes_sd, len(x_nd))


def _exchanged_bwd(room, axis, is_ragged, saved, y_bar):
    sizes_sd, count = saved
    return exchanged(y_bar, sizes_sd.T, count, axis, is_ragged), None


exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)
