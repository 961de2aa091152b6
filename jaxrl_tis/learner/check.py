"""Checks of a config's methods against each other, its batches and the age of its samples."""

import math
from collections.abc import Iterator

import ml_collections

from jaxrl_tis.engine.check import is_filtered
from jaxrl_tis.estimators import centering, methods
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner import control, correction
from jaxrl_tis.learner.batch_layout import MAX_SEGMENTS
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.setup import max_length
from jaxrl_tis.rollouts import replay
from jaxrl_tis.rollouts.modes import Mode

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


def method_problems(config: ml_collections.ConfigDict, c: Correction) -> Iterator[str]:
    """Yields a sentence for each problem of the methods `c` of config.correction."""
    if (preset := config.correction.preset) in PRESETS_REFUSED:
        yield f"preset {preset!r} {PRESETS_REFUSED[preset]}"
    yield from _batch(c, config)
    yield from _weight(c)
    yield from _kl(c)
    yield from _fields(c, config)
    for name, parameters in (c.weight, c.objective, *c.masks):
        yield from _bounds(name, parameters)
    yield from _controllers(c)
    if c.is_centered:
        yield from _centering(c, config)


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
    if config.rollout.group_size == 1 and advantage not in UNGROUPED:
        yield (
            f"rollout.group_size is 1, but advantage {advantage!r} compares the samples of a "
            "group; use at least 2"
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


def _is_whole(config) -> bool:
    """Whether a micro-batch holds the whole rollout batch."""
    rollout, train = config.rollout, config.train
    per_row = 1
    if train.pack_length:
        per_row = min(train.pack_length // max_length(config), MAX_SEGMENTS)
    is_one_update = train.minibatches == 1
    return is_one_update and train.microbatch_rows * per_row >= rollout.prompts * rollout.group_size


def _replayed(c: Correction, rollout, way: replay.Way | None):
    """Finds an objective that treats replayed samples as samples of the current policy."""
    weight, objective = c.weight[0], c.objective[0]
    is_replayed = way is not None and way.uses > 1
    if is_replayed and objective in UNRATIOED and (weight == "none" or c.mode == "decoupled"):
        yield (
            f"objective {objective!r} has no ratio and nothing else weighs how far the policy has come "
            f"since, so that it would take what rollout.replay = {rollout.replay!r} trains on again for "
            "the policy's own: use an objective with a ratio, or bypass mode with a weight"
        )


def _weight(c: Correction):
    """Finds an objective that already contains the weight, or must not be weighted."""
    weight, objective = c.weight[0], c.objective[0]
    if weight == "none":
        return
    if objective in UNWEIGHTED:
        yield (
            f"objective {objective!r} leaves good samples unweighted, and the weight {weight!r} "
            "would weigh them: set correction.weight to 'none'"
        )
    if c.mode == "bypass" and objective not in UNRATIOED:
        yield (
            f"bypass mode puts the whole drift into the ratio of {objective!r}; the weight "
            f"{weight!r} would count the engine's part twice: set correction.weight to 'none'"
        )
    if "logp_behav" in methods.needs("objective", objective):
        yield (
            f"objective {objective!r} weighs by logp_behav itself; the weight {weight!r} would "
            "count the engine's part twice: set correction.weight to 'none'"
        )


def _kl(c: Correction):
    """Finds a kl_placement that the KL estimator or the advantage does not support."""
    if c.kl is None:
        return
    if c.kl_placement == "loss" and c.kl[0] == "k1":
        yield (
            "correction.kl is 'k1' in the loss, where its gradient is 0 in expectation: set "
            "correction.kl to k2 or 'k1+', or correction.kl_placement to 'reward'"
        )
    if c.kl_placement == "reward" and c.advantage[0] in COMPONENTS_ONLY:
        yield (
            f"advantage {c.advantage[0]!r} takes the components of the reward, and a KL penalty in the "
            "reward is none of them: set correction.kl_placement to 'loss'"
        )


def _fields(c: Correction, config):
    """Finds fields that a method needs and this run lacks."""
    if "st_ppo_norm" in c.needs and config.model.dtype == "float16":
        yield (
            f"objective {c.objective[0]!r} divides by a norm of gradients that model.dtype = 'float16' "
            "may lose before the loss scale is found: use bfloat16 or float32"
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
    if whole and config.rollout.kept_set:
        yield (
            f"{whole[0]!r} needs the whole distribution, and with rollout.kept_set the learner has "
            "that of the kept tokens: set rollout.kept_set to 0"
        )


def staleness_problems(
    config: ml_collections.ConfigDict, c: Correction, mode: Mode, way: replay.Way | None
) -> Iterator[str]:
    """Yields a sentence for each method, and each choice of rollout.old_logp, that does not go with
    the versions of the weights that the tokens of a batch can be of; `way` is that of replay."""
    yield from _replayed(c, config.rollout, way)
    staleness = replay.max_age(mode, way, config.rollout.max_age)
    if staleness:
        yield from _old_logp(config.rollout, mode, staleness)
        yield from _without_old(c, config.rollout)
    else:
        yield from _of_one_version(c, config.rollout)


def _of_one_version(c: Correction, rollout):
    """Finds settings for several versions of the weights in a run with one version per batch."""
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


def _old_logp(rollout, mode: Mode, staleness: float):
    """Finds a choice of rollout.old_logp that cannot score the oldest tokens."""
    way = rollout.old_logp
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


def _without_old(c: Correction, rollout):
    """Finds methods that need what rollout.old_logp = "none" does not score."""
    if rollout.old_logp != "none" or c.mode != "decoupled":
        return
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
    """Finds methods and settings that score centering does not support."""
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
    if is_filtered(config.rollout) and not config.rollout.kept_set:
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
