"""Reference operations of `segment` for platforms without kernels, by XLA on any mesh.

Shapes and names are those of `segment`. Empty segments get the neutral element of the operation.
"""

import functools

import chex
import jax
import jax.numpy as jnp

NEUTRAL = {"sum": 0.0, "max": -jnp.inf, "min": jnp.inf}
JOIN = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
SCATTER = {
    "sum": jax.ops.segment_sum,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}
# Traces a function once for all callers with equal shapes. The function becomes part of the program
# that calls it, and is a program of its own where it is called outside of one.
jit = functools.partial(jax.jit, inline=True)


def as_float(x: chex.Array) -> chex.Array:
    """Returns x in its compute dtype, promote_types(x, float32)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def is_valid(ids: chex.Array, num_segments: int) -> chex.Array:
    """Whether each token belongs to a segment 1..num_segments."""
    return (ids >= 1) & (ids <= num_segments)


@functools.partial(jit, static_argnums=(2, 3))
def reduce(x: chex.Array, ids: chex.Array, num_segments: int, op: str) -> chex.Array:
    """Returns sum, max, min or logsumexp of the segments of every row, [B, S], by XLA's scatter."""
    if op == "logsumexp":
        top_bs = reduce(x, ids, num_segments, "max")
        top_bs = jnp.where(jnp.isfinite(top_bs), top_bs, 0.0)
        scaled = jnp.exp(x - broadcast(top_bs, ids))
        return top_bs + jnp.log(reduce(scaled, ids, num_segments, "sum"))
    valid_bt = is_valid(ids, num_segments)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    x = jnp.where(valid_bt, x, NEUTRAL[op] if is_float else jnp.iinfo(x.dtype).min)
    if num_segments == 1:
        return getattr(jnp, op)(x, axis=1, keepdims=True)
    row = functools.partial(SCATTER[op], num_segments=num_segments + 1)
    return jax.vmap(row)(x, jnp.where(valid_bt, ids, 0))[:, 1:]


def broadcast(x_bs: chex.Array, ids: chex.Array) -> chex.Array:
    """Returns each segment's value at its tokens, [B, T]; 0 at padding."""
    if x_bs.shape[1] == 1:
        return jnp.where(ids == 1, x_bs, 0.0)
    x_bt = jnp.take_along_axis(x_bs, jnp.clip(ids - 1, 0, x_bs.shape[1] - 1), axis=1)
    return jnp.where(is_valid(ids, x_bs.shape[1]), x_bt, 0.0)


def scan(
    x: chex.Array | tuple[chex.Array, ...], is_start: chex.Array, op: str,
    decay: chex.Array | None = None,
) -> chex.Array | tuple[chex.Array, ...]:
    """Returns `segment_scan` from left to right, by XLA on any mesh: position by position on a CPU,
    elsewhere by doubling with logarithmic depth."""
    xs, decay = jax.tree.map(as_float, (x if isinstance(x, tuple) else (x,), decay))
    ys = jax.lax.platform_dependent(
        is_start, xs, decay,
        cpu=functools.partial(_scan_by_position, op),
        default=functools.partial(_scan_by_doubling, op),
    )
    return tuple(ys) if isinstance(x, tuple) else ys[0]


def _scan_by_position(op, is_start, xs, decay):
    """Scans eight columns at a time, so that rows are read by the cache line."""
    num_tokens, width = is_start.shape[1], 8
    num_blocks = -(-num_tokens // width)
    pad = lambda a: jnp.pad(a, ((0, 0), (0, num_blocks * width - num_tokens)))
    arrays = jax.tree.map(pad, (is_start, xs, decay))
    join = JOIN[op]

    def block(before, i):
        read = lambda a: jax.lax.dynamic_slice_in_dim(a, width * i, width, axis=1)
        start_bw, xs_bw, decay_bw = jax.tree.map(read, arrays)
        columns = []
        for k in range(width):
            if decay is not None:
                before = [decay_bw[:, k] * y for y in before]
            joined = [join(x[:, k], y) for x, y in zip(xs_bw, before, strict=True)]
            before = [
                jnp.where(start_bw[:, k], x[:, k], y) for x, y in zip(xs_bw, joined, strict=True)
            ]
            columns.append(before)
        return before, [jnp.stack(column, axis=1) for column in zip(*columns, strict=True)]

    zeros = [jnp.zeros_like(x[:, 0]) for x in xs]
    _, ys_nbw = jax.lax.scan(block, zeros, jnp.arange(num_blocks))
    return [jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1)[:, :num_tokens] for y in ys_nbw]


def _scan_by_doubling(op, is_start, xs, decay):
    join = JOIN[op]
    decay = jnp.ones((), xs[0].dtype) if decay is None else decay
    decay = jnp.broadcast_to(decay, is_start.shape)

    def combine(left, right):
        (is_left, left_xs, left_decay), (is_right, right_xs, right_decay) = left, right
        scaled = left_xs if op != "sum" else [right_decay * x for x in left_xs]
        joined = [join(x, y) for x, y in zip(right_xs, scaled, strict=True)]
        xs = [jnp.where(is_right, x, y) for x, y in zip(right_xs, joined, strict=True)]
        return is_left | is_right, xs, left_decay * right_decay

    return jax.lax.associative_scan(combine, (is_start, list(xs), decay), axis=1)[1]
