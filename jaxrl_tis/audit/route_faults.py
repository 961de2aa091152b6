"""Finds faults in the recorded routes of one side: rows that are missing, padding or repeated.

A fault is {"name", "title", "advice"}. No fault is reported that chance may produce: each test has
a bound on the probability that it holds without a fault, CHANCE for the whole dump. `route_pairs`
finds the faults that a comparison of two sides shows.
"""

import math
from typing import Any

import numpy as np

CHANCE = 1e-3

Fault = dict[str, str]


def fault(name: str, title: str, advice: str) -> Fault:
    """Returns a fault of records of routes."""
    return {"name": f"routes.{name}", "title": title, "advice": advice}


def share(count: int, total: int, what: str) -> str:
    """Returns "1 of 2 rows"."""
    return f"{count:,} of {total:,} {what}"


# Padding


def is_zero(ids: np.ndarray, is_there: np.ndarray) -> np.ndarray:
    """Whether a row [M,L,k] sends a token to expert 0 alone. All False where routers with k = 1 may do
    so by chance: each as often as it takes its favourite expert in the other rows."""
    zero = (ids == 0).all(axis=(1, 2)) & is_there
    if ids.shape[2] == 1 and zero.any():
        rest = ids[is_there & ~zero]
        favourite = [np.unique(x, return_counts=True)[1].max() / len(x) for x in rest[..., 0].T if len(x)]
        if len(ids) * math.prod(favourite) > CHANCE:
            return np.zeros(len(ids), bool)
    return zero


