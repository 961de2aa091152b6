"""Shared functions of the estimators: masked reductions, safe log-ratios, sums over sequences.

Arrays are [B, T] (row b, token t). A mask may be bool, int or float; a non-zero entry is a valid
token. Entries outside the mask may hold anything, NaN included: they are replaced before any
arithmetic, so neither a value nor a gradient sees them. Everything is computed in
`promote_types(input, float32)`: bfloat16 goes up, float64 is never cast down.

Packed rows carry `seg` [B, T] int: 0 is padding, 1..S number the sequences of the row, and the mask
is False wherever seg is 0. `seg=None` means one sequence per row. Per-sequence values are [B, S]: S
= 1 without seg, S = T with it. `Segments(ids, num_segments)` in place of seg states a smaller S. Only
then do reductions run in the kernels of `segment` on a TPU.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.kernels import segment, segment_reference
from jaxrl_tis.kernels.segment import LOG_BOUND, RatioStats, Segments
from jaxrl_tis.kernels.segment_reference import jit


def as_float(x: Array) -> Array:
    """x in its compute dtype, promote_types(x, float32)."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_bool(mask: Array) -> Array:
    """The mask as booleans; any non-zero entry is valid."""
    return jnp.asarray(mask) != 0


def zero_padding(x: Array, mask: Array) -> Array:
    """x in its compute dtype with 0 outside the mask."""
    return jnp.where(as_bool(mask), as_float(x), 0.0)


@jit
def safe_divide(numerator: Array, denominator: Numeric) -> Array:
    """numerator / denominator in the numerator's dtype; 0 where the denominator is not positive."""
    denominator = jnp.asarray(denominator, numerator.dtype)
    is_positive = denominator > 0
    return jnp.where(is_positive, numerator / jnp.where(is_positive, denominator, 1.0), 0.0)


