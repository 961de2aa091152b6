"""The methods that a config chooses, and what they make of a rollout batch before its updates."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from jaxrl_tis.estimators import advantages, attribution, batch_metrics, diagnostics, divergences
from jaxrl_tis.estimators import factor_weights, loss, methods, presets, ratios
from jaxrl_tis.estimators import kl as kl_estimators
from jaxrl_tis.estimators.methods import Method

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

# What the learner records of every token, besides the arguments that all methods share.
RECORDED = frozenset(
    ("logp", "logp_old", "logp_prox", "logp_learner", "logp_behav", "weights", "adv", "entropy",
     "turn", "version", "current_version", "group", "key")
)
# What it records where a method asks for it: the critic's values, the reference's log-probs, the
# parts of each reward, the reward of a greedy answer to each prompt, sum(pi^2) over the vocabulary,
# and the clipping bias.
ON_DEMAND = frozenset(("values", "logp_ref", "reward_components", "greedy_rewards",
                       "sum_pi_squared", "st_ppo_norm"))
# The same, but for small configs: the logits of the whole vocabulary at every token (of the
# learner, the sampler and the reference), and the gradient's norm of every row by itself.
LARGE = frozenset(("logits", "logits_behav", "logits_ref", "grad_norms"))

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
    def not_in_update(self) -> tuple[str, ...]:
        """Large fields that an update does not take from the rollout batch: it computes logits by
        itself, and needs those of the sampler for a mask only."""
        masks = (name for name, _ in self.masks_at_update)
        needed = {field for name in masks for field in methods.needs("mask", name)}
        return ("logits", *({"logits_behav"} - needed))

    @property
    def needs(self) -> dict[str, str]:
        """Field -> the method that needs it, for every field beyond the usual arguments."""
        chosen = [("weight", self.weight), ("advantage", self.advantage),
                  ("objective", self.objective), *(("mask", m) for m in self.masks)]
        if self.kl is not None:
            chosen.append(("kl", self.kl))
        return {field: name for kind, (name, _) in chosen for field in methods.needs(kind, name)}


def resolve(fields: ml_collections.ConfigDict) -> dict[str, str]:
    """mode, weight, masks and objective: the preset's, where the config does not spell them out."""
    if fields.preset not in presets.PRESETS:
        raise ValueError(
            f"correction.preset is {fields.preset!r}; choose one of {', '.join(presets.PRESETS)}"
        )
    bundle = presets.PRESETS[fields.preset]
    return {part: text if fields[part] is None else fields[part] for part, text in bundle.items()}


def parse(fields: ml_collections.ConfigDict) -> Correction:
    """The methods that `config.correction` names; ValueError for a name or parameter of none."""
    parts = resolve(fields)
    return Correction(
        mode=parts["mode"],
        weight=methods.parse("weight", parts["weight"]),
        masks=methods.parse_all("mask", parts["masks"]),
        is_batch_normalized=fields.batch_normalize,
        counts_rejected=fields.counts_rejected,
        advantage=methods.parse("advantage", fields.advantage),
        objective=methods.parse("objective", parts["objective"]),
        aggregation=fields.aggregation,
        scale=fields.scale,
        kl=methods.parse("kl", fields.kl) if fields.kl_coeff else None,
        kl_coeff=fields.kl_coeff,
        kl_placement=fields.kl_placement,
        entropy_coeff=fields.entropy_coeff,
        controllers=methods.parse_all("controller", fields.controllers),
    )


def with_key(c: Correction, batch: Batch) -> Batch:
    """The batch, with a random key from its first row's `draw` where a method asks for one."""
    return batch | {"key": jax.random.key(batch["draw"][0])} if "key" in c.needs else batch


def controlled(c: Correction, batch: Batch) -> Correction:
    """The correction with the coefficients that controllers have set for this batch."""
    name, parameters = c.objective
    if "r2vpo_lambda" in batch:
        parameters = parameters | {"r2vpo_lambda": batch["r2vpo_lambda"][0]}
    kl_coeff = batch["kl_coeff"][0] if "kl_coeff" in batch else c.kl_coeff
    return dataclasses.replace(c, objective=(name, parameters), kl_coeff=kl_coeff)


