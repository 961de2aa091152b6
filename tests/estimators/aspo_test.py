"""ASPO by hand; its published coefficients and what holds for every loss are tested with
`detached`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import aspo
from tests import jitted


@functools.partial(jax.jit, static_argnames=("dual_clip", "form"))
def run(log_ratio, adv, entropy, dual_clip=3.0, **parameters):
    """(loss, metrics, gradient of the sum) of one sequence, logp_old = -3 everywhere."""
    log_ratio, entropy = jnp.array([log_ratio]), jnp.array([entropy])
    old, mask = jnp.full(log_ratio.shape, -3.0), jnp.ones(log_ratio.shape)

    def total(logp):
        loss_bt, metrics = aspo.aspo(
            logp, old, adv * mask, mask, entropy=entropy, dual_clip=dual_clip, **parameters
        )
        return jnp.sum(loss_bt), (loss_bt, metrics)

    gradient, (loss_bt, metrics) = jax.grad(total, has_aux=True)(log_ratio - 3.0)
    return loss_bt, metrics, gradient


def test_values_and_soft_bound():
    # A = 1: r = e^-0.3 gives 1/r = e^0.3; r = e^-1.5 is held at 3, l = -3 log pi = -3 (-4.5).
    loss_bt, metrics, _ = run([-0.3, -1.5], 1.0, [1.0, 1.0])
    np.testing.assert_allclose(loss_bt, [[-np.exp(0.3), 13.5]], rtol=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0 and metrics["actor/pg_clipfrac_lower"] == 0.5
    # A = -1: r = e^1.5 is held, l = 3 log pi = 3 (-1.5); r = e^-0.3 = 0.74 stays at 0.8.
    loss_bt, metrics, gradient = run([1.5, -0.3], -1.0, [1.0, 1.0])
    np.testing.assert_allclose(loss_bt, [[-4.5, 0.8]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[3.0, 0.0]], rtol=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.5 and metrics["actor/pg_clipfrac_lower"] == 0.5


def test_uncertain_tokens_have_a_wider_band():
    # r = 1.3 is outside 1.2 and inside 1.4. Of the entropies 1..5 the 0.8 quantile is 4.2.
    entropy, high, low = [3.0, 5.0, 1.0, 4.0, 2.0], [np.log(1.3)] * 5, [np.log(0.7)] * 5
    _, _, gradient = run(high, 1.0, entropy)
    np.testing.assert_allclose(gradient, [[0, -1 / 1.3, 0, 0, 0]], rtol=1e-5)
    # r = 0.7 is below 0.8 and above 0.6. The 0.5 quantile is 3, which is not above itself.
    _, _, gradient = run(low, -1.0, entropy, aspo_quantile=0.5)
    np.testing.assert_allclose(gradient, [[0, 0.7, 0, 0.7, 0]], rtol=1e-5)
    _, _, gradient = run(low, -1.0, entropy, aspo_wide=0.2)
    np.testing.assert_array_equal(gradient, np.zeros((1, 5)))
    _, _, gradient = run(high, 1.0, entropy, clip_high=0.3001)
    np.testing.assert_allclose(gradient, np.full((1, 5), -1 / 1.3), rtol=1e-5)


def test_the_survey_does_not_bound_good_tokens():
    # A = 1: r = e, e^0.1 and e^-1.5 with weights 1 / r, the last held at 3; A = -1 as in the paper.
    log_ratio, entropy = [1.0, 0.1, -1.5], [1.0, 3.0, 2.0]
    loss_bt, metrics, gradient = run(log_ratio, 1.0, entropy, form="survey")
    held = -3 * (-3.0 - 1.5)
    np.testing.assert_allclose(loss_bt, [[-np.exp(-1.0), -np.exp(-0.1), held]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-np.exp(-1.0), -np.exp(-0.1), -3.0]], rtol=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0
    np.testing.assert_allclose(run(log_ratio, 1.0, entropy)[2][0, 0], 0.0)
    bad, same = (run(log_ratio, -1.0, entropy, form=form) for form in ("survey", "paper"))
    jax.tree.map(np.testing.assert_array_equal, bad, same)
    with pytest.raises(ValueError, match="Unknown form 'code'; choose paper or survey"):
        run([0.0], 1.0, [1.0], form="code")


def test_the_quantile_is_that_of_numpy():
    rng = np.random.default_rng(0)
    seg = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3, 3]])
    mask = (seg > 0) & (rng.random(seg.shape) < 0.8)
    entropy = np.where(mask, rng.exponential(size=seg.shape), np.nan).astype(np.float32)
    quantile = jitted.function(aspo.entropy_quantile)
    packed, dense = (quantile(entropy, mask, ids, 0.8) for ids in (seg, None))
    for row in range(2):
        for number in range(1, 4):
            of_sequence = mask[row] & (seg[row] == number)
            if np.any(of_sequence):
                expected = np.quantile(entropy[row, of_sequence], 0.8)
                np.testing.assert_allclose(packed[row, of_sequence], expected, rtol=1e-5)
        expected = np.quantile(entropy[row, mask[row]], 0.8)
        np.testing.assert_allclose(dense[row, mask[row]], expected, rtol=1e-5)


def test_bound_must_exceed_one():
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        run([0.0], 1.0, [1.0], dual_clip=1.0)
