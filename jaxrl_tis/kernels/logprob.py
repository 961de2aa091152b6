"""Log-probabilities and entropies of given tokens without ever holding [B,T,V] logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def token_logprob(
    head: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    x_bnd: jax.Array,
    targets_bn: jax.Array,
    temperature_bn: jax.Array,
    chunk: int,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-softmax of head(params, x) / temperature at the targets, in chunks of positions.

    At most [B, ceil(chunk / B), V] logits are alive. The backward pass computes each chunk's logits
    again (a single chunk keeps them) and, from the saved normaliser, their gradient in one pass.

    Args:
      head: (params, x [..., D]) -> logits [..., V] float32.
      params: pytree of the head's parameters.
      x_bnd: [B,N,D] hidden states; targets_bn: [B,N] int32 tokens they predict.
      temperature_bn: [B,N] positive; gets no gradient.
      chunk: positions per chunk, summed over rows.
      with_entropy: also compute entropies; otherwise the second result is zeros.

    Returns: (logp_bn, entropy_bn) float32 in nats, both differentiable in x and the parameters.
    """
    return _forward(head, params, x_bnd, targets_bn, temperature_bn, chunk, with_entropy)[0]


def _forward(head, params, x_bnd, targets_bn, temperature_bn, chunk, with_entropy):
    split, join = _chunks(targets_bn.shape, chunk)

    def body(carry, inputs):
        x_bcd, targets_bc, temperature = inputs
        logits = head(params, x_bcd) / temperature[..., None]
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        normaliser = top[..., 0] + jnp.log(total)
        logp = jnp.take_along_axis(logits, targets_bc[..., None], axis=-1)[..., 0] - normaliser
        entropy = jnp.zeros_like(logp)
        if with_entropy:
            entropy = jnp.log(total) - jnp.sum(weights * (logits - top), axis=-1) / total
        return carry, (logp, entropy, normaliser, logits if is_single else None)

    x_cbnd = split(x_bnd)
    is_single = len(x_cbnd) == 1
    _, (*results, logits) = jax.lax.scan(
        body, None, (x_cbnd, split(targets_bn), split(temperature_bn, 1.0))
    )
    logp, entropy, normaliser = map(join, results)
    saved = params, x_bnd, targets_bn, temperature_bn, normaliser, entropy, logits
    return (logp, entropy), saved


def _backward(head, chunk, with_entropy, saved, gradients):
    params, x_bnd, targets_bn, temperature_bn, normaliser_bn, entropy_bn, kept = saved
    split, join = _chunks(targets_bn.shape, chunk)

    def body(total, inputs):
        (x_bcd, targets, temperature, normaliser, entropy, g_logp, g_entropy), scaled = inputs
        logits, pull = jax.vjp(head, params, x_bcd)
        inverse = 1 / temperature[..., None]
        scaled = logits * inverse if scaled is None else scaled
        logp = scaled - normaliser[..., None]
        # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy).
        factor = g_logp[..., None]
        if with_entropy:
            factor = factor + g_entropy[..., None] * (logp + entropy[..., None])
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
        gradient = jnp.where(is_target, g_logp[..., None], 0.0) - jnp.exp(logp) * factor
        params_bar, x_bar = pull(gradient * inverse)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, params_bar), x_bar

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
    fields = (normaliser_bn, entropy_bn, *gradients)
    pieces = (split(x_bnd), split(targets_bn), split(temperature_bn, 1.0), *map(split, fields))
    total, x_bar = jax.lax.scan(body, zeros, (pieces, kept))
    params_bar = jax.tree.map(lambda t, w: t.astype(w.dtype), total, params)
    return params_bar, join(x_bar), None, jnp.zeros_like(temperature_bn)


def collision_probability(
    head: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    x_bnd: jax.Array,
    temperature_bn: jax.Array,
    chunk: int,
) -> jax.Array:
    """[B,N] sum over the vocabulary of softmax(head(params, x) / temperature)^2, without gradient.

    The chance that two draws agree. Arguments as in `token_logprob`.
    """
    split, join = _chunks(x_bnd.shape[:2], chunk)

    def body(inputs):
        x_bcd, temperature = inputs
        logp = jax.nn.log_softmax(head(params, x_bcd) / temperature[..., None])
        return jnp.sum(jnp.exp(2 * logp), axis=-1)

    return jax.lax.stop_gradient(join(jax.lax.map(body, (split(x_bnd), split(temperature_bn, 1.0)))))


def _chunks(shape: tuple[int, int], chunk: int):
    """(split, join): [B,N,...] <-> [chunks, B, positions, ...], the last one padded."""
    b, n = shape
    size = min(n, max(1, chunk // b))

    def split(x, padding=0):
        pad = ((0, 0), (0, -n % size)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=padding)
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :n]

    return split, join


token_logprob.defvjp(_forward, _backward)