def make_prepare(c: Correction) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Advantages, kept tokens, engine weights and the measured gap of a whole rollout batch [N,T].

    The batch holds mask, logp_behav, logp_learner (recomputed at the weights that sampled), rewards
    [N], group [N], version, current_version, and what the methods need. Both modes measure the gap;
    in bypass mode the sampler's log-probs become logp_old, and masks and weights are left to the
    loss. So are, in decoupled mode, the masks that judge the policy of each update.
    """

    def prepare(batch: Batch) -> tuple[Batch, Metrics]:
        judged = _judge(c, batch)
        fields = _update_fields(c, batch, judged)
        return fields, _prepare_metrics(c, batch, judged, fields)

    return jax.jit(prepare)


class _Judged(NamedTuple):
    """What the methods made of a rollout batch."""

    log_ratio: jax.Array  # [N,T] learner over sampler, nats
    w: jax.Array  # [N,T]
    factor: jax.Array  # what w was divided by
    rewards: jax.Array  # [N] or [N,T]
    adv: jax.Array  # [N,T]
    keep: jax.Array  # [N,T] bool


def _judge(c: Correction, batch: Batch) -> _Judged:
    mask, learner = batch["mask"], batch["logp_learner"]
    log_ratio = ratios.safe_log_ratio(learner, batch["logp_behav"], mask)
    batch = with_key(c, batch | {"logp": learner, "logp_old": learner, "logp_prox": learner})
    w, factor = loss.importance_weights(log_ratio, batch, c.weight, c.is_batch_normalized)
    batch, rewards = batch | {"weights": w}, _rewards(c, batch)
    name, parameters = c.advantage
    adv = advantages.ADVANTAGES[name](
        rewards, mask, batch["group"], **loss.needed("advantage", name, batch), **parameters
    )
    now = c.masks if c.mode == "bypass" else loss.split(c.masks, c.mode)[0]
    keep = loss.accepted(log_ratio, batch | {"adv": adv}, now)
    return _Judged(log_ratio, w, factor, rewards, adv, keep)


def _update_fields(c: Correction, batch: Batch, judged: _Judged) -> Batch:
    learner, behav, w = batch["logp_learner"], batch["logp_behav"], judged.w
    fields = {"adv": judged.adv, "logp_old": learner, "logp_prox": learner}
    if c.mode == "bypass":
        fields |= {"logp_old": behav, "logp_prox": behav}
    elif c.counts_rejected:
        fields["weights"] = jnp.where(judged.keep, w, 0.0)
    else:
        fields |= {"weights": jnp.where(judged.keep, w, 0.0), "mask": judged.keep}
    name, parameters = c.advantage
    if name == "gae":
        fields["returns"] = advantages.gae_returns(
            judged.rewards, batch["mask"], values=batch["values"],
            gamma=parameters["gamma"], lam=parameters["lam"],
        )
    return fields


def _prepare_metrics(c: Correction, batch: Batch, judged: _Judged, fields: Batch) -> Metrics:
    mask, rewards = batch["mask"], judged.rewards
    metrics = gap_metrics(c, judged.w * judged.factor, judged.log_ratio, batch)
    metrics |= rejection_metrics(c, judged.log_ratio, mask, judged.keep)
    metrics |= diagnostics.kept_sample_size(judged.w, judged.keep, mask)
    metrics |= batch_metrics.staleness_metrics(batch["version"], batch["current_version"], mask)
    if c.is_batch_normalized:
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = judged.factor
    if c.kl is not None:
        metrics["actor/kl_to_reference"] = kl_estimators.sequence_kl(_kl(c, batch), mask)
    total = jnp.sum(ratios.zero_padding(rewards, mask), 1) if rewards.ndim == 2 else rewards
    metrics |= batch_metrics.reward_metrics(batch["rewards"], total, jnp.sum(mask, axis=1))
    returns = fields["returns"] if "returns" in fields else judged.adv
    values = batch["values"] if "values" in batch else None
    return metrics | batch_metrics.advantage_metrics(judged.adv, returns, mask, values)


def _kl(c: Correction, batch: Batch) -> jax.Array:
    """[N,T] KL to the reference at the weights that sampled."""
    learner = batch["logp_learner"]
    return loss.kl_term(learner, batch | {"logp_old": learner}, c.kl)


def _rewards(c: Correction, batch: Batch) -> jax.Array:
    """Rewards [N], or [N,T] with the KL penalty of each token where it belongs to the reward."""
    if c.kl is None or c.kl_placement == "loss":
        return batch["rewards"]
    kl_coeff = controlled(c, batch).kl_coeff
    return kl_estimators.penalized_rewards(
        batch["rewards"], batch["mask"], _kl(c, batch), kl_coeff
    )


def policy_loss(
    c: Correction,
    logp: jax.Array,
    entropy: jax.Array,
    batch: Batch,
    num_tokens: jax.Array,
    num_seqs: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """(loss, metrics) of a micro-batch with what `prepare` added; the gradient flows through logp,
    entropy and, for an exact KL, `logits`.

    In decoupled mode the drift by factor is that of the tokens that the masks kept: the others have
    no logp. What masks reject here, see `Correction.masks_at_update`, stays in every denominator:
    how much it is becomes known with the gradient.
    """
    now, learner, prox = controlled(c, batch), batch["logp_old"], batch["logp_prox"]
    if c.mode == "bypass":
        learner = prox = batch["logp_learner"]
    chain = logp, prox, learner, batch["logp_behav"], batch["mask"]
    drift = attribution.factor_metrics(*chain)
    if c.mode == "bypass" and c.weight[0] in factor_weights.WEIGHTS:
        batch = batch | {"logp_prox": prox}  # of the weight alone: beside it no objective takes one
        drift |= _capped_fractions(c, *chain, batch["seg"] if "seg" in batch else None)
    value, metrics = loss.policy_loss(
        logp, with_key(c, batch), objective=now.objective, weight=c.weight, masks=c.masks,
        mode=c.mode, aggregation=c.aggregation, is_batch_normalized=c.is_batch_normalized,
        counts_rejected=c.counts_rejected or c.mode == "bypass",
        kl=c.kl if c.kl_placement == "loss" else None, kl_coeff=now.kl_coeff, entropy=entropy,
        entropy_coeff=c.entropy_coeff, num_tokens=num_tokens, num_seqs=num_seqs,
        scale=c.scale or None,
    )
    return value, metrics | drift


def check(c: Correction) -> None:
    """ValueError for a parameter that a method refuses: one step is traced on a tiny batch."""
    b, t, v = 2, 3, 2
    field = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    given = c.advantage[1].get("gdpo_weights")
    rows = {name: field((b, t)) for name in ("logp_behav", "logp_learner", "logp_ref", "values",
                                             "entropy", "sum_pi_squared")}
    rows |= {name: field((b,)) for name in ("rewards", "greedy_rewards", "grad_norms")}
    rows |= {name: field((b, t, v)) for name in ("logits", "logits_behav", "logits_ref")}
    rows |= {name: field((b, t), jnp.int32) for name in ("turn", "version")}
    rows |= {
        "mask": field((b, t), bool), "group": field((b,), jnp.int32),
        "current_version": field((b, 1), jnp.int32), "draw": field((b,), jnp.uint32),
        "reward_components": field((b, len(given) if given else 1)), "st_ppo_norm": field(()),
    }

    def step(rows):
        batch = rows | _update_fields(c, rows, _judge(c, rows))
        batch |= {"group": jnp.broadcast_to(rows["group"][:, None], (b, t))}
        return policy_loss(c, rows["logp_learner"], rows["entropy"], batch, 1.0, 1.0)

    try:
        jax.eval_shape(step, rows)
    except (TypeError, AssertionError) as error:
        raise ValueError(str(error)) from error


def profile_metrics(batch: Batch, has_turns: bool) -> Metrics:
    """Where the gap is: percentiles within a response, by position in it and, in conversations, by
    turn and distance from the last tool token. Sorts the batch."""
    inputs = batch["logp_learner"], batch["logp_behav"]
    mask, num_buckets = batch["mask"], 1 + batch["mask"].shape[1].bit_length()
    metrics = divergences.percentile_metrics(*inputs, mask)
    metrics |= attribution.position_metrics(*inputs, mask, num_buckets=num_buckets)
    if not has_turns:
        return metrics
    metrics |= attribution.turn_metrics(*inputs, batch["turn"], mask, num_turns=NUM_TURNS)
    return metrics | attribution.after_tool_metrics(*inputs, mask, num_buckets=num_buckets)


def gap_metrics(c: Correction, w: jax.Array, log_ratio: jax.Array, batch: Batch) -> Metrics:
    """The sampler's gap: divergences, |dp|, weights, and what the learner's reward would be."""
    mask, behav, learner = batch["mask"], batch["logp_behav"], batch["logp_learner"]
    parameters = c.weight[1]
    upper = parameters.get("cap", parameters.get("upper", 2.0))
    snis, ess = diagnostics.snis_reward(batch["rewards"], log_ratio, mask)
    return _capped_fractions(c, learner, learner, learner, behav, mask) | (
        diagnostics.offpolicy_metrics(learner, behav, mask)
        | diagnostics.probability_metrics(learner, behav, mask)
        | diagnostics.importance_weight_metrics(
            w, log_ratio, mask, level=loss.weight_level(c.weight[0]), upper=upper,
            lower=parameters.get("lower"),
        )
        | divergences.divergence_metrics(log_ratio, mask)
        | divergences.response_metrics(learner, behav, mask)
        | {"reward/learner_snis": snis, "reward/learner_snis_ess": ess}
    )


def _capped_fractions(c: Correction, *chain: jax.Array) -> Metrics:
    """How often each cap of a weight with a cap per factor acts; {} for any other weight."""
    name, caps = c.weight
    if name not in factor_weights.WEIGHTS:
        return {}
    return attribution.capped_fractions(*chain, level=loss.weight_level(name), **caps)


def rejection_metrics(
    c: Correction, log_ratio: jax.Array, mask: jax.Array, keep: jax.Array
) -> Metrics:
    """What the masks rejected, and the statistic of each criterion that has one; else {}."""
    if not c.masks:
        return {}
    metrics = diagnostics.rejected_fractions(keep, mask)
    for name, parameters in c.masks:
        if name in diagnostics.REJECTION_OPTIONS:
            metrics |= diagnostics.rejection_metrics(log_ratio, mask, option=name, **parameters)
    return metrics
