"""The law of routing noise: fits of made powers, and the measures of a small policy by loops."""

import itertools
import json

import jax
import numpy as np
import pytest

from experiments import expert_policy, parts, router_noise
from experiments.expert_policy import Size
from jaxrl_tis.models.config import MoeConfig

K, DELTA = router_noise.axes_of(np.zeros((6, 4, 5)))
LAW = {"r3: kl": 1e-16 + 0 * K, "none: kl": 2 * DELTA**2, "flips": K * DELTA}


def made(a, b):
    """Biases of 0.3 K^a delta^b times a factor of the seed, saturated at the largest delta."""
    bias = 0.3 * K**a * DELTA**b * np.arange(1.0, 7.0).reshape(6, 1, 1)
    bias[..., -1] = 1.0
    names = itertools.product(router_noise.ARMS, ("bias", "replay bias"))
    measures = LAW | {": ".join(name): bias for name in names}
    measures |= {"none, seq_vanilla: bias": 1e-15 * bias, "r3, none: replay bias": 1e-15 * bias}
    return {(n, s): measures for n in router_noise.NOISES for s in router_noise.SCALES}


def test_a_power_law_is_found_and_its_saturation_left_out():
    measures = made(-0.5, 0.75)["router", "1"]
    bias = measures["none, none: bias"]
    estimates = router_noise.exponents(bias, K, DELTA)
    assert estimates.shape == (1 + router_noise.RESAMPLES, 2)
    # The factor of a seed is the same in all cells: it moves no exponent.
    np.testing.assert_allclose(estimates, np.broadcast_to([-0.5, 0.75], estimates.shape), rtol=1e-9)
    # K^-0.5 delta^0.75 = K^-1.25 (K delta)^0.75.
    with_flips = router_noise.exponents(bias, K, measures["flips"])[0]
    np.testing.assert_allclose(with_flips, [-1.25, 0.75], rtol=1e-9)
    np.testing.assert_allclose(
        router_noise.exponents(DELTA**3, measures["none: kl"])[0], [1.5], rtol=1e-9)


def test_the_interval_is_over_seeds():
    bias = np.concatenate([(K * DELTA)[:2], (DELTA / K)[2:]])  # two seeds grow, four fall
    middle, low, high = parts.bootstrap(router_noise.exponents(bias, K, DELTA)[:, 0])
    # Of six drawn seeds none grows in 9 % of the samples; all grow in 0.1 %.
    assert low == pytest.approx(-1.0) and low < middle < high < 1.0


def test_the_verdict_needs_both_exponents():
    one, half, wide = (1.0, 0.9, 1.1), (0.5, 0.4, 0.6), (0.7, 0.3, 1.0)
    assert router_noise.verdict((one, wide)).startswith("yes: K^a delta^b with a = 1.00 [0.90, 1.1")
    assert router_noise.verdict((one, half)).startswith("no")
    assert router_noise.verdict((half, one)).startswith("no")


