"""Clipped surrogates whose ratio belongs to more than one token: a sequence, the tokens of one
entropy level, a prefix; those of a turn are in `turn_clipped`.

`objectives` describes the shared arguments (logp, logp_old, adv, mask, seg) and the result.
l = logp - logp_old. Means run over valid tokens. The log of a ratio is at most 10, as in verl, with no
gradient beyond; it has no lower bound. Advantages are per token; the papers have one per sequence, the
same on all of its tokens.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ppo, ratios
from jaxrl_tis.estimators.traits import Traits

LOG_RATIO_BOUND = 10.0  # verl's bound on the log of a sequence ratio


def high_entropy(entropy: Array, mask: Array, seg: Array | None, share: Numeric) -> Array:
    """The round(share n) tokens of highest entropy of each sequence of n valid tokens, [B, T] bool.

    Ties go to the earlier token. No gradient.
    """
    chex.assert_equal_shape([entropy, mask])
    is_valid_bt = ratios.as_bool(mask)
    num_tokens = mask.shape[1]
    entropy_bt = jax.lax.stop_gradient(ratios.zero_padding(entropy, mask))
    ids_bt = ratios.segment_ids(seg, mask)
    ids_bt = jnp.where(is_valid_bt, ids_bt, num_tokens + 1)  # invalid tokens sort to the end
    position_bt = jnp.broadcast_to(jnp.arange(num_tokens), mask.shape)
    ids_bt, _, order_bt = jax.lax.sort((ids_bt, -entropy_bt, position_bt), dimension=1, num_keys=2)
    is_first_bt = jnp.pad(ids_bt[:, 1:] != ids_bt[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first_bt = jax.lax.cummax(jnp.where(is_first_bt, position_bt, 0), axis=1)
    rank_bt = jnp.put_along_axis(
        jnp.zeros_like(order_bt), order_bt, position_bt - first_bt, axis=1, inplace=False
    )
    count_bs = share * ratios.sequence_count(entropy, mask, seg)
    count_bt = jnp.floor(ratios.to_tokens(count_bs, seg, num_tokens) + 0.5)
    return is_valid_bt & (rank_bt < count_bt)


def bounded_ratio(log_ratio_bt: Array) -> Array:
    """exp(log_ratio), at most exp(10) and without gradient beyond."""
    return jnp.exp(ratios.clamp(log_ratio_bt, -jnp.inf, LOG_RATIO_BOUND))


def mean_on_tokens(x_bt: Array, mask: Array, seg: Array | None) -> Array:
    """The mean of x over the valid tokens of each token's sequence, [B, T]."""
    return ratios.to_tokens(ratios.sequence_mean(x_bt, mask, seg), seg, x_bt.shape[1])


def _sum_on_tokens(x_bt, mask, seg):
    """The sum of x over the valid tokens of each token's sequence, [B, T]."""
    return ratios.to_tokens(ratios.sequence_sum(x_bt, mask, seg), seg, x_bt.shape[1])


def _local(log_ratio_bt):
    """0 in value, and a gradient of 1 with respect to the token's own log-prob."""
    return log_ratio_bt - jax.lax.stop_gradient(log_ratio_bt)


@Traits(is_per_sequence=True)
def seq_ppo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> ppo.Loss:
    """PPO-clip (arXiv:1707.06347) with the whole response as one action, l = max(-R A, -clip(R, 1 -
    clip_low, 1 + clip_high) A) with R = prod_t r_t, on each of its tokens.

    The ratio that a reward per response asks for; `gspo` takes its n-th root instead. With the
    aggregation seq-mean-token-mean, one loss per response, the gradient is -R A on each token
    inside the band.

    Unit: sequence. Trust region: R = prod_t r_t within [1 - clip_low, 1 + clip_high], one-sided.
    Gradient: through R to all tokens of the response; 0 for the whole response where it is clipped.
    Use: short responses, as the exact ratio; long ones are clipped after one small step.

    Args:
      clip_low: width of the band below 1; 0.2 as in the paper, whose actions are single.
      clip_high: width of the band above 1; likewise.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = bounded_ratio(_sum_on_tokens(log_ratio_bt, mask, seg))
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - clip_low, 1.0 + clip_high)
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)


def gspo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 3e-4, clip_high: Numeric = 4e-4,
) -> ppo.Loss:
    """GSPO (arXiv:2507.18071), l = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A) with s =
    exp(mean_t l_t).

    With the paper's aggregation, seq-mean-token-mean, the gradient is -s A / n on each of the n
    tokens inside the band.

    Unit: sequence. Trust region: s = exp(mean_t log r) within [1 - clip_low, 1 + clip_high],
    one-sided. Gradient: through s to all tokens of the response; 0 for the whole response where it
    is clipped. Use: long responses, and experts without routing replay; no importance ratio, and a
    response is clipped as a whole.

    Args:
      clip_low: width of the band below 1; 3e-4 as in the paper.
      clip_high: width of the band above 1; 4e-4 as in the paper.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = bounded_ratio(mean_on_tokens(log_ratio_bt, mask, seg))
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - clip_low, 1.0 + clip_high)
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)


