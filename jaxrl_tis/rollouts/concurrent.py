"""The asynchronous source of the drivers "threads" and "ray": samplers run during updates.

The learner's thread publishes weights, computes rewards and takes batches. The driver's threads
report the samplers' results. One lock protects the shared state. No thread holds it during an
engine call, a reward or a transfer of weights.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.weights import sent
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping, Claim, batch_parts
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry, Key
from jaxrl_tis.rollouts.source import SourceParts

PULSE_SECONDS = 0.1


class Shared:
    """State that the learner's thread and the driver's threads share.

    Attributes:
      changed: the lock, and a condition that is notified at every change.
      books: used under the lock, except for calls of the reward and the samples of a taken batch,
        which only the learner's thread uses.
      error: the error that ended a thread of the driver.
    """

    def __init__(self, books: AsyncBookkeeping):
        self.changed, self.books = threading.Condition(), books
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raises the error of another thread, if there is one."""
        if self.error is not None:
            raise self.error


class Driver(Protocol):
    """The interface of a driver, which carries weights and commands to samplers.

    `sync`, `decide`, `check`, `stats`, `metrics` and `in_flight` are called under the lock."""

    def send(self, served: Any, version: int) -> Any:
        """Moves serving parameters to where samplers fetch them. Samplers continue meanwhile."""

    def sync(self, weights: Any, version: int) -> None:
        """Lets samplers sync to the parameters that `send` returned."""

    def decide(self) -> None:
        """Sends the controller's decisions to the samplers."""

    def check(self) -> None:
        """Checks the samplers' state before the learner waits for them."""

    def pause(self) -> None:
        """Preempts sequences for a checkpoint if the driver needs it, until the next version."""

    def in_flight(self) -> Mapping[Key, Trajectory]:
        """Returns the known parts of sequences that continue after `pause`."""

    def release_cache(self) -> None:
        """Frees the KV caches on the learner's machine."""

    def stats(self) -> Stats:
        """Returns the sum of the samplers' counts since start."""

    def metrics(self, seconds: float, syncs: int) -> dict[str, float]:
        """Returns the driver's metrics of the last `seconds`, during which `syncs` syncs
        occurred."""

    def close(self, is_over: bool) -> None:
        """Ends the samplers' threads or connections."""


class ConcurrentSource:
    """A source of batches with samplers that run during the learner's update."""

    def __init__(self, parts: SourceParts, shared: Shared, driver: Driver):
        self._shared, self.books, self.driver = shared, shared.books, driver
        self._serving_params = parts.serving_params
        self._heartbeat, self._timer = parts.heartbeat, parts.timer
        self._synced = (0.0, 0)  # seconds, bytes since the last batch
        self._last_batch = time.monotonic()

    def publish(self, params: Any, version: int) -> bool:
        is_synced = self.is_sync_due(version)
        self.sync(self.send(params, version) if is_synced else None, version)
        return is_synced

    def is_sync_due(self, version: int) -> bool:
        """Whether samplers will use this version once it is published."""
        with self._shared.changed:
            self._shared.check()
            return self.books.controller.is_sync_due(version)

    def sync(self, weights: Any, version: int) -> None:
        """Publishes a version; `weights`: what `send` returned, None if no sync is due."""
        self._reward()
        with self._shared.changed:
            if weights is not None:
                self.driver.sync(weights, version)
            self.books.published(version)
            self.driver.decide()

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

    def observe(self, values: Mapping[str, float]) -> None:
        with self._shared.changed:
            self.books.observe(values)

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

    def send(self, params: Any, version: int) -> Any:
        """Makes serving parameters and moves them to the samplers, which continue meanwhile."""
        start = time.monotonic()
        served = jax.block_until_ready(self._serving_params(params, version))
        weights = self.driver.send(served, version)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(sent(served)))
        self._synced = time.monotonic() - start, size
        return weights

    def _next_groups(self) -> list[Entry]:
        """Waits for groups of the next batch."""
        while (entries := self.poll()) is None:
            self._heartbeat()
        return entries

    def poll(self) -> list[Entry] | None:
        """Returns groups of the next batch if there are any. Otherwise it rewards samples that have
        finished, or waits for a change, at most PULSE_SECONDS."""
        with self._timer("rollout"), self._shared.changed:
            self._shared.check()
            if (entries := self.books.take()) is not None:
                self.driver.decide()
                return entries
            if (claim := self.books.claim()) is None:
                self._wait()
        if claim is not None:
            self._add_rewards(claim)
        return None

    def _wait(self) -> None:
        """Waits for a change, under the lock, at most PULSE_SECONDS."""
        self.driver.check()
        start = time.monotonic()
        self._shared.changed.wait(PULSE_SECONDS)
        self.books.counts.waited += time.monotonic() - start

    def _reward(self) -> None:
        """Rewards all samples that have finished."""
        with self._shared.changed:
            claim = self.books.claim()
        if claim is not None:
            self._add_rewards(claim)

    def _add_rewards(self, claim: Claim) -> None:
        samples = self.books.score(claim)
        with self._shared.changed:
            self.books.add_rewards(claim.keys, samples)
            self.driver.decide()
