"""Records of which the cause is known, against what the doctor says of them.

The verdicts are written by hand from the decision tree of the survey, whose sentences stand above
the groups. A record is healthy, as in doctor_runs.py, but for what it names; runs have 120 steps
unless they say otherwise.
"""

import pathlib

import numpy as np
import pytest

from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, ENGINE_SHARE, ESS, K3, KL, LAG, LENGTH, NOISE, OUT_OF_BAND,
    PEARSON, PPL, PPO_KL, REJECTED, WEIGHTS_ESS,
)
from jaxrl_tis.doctor.diagnose import diagnose
from jaxrl_tis.doctor.frameworks import KL_REF, REWARD, SAMPLER_LOGP
from tests.doctor.runs import HEALTHY, late, names, write_run

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "doctor.md"

SEQUENCE = {"correction.weight": "seq_tis"}
UNWEIGHTED = {"correction.weight": "none"}
MASKED = {"correction.masks": "seq_mean_k3(upper=0.01)"}
BAND = {"correction.weight": "token_icepop"}
FOUR_EPOCHS = {"train.epochs": 4}
STALE = {LAG: 3.0, ENGINE_SHARE: 0.2}
INF = float("inf")


def noisy(value, spread, seed=0):
    """A series, or a constant, with normal noise of standard deviation `spread`."""
    noise = spread * np.random.default_rng(seed).standard_normal(200)
    return lambda step: float((value(step) if callable(value) else value) + noise[step])


def linear(first, last, steps=120):
    return lambda step: first + (last - first) * (step - 1) / (steps - 1)


def at(spike, level, where=110):
    return lambda step: spike if step == where else level


def only(**values):
    """Nothing is recorded but these."""
    kept = {"pearson": PEARSON, "clipped": CLIPPED, "chi2": CHI2, "length": LENGTH}
    return dict.fromkeys(HEALTHY) | {kept[name]: value for name, value in values.items()}


RECORDS = []  # (verdict, what the record is, metrics, fields of the config, steps)


def given(verdict, *records):
    """Adds records (what it is, metrics[, fields of the config[, steps]]) of one verdict."""
    for name, values, *rest in records:
        changes, steps = (*rest, *({}, 120)[len(rest):])
        RECORDS.append((frozenset(verdict.split()), name, values, changes, steps))


