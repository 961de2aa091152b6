"""A config, checked and parsed: all its contradictions at once, before anything is compiled."""

import dataclasses
import datetime
import functools
import json
import math
from typing import Any

import jax
import ml_collections

from jaxrl_tis.data import child, tasks
from jaxrl_tis.data.graders import REWARDS, names
from jaxrl_tis.data.rewards import DROP
from jaxrl_tis.data.signatures import LARGEST, SIGNATURES
from jaxrl_tis.engine import injection
from jaxrl_tis.engine.check import EIGHT_BIT, engine_problems, sampler_numerics
from jaxrl_tis.engine.injection import Injection
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.estimators import loss, presets, reduce, turn_credit
from jaxrl_tis.learner import correction, factors, snapshots
from jaxrl_tis.learner.check import (
    adapter_problems, method_problems, staleness_problems, start_problems, trace_problems,
)
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.optimizer import SCHEDULES
from jaxrl_tis.learner.setup import max_length, uncut_rows
from jaxrl_tis.models import lora, quant, transformer
from jaxrl_tis.models.config import MOST_EXPERTS, SCORES
from jaxrl_tis.record.sinks import SINKS
from jaxrl_tis.rollouts import replay, schedules
from jaxrl_tis.rollouts.check import rollout_problems
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.rollouts.sessions import ON_FORK

