"""`numerics="invariant"`: results that depend on a token's own sequence alone, bit by bit.

A float sum depends on its order, and XLA chooses one by the shapes of a program. Here every sum has
an order of its own, whatever the batch, the slot, the chunk of a prompt or the number of devices
that a layer is cut over (batch invariance; TBIK, arXiv:2511.17826):

* rows (tokens) are computed in tiles of ROWS, one after another, by one loop body;
* a product multiplies tiles [ROWS, K_TILE] x [K_TILE, COLUMNS], whose sums are added pairwise; the
  upper part of that tree lies across the devices that hold the tiles, as a butterfly;
* a token attends to pages of PAGE keys in order, whether they lie in a cache or in a row;
* sums over the vocabulary are pairwise too, of as many numbers as VOCAB_UNIT divides: up to
  VOCAB_PARTS devices hold whole nodes of the tree and whole COLUMNS. Where a head is cut over
  devices, columns of zeros that are no tokens fill it up inside the program.

Programs of both sides are compiled with COMPILER_OPTIONS. A compiler may contract a product and a
sum into one rounding; it does so alike in equal loop bodies, and nowhere else does a product meet a
sum. Loops run at least twice: XLA inlines one that does not.

Gradients are those of the plain operations, at the values of these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_tis.models import attention, quant
from jaxrl_tis.models.config import ModelConfig

ROWS, K_TILE, COLUMNS, PAGE, VOCAB_PARTS = 16, 64, 32, 16, 32
VOCAB_UNIT = VOCAB_PARTS * COLUMNS
SCHEMES = ("none", "w8a16", "w8a8")
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
# Numbers that are added one by one, and in pairs, without a loop: more take long to compile.
MAX_UNROLLED, MAX_PAIRED = 32, 8


# Sums


def tree_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis of odd * 2^m numbers: of runs of `odd` one by one, of those pairwise.

    The sum of each of 2^j equal parts is a node of the tree, so parts summed apart and added by
    `butterfly` give the same bits.
    """
    size = x.shape[-1]
    odd = size // (size & -size)
    x = x.reshape(*x.shape[:-1], -1, odd)
    if odd <= MAX_UNROLLED:
        x = functools.reduce(jnp.add, [x[..., i] for i in range(odd)])
    else:
        x = jax.lax.fori_loop(1, odd, lambda i, total: total + x[..., i], x[..., 0])
    pairs = lambda x: x[..., 0::2] + x[..., 1::2]
    if x.shape[-1] > MAX_PAIRED:
        fill = jnp.zeros((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
        level = lambda _, x: jnp.concatenate([pairs(x), fill], axis=-1)
        return jax.lax.fori_loop(0, x.shape[-1].bit_length() - 1, level, x)[..., 0]
    while x.shape[-1] > 1:
        x = pairs(x)
    return x[..., 0]


def butterfly(x: jax.Array, axis: Any, count: int) -> jax.Array:
    """Sum over a mesh axis of 2^j devices, pairwise: every device gets the same bits."""
    distance = 1
    while distance < count:
        partners = [(i, i ^ distance) for i in range(count)]
        x = x + jax.lax.ppermute(x, axis, partners)
        distance *= 2
    return x


def by_rows(f: Callable, *arrays: Any) -> Any:
    """f on tiles [ROWS, ...] of arrays [n, ...] (or trees of them), joined again."""
    n = jax.tree.leaves(arrays)[0].shape[0]
    count = max(2, -(-n // ROWS))

    def tiles(x):
        fill = [(0, count * ROWS - n)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, fill).reshape(count, ROWS, *x.shape[1:])

    out = jax.lax.map(lambda tile: f(*tile), jax.tree.map(tiles, arrays))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:n], out)


# Products


def fill(x: jax.Array, axis: int, multiple: int, value: float = 0) -> jax.Array:
    """x with the axis filled up to a multiple."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, width, constant_values=value)


def product(x_ri: jax.Array, w: jax.Array, in_axis: int = 0, precision=None) -> jax.Array:
    """[R,i] times w, whose axis `in_axis` is i -> [R,o] float32, on one device."""
    columns, used = w.shape[1 - in_axis], -(-w.shape[in_axis] // K_TILE)
    # A batch of one tile would be another kind of product: a tile of zeros goes with it.
    tiles = max(2, used)
    x_ri = fill(x_ri, 1, tiles * K_TILE)
    w = fill(fill(w, in_axis, tiles * K_TILE), 1 - in_axis, COLUMNS)
    dims = (((2,), (1,)), ((0,), (0,))) if in_axis == 0 else (((2,), (2,)), ((0,), (1,)))

    def block(start):
        w_block = jax.lax.dynamic_slice_in_dim(w, start, COLUMNS, 1 - in_axis)
        shape = (tiles, K_TILE, COLUMNS) if in_axis == 0 else (COLUMNS, tiles, K_TILE)
        w_block = w_block.reshape(shape)

        def tile(x_ri):
            x_kri = jnp.swapaxes(x_ri.reshape(ROWS, tiles, K_TILE), 0, 1)
            partial_kro = jax.lax.dot_general(
                x_kri, w_block, dims, precision=precision, preferred_element_type=jnp.float32
            )
            return tree_sum(jnp.moveaxis(partial_kro[:used], 0, -1))

        return by_rows(tile, x_ri)

    out_nro = jax.lax.map(block, jnp.arange(0, w.shape[1 - in_axis], COLUMNS))
    return jnp.moveaxis(out_nro, 0, 1).reshape(len(x_ri), -1)[:, :columns]


def _tensor(layout: Any) -> tuple[str | None, int]:
    """Mesh axis that cuts heads, MLP and vocabulary, and its size."""
    if layout is None or layout.mesh.size == 1:
        return None, 1
    return layout.rules["mlp"], layout.mesh.shape[layout.rules["mlp"]]


def _on(layout: Any, f: Callable, in_axes: tuple, out_axes: tuple) -> Callable:
    """f on every device's part of arrays with these logical axes."""
    if layout is None:
        return f
    spec = lambda axes: layout.sharding(axes).spec
    return layout.shard(f, tuple(map(spec, in_axes)), spec(out_axes))


def dot(x: jax.Array, w: Any, layout: Any, is_split_in: bool) -> jax.Array:
    """x [B,T,i] @ w [i,o] -> [B,T,o] in x's dtype; `quant.dot` of any kind of weight.

    Args:
      layout: cuts w over devices, along i (a butterfly adds up) or along o; None: one device.
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
    """`dot` without a gradient. Sums of s8 x s8 are exact in any order, and the largest number of
    a row is the same in any."""
    lead, axes = ("batch", "length"), ("mlp", None) if is_split_in else (None, "mlp")
    axis, count = _tensor(layout) if is_split_in else (None, 1)
    is_quant = isinstance(w, quant.QuantArray)
    is_integer = is_quant and w.scheme == "w8a8"
    arrays, scales = (x, w), ()
    if is_quant:
        x_q, x_scale = quant.quantize(x, -1) if is_integer else (x, jnp.ones((*x.shape[:2], 1)))
        arrays, scales = (x_q, w.q), (x_scale, w.scale)

    def local(x_bti, w_io, *scales):
        x_ri = x_bti.reshape(-1, x_bti.shape[-1])
        if is_integer:
            y_ro = jax.lax.dot(x_ri, w_io, preferred_element_type=jnp.int32)
            y_ro = jax.lax.psum(y_ro, axis) if count > 1 else y_ro
        else:
            y_ro = butterfly(product(x_ri, w_io.astype(x.dtype)), axis, count)
        if is_quant:
            row_scale, column_scale = scales
            rescale = lambda y, scale: y.astype(jnp.float32) * scale * column_scale
            y_ro = by_rows(rescale, y_ro, row_scale.reshape(-1, 1))
        return y_ro.reshape(*x_bti.shape[:2], -1).astype(x.dtype)

    in_axes = ((*lead, axes[0]), axes, (*lead, None), (None, axes[1]))
    in_axes = in_axes[: 2 + len(scales)]
    return _on(layout, local, in_axes, (*lead, axes[1]))(*arrays, *scales)


# Rows


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, layout: Any, plain: Callable) -> jax.Array:
    """`plain(x, scale, eps)` of rows [B,T,D], or [B,T,H,K] with heads cut over devices; the scale
    is rounded to x's dtype, in which a sampler holds it."""
    return _normed(x, scale.astype(x.dtype), eps, layout, plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _normed(x, scale, eps, layout, plain):
    def tile(x_rd):
        x32 = x_rd.astype(jnp.float32)
        mean_r = tree_sum(x32 * x32) / x32.shape[-1]
        x32 = x32 * jax.lax.rsqrt(mean_r + eps)[:, None]
        return (x32 * scale.astype(jnp.float32).reshape(1, -1)).astype(x.dtype)

    axes = ("batch", "length", "heads", None) if x.ndim == 4 else ("batch", "length", None)
    local = lambda x: by_rows(tile, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return _on(layout, local, (axes,), axes)(x)


def _normed_fwd(x, scale, *plan):
    return _normed(x, scale, *plan), (x, scale)


def _normed_bwd(eps, layout, plain, operands, gradient):
    return jax.vjp(lambda x, scale: plain(x, scale, eps), *operands)[1](gradient)


_normed.defvjp(_normed_fwd, _normed_bwd)


def rotation(angles: Callable, positions_bt: jax.Array, layout: Any) -> tuple:
    """`angles(positions [B,T])` (cos and sin, [B,T,1,K/2] each) of tiles of rows."""

    def local(positions_bt):
        tile = lambda positions_r: jax.tree.map(lambda x: x[0], angles(positions_r[None]))
        found = by_rows(tile, positions_bt.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*positions_bt.shape, 1, -1), found)

    return jax.lax.stop_gradient(
        _on(layout, local, (("batch", "length"),), ("batch", "length", None, None))(positions_bt)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rotate(x_bthk, cos, sin, layout, plain: Callable) -> jax.Array:
    """`plain(x, cos, sin)` of tiles of (token, head) rows."""

    def local(x_bthk, cos, sin):
        rows = lambda x: jnp.broadcast_to(x, (*x_bthk.shape[:3], x.shape[-1])).reshape(
            -1, x.shape[-1]
        )
        return by_rows(plain, rows(x_bthk), rows(cos), rows(sin)).reshape(x_bthk.shape)

    token, heads = ("batch", "length", None, None), ("batch", "length", "heads", None)
    return _on(layout, local, (heads, token, token), heads)(x_bthk, cos, sin)


def _rotate_fwd(x_bthk, cos, sin, layout, plain):
    return rotate(x_bthk, cos, sin, layout, plain), (x_bthk, cos, sin)


def _rotate_bwd(layout, plain, operands, gradient):
    return jax.vjp(plain, *operands)[1](gradient)


rotate.defvjp(_rotate_fwd, _rotate_bwd)


# Attention


def paged_attention(q_bthk: jax.Array, read: Callable, table_bp: jax.Array, index_bt: jax.Array):
    """`attention.paged_attention` in which every query looks at its pages by itself."""
    b, t = index_bt.shape
    row_m = jnp.repeat(jnp.arange(b), t)
    return _attend(q_bthk, index_bt, row_m, lambda i, row_r: read(table_bp[row_r, i]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def row_attention(q_bthk, k_btnk, v_btnk, segment_ids_bt, layout: Any = None) -> jax.Array:
    """`attention.row_attention` in which the keys of a segment are pages of PAGE keys."""

    def local(q_bthk, k_btnk, v_btnk, segments_bt):
        b, t = segments_bt.shape
        is_first = jnp.pad(segments_bt[:, 1:] != segments_bt[:, :-1], ((0, 0), (1, 0)))
        token_1t = jnp.arange(t)[None]
        start_bt = jax.lax.cummax(jnp.where(is_first, token_1t, 0), axis=1)
        first_m = (start_bt + t * jnp.arange(b)[:, None]).reshape(-1)
        pool = lambda x: x.reshape(b * t, *x.shape[2:])
        k_mnk, v_mnk = pool(k_btnk), pool(v_btnk)

        def read(i, first_r):
            token_rs = first_r[:, None] + i * PAGE + jnp.arange(PAGE)[None]
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
    """Online softmax, page by page.

    Args:
      q_bthk: [B,T,H,K] queries on one device; index_bt: [B,T] the last place that each looks at.
      source_m: [B*T] where a query's keys are.
      read: (number of a page, sources [R]) -> k and v, [R,N,S,K].
    """
    b, t, h, k = q_bthk.shape
    cast = lambda x: x.astype(q_bthk.dtype)

    def tile(q_rhk, index_r, source_r):
        n = jax.eval_shape(read, 0, source_r).k.shape[1]
        scaled = cast(q_rhk.astype(jnp.float32) * k**-0.5)
        q_mgk = scaled.reshape(ROWS * n, h // n, k)

        def page(i, carry):
            top_mg, total_mg, out_mgk = carry
            kv = read(i, source_r)
            place_s = i * PAGE + jnp.arange(PAGE)
            is_seen_rs = place_s[None] <= index_r[:, None]
            is_seen_ms = jnp.repeat(is_seen_rs, n, axis=0)
            k_msk = cast(kv.k).reshape(ROWS * n, PAGE, k)
            v_msk = cast(jnp.where(is_seen_rs[:, None, :, None], kv.v, 0))
            v_msk = v_msk.reshape(ROWS * n, PAGE, k)
            scores_mgs = jnp.einsum(
                "mgk,msk->mgs", q_mgk, k_msk, preferred_element_type=jnp.float32
            )
            scores_mgs = jnp.where(is_seen_ms[:, None], scores_mgs, attention.MASKED)
            new_top = jnp.maximum(top_mg, jnp.max(scores_mgs, axis=-1))
            probs_mgs = jnp.exp(scores_mgs - new_top[..., None])
            shrink = jnp.exp(top_mg - new_top)
            total_mg = total_mg * shrink + tree_sum(probs_mgs)
            new = jnp.einsum(
                "mgs,msk->mgk", cast(probs_mgs), v_msk, preferred_element_type=jnp.float32
            )
            return new_top, total_mg, out_mgk * shrink[..., None] + new

        shape = q_mgk.shape[:2]
        carry = jnp.full(shape, attention.MASKED), jnp.zeros(shape), jnp.zeros(q_mgk.shape)
        pages = jnp.max(index_r) // PAGE + 1
        _, total_mg, out_mgk = jax.lax.fori_loop(0, pages, page, carry)
        return cast(out_mgk / total_mg[..., None]).reshape(ROWS, h, k)

    flat = q_bthk.reshape(b * t, h, k), index_bt.reshape(-1), source_m
    return by_rows(tile, *flat).reshape(q_bthk.shape)


# Vocabulary


def logits(x: jax.Array, head: Any, layout: Any) -> jax.Array:
    """`head.logits` of x [B,D] or [B,T,D] in float32, cut over devices by vocabulary."""
    lead = ("batch", "length")[: x.ndim - 1]
    axes = (None, "vocab") if head.vocab_axis == 1 else ("vocab", None)
    local = lambda x, w: local_logits(x, dataclasses.replace(head, weight=w))
    weight = head.weight
    if _tensor(layout)[1] > 1 and layout.rules["vocab"]:
        weight = fill(weight, head.vocab_axis, VOCAB_UNIT)
    y = _on(layout, local, ((*lead, None), axes), (*lead, "vocab"))(x, weight)
    return y[..., : head.vocab_size]


def local_logits(x: jax.Array, head: Any) -> jax.Array:
    """x [...,D] -> [...,V] float32 of the vocabulary of one device."""
    head, cast_x = head.cast(x)
    x_rd = cast_x.reshape(-1, x.shape[-1])
    y_rv = product(x_rd, head.weight, 1 - head.vocab_axis, head.precision)
    return y_rv.reshape(*x.shape[:-1], -1)


def apart(x: jax.Array) -> jax.Array:
    """x, whose last operation may be a product, that of exp too, and is not contracted with what
    follows: a compiler would where both are in one loop, and not where, on another mesh, they are
    in two. The choice stands between them."""
    return jnp.where(x != 0, x, 0.0)


def scaled(logits_rv: jax.Array, temperature_r1: jax.Array) -> jax.Array:
    """The quotient by way of the reciprocal, which XLA takes in some programs and not in others."""
    return apart(logits_rv * (1 / temperature_r1))


def vocabulary_sum(x_rv: jax.Array, axis: Any, count: int) -> jax.Array:
    """Sum [R] of numbers over the whole vocabulary, of which each of `count` devices along a mesh
    axis holds a part, all of them together a multiple of VOCAB_UNIT."""
    x_rv = apart(x_rv)
    if count == 1:
        # The rest of a unit is zeros, which change no sum: half of one has the sum of the whole.
        size = x_rv.shape[1]
        x_rv = fill(x_rv, 1, min(VOCAB_UNIT, 1 << (size - 1).bit_length()))
    return butterfly(tree_sum(x_rv), axis, count)


# Set-up


def check(config: ModelConfig, mesh_shape: dict, scheme: str) -> None:
    """ValueError for a model, a mesh or a recipe that the contract does not cover."""
    parts = mesh_shape["tensor"]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "columns of q": (q, COLUMNS), "columns of k and v": (kv, COLUMNS),
        "columns of gate and up": (config.mlp_dim, COLUMNS), "rows of o": (q, K_TILE),
        "rows of down": (config.mlp_dim, K_TILE),
    }
    problems = [
        f"{name}, {size}, cannot be cut into {parts} parts of whole tiles of {tile}"
        for name, (size, tile) in sizes.items() if parts > 1 and size % (parts * tile)
    ]
    if parts & (parts - 1) or parts > VOCAB_PARTS:
        problems.append(f"{parts} tensor shards are no power of two up to {VOCAB_PARTS}")
    if mesh_shape["context"] > 1:
        problems.append(f"rows are cut into {mesh_shape['context']} context shards; use 1")
    if scheme not in SCHEMES:
        problems.append(f"quantization {scheme!r} sums floats of 8 bits; use {', '.join(SCHEMES)}")
    if problems:
        raise ValueError("numerics='invariant': " + "; ".join(problems))
