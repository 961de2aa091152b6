"""Whether a record from another process is well-formed, and can be of the request sent there."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import (
    JOINS, NO_DRAFTER, OF_DRAFTS, OUTCOMES, PER_TOKEN, Request, Trajectory, draft_fields,
)
from jaxrl_tis.fields import DRAWN, route_dtype

ROUNDING = 1e-3  # by which a log-prob may be above 0
NO_IDS = np.zeros(0, np.int32)
# The record of no tokens: its fields have the types, dtypes and dimensions of every record's.
_NONE_DRAWN: dict[str, Any] = {n: np.zeros(0, f.dtype) for n, f in DRAWN.items() if not f.width}
EMPTY = Trajectory(
    id="", prompt=NO_IDS, version=NO_IDS, stop_reason="", seed=0, request=0, quant_id="",
    temperature=0.0, **_NONE_DRAWN,
)


def malformed(record: Any) -> str | None:
    """Returns which field of an object is not as in a record, and why; None for a Trajectory whose
    fields all have the type, dtype, dimensions and length of a record's."""
    if type(record) is not Trajectory:
        return f"a record is a {type(record).__name__}, not a Trajectory"
    for name, like in vars(EMPTY).items():
        if name == "evict_step" and np.ndim(getattr(record, name, 0)) == 2:
            like = like[:, None]  # of groups of layers
        if why := _mistyped(getattr(record, name, None), like):
            return f"{name} {why}"
    prompt, count = len(record.prompt), len(record.tokens)
    lengths = {"prompt": prompt, "evict_step": prompt + count, "prompt_logps": prompt}
    for field in dataclasses.fields(Trajectory):
        if isinstance(value := getattr(record, field.name), np.ndarray):
            if field.name in ("routes", "rerouted", "turn_rewards"):
                continue
            is_optional = field.default_factory is not dataclasses.MISSING
            length = lengths.get(field.name, count)
            if len(value) != length and not (is_optional and len(value) == 0):
                return f"{field.name} has {len(value)} entries and needs {length}"
    routes, again = record.routes, record.rerouted
    read = prompt + count - record.num_given
    if len(routes) and len(routes) not in (read - 1, read):
        return f"routes has {len(routes)} rows for {read} tokens"
    if len(again) != (2 if routes.shape[1] else 0):
        return f"rerouted has {len(again)} entries"
    for fork in record.forks:
        if why := malformed(fork):
            return f"a fork: {why}"
    return _bad_episode(record)


def _bad_episode(record: Trajectory) -> str | None:
    """Returns which field of an environment is not as in a record, and why; None if they are."""
    rewards, turns = record.turn_rewards, record.num_turns
    if record.outcome not in OUTCOMES:
        return f"outcome is {record.outcome!r}, none of {', '.join(map(repr, OUTCOMES))}"
    if len(rewards) > turns:
        return f"turn_rewards has {len(rewards)} entries for {turns} turns"
    if np.isinf(rewards).any():
        return "turn_rewards has an infinite entry"
    if len(record.joins) > max(turns - 1, 0) or not set(record.joins) <= set(JOINS):
        return f"joins is {record.joins} for {turns} turns"
    for name, value in record.metrics.items():
        if type(name) is not str or type(value) is not float:
            return f"metrics has {name!r}: {value!r}, not a text and a float"
    return None


def _mistyped(value: Any, like: Any) -> str | None:
    """Returns how a value differs from the value of EMPTY in type, dtype or dimensions."""
    kinds: Any = (int, float) if isinstance(like, float) else type(like)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return f"is {type(value).__name__}, not {type(like).__name__}"
    if not isinstance(like, np.ndarray):
        return None
    is_route = like.dtype == np.uint8 and value.dtype == np.uint16
    if value.ndim != like.ndim or value.dtype != like.dtype and not is_route:
        return f"is {value.dtype} of {value.ndim} dimensions, not {like.dtype} of {like.ndim}"
    if value.dtype == bool and value.view(np.uint8).max(initial=0) > 1:
        return "is bool and holds bytes other than 0 and 1"
    return None


def has_equal(routes: np.ndarray) -> bool:
    """Whether some token has an expert of a layer twice, as rows that nobody wrote do."""
    ordered = np.sort(routes, axis=-1)
    return bool(np.any(ordered[..., 1:] == ordered[..., :-1]))


