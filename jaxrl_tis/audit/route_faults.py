"""Finds faults in recorded routes: rows that are missing, padding, stale, shifted or of others.

A fault is {"name", "title", "advice"}. No fault is reported that chance may produce: each test has
a bound on the probability that it holds without a fault, CHANCE for the whole dump. Where rows are
compared, the bound is Hoeffding's: the sum of m differences that are at most 0 in expectation, each
in an interval of width w, passes w sqrt(m log(1 / p) / 2) with a probability of at most p.
"""

import dataclasses
import math
from typing import Any

import numpy as np

CHANCE = 1e-3
SHIFTS = (-2, -1, 1, 2)
CLEAR = 0.2  # least distance of an agreement from that of unrelated rows, to tell them apart (ours)
NEAR = 0.1  # part of the way from unrelated rows to equal ones that still counts as unrelated (ours)
FEWEST_ROWS = 64  # to say that sampler and learner are unrelated (ours)

Fault = dict[str, str]


def _fault(name: str, title: str, advice: str) -> Fault:
    return {"name": f"routes.{name}", "title": title, "advice": advice}


def _share(count: int, total: int, what: str) -> str:
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
    return [fault for test in tests for fault in test(side, layout, num_experts)]


def _counts(side, layout, _):
    """Sequences without any route, and with fewer than n - 1 rows."""
    is_wanted = layout.num_tokens > 1
    ends = np.array([r.start + _trimmed(r.ids) for r in side.records])
    is_none = is_wanted & np.array([not _trimmed(r.ids) for r in side.records])
    if is_none.any():
        yield _fault(
            "none", f"{_share(is_none.sum(), is_wanted.sum(), 'sequences')} have no route of the {side.name}",
            "Their tokens are routed natively under replay. Look for aborted or preempted requests, a "
            "path on which recording is not wired, and merges of partial rollouts that drop routes.",
        )
    is_short = is_wanted & ~is_none & (ends < layout.num_tokens - 1)
    if is_short.any():
        lost = (layout.num_tokens - 1 - ends)[is_short]
        yield _fault(
            "short", f"{_share(is_short.sum(), is_wanted.sum(), 'sequences')} lack rows of the {side.name} "
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
    for record, n in zip(side.records, layout.num_stored):
        tail = record.ids[max(n - record.start, 0) : _trimmed(record.ids)]
        if len(tail) and n > 0:
            tail = tail[:, side.layers]
            is_there = (tail >= 0).any(axis=(1, 2))
            is_null = (tail == 0).all(axis=(1, 2))
            zeros += is_null.sum()
            extra = is_there & ~is_null & ~is_arange(tail, most)
            surplus += [int(extra.sum())] * bool(extra.any())
    if zeros:
        yield _fault(
            "zero_padding", f"{zeros:,} rows of the {side.name} after the last token are all zeros",
            "Where such rows are replayed, all padding goes to expert 0. Pad with distinct ids, "
            "arange % E, or with -1 if the trainer reads -1 as missing.",
        )
    if surplus:
        yield _fault(
            "surplus", f"{_share(len(surplus), len(side.records), 'sequences')} have {min(surplus):,} to "
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
        yield _fault(
            "missing", f"{_share(is_missing.sum(), len(is_missing), 'rows')} of the {side.name} are missing "
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
        yield _fault(
            "zero_rows", f"{_share(zero.sum(), len(zero), 'rows')} of the {side.name} are all zeros{where}",
            ZEROS[where] + " Under replay these tokens go to expert 0 alone.",
        )


def _aranges(side, layout, _):
    spread = is_arange(side.ids, int(side.ids.max(initial=0)) + 1) & side.is_recorded
    if spread.any():
        yield _fault(
            "padding_rows", f"{_share(spread.sum(), len(spread), 'rows')} of the {side.name} are padding "
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
        yield _fault(
            "range", f"{is_bad.sum():,} ids of the {side.name} are outside the experts, from {bad.min()} "
            f"to {bad.max()}",
            "Look for a dtype that is too small, an unset id, and the routes of another model.",
        )


def _duplicates(side, layout, _):
    ordered = np.sort(side.ids[side.is_route], axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    is_bad = twice.any(axis=(1, 2))
    if is_bad.any():
        yield _fault(
            "duplicates", f"{_share(is_bad.sum(), len(is_bad), 'rows')} of the {side.name} name an expert "
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
    return [fault for side in sides for fault in _repeated(side, layout, comparison)]


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
    found = []
    for start, end in zip(starts[is_run], ends[is_run]):
        likely = max(adjacent, (ids == ids[start]).all(axis=1).mean())
        if math.log(n / CHANCE) + (end - start) * math.log(likely) < 0:
            found.append((end - start + 1, start))
    if not found:
        return []
    longest, start = max(found)
    place = f"sequence {layout.sequence[start]} from row {layout.row[start]:,}"
    return [_fault(
        "repeated", f"the {side.name} repeats one route over up to {longest:,} consecutive tokens "
        f"({len(found):,} such runs; the longest is in {place})",
        "Look for stale rows past the valid count after a chunk boundary, for a prompt that was "
        "tokenised again, and for a copied last row.",
    )]


def _runs(is_true):
    """Returns (first, one past the last) place of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_true, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]


# Two sides


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The agreement of sampler and learner, row by row.

    Attributes:
      shared: [M,L] number of experts that both chose.
      is_compared: [M] rows with a route on both sides.
      agreement: [M] share of the chosen experts that both chose, at the best shift of all rows.
      shifts: shift of the sampler's rows -> mean agreement.
      shift: the best, 0 unless another is better beyond chance.
      half: halfway between the usual agreement and that of unrelated rows.
      is_clear: whether the two are far enough apart to tell rows of others.
      level, unrelated: the usual agreement, and that of unrelated rows.
      by_shift: shift -> (agreement [M], rows with a route on both sides [M]).
    """

    shared: np.ndarray
    is_compared: np.ndarray
    agreement: np.ndarray
    shifts: dict[int, float]
    shift: int
    half: float
    is_clear: bool
    level: float
    unrelated: float
    by_shift: dict[int, tuple[np.ndarray, np.ndarray]]


def shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the number of experts that both rows [M,L,k] have, [M,L]; negative ids match nothing."""
    b = np.where(b < 0, -2, b)
    return sum((a == b[..., j : j + 1]).any(axis=-1).astype(np.uint8) for j in range(a.shape[2]))


def compared(sides: list[Any]) -> tuple[Any, Any] | None:
    """Returns the two sides with the same routers, None where there are not two or they differ.

    Layers with one route in every row are left out: of both sides where the records count the same
    layers, else of the side that has them.
    """
    if len(sides) < 2:
        return None
    one, two = sides
    if len(one.layers) + len(one.constant) == len(two.layers) + len(two.constant):
        common = [layer for layer in one.layers if layer in two.layers]
        one, two = (_of_layers(side, common) for side in sides)
    same = one.ids.shape[1:] == two.ids.shape[1:] and one.ids.size > 0
    return (one, two) if same else None


def are_given(sides: list[Any]) -> bool:
    """Whether both sides have routes."""
    return len(sides) == 2 and all(side.is_route.any() for side in sides)


def _of_layers(side, layers):
    place = [side.layers.index(layer) for layer in layers]
    return dataclasses.replace(side, ids=side.ids[:, place], layers=layers)


def other_shape(one: Any, two: Any) -> Fault:
    """Returns the fault of two sides whose routers cannot be compared."""
    shape = lambda side: f"{side.ids.shape[1]} routers of {side.ids.shape[2]} experts"
    return _fault(
        "layers", f"the {one.name} has {shape(one)} and the {two.name} {shape(two)}",
        "Nothing was compared. The records are of different models, or count other layers.",
    )


def compare(sampler: Any, learner: Any, layout: Any) -> Comparison:
    """Compares the rows of both sides at the shifts -2 to 2 of the sampler's."""
    by_shift = {d: _at_shift(sampler, learner, layout, d) for d in (0, *SHIFTS)}
    experts, is_compared = by_shift[0]
    num_chosen = sampler.ids.shape[2]
    agree = {d: (x.mean(axis=1) / num_chosen, known) for d, (x, known) in by_shift.items()}
    shifts = {d: float(x[known].mean()) if known.any() else 0.0 for d, (x, known) in agree.items()}
    shift = 0
    for d in SHIFTS:
        both = agree[0][1] & agree[d][1]
        gain = (agree[d][0] - agree[0][0])[both].sum()
        if _beyond_chance(gain, both.sum(), len(SHIFTS)) and shifts[d] > shifts[shift]:
            shift = d
    agreement, known = agree[shift]
    level = float(np.median(agreement[known])) if known.any() else 0.0
    unrelated = _unrelated(sampler, learner)
    return Comparison(
        shared=experts, is_compared=is_compared, agreement=agreement, shifts=shifts, shift=shift,
        half=(level + unrelated) / 2, is_clear=level - unrelated > CLEAR, level=level,
        unrelated=unrelated, by_shift=agree,
    )


def _at_shift(sampler, learner, layout, d):
    """Returns (experts that row t of the learner and row t + d of the sampler share, whether both are)."""
    n = len(layout.row)
    here, there = np.arange(n), np.arange(n) + d
    known = (there >= 0) & (there < n)
    there = np.clip(there, 0, max(n - 1, 0))
    known &= layout.sequence[there] == layout.sequence[here]
    known &= sampler.is_route[there] & learner.is_route
    return shared(sampler.ids[there], learner.ids) * known[:, None], known


def _unrelated(sampler, learner):
    """Returns the agreement of rows that have nothing to do with each other: of the learner's rows and
    the sampler's in another order."""
    a, b = sampler.ids[sampler.is_route], learner.ids[learner.is_route]
    m = min(len(a), len(b))
    if not m:
        return 1.0
    order = np.random.default_rng(0).permutation(m)
    return float(shared(a[order], b[:m]).mean() / a.shape[2])


def _beyond_chance(total, m, tests, width=2.0):
    """Whether a sum of m differences in an interval of `width` is above 0 beyond chance, in any of the
    tests."""
    return m > 0 and total > width * math.sqrt(m * math.log(tests / CHANCE) / 2)


def of_pair(comparison: Comparison, layout: Any) -> tuple[list[Fault], bool]:
    """Returns (faults that the comparison shows, whether the rows are of their own tokens)."""
    if comparison.shift:
        return [_shifted(comparison)], True
    unrelated, mean = comparison.unrelated, comparison.shifts[0]
    is_many = comparison.is_compared.sum() >= FEWEST_ROWS and unrelated < 1 - CLEAR
    if is_many and mean - unrelated < NEAR * (1 - unrelated):
        return [_fault(
            "unrelated", f"sampler and learner share {mean:.1%} of the chosen experts, and unrelated rows "
            f"{unrelated:.1%}",
            "The rows are of other tokens, layers or weights. Look at the order of the layers, the "
            "order of the batch, and whether replay is bound to the routers in use.",
        )], False
    partly, is_explained = _shifted_from(comparison, layout)
    return [*partly, *_foreign(comparison, layout, is_explained)], True


def dense(sampler: Any, learner: Any) -> list[Fault]:
    """Returns the fault of layers that one side counts and the other does not."""
    counts = [len(s.layers) + len(s.constant) for s in (sampler, learner)]
    if counts[0] == counts[1]:
        alone = [(one, two, layer) for one, two in ((sampler, learner), (learner, sampler))
                 for layer in one.constant if layer in two.layers]
        if not any(_is_alone(*x) for x in alone):
            return []
    text = " and ".join(
        f"{n} layers of the {s.name}" + (f", of which {_list(s.constant)} with one route in every row"
                                         if s.constant else "")
        for n, s in zip(counts, (sampler, learner)))
    return [_fault(
        "layers", f"the records count different layers: {text}",
        "A layer with one route is a dense layer that is counted, or a router that is not captured. "
        "Map routes by the number of the layer, or by that of the router, on both sides.",
    )]


def _is_alone(one, two, layer):
    """Whether a layer has one route in every row of one side alone, beyond chance: each row has the
    other side's favourite with its share there."""
    rows = np.sort(two.ids[two.is_route, two.layers.index(layer)], axis=-1)
    if not len(rows):
        return False
    favourite = np.unique(rows, axis=0, return_counts=True)[1].max() / len(rows)
    return len(one.layers) * favourite ** one.is_route.sum() < CHANCE


def _list(numbers):
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _by(d):
    """Says by how much and in which direction the sampler's rows are shifted."""
    return f"{abs(d)} row{'s' * (abs(d) > 1)} too {'late' if d > 0 else 'early'}"


def _shifted(comparison):
    d, shifts = comparison.shift, comparison.shifts
    return _fault(
        "shifted", f"the sampler's rows stand {_by(d)}: shifted by {-d} they share {shifts[d]:.1%} of the "
        f"chosen experts with the learner, as recorded {shifts[0]:.1%}",
        "Row t is the route of input token t, which predicts token t + 1. Look for a dropped first "
        "or last row, and for padding that moves rows.",
    )


def _shifted_from(comparison, layout):
    """Rows that are shifted from a turn or from some row on; and [M] whether a row is one of these."""
    turns = np.concatenate([[0], np.cumsum(layout.is_boundary)])
    is_later = layout.is_policy & (turns[:-1] > turns[layout.first_row][layout.sequence])
    d = next((d for d in SHIFTS if _beyond_chance(*_gain(comparison, d, is_later), len(SHIFTS))), 0)
    if d:
        return [_fault(
            "shifted_turns", f"after the first turn the sampler's rows stand {_by(d)}",
            "Look for the boundary of the turn, whose last row is there twice or not at all, for a slice "
            "by the length of an older turn, and for text that was tokenised again.",
        )], is_later
    is_explained, shifts = np.zeros(len(layout.row), bool), []
    for first, count in zip(layout.first_row, layout.num_tokens - 1):
        place = slice(first, first + max(count, 0))
        total, d, start = max(_best_tail(comparison, d, place) for d in SHIFTS)
        if _beyond_chance(total, count - start, len(SHIFTS) * len(layout.row)):
            is_explained[first + start : first + count] = True
            shifts.append(d)
    if not shifts:
        return [], is_explained
    d = max(set(shifts), key=shifts.count)
    return [_fault(
        "shifted_from", f"in {_share(len(shifts), int((layout.num_tokens > 1).sum()), 'sequences')} the "
        f"sampler's rows stand {_by(d)} from some row on",
        "Look for a row that is there twice or not at all: a prompt that was tokenised again, a chunk "
        "boundary, a merge of partial rollouts.",
    )], is_explained


def _gain(comparison, d, is_row):
    """Returns (sum over rows of how much better a shift agrees than none, number of these rows)."""
    (x, known), (base, base_known) = comparison.by_shift[d], comparison.by_shift[0]
    is_row = is_row & known & base_known
    return (x - base)[is_row].sum(), int(is_row.sum())


def _best_tail(comparison, d, place):
    """Returns (gain of the best last part of a sequence, the shift, where the part begins)."""
    (x, known), (base, base_known) = comparison.by_shift[d], comparison.by_shift[0]
    gain = np.where(known & base_known, x - base, 0.0)[place]
    tail = np.cumsum(gain[::-1])[::-1]
    start = int(tail.argmax()) if len(tail) else 0
    return (float(tail[start]) if len(tail) else 0.0), d, start


def _foreign(comparison, layout, is_explained):
    """Stretches whose rows agree no better than those of unrelated tokens."""
    if not comparison.is_clear:
        return []
    known = comparison.is_compared & ~is_explained
    low = np.where(known, comparison.half - comparison.agreement, 0.0)
    rows, sequences = 0, 0
    for first, count in zip(layout.first_row, layout.num_tokens - 1):
        total, start, end = _best_stretch(low[first : first + max(count, 0)])
        if _beyond_chance(total, end - start, len(low) ** 2, width=1.0):
            rows, sequences = rows + end - start, sequences + 1
    if not rows:
        return []
    return [_fault(
        "foreign", f"{rows:,} rows in {_share(sequences, int((layout.num_tokens > 1).sum()), 'sequences')} "
        "agree no better than rows of other tokens",
        "Look for rows of the former owner of a reused cache slot, of stale buffers, and of another "
        "micro-batch where the forward pass is recomputed.",
    )]


def _best_stretch(x):
    """Returns (sum, first, one past the last) of the contiguous part with the largest sum."""
    if not len(x):
        return 0.0, 0, 0
    total = np.concatenate([[0.0], np.cumsum(x)])
    lowest = np.minimum.accumulate(total)
    end = int((total - lowest).argmax())
    start = int(total[: end + 1].argmin())
    return float(total[end] - total[start]), start, end


def transposed(sampler: Any, learner: Any, layout: Any) -> Fault | None:
    """Returns the fault of one side that is written sequence by sequence and read token by token."""
    width = {len(r.ids) for s in (sampler, learner) for r in s.records}
    num = len(sampler.records)
    if len(width) != 1 or num < 2 or max(width) < 2 or any(r.start for r in sampler.records):
        return None
    rows = width.pop()
    stack = lambda side: np.stack([r.ids[:, side.layers] for r in side.records])
    x, y = stack(sampler), stack(learner)
    flat = (num * rows, *x.shape[2:])
    place = np.concatenate([
        i * rows + np.arange(max(min(n - 1, rows), 0)) for i, n in enumerate(layout.num_tokens)])
    y = y.reshape(flat)[place]
    kept = (y >= 0).any(axis=(1, 2))
    plain = shared(x.reshape(flat)[place], y).mean(axis=1)
    views = x.reshape(rows, num, *x.shape[2:]).swapaxes(0, 1), x.swapaxes(0, 1)
    for view in views:
        gain = ((shared(view.reshape(flat)[place], y).mean(axis=1) - plain) / x.shape[3])[kept]
        if _beyond_chance(gain.sum(), len(gain), len(views)):
            before = plain[kept].mean() / x.shape[3]
            return _fault(
                "transposed", f"one side reads [tokens, batch] as [batch, tokens]: transposed they share "
                f"{before + gain.mean():.1%} of the chosen experts, as recorded {before:.1%}",
                "Flatten routes in the order in which the router flattens its tokens.",
            )
    return None
