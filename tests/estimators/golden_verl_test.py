"""Numeric parity with verl 0.9.1, whose outputs make_golden_verl.py wrote to golden_verl.json.

Left out where we differ on purpose: metrics of batches with an empty row (verl counts such rows),
and the unclamped minimum of sequence ratios beyond exp(-20).
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages
from jaxrl_tis.estimators import diagnostics
from jaxrl_tis.estimators import kl
from jaxrl_tis.estimators import objectives
from jaxrl_tis.estimators import reduce
from jaxrl_tis.estimators import weights

GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_verl.json").read_text())
BATCHES = GOLDEN["batches"]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WITHOUT_EMPTY_ROWS = ("full", "extreme")


weight_metrics = jax.jit(diagnostics.importance_weight_metrics, static_argnames="level")

offpolicy_metrics = jax.jit(diagnostics.offpolicy_metrics)
probability_metrics = jax.jit(diagnostics.probability_metrics)
ADVANTAGES = {name: jax.jit(function) for name, function in advantages.ADVANTAGES.items()}


def inputs(name):
    return {
        field: np.array(x, np.int32 if field == "group" else np.float32)
        for field, x in BATCHES[name]["inputs"].items()
    }


@pytest.mark.parametrize("name", BATCHES)
def test_weights(name):
    batch = inputs(name)
    log_ratio, mask = batch["logp_old"] - batch["logp_behav"], batch["mask"]
    for case in BATCHES[name]["weights"]:
        level, threshold = case["level"], case["threshold"]
        if isinstance(threshold, str):
            lower, upper = (float(x) for x in threshold.split("_"))
            w = weights.WEIGHTS[f"{level}_icepop"](log_ratio, mask, lower=lower, upper=upper)
        else:
            lower, upper = None, threshold
            w = weights.WEIGHTS[f"{level}_tis"](log_ratio, mask, cap=upper)
        if case["is_normalized"]:
            w, _ = weights.batch_normalize(w, mask, level)
        np.testing.assert_allclose(w, case["w"], **CLOSE, err_msg=f"{level} {threshold}")
        if name in WITHOUT_EMPTY_ROWS and not case["is_normalized"]:
            metrics = weight_metrics(w, log_ratio, mask, level=level, upper=upper, lower=lower)
            compare_weight_metrics(metrics, case["metrics"], f"{level} {threshold}")


def compare_weight_metrics(metrics, expected, label):
    assert set(metrics) == {f"rollout_corr/{key}" for key in expected}
    for key, value in expected.items():
        if key == "rollout_is_min":
            value = max(value, np.exp(-20.0))
        np.testing.assert_allclose(
            metrics[f"rollout_corr/{key}"], value, rtol=2e-5, atol=1e-6, err_msg=f"{label} {key}"
        )


@functools.partial(jax.jit, static_argnames="mode")
@functools.partial(jax.value_and_grad, has_aux=True)
def policy_loss(logp, batch, w, counts, mode):
    clips = GOLDEN["clips"]
    loss_bt, metrics = objectives.OBJECTIVES["dual_clip"](
        logp,
        batch["logp_old"],
        batch["adv"],
        batch["mask"],
        clip_low=clips["clip_ratio_low"],
        clip_high=clips["clip_ratio_high"],
        dual_clip=clips["clip_ratio_c"],
    )
    return reduce.aggregate(loss_bt * w, batch["mask"], mode, **counts), metrics


@pytest.mark.parametrize("name", BATCHES)
def test_policy_loss(name):
    batch = inputs(name)
    totals = {
        "num_tokens": GOLDEN["global"]["batch_num_tokens"],
        "num_seqs": GOLDEN["global"]["global_batch_size"],
        "scale": GOLDEN["global"]["loss_scale_factor"],
    }
    for case in BATCHES[name]["policy"]:
        w = batch["weights"] if case["is_weighted"] else np.ones_like(batch["weights"])
        counts = totals if case["is_global"] else {}
        (value, metrics), gradient = policy_loss(
            batch["logp"], batch, w, counts, mode=case["aggregation"]
        )
        np.testing.assert_allclose(value, case["loss"], **CLOSE, err_msg=case["aggregation"])
        np.testing.assert_allclose(gradient, case["gradient"], **CLOSE)
        for key, expected in case["metrics"].items():
            np.testing.assert_allclose(metrics[key], expected, **CLOSE, err_msg=key)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_outcome_advantages(name, estimator):
    batch = inputs(name)
    adv = ADVANTAGES[estimator](batch["rewards"], batch["mask"], batch["group"])
    np.testing.assert_allclose(adv, BATCHES[name]["advantages"][estimator], **CLOSE)


@pytest.mark.parametrize("name", BATCHES)
def test_gae(name):
    batch, expected = inputs(name), BATCHES[name]["advantages"]
    parameters = {"values": batch["values"], "gamma": 0.9, "lam": 0.8}
    adv = advantages.gae(batch["rewards"], batch["mask"], batch["group"], **parameters)
    np.testing.assert_allclose(adv, expected["gae"], **CLOSE)
    returns = advantages.gae_returns(batch["rewards"], batch["mask"], **parameters)
    np.testing.assert_allclose(returns, expected["gae_returns"], **CLOSE)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("estimator", kl.KL)
def test_kl(name, estimator):
    batch, expected = inputs(name), BATCHES[name]["kl"][estimator]
    value = kl.KL[estimator](batch["logp"], batch["logp_ref"])
    gradient = jax.grad(lambda x: jnp.sum(kl.KL[estimator](x, batch["logp_ref"])))(batch["logp"])
    np.testing.assert_allclose(value, expected["value"], **CLOSE)
    np.testing.assert_allclose(gradient, expected["gradient"], **CLOSE)


@pytest.mark.parametrize("name", BATCHES)
def test_value_loss(name):
    batch, expected = inputs(name), BATCHES[name]["value"]

    def loss(values):
        loss_bt, metrics = objectives.value_loss(
            values, batch["values_old"], batch["returns"], batch["mask"], clip=0.5
        )
        return reduce.aggregate(loss_bt, batch["mask"], "token-mean"), metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(batch["values"])
    np.testing.assert_allclose(value, expected["loss"], **CLOSE)
    np.testing.assert_allclose(gradient, expected["gradient"], **CLOSE)
    np.testing.assert_allclose(metrics["critic/vf_clipfrac"], expected["clipfrac"], **CLOSE)


@pytest.mark.parametrize("name", WITHOUT_EMPTY_ROWS)
def test_offpolicy_metrics(name):
    batch, expected = inputs(name), BATCHES[name]["offpolicy"]
    metrics = offpolicy_metrics(batch["logp_old"], batch["logp_behav"], batch["mask"])
    assert set(metrics) == {f"rollout_corr/{key}" for key in expected}
    for key, value in expected.items():
        np.testing.assert_allclose(
            metrics[f"rollout_corr/{key}"], value, rtol=2e-5, atol=1e-6, err_msg=key
        )


@pytest.mark.parametrize("name", BATCHES)
def test_probability_metrics(name):
    batch, expected = inputs(name), BATCHES[name]["probabilities"]
    metrics = probability_metrics(batch["logp_old"], batch["logp_behav"], batch["mask"])
    assert set(metrics) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)
