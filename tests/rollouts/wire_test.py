"""Records as bytes: everything survives, and nothing that is not a record gets through."""

import dataclasses
import json
import math
import socket
import struct
import threading
import time

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.rollouts import wire

settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
FLOATS = np.array([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf], np.float32)


def trajectory(**changes) -> Trajectory:
    """With every optional field recorded."""
    n, v = 3, 5
    fields = dict(
        id="a/0/ü\n", prompt=np.array([4, 2], np.int32), tokens=np.arange(n, dtype=np.int32),
        logp_behav=np.array([-0.1, -np.inf, np.nan], np.float32),
        logp_raw=np.array([-0.2, -0.3, -1e-42], np.float32), entropy=np.ones(n, np.float32),
        version=np.array([7, 7, 8], np.int32), stop_reason="abort", seed=2**40, request=2**32 - 1,
        quant_id="w8a8 except o", temperature=0.1 + 0.2, mask=np.array([True, False, True]),
        turn=np.array([0, 1, 1], np.int32), kv_version=np.array([7, 7, 7], np.int32),
        segment=np.array([0, 0, 1], np.int32), logits=FLOATS[:5] * np.ones((n, v), np.float32),
        evict_step=np.full(5, 2**31 - 1, np.int32), top_ids=np.array([[1, -1]] * n, np.int32),
        top_logps=np.array([[-0.5, -np.inf]] * n, np.float32), kept=-np.ones((n, 2), np.int32),
        prompt_logps=np.array([np.nan, -2.0], np.float32),
    )
    return Trajectory(**fields | changes)


def same(a, b) -> bool:
    """Bit by bit, NaNs included."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    return type(a) is type(b) and a == b


def test_every_field_of_the_records_is_known():
    names = {field.name for field in dataclasses.fields(Trajectory)}
    assert names == {*wire.ARRAYS, *wire.SCALARS}
    names = {field.name for field in dataclasses.fields(Request)}
    assert names == {"id", "prompt", "seed", "sampling", "partial"}


def test_a_trajectory_survives():
    empty = dataclasses.replace(trajectory(), **{
        name: np.zeros((0,) * dims, dtype) for name, (dtype, dims, _) in wire.ARRAYS.items()
    })
    plain = trajectory(**{
        name: np.zeros((0,) * dims, dtype) for name, (dtype, dims, entries) in wire.ARRAYS.items()
        if entries == wire.OPTIONAL
    }, mask=None, turn=None, temperature=1)
    for t in (trajectory(), plain, empty):
        read = wire.read_trajectory(wire.trajectory_message(t))
        assert same(read, t) and read.tokens.flags.writeable


@pytest.mark.parametrize("partial", [None, trajectory()])
def test_a_request_survives(partial):
    sampling = SamplingParams(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.01, stop_ids=(1, 2), stop_strings=("\n\n", "ß"),
        max_tokens=99, repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.25,
        logit_bias=((3, 0.5), (4, -2.0)), min_tokens=2, prompt_logprobs=True,
    )
    requests = [
        Request("x", [5, 6], -3, sampling, partial), Request("y", [], 2**70, SamplingParams(), partial)
    ]
    for r in requests:
        assert same(wire.read_request(wire.request_message(r)), r)


def test_scalars_of_numpy_become_numbers():
    sampling = SamplingParams(top_k=np.int64(3), stop_ids=(np.int32(1),), temperature=np.float32(0.5))
    r = wire.read_request(wire.request_message(Request("x", [5], 0, sampling)))
    assert r.sampling == SamplingParams(top_k=3, stop_ids=(1,), temperature=0.5)
    assert type(r.sampling.top_k) is int


def arrays(dtype: np.dtype):
    """Arrays of any bits: what a float8 or a NaN holds matters too."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
    bits = hnp.arrays(f"u{dtype.itemsize}", shapes)
    return bits.map(lambda x: (x & 1).astype(bool) if dtype == bool else x.view(dtype))


@settings
@hypothesis.given(st.dictionaries(
    st.text(max_size=5), st.sampled_from(list(wire.DTYPES.values())).flatmap(arrays), max_size=4
))
def test_arrays_of_every_dtype_survive(found):
    header, read = wire.unpack(wire.pack({"n": 1}, found))
    assert header == {"n": 1} and list(read) == list(found)
    assert all(same(read[name], found[name]) for name in found)


