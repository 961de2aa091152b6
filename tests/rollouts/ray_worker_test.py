"""A worker as a plain object, without Ray, with a scheduler made of arithmetic; and its weights."""

import dataclasses
import os
import threading
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_tis.engine.drafter import Drafting
from jaxrl_tis.models import quant
from jaxrl_tis.rollouts import ray_worker
from jaxrl_tis.rollouts.ray_worker import RolloutWorker, Sync, assemble, pieces
from jaxrl_tis.rollouts.sampler import Cancel, NewRequests, Preempt
from jaxrl_tis.runtime import fingerprint
from tests import tiny
from tests.rollouts.sampler_test import Scheduler, requests

# Weights


def mesh(*shape):
    return jax.make_mesh(shape, ("rows", "columns"), devices=jax.devices()[:int(np.prod(shape))])


def placed(tree, mesh, *specs):
    """The leaves of a tree with these specs, in order."""
    leaves, structure = jax.tree.flatten(tree)
    put = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(structure, put)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def tree():
    key = jax.random.key(0)
    matrix = jax.random.normal(key, (3, 16, 8), jnp.float32)
    return {
        "bfloat16": jax.random.normal(key, (8, 24)).astype(jnp.bfloat16), "one": jnp.float32(3.0),
        "quantized": quant.QuantArray(
            jax.random.randint(key, (16, 8), -128, 127, jnp.int8), jnp.ones((1, 8)), "int8"
        ),
        "stacked": matrix,
    }


LEARNERS = [(), (), (), (), ()], [
    ("rows", "columns"), (), ("columns",), (None, "rows"), (None, "columns", "rows"),
]
WORKERS = [(), (), (), (), ()], [
    (("rows", "columns"),), (), (None, "columns"), (None, "columns"), (None, "rows"),
]


