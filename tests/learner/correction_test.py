"""From a scored rollout batch to advantages, weights and the measured gap, against NumPy.

Logarithms are in float64 here; the rows are the ragged ones of the update's tests.
"""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from jaxrl_tis.diagnostics import correction_metrics
from jaxrl_tis.estimators import counts, loss, methods, presets, ratios
from jaxrl_tis.estimators.traits import Traits
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.batch_layout import update_fields
from jaxrl_tis.validate import validate
from tests import tiny
from tests.learner.step_test import CAP, CONFIG, B, T, batch, fields

pytestmark = pytest.mark.compiles


@functools.cache
def rollout():
    """A rollout batch: 8 rows in 3 groups, logp_old - logp_behav of every size."""
    data = batch()
    return {
        "mask": data["mask"], "sampled": data["mask"],
        "logp_behav": data["logp_behav"], "logp_old": data["logp_old"],
        "logp_prox": data["logp_old"],
        "rewards": np.array([1, 0, 0.5, 2, 2, -1, 0, 3], np.float32),
        "group": np.array([4, 4, 4, 1, 1, 9, 9, 9], np.int32),
        "version": np.where(np.arange(T) < 5, 3, 4)[None].repeat(B, axis=0).astype(np.int32),
        "current_version": np.full((B, 1), 6, np.int32),
    }


def prepared(data=None, **changes):
    out = correction.make_prepare(correction.parse(fields(**changes)))(data or rollout())
    return jax.device_get(out)


def update_loss(c, logp, entropy, batch, num_tokens, num_seqs):
    """(loss, metrics) of an update, as `step.make_train_step` computes them of log-probs."""
    spec = correction.loss_spec(c, batch)
    value, metrics = loss.compute_loss(
        logp, correction.with_key(c, batch), spec, entropy=entropy, num_tokens=num_tokens,
        num_seqs=num_seqs,
    )
    return value, metrics | correction_metrics.drift_metrics(logp, batch)


def log_ratio():
    data = rollout()
    return np.where(data["mask"], data["logp_old"] - data["logp_behav"], 0).astype(np.float64)


def test_bypass_puts_the_sampler_in_the_ratio_and_weighs_nothing():
    out, metrics = prepared(centre="behav", weight="none")
    data, mask = rollout(), rollout()["mask"]
    assert "weights" not in out  # the loss weighs the drift at every update
    c = correction.parse(fields(centre="behav", weight="none", objective="ppo"))
    _, found = update_loss(c, data["logp_old"], None, data | out, 1.0, 1.0)
    assert found["actor/ppo_kl"] == pytest.approx(-log_ratio()[mask].mean(), rel=1e-4)
    # The gap is measured all the same, between the learner and the sampler.
    assert metrics["rollout_corr/kl"] == pytest.approx(-log_ratio()[mask].mean(), rel=1e-4)


@pytest.mark.cases("seq_tis(cap=1.2)-None", "token_mis(lower=0.5)-band1")
@pytest.mark.parametrize("weight, band", [
    ("seq_tis(cap=1.2)", None), ("token_mis(lower=0.5)", (0.5, 2.0)), ("token_mis", (0.0, 2.0)),
    ("seq_icepop", (0.5, 5.0)), ("none", None),
])
def test_other_weights(weight, band):
    out, _ = prepared(weight=weight)
    mask, z = rollout()["mask"], log_ratio()
    raw = np.exp(z.sum(1, keepdims=True) if weight.startswith("seq") else z)
    if weight == "none":
        expected = np.ones_like(z)
    elif band is None:
        expected = np.minimum(raw, CAP)
    else:
        expected = np.where((raw >= band[0]) & (raw <= band[1]), raw, 0)
    np.testing.assert_allclose(out["weights"], expected * mask, rtol=1e-4, atol=1e-7)


