"""Requests to stop a run: SIGTERM, Ctrl-C, or a cloud machine that is about to be preempted.

After a request the run finishes its step if this takes at most `grace` seconds, else it abandons
the step. It saves once and ends with cli.Interrupted. All processes stop at the same place, even if
only one received the request. A process that reaches no such place in time, for example within a
compilation or a collective, ends without a save and with the same exit code.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from jaxrl_tis.runtime import cli, processes

CALLS_BETWEEN_LOOKS = 8  # of several processes, at each other
POLL_SECONDS = 5.0
MAX_FAILURES = 3  # of a metadata server that has never answered
FORCED_SECONDS = 20.0  # after the grace, for a place where the run can stop
STOPPING = (signal.SIGINT, signal.SIGTERM)
# Values of the metadata server of a Google Cloud machine while no event is announced.
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}


class Interrupt:
    """Records a request to stop and its source. Use it as a context manager in the main thread.

    Args:
      grace: seconds that a step may go on after the request.
    """

    def __init__(self, grace: float):
        self._grace, self._calls = grace, 0
        self._asked_at = math.inf
        self._is_over, self._is_acknowledged = threading.Event(), threading.Event()
        self._save = threading.Lock()

    @property
    def is_set(self) -> bool:
        """Whether this process received a request to stop."""
        return self._asked_at < math.inf

    def __enter__(self) -> "Interrupt":
        self._old = {s: signal.signal(s, self._signalled) for s in STOPPING}
        # Python's handlers wait for the main thread to come out of what it calls; bytes do not.
        bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._old_ring = signal.set_wakeup_fd(self._ring.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._enforce, args=(bell,), daemon=True).start()
        if cli.has_tpu():
            threading.Thread(target=self._watch_machine, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._is_acknowledged.set()
        signal.set_wakeup_fd(self._old_ring)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._ring.close()

    def ask(self, reason: str) -> None:
        """Asks the run to stop."""
        if not self.is_set:
            self._asked_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._ring.send(bytes([signal.SIGTERM]))
            _print(
                f"\n{reason}: stopping after this step, or in the middle of it after "
                f"{self._grace:g} s; press Ctrl-C again to stop at once"
            )

    def acknowledge(self) -> None:
        """Notes that the run is stopping, which cancels the time limits: a save may take longer, and
        environments that it waits for."""
        self._is_acknowledged.set()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within it the time limits wait: a save that has begun is completed."""
        with self._save:
            yield

    def is_agreed(self) -> bool:
        """Whether any process received a request. All must call this at the same place."""
        return processes.any_of(self.is_set)

    def check(self) -> None:
        """Raises Interrupted if the grace of any process is over. All processes must call this at
        the same places."""
        if self._is_acknowledged.is_set():
            return
        self._calls += 1
        is_late = time.monotonic() - self._asked_at > self._grace
        if self._calls % CALLS_BETWEEN_LOOKS == 0:
            is_late = processes.any_of(is_late)
        elif not processes.is_alone():
            return
        if is_late:
            raise cli.Interrupted("the step was abandoned; the same command continues")

    def _signalled(self, number: int, frame) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)

    def _enforce(self, bell: socket.socket) -> None:
        with bell:
            while heard := bell.recv(64):
                if not set(heard) & set(STOPPING):
                    continue
                seconds = self._grace + FORCED_SECONDS
                while not self._is_acknowledged.wait(seconds):
                    seconds = FORCED_SECONDS
                    if not self._save.locked():
                        print("the run could not stop in time and ends without a save; the same "
                              "command continues", flush=True)
                        os._exit(cli.RESTART)

    def _watch_machine(self) -> None:
        failures, before = 0.0, None
        while not self._is_over.wait(POLL_SECONDS):
            try:
                notice, failures = read_notice(), -math.inf
            except OSError:
                failures += 1
                if failures == MAX_FAILURES:
                    return  # not a machine of Google Cloud
                continue
            # One that is there from the beginning was acknowledged by the start before. When it
            # has gone, the next one with the same text is another event.
            before = notice if before is None or not notice else before
            if notice not in ("", before):
                self.ask(notice)
                return


def _print(text: str) -> None:
    """Prints from the handler of a signal, which may have come within another print."""
    try:
        print(text, flush=True)
    except RuntimeError:  # a reentrant call of the buffer
        os.write(sys.stdout.fileno(), f"{text}\n".encode())


def read_notice() -> str:
    """Returns the event that the metadata server announces for this machine, "" for none. Raises
    OSError if there is no such server."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    for name, quiet in QUIET.items():
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=POLL_SECONDS) as answer:
            text = answer.read(100).decode().strip()
        if text != quiet:
            return f"{name} is {text}"
    return ""

