"""A scheduler whose engines are of others: the interface of `engine.scheduler.Scheduler`, over HTTP.

Requests go to the engine with the fewest of them, each in a thread that waits for its answer. An engine
that does not answer, or fails to load weights, is out: its requests begin again elsewhere, and it is
given the newest weights every few seconds. It samples again once it has them, and no engine ever samples
with weights that this scheduler did not give it.
"""

import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxrl_tis.engine import request_check
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory, extended
from jaxrl_tis.engine.scheduler import PAUSES
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.external.client import Busy, EngineError, Refused
from jaxrl_tis.external.protocol import Answer, Kind
from jaxrl_tis.external.weights import Version

POLL_SECONDS = 0.05  # of a step without an answer, after which the caller may act
RETRY_SECONDS = 5.0  # between two attempts to reach an engine that is out
SILENT_SECONDS = 10.0  # without an answer of an engine that has requests, until it is asked for a sign
TRIES = 5  # of a request, until its failure is the run's


@dataclasses.dataclass
class Member:
    """An engine and what it works on.

    Attributes:
      version: of the weights that it was given; None while it is out, for `reason`.
      live: ids of its requests.
      adapter: the name of its adapter.
      left: names of requests that it may still be working on, and nobody waits for.
      heard: when it last answered; work: the thread that asks or syncs it.
      room: most requests that it takes at a time, found where it says that it is busy.
    """

    url: str
    kind: Kind
    version: int | None = None
    reason: BaseException | None = None
    live: set[str] = dataclasses.field(default_factory=set)
    adapter: str | None = None
    left: set[str] = dataclasses.field(default_factory=set)
    heard: float = 0.0
    work: threading.Thread | None = None
    room: int = 2**31


@dataclasses.dataclass
class Sent:
    """A request in work: the engine, its version when it began, the request's name there, how many
    others were there, whether it goes on with other weights once it is aborted, and whether its end was
    asked for."""

    request: Request
    member: Member
    version: int
    name: str
    others: int
    goes_on: bool = False
    is_asked: bool = False


