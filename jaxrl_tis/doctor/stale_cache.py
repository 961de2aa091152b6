"""Facts and findings about an engine of others whose prefix cache keeps keys of older weights.

After a sync the cached part of a prompt still has the keys and values of the weights that read it.
The gap is then the distance of the policy from those weights. It grows from sync to sync, at every
entropy of a token, although consecutive policies stay equally far apart. It grows most in the first
tokens of a response, which attend to the prompt most, and a restart of the engine ends it. The
samples change, because the engine has the new weights.

The record is judged in its longest stretch between two restarts.
"""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from jaxrl_tis.doctor.asynchrony import STALENESS_GAP
from jaxrl_tis.doctor.case import LAG, Clause, Finding, is_so
from jaxrl_tis.doctor.corrections import MOVES, moving
from jaxrl_tis.doctor.frozen import (
    BLOCKS, SAMPLES, blocks, lag_grown, nats, rank_correlation, samples_move,
)

# Of consecutive policies, and the size of an update.
STEPS = (STALENESS_GAP, "mismatch/trust_region/log_ratio_abs_mean", "actor/lr")
GAP, SHARE = "log_ratio_abs_mean", "token_fraction"
PROFILE = re.compile(rf"mismatch/(entropy|position)_([0-9.]+)/({GAP}|{SHARE})")
NEAR = 5  # values on each side of a fall, whose medians are compared
LEAST = 8  # first position of the last tokens of a response, at least

Part = tuple[float, float]  # mean |log ratio| of tokens, and their share


def _has_others_engine(case):
    """Returns whether another project's engine samples: ours clears its cache at each sync."""
    try:
        return case.setting("rollout.driver") == "external"
    except KeyError:  # no config, or one written by code without this field
        return False


def _ratio(a, b):
    return a / b if b else math.inf if a else 1.0


def _falls(values: Sequence[float], left: float) -> dict[int, float]:
    """Returns {place: times by which the gap is smaller from there on} of the places where it falls to
    at most `left` times its start, and no less than at the places near them."""
    factors = {}
    for i in range(NEAR, len(values) - NEAR + 1):
        before, after = (statistics.median(x) for x in (values[i - NEAR : i], values[i : i + NEAR]))
        if after <= left * statistics.median(values[:NEAR]):
            factors[i] = _ratio(before, after)
    near = lambda i: (factors.get(j, 0.0) for j in range(i - NEAR, i + NEAR + 1))
    return {i: factor for i, factor in factors.items() if factor >= max(near(i))}


def _restarts(case):
    """Returns (steps of the gap's record, {place: factor} of the falls that show a restart). KeyError
    for an engine of ours, of which nothing is asked."""
    if not _has_others_engine(case):
        raise KeyError("an engine of others")
    series = sorted(case.series[moving(case)].items())
    falls = _falls([abs(x) for _, x in series], case.thresholds["cache_left"])
    least = case.thresholds["cache_fall"]
    return [step for step, _ in series], {i: x for i, x in falls.items() if x >= least}


def _stretch(case):
    """Returns the case with the steps of the longest stretch between two restarts, without those so
    near to one that noise may put them on its other side."""
    steps, falls = _restarts(case)
    edges, margin = [0, *sorted(falls), len(steps)], NEAR // 2
    start, end = max(itertools.pairwise(edges), key=lambda pair: pair[1] - pair[0])
    start, end = start + margin * (start > 0), end - margin * (end < len(steps))
    kept = frozenset(steps[start:end])
    is_read = lambda name: name in (*MOVES, *STEPS, *SAMPLES, LAG) or PROFILE.fullmatch(name)
    series = {
        name: {step: x for step, x in values.items() if step in kept}
        for name, values in case.series.items() if is_read(name)
    }
    return dataclasses.replace(case, series=series)


# Facts


def _restart(case):
    factors = _restarts(case)[1].values()
    return max(factors, default=0.0), f"{moving(case)}, before a restart by after it"


def _gap_by_steps(case):
    metric = moving(case)
    gap = [abs(x) for x in blocks(_stretch(case), metric)]
    return rank_correlation(gap, range(BLOCKS)), f"rank correlation of {metric} with the steps"


def _gap_grown(case):
    first, *_, last = (abs(x) for x in blocks(_stretch(case), moving(case)))
    return _ratio(last, first), f"{moving(case)}, last tenth of the stretch by the first"


def _policies_grown(case):
    """Returns (largest growth of a distance of consecutive policies, its name)."""
    stretch, found = _stretch(case), [(1.0, "distance of consecutive policies")]
    for metric in STEPS:
        if metric in stretch.series:
            first, *_, last = blocks(stretch, metric)
            found.append((_ratio(last, first), f"{metric}, last tenth of the stretch by the first"))
    return max(found)


