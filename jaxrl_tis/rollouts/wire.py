"""Serializes records as bytes, and sends bytes over sockets. Nothing is pickled.

A message is MAGIC, VERSION, the length of its head, the head in JSON, and the raw little-endian
bytes of its arrays in the order of the head. A frame on a socket is the number of its bytes, their
sha256, and the bytes.
"""

import dataclasses
import hashlib
import json
import math
import socket
import struct
import time
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory

MAGIC, VERSION = b"jaxrltis", 1
START = struct.Struct("<8sII")  # MAGIC, VERSION, length of the head
HEAD_BYTES = 1 << 20  # at most
MAX_DIMS, MAX_SIZE = 8, 1 << 40
FRAME = struct.Struct("<Q32s")  # length, sha256
DTYPES = {
    np.dtype(kind).name: np.dtype(kind) for kind in (
        np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e3m4,
        ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    )
}
# The arrays of a trajectory: dtype, number of dimensions, and their entries: ALWAYS one for each
# token, OPTIONAL one for each token or none at all, OTHER another number.
ALWAYS, OPTIONAL, OTHER = "always", "optional", "other"
ARRAYS = {
    "prompt": ("int32", 1, OTHER),
    "tokens": ("int32", 1, ALWAYS),
    "logp_behav": ("float32", 1, ALWAYS),
    "logp_raw": ("float32", 1, ALWAYS),
    "entropy": ("float32", 1, ALWAYS),
    "version": ("int32", 1, ALWAYS),
    "mask": ("bool", 1, ALWAYS),
    "turn": ("int32", 1, ALWAYS),
    "kv_version": ("int32", 1, OPTIONAL),
    "segment": ("int32", 1, OPTIONAL),
    "logits": ("float32", 2, OPTIONAL),
    "evict_step": ("int32", 1, OTHER),
    "top_ids": ("int32", 2, OPTIONAL),
    "top_logps": ("float32", 2, OPTIONAL),
    "kept": ("int32", 2, OPTIONAL),
    "prompt_logps": ("float32", 1, OTHER),
}
SCALARS = {
    "id": str, "stop_reason": str, "seed": int, "request": int, "quant_id": str,
    "temperature": (int, float),
}
PARTIAL = "partial."  # begins the names of the arrays of a request's partial trajectory


class Damaged(ValueError):
    """Received bytes are damaged, or are not a message of this program."""


def pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Returns a message of a JSON header and arrays of DTYPES. NaN and infinities have Python's
    spelling, and NumPy scalars become Python's.

    Raises:
      ValueError: an array has another dtype, or the head is larger than HEAD_BYTES.
    """
    parts, described, offset = [], [], 0
    for name, array in arrays.items():
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise ValueError(f"array {name} is {dtype}; what can be sent is {', '.join(DTYPES)}")
        parts.append(np.asarray(array, DTYPES[dtype], order="C").tobytes())
        described.append([name, dtype, array.shape, offset])
        offset += len(parts[-1])
    head = json.dumps({"header": header, "arrays": described}, default=_scalar).encode()
    if len(head) > HEAD_BYTES:
        raise ValueError(f"a message with a head of {len(head)} bytes; at most {HEAD_BYTES} are sent")
    return b"".join([START.pack(MAGIC, VERSION, len(head)), head, *parts])


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(f"{value!r} is a {type(value).__name__}, which JSON cannot hold")


def unpack(data: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and copies of the arrays of a message.

    Raises:
      Damaged: the bytes are not a complete message of this version.
    """
    data = memoryview(data)
    head, payload = _head(data)
    header, described = head["header"], head["arrays"]
    arrays, end = {}, 0
    for entry in described:
        name, dtype, shape, offset = _described(entry)
        if name in arrays or offset != end:
            raise Damaged(f"damaged message: array {name!r} twice, or not where it should begin")
        end += math.prod(shape) * dtype.itemsize
        if end > len(payload):
            raise Damaged(
                f"damaged message: array {name!r} ends at byte {end} of {len(payload)} that came"
            )
        raw = payload[offset:end]
        if dtype == bool and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
            raise Damaged(f"damaged message: array {name!r} is bool and holds other bytes")
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape).copy()
    if end != len(payload):
        raise Damaged(f"damaged message: {len(payload)} bytes of arrays came, it speaks of {end}")
    return header, arrays


