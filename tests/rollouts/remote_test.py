"""Workers over sockets: good ones draw what a synchronous run draws, and bad ones cost time alone."""

import contextlib
import dataclasses
import faulthandler
import functools
import json
import socket
import struct
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import (
    messages, remote, sampler, schedules, tcp, transport, verify, wire,
)
from jaxrl_tis.rollouts import worker as worker_module
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.remote import remote_source
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from jaxrl_tis.rollouts.worker import LearnerLost, RolloutWorker
from tests import tiny
from tests.rollouts.virtual_test import assert_same, drawn, in_order, made
from tests.rollouts.synchronous_test import FakeRewards, Timer

SECONDS = 60  # after which what hangs shows its stacks and ends the tests
FACTS = {"model": "tiny", "tokenizer": "char"}


@pytest.fixture(autouse=True)
def _nothing_hangs():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def learner():
    with contextlib.ExitStack() as stack:
        def make(schedule="areal(staleness=1)", timeout=20.0, state=None, **overrides):
            setup, params = made()
            config = tiny.config(
                rollout__schedule=schedule, rollout__max_new_tokens=6, rollout__driver="processes",
                rollout__worker_timeout=timeout, **overrides,
            )
            prompter = Prompter(setup.tokenizer, config.task)
            reward = FakeRewards(lambda text, record: float(len(text)))
            groups = Groups(config, prompter, reward, with_greedy=False)
            batches = Batches(
                config.task.name, config.task.params, batch_size=config.rollout.prompts,
                seed=config.seed,
            )
            parts = SourceParts(
                config, schedules.parse(schedule), None, groups, batches, Timer(),
                setup.serving_params
            )
            source = remote_source(parts, setup.engine, FACTS)
            stack.callback(source.close, is_over=True)
            return source, params
        yield make


class Slow:
    """A scheduler that takes its time."""

    def __init__(self, scheduler, seconds):
        self._scheduler, self._seconds = scheduler, seconds

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def step(self):
        time.sleep(self._seconds)
        return self._scheduler.step()


@contextlib.contextmanager
def working(source, name="good", seconds=0.0, facts=FACTS):
    """A worker in a thread; yields what its run ended with, once it has."""
    setup, _ = made()
    start = lambda params, version: Slow(setup.scheduler(setup.engine, params, version), seconds)
    worker = RolloutWorker(
        (source.driver.host, source.driver.port), remote.NO_TOKEN, facts, name, setup.engine.slots,
        setup.engine.abstract_params(), start, partial_seconds=0.02,
    )
    ended = []

    def run():
        try:
            ended.append(worker.run())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        yield ended
    finally:
        source.close(is_over=True)
        thread.join()


class Fake:
    """A worker that says what a test wants it to say."""

    def __init__(self, source, name="bad"):
        self.connection = socket.create_connection((source.driver.host, source.driver.port))
        self.peer = tcp.Peer(self.connection, 20.0, 20.0)
        tcp.introduce(self.peer, remote.NO_TOKEN, tcp.all_facts(FACTS))
        self.peer.tell(name=name, slots=8)
        self.where = self.peer.hear("port", "path")

    def say(self, *events):
        self.peer.send(messages.pack_report(list(events), Stats()))
        return messages.read_reply(self.peer.receive(1 << 28))

    def begun(self):
        """Takes the first weights, and returns the requests that it is given."""
        while not (commands := self.say().commands):
            time.sleep(0.01)
        assert commands == (messages.SyncTo(0),)
        commands = self.say(messages.Synced(0)).commands
        requests = [request for command in commands for request in command.requests]
        assert len(requests) == 8
        return requests


@functools.cache
def records():
    """What a right worker would return, by request."""
    return {id: s.trajectory for id, s in in_order().items()}


