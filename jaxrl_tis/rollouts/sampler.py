"""A worker of an asynchronous run: one scheduler that executes commands, on one thread."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class SetParams:
    """Serving parameters, and their version, for all tokens drawn from now on."""

    params: Any
    version: int


@dataclasses.dataclass(frozen=True)
class NewRequests:
    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Preempt:
    """End all sequences, and return them as they are."""


@dataclasses.dataclass(frozen=True)
class Cancel:
    """End these requests, which no group needs any more."""

    ids: tuple[str, ...]


Command = SetParams | NewRequests | Preempt | Cancel


class Sampler:
    """Samples for the commands that it executes.

    Args:
      start: (serving parameters, version) -> a scheduler.
    """

    def __init__(self, start: Callable[[Any, int], Scheduler]):
        self._start = start
        self._scheduler: Scheduler | None = None

    @property
    def pending(self) -> int:
        """The number of requests that it has not returned."""
        return 0 if self._scheduler is None else self._scheduler.pending

    @property
    def stats(self) -> Stats:
        return Stats() if self._scheduler is None else self._scheduler.stats

    def execute(self, command: Command) -> list[Trajectory]:
        """Executes a command, and returns the sequences that it preempts; the stop_reason of those
        that have not ended is "abort"."""
        if isinstance(command, SetParams):
            if self._scheduler is None:
                self._scheduler = self._start(command.params, command.version)
            else:
                self._scheduler.set_params(command.params, command.version)
        elif isinstance(command, NewRequests):
            for request in command.requests:
                self._scheduler.add(request)
        elif isinstance(command, Cancel):
            for id in command.ids:
                with contextlib.suppress(KeyError):  # it has ended since
                    self._scheduler.abort(id)
        elif self._scheduler is not None:
            return self._scheduler.pause("abort")
        return []

    def records(self) -> list[Trajectory]:
        """Returns the records so far of the sequences in flight, which continue."""
        return [] if self._scheduler is None else self._scheduler.records()

    def step(self) -> list[Trajectory]:
        """Makes one call of the engine, and returns what has ended."""
        return self._scheduler.step()

    def release_cache(self) -> None:
        """Frees the memory of the cache; ValueError while requests are pending."""
        if self._scheduler is not None:
            self._scheduler.release_cache()
