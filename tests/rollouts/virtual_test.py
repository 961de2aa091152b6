"""Samplers that run ahead: what they draw is what a synchronous run draws, and nothing is lost."""

import functools
import json
import math
import types
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.learner.state import initial_params, initial_state, policy
from jaxrl_tis.models import lora
from jaxrl_tis.rollouts import bookkeeping, record_check, replay, schedules
from jaxrl_tis.rollouts.bookkeeping import check_versions
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.sampler import SetParams
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.virtual import VirtualSource
from tests import arithmetic, tiny
from tests.rollouts.synchronous_test import FakeRewards, Timer

SCHEDULES = [
    "periodic", "one_step", "fully_async(trigger=2, threshold=0.5, partial=True)",
    "fully_async(trigger=1, threshold=0.5, partial=False)", "areal(staleness=2)",
    "in_flight(staleness=3)", "dora(staleness=2)", "roll_flash(alpha=1, redundant=1)",
    "laminar(staleness=2, repack=0.9)",
]
LORA = dict(model__lora="lora(rank=4, alpha=32)")


@functools.cache
def made(**overrides):
    setup = tiny.setup(rollout__max_new_tokens=6, **overrides)
    return setup, initial_params(setup.training)


@functools.cache
def adapted(**overrides):
    """As `made`, with an adapter that changes samples."""
    setup, params = made(**LORA, **overrides)
    factors, base = lora.split(policy(setup.training, initial_state(setup.training, params)))
    return setup, setup.adapter.join(base, jax.tree.map(lambda x: x + 0.05, factors))


def source(schedule, reward=lambda text, example: float(len(text)), start=None, of=made, **overrides):
    """A source of the tiny config, and its parameters."""
    is_parallel = schedule.startswith(("dora", "laminar"))
    setup, params = of()
    config = tiny.config(
        rollout__schedule=schedule, rollout__max_new_tokens=6,
        rollout__workers=2 if is_parallel else 1,
        **overrides,
    )
    prompter = Prompter(setup.tokenizer, config.task)
    groups = Groups(config, prompter, FakeRewards(reward), with_greedy=False)
    batches = Batches(
        config.task.name, config.task.params, batch_size=config.rollout.prompts, seed=config.seed
    )
    parts = SourceParts(
        config, schedules.parse(schedule), replay.parse(config.rollout.replay), groups, batches,
        Timer(),
        setup.serving_params,
    )
    start = start or functools.partial(setup.scheduler, setup.engine)
    if schedule == "sync" and parts.replay is None:
        return SyncSource(parts, start), params
    return VirtualSource(parts, start, setup.engine.slots), params


def drawn(source, params, first, last):
    """The samples of these steps by request, each published with the same weights."""
    found = {}
    for step in range(first, last + 1):
        source.publish(params, step - 1)
        samples, _ = next_batch(source, step)
        assert [s.group for s in samples] == sorted(s.group for s in samples)
        assert len(samples) == 16
        found |= {s.trajectory.id: s for s in samples}
    assert len(found) == 16 * (last - first + 1)
    return found


@functools.cache
def in_order():
    return drawn(*source("sync"), 1, 12)


def assert_same(found, expected):
    for id, sample in found.items():
        np.testing.assert_array_equal(sample.trajectory.tokens, expected[id].trajectory.tokens)
        assert sample.reward == expected[id].reward and sample.example == expected[id].example


@pytest.mark.all
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_unchanged_weights_every_mode_draws_what_a_synchronous_run_draws(schedule):
    found = drawn(*source(schedule, rollout__update_turns=3), 1, 6)
    redundant = {i: s for i, s in found.items() if i.endswith("/4")}  # no candidates of a sync run
    assert bool(redundant) == ("redundant" in schedule)
    assert_same({i: s for i, s in found.items() if i not in redundant}, in_order())


