"""Measures the gap by turn, and by distance from the prompt and from a tool's answer.

The model of `configs/quickstart_tool.py` after its supervised steps plays episodes with the calculator,
and the learner scores them. The samplers are float32 as a control, W8A8, and W8A8 with noise on the
weights. The place of a token is its number in its turn, from 1: in the first turn the distance from
the prompt, in later turns the distance from the tool's answer.

Examples:

    python -m experiments.turns
    python -m experiments.turns docs/experiments
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs import quickstart_tool
from jaxrl_tis.build import Setup, build
from jaxrl_tis.diagnostics import attribution
from jaxrl_tis.estimators import counts, loss
from experiments import figures
from jaxrl_tis.gate import report
from jaxrl_tis.learner import scoring
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import COLORS
from jaxrl_tis.runtime import cli

SEEDS = range(5)
PROMPTS = 256  # each with a group of episodes
ARMS = ("float32", "W8A8", "noise")
NOISE = 0.4  # of the weights
TURNS, PLACES = 3, 6  # later turns and places count as the last ones
FEWEST = 100  # tokens of a mean; with fewer in a seed it is left out
BINS = 10  # of the entropy

RATIOS = ("all tokens", "first token", "equal entropy")
BOUNDS = {"token TIS": "token_tis", "turn TIS": "turn_tis"}
MEASURES = ("|log ratio|", "k1", "k3", *BOUNDS, "entropy")
PARTS = ("the prompt", "the tool's answer")  # before a turn
Tokens = Mapping[str, np.ndarray]  # measure, "turn" or "place" -> [token]
Cell = tuple[str, int]  # ("turn", number) or (part, place)
Found = Mapping[str, Mapping]  # arm -> result of `summary`


def setup_of(arm: str, seed: int) -> Setup:
    """Returns the run whose sampler has the gap of an arm."""
    c = quickstart_tool.get_config()
    c.seed, c.task.max_turns, c.task.max_context_tokens = seed, 4, 56
    if arm == "float32":
        c.engine.quantization = "none"
    elif arm == "noise":
        c.engine.injected = f"weights(scale={NOISE}, seed={seed})"
    return build(c.lock())


def tokens_of(setup: Setup, params: Any) -> Tokens:
    """Returns `measured` of sampled episodes, and the entropy of the sampler in nats."""
    trajectories = report.sample(setup, params, PROMPTS)
    rows = setup.training.rows(trajectories)
    micro, flat = setup.training.micro_batches(rows)
    logp_old = flat(scoring.make_score(setup.training.learner)(params, micro)["logp"])
    entropy = np.concatenate([t.entropy[t.mask] for t in trajectories])
    return measured(rows | {"logp_old": logp_old}) | {"entropy": entropy}


def measured(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the measures, the turn and the place of each valid token, row by row.

    Args:
      rows: `logp_old` and `logp_behav` in nats, `turn` and `mask`, [N,T] each.
    """
    mask = rows["mask"]
    log_ratio = np.where(mask, rows["logp_old"] - rows["logp_behav"], np.float32(0))
    batch = dict(rows)
    bounds = lambda weight: loss.with_and_without_bounds(log_ratio, batch, (weight, {"cap": 2.0}))
    is_clipped = {
        name: counts.is_bounded(*bounds(weight))
        for name, weight in BOUNDS.items()
    }
    distance = attribution.tool_distances(mask)
    place = np.where(distance > 0, distance, 1 + attribution.response_positions(mask))
    x = log_ratio.astype(np.float64)
    fields = {
        "|log ratio|": np.abs(x), "k1": -x, "k3": np.expm1(x) - x, **is_clipped,
        "turn": rows["turn"], "place": place,
    }
    return {name: np.asarray(values)[mask] for name, values in fields.items()}


def summary(tokens: Tokens) -> dict[Cell | str, Any]:
    """Returns the means of each cell, NaN for one of fewer than FEWEST tokens, and the ratios of the mean
    |log ratio| after the tool's answer to that after the prompt: of all tokens, of the first tokens,
    and with as many tokens of each entropy as after the tool's answer. Also the differences of the
    clipped shares."""
    turn, place = np.minimum(tokens["turn"], TURNS - 1), np.minimum(tokens["place"], PLACES)
    is_later, gap = turn > 0, tokens["|log ratio|"]
    cells = {("turn", k): turn == k for k in range(TURNS)} | {
        (part, p): (is_later == i) & (place == p)
        for i, part in enumerate(PARTS) for p in range(1, PLACES + 1)
    }
    found = {
        cell: {"tokens": int(is_in.sum())} | {
            m: float(tokens[m][is_in].mean()) if is_in.sum() >= FEWEST else math.nan for m in MEASURES
        }
        for cell, is_in in cells.items()
    }
    first = [found[part, 1]["|log ratio|"] for part in PARTS]
    ratios = (
        gap[is_later].mean() / gap[~is_later].mean(), first[1] / first[0],
        at_equal_entropy(gap, tokens["entropy"], is_later),
    )
    more = {
        name: tokens[name][is_later].mean() - tokens[name][~is_later].mean() for name in BOUNDS
    }
    return found | dict(zip(RATIOS, ratios, strict=True)) | more


def at_equal_entropy(gap: np.ndarray, entropy: np.ndarray, is_later: np.ndarray) -> float:
    """Returns the mean gap of the later tokens divided by that of the others, [token] each. The others
    are weighted to have the later tokens' distribution over BINS of the entropy. Bins without others
    are left out."""
    edges = np.quantile(entropy[is_later], np.linspace(0, 1, BINS + 1)[1:-1])
    index = np.digitize(entropy, edges)
    of = lambda chosen, weights=None: np.bincount(index[chosen], weights, BINS)
    later, others = of(is_later), of(~is_later)
    is_common = (later > 0) & (others > 0)
    mean = of(~is_later, gap[~is_later])[is_common] / others[is_common]
    return float(of(is_later, gap[is_later])[is_common].sum() / (later[is_common] * mean).sum())


