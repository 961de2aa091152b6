"""Advantages that subtract a baseline of their own from a return.

The entries are part of `advantages.ADVANTAGES`, whose module states the arguments that all share.
None carries a gradient.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import ratios, returns
from jaxrl_tis.estimators.traits import Traits

PATH = ("logp_prox", "sum_pi_squared", "weights")

OTB_EPS = 1e-8  # in the denominator of the token baselines, as in verl


def _minus_weighted_mean(scores_b, power_b, group):
    """Scores minus their weighted group mean, weights power_b [B] >= 0; exactly 0 where all scores of
    a group are equal, and the score itself where all its weights are 0."""
    ids, is_known_b = returns.group_ids(group), ~jnp.isnan(scores_b)
    power_b = jnp.where(is_known_b, power_b, 0.0)
    total_b = returns.group_sum(power_b * jnp.where(is_known_b, scores_b, 0.0), ids)
    baseline_b = ratios.safe_divide(total_b, returns.group_sum(power_b, ids))
    _, _, _, is_constant = returns.group_moments(scores_b, group)
    return jnp.where(is_constant, 0.0, scores_b - baseline_b)


@Traits(needs=("greedy_rewards",), compares=False, per_token=True)
def remax(rewards: Array, mask: Array, group: Array, *, greedy_rewards: Array) -> Array:
    """ReMax (arXiv:2310.10505), A_t = sum_{s >= t} r_s - R(greedy response to the same prompt).

    No normalisation and no group: a group of one is like any other.

    Unit: token (return), sequence (baseline). Use: an unbiased gradient with one sample per prompt
    (docs/oracle.md); costs a greedy response per prompt.

    Args:
      rewards: [B] (put on the last valid token) or [B, T].
      mask: [B, T] valid tokens.
      group: not used.
      greedy_rewards: [B] reward of the greedy response to the row's prompt; NaN, as in rewards, is
        unknown and gives 0.

    Returns adv [B, T].
    """
    del group
    rewards, mask = returns.known(rewards, mask)
    mask &= ~jnp.isnan(greedy_rewards)[:, None]
    returns_bt = returns.rewards_to_go(rewards, mask)
    chex.assert_shape(greedy_rewards, (returns_bt.shape[0],))
    adv_bt = returns_bt - ratios.as_float(greedy_rewards)[:, None]
    return jax.lax.stop_gradient(ratios.zero_padding(adv_bt, mask))


@Traits(compares=False, of_batch=True)
def batch_mean(rewards: Array, mask: Array, group: Array) -> Array:
    """FlashREINFORCE's advantage (Hu et al. 2026), A = R - mean of the batch; no division by its
    std.

    The mean is over sequences, each counted once, fully masked rows too: pass no rows that only
    fill up the batch. As it holds the sequence's own reward, the expected step is (B - 1) / B of
    the gradient with B sequences. A batch whose rewards are all equal gives exactly 0.

    Unit: batch. Use: one sample per prompt and no critic, as in asynchronous training; one baseline
    as in `reinforce_plus_plus`.

    Args:
      rewards, mask: see `advantages`; the whole rollout batch must be in the call.
      group: not used.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    one = jnp.zeros_like(group)
    _, mean, _, is_constant = returns.group_moments(scores_b, one)
    mask = returns.compared(scores_b, mask, one)
    return returns.on_tokens(jnp.where(is_constant, 0.0, scores_b - mean), mask)


