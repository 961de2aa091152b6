"""Sampler and learner give one log-prob to a token, bit by bit, on every mesh, batch and chunk."""

import contextlib
import dataclasses
import functools
import sys

import jax
import numpy as np
import optax
import pytest

from configs import default
from jaxrl_tis import sharding
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.kernels import tiles
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.scoring import Learner, make_score
from jaxrl_tis.learner.step import TrainState, make_train_step
from jaxrl_tis.models import placement, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.models.quant import Recipe
from tests import compilation, weights

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("bits depend on what XLA makes of the programs"),
]

# On eight devices: one key/value head of 32 columns, 64 rows of o and down, a block of 128 tokens.
CONFIG = ModelConfig(
    family="qwen3", vocab_size=1024, embed_dim=192, num_layers=2, num_heads=16, num_kv_heads=8,
    head_dim=32, mlp_dim=512, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tie_embeddings=True,
)
LENGTH, NEW, COUNT, KEPT = 64, 8, 16, 12
DTYPES = ("float32", "bfloat16")
# Two tensor shards have two tiles of 64 of an expert's width each.
EXPERTS = dataclasses.replace(CONFIG, family="glm4_moe", num_layers=3, moe=MoeConfig(
    8, 2, 128, "sigmoid", shared_dim=128, num_groups=4, top_groups=2, scale=1.5, dense_layers=(0,),
))


def compiled_for(dtype):
    """bfloat16, in which a run samples, is compiled as a run compiles it."""
    return compilation.optimized() if dtype == "bfloat16" else contextlib.nullcontext()


def requests():
    """Prompts of one to three pages, sampled in different ways."""
    rng = np.random.default_rng(0)
    filters = {}, {"top_k": KEPT}, {"top_p": 0.3}, {"top_k": 40, "min_p": 0.3}
    for i in range(COUNT):
        prompt = rng.integers(0, CONFIG.vocab_size, 34 + i % 13).astype(np.int32)
        kind = {"temperature": (1.0, 0.7, 1.3, 1.0, 0.0)[i % 5]} | filters[i % 4]
        yield Request(f"r{i}", prompt, i, SamplingParams(max_tokens=3 + i % (NEW - 2), **kind))


@functools.cache
def params():
    return weights.drawn(CONFIG)


@functools.cache
def engine(dtype, tensor, chunk=48, scheme="none", **options):
    """Only float32 samplers record kept sets."""
    layout = sharding.layout((1, 1, tensor), sharding.SERVE_RULES)
    options = dict(numerics="invariant", unroll=False, cache_dtype=dtype) | options
    return Engine(CONFIG, EngineConfig(
        slots=16, max_length=LENGTH, dtype=dtype, steps=3, prefill_batch=4, prefill_chunk=chunk,
        quantization=scheme, num_kept=KEPT if dtype == "float32" else 0, **options,
    ), layout)


def sampled(engine, chosen):
    """Trajectories of the chosen requests, which come in this order, by id."""
    scheduler, out, offered = Scheduler(engine, engine.load(params())), {}, list(requests())
    for i in chosen:
        scheduler.add(offered[i])
    while scheduler.pending:
        out |= {t.id: t for t in scheduler.step()}
    return out


@functools.cache
def reference(dtype):
    """All requests on one device, in one batch."""
    return sampled(engine(dtype, 1), range(COUNT))


def learner(dtype, mesh=(1, 1, 1), scheme="none", numerics="invariant"):
    layout = sharding.layout(mesh, sharding.TRAIN_RULES)
    program = transformer.Program(
        dtype=dtype, layout=layout, quantization=Recipe(scheme), numerics=numerics
    )
    return Learner(CONFIG, program, NEW, 64)


def rows_of(trajectories):
    """A row for each, of one segment."""
    shape = len(trajectories), LENGTH
    batch = {
        "tokens": np.zeros(shape, np.int32), "segment_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool), "temperature": np.ones(shape, np.float32),
        "positions": np.broadcast_to(np.arange(LENGTH), shape).copy(),
        "kept": np.full((*shape, trajectories[0].kept.shape[-1]), -1, np.int32),
    }
    for i, t in enumerate(trajectories):
        tokens = np.concatenate([t.prompt, t.tokens])
        batch["tokens"][i, : len(tokens)] = tokens
        batch["segment_ids"][i, : len(tokens)] = 1
        batch["mask"][i, len(t.prompt) : len(tokens)] = True
        batch["temperature"][i] = t.temperature or 1.0  # greedy: of any, the set is one token
        batch["kept"][i, len(t.prompt) : len(tokens)] = t.kept
    if not batch["kept"].size:
        del batch["kept"]
    return batch


