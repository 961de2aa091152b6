"""All contradictions of a config at once, before anything is compiled."""

import datetime
import functools
import json
import math

import jax
import ml_collections

from jaxrl_tis.data import confined, tasks
from jaxrl_tis.data.graders import REWARDS, names
from jaxrl_tis.data.rewards import DROP
from jaxrl_tis.data.signatures import SIGNATURES
from jaxrl_tis.engine import injection
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.estimators import centering, loss, methods, presets, reduce
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.kernels import tiles
from jaxrl_tis.learner import control, correction, snapshots
from jaxrl_tis.learner.batch_layout import MAX_SEGMENTS
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.optimizer import SCHEDULES
from jaxrl_tis.models import quant, transformer
from jaxrl_tis.record.sinks import SINKS
from jaxrl_tis.rollouts import check, modes, replay

DTYPES = ("float32", "bfloat16")  # of what is kept
COMPUTE_DTYPES = (*DTYPES, "float16")
EIGHT_BIT = tuple(dtype.name for dtype in quant.BOUND)  # with scales
# Advantages that need one sample of a prompt
UNGROUPED = ("gae", "remax", "reinforce_plus_plus", "batch_mean")
COMPONENTS_ONLY = ("gdpo",)  # advantages that do not look at the reward as a whole
WHOLE_GROUPS = ("quatro",)  # objectives that compute something per prompt
UNRATIOED = ("gpg", "reinforce")  # objectives without a ratio of their own
UNWEIGHTED = ("topr",)  # objectives that weigh some advantages and leave the others alone
EXPERTS = "is for mixtures of experts, which no model here is"
PRESETS_REFUSED = {"async_moe": EXPERTS, "moe": EXPERTS}
WITHOUT_OLD = (*UNRATIOED, "a3po", "decoupled")  # objectives that do not look at logp_old
# Where all tokens are of the version that is updated, the proximal policy is the one that sampled:
# what tells versions apart would do something else than its name says.
OF_VERSIONS = ("a3po", "decoupled", "staleness")  # objectives and masks
RATIOED_KL = ("is_k3", "clipped_is_k2", "exact_reverse", "exact_forward")  # off-policy as well


def validate(config: ml_collections.ConfigDict) -> Correction:
    """Returns the methods that the config names; ValueError lists every problem of the config, one
    a line."""
    chosen, problems = None, list(_tuples(config))
    if not problems:
        chosen, refusal = _parsed(config.correction)
        checks = (_finite, _names, _counts, _batches, _task)
        problems = [problem for check in checks for problem in check(config)]
        problems += refusal
        if chosen is not None:
            problems += [*_methods(chosen, config), *_staleness(chosen, config)]
        problems += [*_sampling(config), *_numerics(config), *check.problems(config)]
    problems = problems or list(_traced(chosen))
    if problems:
        raise ValueError("the config contradicts itself:\n" + "\n".join(f"- {p}" for p in problems))
    return chosen


def _parsed(fields) -> tuple[Correction | None, list[str]]:
    """Returns (methods, why there are none); what `_names` reports is not said again."""
    if fields.preset not in presets.PRESETS or fields.mode not in (None, *loss.MODES):
        return None, []
    try:
        return correction.parse(fields), []
    except ValueError as error:
        return None, [f"correction: {error}"]


def doubts(config: ml_collections.ConfigDict, c: Correction) -> list[str]:
    """Returns a line for each setting of a valid config, with its methods, that is likely not what
    its user means."""
    found = []
    if not config.reward.network and not confined.namespaces():
        found.append(
            "this system lets no process have a namespace of its own: Python's sockets are closed to "
            "rewards without reward.network, those of programs that they start are not"
        )
    if c.kl is None:
        return found
    if c.kl_placement == "reward" and c.kl[0] != "k1":
        found.append(
            f"correction.kl is {c.kl[0]!r} in the reward, where only k1 has the gradient of the KL: "
            "set correction.kl to k1"
        )
    if c.kl_placement == "loss" and config.train.epochs > 1 and c.kl[0] not in RATIOED_KL:
        found.append(
            f"correction.kl is {c.kl[0]!r} in the loss of {config.train.epochs} epochs: after the "
            "first the samples are another policy's, which clipped_is_k2 and is_k3 account for"
        )
    return found