def test_each_factor_has_its_weight_and_its_counts():
    data, age = rollout(), np.where(np.arange(T) % 2, 0.2, -0.3)
    data |= {"logp_prox": data["logp_old"] + age.astype(np.float32)}
    chosen = dict(preset="factored", weight="token_tis(cap=1.2)", staleness_weight="token_tis(cap=1.1)")
    out, metrics = prepared(data, centre="prox", objective="ppo", masks="", **chosen)
    engine, mask = np.exp(log_ratio()), data["mask"]
    expected = np.minimum(engine, 1.2) * np.minimum(np.exp(age), 1.1)
    np.testing.assert_allclose(out["weights"], expected * mask, rtol=1e-5)
    is_odd = np.broadcast_to(np.arange(T) % 2, mask.shape)[mask]
    assert metrics["correction/weight/truncated"] == (engine > 1.2)[mask].sum()
    assert metrics["correction/staleness_weight/truncated"] == is_odd.sum()
    mean = (np.minimum(engine, 1.2) * mask).sum() / mask.sum()  # of the engine's weight alone
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_mean"], mean, rtol=1e-5)
    assert not any("staleness_weight" in name for name in prepared()[1])


@pytest.mark.parametrize("centre", ["old", "behav"])
def test_the_optimal_baseline_is_that_of_the_policy_and_of_all_answers(centre):
    """Two answers of one token: score norms 1 - 2 pi + sum pi^2 of 0.5 and 0.32, rewards 1 and 0. Weights of
    the centre old pi_old / mu: 1 and 2. Of behav pi / mu: 2 and 1. The second is not trained on."""
    one = lambda *x: np.array(x, np.float32)[:, None]
    data = {
        "mask": one(1, 0) > 0, "sampled": one(1, 1) > 0, "rewards": one(1, 0)[:, 0],
        "group": np.zeros(2, np.int32), "version": np.zeros((2, 1), np.int32),
        "current_version": np.zeros((2, 1), np.int32), "sum_pi_squared": one(0.5, 0.52),
        "logp_prox": np.log(one(0.5, 0.6)), "logp_old": np.log(one(0.25, 1.0)),
    }
    data["logp_behav"] = np.log(one(0.25, 0.5)) if centre == "old" else np.log(one(0.25, 0.6))
    out, _ = prepared(
        data, advantage="otb", centre=centre, weight="token_tis(cap=9.0)", objective="reinforce",
    )
    norms = (0.5, 4 * 0.32) if centre == "old" else (4 * 0.5, 0.32)
    assert out["adv"][0, 0] == pytest.approx(1 - norms[0] / sum(norms), rel=1e-4)


@pytest.mark.parametrize("centre", ["old", "behav"])
def test_tokens_that_an_update_rejects_stay_in_every_denominator(centre):
    c = correction.parse(fields(centre=centre, masks="trm(trm_delta=1.0)", weight="none"))
    assert correction.loss_spec(c, {}).rejected_in_denominator


