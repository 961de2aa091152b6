"""Finds the smallest gap at which a run fails, with and without a correction.

Reads docs/experiments/threshold.jsonl, the runs of `configs/fig_threshold.py`. A run fails if its learner's
held-out accuracy ends below its start. The threshold of a correction is the gap at which half of the runs
fail, by logistic regression on the logarithm of the gap. Its interval is a bootstrap over seeds.

Examples:

    python -m experiments.threshold
    python -m experiments.threshold docs/experiments
"""

import functools
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from scipy import optimize

from experiments import figures, records
from experiments.figures import parts
from experiments.records import Run
from jaxrl_tis.report.plots import palette

NATURAL = "int8"  # the arm without an injected gap
RESAMPLES = 2000
# Of the regression's slope, which is infinite if the sizes of failures and successes do not overlap.
PENALTY = 0.01
FLATTEST = 1e-3  # slope of failures per e-fold of the size that counts as one


def half_point(log_scale: np.ndarray, failed: np.ndarray) -> float:
    """Returns the log size at which a logistic curve of the failures [n] crosses one half.

    inf: above the largest size, or failures do not increase with size and are at most half. -inf: below
    the smallest size, or failures do not increase and are more than half.
    """
    otherwise = -np.inf if failed.mean() > 0.5 else np.inf
    if failed.all() or not failed.any():
        return otherwise
    centre = log_scale.mean()

    def loss(x):
        score = x[0] + x[1] * (log_scale - centre)
        return np.sum(np.logaddexp(0, score) - failed * score) + PENALTY * x[1] ** 2

    intercept, slope = optimize.minimize(loss, np.array([0.0, 1.0]), method="BFGS").x
    if slope <= FLATTEST:
        return otherwise
    crossing = centre - intercept / slope
    if log_scale.min() <= crossing <= log_scale.max():
        return float(crossing)
    return np.inf if crossing > centre else -np.inf


def resampled(runs: Sequence[Run], measure: figures.Measure) -> np.ndarray:
    """Returns the half point of the runs followed by RESAMPLES bootstrap values over seeds, resampled alike
    for all runs of the same seeds."""
    seeds = np.unique([r.seed for r in runs])
    log_scale = np.log([measure(r) for r in runs])
    failed = np.array([figures.gain(r) < 0 for r in runs], float)
    of_seed = [np.flatnonzero([r.seed == s for r in runs]) for s in seeds]

    @functools.cache
    def of_draw(*chosen):
        rows = np.concatenate([of_seed[i] for i in chosen])
        return half_point(log_scale[rows], failed[rows])

    draws = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    return np.array([of_draw(*range(len(seeds))), *(of_draw(*sorted(draw)) for draw in draws)])


def threshold(runs: Sequence[Run], measure: figures.Measure) -> figures.Interval:
    """Returns the size at which half of the runs fail, with its 95 % bootstrap interval: 0 below all sizes,
    inf above.

    Args:
      measure: function from a run to the size of its gap, above 0.
    """
    estimates = resampled(runs, measure)
    low, high = np.quantile(estimates[1:], (0.025, 0.975), method="nearest")
    return float(np.exp(estimates[0])), float(np.exp(low)), float(np.exp(high))


def share_below(runs: Sequence[Run], others: Sequence[Run], measure: figures.Measure) -> float:
    """Returns the share of resampled seeds in which the first runs fail at a smaller size."""
    return float(np.mean(resampled(runs, measure)[1:] < resampled(others, measure)[1:]))


def first_kl(run: Run) -> float:
    """Returns the KL divergence of sampler to learner over the first block of steps, nats per token."""
    return float(run.series["rollout_corr/k3_kl"][0])


MEASURES = {
    "scale of the noise": lambda run: parts(run.arm)[1],
    "mean |log ratio|, nats": lambda run: run.series["mismatch/engine/log_ratio_abs_mean"][0],
    "k3, nats per token": first_kl,
}


def table(runs: Sequence[Run]) -> str:
    """Returns Markdown tables: thresholds in three units, outcomes by gap, and paired comparisons."""
    natural, runs = divided(runs)
    of = lambda name: [r for r in runs if parts(r.arm)[0] == name]
    names = list(dict.fromkeys(parts(r.arm)[0] for r in runs))
    limits = [
        [name, unit, figures.interval(threshold(of(name), measure), ".3g")]
        for name in names for unit, measure in MEASURES.items()
    ]
    ordered = sorted(records.by_arm(runs).items(), key=lambda item: parts(item[0]))
    arms = [[parts(arm)[0], f"{parts(arm)[1]:g}", *_outcome(own)] for arm, own in ordered]
    if natural:
        arms.append(["none, int8 alone", "–", *_outcome(natural)])
    scales = sorted({parts(r.arm)[1] for r in runs})
    compared = [("gain", figures.gain, f"TIS-2-{s:g}", f"none-{s:g}") for s in scales]
    below = share_below(of("none"), of("TIS-2"), MEASURES["scale of the noise"])
    return "\n\n".join([
        figures.rows(["correction", "unit of the gap", "half of the runs fail at"], limits),
        f"In {below:.3f} of the resampled seeds, runs without a correction fail at a smaller gap than with "
        "TIS-2.",
        figures.rows(
            ["correction", "scale", "k3 at the start", "fail", "gain in sampled accuracy",
             "final sampler reward"], arms,
        ),
        figures.comparisons(runs, compared),
    ])


def divided(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Returns the runs without an injected gap, and the runs with one."""
    return [r for r in runs if r.arm == NATURAL], [r for r in runs if r.arm != NATURAL]


def _outcome(runs):
    return [
        figures.mean([first_kl(r) for r in runs], ".3g"),
        f"{sum(figures.gain(r) < 0 for r in runs)} of {len(runs)}",
        figures.mean([figures.gain(r) for r in runs], "+.3f"),
        figures.mean([records.at_end(r, "reward/mean") for r in runs]),
    ]


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Draws the gain against the gap: a point per run, and a line through the means."""
    axes = page.subplots()
    natural, injected = divided(runs)
    names = dict.fromkeys(parts(r.arm)[0] for r in injected)
    for name, color in zip(names, palette(len(names)), strict=True):
        own = [r for r in injected if parts(r.arm)[0] == name]
        axes.scatter(
            [first_kl(r) for r in own], [figures.gain(r) for r in own], color=color, s=14, alpha=0.5
        )
        arms = sorted(records.by_arm(own).items(), key=lambda item: parts(item[0]))
        means = [[np.mean([of(r) for r in some]) for _, some in arms] for of in (first_kl, figures.gain)]
        axes.plot(*means, color=color, label=name)
    if natural:
        sizes = [first_kl(r) for r in natural]
        gains = [figures.gain(r) for r in natural]
        axes.scatter(sizes, gains, color=figures.GREY, s=14, label="none, int8 alone")
    axes.axhline(0, color="black", linewidth=0.7)
    axes.set(
        title="Where a run fails (noise put on the sampler's weights)",
        xlabel="KL of sampler to learner at the start, nats per token", xscale="log",
        ylabel="gain in held-out accuracy",
    )
    axes.legend()


if __name__ == "__main__":
    figures.run("threshold", table, {"threshold": (draw, (7, 4))}, needed=("none-0.1", "TIS-2-0.1"))
