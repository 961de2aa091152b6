"""Clipped surrogates of sequences, entropy groups and prefixes: loops, limits, numbers."""

import numpy as np
import pytest

from jaxrl_tis.estimators import reduce, sequence_clipped
from tests import jitted
from tests.estimators.sequence_losses import (
    POINTS, bands, check_a_loop, check_an_empty_batch, check_one_token, check_the_bound,
    gspo_loop, row,
)

reduce, sequence_clipped = map(jitted.Module, (reduce, sequence_clipped))

pytestmark = pytest.mark.compiles

# The formulas, see `sequence_losses`.


def seq_ppo_loop(x):
    n = len(x["l"])
    product = np.exp(np.sum(x["l"]))
    loss, slope, is_clipped = bands([product] * n, x["adv"], [0.8] * n, [1.2] * n)
    return loss, np.outer(slope, np.ones(n)), is_clipped


def luspo_loop(x):
    loss, jacobian, is_clipped = gspo_loop(x, 1 - 2e-3, 1 + 2.5e-3)
    return len(x["l"]) * loss, len(x["l"]) * jacobian, is_clipped


def gspo_token_loop(x):
    loss, jacobian, is_clipped = gspo_loop(x)
    return loss, np.diag(jacobian.sum(1)), is_clipped


def gmpo_loop(x, width=0.4):
    log_ratio, n = x["l"], len(x["l"])
    is_high = (x["adv"] > 0) & (log_ratio > width)
    is_low = (x["adv"] < 0) & (log_ratio < -width)
    bounded = np.where(is_high, width, np.where(is_low, -width, log_ratio))
    loss = -np.mean(x["adv"]) * np.exp(np.mean(np.where(x["adv"] == 0, 0.0, bounded)))
    outside = (np.abs(log_ratio) > width) & (x["adv"] > 0)  # what the metric counts, either side
    slope = np.where(is_high | is_low | (x["adv"] == 0), 0.0, loss / n)
    return np.full(n, loss), np.tile(slope, (n, 1)), outside


def tbpo_loop(x):
    n = len(x["l"])
    s = np.exp(np.mean(x["l"]))
    low = np.where(x["adv"] < 0, 1 - 3e-4, 0.0)
    high = np.where(x["adv"] < 0, 1 + 7e-4, 1 + 4e-4)
    value = np.minimum(np.maximum(s, low), high)
    is_clipped = value != s
    slope = np.where(is_clipped, 0.0, -s * x["adv"])
    return -value * x["adv"], np.outer(slope, np.ones(n) / n), is_clipped


def espo_loop(x):
    n = len(x["l"])
    num_high = int(np.floor(0.2 * n + 0.5))
    order = np.argsort(-x["entropy"], kind="stable")
    groups = [g for g in (order[:num_high], order[num_high:]) if len(g)]
    loss, slope, is_clipped = np.zeros(n), np.zeros(n), np.zeros(n, bool)
    for g in groups:
        width = 0.02 / np.log(64) * np.mean(x["entropy"][g])
        ratio = [np.exp(np.mean(x["l"][g]))] * len(g)
        columns = bands(ratio, x["adv"][g], [1 - width] * len(g), [1 + width] * len(g))
        weight = n / (len(groups) * len(g))
        loss[g], slope[g], is_clipped[g] = weight * columns[0], weight * columns[1], columns[2]
    return loss, np.diag(slope), is_clipped


def ctpo_loop(x):
    steps = 1.0 + np.arange(len(x["l"]))
    low, high = np.exp(-0.025 * np.sqrt(steps)), np.exp(0.05 * np.sqrt(steps))
    ratio = np.cumprod(np.exp(x["l"]))
    loss, slope, is_clipped = bands(ratio, x["adv"], low, high)
    is_bounded = (x["adv"] < 0) & (ratio > high)
    loss, slope = np.where(is_bounded, -high * x["adv"], loss), np.where(is_bounded, 0.0, slope)
    return loss, np.diag(slope), is_clipped


LOOPS = {
    "seq_ppo": seq_ppo_loop,
    "gspo": gspo_loop,
    "luspo": luspo_loop,
    "gspo_token": gspo_token_loop,
    "gmpo": gmpo_loop,
    "tbpo": tbpo_loop,
    "espo": espo_loop,
    "ctpo": ctpo_loop,
}


@pytest.mark.parametrize("name", sequence_clipped.OBJECTIVES)
@pytest.mark.parametrize("spread", [0.7, 0.003])
def test_entry_equals_a_loop_over_sequences(name, spread):
    check_a_loop(name, spread, LOOPS[name])


@pytest.mark.parametrize("name", sequence_clipped.OBJECTIVES)
def test_a_batch_without_tokens_is_zero(name):
    check_an_empty_batch(name)