# "pearson >= 0.99, ppl_ratio ~ 1.0, kl < 0.02: no meaningful drift."
given(
    "healthy",
    ("nothing wrong", {}),
    ("noise in all", {
        PEARSON: noisy(0.994, 0.001, 1), KL: noisy(0.012, 0.004, 2), PPL: noisy(1.012, 0.005, 3),
        CHI2: noisy(0.1, 0.04, 4), ESS: noisy(0.9, 0.03, 5), CLIPPED: noisy(0.1, 0.03, 6),
        LENGTH: noisy(100.0, 8.0, 7), CHI2_SEQ: noisy(5.0, 2.0, 8), NOISE: noisy(1.0, 0.1, 9),
    }),
    ("just so", {PEARSON: 0.991, KL: 0.019, PPL: 1.019}),
    ("same engine", {PEARSON: 1.0, KL: 0.0, PPL: 1.0, CHI2: 0.0, CHI2_SEQ: 0.0, DP_MAX: 0.0}),
    ("kl around zero", {KL: noisy(0.0, 0.005)}),
    ("chi2 below 0.3", {CHI2: 0.29}),
    ("chi2_seq of long responses", {CHI2_SEQ: 50.0}),
    ("chi2_seq of sequence weights", {CHI2_SEQ: 9.0}, SEQUENCE),
    ("half the sample size", {ESS: 0.51}),
    ("verl's sample size alone", {ESS: None, WEIGHTS_ESS: 0.9}),
    ("rising clip below 0.2", {CLIPPED: linear(0.02, 0.19)}),
    ("no clip recorded", {CLIPPED: None}),
    ("rising clip of a narrow band", {CLIPPED: linear(0.1, 0.4)},
     {"correction.objective": "gspo"}),
    ("longer by 19 %", {LENGTH: late(100.0, 119.0)}),
    ("shorter by 40 %", {LENGTH: late(100.0, 60.0)}),
    ("surge and return", {LENGTH: lambda s: 150.0 if 40 < s <= 80 else 100.0}),
    ("noise falls", {NOISE: late(1.3, 1.0)}),
    ("noise without weights", {NOISE: late(1.0, 1.5)}, UNWEIGHTED),
    ("broken long ago", {PEARSON: late(0.6, 0.995), KL: late(0.4, 0.01), CHI2: late(9.0, 0.1)}),
    ("12 steps", {}, {}, 12),
    ("longer by half, but no step a hundred steps ago", {LENGTH: linear(100.0, 150.0, 60)}, {}, 60),
    ("fresh samples of old weights", {LAG: 2.0, ENGINE_SHARE: 0.9}),
    ("reuse without drift", {PPO_KL: 0.015}, FOUR_EPOCHS),
    ("few tokens rejected", {OUT_OF_BAND: 0.005}, BAND),
    # One step is no verdict: 0.495 on average, but 0.1 in all steps but one.
    ("one outlier", {CHI2: at(8.0, 0.1)}),
    ("one sequence", {CHI2_SEQ: at(1e5, 1.0)}),
    # 26 % longer on average, but by three steps of ten.
    ("three long steps", {LENGTH: lambda s: 250.0 if s in (112, 115, 118) else 80.0 + s % 2}),
    ("one noisy step", {NOISE: at(6.0, 1.0)}),
)
# Between the two bounds of the first question.
given(
    "watch",
    ("kl above 0.02", {KL: 0.021}),
    ("kl below 0.05", {KL: 0.049}),
    ("noisy kl", {KL: noisy(0.03, 0.01)}),
    ("pearson below 0.99", {PEARSON: 0.989}),
    ("pearson above 0.95", {PEARSON: 0.951}),
    ("one step of kl", {KL: at(2.0, 0.01)}),
    ("one step of ppl", {PPL: at(9.0, 1.0), KL: 0.021}),
)
# "pearson < 0.95, or rollout_probs_diff_max large, or ppl_ratio far from 1.0 at the same weights",
# "kl > 0.05 on the same checkpoint".
given(
    "A",
    ("pearson below 0.95", {PEARSON: 0.949}),
    ("no correlation", {PEARSON: 0.1}),
    ("noisy pearson", {PEARSON: noisy(0.92, 0.02)}),
    ("kl above 0.05", {KL: 0.051}),
    ("kl of 0.5", {KL: 0.5}),
    ("noisy kl", {KL: noisy(0.08, 0.02)}),
    ("ppl above 1", {PPL: 1.06}),
    ("ppl far above 1", {PPL: 3.0}),
    ("ppl below 1", {PPL: 0.97}),
    ("one token", {DP_MAX: at(0.9, 0.1)}),
    ("old samples, engine's gap", {KL: 0.1, LAG: 2.0, ENGINE_SHARE: 0.8}),
    ("int8", {PEARSON: 0.9}, {"engine.quantization": "w8a8"}),
    ("12 steps", {KL: 0.06}, {}, 12),
    ("pearson alone", only(pearson=0.9)),
    ("drop within the window", {PEARSON: lambda s: 0.995 if s <= 110 else 0.8}),
)
# "kl rises only after async lag, replay, or multi-epoch reuse".
given(
    "B",
    ("kl above 0.02", {KL: 0.021} | STALE),
    ("kl of 0.2", {KL: 0.2} | STALE),
    ("pearson below 0.95", {PEARSON: 0.9} | STALE),
    ("kl rises with the lag", {KL: linear(0.0, 0.05), LAG: linear(0.0, 8.0), ENGINE_SHARE: 0.1}),
    ("four epochs", {PPO_KL: 0.021}, FOUR_EPOCHS),
    ("four epochs, far", {PPO_KL: noisy(0.2, 0.05)}, FOUR_EPOCHS),
)
# "chi2_token > 0.3 but ess >= 0.5", "chi2_seq not exploding".
given(
    "C",
    ("chi2 above 0.3", {CHI2: 0.31}),
    ("chi2 below 1", {CHI2: 0.99, ESS: 0.5}),
    ("noisy chi2", {CHI2: noisy(0.6, 0.1), ESS: 0.7}),
    ("outliers in half of the steps", {CHI2: lambda s: 0.9 if s % 2 else 0.1}),  # 0.5 +- 0.09
    ("with longer products", {CHI2: 0.5, CHI2_SEQ: 50.0}),
    ("little rejected", {CHI2: 0.5, REJECTED: 0.005}, MASKED),
)
# "chi2_token > 1.0, chi2_seq explodes, or ess < 0.5", "proxy3_pure_noise rises after enabling IS".
given(
    "D",
    ("chi2 above 1", {CHI2: 1.01}),
    ("chi2 below 2", {CHI2: 1.99}),
    ("rising chi2", {CHI2: linear(0.0, 1.9)}),
    ("ess below 0.5", {ESS: 0.49}),
    ("ess of 0.05", {ESS: 0.05}),
    ("verl's ess alone", {ESS: None, WEIGHTS_ESS: 0.4}),
    ("ess after the mask", {ESS: 0.4, WEIGHTS_ESS: 0.95, REJECTED: 0.009}, MASKED),
    ("product, token weights", {CHI2_SEQ: 1e6}),
    ("product, token weights, 200", {CHI2_SEQ: 200.0}),
    ("product, no weights", {CHI2_SEQ: 1e4}, UNWEIGHTED),
    ("product, sequence weights", {CHI2_SEQ: 11.0}, SEQUENCE),
    ("product of infinite variance", {CHI2_SEQ: INF}),
    ("product of drifting tokens", {CHI2_SEQ: 1e6, CHI2: 0.5}),
    ("noise rises", {NOISE: late(1.0, 1.3)}),
    ("noise begins", {NOISE: late(0.0, 2.0)}, SEQUENCE),
    ("10 steps", {CHI2: 1.5}, {}, 10),
)
# "RS + token TIS: chi2_token in (2.0, 4.0] or 10-25% mask rate; systems fix: > 25 %, ESS below 0.3
# even after RS".
given(
    "escalate",
    ("12 % rejected", {REJECTED: 0.12, ESS: 0.85}, MASKED),
    ("24 % rejected", {REJECTED: 0.24, ESS: 0.7}, MASKED),
    ("26 % rejected", {REJECTED: 0.26, ESS: 0.7}, MASKED),
    ("15 % out of the band", {OUT_OF_BAND: 0.15, ESS: 0.8}, BAND),
)
given(
    "D escalate",
    ("chi2 above 2", {CHI2: 2.1}),
    ("chi2 above 4", {CHI2: 4.1}),
    ("infinite chi2", {CHI2: INF}),
    ("ess below 0.3 after rejection", {ESS: 0.29, WEIGHTS_ESS: 0.9, REJECTED: 0.05}, MASKED),
    ("all rejected", {ESS: 0.0, WEIGHTS_ESS: 1.0, REJECTED: 1.0}, MASKED),
    ("half rejected", {ESS: 0.49, WEIGHTS_ESS: 1.0, REJECTED: 0.51}, MASKED),
)
# "pg_clipfrac > 0.2 and rising".
given(
    "E",
    ("steady rise", {CLIPPED: linear(0.1, 0.35)}),
    ("slow rise", {CLIPPED: linear(0.15, 0.3)}),
    ("noisy rise", {CLIPPED: noisy(linear(0.1, 0.4), 0.02)}),
    ("jump", {CLIPPED: late(0.05, 0.25)}),
    ("every token", {CLIPPED: late(0.9, 1.0)}),
    ("30 steps", {CLIPPED: linear(0.1, 0.5, 30)}, {}, 30),
    ("bypass", {CLIPPED: linear(0.1, 0.35)}, {"correction.preset": "bypass_ppo_clip"}),
)
# Above a bound without the trend that the tree asks for, or too little to act on.
given(
    "noted",
    ("flat clip", {CLIPPED: 0.3}),
    ("flat clip of nearly all", {CLIPPED: 0.9}),
    ("flat noisy clip", {CLIPPED: noisy(0.3, 0.03)}),
    ("falling clip", {CLIPPED: linear(0.6, 0.25)}),
    ("jump long ago", {CLIPPED: lambda s: 0.05 if s <= 60 else 0.4}),
    ("flat clip and kl between", {CLIPPED: 0.3, KL: 0.03}),
    ("2 % rejected", {OUT_OF_BAND: 0.02}, BAND),
)
# "Response length surges by > 20 % within 100 steps".
given(
    "F",
    ("25 % longer", {LENGTH: late(100.0, 125.0)}),
    ("21 % longer", {LENGTH: late(100.0, 121.0)}),
    ("thrice as long", {LENGTH: late(100.0, 300.0)}),
    ("steady growth", {LENGTH: linear(100.0, 140.0)}),  # 138.5 over 104.9 in the mean
    ("noisy growth", {LENGTH: noisy(late(100.0, 135.0), 8.0)}),
    ("kl between", {LENGTH: late(100.0, 125.0), KL: 0.03}),
    ("verl's ess alone", {LENGTH: late(100.0, 125.0), ESS: None, WEIGHTS_ESS: 0.9}),
    ("length alone", only(length=late(100.0, 125.0))),
)
# An adapter that never reaches the sampler, or pinned weights: the gap is the distance of the policy
# from its base. Samples do not change.
STANDING = {SAMPLER_LOGP: noisy(0.5, 0.02, 10), REWARD: noisy(0.3, 0.05, 11)}
ADAPTER = {"model.lora": "lora(rank=8)"}
given(
    "frozen",
    ("adapter, early", {K3: linear(0.0, 0.02), KL: linear(0.0, 0.019)} | STANDING, ADAPTER),
    ("adapter, late", {K3: linear(0.0, 0.3), KL: linear(0.0, 0.3), PEARSON: linear(1.0, 0.7)} | STANDING,
     ADAPTER),
    ("pinned weights", {K3: linear(0.0, 0.04)} | STANDING),
    ("above a quantized base", {K3: noisy(linear(0.004, 0.05), 0.002)} | STANDING, {
        "engine.quantization": "w8a8"} | ADAPTER),
    ("kl to the reference, no log-probs", {
        K3: linear(0.001, 0.04), KL_REF: noisy(linear(0.0, 0.05), 0.001)}, ADAPTER),
    ("kl in one step of ten", {
        K3: noisy(linear(0.001, 0.06), 0.004), KL_REF: noisy(linear(0.0, 0.05), 0.004)} | STANDING),
    ("samplers that run ahead", {K3: linear(0.0, 0.04), LAG: 2.0, ENGINE_SHARE: 0.9} | STANDING, ADAPTER),
    ("50 steps", {K3: linear(0.0, 0.04, 50)} | STANDING, ADAPTER, 50),
)
# The gap grows, or is there, for another reason.
given(
    "healthy",
    ("grows with the lag", {K3: linear(0.001, 0.015), LAG: linear(0.0, 7.0), ENGINE_SHARE: 0.9} | STANDING,
     ADAPTER),
    ("quantization", {K3: noisy(0.012, 0.002)} | STANDING, {"engine.quantization": "w8a8"} | ADAPTER),
    ("grows with a falling entropy", {K3: linear(0.001, 0.015)} | STANDING | {
        SAMPLER_LOGP: noisy(linear(0.6, 0.2), 0.02)}, ADAPTER),
    ("grows with the length", {K3: linear(0.001, 0.015), LENGTH: noisy(linear(100.0, 118.0), 2.0)}
     | STANDING, ADAPTER),
    ("grows as the samples get better", {K3: linear(0.001, 0.015)} | STANDING | {
        REWARD: noisy(linear(0.1, 0.7), 0.05)}, ADAPTER),
    ("far from its reference, small gap", {
        K3: linear(0.001, 0.015), KL_REF: linear(0.0, 1.0)} | STANDING, ADAPTER),
    ("follows the lag from step to step", {
        K3: lambda s: (0.001 + 0.0001 * s) * (1 + s % 2), LAG: 1.5, ENGINE_SHARE: 0.9,
    } | STANDING, ADAPTER),
    ("grows by half", {K3: linear(0.008, 0.013)} | STANDING, ADAPTER),
    ("30 steps of growth", {K3: linear(0.0, 0.015, 30)} | STANDING, ADAPTER, 30),
)
# Several causes at once.
given("A C", ("engine and tokens", {PEARSON: 0.9, CHI2: 0.5}))
given("A D", ("engine and tails", {KL: 0.06, CHI2: 1.5}), ("spike, product", {
    DP_MAX: at(0.9, 0.1), CHI2_SEQ: 1e6,
}))
given("A D escalate", ("engine and weights", {KL: 0.3, CHI2: 6.0, ESS: 0.1}))
given("A E", ("engine and clip", {KL: 0.06, CLIPPED: linear(0.1, 0.35)}))
given("A F", ("engine and length", {PEARSON: 0.9, LENGTH: late(100.0, 130.0)}))
given("B C", ("lag and tokens", {KL: 0.03, CHI2: 0.5} | STALE))
given("B D", ("lag and tails", {KL: 0.03, CHI2: 1.5} | STALE))
given("B E", ("reuse and clip", {PPO_KL: 0.05, CLIPPED: linear(0.1, 0.35)}, FOUR_EPOCHS))
given("C E", ("tokens and clip", {CHI2: 0.5, CLIPPED: linear(0.1, 0.35)}))
given("C F", ("tokens and length", {CHI2: 0.5, LENGTH: late(100.0, 130.0)}))
given("D F", ("length feeds products", {CHI2_SEQ: 1e6, LENGTH: late(100.0, 130.0)}))
given("C noted", ("tokens and a flat clip", {CHI2: 0.5, CLIPPED: 0.3}))
given("E F", ("clip and length", {CLIPPED: linear(0.1, 0.35), LENGTH: late(100.0, 130.0)}))
# What cannot be told.
given(
    "open",
    ("9 steps", {PEARSON: 0.1, CHI2: 9.0}, {}, 9),
    ("nothing recorded", only()),
    ("no correlation recorded", {PEARSON: None}),
    ("no chi2 recorded", {CHI2: None}),
    ("no sample size recorded", {ESS: None}),
    ("old samples, gap not split", {KL: 0.06, LAG: 2.0}),
    ("clip, too few steps for a trend", {CLIPPED: 0.3}, {}, 20),
    ("pearson of few tokens", {PEARSON: noisy(0.93, 0.1)}),  # neither above 0.95 nor clearly below
)

