"""Stale samples: prosperity before collapse, and the sample size that a lag leaves.

    python -m jaxrl_tis.experiments.staleness [FOLDER]

Reads what `configs/fig_staleness.py` left in docs/experiments/staleness.jsonl.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxrl_tis import intervals
from jaxrl_tis.experiments import figures, records
from jaxrl_tis.experiments.records import Run
from jaxrl_tis.report.plots import COLORS

LAG = "training/off_policy/trajectory_staleness/mean"
ESS = "mismatch/ess_seq"


def parts(arm: str) -> tuple[str, int]:
    """Returns the objective and the bound on the lag that "M2PO-16" is named after."""
    objective, _, lag = arm.rpartition("-")
    return objective, int(lag)


def fall(run: Run) -> float:
    """Returns the largest held-out accuracy of a run less that over its last evaluations."""
    values = run.series["eval/sampled_accuracy"]
    return float(values.max() - values[-figures.LAST :].mean())


def power(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Fits lag = c ESS^alpha to the runs that are stale, by least squares of the logarithms.

    Returns alpha and its 95 % interval over seeds.
    """
    found = []
    for seed in sorted({r.seed for r in runs}):
        own = [r for r in runs if r.seed == seed and records.at_end(r, LAG) > 0]
        ess = np.log([records.at_end(r, ESS, 0.5) for r in own])
        lag = np.log([records.at_end(r, LAG, 0.5) for r in own])
        found.append(np.polyfit(ess, lag, 1)[0])
    return intervals.of_mean(found)


def largest_lags(runs: Sequence[Run]) -> list[list[str]]:
    """For each objective, the largest lag whose arm improves, the first that does not, and the power."""
    lines = []
    for name in dict.fromkeys(parts(r.arm)[0] for r in runs):
        own = [r for r in runs if parts(r.arm)[0] == name]
        by_lag = sorted(
            (parts(arm)[1], intervals.of_mean(list(values.values())))
            for arm, values in figures.gains(own).items()
        )
        improving = [lag for lag, (_, low, _) in by_lag if low > 0]
        failing = [lag for lag, (_, low, _) in by_lag if low <= 0]
        lines.append([
            name, str(max(improving, default="none")), str(min(failing, default="none")),
            figures.interval(power(own), ".2f"),
        ])
    return lines


def table(runs: Sequence[Run]) -> str:
    """The arms by objective and lag, and the law of the lag."""
    gained, by_arm = figures.gains(runs), records.by_arm(runs)
    lines = []
    for arm, own in sorted(by_arm.items(), key=lambda item: parts(item[0])):
        name, lag = parts(arm)
        plain = "PPO-" + str(lag)
        other = None if arm == plain else figures.beside(gained[arm], gained[plain])
        lines.append([
            name, str(lag), str(len(own)), records.cell([records.at_end(r, LAG, 0.5) for r in own], ".1f"),
            records.cell([records.at_end(r, ESS, 0.5) for r in own]),
            figures.interval(intervals.of_mean(list(gained[arm].values()))),
            figures.interval(other) if other else "–",
            records.cell([fall(r) for r in own]),
        ])
    header = [
        "objective", "bound", "seeds", "lag", "sequence ESS", "gain in sampled accuracy",
        "less that of PPO", "fall from its best",
    ]
    law = ["objective", "largest lag that improves", "smallest that does not", "power of ESS in the lag"]
    return "\n\n".join([figures.rows(header, lines), figures.rows(law, largest_lags(runs))])


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """A panel for each lag: held-out accuracy of each objective; the last one, gain against ESS."""
    lags = sorted({parts(r.arm)[1] for r in runs})
    names = list(dict.fromkeys(parts(r.arm)[0] for r in runs))
    *panels, last = page.subplots(1, len(lags) + 1)
    for axes, lag in zip(panels, lags):
        for name, color in zip(names, COLORS):
            own = [r for r in runs if parts(r.arm) == (name, lag)]
            figures.curve(axes, own, "eval/sampled_accuracy", name, color)
        axes.set(title=f"{lag} batches behind", xlabel="step", ylabel="held-out accuracy", ylim=(0, 0.6))
    panels[0].legend()
    for name, color in zip(names, COLORS):
        own = [r for r in runs if parts(r.arm)[0] == name]
        ess = [records.at_end(r, ESS, 0.5) for r in own]
        last.scatter(ess, [figures.gain(r) for r in own], color=color, s=16)
    last.axhline(0, color="black", linewidth=0.7)
    last.set(title="Gain by sample size", xlabel="sequence ESS, share of the batch", ylabel="gain")


if __name__ == "__main__":
    figures.run("staleness", table, {"staleness": (draw, (16, 3.6))})
