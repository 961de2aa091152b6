"""Counts the segment kernels of packed TPU programs and compares them with XLA's own lowering, by the compiler.

    python -m benchmarks.segments [configs/dapo_qwen3_8b.py configs/gsm8k_qwen25_0p5b.py:ppo]

Compiles for the TPU of each config, without one, the program that weighs a packed rollout batch, twice: with its
kernels, and with the scatters that XLA makes of segment sums. Bytes are those of one device, as the compiler
counts them. Nothing is timed.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

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


def compiled(function: Callable, args: tuple, options: dict[str, str]) -> tuple[int, float]:
    """Returns (segment kernels of a run, MiB of memory accessed)."""
    jax.clear_caches()  # traces of the other form
    executable = jax.jit(function).lower(*args).compile(compiler_options={**options})
    cost: Any = executable.cost_analysis()
    calls = Module(executable.as_text() or "").custom_calls()
    count = sum(c.runs for c in calls if c.target == MOSAIC and c.name.startswith("segment"))
    return count, cost["bytes accessed"] / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("configs", nargs="*", default=["configs/dapo_qwen3_8b.py"])
    args = arguments.parse(parser, configs=["configs/gsm8k_qwen25_0p5b.py:ppo"])
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler needs no TPU
    print("| config | segment kernels | MiB accessed | by XLA's scatters |\n|---|---|---|---|")
    for name in args.configs:
        topology, config = Topology.parse(TOPOLOGIES[name_of(name)], 1), cli_flags.parsed([f"--config={name}"])
        path = pathlib.Path(name.partition(":")[0])
        workers = programs.workers(config, topology)
        setup = programs.setup_for(config, path.parent / "shapes", topology.devices(), 1, workers)
        arguments.say(f"compiling for {name} twice")
        function, inputs = programs.programs(setup)["weigh"]
        (count, ours), (_, xlas) = (
            compiled(f, inputs, FLAGS[topology.kind]) for f in (function, reference(function))
        )
        print(f"| `{name.removeprefix('configs/')}` | {count} | {ours:,.0f} | {xlas:,.0f} |", flush=True)


if __name__ == "__main__":
    cli.run(main)
