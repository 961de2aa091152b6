"""Decides who generates what, with which weights, and who waits: a state machine without a clock.

Events are calls: workers come and go, sequences end or come back, the learner publishes a version.
`decisions` then says what is to be done, and `take` which groups the next batch is made of. What
drives it may have a clock, threads or processes; nothing here knows.

The bound on staleness holds by construction, and nothing is ever dropped for it. A group that a
worker begins with the weights of version u has the deadline u + staleness: the last batch that may
have it. One begins only if the batches up to every later deadline still have room for all that is
due by then, and a batch waits for samples while this would not hold for what it leaves; so all
deadlines are kept, in whatever order sequences end. For one worker the rule is AReaL's: group N of
batches of B begins if floor((N - 1) / B) <= u + staleness (2505.24298).
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.rollouts.queue import Entry, Key, Queue

LEARNER = "learner"


@dataclasses.dataclass(frozen=True)
class Begin:
    """A decision: a worker starts these samples. It samples those of `fresh` from their prompts,
    even if a partial response exists."""

    worker: str
    keys: tuple[Key, ...]
    fresh: frozenset[Key] = frozenset()


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """A decision: a worker stops these samples and returns them as they are."""

    worker: str
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Discard:
    """Let a worker end these samples, which nobody wants any more."""

    worker: str
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class SyncWeights:
    """Bring a worker to the weights of this version."""

    worker: str
    version: int


Decision = Begin | Interrupt | Discard | SyncWeights


@dataclasses.dataclass
class WorkerState:
    """A sampler.

    Attributes:
      slots: sequences that it draws at once.
      version: of its weights; None before it has any.
      running: samples that it draws.
      leaving: of these, the ones that it was told to preempt.
      is_syncing: weights are on their way to it.
    """

    slots: int
    version: int | None = None
    running: set[Key] = dataclasses.field(default_factory=set)
    leaving: set[Key] = dataclasses.field(default_factory=set)
    is_syncing: bool = False

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.slots


class Controller:
    """The state of an asynchronous run.

    Args:
      schedule: its numbers.
      batch: groups of a batch.
      queue: of groups; `put` on it is the driver's, `add` and `take` are done here.

    Attributes:
      version: of the learner, which is the number of the batch that it takes next.
      sync_version: the newest version that workers may sync to.
      next_group: number of the group that begins next; how many have begun.
    """

    def __init__(self, schedule: Schedule, batch: int, queue: Queue):
        if queue.capacity < batch:
            raise ValueError(f"a queue of {queue.capacity} groups cannot hold a batch of {batch}")
        self.schedule, self.batch, self.queue = schedule, batch, queue
        self.version: int | None = None
        self.sync_version: int | None = None
        self.next_group = 0
        self.workers: dict[str, WorkerState] = {}
        # Samples to be begun again, with the version of the weights that drew the last of their
        # tokens, None if they have none.
        self._waiting: collections.deque[tuple[Key, int | None]] = collections.deque()
        self._destinations: dict[Key, str] = {}
        self._discarded: dict[str, set[Key]] = collections.defaultdict(set)
        self._taken = 0  # groups of batch `version`
        self._must_sync = True

    # Events

    def joined(self, name: str, slots: int) -> None:
        """A worker is there; it has no weights yet."""
        if name in self.workers:
            raise ValueError(f"a worker named {name!r} is there already")
        self.workers[name] = WorkerState(slots)

    def left(self, name: str, drawn_by: Mapping[Key, int] = {}) -> None:
        """A worker is gone; others begin again what it drew, or go on with it where somebody knows
        what there is of it: `drawn_by` has the version of its last token, see `preempted`."""
        for key in sorted(self.workers.pop(name).running):
            self._wait(key, drawn_by.get(key))
        self._discarded.pop(name, None)

    def published(self, version: int) -> None:
        """The learner has made this version of the last batch; ValueError where it cannot have."""
        expected = {0: self.version, self.batch: (self.version or 0) + 1}
        is_first = self.version is None
        if not is_first and (self._taken not in expected or version != expected[self._taken]):
            raise ValueError(
                f"version {version} was published after {self.version} and {self._taken} of "
                f"{self.batch} groups of its batch"
            )
        if self.is_sync_due(version):
            self.sync_version, self._must_sync = version, False
        self.version, self._taken = version, 0

    def is_sync_due(self, version: int) -> bool:
        """Whether workers may sync to this version, once it is published."""
        return self._must_sync or version - self.sync_version >= self.schedule.sync_every

    def synced(self, name: str, version: int) -> None:
        """A worker has these weights; ValueError where it had newer ones."""
        worker = self.workers[name]
        if worker.version is not None and version < worker.version:
            raise ValueError(f"worker {name!r} goes back from version {worker.version} to {version}")
        worker.version, worker.is_syncing = version, False

    def finished(self, name: str, key: Key) -> bool:
        """A worker has sampled a sequence to its end. Returns whether it counts: not one that the
        worker was not given, or that was preempted."""
        is_known = self._forget(name, key)
        if is_known:
            self._destinations.pop(key, None)
        return is_known

    def preempted(self, name: str, key: Key, version: int | None) -> bool:
        """Records a sequence that a worker returned unfinished. `version` is that of its last
        token, None without tokens. Returns whether the worker had it."""
        is_known = self._forget(name, key)
        if is_known:
            self._wait(key, version)
        return is_known

    def rejected(self, group: int) -> None:
        """The learner does not want a group that is complete; another may begin in its place."""
        self.queue.take([group])

    def reduce_staleness(self) -> float:
        """Lowers the bound on staleness of new groups by one version where it can; the next version
        that is published is synced. Returns the batches that samplers may begin ahead."""
        ahead = self.schedule.ahead
        if math.isinf(ahead):
            ahead = float(self.queue.capacity // self.batch)
            for entry in self.queue.entries.values():  # or those with a deadline always go first
                entry.deadline = self.version + math.ceil(self.queue.capacity / self.batch)
        ahead = max(ahead - 1, self.schedule.sync_every - 1)
        self.schedule, self._must_sync = dataclasses.replace(self.schedule, ahead=ahead), True
        return ahead

    def interrupt_all(self) -> list[Interrupt]:
        """Returns the decisions that preempt all sequences of all workers, for a checkpoint.
        Workers continue with the next published version."""
        self._must_sync, decisions = True, []
        self._destinations.clear()
        for name, worker in self.workers.items():
            decisions += self._interrupt(name, worker.running - worker.leaving)
        return decisions

    # Decisions

    def decisions(self) -> list[Decision]:
        """Returns the decisions to execute now, each once."""
        return [*self._discards(), *self._repacks(), *self._syncs(), *self._begins()]

    def take(self) -> list[Entry] | None:
        """Removes and returns the groups of batch `version`, those with the earliest deadline
        first. With `on_arrival` it returns the finished ones. None if there are not enough."""
        left = self.batch - self._taken
        if self.version is None or not left:
            return None
        entries = self.queue.entries
        ready = {g for g in entries if self.queue.is_ready(g, LEARNER)}
        order = sorted(ready, key=lambda g: (entries[g].deadline, g))[:left]
        if not self.schedule.on_arrival:
            later = sorted(entries[g].deadline for g in entries.keys() - set(order))
            # What is left has to find room by its deadlines in the batches that follow.
            is_kept = all(
                count <= self.batch * (last - self.version) for count, last in enumerate(later, 1)
            )
            if len(order) < left or not is_kept:
                return None
        self._taken += len(order)
        return self.queue.take(order) or None

    def _wait(self, key: Key, version: int | None) -> None:
        """Puts a sample that its group still needs in line; `version`: see `preempted`."""
        if self.queue.is_open(key[0]):
            self._waiting.append((key, version))
        else:
            self._destinations.pop(key, None)

    def _forget(self, name: str, key: Key) -> bool:
        """Takes a sample off a worker; returns whether it was there."""
        if name not in self.workers or key not in self.workers[name].running:
            return False
        worker = self.workers[name]
        worker.running.discard(key)
        worker.leaving.discard(key)
        self._discarded[name].discard(key)
        return True

    def _interrupt(self, name: str, keys: set[Key]) -> list[Interrupt]:
        self.workers[name].leaving |= keys
        return [Interrupt(name, tuple(sorted(keys)))] if keys else []

    def _discards(self):
        """Finds what is being drawn of groups that are complete or gone."""
        is_open = self.queue.is_open
        for key in [key for key, _ in self._waiting if not is_open(key[0])]:
            self._destinations.pop(key, None)
        self._waiting = collections.deque(w for w in self._waiting if is_open(w[0][0]))
        for name, worker in self.workers.items():
            over = {k for k in worker.running if not is_open(k[0])} - self._discarded[name]
            if over:
                self._discarded[name] |= over
                yield Discard(name, tuple(sorted(over)))

    def _repacks(self):
        """Moves the last sequences of workers that wait for new weights onto the fullest of the
        same version."""
        if not self.schedule.repack:
            return
        coming = collections.Counter(self._destinations.values())
        load = lambda name: len(self.workers[name].running) + coming[name]
        tails = collections.defaultdict(list)
        for name, worker in self.workers.items():
            is_late = worker.version is not None and worker.version < self.sync_version
            is_tail = 0 < load(name) < self.schedule.repack * worker.slots
            if is_late and is_tail and not worker.leaving:
                tails[worker.version].append(name)
        for names in tails.values():
            target, *others = sorted(names, key=load, reverse=True)
            room = self.workers[target].slots - load(target)
            for name in reversed(others):
                keys = set(self.workers[name].running)
                if len(keys) <= room and not coming[name]:
                    room -= len(keys)
                    self._destinations |= dict.fromkeys(keys, target)
                    yield from self._interrupt(name, keys)

    def _syncs(self):
        """Brings workers to `sync_version`, but for those that sequences move to."""
        awaiting = set(self._destinations.values())
        for name, worker in self.workers.items():
            is_current = self.sync_version is None or worker.version == self.sync_version
            if is_current or worker.is_syncing:
                continue
            if worker.running and self.schedule.on_sync == "interrupt":
                yield from self._interrupt(name, worker.running - worker.leaving)
            elif self.schedule.on_sync == "in_place" or not (worker.running or name in awaiting):
                worker.is_syncing = True
                yield SyncWeights(name, self.sync_version)

    def _begins(self):
        """Gives work to the workers with room that have, or may keep, their weights."""
        yield from self._moved()
        able = [
            name for name, worker in self.workers.items()
            if worker.version is not None and worker.version == self.sync_version
            and not worker.is_syncing and not worker.leaving
        ]
        of_begun, of_all = self._shares(len(able))
        while ready := [name for name in able if self.workers[name].has_room]:
            name = min(ready, key=lambda n: len(self.workers[n].running))
            if len(self.workers[name].running) >= (of_begun if self._waiting else of_all):
                return
            if self._waiting:
                key, version = self._waiting.popleft()
                yield self._begin(name, [key], {key: version})
            elif (deadline := self._deadline(self.workers[name].version)) is not None:
                group, self.next_group = self.next_group, self.next_group + 1
                self.queue.add(group, deadline)
                keys = [(group, i) for i in range(self.queue.size + self.schedule.redundant)]
                yield self._begin(name, keys, dict.fromkeys(keys))
            else:
                return

    def _shares(self, able: int) -> tuple[float, float]:
        """Returns the samples that a worker may have while others are about to get new weights, so
        that the first to have them leaves the others theirs: its part of those that are begun, and of
        all that may begin."""
        is_stale = lambda w: self.schedule.on_sync == "interrupt" and w.version != self.sync_version
        late = sum(w.is_syncing or bool(w.leaving) or is_stale(w) for w in self.workers.values())
        if not late:
            return math.inf, math.inf
        begun = len(self._waiting) + sum(len(w.running) for w in self.workers.values())
        new = max(self._room(self.sync_version), 0) * (self.queue.size + self.schedule.redundant)
        return begun / (able + late), (begun + new) / (able + late)

    def _moved(self):
        """Begins what was taken from a worker for another, if that still has its version."""
        for _ in range(len(self._waiting)):
            key, version = self._waiting.popleft()
            name = self._destinations.pop(key, None)
            worker = self.workers.get(name)
            has_version = worker and worker.version == version and not worker.is_syncing
            if has_version and worker.has_room:
                yield self._begin(name, [key], {key: version})
            else:
                self._waiting.append((key, version))

    def _begin(self, name: str, keys: list[Key], drawn_by: dict[Key, int | None]) -> Begin:
        """`drawn_by`: see `preempted`. A sequence of one version that another one has begun starts
        over."""
        worker = self.workers[name]
        worker.running.update(keys)
        is_other = lambda key: drawn_by[key] not in (None, worker.version)
        fresh = {k for k in keys if is_other(k)} if self.schedule.on_sync == "drain" else ()
        return Begin(name, tuple(keys), frozenset(fresh))

    def _room(self, version: int) -> float:
        """Returns how many more groups may begin with these weights."""
        ahead = self.batch * (version + self.schedule.ahead + 1 - self.version) - self._taken
        # Rounded, as 1.1 - 1 batches of 10 groups are one group.
        return min(self.queue.capacity, round(ahead, 6)) - len(self.queue)

    def _deadline(self, version: int) -> float | None:
        """Returns the deadline of a group that begins with these weights; None where it may not."""
        if self._room(version) < 1:
            return None
        return version + self.schedule.staleness

    # Checkpoints

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the controller's JSON state. No worker may have a sequence. The state continues
        at this version of the learner."""
        return {
            "version": version, "next_group": self.next_group,
            "waiting": [[list(key), version] for key, version in self._waiting],
            "ahead": None if math.isinf(self.schedule.ahead) else self.schedule.ahead,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. The queue is restored separately, with the groups of a batch
        that was taken and not trained on. Workers rejoin without weights."""
        self.version, self.next_group = state["version"], state["next_group"]
        self._waiting = collections.deque((tuple(key), v) for key, v in state["waiting"])
        ahead = math.inf if state["ahead"] is None else state["ahead"]
        self.schedule = dataclasses.replace(self.schedule, ahead=ahead)
