"""The order-fixed sums, each with a form of it that is not invariant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl_tis.kernels import tiles

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("bits depend on what XLA makes of the programs"),
]

OPTIMIZED = pytest.mark.usefixtures("optimized")
RNG = np.random.default_rng(0)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def jit(f):
    return jax.jit(f, compiler_options=tiles.COMPILER_OPTIONS)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@OPTIMIZED
@pytest.mark.parametrize("count", [1, 3, 8, 12, 16, 96, 33 * 64])
def test_a_tree_is_the_sum_of_its_parts_trees(count):
    x = normal(4, count)
    whole = np.asarray(jit(tiles.tree_sum)(x))
    np.testing.assert_allclose(whole, np.asarray(x, np.float64).sum(-1), atol=1e-3)
    parts = 1
    while count % (2 * parts) == 0:
        parts *= 2
        sums = [np.asarray(jit(tiles.tree_sum)(p)) for p in np.split(np.asarray(x), parts, -1)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        np.testing.assert_array_equal(sums[0], whole)


def split_product(x, w, count, add):
    """x @ w on `count` devices that hold parts of the inputs, whose products `add` sums."""
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices)
    local = lambda x, w: add(tiles.product(x, w))
    specs = P(None, "tensor"), P("tensor", None)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return np.asarray(jit(run)(x, w))


@pytest.mark.all
@OPTIMIZED
@DTYPES
def test_a_product_over_devices_is_that_of_one(dtype):
    x, w = normal(20, 512, dtype=dtype), normal(512, 96, dtype=dtype)
    whole = np.asarray(jit(tiles.product)(x, w))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(whole, exact, atol=1e-3)
    is_changed = {}
    for count in (2, 4, 8):
        tree = lambda y, count=count: tiles.butterfly(y, "tensor", count)
        np.testing.assert_array_equal(split_product(x, w, count, tree), whole)
        summed = split_product(x, w, count, lambda y: jax.lax.psum(y, "tensor"))
        is_changed[count] = (summed != whole).any()
    assert is_changed == {2: False, 4: True, 8: True}  # of two numbers there is one sum


@pytest.mark.all
@pytest.mark.cases("bfloat16")
@OPTIMIZED
@DTYPES
def test_a_row_has_one_product_in_every_batch(dtype):
    x, w = normal(48, 320, dtype=dtype), normal(320, 96, dtype=dtype)
    whole = np.asarray(jit(tiles.product)(x, w))
    for rows in (1, 2, 3, 8, 16, 17):
        np.testing.assert_array_equal(jit(tiles.product)(x[-rows:], w), whole[-rows:])
    for columns in (32, 64):
        np.testing.assert_array_equal(jit(tiles.product)(x, w[:, :columns]), whole[:, :columns])


@OPTIMIZED
@pytest.mark.parametrize("name, value", [("K_TILE", 32), ("K_TILE", 128)])
def test_another_tile_is_another_product(name, value, monkeypatch):
    x, w = normal(48, 512), normal(512, 96)
    whole = np.asarray(jit(tiles.product)(x, w))
    monkeypatch.setattr(tiles, name, value)
    other = np.asarray(jit(lambda x, w: tiles.product(x, w))(x, w))
    assert (other != whole).mean() > 0.1


@OPTIMIZED
def test_a_plain_product_depends_on_the_batch():
    x, w = normal(16, 1024), normal(1024, 256)
    dot = jit(lambda x, w: x @ w)
    assert (np.asarray(dot(x[:1], w)) != np.asarray(dot(x, w))[:1]).any()


@pytest.mark.all
@OPTIMIZED
def test_a_sum_over_the_vocabulary_is_a_node_of_the_tree_over_whole_units():
    for size in (1, 20, 300, 1024, 2060, 3072):
        x = normal(3, size)
        whole = np.asarray(jit(lambda x: tiles.vocabulary_sum(x, None, 1))(x))
        filled = tiles.fill(x, 1, tiles.VOCAB_UNIT)
        np.testing.assert_array_equal(jit(tiles.tree_sum)(filled), whole)


def test_a_butterfly_adds_every_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    add = lambda x: tiles.butterfly(x, "x", 4)
    run = jax.shard_map(add, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert jax.jit(run)(jnp.array([1.0, 2.0, 4.0, 8.0])).tolist() == [15.0] * 4


def test_tiles_keep_the_order_of_rows():
    rows = jnp.arange(20.0)
    np.testing.assert_array_equal(tiles.by_rows(lambda x, y: x + 2 * y, rows, rows), 3 * rows)


def test_a_product_of_any_width():
    x, w = normal(3, 70), normal(70, 40)
    np.testing.assert_allclose(tiles.product(x, w), np.asarray(x) @ np.asarray(w), atol=1e-4)


def test_a_scaled_row_is_divided():
    found = tiles.scaled(jnp.array([[2.0, -4.0], [3.0, 0.0]]), jnp.array([[2.0], [0.5]]))
    assert found.tolist() == [[1.0, -2.0], [6.0, 0.0]]