def mean_of(of_seeds: Sequence[Found], arm: str, cell: Cell, measure: str) -> figures.Interval | None:
    """Returns the mean over seeds with Student's interval; None if a seed has too few tokens."""
    values = [found[arm][cell][measure] for found in of_seeds]
    return None if np.isnan(values).any() else intervals.of_mean(values)


def verdict(compared: figures.Interval, equal: float) -> str:
    """Says on which side of `equal` an interval lies."""
    if compared[1] > equal:
        return "larger"
    return "smaller" if compared[2] < equal else "not different"


def table(of_seeds: Sequence[Found]) -> str:
    """Returns Markdown: the verdicts, then the means by turn and by place."""
    parts = []
    for title, names, equal, form in (
        ("Mean |log ratio| after the tool's answer divided by that after the prompt:", RATIOS, 1, ".2f"),
        ("Clipped share after the tool's answer minus that after the prompt:", BOUNDS, 0, "+.3f"),
    ):
        lines = []
        for arm in ARMS[1:]:
            values = [intervals.of_mean([found[arm][n] for found in of_seeds]) for n in names]
            lines.append(
                [arm, *(f"{figures.interval(x, form)}, {verdict(x, equal)}" for x in values)]
            )
        parts += [title, figures.rows(["sampler", *names], lines)]
    by_turn = []
    for arm in ARMS:
        for turn in range(TURNS):
            cell = "turn", turn
            count = np.mean([found[arm][cell]["tokens"] for found in of_seeds])
            cells = [figures.interval(mean_of(of_seeds, arm, cell, m), ".3g") for m in MEASURES]
            later = " and later" * (turn == TURNS - 1)
            by_turn.append([arm, f"{turn}{later}", f"{count:.0f}", *cells])
    parts.append(figures.rows(["sampler", "turn", "tokens", *MEASURES], by_turn))
    places = []
    for measure in ("|log ratio|", *BOUNDS, "entropy"):
        for arm in ARMS[1:]:
            for part in PARTS:
                cells = [
                    figures.interval(mean_of(of_seeds, arm, (part, p), measure), ".3g")
                    for p in range(1, PLACES + 1)
                ]
                places.append([measure, arm, part, *cells])
    numbers = [f"{p}{' and later' * (p == PLACES)}" for p in range(1, PLACES + 1)]
    parts.append(figures.rows(["mean", "sampler", "tokens after", *numbers], places))
    return "\n\n".join(parts)


def draw(page: Figure, of_seeds: Sequence[Found]) -> None:
    """Draws the gap and the clipped shares, by turn and by place."""
    (gap_turn, gap_place), (clipped_turn, clipped_place) = page.subplots(2, 2)
    turns = [("turn", k) for k in range(TURNS)]
    for color, arm in zip(COLORS[:2], ARMS[1:], strict=True):
        line(gap_turn, of_seeds, arm, turns, "|log ratio|", label=arm, color=color)
        for style, part in zip(("-", "--"), PARTS, strict=True):
            cells = [(part, p) for p in range(1, PLACES + 1)]
            look = dict(label=f"{arm}, after {part}", color=color, linestyle=style)
            line(gap_place, of_seeds, arm, cells, "|log ratio|", **look)
    for color, bound in zip(COLORS[2:4], BOUNDS, strict=True):
        line(clipped_turn, of_seeds, "noise", turns, bound, label=f"noise, {bound}", color=color)
        for style, part in zip(("-", "--"), PARTS, strict=True):
            cells = [(part, p) for p in range(1, PLACES + 1)]
            look = dict(label=f"noise, {bound}, after {part}", color=color, linestyle=style)
            line(clipped_place, of_seeds, "noise", cells, bound, **look)
    for axes in (gap_turn, gap_place):
        axes.set(yscale="log", ylabel="mean |log ratio|, nats")
    for axes in (clipped_turn, clipped_place):
        axes.set(ylabel="share of tokens above the cap of 2", ylim=(0, None))
    for axes in (gap_turn, clipped_turn):
        axes.set(xlabel="turn")
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (gap_place, clipped_place):
        axes.set(xlabel="place of the token in its turn")
    for axes in page.axes:
        axes.legend(fontsize="x-small")


def line(
    axes: Axes, of_seeds: Sequence[Found], arm: str, cells: Sequence[Cell], measure: str, **style
) -> None:
    """Draws the means of the cells that have enough tokens, with their intervals."""
    means = [(cell[1], mean_of(of_seeds, arm, cell, measure)) for cell in cells]
    known = [(x, *found) for x, found in means if found is not None]
    x, mean, low, high = np.array(known).T
    bars = [mean - low, high - mean]
    axes.errorbar(x, mean, bars, marker="o", markersize=3, capsize=2, linewidth=1, **style)


def main() -> None:
    """Command line: see the top of the file."""
    folder, of_seeds = figures.folder_of("turns"), []
    for seed in SEEDS:
        setups = {arm: setup_of(arm, seed) for arm in ARMS}
        params = figures.taught(setups["float32"])
        of_seeds.append({arm: summary(tokens_of(setup, params)) for arm, setup in setups.items()})
    figures.write(folder, "turns", table(of_seeds), {"turns": (draw, (10, 7))}, of_seeds)


if __name__ == "__main__":
    cli.run(main)
