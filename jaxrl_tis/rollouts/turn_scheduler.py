"""The scheduler of sequences that someone answers between two turns: an environment, or an agent."""

import abc
from collections.abc import Callable
from typing import Any

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats


class TurnScheduler(abc.ABC):
    """Has the interface of `engine.scheduler.Scheduler`: call `step()` until `pending` is 0.

    Requests without an example are one turn, as without this class. A subclass plays the others. It
    also defines `step`, `abort`, `drawn`, `records` and `sync_digest`.

    Args:
      scheduler: samples the turns.
      max_length: most tokens of a sequence, prompt included.
      on_fork: rollout.on_fork.
      waits: every step waits for all that answer. The engine then samples the same sequences
        together in every run, and runs repeat bit by bit if the answers do. Otherwise it samples
        while the others think.
      heartbeat: called while a step waits.
    """

    def __init__(
        self, scheduler: Scheduler, *, max_length: int, on_fork: str, waits: bool,
        heartbeat: Callable[[], None] = lambda: None,
    ):
        self._scheduler, self._max_length, self._on_fork = scheduler, max_length, on_fork
        self._waits, self._heartbeat = waits, heartbeat
        self._ended: list[Trajectory] = []  # that the next step returns

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """The number of requests that have not been returned yet."""

    def add(self, request: Request) -> None:
        """Queues a request, see `Scheduler.add`."""
        if request.example is None:
            self._scheduler.add(request)
        else:
            self._add(request)

    def pause(self, mode: str) -> list[Trajectory]:
        """Interrupts everything between two steps, see `Scheduler.pause`. Who answers goes on, but
        for environments in the mode "abort"."""
        paused = self._scheduler.pause(mode)
        if mode != "abort":
            return paused
        ended, self._ended = self._ended, []
        return ended + self._aborted(paused)

    def set_params(self, params: Any, version: int) -> None:
        """Replaces the weights of all tokens sampled from now on, see `Scheduler.set_params`."""
        self._scheduler.set_params(params, version)

    def release_cache(self) -> None:
        """Frees the KV cache. ValueError while requests are pending."""
        if self.pending:
            raise ValueError(f"{self.pending} requests are pending; step until there are none")
        self._scheduler.release_cache()

    def sleep(self) -> None:
        """Frees the KV cache and the weights, see `Scheduler.sleep`."""
        self.release_cache()
        self._scheduler.sleep()

    def close(self) -> None:
        """Ends the scheduler's thread."""
        self._scheduler.close()

    @abc.abstractmethod
    def _add(self, request: Request) -> None:
        """Queues a request with an example."""

    @abc.abstractmethod
    def _aborted(self, paused: list[Trajectory]) -> list[Trajectory]:
        """Returns the records of all requests, from what the scheduler has paused."""
