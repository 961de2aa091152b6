"""What a record of another framework proves about the correction in it, whatever its config says.

Beside the trees, and from the record alone: that a correction does nothing, that only bounded weights
are looked at, that mass which the sampler cuts off is in the ratio, and that the ratio is of other
weights than those that sampled.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from jaxrl_tis.doctor.asynchrony import MEAN_LAG, lag_correlation
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, DP_MAX, K3, KL, LAG, LENGTH, PEARSON, PPL, Clause, Finding, is_so,
)
from jaxrl_tis.doctor.effects import is_bypass
from jaxrl_tis.doctor.frameworks import (
    ABS_GAP, ABS_GAP_MAX, CORRECTED, DP_MEAN, PPO_MAX, PPO_MIN, RATIO, WEIGHT_MAX, WEIGHT_MEAN,
    WEIGHT_MIN,
)

GAPS = (ABS_GAP, ABS_GAP_MAX, K3, DP_MEAN, DP_MAX, KL)  # all 0 where two programs agree in every bit
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
    """(share of the steps whose largest weight is the largest of the record, the metric); 0 if no two
    of them are the same."""
    values = _all(case, (WEIGHT_MAX,))
    cap = max(values)
    share = sum(_is_same(value, cap) for value in values) / len(values)
    return (share if share * len(values) > 1 else 0.0), f"{WEIGHT_MAX} at {cap:g}"


def _is_same(a, b):
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _recent(case, metric):
    return list(case.window(metric, case.thresholds["surge_steps"]).values())


def _mean_ratio(case):
    """(mean ratio of each of the last surge_steps steps, the mean of all that is due without a filter,
    their metric).

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

    It is of the log-normal ratio of mean 1 with the widest spread that the record allows, and what the
    learner draws of it between the bounds: a mask drops the rest, a cap takes less."""
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
    if K3 in case.series:
        return 4 * case.mean(K3)
    raise KeyError(f"{ABS_GAP} and {ABS_GAP_MAX}, or {K3}, to tell a filter from a bound")


def _is_of_tokens(case):
    """Whether weights are those of single tokens, by what they differ from 1 at most, and on average."""
    if WEIGHT_MIN not in case.series or WEIGHT_MAX not in case.series:
        return True
    lows, highs, means, gaps, largest = (
        case.window(metric, case.thresholds["surge_steps"])
        for metric in (WEIGHT_MIN, WEIGHT_MAX, WEIGHT_MEAN, ABS_GAP, ABS_GAP_MAX)
    )
    steps = [step for step in lows if lows[step] > 0 and step in largest]
    if len(steps) < case.thresholds["min_steps"]:
        return False
    is_within = all(
        -NEAR * largest[step] <= math.log(lows[step]) and math.log(highs[step]) <= NEAR * largest[step]
        for step in steps
    )
    return is_within and 1.0 - statistics.fmean(means.values()) <= statistics.fmean(gaps.values())


def _mass(case):
    """(of each of the last steps what says how much mass is lost, what is due without a filter, its metric):
    the mean ratio; or its logarithm, where a few steps make the mean."""
    means, due, metric = _mean_ratio(case)
    if _in_errors(means, due) > case.thresholds["mean_usable"]:
        return means, due, metric
    logs = _logs_per_token(case)
    is_told = len(logs) >= case.thresholds["min_steps"]
    return (logs, 0.0, f"(log {metric} / {LENGTH} + {K3})") if is_told else (means, due, metric)


def _logs_per_token(case):
    """Returns the logarithm of each step's mean ratio by the mean length, and k3 of a token.

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
    """Returns by how many standard errors the mean ratio is below what is due."""
    found, due, _ = _mass(case)
    lost, error = due - statistics.fmean(found), _standard_error(found)
    return lost / error if error else math.copysign(math.inf, lost)


def _mass_usable(case):
    means, due, _ = _mass(case)
    return _in_errors(means, due)


def _in_errors(found, due):
    """Returns a mean ratio in standard errors. Bounded weights and logarithms are usable as they are."""
    error = _standard_error(found)
    return statistics.fmean(found) / error if error and due == 1.0 else math.inf


def _standard_error(values):
    """Returns that of the mean; NaN where a value is infinite, which `statistics.stdev` refuses."""
    return statistics.stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.nan


def _moving(case):
    for metric in MOVES:
        if metric in case.series:
            return metric
    raise KeyError(" or ".join(MOVES))


def _gap_by_lag(case):
    metric = _moving(case)
    return lag_correlation(case, metric, MEAN_LAG), f"changes of {metric} with those of {MEAN_LAG}"


def _gap_by_period(case):
    """(how often the gap rises within periods, or falls from one to the next, whichever is rarer: of
    the length and beginning for which that is largest; what it is of). Neither noise nor a trend has
    both."""
    metric = _moving(case)
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
            shares[period] = max(shares.get(period, 0.0), min(_share(within), _share(between)))
    period = max(shares, key=shares.get)
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
    "record/gap_by_lag": _gap_by_lag,
    "record/gap_by_period": _gap_by_period,
}

# Findings

DIFFERS = Clause("record/largest_gap", ">", 0)

