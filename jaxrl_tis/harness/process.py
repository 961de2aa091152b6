"""The process of a harness, from the side of the run; host.py runs in the process."""

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxrl_tis.data import confined
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

    The process leads its own process group, has a PID namespace where the system allows it, may use
    the network, and ends when this process ends.

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
        self._process: subprocess.Popen | None = None
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

    def _end_if_silent(self, process: subprocess.Popen) -> None:
        with self._lock:  # `_read` waits for it before the id of the group is free
            if self._is_asked and process is self._process:
                _kill(process)

    def close(self) -> None:
        """Ends the process and its child processes."""
        with self._lock:
            self._is_closed, self._open = True, set()
            process = self._process
            self._process = None
            self._outbox.put(None)
        if process is not None:
            _end(process)

    def _started(self) -> subprocess.Popen:
        """Starts a process and waits until it can play the harness."""
        what = f"the harness {self._harness!r}"
        code = (
            "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); "
            "from jaxrl_tis.harness import host; host.serve()"
        )
        path = [os.path.abspath(entry) for entry in sys.path]
        if self._python:
            own = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
            path = [entry for entry in path if not os.path.join(entry, "").startswith(own)]
        if shutil.which(self._python or sys.executable) is None:
            raise ValueError(
                f"{what} cannot be started: rollout.harness_python is {self._python!r}; give the path of "
                "a Python"
            )
        command = [*confined.namespaces(True), self._python or sys.executable, "-c", code]
        try:
            process = subprocess.Popen(
                [*command, json.dumps(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
                env=os.environ | {"NO_PROXY": LOCAL, "no_proxy": LOCAL},
            )
        except OSError as error:
            raise ValueError(f"{what} cannot be started: {error}") from error
        # Each piece as it comes. The thread keeps the process: without it the pipe would be closed.
        errors: Any = process.stderr
        show = lambda: confined.show(errors.raw, what)
        threading.Thread(target=show, daemon=True).start()
        if why := self._loading(process):
            _end(process)
            raise ValueError(f"{what} cannot be loaded: {why}")
        return process

    def _use(self, process: subprocess.Popen) -> None:
        if self._is_closed:
            _end(process)
            return
        self._process, self._outbox, self._is_asked = process, queue.SimpleQueue(), False
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(process, self._outbox), daemon=True).start()

    def _loading(self, process: subprocess.Popen) -> str:
        """Returns why the process cannot play the harness; "" if it can."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"harness": self._harness}).encode() + b"\n")
            process.stdin.flush()
            poll = select.poll()  # `select` knows no descriptor above 1023
            poll.register(process.stdout, select.POLLIN)
            if not poll.poll(1000 * START_SECONDS):
                return f"its process does not start within {START_SECONDS:g} seconds"
            line = process.stdout.readline()
        except OSError:
            line = b""
        return json.loads(line)["error"] if line else "its process ended; its output is above"

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    def _write(self, process: subprocess.Popen, outbox: queue.SimpleQueue) -> None:
        """Writes what `_send` got: a process that reads nothing holds up this thread alone."""
        assert process.stdin is not None
        while (message := outbox.get()) is not None:
            try:
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
            except (OSError, ValueError):
                return  # the process has ended, and `_read` fails its sessions

    def _read(self, process: subprocess.Popen, outbox: queue.SimpleQueue) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
                reply = None if message == PONG else Reply(**message)
            except (ValueError, TypeError):
                break  # the process ended within a reply, or the harness wrote among its replies
            if reply is None:
                with self._lock:
                    self._is_asked = False
                continue
            with self._lock:
                is_open = reply.key in self._open
                self._open.discard(reply.key)
                self._ends = 0
            if is_open:
                self._on_reply(reply)
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
        _end(process)
        for key in failed:
            self._on_reply(Reply(key, error="the harness's process ended", is_lost=True))


def _kill(process: subprocess.Popen) -> None:
    # Before wait(): until then the id of the group cannot be given to another process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen) -> None:
    _kill(process)
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # a message that the process has not read
        process.stdin.close()
