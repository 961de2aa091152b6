"""Products by expert, beside a reference that computes every row with every expert."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl_tis.kernels import mxfp4, tiles
from jaxrl_tis.models import invariant, quant
from jaxrl_tis.models.grouped import grouped_matmul, grouped_matmul_invariant
from tests import jitted

pytestmark = pytest.mark.compiles

M, E, I, O = 40, 4, 24, 12
SIZES = {
    "even": (10, 10, 10, 10), "first and last empty": (0, 23, 17, 0), "one": (0, 0, 40, 0),
    "not full": (3, 0, 11, 5), "none": (0, 0, 0, 0),
}
INTEGER = [name for name, scheme in quant.SCHEMES.items() if scheme.dtype == jnp.int8]
BY_CHANNEL = [name for name, scheme in quant.SCHEMES.items() if not scheme.is_mxfp4]
OPTIMIZED = pytest.mark.usefixtures("optimized")


def normal(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def sizes_of(*sizes):
    return np.asarray(sizes, np.int32)


def at(w, e):
    """The weight of one expert."""
    return jax.tree.map(lambda x: x[e], w)


def reference(x, w, sizes):
    """Every row times every expert, of which one is selected."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    y = jnp.stack([quant.dot(x, at(w, e)) for e in range(len(sizes))])
    y = jnp.take_along_axis(y, jnp.minimum(group, len(sizes) - 1)[None, :, None], axis=0)[0]
    return jnp.where((group < len(sizes))[:, None], y, 0)


def transposed(w):
    if isinstance(w, quant.QuantArray):
        return quant.Transposed(quant.QuantArray(np.swapaxes(w.q, 1, 2), w.scale, w.scheme))
    return quant.Transposed(np.swapaxes(w, 1, 2))


product, expected, quantize_weight = map(
    jitted.function, (grouped_matmul, reference, quant.quantize_weight)
)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(st.integers(0, 40), min_size=E, max_size=E))
def test_values_of_any_sizes(sizes):
    ends = np.minimum(np.cumsum(sizes), M)
    sizes = sizes_of(*np.diff(ends, prepend=0))
    x, w = normal(0, M, I), normal(1, E, I, O)
    np.testing.assert_allclose(
        product(x, w, sizes), expected(x, w, sizes), rtol=1e-5, atol=1e-5
    )


