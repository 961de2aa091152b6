"""Compares number formats of sampler and learner: their gap and the gain of the runs.

Reads docs/experiments/formats.jsonl, the runs of `configs/fig_formats.py`.

Examples:

    python -m experiments.formats
    python -m experiments.formats docs/experiments
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import figures, records
from experiments.records import Run
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import COLORS

# Over the whole run.
gap_of = figures.of("mismatch/engine/log_ratio_abs_mean", 1.0)
GAPS = {
    "mean |log ratio|": gap_of,
    "largest dp": figures.of("training/rollout_probs_diff_max", 1.0),
    "k3": figures.of("rollout_corr/k3_kl", 1.0),
}
# Ratios of the gaps of two arms: sizes in the hypotheses, and the effect of a learner that rounds like its
# sampler.
OVER = (
    ("W8A8-both", "W8A8"), ("QaRL", "W8A8"), ("Jet-RL", "FP8"), ("float16", "bfloat16"),
    ("float32-float16", "float32-bfloat16"), ("bfloat16", "float32-bfloat16"), ("float16", "float32-float16"),
)
BESIDE_W8A8 = ("W8A8-TIS-2", "QuRL", "W8A8-both", "QaRL")


def log_gap(run: Run) -> float:
    """Returns log10 of the mean |log ratio| of the engine."""
    return float(np.log10(gap_of(run)))


def table(runs: Sequence[Run]) -> str:
    """Returns Markdown tables: gap and gain of each arm, then ratios of gaps and paired gains."""
    by_arm, lines = records.by_arm(runs), []
    for arm, own in by_arm.items():
        gap = [figures.mean([measure(r) for r in own], ".2e") for measure in GAPS.values()]
        beside = None if arm == "float32" else figures.beside(own, by_arm["float32"])
        gain = figures.mean([figures.gain(r) for r in own], "+.3f")
        lines.append([arm, str(len(own)), *gap, gain, figures.interval(beside)])
    header = ["arm", "seeds", *GAPS, "gain in sampled accuracy", "difference to float32"]
    ratios = [
        [f"{arm} / {other}", figures.interval(tuple(10.0**x for x in difference), ".3g")]
        for arm, other in OVER if arm in by_arm and other in by_arm
        if (difference := figures.beside(by_arm[arm], by_arm[other], log_gap))
    ]
    compared = [("gain", figures.gain, arm, "W8A8") for arm in BESIDE_W8A8]
    return "\n\n".join([
        figures.rows(header, lines), figures.rows(["ratio of gaps", "mean |log ratio|"], ratios),
        figures.comparisons(runs, compared),
    ])


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Draws the gap and the gain of each arm."""
    by_arm = records.by_arm(runs)
    places = range(len(by_arm))
    gap, gain = page.subplots(1, 2, sharey=True)
    for place, own in zip(places, by_arm.values(), strict=True):
        gap.scatter([gap_of(r) for r in own], [place] * len(own), color=COLORS[0], s=16)
        mean, low, high = intervals.of_mean([figures.gain(r) for r in own])
        gain.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color=COLORS[1], fmt="o")
    gap.set(title="Gap", xlabel="mean |log ratio|, nats", xscale="log")
    gap.set_yticks(places, list(by_arm))
    gap.invert_yaxis()
    gain.set(title="Gain in held-out accuracy", xlabel="sampled accuracy, end less start")


if __name__ == "__main__":
    figures.run("formats", table, {"formats": (draw, (10, 4))}, needed=("float32",))
