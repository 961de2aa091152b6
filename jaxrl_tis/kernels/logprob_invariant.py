"""Log-probs with the fixed summation order of tiles.py, bitwise equal to the sampler's."""

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import logprob_chunked, tiles
from jaxrl_tis.kernels.head import tiled_logits

gradients = logprob_chunked.gradients


def finished(
    head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept, size, chunk, with_entropy,
    with_collision, axes: tuple, count: int,
):
    """Returns (logp, entropy, collision, others) and the normalizer [B,N] over the whole
    vocabulary.

    Each of `count` devices along mesh axes holds a part of the vocabulary. `token_logprob` explains
    the other arguments.
    """
    split, join = logprob_chunked.chunks(targets_bn.shape, chunk)

    def part(inputs):
        x_bcd, targets_bc, temperature_bc, ids_bck, kept = inputs
        logits_bcv = logprob_chunked.restrict(tiled_logits(x_bcd, head), kept, size)
        v = logits_bcv.shape[-1]
        rows = (
            logits_bcv.reshape(-1, v), targets_bc.reshape(-1), temperature_bc.reshape(-1),
            ids_bck.reshape(targets_bc.size, ids_bck.shape[-1]),
        )
        plan: tuple = with_entropy, with_collision, axes, count
        results = tiles.by_rows(lambda *tile: _tile(*tile, *plan), *rows)
        return jax.tree.map(lambda x: x.reshape(*targets_bc.shape, *x.shape[1:]), results)

    kept = logprob_chunked.split_kept(split, kept)
    inputs = split(x_bnd), split(targets_bn), split(temperature_bn, 1), split(ids_bnk), kept
    *scores, normaliser = map(join, jax.lax.map(part, inputs))
    return tuple(scores), normaliser


def _tile(logits_rv, targets_r, temperature_r, ids_rk, with_entropy, with_collision, axes, count):
    """Returns the scores of a tile as engine/sampling.py computes them: it subtracts the largest
    logit before dividing by the temperature."""
    top_r = jnp.max(logits_rv, axis=-1)
    top_r = jax.lax.pmax(top_r, axes) if axes else top_r
    scaled_rv = tiles.scaled(logits_rv - top_r[:, None], temperature_r[:, None])
    weights_rv = jnp.exp(scaled_rv)
    add = lambda x_rv: tiles.vocabulary_sum(x_rv, axes, count)
    is_target_rv = jnp.arange(logits_rv.shape[1])[None] == targets_r[:, None]
    total_r = add(weights_rv)
    logp_r = add(jnp.where(is_target_rv, scaled_rv, 0.0)) - jnp.log(total_r)
    entropy_r = collision_r = jnp.zeros_like(logp_r)
    if with_entropy:
        entropy_r = jnp.log(total_r) - add(weights_rv * scaled_rv) / total_r
    if with_collision:
        collision_r = add(weights_rv * weights_rv) / total_r**2
    others_rk = logprob_chunked.logits_at(scaled_rv, ids_rk)
    others_rk = jax.lax.psum(others_rk, axes) if axes else others_rk
    others_rk = others_rk - jnp.log(total_r)[:, None]
    return logp_r, entropy_r, collision_r, others_rk, top_r / temperature_r + jnp.log(total_r)