# Coefficients on the gradient of log pi at POINTS.
PUBLISHED = {
    "gmpo": [1, -1, 1.350, -1.350, 0.741, -0.741, 0, -4.482, 0.223, 0],
    "ctpo": [1, -1, 0, 0, 0.741, 0, 0, 0, 0.223, 0],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_coefficients(name):
    for (log_ratio, adv), coefficient in zip(POINTS, PUBLISHED[name], strict=True):
        _, _, gradient = row(name, [log_ratio], adv)
        np.testing.assert_allclose(-gradient, [[coefficient]], atol=6e-4)


@pytest.mark.parametrize("name", ["seq_ppo", "gspo", "gspo_token"])
def test_one_token_is_ppo(name):
    check_one_token(name)


@pytest.mark.parametrize("s, is_clipped", [(0.9979, 1), (0.9981, 0), (1.0024, 0), (1.0026, 1)])
def test_luspo_has_its_own_band(s, is_clipped):
    """Answers of one token; the advantage pushes out of the band."""
    adv = np.array([[1.0 if s > 1 else -1.0]])
    log_s = np.log(np.array([[s]]))
    _, metrics = sequence_clipped.luspo(log_s, np.zeros((1, 1)), adv, np.ones((1, 1)))
    assert metrics["actor/pg_clipfrac"] == is_clipped


@pytest.mark.parametrize("name", ["seq_ppo", "gspo", "gspo_token", "ctpo"])
def test_ratios_are_bounded_by_exp_10(name):
    check_the_bound(name)


def test_gmpo_limits():
    log_ratio = [0.6, -0.9, 0.2]
    for adv in (1.0, -1.0):  # without bounds it is GSPO without a clip
        expected = row("gspo", log_ratio, adv, clip_low=1.0, clip_high=np.inf)
        actual = row("gmpo", log_ratio, adv, clip_low=np.inf, clip_high=np.inf)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)
    # A = 1: l = 0.6 is held at 0.4, the mean is (0.4 - 0.9 + 0.2) / 3 = -0.1; the three losses add
    # up to -3 e^-0.1, whose derivative is a third of it for each token that is not held.
    loss, metrics, gradient = row("gmpo", log_ratio, 1.0)
    np.testing.assert_allclose(loss, [[-np.exp(-0.1)] * 3], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.0, -np.exp(-0.1), -np.exp(-0.1)]], rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)
    loss, metrics, gradient = row("gmpo", [0.5, 0.5], 1.0, clip_high=0.5)  # at the end
    np.testing.assert_allclose(gradient, [[-np.exp(0.5)] * 2], rtol=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0
    loss, metrics, gradient = row("gmpo", log_ratio, 0.0)
    np.testing.assert_array_equal(loss, np.zeros((1, 3)))
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0


def test_tbpo_drops_bad_responses_on_both_sides():
    for log_ratio, adv, value, is_taught in (
        (-1e-3, -1.0, 1 - 3e-4, False),
        (-1e-4, -1.0, np.exp(-1e-4), True),
        (5e-4, -1.0, np.exp(5e-4), True),
        (1e-3, -1.0, 1 + 7e-4, False),
        (5e-4, 1.0, -(1 + 4e-4), False),
        (3e-4, 1.0, -np.exp(3e-4), True),
        (-2.0, 1.0, -np.exp(-2.0), True),
    ):
        loss, metrics, gradient = row("tbpo", [log_ratio], adv)
        np.testing.assert_allclose(loss, [[value]], rtol=2e-6)
        np.testing.assert_allclose(gradient, [[value if is_taught else 0.0]], rtol=2e-6)
        assert metrics["actor/pg_clipfrac"] == (not is_taught)
    for log_ratio in (-0.3, 0.0, 0.4):  # without the upper end it is GSPO
        actual = row("tbpo", [log_ratio, 0.1], -1.0, tbpo_high=np.inf)
        expected = row("gspo", [log_ratio, 0.1], -1.0)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)


@pytest.mark.all
def test_high_entropy_of_packed_sequences():
    # Sequence 1 has 5 valid tokens: round(0.4 * 5) = 2, of the three 0.7 the two that come first.
    # Sequence 2 has 2: round(0.8) = 1. Padding and tool tokens are never taken.
    entropy = np.array([[0.7, 0.1, 9.0, 0.7, 0.0, 0.7, 0.2, 0.3, 9.0]])
    mask = np.array([[1, 1, 0, 1, 1, 1, 1, 1, 0]])
    seg = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 0]])
    is_high = sequence_clipped.high_entropy(entropy, mask, seg, 0.4)
    np.testing.assert_array_equal(is_high, np.array([[1, 0, 0, 1, 0, 0, 0, 1, 0]]) == 1)
    alone = sequence_clipped.high_entropy(entropy[:, :6], mask[:, :6], None, 0.4)
    np.testing.assert_array_equal(alone, is_high[:, :6])


