"""Factors of the ratio, and mismatch by position, distance from tools and turn: by hand."""

import numpy as np
import pytest

from jaxrl_tis.diagnostics import attribution, divergences
from tests import jitted

attribution, divergences = map(jitted.Module, (attribution, divergences))

pytestmark = pytest.mark.compiles

NAN = float("nan")


def chain(engine, staleness, trust_region, logp_behav=-2.0):
    """The four log-probs whose factors are the given ratios, in the order of the arguments."""
    logs = [np.log(np.array(x, np.float32)) for x in (engine, staleness, trust_region)]
    logp_old = logp_behav + logs[0]
    logp_prox = logp_old + logs[1]
    return logp_prox + logs[2], logp_prox, logp_old, np.full_like(logp_old, logp_behav)


# Row 0: products 6, .25; row 1: products 1 and (at padding) 8.
ENGINE = [[4.0, 0.5], [2.0, 2.0]]
STALENESS = [[0.5, 0.5], [0.5, 2.0]]
TRUST_REGION = [[3.0, 1.0], [1.0, 2.0]]
MASK = np.array([[1, 1], [1, 0]])


def test_the_factors_add_up():
    log_probs = chain(ENGINE, STALENESS, TRUST_REGION)
    factors = attribution.split_ratio(*log_probs, MASK)
    assert tuple(factors) == attribution.FACTORS
    expected = np.where(MASK, np.log([ENGINE, STALENESS, TRUST_REGION]), 0.0)
    for value, log_ratio in zip(factors.values(), expected, strict=True):
        np.testing.assert_allclose(value, log_ratio, atol=1e-5)
    np.testing.assert_allclose(
        sum(factors.values()), np.where(MASK, log_probs[0] - log_probs[3], 0.0), atol=1e-5
    )


def test_metrics_of_the_factors():
    log_probs = chain(ENGINE, STALENESS, TRUST_REGION)
    metrics = attribution.factor_statistics(*log_probs, MASK)
    expected = {
        "engine/log_ratio_mean": np.log(4 * 0.5 * 2) / 3,
        "staleness/log_ratio_mean": np.log(0.125) / 3,
        "trust_region/log_ratio_abs_max": np.log(3),
        "engine/log_ratio_abs_mean": np.log(4 * 2 * 2) / 3,
        "engine/ratio_mean_token": 6.5 / 3,
        "engine/ratio_mean_seq": 2.0,
        "engine/tv_token": 0.5 / 3,
        "engine/chi2_token": (16 + 0.25 + 4) / 3 - 1,
        "engine/ess_token": 6.5**2 / (3 * (16 + 0.25 + 4)),
        "product/ratio_mean_token": 7.25 / 3,
        "product/ratio_mean_seq": (1.5 + 1.0) / 2,
    }
    # l = log 6, log .25 and 0: the shares of sum l^2.
    l_k = np.log([6.0, 0.25, 1.0])
    for name, factor in zip(attribution.FACTORS, (ENGINE, STALENESS, TRUST_REGION), strict=True):
        part_k = np.log([*factor[0], factor[1][0]])
        expected[f"{name}/share"] = np.sum(part_k * l_k) / np.sum(l_k**2)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"mismatch/{name}"], value, rtol=1e-4, err_msg=name)
    shares = [metrics[f"mismatch/{factor}/share"] for factor in attribution.FACTORS]
    np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-5)


@pytest.mark.all
def test_the_engine_factor_has_the_metrics_of_the_engine_ratio():
    log_probs = chain(ENGINE, STALENESS, TRUST_REGION)
    metrics = attribution.factor_statistics(*log_probs, MASK)
    same = divergences.divergence_metrics(log_probs[2] - log_probs[3], MASK)
    # The tails of the whole ratio alone: of 4, 1/2 and 2 one is above 2, and none below 1/2.
    tails = [float(same.pop(f"mismatch/{name}")) for name in ("tail_above", "tail_below")]
    np.testing.assert_allclose(tails, [1 / 3, 0.0], rtol=1e-6)
    for name, value in same.items():
        short = name.rpartition("/")[2]
        np.testing.assert_allclose(metrics[f"mismatch/engine/{short}"], value, rtol=1e-6)


