"""A worker of an asynchronous run: one scheduler that obeys orders, on one thread."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class NewWeights:
    """Serving parameters, and their version, for all tokens drawn from now on."""

    params: Any
    version: int


@dataclasses.dataclass(frozen=True)
class NewRequests:
    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class GiveBack:
    """End everything that is being drawn, and return it as it is."""


@dataclasses.dataclass(frozen=True)
class Drop:
    """End these requests as they are."""

    ids: tuple[str, ...]


Order = NewWeights | NewRequests | GiveBack | Drop


class Sampler:
    """Draws what it is told to.

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

    def obey(self, order: Order) -> list[Trajectory]:
        """Does what it is told, and returns what it gives back; "abort" is the stop_reason of what
        has not ended."""
        if isinstance(order, NewWeights):
            if self._scheduler is None:
                self._scheduler = self._start(order.params, order.version)
            else:
                self._scheduler.set_params(order.params, order.version)
        elif isinstance(order, NewRequests):
            for request in order.requests:
                self._scheduler.add(request)
        elif isinstance(order, Drop):
            for id in order.ids:
                with contextlib.suppress(KeyError):  # it has ended since it was told so
                    self._scheduler.abort(id)
        elif self._scheduler is not None:
            return self._scheduler.pause("abort")
        return []

    def records(self) -> list[Trajectory]:
        """Returns what there is of the sequences that it draws, which go on."""
        return [] if self._scheduler is None else self._scheduler.records()

    def step(self) -> list[Trajectory]:
        """Makes one call of the engine, and returns what has ended."""
        return self._scheduler.step()

    def rest(self) -> None:
        """Gives the memory of the cache back; ValueError while requests are pending."""
        if self._scheduler is not None:
            self._scheduler.release_cache()