LABELS = {"rejected": "noted", "clipped": "noted", "not enough data": "open"}


def label(finding):
    root = finding.split(".")[0]
    return LABELS.get(root, root)


@pytest.fixture(scope="module")
def diagnoses(tmp_path_factory):
    out = []
    for number, (_, _, values, changes, steps) in enumerate(RECORDS):
        path = tmp_path_factory.mktemp(f"run{number}")
        out.append(diagnose(write_run(path, values, changes, steps)))
    return out


def test_every_record_gets_its_verdict_and_no_other(diagnoses):
    assert len(RECORDS) >= 60
    wrong = [
        (sorted(expected), name, diagnosis["verdict"])
        for (expected, name, *_), diagnosis in zip(RECORDS, diagnoses, strict=True)
        if {label(found) for found in diagnosis["verdict"]} != expected
    ]
    assert wrong == []


def test_healthy_and_watch_stand_alone(diagnoses):
    alone = [d["verdict"] for d in diagnoses if {"healthy", "watch"} & set(d["verdict"])]
    assert alone and all(len(verdict) == 1 for verdict in alone)


def test_a_surge_that_cannot_be_told_is_named(diagnoses):
    [short] = [d for (_, name, *_), d in zip(RECORDS, diagnoses, strict=True) if "no step a hundred" in name]
    assert "F" in names(short["undecided"])


def test_the_page_has_their_number():
    assert f"{len(RECORDS)} records" in PAGE.read_text(encoding="utf-8")