def _profile(case, kind: str) -> dict[float, list[Part]]:
    """Returns {first member: parts at the steps that record them} of the buckets of a kind, within the
    stretch. KeyError without two such steps."""
    stretch, found = _stretch(case), {}
    for metric in sorted(stretch.series):
        match = PROFILE.fullmatch(metric)
        if match is None or match[1] != kind or match[3] != GAP:
            continue
        gaps = stretch.series[metric]
        shares = stretch.series.get(metric.removesuffix(GAP) + SHARE, {})
        found[float(match[2])] = [(gaps[s], shares[s]) for s in sorted(gaps.keys() & shares.keys())]
    if min(map(len, found.values()), default=0) < 2:
        raise KeyError(
            f"two values of the gap by {kind}, which metrics.record full has every "
            "metrics.diagnostics_every steps"
        )
    return found


def _mean(parts: Sequence[Part]) -> float:
    """Returns the mean gap of all tokens of the parts; 0 without any."""
    tokens = math.fsum(share for _, share in parts)
    return math.fsum(gap * share for gap, share in parts) / tokens if tokens else 0.0


def _ends(parts: Sequence[Part]) -> tuple[Sequence[Part], Sequence[Part]]:
    """Returns the first and the last sixth."""
    count = max(len(parts) // 6, 1)
    return parts[:count], parts[-count:]


def _grown(parts: Sequence[Part]) -> float:
    """Returns the growth of the gap from the first sixth of the parts to the last."""
    first, last = map(_mean, _ends(parts))
    return _ratio(last, first)


def _with_enough(case, profile: Mapping[float, list[Part]]) -> list[float]:
    """Returns the buckets with enough tokens at both ends of the stretch."""
    mean_share = lambda parts: math.fsum(share for _, share in parts) / len(parts)
    least = case.thresholds["depth_share"]
    return [at for at, parts in profile.items() if min(map(mean_share, _ends(parts))) >= least]


def _every_entropy(case):
    """Returns (smallest growth of the gap over the buckets of entropy, its name). A gap that grows
    with the entropy alone does not grow within one."""
    profile = _profile(case, "entropy")
    growth = {start: _grown(profile[start]) for start in _with_enough(case, profile)}
    start = min(growth, key=lambda x: growth[x])
    return growth[start], f"growth of the gap of tokens from {start:g} nats of entropy on"


def _first_tokens(case):
    """Returns (growth of the gap of a response's first tokens over that of its last ones, its name).

    A gap of precision grows in both alike. 0 where responses are too short, and where the ratio of
    the two gaps does not rise with the steps: then chance can produce the growth.
    """
    profile = _profile(case, "position")
    last = max(_with_enough(case, profile), default=0)
    early = [parts for start, parts in profile.items() if start < last / 8]
    if last < LEAST or not early:
        return 0.0, "growth of the gap by position"
    first = [(_mean(parts), 1.0) for parts in zip(*early, strict=False)]
    grown = _ratio(_grown(first), _grown(profile[last]))
    ratios = [_ratio(a, b) for (a, _), (b, _) in zip(first, profile[last], strict=False)]
    is_rising = rank_correlation(ratios, range(len(ratios))) >= case.thresholds["cache_order"]
    name = f"growth of the gap before position {last / 8:g} by that from {last:g} on"
    return (grown if is_rising else 0.0), name


FACTS = {
    "config/has_others_engine": _has_others_engine,
    "cache/restart": _restart,
    "cache/gap_by_steps": _gap_by_steps,
    "cache/gap_grown": _gap_grown,
    "cache/gap_nats": lambda case: (nats(_stretch(case))[-1], "the gap in the last tenth, nats"),
    "cache/policies_grown": _policies_grown,
    "cache/lag_grown": lambda case: lag_grown(_stretch(case)),
    "cache/samples_move": lambda case: samples_move(_stretch(case)),
    "cache/every_entropy": _every_entropy,
    "cache/first_tokens": _first_tokens,
}

CAUSES = (
    Finding(
        "stale_cache", "the engine's prefix cache keeps keys of older weights through weight syncs",
        "Clear the prefix cache after each sync: vLLM POST /reset_prefix_cache with "
        "reset_running_requests=true, SGLang /flush_cache. The gap grows from sync to sync, although "
        "consecutive policies stay equally far apart. A restart of the engine clears the cache once. "
        "The canary of rollout.driver external finds such keys after the next sync, if gate.max_d_p99 "
        "and gate.max_dp_max are just above the gap of an engine that has just started.",
        all_of=(
            is_so("config/has_others_engine"),
            Clause("cache/gap_by_steps", ">=", "frozen_correlation"),
            Clause("cache/gap_grown", ">=", "frozen_rise"),
            Clause("cache/gap_nats", ">", "frozen_kl"),
            Clause("cache/policies_grown", "<", "policies_grown"),
            Clause("cache/lag_grown", "<", "lag_grown"),
            Clause("record/gap_follows_lag", "<=", "lag_correlation"),
            Clause("cache/samples_move", ">=", "samples_move"),
            Clause("cache/every_entropy", ">=", "cache_alike"),
        ),
        any_of=(
            Clause("cache/restart", ">=", "cache_fall"),
            Clause("cache/first_tokens", ">=", "cache_first"),
        ),
        unless_known=("frozen",),
        mistake="lower the precision gap, or the staleness: the weights are fresh, the keys are not",
    ),
)
