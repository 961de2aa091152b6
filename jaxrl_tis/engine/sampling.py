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


def _raw(logits_bv: jax.Array, rows: SamplingRows) -> jax.Array:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return jax.nn.log_softmax(logits_bv.astype(jnp.float32) / temperature[:, None], axis=-1)


def _kept(logp_bv: jax.Array, rows: SamplingRows) -> jax.Array:
    """[B,V] bool support after top-k, top-p and min-p; ties go to the lower token id."""
    order = jnp.argsort(-logp_bv, axis=-1, stable=True)
    p = jnp.exp(jnp.take_along_axis(logp_bv, order, axis=-1))
    rank = jnp.arange(p.shape[1])[None]
    keep = (rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None]
    p = jnp.where(keep, p, 0.0)
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    mass_before = jnp.cumsum(p, axis=-1) - p
    keep &= (mass_before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    keep &= p >= rows.min_p[:, None] * p[:, :1]
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


def _filter(logp_bv: jax.Array, best_b: jax.Array, rows: SamplingRows) -> jax.Array:
    greedy = jnp.arange(logp_bv.shape[1])[None] == best_b[:, None]
    keep = jnp.where((rows.temperature > 0)[:, None], _kept(logp_bv, rows), greedy)
    return jax.nn.log_softmax(jnp.where(keep, logp_bv, -jnp.inf), axis=-1)


def _distribution(logp_raw_bv: jax.Array, best_b: jax.Array, rows: SamplingRows) -> jax.Array:
    plain = (rows.temperature > 0) & (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p <= 0)
    filtered = jax.lax.cond(
        jnp.all(plain), lambda x: x, lambda x: _filter(x, best_b, rows), logp_raw_bv
    )
    return jnp.where(plain[:, None], logp_raw_bv, filtered)


def distribution(logits_bv: jax.Array, rows: SamplingRows | SamplingParams) -> jax.Array:
    """Log-probabilities [B,V] of what `sample` draws from; -inf outside the support. One
    SamplingParams stands for all rows."""
    if isinstance(rows, SamplingParams):
        rows = SamplingRows.of([rows] * len(logits_bv))
    return _distribution(_raw(logits_bv, rows), jnp.argmax(logits_bv, axis=-1), rows)


def _first_above(weights_bn: jax.Array, u_b: jax.Array) -> jax.Array:
    """Index [B] of an inverse-CDF draw; an index of weight zero is never returned."""
    cumulative = jnp.cumsum(weights_bn, axis=-1)
    total = cumulative[:, -1]
    target = jnp.minimum(u_b * total, jnp.nextafter(total, 0.0))
    return jnp.argmax((cumulative > target[:, None]) & (weights_bn > 0), axis=-1)


def _draw(logp_bv: jax.Array, u_b2: jax.Array) -> jax.Array:
    """Inverse CDF in two levels, blocks and tokens within the block, one uniform for each."""
    b, v = logp_bv.shape
    p = jnp.pad(jnp.exp(logp_bv), ((0, 0), (0, -v % BLOCK))).reshape(b, -1, BLOCK)
    block = _first_above(jnp.sum(p, axis=-1), u_b2[:, 0])
    within = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]
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
    logp_raw = _raw(logits_bv, rows)
    best = jnp.argmax(logits_bv, axis=-1)
    logp = _distribution(logp_raw, best, rows)
    fold = lambda k, position: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(k), position), (2,)
    )
    u_b2 = jax.vmap(fold)(keys_b2, positions_b)
    token = jnp.where(rows.temperature > 0, _draw(logp, u_b2), best.astype(jnp.int32))
    of_token = lambda x: jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]
    entropy = 0.0 - jnp.sum(jnp.exp(logp) * jnp.where(jnp.isfinite(logp), logp, 0.0), axis=-1)
    return Sample(token, of_token(logp), of_token(logp_raw), entropy)
