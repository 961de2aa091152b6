"""Confined functions in threads of this process: what they compute needs no process of its own."""

import contextlib
import json
import queue
import threading
import time
from unittest import mock

from jaxrl_tis.data import child, confined


class Child(child.Child):
    """The child of a `confined.Confined` as a thread. One that is ended finishes the call that it is in."""

    def __init__(self, serve: str, *, what: str, **_):
        assert serve == "jaxrl_tis.data.confined:serve"
        self._what = what
        self._messages, self._results = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        setup = json.loads(self._messages.get())
        loaded = []

        def make():
            loaded.append(confined.function(setup["make"])(setup["argument"]))
            return getattr(loaded[0], "traits", None)

        self._results.put(confined.result_line(make))
        while (message := self._messages.get()) is not None:
            for arguments in json.loads(message):
                self._results.put(confined.result_line(lambda: loaded[0](*arguments)))  # noqa: B023

    def write(self, message, deadline=None) -> None:
        self._messages.put(json.dumps(message))

    def lines(self, deadline=None) -> list:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return [json.loads(self._results.get(timeout=left))]
        except queue.Empty:
            raise TimeoutError(f"{self._what} exceeded its time limit") from None

    def kill(self) -> None:
        self._messages.put(None)

    def end(self) -> None:
        self.kill()


@contextlib.contextmanager
def children():
    """Rewards, templates and environments that start in here are called in threads."""
    with mock.patch.object(confined, "Child", Child):
        yield
