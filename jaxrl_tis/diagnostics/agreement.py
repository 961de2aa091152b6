"""Measures whether the sampling filters of sampler and learner keep the same tokens.

For runs that record the kept tokens. Every function is pure, works under jit and has no gradient.
Metrics are scalars named mismatch/<metric>, 0 for an empty mask. `routes` compares experts.
"""

import chex
import jax.numpy as jnp

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import ratios


def _sizes_of_ids(a_btk, b_btk):
    """Returns the sizes of both sets of ids >= 0 and of their intersection, [B, T] each."""
    both = jnp.sort(jnp.concatenate([a_btk, b_btk], axis=-1), axis=-1)
    is_twice = (both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)
    return jnp.sum(a_btk >= 0, axis=-1), jnp.sum(b_btk >= 0, axis=-1), jnp.sum(is_twice, axis=-1)


def _sizes_of_bits(a_btv, b_btv):
    """Returns the sizes of both sets of membership bits and of their intersection, [B, T] each."""
    return jnp.sum(a_btv, axis=-1), jnp.sum(b_btv, axis=-1), jnp.sum(a_btv & b_btv, axis=-1)


def kept_metrics(
    kept_old: chex.Array, kept_behav: chex.Array, tokens: chex.Array, mask: chex.Array
) -> dict[str, chex.Array]:
    """Measures how well the token sets that a sampling filter keeps (top-k, top-p, min-p) agree.

    Both arrays hold sets in the same form: ids, int [B, T, K], each id once and empty slots
    negative (the widths may differ), or membership bits, bool [B, T, V]. A side without any kept
    token filtered nothing. Ids are sorted: run it only every so many steps.

    Args:
      kept_old: the set that the learner would keep.
      kept_behav: the set that the sampler sampled from.
      tokens: [B, T] int, the sampled tokens.
      mask: [B, T] tokens whose sets both sides recorded.

    Returns mismatch/kept_jaccard, the mean size of the intersection over that of the union (1 where
    neither side filtered, 0 where one side did); mismatch/kept_identical, the share of tokens with
    equal sets; mismatch/kept_token_outside, the share of sampled tokens that the learner's filter
    would drop, whose filtered log-prob is -inf.
    """
    chex.assert_rank([kept_old, kept_behav], 3)
    chex.assert_equal_shape([tokens, mask])
    chex.assert_equal_shape_prefix([kept_old, kept_behav, mask], 2)
    is_bits = [kept.dtype == bool for kept in (kept_old, kept_behav)]
    chex.assert_equal(*is_bits)
    if all(is_bits):
        old_bt, behav_bt, both_bt = _sizes_of_bits(kept_old, kept_behav)
        is_inside_bt = jnp.take_along_axis(kept_old, tokens[..., None], axis=-1)[..., 0]
    else:
        old_bt, behav_bt, both_bt = _sizes_of_ids(kept_old, kept_behav)
        is_inside_bt = jnp.any(kept_old == tokens[..., None], axis=-1)
    union_bt = old_bt + behav_bt - both_bt
    jaccard_bt = jnp.where(union_bt > 0, both_bt / jnp.maximum(union_bt, 1), 1.0)
    metrics = {
        "jaccard": ratios.masked_mean(jaccard_bt, mask),
        "identical": ratios.masked_mean(union_bt == both_bt, mask),
        "token_outside": ratios.masked_mean(~is_inside_bt & (old_bt > 0), mask),
    }
    return mismatch.detached(metrics, "mismatch/kept_")
