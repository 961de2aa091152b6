"""Searches the largest settings of a config that fit a topology, by compiling its programs.

For serving it searches the decode slots for each tensor split, with pages for all slots at full
length (engine.num_pages is 0). The slots must fit in evaluations too, whose cache has the learner's
dtype. For training it searches the rows of a micro-batch for each mesh split and remat policy. If
the sampler sleeps (engine.sleep), neither search depends on the result of the other. The advised
setting is the fastest in the roofline model among those that fit. All other fields stay unchanged.
A compilation takes 10 to 60 seconds or more. Rows and slots are therefore powers of two times the
shards, found by bisection, and the number of settings is limited.
"""

import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import ml_collections

from jaxrl_tis.aot import programs, report
from jaxrl_tis.aot.chips import Topology
from jaxrl_tis.aot.flags import FLAGS
from jaxrl_tis.build import Setup
from jaxrl_tis.learner.setup import fork_rows
from jaxrl_tis.models import placement, transformer

MAX_SETTINGS = 50
COMPILED = {"decode": ("decode", "eval_decode"), "train": ("train",)}  # for each setting
_LINE = "{:8} {:10} {:6} {:>13}  {:>9}  {}"
HEADER = _LINE.format("program", "mesh", "remat", "rows or slots", "HBM use", "of")


class Search:
    """Compiles settings one after the other.

    Attributes:
      rows: one entry for each setting.
      is_whole: whether the limit was enough for all settings.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, shapes: pathlib.Path, topology: Topology,
        layers: int | None = None, limit: int = MAX_SETTINGS,
    ):
        self._config, self._shapes, self._topology = config, shapes, topology
        self._layers, self._limit = layers, limit
        self.rows: list[dict[str, Any]] = []
        self.is_whole = True
        self._refusal: ValueError | None = None

    def run(self, on_row: Callable[[dict], None] = lambda row: None) -> list[dict[str, Any]]:
        """Compiles settings until the largest that fit are known, and returns all entries.

        An entry is {program, mesh, remat, size, fits, use_bytes, hbm_bytes, over_in, seconds} and
        is passed to `on_row`. The use is that of the fullest program of COMPILED. The seconds are
        from the roofline model. Sizes that do not divide the batch are skipped. ValueError if no
        split is legal.
        """
        self._on_row = on_row
        config = self._config
        samples = config.rollout.prompts * config.rollout.group_size
        # A micro-batch divides the samples of an update, and its rows for forks.
        per_update = math.gcd(samples, fork_rows(config)) // config.train.minibatches
        learning, serving = self._num_devices()
        for mesh in _meshes(serving, config.mesh.serve, is_training=False):
            shards = _shards(mesh)
            sizes = _doubled(shards, max(samples, shards))
            self._bisect("decode", mesh, "", sizes, lambda size, mesh=mesh: {
                "mesh": {"serve": mesh}, "engine": {"slots": size, "num_pages": 0},
            })
        training = _meshes(learning, config.mesh.train, is_training=True)
        for mesh, remat in itertools.product(training, reversed(transformer.REMAT)):
            sizes = [n for n in _doubled(_shards(mesh), per_update) if per_update % n == 0]
            self._bisect("train", mesh, remat, sizes, lambda size, mesh=mesh, remat=remat: {
                "mesh": {"train": mesh}, "model": {"remat": remat},
                "train": {"microbatch_rows": size},
            })
        if self._refusal is not None and not self.rows:
            raise self._refusal
        return self.rows

    def _num_devices(self) -> tuple[int, int]:
        """Returns the numbers of devices to train and to serve: all, or the config's shares."""
        if self._config.rollout.driver not in ("threads", "ray"):
            return (len(self._topology.devices()),) * 2
        setup = self._setup({})
        return setup.training.layout.mesh.size, setup.engine.layout.mesh.size

    def _bisect(self, name: str, mesh: tuple, remat: str, sizes: list[int], change: Any) -> None:
        """Bisects the largest size that fits. It compiles nothing for a split that a run would
        refuse."""
        fitting, failing = -1, len(sizes)
        while failing - fitting > 1:
            if len(self.rows) == self._limit:
                self.is_whole = False
                return
            middle = (fitting + failing) // 2
            try:
                setup = self._setup(change(sizes[middle]))
            except ValueError as error:
                self._refusal = error
                return
            entries = [self._entry(program, setup) for program in COMPILED[name]]
            entry = max(entries, key=lambda e: (not e["fits"], _use(e)))
            self.rows.append({
                "program": name, "mesh": mesh, "remat": remat, "size": sizes[middle],
                "fits": entry["fits"], "use_bytes": _use(entry),
                "hbm_bytes": entry["memory"]["hbm_bytes"], "over_in": entry["over_in"],
                "seconds": entry["roofline"]["seconds"] if entry["fits"] else None,
            })
            self._on_row(self.rows[-1])
            fitting, failing = (middle, failing) if entry["fits"] else (fitting, middle)

    def _setup(self, changes: dict[str, dict]) -> Setup:
        """Returns the setup with these fields of the config changed; ValueError for a
        contradiction."""
        config = self._config.copy_and_resolve_references()
        with config.unlocked():
            config.update(changes)
        setup = programs.setup_for(
            config, self._shapes, self._topology.devices(), self._layers,
            programs.workers(config, self._topology),
        )
        for layout in (setup.training.layout, setup.engine.layout, setup.learner_engine.layout):
            placement.shardings(layout, setup.model)
        return setup

    def _entry(self, name: str, setup: Setup) -> dict[str, Any]:
        compiled = programs.compiled(
            name, *programs.programs(setup)[name], FLAGS[self._topology.kind]
        )
        return report.entry(setup, self._topology, compiled, programs.resident(setup))


