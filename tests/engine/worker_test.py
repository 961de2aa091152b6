"""The thread of the scheduler, with an engine made of arithmetic."""

import dataclasses
import threading
import time

import pytest

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Full, Scheduler
from jaxrl_tis.engine.worker import EngineThread
from tests.arithmetic import Engine, Overflowing, alone, assert_replays, request


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


# Pauses


class Gated(Engine):
    """Steps only when it is let; `begun` counts the steps that wait or have run."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.gate, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def generate(self, *args):
        self.begun.release()
        assert self.gate.acquire(timeout=60)
        return super().generate(*args)


@pytest.fixture
def gated():
    """(engine, its started worker), whose two tokens a step come when the gate is opened."""
    engine = Gated(steps=2)
    worker = EngineThread(Scheduler(engine, 0))
    worker.start()
    yield engine, worker
    engine.gate.release(99)
    worker.stop()


def begun(gated, id="a", max_tokens=6):
    """The ear of a request whose first step has begun."""
    (engine, worker), ear = gated, Ear()
    worker.submit([request(id, max_tokens=max_tokens)], ear, False).result(5)
    assert engine.begun.acquire(timeout=5)
    return ear


def test_a_kept_request_goes_on_where_it_was(gated):
    engine, worker = gated
    ear = begun(gated)
    pause = worker.pause("keep")
    engine.gate.release(99)
    pause.result(5)
    assert worker.is_paused and worker.pause("keep").result(5) is None  # a second pause
    assert worker.set_params(1).result(5) == 1 and worker.drop_keys(False).result(5) is False
    assert worker.drop_keys(True).result(5) is True and not ear.heard
    worker.resume().result(5)
    [t] = ear.wait()["a"]
    assert not worker.is_paused and t.version.tolist() == [0, 0, 1, 1, 1, 1]
    assert t.kv_version.tolist() == [0, 0, 1, 1, 1, 1] and t.segment.tolist() == [0, 0, 1, 1, 1, 1]
    assert_replays(t, request("a", max_tokens=6))


def test_a_pause_that_waits_lets_commands_through_and_holds_new_requests(gated):
    engine, worker = gated
    first = begun(gated, max_tokens=30)
    pause = worker.pause("wait")
    second, third = Ear(), Ear()
    held = [worker.submit([request(id, max_tokens=4)], ear, False)
            for id, ear in (("b", second), ("c", third))]
    changed = worker.set_params(7)
    engine.gate.release(2)
    assert changed.result(5) == 1 and not pause.done()
    worker.abort(["a", "c"])  # a runs, c has not begun
    engine.gate.release(99)
    pause.result(5)
    assert first.wait()["a"][0].stop_reason == "abort" and worker.is_paused
    for future in held:
        future.result(5)
    assert not second.heard
    worker.resume().result(5)
    [t] = third.wait()["c"]
    assert (t.stop_reason, len(t.tokens)) == ("abort", 0)
    [t] = second.wait()["b"]
    assert t.tokens.tolist() == alone(request("b", max_tokens=4), weights=7)[0]


@pytest.mark.parametrize("end", ["resume", "keep", "abort", "stop"])
def test_another_command_ends_a_pause_that_waits(gated, end):
    engine, worker = gated
    ear = begun(gated)
    pause, later = worker.pause("wait"), Ear()
    held = worker.submit([request("b", max_tokens=2)], later, False)
    if end == "stop":
        worker._is_stopped = True
        engine.gate.release()
        for future in (pause, held):
            with pytest.raises(RuntimeError, match="the server stops"):
                future.result(5)
        assert "the server stops" in str(ear.wait()["a"][0])
        return
    other = worker.resume() if end == "resume" else worker.pause(end)
    engine.gate.release(99)
    for future in (other, pause, held):
        future.result(5)
    assert worker.is_paused == (end != "resume")
    worker.resume().result(5)
    assert ear.wait()["a"][0].stop_reason == ("abort" if end == "abort" else "length")
    assert later.wait()["b"][0].tokens.tolist() == alone(request("b", max_tokens=2))[0]


def test_a_pause_with_nothing_to_pause(worker):
    for mode in ("keep", "abort", "wait", "wait"):
        worker.pause(mode).result(5)
        assert worker.is_paused
    ear = Ear()
    with pytest.raises(Full):  # nothing of it stays
        worker.submit([request(f"r{i}") for i in range(4)], Ear(), False).result(5)
    worker.submit([request("a", max_tokens=30)], ear, False).result(5)
    assert worker.drop_keys(False).result(5), "a request that waits has no page"
    worker.abort(["a"]).result(5)
    assert [t.stop_reason for t in ear.heard.get("a", ())] == ["abort"] and worker.pending == 0
    worker.resume().result(5)
    worker.resume().result(5)
    assert not worker.is_paused


def test_an_engine_that_fails_within_a_command_has_failed():
    """With async_scheduling an abort reads the tokens of the last call."""

    class Unread(Engine):
        def generate(self, *args):
            state, result = super().generate(*args)
            return state, dataclasses.replace(result, valid=None)

    scheduler, ear = Scheduler(Unread(), 0, async_scheduling=True), Ear()
    scheduler.add(request("b"))
    scheduler.step()
    worker = EngineThread(scheduler)
    paused = worker.pause("keep"), worker.submit([request("a")], ear, False)
    worker.start()
    for future in paused:
        future.result(5)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        worker.drop_keys(True).result(5)
    assert "the engine has failed" in str(ear.wait()["a"][0]) and worker.pending == 0
    for mode in ("abort", "wait", "keep"):
        with pytest.raises(RuntimeError, match="the engine has failed"):
            worker.pause(mode).result(5)
    worker.stop()