def test_batch_normalised_weights_have_mean_one():
    out, metrics = prepared(batch_normalize=True)
    plain, plain_metrics = prepared()
    mask = rollout()["mask"]
    assert out["weights"][mask].mean() == pytest.approx(1, abs=1e-5)
    factor = metrics["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx(plain["weights"][mask].mean(), rel=1e-5)
    name = "rollout_corr/rollout_is_mean"  # of the weights as they were
    assert metrics[name] == pytest.approx(factor, rel=1e-5) != pytest.approx(1, abs=1e-3)
    assert metrics[name] == pytest.approx(plain_metrics[name], rel=1e-5)


def test_gae_and_returns():
    data = rollout() | {"values": batch()["values"]}
    out, _ = prepared(data, advantage="gae(gamma=0.9, lam=0.8)")
    advantages, returns = np.zeros((B, T)), np.zeros((B, T))
    for b in range(B):
        following, trace = 0.0, 0.0  # value of, and advantage at, the next valid token
        for i, t in enumerate(np.flatnonzero(data["mask"][b])[::-1]):
            reward = data["rewards"][b] if i == 0 else 0.0
            delta = reward + 0.9 * following - data["values"][b, t]
            trace = delta + 0.9 * 0.8 * trace
            advantages[b, t], returns[b, t] = trace, trace + data["values"][b, t]
            following = data["values"][b, t]
    valid = advantages[data["mask"]]
    white = (advantages - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8) * data["mask"]
    np.testing.assert_allclose(out["returns"], returns, atol=1e-5)
    np.testing.assert_allclose(out["adv"], white, atol=1e-4)


@pytest.mark.cases("reward")
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_rewards_of_answers_that_are_left_out_stay_in_their_group(placement):
    """Row 0 is left out by the mask alone, as a truncated answer is. The others of its group have the
    advantages that they had, with the KL in the loss or in the reward; so has the batch its rewards."""
    changes = dict(advantage="dr_grpo", kl="k1", kl_coeff=0.1, kl_placement=placement)
    data = rollout() | {"logp_ref": rollout()["logp_old"] - 0.5}
    whole, measured = prepared(data, **changes)
    left_out = np.arange(B) == 0
    part, again = prepared(data | {"mask": data["mask"] & ~left_out[:, None]}, **changes)
    np.testing.assert_array_equal(part["adv"][1:], whole["adv"][1:])
    assert np.abs(whole["adv"][1:3]).max() > 0.1
    for name in ("critic/score/mean", "critic/rewards/mean", "critic/score/max"):
        assert again[name] == measured[name]
    assert again["rollout_corr/kl"] != measured["rollout_corr/kl"]  # of what is trained on
    assert again["reward/learner_snis"] != 0


def test_rejected_tokens_leave_the_mask_or_count_with_weight_zero():
    z, mask = log_ratio(), rollout()["mask"]
    keep = mask & (np.abs(z) <= np.log(1.3))  # a band symmetric in the logarithm
    assert 0 < keep.sum() < mask.sum()
    dropped, metrics = prepared(masks="token_k1(upper=1.3)")
    np.testing.assert_array_equal(dropped["mask"], keep)
    counted, _ = prepared(masks="token_k1(upper=1.3)", rejected_in_denominator=True)
    assert "mask" not in counted
    expected = np.minimum(np.exp(z), CAP) * keep
    for out in (dropped, counted):
        np.testing.assert_allclose(out["weights"], expected, rtol=1e-5)
    rejected = 1 - keep.sum() / mask.sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected, rel=1e-5)
    kept = expected[mask]  # the rejected valid tokens are zeros among them
    assert metrics["rollout_corr/kept_eff_sample_size"] == pytest.approx(
        kept.mean() ** 2 / (kept**2).mean(), rel=1e-4
    )
    name = "rollout_corr/rollout_rs_token_k1_fraction_high"
    assert metrics[name] == pytest.approx((z < -np.log(1.3)).sum() / mask.sum(), rel=1e-5)