DTYPES = ("float32", "bfloat16")  # of what is kept
COMPUTE_DTYPES = (*DTYPES, "float16")
REWARD = "exact"  # the default of reward.name
RATIOED_KL = ("is_k3", "clipped_is_k2", "clipped_is_k3", "exact_reverse", "exact_forward")  # off-policy as well
# Fields with a fixed set of values.
ALLOWED = {
    "correction.preset": presets.PRESETS,
    "correction.centre": (None, *loss.CENTRES),
    "correction.aggregation": reduce.MODES,
    "correction.kl_placement": ("loss", "reward"),
    "correction.turn_credit": turn_credit.CREDITS,
    "correction.routing": (None, *correction.ROUTINGS),
    "correction.routing_missing": correction.ROUTING_MISSING,
    "engine.quantization": quant.SCHEMES,
    "model.quantization": quant.SCHEMES,
    "engine.dtype": COMPUTE_DTYPES,
    "engine.cache_dtype": (*COMPUTE_DTYPES, *EIGHT_BIT),
    "engine.numerics": ("", *transformer.NUMERICS),
    "engine.policy": tuple(POLICIES),
    "engine.sleep": ("auto", "never"),
    "engine.drafter_weighting": ("none", "reward"),
    "model.dtype": COMPUTE_DTYPES,
    "model.numerics": transformer.NUMERICS,
    "model.param_dtype": DTYPES,
    "model.remat": transformer.REMAT,
    "model.router": SCORES,
    "optimizer.schedule": SCHEDULES,
    "critic.schedule": SCHEDULES,
    "metrics.record": ("full", "compact"),
    "rollout.canary": ("lora", "always", "never"),
    "rollout.old_logp_source": snapshots.WAYS,
    "rollout.on_fork": ON_FORK,
    "task.name": tasks.TASKS,
    "task.on_bad_example": ("error", "skip"),
    "train.fuse_old_logp": ("auto", "never"),
    "train.grad_reduce_dtype": DTYPES,
    "reward.signature": SIGNATURES,
}
POSITIVE = (
    "steps", "rollout.prompts", "rollout.group_size", "rollout.max_new_tokens",
    "rollout.max_rounds", "rollout.extend_equal", "engine.slots", "engine.steps_per_call",
    "engine.prefill_batch", "engine.page_size", "engine.prefill_chunk",
    "train.minibatches", "train.epochs", "train.microbatch_rows", "train.logprob_chunk",
    "eval.every", "eval.prompts", "checkpoint.every", "checkpoint.keep", "warmup.rows",
    "metrics.diagnostics_every", "model.uaq_scale", "engine.noise_end", "engine.noise_stages",
    "task.max_prompt_tokens", "task.environment_workers", "task.max_turns", "task.turn_timeout",
    "reward.timeout", "reward.workers", "rollout.temperature",
    "rollout.snapshot_gib", "rollout.harness_timeout", "optimizer.clip_norm", "critic.clip_norm", "warmup.lr",
    "model.experts_per_token", "model.expert_dim", "optimizer.router_bias_rate",
    "model.num_layers", "model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.head_dim",
    "optimizer.eps", "critic.eps", "processes.consistency_every", "engine.heavy_groups",
)
NOT_NEGATIVE = (
    "engine.num_pages", "engine.max_wait_admissions", "engine.preempt_after", "engine.max_draft",
    "engine.drafter_every", "engine.drafter_lr", "engine.free_batch_rows", "engine.noise_start",
    "engine.heavy_pages", "warmup.steps", "task.max_context_tokens", "train.pack_length",
    "rollout.top_k",
    "rollout.sampling_mask_size", "rollout.fork_rows", "rollout.overlong_buffer", "rollout.snapshots",
    "correction.kl_coeff", "correction.sampler_kl_coeff", "correction.dense_kl_coeff",
    "correction.environment_ce_coeff", "correction.scale", "optimizer.lr", "critic.lr",
    "optimizer.warmup", "optimizer.weight_decay", "critic.warmup", "critic.weight_decay",
    "gate.max_d_mean", "gate.max_d_p99", "gate.max_d_max", "gate.max_dp_max", "gate.max_k3",
    "model.num_experts", "model.shared_expert_dim", "correction.load_balance_coeff",
    "correction.router_z_coeff", "watchdog.timeout", "checkpoint.grace", "metrics.samples",
    "metrics.samples_every", "critic.value_clip",
)
# Fields that may be None: the preset gives them.
OPTIONAL = tuple(f"correction.{x}" for x in presets.FIELDS)
DECAYS = ("optimizer.b1", "optimizer.b2", "critic.b1", "critic.b2")


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices that a config spells as text, parsed.

    Attributes:
      correction: the methods of config.correction.
      schedule: rollout.schedule.
      replay: rollout.replay; None where groups are trained on once.
      injected: engine.injected.
      lora: model.lora; None where all weights are trained.
    """

    correction: Correction
    schedule: Schedule
    replay: replay.Way | None
    injected: Injection
    lora: lora.Recipe | None


def validate(config: ml_collections.ConfigDict) -> Choices:
    """Returns the parsed choices of a config; ValueError lists every problem of the config, one a
    line."""
    parsed, problems = {}, list(_missing(config)) or list(_tuples(config))
    if not problems:
        parsed, refused = _parsed(config)
        checks = (_finite, _names, _counts, _batches, _task, _environment, _harness)
        problems = [problem for check in checks for problem in check(config)]
        problems += [*refused, *_of_rooms(config, parsed)]
    problems = problems or list(trace_problems(parsed["correction"]))
    if problems:
        raise ValueError("the config contradicts itself:\n" + "\n".join(f"- {p}" for p in problems))
    return Choices(**parsed)


def _parsed(config) -> tuple[dict[str, Any], list[str]]:
    """Returns (the fields of Choices that can be parsed, why the others cannot). `_names` reports
    an unknown preset or centre of the correction."""
    c, rollout = config.correction, config.rollout
    parsed, refused = {}, []

    def parse(name, parser, text, prefix):
        try:
            parsed[name] = parser(text)
        except ValueError as error:
            refused.append(f"{prefix}{error}")

    if c.preset in presets.PRESETS and c.centre in (None, *loss.CENTRES):
        optimizer = config.optimizer
        rate = 0.0 if optimizer.freeze_router_bias else optimizer.router_bias_rate
        parse("correction", lambda c: correction.parse(c, rate, config.train.minibatches), c,
              "correction: ")
    parse("schedule", schedules.parse, rollout.schedule, "rollout.")
    parse("replay", replay.parse, rollout.replay, "rollout.")
    parse("lora", lora.parse, config.model.lora, "model.")
    parse("injected", injection.parse, config.engine.injected, "engine.injected: ")
    return parsed, refused


def _of_rooms(config, parsed: dict[str, Any]):
    """Finds the problems of learner, engine and rollouts, as far as the choices are parsed."""
    is_parsed = {"schedule", "replay"} <= parsed.keys()
    scheduling = (parsed["schedule"], parsed["replay"]) if is_parsed else ()
    if "correction" in parsed:
        yield from method_problems(config, parsed["correction"])
        if is_parsed:
            yield from staleness_problems(config, parsed["correction"], *scheduling)
        if parsed.get("lora") is not None:
            yield from adapter_problems(config, parsed["correction"])
    yield from start_problems(config)
    yield from engine_problems(config)
    if is_parsed:
        yield from rollout_problems(config, *scheduling)


def doubts(
    config: ml_collections.ConfigDict, c: Correction, schedule: Schedule, way: replay.Way | None
) -> list[str]:
    """Returns a line for each setting of a valid config, with its parsed `Choices`, that is likely not
    what its user means."""
    sentences = []
    if not config.reward.network and not child.namespaces():
        sentences.append(
            "this system lets no process have a namespace of its own: Python's sockets are closed to "
            "rewards without reward.network, those of programs that they start are not"
        )
    train = config.train
    is_stale = replay.max_age(schedule, way, config.rollout.max_age) > 0
    numerics = {config.model.numerics, sampler_numerics(config)}
    is_same = numerics == {"invariant"} and config.engine.quantization == "none"
    has_gap = not is_same or bool(config.engine.injected)
    num_updates = train.minibatches * train.epochs
    sentences += factors.doubts(c, is_stale, has_gap, num_updates)
    if c.kl is None:
        return sentences
    if config.model.adapter:
        sentences.append(
            f"correction.kl compares with the base alone, and the run starts from model.adapter = "
            f"{config.model.adapter!r}: the KL is above 0 at the start"
        )
    if c.kl_placement == "reward" and c.kl[0] != "k1":
        sentences.append(
            f"correction.kl is {c.kl[0]!r} in the reward, where only k1 has the gradient of the KL: "
            "set correction.kl to k1"
        )
    is_off_policy = num_updates > 1 or is_stale
    if c.kl_placement == "loss" and is_off_policy and c.kl[0] not in (*RATIOED_KL, "k2"):
        what = f"{num_updates} updates of a batch" if num_updates > 1 else "tokens of older weights"
        sentences.append(
            f"correction.kl is {c.kl[0]!r} in the loss of {what}: these samples are another policy's, "
            "for which there are clipped_is_k2 and is_k3, or k2"
        )
    return sentences


def _finite(config):
    for path, value in jax.tree_util.tree_leaves_with_path(config.to_dict()):
        field = jax.tree_util.keystr(path, simple=True, separator=".")
        is_bound = field.startswith("gate.max_")
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite and not (is_bound and value == math.inf):
            yield f"{field} is {value}; it must be a finite number{' or inf' if is_bound else ''}"


def _missing(config):
    """Finds fields without a value. Arguments of a user's own code may have none."""
    for section, value in config.items():
        fields = value.items() if isinstance(value, ml_collections.ConfigDict) else [("", value)]
        for name, value in fields:
            field = f"{section}.{name}".rstrip(".")
            if value is None and field not in OPTIONAL:
                yield f"{field} is None; give a value, or {field}='' for an empty text"


