"""Samplers in threads draw what a synchronous run draws, whoever is fast or slow, and end with it."""

import faulthandler
import functools
import json
import random
import threading
import time
from unittest import mock

import numpy as np
import pytest

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.rollouts import schedules, threads
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.sampler import Preempt, SetParams
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.threads import SamplerThread, ThreadDriver, thread_source
from tests import tiny
from tests.rollouts.virtual_test import (
    SCHEDULES, adapted, assert_same, check_equal_groups_make_room, drawn, in_order,
)
from tests.rollouts.synchronous_test import FakeRewards, Timer

SECONDS = 120  # after which a deadlock shows its stacks and ends the tests


@pytest.fixture(autouse=True)
def _no_deadlock_and_no_thread_left():
    before = set(threading.enumerate())
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert not {t for t in set(threading.enumerate()) - before if t.name.startswith("sampler")}


@functools.cache
def made():
    """Programs of two samplers, on the devices 1 and 2, and parameters on device 0."""
    setup = tiny.setup(
        rollout__max_new_tokens=6, rollout__schedule="one_step", rollout__driver="threads",
        rollout__workers=2,
    )
    return setup, initial_params(setup.training)


class Shaken:
    """A scheduler with a pause of random length before each call."""

    def __init__(self, scheduler, seed):
        self._scheduler, self._random = scheduler, random.Random(seed)

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def step(self):
        time.sleep(self._random.uniform(0, 0.02))
        return self._scheduler.step()


@pytest.fixture
def source(request):
    """Makes sources, and closes them."""
    sources = []

    def make(schedule, reward=lambda text, example: float(len(text)), wrap=lambda s: s, **overrides):
        setup, params = made()
        workers = 2 if schedule.startswith(("dora", "laminar")) else 1
        config = tiny.config(
            rollout__schedule=schedule, rollout__max_new_tokens=6, rollout__workers=workers,
            rollout__driver="threads", **overrides,
        )
        prompter = Prompter(setup.tokenizer, config.task)
        groups = Groups(config, prompter, FakeRewards(reward), with_greedy=False)
        batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts, seed=config.seed
        )
        start = lambda engine, params, version: wrap(setup.scheduler(engine, params, version))
        parts = SourceParts(
            config, schedules.parse(schedule), None, groups, batches, Timer(),
            lambda params, version: setup.served_params(params, version)[:workers],
        )
        starts = [functools.partial(start, engine) for engine in setup.engines[:workers]]
        sources.append(thread_source(parts, starts, setup.engine.slots))
        return sources[-1], params

    yield make
    for each in sources:
        each.close(is_over=True)


def test_each_has_devices_of_its_own():
    setup, _ = made()
    meshes = [setup.training.layout, *(engine.layout for engine in setup.engines)]
    assert [[d.id for d in m.mesh.devices.flat] for m in meshes] == [[0], [1], [2]]
    with pytest.raises(ValueError, match=(
        "trains on 2 devices .* 2 samplers on 4 other devices each, 10 in all, .* there are 8; .* or set "
        "XLA_FLAGS=--xla_force_host_platform_device_count=10"
    )):
        tiny.setup(rollout__schedule="areal", rollout__driver="threads", rollout__workers=2,
                   mesh__train=(2, 1, 1), mesh__serve=(4, 1, 1))


