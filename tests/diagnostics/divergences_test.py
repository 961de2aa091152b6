"""Divergences: exact values by enumeration, the bounds they stand for, responses by hand."""

import itertools

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.diagnostics import divergences
from tests import jitted

divergences = jitted.Module(divergences)

NAN = float("nan")

divergence_metrics = divergences.divergence_metrics
response_metrics = divergences.response_metrics
percentile_metrics = divergences.percentile_metrics
sequence_percentiles = divergences.sequence_percentiles


def enumerate_sequences():
    """All sequences of two tokens, each as often as mu draws it in 16 draws.

    mu(1) = 1/4 at both positions; pi(1) depends on the prefix. Returns the log-ratio [16, 2] and
    for each of the four sequences mu and pi.
    """
    mu = {0: 3 / 4, 1: 1 / 4}
    pi_first = {0: 0.6, 1: 0.4}
    pi_second = {0: {0: 0.9, 1: 0.1}, 1: {0: 0.2, 1: 0.8}}
    rows, mu_s, pi_s = [], [], []
    for first, second in itertools.product((0, 1), repeat=2):
        log_ratio = [
            np.log(pi_first[first] / mu[first]),
            np.log(pi_second[first][second] / mu[second]),
        ]
        mu_s.append(mu[first] * mu[second])
        pi_s.append(pi_first[first] * pi_second[first][second])
        rows += [log_ratio] * round(16 * mu_s[-1])
    return np.array(rows, np.float32), np.array(mu_s), np.array(pi_s)


