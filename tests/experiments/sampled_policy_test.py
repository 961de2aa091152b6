"""The sampled form of the policy with experts against the enumerated one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import expert_policy, routing_penalty, sampled_policy


def test_a_square_by_hand():
    """(1, 2) and (3, -1): their product is 1. With (0, 0) two of three pairs have 0."""
    found = np.array([[1.0, 2.0], [3.0, -1.0]])
    assert sampled_policy.square(found) == 1.0
    assert sampled_policy.square(np.vstack([found, [0.0, 0.0]])) == pytest.approx(1 / 3)


@pytest.mark.all
def test_log_probs_and_routes_are_those_of_enumeration():
    size = routing_penalty.size_of(8, 4)
    params = jax.tree.map(jnp.float32, expert_policy.random_params(size, 0))
    rows_nt, tokens_nt, _ = size.responses
    logits_pv, ids_lpk = expert_policy.forward(params, size)
    logp_ntv, ids_tlnk = sampled_policy.scored(params, size, jnp.asarray(tokens_nt))
    np.testing.assert_allclose(logp_ntv, jax.nn.log_softmax(logits_pv)[rows_nt], atol=2e-5)
    np.testing.assert_array_equal(np.sort(ids_tlnk), np.sort(np.moveaxis(ids_lpk[:, rows_nt], 2, 0)))


@pytest.mark.all
def test_samples_have_their_log_probs():
    size = routing_penalty.size_of(8, 4)
    params = jax.tree.map(jnp.float32, expert_policy.random_params(size, 0))
    tokens_nt, logp_nt, ids = sampled_policy.sampled(params, size, jax.random.key(0), 512)
    logp_ntv, ids_again = sampled_policy.scored(params, size, tokens_nt)
    np.testing.assert_allclose(logp_nt, sampled_policy.of_tokens(logp_ntv, tokens_nt), atol=1e-5)
    np.testing.assert_array_equal(ids, ids_again)
    share = np.bincount(tokens_nt[:, 0], minlength=3) / 512
    np.testing.assert_allclose(share, np.exp(logp_ntv[0, 0]), atol=0.07)  # three deviations of 512
