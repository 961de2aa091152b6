"""Masks by the binary KL of the sampled token against all other tokens.

With p = mu(y_t) and q = pi_old(y_t), the event "y_t is sampled" has the distribution (p, 1 - p) at
the sampler and (q, 1 - q) at the learner. Their divergence needs these two probabilities alone,

  d_t = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

and is at most KL(mu || pi_old) over the vocabulary, because merging outcomes never increases a
divergence. p and q are kept within [1e-6, 1 - 1e-6]. The entries are part of
`masks.MASKS`, whose module states the shared arguments. `dppo_kl` is the objective with this divergence.
"""

import math

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators.traits import Traits

MARGIN = 1e-6  # of probabilities to 0 and 1, as in the code of FlashREINFORCE's authors


def binary_kl(
    log_ratio: Array, logp_behav: Array, mask: Array, is_reverse: bool = False
) -> Array:
    """d_t of the module [B, T] in nats, never below 0; 0 at padding, without gradient. NaN, which no
    mask keeps, where the sampler's log-prob is -inf.

    Args:
      log_ratio: [B, T] nats, logp_old - logp_behav.
      logp_behav: [B, T] log-probs of the sampler, nats.
      mask: [B, T] valid tokens.
      is_reverse: KL(pi_old || mu), d_t with p and q exchanged.
    """
    chex.assert_equal_shape([log_ratio, logp_behav, mask])

    def within(logp_bt):
        return jnp.clip(logp_bt, math.log(MARGIN), math.log1p(-MARGIN))

    def log_rest(logp_bt):
        return jnp.log(-jnp.expm1(logp_bt))  # log(1 - p), also where p is close to 1

    p_bt = within(ratios.zero_padding(logp_behav, mask))
    q_bt = within(ratios.learner_logp(log_ratio, logp_behav, mask))
    if is_reverse:
        p_bt, q_bt = q_bt, p_bt
    own_bt = jnp.exp(p_bt) * (p_bt - q_bt)
    rest_bt = -jnp.expm1(p_bt) * (log_rest(p_bt) - log_rest(q_bt))
    return jax.lax.stop_gradient(jnp.maximum(own_bt + rest_bt, 0.0))  # rounding may put it below


@Traits(needs=("logp_behav",), example={"upper": 2.0})
def token_binary_kl(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, logp_behav: Array, upper: Numeric
) -> Array:
    """Tokens by their binary KL, an option of OpenRLHF; no paper.

    Unit: token. Trust region: binary KL(mu || pi_old) of the drawn token <= upper. Use: `token_dp`
    by a divergence that is better near 0 and 1; a rare token passes at a large ratio.

    Args:
      log_ratio, mask, seg: see `masks`.
      logp_behav: [B, T] log-probs of the sampler, nats.
      upper: largest d_t kept, nats, inclusive; required, as no default is known.
    """
    del seg
    return ratios.as_bool(mask) & (binary_kl(log_ratio, logp_behav, mask) <= upper)


@Traits(needs=("logp_behav",))
def token_kpop(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, upper: Numeric = 0.1,
) -> Array:
    """KPop (Ring 2.6, arXiv:2606.15079): tokens by the binary KL in both directions.

    The preset `kpop` has the ratio as weight, unclipped, as prime-rl (#3283). AReaL masks the proximal
    policy against the sampler, beside PPO: `token_vanilla` and `ppo` with the centre old.

    Unit: token. Trust region: binary KL(mu || pi_old) and KL(pi_old || mu) of the drawn token <=
    upper. Use: `token_binary_kl` in both directions.

    Args:
      log_ratio, mask, seg: see `masks`.
      logp_behav: [B, T] log-probs of the sampler, nats.
      upper: largest divergence kept, nats, inclusive; 0.1 as in the paper.
    """
    del seg
    forward_bt, reverse_bt = (
        binary_kl(log_ratio, logp_behav, mask, is_reverse) for is_reverse in (False, True)
    )
    return ratios.as_bool(mask) & (jnp.maximum(forward_bt, reverse_bt) <= upper)


@Traits(needs=("logp_behav",))
def seq_mean_binary_kl(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, upper: Numeric = 3e-3,
) -> Array:
    """The Sequence Trust Region of FlashREINFORCE (Hu et al. 2026): sequences by the mean of their
    tokens' binary KL.

    The authors take `token_vanilla` with the centre behav, the advantage `batch_mean`, the objective
    `reinforce` and one update of each batch, aggregated by seq-mean-token-mean: the preset
    flash_reinforce and two more fields. Rejected responses stay in their denominators.

    Unit: sequence. Trust region: mean_t of the binary KL(mu || pi_old) of the drawn tokens <=
    upper. Use: stale responses, when weights are by token; one bad token hides in a long mean: add
    `veto`.

    Args:
      log_ratio, mask, seg: see `masks`.
      logp_behav: [B, T] log-probs of the sampler, nats.
      upper: largest mean kept, nats, inclusive; 3e-3 as in the authors' code, whose recipes take
        1e-3 to 5e-3.
    """
    kl_bt = binary_kl(log_ratio, logp_behav, mask)
    mean_bs = ratios.sequence_mean(kl_bt, mask, seg)
    return ratios.as_bool(mask) & (ratios.to_tokens(mean_bs, seg, mask.shape[1]) <= upper)


MASKS = {
    "token_binary_kl": token_binary_kl,
    "token_kpop": token_kpop,
    "seq_mean_binary_kl": seq_mean_binary_kl,
}
