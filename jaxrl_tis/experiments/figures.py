"""What every figure does: reads docs/experiments/NAME.jsonl, draws NAME.png and writes NAME.md beside it.

    python -m jaxrl_tis.experiments.rescue [FOLDER]

A figure is a file with `table`, from its runs to Markdown, and `draw`, which fills a page.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_tis import cli, intervals
from jaxrl_tis.experiments import records
from jaxrl_tis.experiments.records import Run
from jaxrl_tis.report.plots import STYLE

FOLDER = "docs/experiments"
GREY = "#888888"  # of gaps that nobody put in
LAST = 3  # evaluations that an accuracy at the end is the mean of

Table = Callable[[Sequence[Run]], str]
Draw = Callable[[Figure, Sequence[Run]], None]


def gain(run: Run, name: str = "eval/sampled_accuracy") -> float:
    """Returns an accuracy over the last evaluations minus that before the first step."""
    values = run.series[name]
    return float(values[-LAST:].mean() - values[0])


def gains(runs: Sequence[Run], of: Callable[[Run], float] = gain) -> dict[str, dict[int, float]]:
    """Returns arm -> seed -> its gain."""
    return {arm: {r.seed: of(r) for r in own} for arm, own in records.by_arm(runs).items()}


def beside(values: dict[int, float], others: dict[int, float]) -> tuple[float, float, float]:
    """Returns the mean difference of two arms over the seeds that both have, and its 95 % interval."""
    return intervals.of_mean([values[seed] - others[seed] for seed in values if seed in others])


def interval(values: tuple[float, float, float], form: str = "+.3f") -> str:
    """Writes a mean and its interval: "+0.112 [+0.090, +0.134]"."""
    mean, low, high = (format(x, form) for x in values)
    return f"{mean} [{low}, {high}]"


def rows(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Writes a table in Markdown."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curve(
    axes: Axes, runs: Sequence[Run], name: str, label: str, color, is_banded: bool = True, **style
) -> None:
    """Draws the mean of a metric over seeds against the steps, and Student's 95 % interval."""
    is_eval = name.startswith("eval/")
    steps = runs[0].series["eval/steps"] if is_eval else runs[0].block_ends
    values = np.array([run.series[name] for run in runs])
    found = np.array([intervals.of_mean(column) for column in values.T])
    axes.plot(steps, found[:, 0], color=color, label=label, **style)
    if is_banded and len(runs) > 1:
        axes.fill_between(steps, found[:, 1], found[:, 2], color=color, alpha=0.12, linewidth=0)


def picture(path: pathlib.Path, draw: Draw, runs: Sequence[Run], size: tuple[float, float]) -> None:
    """Writes a PNG."""
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=size)
        draw(page, runs)
        page.savefig(path, dpi=100, metadata={"Software": None})


def run(name: str, table: Table, pictures: dict[str, tuple[Draw, tuple[float, float]]]) -> None:
    """The command of a figure; `pictures` maps the name of a file to what draws it and its inches."""

    def main() -> None:
        parser = argparse.ArgumentParser(prog=f"python -m jaxrl_tis.experiments.{name}")
        parser.add_argument("folder", nargs="?", default=FOLDER, help=f"default: {FOLDER}")
        folder = pathlib.Path(parser.parse_args().folder)
        runs = records.read(folder / f"{name}.jsonl")
        text = table(runs)
        (folder / f"{name}.md").write_text(text + "\n")
        print(text)
        for stem, (draw, size) in pictures.items():
            picture(folder / f"{stem}.png", draw, runs, size)
            print(f"drawn: {folder / stem}.png")

    cli.run(main)
