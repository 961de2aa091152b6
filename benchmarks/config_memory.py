"""Prints the memory of a config's programs on one device of this machine, by its compiler.

    python -m benchmarks.config_memory --config=configs/gsm8k_one_chip.py:qwen25_0p5b
    python -m benchmarks.config_memory --config=configs/gsm8k_one_chip.py:qwen25_0p5b --gpu=l4

The programs are compiled at full size from shapes alone; nothing runs. Arguments and the arrays of the
run beside them depend on shapes alone. Temporaries are those of this machine's backend: on a CPU they
are an estimate for other devices, as the kernels and the order of operations differ. `--gpu` takes the
compiler of a GPU, which need not exist; it needs the extra cuda13.
"""

import importlib.util
import os
import pathlib

import jax
from absl import flags
from jax.experimental import topologies
from ml_collections import config_flags

from benchmarks import arguments
from jaxrl_tis import cli_flags
from jaxrl_tis.aot import programs, report
from jaxrl_tis.sharding import device_bytes

CONFIG = cli_flags.define_config()
NAMES = flags.DEFINE_list(
    "programs", None, f"Programs to compile, of {', '.join(programs.PROGRAMS)}; default: all."
)
LAYERS = flags.DEFINE_integer(
    "layers", None, "Number of layers to compile instead of the model's.", lower_bound=1
)
GPU = flags.DEFINE_enum("gpu", None, ["l4"], "Compile for this GPU instead of this machine.")
flags.register_validator(
    "gpu", lambda name: name is None or importlib.util.find_spec("jax_cuda13_plugin"),
    "needs the compiler of GPUs: pip install -e '.[cuda13]'",
)
# From the data sheet and the whitepaper of NVIDIA's Ada architecture.
L4 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 1536
  shared_memory_per_block: 49152 shared_memory_per_core: 102400
  shared_memory_per_block_optin: 101376
  core_count: 58 fpus_per_core: 128 clock_rate_ghz: 2.04
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 300000000000 l2_cache_size: 50331648 device_memory_size: 25769803776
  cuda_compute_capability { major: 8 minor: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA L4"
"""


def chosen_device() -> jax.Device:
    """Returns the device of `--gpu`, or the first of this machine."""
    if GPU.value is None:
        return jax.devices()[0]
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # that of the driver
    tuning = "--xla_gpu_autotune_level=0"  # which would run kernels
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {tuning}"
    described = topologies.get_topology_desc(platform="cuda", target_config=L4, topology="1x1x1")
    return described.devices[0]


def main() -> None:
    path = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    config = CONFIG.value
    device = chosen_device()
    setup = programs.setup_for(config, path.parent / "shapes", [device], LAYERS.value)
    resident, available = programs.resident(setup), programs.programs(setup)
    line = "{:13} {:>10} {:>12} {:>10} {:>10}"
    print(f"{config.name}, {setup.model.num_layers} layers, {device.device_kind}, GiB")
    print(line.format("program", "arguments", "temporaries", "beside", "sum"), flush=True)
    for name in NAMES.value or available:
        arguments.say(f"compiling {name}")
        function, args = available[name]
        memory = function.lower(*args).compile().memory_analysis()
        # A donated argument is counted once, as the result takes its place.
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporaries = memory.temp_size_in_bytes + max(new, 0)
        parts = device_bytes(args), temporaries, report.beside(setup, name, args, resident)
        print(line.format(name, *(f"{n / 2**30:.2f}" for n in (*parts, sum(parts)))), flush=True)


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
