"""The state of an asynchronous rollout source: requests, partial sequences, rewards and batches.

Each asynchronous source has one `AsyncBookkeeping`. It turns the controller's decisions into
commands for samplers (`command`), stores the sequences that samplers return (`receive`), and takes
batches (`take`). Nothing here waits or locks. A source with threads calls it from one thread at a
time.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import replay, serialize
from jaxrl_tis.rollouts.controller import LEARNER, Begin, Controller, Discard, Interrupt
from jaxrl_tis.rollouts.groups import Sample, is_equal
from jaxrl_tis.rollouts.queue import Entry, Key, Queue
from jaxrl_tis.rollouts.sampler import Cancel, Command, NewRequests, Preempt
from jaxrl_tis.rollouts.source import SourceParts, engine_metrics

NEEDS = {"reward": ("tokens",), LEARNER: ("reward",)}


@dataclasses.dataclass
class Counts:
    """Counts since the last batch.

    Attributes:
      passed: time, in turns of all samplers (driver "virtual") or in seconds.
      waited: the part of `passed` in which the learner had no batch.
      interrupted: sequences returned unfinished.
      discarded: sequences that no group needs any more.
      resumed: sequences that continued from earlier tokens; resumed_tokens: number of these tokens.
      lost_tokens: tokens of interrupted sequences that begin again, see `can_continue`.
      rejected: groups whose rewards are all equal.
      syncs: weight syncs, counted for each sampler.
    """

    passed: float = 0
    waited: float = 0
    interrupted: int = 0
    discarded: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    lost_tokens: int = 0
    rejected: int = 0
    syncs: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/discarded_groups": self.rejected,
            "async/learner_idle": self.waited / (self.passed or 1),
            "async/interrupted": self.interrupted,
            "async/discarded": self.discarded,
            "async/resumed": self.resumed,
            "async/resumed_tokens": self.resumed_tokens,
            "async/lost_tokens": self.lost_tokens,
            "async/syncs": self.syncs,
        }


@dataclasses.dataclass(frozen=True)
class Claim:
    """Finished samples to be rewarded: their keys, examples and sequences."""

    keys: list[Key]
    examples: list[dict[str, str]]
    trajectories: list[Trajectory]


class AsyncBookkeeping:
    """The state of an asynchronous source, without its samplers.

    Args:
      on_records: called with the records of sequences that have finished, were interrupted, or are
        about to continue with new weights. At that time the old weights are still in use.

    Attributes:
      controller: decides which worker starts which group, and which groups form the next batch.
      queue: groups between sampling and training.
      counts: counts since the last batch.
      keys: request id -> key of each sample in flight.
      taken: groups of the batch in training.
    """

    def __init__(
        self, parts: SourceParts,
        on_records: Callable[[list[Trajectory]], None] = lambda trajectories: None,
    ):
        rollout, schedule, way = parts.config.rollout, parts.schedule, parts.replay
        self._config, self._schedule, self._groups = parts.config, schedule, parts.groups
        self._batches, self._timer, self._on_records = parts.batches, parts.timer, on_records
        self._examples: list[dict[str, str]] = []
        self._age = replay.max_age(schedule, way, rollout.max_age)
        self._replay = None if way is None else replay.Replay(way, self._age, parts.config.seed)
        self._replay_before: replay.Replay | None = None  # the batch that is being trained on
        self._replay_metrics: dict[str, float] = {}
        fresh = rollout.prompts if way is None else rollout.prompts // way.uses
        capacity = rollout.queue or round((schedule.ahead + 1) * fresh, 6)
        self.queue = Queue(parts.groups.size, capacity, NEEDS)
        self.controller = Controller(schedule, fresh, self.queue)
        self.keys: dict[str, Key] = {}
        self._requests: dict[Key, Request] = {}  # of groups in the queue
        self._partials: dict[Key, Trajectory] = {}
        self.taken: list[Entry] = []
        self.counts, self._before = Counts(), Stats()
        self._failed = dict.fromkeys(parts.groups.counts, 0)

    def sync_digest(self) -> dict[str, Any]:
        controller = self.controller
        return {
            "begun": controller.next_group, "sync_version": controller.sync_version,
            "queue": {str(g): sorted(e.columns) for g, e in self.queue.entries.items()},
            "in_flight": sorted(self.keys), "examples": len(self._examples),
            "replay": {str(g): s.uses for g, s in self._replay.stored.items()} if self._replay else {},
            "replay_tau": self._replay.tau if self._replay is not None else None,
        }

    # Samplers

    def command(self, decision: Begin | Interrupt | Discard) -> Command:
        """Returns the command that carries a decision out."""
        if isinstance(decision, Begin):
            return NewRequests(tuple(self._request(key, decision) for key in decision.keys))
        if isinstance(decision, Interrupt):
            return Preempt()
        return Cancel(tuple(id for id, key in self.keys.items() if key in decision.keys))

    def receive(self, name: str, trajectories: list[Trajectory]) -> None:
        """Stores the sequences that a sampler returns, finished or preempted."""
        self.report(trajectories)
        for trajectory in trajectories:
            key = self.keys.pop(trajectory.id)
            if trajectory.stop_reason != "abort":
                if self.controller.finished(name, key):
                    self.queue.put(key, "tokens", trajectory)
                continue
            self.controller.preempted(name, key, newest(trajectory))
            is_wanted = self.queue.is_open(key[0])
            self.counts.interrupted += is_wanted
            self.counts.discarded += not is_wanted
            if is_wanted and can_continue(trajectory):
                self._partials[key] = trajectory
            elif is_wanted:
                self.counts.lost_tokens += len(trajectory.tokens)

    def report(self, trajectories: list[Trajectory]) -> None:
        """Calls `on_records` with the sequences that have at least one token, if there are any."""
        if begun := [t for t in trajectories if len(t.tokens)]:
            self._on_records(begun)

    def synced(self, name: str, version: int) -> None:
        """Records that a sampler now uses the weights of this version."""
        self.controller.synced(name, version)
        self.counts.syncs += 1

    def lost(self, name: str, ids: Collection[str], known: Mapping[Key, Trajectory]) -> int:
        """Makes the sequences of a lost sampler available to others, from their `known` parts.
        Returns the number of sequences with a known part."""
        keys = [self.keys.pop(id) for id in ids]
        wanted = [key for key in keys if key in known and self.queue.is_open(key[0])]
        parts = {key: known[key] for key in wanted if can_continue(known[key])}
        self._partials |= parts
        self.counts.lost_tokens += sum(len(known[key].tokens) for key in wanted if key not in parts)
        self.controller.left(name, {k: newest(t) for k, t in parts.items()})
        return len(parts)

    def _request(self, key: Key, decision: Begin) -> Request:
        """Returns the request of a sample, with its partial sequence if it has one."""
        if key not in self._requests:
            self._open(key[0])
        request, partial = self._requests[key], self._partials.pop(key, None)
        self.keys[request.id] = key
        if partial is None or key in decision.fresh:
            return request
        self.counts.resumed += 1
        self.counts.resumed_tokens += len(partial.tokens)
        return dataclasses.replace(request, partial=partial)

    def _open(self, group: int) -> None:
        """Reads the example of a group and makes its requests. Their names equal those of the
        synchronous source, which gives them the same sampling noise."""
        if not self._examples:
            with self._timer("data"):
                self._examples = self._batches.next_whole()
        entry = self.queue.entries[group]
        entry.prompt = self._examples.pop(0)
        self._make_requests(entry)

    def _make_requests(self, entry: Entry) -> None:
        group, batch = entry.number, self.controller.batch
        name = f"{group // batch + 1}/0/{group % batch}"
        requests = self._groups.requests(
            entry.prompt, name, group // batch, self._schedule.redundant
        )
        self._requests |= {(group, i): request for i, request in enumerate(requests)}

    # Rewards

    def claim(self) -> Claim | None:
        """Returns finished samples that were not claimed before, or None if there are none."""
        if not (keys := self.queue.claim("reward")):
            return None
        examples = [self.queue.entries[group].prompt for group, _ in keys]
        return Claim(keys, examples, [self.queue.get(key, "tokens") for key in keys])

    def score(self, claim: Claim) -> list[Sample]:
        """Computes rewards. Changes no state except the count of failed rewards."""
        before = dict(self._groups.counts)
        with self._timer("reward"):
            samples = self._groups.samples(claim.examples, claim.trajectories)
        for name, count in self._groups.counts.items():
            self._failed[name] += count - before[name]
        return samples

    def add_rewards(self, keys: list[Key], samples: list[Sample]) -> None:
        """Adds rewards to the queue. With dynamic_sampling, rejects groups whose rewards are all
        equal, at most rollout.max_rounds - 1 batches of groups."""
        for key, sample in zip(keys, samples, strict=True):
            self.queue.put(key, "reward", sample)
        rollout = self._config.rollout
        most = self.controller.batch * (rollout.max_rounds - 1) if rollout.dynamic_sampling else 0
        for group in sorted({group for group, _ in keys}):
            is_ready = self.counts.rejected < most and self.queue.is_ready(group, LEARNER)
            if is_ready and is_equal(self._samples(self.queue.entries[group])):
                self.controller.rejected(group)
                self.counts.rejected += 1
                self._forget(group)

    # Batches

    @property
    def lacks_groups(self) -> bool:
        """Whether the batch still lacks fresh groups."""
        return len(self.taken) < self.controller.batch

    def take(self) -> list[Entry] | None:
        """Takes the available groups of the next batch; see `Controller.take`."""
        if (entries := self.controller.take()) is None:
            return None
        self.taken = self.taken + entries
        for entry in entries:
            check_versions(entry, self.controller.version or 0, self._schedule.staleness)
            self._forget(entry.number)
        return entries

    def samples(self, entries: list[Entry]) -> list[Sample]:
        """Returns the samples of groups that were taken; groups are numbered in order of their start."""
        groups = [self._samples(entry, entry.number) for entry in entries]
        for group in groups:
            self._groups.learned(group)
        return [sample for group in groups for sample in group]

    def replayed(self) -> list[Sample]:
        """Stores the fresh groups of a batch for replay, and returns the batch's replayed samples
        under unused group numbers; [] without replay."""
        if self._replay is None:
            return []
        buffer, first = self._replay, self.controller.next_group
        version = self.controller.version or 0
        self._replay_before = buffer.copy()
        stored = []
        for entry in sorted(self.taken, key=lambda e: e.number):
            size = replay.priority(sample.reward for sample in self._samples(entry))
            stored.append(buffer.add(entry.number, entry, _oldest(entry, version), version, size))
        count = self._config.rollout.prompts - len(self.taken)
        replayed = buffer.sample(count, version, [entry.number for entry in self.taken])
        for each in replayed:
            check_versions(each.samples, version, self._age)
        batch = stored + replayed
        self._replay_metrics = {
            "replay/uses_mean": float(np.mean([each.uses for each in batch])),
            "replay/age_mean": float(np.mean([version - each.stored_at for each in batch])),
            "replay/size": len(buffer),
        }
        if buffer.way.is_measured:
            self._replay_metrics["replay/tau"] = buffer.tau
        numbered = enumerate(replayed, first)
        return [s for number, each in numbered for s in self._samples(each.samples, number)]

    def published(self, version: int) -> None:
        """Records that the learner has trained on the batch, which gave this version."""
        self.controller.published(version)
        self.taken, self._replay_before = [], None

    def observe(self, values: Mapping[str, float]) -> None:
        if self._replay is not None:
            self._replay.observe(values)

    def reduce_staleness(self) -> str:
        before = self.controller.schedule.ahead
        ahead = self.controller.reduce_staleness()
        if ahead == before:
            return f"samplers begin {ahead:g} batches ahead, the fewest that the schedule can; weights follow"
        return f"samplers begin {ahead:g} batches ahead from now on, {before:g} before"

    def stuck(self) -> RuntimeError:
        """Returns the error to raise if the learner would wait for ever."""
        return RuntimeError(
            f"batch {self.controller.version} is not complete and no sampler draws; "
            f"{len(self.queue)} groups are in the queue"
        )

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Returns the metrics since the last batch; `stats`: totals of all samplers since start."""
        counts, self.counts = self.counts, Counts()
        failed, self._failed = self._failed, dict.fromkeys(self._failed, 0)
        since, self._before = stats.since(self._before), stats
        values = engine_metrics(self._config.engine, since)
        values |= {f"reward/{name}": count for name, count in failed.items()}
        begun = len(self.queue) + len(self.taken)
        return values | self._replay_metrics | counts.metrics() | {
            "async/queue_groups": len(self.queue),
            "async/batches_ahead": begun / self.controller.batch,
            "async/in_flight": len(self.keys),
        }

    def _forget(self, group: int) -> None:
        """Deletes the requests and partial sequences of a group that has left the queue."""
        for sample in range(self._groups.size + self._schedule.redundant):
            self._requests.pop((group, sample), None)
            self._partials.pop((group, sample), None)

    def _samples(self, entry: Entry, number: int = 0) -> list[Sample]:
        """Returns the rewarded samples of a group under this number."""
        rewarded = [row["reward"] for _, row in sorted(entry.columns.items())]
        return [dataclasses.replace(s, group=number) for s in self._groups.group(rewarded)]

    # Checkpoints

    def is_untrained(self, version: int) -> bool:
        """Whether a batch was taken that this version has not been trained on."""
        return bool(self.taken) and version == self.controller.version

    def get_state(
        self, version: int, stats: Stats, in_flight: Mapping[Key, Trajectory] = {}
    ) -> dict[str, Any]:
        """Returns the state of the source after the update that made `version`.

        Args:
          stats: totals of all samplers since start.
          in_flight: reported parts of sequences that samplers continue. A restart resumes these
            sequences from their parts, and starts all others in flight from their prompts.
        """
        is_untrained = self.is_untrained(version)
        untrained = self.taken if is_untrained else []
        is_replayed = is_untrained and self._replay_before is not None
        buffer = self._replay_before if is_replayed else self._replay
        entries = sorted([*untrained, *self.queue.entries.values()], key=lambda e: e.number)
        controller = self.controller.get_state(version)
        continued = sorted(key for key in self.keys.values() if self.queue.is_open(key[0]))
        controller["waiting"] += [[list(k), newest(in_flight.get(k))] for k in continued]
        parts = {k: in_flight[k] for k in continued if k in in_flight}
        partials = self._partials | {k: t for k, t in parts.items() if can_continue(t)}
        return {
            "replay": [] if buffer is None else buffer.get_state(serialize.written),
            "replay_measured": [] if self._replay is None else list(self._replay.measured),
            "batches": self._batches.get_state(), "examples": self._examples,
            "groups": self._groups.get_state(),
            "controller": controller,
            "queue": [serialize.written(entry) for entry in entries],
            "counts": [
                dataclasses.asdict(self.counts), dataclasses.asdict(stats.since(self._before)),
                self._failed,
            ],
            "partials": [
                [list(key), serialize.trajectory_text(t)] for key, t in sorted(partials.items())
            ],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])
        self._groups.set_state(state.get("groups", {}))
        self._examples = state["examples"]
        counts, since, failed = state["counts"]
        self._failed |= failed
        self.counts = Counts(**counts)
        # Counts from before the restart are added to the next batch.
        self._before = Stats(**{name: -x for name, x in since.items()})
        self.controller.set_state(state["controller"])
        if self._replay is not None:
            self._replay.set_state(state["replay"], serialize.read)
            self._replay.measured = tuple(state.get("replay_measured", self._replay.measured))
        self._partials = {
            tuple(key): serialize.read_trajectory(text) for key, text in state["partials"]
        }
        for text in state["queue"]:
            entry = serialize.read(text)
            self.queue.entries[entry.number] = entry
            self._make_requests(entry)


