"""Draws the referee's table of published methods and writes its tables, by the rules of docs/referee.md.

Reads docs/experiments/referee_objectives/, the runs of `experiments.referee_runs --objectives`.
"""

import pathlib
from collections.abc import Mapping

import numpy as np

from configs import fig_referee_objectives as config
from experiments import records, referee, referee_runs
from experiments.parts import GREY, Figure, Interval, Panel, Picture, interval, mean, rows
from experiments.records import Run
from experiments.referee import Arms

MOVE = 0.01  # of the reward; below it in all evaluations a policy has not moved
CLIPPED, GRADIENT = "actor/pg_clipfrac", "actor/grad_norm"
ORDER = (*config.BASES, *config.METHODS)
AGE = "needs age"


def largest_move(run: Run) -> float:
    """Returns the largest difference of an evaluation to that before the first step."""
    values = run.series[referee_runs.REWARD]
    return float(np.abs(values - values[0]).max())


def differences(arms: Arms) -> dict[str, tuple[Interval, Interval]]:
    """Returns arm -> the difference to none over the seeds that it has: with the interval that holds
    together with those of all arms of the part, and with that of one comparison."""
    gains, count = referee.gains_of(arms), len(arms) - 1
    found = {n: referee.paired(g, gains[config.NONE]) for n, g in gains.items() if n != config.NONE}
    return {n: (referee.simultaneous(x, count), referee.simultaneous(x, 1)) for n, x in found.items() if len(x)}


def side(one: Interval) -> str:
    """Returns the side of 0 that an interval is on, "" where it holds 0."""
    return "better" if one[1] > 0 else "worse" if one[2] < 0 else ""


def words(name: str, arms: Arms, found: Mapping[str, tuple[Interval, Interval]]) -> list[str]:
    """Returns what the protocol says of an arm of a part."""
    runs, out = arms[name], []
    if 2 * sum(map(referee.collapsed, runs)) >= len(runs):
        out.append("collapses")
    if max(map(largest_move, runs)) <= MOVE:
        out.append("never moves")
    if name in found:
        together, alone = map(side, found[name])
        if together or alone:
            out.append(together or f"{alone}?")
    return out


def by_part(runs: list[Run]) -> dict[str, dict[str, list[Run]]]:
    """Returns part -> arm -> runs, of the parts that have runs of `none`."""
    parts = referee.by_part(runs)
    return {part: parts[part] for part in config.PARTS if config.NONE in parts.get(part, {})}


def summary(parts: Mapping[str, Arms]) -> str:
    """Returns the table of all methods over all parts."""
    found = {part: differences(arms) for part, arms in parts.items()}

    def cell(name, part):
        arms = parts[part]
        if name not in arms:
            return AGE if name in config.NEEDS_AGE and name not in config.objectives_of(*part.split("/")) else "–"
        difference = "" if name not in found[part] else format(found[part][name][1][0], "+.3f")
        return " ".join(filter(None, [difference, ", ".join(words(name, arms, found[part]))]))

    names = [n for n in ORDER if n != config.NONE and any(n in arms for arms in parts.values())]
    return rows(["method", *parts], [[n, *(cell(n, part) for part in parts)] for n in names])


def part_table(arms: Arms) -> str:
    """Returns the table of a part."""
    gains, found = referee.gains_of(arms), differences(arms)
    table = []
    for name in (n for n in ORDER if n in arms):
        together, alone = found.get(name, (None, None))
        table.append([
            name, str(len(arms[name])), mean(list(gains[name].values()), "+.3f"), interval(alone),
            interval(together), referee.collapses(arms[name]), f"{max(map(largest_move, arms[name])):.3f}",
            *(measured(n, name, arms) for n in (CLIPPED, GRADIENT)), ", ".join(words(name, arms, found)) or "–",
        ])
    header = ["arm", "seeds", "gain", "minus none", "minus none, all together", "collapsed", "largest move",
              "clipped tokens", "gradient norm", "verdict"]
    return rows(header, table)


def measured(name: str, arm: str, arms: Arms) -> str:
    """Returns the mean of a metric over the steps of an arm's runs, of those that have it."""
    values = [x for run in arms[arm] for x in run.series.get(name, ()) if np.isfinite(x)]
    return format(np.mean(values), ".2g") if values else "–"


def tables(runs: list[Run]) -> str:
    """Returns Markdown: all methods over all parts, and each part."""
    parts = by_part(runs)
    if not parts:
        return "No run is stored."
    blocks = [summary(parts)]
    blocks += [f"{AGE}: {name}, as {reason}." for name, reason in config.NEEDS_AGE.items()]
    return "\n\n".join(blocks + [f"**{part}**\n\n{part_table(arms)}" for part, arms in parts.items()])


def read(folder: pathlib.Path) -> list[Run]:
    """Returns the runs of all parts."""
    paths = [referee_runs.path_of(folder / "referee_objectives", part) for part in config.PARTS]
    return [run for path in paths if path.exists() for run in records.read(path)[0]]


def panel_of(part: str) -> Panel:
    """Makes the panel of a part: the difference of every arm to none, with the interval of one comparison."""

    def panel(axes, runs):
        arms = by_part(runs).get(part, {})
        names = [n for n in ORDER if n != config.NONE][::-1]
        axes.set_title(part.replace("/", ", ") + " answers")
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("gain minus that of none")
        found = differences(arms) if arms else {}
        for name, (_, (middle, low, high)) in found.items():
            is_lost = "collapses" in words(name, arms, found)
            color = "C3" if is_lost else "C2" if low > 0 else "C1" if high < 0 else "C0"
            bars = [[middle - low], [high - middle]] if np.isfinite(low) else None  # of one seed none
            axes.errorbar(middle, names.index(name), xerr=bars, fmt="o", markersize=3, color=color)

    return panel


PANELS = [panel_of(part) for part in config.PARTS]
FIGURE = Figure((tables,), {"referee_objectives": Picture((13.0, 8.0), PANELS, sharey=True)}, read)
