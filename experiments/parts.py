"""The parts of a figure: measures of runs, columns of a table, panels of a picture.

`experiments.figures` has the figures.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import figure
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from experiments import records
from experiments.records import Run
from jaxrl_tis.build import Setup
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.learner.warmup import examples, warm_up
from jaxrl_tis.models.transformer import Params
from jaxrl_tis.record import intervals
from jaxrl_tis.record.metrics import NoRecord
from jaxrl_tis.report.plots import STYLE, palette

FOLDER = "docs/experiments"
GREY = "#888888"  # of gaps that were not added artificially
LAST = 3  # the accuracy at the end is the mean of so many evaluations

Interval = tuple[float, float, float]  # mean and 95 % interval
Arms = Mapping[str, Sequence[Run]]  # name of an arm -> its runs
Measure = Callable[[Run], float]
Column = Callable[[str, Arms], str]  # returns the cell of an arm
Table = Callable[[Any], str]  # from the data of a figure to Markdown
Panel = Callable[[Axes, Any], None]  # draws the data of a figure
# Label, measure, arm, and the arm to compare with
Comparison = tuple[str, Measure, str, str]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG: its size in inches, and its panels, row by row."""

    size: tuple[float, float]
    panels: Sequence[Panel]
    num_rows: int = 1
    sharey: bool = False
    has_legend_below: bool = False  # of the first panel's curves

    def page(self, data: Any) -> figure.Figure:
        """Returns the drawn page."""
        page = figure.Figure(figsize=self.size)
        shape = self.num_rows, len(self.panels) // self.num_rows
        axes = page.subplots(*shape, sharey=self.sharey, squeeze=False)
        for ax, panel in zip(axes.flat, self.panels, strict=True):
            panel(ax, data)
        if self.has_legend_below:
            handles, labels = page.axes[0].get_legend_handles_labels()
            page.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return page


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure: the tables of NAME.md, and the pictures by their names.

    Attributes:
      read: function from the folder to the data; None reads NAME.jsonl, the runs of
        `configs/fig_NAME.py`, as `Arms`.
      seeds: of these runs.
      needed: arms that must have runs.
      order: sort key of arms; None keeps the order of the file.
      recorded: returns further runs, of another machine or time.
    """

    tables: Sequence[Table]
    pictures: Mapping[str, Picture] = dataclasses.field(default_factory=dict)
    read: Callable[[pathlib.Path], Any] | None = None
    seeds: str = "0,1,2,3,4"
    needed: Collection[str] = ()
    order: Callable[[str], Any] | None = None
    recorded: Callable[[], Sequence[Run]] = tuple

    def data(self, folder: pathlib.Path, name: str) -> tuple[Any, list[str]]:
        """Returns the data of the tables and pictures, and sentences that follow the tables.

        Raises:
          ValueError: an arm in `needed` has no finished run.
        """
        if self.read is not None:
            return self.read(folder), []
        path = folder / f"{name}.jsonl"
        runs, unfinished = records.read(path)
        arms = records.by_arm([*self.recorded(), *runs])
        if missing := sorted({*self.needed} - {*arms}):
            raise ValueError(
                f"{path} has no finished run of {', '.join(missing)}; ./launch/figures.sh trains "
                "them"
            )
        if self.order is not None:
            arms = {arm: arms[arm] for arm in sorted(arms, key=self.order)}
        notes = [f"Not finished, and left out: {'; '.join(unfinished)}."] * bool(unfinished)
        return arms, notes

    def text(self, data: Any) -> str:
        """Returns all tables in Markdown."""
        return "\n\n".join(table(data) for table in self.tables)

    def write(self, folder: pathlib.Path, name: str) -> None:
        """Writes NAME.md and the pictures, and prints the text."""
        data, notes = self.data(folder, name)
        text = "\n\n".join([self.text(data), *notes])
        (folder / f"{name}.md").write_text(text + "\n")
        print(text)
        for stem, picture in self.pictures.items():
            with matplotlib.rc_context(STYLE):
                path = folder / f"{stem}.png"
                picture.page(data).savefig(path, dpi=100, metadata={"Software": None})
            print(f"wrote {path}")


def taught(setup: Setup) -> Params:
    """Returns the parameters of a run after its supervised steps."""
    training = setup.training
    with contextlib.closing(setup.prompter()) as prompter:
        return warm_up(
            training, initial_params(training), NoRecord(), lambda: None, prompter,
            examples(training, prompter),
        )


# Arms and measures


def split(arm: str) -> tuple[str, float]:
    """Splits the name of an arm into text and number: "none-0.3" is ("none", 0.3)."""
    name, _, number = arm.rpartition("-")
    return name, float(number)


def every(arms: Arms, name: str = "") -> list[Run]:
    """Returns the runs of all arms, or of those whose name begins with `name` and a number."""
    return [run for arm, own in arms.items() if not name or split(arm)[0] == name for run in own]


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


def ratio(runs: Sequence[Run], others: Sequence[Run], measure: Measure) -> Interval | None:
    """Returns the geometric mean of the ratio of two arms over their common seeds, with its interval."""
    found = beside(runs, others, lambda run: float(np.log10(measure(run))))
    return found and (10.0 ** found[0], 10.0 ** found[1], 10.0 ** found[2])


# Cells and tables


def interval(values: Interval | None, form: str = "+.3f") -> str:
    """Writes a mean and its interval: "+0.112 [+0.090, +0.134]"."""
    if values is None:
        return "–"
    mean, low, high = (format(x, form) for x in values)
    return f"{mean} [{low}, {high}]"


def bootstrap(estimates: np.ndarray, method: Any = "linear") -> Interval:
    """Returns the first estimate with the 95 % interval of the others, which are of resampled runs."""
    low, high = np.nanquantile(estimates[1:], (0.025, 0.975), method=method)
    return float(estimates[0]), float(low), float(high)


def mean(values: ArrayLike, form: str = ".3f") -> str:
    """Writes the mean of some values with Student's interval; "–" if one is missing (NaN)."""
    return interval(None if np.isnan(values).any() else intervals.of_mean(values), form)


