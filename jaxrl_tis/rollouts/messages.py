"""What a learner and a rollout worker say to each other, in messages of `wire`.

After the handshake (`tcp.admit`, `tcp.introduce`) the worker says its name and how many sequences it
draws at once, and is told where weights come from. From then on it reports what happened, in order, and
is answered with commands; it does so several times a second, so that silence means that it is gone.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts import wire
from jaxrl_tis.rollouts.sampler import Cancel, NewRequests, Preempt

MESSAGE_BYTES = 1 << 28  # the largest that either end takes
FITTING_BYTES = 1 << 26  # that `fitting` makes one of
NAMED_BYTES = 1 << 14  # that a record counts for beside its arrays, as it is named in the head
MOST = 1 << 60  # of what is counted


@dataclasses.dataclass(frozen=True)
class Done:
    """A sequence that has ended or was preempted."""

    trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class Partial:
    """What there is of a sequence that goes on."""

    trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class Synced:
    """The weights of this version draw from now on."""

    version: int


@dataclasses.dataclass(frozen=True)
class SyncTo:
    """The command to draw with the weights of this version."""

    version: int


Event = Done | Partial | Synced
Told = NewRequests | Preempt | Cancel | SyncTo


@dataclasses.dataclass(frozen=True)
class Reply:
    """Commands, the newest version that workers may have and its fingerprint, and whether the run is
    over."""

    commands: tuple[Told, ...]
    sync_version: int | None
    fingerprint: str | None
    is_over: bool


def fitting(said: list) -> tuple[list, list]:
    """Returns the first of these events or commands, as many as fit into a message and at least
    one, and the others."""
    total = 0
    for count, each in enumerate(said):
        total += _size(each)
        if total > FITTING_BYTES and count:
            return said[:count], said[count:]
    return said, []


def _size(said: Event | Told) -> int:
    if isinstance(said, Cancel):
        return NAMED_BYTES * len(said.ids)
    records = [said.trajectory] if isinstance(said, (Done, Partial)) else []
    if isinstance(said, NewRequests):
        records = [r for request in said.requests for r in (request, request.partial)]
    arrays = lambda record: (x for x in vars(record).values() if isinstance(x, np.ndarray))
    sizes = [sum(x.nbytes for x in arrays(record)) for record in records if record is not None]
    return NAMED_BYTES * max(len(sizes), 1) + sum(sizes)


def pack_report(events: list[Event], stats: Stats) -> bytes:
    named, arrays = [], {}
    for i, event in enumerate(events):
        if isinstance(event, Synced):
            named.append(["synced", event.version])
        else:
            named.append(["done" if isinstance(event, Done) else "partial", i])
            arrays[str(i)] = _bytes(wire.trajectory_message(event.trajectory))
    return wire.pack({"events": named, "stats": dataclasses.asdict(stats)}, arrays)


def read_report(data: bytes | bytearray) -> tuple[list[Event], Stats]:
    """Raises wire.Damaged for bytes that are no report."""
    header, arrays = wire.unpack(data)
    try:
        events = [_event(arrays, *entry) for entry in header["events"]]
        stats = Stats(**header["stats"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wire.Damaged(f"damaged report: {error}") from error
    if not all(_is_count(event.version) for event in events if isinstance(event, Synced)):
        raise wire.Damaged("damaged report: a version is no number from 0")
    for name, value in dataclasses.asdict(stats).items():
        is_time = name.endswith("seconds") and isinstance(value, float)
        if not (_is_count(value) or is_time and 0 <= value < MOST):
            raise wire.Damaged(f"damaged report: {name} is {value!r:.100}")
    return events, stats


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _event(arrays: dict[str, np.ndarray], kind: str, value: int) -> Event:
    if kind == "synced":
        return Synced(value)
    trajectory = wire.read_trajectory(arrays[str(value)].tobytes())
    return {"done": Done, "partial": Partial}[kind](trajectory)


def pack_reply(reply: Reply) -> bytes:
    named, arrays = [], {}
    for i, command in enumerate(reply.commands):
        if isinstance(command, NewRequests):
            names = [f"{i}.{j}" for j in range(len(command.requests))]
            named.append(["begin", names])
            messages = map(wire.request_message, command.requests)
            arrays |= dict(zip(names, map(_bytes, messages), strict=True))
        elif isinstance(command, Preempt):
            named.append(["preempt", None])
        elif isinstance(command, Cancel):
            named.append(["cancel", command.ids])
        else:
            named.append(["sync", command.version])
    header = {
        "commands": named, "sync_version": reply.sync_version, "fingerprint": reply.fingerprint,
        "is_over": reply.is_over,
    }
    return wire.pack(header, arrays)


def read_reply(data: bytes | bytearray) -> Reply:
    """Raises wire.Damaged, or ValueError for a request out of range, where bytes are no reply."""
    header, arrays = wire.unpack(data)
    try:
        commands = tuple(_told(arrays, *entry) for entry in header["commands"])
        return Reply(commands, header["sync_version"], header["fingerprint"], header["is_over"])
    except (AttributeError, KeyError, TypeError) as error:
        raise wire.Damaged(f"damaged reply: {error}") from error


def _told(arrays: dict[str, np.ndarray], kind: str, value: Any) -> Told:
    if kind == "begin":
        return NewRequests(tuple(wire.read_request(arrays[name].tobytes()) for name in value))
    made = {
        "preempt": lambda: Preempt(), "cancel": lambda: Cancel(tuple(value)),
        "sync": lambda: SyncTo(value),
    }
    return made[kind]()


def _bytes(message: bytes) -> np.ndarray:
    return np.frombuffer(message, np.uint8)
