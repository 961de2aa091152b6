"""The policy loss: ratio -> mask -> weight -> objective -> reduction, with centred scores, and the KL
and entropy terms.

A method is a (name, parameters) pair, see `methods.parse`. The policy that sampled can be used in
two ways.

Decoupled: logp_old is the learner recomputed at the weights that sampled. The objective's ratio
logp - logp_old is the staleness; masks and weight judge the sampler's gap logp_old - logp_behav,
once for the rollout batch. Masks in `masks.AT_UPDATE` hold the policy that is trained: they judge
logp - logp_behav, at every update.

Bypass: for the objective, the KL term and the masks logp_behav takes the place of logp_old and
logp_prox, so the objective's ratio counts the whole drift, once. Masks and weight judge the drift
so far, logp - logp_behav, at every update; a weight with a cap for each factor still sees all four.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import centering, counts, methods, ratios, reduce, weights
from jaxrl_tis.estimators.masks import AT_UPDATE, all_of
from jaxrl_tis.estimators.methods import Method

MODES = ("decoupled", "bypass")


def _field(batch, name, user):
    if name not in batch:
        raise KeyError(f"{user} needs the batch field {name!r}; the batch holds {sorted(batch)}.")
    return batch[name]


def needed(kind: str, name: str, batch: dict[str, chex.Array]) -> dict[str, chex.Array]:
    """The fields that an entry takes by keyword; KeyError names the one that the batch lacks."""
    return {field: _field(batch, field, name) for field in methods.needs(kind, name)}


def weight_level(name: str) -> str:
    """What one weight is of, a key of `weights.RAW`: "seq" and "geo" weights belong to all tokens
    of a sequence, and the others count as "token"."""
    level = name.split("_")[0]
    return level if level in weights.RAW and name != "seq_mask_tis" else "token"


def importance_weights(
    log_ratio: chex.Array,
    batch: dict[str, chex.Array],
    weight: Method,
    is_batch_normalized: bool = False,
) -> tuple[chex.Array, chex.Array]:
    """(w [B,T] without gradient and 0 at padding, the factor it was divided by).

    Args:
      log_ratio: [B,T] log of learner over sampler, nats.
      batch: `mask`, optional `seg`, and what the weight needs.
      weight: name in `weights.WEIGHTS` and its parameters.
      is_batch_normalized: divide by the mean over tokens, or over sequences for sequence weights.
    """
    name, parameters = weight
    mask, seg = batch["mask"], batch["seg"] if "seg" in batch else None
    function = methods.function("weight", name)
    w_bt = function(log_ratio, mask, seg, **needed("weight", name, batch), **parameters)
    if not is_batch_normalized:
        return w_bt, jnp.ones(())
    return weights.batch_normalize(w_bt, mask, weight_level(name), seg)


def weight_counts(
    log_ratio: chex.Array, batch: dict[str, chex.Array], weight: Method
) -> dict[str, chex.Array]:
    """`counts.of_weight`, beside what the weight would be without bounds; {} for "none". Arguments as
    `importance_weights`; its repeated calls are one in a compiled program."""
    name, parameters = weight
    if name == "none":
        return {}
    bounds = methods.parameters("weight", name).keys() & weights.UNBOUNDED.keys()
    free = name, parameters | {bound: weights.UNBOUNDED[bound] for bound in bounds}
    w_bt, raw_bt = (importance_weights(log_ratio, batch, x)[0] for x in (weight, free))
    return counts.of_weight(w_bt, raw_bt, batch["mask"])


def accepted(
    log_ratio: chex.Array, batch: dict[str, chex.Array], masks: tuple[Method, ...]
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """([B,T] bool: the valid tokens that every mask keeps, `counts.of_masks`).

    Args:
      log_ratio: [B,T] log of learner over sampler, nats.
      batch: `mask`, optional `seg`, and what the masks need.
      masks: names in `masks.MASKS` and their parameters.
    """
    seg = batch["seg"] if "seg" in batch else None
    fields = {name: x for name, x in batch.items() if name not in ("mask", "seg")}
    is_accepted_bt, kept = all_of(masks, log_ratio, batch["mask"], seg, **fields)
    return is_accepted_bt, counts.of_masks([name for name, _ in masks], kept, batch["mask"])


def split(
    masks: tuple[Method, ...], mode: str
) -> tuple[tuple[Method, ...], tuple[Method, ...]]:
    """(masks that are judged once for a rollout batch, masks that are judged at every update)."""
    is_live = lambda m: mode == "bypass" or m[0] in AT_UPDATE
    return tuple(m for m in masks if not is_live(m)), tuple(m for m in masks if is_live(m))


def bypassed(batch: dict[str, chex.Array], mode: str) -> dict[str, chex.Array]:
    """The batch with the policy that sampled in the learner's place, in bypass mode."""
    if mode != "bypass" or "logp_behav" not in batch:
        return batch
    return batch | dict.fromkeys(("logp_old", "logp_prox"), batch["logp_behav"])


def _corrected(batch, weight, masks, mode, is_batch_normalized):
    """(weights, accepted tokens [B,T], counts of what is judged here): all, but where the batch
    brings its weights they and the masks that are judged once were before."""
    mask, (once, live) = ratios.as_bool(batch["mask"]), split(masks, mode)
    has_weights = "weights" in batch
    if not live and (has_weights or not masks and weight[0] == "none"):
        return batch["weights"] if has_weights else mask, mask, {}
    behav = _field(batch, "logp_behav", live[0][0] if live else weight[0])

    def log_ratio(learner):
        return ratios.safe_log_ratio(learner, behav, batch["mask"])

    is_accepted_bt, found = accepted(log_ratio(batch["logp"]), bypassed(batch, mode), live)
    if has_weights:
        return batch["weights"], is_accepted_bt, found
    gap_bt = log_ratio(batch["logp"] if mode == "bypass" else batch["logp_old"])
    w_bt, _ = importance_weights(gap_bt, batch, weight, is_batch_normalized)
    is_kept_bt, found_once = accepted(gap_bt, batch, once)
    found |= found_once | weight_counts(gap_bt, batch, weight)
    return w_bt, is_accepted_bt & is_kept_bt, found


