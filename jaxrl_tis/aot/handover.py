"""Bytes of new weights on their way from the devices that learn to others that sample.

Counted from shardings alone: where the learner has an array when it is cast or quantised, and where
the sampler wants it. No compiler has a part in it, and nothing is said of how or how fast it goes.

A sampler's device gets its part of every array, whole: it holds none of the learner's. Of all that
arrives, over all devices of one sampler, every byte counts once by where it goes,

    bytes = distinct + copied over the axes of the sampler's mesh

and once by where it comes from,

    bytes = whole + gathered over the axes of the learner's mesh

distinct: the first copy of everything, which is what has to leave the learner at least.
copied over an axis: what a device gets although one before it on this axis, its other coordinates
  the same, gets it too. If there are several such axes, the first in the order of the mesh.
whole: a device's part of an array may be joined from pieces that different devices of the learner
  have. This is the first piece of each, in the order of the learner's mesh.
gathered over an axis: all further pieces. Each counts for the first axis on which its device stands
  elsewhere than that of the first piece. Of devices with the same piece the first counts.

Two more numbers say of each axis by itself what it does to those bytes:

cut over an axis of the sampler: bytes of parts whose array has other parts along this axis.
same over an axis of the learner: bytes that several devices along it have, so that any may send.
"""

import collections
import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_tis.build import Setup
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.sharding import MESH_AXES, Box, box_of

Coordinate = tuple[int, ...]  # of a device on its mesh


@dataclasses.dataclass(frozen=True)
class Moved:
    """An array that moves: its shape and bytes of an element, from where to where."""

    shape: tuple[int, ...]
    itemsize: int
    source: NamedSharding
    target: NamedSharding


def by_format(setup: Setup) -> dict[str, dict[str, Any]]:
    """Counts the hand-over of a run, by format of what travels: as it is without quantisation, and
    in the engine's own, w8a8 where it has none. See `count` for the keys; `passed_on_bytes` go from
    the first sampler to the others."""
    config = setup.engine.config
    plain = dataclasses.replace(config, quantization="none", unquantized=())
    if config.quantization == "none":
        config = dataclasses.replace(config, quantization="w8a8")
    found = {}
    for choice in (plain, config):
        engine = Engine(setup.model, choice, setup.engine.layout)
        counted = count(moved(setup, engine))
        others = len(setup.engines) - 1
        found[engine.quant_id] = counted | {"passed_on_bytes": others * counted["bytes"]}
    return found


def moved(setup: Setup, engine: Engine) -> list[Moved]:
    """Lists the serving parameters of an engine."""
    arrays = jax.tree.leaves(engine.abstract_params())
    sources = jax.tree.leaves(engine.shardings_in(setup.training.layout))
    return [
        Moved(x.shape, x.dtype.itemsize, source, x.sharding)
        for x, source in zip(arrays, sources, strict=True)
    ]


def count(arrays: list[Moved]) -> dict[str, Any]:
    """Counts what arrives on the devices of one sampler.

    Returns: `bytes` and, of the device that gets most, `device_bytes`; `distinct_bytes` and
    `whole_bytes`; `axes`, a list of {"mesh": "serve" or "train", "axis", "size", "does", "bytes",
    "device_bytes"}, where "does" is copied, cut, gathered or same, without those of 0 bytes; the
    most that one device of the learner sends, `sent_device_bytes`, where those that have the same
    take turns; and of how many devices at most a sampler's device has to get something, `senders`.
    """
    totals = collections.defaultdict(collections.Counter)  # what -> device -> bytes
    sent, senders = collections.Counter(), collections.defaultdict(set)
    for x in arrays:
        source, target = _boxes(x.source, x.shape), _boxes(x.target, x.shape)
        for device, box in target.items():
            n = _volume(box) * x.itemsize
            totals["arriving"][device] += n
            totals[_copied(target, device)][device] += n
            for axis in _axes(x.target):
                if any(target[other] != box for other in _along(x.target, device, axis)):
                    totals["serve", axis, "cut"][device] += n
        for device, what, sender, n in _pieces(x, source, target):
            totals[what][device] += n
            sent[sender] += n
            senders[device].add(sender)
            for axis in _axes(x.source):
                if any(source[o] == source[sender] for o in _along(x.source, sender, axis)):
                    totals["train", axis, "same"][device] += n
    sizes = {"serve": arrays[0].target.mesh.shape, "train": arrays[0].source.mesh.shape}
    return {
        "bytes": totals["arriving"].total(),
        "device_bytes": max(totals["arriving"].values()),
        "distinct_bytes": totals["distinct"].total(),
        "whole_bytes": totals["whole"].total(),
        "sent_device_bytes": max(sent.values()),
        "senders": max(map(len, senders.values())),
        "axes": [
            {"mesh": mesh, "axis": axis, "size": sizes[mesh][axis], "does": does,
             "bytes": each.total(), "device_bytes": max(each.values())}
            for mesh, does in _DOES for axis in MESH_AXES
            if (each := totals.get((mesh, axis, does)))
        ],
    }