def scored(learner, trajectories):
    """The learner's log-probs of each trajectory's tokens."""
    layout, batch = learner.program.layout, rows_of(trajectories)
    micro = layout.put_batch({name: x[None] for name, x in batch.items()})
    placed = placement.put(params(), layout, CONFIG)
    logp = np.asarray(make_score(learner, False)(placed, micro)["logp"])[0]
    return [row[mask] for row, mask in zip(logp, batch["mask"], strict=True)]


def differing(scores, trajectories):
    """Tokens whose log-prob is not the sampler's."""
    pairs = zip(scores, trajectories, strict=True)
    return sum(int((x != comparable(t)).sum()) for x, t in pairs)


def comparable(t):
    """Log-probs over the kept sets, or over all tokens where none was recorded."""
    return np.where(np.all(t.kept < 0, axis=-1), t.logp_raw, t.logp_behav)


def check_same(found, expected):
    assert found
    for id, t in found.items():
        for field in ("tokens", "logp_behav", "logp_raw", "kept"):
            np.testing.assert_array_equal(getattr(t, field), getattr(expected[id], field))


@pytest.mark.cases("float32-(1,)")
@pytest.mark.parametrize("dtype, place", [
    ("float32", (1,)), ("float32", (8, 16)), ("bfloat16", (4, 16)),
], ids=str)
def test_a_sequence_is_sampled_alike_on_every_mesh_in_every_batch(dtype, place):
    """On so many devices, prompts in chunks of so many tokens. Slots are given in the order of
    arrival, so that each batch puts a sequence elsewhere."""
    with compiled_for(dtype):
        sampler, expected = engine(dtype, *place), reference(dtype)
        for count in (16, 3, 1):
            check_same(sampled(sampler, reversed(range(count))), expected)


@pytest.mark.cases("float32-mesh0")
@pytest.mark.parametrize("dtype, mesh", [
    ("float32", (1, 1, 1)), ("float32", (2, 2, 2)), ("bfloat16", (1, 1, 1)),
    ("bfloat16", (1, 2, 4)),
])
def test_the_learner_scores_as_the_sampler_drew(dtype, mesh):
    with compiled_for(dtype):
        trajectories = list(reference(dtype).values())
        assert differing(scored(learner(dtype, mesh), trajectories), trajectories) == 0


def test_pages_of_earlier_prompts_change_no_bit():
    stem = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 40).astype(np.int32)
    asked = [
        Request(f"s{i}", np.concatenate([stem[:n], [i, n]]), i, SamplingParams(max_tokens=NEW))
        for i, n in enumerate((34, 40))
    ]
    found = {}
    for keeps_pages in (False, True):
        sampler = engine("float32", 1)
        scheduler = Scheduler(sampler, sampler.load(params()), keeps_pages=keeps_pages)
        found[keeps_pages] = {}
        for request in asked:
            scheduler.add(request)
            while scheduler.pending:
                found[keeps_pages] |= {t.id: t for t in scheduler.step()}
        assert scheduler.stats.cached == keeps_pages * 32
    check_same(found[True], found[False])


@pytest.mark.all
def test_pages_that_the_same_call_writes_change_no_bit():
    """The second prompt begins with the first one's full page, and is filled in the same call."""
    stem = np.random.default_rng(2).integers(0, CONFIG.vocab_size, 36).astype(np.int32)
    prompts = np.concatenate([stem[:16], stem[:4]]), stem
    found, calls = {}, []
    for keeps_pages in (False, True):
        sampler = engine("float32", 1)
        scheduler = Scheduler(sampler, sampler.load(params()), keeps_pages=keeps_pages)
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(f"c{i}", prompt, i, SamplingParams(max_tokens=NEW)))
        found[keeps_pages] = {}
        with pytest.MonkeyPatch.context() as patch:
            plain = sampler.prefill
            counted = lambda *args, plain=plain: calls.append(len(args[-1])) or plain(*args)
            patch.setattr(sampler, "prefill", counted)
            while scheduler.pending:
                found[keeps_pages] |= {t.id: t for t in scheduler.step()}
        assert scheduler.stats.cached == keeps_pages * 16
    assert calls == [1, 1, 2]
    check_same(found[True], found[False])