def test_buckets_are_powers_of_two():
    np.testing.assert_array_equal(
        attribution.power_of_two_bucket(np.array([0, 1, 2, 3, 4, 7, 8, 2**20])),
        [0, 1, 2, 2, 3, 3, 4, 21],
    )


# Two responses in the packed row, after prompts of one token, with tool tokens T inside:
#   prompt a0 a1 T T a4 a5 pad | prompt b0 b1 pad
SEG = np.array([[1, 1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 0]])
IS_SAMPLED = np.array([[0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]])


def test_positions_and_distances():
    is_sampled = np.array(IS_SAMPLED, bool)
    response_positions = attribution.response_positions
    tool_distances = attribution.tool_distances
    positions = response_positions(IS_SAMPLED, SEG)
    np.testing.assert_array_equal(positions[is_sampled], [0, 1, 4, 5, 0, 1])
    distances = tool_distances(IS_SAMPLED, SEG)
    np.testing.assert_array_equal(distances[is_sampled], [0, 0, 1, 2, 0, 0])
    # The same first response as a row of its own, padded on both sides.
    row = np.array([[0, 0, 1, 1, 0, 0, 1, 1, 0]])
    np.testing.assert_array_equal(response_positions(row)[row > 0], [0, 1, 4, 5])
    np.testing.assert_array_equal(tool_distances(row)[row > 0], [0, 0, 1, 2])


P = np.array([[NAN, 0.5, 0.4, NAN, NAN, 0.9, 0.2, NAN, NAN, 0.8, 0.6, NAN]])
Q = np.array([[NAN, 0.4, 0.4, NAN, NAN, 0.6, 0.4, NAN, NAN, 0.5, 0.3, NAN]])


def check(metrics, prefix, p, q, share):
    """The five statistics of one bucket that holds the given probabilities."""
    p, q = np.array(p), np.array(q)
    log_ratio = np.log(p / q)
    expected = {
        "dp_mean": np.abs(p - q).mean(),
        "dp_max": np.abs(p - q).max(),
        "log_ratio_mean": log_ratio.mean(),
        "log_ratio_abs_mean": np.abs(log_ratio).mean(),
        "token_fraction": share,
    }
    for name, value in expected.items():
        key = f"mismatch/{prefix}/{name}"
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_position_metrics():
    position_metrics = attribution.position_metrics
    metrics = position_metrics(np.log(P), np.log(Q), IS_SAMPLED, SEG, num_buckets=5)
    assert len(metrics) == 5 * 5
    check(metrics, "position_0", [0.5, 0.8], [0.4, 0.5], 2 / 6)
    check(metrics, "position_1", [0.4, 0.6], [0.4, 0.3], 2 / 6)
    check(metrics, "position_4", [0.9, 0.2], [0.6, 0.4], 2 / 6)
    for empty in ("position_2", "position_8"):
        assert all(float(metrics[name]) == 0.0 for name in metrics if f"/{empty}/" in name)
    # Positions beyond the last bucket join it: 1, 4 and 5 in the second of two.
    metrics = position_metrics(np.log(P), np.log(Q), IS_SAMPLED, SEG, num_buckets=2)
    check(metrics, "position_1", [0.4, 0.6, 0.9, 0.2], [0.4, 0.3, 0.6, 0.4], 4 / 6)


def test_after_tool_metrics():
    after_tool_metrics = attribution.after_tool_metrics
    metrics = after_tool_metrics(np.log(P), np.log(Q), IS_SAMPLED, SEG, num_buckets=4)
    assert len(metrics) == 4 * 5
    check(metrics, "after_tool_none", [0.5, 0.4, 0.8, 0.6], [0.4, 0.4, 0.5, 0.3], 4 / 6)
    check(metrics, "after_tool_1", [0.9], [0.6], 1 / 6)
    check(metrics, "after_tool_2", [0.2], [0.4], 1 / 6)
    assert metrics["mismatch/after_tool_4/token_fraction"] == 0.0


