"""Records of a token's sampling distribution: its likeliest tokens and its support."""

import jax
import jax.numpy as jnp

from jaxrl_tis.engine.shards import Shards

BLOCK = 128


def top(scores_bv: jax.Array, n: int, shards: Shards) -> tuple[jax.Array, jax.Array]:
    """Finds the n tokens with the highest scores.

    Args:
      scores_bv: [B,V] scores of this device's part of the vocabulary, V >= n; -inf outside the
        support.

    Returns: their ids [B,n], the lower id first among equals, and their scores [B,n]. Where fewer
    than n tokens are possible, the id is -1 and the score -inf.
    """
    scores_bn, local_bn = jax.lax.top_k(scores_bv, n)
    parts = shards.gather(scores_bn), shards.gather(local_bn + shards.index * scores_bv.shape[1])
    scores, ids = (jnp.moveaxis(x, 0, 1).reshape(len(scores_bv), -1) for x in parts)
    scores, place = jax.lax.top_k(scores, n)
    ids = jnp.take_along_axis(ids, place, axis=1)
    return jnp.where(scores == -jnp.inf, -1, ids), scores


def support(is_in_bv: jax.Array, n: int, shards: Shards) -> jax.Array:
    """Lists the ids [B,n] of the tokens with is_in, ascending, padded with -1. A row with more than
    n such tokens is all -1.

    Nothing is sorted. The j-th token lies in the first block of the vocabulary up to which j tokens
    are in, and every device finds the tokens of its own part.
    """
    b, v = is_in_bv.shape
    blocks = jnp.pad(is_in_bv, ((0, 0), (0, -v % BLOCK))).reshape(b, -1, BLOCK)
    ends_bm = jnp.cumsum(jnp.sum(blocks, axis=-1, dtype=jnp.int32), axis=-1)
    counts_sb = shards.gather(ends_bm[:, -1])
    is_before = (jnp.arange(shards.count) < shards.index)[:, None]
    before_b1 = jnp.sum(jnp.where(is_before, counts_sb, 0), axis=0)[:, None]
    rank_bn = jnp.arange(1, n + 1)[None] - before_b1
    is_here = (rank_bn > 0) & (rank_bn <= ends_bm[:, -1:])
    block_bn = jax.vmap(jnp.searchsorted)(ends_bm, rank_bn)
    block_bn = jnp.minimum(block_bn, blocks.shape[1] - 1)
    found = jnp.take_along_axis(blocks, block_bn[..., None], axis=1)
    ends_in = jnp.cumsum(found, axis=-1, dtype=jnp.int32)
    earlier = jnp.take_along_axis(ends_bm, block_bn, axis=1) - ends_in[..., -1]
    place = jnp.argmax(ends_in == (rank_bn - earlier)[..., None], axis=-1)
    ids = shards.index * v + block_bn * BLOCK + place
    ids = shards.sum(jnp.where(is_here, ids + 1, 0)) - 1
    return jnp.where(jnp.sum(counts_sb, axis=0)[:, None] > n, -1, ids.astype(jnp.int32))
