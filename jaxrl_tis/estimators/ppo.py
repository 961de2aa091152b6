"""Clipped surrogates of token ratios: PPO and variants with another band, another anchor or another
set of clipped tokens.

`objectives` describes the shared arguments (logp, logp_old, adv, mask, seg) and the result.
r = exp(logp - logp_old), with the log-ratio clamped to +-20 first. `ppo_clip` with clip_high = 0.28
is DAPO's clip-higher (arXiv:2503.14476). With logp_old = logp_behav and weight "none" it is PPO-IS,
where the sampler is the only old policy; a weight would count the gap twice.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric, PRNGKey

from jaxrl_tis.estimators import rank_masks, ratios
from jaxrl_tis.estimators.traits import Traits

Loss = tuple[Array, dict[str, Array]]


def token_inputs(logp: Array, logp_old: Array, adv: Array, mask: Array) -> tuple[Array, Array]:
    """(logp - logp_old, adv) [B, T], 0 at padding; the gradient flows through logp alone.

    The log-ratio is not clamped.
    """
    chex.assert_rank(adv, 2)
    chex.assert_equal_shape([logp, logp_old, adv, mask])
    log_ratio_bt = ratios.safe_log_ratio(logp, jax.lax.stop_gradient(logp_old), mask)
    return log_ratio_bt, jax.lax.stop_gradient(ratios.zero_padding(adv, mask))


def pessimistic(ratio_bt: Array, adv_bt: Array, low: Numeric, high: Numeric) -> tuple[Array, Array]:
    """max(-r A, -clip(r, low, high) A) and whether the clipped branch is the larger, [B, T]."""
    unclipped_bt = -adv_bt * ratio_bt
    clipped_bt = -adv_bt * ratios.clamp(ratio_bt, low, high)
    return jnp.maximum(unclipped_bt, clipped_bt), clipped_bt > unclipped_bt


def clip_metrics(log_ratio_bt: Array, is_clipped_bt: Array, mask: Array) -> dict[str, Array]:
    """verl's actor/pg_clipfrac and actor/ppo_kl, without gradient."""
    return {
        "actor/pg_clipfrac": ratios.masked_mean(is_clipped_bt, mask),
        "actor/ppo_kl": jax.lax.stop_gradient(ratios.masked_mean(-log_ratio_bt, mask)),
    }


def _surrogate(log_ratio_bt, adv_bt, mask, low, high):
    """PPO's loss with the band [low, high], and its metrics."""
    log_ratio_bt = ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    loss_bt, is_clipped_bt = pessimistic(jnp.exp(log_ratio_bt), adv_bt, low, high)
    return loss_bt, clip_metrics(log_ratio_bt, is_clipped_bt, mask)


