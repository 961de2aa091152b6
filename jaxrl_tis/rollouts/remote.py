"""The driver "processes": samplers in processes of their own, which come and go.

The learner listens; `python -m jaxrl_tis.worker` joins, on this machine or another. Each worker has a
thread here that receives its reports and answers with commands, under one lock. The learner's own
thread touches no socket, and so waits for no worker. The parts of sequences that a worker reported
are kept, so that others continue from there when it is gone: dead, silent for
`rollout.worker_timeout` seconds, or evicted because it reported what cannot be.
"""

import contextlib
import dataclasses
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ml_collections

from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import messages, tcp, transport, verify, wire
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping
from jaxrl_tis.rollouts.concurrent import ConcurrentSource, Shared
from jaxrl_tis.rollouts.controller import Decision, SyncWeights
from jaxrl_tis.rollouts.queue import Key
from jaxrl_tis.rollouts.sampler import NewRequests
from jaxrl_tis.rollouts.source import SourceParts
from jaxrl_tis.runtime import addresses, fingerprint, processes, storage

TOKEN = "JAXRL_TIS_TOKEN"
NO_TOKEN = "anybody on this machine"
TELL_SECONDS, END_SECONDS = 30.0, 10.0
MOST_SLOTS = 1 << 16


class Lie(wire.Damaged):
    """A worker said what cannot be."""


def read_token(host: str) -> str:
    """Returns the secret that learner and workers share; ValueError where others reach the address and
    there is none."""
    if TOKEN in os.environ:
        return tcp.checked_token(os.environ[TOKEN], f"the token in {TOKEN}")
    if not addresses.is_loopback(host):
        raise ValueError(
            f"{host} is reached from other machines: set {TOKEN} to the same secret for the learner and "
            "its workers"
        )
    return NO_TOKEN


@dataclasses.dataclass
class Session:
    """A worker that is there.

    Attributes:
      inbox: commands that were not sent to it yet.
      given: by request, of what it draws: the request as it was given, and the version of the weights
        that it had then.
      progress: what it said that there is of them.
      stats: of its scheduler, as it last said.
    """

    name: str
    connection: socket.socket
    inbox: list[messages.Told] = dataclasses.field(default_factory=list)
    given: dict[str, tuple[Request, int]] = dataclasses.field(default_factory=dict)
    progress: dict[Key, Trajectory] = dataclasses.field(default_factory=dict)
    stats: Stats = dataclasses.field(default_factory=Stats)


def remote_source(
    parts: SourceParts, engine: Engine, facts: Mapping[str, Any]
) -> ConcurrentSource:
    """Makes a source whose samplers are processes that join over sockets.

    Args:
      engine: that workers sample with, which their records have to fit.
      facts: what has to be the same there, by name.
    """
    shared = Shared(AsyncBookkeeping(parts))
    return ConcurrentSource(parts, shared, RemoteDriver(parts.config, shared, engine, facts))


