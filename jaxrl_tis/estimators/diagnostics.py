"""How far apart learner and sampler are: scalars for the run record, under verl's names.

Every function is pure, works under jit and returns a dict of scalars. No metric divides by zero: an
empty mask gives 0 everywhere. verl lets a row without valid tokens enter its row means with weight
1, 0 or perplexity 1; here only sequences with a valid token are counted, which changes nothing when
every row has one.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators import weights


def effective_sample_size(w: chex.Array, mask: chex.Array) -> chex.Array:
    """mean(w)^2 / mean(w^2) over the valid entries, in (0, 1]; 0 if they are all 0 or none is
    valid."""
    largest = ratios.masked_max(w, mask)
    scaled = ratios.safe_divide(ratios.zero_padding(w, mask), largest)
    ess = ratios.safe_divide(
        jnp.square(ratios.masked_mean(scaled, mask)), ratios.masked_mean(jnp.square(scaled), mask)
    )
    return jnp.minimum(ess, 1.0)


def offpolicy_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None
) -> dict[str, chex.Array]:
    """Perplexities of learner and sampler on the sampled tokens, and divergences between them.

    Over tokens: `kl` is the mean of logp_behav - logp_old (k1 of KL(mu || pi_old), nats), `k3_kl`
    its low-variance form (not clamped: infinite for a log-ratio above 88 in float32), `chi2_token`
    = E[rho^2] - 1. Over sequences: perplexity exp(-mean logp) of each policy and the differences of
    its logarithm, `chi2_seq` from the product of the ratios. Log-ratios inside the chi-squared
    estimates are clamped to +-20, the sequence's after summing.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns 13 scalars named rollout_corr/<metric>.
    """
    log_ratio_bt = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    is_sequence_bs = ratios.sequence_count(log_ratio_bt, mask, seg) > 0
    old_bs = ratios.sequence_mean(logp_old, mask, seg)
    behav_bs = ratios.sequence_mean(logp_behav, mask, seg)
    gap_bs = behav_bs - old_bs

    def over_sequences(x_bs):
        return ratios.masked_mean(x_bs, is_sequence_bs)

    metrics = {
        "training_ppl": over_sequences(jnp.exp(-old_bs)),
        "training_log_ppl": over_sequences(-old_bs),
        "rollout_ppl": over_sequences(jnp.exp(-behav_bs)),
        "rollout_log_ppl": over_sequences(-behav_bs),
        "kl": ratios.masked_mean(-log_ratio_bt, mask),
        "k3_kl": ratios.masked_mean(jnp.expm1(log_ratio_bt) - log_ratio_bt, mask),
        "log_ppl_diff": over_sequences(gap_bs),
        "log_ppl_abs_diff": over_sequences(jnp.abs(gap_bs)),
        "log_ppl_diff_max": ratios.masked_max(gap_bs, is_sequence_bs),
        "log_ppl_diff_min": ratios.masked_min(gap_bs, is_sequence_bs),
        "ppl_ratio": over_sequences(jnp.exp(gap_bs)),
        "chi2_token": _chi2(log_ratio_bt, mask),
        "chi2_seq": _chi2(ratios.sequence_sum(log_ratio_bt, mask, seg), is_sequence_bs),
    }
    return {f"rollout_corr/{name}": jax.lax.stop_gradient(value) for name, value in metrics.items()}


def _chi2(log_ratio, mask):
    """E[rho^2] - 1 with the log-ratio clamped to +-20; 0 for an empty mask."""
    bounded = ratios.clamp(log_ratio, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    return ratios.masked_mean(jnp.expm1(2.0 * bounded), mask)


def importance_weight_metrics(
    w: chex.Array,
    log_ratio: chex.Array,
    mask: chex.Array,
    *,
    level: str,
    upper: chex.Numeric,
    lower: chex.Numeric | None = None,
    seg: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Distribution of the importance weights, as truncated and as they were before.

    At level "seq" the extremes and the fractions are those of the sequences' untruncated ratios,
    clamped to exp(+-20).

    Args:
      w: [B, T] weights from `weights.WEIGHTS`, before any batch normalisation.
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      level: "token" or "seq", the level of the weights.
      upper: the cap or the upper end of the band.
      lower: the lower end of the band; None (truncation) counts ratios below 1 / upper as low.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns scalars named rollout_corr/rollout_is_<metric>; `eff_sample_size` is a fraction,
    `oob_ratio` the share of valid tokens outside the band and present only with lower.
    """
    w_bt = ratios.zero_padding(w, mask)
    raw_bt = weights.RAW[level](log_ratio, mask, seg)
    bounded_bt = ratios.clamp(w_bt, 0.0, upper)
    low = 1.0 / upper if lower is None else lower
    is_sequence_bs = ratios.sequence_count(w_bt, mask, seg) > 0
    if level == "token":
        extremes_of, ratio, is_valid = w_bt, raw_bt, mask
    else:
        sum_bs = ratios.sequence_sum(log_ratio, mask, seg)
        ratio = ratios.bounded_exp(sum_bs)
        extremes_of, is_valid = ratio, is_sequence_bs
    mean_bs = ratios.sequence_mean(w_bt, mask, seg)
    raw_mean_bs = ratios.sequence_mean(raw_bt, mask, seg)
    metrics = {
        "mean": ratios.masked_mean(w_bt, mask),
        "max": ratios.masked_max(extremes_of, is_valid),
        "min": ratios.masked_min(extremes_of, is_valid),
        "std": ratios.masked_std(bounded_bt, mask),
        "ratio_fraction_high": ratios.masked_mean(ratio > upper, is_valid),
        "ratio_fraction_low": ratios.masked_mean(ratio < low, is_valid),
        "eff_sample_size": effective_sample_size(bounded_bt, mask),
        "seq_mean": ratios.masked_mean(mean_bs, is_sequence_bs),
        "seq_std": ratios.masked_std(mean_bs, is_sequence_bs, ddof=1),
        "seq_max": ratios.masked_max(mean_bs, is_sequence_bs),
        "seq_min": ratios.masked_min(mean_bs, is_sequence_bs),
        "seq_max_deviation": ratios.masked_max(jnp.abs(mean_bs - 1.0), is_sequence_bs),
        "seq_fraction_high": ratios.masked_mean(raw_mean_bs > upper, is_sequence_bs),
        "seq_fraction_low": ratios.masked_mean(raw_mean_bs < low, is_sequence_bs),
    }
    if lower is not None:
        metrics["oob_ratio"] = ratios.masked_mean((raw_bt < lower) | (raw_bt > upper), mask)
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


