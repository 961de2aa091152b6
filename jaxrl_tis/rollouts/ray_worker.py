"""A rollout worker: a Ray actor with an engine that a learner commands.

A thread of the worker executes commands and steps the engine. Calls of the learner bring commands
and weights, and wait for what happened. Commands that follow new weights wait until these have
arrived, so sequences are interrupted only while one tree of parameters replaces another.
"""

import collections
import dataclasses
import functools
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import ray

from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts.sampler import Command, Sampler, SetParams
from jaxrl_tis.runtime import fingerprint
from jaxrl_tis.sharding import Box, box_of, common, within

POLL_SECONDS = 1.0  # longest wait of a report for events
PARTIAL_SECONDS = 1.0  # between two reports of the unfinished sequences
# Bytes of parts of a tree, uint8 [n], by name of the leaf and place of the part in it.
Pieces = Mapping[tuple[str, Box], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Sync:
    """Command: sample with the newest weights that have arrived."""


@dataclasses.dataclass(frozen=True)
class Arrived(SetParams):
    """Weights that have arrived, with those of a trained drafter and their version."""

    drafter: tuple[Any, int] | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened at a worker.

    Attributes:
      kind: "done": a sequence finished or was preempted. "partial": the tokens so far of a sequence
        that continues. "synced": weights are in use.
      value: the trajectory, or the version of the weights.
    """

    kind: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Joined:
    """A worker that is ready: its session (a name of this start of it), the id of its node, and the
    values that must equal the learner's."""

    session: str
    node: str
    facts: dict[str, Any]


def pieces(tree: Any) -> Pieces:
    """Returns the parts of a tree that this process sends. All processes together return each number
    once. Of an array with copies at several processes each device sends the same share."""
    parts = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name, copies = jax.tree_util.keystr(path), _num_copies(leaf)
        for shard in leaf.addressable_shards:
            box = box_of(shard.index, leaf.shape)
            if (share := _share(box, shard.replica_id, copies)) is not None:
                part = shard.data if share == box else shard.data[within(share, box)]
                parts[name, share] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return parts


def _num_copies(leaf: jax.Array) -> int:
    """Returns how many devices hold each number, 1 where one process sends them all."""
    if jax.process_count() == 1:
        return 1
    held = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return len(leaf.sharding.device_set) * held // max(leaf.size, 1)


def _share(box: Box, number: int, copies: int) -> Box | None:
    """Returns the part of a box that one of its copies sends, None for nothing. It is cut along its
    longest axis."""
    sizes = [end - first for first, end in box]
    if copies == 1 or max(sizes, default=0) < copies:
        return box if number == 0 else None
    axis = sizes.index(max(sizes))
    start, size = box[axis][0], sizes[axis]
    share = start + size * number // copies, start + size * (number + 1) // copies
    return (*box[:axis], share, *box[axis + 1 :])


def assemble(like: Any, parts: Sequence[Pieces]) -> Any:
    """Returns the tree with the structure, shapes, dtypes and shardings of `like`. Copies only what
    the devices of this process hold, one leaf at a time.

    Raises:
      ValueError: a number is missing.
    """
    named = collections.defaultdict(list)
    for (name, box), data in (item for part in parts for item in part.items()):
        named[name].append((box, data))

    def read(name: str, leaf: jax.ShapeDtypeStruct, index: tuple[slice, ...]) -> np.ndarray:
        wanted = box_of(index, leaf.shape)
        size = lambda box: [end - first for first, end in box]
        out = np.empty(size(wanted), leaf.dtype)
        missing = out.size
        for box, data in named[name]:
            if (shared := common(box, wanted)) is not None:
                part = data.view(leaf.dtype).reshape(size(box))[within(shared, box)]
                out[within(shared, wanted)] = part
                missing -= part.size
        if missing:
            raise ValueError(f"weight {name} came without {missing} of {out.size} numbers")
        return out

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        return jax.make_array_from_callback(x.shape, x.sharding, functools.partial(read, name, x))

    return jax.tree.map_with_path(leaf, like)


def _received(like: Any, refs: Sequence[ray.ObjectRef], sent: str) -> Any:
    """Returns the tree whose `Pieces` have these references. RuntimeError if its fingerprint on a
    device is not `sent`."""
    tree = jax.block_until_ready(assemble(like, ray.get(list(refs))))
    fingerprint.check(tree, sent)
    return tree


class RolloutWorker:
    """Samples for a learner, which calls `join` once, then the others.

    Args:
      build: config -> what it samples with, as `build.build_sampling` returns it.
      config: of the run, as a dict.
      has_accelerator: whether Ray gave this worker TPUs or GPUs; otherwise it uses the CPU alone.
    """

    def __init__(self, build: Callable, config: Mapping[str, Any], has_accelerator: bool):
        if not has_accelerator:
            jax.config.update("jax_platforms", "cpu")
        self._build = functools.partial(build, ml_collections.ConfigDict(config))
        self._limit = config["watchdog"]["timeout"] or math.inf
        self._changed = threading.Condition()
        self._session: str | None = None
        self._events: list[Event] = []
        self._stats = Stats()
        self._held: list[Sync | Command] = []  # commands that wait for weights
        self._inbox: list[Command] = []
        self._wanted = -1  # version that commands wait for
        self._arrived: Arrived | None = None
        self._drafter: tuple[Any, int] | None = None  # the newest that has arrived
        self._error: BaseException | None = None
        self._since = math.inf  # when the thread began what it does
        self._loading_since = math.inf
        self._reported, self._lengths = time.monotonic(), {}

    def join(self) -> Joined:
        """Builds the engine. A worker that has joined before ends, and Ray starts another: no
        sequence of an earlier session is left.

        Raises:
          ValueError: the config cannot be used on this node.
        """
        if self._session is not None:
            os._exit(1)
        setup = self._build()
        self._sampler = Sampler(functools.partial(setup.scheduler, setup.engine))
        self._like, self._session = setup.engine.abstract_params(), uuid.uuid4().hex
        self._drafting = setup.drafting.get(setup.engine)
        self._adapter, self._base = setup.adapter, None
        if self._adapter is not None:
            self._factors_like = setup.engine.abstract_factors(self._adapter)
        threading.Thread(target=self._guarded, daemon=True).start()
        return Joined(self._session, ray.get_runtime_context().get_node_id(), setup.identity)

    @ray.method(concurrency_group="sync")
    def sync(
        self, session: str, version: int, sent: str, refs: Sequence[ray.ObjectRef],
        base: tuple[Sequence[ray.ObjectRef], str] | None = None,
        drafter: tuple[int, str, Sequence[ray.ObjectRef]] | None = None,
    ) -> None:
        """Takes the weights of a version, whose `Pieces` have these references. `sent`: the
        learner's fingerprint of them. `base`: the same of the base of LoRA, which the worker keeps.
        `drafter`: the same of a trained drafter, after its version.

        Raises:
          RuntimeError: the weights on a device are not those that were sent.
        """
        # As arguments of this call, the pieces would hold up all later calls until they are here.
        self._loading_since = time.monotonic()
        try:
            params = self._params(refs, sent, base)
            if drafter is not None and (self._drafter is None or self._drafter[1] != drafter[0]):
                like, (version_of_it, digest, its_refs) = self._drafting.engine.abstract_params(), drafter
                self._drafter = _received(like, its_refs, digest), version_of_it
        finally:
            self._loading_since = math.inf
        with self._changed:
            if session == self._session:
                self._arrived = Arrived(params, version, self._drafter)
                self._move_held()

    def _params(
        self, refs: Sequence[ray.ObjectRef], sent: str,
        base: tuple[Sequence[ray.ObjectRef], str] | None,
    ) -> Any:
        if base is not None and self._base is None:
            of_base, digest = base
            self._base = _received(self._like, of_base, digest)
        if self._adapter is None:
            return _received(self._like, refs, sent)
        return self._adapter.join(self._base, _received(self._factors_like, refs, sent))

    @ray.method(concurrency_group="receive")
    def receive(self, session: str, command: Sync | Command, wanted: int | None = None) -> None:
        """Takes a command, which waits for the weights of version `wanted`, as all later commands
        do. Newer weights serve as well: a learner may publish faster than weights arrive."""
        with self._changed:
            if session == self._session:
                self._held.append(command)
                self._wanted = self._wanted if wanted is None else wanted
                self._move_held()

    @ray.method(concurrency_group="report")
    def report(self, session: str) -> tuple[list[Event], Stats]:
        """Waits for events, at most POLL_SECONDS, and returns them with the sampler's counts.

        Raises:
          RuntimeError: the session is over, or the thread or a `sync` hangs.
          Exception: the error that ended the worker's thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._error, POLL_SECONDS)
            if self._error is not None:
                raise self._error
            if session != self._session:
                raise RuntimeError("the worker has started again")
            if time.monotonic() - min(self._since, self._loading_since) > self._limit:
                raise RuntimeError(f"no progress for watchdog.timeout = {self._limit:g} s")
            events, self._events = self._events, []
            return events, self._stats

    def _move_held(self) -> None:
        """Gives the sampler its commands once their weights have arrived."""
        if (-1 if self._arrived is None else self._arrived.version) >= self._wanted:
            arrived: Any = self._arrived
            self._inbox += [arrived if isinstance(c, Sync) else c for c in self._held]
            self._held = []
            self._changed.notify_all()

    # The worker's thread

    def _guarded(self) -> None:
        try:
            while True:
                self._work()
        except BaseException as error:  # which the next report raises
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _work(self) -> None:
        """Executes commands, or makes one call of the engine."""
        with self._changed:
            self._since = math.inf
            self._changed.wait_for(lambda: self._inbox or self._sampler.pending)
            self._since, commands, self._inbox = time.monotonic(), self._inbox, []
        for command in commands:
            if isinstance(command, Arrived) and command.drafter is not None:
                self._drafting.served = command.drafter
            self._say([Event("done", t) for t in self._sampler.execute(command)])
            if isinstance(command, SetParams):
                self._say([Event("synced", command.version)])
        if not commands:
            finished = self._sampler.step()
            self._say([*(Event("done", t) for t in finished), *self._partials()])

    def _say(self, events: list[Event]) -> None:
        with self._changed:
            self._events += events
            self._stats = dataclasses.replace(self._sampler.stats)
            if events:
                self._changed.notify_all()

    def _partials(self) -> list[Event]:
        """Returns what has grown, every PARTIAL_SECONDS, unless older ones were not reported yet."""
        is_late = any(event.kind == "partial" for event in self._events)
        if is_late or time.monotonic() - self._reported < PARTIAL_SECONDS:
            return []
        lengths = self._lengths
        records = [t for t in self._sampler.records() if t.stop_reason == "abort"]  # others end now
        self._lengths = {t.id: len(t.tokens) for t in records}
        self._reported = time.monotonic()
        return [Event("partial", t) for t in records if len(t.tokens) > lengths.get(t.id, -1)]
