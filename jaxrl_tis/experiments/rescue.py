"""Collapse and rescue by each correction: Figures 2, 4, 5 and 6 of Yao et al. (2025).

    python -m jaxrl_tis.experiments.rescue [FOLDER]

Reads what `configs/fig_rescue.py` left in docs/experiments/rescue.jsonl; `critic.py` beside it draws the
same of `configs/fig_critic.py`.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxrl_tis import intervals
from jaxrl_tis.experiments import figures, records
from jaxrl_tis.experiments.records import Run
from jaxrl_tis.report.plots import COLORS

SHOWN = ("no-gap", "none", "PPO-IS", "vanilla-IS", "TIS-2", "centering")
STORY = {
    "no-gap": "no gap", "none": "gap, uncorrected", "PPO-IS": "gap inside PPO's ratio",
    "TIS-2": "gap, truncated weights (TIS)",
}
PANELS = (
    ("eval/sampled_accuracy", "Learner, held-out accuracy", "fraction correct, sampled"),
    ("reward/mean", "Sampler, training reward", "fraction correct"),
    ("training/rollout_probs_diff_max", "Largest probability difference", "|p_sampler − p_learner|"),
    ("actor/entropy", "Entropy of the learner", "nats per token"),
    ("actor/ppo_kl", "k1 of the update, over the sampler's tokens", "nats per token"),
    ("response_length/mean", "Response length", "tokens"),
)


def negative_share(run: Run) -> float:
    """Returns the share of blocks whose k1 estimate of a KL divergence is below 0."""
    return float(np.mean(run.series["actor/ppo_kl"] < 0))


def verdict(gain: tuple[float, float, float], beside: tuple[float, float, float] | None) -> str:
    """Says what the protocol calls an arm, from its gain and its difference to the uncorrected one."""
    _, low, high = gain
    words = ["collapses"] if high < 0 else ["improves"] if low > 0 else ["neither"]
    if beside is not None and beside[1] > 0:
        words.append("better than none")
    if beside is not None and beside[2] < 0:
        words.append("worse than none")
    return ", ".join(words)


def table(runs: Sequence[Run]) -> str:
    """The arms: what the learner gained, what the sampler earned, and the signs of Figure 5."""
    by_arm, gained = records.by_arm(runs), figures.gains(runs)
    lines = []
    for arm, own in by_arm.items():
        gain = intervals.of_mean(list(gained[arm].values()))
        other = None if arm == "none" else figures.beside(gained[arm], gained["none"])
        end = lambda name: records.cell([records.at_end(r, name) for r in own])
        lines.append([
            arm, str(len(own)), figures.interval(gain), figures.interval(other) if other else "–",
            end("reward/mean"), end("training/rollout_probs_diff_max"), end("actor/entropy"),
            f"{np.mean([negative_share(r) for r in own]):.2f}", end("response_length/mean"),
            verdict(gain, other),
        ])
    header = [
        "arm", "seeds", "gain in sampled accuracy", "less that of none", "sampler's reward at the end",
        "largest dp", "entropy", "share of k1 below 0", "length", "verdict",
    ]
    return figures.rows(header, lines)


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Six panels of some arms; the int8 sampler's own gap in grey beside the injected one."""
    by_arm = records.by_arm(runs)
    for axes, (name, title, unit) in zip(page.subplots(2, 3).flat, PANELS):
        for arm, color in zip(SHOWN, COLORS):
            if arm in by_arm:
                figures.curve(axes, by_arm[arm], name, arm, color)
        if "int8" in by_arm:
            figures.curve(axes, by_arm["int8"], name, "int8, no injected gap", figures.GREY, linestyle="--")
        axes.set(title=title, xlabel="step", ylabel=unit)
    page.axes[4].axhline(0, color="black", linewidth=0.7)
    page.axes[4].set_yscale("symlog", linthresh=1e-3)
    page.axes[0].legend(fontsize=8)


def draw_story(page: Figure, runs: Sequence[Run]) -> None:
    """Two panels: what the training log shows, and what the learner can do."""
    by_arm = records.by_arm(runs)
    shown, hidden = page.subplots(1, 2)
    for (arm, label), color in zip(STORY.items(), COLORS):
        figures.curve(shown, by_arm[arm], "reward/mean", label, color)
        figures.curve(hidden, by_arm[arm], "eval/sampled_accuracy", label, color)
    shown.set(title="What the log shows: the sampler's reward", xlabel="step", ylabel="fraction correct")
    hidden.set(title="What was learned: held-out accuracy", xlabel="step", ylabel="fraction correct")
    shown.legend(fontsize=8.5)


if __name__ == "__main__":
    figures.run("rescue", table, {"rescue": (draw, (14, 7)), "collapse": (draw_story, (10, 3.6))})