@Traits(is_per_sequence=True)
def luspo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 2e-3, clip_high: Numeric = 2.5e-3,
) -> ppo.Loss:
    """LUSPO (arXiv:2602.05261): `gspo` times the number of tokens of the response.

    With GSPO's aggregation, seq-mean-token-mean, the gradient is -s A on each token inside the
    band, however long its response is. A run refuses other aggregations, which would count the length
    twice.

    Unit: sequence. Trust region: that of `gspo`. Gradient: n times that of `gspo`. Use: `gspo` with
    seq-mean-token-mean, where responses shrink; very long ones dominate a batch.

    Args:
      clip_low: width of the band below 1; 2e-3 as in the paper's section 5.1, as TRL cites it.
      clip_high: width of the band above 1; 2.5e-3 as there.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    loss_bt, metrics = gspo(
        logp, logp_old, adv, mask, seg, clip_low=clip_low, clip_high=clip_high
    )
    count_bs = ratios.sequence_count(loss_bt, mask, seg)
    return loss_bt * ratios.to_tokens(count_bs, seg, mask.shape[1]), metrics


def gspo_token(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 3e-4, clip_high: Numeric = 4e-4,
) -> ppo.Loss:
    """GSPO-token (arXiv:2507.18071): `gspo` with s_t = sg(s) pi_t / sg(pi_t).

    Its value is s, and the gradient at token t is -s A_t, of that token's advantage alone. With one
    advantage per sequence, value and gradient are those of `gspo` under seq-mean-token-mean, the
    paper's aggregation. verl's "gspo" is this form.

    Unit: sequence (ratio), token (gradient). Trust region: that of `gspo`. Gradient: through the
    token's own log pi; s is detached, and clipped tokens have 0. Use: `gspo` with advantages per
    token; the same as `gspo` with one per response.

    Args:
      clip_low, clip_high: as `gspo`.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    mean_bt = jax.lax.stop_gradient(mean_on_tokens(log_ratio_bt, mask, seg))
    ratio_bt = bounded_ratio(mean_bt + _local(log_ratio_bt))
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - clip_low, 1.0 + clip_high)
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)


