"""The methods that a config chooses, and what they make of a rollout batch before its updates."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from jaxrl_tis.diagnostics import attribution, batch_metrics, divergences, mismatch
from jaxrl_tis.estimators import (
    advantages, factor_weights, loss, methods, presets, rank_masks, ratios, returns,
)
from jaxrl_tis.estimators.kl import penalized_rewards, sequence_kl
from jaxrl_tis.estimators.methods import Method
from jaxrl_tis.fields import FIELDS, SCORED, shape

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

NUM_TURNS = 8  # metrics by turn; later turns join the last


@dataclasses.dataclass(frozen=True)
class Correction:
    """The chosen methods, each a name with its parameters; see configs/default.py."""

    mode: str
    weight: Method
    masks: tuple[Method, ...]
    is_batch_normalized: bool
    counts_rejected: bool
    advantage: Method
    objective: Method
    centering: str
    aggregation: str
    scale: float
    kl: Method | None
    kl_coeff: float
    kl_placement: str
    entropy_coeff: float
    controllers: tuple[Method, ...]

    @property
    def masks_at_update(self) -> tuple[Method, ...]:
        """The masks that are judged at every update, and not once for the rollout batch."""
        return loss.split(self.masks, self.mode)[1]

    @property
    def needs(self) -> dict[str, str]:
        """Every field that a chosen method takes beyond the usual arguments -> the name of that
        method."""
        chosen = [("weight", self.weight), ("advantage", self.advantage),
                  ("objective", self.objective), *(("mask", m) for m in self.masks)]
        if self.kl is not None:
            chosen.append(("kl", self.kl))
        return _needs(chosen) | self._head

    @property
    def is_centered(self) -> bool:
        """Whether scores are centred, see `estimators.centering`."""
        return self.centering != "none"

    @property
    def _head(self) -> dict[str, str]:
        """The fields of the head that scores are centred over."""
        return dict.fromkeys(("top_ids", "top_logps"), "centering") if self.is_centered else {}

    @property
    def why_scored(self) -> str | None:
        """Why the learner's log-probs of a whole rollout batch are needed before its only update;
        None if those that the update computes anyway serve: what is made of them before is of one
        token, or of one sequence."""
        once, _ = loss.split(self.masks, self.mode)
        own = "logp", "logp_old", "logp_prox", "entropy", "logits", "weights", "key", "adv"
        made = lambda field: FIELDS[field].source in ("learner", "prepare", "update")
        chosen = [("weight", self.weight, own), ("objective", self.objective, own),
                  ("advantage", self.advantage, ()), *(("mask", m, own) for m in self.masks)]
        for kind, (name, _), allowed in chosen:
            for field in methods.needs(kind, name):
                if made(field) and field not in allowed:
                    return f"the {kind} {name} needs {field} of the batch"
        for name, _ in once:
            if name in rank_masks.MASKS:
                return f"the mask {name} ranks the tokens of the batch"
        if self.mode == "decoupled" and self.is_batch_normalized:
            return "weights are divided by their mean over the batch"
        if once and self.mode == "decoupled" and not self.counts_rejected:
            return "how many tokens the masks keep decides what the loss is divided by"
        if self.kl is not None and self.kl_placement != "loss":
            return "the KL to the reference is a part of the reward"
        if "ess_scale" in dict(self.controllers):
            return "ess_scale looks at the batch before its update"
        if "layerwise_perturbation" in dict(self.controllers):
            return "layerwise_perturbation perturbs the log-probs of the update"
        return None

    def is_in_update(self, field: str, is_scored: bool = True) -> bool:
        """Whether the updates take this field of the rollout batch: they and all log-probs read it,
        or a method that is judged at every update names it; so are weight and masks where the batch
        was not scored before."""
        masks = self.masks_at_update if is_scored else self.masks
        at_update = [("objective", self.objective), *(("mask", m) for m in masks)]
        if self.mode == "bypass" or not is_scored:
            at_update.append(("weight", self.weight))
        if self.kl is not None and self.kl_placement == "loss":
            at_update.append(("kl", self.kl))
        use = FIELDS[field].use
        needed = _needs(at_update) | self._head
        return use in ("forward", "update") or (use == "method" and field in needed)


def _needs(chosen: list[tuple[str, Method]]) -> dict[str, str]:
    """Returns field -> the method that needs it, for (kind, method) pairs."""
    return {field: name for kind, (name, _) in chosen for field in methods.needs(kind, name)}


def resolve(fields: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns mode, weight, masks, objective and centering: those that the config spells out, and
    the preset's for the rest."""
    if fields.preset not in presets.PRESETS:
        raise ValueError(
            f"correction.preset is {fields.preset!r}; choose one of {', '.join(presets.PRESETS)}"
        )
    bundle = presets.PRESETS[fields.preset]
    return {part: text if fields[part] is None else fields[part] for part, text in bundle.items()}


