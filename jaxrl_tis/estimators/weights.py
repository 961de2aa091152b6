"""Importance weights between the learner and the sampler, from log_ratio = logp_old - logp_behav.

Each entry of `WEIGHTS` maps (log_ratio, mask, seg=None, **parameters) to w [B, T]: what a per-token
loss is multiplied with. Weights never carry a gradient, are 0 at padding, and are those of one
rollout batch: compute them once and keep them while the learner takes its steps. Token weights
exponentiate the log-ratio of one token clamped to +-20; sequence weights exponentiate the sum over
the sequence, clamped to +-20 after summing, repeated on every token.

A rejected token has weight 0 and stays in the denominator of the loss; rejection that changes the
mask is another tool.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import ratios


def raw_token(log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Untruncated token ratios exp(clamp(log_ratio, +-20)), 0 at padding, without gradient.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
    """
    del seg
    chex.assert_rank([log_ratio, mask], 2)
    chex.assert_equal_shape([log_ratio, mask])
    w_bt = ratios.bounded_exp(ratios.zero_padding(log_ratio, mask))
    return jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))


def raw_seq(log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Untruncated sequence ratios exp(clamp(sum_t log_ratio, +-20)) on every valid token.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
    """
    chex.assert_rank([log_ratio, mask], 2)
    w_bs = ratios.bounded_exp(ratios.sequence_sum(log_ratio, mask, seg))
    w_bt = ratios.to_tokens(w_bs, seg, log_ratio.shape[1])
    return jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))


RAW = {"token": raw_token, "seq": raw_seq}


def truncate(raw: chex.Array, cap: chex.Numeric) -> chex.Array:
    """min(raw, cap)."""
    return jnp.minimum(raw, cap)


def keep_band(raw: chex.Array, lower: chex.Numeric, upper: chex.Numeric) -> chex.Array:
    """raw where lower <= raw <= upper (both inclusive), 0 elsewhere."""
    return jnp.where((raw >= lower) & (raw <= upper), raw, 0.0)


def none(log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """No correction: weight 1 on every valid token.

    Also the weight of bypass mode, where logp_old is logp_behav and the objective's own ratio holds
    the whole drift.
    """
    del seg
    chex.assert_equal_shape([log_ratio, mask])
    return ratios.as_bool(mask).astype(ratios.as_float(log_ratio).dtype)


def token_tis(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    cap: chex.Numeric = 2.0,
) -> chex.Array:
    """Token truncated importance sampling, w_t = min(rho_t, cap).

    rho_t = pi_old(y_t) / mu(y_t). Truncation of importance weights: Ionides (2008); for the
    sampler-learner gap of RL engines: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training". A cap below 1 would truncate on-policy tokens.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: not used, tokens are independent.
      cap: upper bound of a weight; 2.0 is verl's default.

    Returns w [B, T] without gradient.
    """
    return truncate(raw_token(log_ratio, mask, seg), cap)


def seq_tis(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    cap: chex.Numeric = 2.0,
) -> chex.Array:
    """Sequence truncated importance sampling, w = min(prod_t rho_t, cap) on every token.

    With an infinite cap the policy gradient of a sequence is unbiased; a token weight is not.
    Source as `token_tis`.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      cap: upper bound of a weight; 2.0 is verl's default.

    Returns w [B, T] without gradient.
    """
    return truncate(raw_seq(log_ratio, mask, seg), cap)


def token_mis(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    lower: chex.Numeric = 0.5,
    upper: chex.Numeric = 2.0,
) -> chex.Array:
    """Token masked importance sampling, w_t = rho_t 1[lower <= rho_t <= upper].

    Liu et al., "When Speed Kills Stability".

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: not used, tokens are independent.
      lower: smallest ratio kept, inclusive; 0.5 is slime's example.
      upper: largest ratio kept, inclusive; 2.0 is slime's example.

    Returns w [B, T] without gradient.
    """
    return keep_band(raw_token(log_ratio, mask, seg), lower, upper)


def seq_mis(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    lower: chex.Numeric = 0.0,
    upper: chex.Numeric = 3.0,
) -> chex.Array:
    """Sequence masked importance sampling, w = p 1[lower <= p <= upper] with p = prod_t rho_t.

    Source as `token_mis`.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      lower: smallest ratio kept, inclusive; no lower bound is TRL's default.
      upper: largest ratio kept, inclusive; 3.0 is TRL's default.

    Returns w [B, T] without gradient.
    """
    return keep_band(raw_seq(log_ratio, mask, seg), lower, upper)


def token_icepop(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    lower: chex.Numeric = 0.5,
    upper: chex.Numeric = 5.0,
) -> chex.Array:
    """IcePop, w_t = rho_t if lower <= rho_t <= upper, else 0 (arXiv:2510.18855).

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: not used, tokens are independent.
      lower: alpha of the paper, inclusive, 0.5 there.
      upper: beta of the paper, inclusive, 5.0 there.

    Returns w [B, T] without gradient.
    """
    return keep_band(raw_token(log_ratio, mask, seg), lower, upper)


def seq_icepop(
    log_ratio: chex.Array,
    mask: chex.Array,
    seg: chex.Array | None = None,
    *,
    lower: chex.Numeric = 0.5,
    upper: chex.Numeric = 5.0,
) -> chex.Array:
    """IcePop's band on the sequence ratio, as verl's sequence level offers it (arXiv:2510.18855 is
    token level).

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      lower: smallest ratio kept, inclusive.
      upper: largest ratio kept, inclusive.

    Returns w [B, T] without gradient.
    """
    return keep_band(raw_seq(log_ratio, mask, seg), lower, upper)


def batch_normalize(
    w: chex.Array, mask: chex.Array, level: str, seg: chex.Array | None = None
) -> tuple[chex.Array, chex.Array]:
    """Divides the weights by their batch mean, as verl does after truncation.

    The whole rollout batch must be in the call: a mean over a micro-batch is another estimator.

    Args:
      w: [B, T] weights.
      mask: [B, T] valid tokens.
      level: "token" averages over valid tokens, "seq" over sequences, each counted once whatever
        its length.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns (w / factor [B, T], factor), without gradient; where the mean is at most 1e-8 the
    weights stay as they are and the factor is 1.
    """
    if level not in RAW:
        raise ValueError(f"Unknown weight level {level!r}; choose one of {sorted(RAW)}.")
    w = ratios.zero_padding(w, mask)
    if level == "token":
        mean = ratios.masked_mean(w, mask)
    else:
        is_sequence_bs = ratios.sequence_count(w, mask, seg) > 0
        mean = ratios.masked_mean(ratios.sequence_mean(w, mask, seg), is_sequence_bs)
    factor = jax.lax.stop_gradient(jnp.where(mean > 1e-8, mean, 1.0))
    return jax.lax.stop_gradient(w) / factor, factor


WEIGHTS = {
    "none": none,
    "token_tis": token_tis,
    "seq_tis": seq_tis,
    "token_mis": token_mis,
    "seq_mis": seq_mis,
    "token_icepop": token_icepop,
    "seq_icepop": seq_icepop,
}