@settings
@hypothesis.given(st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.text()))
def test_scalars_survive(header):
    read, _ = wire.unpack(wire.pack(header, {}))
    assert read.keys() == header.keys()
    for name, value in header.items():
        assert read[name] == value or (math.isnan(value) and math.isnan(read[name]))


def test_the_bytes_of_arrays_are_little_endian_whatever_they_were():
    big = np.array([[1, 2], [3, 4]], ">i2").T
    data = wire.pack({}, {"a": big})
    assert data.endswith(bytes([1, 0, 3, 0, 2, 0, 4, 0]))
    np.testing.assert_array_equal(wire.unpack(data)[1]["a"], big)
    assert wire.pack({}, {"a": np.array(1, ml_dtypes.bfloat16)}).endswith(b"\x80\x3f")


# What is refused


@settings
@hypothesis.given(st.binary(max_size=80))
def test_garbage_is_refused(data):
    for read in (wire.unpack, wire.read_trajectory, wire.read_request):
        with pytest.raises(wire.Damaged):
            read(data)
        with pytest.raises(wire.Damaged):
            read(wire.START.pack(wire.MAGIC, wire.VERSION, len(data)) + data)


def test_every_truncation_is_refused():
    data = wire.trajectory_message(trajectory())
    for end in range(len(data)):
        with pytest.raises(wire.Damaged):
            wire.unpack(data[:end])
    with pytest.raises(wire.Damaged, match="the arrays|arrays came, it speaks of"):
        wire.unpack(data + b"\0")


@settings
@hypothesis.given(st.data())
def test_a_changed_byte_gives_a_record_or_a_refusal(data):
    """The sha256 of the frame sees all of them; without it nothing else is raised."""
    message = bytearray(wire.request_message(Request("x", [1], 0, SamplingParams(), trajectory())))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(wire.read_request(bytes(message)), Request)
    except ValueError as error:
        assert str(error)


def message(*described, payload: bytes = b"", **head) -> bytes:
    text = json.dumps({"header": {}, "arrays": list(described)} | head).encode()
    return wire.START.pack(wire.MAGIC, wire.VERSION, len(text)) + text + payload


@pytest.mark.parametrize("data, why", [
    (message(["a", "object", [1], 0], payload=b"x" * 8), "'object', which is never sent"),
    (message(["a", ["int8"], [1], 0], payload=b"x"), "which is never sent"),
    (message(["a", "int8", [-1], 0]), r"shape \[-1\]"),
    (message(["a", "int8", [1.0], 0], payload=b"x"), r"shape \[1.0\]"),
    (message(["a", "int8", [True], 0], payload=b"x"), r"shape \[True\]"),
    (message(["a", "int8", [2**50], 0]), "has shape"),
    (message(["a", "int8", [0, 2**39, 2**39], 0]), "has shape"),
    (message(["a", "int8", [1] * 9, 0], payload=b"x"), "has shape"),
    (message(["a", "int32", [2**40], 0]), f"ends at byte {2**42} of 0 that came"),
    (message(["a", "int8", [2], 0], payload=b"x"), "ends at byte 2 of 1"),
    (message(["a", "int8", [1], 1], payload=b"xx"), "not where it should begin"),
    (message(["a", "int8", [1], 0], ["a", "int8", [1], 1], payload=b"xx"), "twice"),
    (message(["a", "int8", [1], 0], payload=b"xx"), "2 bytes of arrays came, it speaks of 1"),
    (message(["a", "bool", [1], 0], payload=b"\2"), "is bool and holds other bytes"),
    (message(["a", "int8", [1]]), "is not name, dtype, shape and offset"),
    (message(header=[]), "not a header and a list of arrays"),
    (message(more=1), "not a header and a list of arrays"),
    (wire.START.pack(b"GET / HT", 1, 0), "it begins with b'GET / HT'"),
    (wire.START.pack(wire.MAGIC, 2, 0), "format 2; this code reads format 1"),
    (wire.START.pack(wire.MAGIC, 1, 2**32 - 1), "a head of 4294967295 bytes"),
    (wire.START.pack(wire.MAGIC, 1, 2**20 + 1) + bytes(2**20 + 1), "1048576 that are allowed"),
    (wire.START.pack(wire.MAGIC, 1, 100_000) + b"[" * 100_000, "is not JSON"),
])
def test_a_message_that_lies_is_refused(data, why):
    with pytest.raises(wire.Damaged, match=why):
        wire.unpack(data)


