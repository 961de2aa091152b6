"""Tests whether the doctor finds a known cause of a gap: draws its confusion table.

Reads docs/experiments/causes.jsonl, the runs of `configs/fig_causes.py`. A run counts for the first cause that
the doctor names. It is right if the doctor names the true cause and no other.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from experiments import parts
from experiments.parts import Arms
from experiments.records import Run
from jaxrl_tis.record import intervals

# The finding that names a cause -> the arm of the config that has it.
CAUSES = {
    "A.injected": "injected", "A.filter": "filter", "A.noise": "noise", "A.quantized": "quantised",
    "A.dtype": "dtype", "A.parallel": "parallel", "A.kernels": "kernels", "A.routing": "routing",
    "A.record": "record",
    "B.lag": "stale", "B.reuse": "reuse",
}
NONE = ("healthy", "watch")
TOO_SMALL = ("float8",)  # arms of which the right answer is that there is none
SEEN = (0, 1)  # seeds on which the sizes of the causes were chosen


def found(run: Run) -> list[str]:
    """Returns the causes that the doctor names, in its order. Without a cause: ["none"] for a healthy run,
    else ["unclear"]."""
    named = [CAUSES[finding] for finding in run.findings if finding in CAUSES]
    return named or ["none" if set(run.verdict) <= set(NONE) else "unclear"]


def is_right(run: Run) -> bool:
    return found(run) == ["none" if run.arm in TOO_SMALL else run.arm]


def unseen(arms: Arms) -> list[Run]:
    """Returns the runs of held-out seeds."""
    return [run for run in parts.every(arms) if run.seed not in SEEN]


def confusion(runs: Sequence[Run]) -> tuple[list[str], list[str], np.ndarray]:
    """Returns the arms, the causes named first, and the number of runs of each pair [arms, causes]."""
    arms = list(dict.fromkeys(r.arm for r in runs))
    others = dict.fromkeys(found(r)[0] for r in runs)
    named = [*arms, *(name for name in others if name not in arms)]
    counts = np.zeros((len(arms), len(named)), int)
    for run in runs:
        counts[arms.index(run.arm), named.index(found(run)[0])] += 1
    return arms, named, counts


def table(arms: Arms) -> str:
    """Returns the confusion table of held-out seeds in Markdown, and the share of right runs (Wilson)."""
    held_out = unseen(arms)
    names, named, counts = confusion(held_out)
    cells = [
        [arm, *(str(n) if n else "" for n in row), str(sum(is_right(r) for r in held_out if r.arm == arm))]
        for arm, row in zip(names, counts, strict=True)
    ]
    right = np.mean([is_right(r) for r in held_out])
    low, high = intervals.wilson(right, len(held_out))
    return "\n\n".join([
        parts.rows(["cause", *(f"named: {name}" for name in named), "right"], cells),
        f"Right: {right:.3f} [{low:.3f}, {high:.3f}] of {len(held_out)} runs of held-out seeds.",
    ])


def draw(axes: Axes, arms: Arms) -> None:
    """Draws the confusion table."""
    names, named, counts = confusion(unseen(arms))
    axes.imshow(counts, cmap="Blues")
    for (i, j), n in np.ndenumerate(counts):
        if n:
            color = "white" if n > counts.max() / 2 else "black"
            axes.text(j, i, str(n), ha="center", va="center", color=color)
    axes.set_xticks(range(len(named)), named, rotation=30)
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    axes.set(title="What the doctor names", xlabel="named", ylabel="cause")


FIGURE = parts.Figure(
    (table,), {"causes": parts.Picture((6, 4.5), [draw])}, seeds="0,1,2,3,4,5,6,7,8,9",
)
