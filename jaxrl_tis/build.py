"""From a config to everything of a run that does not change while it runs: its `Setup`."""

import dataclasses
import functools
import hashlib
import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from jaxrl_tis import models, sharding
from jaxrl_tis.data.tokenizer import fitted
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.check import sampler_numerics
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafter import Drafter, Drafting
from jaxrl_tis.engine.drafts import Drafts, Paced
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.engine.records import MAX_STOP_IDS, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.weights import apart, sent
from jaxrl_tis.environments.continuity import Suffixes
from jaxrl_tis.environments.pool import Lender, Pool, SharedPool
from jaxrl_tis.estimators import centering
from jaxrl_tis.harness.process import HarnessProcess
from jaxrl_tis.learner.setup import (
    LearnerSetup, check_invariant, make_learner_setup, max_length,
)
from jaxrl_tis.models import lora, overflow, placement, transformer, transforms
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.record import provenance
from jaxrl_tis.record.goodput import GIB
from jaxrl_tis.rollouts import ray_cluster, replay, teaching
from jaxrl_tis.rollouts.episodes import EpisodeScheduler, Openings
from jaxrl_tis.rollouts.live import Sessions
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.rollouts.sessions import SessionScheduler
from jaxrl_tis.rollouts.source import RolloutSource, SourceParts
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.teaching import Teacher
from jaxrl_tis.rollouts.threads import thread_source
from jaxrl_tis.rollouts.virtual import VirtualSource
from jaxrl_tis.runtime import fingerprint, processes
from jaxrl_tis.validate import Choices, validate

