"""Clipped surrogates whose ratio belongs to a turn of a conversation.

`objectives` describes the shared arguments (logp, logp_old, adv, mask, seg) and the result, and
`sequence_clipped` the bound of a ratio. A turn is a run of tokens of one sequence with the same
`turn`, see `prefix_weights.turn_ids`.
"""

import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ppo, prefix_weights, ratios
from jaxrl_tis.estimators.sequence_clipped import bounded_ratio, mean_on_tokens
from jaxrl_tis.estimators.traits import Traits


def _turn_surrogate(logp, logp_old, adv, mask, seg, turn, clip_low, clip_high):
    """(loss, whether clipped, turn ratio, advantage, log-ratio), [B, T] each."""
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ids_bt = prefix_weights.turn_ids(turn, mask, seg)
    ratio_bt = bounded_ratio(mean_on_tokens(log_ratio_bt, mask, ids_bt))
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - clip_low, 1.0 + clip_high)
    return loss_bt, is_clipped_bt, ratio_bt, adv_bt, log_ratio_bt


@Traits(needs=("turn",))
def turn_ppo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    turn: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> ppo.Loss:
    """Turn-PPO (arXiv:2511.20718), l_t = max(-w A_t, -clip(w, 1 - clip_low, 1 + clip_high) A_t)
    with w = exp(mean of l over the token's turn).

    One turn is the ratio of `gspo`, a turn per token is PPO. Aggregation: seq-mean-token-mean, with
    advantages from a critic (GAE). Taken from notes on the paper, which agree on the geometric mean
    but for one (an arithmetic mean).

    Unit: turn. Trust region: exp(mean of log r in the turn) within [1 - clip_low, 1 + clip_high],
    one-sided. Gradient: through that ratio to all tokens of the turn; 0 where clipped. Use: several
    turns, each clipped as one action; a band of 0.2 hardly acts on a long turn.

    Args:
      turn: [B, T] int, the turn of each token, counted from 0.
      clip_low: width of the band below 1; 0.2 as in the paper.
      clip_high: width of the band above 1; 0.2 as in the paper.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    loss_bt, is_clipped_bt, _, _, log_ratio_bt = _turn_surrogate(
        logp, logp_old, adv, mask, seg, turn, clip_low, clip_high
    )
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)


def turn_clipping_bias(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    turn: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> Array:
    """-1[clipped] sg(w) A log pi [B, T]: the part that `turn_ppo` clips away.

    Its gradient under seq-mean-token-mean is minus the clipping bias C of arXiv:2511.20718; the
    norm of that gradient is `st_ppo_norm`. Arguments as `turn_ppo`.
    """
    _, is_clipped_bt, ratio_bt, adv_bt, _ = _turn_surrogate(
        logp, logp_old, adv, mask, seg, turn, clip_low, clip_high
    )
    weight_bt = jax.lax.stop_gradient(jnp.where(is_clipped_bt, ratio_bt, 0.0))
    return -weight_bt * adv_bt * ratios.zero_padding(logp, mask)


@Traits(needs=("turn", "st_ppo_norm"))
def st_ppo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *, turn: Array,
    st_ppo_norm: Numeric, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2, form: str = "paper",
) -> ppo.Loss:
    """ST-PPO (arXiv:2511.20718): `turn_ppo` divided by max(1, |C|), C the clipping bias.

    C is the gradient of `turn_clipping_bias`, 0 where nothing is clipped; the caller measures its
    norm over the whole minibatch. The scale changes no direction. With a turn per token it is
    S-PPO. The normaliser was not read in the paper and notes on it contradict each other, so it is
    required. A survey has another stabiliser: where a turn is clipped, its weights are normalised
    anew within it (form="survey").

    Unit: turn. Trust region: that of `turn_ppo`; the step is divided by max(1, |C|), C the gradient
    that clipping leaves out. Gradient: that of `turn_ppo`, scaled, C detached; in the survey's form
    through r on a clipped turn's tokens. Use: `turn_ppo` where clipping makes it unstable; C costs
    a second backward pass, and the paper does not confirm its form.

    Args:
      turn: [B, T] int, the turn of each token, counted from 0.
      st_ppo_norm: scalar, the L2 norm of C over the parameters.
      clip_low: width of the band below 1; 0.2 as in the paper.
      clip_high: width of the band above 1; 0.2 as in the paper.
      form: "paper", or "survey": nothing is divided by |C|, which is not used. The token of a
        clipped turn has l = -b r_t / sg(mean of r in the turn) A, b the end of the band: its
        weights average b, and no token loses its gradient. The survey says so in words; the formula
        is ours.

    Returns loss_bt and the metrics of `turn_ppo`.
    """
    ratios.check_choice("form", form, ("paper", "survey"))
    loss_bt, is_clipped_bt, ratio_bt, adv_bt, log_ratio_bt = _turn_surrogate(
        logp, logp_old, adv, mask, seg, turn, clip_low, clip_high
    )
    metrics = ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)
    if form == "paper":
        divisor = jax.lax.stop_gradient(jnp.maximum(jnp.asarray(st_ppo_norm, loss_bt.dtype), 1.0))
        return loss_bt / divisor, metrics
    own_bt = ratios.bounded_exp(log_ratio_bt)
    mean_bt = mean_on_tokens(own_bt, mask, prefix_weights.turn_ids(turn, mask, seg))
    bound_bt = jnp.clip(ratio_bt, 1.0 - clip_low, 1.0 + clip_high)
    mean_bt, bound_bt = jax.lax.stop_gradient((mean_bt, bound_bt))
    renormalised_bt = -adv_bt * bound_bt * ratios.safe_divide(own_bt, mean_bt)
    return jnp.where(is_clipped_bt, renormalised_bt, loss_bt), metrics


OBJECTIVES = {"turn_ppo": turn_ppo, "st_ppo": st_ppo}
