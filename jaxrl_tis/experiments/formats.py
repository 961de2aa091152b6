"""What number formats of sampler and learner do to the gap and to a run.

    python -m jaxrl_tis.experiments.formats [FOLDER]

Reads what `configs/fig_formats.py` left in docs/experiments/formats.jsonl.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from jaxrl_tis import intervals
from jaxrl_tis.experiments import figures, records
from jaxrl_tis.experiments.records import Run
from jaxrl_tis.report.plots import COLORS

GAPS = {
    "mean |log ratio|": "mismatch/engine/log_ratio_abs_mean",
    "largest dp": "training/rollout_probs_diff_max",
    "k3": "rollout_corr/k3_kl",
}


def table(runs: Sequence[Run]) -> str:
    """The arms: their gap in the whole run, and what was gained."""
    gained, lines = figures.gains(runs), []
    for arm, own in records.by_arm(runs).items():
        other = figures.interval(figures.beside(gained[arm], gained["float32"]))
        lines.append([
            arm, str(len(own)),
            *(records.cell([records.at_end(r, name, 1.0) for r in own], ".2e") for name in GAPS.values()),
            figures.interval(intervals.of_mean(list(gained[arm].values()))),
            "–" if arm == "float32" else other,
        ])
    header = ["arm", "seeds", *GAPS, "gain in sampled accuracy", "less that of float32"]
    return figures.rows(header, lines)


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """The gap of each arm, and its gain."""
    by_arm, gained = records.by_arm(runs), figures.gains(runs)
    places = range(len(by_arm))
    gap, gain = page.subplots(1, 2, sharey=True)
    for place, (arm, own) in zip(places, by_arm.items()):
        values = [records.at_end(r, GAPS["mean |log ratio|"], 1.0) for r in own]
        gap.scatter(values, [place] * len(own), color=COLORS[0], s=16)
        mean, low, high = intervals.of_mean(list(gained[arm].values()))
        gain.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color=COLORS[1], fmt="o")
    gap.set(title="Gap", xlabel="mean |log ratio|, nats", xscale="log")
    gap.set_yticks(places, list(by_arm))
    gap.invert_yaxis()
    gain.set(title="Gain in held-out accuracy", xlabel="sampled accuracy, end less start")


if __name__ == "__main__":
    figures.run("formats", table, {"formats": (draw, (10, 4))})
