"""Where verl 0.9.1 errs or traps, and what we do instead, one test each.

The first assertion of a test is verl's own answer, which verl_bugs.py recorded.
"""

import jax
import numpy as np
import pytest

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import methods
from jaxrl_tis.estimators import (
    advantages, masks, objectives, ppo, ratios, reduce, reinforce, sequence_clipped,
    soft_trust_region, weights,
)
from tests import jitted
from tests.estimators import golden_verl

advantages, masks, mismatch, objectives, ppo = map(
    jitted.Module, (advantages, masks, mismatch, objectives, ppo)
)
ratios, reduce, reinforce, sequence_clipped, soft_trust_region, weights = map(
    jitted.Module, (ratios, reduce, reinforce, sequence_clipped, soft_trust_region, weights)
)

BUGS = golden_verl.GOLDEN["bugs"]
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def row(*values):
    return np.array([values], np.float32)


def ones(x):
    return np.ones(x.shape, bool)


def weight_metrics(log_ratio, level="token", **band):
    entry = "icepop" if "lower" in band else "tis"
    parameters = band if "lower" in band else {"cap": band["upper"]}
    w = weights.WEIGHTS[f"{level}_{entry}"](log_ratio, ones(log_ratio), **parameters)
    return mismatch.importance_weight_metrics(
        w, log_ratio, ones(log_ratio), level=level, **band
    )


def test_sample_size_is_0_where_every_weight_is():
    assert BUGS["icepop_all_out"] == "ZeroDivisionError"
    metrics = weight_metrics(row(2.0, 3.0), lower=0.5, upper=2.0)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_sample_size_is_at_most_1():
    assert BUGS["ess_above_one"] > 30.0
    metrics = weight_metrics(row(-20.0, -20.0), upper=2.0)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_eff_sample_size"], 1.0, **CLOSE)


def test_k1_keeps_verls_inverse_band_and_ratio_has_the_plain_one():
    """rho = 3, so the inverse ratio is 1/3."""
    assert BUGS["inverse_band"] == {"0.25_1.5": [[1]], "0.5_4.0": [[0]]}
    log_ratio = np.log(row(3.0))
    for lower, upper, is_inverse_inside in ((0.25, 1.5, True), (0.5, 4.0, False)):
        arguments = (log_ratio, ones(log_ratio))
        assert masks.token_k1(*arguments, lower=lower, upper=upper) == is_inverse_inside
        assert masks.token_ratio(*arguments, lower=lower, upper=upper) != is_inverse_inside


def test_ratio_mask_judges_the_sum_that_the_weight_uses():
    """log-ratios 30 and -25: verl's mask clamps each of them, its weight only their sum."""
    assert BUGS["clamped_sum"]["kept"] == [[1, 1]]
    log_ratio = row(30.0, -25.0)
    mask, band = ones(log_ratio), {"lower": 0.5, "upper": 2.0}
    w = weights.seq_vanilla(log_ratio, mask)
    np.testing.assert_allclose(w, BUGS["clamped_sum"]["weight"], rtol=1e-4)
    np.testing.assert_allclose(w, np.exp(5.0), rtol=1e-4)
    assert np.all(masks.seq_sum_k1(log_ratio, mask, **band))  # parity: 20 - 20 = 0
    assert not np.any(masks.seq_sum_ratio(log_ratio, mask, **band))


def test_smallest_sequence_ratio_is_clamped():
    assert BUGS["unclamped_min"][0] > 1e86 and BUGS["unclamped_min"][1] < 1e-86
    for log_ratio, exponent in ((200.0, 20.0), (-200.0, -20.0)):
        metrics = weight_metrics(row(log_ratio), "seq", upper=2.0)
        np.testing.assert_allclose(
            metrics["rollout_corr/rollout_is_min"], np.exp(exponent), rtol=1e-5
        )


