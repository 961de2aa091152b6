"""Compares the routes of sampler and learner row by row, and finds the faults that this shows.

Each test has a bound on the probability that it holds without a fault, CHANCE for the whole dump. The
bound is Hoeffding's: the sum of m differences that are at most 0 in expectation, each in an interval of
width w, passes w sqrt(m log(1 / p) / 2) with a probability of at most p.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxrl_tis.audit.route_faults import CHANCE, Fault, fault, share

SHIFTS = (-2, -1, 1, 2)
CLEAR = 0.2  # least distance of an agreement from that of unrelated rows, to tell them apart (ours)
NEAR = 0.1  # part of the way from unrelated rows to equal ones that still counts as unrelated (ours)
FAVOURITES = 0.5  # agreement of unrelated rows above which routers hardly tell tokens apart (ours)
FEWEST_ROWS = 64  # to say that sampler and learner are unrelated (ours)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The agreement of sampler and learner, row by row.

    Attributes:
      shared: [M,L] number of experts that both chose.
      is_compared: [M] rows with a route on both sides.
      agreement: [M] share of the chosen experts that both chose, at the best shift of all rows; the
        usual one where a side has no route.
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


def are_unlike(sides: list[Any]) -> bool:
    """Whether both sides have routes, of another number of layers or chosen experts."""
    shapes = {(len(s.layers) + len(s.constant), s.ids.shape[2]) for s in sides if s.is_route.any()}
    return len(shapes) == 2


def _of_layers(side, layers):
    place = [side.layers.index(layer) for layer in layers]
    return dataclasses.replace(side, ids=side.ids[:, place], layers=layers)


def other_shape(one: Any, two: Any) -> Fault:
    """Returns the fault of two sides whose routers cannot be compared."""
    shape = lambda side: f"{side.ids.shape[1]} routers of {side.ids.shape[2]} experts"
    return fault(
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
        shared=experts, is_compared=is_compared, agreement=np.where(known, agreement, level),
        shifts=shifts, shift=shift,
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
    is_many = comparison.is_compared.sum() >= FEWEST_ROWS and unrelated < FAVOURITES
    if is_many and mean - unrelated < NEAR * (1 - unrelated):
        return [fault(
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
        for n, s in zip(counts, (sampler, learner), strict=True))
    return [fault(
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
    return fault(
        "shifted", f"the sampler's rows stand {_by(d)}: shifted by {-d} they share {shifts[d]:.1%} of the "
        f"chosen experts with the learner, as recorded {shifts[0]:.1%}",
        "Row t is the route of input token t, which predicts token t + 1. Look for a dropped first "
        "or last row, and for padding that moves rows.",
    )


def _shifted_from(comparison, layout):
    """Rows that are shifted from a turn or from some row on; and [M] whether a row is one of these."""
    turns = np.concatenate([[0], np.cumsum(layout.is_boundary)])
    is_later = layout.is_policy & (turns[:-1] > turns[layout.first_row][layout.sequence])
    gains = ((d, *_gain(comparison, d, is_later)) for d in SHIFTS)
    d = next((d for d, gain, m in gains if _beyond_chance(gain, m, len(SHIFTS))), 0)
    if d:
        return [fault(
            "shifted_turns", f"after the first turn the sampler's rows stand {_by(d)}",
            "Look for the boundary of the turn, whose last row is there twice or not at all, for a slice "
            "by the length of an older turn, and for text that was tokenised again.",
        )], is_later
    is_explained, shifts = np.zeros(len(layout.row), bool), []
    for first, count in zip(layout.first_row, layout.num_tokens - 1, strict=True):
        place = slice(first, first + max(count, 0))
        total, d, start = max(_best_tail(comparison, d, place) for d in SHIFTS)
        if _beyond_chance(total, count - start, len(SHIFTS) * len(layout.row)):
            is_explained[first + start : first + count] = True
            shifts.append(d)
    if not shifts:
        return [], is_explained
    d = max(set(shifts), key=shifts.count)
    return [fault(
        "shifted_from", f"in {share(len(shifts), int((layout.num_tokens > 1).sum()), 'sequences')} the "
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
    (x, known), (base, base_known) = (
        tuple(a[place] for a in comparison.by_shift[shift]) for shift in (d, 0)
    )
    gain = np.where(known & base_known, x - base, 0.0)
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
    for first, count in zip(layout.first_row, layout.num_tokens - 1, strict=True):
        total, start, end = _best_stretch(low[first : first + max(count, 0)])
        if _beyond_chance(total, end - start, len(low) ** 2, width=1.0):
            rows, sequences = rows + end - start, sequences + 1
    if not rows:
        return []
    return [fault(
        "foreign", f"{rows:,} rows in {share(sequences, int((layout.num_tokens > 1).sum()), 'sequences')} "
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
            return fault(
                "transposed", f"one side reads [tokens, batch] as [batch, tokens]: transposed they share "
                f"{before + gain.mean():.1%} of the chosen experts, as recorded {before:.1%}",
                "Flatten routes in the order in which the router flattens its tokens.",
            )
    return None