def _tuples(config):
    """Checks what the command line can put into a tuple."""
    kinds = {
        "mesh.train": int, "mesh.serve": int, "engine.retention": int,
        "engine.unquantized": str, "model.unquantized": str, "metrics.sinks": str,
    }
    for field, kind in kinds.items():
        value = _read(config, field)
        if not all(isinstance(entry, kind) for entry in value):
            yield f"{field} is {value}; its entries must be of type {kind.__name__}"
    if len(config.engine.retention) != 2:
        yield f"engine.retention is {config.engine.retention}; it needs (first pages, last pages)"


def _task(config):
    """Checks that each split has the parameters of its task."""
    if config.task.name not in tasks.TASKS:
        return  # reported by _names
    splits = {"task": {}, "eval": config.eval.params}
    if config.warmup.steps > 0:
        splits["warmup"] = config.warmup.params
    problems = {}
    for section, params in splits.items():
        try:
            tasks.check(config.task.name, {**config.task.params, **params})
        except ValueError as error:
            problems.setdefault(str(error), f"{section}.params: {error}")
    yield from problems.values()
    if not config.eval.params:
        yield (
            "eval.params is empty, and the held-out examples would be the training examples; name "
            "others, as in --config.eval.params.path=heldout.jsonl"
        )
    for field in ("template", "system"):
        value = config.task[field]
        if value.encode(errors="replace").decode() != value:
            yield f"task.{field} is {value!r}, which holds a lone surrogate; remove that character"
    try:
        has_prompt = "\0" in config.task.template.format(prompt="\0")
    except (KeyError, IndexError, ValueError):
        has_prompt = False
    if not has_prompt:
        yield (
            f"task.template is {config.task.template!r}; it must contain {{prompt}}, and other "
            "braces must be doubled"
        )
    if wrong := {"messages", "add_generation_prompt"} & set(config.task.template_kwargs):
        yield (
            f"task.template_kwargs sets {' and '.join(wrong)}, which every prompt sets itself; "
            "leave it out"
        )
    try:
        json.dumps(config.task.template_kwargs.to_dict())
    except TypeError as error:
        yield f"task.template_kwargs must hold JSON values only: {error}"
    try:
        datetime.datetime.fromisoformat(config.task.date or "2026-01-31")
    except ValueError:
        yield f"task.date is {config.task.date!r}; it must be a date such as 2026-01-31, or empty"


