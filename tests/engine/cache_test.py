"""The cache: what decode writes and sees, and what an insert leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import cache
from jaxrl_tis.engine.cache import KV
from jaxrl_tis.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    family="llama", vocab_size=20, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=64,
    norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True,
)
RNG = np.random.default_rng(0)
decode = jax.jit(lambda positions_b, *qkv_cache: cache.append(positions_b)(*qkv_cache))
keep_rows = jax.jit(
    lambda ids_bt, *qkv: cache.keep_rows(ids_bt, True, sharding.single_device())(*qkv, None)
)


def normal(*shape):
    return RNG.normal(0, 1, shape).astype(np.float32)


def random_like(tree):
    return jax.tree.map(lambda x: jnp.asarray(normal(*x.shape), x.dtype), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty_has_one_cache_per_layer_or_one_stack(dtype):
    unrolled = cache.empty(CONFIG, slots=4, length=12, dtype=dtype, unrolled=True)
    assert isinstance(unrolled, tuple) and len(unrolled) == 3
    stacked = cache.empty(CONFIG, slots=4, length=12, dtype=dtype, unrolled=False)
    for x in jax.tree.leaves(unrolled):
        assert (x.shape, x.dtype) == ((4, 2, 12, 8), jnp.dtype(dtype)) and not x.any()
    for x in jax.tree.leaves(stacked):
        # 12 positions are padded to a tile of 16; keys and values stand side by side.
        assert (x.shape, x.dtype) == ((3, 4, 2, 16, 16), jnp.dtype(dtype)) and not x.any()


@pytest.mark.parametrize("unrolled", [True, False])
def test_insert_copies_rows_into_slots_and_leaves_the_others(unrolled):
    old = random_like(cache.empty(CONFIG, 4, 32, "bfloat16", unrolled))
    prefix = random_like(cache.empty(CONFIG, 2, 5, "float32", unrolled))
    # Slots 0 and 3 take the same prefix row (a group), slot 2 the other, slot 1 keeps its content.
    new = jax.jit(cache.insert)(old, prefix, jnp.array([1, -1, 0, 1]))
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for n, o, p in zip(*map(jax.tree.leaves, (new, old, prefix))):
        assert n.dtype == jnp.bfloat16
        n, o, p = (np.asarray(x.astype(jnp.bfloat16), np.float32) for x in (n, o, p))
        for slot, row in {0: 1, 2: 0, 3: 1}.items():
            length = p.shape[-2]
            np.testing.assert_array_equal(n[..., slot, :, :length, :], p[..., row, :, :, :])
            assert not n[..., slot, :, length:, :].any()
        np.testing.assert_array_equal(n[..., 1, :, :, :], o[..., 1, :, :, :])


def test_append_writes_one_position_per_slot_and_returns_a_new_cache():
    old = KV(normal(3, 2, 6, 8), normal(3, 2, 6, 8))
    before = jax.tree.map(np.array, old)
    q, k, v = normal(3, 1, 4, 8), normal(3, 1, 2, 8), normal(3, 1, 2, 8)
    positions = np.array([0, 5, 2])
    out, new = decode(positions, q, k, v, old)
    assert out.shape == (3, 1, 4, 8)
    for name, fresh in (("k", k), ("v", v)):
        expected = np.array(getattr(before, name))
        for slot, position in enumerate(positions):
            expected[slot, :, position] = fresh[slot, 0]
        np.testing.assert_array_equal(getattr(new, name), expected)
        np.testing.assert_array_equal(getattr(old, name), getattr(before, name))


def test_decode_token_by_token_equals_attention_within_the_row():
    t, b = 6, 2
    q, k, v = normal(b, t, 4, 8), normal(b, t, 2, 8), normal(b, t, 2, 8)
    expected, kept = keep_rows(np.ones((b, t), int), q, k, v)
    np.testing.assert_array_equal(kept.k, np.swapaxes(k, 1, 2))
    np.testing.assert_array_equal(kept.v, np.swapaxes(v, 1, 2))
    # The second slot starts two tokens later, on top of what a former request has left.
    kv = KV(normal(b, 2, 9, 8), normal(b, 2, 9, 8))
    lags = np.array([0, 2])
    for step in range(t + 2):
        position = np.clip(step - lags, 0, t - 1)
        now = lambda x: x[np.arange(b), position][:, None]
        out, kv = decode(position, now(q), now(k), now(v), kv)
        for slot in range(b):
            want = expected[slot, position[slot]]
            np.testing.assert_allclose(out[slot, 0], want, rtol=1e-5, atol=1e-6)


def test_keep_rows_ignores_padding():
    q, k, v = normal(1, 5, 4, 8), normal(1, 5, 2, 8), normal(1, 5, 2, 8)
    segment_ids = np.array([[1, 1, 1, 0, 0]])
    out, _ = keep_rows(segment_ids, q, k, v)
    for x in (q, k, v):
        x[:, 3:] = 1e4
    changed, _ = keep_rows(segment_ids, q, k, v)
    np.testing.assert_array_equal(out[:, :3], changed[:, :3])
    assert np.isfinite(out).all()
