"""Whether the first 40 steps of a run tell that it will collapse: the survey's second open problem.

    python -m jaxrl_tis.experiments.predictor [FOLDER]

Reads every *.jsonl of docs/experiments. A run collapses if its reward, or its learner's held-out accuracy,
ends at less than 70 % of the best that it had before. Logistic regressions learn from the runs of seeds 0-2
and are judged on the others by the area under the curve (AUROC): of the four signals that the survey
conjectures to be enough, of all, and each signal alone, in the direction that the first seeds give it.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from scipy import optimize, stats

from jaxrl_tis import cli
from jaxrl_tis.experiments import figures, records
from jaxrl_tis.experiments.records import BLOCK, Run
from jaxrl_tis.report.plots import COLORS

EARLY = 5  # blocks, 40 steps
LATE = 5  # blocks that a reward at the end is the mean of
KEPT = 0.7  # of the best; less is a collapse
TRAINED = (0, 1, 2)  # seeds
CONJECTURED = ("rollout_corr/chi2_token", "mismatch/ess_seq", "actor/pg_clipfrac", "response_length/mean")
# Those without a unit of their own task, and not the outcome.
SIGNALS = (
    *CONJECTURED, "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "mismatch/ess_token",
    "mismatch/engine/log_ratio_abs_mean", "mismatch/staleness/log_ratio_abs_mean",
    "rollout_corr/chi2_seq", "rollout_corr/k3_kl", "rollout_corr/kl",
    "rollout_corr/kept_eff_sample_size", "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean", "training/off_policy/trajectory_staleness/mean",
)
LOGARITHMIC = ("chi2", "grad_norm", "k3_kl", "ppo_kl", "log_ratio", "diff")
SMALLEST = 1e-8
PENALTY = 1.0  # of the squared coefficients, of standardised signals
RESAMPLES = 2000


def loses_reward(run: Run) -> bool:
    values = run.series["reward/mean"]
    return bool(values[-LATE:].mean() < KEPT * values[:-LATE].max())


def loses_accuracy(run: Run) -> bool:
    values = run.series["eval/sampled_accuracy"]
    return bool(values[-figures.LAST :].mean() < KEPT * values[: -figures.LAST].max())


OUTCOMES = {"reward": loses_reward, "held-out accuracy": loses_accuracy}


def early(run: Run, name: str) -> float:
    """Returns a signal over the first blocks, on a logarithmic scale where it spans decades."""
    values = run.series[name][:EARLY]
    if np.isnan(values).all():
        return 0.0
    value = float(np.clip(np.nanmean(values), -1e6, 1e6))
    is_log = any(word in name for word in LOGARITHMIC)
    return float(np.log10(max(abs(value), SMALLEST))) if is_log else value


def features(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """Returns [runs, signals]."""
    return np.array([[early(run, name) for name in names] for run in runs])


def auroc(score: np.ndarray, happened: np.ndarray) -> float:
    """Returns the share of pairs of a run that collapsed and one that did not in which the first has the
    higher score, ties as one half; NaN without a pair."""
    positive, negative = int(happened.sum()), int((~happened).sum())
    if not positive or not negative:
        return np.nan
    ranks = stats.rankdata(score)
    return float((ranks[happened].sum() - positive * (positive + 1) / 2) / (positive * negative))


def fitted(x: np.ndarray, happened: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fits a logistic regression with a penalty, and returns what gives a score to [runs, signals]."""
    centre, spread = x.mean(axis=0), x.std(axis=0)
    scaled = lambda x: (x - centre) / np.where(spread > 0, spread, 1.0)

    def loss(w):
        score = w[0] + scaled(x) @ w[1:]
        return np.sum(np.logaddexp(0, score) - happened * score) + PENALTY * w[1:] @ w[1:] / 2

    w = optimize.minimize(loss, np.zeros(x.shape[1] + 1), method="BFGS").x
    return lambda x: w[0] + scaled(x) @ w[1:]


def interval_of(score: np.ndarray, happened: np.ndarray) -> tuple[float, float, float]:
    """Returns the AUROC and its 95 % interval by a bootstrap over runs."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(score), size=(RESAMPLES, len(score)))
    found = [auroc(score[i], happened[i]) for i in chosen]
    return auroc(score, happened), *np.nanquantile(found, (0.025, 0.975))


def judged(runs: Sequence[Run], outcome: Callable[[Run], bool]) -> dict[str, tuple[float, float, float]]:
    """Returns predictor -> AUROC on the held-out seeds, with its interval."""
    seen = [r for r in runs if r.seed in TRAINED]
    unseen = [r for r in runs if r.seed not in TRAINED]
    before, after = (np.array([outcome(r) for r in some]) for some in (seen, unseen))
    predictors = {"the four": CONJECTURED, "all": SIGNALS} | {name: (name,) for name in SIGNALS}
    found = {}
    for label, names in predictors.items():
        score = fitted(features(seen, names), before)(features(unseen, names))
        found[label] = interval_of(score, after)
    return found


def lead(run: Run) -> float:
    """Returns how many steps after the first blocks the reward of a run first lies below 70 % of the best
    before; NaN if it never does."""
    values = run.series["reward/mean"]
    best = np.maximum.accumulate(values)
    below = np.flatnonzero(values[EARLY:] < KEPT * best[EARLY - 1 : -1])
    return float(below[0] * BLOCK) if below.size else np.nan


def table(runs: Sequence[Run]) -> str:
    """For each outcome: how many runs collapse, the lead, and the areas."""
    parts = []
    for name, outcome in OUTCOMES.items():
        found = judged(runs, outcome)
        held_out = [r for r in runs if r.seed not in TRAINED]
        collapsed = [r for r in held_out if outcome(r)]
        leads = [lead(r) for r in collapsed]
        parts.append(
            f"{name}: {sum(map(outcome, runs))} of {len(runs)} runs collapse, {len(collapsed)} of "
            f"{len(held_out)} of the held-out seeds; median lead {np.nanmedian(leads):.0f} steps."
        )
        order = sorted(found, key=lambda label: -found[label][0])
        rows = [[label, figures.interval(found[label], ".3f")] for label in order]
        parts.append(figures.rows(["predictor", f"AUROC, {name}"], rows))
    return "\n\n".join(parts)


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """The areas of each outcome, with their intervals."""
    for axes, (name, outcome), color in zip(page.subplots(1, 2), OUTCOMES.items(), COLORS):
        found = judged(runs, outcome)
        order = sorted(found, key=lambda label: found[label][0])
        for place, label in enumerate(order):
            area, low, high = found[label]
            axes.plot([low, high], [place, place], color=color)
            axes.plot(area, place, "o", color=color)
        axes.set_yticks(range(len(order)), order, fontsize=7)
        axes.axvline(0.9, color="black", linewidth=0.7)
        axes.set(title=f"Collapse of the {name}", xlabel="AUROC on held-out seeds", xlim=(0, 1))


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_tis.experiments.predictor")
    parser.add_argument("folder", nargs="?", default=figures.FOLDER)
    folder = pathlib.Path(parser.parse_args().folder)
    runs = [run for path in sorted(folder.glob("*.jsonl")) for run in records.read(path)]
    if not runs:
        raise ValueError(f"{folder} has no record of runs; ./launch/figures.sh makes them")
    text = table(runs)
    (folder / "predictor.md").write_text(text + "\n")
    figures.picture(folder / "predictor.png", draw, runs, (12, 5))
    print(text)


if __name__ == "__main__":
    cli.run(main)
