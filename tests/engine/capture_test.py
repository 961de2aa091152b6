"""Recorded supports and likeliest tokens against numpy, over devices, and in the record."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import capture, sampling
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.shards import WHOLE
from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests.drawn import keys, logits

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("the partitioner places the arrays and XLA compiles the programs"),
]

KINDS = [
    SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.8), SamplingParams(top_k=17),
    SamplingParams(min_p=0.1), SamplingParams(temperature=0.0), SamplingParams(top_k=16),
    SamplingParams(temperature=1.6, top_k=40, top_p=0.9, min_p=0.01), SamplingParams(top_k=1),
]
K, TOP = 16, 3


@functools.cache
def supports(n):
    return jax.jit(functools.partial(capture.support, n=n, shards=WHOLE))


@pytest.mark.parametrize("v, n", [(5, 1), (128, 7), (300, 40), (300, 300), (24, 50)])
def test_the_support_is_the_sorted_ids_or_nothing(v, n):
    rng = np.random.default_rng(v + n)
    is_in = rng.random((60, v)) < np.linspace(0, 1, 60)[:, None]
    is_in[1], is_in[2] = np.arange(v) == v - 1, np.arange(v) == 0
    found, wide = np.asarray(supports(n)(is_in)), 0
    for row, ids in zip(found, is_in, strict=True):
        ids = np.flatnonzero(ids)
        wide += len(ids) > n
        expected = np.full(n, -1)
        expected[: len(ids)] = ids if len(ids) <= n else -1
        np.testing.assert_array_equal(row, expected)
    assert wide > 0 or n >= v


@functools.cache
def sampled(v, shape=None):
    layout = sharding.layout(shape, sharding.SERVE_RULES) if shape else None
    rows = SamplingRows.of([KINDS[i % len(KINDS)] for i in range(64)])
    ids = np.arange(64, dtype=np.uint32)
    draw = functools.partial(sampling.sample, layout=layout, top_n=TOP, num_kept=K)
    return jax.jit(draw)(logits(v), rows, keys(64, ids, ids), ids.astype(np.int32))


def test_what_is_recorded_is_of_the_distribution_drawn_from():
    rows = SamplingRows.of([KINDS[i % len(KINDS)] for i in range(64)])
    found, p = sampled(304), np.asarray(jax.jit(sampling.distribution)(logits(304), rows))
    sizes = np.isfinite(p).sum(axis=-1)
    assert {1, 5, 16, 17} < set(sizes)  # at the cap and beyond it
    for row, logp in enumerate(p):
        support = np.flatnonzero(np.isfinite(logp))
        kept = found.kept[row][found.kept[row] >= 0]
        np.testing.assert_array_equal(kept, support if len(support) <= K else [])
        # The tokens by falling probability, the lower id first among equals.
        best = np.lexsort((np.arange(304), -logp))[:TOP]
        is_possible = np.isfinite(logp[best])
        np.testing.assert_array_equal(found.top_ids[row], np.where(is_possible, best, -1))
        np.testing.assert_allclose(found.top_logps[row], logp[best], atol=2e-6)
        if len(support) <= K:
            assert found.tokens[row] in kept
        if found.tokens[row] == best[0]:
            assert found.top_logps[row, 0] == found.logp_behav[row]
    assert (found.tokens == found.top_ids[:, 0]).sum() > 10


@pytest.mark.cases("304-shape1")
@pytest.mark.parametrize("v, shape", [(24, (1, 1, 8)), (304, (4, 1, 2)), (304, (1, 1, 8))])
def test_a_split_vocabulary_records_what_the_whole_one_records(v, shape):
    one, split = sampled(v), sampled(v, shape)
    for field in ("tokens", "kept", "top_ids"):
        np.testing.assert_array_equal(getattr(split, field), getattr(one, field))
    np.testing.assert_allclose(split.top_logps, one.top_logps, atol=2e-6)


@functools.cache
def sampled_alike(v, shape=None):
    """In invariant numerics; some rows have penalties."""
    layout = sharding.layout(shape, sharding.SERVE_RULES, vocab_size=v) if shape else None
    kinds = [SamplingParams(temperature=t, top_k=k) for t in (0.3, 0.7, 1.3) for k in (0, 7, 50)]
    kinds += [SamplingParams(top_p=0.8, frequency_penalty=0.5, logit_bias=((v - 1, 3.0),)),
              SamplingParams(min_p=0.05, repetition_penalty=1.4), SamplingParams(temperature=0.0)]
    rows = SamplingRows.of([kinds[i % len(kinds)] for i in range(64)])
    ids = np.arange(64, dtype=np.uint32)
    rng = np.random.default_rng(0)
    penalties = dataclasses.replace(
        Penalties.of([kinds[i % len(kinds)] for i in range(64)]),
        in_prompt=rng.random((64, v)) < 0.1, drawn=rng.poisson(0.1, (64, v)).astype(np.int32),
    )
    record = dict(layout=layout, top_n=3, num_kept=8, numerics="invariant")
    draw = jax.jit(
        functools.partial(sampling.sample, **record), compiler_options=tiles.COMPILER_OPTIONS
    )
    values = rng.normal(0, 3, (64, v)).astype(np.float32)
    return draw(values, rows, keys(64, ids, ids), ids.astype(np.int32), penalties=penalties)


# 300 tokens are fewer than a unit, so that some parts are empty; 1,028 are a few more than one.
@pytest.mark.cases("300-shape1")
@pytest.mark.parametrize("v, shape", [
    (1024, (1, 1, 8)), (300, (1, 1, 4)), (1028, (2, 1, 4)),
])
def test_in_invariant_numerics_every_mesh_records_the_same_bits(v, shape):
    for field, value in vars(sampled_alike(v)).items():
        np.testing.assert_array_equal(getattr(sampled_alike(v, shape), field), value, field)


def test_recording_changes_no_bit_of_the_draw():
    rows = SamplingRows.of([KINDS[i % len(KINDS)] for i in range(64)])
    ids = np.arange(64, dtype=np.uint32)
    plain = jax.jit(sampling.sample)(logits(304), rows, keys(64, ids, ids), ids.astype(np.int32))
    assert plain.kept is plain.top_ids is plain.top_logps is None
    for field in ("tokens", "logp_behav", "logp_raw", "entropy"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(sampled(304), field))


CONFIG = ModelConfig(
    family="qwen2", vocab_size=40, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)


def engine(**fields):
    return Engine(CONFIG, EngineConfig(
        slots=3, max_length=24, steps=2, prefill_batch=3, page_size=4, **fields,
    ))


@pytest.mark.all
def test_the_record_has_the_support_and_the_likeliest_tokens_of_every_token():
    serving = engine(records_logits=True, top_n=TOP, num_kept=6)
    scheduler = Scheduler(serving, serving.load(transformer.init(CONFIG, jax.random.key(0))))
    kinds = [SamplingParams(top_k=4, max_tokens=5), SamplingParams(max_tokens=5),
             SamplingParams(temperature=0.0, max_tokens=5),
             SamplingParams(top_p=0.15, max_tokens=5)]
    again = {}
    for i in range(8):
        request = Request(f"r{i}", np.arange(1, 4, dtype=np.int32) + i, i, kinds[i % 4])
        scheduler.add(request)
        again[request.id] = request
    scheduler.step()
    for partial in scheduler.pause("abort"):
        scheduler.add(Request(**vars(again[partial.id]) | {"partial": partial}))
    found = []
    while scheduler.pending:
        found += scheduler.step()
    assert len(found) == 8
    for t in found:
        assert t.kept.shape == (5, 6) and t.kept.dtype == t.top_ids.dtype == np.int32
        for i in range(5):
            support = np.flatnonzero(np.isfinite(t.logits[i]))
            kept = t.kept[i][t.kept[i] >= 0]
            np.testing.assert_array_equal(kept, support if len(support) <= 6 else [])
            np.testing.assert_allclose(
                t.top_logps[i], np.sort(t.logits[i])[::-1][:TOP], atol=2e-6
            )
            np.testing.assert_allclose(t.logits[i][t.tokens[i]], t.logp_behav[i], atol=2e-6)
            if t.temperature == 0:
                np.testing.assert_array_equal(kept, [t.tokens[i]])
                np.testing.assert_array_equal(t.top_ids[i], [t.tokens[i], -1, -1])


def test_more_likely_tokens_than_there_are_is_refused():
    with pytest.raises(ValueError, match="top_n = 41 is above the 40"):
        engine(top_n=41)