@pytest.mark.all
def test_log_probs_of_prompts_are_the_learners_on_every_mesh(monkeypatch):
    asked = [
        dataclasses.replace(r, sampling=SamplingParams(max_tokens=1, prompt_logprobs=True))
        for r in list(requests())[:4]
    ]
    monkeypatch.setattr(sys.modules[__name__], "requests", lambda: asked)
    one, eight = (sampled(engine("float32", *place), range(4)) for place in ((1,), (8, 16)))
    prompts = []
    for id, t in one.items():
        np.testing.assert_array_equal(eight[id].prompt_logps, t.prompt_logps)
        prompts.append(dataclasses.replace(
            t, prompt=t.prompt[:-NEW], tokens=t.prompt[-NEW:], temperature=1.0,
            kept=np.full((NEW, KEPT), -1, np.int32),
        ))
    for found, t in zip(scored(learner("float32"), prompts), one.values(), strict=True):
        np.testing.assert_array_equal(found, t.prompt_logps[-NEW:])


def test_some_kept_sets_are_recorded_and_some_are_not():
    """One token of greedy rows, fewer and as many as fit; and sets too wide, and no filter."""
    found = list(reference("float32").values())
    sizes = np.concatenate([(t.kept >= 0).sum(axis=-1) for t in found])
    assert {0, 1, KEPT} < set(sizes.tolist()) and 0.1 < (sizes == 0).mean() < 0.5
    assert any((comparable(t) != t.logp_behav).any() for t in found)


@pytest.mark.all
@pytest.mark.parametrize("scheme, tensor, unroll", [("w8a16", 1, True), ("w8a8", 8, False)])
def test_eight_bit_products_are_the_learners_too(scheme, tensor, unroll):
    sampler = engine("bfloat16", tensor, scheme=scheme, unroll=unroll)
    trajectories = list(sampled(sampler, range(5)).values())
    scores = scored(learner("bfloat16", scheme=scheme), trajectories)
    assert differing(scores, trajectories) == 0


@pytest.mark.all
def test_any_vocabulary_is_sampled_and_scored_alike(monkeypatch):
    """300 tokens: a sampler that holds them in four parts of 75, a learner in two of 150."""
    here = sys.modules[__name__]
    small = dataclasses.replace(CONFIG, vocab_size=300, num_layers=1, embed_dim=64, mlp_dim=256)
    monkeypatch.setattr(here, "CONFIG", small)
    monkeypatch.setattr(here, "params", lambda: weights.drawn(small))
    expected = sampled(engine.__wrapped__("bfloat16", 1), range(4))
    check_same(sampled(engine.__wrapped__("bfloat16", 4), reversed(range(4))), expected)
    trajectories = list(expected.values())
    assert differing(scored(learner("bfloat16", (1, 1, 2)), trajectories), trajectories) == 0


@pytest.fixture
def experts(monkeypatch):
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "CONFIG", EXPERTS)
    monkeypatch.setattr(here, "params", lambda: weights.drawn(EXPERTS))


@functools.cache
def routed(dtype, scheme, mesh, count):
    """Trajectories of so many requests, with routes, by a sampler on this mesh."""
    layout = sharding.layout(mesh, sharding.SERVE_RULES)
    sampler = Engine(EXPERTS, EngineConfig(
        slots=16, max_length=LENGTH, dtype=dtype, cache_dtype=dtype, steps=3, prefill_batch=4,
        prefill_chunk=(48, 16)[layout.mesh.size > 1], quantization=scheme, unroll=False, num_kept=0,
        record_routes=True, numerics="invariant",
    ), layout)
    return sampled(sampler, range(count))


