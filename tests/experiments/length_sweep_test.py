"""Estimates from inner products by hand, and the verdict on made values of P."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import length_sweep, sampled_policy
from experiments.length_sweep import Gram


def test_measures_from_inner_products():
    """The moments are those of the vectors themselves; variance is that of a chunk times its responses."""
    rng = np.random.default_rng(0)
    found, true = rng.normal(size=(16, 5)) + 1.0, rng.normal(size=(24, 5)) + 2.0
    gram = Gram(found @ found.T, found @ true.T, true @ true.T)
    values = gram.measures()
    assert values["own2"] == pytest.approx(sampled_policy.square(found))
    assert values["true2"] == pytest.approx(sampled_policy.square(true))
    assert values["dot"] == pytest.approx(found.mean(axis=0) @ true.mean(axis=0))
    assert values["variance"] == pytest.approx(length_sweep.CHUNK * found.var(axis=0, ddof=1).sum())
    assert values["bias2"] == pytest.approx(values["own2"] - 2 * values["dot"] + values["true2"])
    kept = np.arange(16) % 8 != 3
    assert gram.without(3).measures()["own2"] == pytest.approx(sampled_policy.square(found[kept]))
    assert gram.without(3).cross.shape == (14, 21)


def test_progress_keeps_the_sign():
    found = {"dot": 2.0, "variance": 30.0, "bias2": 1.0}
    assert length_sweep.progress(found, 10) == 0.0  # 4 / (3 + 1)
    assert length_sweep.progress(found | {"bias2": -5.0}, 30) == pytest.approx(math.log10(4))
    assert length_sweep.progress(found | {"dot": -2.0}, 10) == -math.inf


def test_rewards_by_hand():
    """Of 0, 1, 2, 7, 0 three of four follow."""
    size, tokens = length_sweep.size_of(5), np.array([[0, 1, 2, 7, 0], [0, 0, 0, 0, 0]])
    found = length_sweep.reward_of(tokens, size, 0.75)
    assert found["share"].tolist() == [0.75, 0.0] and found["success"].tolist() == [1.0, 0.0]


def lines(of):
    """Lines of two seeds; of: (T, weight) to log10 P."""
    noise = 0.01 * np.array([0, 1, -1, 1, -1, 1, -1, 1, -1])
    return [
        {"seed": seed, "T": t, "reward": reward, "weight": weight, "true2": 1.0, "bias2": 0.25, "variance": 100.0,
         "k3": 0.002, "ess": 0.5} | {f"P {b}": list(of(t, weight) + noise * (weight == "turn")) for b in length_sweep.BATCHES}
        for seed, t, reward, weight in itertools.product(
            (0, 1), length_sweep.LENGTHS, length_sweep.REWARDS, length_sweep.WEIGHTS
        )
    ]


def test_the_verdict():
    """The interval of a difference is 2.365 sqrt(7 * 0.01^2) for each seed, / sqrt 2: 0.044."""
    found = lambda gain: length_sweep.compared(lines(lambda t, w: gain * (w == "turn") - (w == "none")), 256, "share", 256)
    assert length_sweep.difference(found(0.0)["turn"], found(0.0)["seq"])[1] == pytest.approx(0.0442, abs=1e-4)
    assert length_sweep.verdict(found(0.05))[0] == "intermediate" and length_sweep.verdict(found(0.04))[0] == "open"
    worse = lines(lambda t, w: 1.0 * (w == "seq_tis"))
    assert length_sweep.verdict(length_sweep.compared(worse, 256, "share", 256))[:2] == ("extreme", "seq_tis")


def test_the_table_and_the_picture():
    made = lines(lambda t, w: 0.5 * (w == "turn") * (t > 200))
    text = length_sweep.table(made)
    assert "T >= 200, 12 cases: intermediate 12, extreme 0, open 0." in text
    assert "| share | 256 | 512 | intermediate | token 0.00 | turn 0.50 | +0.500 ± 0.044 | 0.00 |" in text
    assert "| success | 64 | seq | 0.50, 0.50 | 2.00, 2.00 | 0.0020 | 0.500 |" in text
    page = length_sweep.FIGURE.pictures["length_sweep"].page(made)
    assert [len(axes.lines) for axes in page.axes] == [12] * 4


@pytest.mark.all
def test_a_gradient_is_that_of_the_log_probs(monkeypatch):
    monkeypatch.setattr(length_sweep, "STEPS", 2)
    params, sampler = length_sweep.trained(0)
    assert not np.array_equal(params["head"], sampler["head"]) and not params["position"].any()
    size = length_sweep.size_of(6)
    tokens_nt, log_ratio_nt = length_sweep.drawn(params, sampler, size, jax.random.key(0), 16)
    assert 0 < np.abs(log_ratio_nt).max() < 0.5
    factor_nt = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)

    def objective(head):
        logp_ntv, _ = sampled_policy.scored(params | {"head": head}, size, tokens_nt)
        return jnp.mean(jnp.sum(sampled_policy.of_tokens(logp_ntv, tokens_nt) * factor_nt, axis=1))

    [found] = length_sweep.gradients(params, size, tokens_nt, factor_nt[None])
    names = sorted(name for name in params if name != "position")
    start = sum(params[name].size for name in names[: names.index("head")])
    head = found[start : start + params["head"].size].reshape(params["head"].shape)
    np.testing.assert_allclose(head, jax.grad(objective)(params["head"]), rtol=1e-3, atol=1e-5)
