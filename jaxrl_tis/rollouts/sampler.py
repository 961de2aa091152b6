"""A sampler of an asynchronous run: one engine scheduler that executes commands, on one thread."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class SetParams:
    """Command: use these serving parameters, of this version, for all later tokens."""

    params: Any
    version: int


@dataclasses.dataclass(frozen=True)
class NewRequests:
    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Preempt:
    """Command: stop all sequences and return them unfinished."""


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Command: cancel these requests, which no group needs any more."""

    ids: tuple[str, ...]


Command = SetParams | NewRequests | Preempt | Cancel


class Sampler:
    """Generates sequences by executing commands.

    Args:
      start: (serving parameters, version) -> a scheduler.
    """

    def __init__(self, start: Callable[[Any, int], Scheduler]):
        self._start = start
        self._scheduler: Any = None

    @property
    def pending(self) -> int:
        """Number of requests not yet returned."""
        return 0 if self._scheduler is None else self._scheduler.pending

    @property
    def stats(self) -> Stats:
        return Stats() if self._scheduler is None else self._scheduler.stats

    def execute(self, command: Command) -> list[Trajectory]:
        """Executes a command and returns the sequences that it preempts. Unfinished sequences have
        the stop_reason "abort"."""
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
        """Returns the records so far of all sequences in flight, which continue."""
        return [] if self._scheduler is None else self._scheduler.records()

    def step(self) -> list[Trajectory]:
        """Makes one call of the engine and returns the sequences that finished."""
        return self._scheduler.step()

    def release_cache(self) -> None:
        """Frees the KV cache; raises ValueError while requests are pending."""
        if self._scheduler is not None:
            self._scheduler.release_cache()

    def close(self) -> None:
        """Closes the scheduler."""
        if self._scheduler is not None:
            self._scheduler.close()
