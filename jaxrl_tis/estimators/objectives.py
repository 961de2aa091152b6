"""Surrogate losses per token with a clipped ratio between the learner and its old policy.

Each entry of `OBJECTIVES` maps (logp, logp_old, adv, mask, seg=None, **parameters) to (loss_bt,
metrics): the loss of each token, 0 at padding, not yet multiplied by importance weights nor
reduced, and verl's metrics as means over the valid tokens. The gradient flows through logp alone;
logp_old must be the policy of the start of the learner's steps and not the current one, or the
ratio is 1 for ever and the clip never acts.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import ratios


def _clipped_surrogate(logp, logp_old, adv, mask, clip_low, clip_high):
    """PPO's pessimistic loss [B, T], the advantage used, and the metrics."""
    chex.assert_rank(adv, 2)
    chex.assert_equal_shape([logp, logp_old, adv, mask])
    log_ratio_bt = ratios.safe_log_ratio(logp, jax.lax.stop_gradient(logp_old), mask)
    log_ratio_bt = ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    ratio_bt = jnp.exp(log_ratio_bt)
    adv_bt = jax.lax.stop_gradient(ratios.zero_padding(adv, mask))
    unclipped_bt = -adv_bt * ratio_bt
    clipped_bt = -adv_bt * ratios.clamp(ratio_bt, 1.0 - clip_low, 1.0 + clip_high)
    metrics = {
        "actor/pg_clipfrac": ratios.masked_mean(clipped_bt > unclipped_bt, mask),
        "actor/ppo_kl": ratios.masked_mean(-log_ratio_bt, mask),
    }
    return jnp.maximum(unclipped_bt, clipped_bt), adv_bt, jax.lax.stop_gradient(metrics)


def ppo_clip(
    logp: chex.Array,
    logp_old: chex.Array,
    adv: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    clip_low: chex.Numeric = 0.2,
    clip_high: chex.Numeric = 0.2,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """PPO-clip (arXiv:1707.06347), l = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    r = exp(logp - logp_old). The log-ratio is clamped to +-20 first. At r = 1 the gradient is -A;
    it is 0 where A > 0 and r > 1 + clip_high, and where A < 0 and r < 1 - clip_low. For A < 0 the
    loss grows without bound in r; `dual_clip` bounds it.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats; the only input with a gradient.
      logp_old: [B, T] log-probs of the centre of the trust region, nats.
      adv: [B, T] advantages.
      mask: [B, T] valid tokens.
      seg: not used, tokens are independent.
      clip_low: width of the band below 1; 0.2 as in the paper.
      clip_high: width above 1; 0.2 as in the paper, 0.28 in DAPO's clip-higher (arXiv:2503.14476).

    Returns (loss_bt [B, T], {"actor/pg_clipfrac": fraction of tokens on the clipped branch,
    "actor/ppo_kl": mean of logp_old - logp in nats}).
    """
    del seg
    loss_bt, _, metrics = _clipped_surrogate(logp, logp_old, adv, mask, clip_low, clip_high)
    return loss_bt, metrics


def dual_clip_ppo(
    logp: chex.Array,
    logp_old: chex.Array,
    adv: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    clip_low: chex.Numeric = 0.2,
    clip_high: chex.Numeric = 0.2,
    dual_clip: float = 3.0,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """Dual-clip PPO (arXiv:1912.09729): PPO-clip, and for A < 0 at most -dual_clip A.

    For A < 0, l = min(-dual_clip A, l_ppo), so the gradient is 0 where r > dual_clip too; for A >=
    0 it is PPO-clip.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats; the only input with a gradient.
      logp_old: [B, T] log-probs of the centre of the trust region, nats.
      adv: [B, T] advantages.
      mask: [B, T] valid tokens.
      seg: not used, tokens are independent.
      clip_low: width of the band below 1.
      clip_high: width of the band above 1.
      dual_clip: largest ratio at a negative advantage, > 1; 3.0 as in the paper and in verl.

    Returns (loss_bt [B, T], the metrics of `ppo_clip` and "actor/pg_clipfrac_lower": fraction of
    tokens at the bound).
    """
    del seg
    if dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds ratios from above: give it > 1.")
    pessimistic_bt, adv_bt, metrics = _clipped_surrogate(
        logp, logp_old, adv, mask, clip_low, clip_high
    )
    bound_bt = -adv_bt * dual_clip
    is_bounded_bt = (adv_bt < 0) & (pessimistic_bt > bound_bt)
    loss_bt = jnp.where(adv_bt < 0, jnp.minimum(bound_bt, pessimistic_bt), pessimistic_bt)
    return loss_bt, metrics | {"actor/pg_clipfrac_lower": ratios.masked_mean(is_bounded_bt, mask)}


def value_loss(
    values: chex.Array,
    values_old: chex.Array,
    returns: chex.Array,
    mask: chex.Array,
    clip: chex.Numeric = 0.5,
) -> tuple[chex.Array, dict[str, chex.Array]]:
    """Clipped value loss beside PPO (arXiv:1707.06347; its clip is from the authors' code).

    l = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2.

    Args:
      values: [B, T] value of the prefix before each token; the only input with a gradient.
      values_old: [B, T] values at the time of the rollout.
      returns: [B, T] targets G.
      mask: [B, T] valid tokens.
      clip: largest move of a value that is still rewarded, in reward units; 0.5 is verl's default.

    Returns (loss_bt [B, T], 0 at padding, {"critic/vf_clipfrac": fraction of tokens on the clipped
    branch}).
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, values_old, returns, mask])
    values_bt = ratios.zero_padding(values, mask)
    old_bt = jax.lax.stop_gradient(ratios.zero_padding(values_old, mask))
    returns_bt = jax.lax.stop_gradient(ratios.zero_padding(returns, mask))
    unclipped_bt = jnp.square(values_bt - returns_bt)
    clipped_bt = jnp.square(ratios.clamp(values_bt, old_bt - clip, old_bt + clip) - returns_bt)
    metrics = {"critic/vf_clipfrac": ratios.masked_mean(clipped_bt > unclipped_bt, mask)}
    return 0.5 * jnp.maximum(unclipped_bt, clipped_bt), metrics


OBJECTIVES = {"ppo": ppo_clip, "dual_clip": dual_clip_ppo}
