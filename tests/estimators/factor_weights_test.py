"""Weights with a cap per factor: by hand, their limits, packed rows and padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import factor_weights
from jaxrl_tis.estimators import weights
from tests import jitted

factor_weights, weights = map(jitted.Module, (factor_weights, weights))

NAN = float("nan")
NAMES = ("logp", "logp_prox", "logp_old", "logp_behav")
INF = {"cap_engine": np.inf}
# Row 0: products 6, .25; row 1: products 1 and (at padding) 8.
ENGINE = [[4.0, 0.5], [2.0, 2.0]]
STALENESS = [[0.5, 0.5], [0.5, 2.0]]
TRUST_REGION = [[3.0, 1.0], [1.0, 2.0]]
MASK = np.array([[1, 1], [1, 0]])


def chain(engine, staleness, trust_region, logp_behav=-2.0):
    """The four log-probs whose factors are the given ratios, by name."""
    logs = [np.log(np.array(x, np.float32)) for x in (trust_region, staleness, engine)]
    sums = [logp_behav + sum(logs[i:]) for i in range(3)]
    return dict(zip(NAMES, (*sums, np.full_like(logs[0], logp_behav)), strict=True))


@jitted.function
def both(fields, mask, seg=None, **caps):
    return [function(mask, mask, seg, **fields, **caps)
            for function in (factor_weights.capped_ratio, factor_weights.seq_capped_ratio)]


@pytest.mark.parametrize(
    ("caps", "tokens", "sequences"),
    [
        # Products over row 0: engine 2, staleness .25, trust region 3.
        (INF, [[6.0, 0.25], [1.0, 0.0]], [1.5, 1.0]),
        (INF | {"cap": 1.25}, [[1.25, 0.25], [1.0, 0.0]], [1.25, 1.0]),
        # min(4, 2) * .5 * 3: a capped factor cannot cancel the next. Over row 0 min(2, 2) acts not.
        ({}, [[3.0, 0.25], [1.0, 0.0]], [1.5, 1.0]),
        ({"cap_engine": 1.5, "cap_trust_region": 2.0}, [[1.5, 0.25], [0.75, 0.0]], [0.75, 0.75]),
        (INF | {"cap_staleness": 0.2, "cap": 2.0}, [[2.0, 0.1], [0.4, 0.0]], [1.2, 0.4]),
    ],
)
def test_a_cap_per_factor_by_hand(caps, tokens, sequences):
    fields = {name: jnp.where(MASK, x, NAN) for name, x in chain(
        ENGINE, STALENESS, TRUST_REGION).items()}
    of_tokens, of_sequences = both(fields, MASK, **caps)
    np.testing.assert_allclose(of_tokens, tokens, rtol=1e-5)
    expected = np.array(sequences)[:, None] * np.array(MASK)
    np.testing.assert_allclose(of_sequences, expected, rtol=1e-5)
    # In one packed row behind each other.
    packed = {name: jnp.concatenate(list(x))[None] for name, x in fields.items()}
    seg = np.array([[1, 1, 2, 0]])
    packed_tokens, packed_sequences = both(packed, seg > 0, seg, **caps)
    np.testing.assert_allclose(packed_tokens, np.reshape(tokens, (1, 4)), rtol=1e-5)
    np.testing.assert_allclose(packed_sequences, expected.reshape(1, 4), rtol=1e-5)


def test_before_the_updates_they_are_truncated_importance_sampling():
    rng = np.random.default_rng(0)
    mask = rng.random((6, 5)) < 0.8
    learner, behav = rng.normal(size=(2, 6, 5)).astype(np.float32)
    fields = dict(zip(NAMES, (learner, learner, learner, behav), strict=True))
    of_tokens, of_sequences = both(fields, mask, cap_engine=1.7)
    log_ratio = learner - behav
    np.testing.assert_array_equal(of_tokens, weights.token_tis(log_ratio, mask, cap=1.7))
    expected = weights.seq_tis(log_ratio, mask, cap=1.7)
    np.testing.assert_allclose(of_sequences, expected, rtol=1e-6)


def test_huge_factors_are_bounded_and_cancel_only_without_caps():
    ones = np.ones((1, 1))
    fields = {"logp": 0.0, "logp_prox": -500.0, "logp_old": 0.0, "logp_behav": -500.0}
    fields = {name: np.full((1, 1), x) for name, x in fields.items()}  # e^500, e^-500, e^500
    for w in both(fields, ones, cap_engine=np.inf):
        np.testing.assert_allclose(w, np.exp(20.0), rtol=1e-5)
    for w in both(fields, ones, cap_trust_region=1.0):
        np.testing.assert_allclose(w, np.exp(-20.0), rtol=1e-5)
    for w in both(fields, np.zeros((1, 1))):
        np.testing.assert_array_equal(w, 0.0)
