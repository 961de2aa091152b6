"""The asynchronous source: samplers run ahead of the learner as far as the mode allows.

The controller decides; what is here carries its decisions to the samplers and what they drew to the
queue, one turn after the other: each sampler that has something to draw makes one call of its
engine. With the driver "virtual" the learner's time is counted in turns, too: an update takes
`rollout.update_turns` of them, so that which version draws which token does not depend on a clock,
and a run can be repeated bit by bit.
"""

import base64
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxrl_tis import processes
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.metrics import Timer
from jaxrl_tis.rollouts import wire
from jaxrl_tis.rollouts.controller import (
    LEARNER, Begin, Controller, Decision, Discard, Interrupt,
)
from jaxrl_tis.rollouts.groups import Groups, Sample
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.queue import Entry, Key, Queue
from jaxrl_tis.rollouts.sampler import Drop, GiveBack, NewRequests, NewWeights, Order, Sampler
from jaxrl_tis.rollouts.source import engine_metrics

REWARDED = ("text", "score", "reward", "components")  # of a Sample, beside its trajectory
NEEDS = {"reward": ("tokens",), LEARNER: ("reward",)}


@dataclasses.dataclass
class Counts:
    """What happened since the last batch.

    Attributes:
      turns: of all samplers; waited: of these while the learner had nothing to train on.
      interrupted: sequences given back unfinished; discarded: that nobody wanted any more.
      resumed_tokens: tokens that sequences had when they were begun again.
      rejected: groups whose rewards are all equal.
      syncs: of a sampler.
    """

    turns: int = 0
    waited: int = 0
    interrupted: int = 0
    discarded: int = 0
    resumed_tokens: int = 0
    rejected: int = 0
    syncs: int = 0


