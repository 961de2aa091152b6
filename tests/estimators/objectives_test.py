"""The table of all objectives, and the critic's loss by hand."""

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import objectives
from tests import jitted

objectives = jitted.Module(objectives)


def test_no_family_hides_a_name_of_another():
    names = [name for family in objectives.FAMILIES for name in family.OBJECTIVES]
    assert len(names) == len(set(names)) == len(objectives.OBJECTIVES)


def test_value_loss_by_hand():
    # (V, V_old, G), clip 0.5:
    #   (1, 0.8, 2): inside the band, (1 - 2)^2 / 2 = 0.5, gradient V - G = -1.
    #   (2, 0, 3): clipped to 0.5, max(1, 6.25) / 2 = 3.125, clipped branch, gradient 0.
    #   (2, 0, 0): clipped to 0.5, max(4, 0.25) / 2 = 2, gradient 2.
    #   (5, 0, 9) is padding.
    values, old = np.array([[1.0, 2.0, 2.0, 5.0]]), np.array([[0.8, 0.0, 0.0, 0.0]])
    returns, mask = np.array([[2.0, 3.0, 0.0, 9.0]]), np.array([[1, 1, 1, 0]])
    loss, metrics = objectives.value_loss(values, old, returns, mask, clip=0.5)
    np.testing.assert_allclose(loss, [[0.5, 3.125, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/vf_clipfrac"], 1 / 3, rtol=1e-6)

    def total(values, old, returns):
        return jnp.sum(objectives.value_loss(values, old, returns, mask, clip=0.5)[0])

    gradients = jitted.grad(total, (0, 1, 2))(values, old, returns)
    np.testing.assert_allclose(gradients[0], [[-1.0, 0.0, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(gradients[1], np.zeros((1, 4)))
    np.testing.assert_array_equal(gradients[2], np.zeros((1, 4)))


def test_value_loss_with_nan_at_padding():
    nan = np.array([[1.0, float("nan")]])
    mask = np.array([[1, 0]])
    loss, gradient = jitted.value_and_grad(
        lambda v: jnp.sum(objectives.value_loss(v, nan, nan + 1.0, mask)[0])
    )(nan)
    assert loss == 0.5
    np.testing.assert_array_equal(gradient, [[-1.0, 0.0]])
