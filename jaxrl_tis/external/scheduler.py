"""A scheduler whose engines are of others: the interface of `engine.scheduler.Scheduler`, over HTTP.

Requests go to the engine with the fewest of them, each in a thread that waits for its answer. An engine
that does not answer, or fails to load weights, is out: its requests begin again elsewhere, and it is
asked at each later sync whether it is back. It samples again once it has the newest weights, and no
engine ever samples with weights that this scheduler did not give it.
"""

import contextlib
import dataclasses
import functools
import math
import queue
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging

from jaxrl_tis.engine import request_check
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory, extended
from jaxrl_tis.engine.scheduler import PAUSES
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.external.client import EngineError
from jaxrl_tis.external.protocol import Answer, Kind
from jaxrl_tis.external.weights import Version
from jaxrl_tis.fields import DRAWN, route_dtype

POLL_SECONDS = 0.05  # of a step without an answer, after which the caller may act
LOST_SECONDS = 600.0  # without any engine, after which a run ends


@dataclasses.dataclass
class Member:
    """An engine and what it works on.

    Attributes:
      version: of the weights that it was given; None while it is out.
      live: ids of its requests.
      adapter: the name of its adapter.
    """

    url: str
    kind: Kind
    version: int | None = None
    live: set[str] = dataclasses.field(default_factory=set)
    adapter: str | None = None


@dataclasses.dataclass
class Sent:
    """A request in work: the engine, its version when it began, and since when the keys of the request
    are of newer weights: (version, sampled tokens by then) of each sync."""

    request: Request
    member: Member
    version: int


class ExternalScheduler:
    """Samples by engines of others. Its methods are those of `engine.scheduler.Scheduler`.

    Args:
      members: one for each engine.
      engine: of this run's config, which says what a request may ask for and how records are laid out.
      served, version: the weights to begin with.
      check: called with each engine after it has loaded weights; raises where it samples from others.
      slots: requests of an engine at once.
    """

    def __init__(
        self, members: Sequence[Member], engine: EngineProtocol, served: Version, version: int,
        check: Callable[[Kind, Version, str | None], None], slots: int,
    ):
        self.stats = Stats()
        self._members, self._engine, self._check = members, engine, check
        self._slots, self._served, self._version = slots, served, version
        self._waiting: dict[str, Request] = {}
        self._sent: dict[str, Sent] = {}
        self._ended: list[Trajectory] = []
        self._answers: queue.SimpleQueue[tuple[str, Sent, Answer | BaseException]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(slots * len(members), "request")
        self._syncs = ThreadPoolExecutor(len(members), "sync")
        self._without_since: float | None = None
        self.set_params(served, version)

    # For callers

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._sent) + len(self._ended)

    def add(self, request: Request) -> None:
        live = self._waiting.keys() | self._sent.keys()
        request_check.check(request, self._engine, live, can_decode=True)
        self._waiting[request.id] = request

    def extend(
        self, ended: Trajectory, tokens: list[int] | np.ndarray, sampling: SamplingParams
    ) -> None:
        partial = extended(ended, tokens)
        request_check.check_extension(partial, sampling, self._engine)
        self.add(Request(ended.id, ended.prompt, ended.seed, sampling, partial))

    def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            request = self._waiting.pop(request_id)
            self._ended.append(self._record(request, None, self._version))
        elif request_id in self._sent:
            self._abort([request_id])
        else:
            raise KeyError(f"no live request has the id {request_id!r}")

    def pause(self, mode: str) -> list[Trajectory]:
        if mode not in PAUSES:
            raise ValueError(f"pause mode {mode!r} is none of {', '.join(PAUSES)}")
        if mode != "abort":
            return []
        for id in [*self._waiting]:
            self.abort(id)
        self._abort([*self._sent])
        while self._sent:
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def set_params(self, served: Version, version: int) -> None:
        """Gives all engines these weights, at the same time. Those that fail are out, and those that were
        out are tried again."""
        self._served, self._version = served, version
        tasks = {m.url: self._syncs.submit(self._sync, m) for m in self._members}
        for member in self._members:
            try:
                tasks[member.url].result()
            except EngineError as error:
                self._lose(member, error)
        self._check_any()

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        return {}

    def records(self) -> list[Trajectory]:
        return []

    def sync_digest(self) -> dict[str, Any]:
        return {"live": sorted(self._waiting.keys() | self._sent.keys())}

    def release_cache(self) -> None:
        if self.pending:
            raise ValueError(f"{self.pending} requests are pending; step until there are none")

    def sleep(self) -> None:
        self.release_cache()

    def close(self) -> None:
        self._abort([*self._sent])
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._syncs.shutdown()
        for member in self._members:
            member.kind.close()

    def step(self) -> list[Trajectory]:
        """Sends waiting requests to engines with room, waits shortly for an answer, and returns what
        ended."""
        start = time.perf_counter()
        self._check_any()
        self._send()
        if not self._ended:
            self._collect(POLL_SECONDS)
        ended, self._ended = self._ended, []
        self.stats.seconds += time.perf_counter() - start
        self.stats.engine_seconds = self.stats.seconds
        return ended

    # Engines

    def _sync(self, member: Member) -> None:
        """Gives an engine the newest weights, and checks that it samples from them."""
        kind, served = member.kind, self._served
        kind.pause()
        try:
            if served.adapter is None:
                kind.load(served.path, self._version)
            else:
                kind.load_adapter(served.adapter, served.path, member.adapter)
                member.adapter = served.adapter
        finally:
            kind.resume()
        if (found := kind.version()) != self._version:
            raise EngineError(
                f"{member.url} says that its weights are of version {found}, and it was given "
                f"{self._version}"
            )
        self._check(kind, served, member.adapter)
        member.version = self._version

    def _lose(self, member: Member, error: BaseException) -> None:
        """Takes an engine out, and its requests back."""
        logging.warning("the engine at %s is out: %s", member.url, error)
        member.version = None
        for id in [*member.live]:
            self._waiting[id] = self._sent.pop(id).request
        member.live.clear()

    def _check_any(self) -> None:
        """Raises EngineError once there has been no engine for LOST_SECONDS; until then tries again."""
        if any(member.version is not None for member in self._members):
            self._without_since = None
            return
        now = time.monotonic()
        if self._without_since is None:
            self._without_since = now
        ...
