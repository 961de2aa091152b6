"""Products of sorted rows with the matrix of their group, for mixtures of experts.

Rows [M, i] are sorted by group, and sizes [E] counts the consecutive rows of each group. Rows after
the last group have the result 0 and no gradient. No row is dropped and no group has a capacity: the
work grows with the number of rows, not with rows times groups.

`by_tiles` and `outer_by_tiles` are loops over tiles of rows for any platform. `product_kernel` and
`outer_kernel` are TPU kernels. Their grids visit pairs (group, tile of rows) in order. A tile that
holds rows of several groups is visited once for each group. The kernels read no matrix of an empty
group, and they convert 8-bit matrices in VMEM.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis.kernels import mxfp4, narrow

SMALLEST_TILE, LARGEST_TILE = (8, 64), 512  # rows of a tile on CPU; the smallest has two bounds
TPU_SMALLEST_TILE, TPU_LARGEST_TILE = 32, 512  # int8 has 32 rows in a register
BLOCK_BYTES = 4 * 2**20  # of a matrix in VMEM, at most
OUTER_BLOCK = 512  # rows and columns of a block of `outer_kernel`
LANES = 128
VMEM_BYTES = 56 * 2**20  # v5p has 64 MiB, v5e and v6e have 128


def group_of_rows(sizes_e: jax.Array, num_rows: int) -> jax.Array:
    """Returns the group [M] of each row. It is E for rows after the last group."""
    return _number_below(jnp.cumsum(sizes_e), jnp.arange(num_rows, dtype=jnp.int32))


def _number_below(ends_e: jax.Array, at_n: jax.Array) -> jax.Array:
    """Returns the number of groups [n] that end at or before each position."""
    return jnp.sum(ends_e[None] <= at_n[:, None], axis=1, dtype=jnp.int32)


def _power_of_two(n: int) -> int:
    """Returns the largest power of two up to n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


# Loops over tiles of rows