@Traits(centering="one")
def ppo_clip(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> Loss:
    """PPO-clip (arXiv:1707.06347; DAPO's clip-higher, arXiv:2503.14476), l = max(-r A, -clip(r, 1 -
    clip_low, 1 + clip_high) A). Aggregation: token-mean in verl, seq-mean-token-mean in GRPO.

    Unit: token. Trust region: r within [1 - clip_low, 1 + clip_high], one-sided. Gradient: through
    r; 0 where A > 0 and r > 1 + clip_high, and where A < 0 and r < 1 - clip_low. Use: a few updates
    per batch; unbounded in r for A < 0, and rare tokens meet the clip first.

    Args:
      clip_low: width of the band below 1; 0.2 as in the paper.
      clip_high: width above 1; 0.2 as in the paper, 0.28 in DAPO's clip-higher (arXiv:2503.14476).

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    del seg
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    return _surrogate(log_ratio_bt, adv_bt, mask, 1.0 - clip_low, 1.0 + clip_high)


@Traits(centering="one")
def dual_clip_ppo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 0.2, clip_high: Numeric = 0.2, dual_clip: float = 3.0,
) -> Loss:
    """Dual-clip PPO (arXiv:1912.09729): PPO-clip, and for A < 0 l = min(-dual_clip A, l_ppo).

    The two-sided clip of INTELLECT-2 (arXiv:2505.07291) is the same loss with dual_clip = 4.

    Unit: token. Trust region: that of `ppo`, and r <= dual_clip where A < 0. Gradient: as `ppo`,
    and 0 where A < 0 and r > dual_clip. Use: verl's default, against bad tokens whose ratio
    explodes.

    Args:
      clip_low: width of the band below 1.
      clip_high: width of the band above 1.
      dual_clip: largest ratio at a negative advantage, > 1; 3.0 as in the paper and in verl,
        4.0 in INTELLECT-2 (`delta` in TRL).

    Returns loss_bt, the metrics of `ppo_clip` and "actor/pg_clipfrac_lower": fraction of tokens at
    the bound.
    """
    del seg
    if dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds ratios from above: give it > 1.")
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    pessimistic_bt, metrics = _surrogate(
        log_ratio_bt, adv_bt, mask, 1.0 - clip_low, 1.0 + clip_high
    )
    bound_bt = -adv_bt * dual_clip
    is_bounded_bt = (adv_bt < 0) & (pessimistic_bt > bound_bt)
    loss_bt = jnp.where(adv_bt < 0, jnp.minimum(bound_bt, pessimistic_bt), pessimistic_bt)
    return loss_bt, metrics | {"actor/pg_clipfrac_lower": ratios.masked_mean(is_bounded_bt, mask)}


def _around(logp, logp_prox, logp_behav, adv, mask, clip_low, clip_high, upper):
    """sg(pi_prox / mu) times PPO-clip around pi_prox; weights above `upper` are 0."""
    chex.assert_equal_shape([logp, logp_prox, logp_behav])
    log_ratio_bt, adv_bt = token_inputs(logp, logp_prox, adv, mask)
    loss_bt, metrics = _surrogate(log_ratio_bt, adv_bt, mask, 1.0 - clip_low, 1.0 + clip_high)
    log_w_bt = ratios.detached_log_ratio(ratios.safe_log_ratio(logp_prox, logp_behav, mask), mask)
    w_bt = jnp.where(log_w_bt <= ratios.log_bound(upper), jnp.exp(log_w_bt), 0.0)
    return w_bt * loss_bt, metrics


def _interpolated(logp, logp_behav, mask, lag_bt, is_linear):
    """A-3PO's approximation of log pi_prox [B, T], without gradient."""
    behav_bt = ratios.zero_padding(logp_behav, mask)
    lag_bt = jnp.where(ratios.as_bool(mask), lag_bt, 1).astype(behav_bt.dtype)
    alpha_bt = ratios.safe_divide(jnp.maximum(lag_bt - 1.0, 0.0), lag_bt)
    logp_bt = ratios.zero_padding(logp, mask)
    if not is_linear:
        return jax.lax.stop_gradient(behav_bt + alpha_bt * (logp_bt - behav_bt))
    floor = jnp.full_like(behav_bt, jnp.log(1e-10))
    mixed_bt = jnp.logaddexp(jnp.log1p(-alpha_bt) + behav_bt, jnp.log(alpha_bt) + logp_bt)
    return jax.lax.stop_gradient(jnp.logaddexp(mixed_bt, floor))


@Traits(needs=("logp_behav", "version", "current_version"), of_versions=True, reads_old=False)
def a3po(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, version: Array, current_version: Numeric, clip_low: Numeric = 0.2,
    clip_high: Numeric = 0.2, upper: Numeric = jnp.inf, a3po_linear: bool = False,
) -> Loss:
    """A-3PO (arXiv:2512.06547): l = sg(pi_prox / mu) l_ppo(pi / pi_prox), decoupled PPO, with log
    pi_prox = log mu + alpha (log pi - log mu) in the place of a pass over the batch.

    alpha = (d - 1) / d for a token that is d = current_version - version versions old, and 0 for d
    <= 1, so fresh tokens get PPO around mu. In value u = (pi / mu)^(1/d), with the weight (pi /
    mu)^((d - 1)/d). Use it with weight "none"; logp_old is not used. Aggregation: token-mean.

    Unit: token. Trust region: that of `ppo` around pi_prox, between mu and pi by the token's age.
    Gradient: through u, 0 where `ppo` clips; pi_prox and the weight are detached. Use: asynchronous
    training, to clip around a recent policy; AReaL also needs a bound on the lag.

    Args:
      logp_behav: [B, T] log-probs of the sampler, nats.
      version: [B, T] int, the weights that sampled each token.
      current_version: scalar int, the weights that are trained.
      clip_low, clip_high: as `ppo`.
      upper: largest pi_prox / mu kept, inclusive; tokens above it have loss 0.
      a3po_linear: mix probabilities, pi_prox = (1 - alpha) mu + alpha pi + 1e-10, the other form of
        the authors' code; by default logarithms are mixed.

    Returns loss_bt; actor/pg_clipfrac and actor/ppo_kl are those of u.
    """
    del logp_old, seg
    chex.assert_equal_shape([logp, logp_behav, version])
    logp_prox = _interpolated(logp, logp_behav, mask, current_version - version, a3po_linear)
    return _around(logp, logp_prox, logp_behav, adv, mask, clip_low, clip_high, upper)


@Traits(needs=("logp_behav",), weighs_itself=True)
def qurl_acr(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2, cap: Numeric = 2.0,
) -> Loss:
    """QuRL's adaptive clipping range (arXiv:2602.13953), l = -w min(r A, clip(r, 1 - clip_low, (1 +
    clip_high) / w) A).

    w = sg(min(pi_old / mu, cap)): w < 1 widens the band, w > 1 narrows it. Where w > (1 +
    clip_high) / (1 - clip_low) the band is empty and the clip returns its upper end: lower end
    first, upper end last. The entry holds the weight; use it with weight "none". Taken from notes
    on the paper.

    Unit: token. Trust region: r >= 1 - clip_low and w r <= 1 + clip_high, on the side that A pushes
    to; w = pi_old / mu <= cap. Gradient: through r, 0 on the clipped side; w is detached. Use:
    quantised samplers, to bound weight and ratio together; w < 1 lets r run further than PPO.

    Args:
      logp_behav: [B, T] log-probs of the quantised sampler, nats.
      clip_low: width of the band below 1; 0.2 as in PPO.
      clip_high: largest w r, less 1; 0.2 as in PPO.
      cap: upper bound of w; 2.0 is common with quantised samplers (FlashRL).

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    del seg
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    mismatch_bt = ratios.bounded_exp(ratios.safe_log_ratio(logp_old, logp_behav, mask))
    w_bt = jax.lax.stop_gradient(jnp.minimum(mismatch_bt, cap))
    high_bt = (1.0 + clip_high) / w_bt
    loss_bt, metrics = _surrogate(log_ratio_bt, adv_bt, mask, 1.0 - clip_low, high_bt)
    return w_bt * loss_bt, metrics


@Traits(ranks=True)
def m2po(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    m2po_threshold: Numeric = 0.04, m2po_low: Numeric = 0.3, m2po_high: Numeric = 0.5,
) -> Loss:
    """M2PO (arXiv:2510.01161), the authors' code: PPO-clip with the band [min(exp(-tau), 1 -
    m2po_low), max(exp(tau), 1 + m2po_high)].

    Harmful tokens are those whose ratio has moved with their advantage: A > 0 and r > 1, or A < 0
    and r < 1. While the mean of their squared log-ratios is at most the threshold nothing is
    clipped; otherwise tau solves mean(min(log_ratio^2, tau^2)) = threshold over them
    (`rank_masks.m2po_bounds`). The form that drops tokens is the mask "m2po". Aggregation:
    token-mean.

    Unit: token (ratio), batch (band). Trust region: |log r| cut to a mean square of m2po_threshold
    over the harmful tokens, never tighter than [1 - m2po_low, 1 + m2po_high]. Gradient: through r
    and not tau, 0 on the clipped side. Use: quantised samplers, to bound weight and ratio together;
    w < 1 lets r run further.

    Args:
      m2po_threshold: budget of the mean squared log-ratio, nats^2; 0.04 as in the paper.
      m2po_low: the band always reaches down to 1 - m2po_low; 0.3 as in the authors' code.
      m2po_high: the band always reaches up to 1 + m2po_high; 0.5 as in the authors' code.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    del seg
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    below, above = rank_masks.m2po_bounds(
        log_ratio_bt, adv, mask, m2po_threshold=m2po_threshold, m2po_low=m2po_low,
        m2po_high=m2po_high,
    )
    return _surrogate(log_ratio_bt, adv_bt, mask, 1.0 - below, 1.0 + above)


