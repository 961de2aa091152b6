"""Key/value cache of fixed slots: an argument and a result of every program, never module state.

Unrolled layers have one `KV` each. Scanned layers have one array for all of them, [L,B,N,S,2K] with
every value beside its key, which goes through the scan and is written in place.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_tis.kernels import decode_attention
from jaxrl_tis.models import attention
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values [B,N,S,K] of one layer."""

    k: jax.Array
    v: jax.Array


def empty(config: ModelConfig, slots: int, length: int, dtype, unrolled: bool) -> Any:
    """Zeros for every layer: a tuple of KV when layers are unrolled, else one array, whose length
    is padded to whole tiles of the decode kernel."""
    shape = (slots, config.num_kv_heads, length, config.head_dim)
    if unrolled:
        return tuple(
            KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
        )
    rows = decode_attention.ROWS
    length = -(-length // rows) * rows
    shape = (config.num_layers, slots, config.num_kv_heads, length, 2 * config.head_dim)
    return jnp.zeros(shape, dtype)


def axes(x: jax.Array) -> tuple:
    """Logical axes of an array of the cache."""
    return (None,) * (x.ndim - 4) + ("batch", "kv_heads", None, None)


# `attend` of prefill: attends within rows and hands back the keys and values


def keep_rows(segment_ids_bt: jax.Array, unrolled: bool, layout: Layout):
    """For unrolled or for scanned layers."""
    heads_first = lambda x_btnk: jnp.swapaxes(x_btnk, 1, 2)

    def attend(q, k, v, _):
        kv = KV(heads_first(k), heads_first(v))
        kv = kv if unrolled else jnp.concatenate([kv.k, kv.v], axis=-1)
        return attention.row_attention(q, k, v, segment_ids_bt, layout), kv

    return attend


# `attend` of decode: writes one token per slot at its position, attends up to it


def append(positions_b: jax.Array):
    """For unrolled layers."""

    def attend(q_b1hk, k_b1nk, v_b1nk, cache: KV):
        rows = jnp.arange(positions_b.shape[0])
        k = cache.k.at[rows, :, positions_b].set(k_b1nk[:, 0].astype(cache.k.dtype))
        v = cache.v.at[rows, :, positions_b].set(v_b1nk[:, 0].astype(cache.v.dtype))
        mask_bs = jnp.arange(k.shape[2])[None] <= positions_b[:, None]
        return attention.cached_attention(q_b1hk, k, v, mask_bs), KV(k, v)

    return attend


def append_stacked(positions_b: jax.Array, layout: Layout):
    """For scanned layers: a kernel on TPU, `append` on the layer's slice elsewhere."""
    spec = lambda *axes: layout.sharding(axes).spec
    heads = spec("batch", "kv_heads", None, None)
    cache_spec = spec(None, "batch", "kv_heads", None, None)
    new, whole = spec("batch", "kv_heads", None), PartitionSpec()
    step = layout.shard(
        _append_one,
        in_specs=(heads, new, cache_spec, whole, spec("batch")), out_specs=(heads, cache_spec),
    )

    def attend(q_b1hk, k_b1nk, v_b1nk, cache_and_layer):
        b, _, n, k = k_b1nk.shape
        q_bngk = q_b1hk.reshape(b, n, -1, k)
        new_bnc = jnp.concatenate([k_b1nk[:, 0], v_b1nk[:, 0]], axis=-1)
        out_bngk, cache = step(q_bngk, new_bnc, *cache_and_layer, positions_b)
        return out_bngk.reshape(q_b1hk.shape), cache

    return attend


def _append_one(q_bngk, new_bnc, cache_lbnsc, layer, positions_b):
    return jax.lax.platform_dependent(
        q_bngk, new_bnc, cache_lbnsc, layer, positions_b,
        tpu=decode_attention.decode_attention, default=_append_slice,
    )


def _append_slice(q_bngk, new_bnc, cache_lbnsc, layer, positions_b):
    b, n, g, k = q_bngk.shape
    new_bnc = new_bnc.astype(cache_lbnsc.dtype)
    cache_lbnsc = cache_lbnsc.at[layer, jnp.arange(b), :, positions_b].set(new_bnc)
    k_bnsk, v_bnsk = jnp.split(cache_lbnsc[layer], 2, axis=-1)
    mask_bs = jnp.arange(k_bnsk.shape[2])[None] <= positions_b[:, None]
    q_b1hk = q_bngk.reshape(b, 1, n * g, k)
    out = attention.cached_attention(q_b1hk, k_bnsk, v_bnsk, mask_bs)
    return out.reshape(b, n, g, k), cache_lbnsc


def insert(cache: Any, prefix: Any, source_b: jax.Array) -> Any:
    """Copies row source_b[b] of the prefix into slot b and clears what the slot held beyond it, so
    that nothing of an earlier request can leak. Only such slots are touched: one with source -1
    keeps its content.

    Args:
      cache, prefix: the same structure, with [..., B,N,S,C] and [..., R,N,P,C] leaves, P <= S.
      source_b: [B] int32.
    """
    new_first = jnp.argsort(source_b < 0)

    def leaf(i, old, new):
        slot = new_first[i]
        row = jax.lax.dynamic_slice_in_dim(new, source_b[slot], 1, axis=-4).astype(old.dtype)
        pad = [(0, 0)] * new.ndim
        pad[-2] = (0, old.shape[-2] - new.shape[-2])
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.pad(row, pad), slot, axis=old.ndim - 4)

    body = lambda i, cache: jax.tree.map(lambda old, new: leaf(i, old, new), cache, prefix)
    return jax.lax.fori_loop(0, jnp.sum(source_b >= 0), body, cache)
