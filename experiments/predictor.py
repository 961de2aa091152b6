"""Tests whether the first 40 steps of a run predict its collapse.

Reads the runs of FIGURES in docs/experiments; a run of several figures counts once. A run collapses if its
reward, or its learner's held-out accuracy, ends below 70 % of its earlier best. Logistic regressions are
fitted on the runs of seeds 0-2 and tested on the others by AUROC. The predictors are the four signals that
a conjecture calls sufficient, all signals, and each signal alone, with the sign fitted on the first seeds.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, stats

from experiments import parts, records
from experiments.records import BLOCK, Run
from jaxrl_tis.report.plots import COLORS

EARLY = 5  # blocks, 40 steps
KEPT = 0.7  # of the best; less is a collapse
TRAINED = (0, 1, 2)  # seeds
CONJECTURED = ("rollout_corr/chi2_token", "mismatch/ess_seq", "actor/pg_clipfrac", "response_length/mean")
# Signals that do not depend on the task's units and are not the outcome.
SIGNALS = (
    *CONJECTURED, "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "mismatch/ess_token",
    "mismatch/engine/log_ratio_abs_mean", "mismatch/staleness/log_ratio_abs_mean",
    "rollout_corr/chi2_seq", "rollout_corr/k3_kl", "rollout_corr/kl",
    "rollout_corr/kept_eff_sample_size", "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean", "training/off_policy/trajectory_staleness/mean",
)
FIGURES = ("rescue", "critic", "threshold", "staleness", "formats", "causes")
# Signals that span decades and may have either sign.
WIDE = ("chi2", "grad_norm", "k3_kl", "ppo_kl", "rollout_corr/kl", "log_ratio", "diff")
SMALLEST = 1e-6  # of these; below it a signal counts in proportion
PENALTY = 1.0  # of the squared coefficients, of standardised signals
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A metric that collapses: the mean of its `last` values is compared with the best value before."""

    name: str
    metric: str
    last: int

    def happens(self, run: Run) -> bool:
        values = run.series[self.metric]
        return bool(values[-self.last :].mean() < KEPT * values[: -self.last].max())

    def falls_at(self, run: Run) -> float:
        """Returns the first step at which the metric is below 70 % of its earlier best; NaN without one."""
        values = run.series[self.metric]
        best = np.maximum.accumulate(values)
        is_below = np.append(False, values[1:] < KEPT * best[:-1])
        return float(run.steps(self.metric)[is_below.argmax()]) if is_below.any() else np.nan


OUTCOMES = (
    Outcome("reward", "reward/mean", 5), Outcome("held-out accuracy", "eval/sampled_accuracy", parts.LAST),
)


def early(run: Run, name: str) -> float:
    """Returns the mean of a signal over the first blocks, on a log scale if it spans decades; NaN without
    a value."""
    values = run.series[name][:EARLY]
    if np.isnan(values).all():
        return np.nan
    value = float(np.clip(np.nanmean(values), -1e6, 1e6))
    return float(np.arcsinh(value / SMALLEST)) if any(word in name for word in WIDE) else value


