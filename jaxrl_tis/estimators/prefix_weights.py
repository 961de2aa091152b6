"""Importance weights of a prefix and of a turn: between the token's own ratio and the sequence's.

The entries are part of `weights.WEIGHTS`, whose module states the shared arguments. All are computed
in log space, and the log of a weight is clamped to +-20 before exp.

Running sums and minima cover the valid tokens up to t, each log-ratio clamped to +-20 first. They
restart at every sequence of a packed row and skip invalid tokens (a tool's reply). The tokens of a
sequence must be contiguous.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators.traits import Traits


def _before(x_bt, fill):
    """x one position to the right, `fill` in the first column."""
    return jnp.pad(x_bt[:, :-1], ((0, 0), (1, 0)), constant_values=fill)


@Traits(is_bounded_ratio=False)
def prefix_minpro(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, cap: Numeric = jnp.inf
) -> Array:
    """MinPRO, w_t = min(rho_t min_{s < t} rho_s, cap) (arXiv:2601.22718).

    The smallest ratio of the tokens before t replaces their product; it is 1 where there are
    none. The weight is taken from a survey; whether the paper truncates it, or lets a gradient
    through it, could not be read.

    Unit: prefix. Trust region: w <= cap, none by default. Use: long responses, whose prefix
    products explode; within 12 % of the progress of token weights at larger gaps (docs/oracle.md).

    Args:
      log_ratio, mask, seg: see `weights`.
      cap: upper bound of a weight; none, as the survey prints it.
    """
    log_ratio_bt = ratios.detached_log_ratio(log_ratio, mask)
    is_start_bt = ratios.segment_starts(mask, seg)
    own_bt = jnp.where(ratios.as_bool(mask), log_ratio_bt, jnp.inf)
    upto_bt = ratios.running("min", own_bt, mask, seg)
    lowest_bt = jnp.where(is_start_bt, jnp.inf, _before(upto_bt, jnp.inf))
    lowest_bt = jnp.where(jnp.isinf(lowest_bt), 0.0, lowest_bt)
    w_bt = jnp.minimum(ratios.bounded_exp(lowest_bt + log_ratio_bt), cap)
    return ratios.zero_padding(w_bt, mask)


@Traits(is_bounded_ratio=False, unbounded={"ctpo_low": jnp.inf, "ctpo_high": jnp.inf})
def prefix_ctpo(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    ctpo_low: Numeric = 0.025, ctpo_high: Numeric = 0.05, ctpo_power: Numeric = 0.5,
) -> Array:
    """CTPO's prefix product, log w_t = clip(sum_{s <= t} log rho_s, -low t^p, high t^p).

    arXiv:2605.07331. t counts the valid tokens from 1, so for p = 1/2 the band widens like the
    standard deviation of a sum of independent log-ratios. The paper clips the ratio of its
    objective to this band; here the band bounds a weight on both sides.

    Unit: prefix. Trust region: -ctpo_low t^p <= log w_t <= ctpo_high t^p, p = ctpo_power. Use: a
    prefix product of bounded spread; the band is tight (1.05 at the first token, 1.65 at the
    hundredth).

    Args:
      log_ratio, mask, seg: see `weights`.
      ctpo_low: width of the band below 0, nats at t = 1; 0.025 in the authors' code.
      ctpo_high: width of the band above 0, nats at t = 1; 0.05 in the authors' code.
      ctpo_power: exponent p of t; 0.5 in the authors' code, 0 keeps the band constant.
    """
    log_ratio_bt = ratios.detached_log_ratio(log_ratio, mask)
    log_w_bt, count_bt = ratios.prefix_sums(log_ratio_bt, mask, seg)
    width_bt = jnp.maximum(count_bt, 1.0) ** ctpo_power
    log_w_bt = ratios.clamp(log_w_bt, -ctpo_low * width_bt, ctpo_high * width_bt)
    return ratios.zero_padding(ratios.bounded_exp(log_w_bt), mask)


def turn_ids(turn: Array, mask: Array, seg: Array | None = None) -> Array:
    """Numbers the turns of each row from 1 in order of appearance, [B, T] int32; 0 at padding.

    A turn begins at a valid token that differs in turn or seg from the valid token before it. The
    result stands for `seg` wherever a turn is to be treated as a sequence of its own.

    Args:
      turn: [B, T] int, number of the turn; values at padding are ignored.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
    """
    chex.assert_rank([turn, mask], 2)
    chex.assert_equal_shape([turn, mask, ratios.segment_ids(seg, mask)])
    is_valid_bt = ratios.as_bool(mask)
    column_bt = jnp.broadcast_to(jnp.arange(mask.shape[1])[None, :], mask.shape)
    last_valid_bt = jax.lax.cummax(jnp.where(is_valid_bt, column_bt, -1), axis=1)
    previous_bt = _before(last_valid_bt, -1)

    def differs(x_bt):
        return x_bt != jnp.take_along_axis(x_bt, jnp.maximum(previous_bt, 0), axis=1)

    is_new_bt = (previous_bt < 0) | differs(turn) | differs(ratios.segment_ids(seg, mask))
    ids_bt = jnp.cumsum(is_valid_bt & is_new_bt, axis=1, dtype=jnp.int32)
    return jnp.where(is_valid_bt, ids_bt, 0)


def _turn_weight(log_w_bs, mask, ids_bt, cap):
    """min(exp(clamp(log_w, +-20)), cap) of each turn on its valid tokens, without gradient."""
    w_bs = jax.lax.stop_gradient(jnp.minimum(ratios.bounded_exp(log_w_bs), cap))
    return ratios.zero_padding(ratios.to_tokens(w_bs, ids_bt, mask.shape[1]), mask)


@Traits(needs=("turn",), is_bounded_ratio=False)
def turn_tis(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, turn: Array, cap: Numeric = 2.0
) -> Array:
    """Truncated product within a turn, w = min(prod_{t in turn} rho_t, cap), on the turn's tokens.

    The unit of correction is one action of a multi-turn agent (arXiv:2511.20718, taken from
    secondary notes: the paper clips the turn's ratio inside its objective). One turn in all is
    `seq_tis`, one token per turn `token_tis`.

    Unit: turn. Trust region: w <= cap. Use: several turns, and large batches with a reward on every
    token, where it leads in docs/oracle.md; behind token weights in small batches at large gaps.

    Args:
      log_ratio, mask, seg: see `weights`.
      turn: [B, T] int, number of the turn; a turn's valid tokens follow one another.
      cap: upper bound of a weight; 2.0 as for `token_tis`.
    """
    ids_bt = turn_ids(turn, mask, seg)
    return _turn_weight(ratios.sequence_sum(log_ratio, mask, ids_bt), mask, ids_bt, cap)


@Traits(needs=("turn",), is_bounded_ratio=False)
def turn_geo(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, turn: Array, cap: Numeric = 2.0
) -> Array:
    """Truncated geometric mean within a turn, w = min(exp(mean_{t in turn} log rho_t), cap).

    The turn ratio of arXiv:2511.20718 as most secondary notes give it. One turn in all is
    `geo_tis`, one token per turn `token_tis`. Arguments as `turn_tis`.

    Unit: turn. Trust region: w <= cap. Use: turns of different lengths; in long turns it corrects
    next to nothing.
    """
    ids_bt = turn_ids(turn, mask, seg)
    return _turn_weight(ratios.sequence_mean(log_ratio, mask, ids_bt), mask, ids_bt, cap)


WEIGHTS = {
    "turn_tis": turn_tis,
    "turn_geo": turn_geo,
    "prefix_minpro": prefix_minpro,
    "prefix_ctpo": prefix_ctpo,
}