def bare(**samplers):
    """A source with these samplers, whose calls and those of the books are noted in one list."""
    calls, source = mock.Mock(), object.__new__(VirtualSource)
    for name, sampler in samplers.items():
        calls.attach_mock(sampler, name)
    source.books, source._samplers, source._timer = calls.books, samplers, Timer()
    return source, calls


def test_the_turns_of_an_update_are_taken_once():
    source, calls = bare()
    source._update_turns, source._is_updating, source._turn = 3, True, calls.turn
    source._finish_update()
    source._finish_update()  # the next version comes without an update
    assert calls.turn.call_count == 3


def test_records_are_reported_before_a_sync():
    source, calls = bare(s=mock.Mock())
    source._newest = SetParams("weights", 4)
    source._sync("s")
    assert [name for name, *_ in calls.mock_calls] == [
        "s.records", "books.report", "s.execute", "books.synced"]


def test_a_turn_of_rewards_alone_is_something():
    source, calls = bare(s=mock.Mock(pending=0))
    source._settle, calls.books.counts.passed = lambda: None, 0
    assert source._turn()
    calls.books.claim.return_value = None
    assert not source._turn()


@pytest.mark.parametrize("is_untrained", [True, False])
def test_a_state_before_an_update_takes_none_of_its_turns(is_untrained):
    source, calls = bare()
    source._finish_update, source._gather = calls.turns, calls.gather
    calls.books.is_untrained.return_value = is_untrained
    source.get_state(3)
    assert (calls.turns.call_count, calls.gather.call_count) == (1 - is_untrained, 1)


def test_a_batch_of_versions():
    """Begun by version 0, of 2 batches ahead: each batch holds tokens of several versions, never
    older than 2, and the sampler stands at the newest."""
    c, params = source("areal(staleness=2)", rollout__update_turns=2)
    for step in range(1, 6):
        c.publish(params, step - 1)
        samples, values = next_batch(c, step)
        versions = np.concatenate([s.trajectory.version for s in samples])
        assert step - 3 <= versions.min() <= versions.max() <= step - 1
    assert values["async/syncs"] == 1 and values["async/interrupted"] > 0
    assert {len(set(s.trajectory.version)) for s in samples} > {1}


def test_nothing_is_drawn_ahead_where_the_mode_allows_nothing():
    c, params = source("periodic", rollout__update_turns=3)
    for step in range(1, 4):
        c.publish(params, step - 1)
        samples, _ = next_batch(c, step)
        assert {v for s in samples for v in s.trajectory.version} == {step - 1}


@pytest.mark.all
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", ["a step", "the middle of a step"])
def test_a_run_goes_on_from_its_state_without_losing_or_repeating_a_sample(schedule, at):
    c, params = source(schedule, rollout__update_turns=2)
    before = drawn(c, params, 1, 3)
    version = 3
    if at == "the middle of a step":
        c.publish(params, 3)
        for _ in range(2):
            c._turn()
        c._next_groups()
    state = json.loads(json.dumps(c.get_state(version)))
    resumed, _ = source(schedule, rollout__update_turns=2)
    resumed.set_state(state)
    after = drawn(resumed, params, 4, 6)
    assert not before.keys() & after.keys()
    if "redundant" not in schedule:
        assert_same(after, in_order())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_going_on_after_a_state_was_taken_is_what_a_restart_does(schedule):
    """Not one bit of a record differs, log-probs included."""
    c, params = source(schedule, rollout__update_turns=2)
    drawn(c, params, 1, 3)
    resumed, _ = source(schedule, rollout__update_turns=2)
    resumed.set_state(json.loads(json.dumps(c.get_state(3))))
    went_on, restarted = drawn(c, params, 4, 6), drawn(resumed, params, 4, 6)
    assert list(went_on) == list(restarted)
    for id, sample in went_on.items():
        for name in ("tokens", "logp_behav", "entropy", "version", "kv_version", "segment"):
            ours, theirs = (getattr(s.trajectory, name) for s in (sample, restarted[id]))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_a_batch_that_was_taken_and_not_trained_on_is_taken_again():
    c, params = source("areal(staleness=1)")
    c.publish(params, 0)
    first, _ = next_batch(c, 1)
    resumed, _ = source("areal(staleness=1)")
    resumed.set_state(json.loads(json.dumps(c.get_state(0))))
    resumed.publish(params, 0)
    again, _ = next_batch(resumed, 1)
    assert [s.trajectory.id for s in first] == [s.trajectory.id for s in again]


