"""TPU kernel for decode attention: one new token per slot, pages of a KV cache updated in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis.kernels import narrow

MASKED = -1e30
LANES = 128
BLOCK_BYTES = 2**20  # of the pages that are fetched together; two such blocks lie in VMEM
ROW_BYTES = 32  # positions written back together: sublanes of a tile times bytes of a number
VMEM_BYTES = 64 * 2**20  # for blocks of a single page that is larger than BLOCK_BYTES
CORES = 2  # of a chip, at most: each takes a half of the slots


def is_supported(page_size: int, *dtypes: jnp.dtype) -> bool:
    """Whether the kernel can run: pages are whole tiles, including scales and scores with positions
    along the lanes, and no array is float16, which a TPU kernel cannot store."""
    return page_size % LANES == 0 and jnp.float16 not in dtypes


def decode_attention(
    rows_bnjk: jax.Array, new_bn2k: jax.Array | None, new_scale_bn2: jax.Array | None,
    cache_lpnsc: jax.Array, scale_lpn2s: jax.Array | None, layer: jax.Array, index_b: jax.Array,
    is_written_b: jax.Array, table_bp: jax.Array, first_b: jax.Array | None = None,
    has_b: jax.Array | None = None, sinks_h: jax.Array | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Writes each slot's new key and value into one layer of the cache and returns its attention.

    Pages are fetched in blocks while the previous block is computed, from the block of `first_b` to
    that of the new token. The last block of a slot overlaps with the first block of the next slot. The cache is
    written in place: only the tile around the new position is copied back. A key and its value lie
    in one row and fill whole lanes, also at head width 64. Positions after the new token have no
    influence, NaN included.

    Args:
      rows_bnjk: [B,N,G,K] queries, G per key/value head. With `rotation` it is [B,N,G+2,K]: queries and
        the key of the new token before their rotation, and its value.
      new_bn2k: [B,N,2,K] key and value of the new token, in the cache's dtype; None with `rotation`.
      new_scale_bn2: [B,N,2] float32 scales of both, None unless the cache is int8 or float8.
      cache_lpnsc: [L,P,N,S,2K] pages of S positions, see is_supported; donate it.
      scale_lpn2s: [L,P,N,2,S] float32 scales of keys and of values, or None; donate it.
      layer: [] int32.
      index_b: [B] int32 position of the new token in its slot's pages.
      is_written_b: [B] int32, 0 where nothing is written; the slot still attends to the new token. Where it
        is 1, the page of this position is in no other slot's table.
      table_bp: [B,n] int32 pages of each slot in order.
      first_b: [B] int32 the first position that each slot attends to; None: all positions.
      has_b: [B] int32, 1 where the new token has the position index_b, 0 where another part of the
        sequence has it, and the slot attends to the pages alone; with `first_b`. None: 1, and no
        other parts.
      sinks_h: [N*G] one more logit in the softmax of each query, without a value; None: none.
      rotation: cos and sin [B,1,R/2] of the first R numbers of queries and keys; for a cache in their dtype.
      interpret: run as a program of any device instead of a TPU's kernel.

    Returns: ([B,N,G,K] in q's dtype, the cache, the scales, None). Softmax and sums are float32; the
    unnormalised probabilities take q's dtype for their product with the values. With `has_b` the
    first is float32, and the last is the log of the softmax's sum [B,N,G].
    """
    b, n, g, k = rows_bnjk.shape
    g -= 2 if rotation is not None else 0
    size, c = cache_lpnsc.shape[-2:]
    itemsize = cache_lpnsc.dtype.itemsize
    pages = min(max(BLOCK_BYTES // (n * size * c * itemsize), 1), table_bp.shape[1])
    cores = CORES if b % CORES == 0 else 1
    beside = [new_bn2k] if rotation is None else [x[:, None] for x in rotation]
    rows, pools = [rows_bnjk, *beside], [cache_lpnsc]
    blocks = [pltpu.VMEM((2, n, pages * size, c), cache_lpnsc.dtype)]
    if scale_lpn2s is not None and new_scale_bn2 is not None:
        rows, pools = rows + [new_scale_bn2[..., None]], pools + [scale_lpn2s]
        blocks += [pltpu.VMEM((2, n, 2, pages * size), jnp.float32)]
    of_slot = lambda x: pl.BlockSpec(
        (1, *x.shape[1:]), lambda core, i, *_: (core * (b // cores) + i, 0, 0, 0)
    )
    sinks = []
    if sinks_h is not None:
        by_head = sinks_h.astype(jnp.float32).reshape(n, g, 1)
        sinks = [jnp.broadcast_to(by_head, (n, g, LANES))]
    whole = lambda x: pl.BlockSpec(x.shape, lambda core, i, *_: (0, 0, 0))
    in_place = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Flat: the last axis of a table would be padded to whole lanes in scalar memory.
    scalars = [layer.reshape(1), index_b, is_written_b, table_bp.reshape(-1)]
    scalars += [x for x in (first_b, has_b) if x is not None]
    first = len(scalars) + len(rows) + len(sinks)
    outs = [jax.ShapeDtypeStruct((b, n, g, k), rows_bnjk.dtype)]
    if has_b is not None:
        float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        outs = [float32((b, n, g, k)), float32((b, n, g, LANES))]
    out_bngk, *rest = narrow.pallas_call(
        functools.partial(
            _kernel, softmax_scale=k**-0.5, parts=len(pools), columns=table_bp.shape[1],
            rotates=rotation is not None,
            has_first=first_b is not None, is_part=has_b is not None, has_sinks=sinks_h is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, b // cores),
            in_specs=[*map(of_slot, rows), *map(whole, sinks), *in_place],
            out_specs=[*map(of_slot, outs), *in_place],
            scratch_shapes=[
                *blocks,
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, LANES), jnp.float32),
                pltpu.VMEM((n, g, c), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        cost_estimate=_cost(b * n * table_bp.shape[1] * size, g, k, itemsize),
        out_shape=[*outs, *map(like, pools)],
        input_output_aliases={first + i: len(outs) + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="decode_attention",
    )(*scalars, *rows, *sinks, *pools)
    log_total_bng = None if has_b is None else rest.pop(0)[..., 0]
    return out_bngk, rest[0], rest[1] if len(rest) > 1 else None, log_total_bng


def _of_slot(rows_njk, *beside) -> tuple[jax.Array, jax.Array]:
    """Returns a slot's queries, and its new key and value in one row [N,1,2K]."""
    if len(beside) == 1:
        key, value = beside[0][:, :1], beside[0][:, 1:]
    else:
        turned = _rotate(rows_njk[:, :-1], *beside)
        rows_njk, key, value = turned[:, :-1], turned[:, -1:], rows_njk[:, -1:]
    return rows_njk, jnp.concatenate([key, value], axis=-1)


def _rotate(x_njk: jax.Array, cos_11r: jax.Array, sin_11r: jax.Array) -> jax.Array:
    """Returns rows with their first 2R numbers rotated, computed in float32, in x's dtype."""
    r, x = cos_11r.shape[-1], x_njk.astype(jnp.float32)
    a, b = x[..., :r], x[..., r : 2 * r]
    turned = [a * cos_11r - b * sin_11r, b * cos_11r + a * sin_11r]
    turned += [x[..., 2 * r :]] if 2 * r < x.shape[-1] else []
    return jnp.concatenate(turned, axis=-1).astype(x_njk.dtype)


def _cost(keys: int, g: int, k: int, itemsize: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=4 * keys * g * k, transcendentals=keys * g, bytes_accessed=keys * 2 * k * itemsize
    )


def _div(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.div(x, jnp.int32(n))  # of what is not negative


def _positions(ref, lead: tuple, axis: int, start: jax.Array, count: int):
    """Returns `count` positions of a page or block ref[lead] along `axis`."""
    index: list[Any] = [slice(None)] * 3
    index[axis] = pl.ds(pl.multiple_of(start, count), count)
    return ref.at[(*lead, *index)]


def _accumulate(q_ngk, blocks, axes, running, buffer, first, limit, softmax_scale):
    """Adds the positions of a block from `first` to `limit`, None for no bound, to the running
    softmax: references to its maximum, its sum and the sum of its values."""
    max_ref, sum_ref, acc_ref = running

    def until_limit(ref, axis, dtype):
        x = ref[buffer]
        if limit is not None:
            at = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
            x = jnp.where(at < limit, x.astype(jnp.float32), 0.0)
        return x.astype(dtype)

    # A query with zeros beside it meets the key alone, so no block has to be cut in two.
    q_ngc = jnp.concatenate([q_ngk, jnp.zeros_like(q_ngk)], axis=-1)
    dtypes = (q_ngc.dtype, jnp.float32)[: len(blocks)]
    kv_nsc, *scales = (until_limit(*part) for part in zip(blocks, axes, dtypes, strict=True))
    precision = jax.lax.Precision.HIGHEST if q_ngc.dtype == jnp.float32 else None
    dot = functools.partial(
        jax.lax.dot_general, preferred_element_type=jnp.float32, precision=precision
    )
    scores = dot(q_ngc, kv_nsc, (((2,), (2,)), ((0,), (0,)))) * softmax_scale
    for scale_n2s in scales:
        scores = scores * scale_n2s[:, :1]
    at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    if limit is not None:
        scores = jnp.where(at < limit, scores, MASKED)
    if first is not None:
        scores = jnp.where(at >= first, scores, MASKED)
    before = max_ref[...]
    top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    p = jnp.exp(scores - top[..., :1])
    shrink = jnp.exp(before - top)
    max_ref[...] = top
    sum_ref[...] = sum_ref[...] * shrink + jnp.sum(p, axis=-1, keepdims=True)
    for scale_n2s in scales:
        p = p * scale_n2s[:, 1:]
    values = dot(p.astype(q_ngc.dtype), kv_nsc, (((2,), (1,)), ((0,), (0,))))
    acc_ref[...] = acc_ref[...] * shrink[..., :1] + values


def _kernel(
    layer_ref, index_ref, is_written_ref, table_ref, *refs, softmax_scale, parts, columns, rotates,
    has_first, is_part, has_sinks,
):
    """Attends for one slot. Each of the `parts` of the cache (values; scales of eight-bit values)
    has its pages in HBM and two blocks in VMEM. The running softmax lives in scratch, as does
    `turn`: how many blocks this core took before, which says where the next one goes."""
    first_ref: Any = refs[0] if has_first else None
    has_ref: Any = refs[1] if is_part else None
    rest = list(refs[has_first + is_part :])
    q_ngk, new_n1c = _of_slot(*(rest.pop(0)[0] for _ in range(2 + rotates)))
    new_scales, rest = rest[: parts - 1], rest[parts - 1 :]
    sinks_ref: Any = rest[0] if has_sinks else None
    out_ref, *rest = rest[has_sinks + parts :]  # the cache is read where it is written
    log_total_ref: Any = rest.pop(0) if is_part else None
    pools, blocks, rest = rest[:parts], rest[parts:][:parts], rest[2 * parts:]
    max_ref, sum_ref, acc_ref, turn_ref, fetched, written = rest
    axes = (1, 2)[:parts]  # of the positions: a page is [N,S,2K] values, [N,2,S] scales
    core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    slot, end, layer = core * steps + step, (core + 1) * steps, layer_ref[0]
    size, length = pools[0].shape[3], blocks[0].shape[2]  # positions of a page and of a block
    pages = length // size
    begin_of = lambda slot: _div(first_ref[slot], length) if has_first else 0
    begin, last = begin_of(slot), _div(index_ref[slot], length)
    within = jax.lax.rem(index_ref[slot], jnp.int32(length))

    def each_copy(slot, block, buffer, act):
        """Applies `act` to the copies that fetch the pages of a slot's block, up to its last
        page."""
        first = block * pages

        def page(m, _):
            for pool, ref, axis in zip(pools, blocks, axes, strict=True):
                target = _positions(ref, (buffer,), axis, m * size, size)
                source = pool.at[layer, table_ref[slot * columns + first + m]]
                act(pltpu.make_async_copy(source, target, fetched.at[buffer]))

        count = jnp.minimum(_div(index_ref[slot], size) + 1 - first, pages)
        jax.lax.fori_loop(0, count, page, None)

    def take(block):
        """Starts the next block's copies, waits for a block and returns its buffer."""
        buffer = jax.lax.rem(turn_ref[0] + block - begin, jnp.int32(2))
        is_last = block == last
        next_slot = slot + is_last
        next_begin = begin_of(jnp.minimum(next_slot, end - 1))
        next_block = jnp.where(is_last, next_begin, block + 1)

        @pl.when(next_slot < end)
        def _():
            each_copy(next_slot, next_block, 1 - buffer, lambda copy: copy.start())

        each_copy(slot, block, buffer, lambda copy: copy.wait())
        return buffer

    def accumulate(block, buffer, limit):
        """Adds the first `limit` positions of a block to the running softmax; None adds all. Those
        before the slot's first position do not count."""
        first = first_ref[slot] - block * length if has_first else None
        _accumulate(
            q_ngk, blocks, axes, (max_ref, sum_ref, acc_ref), buffer, first, limit, softmax_scale
        )

    def write_back(buffer):
        """Writes the new position into the slot's last block; returns copies of its tiles to the
        page."""
        copies, page = [], table_ref[slot * columns + _div(index_ref[slot], size)]
        new_rows = [new_n1c, *(ref[0] for ref in new_scales)]
        for pool, ref, axis, new in zip(pools, blocks, axes, new_rows, strict=True):
            tile = LANES if axis == 2 else ROW_BYTES // ref.dtype.itemsize
            start = _div(within, tile) * tile
            old = _positions(ref, (buffer,), axis, start, tile)
            at = start + jax.lax.broadcasted_iota(jnp.int32, old.shape, axis)
            new, before = new.astype(jnp.float32), old[...].astype(jnp.float32)
            place = jnp.where(has_ref[slot] != 0, within, -1) if is_part else within
            old[...] = jnp.where(at == place, new, before).astype(ref.dtype)
            in_page = jax.lax.rem(start, jnp.int32(size))
            target = _positions(pool, (layer, page), axis, in_page, tile)
            copies.append(pltpu.make_async_copy(old, target, written))
        return copies

    @pl.when(step == 0)
    def _():
        turn_ref[0] = 0
        each_copy(slot, begin, 0, lambda copy: copy.start())

    max_ref[...] = sinks_ref[...] if has_sinks else jnp.full_like(max_ref, MASKED)
    sum_ref[...] = jnp.ones_like(sum_ref) if has_sinks else jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    jax.lax.fori_loop(begin, last, lambda block, _: accumulate(block, take(block), None), None)
    buffer = take(last)
    copies = write_back(buffer)

    @pl.when(is_written_ref[slot] != 0)
    def _():
        for copy in copies:
            copy.start()

    accumulate(last, buffer, within + 1)
    out_ngc = acc_ref[...] / sum_ref[:, :, :1]
    out_ref[0] = out_ngc[..., out_ref.shape[-1] :].astype(out_ref.dtype)
    if is_part:
        log_total_ref[0] = max_ref[...] + jnp.log(sum_ref[...])
    turn_ref[0] += last - begin + 1

    @pl.when(is_written_ref[slot] != 0)
    def _():
        for copy in copies:
            copy.wait()