@pytest.mark.all
@pytest.mark.cases(
    "one_step",
    "fully_async(trigger=2, threshold=0.5, partial=True)",
    "fully_async(trigger=1, threshold=0.5, partial=False)",
    "areal(staleness=2)",
    "in_flight(staleness=3)",
    "roll_flash(alpha=1, redundant=1)",
    "laminar(staleness=2, repack=0.9)",
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_unchanged_weights_every_mode_draws_what_a_synchronous_run_draws(schedule, source):
    found = drawn(*source(schedule, wrap=lambda s: Shaken(s, 0)), 1, 4)
    redundant = {id for id in found if id.endswith("/4")}  # no candidates of a sync run
    assert_same({id: s for id, s in found.items() if id not in redundant}, in_order())


@pytest.mark.all
@pytest.mark.parametrize("schedule, staleness", [
    ("areal(staleness=2)", 2), ("in_flight(staleness=2)", 2), ("laminar(staleness=1, repack=0.9)", 1),
])
def test_the_bound_holds_and_samplers_draw_during_an_update(schedule, staleness, source):
    c, params = source(schedule, wrap=lambda s: Shaken(s, 1))
    stale, ahead = set(), 0
    for step in range(1, 9):
        c.publish(params, step - 1)
        samples, values = next_batch(c, step)
        stale |= {step - 1 - v for s in samples for v in s.trajectory.version}
        time.sleep(0.05)  # an update
        ahead = max(ahead, values["async/batches_ahead"])
    assert 0 <= min(stale) and 0 < max(stale) <= staleness < ahead + 1
    assert values["sync/bytes"] > 0 and values["sync/seconds"] > 0
    assert 0 <= values["sync/pause_s"] < 5.0 and 0 <= values["async/sampler_idle"] <= 1


def test_weights_come_between_two_calls_of_a_sampler_that_keeps_its_keys(source):
    """With in_place nothing is given back: tokens of two versions are in one sequence, in one
    segment."""
    c, params = source("in_flight(staleness=3)", wrap=lambda s: Shaken(s, 2))
    mixed, pauses = [], []
    for step in range(1, 9):
        c.publish(params, step - 1)
        samples, values = next_batch(c, step)
        mixed += [s.trajectory for s in samples if len(set(s.trajectory.version)) > 1]
        pauses.append(values["sync/pause_s"])
    assert 0 < max(pauses) < 5.0  # of a call and the sync, which waits for nothing
    assert mixed and all(len(set(t.segment)) == 1 for t in mixed)
    assert c.books.counts.interrupted == 0


def test_a_pause_is_from_the_first_command_to_the_next_step(monkeypatch):
    """Commands at 1 s and 3 s, a step from 7 s to 9 s: a pause of 6 s."""
    now = 1.0
    monkeypatch.setattr(threads.time, "monotonic", lambda: now)
    worker = SamplerThread(mock.Mock(pending=2))

    def step():
        nonlocal now
        now = 9.0
        return []

    worker.sampler.step = step
    worker.execute(Preempt())
    now = 3.0
    worker.execute(SetParams("w", 1))
    now = 7.0
    worker.step()
    assert (worker.paused, worker.stepped, worker.paused_since) == (6.0, 2.0, None)
    worker.sampler.pending = 0
    worker.execute(SetParams("w", 2))  # nobody waits
    assert worker.paused_since is None


def test_a_sampler_is_idle_without_a_command_that_waits_or_runs():
    worker = SamplerThread(mock.Mock())
    assert worker.is_idle
    worker.is_busy = True
    assert not worker.is_idle
    worker.is_busy = False
    worker.inbox.append(Preempt())
    assert not worker.is_idle


def test_times_are_means_over_samplers_since_the_last_batch():
    """Of 10 s one sampler steps for 8 s and one for 4 s; three syncs pause them for 1.5 s."""
    driver = object.__new__(ThreadDriver)
    workers = [SamplerThread(None, stepped=8.0, paused=1.0), SamplerThread(None, stepped=4.0, paused=0.5)]
    driver._workers = dict(enumerate(workers))
    values = driver.metrics(10.0, 3)
    assert values == {"async/sampler_idle": pytest.approx(0.4), "sync/pause_s": 0.5}
    assert driver.metrics(10.0, 0) == {"async/sampler_idle": 1.0, "sync/pause_s": 0.0}


def test_an_error_of_a_sampler_is_the_error_of_the_run(source):
    class Broken(Shaken):
        def step(self):
            raise FloatingPointError("the engine drew a token that is none")

    c, params = source("areal", wrap=lambda s: Broken(s, 0))
    c.publish(params, 0)
    for call in (lambda: next_batch(c, 1), lambda: c.publish(params, 0), lambda: c.get_state(0)):
        with pytest.raises(FloatingPointError, match="a token that is none"):
            call()


def test_what_interrupts_the_run_comes_while_it_waits(source):
    """The heartbeat is called in the learner's thread, though no sampler comes to an end."""
    is_over = threading.Event()

    class Hanging(Shaken):
        def step(self):
            is_over.wait(SECONDS)
            return self._scheduler.step()

    def heartbeat():
        assert threading.current_thread() is threading.main_thread()
        raise InterruptedError

    c, params = source("areal", wrap=lambda s: Hanging(s, 0))
    c._heartbeat = heartbeat
    c.publish(params, 0)
    with pytest.raises(InterruptedError):
        next_batch(c, 1)
    is_over.set()


@pytest.mark.all
@pytest.mark.parametrize("schedule", ["areal(staleness=2)", "dora(staleness=2)"])
def test_a_run_goes_on_from_its_state_without_losing_or_repeating_a_sample(schedule, source):
    c, params = source(schedule, wrap=lambda s: Shaken(s, 3))
    before = drawn(c, params, 1, 3)
    state = json.loads(json.dumps(c.get_state(3)))
    c.release_cache()
    resumed, _ = source(schedule)
    resumed.set_state(state)
    for after in (drawn(resumed, params, 4, 6), drawn(c, params, 4, 6)):
        assert not before.keys() & after.keys()
        assert_same(after, in_order())


def test_groups_of_equal_rewards_make_room_for_others(source):
    check_equal_groups_make_room(source)


def test_what_decides_is_told_while_samplers_change_it(source):
    class Slow(dict):
        def items(self):
            for item in super().items():
                time.sleep(0.01)
                yield item

    c, params = source("areal(staleness=2)", wrap=lambda s: Shaken(s, 4))
    c.books.queue.entries = Slow()
    for step in range(1, 4):
        c.publish(params, step - 1)
        assert c.sync_digest()["queue"].keys() <= {str(i) for i in range(4 * (step + 2))}
        next_batch(c, step)


@pytest.mark.all
@pytest.mark.compiles
def test_a_run_trains_and_resumes(tmp_path):
    settings = dict(
        rollout__schedule="areal(staleness=1)", rollout__driver="threads", train__minibatches=1,
        train__epochs=1, warmup__steps=0, eval__every=8, eval__prompts=2,
    )
    tiny.run(tmp_path / "run", steps=2, **settings)
    tiny.run(tmp_path / "run", steps=4, **settings)
    lines = [line for line in tiny.lines(tmp_path / "run") if line["phase"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/bytes"] > 0 for line in lines)
    assert all(np.isfinite(line["actor/pg_loss"]) for line in lines)


@pytest.mark.all
def test_two_samplers_with_an_adapter_draw_what_one_draws():
    """Each has the base once, and at every version the learner's factors: those of a synchronous run."""
    threaded = dict(rollout__driver="threads", rollout__workers=2, rollout__schedule="areal(staleness=1)")
    found = []
    for overrides in ({}, threaded):
        setup, params = adapted(**overrides)
        prompter = Prompter(setup.tokenizer, setup.config.task)
        reward = FakeRewards(lambda text, example: float(len(text)))
        groups = Groups(setup.config, prompter, reward, with_greedy=False)
        task = setup.config.task
        batches = Batches(
            task.name, task.params, batch_size=setup.config.rollout.prompts, seed=setup.config.seed
        )
        schedule = schedules.parse(setup.config.rollout.schedule)
        served = setup.served_params if overrides else setup.serving_params
        parts = SourceParts(setup.config, schedule, None, groups, batches, Timer(), served)
        starts = [functools.partial(setup.scheduler, engine) for engine in setup.engines]
        made = thread_source(parts, starts, setup.engine.slots) if overrides else (
            SyncSource(parts, starts[0])
        )
        try:
            found.append(drawn(made, params, 1, 4))
        finally:
            made.close(is_over=True)
    assert_same(found[1], found[0])
    base_alone = in_order()
    differ = [id for id, s in found[0].items() if id in base_alone and not np.array_equal(
        s.trajectory.tokens, base_alone[id].trajectory.tokens)]
    assert len(differ) > 8
