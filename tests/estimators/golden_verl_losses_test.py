"""Numeric parity of losses with verl 0.9.1: values, gradients and metrics.

See golden_verl.py for the runs and make_golden_verl.py for the numbers.
"""

import functools

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import masks
from jaxrl_tis.estimators import objectives
from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators import reduce
from jaxrl_tis.estimators import weights
from tests.estimators import golden_verl
from tests.estimators.golden_verl import BATCHES, GOLDEN, LEVELS, assert_close, assert_metrics
from tests.estimators.golden_verl import drift, inputs, inputs_of_case

name, run = golden_verl.name, golden_verl.run

# verl's name of a loss and of its settings -> our entry and keywords
WIDTHS = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
OURS = {
    "vanilla": ("dual_clip", WIDTHS),
    "dppo_tv": (
        "dppo_tv",
        {
            "clip_ratio_low": "dppo_tv_low",
            "clip_ratio_high": "dppo_tv_high",
            "clip_ratio_c": "cap",
        },
    ),
    "dppo_kl": (
        "dppo_kl",
        {
            "clip_ratio_low": "dppo_kl_low",
            "clip_ratio_high": "dppo_kl_high",
            "clip_ratio_c": "cap",
        },
    ),
    "gspo": ("gspo_token", WIDTHS),
    "sapo": ("sapo", {"tau_pos": "temperature_pos", "tau_neg": "temperature_neg"}),
    "gpg": ("gpg", {}),
    "clip_cov": (
        "clip_cov",
        WIDTHS
        | {
            "clip_cov_ratio": "clip_cov_ratio",
            "clip_cov_lb": "clip_cov_lower",
            "clip_cov_ub": "clip_cov_upper",
        },
    ),
    "kl_cov": ("kl_cov", {"kl_cov_ratio": "kl_cov_ratio", "ppo_kl_coef": "kl_cov_coeff"}),
    "geo_mean": ("gmpo", WIDTHS),
    "dro": ("dro", {"dro_beta": "dro_beta"}),
    "cispo": ("cispo", WIDTHS),
    "reinforce": ("reinforce", {}),
}
SEQUENCE_LOSSES = ("gspo", "geo_mean")


def objective(loss, settings, batch, logp):
    """Our loss per token and metrics for verl's loss of that name."""
    entry, keywords = OURS[loss]
    needed = {"key": jax.random.key(0)} if entry == "clip_cov" else {}
    if entry == "gmpo":
        needed = {"weights": batch["weights"]}
    parameters = {keywords[key]: x for key, x in settings.items()}
    return objectives.OBJECTIVES[entry](
        logp, batch["logp_old"], batch["adv"], batch["mask"], **parameters, **needed
    )


def scalar(loss_bt, mask, mode):
    """geo_mean (mode None) averages over all rows, those without tokens too."""
    if mode is None:
        mode, num_seqs = "seq-mean-token-mean", float(mask.shape[0])
        return reduce.aggregate(loss_bt, mask, mode, num_seqs=num_seqs)
    return reduce.aggregate(loss_bt, mask, mode)


@functools.partial(jax.jit, static_argnames="reference")
def losses_of(batch, reference):
    """((loss, (weighted loss, metrics)), gradient) by name, with the reference batch's settings."""
    mask = batch["mask"]

    def value(logp, loss):
        case = BATCHES[reference]["policy"][loss]
        loss_bt, metrics = objective(loss, case["settings"], batch | {"weights": None}, logp)
        if loss == "geo_mean":  # takes the weights itself
            weighted_bt, _ = objective(loss, case["settings"], batch, logp)
        else:
            weighted_bt = loss_bt * batch["weights"]
        weighted = scalar(weighted_bt, mask, case["mode"])
        return scalar(loss_bt, mask, case["mode"]), (weighted, metrics)

    gradient = jax.value_and_grad(value, has_aux=True)
    return {loss: gradient(batch["logp"], loss) for loss in BATCHES[reference]["policy"]}


def assert_loss_metrics(got, want, run, label, far):
    """A metric that one side lacks is constant on the other: a loss that clips nothing."""
    for key in got.keys() ^ want.keys():
        assert (got | want)[key] == 0.0, f"{label} {key}"
    shared = got.keys() & want.keys()
    assert_metrics(
        {key: got[key] for key in shared}, {key: want[key] for key in shared}, run, "", label, far
    )


@pytest.mark.cases(*(f"float64-{name}" for name in BATCHES if name != "ties"))  # compiled apart
def test_policy_losses(name, run):
    golden = BATCHES[name]["policy"]
    results = losses_of(inputs_of_case(name, run), "ties" if name == "ties" else "random")
    for loss, case in golden.items():
        (value, (weighted, metrics)), gradient = results[loss]
        far = drift(name, loss in SEQUENCE_LOSSES)
        scale = 60.0 * float(np.max(np.abs(case["gradient"])))
        assert_close(value, case["loss"], run, loss, far, scale)
        assert_close(weighted, case["weighted_loss"], run, loss, far, scale)
        assert_close(gradient, case["gradient"], run, loss, far)
        assert_loss_metrics(metrics, case["metrics"], run, loss, far)


