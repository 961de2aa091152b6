"""Grouped-query attention against float64 numpy, and its isolation from what is masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.models import attention

RNG = np.random.default_rng(0)
# Tests of values and gradients need no fast programs, and compiling dominates here.
QUICK = {"xla_backend_optimization_level": 0}
attend = jax.jit(attention.attention, compiler_options=QUICK)


def arrays(b, t, s, h, n, k):
    normal = lambda *shape: RNG.normal(0, 1, shape).astype(np.float32)
    return normal(b, t, h, k), normal(b, s, n, k), normal(b, s, n, k)


def reference(q, k, v, mask_bts):
    """Loop over batch, heads and queries; query head i reads key/value head i // (H / N)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask_bts[b, t])
        scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
        p = np.exp(scores - scores.max())
        out[b, t, h] = p / p.sum() @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("h, n", [(4, 4), (6, 2), (4, 1)])
def test_grouped_queries_equal_numpy(h, n):
    q, k, v = arrays(2, 5, 7, h, n, 8)
    mask = RNG.random((2, 5, 7)) < 0.5
    mask[..., 0] = True
    out = attend(q, k, v, mask)
    assert out.shape == q.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_row_mask_by_hand():
    # Two segments and padding: causal within the segment, never across.
    mask = np.asarray(attention.row_mask(jnp.array([[1, 1, 2, 2, 0]])))[0]
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(mask[:4, :4], expected)
    assert not mask[:4, 4].any() and not mask[4, :4].any()


def test_segments_are_isolated_bit_by_bit():
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    mask = attention.row_mask(segment_ids)
    q, k, v = arrays(2, 8, 8, 4, 2, 8)
    before = np.asarray(attend(q, k, v, mask))
    for changed in ([0, 1, 2], [3, 4, 5], [6, 7]):
        q2, k2, v2 = (x.copy() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[0, changed] = 1e4 * RNG.normal(size=x[0, changed].shape)
        after = np.asarray(attend(q2, k2, v2, mask))
        others = [t for t in range(8) if t not in changed]
        np.testing.assert_array_equal(after[0, others], before[0, others])
        np.testing.assert_array_equal(after[1], before[1])
        assert np.abs(after[0, changed] - before[0, changed]).max() > 1


def test_the_future_changes_nothing():
    mask = attention.row_mask(jnp.ones((1, 6), int))
    q, k, v = arrays(1, 6, 6, 2, 2, 4)
    before = np.asarray(attend(q, k, v, mask))
    k[0, 4:], v[0, 4:] = -50.0, 1e6
    np.testing.assert_array_equal(np.asarray(attend(q, k, v, mask))[0, :4], before[0, :4])


def test_rows_that_may_attend_to_nothing_are_finite_in_value_and_gradient():
    q, k, v = arrays(1, 3, 4, 2, 2, 4)
    mask = np.zeros((1, 3, 4), bool)
    mask[0, 1, :2] = True
    total = lambda q, k, v: jnp.sum(attention.attention(q, k, v, mask)[0, 1])
    assert np.isfinite(attend(q, k, v, mask)).all()
    for gradient in jax.jit(jax.grad(total, (0, 1, 2)), compiler_options=QUICK)(q, k, v):
        assert np.isfinite(gradient).all()
    padding = attention.row_mask(jnp.zeros((1, 3), int))
    assert np.isfinite(attend(q, k[:, :3], v[:, :3], padding)).all()


def test_bfloat16_inputs_are_reduced_in_float32():
    # Equal scores over 512 values of one: each probability is 2^-9 and a bfloat16 sum of them
    # would stall at 0.5 = 256 * 2^-9.
    q = jnp.zeros((1, 1, 2, 8), jnp.bfloat16)
    k, v = jnp.ones((1, 512, 1, 8), jnp.bfloat16), jnp.ones((1, 512, 1, 8), jnp.bfloat16)
    out = attend(q, k, v, np.ones((1, 1, 512), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones((1, 1, 2, 8)))
