"""Moments of softmax(head(x) / temperature) and their gradients in chunks of positions, by XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Stands for the logit of a token outside the distribution: its weight is exactly 0, and no
# difference of two of them is NaN as it is with -inf.
EXCLUDED = -1e30
ELSEWHERE = 2**30  # a token id that is in no device's vocabulary


class Kept(NamedTuple):
    """Token sets that restrict the distributions, such as the sampler's top-p sets.

    Attributes:
      ids_bnk: [B,N,K] int32 token ids, -1 if a set is smaller than K. A target outside its set gets
        a log-prob of about -1e30.
      overflow_bn: [B,N] bool, True if the set has more than K tokens and does not restrict.
    """

    ids_bnk: jax.Array
    overflow_bn: jax.Array


class Moments(NamedTuple):
    """Sums of weight = exp(logit - top) over a part of the vocabulary, [B,N] float32 each.

    Attributes:
      top: the largest logit.
      total, dot, squares: sums of weight, weight * (logit - top) and weight^2; the last two are
        zeros if not requested.
      target: logit of the target, 0 if it is in another part.
      others: [B,N,K] logits of other tokens, 0 if in another part.
    """

    top: jax.Array
    total: jax.Array
    dot: jax.Array
    squares: jax.Array
    target: jax.Array
    others: jax.Array


class Fields(NamedTuple):
    """Inputs of the backward pass: [B,N] for each token, [B,N,K] for other tokens."""

    targets: jax.Array
    temperature: jax.Array
    normaliser: jax.Array
    entropy: jax.Array
    g_logp: jax.Array
    g_entropy: jax.Array
    others: jax.Array
    g_others: jax.Array

    def is_live(self) -> jax.Array:
        """Whether each token has a gradient; other tokens may hold NaN and must not be read."""
        is_other = jnp.any(self.g_others != 0, axis=-1)
        return (self.g_logp != 0) | (self.g_entropy != 0) | is_other

    def local(self, local_ids) -> "Fields":
        """Returns the fields with all token ids as in `Cut.local_ids`."""
        return self._replace(targets=local_ids(self.targets), others=local_ids(self.others))


def moments(
    head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept, size, chunk, with_entropy,
    with_collision,
):
    """Returns (Moments, logits [1,B,N,V] of a single chunk or None). The first `size` columns of
    the head are tokens. `token_logprob` explains the other arguments."""
    split, join = chunks(targets_bn.shape, chunk)
    head = head.cast(x_bnd)[0]

    def body(carry, inputs):
        x, targets, temperature, ids, kept = inputs
        logits = restrict(head.logits(x) / temperature[..., None], kept, size)
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        zeros = jnp.zeros(targets.shape, jnp.float32)
        dot = jnp.sum(weights * (logits - top), axis=-1) if with_entropy else zeros
        squares = jnp.sum(weights * weights, axis=-1) if with_collision else zeros
        target = logits_at(logits, targets[..., None])[..., 0]
        total, others = jnp.sum(weights, axis=-1), logits_at(logits, ids)
        sums = Moments(top[..., 0], total, dot, squares, target, others)
        return carry, (sums, logits if is_single else None)

    inputs = (
        split(x_bnd), split(targets_bn), split(temperature_bn, 1), split(ids_bnk),
        split_kept(split, kept),
    )
    is_single = len(inputs[0]) == 1
    _, (sums, logits) = jax.lax.scan(body, None, inputs)
    return Moments(*map(join, sums)), logits


def gradients(head, x_bnd, fields: Fields, kept, size, logits, chunk, with_entropy):
    """Returns the gradients of x and, in float32, of the head's weight."""
    b, n = fields.targets.shape
    split, join = chunks((b, n), chunk)
    head = head.cast(x_bnd)[0]

    def body(total, inputs):
        x, f, kept, logits = inputs
        is_live = f.is_live()[..., None]
        x = jnp.where(is_live, x, 0)
        inverse = 1 / f.temperature[..., None]
        if logits is None:
            logits = restrict(head.logits(x) * inverse, kept, size)
        logp = logits - f.normaliser[..., None]
        # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy).
        factor = (f.g_logp + jnp.sum(f.g_others, axis=-1))[..., None]
        if with_entropy:
            factor = factor + f.g_entropy[..., None] * (logp + f.entropy[..., None])
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == f.targets[..., None]
        gradient = jnp.where(is_target, f.g_logp[..., None], 0.0) - jnp.exp(logp) * factor
        if f.others.shape[-1]:
            gradient = gradient.at[places(f.others)].add(f.g_others, mode="drop")
        x_bar, weight_bar = head.pull(x, jnp.where(is_live, gradient * inverse, 0.0))
        return total + weight_bar, x_bar

    fields = Fields(*map(split, fields))._replace(temperature=split(fields.temperature, 1))
    zeros = jnp.zeros(head.weight.shape, jnp.float32)
    inputs = split(x_bnd), fields, split_kept(split, kept), logits
    weight_bar, x_bar = jax.lax.scan(body, zeros, inputs)
    return join(x_bar), weight_bar


def places(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the indices in [B,N,V] of tokens [B,N,K]."""
    b, n = jnp.ogrid[: ids.shape[0], : ids.shape[1]]
    return b[..., None], n[..., None], ids


def logits_at(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the logits [B,N,K] of tokens, 0 for an id that is ELSEWHERE."""
    picked = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
    return jnp.where(ids == ELSEWHERE, 0.0, picked)


def restrict(logits: jax.Array, kept: Kept | None, size: jax.Array | int) -> jax.Array:
    """Returns logits that exclude tokens outside the kept sets and columns after the first `size`.
    Ids of other shards are ignored."""
    vocab = logits.shape[-1]
    if not isinstance(size, int):
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        logits = jnp.where(ids < size, logits, EXCLUDED)
    if kept is None:
        return logits
    in_range = (kept.ids_bnk >= 0) & (kept.ids_bnk < vocab)
    is_kept = jnp.broadcast_to(kept.overflow_bn[..., None], logits.shape)
    ids = jnp.where(in_range, kept.ids_bnk, vocab)
    is_kept = is_kept.at[places(ids)].set(True, mode="drop")
    return jnp.where(is_kept, logits, EXCLUDED)


def split_kept(split, kept: Kept | None) -> Kept | None:
    return None if kept is None else Kept(split(kept.ids_bnk, -1), split(kept.overflow_bn, True))


def chunks(shape: tuple[int, int], chunk: int):
    """Returns (split, join): [B,N,...] <-> [chunks, B, positions, ...]; the last chunk is
    padded."""
    b, n = shape
    size = min(n, max(1, chunk // b))
    count = -(-n // size)

    def split(x, fill=0):
        width = ((0, 0), (0, count * size - n)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, width, constant_values=fill)
        return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, count * size, *x.shape[3:])[:, :n]

    return split, join
