"""Grouped-query attention: within rows (training, prefill) and against a cache (decode)."""

import jax
import jax.numpy as jnp

MASKED = -1e30


def row_mask(segment_ids_bt: jax.Array) -> jax.Array:
    """[B,T,T] bool: token t may look at s <= t of its own segment; segment 0 is padding."""
    t = segment_ids_bt.shape[1]
    same = segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]
    return same & jnp.tril(jnp.ones((t, t), bool))[None]


def attention(q_bthk: jax.Array, k_bsnk: jax.Array, v_bsnk: jax.Array, mask_bts: jax.Array):
    """Softmax attention in float32 with H query heads sharing N key/value heads.

    Args:
      q_bthk: [B,T,H,K] queries; k_bsnk, v_bsnk: [B,S,N,K] keys and values, H a multiple of N.
      mask_bts: [B,T,S] bool, True where t may attend to s. A query that may attend to nothing
        gets a finite, meaningless row.

    Returns: [B,T,H,K] in q's dtype.
    """
    b, t, h, k = q_bthk.shape
    n = k_bsnk.shape[2]
    q_btngk = q_bthk.reshape(b, t, n, h // n, k)
    scores = jnp.einsum(
        "btngk,bsnk->bngts", q_btngk, k_bsnk.astype(q_bthk.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask_bts[:, None, None], scores * k**-0.5, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(q_bthk.dtype)
    out = jnp.einsum(
        "bngts,bsnk->btngk", probs, v_bsnk.astype(q_bthk.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, h, k).astype(q_bthk.dtype)


def cached_attention(q_b1hk: jax.Array, k_bnsk: jax.Array, v_bnsk: jax.Array, mask_bs: jax.Array):
    """The same for one query per row against a cache that keeps the positions of a head together.

    Args:
      q_b1hk: [B,1,H,K] queries; k_bnsk, v_bnsk: [B,N,S,K] keys and values, H a multiple of N.
      mask_bs: [B,S] bool, True where the row's query may attend to s.

    Returns: [B,1,H,K] in q's dtype.
    """
    b, _, h, k = q_b1hk.shape
    n = k_bnsk.shape[1]
    q_bngk = q_b1hk.reshape(b, n, h // n, k)
    # With S ahead of the G query heads of a group, XLA reads the cache in place on CPU.
    scores = jnp.einsum(
        "bnsk,bngk->bnsg", k_bnsk.astype(q_b1hk.dtype), q_bngk,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask_bs[:, None, :, None], scores * k**-0.5, MASKED)
    probs = jax.nn.softmax(scores, axis=2).astype(q_b1hk.dtype)
    out = jnp.einsum(
        "bnsg,bnsk->bngk", probs, v_bnsk.astype(q_b1hk.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, 1, h, k).astype(q_b1hk.dtype)
