"""Draws docs/concepts.png, the four log-probs of a token and their differences.

    python docs/make_concepts.py
"""

import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE = pathlib.Path(__file__).with_name("concepts.png")
# Name, symbol of the papers, program, weights.
LOG_PROBS = (
    ("logp_behav", "μ", "sampler's program", "weights that sampled"),
    ("logp_old", "π_old", "learner's program", "weights that sampled"),
    ("logp_prox", "π_prox", "learner's program", "weights at the start\nof the update"),
    ("logp", "π", "learner's program", "weights during\nthe update"),
)
GAPS = ("engine", "staleness", "trust region")
WEIGHT, RATIO = "#0072B2", "#D55E00"
# Centre -> bars: first and last log-prob, colour, text.
CENTRES = {
    "old\n(default)": (
        (0, 1, WEIGHT, "weight, masks"), (1, 3, RATIO, "clipped ratio  logp − logp_old"),
    ),
    "prox": (
        (0, 1, WEIGHT, "weight, masks"), (1, 2, WEIGHT, "staleness_weight"),
        (2, 3, RATIO, "clipped ratio"),
    ),
    "prox, folded\n(preset async)": (
        (0, 2, WEIGHT, "weight  logp_prox − logp_behav"), (2, 3, RATIO, "clipped ratio"),
    ),
    "behav\n(bypass)": ((0, 3, RATIO, "ratio, or weight; masks  logp − logp_behav"),),
}


def draw() -> Figure:
    """Returns the picture: an axis with the four log-probs, and a row of bars for each centre."""
    figure = Figure(figsize=(10, 4.6), dpi=90)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.75, 3.5)
    axes.set_ylim(-4.4, 1.75)
    axes.set_axis_off()
    _log_probs(axes)
    for row, (centre, bars) in enumerate(CENTRES.items()):
        y = -1.3 - 0.9 * row
        axes.text(-0.7, y, centre, va="center", fontsize=10, weight="bold")
        for first, last, colour, text in bars:
            axes.barh(y, last - first - 0.02, left=first + 0.01, height=0.5, color=colour)
            middle = (first + last) / 2
            axes.text(middle, y, text, ha="center", va="center", color="white", fontsize=9)
    return figure


def _log_probs(axes: Axes) -> None:
    """Draws the four log-probs on an axis of time, and the name of each difference."""
    axes.text(-0.7, 0, "policy\nover time", va="center", fontsize=10, weight="bold")
    axes.annotate("", (3.45, 0), (-0.3, 0), arrowprops={"arrowstyle": "->", "color": "0.4"})
    for x, (name, symbol, program, weights) in enumerate(LOG_PROBS):
        axes.plot(x, 0, "o", color="black")
        axes.text(x, 1.4, name, ha="center", fontsize=12, family="monospace", weight="bold")
        axes.text(x, 1.1, symbol, ha="center", fontsize=10, color="0.4")
        axes.text(x, 0.25, f"{program}\n{weights}", ha="center", va="bottom", fontsize=9)
        axes.plot((x, x), (-4.3, 0), color="0.85", linewidth=1, zorder=0)
    for x, gap in enumerate(GAPS):
        axes.text(x + 0.5, -0.2, gap, ha="center", va="top", fontsize=10, style="italic")


if __name__ == "__main__":
    draw().savefig(PICTURE, metadata={"Software": None})
