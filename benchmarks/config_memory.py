"""Prints the memory of a config's programs on one device of this machine, by its compiler.

    python -m benchmarks.config_memory --config=configs/gsm8k_one_chip.py:qwen25_0p5b

The programs are compiled at full size from shapes alone; nothing runs. Arguments and the arrays of the
run beside them depend on shapes alone. Temporaries are those of this machine's backend: on a CPU they
are an estimate for other devices, as the kernels and the order of operations differ.
"""

import pathlib

import jax
from absl import flags
from ml_collections import config_flags

from jaxrl_tis import build, cli_flags
from jaxrl_tis.aot import programs, report
from jaxrl_tis.aot.work import device_bytes
from jaxrl_tis.validate import validate

CONFIG = cli_flags.define_config()
NAMES = flags.DEFINE_list(
    "programs", None, f"Programs to compile, of {', '.join(programs.PROGRAMS)}; default: all."
)
LAYERS = flags.DEFINE_integer(
    "layers", None, "Number of layers to compile instead of the model's.", lower_bound=1
)


def main() -> None:
    path = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    config = CONFIG.value
    choices, model = validate(config), programs.model_of(config, path.parent / "shapes")
    if LAYERS.value is not None:
        model = model.first_layers(LAYERS.value)
    setup = build.assemble(config, choices, model, None, jax.devices()[:1])
    resident, available = programs.resident(setup), programs.programs(setup)
    line = "{:13} {:>10} {:>12} {:>10} {:>10}"
    print(f"{config.name}, {model.num_layers} layers, {jax.devices()[0].device_kind}, GiB")
    print(line.format("program", "arguments", "temporaries", "beside", "sum"), flush=True)
    for name in NAMES.value or available:
        function, args = available[name]
        memory = function.lower(*args).compile().memory_analysis()
        # A donated argument is counted once, as the result takes its place.
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporaries = memory.temp_size_in_bytes + max(new, 0)
        parts = device_bytes(args), temporaries, report.beside(setup, name, args, resident)
        print(line.format(name, *(f"{n / 2**30:.2f}" for n in (*parts, sum(parts)))), flush=True)


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