def test_divergences_equal_those_of_the_distributions():
    log_ratio, mu_s, pi_s = enumerate_sequences()
    metrics = divergence_metrics(log_ratio, np.ones_like(log_ratio))
    rho_s = pi_s / mu_s
    # TV of the tokens: |.6 - .75| = .15 at the first; at the second |.9 - .75| = .15 after 0,
    # |.2 - .75| = .55 after 1, that is .75 * .15 + .25 * .55 = .25 on average.
    expected = {
        "mismatch/tv_seq": 0.5 * np.abs(mu_s - pi_s).sum(),
        "mismatch/tv_token": (0.15 + 0.25) / 2,
        "mismatch/tv_seq_bound": 0.15 + 0.25,
        "mismatch/ratio_mean_seq": 1.0,
        "mismatch/ratio_mean_token": 1.0,
        "mismatch/ess_seq": 1.0 / np.sum(mu_s * rho_s**2),
        "mismatch/ess_token": 1.0 / np.mean(np.exp(2.0 * log_ratio)),
        "mismatch/tail_above": np.mean(log_ratio > np.log(2.0)),
        "mismatch/tail_below": np.mean(log_ratio < -np.log(2.0)),
        "mismatch/log_ratio_abs_mean": np.abs(log_ratio).mean(),
        "mismatch/log_ratio_abs_max": np.log(0.75 / 0.2),
        "rollout_corr/chi2_seq": np.sum(pi_s**2 / mu_s) - 1.0,
        "rollout_corr/chi2_token": np.mean(np.exp(2.0 * log_ratio)) - 1.0,
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_the_bounds_hold_and_are_attained():
    log_ratio, mu_s, pi_s = enumerate_sequences()
    metrics = divergence_metrics(log_ratio, np.ones_like(log_ratio))
    tv, chi2 = metrics["mismatch/tv_seq"], metrics["rollout_corr/chi2_seq"]
    assert tv <= metrics["mismatch/tv_seq_bound"]
    rng, rho_s = np.random.default_rng(0), pi_s / mu_s
    for _ in range(20):
        f_sd = rng.normal(size=(4, 3))  # a vector for each sequence, such as a gradient
        largest = np.linalg.norm(f_sd, axis=1).max()
        bias = np.linalg.norm((mu_s - pi_s) @ f_sd)
        assert bias <= 2.0 * largest * tv + 1e-6
        second_moment = np.sum(mu_s * np.sum((rho_s[:, None] * f_sd) ** 2, axis=1))
        assert second_moment <= largest**2 * (1.0 + chi2) + 1e-6
    # The worst reward in [0, 1] pays where the sampler goes too often; the worst f has norm 1.
    np.testing.assert_allclose((mu_s - pi_s) @ (mu_s > pi_s), tv, rtol=1e-5)
    np.testing.assert_allclose(np.sum(mu_s * rho_s**2), 1.0 + chi2, rtol=1e-5)


def test_total_variation_where_the_policies_share_no_token():
    # rho = 0: the learner never draws what the sampler drew, as far apart as two policies can be.
    log_ratio = np.full((2, 3), -np.inf)
    metrics = divergence_metrics(log_ratio, np.ones((2, 3)))
    for name in ("tv_token", "tv_seq", "tv_seq_bound"):
        assert metrics[f"mismatch/{name}"] == 1.0, name
    assert metrics["mismatch/ess_token"] == 0.0
    assert metrics["mismatch/ess_seq"] == 0.0


def test_the_tails_of_both_sides_by_hand():
    # Above 2: 2.01 and 9. Below 1/2: 0.49. The entry at padding is no token.
    ratio = np.array([[2.01, 1.99, 9.0, 0.51], [0.49, 1.0, 1.0, 100.0]])
    metrics = divergence_metrics(np.log(ratio), np.array([[1, 1, 1, 1], [1, 1, 1, 0]]))
    np.testing.assert_allclose(metrics["mismatch/tail_above"], 2 / 7, rtol=1e-6)
    np.testing.assert_allclose(metrics["mismatch/tail_below"], 1 / 7, rtol=1e-6)


def test_sample_sizes_need_no_clamp():
    # Sequence ratios e^300, e^300 and e^299: (2 + 1/e)^2 / (3 (2 + 1/e^2)).
    log_ratio = np.array([[300.0, 0.0], [150.0, 150.0], [299.0, NAN]])
    metrics = divergence_metrics(log_ratio, np.array([[1, 1], [1, 1], [1, 0]]))
    expected = (2 + np.exp(-1)) ** 2 / (3 * (2 + np.exp(-2)))
    np.testing.assert_allclose(metrics["mismatch/ess_seq"], expected, rtol=1e-5)
    for name, value in metrics.items():
        assert np.isfinite(value), name


def test_responses():
    # |dp| of the first response .1, .6 and of the second .2; the third has no token.
    p = np.array([[0.5, 0.2, NAN], [0.9, NAN, NAN], [NAN, NAN, NAN]])
    q = np.array([[0.4, 0.8, NAN], [0.7, NAN, NAN], [NAN, NAN, NAN]])
    mask = ~jnp.isnan(p)
    metrics = response_metrics(np.log(p), np.log(q), mask)
    expected = {
        "dp_max/mean": (0.6 + 0.2) / 2,
        "dp_max/max": 0.6,
        "dp_max/fraction_high": 0.5,
        "dp_mean/mean": (0.35 + 0.2) / 2,
        "dp_mean/max": 0.35,
        "dp_high": 1 / 3,
    }
    assert set(metrics) == {f"mismatch/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"mismatch/{name}"], value, rtol=1e-5, err_msg=name)
    max_bs, mean_bs = divergences.response_gaps(np.log(p), np.log(q), mask)
    np.testing.assert_allclose(max_bs, [[0.6], [0.2], [0.0]], rtol=1e-5)
    np.testing.assert_allclose(mean_bs, [[0.35], [0.2], [0.0]], rtol=1e-5)


def make_rows():
    """Log-probs of 3 packed rows with 4 places of up to 30 tokens; NaN outside the mask."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 30, (3, 4))
    lengths[0] = (30, 1, 0, 2)
    place = np.repeat(np.arange(4), 30)[None, :]
    offset = np.tile(np.arange(30), 4)[None, :]
    is_inside = offset < lengths[:, place[0]]
    seg = np.where(is_inside, place + 1, 0)
    mask = is_inside & (rng.random(seg.shape) < 0.8)  # tool tokens in between
    p, q = rng.uniform(0.01, 1.0, (2, *seg.shape))
    logs = [np.where(mask, np.log(x), NAN).astype(np.float32) for x in (p, q)]
    return logs, mask, seg


def unpack(x):
    """Each place of the rows as a row of its own."""
    return x.reshape(12, 30)


def test_percentiles_are_those_of_numpy():
    percentiles = (0, 50, 95, 99, 100)
    (old, behav), mask, seg = make_rows()
    gap = np.abs(np.exp(old) - np.exp(behav))
    actual = sequence_percentiles(gap, mask, seg, percentiles=percentiles)
    dense = sequence_percentiles(unpack(gap), unpack(mask), percentiles=percentiles)
    assert actual.shape == (5, 3, 120)
    np.testing.assert_allclose(dense[:, :, 0].reshape(5, 3, 4), actual[:, :, :4], rtol=1e-6)
    np.testing.assert_array_equal(actual[:, :, 4:], 0.0)
    for row in range(3):
        for place in range(4):
            x = gap[row][(seg[row] == place + 1) & mask[row]]
            expected = np.percentile(x, percentiles) if len(x) else np.zeros(5)
            np.testing.assert_allclose(actual[:, row, place], expected, rtol=1e-5)


def test_percentile_metrics():
    # 101 tokens with |dp| = 0, .001, ..., .1: the percentiles are .095 and .099; and one token.
    p, q, mask = np.full((2, 101), 0.5), np.full((2, 101), 0.5), np.ones((2, 101), int)
    p[0] += np.arange(101) / 1000
    p[1, 0] = 0.7
    mask[1, 1:] = 0
    metrics = percentile_metrics(np.log(p), np.log(q), mask)
    expected = {
        "dp_p95/mean": (0.095 + 0.2) / 2,
        "dp_p95/max": 0.2,
        "dp_p99/mean": (0.099 + 0.2) / 2,
        "dp_p99/max": 0.2,
    }
    assert set(metrics) == {f"mismatch/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"mismatch/{name}"], value, rtol=1e-5, err_msg=name)


def all_metrics(old, behav, mask, seg=None):
    metrics = divergences.divergence_metrics(old - behav, mask, seg)
    metrics |= divergences.response_metrics(old, behav, mask, seg)
    return metrics | divergences.percentile_metrics(old, behav, mask, seg)


jitted_metrics = jitted.function(all_metrics)


def test_packed_rows_padding_and_the_type_of_the_mask():
    (old, behav), mask, seg = make_rows()
    expected = jitted_metrics(unpack(old), unpack(behav), unpack(mask))
    float_mask = mask.astype(np.float32)
    packed = jitted_metrics(old, behav, float_mask, seg)
    for name, value in expected.items():
        np.testing.assert_allclose(packed[name], value, rtol=1e-5, err_msg=name)
    for value in (100.0, -100.0, np.inf, -np.inf):
        poisoned = [np.where(mask, x, np.float32(value)) for x in (old, behav)]
        actual = jitted_metrics(*poisoned, float_mask, seg)
        for name in expected:
            np.testing.assert_array_equal(actual[name], packed[name], err_msg=name)


def test_without_a_valid_token_every_metric_is_zero():
    empty, none = np.full((3, 120), NAN, np.float32), np.zeros((3, 120), np.float32)
    for name, value in jitted_metrics(empty, empty, none, none.astype(int)).items():
        assert value == 0.0, name


def test_metrics_carry_no_gradient():
    (old, behav), mask, seg = make_rows()
    gradient = jitted.grad(lambda x: sum(all_metrics(x, behav, mask, seg).values()))
    np.testing.assert_array_equal(gradient(old), np.zeros_like(old))
