"""Compiles the programs of a run from shapes alone, for devices that need not exist."""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from jaxrl_tis import build, models
from jaxrl_tis.aot import weight_sync
from jaxrl_tis.aot.batches import (
    abstract_distillation, abstract_microbatches, abstract_minibatch, abstract_weighing,
)
from jaxrl_tis.aot.chips import Topology
from jaxrl_tis.aot.flags import FLAGS
from jaxrl_tis.aot.hlo import Module
from jaxrl_tis.aot.report import EVALUATION, OF_DRAFTER, entry, header
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.fusion import of_policy
from jaxrl_tis.engine.weights import moving
from jaxrl_tis.learner.batch_layout import without_replay
from jaxrl_tis.learner.scoring import make_score, make_values
from jaxrl_tis.learner.state import abstract_state, base, joined, policy
from jaxrl_tis.learner.step import (
    make_critic_step, make_distillation_step, make_packed_weigh, make_train_step,
)
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.runtime import hub
from jaxrl_tis.validate import validate

PROGRAMS = (
    "train", "critic", "score", "weigh", "values", "distill", "quantize", "prefill", "insert", "decode",
    "verify", *OF_DRAFTER, *EVALUATION,
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, or the compiler's refusal.

    Attributes:
      args: abstract arguments.
      memory: the compiler's byte counts on one device; None after a refusal.
      module: the HLO; after a refusal only if the refusal names no array, else None.
      refusal: the compiler's error message.
    """

    name: str
    args: tuple
    seconds: float
    memory: Any = None
    module: Module | None = None
    refusal: str = ""


def model_of(config: ml_collections.ConfigDict, shapes: pathlib.Path) -> ModelConfig:
    """Returns the model's config: `shape_of` its path, or a new small model's."""
    if not config.model.path:
        return build.small_model(config, load_tokenizer(config.task.tokenizer).vocab_size)
    return shape_of(config.model.path, shapes)


def shape_of(model: str, shapes: pathlib.Path) -> ModelConfig:
    """Returns a model's config from its checkpoint, or else from configs/shapes/.

    Raises:
      FileNotFoundError: neither exists.
    """
    path = pathlib.Path(model.partition("@")[0])
    if path.exists():
        return models.read_config(path)
    shipped = shapes / f"{path.name}.json"
    if not shipped.exists() and hub.is_hub(model):
        return models.read_config(model)
    if not shipped.exists():
        raise FileNotFoundError(
            f"the shape of {path} is unknown: put the model's config.json there or at {shipped}"
        )
    return ModelConfig.from_hf(json.loads(shipped.read_text()))


def setup_for(
    config: ml_collections.ConfigDict, shapes: pathlib.Path, devices: list, layers: int | None = None,
    workers: list | None = None,
) -> build.Setup:
    """Returns the Setup of the run on these devices.

    Args:
      layers: in place of the depth of the model, of its teacher and of its drafter.
      workers: devices of one worker on Ray. The first of `engines` is then the worker's.

    Raises:
      ValueError: a drafter does not fit the model. Tokenizers are not compared.
    """
    choices, model = validate(config), model_of(config, shapes)
    paths = config.rollout.teacher, config.engine.drafter
    teacher, drafter = (shape_of(path, shapes) if path else None for path in paths)
    if drafter is not None:
        build.check_drafter(config, model, drafter)
    if layers is not None:
        model = model.first_layers(layers)
        teacher, drafter = (c and c.first_layers(layers) for c in (teacher, drafter))
    setup = build.assemble(config, choices, model, None, devices, teacher, drafter)
    return setup if workers is None else build.on_workers(setup, workers, drafter)


def workers(config: ml_collections.ConfigDict, topology: Topology) -> list | None:
    """Returns the devices of one worker on Ray, a host of the learner's kind of chip; None with
    another driver."""
    if config.rollout.driver != "ray":
        return None
    return topology.host(int(config.rollout.tpus_per_worker)).devices()


def programs(setup: build.Setup) -> dict[str, tuple[Any, tuple]]:
    """Returns the run's programs: name in PROGRAMS -> (jitted function, abstract arguments)."""
    training = setup.training
    state = abstract_state(training)
    params, of_base = policy(training, state), (base(state),) if training.adapter else ()
    micro, mini = abstract_microbatches(setup), abstract_minibatch(setup)
    learner, sampling = training.update_learner, setup.engine.programs(params)
    evaluating = setup.learner_engine.programs(params)
    is_scored, has_reference = bool(training.recompute_reason), training.correction.kl is not None
    returns_routes = training.correction.routing == "r2"
    score = make_score(learner, with_routes=returns_routes)
    scored = without_replay(micro) if returns_routes else micro
    update = make_train_step(learner, training.correction, training.optimizer, is_scored)
    by_name = {
        "train": (update, (state["policy"], mini, *of_base)),
        **({"score": (score, (params, scored))} if is_scored or has_reference else {}),
        "quantize": _published(setup).programs(params)["load"],
        "reshard": evaluating["load"],
        **{name: sampling[name] for name in sampling if name != "load"},
        **{f"eval_{name}": evaluating[name] for name in ("prefill", "insert", "decode")},
    }
    if training.packer is not None:
        weigh = make_packed_weigh(learner, training.correction)
        by_name["weigh"] = weigh, (abstract_weighing(setup),)
    if training.has_critic:
        clip = setup.config.critic.value_clip
        update = make_critic_step(learner, clip, training.critic_optimizer)
        by_name["critic"] = update, (state["critic"], mini, *of_base)
        critic = joined(training, state, state["critic"].params)
        by_name["values"] = make_values(learner), (critic, micro)
    if setup.drafters:
        drafting = setup.drafters[0].programs(slots=sampling["decode"][1][1].slots)
        by_name |= {name: drafting[name.removeprefix("draft_")] for name in OF_DRAFTER}
    if training.drafter is not None:
        update = make_distillation_step(training.drafter, training.drafter_optimizer)
        by_name["distill"] = update, (state["drafter"].network, abstract_distillation(setup))
    return {name: by_name[name] for name in PROGRAMS if name in by_name}


def _published(setup: build.Setup) -> Engine:
    """Returns the engine in whose format the learner publishes weights. For workers on Ray it lays
    them out on its own devices first, as evaluations do."""
    if setup.config.rollout.driver != "ray":
        return setup.engine
    return Engine(setup.model, setup.engine.config, setup.learner_engine.layout, setup.engine.teacher)


def compiled(name: str, function: Any, args: tuple, options: dict[str, str]) -> Compiled:
    """Compiles a program; exceeding the memory is a result, not an error."""
    start = time.monotonic()
    lowered = function.lower(*args)
    try:
        executable = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = time.monotonic() - start
        module = None if "Size: " in str(error) else _refused_module(lowered, options)
        return Compiled(name, args, seconds, module=module, refusal=str(error))
    seconds = time.monotonic() - start
    module = Module(executable.as_text())
    return Compiled(name, args, seconds, executable.memory_analysis(), module)


def _refused_module(lowered: jax.stages.Lowered, options: dict[str, str]) -> Module | None:
    """Returns the HLO of a refused program from the compiler's dump, None without a dump."""
    with tempfile.TemporaryDirectory() as folder:
        dump: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options=options | dump)
        files = sorted(pathlib.Path(folder).glob("*after_optimizations.txt"))
        return Module(files[-1].read_text(encoding="utf-8")) if files else None


