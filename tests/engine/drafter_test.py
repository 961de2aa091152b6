"""Drafts of a small model: what is drawn stays the large model's, and the small model's keys are whole."""

import dataclasses
import functools
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from scipy import stats

from jaxrl_tis import build, export, sharding
from jaxrl_tis.engine import fusion
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafter import Drafter, Drafting
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from tests import tiny, weights
from tests.engine import fusion_test
from tests.engine.fusion_test import COMMON, STUDENT, TEACHER, softmax
from tests.resume_test import cut_at

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

SMALL = dataclasses.replace(STUDENT, family="llama", qkv_bias=False, embed_dim=16, mlp_dim=24)
LENGTH = 3  # of drafts
SIZES = dict(slots=16, max_length=32, prefill_batch=4, prefill_chunk=4, page_size=4, penalties=True)
KINDS = {
    "plain": SamplingParams(max_tokens=12),
    "filtered": SamplingParams(temperature=0.8, top_k=6, max_tokens=12),
    "nucleus": SamplingParams(top_p=0.7, min_p=0.02, max_tokens=12),
    "penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=12),
    "stops": SamplingParams(stop_ids=(4, 9), max_tokens=12),
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
}


@functools.cache
def engine(model, teacher=None, mesh=None):
    layout = mesh and sharding.layout(mesh, sharding.SERVE_RULES)
    return Engine(model, EngineConfig(**SIZES, steps=LENGTH + 1), layout, teacher)


@functools.cache
def parameters(model):
    return weights.drawn(model, seed=model.embed_dim)


class Always(Drafter):
    """Drafts in every call but those of `off`, whether it pays or not."""

    def __init__(self, model, off=(), own=None):
        own = own or engine(model)
        super().__init__(Drafting(own, (own.load(parameters(model)), 0)), 1000, 0.1)
        self.off, self.calls = off, 0

    def propose(self, sequences):
        self.calls += 1
        return super().propose(sequences)

    def _speed(self, lengths, length):
        return length * (-1 if self.calls in self.off else 1)


def sampled(requests, drafter=None, teacher=None, serving=None):
    """The records by id, and the counts; in the middle all are interrupted and go on."""
    serving = serving or (engine(STUDENT, teacher) if teacher else engine(STUDENT))
    served = serving.load(parameters(STUDENT))
    if teacher:
        served = fusion.Pair(served, serving.load_teacher(parameters(teacher)))
    scheduler = Scheduler(serving, served, drafts=drafter)
    known = {request.id: request for request in requests}
    for request in requests:
        scheduler.add(request)
    found = [t for _ in range(4) for t in scheduler.step()]
    for partial in scheduler.pause("abort"):
        scheduler.add(dataclasses.replace(known[partial.id], partial=partial))
    while scheduler.pending:
        found += scheduler.step()
    return {t.id: t for t in found}, scheduler.stats


def requests(kinds=KINDS, count=4, alpha=0.0):
    return [
        Request(f"{name}/{i}", np.array([*COMMON, 11 + i % 2, 2]), i, dataclasses.replace(kind, alpha=alpha))
        for name, kind in kinds.items() for i in range(count)
    ]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for id, t in expected.items():
        np.testing.assert_array_equal(found[id].tokens, t.tokens)
        np.testing.assert_allclose(found[id].logp_behav, t.logp_behav, atol=2e-5)


@pytest.mark.parametrize("teacher", [None, pytest.param(TEACHER, marks=pytest.mark.all)])
def test_any_drafter_leaves_every_draw_as_it_was(teacher):
    asked = requests(alpha=0.5 if teacher else 0.0)
    expected, _ = sampled(asked, teacher=teacher)
    found, counts = sampled(asked, Always(SMALL), teacher)
    assert_same(found, expected)
    assert 0 < counts.accepted < counts.drafted / 2


@pytest.mark.all
def test_a_drafter_is_cut_over_a_mesh_as_the_policy_is():
    asked = requests({"plain": KINDS["plain"], "penalties": KINDS["penalties"]})
    on_mesh = functools.partial(engine, mesh=(2, 1, 2))
    expected, _ = sampled(asked)
    found, counts = sampled(asked, Always(SMALL, own=on_mesh(SMALL)), serving=on_mesh(STUDENT))
    assert_same(found, expected)
    assert 0 < counts.accepted < counts.drafted / 2


def test_a_drafter_that_is_the_policy_is_always_right():
    """Its drafts end at a stop or at the last token alone: prompts that are shared, copied pages,
    interruptions, and calls without drafts, whose keys it computes later."""
    drafter = Always(STUDENT, off=(3, 4))
    asked = requests({name: kind for name, kind in KINDS.items() if name != "penalties"})
    expected, _ = sampled(asked)
    found, counts = sampled(asked, drafter)
    assert_same(found, expected)
    assert 50 < counts.accepted == counts.verified <= counts.drafted
    drafted = np.concatenate([t.drafter_version for t in found.values()])
    accepted = np.concatenate([t.accepted for t in found.values()])
    assert set(drafted) == {-1, 0} and counts.accepted == accepted.sum() == (drafted == 0).sum()
    assert not drafter._known and drafter._rejected == 0


