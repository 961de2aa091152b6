"""The doctor's verdicts for logs of other frameworks: `python -m jaxrl_tis.doctor FILE --from=...`.

Files are read by `readers`, names are translated by the tables of `frameworks`, and a case without a
config goes through the same trees, and through the findings of `corrections`. The steps of a case are
the logged ones, counted from 1, because many log every tenth step alone; what is said names theirs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxrl_tis.doctor import corrections, readers
from jaxrl_tis.doctor.case import FALLBACKS, FLIPS, IS_VALID, LAG, TURNS, WEIGHTS_ESS, Case
from jaxrl_tis.doctor.diagnose import FACTS, adapted, diagnosis_of, limits_of, lines_of, nans_of
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
NO_NUMBER = "logged, and in no step a number that can be judged"


@dataclasses.dataclass(frozen=True)
class Record:
    """A log, translated.

    Attributes:
      series: our metric -> {place among the logged steps, from 1: value}, without NaN.
      theirs: our metric -> their names that it was made of.
      steps: theirs, by place.
      marks: the names that tell the framework.
      unread: their names that no row of the table reads.
      texts: names whose values are no numbers.
      nans: their name -> the steps of its values that are null, NaN or infinite.
      repeated: values that a later one of the same step replaced.
      updates: of a batch, over which values that are logged for each are averaged.
      is_ahead: whether its names say that samplers run ahead.
      rounded: gaps that were printed as 0.0000 throughout, and weights as 1.0000: too coarse to tell.
      is_counted: whether it prints no step, so that rows are counted.
    """

    name: str
    framework: Framework
    kinds: tuple[str, ...]
    series: dict[str, dict[int, float]]
    theirs: dict[str, tuple[str, ...]]
    steps: tuple[int, ...]
    marks: tuple[str, ...]
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
    """Returns (the framework, the names that tell it).

    Raises:
      ValueError: "auto", and the names are those of none, or of several; or a framework is wanted of
        which there is no name.
    """
    found = {key: _marks_in(names, framework) for key, framework in FRAMEWORKS.items()}
    if wanted != "auto":
        framework = FRAMEWORKS[wanted]
        known = {name for row in framework.names for name in row.theirs} | set(framework.marks)
        if not any(name in names or framework.prefix + name in names for name in known):
            raise ValueError(
                f"this log has no metric name of {wanted}; choose another --from, or --from=auto"
            )
        return wanted, found[wanted]
    found = {key: marks for key, marks in found.items() if marks}
    if len(found) == 1:
        return next(iter(found.items()))
    if not found:
        looked_for = ", ".join(f"{f.prefix + f.marks[0]} ({key})" for key, f in FRAMEWORKS.items())
        raise ValueError(
            f"the {len(names)} names of this log match no framework: none is like {looked_for}; "
            "choose one with --from"
        )
    candidates = "; ".join(f"{key}: {', '.join(marks[:3])}" for key, marks in found.items())
    raise ValueError(
        f"the names of this log match several frameworks ({candidates}); choose one with --from"
    )


# Translation


def _step_of(row, name, framework, path):
    """Returns the step that a value belongs to: by the counter of its prefix, or of the row."""
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
    """(their name -> {step: value}, name -> {step: what is no finite number}, values replaced), of what is
    mapped. A name of which no value is a number is there, without any."""
    wanted = {name for row in framework.names for name in row.theirs}
    values, nans, repeated = {}, {}, 0
    for log in logs:
        for row in log.rows:
            for logged, value in row.values.items():
                name = logged if logged in wanted else logged.removeprefix(framework.prefix)
                if name not in wanted:
                    continue
                step, known = _step_of(row, name, framework, log.path), values.setdefault(name, {})
                repeated += step in known
                nans.setdefault(name, {}).pop(step, None)  # of a continued run the last counts
                if not math.isfinite(value):
                    nans[name][step] = value
                if math.isnan(value):
                    known.pop(step, None)
                else:
                    known[step] = value
    for name, found in nans.items():
        if {math.inf, -math.inf} <= set(found.values()):  # there is no mean of the two
            values[name] = {step: x for step, x in values[name].items() if math.isfinite(x)}
    return values, {name: tuple(sorted(found)) for name, found in nans.items() if found}, repeated


def _per_batch(values, framework):
    """Returns the values, those of updates averaged over their batch, and how many a batch has."""
    is_update = {n: framework.updates is not None and n.startswith(framework.updates) for n in values}
    updates = {step for n, x in values.items() if is_update[n] for step in x}
    batches = {step for n, x in values.items() if not is_update[n] for step in x}
    number = round(len(updates) / len(batches)) if updates and batches else 1
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
    """(our metric -> {step: value}, our metric -> their names)."""
    series, theirs = {}, {}
    for row in framework.names:
        if row.ours in theirs or not set(row.theirs) <= values.keys():
            continue
        theirs[row.ours] = row.theirs
        steps = set.intersection(*(set(values[name]) for name in row.theirs))
        found = {step: row.value(*(values[name][step] for name in row.theirs)) for step in steps}
        series[row.ours] = {step: x for step, x in found.items() if x is not None}
    invalid = {step for step, x in series.get(IS_VALID, {}).items() if x == 0}
    series = {m: {s: x for s, x in v.items() if s not in invalid} for m, v in series.items()}
    return {metric: found for metric, found in series.items() if found}, theirs


def path_of(path: str) -> epath.Path:
    """Returns the path of a file or folder, "-" for standard input."""
    return epath.Path(path) if path == readers.STDIN else storage.folder(path)


def load(paths: Sequence[str], wanted: str) -> Record:
    """Reads files as one log; see `readers.read`, `recognise` and `_step_of` for the errors."""
    logs = [log for path in paths for log in readers.read(path_of(path))]
    names = {name for log in logs for row in log.rows for name in row.values}
    texts = {name for log in logs for name in log.texts}
    if "phase" in texts and any(name.startswith(OURS) for name in names):
        raise ValueError(f"{paths[0]} is a record of jaxrl_tis; give the folder that holds it")
    name, marks = recognise(names, wanted)
    framework = FRAMEWORKS[name]
    if name in VARIANTS and _marks_in(names, VARIANTS[name]):
        framework = VARIANTS[name]
    values, nans, repeated = _read_values(logs, framework)
    values, updates = _per_batch(values, framework)
    series, theirs = _translated(values, framework)
    steps = sorted({step for found in series.values() for step in found})
    place = {step: i for i, step in enumerate(steps, start=1)}
    known = {n for row in framework.names for n in row.theirs} | {*STEPS, *framework.steps}
    return Record(
        name, framework, tuple(dict.fromkeys(log.kind for log in logs)),
        {m: {place[s]: x for s, x in sorted(found.items())} for m, found in series.items()},
        theirs, tuple(steps), marks,
        tuple(sorted(n for n in names if not {n, n.removeprefix(framework.prefix)} & known)),
        tuple(sorted(texts)), nans, repeated, updates, _is_ahead(names, framework),
        _rounded(logs, series, theirs), any(log.is_counted for log in logs),
    )


def _rounded(logs, series, theirs):
    """Lists gaps that are 0, and weights that are 1, in every step, of names whose values are rounded."""
    printed = {name for log in logs for name in log.rounded}
    same = dict.fromkeys(corrections.GAPS, {0.0}) | dict.fromkeys(WEIGHTS, {1.0})
    return tuple(
        metric for metric, values in same.items()
        if metric in series and printed & set(theirs[metric]) and set(series[metric].values()) == values
    )


def _is_ahead(names, framework):
    return any(name.removeprefix(framework.prefix).startswith(framework.ahead) for name in names)


def case_of(record: Record, limits: dict[str, float]) -> tuple[Case, list[str]]:
    """Returns the case of a record, and what is assumed where the record is silent."""
    series = dict(record.series)
    # Logged, but never as a number: that it is absent tells nothing.
    empty = record.theirs.keys() - series.keys()
    assumed, unlogged = [], UNTOLD | set(record.framework.silent) | empty
    if record.is_counted:
        assumed.append("no step is printed: rows are counted, and named by their place")
    if record.rounded:
        series |= {m: {s: x + ROUNDED for s, x in series[m].items()} for m in record.rounded}
        assumed.append(f"printed as 0 or 1, which rounding may have made: {', '.join(record.rounded)}")
    if LAG not in series and record.is_ahead:
        unlogged |= {LAG}
        assumed.append("samplers run ahead, and no lag is logged: A and B.lag are not told apart")
    elif LAG not in series:
        assumed.append(
            "samples are of the weights that are trained, as no lag is logged; where samplers run ahead, "
            "A may be B.lag"
        )
    gaps = [metric for metric in corrections.GAPS if metric in series]
    is_told = CORRECTED in series or CORRECTED in unlogged or WEIGHTS_ESS in {*series, *unlogged}
    if gaps and not is_told:
        series[WEIGHTS_ESS] = dict.fromkeys(series[gaps[0]], 1.0)
        assumed.append("no weight is logged, so the sample size is that of weights of 1")
    return adapted(Case(series, {}, limits, len(record.steps), frozenset(unlogged))), assumed


# The report


def _missing(case, record, undecided):
    """Lists {metric, serves, switch} of what is not logged and leaves findings undecided; and of the lag
    and the correction, whose absence is taken for an answer."""
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


def _with_their_names(found, record):
    """Puts their steps and names into the evidence of findings."""
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
    """The object that --json writes, see the top of __main__.py.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is broken, or of no known kind; names the place. Or its names tell no
        framework, or several; or a threshold has an unknown name.
    """
    limits, record = limits_of(thresholds or {}), load(paths, wanted)
    case, assumed = case_of(record, limits)
    findings = (*corrections.FINDINGS, *corrections.OWN.get(record.name, ()))
    diagnosis = diagnosis_of(case, ", ".join(paths), {"corrections": findings})
    for key in ("findings", "setup", "corrections"):
        _with_their_names(diagnosis[key], record)
    for key in ("steps", "window"):
        diagnosis[key] = _their_steps(diagnosis[key], record)
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
    told = f"it has {', '.join(diagnosis['marks'][:3])}" if diagnosis["marks"] else "as it was asked to be"
    yield f"read as {diagnosis['framework']}: {told}"
    yield f"by its names in {diagnosis['source'].split(': ')[0]}"
    fewest = diagnosis["thresholds"]["min_steps"]
    if diagnosis["rows"] < fewest:
        yield f"too little to judge: {diagnosis['rows']} logged steps, a verdict needs {fewest:g}"
    for text in diagnosis["assumed"]:
        yield f"assumed: {text}"
    if diagnosis["updates"] > 1:
        yield f"means over the {diagnosis['updates']} updates of a batch, where each is logged"
    if diagnosis["repeated"]:
        yield f"{diagnosis['repeated']} values were logged again for the same step: the last one counts"
    yield from nans_of(diagnosis)


def _reasons(diagnosis):
    """Yields why causes and findings of the correction are not decided, but for what is missing
    altogether and for our config."""
    absent = [entry["metric"] for entry in diagnosis["missing"]]
    reasons, without_config, set_up = {}, [], {finding.name for finding in SETUP}
    for finding in diagnosis["undecided"]:
        name, reason = finding["name"], finding["reason"]
        if name not in set_up and "config.json" in reason:
            without_config.append(name)
        elif name not in set_up and not any(metric in reason for metric in absent):
            reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"  {', '.join(names)}: {reason}"
    if without_config:
        yield f"  {', '.join(without_config)}: a config of ours"


def describe(diagnosis: dict[str, Any], is_verbose: bool) -> str:
    """Writes the diagnosis for a reader; a verbose one lists all names that were not read."""
    lines = list(_heads(diagnosis))
    for title, key in (
        ("from the symptoms", "findings"), ("of the correction", "corrections"),
        ("from the set-up", "setup"),
    ):
        lines += ["", title] if diagnosis[key] else []
        for finding in diagnosis[key]:
            lines += lines_of(finding)
    if diagnosis["missing"]:
        lines += ["", "missing, and how to log it"]
    switches = {}
    for entry in diagnosis["missing"]:
        text = f"{entry['metric']} ({', '.join(entry['serves'])})"
        switches.setdefault(entry["switch"], []).append(text)
    for switch, metrics in switches.items():
        lines += [f"  {switch}:", *(f"    {metric}" for metric in metrics)]
    reasons = list(_reasons(diagnosis))
    lines += ["", "not decided", *reasons] if reasons else []
    lines += ["", *(f"note: {text}" for text in diagnosis["notes"])]
    for title, key in (("names that were not read", "unread"), ("without numbers", "texts")):
        names = diagnosis[key]
        if names:
            lines.append(f"{title}: " + (", ".join(names) if is_verbose else f"{len(names)} (--verbose)"))
    return "\n".join(lines)
