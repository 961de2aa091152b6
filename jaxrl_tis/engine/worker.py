"""The thread that owns the scheduler of a server: commands in, sampled tokens out."""

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
from absl import logging

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.endings import NonFinite
from jaxrl_tis.engine.scheduler import Scheduler

# Called in the worker's thread with (request id, its tokens so far | its record when it has ended |
# the error that ended it or the worker).
Listener = Callable[[str, np.ndarray | Trajectory | Exception], None]


class EngineThread:
    """Steps a scheduler while requests are pending, and executes commands between the steps.

    Other threads call its methods. A method that returns a Future returns at once.

    Attributes:
      version: version of the weights; each change adds 1.
      error: the exception that ended the engine; every later command fails with it.
      is_paused: pending requests wait until `resume`.
    """

    def __init__(self, scheduler: Scheduler, version: int = 0):
        self.version = version
        self.error: Exception | None = None
        self._scheduler = scheduler
        self._is_stopped = False
        self.is_paused = False
        self._commands = queue.SimpleQueue[tuple[Callable[[], Any], Future]]()
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
                for id in added:
                    self._scheduler.abort(id)
                raise
            self._listeners.update(dict.fromkeys(added, listener))
            if is_streamed:
                self._streamed.update(dict.fromkeys(added, 0))

        return self._call(add)

    def abort(self, request_ids: Collection[str]) -> None:
        """Aborts these requests before the next step, unless they have ended."""

        def abort():
            for id in request_ids:
                with contextlib.suppress(KeyError):
                    self._scheduler.abort(id)

        self._call(abort)

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
        their tokens so far, "wait" lets them end first."""

        def pause():
            if mode == "abort":
                for id in list(self._listeners):
                    self._scheduler.abort(id)
            while mode != "keep" and self._scheduler.pending and self.error is None:
                self._step()
            self.is_paused = True

        return self._call(pause)

    def resume(self) -> Future:
        """Steps again."""
        return self._call(lambda: setattr(self, "is_paused", False))

    def drop_keys(self, of_running: bool) -> Future:
        """Forgets the pages of prompts and sequences that ended; with `of_running` running sequences
        compute theirs anew. The Future returns whether no key is left: without it, running sequences
        keep theirs."""

        def drop():
            if of_running:
                self._scheduler.pause("retract")
            elif self._scheduler.pending:
                return False
            self._scheduler.forget_pages()
            return True

        return self._call(drop)

    def _call(self, command: Callable[[], Any]) -> Future:
        future = Future()
        self._commands.put((command, future))
        return future

    def _run(self) -> None:
        while not self._is_stopped:
            for command, future in self._next_commands():
                self._execute(command, future)
            if self._is_running:
                self._step()
        self._fail(RuntimeError("the server stops"))
        self._scheduler.close()

    @property
    def _is_running(self) -> bool:
        return self._scheduler.pending > 0 and self.error is None and not self.is_paused

    def _next_commands(self) -> list[tuple[Callable[[], Any], Future]]:
        """Returns the queued commands; waits for one if no request is pending."""
        commands = [] if self._is_running else [self._commands.get()]
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def _execute(self, command: Callable[[], Any], future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self.error:
                raise self.error
            future.set_result(command())
        except Exception as error:
            future.set_exception(error)

    def _step(self) -> None:
        try:
            for trajectory in self._scheduler.step():
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
        except Exception as error:
            logging.exception("The engine has failed.")
            self.error = RuntimeError(f"the engine has failed: {error!r}")
            self._fail(self.error)

    def _fail(self, error: Exception) -> None:
        for id, listener in self._listeners.items():
            listener(id, error)
        self._listeners, self._streamed = {}, {}
