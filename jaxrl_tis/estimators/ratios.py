"""What every estimator shares: masked reductions, safe log-ratios, the clamp, sums over sequences.

Arrays are [B, T] (row b, token t). A mask may be bool, int or float; a non-zero entry is a valid
token. Entries outside the mask may hold anything, NaN included: they are replaced before any
arithmetic, so neither a value nor a gradient sees them. Everything is computed in
`promote_types(input, float32)`: bfloat16 goes up, float64 is never cast down.

Packed rows carry `seg` [B, T] int: 0 is padding, 1..S number the sequences of the row, and the mask
is False wherever seg is 0. `seg=None` means one sequence per row. Per-sequence values are [B, S]: S
= 1 without seg, S = T with it.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

LOG_BOUND = 20.0  # bound on a log-ratio before exp, as in verl: exp(20) = 4.9e8


def as_float(x: chex.Array) -> chex.Array:
    """x in its compute dtype, promote_types(x, float32)."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_bool(mask: chex.Array) -> chex.Array:
    """The mask as booleans; any non-zero entry is valid."""
    return jnp.asarray(mask) != 0


def zero_padding(x: chex.Array, mask: chex.Array) -> chex.Array:
    """x in its compute dtype with 0 outside the mask, whatever was there."""
    return jnp.where(as_bool(mask), as_float(x), 0.0)


def safe_divide(numerator: chex.Array, denominator: chex.Numeric) -> chex.Array:
    """numerator / denominator in the numerator's dtype; 0 where the denominator is not positive."""
    denominator = jnp.asarray(denominator, numerator.dtype)
    is_positive = denominator > 0
    return jnp.where(is_positive, numerator / jnp.where(is_positive, denominator, 1.0), 0.0)


def masked_count(x: chex.Array, mask: chex.Array, axis: int | None = None) -> chex.Array:
    """Number of valid entries along axis, in the compute dtype of x."""
    return jnp.sum(as_bool(mask), axis=axis, dtype=as_float(x).dtype)


def masked_sum(x: chex.Array, mask: chex.Array, axis: int | None = None) -> chex.Array:
    """Sum over the valid entries; 0 for an empty mask."""
    return jnp.sum(zero_padding(x, mask), axis=axis)


def masked_mean(x: chex.Array, mask: chex.Array, axis: int | None = None) -> chex.Array:
    """Mean over the valid entries; 0 for an empty mask."""
    return safe_divide(masked_sum(x, mask, axis), masked_count(x, mask, axis))


def masked_std(x: chex.Array, mask: chex.Array, ddof: int = 0) -> chex.Array:
    """Standard deviation over all valid entries; 0 with `ddof` entries or fewer."""
    squares = jnp.square(as_float(x) - masked_mean(x, mask))
    return jnp.sqrt(safe_divide(masked_sum(squares, mask), masked_count(x, mask) - ddof))


def masked_max(x: chex.Array, mask: chex.Array) -> chex.Array:
    """Largest valid entry; 0 for an empty mask."""
    mask = as_bool(mask)
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, as_float(x), -jnp.inf)), 0.0)


def masked_min(x: chex.Array, mask: chex.Array) -> chex.Array:
    """Smallest valid entry; 0 for an empty mask."""
    return -masked_max(-as_float(x), mask)


