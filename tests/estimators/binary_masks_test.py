"""The binary KL of drawn tokens: by hand, against the KL of whole distributions, at the ends, and
the masks that it makes. `masks_test` has the loops over tokens and packed rows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import binary_masks
from tests import jitted

binary_masks = jitted.Module(binary_masks)

# The probabilities of six tokens at the sampler and at the learner, in two rows.
SAMPLER = np.array([[0.5, 0.9, 0.001], [0.5, 0.25, 1.0]])
LEARNER = np.array([[0.4, 0.8, 0.01], [0.5, 0.25, 1.0]])
# 0.5 log(1.25) + 0.5 log(0.5 / 0.6) = 0.111572 - 0.091161; 0.9 log(1.125) + 0.1 log(0.5) = 0.106005
# - 0.069315; 0.001 log(0.1) + 0.999 log(0.999 / 0.99) = -0.002303 + 0.009041.
EXPECTED = [[0.020411, 0.036690, 0.006738], [0.0, 0.0, 0.0]]
MASK = np.array([[1, 1, 1], [1, 1, 0]])


def given(sampler, learner):
    sampler, learner = np.log(sampler), np.log(learner)
    return np.array(learner - sampler, np.float32), np.array(sampler, np.float32)


def test_by_hand():
    log_ratio, behav = given(SAMPLER, LEARNER)
    kl = binary_masks.binary_kl(log_ratio, behav, MASK)
    np.testing.assert_allclose(kl, EXPECTED, atol=1e-6)
    # A ratio of 10 of a rare token is a third of one of 0.8 at one half.
    kept = binary_masks.token_binary_kl(log_ratio, MASK, logp_behav=behav, upper=0.02)
    assert kept.tolist() == [[False, False, True], [True, True, False]]


def test_kpop_looks_both_ways():
    # With p and q exchanged: 0.4 log(0.8) + 0.6 log(1.2) = 0.020136; 0.8 log(0.8 / 0.9) + 0.2 log(2)
    # = 0.044403; 0.01 log(10) + 0.99 log(0.99 / 0.999) = 0.014066. The largest of each pair counts.
    log_ratio, behav = given(SAMPLER, LEARNER)
    reverse = binary_masks.binary_kl(log_ratio, behav, MASK, is_reverse=True)
    np.testing.assert_allclose(reverse, [[0.020136, 0.044403, 0.014066], [0, 0, 0]], atol=1e-6)
    kept = lambda upper: binary_masks.token_kpop(log_ratio, MASK, logp_behav=behav, upper=upper)[0]
    assert kept(0.0203).tolist() == [False, False, True]
    assert kept(0.0205).tolist() == [True, False, True]
    assert kept(0.0443).tolist() == [True, False, True]
    assert kept(0.0445).tolist() == [True, True, True] and kept(0.0140).tolist() == [False] * 3


def test_kpop_has_the_papers_bound():
    # p = 0.5, q = 0.5 + x: -0.5 log(1 - 4 x^2) is 0.1 at x = 0.2129, where the reverse is 0.0937.
    behav = np.log(np.array([[0.5]]))
    for learner, is_kept in ((0.7127, True), (0.7131, False), (0.2873, True), (0.2869, False)):
        log_ratio = np.log(np.array([[learner]])) - behav
        kept = binary_masks.token_kpop(log_ratio, np.ones((1, 1)), logp_behav=behav)
        assert bool(kept[0, 0]) == is_kept


def test_a_sequence_is_kept_by_its_mean():
    # (0.020411 + 0.036690 + 0.006738) / 3 = 0.021280; of the first two tokens 0.028551.
    log_ratio, behav = given(SAMPLER, LEARNER)
    kept = lambda upper, mask=MASK: binary_masks.seq_mean_binary_kl(
        log_ratio, mask, logp_behav=behav, upper=upper
    ).tolist()
    assert kept(0.0213) == [[True] * 3, [True, True, False]]
    assert kept(0.0212) == [[False] * 3, [True, True, False]]
    two = np.array([[1, 1, 0], [0, 0, 0]])
    assert kept(0.0286, two)[0] == [True, True, False]
    assert kept(0.0285, two) == [[False] * 3] * 2


def test_the_authors_bound_is_the_default():
    # p = 0.5, q = 0.5 + x: -0.5 log(1 - 4 x^2), which is 0.003 at x = 0.038672.
    behav = np.log(np.array([[0.5]]))
    for learner, is_kept in ((0.5386, True), (0.5388, False), (0.4614, True), (0.4612, False)):
        log_ratio = np.log(np.array([[learner]])) - behav
        kept = binary_masks.seq_mean_binary_kl(log_ratio, np.ones((1, 1)), logp_behav=behav)
        assert bool(kept[0, 0]) == is_kept


def test_it_is_at_most_the_kl_of_whole_distributions():
    rng = np.random.default_rng(0)
    for vocabulary in (2, 3, 50):
        mu, pi = (np.exp(rng.normal(scale=1.5, size=(200, vocabulary))) for _ in range(2))
        mu, pi = mu / mu.sum(1, keepdims=True), pi / pi.sum(1, keepdims=True)
        whole = (mu * np.log(mu / pi)).sum(1)
        drawn = rng.integers(vocabulary, size=200)
        rows = np.arange(200)
        log_ratio, behav = given(mu[rows, drawn][:, None], pi[rows, drawn][:, None])
        kl = np.asarray(binary_masks.binary_kl(log_ratio, behav, np.ones((200, 1))))[:, 0]
        assert np.all(kl <= whole + 1e-5)
        if vocabulary == 2:  # nothing is merged
            np.testing.assert_allclose(kl, whole, rtol=1e-4, atol=1e-6)
        else:
            assert np.mean(kl < 0.9 * whole) > 0.5


def test_equal_policies_pass_every_bound():
    logp = np.array([[0.0, -1e-9, -1e-3, -1.0, -20.0, -90.0]])
    mask = np.ones(logp.shape)
    for entry in binary_masks.MASKS.values():
        assert np.all(entry(np.zeros_like(logp), mask, logp_behav=logp, upper=0.0))
    # Policies that are nearly equal: the difference of two roundings, which may be negative.
    logp = jnp.linspace(-5.0, -0.01, 500)[None, :]
    near = binary_masks.binary_kl(np.full(logp.shape, 1e-5), logp, np.ones(logp.shape))
    assert np.all(near >= 0.0) and np.any(near == 0.0) and np.all(near < 1e-6)


def test_the_ends_are_finite_and_far():
    # A token that one side is certain of and the other excludes: log(1e6) at the margins.
    kl = binary_masks.binary_kl(
        np.array([[-50.0, 50.0]]), np.array([[0.0, -50.0]]), np.ones((1, 2))
    )
    np.testing.assert_allclose(kl, [[math.log(1e6)] * 2], rtol=1e-4)


@pytest.mark.parametrize("name", binary_masks.MASKS)
def test_the_sampler_has_no_gradient_and_padding_is_not_read(name):
    log_ratio, behav = given(SAMPLER, LEARNER)
    poisoned = [jnp.where(MASK == 1, x, np.nan) for x in (log_ratio, behav)]
    entry = binary_masks.MASKS[name]
    kept = entry(poisoned[0], MASK, logp_behav=poisoned[1], upper=0.0213)
    assert kept.tolist() == entry(log_ratio, MASK, logp_behav=behav, upper=0.0213).tolist()
    total = lambda *x: jnp.sum(binary_masks.binary_kl(*x, MASK))
    for gradient in jitted.grad(total, argnums=(0, 1))(*poisoned):
        np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