@pytest.mark.all
@pytest.mark.parametrize("sent_as", LEARNERS)
@pytest.mark.parametrize("used_as", WORKERS)
def test_a_worker_assembles_what_its_mesh_needs(sent_as, used_as, monkeypatch):
    """From a learner of several processes, whose devices share what they have copies of."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    sent = placed(tree(), mesh(4, 2), *sent_as)
    like = abstract(placed(tree(), mesh(2, 4), *used_as))
    parts = pieces(sent)
    assert sum(x.nbytes for x in parts.values()) == sum(x.nbytes for x in jax.tree.leaves(sent))
    boxes = sorted(box for name, box in parts if name.endswith(".q"))
    assert boxes == [((2 * i, 2 * i + 2), (0, 8)) for i in range(8)]
    found = assemble(like, [parts])
    jax.tree.map(np.testing.assert_array_equal, found, tree())
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail("sharding"), found, like)
    fingerprint.check(found, fingerprint.hex(fingerprint.digest(sent)))


def halves(parts):
    """What two processes with the devices of one half each would return."""
    items = list(parts.items())
    return dict(items[::2]), dict(items[1::2])


def test_pieces_of_several_processes_are_one_tree():
    sent = placed(tree(), mesh(4, 2), *LEARNERS[1])
    first, second = halves(pieces(sent))
    assert first and second and not first.keys() & second.keys()
    like = abstract(placed(tree(), mesh(1, 2), *WORKERS[1]))
    jax.tree.map(np.testing.assert_array_equal, assemble(like, [second, first]), tree())


@pytest.mark.parametrize("missing", range(5))
def test_a_missing_piece_is_refused_by_the_name_of_its_weight(missing):
    parts = dict(pieces(placed(tree(), mesh(4, 2), *LEARNERS[1])))
    name = sorted({name for name, *_ in parts})[missing]
    del parts[next(key for key in parts if key[0] == name)]
    with pytest.raises(ValueError) as raised:
        assemble(abstract(tree()), [parts])
    assert f"weight {name} came without" in str(raised.value)


# Commands


@pytest.fixture
def worker(monkeypatch):
    """A worker that has joined, its session, and the schedulers that it has made."""
    made = []
    # As objects that are no references.
    monkeypatch.setattr(ray_worker.ray, "get", lambda refs: refs)
    node = types.SimpleNamespace(get_node_id=lambda: "a node")
    monkeypatch.setattr(ray_worker.ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(ray_worker, "POLL_SECONDS", 0.1)

    class Reporting(Scheduler):
        def step(self):
            return []

        extra = 0  # tokens of each sequence

        def records(self):
            extra = self.extra
            return [longer(self._trajectory(r), extra) for r in self.waiting]

    def scheduler(engine, params, version):
        made.append(Reporting(params, version))
        return made[-1]

    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jnp.zeros(2).sharding)}
    engine = mock.Mock(abstract_params=lambda: like)
    setup = types.SimpleNamespace(
        engine=engine, scheduler=scheduler, identity={"model": "a"}, adapter=None,
        drafting={engine: Drafting(engine, (None, 0))},
    )
    worker = RolloutWorker(lambda config: setup, tiny.config(watchdog__timeout=0.0).to_dict(), True)
    joined = worker.join()
    assert joined.node == "a node" and joined.facts["model"] == "a"
    return worker, joined.session, made


def load(worker, session, version, drafter=None):
    tree = {"w": jnp.full(2, version, jnp.float32)}
    sent = fingerprint.hex(fingerprint.digest(tree))
    of_drafter = None if drafter is None else (drafter, sent, [pieces(tree)])
    worker.sync(session, version, sent, [pieces(tree)], None, of_drafter)


def reported(worker, session, count, kinds=("done", "synced")):
    """The next `count` events of these kinds, as (kind, id or version)."""
    found = []
    for _ in range(100):
        events, _ = worker.report(session)
        found += [(e.kind, getattr(e.value, "id", e.value)) for e in events if e.kind in kinds]
        if len(found) >= count:
            break
    assert len(found) == count, found
    return found


def test_commands_wait_for_their_weights_in_order(worker):
    worker, session, made = worker
    worker.receive(session, Sync(), 3)
    worker.receive(session, NewRequests(requests("1", "2")))
    worker.receive(session, Preempt())
    assert worker.report(session)[0] == [] and not made
    load(worker, session, 3)
    assert reported(worker, session, 3) == [("synced", 3), ("done", "1"), ("done", "2")]
    assert made[0].weights[0][1] == 3


def test_commands_wait_for_no_newer_weights(worker):
    """Weights may be there before the command that uses them, and newer ones serve as well. Those of a
    drafter are used with the policy's."""
    worker, session, made = worker
    drafting = worker._drafting
    load(worker, session, 0, drafter=0)
    assert drafting.served[0] is None
    worker.receive(session, Sync(), 0)
    assert reported(worker, session, 1) == [("synced", 0)] and drafting.served[0] is not None
    worker.receive(session, NewRequests(requests("1")))
    worker.receive(session, Preempt(), 1)
    worker.receive(session, Sync(), 1)
    assert reported(worker, session, 0) == []  # "1" goes on until the weights are there
    load(worker, session, 2, drafter=1)
    assert reported(worker, session, 2) == [("done", "1"), ("synced", 2)]
    assert drafting.served[1] == 1 and drafting.served[0]["w"].tolist() == [2, 2]
    worker.receive(session, NewRequests(requests("2", "3")))
    worker.receive(session, Cancel(("2",)))
    worker.receive(session, Preempt(), 2)
    assert reported(worker, session, 1) == [("done", "3")]
    assert [version for _, version in made[0].weights] == [0, 2]


def test_other_sessions_are_not_served(worker):
    worker, session, made = worker
    worker.receive("another", Sync(), 0)
    load(worker, "another", 0)
    assert worker.report(session)[0] == [] and not made
    load(worker, session, 1)
    assert worker.report(session)[0] == [] and not made  # the command has not waited for these
    load(worker, "another", 2)
    worker.receive(session, Sync(), 2)
    assert worker.report(session)[0] == [] and not made  # those weights are not there
    with pytest.raises(RuntimeError, match="started again"):
        worker.report("another")


def test_damaged_weights_are_not_used(worker):
    worker, session, made = worker
    with pytest.raises(RuntimeError, match="fingerprint"):
        worker.sync(session, 0, "0" * 16, [pieces({"w": jnp.ones(2)})])
    with pytest.raises(ValueError, match="weight"):
        worker.sync(session, 0, "0" * 16, [{}])
    worker.receive(session, Sync(), 0)
    assert worker.report(session)[0] == [] and not made