def masked_count(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Number of valid entries along axis, in the compute dtype of x."""
    return jnp.sum(as_bool(mask), axis=axis, dtype=as_float(x).dtype)


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Sum over the valid entries; 0 for an empty mask."""
    return jnp.sum(zero_padding(x, mask), axis=axis)


@functools.partial(jit, static_argnames="axis")
def masked_mean(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Mean over the valid entries; 0 for an empty mask."""
    return safe_divide(masked_sum(x, mask, axis), masked_count(x, mask, axis))


def masked_std(x: Array, mask: Array, ddof: int = 0) -> Array:
    """Standard deviation over all valid entries; 0 with `ddof` entries or fewer."""
    squares = jnp.square(as_float(x) - masked_mean(x, mask))
    return jnp.sqrt(safe_divide(masked_sum(squares, mask), masked_count(x, mask) - ddof))


def masked_max(x: Array, mask: Array) -> Array:
    """Largest valid entry; 0 for an empty mask."""
    mask = as_bool(mask)
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, as_float(x), -jnp.inf)), 0.0)


def masked_min(x: Array, mask: Array) -> Array:
    """Smallest valid entry; 0 for an empty mask."""
    return -masked_max(-as_float(x), mask)


def clamp(x: Array, low: Numeric, high: Numeric) -> Array:
    """min(max(x, low), high) with gradient 1 on the closed interval and 0 outside.

    At an exact bound `jnp.clip` has gradient 0.5 and `lax.clamp` 0; PyTorch's clamp has 1, and a
    token that sits on the edge of a trust region has not left it.
    """
    is_inside = (x >= low) & (x <= high)
    return jnp.where(is_inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


def bounded_exp(x: Array) -> Array:
    """exp(clamp(x, +-20)): a ratio from a log-ratio; no gradient outside the bounds."""
    return jnp.exp(clamp(x, -LOG_BOUND, LOG_BOUND))


def log_bound(x: Numeric) -> Numeric:
    """log; of a Python number in double precision.

    Bounds of a ratio are compared with its logarithm, which is what a batch holds: exp would round
    a ratio that hits its bound to one side of it.
    """
    return math.log(x) if isinstance(x, (int, float)) and x > 0 else jnp.log(x)


def is_inside(log_ratio: Array, lower: Numeric, upper: Numeric) -> Array:
    """Whether lower <= exp(log_ratio) <= upper, both inclusive; compared as logarithms."""
    return (log_ratio >= log_bound(lower)) & (log_ratio <= log_bound(upper))


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """ValueError, naming the choices, for a value that is none of them."""
    if value not in choices:
        raise ValueError(f"Unknown {name} {value!r}; choose {' or '.join(choices)}.")


def safe_log_ratio(logp: Array, logp_base: Array, mask: Array) -> Array:
    """logp - logp_base on valid tokens and 0 on padding, so that exp() of it is always safe.

    Args:
      logp: [B, T] log-probs in nats, numerator of the ratio.
      logp_base: [B, T] log-probs in nats, denominator.
      mask: [B, T] valid tokens.

    The gradient flows to both arguments, and not at all at padding.
    """
    chex.assert_rank([logp, logp_base, mask], 2)
    chex.assert_equal_shape([logp, logp_base, mask])
    return zero_padding(logp, mask) - zero_padding(logp_base, mask)


def detached_log_ratio(log_ratio: Array, mask: Array) -> Array:
    """clamp(log_ratio, +-20) token by token, 0 at padding, without gradient; [B, T] each."""
    chex.assert_rank([log_ratio, mask], 2)
    chex.assert_equal_shape([log_ratio, mask])
    return jax.lax.stop_gradient(clamp(zero_padding(log_ratio, mask), -LOG_BOUND, LOG_BOUND))


def learner_logp(log_ratio: Array, logp_behav: Array, mask: Array) -> Array:
    """log pi_old = logp_behav + log_ratio [B, T], 0 at padding, without gradient. The ratio is not
    clamped, so that a token far outside the sampler's support keeps the learner's probability; NaN
    where both are infinite."""
    return jax.lax.stop_gradient(zero_padding(logp_behav + log_ratio, mask))


def segment_ids(seg: Array | Segments | None, mask: Array) -> Array:
    """Returns the sequence ids [B, T] of seg, `Segments` or None; 1 everywhere for None."""
    if seg is None:
        return jnp.ones(mask.shape, jnp.int32)
    return seg.ids if isinstance(seg, Segments) else seg


def segments(seg: Array | Segments | None, mask: Array) -> Segments:
    """seg with the padding of the mask; a row of T tokens holds at most T sequences."""
    if seg is None:
        return Segments(as_bool(mask).astype(jnp.int32), 1)
    ids_bt = jnp.where(as_bool(mask), segment_ids(seg, mask), 0)
    if isinstance(seg, Segments):
        return Segments(ids_bt, seg.num_segments, seg.rows)
    return Segments(ids_bt, mask.shape[1])


def _reduce(op, x, mask, seg):
    chex.assert_equal_shape([x, mask, segment_ids(seg, mask)])
    here = segments(seg, mask)
    return segment.segment_reduce(as_float(x), here.ids, here.num_segments, op, rows=here.rows)


def sequence_sum(x: Array, mask: Array, seg: Array | None = None) -> Array:
    """Sum of x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return _reduce("sum", x, mask, seg)


def sequence_count(x: Array, mask: Array, seg: Array | None = None) -> Array:
    """Number of valid tokens of each sequence, [B, S], in the compute dtype of x."""
    return _reduce("count", x, mask, seg)


def sequence_mean(x: Array, mask: Array, seg: Array | None = None) -> Array:
    """Mean of x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return safe_divide(sequence_sum(x, mask, seg), sequence_count(x, mask, seg))


def to_tokens(x_bs: Array, seg: Array | None, num_tokens: int) -> Array:
    """Each sequence's value on its tokens, [B, S] -> [B, num_tokens]; 0 at padding of packed
    rows."""
    if seg is None:
        return jnp.broadcast_to(x_bs, (x_bs.shape[0], num_tokens))
    rows = seg.rows if isinstance(seg, Segments) else None
    return segment.segment_broadcast(x_bs, segment_ids(seg, x_bs), rows=rows)


def sequence_max(x: Array, mask: Array, seg: Array | None = None) -> Array:
    """Largest x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return _reduce("max", x, mask, seg)


def sequence_group(group: Array, mask: Array, seg: Array | None = None) -> Array:
    """The group of each sequence, [B, S] int, from its valid tokens; any number without them."""
    chex.assert_equal_shape([group, mask])
    here = segments(seg, mask)
    return segment_reference.reduce(group, here.ids, here.num_segments, "max")


def log_ratio_stats(log_ratio: Array, mask: Array, seg: Array | None = None) -> RatioStats:
    """Per-sequence statistics [B, S] of a log-ratio [B, T], without gradient.

    Weights, masks and metrics that ask for any of them make the same call, which a compiled program
    does once; what none asks for is not computed outside of a TPU's kernel.
    """
    here = segments(seg, mask)
    return segment.log_ratio_stats(
        log_ratio, mask, here.ids, here.num_segments, rows=here.rows
    )


def ratio_stats(
    logp_old: Array, logp_behav: Array, mask: Array, seg: Array | None = None
) -> RatioStats:
    """`log_ratio_stats` of logp_old - logp_behav, and the statistics of the probabilities."""
    here = segments(seg, mask)
    return segment.ratio_stats(
        logp_old, logp_behav, mask, here.ids, here.num_segments, rows=here.rows
    )


def segment_starts(x: Array, seg: Array | None = None) -> Array:
    """True at the first position of every sequence of x [B, T]: column 0, and where seg changes."""
    ids_bt = segment_ids(seg, x)
    return jnp.pad(ids_bt[:, 1:] != ids_bt[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def running(op: str, x: Any, mask: Array, seg: Array | None = None) -> Any:
    """`segment.segment_scan` over the positions of each sequence, contiguous in packed rows.

    The caller puts the operation's neutral element where nothing counts.
    """
    is_start_bt = segment_starts(mask, seg)
    if isinstance(seg, Segments):
        return segment.segment_scan(x, is_start_bt, op, rows=seg.rows)
    return segment_reference.scan(x, is_start_bt, op)


def prefix_sums(x: Array, mask: Array, seg: Array | None = None) -> tuple[Array, Array]:
    """Sum of x over the valid tokens of the sequence up to t, and their number, [B, T] each."""
    x_bt = zero_padding(x, mask)
    return running("sum", (x_bt, as_bool(mask).astype(x_bt.dtype)), mask, seg)


def effective_sample_size(w: Array, mask: Array) -> Array:
    """mean(w)^2 / mean(w^2) over the valid entries, in (0, 1]; 0 if they are all 0 or none is
    valid."""
    largest = masked_max(w, mask)
    scaled = safe_divide(zero_padding(w, mask), largest)
    ess = safe_divide(
        jnp.square(masked_mean(scaled, mask)), masked_mean(jnp.square(scaled), mask)
    )
    return jnp.minimum(ess, 1.0)
