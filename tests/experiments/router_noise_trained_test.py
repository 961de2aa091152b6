"""The law of routing noise on a trained model: factors by hand, made powers, one small cell."""

import jax
import numpy as np
import pytest

from experiments import router_noise_trained as trained
from jaxrl_tis.learner.state import initial_params


def test_factors_by_hand():
    """Ratios (2, 0.5) and (4, 1): whole sequences 1 and 4, token TIS min(r, 2)."""
    found = trained.coefficients(np.array([[2.0, 0.5], [4.0, 1.0]]), np.array([1.0, -0.5]))
    np.testing.assert_allclose(found["true"], [[1, 1], [-2, -2]])
    np.testing.assert_allclose(found["no weight"], [[0, 0], [1.5, 1.5]])
    np.testing.assert_allclose(found["token TIS"], [[1, -0.5], [1, 1.5]])


def test_a_power_law_is_found_and_its_saturation_left_out():
    k, delta = np.meshgrid(trained.ACTIVE, trained.DELTAS, indexing="ij")
    values = np.arange(1.0, 7.0)[:, None, None] * (k**0.5 * delta**0.75) ** 2
    values[..., -1] = 1.0
    for squared in (True, False):
        (a, *of_a), (b, *of_b) = trained.exponents(values, squared)
        np.testing.assert_allclose([a, *of_a], 0.5 * (1 if squared else 2), rtol=1e-9)
        np.testing.assert_allclose([b, *of_b], 0.75 * (1 if squared else 2), rtol=1e-9)


def test_estimates_around_zero_have_no_finite_exponent():
    values = np.random.default_rng(0).normal(size=(6, len(trained.ACTIVE), len(trained.DELTAS)))
    (_, low, high), _ = trained.exponents(values, True)
    assert low == -np.inf and high == np.inf


@pytest.mark.all
def test_a_small_cell(monkeypatch):
    """The gradient of the parts is that of a sum over all rows. A sampler without noise has no bias
    and no flip."""
    monkeypatch.setattr(trained, "PROMPTS", 32)
    setup = trained.setup_of(2, 0)
    params = initial_params(setup.training)
    found = trained.measured(setup, params)
    assert found["flips"] == 0 and abs(found["k3"]) < 1e-9
    noisy = trained.measured(trained.setup_of(2, 0, 1.0, 1), params)
    assert noisy["flips"] > 0.05 and noisy["k3"] > 1e-6

    rows = setup.training.rows(trained.report.sample(setup, params, 32))
    factor = np.random.default_rng(0).normal(size=rows["mask"].shape) * rows["mask"]
    whole = trained.make_gradient(setup)(params, rows, factor)

    def objective(params):
        learner, fields = setup.training.learner, trained.scoring
        logp = fields.response_logprobs(params, learner, {
            name: rows[name] for name in ("tokens", "mask", "temperature", "positions", "segment_ids")
        })
        return (logp * factor).sum() / len(factor)

    for a, b in zip(*map(jax.tree.leaves, (whole, jax.grad(objective)(params))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6)
