"""Workers on Ray: good ones sample what a synchronous run samples, bad ones cost time alone."""

import contextlib
import dataclasses
import functools
import threading
import time
from unittest import mock

import jax
import pytest
import ray

from jaxrl_tis.build import build_sampling
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.weights import moving
from jaxrl_tis.rollouts import ray_cluster, ray_source as ray_module, schedules
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.ray_source import Invalid, ray_source
from jaxrl_tis.rollouts.ray_worker import Event, Joined
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from jaxrl_tis.runtime import cli
from jaxrl_tis.runtime.cli import Interrupted, Unwritable
from tests import hosts, tiny
from tests.ray_nodes import wait_for
from tests.rollouts import ray_builds, virtual_test
from tests.rollouts.virtual_test import LORA, adapted, assert_same, drawn, in_order, made
from tests.rollouts.synchronous_test import FakeRewards, Timer

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray_cluster.connect(tiny.config().rollout)
    yield
    ray.shutdown()


@pytest.fixture
def learner():
    with contextlib.ExitStack() as stack:
        def make(
            schedule="areal(staleness=1)", build=build_sampling, timeout=60.0, cpus=0.01, of=made,
            **overrides,
        ):
            setup, params = of()
            config = tiny.config(
                rollout__schedule=schedule, rollout__max_new_tokens=6, rollout__driver="ray",
                rollout__worker_timeout=timeout, rollout__cpus_per_worker=cpus, **overrides,
            )
            prompter = Prompter(setup.tokenizer, config.task)
            groups = Groups(
                config, prompter, FakeRewards(lambda text, _: float(len(text))), with_greedy=False
            )
            batches = Batches(
                config.task.name, config.task.params, batch_size=config.rollout.prompts,
                seed=config.seed,
            )
            parts = SourceParts(
                config, schedules.parse(schedule), None, groups, batches, Timer(),
                setup.serving_params,
            )
            source = ray_source(parts, setup.engine, setup.abstract_served, setup.identity, build)
            stack.callback(source.close, is_over=True)
            return source, params
        yield make


@pytest.mark.all
@pytest.mark.cases("in_flight(staleness=2)")
@pytest.mark.parametrize("schedule", ["one_step", "areal(staleness=2)", "in_flight(staleness=2)"])
def test_with_unchanged_weights_workers_sample_what_a_synchronous_run_samples(schedule, learner):
    source, params = learner(schedule, rollout__workers=2)
    found = drawn(source, params, 1, 5)
    assert_same(found, in_order())
    versions = {int(v) for s in found.values() for v in s.trajectory.version}
    assert versions > {0} and max(versions) <= 4


@pytest.mark.all
def test_workers_that_evict_keys_sample_what_a_synchronous_run_samples(learner):
    evicting = dict(engine__retention=(1, 1), engine__page_size=2)
    of = functools.partial(made, **evicting)
    source, params = learner("areal(staleness=1)", of=of, **evicting)
    found = drawn(source, params, 1, 3)
    assert_same(found, drawn(*virtual_test.source("sync", of=of, **evicting), 1, 3))
    assert any(len(s.trajectory.evict_step) for s in found.values())


FAULTS = {  # whether the worker is evicted
    "killed": False, "stopped": False, "failed": False, "hangs": False, "lie": True, "foreign": True,
    "damaged": True, "not a record": True, "not finite": True, "twice": True,
}


@pytest.mark.all
@pytest.mark.cases("killed", "lie")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_worker_costs_time_alone(fault, learner, tmp_path):
    build = functools.partial(ray_builds.once, str(tmp_path / "flag"), fault)
    settings = {"stopped": {"timeout": 8.0}, "hangs": {"watchdog__timeout": 20.0}}
    source, params = learner("areal(staleness=1)", build, **settings.get(fault, {}))
    left = evicted = 0
    source.publish(params, 0)
    for step in (1, 2, 3):
        samples, values = next_batch(source, step)
        assert_same({s.trajectory.id: s for s in samples}, in_order())
        left, evicted = left + values["async/left"], evicted + values["async/workers_evicted"]
        source.publish(params, step)
    assert (left, evicted) == (1, FAULTS[fault])