def _head(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns a message's head and the bytes of its arrays."""
    if len(data) < START.size:
        raise Damaged(f"damaged message: {len(data)} bytes are less than its first {START.size}")
    magic, version, length = START.unpack(data[: START.size])
    if magic != MAGIC:
        raise Damaged(f"not a message: it begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise Damaged(f"a message of format {version}; this code reads format {VERSION}")
    if length > min(HEAD_BYTES, len(data) - START.size):
        raise Damaged(
            f"damaged message: a head of {length} bytes, of {len(data) - START.size} that came and "
            f"{HEAD_BYTES} that are allowed"
        )
    try:
        head = json.loads(bytes(data[START.size : START.size + length]))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"damaged message: its head is not JSON: {error}") from error
    if not (
        isinstance(head, dict) and head.keys() == {"header", "arrays"}
        and isinstance(head["header"], dict) and isinstance(head["arrays"], list)
    ):
        raise Damaged("damaged message: its head is not a header and a list of arrays")
    return head, data[START.size + length :]


def _described(entry: Any) -> tuple[str, np.dtype, tuple[int, ...], int]:
    is_count = lambda x: type(x) is int and 0 <= x <= MAX_SIZE
    if not (isinstance(entry, list) and len(entry) == 4):
        raise Damaged(f"damaged message: {entry!r} is not name, dtype, shape and offset")
    name, dtype, shape, offset = entry
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged(f"damaged message: array {name!r} is {dtype!r}, which is never sent")
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_count, shape))
            and math.prod(max(n, 1) for n in shape) <= MAX_SIZE and is_count(offset)):
        raise Damaged(f"damaged message: array {name!r} has shape {shape} at byte {offset}")
    return name, DTYPES[dtype], tuple(shape), offset


def trajectory_message(t: Trajectory) -> bytes:
    """Returns a trajectory as a message; `read_trajectory` is the inverse."""
    scalars, arrays = _split(t)
    return pack({"kind": "trajectory", "trajectory": scalars}, arrays)


def request_message(r: Request) -> bytes:
    """Returns a request as a message, with its partial trajectory; `read_request` is the inverse."""
    header = {"kind": "request", "id": r.id, "seed": r.seed,
              "sampling": dataclasses.asdict(r.sampling), "partial": None}
    arrays = {"prompt": r.prompt}
    if r.partial is not None:
        header["partial"], partial = _split(r.partial)
        arrays |= {PARTIAL + name: array for name, array in partial.items()}
    return pack(header, arrays)


def _split(t: Trajectory) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    scalars = {name: getattr(t, name) for name in SCALARS}
    return scalars, {name: getattr(t, name) for name in ARRAYS}


def read_trajectory(data: bytes) -> Trajectory:
    """Returns the trajectory of a message; raises Damaged if the bytes are none."""
    header, arrays = _of_kind(data, "trajectory", {"trajectory"})
    return _trajectory(header["trajectory"], arrays)


def read_request(data: bytes) -> Request:
    """Returns the request of a message. Raises Damaged if the bytes are none, ValueError for values
    out of range."""
    header, arrays = _of_kind(data, "request", {"id", "seed", "sampling", "partial"})
    if "prompt" not in arrays:
        raise Damaged("damaged request: it has no prompt")
    prompt, partial = arrays.pop("prompt"), None
    if header["partial"] is not None:
        named = {name.removeprefix(PARTIAL): array for name, array in arrays.items()}
        partial = _trajectory(header["partial"], named)
    elif arrays:
        raise Damaged(f"damaged request: arrays {', '.join(arrays)} of no partial trajectory")
    return Request(header["id"], prompt, header["seed"], _sampling(header["sampling"]), partial)