class _Tile(NamedTuple):
    """R rows of an array, of which a group owns some.

    Attributes:
      group: the number of the group.
      first: the first row.
      is_own_r1: bool [R,1], whether the group owns a row and no earlier tile has it.
    """

    group: jax.Array
    first: jax.Array
    is_own_r1: jax.Array

    @classmethod
    def at(cls, group: jax.Array, begin: jax.Array, end: jax.Array, size: int, num_rows: int):
        """Returns the tile of the rows from begin to end. It starts earlier at the array's end."""
        first = jnp.minimum(begin, num_rows - size)
        row_r1 = first + jnp.arange(size)[:, None]
        return cls(group, first, (row_r1 >= begin) & (row_r1 < end))

    def take(self, x: jax.Array) -> jax.Array:
        """Returns the rows [R,...] of an array."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.is_own_r1.shape[0])


def tile_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Returns numbers of rows for the tiles of one product, falling powers of two.

    The largest is about the average size of a group, the smallest about an eighth of it."""
    mean, (low, high) = num_rows // num_groups, SMALLEST_TILE
    smallest = min(max(_power_of_two(mean // 8), low), high)
    sizes = [min(max(_power_of_two(mean), smallest), LARGEST_TILE)]
    while sizes[-1] > smallest:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def _each_tile(
    enter: Callable, step: Callable, sizes_e: jax.Array, num_rows: int, tiles: tuple, initial
):
    """Returns the last of y = step(tile, enter(group), y) over the tiles of all groups in order.

    A group is cut into tiles of the largest size as long as they fit, then of the next size. XLA on
    CPU rearranges the matrix for every tile, and large tiles need fewer products.
    """
    end_e = jnp.cumsum(sizes_e)

    def of_group(group, y):
        entered, end = enter(group), end_e[group]
        begin = end - sizes_e[group]
        for size in tiles:
            # A tile is also used if it is full but for an eighth. The last size takes all the rest.
            missing = size - 1 if size == tiles[-1] else size // 8
            count = (end - begin + missing) // size

            def body(t, y, begin=begin, size=size):
                return step(_Tile.at(group, begin + t * size, end, size, num_rows), entered, y)

            y = jax.lax.fori_loop(0, count, body, y)
            begin = jnp.minimum(begin + count * size, end)
        return y

    return jax.lax.fori_loop(0, sizes_e.shape[0], of_group, initial)


def _each_tile_of_any_sizes(enter, step, sizes_e, num_rows, tiles, initial):
    """Returns `_each_tile` by a loop whose length does not depend on the sizes of the groups. All
    tiles have one size, and some tiles at the end own no row."""
    num_groups, size = sizes_e.shape[0], tiles[len(tiles) // 2]
    end_e = jnp.cumsum(sizes_e)
    count_e = (sizes_e + size - 1) // size
    last_e = jnp.cumsum(count_e)

    def body(t, y):
        group = jnp.minimum(jnp.sum(last_e <= t), num_groups - 1)
        begin = end_e[group] - sizes_e[group] + (t - last_e[group] + count_e[group]) * size
        tile = _Tile.at(group, begin, end_e[group], size, num_rows)
        return step(tile, enter(group), y)

    bound = -(-num_rows // size) + num_groups - 1
    return jax.lax.fori_loop(0, bound, body, initial)


def _batched(run: Callable, *arrays: Any) -> jax.Array:
    """Returns run(loop, *arrays). Under `vmap` all loops have the same length: `vmap` of loops of
    different lengths copies the whole result in every step."""
    call = jax.custom_batching.custom_vmap(functools.partial(run, _each_tile))

    @call.def_vmap
    def rule(size, is_batched, *arrays):
        del size
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, is_batched)
        run_any = functools.partial(run, _each_tile_of_any_sizes)
        return jax.vmap(run_any, tuple(axes))(*arrays), True

    return call(*arrays)


def _bits(x: jax.Array) -> jax.Array:
    """Returns x as unsigned integers if it has fewer than 32 bits. XLA on CPU would convert a whole
    array of such floats to float32 before it takes a slice."""
    if x.dtype.itemsize >= 4:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def by_tiles(
    f: Callable, x_mi: Any, w: Any, sizes_e: jax.Array, tiles: tuple[int, ...]
) -> jax.Array:
    """Returns f(x [R,i], w of a group) -> [R,o] for the rows of every group, joined to [M,o].

    Args:
      f: a function of each row by itself.
      x_mi: array [M,...] or tree of such arrays.
      w: array [E,...] or tree of such arrays; f gets it without the first axis.
      tiles: falling numbers of rows R, such as `tile_sizes`.
    """
    num_rows = jax.tree.leaves(x_mi)[0].shape[0]
    tiles = tuple(min(size, num_rows) for size in tiles)
    types = jax.tree.map(lambda x: x.dtype, (x_mi, w))
    part = lambda *arrays: f(*jax.tree.map(jax.lax.bitcast_convert_type, arrays, types))

    def run(loop, x_mi, w, sizes_e):
        def enter(group):
            at = lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False)
            return jax.tree.map(at, w)

        def step(tile, w, y_mo):
            y_ro = _bits(part(jax.tree.map(tile.take, x_mi), w))
            y_ro = jnp.where(tile.is_own_r1, y_ro, tile.take(y_mo))
            return jax.lax.dynamic_update_slice_in_dim(y_mo, y_ro, tile.first, axis=0)

        initial = jnp.zeros((num_rows, *out.shape[1:]), jax.eval_shape(_bits, out).dtype)
        return loop(enter, step, sizes_e, num_rows, tiles, initial)

    arrays = jax.tree.map(_bits, (x_mi, w))
    row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    out = jax.eval_shape(part, arrays[0], jax.tree.map(row, arrays[1]))
    return jax.lax.bitcast_convert_type(_batched(run, *arrays, sizes_e), out.dtype)


def outer_by_tiles(
    x_mi: jax.Array, y_mo: jax.Array, sizes_e: jax.Array, tiles: tuple[int, ...]
) -> jax.Array:
    """Returns x^T y [E,i,o] over the rows of each group, in float32."""
    num_rows = x_mi.shape[0]
    tiles = tuple(min(size, num_rows) for size in tiles)
    types = x_mi.dtype, y_mo.dtype

    def run(loop, x_mi, y_mo, sizes_e):
        def step(tile, _, sum_eio):
            pair = map(jax.lax.bitcast_convert_type, map(tile.take, (x_mi, y_mo)), types)
            x_ri, y_ro = (jnp.where(tile.is_own_r1, rows, 0) for rows in pair)
            sum_io = jax.lax.dot_general(
                x_ri, y_ro, (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            sum_io += jax.lax.dynamic_index_in_dim(sum_eio, tile.group, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(sum_eio, sum_io, tile.group, axis=0)

        initial = jnp.zeros((sizes_e.shape[0], x_mi.shape[1], y_mo.shape[1]), jnp.float32)
        return loop(lambda group: None, step, sizes_e, num_rows, tiles, initial)

    return _batched(run, _bits(x_mi), _bits(y_mo), sizes_e)


# TPU kernels


class _Visits(NamedTuple):
    """Pairs of a group and a tile of rows, int32 [V] each, in the order of a kernel's grid.

    The number of visits is the same for all sizes. Visits in excess have an empty range of rows and
    stay at the last group and tile, so that nothing is fetched.

    Attributes:
      group: the group, whose matrix is read.
      tile: the tile of rows.
      begin: the first row of the group in the array.
      end: the row after the group's last one.
    """

    group: jax.Array
    tile: jax.Array
    begin: jax.Array
    end: jax.Array


def _visits(sizes_e: jax.Array, num_rows: int, tile: int, visits_empty: bool) -> _Visits:
    """Returns visits of all tiles, also of tiles after the last group.

    With `visits_empty` it returns visits of all groups, also of empty groups."""
    num_groups, num_tiles = sizes_e.shape[0], pl.cdiv(num_rows, tile)
    end_e = jnp.cumsum(sizes_e)
    last_read: int | jax.Array = num_groups - 1
    if not visits_empty:  # the rest of the rows is a group without a matrix
        last_read = jnp.max(jnp.where(sizes_e > 0, jnp.arange(num_groups, dtype=jnp.int32), 0))
        sizes_e = jnp.append(sizes_e, num_rows - end_e[-1])
        end_e = jnp.append(end_e, num_rows)
    begin_e = end_e - sizes_e
    first_e = jnp.minimum(begin_e // tile, num_tiles - 1)
    count_e = jnp.where(sizes_e > 0, (end_e + tile - 1) // tile - first_e, int(visits_empty))
    last_e = jnp.cumsum(count_e)
    visit = jnp.arange(num_tiles + num_groups, dtype=jnp.int32)
    group = _number_below(last_e, visit)
    at = jnp.minimum(group, sizes_e.shape[0] - 1)
    is_excess = (group > at) | (at == num_groups)
    tile_v = jnp.minimum(first_e[at] + visit - last_e[at] + count_e[at], num_tiles - 1)
    end_v = jnp.where(is_excess, begin_e[at], end_e[at])
    return _Visits(jnp.minimum(at, last_read), tile_v, begin_e[at], end_v)


def _is_new(x_v, visit) -> jax.Array:
    """Returns whether a visit is the first one of its group or tile."""
    return (visit == 0) | (x_v[visit] != x_v[jnp.maximum(visit - 1, 0)])


def _is_own(v: _Visits, visit, tile: int) -> jax.Array:
    """Returns bool [R,1], whether a row of the tile is one of the group."""
    row_r1 = v.tile[visit] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    return (row_r1 >= v.begin[visit]) & (row_r1 < v.end[visit])


def _rows(num_rows: int, num_groups: int, row_bytes: int) -> int:
    """Returns the number of rows of a tile, a power of two: about the average size of a group."""
    rows = min(_power_of_two(num_rows // num_groups), TPU_LARGEST_TILE)
    while rows * row_bytes > BLOCK_BYTES:
        rows //= 2
    return max(rows, TPU_SMALLEST_TILE)


def _without_float16(x: jax.Array) -> jax.Array:
    """Returns float16 as float32: TPU kernels cannot load or store float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _call(kernel, visits: _Visits, grid, in_specs, out_specs, out_shape, arrays, flops, scratch=()):
    """Calls a kernel whose last axis of the grid has the visits."""
    axes: Any = ("parallel",) * (len(grid) - 1) + ("arbitrary",)
    bytes_accessed = sum(x.size * x.dtype.itemsize for x in (*arrays, out_shape))
    return narrow.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits), grid=grid, in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape, name="grouped_matmul",
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=bytes_accessed
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=axes,
            vmem_limit_bytes=VMEM_BYTES,
        ),
    )(*visits, *arrays)


def product_kernel(
    x_mi: jax.Array, w: jax.Array, sizes_e: jax.Array, in_axis: int, dtype: jnp.dtype,
    x_scale_m1: jax.Array | None = None, scale_e1o: jax.Array | None = None,
    exponents_ebo: jax.Array | None = None,
) -> jax.Array:
    """Returns each row's product with the matrix of its group times the scales, [M,o] in `dtype`.

    Args:
      x_mi: [M,i] float rows, or 8-bit rows of the dtype of w.
      w: [E,i,o], or [E,o,i] with in_axis = 1; converted to the dtype of x in VMEM.
      x_scale_m1: [M,1] float32 scales of rows; scale_e1o: [E,1,o] float32 scales of columns.
      exponents_ebo: [E,i/32,o] uint8 of a matrix in MXFP4, whose bytes w are [E,i/2,o], see mxfp4.py.
    """
    if exponents_ebo is not None:  # a byte has an even and an odd input
        x_mi = jnp.concatenate([x_mi[:, ::2], x_mi[:, 1::2]], axis=1)
    x_mi, w = _without_float16(x_mi), _without_float16(w)
    (num_rows, width), num_groups, columns = x_mi.shape, w.shape[0], w.shape[2 - in_axis]
    tile = _rows(num_rows, num_groups, width * x_mi.dtype.itemsize)
    height = w.shape[1 + in_axis]
    itemsize = w.dtype.itemsize if exponents_ebo is None else 4  # of the numbers in VMEM
    column_bytes = width * max(x_mi.dtype.itemsize, itemsize)
    block = min(columns, max(BLOCK_BYTES // column_bytes // LANES, 1) * LANES)
    accumulator = jnp.int32 if x_mi.dtype == jnp.int8 else jnp.float32
    stored = jnp.float32 if dtype == jnp.float16 else dtype

    def kernel(*refs):
        v, (x_ref, w_ref, *scale_refs, out_ref) = _Visits(*refs[:4]), refs[4:]
        exponents_ref: Any = scale_refs.pop() if exponents_ebo is not None else None
        visit = pl.program_id(1)

        @pl.when(_is_new(v.tile, visit))
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        @pl.when(v.begin[visit] < v.end[visit])
        def _():
            x, w = x_ref[...], w_ref[0]
            if exponents_ref is not None:
                w = jnp.concatenate(mxfp4.halves(w, exponents_ref[0]), axis=0)
            y = jax.lax.dot_general(
                x, w.astype(x.dtype), (((1,), (in_axis,)), ((), ())),
                preferred_element_type=accumulator,
            )
            y = y.astype(jnp.float32)
            for ref in scale_refs:
                y = y * ref[...].reshape(-1, ref.shape[-1])
            other = out_ref[...].astype(jnp.float32)
            out_ref[...] = jnp.where(_is_own(v, visit, tile), y, other).astype(stored)

    rows = lambda width: pl.BlockSpec((tile, width), lambda c, i, group, at, *_: (at[i], 0))
    matrix = pl.BlockSpec(
        (1, height, block) if in_axis == 0 else (1, block, height),
        lambda c, i, group, *_: (group[i], 0, c) if in_axis == 0 else (group[i], c, 0),
    )
    column = pl.BlockSpec((1, 1, block), lambda c, i, group, *_: (group[i], 0, c))
    optional = [(x_scale_m1, rows(1)), (scale_e1o, column)]
    if exponents_ebo is not None:
        of_block = pl.BlockSpec(
            (1, exponents_ebo.shape[1], block), lambda c, i, group, *_: (group[i], 0, c)
        )
        optional.append((exponents_ebo, of_block))
    optional = [(scale, spec) for scale, spec in optional if scale is not None]
    visits = _visits(sizes_e, num_rows, tile, visits_empty=False)
    out = _call(
        kernel, visits, (pl.cdiv(columns, block), visits.tile.shape[0]),
        [rows(width), matrix, *(spec for _, spec in optional)],
        pl.BlockSpec((tile, block), lambda c, i, group, at, *_: (at[i], c)),
        jax.ShapeDtypeStruct((num_rows, columns), stored),
        (x_mi, w, *(scale for scale, _ in optional)),
        flops=2 * num_rows * width * columns,
    )
    return out.astype(dtype)


def outer_kernel(
    x_mi: jax.Array, y_mo: jax.Array, sizes_e: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Returns `outer_by_tiles` in `dtype`."""
    x_mi, y_mo = _without_float16(x_mi), _without_float16(y_mo)
    (num_rows, width), columns, num_groups = x_mi.shape, y_mo.shape[1], sizes_e.shape[0]
    tile = _rows(num_rows, num_groups, OUTER_BLOCK * x_mi.dtype.itemsize)
    height = min(width, OUTER_BLOCK)
    block = min(columns, OUTER_BLOCK)
    stored = jnp.float32 if dtype == jnp.float16 else dtype

    def kernel(*refs):
        v, (x_ref, y_ref, out_ref, sum_ref) = _Visits(*refs[:4]), refs[4:]
        visit = pl.program_id(2)

        @pl.when(_is_new(v.group, visit))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(v.begin[visit] < v.end[visit])
        def _():
            is_own = _is_own(v, visit, tile)
            own = lambda ref: jnp.where(is_own, ref[...], jnp.zeros_like(ref))
            sum_ref[...] += jax.lax.dot_general(
                own(x_ref), own(y_ref), (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

        following = jnp.minimum(visit + 1, pl.num_programs(2) - 1)

        @pl.when((following == visit) | (v.group[following] != v.group[visit]))
        def _():
            out_ref[0] = sum_ref[...].astype(stored)

    visits = _visits(sizes_e, num_rows, tile, visits_empty=True)
    out = _call(
        kernel, visits,
        (pl.cdiv(width, height), pl.cdiv(columns, block), visits.tile.shape[0]),
        [
            pl.BlockSpec((tile, height), lambda r, c, i, group, at, *_: (at[i], r)),
            pl.BlockSpec((tile, block), lambda r, c, i, group, at, *_: (at[i], c)),
        ],
        pl.BlockSpec((1, height, block), lambda r, c, i, group, *_: (group[i], r, c)),
        jax.ShapeDtypeStruct((num_groups, width, columns), stored), (x_mi, y_mo),
        flops=2 * num_rows * width * columns, scratch=[pltpu.VMEM((height, block), jnp.float32)],
    )
    return out.astype(dtype)
