"""Measures the gap by turn, and by distance from the prompt and from a tool's answer.

The model of `configs/quickstart_tool.py` after its supervised steps plays episodes with the calculator,
and the learner scores them. The samplers are float32 as a control, W8A8, and W8A8 with noise on the
weights. The place of a token is its number in its turn, from 1: in the first turn the distance from
the prompt, in later turns the distance from the tool's answer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs import quickstart_tool
from jaxrl_tis.build import Setup, build
from jaxrl_tis.diagnostics import attribution
from jaxrl_tis.estimators import counts, loss
from experiments import parts
from jaxrl_tis.gate import report
from jaxrl_tis.learner import scoring
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import COLORS

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
PLACE_NUMBERS = range(1, PLACES + 1)
# Horizontal axis -> end of the label -> cells of a curve
AXES: dict[str, dict[str, list[Cell]]] = {
    "turn": {"": [("turn", k) for k in range(TURNS)]},
    "place of the token in its turn": {
        f", after {part}": [(part, p) for p in PLACE_NUMBERS] for part in PARTS
    },
}


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
    is_clipped = {name: counts.is_bounded(*bounds(weight)) for name, weight in BOUNDS.items()}
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
    more = {name: tokens[name][is_later].mean() - tokens[name][~is_later].mean() for name in BOUNDS}
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


def mean_of(of_seeds: Sequence[Found], arm: str, cell: Cell, measure: str) -> parts.Interval | None:
    """Returns the mean over seeds with Student's interval; None if a seed has too few tokens."""
    values = [found[arm][cell][measure] for found in of_seeds]
    return None if np.isnan(values).any() else intervals.of_mean(values)


def verdict(found: parts.Interval, equal: float) -> str:
    """Says on which side of `equal` an interval lies."""
    if found[1] > equal:
        return "larger"
    return "smaller" if found[2] < equal else "not different"


def compared(title: str, names: Sequence[str], equal: float, form: str) -> parts.Table:
    """Makes the table of results of `summary`, each with its verdict."""

    def table(of_seeds):
        cell = lambda x: f"{parts.interval(x, form)}, {verdict(x, equal)}"
        lines = [
            [arm, *(cell(intervals.of_mean([found[arm][n] for found in of_seeds])) for n in names)]
            for arm in ARMS[1:]
        ]
        return f"{title}\n\n{parts.rows(['sampler', *names], lines)}"

    return table


def numbered(numbers: Sequence[int]) -> list[str]:
    """Returns the numbers as text; the last one counts later ones too."""
    return [f"{n}{' and later' * (n == numbers[-1])}" for n in numbers]


def by_turn(of_seeds: Sequence[Found]) -> str:
    """Returns the table of the means of each turn."""
    lines = []
    for arm in ARMS:
        for (cell, label) in zip(AXES["turn"][""], numbered(range(TURNS)), strict=True):
            count = np.mean([found[arm][cell]["tokens"] for found in of_seeds])
            cells = [parts.interval(mean_of(of_seeds, arm, cell, m), ".3g") for m in MEASURES]
            lines.append([arm, label, f"{count:.0f}", *cells])
    return parts.rows(["sampler", "turn", "tokens", *MEASURES], lines)


def by_place(of_seeds: Sequence[Found]) -> str:
    """Returns the table of the means of each place."""
    lines = [
        [measure, arm, part, *(
            parts.interval(mean_of(of_seeds, arm, (part, p), measure), ".3g") for p in PLACE_NUMBERS
        )]
        for measure in ("|log ratio|", *BOUNDS, "entropy") for arm in ARMS[1:] for part in PARTS
    ]
    return parts.rows(["mean", "sampler", "tokens after", *numbered(PLACE_NUMBERS)], lines)


def panel_of(shown: Mapping[str, tuple[str, str]], colors: Sequence[str], x: str, **settings) -> parts.Panel:
    """Makes a panel of means with their intervals, of the cells that have enough tokens.

    Args:
      shown: label -> (arm, measure).
      x: name in AXES.
    """

    def panel(axes, of_seeds):
        for (label, (arm, measure)), color in zip(shown.items(), colors, strict=True):
            for (end, cells), style in zip(AXES[x].items(), ("-", "--"), strict=False):
                means = [(cell[1], mean_of(of_seeds, arm, cell, measure)) for cell in cells]
                places, mean, low, high = np.array([(n, *found) for n, found in means if found]).T
                axes.errorbar(
                    places, mean, [mean - low, high - mean], marker="o", markersize=3, capsize=2,
                    linewidth=1, label=label + end, color=color, linestyle=style,
                )
        axes.set(xlabel=x, **settings)
        if x == "turn":
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="x-small")

    return panel


GAP = {arm: (arm, "|log ratio|") for arm in ARMS[1:]}, COLORS[:2]
CLIPPED = {f"noise, {bound}": ("noise", bound) for bound in BOUNDS}, COLORS[2:4]


def read(_) -> list[Found]:
    """Samples and summarises the episodes of all seeds."""
    of_seeds: list[Found] = []
    for seed in SEEDS:
        setups = {arm: setup_of(arm, seed) for arm in ARMS}
        params = parts.taught(setups["float32"])
        of_seeds.append({arm: summary(tokens_of(setup, params)) for arm, setup in setups.items()})
    return of_seeds


FIGURE = parts.Figure(
    tables=(
        compared(
            "Mean |log ratio| after the tool's answer divided by that after the prompt:", RATIOS, 1, ".2f"
        ),
        compared("Clipped share after the tool's answer minus that after the prompt:", [*BOUNDS], 0, "+.3f"),
        by_turn, by_place,
    ),
    pictures={"turns": parts.Picture((10, 7), [
        *(panel_of(*GAP, x, yscale="log", ylabel="mean |log ratio|, nats") for x in AXES),
        *(
            panel_of(*CLIPPED, x, ylabel="share of tokens above the cap of 2", ylim=(0, None))
            for x in AXES
        ),
    ], num_rows=2)},
    read=read,
)
