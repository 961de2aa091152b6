"""All contradictions of a config at once, before anything is compiled."""

import functools
import math

import ml_collections

from jaxrl_tis import optimizer
from jaxrl_tis.data.rewards import REWARDS
from jaxrl_tis.data.tasks import TASKS
from jaxrl_tis.estimators import advantages, kl, objectives, reduce, weights
from jaxrl_tis.models import quant, transformer

DTYPES = ("float32", "bfloat16")


def validate(config: ml_collections.ConfigDict) -> None:
    """ValueError listing every problem of the config, one a line."""
    problems = [*_names(config), *_counts(config), *_batches(config), *_correction(config)]
    if problems:
        raise ValueError("the config contradicts itself:\n" + "\n".join(f"- {p}" for p in problems))


def _names(config):
    c = config.correction
    choices = {
        "correction.mode": (c.mode, ("decoupled", "bypass")),
        "correction.weight": (c.weight, weights.WEIGHTS),
        "correction.objective": (c.objective, objectives.OBJECTIVES),
        "correction.advantage": (c.advantage, advantages.ADVANTAGES),
        "correction.aggregation": (c.aggregation, reduce.MODES),
        "correction.kl": (c.kl, kl.KL),
        "engine.quantization": (config.engine.quantization, quant.SCHEMES),
        "engine.dtype": (config.engine.dtype, DTYPES),
        "engine.cache_dtype": (config.engine.cache_dtype, DTYPES),
        "model.dtype": (config.model.dtype, DTYPES),
        "model.param_dtype": (config.model.param_dtype, DTYPES),
        "model.remat": (config.model.remat, transformer.REMAT),
        "optimizer.schedule": (config.optimizer.schedule, optimizer.SCHEDULES),
        "critic.schedule": (config.critic.schedule, optimizer.SCHEDULES),
        "task.name": (config.task.name, TASKS),
    }
    for field, (value, allowed) in choices.items():
        if value not in allowed:
            yield f"{field} is {value!r}; choose one of {', '.join(allowed)}"
    if config.reward.name not in REWARDS and ":" not in config.reward.name:
        yield (
            f"reward.name is {config.reward.name!r}; choose one of {', '.join(REWARDS)} or give "
            "'module:function'"
        )
    if not config.model.path and not config.task.tokenizer:
        yield "task.tokenizer is empty and there is no model.path to take it from"


def _counts(config):
    if not 0 <= config.seed < 2**32:
        yield f"seed is {config.seed}; it must be in 0 .. 2^32 - 1"
    positive = [
        "steps", "rollout.prompts", "rollout.group_size", "rollout.max_new_tokens",
        "rollout.max_rounds", "engine.slots", "engine.steps_per_call", "engine.prefill_batch",
        "train.minibatches", "train.epochs", "train.microbatch_rows", "train.logprob_chunk",
        "eval.every", "eval.prompts", "checkpoint.every", "checkpoint.keep", "warmup.rows",
        "task.max_prompt_tokens", "reward.timeout", "rollout.temperature", "optimizer.lr",
        "optimizer.clip_norm", "critic.lr", "critic.clip_norm", "warmup.lr",
    ]
    for field in positive:
        if _read(config, field) <= 0:
            yield f"{field} is {_read(config, field)}; it must be above 0"
    not_negative = [
        "warmup.steps", "rollout.top_k", "rollout.overlong_buffer", "correction.kl_coeff",
        "correction.clip_high", "correction.scale", "optimizer.warmup", "optimizer.weight_decay",
        "critic.warmup", "critic.weight_decay",
    ]
    for field in not_negative:
        if _read(config, field) < 0:
            yield f"{field} is {_read(config, field)}; it must not be below 0"


def _read(config, field: str):
    return functools.reduce(lambda node, name: node[name], field.split("."), config)


def _batches(config):
    train, rollout = config.train, config.rollout
    for field in ("mesh.train", "mesh.serve"):
        if len(_read(config, field)) != 3:
            yield f"{field} is {_read(config, field)}; it needs three entries, (data, fsdp, tensor)"
    rows = rollout.prompts * rollout.group_size
    if min(rows, train.minibatches, train.microbatch_rows) < 1:
        return  # reported by _counts
    if rows % (train.minibatches * train.microbatch_rows):
        yield (
            f"rollout.prompts * rollout.group_size = {rows} rows cannot be cut into "
            f"train.minibatches = {train.minibatches} of whole micro-batches of "
            f"train.microbatch_rows = {train.microbatch_rows}"
        )
    shards = math.prod(config.mesh.train[:2])
    if shards > 0 and train.microbatch_rows % shards:
        yield (
            f"train.microbatch_rows = {train.microbatch_rows} is not divisible by the {shards} "
            "data shards of mesh.train"
        )
    if not config.model.path and config.model.num_heads % config.model.num_kv_heads:
        yield (
            f"model.num_heads = {config.model.num_heads} is not a multiple of model.num_kv_heads = "
            f"{config.model.num_kv_heads}"
        )
    if rollout.overlong_buffer > rollout.max_new_tokens:
        yield (
            f"rollout.overlong_buffer = {rollout.overlong_buffer} exceeds rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}"
        )


def _correction(config):
    c, rollout = config.correction, config.rollout
    if rollout.group_size == 1 and c.advantage != "gae":
        yield (
            f"rollout.group_size is 1, but advantage {c.advantage!r} compares the samples of a "
            "group; use at least 2"
        )
    if c.mode == "bypass" and c.weight != "none":
        yield (
            f"bypass mode puts the whole drift into the ratio of {c.objective!r}; the weight "
            f"{c.weight!r} would count the engine's part twice: set correction.weight to 'none'"
        )
    if c.weight.endswith("_tis") and c.cap < 1:
        yield f"correction.cap is {c.cap}; a cap below 1 truncates even where the policies agree"
    if not 0 <= c.clip_low <= 1:
        yield f"correction.clip_low is {c.clip_low}; the ratio's lower bound 1 - clip_low is in 0 .. 1"
    if not 0 < c.lower <= 1 <= c.upper:
        yield f"the band [{c.lower}, {c.upper}] of correction.lower and upper must hold the ratio 1"
    if c.objective == "dual_clip" and c.dual_clip <= 1:
        yield f"correction.dual_clip is {c.dual_clip}; it must be above 1"
    if not 0 < rollout.top_p <= 1 or not 0 <= rollout.min_p < 1:
        yield (
            f"rollout.top_p = {rollout.top_p} and rollout.min_p = {rollout.min_p} must be in (0, 1] "
            "and [0, 1)"
        )
    is_filtered = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    if is_filtered and not rollout.allow_filter_bias:
        yield (
            "top_k, top_p and min_p change the distribution that is sampled, and the learner "
            "scores the unfiltered one: every ratio is off by the kept mass; set "
            "rollout.allow_filter_bias=True to accept that"
        )