def test_rows_without_tokens_are_in_no_mean_over_rows():
    """verl's row means over 6 rows, of which one is empty, against ours over 5."""
    verl = BUGS["empty_rows"]
    batch = golden_verl.inputs("empty_row", "float32")
    old, behav, mask = batch["logp_old"], batch["logp_behav"], batch["mask"]
    w = weights.seq_tis(old - behav, mask, cap=2.0)
    ours = mismatch.importance_weight_metrics(w, old - behav, mask, level="seq", upper=2.0)
    ours |= mismatch.offpolicy_metrics(old, behav, mask)
    # an empty row enters with weight 0, log-perplexity 0, perplexity 1 and ratio 1
    for key, empty in (("seq_mean", 0.0), ("ratio_fraction_high", 0.0)):
        want = (5 * float(ours[f"rollout_corr/rollout_is_{key}"]) + empty) / 6
        np.testing.assert_allclose(verl["sequence"][f"rollout_is_{key}"], want, **CLOSE)
    for key, empty in (("training_ppl", 1.0), ("rollout_log_ppl", 0.0), ("ppl_ratio", 1.0)):
        want = (5 * float(ours[f"rollout_corr/{key}"]) + empty) / 6
        np.testing.assert_allclose(verl["offpolicy"][key], want, **CLOSE)
    assert verl["sequence"]["rollout_is_seq_min"] == 0.0
    assert ours["rollout_corr/rollout_is_seq_min"] > 0.0


@pytest.mark.all
def test_a_reward_per_sequence_survives_the_rejection_of_its_last_token():
    """R = (1, 0.5); the token that had the first one was rejected."""
    verl = BUGS["lost_reward"]
    assert verl["gae_returns"][0] == [0, 0, 0] and verl["remax"][0] == [0, 0, 0]
    assert verl["otb_returns"][0] == [0, 0, 0]
    rewards = np.array([1.0, 0.5])
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    group = np.array([0, 0])
    values = np.zeros((2, 3))
    returns = advantages.gae_returns(rewards, mask, values=values)
    np.testing.assert_allclose(returns, [[1, 1, 0], [0.5, 0.5, 0.5]], **CLOSE)
    remax = advantages.ADVANTAGES["remax"](rewards, mask, group, greedy_rewards=np.zeros(2))
    np.testing.assert_allclose(remax, [[1, 1, 0], [0.5, 0.5, 0.5]], **CLOSE)
    for entry in ("dr_grpo", "rloo", "opo", "gpg"):  # verl's outcome estimators keep it as well
        adv = advantages.ADVANTAGES[entry](rewards, mask, group)
        np.testing.assert_allclose(adv, verl[entry], **CLOSE, err_msg=entry)


def test_widths_are_named_and_act():
    """verl ignores clip_ratio beside its defaults of low and high, and DPPO's documented cap 20."""
    verl = BUGS["clip_settings"]
    np.testing.assert_allclose(verl["clip_ratio"], -1.2, **CLOSE)
    np.testing.assert_allclose(verl["low_and_high"], -1.35, **CLOSE)
    logp, logp_old, one = row(np.log(1.35) - 1), row(-1.0), row(1.0)
    loss_bt, _ = ppo.ppo_clip(logp, logp_old, one, one, clip_low=0.5, clip_high=0.5)
    np.testing.assert_allclose(loss_bt, verl["low_and_high"], **CLOSE)
    # ratio 10 from p = exp(-5): -min(10, cap) (log 10 - 5)
    rare = np.log(10.0) - 5.0
    np.testing.assert_allclose(verl["dppo_default"], -3.0 * rare, **CLOSE)
    loss_bt, _ = reinforce.dppo_tv(row(rare), row(-5.0), one, one)
    np.testing.assert_allclose(loss_bt, verl["dppo_cap_20"], **CLOSE)
    np.testing.assert_allclose(loss_bt, -10.0 * rare, **CLOSE)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_nan_at_padding_reaches_nothing(mode):
    assert np.isnan(BUGS["nan_padding"]["seq-mean-token-sum"])
    np.testing.assert_array_equal(np.isnan(BUGS["nan_padding"]["weights"]), [[False, True]])
    mask = row(1.0, 0.0)

    def loss(logp):
        loss_bt, _ = ppo.dual_clip_ppo(logp, row(-1.0, -1.0), row(1.0, 1.0), mask)
        return reduce.aggregate(loss_bt, mask, mode)

    value, gradient = jitted.value_and_grad(loss)(row(-1.0, np.nan))
    np.testing.assert_allclose(value, BUGS["nan_padding"]["token-mean"], **CLOSE)
    np.testing.assert_allclose(gradient, [[-1.0, 0.0]], **CLOSE)
    w = weights.token_tis(row(0.5, np.nan), mask)
    np.testing.assert_allclose(w, [[np.exp(0.5), 0.0]], **CLOSE)


