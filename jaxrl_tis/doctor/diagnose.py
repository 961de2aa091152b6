"""Applies the tables of trees.py to the record of a run. __main__.py documents the keys of the result."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_tis.doctor import asynchrony, corrections, depth, effects, frozen, stale_cache
from jaxrl_tis.doctor.case import (
    FLIPS, IS_VALID, LAG, OPS, THRESHOLDS, TREE_FACTS, Case, Clause, Finding, leaves_out_lags,
)
from jaxrl_tis.doctor.trees import CAUSES, SETUP
from jaxrl_tis.record import failures, metrics
from jaxrl_tis.record.provenance import saved_config
from jaxrl_tis.runtime import storage

COUNTS = ("window", "min_steps", "surge_steps")  # thresholds that count steps
SINGLE = ("mean", "max", "steady")  # statistics of one window
FACTS = TREE_FACTS | effects.FACTS | asynchrony.FACTS | corrections.FACTS
FACTS |= frozen.FACTS | stale_cache.FACTS | depth.FACTS

# Reading


def load(workdir: str | os.PathLike, thresholds: Mapping[str, float]) -> Case:
    """Reads a run; `thresholds` replaces some of `THRESHOLDS`, see `diagnose` for the errors."""
    limits = limits_of(thresholds)
    workdir = storage.folder(workdir)
    series, nans, last_step = {}, {}, 0
    for record in metrics.read(workdir):
        # Without a valid token the metrics of a batch are 0 and mean nothing.
        if record["phase"] != "train" or (IS_VALID in record and record[IS_VALID] == 0):
            continue
        last_step = max(last_step, record["step"])
        for name, value in record.items():
            if name in ("step", "phase"):
                continue
            if math.isnan(value):
                nans.setdefault(name, []).append(record["step"])
            else:
                series.setdefault(name, {})[record["step"]] = value
    config = saved_config(workdir) or {}
    case = Case(series, config, limits, last_step, nans=nans)
    if leaves_out_lags(case):
        case = dataclasses.replace(case, unlogged=frozenset({LAG}))
    return adapted(case)


def limits_of(thresholds: Mapping[str, float]) -> dict[str, float]:
    """Returns `THRESHOLDS` with some replaced; ValueError for an unknown name, and for a count of steps
    below 1."""
    for name, value in thresholds.items():
        if name not in THRESHOLDS:
            raise ValueError(f"unknown threshold {name!r}; choose one of {', '.join(THRESHOLDS)}")
        if math.isnan(value) or (name in COUNTS and value < 1):
            least = "at least 1" if name in COUNTS else "a number"
            raise ValueError(f"threshold {name} is {value:g}; it must be {least}")
    return {**THRESHOLDS, **thresholds}


def adapted(case: Case) -> Case:
    """Returns the case with the thresholds of this kind of run: quantized, routed, product weights."""
    limits, changed = case.thresholds, {}
    if not _evaluate(case, Clause("config/is_quantized", "==", 0)).status:  # nor where unknown
        changed["dp_max"] = limits["dp_max_quantized"]
    if _evaluate(case, Clause("config/is_product", "==", 1)).status:
        changed["chi2_seq"] = limits["chi2_seq_product"]
    if FLIPS in case.series:
        changed |= {"kl_bug": limits["kl_bug_moe"], "ppl_high": limits["ppl_high_moe"]}
    return dataclasses.replace(case, thresholds=limits | changed)


# Walking the trees


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finding: `status` is True, False or None (not decided, `missing` has the reasons)."""

    status: bool | None
    evidence: tuple[dict[str, Any], ...] = ()
    missing: tuple[str, ...] = ()


def walk(case: Case, findings: Sequence[Finding] = (*CAUSES, *SETUP)) -> dict[str, Result]:
    """Returns the result of each finding by its name."""
    results = {}
    for finding in findings:
        results[finding.name] = _result(case, finding, results)
    return results


def _all(answers):
    return False if False in answers else None if None in answers else True


