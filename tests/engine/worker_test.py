"""The thread of the scheduler, with an engine made of arithmetic."""

import threading
import time

import pytest

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Full, Scheduler
from jaxrl_tis.engine.worker import EngineThread
from tests.arithmetic import Engine, Overflowing, alone, request


@pytest.fixture
def worker():
    worker = EngineThread(Scheduler(Engine(steps=2), 0, max_pending=3))
    worker.start()
    yield worker
    worker.stop()


class Ear:
    """Remembers what it hears of each request; `wait` for the end of so many."""

    def __init__(self, count=1):
        self.heard, self._ends = {}, threading.Semaphore(0)
        self._count = count

    def __call__(self, id, news):
        self.heard.setdefault(id, []).append(news)
        if isinstance(news, (Trajectory, Exception)):
            self._ends.release()

    def wait(self):
        assert all(self._ends.acquire(timeout=60) for _ in range(self._count))
        return self.heard


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_streamed_request_is_heard_after_every_step(worker, is_streamed):
    ear, r = Ear(), request("a", max_tokens=5)
    worker.submit([r], ear, is_streamed).result(5)
    *parts, end = ear.wait()["a"]
    tokens = alone(r)[0]
    assert [p.tolist() for p in parts] == ([tokens[:2], tokens[:4]] if is_streamed else [])
    assert end.tokens.tolist() == tokens and worker.pending == 0


def test_all_requests_are_added_or_none(worker):
    ear, taken = Ear(3), [request(f"r{i}", max_tokens=3) for i in range(3)]
    with pytest.raises(Full):
        worker.submit([*taken, request("d")], ear, False).result(5)
    with pytest.raises(ValueError, match="exceed the cache"):
        worker.submit([request("a"), request("b", max_tokens=99)], ear, False).result(5)
    worker.submit(taken, ear, False).result(5)
    assert {id: news[0].tokens.tolist() for id, news in ear.wait().items()} == {
        r.id: alone(r)[0] for r in taken
    }


def test_of_a_refused_request_no_sample_draws_a_token():
    scheduler = Scheduler(Engine(), 0, max_pending=3)
    worker = EngineThread(scheduler)
    refused = worker.submit([request(f"r{i}", max_tokens=3) for i in range(4)], Ear(), False)
    worker.start()
    with pytest.raises(Full):
        refused.result(5)
    worker.stop()  # after a step of what was left
    assert scheduler.stats.tokens == 0


def test_an_engine_that_failed_is_not_asked_again():
    class Broken(Engine):
        def generate(self, *args):
            raise MemoryError("no pages")

    worker, ear = EngineThread(Scheduler(Broken(), 0)), Ear()
    worker.start()
    worker.submit([request("a")], ear, False).result(5)
    assert "no pages" in str(ear.wait()["a"][0])
    with pytest.raises(RuntimeError, match="the engine has failed.*no pages"):
        worker.submit([request("b")], ear, False).result(5)
    worker.stop()


def test_a_request_that_overflows_fails_alone():
    worker, ear, r = EngineThread(Scheduler(Overflowing(), 0)), Ear(2), request("a", max_tokens=9)
    worker.start()
    worker.submit([request("bad", max_tokens=9), r], ear, False).result(5)
    heard = ear.wait()
    [error] = heard["bad"]
    assert isinstance(error, RuntimeError) and "token 2 of bad is not finite" in str(error)
    assert heard["a"][0].tokens.tolist() == alone(r)[0]
    assert worker.error is None and worker.pending == 0
    worker.stop()


def test_abort_ends_what_is_there_and_nothing_else(worker):
    ear = Ear()
    worker.abort(["unknown"])
    worker.submit([request("a", max_tokens=30)], ear, True).result(5)
    worker.abort(["unknown", "a", "a"])
    end = ear.wait()["a"][-1]
    assert end.stop_reason in ("abort", "length")
    assert end.tokens.tolist() == alone(request("a", max_tokens=30))[0][: len(end.tokens)]


def test_new_weights_draw_the_next_tokens(worker):
    assert worker.set_params(7).result(5) == worker.version == 1
    ear, r = Ear(), request("a", max_tokens=4)
    worker.submit([r], ear, False).result(5)
    (t,) = ear.wait()["a"]
    assert t.tokens.tolist() == alone(r, weights=7)[0] and t.version.tolist() == [1] * 4


def test_a_command_that_nobody_waits_for_any_more_is_not_run():
    worker = EngineThread(Scheduler(Engine(), 0))
    future = worker.set_params(7)
    assert future.cancel()
    worker.start()
    assert worker.set_params(8).result(5) == 1
    worker.stop()


def test_what_is_pending_at_the_end_fails():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def generate(self, *args):
            begun.set()
            assert go_on.wait(5)
            return super().generate(*args)

    worker, ear = EngineThread(Scheduler(Slow(), 0)), Ear()
    worker.start()
    worker.submit([request("a", max_tokens=30)], ear, False)
    assert begun.wait(5)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    while not worker._is_stopped:
        time.sleep(0.01)
    go_on.set()
    stopping.join(5)
    assert "the server stops" in str(ear.wait()["a"][0]) and worker.pending == 0
