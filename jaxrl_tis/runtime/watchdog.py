"""Ends a process that hangs, and writes a heartbeat file during the run."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path

from jaxrl_tis.runtime import cli, processes
from jaxrl_tis.runtime.storage import STACKS, write_json

LOOK_SECONDS = 5.0
END_SECONDS = 30.0  # to write the stacks down


class Watchdog:
    """Ends this process with exit code RESTART if `heartbeat` is not called for `timeout` seconds.

    The stacks of all threads are then in WORKDIR/stacks and in the log. If the workdir is on a
    bucket, the file is copied there with the next checkpoint. Process 0 also writes
    WORKDIR/heartbeat.json with host, process, current phase and time since the last progress.

    Args:
      timeout: seconds, more than the longest compilation; 0 disables the watchdog.
    """

    def __init__(self, workdir: Path, timeout: float):
        self._workdir, self._timeout = workdir, timeout
        self._last_heartbeat, self._doing = time.monotonic(), "starting"
        self._is_over = threading.Event()
        # Two, as a disk that hangs must not keep the first from ending the process.
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._watch, self._sign)
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LOOK_SECONDS)

    def heartbeat(self, doing: str = "") -> None:
        """Reports progress, and the current phase."""
        self._last_heartbeat, self._doing = time.monotonic(), doing or self._doing

    @property
    def _wait(self) -> float:
        """Seconds between two checks."""
        return min(LOOK_SECONDS, self._timeout / 4 or LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._is_over.wait(self._wait):
            if 0 < self._timeout < time.monotonic() - self._last_heartbeat:
                self._end()

    def _sign(self) -> None:
        while processes.is_first() and not self._is_over.wait(self._wait):
            sign = {
                "host": socket.gethostname(), "pid": os.getpid(), "doing": self._doing,
                "time": time.time(),
                "seconds_since_progress": time.monotonic() - self._last_heartbeat,
            }
            with contextlib.suppress(OSError):  # a full disk stops the run where it writes its record
                write_json(self._workdir / "heartbeat.json", sign)

    def _end(self) -> None:
        """Writes the stacks and ends the process without waiting for any other thread."""
        name = f"process{processes.index()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        path = self._workdir / STACKS / name
        last_resort = threading.Timer(END_SECONDS, os._exit, (cli.RESTART,))
        last_resort.daemon = True
        last_resort.start()
        message = f"{self._doing}: no progress for {self._timeout:g} s"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{message}\n")
                file.flush()
                faulthandler.dump_traceback(file)
            print(f"{message}; the stacks of all threads are in {path}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
            if processes.is_first() and not processes.is_alone():
                # It serves the others' connections; a lost one aborts them before they say where.
                time.sleep(self._wait + 1)
        finally:
            os._exit(cli.RESTART)
