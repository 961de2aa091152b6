"""The driver "threads": samplers in threads of this process, on devices of their own.

Each sampler's thread obeys its orders and steps its engine, as a scheduler knows one thread alone.
Decisions are made by whoever has just told the controller something. As nobody holds the lock while an
engine is at work, new weights wait for the end of one call of the engine and for nothing else.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts.concurrent import Concurrent
from jaxrl_tis.rollouts.controller import Swap
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.replay import Way
from jaxrl_tis.rollouts.sampler import GiveBack, NewWeights, Order, Sampler


@dataclasses.dataclass
class Worker:
    """A sampler and what its thread is to do.

    Attributes:
      inbox: orders that it has not obeyed yet.
      is_busy: it obeys or steps.
      drew: seconds of its steps; stood: in which it drew nothing because new weights came.
      stands_since: when it began to.
    """

    sampler: Sampler
    inbox: collections.deque[Order] = dataclasses.field(default_factory=collections.deque)
    is_busy: bool = False
    drew: float = 0.0
    stood: float = 0.0
    stands_since: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self.inbox

    def obey(self, order: Order) -> list[Trajectory]:
        is_drawing = self.sampler.pending > 0
        if isinstance(order, (GiveBack, NewWeights)) and is_drawing and self.stands_since is None:
            self.stands_since = time.monotonic()
        return self.sampler.obey(order)

    def step(self) -> list[Trajectory]:
        start = time.monotonic()
        if self.stands_since is not None:
            self.stood += start - self.stands_since
            self.stands_since = None
        trajectories = self.sampler.step()
        self.drew += time.monotonic() - start
        return trajectories


class Threads(Concurrent):
    """A source of batches whose samplers run while the learner updates.

    Args:
      mode, way: of rollout.mode and rollout.replay.
      batches: records of prompts.
      timer: of the phases "data", "rollout" (waiting for a batch) and "reward".
      load: (the policy's parameters, version) -> serving parameters for each sampler.
      starts: of each sampler: (serving parameters, version) -> a scheduler.
      slots: sequences that a sampler draws at once.
      pulse: called while the learner waits.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mode: Mode,
        way: Way | None,
        groups: Groups,
        batches: Batches,
        timer: Timer,
        load: Callable[[Any, int], Sequence[Any]],
        starts: Sequence[Callable[[Any, int], Scheduler]],
        slots: int,
        pulse: Callable[[], None] = lambda: None,
    ):
        super().__init__(config, mode, way, groups, batches, timer, load, pulse)
        self._workers = {f"sampler {i}": Worker(Sampler(s)) for i, s in enumerate(starts)}
        for name in self._workers:
            self.controller.joined(name, slots)
        self._weights: dict[str, NewWeights] = {}
        self._threads: list[threading.Thread] = []
        self._is_resting, self._is_closed = True, False

    # What the run calls

    def publish(self, params: Any, version: int) -> bool:
        hands_over = super().publish(params, version)
        with self._changed:
            self._is_resting = False
            self._decide()
        self._begin()
        return hands_over

    def _send(self, served: Sequence[Any], version: int) -> Sequence[Any]:
        return served  # it was loaded onto the samplers' devices

    def _offer(self, sent: Sequence[Any], version: int) -> None:
        for name, serving in zip(self._workers, sent, strict=True):
            self._weights[name] = NewWeights(serving, version)

    def _check_samplers(self) -> None:
        if all(w.is_idle and not w.sampler.pending for w in self._workers.values()):
            raise self._stuck()

    def _own_metrics(self) -> dict[str, float]:
        workers, counts = self._workers.values(), self._counts
        drew = sum(w.drew for w in workers) / len(workers)
        values = {
            "async/sampler_idle": max(1 - drew / counts.passed, 0.0),
            "sync/pause_s": sum(w.stood for w in workers) / max(counts.syncs, 1),
        }
        for worker in workers:
            worker.drew = worker.stood = 0.0
        return values

    def rest(self) -> None:
        self._pause()
        for worker in self._workers.values():
            worker.sampler.rest()

    def close(self, is_over: bool) -> None:
        """Ends the threads, each after the call that it is in."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns what is to go on with after the update that made `version`. All that samplers draw
        is interrupted for it, and goes on with the next version that is published."""
        self._pause()
        return self._state(version, self._stats())

    def _pause(self) -> None:
        """Takes everything back; until the next version is published no thread does anything."""
        with self._changed:
            self._raise()
            self._is_resting = True
            for decision in self.controller.interrupt_all():
                self._workers[decision.worker].inbox.append(GiveBack())
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error or all(w.is_idle for w in self._workers.values())
            )
            self._raise()

    def _stats(self) -> Stats:
        return Stats.sum(worker.sampler.stats for worker in self._workers.values())

    # Threads

    def _begin(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(name,), name=name, daemon=True)
                for name in self._workers
            ]
            for thread in self._threads:
                thread.start()

    def _work(self, name: str) -> None:
        worker = self._workers[name]
        try:
            while (orders := self._orders(worker)) is not None:
                for order in orders:
                    self._report(name, worker.obey(order), order)
                if not orders:
                    self._report(name, worker.step())
        except BaseException as error:  # which the learner's thread raises
            with self._changed:
                self._error, worker.is_busy = error, False
                self._changed.notify_all()

    def _orders(self, worker: Worker) -> list[Order] | None:
        """Waits for orders and returns them; none while there is something to draw, None at the
        end."""
        draws = lambda: worker.sampler.pending and not self._is_resting
        with self._changed:
            worker.is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: worker.inbox or draws() or self._is_closed)
            if self._is_closed:
                return None
            worker.is_busy, orders = True, list(worker.inbox)
            worker.inbox.clear()
            return orders

    def _report(self, name: str, trajectories: list[Trajectory], order: Order | None = None) -> None:
        """Says what a sampler returned after an order, or after a step."""
        with self._changed:
            self._hear(name, trajectories)
            if isinstance(order, NewWeights):
                self.controller.swapped(name, order.version)
                self._counts.syncs += 1
            self._decide()

    def _decide(self) -> None:
        """Gives orders, with the lock."""
        while not self._is_resting and (decisions := self.controller.decisions()):
            for decision in decisions:
                is_swap = isinstance(decision, Swap)
                order = self._weights[decision.worker] if is_swap else self._order(decision)
                self._workers[decision.worker].inbox.append(order)
        self._changed.notify_all()
