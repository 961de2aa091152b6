"""The driver of workers on Ray without Ray: sessions, reports and ends by hand."""

import dataclasses
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

from jaxrl_tis.engine.drafter import Drafting
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import ray_cluster, record_check, ray_source as ray_module
from jaxrl_tis.rollouts.concurrent import Shared
from jaxrl_tis.rollouts.ray_source import Invalid, RayDriver, Session, Weights
from jaxrl_tis.rollouts.ray_worker import Joined


@pytest.fixture
def driver():
    """A driver with one worker that has not joined, and books that note their calls."""
    driver = object.__new__(RayDriver)
    books = mock.Mock()
    books.controller.decisions.return_value = []
    books.controller.sync_version = 3
    driver._shared = Shared(books)
    driver._books, driver._changed, driver._heartbeat = books, driver._shared.changed, mock.Mock()
    driver._rollout = types.SimpleNamespace(worker_timeout=9.0, start_timeout=9.0)
    driver._actors, driver._sessions, driver._ended = {"0": mock.Mock()}, {}, {}
    driver._newest, driver._base, driver._facts = None, None, {"model": "a"}
    driver._engine, driver._stored_bytes, driver._drafting = None, 1, None
    driver._reports = ray_module.Reports(driver._books, None, None)
    driver._is_closed, driver._has_joined = False, False
    driver._gone, driver._left, driver._evicted = Stats(), 0, 0
    driver._since = driver._said_at = driver._looked_at = time.monotonic()
    return driver


def test_bytes_of_two_versions():
    tree = {"w": jax.ShapeDtypeStruct((4, 2), np.float32), "v": jax.ShapeDtypeStruct((3,), np.int8)}
    assert ray_module._stored_bytes(tree) == 2 * (4 * 2 * 4 + 3)


def test_a_third_version_waits_for_who_reads_the_first(driver):
    session = driver._sessions["0"] = Session("0", None, "s", calls={"a": 0, "b": 1, "c": None})
    driver._newest = Weights(1, (), "")
    driver._heartbeat.side_effect = lambda: session.calls.pop("a")  # it is answered meanwhile
    driver._await_room()
    assert session.calls == {"b": 1, "c": None}
    driver._await_room()
    assert driver._heartbeat.call_count == 1


@pytest.mark.all
def test_a_drafter_is_sent_once_for_each_of_its_versions(driver):
    sent = []
    driver._put = lambda tree: sent.append(tree) or (f"reference {len(sent)}",)
    assert driver._drafter() is None
    driver._drafting = Drafting(None, ({"w": jnp.ones(2)}, 3))
    first = driver._drafter()
    driver._newest = Weights(4, (), "", None, first)
    assert driver._drafter() is first and (first[0], first[2]) == (3, ("reference 1",))
    driver._drafting.served = {"w": jnp.zeros(2)}, 5
    second = driver._drafter()
    assert (second[0], second[2], len(sent)) == (5, ("reference 2",), 2) and second[1] != first[1]


def test_a_worker_syncs_to_what_was_published_alone(driver):
    session, worker = Session("0", None, "s"), types.SimpleNamespace(version=1, is_syncing=True)
    driver._books.controller.workers = {"0": worker}
    for version in (0, 1, 4, True, "2"):
        with pytest.raises(Invalid, match="to which it was not to sync"):
            driver._reports._synced(session, version)
    driver._reports._synced(session, 2)
    driver._books.synced.assert_called_once_with("0", 2)
    worker.is_syncing = False
    with pytest.raises(Invalid):
        driver._reports._synced(session, 2)


def record():
    """Of two tokens; its arrays are read-only, as those of the object store."""
    zeros = np.zeros(2, np.float32)
    found = Trajectory(
        "a", np.array([1], np.int32), np.array([3, 4], np.int32), zeros, zeros, zeros,
        np.zeros(2, np.int32), "stop", 0, 0,
        "none", 1.0,
    )
    for x in vars(found).values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return found


def test_a_finished_record_is_taken_once_and_as_a_copy(driver, monkeypatch):
    monkeypatch.setattr(record_check, "problem", lambda *_: "")
    driver._books.keys, driver._books.controller.workers = {"a": (0, 0)}, {"0": mock.Mock(version=0)}
    session = Session("0", None, "s", given={"a": (Request("a", np.array([1]), 0, SamplingParams()), 0)})
    partial = dataclasses.replace(record(), stop_reason="abort")
    driver._reports._took(session, partial, is_partial=True)
    assert list(session.progress) == [(0, 0)] and list(session.given) == ["a"]
    driver._reports._took(session, record(), is_partial=False)
    name, [taken] = driver._books.receive.call_args.args
    assert name == "0" and taken.tokens.tolist() == [3, 4] and taken.tokens.flags.writeable
    assert not session.given and not session.progress
    with pytest.raises(Invalid, match="which it was not given"):
        driver._reports._took(session, record(), is_partial=False)


def test_every_fact_of_either_side_is_compared(driver, monkeypatch):
    monkeypatch.setattr(ray_cluster, "small_store", lambda node, size: "no room")
    for facts, name in (({"model": "b"}, "model"), ({}, "model"), ({"model": "a", "more": 1}, "more")):
        with pytest.raises(ValueError, match=f"^{name}: learner .*, worker "):
            driver._join("0", Joined("s", "node", facts))
    with pytest.raises(ValueError, match="^no room$"):
        driver._join("0", Joined("s", "node", {"model": "a"}))
    assert not driver._sessions and not driver._has_joined


def test_a_lost_worker_leaves_its_counts_and_its_sequences(driver):
    session = Session("0", None, "s", given={"a": None}, stats=Stats(tokens=5))
    driver._sessions["0"], driver._gone = session, Stats(tokens=2)
    driver._books.lost.return_value = 1
    driver._leave(session, "lost")
    assert driver.stats().tokens == 7
    driver._books.lost.assert_called_once_with("0", session.given, session.progress)
    left = lambda count: {"async/workers": 0, "async/left": count, "async/workers_evicted": 0}
    assert [driver.metrics(1.0, 0), driver.metrics(1.0, 0)] == [left(1), left(0)]


@pytest.mark.parametrize("error, why, is_alive, evicted", [
    (Invalid("it lies"), "evicted: it lies", True, 1),
    (ray.exceptions.GetTimeoutError(""), "silent for 9 s", True, 0),
    (ray.exceptions.ActorDiedError(), "its process is gone (ActorDiedError)", False, 0),
])
def test_why_a_worker_is_lost(driver, monkeypatch, error, why, is_alive, evicted):
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=error))
    assert driver._serve(Session("0", mock.Mock(), "s")) == (why, is_alive)
    assert driver._evicted == evicted


def test_without_workers_a_run_ends(driver):
    driver._since -= 10
    with pytest.raises(ValueError, match="has started within rollout.start_timeout = 9 s"):
        driver.check()
    driver._ended = {"0": "model: another"}
    for driver._has_joined, kind in ((False, ValueError), (True, RuntimeError)):
        with pytest.raises(kind, match="no rollout worker is left: model: another"):
            driver.check()
