"""The largest settings of a config that fit a topology, by compiling the true programs.

Training: rows of a micro-batch for each mesh split and remat policy; serving: decode slots for each
tensor split, with pages for all of them at full length. Rows and slots double until a program does
not fit; everything else stays as the config has it. A compilation takes 10 to 60 seconds and more, so
their number is capped.
"""

import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import ml_collections

from jaxrl_tis import aot_programs, aot_report
from jaxrl_tis.chips import Topology
from jaxrl_tis.libtpu_flags import FLAGS
from jaxrl_tis.models import transformer

MAX_COMPILATIONS = 40
COLUMNS = ("program", "mesh", "remat", "rows or slots", "HBM use", "HBM of")


class Search:
    """Compiles one setting after the other; `rows` is the table."""

    def __init__(
        self, config: ml_collections.ConfigDict, shapes: pathlib.Path, topology: Topology,
        layers: int | None = None, limit: int = MAX_COMPILATIONS,
    ):
        self._config, self._shapes, self._topology = config, shapes, topology
        self._layers, self._limit = layers, limit
        model = aot_programs.model_of(config, shapes)
        devices = len(topology.devices())
        widths = model.num_heads, model.num_kv_heads, model.vocab_size, model.mlp_dim, devices
        common = math.gcd(*widths)
        self._tensor = [n for n in range(1, common + 1) if common % n == 0]
        self._devices = devices
        self.rows: list[dict[str, Any]] = []

    def run(self, on_row: Callable[[dict], None] = lambda row: None) -> list[dict[str, Any]]:
        """Entries {program, mesh, remat, size, fits, use_bytes, hbm_bytes}, each shown to `on_row`;
        sizes that the batch cannot be cut into are not tried."""
        self._on_row = on_row
        config = self._config
        per_update = config.rollout.prompts * config.rollout.group_size // config.train.minibatches
        for tensor, remat in itertools.product(self._tensor, reversed(transformer.REMAT)):
            shards = self._devices // tensor
            sizes = [n for n in _doubled(shards, per_update) if per_update % n == 0]
            mesh = (1, shards, tensor)
            self._grow("train", mesh, remat, sizes, lambda c, size: c.update({
                "mesh": {"train": mesh}, "model": {"remat": remat},
                "train": {"microbatch_rows": size},
            }))
        for tensor in self._tensor:
            shards = self._devices // tensor
            mesh = (shards, 1, tensor)
            limit = max(config.rollout.prompts * config.rollout.group_size, shards)
            self._grow("decode", mesh, "", _doubled(shards, limit), lambda c, size: c.update({
                "mesh": {"serve": mesh}, "engine": {"slots": size, "num_pages": 0},
            }))
        return self.rows

    def _grow(self, name: str, mesh: tuple, remat: str, sizes: list[int], change: Any) -> None:
        for size in sizes:
            if len(self.rows) == self._limit:
                return
            config = self._config.copy_and_resolve_references()
            with config.unlocked():
                change(config, size)
            entry = self._entry(name, config)
            memory = entry["memory"]
            self.rows.append({
                "program": name, "mesh": mesh, "remat": remat, "size": size,
                "fits": entry["fits"], "use_bytes": memory["peak_bytes"] + memory["beside_bytes"],
                "hbm_bytes": memory["hbm_bytes"],
            })
            self._on_row(self.rows[-1])
            if not entry["fits"]:
                return

    def _entry(self, name: str, config: ml_collections.ConfigDict) -> dict[str, Any]:
        setup = aot_programs.setup_for(config, self._shapes, self._topology, self._layers)
        made = aot_programs.compiled(
            name, *aot_programs.programs(setup)[name], FLAGS[self._topology.kind]
        )
        return aot_report.entry(setup, self._topology, made, aot_programs.resident(setup))


def _doubled(start: int, limit: int) -> list[int]:
    return [start * 2**i for i in range(1 + (limit // start).bit_length()) if start * 2**i <= limit]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each compilation; the last that fits of a group is the largest that does."""
    lines = [COLUMNS] + [
        (r["program"], "x".join(map(str, r["mesh"])), r["remat"], str(r["size"]),
         f"{r['use_bytes'] / r['hbm_bytes']:.0%}" + ("" if r["fits"] else " does not fit"),
         aot_report.gib(r["hbm_bytes"]))
        for r in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines
    )
