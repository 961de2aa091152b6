"""A thread that ends a process which hangs, and leaves signs of life beside the run."""

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
    """Ends this process with the code that asks for a restart when `heartbeat` is not called for
    `timeout` seconds; the stack of every thread is then in WORKDIR/stacks and in the log. From a
    machine of a bucket's run the file follows with the next checkpoint.

    Process 0 also keeps WORKDIR/heartbeat.json: who runs, what it does, when it last came on.

    Args:
      timeout: seconds; longer than the longest compilation. 0: never.
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
        """Records progress, and the current activity if given."""
        self._last_heartbeat, self._doing = time.monotonic(), doing or self._doing

    @property
    def _wait(self) -> float:
        """Seconds from look to look."""
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
        """Ends the process without waiting for what may hang, which is anything."""
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
