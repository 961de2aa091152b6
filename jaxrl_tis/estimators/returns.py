"""Returns of a rollout batch, and their reductions over a prompt's group.

Rows are unpacked, one sequence each. Nothing here carries a gradient.
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


def rewards_to_go(rewards: chex.Array, mask: chex.Array) -> chex.Array:
    """Undiscounted sum of the rewards at this valid token and after it, [B, T], 0 at padding."""
    returns_bt = jax.lax.cumsum(token_rewards(rewards, mask), axis=1, reverse=True)
    return ratios.zero_padding(returns_bt, mask)


def group_ids(group: chex.Array) -> chex.Array:
    """[B] the first row of each row's group; `group` may hold any integers."""
    group = jnp.asarray(group)
    chex.assert_rank(group, 1)
    size = group.shape[0]
    is_same_bb = group[:, None] == group[None, :]
    return jnp.min(jnp.where(is_same_bb, jnp.arange(size)[None, :], size), axis=1)


def group_sum(x: chex.Array, ids: chex.Array) -> chex.Array:
    """Sum of x [B, ...] over the rows of each row's group, on each of them; ids of `group_ids`."""
    return jax.ops.segment_sum(x, ids, num_segments=ids.shape[0])[ids]


def group_max(x: chex.Array, ids: chex.Array) -> chex.Array:
    """Largest x [B, ...] among the rows of each row's group, on each of them."""
    return jax.ops.segment_max(x, ids, num_segments=ids.shape[0])[ids]


def group_moments(
    scores_b: chex.Array, group: chex.Array
) -> tuple[chex.Array, chex.Array, chex.Array, chex.Array]:
    """Of each row's group, [B] each: size, mean, std (ddof 1, 0 if alone), whether all are
    equal."""
    chex.assert_equal_shape([scores_b, group])
    ids = group_ids(group)
    count = group_sum(jnp.ones_like(scores_b), ids)
    mean = group_sum(scores_b, ids) / count
    variance = ratios.safe_divide(group_sum(jnp.square(scores_b - mean), ids), count - 1.0)
    is_constant = group_max(scores_b, ids) == -group_max(-scores_b, ids)
    return count, mean, jnp.sqrt(variance), is_constant


def on_tokens(adv_b: chex.Array, mask: chex.Array) -> chex.Array:
    """One advantage per sequence, on each of its valid tokens, without gradient."""
    adv_bt = jnp.broadcast_to(adv_b[:, None], mask.shape)
    return jax.lax.stop_gradient(ratios.zero_padding(adv_bt, mask))