def policy_loss(
    logp: chex.Array,
    batch: dict[str, chex.Array],
    *,
    objective: Method,
    weight: Method = ("none", {}),
    masks: tuple[Method, ...] = (),
    mode: str = "decoupled",
    aggregation: str = "token-mean",
    is_batch_normalized: bool = False,
    counts_rejected: bool = False,
    kl: Method | None = None,
    kl_coeff: chex.Numeric = 0.0,
    entropy: chex.Array | None = None,
    entropy_coeff: float = 0.0,
    logp_top: chex.Array | None = None,
    num_tokens: chex.Numeric | None = None,
    num_seqs: chex.Numeric | None = None,
    scale: chex.Numeric | None = None,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """aggregate(w * objective) + kl_coeff * aggregate(kl) - entropy_coeff * aggregate(entropy).

    Args:
      logp: [B,T] log-probs of the sampled tokens under the policy that is trained, nats; the
        gradient flows through it (and through entropy).
      batch: [B,T] arrays. Always `logp_old`, `adv`, `mask`; `seg` for packed rows; `logp_behav`
        with masks or a weight, unless `weights` holds weights that were computed once for the whole
        rollout batch, whose mask then holds the kept tokens, and no mask is of `masks.AT_UPDATE`;
        `logp_ref` with kl; and what the methods need, see `methods.needs`.
      objective: name in `objectives.OBJECTIVES` and its parameters.
      weight: name in `weights.WEIGHTS` and its parameters; multiplies the objective, detached.
      masks: names in `masks.MASKS` and their parameters; a token counts if all of them keep it.
      mode: "decoupled" or "bypass", see the top of the file.
      aggregation: one of `reduce.MODES`, used for all terms.
      is_batch_normalized: divide the weights by their mean over the batch at hand.
      counts_rejected: rejected tokens have weight 0 but stay in the denominators; otherwise they
        leave the mask, and the kept ones weigh more where num_tokens and num_seqs are not given, as
        they do within their sequence in "seq-mean-token-mean". What is rejected beside `weights` of
        the batch always stays.
      kl: name in `kl.KL` and its parameters, or None for no KL term.
      kl_coeff: weight of the KL term per nat.
      entropy: [B,T] entropy of the policy at each token, nats; required if entropy_coeff is not 0.
      entropy_coeff: weight of the entropy bonus per nat.
      logp_top: [B,T,K] log-probs of the tokens `top_ids` under the policy that is trained, nats; the
        gradient flows through it. With it scores are centred, see `centering`: the batch then has
        `tokens`, `top_ids`, `top_logps` and `logp_behav`, and rejected tokens must be counted.
      num_tokens, num_seqs, scale: denominators of the full batch, see `reduce.aggregate`.

    Returns (scalar loss, metrics). With global denominators the loss and the *_loss metrics of
    micro-batches add up to those of the full batch, and so do the counts, see `counts`, of what is
    judged here; the other metrics are means over the tokens at hand; with masks that are judged
    here, actor/rejected_fraction is what they reject. KeyError when the batch lacks a field, by name.
    """
    name, parameters = objective
    batch = batch | {"logp": jax.lax.stop_gradient(logp)}
    seen = bypassed(batch, mode)
    logp_old, adv, mask = (_field(seen, f, name) for f in ("logp_old", "adv", "mask"))
    seg = batch["seg"] if "seg" in batch else None
    w_bt, is_accepted_bt, found = _corrected(batch, weight, masks, mode, is_batch_normalized)
    rejected = ratios.masked_mean(~is_accepted_bt, mask)
    if counts_rejected or "weights" in batch:
        w_bt = jnp.where(is_accepted_bt, w_bt, 0.0)
    else:
        mask = is_accepted_bt
    batch = seen | {"weights": jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))}

    def aggregate(x_bt):
        return reduce.aggregate(
            x_bt, mask, aggregation, num_tokens=num_tokens, num_seqs=num_seqs, seg=seg, scale=scale
        )

    extra = needed("objective", name, batch)
    function = methods.function("objective", name)
    loss_bt, metrics = function(logp, logp_old, adv, mask, seg, **extra, **parameters)
    if "weights" not in extra:  # otherwise the objective has used them
        loss_bt = batch["weights"] * loss_bt
    loss = aggregate(loss_bt)
    metrics = metrics | found | {"actor/pg_loss": loss}
    if logp_top is not None:
        f = centering.rule(weight, masks, objective, mode)
        centered_bt, measured = centering.centered(logp_top, batch, entropy, f)
        loss = loss + aggregate(centered_bt)
        metrics |= measured
    if split(masks, mode)[1]:
        metrics |= {"actor/rejected_fraction": rejected}
    if kl is not None:
        kl_loss = aggregate(kl_term(logp, batch | {"mask": mask}, kl))
        loss = loss + kl_coeff * kl_loss
        metrics |= {"actor/kl_loss": kl_loss, "actor/kl_coef": jnp.asarray(kl_coeff)}
    if entropy_coeff != 0.0:
        if entropy is None:
            raise ValueError(f"entropy_coeff is {entropy_coeff}, so pass entropy [B,T] as well.")
        entropy_loss = aggregate(entropy)
        loss = loss - entropy_coeff * entropy_loss
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
