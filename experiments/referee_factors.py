"""Draws the referee of the factors of the ratio and writes its tables, by the rules of docs/referee.md.

Reads docs/experiments/referee_factors/, the runs of `experiments.referee_runs --factors`.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from configs import fig_referee
from experiments import records, referee, referee_runs
from experiments.parts import Figure, Interval, Picture, interval, rows
from experiments.referee import Data, Gains

# A row -> the arms of both sides. Each of the first three compares one choice over all arms that cross it.
CROSSED = {
    "truncated minus dropped": ("TIS", "MIS"),
    "bound 5 minus bound 2": ("5", "2"),
    "apart minus folded": ("apart", "folded"),
}
SINGLE = {
    "GSPO minus PPO at prox": ("GSPO at prox", "folded MIS 5"),
    "staleness uncapped minus folded TIS 2": ("staleness uncapped", "folded TIS 2"),
    "PPO bypass minus none": ("PPO bypass", referee.NONE),
}
CONTRASTS = (*CROSSED, *SINGLE)


def sides(gains: Gains) -> Gains:
    """Returns the two sides of each contrast that a part has, as arms "CONTRAST +" and "CONTRAST -": seed ->
    mean gain."""
    out: Gains = {}
    for contrast, words in (CROSSED | SINGLE).items():
        pairs = matched(gains, contrast, words)
        for side, sign in enumerate("+-" if pairs else ""):
            arms = [gains[pair[side]] for pair in pairs]
            out[f"{contrast} {sign}"] = {s: float(np.mean([arm[s] for arm in arms])) for s in arms[0]}
    return out


def matched(gains: Gains, contrast: str, words: tuple[str, str]) -> list[tuple[str, str]]:
    """Returns the pairs of arms of a contrast that differ in its choice alone."""
    if contrast in SINGLE:
        return [words] if gains.keys() >= {*words} else []
    one, other = words
    crossed = [name for name in gains if name.count(" ") == 2 and one in name.split()]
    pairs = [(name, " ".join(other if word == one else word for word in name.split())) for name in crossed]
    return [pair for pair in pairs if pair[1] in gains]


def differences(gains: Gains) -> dict[str, Interval]:
    """Returns contrast -> the paired difference of its sides in a part; its intervals hold together."""
    both = sides(gains)
    return {
        name: referee.simultaneous(referee.paired(both[f"{name} +"], both[f"{name} -"]), len(CONTRASTS))
        for name in CONTRASTS if f"{name} +" in both
    }


def decides(over_parts: Interval, of_parts: Sequence[Interval]) -> str:
    """Returns "+" or "-" where the mean over parts is surely on that side and no part surely on the other
    one, else ""."""
    _, low, high = over_parts
    if low > 0:
        return "" if any(part[2] < 0 for part in of_parts) else "+"
    return "-" if high < 0 and not any(part[1] > 0 for part in of_parts) else ""


def contrasts(parts: Mapping[str, Gains]) -> str:
    """Returns the table of the contrasts, over all parts and in each."""
    of_parts = {part: differences(gains) for part, gains in parts.items()}
    both = {part: sides(gains) for part, gains in parts.items()}
    lines = []
    for name in CONTRASTS:
        found = [d[name] for d in of_parts.values() if name in d]
        if not found:
            continue
        mean = referee.overall(both, f"{name} +", len(CONTRASTS), f"{name} -")
        side = {"+": name.split(" minus ")[0], "-": name.split(" minus ")[1], "": "not decided"}
        lines.append([
            name, interval(mean), side[decides(mean, found)], *(interval(d.get(name)) for d in of_parts.values()),
        ])
    return rows(["contrast", "mean over parts", "decides for", *of_parts], lines)


def tables(data: Data) -> str:
    """Returns Markdown: the contrasts, the decisions, and each complete part."""
    if not data[0]:
        return "No run is stored."
    parts, others = referee.complete(data[0], fig_referee.factors_of)
    blocks = referee.left_out(others)
    if parts:
        gains: dict[str, Gains] = {part: referee.gains_of(arms) for part, arms in parts.items()}
        blocks += [contrasts(gains), referee.decisions(parts)]
    blocks += [f"**{part}**\n\n{referee.part_table(arms, [])}" for part, arms in parts.items()]
    return "\n\n".join(blocks)


def read(folder: pathlib.Path) -> Data:
    """Returns the runs of all parts, and no gradients."""
    paths = [referee_runs.path_of(folder / "referee_factors", part) for part in fig_referee.FACTOR_PARTS]
    return [run for path in paths if path.exists() for run in records.read(path)[0]], []


PANELS = [referee.panel_of(part, fig_referee.factors_of) for part in fig_referee.FACTOR_PARTS]
FIGURE = Figure((tables,), {"referee_factors": Picture((17.0, 4.0), PANELS)}, read)
