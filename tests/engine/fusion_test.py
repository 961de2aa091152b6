"""A teacher in the sampler, against both models run apart over whole sequences."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy import stats

from jaxrl_tis import sharding
from jaxrl_tis.engine import fusion
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import weights

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

STUDENT = ModelConfig(
    family="qwen2", vocab_size=24, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)
# Another family, more layers, and a padded vocabulary.
TEACHER = dataclasses.replace(
    STUDENT, family="qwen3", qkv_bias=False, qk_norm=True, num_layers=2, vocab_size=26, embed_dim=48,
)
COMMON = tuple(range(3, 11))  # prompts begin with the same two pages
KINDS = {
    "mixed": SamplingParams(alpha=0.5, max_tokens=6),
    "more": SamplingParams(alpha=0.9, temperature=0.7, max_tokens=6),
    "filtered": SamplingParams(alpha=0.25, top_k=5, max_tokens=6),
    "own": SamplingParams(max_tokens=6),
    "theirs": SamplingParams(alpha=1.0, top_p=0.8, max_tokens=6),
    "greedy": SamplingParams(alpha=0.4, temperature=0.0, max_tokens=6),
}


mix = jax.jit(fusion.fused)


@functools.cache
def parameters():
    return weights.drawn(STUDENT, seed=1), weights.drawn(TEACHER, seed=2)


SIZES = dict(
    slots=16, max_length=24, steps=2, prefill_batch=4, prefill_chunk=4, page_size=4, num_kept=6,
)


@functools.cache
def engine(teacher=TEACHER, mesh=None, **sizes):
    layout = mesh and sharding.layout(mesh, sharding.SERVE_RULES)
    return Engine(STUDENT, EngineConfig(**SIZES | sizes), layout, teacher)


def sampled(serving, requests, parameters=parameters, **options):
    """The records of requests by id; a stop halfway, after which all go on."""
    student, *teacher = parameters()
    served = serving.load(student)
    if serving.num_teachers:
        served = fusion.Pair(served, serving.load_teacher(*teacher))
    scheduler = Scheduler(serving, served, **options)
    known = {request.id: request for request in requests}
    for request in requests:
        scheduler.add(request)
    found = scheduler.step() + scheduler.step()
    for partial in scheduler.pause("abort"):
        scheduler.add(dataclasses.replace(known[partial.id], partial=partial))
    while scheduler.pending:
        found += scheduler.step()
    return {t.id: t for t in found}


def requests(kinds=KINDS, count=2):
    return [
        Request(f"{name}/{i}", np.array([*COMMON, 11 + i, 2]), i, sampling)
        for name, sampling in kinds.items() for i in range(count)
    ]


def softmax(x, axis=-1):
    x = np.asarray(x, np.float64)
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    return x / x.sum(axis=axis, keepdims=True)


@jax.jit
def forward(params, tokens):
    return [
        transformer.logits(p, config, tokens)[0, :, : STUDENT.vocab_size]
        for p, config in zip(params, (STUDENT, TEACHER), strict=True)
    ]


def apart(t):
    """The logits [n,V] of both models at the tokens of a record, each by one pass over the sequence."""
    tokens = np.zeros((1, 16), np.int32)
    ids = np.concatenate([t.prompt, t.tokens])
    tokens[0, : len(ids)] = ids
    at = np.arange(len(t.prompt) - 1, len(ids) - 1)
    return [np.asarray(logits)[at] for logits in forward(parameters(), tokens)]


@pytest.mark.parametrize("sizes, options", [
    ({}, {}),
    pytest.param({"mesh": (2, 2, 2)}, {}, marks=pytest.mark.all),
    pytest.param({"max_draft": 3}, {"drafts": Drafts(16, 3, 1000)}, marks=pytest.mark.all),
    pytest.param({"numerics": "invariant", "page_size": tiles.PAGE, "prefill_chunk": tiles.PAGE}, {}, marks=pytest.mark.all),
], ids=["plain", "mesh", "drafts", "invariant"])
def test_records_are_those_of_both_models_run_apart(sizes, options):
    found = sampled(engine(**sizes), requests(), **options)
    assert len(found) == 2 * len(KINDS)
    for id, t in found.items():
        sampling, count = KINDS[id.partition("/")[0]], np.arange(len(t.tokens))
        own, theirs = apart(t)
        heat = sampling.temperature or 1.0
        p = softmax((sampling.alpha * theirs + (1 - sampling.alpha) * own) / heat)
        q = softmax(own / heat)
        order = np.argsort(-p, axis=1)
        kept = np.ones(p.shape, bool)
        if sampling.top_k:
            np.put_along_axis(kept, order[:, sampling.top_k :], False, 1)
        if sampling.top_p < 1:
            mass = np.take_along_axis(p, order, 1).cumsum(1)
            np.put_along_axis(kept, order[:, 1:], mass[:, :-1] < sampling.top_p, 1)
        if sampling.temperature == 0:
            kept = p == p.max(axis=1, keepdims=True)
        drawn = np.where(kept, p, 0) / np.where(kept, p, 0).sum(1, keepdims=True)
        np.testing.assert_allclose(t.logp_behav, np.log(drawn[count, t.tokens]), atol=2e-5)
        np.testing.assert_allclose(t.logp_raw, np.log(q[count, t.tokens]), atol=2e-5)
        is_recorded = kept.sum(1) <= 6
        student = q[count, t.tokens] / np.where(is_recorded, np.where(kept, q, 0).sum(1), 1.0)
        np.testing.assert_allclose(t.logp_student[:, 0], np.log(student), atol=2e-5)
        assert sampling.alpha * sampling.temperature == 0 or np.abs(t.logp_behav - t.logp_student[:, 0]).max() > 0.01


@pytest.mark.all
def test_int8_of_either_is_that_of_an_engine_of_its_own():
    """The mixture is that of the log-probs of two engines, each with one of the models in int8."""
    one = lambda alpha: [
        Request(f"{alpha}/{i}", np.array([*COMMON, i]), i, SamplingParams(alpha=alpha, max_tokens=1))
        for i in range(4)
    ]
    known = dict(num_kept=0, top_n=STUDENT.vocab_size)
    fused = engine(**known, quantization="w8a16", teacher_quantization="w8a8")
    found = sampled(fused, [*one(0.0), *one(0.5), *one(1.0)])
    alone = sampled(engine(None, **known, quantization="w8a16"), one(0.0))
    theirs = Engine(TEACHER, EngineConfig(**SIZES | dict(num_kept=0, top_n=TEACHER.vocab_size, quantization="w8a8")))
    taught = sampled(theirs, one(0.0), lambda: parameters()[1:])

    def logps(t):
        out = np.empty(TEACHER.vocab_size)
        out[t.top_ids[0]] = t.top_logps[0]
        return out[: STUDENT.vocab_size]

    for i in range(4):
        own, other = logps(alone[f"0.0/{i}"]), logps(taught[f"0.0/{i}"])
        np.testing.assert_array_equal(logps(found[f"0.0/{i}"]), own)
        for alpha in (0.5, 1.0):
            mixed = np.log(softmax(alpha * other + (1 - alpha) * own))
            np.testing.assert_allclose(logps(found[f"{alpha}/{i}"]), mixed, atol=1e-5)


@pytest.mark.all
def test_programs_from_shapes_are_those_that_run():
    """Arguments that the run's arrays fit, and their bytes."""
    serving = engine()
    params, state = serving.programs()["decode"][1][:2]
    student, teacher = parameters()
    served = fusion.Pair(serving.load(student), serving.load_teacher(teacher))
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert of(params) == of(served) and of(state) == of(serving.init_state())
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert serving.device_bytes == {
        "policy": size(served.student), "teacher": size(served.teacher),
        "keys and values": size(serving.init_state().cache),
    }