def _environment(config):
    """Checks episodes with an environment."""
    task, rollout = config.task, config.rollout
    if not task.environment:
        if task.max_context_tokens and not rollout.harness:
            yield (
                f"task.max_context_tokens = {task.max_context_tokens} bounds episodes, and "
                "task.environment is empty; name an environment, or set it to 0"
            )
        return
    if not all(task.environment.partition(":")):
        yield f"task.environment is {task.environment!r}; give 'module:Class'"
    yield from _turns(config, "task.environment")
    if 0 < config.watchdog.timeout <= task.turn_timeout:
        yield (
            f"task.turn_timeout is {task.turn_timeout} and watchdog.timeout is "
            f"{config.watchdog.timeout}, and an environment that hangs would end the run; set "
            "task.turn_timeout below watchdog.timeout"
        )
    if jax.process_count() > 1 and rollout.driver != "ray":
        yield (
            f"task.environment = {task.environment!r} needs a run of one process, or "
            "rollout.driver = 'ray'"
        )
    try:
        json.dumps(task.environment_params.to_dict())
    except TypeError as error:
        yield f"task.environment_params must hold JSON values only: {error}"


def _turns(config, field: str):
    """Checks sequences of several turns, which the setting `field` makes and rewards."""
    task, setting = config.task, f"{field} = {_read(config, field)!r}"
    if 0 < task.max_context_tokens <= task.max_prompt_tokens:
        yield (
            f"task.max_context_tokens = {task.max_context_tokens} leaves no room after a prompt of "
            f"task.max_prompt_tokens = {task.max_prompt_tokens}; raise it"
        )
    if any(config.engine.retention):
        yield (
            f"{setting} continues sequences, and sequences with evicted keys cannot continue; set "
            "engine.retention to (0, 0)"
        )
    if config.reward.name != REWARD:
        yield (
            f"reward.name = {config.reward.name!r} is not read with {setting}, which gives the "
            f"rewards; set it to {REWARD!r}"
        )
    if config.rollout.overlong_buffer:
        yield (
            f"rollout.overlong_buffer = {config.rollout.overlong_buffer} is a penalty on one response, "
            f"and {setting} rewards all turns together; set it to 0"
        )