class Asynchronous:
    """A source of batches whose samplers run ahead; see `Controller` for what they may.

    Args:
      mode: of rollout.mode.
      batches: records of prompts, on all processes alike.
      timer: of the phases "data", "rollout" and "reward".
      load: (the policy's parameters, version) -> serving parameters.
      start: (serving parameters, version) -> a scheduler.
      slots: sequences that a sampler draws at once.
      arrived: called with the records of sequences that have ended, were interrupted, or are about
        to go on with new weights, while those that drew them are still in use.
      pulse: called between two turns.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mode: Mode,
        groups: Groups,
        batches: Batches,
        timer: Timer,
        load: Callable[[Any, int], Any],
        start: Callable[[Any, int], Scheduler],
        slots: int,
        arrived: Callable[[list[Trajectory]], None] = lambda trajectories: None,
        pulse: Callable[[], None] = lambda: None,
    ):
        rollout = config.rollout
        self._config, self._mode, self._groups = config, mode, groups
        self._batches, self._records = batches, []
        self._timer, self._load, self._arrived, self._pulse = timer, load, arrived, pulse
        capacity = rollout.queue or round((mode.ahead + 1) * rollout.prompts, 6)
        self._queue = Queue(groups.size, capacity, NEEDS)
        self.controller = Controller(mode, rollout.prompts, self._queue)
        self._samplers = {f"sampler {i}": Sampler(start) for i in range(rollout.workers)}
        for name in self._samplers:
            self.controller.joined(name, slots)
        self._keys: dict[str, Key] = {}  # by request, of what is being drawn
        self._requests: dict[Key, Request] = {}  # of groups in the queue
        self._partials: dict[Key, Trajectory] = {}
        self._served: NewWeights | None = None
        self._taken: list[Entry] = []  # of the batch that is being trained on
        self._is_updating = False
        self._counts, self._failed = Counts(), dict.fromkeys(groups.counts, 0)
        self._before = self._stats()

    # What the run calls

    def publish(self, params: Any, version: int) -> bool:
        self._finish_update()
        self.controller.published(version)
        self._taken = []
        is_offered = self.controller.offered == version
        if is_offered:
            serving = _apart(self._load(params, version), params)
            self._served = NewWeights(jax.block_until_ready(serving), version)
        self._settle()
        return is_offered

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Waits for the groups of the next batch, whole and in order. Its metrics tell how far the
        samplers are ahead and what new weights cost."""
        samples = [sample for part in self.parts(step) for sample in part]
        return sorted(samples, key=lambda s: s.group), self.metrics()

    def parts(self, step: int) -> Iterator[list[Sample]]:
        """Yields the groups of the next batch as they come: all at once, but in modes with
        `on_arrival`. A sample's group is the number of groups that had begun in the run before."""
        count = 0
        while count < self.controller.batch:
            entries = self._next_entries()
            count += len(entries)
            yield [
                dataclasses.replace(sample, group=entry.number)
                for entry in entries for sample in self._group(entry)
            ]

    def _next_entries(self) -> list[Entry]:
        while (entries := self.controller.take()) is None:
            self._pulse()
            if not self._turn():
                raise RuntimeError(
                    f"batch {self.controller.version} is not complete and no sampler draws; "
                    f"{len(self._queue)} groups are in the queue"
                )
            self._counts.waited += 1
        self._taken, self._is_updating = self._taken + entries, True
        for entry in entries:
            self._check(entry)
            for sample in range(self._groups.size + self._mode.redundant):
                self._requests.pop((entry.number, sample), None)
        return entries

    def tighten(self) -> str:
        before = self.controller.mode.ahead
        ahead = self.controller.tighten()
        if ahead == before:
            return f"samplers begin {ahead:g} batches ahead, the fewest that the mode can; weights follow"
        return f"samplers begin {ahead:g} batches ahead from now on, {before:g} before"

    def rest(self) -> None:
        self._finish_update()
        self._gather()
        for sampler in self._samplers.values():
            while sampler.pending:
                sampler.step()  # returns what was dropped
            sampler.rest()

    def facts(self) -> dict[str, Any]:
        controller = self.controller
        return {
            "begun": controller.next_group, "offered": controller.offered,
            "queue": {str(g): sorted(e.columns) for g, e in self._queue.entries.items()},
            "drawing": sorted(self._keys), "records": len(self._records),
        }

    # Turns

    def _finish_update(self) -> None:
        """Lets the turns pass that the learner's update takes, once."""
        is_updating, self._is_updating = self._is_updating, False
        for _ in range(self._config.rollout.update_turns if is_updating else 0):
            self._turn()

    def _turn(self) -> bool:
        """Lets each sampler make a call; returns whether one had anything to draw."""
        self._settle()
        drawing = [name for name, sampler in self._samplers.items() if sampler.pending]
        with self._timer("rollout"):
            for name in drawing:
                self._hear(name, self._samplers[name].step())
        self._counts.turns += 1
        self._reward()
        return bool(drawing)

    def _settle(self) -> None:
        """Carries out decisions until there are none."""
        while decisions := self.controller.decisions():
            for decision in decisions:
                name, order = decision.worker, self._order(decision)
                sampler = self._samplers[name]
                if isinstance(order, NewWeights):
                    self._tell(sampler.records())
                with self._timer("rollout"):
                    self._hear(name, sampler.obey(order))
                if isinstance(order, NewWeights):
                    self.controller.swapped(name, order.version)
                    self._counts.syncs += 1

    def _order(self, decision: Decision) -> Order:
        if isinstance(decision, Begin):
            return NewRequests(tuple(self._begun(key, decision) for key in decision.keys))
        if isinstance(decision, Interrupt):
            return GiveBack()
        if isinstance(decision, Discard):
            return Drop(tuple(id for id, key in self._keys.items() if key in decision.keys))
        return self._served

    def _begun(self, key: Key, decision: Begin) -> Request:
        """Returns the request of a sample, with what there is of it."""
        if key not in self._requests:
            self._open(key[0])
        request, partial = self._requests[key], self._partials.pop(key, None)
        self._keys[request.id] = key
        if partial is None or key in decision.fresh:
            return request
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
            versions = trajectory.version
            self.controller.gave_back(name, key, int(versions[-1]) if len(versions) else None)
            is_wanted = key[0] in self._queue.entries and not self._queue.has_tokens(key[0])
            self._counts.interrupted += is_wanted
            self._counts.discarded += not is_wanted
            if is_wanted and len(versions):
                self._partials[key] = trajectory

    def _tell(self, trajectories: list[Trajectory]) -> None:
        """Calls `arrived` where there is something to be told."""
        if drawn := [t for t in trajectories if len(t.tokens)]:
            self._arrived(drawn)

    def _reward(self) -> None:
        """Rewards what has ended, and sends groups away whose rewards are all equal, where the run
        is to and may do without them."""
        keys = self._queue.claim("reward")
        if not keys:
            return
        with self._timer("reward"):
            before = dict(self._groups.counts)
            records = [self._queue.entries[group].prompt for group, _ in keys]
            samples = self._groups.samples(records, [self._queue.get(k, "tokens") for k in keys])
        for name, count in self._groups.counts.items():
            self._failed[name] += count - before[name]
        for key, sample in zip(keys, samples, strict=True):
            self._queue.put(key, "reward", sample)
        rollout = self._config.rollout
        most = rollout.prompts * (rollout.max_rounds - 1) if rollout.dynamic_sampling else 0
        for group in sorted({group for group, _ in keys}):
            if self._counts.rejected < most and self._is_equal(group):
                self.controller.rejected(group)
                self._counts.rejected += 1

    def _is_equal(self, group: int) -> bool:
        """Whether a group is complete and its rewards are all equal."""
        if not self._queue.is_ready(group, LEARNER):
            return False
        return len({s.reward for s in self._group(self._queue.entries[group])}) == 1

    # Batches

    def _group(self, entry: Entry) -> list[Sample]:
        rewarded = [row["reward"] for _, row in sorted(entry.columns.items())]
        return self._groups.group(rewarded)

    def _check(self, entry: Entry) -> None:
        """Raises RuntimeError for a token that is staler than the mode allows, or of no version
        that the learner has had."""
        version = self.controller.version
        for row in entry.columns.values():
            drawn_by = row["tokens"].version
            oldest, newest = drawn_by.min(initial=version), drawn_by.max(initial=0)
            if not version - self._mode.staleness <= oldest <= newest <= version:
                raise RuntimeError(
                    f"sequence {row['tokens'].id} has tokens of versions {oldest} to {newest}, and "
                    f"the update starts from {version}; the bound on staleness is "
                    f"{self._mode.staleness:g}"
                )

    def _stats(self) -> Stats:
        found = [sampler.stats for sampler in self._samplers.values()]
        return Stats(*map(sum, zip(*map(dataclasses.astuple, found))))

    def metrics(self) -> dict[str, float]:
        """Returns what was counted since it was called last, see `next`."""
        counts, self._counts = self._counts, Counts()
        failed, self._failed = self._failed, dict.fromkeys(self._failed, 0)
        stats = self._stats()
        drawn, self._before = stats.since(self._before), stats
        found = engine_metrics(self._config.engine, drawn)
        return found | {f"reward/{name}": count for name, count in failed.items()} | {
            "rollout/discarded_groups": counts.rejected,
            "async/queue_groups": len(self._queue),
            "async/ahead_batches": self.controller.next_group / self.controller.batch
            - self.controller.version,
            "async/drawing": len(self._keys),
            "async/learner_idle": counts.waited / max(counts.turns, 1),
            "async/interrupted": counts.interrupted,
            "async/discarded": counts.discarded,
            "async/resumed_tokens": counts.resumed_tokens,
            "async/syncs": counts.syncs,
        }

    # Checkpoints

    def _gather(self) -> None:
        """Takes everything back from the samplers."""
        for decision in self.controller.interrupt_all():
            order = self._order(decision)
            self._hear(decision.worker, self._samplers[decision.worker].obey(order))

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns what is to go on with after the update that made `version`: all that samplers
        draw is interrupted for it, and goes on afterwards as it does after a restart."""
        untrained = self._taken if version == self.controller.version else []
        if not untrained:
            self._finish_update()
        self._gather()
        drawn = self._stats().since(self._before)
        entries = sorted([*untrained, *self._queue.entries.values()], key=lambda e: e.number)
        return {
            "batches": self._batches.get_state(), "records": self._records,
            "controller": self.controller.get_state(version),
            "queue": [_written(entry) for entry in entries],
            "counts": [dataclasses.asdict(self._counts), dataclasses.asdict(drawn), self._failed],
            "partials": [[list(key), _bytes(t)] for key, t in sorted(self._partials.items())],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])
        self._records = state["records"]
        counts, drawn, self._failed = state["counts"]
        self._counts = Counts(**counts)
        # What was counted before the break is counted to the next batch, too.
        self._before = Stats(**{name: -x for name, x in drawn.items()})
        self.controller.set_state(state["controller"])
        self._partials = {tuple(key): _trajectory(text) for key, text in state["partials"]}
        for saved in state["queue"]:
            entry = _read(saved)
            self._queue.entries[entry.number] = entry
            self._make_requests(entry)


def _apart(serving: Any, params: Any) -> Any:
    """Copies what the serving parameters share with the policy's, which its update gives away."""
    own = {id(x) for x in jax.tree.leaves(params)}
    return jax.tree.map(lambda x: jnp.copy(x) if id(x) in own else x, serving)


