"""Products of rows, sorted by expert, with the matrix of their expert."""

import jax
import jax.numpy as jnp

from jaxrl_tis.models import quant


def grouped_matmul(x_mi: jax.Array, w, sizes_e: jax.Array) -> jax.Array:
    """Returns [M,o]: row m times the matrix of its group; 0 after the last group."""
    ends_e = jnp.cumsum(sizes_e)
    group_m = jnp.searchsorted(ends_e, jnp.arange(len(x_mi)), side="right")
    each = jax.vmap(lambda w: quant.dot(x_mi, w))(w)
    is_own = jax.nn.one_hot(group_m, len(sizes_e), dtype=bool)
    return jnp.sum(jnp.where(is_own.T[..., None], each, 0), axis=0)
