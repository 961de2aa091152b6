"""Draws the plots of a report. To show another metric, add a line to PLOTS; record/names.py has its
unit and caption."""

import dataclasses
import io
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colors, figure, lines, ticker
from matplotlib.axes import Axes

from jaxrl_tis.record import intervals, metrics, names, probabilities
from jaxrl_tis.record.failures import Failure

# Okabe and Ito's palette, told apart with any colour vision; black and yellow left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INTERVALS = ("eval/greedy_accuracy", "eval/sampled_accuracy")  # fractions of eval/n problems
MOST_NAMED = 24  # runs; more leave a plot no room, and stand in the report's table alone
LINE_STYLES = ("-", "--", ":", "-.")
STEP_PHASES = ("sync", "data", "rollout", "reward", "score", "update", "distill")  # parts of time/step_s
# Beside it, or, compilation, in it or not; lost: steps that were taken again after a fault.
OTHER_PHASES = ("eval", "checkpoint", "compile", "init", "restore", "warm-up", "lost")
GOOD_PHASES = ("rollout", "reward", "score", "update")
PHASE_COLORS = {
    "sync": "#0072B2", "data": "#999933", "rollout": "#D55E00", "reward": "#009E73",
    "score": "#CC79A7", "update": "#56B4E9", "rest of the step": "#B0B7BF", "eval": "#E69F00",
    "checkpoint": "#332288", "compile": "#661100", "init": "#DDCC77", "restore": "#44AA99",
    "warm-up": "#88CCEE", "lost": "#000000",
}
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#888888", "axes.labelcolor": "#333333", "xtick.color": "#555555",
    "ytick.color": "#555555", "axes.grid": True, "axes.axisbelow": True, "grid.color": "#E4E7EB",
    "legend.fontsize": 9.5, "legend.edgecolor": "white", "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5), "svg.fonttype": "none", "svg.hashsalt": "jaxrl_tis",
    "figure.constrained_layout.use": True,
}


def palette(count: int) -> Sequence[Any]:
    """Returns `count` different colors of matplotlib: those of COLORS as long as they suffice."""
    if count <= len(COLORS):
        return COLORS[:count]
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, count)))


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of one run."""

    label: str
    color: Any  # of matplotlib
    records: list[dict[str, Any]]
    config: dict[str, Any]  # config.json, {} when there is none
    samples: Sequence[dict[str, Any]] = ()  # samples.jsonl
    failures: Sequence[Failure] = ()  # reward_errors.jsonl
    planes: Sequence[dict[str, Any]] = ()  # probabilities.jsonl

    def curve(self, phase: str, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps [n], values [n]) of a metric, without the steps where its part of the tokens
        is empty."""
        share = key.rpartition("/")[0] + "/token_fraction"
        points = [(record["step"], record[key]) for record in self.records
                  if record["phase"] == phase and key in record and record.get(share) != 0]
        steps, values = np.array(points, float).reshape(-1, 2).T
        return steps, values


@dataclasses.dataclass(frozen=True)
class Plot:
    """One plot. `series` maps a metric of `phase` to its name in the legend."""

    section: str
    title: str
    series: dict[str, str]
    phase: str = "train"
    log: bool = False
    in_overview: bool = False

    @property
    def unit(self) -> str:
        return _named(next(iter(self.series))).unit

    @property
    def caption(self) -> str:
        """The meanings of the metrics, each with its name in the legend where they differ."""
        meanings = {_named(metric).meaning: label for metric, label in self.series.items()}
        texts = [f"{label}: {text}" if len(meanings) > 1 else text for text, label in meanings.items()]
        has_interval = not set(INTERVALS).isdisjoint(self.series)
        return " ".join([*texts, "Band: 95 % Wilson interval."] if has_interval else texts)


