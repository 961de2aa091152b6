"""Advantage estimators on unpacked rows, one sequence per row.

Each entry of `ADVANTAGES` maps (rewards, mask, group, **parameters) to adv [B, T], 0 at padding.
Entries that subtract a baseline of their own from a return are in `baselines`.

Trust region: none. Gradient: none; advantages are detached.

Args of every entry:
  rewards: [B], one reward per sequence, or [B, T], rewards per token of which those at valid tokens
    count. With [B, T] pass the mask as sampled, before any token was rejected, or rewards are lost.
    NaN is an unknown reward: every statistic leaves the sequence out, as if it had not been sampled,
    and its advantage is 0. If an entry compares within groups, a group with a single known reward
    among several sequences also gets advantage 0.
  mask: [B, T] valid tokens. A fully masked row gets advantage 0; its reward still counts in its
    group.
  group: [B] int, equal for the samples of one prompt; any integers, any order, groups of any size.
    A row that only pads the batch must have a group of its own.

The traits of an entry name its further keyword arguments. The importance `weights` of the token
baselines are among them because a run has them. A direct call may omit them for w = 1.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import baselines, ratios, returns
from jaxrl_tis.kernels.segment import segment_scan
from jaxrl_tis.estimators.traits import Traits


def whiten(x: Array, mask: Array) -> Array:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens, unbiased variance; 0 at padding.

    Values that are all equal give exactly 0; so does one valid token, and none.
    """
    mean = ratios.masked_mean(x, mask)
    variance = jnp.square(ratios.masked_std(x, mask, ddof=1))
    white = ratios.zero_padding((ratios.as_float(x) - mean) * jax.lax.rsqrt(variance + 1e-8), mask)
    return jnp.where(ratios.masked_max(x, mask) == ratios.masked_min(x, mask), 0.0, white)


def grpo(rewards: Array, mask: Array, group: Array, *, eps: float = 1e-6) -> Array:
    """GRPO (arXiv:2402.03300), A = (R - mean) / (std + eps) within the group, std with ddof 1.

    A group whose rewards are all equal gives exactly 0. A group of one has mean 0 and std 1, as in
    verl: A = R / (1 + eps).

    Unit: group. Use: the common choice; dividing by the std favours prompts of nearly equal rewards
    and turns the gradient a little (docs/oracle.md).

    Args:
      rewards, mask, group: see the module.
      eps: added to the standard deviation, in reward units; verl's 1e-6.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    count, mean, std, is_constant = returns.group_moments(scores_b, group)
    adv_b = jnp.where(is_constant, 0.0, (scores_b - mean) / (std + eps))
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(count == 1, scores_b / (1.0 + eps), adv_b), mask)


@Traits(needs=("entropy",), of_sequences=True)
def rl_zvp(
    rewards: Array, mask: Array, group: Array, *,
    entropy: Array, zvp_alpha: Numeric = 0.1, zvp_correct: Numeric = 1.0, eps: float = 1e-6,
) -> Array:
    """RL-ZVP (arXiv:2509.21880): `grpo`, but groups of equal rewards teach, too.

    If all are correct, A = zvp_alpha H with the entropy H of each token. If none is, A = -zvp_alpha
    (max H - H) with the largest entropy of the response. A group of one is that of `grpo`.

    Unit: group. Use: rewards of 0 and 1 where many groups are all right or all wrong.

    Args:
      rewards, mask, group: see the module.
      entropy: [B, T] of the policy at each sampled token, nats.
      zvp_alpha: nats to advantage.
      zvp_correct: least reward of a correct response.
      eps: see `grpo`.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    count, mean, _, is_constant = returns.group_moments(scores_b, group)
    valid_bt = returns.compared(scores_b, mask, group)
    entropy_bt = jax.lax.stop_gradient(ratios.zero_padding(entropy, valid_bt))
    most_b1 = jnp.max(entropy_bt, axis=1, keepdims=True)
    shift_b1 = jnp.where((mean >= zvp_correct)[:, None], 0.0, most_b1)
    shaped_bt = ratios.zero_padding(zvp_alpha * (entropy_bt - shift_b1), valid_bt)
    is_shaped_b1 = (is_constant & (count > 1))[:, None]
    return jnp.where(is_shaped_b1, shaped_bt, grpo(rewards, mask, group, eps=eps))


