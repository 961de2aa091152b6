"""Loops over tiles of rows and the TPU kernels, beside a loop over rows in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis.aot import hlo
from jaxrl_tis.kernels import grouped_matmul
from tests import jitted, races, tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

M, E, I, O = 100, 5, 24, 12
SIZES = {
    "even": (20,) * 5, "ragged": (0, 43, 1, 0, 56), "one": (0, 0, 100, 0, 0),
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


@pytest.mark.all
def test_the_group_of_each_row():
    found = grouped_matmul.group_of_rows(jnp.asarray([2, 0, 3], jnp.int32), 7)
    np.testing.assert_array_equal(found, [0, 0, 2, 2, 2, 3, 3])


@pytest.mark.parametrize("num_rows, num_groups, sizes", [
    (64, 8, (8,)), (512, 8, (64, 32, 16, 8)), (4096, 8, (512, 256, 128, 64)),
    (65536, 8, (512, 256, 128, 64)), (5, 8, (8,)),
])
def test_the_sizes_of_tiles(num_rows, num_groups, sizes):
    assert grouped_matmul.tile_sizes(num_rows, num_groups) == sizes


TILED = pytest.mark.parametrize("tiles", [(7,), (512, 16), (32, 16, 4)])


@SIZED
@TILED
def test_products_by_tiles(sizes, tiles):
    x, w = normal(0, M, I), normal(1, E, I, O)
    found = jitted.function(grouped_matmul.by_tiles)(jnp.dot, x, w, np.int32(sizes), tiles)
    np.testing.assert_allclose(found, by_rows(x, w, sizes), rtol=1e-4, atol=1e-4)


@SIZED
@TILED
def test_outer_products_by_tiles(sizes, tiles):
    x, y = normal(0, M, I), normal(1, M, O)
    found = jitted.function(grouped_matmul.outer_by_tiles)(x, y, np.int32(sizes), tiles)
    np.testing.assert_allclose(found, outer_by_rows(x, y, sizes), rtol=1e-4, atol=1e-4)


# TPU kernels


def interpreted(run, *arrays, **params):
    """Memory that nothing wrote and memory past an array's end read as NaN."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", **params)
    with pltpu.force_tpu_interpret_mode(params):
        return jax.block_until_ready(jax.jit(lambda *arrays: run(*arrays))(*arrays))


@pytest.fixture
def blocks(monkeypatch):
    """Blocks that do not divide the matrices."""
    monkeypatch.setattr(grouped_matmul, "BLOCK_BYTES", 1)
    monkeypatch.setattr(grouped_matmul, "OUTER_BLOCK", 128)


@SIZED
@pytest.mark.usefixtures("blocks")
def test_products_of_the_kernel(sizes):
    x, w, sizes_e = normal(0, M, I), normal(1, E, I, 200), np.int32(sizes)
    want = by_rows(x, w, sizes)
    for in_axis, stored in enumerate((w, np.swapaxes(w, 1, 2))):
        run = lambda *a, axis=in_axis: grouped_matmul.product_kernel(*a, axis, jnp.float32)
        found = interpreted(run, x, stored, sizes_e)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@SIZED
@pytest.mark.usefixtures("blocks")
def test_outer_products_of_the_kernel(sizes):
    x, y, sizes_e = normal(0, M, 200), normal(1, M, 140), np.int32(sizes)
    run = lambda *a: grouped_matmul.outer_kernel(*a, jnp.float32)
    found = interpreted(run, x, y, sizes_e)
    np.testing.assert_allclose(found, outer_by_rows(x, y, sizes), rtol=1e-4, atol=1e-4)


def test_no_matrix_of_an_empty_group_is_read():
    sizes = np.int32([0, 50, 0, 20, 0])
    visits = jitted.function(grouped_matmul._visits)(sizes, M, 32, visits_empty=False)
    assert set(np.asarray(visits.group).tolist()) == {1, 3}
    assert set(np.asarray(visits.tile).tolist()) == set(range(4))


@pytest.mark.all
@pytest.mark.usefixtures("blocks")
def test_two_cores_do_not_race():
    sizes = jnp.asarray(SIZES["ragged"], jnp.int32)
    x, w, y = map(jnp.asarray, (normal(0, M, I), normal(1, E, I, 200), normal(2, M, 200)))
    cores = dict(num_cores_or_threads=2, **races.DETECTED)
    with races.none():
        interpreted(lambda: grouped_matmul.product_kernel(x, w, sizes, 0, jnp.float32), **cores)
        interpreted(lambda: grouped_matmul.outer_kernel(x, y, sizes, jnp.float32), **cores)


FLOAT8 = "float8_e4m3fn"


@pytest.mark.parametrize("x_dtype, w_dtype", [
    ("bfloat16", "int8"), ("int8", "int8"), (FLOAT8, FLOAT8), ("float16", "bfloat16"),
])
@pytest.mark.parametrize("topology, width, columns", [
    ("v5e:2x2", 1000, 700), pytest.param("v5p:2x2x1", 1024, 768, marks=pytest.mark.all),
    pytest.param("tpu7x:2x2x1", 1024, 768, marks=pytest.mark.all),
])
def test_a_product_copies_no_matrix(topology, width, columns, x_dtype, w_dtype):
    """In a program with 64-bit types too."""
    num_groups, rows = 16, 500
    mesh = jax.sharding.Mesh(np.array(tpu.devices(topology)[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    run = lambda x, w, *rest: grouped_matmul.product_kernel(
        x, w, rest[0], 1, jnp.bfloat16, *rest[1:]
    )
    arrays = (
        array(x_dtype, rows, width), array(w_dtype, num_groups, columns, width),
        array("int32", num_groups), array("float32", rows, 1),
        array("float32", num_groups, 1, columns),
    )
    with jax.enable_x64(True):
        program = jax.jit(run).lower(*arrays).compile()
    assert program.as_text().count(f'custom_call_target="{hlo.MOSAIC}"') == 1
    assert program.memory_analysis().temp_size_in_bytes < num_groups * width * columns / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("topology", [
    "v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.all),
])
def test_outer_products_compile(topology, dtype):
    mesh = jax.sharding.Mesh(np.array(tpu.devices(topology)[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    run = lambda *a: grouped_matmul.outer_kernel(*a, jnp.dtype(dtype))
    arrays = array(dtype, 500, 1000), array(dtype, 500, 700), array("int32", 16)
    text = jax.jit(run).lower(*arrays).compile().as_text()
    assert text.count(f'custom_call_target="{hlo.MOSAIC}"') == 1
