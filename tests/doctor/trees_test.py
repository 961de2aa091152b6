"""A synthetic record for every leaf of the two trees, and advice that the config accepts.

The judged window is steps 101-120, the window before it 81-100, and a surge compares steps 111-120
with 11-20.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxrl_tis import validate as validation
from jaxrl_tis.diagnostics import attribution, batch_metrics, mismatch, routes
from jaxrl_tis.doctor import asynchrony, case, depth, effects, frozen, stale_cache
from jaxrl_tis.doctor.asynchrony import STALENESS_GAP
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, ENGINE_SHARE, ESS, FLIPS, IS_VALID, K3, KL, LAG, LENGTH,
    MEAN_GAP, NOISE, OUT_OF_BAND, PEARSON, PPL, PPO_KL, REJECTED, ROUTE_DROPS, ROUTE_GAPS,
    TURNS, TV,
)
from jaxrl_tis.doctor.diagnose import FACTS, diagnose
from jaxrl_tis.doctor.trees import CAUSES, SETUP
from jaxrl_tis.estimators import centering, objectives
from jaxrl_tis.estimators.presets import ICEPOP
from jaxrl_tis.validate import validate
from tests.doctor.runs import config_of, late, names, write_run

PRODUCT_PPO = {"correction.objective": "seq_ppo", "correction.aggregation": "seq-mean-token-mean"}
BYPASS = {"correction.preset": "bypass_ppo_clip"}
BAND = {"correction.weight": "token_icepop"}
PRODUCT = {"correction.weight": "seq_tis"}
ONCE = {"engine.corrected", "quadrant.none", "training.once", "model.dense", "trajectory.single"}

STALE = {LAG: 2.0, ENGINE_SHARE: 0.4}
MOVED_BEFORE = {"mismatch/trust_region/share": 0.05, "mismatch/staleness/share": 0.9}
MESH = {"mesh.serve": (1, 1, 2)}
FILTER = {"rollout.top_p": 0.9, "rollout.allow_filter_bias": True}
BFLOAT16 = {"engine.dtype": "bfloat16"}
WIDE = {"correction.objective": "ppo(clip_high=0.4)"}
W8A8_BOTH = {"engine.quantization": "w8a8", "model.quantization": "w8a8"}


RISING = {CLIPPED: late(0.25, 0.3)}


def but(less, *more):
    """The findings of a plain set-up without one, or several, and with others in their place."""
    return ONCE - ({less} if isinstance(less, str) else {*less}) | {*more}


def split(flipped, rest, dropped=(0.0, 0.0)):
    """The gap of tokens with and without a flip, and their shares outside IcePop's band."""
    return dict(zip((*ROUTE_GAPS, *ROUTE_DROPS), (flipped, rest, *dropped), strict=True))


def clip(width):
    return {"correction.objective": f"ppo(clip_high={width})"}


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """A correction is traced once for all configs that have it."""
    found, traced = {}, validation.trace_problems

    def once(chosen):
        key = repr(chosen)
        if key not in found:
            found[key] = list(traced(chosen))
        return found[key]

    with mock.patch.object(validation, "trace_problems", once):
        yield