@pytest.mark.all
def test_a_worker_that_builds_no_engine_starts_again(learner, tmp_path, capsys):
    build = functools.partial(ray_builds.unbuilt, str(tmp_path / "flag"))
    source, params = learner(build=build, rollout__start_timeout=15.0)
    source.driver._since += 60  # the first worker may take longer here
    source.publish(params, 0)
    samples, values = next_batch(source, 1)
    assert_same({s.trajectory.id: s for s in samples}, in_order())
    assert values["async/left"] == 0
    assert "rollout worker 0 builds no engine in time, and starts again" in capsys.readouterr().out


@pytest.mark.all
def test_the_learner_does_not_wait_for_a_slow_worker_before_its_sequences_are_due(learner, tmp_path):
    """Of three batches that may begin with the first weights, it holds two groups."""
    build = functools.partial(ray_builds.waiting, str(tmp_path / "flag"), str(tmp_path / "go"))
    source, params = learner("areal(staleness=2)", build, rollout__workers=2)
    source.publish(params, 0)
    while len(source.driver._sessions) < 2:
        time.sleep(0.05)
    found = {}
    for step in (1, 2, 3):
        if step == 3:
            (tmp_path / "go").touch()
        samples, values = next_batch(source, step)
        found |= {s.trajectory.id: s for s in samples}
        source.publish(params, step)
        assert values["async/left"] == 0
    assert len(found) == 48
    assert_same(found, in_order())


def stored(monkeypatch):
    """The bytes of each object that this process puts from now on, by name."""
    put, sizes = ray.put, {}

    def noted(value):
        ref = put(value)
        sizes[ref.hex()] = sum(x.nbytes for x in value.values())
        return ref

    monkeypatch.setattr(ray, "put", noted)
    return sizes


def held(objects):
    """The names of those to which this process, a call or a worker that borrows it refers."""
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    return objects.keys() & {name.decode() for name in counts()}


@pytest.mark.all
def test_the_object_store_holds_two_versions_at_most(learner, monkeypatch):
    """Also where weights are published faster than a worker takes them."""
    objects = stored(monkeypatch)
    source, params = learner(build=functools.partial(ray_builds.slow_loads, 0.4))
    driver, served = source.driver, made()[0].serving_params(params, 0)
    while not driver._sessions:
        time.sleep(0.05)
    start = time.monotonic()
    for version in range(5):
        sent = driver.send(served, version)
        assert len(held(objects)) <= 2 and [*objects][-1] in held(objects)
        with source._shared.changed:
            driver.sync(sent, version)
    assert time.monotonic() - start > 3 * 0.4  # the third waits for the first, and so on
    del sent
    wait_for(lambda: not driver._sessions["0"].calls and held(objects) == {[*objects][-1]})


@pytest.mark.all
def test_workers_receive_the_base_of_an_adapter_once_and_then_factors(learner, tmp_path, monkeypatch):
    """The worker dies. Its successor has the same base, and samples what a synchronous run samples."""
    objects = stored(monkeypatch)
    build = functools.partial(ray_builds.once, str(tmp_path / "flag"), "killed")
    source, params = learner("areal(staleness=2)", build, of=adapted, **LORA)
    factors, base = moving(adapted()[0].serving_params(params, 0))
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert source.driver._stored_bytes == size(base) + 2 * size(factors)
    found, left = {}, 0
    for step in range(1, 5):
        source.publish(params, step - 1)
        assert len(held(objects)) <= 3 and [*objects][0] in held(objects)
        samples, values = next_batch(source, step)
        found |= {s.trajectory.id: s for s in samples}
        assert values["sync/bytes"] == size(factors)
        left += values["async/left"]
    assert left == 1
    assert list(objects.values()) == [size(base), *4 * [size(factors)]]
    expected = drawn(*virtual_test.source("sync", of=adapted), 1, 4)
    assert_same(found, expected)
    tokens = lambda samples, id: samples[id].trajectory.tokens.tolist()
    assert sum(tokens(expected, id) != tokens(in_order(), id) for id in expected) > 8  # of the base


# Without actors: Ray has no room to start them. A session is entered by hand.

