"""Metrics: verl's numbers, empty batches, and estimates by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import diagnostics
from jaxrl_tis.estimators import weights

NAN = float("nan")
OLD = jnp.array([[-1, -0.5, -2, -0.1], [-0.7, -1.2, -0.3, -9]])
BEHAV = jnp.array([[-1.2, -0.4, -3, -0.1], [-0.9, -0.6, -0.35, -1]])
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 1, 0]])
# The same two sequences in one packed row, with another's padding between and around.
PACKED_OLD = jnp.array([[NAN, -1, -0.5, -2, -0.1, NAN, -0.7, -1.2, -0.3, NAN]])
PACKED_BEHAV = jnp.array([[NAN, -1.2, -0.4, -3, -0.1, NAN, -0.9, -0.6, -0.35, NAN]])
SEG = jnp.array([[0, 1, 1, 1, 1, 0, 2, 2, 2, 0]])

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


weight_metrics = jax.jit(diagnostics.importance_weight_metrics, static_argnames="level")
offpolicy_metrics = jax.jit(diagnostics.offpolicy_metrics)


def assert_metrics(metrics, expected, prefix):
    for name, value in expected.items():
        np.testing.assert_allclose(
            metrics[prefix + name], value, rtol=2e-5, atol=1e-6, err_msg=name
        )


def test_offpolicy_metrics_of_verl():
    metrics = offpolicy_metrics(OLD, BEHAV, MASK)
    assert set(metrics) == {f"rollout_corr/{name}" for name in OFFPOLICY}
    assert_metrics(metrics, OFFPOLICY, "rollout_corr/")


def test_offpolicy_metrics_of_packed_rows_and_of_empty_rows():
    assert_metrics(
        offpolicy_metrics(PACKED_OLD, PACKED_BEHAV, SEG > 0, SEG), OFFPOLICY, "rollout_corr/"
    )
    empty = jnp.full((3, 4), NAN)
    rows = [jnp.concatenate([x, empty]) for x in (OLD, BEHAV)]
    mask = jnp.concatenate([MASK, jnp.zeros((3, 4), int)])
    assert_metrics(offpolicy_metrics(*rows, mask), OFFPOLICY, "rollout_corr/")


TOKEN = {
    "mean": 1.135389,
    "max": 2.0,
    "min": 0.548812,
    "std": 0.411441,
    "eff_sample_size": 0.883925,
    "ratio_fraction_high": 0.142857,
    "ratio_fraction_low": 0.0,
    "seq_mean": 1.111028,
    "seq_std": 0.241169,
    "seq_max_deviation": 0.28156,
}
SEQ = {
    "mean": 1.444866,
    "max": 3.004166,
    "min": 0.704688,
    "std": 0.641013,
    "eff_sample_size": 0.835545,
    "ratio_fraction_high": 0.5,
    "seq_fraction_high": 0.5,
}
ICEPOP = {"oob_ratio": 0.285714, "eff_sample_size": 0.704867, "std": 0.499072}


@pytest.mark.parametrize("is_packed", [False, True])
def test_weight_metrics_of_verl(is_packed):
    old, behav, mask, seg = (
        (PACKED_OLD, PACKED_BEHAV, SEG > 0, SEG) if is_packed else (OLD, BEHAV, MASK, None)
    )
    log_ratio, prefix = old - behav, "rollout_corr/rollout_is_"
    w = weights.token_tis(log_ratio, mask, seg, cap=2.0)
    metrics = weight_metrics(w, log_ratio, mask, level="token", upper=2.0, seg=seg)
    assert_metrics(metrics, TOKEN, prefix)
    assert prefix + "oob_ratio" not in metrics
    w = weights.seq_tis(log_ratio, mask, seg, cap=2.0)
    metrics = weight_metrics(w, log_ratio, mask, level="seq", upper=2.0, seg=seg)
    assert_metrics(metrics, SEQ, prefix)
    w = weights.token_icepop(log_ratio, mask, seg, lower=0.6, upper=2.0)
    metrics = weight_metrics(w, log_ratio, mask, level="token", upper=2.0, lower=0.6, seg=seg)
    assert_metrics(metrics, ICEPOP, prefix)


def test_empty_rows_do_not_count_in_the_weight_metrics():
    log_ratio = jnp.concatenate([OLD - BEHAV, jnp.full((5, 4), NAN)])
    mask = jnp.concatenate([MASK, jnp.zeros((5, 4), int)])
    w = weights.seq_tis(log_ratio, mask, cap=2.0)
    metrics = weight_metrics(w, log_ratio, mask, level="seq", upper=2.0)
    assert_metrics(metrics, SEQ, "rollout_corr/rollout_is_")


def test_effective_sample_size():
    ones = jnp.ones(4)
    assert diagnostics.effective_sample_size(ones, ones) == 1.0
    # (.5 + 1 + 2 + 4)^2 / (4 * (.25 + 1 + 4 + 16)) = 56.25 / 85
    np.testing.assert_allclose(
        diagnostics.effective_sample_size(jnp.array([0.5, 1, 2, 4]), ones), 0.6617647, rtol=1e-6
    )
    np.testing.assert_allclose(
        diagnostics.effective_sample_size(jnp.array([1.0, 0, 0, 0]), ones), 0.25, rtol=1e-6
    )
    # Weights of any size, also where their square leaves float32.
    for scale in (2e-9, 1e-30, 1e30):
        np.testing.assert_allclose(
            diagnostics.effective_sample_size(scale * ones, ones), 1.0, rtol=1e-6
        )
    assert diagnostics.effective_sample_size(0.0 * ones, ones) == 0.0
    assert diagnostics.effective_sample_size(ones, 0.0 * ones) == 0.0


def test_no_metric_divides_by_zero():
    empty, none = jnp.full((2, 3), NAN), jnp.zeros((2, 3))
    everything = offpolicy_metrics(empty, empty, none)
    everything |= diagnostics.probability_metrics(empty, empty, none)
    estimate = diagnostics.snis_reward(jnp.array([1.0, NAN]), empty, none)
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
    log_ratio, mask = jnp.full((2, 3), 9.0), jnp.ones((2, 3))
    w = weights.token_icepop(log_ratio, mask)
    metrics = weight_metrics(w, log_ratio, mask, level="token", upper=5.0, lower=0.5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_probability_metrics():
    rng = np.random.default_rng(0)
    p, q = rng.uniform(0.05, 0.95, (2, 3, 5))
    mask = rng.random((3, 5)) < 0.7
    logs = [jnp.where(mask, jnp.log(x), NAN) for x in (p, q)]
    metrics = jax.jit(diagnostics.probability_metrics)(*logs, mask)
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
    same = diagnostics.probability_metrics(logs[0], logs[0], mask)
    np.testing.assert_allclose(same["training/rollout_actor_probs_pearson_corr"], 1.0, rtol=1e-5)
    constant = diagnostics.probability_metrics(
        jnp.zeros((1, 3)), jnp.zeros((1, 3)), jnp.ones((1, 3))
    )
    assert constant["training/rollout_actor_probs_pearson_corr"] == 0.0


def test_self_normalised_reward():
    # Products of ratios 2 * 1, 0.5, and 4 (its second token is padding), rewards 1, 0 and 3:
    # (2 * 1 + 0.5 * 0 + 4 * 3) / 6.5.
    log_ratio = jnp.log(jnp.array([[2.0, 1.0], [0.5, 1.0], [4.0, 9.0], [1.0, 1.0]]))
    mask = jnp.array([[1, 1], [1, 1], [1, 0], [0, 0]])
    rewards = jnp.array([1.0, 0.0, 3.0, NAN])
    estimate, ess = jax.jit(diagnostics.snis_reward)(rewards, log_ratio, mask)
    np.testing.assert_allclose(estimate, 14 / 6.5, rtol=1e-6)
    np.testing.assert_allclose(ess, 6.5**2 / (3 * (4 + 0.25 + 16)), rtol=1e-6)
    # A common factor of the ratios cancels, even one far beyond float32.
    shifted, _ = diagnostics.snis_reward(
        rewards[:2], jnp.array([[400.0], [400.0]]), jnp.ones((2, 1))
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
    estimate, _ = diagnostics.snis_reward(reward[actions], log_ratio, np.ones_like(log_ratio))
    # Exact 1.3 against 0.7 on the behaviour policy; standard error about 0.01.
    np.testing.assert_allclose(estimate, 1.3, atol=0.04)