def _use(entry: dict[str, Any]) -> int:
    return entry["memory"]["peak_bytes"] + entry["memory"]["beside_bytes"]


def _meshes(count: int, given: tuple[int, ...], is_training: bool) -> list[tuple[int, ...]]:
    """Returns the splits of devices into shards of rows and tensor shards. The axes context and
    expert stay as they are given, unless one takes all devices that are left."""
    kept = () if -1 in given[3:] else tuple(given[3:])
    left = max(count // math.prod(kept), 1)
    splits = [(1, n, left // n) if is_training else (n, 1, left // n) for n in _divisors(left)]
    return [split + kept for split in splits]


def _shards(mesh: tuple[int, ...]) -> int:
    """Returns into how many parts the rows of a batch are cut."""
    return math.prod((*mesh[:2], *mesh[4:]))


def _divisors(count: int) -> list[int]:
    return [n for n in range(count, 0, -1) if count % n == 0]


def _doubled(start: int, limit: int) -> list[int]:
    return [start * 2**i for i in range(1 + (limit // start).bit_length()) if start * 2**i <= limit]


def line(row: dict[str, Any]) -> str:
    """Returns one row of the table under HEADER as text."""
    mesh, use = "x".join(map(str, row["mesh"])), row["use_bytes"] / row["hbm_bytes"]
    verdict = "" if row["fits"] else f"  does not fit in {row['over_in']}"
    return _LINE.format(
        row["program"], mesh, row["remat"], row["size"], f"{use:.1%}",
        report.gib(row["hbm_bytes"]) + verdict,
    )


def largest(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the best entry that fits for each program; a program that never fits is absent.

    Decode: the most slots. Training: the fewest seconds of the roofline model to two digits, then
    the most rows, then the least recomputation. Ties go to the least tensor parallelism.
    """
    best = {}
    for row in (r for r in rows if r["fits"]):
        previous = best.get(row["program"])
        if previous is None or _rank(row) > _rank(previous):
            best[row["program"]] = row
    return best


def _rank(row: dict[str, Any]) -> tuple:
    if row["program"] == "decode":
        return (row["size"],)
    remat = list(transformer.REMAT)
    return -float(f"{row['seconds']:.2g}"), row["size"], -remat.index(row["remat"])


def advice(rows: list[dict[str, Any]]) -> str:
    """Returns the best settings as options of a command, one line for each program."""
    best, lines = largest(rows), []
    for name in dict.fromkeys(row["program"] for row in rows):
        row = best.get(name)
        if row is None:
            lines.append(f"{name}: nothing that was tried fits")
            continue
        mesh = ",".join(map(str, row["mesh"]))
        lines.append(f"{name}: " + (
            f"--config.mesh.train='({mesh})' --config.model.remat={row['remat']} "
            f"--config.train.microbatch_rows={row['size']}" if name == "train" else
            f"--config.mesh.serve='({mesh})' --config.engine.slots={row['size']}"
        ))
    return "\n".join(lines)
