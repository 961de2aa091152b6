"""Checks of a config's methods against each other, its batches and the age of its samples."""

import math
from collections.abc import Iterator

import ml_collections

from jaxrl_tis.engine.check import is_filtered
from jaxrl_tis.estimators import centering, loss, methods
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner import control, correction, factors
from jaxrl_tis.learner.batch_layout import MAX_SEGMENTS
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.setup import fork_rows, max_length
from jaxrl_tis.rollouts import replay
from jaxrl_tis.rollouts.schedules import Schedule


def method_problems(config: ml_collections.ConfigDict, c: Correction) -> Iterator[str]:
    """Yields a sentence for each problem of the methods `c` of config.correction."""
    yield from _batch(c, config)
    yield from _routing(c, config)
    yield from _weight(c, bool(config.rollout.teacher))
    yield from _rejected(c)
    yield from _kl(c)
    yield from _sampler_kl(c)
    yield from _dense_kl(c, config)
    yield from _environment_ce(c, config)
    yield from _turn_credit(c)
    yield from _forks(c, config)
    yield from _fields(c, config)
    for name, parameters in (c.weight, c.staleness_weight, c.objective, *c.masks):
        yield from _bounds(name, parameters)
    yield from _controllers(c)
    if c.is_centered:
        yield from _centering(c, config)


