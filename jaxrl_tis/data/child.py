"""A Python process of its own, for code that is not trusted to end, to stay silent or to be fast.

This file imports the standard library only.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

SHOWN_BYTES = 64 << 10  # of the process's output
NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount-proc")


class Child:
    """A new interpreter, to which messages go as JSON lines. A multiprocessing child would import the main
    module again, and with it JAX.

    The process leads its own process group. Where `unshare` works it also has its own PID namespace, and
    killing it kills every process that it started; without `network` there is no network. The first
    SHOWN_BYTES of its output go to stderr.

    Args:
        serve: "module:function", importable along this process's sys.path. The process calls it.
        what: the process's name for messages.
        network: whether there is a network.
        python: path of another interpreter; "" for this one. Of sys.path it gets the folders that do not
            belong to this interpreter.
        env: more variables of its environment.
        most: bytes of a line that is read.

    Raises:
        ValueError: the interpreter cannot be started.
    """

    def __init__(
        self, serve: str, *, what: str, network: bool, python: str = "", env: Mapping[str, str] = {},
        most: int = 1 << 30,
    ):
        module, _, name = serve.partition(":")
        code = (
            f"import sys, json; sys.path[:{0 if python else ''}] = json.loads(sys.argv[1]); "
            f"import {module} as module; module.{name}()"
        )
        path = [os.path.abspath(entry) for entry in sys.path]
        if python:
            own = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
            path = [entry for entry in path if not os.path.join(entry, "").startswith(own)]
        command = [*namespaces(network), python or sys.executable, "-c", code, json.dumps(path)]
        self._what, self._most = what, most
        self._unread: list[bytes] = []
        self._ending = threading.Lock()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0, start_new_session=True, env=os.environ | env,
            )
        except OSError as error:
            raise ValueError(f"{what} cannot be started: {error}") from error
        pipes: Any = self._process
        self._stdin, self._stdout = pipes.stdin, pipes.stdout
        os.set_blocking(self._stdin.fileno(), False)
        threading.Thread(target=_show, args=(pipes.stderr, what), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, message: Any, seconds: float) -> Any:
        """Sends the first message and returns the first line; ends the process if there is none in time,
        or it has an "error".

        Raises:
            ValueError: says so.
        """
        deadline = time.monotonic() + seconds
        try:
            self.write(message, deadline)
            [reply] = self.lines(deadline)
            if not reply["error"]:
                return reply
            why = reply["error"]
        except TimeoutError:
            why = f"TimeoutError: its process does not start within {seconds:g} seconds"
        except EOFError as error:
            why = f"EOFError: {error}; its output is above"
        except OSError:
            why = "EOFError: its process ended; its output is above"
        except (KeyError, TypeError, ValueError):
            why = "its process wrote something before its first message"
        except BaseException:
            self.end()
            raise
        self.end()
        raise ValueError(f"{self._what} cannot be loaded: {why}")

    def write(self, message: Any, deadline: float | None = None) -> None:
        """Sends a message.

        Raises:
            TimeoutError: the process has not read it until then.
            OSError, ValueError: the process has ended.
        """
        data = json.dumps(message).encode() + b"\n"
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            data = data[self._stdin.write(data) or 0 :]

    def lines(self, deadline: float | None = None) -> Iterator[Any]:
        """Waits for at least one complete line, and returns all complete lines, read one by one.

        Raises:
            TimeoutError: there is none until then.
            EOFError: the process has ended, or a line is too long.
            ValueError: a line is no JSON, or `end` was called.
        """
        data = b""
        while b"\n" not in data:
            self._wait(self._stdout, select.POLLIN, deadline)
            data = self._stdout.read(1 << 20)
            if not data:
                raise EOFError("its process ended")
            self._unread.append(data)
            if sum(map(len, self._unread)) > self._most and b"\n" not in data:
                raise EOFError(f"a result of more than {self._most} bytes")
        complete, _, rest = b"".join(self._unread).rpartition(b"\n")
        self._unread = [rest]
        return map(json.loads, complete.split(b"\n"))

    def _wait(self, stream: Any, event: int, deadline: float | None) -> None:
        poll = select.poll()  # select() refuses descriptors above 1023.
        poll.register(stream, event)
        left = None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))
        if not poll.poll(left):
            raise TimeoutError(f"{self._what} exceeded its time limit")

    def kill(self) -> None:
        """Kills the process and all that it started; call `end` afterwards."""
        with self._ending, contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:  # else the id of the group may be another's
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the process and all that it started, and waits for its end."""
        self.kill()
        with self._ending:
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            pipe.close()


@functools.cache
def namespaces(network: bool = False) -> tuple[str, ...]:
    """Returns the command prefix for a PID namespace and, without `network`, no network; empty where the
    system does not allow it."""
    wanted = NAMESPACES if network else ("--net", *NAMESPACES)
    for user in ((), ("--user", "--map-current-user")):
        command = ("unshare", *user, *wanted)
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
        except OSError:
            break  # there is no unshare
    return ()


def _show(stream: Any, what: str) -> None:
    """Copies the beginning of a process's output to stderr, and discards the rest."""
    left = SHOWN_BYTES
    with stream:
        while data := stream.read(SHOWN_BYTES):
            if left:
                sys.stderr.write(data[:left].decode(errors="replace"))
                sys.stderr.flush()
            if left and len(data) >= left:
                print(f"\n(no more of what {what} prints is shown)", file=sys.stderr)
            left = max(0, left - len(data))
