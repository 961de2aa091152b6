"""The policy loss: ratio -> mask -> weight -> objective -> reduction, centred scores, KL, entropy.

The ratio of the policy that is trained to the sampler has three factors, and each has a place:

    logp_old - logp_behav    engine        `weight`
    logp_prox - logp_old     staleness     `staleness_weight`
    logp - logp_prox         trust region  the ratio of the objective, around its `centre`

Weights are detached and computed once for a rollout batch, by `apply_methods` alone. The centre says
how much of the ratio the objective takes:

  old    logp - logp_old, the learner recomputed at the weights that sampled: staleness, too.
  prox   logp - logp_prox, the learner at the start of the update: the trust region alone.
  behav  logp - logp_behav, the sampler (bypass): all of it, once. logp_behav takes the place of
         logp_old and logp_prox for the objective, the KL term and the masks; a weight, for an
         objective without a ratio, is of logp - logp_behav at every update.

A folded weight is one weight of engine and staleness, of logp_prox - logp_behav. A mask judges what
the weight sees, or the factor that its parameter `of` names, see `RATIOS`. Masks with the trait
`at_update`, and those of "policy", bound the policy that is trained: they see logp - logp_behav at
every update. A method is a (name, parameters) pair, see `methods.parse`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import centering, counts, methods, ratios, reduce, weights
from jaxrl_tis.estimators.masks import all_of
from jaxrl_tis.estimators.methods import Method

CENTRES = {"old": "logp_old", "prox": "logp_prox", "behav": "logp_behav"}
# What a weight or a mask sees: the log-ratio of two fields.
RATIOS = {
    "engine": ("logp_old", "logp_behav"), "staleness": ("logp_prox", "logp_old"),
    "folded": ("logp_prox", "logp_behav"), "policy": ("logp", "logp_behav"),
}
NO_WEIGHT: Method = ("none", {})
FOLDED: Method = ("folded", {})  # the weight is of engine and staleness


class MethodOutputs(NamedTuple):
    """The results of the weight and the masks for a batch; arrays are [B,T] and have no gradient.

    Attributes:
      log_ratio: what the weight saw, nats.
      engine: the weights of `weight`, 0 at padding; rejected tokens have theirs, too.
      weight: these times those of `staleness_weight`, as the loss uses them.
      factor: scalar that the weights were divided by, 1 without batch normalisation.
      is_accepted: bool, the valid tokens that every mask keeps.
      judged: {one of `RATIOS`: what masks saw, nats}.
      counts: integers that add up over micro-batches, see `counts`.
    """

    log_ratio: chex.Array
    engine: chex.Array
    weight: chex.Array
    factor: chex.Array
    is_accepted: chex.Array
    judged: dict[str, chex.Array]
    counts: dict[str, chex.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The methods and coefficients of a policy loss.

    Attributes:
      objective: name in `objectives.OBJECTIVES`, with its parameters.
      weight: name in `weights.WEIGHTS`; multiplies the objective, detached.
      staleness_weight: another one, of the factor staleness; or `FOLDED`.
      masks: names in `masks.MASKS`; a token counts if all of them keep it.
      centre: one of `CENTRES`, see the top of the file.
      aggregation: one of `reduce.MODES`, used for all terms but the cross-entropy.
      is_batch_normalized: divide the weights by their mean over the tokens of the batch at hand, or
        over its sequences if no weight is of tokens.
      rejected_in_denominator: rejected tokens have weight 0 but stay in the denominators. Otherwise
        they leave the mask, and the kept ones weigh more where num_tokens and num_seqs are not
        given, as they do within their sequence in "seq-mean-token-mean". With the batch field
        `weights` they always stay.
      kl: name in `kl.KL`, or None for no KL term.
      kl_coeff: weight of the KL term per nat.
      sampler_kl_coeff: weight of the KL to the sampler, k2 = (logp - logp_behav)^2 / 2, on all
        tokens of the mask, rejected ones too. It is twice prime-rl's kl_tau.
      dense_kl_coeff: weight per nat of the KL of the policy with all keys to the one with the
        sampler's (Shadow Mask, arXiv:2605.06850, there 0.1).
      entropy_coeff: weight of the entropy bonus per nat.
      environment_ce_coeff: weight of the cross-entropy on the tokens of `environment`, whose
        log-probs are in `logp`, too (ECHO, arXiv:2605.24517). It is a mean over all these tokens, as
        in prime-rl. rLLM averages within each episode first.
      scale: see `reduce.aggregate`.
    """

    objective: Method
    weight: Method = NO_WEIGHT
    staleness_weight: Method = NO_WEIGHT
    masks: tuple[Method, ...] = ()
    centre: str = "old"
    aggregation: str = "token-mean"
    is_batch_normalized: bool = False
    rejected_in_denominator: bool = False
    kl: Method | None = None
    kl_coeff: chex.Numeric = 0.0
    sampler_kl_coeff: float = 0.0
    dense_kl_coeff: float = 0.0
    entropy_coeff: float = 0.0
    environment_ce_coeff: float = 0.0
    scale: chex.Numeric | None = None

    def __post_init__(self):
        if self.centre not in CENTRES:
            raise ValueError(f"centre is {self.centre!r}; choose one of {', '.join(CENTRES)}")

    @property
    def gap(self) -> str:
        """Which of `RATIOS` weight and masks see of a rollout batch."""
        return "folded" if self.staleness_weight == FOLDED else "engine"

    @property
    def gap_at_update(self) -> str:
        """Which of `RATIOS` the weight of an update sees: the policy's, if the sampler is the centre."""
        return "policy" if self.is_bypassed else self.gap

    @property
    def is_bypassed(self) -> bool:
        """Whether the sampler is the centre."""
        return self.centre == "behav"

    @property
    def weighs_staleness(self) -> bool:
        """Whether the factor staleness has a weight of its own."""
        return self.staleness_weight not in (NO_WEIGHT, FOLDED)

    def seen(self, mask: Method) -> str:
        """Which of `RATIOS` a mask sees."""
        name, parameters = mask
        if "of" in parameters:
            return parameters["of"]
        is_live = self.is_bypassed or methods.traits("mask", name).at_update
        return "policy" if is_live else self.gap

    @property
    def masks_before(self) -> tuple[Method, ...]:
        """The masks that are applied once for a rollout batch."""
        return tuple(m for m in self.masks if self.seen(m) != "policy")

    @property
    def masks_at_update(self) -> tuple[Method, ...]:
        """The masks that are applied at every update."""
        return tuple(m for m in self.masks if self.seen(m) == "policy")


