"""What a record proves about its correction: a record that shows it, in the layout of a framework, and
one that is its neighbour and does not."""

import json
import math
import pathlib
import random

import numpy as np
import pytest

from jaxrl_tis.doctor import foreign
from jaxrl_tis.doctor.case import K3, KL, LAG
from jaxrl_tis.doctor.frameworks import SAMPLER_LOGP
from tests.doctor import logs, make_tinker_run
from tests.doctor.runs import names

TRL_RUNS = json.loads((pathlib.Path(__file__).parent / "trl_runs.json").read_text())
WITHOUT_SAMPLER = {name: None for name in logs.VERL if name.startswith(("training/", "rollout_corr/"))}
WITHOUT_WEIGHTS = {name: None for name in logs.VERL if "rollout_is" in name}
DECOUPLED = {name: None for name in logs.VERL if name.startswith("training/")}
TRL_RATIO = "sampling/importance_sampling_ratio"
TRL_GAP = "sampling/sampling_logp_difference"


def found(tmp_path, layout, changes=(), steps=range(1, 121)):
    path = logs.write_jsonl(tmp_path / "log.jsonl", logs.rows(layout, changes, steps))
    return foreign.diagnose([path], "auto")


def held(*args):
    return names(found(*args)["corrections"])


def noise(mean, size):
    """A value that scatters around its mean, the same at each call."""
    return lambda step: mean + size * random.Random(step).gauss(0, 1)


# Silently inactive


@pytest.mark.parametrize("layout, changes", [
    (logs.VERL, WITHOUT_SAMPLER),
    (logs.TRL, {name: None for name in logs.TRL if name.startswith("sampling/")}),
    (logs.OPENRLHF, {"train/vllm_kl": None}),
])
def test_a_record_without_the_samplers_log_probs(layout, changes, tmp_path):
    assert "inactive.unrecorded" not in held(tmp_path, layout)
    assert "inactive.unrecorded" in held(tmp_path, layout, changes)


@pytest.mark.parametrize("layout, zeros", [
    (logs.TRL, {f"{TRL_GAP}/mean": 0.0, f"{TRL_GAP}/max": 0.0}),
    (logs.OPENRLHF, {"train/vllm_kl": 0.0}),
    (logs.PRIME, {"mismatch_kl/all/mean": 0.0}),
    (logs.TINKER, {"optim/kl_sample_train_v1": 0.0}),
])
def test_log_probs_that_are_the_same_ones(layout, zeros, tmp_path):
    assert "inactive.copied" in held(tmp_path, layout, zeros)
    name = next(iter(zeros))
    once = zeros | {name: lambda step: 1e-7 * (step == 50)}  # anywhere in the record
    assert "inactive.copied" not in held(tmp_path, layout, once)


ONES = [
    (logs.VERL, {f"rollout_corr/rollout_is_{x}": 1.0 for x in ("mean", "min", "max")}),
    (logs.TRL, {f"{TRL_RATIO}/{x}": 1.0 for x in ("mean", "min", "max")}),
    (logs.SLIME, {"train/tis": 1.0}),
    (logs.SKYRL, {"policy/loss_metrics/is_ratio_mean": 1.0}),
    (logs.TUNIX, {  # what it logs without a correction
        "actor/train/sampler_is/weight_mean": 1.0, "actor/train/sampler_is/weight_min": 1.0,
        "sampler_is/train/weight_mean": None, "sampler_is/train/weight_max": None,
        "sampler_is/train/frac_clipped_at_threshold": None,
    }),
]


@pytest.mark.parametrize("layout, ones", ONES)
def test_weights_that_are_all_one(layout, ones, tmp_path):
    assert "inactive.ones" not in held(tmp_path, layout)
    shown = found(tmp_path, layout, ones)
    assert "inactive.ones" in names(shown["corrections"])
    assert "inactive.uncorrected" not in names(shown["corrections"])  # said once
    [name, *_] = ones
    assert "inactive.ones" not in held(
        tmp_path, layout, ones | {name: lambda step: 1.0 + 1e-4 * (step == 50)})


