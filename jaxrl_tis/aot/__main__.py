"""Compiles the programs of a config for a TPU, without a TPU, and reports whether they fit.

Builds the programs of a run from shapes alone, without weights, data or tokenizer, and compiles
them with libtpu. Prints memory on a device, collectives and matrix products of each program.
Nothing runs and nothing is measured. Columns marked "model" are computed from published peak rates.
Exits with 1 when a program does not fit, after naming the largest arrays. docs/tpu.md explains the
table and the keys of the JSON.

Examples:

    python -m jaxrl_tis.aot --config=configs/gsm8k_qwen25_0p5b.py:grpo --topology=v5e:2x4
    python -m jaxrl_tis.aot --config=configs/dapo_qwen3_8b.py --fit
"""

import json
import pathlib
import sys

import jax
from absl import flags
from ml_collections import config_flags

from jaxrl_tis import cli_flags
from jaxrl_tis.aot import fit, programs, report, weight_sync
from jaxrl_tis.aot.chips import TOPOLOGIES, Topology, name_of
from jaxrl_tis.runtime import cli

CONFIG = cli_flags.define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chip and shape of a slice, as in v5e:4x4 or v5p:4x4x4; default: the config's."
)
NUM_SLICES = flags.DEFINE_integer(
    "num_slices", 1, "Number of such slices, connected by the DCN.", lower_bound=1
)
NAMES = flags.DEFINE_list(
    "programs", None, f"Programs to compile, of {', '.join(programs.PROGRAMS)}; default: all."
)
LAYERS = flags.DEFINE_integer(
    "layers", None, "Number of layers to compile instead of the model's.", lower_bound=1
)
JSON = flags.DEFINE_string("json", None, "Write the report to this file.")
MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the tables as Markdown.")
FIT = flags.DEFINE_bool("fit", False, "Search the largest micro-batch and slots that fit.")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler needs no TPU
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot hold these programs
    path = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    shapes = path.parent / "shapes"
    name = TOPOLOGY.value or TOPOLOGIES.get(name_of(f"{path}"))
    if name is None:
        raise ValueError(f"{path} has no slice of its own; give --topology, as in v5e:2x4")
    if FIT.value and (NAMES.value or JSON.value or MARKDOWN.value):
        raise ValueError("--fit prints a search; --programs, --json and --markdown belong to a report")
    cli.check_folder("json", JSON.value)
    topology = Topology.parse(name, NUM_SLICES.value)
    if FIT.value:
        search = fit.Search(CONFIG.value, shapes, topology, LAYERS.value)
        print(fit.HEADER, flush=True)
        rows = search.run(lambda row: print(fit.line(row), flush=True))
        part = "" if search.is_whole else f" of the first {len(rows)} settings; there are more"
        print(f"\nlargest that fits{part}\n{fit.advice(rows)}")
        sys.exit(0 if len(fit.largest(rows)) == 2 else 1)
    workers = programs.workers(CONFIG.value, topology)
    setup = programs.setup_for(CONFIG.value, shapes, topology.devices(), LAYERS.value, workers)
    print(report.title(setup, topology), flush=True)
    result = programs.report(
        setup, topology, NAMES.value,
        lambda entry: print(report.text(entry), flush=True),
    )
    print("\n" + report.table(result, MARKDOWN.value))
    if setup.is_apart:
        print("\n" + weight_sync.table(result["weight_sync"], MARKDOWN.value))
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(e["fits"] for e in result["programs"].values()) else 1)


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
