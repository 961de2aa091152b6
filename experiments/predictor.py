"""Tests whether four signals predict the collapse of a run 200 updates ahead (docs/open_problems.md, 2).

Reads the runs of FIGURES in docs/experiments; a run of several figures counts once. A prediction is made after
each stored value up to the first collapse, from the WINDOW last values. Logistic regressions are fitted on some
arms, or seeds, and predict the others. Intervals are a bootstrap over runs.

A run collapses where its reward falls to KEPT of its best and stays there for RECOVERY updates, or where its
gradient norm is SPIKE times the median of the window before and its mean reward of the next RECOVERY updates is
below DEGRADED of that of the window. LEVEL is reached or missed where the interval of the better predictor of the
four signals, linear or with squares and products, lies above or below. Others add more than ADDED where the
interval of the difference does.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize

from experiments import parts, records
from experiments.records import BLOCK, Run
from jaxrl_tis.report.plots import COLORS

WINDOW = 5  # blocks
HORIZON, RECOVERY = 200, 100  # updates
LEAST = 2  # blocks after the begin of a collapse near the end of a run
KEPT = 0.7  # of the best reward
SPIKE, DEGRADED = 10.0, 0.9  # of the median gradient norm, of the mean reward, over the window before
LEVEL, ADDED = 0.9, 0.03  # of the conjecture: an AUROC, and what other signals may add
FOLDS = 5  # of the arms
TRAINED = (0, 1, 2)  # seeds
CONJECTURED = ("rollout_corr/chi2_token", "mismatch/ess_seq", "actor/pg_clipfrac", "response_length/mean")
# All other stored signals that do not depend on the machine and are not the outcome.
SIGNALS = (
    *CONJECTURED, "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "mismatch/ess_token",
    "mismatch/engine/log_ratio_abs_mean", "mismatch/staleness/log_ratio_abs_mean",
    "mismatch/route_flip_router", "mismatch/route_flip_token",
    "rollout_corr/chi2_seq", "rollout_corr/k3_kl", "rollout_corr/kl",
    "rollout_corr/kept_eff_sample_size", "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean", "training/off_policy/trajectory_staleness/mean",
)
CONTROL = "reward over its best"
FIGURES = (
    "rescue", "critic", "threshold", "staleness", "formats", "causes", "fusion", "replay", "routing", "long",
    "referee/*", "referee_factors/*",
)
# Signals that span decades and may have either sign.
WIDE = ("chi2", "grad_norm", "k3_kl", "ppo_kl", "rollout_corr/kl", "log_ratio", "diff")
SMALLEST = 1e-6  # of these; below it a signal counts in proportion
PENALTY = 1.0  # of the squared coefficients, of standardised signals
RESAMPLES = 500
SPANS = ("whole", "cut")  # whether the next 300 updates are stored
SPLITS = ("arms", "seeds")


def updates(figure: str, arm: str) -> int:
    """Returns the updates per step of a run."""
    if figure == "routing":
        return int(arm.rpartition("-")[2])
    return 8 if (figure, arm) == ("causes", "reuse") else 2


def blocks(count: int, per_step: int) -> int:
    """Returns the whole blocks that so many updates are, at least 1."""
    return max(1, count // (BLOCK * per_step))


def collapse(run: Run, recovery: int) -> tuple[int, str] | None:
    """Returns the block where the first collapse begins and its kind, "drop" or "spike"; None without one.

    Args:
      recovery: blocks after which the reward has not recovered; fewer at the end of a run, but LEAST.
    """
    reward, norm = run.series["reward/mean"], run.series["actor/grad_norm"]
    for begin in range(1, len(reward) - LEAST):
        window = slice(max(0, begin - WINDOW), begin)
        best, later = reward[:begin].max(), reward[begin : begin + recovery + 1]
        if best > 0 and (later <= KEPT * best).all():
            return begin, "drop"
        before = norm[window][np.isfinite(norm[window])]
        is_spike = len(before) > 0 and norm[begin] > SPIKE * np.median(before)
        if is_spike and later[1:].mean() < DEGRADED * reward[window].mean():
            return begin, "spike"
    return None


def signal(run: Run, name: str, last: int) -> float:
    """Returns a signal of the window that ends with block `last`, on a log scale if it spans decades; NaN
    without a value. Of chi2 over tokens the 95th percentile, of others the mean."""
    window = slice(max(0, last + 1 - WINDOW), last + 1)
    if name == CONTROL:
        reward = run.series["reward/mean"]
        return float(reward[window].mean() / max(reward[: last + 1].max(), SMALLEST))
    values = run.series.get(name, np.array([]))[window]
    values = np.clip(values[~np.isnan(values)], -1e6, 1e6)
    if not len(values):
        return math.nan
    value = np.quantile(values, 0.95) if name == CONJECTURED[0] else values.mean()
    return float(np.arcsinh(value / SMALLEST) if any(word in name for word in WIDE) else value)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """All predictions. is_before: a collapse begins within HORIZON. is_whole: the HORIZON and RECOVERY next updates
    are stored.

    Attributes:
      x: [predictions, signals], of SIGNALS and CONTROL.
      run, arm, seed: [predictions] integers.
    """

    x: np.ndarray
    run: np.ndarray
    arm: np.ndarray
    seed: np.ndarray
    is_before: np.ndarray
    is_whole: np.ndarray
    kinds: Sequence[str]  # of the collapses
    num_runs: int

    def of(self, span: str) -> np.ndarray:
        """Returns the predictions [N] bool of a span."""
        return self.is_whole if span == "whole" else np.ones_like(self.is_whole)


def predictions(runs: Mapping[str, Sequence[Run]]) -> Predictions:
    """Returns the predictions of the runs of each figure."""
    lines, kinds, arms, number = [], [], {}, 0
    for figure, own in runs.items():
        for run in own:
            per_step = updates(figure, run.arm)
            horizon, recovery = blocks(HORIZON, per_step), blocks(RECOVERY, per_step)
            found, length = collapse(run, recovery), len(run.series["reward/mean"])
            begin = found[0] if found else length
            kinds += [found[1]] if found else []
            arm = arms.setdefault((figure, run.arm), len(arms))
            for last in range(min(begin, length - LEAST - 1)):
                signals = [signal(run, name, last) for name in (*SIGNALS, CONTROL)]
                has_all = last + horizon + recovery < length
                is_near = found is not None and begin <= last + horizon
                lines.append((signals, number, arm, run.seed, is_near, has_all))
            number += 1
    x, of_run, of_arm, seed, is_before, is_whole = (np.array(column) for column in zip(*lines, strict=True))
    return Predictions(x, of_run, of_arm, seed, is_before, is_whole, kinds, number)


def auroc(
    score: np.ndarray, happened: np.ndarray, group: np.ndarray, counts: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns AUROCs of a score: the share of pairs (happened, not happened) of one group with the higher score where
    it happened. Ties count one half; NaN without a pair.

    Args:
      group: scores of different groups are of different regressions, and are not compared.
      counts: for each AUROC, how often each score counts.
    """
    wins, pairs = np.zeros(len(counts)), np.zeros(len(counts))
    for own in np.unique(group):
        is_in = group == own
        _, place = np.unique(score[is_in], return_inverse=True)
        for i, count in enumerate(counts):
            positive, negative = (np.bincount(place, count[is_in] * kind[is_in]) for kind in (happened, ~happened))
            wins[i] += positive @ (np.cumsum(negative) - negative / 2)
            pairs[i] += positive.sum() * negative.sum()
    return np.divide(wins, pairs, out=np.full(len(counts), math.nan), where=pairs > 0)