def test_espo_band_and_group_weights():
    # Five tokens: one of 2 nats, four of 0. Width 0.02 * 2 / log 151936 = 0.00335272 for the first
    # group and 0 for the other. Weights n / (K size): 5 / (2 * 1) = 2.5 and 5 / (2 * 4) = 0.625.
    fields = {"entropy": [[0.0, 2.0, 0.0, 0.0, 0.0]], "vocab_size": 151936}
    log_ratio = [0.0, 0.004, 0.0, 0.0, 0.0]
    loss, metrics, gradient = row("espo", log_ratio, 1.0, **fields)
    np.testing.assert_allclose(loss[0, 1], -2.5 * 1.00335272, rtol=1e-6)
    np.testing.assert_allclose(loss[0, 0], -0.625, rtol=1e-6)
    # r = 1 in a band of no width is its edge, and keeps its gradient.
    np.testing.assert_allclose(gradient, [[-0.625, 0.0, -0.625, -0.625, -0.625]], rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 0.2, rtol=1e-6)
    log_ratio[1] = 0.003  # inside
    _, _, gradient = row("espo", log_ratio, 1.0, **fields)
    np.testing.assert_allclose(gradient[0, 1], -2.5 * np.exp(0.003), rtol=1e-6)


def test_espo_limits():
    entropy, vocab_size = np.full((1, 4), np.log(64.0)), 64  # full entropy: the width is alpha
    log_ratio, adv = [0.3, -0.1, 0.2, -0.6], [1.0, -1.0, 2.0, -3.0]
    fields = {"entropy": entropy, "vocab_size": vocab_size, "espo_alpha": 0.04}
    expected = row("gspo_token", log_ratio, adv, clip_low=0.04, clip_high=0.04)
    for share in (0.0, 1.0):  # one group of all tokens: the empty one does not count
        actual = row("espo", log_ratio, adv, espo_top=share, **fields)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(actual[2], expected[2], rtol=1e-5)
    # Two groups of one token: PPO token by token, the width that of its own entropy.
    fields = {"entropy": [[1.0, 3.0]], "vocab_size": vocab_size, "espo_alpha": 0.2}
    width = 0.2 / np.log(64.0) * np.array([1.0, 3.0])  # 0.048 and 0.144
    loss, _, _ = row("espo", [0.1, 0.1], 1.0, espo_top=0.5, **fields)
    np.testing.assert_allclose(loss, [[-(1 + width[0]), -np.exp(0.1)]], rtol=1e-5)


def test_espo_as_printed_multiplies_by_the_token_ratio():
    # One token, s = r: the value is s r = e^0.2, the gradient -s r, with the band wide open.
    fields = {"entropy": [[1.0]], "vocab_size": 64, "espo_alpha": 10.0}
    loss, _, gradient = row("espo", [0.1], 1.0, espo_uses_old=True, **fields)
    np.testing.assert_allclose(loss, [[-np.exp(0.2)]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-np.exp(0.2)]], rtol=1e-5)


@pytest.mark.all
def test_ctpo_prefix_and_band():
    # Prefix products of l = (0.3, -0.1, 0.2): 1.3499, 1.2214, 1.4918; no bounds: -A R_t each.
    prefix = np.exp([0.3, 0.2, 0.4])
    loose = {"ctpo_low": 9.0, "ctpo_high": 9.0}
    loss, _, gradient = row("ctpo", [0.3, -0.1, 0.2], 2.0, **loose)
    np.testing.assert_allclose(loss, [-2 * prefix], rtol=1e-5)
    np.testing.assert_allclose(gradient, [-2 * prefix], rtol=1e-5)
    loss, _, _ = row("ctpo", [0.3, -0.1, 0.2], 2.0, ctpo_geomean=True, **loose)
    np.testing.assert_allclose(loss, [-2 * np.exp([0.3, 0.1, 0.4 / 3])], rtol=1e-5)
    # The upper ends at t = 1, 4, 16, 100 are exp(0.05 sqrt t), the lower ones exp(-0.025 sqrt t).
    high, metrics, _ = row("ctpo", [5.0] + [0.0] * 99, 1.0)
    np.testing.assert_allclose(
        -high[0, np.array([0, 3, 15, 99])], [1.0513, 1.1052, 1.2214, 1.6487], atol=6e-5
    )
    assert metrics["actor/pg_clipfrac"] == 1.0 and metrics["actor/pg_clipfrac_lower"] == 0.0
    low, _, _ = row("ctpo", [-5.0] + [0.0] * 99, -1.0)
    np.testing.assert_allclose(
        low[0, np.array([0, 3, 15, 99])], [0.9753, 0.9512, 0.9048, 0.7788], atol=6e-5
    )
    dual, metrics, gradient = row("ctpo", [5.0] + [0.0] * 99, -1.0)
    np.testing.assert_allclose(dual, -high, rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.zeros((1, 100)))
    assert metrics["actor/pg_clipfrac_lower"] == 1.0
    constant, _, _ = row("ctpo", [5.0] + [0.0] * 99, 1.0, ctpo_power=0.0)
    np.testing.assert_allclose(constant, np.full((1, 100), -np.exp(0.05)), rtol=1e-6)
