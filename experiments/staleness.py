"""Draws runs on stale samples: prosperity before collapse, and the ESS at each lag.

Reads docs/experiments/staleness.jsonl, the runs of `configs/fig_staleness.py`.

Examples:

    python -m experiments.staleness
    python -m experiments.staleness docs/experiments
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import figures, records
from experiments.figures import parts
from experiments.records import Run
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import palette

LAG = "training/off_policy/trajectory_staleness/mean"
ESS = "mismatch/ess_seq"
# Over the second half of a run, when its samples are as old as they get.
lag_of, ess_of = figures.of(LAG, 0.5), figures.of(ESS, 0.5)


def fall(run: Run) -> float:
    """Returns the largest held-out accuracy of a run minus the accuracy of its last evaluations."""
    values = run.series["eval/sampled_accuracy"]
    return float(values.max() - values[-figures.LAST :].mean())


def early(run: Run) -> float:
    """Returns the gain at the second to fourth evaluation, before a stale run can fall."""
    values = run.series["eval/sampled_accuracy"]
    return float(values[1 : 1 + figures.LAST].mean() - values[0])


def power(runs: Sequence[Run]) -> figures.Interval | None:
    """Fits ESS = c lag^x to the stale runs of each seed, by least squares of the logarithms.

    Returns x and its 95 % interval over seeds; None without a seed of two lags.
    """
    slopes = []
    for seed in sorted({r.seed for r in runs}):
        lags, ess = (
            np.array([measure(r) for r in runs if r.seed == seed]) for measure in (lag_of, ess_of)
        )
        is_stale = lags > 0
        if len(set(lags[is_stale])) > 1:
            slopes.append(np.polyfit(np.log(lags[is_stale]), np.log(ess[is_stale]), 1)[0])
    return intervals.of_mean(slopes) if slopes else None


def bounds(runs: Sequence[Run]) -> list[list[str]]:
    """Returns for each objective the largest lag that improves, the smallest lag that does not, the ESS
    of both, and the exponent of `power`."""
    lines = []
    for name in dict.fromkeys(parts(r.arm)[0] for r in runs):
        own = records.by_arm([r for r in runs if parts(r.arm)[0] == name])
        arms = sorted(own, key=lambda arm: parts(arm)[1])
        improves = {arm: intervals.of_mean([figures.gain(r) for r in own[arm]])[1] > 0 for arm in arms}
        ess = {arm: figures.mean([ess_of(r) for r in own[arm]]) for arm in arms}
        described = lambda arm, ess=ess: f"{parts(arm)[1]:g}, {ess[arm]}"
        good, bad = ([arm for arm in arms if improves[arm] == wanted] for wanted in (True, False))
        every = [r for some in own.values() for r in some]
        lines.append([
            name, described(good[-1]) if good else "–", described(bad[0]) if bad else "–",
            figures.interval(power(every), ".2f"),
        ])
    return lines


def table(runs: Sequence[Run]) -> str:
    """Returns Markdown tables: arms by objective and lag, comparisons with PPO, lags and ESS."""
    lines = []
    for arm, own in sorted(records.by_arm(runs).items(), key=lambda item: parts(item[0])):
        name, lag = parts(arm)
        told = ((lag_of, ".1f"), (ess_of, ".3f"), (early, "+.3f"), (figures.gain, "+.3f"), (fall, ".3f"))
        lines.append([
            name, f"{lag:g}", str(len(own)),
            *(figures.mean([measure(r) for r in own], form) for measure, form in told),
        ])
    header = [
        "objective", "bound", "seeds", "lag", "sequence ESS", "early gain", "gain in sampled accuracy",
        "drop from its best",
    ]
    lags = sorted({parts(r.arm)[1] for r in runs})
    compared = [
        (label, measure, f"{name}-{lag:g}", f"PPO-{lag:g}")
        for lag in lags for name in ("no-clip", "M2PO")
        for label, measure in (("early gain", early), ("gain", figures.gain))
    ]
    law = ["objective", "largest lag that improves, ESS", "smallest lag that does not, ESS", "x of ESS ~ lag^x"]
    return "\n\n".join([
        figures.rows(header, lines), figures.comparisons(runs, compared), figures.rows(law, bounds(runs)),
    ])


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Draws a panel for each lag with the accuracy of each objective, and one of gain against ESS."""
    lags = sorted({parts(r.arm)[1] for r in runs})
    names = list(dict.fromkeys(parts(r.arm)[0] for r in runs))
    colors = palette(len(names))
    *panels, last = page.subplots(1, len(lags) + 1, sharey=True)
    for axes, lag in zip(panels, lags, strict=True):
        for name, color in zip(names, colors, strict=True):
            own = [r for r in runs if parts(r.arm) == (name, lag)]
            figures.curve(axes, own, "eval/sampled_accuracy", name, color, is_change=True)
        axes.axhline(0, color="black", linewidth=0.7)
        axes.set(title=f"{lag:g} batches behind", xlabel="step", ylabel="change of held-out accuracy")
    panels[0].legend()
    for name, color in zip(names, colors, strict=True):
        own = [r for r in runs if parts(r.arm)[0] == name]
        last.scatter([ess_of(r) for r in own], [figures.gain(r) for r in own], color=color, s=16)
    last.axhline(0, color="black", linewidth=0.7)
    last.set(title="Gain by sample size", xlabel="sequence ESS, share of the batch", ylabel="gain")


if __name__ == "__main__":
    figures.run("staleness", table, {"staleness": (draw, (16, 3.6))})
