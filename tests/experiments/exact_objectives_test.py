"""Every objective at zero mismatch: its expected step is the true gradient, by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, reduce
from jaxrl_tis.estimators.objectives import OBJECTIVES
from experiments import exact

CHOSEN = {
    "quatro": {"quatro_delta": 0.1, "quatro_floor": 0.01},
    "oapl": {"oapl_beta": 0.1},
    "espo": {"vocab_size": 3},
}
# The published step is a multiple of the policy gradient.
FACTORS = {"oapl": 2 * 0.1, "fusion_shaped": 0.1 / 1.1**2}
# ESPO weighs its two groups of tokens alike, whatever their sizes; clip-cov drops tokens at random.
REWEIGHTED = ("espo", "clip_cov")


def reward(response):
    return float(np.sin(response @ 2.0 ** np.arange(len(response)) + len(response)))


def expected_step(problem, name, aggregation):
    extra = {
        "version": jnp.zeros((1, 3), int),
        "current_version": 0,
        "st_ppo_norm": 0.0,
        "weights": None,
        "key": jax.random.key(0),
    }

    def loss_fn(logp, batch):
        fields = {**batch, **extra, "group": jnp.zeros((1, 3), int)}
        needs = {field: fields[field] for field in methods.needs("objective", name)}
        parameters = {**methods.traits("objective", name).example, **CHOSEN.get(name, {})}
        loss_bt, _ = OBJECTIVES[name](
            logp, batch["logp_old"], batch["adv"], batch["mask"], **needs, **parameters
        )
        return reduce.aggregate(loss_bt, batch["mask"], aggregation)

    return problem.expectation(loss_fn)


@pytest.mark.all
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in REWEIGHTED])
def test_on_policy_the_expected_step_is_the_true_gradient(name):
    logits = exact.random_logits(3, 3, np.random.default_rng(0))
    problem = exact.Problem(logits, logits, reward, 3, stop=2, tool=(1,))
    factor = FACTORS.get(name, 1.0)
    is_of_sequence = name in ("oapl", "seq_ppo", "luspo")  # the sequence's loss on each of its tokens
    aggregation = "seq-mean-token-mean" if is_of_sequence else "seq-mean-token-sum"
    step = expected_step(problem, name, aggregation)
    np.testing.assert_allclose(step, factor * problem.true_gradient(), rtol=1e-6, atol=1e-9)


@pytest.mark.all
def test_espo_weighs_tokens_by_the_size_of_their_group():
    logits = exact.random_logits(3, 3, np.random.default_rng(0))
    problem = exact.Problem(logits, logits, reward, 3)
    step, truth = expected_step(problem, "espo", "seq-mean-token-sum"), problem.true_gradient()
    assert np.linalg.norm(step - truth) > 0.05 * np.linalg.norm(truth)
    # One of three tokens has the high entropy: its weight is 3 / (2 * 1), the others' 3 / (2 * 2).
    entropy_p = -np.sum(problem.transition(logits) * np.log(problem.transition(logits)), axis=1)
    data = problem.responses
    expected = np.zeros(logits.shape)
    for n, p in enumerate(problem.probabilities(logits)):
        high = np.argmax(entropy_p[data["row"][n]])
        for t, (row, token) in enumerate(zip(data["row"][n], data["tokens"][n], strict=True)):
            score = np.eye(3)[token] - problem.transition(logits)[row]
            expected[row] += p * data["rewards"][n] * score * (1.5 if t == high else 0.75)
    np.testing.assert_allclose(step, expected, rtol=1e-6, atol=1e-9)
