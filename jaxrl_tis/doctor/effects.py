"""What the configured corrections do: facts and findings from the counts of `estimators.counts`."""

import math

from jaxrl_tis.doctor.case import CHI2, KL, Case, Clause, Finding
from jaxrl_tis.estimators import counts, methods

WITHOUT_GAP = ("clip_cov", "top_entropy")  # masks that choose tokens, whatever the gap


def _counted(case: Case) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Returns (metric of what is seen, those of what is changed, those of what a bound takes) for each
    configured weight and mask."""
    prefix, found = f"{counts.PREFIX}weight/", []
    if case.method("weight")[0] != "none":
        taken = (f"{prefix}truncated", f"{prefix}dropped")
        found.append((f"{prefix}seen", (f"{prefix}changed",), taken))
    names = [name for name, _ in methods.parse_all("mask", case.setting("correction.masks"))]
    for name, label in zip(names, counts.labels(names), strict=True):
        if name not in WITHOUT_GAP:
            dropped = (f"{counts.PREFIX}mask/{label}/dropped",)
            found.append((f"{counts.PREFIX}mask/{label}/seen", dropped, dropped))
    return found


def _share(case: Case, seen: str, parts: tuple[str, ...], length: float) -> float:
    """Returns the sum of `parts` over that of `seen` in the last `length` steps, 0 of nothing; KeyError
    names a metric that is not recorded."""
    def total(metric):
        if not case.window(metric, length):
            raise KeyError(metric)
        return math.fsum(case.window(metric, length).values())

    return sum(map(total, parts)) / max(total(seen), 1.0)


def _least_active(case):
    """(smallest share of tokens, over the whole run, that one of the methods changes, its metric);
    1 without methods."""
    length = max(case.last_step, 1)
    return min(
        ((_share(case, seen, changed, length), changed[0]) for seen, changed, _ in _counted(case)),
        default=(1.0, "config/is_corrected"),
    )


def _most_active(case):
    """(largest share of tokens that the bounds of one of the methods take, its metric)."""
    length = case.thresholds["window"]
    return max(
        ((_share(case, seen, taken, length), taken[0]) for seen, _, taken in _counted(case)),
        default=(0.0, "config/is_corrected"),
    )


FACTS = {"run/least_active": _least_active, "run/most_active": _most_active}

CAUSES = (
    Finding(
        "correction.inactive", "a configured correction did nothing in the whole run, beside a gap",
        "The weight changed no token, or the mask dropped none, although sampler and learner differ: "
        "its bound is too wide for this gap, or what it judges by is not what differs. Tighten it or "
        "take it out, so that the config says what is done.",
        all_of=(Clause("run/least_active", "<=", 0),),
        any_of=(Clause(KL, ">", "kl_fine"), Clause(CHI2, ">", "chi2_moderate")),
        mistake="taking a correction that is configured for one that acts",
    ),
    Finding(
        "correction.most", "a bound takes more than half of the tokens",
        "What is left is a small and chosen part of the batch, or a weight that is its cap: widen the "
        "bound, or reduce the gap itself.",
        all_of=(Clause("run/most_active", ">", "taken_most"),),
    ),
)
