"""A rollout worker's end: a sampler that a learner in another process commands.

Three threads. The main one alone uses the sampler: it executes commands and makes calls of the
engine. One talks to the learner, several times a second, however long a call takes. One fetches
weights while older ones still sample. Commands that came with new weights wait until these are there, so that
sequences are interrupted for no longer than it takes to replace one tree by another.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import messages, tcp, transport, wire
from jaxrl_tis.rollouts.sampler import Command, Preempt, Sampler, SetParams
from jaxrl_tis.runtime import fingerprint, processes

TALK_SECONDS = 0.02  # between two reports
RETRY_SECONDS = 0.2
TELL_SECONDS = 30.0


class LearnerLost(ConnectionError):
    """The learner is gone, or does not want this worker now; it may be back later."""


class RolloutWorker:
    """Draws for a learner until that says that the run is over.

    Args:
      address: (host, port) of the learner.
      token, facts: see tcp.WeightServer.
      name: of the worker, unique among the learner's.
      slots: sequences that it draws at once.
      like: shapes of the serving parameters, with their shardings.
      start: (serving parameters, version) -> a scheduler.
      timeout: seconds for a message.
      partial_seconds: between two reports of what there is of all sequences.
    """

    def __init__(
        self, address: tuple[str, int], token: str, facts: Mapping[str, Any], name: str, slots: int,
        like: Any, start: Callable[[Any, int], Scheduler], timeout: float = 30.0,
        partial_seconds: float = 1.0,
    ):
        self._address, self._token, self._facts = address, token, facts
        self._name, self._slots, self._like, self._timeout = name, slots, like, timeout
        self._sampler, self._partial_seconds = Sampler(start), partial_seconds
        self._changed = threading.Condition()
        self._events: list[messages.Event] = []
        self._stats = Stats()
        self._held: list[messages.Told] = []  # commands that wait for weights
        self._inbox: list[Command] = []
        self._sync_version: int | None = None
        self._wanted = -1  # the version that commands wait for
        self._sent: str | None = None  # the fingerprint of that version
        self._fetched: SetParams | None = None
        self._is_over, self._error = False, None
        self._reported, self._lengths = time.monotonic(), {}

    def run(self) -> None:
        """Draws; returns once the run is over.

        Raises:
          Refused: token, code, packages or facts differ from the learner's.
          LearnerLost: it cannot be reached any more, or not now.
        """
        with contextlib.ExitStack() as stack:
            peer, weights = self._join(stack)
            threads = [
                threading.Thread(target=self._guarded, args=(self._talk, peer), daemon=True),
                threading.Thread(target=self._guarded, args=(self._fetch, weights), daemon=True),
            ]
            for thread in threads:
                thread.start()
            try:
                while (commands := self._commands()) is not None:
                    self._work(commands)
            finally:
                self._end()
                for thread in threads:
                    thread.join()
        if self._error is not None:
            raise self._error

    def _join(self, stack: contextlib.ExitStack) -> tuple[tcp.Peer, transport.WeightTransport]:
        """Returns the connection, and where weights come from."""
        try:
            connection = stack.enter_context(socket.create_connection(self._address, self._timeout))
            peer = tcp.Peer(connection, self._timeout, math.inf)
            tcp.introduce(peer, self._token, tcp.all_facts(self._facts))
            peer.tell(name=self._name, slots=self._slots)
            where = peer.hear("port", "path")
        except (OSError, wire.Damaged, transport.Unavailable) as error:
            host, port = self._address
            raise LearnerLost(f"learner at {host}:{port}: {error}") from error
        if where["path"] is not None:
            return peer, transport.Directory(where["path"])
        return peer, tcp.WeightClient(self._address[0], where["port"], self._token, self._facts)

    # The sampler's thread

    def _commands(self) -> list[Command] | None:
        """Waits for commands and returns them; none while there is something to draw, None at the
        end."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._sampler.pending or self._is_over)
            commands, self._inbox = self._inbox, []
            return None if self._is_over else commands

    def _work(self, commands: list[Command]) -> None:
        for command in commands:
            self._say([messages.Done(t) for t in self._sampler.execute(command)])
            if isinstance(command, SetParams):
                self._say([messages.Synced(command.version)])
        if not commands:
            self._say([messages.Done(t) for t in self._sampler.step()])
            self._say_partials()

    def _say_partials(self) -> None:
        """Reports what has grown, from time to time, unless the last such report is still to be sent."""
        is_late = any(isinstance(event, messages.Partial) for event in self._events)
        if is_late or time.monotonic() - self._reported < self._partial_seconds:
            return
        records, lengths = self._sampler.records(), self._lengths
        self._lengths = {t.id: len(t.tokens) for t in records}
        grown = [t for t in records if t.id not in lengths or len(t.tokens) > lengths[t.id]]
        self._say([messages.Partial(t) for t in grown])
        self._reported = time.monotonic()

    def _say(self, events: list[messages.Event]) -> None:
        with self._changed:
            self._events += events
            self._stats = self._sampler.stats

    # The others

    def _guarded(self, work: Callable, argument: Any) -> None:
        try:
            work(argument)
        except (OSError, wire.Damaged) as error:
            self._end(LearnerLost(f"the learner is gone: {error}"))
        except Exception as error:  # which the main thread raises
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._error = self._error or (None if self._is_over else error)
            self._is_over = True
            self._changed.notify_all()

    def _talk(self, peer: tcp.Peer) -> None:
        while not self._is_over:
            with self._changed:
                events, self._events = messages.fitting(self._events)
                stats = self._stats
            peer.send(messages.pack_report(events, stats))
            reply = messages.read_reply(peer.receive(messages.MESSAGE_BYTES))
            self._take(reply)
            if reply.is_over:
                self._end()
            if not self._events:
                time.sleep(TALK_SECONDS)

    def _take(self, reply: messages.Reply) -> None:
        with self._changed:
            self._sync_version, self._sent = reply.sync_version, reply.fingerprint
            self._held += reply.commands
            is_changed = any(isinstance(o, (Preempt, messages.SyncTo)) for o in reply.commands)
            if is_changed and reply.sync_version is not None:
                self._wanted = reply.sync_version
            self._pass_on()

    def _pass_on(self) -> None:
        """Gives the sampler its commands, with the lock, once the weights are there that were
        newest when one of them preempted it or was to sync. Newer ones do as well, and are not
        waited for: a learner may publish faster than they come."""
        has = -1 if self._fetched is None else self._fetched.version
        if has < self._wanted:
            return
        for command in self._held:
            is_sync = isinstance(command, messages.SyncTo)
            self._inbox.append(self._fetched if is_sync else command)
        self._held = []
        self._changed.notify_all()

    def _fetch(self, weights: transport.WeightTransport) -> None:
        is_old = lambda: self._sync_version is not None and (
            self._fetched is None or self._fetched.version < self._sync_version
        )
        since = None  # when weights could not be had for the first time
        while not self._is_over:
            with self._changed:
                self._changed.wait_for(lambda: is_old() or self._is_over, RETRY_SECONDS)
                if not is_old() or self._is_over:
                    continue
                version, sent = self._sync_version, self._sent
            try:
                tree = weights.fetch(version, self._like)
            except transport.Unavailable as error:
                since = since or time.monotonic()
                if time.monotonic() - since > TELL_SECONDS:
                    processes.report(f"no weights of version {version} yet: {error}")
                    since = None
                time.sleep(RETRY_SECONDS)
                continue
            shardings = jax.tree.map(lambda x: x.sharding, self._like)
            params = jax.block_until_ready(jax.device_put(tree, shardings))
            fingerprint.check(params, sent)
            since = None
            with self._changed:
                self._fetched = SetParams(params, version)
                self._pass_on()
