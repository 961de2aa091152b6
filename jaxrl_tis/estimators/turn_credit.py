"""Credit of turns: which rewards of an episode the advantage of a token is made from.

"episode": the reward of the whole episode. "rest": the rewards of the token's turn and of later
turns. "turn": the reward of the token's turn. Rows are unpacked, one sequence each.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import ratios

CREDITS = ("episode", "rest", "turn")


def by_turn(
    advantage: Callable[[Array, Array, Array], Array], rewards: Array, mask: Array, group: Array, *,
    turn: Array, is_rest: bool,
) -> Array:
    """The advantage of each turn as if it were a sequence of its own, compared with turns of the
    same number. arXiv:2505.11821 compares turns too, and adds the advantage of the outcome.

    The score of turn k is the sum of its rewards, or with `is_rest` of its rewards and those after
    it. A sequence without a token in turn k has no score there: statistics of turn k leave the
    sequence out, as they do with an unknown reward. A turn that one sequence of a group reached
    alone has nothing to be compared with, and advantage 0 in methods that compare. Sequences of one
    turn have the advantage of `advantage`.

    Args:
      advantage: (rewards [B], mask [B, T], group [B]) -> adv [B, T], of `advantages.ADVANTAGES`.
      rewards: [B, T] rewards per token; NaN makes each score unknown that it is a part of.
      mask: [B, T] valid tokens, as sampled.
      group: [B] int.
      turn: [B, T] int, number of the turn from 0.

    Returns adv [B, T], 0 at padding, without gradient.
    """
    chex.assert_rank([rewards, mask, turn], 2)
    chex.assert_equal_shape([rewards, mask, turn])
    is_valid_bt = ratios.as_bool(mask)
    rewards_bt = ratios.zero_padding(rewards, is_valid_bt)

    def add(k, adv_bt):
        in_turn_bt = is_valid_bt & (turn == k)
        counted_bt = is_valid_bt & (turn >= k) if is_rest else in_turn_bt
        scores_b = ratios.masked_sum(rewards_bt, counted_bt, axis=1)
        scores_b = jnp.where(jnp.any(in_turn_bt, axis=1), scores_b, jnp.nan)
        return adv_bt + advantage(scores_b, in_turn_bt, group)

    num_turns = jnp.max(jnp.where(is_valid_bt, turn, -1)) + 1
    return jax.lax.stop_gradient(
        jax.lax.fori_loop(0, num_turns, add, jnp.zeros_like(rewards_bt))
    )