@pytest.mark.all
@pytest.mark.parametrize("aggregation, expected", [
    ("token-mean", 0.9 / 4), ("token-sum", 0.9), ("seq-mean-token-sum", 0.9 / 2),
    ("seq-mean-token-sum-norm", 0.9 / 2 / 3), ("seq-mean-token-mean", 0.9 / 3 / 2),
    ("prompt-mean", 0.9 / 3 / 2),
])
@pytest.mark.parametrize("is_packed, rejected_in_denominator", [(False, False), (True, True)])
def test_around_the_sampler_rejected_tokens_stay_in_every_denominator(
    aggregation, expected, is_packed, rejected_in_denominator
):
    """-A log pi is 0.3, 0.6 and 0.9 | 0.5 at log pi = -1; the third token and the other sequence,
    e from the sampler, are rejected."""
    adv = np.array([[0.3, 0.6, 0.9], [0.5, 9.0, 9.0]], np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
    far = np.array([[0, 0, 1], [1, 0, 0]], np.float32)
    logp = np.full((2, 3), -1, np.float32)
    data = {"adv": adv, "mask": mask, "logp_behav": logp - far, "logp_old": logp, "logp_prox": logp}
    data["group"] = np.array([[6, 6, 6], [2, 2, 2]])
    if is_packed:
        packed = lambda x: np.concatenate([x[0], x[1, :1]])[None]
        data, logp = {name: packed(x) for name, x in data.items()}, packed(logp)
        data["seg"] = ratios.Segments(jnp.array([[1, 1, 1, 2]]), 2)
    c = correction.parse(fields(
        centre="behav", weight="none", objective="reinforce", masks="token_ratio(upper=1.5)",
        aggregation=aggregation, scale=3.0, rejected_in_denominator=rejected_in_denominator,
    ))
    value, metrics = update_loss(c, jnp.asarray(logp), jnp.zeros(logp.shape), data, 4, 2)
    assert value == pytest.approx(expected, rel=1e-5)
    assert metrics["actor/rejected_fraction"] == pytest.approx(0.5)


def test_masks_of_the_policy_are_left_to_the_update():
    c = correction.parse(fields(masks="token_k1(upper=1.3) & opsm(opsm_delta=-9.0)"))
    assert c.masks_at_update == (("opsm", {"opsm_delta": -9.0}),)
    assert not c.is_in_update("logits") and not c.is_in_update("logits_behav")
    out, metrics = prepared(masks="token_k1(upper=1.3) & opsm(opsm_delta=-9.0)")
    alone, expected = prepared(masks="token_k1(upper=1.3)")
    np.testing.assert_array_equal(out["mask"], alone["mask"])
    name = "rollout_corr/rollout_rs_masked_fraction"
    assert metrics[name] == expected[name] > 0
    exact = correction.parse(fields(masks="trm(trm_delta=1.0)"))
    assert exact.is_in_update("logits_behav") and not exact.is_in_update("logits")
    assert correction.parse(fields(masks="veto")).masks_at_update == ()


def test_counts_of_methods_that_are_applied_once():
    z, mask = log_ratio(), rollout()["mask"]
    masks = "token_k1(upper=1.3) & opsm(opsm_delta=0.1)"
    _, metrics = prepared(masks=masks)
    found = {name: int(x) for name, x in metrics.items() if counts.is_count(name)}
    assert found == {
        "correction/mask/token_k1/num_tokens": mask.sum(),
        "correction/mask/token_k1/dropped": (np.abs(z) > np.log(1.3)).sum(),
        "correction/weight/num_tokens": mask.sum(),
        "correction/weight/changed_raw": (z != 0).sum(),
        "correction/weight/changed": (z != 0).sum(),
        "correction/weight/truncated": (np.exp(z) > CAP).sum(),
        "correction/weight/dropped": 0,
    }
    normalized = prepared(masks=masks, batch_normalize=True)[1]
    assert all(normalized[name] == x for name, x in found.items())
    none = prepared(masks=masks, centre="behav")[1]  # its updates count all of it
    assert not any(map(counts.is_count, none))


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("masks", [
    None, pytest.param("veto & opsm(opsm_delta=0.1) & veto(veto_ratio=0.1)", marks=pytest.mark.all),
])
def test_every_configured_method_is_counted_in_one_place(preset, masks):
    """A method that is applied neither once for the batch nor at its updates would have no counts."""
    chosen = default.get_config().correction
    chosen.preset, chosen.masks = preset, masks
    c, data = correction.parse(chosen), rollout()
    out, once = jax.eval_shape(correction.make_prepare(c), data)
    out = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
    update = lambda logp: update_loss(c, logp, None, data | out, 1.0, 1.0)[1]
    live = jax.eval_shape(update, data["logp_old"])
    seen = [name for name in (*once, *live) if counts.is_count(name) and name.endswith("/num_tokens")]
    expected = [f"mask/{label}" for label in counts.labels([name for name, _ in c.masks])]
    expected += ["weight"] if c.weight[0] != "none" else []
    expected += ["staleness_weight"] if c.weighs_staleness else []
    assert sorted(seen) == sorted(f"correction/{name}/num_tokens" for name in expected)


def test_a_batch_that_is_rejected_whole_has_no_sample_left():
    _, metrics = prepared(weight="none", masks="seq_mean_k3(upper=1e-30)")
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0  # of the weights alone
    assert metrics["rollout_corr/kept_eff_sample_size"] == 0.0


def test_kl_in_the_reward():
    """KL of the recomputed policy to the reference, subtracted token by token, is rewarded to go."""
    data = rollout() | {"logp_ref": batch()["logp_ref"], "values": np.zeros((B, T), np.float32)}
    out, metrics = prepared(
        data, advantage="gae(is_whitened=False)", kl="k1", kl_coeff=0.3, kl_placement="reward"
    )
    mask = data["mask"]
    kl = np.where(mask, data["logp_old"].astype(np.float64) - data["logp_ref"], 0)
    rewards = -0.3 * kl
    for b in range(B):
        if mask[b].any():
            rewards[b, np.flatnonzero(mask[b])[-1]] += data["rewards"][b]
    to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1] * mask
    np.testing.assert_allclose(out["adv"], to_go, atol=1e-5)
    assert metrics["actor/kl_to_reference"] == pytest.approx(
        np.mean([kl[b][mask[b]].mean() for b in range(B) if mask[b].any()]), rel=1e-4)


