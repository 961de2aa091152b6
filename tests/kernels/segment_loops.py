"""Segment operations written as loops over tokens in float64, and batches to try them on."""

from typing import NamedTuple

import numpy as np

SHAPE, NUM_SEGMENTS = (3, 37), 6


class Batch(NamedTuple):
    x: np.ndarray  # NaN at padding
    seg: np.ndarray
    decay: np.ndarray
    weight_bs: np.ndarray  # of the results, to pull back
    weight_bt: np.ndarray


def make(seed, shape=SHAPE, num_segments=NUM_SEGMENTS, is_contiguous=False):
    """A batch with empty segments, padding (ids 0 and beyond the last) and, unless contiguous, ids
    in any order."""
    rng = np.random.default_rng(seed)
    seg = rng.integers(0, num_segments + 2, shape).astype(np.int32)
    seg[seg == 2] = 1  # segment 2 is empty
    if is_contiguous:
        seg = np.sort(np.where(seg > num_segments, 0, seg), axis=1)
        seg = np.roll(seg, 5, axis=1)
    x = rng.normal(size=shape)
    x = np.where((seg >= 1) & (seg <= num_segments), x, np.nan)
    normal = rng.normal(size=shape)
    weight_bs = rng.normal(size=(shape[0], num_segments))
    return Batch(x, seg, rng.uniform(0.2, 1.1, shape), weight_bs, normal)


def log_probs(batch):
    """(logp_old, logp_behav), NaN at padding; one token's gap is beyond the clamp."""
    old, behav = -np.abs(batch.x), -np.abs(batch.x + 0.3 * batch.decay)
    rows, columns = np.nonzero(np.isfinite(old))
    behav[rows[0], columns[0]] -= 30.0
    return old, behav


def reduce(x, seg, num_segments, op, weight_bs):
    """(results [B, S], gradient of sum(weight * results) [B, T])."""
    results, gradient = np.zeros((len(x), num_segments)), np.zeros(x.shape)
    for b in range(len(x)):
        for s in range(num_segments):
            here = seg[b] == s + 1
            values, w = x[b, here], weight_bs[b, s]
            if not len(values):
                results[b, s] = -np.inf if op == "logsumexp" else 0.0
                continue
            if op == "logsumexp":
                results[b, s] = np.log(np.sum(np.exp(values)))
                gradient[b, here] = w * np.exp(values - results[b, s])
                continue
            results[b, s] = len(values) if op == "count" else getattr(np, op)(values)
            is_best = values == results[b, s]
            gradient[b, here] = {
                "sum": w, "mean": w / len(values), "count": 0.0,
                "max": w * is_best / max(np.sum(is_best), 1),
                "min": w * is_best / max(np.sum(is_best), 1),
            }[op]
    return results, gradient


def broadcast(x_bs, seg):
    result = np.zeros(seg.shape)
    for b, t in np.ndindex(seg.shape):
        if 1 <= seg[b, t] <= x_bs.shape[1]:
            result[b, t] = x_bs[b, seg[b, t] - 1]
    return result


def scan(x, seg, op, decay, reverse, weight_bt):
    """(results, gradients of sum(weight * results) with respect to x and to the decay), [B, T]."""
    y, x_bar, decay_bar = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape)
    turn = (lambda a: a[:, ::-1]) if reverse else (lambda a: a)
    x, seg, decay, weight_bt = turn(x), turn(seg), turn(decay), turn(weight_bt)
    for b, t in np.ndindex(x.shape):
        if seg[b, t] == 0:
            continue
        first = t
        while first > 0 and seg[b, first - 1] == seg[b, t]:
            first -= 1
        run = x[b, first : t + 1]
        if op in ("min", "max"):
            best = getattr(np, "arg" + op)(run)
            y[b, t] = run[best]
            x_bar[b, first + best] += weight_bt[b, t]
            continue
        a = decay[b, first : t + 1] if op == "decay" else np.ones(len(run))
        for k in range(len(run)):
            share = np.prod(a[k + 1 :])
            y[b, t] += share * run[k]
            x_bar[b, first + k] += weight_bt[b, t] * share
            for j in range(k + 1, len(run)):
                decay_bar[b, first + j] += weight_bt[b, t] * share / a[j] * run[k]
    return turn(y), turn(x_bar), turn(decay_bar)


def ratio_stats(old, behav, mask, seg, num_segments):
    """{field of RatioStats: [B, S]}."""
    found = {}
    for b, s in np.ndindex(len(old), num_segments):
        here = (seg[b] == s + 1) & mask[b]
        ratio, p, q = old[b, here] - behav[b, here], np.exp(old[b, here]), np.exp(behav[b, here])
        c = np.clip(ratio, -20.0, 20.0)
        values = {
            "count": np.ones_like(c), "log_ratio_sum": ratio, "k1": -c, "k2": c * c / 2,
            "k3": np.expm1(c) - c, "ratio_sum": np.exp(c), "ratio_square_sum": np.exp(c) ** 2,
            "logp_behav_sum": behav[b, here], "dp": np.abs(p - q),
        }
        for name, value in values.items():
            fields = [name] if name.endswith("sum") or name == "count" else [
                f"{name}_sum", f"{name}_max"
            ]
            for field in fields:
                total = np.max(value, initial=-np.inf) if "max" in field else np.sum(value)
                result = found.setdefault(field, np.zeros((len(old), num_segments)))
                result[b, s] = total if len(c) else 0.0
    return found
