"""Random events against the controller: whatever happens, its groups arrive whole, once, in time.

    python -m tests.rollouts.controller_fuzz [--events=100000] [--seed=0]

A world of its own plays workers, transport, rewards and learner, and keeps its own books: of every
token it knows the version that drew it. Commands and reports are late, workers die and come, and a
checkpoint can be taken at any moment. What must hold is written down here once more, from the
methods' papers and not from the controller. Prints a line for every schedule; the exit status is 1
if anything was violated.
"""

import argparse
import collections
import copy
import dataclasses
import json
import math
import random
import sys
import time

from jaxrl_tis.rollouts.controller import Begin, Controller, Discard, Interrupt, SyncWeights
from jaxrl_tis.rollouts.schedules import SCHEDULES, Schedule, parse
from jaxrl_tis.rollouts.queue import Entry, Queue

CASES = [
    "sync", "periodic", "one_step",
    "fully_async(trigger=1, threshold=0)", "fully_async(trigger=3, threshold=0)",
    "fully_async(trigger=2, threshold=0.5, partial=False)", "fully_async",
    "fully_async(trigger=1, threshold=0.3)", "fully_async(trigger=2, threshold=inf)",
    "areal(staleness=0)", "areal(staleness=1)", "areal", "areal(staleness=inf)",
    "in_flight", "oapl(lag=3)",
    "dora(staleness=1)", "dora", "dora(staleness=3)",
    "roll_flash", "roll_flash(alpha=0.5)", "roll_flash(alpha=2, redundant=2)",
    "laminar", "laminar(staleness=2, repack=0.99)",
]
OTHERS = {  # points between the published ones
    "all at once": Schedule(ahead=3.5, sync_every=2, redundant=2, repack=0.9),
    "redundant on arrival": Schedule(on_arrival=True, redundant=1),
    "in place, every third": Schedule(ahead=4.0, sync_every=3, on_sync="in_place", redundant=1),
}
LENGTHS = [1, 1, 1, 2, 2, 3, 4, 6, 12]
NEEDS = {"reward": ("tokens",), "learner": ("reward",)}
RUN = 500  # events of a world


@dataclasses.dataclass
class Drawer:
    """A worker as it is; the controller knows what has been reported of it."""

    slots: int
    version: int | None = None
    drawing: dict = dataclasses.field(default_factory=dict)  # key -> versions of its tokens
    commands: collections.deque = dataclasses.field(default_factory=collections.deque)
    reports: collections.deque = dataclasses.field(default_factory=collections.deque)
    # What the world has heard of it and sent to it.
    told: int | None = None
    is_syncing: bool = False
    held: set = dataclasses.field(default_factory=set)
    interrupted: set = dataclasses.field(default_factory=set)
    discarded: set = dataclasses.field(default_factory=set)


