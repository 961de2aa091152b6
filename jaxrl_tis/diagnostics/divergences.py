"""Divergences between sampler and learner beyond verl's: total variation, sample sizes, responses.

Every function is pure, works under jit and carries no gradient. Metrics are scalars named
mismatch/<metric>, or under verl's name where verl has the same number. An empty mask or row gives 0
and never NaN; log-ratios are clamped to +-20 before exp, a sequence's after summing. What sorts is
in functions of its own, `sequence_percentiles` and `percentile_metrics`: run them only every so
many steps.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import rank_masks, ratios

TAIL_RATIO = 2.0  # beyond it, or its inverse, a ratio is of the tail

def _total_variation(log_ratio, mask):
    """Returns the total variation E[max(1 - rho, 0)], which needs no clamp."""
    return ratios.masked_mean(-jnp.expm1(jnp.minimum(log_ratio, 0.0)), mask)


def _ess_of_logs(log_w, mask):
    """Returns the effective sample size of exp(log_w), a fraction, without clamp."""
    return ratios.effective_sample_size(mismatch.relative_weights(log_w, mask), mask)


@ratios.jit
def ratio_statistics(
    log_ratio: chex.Array, log_sum: chex.Array, mask: chex.Array, is_sequence: chex.Array
) -> dict[str, chex.Array]:
    """Returns size and spread of a ratio over tokens and sequences, named as in `divergence_metrics`.

    Args:
      log_ratio: [B, T] nats, 0 at padding.
      log_sum: [B, S] its sums over sequences.
      mask: [B, T] valid tokens.
      is_sequence: [B, S] sequences with a valid token.
    """
    tv_token = _total_variation(log_ratio, mask)
    num_tokens = ratios.masked_count(log_ratio, mask)
    num_sequences = ratios.masked_count(log_sum, is_sequence)
    tokens_per_sequence = ratios.safe_divide(num_tokens, num_sequences)
    return {
        "log_ratio_abs_mean": ratios.masked_mean(jnp.abs(log_ratio), mask),
        "log_ratio_abs_max": ratios.masked_max(jnp.abs(log_ratio), mask),
        "ratio_mean_token": ratios.masked_mean(ratios.bounded_exp(log_ratio), mask),
        "ratio_mean_seq": ratios.masked_mean(ratios.bounded_exp(log_sum), is_sequence),
        "tv_token": tv_token,
        "tv_seq": _total_variation(log_sum, is_sequence),
        "tv_seq_bound": jnp.minimum(tv_token * tokens_per_sequence, 1.0),
        "chi2_token": mismatch.chi2(log_ratio, mask),
        "chi2_seq": mismatch.chi2(log_sum, is_sequence),
        "ess_token": _ess_of_logs(log_ratio, mask),
        "ess_seq": _ess_of_logs(log_sum, is_sequence),
    }


@ratios.jit
def divergence_metrics(
    log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None
) -> dict[str, chex.Array]:
    """Returns total variation, chi-squared and sample size of the ratio, per token and sequence.

    The two divergences D(mu, pi) of the sequence distributions bound what a correction can cost.
    For any f of the sequence with |f| <= F, a reward or the gradient that it contributes,

      bias without the ratio        |E_mu[f] - E_pi[f]| <= 2 F TV      (F TV for f in [0, F])
      second moment with the ratio  E_mu[|rho f|^2]     <= F^2 (1 + chi2)

    TV = E_mu[max(1 - rho, 0)] is exact for any supports and within [0, 1]. By the chain rule the TV
    of sequences is at most the expected sum of their tokens' TVs, `tv_seq_bound` (1 where the sum
    is larger), whose variance is far below that of `tv_seq`. chi2_seq has the heaviest tail of all:
    while ess_seq is small it is known only to be large.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav; for other factors of the full ratio
        `attribution.factor_statistics` gives the same metrics but the tails, under names of their own.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns mismatch/{tv_token,tv_seq,tv_seq_bound}; rollout_corr/{chi2_token,chi2_seq};
    mismatch/{ess_token,ess_seq}, effective sample sizes of the untruncated ratios as fractions;
    mismatch/{ratio_mean_token,ratio_mean_seq}, whose expectation is 1 if the recorded log-probs are
    those of the sampling distribution; mismatch/{log_ratio_abs_mean,log_ratio_abs_max} over tokens;
    mismatch/{tail_above,tail_below}, the shares of tokens with a ratio above 2 and below 1/2
    (AReaL's tail shares).
    """
    chex.assert_rank([log_ratio, mask], 2)
    log_ratio_bt = ratios.zero_padding(log_ratio, mask)
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    statistics = ratio_statistics(log_ratio_bt, stats.log_ratio_sum, mask, stats.count > 0)
    chi2 = {name: statistics.pop(name) for name in ("chi2_token", "chi2_seq")}
    tail = ratios.log_bound(TAIL_RATIO)
    statistics |= {
        "tail_above": ratios.masked_mean(log_ratio_bt > tail, mask),
        "tail_below": ratios.masked_mean(log_ratio_bt < -tail, mask),
    }
    detached = mismatch.detached
    return detached(statistics, "mismatch/") | detached(chi2, "rollout_corr/")


def response_gaps(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None
) -> tuple[chex.Array, chex.Array]:
    """Returns the largest and mean |p_old - p_behav| of each response, [B, S] each, 0 if empty.

    The response-level mismatch of Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training". Arguments as in `response_metrics`.
    """
    stats = ratios.ratio_stats(logp_old, logp_behav, mask, seg)
    return stats.dp_max, ratios.safe_divide(stats.dp_sum, stats.count)


def probability_gap(logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array) -> chex.Array:
    """Returns |p_old - p_behav| [B, T], 0 at padding."""
    chex.assert_rank([logp_old, logp_behav, mask], 2)
    chex.assert_equal_shape([logp_old, logp_behav, mask])
    p_bt = jnp.exp(ratios.zero_padding(logp_old, mask))
    q_bt = jnp.exp(ratios.zero_padding(logp_behav, mask))
    return jnp.abs(p_bt - q_bt)


@ratios.jit
def response_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None,
    *, high: float = 0.5,
) -> dict[str, chex.Array]:
    """Returns statistics over responses of their largest and mean |p_old - p_behav|, and large ones of tokens.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      high: a token whose gap exceeds it counts as high, and so does its response; 0.5 as in the blog of
        `response_gaps`.

    Returns mismatch/dp_max/{mean,max,fraction_high} of the largest gap, mismatch/dp_mean/{mean,
    max} of the mean gap, and mismatch/dp_high, the share of high tokens.
    """
    max_bs, mean_bs = response_gaps(logp_old, logp_behav, mask, seg)
    is_sequence_bs = ratios.ratio_stats(logp_old, logp_behav, mask, seg).count > 0
    metrics = {
        "dp_max/mean": ratios.masked_mean(max_bs, is_sequence_bs),
        "dp_max/max": ratios.masked_max(max_bs, is_sequence_bs),
        "dp_max/fraction_high": ratios.masked_mean(max_bs > high, is_sequence_bs),
        "dp_mean/mean": ratios.masked_mean(mean_bs, is_sequence_bs),
        "dp_mean/max": ratios.masked_max(mean_bs, is_sequence_bs),
        "dp_high": ratios.masked_mean(probability_gap(logp_old, logp_behav, mask) > high, mask),
    }
    return mismatch.detached(metrics, "mismatch/")


def sequence_percentiles(
    x: chex.Array, mask: chex.Array, seg: chex.Array | None = None, *, percentiles: tuple[int, ...]
) -> chex.Array:
    """Returns percentiles of x over the valid tokens of each sequence, interpolated linearly.

    Sorts rows, one integer per token. In packed rows it holds the sequence's number too, at the cost
    of as many of the value's last bits: with 15 sequences in the fullest row values are rounded
    down by at most 2^-19 of themselves in float32.

    Args:
      x: [B, T] values.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      percentiles: whole numbers from 0 to 100, static.

    Returns [P, B, S], 0 for a sequence without valid tokens.
    """
    chex.assert_rank([x, mask], 2)
    x_bt, num_tokens = ratios.zero_padding(x, mask), x.shape[1]
    count_bs = ratios.sequence_count(x_bt, mask, seg).astype(jnp.int32)
    sorted_bt = _sorted(x_bt, mask, seg)
    first_bs = jnp.cumsum(count_bs, axis=1) - count_bs  # where the sequence starts once sorted

    def at(rank_bs):
        index_bs = jnp.clip(first_bs + rank_bs, 0, num_tokens - 1)
        return jnp.take_along_axis(sorted_bt, index_bs, axis=1)

    def percentile(q):
        rank_bs, hundredths_bs = jnp.divmod(q * (count_bs - 1), 100)
        low_bs, high_bs = at(rank_bs), at(rank_bs + jnp.sign(hundredths_bs))
        share_bs = hundredths_bs.astype(x_bt.dtype) / 100.0
        value_bs = low_bs + share_bs * (high_bs - low_bs)
        return jnp.where(count_bs > 0, value_bs, 0.0)

    return jax.lax.stop_gradient(jnp.stack([percentile(q) for q in percentiles]))


def _sorted(x_bt, mask, seg):
    """Returns x sorted by (seg, x) in every row, padding last."""
    key_bt = rank_masks.sortable(x_bt)
    last = ~jnp.zeros((), key_bt.dtype)
    if seg is None:
        key_bt = jnp.sort(jnp.where(ratios.as_bool(mask), key_bt, last), axis=1)
        return rank_masks.from_sortable(key_bt, x_bt.dtype)
    num_bits = 8 * key_bt.dtype.itemsize
    ids_bt = ratios.segment_ids(seg, mask)
    id_bits = num_bits - jax.lax.clz(jnp.max(ids_bt).astype(key_bt.dtype))
    id_bt = ids_bt.astype(key_bt.dtype) << (num_bits - id_bits)
    key_bt = jnp.where(ratios.as_bool(mask), id_bt | (key_bt >> id_bits), last)
    return rank_masks.from_sortable(jnp.sort(key_bt, axis=1) << id_bits, x_bt.dtype)


@functools.partial(ratios.jit, static_argnames="percentiles")
def percentile_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None,
    *, percentiles: tuple[int, ...] = (95, 99),
) -> dict[str, chex.Array]:
    """Returns mean and maximum over responses of percentiles of |p_old - p_behav| in a response.

    Apart from `response_metrics` because it sorts. Arguments as there; percentiles as in
    `sequence_percentiles`.

    Returns mismatch/dp_p<percentile>/{mean,max}.
    """
    gap_bt = probability_gap(logp_old, logp_behav, mask)
    value_pbs = sequence_percentiles(gap_bt, mask, seg, percentiles=percentiles)
    is_sequence_bs = ratios.sequence_count(gap_bt, mask, seg) > 0
    metrics = {}
    for q, value_bs in zip(percentiles, value_pbs, strict=True):
        metrics[f"dp_p{q}/mean"] = ratios.masked_mean(value_bs, is_sequence_bs)
        metrics[f"dp_p{q}/max"] = ratios.masked_max(value_bs, is_sequence_bs)
    return mismatch.detached(metrics, "mismatch/")