def cut(record, count):
    """The first tokens of a record, as they are while it goes on."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    per_token = {
        name: x[:count] for name, x in fields.items()
        if isinstance(x, np.ndarray) and name != "prompt" and len(x) == len(record.tokens)
    }
    return dataclasses.replace(record, **per_token, stop_reason="abort")


@pytest.mark.parametrize("schedule", ["one_step", "areal(staleness=2)", "in_flight(staleness=2)"])
@pytest.mark.parametrize("where", ["tcp", "folder"])
def test_with_unchanged_weights_workers_draw_what_a_synchronous_run_draws(
    schedule, where, learner, tmp_path
):
    source, params = learner(schedule, rollout__transport=where.replace("folder", str(tmp_path)))
    with working(source, "first") as ended, working(source, "second", 0.01):
        found = drawn(source, params, 1, 5)
    assert_same(found, in_order())
    assert ended == [None]
    versions = {int(v) for s in found.values() for v in s.trajectory.version}
    assert versions > {0} and max(versions) <= 4


def test_weights_that_are_not_the_learners_draw_nothing(learner, monkeypatch):
    fetch = tcp.WeightClient.fetch

    def damaged(client, version, like):
        tree = fetch(client, version, like)
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [*leaves[:-1], -leaves[-1]])

    monkeypatch.setattr(tcp.WeightClient, "fetch", damaged)
    source, params = learner()
    source.publish(params, 0)
    with working(source) as ended:
        while not ended:
            time.sleep(0.01)
    assert "the weight sync damaged them" in str(ended[0])
    assert source.metrics()["rollout/occupancy"] == 0


def test_what_a_dead_worker_drew_is_gone_on_with(learner):
    """Its records up to the last that it said are in those of the worker after it, bit by bit."""
    source, params = learner("in_flight(staleness=1)")
    source.publish(params, 0)
    fake = Fake(source)
    requests = fake.begun()
    long = [r for r in requests if len(records()[r.id].tokens) > 2]
    said = {r.id: cut(records()[r.id], 2) for r in long}
    fake.say(*map(messages.Partial, said.values()))
    fake.connection.close()
    with working(source):
        samples, values = next_batch(source, 1)
    assert values["async/resumed"] == len(said) > 0 and values["async/left"] == 1
    assert values["async/resumed_tokens"] == 2 * len(said)
    assert_same({s.trajectory.id: s for s in samples}, in_order())
    resumed = [s.trajectory for s in samples if s.trajectory.id in said]
    assert resumed and all(t.segment.tolist()[:3] == [0, 0, 1] for t in resumed)


LIES = {
    "prompt": lambda t: dataclasses.replace(t, prompt=t.prompt[::-1].copy()),
    "request": lambda t: dataclasses.replace(t, seed=t.seed + 1),
    "version": lambda t: dataclasses.replace(t, version=t.version + 1),
    "tokens": lambda t: dataclasses.replace(t, tokens=t.tokens + 10_000),
    "stop_reason": lambda t: dataclasses.replace(
        t, stop_reason={"length": "stop", "stop": "length"}[t.stop_reason]),
    "quant_id": lambda t: dataclasses.replace(t, quant_id="int3"),
    "logp_behav": lambda t: dataclasses.replace(t, logp_behav=t.logp_behav * np.float32("nan")),
    "kv_version": lambda t: dataclasses.replace(t, kv_version=t.kv_version + 1),
    "top_ids": lambda t: dataclasses.replace(t, top_ids=np.zeros((len(t.tokens), 3), np.int32)),
}


@pytest.mark.parametrize("field", LIES)
def test_a_record_that_cannot_be_of_its_request(field):
    setup, _ = made()
    record = next(t for t in records().values() if len(t.tokens) > 2)
    request = next(r for r in _requests() if r.id == record.id)
    right = dataclasses.replace(record, version=record.version * 0, kv_version=record.kv_version * 0)
    assert verify.problem(right, request, setup.engine, 0, 0) is None
    why = verify.problem(LIES[field](right), request, setup.engine, 0, 0)
    assert field in why.removeprefix(f"{request.id}: wrong ").split(", ")


def test_a_record_has_to_go_on_with_what_there_was():
    setup, _ = made()
    record = next(t for t in records().values() if len(t.tokens) > 2)
    right = dataclasses.replace(record, version=record.version * 0, kv_version=record.kv_version * 0)
    request = next(r for r in _requests() if r.id == record.id)
    begun = dataclasses.replace(request, partial=cut(right, 2))
    assert verify.problem(right, begun, setup.engine, 0, 0) is None
    other = dataclasses.replace(right, entropy=right.entropy + 1)
    assert verify.problem(other, begun, setup.engine, 0, 0).endswith("wrong beginning")


@functools.cache
def _requests():
    """The requests of the first batches of a synchronous run."""
    setup, _ = made()
    config = tiny.config(rollout__max_new_tokens=6)
    prompter = Prompter(setup.tokenizer, config.task)
    groups = Groups(config, prompter, FakeRewards(lambda *_: 0.0), with_greedy=False)
    batches = Batches(
        config.task.name, config.task.params, batch_size=config.rollout.prompts, seed=config.seed
    )
    return [
        request for step in range(1, 4) for i, record in enumerate(next(batches))
        for request in groups.requests(record, f"{step}/0/{i}")
    ]


def _raw(data):
    return lambda fake, requests: fake.peer.send(data)


BAD = {
    "a lie": lambda f, r: f.peer.send(messages.pack_report(
        [messages.Done(LIES["prompt"](records()[r[0].id]))], Stats())),
    "a record that it was not given": lambda f, r: f.peer.send(messages.pack_report(
        [messages.Done(dataclasses.replace(records()[r[0].id], id="another"))], Stats())),
    "the same twice": lambda f, r: f.peer.send(messages.pack_report(
        [messages.Done(records()[r[0].id])] * 2, Stats())),
    "a part that has ended": lambda f, r: f.peer.send(messages.pack_report(
        [messages.Partial(records()[r[0].id])], Stats())),
    "weights that there are not": lambda f, r: f.peer.send(
        messages.pack_report([messages.Synced(7)], Stats())),
    "counts beyond all numbers": lambda f, r: f.peer.send(
        messages.pack_report([], Stats(busy=10**400, slot_steps=1))),
    "no report": _raw(b"GET / HTTP/1.1\r\n\r\n"),
    "a huge frame": lambda f, r: f.connection.sendall(struct.pack("<Q32s", 1 << 50, b"")),
    "half a frame": lambda f, r: (f.connection.sendall(b"\1\2\3"), f.connection.close()),
    "silence": lambda f, r: None,
    "its end": lambda f, r: f.connection.close(),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_worker_costs_time_alone(what, learner):
    records()  # or making them is the silence
    source, params = learner(timeout=3.0)
    source.publish(params, 0)
    fake = Fake(source)
    BAD[what](fake, fake.begun())
    left = evicted = 0
    with working(source):
        for step in (1, 2, 3):  # what the bad one was given is in the second batch at the latest
            samples, values = next_batch(source, step)
            assert_same({s.trajectory.id: s for s in samples}, in_order())
            left, evicted = left + values["async/left"], evicted + values["async/workers_evicted"]
            source.publish(params, step)
    assert left == 1 and values["async/workers"] == 1
    assert evicted == (what not in ("half a frame", "silence", "its end"))
    fake.connection.close()


def test_who_is_refused(learner):
    source, params = learner()
    with working(source, facts=FACTS | {"tokenizer": "words"}) as ended:
        while not ended:
            time.sleep(0.01)
    assert isinstance(ended[0], tcp.Refused)
    assert 'tokenizer: learner "char", worker "words"' in str(ended[0])
    with pytest.raises(LearnerLost):  # nobody is there any more
        _run(source)


def _run(source):
    address = source.driver.host, source.driver.port
    RolloutWorker(address, remote.NO_TOKEN, FACTS, "late", 8, None, None).run()


def test_an_address_of_ipv6(learner):
    source, params = learner(rollout__listen="[::1]:0")
    source.publish(params, 0)
    assert len(Fake(source).begun()) == 8


def test_a_name_is_one_worker(learner):
    source, _ = learner()
    first = Fake(source, "same")
    with pytest.raises(transport.Unavailable, match="'same' is there already"):
        Fake(source, "same")
    first.connection.close()


def test_a_worker_that_comes_back_joins_anew(learner):
    source, params = learner()
    source.publish(params, 0)
    first = Fake(source, "same")
    first.begun()
    first.connection.close()
    while source.driver._sessions:
        time.sleep(0.01)
    with working(source, "same"):
        samples, _ = next_batch(source, 1)
    assert_same({s.trajectory.id: s for s in samples}, in_order())


def test_the_learner_waits_for_workers_and_can_be_interrupted(learner, monkeypatch, capsys):
    monkeypatch.setattr(remote, "TELL_SECONDS", 0.0)
    source, params = learner()
    source._heartbeat = lambda: (_ for _ in ()).throw(InterruptedError)
    source.publish(params, 0)
    with pytest.raises(InterruptedError):
        next_batch(source, 1)
    assert "no rollout worker is there; they join at 127.0.0.1:" in capsys.readouterr().out


def test_a_learner_that_is_interrupted_is_to_be_looked_for_again(learner):
    source, params = learner()
    with working(source) as ended:
        source.publish(params, 0)
        next_batch(source, 1)
        source.close(is_over=False)
    assert isinstance(ended[0], LearnerLost)


@pytest.mark.parametrize("schedule", ["in_flight(staleness=2)", "dora(staleness=2)"])
def test_a_learner_goes_on_from_its_state_while_workers_draw(schedule, learner):
    source, params = learner(schedule)
    with working(source, seconds=0.01):
        before = drawn(source, params, 1, 3)
        state = json.loads(json.dumps(source.get_state(3)))
        after = drawn(source, params, 4, 5)
    resumed, _ = learner(schedule)
    resumed.set_state(state)
    with working(resumed):
        again = drawn(resumed, params, 4, 5)
    for found in (after, again):
        assert not before.keys() & found.keys()
        assert_same(found, in_order())


def test_an_address_that_others_reach_needs_a_secret(monkeypatch):
    monkeypatch.delenv(remote.TOKEN, raising=False)
    assert remote.read_token("127.0.0.1") == remote.NO_TOKEN
    with pytest.raises(ValueError, match="reached from other machines: set JAXRL_TIS_TOKEN"):
        remote.read_token("0.0.0.0")
    monkeypatch.setenv(remote.TOKEN, "short")
    with pytest.raises(ValueError, match="5 characters"):
        remote.read_token("127.0.0.1")


def test_what_the_learner_cannot_use_is_said_before_anything_is_drawn(
    learner, tmp_path, monkeypatch
):
    source, _ = learner()
    monkeypatch.setenv(remote.TOKEN, "0123456789abcdef")
    for where, why in (
        (f"127.0.0.1:{source.driver.port}", "Address already in use; choose another port, or 0"),
        ("127.1.2.3.4:0", "; give an address of this machine"),
    ):
        with pytest.raises(ValueError, match=f"cannot listen at rollout.listen = '{where}': .*{why}"):
            learner(rollout__listen=where)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to rollout.transport = .*: Not a directory"):
        learner(rollout__transport=str(tmp_path / "file" / "weights"))


def test_a_folder_of_weights_is_named_wherever_the_worker_is(learner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, _ = learner(rollout__transport="weights")
    assert Fake(source).where["path"].startswith(f"{tmp_path}/weights/")


@pytest.mark.parametrize("is_over", [True, False])
def test_a_folder_of_weights_ends_with_the_learner(is_over, learner, tmp_path):
    source, params = learner(rollout__transport=str(tmp_path))
    source.publish(params, 0)
    assert list(tmp_path.glob("*/00000000/manifest.json"))
    source.close(is_over)
    assert not list(tmp_path.iterdir())


def test_an_order_that_is_lost_ends_the_run(learner):
    """What a worker drew that is gone goes to another, for which it cannot be written down."""
    source, params = learner("periodic")
    until = time.monotonic() + 20

    def heartbeat():
        assert time.monotonic() < until, "the run waits for ever"

    source._heartbeat = heartbeat
    source.publish(params, 0)
    first, second = Fake(source, "first"), Fake(source, "second")
    first.begun()
    second.say(messages.Done(records()[second.begun()[0].id]))  # it has room again
    too_long = ValueError("example 7 is too long")
    source.books.command = lambda decision: (_ for _ in ()).throw(too_long)
    first.connection.close()
    with pytest.raises(ValueError, match="example 7"):
        next_batch(source, 1)


def test_facts_without_names_are_no_facts(learner, capfd):
    source, _ = learner()
    with socket.create_connection((source.driver.host, source.driver.port)) as connection:
        peer = tcp.Peer(connection, 20.0, 20.0)
        with pytest.raises(ConnectionError):
            tcp.introduce(peer, remote.NO_TOKEN, ["model"])
    assert "Traceback" not in capfd.readouterr().err


def test_messages_are_what_was_said():
    record, request = next(iter(records().values())), _requests()[0]
    events = [messages.Synced(3), messages.Done(record), messages.Partial(cut(record, 1))]
    found, stats = messages.read_report(messages.pack_report(events, Stats(tokens=7)))
    assert stats == Stats(tokens=7) and found[0] == events[0]
    for ours, theirs in zip(events[1:], found[1:], strict=True):
        assert type(ours) is type(theirs)
        ours, theirs = map(wire.trajectory_message, (ours.trajectory, theirs.trajectory))
        assert ours == theirs
    commands = (
        messages.SyncTo(2), sampler.Preempt(), sampler.Cancel(("a", "b")),
        sampler.NewRequests((request,)),
    )
    sent = messages.Reply(commands, 2, "0123456789abcdef", False)
    reply = messages.read_reply(messages.pack_reply(sent))
    assert reply.commands[:3] == commands[:3] and (reply.sync_version, reply.is_over) == (2, False)
    assert reply.fingerprint == "0123456789abcdef"
    assert wire.request_message(reply.commands[3].requests[0]) == wire.request_message(request)
    for data in (b"", wire.pack({"events": [["done", 0]], "stats": {}}, {}),
                 wire.pack({"events": [["synced", "x"]], "stats": {}}, {}),
                 wire.pack({"events": [["synced", 0.5]], "stats": {}}, {}),
                 wire.pack({"events": [["synced", 1 << 70]], "stats": {}}, {}),
                 wire.pack({"events": [], "stats": {"tokens": -1}}, {}),
                 wire.pack({"events": [], "stats": {"seconds": float("nan")}}, {})):
        with pytest.raises(wire.Damaged):
            messages.read_report(data)


def test_a_message_is_as_long_as_the_other_end_takes():
    """Records of 10 MiB: six of them and what they are named by are 64 MiB, and one alone is sent
    however long it is."""
    record, request = next(iter(records().values())), _requests()[0]
    long = dataclasses.replace(record, logits=np.zeros((1, 10 << 18), np.float32))
    events = [messages.Synced(0)] + [messages.Done(long)] * 20
    sent, rest = messages.fitting(events)
    assert (len(sent), len(rest)) == (7, 14) and sent + rest == events
    longer = dataclasses.replace(record, logits=np.zeros((1, 30 << 20), np.float32))
    assert len(messages.fitting([messages.Done(longer)] * 2)[0]) == 1
    begun = sampler.NewRequests((dataclasses.replace(request, partial=long),) * 4)
    assert len(messages.fitting([begun] * 3)[0]) == 1
    many = [sampler.NewRequests((request,) * 16)] * 4096
    while many:
        commands, many = messages.fitting(many)
        reply = messages.Reply(tuple(commands), 0, "", False)
        assert len(messages.pack_reply(reply)) < messages.MESSAGE_BYTES
    assert messages.fitting([]) == ([], [])


def test_what_there_is_does_not_pile_up_while_the_learner_is_slow():
    record = next(t for t in records().values() if len(t.tokens) > 2)
    worker = RolloutWorker(
        ("", 0), remote.NO_TOKEN, FACTS, "slow", 8, None, None, partial_seconds=0.0
    )
    worker._sampler = type("Fake", (), {"stats": Stats()})
    for count in (1, 2, 3):
        worker._sampler.records = lambda: [cut(record, count)]
        worker._say_partials()
    assert [len(event.trajectory.tokens) for event in worker._events] == [1]
    worker._events.clear()
    worker._say_partials()
    assert [len(event.trajectory.tokens) for event in worker._events] == [3]


def test_orders_wait_for_their_weights_and_for_no_newer_ones():
    """Sequences are preempted once the weights for which they are interrupted are there, so that
    old ones sample meanwhile, whatever is published by then: a learner may publish faster than its
    weights come."""
    worker = RolloutWorker(("", 0), remote.NO_TOKEN, FACTS, "slow", 8, None, None)

    def after(*commands, sync_version, has):
        worker._fetched = None if has is None else sampler.SetParams({}, has)
        worker._take(messages.Reply(commands, sync_version, "", False))
        passed, worker._inbox = worker._inbox, []
        return [getattr(command, "version", type(command).__name__) for command in passed]

    begin = sampler.NewRequests(())
    assert after(messages.SyncTo(0), begin, sync_version=0, has=None) == []
    assert after(sync_version=0, has=0) == [0, "NewRequests"]
    assert after(begin, sync_version=1, has=0) == ["NewRequests"]
    assert after(sampler.Preempt(), sync_version=3, has=0) == []
    assert after(begin, sync_version=4, has=2) == []
    assert after(sync_version=5, has=3) == ["Preempt", "NewRequests"]
    assert after(messages.SyncTo(5), sync_version=5, has=3) == []
    assert after(sync_version=7, has=6) == [6]


def test_weights_that_cannot_be_read_are_said(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(worker_module, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "RETRY_SECONDS", 0.01)
    worker = RolloutWorker(("", 0), remote.NO_TOKEN, FACTS, "far", 8, {}, None)
    worker._sync_version = 0
    thread = threading.Thread(target=worker._fetch, args=(transport.Directory(str(tmp_path)),))
    thread.start()
    time.sleep(0.2)
    worker._end()
    thread.join()
    assert f"no weights of version 0 yet: version 0 is not in {tmp_path}" in capfd.readouterr().out