def start_problems(config: ml_collections.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting that model.adapter cannot start beside."""
    setting = f"model.adapter = {config.model.adapter!r}"
    if not config.model.adapter:
        return
    if config.model.lora == "none":
        yield (
            f"{setting} has factors to train, and model.lora is 'none'; set it to the folder's rank, "
            "alpha and targets"
        )
    if config.warmup.steps > 0:
        yield (
            f"{setting} was trained beside its base, which warmup.steps = {config.warmup.steps} "
            "would change; set warmup.steps to 0"
        )


def adapter_problems(config: ml_collections.ConfigDict, c: Correction) -> Iterator[str]:
    """Yields a sentence for each setting that would change the base of model.lora."""
    base = "keeps its base constant"
    names = [name for name, _ in c.controllers]
    constant = {
        "model.uaq_scale": (1, "scales it"), "optimizer.weight_decay": (0, "decays weights"),
        "critic.weight_decay": (0, "decays weights"),
        "engine.noise_start": (0, "adds noise to it at each sync"),
        "correction.offload_reference": (False, "moves the reference, which is the base,"),
        "optimizer.freeze_router_bias": (True, "moves the biases of routers if False"),
    }
    for field, (wanted, effect) in constant.items():
        section, name = field.split(".")
        if (value := config[section][name]) != wanted:
            yield (
                f"model.lora = {config.model.lora!r} {base}, and {field} = {value} {effect}; set it "
                f"to {wanted}"
            )
    if "layerwise_perturbation" in names:
        yield (
            f"model.lora = {config.model.lora!r} {base}, and the controller 'layerwise_perturbation' "
            "trains noise beside it; remove the controller"
        )


def trace_problems(c: Correction) -> Iterator[str]:
    """Yields a sentence for each method with parameters that its program refuses."""
    for check in (correction.check, control.check):
        try:
            check(c)
        except ValueError as error:
            yield f"correction: {error}"


def _batch(c: Correction, config):
    """Finds methods that need a whole group or batch where the config gives them less."""
    objective, advantage = c.objective[0], c.advantage[0]
    is_whole = _is_whole(config)
    if config.rollout.group_size == 1 and methods.traits("advantage", advantage).compares:
        yield (
            f"rollout.group_size is 1, but advantage {advantage!r} compares the samples of a "
            "group; use at least 2"
        )
    if _is_grouped(c) and not is_whole:
        yield (
            f"objective {objective!r} needs all samples of a prompt at once: set "
            "train.microbatch_rows to rollout.prompts * rollout.group_size"
        )
    is_per_sequence = methods.traits("objective", objective).is_per_sequence
    if is_per_sequence and c.aggregation != "seq-mean-token-mean":
        yield (
            f"the gradient of objective {objective!r} grows with the number of tokens, which "
            f"correction.aggregation = {c.aggregation!r} does not divide by; set it to "
            "'seq-mean-token-mean'"
        )
    if c.is_bypassed and c.is_batch_normalized and not is_whole:
        yield (
            "with correction.centre = 'behav' each micro-batch computes its own weights, and "
            "correction.batch_normalize divides by the mean of the whole batch; set "
            "train.microbatch_rows to rollout.prompts * rollout.group_size"
        )


def _forks(c: Correction, config):
    """Finds methods for which the forks of a session cannot be rows of a batch."""
    train = config.train
    if (spare := fork_rows(config)) <= 0:
        return
    setting = "rollout.on_fork = 'rows' gives the forks of a session its advantage"
    advantage = c.advantage[0]
    unfit = {
        f"advantage {advantage!r} has one of each token":
            methods.traits("advantage", advantage).per_token,
        f"correction.turn_credit = {c.turn_credit!r} has one of each turn": c.turn_credit != "episode",
        f"correction.kl_placement = {c.kl_placement!r} has one of each token":
            c.kl is not None and c.kl_placement != "loss",
        f"objective {c.objective[0]!r} compares the samples of a prompt": _is_grouped(c),
        "correction.batch_normalize around the sampler needs all rows in a micro-batch":
            c.is_bypassed and c.is_batch_normalized,
    }
    for reason, is_so in unfit.items():
        if is_so:
            yield f"{setting}, and {reason}; set rollout.on_fork to 'longest' or 'refuse'"
    size = train.minibatches * (1 if train.pack_length else train.microbatch_rows)
    if spare % size:
        yield (
            f"rollout.fork_rows = {spare} rows cannot be divided into train.minibatches = "
            f"{train.minibatches} of whole micro-batches; make it a multiple of {size}"
        )


def _is_grouped(c: Correction) -> bool:
    """Whether the objective computes something of all samples of a prompt."""
    name, parameters = c.objective
    grouped = methods.traits("objective", name).is_grouped
    return parameters["form"] == grouped if isinstance(grouped, str) else grouped


def _routing(c: Correction, config):
    """Finds a replay of routes that this run cannot do, and settings of routers that it lacks."""
    is_dense = not config.model.path and not config.model.num_experts
    asked = {
        "correction.routing": (c.routing, "none"),
        "engine.record_routes": (config.engine.record_routes, False),
        "correction.load_balance_coeff": (c.load_balance_coeff, 0.0),
        "correction.router_z_coeff": (c.router_z_coeff, 0.0),
        "optimizer.freeze_router_bias": (not c.router_bias_rate, True),
    }
    for name, (value, default) in asked.items() if is_dense else ():
        if value != default:
            yield (
                f"{name} = {value!r} is for models with experts; set model.num_experts, or {name} "
                f"to {default!r}"
            )
    if is_dense:
        return
    if c.routing == "r2" and c.is_bypassed:
        yield (
            "correction.routing = 'r2' replays the routes of the learner's pass before the update, "
            "which correction.centre = 'behav' does not use; set correction.routing to 'r3', or "
            "correction.centre to 'old'"
        )
    if c.replays_routes and not config.engine.record_routes:
        yield (
            f"correction.routing = {c.routing!r} replays the routes of the sampler, which records "
            "none; set engine.record_routes to True"
        )
    if c.routing_missing == "mask" and c.routing != "r3":
        yield (
            "correction.routing_missing = 'mask' trains without the samples that routing r3 cannot "
            f"replay, and correction.routing is {c.routing!r}; set correction.routing_missing to "
            "'stop', or correction.routing to 'r3'"
        )
    if c.routing_missing == "mask" and c.kl is not None and c.kl_placement == "reward":
        yield (
            "correction.routing_missing = 'mask' does not score samples without routes, and "
            "correction.kl_placement = 'reward' needs their KL; set correction.kl_placement to 'loss'"
        )
    if c.router_bias_rate and not config.model.path and config.model.router == "softmax":
        yield (
            "optimizer.freeze_router_bias = False moves the bias of routers with sigmoid scores, "
            "and model.router is 'softmax'; set it to True"
        )


def _is_whole(config) -> bool:
    """Whether a micro-batch holds the whole rollout batch."""
    rollout, train = config.rollout, config.train
    per_row = 1
    if train.pack_length:
        per_row = min(train.pack_length // max_length(config), MAX_SEGMENTS)
    is_one_update = train.minibatches == 1
    return is_one_update and train.microbatch_rows * per_row >= rollout.prompts * rollout.group_size


def _weight(c: Correction, has_teacher: bool):
    """Finds an objective that must not be weighted, and weights and masks of levels that contradict."""
    weight, objective = c.weight[0], c.objective[0]
    if methods.traits("objective", objective).of_mixture and not has_teacher:
        yield (
            f"objective {objective!r} is of samples that a teacher and the policy draw together, and "
            "rollout.teacher is empty; name a teacher, or choose another objective"
        )
    if c.is_bypassed and methods.traits("objective", objective).weighs_itself:
        yield (
            f"objective {objective!r} separates the gap of the sampler from its ratio, and "
            "correction.centre = 'behav' makes them one; set correction.centre to 'old', or "
            "correction.objective to 'ppo'"
        )
        return
    if c.is_bypassed and c.staleness_weight != loss.NO_WEIGHT:
        yield (
            "with correction.centre = 'behav' a ratio to the sampler holds the factor staleness, and "
            f"correction.staleness_weight = {c.staleness_weight[0]!r} would count it twice; set it to "
            "'none'"
        )
        return
    if weight != "none" and not methods.traits("objective", objective).takes_weight:
        yield (
            f"objective {objective!r} leaves good samples unweighted, but the weight {weight!r} "
            "would weight them; set correction.weight to 'none'"
        )
    yield from factors.problems(c)
    of_sequences = [name for name, _ in (c.weight, c.staleness_weight)
                    if methods.traits("weight", name).level in ("seq", "geo")]
    for mask, parameters in c.masks:
        if of_sequences and mask.startswith("token_"):
            yield (
                f"the weight {of_sequences[0]!r} is of whole responses, and the mask {mask!r} rejects "
                "single tokens of them, whose ratios stay in the weight; choose a mask of sequences, as "
                "'seq_mean_k3(upper=0.01)', or a weight of tokens"
            )
        if "of" in parameters and methods.needs("mask", mask):
            yield (
                f"the mask {mask!r} has log-probs of its own and judges no other ratio; remove "
                f"of={parameters['of']}"
            )


def _rejected(c: Correction):
    """Finds rejected tokens in an objective that multiplies the weights of a response."""
    objective = c.objective[0]
    at_update = c.masks_at_update
    if "weights" not in methods.needs("objective", objective):
        return
    if at_update or (c.masks and c.rejected_in_denominator):
        mask = (at_update or c.masks)[0][0]
        change = "remove the mask" if at_update else "set correction.rejected_in_denominator to False"
        yield (
            f"objective {objective!r} multiplies the weights of a response, and a token that the "
            f"mask {mask!r} rejects would have the weight 0 in the product; {change}"
        )


def _kl(c: Correction):
    """Finds a kl_placement that the KL estimator or the advantage does not support."""
    if c.kl is None:
        return
    if c.kl_placement == "loss" and c.kl[0] == "k1":
        yield (
            "correction.kl is 'k1' in the loss, where its gradient is 0 in expectation; set "
            "correction.kl to k2 or 'k1+', or correction.kl_placement to 'reward'"
        )
    if c.kl_placement == "reward" and methods.traits("advantage", c.advantage[0]).of_components:
        yield (
            f"advantage {c.advantage[0]!r} uses the components of the reward, and a KL penalty in "
            "the reward is not a component; set correction.kl_placement to 'loss'"
        )


def _sampler_kl(c: Correction):
    """Finds masks that keep rejected tokens from the KL to the sampler."""
    before = c.masks_before
    if c.sampler_kl_coeff and before and not c.rejected_in_denominator:
        yield (
            f"correction.sampler_kl_coeff = {c.sampler_kl_coeff:g} is for rejected tokens, too, and "
            f"the mask {before[0][0]!r} takes them out of the batch; set "
            "correction.rejected_in_denominator to True"
        )


def _dense_kl(c: Correction, config):
    """Finds a KL to the policy with evicted keys in a run that evicts none."""
    if c.dense_kl_coeff and not any(config.engine.retention):
        yield (
            f"correction.dense_kl_coeff = {c.dense_kl_coeff:g} compares with the keys that the sampler "
            f"evicts, and engine.retention = {config.engine.retention} keeps all; set engine.retention to "
            "(1, 8), or the coefficient to 0"
        )


def _environment_ce(c: Correction, config):
    """Finds a cross-entropy on tokens of environments in a run without such tokens."""
    task, setting = config.task, f"correction.environment_ce_coeff = {c.environment_ce_coeff:g}"
    if c.environment_ce_coeff <= 0 or config.rollout.harness:
        return
    if not task.environment:
        yield (
            f"{setting} trains on tokens between two answers, and this run has single answers; set "
            "task.environment or rollout.harness, or the coefficient to 0"
        )
    elif task.max_turns == 1:
        yield (
            f"{setting} trains on tokens between two answers, and task.max_turns = 1 has one answer; "
            "raise task.max_turns, or set the coefficient to 0"
        )


def _turn_credit(c: Correction):
    """Finds an advantage that cannot credit turns in the chosen way."""
    name, credit = c.advantage[0], c.turn_credit
    traits = methods.traits("advantage", name)
    if credit != "episode" and traits.of_sequences:
        yield (
            f"advantage {name!r} has inputs of whole sequences, and correction.turn_credit = "
            f"{credit!r} credits turns; set it to 'episode', or choose another advantage"
        )
    if credit == "turn" and traits.per_token:
        yield (
            f"advantage {name!r} gives a token the rewards from it on, and "
            "correction.turn_credit = 'turn' those of its turn; set it to 'rest', or choose another "
            "advantage"
        )


def _fields(c: Correction, config):
    """Finds fields that a method needs and this run lacks."""
    if "st_ppo_norm" in c.needs and config.model.dtype == "float16":
        yield (
            f"objective {c.objective[0]!r} divides by a gradient norm, which can underflow with "
            "model.dtype = 'float16'; use bfloat16 or float32"
        )
    for section in ("optimizer", "critic"):
        skips = {
            "model.dtype = 'float16'": config.model.dtype == "float16",
            "the controller 'gradient_alignment'":
                section == "optimizer" and "gradient_alignment" in dict(c.controllers),
        }
        for what, may_skip in skips.items():
            if config[section].offload and may_skip:
                yield (
                    f"{section}.offload moves the moments at every update, which {what} may skip; set "
                    "it to False"
                )
    if "grad_norms" in c.needs and config.train.pack_length:
        yield (
            f"{c.needs['grad_norms']!r} needs the gradient of each sequence, which packed rows do "
            "not provide; set train.pack_length to 0"
        )
    for field, user in c.needs.items():
        if field not in FIELDS:
            yield f"{user!r} needs {field}, which a run does not record; choose another method"
    needs = {f: user for f, user in c.needs.items() if f in FIELDS}
    whole = [user for f, user in needs.items() if "vocabulary" in FIELDS[f].axes]
    if whole and config.rollout.sampling_mask_size:
        yield (
            f"{whole[0]!r} needs the full distribution, and rollout.sampling_mask_size = "
            f"{config.rollout.sampling_mask_size} limits the learner to the kept tokens; set "
            "rollout.sampling_mask_size to 0"
        )


def staleness_problems(
    config: ml_collections.ConfigDict, c: Correction, schedule: Schedule, way: replay.Way | None
) -> Iterator[str]:
    """Yields a sentence for each method, and each choice of rollout.old_logp_source, that does not
    go with the versions of the weights that the tokens of a batch can be of; `way` is that of
    replay."""
    staleness = replay.max_age(schedule, way, config.rollout.max_age)
    if staleness:
        yield from _old_logp(config.rollout, schedule, staleness)
        yield from _measured(config.rollout, way)
        yield from _without_old(c, config.rollout)
        yield from _averaged(c, config.rollout)
        yield from _of_several_versions(c, config.rollout)
        yield from factors.staleness_problems(c, config.rollout, way is not None and way.uses > 1)
    else:
        yield from _of_one_version(c, config.rollout)


def _of_one_version(c: Correction, rollout):
    """Finds settings for several versions of the weights in a run with one version per batch."""
    for kind, name in (("objective", c.objective[0]), *(("mask", name) for name, _ in c.masks)):
        if methods.traits(kind, name).of_versions:
            yield (
                f"{name!r} distinguishes weight versions, and with rollout.schedule = {rollout.schedule!r} "
                "all samples have one version; choose another schedule, such as 'areal(staleness=4)'"
            )
    for name, default in (("old_logp_source", "ring"), ("snapshots", 0)):
        if rollout[name] != default:
            yield (
                f"rollout.{name} = {rollout[name]!r} is for tokens of older weights, and "
                f"rollout.schedule = {rollout.schedule!r} has none; set it to {default!r}"
            )


def _of_several_versions(c: Correction, rollout):
    """Finds scores that are centred with another ratio than that of the weights."""
    if c.is_centered and not c.is_bypassed and c.gap != "folded":
        yield (
            "correction.centering subtracts with the ratio of the current policy to the sampler, which the "
            f"weights of tokens of older weights (rollout.schedule = {rollout.schedule!r}) are not; set "
            "correction.staleness_weight to 'folded' and correction.centre to 'prox', or "
            "correction.centre to 'behav' and correction.objective to 'reinforce'"
        )


def _averaged(c: Correction, rollout):
    """Finds methods that need the policy itself where logp_prox is of an average of its weights."""
    if rollout.old_logp_source != "ewma":
        return
    chosen = [("advantage", c.advantage[0]), *(("controller", name) for name, _ in c.controllers)]
    for kind, name in chosen:
        if methods.traits(kind, name).of_policy:
            yield (
                f"{name!r} looks at the policy that is updated, and rollout.old_logp_source = 'ewma' "
                "has log-probs of an average of its weights; set it to ring"
            )


def _old_logp(rollout, schedule: Schedule, staleness: float):
    """Finds a choice of rollout.old_logp_source that cannot score the oldest tokens."""
    way = rollout.old_logp_source
    if way == "replica" and rollout.dynamic_sampling:
        yield (
            "rollout.old_logp_source = 'replica' keeps the log-probs of as many samples as can be under way, "
            "and those of the groups that rollout.dynamic_sampling rejects would push them out; set "
            "rollout.old_logp_source to ring"
        )
    is_bounded = staleness < math.inf
    least = staleness + 1 if is_bounded else 2
    if way == "ring" and rollout.snapshots < least and (rollout.snapshots or not is_bounded):
        yield (
            f"rollout.snapshots = {rollout.snapshots} is not enough for rollout.schedule = "
            f"{rollout.schedule!r} and rollout.replay = {rollout.replay!r}, with tokens up to "
            f"{staleness:g} versions old; set it to that number of versions plus 1, or "
            "rollout.old_logp_source to ewma or none"
        )
    if way == "replica" and staleness > schedule.staleness:
        yield (
            "rollout.old_logp_source = 'replica' keeps its log-probs for one batch, and rollout.replay = "
            f"{rollout.replay!r} trains on them again; set rollout.old_logp_source to ring"
        )
    if way == "replica" and schedule.on_sync == "drain":
        yield (
            "rollout.old_logp_source = 'replica' needs all samples of the old weights before a weight "
            f"sync, and with rollout.schedule = {rollout.schedule!r} some samples finish later with the "
            "old weights; set rollout.old_logp_source to ring"
        )


def _measured(rollout, way: replay.Way | None):
    """Finds a measurement of the age of tokens without the log-probs that it compares."""
    if way is not None and way.is_measured and rollout.old_logp_source in ("ewma", "none"):
        yield (
            f"rollout.replay = {rollout.replay!r} measures what age does to the ratio, and with "
            f"rollout.old_logp_source = {rollout.old_logp_source!r} that is not known; set it to ring, or "
            "choose fresh(tau=...)"
        )


def _without_old(c: Correction, rollout):
    """Finds methods that need what rollout.old_logp_source = "none" does not score."""
    if rollout.old_logp_source != "none" or c.is_bypassed:
        return
    chosen = [("weight", c.weight[0])] if c.weight != loss.NO_WEIGHT and c.gap == "engine" else []
    chosen += [("mask", m[0]) for m in c.masks if c.seen(m) in ("engine", "staleness")]
    if c.kl is not None and "logp_old" in methods.needs("kl", c.kl[0]):
        chosen.append(("kl", c.kl[0]))
    if c.centre == "old" and methods.traits("objective", c.objective[0]).reads_old:
        chosen.append(("objective", c.objective[0]))
    for kind, name in chosen:
        yield (
            f"the {kind} {name!r} needs the learner's log-probs under the weights that sampled "
            "each token, and rollout.old_logp_source is 'none'; set it to ring, or correction.centre to "
            "'prox' and correction.staleness_weight to 'folded'"
        )


def _centering(c: Correction, config):
    """Finds methods and settings that score centering does not support."""
    try:
        size = centering.head_size(c.centering, config.rollout.sampling_mask_size)
    except ValueError as error:
        yield f"correction.{error}"
        return
    if not size:
        yield (
            "correction.centering is 'kept', and no sampling mask is recorded; set "
            "rollout.sampling_mask_size, or correction.centering to 'top(32)'"
        )
    if is_filtered(config.rollout) and not config.rollout.sampling_mask_size:
        yield (
            "correction.centering needs the learner's probabilities of the tokens that top_k, "
            "top_p and min_p keep; set rollout.sampling_mask_size"
        )
    is_one_update = config.train.epochs * config.train.minibatches == 1
    chosen = c.weight, c.masks, c.objective, c.centre
    if refusal := centering.why_not(*chosen, is_one_update):
        yield f"correction.centering needs one weight for every token: {refusal}"
    if c.is_batch_normalized:
        yield (
            "correction.centering uses the weights unchanged, and correction.batch_normalize "
            "divides them; set it to False"
        )
    if c.masks_before and not c.rejected_in_denominator:
        yield (
            "correction.centering also subtracts at rejected tokens; set "
            "correction.rejected_in_denominator to True"
        )


def _controllers(c):
    names = [name for name, _ in c.controllers]
    if len(set(names)) < len(names):
        yield f"correction.controllers names one twice: {', '.join(names)}; remove one"
    elif "adaptive_kl" in names and c.kl is None:
        yield "controller 'adaptive_kl' has no penalty to control: set correction.kl_coeff above 0"
    elif "r2vpo_dual" in names and c.objective[0] != "r2vpo":
        yield (
            "controller 'r2vpo_dual' sets the multiplier of objective 'r2vpo', and the objective "
            f"is {c.objective[0]!r}; change one of them"
        )


def _bounds(name, parameters):
    """Finds bounds that reject or truncate even where the two policies agree."""
    for key, cap in parameters.items():
        if key == "cap" and cap < 1:
            yield f"{key} is {cap} in {name!r} and truncates equal policies; set it to 1 or more"
    low, high = (parameters.get(key) for key in ("lower", "upper"))
    if name == "token_dp":
        if not 0 < high <= 1:
            yield f"upper is {high} in {name!r}, a probability difference; set it above 0, up to 1"
    elif name == "seq_logprob_error":
        if not high >= 1:
            yield f"upper is {high} in {name!r}, a mean of factors of 1 or more; set it to 1 or more"
    elif name.endswith(("_binary_kl", "_kpop")):
        if not high >= 0:
            yield f"upper is {high} in {name!r}, a divergence; set it to at least 0"
    elif not name.endswith(("_k2", "_k3")) and high is not None:
        low = (1 / high if name.endswith("_k1") else 0.0) if low is None else low
        if not 0 <= low <= 1 <= high:
            yield f"the band [{low}, {high}] of {name!r} excludes the ratio 1; set bounds around 1"
    least, most = (parameters.get(key, 1.0) for key in ("veto_ratio", "veto_upper"))
    if not 0 <= least <= 1 <= most:
        yield f"{name!r} keeps ratios from {least} to {most}, without 1; set bounds around 1"
    clip_low, clip_high = (parameters.get(key, 0.0) for key in ("clip_low", "clip_high"))
    if clip_low < 0 or (clip_low > 1 and name in ("ppo", "dual_clip", "dis")):
        yield f"clip_low is {clip_low} in {name!r}, with lower bound 1 - clip_low; give 0 to 1"
    if clip_high < 0:
        yield f"clip_high is {clip_high} in {name!r}, with upper bound 1 + clip_high; give 0 or more"
    if parameters.get("dual_clip", 2.0) <= 1:
        yield f"dual_clip is {parameters['dual_clip']} in {name!r}; it must be above 1"
