"""Keys and values in pages: an argument and a result of every program, never module state.

A pool holds P pages of S positions for each of N key/value heads. Page 0 takes writes that are never
read. A sequence is a row of a page table: its positions i*S .. i*S+S-1 are in page table[i]. Unrolled
layers have a `KV` each. Scanned layers share one `StackedKV`, in which a value follows its key. It
passes through the scan and is written in place.

int8 and float8 pools hold x / scale, rounded, with scale = absmax / 127 (or 448) of a token's key (or
value) of a head.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_tis.kernels import decode_attention
from jaxrl_tis.models import attention, invariant, quant
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout

# Values that a layer's pool has as their bits: to write into others XLA on CPU converts all of it to a
# wider float and back.
BITS: dict[Any, Any] = {
    jnp.dtype("bfloat16"): jnp.dtype("uint16"), jnp.dtype("float8_e4m3fn"): jnp.dtype("uint8"),
}
VALUES = {bits: values for values, bits in BITS.items()}
PAGED = {"fast": attention.paged_attention, "invariant": invariant.paged_attention}
FAST_DECODE: dict[str, Callable] = {
    "cpu": attention.paged_attention_by_length,
    "gpu": functools.partial(attention.paged_attention, block_size=attention.GPU_PAGED_BLOCK),
}


def _codes(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Returns x [..., K] as the pool stores it, and its scales [...] if it has any."""
    values, scale = x, None
    if (meant := VALUES.get(dtype, dtype)) in quant.BOUND:
        values, scale = quant.quantize(x, -1, meant)
        scale = scale[..., 0]
    values = values.astype(meant)
    return values if meant == dtype else _view(values, dtype), scale


