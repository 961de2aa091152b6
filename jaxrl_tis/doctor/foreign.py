"""Diagnoses logs of other frameworks: `python -m jaxrl_tis.doctor FILE --from=...`.

`readers` reads the files, and the tables of `frameworks` translate the names. The case has no config and
goes through the same trees, and through the findings of `corrections`. Its steps are the logged steps,
counted from 1, because many runs log only every tenth step. The report names the framework's steps.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxrl_tis.doctor import corrections, readers
from jaxrl_tis.doctor.case import FALLBACKS, FLIPS, IS_VALID, LAG, TURNS, WEIGHTS_ESS, Case
from jaxrl_tis.doctor.diagnose import (
    FACTS, adapted, diagnosis_of, limits_of, lines_of, nans_of, reason_of,
)
from jaxrl_tis.doctor.frameworks import (
    ABS_GAP, CORRECTED, FRAMEWORKS, RATIO, VARIANTS, WEIGHT_MAX, WEIGHT_MEAN, WEIGHT_MIN, Framework,
)
from jaxrl_tis.doctor.trees import CAUSES, SETUP
from jaxrl_tis.runtime import storage

STEPS = (readers.STEP, "global_step", "_step", "Step")
UNTOLD = frozenset((FLIPS, TURNS))  # of ours; their absence from another's record says nothing
OURS = ("mismatch/", "correction/")  # beginnings of names that only this program writes
ROUNDED = 1e-5  # stands for a difference that is printed as 0.0000
WEIGHTS = (RATIO, WEIGHT_MEAN, WEIGHT_MIN, WEIGHT_MAX)
NO_NUMBER = "logged, but never as a number"


@dataclasses.dataclass(frozen=True)
class Record:
    """A log with the metrics translated to ours.

    Attributes:
      series: our metric -> {place among the logged steps, from 1: value}, without NaN.
      theirs: our metric -> the framework's names behind it.
      steps: the framework's steps, by place.
      marks: the names that identify the framework.
      logged: the framework's names that its table reads.
      unread: the framework's names that no row of the table reads.
      texts: names without numbers.
      nans: the framework's name -> the steps of its values that are null, NaN or infinite.
      repeated: number of values that a later one of the same step replaced.
      updates: number of updates of a batch; values logged for each are averaged.
      is_ahead: whether its names show that samplers run ahead.
      rounded: gaps printed as 0.0000 throughout, and weights as 1.0000, which may be rounded.
      is_counted: whether it prints no step, and rows are counted.
    """

    name: str
    framework: Framework
    kinds: tuple[str, ...]
    series: dict[str, dict[int, float]]
    theirs: dict[str, tuple[str, ...]]
    steps: tuple[int, ...]
    marks: tuple[str, ...]
    logged: frozenset[str]
    unread: tuple[str, ...]
    texts: tuple[str, ...]
    nans: dict[str, tuple[int, ...]]
    repeated: int
    updates: int
    is_ahead: bool
    rounded: tuple[str, ...]
    is_counted: bool


# Whose it is


def _marks_in(names, framework):
    return tuple(m for m in framework.marks if m in names or framework.prefix + m in names)


def recognise(names: set[str], wanted: str) -> tuple[str, tuple[str, ...]]:
    """Returns (the framework of a log, the names that identify it).

    Raises:
      ValueError: with "auto", the names are of no framework or of several; else the wanted framework
        has no name in the log, or another one alone has marks there.
    """
    marks_by_framework = {key: _marks_in(names, framework) for key, framework in FRAMEWORKS.items()}
    others = [key for key, marks in marks_by_framework.items() if marks and key != wanted]
    if wanted != "auto":
        framework = FRAMEWORKS[wanted]
        known = {name for row in framework.names for name in row.theirs} | set(framework.marks)
        if not any(name in names or framework.prefix + name in names for name in known):
            raise ValueError(
                f"this log has no metric name of {wanted}; choose another --from, or --from=auto"
            )
        if others and not marks_by_framework[wanted]:
            raise ValueError(
                f"this log is of {others[0]} (it has {marks_by_framework[others[0]][0]}), not of {wanted}; "
                f"use --from={others[0]}"
            )
        return wanted, marks_by_framework[wanted]
    marks_by_framework = {key: marks for key, marks in marks_by_framework.items() if marks}
    if len(marks_by_framework) == 1:
        return next(iter(marks_by_framework.items()))
    if not marks_by_framework:
        looked_for = ", ".join(f"{f.prefix + f.marks[0]} ({key})" for key, f in FRAMEWORKS.items())
        raise ValueError(
            f"the {len(names)} names of this log match no framework: none is like {looked_for}; "
            "choose one with --from"
        )
    candidates = "; ".join(
        f"{key}: {', '.join(marks[:3])}" for key, marks in marks_by_framework.items()
    )
    raise ValueError(
        f"the names of this log match several frameworks ({candidates}); choose one with --from"
    )


# Translation


def _step_of(row, name, framework, path):
    """Returns the step of a value, from the counter of its prefix or of the row."""
    own = name.split("/")[0] + "/step"
    counters = [own] if own in framework.steps else []
    counters += [*framework.steps, *(framework.prefix + key for key in framework.steps), *STEPS]
    for counter in counters:
        step = row.values.get(counter)
        if step is not None:
            if not math.isfinite(step) or step != int(step):
                raise ValueError(f"{path}, {row.place}: {counter} is {step}, not a whole number")
            return int(step)
    raise ValueError(
        f"{path}, {row.place}: no step; add one of {', '.join(dict.fromkeys(counters))}"
    )


def _read_values(logs, framework):
    """Returns the mapped values: (name -> {step: value}, name -> {step: value that is not finite}, number of
    replaced values). A name without any number is included, without values."""
    wanted = {name for row in framework.names for name in row.theirs}
    values, repeated = {}, 0
    for log in logs:
        for row in log.rows:
            for logged, value in row.values.items():
                name = logged if logged in wanted else logged.removeprefix(framework.prefix)
                if name not in wanted:
                    continue
                step, known = _step_of(row, name, framework, log.path), values.setdefault(name, {})
                if step in known:  # a run that continues from there; what it had logged after is void
                    is_restart = step < next(reversed(known))  # else the newest step is logged again
                    void = [later for later in known if later > step] if is_restart else []
                    repeated += 1 + len(void)
                    for later in void:
                        del known[later]
                known[step] = value
    nans = {
        name: tuple(sorted(step for step, x in steps.items() if not math.isfinite(x)))
        for name, steps in values.items()
    }
    for name, steps in values.items():
        has_both = {math.inf, -math.inf} <= set(steps.values())  # there is no mean of the two
        is_number = math.isfinite if has_both else lambda x: not math.isnan(x)
        values[name] = {step: x for step, x in steps.items() if is_number(x)}
    return values, {name: steps for name, steps in nans.items() if steps}, repeated


def _refuse_two_runs(logs, framework):
    """ValueError where two files begin with the same metric at the same step, or the later one before: a run
    that continues in another file begins later."""
    first = {}
    for log in logs:
        own = _read_values([log], framework)[0]
        for name in own:
            begin = min(own[name], default=math.inf)
            path, step = first.setdefault(name, (log.path, begin))
            if path != log.path and begin <= step < math.inf:
                raise ValueError(
                    f"{path} and {log.path} both have {name} from step {begin} on, as two runs have; give the "
                    "file of one run"
                )


def _per_batch(values, framework):
    """Returns the values, with those of updates averaged over their batch, and the updates per batch."""
    is_update = {n: framework.updates is not None and n.startswith(framework.updates) for n in values}
    updates = {step for n, x in values.items() if is_update[n] for step in x}
    batches = {step for n, x in values.items() if not is_update[n] for step in x}
    # Both count from 0. Some metrics begin late, so their numbers do not tell.
    number = round((max(updates) + 1) / (max(batches) + 1)) if updates and batches else 1
    if number <= 1:
        return values, 1
    averaged = {}
    for name, found in values.items():
        parts = {}
        for step, value in found.items():
            parts.setdefault(step // number if is_update[name] else step, []).append(value)
        averaged[name] = {step: math.fsum(x) / len(x) for step, x in parts.items()}
    return averaged, number


def _translated(values, framework):
    """Returns (our metric -> {step: value}, our metric -> the framework's names)."""
    series, theirs = {}, {}
    for row in framework.names:
        if row.ours in theirs or not set(row.theirs) <= values.keys():
            continue
        theirs[row.ours] = row.theirs
        steps = set.intersection(*(set(values[name]) for name in row.theirs))
        translated = {
            step: row.value(*(values[name][step] for name in row.theirs)) for step in steps
        }
        series[row.ours] = {step: x for step, x in translated.items() if x is not None}
    invalid = {step for step, x in series.get(IS_VALID, {}).items() if x == 0}
    series = {m: {s: x for s, x in v.items() if s not in invalid} for m, v in series.items()}
    return {metric: values for metric, values in series.items() if values}, theirs


def path_of(path: str) -> epath.Path:
    """Returns the path of a file or folder, "-" for standard input."""
    return epath.Path(path) if path == readers.STDIN else storage.folder(path)


def load(paths: Sequence[str], wanted: str) -> Record:
    """Reads files as one log; see `readers.read`, `recognise` and `_step_of` for the errors."""
    logs = [log for path in paths for log in readers.read(path_of(path))]
    names = {name for log in logs for row in log.rows for name in row.values}
    texts = {name for log in logs for name in log.texts}
    if "phase" in texts and any(name.startswith(OURS) for name in names):
        raise ValueError(f"{paths[0]} is a record of jaxrl_tis; give the folder of one run alone")
    name, marks = recognise(names, wanted)
    framework = FRAMEWORKS[name]
    if name in VARIANTS and _marks_in(names, VARIANTS[name]):
        framework = VARIANTS[name]
    if len(logs) > 1:
        _refuse_two_runs(logs, framework)
    values, nans, repeated = _read_values(logs, framework)
    values, updates = _per_batch(values, framework)
    series, theirs = _translated(values, framework)
    steps = sorted({step for by_step in series.values() for step in by_step})
    place = {step: i for i, step in enumerate(steps, start=1)}
    known = {n for row in framework.names for n in row.theirs} | {*STEPS, *framework.steps}
    return Record(
        name, framework, tuple(dict.fromkeys(log.kind for log in logs)),
        {m: {place[s]: x for s, x in sorted(by_step.items())} for m, by_step in series.items()},
        theirs, tuple(steps), marks, frozenset(values),
        tuple(sorted(n for n in names if not {n, n.removeprefix(framework.prefix)} & known)),
        tuple(sorted(texts)), nans, repeated, updates, _is_ahead(names, framework),
        _rounded(logs, series, theirs), any(log.is_counted for log in logs),
    )


def _rounded(logs, series, theirs):
    """Returns rounded gaps that are 0 in every step, and rounded weights that are 1."""
    printed = {name for log in logs for name in log.rounded}
    same = dict.fromkeys(corrections.GAPS, {0.0}) | dict.fromkeys(WEIGHTS, {1.0})
    return tuple(
        metric for metric, values in same.items()
        if metric in series and printed & set(theirs[metric]) and set(series[metric].values()) == values
    )


def _is_ahead(names, framework):
    return any(name.removeprefix(framework.prefix).startswith(framework.ahead) for name in names)


def case_of(record: Record, limits: dict[str, float]) -> tuple[Case, list[str]]:
    """Returns the case of a record, and the assumptions about what is not logged."""
    series = dict(record.series)
    # Logged, but never as a number: that it is absent tells nothing.
    empty = record.theirs.keys() - series.keys()
    assumed, unlogged = [], UNTOLD | set(record.framework.silent) | empty
    if record.is_counted:
        assumed.append("the log prints no step numbers, so rows are counted as steps")
    assumed += [text for name, text in record.framework.assumes if name not in record.logged]
    if record.rounded:
        series |= {m: {s: x + ROUNDED for s, x in series[m].items()} for m in record.rounded}
        assumed.append(f"values printed as 0 or 1 are rounded: {', '.join(record.rounded)}")
    if LAG not in series and record.is_ahead:
        unlogged |= {LAG}
        assumed.append("samplers run ahead, and no lag is logged, so A and B.lag cannot be separated")
    elif LAG not in series:
        assumed.append(
            "samples come from the current weights, because no lag is logged. If samplers run ahead, A may "
            "be B.lag"
        )
    gaps = [metric for metric in corrections.GAPS if metric in series]
    is_told = CORRECTED in series or CORRECTED in unlogged or WEIGHTS_ESS in {*series, *unlogged}
    if gaps and not is_told:
        series[WEIGHTS_ESS] = dict.fromkeys(series[gaps[0]], 1.0)
        assumed.append("no weight is logged, so every weight counts as 1")
    return adapted(Case(series, {}, limits, len(record.steps), frozenset(unlogged))), assumed


# The report


def _missing(case, record, undecided):
    """Returns {metric, serves, switch} of missing metrics that leave findings undecided, and of the lag and
    the correction, whose absence counts as an answer."""
    framework, name = record.framework, record.name
    mapped = {row.ours for f in (*FRAMEWORKS.values(), *VARIANTS.values()) for row in f.names}
    always = {LAG: ["A", "B.lag", "weights.lag"]}
    always |= {metric: ["inactive"] for metric in (ABS_GAP, CORRECTED) if metric in framework.switches}
    serves = always | ({RATIO: ["mass"]} if "mass" in undecided else {})
    for finding in CAUSES:
        for clause in (*finding.all_of, *finding.any_of):
            metric = FALLBACKS.get(clause.metric, clause.metric)
            is_open = clause.absent is None or metric in case.unlogged
            is_read = clause.metric not in FACTS and metric in mapped and is_open
            if is_read and finding.parent is None and finding.name in undecided:
                serves.setdefault(metric, []).append(finding.name)
    return [
        {
            "metric": metric, "serves": list(dict.fromkeys(names)),
            "switch": NO_NUMBER if metric in record.theirs else
                framework.switches.get(metric, f"not logged by {name}"),
        }
        for metric, names in serves.items() if metric not in case.series
    ]


def _unhealthy(diagnosis):
    """Puts faults of the correction into the verdict where no cause of a gap is known."""
    found = [f["name"] for f in diagnosis["corrections"] if f["name"] in corrections.FAULTS]
    if found and set(diagnosis["verdict"]) <= {*corrections.CALM, "not enough data"}:
        diagnosis["verdict"] = found
        diagnosis["findings"] = [f for f in diagnosis["findings"] if f["name"] not in corrections.CALM]
    if "inactive.copied" in found:  # which does not show that the engine is the learner's
        diagnosis["setup"] = [f for f in diagnosis["setup"] if f["name"] != "engine.same"]


def _with_their_names(found, record):
    """Puts the framework's steps and names into the evidence of findings."""
    for finding in found:
        for evidence in finding["evidence"]:
            evidence["theirs"] = list(record.theirs.get(evidence["metric"], ()))
            for key in ("steps", "extreme_step"):
                evidence[key] = _their_steps(evidence[key], record)


def _their_steps(places, record):
    if places is None or isinstance(places, int):
        return places and record.steps[places - 1]
    return [record.steps[place - 1] for place in places]


def diagnose(
    paths: Sequence[str], wanted: str, thresholds: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the diagnosis of a log as --json writes it, see the top of __main__.py.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is broken or of an unknown format (names the place); its names identify no
        framework or several; or a threshold has an unknown name.
    """
    limits, record = limits_of(thresholds or {}), load(paths, wanted)
    case, assumed = case_of(record, limits)
    findings = (*corrections.FINDINGS, *corrections.OWN.get(record.name, ()))
    diagnosis = diagnosis_of(case, ", ".join(paths), {"corrections": findings})
    for key in ("findings", "setup", "corrections"):
        _with_their_names(diagnosis[key], record)
    for key in ("steps", "window"):
        diagnosis[key] = _their_steps(diagnosis[key], record)
    _unhealthy(diagnosis)
    undecided = {finding["name"] for finding in diagnosis["undecided"]}
    missing = _missing(case, record, undecided)
    return diagnosis | {
        "framework": record.name, "source": record.framework.source, "marks": list(record.marks),
        "kinds": list(record.kinds), "rows": len(record.steps), "assumed": assumed,
        "notes": list(record.framework.notes), "missing": missing,
        "unread": list(record.unread), "texts": list(record.texts),
        "nans": {name: list(steps) for name, steps in record.nans.items()},
        "repeated": record.repeated, "updates": record.updates,
    }


def _heads(diagnosis):
    steps, window = diagnosis["steps"], diagnosis["window"]
    judged = f"steps {window[0]}-{window[1]} of {steps[0]}-{steps[1]}" if steps else "no steps"
    kinds = ", ".join(diagnosis["kinds"])
    yield f"{diagnosis['workdir']} ({kinds}; {judged}): {', '.join(diagnosis['verdict'])}"
    told = f"recognised by {', '.join(diagnosis['marks'][:3])}" if diagnosis["marks"] else "as requested"
    yield f"framework: {diagnosis['framework']}, {told}"
    yield f"metric names of {diagnosis['source'].split(': ')[0]}"
    fewest = diagnosis["thresholds"]["min_steps"]
    if diagnosis["rows"] < fewest:
        yield f"too few steps: {diagnosis['rows']} are logged, a verdict needs {fewest:g}"
    for text in diagnosis["assumed"]:
        yield f"assumed: {text}"
    if diagnosis["updates"] > 1:
        yield f"values of each update are averaged over the {diagnosis['updates']} updates of a batch"
    if diagnosis["repeated"]:
        yield (
            f"{diagnosis['repeated']} values were logged again for the same step, or before a restart; the "
            "last ones count"
        )
    yield from nans_of(diagnosis)


def _reasons(diagnosis):
    """Yields the reasons why findings are not decided, except missing metrics, which are listed apart."""
    absent = [entry["metric"] for entry in diagnosis["missing"]]
    reasons, without_config, set_up = {}, [], {finding.name for finding in SETUP}
    for finding in diagnosis["undecided"]:
        name, reason = finding["name"], finding["reason"]
        if name not in set_up and "config.json" in reason:
            without_config.append(name)
        elif name not in set_up and not any(metric in reason for metric in absent):
            fewest = diagnosis["thresholds"]["min_steps"]
            reasons.setdefault(reason_of(finding, diagnosis["rows"], fewest), []).append(name)
    for reason, names in reasons.items():
        yield f"  {', '.join(names)}: {reason}"
    if without_config:
        yield f"  {', '.join(without_config)}: needs a config of this project"


def describe(diagnosis: dict[str, Any], is_verbose: bool) -> str:
    """Returns the diagnosis as text; a verbose one lists all metrics that were not read."""
    lines = list(_heads(diagnosis))
    for title, key in (
        ("symptoms", "findings"), ("correction", "corrections"), ("set-up", "setup"),
    ):
        lines += ["", title] if diagnosis[key] else []
        for finding in diagnosis[key]:
            lines += lines_of(finding)
    if diagnosis["missing"]:
        lines += ["", "missing metrics, and the setting that logs them"]
    switches = {}
    for entry in diagnosis["missing"]:
        text = f"{entry['metric']} ({', '.join(entry['serves'])})"
        switches.setdefault(entry["switch"], []).append(text)
    for switch, metrics in switches.items():
        lines += [f"  {switch}:", *(f"    {metric}" for metric in metrics)]
    reasons = list(_reasons(diagnosis))
    lines += ["", "not decided", *reasons] if reasons else []
    lines += ["", *(f"note: {text}" for text in diagnosis["notes"])]
    for title, key in (("metrics not read", "unread"), ("metrics without numbers", "texts")):
        names = diagnosis[key]
        if names:
            lines.append(f"{title}: " + (", ".join(names) if is_verbose else f"{len(names)} (--verbose)"))
    return "\n".join(lines)
