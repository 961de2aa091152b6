"""Metrics of a batch's correction against NumPy, of the ragged rows of the update's tests."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_tis.diagnostics import correction_metrics
from jaxrl_tis.estimators import loss
from tests import jitted
from tests.learner.correction_test import log_ratio, prepared, rollout, whole_batch
from tests.learner.step_test import CAP, B, T

correction_metrics = jitted.Module(correction_metrics)

pytestmark = pytest.mark.compiles


def test_gap_metrics_have_verls_names_and_values():
    _, metrics = prepared()
    mask, z = rollout()["mask"], log_ratio()
    valid = z[mask]
    expected = {
        "rollout_corr/kl": -valid.mean(),
        "rollout_corr/k3_kl": (np.exp(valid) - valid - 1).mean(),
        "rollout_corr/chi2_token": np.exp(2 * valid).mean() - 1,
        "rollout_corr/rollout_is_mean": np.minimum(np.exp(valid), CAP).mean(),
        "rollout_corr/rollout_is_max": CAP,
        "rollout_corr/rollout_is_ratio_fraction_high": (np.exp(valid) > CAP).mean(),
    }
    p, q = (np.exp(rollout()[n][mask].astype(np.float64)) for n in ("logp_old", "logp_behav"))
    expected |= {
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_probs_diff_mean": np.abs(p - q).mean(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
    }
    is_sampled = mask.any(1)
    w = np.exp(z.sum(1))[is_sampled]
    rewards = rollout()["rewards"][is_sampled]
    expected |= {"reward/learner_snis": (w * rewards).sum() / w.sum(),
                 "reward/learner_snis_ess": w.mean() ** 2 / (w**2).mean()}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3), name
    others = {"rollout_corr/training_ppl", "rollout_corr/rollout_ppl", "rollout_corr/ppl_ratio",
              "rollout_corr/chi2_seq", "rollout_corr/rollout_is_eff_sample_size",
              "rollout_corr/rollout_is_ratio_fraction_low", "training/rollout_probs_diff_std"}
    assert others <= set(metrics)


def test_the_learners_reward_counts_an_answer_that_is_left_out_with_weight_one():
    data, z = rollout(), log_ratio()
    known = data["rewards"].copy()
    known[1] = np.nan
    mask = data["mask"] & ~np.isin(np.arange(B), (0, 1))[:, None]
    found = prepared(data | {"mask": mask, "rewards": known})[1]["reward/learner_snis"]
    w = np.exp(z.sum(1)) * data["mask"].any(1)
    w[0], w[1] = 1, 0
    assert found == pytest.approx((w * data["rewards"]).sum() / w.sum(), rel=1e-5)


WEIGHT = ("token_mis", {"lower": 0.5, "upper": CAP})
profile_metrics = jax.jit(
    functools.partial(correction_metrics.profile_metrics, WEIGHT), static_argnums=1
)


def test_the_gap_by_place():
    data = whole_batch()
    mask, z = data["mask"], log_ratio()
    data["entropy"] = np.where(np.arange(T) < 5, 0.3, 2.5)[None].repeat(B, axis=0).astype(np.float32)
    metrics = jax.device_get(profile_metrics(data, False))
    position = np.where(mask, np.cumsum(data["segment_ids"], axis=1), 0)
    position -= np.array([np.min(p[m], initial=99) for p, m in zip(position, mask, strict=True)])[:, None]
    for first, last in ((0, 0), (1, 1), (2, 3)):
        here = mask & (position >= first) & (position <= last)
        name = f"mismatch/position_{first}"
        assert metrics[f"{name}/log_ratio_mean"] == pytest.approx(z[here].mean(), rel=1e-3)
        assert metrics[f"{name}/token_fraction"] == pytest.approx(here.sum() / mask.sum())
        is_outside = (np.exp(z) < 0.5) | (np.exp(z) > CAP)
        assert metrics[f"{name}/fraction_clipped"] == pytest.approx(is_outside[here].mean())
    here = mask & (data["entropy"] > 2)
    assert metrics["mismatch/entropy_2/log_ratio_abs_mean"] == pytest.approx(
        np.abs(z[here]).mean(), rel=1e-3)
    assert metrics["mismatch/entropy_2/fraction_clipped"] == pytest.approx(is_outside[here].mean())
    assert metrics["mismatch/entropy_0.1/token_fraction"] == pytest.approx(1 - here.sum() / mask.sum())
    assert not any("turn" in name or "tool" in name for name in metrics)
    data["turn"] = np.where(np.arange(T) < 5, 0, 1)[None].repeat(B, axis=0).astype(np.int32)
    metrics = jax.device_get(profile_metrics(data, True))
    later = mask & (data["turn"] == 1)
    assert metrics["mismatch/turn_1/log_ratio_mean"] == pytest.approx(z[later].mean(), rel=1e-3)
    assert 0 < metrics["mismatch/after_tool_1/token_fraction"] < 1
    share = is_outside[later].mean()
    assert metrics["mismatch/turn_1/fraction_clipped"] == pytest.approx(share) and 0 < share < 1


def outputs_of(batch, weight):
    spec = loss.LossSpec(objective=("reinforce", {}), weight=weight)
    return jitted.function(lambda batch: loss.apply_methods(batch, spec, ()))(batch)


BOUNDED = [
    ("turn_tis", {"cap": 1.1}), ("turn_geo", {"cap": 1.01}),
    ("token_tis", {"cap": 1.1}), ("token_icepop", {"lower": 0.9, "upper": 1.1}),
    ("seq_mask_tis", {"lower": 0.99, "upper": 1.05}),
]


@pytest.mark.parametrize("weight", BOUNDED, ids=[name for name, _ in BOUNDED])
def test_shares_of_bounded_weights_are_those_of_the_counts(weight):
    """With turns of whole rows of equal length, so that each token counts alike."""
    rng = np.random.default_rng(0)
    mask = np.ones((4, 20), bool)
    batch = {
        "mask": mask, "sampled": mask, "logp_old": np.float32(rng.normal(-1, 0.1, mask.shape)),
        "logp_behav": np.float32(rng.normal(-1, 0.1, mask.shape)), "rewards": np.zeros(4, np.float32),
        "turn": np.zeros(mask.shape, np.int32),
    } | dict.fromkeys(("logp", "logp_prox"))
    batch["logp"] = batch["logp_prox"] = batch["logp_old"]
    outputs = outputs_of(batch, weight)
    found = correction_metrics.gap_metrics(weight, outputs, batch)
    counted = {name.rpartition("/")[2]: int(n) for name, n in outputs.counts.items()}
    share = lambda name: round(80 * float(found[f"rollout_corr/rollout_is_{name}"]))
    assert counted["truncated"] + counted["dropped"] > 0
    if weight[0] in ("token_icepop", "seq_mask_tis"):
        assert share("oob_ratio") == counted["dropped"]
    else:
        assert share("ratio_fraction_high") == counted["truncated"]


def test_the_sample_size_of_a_weight_without_a_cap_has_none():
    mask = np.ones((4, 20), bool)
    behav = np.full(mask.shape, -5.0, np.float32)
    old = behav.copy()
    old[0, 0] = 0.0  # a ratio of e^5
    batch = {"mask": mask, "sampled": mask, "logp_prox": old, "logp_old": old, "logp_behav": behav,
             "rewards": np.zeros(4, np.float32)}
    weight = ("token_vanilla", {})
    found = correction_metrics.gap_metrics(weight, outputs_of(batch, weight), batch)
    w = np.exp(old - behav)
    expected = w.mean() ** 2 / (w**2).mean()
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(expected, rel=1e-4)
    assert expected < 0.1
