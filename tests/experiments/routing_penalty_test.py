"""The bias of token weights against enumeration, and the fits on made powers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import expert_policy, routing_penalty
from experiments.expert_policy import NOISES


def made(bias):
    """Lines of three seeds with the bias of a function of (T, K, K delta), which is the share of the routers."""
    return [
        {
            "T": t, "K": k, "seed": seed, "routers": share, "kl": routing_penalty.KL, "k3": 0.003, "true": 4.0,
            "flips": share, "bias": bias(t, k, share) ** 2 * (1 + seed),
        }
        for seed, t, k, share in itertools.product(
            range(3), routing_penalty.LENGTHS, routing_penalty.EXPERTS, routing_penalty.ROUTERS
        )
    ]


def test_a_law_is_found():
    lines = made(lambda t, k, flips: 1e-3 * t * (flips if flips else 1.0))
    law = routing_penalty.exponents(lines, False)
    np.testing.assert_allclose([law["T"], law["K delta"], law["delta"]], 1.0, atol=1e-9)
    np.testing.assert_allclose([law["K"], law["routers / head"]], 1.0, atol=1e-9)
    assert routing_penalty.verdict(law).startswith("T K delta: yes") and "alone predicts it" in routing_penalty.verdict(law)
    np.testing.assert_allclose(routing_penalty.exponents(lines, True)["T"], 1.0, atol=1e-9)


def test_a_sublinear_growth_is_no_law():
    law = routing_penalty.exponents(made(lambda t, k, flips: t * (flips**0.5 if flips else 0.5)), False)
    np.testing.assert_allclose(law["K delta"], 0.5, atol=1e-9)
    np.testing.assert_allclose(law["routers / head"], 2.0, rtol=1e-9)
    text = routing_penalty.verdict(law)
    assert text.startswith("T K delta: no") and "sublinear" in text and "the KL alone does not" in text


def test_a_larger_kl_counts_less():
    lines = [line | {"kl": 4 * routing_penalty.KL} if line["T"] == 96 else line for line in made(lambda t, k, flips: t)]
    law = routing_penalty.exponents(lines, False)
    assert law["T"][0] < routing_penalty.exponents(made(lambda t, k, flips: t), False)["T"][0] == pytest.approx(1.0)


def test_the_table_and_the_picture():
    lines = made(lambda t, k, flips: 1e-3 * t)
    text = routing_penalty.table(lines)
    assert "| 4 | 8 | 0.25 | 0.0030 | 0.0030 | 0.250 | 0.0057 | 0.003 |" in text
    page = routing_penalty.FIGURE.pictures["routing_penalty"].page(lines)
    assert [len(axes.lines) for axes in page.axes] == [6] * 3


@pytest.mark.all
def test_the_expected_bias_is_that_of_enumeration():
    """Over all responses with their probability under the sampler, the factors give the bias of the token weight."""
    size = routing_penalty.size_of(8, 4)
    with jax.enable_x64(True):
        params = expert_policy.random_params(size, 0)
        change = 0.3 * expert_policy.noise_pattern(size, 0)
        behav_nt, _ = expert_policy.sampler(params, size, change, NOISES["router"])
        policy = expert_policy.scored(params, size)
        truth = expert_policy.true_gradient(policy, size)
        step = expert_policy.expected_steps(policy, size, behav_nt, ("token_vanilla",))["token_vanilla"]
        p_n1 = jnp.exp(behav_nt.sum(axis=1, keepdims=True))
        reward_nt = routing_penalty.rewards(jnp.asarray(size.responses[1]))
        np.testing.assert_allclose(reward_nt.sum(axis=1), size.responses[2])
        factors = routing_penalty.coefficients(policy.logp_nt - behav_nt, reward_nt - jnp.array([[0.0, 0.1, 0.2, 0.3]]))
        bias, true = (policy.weighted(p_n1 * factor_nt) for factor_nt in factors)
        np.testing.assert_allclose(true, truth, atol=1e-9)
        np.testing.assert_allclose(bias, step - truth, atol=1e-9)


@pytest.mark.all
def test_a_cell(monkeypatch):
    """Head noise flips nothing, and the KL is the wanted one."""
    monkeypatch.setattr(routing_penalty, "CHUNKS", {4: 2})
    head, *_, routers = routing_penalty.measured(8, 4, 0)
    assert head["flips"] == 0 and routers["flips"] > 0
    assert head["kl"] == pytest.approx(routing_penalty.KL, rel=0.01) and head["k3"] == pytest.approx(0.003, rel=0.5)