def parse(fields: ml_collections.ConfigDict) -> Correction:
    """Reads the methods that `config.correction` names; ValueError for a name or a parameter that
    there is not."""
    parts = resolve(fields)
    return Correction(
        mode=parts["mode"],
        weight=methods.parse("weight", parts["weight"]),
        masks=methods.parse_all("mask", parts["masks"]),
        is_batch_normalized=fields.batch_normalize,
        counts_rejected=fields.counts_rejected,
        advantage=methods.parse("advantage", fields.advantage),
        objective=methods.parse("objective", parts["objective"]),
        centering=parts["centering"],
        aggregation=fields.aggregation,
        scale=fields.scale,
        kl=methods.parse("kl", fields.kl) if fields.kl_coeff else None,
        kl_coeff=fields.kl_coeff,
        kl_placement=fields.kl_placement,
        entropy_coeff=fields.entropy_coeff,
        controllers=methods.parse_all("controller", fields.controllers),
    )


def with_key(c: Correction, batch: Batch) -> Batch:
    """Adds a random key, from the `draw` of the batch's first row, where a method asks for one."""
    return batch | {"key": jax.random.key(batch["draw"][0])} if "key" in c.needs else batch


def controlled(c: Correction, batch: Batch) -> Correction:
    """Returns the correction with the coefficients that controllers have set for this batch."""
    name, parameters = c.objective
    if "r2vpo_lambda" in batch:
        parameters = parameters | {"r2vpo_lambda": batch["r2vpo_lambda"][0]}
    kl_coeff = batch["kl_coeff"][0] if "kl_coeff" in batch else c.kl_coeff
    return dataclasses.replace(c, objective=(name, parameters), kl_coeff=kl_coeff)


def make_prepare(c: Correction) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Returns the jitted function that computes, once for a whole rollout batch [N,T], the
    advantages, the accepted tokens, the weights and the measured gap.

    The batch holds mask, sampled, logp_behav, logp_old (recomputed at the weights that sampled),
    logp_prox (at those that the update starts from), rewards [N], group [N], version, current_version, and
    what the methods need. Both modes measure the gap; in bypass mode masks and weights are left to
    the loss. So are, in decoupled mode, the masks that judge the policy of each update.
    """

    def prepare(batch: Batch) -> tuple[Batch, Metrics]:
        judged = _judge(c, batch)
        prepared = _prepared(c, batch, judged)
        return prepared, _prepare_metrics(c, batch, judged, prepared)

    return jax.jit(prepare)


class _Judged(NamedTuple):
    """What the methods made of a rollout batch."""

    log_ratio: jax.Array  # [N,T] learner over sampler, nats
    w: jax.Array  # [N,T]
    factor: jax.Array  # what w was divided by
    rewards: jax.Array  # [N] or [N,T]
    adv: jax.Array  # [N,T]
    is_accepted: jax.Array  # [N,T] bool
    counts: Metrics  # of the weight and the masks that are judged once, see `counts`


def _judge(c: Correction, batch: Batch) -> _Judged:
    mask = batch["mask"]
    log_ratio = ratios.safe_log_ratio(batch["logp_old"], batch["logp_behav"], mask)
    batch = with_key(c, batch | {"logp": batch["logp_prox"]})
    w, factor = loss.importance_weights(log_ratio, batch, c.weight, c.is_batch_normalized)
    batch, rewards = batch | {"weights": w}, _rewards(c, batch)
    adv = _advantage(c, rewards, batch)
    now = c.masks if c.mode == "bypass" else loss.split(c.masks, c.mode)[0]
    is_accepted, counts = loss.accepted(log_ratio, batch | {"adv": adv}, now)
    counts |= loss.weight_counts(log_ratio, batch, c.weight)
    if c.mode == "bypass":
        counts = {}  # the updates judge them
    return _Judged(log_ratio, w, factor, rewards, adv, is_accepted, counts)


def _advantage(c: Correction, rewards: jax.Array, batch: Batch) -> jax.Array:
    name, parameters = c.advantage
    needed = loss.needed("advantage", name, batch)
    function = advantages.ADVANTAGES[name]
    return function(rewards, batch["sampled"], batch["group"], **needed, **parameters)


def _with_returns(c: Correction, rewards: jax.Array, batch: Batch, fields: Batch) -> Batch:
    name, parameters = c.advantage
    if name != "gae":
        return fields
    return fields | {"returns": advantages.gae_returns(
        rewards, batch["sampled"], values=batch["values"],
        gamma=parameters["gamma"], lam=parameters["lam"],
    )}


def _prepared(c: Correction, batch: Batch, judged: _Judged) -> Batch:
    """The fields that updates take beside those of the rollout batch, or in their place."""
    fields, w = {"adv": judged.adv}, judged.w
    if c.mode == "decoupled":
        fields["weights"] = jnp.where(judged.is_accepted, w, 0.0)
        if not c.counts_rejected:
            fields["mask"] = judged.is_accepted
    return _with_returns(c, judged.rewards, batch, fields)


def make_unscored(c: Correction) -> Callable[[Batch], Batch]:
    """Returns the jitted function that computes what an update takes of a rollout batch [N,T] that
    was not scored before it, see `Correction.why_scored`: the advantages, and returns."""

    def unscored(batch: Batch) -> Batch:
        rewards = batch["rewards"]
        return _with_returns(c, rewards, batch, {"adv": _advantage(c, rewards, batch)})

    return jax.jit(unscored)


def judged_alone(c: Correction, logp: jax.Array, entropy: jax.Array, batch: Batch) -> Batch:
    """Returns an update's batch [B,T] with what `make_prepare` would have given it, made of the
    update's own log-probs and entropies, detached; see `Correction.why_scored`."""
    logp, entropy = jax.lax.stop_gradient((logp, entropy))
    batch = batch | {"logp_old": logp, "logp_prox": logp, "entropy": entropy}
    if c.mode == "bypass":
        return batch
    log_ratio = ratios.safe_log_ratio(logp, batch["logp_behav"], batch["mask"])
    seen = with_key(c, batch | {"logp": logp})
    w, _ = loss.importance_weights(log_ratio, seen, c.weight)
    once, _ = loss.split(c.masks, c.mode)
    is_accepted, _ = loss.accepted(log_ratio, seen | {"weights": w}, once)
    return batch | {"weights": jnp.where(is_accepted, w, 0.0)}