def _of_kind(data: bytes, kind: str, names: set[str]) -> tuple[dict, dict[str, np.ndarray]]:
    header, arrays = unpack(data)
    if header.keys() != names | {"kind"} or header["kind"] != kind:
        raise Damaged(f"a message with {', '.join(header)} is no {kind}")
    return header, arrays


def _sampling(values: Any) -> SamplingParams:
    names = dict.fromkeys(field.name for field in dataclasses.fields(SamplingParams))
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise Damaged(f"damaged request: its sampling parameters are not {', '.join(names)}")
    try:
        biases = tuple((token, bias) for token, bias in values["logit_bias"])
        lists = {name: tuple(values[name]) for name in ("stop_ids", "stop_strings")}
        return SamplingParams(**values | lists | {"logit_bias": biases})
    except TypeError as error:
        raise Damaged(f"damaged request: its sampling parameters: {error}") from error


def _trajectory(scalars: Any, arrays: dict[str, np.ndarray]) -> Trajectory:
    if not isinstance(scalars, dict) or scalars.keys() != SCALARS.keys():
        raise Damaged(f"damaged trajectory: its scalars are not {', '.join(SCALARS)}")
    for name, kind in SCALARS.items():
        if not isinstance(scalars[name], kind) or isinstance(scalars[name], bool):
            raise Damaged(f"damaged trajectory: {name} is {scalars[name]!r}")
    if arrays.keys() != ARRAYS.keys():
        raise Damaged(f"damaged trajectory: its arrays are {', '.join(arrays)}")
    count = len(arrays["tokens"]) if arrays["tokens"].ndim else 0
    for name, (dtype, dims, entries) in ARRAYS.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != dims:
            raise Damaged(
                f"trajectory {scalars['id']}: {name} is {array.dtype} of shape {array.shape}; it "
                f"should be {dtype} of {dims} dimensions"
            )
        if entries != OTHER and len(array) not in ({count} if entries == ALWAYS else {count, 0}):
            raise Damaged(
                f"trajectory {scalars['id']}: {name} has {len(array)} entries for {count} tokens"
            )
    return Trajectory(**scalars, **arrays)


def send(connection: socket.socket, data: bytes | memoryview, deadline: float) -> int:
    """Sends a frame and returns its number of bytes.

    Args:
      deadline: time.monotonic() by which all bytes must be sent.

    Raises:
      TimeoutError: the deadline has passed. ConnectionError: the other end is gone.
    """
    start = FRAME.pack(len(data), hashlib.sha256(data).digest())
    for part in (start, data):
        connection.settimeout(_left(deadline))
        connection.sendall(part)
    return len(start) + len(data)


def receive(connection: socket.socket, limit: int, deadline: float) -> bytearray:
    """Receives a frame of at most `limit` bytes.

    Raises:
      Damaged: the frame announces more bytes, or its sha256 differs.
      TimeoutError: the deadline has passed. ConnectionError: the other end is gone.
    """
    length, digest = FRAME.unpack(_exactly(connection, FRAME.size, deadline))
    if length > limit:
        raise Damaged(f"a frame that announces {length} bytes; at most {limit} are taken here")
    data = _exactly(connection, length, deadline)
    if hashlib.sha256(data).digest() != digest:
        raise Damaged(f"a frame of {length} bytes is damaged: its sha256 differs")
    return data


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytearray:
    data, done = bytearray(count), 0
    while done < count:
        connection.settimeout(_left(deadline))
        got = connection.recv_into(memoryview(data)[done:])
        if got == 0:
            raise ConnectionError(f"the other end closed after {done} of {count} bytes")
        done += got
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end took too long")
    return left
