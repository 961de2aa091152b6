"""Batch-invariant layers of a decoder, for `numerics="invariant"`.

Results depend only on a token's own sequence, bit by bit. They do not depend on the batch, the
slot, the chunks of a prompt or the number of devices of a layer. All sums come from
kernels/tiles.py, which states the contract. A token attends to pages of PAGE keys in order, in a
cache and in a row. Gradients are those of the plain operations, at the values of the invariant
operations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.head import Head, tiled_logits
from jaxrl_tis.models import attention, quant
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout

SCHEMES = ("none", "w8a16", "w8a8")
HIGHEST = jax.lax.Precision.HIGHEST


# Products


def _tensor(layout: Layout | None) -> tuple[str | None, int]:
    """Returns the mesh axis that shards heads, MLP and vocabulary, and its size."""
    if layout is None or layout.mesh.size == 1:
        return None, 1
    return layout.rules["mlp"], layout.mesh.shape[layout.rules["mlp"]]


def _on(layout: Layout | None, f: Callable, in_axes: tuple, out_axes: tuple) -> Callable:
    """Returns f run on every device's part of arrays with these logical axes."""
    if layout is None:
        return f
    spec = lambda axes: layout.sharding(axes).spec
    return layout.shard(f, tuple(map(spec, in_axes)), spec(out_axes))


def dot(x: jax.Array, w: Any, layout: Layout | None, is_split_in: bool) -> jax.Array:
    """Returns `quant.dot` of any kind of weight: x [B,T,i] @ w [i,o] -> [B,T,o] in x's dtype.

    Args:
      layout: shards w over devices along i (summed by a butterfly) or o; None is one device.
    """
    if isinstance(w, quant.QuantArray):
        return _multiply(x, w, layout, is_split_in)
    if isinstance(w, quant.Master):
        return _trained(x, w.w, w.scheme, layout, is_split_in)
    return _trained(x, w, "none", layout, is_split_in)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _trained(x, w, scheme: str, layout, is_split_in: bool) -> jax.Array:
    return _multiply(
        x, w if scheme == "none" else quant.quantize_weight(w, scheme), layout, is_split_in
    )


def _trained_fwd(x, w, *plan):
    return _trained(x, w, *plan), (x, w)


def _trained_bwd(scheme, layout, is_split_in, operands, gradient):
    return jax.vjp(quant.dot, *operands)[1](gradient)


_trained.defvjp(_trained_fwd, _trained_bwd)


def _multiply(x: jax.Array, w: jax.Array | quant.QuantArray, layout, is_split_in: bool):
    """Returns `dot` without a gradient. Sums of s8 x s8 and a row's largest number do not depend on
    the order."""
    lead, axes = ("batch", "length"), ("mlp", None) if is_split_in else (None, "mlp")
    axis, count = _tensor(layout) if is_split_in else (None, 1)
    is_quant = isinstance(w, quant.QuantArray)
    is_integer = isinstance(w, quant.QuantArray) and w.scheme == "w8a8"
    arrays: tuple = x, w
    scales: tuple = ()
    if isinstance(w, quant.QuantArray):
        x_q, x_scale = quant.quantize(x, -1) if is_integer else (x, jnp.ones((*x.shape[:2], 1)))
        arrays, scales = (x_q, w.q), (x_scale, w.scale)

    def local(x_bti, w_io, *scales):
        x_ri = x_bti.reshape(-1, x_bti.shape[-1])
        if is_integer:
            y_ro = jax.lax.dot(x_ri, w_io, preferred_element_type=jnp.int32)
            y_ro = jax.lax.psum(y_ro, axis) if count > 1 else y_ro
        else:
            y_ro = tiles.butterfly(tiles.product(x_ri, w_io.astype(x.dtype)), axis, count)
        if is_quant:
            row_scale, column_scale = scales
            rescale = lambda y, scale: y.astype(jnp.float32) * scale * column_scale
            y_ro = tiles.by_rows(rescale, y_ro, row_scale.reshape(-1, 1))
        return y_ro.reshape(*x_bti.shape[:2], -1).astype(x.dtype)

    in_axes = ((*lead, axes[0]), axes, (*lead, None), (None, axes[1]))
    return _on(layout, local, in_axes[: 2 + len(scales)], (*lead, axes[1]))(*arrays, *scales)


