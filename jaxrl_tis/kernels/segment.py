"""Reductions, scans and broadcasts over the segments of packed rows.

Rows [B, T] hold several sequences. `seg` [B, T] int has the segment of each token: 1..S number the
segments of a row. Any other id, 0 by convention, is padding. Padding may hold NaN and affects
neither values nor gradients. Everything is computed in `promote_types(input, float32)`.

On a TPU these operations are kernels (`segment_pallas`) that read their inputs once. On other
platforms XLA compiles `segment_reference`. It also computes float64, and reductions and broadcasts
with S = 1 or S = T. XLA does not partition a kernel: in a program over several devices pass `rows`,
the sharding of [B, T] arrays, and each device works on its own rows. Gradients are defined in
reverse mode only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_tis.kernels import segment_pallas, segment_reference
from jaxrl_tis.kernels.segment_reference import as_float, is_valid, jit

LOG_BOUND = 20.0  # bound on a log-ratio before exp, as in verl: exp(20) = 4.9e8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """The segment ids of packed rows, and the largest number of segments in a row.

    Attributes:
      ids: [B, T] int32, 1..num_segments; 0 is padding.
      num_segments: S, the number of columns of arrays per sequence; static. Tokens with a larger id
        would count as padding.
      rows: sharding of [B, T] arrays in a program over several devices; static.
    """

    ids: chex.Array
    num_segments: int = dataclasses.field(metadata={"static": True})
    rows: NamedSharding | None = dataclasses.field(default=None, metadata={"static": True})


class RatioStats(NamedTuple):
    """Per-sequence statistics of l = logp_old - logp_behav, [B, S] each; 0 for an empty sequence.

    c = clamp(l, +-20), k1 = -c, k2 = c^2 / 2, k3 = exp(c) - 1 - c, dp = |p_old - p_behav|; the last
    three fields are None where only log-ratios were given.
    """

    count: chex.Array
    log_ratio_sum: chex.Array  # of l itself
    k1_sum: chex.Array
    k1_max: chex.Array
    k2_sum: chex.Array
    k2_max: chex.Array
    k3_sum: chex.Array
    k3_max: chex.Array
    ratio_sum: chex.Array  # of exp(c)
    ratio_square_sum: chex.Array  # of exp(2 c)
    logp_behav_sum: chex.Array | None = None
    dp_sum: chex.Array | None = None
    dp_max: chex.Array | None = None


def segment_reduce(
    x: chex.Array | tuple[chex.Array, ...], seg: chex.Array, num_segments: int, op: str, *,
    rows: NamedSharding | None = None,
) -> chex.Array | tuple[chex.Array, ...]:
    """Returns one number for each segment of every row, [B, S]; several inputs share one pass.

    Args:
      x: [B, T] values, or a tuple of such arrays for a tuple of results.
      seg: [B, T] ids in any order: a segment need not be contiguous.
      num_segments: S, static.
      op: "sum", "mean", "max", "min", "count" (0 for an empty segment) or "logsumexp" (-inf).
      rows: see the module.

    The gradient of a maximum or minimum is shared among the tokens that attain it.
    """
    if op not in (*segment_reference.NEUTRAL, "mean", "count", "logsumexp"):
        raise ValueError(f"segment_reduce has no op {op!r}.")
    xs = x if isinstance(x, tuple) else (x,)
    chex.assert_equal_shape([*xs, seg])
    return _unwrap(x, _reduce(op, num_segments, rows, xs, seg))


def segment_broadcast(
    x: chex.Array, seg: chex.Array, *, rows: NamedSharding | None = None
) -> chex.Array:
    """Returns each segment's value at its tokens, [B, S] -> [B, T]; 0 at padding.

    Args:
      x: [B, S] values.
      seg: [B, T] ids in any order.
      rows: see the module.
    """
    chex.assert_rank([x, seg], 2)
    return _broadcast(rows, (x,), seg)[0]


def segment_scan(
    x: chex.Array | tuple[chex.Array, ...], seg: chex.Array, op: str = "sum", *,
    decay: chex.Array | None = None, reverse: bool = False, rows: NamedSharding | None = None,
) -> chex.Array | tuple[chex.Array, ...]:
    """Returns the running sum, minimum or maximum of each segment, [B, T].

    Args:
      x: [B, T] values, or a tuple of such arrays for a tuple of results.
      seg: [B, T] ids of contiguous segments, with result 0 at padding; or bool, True at the start
        of each run, without padding.
      op: "sum", "min" or "max".
      decay: [B, T], for "sum": y_t = x_t + decay_t y_{t-1} instead, y_{t+1} in reverse.
      reverse: from the last position of a run to the first.
      rows: see the module.

    The gradient of a running minimum or maximum goes to the first position that attains it.
    """
    if decay is not None and op != "sum":
        raise ValueError(f"segment_scan has a decay for op 'sum' alone, not for {op!r}.")
    if op not in segment_reference.NEUTRAL:
        raise ValueError(f"segment_scan has no op {op!r}.")
    xs = x if isinstance(x, tuple) else (x,)
    xs = tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else as_float(x) for x in xs)
    chex.assert_equal_shape([*xs, seg] if decay is None else [*xs, seg, decay])
    if seg.dtype == bool:
        return _unwrap(x, _scan(op, reverse, rows, xs, _begins(seg, reverse), decay))
    valid_bt = seg > 0
    neutral = segment_reference.NEUTRAL[op]
    xs = tuple(jnp.where(valid_bt, x, jnp.asarray(neutral, x.dtype)) for x in xs)
    decay = None if decay is None else jnp.where(valid_bt, decay, jnp.zeros((), decay.dtype))
    is_first = jnp.pad(seg[:, 1:] != seg[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ys = _scan(op, reverse, rows, xs, _begins(is_first, reverse), decay)
    return _unwrap(x, tuple(jnp.where(valid_bt, y, 0.0) for y in ys))


def log_ratio_stats(
    log_ratio: chex.Array, mask: chex.Array, seg: chex.Array, num_segments: int, *,
    rows: NamedSharding | None = None,
) -> RatioStats:
    """Returns the statistics of `ratio_stats` that need only the log-ratio [B, T]."""
    return _stats((log_ratio,), mask, seg, num_segments, rows)


def ratio_stats(
    logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, seg: chex.Array,
    num_segments: int, *, rows: NamedSharding | None = None,
) -> RatioStats:
    """Returns the per-sequence statistics for weights, masks and metrics, in one pass over memory.

    Args:
      logp_old: [B, T] learner's log-probs, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] valid tokens; non-zero is valid.
      seg: [B, T] ids in any order.
      num_segments: S, static.
      rows: see the module.

    Gradient: none.
    """
    return _stats((logp_old, logp_behav), mask, seg, num_segments, rows)


def _terms(xs, expm1=jnp.expm1):
    """Returns {field of RatioStats: (operation, values)} for (log-ratio,) or (logp_old,
    logp_behav)."""
    log_ratio = xs[0] if len(xs) == 1 else xs[0] - xs[1]
    bounded = jnp.clip(log_ratio, -LOG_BOUND, LOG_BOUND)
    k2, k3 = 0.5 * jnp.square(bounded), expm1(bounded) - bounded
    terms = {
        "count": ("sum", jnp.ones_like(bounded)),
        "log_ratio_sum": ("sum", log_ratio),
        "k1_sum": ("sum", -bounded),
        "k1_max": ("max", -bounded),
        "k2_sum": ("sum", k2),
        "k2_max": ("max", k2),
        "k3_sum": ("sum", k3),
        "k3_max": ("max", k3),
        "ratio_sum": ("sum", jnp.exp(bounded)),
        "ratio_square_sum": ("sum", jnp.exp(2.0 * bounded)),
    }
    if len(xs) == 1:
        return terms
    dp = jnp.abs(jnp.exp(xs[0]) - jnp.exp(xs[1]))
    return terms | {"logp_behav_sum": ("sum", xs[1]), "dp_sum": ("sum", dp), "dp_max": ("max", dp)}


@functools.partial(jit, static_argnums=(3, 4))
def _stats(xs, mask, seg, num_segments, rows):
    chex.assert_equal_shape([*xs, mask, seg])
    xs = jax.lax.stop_gradient(xs)
    ids = jnp.where(mask != 0, seg, 0)
    operations = {name: op for name, (op, _) in _terms([jnp.zeros(())] * len(xs)).items()}

    def reference(ids, *xs):
        valid_bt = is_valid(ids, num_segments)
        values = _terms([jnp.where(valid_bt, as_float(x), 0.0) for x in xs]).values()
        return [segment_reference.reduce(x, ids, num_segments, op) for op, x in values]

    def kernel(ids, *xs):
        in_tile = lambda *x: [value for _, value in _terms(x, segment_pallas.expm1).values()]
        return segment_pallas.reduce(xs, ids, num_segments, in_tile, list(operations.values()))

    results = _choose(kernel, reference, len(operations), num_segments, rows)(ids, *xs)
    stats = RatioStats(**dict(zip(operations, results, strict=True)))
    return jax.tree.map(lambda x: jnp.where(stats.count > 0, x, 0.0), stats)


def _unwrap(x, results):
    """Returns a tuple of results if x is a tuple, else one result."""
    return tuple(results) if isinstance(x, tuple) else results[0]


def _choose(kernel: Callable, reference: Callable, num_results, num_segments, rows) -> Callable:
    """Returns the kernel on a TPU, else the reference; the reference also covers unsupported cases.

    A row of one segment needs no kernel. With as many segments as tokens the kernel's loop over
    segments saves nothing.
    """

    def call(ids, *arrays):
        arrays = ids, *arrays
        is_double = any(x.dtype == jnp.float64 for x in arrays)
        is_bounded = 1 < num_segments < ids.shape[1]
        if is_double or not is_bounded or not segment_pallas.fits(num_results, num_segments):
            return reference(*arrays)
        # Integers of 64 bits, which no kernel has, are numbers of the compute dtype as any others.
        narrow = lambda x: as_float(x) if x.dtype.itemsize == 8 else x
        tpu = segment_pallas.on_mesh(
            lambda ids, *xs: kernel(ids.astype(jnp.int32), *map(narrow, xs)), rows
        )
        return jax.lax.platform_dependent(*arrays, tpu=tpu, default=reference)

    return call


# Reductions: totals over segments, and how each operation makes its results of them.


def _totals(op, num_segments, rows, xs, ids):
    """Returns ([B, S] for each input, [B, S] number of tokens), in one pass."""
    ops = [op] * len(xs) + ["sum"]

    def reference(ids, *xs):
        terms = [*map(as_float, xs), jnp.ones(ids.shape, as_float(xs[0]).dtype)]
        pairs = zip(ops, terms, strict=True)
        return [segment_reference.reduce(x, ids, num_segments, o) for o, x in pairs]

    def kernel(ids, *xs):
        terms = lambda *x: (*x, jnp.ones_like(x[0]))
        return segment_pallas.reduce(xs, ids, num_segments, terms, ops)

    *results, count = _choose(kernel, reference, len(ops), num_segments, rows)(ids, *xs)
    return results, count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reduce(op, num_segments, rows, xs, ids):
    return _reduce_forward(op, num_segments, rows, xs, ids)[0]


def _reduce_forward(op, num_segments, rows, xs, ids):
    total = "sum" if op in ("mean", "count") else op
    results, count_bs = _totals(total, num_segments, rows, xs, ids)
    if op == "mean":
        results = [y / jnp.maximum(count_bs, 1.0) for y in results]
    elif op in ("max", "min"):
        results = [jnp.where(count_bs > 0, y, 0.0) for y in results]
    elif op == "count":
        results = [count_bs for _ in results]
    results = tuple(results)
    return results, (xs, ids, results, count_bs)


def _reduce_backward(op, num_segments, rows, saved, gradients):
    xs, ids, results, count_bs = saved
    valid_bt = is_valid(ids, num_segments)
    if op == "count":
        return tuple(map(jnp.zeros_like, xs)), None
    if op == "mean":
        gradients = tuple(g / jnp.maximum(count_bs, 1.0) for g in gradients)
    if op in ("sum", "mean"):
        return _cast(_broadcast(rows, gradients, ids), xs), None
    of_bt = _broadcast(rows, results, ids)
    if op == "logsumexp":
        factors = [jnp.where(valid_bt, jnp.exp(x - y), 0.0) for x, y in zip(xs, of_bt, strict=True)]
    else:
        factors = [
            (valid_bt & (x == y)).astype(y.dtype) for x, y in zip(xs, of_bt, strict=True)
        ]
        ties, _ = _totals("sum", num_segments, rows, factors, ids)
        gradients = tuple(g / jnp.maximum(n, 1.0) for g, n in zip(gradients, ties, strict=True))
    spread = _broadcast(rows, gradients, ids)
    return _cast([f * g for f, g in zip(factors, spread, strict=True)], xs), None


def _cast(values, like):
    return tuple(value.astype(x.dtype) for value, x in zip(values, like, strict=True))


_reduce.defvjp(_reduce_forward, _reduce_backward)


# Broadcasts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _broadcast(rows, xs, ids):
    return _broadcast_forward(rows, xs, ids)[0]


def _broadcast_forward(rows, xs, ids):
    num_segments = xs[0].shape[1]
    reference = lambda ids, *xs: [segment_reference.broadcast(as_float(x), ids) for x in xs]
    kernel = lambda ids, *xs: segment_pallas.broadcast(xs, ids, num_segments)
    results = _choose(kernel, reference, len(xs), num_segments, rows)(ids, *xs)
    return tuple(results), (xs, ids)


def _broadcast_backward(rows, saved, gradients):
    xs, ids = saved
    sums, _ = _totals("sum", xs[0].shape[1], rows, gradients, ids)
    return _cast(sums, xs), None


_broadcast.defvjp(_broadcast_forward, _broadcast_backward)


# Scans. `is_start` is True where a run begins in the direction of the scan.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(op, reverse, rows, xs, is_start, decay):
    return _scan_forward(op, reverse, rows, xs, is_start, decay)[0]


def _scan_forward(op, reverse, rows, xs, is_start, decay):
    def kernel(is_start, xs, decay):
        return segment_pallas.scan(xs, is_start, op, decay, reverse)

    def reference(is_start, xs, decay):
        turn = lambda x: jnp.flip(x, axis=1) if reverse else x
        xs, is_start, decay = jax.tree.map(turn, (xs, is_start, decay))
        return [turn(y) for y in segment_reference.scan(xs, is_start, op, decay)]

    arrays = is_start, xs, decay
    if any(x.dtype == jnp.float64 for x in jax.tree.leaves(arrays)):
        results = reference(*arrays)
    else:
        tpu = segment_pallas.on_mesh(kernel, rows)
        results = jax.lax.platform_dependent(*arrays, tpu=tpu, default=reference)
    return tuple(results), (xs, is_start, decay, tuple(results))


def _scan_backward(op, reverse, rows, saved, gradients):
    """Returns the gradient of a scan: for a sum the reverse scan, for a minimum the sum over the
    positions where it held."""
    xs, is_start, decay, results = saved
    gradients = tuple(g.astype(y.dtype) for g, y in zip(gradients, results, strict=True))
    before = [_shift(y, reverse, 0.0) for y in results]
    if op != "sum":
        new = [is_start | (y != b) for y, b in zip(results, before, strict=True)]
        held = [
            _scan("sum", not reverse, rows, (g,), _shift(n, not reverse, True), None)[0]
            for g, n in zip(gradients, new, strict=True)
        ]
        return _cast([jnp.where(n, h, 0.0) for n, h in zip(new, held, strict=True)], xs), None, None
    is_end = _shift(is_start, not reverse, True)
    later = None if decay is None else _shift(decay, not reverse, 0.0)
    totals = _scan(op, not reverse, rows, gradients, is_end, later)
    if decay is None:
        return _cast(totals, xs), None, None
    terms = [jnp.where(is_start, 0.0, g * b) for g, b in zip(totals, before, strict=True)]
    return _cast(totals, xs), None, jnp.asarray(sum(terms)).astype(decay.dtype)


_scan.defvjp(_scan_forward, _scan_backward)


def _shift(x, reverse, fill):
    """Returns values shifted by one position in the direction of the scan, with `fill` at the
    start."""
    if reverse:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=fill)


def _begins(is_first, reverse):
    """Returns the starts of runs in the direction of the scan, from the starts from left to
    right."""
    return _shift(is_first, True, True) if reverse else jnp.asarray(is_first).at[:, 0].set(True)
