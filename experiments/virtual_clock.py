"""Simulates an asynchronous run: the real controller and queue, driven by a virtual clock.

`rollouts.controller` and `rollouts.queue` make the decisions, as in a run. Samplers and learner are a
cost model with events on a heap. Idle time, staleness and throughput are exact and deterministic.

A sampler works in calls: it prefills new sequences, then generates `call_steps` tokens per call for
all of its sequences. It receives commands between two calls. Between the ends of two sequences
nothing else changes: all calls up to the next end are one event, and a command cuts it short.
"""

import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.costs import Costs
from jaxrl_tis.rollouts.controller import Begin, Controller, Discard, Interrupt, SyncWeights
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.rollouts.queue import Entry, Key, Queue


@dataclasses.dataclass
class Sequence:
    """A response: its final length, and the number of tokens sampled by each version."""

    length: int
    drawn: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.drawn.values())


@dataclasses.dataclass(frozen=True)
class Burst:
    """Consecutive calls of a sampler, from a start time."""

    start: float
    prefill: float  # seconds before the first decode step
    running: int
    cached: int
    calls: int


@dataclasses.dataclass
class Sampler:
    """A sampler: running sequences, sequences that wait for a slot, and commands not yet received,
    each with its time."""

    version: int | None = None
    drawing: dict[Key, Sequence] = dataclasses.field(default_factory=dict)
    waiting: dict[Key, Sequence] = dataclasses.field(default_factory=dict)
    prompts: set[int] = dataclasses.field(default_factory=set)  # groups whose prompt is in its cache
    commands: collections.deque = dataclasses.field(default_factory=collections.deque)
    burst: Burst | None = None
    is_syncing: bool = False
    ticket: int = 0  # of its next event; older ones are void


