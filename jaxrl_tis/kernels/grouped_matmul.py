"""Products of sorted rows with the matrix of their group, for mixtures of experts.

Rows [M, i] are sorted by group, and sizes [E] counts the consecutive rows of each group. Rows after
the last group have the result 0 and no gradient. No row is dropped and no group has a capacity: the
work grows with the number of rows, not with rows times groups.

`by_tiles` and `outer_by_tiles` are loops over tiles of rows for any platform.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SMALLEST_TILE, LARGEST_TILE = 8, 256  # rows of `by_tiles`
TILES_PER_GROUP = 4  # of average size
OUTER_TILE = 512  # rows of `outer_by_tiles`, at most


def group_of_rows(sizes_e: jax.Array, num_rows: int) -> jax.Array:
    """Returns the group [M] of each row. It is E for rows after the last group."""
    return _number_below(jnp.cumsum(sizes_e), jnp.arange(num_rows, dtype=jnp.int32))


def _number_below(ends_e: jax.Array, at_n: jax.Array) -> jax.Array:
    """Returns the number of groups [n] that end at or before each position."""
    return jnp.sum(ends_e[None] <= at_n[:, None], axis=1, dtype=jnp.int32)


def _tile(num_rows: int, num_groups: int, smallest: int, largest: int) -> int:
    """Returns a power of two: a group of average size has TILES_PER_GROUP tiles within bounds."""
    part = max(num_rows // (num_groups * TILES_PER_GROUP), 1)
    return min(max(1 << (part.bit_length() - 1), smallest), largest)


# Loops over tiles of rows


class _Tile(NamedTuple):
    """A tile of R rows of one group, at rows that the array has.

    Attributes:
      group: the number of the group.
      first: the first of R rows; the last tile of an array begins before its own rows.
      is_own_r1: bool [R,1], whether a row is one of this tile's group, and of no earlier tile.
    """

    group: jax.Array
    first: jax.Array
    is_own_r1: jax.Array


def _loop(step: Callable, sizes_e: jax.Array, num_rows: int, tile: int, is_bound: bool, initial):
    """Returns the last of y = step(tile, y) over all tiles of all groups, in the order of the rows.

    The number of tiles depends on the sizes. With `is_bound` the loop runs as often as for any
    sizes, and the tiles in excess own no rows.
    """
    num_groups = sizes_e.shape[0]
    end_e = jnp.cumsum(sizes_e)
    count_e = (sizes_e + tile - 1) // tile
    last_e = jnp.cumsum(count_e)

    def body(t, y):
        group = jnp.minimum(jnp.sum(last_e <= t), num_groups - 1)
        begin = end_e[group] - sizes_e[group] + (t - last_e[group] + count_e[group]) * tile
        first = jnp.minimum(begin, num_rows - tile)
        row_r1 = first + jnp.arange(tile)[:, None]
        return step(_Tile(group, first, (row_r1 >= begin) & (row_r1 < end_e[group])), y)

    bound = -(-num_rows // tile) + num_groups - 1
    return jax.lax.fori_loop(0, bound if is_bound else last_e[-1], body, initial)


def _batched(run: Callable, *arrays: Any) -> jax.Array:
    """Returns run(is_bound, *arrays). Under `vmap` is_bound is True: batched loops of different
    lengths would copy their results in every step."""
    call = jax.custom_batching.custom_vmap(functools.partial(run, False))

    @call.def_vmap
    def rule(size, is_batched, *arrays):
        del size
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, is_batched)
        return jax.vmap(functools.partial(run, True), tuple(axes))(*arrays), True

    return call(*arrays)


def _bits(x: jax.Array) -> jax.Array:
    """Returns x as unsigned integers if it has fewer than 32 bits: XLA on CPU would convert all of
    such an array to float32 before it takes a part."""
    if x.dtype.itemsize >= 4:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def by_tiles(
    f: Callable, x_mi: jax.Array, w: Any, sizes_e: jax.Array, tile: int | None = None
) -> jax.Array:
    """Returns f(x [R,i], w of a group) -> [R,o] for the rows of every group, joined to [M,o].

    Args:
      f: a function of each row by itself.
      w: array [E,...] or tree of such arrays; f gets it without the first axis.
      tile: number of rows of f; None chooses one.
    """
    num_rows, num_groups = x_mi.shape[0], sizes_e.shape[0]
    tile = tile or _tile(num_rows, num_groups, SMALLEST_TILE, LARGEST_TILE)
    tile = min(tile, num_rows)
    types = jax.tree.map(lambda x: x.dtype, (x_mi, w))
    floats = lambda parts: jax.tree.map(jax.lax.bitcast_convert_type, parts, types)
    take = jax.lax.dynamic_slice_in_dim

    def part(x_mi, w, first, group):
        of_group = lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False)
        return f(*floats((take(x_mi, first, tile), jax.tree.map(of_group, w))))

    def run(is_bound, x_mi, w, sizes_e):
        def step(t, y_mo):
            y_ro = _bits(part(x_mi, w, t.first, t.group))
            y_ro = jnp.where(t.is_own_r1, y_ro, take(y_mo, t.first, tile))
            return jax.lax.dynamic_update_slice_in_dim(y_mo, y_ro, t.first, axis=0)

        initial = jnp.zeros((num_rows, out.shape[1]), bits.dtype)
        return _loop(step, sizes_e, num_rows, tile, is_bound, initial)

    arrays = jax.tree.map(_bits, (x_mi, w))
    out = jax.eval_shape(part, *arrays, 0, 0)
    bits = jax.eval_shape(_bits, out)
    return jax.lax.bitcast_convert_type(_batched(run, *arrays, sizes_e), out.dtype)


def outer_by_tiles(x_mi: jax.Array, y_mo: jax.Array, sizes_e: jax.Array) -> jax.Array:
    """Returns x^T y [E,i,o] over the rows of each group, in float32."""
    num_rows, num_groups = x_mi.shape[0], sizes_e.shape[0]
    tile = min(_tile(num_rows, num_groups, SMALLEST_TILE, OUTER_TILE), num_rows)
    types = x_mi.dtype, y_mo.dtype

    def run(is_bound, x_mi, y_mo, sizes_e):
        def step(t, sum_eio):
            take = lambda x, dtype: jnp.where(t.is_own_r1, jax.lax.bitcast_convert_type(
                jax.lax.dynamic_slice_in_dim(x, t.first, tile), dtype), 0)
            sum_io = jax.lax.dot_general(
                *map(take, (x_mi, y_mo), types), (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            sum_io += jax.lax.dynamic_index_in_dim(sum_eio, t.group, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(sum_eio, sum_io, t.group, axis=0)

        initial = jnp.zeros((num_groups, x_mi.shape[1], y_mo.shape[1]), jnp.float32)
        return _loop(step, sizes_e, num_rows, tile, is_bound, initial)

    return _batched(run, _bits(x_mi), _bits(y_mo), sizes_e)
