"""The exact KL between two hidden states under one output head, in chunks of positions."""

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import Kept, chunks, restrict, split_kept


def token_kl(
    head: Head, x_bnd: jax.Array, target_bnd: jax.Array, temperature_bn: jax.Array,
    mask_bn: jax.Array, chunk: int, kept: Kept | None = None,
) -> jax.Array:
    """Returns KL(p || q) [B,N] of each token over the whole vocabulary, in nats and float32.

    p is softmax(head(x) / temperature), and q the same of `target`. The gradient flows to x and to
    the head through p alone: d KL / d logit_v = p_v (log p_v - log q_v - KL) / temperature. The
    backward pass computes the logits again, so that no more than two blocks [chunk, V] and the
    head's gradient are in memory.

    Args:
      head: the output head.
      x_bnd, target_bnd: [B,N,D] hidden states.
      temperature_bn: [B,N] positive; gets no gradient.
      mask_bn: [B,N] bool. Other tokens have KL 0 and add nothing to any gradient, NaN included.
      chunk: positions per chunk, summed over the rows.
      kept: token sets that restrict both distributions.
    """
    b, n = mask_bn.shape
    split, join = chunks((b, n), chunk)
    inputs = (
        split(x_bnd), split(jax.lax.stop_gradient(target_bnd)), split(temperature_bn, 1),
        split(mask_bn), split_kept(split, kept),
    )

    def log_probs(head, x, temperature, mask, kept):
        logits = head.logits(jnp.where(mask[..., None], x, 0)) / temperature[..., None]
        return jax.nn.log_softmax(restrict(logits, kept, head.vocab_size))

    @jax.checkpoint
    def body(head, inputs):
        x, target, temperature, mask, kept = inputs
        logp = log_probs(head, x, temperature, mask, kept)
        logq = log_probs(jax.lax.stop_gradient(head), target, temperature, mask, kept)
        return jnp.where(mask, jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1), 0.0)

    return join(jax.lax.map(lambda x: body(head, x), inputs))
