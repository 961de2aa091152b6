"""Metrics of a batch: rewards, advantages, values, lengths, versions, and the gradient's noise.

Names are verl's. Every function is pure, works under jit, carries no gradient and returns a dict of
scalars. Where verl has NaN (an empty selection, a variance of one value) the metric is 0. Only
sequences with a valid token count as sequences.
"""

import chex
import jax.numpy as jnp

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import ratios


def _summary(name, x, is_valid):
    """Returns {name/mean, name/max, name/min} of the valid entries."""
    return {
        f"{name}/mean": ratios.masked_mean(x, is_valid),
        f"{name}/max": ratios.masked_max(x, is_valid),
        f"{name}/min": ratios.masked_min(x, is_valid),
    }


def reward_metrics(
    scores: chex.Array, rewards: chex.Array, response_length: chex.Array
) -> dict[str, chex.Array]:
    """Returns critic/{score,rewards}/{mean,max,min} over the samples with a response.

    Args:
      scores: [N] reward of each sample from the task; NaN is unknown and left out.
      rewards: [N] the same after a KL or length penalty.
      response_length: [N] tokens of the response; a sample of length 0 was aborted and is left out.
    """
    chex.assert_rank(scores, 1)
    chex.assert_equal_shape([scores, rewards, response_length])
    is_answered_n = (response_length > 0) & ~jnp.isnan(scores)
    return mismatch.detached(
        _summary("critic/score", scores, is_answered_n)
        | _summary("critic/rewards", rewards, is_answered_n)
    )


def advantage_metrics(
    adv: chex.Array, returns: chex.Array, mask: chex.Array, values: chex.Array | None = None
) -> dict[str, chex.Array]:
    """Returns mean, maximum and minimum of advantages, returns and values over the valid tokens.

    Args:
      adv: [B, T] advantages.
      returns: [B, T] targets of the critic, or the rewards-to-go where there is none.
      mask: [B, T] valid tokens.
      values: [B, T] the critic's values, or None.

    Returns critic/{advantages,returns}/{mean,max,min} and, with values, critic/values/{mean,max,
    min} and critic/vf_explained_var = 1 - var(returns - values) / (var(returns) + 1e-5), unbiased
    variances; 0 with fewer than two tokens.
    """
    chex.assert_rank(adv, 2)
    chex.assert_equal_shape([adv, returns, mask])
    metrics = _summary("critic/advantages", adv, mask) | _summary("critic/returns", returns, mask)
    if values is not None:
        chex.assert_equal_shape([returns, values])
        residual_bt = ratios.zero_padding(returns, mask) - ratios.zero_padding(values, mask)
        unexplained = jnp.square(ratios.masked_std(residual_bt, mask, ddof=1))
        variance = jnp.square(ratios.masked_std(returns, mask, ddof=1))
        explained = 1.0 - unexplained / (variance + 1e-5)
        has_variance = ratios.masked_count(returns, mask) > 1
        metrics |= _summary("critic/values", values, mask)
        metrics["critic/vf_explained_var"] = jnp.where(has_variance, explained, 0.0)
    return mismatch.detached(metrics)


