"""Sampler and learner give one log-prob to a token, bit by bit, on every mesh, batch and chunk."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis import step as steps
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.models.quant import Recipe

# On eight devices: one key/value head of 32 columns, 64 rows of o and down, a block of 128 tokens.
CONFIG = ModelConfig(
    family="qwen3", vocab_size=1024, embed_dim=192, num_layers=2, num_heads=16, num_kv_heads=8,
    head_dim=32, mlp_dim=512, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tie_embeddings=True,
)
LENGTH, NEW, COUNT = 64, 8, 16
DTYPES = ("float32", "bfloat16")


def requests():
    """Prompts of one to three pages, sampled in different ways."""
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        prompt = rng.integers(0, CONFIG.vocab_size, 34 + i % 13).astype(np.int32)
        kind = {"temperature": (1.0, 0.7, 1.3)[i % 3]}
        yield Request(f"r{i}", prompt, i, SamplingParams(max_tokens=3 + i % (NEW - 2), **kind))


@functools.cache
def params():
    return jax.tree.map(lambda x: 2 * x, transformer.init(CONFIG, jax.random.key(0)))


def engine(dtype, tensor=1, chunk=48, scheme="none", **options):
    layout = sharding.layout((1, 1, tensor), sharding.SERVE_RULES)
    options = dict(numerics="invariant", unroll=False) | options
    return Engine(
        CONFIG, slots=16, max_length=LENGTH, dtype=dtype, cache_dtype=dtype, steps=3,
        prefill_batch=4, prefill_chunk=chunk, layout=layout, quantization=scheme, **options,
    )


def sampled(engine, chosen):
    """Trajectories of the chosen requests, which come in this order, by id."""
    scheduler, out, offered = Scheduler(engine, engine.load(params())), {}, list(requests())
    for i in chosen:
        scheduler.add(offered[i])
    while scheduler.pending:
        out |= {t.id: t for t in scheduler.step()}
    return out


@functools.cache
def reference(dtype, scheme="none"):
    """All requests on one device, in one batch."""
    return sampled(engine(dtype, scheme=scheme), range(COUNT))


def learner(dtype, mesh=(1, 1, 1), scheme="none", numerics="invariant"):
    layout = sharding.layout(mesh, sharding.TRAIN_RULES)
    program = transformer.Program(
        dtype=dtype, layout=layout, quantization=Recipe(scheme), numerics=numerics
    )
    return steps.Learner(CONFIG, program, NEW, 64)


def rows_of(trajectories):
    """A row for each, of one segment."""
    shape = len(trajectories), LENGTH
    batch = {
        "tokens": np.zeros(shape, np.int32), "segment_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool), "temperature": np.ones(shape, np.float32),
        "positions": np.broadcast_to(np.arange(LENGTH), shape).copy(),
    }
    for i, t in enumerate(trajectories):
        tokens = np.concatenate([t.prompt, t.tokens])
        batch["tokens"][i, : len(tokens)] = tokens
        batch["segment_ids"][i, : len(tokens)] = 1
        batch["mask"][i, len(t.prompt) : len(tokens)] = True
        batch["temperature"][i] = t.temperature
    return batch


def scored(learner, trajectories):
    """The learner's log-probs of each trajectory's tokens."""
    layout, batch = learner.program.layout, rows_of(trajectories)
    micro = layout.put_batch({name: x[None] for name, x in batch.items()})
    weights = layout.put_params(params(), CONFIG)
    logp = np.asarray(steps.make_score(learner, False)(weights, micro)["logp"])[0]
    return [row[mask] for row, mask in zip(logp, batch["mask"])]


def differing(scores, trajectories):
    """Tokens whose log-prob is not the sampler's."""
    return sum(int((x != t.logp_behav).sum()) for x, t in zip(scores, trajectories, strict=True))


def check_same(found, expected):
    assert found
    for id, t in found.items():
        for field in ("tokens", "logp_behav", "logp_raw"):
            np.testing.assert_array_equal(getattr(t, field), getattr(expected[id], field))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor, chunk", [(1, 16), (2, 48), (4, 16), (8, 48)])
def test_a_sequence_is_sampled_alike_on_every_mesh_in_every_batch(dtype, tensor, chunk):
    """Slots are given in the order of arrival, so that each batch puts a sequence elsewhere."""
    sampler, expected = engine(dtype, tensor, chunk), reference(dtype)
    for count in (16, 8, 3, 2, 1):
        check_same(sampled(sampler, reversed(range(count))), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 1, 4), (1, 1, 8)])
def test_the_learner_scores_as_the_sampler_drew(dtype, mesh):
    trajectories = list(reference(dtype).values())
    assert differing(scored(learner(dtype, mesh), trajectories), trajectories) == 0


def test_unrolled_layers_sample_as_scanned_ones_do():
    check_same(sampled(engine("bfloat16", unroll=True), range(5)), reference("bfloat16"))


def test_eight_bit_products_are_the_learners_too():
    expected = reference("bfloat16", "w8a8")
    check_same(sampled(engine("bfloat16", 8, scheme="w8a8"), range(5)), expected)
    trajectories = list(expected.values())
    for mesh in ((1, 1, 1), (1, 2, 4)):
        assert differing(scored(learner("bfloat16", mesh, "w8a8"), trajectories), trajectories) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_numerics_do_differ(dtype):
    trajectories = list(reference(dtype).values())
    count = sum(len(t.tokens) for t in trajectories)
    scores = scored(learner(dtype, numerics="fast"), trajectories)
    assert differing(scores, trajectories) > count / 4
    gap = max(np.abs(x - t.logp_behav).max() for x, t in zip(scores, trajectories))
    assert gap < (1e-4 if dtype == "float32" else 0.5)
