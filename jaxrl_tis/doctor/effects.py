"""Facts and findings about the effect of corrections, from the counts of `estimators.counts` and the weights."""

import math

from jaxrl_tis.doctor.case import CHI2, CLIPPED, DP_MAX, IS_VALID, KL, PEARSON, Case, Clause, Finding, is_so
from jaxrl_tis.doctor.frameworks import (
    ABS_GAP, CORRECTED, DP_MEAN, NORMALIZED, RATIO, WEIGHT_MEAN, WEIGHT_MIN,
)
from jaxrl_tis.estimators import counts, methods

WITHOUT_GAP = ("clip_cov", "top_entropy")  # masks that choose tokens, whatever the gap


def _counted(case: Case) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Returns the count metrics of each configured weight and mask: (of all tokens, of changed tokens, of
    tokens that a bound changes)."""
    prefix = f"{counts.PREFIX}weight/"
    counted: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    if case.method("weight")[0] != "none":
        bounded = (f"{prefix}truncated", f"{prefix}dropped")
        counted.append((f"{prefix}num_tokens", (f"{prefix}changed",), bounded))
    names = [name for name, _ in methods.parse_all("mask", case.setting("correction.masks"))]
    for name, label in zip(names, counts.labels(names), strict=True):
        if name not in WITHOUT_GAP:
            dropped = (f"{counts.PREFIX}mask/{label}/dropped",)
            counted.append((f"{counts.PREFIX}mask/{label}/num_tokens", dropped, dropped))
    return counted


def _share(case: Case, tokens: str, parts: tuple[str, ...], length: float) -> float:
    """Returns sum(`parts`) / sum(`tokens`) over the last `length` steps, 0 without any; KeyError names a
    metric that is not recorded."""
    def total(metric):
        if not case.window(metric, length):
            raise KeyError(metric)
        return math.fsum(case.window(metric, length).values())

    return sum(map(total, parts)) / max(total(tokens), 1.0)


def _least_active(case):
    """Returns (smallest share of tokens that one method changes in the whole run, its metric); 1 without
    methods."""
    length = max(case.last_step, 1)
    return min(
        ((_share(case, tokens, changed, length), changed[0]) for tokens, changed, _ in _counted(case)),
        default=(1.0, "config/is_corrected"),
    )


def _most_active(case):
    """Returns (largest share of tokens that the bounds of one method change, its metric)."""
    length = case.thresholds["window"]
    return max(
        ((_share(case, tokens, bounded, length), bounded[0]) for tokens, _, bounded in _counted(case)),
        default=(0.0, "config/is_corrected"),
    )


def is_bypass(case: Case) -> bool:
    """Returns whether a log is of verl's bypass mode with a clipped objective: it has weights and a clipped
    share, but no probabilities of an old policy. The weights are only logged there."""
    decoupled = {DP_MEAN, DP_MAX, PEARSON, IS_VALID}
    has_weights = {WEIGHT_MEAN, WEIGHT_MIN, KL, CLIPPED} <= case.series.keys()
    return not case.config and has_weights and not decoupled & case.series.keys()


def _shrinks(case):
    """Returns (factor by which the mean weight makes a step smaller, its name); 1 where the weights are
    divided by their mean, or not used."""
    if CORRECTED in case.unlogged and CORRECTED not in case.series:
        raise KeyError("whether its correction is on, which its record does not tell")
    if NORMALIZED in case.series or is_bypass(case):
        return 1.0, NORMALIZED
    mean = case.mean(WEIGHT_MEAN)
    return 1.0 / mean if mean > 0 else math.inf, "times by which the weights make a step smaller"


def _over_weights(case):
    """Returns (mean weight of single tokens over the recorded mean weight, its name). A token's ratio
    differs from 1 by at most as much as its logarithm from 0, or little more, if it is dropped."""
    if RATIO in case.series:
        tokens, metric = case.mean(RATIO), RATIO
    else:
        tokens, metric = 1.0 - 1.5 * case.mean(ABS_GAP), f"1 - 1.5 {ABS_GAP}"
    mean = case.mean(WEIGHT_MEAN)
    return tokens / mean if mean > 0 else math.inf, f"{metric} by {WEIGHT_MEAN}"


def _zeros(case):
    lows = case.recent(WEIGHT_MIN)
    if len(lows) < case.thresholds["min_steps"]:
        raise KeyError(WEIGHT_MIN)
    return lows.count(0.0) / len(lows), f"steps with a {WEIGHT_MIN} of 0"


FACTS = {
    "run/least_active": _least_active, "run/most_active": _most_active, "run/shrinks": _shrinks,
    "run/over_weights": _over_weights, "run/zeros": _zeros,
}

def _normalized(case):
    """Returns that weights are to be divided by their mean, where `validate` lets them."""
    is_before = case.setting("correction.centre") != "behav"
    return True if is_before and case.setting("correction.centering") == "none" else None


CAUSES = (
    Finding(
        "correction.inactive",
        "a configured correction changed nothing in the whole run, although there is a gap",
        "Tighten its bound, or remove it from the config. The bound is too wide for this gap, or "
        "the correction looks at a quantity that does not differ.",
        all_of=(Clause("run/least_active", "<=", 0),),
        any_of=(
            Clause(KL, ">", "kl_fine", "steady"), Clause(CHI2, ">", "chi2_moderate", "steady"),
        ),
        mistake="assume that a configured correction acts",
    ),
    Finding(
        "shrunk", "the mean weight is far below 1, so every step is much smaller",
        "Weight single tokens or geometric means, which stay near 1. Or divide the weights by "
        "their batch mean, which repairs the step size and not the sample size. A mean weight of "
        "0.04 makes the gradient 25 times smaller, and the few answers with weights near 1 make "
        "all of it.",
        all_of=(
            Clause(WEIGHT_MEAN, "<", "weight_low", "steady", absent=False),
            Clause("run/shrinks", ">", 1),
        ),
        changes={"correction.batch_normalize": _normalized},
        mistake=(
            "raise the learning rate: the first batch with weights of 1 then takes a far too "
            "large step"
        ),
    ),
    Finding(
        "shrunk.product", "the weight is a product over the whole answer",
        "Weight tokens by a truncated ratio. Half a percent per token is a factor of 12 after 500 "
        "tokens, so long answers have almost no weight.",
        any_of=(is_so("config/is_product"), Clause("run/over_weights", ">", 1.5)), parent="shrunk",
    ),
    Finding(
        "shrunk.masked", "a mask sets weights to 0 in most steps",
        "Truncate at the bound in place of the mask. The mask drops the answers with the largest "
        "weights.",
        all_of=(Clause("run/zeros", ">", "taken_most"),), parent="shrunk",
    ),
    Finding(
        "correction.most", "a bound changes more than half of the tokens",
        "Widen the bound, or reduce the gap itself. What is left is a small, selected part of the "
        "batch, or a weight that equals its cap.",
        all_of=(Clause("run/most_active", ">", "taken_most"),),
    ),
)
