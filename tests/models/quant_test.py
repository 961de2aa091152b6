"""int8 weights and their products against numpy, exactly wherever integers allow it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.models import quant
from jaxrl_tis.models.quant import QuantArray

RNG = np.random.default_rng(0)
dot = jax.jit(quant.dot)
quantize = jax.jit(quant.quantize, static_argnums=1)


def quantize_numpy(x, axis):
    """np.round is half-to-even; every step in float32, as on the device."""
    absmax = np.abs(x).max(axis=axis, keepdims=True)
    scale = np.where(absmax > 0, absmax / np.float32(127.5), np.float32(1.0))
    return np.clip(np.round(x / scale), -128, 127).astype(np.int8), scale


def integers(shape):
    """Values whose scale is exactly 1: integers, and 127.5 (quantised to 127) in every row."""
    x = RNG.integers(-127, 128, shape).astype(np.float32)
    x[..., 0] = 127.5
    return x, np.clip(x, -128, 127).astype(np.int32)


def weights(i, o, scheme):
    q, scale = RNG.integers(-128, 128, (i, o)), 2.0 ** RNG.integers(-8, 3, (1, o))
    return q, scale, QuantArray(jnp.asarray(q, jnp.int8), jnp.asarray(scale, jnp.float32), scheme)


@pytest.mark.parametrize("axis", [-1, -2])
def test_quantize_equals_the_formula(axis):
    x = RNG.normal(0, 3, (4, 20, 30)).astype(np.float32)
    q, scale = quantize(jnp.asarray(x), axis)
    expected_q, expected_scale = quantize_numpy(x, axis)
    assert (q.dtype, scale.dtype, scale.shape) == (jnp.int8, jnp.float32, expected_scale.shape)
    np.testing.assert_allclose(scale, expected_scale, rtol=2e-7)
    # One ulp of the scale may move a value that is half-way between two integers, no other.
    ratio = x / expected_scale
    is_halfway = np.abs(ratio - np.floor(ratio) - 0.5) < 1e-4
    np.testing.assert_array_equal(np.asarray(q)[~is_halfway], expected_q[~is_halfway])
    assert np.abs(np.asarray(q, int) - expected_q).max() <= 1
    assert np.asarray(q).max() == 127 and np.asarray(q).min() <= -127


def test_rounding_is_half_to_even_and_clamped_by_hand():
    # Absmax 127.5 makes the scale 1. 127.5 rounds to 128, clamped to 127; -127.5 to -128.
    x = np.zeros((2, 7), np.float32)
    x[0], x[1, 0] = [127.5, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49], -127.5
    q, scale = quantize(x, -1)
    np.testing.assert_array_equal(scale, [[1.0], [1.0]])
    np.testing.assert_array_equal(q, [[127, 0, 2, 2, 0, -2, 3], [-128, 0, 0, 0, 0, 0, 0]])


def test_an_all_zero_channel_has_scale_one():
    x = jnp.zeros((3, 4)).at[:, 1].set(2.55)
    q, scale = quantize(x, -2)
    np.testing.assert_allclose(scale, [[1.0, 0.02, 1.0, 1.0]], rtol=1e-6)
    assert not np.asarray(q)[:, [0, 2, 3]].any()


def test_quantisation_error_is_at_most_half_a_step():
    x = RNG.normal(0, 1, (64, 16)).astype(np.float32)
    q, scale = quantize(jnp.asarray(x), -2)
    error = np.abs(np.asarray(q, np.float32) * scale - x)
    assert (error <= np.asarray(scale) * 0.5001).all()


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


def test_w8a8_multiplies_int8_into_int32():
    x, (_, _, w) = jnp.ones((3, 70)), weights(70, 9, "w8a8")
    assert "preferred_element_type=int32" in str(jax.make_jaxpr(lambda x: quant.dot(x, w))(x))


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


def test_quantize_params_touches_the_projections_only():
    names = ["q", "k", "v", "o", "gate", "up", "down"]
    kept = {"attn_norm": jnp.ones((2, 6)), "mlp_norm": jnp.ones((2, 6)), "q_bias": jnp.ones((2, 4))}
    projections = {n: jnp.asarray(RNG.normal(0, 1, (2, 6, 4)), jnp.float32) for n in names}
    params = {"embed": jnp.ones((9, 6)), "final_norm": jnp.ones(6), "head": jnp.ones((6, 9)),
              "layers": projections | kept}
    assert quant.quantize_params(params, "none") is params
    for scheme in ("w8a16", "w8a8"):
        out = quant.quantize_params(params, scheme)
        assert out.keys() == params.keys() and out["layers"].keys() == params["layers"].keys()
        for name in names:
            w = out["layers"][name]
            assert isinstance(w, QuantArray) and w.scheme == scheme
            assert (w.q.shape, w.scale.shape) == ((2, 6, 4), (2, 1, 4))
            _, scale = quantize_numpy(np.asarray(projections[name]), -2)
            np.testing.assert_allclose(w.scale, scale, rtol=2e-7)
        for name in ("embed", "final_norm", "head"):
            assert out[name] is params[name]
        for name in kept:
            assert out["layers"][name] is kept[name]
