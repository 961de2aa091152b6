"""Grouped-query attention: within rows (training, scoring) and against pages (prefill, decode).

A row of T tokens packs several sequences with segment ids. `row_attention` has three ways:

* On TPU, if T is a multiple of whole tiles, it uses JAX's splash attention kernel.
* Otherwise rows of up to LONG_ROW tokens compute all T x T scores.
* Longer rows are computed in chunks of QUERY_CHUNK queries. The backward pass recomputes the
  scores,
  and memory grows with T x QUERY_CHUNK.

On a mesh each device attends for its own rows and heads. If a mesh axis shards T, a device keeps
its own queries and gathers the keys and values of its rows, which are small with grouped queries.
With many shards they exceed the device's queries. Then they are gathered for one head at a time,
and again in the backward pass. With several key/value heads on a device both ways need less memory
than a ring (benchmarks/context.py). Rows are in `sharding.balanced_order`: the kernel computes as
many blocks of scores on each shard.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from jaxrl_tis.sharding import Layout, balanced_order, row_unit

MASKED = -1e30
LONG_ROW = 1024
QUERY_CHUNK = 512
# Positions of pages that are attended to together. A GPU waits for the host at every turn of a loop.
PAGED_BLOCK, GPU_PAGED_BLOCK = 64, 4096
# Rows are attended to in groups of so many, where they have room for more than two blocks: a group
# then does not wait for longer rows.
GROUPED_FROM, GROUP = 32, 8
# Splash attention takes whole tiles of 128 tokens; its default block of one tile is small.
SPLASH_TILE, SPLASH_BLOCK, FUSED_BLOCKS = 128, 512, 4
SPLASH_RESIDUALS = "splash_residuals"


class Window(NamedTuple):
    """The window of a layer.

    Attributes:
      size: a token attends to itself and the size - 1 tokens before it.
      is_used: bool, whether the layer has the window. An array where layers are scanned.

    As an argument of a traced function both are arrays.
    """

    size: int | jax.Array
    is_used: bool | jax.Array

    def first(self, position: jax.Array) -> jax.Array:
        """Returns the first position that a query at this position attends to."""
        return jnp.where(self.is_used, jnp.maximum(position - self.size + 1, 0), 0)


def _causal_mask(
    segments_bt: jax.Array, segments_bs: jax.Array, unseen_bs: jax.Array | None,
    position_t: jax.Array, window: Window | None = None,
) -> jax.Array:
    """Returns [B,T,S] bool for queries at positions [T] of rows of S tokens: a query may look at
    s <= its position of its own segment and window; segment 0 is padding."""
    same = segments_bt[:, :, None] == segments_bs[:, None, :]
    s = jnp.arange(segments_bs.shape[1])
    mask_ts = position_t[:, None] >= s[None]
    if window is not None:
        mask_ts &= s[None] >= window.first(position_t)[:, None]
    mask_bts = same & mask_ts[None]
    if unseen_bs is not None:
        mask_bts &= position_t[None, :, None] < unseen_bs[:, None, :]
    return mask_bts


class Unrotated(NamedTuple):
    """The queries, the key and the value of each key/value head, side by side and before the rotation.

    Attributes:
      rows_btnjk: [B,T,N,G+2,K] G queries, a key and a value.
      cos, sin: [B,T,1,R/2] of the first R numbers of queries and keys, as of `Program.rotation`.
    """

    rows_btnjk: Any
    cos: Any
    sin: Any


def row_attention(
    q_bthk: jax.Array, k_btnk: jax.Array, v_btnk: jax.Array, segment_ids_bt: jax.Array,
    layout: Layout | None = None, unseen_bt: jax.Array | None = None,
    window: Window | None = None, sinks_h: jax.Array | None = None,
) -> jax.Array:
    """Returns causal attention within the segments of packed rows, [B,T,H,K].

    Args:
      q_bthk: [B,T,H,K] queries; k_btnk, v_btnk: [B,T,N,K] keys and values, H a multiple of N.
      segment_ids_bt: [B,T] int32. Padding may be a segment of its own, such as 0.
      layout: `sharding.Layout` of the arrays; None on one device. The mesh must divide the logical
        axes "batch", "heads", "kv_heads" and "length" of the arrays, the latter into twice its
        shards. The tokens of rows that it cuts are in `sharding.balanced_order`.
      unseen_bt: [B,T] int32, the first position that no longer attends to the token; None without
        such limits. TPU's kernel does not support limits: rows then use the path of other
        platforms.
      window: of the layer; None: a token attends to all before it.
      sinks_h: [H] a logit of each head that takes part in its softmax and has no value, the
        attention sinks of GPT-OSS (arXiv:2508.10925); None: no head has one.

    Returns: [B,T,H,K] in q's dtype.
    """
    length = q_bthk.shape[1]
    if layout is None or layout.mesh.size == 1:
        segments = segment_ids_bt, segment_ids_bt
        kernels = _splash_kernels(length, 1, unseen_bt, window)
        place_t = jnp.arange(length)
        return _attend(
            q_bthk, k_btnk, v_btnk, sinks_h, *segments, unseen_bt, place_t, kernels, window
        )
    axis, shards = layout.rules["length"], layout.row_shards
    kernels = _splash_kernels(length, shards, unseen_bt, window)

    def attend_locally(q_bthk, k_btnk, v_btnk, sinks_h, segments_bt, unseen_bt, kernels, window):
        if shards == 1:
            segments = segments_bt, segments_bt
            place_t = jnp.arange(length)
            return _attend(
                q_bthk, k_btnk, v_btnk, sinks_h, *segments, unseen_bt, place_t, kernels, window
            )

        def gather(x):
            chunks = jax.lax.all_gather(x.reshape(len(x), 2, -1, *x.shape[2:]), axis)
            in_order = jnp.concatenate([chunks[:, :, 0], chunks[::-1, :, 1]])
            return jnp.moveaxis(in_order, 0, 1).reshape(len(x), -1, *x.shape[2:])

        own_nt = jnp.asarray(balanced_order(length, shards).reshape(shards, -1))
        position_t = own_nt[jax.lax.axis_index(axis)]
        segments_bs, unseen_bs = jax.tree.map(gather, (segments_bt, unseen_bt))

        def attend(heads):
            q_bthk, k_btnk, v_btnk, sinks_h = heads
            return _attend(
                q_bthk, gather(k_btnk), gather(v_btnk), sinks_h, segments_bt, segments_bs,
                unseen_bs, position_t, kernels, window,
            )

        is_small = k_btnk.size * shards <= q_bthk.size
        if is_small or k_btnk.shape[2] == 1:
            return attend((q_bthk, k_btnk, v_btnk, sinks_h))
        return _by_kv_head(attend, q_bthk, k_btnk, v_btnk, sinks_h)

    queries = layout.sharding(("batch", "length", "heads", None)).spec
    keys = layout.sharding(("batch", "length", "kv_heads", None)).spec
    tokens = layout.sharding(("batch", "length")).spec
    on_mesh = layout.sharding((None, "length"))
    blocks = tuple(kernel.manual_sharding_spec(on_mesh) for kernel in kernels)
    return jax.shard_map(
        attend_locally, mesh=layout.mesh,
        in_specs=(
            queries, keys, keys, layout.sharding(("heads",)).spec, tokens, tokens, blocks,
            PartitionSpec(),
        ),
        out_specs=queries, check_vma=False,
    )(q_bthk, k_btnk, v_btnk, sinks_h, segment_ids_bt, unseen_bt, kernels, window)


def _by_kv_head(attend: Callable, q_bthk, k_btnk, v_btnk, sinks_h) -> jax.Array:
    """Returns attention computed for one key/value head and its queries at a time. The backward
    pass recomputes values that splash attention does not keep."""
    n = k_btnk.shape[2]
    one = jax.checkpoint(
        attend, policy=jax.checkpoint_policies.save_only_these_names(SPLASH_RESIDUALS)
    )
    split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], n, -1, x.shape[3]), 2, 0)
    sinks_ng = None if sinks_h is None else sinks_h.reshape(n, -1)
    out_nbtgk = jax.lax.map(one, (split(q_bthk), split(k_btnk), split(v_btnk), sinks_ng))
    return jnp.moveaxis(out_nbtgk, 0, 2).reshape(q_bthk.shape)


def _attend(
    q_bthk, k_bsnk, v_bsnk, sinks_h, segments_bt, segments_bs, unseen_bs, position_t, kernels, window
):
    """Returns the attention of T queries at these positions of rows of S tokens, on one device."""
    arrays = (
        q_bthk, k_bsnk, v_bsnk, sinks_h, segments_bt, segments_bs, unseen_bs, position_t, kernels, window
    )
    if not kernels:
        return _scores_attention(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=_splash, default=_scores_attention)


def splash_blocks(length: int, keys: int) -> splash_attention.BlockSizes:
    """Returns the block sizes for queries of `length` tokens in whole tiles, of which a device has
    one such chunk or two, that attend to `keys` tokens.

    The fused backward kernel does five products instead of seven and stores a dq per block of keys,
    length * keys numbers: it is for few blocks.
    """
    block = math.gcd(length, SPLASH_BLOCK)
    is_fused = keys <= FUSED_BLOCKS * block
    names = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute"]
    names += [] if is_fused else ["q_dq", "kv_dq"]
    blocks: dict[str, Any] = {f"block_{name}": block for name in names}
    return splash_attention.BlockSizes(**blocks, use_fused_bwd_kernel=is_fused)


def _splash_kernels(length: int, shards: int, unseen_bt, window: Window | None) -> tuple:
    """Returns the kernels for rows with sharded queries: that of all tokens and, for models with a
    window, that of the window. Empty for unsupported rows."""
    if unseen_bt is not None or length % (row_unit(shards) * SPLASH_TILE):
        return ()
    sizes = (None,) if window is None else (None, window.size)
    return tuple(_splash_kernel(length, shards, size) for size in sizes)


@functools.cache  # it looks at each of the T x T entries of its mask: seconds for a long row
def _splash_kernel(length: int, shards: int, window: int | None = None, interpret: bool = False):
    """Returns causal splash attention for rows with sharded queries, within a window unless it is
    None."""
    # One mask serves all heads.
    mask: Any = splash_attention.CausalMask((length, length))
    if window is not None:
        mask = splash_attention.LocalMask((length, length), (window - 1, 0), offset=0)
    chunk = length
    if shards > 1:  # blocks lie in one chunk
        mask.q_sequence, chunk = balanced_order(length, shards), length // (2 * shards)
    with jax.ensure_compile_time_eval():
        return splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([mask]), block_sizes=splash_blocks(chunk, length),
            head_shards=1, q_seq_shards=shards, residual_checkpoint_name=SPLASH_RESIDUALS,
            interpret=interpret,
        )


def _splash(
    q_bthk, k_bsnk, v_bsnk, sinks_h, segments_bt, segments_bs, unseen_bs, position_t, kernels, window
):
    """Returns attention by a splash kernel; its mask has the positions, and `unseen_bs` is None.
    float16 inputs are computed in float32, because TPU kernels cannot store float16."""
    dtype = jnp.float32 if q_bthk.dtype == jnp.float16 else q_bthk.dtype
    heads_first = lambda x: jnp.swapaxes(x, 1, 2).astype(dtype)
    scaled = q_bthk.astype(jnp.float32) * q_bthk.shape[-1] ** -0.5
    segments = splash_attention.SegmentIds(segments_bt, segments_bs)
    inputs = heads_first(scaled), heads_first(k_bsnk), heads_first(v_bsnk), segments
    run = lambda kernel: jax.vmap(functools.partial(kernel, sinks=sinks_h))(*inputs)
    if window is None:
        out = run(kernels[0])
    else:
        out = jax.lax.cond(window.is_used, lambda: run(kernels[1]), lambda: run(kernels[0]))
    return jnp.swapaxes(out, 1, 2).astype(q_bthk.dtype)


def _scores_attention(
    q_bthk, k_bsnk, v_bsnk, sinks_h, segments_bt, segments_bs, unseen_bs, position_t, kernels, window
):
    """Returns attention from its scores: all scores of a short row, one chunk at a time of a long
    row."""

    def attend(q_bthk, k_bsnk, v_bsnk, segments_bt, position_t):
        mask_bts = _causal_mask(segments_bt, segments_bs, unseen_bs, position_t, window)
        return attention(q_bthk, k_bsnk, v_bsnk, mask_bts, sinks_h)

    length = q_bthk.shape[1]
    if k_bsnk.shape[1] <= LONG_ROW:
        return attend(q_bthk, k_bsnk, v_bsnk, segments_bt, position_t)
    # In float32, so that the chunks' gradients add up in float32.
    k_bsnk, v_bsnk = k_bsnk.astype(jnp.float32), v_bsnk.astype(jnp.float32)

    def chunks(x_bt):
        pad = [(0, 0)] * x_bt.ndim
        pad[1] = (0, -length % QUERY_CHUNK)
        padded = jnp.pad(x_bt, pad)
        return jnp.moveaxis(padded.reshape(len(padded), -1, QUERY_CHUNK, *x_bt.shape[2:]), 1, 0)

    chunk = jax.checkpoint(lambda inputs: attend(inputs[0], k_bsnk, v_bsnk, *inputs[1:]))
    positions = chunks(position_t[None])[:, 0]
    out = jax.lax.map(chunk, (chunks(q_bthk), chunks(segments_bt), positions))
    out = jnp.moveaxis(out, 0, 1).reshape(len(q_bthk), -1, *q_bthk.shape[2:])
    return out[:, :length]


def attention(
    q_bthk: jax.Array, k_bsnk: jax.Array, v_bsnk: jax.Array, mask_bts: jax.Array,
    sinks_h: jax.Array | None = None,
):
    """Returns softmax attention, computed in float32, of H query heads that share N key/value
    heads.

    Args:
      q_bthk: [B,T,H,K] queries; k_bsnk, v_bsnk: [B,S,N,K] keys and values, H a multiple of N.
      mask_bts: [B,T,S] bool, True if t may attend to s. A query without keys gets a finite,
        meaningless row.
      sinks_h: as of `row_attention`.

    Returns: [B,T,H,K] in q's dtype.
    """
    b, t, h, k = q_bthk.shape
    n = k_bsnk.shape[2]
    q_btngk = q_bthk.reshape(b, t, n, h // n, k)
    scores = jnp.einsum(
        "btngk,bsnk->bntgs", q_btngk, k_bsnk.astype(q_bthk.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask_bts[:, None, :, None], scores * k**-0.5, MASKED)
    if sinks_h is None:
        probs = jax.nn.softmax(scores, axis=-1).astype(q_bthk.dtype)
    else:
        sinks = jnp.broadcast_to(_by_head(sinks_h, n)[..., None], (*scores.shape[:-1], 1))
        logits = jnp.concatenate([scores, sinks], axis=-1)
        probs = jax.nn.softmax(logits, axis=-1)[..., :-1].astype(q_bthk.dtype)
    out = jnp.einsum(
        "bntgs,bsnk->btngk", probs, v_bsnk.astype(q_bthk.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, h, k).astype(q_bthk.dtype)


def _by_head(sinks_h: jax.Array, n: int) -> jax.Array:
    """Returns sinks as [1,N,1,G] float32."""
    return sinks_h.astype(jnp.float32).reshape(1, n, 1, -1)


def paged_attention(
    q_bthk: jax.Array, read: Callable, table_bp: jax.Array, index_bt: jax.Array,
    first_bt: jax.Array | None = None, sinks_h: jax.Array | None = None, block_size: int = PAGED_BLOCK,
    weighs: bool = False, is_part: bool = False,
) -> Any:
    """Returns attention to keys and values in pages, [B,T,H,K].

    Blocks are processed in the order of the table, from the first to the last block that a query
    needs. A block is one page or several pages.

    Args:
      q_bthk: [B,T,H,K] queries, at any places of the same sequence in a row.
      read: numbers [B,M] -> pages with k, v [B,M,N,S,K] and k_scale, v_scale [B,M,N,S] or None.
      table_bp: [B,P] int32 pages of each row in order.
      index_bt: [B,T] int32 position of each query in its pages; it attends to positions up to its
        own. Positions after a row's last query have no influence, NaN included.
      first_bt: [B,T] int32 the first position that each query attends to; None: 0.
      sinks_h: as of `row_attention`.
      block_size: positions of a block, if pages are not larger.
      weighs: also return the attention [B,T,P] float32 of each query to each page, summed over heads.
      is_part: the pages are a part of the positions, for `merged`, and a query may have none there.
        Then return float32 and the log of the softmax's sum [B,T,H], at most MASKED without any.

    Returns: [B,T,H,K] in q's dtype; softmax and sums are float32.
    """
    b, t, h, k = q_bthk.shape
    n, size = jax.eval_shape(read, table_bp).k.shape[2:4]
    num_pages = table_bp.shape[1]
    count = min(max(block_size // size, 1), table_bp.shape[1])
    table_bp = jnp.pad(table_bp, ((0, 0), (0, -table_bp.shape[1] % count)))
    q_btngk = q_bthk.reshape(b, t, n, h // n, k)
    last_b = jnp.max(index_bt, axis=1)
    cast = lambda x: x.astype(q_bthk.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def block(i, carry):
        top_bntg, total_bntg, out_bntgk, mass_bntgp = carry
        pages = read(jax.lax.dynamic_slice_in_dim(table_bp, i * count, count, axis=1))
        side_by_side = lambda x: jnp.moveaxis(x, 1, 2).reshape(b, n, -1, *x.shape[4:])
        kv = jax.tree.map(side_by_side, pages)
        place_s = i * count * size + jnp.arange(count * size)
        scores = product("btngk,bnsk->bntgs", q_btngk, cast(kv.k)) * k**-0.5
        if kv.k_scale is not None:
            scores = scores * kv.k_scale[:, :, None, None]
        is_seen_bts = place_s[None, None] <= index_bt[..., None]
        if first_bt is not None:
            is_seen_bts &= place_s[None, None] >= first_bt[..., None]
        scores = jnp.where(is_seen_bts[:, None, :, None], scores, MASKED)
        new_top = jnp.maximum(top_bntg, jnp.max(scores, axis=-1))
        probs = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top_bntg - new_top)
        total_bntg = total_bntg * shrink + jnp.sum(probs, axis=-1)
        if weighs:
            mass_bntgp = jax.lax.dynamic_update_slice_in_dim(
                mass_bntgp * shrink[..., None],
                jnp.sum(probs.reshape(*probs.shape[:-1], count, size), axis=-1), i * count, axis=-1,
            )
        is_live = (place_s[None] <= last_b[:, None])[:, None, :, None]
        v_bnsk = jnp.where(is_live, cast(kv.v), 0)
        if kv.v_scale is not None:
            scale = jnp.where(is_live[..., 0], kv.v_scale, 0)
            probs = probs * scale[:, :, None, None]
        new = product("bntgs,bnsk->bntgk", cast(probs), v_bnsk)
        return new_top, total_bntg, out_bntgk * shrink[..., None] + new, mass_bntgp

    shape = b, n, t, h // n
    mass_bntgp = jnp.zeros((*shape, table_bp.shape[1])) if weighs else None
    top_bntg, total_bntg = jnp.full(shape, MASKED), jnp.zeros(shape)
    if sinks_h is not None:
        top_bntg = jnp.broadcast_to(_by_head(sinks_h, n), shape)
        total_bntg = jnp.ones(shape)
    carry = top_bntg, total_bntg, jnp.zeros((*shape, k)), mass_bntgp
    if table_bp.shape[1] == count:
        top_bntg, total_bntg, out_bntgk, mass_bntgp = block(0, carry)
    else:
        blocks = jnp.max(last_b) // (count * size) + 1
        start = 0 if first_bt is None else jnp.min(first_bt) // (count * size)
        carry = jax.lax.fori_loop(start, blocks, block, carry)
        top_bntg, total_bntg, out_bntgk, mass_bntgp = carry
    by_head = lambda x: jnp.moveaxis(x, 1, 2).reshape(b, t, h, *x.shape[4:])
    if is_part:
        total_bntg = jnp.maximum(total_bntg, jnp.finfo(jnp.float32).tiny)
        out_bntgk = out_bntgk / total_bntg[..., None]
        return by_head(out_bntgk), by_head(top_bntg + jnp.log(total_bntg))
    out = cast(by_head(out_bntgk / total_bntg[..., None]))
    if mass_bntgp is None:
        return out
    return out, jnp.sum(mass_bntgp / total_bntg[..., None], axis=(1, 3))[..., :num_pages]


def merged(
    out_bthk: jax.Array, log_total_bth: jax.Array, axes: tuple[str, ...], sinks_h: jax.Array | None = None
) -> jax.Array:
    """Returns attention [B,T,H,K] in float32 from its parts on the devices of mesh axes: each device
    has the attention to its own positions, without sinks, and the log of the softmax's sum. Inside a
    shard_map."""
    top_bth = jax.lax.pmax(log_total_bth, axes)
    if sinks_h is not None:
        sinks_bth = sinks_h.astype(jnp.float32)[None, None]
        top_bth = jnp.maximum(top_bth, sinks_bth)
    weight_bth1 = jnp.exp(log_total_bth - top_bth)[..., None]
    sums = jnp.concatenate([out_bthk * weight_bth1, weight_bth1], axis=-1)
    out_bthk, total_bth1 = jnp.split(jax.lax.psum(sums, axes), [out_bthk.shape[-1]], axis=-1)
    if sinks_h is not None:
        total_bth1 += jnp.exp(sinks_bth - top_bth)[..., None]
    return out_bthk / total_bth1


def paged_attention_by_length(
    q_bthk: jax.Array, read: Callable, table_bp: jax.Array, index_bt: jax.Array,
    first_bt: jax.Array | None = None, sinks_h: jax.Array | None = None, weighs: bool = False,
    is_part: bool = False,
) -> Any:
    """Returns `paged_attention` of rows of any lengths, computed for a few similar rows at a time.

    It is for CPU, where small operations have little overhead. The computation depends only on
    shapes: no row's result depends on the batch composition."""
    b, room = len(q_bthk), table_bp.shape[1] * jax.eval_shape(read, table_bp).k.shape[3]
    if b < GROUPED_FROM or room <= 2 * PAGED_BLOCK:
        return paged_attention(
            q_bthk, read, table_bp, index_bt, first_bt, sinks_h, weighs=weighs, is_part=is_part
        )
    order_b = jnp.argsort(jnp.max(index_bt, axis=1))
    # The longest row fills up the last group.
    groups = order_b[jnp.minimum(jnp.arange(b + -b % GROUP), b - 1)].reshape(-1, GROUP)
    attend = lambda rows: paged_attention(
        q_bthk[rows], read, table_bp[rows], index_bt[rows],
        None if first_bt is None else first_bt[rows], sinks_h, weighs=weighs, is_part=is_part,
    )
    in_order = lambda x: x.reshape(-1, *x.shape[2:])[jnp.argsort(order_b)]
    return jax.tree.map(in_order, jax.lax.map(attend, groups))