def test_a_damaged_base_is_not_kept_and_a_whole_one_is(worker):
    worker, session, made = worker
    worker._adapter = types.SimpleNamespace(join=lambda base, factors: base | factors)
    worker._factors_like = {"factors": worker._like["w"]}
    sent = lambda name, value: {name: jnp.full(2, value, jnp.float32)}
    refs = lambda tree: [pieces(tree)]
    digest = lambda tree: fingerprint.hex(fingerprint.digest(tree))
    bases, factors = [sent("w", i) for i in range(2)], [sent("factors", i) for i in range(2)]
    of = lambda i: (digest(factors[i]), refs(factors[i]))
    with pytest.raises(RuntimeError, match="fingerprint"):
        worker.sync(session, 0, *of(0), (refs(bases[0]), "0" * 16))
    with pytest.raises(RuntimeError, match="fingerprint"):
        worker.sync(session, 0, "0" * 16, refs(factors[0]), (refs(bases[0]), digest(bases[0])))
    for version in range(2):
        base = refs(bases[version]), digest(bases[version])
        worker.sync(session, version, *of(version), base)  # the second base is not read
        worker.receive(session, Sync(), version)
        assert reported(worker, session, 1) == [("synced", version)]
    found = [params for params, _ in made[0].weights]
    assert [float(p["w"][0]) for p in found] == [0, 0]
    assert [float(p["factors"][0]) for p in found] == [0, 1]


def test_reports_of_unfinished_sequences_do_not_pile_up(worker, monkeypatch):
    monkeypatch.setattr(ray_worker, "PARTIAL_SECONDS", 0.0)
    worker, session, made = worker
    load(worker, session, 0)
    worker.receive(session, Sync(), 0)
    worker.receive(session, NewRequests(requests("1", "2")))
    assert reported(worker, session, 2, ["partial"]) == [("partial", "1"), ("partial", "2")]
    assert reported(worker, session, 0, ["partial"]) == []  # they have not grown
    made[0].extra = 3
    while not worker._events:
        time.sleep(0.01)
    made[0].extra = 6  # not reported before the others are
    time.sleep(0.1)
    assert [len(e.value.tokens) for e in worker.report(session)[0]] == [4, 4]
    assert [len(e.value.tokens) for e in worker.report(session)[0]] == [7, 7]


def longer(record, count):
    tokens = np.resize(record.tokens, len(record.tokens) + count)
    return dataclasses.replace(record, tokens=tokens, stop_reason="abort")


def test_what_ends_the_thread_is_reported(worker):
    worker, session, made = worker
    worker.receive(session, NewRequests(requests("1")))  # before any weights
    with pytest.raises(AttributeError):
        for _ in range(100):
            worker.report(session)


def test_an_engine_that_hangs_is_reported(worker):
    worker, session, made = worker
    worker._limit = 0.2
    for _ in range(5):
        assert worker.report(session)[0] == []  # it has nothing to do
    load(worker, session, 0)
    worker.receive(session, Sync(), 0)
    reported(worker, session, 1)
    for _ in range(5):
        assert worker.report(session)[0] == []
    made[0].step = lambda: time.sleep(1)
    worker.receive(session, NewRequests(requests("1")))
    with pytest.raises(RuntimeError, match="no progress for watchdog.timeout = 0.2 s"):
        for _ in range(5):
            worker.report(session)


def test_weights_that_do_not_arrive_are_reported(worker, monkeypatch):
    worker, session, _ = worker
    worker._limit, is_over = 0.2, threading.Event()
    monkeypatch.setattr(ray_worker.ray, "get", lambda refs: is_over.wait(60) and refs)
    loading = threading.Thread(target=load, args=(worker, session, 0))
    loading.start()
    with pytest.raises(RuntimeError, match="no progress for watchdog.timeout = 0.2 s"):
        for _ in range(20):
            worker.report(session)
    is_over.set()
    loading.join(60)
    assert worker.report(session)[0] == []


def test_a_worker_that_joins_again_starts_again(worker, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    worker[0].join()
    assert ended == [1]
