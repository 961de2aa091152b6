"""Compares none, r2 and r3 of `correction.routing` by the number of minibatches of a batch.

Reads docs/experiments/routing.jsonl, the runs of `configs/fig_routing.py`. The name of an arm is
the routing and the number of minibatches, after "noise-" where the sampler's routers have noise.

Examples:

    python -m experiments.routing
    python -m experiments.routing docs/experiments
"""

from collections.abc import Sequence

from experiments import figures, records
from experiments.records import Run

MEASURES = {
    "sampled accuracy at the end": (lambda run: run.series["eval/sampled_accuracy"][-1], ".3f"),
    "gain": (figures.gain, "+.3f"),
    "k3": (figures.of("rollout_corr/k3_kl", 1.0), ".1e"),
    "tokens that flip": (figures.of("mismatch/route_flip_token", 1.0), ".3f"),
    "routers that flip": (figures.of("mismatch/route_flip_router", 1.0), ".3f"),
}
ROUTINGS = "none", "r2", "r3"
PAIRS = (("r2", "none"), ("r3", "none"), ("r3", "r2"))


def spread(values: Sequence[float], form: str) -> str:
    """Writes mean and range of some values: "0.45 (0.44 to 0.46)"."""
    mean, low, high = (format(x, form) for x in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def group_of(arm: str) -> tuple[str, int]:
    """Returns the prefix of an arm's name and its number of minibatches: "noise-r2-4" is
    ("noise-", 4)."""
    name, count = figures.parts(arm)
    return name.removesuffix(name.rpartition("-")[2]), int(count)


def table(runs: Sequence[Run]) -> str:
    """Returns Markdown tables: the measures of each arm, then paired differences of the gain."""
    by_arm, lines, compared = records.by_arm(runs), [], []
    for group in dict.fromkeys(map(group_of, sorted(by_arm, key=group_of))):
        prefix, count = group
        arms = {routing: f"{prefix}{routing}-{count}" for routing in ROUTINGS}
        for arm in filter(by_arm.get, arms.values()):
            cells = [spread([f(r) for r in by_arm[arm]], form) for f, form in MEASURES.values()]
            lines.append([arm, str(len(by_arm[arm])), *cells])
        compared += [("gain", figures.gain, arms[one], arms[other]) for one, other in PAIRS]
    return "\n\n".join([
        figures.rows(["arm", "seeds", *MEASURES], lines), figures.comparisons(runs, compared),
    ])


if __name__ == "__main__":
    figures.run("routing", table, {})
