"""What every asynchronous source keeps in mind: decisions become orders, what was drawn becomes batches.

A source has workers of its own and asks here what to tell them. What they return is rewarded and put
into the queue, from which the controller takes the batches. Nothing here waits, and nothing is locked:
a source with threads calls it from one at a time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections
import numpy as np

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts import replay, saved
from jaxrl_tis.rollouts.controller import LEARNER, Begin, Controller, Discard, Interrupt
from jaxrl_tis.rollouts.groups import Groups, Sample, is_equal
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.queue import Entry, Key, Queue
from jaxrl_tis.rollouts.sampler import Drop, GiveBack, NewRequests, Order
from jaxrl_tis.rollouts.source import engine_metrics
from jaxrl_tis.runtime import processes

NEEDS = {"reward": ("tokens",), LEARNER: ("reward",)}


@dataclasses.dataclass
class Counts:
    """What happened since the last batch.

    Attributes:
      passed: time, in turns of all samplers or in seconds; waited: of this while the learner had
        nothing to train on.
      interrupted: sequences given back unfinished; discarded: that nobody wanted any more.
      resumed: sequences that had tokens when they were begun again; resumed_tokens: these.
      rejected: groups whose rewards are all equal.
      syncs: of a sampler.
    """

    passed: float = 0
    waited: float = 0
    interrupted: int = 0
    discarded: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    rejected: int = 0
    syncs: int = 0


class Bookkeeping:
    """The part of an asynchronous source that knows no worker; see `Controller` for who may what. A
    source adds `_next_entries`, which waits for something to `_take`, and `metrics`.

    Args:
      mode, way: of rollout.mode and rollout.replay.
      batches: records of prompts, on all processes alike.
      timer: of the phases "data" and "reward".
      arrived: called with the records of sequences that have ended, were interrupted, or are about
        to go on with new weights, while those that drew them are still in use.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, mode: Mode, way: replay.Way | None,
        groups: Groups, batches: Batches, timer: Timer,
        arrived: Callable[[list[Trajectory]], None] = lambda trajectories: None,
    ):
        rollout = config.rollout
        self._config, self._mode, self._groups = config, mode, groups
        self._batches, self._records = batches, []
        self._timer, self._arrived = timer, arrived
        self._age = replay.max_age(mode, way, rollout.max_age)
        self._replay = None if way is None else replay.Replay(way, self._age, config.seed)
        self._replay_before: replay.Replay | None = None  # the batch that is being trained on
        self._replay_metrics: dict[str, float] = {}
        fresh = rollout.prompts if way is None else rollout.prompts // way.uses
        capacity = rollout.queue or round((mode.ahead + 1) * fresh, 6)
        self._queue = Queue(groups.size, capacity, NEEDS)
        self.controller = Controller(mode, fresh, self._queue)
        self._keys: dict[str, Key] = {}  # by request, of what is being drawn
        self._requests: dict[Key, Request] = {}  # of groups in the queue
        self._partials: dict[Key, Trajectory] = {}
        self._taken: list[Entry] = []  # of the batch that is being trained on
        self._counts, self._before = Counts(), Stats()
        self._failed = dict.fromkeys(groups.counts, 0)

    def facts(self) -> dict[str, Any]:
        controller = self.controller
        return {
            "begun": controller.next_group, "offered": controller.offered,
            "queue": {str(g): sorted(e.columns) for g, e in self._queue.entries.items()},
            "drawing": sorted(self._keys), "records": len(self._records),
            "replay": {str(g): s.uses for g, s in self._replay.stored.items()} if self._replay else {},
        }

    # Orders, and what comes of them

    def _order(self, decision: Begin | Interrupt | Discard) -> Order:
        if isinstance(decision, Begin):
            return NewRequests(tuple(self._begun(key, decision) for key in decision.keys))
        if isinstance(decision, Interrupt):
            return GiveBack()
        return Drop(tuple(id for id, key in self._keys.items() if key in decision.keys))

    def _begun(self, key: Key, decision: Begin) -> Request:
        """Returns the request of a sample, with what there is of it."""
        if key not in self._requests:
            self._open(key[0])
        request, partial = self._requests[key], self._partials.pop(key, None)
        self._keys[request.id] = key
        if partial is None or key in decision.fresh:
            return request
        self._counts.resumed += 1
        self._counts.resumed_tokens += len(partial.tokens)
        return dataclasses.replace(request, partial=partial)

    def _open(self, group: int) -> None:
        """Reads the example of a group. Its requests are called as the synchronous source calls
        them, so that they draw the same."""
        if not self._records:
            with self._timer("data"):
                self._records = processes.gather(next(self._batches))
        entry = self._queue.entries[group]
        entry.prompt = self._records.pop(0)
        self._make_requests(entry)

    def _make_requests(self, entry: Entry) -> None:
        group, batch = entry.number, self.controller.batch
        name = f"{group // batch + 1}/0/{group % batch}"
        requests = self._groups.requests(entry.prompt, name, self._mode.redundant)
        self._requests |= {(group, i): request for i, request in enumerate(requests)}

    def _hear(self, name: str, trajectories: list[Trajectory]) -> None:
        """Takes what a sampler returns: sequences that have ended, and such that it gives back."""
        self._tell(trajectories)
        for trajectory in trajectories:
            key = self._keys.pop(trajectory.id)
            if trajectory.stop_reason != "abort":
                if self.controller.finished(name, key):
                    self._queue.put(key, "tokens", trajectory)
                continue
            self.controller.gave_back(name, key, newest(trajectory))
            is_wanted = self._is_wanted(key)
            self._counts.interrupted += is_wanted
            self._counts.discarded += not is_wanted
            if is_wanted and len(trajectory.tokens):
                self._partials[key] = trajectory

    def _is_wanted(self, key: Key) -> bool:
        """Whether a sample is still to be drawn to its end."""
        return key[0] in self._queue.entries and not self._queue.has_tokens(key[0])

    def _tell(self, trajectories: list[Trajectory]) -> None:
        """Calls `arrived` where there is something to be told."""
        if drawn := [t for t in trajectories if len(t.tokens)]:
            self._arrived(drawn)

    # Rewards

    def _reward(self) -> None:
        """Rewards what has ended."""
        if keys := self._queue.claim("reward"):
            self._rewarded(keys, self._scored(self._claimed(keys)))

    def _claimed(self, keys: list[Key]) -> list[tuple[dict[str, str], Trajectory]]:
        """Returns the examples of these samples, and what was drawn."""
        return [(self._queue.entries[k[0]].prompt, self._queue.get(k, "tokens")) for k in keys]

    def _scored(self, claimed: list[tuple[dict[str, str], Trajectory]]) -> list[Sample]:
        """Calls the reward; of what is kept here it changes nothing but `_failed`."""
        before = dict(self._groups.counts)
        with self._timer("reward"):
            samples = self._groups.samples(*map(list, zip(*claimed)))
        for name, count in self._groups.counts.items():
            self._failed[name] += count - before[name]
        return samples

    def _rewarded(self, keys: list[Key], samples: list[Sample]) -> None:
        """Puts rewards into the queue, and sends groups away whose rewards are all equal, where the
        run is to and may do without them."""
        for key, sample in zip(keys, samples, strict=True):
            self._queue.put(key, "reward", sample)
        rollout = self._config.rollout
        most = self.controller.batch * (rollout.max_rounds - 1) if rollout.dynamic_sampling else 0
        for group in sorted({group for group, _ in keys}):
            if self._counts.rejected < most and self._is_equal(group):
                self.controller.rejected(group)
                self._counts.rejected += 1
                self._drop(group)

    def _is_equal(self, group: int) -> bool:
        """Whether a group is complete and its rewards are all equal."""
        if not self._queue.is_ready(group, LEARNER):
            return False
        return is_equal(self._group(self._queue.entries[group]))

    # Batches

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Waits for the groups of the next batch, whole and in order; see `metrics`."""
        samples = [sample for part in self.parts(step) for sample in part]
        return sorted(samples, key=lambda s: s.group), self.metrics()

    def parts(self, step: int) -> Iterator[list[Sample]]:
        """Yields the groups of the next batch as they come: all at once, but in modes with
        `on_arrival`; then those that are replayed. A sample's group is the number of groups that had
        begun in the run before; those that are replayed have numbers that no group has yet."""
        entries, self._replay_before = [], None
        while len(entries) < self.controller.batch:
            arrived = self._next_entries()
            entries += arrived
            yield [sample for entry in arrived for sample in self._numbered(entry, entry.number)]
        if self._replay is not None:
            first, drawn = self.controller.next_group, self._replayed(entries)
            yield [s for i, entry in enumerate(drawn) for s in self._numbered(entry, first + i)]

    def _replayed(self, entries: list[Entry]) -> list[Entry]:
        """Puts a batch's fresh entries into the buffer, and returns what the batch has beside them."""
        buffer, version = self._replay, self.controller.version
        self._replay_before = buffer.copy()
        stored = []
        for entry in sorted(entries, key=lambda e: e.number):
            size = replay.priority(sample.reward for sample in self._group(entry))
            stored.append(buffer.add(entry.number, entry, _oldest(entry, version), version, size))
        count = self._config.rollout.prompts - len(entries)
        drawn = buffer.sample(count, version, [entry.number for entry in entries])
        for found in drawn:
            self._check(found.samples, self._age)
        batch = stored + drawn
        self._replay_metrics = {
            "replay/uses_mean": float(np.mean([found.uses for found in batch])),
            "replay/age_mean": float(np.mean([version - found.stored_at for found in batch])),
            "replay/size": len(buffer),
        }
        return [found.samples for found in drawn]

    def tighten(self) -> str:
        before = self.controller.mode.ahead
        ahead = self.controller.tighten()
        if ahead == before:
            return f"samplers begin {ahead:g} batches ahead, the fewest that the mode can; weights follow"
        return f"samplers begin {ahead:g} batches ahead from now on, {before:g} before"

    def _take(self) -> list[Entry] | None:
        """Takes what there is of the next batch, see Controller.take."""
        if (entries := self.controller.take()) is None:
            return None
        self._taken = self._taken + entries
        for entry in entries:
            self._check(entry, self._mode.staleness)
            self._drop(entry.number)
        return entries

    def _stuck(self) -> RuntimeError:
        """Returns the error of a learner that would wait for ever."""
        return RuntimeError(
            f"batch {self.controller.version} is not complete and no sampler draws; "
            f"{len(self._queue)} groups are in the queue"
        )

    def _drop(self, group: int) -> None:
        """Keeps nothing of a group that has left the queue."""
        for sample in range(self._groups.size + self._mode.redundant):
            self._requests.pop((group, sample), None)
            self._partials.pop((group, sample), None)

    def _group(self, entry: Entry) -> list[Sample]:
        rewarded = [row["reward"] for _, row in sorted(entry.columns.items())]
        return self._groups.group(rewarded)

    def _numbered(self, entry: Entry, number: int) -> list[Sample]:
        return [dataclasses.replace(sample, group=number) for sample in self._group(entry)]

    def _check(self, entry: Entry, staleness: float) -> None:
        """Raises RuntimeError for a token that is staler than it may be, or of no version that the
        learner has had."""
        version = self.controller.version
        for row in entry.columns.values():
            drawn_by = row["tokens"].version
            oldest, newest = drawn_by.min(initial=version), drawn_by.max(initial=0)
            if not version - staleness <= oldest <= newest <= version:
                raise RuntimeError(
                    f"sequence {row['tokens'].id} has tokens of versions {oldest} to {newest}, and "
                    f"the update starts from {version}; the bound on staleness is "
                    f"{staleness:g}"
                )

    def _measured(self, stats: Stats) -> dict[str, float]:
        """Measures what happened since the last batch; `stats` of all samplers, since ever."""
        counts, self._counts = self._counts, Counts()
        failed, self._failed = self._failed, dict.fromkeys(self._failed, 0)
        drawn, self._before = stats.since(self._before), stats
        found = engine_metrics(self._config.engine, drawn)
        found |= {f"reward/{name}": count for name, count in failed.items()}
        return found | self._replay_metrics | {
            "rollout/discarded_groups": counts.rejected,
            "async/queue_groups": len(self._queue),
            "async/ahead_batches": self.controller.next_group / self.controller.batch
            - self.controller.version,
            "async/drawing": len(self._keys),
            "async/learner_idle": counts.waited / (counts.passed or 1),
            "async/interrupted": counts.interrupted,
            "async/discarded": counts.discarded,
            "async/resumed": counts.resumed,
            "async/resumed_tokens": counts.resumed_tokens,
            "async/syncs": counts.syncs,
        }

    # Checkpoints

    def _is_untrained(self, version: int) -> bool:
        """Whether the batch that was taken is not in this version."""
        return bool(self._taken) and version == self.controller.version

    def _state(self, version: int, stats: Stats) -> dict[str, Any]:
        """Returns a source's state, once all workers have given everything back; see `_measured`."""
        drawn = stats.since(self._before)
        is_untrained = self._is_untrained(version)
        untrained = self._taken if is_untrained else []
        is_replayed = is_untrained and self._replay_before is not None
        buffer = self._replay_before if is_replayed else self._replay
        entries = sorted([*untrained, *self._queue.entries.values()], key=lambda e: e.number)
        return {
            "replay": [] if buffer is None else buffer.get_state(saved.written),
            "batches": self._batches.get_state(), "records": self._records,
            "controller": self.controller.get_state(version),
            "queue": [saved.written(entry) for entry in entries],
            "counts": [dataclasses.asdict(self._counts), dataclasses.asdict(drawn), self._failed],
            "partials": self._written_partials(self._partials),
        }

    @staticmethod
    def _written_partials(partials: dict[Key, Trajectory]) -> list:
        return [[list(key), saved.trajectory_text(t)] for key, t in sorted(partials.items())]

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])
        self._records = state["records"]
        counts, drawn, failed = state["counts"]
        self._failed |= failed
        self._counts = Counts(**counts)
        # What was counted before the break is counted to the next batch, too.
        self._before = Stats(**{name: -x for name, x in drawn.items()})
        self.controller.set_state(state["controller"])
        if self._replay is not None:
            self._replay.set_state(state["replay"], saved.read)
        self._partials = {tuple(key): saved.read_trajectory(text) for key, text in state["partials"]}
        for text in state["queue"]:
            entry = saved.read(text)
            self._queue.entries[entry.number] = entry
            self._make_requests(entry)


def newest(partial: Trajectory | None) -> int | None:
    """Returns the version of the last token, None where there is none."""
    return int(partial.version[-1]) if partial is not None and len(partial.tokens) else None


def _oldest(entry: Entry, version: int) -> int:
    """Returns the version of a group's oldest token."""
    return int(min(row["tokens"].version.min(initial=version) for row in entry.columns.values()))
