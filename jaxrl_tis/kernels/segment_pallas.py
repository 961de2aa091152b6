"""TPU kernels of `segment`: one pass over [B, T] in tiles along T.

The tiles of a row are visited in order, and accumulators and the state of a scan stay on the chip.
A tile may hold parts of any number of segments. The last tile of T and the last block of rows may
reach past the array; these positions are masked. Everything is computed in float32.

On a mesh each device works on its own rows, and T is gathered.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_tis.kernels import narrow, segment_reference

LANES = 128
REDUCE_TILE = 2048  # tokens that are copied to the chip at a time, split into chunks
SCAN_TILE = 1024
CHUNK = 512  # tokens whose segments are looked at together

NEUTRAL = segment_reference.NEUTRAL | {"logsumexp": -jnp.inf}


def expm1(x: jax.Array) -> jax.Array:
    """Returns exp(x) - 1 in float32, by a Taylor series near 0; TPU kernels lack this function."""
    series = jnp.ones_like(x)
    for k in range(9, 1, -1):
        series = 1.0 + x / k * series
    return jnp.where(jnp.abs(x) < 0.5, x * series, jnp.exp(x) - 1.0)


def _log_add_exp(x, y):
    top = jnp.maximum(x, y)
    finite = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)
    return finite + jnp.log(jnp.exp(x - finite) + jnp.exp(y - finite))


def _log_sum_exp(x):
    top = jnp.max(x, axis=1, keepdims=True)
    finite = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)
    return finite + jnp.log(jnp.sum(jnp.exp(x - finite), axis=1, keepdims=True))


JOIN = segment_reference.JOIN | {"logsumexp": _log_add_exp}
REDUCE: dict[str, Callable[..., jax.Array]] = {
    "sum": functools.partial(jnp.sum, axis=1, keepdims=True),
    "max": functools.partial(jnp.max, axis=1, keepdims=True),
    "min": functools.partial(jnp.min, axis=1, keepdims=True),
    "logsumexp": _log_sum_exp,
}


def fits(num_results: int, num_segments: int) -> bool:
    """Whether the accumulators of eight rows leave half of 16 MiB of on-chip memory free."""
    return num_results * _round_up(num_segments, LANES) * 8 * 4 * 2 <= 2**23


def reduce(
    inputs: Sequence[jax.Array], ids: jax.Array, num_segments: int,
    terms: Callable[..., Sequence[jax.Array]], ops: Sequence[str],
) -> list[jax.Array]:
    """Returns reductions over segments of the outputs of `terms`, [B, num_segments] float32 each.

    Args:
      inputs: [B, T] arrays, float32 or bfloat16.
      ids: [B, T] int32; only 1..num_segments count, in any order.
      num_segments: static.
      terms: elementwise, of float32 tiles; it sees 0 where the id does not count.
      ops: keys of `REDUCE`, one per term. An empty segment has the value in `NEUTRAL`.
    """
    shape, width = ids.shape, _round_up(num_segments, LANES)
    rows, tile = _block(inputs, shape[1], REDUCE_TILE)
    kernel = functools.partial(_reduce_kernel, terms, ops, shape, num_segments)
    tokens = pl.BlockSpec((rows, tile), lambda i, t: (i, t))
    call = narrow.pallas_call(
        kernel,
        grid=(pl.cdiv(shape[0], rows), pl.cdiv(shape[1], tile)),
        in_specs=[tokens] * (1 + len(inputs)),
        out_specs=[pl.BlockSpec((rows, width), lambda i, t: (i, 0))] * len(ops),
        out_shape=[jax.ShapeDtypeStruct((shape[0], width), jnp.float32)] * len(ops),
        compiler_params=_IN_ORDER,
        name="segment_reduce",
    )
    return [x[:, :num_segments] for x in call(ids, *inputs)]


def _reduce_kernel(terms, ops, shape, num_segments, ids_ref, *refs):
    inputs, outputs = refs[: -len(ops)], refs[-len(ops) :]

    @pl.when(pl.program_id(1) == 0)
    def _():
        for op, output in zip(ops, outputs, strict=True):
            output[...] = jnp.full(output.shape, NEUTRAL[op], jnp.float32)

    def chunk(window):
        ids = _valid_ids(ids_ref, window, shape, num_segments)
        read = lambda ref: jnp.where(ids > 0, ref[:, window].astype(jnp.float32), 0.0)
        values = terms(*map(read, inputs))

        def segment(s, _):
            lanes, is_lane = _lane_of(s, ids.shape[0])
            for value, op, output in zip(values, ops, outputs, strict=True):
                here = REDUCE[op](jnp.where(ids == s, value, NEUTRAL[op]))
                before = output[:, lanes]
                output[:, lanes] = jnp.where(is_lane, JOIN[op](before, here), before)

        _for_segments(ids, num_segments, segment, None)

    _for_chunks(ids_ref, chunk)


def broadcast(
    inputs: Sequence[jax.Array], ids: jax.Array, num_segments: int
) -> list[jax.Array]:
    """Returns each segment's value at its tokens, [B, num_segments] -> [B, T] float32; 0 at
    padding."""
    shape, width = ids.shape, _round_up(num_segments, LANES)
    rows, tile = _block((), shape[1], REDUCE_TILE)
    tokens = pl.BlockSpec((rows, tile), lambda i, t: (i, t))
    call = narrow.pallas_call(
        functools.partial(_broadcast_kernel, shape, num_segments),
        grid=(pl.cdiv(shape[0], rows), pl.cdiv(shape[1], tile)),
        in_specs=[tokens] + [pl.BlockSpec((rows, width), lambda i, t: (i, 0))] * len(inputs),
        out_specs=[tokens] * len(inputs),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * len(inputs),
        compiler_params=_IN_ORDER,
        name="segment_broadcast",
    )
    pad = lambda x: jnp.pad(x.astype(jnp.float32), ((0, 0), (0, width - num_segments)))
    return list(call(ids, *map(pad, inputs)))


def _broadcast_kernel(shape, num_segments, ids_ref, *refs):
    inputs, outputs = refs[: len(refs) // 2], refs[len(refs) // 2 :]

    def chunk(window):
        ids = _valid_ids(ids_ref, window, shape, num_segments)

        def segment(s, found):
            lanes, is_lane = _lane_of(s, ids.shape[0])
            of_segment = lambda ref: REDUCE["sum"](jnp.where(is_lane, ref[:, lanes], 0.0))
            return [
                jnp.where(ids == s, of_segment(x), y) for x, y in zip(inputs, found, strict=True)
            ]

        zeros = [jnp.zeros(ids.shape, jnp.float32) for _ in outputs]
        found = _for_segments(ids, num_segments, segment, zeros)
        for x, output in zip(found, outputs, strict=True):
            output[:, window] = x

    _for_chunks(ids_ref, chunk)


def scan(
    inputs: Sequence[jax.Array], is_start: jax.Array, op: str, decay: jax.Array | None,
    reverse: bool,
) -> list[jax.Array]:
    """Returns the running sum, minimum or maximum since the last start, [B, T] float32 each.

    Args:
      inputs: [B, T] arrays, float32 or bfloat16.
      is_start: [B, T] bool, where a run begins in the direction of the scan; the first position in
        that direction always is one.
      op: "sum", "min" or "max".
      decay: None, or [B, T]: y_t = x_t + decay_t y_{t-1}, for op "sum" alone.
      reverse: from the last position to the first.
    """
    shape = is_start.shape
    arrays = [*inputs] if decay is None else [*inputs, decay]
    rows, tile = _block(arrays, shape[1], SCAN_TILE)
    num_tiles = pl.cdiv(shape[1], tile)
    place = (lambda i, t: (i, num_tiles - 1 - t)) if reverse else (lambda i, t: (i, t))
    tokens = pl.BlockSpec((rows, tile), place)
    call = narrow.pallas_call(
        functools.partial(_scan_kernel, op, decay is not None, reverse),
        grid=(pl.cdiv(shape[0], rows), num_tiles),
        in_specs=[tokens] * (1 + len(arrays)),
        out_specs=[tokens] * len(inputs),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * len(inputs),
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)] * len(inputs),
        compiler_params=_IN_ORDER,
        name="segment_scan",
    )
    return list(call(jnp.logical_not(is_start).astype(jnp.int32), *arrays))


def _scan_kernel(op, has_decay, reverse, is_open_ref, *refs):
    """Scans by doubling: after the step of width d, lane t holds the result of its last 2 d
    positions.

    `is_open` is 1 while no run has begun among them, and in the end where the run began before this
    tile. The state of the first tile is never used: its first position is a start.
    """
    num = len(refs) // 3
    inputs, outputs, states = refs[:num], refs[-2 * num : -num], refs[-num:]
    is_open = is_open_ref[...]
    x = [ref[...].astype(jnp.float32) for ref in inputs]
    decay: Any = refs[num][...].astype(jnp.float32) if has_decay else None
    tile = is_open.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, is_open.shape, 1)
    lane = tile - 1 - lane if reverse else lane
    scaled = (lambda y: decay * y) if has_decay else (lambda y: y)
    width = 1
    while width < tile:
        shifted = functools.partial(pltpu.roll, shift=tile - width if reverse else width, axis=1)
        is_inside = lane >= width
        joins = (is_open > 0) & is_inside
        x = [jnp.where(joins, JOIN[op](y, scaled(shifted(y))), y) for y in x]
        if has_decay:
            decay = jnp.where(joins, decay * shifted(decay), decay)
        is_open = jnp.where(is_inside, is_open * shifted(is_open), is_open)
        width *= 2
    last = 0 if reverse else tile - 1
    for y, output, state in zip(x, outputs, states, strict=True):
        y = jnp.where(is_open > 0, JOIN[op](y, scaled(state[:, :1])), y)
        output[...] = y
        state[...] = jnp.broadcast_to(y[:, last : last + 1], state.shape)


def on_mesh(function: Callable, rows: NamedSharding | None) -> Callable:
    """Returns the function of arrays [B, ...] run on each device's own rows; `rows` shards B."""
    if rows is None:
        return function
    spec = PartitionSpec(*rows.spec[:1])
    return jax.shard_map(function, mesh=rows.mesh, in_specs=spec, out_specs=spec, check_vma=False)