_view = jax.lax.bitcast_convert_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """The pool of one layer: k, v [P,N,S,K], see BITS; scales [P,N,S] float32 or None."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    @classmethod
    def empty(cls, config: ModelConfig, pages: int, size: int, dtype) -> "KV":
        shape = (pages, config.num_kv_heads, size, config.head_dim)
        values = lambda: jnp.zeros(shape, BITS.get(dtype, dtype))
        scales = lambda: jnp.zeros(shape[:-1]) if dtype in quant.BOUND else None
        return cls(values(), values(), scales(), scales())

    @property
    def size(self) -> int:
        return self.k.shape[2]

    def _leaves(self, k: jax.Array, v: jax.Array) -> "KV":
        (k, k_scale), (v, v_scale) = _codes(k, self.k.dtype), _codes(v, self.v.dtype)
        return KV(k, v, k_scale, v_scale)

    def read(self, numbers: jax.Array) -> "KV":
        """Returns the pages [...,N,S,K] with these numbers [...]."""
        pages = jax.tree.map(lambda x: x.at[numbers].get(mode="promise_in_bounds"), self)
        values = lambda x: _view(x, VALUES[x.dtype]) if x.dtype in VALUES else x
        return jax.tree.map(values, pages)

    def write(self, pages_m: jax.Array, k_mnsk: jax.Array, v_mnsk: jax.Array) -> "KV":
        """Writes whole pages."""
        new = self._leaves(k_mnsk, v_mnsk)
        return jax.tree.map(lambda x, y: _set_pages(x, y, pages_m, 0), self, new)

    def append(self, pages_m, offsets_m, k_mnk: jax.Array, v_mnk: jax.Array) -> "KV":
        """Writes one position of each of M pages."""
        new = self._leaves(k_mnk, v_mnk)
        return jax.tree.map(lambda x, y: x.at[pages_m, :, offsets_m].set(y), self, new)

    def copy(self, sources_m: jax.Array, targets_m: jax.Array) -> "KV":
        return jax.tree.map(lambda x: _copy_pages(x, sources_m, targets_m, 0), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedKV:
    """The pool of all layers: kv [L,P,N,S,2K]; scale [L,P,N,2,S] float32 or None."""

    kv: jax.Array
    scale: jax.Array | None

    @classmethod
    def empty(cls, config: ModelConfig, pages: int, size: int, dtype) -> "StackedKV":
        shape = (config.num_layers, pages, config.num_kv_heads)
        scale = jnp.zeros((*shape, 2, size)) if dtype in quant.BOUND else None
        return cls(jnp.zeros((*shape, size, 2 * config.head_dim), dtype), scale)

    @property
    def size(self) -> int:
        return self.kv.shape[3]

    def copy(self, sources_m: jax.Array, targets_m: jax.Array) -> "StackedKV":
        return jax.tree.map(lambda x: _copy_pages(x, sources_m, targets_m, 1), self)

    def beside(self, k: jax.Array, v: jax.Array) -> "StackedKV":
        """Returns keys and values [..., N,(S,)K] side by side, as the pool stores them, with scales
        [..., N,2(,S)]."""
        k, v, scale = self.codes(k, v)
        return StackedKV(jnp.concatenate([k, v], axis=-1), scale)

    def codes(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns keys and values as the pool stores them, and their scales as of `beside`."""
        (k, k_scale), (v, v_scale) = _codes(k, self.kv.dtype), _codes(v, self.kv.dtype)
        if k_scale is None or v_scale is None:
            return k, v, None
        return k, v, jnp.stack([k_scale, v_scale], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOf:
    """One layer of a stacked pool, used like a KV; `write` and `append` return one too."""

    pool: StackedKV
    index: jax.Array

    @property
    def size(self) -> int:
        return self.pool.size

    def read(self, numbers: jax.Array) -> KV:
        take = lambda x: x.at[self.index, numbers].get(mode="promise_in_bounds")
        kv = take(self.pool.kv)
        width = kv.shape[-1] // 2
        if self.pool.scale is None:
            return KV(kv[..., :width], kv[..., width:], None, None)
        scale = take(self.pool.scale)
        return KV(kv[..., :width], kv[..., width:], scale[..., 0, :], scale[..., 1, :])

    def write(self, pages_m, k_mnsk: jax.Array, v_mnsk: jax.Array) -> "LayerOf":
        put = lambda pool, new: _set_pages(pool, new[None], pages_m, 1, self.index)
        new = self.pool.beside(k_mnsk, v_mnsk)
        return LayerOf(jax.tree.map(put, self.pool, new), self.index)

    def append(self, pages_m, offsets_m, k_mnk: jax.Array, v_mnk: jax.Array) -> "LayerOf":
        new = self.pool.beside(k_mnk, v_mnk)
        kv = self.pool.kv.at[self.index, pages_m, :, offsets_m].set(new.kv)
        scale = self.pool.scale
        if scale is not None:
            scale = scale.at[self.index, pages_m, :, :, offsets_m].set(new.scale)
        return LayerOf(StackedKV(kv, scale), self.index)


def _set_pages(pool, new, pages_m, axis: int, layer=0):
    """Writes new[..., m, ...] at page pages_m[m] of the pool, page by page: in place on TPU."""

    def put(m, pool):
        page = jax.lax.dynamic_slice_in_dim(new, m, 1, axis)
        start = [0] * pool.ndim
        start[0], start[axis] = layer, pages_m[m]
        return jax.lax.dynamic_update_slice(pool, page, start)

    return jax.lax.fori_loop(0, len(pages_m), put, pool)


def _copy_pages(pool, sources_m, targets_m, axis: int):
    def put(m, pool):
        page = jax.lax.dynamic_slice_in_dim(pool, sources_m[m], 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, targets_m[m], axis)

    return jax.lax.fori_loop(0, len(sources_m), put, pool)


def empty(config: ModelConfig, pages: int, size: int, dtype: str, unrolled: bool) -> Any:
    """Makes a pool of zeros for every layer."""
    if not unrolled:
        return StackedKV.empty(config, pages, size, jnp.dtype(dtype))
    layer = lambda: KV.empty(config, pages, size, jnp.dtype(dtype))
    return tuple(layer() for _ in range(config.num_layers))


def axes(path: tuple, x: jax.Array) -> tuple:
    """Returns the logical axes of an array of a pool, at the end of a path of its tree. Each data shard
    has its own pages, and each context shard its own positions of all of these pages."""
    name = path[-1].name
    if name == "index":
        return ()
    first = (None,) * (x.ndim == 5) + ("batch", "kv_heads")
    rest: list[str | None] = [None] * (x.ndim - len(first))
    rest[-1 if "scale" in name else -2] = "positions"
    return first + tuple(rest)


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of a page on one of the `count` devices that share it: `size` in a row.

    A device's own positions of a sequence are numbered as if there were no others: the first pages of
    the table have the first ones.
    """

    layout: Layout
    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.axes("positions")

    @property
    def count(self) -> int:
        return self.layout.count(self.names)

    @property
    def page(self) -> int:
        """Positions of a whole page."""
        return self.size * self.count

    @property
    def first(self) -> jax.Array | int:
        """The first position of a page that this device has."""
        return jax.lax.axis_index(self.names) * self.size if self.count > 1 else 0

    def before(self, place: jax.Array) -> jax.Array:
        """Returns how many of the positions before a place of a sequence are this device's."""
        if self.count == 1:
            return place
        return place // self.page * self.size + jnp.clip(place % self.page - self.first, 0, self.size)

    def has(self, place: jax.Array) -> jax.Array | bool:
        """Whether a place of a sequence is this device's."""
        if self.count == 1:
            return True
        return place % self.page // self.size == jax.lax.axis_index(self.names)

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns this device's part of an axis with the positions of a whole page."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, axis) if self.count > 1 else x

    def attend(self, paged: Callable, q_bthk, read, table_bp, index_bt, first_bt, sinks_h) -> Any:
        """Returns paged(...) for places of whole sequences, merged over the devices of a page."""
        more = {} if first_bt is None else {"first_bt": self.before(first_bt)}
        if self.count == 1:
            more |= {} if sinks_h is None else {"sinks_h": sinks_h}
            return paged(q_bthk, read, table_bp, index_bt, **more)
        index_bt = self.before(index_bt + 1) - 1
        out, log_total = paged(q_bthk, read, table_bp, index_bt, **more, is_part=True)
        return attention.merged(out, log_total, self.names, sinks_h).astype(q_bthk.dtype)


# `attend` of the transformer: writes the keys of its tokens, then attends to all keys so far


def _on_devices(
    layout: Layout, step: Callable, cache: Any, arrays: tuple, window: attention.Window | None,
    sinks_h: jax.Array | None, weighs: bool = False,
) -> Callable:
    """Runs step(q, k, v, unrotated, cache, window, sinks, *arrays by row) on each device's rows, heads
    and pages."""
    spec = lambda *names: layout.sharding(names).spec
    heads, kv_heads = spec("batch", None, "heads", None), spec("batch", None, "kv_heads", None)
    pools = jax.tree_util.tree_map_with_path(lambda path, x: spec(*axes(path, x)), cache)
    by_row = tuple(spec("batch", *(None,) * (x.ndim - 1)) for x in arrays)
    results = (heads, pools, spec("batch", None, None)) if weighs else (heads, pools)

    def run(q, k, v, unrotated, cache):
        rest = unrotated and attention.Unrotated(kv_heads, spec("batch"), spec("batch"))
        specs = heads, kv_heads, kv_heads, rest, pools, PartitionSpec(), spec("heads"), *by_row
        return layout.shard(step, specs, results)(q, k, v, unrotated, cache, window, sinks_h, *arrays)

    return run


def _layer_cache(cache: Any) -> Any:
    return LayerOf(*cache) if isinstance(cache, tuple) else cache


def _handed_on(cache: Any) -> Any:
    return cache.pool if isinstance(cache, LayerOf) else cache


def fill(
    starts_r: jax.Array, lengths_r: jax.Array, table_rp: jax.Array, layout: Layout,
    numerics: str = "fast",
):
    """Returns the `attend` function of a prefill: row r holds lengths_r[r] tokens from position
    starts_r[r] on, a multiple of the page size."""

    def step(q_rthk, k_rtnk, v_rtnk, unrotated, cache, window, sinks_h, starts_r, lengths_r, table_rp):
        r, t, n, k = k_rtnk.shape
        positions = Positions(layout, cache.size)
        first = starts_r[:, None] + jnp.arange(0, t, positions.page)[None]
        pages_rm = jnp.take_along_axis(table_rp, first // positions.page, axis=1, mode="clip")
        pages_rm = jnp.where(first < (starts_r + lengths_r)[:, None], pages_rm, 0)
        whole = lambda x: x.reshape(-1, positions.page, n, k)
        paged = lambda x: jnp.swapaxes(positions.own(whole(x), 1), 1, 2)
        cache = cache.write(pages_rm.reshape(-1), paged(k_rtnk), paged(v_rtnk))
        index_rt = starts_r[:, None] + jnp.minimum(jnp.arange(t)[None], lengths_r[:, None] - 1)
        first_rt = None if window is None else window.first(index_rt)
        arrays = q_rthk, cache.read, table_rp, index_rt, first_rt, sinks_h
        return positions.attend(PAGED[numerics], *arrays), cache

    def attend(q, k, v, cache, window=None, sinks_h=None, unrotated=None):
        cache, rows = _layer_cache(cache), (starts_r, lengths_r, table_rp)
        out, cache = _on_devices(layout, step, cache, rows, window, sinks_h)(q, k, v, None, cache)
        return out, _handed_on(cache)

    return attend


def append(
    index_bt: jax.Array, is_written_bt: jax.Array, table_bp: jax.Array, layout: Layout,
    numerics: str = "fast", weighs: bool = False,
):
    """Returns the `attend` function of a decode: T new tokens of every slot, at places index_bt of
    its pages. A token with is_written False writes to page 0: its key is in the pages already, or
    its slot is free. With `weighs`, of unrolled layers, each has its own table, its cache is (cache,
    table_bp), and the carried output is (cache, attention [B,T,P] of each token to each page, summed over
    heads)."""
    paged: Callable = PAGED[numerics]
    if numerics == "fast":
        paged = FAST_DECODE.get(layout.platform, paged)
    if weighs:
        paged = functools.partial(paged, weighs=True)
    written_bt = is_written_bt.astype(jnp.int32)  # here: a kernel takes no booleans

    def step(
        q_bthk, k_btnk, v_btnk, unrotated, cache, window, sinks_h, index_bt, is_written_bt, table_bp
    ):
        positions = Positions(layout, cache.size)

        def generic(
            q_bthk, k_btnk, v_btnk, unrotated, cache, first_bt, sinks_h, index_bt, is_written_bt, table_bp
        ):
            page_bt = jnp.take_along_axis(table_bp, index_bt // positions.page, axis=1)
            is_own_bt = (is_written_bt > 0) & positions.has(index_bt)
            page_bt = jnp.where(is_own_bt, page_bt, 0)
            flat = lambda x: x.reshape(-1, *x.shape[2:])
            new = cache.append(
                flat(page_bt), flat(index_bt) % cache.size, flat(k_btnk), flat(v_btnk)
            )
            arrays = q_bthk, new.read, table_bp, index_bt, first_bt, sinks_h
            out = positions.attend(paged, *arrays)
            if not weighs:
                return out, new
            out, mass_btp = out
            return out, new, layout.summed(mass_btp, "heads")

        first_bt = None if window is None else window.first(index_bt)
        args = (
            q_bthk, k_btnk, v_btnk, unrotated, cache, first_bt, sinks_h, index_bt, is_written_bt, table_bp
        )
        has_kernel = numerics == "fast" and isinstance(cache, LayerOf) and (
            decode_attention.is_supported(cache.size, q_bthk.dtype, cache.pool.kv.dtype)
        )
        if not has_kernel:
            return generic(*args)
        kernel = functools.partial(_append_kernel, positions)
        return jax.lax.platform_dependent(*args, tpu=kernel, default=generic)

    def attend(q, k, v, cache, window=None, sinks_h=None, unrotated=None):
        cache, own_bp = cache if weighs else (_layer_cache(cache), table_bp)
        rows = index_bt, written_bt, own_bp
        run = _on_devices(layout, step, cache, rows, window, sinks_h, weighs)
        out, cache, *mass = run(q, k, v, unrotated, cache)
        return out, (cache, *mass) if weighs else _handed_on(cache)

    return attend


def _append_kernel(
    positions: Positions, q_bthk, k_btnk, v_btnk, unrotated, cache: LayerOf, first_bt, sinks_h, index_bt,
    is_written_bt, table_bp,
):
    """Runs the kernel, which takes one token of every slot, for each of the T tokens in turn."""
    b, _, h, k = q_bthk.shape
    if cache.pool.scale is not None or cache.pool.kv.dtype != q_bthk.dtype:
        unrotated = None  # the pool has other numbers than the rotated ones
    is_part = positions.count > 1
    places: Any = first_bt, index_bt, None
    if is_part:
        # The kernel looks at one position at least. Where a device has none, the merge leaves it out.
        end_bt, has_bt = positions.before(index_bt + 1), jnp.asarray(positions.has(index_bt))
        first_bt = jnp.zeros_like(end_bt) if first_bt is None else positions.before(first_bt)
        last_bt = jnp.maximum(end_bt - 1, 0)
        places = jnp.minimum(first_bt, last_bt), last_bt, has_bt.astype(jnp.int32)
        is_written_bt = is_written_bt * places[2]

    def token(pool, rows):
        q_bhk, k_bnk, v_bnk, unrotated, (first_b, index_b, has_b), is_written_b = rows
        if unrotated is None:
            *new, new_scale = pool.codes(k_bnk, v_bnk)
            rotation: Any = None
            new_bn2k: Any = jnp.stack(new, axis=2)
            rows_bnjk = q_bhk.reshape(b, k_bnk.shape[1], -1, k)
        else:
            rows_bnjk, *rotation = unrotated
            new_bn2k = new_scale = None
        out_bngk, kv, scale, log_total_bng = decode_attention.decode_attention(
            rows_bnjk, new_bn2k, new_scale, pool.kv, pool.scale,
            cache.index, index_b, is_written_b, table_bp, first_b, has_b,
            sinks_h=None if is_part else sinks_h, rotation=rotation,
        )
        by_head = lambda x: x.reshape(b, h, *x.shape[3:])
        return StackedKV(kv, scale), jax.tree.map(by_head, (out_bngk, log_total_bng))

    rows = q_bthk, k_btnk, v_btnk, unrotated, places, is_written_bt
    out_bthk: Any
    log_total_bth: Any
    if q_bthk.shape[1] == 1:
        pool, found = token(cache.pool, jax.tree.map(lambda x: x[:, 0], rows))
        out_bthk, log_total_bth = jax.tree.map(lambda x: x[:, None], found)
    else:
        by_token = lambda x: jnp.swapaxes(x, 0, 1)
        pool, found = jax.lax.scan(token, cache.pool, jax.tree.map(by_token, rows))
        out_bthk, log_total_bth = jax.tree.map(by_token, found)
    if is_part:
        is_empty = (end_bt <= first_bt)[..., None]
        out_bthk = jnp.where(is_empty[..., None], 0, out_bthk)
        log_total_bth = jnp.where(is_empty, attention.MASKED, log_total_bth)
        out_bthk = attention.merged(out_bthk, log_total_bth, positions.names, sinks_h).astype(q_bthk.dtype)
    return out_bthk, LayerOf(pool, cache.index)