def features(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """Returns the early signals of runs, [runs, signals]."""
    return np.array([[early(run, name) for name in names] for run in runs])


def auroc(score: np.ndarray, happened: np.ndarray) -> float:
    """Returns the AUROC of a score: the share of pairs (collapsed, not collapsed) with the higher score in
    the collapsed run. Ties count one half; NaN without a pair."""
    positive, negative = int(happened.sum()), int((~happened).sum())
    if not positive or not negative:
        return np.nan
    ranks = stats.rankdata(score)
    return float((ranks[happened].sum() - positive * (positive + 1) / 2) / (positive * negative))


def fitted(x: np.ndarray, happened: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fits a penalised logistic regression; returns a function from [runs, signals] to scores [runs]. A
    missing signal counts as the mean over runs that have it."""
    has = np.isfinite(x)
    count = np.maximum(has.sum(axis=0), 1)
    centre = np.where(has, x, 0.0).sum(axis=0) / count
    spread = np.sqrt(np.square(np.where(has, x - centre, 0.0)).sum(axis=0) / count)
    scaled = lambda x: np.where(np.isfinite(x), x - centre, 0.0) / np.where(spread > 0, spread, 1.0)

    def loss(w):
        score = w[0] + scaled(x) @ w[1:]
        return np.sum(np.logaddexp(0, score) - happened * score) + PENALTY * w[1:] @ w[1:] / 2

    w = optimize.minimize(loss, np.zeros(x.shape[1] + 1), method="BFGS").x
    return lambda x: w[0] + scaled(x) @ w[1:]


def drawn(score: np.ndarray, happened: np.ndarray) -> np.ndarray:
    """Returns the AUROC followed by RESAMPLES bootstrap values, resampled alike for every score."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(score), size=(RESAMPLES, len(score)))
    return np.array([auroc(score, happened), *(auroc(score[i], happened[i]) for i in chosen)])


def divided(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Returns the runs of training seeds, and the held-out runs."""
    return [r for r in runs if r.seed in TRAINED], [r for r in runs if r.seed not in TRAINED]


def judged(runs: Sequence[Run], outcome: Outcome) -> dict[str, np.ndarray]:
    """Returns {predictor: `drawn` of its score on the held-out seeds}."""
    seen, unseen = divided(runs)
    before, after = (np.array([outcome.happens(r) for r in some], bool) for some in (seen, unseen))
    predictors = {"the four": CONJECTURED, "all": SIGNALS} | {name: (name,) for name in SIGNALS}
    areas = {}
    for label, names in predictors.items():
        score = fitted(features(seen, names), before)(features(unseen, names))
        areas[label] = drawn(score, after)
    return areas


# The runs, and outcome -> result of `judged`.
Found = tuple[Sequence[Run], dict[Outcome, dict[str, np.ndarray]]]


def table(found: Found) -> str:
    """Returns Markdown for each outcome: number of collapses, of early ones, and the AUROC table."""
    blocks, (runs, areas) = [], found
    _, unseen = divided(runs)
    for outcome, by_label in areas.items():
        collapsed = [r for r in unseen if outcome.happens(r)]
        begun = sum(outcome.falls_at(r) <= EARLY * BLOCK for r in collapsed)
        blocks.append(
            f"{outcome.name}: {sum(map(outcome.happens, runs))} of {len(runs)} runs collapse, "
            f"{len(collapsed)} of the {len(unseen)} of held-out seeds. Within the first {EARLY * BLOCK} steps "
            f"{begun} of these {len(collapsed)} have already been below 70 % of the best before."
        )
        order = sorted(by_label, key=lambda label: -by_label[label][0])
        lines = [[label, parts.interval(parts.bootstrap(by_label[label]), ".3f")] for label in order]
        difference = parts.interval(parts.bootstrap(by_label["all"] - by_label["the four"]))
        lines.append(["all less the four", difference])
        blocks.append(parts.rows(["predictor", f"AUROC, {outcome.name}"], lines))
    return "\n\n".join(blocks)


def panel_of(outcome: Outcome, color: str) -> parts.Panel:
    """Makes a panel of the AUROC of each predictor, with intervals."""

    def panel(axes, found):
        intervals = {label: parts.bootstrap(values) for label, values in found[1][outcome].items()}
        order = sorted(intervals, key=lambda label: intervals[label][0])
        for place, label in enumerate(order):
            area, low, high = intervals[label]
            axes.plot([low, high], [place, place], color=color)
            axes.plot(area, place, "o", color=color)
        axes.set_yticks(range(len(order)), order, fontsize=7)
        axes.axvline(0.9, color="black", linewidth=0.7)
        axes.set(title=f"Collapse of the {outcome.name}", xlabel="AUROC on held-out seeds", xlim=(0, 1))

    return panel


def unique(runs: Sequence[Run]) -> list[Run]:
    """Drops repeated runs: several figures share an arm."""
    by_content = {(r.seed, r.series["reward/mean"].tobytes()): r for r in runs}
    return list(by_content.values())


def read(folder: pathlib.Path) -> Found:
    """Reads and judges the runs of FIGURES."""
    paths = [path for name in FIGURES if (path := folder / f"{name}.jsonl").exists()]
    runs = unique([run for path in paths for run in records.read(path)[0]])
    if not all(divided(runs)):
        raise ValueError(
            f"{folder} needs runs of seeds {TRAINED} and of others; ./launch/figures.sh makes them"
        )
    return runs, {outcome: judged(runs, outcome) for outcome in OUTCOMES}


FIGURE = parts.Figure(
    (table,), {"predictor": parts.Picture((12, 5), list(map(panel_of, OUTCOMES, COLORS)))}, read,
)