_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def _block(arrays, num_tokens, largest):
    """Returns the rows and tokens of a tile: packed types have more rows per register."""
    rows = max([8] + [32 // x.dtype.itemsize for x in arrays])
    return rows, min(largest, _round_up(num_tokens, LANES))


def _valid_ids(ids_ref, window, shape, num_segments):
    """Returns the ids of a chunk, 0 for padding and outside the array."""
    ids = ids_ref[:, window]
    rows, tile = ids_ref.shape
    row = pl.program_id(0) * rows + jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    column = pl.program_id(1) * tile + window.start
    column += jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    is_valid = (row < shape[0]) & (column < shape[1]) & (ids >= 1) & (ids <= num_segments)
    return jnp.where(is_valid, ids, 0)


def _for_chunks(ids_ref, chunk):
    tile = ids_ref.shape[1]
    size = CHUNK if tile % CHUNK == 0 else LANES

    def body(i, _):
        chunk(pl.ds(pl.multiple_of(i * size, size), size))

    jax.lax.fori_loop(0, tile // size, body, None)


def _for_segments(ids, num_segments, body, initial):
    """Runs body for every number between the smallest and the largest id of the chunk."""
    ids = ids.astype(jnp.float32)  # whole numbers, exact up to 2^24
    low = jnp.min(jnp.where(ids > 0, ids, num_segments + 1.0)).astype(jnp.int32)
    high = jnp.max(ids).astype(jnp.int32)
    return jax.lax.fori_loop(low, high + 1, body, initial)


def _lane_of(s, rows):
    """Returns the position of segment s in a row of results: a window of lanes, and its lane
    [R, 128]."""
    index = s - 1
    place = jax.lax.rem(index, LANES)
    window = pl.ds(pl.multiple_of(index - place, LANES), LANES)
    return window, jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) == place
