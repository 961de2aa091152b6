"""The driver "threads": samplers in threads of this process, on devices of their own.

The learner's thread publishes, rewards and takes batches; each sampler's thread obeys its orders and
steps its engine, as a scheduler knows one thread alone. Decisions are made by whoever has just told
the controller something, under one lock, which nobody holds while an engine, a reward or a hand-over
of weights is at work. So new weights wait for the end of one call of the engine and for nothing else.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.metrics import Timer
from jaxrl_tis.rollouts.bookkeeping import Bookkeeping
from jaxrl_tis.rollouts.controller import Swap
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.queue import Entry
from jaxrl_tis.rollouts.sampler import GiveBack, NewWeights, Order, Sampler

PULSE_SECONDS = 0.1


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


@dataclasses.dataclass(frozen=True)
class HandOver:
    """What it cost to make serving parameters and to bring them to the samplers' devices."""

    seconds: float = 0.0
    bytes: int = 0


class Threads(Bookkeeping):
    """A source of batches whose samplers run while the learner updates.

    Args:
      mode: of rollout.mode.
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
        groups: Groups,
        batches: Batches,
        timer: Timer,
        load: Callable[[Any, int], Sequence[Any]],
        starts: Sequence[Callable[[Any, int], Scheduler]],
        slots: int,
        pulse: Callable[[], None] = lambda: None,
    ):
        super().__init__(config, mode, groups, batches, timer)
        self._load, self._pulse = load, pulse
        self._workers = {f"sampler {i}": Worker(Sampler(s)) for i, s in enumerate(starts)}
        for name in self._workers:
            self.controller.joined(name, slots)
        self._weights: dict[str, NewWeights] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._is_resting, self._is_closed = True, False
        self._error: BaseException | None = None
        self._hand_over, self._last_batch = HandOver(), time.monotonic()

    # What the run calls

    def publish(self, params: Any, version: int) -> bool:
        with self._changed:
            self._raise()
            hands_over = self.controller.hands_over(version)
        served = self._served(params, version) if hands_over else ()
        self._reward()
        with self._changed:
            for name, serving in zip(self._workers, served):
                self._weights[name] = NewWeights(serving, version)
            self.controller.published(version)
            self._taken, self._is_resting = [], False
            self._decide()
        self._begin()
        return hands_over

    def _served(self, params: Any, version: int) -> Sequence[Any]:
        """Returns serving parameters on the samplers' devices; meanwhile these draw."""
        start = time.monotonic()
        served = jax.block_until_ready(self._load(params, version))
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves(served))
        self._hand_over = HandOver(time.monotonic() - start, moved)
        return served

    def _next_entries(self) -> list[Entry]:
        while True:
            with self._timer("rollout"), self._changed:
                self._raise()
                if (entries := self._take()) is not None:
                    self._decide()
                    return entries
                if not (keys := self._queue.claim("reward")):
                    self._wait()
                claimed = self._claimed(keys)
            if keys:
                self._give_rewards(keys, claimed)
            self._pulse()

    def _wait(self) -> None:
        """Waits, with the lock, until something has changed, for PULSE_SECONDS at most."""
        if all(w.is_idle and not w.sampler.pending for w in self._workers.values()):
            raise RuntimeError(
                f"batch {self.controller.version} is not complete and no sampler draws; "
                f"{len(self._queue)} groups are in the queue"
            )
        start = time.monotonic()
        self._changed.wait(PULSE_SECONDS)
        self._counts.waited += time.monotonic() - start

    def _reward(self) -> None:
        with self._changed:
            claimed = self._claimed(keys := self._queue.claim("reward"))
        if keys:
            self._give_rewards(keys, claimed)

    def _give_rewards(self, keys, claimed) -> None:
        samples = self._scored(claimed)
        with self._changed:
            self._rewarded(keys, samples)
            self._decide()

    def metrics(self) -> dict[str, float]:
        """Returns what was counted since it was called last: how far the
        samplers are ahead, who waited, and what new weights cost."""
        with self._changed:
            now, workers, syncs = time.monotonic(), self._workers.values(), self._counts.syncs
            self._counts.passed = now - self._last_batch
            drew = sum(w.drew for w in workers) / len(workers)
            values = self._measured(self._stats()) | {
                "async/sampler_idle": max(1 - drew / (now - self._last_batch), 0.0),
                "sync/bytes": self._hand_over.bytes,
                "sync/seconds": self._hand_over.seconds,
                "sync/pause_s": sum(w.stood for w in workers) / max(syncs, 1),
            }
            for worker in workers:
                worker.drew = worker.stood = 0.0
            self._hand_over, self._last_batch = HandOver(), now
            return values

    def tighten(self) -> str:
        with self._changed:
            return super().tighten()

    def facts(self) -> dict[str, Any]:
        with self._changed:
            return super().facts()

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

    def _raise(self) -> None:
        """Raises what a sampler's thread ended with."""
        if self._error is not None:
            raise self._error

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
