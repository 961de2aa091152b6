"""Draws the referee and writes its tables, by the rules of docs/referee.md.

Reads docs/experiments/referee/, the runs and gradients of experiments/referee_runs.py.
"""

import collections
import json
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from scipy import stats

from configs import fig_referee
from experiments import records, referee_runs
from experiments.parts import GREY, LAST, Figure, Interval, Panel, Picture, interval, mean, rows
from experiments.records import Run

NONE, EXACT, CONTROL = "none", fig_referee.EXACT, fig_referee.CONTROL
# Of the arms, simplest first.
ORDER = (*fig_referee.CORRECTIONS, *list(fig_referee.FACTORS)[1:], *fig_referee.APART, EXACT)
OF_LOSS = ("KPop", "IPO", "centering", "centering + TIS")  # the arms with the loss of the control
HALF = 40  # steps of a run of half the budget
MARGIN = 0.05  # of the reward; a gap whose cost is surely below it needs no correction
Gains = dict[str, dict[int, float]]  # correction -> seed -> gain
Arms = Mapping[str, Sequence[Run]]  # correction -> runs
Data = tuple[list[Run], list[dict]]  # the runs of all parts, and the lines of their gradients


def gain(run: Run, budget: float = np.inf) -> float:
    """Returns the held-out reward at the end minus that before the first step, of a run that ends after
    `budget` steps."""
    values = run.series[referee_runs.REWARD][run.series["eval/steps"] <= budget]
    return float(values[1:][-LAST:].mean() - values[0])


def collapsed(run: Run) -> bool:
    """Whether the held-out reward ends below half of that before the first step."""
    values = run.series[referee_runs.REWARD]
    return bool(values[-1] < values[0] / 2)


def collapses(runs: Sequence[Run]) -> str:
    return f"{sum(map(collapsed, runs))} of {len(runs)}"