MOE_FAMILIES = {"softmax": "qwen3_moe", "sigmoid": "glm4_moe"}  # of random models, by their router
PROBED = 4096  # tokens whose texts tell a tokenizer from others


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampler's half of a run, which is all that a rollout worker needs.

    Attributes:
      engines: they sample; one for each worker that has devices of its own, else a single one.
      drafters: the engines of engine.drafter, one beside each of `engines`; () without.
    """

    config: ml_collections.ConfigDict
    model: ModelConfig
    tokenizer: Any
    engines: tuple[Engine, ...]
    drafters: tuple[Engine, ...] = dataclasses.field(default=(), kw_only=True)

    @functools.cached_property
    def _teachers(self) -> dict[Engine, Teacher]:
        """The teacher as each of `engines` serves it."""
        rollout = self.config.rollout
        if not rollout.teacher:
            return {}
        load = lambda engine: engine.load_teacher(_placed(rollout.teacher, engine, engine.teacher))
        alpha = teaching.parse(rollout.alpha)
        return {engine: Teacher(alpha, functools.partial(load, engine)) for engine in self.engines}

    @functools.cached_property
    def drafting(self) -> dict[Engine, Drafting]:
        """The model that drafts for each of `engines`."""
        path = self.config.engine.drafter
        pairs = zip(self.engines, self.drafters, strict=True) if self.drafters else ()
        load = lambda own: own.load(_placed(path, own, own.model))
        return {engine: Drafting(own, (load(own), 0)) for engine, own in pairs}

    def sync_drafter(self, params: Any, version: int) -> None:
        """Gives each of `drafters` trained parameters, which make the drafts from the next weight sync on."""
        for drafting in self.drafting.values():
            drafting.served = apart(drafting.engine.load(params), params), version

    @property
    def engine(self) -> Engine:
        """The first of `engines`."""
        return self.engines[0]

    @property
    def retention(self) -> KVEviction | None:
        """The KV eviction of `engine`; None if sequences keep all pages."""
        return KVEviction.of(self.config.engine)

    @functools.cached_property
    def adapter(self) -> lora.Adapter | None:
        """The adapted weights of model.lora; None where all weights are trained."""
        recipe = lora.parse(self.config.model.lora)
        shapes = transformer.abstract_params(self.model)
        return None if recipe is None else lora.Adapter.of(recipe, self.model, shapes)

    @property
    def abstract_served(self) -> Any:
        """The shapes and shardings of the serving parameters, with the factors of model.lora."""
        served = self.engine.abstract_params()
        if self.adapter is None:
            return served
        return self.adapter.join(served, self.engine.abstract_factors(self.adapter))

    @property
    def identity(self) -> dict[str, Any]:
        """Returns by name the values that a learner and its rollout workers must share: code,
        packages, model, engine and tokenizer."""
        model, engine = vars(self.model), vars(self.engine.config)
        fields = provenance.identity({})
        fields |= {f"model.{name}": str(value) for name, value in model.items()}
        fields |= {f"engine.{name}": str(value) for name, value in engine.items()}
        size = self.tokenizer.vocab_size
        shown = repr((_texts(self.tokenizer, size), size, self.tokenizer.eos_ids)).encode()
        return fields | {"tokenizer": hashlib.sha256(shown).hexdigest()[:16]}

    def serving_params(self, params: Any, version: int) -> Any:
        """Returns the sampler's parameters of this version: the policy in the engine's format,
        with the noise of the version."""
        e, noise = self.config.engine, None
        if e.noise_start:
            noise = transforms.noise(
                self.config.seed, version, self.config.steps, e.noise_start, e.noise_end,
                e.noise_stages,
            )
        return self.engine.load(params, noise)

    def served_params(self, params: Any, version: int) -> list[Any]:
        """Returns the parameters for each of `engines`, on its devices. The policy is quantized
        once, on the learner's devices."""
        first = self.serving_params(params, version)
        others = [engine.receive(first) for engine in self.engines[1:]]
        [moved, *copies] = sent([first, *others])
        digest = fingerprint.hex(fingerprint.digest(moved)) if others else ""
        for copy in copies:
            fingerprint.check(copy, digest)
        return [first, *others]

    @functools.cached_property
    def suffixes(self) -> Suffixes:
        """The token ids between two turns. ValueError if the chat template cannot be extended."""
        return Suffixes(self.tokenizer, self.config.task.chat)

    def prompter(self) -> Prompter:
        """Makes the prompts of examples. Close it after use."""
        config, opening = self.config, None
        if config.task.environment:
            opening = Openings(self.environments.lend, config.seed)
        return Prompter(self.tokenizer, config.task, opening)

    @functools.cached_property
    def sessions(self) -> Sessions:
        """The sessions of rollout.harness, which all schedulers share. ValueError without the extra
        [serve]."""
        try:
            from jaxrl_tis.endpoint.sessions import Endpoint
        except ImportError as error:
            raise ValueError(
                f"rollout.harness needs an HTTP server: pip install 'jaxrl_tis[serve]' ({error})"
            ) from error
        rollout, top_n = self.config.rollout, min(engine.config.top_n for engine in self.engines)
        length, name = max_length(self.config), self.config.name
        return Sessions(
            lambda: Endpoint(
                name, self.model.vocab_size, self.tokenizer, max_length=length, logprobs=top_n,
            ),
            lambda on_reply: HarnessProcess(rollout.harness, on_reply, rollout.harness_python),
            name, rollout.harness_timeout,
        )

    def scheduler(
        self, engine: Engine, params: Any, version: int,
        heartbeat: Callable[[], None] = lambda: None, **options,
    ) -> Any:
        """Makes a scheduler for one of the engines with these serving parameters; `options` are
        further arguments of Scheduler. With an environment it plays episodes, with a harness
        sessions. Both call `heartbeat` while they wait. Close it after use."""
        task, rollout = self.config.task, self.config.rollout
        if rollout.harness:
            options = {"decode": self.tokenizer.decode} | options
        scheduler = self.turn_scheduler(engine, params, version, **options)
        ways = dict(
            max_length=max_length(self.config), on_fork=rollout.on_fork,
            waits=rollout.driver == "virtual", heartbeat=heartbeat,
        )
        if rollout.harness:
            return SessionScheduler(scheduler, self.sessions, **ways)
        if not task.environment:
            return scheduler
        return EpisodeScheduler(
            scheduler, self.environments.lend, self.suffixes, self.tokenizer.decode,
            Prompter(self.tokenizer, task).rendered, max_turns=task.max_turns, **ways,
        )

    @functools.cached_property
    def environments(self) -> Lender:
        """The processes that play the environment, for all who need them."""
        task = self.config.task
        start = lambda: Pool(
            environment=task.environment, params=task.environment_params.to_dict(),
            workers=task.environment_workers, timeout=task.turn_timeout,
            network=self.config.reward.network,
        )
        is_alone = processes.is_alone()
        return Lender(start if is_alone else lambda: SharedPool(start, processes.first))

    def turn_scheduler(self, engine: Engine, params: Any, version: int, **options) -> Scheduler:
        """Makes a scheduler of single turns; see `scheduler`."""
        config = self.config.engine
        drafts: Paced | None = None
        retention = self.retention if engine is self.engine else None
        if self.drafters and engine in self.engines:
            drafting = self.drafting[engine]
            sizes = (e.device_bytes["policy"] for e in (drafting.engine, engine))
            drafts = Drafter(drafting, config.free_batch_rows, operator.truediv(*sizes))
        elif config.max_draft:
            drafts = Drafts(engine.slots, config.max_draft, config.free_batch_rows)
        if (teacher := self._teachers.get(engine)) is not None:
            options = {"teacher": teacher} | options
        return Scheduler(
            engine, params, version, policy=POLICIES[config.policy](),
            max_wait_admissions=config.max_wait_admissions or None,
            preempt_after=config.preempt_after, retention=retention, drafts=drafts,
            async_scheduling=config.async_scheduling,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class Setup(Sampling):
    """The parts of a run that do not change during it.

    Attributes:
      training: the learner's half.
      replay: which groups are trained on again; None where none is.
      learner_engine: generates with the learner's own numerics, for evaluation.
    """

    training: LearnerSetup
    replay: replay.Way | None
    learner_engine: Engine

    @property
    def schedule(self) -> Schedule:
        return self.training.schedule

    @functools.cached_property
    def fleet(self) -> Any:
        """The engines of rollout.engines. ValueError where one cannot be this run's sampler."""
        try:
            from jaxrl_tis.external.fleet import Fleet
        except ImportError as error:
            raise ValueError(
                f"rollout.driver = 'external' needs an HTTP client: pip install 'jaxrl_tis[engines]' ({error})"
            ) from error
        return Fleet(self)

    def turn_scheduler(self, engine: Engine, params: Any, version: int, **options) -> Any:
        if self.config.rollout.driver == "external" and engine is self.engine:
            return self.fleet.scheduler(params, version)
        return super().turn_scheduler(engine, params, version, **options)

    def evaluating(self, params: Any, version: int, heartbeat: Callable[[], None] = lambda: None) -> Any:
        """Makes the scheduler of an evaluation of these parameters of the policy: with the learner's own
        numerics, or by the engines of rollout.engines. Close it after use."""
        if self.config.rollout.driver == "external":
            served = self.fleet.serving_params(params, version)
            return self.scheduler(self.engine, served, version, heartbeat=heartbeat)
        engine = self.learner_engine
        return self.scheduler(engine, engine.load(params), version, heartbeat=heartbeat)

    @property
    def is_apart(self) -> bool:
        """Whether the samplers have devices of their own."""
        layouts = self.training.layout, self.engine.layout
        learning, serving = (set(x.mesh.devices.flat) for x in layouts)
        return learning.isdisjoint(serving)

    @property
    def sleeps(self) -> bool:
        """Whether the sampler frees its weights and KV cache from the end of a rollout to the next
        weight sync, see `Scheduler.sleep`."""
        is_sync = self.schedule.is_sync and self.replay is None
        return self.config.engine.sleep == "auto" and is_sync and not self.is_apart

    def source(
        self, parts: SourceParts, add_logps: Callable[[list[Trajectory]], None]
    ) -> RolloutSource:
        """Makes the source of rollout.schedule and rollout.driver; `add_logps` is of the learner's
        `WeightSnapshots`."""
        driver = self.config.rollout.driver
        # A sampler's thread gives no sign of life for the learner, and does not end its step.
        waiting = (lambda: None) if driver in ("threads", "external") else parts.heartbeat
        starts = [
            functools.partial(self.scheduler, engine, heartbeat=waiting) for engine in self.engines
        ]
        if self.schedule.is_sync and parts.replay is None:
            return SyncSource(parts, starts[0], self.sleeps)
        if driver == "threads":
            return thread_source(parts, starts, self.engine.slots)
        if driver == "external":
            return thread_source(parts, starts, self.engine.slots * self.fleet.size)
        if driver != "ray":
            return VirtualSource(parts, starts[0], self.engine.slots, add_logps)
        address = ray_cluster.connect(self.config.rollout)
        from jaxrl_tis.rollouts import ray_processes, ray_source  # which need Ray

        arguments = parts, self.engine, self.abstract_served, self.identity, build_sampling, address
        if not processes.is_alone():
            return ray_processes.ProcessesSource(*arguments)
        drafting = None if self.training.drafter is None else self.drafting[self.engine]
        return ray_source.ray_source(*arguments, drafting=drafting)


def build(config: ml_collections.ConfigDict, **sampler) -> Setup:
    """Checks the config, reads the tokenizer and the model's shape, and makes the programs.

    `sampler` are further fields of the EngineConfig of the engine that samples.
    """
    choices, (model, tokenizer) = validate(config), _read(config)
    teacher = _teacher_model(config, model, tokenizer)
    drafter = _drafter_model(config, model, tokenizer)
    setup = assemble(
        config, choices, model, tokenizer, teacher=teacher, drafter=drafter, **sampler
    )
    if config.rollout.driver != "ray":  # whose workers load the teacher
        _check_memory(setup.engine)
    return setup


def build_sampling(config: ml_collections.ConfigDict) -> Sampling:
    """Makes the sampler's half alone, on the devices of this process."""
    choices, (model, tokenizer) = validate(config), _read(config)
    _check_model(config, model)
    layout = sharding.layout(
        config.mesh.serve, sharding.SERVE_RULES, vocab_size=model.vocab_size
    )
    _check_serving(config, choices, model, layout)
    sampling, _ = _engine_configs(config, choices, layout, model.vocab_size, {})
    engine = Engine(model, sampling, layout, _teacher_model(config, model, tokenizer))
    _check_memory(engine)
    drafters = _drafters(_drafter_model(config, model, tokenizer), sampling, [layout])
    return Sampling(config, model, tokenizer, (engine,), drafters=drafters)


def _read(config: ml_collections.ConfigDict) -> tuple[ModelConfig, Any]:
    """Returns the model's shape and the tokenizer, which fit each other."""
    model = models.read_config(config.model.path) if config.model.path else None
    tokenizer = load_tokenizer(
        config.task.tokenizer or config.model.path, config.task.template_kwargs.to_dict(),
        config.task.date, config.task.escape_special_tokens,
    )
    model = model or small_model(config, tokenizer.vocab_size)
    tokenizer = fitted(tokenizer, model.vocab_size)
    if (count := len(tokenizer.eos_ids)) > MAX_STOP_IDS:
        raise ValueError(
            f"the tokenizer and the model's files name {count} end tokens, and the engine supports "
            f"at most {MAX_STOP_IDS}; shorten eos_token_id in generation_config.json or config.json"
        )
    return model, tokenizer


def _texts(tokenizer: Any, size: int) -> list[str]:
    """Returns the texts of about PROBED of the first `size` token ids, by which tokenizers are told apart."""
    return [tokenizer.decode([i]) for i in range(0, size, 1 + size // PROBED)]


def _teacher_model(
    config: ml_collections.ConfigDict, model: ModelConfig, tokenizer: Any
) -> ModelConfig | None:
    """Returns the shape of rollout.teacher, None without one. ValueError for another tokenizer, or fewer
    token ids than the policy has."""
    if not config.rollout.teacher:
        return None
    teacher = _with_tokenizer(config, "rollout.teacher", model, tokenizer)
    _check_window(config, teacher, "rollout.teacher")
    return teacher


def _drafter_model(
    config: ml_collections.ConfigDict, model: ModelConfig, tokenizer: Any
) -> ModelConfig | None:
    """Returns the shape of engine.drafter, None without one. ValueError for another tokenizer or number of
    token ids, or a model that is larger than the policy."""
    if not config.engine.drafter:
        return None
    drafter = _with_tokenizer(config, "engine.drafter", model, tokenizer)
    check_drafter(config, model, drafter)
    return drafter


def check_drafter(config: ml_collections.ConfigDict, model: ModelConfig, drafter: ModelConfig) -> None:
    """Raises ValueError for a drafter with another number of token ids than the policy, or more
    parameters."""
    if drafter.vocab_size != model.vocab_size:
        raise ValueError(
            f"engine.drafter = {config.engine.drafter!r} has {drafter.vocab_size} token ids and the policy "
            f"{model.vocab_size}; name a model with as many"
        )
    count = lambda x: sum(math.prod(a.shape) for a in jax.tree.leaves(transformer.abstract_params(x)))
    theirs, own = count(drafter), count(model)
    if theirs > own:
        raise ValueError(
            f"engine.drafter = {config.engine.drafter!r} has {theirs:,} parameters and the policy {own:,}; "
            "name a smaller model"
        )


def _check_processes(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for drafts that a run of several processes cannot make."""
    engine, count = config.engine, jax.process_count()
    if count > 1 and engine.drafter_every:
        raise ValueError(
            f"engine.drafter_every = {engine.drafter_every} trains the drafter of a run of one process, "
            f"and this one has {count}; set it to 0"
        )
    if count > 1 and engine.max_draft and not engine.free_batch_rows:
        raise ValueError(
            f"engine.free_batch_rows = 0 has each process measure its own times, and the evaluations of this "
            f"run have {count} that must take equal steps; set it to 128"
        )


def _with_tokenizer(
    config: ml_collections.ConfigDict, field: str, model: ModelConfig, tokenizer: Any
) -> ModelConfig:
    """Returns the shape of the model that a field names. ValueError for another tokenizer than the policy's,
    or fewer token ids or positions."""
    path = functools.reduce(getattr, field.split("."), config)
    found, theirs = models.read_config(path), load_tokenizer(path)
    if found.vocab_size < model.vocab_size:
        raise ValueError(
            f"{field} = {path!r} has {found.vocab_size} token ids, unused ones included, and the policy "
            f"{model.vocab_size}; name a model with as many"
        )
    size = len(tokenizer.ids)
    if len(theirs.ids) != size or _texts(theirs, size) != _texts(tokenizer, size):
        raise ValueError(
            f"{field} = {path!r} has another tokenizer than the policy; name a model with the policy's "
            "tokenizer"
        )
    _check_positions(config, found, field)
    return found


def _drafters(
    model: ModelConfig | None, sampling: EngineConfig, layouts: Sequence[sharding.Layout]
) -> tuple[Engine, ...]:
    """Returns the engines of the model that drafts, with pages at the places of those that sample."""
    if model is None:
        return ()
    config = EngineConfig(
        slots=sampling.slots, max_length=sampling.max_length, page_size=sampling.page_size,
        num_pages=sampling.num_pages, dtype=sampling.dtype, cache_dtype=sampling.cache_dtype,
        fp32_head=sampling.fp32_head, steps=sampling.max_draft + 1, prefill_batch=sampling.prefill_batch,
        prefill_chunk=sampling.prefill_chunk, unroll=sampling.unroll, joins_qkv=layouts[0].platform == "tpu",
        penalties=sampling.penalties,
    )
    return tuple(Engine(model, config, layout) for layout in layouts)


def _placed(path: str, engine: Engine, model: ModelConfig | None) -> transformer.Params:
    """Reads the parameters of a second model to where the engine serves it."""
    assert model is not None
    return models.load(path, placement.shardings(engine.layout, model))[1]


def _check_memory(engine: Engine) -> None:
    """Raises ValueError for a teacher that does not fit beside the policy."""
    if not engine.num_teachers:
        return
    needed, room = engine.device_bytes, min(map(_memory, engine.layout.mesh.local_devices), default=math.inf)
    if sum(needed.values()) > room:
        sizes = ", ".join(f"{name} {size / GIB:.3g} GiB" for name, size in needed.items())
        raise ValueError(
            f"rollout.teacher does not fit beside the policy: {sizes} on each device of {room / GIB:.3g} "
            "GiB; quantize it by engine.teacher_quantization, lower engine.slots, or name a smaller one"
        )


def _memory(device: jax.Device) -> float:
    """Returns the bytes of a device; a CPU's are all that the machine has."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


def assemble(
    config: ml_collections.ConfigDict, choices: Choices, model: ModelConfig, tokenizer: Any,
    devices: list | None = None, teacher: ModelConfig | None = None,
    drafter: ModelConfig | None = None, **sampler,
) -> Setup:
    """Makes the programs of a checked config.

    Args:
      choices: of this config, as `validate` returns them.
      devices: where they run, by default those of this machine; they need not exist, see
        jaxrl_tis.aot.
      teacher: shape of rollout.teacher; drafter: of engine.drafter.
      sampler: further fields of the EngineConfig of the engine that samples.
    """
    _check_processes(config)
    _check_model(config, model)
    _check_positions(config, model)
    dtypes = {"model.dtype": config.model.dtype, "engine.dtype": config.engine.dtype}
    if doubt := overflow.doubt(model, dtypes):
        processes.report(f"warning: {doubt}", sys.stderr)
    training = make_learner_setup(
        config, choices.correction, choices.schedule, choices.replay, model, devices, choices.lora,
        drafter if config.engine.drafter_every else None,
    )
    layouts = _serving_layouts(config, training.layout, devices, model.vocab_size)
    first = layouts[0]
    _check_serving(config, choices, model, first)
    sampling, evaluating = _engine_configs(config, choices, first, model.vocab_size, sampler)
    return Setup(
        config, model, tokenizer,
        engines=tuple(Engine(model, sampling, layout, teacher) for layout in layouts),
        training=training, replay=choices.replay, learner_engine=Engine(model, evaluating, first),
        drafters=_drafters(drafter, sampling, layouts),
    )


def on_workers(setup: Setup, devices: list, drafter: ModelConfig | None = None) -> Setup:
    """Returns a Setup whose engine is one of a worker on Ray with these devices, see jaxrl_tis.aot."""
    old, vocab_size = setup.engine, setup.model.vocab_size
    layout = sharding.layout(
        setup.config.mesh.serve, sharding.SERVE_RULES, devices=devices, vocab_size=vocab_size
    )
    engine = Engine(setup.model, old.config, layout, old.teacher)
    drafters = _drafters(drafter, old.config, [layout])
    return dataclasses.replace(setup, engines=(engine,), drafters=drafters)


def _check_serving(
    config: ml_collections.ConfigDict, choices: Choices, model: ModelConfig, layout: sharding.Layout
) -> None:
    """Raises ValueError for a mesh.serve that does not divide the model, or that LoRA does not fit."""
    placement.shardings(layout, model)
    fields = [field for field in ("model", "engine") if config[field].numerics == "invariant"]
    if choices.lora is not None and fields:
        adapter = lora.Adapter.of(choices.lora, model, transformer.abstract_params(model))
        for field in fields:
            check_invariant(f"{field}.numerics", adapter, layout, "mesh.serve")


def _engine_configs(
    config: ml_collections.ConfigDict, choices: Choices, layout: sharding.Layout, vocab_size: int,
    sampler: dict[str, Any],
) -> tuple[EngineConfig, EngineConfig]:
    """Returns what the engines that sample and the one that evaluates are made of.

    Args:
      layout: of the first engine.
      sampler: further fields of the engines that sample.
    """
    e = config.engine
    sizes = functools.partial(
        EngineConfig, slots=e.slots, max_length=max_length(config), page_size=e.page_size,
        num_pages=e.num_pages or None, fp32_head=config.model.fp32_head,
        steps=e.steps_per_call, max_draft=e.max_draft, prefill_batch=e.prefill_batch,
        prefill_chunk=e.prefill_chunk, unroll=e.unroll,
        joins_qkv=layout.platform == "tpu" and choices.lora is None,
    )
    # Of a smaller vocabulary the head is all that a device has of it.
    top_n = min(
        centering.head_size(choices.correction.centering, config.rollout.sampling_mask_size),
        vocab_size // layout.count(layout.axes("vocab")),
    )
    sampling = sizes(
        numerics=sampler_numerics(config), dtype=e.dtype, cache_dtype=e.cache_dtype, quantization=e.quantization,
        unquantized=tuple(e.unquantized),
        records_logits="logits_behav" in choices.correction.needs,
        teacher_quantization=e.teacher_quantization,
        num_kept=config.rollout.sampling_mask_size, injected=choices.injected,
        record_routes=e.record_routes, weighs_pages=e.heavy_pages > 0,
        page_groups=e.heavy_groups,
        **{"top_n": top_n, **sampler},
    )
    evaluating = sizes(
        numerics=config.model.numerics, dtype=config.model.dtype, cache_dtype=config.model.dtype,
        quantization=config.model.quantization, unquantized=tuple(config.model.unquantized),
    )
    return sampling, evaluating


def _serving_layouts(config, training: sharding.Layout, devices: list | None, vocab_size: int):
    """Returns where samplers serve. With the driver "threads" each has devices of its own, after
    those that train; else all work on the first devices, the learner's.

    Raises:
      ValueError: there are too few devices, or several processes share them.
    """
    shape, rules = config.mesh.serve, sharding.SERVE_RULES
    if config.rollout.driver != "threads":
        return [sharding.layout(shape, rules, devices=devices, vocab_size=vocab_size)]
    if (count := jax.process_count()) > 1:
        raise ValueError(
            f"rollout.driver = 'threads' needs a run of one process, and this one has {count}; set "
            "it to 'virtual'"
        )
    devices, workers = devices or jax.devices(), config.rollout.workers
    free, each = devices[training.mesh.size :], math.prod(n for n in shape if n != -1)
    if workers * each > len(free):
        needed, is_cpu = training.mesh.size + workers * each, devices[0].platform == "cpu"
        flag = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={needed}" if is_cpu else ""
        raise ValueError(
            f"rollout.driver = 'threads' trains on {training.mesh.size} devices and serves with "
            f"{workers} samplers on {each} other devices each, {needed} in all, and there are "
            f"{len(devices)}; make mesh.train, mesh.serve or rollout.workers smaller{flag}"
        )
    if -1 in shape:
        each = len(free) // workers
    parts = (free[i * each : (i + 1) * each] for i in range(workers))
    return [sharding.layout(shape, rules, devices=part, vocab_size=vocab_size) for part in parts]


def _check_model(config, model: ModelConfig) -> None:
    """Refuses with ValueError settings that the model's family lacks."""
    _check_window(config, model, "this model")
    if model.zero_centered_norms and config.model.uaq_scale != 1:
        raise ValueError(
            f"model.uaq_scale is {config.model.uaq_scale} and multiplies the norms' parameters, and "
            "those of this model are added to 1; set it to 1"
        )


def _check_window(config, model: ModelConfig, name: str) -> None:
    """Refuses with ValueError settings that a sliding window rules out."""
    if model.sliding is not None:
        what = f"and some layers of {name} have a sliding window"
        for field in ("model", "engine"):
            if config[field].numerics == "invariant":
                raise ValueError(
                    f"{field}.numerics is 'invariant', which needs all keys, {what}; set it to 'fast'"
                )
        if any(config.engine.retention):
            raise ValueError(
                f"engine.retention is {config.engine.retention} and evicts keys of all layers alike, "
                f"{what}; set it to (0, 0)"
            )


def _check_positions(config, model: ModelConfig, name: str = "") -> None:
    """Refuses with ValueError sequences that the model has no positions for, and says where it has
    them by extension alone. `name`: the field of a model that is not the policy."""
    length = max_length(config)
    try:
        doubt = model.check_length(length)
    except ValueError as error:
        field = "" if config.model.path or name else ", or raise model.max_position"
        raise ValueError(
            f"{name and f'{name}: '}{error}: lower task.max_prompt_tokens = {config.task.max_prompt_tokens} or "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}{field}"
        ) from error
    if doubt:
        processes.report(f"warning: {name and f'{name}: '}{doubt}", sys.stderr)


def small_model(config: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
    """Returns the model whose shape the config spells out, for a run without a checkpoint."""
    m, moe = config.model, None
    if m.num_experts:
        moe = MoeConfig(
            m.num_experts, m.experts_per_token, m.expert_dim, m.router,
            shared_dim=m.shared_expert_dim,
        )
    family = "llama" if moe is None else MOE_FAMILIES[m.router]
    return ModelConfig(
        family=family, vocab_size=vocab_size, embed_dim=m.embed_dim,
        num_layers=m.num_layers, num_heads=m.num_heads, num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim, mlp_dim=m.mlp_dim, rope=RopeConfig("default", m.rope_theta),
        max_position=m.max_position, norm_eps=1e-6, qkv_bias=False,
        qk_norm=family == "qwen3_moe", tie_embeddings=m.tie_embeddings, moe=moe,
    )
