"""Importance weights with a cap for each factor of the ratio, and the factors themselves.

The full ratio of the trained policy to the sampler has three factors:

  engine        logp_old - logp_behav    same weights, other program, precision or filter
  staleness     logp_prox - logp_old     weights moved between sampling and this training step
  trust_region  logp - logp_prox         weights moved within this step, what PPO clips

The entries are part of `weights.WEIGHTS`, whose module states the shared arguments, and
`attribution.capped_ratio` measures the effect of the caps. They take the log-probs instead of
log_ratio. logp_old is the learner at the weights that sampled, in bypass mode too. On fresh batches
logp and logp_prox equal logp_old before the updates, and the weight is the engine's factor. In bypass
mode the weight is computed at every update, and the change by earlier updates is the trust region's
factor.
"""

import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators.traits import Traits

FACTORS = ("engine", "staleness", "trust_region")
CHAIN = ("logp", "logp_prox", "logp_old", "logp_behav")


def split_ratio(
    logp: Array, logp_prox: Array, logp_old: Array, logp_behav: Array, mask: Array
) -> dict[str, Array]:
    """The log of each factor of pi / mu, [B, T] each, 0 at padding; their sum is logp - logp_behav.

    Args:
      logp: [B, T] the policy that is trained, nats.
      logp_prox: [B, T] the centre of the trust region; pass logp_old where nothing was stale.
      logp_old: [B, T] the learner at the weights that sampled.
      logp_behav: [B, T] the sampler.
      mask: [B, T] valid tokens.

    Returns {"engine", "staleness", "trust_region"} in nats, without gradient.
    """
    chain = (logp_behav, logp_old, logp_prox, logp)
    return {
        factor: jax.lax.stop_gradient(ratios.safe_log_ratio(chain[i + 1], chain[i], mask))
        for i, factor in enumerate(FACTORS)
    }


def log_caps(
    cap_engine: Numeric, cap_staleness: Numeric, cap_trust_region: Numeric
) -> dict[str, Numeric]:
    """The logarithm of each factor's cap."""
    caps = (cap_engine, cap_staleness, cap_trust_region)
    return {factor: ratios.log_bound(c) for factor, c in zip(FACTORS, caps, strict=True)}


def log_product(logs: dict[str, Array], caps: dict[str, Numeric]) -> Array:
    """clamp(sum_f min(logs_f, caps_f), +-20): log of the product of the capped factors."""
    total = sum(jnp.minimum(logs[factor], caps[factor]) for factor in FACTORS)
    return ratios.clamp(total, -ratios.LOG_BOUND, ratios.LOG_BOUND)


@Traits(needs=CHAIN, is_of_factors=True, is_bounded_ratio=False)
def capped_ratio(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, logp: Array, logp_prox: Array,
    logp_old: Array, logp_behav: Array, cap: Numeric = jnp.inf, cap_engine: Numeric = 2.0,
    cap_staleness: Numeric = jnp.inf, cap_trust_region: Numeric = jnp.inf,
) -> Array:
    """Token ratio with a cap for each factor, w_t = min(prod_f min(rho_ft, cap_f), cap); no paper.

    A survey of how corrections compose writes the ratio as these factors, each with a bound of its
    own: a cap bounds one source of mismatch and leaves the others alone, where a cap on the product
    lets the factors cancel first. With the engine's cap alone, and one update, it is `token_tis`.

    Unit: token. Trust region: w <= cap, and each factor <= its cap. Use: bypass mode with
    `reinforce`, to bound the engine's gap and the drift apart; every cap biases by itself.

    Args:
      log_ratio: not used.
      mask, seg: see `weights`.
      logp: [B, T] log-probs of the policy that is trained, nats.
      logp_prox: [B, T] log-probs of the centre of the trust region, nats.
      logp_old: [B, T] log-probs of the learner at the weights that sampled, nats.
      logp_behav: [B, T] log-probs of the sampler, nats.
      cap: upper bound of the product; none by default.
      cap_engine: upper bound of the engine's factor; 2.0 as for `token_tis`.
      cap_staleness, cap_trust_region: upper bounds of the other factors; none by default.
    """
    del log_ratio, seg
    log_bt = split_ratio(logp, logp_prox, logp_old, logp_behav, mask)
    caps = log_caps(cap_engine, cap_staleness, cap_trust_region)
    w_bt = jnp.minimum(jnp.exp(log_product(log_bt, caps)), cap)
    return ratios.zero_padding(w_bt, mask)


@Traits(needs=CHAIN, is_of_factors=True, is_bounded_ratio=False, level="seq")
def seq_capped_ratio(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, logp: Array, logp_prox: Array,
    logp_old: Array, logp_behav: Array, cap: Numeric = jnp.inf, cap_engine: Numeric = 2.0,
    cap_staleness: Numeric = jnp.inf, cap_trust_region: Numeric = jnp.inf,
) -> Array:
    """`capped_ratio` of sequences: each factor is its product over the sequence; no paper.

    Arguments as `capped_ratio`. With the engine's cap alone, and one update, it is `seq_tis`.

    Unit: sequence. Trust region: w <= cap, and each factor's product <= its cap. Use: the same for
    short responses; over hundreds of tokens every factor sits at its cap or near 0.
    """
    del log_ratio
    log_bt = split_ratio(logp, logp_prox, logp_old, logp_behav, mask)
    log_bs = {factor: ratios.sequence_sum(x_bt, mask, seg) for factor, x_bt in log_bt.items()}
    caps = log_caps(cap_engine, cap_staleness, cap_trust_region)
    w_bs = jnp.minimum(jnp.exp(log_product(log_bs, caps)), cap)
    return ratios.zero_padding(ratios.to_tokens(w_bs, seg, mask.shape[1]), mask)


WEIGHTS = {"capped_ratio": capped_ratio, "seq_capped_ratio": seq_capped_ratio}