def dr_grpo(rewards: Array, mask: Array, group: Array) -> Array:
    """Dr. GRPO (arXiv:2503.20783), A = R - mean of the group; no division by its std.

    The other half of the method is the aggregation "seq-mean-token-sum-norm". A group whose rewards
    are all equal gives exactly 0. A group of one has mean 0, as in verl: A = R.

    Unit: group. Use: `grpo` without its bias for difficulty; the gradient is (G - 1) / G of the
    true one (docs/oracle.md).

    Args:
      rewards, mask, group: see the module.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    count, mean, _, is_constant = returns.group_moments(scores_b, group)
    adv_b = jnp.where(is_constant, 0.0, scores_b - mean)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(count == 1, scores_b, adv_b), mask)


def maxrl(rewards: Array, mask: Array, group: Array) -> Array:
    """MaxRL (arXiv:2602.02710), A = (R - mean) / mean of the group, 0 where the mean is not
    positive.

    With rewards 0 and 1, of which a response earns the 1 with chance p, and G responses in a group
    the expected step is the gradient of -sum_k (1 - p)^k / k over k < G, the first terms of log p
    (docs/oracle.md). A group whose rewards are all equal gives exactly 0; so does a group of one.

    Unit: group. Use: rewards of 0 and 1, to learn most from prompts that are seldom solved.

    Args:
      rewards, mask, group: see the module.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    _, mean, _, is_constant = returns.group_moments(scores_b, group)
    adv_b = ratios.safe_divide(scores_b - mean, mean)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(is_constant, 0.0, adv_b), mask)


def grpo_passk(
    rewards: Array, mask: Array, group: Array, *,
    eps: float = 1e-6, passk_is_normalized: bool = True,
) -> Array:
    """Pass@k form of GRPO (arXiv:2503.19595): the best sample gets R_(1) - R_(2), the others 0.

    R_(1) and R_(2) are the highest and the second highest reward of the group, divided by its std +
    eps like `grpo`. A tie at the top gives exactly 0, and so does a group of one, which has no
    second (verl refuses such groups).

    Unit: group. Use: the best of a group rather than its mean; one sample per prompt teaches, and
    none if two share the best reward.

    Args:
      rewards, mask, group: see the module.
      eps: added to the standard deviation, in reward units; verl's 1e-6.
      passk_is_normalized: False leaves the difference in reward units; verl divides by default.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    ids = returns.group_ids(group)
    count, _, std, _ = returns.group_moments(scores_b, group)
    known_b = jnp.where(jnp.isnan(scores_b), -jnp.inf, scores_b)
    best_b = returns.group_max(known_b, ids)
    is_best_b = scores_b == best_b
    second_b = returns.group_max(jnp.where(is_best_b, -jnp.inf, known_b), ids)
    num_best_b = returns.group_sum(is_best_b.astype(scores_b.dtype), ids)
    adv_b = jnp.where(is_best_b & (num_best_b == 1) & (count > 1), best_b - second_b, 0.0)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(adv_b / (std + eps) if passk_is_normalized else adv_b, mask)


def rloo(rewards: Array, mask: Array, group: Array) -> Array:
    """RLOO (arXiv:2402.14740), A = R - mean of the other samples = n / (n - 1) (R - mean).

    A group whose rewards are all equal gives exactly 0. A group of one has no others and gives 0,
    as verl's vectorised form (its loop form leaves R).

    Unit: group. Use: an unbiased gradient with several samples per prompt (docs/oracle.md); the
    step follows the scale of the reward.

    Args:
      rewards, mask, group: see the module.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    count, mean, _, is_constant = returns.group_moments(scores_b, group)
    leave_one_out = ratios.safe_divide(count * (scores_b - mean), count - 1.0)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(is_constant, 0.0, leave_one_out), mask)