class World:
    """A controller with everything around it; AssertionError where a rule is broken."""

    def __init__(self, schedule: Schedule, seed: int):
        rng = self.rng = random.Random(f"{schedule} {seed}")
        self.schedule, self.seed, self.batch = schedule, seed, rng.randint(1, 4)
        self.size, most = rng.randint(1, 4), (schedule.ahead + 1) * self.batch
        if math.isinf(most) or rng.random() < 0.3:
            self.capacity = self.batch + rng.randint(0, 12)
        else:
            self.capacity = most
        self.queue = Queue(self.size, self.capacity, NEEDS)
        self.controller = Controller(schedule, self.batch, self.queue)
        self.limit = self.capacity
        self.ahead, self.version, self.hand, self.must_sync = schedule.ahead, None, None, True
        self.drawers, self.joined = {}, 0
        self.bounds: list[float] = []  # by group: versions that its tokens may be behind
        self.done: dict[int, str] = {}  # group -> "trained" or "rejected"
        self.taken: list[Entry] = []
        self.partials, self.claimed, self.is_flushing = {}, [], False
        self.moving: dict = {}  # key -> version, of what is on its way to another worker
        self.log, self.tokens = [], 0
        self.haste = [9, *(rng.choice([3, 9, 27]) for _ in range(2))]  # samplers, commands, reports
        weights = [rng.choice([3, 9]), *(rng.choice([1, 3, 9]) for _ in range(2))]
        rare = [rng.choice([0, 0, 0.05, 0.3]) for _ in range(7)]
        self.weights = weights + rare
        for _ in range(rng.randint(1, 4)):
            self.join()
        self.publish(0)

    # Events

    def event(self):
        """One at random, and what is decided then, now or later."""
        [event] = self.rng.choices(
            [self.work, self.reward, self.learn, self.die, self.join, self.junk, self.checkpoint,
             self.reject, self.reduce_staleness, self.rest], self.weights,
        )
        event()
        if not self.drawers and self.rng.random() < 0.2:
            self.join()
        if self.rng.random() < 0.8:
            self.settle()
        self.check()

    def one(self, field="slots"):
        """A worker that has commands to execute, say."""
        names = [name for name, drawer in sorted(self.drawers.items()) if getattr(drawer, field)]
        return self.rng.choice(names) if names else None

    def join(self):
        if len(self.drawers) == 5:
            return
        name = f"w{self.joined}" if self.rng.random() < 0.7 or "w0" in self.drawers else "w0"
        self.joined += 1
        if name not in self.drawers:
            self.drawers[name] = Drawer(self.rng.choice([1, 2, 3, 6, 12]))
            self.controller.joined(name, self.drawers[name].slots)

    def die(self, name=None):
        """With it goes what it has not said; of what it drew, there may be a copy."""
        name = name or self.one()
        if name is None:
            return
        drawer = self.drawers.pop(name)
        self.moving.clear()
        known = {key: tokens for command, partials in drawer.commands if isinstance(command, Begin)
                 for key, tokens in partials.items()} | drawer.drawing
        known |= {key: tokens for what, key, tokens in drawer.reports if what == "preempted"}
        known = {k: t for k, t in known.items() if k in drawer.held and t and self.rng.random() < 0.5}
        self.partials |= known
        self.controller.left(name, {key: tokens[-1] for key, tokens in known.items()})

    def work(self):
        for act in self.rng.choices([self.draw, self.execute, self.hear], self.haste, k=8):
            act()

    def draw(self, name=None):
        drawer = self.drawers.get(name or self.one("drawing"))
        for key in list(drawer.drawing)[: drawer.slots] if drawer else ():
            drawer.drawing[key] = [*drawer.drawing[key], drawer.version]
            self.tokens += 1
            if len(drawer.drawing[key]) >= self.length(key):
                drawer.reports.append(("finished", key, drawer.drawing.pop(key)))

    def length(self, key):
        return LENGTHS[hash((self.seed, *key)) % len(LENGTHS)]

    def execute(self, name=None):
        drawer = self.drawers.get(name or self.one("commands"))
        if drawer is None:
            return
        command, partials = drawer.commands.popleft()
        if isinstance(command, Begin):
            assert not drawer.drawing.keys() & partials.keys()
            drawer.drawing |= partials
        elif isinstance(command, SyncWeights):
            assert (drawer.version or 0) <= command.version, "a version goes back"
            assert not drawer.drawing or self.schedule.on_sync == "in_place", "new weights while it draws"
            drawer.version = command.version
            drawer.reports.append(("synced", command.version, None))
        else:
            for key in command.keys:
                if key in drawer.drawing:
                    drawer.reports.append(("preempted", key, drawer.drawing.pop(key)))

    def hear(self, name=None):
        name = name or self.one("reports")
        if name is None:
            return
        drawer = self.drawers[name]
        what, key, tokens = drawer.reports.popleft()
        if what == "synced":
            drawer.told, drawer.is_syncing = key, False
            self.controller.synced(name, key)
            return
        self.let_go(drawer, key)
        is_wanted = key[0] in self.queue.entries and not self.queue.has_tokens(key[0])
        if what == "finished":
            self.moving.pop(key, None)
            assert self.controller.finished(name, key)
            assert self.queue.put(key, "tokens", tokens) == is_wanted
            assert not self.controller.finished(name, key), "a second report counts"
        else:
            assert self.controller.preempted(name, key, tokens[-1] if tokens else None)
            if is_wanted and tokens:
                self.partials[key] = tokens
            assert not self.controller.preempted(name, key, None), "a second report counts"

    @staticmethod
    def let_go(drawer, key):
        drawer.held.remove(key)
        drawer.interrupted.discard(key)
        drawer.discarded.discard(key)

    def junk(self):
        """Reports of what nobody was asked for, and publications that cannot be."""
        name, group = self.one(), self.rng.randint(0, len(self.bounds) + 1)
        key = group, self.rng.randint(0, self.size)
        if name and key not in self.drawers[name].held:
            assert not self.controller.finished(name, key)
            assert not self.controller.preempted(name, key, self.version)
        assert not self.controller.finished("nobody", key)
        assert not self.controller.preempted("nobody", key, None)
        right = {0: self.version, self.batch: self.version + 1}.get(len(self.taken))
        for version in range(max(self.version - 1, 0), self.version + 3):
            if version != right:
                self.refused(lambda version=version: self.controller.published(version))
        if name:
            self.refused(lambda: self.controller.joined(name, 1))
            if self.drawers[name].told:
                self.refused(lambda: self.controller.synced(name, self.drawers[name].told - 1))

    @staticmethod
    def refused(call):
        try:
            call()
        except ValueError:
            return
        raise AssertionError("what cannot be was accepted")

    def reward(self):
        new = self.queue.claim("reward")
        assert not set(new) & set(self.claimed), "a sample was claimed twice"
        self.claimed += new
        is_slow = not self.is_flushing and self.rng.random() < 0.3
        count = self.rng.randint(0, len(self.claimed)) if is_slow else len(self.claimed)
        now, self.claimed = self.claimed[:count], self.claimed[count:]
        for key in now:
            self.queue.put(key, "reward", 1.0)

    def reject(self):
        ready = [g for g in self.queue.entries if self.queue.is_ready(g, "learner")]
        if ready:
            group = self.rng.choice(sorted(ready))
            self.controller.rejected(group)
            self.end(group, "rejected")

    def reduce_staleness(self):
        bound = self.capacity // self.batch if math.isinf(self.ahead) else self.ahead
        ahead = max(bound - 1, self.schedule.sync_every - 1)
        assert self.controller.reduce_staleness() == ahead
        self.ahead, self.must_sync = ahead, True

    def learn(self):
        if len(self.taken) < self.batch:
            entries = self.controller.take()
            assert entries is None or len(entries) == self.batch or self.schedule.on_arrival
            for entry in entries or ():
                self.receive(entry)
                self.taken.append(entry)
            assert len(self.taken) <= self.batch
        else:
            assert self.controller.take() is None, "a batch of more groups"
            self.publish(self.version + 1)

    def publish(self, version):
        for entry in self.taken:
            self.end(entry.number, "trained")
        self.taken, self.version = [], version
        if self.must_sync or version - self.hand >= self.schedule.sync_every:
            self.hand, self.must_sync = version, False
        self.controller.published(version)

    def end(self, group, how):
        assert self.done.setdefault(group, how) is how, f"group {group} is {how} twice"

    def rest(self):
        self.must_sync = True
        self.moving.clear()
        for decision in self.controller.interrupt_all():
            self.send(decision, is_rest=True)

    # Checkpoints

    def checkpoint(self):
        self.gather()
        if len(self.taken) == self.batch:
            self.compare()
        self.restore(self.rng.random() < 0.5)

    def gather(self):
        self.rest()
        for name, drawer in self.drawers.items():
            while drawer.commands:
                self.execute(name)
            while drawer.reports:
                self.hear(name)
            assert not drawer.held, "not everything comes back"

    def restore(self, is_trained):
        """Goes on with another controller, which is told of the last update or begins it again."""
        is_trained = is_trained and len(self.taken) == self.batch
        version = self.version + is_trained
        state = json.loads(json.dumps(self.controller.get_state(version)))
        entries = [*self.queue.entries.values(), *(() if is_trained else self.taken)]
        self.queue = Queue(self.size, self.capacity, NEEDS)
        self.controller = Controller(self.schedule, self.batch, self.queue)
        self.controller.set_state(state)
        for entry in entries:
            columns = {sample: dict(row) for sample, row in entry.columns.items()}
            claimed = {("reward", s) for s, row in columns.items() if "reward" in row}
            self.queue.entries[entry.number] = Entry(
                entry.number, entry.deadline, None, columns, claimed
            )
        self.limit, self.claimed = max(self.limit, len(entries)), []
        self.taken = self.taken if is_trained else []
        drawers, self.drawers = self.drawers, {}
        for name, drawer in drawers.items():
            self.drawers[name] = Drawer(drawer.slots)
            self.controller.joined(name, drawer.slots)
        assert self.controller.decisions() == [], "work without weights"
        self.publish(version)

    def compare(self):
        """Going on and going on from what was saved are one."""
        live = copy.deepcopy(self)
        saved = copy.deepcopy(self)
        saved.restore(True)
        live.publish(live.version + 1)
        for world in (live, saved):
            world.log.clear()
            world.rounds(12)
        assert live.log == saved.log, "a checkpoint changes what follows"

    # Decisions

    def settle(self):
        for _ in range(9):
            decisions = self.controller.decisions()
            if not decisions:
                return
            for decision in decisions:
                self.send(decision)
        raise AssertionError("decisions never end")

    def send(self, decision, is_rest=False):
        self.log.append(decision)
        drawer, partials = self.drawers[decision.worker], {}
        if isinstance(decision, Begin):
            partials = self.began(drawer, decision)
        elif isinstance(decision, SyncWeights):
            assert decision.version == self.hand != drawer.told and not drawer.is_syncing
            drawer.is_syncing = True
        elif isinstance(decision, Interrupt):
            assert set(decision.keys) <= drawer.held - drawer.interrupted, "interrupted twice"
            drawer.interrupted |= set(decision.keys)
            assert is_rest or drawer.told < self.hand
            if not is_rest and self.schedule.on_sync != "interrupt":
                self.repacked(decision)
        else:
            assert isinstance(decision, Discard)
            assert set(decision.keys) <= drawer.held - drawer.discarded, "discarded twice"
            assert all(self.is_over(key[0]) for key in decision.keys), "a sample is thrown away"
            drawer.discarded |= set(decision.keys)
        drawer.commands.append((decision, partials))

    def is_over(self, group):
        return group not in self.queue.entries or self.queue.has_tokens(group)

    def repacked(self, decision):
        """There is room on another one of this version, which keeps it meanwhile."""
        version = self.drawers[decision.worker].told
        assert self.schedule.repack and any(
            drawer.told == version and not drawer.is_syncing
            and len(drawer.held) + len(decision.keys) <= drawer.slots
            for name, drawer in self.drawers.items() if name != decision.worker
        ), "a trajectory is taken away for nothing"
        self.moving |= dict.fromkeys(decision.keys, version)

    def began(self, drawer, decision):
        assert drawer.told is not None, "drawn without weights"
        assert not drawer.is_syncing, "drawn while new weights come"
        assert len(drawer.held) < drawer.slots, "drawn without room"
        holders = [key for d in self.drawers.values() for key in d.held]
        assert not set(decision.keys) & set(holders), "drawn by two"
        if decision.keys[0][0] == len(self.bounds):
            self.opened(drawer, decision)
        partials = {key: self.partials.pop(key, []) for key in decision.keys}
        for key, tokens in partials.items():
            assert key[0] < len(self.bounds) and not self.is_over(key[0]), "drawn for nothing"
            is_other = self.schedule.on_sync == "drain" and tokens and tokens[-1] != drawer.told
            assert (key in decision.fresh) == bool(is_other)
            version = self.moving.pop(key, drawer.told)
            assert version == drawer.told or not tokens, "moved to another version"
        drawer.held |= set(decision.keys)
        return {key: [] if key in decision.fresh else t for key, t in partials.items()}

    def opened(self, drawer, decision):
        group, count = len(self.bounds), self.size + self.schedule.redundant
        assert list(decision.keys) == [(group, i) for i in range(count)] and not decision.fresh
        self.bounds.append(math.inf if math.isinf(self.ahead) else math.ceil(self.ahead))
        # AReaL: floor((N - 1) / B) <= u + eta; N groups have begun and were not sent away.
        begun = len(self.bounds) - sum(how == "rejected" for how in self.done.values())
        assert begun <= self.batch * (drawer.told + self.ahead + 1) + 1e-6, "too far ahead"
        assert drawer.told == self.hand

    def receive(self, entry):
        """A group is there whole, for the first time and in time."""
        assert entry.number not in self.done, "trained twice"
        assert list(entry.columns) == sorted(entry.columns) and len(entry.columns) == self.size
        assert max(entry.columns) < self.size + self.schedule.redundant
        for row in entry.columns.values():
            tokens = row["tokens"]
            assert tokens == sorted(tokens), "versions go back along a sequence"
            assert len(set(tokens)) == 1 or self.schedule.on_sync != "drain", "of two versions"
            age = self.version - tokens[0]
            assert 0 <= self.version - tokens[-1], "drawn by a version that is not there yet"
            assert age <= self.bounds[entry.number], f"{age} versions behind"

    def check(self):
        held = {entry.number for entry in self.taken} | set(self.queue.entries) | set(self.done)
        assert held == set(range(len(self.bounds))), "a group is lost"
        assert self.controller.next_group == len(self.bounds)
        self.limit = max(self.capacity, min(self.limit, len(self.queue)))
        assert len(self.queue) <= self.limit, "the queue is too long"

    # What has begun can end.

    def rounds(self, count):
        """Everybody does what there is to do, in turn."""
        self.is_flushing = True
        for _ in range(count):
            self.settle()
            for name, drawer in self.drawers.items():
                while drawer.commands:
                    self.execute(name)
                self.draw(name)
                while drawer.reports:
                    self.hear(name)
            self.reward()
            self.learn()
            self.check()
        self.is_flushing = False

    def finish(self):
        """All groups that have begun are trained on, or the learner waits for ever."""
        if not self.drawers:
            self.join()
        begun = range(len(self.bounds) + 1)
        for _ in range(4 * len(begun) + 20):
            before = self.tokens, len(self.done), self.version, len(self.taken)
            self.rounds(10)
            if all(group in self.done for group in begun):
                return
            now = self.tokens, len(self.done), self.version, len(self.taken)
            assert now != before, "everybody waits"
        raise AssertionError("a group never ends")


