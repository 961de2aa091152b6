"""Numeric parity with verl 0.9.1, whose outputs make_golden_verl.py wrote to golden_verl.json:
weights, rejection, advantages, KL and metrics.

Metrics are compared with those of verl without the rows that have no token, which verl counts.
golden_verl_losses_test.py has the losses, golden_verl_bugs_test.py what we do otherwise on purpose.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.diagnostics import batch_metrics, mismatch
from jaxrl_tis.estimators import advantages, controllers, kl, masks, ratios, weights
from tests.estimators import golden_verl
from tests.estimators.golden_verl import BATCHES, LEVELS, assert_close, assert_metrics, bounds
from tests.estimators.golden_verl import drift, inputs, inputs_of_case

pytestmark = pytest.mark.compiles

name, run = golden_verl.name, golden_verl.run


@functools.partial(jax.jit, static_argnames="cases")
def weights_of(batch, cases):
    log_ratio, mask = batch["logp_old"] - batch["logp_behav"], batch["mask"]
    results = []
    for level, threshold in cases:
        w = golden_verl.rollout_weights(log_ratio, mask, level, threshold)
        normalized = weights.batch_normalize(w, mask, LEVELS[level])
        metrics = mismatch.importance_weight_metrics(
            w, log_ratio, mask, level=LEVELS[level], **bounds(threshold)
        )
        results.append((w, normalized, metrics))
    return results


@pytest.mark.cases(*(f"float64-{name}" for name in BATCHES if name != "ties"))  # compiled apart
def test_weights(name, run):
    results = weights_of(inputs_of_case(name, run), golden_verl.cases(name, "weights"))
    for case, (w, (normalized, factor), metrics) in zip(
        BATCHES[name]["weights"], results, strict=True
    ):
        label = f"{case['level']} {case['threshold']}"
        far = drift(name, case["level"] == "sequence")
        assert_close(w, case["w"], run, label, far)
        assert_close(factor, case["factor"], run, label, far)
        assert_close(normalized * factor, case["w"], run, label, far)
        want = dict(case["metrics"])
        mean = want["rollout_is_mean"]
        want["rollout_is_eff_sample_size"] *= (mean / (mean + 1e-8)) ** 2  # verl's epsilon
        if case["level"] == "sequence":
            want["rollout_is_min"] = max(want["rollout_is_min"], np.exp(-20.0))
        assert_metrics(metrics, want, run, "rollout_corr/", label, far)


@functools.partial(jax.jit, static_argnames="cases")
def rejection_of(batch, cases):
    log_ratio, mask = batch["logp_old"] - batch["logp_behav"], batch["mask"]
    results = []
    for options, threshold in cases:
        chosen = golden_verl.criteria(options, threshold)
        kept = masks.all_of(chosen, log_ratio, mask)[0]
        metrics = mismatch.rejected_fractions(kept, mask)
        for option, band in chosen:
            metrics |= mismatch.rejection_metrics(log_ratio, mask, option=option, **band)
        results.append((kept, metrics))
    return results


@pytest.mark.all
@pytest.mark.cases(*(f"float64-{name}" for name in BATCHES if name != "ties"))  # compiled apart
def test_rejection(name, run):
    results = rejection_of(inputs_of_case(name, run), golden_verl.cases(name, "rejection"))
    far = drift(name, is_sequence=True)
    for case, (kept, metrics) in zip(BATCHES[name]["rejection"], results, strict=True):
        label = f"{case['options']} {case['threshold']}"
        np.testing.assert_array_equal(kept, np.array(case["kept"]) != 0, err_msg=label)
        assert_metrics(metrics, case["metrics"], run, "rollout_corr/", label, far)


def advantages_of(batch):
    """Advantages by verl's name, and the entries of ours that gave them."""
    otb = {"logp_prox": batch["logp_old"], "sum_pi_squared": batch["sum_pi_squared"]}
    weighted = otb | {"weights": batch["weights"], "otb_zero_tail": False}
    scores = ratios.masked_sum(batch["rewards"], batch["mask"], axis=1)
    components = {"reward_components": batch["reward_components"], "gdpo_weights": (1.0, 0.5)}
    entries = {
        "grpo": ("grpo", {}),
        "dr_grpo": ("dr_grpo", {}),
        "grpo_passk": ("grpo_passk", {}),
        "grpo_passk_raw": ("grpo_passk", {"passk_is_normalized": False}),
        "rloo": ("rloo", {}),
        "opo": ("opo", {}),
        "gpg": ("gpg", {}),
        "remax": ("remax", {"greedy_rewards": batch["greedy_rewards"]}),
        "otb": ("otb", otb),
        "otb_weighted": ("otb", weighted),
        "tir_otb": ("tir_otb", otb),
        "tir_otb_weighted": ("tir_otb", weighted),
        "gae": ("gae", {"values": batch["values"], "gamma": 0.9, "lam": 0.8}),
        "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 0.9}),
        "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
        "gdpo": ("gdpo", {"reward_components": scores[:, None]}),
        "gdpo_components": ("gdpo", components),
    }
    pairs = jnp.array(golden_verl.GOLDEN["pairs"])
    results = {
        label: advantages.ADVANTAGES[entry](
            batch["rewards"], batch["mask"], pairs if "passk" in label else batch["group"], **needed
        )
        for label, (entry, needed) in entries.items()
    }
    gae = entries["gae"][1]
    return results | {
        "gae_returns": advantages.gae_returns(batch["rewards"], batch["mask"], **gae)
    }


