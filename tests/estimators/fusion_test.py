"""The losses of logit fusion and their ratio; their gradients are tested with `detached`."""

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import fusion
from tests import jitted

fusion = jitted.Module(fusion)


def test_losses_use_the_mixture_and_not_the_old_policy():
    # r = e^(-2.5 + 3.5) = e = 2.718 < 3; shaped e / (e + 0.1), slope 0.1 e / (e + 0.1)^2.
    logp, adv, mask = np.array([[-2.5]]), np.array([[2.0]]), np.array([[1]])
    logp_old, logp_behav = np.array([[np.nan]]), np.array([[-3.5]])

    def value_and_slope(loss, **parameters):
        def total(logp):
            loss_bt, metrics = loss(
                logp, logp_old, adv, mask, logp_behav=logp_behav, **parameters
            )
            return jnp.sum(loss_bt), metrics

        (value, metrics), slope = jitted.value_and_grad(total, has_aux=True)(logp)
        np.testing.assert_allclose(metrics["actor/ppo_kl"], -1.0, rtol=1e-6)
        return value, slope[0, 0], metrics["actor/pg_clipfrac"]

    actual = value_and_slope(fusion.fusion_cap)
    np.testing.assert_allclose(actual, [-2 * np.e, -2 * np.e, 0.0], rtol=1e-5)
    actual = value_and_slope(fusion.fusion_cap, cap=2.0)
    np.testing.assert_allclose(actual, [-4.0, 0.0, 1.0], rtol=1e-5)
    shape = np.e / (np.e + 0.1)
    actual = value_and_slope(fusion.fusion_shaped)
    np.testing.assert_allclose(actual, [-2 * shape, -0.2 * shape / (np.e + 0.1), 0.0], rtol=1e-5)
