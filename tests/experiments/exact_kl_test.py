"""KL estimators against the exact gradients of the KL per prefix and of whole responses."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages, kl, reduce
from experiments import exact

EXACT = {"rtol": 1e-9, "atol": 1e-12}
POLICY = exact.random_logits(3, 3, np.random.default_rng(0))
NOISY = exact.with_engine_noise(POLICY, 0.5, np.random.default_rng(1))
REFERENCE = exact.random_logits(3, 3, np.random.default_rng(2))


def problem_of(behaviour):
    """The reward has no part in a KL term."""
    return exact.Problem(POLICY, behaviour, len, 3, ref=REFERENCE)


def divergences():
    """(pi, q, KL(pi || q) [P]) of the policy and the reference at each prefix."""
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (POLICY, REFERENCE))
    return p, q, np.sum(p * np.log(p / q), axis=1)


def mean_kl(name, **fields):
    """Sum over the tokens of an entry of KL; `fields` maps its arguments to those of the batch."""

    def loss_fn(logp, batch):
        arguments = {argument: batch[field] for argument, field in fields.items()}
        kl_bt = kl.KL[name](logp, batch["logp_ref"], **arguments)
        return reduce.aggregate(kl_bt, batch["mask"], "seq-mean-token-sum")

    return loss_fn


def state_kl(forward=False):
    """Gradient [P, V] of the KL at each prefix, to or from the reference."""
    p, q, kl_p = divergences()
    return p - q if forward else p * (np.log(p / q) - kl_p[:, None])


# Behaviour, arguments, and whether the gradient is that of the forward KL.
KL_CASES = {
    "k2": (POLICY, {}, False),
    "k1+": (POLICY, {}, False),
    "k3+": (POLICY, {}, False),
    "abs+": (POLICY, {}, False),
    "k3": (POLICY, {}, True),
    "is_k3": (NOISY, {"logp_old": "logp_behav"}, False),
    "exact_reverse": (NOISY, {"logits": "logits", "logits_ref": "logits_ref"}, False),
    "exact_forward": (NOISY, {"logits": "logits", "logits_ref": "logits_ref"}, True),
}


@functools.cache
def expected_step(name):
    behaviour, fields, _ = KL_CASES[name]
    return problem_of(behaviour).expectation(mean_kl(name, **fields))


@pytest.mark.all
@pytest.mark.parametrize("name", KL_CASES)
def test_kl_losses_have_the_gradient_of_the_states_with_prefixes_held_fixed(name):
    behaviour, _, is_forward = KL_CASES[name]
    expected = problem_of(behaviour).visits(behaviour)[:, None] * state_kl(is_forward)
    np.testing.assert_allclose(-expected_step(name), expected, **EXACT)


def test_k1_as_a_loss_teaches_nothing():
    problem = problem_of(POLICY)
    np.testing.assert_allclose(problem.expectation(mean_kl("k1")), 0.0, atol=1e-12)


@pytest.mark.all
@pytest.mark.parametrize("name", ["k1", "k1+", "k3", "k3+", "is_k3"])
def test_kl_values_are_unbiased(name):
    behaviour, fields = (NOISY, {"logp_old": "logp_behav"}) if name == "is_k3" else (POLICY, {})
    problem = problem_of(behaviour)
    expected = problem.visits(behaviour) @ divergences()[2]
    np.testing.assert_allclose(problem.average(mean_kl(name, **fields)), expected, **EXACT)


@functools.cache
def gradient_of_sequence_kl():
    """Gradient [P, V] of the KL of whole responses between policy and reference."""
    problem = problem_of(POLICY)
    log_ref = problem.pick(REFERENCE).sum(axis=1)
    return problem.differentiate(
        lambda logp: jnp.sum(jnp.exp(logp.sum(axis=1)) * (logp.sum(axis=1) - log_ref))
    )


def prefix_term(problem):
    """Gradient of a reward which is the KL of all prefixes after a token, [P, V].

    A token also decides how much KL lies ahead; this is the policy gradient theorem for it.
    """
    p, _, kl_p = divergences()
    ahead, value = np.zeros(POLICY.shape), np.zeros(len(POLICY))
    for row in reversed(range(len(POLICY))):
        if 3 * row + 1 < len(POLICY):
            ahead[row] = value[3 * row + 1 : 3 * row + 4]
        value[row] = kl_p[row] + p[row] @ ahead[row]
    excess = ahead - (p * ahead).sum(axis=1, keepdims=True)
    return problem.visits(POLICY)[:, None] * p * excess


@pytest.mark.parametrize("name", [name for name in KL_CASES if not KL_CASES[name][2]])
def test_the_sequence_kl_has_the_prefix_term_as_well(name):
    behaviour = KL_CASES[name][0]
    problem = problem_of(behaviour)
    term = prefix_term(problem)
    # Off-policy, the prefixes that are held fixed are also visited by another policy.
    shift = (problem.visits(POLICY) - problem.visits(behaviour))[:, None] * state_kl()
    assert (np.linalg.norm(shift) > 0.01) == (behaviour is NOISY)
    whole = gradient_of_sequence_kl()
    np.testing.assert_allclose(whole + expected_step(name), term + shift, **EXACT)
    assert np.linalg.norm(term) > 0.05 * np.linalg.norm(whole)


def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl():
    problem = problem_of(POLICY)

    def loss_fn(logp, batch):
        k1 = kl.k1(batch["logp_old"], batch["logp_ref"])
        rewards = kl.penalized_rewards(jnp.zeros(1), batch["mask"], k1, 1.0)
        adv = advantages.ADVANTAGES["remax"](
            rewards, batch["mask"], batch["group"], greedy_rewards=jnp.zeros(1)
        )
        return reduce.aggregate(-adv * logp, batch["mask"], "seq-mean-token-sum")

    np.testing.assert_allclose(
        -problem.expectation(loss_fn), gradient_of_sequence_kl(), **EXACT
    )
