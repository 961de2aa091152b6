"""Finds faults of another framework's correction in its log, without its config.

The log alone can show that a correction does nothing, that weights are logged only after their bounds,
that a filter of the sampler is inside the ratio, and that the ratio uses other weights than those that
sampled.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from jaxrl_tis.doctor.asynchrony import MEAN_LAG, lag_correlation
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, DP_MAX, K3, KL, LAG, LENGTH, PEARSON, PPL, Case, Clause, Finding, is_so,
)
from jaxrl_tis.doctor.effects import is_bypass
from jaxrl_tis.doctor.frameworks import (
    ABS_GAP, ABS_GAP_MAX, CORRECTED, DP_MEAN, PPO_MAX, PPO_MIN, RATIO, WEIGHT_MAX, WEIGHT_MEAN,
    WEIGHT_MIN,
)

GAPS = (ABS_GAP, ABS_GAP_MAX, K3, DP_MEAN, DP_MAX, KL)  # all 0 where two programs agree in every bit
CALM = ("healthy", "watch")  # verdicts that say that nothing is wrong
# With one of these no log has such a verdict, however small its gap.
FAULTS = ("inactive.copied", "inactive.ones", "inactive.bypass", "mass", "weights.lag", "weights.sync")
MOVES = (ABS_GAP, K3, DP_MEAN, KL)  # in this order: what grows with the distance of two policies
NEAR = 1.05  # of means over steps, that of logarithms may be this much off (ours)
SAME = 1e-6  # what float32 leaves of a difference of 0 (ours)
PERIODS = 4  # fewest that show one (ours)

# Facts


def _all(case, metrics):
    """Returns every value of the metrics that are recorded; KeyError without enough of them."""
    series = [list(case.series[m].values()) for m in metrics if m in case.series]
    if not series:
        raise KeyError(" or ".join(metrics))
    _enough(case, max(map(len, series)), "steps")
    return [value for values in series for value in values]


def _enough(case, number, what):
    if number < case.thresholds["min_steps"]:
        raise KeyError(f"{case.thresholds['min_steps']:g} {what}, there are {number}")


def _gaps(case):
    _enough(case, case.last_step, "steps")
    known = case.series.keys() | case.unlogged  # what is logged as NaN compares them, too
    return float(sum(metric in known for metric in (*GAPS, PEARSON, PPL, CHI2)))


def _weight_spread(case):
    """Returns the largest distance of a weight from 1 in the whole record."""
    weights = [WEIGHT_MEAN, WEIGHT_MIN, WEIGHT_MAX]
    weights += [RATIO] if CORRECTED in case.series else []  # else of a ratio that weighs nothing
    return max(abs(value - 1.0) for value in _all(case, weights))


def _is_uncorrected(case):
    if CORRECTED in case.unlogged:
        raise KeyError("whether its correction is on, which its record does not tell")
    return CORRECTED not in case.series


def _at_cap(case):
    """Returns (share of the steps whose largest weight is the largest of the record, the metric); 0 if no
    two of them are equal."""
    values = _all(case, (WEIGHT_MAX,))
    cap = max(values)
    share = sum(_is_same(value, cap) for value in values) / len(values)
    return (share if share * len(values) > 1 else 0.0), f"{WEIGHT_MAX} at {cap:g}"


def _is_same(a, b):
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _recent(case, metric):
    return list(case.window(metric, case.thresholds["surge_steps"]).values())


def _mean_ratio(case):
    """Returns (mean ratio of each of the last surge_steps steps, its expected mean without a filter, the
    metric).

    A ratio that is recorded for a part of the steps alone, those without a weight at a bound, is not
    used: of ratios that spread widely, such steps have the smaller ones."""
    means, weights = _recent(case, RATIO), _recent(case, WEIGHT_MEAN)
    due, metric = 1.0, RATIO
    if len(means) < len(weights):
        means, due, metric = weights, _due_of_bounded(case), f"{WEIGHT_MEAN}, after bounds"
    if not means:
        raise KeyError(f"{RATIO}, before any bound")
    _enough(case, len(means), f"values of {metric}")
    if len(means) < 2:
        raise KeyError(f"2 values of {metric}, there are {len(means)}")
    return means, due, metric


def _due_of_bounded(case):
    """Returns the least mean that bounded weights have without a filter.

    Takes the log-normal ratio of mean 1 with the widest spread that the record allows, and the learner's
    mass of it between the bounds: a mask drops the rest, a cap less."""
    variance, cap = _log_variance(case), math.log(_cap(case))
    if variance == 0:
        return 1.0
    ratio = statistics.NormalDist(variance / 2, math.sqrt(variance))  # its logarithm, of the learner
    lows = _recent(case, WEIGHT_MIN)
    may_drop_low = not lows or min(lows) == 0
    return ratio.cdf(cap) - (ratio.cdf(-cap) if may_drop_low else 0.0)


def _cap(case):
    """Returns the largest weight of the record; cap_usual, if that is larger and no bound is seen."""
    lows, highs = (_recent(case, metric) for metric in (WEIGHT_MIN, WEIGHT_MAX))
    cap = max(highs, default=0.0)
    is_seen = 0.0 in lows or sum(_is_same(high, cap) for high in highs) > 1
    return cap if is_seen and cap >= 1 else max(cap, case.thresholds["cap_usual"])


def _log_variance(case):
    """Returns a bound on the variance of a weight's log-ratio. Of a token it is at most the mean
    |log-ratio| times the largest, and half of that unless the two are of the same tokens; or twice as
    much as k3 says. Of a product of independent tokens it is that times the length."""
    gaps, largest = _recent(case, ABS_GAP), _recent(case, ABS_GAP_MAX)
    if gaps and largest:
        of_token = statistics.fmean(gaps) * statistics.fmean(largest) / 2
        return of_token if _is_of_tokens(case) else of_token * case.mean(LENGTH)
    if K3 in case.series and (k3 := case.mean(K3)) >= 0:
        return 4 * k3
    raise KeyError(f"{ABS_GAP} and {ABS_GAP_MAX}, or {K3}, to tell a filter from a bound")


def _is_of_tokens(case):
    """Returns whether weights are of single tokens, by their largest and mean distance from 1."""
    if WEIGHT_MIN not in case.series or WEIGHT_MAX not in case.series:
        return True
    lows, highs, means, gaps, largest = (
        case.window(metric, case.thresholds["surge_steps"])
        for metric in (WEIGHT_MIN, WEIGHT_MAX, WEIGHT_MEAN, ABS_GAP, ABS_GAP_MAX)
    )
    steps = [step for step in lows if lows[step] > 0 and step in highs and step in largest]
    if len(steps) < case.thresholds["min_steps"]:
        return False
    is_within = all(
        -NEAR * largest[step] <= math.log(lows[step]) and math.log(highs[step]) <= NEAR * largest[step]
        for step in steps
    )
    return is_within and 1.0 - statistics.fmean(means.values()) <= statistics.fmean(gaps.values())


def _mass(case):
    """Returns (the quantity of each of the last steps that shows lost mass, its expected mean without a
    filter, its name): the mean ratio, or its logarithm where a few steps dominate the mean."""
    means, due, metric = _mean_ratio(case)
    if _in_errors(means, due) > case.thresholds["mean_usable"]:
        return means, due, metric
    logs = _logs_per_token(case)
    is_told = len(logs) >= max(case.thresholds["min_steps"], 2)
    return (logs, 0.0, f"(log {metric} / {LENGTH} + {K3})") if is_told else (means, due, metric)


def _logs_per_token(case):
    """Returns log(mean ratio) / mean length + k3 of each step.

    The logarithm of a mean is at least the mean logarithm: of the products of whole answers -k1 times the
    length. Without a filter k1 and k3 have the same mean. So the sum is at least 0 on average, however far
    products spread, and below 0 by no more than the mass that is lost for each token."""
    ratios, lengths, k3 = (
        case.window(metric, case.thresholds["surge_steps"]) for metric in (RATIO, LENGTH, K3)
    )
    steps = [step for step in ratios if ratios[step] > 0 and lengths.get(step, 0) > 0 and step in k3]
    return [math.log(ratios[step]) / lengths[step] + k3[step] for step in steps]


def _lost_mass(case):
    means, due, metric = _mass(case)
    return due - statistics.fmean(means), f"{due:.4g} - {metric}"


def _mass_sigma(case):
    """Returns how far the mean ratio is below its expected mean, in standard errors."""
    found, due, _ = _mass(case)
    lost, error = due - statistics.fmean(found), _standard_error(found)
    return lost / error if error else math.copysign(math.inf, lost)


def _mass_usable(case):
    means, due, _ = _mass(case)
    return _in_errors(means, due)


def _mass_gap(case):
    """Returns (the mean gap of a token in nats, its metric). The gap of a filter is -log of the mass that
    it keeps. A much larger one has another cause, and the sample has no part of the mean ratio's tail."""
    for metric in (KL, K3, ABS_GAP):
        if values := _recent(case, metric):
            return abs(statistics.fmean(values)), metric
    raise KeyError(f"{KL}, {K3} or {ABS_GAP}, to tell a filter from a wide gap")


