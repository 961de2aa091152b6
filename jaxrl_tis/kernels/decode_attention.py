"""Attention of one new token per slot against pages of a stacked cache, updated in place, on TPU."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30
ROW_BYTES = 32  # positions written back together: sublanes of a tile times bytes of a number
LANES = 128


def decode_attention(
    q_bngk: jax.Array,
    new_bnc: jax.Array,
    new_scale_bn2: jax.Array | None,
    cache_lpnsc: jax.Array,
    scale_lpn2s: jax.Array | None,
    layer: jax.Array,
    index_b: jax.Array,
    page_b: jax.Array,
    table_bp: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Writes each slot's new key and value at its place of one layer and attends up to it.

    The pages of a slot are read one by one up to its place. The cache is written in place: only the
    positions of the tile around the new one move back. Side by side in one row, keys and values
    fill whole lanes at head width 64 too. What lies beyond a slot's place, NaN included, has no
    influence.

    Args:
      q_bngk: [B,N,G,K] queries, G per key/value head.
      new_bnc: [B,N,2K] the new token's key, then its value, in the cache's dtype.
      new_scale_bn2: [B,N,2] float32 scales of both, None unless the cache is int8.
      cache_lpnsc: [L,P,N,S,2K] pages of S positions, a multiple of a tile's rows; donate it.
      scale_lpn2s: [L,P,N,2,S] float32 scales of int8 keys and of values, or None; donate it.
      layer: [] int32.
      index_b: [B] int32 place of the new token among the positions of its slot's pages.
      page_b: [B] int32 page that takes the new token; where it is not the page of index_b, nothing
        of that page changes and the slot attends to the new token all the same.
      table_bp: [B,n] int32 pages of each slot in order.
      interpret: run as a program of any device instead of a TPU's kernel.

    Returns: ([B,N,G,K] in q's dtype, the cache, the scales). Softmax and sums are float32; the
    unnormalised probabilities take q's dtype for their product with the values.
    """
    b, n, g, k = q_bngk.shape
    s, c = cache_lpnsc.shape[-2:]
    rows = ROW_BYTES // cache_lpnsc.dtype.itemsize
    # A query with zeros beside it meets the key alone, so no block has to be cut in two.
    q_bngc = jnp.pad(q_bngk, ((0, 0), (0, 0), (0, 0), (0, c - k)))
    of_slot = lambda *shape: pl.BlockSpec((1, *shape), lambda i, j, *_: (i, 0, 0, 0))
    page_of = lambda i, j, index, table: table[i, jnp.minimum(j, _div(index[i], s))]
    reads = lambda *shape: pl.BlockSpec(
        (1, 1, n, *shape),
        lambda i, j, layer, index, page, table: (layer[0], page_of(i, j, index, table), 0, 0, 0),
    )
    tile = lambda i, index: _div(jax.lax.rem(index[i], jnp.int32(s)), rows)
    writes = pl.BlockSpec(
        (1, 1, n, rows, c),
        lambda i, j, layer, index, page, table: (layer[0], page[i], 0, tile(i, index), 0),
    )
    writes_scale = pl.BlockSpec(
        (1, 1, n, 2, s), lambda i, j, layer, index, page, table: (layer[0], page[i], 0, 0, 0)
    )
    inputs, in_specs = [q_bngc, new_bnc[:, :, None]], [of_slot(n, g, c), of_slot(n, 1, c)]
    out_specs = [of_slot(n, g, c), writes]
    out_shape = [jax.ShapeDtypeStruct((b, n, g, c), q_bngk.dtype), _like(cache_lpnsc)]
    inputs, in_specs = inputs + [cache_lpnsc], in_specs + [reads(s, c)]
    aliases = {6: 1}  # four scalar arguments come first
    if scale_lpn2s is not None:
        inputs += [new_scale_bn2[..., None], scale_lpn2s]
        in_specs += [of_slot(n, 2, 1), reads(2, s)]
        out_specs, out_shape = out_specs + [writes_scale], out_shape + [_like(scale_lpn2s)]
        aliases[8] = 2
    out = pl.pallas_call(
        functools.partial(_kernel, scale=k**-0.5, is_int8=scale_lpn2s is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(b, table_bp.shape[1]),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, c), jnp.float32),
            ],
        ),
        cost_estimate=_cost(b * n * table_bp.shape[1] * s, g, k, cache_lpnsc.dtype.itemsize),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(layer.reshape(1), index_b, page_b, table_bp, *inputs)
    return out[0][..., k:], out[1], out[2] if scale_lpn2s is not None else None


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _cost(keys: int, g: int, k: int, itemsize: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=4 * keys * g * k, transcendentals=keys * g, bytes_accessed=keys * 2 * k * itemsize
    )