def opo(rewards: Array, mask: Array, group: Array) -> Array:
    """OPO (arXiv:2505.23585), A = R - sum_j n_j R_j / sum_j n_j with n the number of valid tokens.

    The baseline minimises sum_j n_j (R_j - b)^2 over the group: the variance of the gradient if the
    squared norm of a sequence's score grows with its length. A group whose rewards are all equal
    gives exactly 0. A group of one has baseline 0, as in verl: A = R. A fully masked row has n = 0.

    Unit: group. Use: responses of different lengths; with equal ones it is `dr_grpo`, and it turns
    the gradient a little (docs/oracle.md).

    Args:
      rewards, mask, group: see `advantages`.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    length_b = ratios.masked_count(scores_b, mask, axis=1)
    count, _, _, _ = returns.group_moments(scores_b, group)
    adv_b = _minus_weighted_mean(scores_b, length_b, group)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(count == 1, scores_b, adv_b), mask)


@Traits(needs=("grad_norms", "logp_prox", "logp_behav"), of_policy=True, of_sequences=True)
def opob(
    rewards: Array, mask: Array, group: Array, *,
    grad_norms: Array, logp_prox: Array, logp_behav: Array,
) -> Array:
    """OPOB of VCPO (arXiv:2602.17616), A = R - sum_j w_j^2 |g_j|^2 R_j / sum_j w_j^2 |g_j|^2.

    w_j = prod_t pi / mu, not truncated, and g_j = grad log pi(y_j), summed over tokens. The
    baseline minimises sum_j w_j^2 |g_j|^2 (R_j - b)^2 over the group, the second moment of the
    importance-weighted gradient. Its weights are taken relative to the group's largest, in log
    space: they need no bound, and the denominator needs no 1e-8, which the authors' code has. A
    group whose rewards are all equal gives exactly 0, and so does a group of one, which is its own
    baseline. If every weight of a group is 0, the baseline is 0.

    Unit: group. Use: off-policy batches with sequence weights; a backward pass per sequence for a
    variance of 26.95 instead of 27.01 without a baseline (docs/oracle.md).

    Args:
      rewards, mask, group: see `advantages`.
      grad_norms: [B] squared norm |g_j|^2 of the gradient of the sequence's log-prob; needs one
        backward pass per sequence.
      logp_prox: [B, T] log-probs of the policy that the update starts from, nats.
      logp_behav: [B, T] sampler's log-probs, nats.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    chex.assert_equal_shape([grad_norms, scores_b])
    log_w_b = jnp.sum(ratios.safe_log_ratio(logp_prox, logp_behav, mask), axis=1)
    norm_b = ratios.zero_padding(grad_norms, jnp.any(ratios.as_bool(mask), axis=1))
    is_weighted_b = (norm_b > 0) & ~jnp.isnan(scores_b)
    log_power_b = 2.0 * log_w_b + jnp.log(jnp.where(is_weighted_b, norm_b, 1.0))
    log_power_b = jnp.where(is_weighted_b, log_power_b, -jnp.inf)
    largest_b = returns.group_max(log_power_b, returns.group_ids(group))
    power_b = jnp.where(is_weighted_b, jnp.exp(log_power_b - largest_b), 0.0)
    adv_b = _minus_weighted_mean(scores_b, power_b, group)
    return returns.on_tokens(adv_b, returns.compared(scores_b, mask, group))


def _path_power(mask, logp_prox, sum_pi_squared, weights, form):
    """W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_v^2) w_j^2 over valid tokens, [B, T], 0 at padding;
    forms with the weights outside of the sum in `otb`.

    The term is the squared norm of the score with respect to the logits, so it is at least 0;
    rounding below that is cut off.
    """
    ratios.check_choice("form", form, ("paper", "survey", "survey_mean"))
    chex.assert_equal_shape([logp_prox, sum_pi_squared, mask])
    p_bt = jnp.exp(ratios.zero_padding(logp_prox, mask))
    squares_bt = ratios.zero_padding(sum_pi_squared, mask)
    power_bt = jnp.maximum(1.0 - 2.0 * p_bt + squares_bt, 0.0)
    power_bt, square_bt = ratios.zero_padding(power_bt, mask), jnp.ones((), power_bt.dtype)
    if weights is not None:
        chex.assert_equal_shape([weights, mask])
        square_bt = jnp.square(ratios.zero_padding(weights, mask))
    if form == "paper":
        return ratios.zero_padding(jnp.cumsum(power_bt * square_bt, axis=1), mask)
    if form == "survey_mean" and weights is not None:
        count_bt = jnp.cumsum(ratios.as_bool(mask), axis=1, dtype=square_bt.dtype)
        square_bt = ratios.safe_divide(jnp.cumsum(square_bt, axis=1), count_bt)
    return ratios.zero_padding(jnp.cumsum(power_bt, axis=1) * square_bt, mask)


def _minus_token_baseline(returns_bt, power_bt, mask, group, has_zero_tail):
    """Returns minus their mean under power_bt over the valid tokens of the group at each position.

    See `otb` for the rules about positions with one response.
    """
    mask = ratios.as_bool(mask)
    chex.assert_equal_shape_prefix([mask, group], 1)
    ids = returns.group_ids(group)
    is_row_bt = jnp.broadcast_to(jnp.any(mask, axis=1, keepdims=True), mask.shape)
    is_counted_bt = mask if has_zero_tail else is_row_bt
    count_bt = returns.group_sum(is_counted_bt.astype(returns_bt.dtype), ids)
    total_bt = returns.group_sum(power_bt * returns_bt, ids)
    baseline_bt = total_bt / (returns.group_sum(power_bt, ids) + OTB_EPS)
    highest_bt = returns.group_max(jnp.where(mask, returns_bt, -jnp.inf), ids)
    lowest_bt = -returns.group_max(jnp.where(mask, -returns_bt, -jnp.inf), ids)
    adv_bt = jnp.where(highest_bt == lowest_bt, 0.0, returns_bt - baseline_bt)
    adv_bt = jnp.where(count_bt == 1, returns_bt, adv_bt)
    return jax.lax.stop_gradient(ratios.zero_padding(adv_bt, mask))