def test_groups_of_equal_rewards_make_room_for_others():
    check_equal_groups_make_room(source)


def check_equal_groups_make_room(make):
    reward = lambda text, example: float(int(example["id"].split("-")[-1]) % 2 and len(text) % 2)
    c, params = make("areal(staleness=1)", reward, rollout__dynamic_sampling=True)
    c.publish(params, 0)
    samples, values = next_batch(c, 1)
    rewards = np.array([s.reward for s in samples]).reshape(4, 4)
    assert values["rollout/discarded_groups"] > 0
    assert 1 <= values["async/batches_ahead"] <= 2  # the batch in training, and one ahead
    assert (np.ptp(rewards, axis=1) > 0).all()


def test_a_record_that_is_too_old_stops_the_run():
    c, params = source("areal(staleness=1)")
    c.publish(params, 0)
    next_batch(c, 1)
    for version in (1, 2):
        c.publish(params, version)
        if version == 1:
            next_batch(c, 2)
    entry = next(iter(c.books.queue.entries.values()))
    entry.columns[0] = {"tokens": next(iter(in_order().values())).trajectory}
    with pytest.raises(RuntimeError, match="versions 0 to 0.*starts from 2; the bound on staleness is 1"):
        check_versions(entry, c.books.controller.version, staleness=1)


def test_a_fork_counts_as_the_tokens_of_its_group():
    fork = types.SimpleNamespace(id="a/fork1", version=np.array([1, 4]), forks=())
    record = types.SimpleNamespace(id="a", version=np.array([3, 4]), forks=(fork,))
    entry = types.SimpleNamespace(columns={0: {"tokens": record}})
    check_versions(entry, 4, staleness=3)
    with pytest.raises(RuntimeError, match="a/fork1 has tokens of versions 1 to 4"):
        check_versions(entry, 4, staleness=2)
    assert bookkeeping._oldest(entry, 4) == 1
    without_tokens = types.SimpleNamespace(id="a", version=np.array([], np.int32), forks=())
    check_versions(types.SimpleNamespace(columns={0: {"tokens": without_tokens}}), 5, staleness=1)


def test_a_run_goes_on_where_the_last_tokens_were_unread():
    """The last call of a batch is read by the interruption. Its samples have no reward yet, and no
    sampler has work."""
    options = dict(engine__async_scheduling=True)
    of, beats, stop_at = functools.partial(made, **options), [], math.inf

    def beat():  # before each turn
        beats.append(None)
        if len(beats) == stop_at:
            raise InterruptedError

    def begun():
        c, params = source("periodic", of=of, **options)
        c._heartbeat = beat
        return c, params

    c, params = begun()
    c.publish(params, 0)
    assert sum(map(len, c.parts(1))) == 16
    stop_at = len(beats)
    beats.clear()
    c, params = begun()
    c.publish(params, 0)
    with pytest.raises(InterruptedError):
        list(c.parts(1))
    state, stop_at = json.loads(json.dumps(c.get_state(0))), math.inf
    d, params = begun()
    d.set_state(state)
    d.publish(params, 0)
    assert sum(map(len, d.parts(1))) == 16