def test_kl_in_the_reward_leaves_the_loss_alone():
    """Without advantages the loss is the KL term alone: log pi - log ref is 2 at both tokens."""
    logp, none = np.full((1, 2), -1, np.float32), np.zeros((1, 2), np.float32)
    data = {"adv": none, "mask": np.ones((1, 2), bool), "logp_ref": logp - 2}
    data |= dict.fromkeys(("logp_behav", "logp_old", "logp_prox"), logp)

    def value(placement):
        c = correction.parse(fields(weight="none", kl="k1", kl_coeff=0.3, kl_placement=placement))
        return update_loss(c, jnp.asarray(logp), none, data, 2, 1)

    (in_loss, metrics), (in_reward, others) = value("loss"), value("reward")
    assert in_loss == pytest.approx(0.6) and metrics["actor/kl_loss"] == pytest.approx(2)
    assert in_reward == 0 and "actor/kl_loss" not in others


def test_kl_in_the_loss_leaves_the_rewards_alone():
    c = correction.parse(fields(kl="k1", kl_coeff=0.3, kl_placement="loss"))
    data = rollout() | {"logp_ref": batch()["logp_ref"]}
    np.testing.assert_array_equal(correction._rewards(c, data), data["rewards"])


@pytest.mark.all
def test_kl_in_the_reward_keeps_the_reward_of_an_answer_without_a_token():
    """KL of 2 and 1 nats at two tokens, 0.1 each: 1 - 0.3. The second answer has no token."""
    c = correction.parse(fields(advantage="rloo", kl="k1", kl_coeff=0.1, kl_placement="reward"))
    sampled = np.array([[True, True], [False, False]])
    logp = np.full((2, 2), -1, np.float32)
    data = {"rewards": np.array([1.0, np.nan], np.float32), "sampled": sampled, "mask": sampled,
            "logp_old": logp, "logp_ref": logp - np.array([[2, 1], [0, 0]], np.float32)}
    np.testing.assert_allclose(correction._rewards(c, data), [0.7, np.nan], rtol=1e-6)
    failed = data | {"rewards": np.array([1.0, -1.0], np.float32)}  # reward.on_error = -1
    np.testing.assert_allclose(correction._rewards(c, failed), [0.7, -1.0], rtol=1e-6)


def test_a_selection_draws_with_the_key_of_its_step():
    c = correction.parse(fields(masks="clip_cov"))
    draws = [update_fields(2, step - 1, step, seed=0)["draw"] for step in (1, 2)]
    keys = [jax.random.key_data(correction.with_key(c, {"draw": draw})["key"]) for draw in draws]
    assert not np.array_equal(*keys)
    assert "key" not in correction.with_key(correction.parse(fields()), {"draw": draws[0]})


def test_a_spelled_part_wins_over_the_preset():
    chosen = correction.parse(fields(preset="decoupled_geo_rs_seq_tis"))
    assert chosen.weight == ("token_tis", {"cap": CAP})
    assert chosen.masks == (("seq_mean_k1", {"upper": 1.001, "lower": 0.999}),)
    assert correction.parse(fields(kl_coeff=0.0)).kl is None  # no reference model without a term


def test_needs_name_their_method():
    chosen = correction.parse(
        fields(advantage="remax", objective="espo(vocab_size=19)", masks="staleness(staleness_max=2)")
    )
    assert chosen.needs == {
        "greedy_rewards": "remax", "entropy": "espo", "version": "staleness",
        "current_version": "staleness",
    }


