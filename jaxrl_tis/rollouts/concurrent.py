"""The source whose samplers run while the learner updates, in threads or in processes.

The learner's thread publishes, rewards and takes batches; the driver's threads report what samplers
did. All of it happens under one lock, which nobody holds while an engine, a reward or a transfer of
weights is at work.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping, Claim, batch_parts
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry, Key
from jaxrl_tis.rollouts.source import SourceParts

PULSE_SECONDS = 0.1


class Shared:
    """State that the learner's thread shares with the driver's threads.

    Attributes:
      changed: the lock, and the condition that something has changed.
      books: used with the lock, but for calls of the reward and for the samples of a batch that was
        taken: only the learner's thread has these.
      error: with which a thread of the driver ended.
    """

    def __init__(self, books: AsyncBookkeeping):
        self.changed, self.books = threading.Condition(), books
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raises the error of another thread, if there is one."""
        if self.error is not None:
            raise self.error


class Driver(Protocol):
    """Samplers, and how weights and commands reach them. `publish`, `decide`, `check`, `stats`,
    `metrics` and `in_flight` are called with the lock."""

    def stage(self, served: Any, version: int) -> Any:
        """Copies serving parameters to where samplers load them. Samplers continue with the older
        ones."""

    def publish(self, staged: Any, version: int) -> None:
        """Lets samplers sync to the parameters that `stage` returned."""

    def decide(self) -> None:
        """Sends the controller's decisions to the samplers."""

    def check(self) -> None:
        """Looks at the samplers before the learner waits for them."""

    def pause(self) -> None:
        """Preempts the sequences that a checkpoint cannot contain. They continue with the next
        version."""

    def in_flight(self) -> Mapping[Key, Trajectory]:
        """Returns parts of the sequences that continue after `pause`."""

    def release_cache(self) -> None:
        """Frees the memory of the caches that are on the learner's machine."""

    def stats(self) -> Stats:
        """Returns the sum of the samplers' total counts."""

    def metrics(self, seconds: float, syncs: int) -> dict[str, float]:
        """Returns the driver's metrics of the last `seconds`, in which this number of weight syncs
        took place."""

    def close(self, is_over: bool) -> None:
        """Ends the samplers' threads, or their connections."""


class ConcurrentSource:
    """A source of batches with samplers that run during the learner's update."""

    def __init__(self, parts: SourceParts, shared: Shared, driver: Driver):
        self._shared, self.books, self.driver = shared, shared.books, driver
        self._serving_params = parts.serving_params
        self._heartbeat, self._timer = parts.heartbeat, parts.timer
        self._synced = (0.0, 0)  # seconds, bytes since the last batch
        self._last_batch = time.monotonic()

    def publish(self, params: Any, version: int) -> bool:
        with self._shared.changed:
            self._shared.check()
            is_synced = self.books.controller.is_sync_due(version)
        staged = self._stage(params, version) if is_synced else None
        self._reward()
        with self._shared.changed:
            if is_synced:
                self.driver.publish(staged, version)
            self.books.published(version)
            self.driver.decide()
        return is_synced

    def parts(self, step: int) -> Iterator[list[Sample]]:
        return batch_parts(self.books, self._next_groups)

    def metrics(self) -> dict[str, float]:
        with self._shared.changed:
            now, (seconds, size), counts = time.monotonic(), self._synced, self.books.counts
            counts.passed = now - self._last_batch
            of_driver = self.driver.metrics(counts.passed, counts.syncs)
            values = self.books.metrics(self.driver.stats()) | of_driver
            self._synced, self._last_batch = (0.0, 0), now
            return values | {"sync/bytes": size, "sync/seconds": seconds}

    def reduce_staleness(self) -> str:
        with self._shared.changed:
            return self.books.reduce_staleness()

    def release_cache(self) -> None:
        self.driver.release_cache()

    def get_state(self, version: int) -> dict[str, Any]:
        self.driver.pause()
        with self._shared.changed:
            return self.books.get_state(version, self.driver.stats(), self.driver.in_flight())

    def set_state(self, state: dict[str, Any]) -> None:
        with self._shared.changed:
            self.books.set_state(state)

    def sync_digest(self) -> dict[str, Any]:
        with self._shared.changed:
            return self.books.sync_digest()

    def close(self, is_over: bool) -> None:
        self.driver.close(is_over)

    def _stage(self, params: Any, version: int) -> Any:
        """Makes serving parameters and brings them to the samplers, which continue meanwhile."""
        start = time.monotonic()
        served = jax.block_until_ready(self._serving_params(params, version))
        staged = self.driver.stage(served, version)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(served))
        self._synced = time.monotonic() - start, size
        return staged

    def _next_groups(self) -> list[Entry]:
        """Waits for groups of the next batch, and rewards what ends meanwhile."""
        while True:
            with self._timer("rollout"), self._shared.changed:
                self._shared.check()
                if (entries := self.books.take()) is not None:
                    self.driver.decide()
                    return entries
                if (claim := self.books.claim()) is None:
                    self._wait()
            if claim is not None:
                self._add_rewards(claim)
            self._heartbeat()

    def _wait(self) -> None:
        """Waits, with the lock, until something has changed, for PULSE_SECONDS at most."""
        self.driver.check()
        start = time.monotonic()
        self._shared.changed.wait(PULSE_SECONDS)
        self.books.counts.waited += time.monotonic() - start

    def _reward(self) -> None:
        """Rewards what has ended."""
        with self._shared.changed:
            claim = self.books.claim()
        if claim is not None:
            self._add_rewards(claim)

    def _add_rewards(self, claim: Claim) -> None:
        samples = self.books.score(claim)
        with self._shared.changed:
            self.books.add_rewards(claim.keys, samples)
            self.driver.decide()