def length_metrics(
    prompt_length: chex.Array, response_length: chex.Array, *, max_prompt_length: int,
    max_response_length: int, longest_turn: chex.Array | None = None,
    num_turns: chex.Array | None = None, tool_calls: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns statistics of the samples' lengths in tokens, turns and tool calls.

    Args:
      prompt_length, response_length: [N] tokens; a response of length 0 was aborted.
      max_prompt_length, max_response_length: the limits; `clip_ratio` is the share of samples that
        reach them.
      longest_turn: [N] tokens of the turn that is compared with max_response_length, or None: the
        response is one turn.
      num_turns: [N] turns of the conversation, or None.
      tool_calls: [N] tool calls made, or None.

    Returns {response_length,response_length_non_aborted,prompt_length}/{mean,max,min,clip_ratio},
    response/aborted_ratio, and if given {num_turns,tool_call_counts}/{mean,max,min}.
    """
    chex.assert_rank(response_length, 1)
    chex.assert_equal_shape([prompt_length, response_length])
    is_answered_n = response_length > 0
    all_n = jnp.ones_like(is_answered_n)
    metrics = {"response/aborted_ratio": ratios.masked_mean(~is_answered_n, all_n)}
    turn_n = response_length if longest_turn is None else longest_turn
    for name, length_n, is_at_limit_n, is_valid_n in (
        ("response_length", response_length, turn_n == max_response_length, all_n),
        ("response_length_non_aborted", response_length, turn_n == max_response_length, is_answered_n),
        ("prompt_length", prompt_length, prompt_length == max_prompt_length, all_n),
    ):
        metrics |= _summary(name, length_n, is_valid_n)
        metrics[f"{name}/clip_ratio"] = ratios.masked_mean(is_at_limit_n, is_valid_n)
    for name, count_n in (("num_turns", num_turns), ("tool_call_counts", tool_calls)):
        if count_n is not None:
            metrics |= _summary(name, count_n, all_n)
    return mismatch.detached(metrics)


def staleness_metrics(
    version: chex.Array, current_version: chex.Numeric, mask: chex.Array,
    seg: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures by how many weight versions the sequences lag behind the learner.

    Args:
      version: [B, T] int, version of the weights that sampled the token.
      current_version: version of the weights that the learner holds at the start of the step.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns training/off_policy/<metric>/{mean,max,min} over sequences for the metrics
    trajectory_spans (versions from oldest to newest token, 1 for a single version),
    trajectory_staleness (lag of the newest token) and trajectory_staleness_worst (of the oldest), and
    training/off_policy/token_staleness/mean over tokens.
    """
    chex.assert_rank([version, mask], 2)
    lag_bt = jnp.where(ratios.as_bool(mask), current_version - version, 0)
    worst_bs = ratios.sequence_max(lag_bt, mask, seg)
    least_bs = -ratios.sequence_max(-lag_bt, mask, seg)
    is_sequence_bs = ratios.sequence_count(mask, mask, seg) > 0
    metrics = (
        _summary("trajectory_spans", worst_bs - least_bs + 1.0, is_sequence_bs)
        | _summary("trajectory_staleness", least_bs, is_sequence_bs)
        | _summary("trajectory_staleness_worst", worst_bs, is_sequence_bs)
        | {"token_staleness/mean": ratios.masked_mean(lag_bt, mask)}
    )
    return mismatch.detached(metrics, "training/off_policy/")


def variance_proxy_metrics(
    logp_old: chex.Array, adv: chex.Array, sum_pi_squared: chex.Array, mask: chex.Array,
    seg: chex.Array | None = None, *, w: chex.Array | None = None,
    gradient_norm: chex.Numeric | None = None, num_sequences: chex.Numeric | None = None,
) -> dict[str, chex.Array]:
    """Estimates signal and noise of the gradient from the squared norm of the scores.

    The squared norm of the score in logit space is 1 - 2 pi(y_t) + sum_v pi(v)^2 per token
    (arXiv:2602.07078); W is its sum over a sequence, A the mean advantage of its tokens.

      proxy1_signal_strength  gradient_norm^2
      proxy2_total_power      mean of A^2 max(W, 0); with weights times their squared mean
      proxy3_pure_noise       max(0, (proxy2 - proxy1) / (n - 1)) for a gradient of n sequences
      expected_a_squared      mean of A^2
      expected_w              mean of W; with weights each token's score counts w^2 times

    The mean g of n independent gradients g_i has E|g|^2 = |E g_i|^2 + V / n with V = E|g_i|^2 -
    |E g_i|^2, so (E|g_i|^2 - |g|^2) / (n - 1) is on average V / n, the variance of g. So g may be
    of a random part of the sequences that are given here: their power has the same mean. Proxies
    they remain, to be followed through a run: power is taken over logits, g over parameters and
    with its loss's other terms and its aggregation (`token-mean` divides by tokens).

    With weights, tokens with w^2 below 1e-10 fade out of proxy2's W, as in verl.

    Args:
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      adv: [B, T] advantages.
      sum_pi_squared: [B, T] sum over the vocabulary of pi_old^2 at the token's position.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      w: [B, T] importance weights, or None.
      gradient_norm: norm of a gradient at the weights that sampled; None makes proxy1 and proxy3
        0, and so does a single sequence for proxy3.
      num_sequences: n, the sequences of that gradient; None if it is that of all of these.

    Returns five scalars named variance_proxy/<metric>.
    """
    chex.assert_rank(logp_old, 2)
    chex.assert_equal_shape([logp_old, adv, sum_pi_squared, mask])
    p_bt = jnp.exp(ratios.zero_padding(logp_old, mask))
    score_bt = 1.0 - 2.0 * p_bt + ratios.zero_padding(sum_pi_squared, mask)
    is_sequence_bs = ratios.sequence_count(logp_old, mask, seg) > 0
    a_squared_bs = jnp.square(ratios.sequence_mean(adv, mask, seg))
    score_bs, weighted_bs, w_squared_bs = _score_norms(score_bt, w, mask, seg)
    power_bs = w_squared_bs * a_squared_bs * jnp.maximum(score_bs, 0.0)
    power = ratios.masked_mean(power_bs, is_sequence_bs)
    signal = noise = jnp.zeros_like(power)
    if gradient_norm is not None:
        signal = jnp.square(jnp.asarray(gradient_norm, power.dtype))
        if num_sequences is None:
            num_sequences = ratios.masked_count(power_bs, is_sequence_bs)
        noise = jnp.maximum(ratios.safe_divide(power - signal, num_sequences - 1.0), 0.0)
    metrics = {
        "proxy1_signal_strength": signal,
        "proxy2_total_power": power,
        "proxy3_pure_noise": noise,
        "expected_a_squared": ratios.masked_mean(a_squared_bs, is_sequence_bs),
        "expected_w": ratios.masked_mean(weighted_bs, is_sequence_bs),
    }
    return mismatch.detached(metrics, "variance_proxy/")


def _score_norms(score_bt, w, mask, seg):
    """Returns for each sequence [B, S]: the squared score norm W, the same with tokens weighted by w^2,
    and the square of the mean weight."""
    if w is None:
        score_bs = ratios.sequence_sum(score_bt, mask, seg)
        return score_bs, score_bs, jnp.ones_like(score_bs)
    w_squared_bt = jnp.square(ratios.zero_padding(w, mask))
    weighted_bt = score_bt * w_squared_bt
    weighted_bs = ratios.sequence_sum(weighted_bt, mask, seg)
    score_bs = ratios.sequence_sum(weighted_bt / jnp.maximum(w_squared_bt, 1e-10), mask, seg)
    w_squared_bs = jnp.square(ratios.sequence_mean(w, mask, seg))
    return score_bs, weighted_bs, w_squared_bs
