"""Asks the doctor for a verdict on a dump, as one step of a run without correction."""

import math
from typing import Any

from jaxrl_tis.doctor.case import CHI2, DP_MAX, ENGINE_SHARE, ESS, KL, PEARSON, THRESHOLDS, Case
from jaxrl_tis.doctor.corrections import CALM, MASS
from jaxrl_tis.doctor.diagnose import adapted, diagnosis_of
from jaxrl_tis.doctor.frameworks import RATIO
from jaxrl_tis.estimators import presets

# Each batch is used once, and nothing is weighed or rejected. All else about the run is unknown.
CONFIG = {
    "correction": {
        "preset": "disabled",
        **dict.fromkeys(presets.FIELDS),
    },
    "train": {"epochs": 1, "minibatches": 1},
}
ONE_STEP = {"window": 1.0, "min_steps": 1.0}
TOO_LITTLE = "too little to judge"
FEWEST = 10  # tokens; of two, any correlation is 1 or -1 (ours)
LEAST_WORTH = 2.0  # effective number of tokens; below it one outweighs all others together (ours)


def _too_little(report):
    """Returns why the dump is too small for a verdict, None where it is large enough."""
    tokens, values = report["tokens"], report["metrics"]
    if tokens < FEWEST:
        return f"{tokens} valid tokens; a verdict needs {FEWEST}"
    square = 1.0 + values[CHI2]  # mean of the squared ratio
    worth = tokens * values[RATIO] ** 2 / square if square > 0 else 0.0
    if worth >= LEAST_WORTH:
        return None
    return (
        f"the {tokens} valid tokens have an effective size of {worth:.3g}; a verdict needs {LEAST_WORTH:g}. "
        "Look at the token with the largest log ratio"
    )


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """Returns {verdict, findings, undecided} of the doctor, see `doctor.__main__`. Findings have no
    changes, because there is no config. The doctor has none where a dump is too small for a verdict.
    Faults of recorded routes come first, then a mean ratio below 1; with any of them the verdict is
    neither healthy nor watch."""
    found = _of_gap(report)
    faults = list(report["routes"]["faults"]) if report["routes"] else []
    faults += [] if found["verdict"] == [TOO_LITTLE] else _lost_mass(report)
    if not faults:
        return found
    names = list(dict.fromkeys(fault["name"] for fault in faults))
    rest = {"parent": None, "mistake": "", "evidence": []}
    return found | {
        "verdict": names + [name for name in found["verdict"] if name not in CALM],
        "findings": [rest | fault for fault in faults]
        + [f for f in found["findings"] if f["name"] not in CALM],
    }


def _lost_mass(report):
    """Returns the finding that the mean ratio is below 1. Its standard error counts each sequence as one
    token, because the ratios within a sequence may rise and fall together."""
    mean, square = report["metrics"][RATIO], 1.0 + report["metrics"][CHI2]
    count = report["sequences"] - report["without_tokens"]
    error = math.sqrt(max(square - mean**2, 0.0) / count)
    lost, least = 1.0 - mean, THRESHOLDS["mass_lost"]
    is_wide = abs(report["metrics"][KL]) > THRESHOLDS["mass_gap"]  # of other tokens, or of other weights
    is_sure = lost > THRESHOLDS["mass_sigma"] * error and mean > THRESHOLDS["mean_usable"] * error
    if lost <= least or not is_sure or is_wide:
        return []
    evidence = {"metric": f"1 - {RATIO}", "statistic": None, "value": lost, "op": ">", "threshold": least}
    evidence |= dict.fromkeys(("steps", "crossed", "extreme_step"))
    told = {key: getattr(MASS, key) for key in ("name", "title", "advice", "mistake")}
    return [told | {"evidence": [evidence]}]


def _of_gap(report):
    """Returns the doctor's verdict."""
    reason = _too_little(report)
    if reason:
        undecided = [{"name": TOO_LITTLE, "title": TOO_LITTLE, "reason": reason}]
        return {"verdict": [TOO_LITTLE], "findings": [], "undecided": undecided}
    unweighted = next(row for row in report["rules"] if row["name"] == "none")
    values = report["metrics"] | {ESS: unweighted["ess"]}
    if values[DP_MAX] == 0:  # equal constants have no correlation
        values[PEARSON] = 1.0
    values.setdefault(ENGINE_SHARE, 1.0)  # of what is known: logp_old is of the weights that sampled
    values |= {
        f"mismatch/{bucket}/{name}": x
        for bucket, profile in report["profiles"].items() for name, x in profile.items()
    }
    series = {name: {1: value} for name, value in values.items()}
    diagnosis = diagnosis_of(adapted(Case(series, CONFIG, THRESHOLDS | ONE_STEP, 1)), "")
    kept = ("name", "title", "parent", "advice", "mistake", "evidence")
    return {
        "verdict": diagnosis["verdict"],
        "findings": [{k: f[k] for k in kept} for f in diagnosis["findings"]],
        "undecided": diagnosis["undecided"],
    }
