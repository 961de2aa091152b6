"""Log-probabilities and entropies of given tokens without ever holding [B,T,V] logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def token_logprob(
    x_bnd: jax.Array,
    targets_bn: jax.Array,
    temperature_b: jax.Array,
    head: Callable[[jax.Array], jax.Array],
    chunk: int,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-softmax of head(x) / temperature at the targets, in chunks of positions.

    At most [B, ceil(chunk / B), V] logits are alive; the backward pass recomputes each chunk.

    Args:
      x_bnd: [B,N,D] hidden states; targets_bn: [B,N] int32 tokens they predict.
      temperature_b: [B] positive.
      head: x [..., D] -> logits [..., V] float32; closes over the head's parameters.
      chunk: positions per chunk, summed over rows.
      with_entropy: also compute entropies; otherwise the second result is zeros.

    Returns: (logp_bn, entropy_bn) float32, both differentiable in x and the head.
    """
    b, n, _ = x_bnd.shape
    size = min(n, max(1, chunk // b))
    pad = -n % size
    x_bnd = jnp.pad(x_bnd, ((0, 0), (0, pad), (0, 0)))
    targets_bn = jnp.pad(targets_bn, ((0, 0), (0, pad)))
    split = lambda a: jnp.moveaxis(a.reshape(b, -1, size, *a.shape[2:]), 1, 0)

    @jax.checkpoint
    def body(carry, inputs):
        x_bcd, targets_bc = inputs
        logits = head(x_bcd) / temperature_b[:, None, None]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, targets_bc[..., None], axis=-1)[..., 0] - normaliser
        if not with_entropy:
            return carry, (logp, jnp.zeros_like(logp))
        logp_bcv = logits - normaliser[..., None]
        return carry, (logp, -jnp.sum(jnp.exp(logp_bcv) * logp_bcv, axis=-1))

    _, (logp, entropy) = jax.lax.scan(body, None, (split(x_bnd), split(targets_bn)))
    join = lambda a: jnp.moveaxis(a, 0, 1).reshape(b, -1)[:, :n]
    return join(logp), join(entropy)
