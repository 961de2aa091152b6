"""Once an engine is warm, no request compiles anything."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import protocol, sampling
from jaxrl_tis.engine.drafter import Drafter, Drafting
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.warm import prefill_lengths, warm_up
from jaxrl_tis.models import transformer
from tests.engine.engine_test import CONFIG

MODEL = dataclasses.replace(CONFIG, num_layers=1, embed_dim=16, mlp_dim=16, vocab_size=32)
LENGTH = 14
_compiled = []


def _listen(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compilations():
    """A list that has an entry for each program that was compiled meanwhile."""
    before, found = len(_compiled), []
    yield found
    found += _compiled[before:]


def requests(rng):
    """Pairs of one prompt, of all lengths; one of them is penalised."""
    for i in range(40):
        if i % 2 == 0:
            prompt = np.arange(rng.integers(1, LENGTH)) % rng.integers(2, 6)
        limit = int(rng.integers(1, LENGTH - len(prompt), endpoint=True))
        bias = dict(logit_bias=((3, 1.0),), presence_penalty=0.5) if i % 2 else {}
        yield Request(f"r{i}", prompt, i, SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])), top_k=int(rng.choice([0, 4])),
            stop_ids=(2,), max_tokens=limit, **bias,
        ))


def serve(scheduler, params):
    """Requests come, are aborted, and lose their pages and slots, under new weights."""
    alive = set()
    for i, request in enumerate(requests(np.random.default_rng(0))):
        scheduler.add(request)
        alive.add(request.id)
        if i % 8 == 5:
            scheduler.abort(min(alive))
        if i % 13 == 7:
            scheduler.pause("retract")
        if i % 17 == 9:
            scheduler.set_params(params, i)
        if i % 2:
            alive -= {t.id for t in scheduler.step()}
    for _ in range(200):
        if not scheduler.pending:
            return
        scheduler.step()
    raise AssertionError("requests never ended")


def greedy(logits_mv, rows, *_, **__):
    """In place of sampling.sample, half of the time that generate and verify take to compile."""
    token, logp = jnp.argmax(logits_mv, axis=-1).astype(jnp.int32), jnp.max(logits_mv, axis=-1)
    return protocol.Draw(token, logp, logp, logp * rows.temperature)


@pytest.mark.compiles
@pytest.mark.all
def test_no_request_compiles_anything(monkeypatch):
    """On slots and heads that are cut into two, with penalties, drafts, and few pages."""
    monkeypatch.setattr(sampling, "sample", greedy)
    devices = jax.devices()[:4]
    layout = sharding.layout((2, 1, 2), sharding.SERVE_RULES, devices=devices, vocab_size=32)
    engine = Engine(MODEL, EngineConfig(
        slots=4, max_length=LENGTH, page_size=4, num_pages=6, steps=2, prefill_batch=2, max_draft=1,
        penalties=True, unroll=False,
    ), layout)
    zeros = lambda x: np.zeros(x.shape, x.dtype)
    params = engine.load(jax.tree.map(zeros, transformer.abstract_params(MODEL)))
    with compilations() as found:
        warm_up(engine, params)
    # A program for each length of a prefill, insert, release, generate, and verify of one length.
    assert len(found) >= len(prefill_lengths(engine)) + 4
    drafts = Drafts(4, engine.config.max_draft, free_batch_rows=16)
    scheduler = Scheduler(engine, params, drafts=drafts, preempt_after=3)
    with compilations() as found:
        serve(scheduler, params)
    assert not found
    stats = scheduler.stats
    assert stats.drafted and stats.shared and stats.calls > 20 and stats.prefilled > 100, stats


@pytest.mark.compiles
@pytest.mark.all
def test_no_request_compiles_a_program_of_the_drafter():
    sizes = dict(slots=4, max_length=LENGTH, page_size=4, num_pages=12, prefill_batch=2, penalties=True)
    engine, own = (Engine(MODEL, EngineConfig(**sizes, steps=4, max_draft=n)) for n in (3, 0))
    zeros = lambda x: np.zeros(x.shape, x.dtype)
    params = jax.tree.map(zeros, transformer.abstract_params(MODEL))
    served, drafting = engine.load(params), Drafting(own, (own.load(params), 0))
    warm_up(engine, served, drafting)
    scheduler = Scheduler(engine, served, drafts=Drafter(drafting, 1000, 0.0))
    with compilations() as found:
        serve(scheduler, served)
    assert not found and scheduler.stats.accepted > 20


def test_prefills_have_the_lengths_of_all_chunks():
    engine = lambda **sizes: Engine(MODEL, EngineConfig(slots=1, steps=1, prefill_batch=1, **sizes))
    # Pages of 4: 1, 1.5 (which is 2), 3, 4, 6 pages; the longest sequence to fill has 29 tokens.
    assert prefill_lengths(engine(max_length=30, page_size=4)) == [4, 8, 12, 16, 24, 32]
    assert prefill_lengths(engine(max_length=30, page_size=4, prefill_chunk=9)) == [4, 8, 12]
    assert prefill_lengths(engine(max_length=17, page_size=16)) == [16]
    assert prefill_lengths(engine(max_length=18, page_size=16)) == [16, 32]