# Every entry of every table at least once, several in one config.
KINDS = ("objective", "weight", "mask", "advantage", "kl")
TOGETHER = list(zip(
    methods.TABLES["objective"], *(itertools.cycle(methods.TABLES[k]) for k in KINDS[1:]), strict=False
))


def spelled(kind, name):
    """The entry as a config spells it, with the parameters that have no published value."""
    given = methods.traits(kind, name).example
    return f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})" if given else name


def whole_batch():
    """What the learner holds of a rollout batch when every on-demand field is asked for."""
    data, rows = batch(), rollout()
    per_token = {
        name: np.zeros((B, T), np.float32)
        for name in ("entropy", "logp_ref", "values", "sum_pi_squared")
    }
    return per_token | rows | update_fields(B, version=2, step=3, seed=0) | {
        name: data[name] for name in ("tokens", "positions", "segment_ids", "temperature")
    } | {
        "turn": np.zeros((B, T), np.int32),
        "greedy_rewards": rows["rewards"], "reward_components": np.zeros((B, 2), np.float32),
        "grad_norms": np.ones(B, np.float32),
    } | {
        name: np.zeros((B, T, CONFIG.vocab_size), np.float32)
        for name in ("logits", "logits_behav", "logits_ref")
    }


@pytest.mark.all
@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_every_method_is_reachable_from_a_config(names):
    """One step is traced with the methods."""
    parts = {"mask": "masks"}
    changes = {parts.get(k, k): spelled(k, name) for k, name in zip(KINDS, names, strict=True)}
    c = correction.parse(fields(kl_coeff=0.1, **changes))
    assert set(c.needs) <= FIELDS.keys()
    correction.check(c)
    rows = whole_batch()
    prepared, _ = jax.eval_shape(correction.make_prepare(c), rows)
    rows = rows | prepared | {"group": jax.ShapeDtypeStruct((B, T), np.int32)}
    rows["st_ppo_norm"] = jax.ShapeDtypeStruct((), np.float32)  # measured by the update
    loss, metrics = jax.eval_shape(
        lambda rows: update_loss(c, rows["logp_old"], rows["entropy"], rows, 1.0, 1.0),
        rows,
    )
    assert loss.shape == metrics["actor/pg_loss"].shape == ()


def test_the_configs_above_hold_every_entry():
    for kind, column in zip(KINDS, zip(*TOGETHER, strict=True), strict=True):
        assert set(column) == set(methods.TABLES[kind])
    assert set(methods.TABLES) == {*KINDS, "controller"}


def test_a_method_that_needs_what_no_run_records_is_refused():
    entry = Traits(needs=("prices",))(lambda x, mask, seg=None, *, prices, cap=2.0: mask)
    with mock.patch.dict(methods.TABLES["weight"], {"token_tis": entry}):
        with pytest.raises(ValueError, match="'token_tis' needs prices, which a run does not record"):
            validate(tiny.config())


def test_metrics_of_versions_and_advantages():
    out, metrics = prepared()
    # Tokens before column 5 are of version 3, later ones of 4, and the learner holds 6.
    lags = [3 if mask_t[:5].any() else 2 for mask_t in rollout()["mask"] if mask_t.any()]
    worst = metrics["training/off_policy/trajectory_staleness_worst/mean"]
    assert worst == pytest.approx(np.mean(lags))
    adv = out["adv"][rollout()["mask"]]
    assert metrics["critic/advantages/max"] == pytest.approx(adv.max(), rel=1e-5)
    assert metrics["critic/returns/mean"] == pytest.approx(adv.mean(), abs=1e-5)


def test_fused_fields_have_no_gradient():
    def total(logp):
        fields = correction.fused_fields(logp, 2.0 * logp)
        assert fields.keys() == {"logp_old", "logp_prox", "entropy"}
        return sum(jnp.sum(x) for x in fields.values())

    value, gradient = jax.value_and_grad(total)(jnp.full((2, 3), -1.5))
    assert value == 4 * 6 * -1.5 and not gradient.any()
