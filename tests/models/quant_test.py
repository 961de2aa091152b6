"""8-bit weights and their products against numpy, exactly wherever the numbers allow it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_tis.models import quant
from jaxrl_tis.models.quant import QuantArray, Recipe

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

E4M3 = ml_dtypes.float8_e4m3fn

RNG = np.random.default_rng(0)
dot = jax.jit(quant.dot)
quantize = jax.jit(quant.quantize, static_argnums=(1, 2))


def quantize_numpy(x, axis, dtype=jnp.int8):
    """np.round is half-to-even; every step in float32, as on the device."""
    absmax = np.abs(x).max(axis=axis, keepdims=True)
    bound = 127 if dtype == jnp.int8 else 448
    scale = np.where(absmax > 0, absmax * np.float32(1 / bound), np.float32(1.0))
    x = x * (np.float32(1) / scale)
    if dtype == jnp.int8:
        return np.clip(np.round(x), -127, 127).astype(np.int8), scale
    return np.clip(x, -448, 448).astype(E4M3), scale


def integers(shape):
    """Integers with a scale of exactly 1: one of every row is 127."""
    x = RNG.integers(-127, 128, shape)
    x[..., 0] = 127
    return x.astype(np.float32), x.astype(np.int32)


def float8s(shape):
    """Numbers of e4m3 with 448 in every row, so that the scale is 1: signed 1, 1.125 .. 1.875 times
    1/8 .. 64."""
    x = (1 + RNG.integers(0, 8, shape) / 8) * 2.0 ** RNG.integers(-3, 7, shape)
    x = (x * RNG.choice([-1, 1], shape)).astype(np.float32)
    x[..., 0] = 448
    return x


def weights(i, o, scheme):
    q, scale = RNG.integers(-127, 128, (i, o)), 2.0 ** RNG.integers(-8, 3, (1, o))
    return q, scale, QuantArray(jnp.asarray(q, jnp.int8), jnp.asarray(scale, jnp.float32), scheme)


@pytest.mark.all
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantize_equals_the_formula_bit_by_bit(axis, dtype):
    x = RNG.normal(0, 3, (4, 200, 300)).astype(np.float32)
    expected_q, expected_scale = quantize_numpy(x, axis, dtype)
    for program in (quantize, quant.quantize):  # compiled as one, and operation by operation
        q, scale = program(jnp.asarray(x), axis, dtype)
        assert (q.dtype, scale.dtype) == (dtype, jnp.float32)
        np.testing.assert_array_equal(scale, expected_scale)
        np.testing.assert_array_equal(np.asarray(q).view(np.uint8), expected_q.view(np.uint8))


def test_rounding_is_half_to_even_and_clamped_by_hand():
    # Absmax 127 makes the scale 1, 254 makes it 2: 253 / 2 = 126.5 rounds to 126, 251 / 2 to 126.
    x = np.zeros((3, 7), np.float32)
    x[0], x[1, 0] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49], -127
    x[2, :4] = [-254, 253, -251, 249]
    q, scale = quantize(x, -1)
    np.testing.assert_array_equal(scale, [[1.0], [1.0], [2.0]])
    expected = [[127, 0, 2, 2, 0, -2, 3], [-127, 0, 0, 0, 0, 0, 0], [-127, 126, -126, 124, 0, 0, 0]]
    np.testing.assert_array_equal(q, expected)


def rows(count=2000, width=32):
    """Rows whose largest magnitude is negative in some and positive in others."""
    x = RNG.normal(0, 1, (count, width)) * 10.0 ** RNG.uniform(-4, 4, (count, 1))
    return x.astype(np.float32)


def test_the_largest_of_a_row_has_the_code_127_of_its_sign_through_noise_of_the_last_bit():
    x = rows()
    top = np.abs(x).argmax(axis=1)
    sign = np.sign(x[np.arange(len(x)), top])
    assert 0.4 < (sign < 0).mean() < 0.6
    noise = np.where(RNG.integers(0, 2, x.shape), -np.inf, np.inf).astype(np.float32)
    for y in (x, np.nextafter(x, noise)):
        q = np.asarray(quantize(y, -1)[0], int)
        np.testing.assert_array_equal(q[np.arange(len(x)), top], 127 * sign)
        assert np.abs(q).max() == 127


def test_noise_of_the_last_bit_moves_next_to_no_code():
    """At most 127 * 2^-23 = 1.5e-5 of a step for the value and as much for the scale: of 64,000
    values, one or two lie as near to the middle of two codes."""
    x = rows()
    noise = np.where(RNG.integers(0, 2, x.shape), -np.inf, np.inf).astype(np.float32)
    q, moved = (np.asarray(quantize(y, -1)[0], int) for y in (x, np.nextafter(x, noise)))
    assert (q != moved).sum() < 10 and np.abs(q - moved).max() <= 1


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_the_codes_of_opposites_are_opposite(dtype):
    x = np.concatenate([rows(200), np.arange(-16, 16, dtype=np.float32)[None] / 2])
    (q, scale), (opposite, same) = (quantize(y, -1, dtype) for y in (x, -x))
    np.testing.assert_array_equal(scale, same)
    np.testing.assert_array_equal(np.asarray(q, np.float32), -np.asarray(opposite, np.float32))


@pytest.mark.parametrize("dtype, step", [(jnp.int8, 1 / 127), (jnp.float8_e4m3fn, 1 / 448)])
def test_an_all_zero_channel_has_scale_one(dtype, step):
    x = jnp.zeros((3, 4)).at[:, 1].set(2.55)
    q, scale = quantize(x, -2, dtype)
    np.testing.assert_allclose(scale, [[1.0, 2.55 * step, 1.0, 1.0]], rtol=1e-6)
    assert not np.asarray(q, np.float32)[:, [0, 2, 3]].any()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-20, 1e-10, 1e30])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_no_size_of_a_channel_gives_a_number_that_is_not_finite(dtype, size):
    x = jnp.array([[1.0], [-0.5], [0.25]], jnp.float32) * jnp.float32(size)
    q, scale = quantize(x, -2, dtype)
    assert scale[0, 0] > 0 and np.isfinite(scale).all()
    restored = np.asarray(q, np.float32) * np.asarray(scale)
    if size < 1e-19:  # below what a scale can be, the channel is rounded to 0
        assert not restored.any()
    else:
        np.testing.assert_allclose(restored, x, rtol=0.02)


def test_float8_rounds_half_to_even_by_hand():
    # 448 makes the scale 1. From 16 to 32 the numbers are 2 apart: 17 and 19 lie half-way, 17 goes
    # to 16 (mantissa 000) and 19 to 20 (010); below 2^-6 they are 2^-9 apart: 3.5/512 to 4/512.
    x = jnp.array([[448.0, 17.0, 19.0, 18.9, -17.1, 3.5 / 512, 2.4 / 512]])
    q, scale = quantize(x, -1, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(scale, [[1.0]])
    assert q.dtype == jnp.float8_e4m3fn
    expected = [[448.0, 16.0, 20.0, 18.0, -18.0, 4 / 512, 2 / 512]]
    np.testing.assert_array_equal(np.asarray(q, np.float32), expected)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (2, 1, 4)], ids=str)
def test_w8a8_is_exact_integer_arithmetic(batch):
    x, x_q = integers((*batch, 70))
    w_q, w_scale, w = weights(70, 9, "w8a8")
    out = dot(jnp.asarray(x), w)
    assert out.shape == (*batch, 9) and out.dtype == jnp.float32
    # Scales are powers of two and |sum| < 2^24, so the float32 result is the integer one.
    np.testing.assert_array_equal(out, (x_q @ w_q) * w_scale[0])


def test_w8a8_scales_every_token_by_itself():
    x, x_q = integers((6, 70))
    factor = np.float32(2.0) ** np.arange(-3, 3)[:, None]
    w_q, w_scale, w = weights(70, 9, "w8a8")
    out = dot(jnp.asarray(x * factor), w)
    np.testing.assert_array_equal(out, (x_q @ w_q) * w_scale * factor)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_float8_products_are_exact_for_numbers_of_the_format(batch):
    x, w = float8s((*batch, 6)), float8s((9, 6)).T
    w_scale = 2.0 ** RNG.integers(-8, 3, (1, 9)).astype(np.float32)
    expected = (x.astype(np.float64) @ w) * w_scale[0]
    for scheme in ("fp8_w8a16", "fp8_w8a8"):
        q = QuantArray(jnp.asarray(w, jnp.float8_e4m3fn), jnp.asarray(w_scale), scheme)
        out = dot(jnp.asarray(x), q)
        assert out.shape == (*batch, 9) and out.dtype == jnp.float32
        # Multiples of 2^-12 up to 6 * 448^2 have too many bits for float32 to be exact.
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-2 * w_scale.max())


def test_float8_activations_are_quantised_by_w8a8_alone():
    x = jnp.array([[448.0, 17.0]])  # 17 is no number of e4m3: 16
    w = lambda scheme: QuantArray(jnp.ones((2, 1), jnp.float8_e4m3fn), jnp.ones((1, 1)), scheme)
    assert dot(x, w("fp8_w8a16")) == 465.0 and dot(x, w("fp8_w8a8")) == 464.0


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_w8a16_is_exact_for_integer_activations(batch):
    x = RNG.integers(-8, 9, (*batch, 70)).astype(np.float32)
    w_q, w_scale, w = weights(70, 9, "w8a16")
    out = dot(jnp.asarray(x), w)
    assert out.shape == (*batch, 9) and out.dtype == jnp.float32
    np.testing.assert_array_equal(out, (x @ w_q) * w_scale[0])


def test_w8a16_does_not_quantise_the_activations():
    x = RNG.normal(0, 1, (4, 70)).astype(np.float32)
    w_q, w_scale, w = weights(70, 9, "w8a16")
    np.testing.assert_allclose(dot(jnp.asarray(x), w), x @ (w_q * w_scale), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_bfloat16_products_are_summed_in_float32(scheme):
    # 384 ones: a bfloat16 sum stops at 256.
    x = jnp.ones((3, 384), jnp.bfloat16)
    w = {
        "none": jnp.ones((384, 2)),
        "w8a16": QuantArray(jnp.ones((384, 2), jnp.int8), jnp.ones((1, 2)), "w8a16"),
    }[scheme]
    out = dot(x, w)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.full((3, 2), 384.0))
    jaxpr = str(jax.make_jaxpr(lambda x: quant.dot(x, w))(x))
    assert "preferred_element_type=float32" in jaxpr


@pytest.mark.cases("w8a8-int8-int32")
@pytest.mark.parametrize("scheme, operands, result", [
    ("w8a8", "int8", "int32"), ("fp8_w8a8", "float8_e4m3fn", "float32"),
])
def test_w8a8_multiplies_8_bit_matrices(scheme, operands, result):
    w = quant.quantize_weight(jnp.ones((70, 9)), scheme)
    jaxpr = jax.make_jaxpr(lambda x: quant.dot(x, w))(jnp.ones((3, 70)))
    [product] = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [str(v.aval.dtype) for v in product.invars] == [operands] * 2
    assert product.params["preferred_element_type"] == jnp.dtype(result)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_an_all_zero_row_gives_zeros(scheme):
    x, _ = integers((3, 70))
    x[1] = 0.0
    _, _, w = weights(70, 9, scheme)
    out = np.asarray(dot(jnp.asarray(x), w))
    assert not out[1].any() and out[0].any() and np.isfinite(out).all()


def test_float_weights_are_a_plain_product_in_the_dtype_of_x():
    x, w = (RNG.normal(0, 1, shape).astype(np.float32) for shape in ((2, 3, 5), (5, 4)))
    np.testing.assert_allclose(dot(jnp.asarray(x), jnp.asarray(w)), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.cases("()")
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_gradients_of_bfloat16_products_are_sums_of_bfloat16_products(batch):
    """Small integers, so that every sum is exact, rounded once; no operand is wider."""
    x, w, y_bar = (RNG.integers(-9, 10, shape) for shape in ((*batch, 40), (40, 7), (*batch, 7)))
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16)

    def gradients(x, w, y_bar):
        return jax.vjp(quant.dot, x, w)[1](y_bar)

    inputs = narrow(x), jnp.asarray(w, jnp.float32), narrow(y_bar)
    x_bar, w_bar = jax.jit(gradients)(*inputs)
    assert (x_bar.dtype, w_bar.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(x_bar, narrow(y_bar @ w.T))
    rows = x.reshape(-1, 40).T @ y_bar.reshape(-1, 7)
    np.testing.assert_array_equal(w_bar, narrow(rows).astype(np.float32))
    products = [
        equation.invars for equation in jax.make_jaxpr(gradients)(*inputs).jaxpr.eqns
        if equation.primitive.name == "dot_general"
    ]
    assert len(products) >= 2
    assert {x.aval.dtype for operands in products for x in operands} == {jnp.dtype("bfloat16")}


@pytest.mark.all
def test_quantize_params_touches_the_projections_only():
    names = ["q", "k", "v", "o", "gate", "up", "down"]
    kept = {"attn_norm": jnp.ones((2, 6)), "mlp_norm": jnp.ones((2, 6)), "q_bias": jnp.ones((2, 4))}
    projections = {n: jnp.asarray(RNG.normal(0, 1, (2, 6, 4)), jnp.float32) for n in names}
    params = {"embed": jnp.ones((9, 6)), "final_norm": jnp.ones(6), "head": jnp.ones((6, 9)),
              "layers": projections | kept}
    for scheme in quant.SCHEMES:
        out = quant.quantize_params(params, Recipe(scheme))
        if scheme in ("none", "mxfp4"):  # none of these is of experts
            assert all(a is b for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(params), strict=True))
            continue
        dtype = jnp.float8_e4m3fn if scheme.startswith("fp8") else jnp.int8
        assert out.keys() == params.keys() and out["layers"].keys() == params["layers"].keys()
        for name in names:
            w = out["layers"][name]
            assert isinstance(w, QuantArray) and w.scheme == scheme and w.q.dtype == dtype
            assert (w.q.shape, w.scale.shape) == ((2, 6, 4), (2, 1, 4))
            _, scale = quantize_numpy(np.asarray(projections[name]), -2, dtype)
            np.testing.assert_array_equal(w.scale, scale)
        for name in ("embed", "final_norm", "head"):
            assert out[name] is params[name]
        for name in kept:
            assert out["layers"][name] is kept[name]


def test_excluded_projections_keep_their_dtype():
    params = {"layers": {name: jnp.ones((2, 6, 4)) for name in quant.QUANTIZED}}
    recipe = Recipe("w8a8", ("down", "o"))
    out, masters = quant.quantize_params(params, recipe), quant.masters(params["layers"], recipe)
    for name in quant.QUANTIZED:
        is_kept = name in ("down", "o")
        assert isinstance(out["layers"][name], QuantArray) != is_kept
        assert isinstance(masters[name], quant.Master) != is_kept


def test_experts_alone_have_4_bits():
    params = {"layers": {name: jnp.ones((2, 64, 4)) for name in quant.QUANTIZED}}
    recipe = Recipe("mxfp4", ("expert_up",))
    out = jax.eval_shape(lambda params: quant.quantize_params(params, recipe), params)["layers"]
    found = {name for name, w in out.items() if isinstance(w, QuantArray)}
    assert found == {"expert_gate", "expert_down"}
    assert (out["expert_down"].q.shape, out["expert_down"].scale.shape) == ((2, 32, 4), (2, 2, 4))


def test_the_id_of_a_recipe_names_all_that_decides_the_numbers():
    assert Recipe("w8a8").id == "w8a8"
    assert Recipe("fp8_w8a16", ("down", "q")).id == "fp8_w8a16 except q,down"
    assert Recipe("w8a8", ("down", "q")).id == Recipe("w8a8", ("q", "down", "q")).id
    recipes = [Recipe(scheme, kept) for scheme in quant.SCHEMES for kept in ((), ("q",), ("k",))]
    assert len({recipe.id for recipe in recipes}) == len(recipes)


def test_unknown_names_of_a_recipe_are_refused():
    with pytest.raises(ValueError, match="'w4a4' is none of none, w8a16"):
        Recipe("w4a4")
    with pytest.raises(ValueError, match="names head, norm; choose among the projections q, k, v"):
        Recipe("w8a8", ("head", "down", "norm"))
