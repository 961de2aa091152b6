"""Finds the smallest gap at which a run fails, with and without a correction.

Reads docs/experiments/threshold.jsonl, the runs of `configs/fig_threshold.py`. A run fails if its learner's
held-out accuracy ends below its start. The threshold of a correction is the gap at which half of the runs
fail, by logistic regression on the logarithm of the gap. Its interval is a bootstrap over seeds.
"""

import functools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy import optimize

from configs.fig_threshold import SCALES
from experiments import parts
from experiments.parts import Arms, Interval, Measure, gain, mean_of, of, split
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


def resampled(runs: Sequence[Run], measure: Measure) -> np.ndarray:
    """Returns the half point of the runs followed by RESAMPLES bootstrap values over seeds, resampled alike
    for all runs of the same seeds."""
    seeds = np.unique([r.seed for r in runs])
    log_scale = np.log([measure(r) for r in runs])
    failed = np.array([gain(r) < 0 for r in runs], float)
    of_seed = [np.flatnonzero([r.seed == s for r in runs]) for s in seeds]

    @functools.cache
    def of_draw(*chosen):
        rows = np.concatenate([of_seed[i] for i in chosen])
        return half_point(log_scale[rows], failed[rows])

    draws = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    return np.array([of_draw(*range(len(seeds))), *(of_draw(*sorted(draw)) for draw in draws)])


def threshold(runs: Sequence[Run], measure: Measure) -> Interval:
    """Returns the size at which half of the runs fail, with its 95 % bootstrap interval: 0 below all sizes,
    inf above.

    Args:
      measure: function from a run to the size of its gap, above 0.
    """
    return parts.bootstrap(np.exp(resampled(runs, measure)), "nearest")


def share_below(runs: Sequence[Run], others: Sequence[Run], measure: Measure) -> float:
    """Returns the share of resampled seeds in which the first runs fail at a smaller size."""
    return float(np.mean(resampled(runs, measure)[1:] < resampled(others, measure)[1:]))


def first_kl(run: Run) -> float:
    """Returns the KL divergence of sampler to learner over the first block of steps, nats per token."""
    return float(run.series["rollout_corr/k3_kl"][0])


MEASURES = {
    "scale of the noise": lambda run: split(run.arm)[1],
    "mean |log ratio|, nats": lambda run: run.series["mismatch/engine/log_ratio_abs_mean"][0],
    "k3, nats per token": first_kl,
}


def injected(arms: Arms) -> dict[str, list[Run]]:
    """Returns correction -> its runs with an injected gap."""
    names = dict.fromkeys(split(arm)[0] for arm in arms if arm != NATURAL)
    return {name: [r for r in parts.every(arms) if r.arm.startswith(f"{name}-")] for name in names}


def limits(arms: Arms) -> str:
    """Returns the threshold of each correction in three units, and whether one is below the other."""
    by_name = injected(arms)
    lines = [
        [name, unit, parts.interval(threshold(runs, measure), ".3g")]
        for name, runs in by_name.items() for unit, measure in MEASURES.items()
    ]
    below = share_below(by_name["none"], by_name["TIS-2"], MEASURES["scale of the noise"])
    return (
        f"{parts.rows(['correction', 'unit of the gap', 'half of the runs fail at'], lines)}\n\n"
        f"In {below:.3f} of the resampled seeds, runs without a correction fail at a smaller gap than with "
        "TIS-2."
    )


def failures(arm: str, arms: Arms) -> str:
    return f"{sum(gain(run) < 0 for run in arms[arm])} of {len(arms[arm])}"


def draw(axes: Axes, arms: Arms) -> None:
    """Draws the gain against the gap: a point per run, and a line through the means."""
    by_name = injected(arms)
    for (name, runs), color in zip(by_name.items(), palette(len(by_name)), strict=True):
        parts.scatter(axes, runs, first_kl, gain, color=color, s=14, alpha=0.5)
        own = [arms[arm] for arm in arms if arm.startswith(f"{name}-")]
        means = [[np.mean([of(run) for run in some]) for some in own] for of in (first_kl, gain)]
        axes.plot(*means, color=color, label=name)
    if NATURAL in arms:
        parts.scatter(
            axes, arms[NATURAL], first_kl, gain, color=parts.GREY, s=14, label="none, int8 alone"
        )
    parts.zero(axes)
    axes.set(
        title="Where a run fails (noise put on the sampler's weights)",
        xlabel="KL of sampler to learner at the start, nats per token", xscale="log",
        ylabel="gain in held-out accuracy",
    )
    axes.legend()


FIGURE = parts.Figure(
    tables=(
        limits,
        parts.of_arms(
            ("correction", lambda arm, _: "none, int8 alone" if arm == NATURAL else split(arm)[0]),
            ("scale", lambda arm, _: "–" if arm == NATURAL else f"{split(arm)[1]:g}"),
            ("k3 at the start", mean_of(first_kl, ".3g")), ("fail", failures),
            ("gain in sampled accuracy", mean_of(gain, "+.3f")),
            ("final sampler reward", mean_of(of("reward/mean"))),
        ),
        parts.compared([("gain", gain, f"TIS-2-{scale}", f"none-{scale}") for scale in SCALES]),
    ),
    pictures={"threshold": parts.Picture((7, 4), [draw])}, needed=("none-0.1", "TIS-2-0.1"),
    order=lambda arm: (arm == NATURAL, () if arm == NATURAL else split(arm)),
)
