"""Records of runs whose samplers run ahead: a case for every finding, and for what is next to it."""

import inspect
import math

import numpy as np
import pytest

from jaxrl_tis.doctor import asynchrony, case as cases
from jaxrl_tis.doctor.asynchrony import (
    ACCEPTANCE, AHEAD, DISCARDED, DRAFTER_LAG, IN_FLIGHT, ENGINE_GAP, IDLE, MEAN_LAG, QUEUE, REPLACED, RESUMED,
    STALENESS_GAP,
    lag_correlation,
)
from jaxrl_tis.doctor.case import CHI2, ENGINE_SHARE, KL, LAG, LENGTH, THRESHOLDS, Case
from jaxrl_tis.doctor.diagnose import diagnose
from jaxrl_tis.rollouts import bookkeeping, groups
from jaxrl_tis.rollouts import source as sources
from jaxrl_tis.validate import validate
from tests.doctor.runs import config_of, late, names, write_run

# 16 prompts of 8 samples; a bound of 4 versions, so that samplers begin 5 batches at most.
RUN = {"rollout.schedule": "areal(staleness=4)", "correction.preset": "async"}
STALE = {
    LAG: 3.0, ENGINE_SHARE: 0.8, IDLE: 0.1, QUEUE: 4.0, AHEAD: 3.0, IN_FLIGHT: 100.0,
    RESUMED: 500.0,
    DISCARDED: 0.0, REPLACED: 0.0,
}
DECOUPLED_TIS = {"correction.preset": "tis_2"}
NAIVE = {"correction.preset": "bypass_ppo_clip"}
STAND_IN = DECOUPLED_TIS | {"rollout.old_logp_source": "ewma"}
DIRECT = {"correction.preset": "ppo_is", "correction.objective": "dis"}
WHOLE = {"correction.preset": "bypass_pg_is"}  # weights of the whole drift
GAP = {KL: 0.03}
IN_PLACE = {"rollout.schedule": "in_flight(staleness=4)"}
DRAFTER = {"engine.drafter": "models/small", "engine.max_draft": 3}
REDUNDANT = {"rollout.schedule": "roll_flash(alpha=4, redundant=2)"}


def probes(every=25, **values):
    """gate/* of every so many steps: total_d_mean=0.1 and the like; all others are small."""
    found = {f"gate/{part}/{m}": 1e-4 for part in ("total", "engine", "staleness")
             for m in asynchrony.MEASURES}
    found |= {"gate/" + name.replace("_", "/", 1): x for name, x in values.items()}
    return {name: (lambda s, x=x: None if s % every or x is None else x) for name, x in found.items()}


def following(noise=0.0):
    """An engine's gap that follows the lag, with noise."""
    lag = np.random.default_rng(0).integers(0, 4, 200)
    other = np.random.default_rng(1).normal(size=200)
    return {MEAN_LAG: lambda s: float(lag[s]),
            ENGINE_GAP: lambda s: float(0.01 + 0.01 * lag[s] + noise * other[s])}