@pytest.mark.cases("areal(staleness=2)")
@pytest.mark.parametrize("schedule", ["one_step", "areal(staleness=2)", "in_flight(staleness=2)"])
def test_what_saw_evicted_keys_starts_again_where_it_was_interrupted(schedule):
    engine = arithmetic.Engine(slots=8, steps=1, max_length=24, page_size=2)
    start = lambda params, version: Scheduler(engine, params, version, retention=KVEviction(0, 1))
    requests, records = {}, []

    def begun():
        c, params = source(schedule, start=start, rollout__update_turns=2)
        c._serving_params = lambda params, version: np.int64(version)
        command = lambda decision, own=c.books.command: noted(own(decision))
        c.books.command = command
        return c, params

    def noted(command):
        requests.update({r.id: r for r in getattr(command, "requests", ())})
        return command

    c, params = begun()
    for step in (1, 2):
        c.publish(params, step - 1)
        records += [s.trajectory for s in next_batch(c, step)[0]]
    c._finish_update()
    running = c._samplers["sampler 0"].records
    while not any(len(t.evict_step) for t in running()):
        assert c._turn()
    evicted, before = [t for t in running() if len(t.evict_step)], c.books.counts.lost_tokens
    expected = {t.id for t in running() if not len(t.evict_step)}
    state = json.loads(json.dumps(c.get_state(2)))
    kept = {json.loads(text)["scalars"]["id"] for _, text in state["partials"]}
    assert kept == expected
    assert c.books.counts.lost_tokens == before + sum(len(t.tokens) for t in evicted) > before
    c, params = begun()
    c.set_state(state)
    for step in (3, 4):
        c.publish(params, step - 1)
        records += [s.trajectory for s in next_batch(c, step)[0]]
    assert len({t.id for t in records}) == 64 and any(len(t.evict_step) for t in records)
    for t in records:
        arithmetic.assert_replays(t, requests[t.id])
        assert not record_check.problem(t, requests[t.id], engine, 0, 3, retention=KVEviction(0, 1))


@pytest.mark.all
def test_the_policy_may_be_given_away_after_it_was_published():
    """An update donates the arrays that the samplers' weights are made of."""
    c, params = source("one_step")
    own = jax.tree.map(lambda x: x + 0, params)
    c._serving_params = lambda params, version: params
    c.publish(own, 0)
    for ours, theirs in zip(jax.tree.leaves(c._newest.params), jax.tree.leaves(own), strict=True):
        assert ours is not theirs
        assert ours.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()


@pytest.mark.parametrize("settings", [
    dict(schedule="roll_flash(alpha=1, redundant=2)", rollout__update_turns=2),
    dict(schedule="areal(staleness=1)", rollout__dynamic_sampling=True,
         reward=lambda text, example: float(int(example["id"].split("-")[-1]) % 2 and len(text) % 2)),
])
def test_of_a_group_that_is_gone_nothing_is_kept(settings):
    c, params = source(**settings)
    for worker in c.books.controller.workers.values():
        worker.slots = 2  # so that a group is complete while one of its candidates waits
    for step in range(1, 9):
        c.publish(params, step - 1)
        next_batch(c, step)
        assert {group for group, _ in c.books._requests} <= c.books.queue.entries.keys()
        assert {group for group, _ in c.books._partials} <= c.books.queue.entries.keys()


def test_a_batch_that_was_begun_changes_nothing_of_what_is_replayed():
    """Half of the new groups of the third batch are there when the run is told to stop: the buffer
    is as the second batch has left it."""
    settings = dict(rollout__replay="uniform(uses=2)", rollout__max_age=9)
    c, params = source("periodic", **settings)
    for step in (1, 2):
        c.publish(params, step - 1)
        next_batch(c, step)
    uses = {g: s.uses for g, s in c.books._replay.stored.items()}
    c.publish(params, 2)
    parts = c.parts(3)
    assert 0 < len(next(parts)) < 8 and c.books.taken
    state = json.loads(json.dumps(c.get_state(2)))
    assert {s["group"]: s["uses"] for s in state["replay"]} == uses
