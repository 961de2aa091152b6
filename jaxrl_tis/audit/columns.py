"""Defines the columns of a dump and checks the values of one sequence."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_tis.audit import route_columns

LOG_PROBS = ("logp_behav", "logp_old", "logp")
WHOLE_NUMBERS = ("version", "turn", "position")
TOKEN = (*LOG_PROBS, "mask", *WHOLE_NUMBERS, "entropy", "top")
ROUTES = ("routes_behav", "routes_old")  # of all input tokens, see `route_columns`
COUNTS = ("prompt_tokens", "routes_start")
SEQUENCE = ("reward", "group", *COUNTS)
COLUMNS = (*TOKEN, *SEQUENCE, *ROUTES)
REQUIRED = ("logp_behav", "logp_old")

ROUNDING = 1e-4  # a log-softmax in float32 may end this much above 0


class Bad(Exception):
    """Raised for a bad column of one sequence; its text says what is wrong."""


def nearest(name: str) -> str:
    """Returns a hint for an unknown column: the nearest name, or all names."""
    near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(COLUMNS)}"


def check(
    record: Mapping[str, Any], routes_shape: tuple[int, int] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Checks the values of one sequence and converts them to arrays.

    Args:
      record: column -> its values: lists or arrays, and a number or a text for `SEQUENCE`.
      routes_shape: (L, k) of routes that do not state their shape.

    Returns ({column: array [T], a number, or `route_columns.Routes`},
    ["column: what is wrong with it", ...]); with anything wrong the first is not complete.
    """
    values, problems = {}, []
    for name in record:
        if name not in COLUMNS:
            problems.append(f"unknown column {name!r}; {nearest(name)}")
    for name in REQUIRED:
        if name not in record:
            problems.append(f"column {name!r} is missing")
    if "prompt_tokens" not in record and any(name in record for name in ROUTES):
        problems.append("column 'prompt_tokens' is missing; routes count the tokens of the prompt")
    if problems:
        return values, problems
    try:
        num_tokens = _count(record["logp_behav"])
        values["mask"] = _mask(record, num_tokens)
    except Bad as error:
        return values, [str(error)]
    for name, value in record.items():
        try:
            if name in ROUTES:
                start = record.get("routes_start", 0)
                values[name] = _routes(value, start, routes_shape)
            elif name != "mask":
                values[name] = _read(name, value, values["mask"])
        except Bad as error:
            problems.append(f"{name}: {error}")
    return values, problems


def _count(value):
    if not isinstance(value, (list, np.ndarray)):
        raise Bad("logp_behav: not a list of numbers")
    if len(value) == 0:
        raise Bad("logp_behav: an empty sequence; leave it out")
    return len(value)


def _mask(record, num_tokens):
    if "mask" not in record:
        return np.ones(num_tokens, bool)
    try:
        x = _numbers(record["mask"], num_tokens)
    except Bad as error:
        raise Bad(f"mask: {error}") from None
    if not np.isin(x, (0, 1)).all():
        raise Bad("mask: has values other than 0 and 1")
    return x != 0


def _read(name, value, mask):
    if name == "group":
        return _group(value)
    if name == "reward":
        return _reward(value)
    if name in COUNTS:
        return _whole_number(value)
    if name == "top":
        return _top(value, mask)
    if name == "version" and np.ndim(value) == 0:
        value = np.full(len(mask), value)
    x = _numbers(value, len(mask))
    if name == "entropy":
        return _entropies(x, mask)
    return _whole(x, mask) if name in WHOLE_NUMBERS else _log_probs(x, mask)


def _numbers(value, num_tokens):
    """[T] of any number; what is null is NaN."""
    try:
        x = np.asarray(value)
        if x.dtype == object and not any(isinstance(v, (str, list, dict)) for v in x.flat):
            x = x.astype(float)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths, numbers of 400 digits
        raise Bad("not a list of numbers") from None
    if x.ndim != 1 or (x.dtype.kind not in "biuf" and x.size):
        raise Bad("not a list of numbers")
    if len(x) != num_tokens:
        raise Bad(f"{len(x)} values, and logp_behav has {num_tokens}")
    return x


def _log_probs(x, mask):
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    _refuse(x, mask & ~np.isfinite(x), "is not finite")
    _refuse(x, mask & (x > ROUNDING), "is above 0, so it is not a log-prob")
    return np.where(mask, x, 0.0).astype(np.float32)


def _entropies(x, mask):
    """[T] nats, NaN where a sampler gives none."""
    x = x.astype(np.float32)
    _refuse(x, mask & np.isinf(x), "is not finite")
    _refuse(x, mask & (x < -ROUNDING), "is below 0, so it is not an entropy")
    return np.where(mask, np.maximum(x, 0.0), 0.0).astype(np.float32)


def _whole(x, mask):
    if x.dtype.kind == "f" and np.array_equal(x[mask], np.floor(x[mask])):
        x = np.where(mask, x, 0)  # what is null at masked tokens made it floats
    elif x.dtype.kind not in "iu":
        raise Bad("not whole numbers")
    _refuse(x, mask & (x < 0), "is below 0")
    _refuse(x, mask & (x >= 2**31), "is above 2^31")
    return np.where(mask, x, 0).astype(np.int32)


def _refuse(x, is_bad, what):
    if is_bad.any():
        t = int(is_bad.argmax())
        more = f", and {is_bad.sum() - 1} more" if is_bad.sum() > 1 else ""
        raise Bad(f"token {t} is {x[t]:g} and {what}{more}")


def _top(value, mask):
    """[T,K,2] log-probs of the head's tokens, NaN where a head has fewer."""
    try:
        x = np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError):
        raise Bad("not K pairs of log-probs for every token, K the same for all") from None
    if x.ndim != 3 or x.shape[2] != 2 or not x.shape[1]:
        raise Bad("not K pairs of log-probs for every token, K the same for all")
    if len(x) != len(mask):
        raise Bad(f"{len(x)} values, and logp_behav has {len(mask)}")
    is_wrong = (np.isinf(x) | (x > ROUNDING)).any(axis=(1, 2)) & mask
    if is_wrong.any():
        raise Bad(
            f"token {int(is_wrong.argmax())} has a value above 0 or infinite, which is not a "
            "log-prob"
        )
    return x


def _routes(value, start, shape):
    try:
        return route_columns.decode(value, _whole_number(start), shape)
    except ValueError as error:
        raise Bad(str(error)) from None


def _whole_number(value):
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 0:
        raise Bad(f"{value!r} is not a whole number from 0")
    return int(value)


def _reward(value):
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value):
        raise Bad(f"{value!r} is not a finite number")
    return float(value)


def _group(value):
    if isinstance(value, (str, np.str_)):
        return str(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise Bad(f"{value!r} is neither a whole number nor a text")
