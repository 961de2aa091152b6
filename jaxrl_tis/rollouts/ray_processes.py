"""The driver "ray" for a learner of several processes.

Process 0 commands the workers and computes all rewards. Each process puts its own pieces of the
weights into the object store, so no process gathers the tree. All processes receive the batches. An
actor passes references between the processes, which make all calls here in the same order.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ray

from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.weights import moving
from jaxrl_tis.rollouts import ray_cluster
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.ray_source import ray_source
from jaxrl_tis.rollouts.ray_worker import pieces
from jaxrl_tis.rollouts.source import SourceParts
from jaxrl_tis.runtime import fingerprint, processes

CLOSE_SECONDS = 10.0


class Board:
    """An actor that keeps the newest value of each name."""

    def __init__(self):
        self._values = {}

    def post(self, name: str, value: Any) -> None:
        self._values[name] = value

    def read(self, name: str) -> Any:
        return self._values[name]


class ProcessesSource:
    """The source of a process of the learner. That of process 0 has the workers.

    Args: see `ray_source`; `parts` of process 0 without the help of others.
    """

    def __init__(
        self, parts: SourceParts, engine: Engine, served: Any, facts: Mapping[str, Any],
        build: Callable, address: str | None,
    ):
        self._serving_params, self._heartbeat = parts.serving_params, parts.heartbeat
        self._timer = parts.timer
        self._address, self._part, self._is_complete = address, [], False
        self._source: Any = None  # a ConcurrentSource, on process 0
        self._board: Any = None
        self._base: Any = None  # of LoRA, as it is served
        nodes = ray_cluster.awaited(parts.config.rollout, address)
        while processes.first(lambda: next(nodes, True) is None):
            self._heartbeat()
        # The others are not here while process 0 waits.
        alone = dataclasses.replace(parts, heartbeat=lambda: None)
        name = processes.first(lambda: self._open(alone, engine, served, facts, build, address))
        if self._source is None:
            self._board = ray.get_actor(name)

    def _open(self, *arguments) -> str:
        """Makes the workers and the board; returns the board's name."""
        self._source = functools.partial(ray_source, put=self._put)(*arguments)
        name = f"board of {ray.get_runtime_context().get_job_id()}"
        self._board = ray.remote(num_cpus=0)(Board).options(name=name).remote()
        return name

    def publish(self, params: Any, version: int) -> bool:
        is_synced, weights = processes.first(lambda: self._is_sync_due(version)), None
        if is_synced and self._source is not None:
            weights = self._source.send(params, version)
        elif is_synced:
            served = jax.block_until_ready(self._serving_params(params, version))
            moved, base = moving(served)
            fingerprint.digest(moved)
            if base is not None and self._base is None:
                self._base = base  # held: it is quantised once
                fingerprint.digest(base)
                self._put(base)
            self._put(moved)
        processes.first(lambda: self._source.sync(weights, version))
        return is_synced

    def _is_sync_due(self, version: int) -> bool:
        self._source.driver.look()  # here, where an error of process 0 reaches all
        return self._source.is_sync_due(version)

    def _put(self, served: Any) -> tuple[ray.ObjectRef, ...]:
        """Puts the pieces of this process. Returns references to those of all, on process 0."""
        processes.exchange(None)  # process 0 has waited until there is room
        self._post(f"pieces {processes.index()}", pieces(served))
        processes.exchange(None)  # all are there
        if self._source is None:
            return ()
        names = [f"pieces {i}" for i in range(jax.process_count())]
        return tuple(ref for [ref] in ray.get([self._board.read.remote(name) for name in names]))

    def _post(self, name: str, value: Any) -> None:
        ray.get(self._board.post.remote(name, [ray.put(value)]))

    def parts(self, step: int) -> Iterator[list[Sample]]:
        self._is_complete = False
        while (state := self._next_state()) != "complete":
            if state == "waiting":
                self._heartbeat()
            else:
                yield self._part

    def _next_state(self) -> str:
        """Waits for process 0 to look for the next part of the batch, and receives it."""
        if self._source is not None:
            return processes.first(self._poll)
        with self._timer("rollout"):
            if (state := processes.first(self._poll)) == "ready":
                [ref] = ray.get(self._board.read.remote("samples"))
                self._part = ray.get(ref)
            return state

    def _poll(self) -> str:
        """Looks for the next part of the batch, on process 0, and posts it."""
        books = self._source.books
        if self._is_complete:
            return "complete"
        if books.lacks_groups:
            if (entries := self._source.poll()) is None:
                return "waiting"
            self._part = books.samples(entries)
        else:
            self._is_complete, self._part = True, books.replayed()
            if not self._part:
                return "complete"
        self._post("samples", self._part)
        return "ready"

    def metrics(self) -> dict[str, float]:
        plain = lambda: {name: float(x) for name, x in self._source.metrics().items()}
        return processes.first(plain)

    def observe(self, values: Mapping[str, float]) -> None:
        if self._source is not None:
            self._source.observe(values)

    def reduce_staleness(self) -> str:
        return processes.first(lambda: self._source.reduce_staleness())

    def release_cache(self) -> None:
        """Does nothing: the caches are the workers'."""

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the state on process 0, which writes it."""
        return {} if self._source is None else self._source.get_state(version)

    def set_state(self, state: dict[str, Any]) -> None:
        if self._source is not None:
            self._source.set_state(state)

    def sync_digest(self) -> dict[str, Any]:
        return {}  # the others have no state

    def close(self, is_over: bool) -> None:
        """Ends the connections, that of process 0 last: it may end Ray itself."""
        if self._source is None and self._address is not None:
            ray.shutdown()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a process is gone
            processes.meet("the end of Ray", CLOSE_SECONDS)
        if self._source is not None:
            self._source.close(is_over)
