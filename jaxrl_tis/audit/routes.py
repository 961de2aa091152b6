"""Lays the recorded routes of a dump beside its tokens, and compares sampler and learner.

A sequence of n context tokens has n - 1 rows: row t is the route of input token t, whose output
predicts token t + 1. The last token was never read, so a row n - 1 is a placeholder and does not
count. A row of negative ids is missing.
"""

import dataclasses
import re
from typing import Any

import jax
import numpy as np

from jaxrl_tis.audit import packing, route_faults, route_pairs
from jaxrl_tis.audit.dump import Dump
from jaxrl_tis.audit.route_columns import Routes
from jaxrl_tis.diagnostics import attribution, routes

SIDES = {"routes_behav": "sampler", "routes_old": "learner"}
FEWEST_ROWS = 32  # in which a layer with one route is taken for no router


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows that the routes of a dump should have, M in all, one sequence after the other.

    Attributes:
      sequence, row: [M] the sequence of each row, and its input token in the context.
      is_boundary: [M] whether the token is the last of a turn, with another turn after it.
      is_policy: [M] whether the row predicts a token of the policy.
      logp: [M] the sampler's log-prob of that token, 0 where it sampled none.
      num_tokens: [B] context tokens up to the last of the policy; 0 for a sequence without any.
      num_stored: [B] context tokens, with the text after the policy's last.
      prompt: [B] context tokens before the first of the policy.
      first_row: [B] place of a sequence's first row in [M].
      of_token: [N] place in [M] of the row that predicts each token of the dump, -1 without one.
    """

    sequence: np.ndarray
    row: np.ndarray
    is_boundary: np.ndarray
    is_policy: np.ndarray
    logp: np.ndarray
    num_tokens: np.ndarray
    num_stored: np.ndarray
    prompt: np.ndarray
    first_row: np.ndarray
    of_token: np.ndarray


@dataclasses.dataclass(frozen=True)
class Side:
    """The routes of sampler or learner, laid out.

    Attributes:
      name: "sampler" or "learner".
      ids: [M,L,k] int of its L routers, -1 where there is no row.
      is_recorded: [M] whether the record has the row, if only as -1.
      is_route: [M] whether the row is a route: neither missing nor padding.
      records: the routes of each sequence as in the dump.
      layers: [L] number of each router in the record.
      constant: numbers of the layers with one route in every row, which are not in `ids`.
    """

    name: str
    ids: np.ndarray
    is_recorded: np.ndarray
    is_route: np.ndarray
    records: list[Routes]
    layers: list[int]
    constant: list[int]


def lay(dump: Dump) -> Layout:
    """Returns the rows that the routes of a dump should have."""
    parts = {name: [] for name in ("sequence", "row", "is_boundary", "is_policy", "logp")}
    counts = {name: [] for name in ("num_tokens", "num_stored", "first_row")}
    of_token, num_rows = [], 0
    ends = np.cumsum(dump.lengths)
    prompts = dump.sequences["prompt_tokens"]
    for i, (end, length, prompt) in enumerate(zip(ends, dump.lengths, prompts, strict=True)):
        tokens = {name: x[end - length : end] for name, x in dump.tokens.items()}
        valid = np.flatnonzero(tokens["mask"])
        begin, last = (prompt - valid[0], valid[-1]) if valid.size else (0, -1)
        count = max(begin + last, 0)  # n - 1
        row, place = np.arange(count), np.arange(length) + begin - 1
        has_row = (place >= 0) & (place < count)
        of_token.append(np.where(has_row, num_rows + place, -1))
        logp, boundary, policy = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
        logp[place[has_row]] = (tokens["logp_behav"] * tokens["mask"])[has_row]
        policy[place[has_row]] = tokens["mask"][has_row]
        ends_turn = np.flatnonzero(_ends_turn(tokens)) + begin
        boundary[ends_turn[(ends_turn >= 0) & (ends_turn < count)]] = True
        for name, x in zip(parts, (np.full(count, i), row, boundary, policy, logp), strict=True):
            parts[name].append(x)
        sizes = (count + 1, begin + length) if valid.size else (0, 0)
        for name, x in zip(counts, (*sizes, num_rows), strict=True):
            counts[name].append(x)
        num_rows += count
    arrays = {name: np.concatenate(x) for name, x in parts.items()}
    arrays |= {name: np.array(x) for name, x in counts.items()}
    return Layout(**arrays, prompt=prompts, of_token=np.concatenate(of_token))


def _ends_turn(tokens):
    """Whether a stored token is the policy's last before a tool's text or another turn, [T]."""
    mask = tokens["mask"]
    ends = np.zeros(len(mask), bool)
    ends[:-1] = mask[:-1] & ~mask[1:]
    if "turn" in tokens:
        ends[:-1] |= mask[:-1] & (tokens["turn"][1:] != tokens["turn"][:-1])
    return ends


def side(name: str, records: list[Routes], layout: Layout) -> Side:
    """Lays out the routes of one side."""
    shape = next((r.ids.shape[1:] for r in records if len(r.ids)), (0, 0))
    ids = np.full((len(layout.row), *shape), -1, np.result_type(*{r.ids.dtype for r in records}))
    is_recorded = np.zeros(len(ids), bool)
    for record, first, count in zip(records, layout.first_row, layout.num_tokens - 1, strict=True):
        if len(record.ids):
            end = max(min(record.start + len(record.ids), count), record.start)
            ids[first + record.start : first + end] = record.ids[: end - record.start]
            is_recorded[first + record.start : first + end] = True
    is_there = is_recorded & (ids >= 0).any(axis=(1, 2))
    layers, constant = _routers(ids, is_there)
    ids = ids[:, layers]
    most = int(ids.max(initial=0)) + 1
    is_padding = route_faults.is_zero(ids, is_there) | route_faults.is_arange(ids, most)
    return Side(name, ids, is_recorded, is_there & ~is_padding, records, layers, constant)


def _routers(ids, is_there):
    """Returns (numbers of the layers that are routers, of those with one route in every row)."""
    rows = np.sort(ids[is_there], axis=-1)
    is_constant = (rows == 0).all(axis=(0, 2)) & (rows.shape[2] > 1)
    if len(rows) >= FEWEST_ROWS and rows.shape[2] <= rows.max():  # not all experts are chosen
        is_constant = (rows == rows[0]).all(axis=(0, 2))
    if is_constant.all():
        return list(range(ids.shape[1])), []
    return np.flatnonzero(~is_constant).tolist(), np.flatnonzero(is_constant).tolist()


def measure(
    dump: Dump, rows: packing.Rows, batch: dict[str, Any], num_experts: int | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns (metrics of routes under the names of docs/metrics.md, what `table` writes of them).

    Args:
      dump: with at least one column of routes.
      rows: the places of its tokens in `batch`.
      batch: see `whatif.table`.
      num_experts: experts of a router; None takes the largest id.
    """
    layout = lay(dump)
    sides = [side(name, dump.routes[c], layout) for c, name in SIDES.items() if c in dump.routes]
    largest = max(int(s.ids.max(initial=-1)) for s in sides) + 1
    found = {
        "num_experts": num_experts or largest,
        "sides": [_described(s, layout) for s in sides],
        "shifts": {},
    }
    pair, found["faults"], comparison = compare(sides, layout, num_experts)
    if pair is None or comparison is None:
        return {}, found
    found["shifts"] = comparison.shifts
    return _metrics(dump, rows, batch, layout, pair, found["num_experts"], comparison), found