# Findings of asynchrony.py and, of those of trees.py, training.*; what is measured, what is configured.
CASES = {
    "nothing": ({}, {}, {"training.async"}),
    "async.engine": (GAP | {STALENESS_GAP: 0.002}, {}, {"training.async", "async.engine"}),
    "async.engine, by probes": (GAP | probes(engine_d_mean=0.03, staleness_d_mean=0.01), {},
        {"training.async", "async.engine"}),
    "async.staleness": (GAP | {STALENESS_GAP: 0.05}, {}, {"training.async", "async.staleness"}),
    "async.staleness, by probes": ({CHI2: 0.5} | probes(engine_d_mean=0.01, staleness_d_mean=0.03),
        {}, {"training.async", "async.staleness"}),
    # Without a split by the update: 0.05 in all, of which a fresh batch has 0.01.
    "async.staleness, with a stand-in": (
        GAP | probes(total_d_mean=0.05, engine_d_mean=0.01, staleness_d_mean=None),
        STAND_IN, {"training.async", "async.staleness", "async.stand_in"},
    ),
    "async.naive": ({}, DECOUPLED_TIS, {"training.async", "async.naive"}),
    "async.naive, bypass": ({}, NAIVE, {"training.async", "async.naive"}),
    "a lag of one version": ({LAG: 1.0}, NAIVE, {"training.async"}),
    "weights of the whole drift": ({}, WHOLE, {"training.async"}),
    "an objective's own weight": ({}, DIRECT, {"training.async"}),
    "that of another ratio": (
        {}, DIRECT | {"correction.centre": "old"}, {"training.async", "async.naive"}
    ),
    "a weight of every factor": ({}, {"correction.preset": "factored"}, {"training.async"}),
    "one weight of two": ({}, {"correction.preset": "async"}, {"training.async"}),
    "late": ({LAG: 9.0}, {"rollout.schedule": "areal(staleness=12)"}, {"training.late"}),
    "async.stand_in": ({}, STAND_IN, {"training.async", "async.stand_in"}),
    "a stand-in that nothing looks at": ({}, {"rollout.old_logp_source": "none"},
        {"training.async"}),
    "versions": (following(), {}, {"training.async", "versions"}),
    "versions, with noise": (following(0.005), {}, {"training.async", "versions"}),
    "noise alone": (following(0.1), {}, {"training.async"}),
    "the trend of both is none": (
        {MEAN_LAG: lambda s: s / 100 + s % 2, ENGINE_GAP: lambda s: s / 1000 + s // 2 % 2}, {},
        {"training.async"},
    ),
    "async.keys": (following(), IN_PLACE, {"training.async", "async.keys"}),
    "versions of a stand-in": (following(), STAND_IN, {"training.async", "async.stand_in"}),
    "async.samplers": ({IDLE: 0.31, AHEAD: 4.4}, {},
        {"training.async", "async.idle", "async.samplers"}),
    "async.bound": ({IDLE: 0.31, AHEAD: 4.6}, {}, {"training.async", "async.idle", "async.bound"}),
    "a learner that waits a little": ({IDLE: 0.3, AHEAD: 5.0}, {}, {"training.async"}),
    # A batch of 16 groups waits, and of 128 slots 50 draw.
    "async.full": ({IDLE: 0.0, QUEUE: 16.0, IN_FLIGHT: 50.0}, {}, {"training.async", "async.full"}),
    "a full queue, busy samplers": ({IDLE: 0.0, QUEUE: 16.0, IN_FLIGHT: 70.0}, {}, {"training.async"}),
    "less than a batch waits": ({IDLE: 0.0, QUEUE: 15.0, IN_FLIGHT: 50.0}, {}, {"training.async"}),
    # 128 samples of 100 tokens are drawn.
    "async.interrupted": ({RESUMED: 12801.0}, {}, {"training.async", "async.interrupted"}),
    "as many as are drawn": ({RESUMED: 12800.0}, {}, {"training.async"}),
    "async.redundant": ({DISCARDED: 5.0}, REDUNDANT, {"training.async", "async.redundant"}),
    "few are discarded": ({DISCARDED: 4.0}, REDUNDANT, {"training.async"}),
    "async.replaced": ({REPLACED: 5.0}, {}, {"training.async", "async.replaced"}),
    "async.shorter": ({LENGTH: late(100.0, 89.0)}, REDUNDANT, {"training.async", "async.shorter"}),
    "async.shorter, by replacing": ({LENGTH: late(100.0, 89.0), REPLACED: 5.0}, {},
        {"training.async", "async.replaced", "async.shorter"}),
    "shorter by itself": ({LENGTH: late(100.0, 89.0)}, {}, {"training.async"}),
    "async.drafter": ({ACCEPTANCE: late(0.5, 0.39), DRAFTER_LAG: 40.0}, DRAFTER,
        {"training.async", "async.drafter"}),
    "budget.engine": (probes(total_d_mean=0.06, engine_d_mean=0.06), {},
        {"training.async", "budget", "budget.engine"}),
    "budget.staleness": (probes(total_k3=0.003, staleness_k3=0.003), {},
        {"training.async", "budget", "budget.staleness"}),
    "within budget": (probes(total_d_mean=0.05, total_k3=0.002), {}, {"training.async"}),
}


def judged(diagnosis):
    own = {f.name for f in (*asynchrony.CAUSES, *asynchrony.SETUP)}
    found = names(diagnosis["findings"]) | names(diagnosis["setup"])
    return found & (own | {"training.async", "training.late", "training.once", "training.reused"})


@pytest.mark.parametrize("name", CASES)
def test_the_record_leads_to_its_findings(name, tmp_path):
    values, changes, expected = CASES[name]
    diagnosis = diagnose(write_run(tmp_path, STALE | values, RUN | changes))
    assert judged(diagnosis) == expected
    if "rollout.old_logp_source" not in changes:
        assert diagnosis["undecided"] == []


@pytest.mark.all
@pytest.mark.parametrize("name", CASES)
def test_the_config_accepts_the_advised_lines(name, tmp_path):
    values, changes, _ = CASES[name]
    diagnosis = diagnose(write_run(tmp_path, STALE | values, RUN | changes))
    config, together = config_of(RUN | changes), {}
    validate(config)
    for finding in (*diagnosis["findings"], *diagnosis["setup"]):
        advised = {line["field"]: line["value"] for line in finding["changes"]}
        assert all(together.setdefault(field, x) == x for field, x in advised.items())
    config.update_from_flattened_dict(together)
    validate(config)


def test_every_finding_has_a_record():
    own = {f.name for f in (*asynchrony.CAUSES, *asynchrony.SETUP)}
    assert own <= set().union(*(expected for *_, expected in CASES.values()))


@pytest.mark.all
@pytest.mark.parametrize("symptom", [{CHI2: 1.5}, {CHI2: 3.0}, GAP, {KL: 0.2, ENGINE_SHARE: 0.1}])
@pytest.mark.parametrize("changes", [DECOUPLED_TIS, NAIVE, WHOLE, DIRECT, STAND_IN, {}])
def test_advice_for_the_gap_keeps_what_corrects_staleness(symptom, changes, tmp_path):
    """All lines together are a config that is accepted, and in which nothing is naive any more."""
    diagnosis = diagnose(write_run(tmp_path, STALE | symptom, RUN | changes))
    config = config_of(RUN | changes)
    for finding in (*diagnosis["findings"], *diagnosis["setup"]):
        config.update_from_flattened_dict({x["field"]: x["value"] for x in finding["changes"]})
    validate(config)
    after = cases.Case({}, config.to_dict(), cases.THRESHOLDS, 120)
    assert asynchrony.corrects_staleness(after)
    is_direct = after.method("objective")[0] == "dis" and after.setting("correction.centre") == "behav"
    assert not is_direct or after.method("weight")[0] == "none"  # or the gap would count twice


def evidence(diagnosis, name):
    [finding] = [f for f in (*diagnosis["findings"], *diagnosis["setup"]) if f["name"] == name]
    return {e["metric"]: e["value"] for e in finding["evidence"]}


def test_evidence_has_the_numbers(tmp_path):
    run = write_run(tmp_path, STALE | GAP | {STALENESS_GAP: 0.05, IDLE: 0.5, RESUMED: 25600.0} | probes(
        total_dp_max=0.5, engine_dp_max=0.1, engine_d_mean=0.01, staleness_d_mean=0.04), RUN)
    diagnosis = diagnose(run)
    assert evidence(diagnosis, "async.staleness") == {
        LAG: 3.0, "run/staleness_share": pytest.approx(0.8), KL: pytest.approx(0.03),
        "run/staleness_gap": pytest.approx(0.04),
    }
    assert evidence(diagnosis, "async.samplers") == {"run/ahead_share": pytest.approx(0.6)}
    assert evidence(diagnosis, "async.interrupted") == {"run/read_again": pytest.approx(2.0)}
    assert evidence(diagnosis, "budget") == {"gate/total/dp_max by its bound": pytest.approx(2.0)}
    for last, lag in ((0.39, 40.0), (0.41, 40.0), (0.39, 0.5)):
        drafted = {ACCEPTANCE: late(0.5, last), DRAFTER_LAG: lag}
        diagnosis = diagnose(write_run(tmp_path, STALE | drafted, RUN | DRAFTER))
        if (last, lag) == (0.39, 40.0):
            named = f"part of {ACCEPTANCE} lost, from 0.50 to 0.39 at lag 40"
            assert evidence(diagnosis, "async.drafter") == {
                "config/has_drafter": 1, DRAFTER_LAG: pytest.approx(40.0), named: pytest.approx(0.22),
            }
        else:
            assert "async.drafter" not in names(diagnosis["setup"])


def test_the_correlation_is_that_of_the_changes(tmp_path):
    lag, gap = [0, 1, 0, 2, 1, 3, 0, 1, 2, 0, 1, 3], [1, 3, 1, 4, 2, 4, 1, 2, 5, 1, 3, 4]
    values = {MEAN_LAG: lambda s: float(lag[s - 1]), ENGINE_GAP: lambda s: 0.01 * gap[s - 1]}
    run = write_run(tmp_path, STALE | values, RUN, steps=12)
    x, y = np.diff(lag), np.diff(gap)
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert evidence(diagnose(run), "versions")["run/lag_correlation"] == pytest.approx(expected)


def test_a_lag_that_never_changes_tells_nothing(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, STALE | {MEAN_LAG: 3.0}, RUN))
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert "10 steps after which" in reasons["versions"] and "there are 0" in reasons["versions"]


