"""Our schemes against Qwix, which has the same rounding. Its bounds are 127.5 and 448; its absmax
calibration takes a factor, and 127.5 / 127 makes the scale absmax / 127."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from jaxrl_tis.models import quant

pytestmark = pytest.mark.by_jax("qwix has a version for each jax")

RNG = np.random.default_rng(0)
SCHEMES = [name for name, scheme in quant.SCHEMES.items() if name != "none" and not scheme.is_mxfp4]
CALIBRATION = {jnp.int8: f"absmax,{127.5 / 127!r}", jnp.float8_e4m3fn: "absmax"}
quantize = jax.jit(quant.quantize, static_argnums=(1, 2))


def qwix_quantize(x, dtype, kept):
    return qwix.quantize(
        x, dtype, channelwise_axes=kept, calibration_method=CALIBRATION[jnp.dtype(dtype).type]
    )


def numbers(array):
    return np.asarray(array.astype(jnp.float32))


def matrix(*shape):
    """Channels of very different sizes, one of zeros."""
    x = RNG.normal(0, 1, shape) * 10.0 ** RNG.uniform(-6, 3, (*shape[:-2], 1, shape[-1]))
    x[..., 2] = 0
    return jnp.asarray(x, jnp.float32)


@pytest.mark.all
@pytest.mark.parametrize("axis, kept", [(-2, (0, 2)), (-1, (0, 1))])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_values_and_scales_are_those_of_qwix(dtype, axis, kept):
    x = matrix(3, 40, 50)
    ours, scale = quantize(x, axis, dtype)
    theirs = qwix_quantize(x, dtype, kept)
    np.testing.assert_allclose(scale, theirs.scale, rtol=2e-7)
    # It divides where we multiply by the reciprocal, which moves the few values that are half-way
    # between two of the format by one.
    differs = numbers(ours) != numbers(theirs.qvalue)
    assert differs.mean() < 1e-3
    if dtype == jnp.int8:
        assert np.abs(numbers(ours) - numbers(theirs.qvalue)).max() <= 1


@pytest.mark.all
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_qwix(scheme, dtype):
    x = jnp.asarray(RNG.normal(0, 2, (5, 64)), dtype)
    w = quant.quantize_weight(matrix(64, 24), scheme)
    theirs_x = x
    if quant.SCHEMES[scheme].has_activations:
        theirs_x = qwix_quantize(x.astype(jnp.float32), w.q.dtype, (0,))
    expected = qwix.dot(theirs_x, qwix.QArray(w.q, w.scale))
    found = jax.jit(quant.dot)(x, w)
    rtol = 2e-6 if dtype == "float32" else 0.01
    size = numbers(expected).std(axis=0).max()
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=rtol, atol=rtol * size)