def test_a_batch_without_tokens_has_loss_0():
    verl = BUGS["all_rejected"]
    assert np.all(np.isnan(verl["local"])) and verl["global"] == [0, 0, 0]
    x, mask = row(-1.0, -2.0), row(0.0, 0.0)

    def loss(logp, mode, counts):
        loss_bt, _ = ppo.dual_clip_ppo(logp, x, row(1.0, 1.0), mask)
        group = np.zeros(mask.shape, int)
        return reduce.aggregate(loss_bt, mask, mode, group=group, **counts)

    for mode in reduce.MODES:
        for counts in ({}, {"num_tokens": 4.0, "num_seqs": 2.0}):
            value, gradient = jitted.value_and_grad(loss)(x, mode, counts)
            assert value == 0.0
            np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


def test_rloo_of_a_group_of_one_is_0():
    """verl's loop form keeps R; its vectorised form, like ours, has nothing to compare with."""
    np.testing.assert_allclose(BUGS["rloo_singleton"]["loop"], [[0.7]])
    assert BUGS["rloo_singleton"]["vectorized"] == [[0]]
    adv = advantages.ADVANTAGES["rloo"](np.array([0.7]), row(1.0), np.array([0]))
    assert adv == 0.0


@pytest.mark.parametrize(("verl_name", "entry"), [("geo_mean", "gmpo"), ("sapo", "sapo")])
def test_every_loss_honours_the_aggregation(verl_name, entry):
    first, second = BUGS["ignored_modes"][verl_name]
    assert first == second
    batch = golden_verl.inputs("random", "float32")
    function = (sequence_clipped.OBJECTIVES | soft_trust_region.OBJECTIVES)[entry]
    loss_bt, _ = function(batch["logp"], batch["logp_old"], batch["adv"], batch["mask"])
    token, sequence = (
        float(reduce.aggregate(loss_bt, batch["mask"], mode))
        for mode in ("token-mean", "seq-mean-token-mean")
    )
    assert abs(token - sequence) > 0.01
    if entry == "sapo":  # gmpo's default widths are not verl's
        np.testing.assert_allclose(sequence, second, **CLOSE)


def test_fractions_of_rejected_sequences_share_a_denominator():
    """One of two rows is empty and the other loses a token: verl says 1 per option, 0.5 overall."""
    verl = BUGS["seq_masked_fraction"]
    assert verl["rollout_rs_token_k1_seq_masked_fraction"] == 1
    assert verl["rollout_rs_seq_masked_fraction"] == 0.5
    log_ratio = np.array([[3.0, 0.0], [0.0, 0.0]])
    mask = np.array([[1, 1], [0, 0]], bool)
    kept = masks.token_k1(log_ratio, mask, upper=2.0)
    metrics = mismatch.rejected_fractions(kept, mask)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


@pytest.mark.parametrize("verl_name", ["clip_cov", "kl_cov", "geo_mean"])
def test_log_ratios_stop_at_20_in_every_exponential(verl_name):
    """Log-ratio 25 and A = -1: verl's loss is exp(25), ours exp(20) without gradient."""
    verl = BUGS["unclamped"][verl_name]
    np.testing.assert_allclose(verl["loss"], np.exp(25.0), rtol=1e-5)
    assert verl["gradient"][0][0] > 1e9
    logp, logp_old, adv, mask = row(-1.0, -1.0), row(-26.0, -26.0), row(-1.0, -1.0), row(1.0, 1.0)
    entry, parameters = {
        "clip_cov": (ppo.clip_cov, {"key": jax.random.key(0)}),
        "kl_cov": (ppo.kl_cov, {"kl_cov_coeff": 0.0}),
        "geo_mean": (sequence_clipped.gmpo, {}),
    }[verl_name]

    def loss(logp):
        loss_bt, _ = entry(logp, logp_old, adv, mask, **parameters)
        return reduce.aggregate(loss_bt, mask, "token-mean")

    value, gradient = jitted.value_and_grad(loss)(logp)
    np.testing.assert_allclose(value, np.exp(20.0), rtol=1e-5)
    np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


def test_k3_of_a_distant_token_is_finite_in_float32():
    """Log-ratio 100: exp(100) is no float32."""
    np.testing.assert_allclose(BUGS["unclamped_k3"], np.exp(100.0), rtol=1e-6)
    metrics = mismatch.offpolicy_metrics(row(-1.0), row(-101.0), row(1.0))
    np.testing.assert_allclose(metrics["rollout_corr/k3_kl"], np.exp(80.0), rtol=1e-5)


