"""The sessions of a process: their rows, and the endpoint and agents behind them."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import ml_collections
import numpy as np

from jaxrl_tis.endpoint.calls import Call
from jaxrl_tis.engine.records import PER_TOKEN, Request, Trajectory
from jaxrl_tis.harness.process import HarnessProcess, Reply
from jaxrl_tis.harness.protocol import Session
from jaxrl_tis.rollouts.episodes import environment_seed
from jaxrl_tis.rollouts.record_check import EMPTY
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.runtime import cli

if TYPE_CHECKING:  # it needs the extra [serve]
    from jaxrl_tis.endpoint.sessions import Endpoint

CANCELLED = "the run needs it no more"
# Open files of a process of a run: for each session its connection and one that is closing, and others.
FILES_PER_SESSION, OTHER_FILES = 2, 256


def check_files(count: int) -> None:
    """Raises the limit of open files as far as it goes. ValueError if it is too low for this number
    of sessions at a time."""
    most, needed = cli.raise_file_limit(), FILES_PER_SESSION * count + OTHER_FILES
    if needed > most:
        raise ValueError(
            f"{count} sessions of rollout.harness at a time need {needed} open files, and the hard "
            f"limit of this system is {most} (ulimit -Hn): raise it, or lower rollout.prompts, "
            "rollout.group_size and eval.prompts"
        )


def at_once(config: ml_collections.ConfigDict, schedule: Schedule) -> int:
    """Returns the most sessions of a run at a time. An evaluation has two for each prompt. Samplers
    that run ahead have one for each slot, also while an evaluation runs."""
    rollout, evaluated = config.rollout, 2 * config.eval.prompts
    if schedule.is_sync:
        greedy = config.correction.advantage == "remax"
        return max(rollout.prompts * (rollout.group_size + greedy), evaluated)
    return rollout.workers * config.engine.slots + evaluated


@dataclasses.dataclass(eq=False)
class Row:
    """Turns of a session whose prompts continue each other.

    Attributes:
      first: the request of its first turn.
      number: of the row in its session, from 0.
      record: up to its last whole turn; None before.
      before: the record when the newest turn began; None for the first turn.
      start: tokens after the prompt before those that the newest turn samples.
      lost: sampled tokens of `before` that the prompt of the newest turn changed.
      realigned: sampled tokens that prompts of answered turns changed.
      call: of the newest turn; None before.
      running: what the engine samples now, or sampled when it was interrupted; None if the newest
        turn is whole.
    """

    first: Request
    number: int = 0
    record: Trajectory | None = None
    before: Trajectory | None = None
    start: int = 0
    lost: int = 0
    realigned: int = 0
    call: Call | None = None
    running: Request | None = None

    @property
    def whole(self) -> Trajectory:
        """The record of a row with a whole turn."""
        assert self.record is not None
        return self.record

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.whole.prompt, self.whole.tokens])

    @property
    def turn_start(self) -> int:
        """The index in `ids` of the first token that the last turn sampled."""
        sampled = np.flatnonzero(self.whole.mask & (self.whole.turn == self.whole.turn[-1]))
        return len(self.whole.prompt) + int(sampled[0])

    @property
    def num_sampled(self) -> int:
        return 0 if self.record is None else int(self.record.mask.sum())

    def keep_delivered(self) -> None:
        """Drops the newest turn if it is whole and no client has its answer."""
        if self.running is None and self.call is not None and not self.call.is_delivered:
            self.record, self.realigned = self.before, self.realigned - self.lost
            self.lost = 0


@dataclasses.dataclass(eq=False)
class Live:
    """A session that has not ended.

    Attributes:
      key: of the endpoint and the harness's process.
      deadline: time at which it ends as "timeout".
      url: of its routes.
      rows: in the order of their first calls.
      calls: that no scheduler has taken.
      answered: the calls that have an answer.
      reply: of the harness, if it has returned.
      num_rows: rows begun.
    """

    request: Request
    key: str
    deadline: float
    url: str = ""
    rows: list[Row] = dataclasses.field(default_factory=list)
    calls: collections.deque[Call] = dataclasses.field(default_factory=collections.deque)
    answered: list[Call] = dataclasses.field(default_factory=list)
    reply: Reply | None = None
    num_rows: int = 0

    @property
    def is_running(self) -> bool:
        return any(row.running for row in self.rows)

    @property
    def has_news(self) -> bool:
        """Whether a scheduler can do something with it."""
        return bool(self.calls) or self.reply is not None or time.monotonic() >= self.deadline

    @property
    def has_tokens(self) -> bool:
        partials = [row.running.partial for row in self.rows if row.running]
        return any(row.record for row in self.rows) or any(p and len(p.tokens) for p in partials)

    def unfinished(self) -> Trajectory:
        """Returns the record of an interrupted session: its longest row so far."""
        records = [row.running.partial if row.running else row.record for row in self.rows]
        longest = max(
            [r for r in records if r is not None], key=lambda r: len(r.tokens), default=self.empty()
        )
        return dataclasses.replace(longest, id=self.request.id, stop_reason="abort")

    def empty(self) -> Trajectory:
        """Returns a record without tokens."""
        request = self.request
        return dataclasses.replace(
            EMPTY, id=request.id, prompt=request.prompt, seed=request.seed, request=request.hash,
            temperature=request.sampling.temperature, stop_reason="length",
        )


class Sessions:
    """The endpoint, the harness's process and all sessions of this process.

    Endpoint and process begin with the first user (`enter`), a run or a scheduler, and end with the
    last one (`leave`).

    Args:
      make_endpoint, make_process: start them; the process gets the function that takes replies.
      model: its name for clients.
      timeout: seconds of a session.
    """

    def __init__(
        self, make_endpoint: Callable[[], "Endpoint"],
        make_process: Callable[[Callable[[Reply], None]], HarnessProcess], model: str,
        timeout: float,
    ):
        self.changed = threading.Condition()
        self._make_endpoint, self._make_process = make_endpoint, make_process
        self._model, self.timeout = model, timeout
        self.endpoint: Any = None  # an Endpoint while there are users
        self.process: Any = None  # a HarnessProcess while there are users
        self._users = 0
        self.live: dict[str, Live] = {}  # by id of the request
        self._by_key: dict[str, Live] = {}
        self._owned: set[str] = set()

    def enter(self) -> None:
        """Counts a user. Raises ValueError if the harness cannot be used."""
        with self.changed:
            if not self._users:
                self.process = self._make_process(self._replied)
                self.endpoint = self._make_endpoint()
            self._users += 1

    def leave(self) -> None:
        with self.changed:
            self._users -= 1
            if self._users:
                return
            process, endpoint = self.process, self.endpoint
            for live in list(self.live.values()):
                self._end(live, "the run has ended")
        process.close()
        endpoint.close()

    def own(self, request: Request) -> tuple[Live, bool]:
        """Returns the session of a request for one scheduler, and whether it goes on: it was
        interrupted, and its request has the tokens so far. Any other begins anew."""
        with self.changed:
            live = self.live.get(request.id)
            if live is not None and request.id in self._owned:
                raise ValueError(f"request {request.id}: another live request has this id")
            goes_on = live is not None and (request.partial is not None or not live.has_tokens)
            if live is None or not goes_on:
                if live is not None:
                    self._end(live, "the run begins the sample anew")
                live = self._open(request)
            self._owned.add(request.id)
        if not goes_on:
            self._play(live)
        return live, goes_on

    def disown(self, live: Live) -> None:
        """Keeps an interrupted session for another scheduler."""
        with self.changed:
            self._owned.discard(live.request.id)

    def end(self, live: Live, why: str) -> None:
        """Ends a session. Its open calls and later ones are refused with the reason."""
        with self.changed:
            self._end(live, why)

    def postpone(self, seconds: float) -> None:
        """Gives all sessions more time."""
        with self.changed:
            for live in self.live.values():
                live.deadline += seconds

    def expire(self) -> None:
        """Ends interrupted sessions that no scheduler has taken within their time."""
        now = time.monotonic()
        with self.changed:
            for id, live in list(self.live.items()):
                if id not in self._owned and now >= live.deadline:
                    self._end(live, CANCELLED)

    def _open(self, request: Request) -> Live:
        live = Live(request, "", time.monotonic() + self.timeout)
        live.key, url = self.endpoint.open(request.sampling, lambda call: self._called(live, call))
        live.url = url
        self.live[request.id] = self._by_key[live.key] = live
        return live

    def _play(self, live: Live) -> None:
        """Starts the agent, without the lock: it may wait for a new process."""
        request, example = live.request, live.request.example or {}
        self.process.start(live.key, Session(
            request.id, dict(example), live.url, self.endpoint.token, self._model,
            environment_seed(request.seed, example),
        ))
        with self.changed:
            if live.key not in self._by_key:  # it has ended meanwhile
                self.process.cancel(live.key)

    def _end(self, live: Live, why: str) -> None:
        del self.live[live.request.id], self._by_key[live.key]
        self._owned.discard(live.request.id)
        self.process.cancel(live.key)
        self.endpoint.end(live.key, why)

    def _called(self, live: Live, call: Call) -> None:
        with self.changed:
            live.calls.append(call)
            self.changed.notify_all()

    def _replied(self, reply: Reply) -> None:
        with self.changed:
            if reply.key in self._by_key:
                self._by_key[reply.key].reply = reply
                self.changed.notify_all()


def turn(record: Trajectory, start: int) -> Trajectory:
    """Returns the tokens from `start` on as the record of a sequence of one turn."""
    fields = {name: getattr(record, name)[start:] for name in PER_TOKEN}
    prompt = np.concatenate([record.prompt, record.tokens[:start]])
    return dataclasses.replace(record, prompt=prompt, **fields)
