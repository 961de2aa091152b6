"""KL estimators: values and gradients by hand, expectations by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import kl


def value_and_gradient(name, logp, logp_ref):
    value = kl.KL[name](logp, logp_ref)
    return value, jax.grad(lambda x: jnp.sum(kl.KL[name](x, logp_ref)))(logp)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        # z = 0.5, 0, -0.5
        ("k1", [0.5, 0, -0.5], [1, 1, 1]),
        ("k2", [0.125, 0, 0.125], [0.5, 0, -0.5]),
        ("k3", [np.exp(-0.5) - 0.5, 0, np.exp(0.5) - 1.5], [1 - np.exp(-0.5), 0, 1 - np.exp(0.5)]),
        ("abs", [0.5, 0, 0.5], [1, 0, -1]),
    ],
)
def test_values_and_gradients(name, value, gradient):
    logp, ref = jnp.array([[-1.0, -1.0, -1.5]]), jnp.array([[-1.5, -1.0, -1.0]])
    actual = value_and_gradient(name, logp, ref)
    np.testing.assert_allclose(actual[0], [value], rtol=1e-5)
    np.testing.assert_allclose(actual[1], [gradient], rtol=1e-5)
    np.testing.assert_array_equal(
        jax.grad(lambda r: jnp.sum(kl.KL[name](logp, r)))(ref), np.zeros((1, 3))
    )


def test_k3_is_bounded_by_ten_and_flat_beyond():
    # exp(2.6) - 3.6 = 9.86 passes, exp(2.7) - 3.7 = 11.2 and exp(30) are cut, and so is z = 30 with
    # 20 - 1 + exp(-20).
    z = jnp.array([[-2.6, -2.7, -30.0, 30.0]])
    value, gradient = value_and_gradient("k3", z, jnp.zeros((1, 4)))
    np.testing.assert_allclose(value, [[np.exp(2.6) - 3.6, 10, 10, 10]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[1 - np.exp(2.6), 0, 0, 0]], rtol=1e-5)


def test_k3_of_a_small_difference_keeps_its_digits():
    value = kl.KL["k3"](jnp.array([[1e-3]]), jnp.zeros((1, 1)))
    np.testing.assert_allclose(value, [[0.5e-6]], rtol=1e-3)  # z^2 / 2


def test_expectations_on_policy():
    logits, ref_logits = jnp.array([0.3, -0.7, 1.1]), jnp.array([-0.2, 0.5, 0.4])

    def exact(logits, ref_logits):
        logp, logp_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
        return jnp.sum(jnp.exp(logp) * (logp - logp_ref))

    def estimate(name, logits):
        """Samples of the current policy: their probabilities carry no gradient."""
        logp, logp_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
        kl_t = kl.KL[name](logp[None, :], logp_ref[None, :])[0]
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * kl_t)

    reverse = jax.grad(exact)(logits, ref_logits)
    forward = jax.grad(exact, 1)(ref_logits, logits)
    for name in ("k1", "k3"):
        np.testing.assert_allclose(estimate(name, logits), exact(logits, ref_logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(estimate, 1)("k1", logits), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(jax.grad(estimate, 1)("k2", logits), reverse, atol=1e-6)
    np.testing.assert_allclose(jax.grad(estimate, 1)("k3", logits), forward, atol=1e-6)
    assert np.abs(reverse - forward).max() > 0.02