SAME_ENTRY = {"grpo_vectorized": "grpo", "rloo_loop": "rloo"}
FLOAT32_IN_VERL = ("grpo_vectorized", "gdpo_components")


@pytest.mark.all
def test_advantages(name, run):
    batch, golden = inputs(name, run), BATCHES[name]
    results = jax.jit(advantages_of)(batch)
    for label, want in (golden["advantages"] | golden["whitened"]).items():
        if (name, label) == ("empty_row", "otb_weighted"):
            continue  # see test_rows_without_tokens_are_not_in_the_group_of_otb
        got = np.array(results[SAME_ENTRY.get(label, label)])
        want = np.array(want, np.float64)
        if label == "rloo_loop":  # keeps the reward of a group of one
            is_alone = (batch["group"][:, None] == batch["group"]).sum(1) == 1
            got, want = got[~is_alone], want[~is_alone]
        is_rounding = (got == 0.0) & (np.abs(want) < 1e-7)  # a constant group is exactly 0 here
        want = np.where(is_rounding, 0.0, want)
        if label in FLOAT32_IN_VERL:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=label)
        else:
            assert_close(got, want, run, label, scale=1.0)


@functools.partial(jax.jit, static_argnames="kinds")
def kl_of(batch, kinds):
    mask = ratios.as_bool(batch["mask"])
    logp, logp_ref = (ratios.zero_padding(batch[x], mask) for x in ("logp", "logp_ref"))

    def total(logp, kind):
        value = ratios.zero_padding(kl.KL[kind](logp, logp_ref), mask)
        return jnp.sum(value), value

    return [jax.grad(total, has_aux=True)(logp, kind) for kind in kinds]


def test_kl(name, run):
    batch, golden = inputs(name, run), BATCHES[name]["kl"]
    mask = np.array(batch["mask"] != 0, np.float64)
    far = float(np.nanmax(np.abs(batch["logp"] - batch["logp_ref"])))
    results = kl_of(batch, tuple(golden))
    for (kind, case), (gradient, value) in zip(golden.items(), results, strict=True):
        assert_close(value, case["value"] * mask, run, kind, far, scale=1.0)
        assert_close(gradient, case["gradient"] * mask, run, kind, far, scale=1.0)


def test_kl_reward(name, run):
    batch, case = inputs(name, run), BATCHES[name]["kl_reward"]
    fields = ("logp_old", "logp_ref")
    kl_bt = kl.k1(*(ratios.zero_padding(batch[x], batch["mask"]) for x in fields))
    rewards = kl.penalized_rewards(batch["rewards"], batch["mask"], kl_bt, 0.1)
    assert_close(rewards, case["rewards"], run, scale=1.0)
    assert_close(kl.sequence_kl(kl_bt, batch["mask"]), case["current_kl"], run, scale=1.0)
    state = controllers.kl_coefficient_init(0.1)
    for measured, want in zip((12.0, 6.6, 0.0), case["updates"], strict=True):
        state = controllers.adaptive_kl(state, measured, 256, kl_target=6.0, kl_horizon=10000.0)
        np.testing.assert_allclose(state.kl_coeff, want, rtol=1e-6)


@jax.jit
def metrics_of(batch):
    old, behav, mask = (batch[x] for x in ("logp_old", "logp_behav", "mask"))
    variance = (old, batch["adv"], batch["sum_pi_squared"], mask)
    is_valid = ratios.as_bool(mask)
    scores = ratios.masked_sum(batch["rewards"], mask, axis=1)
    lengths = jnp.sum(is_valid, axis=1)
    return {
        "offpolicy": mismatch.offpolicy_metrics(old, behav, mask),
        "probabilities": mismatch.probability_metrics(old, behav, mask),
        "variance": batch_metrics.variance_proxy_metrics(*variance, gradient_norm=0.7),
        "variance_weighted": batch_metrics.variance_proxy_metrics(*variance, w=batch["weights"]),
        "data": batch_metrics.reward_metrics(scores, scores - 0.25 * mask.shape[1], lengths)
        | batch_metrics.advantage_metrics(batch["adv"], batch["returns"], mask, batch["values"])
        | batch_metrics.length_metrics(
            jnp.array([2, 2, 2, 2, 2, 3]), lengths, max_prompt_length=3, max_response_length=6
        ),
    }


def test_metrics(name, run):
    results, golden = metrics_of(inputs(name, run)), BATCHES[name]["metrics"]
    for family, want in golden.items():
        prefix = "rollout_corr/" if family == "offpolicy" else ""
        far = drift(name, is_sequence=True)
        assert_metrics(results[family], want, run, prefix, family, far)