FINDINGS = (
    Finding(
        "inactive.unrecorded", "nothing in the record compares sampler and learner",
        "The sampler's log-probs were not recorded, or not compared with the learner's: no gap can be "
        "seen, and no weight can correct one.",
        all_of=(Clause("record/gaps", "<=", 0),),
        mistake="taking a record without a gap for a run without one",
    ),
    Finding(
        "inactive.copied", "sampler and learner agree in every bit, in every step",
        "Two programs do not. The old log-probs are the sampler's, or the sampler's are the old ones, "
        "so that any ratio of the two is 1.",
        all_of=(Clause("record/largest_gap", "<=", 0),),
    ),
    Finding(
        "inactive.ones", "every weight is 1, in every step",
        "The correction changes nothing: it is off, or its weights were made of one policy twice.",
        all_of=(Clause("record/weight_spread", "<=", SAME),),
        mistake="taking a weight that is logged for one that acts",
    ),
    Finding(
        "inactive.uncorrected", "a gap is measured, and nothing corrects it",
        "Fine below kl_bug and chi2_moderate; above, weigh or reject.",
        all_of=(is_so("record/is_uncorrected"), DIFFERS), unless_known=("inactive.ones",),
    ),
    Finding(
        "inactive.trust_region", "the clipped ratio is 1 for every token, in every step",
        "As it is with one update per batch; with more, the old log-probs are those of the learner as "
        "it is, and the trust region never acts.",
        all_of=(Clause("record/ppo_spread", "<=", SAME),),
    ),
    Finding(
        "blind", "weights are judged after their bounds alone",
        "Their mean, extremes and sample size cannot show what the bounds cut off. Log what the ratio "
        "is before: chi2, a sample size, a largest value. exp of the largest log-ratio of a token is "
        "one, where that is recorded.",
        all_of=(Clause("record/weights", ">", 0), Clause("record/tails", "<=", 0)),
        mistake="reading a bounded maximum as a small gap",
    ),
    Finding(
        "blind.cap", "and in most steps the largest weight stands at its bound",
        "The ratios are larger than it, by how much is not recorded.",
        all_of=(Clause("record/at_cap", ">", "taken_most"),), parent="blind",
    ),
    Finding(
        "mass", "the mean ratio is below what is due without a filter: kept mass is inside it",
        "Under the sampler's own distribution the ratio's mean is the mass that the sampler could draw "
        "from: 1, but for top-p, top-k or min-p whose log-probs are renormalised while the learner's "
        "are not, or log-probs that are not those of the draw. Sample without filters, or let the learner "
        "renormalise over the same tokens.",
        all_of=(
            Clause("record/lost_mass", ">", "mass_lost"), Clause("record/mass_sigma", ">", "mass_sigma"),
            Clause("record/mass_usable", ">", "mean_usable"),
        ),
        mistake="correcting for it with the weight, which is smaller than 1 for every token alike",
    ),
    Finding(
        "weights.lag", "the gap grows with the lag: the ratio is of newer weights than those that sampled",
        "Staleness and the engine's gap are in one number, and a bound for one cuts the other. Keep "
        "the weights that sampled for the old log-probs, or the sampler's own, and clip around the "
        "policy of the update (arXiv:2505.24298).",
        all_of=(
            Clause(LAG, ">", 0, absent=False), Clause("record/gap_by_lag", ">", "lag_correlation"),
        ),
        mistake="lowering the precision gap of an engine that is not at fault",
    ),
    Finding(
        "weights.sync", "the gap rises step by step and falls again, as weights are synced",
        "The old log-probs are of newer weights than those that sampled until the next weight sync. "
        "Sync weights at every step, or keep those that sampled for the old log-probs.",
        all_of=(Clause("record/gap_by_period", ">=", "sync_share"),),
        mistake="lowering the precision gap of an engine that is not at fault",
    ),
)
# Of one framework alone.
OWN = {
    "verl": (
        Finding(
            "inactive.bypass", "weights are computed, and not used: bypass mode with a clipped objective",
            "In bypass mode the clipped ratio holds the whole gap, and with loss_type=ppo_clip the "
            "weights are for the log alone. Decoupled mode, or loss_type=reinforce, uses them.",
            all_of=(is_so("record/is_bypass"),),
        ),
        Finding(
            "shrunk.verl", "in verl's terms",
            "algorithm.rollout_correction.rollout_is=token, or rollout_is_batch_normalize=True beside "
            "it; rollout_rs=seq_mean_k1 rejects answers by their geometric mean.",
            parent="shrunk",
        ),
    ),
    "trl": (
        Finding(
            "shrunk.trl", "in TRL's terms",
            'GRPOConfig(vllm_importance_sampling_mode="token_truncate"); the default, sequence_mask, is '
            "the product over an answer, and 0 above vllm_importance_sampling_clip_max=3.0.",
            parent="shrunk",
        ),
    ),
    "slime": (
        Finding(
            "shrunk.slime", "in slime's terms",
            "In the yaml of examples/train_infer_mismatch_helper: tis_level: token, or geometric, and "
            "tis_batch_normalize: true.",
            parent="shrunk",
        ),
    ),
}