def fitted(x: np.ndarray, happened: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fits a penalised logistic regression; returns a function from [N, signals] to the log-odds [N]. A missing
    signal counts as the mean over those that have it."""
    has = np.isfinite(x)
    count = np.maximum(has.sum(axis=0), 1)
    centre = np.where(has, x, 0.0).sum(axis=0) / count
    spread = np.sqrt(np.square(np.where(has, x - centre, 0.0)).sum(axis=0) / count)
    scaled = lambda x: np.where(np.isfinite(x), x - centre, 0.0) / np.where(spread > 0, spread, 1.0)
    inputs = np.column_stack([np.ones(len(x)), scaled(x)])
    weight = PENALTY * (np.arange(inputs.shape[1]) > 0)

    def loss(w):
        score = inputs @ w
        error = 1 / (1 + np.exp(-np.clip(score, -500, 500))) - happened
        value = np.sum(np.logaddexp(0, score) - happened * score) + weight @ w**2 / 2
        return value, inputs.T @ error + weight * w

    w = optimize.minimize(loss, np.zeros(inputs.shape[1]), jac=True, method="BFGS").x
    return lambda x: w[0] + scaled(x) @ w[1:]


def squares(x: np.ndarray) -> np.ndarray:
    """Returns the signals [N, signals], standardised, with their squares and products."""
    spread = np.nanstd(x, axis=0)
    z = (x - np.nanmean(x, axis=0)) / np.where(spread > 0, spread, 1.0)
    one, other = np.triu_indices(z.shape[1])
    return np.column_stack([z, z[:, one] * z[:, other]])


def folds(data: Predictions, split: str) -> np.ndarray:
    """Returns the fold [N] of each prediction that is made by a regression on the others; -1 for none."""
    return data.arm % FOLDS if split == "arms" else np.where(np.isin(data.seed, TRAINED), -1, 0)


def scores(x: np.ndarray, data: Predictions, chosen: np.ndarray, split: str) -> np.ndarray:
    """Returns the log-odds [N] of `chosen` predictions by regressions on other arms or seeds; NaN where none
    predicts."""
    fold, score = folds(data, split), np.full(len(x), math.nan)
    for own in sorted({*fold} - {-1}):
        seen, unseen = chosen & (fold != own), chosen & (fold == own)
        score[unseen] = fitted(x[seen], data.is_before[seen])(x[unseen])
    return score


def drawn(score: np.ndarray, data: Predictions, split: str) -> np.ndarray:
    """Returns the AUROC followed by RESAMPLES bootstrap values over runs, resampled alike for every score."""
    has = np.isfinite(score)
    _, run = np.unique(data.run[has], return_inverse=True)
    rng, num_runs = np.random.default_rng(0), run.max() + 1
    counts: list[np.ndarray] = [np.ones(len(run))]
    for _ in range(RESAMPLES):
        counts.append(np.bincount(rng.integers(num_runs, size=num_runs), minlength=num_runs)[run])
    return auroc(score[has], data.is_before[has], folds(data, split)[has], counts)


SETS = {
    "the four": CONJECTURED, "the four, squares and products": CONJECTURED, "all": SIGNALS,
    CONTROL: (CONTROL,), **{name: (name,) for name in SIGNALS},
}
# (span, split) -> predictor -> result of `drawn`
Areas = Mapping[tuple[str, str], Mapping[str, np.ndarray]]
Found = tuple[Predictions, Areas, Mapping[str, tuple[float, float]]]


def of_set(data: Predictions, label: str) -> np.ndarray:
    """Returns the inputs [N, signals] of a predictor."""
    columns = [(*SIGNALS, CONTROL).index(name) for name in SETS[label]]
    return squares(data.x[:, columns]) if "squares" in label else data.x[:, columns]


def judged(data: Predictions) -> Found:
    """Returns the areas of all predictors, and for the better of the four signals the mean probability and the
    share of collapses in the highest tenth of the predictions of each span, by arms."""
    areas, calibration = {}, {}
    for span in SPANS:
        for split in SPLITS:
            by_label = {x: scores(of_set(data, x), data, data.of(span), split) for x in SETS}
            areas[span, split] = {label: drawn(x, data, split) for label, x in by_label.items()}
            if split == "arms":
                score = by_label[better(areas[span, split])]
                top = score >= np.nanquantile(score, 0.9)
                chance = 1 / (1 + np.exp(-score[top]))
                calibration[span] = float(chance.mean()), float(data.is_before[top].mean())
    return data, areas, calibration


def better(by_label: Mapping[str, np.ndarray]) -> str:
    """Returns the better predictor of the four signals."""
    return max((label for label in by_label if label.startswith("the four")), key=lambda x: by_label[x][0])


def verdict(by_label: Mapping[str, np.ndarray]) -> str:
    """Returns the answers of the rule of docs/open_problems.md."""
    four = better(by_label)
    _, low, high = parts.bootstrap(by_label[four])
    added = parts.bootstrap(by_label["all"] - by_label[four])
    reach = "reached" if low >= LEVEL else "missed" if high < LEVEL else "undecided"
    more = "yes" if added[1] > ADDED else "no" if added[2] < ADDED else "undecided"
    area = parts.interval(parts.bootstrap(by_label[four]), ".3f")
    return f"{LEVEL:.2f} {reach}, {area}. Other signals add more than {ADDED}: {more}, {parts.interval(added)}"


def table(found: Found) -> str:
    """Returns Markdown: the counts, the verdicts, and the areas."""
    data, areas, calibration = found
    drops = sum(kind == "drop" for kind in data.kinds)
    lines = [
        f"{len(data.kinds)} of {data.num_runs} runs collapse: {drops} by a drop, {len(data.kinds) - drops} by a "
        "spike."
    ]
    for span in SPANS:
        chosen = data.of(span)
        positive, chance = chosen & data.is_before, calibration[span]
        lines.append(
            f"{span}: {chosen.sum()} predictions of {len(set(data.run[chosen]))} runs, {positive.sum()} before a "
            f"collapse, of {len(set(data.run[positive]))} runs. In the highest tenth the mean probability is "
            f"{chance[0]:.2f}, and {chance[1]:.2f} are before a collapse."
        )
        lines += [f"{span}, held-out {split}: {verdict(areas[span, split])}." for split in SPLITS]
    first = areas["whole", "arms"]
    cells = [
        [label, *(parts.interval(parts.bootstrap(by_label[label]), ".3f") for by_label in areas.values())]
        for label in sorted(first, key=lambda label: -first[label][0])
    ]
    header = ["AUROC", *(f"{span}, held-out {split}" for span, split in areas)]
    return "\n\n".join([*lines, parts.rows(header, cells)])


def panel_of(span: str, color: str) -> parts.Panel:
    """Makes a panel of the AUROC of each predictor on held-out arms, with intervals."""

    def panel(axes, found):
        intervals = {label: parts.bootstrap(values) for label, values in found[1][span, "arms"].items()}
        order = sorted(intervals, key=lambda label: intervals[label][0])
        for place, label in enumerate(order):
            area, low, high = intervals[label]
            axes.plot([low, high], [place, place], color=color)
            axes.plot(area, place, "o", color=color)
        axes.set_yticks(range(len(order)), order, fontsize=7)
        axes.axvline(LEVEL, color="black", linewidth=0.7)
        axes.set(title=f"Next updates: {span}", xlabel="AUROC on held-out arms", xlim=(0, 1))

    return panel


def read(folder: pathlib.Path) -> Found:
    """Reads and judges the runs of FIGURES."""
    runs, seen = {}, set()
    for figure in FIGURES:
        paths = [p for p in sorted(folder.glob(f"{figure}.jsonl")) if "gradients" not in p.name]
        for run in (run for path in paths for run in records.read(path)[0]):
            content = run.seed, run.series["reward/mean"].tobytes()
            if content not in seen:  # several figures share an arm
                seen.add(content)
                runs.setdefault(figure, []).append(run)
    if not runs:
        raise ValueError(f"{folder} has no run of {', '.join(FIGURES)}; ./launch/figures.sh makes them")
    return judged(predictions(runs))


FIGURE = parts.Figure(
    (table,), {"predictor": parts.Picture((13, 5), list(map(panel_of, SPANS, COLORS)))}, read,
)
