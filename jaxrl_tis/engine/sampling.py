"""What the engine draws from: temperature, top-k, top-p and min-p per row, and the keyed draw."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: 0 is greedy. Filters act on softmax(logits / temperature), in this order:
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: of those, keep the smallest set with at least this mass; 1 keeps all.
      min_p: of those, keep tokens at least min_p times as likely as the most likely one.
      stop_ids: a sampled token among these ends the sequence (and belongs to it).
      max_tokens: upper bound of sampled tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    max_tokens: int = 16

    def __post_init__(self):
        bounds = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p < 1,
            "max_tokens": self.max_tokens >= 1,
        }
        bad = [f"{name}={getattr(self, name)}" for name, ok in bounds.items() if not ok]
        if bad:
            raise ValueError(
                f"sampling parameters out of range: {', '.join(bad)}; need temperature >= 0, "
                "top_k >= 0, 0 < top_p <= 1, 0 <= min_p < 1, max_tokens >= 1"
            )

    @property
    def is_filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """SamplingParams of B rows as arrays [B]."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "SamplingRows":
        column = lambda name, dtype: np.array([getattr(p, name) for p in params], dtype)
        return cls(
            column("temperature", np.float32), column("top_k", np.int32),
            column("top_p", np.float32), column("min_p", np.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """One drawn token per row, arrays [B].

    Attributes:
      token: int32.
      logp_behav: log-probability under the filtered, renormalised distribution it was drawn from.
      logp_raw: log-probability at the same temperature without filters (temperature 1 if greedy),
        so that logp_raw - logp_behav is the log of the kept mass.
      entropy: nats, of the distribution it was drawn from.
    """

    token: jax.Array
    logp_behav: jax.Array
    logp_raw: jax.Array
    entropy: jax.Array


def _scaled(logits_bv: jax.Array, rows: SamplingRows) -> jax.Array:
    """(logits - their maximum) / temperature; temperature 1 for greedy rows."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    logits_bv = logits_bv.astype(jnp.float32)
    return (logits_bv - jnp.max(logits_bv, axis=-1, keepdims=True)) / temperature[:, None]


def _kept(scaled_bv: jax.Array, rows: SamplingRows) -> jax.Array:
    """[B,V] bool support after top-k, top-p and min-p; ties go to the lower token id."""
    order = jnp.argsort(-scaled_bv, axis=-1, stable=True)
    p = jax.nn.softmax(jnp.take_along_axis(scaled_bv, order, axis=-1), axis=-1)
    rank = jnp.arange(p.shape[1])[None]
    keep = (rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None]
    p = jnp.where(keep, p, 0.0)
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    mass_before = jnp.cumsum(p, axis=-1) - p
    keep &= (mass_before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    keep &= p >= rows.min_p[:, None] * p[:, :1]
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


def _weights(scaled_bv: jax.Array, raw_bv: jax.Array, rows: SamplingRows) -> jax.Array:
    """exp(scaled) [B,V] where a row's filters keep the token, 0 elsewhere; greedy rows keep one.

    Sorting the vocabulary and searching its maximum run only when a row asks for them.
    """
    is_greedy = (rows.temperature <= 0)[:, None]
    is_filtered = ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))[:, None] & ~is_greedy

    def filtered(weights_bv):
        return jnp.where(is_filtered & ~_kept(scaled_bv, rows), 0.0, weights_bv)

    def greedy(weights_bv):
        best_b = jnp.argmax(scaled_bv, axis=-1)
        is_best = jnp.arange(scaled_bv.shape[1])[None] == best_b[:, None]
        return jnp.where(is_greedy & ~is_best, 0.0, weights_bv)

    same = lambda weights_bv: weights_bv
    weights_bv = jax.lax.cond(jnp.any(is_filtered), filtered, same, raw_bv)
    return jax.lax.cond(jnp.any(is_greedy), greedy, same, weights_bv)


def distribution(logits_bv: jax.Array, rows: SamplingRows | SamplingParams) -> jax.Array:
    """Log-probabilities [B,V] of what `sample` draws from; -inf outside the support. One
    SamplingParams stands for all rows."""
    if isinstance(rows, SamplingParams):
        rows = SamplingRows.of([rows] * len(logits_bv))
    scaled_bv = _scaled(logits_bv, rows)
    weights_bv = _weights(scaled_bv, jnp.exp(scaled_bv), rows)
    total_b1 = jnp.sum(weights_bv, axis=-1, keepdims=True)
    return jnp.where(weights_bv > 0, scaled_bv - jnp.log(total_b1), -jnp.inf)


def _first_above(weights_bn: jax.Array, u_b: jax.Array) -> jax.Array:
    """Index [B] of an inverse-CDF draw; an index of weight zero is never returned."""
    cumulative = jnp.cumsum(weights_bn, axis=-1)
    total = cumulative[:, -1]
    target = jnp.minimum(u_b * total, jnp.nextafter(total, 0.0))
    return jnp.argmax((cumulative > target[:, None]) & (weights_bn > 0), axis=-1)


def _draw(weights_bv: jax.Array, u_b2: jax.Array) -> jax.Array:
    """Inverse CDF in two levels, blocks and tokens within the block, one uniform for each."""
    b, v = weights_bv.shape
    blocks = jnp.pad(weights_bv, ((0, 0), (0, -v % BLOCK))).reshape(b, -1, BLOCK)
    block = _first_above(jnp.sum(blocks, axis=-1), u_b2[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + _first_above(within, u_b2[:, 1])).astype(jnp.int32)


def row_keys(seeds_b: jax.Array, requests_b: jax.Array) -> jax.Array:
    """Raw key data [B,2] of fold_in(key(seed), request) for uint32 seeds and request hashes."""
    key = lambda seed, request: jax.random.fold_in(jax.random.key(seed), request)
    return jax.random.key_data(jax.vmap(key)(seeds_b, requests_b))


def sample(
    logits_bv: jax.Array, rows: SamplingRows, keys_b2: jax.Array, positions_b: jax.Array
) -> Sample:
    """Draws one token per row with the key fold_in(fold_in(seed, request), position).

    Args:
      logits_bv: [B,V] float32.
      keys_b2: [B,2] uint32 from `row_keys`.
      positions_b: [B] int32 absolute position of the token to be drawn.
    """
    scaled_bv = _scaled(logits_bv, rows)
    raw_bv = jnp.exp(scaled_bv)
    weights_bv = _weights(scaled_bv, raw_bv, rows)
    fold = lambda k, position: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(k), position), (2,)
    )
    token = _draw(weights_bv, jax.vmap(fold)(keys_b2, positions_b))
    total = jnp.sum(weights_bv, axis=-1)
    scaled = jnp.take_along_axis(scaled_bv, token[:, None], axis=-1)[:, 0]
    # entropy = log(total) - sum(w * scaled) / total; a weight of 0 may stand beside a scaled -inf.
    moment = jnp.sum(weights_bv * jnp.where(weights_bv > 0, scaled_bv, 0.0), axis=-1)
    return Sample(
        token=token,
        logp_behav=scaled - jnp.log(total),
        logp_raw=scaled - jnp.log(jnp.sum(raw_bv, axis=-1)),
        entropy=jnp.log(total) - moment / total,
    )