FLIP_RATE = "mismatch/route_flip_layer_<n>_position_<n>"
MOST_GRIDS = 4  # runs with pictures of their flips and of their probabilities
MOST_PLANES = 10  # recorded steps whose tokens are one picture
TV, LEAST = "mismatch/tv_token", 1e-9  # LEAST stands for 0 on logarithmic axes
QUADRANTS = {"rollout_corr/chi2_token": "-", "rollout_corr/chi2_seq": "--"}
QUADRANT_NOTE = (
    "A line goes from the first step to the last, at the dot. χ² per token (lines) and per sequence (dashes), each "
    "with its bound. Lower left: no correction is needed. Lower right: token weights or a geometric mask. "
    "Upper left: truncate or mask sequences. Upper right: reduce the gap itself."
)
LEARNING, GAP, WEIGHTS = "Learning", "Sampler against learner", "Importance weights"
OPTIMISATION, TIME = "Optimisation", "Time"
# Least entropy of a bucket, nats.
ENTROPIES = {"0": "below 0.1 nats", "0.1": "to 0.5", "0.5": "to 2", "2": "from 2 on"}
# First distance of a bucket from the tool's last token.
AFTER_TOOL = {"1": "1 token", "2": "2 to 3", "4": "4 to 7", "none": "before tools"}
PLOTS = (
    Plot(LEARNING, "Reward", {"reward/mean": "sampler", "reward/learner_snis": "learner (SNIS)"},
         in_overview=True),
    Plot(LEARNING, "Effective sample size of the SNIS estimate", {"reward/learner_snis_ess": "ESS"}),
    Plot(LEARNING, "Held-out accuracy, greedy",
         {"eval/greedy_accuracy": "greedy", "eval/constant_accuracy": "best constant answer"}, "eval",
         in_overview=True),
    Plot(LEARNING, "Held-out accuracy, sampled",
         {"eval/sampled_accuracy": "sampled", "eval/constant_accuracy": "best constant answer"}, "eval"),
    Plot(LEARNING, "Held-out reward",
         {"eval/greedy_reward": "greedy", "eval/sampled_reward": "sampled"}, "eval"),
    Plot(LEARNING, "Response length",
         {"response_length/mean": "mean", "response_length/max": "longest"}),
    Plot(LEARNING, "Truncated responses", {"response_length/truncated_ratio": "truncated"}),
    Plot(LEARNING, "Warm-up loss", {"warmup/loss": "loss"}, "warmup"),

    Plot(GAP, "Probability difference",
         {"training/rollout_probs_diff_max": "largest", "training/rollout_probs_diff_mean": "mean"},
         log=True, in_overview=True),
    Plot(GAP, "Correlation of the probabilities", {"training/rollout_actor_probs_pearson_corr": "r"}),
    Plot(GAP, "KL divergence, KL(sampler ‖ learner)",
         {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}, in_overview=True),
    Plot(GAP, "χ² divergence",
         {"rollout_corr/chi2_token": "per token", "rollout_corr/chi2_seq": "per sequence"}, log=True),
    Plot(GAP, "Perplexity ratio, learner / sampler", {"rollout_corr/ppl_ratio": "ratio"}),
    Plot(GAP, "Flips of routes",
         {"mismatch/route_flip_token": "tokens", "mismatch/route_flip_router": "routers"}),
    Plot(GAP, "Gap of tokens with and without a flip",
         {"mismatch/route_flip_flipped/log_ratio_abs_mean": "flipped",
          "mismatch/route_flip_unflipped/log_ratio_abs_mean": "unflipped"}, log=True),
    Plot(GAP, "Gap by entropy",
         {f"mismatch/entropy_{n}/log_ratio_abs_mean": label for n, label in ENTROPIES.items()}, log=True),
    Plot(GAP, "Gap by turn",
         {f"mismatch/turn_{n}/log_ratio_abs_mean": f"turn {n}" for n in range(4)}, log=True),
    Plot(GAP, "Gap after a tool's answer",
         {f"mismatch/after_tool_{n}/log_ratio_abs_mean": label for n, label in AFTER_TOOL.items()},
         log=True),

    Plot(WEIGHTS, "Mean importance weight", {"rollout_corr/rollout_is_mean": "mean"}),
    Plot(WEIGHTS, "Largest importance weight", {"rollout_corr/rollout_is_max": "max"}, log=True),
    Plot(WEIGHTS, "Effective sample size", {"rollout_corr/rollout_is_eff_sample_size": "ESS"},
         in_overview=True),
    Plot(WEIGHTS, "Truncated weights", {"rollout_corr/rollout_is_ratio_fraction_high": "above the cap"}),

    Plot(OPTIMISATION, "Entropy", {"actor/entropy": "entropy"}, in_overview=True),
    Plot(OPTIMISATION, "Gradient norm", {"actor/grad_norm": "norm"}, log=True),
    Plot(OPTIMISATION, "Policy loss", {"actor/pg_loss": "loss"}),
    Plot(OPTIMISATION, "Clipped tokens", {"actor/pg_clipfrac": "clipped"}),
    Plot(OPTIMISATION, "KL to the old policy", {"actor/ppo_kl": "KL"}),

    Plot(TIME, "Time per step", {"time/step_s": "step"}, log=True),
    Plot(TIME, "Sampling speed", {"time/rollout_tokens_per_s": "tokens/s"}),
)


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the centred moving average over 1/25 of the run; NaN entries are left out."""
    window = len(values) // 25 | 1  # odd
    if window == 1:
        return values
    present = np.isfinite(values)
    total = np.convolve(np.where(present, values, 0.0), np.ones(window), "same")
    count = np.convolve(present, np.ones(window), "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def is_present(plot: Plot, runs: Sequence[Run]) -> bool:
    """Whether any run has any metric of the plot."""
    return any(run.curve(plot.phase, key)[0].size for run in runs for key in plot.series)


def draw(axes: Axes, plot: Plot, runs: Sequence[Run]) -> None:
    """Draws the curves of `plot`: a colour per run, a dash per metric."""
    values_seen = []
    for run in runs:
        for (key, _), style in zip(plot.series.items(), LINE_STYLES, strict=False):
            steps, values = run.curve(plot.phase, key)
            if steps.size == 0:
                continue
            values_seen.append(values[np.isfinite(values)])
            average = smooth(values) if plot.phase == "train" else values
            if average is not values:
                axes.plot(steps, values, color=run.color, alpha=0.2, linewidth=0.8)
            marker = "o" if key in INTERVALS or steps.size == 1 else None
            axes.plot(steps, average, style, color=run.color, linewidth=1.8, marker=marker,
                      markersize=3.5)
            if key in INTERVALS:
                _draw_interval(axes, run, key)
    if plot.log:
        _set_log_scale(axes, np.concatenate(values_seen))
    axes.set_title(plot.title)
    axes.set_xlabel("warm-up step" if plot.phase == "warmup" else "training step")
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))


def _draw_interval(axes: Axes, run: Run, key: str) -> None:
    """Shades the Wilson interval of an accuracy at the steps whose record counts its problems."""
    of_eval = [record for record in run.records if record["phase"] == "eval" and key in record]
    points = [(record["step"], record[key], count) for record in of_eval
              if (count := metrics.num_answers(record, key)) is not None]
    if points:
        steps, values, counts = np.array(points, float).T
        axes.fill_between(steps, *intervals.wilson(values, counts), color=run.color, alpha=0.13, linewidth=0)


def _set_log_scale(axes: Axes, values: np.ndarray) -> None:
    """Logarithmic axis; linear below the smallest magnitude when zeros or negatives must show."""
    magnitudes = np.abs(values[values != 0])
    if magnitudes.size and (values <= 0).any():
        axes.set_yscale("symlog", linthresh=magnitudes.min())
    elif magnitudes.size:
        axes.set_yscale("log")
        if magnitudes.max() < 100 * magnitudes.min():  # few powers of ten: 0.5, not 5 x 10^-1
            axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")


def legend_entries(plot: Plot, runs: Sequence[Run]) -> list[lines.Line2D]:
    """Returns legend lines: the runs when there are several, at most MOST_NAMED, the metrics when there are
    several."""
    runs = [run for run in runs if is_present(plot, [run])]
    styled = zip(plot.series.items(), LINE_STYLES, strict=False)
    labels = {label: style for (key, label), style in styled
              if any(run.curve(plot.phase, key)[0].size for run in runs)}
    entries = []
    if 1 < len(runs) <= MOST_NAMED:
        entries += [_entry(run.label, run.color, "-") for run in runs]
    if len(labels) > 1:
        color = "#444444" if len(runs) > 1 else runs[0].color
        entries += [_entry(label, color, style) for label, style in labels.items()]
    return entries


def _named(metric: str) -> names.Metric:
    found = names.find(metric)
    assert found is not None, metric
    return found


def _entry(label: str, color: Any, style: Any) -> lines.Line2D:
    return lines.Line2D([], [], color=color, linestyle=style, linewidth=1.8, label=_literal(label))


def _literal(text: str) -> str:
    """Returns text that matplotlib shows literally: no formula, no hidden label."""
    escaped = text.replace("$", r"\$")
    return "\u200b" + escaped if escaped.startswith("_") else escaped


def phase_seconds(run: Run) -> dict[str, float]:
    """Returns the seconds that every phase took in the whole run."""
    def total(name):
        return sum(record[f"time/{name}_s"] for record in run.records
                   if record["phase"] != "warmup" and f"time/{name}_s" in record)

    seconds = {phase: total(phase) for phase in (*STEP_PHASES, *OTHER_PHASES)}
    rest = total("step") - sum(seconds[phase] for phase in (*STEP_PHASES, "compile"))
    return {**seconds, "rest of the step": max(rest, 0.0)}


def goodput(run: Run) -> float | None:
    """Returns the share of the time in sampling, rewards, scores and updates that count; None without
    times."""
    seconds = phase_seconds(run)
    total = sum(seconds.values())
    return sum(seconds[phase] for phase in GOOD_PHASES) / total if total else None


def draw_phases(axes: Axes, runs: Sequence[Run]) -> None:
    """Draws one stacked bar per run: its time by phase."""
    left = np.zeros(len(runs))
    for phase, color in PHASE_COLORS.items():
        minutes = np.array([phase_seconds(run)[phase] for run in runs]) / 60
        if minutes.any():
            axes.barh(range(len(runs)), minutes, left=left, color=color, height=0.6, label=phase,
                      edgecolor="white", linewidth=0.6)
        left += minutes
    axes.set_yticks(range(len(runs)), [_literal(run.label) for run in runs])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title("Where the time went")
    axes.set_xlabel("minutes")


def flip_rates(run: Run) -> tuple[np.ndarray, list[int], list[int]] | None:
    """Returns (flip rates [layers, positions], mean of the steps that record them; the layers; the first
    position of each bucket); None without any. Last buckets without a flip are left out: responses
    may not be as long."""
    values, pattern = {}, re.compile(names.regex(FLIP_RATE))
    for record in run.records:
        for name, x in record.items():
            found = pattern.fullmatch(name)
            if found and record.get(f"mismatch/position_{found[2]}/token_fraction") != 0:
                values.setdefault((int(found[1]), int(found[2])), []).append(x)
    if not values:
        return None
    layers, positions = (sorted(set(place)) for place in zip(*values, strict=True))
    rates = np.array([[np.mean(values.get((layer, at), 0.0)) for at in positions] for layer in layers])
    end = np.flatnonzero(rates.any(axis=0)).max(initial=0) + 1
    return rates[:, :end], layers, positions[:end]


def draw_flips(
    axes: Axes, rates: np.ndarray, layers: Sequence, positions: Sequence
) -> None:
    """Draws flip rates [layers, positions] as a picture; `positions` are the first of each bucket."""
    shown = axes.pcolormesh(rates, cmap="viridis", vmin=0.0, vmax=max(float(rates.max()), 1e-6))
    axes.figure.colorbar(shown, ax=axes, label=_named(FLIP_RATE).unit + " of the tokens")
    axes.set_xticks(np.arange(len(positions)) + 0.5, list(map(str, positions)))
    every = max(1, len(layers) // 12)
    axes.set_yticks(np.arange(0, len(layers), every) + 0.5, list(map(str, layers[::every])))
    axes.grid(False)
    axes.set_title("Flips by layer and position")
    axes.set_xlabel("from this position of the response on")
    axes.set_ylabel("MoE layer")


def draw_probabilities(axes: Axes, grid: np.ndarray) -> None:
    """Draws the numbers of tokens [n, n] by their probability in the sampler and in the learner."""
    edges = np.linspace(0, 1, len(grid) + 1)
    shown = axes.pcolormesh(
        edges, edges, np.ma.masked_equal(grid.T, 0), norm=colors.LogNorm(), cmap="viridis"
    )
    axes.figure.colorbar(shown, ax=axes, label="tokens")
    axes.plot((0, 1), (0, 1), color=COLORS[1], linewidth=0.8)
    low, high = (0, 1 - probabilities.HIGH), (probabilities.HIGH, 1)
    for x, y in ((low, high), (high, low)):
        axes.plot(x, y, "--", color=COLORS[1], linewidth=0.8)
    axes.set_title("Probability of the sampled tokens")
    axes.set_xlabel("sampler")
    axes.set_ylabel("learner")


def draw_quadrants(axes: Axes, runs: Sequence[Run]) -> None:
    """Draws total variation and χ² of each run, from its first step (pale) to its last (a dot)."""
    for run in runs:
        for key, style in QUADRANTS.items():
            points = [(r[TV], r[key]) for r in run.records if r["phase"] == "train" and {TV, key} <= r.keys()]
            x, y = (smooth(np.maximum(values, LEAST)) for values in np.array(points, float).reshape(-1, 2).T)
            axes.plot(x, y, style, color=run.color, alpha=0.4, linewidth=1.0)
            axes.plot(x[-1:], y[-1:], "o", color=run.color, markersize=5)
    axes.axvline(names.TV_LOW, color="#888888", linewidth=0.8)
    for key, style in QUADRANTS.items():
        axes.axhline(names.CHI2_HIGH[key], linestyle=style, color="#888888", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="total variation per token", ylabel="χ²")
    axes.set_title("Bias and variance of corrections")


def svg(picture: figure.Figure) -> str:
    """Returns a figure as an <svg> element to put into a page."""
    buffer = io.StringIO()
    picture.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    # Ids of groups repeat from one figure to the next and nothing refers to them.
    return re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg"):])


def figures(runs: Sequence[Run]) -> dict[str, list[tuple[str, str]]]:
    """Returns {section: [(svg, note)]} of every plot that a run has a metric for."""
    sections = {}
    with matplotlib.rc_context(STYLE):
        for plot in PLOTS:
            if is_present(plot, runs):
                picture = figure.Figure(figsize=(6.0, 3.5))
                draw(picture.add_subplot(), plot, runs)
                entries = legend_entries(plot, runs)
                if entries:
                    picture.legend(handles=entries, loc="outside lower center", ncols=4)
                sections.setdefault(plot.section, []).append((svg(picture), plot.caption))
        found = [(run, rates) for run in runs if (rates := flip_rates(run))]
        for run, rates in found[:MOST_GRIDS]:
            picture = figure.Figure(figsize=(6.0, 3.5))
            draw_flips(picture.add_subplot(), *rates)
            note = f"{run.label}: share of the tokens whose router chooses other experts in the sampler."
            sections.setdefault(GAP, []).append((svg(picture), note))
        recent = ((run, run.planes[-MOST_PLANES:]) for run in runs)
        drawn = [(run, seen) for run, seen in recent if any(line["tokens"] for line in seen)]
        for run, lines_seen in drawn[:MOST_GRIDS]:
            tokens, high = (sum(line[name] for line in lines_seen) for name in ("tokens", "high"))
            picture = figure.Figure(figsize=(6.0, 3.5))
            draw_probabilities(picture.add_subplot(), probabilities.plane(lines_seen))
            note = (
                f"{run.label}: {tokens} tokens of {len(lines_seen)} steps up to {lines_seen[-1]['step']}. On the "
                f"diagonal both are equal. {high} tokens ({100 * high / tokens:.3g} %) are beyond the "
                f"dashed lines: their probabilities differ by more than {probabilities.HIGH}."
            )
            sections.setdefault(GAP, []).append((svg(picture), note))
        if measured := [run for run in runs if run.curve("train", TV)[0].size]:
            picture = figure.Figure(figsize=(6.0, 3.5))
            draw_quadrants(picture.add_subplot(), measured)
            if 1 < len(measured) <= MOST_NAMED:
                entries = [_entry(run.label, run.color, "-") for run in measured]
                picture.legend(handles=entries, loc="outside lower center", ncols=4)
            sections.setdefault(GAP, []).append((svg(picture), QUADRANT_NOTE))
        timed = [run for run in runs if sum(phase_seconds(run).values()) > 0]
        if timed:
            picture = figure.Figure(figsize=(6.0, 1.7 + 0.4 * len(timed)))
            axes = picture.add_subplot()
            draw_phases(axes, timed)
            picture.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
            sections.setdefault(TIME, []).append(
                (svg(picture), "lost: steps repeated after a fault."))
    return sections


def write_png(runs: Sequence[Run], out_png: str | os.PathLike) -> pathlib.Path:
    """Writes a picture of up to 2x3 overview plots of the runs; returns its path.

    Raises:
      ValueError: the runs have none of the metrics.
    """
    plots = [plot for plot in PLOTS if plot.in_overview and is_present(plot, runs)][:6]
    if not plots:
        raise ValueError(
            f"nothing to draw: {[run.label for run in runs]} have no metric of PLOTS; give the "
            "folders of runs with at least one step"
        )
    with matplotlib.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10.5,
                                "figure.constrained_layout.h_pad": 0.1,
                                "figure.constrained_layout.w_pad": 0.08}):
        columns = min(len(plots), 3)
        rows = math.ceil(len(plots) / columns)
        picture = figure.Figure(figsize=(4.2 * columns, 2.9 * rows + 0.4))
        for number, plot in enumerate(plots, start=1):
            axes = picture.add_subplot(rows, columns, number)
            draw(axes, plot, runs)
            entries = [entry for entry in legend_entries(plot, runs)
                       if entry.get_label() not in {_literal(run.label) for run in runs}]
            if entries:
                axes.legend(handles=entries)
        if len(runs) <= MOST_NAMED:
            picture.legend(handles=[_entry(run.label, run.color, "-") for run in runs],
                           loc="outside lower center", ncols=4)
        picture.savefig(out_png, format="png", dpi=110)
    return pathlib.Path(out_png)