def test_a_ratio_that_no_weight_uses_is_no_weight(tmp_path):
    """verl's k1 and k3 of a gap of 0: no weight is 1, there is none."""
    zeros = {"rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0}
    assert "inactive.ones" not in held(tmp_path, logs.VERL, WITHOUT_WEIGHTS | zeros)


@pytest.mark.parametrize("layout, changes", [
    (logs.VERL, WITHOUT_WEIGHTS),
    (logs.SLIME, {"train/tis": None, "train/tis_clipfrac": None, "train/ois": None}),
    (logs.SKYRL, {"policy/loss_metrics/is_ratio_mean": None}),
])
def test_a_gap_that_nothing_corrects(layout, changes, tmp_path):
    assert "inactive.uncorrected" not in held(tmp_path, layout)
    assert "inactive.uncorrected" in held(tmp_path, layout, changes)


def test_masks_alone_correct(tmp_path):
    rejected = WITHOUT_WEIGHTS | {"rollout_corr/rollout_rs_masked_fraction": 0.001}
    assert "inactive.uncorrected" not in held(tmp_path, logs.VERL, rejected)


def test_nemo_rls_record_does_not_tell_whether_weights_are_used(tmp_path):
    shown = found(tmp_path, logs.NEMO)
    assert "inactive.uncorrected" in names(shown["undecided"])


def test_verls_bypass_mode_with_a_clipped_objective(tmp_path):
    assert "inactive.bypass" not in held(tmp_path, logs.VERL)
    assert "inactive.bypass" in held(tmp_path, logs.VERL, DECOUPLED)
    # loss_type=reinforce, which logs no clipped share, uses the weights.
    assert "inactive.bypass" not in held(tmp_path, logs.VERL, DECOUPLED | {"actor/pg_clipfrac": None})
    # TRL logs no probabilities either, and has no bypass mode.
    assert "inactive.bypass" not in held(tmp_path, logs.TRL)


@pytest.mark.parametrize("layout, low, high", [
    (logs.NEMO, "train/probs_ratio_min", "train/probs_ratio_max"),
    (logs.TUNIX, "actor/train/is_ratio/min", "actor/train/is_ratio/max"),
])
def test_a_clipped_ratio_that_is_one(layout, low, high, tmp_path):
    assert "inactive.trust_region" in held(tmp_path, layout, {low: 1.0, high: 1.0})
    assert "inactive.trust_region" not in held(tmp_path, layout, {low: 1.0, high: 1.01})


def test_few_steps_prove_nothing(tmp_path):
    shown = found(tmp_path, logs.TRL, {f"{TRL_RATIO}/{x}": 1.0 for x in ("mean", "min", "max")},
                  range(1, 10))
    assert not {"inactive.ones", "inactive.unrecorded"} & names(shown["corrections"])
    assert "inactive.ones" in names(shown["undecided"])


# Judged only after clipping


@pytest.mark.parametrize("layout, is_blind", [
    (logs.TRL, True), (logs.TUNIX, True), (logs.VERL, False), (logs.SKYRL, False), (logs.SLIME, False),
    (logs.PRIME, False), (logs.NEMO, False), (logs.NEMO | {"train/is_oob_ratio": 0.01}, True),
])
def test_weights_that_are_seen_after_their_bounds_alone(layout, is_blind, tmp_path):
    assert ("blind" in held(tmp_path, layout)) == is_blind


@pytest.mark.parametrize("at_cap, is_found", [(61, True), (60, False)])
def test_a_largest_weight_that_stands_at_its_cap(at_cap, is_found, tmp_path):
    """In more than half of 120 steps."""
    largest = {f"{TRL_RATIO}/max": lambda step: 3.0 if step <= at_cap else 2.0 + 0.001 * step}
    shown = found(tmp_path, logs.TRL, largest)
    assert ("blind.cap" in names(shown["corrections"])) == is_found
    evidence = [e for f in shown["corrections"] if f["name"] == "blind.cap" for e in f["evidence"]]
    assert [e["value"] for e in evidence] == ([pytest.approx(61 / 120)] if is_found else [])


# Kept mass inside the ratio


@pytest.mark.parametrize("layout, kept, whole", [
    # 1 + k3 - k1: a kept mass of 0.98 adds 0.02 to k1.
    (logs.VERL, {"rollout_corr/kl": noise(0.021, 1e-3), "rollout_corr/k3_kl": 0.001},
     {"rollout_corr/kl": noise(0.021, 1e-3), "rollout_corr/k3_kl": 0.021}),
    (logs.SLIME, {"train/tis": noise(0.98, 1e-3)}, {"train/tis": noise(1.0, 1e-3)}),
    (logs.SKYRL, {"policy/loss_metrics/is_ratio_mean": noise(0.98, 1e-3)},
     {"policy/loss_metrics/is_ratio_mean": noise(0.98, 0.1)}),  # a mean of 100 with an error of 0.01
    (logs.NEMO, {"train/sampling_importance_ratio": noise(0.98, 1e-3)},
     {"train/sampling_importance_ratio": noise(0.998, 1e-4)}),  # less than half a percent
    (logs.TUNIX, {"sampler_is/train/weight_mean": noise(0.98, 1e-3),
                  "sampler_is/train/frac_clipped_at_threshold": 0.0},
     {"sampler_is/train/weight_mean": noise(0.98, 1e-3), "sampler_trainer/train/logp_diff_max": 40.0,
      "sampler_is/train/frac_clipped_at_threshold": 0.01}),  # the cap may have lowered it
    # A mean |log-ratio| of 0.03 and a largest one of 0.3: no cap of 3 takes 2 % of single tokens.
    (logs.TRL, {f"{TRL_RATIO}/mean": noise(0.98, 1e-3), f"{TRL_GAP}/mean": 0.03},
     {f"{TRL_RATIO}/mean": noise(0.98, 1e-3), f"{TRL_GAP}/mean": 0.03, f"{TRL_RATIO}/max": 1.0}),
])
def test_a_ratio_below_one_in_one_direction(layout, kept, whole, tmp_path):
    shown = found(tmp_path, layout, kept)
    [mass] = [f for f in shown["corrections"] if f["name"] == "mass"]
    assert mass["evidence"][0]["value"] == pytest.approx(0.02, abs=1e-3)
    assert "mass" not in held(tmp_path, layout, whole)


def products(mean, spread, length=200.0, every=1):
    """TRL's log under sequence_mask: weights spread, some of them above 3 and so 0."""
    return {
        f"{TRL_RATIO}/mean": noise(mean, 0.02), f"{TRL_RATIO}/max": noise(2.7, 0.05),
        f"{TRL_RATIO}/min": 0.0 if every == 1 else noise(0.1, 0.01),
        # Of normal log-ratios of tokens whose sum has this spread.
        f"{TRL_GAP}/mean": 0.8 * spread / length**0.5, f"{TRL_GAP}/max": 4.5 * spread / length**0.5,
        "completions/mean_length": length,
    }


@pytest.mark.parametrize("mean, spread", [
    # N(-s^2 / 2, s) of the sampler: the learner's mass below log 3 is Phi((1.0986 - s^2 / 2) / s).
    (0.76, 0.95), (0.725, 1.0), (0.66, 1.1), (0.57, 1.3),
])
@pytest.mark.parametrize("every", [1, 10])  # a row for ten steps has no zero and no step's largest weight
def test_a_mask_takes_mass_without_any_filter(mean, spread, every, tmp_path):
    assert "mass" not in held(tmp_path, logs.TRL, products(mean, spread, every=every))


def test_less_than_a_mask_leaves_is_a_filter(tmp_path):
    """A spread of 0.3 has no mass above 3, and 200 tokens that each lose 0.2 % leave 0.67 of it."""
    shown = found(tmp_path, logs.TRL, products(0.67, 0.3))
    [mass] = [f for f in shown["corrections"] if f["name"] == "mass"]
    assert mass["evidence"][0]["value"] == pytest.approx(0.33, abs=0.02)
    shown = found(tmp_path, logs.TRL, {f"{TRL_GAP}/max": None, f"{TRL_RATIO}/mean": noise(0.98, 1e-3)})
    assert "mass" in names(shown["undecided"])  # nothing tells how wide the ratio is


def test_steps_without_a_weight_at_a_bound_are_not_chosen(tmp_path):
    """Of wide ratios they have the smaller means: NeMo-RL's steps without a token out of bounds."""
    low = {"train/is_oob_ratio": lambda step: 0.1 * (step % 2),
           "train/sampling_importance_ratio": lambda step: noise(1.02 if step % 2 else 0.98, 1e-3)(step)}
    assert "mass" not in held(tmp_path, logs.NEMO, low)
    low["train/sampling_importance_ratio"] = noise(0.9, 1e-3)
    assert "mass" in held(tmp_path, logs.NEMO, low | {"train/gen_kl_error": 1e-3})


def test_a_mean_that_a_few_steps_make_is_not_used(tmp_path):
    """Products of wide spread: 0.01 in most steps, and once in twenty 4."""
    rare = {"policy/loss_metrics/is_ratio_mean": lambda s: 4.0 if s % 20 == 0 else 0.01}
    assert "mass" not in held(tmp_path, logs.SKYRL, rare)
    once = {"policy/loss_metrics/is_ratio_mean": lambda s: 0.05 if s == 110 else 1e-3}
    assert "mass" not in held(tmp_path, logs.SKYRL, once)


def test_products_that_spread_too_far_for_a_mean_are_judged_by_its_logarithm(tmp_path):
    """NeMo-RL's products of 200 tokens. Of k1 = k3 = 0.01 the mean logarithm is -2, and that of the mean not
    below it; of k1 = 0.03 and k3 = 0.01 a token loses 0.02, and the mean logarithm is -6."""
    def wide(middle):
        return {
            "train/sampling_importance_ratio": lambda s: math.exp(noise(middle, 1.5)(s)) * (20 if s == 110 else 1),
            "train/gen_kl_error": 0.01, "train/mean_gen_tokens_per_sample": 200.0,
        }

    [mass] = [f for f in found(tmp_path, logs.NEMO, wide(-6.0))["corrections"] if f["name"] == "mass"]
    lost, *_ = mass["evidence"]
    assert lost["value"] == pytest.approx(0.02, abs=0.002)  # 0.02, and 0.015 / 100 by one step
    assert lost["metric"] == "0 - (log mismatch/ratio_mean_token / response_length/mean + rollout_corr/k3_kl)"
    assert "mass" not in held(tmp_path, logs.NEMO, wide(-2.0))
    assert "mass" not in held(tmp_path, logs.NEMO, wide(-6.0) | {"train/gen_kl_error": 0.03})
    assert "mass" not in held(tmp_path, logs.NEMO, wide(-6.0) | {"train/gen_kl_error": None})


def tokens_of_verl(seed, mean, spread, kept=1.0):
    """verl's metrics of 20,000 tokens a step over 60 steps. Log-ratios of tokens are normal; a filter that
    keeps a share of the learner's mass adds the logarithm of this share to each."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(1, 61):
        gap = rng.normal(mean, spread, 20_000) + math.log(kept)
        rows.append((step, {
            KL: float(-gap.mean()), K3: float(np.mean(np.exp(gap) - gap - 1)),
            "rollout_corr/rollout_is_mean": float(np.exp(gap).mean()), "actor/pg_clipfrac": 0.01,
        }))
    return rows


@pytest.mark.all
@pytest.mark.parametrize("spread, mean, kept, is_filter", [
    (0.1, None, 0.9, True), (0.5, None, 0.8, True), (0.8, None, 0.6, True), (0.3, None, 0.4, True),
    # True importance ratios: the mean is -spread^2 / 2, and the ratios have mean 1.
    *((spread, None, 1.0, False) for spread in (1.0, 3.5, 5.0, 6.5)),
    # Log-probs of other tokens or other weights: no filter leaves exp(-3) of the mass.
    (3.5, -16.3, 1.0, False), (0.5, -16.0, 1.0, False), (1.0, -3.0, 1.0, False),
])
def test_no_wide_gap_is_a_filter(spread, mean, kept, is_filter, tmp_path):
    """In each of six logs. The sample of a wide ratio lacks the tail that makes its mean 1."""
    centre = -(spread**2) / 2 if mean is None else mean
    for seed in range(6):
        path = logs.write_jsonl(tmp_path / "log.jsonl", tokens_of_verl(seed, centre, spread, kept))
        shown = foreign.diagnose([path], "verl")
        assert ("mass" in names(shown["corrections"])) == is_filter, seed
        assert "A" in shown["verdict"] or centre + math.log(kept) > -0.05


def test_the_gap_that_rules_out_a_filter_is_what_a_log_has(tmp_path):
    """k1, else k3, else the mean |log-ratio|; without any of them nothing is said."""
    lost = {"policy/loss_metrics/is_ratio_mean": noise(0.3, 1e-3)}
    gap = "policy/rollout_train_logprobs_abs_diff_mean"
    assert "mass" in held(tmp_path, logs.SKYRL, lost | {gap: 0.99})
    assert "mass" not in held(tmp_path, logs.SKYRL, lost | {gap: 1.01})
    assert "mass" in names(found(tmp_path, logs.SKYRL, lost | {gap: None})["undecided"])
    nemo = {"train/sampling_importance_ratio": noise(0.3, 1e-3)}
    assert "mass" in held(tmp_path, logs.NEMO, nemo | {"train/gen_kl_error": 0.99})
    assert "mass" not in held(tmp_path, logs.NEMO, nemo | {"train/gen_kl_error": 1.01})


def test_one_step_has_no_error(tmp_path):
    path = logs.write_jsonl(tmp_path / "log.jsonl", logs.rows(logs.SKYRL, steps=range(1, 2)))
    shown = foreign.diagnose([path], "auto", {"min_steps": 1.0, "window": 1.0})
    assert "mass" in names(shown["undecided"])


# Weights that shrink a step


def test_weights_that_shrink_every_step_25_times(tmp_path):
    """TRL's default over long answers: mean weight 0.04, some answers masked in every step."""
    shown = found(tmp_path, logs.TRL, products(0.04, 3.0, 1000.0) | {f"{TRL_RATIO}/mean": 0.04})
    told = {f["name"]: f for f in shown["findings"] + shown["corrections"]}
    assert {"shrunk", "shrunk.product", "shrunk.masked", "shrunk.trl"} <= set(told)
    assert "shrunk" in shown["verdict"]
    mean, times = told["shrunk"]["evidence"]
    assert (mean["value"], mean["theirs"]) == (pytest.approx(0.04), [f"{TRL_RATIO}/mean"])
    assert times["value"] == pytest.approx(25.0)
    assert 'vllm_importance_sampling_mode="token_truncate"' in told["shrunk.trl"]["advice"]


def test_weights_near_one_do_not_shrink_a_step(tmp_path):
    for mean in (0.51, lambda s: 0.45 + 0.5 * (s % 2 == 0) * (s % 4 == 0)):  # 0.575
        shown = found(tmp_path, logs.TRL, {f"{TRL_RATIO}/mean": mean})
        assert "shrunk" not in names(shown["findings"])


def test_which_weights_shrink(tmp_path):
    """Weights of tokens in a truncated product's place, verl's own name for them, and what uses none."""
    small = {"rollout_corr/rollout_is_mean": 0.3, "rollout_corr/rollout_is_min": 1e-4}
    told = names(found(tmp_path, logs.VERL, small)["findings"])
    assert {"shrunk", "shrunk.product"} <= told and "shrunk.masked" not in told
    factor = {"rollout_corr/rollout_is_batch_norm_factor": 0.3}
    assert "shrunk" not in names(found(tmp_path, logs.VERL, small | factor)["findings"])
    assert "shrunk" not in names(found(tmp_path, logs.VERL, small | DECOUPLED)["findings"])
    nemo = {"train/sampling_importance_ratio": 0.3, "train/is_oob_ratio": 0.01}
    assert "shrunk" in names(found(tmp_path, logs.NEMO, nemo)["undecided"])  # are they used?


def bypass(changes=()):
    """verl's bypass mode of 0.8 and later: the actor alone computes, and no old policy's probabilities."""
    values = {n: x for n, x in (logs.VERL | dict(changes)).items() if not n.startswith("training/")}
    return {n.replace("rollout_corr/", "actor/rollout_corr/"): x for n, x in values.items()}


SMALL = {"rollout_corr/rollout_is_mean": 0.3, "rollout_corr/rollout_is_min": 1e-4}


def test_weights_that_verls_bypass_mode_does_not_use_shrink_nothing(tmp_path):
    shown = found(tmp_path, bypass(SMALL))
    assert "shrunk" not in names(shown["findings"]) and "inactive.bypass" in names(shown["corrections"])
    used = found(tmp_path, bypass(SMALL | {"actor/pg_clipfrac": None}))  # loss_type=reinforce
    assert {"shrunk", "shrunk.product"} <= names(used["findings"])
    assert "inactive.bypass" not in names(used["corrections"])
    # Decoupled, with metrics of the actor beside those of the old policy.
    both = SMALL | {"actor/rollout_corr/kl": 0.02, "actor/rollout_corr/k3_kl": 0.02}
    shown = found(tmp_path, logs.VERL, both)
    assert "shrunk" in names(shown["findings"]) and "inactive.bypass" not in names(shown["corrections"])


@pytest.mark.parametrize("mean, is_found", [
    # Products 0.1 three times and 4, bound 2: 1.075 before it, 0.575 after.
    (1.075, False), (0.575, False),
    # 0.01 nine times and 4: 0.409 and 0.209.
    (0.409, True), (0.209, True),
])
@pytest.mark.parametrize("layout", [dict, bypass], ids=["decoupled", "bypass"])
def test_verls_weights_before_and_after_their_bound(layout, mean, is_found, tmp_path):
    """Before it up to 0.7.1, after it from 0.8 on. A mean before it is never below that after it, so what
    shrinks is small in both; and `mass` reads neither: 1 + k3 - k1 is 1."""
    weights = {"rollout_corr/rollout_is_mean": mean, "rollout_corr/rollout_is_min": 0.01}
    values = logs.VERL | weights if layout is dict else bypass(weights | {"actor/pg_clipfrac": None})
    shown = found(tmp_path, values)
    assert ("shrunk" in names(shown["findings"])) == is_found
    assert "mass" not in names(shown["corrections"])
    prefix = "" if layout is dict else "actor/"
    lost = {f"{prefix}rollout_corr/kl": noise(0.03, 1e-3)}  # k3 0.01: a mean ratio of 0.98
    assert "mass" in held(tmp_path, values | lost)


@pytest.mark.parametrize("layout, smallest", [
    (logs.VERL, "rollout_corr/rollout_is_min"), (bypass({"actor/pg_clipfrac": None}),
                                                 "actor/rollout_corr/rollout_is_min"),
])
def test_a_product_that_float32_does_not_hold_is_no_mask(layout, smallest, tmp_path):
    """exp(-110) is 0 there; verl's masks leave weights as they are."""
    values = {smallest.replace("_min", "_mean"): 0.04, smallest: 0.0}
    shown = names(found(tmp_path, layout, values)["findings"])
    assert {"shrunk", "shrunk.product"} <= shown and "shrunk.masked" not in shown


# The ratio of other weights


def growing(step):
    """A gap of 0.01 and 0.002 for each version of lag, the lag cycling 0, 1, 2."""
    return 0.01 + 0.002 * (step % 3)


def test_a_gap_that_grows_with_the_lag(tmp_path):
    name = "policy/rollout_train_logprobs_abs_diff_mean"
    lag = {"async/staleness_mean": lambda step: step % 3}
    assert "weights.lag" in held(tmp_path, logs.SKYRL, lag | {name: growing})
    assert "weights.lag" not in held(tmp_path, logs.SKYRL, lag | {name: noise(0.012, 1e-3)})
    # A trend of both is none: the lag rises from 1 to 12 in ten steps each.
    slow = {"async/staleness_mean": lambda step: 1 + step // 10, name: lambda step: noise(step, 1)(step)}
    assert "weights.lag" not in held(tmp_path, logs.SKYRL, slow)


def test_prime_rls_two_files_and_nemo_rls_ages(tmp_path):
    trainer = logs.write_jsonl(
        tmp_path / "a.jsonl", logs.rows(logs.PRIME, {"mismatch_kl/all/mean": growing}))
    orchestrator = logs.write_jsonl(tmp_path / "b.jsonl", logs.rows(logs.PRIME_ORCHESTRATOR))
    assert "weights.lag" in names(foreign.diagnose([trainer, orchestrator], "auto")["corrections"])
    alone = foreign.diagnose([trainer], "auto")
    assert "weights.lag" not in names(alone["corrections"])
    [entry] = [entry for entry in alone["missing"] if entry["metric"] == LAG]
    assert "orchestrator" in entry["switch"]
    ages = {"train/avg_trajectory_age": lambda step: step % 3, "train/gen_kl_error": growing}
    assert "weights.lag" in held(tmp_path, logs.NEMO, ages)


@pytest.mark.parametrize("period", [2, 4, 5, 8])
def test_a_gap_that_rises_until_weights_are_synced(period, tmp_path):
    name = "train/train_rollout_logprob_abs_diff"
    shown = found(tmp_path, logs.SLIME, {name: lambda step: 0.01 + 0.002 * ((step + 1) % period)})
    [sync] = [f for f in shown["corrections"] if f["name"] == "weights.sync"]
    assert sync["evidence"][0]["metric"].endswith(f"periods of {period} steps")
    assert sync["evidence"][0]["value"] == 1.0


@pytest.mark.parametrize("gap", [
    noise(0.01, 1e-3), lambda step: 0.01 + 1e-4 * step,  # a trend rises and never falls
    lambda step: noise(0.01 + 1e-3 * step, 1e-3)(step),
    lambda step: 0.01 + 0.005 * math.sin(step / 4),
    0.01,
])
def test_other_gaps_are_of_no_period(gap, tmp_path):
    name = "train/train_rollout_logprob_abs_diff"
    assert "weights.sync" not in held(tmp_path, logs.SLIME, {name: gap})


# TRL's own logs; make_trl_runs.py


@pytest.mark.parametrize("run, shown", [
    ("plain", {"inactive.unrecorded"}), ("whole", {"blind"}), ("sequence", {"blind"}),
    ("nucleus", {"blind", "mass"}), ("late", {"blind", "weights.sync"}),
])
def test_five_runs_of_trl(run, shown, tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": TRL_RUNS[run]}))
    diagnosis = foreign.diagnose([str(path)], "auto")
    assert names(diagnosis["corrections"]) == shown
    assert (diagnosis["framework"], diagnosis["steps"]) == ("trl", [1, 40])
    assert TRL_RUNS["versions"]["trl"] in diagnosis["source"]
    [mass] = [f for f in diagnosis["corrections"] if f["name"] == "mass"] or [None]
    if mass:  # at first a tenth; the policy becomes sharper, and top_p 0.9 keeps more
        assert 0.03 < mass["evidence"][0]["value"] < 0.1


# Logs that the Tinker cookbook's code wrote; make_tinker_run.py


@pytest.mark.parametrize("run, is_far", [("near", False), ("far", True)])
def test_two_logs_of_the_tinker_cookbook(run, is_far):
    """The doctor's values are those of the same log-probs in numpy."""
    path = pathlib.Path(__file__).parent / f"tinker_{run}.jsonl"
    record = foreign.load([str(path)], "auto")
    assert record.name == "tinker" and record.steps == tuple(range(make_tinker_run.STEPS))
    for step in record.steps:
        sampler, learner = (np.concatenate(x) for x in zip(*make_tinker_run.batch(run, step), strict=True))
        gap = np.float64(sampler) - learner
        assert record.series[KL][step + 1] == pytest.approx(gap.mean(), abs=1e-6)
        assert record.series[SAMPLER_LOGP][step + 1] == pytest.approx(-sampler.mean(), rel=1e-5)
        lag = 0.0 if is_far else step - np.mean(make_tinker_run.sampled_at(step))
        assert record.series[LAG][step + 1] == lag
    assert record.is_ahead == (not is_far)
    diagnosis = foreign.diagnose([str(path)], "auto")
    assert ("A" in diagnosis["verdict"]) == is_far and not diagnosis["corrections"]