class Actor:
    """Notes the calls of its methods. None of them returns."""

    def __init__(self, pending):
        self.calls = []
        for name in ("receive", "sync"):
            remote = lambda *args, name=name: self.calls.append((name, *args)) or pending()
            setattr(self, name, mock.Mock(remote=remote))


@pytest.fixture
def entered(learner, monkeypatch):
    """A source, its parameters, and the session of a worker that is none."""
    with monkeypatch.context() as patch:
        patch.setattr(ray_cluster, "lacking", lambda rollout, count: "")
        source, params = learner(cpus=1000.0, rollout__start_timeout=0.3)  # Ray lets it wait
    driver = source.driver
    actors, driver._actors = driver._actors, {}
    driver._actors["0"] = Actor(actors["0"].join.remote)
    node = ray.get_runtime_context().get_node_id()
    joined = Joined("a session", node, driver._facts)
    yield source, params, joined
    driver._actors = actors


def take(source, session, *report):
    with source.driver._changed:
        source.driver._reports.take(session, *report)
        source.driver.decide()


def with_two_versions(source, params, joined):
    """The driver, serving parameters, and the session of a worker that reads versions 0 and 1."""
    driver, served = source.driver, made()[0].serving_params(params, 0)
    session = driver._join("0", joined)
    for version in range(2):
        driver.sync(driver.send(served, version), version)
    return driver, served, session


def test_a_third_version_waits_until_no_worker_reads_the_first(entered):
    driver, served, session = with_two_versions(*entered)
    sent = []
    thread = threading.Thread(target=lambda: sent.append(driver.send(served, 2)))
    thread.start()
    thread.join(0.3)
    assert not sent and set(session.calls.values()) == {0, 1}
    with driver._changed:
        session.calls = {call: version for call, version in session.calls.items() if version == 1}
    thread.join(5)
    assert sent[0].version == 2


def test_a_worker_that_leaves_reads_no_weights_any_more(entered):
    driver, served, session = with_two_versions(*entered)
    driver._leave(session, "lost")
    assert driver.send(served, 2).version == 2


@pytest.mark.parametrize("report", [
    (["a text"], Stats()), ([{"kind": "done"}], Stats()), ([], {"steps": 3}),
    ([Event("another", 3)], Stats()), ([Event("done", "text")], Stats()),
    ([Event("synced", "0")], Stats()), ([Event("synced", True)], Stats()),
])
def test_a_report_of_another_kind_is_refused(entered, report):
    source, params, joined = entered
    session = source.driver._join("0", joined)
    source.publish(params, 0)
    with pytest.raises(Invalid):
        take(source, session, *report)


def test_weights_that_a_worker_was_not_to_use_are_refused(entered):
    source, params, joined = entered
    driver, session = source.driver, source.driver._join("0", joined)
    with pytest.raises(Invalid, match="version 0, to which it was not to sync"):
        take(source, session, [Event("synced", 0)], Stats())  # no weights are there yet
    source.publish(params, 0)
    for version in (-1, 1):
        with pytest.raises(Invalid, match=f"version {version}, to which it was not to sync"):
            take(source, session, [Event("synced", version)], Stats())
    take(source, session, [Event("synced", 0)], Stats())
    with pytest.raises(Invalid):
        take(source, session, [Event("synced", 0)], Stats())  # once
    names = [name for name, *_ in driver._actors["0"].calls]
    assert names[:2] == ["sync", "receive"] and len(session.given) == 8  # then requests


def test_weights_of_another_version_than_a_worker_has_are_refused(entered):
    """A record of tokens by weights that its worker was never told to use."""
    source, params, joined = entered
    session = source.driver._join("0", joined)
    source.publish(params, 0)
    take(source, session, [Event("synced", 0)], Stats())
    record = next(iter(in_order().values())).trajectory
    assert record.id in session.given
    newer = dataclasses.replace(record, version=record.version + 1, kv_version=record.kv_version)
    with pytest.raises(Invalid, match="version"):
        take(source, session, [Event("done", newer)], Stats())
    with pytest.raises(Invalid, match="continues, and has ended by"):
        take(source, session, [Event("partial", record)], Stats())
    take(source, session, [Event("done", record)], Stats())
    assert record.id not in session.given
    with pytest.raises(Invalid, match="which it was not given"):
        take(source, session, [Event("done", record)], Stats())


