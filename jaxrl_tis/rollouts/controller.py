"""Decides which worker starts which group, with which weights, and which worker waits.

A state machine without clock, threads or I/O. Events are method calls: workers join and leave,
sequences finish or are preempted, the learner publishes a version. `decisions` then returns the
commands, and `take` returns the groups of the next batch.

The bound on staleness holds by construction, and no sample is dropped for it. A group that starts
with weights of version u has the deadline u + staleness: the last batch that may train on it. A
group starts only if every batch up to its deadline can still hold all groups due by then. A batch
starts after its due groups have finished. All deadlines are therefore kept, in any order of
finishing. For one worker the rule equals AReaL's: group N of batches of B starts if
floor((N - 1) / B) <= u + staleness (2505.24298).
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
    """A worker shall generate these samples. Samples in `fresh` start from their prompts, even if
    partial sequences exist."""

    worker: str
    keys: tuple[Key, ...]
    fresh: frozenset[Key] = frozenset()


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """A worker shall preempt these samples and return them unfinished."""

    worker: str
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Discard:
    """A worker shall cancel these samples, which no group needs any more."""

    worker: str
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class SyncWeights:
    """A worker shall sync to the weights of this version."""

    worker: str
    version: int


Decision = Begin | Interrupt | Discard | SyncWeights


@dataclasses.dataclass
class WorkerState:
    """The controller's view of one sampler.

    Attributes:
      slots: number of sequences that it generates at once.
      version: of its weights; None before its first sync.
      running: samples in flight on it.
      leaving: the samples in `running` that it was commanded to preempt.
      is_syncing: a sync was commanded and is not confirmed yet.
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
    """The scheduling state of an asynchronous run.

    Args:
      schedule: its numbers.
      batch: number of groups in a batch.
      queue: of groups. The driver calls `put`; the controller calls `add` and `take`.

    Attributes:
      version: of the learner, equal to the number of the next batch.
      sync_version: the newest version that workers may sync to.
      next_group: number of the next group, equal to the number of groups started so far.
    """

    def __init__(self, schedule: Schedule, batch: int, queue: Queue):
        if queue.capacity < batch:
            raise ValueError(f"a queue of {queue.capacity} groups cannot hold a batch of {batch}")
        self.schedule, self.batch, self.queue = schedule, batch, queue
        self.version: int | None = None
        self.sync_version: int | None = None
        self.next_group = 0
        self.workers: dict[str, WorkerState] = {}
        # Samples to be started again, with the version of their last token; None without tokens.
        self._waiting: collections.deque[tuple[Key, int | None]] = collections.deque()
        self._destinations: dict[Key, str] = {}
        self._discarded: dict[str, set[Key]] = collections.defaultdict(set)
        self._taken = 0  # groups of batch `version`
        self._must_sync = True

    # Events

    def joined(self, name: str, slots: int) -> None:
        """A worker has joined; it has no weights yet."""
        if name in self.workers:
            raise ValueError(f"a worker named {name!r} is there already")
        self.workers[name] = WorkerState(slots)

    def left(self, name: str, drawn_by: Mapping[Key, int | None] = {}) -> None:
        """A worker is gone, and other workers take its samples. `drawn_by` has the version of the
        last token of samples with a known part (see `preempted`); the others start over."""
        for key in sorted(self.workers.pop(name).running):
            self._wait(key, drawn_by.get(key))
        self._discarded.pop(name, None)

    def published(self, version: int) -> None:
        """The learner has trained this version on the last batch. Raises ValueError if the version
        does not follow from the batches taken."""
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
        """Whether workers may sync to this version once it is published."""
        if self._must_sync or self.sync_version is None:
            return True
        return version - self.sync_version >= self.schedule.sync_every

    def synced(self, name: str, version: int) -> None:
        """A worker now has these weights; raises ValueError if it had newer ones."""
        worker = self.workers[name]
        if worker.version is not None and version < worker.version:
            raise ValueError(f"worker {name!r} goes back from version {worker.version} to {version}")
        worker.version, worker.is_syncing = version, False

    def finished(self, name: str, key: Key) -> bool:
        """A worker has finished a sequence. Returns False if the sequence is not assigned to it."""
        is_known = self._forget(name, key)
        if is_known:
            self._destinations.pop(key, None)
        return is_known

    def preempted(self, name: str, key: Key, version: int | None) -> bool:
        """A worker has returned a sequence unfinished; `version` is that of its last token, None
        without tokens. Returns False if the sequence is not assigned to it."""
        is_known = self._forget(name, key)
        if is_known:
            self._wait(key, version)
        return is_known

    def rejected(self, group: int) -> None:
        """The learner rejects a complete group; another group may start in its place."""
        self.queue.take([group])

    def reduce_staleness(self) -> float:
        """Lowers the staleness bound of new groups by one version if possible, and makes the next
        published version sync. Returns the number of batches that samplers may start ahead."""
        ahead = self.schedule.ahead
        if math.isinf(ahead):
            ahead = float(self.queue.capacity // self.batch)
            for entry in self.queue.entries.values():  # or groups with a deadline always go first
                entry.deadline = (self.version or 0) + math.ceil(self.queue.capacity / self.batch)
        ahead = max(ahead - 1, self.schedule.sync_every - 1)
        self.schedule, self._must_sync = dataclasses.replace(self.schedule, ahead=ahead), True
        return ahead

    def interrupt_all(self) -> list[Interrupt]:
        """Preempts all samples of all workers, for a checkpoint or a pause. Workers continue with
        the next published version, the only version that a checkpoint knows of."""
        self._must_sync, decisions = True, []
        self._destinations.clear()
        for name, worker in self.workers.items():
            decisions += self._interrupt(name, worker.running - worker.leaving)
        return decisions

    # Decisions

    def decisions(self) -> list[Decision]:
        """Returns the decisions to carry out now; each is returned once."""
        return [
            *self._discards(), *self._repacks(), *self._moved(), *self._syncs(), *self._begins()
        ]

    def take(self) -> list[Entry] | None:
        """Removes and returns the groups of batch `version`, earliest deadline first. With
        `on_arrival`, returns the part that is ready. None while the batch has to wait."""
        left = self.batch - self._taken
        if self.version is None or not left:
            return None
        entries = self.queue.entries
        ready = {g for g in entries if self.queue.is_ready(g, LEARNER)}
        order = sorted(ready, key=lambda g: (entries[g].deadline, g))[:left]
        if not self.schedule.on_arrival:
            later = sorted(entries[g].deadline for g in entries.keys() - set(order))
            # The remaining groups must fit into the following batches by their deadlines.
            is_kept = all(
                count <= self.batch * (last - self.version) for count, last in enumerate(later, 1)
            )
            if len(order) < left or not is_kept:
                return None
        self._taken += len(order)
        return self.queue.take(order) or None

    def _wait(self, key: Key, version: int | None) -> None:
        """Queues a sample for another worker if its group still needs it; `version`: see
        `preempted`."""
        if self.queue.is_open(key[0]):
            self._waiting.append((key, version))
        else:
            self._destinations.pop(key, None)

    def _forget(self, name: str, key: Key) -> bool:
        """Removes a sample from a worker; returns whether the worker had it."""
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
        """Yields decisions to cancel samples of groups that are complete or gone."""
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
        """Yields decisions that move the last sequences of workers with outdated weights to the
        fullest worker of the same version."""
        newest = self.sync_version
        if not self.schedule.repack or newest is None:
            return
        coming = collections.Counter(self._destinations.values())
        load = lambda name: len(self.workers[name].running) + coming[name]
        tails = collections.defaultdict(list)
        for name, worker in self.workers.items():
            is_late = worker.version is not None and worker.version < newest
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
        """Yields decisions to sync workers to `sync_version`, except targets of moved sequences."""
        awaiting = set(self._destinations.values())
        for name, worker in self.workers.items():
            if self.sync_version is None or worker.version == self.sync_version:
                continue
            if worker.is_syncing:
                continue
            if worker.running and self.schedule.on_sync == "interrupt":
                yield from self._interrupt(name, worker.running - worker.leaving)
            elif self.schedule.on_sync == "in_place" or not (worker.running or name in awaiting):
                worker.is_syncing = True
                yield SyncWeights(name, self.sync_version)

    def _begins(self):
        """Yields decisions that start samples on workers with room and current weights."""
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
            elif (deadline := self._deadline(self.sync_version or 0)) is not None:
                group, self.next_group = self.next_group, self.next_group + 1
                self.queue.add(group, deadline)
                keys = [(group, i) for i in range(self.queue.size + self.schedule.redundant)]
                yield self._begin(name, keys, dict.fromkeys(keys))
            else:
                return

    def _shares(self, able: int) -> tuple[float, float]:
        """Returns how many samples a worker may hold while other workers are still syncing: its
        share of the samples already started, and of all that may start. The first worker to sync
        thereby leaves work for the others."""
        is_stale = lambda w: self.schedule.on_sync == "interrupt" and w.version != self.sync_version
        late = sum(w.is_syncing or bool(w.leaving) or is_stale(w) for w in self.workers.values())
        if not late:
            return math.inf, math.inf
        begun = len(self._waiting) + sum(len(w.running) for w in self.workers.values())
        of_group = self.queue.size + self.schedule.redundant
        new = max(self._room(self.sync_version or 0), 0) * of_group
        return begun / (able + late), (begun + new) / (able + late)

    def _moved(self):
        """Yields decisions that start moved samples on their target, if it still has their
        version."""
        for _ in range(len(self._waiting)):
            key, version = self._waiting.popleft()
            name = self._destinations.pop(key, "")
            worker = self.workers.get(name)
            is_free = worker is not None and worker.has_room and not worker.is_syncing
            if worker is not None and is_free and worker.version == version:
                yield self._begin(name, [key], {key: version})
            else:
                self._waiting.append((key, version))

    def _begin(self, name: str, keys: list[Key], drawn_by: dict[Key, int | None]) -> Begin:
        """Returns the decision to start samples. If sequences must have one version, a sample with
        tokens of another version starts over. `drawn_by`: see `preempted`."""
        worker = self.workers[name]
        worker.running.update(keys)
        is_other = lambda key: drawn_by[key] not in (None, worker.version)
        fresh = {k for k in keys if is_other(k)} if self.schedule.on_sync == "drain" else ()
        return Begin(name, tuple(keys), frozenset(fresh))

    def _room(self, version: int) -> float:
        """Returns how many more groups may start with these weights."""
        ahead = self.batch * (version + self.schedule.ahead + 1 - (self.version or 0)) - self._taken
        # Rounded, as 1.1 - 1 batches of 10 groups are one group.
        return min(self.queue.capacity, round(ahead, 6)) - len(self.queue)

    def _deadline(self, version: int) -> float | None:
        """Returns the deadline of a group that starts with these weights; None if none may
        start."""
        if self._room(version) < 1:
            return None
        return version + self.schedule.staleness

    # Checkpoints

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the state as JSON, to continue with this version of the learner. All samples must
        have been preempted."""
        return {
            "version": version, "next_group": self.next_group,
            "waiting": [[list(key), version] for key, version in self._waiting],
            "ahead": None if math.isinf(self.schedule.ahead) else self.schedule.ahead,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state. The queue is restored separately, including the groups of a taken but
        untrained batch. Workers join without weights."""
        self.version, self.next_group = state["version"], state["next_group"]
        self._waiting = collections.deque((tuple(key), v) for key, v in state["waiting"])
        ahead = math.inf if state["ahead"] is None else state["ahead"]
        self.schedule = dataclasses.replace(self.schedule, ahead=ahead)