class RemoteDriver:
    """Workers that are there, and a thread for each, see `remote_source`."""

    def __init__(
        self, config: ml_collections.ConfigDict, shared: Shared, engine: Engine,
        facts: Mapping[str, Any],
    ):
        if not processes.is_alone():
            raise ValueError("rollout.driver = 'processes' is for a learner of one process")
        self._config, self._shared = config, shared
        self._books, self._changed = shared.books, shared.changed
        self._engine, self._timeout = engine, config.rollout.worker_timeout
        self._sessions: dict[str, Session] = {}
        self._fingerprint: str | None = None  # of the weights of `sync_version`
        self._is_over = self._is_closed = False
        self._gone, self._left, self._evicted = Stats(), 0, 0
        self._said_at = time.monotonic()
        self._facts = tcp.all_facts(facts)
        host, port = addresses.parse(config.rollout.listen)
        self._token = read_token(host)
        try:
            self._listener = tcp.Listener((host, port), self._answer)
        except OSError as error:
            raise ValueError(
                f"cannot listen at rollout.listen = {config.rollout.listen!r}: {error.strerror}; "
                f"{tcp.advice(error)}"
            ) from error
        try:
            self._open_weights(host, facts)
        except ValueError:
            self._listener.server_close()
            raise
        self.host, self.port = self._listener.server_address[:2]
        threading.Thread(target=self._listener.serve_forever, args=(0.1,), daemon=True).start()
        processes.report(f"rollout workers join at {self.host}:{self.port}")

    def _open_weights(self, host: str, facts: Mapping[str, Any]) -> None:
        """Opens the transport of weights, and says where workers find them."""
        where = self._config.rollout.transport
        if where == "tcp":
            self._weights = tcp.WeightServer(self._token, facts, host)
            self._where = {"port": self._weights.port, "path": None}
        else:
            path = storage.folder(where) / uuid.uuid4().hex[:16]
            try:
                path.mkdir(parents=True)
            except OSError as error:
                raise ValueError(
                    f"cannot write to rollout.transport = {where!r}: {error.strerror}; give tcp, or a "
                    "folder that the learner and all workers share"
                ) from error
            self._weights = transport.Directory(path)
            self._where = {"port": None, "path": str(path)}

    def _close_weights(self) -> None:
        if isinstance(self._weights, tcp.WeightServer):
            self._weights.__exit__()
        else:
            storage.folder(self._where["path"]).rmtree(missing_ok=True)

    # The learner's thread

    def stage(self, served: Any, version: int) -> str:
        self._weights.publish(served, version, transport.tree_digest(served))
        return fingerprint.hex(fingerprint.digest(served))

    def publish(self, staged: str, version: int) -> None:
        self._fingerprint = staged

    def check(self) -> None:
        """Says from time to time that no worker is there."""
        now = time.monotonic()
        if not self._sessions and now - self._said_at > TELL_SECONDS:
            processes.report(f"no rollout worker is there; they join at {self.host}:{self.port}")
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
        """Does nothing: workers continue. A restart begins their sequences again, from the parts
        that they reported."""

    def in_flight(self) -> Mapping[Key, Trajectory]:
        return {k: t for s in self._sessions.values() for k, t in s.progress.items()}

    def close(self, is_over: bool) -> None:
        """Sends the workers home where the run is over; else they are to look for it again."""
        with self._changed:
            self._is_over, self._is_closed = is_over, True
            if is_over:
                self._changed.wait_for(lambda: not self._sessions, END_SECONDS)
            for session in self._sessions.values():
                with contextlib.suppress(OSError):  # it is gone
                    session.connection.shutdown(socket.SHUT_RDWR)
        self._listener.shutdown()
        self._listener.server_close()
        self._close_weights()

    def stats(self) -> Stats:
        return Stats.sum([self._gone, *(s.stats for s in self._sessions.values())])

    def decide(self) -> None:
        try:
            while decisions := self._books.controller.decisions():
                for decision in decisions:
                    session = self._sessions[decision.worker]
                    session.inbox.append(self._told_of(session, decision))
        except Exception as error:  # a command is lost: the run cannot continue
            self._shared.error = error
            raise
        finally:
            self._changed.notify_all()

    def _told_of(self, session: Session, decision: Decision) -> messages.Told:
        if isinstance(decision, SyncWeights):
            return messages.SyncTo(decision.version)
        command = self._books.command(decision)
        if isinstance(command, NewRequests):
            version = self._books.controller.workers[session.name].version
            for request in command.requests:
                session.given[request.id] = request, version
                if request.partial is not None:
                    session.progress[self._books.keys[request.id]] = request.partial
        return command

    # Threads of workers

    def _answer(self, connection: socket.socket) -> None:
        try:
            peer = tcp.Peer(connection, self._timeout, math.inf)
            try:
                tcp.admit(peer, self._token, self._facts)
                session = self._join(peer, connection)
            except (tcp.Refused, transport.Unavailable) as error:
                processes.report(f"a rollout worker was refused: {error}")
                peer.tell(refused=str(error), for_now=isinstance(error, transport.Unavailable))
                return
            self._serve(peer, session)
        except (OSError, wire.Damaged):
            pass  # before it joined

    def _join(self, peer: tcp.Peer, connection: socket.socket) -> Session:
        told = peer.hear("name", "slots")
        name, slots = told["name"], told["slots"]
        if not (isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()):
            raise tcp.Refused("the worker's name has to be 1 to 200 printable characters")
        if not (type(slots) is int and 0 < slots <= MOST_SLOTS):
            raise tcp.Refused(f"a worker with {slots!r} slots; give 1 to {MOST_SLOTS}")
        with self._changed:
            if name in self._sessions:
                raise transport.Unavailable(f"a worker named {name!r} is there already")
            if self._is_closed:
                raise transport.Unavailable("the learner is ending")
            session = self._sessions[name] = Session(name, connection)
            self._books.controller.joined(name, slots)
            self.decide()
        processes.report(f"rollout worker {name} joined")
        return session

    def _serve(self, peer: tcp.Peer, session: Session) -> None:
        why = "it is over"
        try:
            peer.tell(**self._where)
            while not (reply := self._heard(peer, session)).is_over:
                peer.send(messages.pack_reply(reply))
            peer.send(messages.pack_reply(reply))
        except wire.Damaged as error:
            why = f"evicted: {error}"
            with self._changed:
                self._evicted += 1
        except OSError as error:
            why = f"lost: {error}"
        except Exception as error:  # a mistake of ours, which the learner's thread raises
            self._shared.error = error
            raise
        finally:
            self._leave(session, why)

    def _heard(self, peer: tcp.Peer, session: Session) -> messages.Reply:
        """Waits for a report, and returns what to say to it."""
        events, stats = messages.read_report(peer.receive(messages.MESSAGE_BYTES))
        with self._changed:
            for event in events:
                self._happened(session, event)
            session.stats = stats
            self.decide()
            commands, session.inbox = messages.fitting(session.inbox)
            version = None if self._fingerprint is None else self._books.controller.sync_version
            return messages.Reply(tuple(commands), version, self._fingerprint, self._is_over)

    def _happened(self, session: Session, event: messages.Event) -> None:
        """Takes what a worker said; Lie where it cannot be."""
        controller = self._books.controller
        worker = controller.workers[session.name]
        if isinstance(event, messages.Synced):
            oldest = -1 if worker.version is None else worker.version
            if not (worker.is_syncing and oldest < event.version <= controller.sync_version):
                raise Lie(f"it has weights of version {event.version}, to which it was not to sync")
            self._books.synced(session.name, event.version)
            return
        record = event.trajectory
        if record.id not in session.given:
            raise Lie(f"it has drawn {record.id}, which it was not given")
        request, oldest = session.given[record.id]
        if why := verify.problem(record, request, self._engine, oldest, worker.version):
            raise Lie(why)
        key = self._books.keys[record.id]
        if isinstance(event, messages.Partial):
            if record.stop_reason != "abort":
                raise Lie(f"{record.id} goes on, and has ended by {record.stop_reason!r}")
            session.progress[key] = record
            return
        del session.given[record.id]
        session.progress.pop(key, None)
        self._books.receive(session.name, [record])

    def _leave(self, session: Session, why: str) -> None:
        """Lets others go on with what a worker drew."""
        with self._changed:
            del self._sessions[session.name]
            self._gone, self._left = Stats.sum([self._gone, session.stats]), self._left + 1
            known = self._books.lost(session.name, session.given, session.progress)
            self._said_at = time.monotonic()
            self.decide()
        processes.report(
            f"rollout worker {session.name} left, {why}; {len(session.given)} sequences go on "
            f"elsewhere, {known} of them from what there is"
        )
