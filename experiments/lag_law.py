"""The largest lag that a run stands, by its sequence ESS: the runs of configs/fig_lag.py.

A run is stable if its held-out reward ends at 70 % of its best or more, and above its start. The law L_max = c ESS^a is
the boundary of a logistic regression of stability on log lag and log ESS.
"""

from collections.abc import Sequence

import numpy as np

from experiments import parts, predictor
from experiments.parts import ARM, SEEDS, Arms, Figure, gain, mean_of, of, split
from experiments.records import Run

KEPT = 0.7
RESAMPLES = 500
square_of, length_of = of("mismatch/staleness/log_ratio_square_mean", 0.5), of("response_length/mean", 0.5)


def ess_of(run: Run) -> float:
    """Returns the sequence ESS of log-normal weights whose tokens are independent, over the second half of a run."""
    return float(np.exp(-length_of(run) * square_of(run)))


def is_stable(run: Run) -> bool:
    """Returns whether a run learns and keeps what it has learned."""
    values = run.series["eval/sampled_accuracy"]
    return bool(gain(run) > 0 and values[-parts.LAST :].mean() >= KEPT * values.max())


def law(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Returns c, a and the share of runs on the right side of L = c ESS^a; NaN if all runs are alike."""
    x = np.log([[split(run.arm)[1], ess_of(run)] for run in runs])
    stable = np.array([is_stable(run) for run in runs])
    if stable.all() or not stable.any():
        return np.nan, np.nan, np.nan
    score = predictor.fitted(x, stable)
    bias, of_lag, of_ess = (float(score(np.array([at]))[0]) for at in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    of_lag, of_ess = of_lag - bias, of_ess - bias
    right = float(np.mean((score(x) > 0) == stable))
    return float(np.exp(-bias / of_lag)), -of_ess / of_lag, right


def laws(arms: Arms) -> str:
    """Returns the table of c and a of each family and objective, with intervals of a bootstrap over runs."""
    lines = []
    for name in dict.fromkeys(split(arm)[0] for arm in arms):
        runs, rng = parts.every(arms, name), np.random.default_rng(0)
        chosen = [np.arange(len(runs)), *rng.integers(len(runs), size=(RESAMPLES, len(runs)))]
        found = np.array([law([runs[i] for i in some]) for some in chosen])
        stable = sum(map(is_stable, runs))
        cells = ["–"] * 3 if np.isnan(found[0]).any() else [parts.interval(parts.bootstrap(x), ".2f") for x in found.T]
        lines.append([name, f"{stable} of {len(runs)}", *cells])
    return parts.rows(["family, objective", "stable", "c", "a", "on the right side"], lines)


def panel(axes, arms: Arms) -> None:
    """Draws each run by its ESS and lag, full where it is stable."""
    for is_full in (True, False):
        runs = [run for run in parts.every(arms) if is_stable(run) == is_full]
        style = {"facecolors": None if is_full else "none", "edgecolors": "C0", "label": "stable" if is_full else "not"}
        parts.scatter(axes, runs, ess_of, lambda run: split(run.arm)[1], **style)
    axes.set(xlabel="sequence ESS, share of the batch", ylabel="lag, updates", xscale="log", yscale="log")
    axes.legend()


FIGURE = Figure(
    tables=(laws, parts.of_arms(
        ARM, SEEDS, ("sequence ESS", mean_of(ess_of)), ("gain in sampled accuracy", mean_of(gain, "+.3f")),
        ("stable", lambda arm, arms: str(sum(map(is_stable, arms[arm])))),
    )),
    pictures={"lag": parts.Picture((5, 4), [panel])}, seeds="0,1,2", order=split,
)
