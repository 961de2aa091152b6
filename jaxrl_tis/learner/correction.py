"""The methods chosen in a config, and their results for a rollout batch before its updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxrl_tis.diagnostics import batch_metrics, correction_metrics, mismatch
from jaxrl_tis.estimators import (
    advantages, loss, methods, presets, ratios, returns, turn_credit,
)
from jaxrl_tis.estimators.kl import penalized_rewards, sequence_kl
from jaxrl_tis.estimators.methods import Method
from jaxrl_tis.fields import FIELDS, SCORED, shape

ROUTINGS, RECORDED_ROUTES = ("none", "r2", "r3", "keep"), ("r3", "keep")
ROUTING_MISSING = ("stop", "mask")
# What an update that computes its own logp_old returns of each token.
OF_UPDATE = {"logp_old": "float32", "entropy": "float32", "weights": "float32", "accepted": "bool"}
# What the weights, masks and metrics of a rollout batch take, whatever the methods.
WEIGHED = (
    "mask", "sampled", "version", "current_version", "draw", "rewards", "logp_behav", "logp_student",
    "logp_old", "logp_prox", "logp_ref", "adv", "returns", "values", "weights", "accepted",
)
Batch = dict[str, Any]  # arrays; "seg" is a Segments
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(loss.LossSpec):
    """The chosen methods, each a name with its parameters: those of the loss, and those around it.
    See configs/default.py."""

    advantage: Method
    turn_credit: str
    centering: str
    kl_placement: str
    controllers: tuple[Method, ...]
    routing: str
    routing_missing: str
    load_balance_coeff: float
    router_z_coeff: float
    router_bias_rate: float

    @property
    def replays_routes(self) -> bool:
        """Whether the learner replays the routes that the sampler recorded."""
        return self.routing in RECORDED_ROUTES

    @property
    def counts_experts(self) -> bool:
        """Whether an update needs the statistics of its routers."""
        return bool(self.load_balance_coeff or self.router_z_coeff or self.router_bias_rate)

    @property
    def needs(self) -> dict[str, str]:
        """{field that a chosen method takes beyond the usual arguments: name of the method}."""
        chosen = [*self._weights, ("advantage", self.advantage), ("objective", self.objective),
                  *(("mask", m) for m in self.masks)]
        if self.kl is not None:
            chosen.append(("kl", self.kl))
        of_turns = () if self.turn_credit == "episode" else ("turn", "turn_rewards")
        more = self._head | self._of_loss
        return _needs(chosen) | more | dict.fromkeys(of_turns, "turn_credit")

    @property
    def masks_of_batch(self) -> tuple[Method, ...]:
        """The masks whose decisions on a rollout batch are measured: all, if the sampler is the
        centre."""
        return self.masks if self.is_bypassed else self.masks_before

    @property
    def _weights(self) -> list[tuple[str, Method]]:
        chosen = [("weight", self.weight), ("weight", self.staleness_weight)]
        return [x for x in chosen if x[1] != loss.FOLDED]

    @property
    def is_centered(self) -> bool:
        """Whether scores are centred, see `estimators.centering`."""
        return self.centering != "none"

    @property
    def _head(self) -> dict[str, str]:
        """The fields of the head (the recorded tokens) of score centering."""
        return dict.fromkeys(("top_ids", "top_logps"), "centering") if self.is_centered else {}

    @property
    def _of_loss(self) -> dict[str, str]:
        """The fields of the loss's reduction and of its cross-entropy."""
        taken = {"group": self.aggregation} if self.aggregation == "prompt-mean" else {}
        return taken | ({"environment": "environment_ce_coeff"} if self.environment_ce_coeff else {})

    @property
    def recompute_reason(self) -> str | None:
        """Why the learner's log-probs of a whole rollout batch are needed before its only update;
        None if those that the update computes anyway serve: what is made of them before is of one
        token, or of one sequence."""
        own = "logp", "logp_old", "logp_prox", "entropy", "logits", "weights", "key", "adv"
        made = lambda field: FIELDS[field].source in ("learner", "prepare", "update")
        chosen = [*((*x, own) for x in self._weights), ("objective", self.objective, own),
                  ("advantage", self.advantage, ()), *(("mask", m, own) for m in self.masks)]
        for kind, (name, _), allowed in chosen:
            for field in methods.needs(kind, name):
                if made(field) and field not in allowed:
                    return f"the {kind} {name} needs {field} of the batch"
        for name, _ in self.masks_before:
            if methods.traits("mask", name).ranks:
                return f"the mask {name} ranks the tokens of the batch"
        if self.is_batch_normalized:
            return "weights are divided by their mean over the batch"
        if self.masks_before and not self.rejected_in_denominator:
            return "the divisor of the loss is the number of tokens that the masks keep"
        if self.kl is not None and self.kl_placement != "loss":
            return "the KL to the reference is a part of the reward"
        if self.routing == "r2":
            return "routing r2 replays the routes of the pass before the update"
        if "ess_scale" in dict(self.controllers):
            return "ess_scale looks at the batch before its update"
        if "layerwise_perturbation" in dict(self.controllers):
            return "layerwise_perturbation perturbs the log-probs of the update"
        return None

    def is_in_update(self, field: str, is_scored: bool = True) -> bool:
        """Whether the updates take this field of the rollout batch.

        They take the fields of forward passes and updates, and the fields of methods that are
        applied at every update. Without a score before the update, these include weight and masks.
        """
        masks = self.masks_at_update if is_scored else self.masks
        at_update = [("objective", self.objective), *(("mask", m) for m in masks)]
        if self.is_bypassed or not is_scored:
            at_update += self._weights
        if self.kl is not None and self.kl_placement == "loss":
            at_update.append(("kl", self.kl))
        use = FIELDS[field].use
        needed = _needs(at_update) | self._head | self._of_loss
        return use in ("forward", "update") or (use == "method" and field in needed)

    def is_weighed(self, field: str) -> bool:
        """Whether `weighed` takes this field of the rollout batch."""
        chosen = [*self._weights, *(("mask", m) for m in self.masks_of_batch)]
        if self.kl is not None:
            chosen.append(("kl", self.kl))
        return field in WEIGHED or field in _needs(chosen)