class ExternalScheduler:
    """Samples by engines of others. Its methods are those of `engine.scheduler.Scheduler`.

    Args:
      members: one for each engine.
      engine: of this run's config, which says what a request may ask for and how records are laid out.
      served, version: the weights to begin with.
      check: called with each engine after it has loaded weights; raises where it samples from others.
      patience: seconds without any engine until EngineError.
    """

    def __init__(
        self, members: Sequence[Member], engine: EngineProtocol, served: Version, version: int,
        check: Callable[[Member, Version], None], patience: float,
    ):
        self.stats = Stats()
        self._members, self._engine, self._check = members, engine, check
        self._slots, self._served, self._version = engine.slots, served, version
        self._patience, self._tried = patience, time.monotonic()
        self._failed: queue.SimpleQueue[tuple[Member, BaseException]] = queue.SimpleQueue()
        self._tries: collections.Counter[str] = collections.Counter()
        self._waiting: dict[str, Request] = {}
        self._sent: dict[str, Sent] = {}
        self._ended: list[Trajectory] = []
        self._answers: queue.SimpleQueue[tuple[str, Sent, Answer | BaseException]] = queue.SimpleQueue()
        self._without_since: float | None = None
        self._serial = itertools.count()
        self._is_begun = False  # once an engine had the weights
        self.set_params(served, version)

    # For callers

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._sent) + len(self._ended)

    def add(self, request: Request) -> None:
        live = self._waiting.keys() | self._sent.keys()
        request_check.check(request, self._engine, live, can_decode=True)
        sampling = request.sampling
        if sampling.prompt_logprobs:
            raise ValueError(f"request {request.id}: an engine of others records no log-probs of prompts")
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise ValueError(
                f"request {request.id}: an engine of others forgets presence and frequency penalties where "
                "a sequence goes on after a sync or a turn; leave them out"
            )
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
        self._abort_all(lambda: self._sent)
        for id in [*self._waiting]:
            self.abort(id)
        ended, self._ended = self._ended, []
        return ended

    def set_params(self, served: Version, version: int) -> None:
        """Gives all engines these weights, at the same time. Those that fail are out; those that were out
        are tried again while the others sample. A request keeps the adapter that it began with: it is
        aborted, and goes on with the new one after the tokens that it has."""
        if served.adapter is not None:
            for sent in self._sent.values():
                sent.goes_on = not sent.is_asked
            self._abort_all(lambda: [id for id, sent in self._sent.items() if sent.goes_on])
        self._served, self._version = served, version
        awaited = [m for m in self._members if m.version is not None] or self._members
        for member in awaited:
            if member.work is not None:
                member.work.join()
        work = []
        for member in awaited:
            member.version = None
            work.append(self._start(member, self._sync))
        for thread in work:
            thread.join()
        self._check_any()
        if not self._is_begun and (reason := self._members[0].reason) is not None:
            raise reason

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

    def _start(self, member: Member, task: Callable[[Member], None]) -> threading.Thread:
        """Runs a task of an engine in a thread. What it raises is found by `_check_any`."""

        def run():
            try:
                task(member)
                member.heard = time.monotonic()
            except BaseException as error:
                self._failed.put((member, error))

        member.work = threading.Thread(target=run, name=f"engine {member.url}", daemon=True)
        member.work.start()
        return member.work

    def _sync(self, member: Member) -> None:
        """Gives an engine the newest weights, and checks that it samples from them."""
        kind, served, version = member.kind, self._served, self._version
        if member.left:
            kind.abort([*member.left])
            member.left.clear()
        try:
            kind.pause()
            if served.adapter is None:
                kind.load(served.path, version)
            else:
                kind.load_adapter(served.adapter, served.path, member.adapter)
                member.adapter = served.adapter
        finally:
            kind.resume()
        if (found := kind.version()) != version:
            raise EngineError(
                f"{member.url} says that its weights are of version {found}, and it was given {version}"
            )
        self._check(member, served)
        member.version, member.reason, self._is_begun = version, None, True

    def _ask_for_a_sign(self, member: Member) -> None:
        member.kind.version()

    def _lose(self, member: Member, error: BaseException) -> None:
        """Takes an engine out, and its requests back."""
        if member.version is not None or member.reason is None:
            logging.warning("the engine at %s is out: %s", member.url, error)
        member.version, member.reason = None, error
        for id in [*member.live]:
            sent = self._sent.pop(id)
            self._waiting[id] = sent.request
            member.left.add(sent.name)
        member.live.clear()

    def _check_any(self) -> None:
        """Takes engines out that failed, asks silent ones for a sign, and gives those that are out or have
        other weights the newest. Raises what is no failure of an engine, and EngineError once there has
        been no engine for `patience` seconds."""
        with contextlib.suppress(queue.Empty):
            while True:
                member, error = self._failed.get_nowait()
                # What an engine refuses at the start, every one refuses; later it may have started again.
                is_final = isinstance(error, Refused) and not self._is_begun
                if is_final or not isinstance(error, EngineError):
                    raise error
                self._lose(member, error)
        now = time.monotonic()
        is_late = now - self._tried >= RETRY_SECONDS
        if is_late:
            self._tried = now
        for member in self._members:
            if member.work is not None and member.work.is_alive():
                continue
            if member.version != self._version:
                if is_late or member.version is not None:
                    self._start(member, self._sync)
            elif member.live and now - member.heard > SILENT_SECONDS:
                self._start(member, self._ask_for_a_sign)
        if any(member.version == self._version for member in self._members):
            self._without_since = None
        elif self._without_since is None:
            self._without_since = now
        elif now - self._without_since > self._patience:
            reasons = "; ".join(f"{m.url}: {m.reason}" for m in self._members)
            raise EngineError(f"no engine has answered for {self._patience:g} s: {reasons}")

    # Requests

    def _send(self) -> None:
        """Hands waiting requests to the engines with the fewest, up to their slots."""
        while self._waiting:
            ready = [
                m for m in self._members
                if m.version == self._version and len(m.live) < min(self._slots, m.room)
            ]
            if not ready:
                return
            member = min(ready, key=lambda m: len(m.live))
            request = self._waiting.pop(next(iter(self._waiting)))
            # An engine that was lost may still hold a request of the same id.
            name = f"{request.id}.{next(self._serial)}"
            sent = Sent(request, member, self._version, name, len(member.live))
            self._sent[request.id] = sent
            member.live.add(request.id)
            if len(member.live) == 1:
                member.heard = time.monotonic()
            threading.Thread(target=self._ask, args=(sent,), name=sent.name, daemon=True).start()

    def _ask(self, sent: Sent) -> None:
        """In a thread: samples a request and hands on the answer, or what ended it."""
        request, member = sent.request, sent.member
        done = 0 if request.partial is None else len(request.partial.tokens)
        tokens = request.prompt
        if request.partial is not None:
            tokens = np.concatenate([tokens, request.partial.tokens])
        rest = dataclasses.replace(
            request.sampling, max_tokens=request.sampling.max_tokens - done,
            min_tokens=max(request.sampling.min_tokens - done, 0),
        )
        try:
            answer: Answer | BaseException = member.kind.generate(
                # Without a seed: vLLM on a CPU ends where it reads the prompt of one with a seed in parts.
                sent.name, tokens, rest, None, self._engine.top_n, member.adapter,
            )
        except Refused as error:
            answer = error
            with contextlib.suppress(EngineError):
                if member.kind.version() != member.version:  # it started again, without its adapter
                    answer = EngineError(str(error))
        except Exception as error:
            answer = error
        self._answers.put((request.id, sent, answer))

    def _collect(self, timeout: float) -> None:
        """Takes the answers that are there; waits for one at most `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            while True:
                id, sent, answer = self._answers.get(timeout=timeout)
                timeout = 0.0
                if self._sent.get(id) is not sent:
                    continue  # of an engine that was lost
                sent.member.heard = time.monotonic()
                if isinstance(answer, Busy) and sent.others:
                    self._waiting[id] = self._sent.pop(id).request
                    sent.member.live.discard(id)
                    sent.member.room = min(sent.member.room, sent.others)
                    continue
                if isinstance(answer, EngineError) and not isinstance(answer, Refused):
                    self._tries[id] += 1
                    if self._tries[id] == TRIES:
                        raise EngineError(f"request {id} failed {TRIES} times: {answer}") from answer
                    self._lose(sent.member, answer)
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                if unknown := self._unknown(answer, sent.version):
                    self._lose(sent.member, EngineError(f"{sent.member.url} {unknown}"))
                    continue
                del self._sent[id], self._tries[id]
                sent.member.live.discard(id)
                self.stats.tokens += len(answer.tokens)
                record = self._record(sent.request, answer, sent.version)
                if record.stop_reason == "abort" and (sent.goes_on or not sent.is_asked):
                    partial = record if len(record.tokens) else None
                    self._waiting[id] = dataclasses.replace(sent.request, partial=partial)
                else:
                    self._ended.append(record)

    def _abort_all(self, live: Callable[[], Collection[str]]) -> None:
        """Aborts requests until none of them is live. An engine may get the abort before its request."""
        asked = -np.inf
        while ids := [*live()]:
            if time.monotonic() - asked > 1.0:
                self._abort(ids)
                asked = time.monotonic()
            self._check_any()
            self._collect(POLL_SECONDS)

    def _abort(self, ids: Sequence[str]) -> None:
        for member in self._members:
            own = [self._sent[id].name for id in ids if id in member.live]
            for id in ids:
                if id in member.live:
                    self._sent[id].is_asked = True
            try:
                if own:
                    member.kind.abort(own)
            except EngineError as error:
                self._lose(member, error)

    def _unknown(self, answer: Answer, begun: int) -> str:
        """Returns what an answer says of its weights that cannot be, or "". `begun`: the version at its
        begin."""
        for name, _, _ in answer.spans or []:
            if not (name.isdecimal() and begun <= int(name) <= self._version):
                return (
                    f"sampled from weights named {name!r}, and version {self._version} is the newest; did "
                    "it start again, or does another run sync it?"
                )
        return ""

    def _record(self, request: Request, answer: Answer | None, begun: int) -> Trajectory:
        """Returns the record of a request: what it continued, and the answer after it. What the engine
        does not say is NaN: the log-prob under its own logits, and the entropy."""
        engine, count = self._engine, 0 if answer is None else len(answer.tokens)
        version, segment = np.full(count, begun, np.int32), np.zeros(count, np.int32)
        for index, (of, start, end) in enumerate([] if answer is None else answer.spans or []):
            # A sync drops the keys of running requests: each span begins a segment.
            version[start:end], segment[start:end] = int(of), index
        unknown = np.full(count, np.nan, np.float32)
        values: dict[str, Any] = {
            "tokens": np.zeros(0, np.int32), "logp_behav": np.zeros(0, np.float32),
            "top_ids": np.zeros((0, engine.top_n), np.int32),
            "top_logps": np.zeros((0, engine.top_n), np.float32),
        }
        if answer is not None:
            values = {
                "tokens": answer.tokens, "logp_behav": answer.logps, "top_ids": answer.top_ids,
                "top_logps": answer.top_logps,
            }
        values |= {
            "logp_raw": unknown, "entropy": unknown, "version": version, "kv_version": version,
            "segment": segment, "mask": np.ones(count, bool), "turn": np.zeros(count, np.int32),
            "kept": kept_sets(request.id, answer, count, engine.num_kept),
        }
        reason, partial = "abort" if answer is None else answer.stop_reason, request.partial
        of_all: dict[str, Any] = {}
        if answer is not None and engine.route_shape[0]:
            of_all = recorded_routes(request, answer, engine)
        if partial is not None:
            last = lambda name: getattr(partial, name)[-1:].max(initial=0)
            values["segment"] = segment + last("segment") + (1 if len(partial.tokens) else 0)
            values["turn"] = values["turn"] + last("turn")
            values = {n: np.concatenate([getattr(partial, n), x]) for n, x in values.items()}
            return dataclasses.replace(partial, stop_reason=reason, **values, **of_all)
        return Trajectory(
            id=request.id, prompt=request.prompt, stop_reason=reason, seed=request.seed,
            request=request.hash, quant_id=engine.quant_id,
            temperature=request.sampling.temperature, **values, **of_all,
        )


def kept_sets(id: str, answer: Answer | None, count: int, width: int) -> np.ndarray:
    """Returns the sets [n,K] of possible tokens of an answer, see `Trajectory.kept`."""
    rows = np.full((count, width), -1, np.int32)
    if not (width and count and answer is not None):
        return rows
    if answer.kept is None or len(answer.kept) != count:
        raise Refused(
            f"request {id}: the engine says no sampling masks, and rollout.sampling_mask_size is {width}; "
            "start it with --return-sampling-mask, or set the size to 0"
        )
    for row, ids in zip(rows, answer.kept, strict=True):
        if len(ids) <= width:
            row[: len(ids)] = np.sort(np.asarray(ids, np.int32))
    return rows


def recorded_routes(request: Request, answer: Answer, engine: Any) -> dict[str, np.ndarray]:
    """Returns the experts of a sequence, and how often an engine chose others for tokens that it had
    read before, see `Trajectory.routes`."""
    length = len(request.prompt) + len(answer.tokens)
    before = np.zeros((0, *engine.route_shape), np.uint8)
    again = np.zeros(2, np.int32)
    if (partial := request.partial) is not None:
        length += len(partial.tokens)
        before, again = partial.routes, partial.rerouted
    if not len(answer.tokens):
        return {"routes": before, "rerouted": again} if len(before) else {}
    found = answer.routes
    if found is None or found.shape[1:] != tuple(engine.route_shape) or len(found) not in (length - 1, length):
        said = "none" if found is None else f"an array of {list(found.shape)}"
        raise Refused(
            f"request {request.id}: of the experts of {length} tokens in {list(engine.route_shape)} the "
            f"engine says {said}, and engine.record_routes is set; start it with "
            "--enable-return-routed-experts, or unset it"
        )
    found = found.astype(np.uint8 if engine.num_experts <= 256 else np.uint16)
    count = len(before)
    if count:
        changed = (np.sort(found[:count], -1) != np.sort(before, -1)).any((1, 2))
        again = again + np.array([count, changed.sum()], np.int32)
    return {"routes": np.concatenate([before, found[count:]]) if count else found, "rerouted": again}