def test_a_stand_in_leaves_the_split_open_without_probes(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, STALE | {KL: 0.06}, RUN | STAND_IN))
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert "rollout.gap_probe_every" in reasons["async.engine"]
    assert "rollout.old_logp_source ring" in reasons["A"] and "A" not in names(diagnosis["findings"])


def test_a_synchronous_run_has_none_of_them(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, following()))
    assert judged(diagnosis) == {"training.once"} and diagnosis["verdict"] == ["healthy"]


def test_the_metrics_it_reads_are_those_that_the_source_measures():
    source = inspect.getsource(bookkeeping)
    for name in (IDLE, QUEUE, IN_FLIGHT, AHEAD, RESUMED, DISCARDED, REPLACED):
        assert f'"{name}":' in source, name
    assert f'"{ACCEPTANCE}"' in inspect.getsource(sources)
    assert f'"{DRAFTER_LAG}":' in inspect.getsource(groups)


def test_a_bound_of_zero_is_exceeded_by_any_gap(tmp_path):
    changes = {"rollout.schedule": "areal(staleness=4)", "gate.max_k3": 0.0}
    found = diagnose(write_run(tmp_path, probes(), changes))
    assert evidence(found, "budget") == {"gate/total/k3 by its bound": math.inf}
    none = probes(total_k3=0.0, engine_k3=0.0, staleness_k3=0.0)
    assert "budget" not in diagnose(write_run(tmp_path, none, changes))["verdict"]


def test_few_lags_are_too_few_for_a_correlation():
    series = {"lag": {1: 0.0, 2: 1.0, 3: 0.0}, "gap": {1: 0.1, 2: 0.2, 3: 0.1}}
    with pytest.raises(KeyError, match="4 steps after which lag changes"):
        lag_correlation(Case(series, {}, THRESHOLDS | {"min_steps": 1.0}, 3), "gap", "lag")


def test_few_steps_make_no_correlation():
    """11 steps. A correlation of 0.79 is 2.8 standard errors of Fisher's z, one of 0.91 is 4.1."""
    lag = [0.0, 1.0] * 5 + [0.0]
    other = [0.0, 0.0, 1.0, 1.0] * 2 + [0.0, 0.0, 1.0]
    for noise, found in ((0.5, 0.0), (0.3, 0.913)):
        gap = {s: x + noise * 2 * y for s, (x, y) in enumerate(zip(lag, other, strict=True), 1)}
        case = Case({"lag": dict(enumerate(lag, 1)), "gap": gap}, {}, THRESHOLDS, 11)
        assert lag_correlation(case, "gap", "lag") == pytest.approx(found, abs=1e-3)