def _div(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(n))  # of what is not negative


def _kernel(
    layer_ref, index_ref, page_ref, table_ref, q_ref, new_ref, cache_ref, *refs, scale, is_int8
):
    """One slot i and page j of its table; the running softmax lives in scratch."""
    if is_int8:
        new_scale_ref, scale_ref, out_ref, written_ref, written_scale_ref, *refs = refs
    else:
        out_ref, written_ref, *refs = refs
    max_ref, sum_ref, acc_ref = refs
    i, j = pl.program_id(0), pl.program_id(1)
    size, rows = cache_ref.shape[3], written_ref.shape[3]
    last = _div(index_ref[i], size)
    within = jax.lax.rem(index_ref[i], jnp.int32(size))

    def accumulate(kv_nsc, scale_n2s, limit):
        """Adds the page's first `limit` positions, all of them if None."""
        q_ngc = q_ref[0]
        kv_nsc = kv_nsc.astype(q_ngc.dtype)
        precision = jax.lax.Precision.HIGHEST if q_ngc.dtype == jnp.float32 else None
        dot = functools.partial(
            jax.lax.dot_general, preferred_element_type=jnp.float32, precision=precision
        )
        scores = dot(q_ngc, kv_nsc, (((2,), (2,)), ((0,), (0,)))) * scale
        if is_int8:
            scores = scores * scale_n2s[:, :1]
        if limit is not None:
            at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            scores = jnp.where(at < limit, scores, MASKED)
        before = max_ref[...]
        top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        p = jnp.exp(scores - top[..., :1])
        shrink = jnp.exp(before - top)
        max_ref[...] = top
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(p, axis=-1, keepdims=True)
        if is_int8:
            p = p * scale_n2s[:, 1:]
        values = dot(p.astype(q_ngc.dtype), kv_nsc, (((2,), (1,)), ((0,), (0,))))
        acc_ref[...] = acc_ref[...] * shrink[..., :1] + values

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j < last)
    def _():
        accumulate(cache_ref[0, 0], scale_ref[0, 0] if is_int8 else None, None)

    @pl.when(j == last)
    def _():
        new_n1c = new_ref[0].astype(jnp.float32)
        kv_nsc = cache_ref[0, 0].astype(jnp.float32)
        at = jax.lax.broadcasted_iota(jnp.int32, kv_nsc.shape, 1)
        kv_nsc = jnp.where(at == within, new_n1c, jnp.where(at < within, kv_nsc, 0.0))
        scale_n2s = None
        if is_int8:
            at = jax.lax.broadcasted_iota(jnp.int32, scale_ref.shape[2:], 2)
            old = scale_ref[0, 0]
            written_scale_ref[0, 0] = jnp.where(at == within, new_scale_ref[0], old)
            scale_n2s = jnp.where(
                at == within, new_scale_ref[0], jnp.where(at < within, old, 0.0)
            )
        accumulate(kv_nsc.astype(cache_ref.dtype), scale_n2s, within + 1)
        start = pl.multiple_of(_div(within, rows) * rows, rows)
        tile = cache_ref[0, 0, :, pl.ds(start, rows), :].astype(jnp.float32)
        at = start + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        written_ref[0, 0] = jnp.where(at == within, new_n1c, tile).astype(written_ref.dtype)
        out_ref[0] = (acc_ref[...] / sum_ref[:, :, :1]).astype(out_ref.dtype)
