"""Measures where the mismatch comes from: factor of the ratio, position, turn, entropy.

Every function is pure, works under jit and carries no gradient. Metrics are scalars named
mismatch/<metric>. An empty mask, bucket or row gives 0 and never NaN; log-ratios are clamped to
+-20 before exp, a sequence's after summing.

The full ratio of the trained policy to the sampler has three factors:

  engine        logp_old - logp_behav    same weights, other program, precision or filter
  staleness     logp_prox - logp_old     weights moved between sampling and this training step
  trust_region  logp - logp_prox         weights moved within this step, what PPO clips
"""

import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.diagnostics import divergences, mismatch
from jaxrl_tis.estimators import ratios

FACTORS = ("engine", "staleness", "trust_region")
ENTROPY_STARTS = (0, 0.1, 0.5, 2)  # nats, the least entropy of each bucket; the last has no end


def split_ratio(
    logp: chex.Array, logp_prox: chex.Array, logp_old: chex.Array, logp_behav: chex.Array,
    mask: chex.Array, logp_student: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """The log of each factor of pi / mu, [B, T] each, 0 at padding; their sum is logp - logp_behav.

    Args:
      logp: [B, T] the policy that is trained, nats.
      logp_prox: [B, T] the learner at the start of the update; pass logp_old where nothing was stale.
      logp_old: [B, T] the learner at the weights that sampled.
      logp_behav: [B, T] the sampler.
      mask: [B, T] valid tokens.
      logp_student: [B, T] the sampler's, of the policy alone, where a teacher is mixed in.

    Returns {"engine", "staleness", "trust_region"} in nats, without gradient; with a teacher also
    "mixing", and "engine" without it.
    """
    names, chain = [*FACTORS], [logp_behav, logp_old, logp_prox, logp]
    if logp_student is not None:
        names.insert(0, "mixing")
        chain.insert(1, logp_student)
    return {
        factor: jax.lax.stop_gradient(ratios.safe_log_ratio(chain[i + 1], chain[i], mask))
        for i, factor in enumerate(names)
    }


@ratios.jit
def factor_metrics(
    logp: chex.Array, logp_prox: chex.Array, logp_old: chex.Array, logp_behav: chex.Array,
    mask: chex.Array, logp_student: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures how much each factor adds to the drift; arguments as in `split_ratio`.

    Returns means over tokens, for each factor f and for their product l, the sum of the l_f:
    mismatch/<factor>/log_ratio_abs_mean in nats, log_ratio_square_mean, and log_ratio_part, mean(l_f l),
    both in nats^2. The parts add up to mean(l^2), the product's; one may be negative where two cancel.
    """
    log_bt = split_ratio(logp, logp_prox, logp_old, logp_behav, mask, logp_student)
    total_bt = sum(log_bt.values())
    metrics = {}
    for factor, x_bt in (log_bt | {"product": total_bt}).items():
        metrics[f"{factor}/log_ratio_abs_mean"] = ratios.masked_mean(jnp.abs(x_bt), mask)
        metrics[f"{factor}/log_ratio_square_mean"] = ratios.masked_mean(x_bt**2, mask)
        metrics[f"{factor}/log_ratio_part"] = ratios.masked_mean(x_bt * total_bt, mask)
    return mismatch.detached(metrics, "mismatch/")


def shares(metrics: dict[str, chex.Numeric]) -> dict[str, chex.Array]:
    """Returns mismatch/<factor>/share of the squared drift, from the parts of `factor_metrics`. The
    shares add up to 1, or are 0 without any drift."""
    part = lambda factor: jnp.asarray(metrics[f"mismatch/{factor}/log_ratio_part"])
    return {
        f"mismatch/{factor}/share": ratios.safe_divide(part(factor), part("product"))
        for factor in FACTORS
    }


def factor_statistics(
    logp: chex.Array, logp_prox: chex.Array, logp_old: chex.Array, logp_behav: chex.Array,
    mask: chex.Array, seg: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures the distribution of each factor of the ratio and of their product.

    Args:
      logp, logp_prox, logp_old, logp_behav: [B, T] nats, see `split_ratio`.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns the metrics of `factor_metrics` with the `shares`, and mismatch/<factor>/<metric>:
    log_ratio_mean, log_ratio_abs_max, ratio_mean_token, ratio_mean_seq, tv_token, tv_seq,
    tv_seq_bound, chi2_token, chi2_seq, ess_token, ess_seq. Samples come from mu, so the divergences are
    true ones for engine and product, and describe the factor otherwise.
    """
    log_bt = split_ratio(logp, logp_prox, logp_old, logp_behav, mask)
    log_bt["product"] = sum(log_bt.values())
    is_sequence_bs = ratios.sequence_count(logp, mask, seg) > 0
    metrics = {}
    for factor, x_bt in log_bt.items():
        sum_bs = ratios.sequence_sum(x_bt, mask, seg)
        statistics = divergences.ratio_statistics(x_bt, sum_bs, mask, is_sequence_bs)
        statistics["log_ratio_mean"] = ratios.masked_mean(x_bt, mask)
        metrics |= mismatch.detached(statistics, f"mismatch/{factor}/")
    metrics |= factor_metrics(logp, logp_prox, logp_old, logp_behav, mask)
    return metrics | shares(metrics)


@functools.partial(ratios.jit, static_argnames="num_buckets")
def bucket_statistics(
    logp_old: chex.Array, logp_behav: chex.Array, bucket: chex.Array, mask: chex.Array, *,
    num_buckets: int, is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns statistics of |p_old - p_behav| and of logp_old - logp_behav (nats) per bucket.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      bucket: [B, T] int bucket of each valid token; the last one also takes what lies beyond. A token
        below 0 is in none.
      mask: [B, T] valid tokens.
      num_buckets: K, static.
      is_clipped: [B, T] whether a bound changed the token's weight, or None.

    Returns [K] each, 0 for an empty bucket: dp_mean, dp_max, log_ratio_mean, log_ratio_abs_mean,
    token_fraction, the share of the tokens in buckets, and with `is_clipped` fraction_clipped, the
    share of the bucket's tokens.
    """
    chex.assert_equal_shape([logp_old, logp_behav, bucket, mask])
    mask = ratios.as_bool(mask)
    gap_bt = divergences.probability_gap(logp_old, logp_behav, mask)
    log_ratio_bt = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    one_bt = mask.astype(gap_bt.dtype)
    # A sum over segments drops the tokens of segments below 0.
    bucket_bt = jnp.where(mask, jnp.minimum(bucket, num_buckets - 1), 0)
    columns = [gap_bt, log_ratio_bt, jnp.abs(log_ratio_bt), one_bt]
    if is_clipped is not None:
        columns.append(one_bt * is_clipped)
    columns_btc = jnp.stack(columns, axis=-1)

    def row_sum(x_tc, bucket_t):
        return jax.ops.segment_sum(x_tc, bucket_t, num_segments=num_buckets)

    def row_max(x_t, bucket_t):
        return jax.ops.segment_max(x_t, bucket_t, num_segments=num_buckets)

    sum_kc = jnp.sum(jax.vmap(row_sum)(columns_btc, bucket_bt), axis=0)
    max_k = jnp.max(jax.vmap(row_max)(gap_bt, bucket_bt), axis=0)
    count_k = sum_kc[:, 3]
    statistics = {
        "dp_mean": ratios.safe_divide(sum_kc[:, 0], count_k),
        "dp_max": jnp.maximum(max_k, 0.0),
        "log_ratio_mean": ratios.safe_divide(sum_kc[:, 1], count_k),
        "log_ratio_abs_mean": ratios.safe_divide(sum_kc[:, 2], count_k),
        "token_fraction": ratios.safe_divide(count_k, jnp.sum(count_k)),
    }
    if is_clipped is not None:
        statistics["fraction_clipped"] = ratios.safe_divide(sum_kc[:, 4], count_k)
    return mismatch.detached(statistics)


def bucket_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, bucket: chex.Array, mask: chex.Array, *,
    kind: str, labels: Sequence[str | float], is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns `bucket_statistics` as scalars mismatch/<kind>_<label>/<statistic>, a label per bucket."""
    statistics = bucket_statistics(
        logp_old, logp_behav, bucket, mask, num_buckets=len(labels), is_clipped=is_clipped
    )
    return {
        f"mismatch/{kind}_{label}/{name}": value_k[k]
        for k, label in enumerate(labels)
        for name, value_k in statistics.items()
    }


def power_of_two_bucket(x: chex.Array) -> chex.Array:
    """Returns the bucket of an integer x >= 0: 0 for 0, then 1 + floor(log2 x): 1, 2-3, 4-7, ..."""
    return 32 - jax.lax.clz(x.astype(jnp.int32))


def bucket_starts(num_buckets: int) -> tuple[int, ...]:
    """Returns the smallest member of each power-of-two bucket."""
    return (0, *(2**k for k in range(num_buckets - 1)))


def _columns(mask, seg):
    """Returns the column of each token, and of its sequence's first valid token, [B, T] each."""
    column_bt = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    first_bs = -ratios.sequence_max(-column_bt, mask, seg)
    first_bt = ratios.to_tokens(first_bs, seg, mask.shape[1])
    return column_bt, first_bt.astype(jnp.int32)


def response_positions(mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Returns the position of each token since the sequence's first valid token (0), [B, T] int.

    Tool text within the response counts. Not meaningful outside the mask. In packed rows a sequence
    is contiguous.
    """
    column_bt, first_bt = _columns(mask, seg)
    return column_bt - first_bt


def tool_distances(mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Returns the distance of each token from the last tool token, [B, T] int; 0 without any.

    A tool token is one that the policy did not choose, after one that it did: outside the mask but
    in the sequence, after its first valid token. Pass the mask as sampled, before any rejection. In
    packed rows seg numbers the tool tokens too and a sequence is contiguous. Takes a running
    maximum over the row.
    """
    column_bt, first_bt = _columns(mask, seg)
    is_tool_bt = ~ratios.as_bool(mask) & (column_bt > first_bt)
    is_tool_bt &= ratios.segment_ids(seg, mask) > 0
    last_bt = jax.lax.cummax(jnp.where(is_tool_bt, column_bt, -1), axis=1)
    return jnp.where(last_bt > first_bt, column_bt - last_bt, 0)


def position_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None,
    *, num_buckets: int = 16, is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures the mismatch by position in the response, in buckets 0, 1, 2-3, 4-7, ...

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] valid tokens as sampled.
      seg: [B, T] sequence ids of packed rows, or None.
      num_buckets: static; the last bucket has no end.
      is_clipped: of `bucket_statistics`.

    Returns mismatch/position_<first position>/<statistic>, see `bucket_statistics`.
    """
    bucket = power_of_two_bucket(response_positions(mask, seg))
    labels = bucket_starts(num_buckets)
    return bucket_metrics(
        logp_old, logp_behav, bucket, mask, kind="position", labels=labels, is_clipped=is_clipped
    )


def after_tool_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array | None = None,
    *, num_buckets: int = 16, is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures the mismatch by distance from the last tool token, in buckets 1, 2-3, 4-7, ...

    A run with an environment profiles it.

    Arguments as in `position_metrics`; what a tool token is: `tool_distances`.

    Returns mismatch/after_tool_<smallest distance>/<statistic>, see `bucket_statistics`; tokens
    before any tool token are in mismatch/after_tool_none/<statistic>.
    """
    bucket = power_of_two_bucket(tool_distances(mask, seg))
    labels: list[str | float] = ["none", *bucket_starts(num_buckets)[1:]]
    return bucket_metrics(
        logp_old, logp_behav, bucket, mask, kind="after_tool", labels=labels, is_clipped=is_clipped
    )


def turn_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, turn: chex.Array, mask: chex.Array, *,
    num_turns: int, is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures the mismatch by turn of the conversation.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      turn: [B, T] int, turn number from 0.
      mask: [B, T] valid tokens.
      num_turns: static; later turns join the last one.
      is_clipped: of `bucket_statistics`.

    Returns mismatch/turn_<number>/<statistic>, see `bucket_statistics`.
    """
    labels = range(num_turns)
    return bucket_metrics(
        logp_old, logp_behav, turn, mask, kind="turn", labels=labels, is_clipped=is_clipped
    )


def entropy_bucket(entropy: chex.Array) -> chex.Array:
    """Returns the bucket of each entropy (nats) by `ENTROPY_STARTS`, int; -1 where it is unknown (NaN)."""
    return sum((entropy >= start).astype(jnp.int32) for start in ENTROPY_STARTS) - 1


def entropy_metrics(
    logp_old: chex.Array, logp_behav: chex.Array, entropy: chex.Array, mask: chex.Array, *,
    is_clipped: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures the mismatch by the entropy of the distribution that a token was sampled from.

    The edges are fixed, so runs compare.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      entropy: [B, T] nats; tokens of unknown entropy (NaN) are left out.
      mask: [B, T] valid tokens.
      is_clipped: of `bucket_statistics`.

    Returns mismatch/entropy_<least entropy>/<statistic>, see `bucket_statistics`.
    """
    bucket = entropy_bucket(entropy)
    return bucket_metrics(
        logp_old, logp_behav, bucket, mask, kind="entropy", labels=ENTROPY_STARTS,
        is_clipped=is_clipped,
    )