def staleness_weight(text: str) -> Method:
    """Reads the weight of the factor staleness: a weight of the table, or "folded"."""
    return FOLDED if text == "folded" else methods.parse("weight", text)


def _field(batch, name, user):
    if name not in batch:
        raise KeyError(f"{user} needs the batch field {name!r}; the batch holds {sorted(batch)}.")
    return batch[name]


def needed(kind: str, name: str, batch: dict[str, chex.Array]) -> dict[str, chex.Array]:
    """Returns the keyword fields of an entry from the batch; KeyError names a missing one."""
    return {field: _field(batch, field, name) for field in methods.needs(kind, name)}


def importance_weights(
    log_ratio: chex.Array, batch: dict[str, chex.Array], weight: Method
) -> chex.Array:
    """The weights [B,T] of a method, without gradient and 0 at padding.

    Args:
      log_ratio: [B,T] log of learner over sampler, nats.
      batch: `mask`, optional `seg`, and the fields that the weight needs.
      weight: name in `weights.WEIGHTS` and its parameters.
    """
    name, parameters = weight
    function, extra = methods.function("weight", name), needed("weight", name, batch)
    return function(log_ratio, batch["mask"], batch.get("seg"), **extra, **parameters)


def weight_counts(
    log_ratio: chex.Array, batch: dict[str, chex.Array], weight: Method, of: str = "weight"
) -> dict[str, chex.Array]:
    """`counts.of_weight`, compared with the weight without bounds; {} for "none".

    Arguments as `importance_weights`; its repeated calls are one in a compiled program.
    """
    if weight[0] == "none":
        return {}
    return counts.of_weight(*with_and_without_bounds(log_ratio, batch, weight), batch["mask"], of)


def with_and_without_bounds(
    log_ratio: chex.Array, batch: dict[str, chex.Array], weight: Method
) -> tuple[chex.Array, chex.Array]:
    """The weights [B,T] of `importance_weights`, and what they are without caps, bands and floors."""
    name, parameters = weight
    neutral = {**weights.UNBOUNDED, **methods.traits("weight", name).unbounded}
    free = name, {key: neutral.get(key, value) for key, value in parameters.items()}
    w_bt, raw_bt = (importance_weights(log_ratio, batch, x) for x in (weight, free))
    return w_bt, raw_bt