def rows(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Writes a table in Markdown."""
    lines = [header, ["---"] * len(header), *cells]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def of_arms(*columns: tuple[str, Column]) -> Table:
    """Makes a table with a line for each arm, from (header, column)."""
    cells = lambda arms: [[cell(arm, arms) for _, cell in columns] for arm in arms]
    return lambda arms: rows([header for header, _ in columns], cells(arms))


ARM: tuple[str, Column] = ("arm", lambda arm, arms: arm)
SEEDS: tuple[str, Column] = ("seeds", lambda arm, arms: str(len(arms[arm])))


def mean_of(measure: Measure, form: str = ".3f") -> Column:
    """Makes the column of a measure's mean over seeds, with its interval."""
    return lambda arm, arms: mean([measure(run) for run in arms[arm]], form)


def to_base(
    base: str | Callable[[str], str], measure: Measure = gain, form: str = "+.3f", compare=beside
) -> Column:
    """Makes the column of the paired difference to the arm `base`, or `base(arm)`; "–" for this arm.

    Args:
      compare: `beside`, or `ratio`.
    """

    def cell(arm, arms):
        other = base if isinstance(base, str) else base(arm)
        is_compared = other != arm and other in arms
        return interval(compare(arms[arm], arms[other], measure) if is_compared else None, form)

    return cell


def compared(wanted: Sequence[Comparison]) -> Table:
    """Makes the table of the paired differences of the hypotheses, for pairs of arms that have runs."""

    def table(arms):
        lines = [
            [label, f"{arm} − {other}", interval(beside(arms[arm], arms[other], measure))]
            for label, measure, arm, other in wanted if arm in arms and other in arms
        ]
        return rows(["paired over seeds", "arms", "difference"], lines)

    return table


# Panels


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


def curves(
    name: str, labels: Mapping[str, str], is_change: bool = False, has_zero: bool = False,
    has_legend: bool = False, **settings,
) -> Panel:
    """Makes a panel of a metric by step, with a curve for each arm of {arm: label}."""

    def panel(axes, arms):
        for (arm, label), color in zip(labels.items(), palette(len(labels)), strict=True):
            curve(axes, arms.get(arm, ()), name, label, color, is_change)
        axes.set(xlabel="step", **settings)
        if has_zero:
            zero(axes)
        if has_legend:
            axes.legend()

    return panel


def scatter(axes: Axes, runs: Sequence[Run], x: Measure, y: Measure, **style) -> None:
    """Draws a point for each run."""
    axes.scatter([x(run) for run in runs], [y(run) for run in runs], **style)


def zero(axes: Axes) -> None:
    """Draws the line at 0."""
    axes.axhline(0, color="black", linewidth=0.7)