def resident(setup: build.Setup) -> dict[str, Any]:
    """Returns by name the abstract arrays that a run keeps on its devices between steps or during
    an evaluation."""
    state = abstract_state(setup.training)
    engines = setup.engine, setup.learner_engine
    params = policy(setup.training, state)
    sampling, evaluating = (e.programs(params)["decode"][1] for e in engines)
    arrays = {name: state[name] for name in state if name != "controllers"}
    if setup.is_apart:  # the next ones come while samplers draw on
        arrays["arriving weights"], _ = moving(of_policy(sampling[0]))
    if setup.drafters:
        params, kept, *_ = setup.drafters[0].programs()["decode"][1]
        arrays |= {"drafter weights": params, "drafter state": kept}
        if setup.is_apart and setup.training.drafter is not None:
            arrays["arriving drafter weights"] = params
    return arrays | {
        "serving weights": sampling[0], "decode state": sampling[1],
        "evaluation weights": evaluating[0], "evaluation state": evaluating[1],
    }


def report(
    setup: build.Setup, topology: Topology, names: list[str] | None = None,
    on_program: Callable[[dict], None] = lambda entry: None,
) -> dict[str, Any]:
    """Compiles the named programs (default: all) and returns the JSON; `on_program` receives each
    entry."""
    available = programs(setup)
    unknown = [n for n in names or () if n not in available]
    if unknown:
        raise ValueError(
            f"this run has no programs {', '.join(unknown)}; choose among {', '.join(available)}"
        )
    kept, entries = resident(setup), {}
    for name in names or available:
        program = compiled(name, *available[name], FLAGS[topology.kind])
        entries[name] = entry(setup, topology, program, kept)
        on_program(entries[name])
    moved = {"weight_sync": weight_sync.by_format(setup, topology)} if setup.is_apart else {}
    return header(setup, topology, kept) | moved | {"programs": entries}
