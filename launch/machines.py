"""Decides what launch/tpu_vm.py does next, from what gcloud and a host say."""

import dataclasses
import json
import re
from collections.abc import Iterator

LOST = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED")
UNKNOWN = "UNKNOWN"  # the state of machines, where gcloud cannot say it for now


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of the run on one host.

    Attributes:
      code: exit code of the run. None while it runs, before it starts, or after a reboot of the
        host that lost the code.
      arguments: arguments of the run, None if none was started.
    """

    is_running: bool
    code: int | None = None
    arguments: list[str] | None = None

    @classmethod
    def parse(cls, text: str) -> "Status | None":
        """Reads the first line of `on_vm.sh status` in the output of ssh; None if it is missing."""
        return next(cls.parse_all(text), None)

    @classmethod
    def parse_all(cls, text: str) -> "Iterator[Status]":
        """Reads the lines of `on_vm.sh status` of several hosts."""
        line = re.compile(r"^(not )?running: (.*?)(?: on \S+(?: with (.*))?)?$", re.MULTILINE)
        for found in line.finditer(text):
            code = re.search(r'"code": (\d+)', found[2])
            arguments = json.loads(found[3]) if found[3] else None
            yield cls(found[1] is None, int(code[1]) if code else None, arguments)


@dataclasses.dataclass
class Machines:
    """Decides the next action from the observed states, without a clock or a process.

    Attributes:
      max_creations: limit on the number of requests for machines.
      max_lost_touch: limit on `lost_touch`: an hour, in POLL_SECONDS.
      is_bounded: whether a failed request is final (--valid-until).
      creations: number of requests for machines.
      has_run: whether the run was started on the current machines.
      lost_touch: number of failed contacts in a row, including hosts that lost the run.
    """

    max_creations: int = 20
    max_lost_touch: int = 120
    is_bounded: bool = False
    creations: int = 0
    has_run: bool = False
    lost_touch: int = 0

    def next(self, state: str | None) -> str:
        """Returns "create", "delete", "wait", "start", "follow", "expire" or "give up".

        `state` is the state of the queued resource: None if it does not exist, UNKNOWN if gcloud
        could not read it.
        """
        if self.lost_touch >= self.max_lost_touch:
            return "give up"
        if state is None:
            if self.creations >= self.max_creations:
                return "give up"
            self.creations += 1
            self.has_run = False
            return "create"
        if state == "FAILED" and self.is_bounded and self.creations:
            return "expire"
        if state in LOST:
            return "delete"
        if state == UNKNOWN:
            self.lost_touch += 1
            return "wait"
        if state != "ACTIVE":
            self.lost_touch = 0
            return "wait"
        if not self.has_run:
            self.has_run = True
            return "start"
        return "follow"

    def refused(self) -> None:
        """Takes back a request for machines that gcloud did not accept."""
        self.creations -= 1

    def missed(self) -> None:
        """Counts a failed contact with the machines, or a lost run."""
        self.has_run = False
        self.lost_touch += 1

    def ended(self, status: Status | None) -> int | None:
        """Returns the run's exit code if the run is over, else None.

        `status` is the host's answer after the log stopped, None without one. The exit code of ssh
        is not used: gcloud exits with 1 while a machine shuts down.
        """
        if status is None:
            self.lost_touch += 1
        elif status.is_running:
            self.lost_touch = 0
        elif status.code is None:
            self.missed()
        else:
            return status.code
        return None