def accepted(
    log_ratios: Sequence[chex.Array], batch: dict[str, chex.Array], masks: tuple[Method, ...]
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """([B,T] bool: the valid tokens that every mask keeps, `counts.of_masks`).

    Args:
      log_ratios: [B,T] each, what each mask sees, nats.
      batch: `mask`, optional `seg`, and the fields that the masks need.
      masks: names in `masks.MASKS` and their parameters.
    """
    seg = batch.get("seg")
    fields = {name: x for name, x in batch.items() if name not in ("mask", "seg")}
    is_accepted_bt, kept = ratios.as_bool(batch["mask"]), []
    for (name, parameters), seen_bt in zip(masks, log_ratios, strict=True):
        kept_bt, _ = all_of(((name, methods.own(parameters)),), seen_bt, batch["mask"], seg, **fields)
        kept.append(kept_bt)
        is_accepted_bt &= kept_bt
    return is_accepted_bt, counts.of_masks([name for name, _ in masks], kept, batch["mask"])


def bypassed(batch: dict[str, chex.Array], centre: str) -> dict[str, chex.Array]:
    """Returns the batch with logp_behav in the place of logp_old and logp_prox, if it is the centre."""
    if centre != "behav" or "logp_behav" not in batch:
        return batch
    return batch | dict.fromkeys(("logp_old", "logp_prox"), batch["logp_behav"])


def apply_methods(
    batch: dict[str, chex.Array], spec: LossSpec, masks: tuple[Method, ...], gap: str | None = None
) -> MethodOutputs:
    """Computes the weight of each token and the tokens that the masks accept.

    Args:
      batch: `mask`, the log-probs of `RATIOS` that are seen, optional `seg`, and the fields of the
        methods.
      spec: its weights are computed.
      masks: of the spec, those to apply.
      gap: which of `RATIOS` the weight, and masks of the policy, see; None for that of the spec.
    """
    gap, user = gap or spec.gap, spec.weight[0]
    log_ratio = _log_ratio(batch, gap, user)
    engine_bt = importance_weights(log_ratio, batch, spec.weight)
    w_bt, level = engine_bt, methods.traits("weight", user).level
    method_counts = weight_counts(log_ratio, batch, spec.weight)
    if spec.weighs_staleness:
        stale_bt = _log_ratio(batch, "staleness", spec.staleness_weight[0])
        w_bt = w_bt * importance_weights(stale_bt, batch, spec.staleness_weight)
        method_counts |= weight_counts(stale_bt, batch, spec.staleness_weight, "staleness_weight")
        levels = [methods.traits("weight", name).level
                  for name, _ in (spec.weight, spec.staleness_weight) if name != "none"]
        level = "token" if "token" in levels else levels[0]
    factor = jnp.ones(())
    if spec.is_batch_normalized:
        w_bt, factor = weights.batch_normalize(w_bt, batch["mask"], level, batch.get("seg"))

    judged = {
        of: log_ratio if of in (gap, "policy") else _log_ratio(batch, of, m[0])
        for m in masks for of in (spec.seen(m),)
    }
    is_accepted_bt, of_masks = accepted([judged[spec.seen(m)] for m in masks], batch, masks)
    return MethodOutputs(
        log_ratio, engine_bt, w_bt, factor, is_accepted_bt, judged, of_masks | method_counts
    )


def _log_ratio(batch, ratio, user):
    learner, sampler = (_field(batch, name, user) for name in RATIOS[ratio])
    return ratios.safe_log_ratio(learner, sampler, batch["mask"])


def _apply_at_update(batch, spec):
    """Returns (weights, accepted tokens, metrics) at an update. If the batch has `weights`, only the
    masks of the update are applied."""
    mask, once, live = ratios.as_bool(batch["mask"]), spec.masks_before, spec.masks_at_update
    w_bt, is_accepted_bt, metrics = mask, mask, {}
    if live:
        drift_bt = _log_ratio(batch, "policy", live[0][0])
        seen = bypassed(batch, spec.centre)
        is_accepted_bt, metrics = accepted([drift_bt] * len(live), seen, live)
        metrics["actor/rejected_fraction"] = ratios.masked_mean(~is_accepted_bt, batch["mask"])
    if "weights" in batch:
        return batch["weights"], is_accepted_bt, metrics
    if once or spec.weight != NO_WEIGHT or spec.weighs_staleness:
        outputs = apply_methods(batch, spec, once, spec.gap_at_update)
        w_bt, is_accepted_bt = outputs.weight, is_accepted_bt & outputs.is_accepted
        metrics |= outputs.counts
    return w_bt, is_accepted_bt, metrics


def policy_loss(
    logp: chex.Array, batch: dict[str, chex.Array], *, entropy: chex.Array | None = None,
    logp_top: chex.Array | None = None, dense_kl: chex.Array | None = None,
    num_tokens: chex.Numeric | None = None, num_seqs: chex.Numeric | None = None, **spec: Any,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """aggregate(w * objective) + kl_coeff * aggregate(kl) + sampler_kl_coeff * aggregate(k2)
    + dense_kl_coeff * aggregate(dense_kl) - entropy_coeff * aggregate(entropy)
    + environment_ce_coeff * mean(-logp of the environment).

    `spec` are the fields of `LossSpec`, of which `objective` is required. A method is text as in a
    config, "token_tis(cap=2.0)", or a pair ("token_tis", {"cap": 2.0}); masks in text are joined by
    "&".

    Args:
      logp: [B,T] log-probs of the sampled tokens under the policy that is trained, nats; the
        gradient flows through it (and through entropy, logp_top and dense_kl).
      batch: [B,T] arrays. Always `logp_old`, `adv`, `mask`; `seg` for packed rows; `logp_behav`
        with a weight or masks; `logp_ref` with kl; and the fields of `methods.needs`. `weights`
        replaces `weight` and the masks of the gap by what was computed once for the rollout batch.
        `environment` [B,T] bool with environment_ce_coeff: the tokens that an environment wrote,
        none of them in `mask`.
        `group` with "prompt-mean", and `prompt_divisor` of the full batch, see `reduce.aggregate`.
      entropy: [B,T] entropy of the policy at each token, nats; required if entropy_coeff is not 0.
      logp_top: [B,T,K] log-probs of the tokens `top_ids` under the policy that is trained, nats.
        With it scores are centred, see `centering`: the batch then has `tokens`, `top_ids`,
        `top_logps` and `logp_behav`, and rejected tokens must be counted.
      dense_kl: [B,T] KL of the policy with all keys to the one with the sampler's, nats; required if
        dense_kl_coeff is not 0.
      num_tokens, num_seqs: denominators of the full batch, see `reduce.aggregate`.

    Returns (scalar loss, metrics). With global denominators the loss and the *_loss metrics of
    micro-batches add up to those of the full batch, and so do the counts, see `counts`. The other
    metrics are means over the tokens at hand.

    Raises:
      KeyError: the batch lacks a field.
      TypeError: `spec` has a field that `LossSpec` does not have.
      ValueError: a method or the centre is unknown.
    """
    for kind in ("objective", "weight", "kl"):
        if isinstance(spec.get(kind), str):
            spec[kind] = methods.parse(kind, spec[kind])
    if isinstance(spec.get("staleness_weight"), str):
        spec["staleness_weight"] = staleness_weight(spec["staleness_weight"])
    if isinstance(spec.get("masks"), str):
        spec["masks"] = methods.parse_all("mask", spec["masks"])
    return compute_loss(
        logp, batch, LossSpec(**spec), entropy=entropy, logp_top=logp_top, dense_kl=dense_kl,
        num_tokens=num_tokens, num_seqs=num_seqs,
    )


def compute_loss(
    logp: chex.Array, batch: dict[str, chex.Array], spec: LossSpec, *,
    entropy: chex.Array | None = None, logp_top: chex.Array | None = None,
    dense_kl: chex.Array | None = None, num_tokens: chex.Numeric | None = None,
    num_seqs: chex.Numeric | None = None,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """Computes `policy_loss` for a `LossSpec`; the other arguments are those of `policy_loss`."""
    name, parameters = spec.objective
    batch = batch | {"logp": jax.lax.stop_gradient(logp)}
    seen = bypassed(batch, spec.centre)
    centre, adv, mask = (_field(seen, f, name) for f in (CENTRES[spec.centre], "adv", "mask"))
    seg = batch.get("seg")
    w_bt, is_accepted_bt, method_counts = _apply_at_update(batch, spec)
    trained_bt = mask
    if spec.rejected_in_denominator or "weights" in batch:
        w_bt = jnp.where(is_accepted_bt, w_bt, 0.0)
    else:
        mask = is_accepted_bt
    batch = seen | {"weights": jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))}

    def aggregate(x_bt, mask_bt):
        return reduce.aggregate(
            x_bt, mask_bt, spec.aggregation, num_tokens=num_tokens, num_seqs=num_seqs, seg=seg,
            scale=spec.scale, group=batch.get("group"), divisor=batch.get("prompt_divisor"),
        )

    extra = needed("objective", name, batch)
    function = methods.function("objective", name)
    loss_bt, metrics = function(logp, centre, adv, mask, seg, **extra, **parameters)
    if "weights" not in extra:  # otherwise the objective has used them
        loss_bt = batch["weights"] * loss_bt
    loss = aggregate(loss_bt, mask)
    metrics = metrics | method_counts | {"actor/pg_loss": loss}
    if logp_top is not None:
        f = centering.rule(spec.weight, spec.masks, spec.objective, spec.centre)
        centered_bt, measured = centering.centered(logp_top, batch, entropy, f)
        loss = loss + aggregate(centered_bt, mask)
        metrics |= measured
    if spec.kl is not None:
        kl_loss = aggregate(kl_term(logp, batch | {"mask": mask}, spec.kl), mask)
        loss = loss + spec.kl_coeff * kl_loss
        metrics |= {"actor/kl_loss": kl_loss, "actor/kl_coef": jnp.asarray(spec.kl_coeff)}
    if spec.sampler_kl_coeff != 0.0:
        behav_bt = _field(batch, "logp_behav", "sampler_kl_coeff")
        gap_bt = ratios.safe_log_ratio(logp, jax.lax.stop_gradient(behav_bt), trained_bt)
        sampler_kl_loss = aggregate(0.5 * jnp.square(gap_bt), trained_bt)
        loss = loss + spec.sampler_kl_coeff * sampler_kl_loss
        metrics |= {"actor/sampler_kl_loss": sampler_kl_loss}
    if spec.dense_kl_coeff != 0.0:
        if dense_kl is None:
            raise ValueError(f"dense_kl_coeff is {spec.dense_kl_coeff}, so pass dense_kl [B,T] too.")
        dense_kl_loss = aggregate(dense_kl, mask)
        loss = loss + spec.dense_kl_coeff * dense_kl_loss
        metrics |= {"actor/dense_kl_loss": dense_kl_loss}
    if spec.environment_ce_coeff != 0.0:
        given_bt = _field(batch, "environment", "environment_ce_coeff")
        count = batch["num_environment_tokens"][0] if "num_environment_tokens" in batch else None
        ce_loss = -reduce.aggregate(logp, given_bt, "token-mean", num_tokens=count)
        loss = loss + spec.environment_ce_coeff * ce_loss
        metrics |= {"actor/environment_ce_loss": ce_loss}
    if spec.entropy_coeff != 0.0:
        if entropy is None:
            raise ValueError(f"entropy_coeff is {spec.entropy_coeff}, so pass entropy [B,T] too.")
        entropy_loss = aggregate(entropy, mask)
        loss = loss - spec.entropy_coeff * entropy_loss
        metrics |= {"actor/entropy_loss": entropy_loss}
    return loss, jax.lax.stop_gradient(metrics)


def kl_term(logp: chex.Array, batch: dict[str, chex.Array], kl: Method) -> chex.Array:
    """[B,T] KL to the reference at each valid token, 0 elsewhere; needs `logp_ref` and `mask`."""
    name, parameters = kl
    mask_bt = ratios.as_bool(batch["mask"])

    def padded(x):  # [B,T] or [B,T,V]
        return ratios.zero_padding(x, mask_bt.reshape(mask_bt.shape + (1,) * (x.ndim - 2)))

    extra = {field: padded(x) for field, x in needed("kl", name, batch).items()}
    function = methods.function("kl", name)
    return function(
        padded(logp), padded(_field(batch, "logp_ref", name)), **extra, **parameters
    )
