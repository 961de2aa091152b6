"""Draws collapse and rescue by each correction: Figures 2, 4, 5 and 6 of Yao et al. (2025).

Reads docs/experiments/rescue.jsonl, the runs of `configs/fig_rescue.py`. `critic.py` draws the same figure
for `configs/fig_critic.py`.

Examples:

    python -m experiments.rescue
    python -m experiments.rescue docs/experiments
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import figures, records
from experiments.figures import Comparison, Interval
from experiments.records import Run
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import palette

SHOWN = ("no-gap", "none", "PPO-IS", "vanilla-IS", "TIS-2", "centering")
STORY = {
    "no-gap": "no gap", "none": "gap, uncorrected", "PPO-IS": "gap inside PPO's ratio",
    "TIS-2": "gap, truncated weights (TIS)",
}
# Others: none.
UNCORRECTED: dict[str, Any] = {"int8-TIS-2": "int8", "no-gap": None, "int8": None, "none": None}
BYPASS = ("PPO-IS", "centering")  # their k1 is of the sampler, and holds the gap
K1, ACCURACY = "actor/ppo_kl", "eval/sampled_accuracy"
PANELS = (
    (ACCURACY, "Learner, held-out accuracy", "change, fraction correct"),
    ("reward/mean", "Sampler, training reward", "fraction correct"),
    ("training/rollout_probs_diff_max", "Largest difference in 8 steps", "|p_sampler − p_learner|"),
    ("actor/entropy", "Entropy of the learner", "nats per token"),
    (K1, "k1 of old to new policy", "nats per token"),
    ("response_length/mean", "Response length", "tokens"),
)


def negative_share(run: Run) -> float:
    """Returns the share of blocks whose k1 estimate of a KL divergence is below 0."""
    return float(np.mean(run.series[K1] < 0))


COMPARISONS: tuple[Comparison, ...] = (
    *(("gain", figures.gain, arm, other) for arm, other in (
        ("TIS-2", "TIS-8"), ("TIS-2", "vanilla-IS"), ("TIS-2", "centering"), ("seq-TIS", "TIS-2"),
        ("seq-MIS", "MIS"), ("no-gap", "TIS-2"),
    )),
    ("sampler's reward", figures.of("reward/mean"), "none", "TIS-2"),
    ("entropy", figures.of("actor/entropy"), "none", "TIS-2"),
    ("share of k1 below 0", negative_share, "none", "TIS-2"),
    ("response length", figures.of("response_length/mean"), "none", "TIS-2"),
)


def verdict(gain: Interval, beside: Interval | None, is_collapse: bool = False) -> str:
    """Returns the verdict of the protocol (docs/experiments.md) on an arm.

    Args:
      gain: gain of the arm, with interval.
      beside: paired difference to the uncorrected arm; None if there is no comparison.
      is_collapse: whether the uncorrected arm collapses.
    """
    words = ["collapses"] if gain[2] < 0 else ["improves"] if gain[1] > 0 else ["neither"]
    if beside is not None and beside[1] > 0:
        words.append("rescues" if is_collapse and gain[2] >= 0 else "better than none")
    if beside is not None and beside[2] < 0:
        words.append("worse than none")
    return ", ".join(words)


def _gain(runs):
    return intervals.of_mean([figures.gain(r) for r in runs])


def table(runs: Sequence[Run]) -> str:
    """Returns Markdown tables: each arm's gain, sampler reward and signs of Figure 5; then the paired
    comparisons of the hypotheses."""
    by_arm, lines = records.by_arm(runs), []
    for arm, own in by_arm.items():
        base = by_arm.get(UNCORRECTED.get(arm, "none"))
        gain, other = _gain(own), figures.beside(own, base) if base else None
        end = lambda name, own=own: figures.mean([records.at_end(r, name) for r in own])
        k1 = "–" if arm in BYPASS else f"{np.mean([negative_share(r) for r in own]):.2f}"
        lines.append([
            arm, str(len(own)), figures.interval(gain), figures.interval(other),
            end("reward/mean"), end("training/rollout_probs_diff_max"), end("actor/entropy"), k1,
            end("response_length/mean"),
            verdict(gain, other, is_collapse=base is not None and _gain(base)[2] < 0),
        ])
    header = [
        "arm", "seeds", "gain in sampled accuracy", "difference to uncorrected",
        "final sampler reward", "largest dp in 8 steps", "entropy", "share of k1 below 0", "length",
        "verdict",
    ]
    return figures.rows(header, lines) + "\n\n" + figures.comparisons(runs, COMPARISONS)


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Draws six panels of the arms in SHOWN, and int8 without an injected gap in grey."""
    by_arm = records.by_arm(runs)
    for axes, (name, title, unit) in zip(page.subplots(2, 3).flat, PANELS, strict=True):
        for arm, color in zip(SHOWN, palette(len(SHOWN)), strict=True):
            if not (name == K1 and arm in BYPASS):
                figures.curve(axes, by_arm.get(arm, []), name, arm, color, name == ACCURACY)
        int8, label = by_arm.get("int8", []), "int8, no injected gap"
        figures.curve(axes, int8, name, label, figures.GREY, name == ACCURACY, linestyle="--")
        axes.set(title=title, xlabel="step", ylabel=unit)
    page.axes[4].axhline(0, color="black", linewidth=0.7)
    page.axes[4].set_yscale("symlog", linthresh=1e-3)
    page.legend(*page.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN) + 1)


def draw_story(page: Figure, runs: Sequence[Run]) -> None:
    """Draws two panels: the reward in the training log, and the accuracy of the learner."""
    by_arm = records.by_arm(runs)
    shown, hidden = page.subplots(1, 2)
    for (arm, label), color in zip(STORY.items(), palette(len(STORY)), strict=True):
        figures.curve(shown, by_arm.get(arm, []), "reward/mean", label, color)
        figures.curve(hidden, by_arm.get(arm, []), ACCURACY, label, color, is_change=True)
    shown.set(title="What the log shows: the sampler's reward", xlabel="step", ylabel="fraction correct")
    hidden.axhline(0, color="black", linewidth=0.7)
    hidden.set(
        title="What was learned: held-out accuracy", xlabel="step", ylabel="change, fraction correct"
    )
    page.legend(*shown.get_legend_handles_labels(), loc="outside lower center", ncols=len(STORY))


if __name__ == "__main__":
    pictures: figures.Pictures = {"rescue": (draw, (14, 7)), "collapse": (draw_story, (10, 3.6))}
    figures.run("rescue", table, pictures, needed=("none",))