def _traced(chosen):
    for check in (correction.check, control.check):
        try:
            check(chosen)
        except ValueError as error:
            yield f"correction: {error}"


def _finite(config):
    for path, value in jax.tree_util.tree_leaves_with_path(config.to_dict()):
        field = jax.tree_util.keystr(path, simple=True, separator=".")
        is_bound = field.startswith("gate.max_")
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite and not (is_bound and value == math.inf):
            yield f"{field} is {value}; it must be a finite number{' or inf' if is_bound else ''}"


def _tuples(config):
    """Checks what the command line can put into a tuple."""
    kinds = {
        "mesh.train": int, "mesh.serve": int, "engine.retention": int,
        "engine.unquantized": str, "model.unquantized": str, "metrics.sinks": str,
    }
    for field, kind in kinds.items():
        value = _read(config, field)
        if not all(isinstance(entry, kind) for entry in value):
            yield f"{field} is {value}; its entries must be {kind.__name__}"
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
            "eval.params is empty, so that held-out examples would be those of the training: name "
            "others, as in --config.eval.params.path=heldout.jsonl"
        )
    for field in ("template", "system"):
        value = config.task[field]
        if value.encode(errors="replace").decode() != value:
            yield f"task.{field} is {value!r}, which is no text: it holds a lone surrogate"
    try:
        has_prompt = "\0" in config.task.template.format(prompt="\0")
    except (KeyError, IndexError, ValueError):
        has_prompt = False
    if not has_prompt:
        yield (
            f"task.template is {config.task.template!r}; it must hold {{prompt}}, and other braces "
            "doubled"
        )
    if wrong := {"messages", "add_generation_prompt"} & set(config.task.template_kwargs):
        yield f"task.template_kwargs names {' and '.join(wrong)}, which each prompt has of its own"
    try:
        json.dumps(config.task.template_kwargs.to_dict())
    except TypeError as error:
        yield f"task.template_kwargs must hold what JSON can hold: {error}"
    try:
        datetime.datetime.fromisoformat(config.task.date or "2026-01-31")
    except ValueError:
        yield f"task.date is {config.task.date!r}; it must be a date such as 2026-01-31, or empty"


def _names(config):
    c = config.correction
    allowed_values = {
        "correction.preset": (c.preset, presets.PRESETS),
        "correction.mode": (c.mode, (None, *loss.MODES)),
        "correction.aggregation": (c.aggregation, reduce.MODES),
        "correction.kl_placement": (c.kl_placement, ("loss", "reward")),
        "engine.quantization": (config.engine.quantization, quant.SCHEMES),
        "model.quantization": (config.model.quantization, quant.SCHEMES),
        "engine.dtype": (config.engine.dtype, COMPUTE_DTYPES),
        "engine.cache_dtype": (config.engine.cache_dtype, (*COMPUTE_DTYPES, *EIGHT_BIT)),
        "engine.policy": (config.engine.policy, tuple(POLICIES)),
        "model.dtype": (config.model.dtype, COMPUTE_DTYPES),
        "model.numerics": (config.model.numerics, transformer.NUMERICS),
        "model.param_dtype": (config.model.param_dtype, DTYPES),
        "model.remat": (config.model.remat, transformer.REMAT),
        "optimizer.schedule": (config.optimizer.schedule, SCHEDULES),
        "critic.schedule": (config.critic.schedule, SCHEDULES),
        "metrics.record": (config.metrics.record, ("full", "compact")),
        "rollout.old_logp": (config.rollout.old_logp, snapshots.WAYS),
        "task.name": (config.task.name, tasks.TASKS),
        "task.on_bad_record": (config.task.on_bad_record, ("error", "skip")),
        "train.fuse_score": (config.train.fuse_score, ("auto", "never")),
        "train.sum_dtype": (config.train.sum_dtype, DTYPES),
        "reward.signature": (config.reward.signature, SIGNATURES),
    }
    for field, (value, allowed) in allowed_values.items():
        if value not in allowed:
            choices = ", ".join(name for name in allowed if name is not None)
            yield f"{field} is {value!r}; choose one of {choices}"
    for field in ("engine.unquantized", "model.unquantized"):
        for name in _read(config, field):
            if name not in quant.QUANTIZED:
                yield f"{field} names {name!r}; choose of {', '.join(quant.QUANTIZED)}"
    for name in _read(config, "metrics.sinks"):
        if name not in SINKS:
            yield f"metrics.sinks names {name!r}; choose of {', '.join(SINKS)}"
    yield from _reward(config.reward)
    if not config.model.path and not config.task.tokenizer:
        yield "task.tokenizer is empty and there is no model.path to take it from"