@pytest.mark.all
def test_draws_have_the_distribution_of_the_policy():
    """Chi-square of second tokens, which drafts propose, against sums over all first ones."""
    kind = SamplingParams(max_tokens=3)
    prompt = np.array([*COMMON, 11, 2])
    found, counts = sampled([Request(f"r{i}", prompt, i, kind) for i in range(2000)], Always(SMALL))
    assert counts.accepted > 100
    rows = np.concatenate([np.tile(prompt, (STUDENT.vocab_size, 1)), np.arange(STUDENT.vocab_size)[:, None]], 1)
    padded = np.zeros((STUDENT.vocab_size, 16), np.int32)
    padded[:, : rows.shape[1]] = rows
    logits = np.asarray(fusion_test.transformer.logits(parameters(STUDENT), STUDENT, padded))
    p = softmax(logits[0, len(prompt) - 1]) @ softmax(logits[:, len(prompt)])
    drawn = np.bincount([t.tokens[1] for t in found.values()], minlength=STUDENT.vocab_size)
    assert stats.chisquare(drawn, 2000 * p).pvalue > 1e-3


@pytest.mark.all
def test_a_drafter_sleeps_and_wakes_with_the_policy():
    """Asleep its weights are in the memory of the host alone."""
    drafter, served = Always(SMALL), engine(STUDENT).load(parameters(STUDENT))
    scheduler, drafts, found = Scheduler(engine(STUDENT), served, drafts=drafter), [], []
    for version in range(2):
        for request in requests({"plain": KINDS["plain"]}):
            scheduler.add(request)
        found.append({})
        while scheduler.pending:
            found[-1] |= {t.id: t for t in scheduler.step()}
        drafts.append(scheduler.stats.drafted)
        on_device = jax.tree.leaves(drafter._params)
        scheduler.sleep()
        asleep = jax.tree.leaves(drafter._drafting.served[0])
        assert {x.sharding.memory_kind for x in asleep} == {"pinned_host"}
        assert drafter._params is None and all(sys.getrefcount(x) <= 3 for x in on_device)
        scheduler.set_params(served, version + 1)
    assert_same(found[1], found[0])
    assert drafts[1] == 2 * drafts[0] > 0


def test_drafts_end_where_they_do_not_pay():
    """With acceptance 0 a pass of drafts yields one token, for more time."""
    drafter = Drafter(Drafting(engine(SMALL), (None, 0)), free_batch_rows=64, cost=0.1)
    drafter.observe(10, 0)
    sequences = [type("S", (), {"remaining": 9})() for _ in range(16)]
    assert drafter.propose(sequences) == (0, {})
    # 64 rows take the time of one; four steps of the drafter 0.4 of that.
    assert drafter._time(0) == 64 and drafter._time(LENGTH) == pytest.approx(64 * 1.4)


def test_a_drafter_that_does_not_fit_is_refused():
    config = dict(engine__drafter="models/small", engine__max_draft=3)
    model, tokenizer = build._read(tiny.config())
    for fields, changes, match in [
        ({}, {"vocab_size": model.vocab_size - 1}, "token ids, unused ones included, and the policy"),
        ({}, {"vocab_size": 99}, "engine.drafter = 'models/small' has 99 token ids and the policy"),
        ({}, {"num_layers": 2}, "has 16,128 parameters and the policy 8,384; name a smaller model"),
        ({"engine__max_draft": 0}, {}, "makes drafts of engine.max_draft tokens, which is 0"),
        ({"engine__retention": (1, 1)}, {}, "needs the keys of all tokens, and engine.retention"),
        ({"rollout__schedule": "one_step", "rollout__driver": "external"}, {}, "engine.drafter"),
        ({"engine__drafter_every": 4, "engine__drafter": ""}, {},
         "engine.drafter_every = 4 trains engine.drafter, and there is none; name a model"),
        ({"engine__drafter_weighting": "length"}, {}, "engine.drafter_weighting"),
    ]:
        shape = dataclasses.replace(model, **changes)
        with (
            mock.patch.object(build.models, "read_config", return_value=shape),
            mock.patch.object(build, "load_tokenizer", return_value=tokenizer),
            pytest.raises(ValueError, match=match),
        ):
            build.build(tiny.config(**config | fields))
    for fields, match in [
        ({"engine__drafter_every": 4}, "of a run of one process, and this one has 2; set it to 0"),
        ({"engine__free_batch_rows": 0}, "measure its own times, .* evaluations of this run have 2 that must take equal"),
    ]:
        with (
            mock.patch.object(build.jax, "process_count", lambda: 2),
            pytest.raises(ValueError, match=match),
        ):
            build._check_processes(tiny.config(**config | fields))