def _in_errors(found, due):
    """Returns a mean ratio in standard errors. Bounded weights and logarithms are usable as they are."""
    error = _standard_error(found)
    return statistics.fmean(found) / error if error and due == 1.0 else math.inf


def _standard_error(values):
    """Returns the standard error of the mean; NaN with an infinite value, which `statistics.stdev` refuses."""
    return statistics.stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.nan


def moving(case: Case) -> str:
    """Returns the metric of the gap that grows with the distance of two policies."""
    for metric in MOVES:
        if metric in case.series:
            return metric
    raise KeyError(" or ".join(MOVES))


def _gap_by_lag(case):
    metric = moving(case)
    return lag_correlation(case, metric, MEAN_LAG), f"changes of {metric} with those of {MEAN_LAG}"


def _gap_by_period(case):
    """Returns (share of the steps that fit a period: rises within, falls from one period to the next, the
    smaller of the two, for the best length and start; its name). Neither noise nor a trend has both."""
    metric = moving(case)
    values = case.window(metric, case.thresholds["surge_steps"])
    steps = sorted(values)
    needed = max(case.thresholds["window"], 2 * PERIODS)
    if len(steps) < needed:
        raise KeyError(f"{needed:g} values of {metric}, there are {len(steps)}")
    rises = [(b, values[b] > values[a]) for a, b in itertools.pairwise(steps)]
    shares = {}
    for period in range(2, len(steps) // PERIODS + 1):
        for start in range(period):
            within = [rise for step, rise in rises if (step - start) % period]
            between = [not rise for step, rise in rises if (step - start) % period == 0]
            if within and between:
                shares[period] = max(shares.get(period, 0.0), min(_share(within), _share(between)))
    if not shares:
        raise KeyError(f"values of {metric} at neighbouring steps")
    period = max(shares, key=lambda p: shares[p])
    return shares[period], f"{metric} rises within, and falls after, periods of {period} steps"


def _share(answers: Sequence[bool]) -> float:
    return sum(answers) / len(answers)


FACTS = {
    "record/gaps": _gaps,
    "record/largest_gap": lambda case: max(map(abs, _all(case, GAPS))),
    "record/weight_spread": _weight_spread,
    "record/is_uncorrected": _is_uncorrected,
    "record/is_bypass": is_bypass,
    "record/ppo_spread": lambda case: max(abs(x - 1) for x in _all(case, (PPO_MIN, PPO_MAX))),
    "record/weights": lambda case: float(any(m in case.series for m in (WEIGHT_MEAN, WEIGHT_MAX))),
    "record/tails": lambda case: float(sum(m in case.series for m in (CHI2, CHI2_SEQ))),
    "record/at_cap": _at_cap,
    "record/lost_mass": _lost_mass,
    "record/mass_sigma": _mass_sigma,
    "record/mass_usable": _mass_usable,
    "record/mass_gap": _mass_gap,
    "record/gap_by_lag": _gap_by_lag,
    "record/gap_by_period": _gap_by_period,
}

# Findings

DIFFERS = Clause("record/largest_gap", ">", 0)

MASS = Finding(
    "mass", "the mean ratio is too small: a filter of the sampler is inside it",
    "Sample without top-p, top-k and min-p, or let the learner renormalise over the same "
    "tokens. Without a filter the mean ratio over the sampler's tokens is 1. It is smaller "
    "when a filter renormalises the sampler's log-probs alone, or when the log-probs are not "
    "those of the sampled distribution.",
    all_of=(
        Clause("record/lost_mass", ">", "mass_lost"), Clause("record/mass_sigma", ">", "mass_sigma"),
        Clause("record/mass_usable", ">", "mean_usable"),
        Clause("record/mass_gap", "<=", "mass_gap"),
    ),
    mistake="correct this with the weight: it is below 1 for every token alike",
)
FINDINGS = (
    Finding(
        "inactive.unrecorded", "no metric compares sampler and learner",
        "Record the sampler's log-probs and compare them with the learner's. Until then no gap "
        "can be seen, and no weight can correct one.",
        all_of=(Clause("record/gaps", "<=", 0),),
        mistake="read a log without a metric of the gap as a run without a gap",
    ),
    Finding(
        "inactive.copied", "sampler and learner agree exactly in every step",
        "Check where both log-probs come from. Two programs never agree in every bit, so one was "
        "copied from the other, and every ratio is 1.",
        all_of=(Clause("record/largest_gap", "<=", 0),),
    ),
    Finding(
        "inactive.ones", "every weight is 1 in every step",
        "Check that the correction is on, and that its weights compare two different policies. "
        "Now it changes nothing.",
        all_of=(Clause("record/weight_spread", "<=", SAME),),
        mistake="assume that a logged weight acts",
    ),
    Finding(
        "inactive.uncorrected", "a gap is measured, and nothing corrects it",
        "Add weights or rejection, unless the gap is below the thresholds of A and C.",
        all_of=(is_so("record/is_uncorrected"), DIFFERS), unless_known=("inactive.ones",),
    ),
    Finding(
        "inactive.trust_region", "the clipped ratio is 1 for every token in every step",
        "With one update per batch this is normal. With more updates, check the old log-probs: "
        "they are those of the current learner, and the trust region never acts.",
        all_of=(Clause("record/ppo_spread", "<=", SAME),),
    ),
    Finding(
        "blind", "weights are logged only after their bounds",
        "Log the ratio before its bounds: chi2, a sample size or a largest value. After the "
        "bounds, the mean, the extremes and the sample size do not show what was cut off. The "
        "exponential of a token's largest log-ratio serves, too, where it is logged.",
        all_of=(Clause("record/weights", ">", 0), Clause("record/tails", "<=", 0)),
        mistake="read a bounded maximum as a small gap",
    ),
    Finding(
        "blind.cap", "in most steps the largest weight is at its bound",
        "Log the largest ratio before the bound. The true ratios are larger by an unknown factor.",
        all_of=(Clause("record/at_cap", ">", "taken_most"),), parent="blind",
    ),
    MASS,
    Finding(
        "weights.lag",
        "the gap grows with the lag: the ratio uses newer weights than those that sampled",
        "Keep the weights that sampled for the old log-probs, or use the sampler's own log-probs, "
        "and clip around the policy of the update (arXiv:2505.24298). Now staleness and the "
        "engine's gap are one number, and a bound for one cuts the other.",
        all_of=(
            Clause(LAG, ">", 0, absent=False), Clause("record/gap_by_lag", ">", "lag_correlation"),
        ),
        mistake="lower the precision gap: the engine is not at fault",
    ),
    Finding(
        "weights.sync", "the gap grows from step to step and falls at each weight sync",
        "Sync weights at every step, or keep the weights that sampled for the old log-probs. "
        "Between two syncs the old log-probs come from newer weights than those that sampled.",
        all_of=(Clause("record/gap_by_period", ">=", "sync_share"),),
        mistake="lower the precision gap: the engine is not at fault",
    ),
)
# Of one framework alone.
OWN = {
    "verl": (
        Finding(
            "inactive.bypass",
            "weights are computed but not used: bypass mode with a clipped objective",
            "Use decoupled mode, or loss_type=reinforce. With loss_type=ppo_clip the clipped "
            "ratio contains the whole gap, and the weights are only logged.",
            all_of=(is_so("record/is_bypass"),),
        ),
        Finding(
            "shrunk.verl", "settings of verl",
            "Set algorithm.rollout_correction.rollout_is=token, or add "
            "rollout_is_batch_normalize=True. rollout_rs=seq_mean_k1 rejects answers by their "
            "geometric mean.",
            parent="shrunk",
        ),
    ),
    "trl": (
        Finding(
            "shrunk.trl", "settings of TRL",
            'Set GRPOConfig(vllm_importance_sampling_mode="token_truncate"). The default, '
            'sequence_mask, uses the product over an answer and sets it to 0 above '
            'vllm_importance_sampling_clip_max=3.0.',
            parent="shrunk",
        ),
    ),
    "slime": (
        Finding(
            "shrunk.slime", "settings of slime",
            "In the yaml of examples/train_infer_mismatch_helper, set tis_level: token (or "
            "geometric) and tis_batch_normalize: true.",
            parent="shrunk",
        ),
    ),
}