def _harness(config):
    """Checks sessions with a harness."""
    rollout = config.rollout
    if not rollout.harness:
        return
    setting = f"rollout.harness = {rollout.harness!r}"
    if not all(rollout.harness.partition(":")):
        yield f"rollout.harness is {rollout.harness!r}; give 'module:function' or 'verifiers:TASKSET'"
    if config.task.environment:
        yield (
            f"{setting} and task.environment = {config.task.environment!r} both make the turns; set "
            "one of them to ''"
        )
    yield from _turns(config, "rollout.harness")
    if rollout.driver == "ray":
        yield f"{setting} needs samplers in the run's process; set rollout.driver to threads or virtual"
    if rollout.old_logp_source == "replica":
        yield (
            f"{setting} interrupts sessions without a report of their tokens, and "
            "rollout.old_logp_source = 'replica' scores these; set it to ring"
        )
    if 0 < config.watchdog.timeout <= rollout.harness_timeout:
        yield (
            f"rollout.harness_timeout is {rollout.harness_timeout} and watchdog.timeout is "
            f"{config.watchdog.timeout}, and a harness that hangs would end the run; set "
            "rollout.harness_timeout below watchdog.timeout"
        )
    if jax.process_count() > 1:
        yield f"{setting} needs a run of one process"


def _names(config):
    for field, allowed in ALLOWED.items():
        value = _read(config, field)
        if value not in allowed:
            choices = ", ".join(name for name in allowed if name is not None)
            yield f"{field} is {value!r}; choose one of {choices}"
    for field in ("engine.unquantized", "model.unquantized"):
        for name in _read(config, field):
            if name not in quant.QUANTIZED:
                yield f"{field} names {name!r}; choose among {', '.join(quant.QUANTIZED)}"
    for name in _read(config, "metrics.sinks"):
        if name not in SINKS:
            yield f"metrics.sinks names {name!r}; choose among {', '.join(SINKS)}"
    yield from _reward(config.reward)
    if not config.model.path and not config.task.tokenizer:
        yield (
            "task.tokenizer and model.path are empty, and one of them must name the tokenizer; "
            "set task.tokenizer, to 'char' for one without files"
        )


def _reward(reward):
    for name in names(reward.name):
        if name not in REWARDS and ":" not in name:
            yield (
                f"reward.name is {reward.name!r}; choose one of {', '.join(REWARDS)} or give "
                "'module:function'"
            )
    if ("judge" in names(reward.name)) != bool(reward.judge):
        yield (
            f"reward.name is {reward.name!r} and reward.judge {reward.judge!r}; the reward 'judge' needs the "
            "address of its server, and no other reads it"
        )
    if reward.judge and not reward.network:
        yield "the reward 'judge' asks a server, and reward.network is False; set it to True"
    if reward.on_error != DROP and not _is_number(reward.on_error):
        yield f"reward.on_error is {reward.on_error!r}; it must be {DROP!r} or a number of float32"
    for name, weight in reward.weights.items():
        if type(weight) not in (int, float):
            yield f"reward.weights.{name} is {weight!r}; it must be a number"


def _is_number(text):
    try:
        return abs(float(text)) <= LARGEST
    except ValueError:
        return False