def test_every_loss_of_verl_is_compared():
    assert set(BATCHES["random"]["policy"]) == set(OURS)
    for name, left_out in (("extreme", {"clip_cov", "kl_cov", "geo_mean"}), ("ties", {"kl_cov"})):
        assert set(OURS) - set(BATCHES[name]["policy"]) == left_out


@jax.jit
def aggregations_of(batch):
    """(loss, gradient) of the weighted PPO loss by mode and by whose counts divide it."""
    settings = BATCHES["random"]["policy"]["vanilla"]["settings"]
    totals = GOLDEN["global"]
    counts = {
        False: {},
        True: {
            "num_tokens": totals["batch_num_tokens"],
            "num_seqs": totals["global_batch_size"],
            "scale": totals["loss_scale_factor"],
        },
    }

    def value(logp, mode, is_global):
        loss_bt, _ = objective("vanilla", settings, batch, logp)
        w = ratios.zero_padding(batch["weights"], batch["mask"])
        return reduce.aggregate(w * loss_bt, batch["mask"], mode, **counts[is_global])

    return {
        f"{mode} {is_global}": jax.value_and_grad(value)(batch["logp"], mode, is_global)
        for mode in reduce.MODES if mode != "prompt-mean"  # which verl does not have
        for is_global in counts
    }


def test_aggregation(name, run):
    results = aggregations_of(inputs(name, run))
    assert len(BATCHES[name]["aggregation"]) == len(results)
    for case in BATCHES[name]["aggregation"]:
        label = f"{case['mode']} {case['is_global']}"
        value, gradient = results[label]
        scale = 20.0 * float(np.max(np.abs(case["gradient"])))
        assert_close(value, case["loss"], run, label, drift(name), scale)
        assert_close(gradient, case["gradient"], run, label, drift(name))


def bypass_loss(settings, batch, logp):
    """verl's bypass mode from our parts: one ratio logp - logp_behav for weight, mask and loss."""
    behav, adv, mask = batch["logp_behav"], batch["adv"], batch["mask"]
    log_ratio = jax.lax.stop_gradient(logp) - behav
    kept = ratios.as_bool(mask)
    if "rollout_rs" in settings:
        chosen = golden_verl.criteria(settings["rollout_rs"], settings["rollout_rs_threshold"])
        kept = masks.all_of(chosen, log_ratio, mask)[0]
    if settings["loss_type"] == "ppo_clip":
        loss_bt, metrics = objectives.OBJECTIVES["dual_clip"](
            logp, behav, adv, kept, clip_low=0.2, clip_high=0.28
        )
        return reduce.aggregate(loss_bt, kept, "token-mean"), metrics
    threshold = settings.get("rollout_is_threshold", 2.0)
    w = golden_verl.rollout_weights(log_ratio, mask, settings["rollout_is"], threshold)
    if "rollout_is_batch_normalize" in settings:
        w, _ = weights.batch_normalize(w, mask, LEVELS[settings["rollout_is"]])
    loss_bt, metrics = objectives.OBJECTIVES["reinforce"](logp, behav, adv, kept)
    return reduce.aggregate(w * loss_bt, kept, "token-mean"), metrics


@jax.jit
def bypass_of(batch):
    def value(logp, label):
        return bypass_loss(BATCHES["random"]["bypass"][label]["settings"], batch, logp)

    gradient = jax.value_and_grad(value, has_aux=True)
    return {label: gradient(batch["logp"], label) for label in BATCHES["random"]["bypass"]}


def test_bypass(name, run):
    results = bypass_of(inputs(name, run))
    for label, case in BATCHES[name]["bypass"].items():
        (loss, metrics), gradient = results[label]
        far = drift(name, case["settings"]["rollout_is"] == "sequence")
        want = np.nan_to_num(case["gradient"])  # verl has NaN if all tokens are rejected
        scale = 60.0 * float(np.max(np.abs(want)))
        assert_close(loss, np.nan_to_num(case["loss"]), run, label, far, scale)
        assert_close(gradient, want, run, label, far)
        assert_loss_metrics(metrics, case["metrics"], run, label, far)


@functools.partial(jax.jit, static_argnames="modes")
def value_losses_of(batch, modes):
    def loss(values, mode):
        loss_bt, metrics = objectives.value_loss(
            values, batch["values_old"], batch["returns"], batch["mask"], clip=0.5
        )
        return reduce.aggregate(loss_bt, batch["mask"], mode), metrics

    return [jax.value_and_grad(loss, has_aux=True)(batch["values"], mode) for mode in modes]


def test_value_loss(name, run):
    golden = BATCHES[name]["value"]
    results = value_losses_of(inputs(name, run), tuple(golden))
    for case, ((value, metrics), gradient) in zip(golden.values(), results, strict=True):
        assert_close(value, case["loss"], run)
        assert_close(gradient, case["gradient"], run)
        np.testing.assert_allclose(metrics["critic/vf_clipfrac"], case["clipfrac"], rtol=1e-6)
