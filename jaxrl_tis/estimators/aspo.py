"""ASPO: a clipped surrogate in which the ratio of good tokens is flipped.

`objectives` describes the arguments that all losses share (logp, logp_old, adv, mask, seg) and the
result.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ppo, ratios
from jaxrl_tis.estimators.traits import Traits


def entropy_quantile(entropy: Array, mask: Array, seg: Array | None, quantile: Numeric) -> Array:
    """The quantile of the entropy over the valid tokens of each token's sequence, [B, T].

    Between two order statistics it is interpolated linearly, as in `numpy.quantile`. What a
    sequence without valid tokens gets has no meaning.
    """
    chex.assert_equal_shape([entropy, mask])
    num_tokens = mask.shape[1]
    entropy_bt = jax.lax.stop_gradient(ratios.zero_padding(entropy, mask))
    ids_bt = ratios.segment_ids(seg, mask)
    ids_bt = jnp.where(ratios.as_bool(mask), ids_bt, num_tokens + 1)  # invalid tokens sort last
    _, sorted_bt = jax.lax.sort((ids_bt, entropy_bt), dimension=1, num_keys=2)
    count_bs = ratios.sequence_count(entropy_bt, mask, seg)
    start_bt = ratios.to_tokens(jnp.cumsum(count_bs, axis=1) - count_bs, seg, num_tokens)
    last_bt = jnp.maximum(ratios.to_tokens(count_bs, seg, num_tokens) - 1.0, 0.0)
    place_bt = quantile * last_bt

    def order_statistic(rank_bt):
        index_bt = (start_bt + jnp.minimum(rank_bt, last_bt)).astype(jnp.int32)
        return jnp.take_along_axis(sorted_bt, index_bt, axis=1)

    below_bt = order_statistic(jnp.floor(place_bt))
    above_bt = order_statistic(jnp.floor(place_bt) + 1.0)
    return below_bt + (place_bt - jnp.floor(place_bt)) * (above_bt - below_bt)


@Traits(needs=("entropy",))
def aspo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    entropy: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2, dual_clip: float = 3.0,
    aspo_wide: Numeric = 0.4, aspo_quantile: Numeric = 0.8, form: str = "paper",
) -> ppo.Loss:
    """ASPO (arXiv:2510.06062): the ratio of good tokens is flipped, l = -A c / sg(c)^2 with c =
    min(r, 1 + clip_high); for A < 0, l = -A c with c = max(r, 1 - clip_low).

    A weight above dual_clip is replaced by dual_clip: l = -A dual_clip log pi. Tokens whose entropy
    is above the quantile of their response have the wider bound. The authors also apply their KL
    term to the other tokens only. A survey has no bound on good tokens, which overstates what the
    authors' code does. Aggregation: token-mean.

    Unit: token. Trust region: r <= 1 + clip_high where A >= 0, r >= 1 - clip_low where A < 0
    (aspo_wide at high entropy); weight <= dual_clip. Gradient: through r, with the detached weight
    1 / r for A >= 0 and r for A < 0, at most dual_clip; 0 beyond the bound. Use: good tokens that
    are still rare; 1 / r is no importance weight, so a gap is not corrected.

    Args:
      entropy: [B, T] entropy of the old policy at each sampled token, nats.
      clip_low: width of the band below 1 for A < 0; 0.2 as in the authors' code.
      clip_high: width above 1 for A >= 0; 0.2 as in the authors' code.
      dual_clip: largest weight, > 1; 3.0 as in the authors' code.
      aspo_wide: both widths of tokens of high entropy; 0.4 as in the authors' code.
      aspo_quantile: where high entropy begins; 0.8 as in the authors' code.
      form: "paper", the authors' code, or "survey": r is not bounded where A >= 0, so that c = r.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens without gradient and
    actor/pg_clipfrac_lower of those held at dual_clip.
    """
    if dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds weights from above: give it > 1.")
    ratios.check_choice("form", form, ("paper", "survey"))
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    entropy_bt = ratios.zero_padding(entropy, mask)
    is_high_bt = entropy_bt > entropy_quantile(entropy, mask, seg, aspo_quantile)
    log_ratio_bt = ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    ratio_bt = jnp.exp(log_ratio_bt)
    low_bt = 1.0 - jnp.where(is_high_bt, aspo_wide, clip_low)
    high_bt = 1.0 + jnp.where(is_high_bt, aspo_wide, clip_high)
    if form == "survey":
        high_bt = jnp.full_like(high_bt, jnp.inf)
    c_bt = jnp.where(
        adv_bt < 0, ratios.clamp(ratio_bt, low_bt, jnp.inf), ratios.clamp(ratio_bt, 0.0, high_bt)
    )
    c_sg_bt = jax.lax.stop_gradient(c_bt)
    w_bt = jnp.where(adv_bt < 0, c_sg_bt, 1.0 / c_sg_bt)
    is_held_bt = w_bt > dual_clip
    held_bt = -dual_clip * adv_bt * ratios.zero_padding(logp, mask)
    loss_bt = jnp.where(is_held_bt, held_bt, -adv_bt * w_bt * c_bt / c_sg_bt)
    metrics = ppo.clip_metrics(log_ratio_bt, c_bt != ratio_bt, mask)
    return loss_bt, metrics | {"actor/pg_clipfrac_lower": ratios.masked_mean(is_held_bt, mask)}


OBJECTIVES = {"aspo": aspo}
