"""Transfer matrices against enumeration, the sampled moments against exact ones."""

import argparse
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, weights
from experiments import exact, frontier, horizon, oracle

RNG = np.random.default_rng(0)
POLICY, BEHAVIOUR = RNG.normal(size=(3, 3)), RNG.normal(size=(3, 3))
REWARD = RNG.normal(size=(4, 3))
CHAIN = horizon.Chain(POLICY, BEHAVIOUR, REWARD, start=1)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def enumerated(weight_of):
    """(E[g], E|g|^2, ESS) of CHAIN by a loop over all sequences; weight_of(rho) gives [T]."""
    pi, mu = softmax(POLICY), softmax(BEHAVIOUR)
    mean, second, w_sum, w_square = np.zeros((3, 3)), 0.0, 0.0, 0.0
    for tokens in itertools.product(range(3), repeat=4):
        states = (1, *tokens[:-1])
        rho = np.array([pi[s, v] / mu[s, v] for s, v in zip(states, tokens, strict=True)])
        probability = math.prod(mu[s, v] for s, v in zip(states, tokens, strict=True))
        w = weight_of(rho)
        g = np.zeros((3, 3))
        for t, (s, v) in enumerate(zip(states, tokens, strict=True)):
            g[s] += w[t] * (np.eye(3)[v] - pi[s])
        g *= sum(REWARD[t, v] for t, v in enumerate(tokens))
        mean, second = mean + probability * g, second + probability * np.sum(g**2)
        w_sum, w_square = w_sum + probability * w.sum(), w_square + probability * np.sum(w**2)
    return mean, second, w_sum**2 / (4 * w_square)


WEIGHTS = {
    ("none", math.inf): lambda rho: np.ones(4),
    ("token", math.inf): lambda rho: rho,
    ("token", 1.2): lambda rho: np.minimum(rho, 1.2),
    ("prefix", math.inf): np.cumprod,
    ("seq", math.inf): lambda rho: np.full(4, rho.prod()),
}


@pytest.mark.parametrize("arguments", WEIGHTS)
def test_moments_against_enumeration(arguments):
    mean, second, ess = enumerated(WEIGHTS[arguments])
    moments = CHAIN.moments(*arguments)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(math.exp(moments.log_second), second, rtol=1e-10)
    np.testing.assert_allclose(moments.ess, ess, rtol=1e-10)


@pytest.mark.parametrize("unit, cap, weigh", [
    ("none", math.inf, np.ones_like), ("token", 1.2, lambda rho: np.minimum(rho, 1.2)),
])
def test_centred_moments_against_enumeration(unit, cap, weigh):
    """Every score less the mean that weighted scores have under the behaviour in its state."""
    pi, mu = softmax(POLICY), softmax(BEHAVIOUR)
    weight = weigh(pi / mu)
    drift = [sum(mu[s, v] * weight[s, v] * (np.eye(3)[v] - pi[s]) for v in range(3)) for s in range(3)]
    mean, second = np.zeros((3, 3)), 0.0
    for tokens in itertools.product(range(3), repeat=4):
        states = (1, *tokens[:-1])
        probability = math.prod(mu[s, v] for s, v in zip(states, tokens, strict=True))
        g = np.zeros((3, 3))
        for s, v in zip(states, tokens, strict=True):
            g[s] += weight[s, v] * (np.eye(3)[v] - pi[s]) - drift[s]
        g *= sum(REWARD[t, v] for t, v in enumerate(tokens))
        mean, second = mean + probability * g, second + probability * np.sum(g**2)
    moments = CHAIN.moments(unit, cap, True)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(math.exp(moments.log_second), second, rtol=1e-10)
    assert moments.ess == CHAIN.moments(unit, cap).ess


def test_whole_token_weights_are_centred_already():
    """Under the behaviour, the mean of rho times the score is that of the score under the policy: 0."""
    plain, centred = CHAIN.moments("token"), CHAIN.moments("token", math.inf, True)
    np.testing.assert_allclose(centred.mean, plain.mean, atol=1e-12)


def test_true_gradient_against_complex_steps():
    def expected_reward(logits):
        state, total, pi = np.eye(3)[1].astype(complex), 0.0, softmax(logits)
        for reward_v in REWARD:
            state = state @ pi
            total += state @ reward_v
        return total

    expected = np.zeros((3, 3))
    for s, v in np.ndindex(3, 3):
        step = POLICY.astype(complex)
        step[s, v] += 1e-30j
        expected[s, v] = expected_reward(step).imag / 1e-30
    np.testing.assert_allclose(CHAIN.true_gradient(), expected, rtol=1e-10)
    np.testing.assert_allclose(CHAIN.expected_reward(), expected_reward(POLICY).real, rtol=1e-12)


