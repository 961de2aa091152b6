"""Counts the bytes of one weight sync, from the learner's devices to the devices of a sampler.

Bytes are counted from the shardings of each array in the learner's and the sampler's layout. Nothing is
compiled. Seconds are a model: bytes of a host by the published rate of its network.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl_tis.aot.chips import Topology
from jaxrl_tis.aot.report import grid
from jaxrl_tis.build import Setup
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import placement


@dataclasses.dataclass(frozen=True)
class Moved:
    """An array of a sync: shape, bytes of an element, and sharding before and after."""

    shape: tuple[int, ...]
    itemsize: int
    source: NamedSharding
    target: NamedSharding


def by_format(setup: Setup, topology: Topology) -> dict[str, dict[str, Any]]:
    """Returns the bytes of one sync by number format: the engine's dtype without quantization, and
    the engine's own format (w8a8 if it has none). `count` and `over_network` explain the keys. With
    threads the first sampler sends `passed_on_bytes` to the other samplers."""
    config = setup.engine.config
    plain = dataclasses.replace(config, quantization="none", unquantized=())
    if config.quantization == "none":
        config = dataclasses.replace(config, quantization="w8a8")
    counts = {}
    for choice in (plain, config):
        engine = Engine(setup.model, choice, setup.engine.layout)
        counted: dict[str, Any] = count(moved(setup, engine))
        if setup.config.rollout.driver == "ray":
            workers, chips = setup.config.rollout.workers, engine.layout.mesh.size
            counted |= over_network(counted["distinct_bytes"], topology, workers, chips)
        else:
            counted["passed_on_bytes"] = (len(setup.engines) - 1) * counted["bytes"]
        counts[engine.quant_id] = counted
    return counts


def over_network(num_bytes: int, topology: Topology, workers: int, chips: int) -> dict[str, Any]:
    """Returns what a sync of so many bytes takes on the network between hosts.

    Args:
      topology: of the learner. Each of its hosts has one process, which sends an equal share.
      chips: of each worker, which receives all bytes once.

    Returns: `sent_bytes` by each host of the learner, `received_bytes` by each worker, and `seconds`
    (model), those of the slower of both; None where no rate is published.
    """
    hosts = topology.hosts_per_slice * topology.num_slices
    sent, rate, seconds = workers * num_bytes // hosts, topology.chip.dcn_rate, None
    if rate is not None:
        seconds = max(sent / (rate * topology.chips_per_host), num_bytes / (rate * chips))
    return {"sent_bytes": sent, "received_bytes": num_bytes, "seconds": seconds}


def moved(setup: Setup, engine: Engine) -> list[Moved]:
    """Returns the serving parameters of an engine with their shardings; with an adapter its factors,
    which are all that a sync moves."""
    layout, adapter = setup.training.layout, setup.training.adapter
    if adapter is None:
        arrays = jax.tree.leaves(engine.abstract_params())
        sources = jax.tree.leaves(engine.shardings_in(layout))
    else:
        arrays = jax.tree.leaves(engine.abstract_factors(adapter))
        sources = jax.tree.leaves(placement.of_factors(layout, adapter))
    return [
        Moved(x.shape, x.dtype.itemsize, source, x.sharding)
        for x, source in zip(arrays, sources, strict=True)
    ]


def count(arrays: list[Moved]) -> dict[str, int]:
    """Returns the bytes that one sampler receives.

    Returns: `distinct_bytes` counts every array once, the least that must leave the learner.
    `device_bytes` is received by each device of the sampler, `bytes` by all of them.
    """
    device_bytes = sum(math.prod(x.target.shard_shape(x.shape)) * x.itemsize for x in arrays)
    return {
        "bytes": device_bytes * arrays[0].target.mesh.size,
        "device_bytes": device_bytes,
        "distinct_bytes": sum(math.prod(x.shape) * x.itemsize for x in arrays),
    }


COLUMNS = {  # a heading of the table -> a key of the counts
    "distinct bytes": "distinct_bytes", "bytes on each device": "device_bytes",
    "bytes on all devices": "bytes", "passed on to other samplers": "passed_on_bytes",
    "sent by each host": "sent_bytes", "received by each worker": "received_bytes", "seconds (model)": "seconds",
}


def table(counts: dict[str, dict[str, Any]], markdown: bool = False) -> str:
    """Returns the table with one line for each format."""
    first = next(iter(counts.values()))
    columns = {title: key for title, key in COLUMNS.items() if first.get(key) is not None}
    shown = lambda x: f"{x:,}" if isinstance(x, int) else f"{x:.3g}"
    rows = [
        (name, *(shown(counted[key]) for key in columns.values())) for name, counted in counts.items()
    ]
    return grid([("weight sync", *columns), *rows], markdown)