def _bytes(trajectory: Trajectory) -> str:
    return base64.b64encode(wire.trajectory_message(trajectory)).decode()


def _trajectory(text: str) -> Trajectory:
    return wire.read_trajectory(base64.b64decode(text))


def _written(entry: Entry) -> dict[str, Any]:
    """Returns an entry of the queue as JSON can hold it."""
    rows = []
    for sample, row in sorted(entry.columns.items()):
        rewarded = None
        if "reward" in row:
            rewarded = {name: getattr(row["reward"], name) for name in REWARDED}
        rows.append([sample, _bytes(row["tokens"]), rewarded])
    deadline = None if entry.deadline == math.inf else entry.deadline
    return {"number": entry.number, "deadline": deadline, "prompt": entry.prompt, "rows": rows}


def _read(saved: dict[str, Any]) -> Entry:
    deadline = math.inf if saved["deadline"] is None else saved["deadline"]
    entry = Entry(saved["number"], deadline, saved["prompt"])
    for sample, text, rewarded in saved["rows"]:
        trajectory = _trajectory(text)
        entry.columns[sample] = {"tokens": trajectory}
        entry.claimed |= {("reward", sample)} if rewarded else set()
        if rewarded:
            entry.columns[sample]["reward"] = Sample(trajectory, entry.prompt, group=0, **rewarded)
    return entry