def small_model(folder):
    """A model of a twentieth of the size of the policy, which drafts pay for."""
    small = dict(model__embed_dim=8, model__num_heads=1, model__head_dim=8, model__mlp_dim=8)
    tiny.run(folder / "first", steps=1, warmup__steps=60, **small)
    export.export(str(folder / "first"), str(folder / "model"), dtype="float32")
    return dict(
        engine__drafter=str(folder / "model"), engine__max_draft=3, engine__free_batch_rows=1000,
        engine__quantization="none",
    )


@pytest.mark.all
@pytest.mark.parametrize("fields", [
    {}, dict(rollout__schedule="areal(staleness=2)", train__pack_length=32, engine__drafter_every=1),
    dict(rollout__schedule="one_step", rollout__driver="ray", rollout__cpus_per_worker=0.01),
    dict(rollout__schedule="one_step", rollout__driver="ray", rollout__cpus_per_worker=0.01, engine__drafter_every=1),
    dict(rollout__schedule="one_step", rollout__driver="threads", engine__drafter_every=1),
], ids=["sync", "ahead", "ray", "ray, distilled", "threads"])
def test_a_run_with_a_drafter_has_no_gap(tmp_path, fields):
    tiny.run(tmp_path / "run", **small_model(tmp_path) | fields)
    trained = [r for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"]
    assert max(r["mismatch/log_ratio_abs_max"] for r in trained) < 3e-5
    accepted = [r["rollout/draft_acceptance"] for r in trained if "rollout/draft_acceptance" in r]
    assert np.mean(accepted) > 0.1, accepted
    # One step ahead, the drafter of a sampler is that of its policy.
    if fields.get("engine__drafter_every"):
        assert max(r.get("rollout/drafter_lag", 0) for r in trained) == 0


@pytest.mark.all
@pytest.mark.parametrize("weighting", ["none", "reward"])
def test_a_distilled_drafter_changes_no_bit_of_a_run_and_survives_a_restart(tmp_path, weighting):
    exact = dict(model__numerics="invariant", engine__page_size=16, metrics__samples_every=1, steps=4)
    drafter = small_model(tmp_path) | exact | dict(
        engine__drafter_every=2, engine__drafter_lr=1e-2, engine__drafter_weighting=weighting,
    )
    tiny.run(tmp_path / "plain", **exact, engine__quantization="none")
    tiny.run(tmp_path / "drafted", **drafter)
    with cut_at(3, "after update"):
        tiny.run(tmp_path / "cut", **drafter)
    tiny.run(tmp_path / "cut", **drafter)
    plain, drafted, cut = (tiny.lines(tmp_path / name) for name in ("plain", "drafted", "cut"))
    assert cut == drafted
    common = lambda records: [
        {n: x for n, x in r.items() if "draft" not in n and n != "rollout/occupancy"} for r in records
    ]
    assert common(drafted) == common(plain)
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("plain", "drafted")]
    assert samples[0] == samples[1] and samples[0].count("\n") > 4


@pytest.mark.all
def test_the_training_of_a_drafter_begins_and_ends_by_a_change(tmp_path):
    exact = dict(model__numerics="invariant", engine__page_size=16)
    run = functools.partial(tiny.run, **small_model(tmp_path) | exact)
    change = ["engine.drafter_every"]
    for step, every in enumerate((0, 1, 1, 0), 1):
        run(tmp_path / "changed", change=change, steps=step, engine__drafter_every=every, engine__drafter_lr=1e-2)
    run(tmp_path / "frozen", steps=4)
    found, frozen = ([r for r in tiny.lines(tmp_path / name) if r["phase"] == "train"]
                     for name in ("changed", "frozen"))
    assert ["drafter/kl" in r for r in found] == [False, True, True, False]
    assert [r["rollout/drafter_lag"] for r in found] == [0, 1, 0, 3]
    for ours, theirs in zip(found, frozen, strict=True):
        names = {n for n in theirs if "draft" not in n and n != "rollout/occupancy"}
        assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}
    with pytest.raises(ValueError, match="--change=engine.drafter_every"):
        run(tmp_path / "changed", steps=5, engine__drafter_every=1, engine__drafter_lr=1e-2)


@pytest.mark.all
def test_acceptance_falls_with_the_age_of_a_drafter_and_stays_where_it_is_distilled(tmp_path):
    drafter = small_model(tmp_path) | dict(steps=8, checkpoint__every=8)
    tiny.run(tmp_path / "frozen", **drafter)
    tiny.run(tmp_path / "distilled", **drafter, engine__drafter_every=1, engine__drafter_lr=1e-2)
    of = lambda run, name: [r[name] for r in tiny.lines(tmp_path / run) if r["phase"] == "train"]
    assert of("frozen", "rollout/drafter_lag") == list(range(8))
    assert of("distilled", "rollout/drafter_lag") == [0] * 8
    frozen, distilled = (of(run, "rollout/draft_acceptance") for run in ("frozen", "distilled"))
    assert frozen[0] == distilled[0] > 0.4
    assert np.mean(frozen[4:]) < 0.3 and np.mean(distilled[4:]) > 0.4