EIGHT_BITS = pytest.param("bfloat16", "w8a8", (1, 1, 1, 1, 2), marks=pytest.mark.all)


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("dtype, scheme, mesh", [
    pytest.param("bfloat16", "none", (1, 1, 2, 1, 2), marks=pytest.mark.all),
    EIGHT_BITS,
])
def test_experts_are_chosen_and_computed_alike_on_every_mesh(dtype, scheme, mesh):
    """Also with other tokens in the batch, and with prompts in other chunks."""
    with compiled_for(dtype):
        expected = routed(dtype, scheme, (1, 1, 1), 6)
        found = routed(dtype, scheme, mesh, 6)
        check_same(found, expected)
        for id, t in found.items():
            np.testing.assert_array_equal(t.routes, expected[id].routes)
        assert len(np.unique(np.concatenate([t.routes.ravel() for t in found.values()]))) == 8


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("dtype, scheme, mesh", [
    ("float32", "none", (1, 1, 2, 1, 2)),
    pytest.param("bfloat16", "none", (1, 1, 2, 1, 2), marks=pytest.mark.all),
    EIGHT_BITS,
])
def test_the_learner_with_its_own_routes_scores_as_the_sampler_drew(dtype, scheme, mesh):
    with compiled_for(dtype):
        trajectories = list(routed(dtype, scheme, (1, 1, 1), 6).values())
        # 16 rows, so that every mesh divides them.
        rows = (trajectories * 3)[:16]
        assert differing(scored(learner(dtype, mesh, scheme), rows), rows) == 0


def test_a_sampler_that_could_not_agree_is_refused():
    with pytest.raises(ValueError, match="pages of 16 positions, and engine.page_size is 32"):
        engine("float32", 1, page_size=32)
    with pytest.raises(ValueError, match="cache in float32 or float32, and engine.cache_dtype is int8"):
        engine("float32", 1, cache_dtype="int8")
    with pytest.raises(ValueError, match="'fp8_w8a16' sums floats of few bits"):
        engine("float32", 1, scheme="fp8_w8a16")


TINY = ModelConfig(
    family="llama", vocab_size=16, embed_dim=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, mlp_dim=8, rope=RopeConfig("default", 10000.0), max_position=16, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=True,
)


def tiny_programs(numerics):
    """{name: (jitted function, abstract arguments)} of a sampler and a learner."""
    sampler = Engine(TINY, EngineConfig(
        slots=1, max_length=16, steps=1, max_draft=1, prefill_batch=1, numerics=numerics,
    ))
    learner = Learner(TINY, transformer.Program(numerics=numerics), 4, 4)
    shapes = transformer.abstract_params(TINY)
    floats = "logp_old", "logp_behav", "logp_prox", "adv", "weights", "temperature"
    kinds = dict.fromkeys(floats, np.float32) | {"mask": bool}
    kinds |= dict.fromkeys(("tokens", "positions", "segment_ids"), np.int32)
    rows = {name: np.zeros((1, 1, 8), kind) for name, kind in kinds.items()}
    chosen, sgd = correction.parse(default.get_config().correction), optax.sgd(1.0)
    state = TrainState(shapes, jax.eval_shape(sgd.init, shapes))
    found = sampler.programs()
    del found["insert"]  # computes no floats
    return found | {
        "score": (make_score(learner), (shapes, rows)),
        "update": (make_train_step(learner, chosen, sgd), (state, rows)),
    }


@pytest.mark.all
@pytest.mark.parametrize("name", ["load", "prefill", "decode", "verify", "score", "update"])
def test_programs_are_compiled_with_the_options_of_their_numerics(name, monkeypatch):
    """XLA refuses an option that it does not know, so an error shows that it was given."""
    assert tiles.COMPILER_OPTIONS == {"xla_allow_excess_precision": False}
    monkeypatch.setattr(tiles, "COMPILER_OPTIONS", {"xla_no_such_option": True})
    program, arguments = tiny_programs("invariant")[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        program.lower(*arguments).compile()
    if name in ("load", "prefill", "score"):  # one for each source that asks for the options
        program, arguments = tiny_programs("fast")[name]
        program.lower(*arguments).compile()


@pytest.mark.cases("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_numerics_do_differ(dtype):
    trajectories = list(reference(dtype).values())
    count = sum(len(t.tokens) for t in trajectories)
    scores = scored(learner(dtype, numerics="fast"), trajectories)
    assert differing(scores, trajectories) > count / 4
    gap = max(np.abs(x - comparable(t)).max() for x, t in zip(scores, trajectories, strict=True))
    assert gap < (1e-4 if dtype == "float32" else 0.5)