def _any(answers):
    return True if True in answers else None if None in answers else False


def _result(case, finding, results):
    if finding.parent is not None and not results[finding.parent].status:
        return Result(False)
    if any(results[name].status for name in finding.unless_known):
        return Result(False)
    all_of = [_evaluate(case, clause) for clause in finding.all_of]
    any_of = [_evaluate(case, clause) for clause in finding.any_of]
    excluded = _any([results[name].status for name in finding.unless])
    status = _all([
        *(r.status for r in all_of),
        _any([r.status for r in any_of]) if any_of else True,
        None if excluded is None else not excluded,
    ])
    if status is None:
        missing = [text for r in (*all_of, *any_of) for text in r.missing]
        missing += [text for name in finding.unless for text in results[name].missing]
        return Result(None, missing=tuple(dict.fromkeys(missing)))
    return Result(status, tuple(e for r in (*all_of, *any_of) if r.status for e in r.evidence))


def _evaluate(case, clause):
    """Returns the result of one clause."""
    is_fact = clause.metric in FACTS
    clause = dataclasses.replace(clause, metric=case.source(clause.metric))
    is_absent = not is_fact and clause.metric not in case.series | dict.fromkeys(case.unlogged)
    if is_absent and clause.absent is not None:
        return Result(clause.absent)
    limit = clause.threshold
    limit = float(case.thresholds[limit] if isinstance(limit, str) else limit)
    try:
        metric, value, steps = _fact(case, clause) if is_fact else _statistic(case, clause)
    except KeyError as error:
        return Result(None, missing=(error.args[0],))
    passes = OPS[clause.op]
    is_single = bool(steps) and clause.statistic in SINGLE
    extreme = min if clause.op in ("<", "<=") else max
    evidence = {
        "metric": metric, "statistic": None if is_fact else clause.statistic,
        "value": value, "op": clause.op, "threshold": limit,
        "steps": [min(steps), max(steps)] if steps else None,
        "crossed": sum(passes(v, limit) for v in steps.values()) if is_single else None,
        "extreme_step": extreme(steps, key=steps.get) if is_single else None,
    }
    is_met = passes(value, limit)
    if clause.statistic == "steady" and not is_fact:
        is_met = is_met and _is_steady(case, list(steps.values()), value, clause.op, limit)
    return Result(bool(is_met), (evidence,))


def _is_steady(case, values, mean, op, limit):
    """Returns whether the mean is steadily beyond its threshold: by steady_sigma standard errors, or with
    steady_share of the steps beyond it."""
    passes = OPS[op]
    if sum(passes(x, limit) for x in values) >= case.thresholds["steady_share"] * len(values):
        return True
    if not all(map(math.isfinite, values)):
        return False
    t = _skewed_t(values, limit)
    return (t if op in (">", ">=") else -t) > case.thresholds["steady_sigma"]


def _skewed_t(values, limit):
    """Returns the distance of the mean above the limit in standard errors, by Hall's transformation for
    skewed samples (1992): heavy-tailed values have a large error of the mean on the far side alone."""
    mean, size = math.fsum(values) / len(values), statistics.stdev(values)
    if not size:
        return math.copysign(math.inf, mean - limit) if mean != limit else 0.0
    root = math.sqrt(len(values))
    t = (mean - limit) / size * root
    skew = math.fsum(((x - mean) / size) ** 3 for x in values) / len(values) / (3 * root)
    return t + skew * t**2 + skew**2 * t**3 / 3 + skew / 2


def _fact(case, clause):
    found = FACTS[clause.metric](case)
    value, metric = found if isinstance(found, tuple) else (found, clause.metric)
    return metric, float(value), {}