def _needs(chosen: list[tuple[str, Method]]) -> dict[str, str]:
    """Returns field -> the method that needs it, for (kind, method) pairs."""
    return {field: name for kind, (name, _) in chosen for field in methods.needs(kind, name)}


def resolve(fields: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns the values of `presets.FIELDS`: the config's, and the preset's where it has none."""
    if fields.preset not in presets.PRESETS:
        raise ValueError(
            f"correction.preset is {fields.preset!r}; choose one of {', '.join(presets.PRESETS)}"
        )
    bundle = presets.PRESETS[fields.preset]
    return {part: text if fields[part] is None else fields[part] for part, text in bundle.items()}


def parse(
    fields: ml_collections.ConfigDict, router_bias_rate: float = 0.0, minibatches: int = 1
) -> Correction:
    """Parses the methods of `config.correction`. ValueError for an unknown name or parameter.

    Args:
      router_bias_rate: step of the routers' biases, 0 for none.
      minibatches: of a rollout batch, which decide `presets.BY_MINIBATCHES`.
    """
    parts = resolve(fields)
    routing = parts["routing"]
    if routing == presets.BY_MINIBATCHES:
        routing = presets.routing(minibatches)
    return Correction(
        centre=parts["centre"],
        weight=methods.parse("weight", parts["weight"]),
        staleness_weight=loss.staleness_weight(parts["staleness_weight"]),
        masks=methods.parse_all("mask", parts["masks"]),
        is_batch_normalized=fields.batch_normalize,
        rejected_in_denominator=fields.rejected_in_denominator,
        advantage=methods.parse("advantage", fields.advantage),
        turn_credit=fields.turn_credit,
        objective=methods.parse("objective", parts["objective"]),
        centering=parts["centering"],
        aggregation=fields.aggregation,
        scale=fields.scale or None,
        kl=methods.parse("kl", fields.kl) if fields.kl_coeff else None,
        kl_coeff=fields.kl_coeff,
        kl_placement=fields.kl_placement,
        sampler_kl_coeff=fields.sampler_kl_coeff,
        dense_kl_coeff=fields.dense_kl_coeff,
        entropy_coeff=fields.entropy_coeff,
        environment_ce_coeff=fields.environment_ce_coeff,
        controllers=methods.parse_all("controller", fields.controllers),
        routing=routing,
        routing_missing=fields.routing_missing,
        load_balance_coeff=fields.load_balance_coeff,
        router_z_coeff=fields.router_z_coeff,
        router_bias_rate=router_bias_rate,
    )


def with_key(c: Correction, batch: Batch) -> Batch:
    """Adds a random key, from the `draw` of the batch's first row, if a method needs one."""
    return batch | {"key": jax.random.key(batch["draw"][0])} if "key" in c.needs else batch


def controlled(c: Correction, batch: Batch) -> Correction:
    """Returns the correction with the coefficients that controllers have set for this batch."""
    name, parameters = c.objective
    if "r2vpo_lambda" in batch:
        parameters = parameters | {"r2vpo_lambda": batch["r2vpo_lambda"][0]}
    kl_coeff = batch["kl_coeff"][0] if "kl_coeff" in batch else c.kl_coeff
    return dataclasses.replace(c, objective=(name, parameters), kl_coeff=kl_coeff)


def make_prepare(c: Correction) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Returns the jitted function that computes the advantages, the weights, the accepted tokens
    and the metrics of a whole rollout batch [N,T] with one sequence a row: `credited` and `weighed`
    in one program.

    The batch holds mask, sampled, logp_behav, logp_old (recomputed at the weights that sampled),
    logp_prox (at the weights at the start of the update), rewards [N], group [N], version,
    current_version, and the fields that the methods need. The metrics measure the sampler's gap. The
    updates apply the masks of `masks_at_update` and, if the sampler is the centre, the weight.
    """

    def prepare(batch: Batch) -> tuple[Batch, Metrics]:
        made, of_rewards = credited(c, batch)
        fields, metrics = weighed(c, batch | made)
        return made | fields, of_rewards | metrics

    return jax.jit(prepare)


def credited(c: Correction, batch: Batch) -> tuple[Batch, Metrics]:
    """Computes the advantages "adv", with a critic also its targets "returns", and the metrics of the
    rewards of a rollout batch [N,T] with one sequence a row. Groups are compared over its rows. The
    batch may be unscored, see `Correction.recompute_reason`."""
    rewards, sampled = _rewards(c, batch), batch["sampled"]
    adv = _advantage(c, rewards, with_key(c, _seen(batch)))
    total = returns.sequence_rewards(rewards, sampled)
    metrics = batch_metrics.reward_metrics(batch["rewards"], total, jnp.sum(sampled, axis=1))
    return _with_returns(c, rewards, batch, {"adv": adv}), metrics


def weighed(c: Correction, batch: Batch) -> tuple[Batch, Metrics]:
    """Computes the weights, the accepted tokens and the metrics of a rollout batch with the fields of
    `credited`: the fields that the updates take in addition to the batch's or instead of them.

    Rows [B,T] hold one sequence each or, with `seg`, several; then the batch has the fields of
    `is_weighed`. After an update that scored the batch, `weights` and `accepted` are the update's.
    """
    is_scored = "accepted" not in batch
    outputs = method_outputs(c, _seen(batch)) if is_scored else _outputs_of_update(c, batch)
    fields = weight_fields(c, outputs)
    if is_scored and not c.is_bypassed and not c.rejected_in_denominator:
        fields["mask"] = outputs.is_accepted
    return fields, _measures(c, batch, outputs)


def _seen(batch: Batch) -> Batch:
    """Adds the policy's log-probs at the start of the update, if the batch is scored."""
    return batch | {"logp": batch["logp_prox"]} if "logp_prox" in batch else batch


def _outputs_of_update(c: Correction, batch: Batch) -> loss.MethodOutputs:
    """Returns what `method_outputs` gave within the update, where nothing is stale."""
    weight = batch["weights"]
    log_ratio = ratios.safe_log_ratio(batch["logp_old"], batch["logp_behav"], batch["mask"])
    judged = {of: jnp.zeros_like(log_ratio) if of == "staleness" else log_ratio
              for of in map(c.seen, c.masks_of_batch)}
    return loss.MethodOutputs(
        log_ratio, weight, weight, jnp.ones(()), batch["accepted"], judged, {}
    )


def method_outputs(c: Correction, batch: Batch) -> loss.MethodOutputs:
    """Returns the outputs of the weights and of the masks before the update. If the sampler is the
    centre these are all masks, on its gap, and the updates count their tokens."""
    outputs = loss.apply_methods(with_key(c, batch), c, c.masks_of_batch)
    return outputs._replace(counts={}) if c.is_bypassed else outputs


def weight_fields(c: Correction, outputs: loss.MethodOutputs) -> Batch:
    """Returns the weights that an update multiplies, 0 for rejected tokens; {} if the sampler is the
    centre: each update computes its own."""
    if c.is_bypassed:
        return {}
    return {"weights": jnp.where(outputs.is_accepted, outputs.weight, 0.0)}


def _advantage(c: Correction, rewards: jax.Array, batch: Batch) -> jax.Array:
    name, parameters = c.advantage
    if "weights" in methods.needs("advantage", name):
        # Of all answers, as those that are not trained on count in their groups.
        batch = batch | {"weights": loss.apply_methods(
            batch | {"mask": batch["sampled"]}, c, (), c.gap_at_update
        ).weight}
    needed = loss.needed("advantage", name, batch)
    function: Any = functools.partial(advantages.ADVANTAGES[name], **needed, **parameters)
    if c.turn_credit == "episode" or methods.traits("advantage", name).per_token:
        adv = function(rewards, batch["sampled"], batch["group"])
        # Forks of a session have no reward of their own, see learner/forks.py.
        has_forks = "owner" in batch
        return returns.of_owner(adv, batch["sampled"], batch["owner"]) if has_forks else adv
    is_rest = c.turn_credit == "rest"
    if not is_rest:
        rewards = jnp.where(jnp.isnan(batch["turn_rewards"]), jnp.nan, rewards)
    return turn_credit.by_turn(
        function, rewards, batch["sampled"], batch["group"], turn=batch["turn"], is_rest=is_rest
    )


def _with_returns(c: Correction, rewards: jax.Array, batch: Batch, fields: Batch) -> Batch:
    name, parameters = c.advantage
    if name != "gae":
        return fields
    return fields | {"returns": advantages.gae_returns(
        rewards, batch["sampled"], values=batch["values"],
        gamma=parameters["gamma"], lam=parameters["lam"],
    )}


def fused_fields(logp: jax.Array, entropy: jax.Array) -> Batch:
    """Returns the fields that a score before an update would have given, from the update's own
    log-probs and entropies [B,T], without gradient; see `Correction.recompute_reason`."""
    logp, entropy = jax.lax.stop_gradient((logp, entropy))
    return {"logp_old": logp, "logp_prox": logp, "entropy": entropy}


def _measures(c: Correction, batch: Batch, outputs: loss.MethodOutputs) -> Metrics:
    """Measures a rollout batch [B,T] with its advantages and the outputs of its methods."""
    mask, seg = batch["mask"], batch.get("seg")
    metrics = correction_metrics.gap_metrics(c.weight, outputs, _seen(batch))
    metrics |= correction_metrics.rejection_metrics(c, outputs, mask, seg) | outputs.counts
    metrics |= mismatch.kept_sample_size(outputs.weight, outputs.is_accepted, mask)
    metrics |= batch_metrics.staleness_metrics(batch["version"], batch["current_version"], mask, seg)
    if c.is_batch_normalized:
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = outputs.factor
    if c.kl is not None:
        metrics["actor/kl_to_reference"] = sequence_kl(_kl(c, batch), mask, seg)
    targets, values = batch.get("returns", batch["adv"]), batch.get("values")
    return metrics | batch_metrics.advantage_metrics(batch["adv"], targets, mask, values)


def _kl(c: Correction, batch: Batch) -> jax.Array:
    """Returns the KL to the reference of the weights that sampled, [N,T]."""
    assert c.kl is not None
    return loss.kl_term(batch["logp_old"], batch, c.kl)


def _rewards(c: Correction, batch: Batch) -> jax.Array:
    """Returns the rewards [N] or, if turns are credited, [N,T]. If kl_placement is "reward", they are
    less the KL penalty: of each token [N,T] for turns and for advantages of tokens, else of the
    sequence [N], which a sequence without a token also has."""
    rewards = _credited(c, batch)
    if c.kl is None or c.kl_placement == "loss":
        return rewards
    kl_coeff, sampled = controlled(c, batch).kl_coeff, batch["sampled"]
    kl = _kl(c, batch | {"mask": sampled})
    if rewards.ndim == 1 and not methods.traits("advantage", c.advantage[0]).per_token:
        return rewards - jax.lax.stop_gradient(kl_coeff * ratios.masked_sum(kl, sampled, axis=1))
    return penalized_rewards(rewards, sampled, kl, kl_coeff)


def _credited(c: Correction, batch: Batch) -> jax.Array:
    """Returns the rewards of the sequences [N] or, if turns are credited, of their turns [N,T]: 0
    for a turn without a reward, NaN in all tokens of a sequence of unknown reward."""
    if c.turn_credit == "episode":
        return batch["rewards"]
    is_known = ~jnp.isnan(batch["rewards"])[:, None]
    return jnp.where(is_known, jnp.nan_to_num(batch["turn_rewards"]), jnp.nan)


def loss_spec(c: Correction, batch: Batch) -> loss.LossSpec:
    """Returns the loss of the chosen methods, with the coefficients that controllers have set.

    Tokens rejected at an update, see `Correction.masks_at_update`, stay in every denominator, in the
    KL and in the entropy: their number is known only with the gradient.
    """
    return dataclasses.replace(
        controlled(c, batch),
        rejected_in_denominator=True,  # those that were rejected before are not in the mask
        kl=c.kl if c.kl_placement == "loss" else None,
    )


def check(c: Correction) -> None:
    """Raises ValueError for a parameter that a method refuses, by tracing one step on a tiny
    batch."""
    given, (b, t) = c.advantage[1].get("gdpo_weights"), (2, 3)
    widths = {"vocabulary": 2, "kept": 1, "top": 1, "components": len(given) if given else 1}
    widths |= {"routers": 1, "experts": 1}
    rows = {
        name: jax.ShapeDtypeStruct(shape(name, b, t, widths), field.dtype)
        for name, field in FIELDS.items() if field.source in SCORED
    }
    rows["st_ppo_norm"] = jax.ShapeDtypeStruct((), "float32")

    def step(rows):
        made = rows | credited(c, rows)[0]
        batch = with_key(c, made | weighed(c, made)[0])
        batch |= {"group": jnp.broadcast_to(rows["group"][:, None], (b, t))}
        loss.compute_loss(
            rows["logp_prox"], batch, loss_spec(c, batch), entropy=rows["entropy"], num_tokens=1.0,
            num_seqs=1.0, logp_top=rows["top_logps"] if c.is_centered else None,
            dense_kl=rows["entropy"],
        )

    try:
        jax.eval_shape(step, rows)
    except (TypeError, AssertionError) as error:
        raise ValueError(str(error)) from error
