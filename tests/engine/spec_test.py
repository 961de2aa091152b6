"""Sizes of an engine by hand, and those that do not fit."""

import types

import pytest

from jaxrl_tis.engine import spec
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.spec import Spec


def made(platform="cpu", shards=2, tensor=1, is_invariant=False, teacher=None, **sizes):
    mesh = types.SimpleNamespace(shape={"expert": 1, "tensor": tensor, "context": 1}, size=tensor * shards)
    layout = types.SimpleNamespace(
        shards=shards, platform=platform, mesh=mesh, rules={"vocab": "tensor"})
    model = types.SimpleNamespace(vocab_size=64, moe=None, num_layers=2)
    config = EngineConfig(**{"slots": 4, "max_length": 30, **sizes})
    program = types.SimpleNamespace(layout=layout, is_invariant=is_invariant)
    return Spec(model, config, program, lambda logits, positions: logits, teacher)


def test_pages_and_blocks_of_a_shard():
    """Two pages of 16 for each of two slots, and two more. Rows of 100 tokens: three have 256, and
    four is the next divisor of four."""
    assert made().num_pages == 6 and made(num_pages=9).num_pages == 9
    assert [made().block_rows(length) for length in (300, 128, 100, 10)] == [1, 2, 4, 4]
    assert made(platform="tpu").block_rows(300) == 4


REFUSED = [
    (dict(slots=3), "engine.slots=3 cannot be cut into the 2 data shards"),
    (dict(prefill_batch=5), "engine.prefill_batch=5 cannot be cut"),
    (dict(num_pages=3), "3 pages of 16 positions cannot hold a sequence of 30; .* at least 4"),
    (dict(top_n=33, tensor=2), "top_n = 33 is above the 32 vocabulary entries of a device"),
    (dict(record_routes=True), "the model has no experts"),
    (dict(is_invariant=True, page_size=8), "needs pages of 16 positions, and engine.page_size is 8"),
    (dict(is_invariant=True, cache_dtype="int8"), "a cache in float32 or float32, and .* is int8"),
    (dict(weighs_pages=True, page_groups=9), "engine.heavy_groups = 9 is above the . layers of the model"),
    (dict(weighs_pages=True, unroll=False), "engine.heavy_pages .* set engine.unroll to True"),
    (dict(weighs_pages=True, is_invariant=True), "engine.heavy_pages .* set engine.numerics to 'fast'"),
    (dict(weighs_pages=True, teacher=types.SimpleNamespace(moe=None)), "engine.heavy_pages .* rollout.teacher"),
]


def test_sizes_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(spec.invariant, "check", lambda *_: None)
    monkeypatch.setattr(spec.placement, "shardings", lambda *_: None)
    made(top_n=32, num_pages=4, is_invariant=True).check()
    made(weighs_pages=True).check()
    for sizes, why in REFUSED:
        with pytest.raises(ValueError, match=why):
            made(**sizes).check()