@pytest.mark.cases(*(f"{scheme}-{dtype}" for scheme, dtype in [
    ("none", "float16"), ("none", "bfloat16"), ("w8a16", "float32"), ("w8a8", "bfloat16"),
    ("fp8_w8a16", "bfloat16"), ("fp8_w8a8", "float16"),
]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", BY_CHANNEL)
def test_every_kind_of_weight(scheme, dtype):
    x, w = normal(0, M, I, dtype=dtype), normal(1, E, I, O)
    sizes = sizes_of(3, 0, 20, 9)
    kinds = [w.astype(dtype)]
    if scheme != "none":
        kinds = [quantize_weight(w, scheme), quant.Master(w, scheme)]
    want = expected(x, kinds[0], sizes)
    for kind in (*kinds, transposed(kinds[0])):
        found = product(x, kind, sizes)
        assert found.dtype == dtype
        if scheme in INTEGER:
            np.testing.assert_array_equal(found, want)
        else:
            np.testing.assert_allclose(
                found.astype("float32"), want.astype("float32"), rtol=1e-2, atol=1e-5
            )


@pytest.mark.all
@pytest.mark.parametrize("scheme", INTEGER)
@OPTIMIZED
def test_integers_have_the_bits_of_a_product_by_expert(scheme):
    x, w = normal(0, M, I, dtype="bfloat16"), quantize_weight(normal(1, E, I, O), scheme)
    found = jax.jit(lambda *a: grouped_matmul(*a))(x, w, sizes_of(3, 0, 20, 9))
    dot = jax.jit(quant.dot)
    np.testing.assert_array_equal(found[:3], dot(x[:3], at(w, 0)))
    np.testing.assert_array_equal(found[3:23], dot(x[3:23], at(w, 2)))


@pytest.mark.parametrize("scheme", ["w8a16", "fp8_w8a8"])
def test_a_cpu_makes_no_float_copy_of_all_weights(scheme):
    x, w = normal(0, M, I, dtype="bfloat16"), quantize_weight(normal(1, E, I, O), scheme)
    text = jax.jit(grouped_matmul).lower(x, w, sizes_of(3, 0, 20, 9)).compile().as_text()
    shapes = set(re.findall(rf"(\w+)\[{E},{I},{O}\]", text))
    assert shapes and not shapes & {"f32", "bf16", "f16"}


# Gradients


@jitted.function
def pulled(f, x, w, sizes, y_bar):
    return jax.vjp(lambda x, w: f(x, w, sizes), x, w)[1](y_bar)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_gradients(sizes, is_transposed):
    x, w, y_bar = normal(0, M, I), normal(1, E, I, O), normal(2, M, O)
    w = transposed(w) if is_transposed else w
    found, want = (pulled(f, x, w, sizes_of(*sizes), y_bar) for f in (grouped_matmul, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)
    assert not np.any(found[0][sum(sizes):])


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_16_bits(dtype):
    x, w = normal(0, M, I, dtype=dtype), normal(1, E, I, O, dtype=dtype)
    y_bar, sizes = normal(2, M, O, dtype=dtype), sizes_of(3, 0, 20, 9)
    found = pulled(grouped_matmul, x, w, sizes, y_bar)
    wide = [a.astype("float32") for a in (x, w)]
    want = pulled(reference, *wide, sizes, y_bar.astype("float32"))
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype("float32"), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_w8a16"])
def test_a_master_has_the_gradients_of_its_float_weight(scheme):
    x, w, y_bar = normal(0, M, I), normal(1, E, I, O), normal(2, M, O)
    found, want = (pulled(grouped_matmul, x, kind, sizes_of(3, 0, 20, 9), y_bar)
                   for kind in (quant.Master(w, scheme), w))
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_array_equal(found[1].w, want[1])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_frozen_weight_passes_the_gradient_of_its_dequantized_product(is_transposed):
    x, y_bar = normal(0, M, I), normal(2, M, O)
    w = quantize_weight(normal(1, E, I, O), "w8a8")
    sizes = sizes_of(3, 0, 20, 9)
    kind = transposed(w) if is_transposed else w
    found = jitted.grad(lambda x: jnp.sum(grouped_matmul(x, kind, sizes) * y_bar))(x)
    want = pulled(reference, x, w.q * w.scale, sizes, y_bar)[0]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.all
def test_rows_after_the_last_expert_may_be_nan():
    x, w, y_bar = normal(0, M, I), normal(1, E, I, O), normal(2, M, O)
    sizes = sizes_of(3, 0, 11, 5)
    value = lambda x: (product(x, w, sizes), pulled(grouped_matmul, x, w, sizes, y_bar))
    poisoned = np.where(np.arange(M)[:, None] < 19, x, np.nan)
    for ours, theirs in zip(
        jax.tree.leaves(value(poisoned)), jax.tree.leaves(value(x)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


# The TPU kernels


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, **_: tpu(*x))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        yield


@pytest.mark.cases("w8a8", "fp8_w8a16")
@pytest.mark.parametrize("scheme", BY_CHANNEL)
def test_a_tpu_computes_the_same_product(scheme, interpreted):
    x, w, sizes = normal(0, M, I, dtype="bfloat16"), normal(1, E, I, O), sizes_of(3, 0, 20, 9)
    w = w.astype("bfloat16") if scheme == "none" else quantize_weight(w, scheme)
    want = expected(x, w, sizes).astype("float32")
    for kind in (w, transposed(w)):
        found = jitted.function(lambda *a: grouped_matmul(*a))(x, kind, sizes)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.astype("float32"), want, rtol=1e-2, atol=1e-5)


@pytest.mark.cases("tpu")
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_mxfp4_is_the_product_of_the_dequantized_weight(platform, request):
    """Also the gradient of x, and that of the float weight of a master."""
    if platform == "tpu":
        request.getfixturevalue("interpreted")
    @jax.jit
    def run(x, w, sizes, y_bar):
        stored = quant.quantize_weight(w, "mxfp4")
        found, pull = jax.vjp(lambda x: grouped_matmul(x, stored, sizes), x)
        master, pull_both = jax.vjp(lambda x, w: grouped_matmul(x, quant.Master(w, "mxfp4"), sizes), x, w)
        return stored, found, *pull(y_bar), master, *pull_both(y_bar)

    x, y_bar = (normal(i, M, n, dtype="bfloat16") for i, n in ((0, 64), (2, O)))
    w, sizes = normal(1, E, 64, O), sizes_of(3, 0, 20, 9)
    stored, found, x_bar, master, *bars = run(x, w, sizes, y_bar)
    blocks = np.asarray(stored.q).reshape(E, 2, 16, O).transpose(0, 3, 1, 2)
    whole = mxfp4.decode(blocks, np.asarray(stored.scale).swapaxes(1, 2)).swapaxes(1, 2)
    assert 0.1 < np.abs(whole - w).max() < 0.5
    of_m = np.repeat(np.arange(E + 1), [*sizes, M - sum(sizes)])
    of_row = lambda w: np.concatenate([w, 0 * w[:1]])[of_m]
    x, y_bar = x.astype("float32"), y_bar.astype("float32")
    expected = np.einsum("mi,mio->mo", x, of_row(whole))
    w_bar = np.stack([x[of_m == e].T @ y_bar[of_m == e] for e in range(E)])
    x_of = lambda w: np.einsum("mo,mio->mi", y_bar, of_row(w))
    pairs = [(found, expected), (master, expected), (x_bar, x_of(whole)), (bars[0], x_of(w)), (bars[1], w_bar)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.astype("float32"), theirs, rtol=1e-2, atol=5e-2)


@pytest.mark.all
@pytest.mark.cases("none-float16", "w8a8-float32")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scheme", ["none", "w8a8"])
def test_a_tpu_computes_the_same_gradients(scheme, dtype, interpreted):
    x, w, y_bar = normal(0, M, I, dtype=dtype), normal(1, E, I, O), normal(2, M, O, dtype=dtype)
    sizes = sizes_of(3, 0, 20, 9)
    kind = w.astype(dtype) if scheme == "none" else quant.Master(w, scheme)
    found = pulled(lambda *a: grouped_matmul(*a), x, kind, sizes, y_bar)
    wide = [a.astype("float32") for a in (x, w, y_bar)]
    want = pulled(reference, *wide[:2], sizes, wide[2])
    limit = 1e-5 if dtype == "float32" else 1e-2
    for ours, theirs in zip(jax.tree.leaves(found), want, strict=True):
        np.testing.assert_allclose(ours.astype("float32"), theirs, rtol=limit, atol=limit)


# Transformations


def loss(x, w, sizes, c):
    return jnp.sum(grouped_matmul(x, w, sizes) * c)


def shards():
    """Arrays of two shards with different sizes."""
    sizes = np.stack([sizes_of(3, 0, 20, 9), sizes_of(0, 40, 0, 0)])
    return normal(0, 2, M, I), normal(1, 2, E, I, O), sizes, normal(2, 2, M, O)


def close(found, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)


@pytest.mark.parametrize("is_shared", [False, True])
def test_vmap_is_a_loop_over_shards(is_shared):
    x, w, sizes, c = shards()
    w = w[0] if is_shared else w
    axes = (0, None if is_shared else 0, 0, 0)
    grad = jitted.grad(loss, (0, 1))
    each = [grad(x[i], w if is_shared else w[i], sizes[i], c[i]) for i in range(2)]
    want = jax.tree.map(lambda *parts: np.stack(parts), *each)
    close(jax.jit(jax.vmap(grad, axes))(x, w, sizes, c), want)
    total = lambda x, w: jnp.sum(jax.vmap(loss, axes)(x, w, jnp.asarray(sizes), c))
    want = (want[0], np.sum(want[1], axis=0) if is_shared else want[1])
    close(jax.jit(jax.grad(total, (0, 1)))(x, w), want)


@pytest.mark.all
def test_vmap_over_devices_needs_no_collective():
    """As the learner computes each data shard's rows on a device of its own."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    arrays = jax.tree.map(put, shards())
    grad = jax.vmap(jax.grad(loss, (0, 1)), spmd_axis_name="data")
    program = jax.jit(grad).lower(*arrays).compile()
    assert not any(
        name in program.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute(")
    )
    close(jax.device_get(program(*arrays)), jax.jit(grad)(*shards()))


@pytest.mark.all
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, sizes, c = shards()

    def local(x, w, sizes, c):
        return jax.grad(loss, (0, 1))(x, w[0], sizes[0], c)

    rows = lambda x: x.reshape(-1, x.shape[-1])
    run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    x_bar, w_bar = jax.jit(run)(rows(x), w, sizes, rows(c))
    want = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(x, w, sizes, c)
    close((x_bar.reshape(x.shape), w_bar.reshape(w.shape)), want)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_scan_over_layers_with_checkpoints(is_saved):
    x, sizes = normal(0, M, I), sizes_of(3, 0, 20, 9)
    layers = normal(1, 3, E, I, I)

    def total(layers, f):
        step = lambda x, w: (x + jnp.tanh(f(x, w, sizes)), None)
        step = step if is_saved else jax.checkpoint(step)
        return jnp.sum(jax.lax.scan(step, x, layers)[0])

    run = jax.jit(jax.value_and_grad(total), static_argnums=1)
    found, want = run(layers, grouped_matmul), run(layers, reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, want)


# Invariant numerics


def of_row(x, w):
    """The product of rows with one expert by the contract of kernels/tiles.py."""
    return invariant.dot(x[None], w, None, False)[0]


def in_a_run(f):
    return jax.jit(f, compiler_options=tiles.COMPILER_OPTIONS)


@pytest.mark.cases("none-float32", "w8a8-bfloat16")
@OPTIMIZED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["none", *INTEGER])
def test_only_a_row_and_its_expert_change_its_bits(scheme, dtype):
    rows, width = 150, 192
    x, w = normal(0, rows, width, dtype=dtype), normal(1, E, width, 48, dtype=dtype)
    w = w if scheme == "none" else quantize_weight(w, scheme)
    run = in_a_run(lambda *a: grouped_matmul_invariant(*a))
    alone = in_a_run(lambda *a: of_row(*a))
    want = [np.asarray(alone(x[:tiles.ROWS], at(w, e)), "float32") for e in range(E)]
    rng = np.random.default_rng(3)
    for sizes in [(150, 0, 0, 0), (37, 0, 101, 12), (1, 2, 3, 4)]:
        for count in (rows, 33, 10):
            ends = np.minimum(np.cumsum(sizes), count)
            kept = np.diff(ends, prepend=0)
            order = rng.permutation(rows)[:count]
            found = np.asarray(run(x[order], w, sizes_of(*kept)), "float32")
            group = np.searchsorted(ends, np.arange(count), side="right")
            for place, (row, e) in enumerate(zip(order, group, strict=True)):
                if row < tiles.ROWS and e < E:
                    np.testing.assert_array_equal(found[place], want[e][row])


@pytest.mark.all
@OPTIMIZED
def test_the_plain_product_does_depend_on_other_rows():
    """Negative control. Which number of rows changes the sums differs by machine."""
    x, w = normal(0, 150, 1024), normal(1, 1, 1024, 256)
    run = in_a_run(lambda *a: grouped_matmul(*a))
    many = np.asarray(run(x, w, sizes_of(150)))
    few = {n: np.asarray(run(x[:n], w, sizes_of(n))) for n in (1, 3, 7)}
    assert any(np.any(y != many[:n]) for n, y in few.items())


@pytest.mark.all
@OPTIMIZED
def test_invariant_values_have_the_same_bits_under_vmap_and_in_an_update():
    x, w = normal(0, 2, 70, 192), normal(1, E, 192, 48)
    sizes = np.stack([sizes_of(30, 0, 20, 9), sizes_of(0, 70, 0, 0)])
    each = in_a_run(lambda *a: grouped_matmul_invariant(*a))
    shards = jax.vmap(lambda x, w, sizes: grouped_matmul_invariant(x, w, sizes), (0, None, 0))
    square = lambda w, x, sizes: (jnp.sum(jnp.square(y := shards(x, w, sizes))), y)
    (_, updated), _ = in_a_run(jax.value_and_grad(square, has_aux=True))(w, x, sizes)
    for found in (in_a_run(shards)(x, w, sizes), updated):
        for i in range(2):
            np.testing.assert_array_equal(found[i], each(x[i], w, sizes[i]))


def test_an_invariant_product_has_the_plain_gradient():
    x, w, y_bar, sizes = normal(0, M, I), normal(1, E, I, O), normal(2, M, O), sizes_of(3, 0, 20, 9)
    close(*(pulled(f, x, w, sizes, y_bar) for f in (grouped_matmul_invariant, reference)))


# Bad input


@pytest.mark.parametrize("f", [grouped_matmul, grouped_matmul_invariant])
@pytest.mark.parametrize("x, w, sizes, message", [
    ((M, I), (E, I, O), 3, "weights of 4 experts and 3 sizes"),
    ((M, I + 1), (E, I, O), E, "width 25 meet weights with 24 inputs"),
    ((2, M, I), (E, I, O), E, r"needs x \[M,i\]"),
    ((M, I), (I, O), E, r"needs x \[M,i\]"),
])
def test_shapes_that_do_not_match(f, x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        f(np.zeros(x), np.zeros(w), sizes_of(*[1] * sizes))


def test_transposed_weights_have_no_invariant_product():
    w = transposed(normal(1, E, I, O))
    with pytest.raises(ValueError, match="no transposed weights"):
        grouped_matmul_invariant(normal(0, M, I), w, sizes_of(1, 1, 1, 1))