def _statistic(case, clause):
    """Returns (metric, value, {step: value} of the last steps); KeyError names missing values."""
    limits, metric = case.thresholds, clause.metric
    is_surge, compares = clause.statistic.startswith("surge"), clause.statistic not in SINGLE
    every = case.interval(metric)
    width = every * (limits["min_steps"] if is_surge else limits["window"])
    before = every * (limits["surge_steps"] if is_surge else limits["window"])
    values = case.window(metric, width)
    earlier = case.window(metric, width, before) if compares else values
    if compares and case.last_step <= before:
        raise KeyError(f"{before + every * limits['min_steps']:g} steps, the run has {case.last_step}")
    for window, end in ((values, 0), (earlier, before)):
        if len(window) < limits["min_steps"]:
            raise KeyError(
                f"{limits['min_steps']:g} values of {metric} in the {width:g} steps up to step "
                f"{case.last_step - end:g}, there are {len(window)}"
            )
    if clause.statistic == "max":
        return metric, max(values.values()), values
    mean, reference = (math.fsum(x.values()) / len(x) for x in (values, earlier))
    if not compares:
        return metric, mean, values
    if clause.statistic.endswith("sigma"):
        return metric, _sigma(values, earlier), values
    if 0 < reference < math.inf:
        return metric, mean / reference, values
    return metric, 1.0 if mean == reference else math.inf, values


def _sigma(values, earlier):
    """Returns the rise of the mean from `earlier` to `values`, in standard errors."""
    means, variances = [], []
    for x in (list(values.values()), list(earlier.values())):
        mean = math.fsum(x) / len(x)
        squares = math.fsum((v - mean) * (v - mean) for v in x)
        means.append(mean)
        variances.append(squares / len(x) / max(len(x) - 1, 1))  # of the mean
    rise, error = means[0] - means[1], math.sqrt(math.fsum(variances))
    return rise / error if error else math.copysign(math.inf, rise) if rise else 0.0


# The report


def _changes(case, finding, asked):
    """Lists the changes that a finding asks for, as {field, value, now}.

    `asked` has the changes of earlier findings. They are nearer to the cause and take precedence.
    """
    changes = []
    for field, value in finding.changes.items():
        try:
            value, now = value(case) if callable(value) else value, case.setting(field)
        except KeyError:
            continue  # no config.json, or one written by code without this field
        if value is None or json.dumps(asked.setdefault(field, value)) != json.dumps(value):
            continue
        if json.dumps(value) != json.dumps(now):
            changes.append({"field": field, "value": value, "now": now})
    return changes


