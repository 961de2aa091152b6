"""Measures the gap of learner and sampler: verl's metrics of ratios, weights and rejection.

Every function is pure, works under jit, carries no gradient and, unless it says otherwise, returns
a dict of scalars under verl's names. `divergences`, `attribution`, `agreement` and `routes` hold what
verl does not measure, `batch_metrics` verl's metrics of rewards, lengths and versions.

No metric divides by zero: an empty mask gives 0 everywhere. verl lets a row without valid tokens
enter its row means with weight 1, 0 or perplexity 1; here only sequences with a valid token are
counted, which changes nothing when every row has one.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import masks
from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators import weights

FINITE_BOUND = 80.0  # exp(80) = 5.5e34 is well inside float32, whose exp overflows at 88.7

REJECTION_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


def detached(metrics: dict[str, chex.Array], prefix: str = "") -> dict[str, chex.Array]:
    """Returns the metrics without gradient, with the prefix before their names."""
    return {prefix + name: jax.lax.stop_gradient(value) for name, value in metrics.items()}


def relative_weights(log_w: chex.Array, mask: chex.Array) -> chex.Array:
    """Returns exp(log_w) relative to its largest valid entry, 0 at padding. Needs no clamp."""
    log_w = ratios.zero_padding(log_w, mask)
    is_positive = ratios.as_bool(mask) & (log_w > -jnp.inf)
    return jnp.where(is_positive, jnp.exp(log_w - ratios.masked_max(log_w, mask)), 0.0)


def token_k3(log_ratio: chex.Array) -> chex.Array:
    """Returns k3 = rho - 1 - log rho of each token, nats, finite for every finite log-ratio."""
    return jnp.expm1(jnp.minimum(log_ratio, FINITE_BOUND)) - log_ratio


def chi2(log_ratio: chex.Array, mask: chex.Array) -> chex.Array:
    """Returns chi2 = E[rho^2] - 1 with the log-ratio clamped to +-20; 0 for an empty mask.

    At sequence level pass the sums [B, S] and the mask of sequences with a token.
    """
    bounded = ratios.clamp(
        ratios.zero_padding(log_ratio, mask), -ratios.LOG_BOUND, ratios.LOG_BOUND
    )
    return ratios.masked_mean(jnp.expm1(2.0 * bounded), mask)


def _finite_exp(x):
    """Returns exp(min(x, 80)), which is finite in float32."""
    return jnp.exp(jnp.minimum(x, FINITE_BOUND))


def _finite_mean(x, mask):
    """Returns the mean over the valid entries, divided before the sum to prevent overflow."""
    return ratios.masked_sum(ratios.safe_divide(x, ratios.masked_count(x, mask)), mask)


def _perplexity(policy, mean_logp_bs, is_sequence_bs):
    """Returns {<policy>_ppl, <policy>_log_ppl}, means over the sequences."""
    return {
        f"{policy}_ppl": _finite_mean(_finite_exp(-mean_logp_bs), is_sequence_bs),
        f"{policy}_log_ppl": ratios.masked_mean(-mean_logp_bs, is_sequence_bs),
    }


@ratios.jit
def offpolicy_metrics(
    logp_old: chex.Array, logp_behav: chex.Array | None, mask: chex.Array,
    seg: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns perplexities of learner and sampler on the sampled tokens, and their divergences.

    Over tokens: `kl` is the mean of logp_behav - logp_old (k1 of KL(mu || pi_old), nats), `k3_kl`
    its low-variance form, `chi2_token` = E[rho^2] - 1. Over sequences: perplexity exp(-mean logp)
    of each policy and the differences of its logarithm, `chi2_seq` from the product of the ratios.
    Log-ratios inside the chi-squared estimates are clamped to +-20, the sequence's after summing.
    Inside k3_kl and the perplexities exponents stop at 80; verl's overflow at 88.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats; None gives training_ppl and training_log_ppl
        alone.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns 13 scalars named rollout_corr/<metric>.
    """
    chex.assert_rank([logp_old, mask], 2)
    if logp_behav is None:
        is_sequence_bs = ratios.sequence_count(logp_old, mask, seg) > 0
        old_bs = ratios.sequence_mean(logp_old, mask, seg)
        return detached(_perplexity("training", old_bs, is_sequence_bs), "rollout_corr/")

    log_ratio_bt = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    stats = ratios.ratio_stats(logp_old, logp_behav, mask, seg)
    behav_bs = ratios.safe_divide(stats.logp_behav_sum, stats.count)
    gap_bs = -ratios.safe_divide(stats.log_ratio_sum, stats.count)
    is_sequence_bs = stats.count > 0
    k3_bt = token_k3(log_ratio_bt)
    metrics = _perplexity("training", behav_bs - gap_bs, is_sequence_bs)
    metrics |= _perplexity("rollout", behav_bs, is_sequence_bs)
    metrics |= {
        "kl": ratios.masked_mean(-log_ratio_bt, mask),
        "k3_kl": _finite_mean(k3_bt, mask),
        "log_ppl_diff": ratios.masked_mean(gap_bs, is_sequence_bs),
        "log_ppl_abs_diff": ratios.masked_mean(jnp.abs(gap_bs), is_sequence_bs),
        "log_ppl_diff_max": ratios.masked_max(gap_bs, is_sequence_bs),
        "log_ppl_diff_min": ratios.masked_min(gap_bs, is_sequence_bs),
        "ppl_ratio": _finite_mean(_finite_exp(gap_bs), is_sequence_bs),
        "chi2_token": chi2(log_ratio_bt, mask),
        "chi2_seq": chi2(stats.log_ratio_sum, is_sequence_bs),
    }
    return detached(metrics, "rollout_corr/")


