"""Advantage estimators on unpacked rows, one sequence per row.

Each entry of `ADVANTAGES` maps (rewards, mask, group, **parameters) to adv [B, T], 0 at padding,
without gradient.

Args of every entry:
  rewards: [B], one reward per sequence, or [B, T], rewards per token of which those at valid tokens
    count. A reward per sequence cannot be lost to a mask: with [B, T], pass the mask as sampled,
    before any token was rejected from it.
  mask: [B, T] valid tokens. A fully masked row gets advantage 0; its reward still counts in its
    group.
  group: [B] int, equal for the samples of one prompt; any integers, any order, groups of any size.
    A row that only fills up a batch must have a group of its own.

`NEEDS` names what an entry takes by keyword beside its parameters.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import ratios


def sequence_rewards(rewards: chex.Array, mask: chex.Array) -> chex.Array:
    """The reward of each sequence [B], from rewards [B] or from rewards per token [B, T]."""
    rewards = jnp.asarray(rewards)
    chex.assert_rank(rewards, {1, 2})
    chex.assert_equal_shape_prefix([rewards, mask], 1)
    if rewards.ndim == 1:
        return ratios.as_float(rewards)
    return ratios.masked_sum(rewards, mask, axis=1)


def token_rewards(rewards: chex.Array, mask: chex.Array) -> chex.Array:
    """Rewards per token [B, T]; a reward per sequence [B] goes to the last valid token."""
    rewards = jnp.asarray(rewards)
    chex.assert_rank(rewards, {1, 2})
    chex.assert_equal_shape_prefix([rewards, mask], 1)
    if rewards.ndim == 2:
        return ratios.zero_padding(rewards, mask)
    mask = ratios.as_bool(mask)
    position = jnp.arange(mask.shape[1])[None, :]
    last = jnp.max(jnp.where(mask, position, -1), axis=1, keepdims=True)
    return jnp.where(position == last, ratios.as_float(rewards)[:, None], 0.0)


def whiten(x: chex.Array, mask: chex.Array) -> chex.Array:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens, unbiased variance; 0 at padding.

    One valid token gives 0, and so does none.
    """
    mean = ratios.masked_mean(x, mask)
    variance = jnp.square(ratios.masked_std(x, mask, ddof=1))
    return ratios.zero_padding((ratios.as_float(x) - mean) * jax.lax.rsqrt(variance + 1e-8), mask)


def _group_moments(scores_b, group):
    """Of each row's group, [B] each: size, mean, std (ddof 1, 0 if alone), whether all are
    equal."""
    chex.assert_equal_shape([scores_b, group])
    num_rows = scores_b.shape[0]
    _, ids = jnp.unique(group, return_inverse=True, size=num_rows)

    def group_sum(x_b):
        return jax.ops.segment_sum(x_b, ids, num_segments=num_rows)[ids]

    count = group_sum(jnp.ones_like(scores_b))
    mean = group_sum(scores_b) / count
    variance = ratios.safe_divide(group_sum(jnp.square(scores_b - mean)), count - 1.0)
    highest = jax.ops.segment_max(scores_b, ids, num_segments=num_rows)[ids]
    lowest = jax.ops.segment_min(scores_b, ids, num_segments=num_rows)[ids]
    return count, mean, jnp.sqrt(variance), highest == lowest


def _on_tokens(adv_b, mask):
    """One advantage per sequence, on each of its valid tokens."""
    adv_bt = jnp.broadcast_to(adv_b[:, None], mask.shape)
    return jax.lax.stop_gradient(ratios.zero_padding(adv_bt, mask))


def grpo(
    rewards: chex.Array, mask: chex.Array, group: chex.Array, *, eps: float = 1e-6
) -> chex.Array:
    """GRPO (arXiv:2402.03300), A = (R - mean) / (std + eps) within the group, std with ddof 1.

    A group whose rewards are all equal gives exactly 0. A group of one has mean 0 and std 1, as in
    verl: A = R / (1 + eps).

    Args:
      rewards, mask, group: see the module.
      eps: added to the standard deviation, in reward units; verl's 1e-6.

    Returns adv [B, T].
    """
    scores_b = sequence_rewards(rewards, mask)
    count, mean, std, is_constant = _group_moments(scores_b, group)
    adv_b = jnp.where(is_constant, 0.0, (scores_b - mean) / (std + eps))
    return _on_tokens(jnp.where(count == 1, scores_b / (1.0 + eps), adv_b), mask)