@Traits(needs=("key",))
def clip_cov(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    key: PRNGKey, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2, clip_cov_ratio: Numeric = 2e-4,
    clip_cov_lower: Numeric = 1.0, clip_cov_upper: Numeric = 5.0,
) -> Loss:
    """Clip-Cov (arXiv:2505.22617): PPO-clip with loss 0 on a few tokens of high covariance.

    `rank_masks.clip_cov` chooses the tokens at random in the call; they stay in the denominator.
    Packing changes the choice. Aggregation: token-mean.

    Unit: token (ratio), batch (draw). Trust region: that of `ppo`. Gradient: through r; 0 on drawn
    tokens and where `ppo` clips. Use: against entropy collapse, by the authors from tokens of high
    covariance; each micro-batch draws its own.

    Args:
      key: jax PRNG key of the choice.
      clip_low: width of the band below 1; 0.2 is verl's default, the authors' recipe has 1.
      clip_high: width of the band above 1; likewise.
      clip_cov_ratio: share of the valid tokens that is dropped; 2e-4 as in the paper and verl.
      clip_cov_lower: lower end of the covariance band, exclusive; 1.0 as in verl.
      clip_cov_upper: upper end, exclusive; 5.0 as in verl.

    Returns loss_bt; actor/pg_clipfrac is the fraction of dropped tokens, as in verl.
    """
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    loss_bt, _ = _surrogate(log_ratio_bt, adv_bt, mask, 1.0 - clip_low, 1.0 + clip_high)
    is_accepted_bt = rank_masks.clip_cov(
        log_ratio_bt, mask, seg, logp=logp, logp_old=logp_old, adv=adv, key=key, clip_low=clip_low,
        clip_high=clip_high, clip_cov_ratio=clip_cov_ratio, clip_cov_lower=clip_cov_lower,
        clip_cov_upper=clip_cov_upper,
    )
    metrics = clip_metrics(log_ratio_bt, ~is_accepted_bt, mask)
    return jnp.where(is_accepted_bt, loss_bt, 0.0), metrics