@Traits(of_batch=True)
def gpg(rewards: Array, mask: Array, group: Array) -> Array:
    """GPG (arXiv:2504.02546), A = alpha (R - mean of the group), alpha = B / max(1, #{R != 0}).

    alpha is one number for the whole batch, verl's count, which includes fully masked rows and,
    unlike a count of the groups that carry a gradient, groups that are all correct: pass no rows
    that only fill up the batch. A group whose rewards are all equal gives exactly 0. A group of one
    has mean 0, as in verl: A = alpha R.

    Unit: group (mean), batch (alpha). Use: `dr_grpo` whose step does not shrink with unsolved
    prompts; the step moves with the success rate.

    Args:
      rewards, mask, group: see the module; the whole rollout batch must be in the call.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    is_known_b = ~jnp.isnan(scores_b)
    num_rewarded = jnp.count_nonzero(is_known_b & (scores_b != 0))
    alpha = jnp.count_nonzero(is_known_b) / jnp.maximum(num_rewarded, 1)
    return alpha.astype(scores_b.dtype) * dr_grpo(scores_b, mask, group)


@Traits(needs=("reward_components",), of_batch=True, of_components=True, of_sequences=True)
def gdpo(
    rewards: Array, mask: Array, group: Array, *,
    reward_components: Array, gdpo_weights: tuple[float, ...] | None = None, eps: float = 1e-6,
) -> Array:
    """GDPO (arXiv:2601.05242), A = whiten(sum_k weight_k grpo(component k)) over the batch.

    Each component is normalised within its group before they are added; one that is constant in a
    group adds exactly 0 there. A component of NaN is void: it is left out of its own statistics and
    adds 0, and the sequence's other components count. Groups of one as in `grpo`. The whitening
    shifts every advantage, also those of a group that is constant in all components; where all
    advantages of the batch are equal, they are exactly 0.

    Unit: group (components), batch (whitening). Use: several rewards of different scales; rare
    components are scaled up, and the gradient turns (docs/oracle.md).

    Args:
      rewards: not used, but for which are unknown.
      mask, group: see the module; the whole rollout batch must be in the call.
      reward_components: [B, C] the rewards of each sequence.
      gdpo_weights: C weights of the components; None is 1 for each, as in verl. A run has its components
        in alphabetical order of their names.
      eps: of `grpo`.

    Returns adv [B, T].
    """
    reward_components = jnp.asarray(reward_components)
    chex.assert_rank(reward_components, 2)
    if gdpo_weights is None:
        gdpo_weights = (1.0,) * reward_components.shape[1]
    if len(gdpo_weights) != reward_components.shape[1]:
        raise ValueError(
            f"gdpo_weights has {len(gdpo_weights)} weights for {reward_components.shape[1]} reward "
            "components; give one for each."
        )
    is_unknown_b = jnp.isnan(returns.sequence_rewards(rewards, mask))
    components_cb = jnp.where(is_unknown_b, jnp.nan, ratios.as_float(reward_components).T)
    parts = [
        weight * grpo(scores_b, mask, group, eps=eps)
        for weight, scores_b in zip(gdpo_weights, components_cb, strict=True)
    ]
    is_compared = [returns.compared(scores_b, mask, group) for scores_b in components_cb]
    return whiten(sum(parts), functools.reduce(jnp.logical_or, is_compared))


@Traits(example={"oapl_beta_value": 0.5})
def oapl(rewards: Array, mask: Array, group: Array, *, oapl_beta_value: float = 1.0) -> Array:
    """Advantage of OAPL (arXiv:2602.19362), A = R - V with V = beta' log mean_j exp(R_j / beta').

    V is the soft value of the prompt from its group: between the mean of the rewards (beta' ->
    infinity) and their maximum (beta' -> 0). Formula and constant agree with the authors' code
    (danieldritter/OAPL at 6153219b). A group whose rewards are all equal gives exactly 0; so does a
    group of one, whose value is its own reward.

    Unit: group. Use: the objective `oapl`; it needs many samples per prompt.

    Args:
      rewards, mask, group: see the module.
      oapl_beta_value: beta', temperature of the value in reward units, > 0; the authors' run.

    Returns adv [B, T].
    """
    if oapl_beta_value <= 0.0:
        raise ValueError(f"oapl_beta_value is {oapl_beta_value}; a temperature must be above 0.")
    scores_b = returns.sequence_rewards(rewards, mask)
    ids = returns.group_ids(group)
    count, _, _, is_constant = returns.group_moments(scores_b, group)
    is_known_b = ~jnp.isnan(scores_b)
    best_b = returns.group_max(jnp.where(is_known_b, scores_b, -jnp.inf), ids)
    excess_b = jnp.expm1(jnp.where(is_known_b, scores_b - best_b, 0.0) / oapl_beta_value)
    mean_b = ratios.safe_divide(returns.group_sum(excess_b, ids), count)
    value_b = best_b + oapl_beta_value * jnp.log1p(mean_b)
    mask = returns.compared(scores_b, mask, group)
    return returns.on_tokens(jnp.where(is_constant, 0.0, scores_b - value_b), mask)


def _gae_recursion(rewards, mask, values, gamma, lam):
    """Unwhitened advantages and the values, [B, T] each, 0 at padding."""
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, mask])
    rewards_bt = returns.token_rewards(rewards, mask)
    values_bt = ratios.zero_padding(values, mask)
    rewards_bt = rewards_bt.astype(jnp.promote_types(rewards_bt.dtype, values_bt.dtype))
    values_bt = values_bt.astype(rewards_bt.dtype)

    is_valid_bt = ratios.as_bool(mask)
    scan: Any = functools.partial(segment_scan, seg=jnp.ones(mask.shape, jnp.int32), reverse=True)
    carried_bt = lambda factor: jnp.where(is_valid_bt, factor, 1.0).astype(values_bt.dtype)
    # From the right, the value of the token that comes first, and so of the next valid one.
    first_bt = scan(values_bt, decay=carried_bt(0.0))
    next_bt = jnp.pad(first_bt[:, 1:], ((0, 0), (0, 1)))
    delta_bt = ratios.zero_padding(rewards_bt + gamma * next_bt - values_bt, mask)
    adv_bt = scan(delta_bt, decay=carried_bt(gamma * lam))
    return jax.lax.stop_gradient((ratios.zero_padding(adv_bt, mask), values_bt))


@Traits(needs=("values",), compares=False, per_token=True)
def gae(
    rewards: Array, mask: Array, group: Array, *,
    values: Array, gamma: float = 1.0, lam: float = 1.0, is_whitened: bool = True,
) -> Array:
    """Generalised advantage estimation (arXiv:1506.02438), A_t = delta_t + gamma lam A_t+1.

    delta_t = r_t + gamma V_t+1 - V_t. The recursion runs over valid tokens and steps over the
    others (a tool's reply), without discounting them. Then the batch is whitened, as in verl.

    Unit: token (credit), batch (whitening). Use: one sample per prompt, or credit within a
    response; the critic is a second model.

    Args:
      rewards: [B] (put on the last valid token) or [B, T].
      mask: [B, T] valid tokens.
      group: not used.
      values: [B, T] value of the prefix before each token.
      gamma: discount per valid token; 1.0 is verl's default.
      lam: decay of the trace; 1.0 is verl's default.
      is_whitened: False leaves the advantages in reward units.

    Returns adv [B, T].
    """
    del group
    rewards, mask = returns.known(rewards, mask)
    adv_bt, _ = _gae_recursion(rewards, mask, values, gamma, lam)
    return whiten(adv_bt, mask) if is_whitened else adv_bt


def gae_returns(
    rewards: Array, mask: Array, *, values: Array, gamma: float = 1.0, lam: float = 1.0
) -> Array:
    """Targets of the critic, unwhitened A_t + V_t [B, T], 0 at padding; arguments as `gae`."""
    rewards, mask = returns.known(rewards, mask)
    adv_bt, values_bt = _gae_recursion(rewards, mask, values, gamma, lam)
    return adv_bt + jax.lax.stop_gradient(values_bt)


@Traits(compares=False, of_batch=True, per_token=True)
def reinforce_plus_plus(rewards: Array, mask: Array, group: Array, *, gamma: float = 1.0) -> Array:
    """REINFORCE++ (arXiv:2501.03262), A = whiten(G) over the batch, G_t = r_t + gamma G_t+1.

    The recursion steps over masked tokens without discounting them. Where all returns of the batch
    are equal, A is exactly 0. Groups have no part in it.

    Unit: token (return), batch (whitening). Use: one sample per prompt and no critic; all prompts
    share one baseline, so answers to easy ones count as good.

    Args:
      rewards: [B] (put on the last valid token) or [B, T].
      mask: [B, T] valid tokens; the whole rollout batch must be in the call.
      group: not used.
      gamma: discount per valid token; 1.0 is verl's default.

    Returns adv [B, T].
    """
    del group
    rewards, mask = returns.known(rewards, mask)
    no_values_bt = jnp.zeros_like(returns.token_rewards(rewards, mask))
    returns_bt, _ = _gae_recursion(rewards, mask, no_values_bt, gamma, 1.0)
    return whiten(returns_bt, mask)


@Traits(of_batch=True)
def reinforce_plus_plus_baseline(rewards: Array, mask: Array, group: Array) -> Array:
    """REINFORCE++-baseline (arXiv:2501.03262), A = whiten(R - mean of the group) over the batch.

    A group of one has mean 0, as in verl. Where R minus the mean is equal for the whole batch, A is
    exactly 0.

    Unit: group (mean), batch (whitening). Use: `grpo` with one scale for the batch; long responses
    rule the scale.

    Args:
      rewards, mask, group: see the module; the whole rollout batch must be in the call.

    Returns adv [B, T].
    """
    scores_b = returns.sequence_rewards(rewards, mask)
    return whiten(dr_grpo(rewards, mask, group), returns.compared(scores_b, mask, group))


ADVANTAGES = {
    "grpo": grpo,
    "rl_zvp": rl_zvp,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "gpg": gpg,
    "gdpo": gdpo,
    "oapl": oapl,
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    **baselines.ADVANTAGES,
}
