"""Tests whether the causes of a gap add up: four causes in all combinations, on the same tokens.

The float32 sampler of `configs/fig_base.py` generates answers after the warm-up. Programs with bfloat16, W8A8,
an int8 cache, noise on the weights, and all combinations of these four compute log-probs of the same answers.
If the log-ratios of the causes are independent, their mean squares add up.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from jaxrl_tis import cli_flags
from jaxrl_tis.build import build
from jaxrl_tis.engine import injection
from experiments import parts
from jaxrl_tis.gate import ladder, report
from jaxrl_tis.models import quant
from jaxrl_tis.report.plots import COLORS

CONFIG = "configs/fig_base.py"
SEEDS = (0, 1, 2, 3, 4)
NOISE = injection.weights(scale=0.02)
CAUSES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "norm_dtype": "bfloat16"},
    "W8A8": {"quantization": quant.Recipe("w8a8", ())},
    "int8 cache": {"kv_dtype": "int8"},
    "noise": {},
}
COMBINATIONS = [
    chosen for count in range(1, len(CAUSES) + 1) for chosen in itertools.combinations(CAUSES, count)
]
Gaps = Mapping[tuple[str, ...], Mapping[str, float]]  # combination -> measure -> value


def gaps(seed: int) -> Gaps:
    """Returns the gap of every combination on one batch: mean squared log-ratio, mean |log ratio| and k3."""
    config = cli_flags.parsed([f"--config={CONFIG}", f"--config.seed={seed}"])
    setup = build(config)
    training = setup.training
    params = parts.taught(setup)
    rows = training.rows(report.sample(setup, params, config.rollout.prompts))
    micro, flat = training.micro_batches(rows)
    plain = ladder.learner_settings(setup)
    before = flat(ladder.score(setup, plain, params, micro))
    measures = {}
    for chosen in COMBINATIONS:
        settings = dataclasses.replace(
            plain, **{field: value for cause in chosen for field, value in CAUSES[cause].items()}
        )
        weights = NOISE.weights(params) if "noise" in chosen else params
        after = flat(ladder.score(setup, settings, weights, micro))
        measured = ladder.gap(after, before, rows["mask"])
        square = float(np.mean((before - after)[rows["mask"]].astype(np.float64) ** 2))
        measures[chosen] = {"d2": square, "d_mean": measured["d_mean"], "k3": measured["k3"]}
    return measures


def additivity(found: Gaps, chosen: Sequence[str], measure: str) -> float:
    """Returns the gap of a combination divided by the sum of the gaps of its causes."""
    return found[tuple(chosen)][measure] / sum(found[(cause,)][measure] for cause in chosen)


def table(of_seeds: Sequence[Gaps]) -> str:
    """Returns a Markdown table: each combination, and its ratio to the sum of its causes in three measures."""
    lines = []
    for chosen in COMBINATIONS:
        ratios = [
            "–" if len(chosen) == 1 else parts.mean([additivity(f, chosen, m) for f in of_seeds], ".2f")
            for m in ("d2", "k3", "d_mean")
        ]
        lines.append([" + ".join(chosen), parts.mean([f[chosen]["d2"] for f in of_seeds], ".3g"), *ratios])
    header = [
        "causes", "mean squared log-ratio, nats²", "ratio to sum, squares", "ratio to sum, k3",
        "ratio to sum, mean |log ratio|",
    ]
    return parts.rows(header, lines)


def draw(axes: Axes, of_seeds: Sequence[Gaps]) -> None:
    """Plots the gap of each combination against the sum of its causes."""
    for measure, label, color in (
        ("d2", "mean squared log-ratio", COLORS[0]), ("k3", "k3", COLORS[1]),
        ("d_mean", "mean |log ratio|", COLORS[2]),
    ):
        points = [
            (sum(f[(cause,)][measure] for cause in chosen), f[chosen][measure])
            for f in of_seeds for chosen in COMBINATIONS if len(chosen) > 1
        ]
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=14, color=color, label=label)
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="black", linewidth=0.7)
    axes.set(
        title="Do causes add up?", xlabel="sum of the causes", ylabel="together", xscale="log",
        yscale="log",
    )
    axes.legend()


FIGURE = parts.Figure(
    (table,), {"budget": parts.Picture((6, 5), [draw])},
    read=lambda _: [gaps(seed) for seed in SEEDS],
)
