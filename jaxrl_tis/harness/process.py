"""The process of a harness, from the side of the run; host.py runs in the process."""

import contextlib
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxrl_tis.data.child import Child
from jaxrl_tis.harness.host import PONG
from jaxrl_tis.harness.protocol import Session

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0  # in which the event loop of a process answers
LOCAL = "127.0.0.1,localhost"  # calls of the endpoint go through no proxy
MOST_ENDS = 5  # of the process, one after the other without a reply


@dataclass(frozen=True)
class Reply:
    """The end of a session in its process.

    Attributes:
        key: of the session.
        reward, metrics, calls: see protocol.Result.
        error: why the session failed; "" if it did not.
        is_lost: its process ended before the session did.
    """

    key: str
    reward: float | None = None
    metrics: Mapping[str, float] | None = None
    calls: Sequence[tuple[Sequence[int], Sequence[float] | None]] | None = None
    error: str = ""
    is_lost: bool = False


class HarnessProcess:
    """Plays sessions in a process of its own. A process that ends fails its open sessions, and the
    next session starts another one.

    The process is a `Child`, which may use the network, and ends when this process ends.

    Args:
        harness: "module:function" or "verifiers:TASKSET", importable along this process's sys.path.
        on_reply: called in a thread with each reply.
        python: path of another interpreter; "" for this one. Of sys.path it gets the folders that
            do not belong to this interpreter.

    Attributes:
        error: the harness cannot be used: its process has ended again and again; "" if it can.

    Raises:
        ValueError: the harness is missing, cannot be loaded, or is no function of a session.
    """

    def __init__(self, harness: str, on_reply: Callable[[Reply], None], python: str = ""):
        self._harness, self._python, self._on_reply = harness, python, on_reply
        # Only `_starting` is held while a process starts, which can take long.
        self._starting, self._lock = threading.Lock(), threading.Lock()
        self._process: Child | None = None
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()  # of the process; None ends it
        self._open: set[str] = set()
        self._ends, self._is_closed, self._is_asked = 0, False, False
        self.error = ""
        self._use(self._started())

    def start(self, key: str, session: Session) -> None:
        """Starts a session. Its reply comes through `on_reply`, also if the process ends. Waits
        until a new process is ready, if it takes one; other calls do not wait meanwhile."""
        is_sent = False
        while not (is_sent or self._is_closed or self.error):
            with self._starting:
                process = self._started() if self._process is None else None
                with self._lock:
                    if process is not None:
                        self._use(process)
                    is_sent = self._process is not None  # else it ended after the look
                    if is_sent:
                        self._open.add(key)
                        self._send({"start": [key, asdict(session)]})

    def cancel(self, key: str) -> None:
        """Ends a session without a reply."""
        with self._lock:
            if key in self._open:
                self._open.discard(key)
                self._send({"cancel": key})

    def check(self) -> None:
        """Asks the process for an answer, and ends it if none comes within ANSWER_SECONDS: a harness
        blocks its event loop, so that no session can end. Does not wait for the answer."""
        with self._lock:
            process = self._process
            if process is None or self._is_asked:
                return
            self._is_asked = True
            self._send({"ping": None})
        timer = threading.Timer(ANSWER_SECONDS, self._end_if_silent, (process,))
        timer.daemon = True
        timer.start()

    def _end_if_silent(self, process: Child) -> None:
        with self._lock:  # `_read` waits for it before the id of the group is free
            if self._is_asked and process is self._process:
                process.kill()

    def close(self) -> None:
        """Ends the process and its child processes."""
        with self._lock:
            self._is_closed, self._open = True, set()
            process = self._process
            self._process = None
            self._outbox.put(None)
        if process is not None:
            process.end()

    def _started(self) -> Child:
        """Starts a process and waits until it can play the harness."""
        what = f"the harness {self._harness!r}"
        if shutil.which(self._python or sys.executable) is None:
            raise ValueError(
                f"{what} cannot be started: rollout.harness_python is {self._python!r}; give the path of "
                "a Python"
            )
        process = Child(
            "jaxrl_tis.harness.host:serve", what=what, network=True, python=self._python,
            env={"NO_PROXY": LOCAL, "no_proxy": LOCAL},
        )
        process.begin({"harness": self._harness}, START_SECONDS)
        return process

    def _use(self, process: Child) -> None:
        if self._is_closed:
            process.end()
            return
        self._process, self._outbox, self._is_asked = process, queue.SimpleQueue(), False
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(process, self._outbox), daemon=True).start()

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    def _write(self, process: Child, outbox: queue.SimpleQueue) -> None:
        """Writes what `_send` got: a process that reads nothing holds up this thread alone."""
        while (message := outbox.get()) is not None:
            try:
                process.write(message)
            except (OSError, ValueError):
                return  # the process has ended, and `_read` fails its sessions

    def _read(self, process: Child, outbox: queue.SimpleQueue) -> None:
        for reply in _replies(process):
            self._take(reply)
        with self._lock:
            outbox.put(None)
            if self._is_closed or process is not self._process:
                return
            failed, self._open, self._process = sorted(self._open), set(), None
            self._ends += 1
            if self._ends >= MOST_ENDS:
                self.error = (
                    f"the process of the harness {self._harness!r} has ended {self._ends} times "
                    "without a reply; its output is above"
                )
        process.end()
        for key in failed:
            self._on_reply(Reply(key, error="the harness's process ended", is_lost=True))

    def _take(self, reply: Reply | None) -> None:
        """Takes a reply, or None for an answer to `check`."""
        with self._lock:
            if reply is None:
                self._is_asked = False
                return
            is_open = reply.key in self._open
            self._open.discard(reply.key)
            self._ends = 0
        if is_open:
            self._on_reply(reply)


def _replies(process: Child) -> Iterator[Reply | None]:
    """Yields the replies of a process until it ends, maybe within a reply, or the harness writes among
    them; None for an answer to `HarnessProcess.check`."""
    with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
        while True:
            for message in process.lines():
                yield None if message == PONG else Reply(**message)