# Rows


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, layout: Layout | None, plain: Callable
) -> jax.Array:
    """Returns `plain(x, scale, eps)` for rows [B,T,D], or [B,T,H,K] with sharded heads. The scale
    is rounded to x's dtype, as in a sampler."""
    return _normed(x, scale.astype(x.dtype), eps, layout, plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _normed(x, scale, eps, layout, plain):
    def tile(x_rd):
        x32 = x_rd.astype(jnp.float32)
        mean_r = tiles.tree_sum(x32 * x32) / x32.shape[-1]
        x32 = x32 * jax.lax.rsqrt(mean_r + eps)[:, None]
        return (x32 * scale.astype(jnp.float32).reshape(1, -1)).astype(x.dtype)

    axes = ("batch", "length", "heads", None) if x.ndim == 4 else ("batch", "length", None)
    local = lambda x: tiles.by_rows(tile, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return _on(layout, local, (axes,), axes)(x)


def _normed_fwd(x, scale, *plan):
    return _normed(x, scale, *plan), (x, scale)


def _normed_bwd(eps, layout, plain, operands, gradient):
    return jax.vjp(lambda x, scale: plain(x, scale, eps), *operands)[1](gradient)


_normed.defvjp(_normed_fwd, _normed_bwd)


def rotation(angles: Callable, positions_bt: jax.Array, layout: Layout | None) -> tuple:
    """Returns `angles(positions [B,T])` by tiles of rows: cos and sin, [B,T,1,K/2] each."""

    def local(positions_bt):
        tile = lambda positions_r: jax.tree.map(lambda x: x[0], angles(positions_r[None]))
        rotations = tiles.by_rows(tile, positions_bt.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*positions_bt.shape, 1, -1), rotations)

    return jax.lax.stop_gradient(
        _on(layout, local, (("batch", "length"),), ("batch", "length", None, None))(positions_bt)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rotate(x_bthk, cos, sin, layout, plain: Callable) -> jax.Array:
    """Returns `plain(x, cos, sin)`, applied to tiles of (token, head) rows."""

    def local(x_bthk, cos, sin):
        rows = lambda x: jnp.broadcast_to(x, (*x_bthk.shape[:3], x.shape[-1])).reshape(
            -1, x.shape[-1]
        )
        return tiles.by_rows(plain, rows(x_bthk), rows(cos), rows(sin)).reshape(x_bthk.shape)

    token, heads = ("batch", "length", None, None), ("batch", "length", "heads", None)
    return _on(layout, local, (heads, token, token), heads)(x_bthk, cos, sin)


def _rotate_fwd(x_bthk, cos, sin, layout, plain):
    return rotate(x_bthk, cos, sin, layout, plain), (x_bthk, cos, sin)


def _rotate_bwd(layout, plain, operands, gradient):
    return jax.vjp(plain, *operands)[1](gradient)


rotate.defvjp(_rotate_fwd, _rotate_bwd)


def by_row(
    plain: Callable, layout: Layout | None, *arrays: jax.Array, lead: int = 2,
    tile: Callable | None = None,
) -> jax.Array:
    """Returns plain(*arrays), a function of each row of arrays [B,T,...], or [M,...] with lead 1,
    applied to tiles of rows.

    Args:
      tile: computes the values of a tile in place of `plain`, which then gives the gradient alone.
    """
    axes = lambda x: (*("batch", "length")[:lead], *(None,) * (x.ndim - lead))

    def local(*arrays):
        rows = [x.reshape(-1, *x.shape[lead:]) for x in arrays]
        y = tiles.by_rows(tile or plain, *rows)
        return y.reshape(*arrays[0].shape[:lead], *y.shape[1:])

    @jax.custom_vjp
    def run(*arrays):
        return _on(layout, local, tuple(map(axes, arrays)), axes(arrays[-1]))(*arrays)

    def pull(arrays, bar):
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]
        floats = [x for x, is_so in zip(arrays, is_float, strict=True) if is_so]

        def of_floats(*floats):
            left = iter(floats)
            pairs = zip(arrays, is_float, strict=True)
            return plain(*(next(left) if is_so else x for x, is_so in pairs))

        bars = iter(jax.vjp(of_floats, *floats)[1](bar))
        return tuple(next(bars) if is_so else None for is_so in is_float)

    run.defvjp(lambda *arrays: (run(*arrays), arrays), pull)
    return run(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def router_logits(x_btd, router_de, layout: Layout | None, plain: Callable) -> jax.Array:
    """Returns `plain(x, router)`, the logits [B,T,E] of a router, in float32."""

    def local(x_btd, router_de):
        x_rd = x_btd.reshape(-1, x_btd.shape[-1]).astype(jnp.float32)
        y_re = tiles.product(x_rd, router_de.astype(jnp.float32), precision=HIGHEST)
        return y_re.reshape(*x_btd.shape[:2], -1)

    token = ("batch", "length", None)
    return _on(layout, local, (token, (None, None)), token)(x_btd, router_de)


def _router_logits_fwd(x_btd, router_de, layout, plain):
    return router_logits(x_btd, router_de, layout, plain), (x_btd, router_de)


def _router_logits_bwd(layout, plain, operands, gradient):
    return jax.vjp(plain, *operands)[1](gradient)


router_logits.defvjp(_router_logits_fwd, _router_logits_bwd)


# Attention


def paged_attention(q_bthk: jax.Array, read: Callable, table_bp: jax.Array, index_bt: jax.Array):
    """Returns `attention.paged_attention`, computed for each query separately."""
    b, t = index_bt.shape
    row_m = jnp.repeat(jnp.arange(b), t)
    return _attend(q_bthk, index_bt, row_m, lambda i, row_r: read(table_bp[row_r, i]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def row_attention(
    q_bthk, k_btnk, v_btnk, segment_ids_bt, layout: Layout | None = None
) -> jax.Array:
    """Returns `attention.row_attention`, with a segment's keys in pages of PAGE keys."""

    def local(q_bthk, k_btnk, v_btnk, segments_bt):
        b, t = segments_bt.shape
        is_first = jnp.pad(segments_bt[:, 1:] != segments_bt[:, :-1], ((0, 0), (1, 0)))
        token_1t = jnp.arange(t)[None]
        start_bt = jax.lax.cummax(jnp.where(is_first, token_1t, 0), axis=1)
        first_m = (start_bt + t * jnp.arange(b)[:, None]).reshape(-1)
        pool = lambda x: x.reshape(b * t, *x.shape[2:])
        k_mnk, v_mnk = pool(k_btnk), pool(v_btnk)

        def read(i, first_r):
            token_rs = first_r[:, None] + i * tiles.PAGE + jnp.arange(tiles.PAGE)[None]
            take = lambda x: jnp.swapaxes(jnp.take(x, token_rs, axis=0, mode="clip"), 1, 2)
            return Page(take(k_mnk), take(v_mnk))

        return _attend(q_bthk, token_1t - start_bt, first_m, read)

    heads, kv = (("batch", "length", name, None) for name in ("heads", "kv_heads"))
    run = _on(layout, local, (heads, kv, kv, ("batch", "length")), heads)
    return run(q_bthk, k_btnk, v_btnk, segment_ids_bt)


def _row_attention_fwd(q, k, v, segments, layout):
    return row_attention(q, k, v, segments, layout), (q, k, v, segments)


def _row_attention_bwd(layout, operands, gradient):
    *qkv, segments = operands
    plain = lambda q, k, v: attention.row_attention(q, k, v, segments, layout)
    return *jax.vjp(plain, *qkv)[1](gradient), None


row_attention.defvjp(_row_attention_fwd, _row_attention_bwd)


class Page(NamedTuple):
    """Keys and values [R,N,S,K]."""

    k: jax.Array
    v: jax.Array


def _attend(q_bthk: jax.Array, index_bt: jax.Array, source_m: jax.Array, read: Callable):
    """Returns attention by an online softmax, page by page.

    Args:
      q_bthk: [B,T,H,K] queries on one device; index_bt: [B,T] the last position each attends to.
      source_m: [B*T] source of a query's keys.
      read: (number of a page, sources [R]) -> k and v, [R,N,S,K].
    """
    b, t, h, k = q_bthk.shape
    cast = lambda x: x.astype(q_bthk.dtype)

    def tile(q_rhk, index_r, source_r):
        n = jax.eval_shape(read, 0, source_r).k.shape[1]
        scaled = cast(q_rhk.astype(jnp.float32) * k**-0.5)
        q_mgk = scaled.reshape(tiles.ROWS * n, h // n, k)

        def page(i, carry):
            top_mg, total_mg, out_mgk = carry
            kv = read(i, source_r)
            place_s = i * tiles.PAGE + jnp.arange(tiles.PAGE)
            is_seen_rs = place_s[None] <= index_r[:, None]
            is_seen_ms = jnp.repeat(is_seen_rs, n, axis=0)
            k_msk = cast(kv.k).reshape(tiles.ROWS * n, tiles.PAGE, k)
            v_msk = cast(jnp.where(is_seen_rs[:, None, :, None], kv.v, 0))
            v_msk = v_msk.reshape(tiles.ROWS * n, tiles.PAGE, k)
            scores_mgs = jnp.einsum(
                "mgk,msk->mgs", q_mgk, k_msk, preferred_element_type=jnp.float32
            )
            scores_mgs = jnp.where(is_seen_ms[:, None], scores_mgs, attention.MASKED)
            new_top = jnp.maximum(top_mg, jnp.max(scores_mgs, axis=-1))
            probs_mgs = jnp.exp(scores_mgs - new_top[..., None])
            shrink = jnp.exp(top_mg - new_top)
            total_mg = total_mg * shrink + tiles.tree_sum(probs_mgs)
            new = jnp.einsum(
                "mgs,msk->mgk", cast(probs_mgs), v_msk, preferred_element_type=jnp.float32
            )
            return new_top, total_mg, out_mgk * shrink[..., None] + new

        shape = q_mgk.shape[:2]
        carry = jnp.full(shape, attention.MASKED), jnp.zeros(shape), jnp.zeros(q_mgk.shape)
        pages = jnp.max(index_r) // tiles.PAGE + 1
        _, total_mg, out_mgk = jax.lax.fori_loop(0, pages, page, carry)
        return cast(out_mgk / total_mg[..., None]).reshape(tiles.ROWS, h, k)

    flat = q_bthk.reshape(b * t, h, k), index_bt.reshape(-1), source_m
    return tiles.by_rows(tile, *flat).reshape(q_bthk.shape)


# Vocabulary


def logits(x: jax.Array, head: Head, layout: Layout | None) -> jax.Array:
    """Returns `head.logits` of x [B,D] or [B,T,D] in float32, sharded by vocabulary."""
    lead = ("batch", "length")[: x.ndim - 1]
    axes = (None, "vocab") if head.vocab_axis == 1 else ("vocab", None)
    local = lambda x, w: tiled_logits(x, dataclasses.replace(head, weight=w))
    weight = head.weight
    if layout is not None and _tensor(layout)[1] > 1 and layout.rules["vocab"]:
        weight = tiles.fill(weight, head.vocab_axis, tiles.VOCAB_UNIT)
    y = _on(layout, local, ((*lead, None), axes), (*lead, "vocab"))(x, weight)
    return y[..., : head.vocab_size]


# Set-up


def check(config: ModelConfig, mesh_shape: dict, scheme: str) -> None:
    """Raises ValueError for a model, mesh or recipe without support for invariant numerics."""
    parts = mesh_shape["tensor"]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "columns of q": (q, tiles.COLUMNS), "columns of k and v": (kv, tiles.COLUMNS),
        "columns of gate and up": (config.mlp_dim, tiles.COLUMNS), "rows of o": (q, tiles.K_TILE),
        "rows of down": (config.mlp_dim, tiles.K_TILE),
    }
    if config.moe is not None:
        if not config.moe.dense_layers:
            del sizes["columns of gate and up"], sizes["rows of down"]
        sizes["width of an expert"] = config.moe.expert_dim, tiles.K_TILE
        if config.moe.shared_dim:
            sizes["width of the shared experts"] = config.moe.shared_dim, tiles.K_TILE
    problems = [
        f"{name}, {size}, cannot be cut into {parts} parts of whole tiles of {tile}"
        for name, (size, tile) in sizes.items() if parts > 1 and size % (parts * tile)
    ]
    if parts & (parts - 1) or parts > tiles.VOCAB_PARTS:
        problems.append(f"{parts} tensor shards are no power of two up to {tiles.VOCAB_PARTS}")
    if mesh_shape["context"] > 1:
        problems.append(f"rows are cut into {mesh_shape['context']} context shards; use 1")
    if config.moe is not None and parts > 1 and scheme != "none":
        problems.append(
            f"quantization {scheme!r} scales the inputs of an expert's last product, which {parts} "
            "tensor shards cut; use none, or one shard"
        )
    if config.has_sinks or config.sliding is not None:
        problems.append(
            "it has no layers with a sliding window and no attention sinks; set numerics to 'fast'"
        )
    if scheme not in SCHEMES:
        problems.append(f"quantization {scheme!r} sums floats of few bits; use {', '.join(SCHEMES)}")
    if problems:
        raise ValueError("numerics='invariant': " + "; ".join(problems))
