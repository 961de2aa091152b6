"""Draws one HTML page about a dump; it loads nothing from the network."""

import html
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import figure
from matplotlib.axes import Axes

from jaxrl_tis.audit import table
from jaxrl_tis.report.page import CSS
from jaxrl_tis.report.plots import COLORS, STYLE, draw_flips, draw_probabilities, svg


def page(report: dict[str, Any]) -> str:
    """Returns the page; the report is that of `table.text`."""
    title, numbers = html.escape(report["dump"]), html.escape(table.text(report))
    pictures = "".join(
        f'<figure class="card">{picture}<figcaption>{html.escape(note)}</figcaption></figure>'
        for picture, note in _pictures(report))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>
<body><main><h1>{title}</h1>
<p class="lead">Verdict: {html.escape(", ".join(report["doctor"]["verdict"]))}. Its evidence and all
numbers are below the pictures.</p>
<div class="grid">{pictures}</div>
<h2>All numbers</h2><div class="card scroll"><pre style="padding: 0 14px">{numbers}</pre></div>
</main></body></html>
"""


def _pictures(report) -> list[tuple[str, str]]:
    """[(svg, note)]"""
    drawn = [
        (_draw_ratios, "Log of the learner's probability over the sampler's, per token, without the "
                       "outermost thousandths. The width is the gap, the mean adds up over a response."),
        (_draw_probabilities, "Tokens by their two probabilities. On the diagonal they are equal. Beyond the "
                              f"dashed lines, which differ by 0.5: {report['metrics']['mismatch/dp_high']:.3g} "
                              "of the tokens."),
    ]
    for kind, meaning in table.PROFILES.items():
        rows = {name.removeprefix(f"{kind}_"): x for name, x in report["profiles"].items()
                if name.rpartition("_")[0] == kind}
        if len(rows) > 1:
            drawn.append((_profile(kind, rows), f"By {kind}: {meaning}. Bars: share of the tokens."))
    if report["routes"] and report["routes"]["shifts"]:
        drawn.append((_draw_flips, "Share of the tokens whose router chooses other experts in the sampler "
                                   "than in the learner, by layer and by position in the response."))
    drawn += [
        (_draw_trade, "Each correction by its bias and its noise. Lower left is better. Points of "
                      "presets with equal numbers cover each other."),
        (_draw_kept, "Share of the tokens that each preset keeps, and their effective sample size."),
    ]
    pictures = []
    with matplotlib.rc_context(STYLE):
        for draw, note in drawn:
            tall = 6.0 if draw is _draw_kept else 3.5
            picture = figure.Figure(figsize=(6.0, tall))
            draw(picture.add_subplot(), report)
            pictures.append((svg(picture), note))
    return pictures


def _draw_ratios(axes: Axes, report) -> None:
    edges, counts = (np.array(report["histogram"][k]) for k in ("edges", "log_ratio"))
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=COLORS[0])
    axes.set_yscale("symlog", linthresh=1)
    axes.set_title("Log-ratio of learner and sampler")
    axes.set_xlabel("logp_old − logp_behav, nats")
    axes.set_ylabel("tokens")


def _draw_probabilities(axes: Axes, report) -> None:
    draw_probabilities(axes, np.array(report["histogram"]["probabilities"]))


def _profile(kind, rows):
    """Returns a function that draws one profile."""
    def draw(axes: Axes, report) -> None:
        del report
        places = range(len(rows))
        share = axes.twinx()
        share.bar(places, [x["token_fraction"] for x in rows.values()], color="#DDE3E9", width=0.8)
        share.set_ylabel("share of the tokens")
        share.grid(False)
        axes.set_zorder(share.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot(places, [x["log_ratio_abs_mean"] for x in rows.values()], "o-", color=COLORS[0])
        axes.set_xticks(places, rows)
        axes.set_title(f"The gap by {kind}")
        axes.set_xlabel(kind)
        axes.set_ylabel("mean |log-ratio|, nats")
    return draw


def _draw_flips(axes: Axes, report) -> None:
    layers, positions = (list(table.flips_by(report, kind)) for kind in ("layer", "position"))
    grid = [[report["metrics"][f"{table.FLIPS}layer_{layer}_position_{position}"]
             for position in positions] for layer in layers]
    draw_flips(axes, np.array(grid), layers, positions)


def _known(report, kind: str) -> Sequence[dict[str, Any]]:
    return [row for row in report["rules"] if row["kind"] == kind and row["reason"] is None]


def _draw_trade(axes: Axes, report) -> None:
    for kind, color, marker in zip(table.KINDS, COLORS[:3], "osD", strict=True):
        rows = [row for row in _known(report, kind) if row["variance"] > 0]
        axes.scatter([row["variance"] for row in rows], [row["bias_seq"] for row in rows],
                     s=26, color=color, marker=marker, alpha=0.7, label=kind)
    axes.set_xscale("log")
    axes.set_title("Bias against noise")
    axes.set_xlabel("noise: variance of the step, 1 without weights")
    axes.set_ylabel("bias s: missed mass of whole sequences")
    axes.legend()


def _draw_kept(axes: Axes, report) -> None:
    rows = _known(report, "preset")[::-1]
    places = np.arange(len(rows))
    axes.barh(places, [row["tokens_kept"] for row in rows], color="#DDE3E9", label="tokens kept")
    axes.plot([row["ess"] for row in rows], places, "o", color=COLORS[0], markersize=4, label="ESS")
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=7.5)
    axes.set_xlim(0, 1.02)
    axes.set_title("Presets")
    axes.set_xlabel("share")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
