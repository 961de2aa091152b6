"""MXFP4: blocks of 32 numbers of 4 bits with one power of two (OCP Microscaling Formats 1.0).

A number is E2M1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Blocks lie along the inputs of a
matrix. A byte has two consecutive inputs, the first in its low bits. The exponent of a block is a
byte with a bias of 127. The product of both is exact in bfloat16.

Published files have [..., out, in / 32, 16] bytes (`decode`); a matrix in memory has [..., in / 2, out]
bytes and [..., in / 32, out] exponents (`quantize`, `dequantize`).
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, BIAS, LEAST, MOST = 32, 127, -125, 126  # the exponents that `quantize` makes
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PAIRS = np.stack([VALUES[np.arange(256) % 16], VALUES[np.arange(256) // 16]], axis=-1)  # of a byte


def decode(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers [..., N * 32] of bytes [..., N, 16] and exponents [..., N]."""
    values = PAIRS[blocks].reshape(*blocks.shape[:-1], BLOCK)
    values = np.ldexp(values, exponents.astype(np.int32)[..., None] - BIAS)
    return values.reshape(*blocks.shape[:-2], -1)


def quantize(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bytes [..., in / 2, out] and exponents [..., in / 32, out], uint8, of a matrix
    [..., in, out], whose inputs are whole blocks.

    The exponent is the smallest with which no number exceeds 6. Matrices that are MXFP4 therefore
    stay the same. Other numbers are rounded to the nearest, half to even.
    """
    *lead, width, columns = w.shape
    x = w.astype(jnp.float32).reshape(*lead, width // BLOCK, BLOCK, columns)
    mantissa, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=-2, keepdims=True))
    exponent = exponent - jnp.where(mantissa > 0.75, 2, 3)  # 6 is 0.75 * 2^3
    exponent = jnp.clip(exponent, LEAST, MOST)
    codes = _codes(x * _power_of_two(-exponent)).reshape(*lead, width // 2, 2, columns)
    blocks = codes[..., 0, :] | codes[..., 1, :] << 4
    return blocks.astype(jnp.uint8), (exponent[..., 0, :] + BIAS).astype(jnp.uint8)


def _codes(x: jax.Array) -> jax.Array:
    """Returns the nearest numbers of 4 bits, int32. Half-way between two, the even one."""
    middles, size = (VALUES[:7] + VALUES[1:8]) / 2, jnp.abs(x)
    codes = jnp.zeros(x.shape, jnp.int32)
    for i, middle in enumerate(middles):
        codes += (size >= middle if i % 2 else size > middle).astype(jnp.int32)
    return codes | jnp.where(jnp.signbit(x), 8, 0)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent in float32, exactly, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + BIAS) << 23, jnp.float32)


def halves(blocks: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of the even and of the odd inputs, [in / 2, out] float32 each, by integer
    operations that a TPU's kernel has."""
    scale = _power_of_two(exponents.astype(jnp.int32) - BIAS - 1)  # of halves
    rows, columns = blocks.shape
    scale = jnp.broadcast_to(scale[:, None], (rows * 2 // BLOCK, BLOCK // 2, columns))
    scale, codes = scale.reshape(rows, columns), blocks.astype(jnp.int32)

    def numbers(codes):
        size = codes & 7
        in_halves = jnp.where(size < 2, size, (2 | size & 1) << jnp.maximum((size >> 1) - 1, 0))
        return jnp.where(codes & 8 > 0, -in_halves, in_halves).astype(jnp.float32) * scale

    return numbers(codes & 15), numbers(codes >> 4)


def dequantize(blocks: jax.Array, exponents: jax.Array, dtype) -> jax.Array:
    """Returns a matrix [in, out] in a dtype."""
    even, odd = halves(blocks, exponents)
    return jnp.stack([even, odd], axis=1).reshape(-1, blocks.shape[1]).astype(dtype)
