"""Sums and products with a fixed summation order, for `numerics="invariant"`.

A float sum depends on its order, and XLA chooses the order by the shapes of a program. Here the
order does not depend on the batch or the number of devices (batch invariance; TBIK,
arXiv:2511.17826):

* Rows (tokens) are computed in tiles of ROWS, one after another, by one loop body.
* A product multiplies tiles [ROWS, K_TILE] x [K_TILE, COLUMNS] and adds their sums pairwise. The
  upper
  levels of this tree are a butterfly across the devices that hold the tiles.
* Attention processes pages of PAGE keys, one after another.
* Sums over the vocabulary are pairwise too. Their length is a multiple of VOCAB_UNIT, and up to
  VOCAB_PARTS devices hold whole nodes of the tree and whole COLUMNS. A sharded head is padded with
  zero columns inside the program.

Programs of sampler and learner are compiled with COMPILER_OPTIONS. A compiler may contract a
product and a sum into one rounding. It does so equally in equal loop bodies, and products meet sums
nowhere else. Loops run at least twice, because XLA inlines a loop that runs once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROWS, K_TILE, COLUMNS, PAGE, VOCAB_PARTS = 16, 64, 32, 16, 32
VOCAB_UNIT = VOCAB_PARTS * COLUMNS
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
# Numbers that are added one by one, and in pairs, without a loop: more take long to compile.
MAX_UNROLLED, MAX_PAIRED = 32, 8


# Sums


def tree_sum(x: jax.Array) -> jax.Array:
    """Returns the sum of the last axis of odd * 2^m numbers, in a fixed order.

    Runs of `odd` numbers are added one by one, and their sums pairwise.

    The sum of each of 2^j equal parts is a node of the tree. Parts summed separately and added by
    `butterfly` therefore give the same bits.
    """
    size = x.shape[-1]
    odd = size // (size & -size)
    x = x.reshape(*x.shape[:-1], -1, odd)
    if odd <= MAX_UNROLLED:
        x = functools.reduce(jnp.add, [x[..., i] for i in range(odd)])
    else:
        x = jax.lax.fori_loop(1, odd, lambda i, total: total + x[..., i], x[..., 0])
    pairs = lambda x: x[..., 0::2] + x[..., 1::2]
    if x.shape[-1] > MAX_PAIRED:
        fill = jnp.zeros((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
        level = lambda _, x: jnp.concatenate([pairs(x), fill], axis=-1)
        return jax.lax.fori_loop(0, x.shape[-1].bit_length() - 1, level, x)[..., 0]
    while x.shape[-1] > 1:
        x = pairs(x)
    return x[..., 0]


def butterfly(x: jax.Array, axis: Any, count: int) -> jax.Array:
    """Returns the pairwise sum over a mesh axis of 2^j devices, with the same bits on every
    device."""
    distance = 1
    while distance < count:
        partners = [(i, i ^ distance) for i in range(count)]
        x = x + jax.lax.ppermute(x, axis, partners)
        distance *= 2
    return x


def by_rows(f: Callable, *arrays: Any) -> Any:
    """Returns f applied to tiles [ROWS, ...] of arrays [n, ...] (or trees of arrays), joined."""
    n = jax.tree.leaves(arrays)[0].shape[0]
    count = max(2, -(-n // ROWS))

    def tiles(x):
        fill = [(0, count * ROWS - n)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, fill).reshape(count, ROWS, *x.shape[1:])

    out = jax.lax.map(lambda tile: f(*tile), jax.tree.map(tiles, arrays))
    return jax.tree.map(lambda y: y.reshape(count * ROWS, *y.shape[2:])[:n], out)


# Products


def fill(x: jax.Array, axis: int, multiple: int, value: float = 0) -> jax.Array:
    """Returns x padded along an axis to a multiple."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, width, constant_values=value)


def product(x_ri: jax.Array, w: jax.Array, in_axis: int = 0, precision=None) -> jax.Array:
    """Returns the product [R,o] of x [R,i] and w in float32, on one device; `in_axis` of w is i."""
    columns, used = w.shape[1 - in_axis], -(-w.shape[in_axis] // K_TILE)
    # A batch of one tile would be another kind of product: a tile of zeros goes with it.
    tiles = max(2, used)
    x_ri = fill(x_ri, 1, tiles * K_TILE)
    w = fill(fill(w, in_axis, tiles * K_TILE), 1 - in_axis, COLUMNS)
    dims = (((2,), (1,)), ((0,), (0,))) if in_axis == 0 else (((2,), (2,)), ((0,), (1,)))

    def block(start):
        w_block = jax.lax.dynamic_slice_in_dim(w, start, COLUMNS, 1 - in_axis)
        shape = (tiles, K_TILE, COLUMNS) if in_axis == 0 else (COLUMNS, tiles, K_TILE)
        w_block = w_block.reshape(shape)

        def tile(x_ri):
            x_kri = jnp.swapaxes(x_ri.reshape(ROWS, tiles, K_TILE), 0, 1)
            partial_kro = jax.lax.dot_general(
                x_kri, w_block, dims, precision=precision, preferred_element_type=jnp.float32
            )
            return tree_sum(jnp.moveaxis(partial_kro[:used], 0, -1))

        return by_rows(tile, x_ri)

    out_nro = jax.lax.map(block, jnp.arange(0, w.shape[1 - in_axis], COLUMNS))
    return jnp.moveaxis(out_nro, 0, 1).reshape(len(x_ri), -1)[:, :columns]


# Vocabulary


def apart(x: jax.Array) -> jax.Array:
    """Returns x behind a barrier: its last operation is not contracted with the next one.

    Otherwise a compiler would contract the two inside one loop, but not on a mesh that puts them
    into two loops."""
    return jnp.where(x != 0, x, 0.0)


def scaled(logits_rv: jax.Array, temperature_r1: jax.Array) -> jax.Array:
    """Returns x divided by multiplication with the reciprocal; XLA does this only in some
    programs."""
    return apart(logits_rv * (1 / temperature_r1))


def vocabulary_sum(x_rv: jax.Array, axis: Any, count: int) -> jax.Array:
    """Returns sums [R] over the whole vocabulary, a multiple of VOCAB_UNIT, of which each of
    `count` devices along a mesh axis holds a part."""
    x_rv = apart(x_rv)
    if count == 1:
        # The rest of a unit is zeros, which change no sum: half of one has the sum of the whole.
        size = x_rv.shape[1]
        x_rv = fill(x_rv, 1, min(VOCAB_UNIT, 1 << (size - 1).bit_length()))
    return butterfly(tree_sum(x_rv), axis, count)