def test_turn_metrics():
    turn = np.array([[7, 0, 0, -1, -1, 1, 1, 7, 7, 0, 3, -1]])
    turn_metrics = attribution.turn_metrics
    metrics = turn_metrics(np.log(P), np.log(Q), turn, IS_SAMPLED, num_turns=3)
    assert len(metrics) == 3 * 5
    check(metrics, "turn_0", [0.5, 0.4, 0.8], [0.4, 0.4, 0.5], 3 / 6)
    check(metrics, "turn_1", [0.9, 0.2], [0.6, 0.4], 2 / 6)
    check(metrics, "turn_2", [0.6], [0.3], 1 / 6)  # turn 3 joins the last


def test_entropy_metrics():
    """Each edge belongs to the bucket above it, and an unknown entropy to none."""
    entropy = np.array([[9, 0.0, 0.1, NAN, 9, 0.4999, 2.0, 9, NAN, 0.5, NAN, -1]], np.float32)
    metrics = attribution.entropy_metrics(np.log(P), np.log(Q), entropy, IS_SAMPLED)
    assert len(metrics) == 4 * 5
    check(metrics, "entropy_0", [0.5], [0.4], 1 / 5)
    check(metrics, "entropy_0.1", [0.4, 0.9], [0.4, 0.6], 2 / 5)
    check(metrics, "entropy_0.5", [0.8], [0.5], 1 / 5)
    check(metrics, "entropy_2", [0.2], [0.4], 1 / 5)


def all_metrics(log_probs, mask, turn, seg=None):
    logp_old, logp_behav = log_probs[2:]
    metrics = attribution.factor_statistics(*log_probs, mask, seg)
    metrics |= attribution.position_metrics(logp_old, logp_behav, mask, seg, num_buckets=3)
    metrics |= attribution.after_tool_metrics(logp_old, logp_behav, mask, seg, num_buckets=3)
    metrics |= attribution.turn_metrics(logp_old, logp_behav, turn, mask, num_turns=2)
    return metrics


jitted_metrics = jitted.function(all_metrics)


def make_rows():
    """Four rows of up to nine tokens, one of them empty, with tool tokens inside."""
    rng = np.random.default_rng(4)
    mask = np.arange(9)[None, :] < np.array([9, 4, 0, 7])[:, None]
    mask[0, 2:4] = mask[3, 4] = False
    is_inside = np.flip(np.cumsum(np.flip(mask, axis=1), axis=1), axis=1) > 0
    seg = np.where(is_inside, 1 + np.arange(4)[:, None] % 2, 0)
    turn = np.cumsum(~mask, axis=1)
    log_probs = -rng.exponential(1.0, (4, *mask.shape)) - 1.0
    return np.where(mask, log_probs, NAN).astype(np.float32), mask, turn, seg


def pack(x):
    """Two rows behind each other in one row."""
    return x.reshape(*x.shape[:-2], 2, 18)


def test_packed_rows_padding_and_the_type_of_the_mask():
    log_probs, mask, turn, seg = make_rows()
    expected = jitted_metrics(tuple(log_probs), mask, turn)
    packed = [pack(x) for x in (log_probs, mask.astype(np.float32), turn, seg)]
    metrics = jitted_metrics(tuple(packed[0]), *packed[1:])
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for value in (100.0, -100.0, np.inf, -np.inf):
        poisoned = np.where(mask, log_probs, np.float32(value))
        actual = jitted_metrics(tuple(poisoned), mask, turn)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def test_huge_log_ratios_and_empty_masks():
    log_probs, mask, turn, seg = make_rows()
    for factor in range(3):
        scaled = [pack(x) - (500.0 if i <= factor else 0.0) for i, x in enumerate(log_probs)]
        float_mask = pack(mask.astype(np.float32))
        metrics = jitted_metrics(tuple(scaled), float_mask, pack(turn), pack(seg))
        for name, value in metrics.items():
            assert np.isfinite(value), name
    metrics = jitted_metrics(tuple(log_probs), np.zeros_like(mask), turn)
    for name, value in metrics.items():
        assert value == 0.0, name


def test_nothing_carries_a_gradient():
    log_probs, mask, turn, _ = make_rows()

    def total(log_probs):
        return sum(all_metrics(tuple(log_probs), mask, turn).values())

    gradient = jitted.grad(total)(log_probs)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))