@Traits(ranks=True)
def kl_cov(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    kl_cov_ratio: Numeric = 2e-3, kl_cov_coeff: Numeric = 1.0, form: str = "paper",
) -> Loss:
    """KL-Cov (arXiv:2505.22617), l = -r A, plus kl_cov_coeff |log r| on the tokens of highest
    covariance.

    The tokens are those of `rank_masks.kl_cov`, ranked in the call. Aggregation: token-mean.

    Unit: token (ratio), batch (ranking). Trust region: soft on the selected tokens, kl_cov_coeff
    |log r| or KL(pi_old || pi); none on the others. Gradient: through r and the penalty, the latter
    0 at r = 1. Use: `clip_cov` without losing tokens; make few updates, as nothing is clipped.

    Args:
      kl_cov_ratio: share of the valid tokens that is penalised, at least one token; 2e-3 for a 7B
        model in the authors' recipe, 2e-4 for 32B.
      kl_cov_coeff: weight of the penalty per nat; 1 in the authors' recipe, 0.1 in verl's config.
      form: the penalty, "paper" for |log r|, which is what the authors' code and verl compute, or
        "survey" for KL(pi_old || pi), which a survey and the paper's eq. 14 write; of the sampled
        token that is r - 1 - log r (k3), with the KL and its gradient as its means under pi_old.

    Returns loss_bt; the one metric, "actor/ppo_kl", is the mean of |log r|, as in verl, or of the
    sampled KL over all tokens.
    """
    del seg
    ratios.check_choice("form", form, ("paper", "survey"))
    log_ratio_bt, adv_bt = token_inputs(logp, logp_old, adv, mask)
    is_penalised_bt = rank_masks.kl_cov(logp, adv, mask, kl_cov_ratio=kl_cov_ratio)
    if form == "paper":
        size_bt = jax.lax.stop_gradient(jnp.sign(log_ratio_bt)) * log_ratio_bt
    else:
        bounded_bt = ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND)
        size_bt = jnp.expm1(bounded_bt) - bounded_bt
    loss_bt = -adv_bt * ratios.bounded_exp(log_ratio_bt)
    loss_bt = loss_bt + kl_cov_coeff * jnp.where(is_penalised_bt, size_bt, 0.0)
    return loss_bt, {"actor/ppo_kl": jax.lax.stop_gradient(ratios.masked_mean(size_bt, mask))}


OBJECTIVES = {
    "ppo": ppo_clip,
    "dual_clip": dual_clip_ppo,
    "a3po": a3po,
    "qurl_acr": qurl_acr,
    "m2po": m2po,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
