"""The programs of a config, compiled for a TPU that is not there.

    python -m jaxrl_tis.aot --config=configs/gsm8k_qwen25_0p5b.py:grpo --topology=v5e:2x4

Builds what the run would build, from shapes alone (no weights, data or tokenizer), compiles it with
libtpu and prints per program what the compiler says: memory on a device, collectives, products.
Nothing runs and nothing is measured; what is computed from published rates is marked as a model's
output. Exits with 1 when a program does not fit, after naming the largest arrays. docs/tpu.md says
how to read the table and names the keys of the JSON.
"""

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import ml_collections
from absl import app, flags
from ml_collections import config_flags

from jaxrl_tis import aot_report, build, models, step
from jaxrl_tis.chips import TOPOLOGIES, Topology
from jaxrl_tis.data.tokenizer import load_tokenizer
from jaxrl_tis.hlo import Module
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.validate import validate

PROGRAMS = (
    "train", "critic", "score", "values", "quantize", "reshard", "prefill", "insert", "decode",
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program of the compiler, or its refusal.

    Attributes:
      args: abstract arguments.
      memory: the compiler's byte counts on one device; module: its HLO. None where it refused.
      refusal: what the compiler said.
    """

    name: str
    args: tuple
    seconds: float
    memory: Any = None
    module: Module | None = None
    refusal: str = ""


def model_of(config: ml_collections.ConfigDict, shapes: pathlib.Path) -> ModelConfig:
    """The model's shape: of its checkpoint, else of the file that ships with the configs.

    Raises:
      FileNotFoundError: neither exists.
    """
    path = pathlib.Path(config.model.path)
    if not config.model.path:
        return build.small_model(config, load_tokenizer(config.task.tokenizer).vocab_size)
    if path.exists():
        return models.read_config(path)
    shipped = shapes / f"{path.name}.json"
    if not shipped.exists():
        raise FileNotFoundError(
            f"the shape of {path} is unknown: put the model's config.json there or at {shipped}"
        )
    return ModelConfig.from_hf(json.loads(shipped.read_text()))


def setup_for(
    config: ml_collections.ConfigDict, shapes: pathlib.Path, topology: Topology,
    layers: int | None = None,
) -> build.Setup:
    """What the run would set up, on the topology's devices; `layers` replaces the model's depth."""
    validate(config)
    model = model_of(config, shapes)
    if layers is not None:
        model = dataclasses.replace(model, num_layers=layers)
    return build.assemble(config, model, None, topology.devices())


def programs(setup: build.Setup) -> dict[str, tuple[Any, tuple]]:
    """PROGRAMS that the config's run has: name -> (jitted function, abstract arguments)."""
    state = build.abstract_state(setup)
    params = state["policy"].params
    micro, mini = build.abstract_microbatches(setup), build.abstract_minibatch(setup)
    learner, engine = setup.learner, setup.engine
    sampling = engine.programs(params)
    update = step.make_train_step(learner, setup.correction, setup.optimizer)
    found = {
        "train": (update, (state["policy"], mini)),
        "score": (step.make_score(learner), (params, micro)),
        "quantize": sampling["load"],
        "reshard": setup.learner_engine.programs(params)["load"],
        **{name: sampling[name] for name in ("prefill", "insert", "decode")},
    }
    if setup.has_critic:
        clip = setup.config.critic.value_clip
        update = step.make_critic_step(learner, clip, setup.critic_optimizer)
        found["critic"] = update, (state["critic"], mini)
        found["values"] = step.make_values(learner), (state["critic"].params, micro)
    return {name: found[name] for name in PROGRAMS if name in found}


def compiled(name: str, function: Any, args: tuple) -> Compiled:
    """Compiles a program; a program that exceeds the memory is a result, not an error."""
    start = time.monotonic()
    lowered = function.lower(*args)
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(name, args, time.monotonic() - start, refusal=str(error))
    seconds = time.monotonic() - start
    module = Module(executable.as_text())
    return Compiled(name, args, seconds, executable.memory_analysis(), module)


def resident(setup: build.Setup) -> dict[str, Any]:
    """Abstract arrays that a run keeps on its devices from step to step, by name."""
    state = build.abstract_state(setup)
    params, decode_state = setup.engine.programs(state["policy"].params)["decode"][1]
    kept = {name: state[name] for name in state if name != "controllers"}
    if setup.config.correction.offload_reference:
        kept.pop("reference", None)
    return kept | {"serving weights": params, "decode state": decode_state}


def report(
    setup: build.Setup, topology: Topology, names: list[str] | None = None,
    on_program: Any = lambda entry: None,
) -> dict[str, Any]:
    """The JSON: compiles the named programs (default: all), `on_program` sees each one's entry."""
    available = programs(setup)
    unknown = [n for n in names or () if n not in available]
    if unknown:
        raise ValueError(
            f"programs {', '.join(unknown)} are none of this run's: {', '.join(available)}"
        )
    kept, entries = resident(setup), {}
    for name in names or available:
        entries[name] = aot_report.entry(
            setup, topology, compiled(name, *available[name]), kept
        )
        on_program(entries[name])
    return aot_report.header(setup, topology, kept) | {"programs": entries}


CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chip and shape, as in v5e:4x4 or v5p:4x4x4; default: the config's."
)
NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "Slices of that shape, over the DCN.")
NAMES = flags.DEFINE_list("programs", None, f"Of {', '.join(PROGRAMS)}; default: all of the run's.")
LAYERS = flags.DEFINE_integer("layers", None, "Compile a model of this depth instead of its own.")
JSON = flags.DEFINE_string("json", None, "Write the report to this file.")
MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the tables as Markdown.")
FIT = flags.DEFINE_bool("fit", False, "Search the largest batch and slots that fit.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler needs no TPU
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot hold these programs
    path = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    topology = Topology.parse(TOPOLOGY.value or TOPOLOGIES[path.stem], NUM_SLICES.value)
    setup = setup_for(CONFIG.value, path.parent / "shapes", topology, LAYERS.value)
    print(aot_report.title(setup, topology), flush=True)
    result = report(
        setup, topology, NAMES.value,
        lambda entry: print(aot_report.text(entry), flush=True),
    )
    print(aot_report.table(result, MARKDOWN.value))
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(e["fits"] for e in result["programs"].values()) else 1)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    app.run(main)