def _counts(config):
    if not 0 <= config.seed < 2**32:
        yield f"seed is {config.seed}; it must be in 0 .. 2^32 - 1"
    for field in POSITIVE:
        if _read(config, field) <= 0:
            yield f"{field} is {_read(config, field)}; it must be above 0"
    model = config.model
    if 0 < model.num_experts < model.experts_per_token:
        yield (
            f"model.experts_per_token is {model.experts_per_token} and model.num_experts is "
            f"{model.num_experts}; a token cannot have more experts than there are"
        )
    if model.num_experts and model.shared_expert_dim > 0 and model.router != "sigmoid":
        yield (
            f"model.shared_expert_dim is {model.shared_expert_dim} and model.router is "
            f"{model.router!r}; only models with router 'sigmoid' have shared experts; set it to 0"
        )
    if model.num_experts and model.expert_dim > 0 and max(model.shared_expert_dim, 0) % model.expert_dim:
        yield (
            f"model.shared_expert_dim is {model.shared_expert_dim} and model.expert_dim is "
            f"{model.expert_dim}; it must be a multiple of the width of an expert"
        )
    if model.num_experts > MOST_EXPERTS:
        yield f"model.num_experts is {model.num_experts}; it must be at most {MOST_EXPERTS}"
    if 0 < config.watchdog.timeout <= config.reward.timeout:
        yield (
            f"reward.timeout is {config.reward.timeout} and watchdog.timeout is "
            f"{config.watchdog.timeout}, and a reward that hangs would end the run; set "
            "reward.timeout below watchdog.timeout"
        )
    for field in NOT_NEGATIVE:
        if _read(config, field) < 0:
            yield f"{field} is {_read(config, field)}; it must not be below 0"
    for field in DECAYS:
        if not 0 <= _read(config, field) < 1:
            yield f"{field} is {_read(config, field)}; it must be at least 0 and below 1"


def _read(config, field: str):
    return functools.reduce(lambda node, name: node[name], field.split("."), config)


def _batches(config):
    train, rollout = config.train, config.rollout
    for field in ("mesh.train", "mesh.serve"):
        if len(_read(config, field)) not in (3, 4, 5):
            yield (
                f"{field} is {_read(config, field)}; it needs the entries (data, fsdp, tensor), and "
                "may have (..., context) and (..., context, expert)"
            )
        if 0 in _read(config, field):
            yield f"{field} is {_read(config, field)}; an axis without a cut is 1"
    if 0 in config.mesh.train or config.model.num_kv_heads < 1:
        return
    rows = rollout.prompts * rollout.group_size
    if min(rows, train.minibatches, train.microbatch_rows) < 1:
        return  # reported by _counts
    length = max_length(config)
    if train.pack_length:
        if train.pack_length < length:
            yield (
                f"train.pack_length = {train.pack_length} is shorter than a sequence, "
                f"task.max_prompt_tokens + rollout.max_new_tokens = {length}; set it to at least "
                f"{length}, or to 0 for no packing"
            )
        if rows % train.minibatches:
            yield (
                f"rollout.prompts * rollout.group_size = {rows} sequences cannot be divided into "
                f"train.minibatches = {train.minibatches}; choose a divisor of {rows}"
            )
    elif rows % (train.minibatches * train.microbatch_rows):
        yield (
            f"rollout.prompts * rollout.group_size = {rows} rows cannot be divided into "
            f"train.minibatches = {train.minibatches} of whole micro-batches of "
            f"train.microbatch_rows = {train.microbatch_rows}; make {rows} a multiple of their "
            "product"
        )
    # An axis of -1 is known with the devices, where the learner's setup looks again.
    context = math.prod(config.mesh.train[3:4])
    shards = math.prod((*config.mesh.train[:2], *config.mesh.train[4:]))
    yield from uncut_rows(config, max(shards, 1), max(context, 1))
    if not config.model.path and config.model.num_heads % config.model.num_kv_heads:
        yield (
            f"model.num_heads = {config.model.num_heads} is not a multiple of model.num_kv_heads = "
            f"{config.model.num_kv_heads}; change one of them"
        )
    if rollout.overlong_buffer > rollout.max_new_tokens:
        yield (
            f"rollout.overlong_buffer = {rollout.overlong_buffer} exceeds rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}; lower it"
        )