@Traits(needs=("weights",))
def gmpo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    weights: Array | None = None, clip_low: Numeric = 0.4, clip_high: Numeric = 0.4,
) -> ppo.Loss:
    """GMPO (arXiv:2507.20673), l = -mean(A) exp(mean_t c_t) with c_t = sgn(A) min(sgn(A) l_t,
    sgn(A) clip(l_t, -clip_low, clip_high)).

    The mean of c is clamped to +-20. The paper's aggregation is seq-mean-token-mean. Token weights
    enter as their geometric mean over the sequence, each + 1e-10, as in verl.

    Unit: token (clip), sequence (factor). Trust region: log r within [-clip_low, clip_high] at each
    token, one-sided. Gradient: through the mean of the clipped log r; a clipped token has 0 and the
    others share the factor. Use: responses with outlying tokens; the band is wide, and the mean is
    no importance ratio.

    Args:
      weights: [B, T] importance weights, or None for 1. A weight of 0 multiplies its response of T
        tokens by 1e-10^(1/T).
      clip_low: width of the band of log-ratios below 0, nats; 0.4 as in the paper.
      clip_high: width above 0, nats; 0.4 as in the paper.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens outside the band with A > 0, and
    actor/pg_clipfrac_lower with A < 0.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    sign_bt = jnp.sign(adv_bt)
    banded_bt = ratios.clamp(log_ratio_bt, -clip_low, clip_high)
    worst_bt = sign_bt * jnp.minimum(sign_bt * log_ratio_bt, sign_bt * banded_bt)
    ratio_bt = ratios.bounded_exp(mean_on_tokens(worst_bt, mask, seg))
    is_outside_bt = log_ratio_bt != banded_bt
    metrics = ppo.clip_metrics(log_ratio_bt, is_outside_bt & (adv_bt > 0), mask)
    lower = ratios.masked_mean(is_outside_bt & (adv_bt < 0), mask)
    if weights is not None:
        log_w_bt = jnp.log(ratios.zero_padding(jax.lax.stop_gradient(weights), mask) + 1e-10)
        ratio_bt = ratio_bt * jnp.exp(mean_on_tokens(log_w_bt, mask, seg))
    loss_bt = ratios.zero_padding(-mean_on_tokens(adv_bt, mask, seg) * ratio_bt, mask)
    return loss_bt, metrics | {"actor/pg_clipfrac_lower": lower}


def tbpo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 3e-4, clip_high: Numeric = 4e-4, tbpo_high: Numeric = 7e-4,
) -> ppo.Loss:
    """TBPO (QaRL, arXiv:2604.07853): GSPO for A > 0, and l = -clip(s, 1 - clip_low, 1 + tbpo_high)
    A for A < 0.

    s = exp(mean_t l_t). The paper's weight against the sampler, min(pi_old / mu of the sequence,
    2), is the weight "seq_tis" with its default cap. Aggregation: seq-mean-token-mean. Taken from
    notes on the paper, which do not say whether that ratio is a product or a geometric mean.

    Unit: sequence. Trust region: s = exp(mean_t log r) <= 1 + clip_high where A > 0; 1 - clip_low
    <= s <= 1 + tbpo_high where A < 0. Gradient: through s to all tokens; 0 outside the band, for A
    < 0 on both sides. Use: quantised samplers whose bad long responses fill with error tokens; the
    band is very tight.

    Args:
      clip_low: width of the band below 1 for A < 0; 3e-4 as in the notes.
      clip_high: width of the band above 1 for A > 0; 4e-4 as in the notes.
      tbpo_high: width of the band above 1 for A < 0; 7e-4 as in the notes.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens without gradient.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = bounded_ratio(mean_on_tokens(log_ratio_bt, mask, seg))
    good_bt = ratios.clamp(ratio_bt, 0.0, 1.0 + clip_high)
    bad_bt = ratios.clamp(ratio_bt, 1.0 - clip_low, 1.0 + tbpo_high)
    banded_bt = jnp.where(adv_bt < 0, bad_bt, good_bt)
    metrics = ppo.clip_metrics(log_ratio_bt, (banded_bt != ratio_bt) & (adv_bt != 0), mask)
    return -banded_bt * adv_bt, metrics


