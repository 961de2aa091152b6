"""Returns of a rollout batch, and their reductions over a prompt's group.

Rows are unpacked, one sequence each. Nothing here carries a gradient. A reward of NaN is unknown:
the reward function failed. Reductions over a group leave it out.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import ratios


def sequence_rewards(rewards: Array, mask: Array) -> Array:
    """The reward of each sequence [B], from rewards [B] or from rewards per token [B, T]; NaN where
    it is unknown."""
    rewards = jnp.asarray(rewards)
    chex.assert_rank(rewards, {1, 2})
    chex.assert_equal_shape_prefix([rewards, mask], 1)
    if rewards.ndim == 1:
        return ratios.as_float(rewards)
    return ratios.masked_sum(rewards, mask, axis=1)


def token_rewards(rewards: Array, mask: Array) -> Array:
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


def known(rewards: Array, mask: Array) -> tuple[Array, Array]:
    """(rewards, mask [B, T]) with reward 0 and no valid token where a sequence's reward is NaN."""
    is_known_b = ~jnp.isnan(sequence_rewards(rewards, mask))
    is_known = is_known_b[:, None] if jnp.ndim(rewards) == 2 else is_known_b
    return jnp.where(is_known, rewards, 0), ratios.as_bool(mask) & is_known_b[:, None]


def compared(scores_b: Array, mask: Array, group: Array) -> Array:
    """The mask [B, T] without the sequences that cannot be compared within their group.

    These are the sequences of unknown reward, and a sequence that alone has a known reward in a group
    of several. A group of one sequence stays.
    """
    is_known_b, ids = ~jnp.isnan(scores_b), group_ids(group)
    size_b, known_b = (group_sum(x.astype(jnp.int32), ids) for x in (ids >= 0, is_known_b))
    is_compared_b = is_known_b & ((known_b > 1) | (size_b == 1))
    return ratios.as_bool(mask) & is_compared_b[:, None]


def rewards_to_go(rewards: Array, mask: Array) -> Array:
    """Undiscounted sum of the rewards at this valid token and after it, [B, T], 0 at padding."""
    returns_bt = jax.lax.cumsum(token_rewards(rewards, mask), axis=1, reverse=True)
    return ratios.zero_padding(returns_bt, mask)


def group_ids(group: Array) -> Array:
    """[B] the first row of each row's group; `group` may hold any integers."""
    group = jnp.asarray(group)
    chex.assert_rank(group, 1)
    _, first, inverse = jnp.unique(
        group, return_index=True, return_inverse=True, size=group.shape[0]
    )
    return first[inverse]


def group_sum(x: Array, ids: Array) -> Array:
    """Sum of x [B, ...] over the rows of each row's group, on each of them; ids of `group_ids`."""
    return jax.ops.segment_sum(x, ids, num_segments=ids.shape[0])[ids]


def group_max(x: Array, ids: Array) -> Array:
    """Largest x [B, ...] among the rows of each row's group, on each of them."""
    return jax.ops.segment_max(x, ids, num_segments=ids.shape[0])[ids]


def group_moments(scores_b: Array, group: Array) -> tuple[Array, Array, Array, Array]:
    """Of the known rewards of each row's group, [B] each: number, mean, std (ddof 1, 0 if alone),
    whether all are equal."""
    chex.assert_equal_shape([scores_b, group])
    ids, is_known_b = group_ids(group), ~jnp.isnan(scores_b)
    of_known = lambda x_b, other=0.0: jnp.where(is_known_b, x_b, other)
    count = group_sum(of_known(jnp.ones_like(scores_b)), ids)
    mean = ratios.safe_divide(group_sum(of_known(scores_b), ids), count)
    squares_b = of_known(jnp.square(scores_b - mean))
    variance = ratios.safe_divide(group_sum(squares_b, ids), count - 1.0)
    highest, lowest = (group_max(of_known(x_b, -jnp.inf), ids) for x_b in (scores_b, -scores_b))
    return count, mean, jnp.sqrt(variance), highest == -lowest


def of_owner(adv: Array, mask: Array, owner: Array) -> Array:
    """The advantage of each row's owner on the row's valid tokens, [B, T], without gradient.

    Args:
      adv: [B, T] advantages, one number per row on its valid tokens.
      mask: [B, T] valid tokens.
      owner: [B] index of a row; of the row itself where it has an advantage of its own.
    """
    first_b = jnp.argmax(ratios.as_bool(mask), axis=1)
    adv_b = jnp.take_along_axis(adv, first_b[:, None], axis=1)[:, 0]
    return on_tokens(adv_b[owner], mask)


def on_tokens(adv_b: Array, mask: Array) -> Array:
    """One advantage per sequence, on each of its valid tokens, without gradient."""
    adv_bt = jnp.broadcast_to(adv_b[:, None], mask.shape)
    return jax.lax.stop_gradient(ratios.zero_padding(adv_bt, mask))