def _reward(reward):
    for name in names(reward.name):
        if name not in REWARDS and ":" not in name:
            yield (
                f"reward.name is {reward.name!r}; choose one of {', '.join(REWARDS)} or give "
                "'module:function'"
            )
    if reward.on_error != DROP and not _is_number(reward.on_error):
        yield f"reward.on_error is {reward.on_error!r}; it must be {DROP!r} or a number"
    for name, weight in reward.weights.items():
        if type(weight) not in (int, float):
            yield f"reward.weights.{name} is {weight!r}; it must be a number"


def _is_number(text):
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _counts(config):
    if not 0 <= config.seed < 2**32:
        yield f"seed is {config.seed}; it must be in 0 .. 2^32 - 1"
    positive = [
        "steps", "rollout.prompts", "rollout.group_size", "rollout.max_new_tokens",
        "rollout.max_rounds", "engine.slots", "engine.steps_per_call", "engine.prefill_batch",
        "engine.page_size", "engine.prefill_chunk", "engine.prefill_calls", "engine.free_rows",
        "train.minibatches", "train.epochs", "train.microbatch_rows", "train.logprob_chunk",
        "eval.every", "eval.prompts", "checkpoint.every", "checkpoint.keep", "warmup.rows",
        "metrics.percentile_every", "model.uaq_scale", "engine.noise_end", "engine.noise_stages",
        "task.max_prompt_tokens", "reward.timeout", "reward.workers", "rollout.temperature",
        "rollout.snapshot_gib", "optimizer.clip_norm", "critic.clip_norm", "warmup.lr",
    ]
    for field in positive:
        if _read(config, field) <= 0:
            yield f"{field} is {_read(config, field)}; it must be above 0"
    if 0 < config.watchdog.timeout <= config.reward.timeout:
        yield (
            f"reward.timeout is {config.reward.timeout} and watchdog.timeout "
            f"{config.watchdog.timeout}; a reward that hangs would end the run instead of costing its "
            "text"
        )
    not_negative = [
        "engine.num_pages", "engine.max_bypass", "engine.divide", "engine.max_draft",
        "engine.noise_start", "warmup.steps",
        "train.pack_length", "rollout.top_k",
        "rollout.kept_set", "rollout.overlong_buffer", "rollout.snapshots", "rollout.ewma_centre",
        "correction.kl_coeff",
        "correction.scale", "optimizer.lr", "critic.lr", "optimizer.warmup", "optimizer.weight_decay", "critic.warmup",
        "critic.weight_decay", "gate.max_d_mean", "gate.max_d_p99", "gate.max_d_max",
        "gate.max_dp_max", "gate.max_k3",
    ]
    for field in not_negative:
        if _read(config, field) < 0:
            yield f"{field} is {_read(config, field)}; it must not be below 0"
    sinks, window = config.engine.retention
    if min(sinks, window) < 0 or sinks and not window:
        yield (
            f"engine.retention is {config.engine.retention}; it needs (first pages, last pages) of "
            "a sequence, at least one last page, or (0, 0) to keep all"
        )
    draft = config.engine.max_draft
    if draft > 0 and draft & (draft + 1):
        yield f"engine.max_draft is {draft}; it must be 0, 1, 3, 7, ... (2^n - 1)"