@pytest.mark.all
def test_without_alpha_every_bit_is_that_of_an_engine_without_a_teacher():
    own = {"own": KINDS["own"], "filtered": dataclasses.replace(KINDS["filtered"], alpha=0.0)}
    with_teacher = sampled(engine(), requests(own))
    without = sampled(engine(teacher=None), requests(own))
    for id, t in without.items():
        for name in ("tokens", "logp_behav", "logp_raw", "entropy", "kept"):
            np.testing.assert_array_equal(getattr(t, name), getattr(with_teacher[id], name))
        assert t.logp_student.shape == (6, 0)


def test_fused_policy_is_the_geometric_mixture():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 3, 5)).astype(np.float32)
    p_student, p_teacher = softmax(student), softmax(teacher)
    mixed = p_teacher**0.3 * p_student**0.7
    actual = softmax(mix(student, teacher, np.full(3, 0.3, np.float32)))
    np.testing.assert_allclose(actual, mixed / mixed.sum(-1, keepdims=True), rtol=1e-5)
    for alpha, alone in ((0.0, p_student), (1.0, p_teacher)):
        actual = softmax(mix(student, teacher, np.full(3, alpha, np.float32)))
        np.testing.assert_allclose(actual, alone, rtol=1e-5)
    # Further tokens of the teacher are left out. alpha = 0.5 halves its log 4: odds 1 to 2.
    student, teacher = np.array([[0.0, 0.0]]), np.array([[0.0, np.log(4.0), 50.0]])
    actual = softmax(mix(student, teacher, np.array([0.5])))[0]
    np.testing.assert_allclose(actual, [1 / 3, 2 / 3], rtol=1e-6)


def test_draws_have_the_fused_distribution():
    """Chi-square of first tokens; that of the student alone is far away."""
    kind = SamplingParams(alpha=0.5, max_tokens=1)
    prompt = np.array([*COMMON, 11, 2])
    many = [Request(f"r{i}", prompt, i, kind) for i in range(2000)]
    found = sampled(engine(), many)
    counts = np.bincount([t.tokens[0] for t in found.values()], minlength=STUDENT.vocab_size)
    own, theirs = apart(found["r0"])
    p = softmax((own[0] + theirs[0]) / 2)
    assert stats.chisquare(counts, 2000 * p).pvalue > 1e-3
    assert stats.chisquare(counts, 2000 * softmax(own[0])).pvalue < 1e-12


def test_an_alpha_needs_a_teacher():
    with pytest.raises(ValueError, match="an alpha above 0 needs an engine with a teacher"):
        Scheduler(engine(teacher=None), None).add(requests(count=1)[0])
    with pytest.raises(ValueError, match="alpha=1.5 must be from 0 to 1"):
        SamplingParams(alpha=1.5)
