"""Attention of one new token per slot against a stacked cache that is updated in place, on TPU."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30
ROWS = 16  # positions written back together: the sublanes of a bfloat16 tile
BLOCK_BYTES = 2**20  # of one block of the cache in VMEM; two are in flight
LANES = 128


def decode_attention(
    q_bngk: jax.Array,
    new_bnc: jax.Array,
    cache_lbnsc: jax.Array,
    layer: jax.Array,
    positions_b: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes each slot's new key and value at its position of one layer and attends up to it.

    The cache is read block by block up to a slot's position, and written in place: only the ROWS
    positions around the new one move back. Side by side in one row, keys and values fill whole
    lanes at head width 64 too. What lies beyond a slot's position, NaN included, has no influence.

    Args:
      q_bngk: [B,N,G,K] queries, G per key/value head.
      new_bnc: [B,N,2K] the new token's key, then its value.
      cache_lbnsc: [L,B,N,S,2K] keys and values, S a multiple of ROWS; donate it.
      layer: [] int32; positions_b: [B] int32 in [0, S).
      interpret: run as a program of any device instead of a TPU's kernel.

    Returns: ([B,N,G,K] in q's dtype, the cache with the new rows). Softmax and sums are float32;
    the unnormalised probabilities take q's dtype for their product with the values.
    """
    b, n, g, k = q_bngk.shape
    s, c = cache_lbnsc.shape[-2:]
    block = _block(n * c * cache_lbnsc.dtype.itemsize, s)
    new_bn1c = new_bnc[:, :, None].astype(cache_lbnsc.dtype)
    # A query with zeros beside it meets the key alone, so no block has to be cut in two.
    q_bngc = jnp.pad(q_bngk, ((0, 0), (0, 0), (0, 0), (0, c - k)))
    of_slot = lambda *shape: pl.BlockSpec((1, *shape), lambda i, j, *_: (i, 0, 0, 0))
    reads = pl.BlockSpec(
        (1, 1, n, block, c),
        lambda i, j, layer, at: (layer[0], i, 0, jnp.minimum(j, _div(at[i], block)), 0),
    )
    writes = pl.BlockSpec(
        (1, 1, n, ROWS, c), lambda i, j, layer, at: (layer[0], i, 0, _div(at[i], ROWS), 0)
    )
    out_bngc, cache_lbnsc = pl.pallas_call(
        functools.partial(_kernel, scale=k**-0.5, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, pl.cdiv(s, block)),
            in_specs=[of_slot(n, g, c), of_slot(n, 1, c), reads],
            out_specs=[of_slot(n, g, c), writes],
            scratch_shapes=[
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, c), jnp.float32),
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * n * g * s * k, transcendentals=b * n * g * s,
            bytes_accessed=b * n * s * c * cache_lbnsc.dtype.itemsize,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, n, g, c), q_bngk.dtype),
            jax.ShapeDtypeStruct(cache_lbnsc.shape, cache_lbnsc.dtype),
        ],
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(layer.reshape(1), positions_b, q_bngc, new_bn1c, cache_lbnsc)
    return out_bngc[..., k:], cache_lbnsc


def _block(row_bytes: int, length: int) -> int:
    """Positions of a block: the most that divide the length, in tiles, within BLOCK_BYTES."""
    fitting = range(ROWS, max(BLOCK_BYTES // row_bytes, ROWS) + 1, ROWS)
    return max(block for block in fitting if length % block == 0)


def _div(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(n))  # of what is not negative


def _kernel(
    layer_ref, positions_ref, q_ref, new_ref, cache_ref, out_ref, written_ref,
    max_ref, sum_ref, acc_ref, *, scale, block,
):
    """One slot i and one block j of its positions; the running softmax lives in scratch."""
    i, j = pl.program_id(0), pl.program_id(1)
    position = positions_ref[i]
    last, within = _div(position, block), jax.lax.rem(position, jnp.int32(block))

    def accumulate(kv_nsc, limit):
        """Adds the block's first `limit` positions, all of them if None."""
        q_ngc = q_ref[0]
        kv_nsc = kv_nsc.astype(q_ngc.dtype)
        precision = jax.lax.Precision.HIGHEST if q_ngc.dtype == jnp.float32 else None
        dot = functools.partial(
            jax.lax.dot_general, preferred_element_type=jnp.float32, precision=precision
        )
        scores = dot(q_ngc, kv_nsc, (((2,), (2,)), ((0,), (0,)))) * scale
        if limit is not None:
            at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            scores = jnp.where(at < limit, scores, MASKED)
        before = max_ref[...]
        top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        p = jnp.exp(scores - top[..., :1])
        shrink = jnp.exp(before - top)
        max_ref[...] = top
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(p, axis=-1, keepdims=True)
        values = dot(p.astype(q_ngc.dtype), kv_nsc, (((2,), (1,)), ((0,), (0,))))
        acc_ref[...] = acc_ref[...] * shrink[..., :1] + values

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j < last)
    def _():
        accumulate(cache_ref[0, 0], None)

    @pl.when(j == last)
    def _():
        new_n1c = new_ref[0].astype(jnp.float32)
        kv_nsc = cache_ref[0, 0].astype(jnp.float32)
        at = jax.lax.broadcasted_iota(jnp.int32, kv_nsc.shape, 1)
        kv_nsc = jnp.where(at == within, new_n1c, jnp.where(at < within, kv_nsc, 0.0))
        accumulate(kv_nsc.astype(cache_ref.dtype), within + 1)
        start = pl.multiple_of(_div(within, ROWS) * ROWS, ROWS)
        rows = cache_ref[0, 0, :, pl.ds(start, ROWS), :].astype(jnp.float32)
        at = start + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        written_ref[0, 0] = jnp.where(at == within, new_n1c, rows).astype(written_ref.dtype)
        out_ref[0] = (acc_ref[...] / sum_ref[:, :, :1]).astype(out_ref.dtype)