def _read(config, field: str):
    return functools.reduce(lambda node, name: node[name], field.split("."), config)


def _batches(config):
    train, rollout = config.train, config.rollout
    for field in ("mesh.train", "mesh.serve"):
        if len(_read(config, field)) not in (3, 4):
            yield (
                f"{field} is {_read(config, field)}; it needs the entries (data, fsdp, tensor) or "
                "(data, fsdp, tensor, context)"
            )
    rows = rollout.prompts * rollout.group_size
    if min(rows, train.minibatches, train.microbatch_rows) < 1:
        return  # reported by _counts
    length = config.task.max_prompt_tokens + rollout.max_new_tokens
    if train.pack_length:
        if train.pack_length < length:
            yield (
                f"train.pack_length = {train.pack_length} is shorter than a sequence: "
                f"task.max_prompt_tokens + rollout.max_new_tokens = {length}; 0 packs nothing"
            )
        if rows % train.minibatches:
            yield (
                f"rollout.prompts * rollout.group_size = {rows} sequences cannot be cut into "
                f"train.minibatches = {train.minibatches}"
            )
    elif rows % (train.minibatches * train.microbatch_rows):
        yield (
            f"rollout.prompts * rollout.group_size = {rows} rows cannot be cut into "
            f"train.minibatches = {train.minibatches} of whole micro-batches of "
            f"train.microbatch_rows = {train.microbatch_rows}"
        )
    context = math.prod(config.mesh.train[3:])
    if not train.pack_length and length % context:
        yield (
            f"rows of {length} tokens cannot be cut into the {context} context shards of "
            "mesh.train: set train.pack_length"
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


def _methods(c: Correction, config):
    weight, objective, advantage = c.weight[0], c.objective[0], c.advantage[0]
    rollout = config.rollout
    is_whole = _is_whole(config)
    if rollout.group_size == 1 and advantage not in UNGROUPED:
        yield (
            f"rollout.group_size is 1, but advantage {advantage!r} compares the samples of a "
            "group; use at least 2"
        )
    if "st_ppo_norm" in c.needs and config.model.dtype == "float16":
        yield (
            f"objective {objective!r} divides by a norm of gradients that model.dtype = 'float16' may "
            "lose before the loss scale is found: use bfloat16 or float32"
        )
    preset = config.correction.preset
    if preset in PRESETS_REFUSED:
        yield f"preset {preset!r} {PRESETS_REFUSED[preset]}"
    if rollout.replay and objective in UNRATIOED and (weight == "none" or c.mode == "decoupled"):
        yield (
            f"objective {objective!r} has no ratio and nothing else weighs how far the policy has come "
            f"since, so that it would take what rollout.replay = {rollout.replay!r} trains on again for "
            "the policy's own: use an objective with a ratio, or bypass mode with a weight"
        )
    if weight != "none" and objective in UNWEIGHTED:
        yield (
            f"objective {objective!r} leaves good samples unweighted, and the weight {weight!r} "
            "would weigh them: set correction.weight to 'none'"
        )
    if c.kl is not None and c.kl_placement == "loss" and c.kl[0] == "k1":
        yield (
            "correction.kl is 'k1' in the loss, where its gradient is 0 in expectation: set "
            "correction.kl to k2 or 'k1+', or correction.kl_placement to 'reward'"
        )
    is_grouped = objective in WHOLE_GROUPS or (objective, c.objective[1].get("form")) == (
        "r2vpo", "survey"
    )
    if is_grouped and not is_whole:
        yield (
            f"objective {objective!r} needs all samples of a prompt at once: set "
            "train.microbatch_rows to rollout.prompts * rollout.group_size"
        )
    if c.mode == "bypass" and c.is_batch_normalized and not is_whole:
        yield (
            "bypass mode computes the weights of every micro-batch by itself, and "
            "correction.batch_normalize divides by the mean of the whole batch: set "
            "train.microbatch_rows to rollout.prompts * rollout.group_size"
        )
    if c.kl is not None and c.kl_placement == "reward" and advantage in COMPONENTS_ONLY:
        yield (
            f"advantage {advantage!r} takes the components of the reward, and a KL penalty in the "
            "reward is none of them: set correction.kl_placement to 'loss'"
        )
    if "grad_norms" in c.needs and config.train.pack_length:
        yield (
            f"{c.needs['grad_norms']!r} needs the gradient of each sequence by itself, which "
            "packed rows do not give: set train.pack_length to 0"
        )
    for field, user in c.needs.items():
        if field not in FIELDS:
            yield f"{user!r} needs {field}, which a run does not record"
    needs = {f: user for f, user in c.needs.items() if f in FIELDS}
    whole = [user for f, user in needs.items() if "vocabulary" in FIELDS[f].axes]
    if whole and rollout.kept_set:
        yield (
            f"{whole[0]!r} needs the whole distribution, and with rollout.kept_set the learner has "
            "that of the kept tokens: set rollout.kept_set to 0"
        )
    if weight != "none" and c.mode == "bypass" and objective not in UNRATIOED:
        yield (
            f"bypass mode puts the whole drift into the ratio of {objective!r}; the weight "
            f"{weight!r} would count the engine's part twice: set correction.weight to 'none'"
        )
    if weight != "none" and "logp_behav" in methods.needs("objective", objective):
        yield (
            f"objective {objective!r} weighs by logp_behav itself; the weight {weight!r} would "
            "count the engine's part twice: set correction.weight to 'none'"
        )
    for name, parameters in (c.weight, c.objective, *c.masks):
        yield from _bounds(name, parameters)
    yield from _controllers(c)
    if c.is_centered:
        yield from _centering(c, config)


def _staleness(c: Correction, config):
    """Finds what does not go with the versions of the weights that a batch can be of."""
    rollout = config.rollout
    try:
        mode, staleness = modes.parse(rollout.mode), replay.oldest(rollout)
    except ValueError:
        return  # reported by rollouts.check
    way = rollout.old_logp
    if not staleness:
        for name in (c.objective[0], *(name for name, _ in c.masks)):
            if name in OF_VERSIONS:
                yield (
                    f"{name!r} is for samples of several versions of the weights, and with "
                    f"rollout.mode = {rollout.mode!r} all are of one: choose another mode, such as "
                    "'areal(staleness=4)'"
                )
        for name, default in (("old_logp", "ring"), ("snapshots", 0)):
            if rollout[name] != default:
                yield (
                    f"rollout.{name} = {rollout[name]!r} is for tokens of older weights, of which "
                    f"rollout.mode = {rollout.mode!r} has none: set it to {default!r}"
                )
        return
    is_bounded = staleness < math.inf
    least = staleness + 1 if is_bounded else 2
    if way == "ring" and rollout.snapshots < least and (rollout.snapshots or not is_bounded):
        yield (
            f"rollout.snapshots = {rollout.snapshots} is not enough for rollout.mode = "
            f"{rollout.mode!r} and rollout.replay = {rollout.replay!r}, with tokens up to "
            f"{staleness:g} versions old: set it to 1 more than the versions that you want to keep, or "
            "rollout.old_logp to ewma or none"
        )
    if way == "replica" and staleness > mode.staleness:
        yield (
            "rollout.old_logp = 'replica' keeps what it has scored for one batch, and rollout.replay = "
            f"{rollout.replay!r} trains on it again: set rollout.old_logp to ring"
        )
    if way == "replica" and mode.on_sync == "drain":
        yield (
            "rollout.old_logp = 'replica' scores all that the old weights have drawn before new ones "
            f"come, and with rollout.mode = {rollout.mode!r} some of it goes on under the old: set "
            "rollout.old_logp to ring"
        )
    if way == "none" and c.mode == "decoupled":
        chosen = [("weight", c.weight[0])] if c.weight[0] != "none" else []
        chosen += [("mask", name) for name, _ in c.masks]
        if c.objective[0] not in WITHOUT_OLD:
            chosen.append(("objective", c.objective[0]))
        for kind, name in chosen:
            yield (
                f"the {kind} {name!r} needs the learner's log-probs at the weights that drew each "
                "token, and rollout.old_logp is 'none': set it to ring, correction.mode to bypass, or "
                "take objective 'a3po' or 'decoupled' with weight 'none' and no masks"
            )


def _centering(c: Correction, config):
    """Finds what scores cannot be centred with."""
    try:
        size = centering.head_size(c.centering, config.rollout.kept_set)
    except ValueError as error:
        yield f"correction.{error}"
        return
    if not size:
        yield (
            "correction.centering is 'kept', and no support is recorded: set rollout.kept_set, or "
            "correction.centering to 'top(32)'"
        )
    if _is_filtered(config.rollout) and not config.rollout.kept_set:
        yield (
            "correction.centering needs the learner's probabilities of what top_k, top_p and min_p "
            "keep: set rollout.kept_set"
        )
    is_one_update = config.train.epochs * config.train.minibatches == 1
    chosen = c.weight, c.masks, c.objective, c.mode
    if refusal := centering.why_not(*chosen, is_one_update):
        yield f"correction.centering needs a weight of any token: {refusal}"
    if c.is_batch_normalized:
        yield (
            "correction.centering takes weights as they are, and correction.batch_normalize divides "
            "them: set it to False"
        )
    if c.masks and c.mode == "decoupled" and not c.counts_rejected:
        yield (
            "correction.centering subtracts at rejected tokens, too: set correction.counts_rejected "
            "to True"
        )


def _is_whole(config) -> bool:
    """Whether a micro-batch holds the whole rollout batch."""
    rollout, train = config.rollout, config.train
    per_row = 1
    if train.pack_length:
        length = config.task.max_prompt_tokens + rollout.max_new_tokens
        per_row = min(train.pack_length // length, MAX_SEGMENTS)
    is_one_update = train.minibatches == 1
    return is_one_update and train.microbatch_rows * per_row >= rollout.prompts * rollout.group_size


def _controllers(c):
    names = [name for name, _ in c.controllers]
    if len(set(names)) < len(names):
        yield f"correction.controllers names one twice: {', '.join(names)}"
    elif "adaptive_kl" in names and c.kl is None:
        yield "controller 'adaptive_kl' has no penalty to control: set correction.kl_coeff above 0"
    elif "r2vpo_dual" in names and c.objective[0] != "r2vpo":
        yield (
            f"controller 'r2vpo_dual' sets the multiplier of objective 'r2vpo', not of "
            f"{c.objective[0]!r}"
        )


def _bounds(name, parameters):
    """Finds bounds that reject or truncate even where the two policies agree."""
    for key, cap in parameters.items():
        if (key == "cap" or key.startswith("cap_")) and cap < 1:
            yield f"{key} is {cap} in {name!r}; a cap below 1 truncates even where policies agree"
    low, high = (parameters.get(key) for key in ("lower", "upper"))
    if name == "token_dp":
        if not 0 < high <= 1:
            yield f"upper is {high} in {name!r}; a difference of probabilities lies between 0 and 1"
    elif name.endswith("_binary_kl"):
        if not high >= 0:
            yield f"upper is {high} in {name!r}; a divergence is at least 0"
    elif not name.endswith(("_k2", "_k3")) and high is not None:
        low = (1 / high if name.endswith("_k1") else 0.0) if low is None else low
        if not 0 <= low <= 1 <= high:
            yield f"the band [{low}, {high}] of {name!r} must hold the ratio 1"
    clip_low, clip_high = (parameters.get(key, 0.0) for key in ("clip_low", "clip_high"))
    if clip_low < 0 or (clip_low > 1 and name in ("ppo", "dual_clip", "dis")):
        yield f"clip_low is {clip_low} in {name!r}; the ratio's lower bound is 1 - clip_low"
    if clip_high < 0:
        yield f"clip_high is {clip_high} in {name!r}; the ratio's upper bound is 1 + clip_high"
    if parameters.get("dual_clip", 2.0) <= 1:
        yield f"dual_clip is {parameters['dual_clip']} in {name!r}; it must be above 1"


def _is_filtered(rollout) -> bool:
    return rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0


def _sampling(config):
    rollout = config.rollout
    if config.engine.dtype == "float16" and config.engine.cache_dtype in EIGHT_BIT:
        yield (
            f"engine.cache_dtype = {config.engine.cache_dtype!r} has scales, whose products with "
            "probabilities engine.dtype = 'float16' cannot hold: set the cache to float16 or float32"
        )
    try:
        injection.parse(config.engine.injected)
    except ValueError as error:
        yield f"engine.injected: {error}"
    if not 0 < rollout.top_p <= 1 or not 0 <= rollout.min_p < 1:
        yield (
            f"rollout.top_p = {rollout.top_p} and rollout.min_p = {rollout.min_p} must be in "
            "(0, 1] and [0, 1)"
        )
    is_filtered = _is_filtered(rollout)
    if rollout.kept_set and not is_filtered:
        yield (
            f"rollout.kept_set = {rollout.kept_set} records what top_k, top_p and min_p keep, and "
            "none of them is set: set one, or rollout.kept_set to 0"
        )
    is_top_k_alone = rollout.top_p == 1 and rollout.min_p == 0
    if 0 < rollout.kept_set < rollout.top_k and is_top_k_alone:
        yield (
            f"rollout.kept_set = {rollout.kept_set} can never hold what rollout.top_k = "
            f"{rollout.top_k} keeps: set it to rollout.top_k"
        )
    if is_filtered and not rollout.kept_set and not rollout.allow_filter_bias:
        yield (
            "top_k, top_p and min_p change the distribution that is sampled, and the learner "
            "scores the unfiltered one: every ratio is off by the kept mass; set rollout.kept_set "
            "to score what is kept, or rollout.allow_filter_bias=True to accept that"
        )


def _numerics(config):
    """Finds formats that differ, where two programs are to agree bit by bit."""
    if config.model.numerics != "invariant":
        return
    for name in ("dtype", "quantization", "unquantized"):
        sampler, learner = config.engine[name], config.model[name]
        if sampler != learner:
            yield (
                f"model.numerics is 'invariant', but engine.{name} is {sampler!r} and "
                f"model.{name} is {learner!r}: set both alike"
            )
    if config.model.dtype == "float16":
        yield "model.numerics is 'invariant' in float32 and bfloat16, and model.dtype is float16"
    if config.train.sum_dtype != "float32":
        yield (
            "model.numerics is 'invariant' and sums gradients in float32, but train.sum_dtype is "
            f"{config.train.sum_dtype!r}"
        )
    if config.engine.noise_start > 0:
        yield (
            f"model.numerics is 'invariant', but engine.noise_start = {config.engine.noise_start} "
            "puts noise on the sampler's norms alone: set it to 0"
        )
    if config.engine.injected:
        yield (
            f"model.numerics is 'invariant', but engine.injected = {config.engine.injected!r} changes "
            "the sampler alone: leave it empty"
        )
    if any(config.engine.retention):
        yield (
            "model.numerics is 'invariant' and attends to all keys: set engine.retention to (0, 0)"
        )
    if config.engine.page_size != tiles.PAGE:
        yield (
            f"model.numerics is 'invariant' with pages of {tiles.PAGE} positions, but "
            f"engine.page_size is {config.engine.page_size}"
        )
    if config.engine.cache_dtype not in (config.model.dtype, "float32"):
        yield (
            f"model.numerics is 'invariant', but engine.cache_dtype = {config.engine.cache_dtype} "
            f"rounds keys of model.dtype = {config.model.dtype}: set both alike"
        )
