"""Metrics: verl's numbers, empty batches, and estimates by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import masks, ratios, weights
from tests import jitted

masks, mismatch, ratios, weights = map(jitted.Module, (masks, mismatch, ratios, weights))

pytestmark = pytest.mark.compiles

NAN = float("nan")
OLD = np.array([[-1, -0.5, -2, -0.1], [-0.7, -1.2, -0.3, -9]])
BEHAV = np.array([[-1.2, -0.4, -3, -0.1], [-0.9, -0.6, -0.35, -1]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
# The same two sequences in one packed row, with another's padding between and around.
PACKED_OLD = np.array([[NAN, -1, -0.5, -2, -0.1, NAN, -0.7, -1.2, -0.3, NAN]])
PACKED_BEHAV = np.array([[NAN, -1.2, -0.4, -3, -0.1, NAN, -0.9, -0.6, -0.35, NAN]])
SEG = np.array([[0, 1, 1, 1, 1, 0, 2, 2, 2, 0]])

OFFPOLICY = {
    "training_ppl": 2.270806,
    "training_log_ppl": 0.816667,
    "kl": -0.107143,
    "k3_kl": 0.130858,
    "rollout_ppl": 2.545442,
    "rollout_log_ppl": 0.895833,
    "log_ppl_diff": -0.079167,
    "log_ppl_abs_diff": 0.195833,
    "log_ppl_diff_max": 0.116667,
    "log_ppl_diff_min": -0.275,
    "ppl_ratio": 0.941658,
    "chi2_token": 0.942543,
    "chi2_seq": 3.760799,
}


weight_metrics = mismatch.importance_weight_metrics
offpolicy_metrics = mismatch.offpolicy_metrics
probability_metrics = mismatch.probability_metrics
snis_reward = mismatch.snis_reward
relative_weights = mismatch.relative_weights


def assert_metrics(metrics, expected, prefix):
    for name, value in expected.items():
        np.testing.assert_allclose(
            metrics[prefix + name], value, rtol=2e-5, atol=1e-6, err_msg=name
        )


def test_offpolicy_metrics_of_packed_rows_and_of_empty_rows():
    assert_metrics(
        offpolicy_metrics(PACKED_OLD, PACKED_BEHAV, SEG > 0, SEG), OFFPOLICY, "rollout_corr/"
    )
    empty = np.full((3, 4), NAN)
    rows = [np.concatenate([x, empty]) for x in (OLD, BEHAV)]
    mask = np.concatenate([MASK, np.zeros((3, 4), int)])
    assert_metrics(offpolicy_metrics(*rows, mask), OFFPOLICY, "rollout_corr/")


def test_truncation_counts_ratios_below_the_inverse_of_its_cap_as_low():
    # Of the ratios 0.4, 0.6, 1 and 3 one is below 1 / 2 and one above 2; their mean is 1.25.
    log_ratio = np.log(np.array([[0.4, 0.6, 1.0, 3.0]]))
    w = np.array([[0.4, 0.6, 1.0, 2.0]])
    found = weight_metrics(w, log_ratio, np.ones((1, 4)), level="token", upper=2.0)
    fractions = ("ratio_fraction_low", "ratio_fraction_high", "seq_fraction_low")
    values = [float(found[f"rollout_corr/rollout_is_{name}"]) for name in fractions]
    assert values == [0.25, 0.25, 0.0]
    assert "rollout_corr/rollout_is_oob_ratio" not in found


def test_no_metric_divides_by_zero():
    empty, none = np.full((2, 3), NAN), np.zeros((2, 3))
    everything = offpolicy_metrics(empty, empty, none)
    everything |= probability_metrics(empty, empty, none)
    estimate = snis_reward(np.array([1.0, NAN]), empty, none)
    everything |= {"estimate": estimate[0], "ess": estimate[1]}
    for level in ("token", "seq"):
        everything |= {
            f"{level}/{name}": value
            for name, value in weight_metrics(
                none, empty, none, level=level, upper=2.0, lower=0.5
            ).items()
        }
    for name, value in everything.items():
        assert value == 0.0, name
    # Every token outside the band: all weights are 0 on valid tokens.
    log_ratio, mask = np.full((2, 3), 9.0), np.ones((2, 3))
    w = weights.token_icepop(log_ratio, mask)
    metrics = weight_metrics(w, log_ratio, mask, level="token", upper=5.0, lower=0.5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_the_sample_size_of_the_kept_tokens_counts_the_rejected_ones_as_zero():
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])  # 7 valid tokens

    def kept_size(w, is_accepted):
        w_bt, is_accepted_bt = np.array(w), np.array(is_accepted, bool)
        [(name, value)] = mismatch.kept_sample_size(w_bt, is_accepted_bt, mask).items()
        assert name == "rollout_corr/kept_eff_sample_size"
        return value

    ones, all_kept = [[1.0, 1.0, 1.0, NAN], [1.0] * 4], [[True] * 4] * 2
    assert kept_size(ones, all_kept) == 1.0
    # Five of seven equal weights are left: (5 / 7)^2 / (5 / 7).
    np.testing.assert_allclose(kept_size(ones, [[1, 0, 1, 1], [1, 1, 0, 1]]), 5 / 7, rtol=1e-6)
    # Kept weights 1, 1, 2 of seven tokens: (4 / 7)^2 / (6 / 7); the rejected 9 does not count.
    w = [[1.0, 1.0, 9.0, 9.0], [2.0, 1.0, 1.0, 1.0]]
    np.testing.assert_allclose(
        kept_size(w, [[1, 1, 0, 1], [1, 0, 0, 0]]), 16 / 42, rtol=1e-6
    )
    assert kept_size(ones, [[0] * 4] * 2) == 0.0
    assert kept_size([[0.0] * 4] * 2, all_kept) == 0.0


def test_probability_metrics():
    rng = np.random.default_rng(0)
    p, q = rng.uniform(0.05, 0.95, (2, 3, 5))
    mask = rng.random((3, 5)) < 0.7
    logs = [np.where(mask, np.log(x), NAN) for x in (p, q)]
    metrics = probability_metrics(*logs, mask)
    gap = np.abs(p - q)[mask]
    expected = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_std": gap.std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p[mask], q[mask])[0, 1],
    }
    assert set(metrics) == set(expected)
    assert_metrics(metrics, expected, "")
    same = probability_metrics(logs[0], logs[0], mask)
    np.testing.assert_allclose(same["training/rollout_actor_probs_pearson_corr"], 1.0, rtol=1e-5)
    constant = probability_metrics(
        np.zeros((1, 3)), np.zeros((1, 3)), np.ones((1, 3))
    )
    assert constant["training/rollout_actor_probs_pearson_corr"] == 0.0


def test_self_normalised_reward():
    # Products of ratios 2 * 1, 0.5, and 4 (its second token is padding), rewards 1, 0 and 3:
    # (2 * 1 + 0.5 * 0 + 4 * 3) / 6.5.
    log_ratio = np.log(np.array([[2.0, 1.0], [0.5, 1.0], [4.0, 9.0], [1.0, 1.0]]))
    mask = np.array([[1, 1], [1, 1], [1, 0], [0, 0]])
    rewards = np.array([1.0, 0.0, 3.0, NAN])
    estimate, ess = snis_reward(rewards, log_ratio, mask)
    np.testing.assert_allclose(estimate, 14 / 6.5, rtol=1e-6)
    np.testing.assert_allclose(ess, 6.5**2 / (3 * (4 + 0.25 + 16)), rtol=1e-6)
    # A common factor of the ratios cancels, even one far beyond float32.
    shifted, _ = snis_reward(
        rewards[:2], np.array([[400.0], [400.0]]), np.ones((2, 1))
    )
    np.testing.assert_allclose(shifted, 0.5, rtol=1e-6)


def test_self_normalised_reward_finds_the_learners_expectation():
    rng = np.random.default_rng(3)
    behaviour, learner, reward = (
        np.array([0.5, 0.3, 0.2]),
        np.array([0.2, 0.3, 0.5]),
        np.array([0.0, 1.0, 2.0]),
    )
    actions = rng.choice(3, 20000, p=behaviour)
    log_ratio = np.log(learner / behaviour)[actions][:, None]
    estimate, _ = snis_reward(reward[actions], log_ratio, np.ones_like(log_ratio))
    # Exact 1.3 against 0.7 on the behaviour policy; standard error about 0.01.
    np.testing.assert_allclose(estimate, 1.3, atol=0.04)


REJECTION = {  # option: (lower, upper)
    "token_k1": (0.5, 2.0),
    "token_k2": (None, 0.1),
    "token_k3": (None, 0.1),
    "seq_sum_k1": (0.5, 2.0),
    "seq_sum_k2": (None, 0.5),
    "seq_sum_k3": (None, 0.5),
    "seq_mean_k1": (0.9, 1.1),
    "seq_mean_k2": (None, 0.08),
    "seq_mean_k3": (None, 0.08),
    "seq_max_k2": (None, 0.3),
    "seq_max_k3": (None, 0.3),
}


def rejection_metrics(log_ratio, mask, seg=None, options=tuple(REJECTION)):
    """The metrics of each option and of all together."""
    metrics, criteria = {}, []
    for option in options:
        lower, upper = REJECTION[option]
        band = {"upper": upper} if lower is None else {"lower": lower, "upper": upper}
        metrics |= mismatch.rejection_metrics(log_ratio, mask, seg, option=option, **band)
        criteria.append((option, band))
    is_accepted = masks.all_of(criteria, log_ratio, mask, seg)[0]
    return metrics | mismatch.rejected_fractions(is_accepted, mask, seg)


jitted_rejection = jitted.function(rejection_metrics)


def all_metrics(logp_old, logp_behav, mask, seg=None):
    """Every metric of the module; those of the weights behind the name of their level."""
    log_ratio = logp_old - logp_behav
    metrics = mismatch.offpolicy_metrics(logp_old, logp_behav, mask, seg)
    metrics |= mismatch.probability_metrics(logp_old, logp_behav, mask)
    for level in ("token", "seq"):
        w = weights.WEIGHTS[f"{level}_mis"](log_ratio, mask, seg, lower=0.5, upper=2.0)
        band = {"level": level, "lower": 0.5, "upper": 2.0}
        values = mismatch.importance_weight_metrics(w, log_ratio, mask, seg=seg, **band)
        metrics |= {f"{level} {name}": value for name, value in values.items()}
    rewards = jnp.sum(jnp.where(mask, logp_behav, 0.0), axis=1)
    if seg is not None:
        rewards = ratios.sequence_sum(logp_behav, mask, seg)
    metrics["snis"], metrics["snis_ess"] = mismatch.snis_reward(rewards, log_ratio, mask, seg)
    options = ("token_k1", "seq_max_k3")
    return metrics | rejection_metrics(log_ratio, mask, seg, options)


jitted_metrics = jitted.function(all_metrics)


def make_batch(spread):
    """Six rows of 1 to 7 tokens, one of them empty, one with a tool token inside; NaN around."""
    rng = np.random.default_rng(11)
    mask = np.arange(7)[None, :] < np.array([7, 1, 0, 4, 3, 6])[:, None]
    mask[0, 3] = False
    behav = -rng.exponential(1.0, mask.shape)
    old = behav + spread * rng.normal(size=mask.shape)
    return [np.where(mask, x, NAN).astype(np.float32) for x in (old, behav)], mask


def pack(x):
    """Two rows of the batch behind each other in one row."""
    return x.reshape(x.shape[0] // 2, 2 * x.shape[1])


def packed_ids(mask):
    """Sequence ids of `pack`; 0 after the last valid token of a sequence."""
    is_inside = np.flip(np.cumsum(np.flip(mask, axis=1), axis=1), axis=1) > 0
    return pack(np.where(is_inside, 1 + np.arange(mask.shape[0])[:, None] % 2, 0))


def std(x, ddof=0):
    return np.std(x, ddof=ddof) if len(x) > ddof else 0.0


def expected_rejection(log_ratio, mask, option):
    """The metrics of one option by loops in float64."""
    lower, upper = REJECTION[option]
    level, _, estimator = option.rpartition("_")
    low, high = (np.log(lower), np.log(upper)) if lower else (-np.inf, upper)
    estimates = {
        "k1": lambda x: -x,
        "k2": lambda x: x**2 / 2,
        "k3": lambda x: np.exp(x) - 1 - x,
    }
    reductions = {"token": np.mean, "seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}
    rows = [
        estimates[estimator](np.clip(x[m].astype(np.float64), -20, 20))
        for x, m in zip(log_ratio, mask, strict=True)
        if m.any()
    ]
    stat = np.array([reductions[level](x) for x in rows])
    if level == "token":
        unit = on_tokens = np.concatenate(rows)
        lost_rows = [np.any((x < low) | (x > high)) for x in rows]
    else:
        unit = stat
        on_tokens = np.concatenate([np.full(len(x), s) for x, s in zip(rows, stat, strict=True)])
        lost_rows = (stat < low) | (stat > high)
    metrics = {
        "mean": on_tokens.mean(),
        "std": std(np.clip(on_tokens, low if lower else 0.0, high)),
        "max": unit.max(),
        "min": unit.min(),
        "fraction_high": np.mean(unit > high),
        "fraction_low": np.mean(unit < low),
        "seq_mean": stat.mean(),
        "seq_std": std(stat, ddof=1),
        "seq_max": stat.max(),
        "seq_min": stat.min(),
        "seq_max_deviation": np.abs(stat).max(),
        "seq_fraction_high": np.mean(stat > high),
        "masked_fraction": np.mean((on_tokens < low) | (on_tokens > high)),
        "seq_masked_fraction": np.mean(lost_rows),
    }
    if lower:
        metrics["seq_fraction_low"] = np.mean(stat < low)
    return {f"{option}_{name}": value for name, value in metrics.items()}


@pytest.mark.parametrize("spread", [0.3, 12.0])
def test_rejection_metrics_follow_their_definition(spread):
    (old, behav), mask = make_batch(spread)
    metrics = jitted_rejection(old - behav, mask)
    prefix = "rollout_corr/rollout_rs_"
    names = {"masked_fraction", "seq_masked_fraction"}
    for option in REJECTION:
        expected = expected_rejection(old - behav, mask, option)
        assert_metrics(metrics, expected, prefix)
        names |= set(expected)
    assert set(metrics) == {prefix + name for name in names}


def test_rejected_fractions_of_any_criterion():
    # Rows lose 1 of 3 tokens, none of 1, and 0 of 0; what stands at padding does not count.
    is_accepted = np.array([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    metrics = mismatch.rejected_fractions(is_accepted, mask, option="veto")
    expected = {"veto_masked_fraction": 0.25, "veto_seq_masked_fraction": 0.5}
    assert set(metrics) == {f"rollout_corr/rollout_rs_{name}" for name in expected}
    assert_metrics(metrics, expected, "rollout_corr/rollout_rs_")


def test_a_bound_hit_exactly_keeps_the_token():
    # k1 = log 2 and k2 = log(2)^2 / 2 sit on the bound: neither high nor rejected.
    log_ratio, mask = -np.log(np.array([[2.0, 2.0]])), np.ones((1, 2))
    k2 = float(0.5 * np.log(np.float32(2.0)) ** 2)
    for option, upper in (("token_k1", 2.0), ("seq_mean_k1", 2.0), ("seq_max_k2", k2)):
        metrics = mismatch.rejection_metrics(log_ratio, mask, option=option, upper=upper)
        for name in ("fraction_high", "masked_fraction", "seq_masked_fraction"):
            assert metrics[f"rollout_corr/rollout_rs_{option}_{name}"] == 0.0, (option, name)


def test_packed_rows_and_a_float_mask_give_the_same_metrics():
    for spread in (0.3, 12.0):
        (old, behav), mask = make_batch(spread)
        dense = jitted_metrics(old, behav, mask)
        float_mask = pack(mask.astype(np.float32))
        packed = jitted_metrics(pack(old), pack(behav), float_mask, packed_ids(mask))
        assert set(packed) == set(dense)
        for name, value in dense.items():
            np.testing.assert_allclose(packed[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_padding_does_not_count():
    (old, behav), mask = make_batch(0.3)
    expected = jitted_metrics(old, behav, mask)
    for value in (100.0, -100.0, np.inf, -np.inf):
        poisoned = [np.where(mask, x, np.float32(value)) for x in (old, behav)]
        actual = jitted_metrics(*poisoned, mask)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def test_metrics_of_huge_log_ratios_are_finite():
    (_, logp), mask = make_batch(0.3)
    is_odd = np.arange(mask.size).reshape(mask.shape) % 2 == 1
    for gap in (90.0, 1e4):
        unlikely = (logp - gap).astype(np.float32)
        for is_behind in (is_odd, ~is_odd, np.ones_like(is_odd), np.zeros_like(is_odd)):
            old, behav = np.where(is_behind, unlikely, logp), np.where(is_behind, logp, unlikely)
            for name, value in jitted_metrics(old, behav, mask).items():
                assert np.isfinite(value), (name, gap)
    # Each of 10000 terms of k3 is exp(80): their sum would not be a float32.
    many = np.full((2, 5000), -1.0)
    metrics = offpolicy_metrics(many, many - 200.0, np.ones((2, 5000)))
    np.testing.assert_allclose(metrics["rollout_corr/k3_kl"], np.exp(80.0), rtol=1e-4)


def test_metrics_carry_no_gradient():
    (old, behav), mask = make_batch(0.3)
    gradient = jitted.grad(lambda x: sum(all_metrics(x, behav, mask).values()))
    np.testing.assert_array_equal(gradient(old), np.zeros_like(old))


def test_offpolicy_metrics_without_a_sampler():
    metrics = mismatch.offpolicy_metrics(OLD, None, MASK)
    assert set(metrics) == {"rollout_corr/training_ppl", "rollout_corr/training_log_ppl"}
    names = ("training_ppl", "training_log_ppl")
    assert_metrics(metrics, {name: OFFPOLICY[name] for name in names}, "rollout_corr/")


def test_unknown_names_are_refused():
    log_ratio, mask = OLD - BEHAV, MASK
    with pytest.raises(ValueError, match="seq_max_k1"):
        mismatch.rejection_metrics(log_ratio, mask, option="seq_max_k1", upper=2.0)
    with pytest.raises(ValueError, match="sequence"):
        mismatch.importance_weight_metrics(mask, log_ratio, mask, level="sequence", upper=2.0)


def test_relative_weights():
    # exp(log_w - 500): 1, exp(-1), and 0 for a sample that the learner cannot draw.
    log_w, mask = np.array([500.0, 499.0, -np.inf, NAN]), np.array([1, 1, 1, 0])
    np.testing.assert_allclose(
        relative_weights(log_w, mask), [1.0, np.exp(-1.0), 0.0, 0.0], rtol=1e-6
    )
    nothing = relative_weights(np.full(3, -np.inf), np.ones(3))
    np.testing.assert_array_equal(nothing, np.zeros(3))