def check_versions(entry: Entry, version: int, staleness: float) -> None:
    """Raises RuntimeError if a token of a group is more than `staleness` versions older than the
    policy, or of a version newer than the learner's."""
    for trajectory in _trajectories(entry):
        versions = trajectory.version
        if not len(versions):  # a session whose agent made no call
            continue
        oldest, latest = versions.min(), versions.max()
        if not version - staleness <= oldest <= latest <= version:
            raise RuntimeError(
                f"sequence {trajectory.id} has tokens of versions {oldest} to {latest}, and "
                f"the update starts from {version}; the bound on staleness is {staleness:g}"
            )


def can_continue(partial: Trajectory) -> bool:
    """Whether an interrupted sequence has tokens to continue from. One that saw evicted keys starts from
    its prompt again, as no prefill rebuilds them."""
    return len(partial.tokens) > 0 and not len(partial.evict_step)


def newest(partial: Trajectory | None) -> int | None:
    """Returns the version of the last token from which a sequence continues, None without any."""
    return int(partial.version[-1]) if partial is not None and can_continue(partial) else None


def _oldest(entry: Entry, version: int) -> int:
    """Returns the oldest weight version among a group's tokens."""
    return int(min(t.version.min(initial=version) for t in _trajectories(entry)))


def _trajectories(entry: Entry) -> Iterator[Trajectory]:
    """Yields the records of a group, and their forks."""
    for row in entry.columns.values():
        yield from (row["tokens"], *row["tokens"].forks)


def batch_parts(
    books: AsyncBookkeeping, next_groups: Callable[[], list[Entry]]
) -> Iterator[list[Sample]]:
    """Yields the samples of a batch: fresh groups, all at once or as they arrive (`on_arrival`),
    then replayed groups. `next_groups` waits for fresh groups."""
    while books.lacks_groups:
        yield books.samples(next_groups())
    if replayed := books.replayed():
        yield replayed