def importance_weight_metrics(
    w: chex.Array, log_ratio: chex.Array, mask: chex.Array, *, level: str, upper: chex.Numeric,
    lower: chex.Numeric | None = None, seg: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns the distribution of the importance weights, truncated and untruncated.

    At level "seq" the extremes and the fractions are those of the sequences' untruncated ratios:
    the extremes clamped to exp(+-20). At any other level they are taken over tokens: extremes of w,
    fractions of the untruncated weights. Fractions are compared as logarithms.

    Args:
      w: [B, T] weights from `weights.WEIGHTS`, before any batch normalisation.
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens.
      level: the level of the weights, a key of `weights.RAW`.
      upper: the cap or the upper end of the band.
      lower: the lower end of the band; None (truncation) counts ratios below 1 / upper as low.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns scalars named rollout_corr/rollout_is_<metric>; `eff_sample_size` is a fraction,
    `oob_ratio` the share of valid tokens outside the band and present only with lower.
    """
    if level not in weights.RAW:
        raise ValueError(f"Unknown weight level {level!r}; choose one of {sorted(weights.RAW)}.")
    w_bt = ratios.zero_padding(w, mask)
    log_bt = weights.log_raw(level, log_ratio, mask, seg)
    bounded_bt = ratios.clamp(w_bt, 0.0, upper)
    low = 1.0 / upper if lower is None else lower
    log_low, log_high = ratios.log_bound(low), ratios.log_bound(upper)
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    is_sequence_bs = stats.count > 0
    if level == "seq":
        sum_bs = stats.log_ratio_sum
        extremes_of, log_raw, is_valid = ratios.bounded_exp(sum_bs), sum_bs, is_sequence_bs
    else:
        extremes_of, log_raw, is_valid = w_bt, log_bt, mask
    mean_bs = ratios.sequence_mean(w_bt, mask, seg)
    raw_mean_bs = _raw_weight_of_sequences(level, log_ratio, mask, seg)
    metrics = {
        "mean": ratios.masked_mean(w_bt, mask),
        "max": ratios.masked_max(extremes_of, is_valid),
        "min": ratios.masked_min(extremes_of, is_valid),
        "std": ratios.masked_std(bounded_bt, mask),
        "ratio_fraction_high": ratios.masked_mean(log_raw > log_high, is_valid),
        "ratio_fraction_low": ratios.masked_mean(log_raw < log_low, is_valid),
        "eff_sample_size": ratios.effective_sample_size(bounded_bt, mask),
        "seq_fraction_high": ratios.masked_mean(raw_mean_bs > upper, is_sequence_bs),
        "seq_fraction_low": ratios.masked_mean(raw_mean_bs < low, is_sequence_bs),
    }
    metrics |= _sequence_statistics(mean_bs, is_sequence_bs, centre=1.0)
    if lower is not None:
        metrics["oob_ratio"] = ratios.masked_mean(~ratios.is_inside(log_bt, lower, upper), mask)
    return detached(metrics, "rollout_corr/rollout_is_")


def _raw_weight_of_sequences(level, log_ratio, mask, seg):
    """Returns the untruncated weight of each sequence [B, S]; at level "token" the mean of its ratios."""
    if level == "token":
        stats = ratios.log_ratio_stats(log_ratio, mask, seg)
        return ratios.safe_divide(stats.ratio_sum, stats.count)
    return ratios.bounded_exp(weights.sequence_log_ratio(level, log_ratio, mask, seg))


def _sequence_statistics(x_bs, is_sequence_bs, centre):
    """Returns mean, std, extremes and largest deviation from `centre` of one value per sequence."""
    return {
        "seq_mean": ratios.masked_mean(x_bs, is_sequence_bs),
        "seq_std": ratios.masked_std(x_bs, is_sequence_bs, ddof=1),
        "seq_max": ratios.masked_max(x_bs, is_sequence_bs),
        "seq_min": ratios.masked_min(x_bs, is_sequence_bs),
        "seq_max_deviation": ratios.masked_max(jnp.abs(x_bs - centre), is_sequence_bs),
    }


def rejection_metrics(
    log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None, *, option: str,
    upper: chex.Numeric, lower: chex.Numeric | None = None,
) -> dict[str, chex.Array]:
    """Returns the distribution of a rejection criterion's statistic (verl's), and its rejected share.

    For a sequence option `mean` and `std` weigh each sequence by its tokens and `seq_*` count it
    once; for a token option `seq_*` are those of the mean over the sequence's tokens. `std` is the
    population's after clipping to the bounds (to 0 from below for k2 and k3). k1 is the logarithm
    of the inverse ratio, so `high` means the sampler found the tokens likelier.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens, before any rejection.
      seg: [B, T] sequence ids of packed rows, or None.
      option: one of `REJECTION_OPTIONS`, the names in `masks.MASKS`.
      upper, lower: the bounds given to it; for k1 bounds of a ratio, lower=None is 1 / upper.

    Returns rollout_corr/rollout_rs_<option>_<metric> for the metrics mean, std, max, min,
    fraction_high, fraction_low, seq_mean, seq_std, seq_max, seq_min, seq_max_deviation,
    seq_fraction_high, seq_fraction_low (k1 only), masked_fraction (of tokens) and
    seq_masked_fraction (of the sequences, those that lose a token).
    """
    if option not in REJECTION_OPTIONS:
        raise ValueError(
            f"Unknown rejection option {option!r}; choose one of {', '.join(REJECTION_OPTIONS)}."
        )
    level, _, estimator = option.rpartition("_")
    is_band = estimator == "k1"
    low, high = _interval(is_band, upper, lower)

    def is_lost(x):
        return ~((x >= low) & (x <= high))

    stat_bt = masks.statistic(f"token_{estimator}", log_ratio, mask)
    num_tokens_bs = ratios.log_ratio_stats(log_ratio, mask, seg).count
    if level == "token":
        x, weight = stat_bt, ratios.as_bool(mask).astype(stat_bt.dtype)
        stat_bs = masks.sequence_statistic(f"seq_mean_{estimator}", log_ratio, mask, seg)
        is_lost_bs = ratios.sequence_sum(is_lost(stat_bt), mask, seg) > 0
    else:
        x = stat_bs = masks.sequence_statistic(option, log_ratio, mask, seg)
        weight, is_lost_bs = num_tokens_bs, is_lost(stat_bs)
    clipped, is_sequence_bs = ratios.clamp(x, low if is_band else 0.0, high), num_tokens_bs > 0
    variance = _weighted_mean(jnp.square(clipped - _weighted_mean(clipped, weight)), weight)
    metrics = {
        "mean": _weighted_mean(x, weight),
        "std": jnp.sqrt(variance),
        "max": ratios.masked_max(x, weight),
        "min": ratios.masked_min(x, weight),
        "fraction_high": ratios.masked_mean(x > high, weight),
        "fraction_low": ratios.masked_mean(x < low, weight),
        "seq_fraction_high": ratios.masked_mean(stat_bs > high, is_sequence_bs),
        "masked_fraction": _weighted_mean(is_lost(x), weight),
        "seq_masked_fraction": ratios.masked_mean(is_lost_bs, is_sequence_bs),
    }
    metrics |= _sequence_statistics(stat_bs, is_sequence_bs, centre=0.0)
    if is_band:
        metrics["seq_fraction_low"] = ratios.masked_mean(stat_bs < low, is_sequence_bs)
    return detached(metrics, f"rollout_corr/rollout_rs_{option}_")


def _interval(is_band, upper, lower):
    """Returns the interval of a statistic that its criterion keeps; a band has log-ratios."""
    if not is_band:
        return -jnp.inf, upper
    high = ratios.log_bound(upper)
    return (-high if lower is None else ratios.log_bound(lower)), high


def _weighted_mean(x, weight):
    """Returns the weighted mean sum(weight x) / sum(weight); 0 if all weights are 0."""
    return ratios.safe_divide(ratios.masked_sum(x * weight, weight), jnp.sum(weight))


def rejected_fractions(
    is_accepted: chex.Array, mask: chex.Array, seg: chex.Array | None = None, *,
    option: str | None = None,
) -> dict[str, chex.Array]:
    """Returns the share of tokens and sequences that one or all rejection criteria removed.

    Args:
      is_accepted: [B, T] True on the tokens kept, from `masks.MASKS`.
      mask: [B, T] valid tokens, before any rejection.
      seg: [B, T] sequence ids of packed rows, or None.
      option: name of the criterion for the keys; None for all together.

    Returns rollout_corr/rollout_rs_[<option>_]masked_fraction, the share of valid tokens rejected,
    and rollout_corr/rollout_rs_[<option>_]seq_masked_fraction, the share of sequences that lose a
    token (for all together verl divides it by all rows, empty ones too).
    """
    is_lost_bt = ~ratios.as_bool(is_accepted)
    is_sequence_bs = ratios.sequence_count(is_lost_bt, mask, seg) > 0
    num_lost_bs = ratios.sequence_sum(is_lost_bt, mask, seg)
    metrics = {
        "masked_fraction": ratios.masked_mean(is_lost_bt, mask),
        "seq_masked_fraction": ratios.masked_mean(num_lost_bs > 0, is_sequence_bs),
    }
    name = "" if option is None else f"{option}_"
    return detached(metrics, f"rollout_corr/rollout_rs_{name}")


@ratios.jit
def kept_sample_size(
    w: chex.Array, is_accepted: chex.Array, mask: chex.Array
) -> dict[str, chex.Array]:
    """Returns the effective sample size of the weights in the gradient, rejected tokens 0.

    verl's rollout_is_eff_sample_size is that of the weights before rejection, clamped to the cap.

    Args:
      w: [B, T] weights, normalised or not.
      is_accepted: [B, T] True on the tokens kept, from `masks.MASKS`.
      mask: [B, T] valid tokens, before any rejection.

    Returns rollout_corr/kept_eff_sample_size, mean(w)^2 / mean(w^2) over the valid tokens with
    w = 0 where rejected: at most the share that is kept, 0 if every token is rejected.
    """
    kept_bt = jnp.where(ratios.as_bool(is_accepted), w, 0.0)
    metrics = {"kept_eff_sample_size": ratios.effective_sample_size(kept_bt, mask)}
    return detached(metrics, "rollout_corr/")


def _centred(x, mask):
    """Returns x minus its mean over the valid entries, exactly 0 for a constant."""
    shifted = x - ratios.masked_max(x, mask)
    return shifted - ratios.masked_mean(shifted, mask)


@ratios.jit
def probability_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array
) -> dict[str, chex.Array]:
    """Measures the difference of the sampled tokens' probabilities (not log-probs).

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
    p_dev_bt, q_dev_bt = _centred(p_bt, mask), _centred(q_bt, mask)
    covariance = ratios.masked_mean(p_dev_bt * q_dev_bt, mask)
    variances = [ratios.masked_mean(jnp.square(x), mask) for x in (p_dev_bt, q_dev_bt)]
    spread = jnp.sqrt(variances[0]) * jnp.sqrt(variances[1])
    metrics = {
        "rollout_probs_diff_valid": ratios.masked_max(ratios.as_bool(mask), mask),
        "rollout_probs_diff_max": ratios.masked_max(gap_bt, mask),
        "rollout_probs_diff_mean": ratios.masked_mean(gap_bt, mask),
        "rollout_probs_diff_std": ratios.masked_std(gap_bt, mask, ddof=1),
        "rollout_actor_probs_pearson_corr": jnp.clip(
            ratios.safe_divide(covariance, spread), -1.0, 1.0
        ),
    }
    return detached(metrics, "training/")


