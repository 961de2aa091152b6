"""What the doctor says of a dump, as of one step of a run that corrects nothing."""

from typing import Any

from jaxrl_tis.doctor.case import ENGINE_SHARE, ESS, THRESHOLDS, Case
from jaxrl_tis.doctor.diagnose import adapted, diagnosis_of

# Each batch is used once, and nothing is weighed or rejected. All else about the run is unknown.
CONFIG = {
    "correction": {
        "preset": "disabled",
        **dict.fromkeys(("mode", "weight", "masks", "objective", "centering")),
    },
    "train": {"epochs": 1, "minibatches": 1},
}
ONE_STEP = {"window": 1.0, "min_steps": 1.0}


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """{verdict, findings, undecided} of the doctor, see `doctor.__main__`, whose findings have no
    changes: there is no config to change."""
    unweighted = next(row for row in report["rules"] if row["name"] == "none")
    values = report["metrics"] | {ESS: unweighted["ess"]}
    values.setdefault(ENGINE_SHARE, 1.0)  # of what is known: logp_old is of the weights that sampled
    series = {name: {1: value} for name, value in values.items()}
    found = diagnosis_of(adapted(Case(series, CONFIG, THRESHOLDS | ONE_STEP, 1)), "")
    kept = ("name", "title", "parent", "advice", "mistake", "evidence")
    return {
        "verdict": found["verdict"],
        "findings": [{k: f[k] for k in kept} for f in found["findings"]],
        "undecided": found["undecided"],
    }