@pytest.mark.parametrize("changes, why", [
    (dict(logp_raw=np.zeros(2, np.float32)), "logp_raw has 2 entries for 3 tokens"),
    (dict(kept=np.zeros((1, 4), np.int32)), "kept has 1 entries for 3 tokens"),
    (dict(tokens=np.array(3, np.int32)), r"tokens is int32 of shape \(\)"),
    (dict(logp_behav=np.zeros(3)), "logp_behav is float64 of shape"),
    (dict(stop_reason=None), "stop_reason is None"),
    (dict(seed=True), "seed is True"),
])
def test_a_record_that_contradicts_itself_is_refused(changes, why):
    t = trajectory()
    for name, value in changes.items():
        object.__setattr__(t, name, value)
    with pytest.raises(wire.Damaged, match=why):
        wire.read_trajectory(wire.trajectory_message(t))


def test_one_kind_is_not_read_as_another():
    request = Request("x", [1], 0, SamplingParams())
    with pytest.raises(wire.Damaged, match="is no trajectory"):
        wire.read_trajectory(wire.request_message(request))
    header, found = wire.unpack(wire.request_message(request))
    changed = lambda **values: wire.pack(header | {"sampling": header["sampling"] | values}, found)
    with pytest.raises(ValueError, match="temperature=-1.0 must be"):
        wire.read_request(changed(temperature=-1.0))
    with pytest.raises(wire.Damaged, match="sampling parameters: "):
        wire.read_request(changed(stop_ids=1))
    with pytest.raises(wire.Damaged, match="sampling parameters are not temperature, top_k"):
        wire.read_request(changed(top_q=1))
    with pytest.raises(wire.Damaged, match="of no partial"):
        wire.read_request(wire.pack(header, found | {"partial.tokens": found["prompt"]}))


def test_what_cannot_be_sent_is_said_before():
    with pytest.raises(ValueError, match="array a is object; what can be sent is bool, int8"):
        wire.pack({}, {"a": np.array([{}])})
    with pytest.raises(ValueError, match="is a set, which JSON cannot hold"):
        wire.pack({"a": {1}}, {})
    with pytest.raises(ValueError, match="at most 1048576 are sent"):
        wire.pack({"a": "x" * 2**20}, {})


# Frames


@pytest.fixture
def ends():
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def soon() -> float:
    return time.monotonic() + 0.05


def late() -> float:
    return time.monotonic() + 20


def test_a_frame_arrives(ends):
    a, b = ends
    data = bytes(range(256)) * 4096  # more than the sockets hold
    counts = []
    thread = threading.Thread(target=lambda: counts.append(wire.send(a, data, late())))
    thread.start()
    assert wire.receive(b, len(data), late()) == data
    thread.join()
    assert counts == [len(data) + 40]
    wire.send(a, b"", late())
    assert wire.receive(b, 0, late()) == b""


def test_every_changed_byte_of_a_frame_is_seen(ends):
    a, b = ends
    wire.send(a, b"weights", late())
    frame = b.recv(100)
    for i in range(8, len(frame)):
        changed = bytearray(frame)
        changed[i] ^= 1 << i % 8
        a.sendall(changed)
        with pytest.raises(wire.Damaged, match="its sha256 differs"):
            wire.receive(b, 10, late())


def test_a_frame_beyond_the_limit_is_not_read(ends):
    a, b = ends
    a.sendall(struct.pack("<Q32s", 2**62, b""))
    with pytest.raises(wire.Damaged, match=f"announces {2**62} bytes; at most 10"):
        wire.receive(b, 10, late())


def test_a_silent_or_slow_end_is_given_up(ends):
    a, b = ends
    with pytest.raises(TimeoutError):
        wire.receive(b, 10, soon())
    with pytest.raises(TimeoutError):
        wire.send(a, bytes(2**22), soon())  # nobody reads
    with pytest.raises(TimeoutError, match="took too long"):
        wire.receive(a, 10, time.monotonic() - 1)


def test_a_byte_now_and_then_does_not_move_the_deadline(ends):
    a, b = ends
    is_over = threading.Event()

    def drip():
        while not is_over.wait(0.01):
            a.sendall(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.receive(b, 10, start + 0.1)
    assert time.monotonic() - start < 5
    is_over.set()
    thread.join()


def test_an_end_that_is_gone_is_said(ends):
    a, b = ends
    a.sendall(b"12")
    a.close()
    with pytest.raises(ConnectionError, match="closed after 2 of 40 bytes"):
        wire.receive(b, 10, late())