def is_arange(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Whether a row has the ids 0, 1, 2, ... modulo E of padding that is spread over the experts. All
    False where routers may choose them by chance."""
    num_layers, num_chosen = ids.shape[1:]
    ordered = math.perm(num_experts, num_chosen)  # ways to choose, of which E are in this order
    if not ordered or len(ids) * (num_experts / ordered) ** num_layers > CHANCE:
        return np.zeros(len(ids), bool)
    return ((ids[..., 1:] - ids[..., :-1]) % num_experts == 1).all(axis=(1, 2))


# One side


def of_side(side: Any, layout: Any, num_experts: int | None) -> list[Fault]:
    """Returns the faults that one side shows alone, but for repeated rows. Arguments: see `routes`."""
    tests = _counts, _tails, _missing, _zeros, _aranges, _ranges, _duplicates
    return [found for test in tests for found in test(side, layout, num_experts)]


def _counts(side, layout, _):
    """Sequences without any route, and with fewer than n - 1 rows."""
    is_wanted = layout.num_tokens > 1
    ends = np.array([r.start + _trimmed(r.ids) for r in side.records])
    is_none = is_wanted & np.array([not _trimmed(r.ids) for r in side.records])
    if is_none.any():
        yield fault(
            "none", f"{share(is_none.sum(), is_wanted.sum(), 'sequences')} have no route of the {side.name}",
            "Their tokens are routed natively under replay. Look for aborted or preempted requests, a "
            "path on which recording is not wired, and merges of partial rollouts that drop routes.",
        )
    is_short = is_wanted & ~is_none & (ends < layout.num_tokens - 1)
    if is_short.any():
        lost = (layout.num_tokens - 1 - ends)[is_short]
        yield fault(
            "short", f"{share(is_short.sum(), is_wanted.sum(), 'sequences')} lack rows of the {side.name} "
            f"at the end, {lost.min():,} to {lost.max():,} each",
            "A context of n tokens has n - 1 rows, or n with a placeholder for the last. Look for a "
            "capture buffer that is too small, preemption, and a prompt length that differs from the "
            "sampler's.",
        )


def _trimmed(ids):
    """Number of rows up to the last that is not missing."""
    is_there = (ids >= 0).any(axis=(1, 2))
    return len(ids) - int(is_there[::-1].argmax()) if is_there.any() else 0


def _tails(side, layout, _):
    """Rows after the last token."""
    zeros, surplus, most = 0, [], int(side.ids.max(initial=0)) + 1
    for record, n in zip(side.records, layout.num_stored, strict=True):
        tail = record.ids[max(n - record.start, 0) : _trimmed(record.ids)]
        if len(tail) and n > 0:
            tail = tail[:, side.layers]
            is_there = (tail >= 0).any(axis=(1, 2))
            is_null = (tail == 0).all(axis=(1, 2))
            zeros += is_null.sum()
            extra = is_there & ~is_null & ~is_arange(tail, most)
            surplus += [int(extra.sum())] * bool(extra.any())
    if zeros:
        yield fault(
            "zero_padding", f"{zeros:,} rows of the {side.name} after the last token are all zeros",
            "Where such rows are replayed, all padding goes to expert 0. Pad with distinct ids, "
            "arange % E, or with -1 if the trainer reads -1 as missing.",
        )
    if surplus:
        yield fault(
            "surplus", f"{share(len(surplus), len(side.records), 'sequences')} have {min(surplus):,} to "
            f"{max(surplus):,} rows of the {side.name} more than tokens",
            "Look for stale rows past the valid count, a slice by an old length, and a prompt that "
            "was tokenised again.",
        )


def _missing(side, layout, _):
    """Rows of -1 within a sequence that has routes."""
    is_empty = np.array([not _trimmed(r.ids) for r in side.records])[layout.sequence]
    ends = np.array([r.start + _trimmed(r.ids) for r in side.records])
    is_missing = side.is_recorded & (side.ids < 0).all(axis=(1, 2)) & ~is_empty
    is_missing &= layout.row < ends[layout.sequence]
    if is_missing.any():
        yield fault(
            "missing", f"{share(is_missing.sum(), len(is_missing), 'rows')} of the {side.name} are missing "
            f"(-1){_where(is_missing, layout)}",
            "Their tokens are routed natively under replay. Mask them from the loss, or stop.",
        )


def _where(is_bad, layout):
    """Says where all bad rows are, if that is one kind of place."""
    row, prompt = layout.row[is_bad], layout.prompt[layout.sequence[is_bad]]
    if layout.is_boundary[is_bad].all():
        return ", all of them the last token of a turn"
    if (row == prompt - 1).all():
        return ", all of them the last token of a prompt"
    return ", all of them in prompts" if (row < prompt).all() else ""


ZEROS = {
    ", all of them the last token of a turn":
        "The boundary keeps its placeholder. Replace it by the row of the next turn's prefill, and "
        "check where the slice of the next turn begins.",
    ", all of them the last token of a prompt":
        "A request that only reads a prompt drops its last row. Record this row at the first decode "
        "step.",
    ", all of them in prompts":
        "The rows of prompts are not captured. Look for cache hits, and for a cache group that is "
        "not that of the full attention.",
    "": "Placeholders stand where routes should. Look for padding that moves rows when sequences are "
        "packed, for asynchronous capture, and for buffers that were never written.",
}


def _zeros(side, layout, _):
    zero = is_zero(side.ids, side.is_recorded)
    if zero.any():
        where = _where(zero, layout)
        yield fault(
            "zero_rows", f"{share(zero.sum(), len(zero), 'rows')} of the {side.name} are all zeros{where}",
            ZEROS[where] + " Under replay these tokens go to expert 0 alone.",
        )


def _aranges(side, layout, _):
    spread = is_arange(side.ids, int(side.ids.max(initial=0)) + 1) & side.is_recorded
    if spread.any():
        yield fault(
            "padding_rows", f"{share(spread.sum(), len(spread), 'rows')} of the {side.name} are padding "
            f"(arange % E){_where(spread, layout)}",
            "Padding stands where routes should. Look for padding that moves rows when sequences are "
            "packed.",
        )


def _ranges(side, layout, num_experts):
    """Ids that no expert has; a whole row of -1 is missing."""
    high = math.inf if num_experts is None else num_experts - 1
    is_missing = (side.ids == -1).all(axis=(1, 2), keepdims=True)
    is_bad = ((side.ids < 0) & ~is_missing) | (side.ids > high)
    if is_bad.any():
        bad = side.ids[is_bad]
        yield fault(
            "range", f"{is_bad.sum():,} ids of the {side.name} are outside the experts, from {bad.min()} "
            f"to {bad.max()}",
            "Look for a dtype that is too small, an unset id, and the routes of another model.",
        )


def _duplicates(side, layout, _):
    ordered = np.sort(side.ids[side.is_route], axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    is_bad = twice.any(axis=(1, 2))
    if is_bad.any():
        yield fault(
            "duplicates", f"{share(is_bad.sum(), len(is_bad), 'rows')} of the {side.name} name an expert "
            "twice in one router",
            "A router chooses different experts. Look for rows that were cut or joined at a wrong "
            "place, and for a wrong order of [L, k].",
        )


# Repeated rows


def repeated(sides: list[Any], layout: Any, comparison: Any | None) -> list[Fault]:
    """Returns the faults of one route that is repeated over consecutive tokens.

    Equal tokens in a row may have equal routes, so a run has to be explained by neither of two causes.

    Equal tokens: a loop of one token has the probability that the sampler gave it, the product of
    the run's probabilities. Over N starts some loop has at most the probability p with N p. A run
    counts if that is below CHANCE; or, with the learner's routes, if the learner chose other experts.

    Chance: the run's route has a share f of all rows, and a share q of the pairs of adjacent rows
    outside of such runs is equal. The probability of a run of r rows is at most
    N max(f, q)^(r-1), and has to be below CHANCE.
    """
    return [found for side in sides for found in _repeated(side, layout, comparison)]


def _repeated(side, layout, comparison):
    n = len(layout.row)
    ids = np.sort(side.ids, axis=-1).reshape(n, side.ids.shape[1] * side.ids.shape[2])
    is_pair = np.zeros(n, bool)  # row t is that of row t + 1
    is_pair[:-1] = (ids[1:] == ids[:-1]).all(axis=1) & (layout.sequence[1:] == layout.sequence[:-1])
    is_pair[:-1] &= side.is_route[1:] & side.is_route[:-1]
    starts, ends = _runs(is_pair)  # of pairs: rows starts .. ends
    if not len(starts):
        return []
    total = np.concatenate([[0.0], np.cumsum(layout.logp)])
    is_run = total[ends] - total[starts] <= math.log(CHANCE / n)
    if comparison is not None and comparison.is_clear:
        compared = np.where(comparison.is_compared, comparison.agreement - comparison.half, 0.0)
        total = np.concatenate([[0.0], np.cumsum(compared)])
        is_run |= total[ends + 1] - total[starts + 1] < 0
    pairs = ends - starts
    num_left = is_pair.sum() - pairs[is_run].sum()
    adjacent = (num_left + 1) / (n - pairs[is_run].sum() + 2)
    _, place, counts = np.unique(_digests(ids), return_inverse=True, return_counts=True)
    found = []
    for start, end in zip(starts[is_run], ends[is_run], strict=True):
        likely = max(adjacent, counts[place[start]] / n)
        if math.log(n / CHANCE) + (end - start) * math.log(likely) < 0:
            found.append((end - start + 1, start))
    if not found:
        return []
    longest, start = max(found)
    where = f"sequence {layout.sequence[start]} from row {layout.row[start]:,}"
    return [fault(
        "repeated", f"the {side.name} repeats one route over up to {longest:,} consecutive tokens "
        f"(such runs: {len(found):,}; the longest is in {where})",
        "Look for stale rows past the valid count after a chunk boundary, for a prompt that was "
        "tokenised again, and for a copied last row.",
    )]


def _digests(ids):
    """Returns a number for each row [M,N], equal for equal rows alone (but for chances of 2^-64)."""
    digest = np.zeros(len(ids), np.int64)
    for column in ids.T:
        digest = digest * 1_000_003 + column
    return digest


def _runs(is_true):
    """Returns (first, one past the last) place of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_true, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]
