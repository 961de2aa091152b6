"""Counts the segment kernels of packed TPU programs, and compares with XLA's own lowering, by the compiler.

    python -m benchmarks.segments --config=configs/dapo_qwen3_8b.py [--topology=v5p:2x2x4]

Compiles for the config's TPU, without one, the program that weighs a rollout batch and the update of a
model of one layer, whose sequences are packed as in the whole one. Each is compiled with its kernels and with
segment sums in XLA's scatters. Bytes and temporaries are the compiler's figures for one device. Nothing
is timed.
"""

import argparse
import pathlib

import jax

from benchmarks import arguments
from benchmarks.kernels import reference
from jaxrl_tis import cli_flags
from jaxrl_tis.aot import programs
from jaxrl_tis.aot.chips import TOPOLOGIES, Topology, name_of
from jaxrl_tis.aot.flags import FLAGS
from jaxrl_tis.aot.hlo import MOSAIC, Module
from jaxrl_tis.runtime import cli

MIB = 2**20


def compiled(function, args: tuple, options: dict[str, str]) -> tuple[int, float, float]:
    """Returns (segment kernels that a run calls, MiB of memory accessed, MiB of temporaries)."""
    executable = jax.jit(function).lower(*args).compile(compiler_options=options)
    calls = Module(executable.as_text()).custom_calls()
    count = sum(c.runs for c in calls if c.target == MOSAIC and "segment" in c.name)
    accessed = executable.cost_analysis()["bytes accessed"] / MIB
    return count, accessed, executable.memory_analysis().temp_size_in_bytes / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/dapo_qwen3_8b.py")
    parser.add_argument("--topology", default="", help="default: the config's")
    parser.add_argument("--programs", default="weigh,train")
    args = arguments.parse(parser, programs="weigh")
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler needs no TPU
    path = pathlib.Path(args.config)
    topology = Topology.parse(args.topology or TOPOLOGIES[name_of(args.config)], 1)
    config = cli_flags.parsed([f"--config={args.config}"])
    workers = programs.workers(config, topology)
    setup = programs.setup_for(config, path.parent / "shapes", topology.devices(), 1, workers)
    print("program  form     segment kernels  MiB accessed  MiB temporaries")
    for name in args.programs.split(","):
        function, inputs = programs.programs(setup)[name]
        for form, one in (("kernels", function), ("XLA", reference(function))):
            arguments.say(f"compiling {name}, {form}")
            jax.clear_caches()  # traces of the other form
            count, accessed, temporary = compiled(one, inputs, FLAGS[topology.kind])
            print(
                f"{name:7s}  {form:7s}  {count:15d}  {accessed:12.2f}  {temporary:15.2f}",
                flush=True,
            )


if __name__ == "__main__":
    cli.run(main)
