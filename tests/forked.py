"""Commands in forked processes, in which jax and the package are already imported.

Each process is a fork of a server (the `forkserver` of multiprocessing) that has imported
tests/forked_imports.py and started no backend of jax. What it prints goes to a file.
"""

import atexit
import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 300  # far more than any of these takes


def settle(folder: pathlib.Path, environment: dict[str, str], log: str | pathlib.Path) -> None:
    """Gives a fork its folder, its environment, and a file for what it prints."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def _main(command: list[str], environment: dict[str, str], log: str) -> None:
    """What `python COMMAND` does in this environment."""
    settle(ROOT, environment, log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


class Command:
    """A started `python COMMAND`: "-m" and a module, "-c" and code, or a script; and arguments.

    jax has read its variables of the environment when the server started.
    """

    def __init__(self, command: list[str], log, environment: dict[str, str] | None = None):
        self._log = pathlib.Path(log)
        self._log.touch()  # for who reads before it writes
        self._process = _context().Process(
            target=_main, args=([str(w) for w in command], os.environ | (environment or {}), str(log))
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = lambda self: self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.returncode

    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(command: list[str], log, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs it and returns its exit code and what it printed."""
    process = Command(command, log, environment)
    return process.wait(SECONDS), process.text()


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.forked_imports"])
    return context