def diagnose(
    workdir: str | os.PathLike, thresholds: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the diagnosis of a run as --json writes it; `thresholds` replaces some thresholds.

    Raises:
      FileNotFoundError: the folder has no metrics.jsonl.
      ValueError: that file or config.json is broken, or a threshold has an unknown name.
    """
    failed = failures.read(storage.folder(workdir) / failures.FILE_NAME)
    return diagnosis_of(load(workdir, thresholds or {}), str(workdir)) | {
        "reward_errors": [dataclasses.asdict(failure) for failure in failed]
    }


def diagnosis_of(
    case: Case, workdir: str, others: Mapping[str, Sequence[Finding]] | None = None
) -> dict[str, Any]:
    """Returns the diagnosis of a case. `others` has further lists of findings, by their key in it."""
    groups = {"findings": CAUSES, "setup": SETUP} | dict(others or {})
    every = [finding for group in groups.values() for finding in group]
    results, asked = walk(case, every), {}
    read = {clause.metric for finding in every for clause in (*finding.all_of, *finding.any_of)}

    def holding(findings):
        return [
            {
                "name": f.name, "title": f.title, "parent": f.parent, "advice": f.advice,
                "mistake": f.mistake, "evidence": list(results[f.name].evidence),
                "changes": _changes(case, f, asked),
            }
            for f in findings if results[f.name].status
        ]

    by_key = {key: holding(findings) for key, findings in groups.items()}
    findings = by_key["findings"]
    steps = sorted({step for values in case.series.values() for step in values})
    judged = [step for step in steps if step > case.last_step - case.thresholds["window"]]
    return {
        "workdir": workdir,
        "steps": [steps[0], steps[-1]] if steps else None,
        "window": [judged[0], judged[-1]] if judged else None,
        "verdict": [f["name"] for f in findings if f["parent"] is None] or ["not enough data"],
        "findings": findings,
        "undecided": [
            {
                "name": f.name, "title": f.title,
                "reason": "needs " + "; ".join(results[f.name].missing),
            }
            for f in every if results[f.name].status is None
        ],
        **{key: held for key, held in by_key.items() if key != "findings"},
        "nans": {metric: steps for metric, steps in case.nans.items() if metric in read},
        "thresholds": case.thresholds,
    }


STATISTICS = {"steady": "mean"}  # names for a reader


def _evidence_text(e):
    """A line of evidence. `theirs` has another framework's names of the metric, see foreign.py."""
    theirs = [name for name in e.get("theirs", ()) if name != e["metric"]]
    text = e["metric"] + (f" [{', '.join(theirs)}]" if theirs else "")
    text += f" {e['value']:z.4g} {e['op']} {e['threshold']:g}"
    if e["steps"] is None:
        return text
    text += f"  ({STATISTICS.get(e['statistic'], e['statistic'])} of steps {e['steps'][0]}-{e['steps'][1]}"
    if e["crossed"] is not None:
        text += f"; crossed in {e['crossed']} of them, farthest at step {e['extreme_step']}"
    return text + ")"


def lines_of(finding: dict[str, Any]) -> Iterator[str]:
    """Yields a finding as lines of text."""
    indent = "  " if finding["parent"] is None else "    "
    yield f"{indent}{finding['name']}: {finding['title']}"
    for evidence in finding["evidence"]:
        if evidence["op"] != "==":  # the title says it
            yield f"{indent}  {_evidence_text(evidence)}"
    yield f"{indent}  do: {finding['advice']}"
    if finding["mistake"]:
        yield f"{indent}  do not: {finding['mistake']}"
    for change in finding["changes"]:
        yield f"{indent}  c.{change['field']} = {change['value']!r}  # now {change['now']!r}"


def nans_of(diagnosis: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each metric with a value that is not finite."""
    for name, steps in sorted(diagnosis["nans"].items()):
        where = f"steps {steps[0]}-{steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        yield f"not finite: {name}, {len(steps)} times, {where}"


def reason_of(finding: dict[str, Any], count: int, fewest: float) -> str:
    """Returns why a finding is not decided, in short if `count` steps are too few for any verdict."""
    if count < fewest and "config.json" not in finding["reason"]:
        return f"too few steps, {count} of at least {fewest:g}"
    return finding["reason"]


def describe(diagnosis: dict[str, Any]) -> str:
    """Returns the diagnosis as text."""
    steps, window = diagnosis["steps"], diagnosis["window"]
    judged = f"steps {window[0]}-{window[1]} of {steps[0]}-{steps[1]}" if steps else "no steps"
    lines = [f"{diagnosis['workdir']} ({judged}): {', '.join(diagnosis['verdict'])}"]
    lines += nans_of(diagnosis)
    for title, key in (("symptoms", "findings"), ("set-up", "setup")):
        if diagnosis[key]:
            lines += ["", title]
        for finding in diagnosis[key]:
            lines += lines_of(finding)
    if diagnosis["reward_errors"]:
        failed = [failures.Failure(**failure) for failure in diagnosis["reward_errors"]]
        lines += ["", "failed rewards", *(f"  {line}" for line in failures.described(failed))]
    reasons, count = {}, steps[1] - steps[0] + 1 if steps else 0
    for finding in diagnosis["undecided"]:
        reason = reason_of(finding, count, diagnosis["thresholds"]["min_steps"])
        reasons.setdefault(reason, []).append(finding["name"])
    if reasons:
        lines += ["", "not decided"]
        lines += [f"  {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


def strict(x):
    """Returns the same tree with strings in place of NaN and infinities, which JSON cannot write."""
    if isinstance(x, dict):
        return {name: strict(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [strict(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
