"""The driver "threads": samplers in threads of this process, each on its own devices.

Each sampler has a thread that executes commands and steps the engine, because a scheduler belongs
to one thread. The thread that has just reported an event makes the next decisions. No thread holds
the lock during an engine call: new weights wait only for the end of the current call.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping
from jaxrl_tis.rollouts.concurrent import ConcurrentSource, Shared
from jaxrl_tis.rollouts.controller import SyncWeights
from jaxrl_tis.rollouts.queue import Key
from jaxrl_tis.rollouts.sampler import Command, Preempt, Sampler, SetParams
from jaxrl_tis.rollouts.source import SourceParts


@dataclasses.dataclass
class SamplerThread:
    """A sampler and the state of its thread.

    Attributes:
      inbox: commands not yet executed.
      is_busy: the thread is executing a command or stepping the engine.
      stepped: total seconds of engine steps.
      paused: total seconds between two steps in which new weights arrived.
      paused_since: start time of the current pause; None without one.
    """

    sampler: Sampler
    inbox: collections.deque[Command] = dataclasses.field(default_factory=collections.deque)
    is_busy: bool = False
    stepped: float = 0.0
    paused: float = 0.0
    paused_since: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self.inbox

    def execute(self, command: Command) -> list[Trajectory]:
        has_work = self.sampler.pending > 0
        if isinstance(command, (Preempt, SetParams)) and has_work and self.paused_since is None:
            self.paused_since = time.monotonic()
        return self.sampler.execute(command)

    def step(self) -> list[Trajectory]:
        start = time.monotonic()
        if self.paused_since is not None:
            self.paused += start - self.paused_since
            self.paused_since = None
        trajectories = self.sampler.step()
        self.stepped += time.monotonic() - start
        return trajectories


def thread_source(
    parts: SourceParts, starts: Sequence[Callable[[Any, int], Scheduler]], slots: int
) -> ConcurrentSource:
    """Makes a source whose samplers run in threads of this process.

    Args:
      starts: one function for each sampler: (serving parameters, version) -> a scheduler.
      slots: number of sequences that a sampler generates at once.
    """
    shared = Shared(AsyncBookkeeping(parts))
    return ConcurrentSource(parts, shared, ThreadDriver(shared, starts, slots))


class ThreadDriver:
    """Runs samplers in threads; see `thread_source`. They are idle until the first version is
    published, and from `pause` until the next one."""

    def __init__(
        self, shared: Shared, starts: Sequence[Callable[[Any, int], Scheduler]], slots: int
    ):
        self._shared, self._books, self._changed = shared, shared.books, shared.changed
        self._workers = {f"sampler {i}": SamplerThread(Sampler(s)) for i, s in enumerate(starts)}
        for name in self._workers:
            self._books.controller.joined(name, slots)
        self._newest: dict[str, SetParams] = {}
        self._threads: list[threading.Thread] = []
        self._is_resting, self._is_closed = True, False

    # The learner's thread

    def send(self, served: Sequence[Any], version: int) -> Sequence[Any]:
        return served  # `serving_params` laid it out on the samplers' devices

    def sync(self, weights: Sequence[Any], version: int) -> None:
        for name, serving in zip(self._workers, weights, strict=True):
            self._newest[name] = SetParams(serving, version)
        self._is_resting = False
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(name,), name=name, daemon=True)
                for name in self._workers
            ]
            for thread in self._threads:
                thread.start()

    def check(self) -> None:
        """Raises RuntimeError if no sampler has any work."""
        if all(w.is_idle and not w.sampler.pending for w in self._workers.values()):
            raise self._books.stuck()

    def pause(self) -> None:
        """Preempts all sequences; all threads are idle until the next version is published."""
        with self._changed:
            self._shared.check()
            self._is_resting = True
            for decision in self._books.controller.interrupt_all():
                self._workers[decision.worker].inbox.append(Preempt())
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._shared.error or all(w.is_idle for w in self._workers.values())
            )
            self._shared.check()

    def in_flight(self) -> Mapping[Key, Trajectory]:
        return {}

    def release_cache(self) -> None:
        self.pause()
        for worker in self._workers.values():
            worker.sampler.release_cache()

    def stats(self) -> Stats:
        return Stats.sum(worker.sampler.stats for worker in self._workers.values())

    def metrics(self, seconds: float, syncs: int) -> dict[str, float]:
        workers = self._workers.values()
        stepped = sum(w.stepped for w in workers) / len(workers)
        values = {
            "async/sampler_idle": max(1 - stepped / seconds, 0.0),
            "sync/pause_s": sum(w.paused for w in workers) / max(syncs, 1),
        }
        for worker in workers:
            worker.stepped = worker.paused = 0.0
        return values

    def close(self, is_over: bool) -> None:
        """Ends the threads, each after its current call, and the samplers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for worker in self._workers.values():
            worker.sampler.close()

    # The samplers' threads

    def decide(self) -> None:
        while not self._is_resting and (decisions := self._books.controller.decisions()):
            for decision in decisions:
                name = decision.worker
                if isinstance(decision, SyncWeights):
                    self._workers[name].inbox.append(self._newest[name])
                else:
                    self._workers[name].inbox.append(self._books.command(decision))
        self._changed.notify_all()

    def _work(self, name: str) -> None:
        worker = self._workers[name]
        try:
            while (commands := self._commands(worker)) is not None:
                for command in commands:
                    self._report(name, worker.execute(command), command)
                if not commands:
                    self._report(name, worker.step())
        except BaseException as error:  # which the learner's thread raises
            with self._changed:
                self._shared.error, worker.is_busy = error, False
                self._changed.notify_all()

    def _commands(self, worker: SamplerThread) -> list[Command] | None:
        """Waits for commands and returns them. Returns [] if there are none and sequences are
        pending, None at the end."""
        draws = lambda: worker.sampler.pending and not self._is_resting
        with self._changed:
            worker.is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: worker.inbox or draws() or self._is_closed)
            if self._is_closed:
                return None
            worker.is_busy, commands = True, list(worker.inbox)
            worker.inbox.clear()
            return commands

    def _report(
        self, name: str, trajectories: list[Trajectory], command: Command | None = None
    ) -> None:
        """Reports the sequences that a sampler returned after a command or a step."""
        with self._changed:
            self._books.receive(name, trajectories)
            if isinstance(command, SetParams):
                self._books.synced(name, command.version)
            self.decide()