@Traits(needs=("entropy",), example={"vocab_size": 32})
def espo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    entropy: Array, vocab_size: int, espo_alpha: Numeric = 0.02, espo_top: Numeric = 0.2,
    espo_uses_old: bool = False,
) -> ppo.Loss:
    """ESPO (arXiv:2512.00499, arXiv:2512.07710): GSPO-token on two groups per response, the tokens of
    highest entropy and the rest.

    Each group has the ratio s = exp(mean of l over it). The paper averages over tokens in a group,
    then groups, then responses: with aggregation seq-mean-token-mean a token is weighted by n / (K
    size of its group), K the number of groups that are not empty.

    Unit: entropy group of a sequence. Trust region: s = exp(mean of log r in the group) within 1 +-
    espo_alpha / log(vocab_size) times its mean entropy, one-sided. Gradient: through the token's
    own log pi; s is detached, and clipped tokens have 0. Use: a ratio between token and response;
    the band closes as the entropy falls.

    Args:
      entropy: [B, T] entropy of the old policy at each sampled token, nats.
      vocab_size: number of tokens in the vocabulary, the scale of the entropy.
      espo_alpha: width of the band at full entropy; 0.02 as in the paper.
      espo_top: share of a response's tokens in the group of high entropy, rounded; 0.2 as in the
        paper.
      espo_uses_old: divide by sg(pi_old) as the paper prints it, so that the value is s r_t, and
        not by sg(pi) as in the GSPO-token that it follows.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    is_valid_bt = ratios.as_bool(mask)
    is_high_bt = high_entropy(entropy, mask, seg, espo_top)
    is_low_bt = is_valid_bt & ~is_high_bt

    def count(of_bt):
        counts_bs = ratios.sequence_count(log_ratio_bt, of_bt, seg)
        return ratios.to_tokens(counts_bs, seg, mask.shape[1])

    def group_mean(x_bt):
        high_bt, low_bt = (mean_on_tokens(x_bt, of, seg) for of in (is_high_bt, is_low_bt))
        return jax.lax.stop_gradient(jnp.where(is_high_bt, high_bt, low_bt))

    num_high_bt, num_low_bt = count(is_high_bt), count(is_low_bt)
    num_groups_bt = (num_high_bt > 0).astype(num_low_bt.dtype) + (num_low_bt > 0)
    size_bt = num_groups_bt * jnp.where(is_high_bt, num_high_bt, num_low_bt)
    width_bt = espo_alpha / jnp.log(vocab_size) * group_mean(ratios.zero_padding(entropy, mask))
    own_bt = log_ratio_bt if espo_uses_old else _local(log_ratio_bt)
    ratio_bt = bounded_ratio(group_mean(log_ratio_bt) + own_bt)
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - width_bt, 1.0 + width_bt)
    loss_bt = loss_bt * ratios.safe_divide(num_high_bt + num_low_bt, size_bt)
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)


def ctpo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    ctpo_low: Numeric = 0.025, ctpo_high: Numeric = 0.05, ctpo_power: Numeric = 0.5,
    ctpo_geomean: bool = False,
) -> ppo.Loss:
    """CTPO (arXiv:2605.07331): PPO on the prefix ratio R_t = prod_{s <= t} r_s, clipped to
    [exp(-ctpo_low t^p), exp(ctpo_high t^p)].

    t counts the valid tokens of the sequence from 1 and p = ctpo_power; a masked token is skipped.
    The log-ratio of each token is clamped to +-20 before the sum. For A < 0 the loss is at most
    -exp(ctpo_high t^p) A, a dual clip. Aggregation: token-mean.

    Unit: prefix. Trust region: -ctpo_low t^p <= log R_t <= ctpo_high t^p for the product R_t of r
    up to t, one-sided; from above for both signs of A. Gradient: through the token's own log pi;
    the prefix is detached, and clipped tokens have 0. Use: long responses, with the exact prefix
    ratio; the band starts tight (5 % up), and past drift counts against later tokens.

    Args:
      ctpo_low: lower end of the band of log R_1, nats; 0.025 as in the authors' code.
      ctpo_high: upper end, nats; 0.05 as in the authors' code.
      ctpo_power: growth of the band with t; 0.5 as in the paper, 0 keeps it constant, -0.5 goes
        with the geometric mean.
      ctpo_geomean: take the geometric mean of the prefix, R_t^(1/t), an option of the authors'
        code.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens on the clipped branch and
    actor/pg_clipfrac_lower of those at the dual clip.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    bounded_bt = ratios.detached_log_ratio(log_ratio_bt, mask)
    prefix_bt, count_bt = ratios.prefix_sums(bounded_bt, mask, seg)
    step_bt = jnp.maximum(count_bt, 1.0)
    if ctpo_geomean:
        prefix_bt = prefix_bt / step_bt
    growth_bt = jnp.power(step_bt, ctpo_power)
    high_bt = jnp.exp(jnp.minimum(ctpo_high * growth_bt, LOG_RATIO_BOUND))  # no ratio is larger
    ratio_bt = bounded_ratio(prefix_bt + _local(log_ratio_bt))
    loss_bt, is_clipped_bt = ppo.pessimistic(
        ratio_bt, adv_bt, jnp.exp(-ctpo_low * growth_bt), high_bt
    )
    is_bounded_bt = (adv_bt < 0) & (ratio_bt > high_bt)
    loss_bt = jnp.where(adv_bt < 0, jnp.minimum(-adv_bt * high_bt, loss_bt), loss_bt)
    metrics = ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask)
    return loss_bt, metrics | {"actor/pg_clipfrac_lower": ratios.masked_mean(is_bounded_bt, mask)}


OBJECTIVES = {
    "seq_ppo": seq_ppo,
    "gspo": gspo,
    "luspo": luspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "tbpo": tbpo,
    "espo": espo,
    "ctpo": ctpo,
}
