"""Shared by all figures: reads docs/experiments/NAME.jsonl, writes NAME.png and NAME.md.

    python -m experiments.rescue [FOLDER]

Each figure's module has `table`, which returns Markdown of the runs, and `draw`, which fills a page.
"""

import contextlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import ArrayLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_tis.build import Setup
from experiments import records
from experiments.records import Run
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.learner.warmup import examples, warm_up
from jaxrl_tis.models.transformer import Params
from jaxrl_tis.record import intervals
from jaxrl_tis.record.metrics import NoRecord
from jaxrl_tis.report.plots import STYLE
from jaxrl_tis.runtime import cli

FOLDER = "docs/experiments"
GREY = "#888888"  # of gaps that were not added artificially
LAST = 3  # the accuracy at the end is the mean of so many evaluations

Interval = tuple[float, float, float]  # mean and 95 % interval
Measure = Callable[[Run], float]
Draw = Callable[[Figure, Any], None]
Pictures = dict[str, tuple[Draw, tuple[float, float]]]  # name of a file -> drawing function, size in inches
# Label, measure, arm, and the arm to compare with
Comparison = tuple[str, Measure, str, str]


def taught(setup: Setup) -> Params:
    """Returns the parameters of a run after its supervised steps."""
    training = setup.training
    with contextlib.closing(setup.prompter()) as prompter:
        return warm_up(
            training, initial_params(training), NoRecord(), lambda: None, prompter,
            examples(training, prompter),
        )


def parts(arm: str) -> tuple[str, float]:
    """Splits the name of an arm into text and number: "none-0.3" is ("none", 0.3)."""
    name, _, number = arm.rpartition("-")
    return name, float(number)


def gain(run: Run) -> float:
    """Returns the sampled accuracy at the end minus that before the first step."""
    return at_end(run, "sampled") - float(run.series["eval/sampled_accuracy"][0])


def at_end(run: Run, kind: str) -> float:
    """Returns the mean accuracy, "greedy" or "sampled", of the last evaluations after the first step."""
    return float(run.series[f"eval/{kind}_accuracy"][1:][-LAST:].mean())


def of(name: str, share: float = 0.1) -> Measure:
    """Returns a function from a run to the mean of a metric over the last `share` of the run."""
    return lambda run: records.at_end(run, name, share)


def beside(runs: Sequence[Run], others: Sequence[Run], measure: Measure = gain) -> Interval | None:
    """Returns the mean difference of two arms over their common seeds, with its 95 % interval."""
    values, theirs = ({r.seed: measure(r) for r in some} for some in (runs, others))
    both = [values[seed] - theirs[seed] for seed in values if seed in theirs]
    return intervals.of_mean(both) if both else None


def interval(values: Interval | None, form: str = "+.3f") -> str:
    """Writes a mean and its interval: "+0.112 [+0.090, +0.134]"."""
    if values is None:
        return "–"
    mean, low, high = (format(x, form) for x in values)
    return f"{mean} [{low}, {high}]"


def mean(values: ArrayLike, form: str = ".3f") -> str:
    """Writes the mean of some values with Student's interval."""
    return interval(intervals.of_mean(values), form)


def rows(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Writes a table in Markdown."""
    lines = [header, ["---"] * len(header), *cells]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def comparisons(runs: Sequence[Run], wanted: Sequence[Comparison]) -> str:
    """Writes the paired differences of the hypotheses, for pairs of arms that have runs."""
    by_arm, lines = records.by_arm(runs), []
    for label, measure, arm, other in wanted:
        if arm in by_arm and other in by_arm:
            difference = interval(beside(by_arm[arm], by_arm[other], measure))
            lines.append([label, f"{arm} − {other}", difference])
    return rows(["paired over seeds", "arms", "difference"], lines)


def curve(
    axes: Axes, runs: Sequence[Run], name: str, label: str, color, is_change: bool = False, **style
) -> None:
    """Draws the mean of a metric over seeds by step, with Student's interval; draws nothing without runs.

    Args:
      is_change: draw the change of each run since its first value.
    """
    if not runs:
        return
    steps = runs[0].steps(name)
    values = np.array([run.series[name] - is_change * run.series[name][0] for run in runs])
    found = np.array([intervals.of_mean(column) for column in values.T])
    axes.plot(steps, found[:, 0], color=color, label=label, **style)
    if len(runs) > 1:
        axes.fill_between(steps, found[:, 1], found[:, 2], color=color, alpha=0.12, linewidth=0)


def write(folder: pathlib.Path, name: str, text: str, pictures: Pictures, drawn: Any) -> None:
    """Writes NAME.md and the pictures, and prints the text."""
    (folder / f"{name}.md").write_text(text + "\n")
    print(text)
    for stem, (draw, size) in pictures.items():
        with matplotlib.rc_context(STYLE):
            page = Figure(figsize=size)
            draw(page, drawn)
            page.savefig(folder / f"{stem}.png", dpi=100, metadata={"Software": None})
        print(f"wrote {folder / stem}.png")


def folder_of(name: str) -> pathlib.Path:
    """Parses the command line of a figure and returns its folder."""
    about = sys.modules["__main__"].__doc__ or ""
    parser = cli.parser(f"experiments.{name}", about.partition("\n")[0], about)
    parser.add_argument("folder", nargs="?", default=FOLDER, help=f"default: {FOLDER}")
    return pathlib.Path(parser.parse_args().folder)


def run(
    name: str, table: Callable[[Sequence[Run]], str], pictures: Pictures, needed: Sequence[str] = ()
) -> None:
    """Runs the command of a figure of trained runs; arms in `needed` must have runs."""

    def main() -> None:
        path = folder_of(name) / f"{name}.jsonl"
        runs, unfinished = records.read(path)
        if missing := sorted({*needed} - {r.arm for r in runs}):
            raise ValueError(
                f"{path} has no finished run of {', '.join(missing)}; ./launch/figures.sh trains "
                "them"
            )
        text = table(runs)
        if unfinished:
            text += f"\n\nNot finished, and left out: {'; '.join(unfinished)}."
        write(path.parent, name, text, pictures, runs)

    cli.run(main)