@Traits(needs=PATH, of_policy=True, per_token=True)
def otb(
    rewards: Array, mask: Array, group: Array, *, logp_prox: Array, sum_pi_squared: Array,
    weights: Array | None = None, otb_zero_tail: bool = True, form: str = "paper",
) -> Array:
    """Optimal token baseline (arXiv:2602.07078), A_t = G_t - sum_i G_it W_it / sum_i W_it.

    G is the reward to go, W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_v^2) w_j^2 the squared norm of
    the score of the prefix in logit space, and the sums run over the responses of the group with a
    valid token at position t (the denominator has + 1e-8, as in verl). The baseline minimises sum_i
    W_it (G_it - B_t)^2. Positions are those of the row: with holes in the mask use `tir_otb`.

    Where the returns of the live responses are all equal, A is exactly 0. A group of one has
    baseline 0: A = G; rows without a valid token do not count. So has a position with a single live
    response, unless `otb_zero_tail` is False: then that response is its own baseline and A = 0
    there.

    Unit: token (baseline), group. Use: off-policy batches; a variance of 26.84 instead of 27.01
    without a baseline (docs/oracle.md), where the token's own score reaches 26.71.

    Args:
      rewards: [B] (put on the last valid token) or [B, T].
      mask: [B, T] valid tokens.
      group: [B] int, see `advantages`.
      logp_prox: [B, T] log-probs of the tokens under the policy whose gradient is estimated, that at
        the start of the update, nats.
      sum_pi_squared: [B, T] sum over the vocabulary of the same policy's pi^2 at the token's position.
      weights: [B, T] importance weights that multiply the loss; None is w = 1, the form without
        correction.
      otb_zero_tail: verl's handle_zero_tail, True there.
      form: where the weights enter W_t; the same for sequence weights. "paper": w_j^2 inside the
        sum over j, as in verl's code. "survey": w_t^2 times the sum of the scores, as a survey and
        verl's documentation write it. "survey_mean": the mean of w_j^2 over j <= t times that sum,
        the survey's bar over the ratio read as a mean.

    Returns adv [B, T].
    """
    mask = returns.compared(returns.sequence_rewards(rewards, mask), mask, group)
    returns_bt = returns.rewards_to_go(rewards, mask)
    power_bt = _path_power(mask, logp_prox, sum_pi_squared, weights, form)
    return _minus_token_baseline(returns_bt, power_bt, mask, group, otb_zero_tail)


@Traits(needs=PATH, of_policy=True, per_token=True)
def tir_otb(
    rewards: Array, mask: Array, group: Array, *, logp_prox: Array, sum_pi_squared: Array,
    weights: Array | None = None, otb_zero_tail: bool = True, form: str = "paper",
) -> Array:
    """`otb` of multi-turn responses (arXiv:2602.07078): positions count generated tokens only.

    The valid tokens of each row are moved to its left before the baseline and back after it, so
    that a tool's text in between changes nothing. Without holes in the mask it is `otb`.

    Unit: token (baseline), group. Use: `otb` for agents with tools; the gain is as small.

    Args: as `otb`.

    Returns adv [B, T].
    """
    mask = ratios.as_bool(mask)
    order_bt = jnp.argsort(~mask, axis=1, stable=True)
    place_bt = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)

    def compact(x_bt):
        return jnp.take_along_axis(jnp.asarray(x_bt), order_bt, axis=1)

    adv_bt = otb(
        compact(returns.token_rewards(rewards, mask)),
        compact(mask),
        group,
        logp_prox=compact(logp_prox),
        sum_pi_squared=compact(sum_pi_squared),
        weights=None if weights is None else compact(weights),
        otb_zero_tail=otb_zero_tail,
        form=form,
    )
    return ratios.zero_padding(jnp.take_along_axis(adv_bt, place_bt, axis=1), mask)


ADVANTAGES = {
    "remax": remax,
    "batch_mean": batch_mean,
    "opo": opo,
    "opob": opob,
    "otb": otb,
    "tir_otb": tir_otb,
}
