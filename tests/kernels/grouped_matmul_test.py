"""Loops over tiles of rows and the TPU kernels, beside a loop over rows in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.kernels import grouped_matmul

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

M, E, I, O = 300, 5, 24, 12
SIZES = {
    "even": (60,) * 5, "ragged": (0, 131, 1, 0, 168), "one": (0, 0, 300, 0, 0),
    "not full": (3, 0, 40, 5, 30), "none": (0,) * 5,
}
SIZED = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_rows(x, w, sizes):
    y = np.zeros((len(x), w.shape[2]))
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[row] = x[row].astype(float) @ w[e].astype(float)
    return y


def outer_by_rows(x, y, sizes):
    out = np.zeros((len(sizes), x.shape[1], y.shape[1]))
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        out[e] += np.outer(x[row].astype(float), y[row].astype(float))
    return out


def test_the_group_of_each_row():
    found = grouped_matmul.group_of_rows(jnp.asarray([2, 0, 3], jnp.int32), 7)
    np.testing.assert_array_equal(found, [0, 0, 2, 2, 2, 3, 3])


@SIZED
@pytest.mark.parametrize("tile", [None, 1, 7, 64, 512])
def test_tiles_of_any_size(sizes, tile):
    x, w = normal(0, M, I), normal(1, E, I, O)
    run = jax.jit(lambda *a: grouped_matmul.by_tiles(jnp.dot, *a, tile))
    found = run(x, w, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(found, by_rows(x, w, sizes), rtol=1e-4, atol=1e-4)


@SIZED
def test_outer_products(sizes):
    x, y = normal(0, M, I), normal(1, M, O)
    found = jax.jit(grouped_matmul.outer_by_tiles)(x, y, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(found, outer_by_rows(x, y, sizes), rtol=1e-4, atol=1e-4)