def test_chain_and_table_are_the_same_policy():
    # Rows of the table are prefixes; the row of the chain is the prefix's last token.
    last = [1] + [v for t in range(3) for _ in range(3**t) for v in range(3)]
    problem = exact.Problem(
        POLICY[last],
        BEHAVIOUR[last],
        lambda tokens: sum(REWARD[t, v] for t, v in enumerate(tokens)),
        4,
    )
    shared = np.zeros((3, 3))
    np.add.at(shared, last, problem.true_gradient())
    np.testing.assert_allclose(CHAIN.true_gradient(), shared, rtol=1e-10)


def test_sequence_weights_are_unbiased_at_1024_tokens():
    chain = frontier.random_chain(0.1, "mean", 1024)
    truth, sequence = chain.true_gradient(), chain.moments("seq")
    np.testing.assert_allclose(sequence.mean, truth, rtol=1e-6, atol=1e-9)
    # E[W^2] is one plus the chi^2 divergence of the sequences, and it grows exponentially.
    ratio = [frontier.random_chain(0.1, "mean", t).moments("seq").ess for t in (256, 512, 1024)]
    np.testing.assert_allclose(math.log(ratio[1]) / math.log(ratio[0]), 2.0, rtol=0.02)
    np.testing.assert_allclose(math.log(ratio[2]) / math.log(ratio[1]), 2.0, rtol=0.02)


def test_what_the_behaviour_never_draws_cannot_be_repaired():
    kept = BEHAVIOUR.copy()
    kept[0, 2] = -np.inf
    chain = horizon.Chain(POLICY, kept, REWARD, start=1)
    assert chain.ratio[0, 2] == 0.0
    gap = np.linalg.norm(chain.moments("seq").mean - chain.true_gradient())
    assert gap > 0.05 * np.linalg.norm(chain.true_gradient())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("turn",), "Unknown unit 'turn'"), (("seq", 2.0), "only token weights"),
        (("seq", math.inf, True), "unit is 'seq', but scores are centred for none, token"),
    ],
)
def test_weights_without_a_transfer_matrix_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        CHAIN.moments(*arguments)


def test_a_profile_by_hand():
    # E[g] = (1, 1), gradient (1, 0): squared bias 1; E|g|^2 = 6 gives a variance of 6 - 2 = 4.
    moments = horizon.Moments(np.array([[1.0, 1.0]]), math.log(6.0), 0.5)
    one = horizon.profile(moments, np.array([[1.0, 0.0]]))
    assert one.bias == pytest.approx(1.0) and one.log10_variance == pytest.approx(math.log10(4.0))
    assert one.progress == pytest.approx(1 / (4 + 1)) and one.ess == 0.5
    assert one.efficiency == pytest.approx(1 / (4 + 2))
    # A mean over four has the variance 1; against a gradient of norm 2 both are a quarter.
    four = horizon.profile(moments, np.array([[2.0, 0.0]]), batch=4)
    # bias (-1, 1) has the squared norm 2, 0.5 in units of 4; <(2, 0), (1, 1)>^2 / 16 = 0.25.
    assert four.bias == pytest.approx(math.sqrt(0.5))
    assert four.progress == pytest.approx(0.25 / (0.25 + 0.5))
    downhill = horizon.profile(moments, np.array([[-1.0, 0.0]]))
    assert downhill.efficiency == pytest.approx(-1 / 6)


EXACT = {
    "none": lambda log_ratio, adv: np.ones((len(log_ratio), 1)),
    "token": lambda log_ratio, adv: np.exp(log_ratio),
    "prefix": lambda log_ratio, adv: np.exp(np.cumsum(log_ratio, axis=1)),
    "seq": lambda log_ratio, adv: np.exp(log_ratio.sum(axis=1, keepdims=True)),
}


@pytest.mark.all
def test_intervals_of_the_sampled_moments_hold_the_exact_ones():
    chain = frontier.random_chain(0.2, "last", 8)
    inside, seen = 0, 0
    for seed in range(10):
        sampled = horizon.monte_carlo(chain, EXACT, 2000, seed)
        for name, (middle, half) in sampled.items():
            exact = horizon.profile(chain.moments(name), chain.true_gradient())
            for field in ("log10_variance", "efficiency"):
                gap = abs(getattr(middle, field) - getattr(exact, field))
                inside += gap <= getattr(half, field)
                seen += 1
                assert gap < 6 * getattr(half, field) + 1e-9, (name, field)
    assert inside / seen > 0.85


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="99 samples.*at least 100"):
        horizon.monte_carlo(CHAIN, EXACT, 99)


LIBRARY = {
    "prefix_min": ("prefix_minpro", {}),
    "prefix_clip": ("prefix_ctpo", {}),
    "turn": ("turn_tis", {"cap": np.inf}),
    "turn_geometric": ("turn_geo", {"cap": np.inf}),
    "geometric": ("geo_tis", {"cap": np.inf}),
    "seq_tis": ("seq_tis", {}),
}