_DOES = (("serve", "copied"), ("serve", "cut"), ("train", "gathered"), ("train", "same"))


def _pieces(x: Moved, source: dict, target: dict):
    """Yields (receiver, "whole" or ("train", axis, "gathered"), sender, bytes) of each piece."""
    holders = collections.defaultdict(list)
    for device, box in source.items():
        holders[box].append(device)
    turns = {box: itertools.cycle(devices) for box, devices in holders.items()}
    for device, wanted in target.items():
        first = None
        for box, devices in holders.items():  # in the order of their first devices
            if n := _volume(_overlap(box, wanted)) * x.itemsize:
                first = first or devices[0]
                axis = _first_difference(x.source, first, devices[0])
                what = "whole" if axis is None else ("train", axis, "gathered")
                yield device, what, next(turns[box]), n


def _copied(target: dict[Coordinate, Box], device: Coordinate) -> Any:
    """Returns the key of what a device gets: "distinct", or copied over an axis."""
    for i, axis in enumerate(MESH_AXES):
        before = ((*device[:i], j, *device[i + 1 :]) for j in range(device[i]))
        if any(target[other] == target[device] for other in before):
            return "serve", axis, "copied"
    return "distinct"


# Meshes and boxes


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Coordinate, Box]:
    """Returns what each device of a mesh has of an array, in the order of the mesh."""
    indices = sharding.devices_indices_map(shape)
    return {c: box_of(indices[device], shape) for c, device in np.ndenumerate(sharding.mesh.devices)}


def _axes(sharding: NamedSharding) -> list[str]:
    return [axis for axis in MESH_AXES if sharding.mesh.shape[axis] > 1]


def _along(sharding: NamedSharding, device: Coordinate, axis: str) -> list[Coordinate]:
    """Lists the other devices of an axis."""
    i = MESH_AXES.index(axis)
    others = set(range(sharding.mesh.shape[axis])) - {device[i]}
    return [(*device[:i], j, *device[i + 1 :]) for j in others]


def _first_difference(sharding: NamedSharding, a: Coordinate, b: Coordinate) -> str | None:
    return next((axis for axis, i, j in zip(MESH_AXES, a, b) if i != j), None)


def _overlap(a: Box, b: Box) -> Box:
    return tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b))


def _volume(box: Box) -> int:
    return math.prod(max(0, end - start) for start, end in box)


# Text

COLUMNS = ("format", "of what arrives", "bytes on all devices", "most on one")


def table(found: dict[str, dict[str, Any]], markdown: bool = False) -> str:
    """Writes the hand-over of each format: what arrives on the devices of one sampler, and what the
    axes of the two meshes do to it."""
    lines = [
        "| " + " | ".join(COLUMNS) + " |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |",
    ] if markdown else ["hand-over of weights to the devices of a sampler, from shardings:"]
    for name, counted in found.items():
        for what, n, most in _rows(counted):
            shown = "" if n is None else f"{n:,}", "" if most is None else f"{most:,}"
            row = (name, what, *shown)
            lines.append(
                "| " + " | ".join(row) + " |" if markdown else "{:10} {:44} {:>22} {:>20}".format(*row)
            )
    return "\n".join(lines)


def _rows(counted: dict[str, Any]) -> list[tuple[str, int | None, int | None]]:
    axes = counted["axes"]
    of = lambda *does: [
        (f"{x['does']} over {x['axis']} ({x['size']}) of {x['mesh']}", x["bytes"], x["device_bytes"])
        for x in axes if x["does"] in does
    ]
    passed = counted["passed_on_bytes"]
    return [
        ("all", counted["bytes"], counted["device_bytes"]),
        ("distinct", counted["distinct_bytes"], None), *of("copied"), *of("cut"),
        ("whole", counted["whole_bytes"], None), *of("gathered"), *of("same"),
        (f"sent by a device of train, to each from {counted['senders']}", None,
         counted["sent_device_bytes"]),
        *([("passed on to other samplers", passed, None)] if passed else []),
    ]