def probability_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array
) -> dict[str, chex.Array]:
    """Difference of the probabilities (not log-probs) of the sampled tokens, learner to sampler.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] valid tokens.

    Returns training/rollout_probs_diff_{valid,max,mean,std} of |p_old - p_behav| (std with ddof 1;
    valid is 1 if any token is) and training/rollout_actor_probs_pearson_corr. Where verl has NaN
    (no token, one token for std, constant probabilities for the correlation) these are 0.
    """
    p_bt = jnp.exp(ratios.zero_padding(logp_old, mask))
    q_bt = jnp.exp(ratios.zero_padding(logp_behav, mask))
    gap_bt = jnp.abs(p_bt - q_bt)
    p_dev_bt = p_bt - ratios.masked_mean(p_bt, mask)
    q_dev_bt = q_bt - ratios.masked_mean(q_bt, mask)
    covariance = ratios.masked_mean(p_dev_bt * q_dev_bt, mask)
    spread = ratios.masked_std(p_bt, mask) * ratios.masked_std(q_bt, mask)
    metrics = {
        "training/rollout_probs_diff_valid": ratios.masked_max(mask, mask),
        "training/rollout_probs_diff_max": ratios.masked_max(gap_bt, mask),
        "training/rollout_probs_diff_mean": ratios.masked_mean(gap_bt, mask),
        "training/rollout_probs_diff_std": ratios.masked_std(gap_bt, mask, ddof=1),
        "training/rollout_actor_probs_pearson_corr": jnp.clip(
            ratios.safe_divide(covariance, spread), -1.0, 1.0
        ),
    }
    return {name: jax.lax.stop_gradient(value) for name, value in metrics.items()}


def snis_reward(
    rewards: chex.Array, log_ratio: chex.Array, mask: chex.Array
) -> tuple[chex.Array, chex.Array]:
    """The learner's expected reward, by self-normalised importance sampling of sequences.

    sum_i w_i R_i / sum_i w_i with w_i = prod_t pi_old / mu, computed as a softmax of the summed
    log-ratios: no clamp is needed. The estimate is biased by O(1 / number of sequences) and means
    nothing when the sample size is small.

    Args:
      rewards: [B] reward of each sequence.
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens; a row without any is left out.

    Returns (estimate in reward units, effective sample size as a fraction in (0, 1]), both 0 for an
    empty mask.
    """
    chex.assert_rank([rewards, log_ratio], [1, 2])
    chex.assert_equal_shape_prefix([rewards, log_ratio, mask], 1)
    is_sequence_b = jnp.any(ratios.as_bool(mask), axis=1)
    sum_b = ratios.masked_sum(log_ratio, mask, axis=1)
    largest = ratios.masked_max(sum_b, is_sequence_b)
    w_b = ratios.zero_padding(jnp.exp(sum_b - largest), is_sequence_b)
    estimate = ratios.safe_divide(ratios.masked_sum(w_b * rewards, is_sequence_b), jnp.sum(w_b))
    return jax.lax.stop_gradient((estimate, effective_sample_size(w_b, is_sequence_b)))