@pytest.mark.all
@pytest.mark.parametrize("name", LIBRARY)
def test_sampled_weights_are_those_of_the_library(name):
    log_ratio = 0.1 * np.random.default_rng(1).normal(size=(3, 40))
    entry, parameters = LIBRARY[name]
    if methods.needs("weight", entry):
        parameters = parameters | {"turn": np.tile(np.arange(40) // 16, (3, 1))}
    with jax.enable_x64(True):
        function = jax.jit(lambda x: weights.WEIGHTS[entry](x, x == x, **parameters))
        expected = np.asarray(function(jnp.asarray(log_ratio)))
    actual = np.broadcast_to(frontier.SAMPLED[name](log_ratio, np.ones(3)), (3, 40))
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_vespo_by_hand():
    # W = 1 gives 1. W = 2: 2^2 exp(3 (1 - 2)) = 4 exp(-3) and 2^3 exp(2 (1 - 2)) = 8 exp(-2).
    log_ratio = np.log([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    expected = [[1.0], [4.0 * math.exp(-3.0)], [8.0 * math.exp(-2.0)]]
    np.testing.assert_allclose(frontier.vespo(log_ratio, np.array([1.0, 0.5, -1.0])), expected)


@pytest.mark.all
def test_sweep_table_and_picture(tmp_path):
    rows = frontier.sweep(0.1, "last", (4, 8), 1, 200, 0)
    assert [row.method for row in rows[:14]] == [*frontier.EXACT, *frontier.SAMPLED]
    assert all((row.half is None) == (row.method in frontier.EXACT) for row in rows)
    best = frontier.best(rows)
    text = frontier.table(rows).splitlines()
    starred = [line.split()[:2] for line in text if line.endswith("*")]
    assert starred == [[str(length), method] for length, method in best.items()]
    for row in rows:
        assert all(map(math.isfinite, dataclasses.astuple(row.profile))), row
    path = frontier.draw(rows, str(tmp_path / "picture.png"))
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_table_of_centred_scores():
    """Its ratios are those of the profiles: by hand of the last line."""
    lines = frontier.centred_table((8,), (0,), (0.1, 0.3)).splitlines()
    assert len(lines) == 2 + 2 * 2
    chain = frontier.random_chain(0.3, "mean", 8, 0)
    gradient = chain.true_gradient()
    of = lambda *arguments: horizon.profile(chain.moments(*arguments), gradient, 10_000)
    plain, centred = of("token"), of("none", math.inf, True)
    expected = f"{centred.bias:.3f}; "
    [cell] = [x for x in lines[-1].split(" | ") if x.startswith(expected)]
    assert cell.endswith(f", {centred.progress / plain.progress:.2f}")


def row(method, progress, half=None, efficiency=1.0):
    profile = horizon.Profile(0.0, 0.0, progress, efficiency, 1.0)
    interval = None if half is None else horizon.Profile(0.0, 0.0, half, 0.0, 0.0)
    return frontier.Row(256, method, profile, interval)


@pytest.mark.parametrize(
    ("rows", "side"),
    [
        ([row("seq", 0.1), row("token", 1.0), row("turn", 2.0, 0.9)], "intermediate (turn "),
        ([row("seq", 0.1), row("token", 1.0), row("turn", 2.0, 1.1)], "open (turn against token)"),
        ([row("token", 1.0), row("prefix", 0.9)], "extreme (prefix against token)"),
        ([row("token", 1.0), row("seq_tis", 3.0, 0.5), row("turn", 2.0, 0.2)], "extreme (turn "),
        # A downhill step and no correction at all are not in the race.
        ([row("token", 1.0), row("prefix", 0.9), row("vespo", 9.0, 0.1, -1.0)], "extreme (prefix"),
        ([row("token", 1.0), row("prefix", 0.9), row("none", 9.0)], "extreme (prefix against"),
    ],
)
def test_the_verdict_on_the_conjecture(rows, side):
    assert frontier.verdict(rows)[256].startswith(side)


@pytest.mark.all
def test_the_command(tmp_path, capsys):
    png = tmp_path / "oracle.png"
    oracle.main(["--horizons", "4", "--samples", "100", "--png", str(png)])
    printed = capsys.readouterr().out
    assert "prefix_min" in printed and str(png) in printed
    assert png.stat().st_size > 1000


@pytest.mark.parametrize("reward", frontier.REWARDS)
def test_the_reward_of_a_chain_is_centred_under_the_behaviour(reward):
    chain = frontier.random_chain(1.0, reward, 3)
    assert chain.expected_reward(chain.mu) == pytest.approx(0.0, abs=1e-12)
    assert abs(chain.expected_reward(chain.pi)) > 1e-3


def test_no_length_is_refused():
    assert oracle._count("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="0 is not at least 1"):
        oracle._count("0")
