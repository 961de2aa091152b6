"""Facts and findings about a gap that grows with the depth of the context.

Positions are in buckets 0, 1, 2-3, 4-7, ...: of the context where a dump has shallow and deep ones,
else of the response. The deep tokens are those of the last octave that has enough tokens, the shallow
ones those before an eighth of its start.
"""

import math
import re

from jaxrl_tis.doctor.case import Case, Clause, Finding

GAP = "log_ratio_abs_mean"
KINDS = ("context", "position")
NAME = re.compile(rf"mismatch/({'|'.join(KINDS)})_([0-9]+)/{GAP}")


def _buckets(case: Case) -> dict[str, dict[int, tuple[float, float]]]:
    """Returns kind -> first position -> (mean |log ratio|, share of the tokens) of the buckets with tokens,
    each the mean over the judged window."""
    found: dict[str, dict[int, tuple[float, float]]] = {kind: {} for kind in KINDS}
    for metric in case.series:
        if match := NAME.fullmatch(metric):
            kind, start = match.groups()
            share = metric.removesuffix(GAP) + "token_fraction"
            length = case.thresholds["window"] * case.interval(share)
            gaps, shares = (case.window(name, length) for name in (metric, share))
            both = gaps.keys() & shares.keys()  # a gap can be NaN, which no series has
            if tokens := math.fsum(shares[step] for step in both):
                mean = math.fsum(gaps[step] * shares[step] for step in both) / tokens
                found[kind][int(start)] = mean, math.fsum(shares.values()) / len(shares)
    return found


def _by_depth(case: Case) -> tuple[float, float, int]:
    """Returns (gap of the deep tokens, gap of the shallow ones, first deep position) by the first kind that
    has both; zeros where none has."""
    for buckets in _buckets(case).values():
        enough = [n for n, (_, share) in buckets.items() if share >= case.thresholds["depth_share"]]
        start = max(enough, default=0)
        shallow = [buckets[n] for n in buckets if n < start / 8]
        tokens = math.fsum(share for _, share in shallow)
        if start >= case.thresholds["depth_least"] and tokens:
            mean = math.fsum(gap * share for gap, share in shallow) / tokens
            return buckets[start][0], mean, start
    return 0.0, 0.0, 0


def _deep_gap(case):
    deep, _, start = _by_depth(case)
    return deep, f"mean |log ratio| from position {start} on, nats"


def _rise(case):
    deep, shallow, start = _by_depth(case)
    rise = deep / shallow if shallow else math.inf if deep else 0.0
    return rise, f"by that before position {start // 8}"


FACTS = {"record/deep_gap": _deep_gap, "record/gap_by_depth": _rise}

CAUSES = (
    Finding(
        "depth", "the gap grows with the depth of the context",
        "Score one long text with sampler and learner, and look where they part. Usual causes: "
        "rotary embeddings with another scaling or original length, an attention window or block "
        "limit of one kernel, chunked prefill, an 8-bit cache, context parallelism. Short probes "
        "and means over all tokens hide such a fault.",
        all_of=(
            Clause("record/deep_gap", ">", "depth_gap"), Clause("record/gap_by_depth", ">=", "depth_rise"),
        ),
        mistake="take the mean over all tokens as the gap of long answers",
    ),
)
