"""Routes of a real model: the experts in a record are those of the learner's forward pass."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import spec
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.fields import route_dtype
from jaxrl_tis.models import moe, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from tests import weights

pytestmark = pytest.mark.compiles

LENGTH = 48
DENSE = ModelConfig(
    family="qwen3", vocab_size=40, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=LENGTH, norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tie_embeddings=False,
)


def with_experts(**fields):
    return DENSE.__class__(**{**vars(DENSE), "moe": MoeConfig(expert_dim=16, **fields)})


MODELS = {
    "dense": DENSE,
    # The layer in the middle has no experts.
    "softmax": with_experts(num_experts=8, top_k=2, dense_layers=(1,)),
    "sigmoid": with_experts(
        num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2, shared_dim=16,
        scale=1.5,
    ),
    "many": with_experts(num_experts=300, top_k=2, dense_layers=(0,)),
}
ENGINES = {
    "unrolled": {},
    "scanned": dict(unroll=False, prefill_chunk=8),
    "blocks": dict(prefill_batch=8),  # cut into blocks; those without a prompt are left out
    "crowded": dict(num_pages=9, unroll=False, prefill_chunk=8),
    "w8a8": dict(quantization="w8a8"),
}


@functools.cache
def params_of(model):
    return weights.drawn(MODELS[model], seed=3)


@functools.cache
def engine_of(model, name, layout=None, **options):
    sizes = dict(slots=4, max_length=LENGTH, steps=3, prefill_batch=2, page_size=8)
    options = dict(record_routes=True) | options
    return Engine(MODELS[model], EngineConfig(**sizes | ENGINES[name] | options), layout)


def requests():
    """Groups of five prompts. Two are filled in one call, the fourth begins as the third does, and
    the fifth is scored."""
    rng = np.random.default_rng(0)
    long = rng.integers(0, 40, 23)
    alike = np.concatenate([long[:16], rng.integers(0, 40, 3)])
    prompts = [rng.integers(0, 40, 5), rng.integers(0, 40, 6), long, alike, long[:8]]
    for i in range(11):
        sampling = SamplingParams(max_tokens=2 + i, prompt_logprobs=i % 5 == 4)
        yield Request(f"r{i}", prompts[i % 5], 7 + i // 8, sampling)


def sampled(engine, model, asked, **options):
    scheduler = Scheduler(engine, engine.load(params_of(model)), **options)
    for request in asked:
        scheduler.add(request)
    out = {}
    while scheduler.pending:
        out |= {t.id: t for t in scheduler.step()}
    return out, scheduler.stats


@functools.cache
def learner(model):
    def routes(params, tokens_bt, segment_ids_bt):
        positions_bt = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens_bt.shape)
        return transformer.rows_routed(
            params, MODELS[model], transformer.Program(), tokens_bt, positions_bt, segment_ids_bt,
            asked=moe.Asked(routes=True),
        ).routed.ids

    return jax.jit(routes)


def learned(model, trajectories):
    """The learner's routes [n,L,k] of every token of each record."""
    tokens, segments = (np.zeros((len(trajectories), LENGTH), np.int32) for _ in range(2))
    for row, segment, t in zip(tokens, segments, trajectories, strict=True):
        row[: len(t.prompt) + len(t.tokens)] = np.concatenate([t.prompt, t.tokens])
        segment[: len(t.prompt) + len(t.tokens)] = 1
    ids = np.asarray(learner(model)(params_of(model), tokens, segments))  # [L,B,T,k]
    return np.moveaxis(ids, 0, 2)


def assert_learned(model, found):
    config = MODELS[model]
    for t, routes in zip(found.values(), learned(model, list(found.values())), strict=True):
        rows = len(t.prompt) + len(t.tokens) - 1
        assert t.routes.shape == (rows, config.num_moe_layers, config.moe.top_k)
        assert t.routes.dtype == route_dtype(config.moe.num_experts)
        np.testing.assert_array_equal(t.routes, routes[:rows], t.id)
        assert t.rerouted[0] >= config.num_moe_layers and t.rerouted[1] == 0