def test_a_run_without_room_for_a_worker_ends_before_anything_is_sampled(learner):
    start = time.monotonic()
    with pytest.raises(ValueError, match="need CPU 1000 each.*no node came within rollout.start_timeout"):
        learner(cpus=1000.0, rollout__start_timeout=0.3)
    assert time.monotonic() - start < 5


def test_a_run_whose_workers_do_not_start_ends(entered):
    source, params, _ = entered
    source.publish(params, 0)
    time.sleep(0.4)
    with pytest.raises(ValueError, match="no rollout worker has started within rollout.start_timeout"):
        next_batch(source, 1)


def test_a_cluster_without_room_for_one_worker_is_refused_before_anything_is_sampled(learner, capsys):
    why = "rollout.workers = 1 need CPU 1000 each, and Ray has CPU .*; no node came within "
    with pytest.raises(ValueError, match=f"{why}rollout.start_timeout = 0.3 s"):
        learner(cpus=1000.0, rollout__start_timeout=0.3)
    assert "the run begins with one worker, and takes others as nodes come" in capsys.readouterr().out


def test_a_worker_with_other_facts_is_refused_by_their_name(entered):
    source, _, joined = entered
    for facts in ({"model": "another"}, {"more": 1}):
        other = Joined("a session", joined.node, joined.facts | facts)
        [name], [value] = facts.keys(), facts.values()
        with pytest.raises(ValueError, match=f"^{name}: learner .*, worker {value!r}; install"):
            source.driver._join("0", other)
    assert not source.driver._sessions


def test_a_worker_that_is_refused_without_words_is_refused_alone(entered, capsys, monkeypatch):
    source, _, _ = entered
    monkeypatch.setattr(ray, "kill", lambda actor: None)  # this one is no actor
    failed = ray.exceptions.RayTaskError("join", "", MemoryError())
    source.driver._end("0", source.driver._actors["0"], failed)
    assert source.driver._ended == {"0": "MemoryError"}
    assert "rollout worker 0 was refused: MemoryError" in capsys.readouterr().out


@pytest.mark.all
def test_a_worker_that_was_interrupted_while_it_was_built_is_built_again(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_module, "JOIN_SECONDS", 0.1)
    source, params = learner(build=functools.partial(ray_builds.interrupted, str(tmp_path / "flag")))
    source.publish(params, 0)
    samples, _ = next_batch(source, 1)
    assert_same({s.trajectory.id: s for s in samples}, in_order())


@pytest.mark.all
def test_a_run_whose_workers_are_all_refused_ends(learner):
    build = functools.partial(ray_builds.with_facts, {"model": "another"})
    source, params = learner(build=build)
    source.publish(params, 0)
    with pytest.raises(ValueError, match="no rollout worker is left: model: learner .*, worker 'another'"):
        next_batch(source, 1)


def test_a_lost_ray_ends_the_run_in_a_way_that_continues(entered, monkeypatch, capsys):
    source, params, joined = entered
    driver, served = source.driver, made()[0].serving_params(params, 0)
    driver._join("0", joined)
    monkeypatch.setattr(ray, "put", mock.Mock(side_effect=AssertionError))  # would end the process
    for name in driver._services:
        address = f"127.0.0.1:{hosts.free_port()}"
        monkeypatch.setattr(driver, "_services", driver._services | {name: address})
        for look in (lambda: driver.send(served, 0), lambda: next_batch(source, 1)):
            driver._looked_at = 0.0
            with pytest.raises(Interrupted, match=f"{name} at {address} does not answer"):
                look()
        assert "the same command continues" in capsys.readouterr().out
        monkeypatch.undo()


def test_a_store_without_room_ends_the_run_with_a_sentence(entered, monkeypatch):
    source, params, _ = entered
    for error in (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        monkeypatch.setattr(ray, "put", mock.Mock(side_effect=error("...")))
        with pytest.raises(Unwritable, match="no room for version 0 of the weights, .* MiB") as raised:
            source.publish(params, 0)
        assert cli.exit_code(raised.value) == 2
