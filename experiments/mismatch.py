"""Whether a correction still gains within the mismatch budget, by the runs of configs/fig_mismatch.py.

D95 is the 95th percentile over an answer's tokens of |p_sampler - p_learner|, mean over answers.
"""

from experiments import parts
from experiments.parts import ARM, SEEDS, Arms, Figure, Interval, gain, mean_of, of
from experiments.records import Run
from jaxrl_tis.record import intervals

LEAST = 0.003  # gain in accuracy that counts
CORRECTED = {"neither": "correct", "repair": "both"}  # an arm's way, and that with the correction
MEASURES = {
    "D95": ("mismatch/dp_p95/mean", 1e-4), "chi2 of sequences": ("rollout_corr/chi2_seq", 0.1),
    "flips": ("mismatch/route_flip_router", 1e-3),
}


def is_within(runs: list[Run]) -> bool:
    """Returns whether the mean of each measure is below its limit. A model without routers has no flips."""
    values = [(of(name, 1.0), limit) for name, limit in MEASURES.values()]
    means = [(sum(map(measure, runs)) / len(runs), limit) for measure, limit in values]
    return all(not mean >= limit for mean, limit in means)


def verdict(found: Interval) -> str:
    """Returns whether a correction gains at least LEAST."""
    return "gains" if found[1] >= LEAST else "does not" if found[2] < LEAST else "open"


def budget(arms: Arms) -> str:
    """Returns the table of the correction's gain, in and out of the budget."""
    lines = []
    for arm in arms:
        model, name, way = arm.split("/")
        corrected = arms.get(f"{model}/{name}/{CORRECTED.get(way)}")
        if corrected is None:
            continue
        found = parts.beside(corrected, arms[arm])
        assert found is not None
        runs = list(arms[arm])
        lines.append([
            arm, "within" if is_within(runs) else "beyond", parts.interval(found), f"{(found[2] - found[1]) / 2:.3f}",
            verdict(found),
        ])
    return parts.rows(["arm", "budget", "gain of the correction", "resolution", f"at least {LEAST}"], lines)


def crossover(arms: Arms) -> str:
    """Returns the gain of the correction within and beyond the budget, mean over pairs of runs."""
    groups: dict[str, list[float]] = {"within": [], "beyond": []}
    for arm, runs in arms.items():
        model, name, way = arm.split("/")
        corrected = {r.seed: gain(r) for r in arms.get(f"{model}/{name}/{CORRECTED.get(way)}", ())}
        key = "within" if is_within(list(runs)) else "beyond"
        groups[key] += [corrected[r.seed] - gain(r) for r in runs if r.seed in corrected]
    shown = (f"{key} the budget {parts.interval(intervals.of_mean(x))}" for key, x in groups.items() if x)
    return f"Gain of the correction: {', '.join(shown)}."


FIGURE = Figure(
    tables=(
        crossover, budget,
        parts.of_arms(
            ARM, SEEDS, *((name, mean_of(of(metric, 1.0), ".1e")) for name, (metric, _) in MEASURES.items()),
            ("gain in sampled accuracy", mean_of(gain, "+.3f")),
        ),
    ),
    seeds="0,1,2,3,4,5,6,7",
)
