"""Clipped surrogates: published coefficients, verl's numbers, ties and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import objectives
from jaxrl_tis.estimators import reduce

# Coefficient on the gradient of log pi at (log-ratio, advantage), clip 0.2 and dual clip 3: the
# ratio times A inside the band, 0 where the pessimistic branch is flat.
POINTS = [
    (0.0, 1),
    (0.0, -1),
    (0.3, 1),
    (0.3, -1),
    (-0.3, 1),
    (-0.3, -1),
    (1.5, 1),
    (1.5, -1),
    (-1.5, 1),
    (-1.5, -1),
]
COEFFICIENTS = {
    "ppo": [1, -1, 0, -1.350, 0.741, 0, 0, -4.482, 0.223, 0],
    "dual_clip": [1, -1, 0, -1.350, 0.741, 0, 0, 0, 0.223, 0],
}


def gradient_of(name, logp, logp_old, adv, mask, **parameters):
    def total(logp):
        return jnp.sum(objectives.OBJECTIVES[name](logp, logp_old, adv, mask, **parameters)[0])

    return jax.grad(total)(logp)


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_gradient_coefficients(name):
    log_ratio, adv = (jnp.array([column]) for column in zip(*POINTS, strict=True))
    logp_old = jnp.full(log_ratio.shape, np.log(0.2))
    gradient = gradient_of(
        name, logp_old + log_ratio, logp_old, adv.astype(float), jnp.ones(adv.shape)
    )
    np.testing.assert_allclose(-gradient, [COEFFICIENTS[name]], atol=6e-4)


def test_values_of_the_dual_clip():
    # r = e^1.5 = 4.48: A = -1 costs 4.48 in PPO and 3 with the bound; A = +1 is clipped at 1.2.
    logp, old, mask = jnp.full((1, 2), 1.5), jnp.zeros((1, 2)), jnp.ones((1, 2))
    adv = jnp.array([[-1.0, 1.0]])
    loss, metrics = objectives.OBJECTIVES["dual_clip"](logp, old, adv, mask)
    np.testing.assert_allclose(loss, [[3.0, -1.2]], rtol=1e-6)
    assert metrics["actor/pg_clipfrac_lower"] == 0.5
    assert metrics["actor/pg_clipfrac"] == 0.5
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -1.5, rtol=1e-6)
    loss, _ = objectives.OBJECTIVES["ppo"](logp, old, adv, mask)
    np.testing.assert_allclose(loss, [[np.exp(1.5), -1.2]], rtol=1e-6)
    loose, _ = objectives.OBJECTIVES["dual_clip"](logp, old, adv, mask, dual_clip=1e6)
    np.testing.assert_array_equal(loose, loss)


def test_verl_example_of_vanilla_ppo():
    old = jnp.array([[-1.0] * 3, [-2.0] * 3])
    logp = jnp.array([[-0.5, -1, -3], [-2, -1, -25]])
    adv = jnp.array([[1.0] * 3, [-1.0] * 3])
    mask = jnp.array([[1, 1, 1], [1, 1, 0]])

    def loss(logp):
        loss_bt, _ = objectives.OBJECTIVES["dual_clip"](logp, old, adv, mask)
        return reduce.aggregate(loss_bt, mask, "token-mean")

    value, gradient = jax.value_and_grad(loss)(logp)
    np.testing.assert_allclose(value, 0.27659, atol=1e-5)
    np.testing.assert_allclose(gradient, [[0, -0.2, -0.02707], [0.2, 0.54366, 0]], atol=1e-5)


def test_upper_and_lower_clip_are_separate():
    # A > 0, r = 1.25: inside 1.28, outside 1.2. A < 0, r = 0.75: inside 0.7, outside 0.8.
    logp, old = jnp.log(jnp.array([[1.25, 0.75]])), jnp.zeros((1, 2))
    adv, mask = jnp.array([[1.0, -1.0]]), jnp.ones((1, 2))
    for name in objectives.OBJECTIVES:
        wide_up = gradient_of(name, logp, old, adv, mask, clip_low=0.2, clip_high=0.28)
        np.testing.assert_allclose(wide_up, [[-1.25, 0.0]], rtol=1e-6)
        wide_down = gradient_of(name, logp, old, adv, mask, clip_low=0.3, clip_high=0.2)
        np.testing.assert_allclose(wide_down, [[0.0, 0.75]], rtol=1e-6)


def test_a_ratio_on_the_edge_of_the_band_keeps_its_gradient():
    old, adv, mask = jnp.zeros((1, 2)), jnp.array([[2.0, -2.0]]), jnp.ones((1, 2))
    for name in objectives.OBJECTIVES:  # r = 1 and a band of width 0
        gradient = gradient_of(name, old, old, adv, mask, clip_low=0.0, clip_high=0.0)
        np.testing.assert_array_equal(gradient, -adv)


def test_log_ratios_beyond_the_bound_are_finite_and_flat():
    old, mask = jnp.zeros((1, 4)), jnp.ones((1, 4))
    logp, adv = jnp.array([[20.0, 21.0, 500.0, -500.0]]), jnp.full((1, 4), -1.0)
    loss, _ = objectives.OBJECTIVES["ppo"](logp, old, adv, mask)
    np.testing.assert_allclose(loss, [[np.exp(20.0)] * 3 + [0.8]], rtol=1e-5)
    gradient = gradient_of("ppo", logp, old, adv, mask)
    np.testing.assert_allclose(
        gradient, [[np.exp(20.0), 0, 0, 0]], rtol=1e-5
    )  # the bound itself still passes


def test_dual_clip_must_exceed_one():
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        objectives.OBJECTIVES["dual_clip"](x, x, x, x, dual_clip=1.0)


def test_value_loss_by_hand():
    # (V, V_old, G), clip 0.5:
    #   (1, 0.8, 2): inside the band, (1 - 2)^2 / 2 = 0.5, gradient V - G = -1.
    #   (2, 0, 3): clipped to 0.5, max(1, 6.25) / 2 = 3.125, clipped branch, gradient 0.
    #   (2, 0, 0): clipped to 0.5, max(4, 0.25) / 2 = 2, gradient 2.
    #   (5, 0, 9) is padding.
    values, old = jnp.array([[1.0, 2.0, 2.0, 5.0]]), jnp.array([[0.8, 0.0, 0.0, 0.0]])
    returns, mask = jnp.array([[2.0, 3.0, 0.0, 9.0]]), jnp.array([[1, 1, 1, 0]])
    loss, metrics = objectives.value_loss(values, old, returns, mask, clip=0.5)
    np.testing.assert_allclose(loss, [[0.5, 3.125, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/vf_clipfrac"], 1 / 3, rtol=1e-6)

    def total(values, old, returns):
        return jnp.sum(objectives.value_loss(values, old, returns, mask, clip=0.5)[0])

    gradients = jax.grad(total, (0, 1, 2))(values, old, returns)
    np.testing.assert_allclose(gradients[0], [[-1.0, 0.0, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(gradients[1], np.zeros((1, 4)))
    np.testing.assert_array_equal(gradients[2], np.zeros((1, 4)))


def test_value_loss_with_nan_at_padding():
    nan = jnp.array([[1.0, float("nan")]])
    mask = jnp.array([[1, 0]])
    loss, gradient = jax.value_and_grad(
        lambda v: jnp.sum(objectives.value_loss(v, nan, nan + 1.0, mask)[0])
    )(nan)
    assert loss == 0.5
    np.testing.assert_array_equal(gradient, [[-1.0, 0.0]])
