"""The driver "ray": samplers are Ray actors, on this machine or others.

Each worker has a thread here, which waits for its reports under no lock. Commands are sent without
waiting. The learner's own thread waits for workers only where a third version of the weights would
enter the object store. Workers report the tokens of unfinished sequences, and others continue from
there when a worker is lost: dead, silent for `rollout.worker_timeout` seconds, or restarted because
it reported what cannot be. Ray restarts lost workers.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import ray

from jaxrl_tis.engine.drafter import Drafting
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.weights import moving
from jaxrl_tis.rollouts import ray_cluster, record_check
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping
from jaxrl_tis.rollouts.concurrent import PULSE_SECONDS, ConcurrentSource, Shared
from jaxrl_tis.rollouts.controller import Decision, Interrupt, SyncWeights
from jaxrl_tis.rollouts.queue import Key
from jaxrl_tis.rollouts.ray_worker import Event, Joined, RolloutWorker, Sync, pieces
from jaxrl_tis.rollouts.sampler import Command, NewRequests
from jaxrl_tis.rollouts.source import SourceParts
from jaxrl_tis.runtime import fingerprint, processes
from jaxrl_tis.runtime.cli import Interrupted, Unwritable

MAX_RESTARTS = 100  # of a worker, beside those for which a node was preempted
LOOK_SECONDS, END_SECONDS, TELL_SECONDS = 2.0, 5.0, 30.0
JOIN_SECONDS = 30.0  # until a worker that was interrupted while it was built is built again


class Invalid(ValueError):
    """A worker reported what cannot be."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The serving parameters of a version in the object store: references to the `pieces` of each
    process of the learner, and the fingerprint of the tree. With LoRA these are the factors, and the
    `base` of all versions is (references, fingerprint). A drafter that is trained is (version of the drafter,
    fingerprint, references)."""

    version: int
    refs: tuple[ray.ObjectRef, ...]
    fingerprint: str
    base: tuple[tuple[ray.ObjectRef, ...], str] | None = None
    drafter: tuple[int, str, tuple[ray.ObjectRef, ...]] | None = None


@dataclasses.dataclass
class Session:
    """A worker that has joined, until it is lost.

    Attributes:
      given: by request, of what it samples: the request as it was given, and the version of the
        weights that the worker had then.
      progress: the reported tokens of these sequences.
      calls: unanswered calls, with the version of the weights that each reads.
      stats: counts of its sampler, as last reported.
    """

    name: str
    actor: Any
    id: str
    given: dict[str, tuple[Request, int]] = dataclasses.field(default_factory=dict)
    progress: dict[Key, Trajectory] = dataclasses.field(default_factory=dict)
    calls: dict[ray.ObjectRef, int | None] = dataclasses.field(default_factory=dict)
    stats: Stats = dataclasses.field(default_factory=Stats)


class Reports:
    """Hands on to the books what workers report. Callers hold the lock of the books."""

    def __init__(self, books: AsyncBookkeeping, engine: Engine, retention: KVEviction | None):
        self._books, self._engine, self._retention = books, engine, retention

    def take(self, session: Session, events: list[Event], stats: Stats) -> None:
        """Takes what a worker reports; Invalid where it cannot be."""
        if {type(e) for e in events} - {Event} or type(stats) is not Stats:
            raise Invalid("its report is not one of events and counts")
        for event in events:
            if event.kind == "synced":
                self._synced(session, event.value)
            else:
                self._took(session, event.value, event.kind == "partial")
        session.stats = stats

    def _synced(self, session: Session, version: int) -> None:
        controller = self._books.controller
        worker = controller.workers[session.name]
        oldest = -1 if worker.version is None else worker.version
        newest = -1 if controller.sync_version is None else controller.sync_version
        is_told = worker.is_syncing and type(version) is int
        if not (is_told and oldest < version <= newest):
            raise Invalid(f"it uses weights of version {version!r}, to which it was not to sync")
        self._books.synced(session.name, version)

    def _took(self, session: Session, record: Trajectory, is_partial: bool) -> None:
        id = getattr(record, "id", None)
        if not (isinstance(id, str) and id in session.given):
            why = record_check.malformed(record) or f"it has sampled {id!r}, which it was not given"
            raise Invalid(why)
        request, oldest = session.given[id]
        newest = self._books.controller.workers[session.name].version
        assert newest is not None
        is_episode = request.example is not None
        problem = record_check.problem(
            record, request, self._engine, oldest, newest, is_episode, self._retention
        )
        if problem:
            raise Invalid(problem)
        # Arrays of the object store are read-only, and would stay there.
        arrays: dict[str, Any] = {
            n: x.copy() for n, x in vars(record).items() if isinstance(x, np.ndarray)
        }
        record, key = dataclasses.replace(record, **arrays), self._books.keys[id]
        if is_partial:
            if record.stop_reason != "abort":
                raise Invalid(f"{id} continues, and has ended by {record.stop_reason!r}")
            session.progress[key] = record
            return
        del session.given[id]
        session.progress.pop(key, None)
        self._books.receive(session.name, [record])


def _put(served: Any) -> tuple[ray.ObjectRef, ...]:
    return (ray.put(pieces(served)),)


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _stored_bytes(served: Any) -> int:
    """Returns the bytes of two versions of the weights; with LoRA of the base and two versions of the
    factors."""
    moved, base = moving(served)
    return 2 * _num_bytes(moved) + _num_bytes(base)


def ray_source(
    parts: SourceParts, engine: Engine, served: Any, facts: Mapping[str, Any], build: Callable,
    address: str | None = None, put: Callable[[Any], tuple[ray.ObjectRef, ...]] = _put,
    drafting: Drafting | None = None,
) -> ConcurrentSource:
    """Makes a source whose samplers are Ray actors.

    Args:
      engine: of the workers; their records must fit it.
      served: the serving parameters, maybe as shapes alone.
      facts: the values that must be the same at a worker, by name.
      build: see `RolloutWorker`.
      address: that `ray_cluster.connect` returned; without one the connection stays when the source
        is closed.
      put: serving parameters -> references to their pieces in the object store.
      drafting: the drafter, where the learner trains it.

    Raises:
      ValueError: the cluster lacks resources or memory.
    """
    shared = Shared(AsyncBookkeeping(parts))
    driver = RayDriver(parts, shared, engine, served, facts, build, address, put, drafting)
    return ConcurrentSource(parts, shared, driver)


def _check_facts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises ValueError where a worker differs from the learner."""
    for field in sorted(ours.keys() | theirs.keys()):
        if ours.get(field) != theirs.get(field):
            raise ValueError(
                f"{field}: learner {ours.get(field)!r}, worker {theirs.get(field)!r}; install the "
                "same code and packages on all nodes, and the same model files"
            )


