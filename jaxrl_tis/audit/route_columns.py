"""Decodes the recorded routes of one sequence, in the forms that samplers return them.

A record has a row [L,k] of chosen experts for each input token of the context. Forms:

  list     rows as nested lists, or an array [rows,L,k] (vLLM's choices, verl, slime, SkyRL, NeMo-RL)
  object   {"data": base64, "shape": [rows,L,k], "dtype": name, "start": first row} (vLLM's generate)
  string   base64 of int32 (SGLang), whose L and k stand nowhere in it
  null     the sequence has no routes
"""

import base64
import binascii
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("uint8", "uint16", "int8", "int16", "int32", "int64")


class Routes(NamedTuple):
    """The routes of a sequence: ids [rows,L,k] int32; row i is of input token `start` + i."""

    ids: np.ndarray
    start: int


def decode(value: Any, start: int, shape: tuple[int, int] | None) -> Routes:
    """Returns the routes in any of the forms.

    Args:
      value: the record, see the top of the file.
      start: first input token of a record that does not state it.
      shape: (L, k) of a string.

    Raises ValueError, which says what is wrong with it.
    """
    if value is None:
        return Routes(np.zeros((0, 0, 0), np.int32), start)
    if isinstance(value, str):
        return Routes(_of_bytes(value, "int32", (-1, *_given(shape))), start)
    if isinstance(value, dict):
        return _of_object(value, start)
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of several lengths
        raise ValueError("not rows of [L,k] expert ids, L and k the same in all rows") from None
    if ids.size == 0 and ids.ndim < 3:
        return Routes(np.zeros((0, 0, 0), np.int32), start)
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise ValueError("not rows of [L,k] expert ids, L and k the same in all rows")
    return Routes(ids.astype(np.int32), start)


def _given(shape):
    if shape is None:
        raise ValueError("a base64 string does not state its shape; give --routes_shape=LAYERS,K")
    return shape


def _of_object(value, start):
    unknown = sorted({"data", "shape", "dtype"} - value.keys())
    if unknown:
        raise ValueError(f"the object lacks {unknown[0]!r}; it needs data, shape and dtype")
    shape, start = value["shape"], value.get("start", start)
    is_count = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0
    if not isinstance(shape, list) or len(shape) != 3 or not all(map(is_count, shape)):
        raise ValueError(f"shape {shape!r} is not [rows, L, k]")
    if not is_count(start):
        raise ValueError(f"start {start!r} is not a whole number from 0")
    return Routes(_of_bytes(value["data"], str(value["dtype"]), tuple(shape)), start)


def _of_bytes(data, dtype, shape):
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"data is not base64 ({error})") from None
    row = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
    if not row or len(raw) % row or shape[0] not in (-1, len(raw) // row):
        raise ValueError(f"{len(raw)} bytes are not rows of {list(shape[1:])} ids of {dtype}, "
                         f"{'any number' if shape[0] < 0 else shape[0]} of them")
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape).astype(np.int32)
