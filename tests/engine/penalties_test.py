"""Penalties and bias: by hand, against a float64 reference, over devices, and in the engine."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import sampling
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.shards import WHOLE
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import compilation
from tests.drawn import is_drawn_from, keys, penalised, reference

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

distribution = jax.jit(sampling.distribution, static_argnames="rows")
applied = jax.jit(lambda penalties, logits: penalties.apply(logits, WHOLE))
SINGLE = sharding.single_device()
COUNT = 100_000
LOGITS = np.random.default_rng(7).normal(0, 1.5, 24).astype(np.float32)
PROMPT, DRAWN = (3, 3, 5, 20), (5, 7, 7, 7, 11, 0)
ALL = SamplingParams(
    temperature=1.4, top_k=14, top_p=0.95, min_p=0.02, repetition_penalty=1.3,
    presence_penalty=0.4, frequency_penalty=0.25, logit_bias=((1, 2.0), (23, -1.5)),
)
KINDS = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(presence_penalty=0.9),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(presence_penalty=-0.5, frequency_penalty=-0.2),
    SamplingParams(logit_bias=((2, 1.0), (7, -2.0), (23, 0.5))),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((7, 3.0),), top_p=0.8),
    ALL,
]


def seen(params, prompts, drawn, v=24, layout=SINGLE):
    """Penalties of rows with these prompts and tokens drawn so far."""
    tokens = np.zeros((len(params), 12), np.int32)
    lengths = np.array([[len(p), len(p) + len(d)] for p, d in zip(prompts, drawn, strict=True)], np.int32)
    for row, ids in enumerate(zip(prompts, drawn, strict=True)):
        both = [*ids[0], *ids[1]]
        tokens[row, : len(both)] = both
    return Penalties.of(params).seen(tokens, *lengths.T, v, layout)


def test_penalties_by_hand():
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias=((0, 1.0), (2, -3.0)),
    )
    logits = np.array([[4.0, -1.0, 3.0, -2.0, 5.0]], np.float32)
    found = applied(seen([params], [(0, 3)], [(1, 1, 0)], v=5), logits)
    # 0: 4 / 2 - 0.5 - 0.25 + 1; 1: -1 * 2 - 0.5 - 2 * 0.25; 2: 3 - 3; 3 is of the prompt: -2 * 2.
    np.testing.assert_array_equal(found, [[2.25, -3.0, 0.0, -4.0, 5.0]])


def test_no_stop_id_can_be_drawn_before_min_tokens():
    # Without 4 and 1 the likeliest is 2; e^0, e^-1 and e^-2 are left, of them two for top_k.
    logits = np.array([[1.0, 4.0, 3.0, 2.0, 5.0]], np.float32)
    params = SamplingParams(
        top_k=2, stop_ids=(4, 1), min_tokens=3, max_tokens=9, logit_bias=((1, 50.0),)
    )
    two, three = seen([params], [(0,)], [(1, 1)], v=5), seen([params], [(0,)], [(1, 1, 1)], v=5)
    logs = np.asarray(distribution(logits, params, two))[0]
    np.testing.assert_allclose(np.exp(logs[2:4]), [1 / (1 + np.exp(-1)), 1 / (1 + np.e)], rtol=1e-6)
    assert np.isneginf(np.delete(logs, [2, 3])).all()
    assert int(two.barred[0]) == 1
    assert np.argmax(np.asarray(distribution(logits, params, three))) == 1
    drawn = two.draw(np.array([2]), np.array([True]), SINGLE)
    np.testing.assert_array_equal(applied(drawn, logits), applied(three, logits))
    kept = two.draw(np.array([2]), np.array([False]), SINGLE)
    np.testing.assert_array_equal(applied(kept, logits), applied(two, logits))
    row = SamplingRows.of([params]), keys(1), np.zeros(1, np.int32)
    found = jax.device_get(jax.jit(sampling.sample)(logits, *row, penalties=two))
    token = int(found.tokens[0])
    np.testing.assert_allclose(found.logp_behav[0], logs[token], rtol=1e-6)
    raw = np.log(np.exp(logits[0]) / np.exp(logits[0]).sum())
    np.testing.assert_allclose(found.logp_raw[0], raw[token], rtol=1e-6)


@pytest.mark.all
def test_rows_without_penalties_draw_the_same_bits_as_an_engine_without():
    logits = np.random.default_rng(1).normal(0, 3, (64, 200)).astype(np.float32)
    logits[:, ::7] = -np.inf
    kinds = [SamplingParams(), SamplingParams(top_p=0.7), SamplingParams(temperature=0.0)]
    params = [kinds[i % 3] for i in range(64)]
    penalties = seen(params, [(1, 7)] * 64, [(3,)] * 64, v=200)
    args = logits, SamplingRows.of(params), keys(64), np.arange(64, dtype=np.int32)
    plain, other = jax.jit(sampling.sample)(*args), jax.jit(sampling.sample)(
        *args, penalties=penalties
    )
    for field in ("tokens", "logp_behav", "logp_raw", "entropy"):
        np.testing.assert_array_equal(getattr(other, field), getattr(plain, field))


@functools.cache
def drawing():
    sample = lambda logits, rows, keys, at, p: sampling.sample(
        logits, rows, keys, at, penalties=p
    )
    return jax.jit(sample, compiler_options=compilation.OPTIMIZED)


@pytest.mark.all
@pytest.mark.cases("1", "4", "7")
@pytest.mark.parametrize("params", KINDS, ids=range(len(KINDS)))
def test_a_hundred_thousand_draws_follow_the_penalised_distribution(params):
    one = seen([params], [PROMPT], [DRAWN])
    penalties = jax.tree.map(lambda x: np.tile(x, (COUNT,) + (1,) * (x.ndim - 1)), one)
    rows, at = SamplingRows.of([params] * COUNT), np.arange(COUNT, dtype=np.int32)
    drawn = drawing()(np.tile(LOGITS, (COUNT, 1)), rows, keys(COUNT, 3), at, penalties)
    tokens = np.asarray(drawn.tokens)
    p = reference(penalised(LOGITS, params, PROMPT, DRAWN), params)
    assert is_drawn_from(tokens, p)
    unpenalised = reference(LOGITS, params)
    assert not is_drawn_from(tokens, unpenalised)
    # What is reported is what was drawn from, and the model's own at the same temperature.
    np.testing.assert_allclose(drawn.logp_behav, np.log(p[tokens]), atol=3e-6)
    own = reference(LOGITS, SamplingParams(temperature=params.temperature))
    np.testing.assert_allclose(drawn.logp_raw, np.log(own[tokens]), atol=3e-6)
    logs = distribution(LOGITS[None], params, one)[0]
    np.testing.assert_allclose(np.exp(logs), p, atol=1e-6)


@pytest.mark.all
@pytest.mark.cases("24-shape0")
@pytest.mark.parametrize("v, shape", [(24, (1, 1, 8)), (304, (4, 1, 2))])
def test_a_split_vocabulary_is_penalised_as_the_whole_one(v, shape):
    layout, rng = sharding.layout(shape, sharding.SERVE_RULES), np.random.default_rng(v)
    barred = SamplingParams(stop_ids=(2, 23), min_tokens=4)
    kinds = [*KINDS, dataclasses.replace(ALL, temperature=0.0), barred]
    params = [kinds[i % len(kinds)] for i in range(32)]
    prompts = [rng.integers(v, size=1 + i % 5) for i in range(32)]
    earlier = [rng.integers(v, size=i % 7) for i in range(32)]
    ids = np.arange(32, dtype=np.uint32)
    logits, is_drawn = rng.normal(0, 2, (32, v)).astype(np.float32), ids % 3 > 0

    def step(where):
        penalties = seen(params, prompts, earlier, v, where)
        drawn = sampling.sample(
            logits, SamplingRows.of(params), keys(32, ids, ids), ids.astype(np.int32), where,
            penalties=penalties,
        )
        return drawn, penalties, penalties.draw(drawn.tokens, is_drawn, where)

    one, split = jax.jit(lambda: step(SINGLE))(), jax.jit(lambda: step(layout))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), split, one)
    np.testing.assert_array_equal(split[0].tokens, one[0].tokens)
    for row in range(32):
        count = np.bincount(earlier[row], minlength=v)
        np.testing.assert_array_equal(one[1].drawn[row], count)
        assert set(np.flatnonzero(one[1].in_prompt[row])) == set(prompts[row])
        count[one[0].tokens[row]] += is_drawn[row]
        np.testing.assert_array_equal(one[2].drawn[row], count)


CONFIG = ModelConfig(
    family="qwen2", vocab_size=40, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)


@functools.cache
def params_of():
    return jax.tree.map(lambda x: 1.5 * x, transformer.init(CONFIG, jax.random.key(0)))


@functools.cache
def engine(shape=None, **fields):
    layout = sharding.layout(shape, sharding.SERVE_RULES) if shape else None
    options = dict(slots=4, max_length=32, steps=3, prefill_batch=4, page_size=4, penalties=True)
    return Engine(CONFIG, EngineConfig(**options | fields), layout)


def requests():
    barred = SamplingParams(stop_ids=tuple(range(8)), min_tokens=8, frequency_penalty=0.5)
    kinds = [ALL, SamplingParams(), KINDS[0], barred, KINDS[5], KINDS[6]]
    return [
        Request(f"r{i}", np.arange(i, i + 2 + i % 3, dtype=np.int32) % 5, i,
                dataclasses.replace(kinds[i % 6], max_tokens=9))
        for i in range(12)
    ]


def drain(scheduler):
    out = []
    while scheduler.pending:
        out += scheduler.step()
    return {t.id: t for t in out}


def run(an_engine, interrupt=lambda scheduler: {}):
    scheduler = Scheduler(an_engine, an_engine.load(params_of()))
    for request in requests():
        scheduler.add(request)
    for _ in range(2):
        assert not scheduler.step()
    interrupt(scheduler)
    return drain(scheduler)


@pytest.mark.all
def test_every_draw_of_the_engine_is_penalised_for_what_was_drawn_before():
    found = run(engine())
    logits_of = jax.jit(lambda tokens: transformer.logits(params_of(), CONFIG, tokens))
    repeats = 0
    for request in requests():
        t, sampled = found[request.id], request.sampling
        own = SamplingParams(temperature=sampled.temperature)
        tokens = np.zeros(32, np.int32)
        count = len(t.tokens)
        assert count == 9 or (sampled.min_tokens <= count and t.tokens[-1] in sampled.stop_ids)
        tokens[: len(t.prompt) + count] = [*t.prompt, *t.tokens]
        logits = np.asarray(logits_of(tokens[None])[0])
        for i, token in enumerate(t.tokens):
            at = logits[len(t.prompt) + i - 1]
            changed = penalised(at, sampled, t.prompt, t.tokens[:i])
            if i < sampled.min_tokens:
                changed[list(sampled.stop_ids)] = -np.inf
            p = reference(changed, sampled)
            np.testing.assert_allclose(t.logp_behav[i], np.log(p[token]), atol=2e-4)
            np.testing.assert_allclose(t.logp_raw[i], np.log(reference(at, own)[token]), atol=2e-4)
        repeats += len(t.tokens) - len(set(t.tokens))
    assert repeats > 10  # tokens whose frequency counted


def resume(scheduler):
    by_id = {r.id: r for r in requests()}
    for partial in scheduler.pause("abort"):
        scheduler.add(dataclasses.replace(by_id[partial.id], partial=partial))


@pytest.mark.parametrize("interrupt", [resume, lambda s: s.pause("retract")], ids=["abort", "drop"])
def test_the_counts_come_back_with_an_interrupted_sequence(interrupt):
    whole, cut = run(engine()), run(engine(), interrupt)
    assert max(t.segment.max() for t in cut.values()) == 1
    for id, t in whole.items():
        np.testing.assert_array_equal(cut[id].tokens, t.tokens)
        np.testing.assert_allclose(cut[id].logp_behav, t.logp_behav, atol=1e-4)


@pytest.mark.all
def test_four_devices_penalise_as_one_does():
    one, four = run(engine()), run(engine((2, 1, 2)))
    for id, t in one.items():
        np.testing.assert_array_equal(four[id].tokens, t.tokens)
        np.testing.assert_allclose(four[id].logp_behav, t.logp_behav, atol=1e-4)


def test_what_an_engine_cannot_do_is_refused_by_name():
    add = lambda e, **fields: Scheduler(e, None).add(
        Request("x", np.zeros(2, np.int32), 0, SamplingParams(max_tokens=2, **fields))
    )
    plain = engine(penalties=False)
    for fields in (dict(repetition_penalty=1.1), dict(presence_penalty=0.1),
                   dict(frequency_penalty=0.1), dict(logit_bias=((1, 1.0),)),
                   dict(min_tokens=1, stop_ids=(3,))):
        with pytest.raises(ValueError, match="request x: penalties, .* with penalties=True"):
            add(plain, **fields)
        add(engine(), **fields)
    with pytest.raises(ValueError, match=r"beyond the vocabulary: \(\(40, 1.0\),\)"):
        add(engine(), logit_bias=((40, 1.0),))
    add(engine(), logit_bias=((39, 1.0),))
    add(plain, min_tokens=2, stop_strings=())