class RayDriver:
    """Workers and a thread for each, see `ray_source`."""

    def __init__(
        self, parts: SourceParts, shared: Shared, engine: Engine, served: Any,
        facts: Mapping[str, Any], build: Callable, address: str | None, put: Callable,
        drafting: Drafting | None = None,
    ):
        config = parts.config
        self._rollout, self._shared, self._engine = config.rollout, shared, engine
        self._books, self._changed, self._heartbeat = shared.books, shared.changed, parts.heartbeat
        retention = KVEviction.of(config.engine)
        self._facts, self._reports = facts, Reports(shared.books, engine, retention)
        self._stored_bytes = _stored_bytes(served)
        self._drafting = drafting
        if drafting is not None:
            self._stored_bytes += 2 * _num_bytes(drafting.engine.abstract_params())
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}  # workers that do not come back, with the reason
        self._newest: Any = None  # Weights, once some are published
        # As it is served, so that it is quantised once, and in the object store.
        self._base: tuple[Any, tuple[tuple[ray.ObjectRef, ...], str]] | None = None
        self._is_closed, self._gone, self._left, self._evicted = False, Stats(), 0, 0
        self._since = self._said_at = self._looked_at = time.monotonic()
        self._has_joined = False
        self._address, self._put = address, put
        try:
            self._check_cluster()
        except ValueError:
            self._disconnect()
            raise
        wanted = ray_cluster.wanted(self._rollout)
        cpus, gpus = wanted.pop("CPU", 0), wanted.pop("GPU", 0)
        options: dict[str, Any] = dict(
            num_cpus=cpus, num_gpus=gpus, resources=wanted, max_restarts=MAX_RESTARTS,
            concurrency_groups={"receive": 1, "report": 1, "sync": 1},
        )
        actor: Any = ray.remote(**options)(RolloutWorker)
        self._actors = {
            f"{i}": actor.remote(build, config.to_dict(), bool(gpus or wanted))
            for i in range(self._rollout.workers)
        }
        self._threads = [
            threading.Thread(target=self._guarded, args=(name,), daemon=True)
            for name in self._actors
        ]
        for thread in self._threads:
            thread.start()

    def _check_cluster(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        self._services = ray_cluster.services(node)
        if why := ray_cluster.small_store(node, self._stored_bytes):
            raise ValueError(why)
        for _ in ray_cluster.awaited(self._rollout, self._address):
            self._heartbeat()

    def _disconnect(self) -> None:
        if self._address is not None:
            ray.shutdown()

    # The learner's thread

    def send(self, served: Any, version: int) -> Weights:
        moved, base = moving(served)
        sent = fingerprint.hex(fingerprint.digest(moved))
        self._await_room()
        self.look()  # without the node's Ray, `put` would end this process
        try:
            if base is not None and self._base is None:
                digest = fingerprint.hex(fingerprint.digest(base))
                self._base = base, (self._put(base), digest)
            of_base = None if self._base is None else self._base[1]
            return Weights(version, self._put(moved), sent, of_base, self._drafter())
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            size = _num_bytes(moved if self._base is not None else (moved, base))
            raise Unwritable(
                f"Ray's object store has no room for version {version} of the weights, "
                f"{size / 2**20:.0f} MiB; free memory or the disk of /tmp/ray. The same command "
                "continues the run"
            ) from error

    def _drafter(self) -> tuple[int, str, tuple[ray.ObjectRef, ...]] | None:
        """Returns `Weights.drafter`: what is in the object store already, until the drafter changes."""
        if self._drafting is None:
            return None
        (params, version), sent = self._drafting.served, self._newest and self._newest.drafter
        if sent and sent[0] == version:
            return sent
        return version, fingerprint.hex(fingerprint.digest(params)), self._put(params)

    def _await_room(self) -> None:
        """Waits until the object store has at most one version."""
        while True:
            with self._changed:
                self._shared.check()
                read = {v for s in self._sessions.values() for v in s.calls.values()} - {None}
                if self._newest is None or read <= {self._newest.version}:
                    return
                self._changed.wait(PULSE_SECONDS)
            self._heartbeat()

    def look(self) -> None:
        """Raises Interrupted where Ray does not answer: on the head, or on this machine."""
        self._looked_at = time.monotonic()
        if why := ray_cluster.unreachable(self._services):
            processes.report(f"{why}; the same command continues the run with another Ray")
            raise Interrupted(why)

    def sync(self, weights: Weights, version: int) -> None:
        self._newest = weights
        for session in self._sessions.values():
            self._sync_worker(session)

    def check(self) -> None:
        """Reports from time to time that no worker is there.

        Raises:
          Interrupted: Ray has gone.
          ValueError: none has started within rollout.start_timeout seconds.
          RuntimeError: none comes back.
        """
        now, count = time.monotonic(), len(self._actors)
        if now - self._looked_at > LOOK_SECONDS:
            self.look()
        if self._sessions:
            return
        if len(self._ended) == count:
            kind = RuntimeError if self._has_joined else ValueError
            raise kind(f"no rollout worker is left: {'; '.join(sorted(set(self._ended.values())))}")
        if not self._has_joined and now - self._since > self._rollout.start_timeout:
            raise ValueError(
                f"no rollout worker has started within rollout.start_timeout = "
                f"{self._rollout.start_timeout:g} s; raise it, or read the logs of Ray: other jobs may "
                "hold the resources"
            )
        if now - self._said_at > TELL_SECONDS:
            processes.report(f"no rollout worker is there; {count - len(self._ended)} are starting")
            self._said_at = now

    def metrics(self, seconds: float, syncs: int) -> dict[str, float]:
        left, evicted, self._left, self._evicted = self._left, self._evicted, 0, 0
        return {
            "async/workers": len(self._sessions), "async/left": left,
            "async/workers_evicted": evicted,
        }

    def release_cache(self) -> None:
        """Does nothing: the caches are the workers'."""

    def pause(self) -> None:
        """Does nothing: workers continue. A restart begins their sequences again, from the tokens
        that they reported."""

    def in_flight(self) -> Mapping[Key, Trajectory]:
        return {k: t for s in self._sessions.values() for k, t in s.progress.items()}

    def close(self, is_over: bool) -> None:
        """Ends the workers, and a Ray that this driver started."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for actor in self._actors.values():
            ray.kill(actor)
        for thread in self._threads:
            thread.join(END_SECONDS)  # without a head, Ray lets it wait for ever
        self._disconnect()

    def stats(self) -> Stats:
        return Stats.sum([self._gone, *(s.stats for s in self._sessions.values())])

    def decide(self) -> None:
        try:
            while decisions := self._books.controller.decisions():
                for decision in decisions:
                    session = self._sessions[decision.worker]
                    follows = isinstance(decision, (SyncWeights, Interrupt))
                    wanted = self._newest.version if follows else None
                    command = self._command(session, decision)
                    call = session.actor.receive.remote(session.id, command, wanted)
                    session.calls[call] = None
        except Exception as error:  # a command is lost: the run cannot continue
            self._shared.error = error
            raise
        finally:
            self._changed.notify_all()

    def _command(self, session: Session, decision: Decision) -> Sync | Command:
        if isinstance(decision, SyncWeights):
            return Sync()
        command = self._books.command(decision)
        if isinstance(command, NewRequests):
            version = self._books.controller.workers[session.name].version
            assert version is not None  # requests go to workers with weights
            for request in command.requests:
                session.given[request.id] = request, version
                if request.partial is not None:
                    session.progress[self._books.keys[request.id]] = request.partial
        return command

    def _sync_worker(self, session: Session) -> None:
        new = self._newest
        what = session.id, new.version, new.fingerprint, new.refs, new.base, new.drafter
        session.calls[session.actor.sync.remote(*what)] = new.version

    # Threads of workers

    def _guarded(self, name: str) -> None:
        try:
            self._run(name)
        except Exception as error:  # a mistake of ours, which the learner's thread raises
            with self._changed:
                self._shared.error = self._shared.error or error
                self._changed.notify_all()

    def _run(self, name: str) -> None:
        """Serves a worker, and all that Ray starts in its place."""
        actor = self._actors[name]
        while not self._is_closed:
            try:
                ray.get(actor.__ray_ready__.remote())  # a node has room for it
                joined = ray.get(actor.join.remote(), timeout=self._rollout.start_timeout)
                session = self._join(name, joined)
            except ray.exceptions.ActorUnavailableError:
                time.sleep(ray_cluster.RETRY_SECONDS)  # it is starting again
                continue
            except ray.exceptions.GetTimeoutError:
                processes.report(f"rollout worker {name} builds no engine in time, and starts again")
                ray.kill(actor, no_restart=False)
                continue
            except (ray.exceptions.RayError, ValueError) as error:
                cause = getattr(error, "cause", None)
                if not isinstance(cause, Interrupted):
                    self._end(name, actor, error)
                    return
                processes.report(f"rollout worker {name} starts again: {cause}")
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, JOIN_SECONDS)
                ray.kill(actor, no_restart=False)
                continue
            why, is_alive = self._serve(session)
            self._leave(session, why)
            if is_alive and not self._is_closed:
                ray.kill(actor, no_restart=False)

    def _join(self, name: str, joined: Joined) -> Session:
        _check_facts(self._facts, joined.facts)
        if why := ray_cluster.small_store(joined.node, self._stored_bytes):
            raise ValueError(why)
        with self._changed:
            session = self._sessions[name] = Session(name, self._actors[name], joined.session)
            self._has_joined = True
            self._books.controller.joined(name, self._engine.slots)
            if self._newest is not None:
                self._sync_worker(session)
            self.decide()
        processes.report(f"rollout worker {name} joined on node {joined.node[:8]}")
        return session

    def _end(self, name: str, actor: Any, error: Exception) -> None:
        """Gives a worker up that Ray does not start again, or that cannot be used."""
        if self._is_closed:
            return
        ray.kill(actor)
        cause = getattr(error, "cause", None) or error
        why = (f"{cause}".strip().splitlines() or [type(cause).__name__])[-1]
        processes.report(f"rollout worker {name} was refused: {why}")
        with self._changed:
            self._ended[name] = why
            self._changed.notify_all()

    def _serve(self, session: Session) -> tuple[str, bool]:
        """Takes a worker's reports until it is lost. Returns the reason, and whether its process may
        still be alive."""
        try:
            while not self._is_closed:
                reported = ray.get(
                    session.actor.report.remote(session.id), timeout=self._rollout.worker_timeout
                )
                with self._changed:
                    self._reports.take(session, *reported)
                    self.decide()
                    calls = list(session.calls)
                done = ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []
                ray.get(done)  # raises what went wrong
                with self._changed:
                    for call in done:
                        del session.calls[call]
        except Invalid as error:
            with self._changed:
                self._evicted += 1
            return f"evicted: {error}", True
        except ray.exceptions.GetTimeoutError:
            return f"silent for {self._rollout.worker_timeout:g} s", True
        except ray.exceptions.RayActorError as error:
            return f"its process is gone ({type(error).__name__})", False
        except ray.exceptions.RayError as error:  # an error within the worker
            return f"failed: {str(getattr(error, 'cause', error))[:400]}", True
        return "the run has ended", False

    def _leave(self, session: Session, why: str) -> None:
        """Lets others continue what a worker sampled."""
        with self._changed:
            del self._sessions[session.name]
            self._gone, self._left = Stats.sum([self._gone, session.stats]), self._left + 1
            known = self._books.lost(session.name, session.given, session.progress)
            self._said_at = time.monotonic()
            if not self._is_closed:
                self.decide()
        if not self._is_closed:
            processes.report(
                f"rollout worker {session.name} is lost; {len(session.given)} sequences continue "
                f"elsewhere, {known} of them from reported tokens. The reason: {why}"
            )