def problem(
    record: Trajectory, request: Request, engine: EngineProtocol, oldest: int, newest: int,
    is_episode: bool = False, retention: KVEviction | None = None,
) -> str | None:
    """Returns why a record cannot be what this engine samples for a request, None where it can. It
    never raises, whatever object the record is.

    Args:
      oldest, newest: versions of the weights that can have sampled what follows request.partial.
      is_episode: an environment answers the policy. The record may have several turns, each of at
        most sampling.max_tokens sampled tokens, and may stop after any turn.
      retention: pages that the sequence keeps; None keeps all.
    """
    if why := malformed(record):
        return f"{request.id}: {why}"
    sampling, count = request.sampling, len(record.tokens)
    replaced = _replaced(record, request)
    begun = 0 if request.partial is None else len(request.partial.tokens) - replaced
    # An environment may end an episode on the turn with which its partial ended.
    has_turn = count > begun or is_episode and count > 0
    is_stopped = has_turn and record.tokens[-1] in sampling.stop_ids
    ends = {
        "stop": is_stopped, "length": count == sampling.max_tokens and not is_stopped,
        "abort": count < sampling.max_tokens and not is_stopped,
    }
    if is_episode:
        ends = _ends_of_episode(record, is_stopped)
    new = record.version[begun:][record.mask[begun:]]
    wrong = {
        "prompt": not np.array_equal(record.prompt, request.prompt),
        "request": (record.id, record.seed, record.request) != (request.id, request.seed, request.hash),
        "temperature": record.temperature != sampling.temperature,
        "quant_id": record.quant_id != engine.quant_id,
        "stop_reason": not (record.stop_reason in ends and ends[record.stop_reason]),
        "tokens": not np.all((record.tokens >= 0) & (record.tokens < engine.vocab_size)),
        "mask": not (_has_turns(record, sampling.max_tokens) if is_episode else _is_single(record)),
        "evict_step": len(record.evict_step) > 0 and not (
            retention is not None and retention.allows(
                record.evict_step, len(record.prompt), len(record.prompt) + sampling.max_tokens,
                engine.page_size,
            )
        ),
        "forks": len(record.forks) > 0 or record.fork != 0,
        "logp_behav": not np.all(np.isfinite(record.logp_behav) & (record.logp_behav <= ROUNDING)),
        "version": not np.all((new >= oldest) & (new <= newest)) or np.any(np.diff(record.version) < 0),
        "kv_version": len(record.kv_version) != count or np.any(record.kv_version > record.version),
        "segment": len(record.segment) != count or np.any(np.diff(record.segment) < 0),
    }
    drafts = draft_fields(record)
    is_drafted = drafts["drafter_version"] != NO_DRAFTER
    wrong["drafter_version"] = np.any(drafts["drafter_version"] < NO_DRAFTER) or np.any(
        drafts["drafter_version"] > record.version
    )
    wrong["accepted"] = np.any(drafts["accepted"] & ~is_drafted)
    wrong["routes"] = (
        record.routes.shape[1:] != engine.route_shape
        or any(engine.route_shape) and record.routes.dtype != route_dtype(engine.num_experts)
        or record.routes.max(initial=0) >= max(engine.num_experts, 1)
        or has_equal(record.routes)
        or count > 0 and any(engine.route_shape) and not len(record.routes)
    )
    wrong["rerouted"] = any(engine.route_shape) and not (
        0 <= record.rerouted[1] <= record.rerouted[0]
    )
    if count:
        wrong |= {
            name: getattr(record, name).shape != (count, getattr(engine, field.width))
            for name, field in DRAWN.items() if field.width
        }
    if begun and request.partial is not None:
        routes = request.partial.routes[: max(len(request.partial.routes) - replaced, 0)]
        fields = [
            {name: getattr(t, name) for name in PER_TOKEN if name not in OF_DRAFTS} | draft_fields(t)
            for t in (record, request.partial)
        ]
        wrong["beginning"] = not all(
            np.array_equal(*(of[name][:begun] for of in fields)) for name in PER_TOKEN
        ) or not np.array_equal(record.routes[: len(routes)], routes)
    named = [name for name, is_so in wrong.items() if is_so]
    return f"{request.id}: wrong {', '.join(named)}" if named else None


def _replaced(record: Trajectory, request: Request) -> int:
    """Returns 1 if the last token of the partial is the sampled end of a turn, and another one
    replaced it (Trajectory.joins)."""
    partial = request.partial
    if partial is None or not len(partial.tokens) or not partial.mask[-1]:
        return 0
    turn = int(partial.turn[-1])
    is_end = partial.tokens[-1] in request.sampling.stop_ids
    return int(is_end and record.joins[turn : turn + 1] == ("replace",))


def _ends_of_episode(record: Trajectory, is_stopped: bool) -> dict[str, bool]:
    """Returns whether the outcome allows each stop reason. A failed episode has that of its last
    turn."""
    is_failed = record.outcome in ("failed", "timeout")
    return {
        "stop": record.outcome == "done" or is_failed and is_stopped,
        "length": record.outcome in ("max_turns", "overlong") or is_failed and not is_stopped,
        "abort": record.outcome == "",
    }


def _is_single(record: Trajectory) -> bool:
    """Whether a record is one turn, without an environment."""
    said = len(record.turn_rewards) + len(record.metrics) + len(record.joins)
    return bool(record.mask.all() and not record.turn.any() and not record.outcome and not said)


def _has_turns(record: Trajectory, most: int) -> bool:
    """Whether each turn after the first begins with given tokens, whose log-probs and entropy are
    0, and has at most `most` sampled tokens."""
    mask, turn = record.mask, record.turn
    if not len(mask):
        return True
    begins = np.concatenate([[0], np.cumsum(mask[:-1] & ~mask[1:])])
    given = [getattr(record, name)[~mask] for name in ("logp_behav", "logp_raw", "entropy")]
    return bool(
        mask[0] and np.array_equal(turn, begins) and np.bincount(turn[mask]).max() <= most
        and not np.any(given)
    )