def play(schedule: Schedule, seed: int, events: int) -> list:
    """Returns the decisions of a run; AssertionError says at which event a rule was broken."""
    world = World(schedule, seed)
    for count in range(events):
        try:
            world.event()
        except Exception as error:
            raise AssertionError(f"seed {seed}, event {count}: {error!r}") from error
    try:
        world.finish()
    except Exception as error:
        raise AssertionError(f"seed {seed}, at the end: {error!r}") from error
    return world.log


def schedules() -> dict[str, Schedule]:
    return {text: parse(text) for text in CASES} | OTHERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--events", type=int, default=100_000, help="of all schedules together")
    parser.add_argument("--seed", type=int, default=0, help="of the first world of each schedule")
    parser.add_argument("--only", default="", help="schedules whose text contains this")
    args = parser.parse_args()
    chosen = {text: schedule for text, schedule in schedules().items() if args.only in text}
    worlds = -(-args.events // (len(chosen) * RUN))
    violations, start = 0, time.monotonic()
    print(f"{'schedule':<56}{'events':>8}{'violations':>12}{'seconds':>9}")
    for text, schedule in chosen.items():
        found, since = [], time.monotonic()
        for seed in range(args.seed, args.seed + worlds):
            try:
                play(schedule, seed, RUN)
            except AssertionError as error:
                found.append(error)
        violations += len(found)
        seconds = time.monotonic() - since
        print(f"{text:<56}{worlds * RUN:>8}{len(found):>12}{seconds:>9.1f}", flush=True)
        for reason, count in collections.Counter(str(e).partition(": ")[2] for e in found).items():
            first = next(str(e) for e in found if str(e).endswith(reason))
            print(f"    {count} x {first}")
    events = worlds * RUN * len(chosen)
    print(f"{events} events, {violations} violations, {time.monotonic() - start:.1f} s")
    return int(violations > 0)


if __name__ == "__main__":
    assert set(SCHEDULES) == {text.partition("(")[0] for text in CASES}
    sys.exit(main())