def compare(
    sides: list[Side], layout: Layout, num_experts: int | None
) -> tuple[tuple[Side, Side] | None, list[route_faults.Fault], route_pairs.Comparison | None]:
    """Returns (both sides with the routers that are compared, faults, comparison); the first and the
    last are None where the sides cannot be compared."""
    pair, comparison, is_of_tokens = route_pairs.compared(sides), None, True
    faults = [fault for s in sides for fault in route_faults.of_side(s, layout, num_experts)]
    if pair is not None:
        comparison = route_pairs.compare(*pair, layout)
        transposed = route_pairs.transposed(*pair, layout)
        if transposed:
            return pair, [transposed], comparison
        more, is_of_tokens = route_pairs.of_pair(comparison, layout)
        faults += route_pairs.dense(*sides) + more
    elif route_pairs.are_unlike(sides):
        faults.append(route_pairs.other_shape(*sides))
    if is_of_tokens:
        faults += route_faults.repeated(sides, layout, comparison)
    return pair, faults, comparison


def _described(side, layout):
    width = [len(r.ids) for r in side.records]
    return {
        "name": side.name, "layers": len(side.layers) + len(side.constant),
        "num_chosen": side.ids.shape[2], "constant_layers": side.constant,
        "expected_rows": len(layout.row), "routes": int(side.is_route.sum()),
        "sequences": sum(n > 0 for n in width),
    }


def _metrics(dump, rows, batch, layout, pair, num_experts, comparison):
    """Returns the flips at the tokens of the policy."""
    place = layout.of_token
    has_route = (place >= 0) & comparison.is_compared[np.maximum(place, 0)]
    shared = comparison.shared[np.maximum(place, 0)]
    mask = rows.of_tokens(has_route & dump.tokens["mask"])
    shared = rows.of_tokens(np.where(has_route[:, None], shared, 0).astype(np.uint8))
    num_chosen = pair[0].ids.shape[2]
    behav, old, seg, response = (batch[name] for name in ("logp_behav", "logp_old", "seg", "mask"))

    def all_metrics(shared, mask, behav, old, seg, response):
        chosen = dict(num_chosen=num_chosen, response=response)
        return (
            routes.flip_metrics(shared, mask, seg, num_experts=num_experts, **chosen)
            | routes.flip_grid(shared, mask, seg, **chosen)
            | routes.gap_metrics(shared, old, behav, mask, num_chosen=num_chosen)
        )

    values = jax.device_get(jax.jit(all_metrics)(shared, mask, behav, old, seg, response))
    position = np.asarray(attribution.response_positions(response, seg))[mask]
    buckets = np.minimum(attribution.power_of_two_bucket(position), routes.NUM_BUCKETS - 1)
    firsts = {attribution.bucket_starts(routes.NUM_BUCKETS)[b] for b in np.unique(buckets)}
    # A record may lack layers, and tokens of a part of the response.
    number = lambda found: f"{pair[0].layers[int(found[0])]}"
    return {
        re.sub(r"(?<=route_flip_layer_)[0-9]+", number, name): float(x) for name, x in values.items()
        if "position_" not in name or int(name.rpartition("_")[2]) in firsts
    }
