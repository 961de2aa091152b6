"""Key/value cache of fixed slots: an argument and a result of every program, never module state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.models import attention
from jaxrl_tis.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values [B,N,S,K] of one layer ([L,B,N,S,K] when layers are scanned)."""

    k: jax.Array
    v: jax.Array


def empty(config: ModelConfig, slots: int, length: int, dtype, unrolled: bool) -> Any:
    """Zeros for every layer: a tuple of KV when layers are unrolled, else one stacked KV."""
    shape = (slots, config.num_kv_heads, length, config.head_dim)
    if unrolled:
        return tuple(
            KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
        )
    shape = (config.num_layers, *shape)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def keep_rows(segment_ids_bt: jax.Array):
    """`attend` of prefill: attends within rows and hands back the keys and values."""
    mask_bts = attention.row_mask(segment_ids_bt)
    heads_first = lambda x_btnk: jnp.swapaxes(x_btnk, 1, 2)
    return lambda q, k, v, _: (
        attention.attention(q, k, v, mask_bts), KV(heads_first(k), heads_first(v))
    )


def append(positions_b: jax.Array):
    """`attend` of decode: writes one token per slot at its position, attends up to it."""

    def attend(q_b1hk, k_b1nk, v_b1nk, cache: KV):
        rows = jnp.arange(positions_b.shape[0])
        k = cache.k.at[rows, :, positions_b].set(k_b1nk[:, 0].astype(cache.k.dtype))
        v = cache.v.at[rows, :, positions_b].set(v_b1nk[:, 0].astype(cache.v.dtype))
        mask_bs = jnp.arange(k.shape[2])[None] <= positions_b[:, None]
        return attention.cached_attention(q_b1hk, k, v, mask_bs), KV(k, v)

    return attend


def insert(cache: Any, prefix: Any, source_b: jax.Array) -> Any:
    """Copies row source_b[b] of the prefix into slot b and clears what the slot held beyond it, so
    that nothing of an earlier request can leak; a slot with source -1 keeps its content.

    Args:
      cache, prefix: the same structure, with [..., B,N,S,K] and [..., R,N,P,K] leaves, P <= S.
      source_b: [B] int32.
    """
    is_new = (source_b >= 0).reshape(-1, 1, 1, 1)

    def leaf(old, new):
        new = jnp.take(new, jnp.maximum(source_b, 0), axis=-4).astype(old.dtype)
        pad = [(0, 0)] * new.ndim
        pad[-2] = (0, old.shape[-2] - new.shape[-2])
        return jnp.where(is_new, jnp.pad(new, pad), old)

    return jax.tree.map(leaf, cache, prefix)