def dr_grpo(rewards: chex.Array, mask: chex.Array, group: chex.Array) -> chex.Array:
    """Dr. GRPO (arXiv:2503.20783), A = R - mean of the group; no division by its std.

    The other half of the method is the aggregation "seq-mean-token-sum-norm".

    A group whose rewards are all equal gives exactly 0. A group of one has mean 0, as in verl: A =
    R.

    Args:
      rewards, mask, group: see the module.

    Returns adv [B, T].
    """
    scores_b = sequence_rewards(rewards, mask)
    count, mean, _, is_constant = _group_moments(scores_b, group)
    adv_b = jnp.where(is_constant, 0.0, scores_b - mean)
    return _on_tokens(jnp.where(count == 1, scores_b, adv_b), mask)


def rloo(rewards: chex.Array, mask: chex.Array, group: chex.Array) -> chex.Array:
    """RLOO (arXiv:2402.14740), A = R - mean of the other samples = n / (n - 1) (R - mean).

    A group whose rewards are all equal gives exactly 0. A group of one has no others and gives 0,
    as verl's vectorised form (its loop form leaves R).

    Args:
      rewards, mask, group: see the module.

    Returns adv [B, T].
    """
    scores_b = sequence_rewards(rewards, mask)
    count, mean, _, is_constant = _group_moments(scores_b, group)
    leave_one_out = ratios.safe_divide(count * (scores_b - mean), count - 1.0)
    return _on_tokens(jnp.where(is_constant, 0.0, leave_one_out), mask)


def _gae_recursion(rewards, mask, values, gamma, lam):
    """Unwhitened advantages and the values, [B, T] each, 0 at padding."""
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, mask])
    rewards_bt = token_rewards(rewards, mask)
    values_bt = ratios.zero_padding(values, mask)
    rewards_bt = rewards_bt.astype(jnp.promote_types(rewards_bt.dtype, values_bt.dtype))
    values_bt = values_bt.astype(rewards_bt.dtype)

    def step(carry, inputs):
        next_value_b, next_adv_b = carry
        reward_b, value_b, mask_b = inputs
        delta_b = reward_b + gamma * next_value_b - value_b
        adv_b = jnp.where(mask_b, delta_b + gamma * lam * next_adv_b, next_adv_b)
        return (jnp.where(mask_b, value_b, next_value_b), adv_b), adv_b

    zero_b = jnp.zeros_like(values_bt[:, 0])
    inputs = (rewards_bt.T, values_bt.T, ratios.as_bool(mask).T)
    _, adv_tb = jax.lax.scan(step, (zero_b, zero_b), inputs, reverse=True)
    return jax.lax.stop_gradient((ratios.zero_padding(adv_tb.T, mask), values_bt))


def gae(
    rewards: chex.Array,
    mask: chex.Array,
    group: chex.Array,
    *,
    values: chex.Array,
    gamma: float = 1.0,
    lam: float = 1.0,
    is_whitened: bool = True,
) -> chex.Array:
    """Generalised advantage estimation (arXiv:1506.02438), A_t = delta_t + gamma lam A_t+1.

    delta_t = r_t + gamma V_t+1 - V_t. The recursion runs over valid tokens and steps over the
    others (a tool's reply), without discounting them. Then the batch is whitened, as in verl.

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
    adv_bt, _ = _gae_recursion(rewards, mask, values, gamma, lam)
    return whiten(adv_bt, mask) if is_whitened else adv_bt


def gae_returns(
    rewards: chex.Array,
    mask: chex.Array,
    *,
    values: chex.Array,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> chex.Array:
    """Targets of the critic, unwhitened A_t + V_t [B, T], 0 at padding; arguments as `gae`."""
    adv_bt, values_bt = _gae_recursion(rewards, mask, values, gamma, lam)
    return adv_bt + jax.lax.stop_gradient(values_bt)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "gae": gae}

NEEDS = {"gae": ("values",)}
