"""The source of samplers that run ahead: the order of its calls, and what is done under the lock."""

import contextlib
import threading
import types
from unittest import mock

import numpy as np
import pytest

from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts.concurrent import ConcurrentSource, Shared


def made():
    """A source whose driver and books note their calls in one list, with whether the lock was free."""
    calls, found = mock.Mock(), []
    shared = Shared(calls.books)

    def is_free():
        tried = []

        def lock():
            tried.append(shared.changed.acquire(blocking=False))
            if tried[0]:
                shared.changed.release()

        thread = threading.Thread(target=lock)
        thread.start()
        thread.join()
        return tried[0]

    def noting(name, result=None):
        return mock.Mock(side_effect=lambda *_: found.append((name, is_free())) or result)

    for name in ("sync", "decide", "pause"):
        setattr(calls.driver, name, noting(f"driver.{name}"))
    for name in ("published", "score", "add_rewards", "get_state"):
        setattr(calls.books, name, noting(f"books.{name}"))
    calls.books.claim.return_value = calls.books.take.return_value = None
    parts = types.SimpleNamespace(
        serving_params=lambda params, version: params, heartbeat=lambda: None,
        timer=lambda name: contextlib.nullcontext(),
    )
    source = ConcurrentSource(parts, shared, calls.driver)
    return source, calls, found


def test_samplers_are_told_before_the_books_decide():
    source, _, found = made()
    source.sync("weights", 3)
    assert found == [("driver.sync", False), ("books.published", False), ("driver.decide", False)]
    found.clear()
    source.sync(None, 4)  # no sync is due
    assert found == [("books.published", False), ("driver.decide", False)]


def test_rewards_hold_up_no_sampler():
    source, calls, found = made()
    calls.books.claim.return_value = types.SimpleNamespace(keys=["a"])
    assert source.poll() is None
    assert found == [("books.score", True), ("books.add_rewards", False), ("driver.decide", False)]


def test_the_error_of_a_thread_ends_the_wait():
    source, calls, _ = made()
    source._shared.error = FloatingPointError("of a thread")
    with pytest.raises(FloatingPointError, match="of a thread"):
        source.poll()
    calls.books.take.assert_not_called()


def test_a_sync_counts_for_one_batch():
    source, calls, _ = made()
    calls.books.metrics.return_value = calls.driver.metrics.return_value = {}
    calls.driver.stats.return_value = Stats()
    source.send({"w": np.zeros(3, np.float32)}, 1)
    assert source.metrics()["sync/bytes"] == 12
    values = source.metrics()
    assert values == {"sync/bytes": 0, "sync/seconds": 0.0}


def test_a_state_is_read_after_the_pause():
    source, _, found = made()
    source.get_state(3)
    assert found == [("driver.pause", True), ("books.get_state", False)]
