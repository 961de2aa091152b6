"""Counts the bytes of one weight sync, from the learner's devices to the devices of a sampler.

Bytes are counted from the shardings of each array in the learner's and the sampler's layout.
Nothing is compiled, and time is not estimated.
"""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding

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


def by_format(setup: Setup) -> dict[str, dict[str, int]]:
    """Returns the bytes of one sync by number format: the engine's dtype without quantization, and
    the engine's own format (w8a8 if it has none). `count` explains the keys. The first sampler
    sends `passed_on_bytes` to the other samplers."""
    config = setup.engine.config
    plain = dataclasses.replace(config, quantization="none", unquantized=())
    if config.quantization == "none":
        config = dataclasses.replace(config, quantization="w8a8")
    counts = {}
    for choice in (plain, config):
        engine = Engine(setup.model, choice, setup.engine.layout)
        counted = count(moved(setup, engine))
        others = len(setup.engines) - 1
        counts[engine.quant_id] = counted | {"passed_on_bytes": others * counted["bytes"]}
    return counts


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
}


def table(counts: dict[str, dict[str, int]], markdown: bool = False) -> str:
    """Returns the table with one line for each format."""
    rows = [
        (name, *(f"{counted[key]:,}" for key in COLUMNS.values()))
        for name, counted in counts.items()
    ]
    return grid([("weight sync", *COLUMNS), *rows], markdown)
