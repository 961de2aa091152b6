"""The table of all policy losses, and the critic's loss.

Each entry of `OBJECTIVES` maps (logp, logp_old, adv, mask, seg=None, **parameters) to (loss_bt,
metrics): the loss of each token, 0 at padding, not yet multiplied by importance weights nor
reduced, and metrics as means over the valid tokens. The gradient flows through logp alone;
logp_old must be the policy of the start of the learner's steps and not the current one, or the
ratio is 1 for ever and a clip never acts. By family: clipped token ratios (ppo.py), clipped
ratios of sequences and prefixes (sequence_clipped.py) and of turns (turn_clipped.py), detached
weights on log-probs (reinforce.py), flipped ratios (aspo.py), mixtures with a teacher
(fusion.py), and gates, penalties and regressions in place of a clip (soft_trust_region.py).

A one-sided trust region bounds the side that A pushes to.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import (
    aspo, fusion, ppo, ratios, reinforce, sequence_clipped, soft_trust_region, turn_clipped,
)

FAMILIES = (
    ppo, sequence_clipped, turn_clipped, reinforce, aspo, fusion, soft_trust_region,
)
OBJECTIVES = {name: entry for family in FAMILIES for name, entry in family.OBJECTIVES.items()}


def value_loss(
    values: Array, values_old: Array, returns: Array, mask: Array, clip: Numeric = 0.5
) -> tuple[Array, dict[str, Array]]:
    """Clipped value loss beside PPO (arXiv:1707.06347; its clip is from the authors' code).

    l = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2.

    Args:
      values: [B, T] value of the prefix before each token; the only input with a gradient.
      values_old: [B, T] values at the time of the rollout.
      returns: [B, T] targets G.
      mask: [B, T] valid tokens.
      clip: largest move of a value that is still rewarded, in reward units; 0.5 is verl's default.

    Returns (loss_bt [B, T], 0 at padding, {"critic/vf_clipfrac": fraction of tokens on the clipped
    branch}).
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, values_old, returns, mask])
    values_bt = ratios.zero_padding(values, mask)
    old_bt = jax.lax.stop_gradient(ratios.zero_padding(values_old, mask))
    returns_bt = jax.lax.stop_gradient(ratios.zero_padding(returns, mask))
    unclipped_bt = jnp.square(values_bt - returns_bt)
    clipped_bt = jnp.square(ratios.clamp(values_bt, old_bt - clip, old_bt + clip) - returns_bt)
    metrics = {"critic/vf_clipfrac": ratios.masked_mean(clipped_bt > unclipped_bt, mask)}
    return 0.5 * jnp.maximum(unclipped_bt, clipped_bt), metrics
