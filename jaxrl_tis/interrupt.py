"""What asks a run to stop from outside: SIGTERM, Ctrl-C, a machine that is about to be taken away.

A run that is asked finishes its step if that takes no longer than `grace` seconds, and gives it up
otherwise; it saves once and ends with cli.Interrupted. All processes of a run stop at the same place,
whichever of them was asked.
"""

import os
import signal
import threading
import time
import urllib.request

from jaxrl_tis import cli, processes

CALLS_BETWEEN_LOOKS = 8  # of several processes, at each other
POLL_SECONDS = 5.0
# What the metadata server of a Google Cloud machine says while nothing is to happen to it.
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}


class Interrupt:
    """Holds what the run was asked, and by what; use it as a context manager in the main thread.

    Args:
      grace: seconds that a step may go on after the request.
    """

    def __init__(self, grace: float):
        self._grace, self._asked_at, self._calls = grace, None, 0
        self._is_over = threading.Event()

    @property
    def is_set(self) -> bool:
        """Whether this process was asked."""
        return self._asked_at is not None

    def __enter__(self) -> "Interrupt":
        self._old = {s: signal.signal(s, self._signalled) for s in (signal.SIGINT, signal.SIGTERM)}
        if cli.has_tpu():
            threading.Thread(target=self._watch_machine, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        """Asks the run to stop."""
        if not self.is_set:
            self._asked_at = time.monotonic()
            print(
                f"\n{reason}: stopping after this step, or in the middle of it after "
                f"{self._grace:g} s; press Ctrl-C again to stop at once", flush=True,
            )

    def is_agreed(self) -> bool:
        """Whether any process was asked; all must call this at the same place."""
        return processes.any_of(self.is_set)

    def check(self) -> None:
        """Raises Interrupted where the grace of any process is over; all must call this at the
        same places."""
        self._calls += 1
        is_late = self.is_set and time.monotonic() - self._asked_at > self._grace
        if self._calls % CALLS_BETWEEN_LOOKS == 0:
            is_late = processes.any_of(is_late)
        elif not processes.is_alone():
            return
        if is_late:
            raise cli.Interrupted("the step was given up")

    def _signalled(self, number: int, frame) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)

    def _watch_machine(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            try:
                notice = read_notice()
            except OSError:
                return  # not a machine of Google Cloud
            if notice:
                self.ask(notice)
                return


def read_notice() -> str:
    """Returns what the metadata server says is about to happen to this machine, "" for nothing.
    OSError where there is no such server."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    for name, quiet in QUIET.items():
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=POLL_SECONDS) as answer:
            text = answer.read(100).decode().strip()
        if text != quiet:
            return f"{name} is {text}"
    return ""