def test_a_value_at_the_edge_of_its_clip_has_its_full_gradient():
    """V = V_old + clip, G = 2: (V - G) / 2 = -0.75 for one of two tokens; verl passes 3/4 of it."""
    np.testing.assert_allclose(BUGS["value_tie"], [[0.75 * -0.75, -0.875]], **CLOSE)

    def loss(values):
        loss_bt, _ = objectives.value_loss(
            values, row(0.0, 0.0), row(2.0, 2.0), row(1.0, 1.0), clip=0.5
        )
        return reduce.aggregate(loss_bt, row(1.0, 1.0), "token-mean")

    np.testing.assert_allclose(jitted.grad(loss)(row(0.5, 0.25)), [[-0.75, -0.875]], **CLOSE)


def test_equal_returns_have_exactly_no_optimal_baseline_advantage():
    verl = np.array(BUGS["constant_returns"])
    assert np.all(verl > 0.0) and np.all(verl < 1e-6)  # the 1e-8 in the denominator
    shape = (2, 2)
    adv = advantages.ADVANTAGES["otb"](
        np.array([1.0, 1.0]),
        np.ones(shape),
        np.array([0, 0]),
        logp_prox=np.full(shape, -1.0),
        sum_pi_squared=np.full(shape, 0.2),
    )
    np.testing.assert_array_equal(adv, np.zeros(shape))


def test_rows_without_tokens_are_not_in_the_group_of_otb():
    """One row with tokens, one without, no zero tail. verl's otb makes the first its own baseline;
    its tir_otb leaves out the second and has no baseline, like both of ours."""
    verl = BUGS["otb_empty_rows"]
    np.testing.assert_allclose(verl["otb"], np.zeros((2, 2)), atol=1e-6)
    assert verl["tir_otb"] == [[1, 1], [0, 0]]
    for entry in ("otb", "tir_otb"):
        adv = advantages.ADVANTAGES[entry](
            np.array([1.0, 0.0]),
            np.array([[1, 1], [0, 0]], bool),
            np.array([0, 0]),
            logp_prox=np.full((2, 2), -1.0),
            sum_pi_squared=np.full((2, 2), 0.2),
            otb_zero_tail=False,
        )
        np.testing.assert_allclose(adv, verl["tir_otb"], **CLOSE, err_msg=entry)


def test_opo_of_a_group_without_tokens_is_0():
    assert np.all(np.isnan(BUGS["opo_empty_group"]))
    adv = advantages.ADVANTAGES["opo"](
        np.array([0.5, 1.0]), np.zeros((2, 1)), np.array([0, 0])
    )
    np.testing.assert_array_equal(adv, np.zeros((2, 1)))


def test_pass_at_k_of_a_group_of_one_is_0():
    assert BUGS["passk_single"] == "ValueError"
    adv = advantages.ADVANTAGES["grpo_passk"](np.array([0.7]), row(1.0), np.array([0]))
    assert adv == 0.0


def test_one_token_has_no_spread():
    """verl refuses to whiten it and has NaN for the std and the correlation."""
    verl = BUGS["one_token"]
    assert verl["gae"] == "ValueError"
    x, mask = row(-1.0, -1.0), row(1.0, 0.0)
    adv = advantages.ADVANTAGES["gae"](row(1.0, 0.0), mask, np.array([0]), values=0.0 * x)
    np.testing.assert_array_equal(adv, np.zeros((1, 2)))
    metrics = mismatch.probability_metrics(x, x - 0.5, mask)
    for key in ("rollout_probs_diff_std", "rollout_actor_probs_pearson_corr"):
        assert np.isnan(verl["probabilities"][f"training/{key}"])
        assert metrics[f"training/{key}"] == 0.0


def test_estimators_name_the_inputs_that_verls_trainer_forgets_to_fetch():
    """verl's default trainer does not compute sum_pi_squared, and its OTB then fails in a step."""
    for entry in ("otb", "tir_otb"):
        assert "sum_pi_squared" in methods.needs("advantage", entry)


def test_bypass_mode_is_an_argument_and_not_a_side_effect():
    """verl's default trainer ignores every rollout correction in bypass mode. Here the log-probs
    that are passed decide: with logp_old = logp_behav the ratio holds the whole drift."""
    batch = golden_verl.inputs("random", "float32")
    logp, behav, adv, mask = (batch[x] for x in ("logp", "logp_behav", "adv", "mask"))
    w = weights.none(behav - behav, mask)
    loss_bt, _ = ppo.dual_clip_ppo(logp, behav, adv, mask, clip_low=0.2, clip_high=0.28)
    loss = reduce.aggregate(w * loss_bt, mask, "token-mean")
    want = golden_verl.BATCHES["random"]["bypass"]["ppo_clip"]["loss"]
    np.testing.assert_allclose(loss, want, **CLOSE)
    assert not np.any(np.isnan(ratios.zero_padding(w, mask)))
