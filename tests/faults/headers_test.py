"""Model files with forged headers: one clear error within bounded time and memory, never a crash."""

import contextlib
import json
import pathlib
import resource
import struct
import tempfile

import jax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jaxrl_tis import models
from jaxrl_tis.models import gguf, safetensors, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests.models import gguf_test

pytestmark = [pytest.mark.faults, pytest.mark.all]

MODEL = ModelConfig(
    family="llama", vocab_size=24, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_dim=24, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=True,
)
FUZZ = settings(
    max_examples=800, deadline=4000, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SPARE = 1 << 30  # bytes above what the process has
EXTREMES = st.sampled_from([0, 1, 10**8, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63,
                            2**64 - 1])


@contextlib.contextmanager
def bounded_memory():
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def refused_or_read(load, path):
    """What `load` may do with a forged file: return, or refuse it with one sentence."""
    with bounded_memory():
        try:
            load(path)
        except ValueError as error:
            assert len(f"{error}") < 2000 and f"{error}".strip()


@pytest.fixture(scope="module")
def gguf_bytes():
    params = transformer.init(MODEL, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        gguf_test.written(path, (MODEL, params))
        return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    models.save(folder, MODEL, transformer.init(MODEL, jax.random.key(0)))
    return folder


@FUZZ
@given(data=st.data())
def test_gguf_bytes(gguf_bytes, tmp_path, data):
    """A few numbers of the header become extremes, random bits flip, the end is cut off."""
    forged = bytearray(gguf_bytes)
    header = gguf_bytes.index(b"token_embd.weight") + 400
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(EXTREMES) % (1 << 8 * width)
        forged[place : place + width] = value.to_bytes(width, "little")
    if data.draw(st.booleans()):
        del forged[data.draw(st.integers(0, len(forged))) :]
    path = tmp_path / "forged.gguf"
    path.write_bytes(forged)
    refused_or_read(gguf.load, path)


def json_values():
    leaves = st.none() | st.booleans() | EXTREMES | st.floats() | st.text(max_size=8) | (
        st.integers(-(2**70), 2**70))
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(max_size=8), inner, max_size=4), max_leaves=8)


@FUZZ
@given(data=st.data())
def test_safetensors_header(folder, data):
    """A field of the header becomes any JSON value, its length any number, or bits flip."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    [length] = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    kind = data.draw(st.sampled_from(["field", "entry", "length", "bits"]))
    name = data.draw(st.sampled_from(sorted(header)))
    if kind == "entry":
        header[name] = data.draw(json_values())
    elif kind == "field":
        header[name] = header[name] | {
            data.draw(st.sampled_from(["dtype", "shape", "data_offsets"])): data.draw(json_values())
        }
    text = bytearray(json.dumps(header).encode())
    if kind == "bits":
        for _ in range(data.draw(st.integers(1, 4))):
            text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    size = data.draw(EXTREMES) if kind == "length" else len(text)
    try:
        path.write_bytes(struct.pack("<Q", size) + text + whole[8 + length :])
        refused_or_read(safetensors.load, folder)
    finally:
        path.write_bytes(whole)


@FUZZ
@given(data=st.data())
def test_model_config(folder, data):
    path = folder / "config.json"
    whole = path.read_text()
    config = json.loads(whole)
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(json_values())
    try:
        path.write_text(json.dumps(config))
        refused_or_read(safetensors.load, folder)
    finally:
        path.write_text(whole)
