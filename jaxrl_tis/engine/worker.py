"""The thread that owns the scheduler of a server: commands in, sampled tokens out."""

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.endings import NonFinite
from jaxrl_tis.engine.scheduler import Scheduler

# Called in the worker's thread with (request id, its tokens so far | its record when it has ended |
# the error that ended it or the worker).
Listener = Callable[[str, np.ndarray | Trajectory | Exception], None]


class Command(NamedTuple):
    """What the thread runs between two steps, once `is_due`."""

    run: Callable[[], Any]
    future: Future
    is_due: Callable[[], bool]


class EngineThread:
    """Steps a scheduler while requests are pending, and executes commands between the steps.

    Other threads call its methods. A method that returns a Future returns at once.

    Attributes:
      version: version of the weights; each change adds 1.
      error: the exception that ended the engine; every later command fails with it.
      is_paused: pending and new requests wait until `resume`.
    """

    def __init__(self, scheduler: Scheduler, version: int = 0):
        self.version = version
        self.error: Exception | None = None
        self._scheduler = scheduler
        self._is_stopped = False
        self.is_paused = False
        self._is_draining = False  # pending requests end before a pause, and new ones are held
        self._commands = queue.SimpleQueue[Command]()
        self._held: list[Command] = []  # taken out of the queue, in its order
        self._listeners: dict[str, Listener] = {}
        self._streamed: dict[str, int] = {}  # number of tokens sent to the listener
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def pending(self) -> int:
        """The number of requests with a listener."""
        return len(self._listeners)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the running step. Pending requests fail."""
        self._is_stopped = True
        self._call(lambda: None)  # wakes it
        self._thread.join()

    def submit(self, requests: list[Request], listener: Listener, is_streamed: bool) -> Future:
        """Adds all of the requests or none. The Future raises the exceptions of Scheduler.add. With
        is_streamed the listener gets the tokens after every step that sampled some."""

        def add():
            added = []
            try:
                for request in requests:
                    self._scheduler.add(request)
                    added.append(request.id)
            except Exception:
                self._end(added)
                raise
            self._listeners.update(dict.fromkeys(added, listener))
            if is_streamed:
                self._streamed.update(dict.fromkeys(added, 0))

        return self._call(add, lambda: not self._is_draining)

    def abort(self, request_ids: Collection[str]) -> Future:
        """Ends these requests before the next step, unless they have ended. They are answered with
        their tokens so far, also during a pause."""
        end = lambda: self._end(request_ids)
        ended = self._call(end)
        self._call(end, lambda: not self._is_draining)  # those that wait for the end of a drain
        return ended

    def set_params(self, params: Any) -> Future:
        """Replaces the serving parameters after the running step. The Future returns the new
        version."""

        def change():
            self._scheduler.set_params(params, self.version + 1)
            self.version += 1
            return self.version

        return self._call(change)

    def pause(self, mode: str) -> Future:
        """Steps no more until `resume`. "keep" leaves requests where they are, "abort" ends them with
        their tokens so far. "wait" lets them end first, and holds requests that come meanwhile.
        The Future ends once the pause has begun, or another command has ended the wait."""

        def pause():
            if mode == "abort":
                self._end(list(self._listeners))
            self._is_draining, self.is_paused = mode == "wait", mode != "wait"

        self._call(pause)
        return self._call(lambda: None, lambda: not self._is_draining)

    def resume(self) -> Future:
        """Steps again."""

        def resume():
            self._is_draining = self.is_paused = False

        return self._call(resume)

    def drop_keys(self, of_running: bool) -> Future:
        """Empties the prefix cache; with `of_running` sequences that have begun compute their keys
        anew. The Future returns whether it was done: without `of_running`, pages in use prevent it."""

        def drop():
            if of_running:
                self._answer(lambda: self._scheduler.pause("retract") + self._scheduler.pop_ended())
            elif any(pages.used for pages in self._scheduler.pages):
                return False
            self._scheduler.forget_pages()
            return True

        return self._call(drop)

    def _call(
        self, run: Callable[[], Any], is_due: Callable[[], bool] = lambda: True
    ) -> Future:
        future = Future()
        self._commands.put(Command(run, future, is_due))
        return future

    def _run(self) -> None:
        while not self._is_stopped:
            self._take(waits=not (self._is_running or any(c.is_due() for c in self._held)))
            self._execute_due()
            if self._is_running:
                self._answer(self._scheduler.step)
            if self._is_draining and not self._scheduler.pending:
                self._is_draining, self.is_paused = False, True
        self.error, self._is_draining = self.error or RuntimeError("the server stops"), False
        self._fail(self.error)
        self._take(waits=False)
        self._execute_due()
        self._scheduler.close()

    @property
    def _is_running(self) -> bool:
        return self._scheduler.pending > 0 and self.error is None and not self.is_paused

    def _take(self, waits: bool) -> None:
        """Empties the queue of commands. `waits`: for the first one."""
        if waits:
            self._held.append(self._commands.get())
        while not self._commands.empty():
            self._held.append(self._commands.get())

    def _execute_due(self) -> None:
        """Executes the commands that are due, in their order. One may make a later one wait."""
        held, self._held = self._held, []
        for command in held:
            if command.is_due():
                self._execute(command)
            else:
                self._held.append(command)

    def _execute(self, command: Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            if self.error:
                raise self.error
            result = command.run()
            if self.error:
                raise self.error
            command.future.set_result(result)
        except Exception as error:
            command.future.set_exception(error)

    def _end(self, request_ids: Collection[str]) -> None:
        """Ends requests and answers them."""

        def end():
            for id in request_ids:
                with contextlib.suppress(KeyError):
                    self._scheduler.abort(id)
            return self._scheduler.pop_ended()

        self._answer(end)

    def _answer(self, run: Callable[[], list[Trajectory]]) -> None:
        """Sends the records that `run` returns to their listeners, and new tokens. An exception
        fails the engine."""
        try:
            for trajectory in run():
                self._streamed.pop(trajectory.id, None)
                # Requests that were aborted because the scheduler was full have no listener.
                if listener := self._listeners.pop(trajectory.id, None):
                    listener(trajectory.id, trajectory)
            for id, tokens in self._scheduler.drawn(self._streamed).items():
                if len(tokens) > self._streamed[id]:
                    self._streamed[id] = len(tokens)
                    self._listeners[id](id, tokens)
        except NonFinite as error:
            logging.error("%s", error)
            for id in error.ids:
                self._streamed.pop(id, None)
                if listener := self._listeners.pop(id, None):
                    listener(id, RuntimeError(str(error)))
            self._answer(self._scheduler.pop_ended)  # what ended beside them
        except Exception as error:
            logging.exception("The engine has failed.")
            self.error = RuntimeError(f"the engine has failed: {error!r}")
            self._is_draining = False
            self._fail(self.error)

    def _fail(self, error: Exception) -> None:
        for id, listener in self._listeners.items():
            listener(id, error)
        self._listeners, self._streamed = {}, {}
