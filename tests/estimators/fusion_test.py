"""The fused behaviour policy and its schedule; the losses are tested with `detached`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import fusion
from tests import jitted

fusion = jitted.Module(fusion)


def test_fused_policy_is_the_geometric_mixture():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 3, 5)).astype(np.float32)
    p_student, p_teacher = (jax.nn.softmax(x) for x in (student, teacher))
    mixed = p_teacher**0.3 * p_student**0.7
    actual = np.exp(fusion.fused_log_probs(student, teacher, 0.3))
    np.testing.assert_allclose(actual, mixed / mixed.sum(-1, keepdims=True), rtol=1e-5)
    for alpha, alone in ((0.0, p_student), (1.0, p_teacher)):
        actual = np.exp(fusion.fused_log_probs(student, teacher, alpha))
        np.testing.assert_allclose(actual, alone, rtol=1e-5)


def test_a_larger_teacher_vocabulary_is_cut():
    student, teacher = np.array([0.0, 0.0]), np.array([0.0, np.log(4.0), 50.0])
    # alpha = 0.5 halves the teacher's log 4: odds 1 to 2.
    np.testing.assert_allclose(
        jnp.exp(fusion.fused_log_probs(student, teacher, 0.5)), [1 / 3, 2 / 3], rtol=1e-6
    )


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