def clamp(x: chex.Array, low: chex.Numeric, high: chex.Numeric) -> chex.Array:
    """min(max(x, low), high) with gradient 1 on the closed interval and 0 outside.

    At an exact bound `jnp.clip` has gradient 0.5 and `lax.clamp` 0; PyTorch's clamp has 1, and a
    token that sits on the edge of a trust region has not left it.
    """
    is_inside = (x >= low) & (x <= high)
    return jnp.where(is_inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


def bounded_exp(x: chex.Array) -> chex.Array:
    """exp(clamp(x, +-20)): a ratio from a log-ratio; no gradient outside the bounds."""
    return jnp.exp(clamp(x, -LOG_BOUND, LOG_BOUND))


def safe_log_ratio(logp: chex.Array, logp_base: chex.Array, mask: chex.Array) -> chex.Array:
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


def detached_log_ratio(log_ratio: chex.Array, mask: chex.Array) -> chex.Array:
    """clamp(log_ratio, +-20) token by token, 0 at padding, without gradient; [B, T] each."""
    chex.assert_rank([log_ratio, mask], 2)
    chex.assert_equal_shape([log_ratio, mask])
    return jax.lax.stop_gradient(clamp(zero_padding(log_ratio, mask), -LOG_BOUND, LOG_BOUND))


def sequence_sum(x: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Sum of x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    chex.assert_equal_shape([x, mask] if seg is None else [x, mask, seg])
    x_bt = zero_padding(x, mask)
    if seg is None:
        return jnp.sum(x_bt, axis=1, keepdims=True)
    num_ids = x_bt.shape[1] + 1  # a row of T tokens holds at most T sequences, and id 0 is padding

    def row_sum(x_t, seg_t):
        return jax.ops.segment_sum(x_t, seg_t, num_segments=num_ids)

    return jax.vmap(row_sum)(x_bt, seg)[:, 1:]


def sequence_count(x: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Number of valid tokens of each sequence, [B, S], in the compute dtype of x."""
    return sequence_sum(jnp.ones_like(as_float(x)), mask, seg)


def sequence_mean(x: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Mean of x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return safe_divide(sequence_sum(x, mask, seg), sequence_count(x, mask, seg))


def to_tokens(x_bs: chex.Array, seg: chex.Array | None, num_tokens: int) -> chex.Array:
    """Each sequence's value on its tokens, [B, S] -> [B, num_tokens]; 0 at padding of packed
    rows."""
    if seg is None:
        return jnp.broadcast_to(x_bs, (x_bs.shape[0], num_tokens))
    x_bt = jnp.take_along_axis(x_bs, jnp.maximum(seg - 1, 0), axis=1)
    return jnp.where(seg > 0, x_bt, 0)


def sequence_max(x: chex.Array, mask: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """Largest x over the valid tokens of each sequence, [B, S]; 0 for a sequence without any."""
    chex.assert_equal_shape([x, mask] if seg is None else [x, mask, seg])
    x_bt = jnp.where(as_bool(mask), as_float(x), -jnp.inf)
    if seg is None:
        max_bs = jnp.max(x_bt, axis=1, keepdims=True)
    else:
        num_ids = x_bt.shape[1] + 1  # as in `sequence_sum`

        def row_max(x_t, seg_t):
            return jax.ops.segment_max(x_t, seg_t, num_segments=num_ids)

        max_bs = jax.vmap(row_max)(x_bt, seg)[:, 1:]
    return jnp.where(sequence_count(x_bt, mask, seg) > 0, max_bs, 0.0)


def segment_starts(x: chex.Array, seg: chex.Array | None = None) -> chex.Array:
    """True at the first position of every sequence of x [B, T]: column 0, and where seg changes."""
    is_new = jnp.zeros(x[:, 1:].shape, bool) if seg is None else seg[:, 1:] != seg[:, :-1]
    return jnp.pad(is_new, ((0, 0), (1, 0)), constant_values=True)


def segment_scan(operator: Callable, x: chex.ArrayTree, is_start: chex.Array) -> chex.ArrayTree:
    """operator over the positions from the last start up to t, [B, T].

    One position after the other on a CPU, by doubling (of logarithmic depth) elsewhere.

    Args:
      operator: associative, of two arrays or trees of them, e.g. `jnp.add` or `jnp.minimum`.
      x: [B, T] in any dtype, or a tree of such arrays; the caller puts the operator's neutral
        element where nothing counts.
      is_start: [B, T] where a run begins, e.g. from `segment_starts`; column 0 always is one.
    """
    chex.assert_equal_shape([*jax.tree.leaves(x), is_start])
    return jax.lax.platform_dependent(
        x, is_start,
        cpu=functools.partial(_scan_by_position, operator),
        default=functools.partial(_scan_by_doubling, operator),
    )


def prefix_sums(
    x: chex.Array, mask: chex.Array, seg: chex.Array | None = None
) -> tuple[chex.Array, chex.Array]:
    """Sum of x over the valid tokens of the sequence up to t, and their number, [B, T] each."""
    x_bt = zero_padding(x, mask)
    valid_bt = as_bool(mask).astype(x_bt.dtype)
    add = functools.partial(jax.tree.map, jnp.add)
    return segment_scan(add, (x_bt, valid_bt), segment_starts(mask, seg))


def _choose(condition, x, other):
    return jax.tree.map(functools.partial(jnp.where, condition), x, other)


def _scan_by_position(operator, x, is_start):
    """Eight columns at a time, so that rows are read by the cache line."""
    num_tokens, width = is_start.shape[1], 8
    num_blocks = -(-num_tokens // width)
    blocks = lambda a: jnp.pad(a, ((0, 0), (0, num_blocks * width - num_tokens)))
    x, is_start = jax.tree.map(blocks, (x, is_start))

    def block(before, i):
        read = lambda a: jax.lax.dynamic_slice_in_dim(a, width * i, width, axis=1)
        x_bw, is_start_bw = jax.tree.map(read, (x, is_start))
        columns = []
        for k in range(width):
            x_b = jax.tree.map(lambda a: a[:, k], x_bw)
            before = _choose(is_start_bw[:, k], x_b, operator(before, x_b))
            columns.append(before)
        return before, jax.tree.map(lambda *a: jnp.stack(a, axis=1), *columns)

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a[:, 0]), x)
    _, x_nbw = jax.lax.scan(block, zeros, jnp.arange(num_blocks))
    joined = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)[:, :num_tokens]
    return jax.tree.map(joined, x_nbw)


def _scan_by_doubling(operator, x, is_start):
    def combine(left, right):
        (left_x, is_left), (right_x, is_right) = left, right
        return _choose(is_right, right_x, operator(left_x, right_x)), is_left | is_right

    return jax.lax.associative_scan(combine, (x, is_start), axis=1)[0]