def by_part(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Returns part -> correction -> runs."""
    parts: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        part, _, name = run.arm.rpartition("/")
        parts.setdefault(part, {}).setdefault(name, []).append(run)
    return parts


def is_control(run: Run) -> bool:
    return run.arm.endswith(f"/{CONTROL}")


def gains_of(arms: Arms, budget: float = np.inf) -> Gains:
    return {name: {run.seed: gain(run, budget) for run in runs} for name, runs in arms.items()}


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> np.ndarray:
    """Returns the differences over the seeds that both have, in their order."""
    return np.array([one[seed] - other[seed] for seed in sorted(one) if seed in other])


def student(mean: float, variance: float, n: int, count: int) -> Interval:
    """Returns a mean and its Student interval at 95 % for `count` intervals together (Bonferroni).

    Args:
      variance: of the mean, with n - 1 degrees of freedom.
    """
    half = stats.t.ppf(1 - 0.025 / count, n - 1) * np.sqrt(variance) if n > 1 else np.inf
    return float(mean), float(mean - half), float(mean + half)


def simultaneous(values: np.ndarray, count: int) -> Interval:
    """Returns the mean and its interval for `count` intervals together."""
    n = len(values)
    return student(values.mean(), values.var(ddof=1) / n if n > 1 else 0.0, n, count)


def beside(gains: Gains, other: str) -> dict[str, Interval]:
    """Returns the paired difference of each arm to another one, with intervals that hold together."""
    arms = [name for name in gains if name != other]
    return {name: simultaneous(paired(gains[name], gains[other]), len(arms)) for name in arms}


def overall(parts: Mapping[str, Gains], name: str, count: int, other: str = NONE) -> Interval:
    """Returns the mean over parts of the difference of two arms, with its interval for `count` intervals
    together.

    Parts and seeds are both drawn at random, and each part has every seed. The variance is that of the
    mean over parts plus that of the mean over seeds, which counts the variance of single runs twice and so
    is never too small (Owen 2007, doi:10.1214/07-AOAS122). The fewer of both give the degrees of freedom.
    """
    cells = np.array([paired(g[name], g[other]) for g in parts.values() if name in g and other in g])
    fewest, variance = min(cells.shape), 0.0
    if fewest > 1:
        variance = sum(cells.mean(axis).var(ddof=1) / cells.shape[1 - axis] for axis in (0, 1))
    return student(cells.mean(), variance, fewest, count)


def verdicts(gains: Gains) -> tuple[list[str], list[str]]:
    """Returns (the arms that are better than none, those that are worse)."""
    differences = beside(gains, NONE)
    better = [name for name, (_, low, _) in differences.items() if low > 0]
    return better, [name for name, (_, _, high) in differences.items() if high < 0]


def without_a_seed(gains: Gains) -> list[tuple[list[int], list[str], list[str]]]:
    """Returns (seeds, better, worse): the verdicts where one of these seeds is left out, if they differ
    from those of all seeds."""
    found: dict[str, tuple[list[int], list[str], list[str]]] = {}
    for seed in gains[NONE]:
        less = {name: {s: x for s, x in g.items() if s != seed} for name, g in gains.items()}
        if (verdict := verdicts(less)) != verdicts(gains):
            found.setdefault(str(verdict), ([], *verdict))[0].append(seed)
    return list(found.values())


def decision(gains: Gains) -> list[str]:
    """Returns the corrections to take, simplest first: the best of those that are better than none, and
    all that are better than none and not worse than the best. Empty where none is better."""
    better = [name for name in verdicts(gains)[0] if name != EXACT]
    if not better:
        return []
    best = max(better, key=lambda name: paired(gains[name], gains[NONE]).mean())
    to_best = {n: simultaneous(paired(gains[n], gains[best]), len(gains) - 1) for n in better}
    return sorted((n for n in better if to_best[n][2] >= 0), key=ORDER.index)


def cost_of_gap(gains: Gains) -> Interval:
    """Returns the gain of the exact engine minus that of none, with an interval of one comparison."""
    return simultaneous(paired(gains[EXACT], gains[NONE]), 1)


def advice(gains: Gains) -> str:
    """Says what to take for a part."""
    if taken := decision(gains):
        return taken[0] + (f" (as good: {', '.join(taken[1:])})" if taken[1:] else "")
    return f"none: the gap costs less than {MARGIN}" if cost_of_gap(gains)[2] < MARGIN else "not decided"


def size_of_gap(runs: Sequence[Run]) -> float:
    """Returns k3 in nats a token, mean over the steps of all runs."""
    return float(np.nanmean(np.concatenate([run.series["rollout_corr/k3_kl"] for run in runs])))


def complete(
    runs: Sequence[Run], arms_of: Callable[[str, str], Collection[str]]
) -> tuple[dict[str, dict[str, list[Run]]], list[str]]:
    """Returns (the parts that have all runs of their arms, as `by_part` does; what the others have)."""
    parts, others = by_part([run for run in runs if not is_control(run)]), []
    for part, arms in list(parts.items()):
        wanted = {(n, seed) for n in arms_of(*part.split("/")) for seed in referee_runs.SEEDS}
        missing = wanted - {(name, run.seed) for name, runs in arms.items() for run in runs}
        if missing:
            others.append(f"{part} ({len(wanted) - len(missing)} of {len(wanted)} runs)")
            del parts[part]
    return parts, others


def tables(data: Data) -> str:
    """Returns Markdown: the decisions, all arms over all parts, and each part, of the complete parts."""
    runs, gradients = data
    parts, others = complete(runs, fig_referee.arms_of)
    gains = {part: gains_of(arms) for part, arms in parts.items()}
    blocks = left_out(others)
    blocks += [decisions(parts), f"With {HALF} of 80 steps:\n\n{decisions(parts, HALF)}"]
    names = [n for n in ORDER if n != NONE and any(n in g for g in gains.values())]
    lines = [[name, interval(overall(gains, name, len(names)))] for name in names]
    title = f"gain minus that of none, mean over {len(parts)} part{'s' * (len(parts) != 1)}"
    blocks.append(rows(["arm", title], lines))
    lines = [
        [part, ", ".join(map(str, seeds)), listed(better), listed(worse)]
        for part, g in gains.items() for seeds, better, worse in without_a_seed(g)
    ]
    if lines:
        header = ["part", "without one of the seeds", "better than none", "worse than none"]
        blocks.append(f"Verdicts that change without one seed:\n\n{rows(header, lines)}")
    if table := control_table(runs):
        blocks.append(f"The control, REINFORCE without a correction:\n\n{table}")
    for part, arms in parts.items():
        blocks.append(f"**{part}**\n\n{part_table(arms, [g for g in gradients if g['part'] == part])}")
    return "\n\n".join(blocks)


def left_out(others: Sequence[str]) -> list[str]:
    """Returns the paragraph that names the parts without all of their runs, none where there are none."""
    return [f"Not complete, and left out: {', '.join(others)}."] if others else []


def control_table(runs: Sequence[Run]) -> str:
    """Returns the table that tells the loss of `OF_LOSS` from their corrections. The intervals of a part
    hold together. Empty without a part that has all runs of the control."""
    lines, pairs = [], [(CONTROL, NONE), *((name, CONTROL) for name in OF_LOSS)]
    for part, arms in by_part(runs).items():
        if min(len(arms.get(name, ())) for name in (CONTROL, NONE, *OF_LOSS)) < len(referee_runs.SEEDS):
            continue
        gains = gains_of(arms)
        differences = [simultaneous(paired(gains[a], gains[b]), len(pairs)) for a, b in pairs]
        lines.append([part, *map(interval, differences), collapses(arms[CONTROL])])
    header = ["part", *(f"{a} minus {b}" for a, b in pairs), "collapsed"]
    return rows(header, lines) if lines else ""


def decisions(parts: Mapping[str, Arms], budget: float = np.inf) -> str:
    """Returns the table of what to take for each part, with runs of `budget` steps."""
    lines = []
    for part, arms in parts.items():
        (gap, length), gains = part.split("/"), gains_of(arms, budget)
        lines.append([
            gap, f"{size_of_gap(arms[NONE]):.2g}", length, advice(gains),
            listed(verdicts(gains)[1]), interval(cost_of_gap(gains)),
        ])
    header = ["gap", "k3 of 80 steps, nats per token", "answers", "take", "worse than none", "cost of the gap"]
    return rows(header, lines)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "–"


def part_table(arms: Arms, gradients: Sequence[Mapping]) -> str:
    """Returns the table of a part."""
    gains, found = gains_of(arms), gradient_measures(gradients)
    differences = beside(gains, NONE), beside(gains, EXACT), beside(gains_of(arms, HALF), NONE)
    lines = [
        [name, mean(list(gains[name].values()), "+.3f"), *(interval(d.get(name)) for d in differences),
         collapses(arms[name]), *found.get(name, ("–",) * 3)]
        for name in ORDER if name in arms
    ]
    header = [
        "arm", "gain", "minus none", "minus exact engine", f"minus none, {HALF} steps", "collapsed",
        "bias", "cosine", "noise",
    ]
    return rows(header, lines)


def gradient_measures(lines: Sequence[Mapping]) -> dict[str, tuple[str, str, str]]:
    """Returns arm -> (relative bias, cosine, relative standard deviation of one batch's gradient), from
    means over seeds and checkpoints. A negative estimate of a square counts as 0."""
    sums: dict[str, collections.Counter] = {}
    for line in lines:
        total = sums.setdefault(line["arm"].rpartition("/")[2], collections.Counter())
        total.update({n: line[n] for n in ("true2", "own2", "dot", "bias2", "variance")})
    out, root = {}, lambda x: float(np.sqrt(max(x, 0.0)))
    for name, s in sums.items():
        norms = root(s["own2"]) * root(s["true2"])
        cosine = f"{s['dot'] / norms:.3f}" if norms else "–"
        bias, spread = (
            f"{root(s[x]) / root(s['true2']):.2f}" if s["true2"] > 0 else "–"
            for x in ("bias2", "variance")
        )
        out[name] = bias, cosine, spread
    return out


def panel_of(
    part: str, arms_of: Callable[[str, str], Collection[str]], is_last: bool = True
) -> Panel:
    """Makes the panel of a part: the difference of every arm to none, with intervals that hold together.
    It is empty without all runs of the part.

    Args:
      arms_of: returns the arms of a gap and a length.
      is_last: the panel has the title of the axis.
    """

    def panel(axes, data):
        (gap, length), parts = part.split("/"), complete(data[0], arms_of)[0]
        names = [name for name in ORDER if name != NONE and name in arms_of(gap, length)][::-1]
        axes.set_title(f"{gap}, {length} answers")
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        if is_last:
            axes.set_xlabel("gain minus that of none")
        if part not in parts:
            axes.set_visible(part in fig_referee.PARTS)
            return
        for name, (middle, low, high) in beside(gains_of(parts[part]), NONE).items():
            color = "C2" if low > 0 else "C3" if high < 0 else "C0"
            axes.errorbar(
                middle, names.index(name), xerr=[[middle - low], [high - middle]], fmt="o",
                markersize=3, color=color,
            )

    return panel


def read(folder: pathlib.Path) -> Data:
    """Returns the runs of all parts, and the lines of their gradients, each with its part. ValueError
    where no run is stored."""
    runs, gradients = [], []
    for part in referee_runs.PARTS:
        path = referee_runs.path_of(folder / "referee", part)
        runs += records.read(path)[0] if path.exists() else []
        path = referee_runs.gradients_path(folder / "referee", part)
        lines = path.read_text().splitlines() if path.exists() else []
        gradients += [json.loads(line) | {"part": part} for line in lines]
    if not runs:
        raise ValueError(f"{folder} has no run of the referee; ./launch/figures.sh referee trains them")
    return runs, gradients


GAPS = [gap for gap in fig_referee.GAPS if gap != "int8+stale"]
PANELS = [
    panel_of(f"{gap}/{length}", fig_referee.arms_of, length == [*fig_referee.LENGTHS][-1])
    for length in fig_referee.LENGTHS for gap in GAPS
]
FIGURE = Figure((tables,), {"referee": Picture((13.0, 7.5), PANELS, num_rows=2, sharey=True)}, read)
