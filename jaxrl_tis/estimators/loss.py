"""The policy loss: ratio, weight, objective, reduction, and the KL and entropy terms.

A method is chosen by a (name, parameters) pair, e.g. `("token_tis", {"cap": 2.0})`. The policy that
sampled can be used in two ways.

Decoupled: logp_old is the learner recomputed at the weights that sampled. The objective's ratio
logp - logp_old is the staleness, and a weight from logp_old - logp_behav, fixed for the rollout
batch, corrects the sampler's gap.

Bypass: the caller sets logp_old = logp_behav and the weight "none". The objective's ratio counts
the whole drift, once.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import kl as kl_estimators
from jaxrl_tis.estimators import objectives
from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators import reduce
from jaxrl_tis.estimators import weights

Method = tuple[str, dict]


def _entry(table, name, kind):
    if name not in table:
        raise ValueError(f"Unknown {kind} {name!r}; choose one of {', '.join(table)}.")
    return table[name]


def _field(batch, name, user):
    if name not in batch:
        raise KeyError(f"{user} needs the batch field {name!r}; the batch holds {sorted(batch)}.")
    return batch[name]


def importance_weights(batch: dict[str, chex.Array], weight: Method) -> chex.Array:
    """The weights of a rollout batch, from logp_old - logp_behav.

    Args:
      batch: `logp_old`, `mask`, optional `seg`, and `logp_behav` unless the weight is "none"; [B,
        T] each.
      weight: name in `weights.WEIGHTS` and its parameters.

    Returns w [B, T], 0 at padding, without gradient.
    """
    name, parameters = weight
    function = _entry(weights.WEIGHTS, name, "weight")
    logp_old, mask = (_field(batch, field, name) for field in ("logp_old", "mask"))
    logp_behav = logp_old if name == "none" else _field(batch, "logp_behav", name)
    log_ratio_bt = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    return function(log_ratio_bt, mask, batch["seg"] if "seg" in batch else None, **parameters)


def policy_loss(
    logp: chex.Array,
    batch: dict[str, chex.Array],
    *,
    weight: Method,
    objective: Method,
    aggregation: str,
    kl: Method | None = None,
    kl_coeff: float = 0.0,
    entropy: chex.Array | None = None,
    entropy_coeff: float = 0.0,
    num_tokens: chex.Numeric | None = None,
    num_seqs: chex.Numeric | None = None,
    scale: chex.Numeric | None = None,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """aggregate(w * objective) + kl_coeff * aggregate(kl) - entropy_coeff * aggregate(entropy).

    Args:
      logp: [B, T] log-probs of the sampled tokens under the policy that is trained, nats; the
        gradient flows through it (and through entropy).
      batch: [B, T] arrays. Always `logp_old`, `adv`, `mask`; `logp_behav` for a weight other than
        "none", unless `weights` holds the weights computed once for the whole rollout batch (needed
        when they are batch-normalised); `logp_ref` with kl; `seg` for packed rows.
      weight: name in `weights.WEIGHTS` and its parameters.
      objective: name in `objectives.OBJECTIVES` and its parameters.
      aggregation: one of `reduce.MODES`, used for all terms.
      kl: name in `kl.KL` and its parameters, or None for no KL term.
      kl_coeff: weight of the KL term per nat.
      entropy: [B, T] entropy of the policy at each token, nats; required if entropy_coeff is not 0.
      entropy_coeff: weight of the entropy bonus per nat.
      num_tokens, num_seqs, scale: denominators of the full batch, see `reduce.aggregate`.

    Returns (scalar loss, metrics). With global denominators the loss and the *_loss metrics of
    micro-batches add up to those of the full batch; the other metrics are means over the tokens at
    hand.
    """
    seg = batch["seg"] if "seg" in batch else None
    objective_name, objective_parameters = objective
    function = _entry(objectives.OBJECTIVES, objective_name, "objective")
    logp_old, adv, mask = (_field(batch, f, objective_name) for f in ("logp_old", "adv", "mask"))

    def aggregate(x_bt):
        return reduce.aggregate(
            x_bt, mask, aggregation, num_tokens=num_tokens, num_seqs=num_seqs, seg=seg, scale=scale
        )

    w_bt = batch["weights"] if "weights" in batch else importance_weights(batch, weight)
    w_bt = jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))
    loss_bt, metrics = function(logp, logp_old, adv, mask, seg, **objective_parameters)
    loss = aggregate(w_bt * loss_bt)
    metrics = metrics | {"actor/pg_loss": loss}

    if kl is not None:
        kl_name, kl_parameters = kl
        logp_ref = _field(batch, "logp_ref", kl_name)
        kl_bt = _entry(kl_estimators.KL, kl_name, "KL estimator")(
            ratios.zero_padding(logp, mask), ratios.zero_padding(logp_ref, mask), **kl_parameters
        )
        kl_loss = aggregate(kl_bt)
        loss = loss + kl_coeff * kl_loss
        metrics |= {"actor/kl_loss": kl_loss, "actor/kl_coef": jnp.asarray(kl_coeff)}
    if entropy_coeff != 0.0:
        if entropy is None:
            raise ValueError(f"entropy_coeff is {entropy_coeff}, so pass entropy [B, T] as well.")
        entropy_loss = aggregate(entropy)
        loss = loss - entropy_coeff * entropy_loss
        metrics |= {"actor/entropy_loss": entropy_loss}
    return loss, jax.lax.stop_gradient(metrics)