@pytest.mark.cases("softmax-blocks", "sigmoid-scanned")
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "w8a8"])
@pytest.mark.parametrize("model", ["softmax", "sigmoid", "many"])
def test_recorded_routes_are_those_of_the_learner(model, name, monkeypatch):
    if name == "blocks":
        monkeypatch.setattr(spec, "BLOCK_TOKENS", 8)
        assert engine_of(model, name)._spec.block_rows(8) == 1
    found, stats = sampled(engine_of(model, name), model, requests())
    assert_learned(model, found)
    assert stats.shared + stats.cached > 0 and (stats.preempted > 0) == (name == "crowded")
    assert (stats.shared and stats.cached) or name != "blocks"
    used = {id for t in found.values() for id in t.routes.ravel().tolist()}
    assert len(used) > 0.3 * MODELS[model].moe.num_experts
    assert (max(used) > 255) == (model == "many")


@pytest.mark.all
def test_tokens_after_accepted_and_rejected_drafts_have_the_routes_of_the_learner():
    engine = engine_of("softmax", "scanned", max_draft=3)
    asked = [Request(f"r{i}", [3, 1, 4, 1, 5], 7, SamplingParams(max_tokens=12, temperature=0.2))
             for i in range(6)]
    found, stats = sampled(engine, "softmax", asked, drafts=Drafts(4, 3, free_batch_rows=1000))
    assert 0 < stats.accepted < stats.drafted
    assert_learned("softmax", found)


@pytest.mark.all
def test_four_devices_record_the_routes_of_the_learner():
    layout = sharding.layout((2, 1, 2), sharding.SERVE_RULES)
    found, stats = sampled(engine_of("softmax", "scanned", layout), "softmax", requests())
    assert stats.shared
    assert_learned("softmax", found)


@pytest.mark.all
def test_int8_weights_choose_other_experts_for_some_tokens():
    found, _ = sampled(engine_of("softmax", "w8a8"), "softmax", requests())
    flips = [np.sort(t.routes) != np.sort(routes[: len(t.routes)])
             for t, routes in zip(found.values(), learned("softmax", list(found.values())), strict=True)]
    assert 0 < np.concatenate(flips).mean() < 0.2


# What recording costs


def texts(engine):
    """The text of every program that runs the model, as it is lowered."""
    programs = engine.programs()
    return {name: programs[name][0].lower(*programs[name][1]).as_text()
            for name in ("prefill", "decode", "verify")}


@pytest.mark.cases("scanned")
@pytest.mark.parametrize("name", ["blocks", "scanned"])
def test_an_engine_that_records_no_routes_has_the_programs_of_one_that_cannot(name):
    options = dict(record_routes=False, max_draft=2)
    off = texts(engine_of("softmax", name, **options))
    plain = transformer.hidden
    with mock.patch.object(transformer, "hidden", lambda *args, asked: plain(*args)):
        assert texts(engine_of.__wrapped__("softmax", name, **options)) == off
    on = texts(engine_of("softmax", name, max_draft=2))
    assert all(on[name] != off[name] for name in off)


def outputs(engine, name):
    fn, args = engine.programs()[name]
    return jax.tree.leaves(jax.eval_shape(fn, *args)[1])


@pytest.mark.parametrize("model", ["dense", "softmax"])
def test_without_routes_no_program_returns_any(model):
    engine = engine_of(model, "unrolled", record_routes=False, max_draft=2)
    assert engine.route_shape == (0, 0)
    assert outputs(engine, "prefill") == []
    # The result of a call: tokens, three numbers of each, which of them are valid, what remains.
    assert [len(outputs(engine, name)) for name in ("decode", "verify")] == [6, 6]


def test_a_call_returns_l_k_bytes_for_each_token_that_it_may_read():
    engine = engine_of("softmax", "blocks", max_draft=2)
    sizes = {name: [x.size * x.dtype.itemsize for x in outputs(engine, name) if x.ndim == 4]
             for name in ("prefill", "decode", "verify")}
    layers, chosen = 2, 2
    tokens = {"prefill": 8 * LENGTH, "decode": 3 * 4, "verify": 3 * 4}
    assert sizes == {name: [n * layers * chosen] for name, n in tokens.items()}


def test_a_dense_model_has_no_routes_to_record():
    with pytest.raises(ValueError, match="record_routes is set, and the model has no experts"):
        engine_of("dense", "unrolled")