def _prepare_metrics(c: Correction, batch: Batch, judged: _Judged, prepared: Batch) -> Metrics:
    mask, sampled, rewards = batch["mask"], batch["sampled"], judged.rewards
    metrics = gap_metrics(c, judged.w * judged.factor, judged.log_ratio, batch)
    metrics |= rejection_metrics(c, judged.log_ratio, mask, judged.is_accepted)
    metrics |= judged.counts
    metrics |= mismatch.kept_sample_size(judged.w, judged.is_accepted, mask)
    metrics |= batch_metrics.staleness_metrics(batch["version"], batch["current_version"], mask)
    if c.is_batch_normalized:
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = judged.factor
    if c.kl is not None:
        metrics["actor/kl_to_reference"] = sequence_kl(_kl(c, batch), mask)
    total = returns.sequence_rewards(rewards, sampled)
    metrics |= batch_metrics.reward_metrics(batch["rewards"], total, jnp.sum(sampled, axis=1))
    targets = prepared["returns"] if "returns" in prepared else judged.adv
    values = batch["values"] if "values" in batch else None
    return metrics | batch_metrics.advantage_metrics(judged.adv, targets, mask, values)


def _kl(c: Correction, batch: Batch) -> jax.Array:
    """Returns the KL to the reference at the weights that sampled, [N,T]."""
    return loss.kl_term(batch["logp_old"], batch, c.kl)


def _rewards(c: Correction, batch: Batch) -> jax.Array:
    """Returns the rewards [N], or [N,T] with the KL penalty of each token where the penalty belongs
    to the reward."""
    if c.kl is None or c.kl_placement == "loss":
        return batch["rewards"]
    kl_coeff, batch = controlled(c, batch).kl_coeff, batch | {"mask": batch["sampled"]}
    return penalized_rewards(batch["rewards"], batch["mask"], _kl(c, batch), kl_coeff)


def loss_arguments(c: Correction, batch: Batch) -> dict[str, Any]:
    """Returns the keyword arguments that stand for the chosen methods in `loss.policy_loss`.

    What masks reject at an update, see `Correction.masks_at_update`, stays in every denominator:
    how much it is becomes known with the gradient.
    """
    now = controlled(c, batch)
    return dict(
        objective=now.objective, weight=c.weight, masks=c.masks, mode=c.mode,
        aggregation=c.aggregation, is_batch_normalized=c.is_batch_normalized,
        counts_rejected=c.counts_rejected or c.mode == "bypass",
        kl=c.kl if c.kl_placement == "loss" else None, kl_coeff=now.kl_coeff,
        entropy_coeff=c.entropy_coeff, scale=c.scale or None,
    )


