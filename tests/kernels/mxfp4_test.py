"""MXFP4 beside tables by hand and the rounding of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxrl_tis.kernels import mxfp4

RNG = np.random.default_rng(0)
quantize = jax.jit(mxfp4.quantize)


@functools.partial(jax.jit, static_argnums=2)
def dequantize(blocks, exponents, dtype):
    return jax.vmap(functools.partial(mxfp4.dequantize, dtype=dtype))(blocks, exponents)


def test_a_byte_has_the_first_number_in_its_low_bits():
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, :3] = 0x71, 0x2F, 0x09  # 0.5 and 6, -6 and 1, -0.5 and 0
    values = mxfp4.decode(blocks, np.array([129], np.uint8))  # times 4
    np.testing.assert_array_equal(values[:6], [2, 24, -24, 4, -2, 0])
    assert values.shape == (32,) and not values[6:].any()


def test_the_numbers_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(mxfp4.VALUES, codes)


def test_numbers_of_a_file_are_kept_by_a_cast_to_bfloat16_and_by_quantization():
    """The largest of a block may be any of the numbers: its exponent is then another one."""
    blocks = RNG.integers(0, 256, (7, 8, 3, 16)).astype(np.uint8)
    blocks[:6] &= np.uint8(0x11) * np.array([8, 9, 10, 11, 12, 13], np.uint8)[:, None, None, None]
    w = mxfp4.decode(blocks, RNG.integers(60, 200, (7, 8, 3)).astype(np.uint8)).swapaxes(1, 2)
    np.testing.assert_array_equal(w.astype(jnp.bfloat16), w)
    stored = quantize(w)
    assert (stored[0].shape, stored[1].shape) == ((7, 48, 8), (7, 3, 8))
    for dtype in ("bfloat16", "float32"):
        np.testing.assert_array_equal(dequantize(*stored, dtype), w)


def test_other_numbers_are_rounded_to_the_nearest_below_no_clip():
    x = RNG.normal(0, 1, (96, 50)).astype(np.float32)
    x[:32, 0] = 0
    x[32:64, 1] = np.r_[6.0, np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5], 4)[:31]]  # half-way
    x[64:, 2] = np.r_[6.001, np.full(31, 0.5)]
    by_block = x.reshape(3, 32, 50)
    largest = np.abs(by_block).max(1, keepdims=True)
    power = 2.0 ** np.ceil(np.log2(np.where(largest, largest, 6) / 6))
    expected = (by_block / power).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * power
    np.testing.assert_array_equal(dequantize(*quantize(x[None]), "float32")[0], expected.reshape(96, 50))
    assert np.abs(expected.reshape(96, 50) - x).max() <= 2 * power.max()
