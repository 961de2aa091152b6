"""The decode kernel, interpreted as a TPU would run it, against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis.kernels import decode_attention
from jaxrl_tis.kernels.decode_attention import ROWS

LAYERS, SLOTS, HEADS, GROUP, WIDTH, LENGTH = 2, 4, 2, 3, 8, 6 * ROWS
# The first and last position, and both sides of an edge between blocks.
POSITIONS = np.array([0, LENGTH - 1, 2 * ROWS - 1, 2 * ROWS], np.int32)
INTERPRET = pltpu.InterpretParams(detect_races=True)
kernel = jax.jit(lambda *args: decode_attention.decode_attention(*args, interpret=INTERPRET))


def arrays(dtype):
    """q, new rows and the cache, NaN beyond every slot's position."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), dtype)
    cache = normal(LAYERS, SLOTS, HEADS, LENGTH, 2 * WIDTH)
    is_stale_bs = np.arange(LENGTH)[None] > POSITIONS[:, None]
    cache = jnp.where(is_stale_bs[None, :, None, :, None], jnp.nan, cache)
    q, new = normal(SLOTS, HEADS, GROUP, WIDTH), normal(SLOTS, HEADS, 2 * WIDTH)
    return q, new, cache


def reference(q, new, cache, layer):
    """(attention in float64, the cache after the write in its dtype)."""
    cache, out = np.array(cache), np.zeros(q.shape)
    for slot, position in enumerate(POSITIONS):
        cache[layer, slot, :, position] = new[slot]
        seen = cache[layer, slot, :, : position + 1].astype(np.float64)
        for head in range(HEADS):
            key, value = seen[head, :, :WIDTH], seen[head, :, WIDTH:]
            scores = np.asarray(q[slot, head], np.float64) @ key.T / np.sqrt(WIDTH)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[slot, head] = p / p.sum(axis=1, keepdims=True) @ value
    return out, cache


@pytest.mark.parametrize("dtype, atol", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_kernel_equals_float64_and_writes_one_position(monkeypatch, dtype, atol, blocks):
    q, new, cache = arrays(dtype)
    row_bytes = HEADS * 2 * WIDTH * cache.dtype.itemsize
    monkeypatch.setattr(decode_attention, "BLOCK_BYTES", LENGTH // blocks * row_bytes)
    jax.clear_caches()
    out, after = kernel(q, new, cache, jnp.int32(1), POSITIONS)
    expected, expected_cache = reference(q, new, cache, 1)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=atol)
    same = functools.partial(np.testing.assert_array_equal, np.asarray(after, np.float32))
    same(expected_cache.astype(np.float32))
    # Negative controls: the other layer, and half the positions, are another answer.
    for layer, positions in ((0, POSITIONS), (1, POSITIONS // 2)):
        other = kernel(q, new, cache, jnp.int32(layer), positions)[0]
        assert np.abs(np.asarray(other, np.float64) - expected)[1:].max() > 0.1


@pytest.mark.parametrize("row_bytes, length, block", [
    (256, 768, 768),  # 1 KV head of width 64 in bfloat16
    (512, 22_528, 2048),  # 1 head of width 128: 2048 x 512 bytes is a MiB
    (2**14, 1008, 48),  # 64 positions are a MiB; 48 is the largest divisor of 1008 = 16 x 63
    (2**20, 64, ROWS), (16, 16, ROWS),
])
def test_blocks_fit_their_bytes_and_divide_the_length(row_bytes, length, block):
    assert decode_attention._block(row_bytes, length) == block