def drift_metrics(c: Correction, logp: jax.Array, batch: Batch) -> Metrics:
    """Measures how far the policy of an update is from the sampler, by factor of the ratio.

    In decoupled mode the drift is that of the tokens that the masks accepted: the others have no
    logp.
    """
    chain = logp, batch["logp_prox"], batch["logp_old"], batch["logp_behav"], batch["mask"]
    drift = attribution.factor_metrics(*chain)
    if c.mode == "bypass":
        drift |= _capped_fractions(c, *chain, batch["seg"] if "seg" in batch else None)
    return drift


def check(c: Correction) -> None:
    """Raises ValueError for a parameter that a method refuses, by tracing one step on a tiny
    batch."""
    given, (b, t) = c.advantage[1].get("gdpo_weights"), (2, 3)
    widths = {"vocabulary": 2, "kept": 1, "top": 1, "components": len(given) if given else 1}
    rows = {
        name: jax.ShapeDtypeStruct(shape(name, b, t, widths), field.dtype)
        for name, field in FIELDS.items() if field.source in SCORED
    }
    rows["st_ppo_norm"] = jax.ShapeDtypeStruct((), "float32")

    def step(rows):
        batch = with_key(c, rows | _prepared(c, rows, _judge(c, rows)))
        batch |= {"group": jnp.broadcast_to(rows["group"][:, None], (b, t))}
        return loss.policy_loss(
            rows["logp_prox"], batch, entropy=rows["entropy"], num_tokens=1.0, num_seqs=1.0,
            logp_top=rows["top_logps"] if c.is_centered else None, **loss_arguments(c, batch),
        )

    try:
        jax.eval_shape(step, rows)
    except (TypeError, AssertionError) as error:
        raise ValueError(str(error)) from error


def profile_metrics(batch: Batch, has_turns: bool) -> Metrics:
    """Measures where the gap is: percentiles within a response, by position in it and, in
    conversations, by turn and by distance from the last tool token. This sorts the batch."""
    inputs = batch["logp_old"], batch["logp_behav"]
    mask, num_buckets = batch["mask"], 1 + batch["mask"].shape[1].bit_length()
    metrics = divergences.percentile_metrics(*inputs, mask)
    metrics |= attribution.position_metrics(*inputs, mask, num_buckets=num_buckets)
    if not has_turns:
        return metrics
    metrics |= attribution.turn_metrics(*inputs, batch["turn"], mask, num_turns=NUM_TURNS)
    return metrics | attribution.after_tool_metrics(*inputs, mask, num_buckets=num_buckets)


def gap_metrics(c: Correction, w: jax.Array, log_ratio: jax.Array, batch: Batch) -> Metrics:
    """Measures the sampler's gap: divergences, |dp|, weights, and what the learner's reward would be.

    That estimate is of all answers with a reward; those that are not trained on have weight 1.
    """
    mask, behav, learner = batch["mask"], batch["logp_behav"], batch["logp_old"]
    parameters = c.weight[1]
    upper = parameters.get("cap", parameters.get("upper", 2.0))
    rewarded = returns.known(batch["rewards"], batch["sampled"])
    snis, ess = mismatch.snis_reward(rewarded[0], log_ratio, rewarded[1])
    return _capped_fractions(c, learner, learner, learner, behav, mask) | (
        mismatch.offpolicy_metrics(learner, behav, mask)
        | mismatch.probability_metrics(learner, behav, mask)
        | mismatch.importance_weight_metrics(
            w, log_ratio, mask, level=loss.weight_level(c.weight[0]), upper=upper,
            lower=parameters.get("lower"),
        )
        | divergences.divergence_metrics(log_ratio, mask)
        | divergences.response_metrics(learner, behav, mask)
        | {"reward/learner_snis": snis, "reward/learner_snis_ess": ess}
    )


def _capped_fractions(c: Correction, *chain: jax.Array) -> Metrics:
    """Measures how often each cap of a weight with a cap per factor acts; {} for any other
    weight."""
    name, caps = c.weight
    if name not in factor_weights.WEIGHTS:
        return {}
    return attribution.capped_fractions(*chain, level=loss.weight_level(name), **caps)


def rejection_metrics(
    c: Correction, log_ratio: jax.Array, mask: jax.Array, is_accepted: jax.Array
) -> Metrics:
    """Measures what the masks rejected, and the statistic of each criterion that has one; {}
    without masks."""
    if not c.masks:
        return {}
    metrics = mismatch.rejected_fractions(is_accepted, mask)
    for name, parameters in c.masks:
        if name in mismatch.REJECTION_OPTIONS:
            metrics |= mismatch.rejection_metrics(log_ratio, mask, option=name, **parameters)
    return metrics