@ratios.jit
def snis_reward(
    rewards: chex.Array, log_ratio: chex.Array, mask: chex.Array, seg: chex.Array | None = None
) -> tuple[chex.Array, chex.Array]:
    """Estimates the learner's expected reward by self-normalised importance sampling of sequences.

    sum_i w_i R_i / sum_i w_i with w_i = prod_t pi_old / mu, computed as a softmax of the summed
    log-ratios: no clamp is needed. The estimate is biased by O(1 / number of sequences) and means
    nothing when the sample size is small.

    Args:
      rewards: reward of each sequence, [B], or [B, S] with seg.
      log_ratio: [B, T] nats, logp_old - logp_behav.
      mask: [B, T] valid tokens; a sequence without any is left out.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns (estimate in reward units, effective sample size as a fraction in (0, 1]), both 0 for an
    empty mask.
    """
    chex.assert_rank([rewards, log_ratio, mask], [1 if seg is None else 2, 2, 2])
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    sum_bs, is_sequence_bs = stats.log_ratio_sum, stats.count > 0
    rewards_bs = rewards[:, None] if seg is None else rewards
    chex.assert_equal_shape([rewards_bs, sum_bs])
    w_bs = relative_weights(sum_bs, is_sequence_bs)
    total = ratios.masked_sum(w_bs * rewards_bs, is_sequence_bs)
    estimate = ratios.safe_divide(total, jnp.sum(w_bs))
    return jax.lax.stop_gradient((estimate, ratios.effective_sample_size(w_bs, is_sequence_bs)))