@dataclasses.dataclass
class Counts:
    """Wasted and repeated work, in sequences and tokens."""

    interrupted: int = 0
    reprefilled_tokens: int = 0
    restarted_tokens: int = 0
    discarded_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run, over its steps after the first `skip`.

    Attributes:
      seconds: of these steps. tokens: of prompts and responses that they trained on.
      learner_idle, sampler_idle: shares of idle time; a weight sync is not idle.
      mean_staleness: over tokens, versions. max_staleness: of any token.
      partial: share of the sequences sampled by several versions.
      longest_pause: from the command to sync to the next token of a sampler that keeps its
        sequences; 0 if none does. longest_call: of any sampler.
      counts: of the whole run.
      trained: groups in the order of training.
      drawn_tokens: sampled in the whole run. trained_tokens: of these, in a batch. untrained_tokens: of
        sequences in no batch. Tokens lost by a restart are in neither.
    """

    seconds: float
    tokens: int
    learner_idle: float
    sampler_idle: float
    mean_staleness: float
    max_staleness: int
    partial: float
    longest_pause: float
    longest_call: float
    counts: Counts
    trained: tuple[int, ...]
    drawn_tokens: int
    trained_tokens: int
    untrained_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Clock:
    """A simulated run; call `run`."""

    def __init__(self, schedule: Schedule, costs: Costs, seed: int = 0, capacity: float = 0):
        self.schedule, self.costs, self.seed, self.now = schedule, costs, seed, 0.0
        capacity = capacity or (schedule.ahead + 1) * costs.prompts
        self.queue = Queue(costs.group_size, capacity, {"learner": ("reward",)})
        self.controller = Controller(schedule, costs.prompts, self.queue)
        self.samplers = {f"sampler {i}": Sampler() for i in range(costs.workers)}
        for name in self.samplers:
            self.controller.joined(name, costs.slots)
        self.counts = Counts()
        self._events: list = []
        self._command = itertools.count()
        self._sequences: dict[Key, Sequence] = {}
        self._is_training, self._taken = False, 0
        self._drawn_tokens, self._longest_pause, self._longest_call = 0, 0.0, 0.0
        self._trained: list[tuple[int, Entry]] = []  # (version of the learner, group)
        self._ends: list[float] = [0.0]  # of the updates
        self._train_times: list[tuple[float, float]] = []
        self._draw_times: list[tuple[float, float]] = []
        self._sync_times: list[tuple[float, float]] = []

    def run(self, steps: int, skip: int = 0) -> Outcome:
        """Runs `steps` updates. Raises RuntimeError in a deadlock."""
        self.controller.published(0)
        while len(self._ends) <= steps:
            self._settle()
            self._train()
            if not self._events:
                raise RuntimeError(
                    f"at {self.now} s, after {len(self._ends) - 1} updates, no event is left"
                )
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self._outcome(skip)

    # Events

    def _at(self, time: float, event: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (time, next(self._command), event))

    def _settle(self) -> None:
        """Executes the controller's decisions until there are none."""
        while decisions := self.controller.decisions():
            for decision in decisions:
                sampler = self.samplers[decision.worker]
                sampler.commands.append((self.now, decision))
                if sampler.burst is not None:
                    self._cut(decision.worker)
                elif not sampler.is_syncing:
                    self._execute(decision.worker)

    def _wake_at(self, name: str, time: float, event: Callable[[str], None]) -> None:
        """Sets the next event of a sampler and replaces the previous one."""
        sampler = self.samplers[name]
        sampler.ticket += 1
        ticket = sampler.ticket

        def wake():
            if sampler.ticket == ticket:
                event(name)

        self._at(time, wake)

    def _train(self) -> None:
        """Starts an update on the groups that are ready, if the learner is free."""
        entries = None if self._is_training else self.controller.take()
        if entries is None:
            return
        version, costs, self._is_training = self.controller.version or 0, self.costs, True
        self._trained += [(version, entry) for entry in entries]
        oldest = min(min(row["tokens"].drawn) for e in entries for row in e.columns.values())
        if version - oldest > self.schedule.staleness:
            raise RuntimeError(
                f"at {self.now} s a token is {version - oldest} versions old, and the bound is "
                f"{self.schedule.staleness:g}"
            )
        self._taken += len(entries)
        tokens = sum(self._tokens(entry) for entry in entries)
        is_last = self._taken == costs.prompts
        seconds = costs.train_s * tokens / costs.trainers + costs.update_s * is_last
        start = self.now

        def trained():
            self._is_training = False
            self._train_times.append((start, self.now))
            if is_last:
                self._taken = 0
                self._ends.append(self.now)
                self.controller.published(version + 1)

        self._at(start + seconds, trained)

    def _tokens(self, entry: Entry) -> int:
        rows = entry.columns.values()
        return sum(self.costs.prompt_tokens + row["tokens"].length for row in rows)

    # Samplers

    def _burst_s(self, burst: Burst, calls: int) -> float:
        """Returns the time from the start of a burst to the end of its first `calls` calls."""
        steps = calls * self.costs.call_steps
        return burst.prefill + self.costs.decode_s(burst.running, burst.cached, steps)

    def _cut(self, name: str) -> None:
        """Ends a burst with its current call."""
        sampler = self.samplers[name]
        burst = sampler.burst
        assert burst is not None
        elapsed = self.now - burst.start
        time_of = lambda calls: self._burst_s(burst, calls)
        calls = bisect.bisect_left(range(burst.calls), elapsed, key=time_of)
        if calls < burst.calls:
            sampler.burst = dataclasses.replace(burst, calls=calls)
            self._wake_at(name, max(burst.start + time_of(calls), self.now), self._end_burst)

    def _begin_burst(self, name: str) -> None:
        """Gives free slots to waiting sequences, and samples until the first sequence ends."""
        sampler, costs, prefilled = self.samplers[name], self.costs, 0
        for key in list(sampler.waiting)[: costs.slots - len(sampler.drawing)]:
            sequence = sampler.drawing[key] = sampler.waiting.pop(key)
            shared = costs.prompt_tokens if key[0] in sampler.prompts else 0
            prefilled += costs.prompt_tokens - shared + sequence.tokens
            self.counts.reprefilled_tokens += sequence.tokens
            sampler.prompts.add(key[0])
        if not sampler.drawing:
            return
        left = min(s.length - s.tokens for s in sampler.drawing.values())
        cached = sum(costs.prompt_tokens + s.tokens for s in sampler.drawing.values())
        sampler.burst = Burst(
            self.now, costs.prefill_s * prefilled, len(sampler.drawing), cached,
            math.ceil(left / costs.call_steps),
        )
        end = self.now + self._burst_s(sampler.burst, sampler.burst.calls)
        self._wake_at(name, end, self._end_burst)

    def _end_burst(self, name: str) -> None:
        """Records the tokens of a burst, receives the commands and continues."""
        sampler, burst = self.samplers[name], self.samplers[name].burst
        assert burst is not None and sampler.version is not None
        sampler.burst = None
        self._draw_times.append((burst.start, self.now))
        last = self._burst_s(burst, burst.calls) - self._burst_s(burst, max(burst.calls - 1, 0))
        self._longest_call = max(self._longest_call, burst.prefill, last)
        for key, sequence in list(sampler.drawing.items()):
            count = min(burst.calls * self.costs.call_steps, sequence.length - sequence.tokens)
            if count:
                drawn = sequence.drawn
                drawn[sampler.version] = drawn.get(sampler.version, 0) + count
                self._drawn_tokens += count
            if sequence.tokens == sequence.length:
                del sampler.drawing[key]
                self._finish(name, key, sequence)
        self._execute(name)

    def _finish(self, name: str, key: Key, sequence: Sequence) -> None:
        is_wanted = self.controller.finished(name, key) and self.queue.put(key, "tokens", sequence)
        if not is_wanted:
            self.counts.discarded_tokens += sequence.tokens
            return
        rewarded = functools.partial(self.queue.put, key, "reward", True)
        self._at(self.now + self.costs.reward_s, rewarded)

    def _execute(self, name: str) -> None:
        """Executes commands up to a weight sync, and samples."""
        sampler = self.samplers[name]
        while sampler.commands:
            time, command = sampler.commands.popleft()
            if isinstance(command, SyncWeights):
                self._sync(name, command.version, time)
                return
            if isinstance(command, Begin):
                for key in command.keys:
                    sampler.waiting[key] = self._begun(key, key in command.fresh)
            else:
                self._preempt(name, command)
        self._begin_burst(name)

    def _begun(self, key: Key, is_fresh: bool) -> Sequence:
        """Returns the sequence of a key, created with its group; a fresh one has no tokens."""
        if key not in self._sequences:
            group, count = key[0], self.costs.group_size + self.schedule.redundant
            lengths = self.costs.lengths(self.seed, group, count)
            self._sequences |= {(group, i): Sequence(n) for i, n in enumerate(lengths)}
        sequence = self._sequences[key]
        if is_fresh:
            self.counts.restarted_tokens += sequence.tokens
            sequence.drawn.clear()
        return sequence

    def _preempt(self, name: str, command: Interrupt | Discard) -> None:
        sampler = self.samplers[name]
        for key in command.keys:
            held = sampler.drawing if key in sampler.drawing else sampler.waiting
            if key not in held:
                continue  # it has ended meanwhile
            sequence = held.pop(key)
            self.controller.preempted(name, key, max(sequence.drawn, default=None))
            if isinstance(command, Discard):
                self.counts.discarded_tokens += sequence.tokens
            else:
                self.counts.interrupted += 1

    def _sync(self, name: str, version: int, commanded: float) -> None:
        sampler = self.samplers[name]
        sampler.is_syncing, has_sequences, start = True, bool(sampler.drawing), self.now

        def synced(name):
            sampler.is_syncing, sampler.version = False, version
            self._sync_times.append((start, self.now))
            sampler.prompts = {group for group, _ in sampler.drawing}
            if has_sequences:
                self._longest_pause = max(self._longest_pause, self.now - commanded)
            self.controller.synced(name, version)
            self._execute(name)

        self._wake_at(name, self.now + self.costs.sync_s, synced)

    # Results

    def _outcome(self, skip: int) -> Outcome:
        start, end = self._ends[skip], self._ends[-1]
        counted = [(version, entry) for version, entry in self._trained if version >= skip]
        drawn = [
            (version, row["tokens"].drawn)
            for version, entry in counted for row in entry.columns.values()
        ]
        ages = [(version - own, n) for version, by in drawn for own, n in by.items()]
        busy = lambda times: sum(max(min(b, end) - max(a, start), 0.0) for a, b in times)
        idle = lambda times, count: max(1 - busy(times) / (count * (end - start)), 0.0)
        drawing = [(s.burst.start, end) for s in self.samplers.values() if s.burst is not None]
        drawing += self._draw_times + self._sync_times
        trained = [row["tokens"] for _, e in self._trained for row in e.columns.values()]
        return Outcome(
            seconds=end - start,
            tokens=sum(self._tokens(entry) for _, entry in counted),
            learner_idle=idle(self._train_times, 1),
            sampler_idle=idle(drawing, self.costs.workers),
            mean_staleness=sum(age * n for age, n in ages) / sum(n for _, n in ages),
            max_staleness=max(age for age, _ in ages),
            partial=float(np.mean([len(by) > 1 for _, by in drawn])),
            longest_pause=self._longest_pause, longest_call=self._longest_call,
            counts=self.counts, trained=tuple(entry.number for _, entry in self._trained),
            drawn_tokens=self._drawn_tokens, trained_tokens=sum(s.tokens for s in trained),
            untrained_tokens=sum(s.tokens for s in self._sequences.values())
            - sum(s.tokens for s in trained),
        )


def simulate(
    schedule: Schedule, costs: Costs, steps: int = 24, skip: int = 8, seed: int = 0,
    capacity: float = 0
) -> Outcome:
    """Simulates `steps` updates and returns the results without the first `skip`.

    Args:
      capacity: most groups in the queue; 0: as many as the schedule can begin.
    """
    return Clock(schedule, costs, seed, capacity).run(steps, skip)