# (metrics, fields of the config, findings): those of CAUSES here, those of SETUP below.
CAUSE_CASES = {
    "healthy": ({}, {}, {"healthy"}),
    "healthy-int8": ({DP_MAX: 0.9}, {"engine.quantization": "w8a8"}, {"healthy"}),
    "healthy-filter": ({}, FILTER, {"healthy"}),
    "healthy-other-engine": ({}, BFLOAT16 | MESH, {"healthy"}),
    "healthy-below": ({KL: -0.015, CHI2: 0.2, CLIPPED: 0.15}, {}, {"healthy"}),
    "healthy-long": ({CHI2_SEQ: 90.0}, {}, {"healthy"}),
    "healthy-product": ({CHI2_SEQ: 8.0}, PRODUCT, {"healthy"}),
    "healthy-noise": ({NOISE: late(10.0, 11.0)}, {}, {"healthy"}),
    "healthy-silent": ({NOISE: 0.0}, {}, {"healthy"}),
    "healthy-unweighted": ({NOISE: late(1.0, 1.3)}, {"correction.weight": "none"}, {"healthy"}),
    "healthy-once": ({PPO_KL: 0.03}, {}, {"healthy"}),
    "healthy-reuse": ({}, {"train.epochs": 2}, {"healthy"}),
    "healthy-bypass": ({PPO_KL: 0.03}, BYPASS | {"train.epochs": 2}, {"healthy"}),
    "healthy-band": ({OUT_OF_BAND: 0.005, K3: 0.03}, BAND, {"healthy"}),
    "healthy-flat": ({OUT_OF_BAND: 0.005, K3: float("inf")}, BAND, {"healthy"}),
    "healthy-tiny": ({OUT_OF_BAND: 0.005, K3: late(0.001, 0.002)}, BAND, {"healthy"}),
    "healthy-rejecting": ({OUT_OF_BAND: late(0.005, 0.008), K3: late(0.02, 0.03)}, BAND,
        {"healthy"}),
    "healthy-wide": ({}, WIDE, {"healthy"}),
    "healthy-narrow": (RISING, clip(0.08), {"healthy"}),
    "healthy-gspo": (RISING, {"correction.objective": "gspo"}, {"healthy"}),
    "healthy-unclipped": (RISING, {"correction.objective": "reinforce"}, {"healthy"}),
    "watch": ({KL: 0.03}, {}, {"watch"}),
    "watch-pearson": ({PEARSON: 0.97}, {}, {"watch"}),
    "watch-moe": ({KL: 0.09, PPL: 1.09, FLIPS: 0.1}, {}, {"watch"}),
    "A-kl": ({KL: 0.06}, {}, {"A", "A.kernels"}),
    "A-ppl": ({PPL: 1.06}, {}, {"A", "A.kernels"}),
    "A-stale": ({KL: 0.06, LAG: 2.0, ENGINE_SHARE: 0.6}, {}, {"A", "A.kernels"}),
    "A-max": ({PEARSON: 0.9, DP_MAX: 0.6}, {}, {"A", "A.kernels"}),
    "A-kl-max": ({KL: 0.06, DP_MAX: 0.6}, {}, {"A", "A.kernels"}),
    "A.kernels": ({PEARSON: 0.94}, {}, {"A", "A.kernels"}),
    "A.record": ({PPL: 0.97}, {}, {"A", "A.record", "A.kernels"}),
    "A.record-kl": ({KL: -0.03}, {}, {"A", "A.record", "A.kernels"}),
    "A.spike": ({DP_MAX: lambda s: 0.6 if s == 110 else 0.1}, {}, {"A", "A.kernels", "A.spike"}),
    "A.filter": ({KL: 0.06}, FILTER, {"A", "A.filter"}),
    "A.filter-kept": ({KL: 0.06}, {"rollout.top_p": 0.9, "rollout.sampling_mask_size": 64},
        {"A", "A.kernels"}),
    "A.routing": ({KL: 0.12, FLIPS: 0.1}, {}, {"A", "A.routing"}),
    "A.routing-ppl": ({PPL: 1.12, FLIPS: 0.1}, {}, {"A", "A.routing"}),
    # The gap is 0.1 * 0.5 + 0.9 * 0.1 = 0.14, and 0.1 * (0.5 - 0.1) of it comes with the flips.
    "A.routing-gap": ({KL: 0.12, FLIPS: 0.1} | split(0.5, 0.1), {}, {"A", "A.routing"}),
    # Of 0.11 a share of 0.1 * (0.2 - 0.1) / 0.11 = 0.09 does.
    "A.routing-little": ({KL: 0.12, FLIPS: 0.1} | split(0.2, 0.1), {}, {"A", "A.kernels"}),
    "A.routing-alike": ({KL: 0.12, FLIPS: 0.5} | split(0.1, 0.1), {}, {"A", "A.kernels"}),
    "A.routing-replayed": ({KL: 0.12, FLIPS: 0.0} | split(0.0, 0.1), {}, {"A", "A.kernels"}),
    "A.quantized": ({PEARSON: 0.9}, {"engine.quantization": "w8a8"} | BFLOAT16 | MESH,
        {"A", "A.quantized"}),
    "A.quantized-learner": ({PEARSON: 0.9}, {"model.quantization": "w8a8"}, {"A", "A.quantized"}),
    "A.quantized-exclusions": ({PEARSON: 0.9}, W8A8_BOTH | {"model.unquantized": ("down",)},
        {"A", "A.quantized"}),
    "A.quantized-alike": ({PEARSON: 0.9},
        W8A8_BOTH | {f"{of}.unquantized": ("o",) for of in ("engine", "model")},
        {"A", "A.kernels"}),
    "A.noise": ({PEARSON: 0.9}, {"engine.noise_start": 0.01}, {"A", "A.noise"}),
    "A.injected": ({PEARSON: 0.9}, {"engine.injected": "logits(scale=0.5)"}, {"A", "A.injected"}),
    "A.dtype": ({KL: 0.06}, BFLOAT16 | MESH, {"A", "A.dtype"}),
    "A.dtype-cache": ({KL: 0.06}, {"engine.cache_dtype": "bfloat16"}, {"A", "A.dtype"}),
    "A.parallel": ({KL: 0.06}, MESH, {"A", "A.parallel"}),
    "B.lag": ({KL: 0.03} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-max": ({DP_MAX: lambda s: 0.6 if s == 110 else 0.1} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-record": ({PPL: 0.97} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-ppl": ({PPL: 1.06} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-negative": ({KL: -0.03} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-pearson": ({PEARSON: 0.9} | STALE, {}, {"B.lag", "B.correct"}),
    "B.lag-chi2": ({CHI2: 0.5} | STALE, {}, {"B.lag", "B.correct", "C"}),
    # By the weights that drew, the engine's gap is small; KL to these holds the age.
    "B.lag-ring": (STALE | MOVED_BEFORE | {STALENESS_GAP: 0.2, PPO_KL: 0.5}, {"train.epochs": 2},
        {"B.lag", "B.correct"}),
    "B.lag-little": (STALE | MOVED_BEFORE | {STALENESS_GAP: 0.15}, {}, {"healthy"}),
    "B.reuse": ({PPO_KL: 0.03}, {"train.epochs": 2}, {"B.reuse"}),
    "B.reuse-stale": (
        STALE | {f"mismatch/{part}/share": share for part, share in
                 (("trust_region", 0.2), ("staleness", 0.1))} | {PPO_KL: 0.03},
        {"train.epochs": 2}, {"B.reuse"},
    ),
    "C": ({CHI2: 0.9}, {}, {"C"}),
    "D.tokens": ({CHI2: 1.5, NOISE: late(1.0, 1.3)}, {}, {"D", "D.tokens"}),
    "D.tokens-ess": ({ESS: 0.25}, {}, {"D", "D.tokens"}),
    "D.tokens-toxic": ({CHI2: 3.0}, {}, {"escalate.weights", "D"}),
    "D.tokens-beyond": ({CHI2: 5.0}, {}, {"escalate.system", "D"}),
    "D.product": ({ESS: 0.45, CHI2_SEQ: 20.0}, PRODUCT, {"D", "D.product"}),
    "D.product-mask": ({ESS: 0.45}, {"correction.masks": "seq_sum_k1(upper=2.0)"},
        {"D", "D.product"}),
    "D.routing": ({CHI2: 1.5, FLIPS: 0.5} | split(0.1, 0.1, (0.02, 0.01)), {},
        {"D", "D.tokens", "D.routing"}),
    "D.routing-alone": ({CHI2: 1.5, FLIPS: 0.5} | split(0.1, 0.1, (0.02, 0.0)), {},
        {"D", "D.tokens", "D.routing"}),
    "D.routing-alike": ({CHI2: 1.5, FLIPS: 0.5} | split(0.5, 0.1, (0.019, 0.01)), {}, {"D", "D.tokens"}),
    "D.routing-length": ({CHI2_SEQ: 1e6, FLIPS: 0.5} | split(0.5, 0.1, (0.02, 0.01)), {},
        {"D", "D.length"}),
    "D.length": ({CHI2_SEQ: 20.0, NOISE: late(1.0, 1.3)}, PRODUCT, {"D", "D.length"}),
    "D.length-tokens": ({CHI2_SEQ: 1e6}, {}, {"D", "D.length"}),
    "D.length-unweighted": ({CHI2_SEQ: 1e6}, {"correction.weight": "none"}, {"D", "D.length"}),
    "D.length-both": ({CHI2_SEQ: 1e6, CHI2: 1.5}, {}, {"D", "D.tokens"}),
    "D.length-escalated": ({CHI2_SEQ: 1e6, REJECTED: 0.15}, {}, {"escalate.weights", "D"}),
    "D.noise": ({NOISE: late(1.0, 1.3)}, {}, {"D.noise"}),
    "D.noise-new": ({NOISE: late(0.0, 1.0)}, {}, {"D.noise"}),
    "escalate.weights": ({CHI2: 3.0}, PRODUCT, {"escalate.weights", "D"}),
    "escalate.weights-band": ({OUT_OF_BAND: 0.15, CHI2: 0.5, NOISE: late(1.0, 1.3)}, BAND,
        {"escalate.weights"}),
    "escalate.weights-mask": ({REJECTED: 0.15}, {}, {"escalate.weights"}),
    "escalate.system": ({CHI2: 5.0}, PRODUCT, {"escalate.system", "D"}),
    "escalate.system-band": ({OUT_OF_BAND: 0.3, CHI2: 0.5, NOISE: late(1.0, 1.3)}, BAND,
        {"escalate.system"}),
    "escalate.system-mask": ({REJECTED: 0.3}, {}, {"escalate.system"}),
    "escalate.ess": ({ESS: 0.25, OUT_OF_BAND: 0.15}, BAND, {"escalate.ess", "D"}),
    "escalate.ess-mask": ({ESS: 0.25, REJECTED: 0.05}, PRODUCT | {"correction.masks": "veto"},
        {"escalate.ess", "D"}),
    "rejected.many": ({OUT_OF_BAND: 0.08}, BAND, {"rejected.many"}),
    "rejected.many-mask": ({REJECTED: 0.015}, {}, {"rejected.many"}),
    "rejected.blind": ({OUT_OF_BAND: 0.005, K3: late(0.02, 0.03)}, BAND, {"rejected.blind"}),
    "clipped.many": ({CLIPPED: 0.3}, clip(0.15), {"clipped.many"}),
    "clipped.many-fewer": ({CLIPPED: late(0.4, 0.3)}, {}, {"clipped.many"}),
    "clipped.many-slightly": ({CLIPPED: late(0.3, 0.312)}, {}, {"clipped.many"}),  # by 4 %
    # Means 0.28 and 0.3 of standard error 0.1 / sqrt(19) each: 0.02 / 0.0324 = 0.6.
    "clipped.many-noise": ({CLIPPED: lambda s: (0.28 if s <= 100 else 0.3) + 0.1 * (-1) ** s}, {},
        {"clipped.many"}),
    "E.pressure": (RISING, clip(0.15), {"E", "E.pressure"}),
    "E.pressure-higher": (RISING, clip(0.28), {"E", "E.pressure"}),
    "E.bypass": (RISING, BYPASS, {"E", "E.bypass"}),
    "E.product": (RISING, PRODUCT_PPO, {"E", "E.product", "E.pressure"}),
    "E.product-widened": (RISING, PRODUCT_PPO | {"correction.objective": "seq_ppo(clip_high=0.4)"},
        {"E", "E.product", "E.pressure"}),
    "E.bypass-product": (RISING, BYPASS | PRODUCT_PPO, {"E", "E.bypass", "E.product"}),
    "E.widened": (RISING, WIDE, {"E", "E.pressure", "E.widened"}),
    "E.widened-low": (RISING, {"correction.objective": "dual_clip(clip_low=0.35)"},
        {"E", "E.pressure", "E.widened"}),
    "F": ({LENGTH: lambda s: 100.0 if s <= 100 else 121.0}, {}, {"F"}),
    "F-watch": ({LENGTH: late(100.0, 125.0), KL: 0.03}, {}, {"F"}),
}
ROUTED = {FLIPS: 0.05}
KL_LOSS = {"correction.kl_coeff": 0.01}
CENTRED = {"correction.preset": "centered_tis_2"}
DIRECT = {"correction.preset": "ppo_is", "correction.objective": "dis"}
SETUP_CASES = {
    "engine.corrected": ({KL: 0.03}, {}, ONCE),
    "engine.corrected-objective": ({},
        {"correction.weight": "none", "correction.objective": "qurl_acr"}, ONCE),
    "engine.corrected-masks": ({}, {"correction.preset": "decoupled_geo_rs"}, ONCE),
    "engine.same": ({DP_MAX: 0.0}, {}, but("engine.corrected", "engine.same")),
    "engine.same-unweighted": ({DP_MAX: 0.0}, {"correction.weight": "none"},
        but("engine.corrected", "engine.same")),
    "engine.same-bypass": ({DP_MAX: 0.0, KL: 0.03}, BYPASS, but("engine.corrected", "engine.same")),
    "engine.uncorrected": ({KL: 0.03}, {"correction.weight": "none"},
        but("engine.corrected", "engine.uncorrected")),
    "engine.tolerated": ({}, {"correction.weight": "none"},
        but("engine.corrected", "engine.tolerated")),
    "engine.folded": ({KL: 0.03}, BYPASS, but("engine.corrected", "engine.folded")),
    "engine.bypass": ({}, BYPASS, but("engine.corrected", "engine.bypass")),
    "engine.bypass-masks": ({}, {"correction.preset": "bypass_ppo_clip_geo_rs"},
        but("engine.corrected", "engine.bypass")),
    "engine.direct": ({KL: 0.03}, {"correction.preset": "flash_reinforce"},
        but("engine.corrected", "engine.direct")),
    "engine.direct-objective": ({KL: 0.03}, DIRECT, but("engine.corrected", "engine.direct")),
    "engine.folded-unweighted": (  # nothing weighs the gap
        {KL: 0.03}, DIRECT | {"correction.objective": "reinforce"},
        but("engine.corrected", "engine.folded"),
    ),
    "engine.centred": ({KL: 0.03, CHI2: 1.5, "centering/sampler_mass": 0.95}, CENTRED,
        but(("engine.corrected", "quadrant.none"), "engine.centred", "quadrant.sequences")),
    "engine.head": ({"centering/sampler_mass": 0.8}, CENTRED,
        but("engine.corrected", "engine.centred", "engine.head")),
    "training.once": ({LAG: 0.0}, {}, ONCE),
    "training.reused": ({}, {"train.minibatches": 4}, but("training.once", "training.reused")),
    "training.async": ({LAG: 6.0, ENGINE_SHARE: 0.9}, {},
        but("training.once", "training.async", "async.naive")),
    "training.async-reused": (STALE, {"train.epochs": 2},
        but("training.once", "training.async", "async.naive")),
    "training.late": ({LAG: 9.0, ENGINE_SHARE: 0.9}, {},
        but("training.once", "training.late", "async.naive")),
    "kl.reused": ({}, {"train.epochs": 2} | KL_LOSS,
        but("training.once", "training.reused", "kl.reused")),
    "kl-once": ({}, KL_LOSS, ONCE),
    "kl-ratio": ({}, {"train.epochs": 2, "correction.kl": "is_k3"} | KL_LOSS,
        but("training.once", "training.reused")),
    "kl-reward": ({}, {"train.epochs": 2, "correction.kl_placement": "reward"} | KL_LOSS,
        but("training.once", "training.reused")),
    "model.dense": ({}, {}, ONCE),
    "model.moe_once": (ROUTED, {}, but("model.dense", "model.moe_once")),
    "model.moe_few": (ROUTED, {"train.epochs": 3},
        but(("model.dense", "training.once"), "model.moe_few", "training.reused")),
    "model.moe_many": (ROUTED, {"train.epochs": 2, "train.minibatches": 2},
        but(("model.dense", "training.once"), "model.moe_many", "training.reused")),
    "trajectory.single": ({TURNS: 1.0}, {}, ONCE),
    "trajectory.agentic": ({TURNS: 3.5}, {}, but("trajectory.single", "trajectory.agentic")),
}


QUADRANTS = (
    ({TV: 0.09, CHI2: 0.9, CHI2_SEQ: 90.0}, "none"), ({TV: 0.11}, "tokens"), ({CHI2_SEQ: 110.0}, "sequences"),
    ({CHI2: 1.1}, "sequences"), ({TV: 0.11, CHI2: 1.1}, "system"), ({TV: None}, "none"),
    ({TV: None, KL: 0.03}, "tokens"),  # sqrt(0.03 / 2) = 0.12, and sqrt(0.01 / 2) = 0.07
)


def test_total_variation_and_chi2_make_quadrants(tmp_path):
    for values, expected in QUADRANTS:
        found = names(diagnose(write_run(tmp_path, values))["setup"])
        assert [x for x in found if x.startswith("quadrant.")] == [f"quadrant.{expected}"], values


@pytest.mark.parametrize("case", CAUSE_CASES)
def test_the_record_leads_to_its_cause(case, tmp_path):
    values, changes, expected = CAUSE_CASES[case]
    diagnosis = diagnose(write_run(tmp_path, values, changes))
    assert names(diagnosis["findings"]) == expected
    assert diagnosis["undecided"] == []
    roots = [f.name for f in CAUSES if f.name in expected and f.parent is None]
    assert diagnosis["verdict"] == roots
    assert diagnosis["steps"] == [1, 120] and diagnosis["window"] == [101, 120]


@pytest.mark.parametrize("case", SETUP_CASES)
def test_the_set_up_leads_to_the_corrections_it_needs(case, tmp_path):
    values, changes, expected = SETUP_CASES[case]
    diagnosis = diagnose(write_run(tmp_path, values, changes))
    assert names(diagnosis["setup"]) == expected


def test_every_leaf_has_a_record():
    """Those of frozen.py, stale_cache.py, depth.py, effects.py and asynchrony.py have it in their own
    tests."""
    others = (*frozen.CAUSES, *stale_cache.CAUSES, *depth.CAUSES, *effects.CAUSES, *asynchrony.CAUSES, *asynchrony.SETUP)
    elsewhere = {f.name for f in others} | {f"quadrant.{name}" for _, name in QUADRANTS}
    of = lambda cases: set().union(*(e for _, _, e in cases.values())) | elsewhere
    assert {f.name for f in CAUSES} <= of(CAUSE_CASES)
    assert {f.name for f in SETUP} <= of(SETUP_CASES)


def test_findings_name_only_earlier_findings_and_known_thresholds():
    seen = set()
    for finding in (*CAUSES, *SETUP):
        assert finding.name not in seen
        parents = [finding.parent] if finding.parent else []
        assert {*finding.unless, *finding.unless_known, *parents} <= seen
        for clause in (*finding.all_of, *finding.any_of):
            assert clause.op in case.OPS
            is_number = isinstance(clause.threshold, (int, float))
            assert is_number or clause.threshold in case.THRESHOLDS
        seen.add(finding.name)


REFUSED_BY_SYNCHRONOUS_RUNS = {"a3po", "staleness"}


def together(diagnosis):
    """{field: value} of all advised lines; no two of them contradict each other."""
    advised = {}
    for finding in (*diagnosis["findings"], *diagnosis["setup"]):
        for change in finding["changes"]:
            field, value = change["field"], change["value"]
            assert advised.setdefault(field, value) == value, (finding["name"], field)
            assert change["now"] != value
            is_method = field in ("correction.objective", "correction.masks", "correction.preset")
            named = {part.split("(")[0] for part in value.split(" & ")} if is_method else set()
            assert not named & REFUSED_BY_SYNCHRONOUS_RUNS
    return advised


def of_model(values, changes):
    """Only a model with experts has flips."""
    return changes | ({"model.num_experts": 8} if FLIPS in values else {})


def check_advice(diagnosis, config):
    """The config accepts the lines of each finding."""
    for finding in (*diagnosis["findings"], *diagnosis["setup"]):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict({line["field"]: line["value"] for line in finding["changes"]})
        validate(changed)


OTHERS = {
    f"{name}, {case}": (values, changes)
    for name, changes in {
        "tapered": {"correction.weight": "none", "correction.objective": "topr_geo"},
        "product of weights": BYPASS | {"correction.weight": "none", "correction.objective": "gmpo"},
        "whole product": {"correction.objective": "gmpo", "correction.rejected_in_denominator": True},
        "KL to the sampler": {"correction.sampler_kl_coeff": 0.01},
        "replayed": BYPASS | {
            "rollout.replay": "uniform(uses=2, most=4)", "correction.objective": "reinforce",
            "correction.weight": "token_tis", "rollout.old_logp_source": "none",
        },
        "replayed, clipped": {
            "rollout.replay": "uniform(uses=2, most=4)", "correction.preset": "async",
            "rollout.old_logp_source": "none", "correction.kl_coeff": 0.01,
            "train.minibatches": 2,
        },
        "ahead": {
            "rollout.schedule": "areal(staleness=4)", "correction.preset": "async",
            "rollout.old_logp_source": "none", "correction.kl_coeff": 0.01,
            "train.minibatches": 2,
        },
    }.items()
    for case, values in {
        "gap": {KL: 0.03}, "drift": {CHI2: 0.5}, "tokens": {CHI2: 1.5}, "longer": {LENGTH: late(100.0, 130.0)},
        "old": {KL: 0.03} | STALE, "noise": {NOISE: late(1.0, 1.3)}, "same": {DP_MAX: 0.0},
    }.items()
    if case != "old" or "rollout.replay" in changes or "rollout.schedule" in changes
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_advice_fits_the_config(case, tmp_path):
    values, changes = OTHERS[case]
    validate(config_of(changes))
    check_advice(diagnose(write_run(tmp_path, values, changes)), config_of(changes))


@pytest.mark.all
@pytest.mark.parametrize("case", [*CAUSE_CASES, *SETUP_CASES])
def test_the_config_accepts_the_advised_lines(case, tmp_path):
    values, changes, _ = (CAUSE_CASES | SETUP_CASES)[case]
    changes = of_model(values, changes)
    diagnosis = diagnose(write_run(tmp_path, values, changes))
    together(diagnosis)
    check_advice(diagnosis, config_of(changes))


MIXTURES = {
    "lag, tokens": ({KL: 0.03, CHI2: 1.5} | STALE, {"correction.weight": "none"}),
    "tokens, no weight": ({CHI2: 1.5}, {"correction.weight": "none"}),
    "tokens, bypass": ({CHI2: 1.5} | RISING, BYPASS),
    "band, bypass": ({CHI2: 1.5} | RISING, BYPASS | {"correction.weight": ICEPOP}),
    "routes, product": ({FLIPS: 0.1, PPL: 1.2, ESS: 0.4}, PRODUCT),
    "routes, noise": ({FLIPS: 0.1, PPL: 1.2, NOISE: late(1.0, 1.3)}, {}),
    "routes, weights": ({FLIPS: 0.1, PPL: 1.2, CHI2: 3.0}, {"correction.weight": "none"}),
    "noise, clip": ({NOISE: late(1.0, 1.3)} | RISING, BYPASS | {"correction.weight": "token_tis"}),
    "wide, bypass": (RISING, BYPASS | WIDE),
    "late, clip": ({LAG: 9.0, LENGTH: late(100.0, 130.0)} | RISING, {"train.epochs": 2}),
    "stale objective": ({KL: 0.03} | STALE | RISING, {
        "correction.preset": "async", "correction.objective": "ppo(clip_high=0.5)",
    }),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_the_advice_of_several_causes_is_one(case, tmp_path):
    values, changes = MIXTURES[case]
    changes = of_model(values, changes)
    diagnosis = diagnose(write_run(tmp_path, values, changes))
    assert len(diagnosis["findings"]) > 1
    advised = together(diagnosis)
    assert advised
    changed = config_of(changes)
    changed.update_from_flattened_dict(advised)
    validate(changed)


def test_the_weight_of_a_cause_stands_before_that_of_a_set_up(tmp_path):
    values, changes = MIXTURES["lag, tokens"]
    diagnosis = diagnose(write_run(tmp_path, values, changes))
    assert {"B.lag", "D.tokens"} <= names(diagnosis["findings"])
    assert "B.correct" not in names(diagnosis["findings"])
    assert together(diagnosis)["correction.weight"].startswith("token_icepop(")


def line(findings, name, field):
    [finding] = [f for f in findings if f["name"] == name]
    [change] = [c for c in finding["changes"] if c["field"] == field]
    return change


def test_lines_depend_on_the_run(tmp_path):
    changes = {"engine.dtype": "bfloat16", "mesh.serve": (2, 1, 4), "mesh.train": (1, 4, 1)}
    findings = diagnose(write_run(tmp_path, {KL: 0.06}, changes))["findings"]
    assert line(findings, "A.dtype", "engine.dtype") == {
        "field": "engine.dtype", "value": "float32", "now": "bfloat16"
    }
    changes["engine.dtype"] = "float32"
    findings = diagnose(write_run(tmp_path, {KL: 0.06}, changes))["findings"]
    assert line(findings, "A.parallel", "mesh.serve")["value"] == (2, 1, 1)
    findings = diagnose(write_run(tmp_path, CAUSE_CASES["F"][0]))["findings"]
    assert line(findings, "F", "optimizer.lr")["value"] == 5e-5  # half of 1e-4


def test_the_geometric_band_is_as_wide_as_the_responses_need(tmp_path):
    for gap, bounds in (
        (0.002, "lower=0.9901, upper=1.01"),  # 2 * 0.002 < log 1.01: 1 / 1.01 and 1.01
        (0.05, "lower=0.9048, upper=1.105"),  # exp(-0.1) and exp(0.1)
        (3.0, "lower=0.3679, upper=2.718"),  # no wider than e
    ):
        values = {CHI2: 0.5, MEAN_GAP: gap}
        findings = diagnose(write_run(tmp_path, values))["findings"]
        change = line(findings, "C", "correction.masks")
        assert change == {
            "field": "correction.masks", "value": f"seq_mean_ratio({bounds})", "now": ""
        }


@pytest.mark.parametrize("masks, kept", [
    ("veto", "veto & "), ("seq_mean_k1(upper=1.1) & veto & token_k2(upper=3.0)",
                          "veto & token_k2(upper=3.0) & "), ("seq_sum_k1(upper=2.0)", ""),
    ("staleness(staleness_max=4) & veto", "veto & "),  # which a synchronous run refuses
])
def test_other_masks_stay(masks, kept, tmp_path):
    run = write_run(tmp_path, {CHI2: 0.5}, {"correction.masks": masks})
    change = line(diagnose(run)["findings"], "C", "correction.masks")
    assert change["value"] == f"{kept}seq_mean_ratio(lower=0.9901, upper=1.01)"


def test_an_objective_that_corrects_the_gap_is_left_before_a_weight(tmp_path):
    changes = {"correction.weight": "none", "correction.objective": "qurl_acr"}
    findings = diagnose(write_run(tmp_path, {CHI2: 1.5}, changes))["findings"]
    assert line(findings, "D.tokens", "correction.objective") == {
        "field": "correction.objective", "value": "ppo", "now": "qurl_acr"
    }
    changes["correction.objective"] = "a3po(clip_high=0.3)"
    values = {KL: 0.03, LAG: 2.0, ENGINE_SHARE: 0.1}
    findings = diagnose(write_run(tmp_path, values, changes))["findings"]
    assert line(findings, "B.correct", "correction.objective")["value"] == "ppo"
    assert line(findings, "B.correct", "correction.weight")["value"] == "token_tis(cap=2.0)"


def test_a_weight_that_is_there_stays_beside_stale_samples(tmp_path):
    values = {KL: 0.03, LAG: 2.0, ENGINE_SHARE: 0.1}
    diagnosis = diagnose(write_run(tmp_path, values, PRODUCT))
    assert names(diagnosis["findings"]) == {"B.lag", "B.correct"}
    assert together(diagnosis) == {}


def test_the_clip_returns_to_its_default_and_keeps_the_rest(tmp_path):
    changes = {"correction.objective": "dual_clip(clip_low=0.35, dual_clip=4.0)"}
    findings = diagnose(write_run(tmp_path, RISING, changes))["findings"]
    change = line(findings, "E.widened", "correction.objective")
    assert change["value"] == "dual_clip(dual_clip=4.0)"
    changes = {"correction.objective": "a3po(clip_high=0.5)"}
    findings = diagnose(write_run(tmp_path, RISING, changes))["findings"]
    assert line(findings, "E.widened", "correction.objective")["value"] == "ppo"


def test_the_metrics_it_reads_are_those_that_are_measured():
    def measured():
        x, mask, ids = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros((2, 3, 1, 1), int)
        lengths = jnp.ones(2)
        head = {"mask": mask, "adv": x, "tokens": x, "logp": x, "logp_behav": x,
                "top_ids": ids[..., 0], "top_logps": ids[..., 0]}
        return (
            mismatch.offpolicy_metrics(x, x, mask)
            | mismatch.probability_metrics(x, x, mask)
            | mismatch.importance_weight_metrics(x, x, mask, level="token", upper=2.0, lower=0.5)
            | mismatch.kept_sample_size(x, mask, mask)
            | mismatch.rejected_fractions(mask, mask)
            | batch_metrics.variance_proxy_metrics(x, x, x, mask)
            | batch_metrics.staleness_metrics(ids[..., 0, 0], 0, mask)
            | batch_metrics.length_metrics(
                lengths, lengths, max_prompt_length=3, max_response_length=3, num_turns=lengths
            )
            | routes.flip_metrics(ids[..., 0], mask, num_chosen=1, num_experts=2)
            | routes.gap_metrics(ids[..., 0], x, x, mask, num_chosen=1)
            | attribution.factor_metrics(x, x, x, x, mask)
            | objectives.OBJECTIVES["ppo"](x, x, x, mask)[1]
            | centering.centered(ids[..., 0], head, x, lambda log_ratio, _: log_ratio)[1]
        )

    read = {
        clause.metric for finding in (*CAUSES, *SETUP)
        for clause in (*finding.all_of, *finding.any_of) if clause.metric not in FACTS
    } | {ENGINE_SHARE, MEAN_GAP, IS_VALID, *ROUTE_GAPS, *ROUTE_DROPS, *case.FALLBACKS.values()}
    read |= {asynchrony.ENGINE_GAP, asynchrony.STALENESS_GAP, asynchrony.MEAN_LAG}
    read = {name for name in read if not name.startswith(("async/", "rollout/drafter"))}  # see asynchrony_test
    found = jax.eval_shape(measured)
    found |= attribution.shares(dict.fromkeys(found, 1.0))
    assert read <= set(found)
