"""Writes the runs of a sweep as JSON lines, the data of the figures of docs/experiments.md.

A line has `arm`, `seed`, the doctor's `verdict` (causes) and `findings` (more precise), the held-out
accuracies (`eval/steps`, ...), and for each metric of METRICS its mean over each BLOCK of steps (the largest
value for metrics that are a maximum). The line of an unfinished run has `arm`, `seed` and `unfinished`, the
last recorded step.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from jaxrl_tis.doctor.diagnose import diagnose
from jaxrl_tis.record import metrics
from jaxrl_tis.runtime import storage

BLOCK = 8  # steps
METRICS = (
    "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "mismatch/ess_seq",
    "mismatch/ess_token", "mismatch/dp_p95/mean", "mismatch/engine/log_ratio_abs_mean",
    "mismatch/staleness/log_ratio_abs_mean", "mismatch/staleness/log_ratio_square_mean",
    "mismatch/route_flip_router", "mismatch/route_flip_token", "response_length/mean", "reward/mean",
    "rollout_corr/chi2_seq", "rollout_corr/chi2_token",
    "rollout_corr/k3_kl", "rollout_corr/kept_eff_sample_size", "rollout_corr/kl",
    "training/off_policy/trajectory_staleness/mean", "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean", "rollout/draft_acceptance", "drafter/kl",
    "time/rollout_tokens_per_s", "time/step_s", "time/host_peak_gib",
)
ACCURACIES = ("eval/greedy_accuracy", "eval/sampled_accuracy")
NAME = re.compile(r"(.+)-seed(\d+)")  # of a workdir


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      series: metric -> values [blocks], NaN for a block without a value; "eval/..." -> [evaluations].
    """

    arm: str
    seed: int
    verdict: list[str]
    findings: list[str]
    series: dict[str, np.ndarray]

    def steps(self, name: str) -> np.ndarray:
        """Returns the steps of a metric's values: the last step of each block, or the steps of evaluations."""
        if name.startswith("eval/"):
            return self.series["eval/steps"]
        return BLOCK * np.arange(1, len(self.series[name]) + 1)


def thinned(name: str, records: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the value of a metric for each whole block of steps, NaN for a block without a value."""
    steps = {r["step"]: r[name] for r in records if name in r}
    last = max((r["step"] for r in records), default=0)
    pick = max if name.endswith("max") else np.mean
    blocks = []
    for first in range(1, last - BLOCK + 2, BLOCK):
        values = [steps[s] for s in range(first, first + BLOCK) if s in steps]
        blocks.append(float(pick(values)) if values else math.nan)
    return blocks


def series_of(records: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the values of `Run.series` from the records of a run."""
    trained = [r for r in records if r["phase"] == "train"]
    evaluated = [r for r in records if r["phase"] == "eval"]
    series = {"eval/steps": [r["step"] for r in evaluated]}
    series |= {name: thinned(name, trained) for name in METRICS}
    return series | {name: [r[name] for r in evaluated] for name in ACCURACIES}


def rounded(x: float) -> float | str:
    """Returns four digits of a number, or the text "nan" or "inf", which JSON has no number for."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)


def line_of(workdir: epath.Path) -> dict[str, Any]:
    """Returns the JSON object of a run."""
    named = NAME.fullmatch(workdir.name)
    assert named is not None
    arm, seed = named.groups()
    line = {"arm": arm, "seed": int(seed)}
    records = metrics.read(workdir) if (workdir / metrics.FILE_NAME).exists() else []
    config = json.loads((workdir / "config.json").read_bytes())["config"]
    if not metrics.has_ended(records, config["steps"]):
        return line | {"unfinished": max((r["step"] for r in records), default=0)}
    found = diagnose(workdir)
    line |= {"verdict": found["verdict"], "findings": [f["name"] for f in found["findings"]]}
    series = series_of(records)
    return line | {"eval/steps": series.pop("eval/steps")} | {
        name: [rounded(x) for x in values] for name, values in series.items()
    }


def gather(folder: str | os.PathLike, out: str | os.PathLike) -> list[dict[str, Any]]:
    """Writes one line per run of a sweep, sorted by name, and returns the lines.

    Raises:
      ValueError: the folder has no run.
    """
    configs = storage.folder(folder).glob("*/config.json")
    workdirs = sorted(p.parent for p in configs if NAME.fullmatch(p.parent.name))
    if not workdirs:
        raise ValueError(f"{folder} holds no run of a sweep; give the --out of a sweep")
    lines = [line_of(workdir) for workdir in workdirs]
    pathlib.Path(out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def read(path: str | os.PathLike) -> tuple[list[Run], list[str]]:
    """Reads a file of `gather`. Returns the finished runs, and the names of the others.

    Raises:
      ValueError: a line is not the line of a run; the message has its number.
    """
    runs, others = [], []
    for number, text in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            arm, seed = line.pop("arm"), line.pop("seed")
            if "unfinished" in line:
                others.append(f"{arm}, seed {seed}")
                continue
            verdict, findings = line.pop("verdict"), line.pop("findings")
            series = {name: np.array(values, float) for name, values in line.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number} is not the line of a run: {error!r}; write the file again with "
                "python -m experiments.figures NAME --runs=FOLDER"
            ) from error
        runs.append(Run(arm, seed, verdict, findings, series))
    return runs, others


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns {arm: its runs}, in the order of first appearance."""
    return {arm: [r for r in runs if r.arm == arm] for arm in dict.fromkeys(r.arm for r in runs)}


def at_end(run: Run, name: str, share: float = 0.1) -> float:
    """Returns the mean of a metric over the last `share` of the run without NaN; NaN without a value."""
    values = run.series[name]
    last = values[-max(1, math.ceil(share * len(values))) :]
    return math.nan if np.isnan(last).all() else float(np.nanmean(last))