@pytest.mark.all
def test_the_files(tmp_path, monkeypatch, capsys):
    found = made(1.0, 1.0)
    monkeypatch.setattr(router_noise, "RESAMPLES", 20)
    monkeypatch.setattr(router_noise, "enumerated", lambda seeds, n, s: found[n, s])
    names = itertools.product(expert_policy.ROUTINGS, router_noise.WEIGHTS)
    arms = {", ".join(name): np.full(3, 0.25) for name in names}
    monkeypatch.setattr(router_noise, "after_updates", lambda seeds: {(0.3, 0.1): arms})
    router_noise.FIGURE.write(tmp_path, "router_noise")
    text = (tmp_path / "router_noise.md").read_text()
    assert text.startswith("Does the bias grow as K x delta? yes: K^a delta^b with a = 1.00 [1.00,")
    assert "| choice | sqrt K | r3, token_tis | replayed | 1.00 [1.00, 1.00] | 1.00 [1.00," in text
    assert "| router | 1 | r3, none | native |" in text  # and no law of rounding
    assert "none, seq_vanilla | native" not in text and "r3, none | replayed" not in text
    # Mean of the seeds 3.5 times 0.3 x 8 x 0.01, and 2 x 8 x 0.01 flips.
    assert "| r3, none: bias | 8 | 0.084 | 0.252 | 0.84 | 2.52 | 1 |" in text
    assert "| none: kl | 1 | 0.0002 | 0.0018 |" in text
    cells = " | ".join(["0.250 [0.250, 0.250]"] * 3)
    assert f"| 0.3 | 0.1 | token_tis | {cells} |" in text
    assert "| r3: kl | 4 | 0 | 0 | 0 | 0 | 0 |" in text
    lines = [json.loads(x) for x in (tmp_path / "router_noise.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 4 * 5 and (lines[4]["K"], lines[4]["delta"]) == (1, 1.0)
    assert lines[19]["noise"] == "router" and lines[19]["none, none: bias"] == 1.0
    assert (tmp_path / "router_noise.png").stat().st_size > 10_000
    assert capsys.readouterr().out.startswith("Does the bias")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(router_noise, "DELTAS", (0.3, 1.0))
    monkeypatch.setattr(router_noise, "ACTIVE", (2,))
    size = Size(MoeConfig(num_experts=5, top_k=2, expert_dim=2), vocab=2, horizon=3, embed_dim=4)
    monkeypatch.setattr(router_noise, "size_of", lambda active: size)
    return size


@pytest.mark.all
@pytest.mark.compiles
def test_r2_is_none_until_the_weights_move(small, monkeypatch):
    monkeypatch.setattr(router_noise, "MOVED_DELTAS", (0.3,))
    monkeypatch.setattr(router_noise, "DRIFTS", (0.0, 0.5))
    still, moved = router_noise.after_updates((0, 1)).values()
    for weight in router_noise.WEIGHTS:
        np.testing.assert_allclose(still[f"r2, {weight}"], still[f"none, {weight}"], atol=1e-12)
    assert still["none, none"].shape == (2,) and still["none, none"].min() > 0.01
    # Updates of this size move routes; a sequence weight corrects all but the replay.
    np.testing.assert_allclose(moved["none, seq_vanilla"], 0.0, atol=1e-12)
    assert moved["r2, seq_vanilla"].min() > 0.01


@pytest.mark.all
@pytest.mark.compiles
def test_the_measures_of_a_small_policy_by_loops(small):
    found = {n: router_noise.enumerated((0, 1), n, "sqrt K") for n in router_noise.NOISES}
    params = expert_policy.random_params(small, 1)
    params["expert_down"] = params["expert_down"] * np.sqrt(2)
    pattern_lde = expert_policy.noise_pattern(small, 1)
    with jax.enable_x64(True):
        behav_nt, ids_lpk = map(np.asarray, expert_policy.sampler(params, small, pattern_lde, 1.0))
        native = expert_policy.scored(params, small)
        truth, bias = expert_policy.routing_bias(
            params, params, small, pattern_lde[None], 1.0, router_noise.WEIGHTS)
        replayed = expert_policy.scored(params, small, ids_lpk)
        replay_truth = np.asarray(expert_policy.true_gradient(replayed, small))
        own_nt, own_lpk = map(np.asarray, (native.logp_nt, native.ids_lpk))
        step, truth = np.asarray(bias["none"]["token_tis"] + truth), np.asarray(truth)
    at = lambda name, noise="router": found[noise][name][1, 0, 1]  # seed 1, delta 1
    flips = gap = kl = 0.0
    for row_t, behav_t, own_t in zip(small.responses[0], behav_nt, own_nt, strict=True):
        p = np.exp(behav_t.sum())
        for row, behav, own in zip(row_t, behav_t, own_t, strict=True):
            gap += p * abs(own - behav) / 3
            kl += p * (behav - own) / 3
            for layer in range(2):
                flips += p * len({*ids_lpk[layer, row]} ^ {*own_lpk[layer, row]}) / 6
    assert at("flips") == pytest.approx(flips) and flips > 0.3
    assert at("none: gap") == pytest.approx(gap) and at("none: kl") == pytest.approx(kl)
    norm = np.linalg.norm(truth)
    assert at("none, token_tis: bias") == pytest.approx(np.linalg.norm(step - truth) / norm)
    to_replay = np.linalg.norm(step - replay_truth) / np.linalg.norm(replay_truth)
    assert at("none, token_tis: replay bias") == pytest.approx(to_replay) and to_replay > 0.1
    assert at("r3, seq_vanilla: replay bias") < 1e-12 < at("r3, none: replay bias")
    cosine = step @ truth / np.linalg.norm(step) / norm
    assert at("none, token_tis: cosine") == pytest.approx(cosine) and 0.1 < cosine < 0.999
    # Exact gates: nothing is left of the gap under r3, whose weights are then 1.
    assert at("r3: gap", "choice") < 1e-14 < at("r3: gap")
    assert at("r3, none: bias", "choice") == pytest.approx(at("r3, seq_vanilla: bias", "choice"))
    assert at("none, seq_vanilla: bias") < 1e-12


def test_the_policy_of_the_law():
    size = router_noise.size_of(8)
    assert (size.moe.num_experts, size.moe.top_k, len(size.responses[2])) == (16, 8, 81)
    found = made(1.0, 1.0)
    found["router", "1"]["none, none: bias"][0] = 0.0  # a seed without a flip
    page = router_noise.FIGURE.pictures["router_noise"].page((found, None))
    assert [axes.get_title() for axes in page.axes] == [
        "none, none", "none, token_tis", "r3, none", "r3, token_tis", "r3, seq_vanilla"]
