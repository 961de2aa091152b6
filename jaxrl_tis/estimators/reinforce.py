"""Losses -sg(w) A log pi: a REINFORCE gradient times a weight without gradient.

`objectives` describes the shared arguments (logp, logp_old, adv, mask, seg) and the result.
r = exp(logp - logp_old), with the log-ratio clamped to +-20 first. A weight can be bounded, masked or
reshaped and every token keeps a gradient, unlike with a clipped ratio. The value of such a loss means
little, because it contains log pi: compare gradients. For papers with the sampler in the denominator
use the centre behav: logp_old = logp_behav and weight "none".
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ppo, prefix_weights, ratios, weights
from jaxrl_tis.estimators.traits import Traits

PROBABILITY_EPS = 1e-8  # keeps log(1 - p) finite in `dppo_kl`, as in verl


def _reinforce(w_bt, logp, adv_bt, mask):
    """-sg(w) A log pi [B, T], 0 at padding."""
    return -jax.lax.stop_gradient(w_bt) * adv_bt * ratios.zero_padding(logp, mask)


def _clamped(log_ratio_bt):
    return ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND)


def _drift(log_ratio_bt, mask):
    """The metrics of a loss that clips nothing: actor/pg_clipfrac is 0."""
    return ppo.clip_metrics(log_ratio_bt, jnp.zeros_like(log_ratio_bt), mask)


@Traits(has_ratio=False, reads_old=False, centering="ratio")
def gpg(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None
) -> ppo.Loss:
    """GPG's loss (arXiv:2504.02546), l = -A log pi, with its own advantage in `advantages`.

    logp_old is not used: a weight is the only correction. Aggregation: token-mean.

    Unit: token. Trust region: none. Gradient: through log pi, never 0. Use: one update per fresh
    batch, as the plain baseline; nothing bounds the drift.

    Returns loss_bt and no metrics, as verl.
    """
    del logp_old, seg
    chex.assert_rank(adv, 2)
    chex.assert_equal_shape([logp, adv, mask])
    adv_bt = jax.lax.stop_gradient(ratios.zero_padding(adv, mask))
    return _reinforce(jnp.ones_like(adv_bt), logp, adv_bt, mask), {}


@Traits(has_ratio=False, reads_old=False, centering="ratio")
def reinforce(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None
) -> ppo.Loss:
    """REINFORCE (Williams 1992; verl's loss of that name), l = -A log pi: `gpg` that also reports
    the drift from logp_old.

    logp_old enters the metric alone. verl aggregates by seq-mean-token-sum.

    Unit: token. Trust region: none. Gradient: through log pi, never 0. Use: the centre behav with a
    weight or masks (verl's bypass_pg presets); nothing else bounds the step.

    Returns loss_bt; actor/ppo_kl is the mean of logp_old - logp and actor/pg_clipfrac is 0.
    """
    log_ratio_bt, _ = ppo.token_inputs(logp, logp_old, adv, mask)
    loss_bt, _ = gpg(logp, logp_old, adv, mask, seg)
    return loss_bt, _drift(log_ratio_bt, mask)


@Traits(centering="ratio")
def cispo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 10.0, clip_high: Numeric = 0.2, cispo_mask_low: Numeric = jnp.inf,
    cispo_mask_high: Numeric = jnp.inf, level: str = "token",
) -> ppo.Loss:
    """CISPO (MiniMax-M1, arXiv:2506.13585), l = -sg(clip(r, 1 - clip_low, 1 + clip_high) M) A log
    pi.

    M is the paper's unified mask: 0 where A > 0 and r > 1 + cispo_mask_high, and where A < 0 and r
    < 1 - cispo_mask_low. With widths 0.2 there and an infinite clip it is exactly the gradient of
    PPO-clip. Aggregation: token-mean.

    Unit: token. Trust region: 1 - clip_low <= w <= 1 + clip_high, by default only from above; it
    bounds the weight, not the step. Gradient: through log pi; w = clip(r) is detached, and every
    token has one unless the mask M drops it (off by default). Use: rare tokens that PPO would clip
    away; nothing bounds the drift.

    Args:
      clip_low: width of the weight's band below 1; above 1 there is no lower bound, as in the
        paper; 10.0 as in verl's script.
      clip_high: width above 1; 0.2 as in verl's script. 4.0 is the cap of 5 in TRL and ScaleRL.
      cispo_mask_low: width of the mask's band below 1; infinity is no mask, as in CISPO itself.
      cispo_mask_high: width of the mask's band above 1; likewise.
      level: of the ratio, "token", or "seq" or "geo" for its product or geometric mean over the
        sequence, which no paper has.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens whose weight is not r.
    """
    if level not in weights.RAW:
        raise ValueError(f"level is {level!r} in 'cispo'; choose one of {', '.join(weights.RAW)}")
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = weights.RAW[level](log_ratio_bt, mask, seg)
    w_bt = ratios.clamp(ratio_bt, 1.0 - clip_low, 1.0 + clip_high)
    is_masked_bt = (adv_bt > 0) & (ratio_bt > 1.0 + cispo_mask_high)
    is_masked_bt |= (adv_bt < 0) & (ratio_bt < 1.0 - cispo_mask_low)
    w_bt = jnp.where(is_masked_bt, 0.0, w_bt)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), w_bt != ratio_bt, mask)
    return _reinforce(w_bt, logp, adv_bt, mask), metrics


BANDS = {  # ours, as the paper's were not read
    "dispo_low_pos": 1.0, "dispo_high_pos": 4.0, "dispo_low_neg": 0.8, "dispo_high_neg": 0.28,
}


@Traits(needs=("rewards",), example=BANDS)
def dispo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    dispo_low_pos: Numeric, dispo_high_pos: Numeric, dispo_low_neg: Numeric,
    dispo_high_neg: Numeric, rewards: Array | None = None, form: str = "paper",
    dispo_correct: Numeric = 0.0,
) -> ppo.Loss:
    """DISPO (arXiv:2602.00983): `cispo` with a band of its own for correct and incorrect responses.

    A correct response is one with A > 0, which a binary reward makes the same. The form is taken
    from secondary notes and the four widths were not read, so they are required. Aggregation:
    token-mean. A survey tells four regimes apart, by the sign of A and by the label of the response,
    each with one bound: form="survey".

    Unit: token. Trust region: w = r within a band for A > 0 and another for A <= 0; it bounds the
    weight, not the step. Gradient: through log pi, never 0; w is detached. Use: other caps for good
    and bad responses; four bounds to tune.

    Args:
      dispo_low_pos, dispo_high_pos: widths of the band below and above 1 where A > 0; of correct
        responses in the survey's form, where only the bound acts that A pushes towards.
      dispo_low_neg, dispo_high_neg: widths where A <= 0; of incorrect responses.
      rewards: [B, T] reward of each token's response, for the survey's form.
      form: "paper" or "survey".
      dispo_correct: reward above which a response is correct in the survey's form.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens whose weight is not r.
    """
    del seg
    ratios.check_choice("form", form, ("paper", "survey"))
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt, is_pushed_up_bt = weights.raw_token(log_ratio_bt, mask), adv_bt > 0
    if form == "paper":
        good_bt = ratios.clamp(ratio_bt, 1.0 - dispo_low_pos, 1.0 + dispo_high_pos)
        bad_bt = ratios.clamp(ratio_bt, 1.0 - dispo_low_neg, 1.0 + dispo_high_neg)
        w_bt = jnp.where(is_pushed_up_bt, good_bt, bad_bt)
    else:
        if rewards is None:
            raise ValueError("dispo(form='survey') tells responses apart by their rewards: pass them.")
        is_correct_bt = ratios.zero_padding(rewards, mask) > dispo_correct
        high = jnp.where(is_correct_bt, 1.0 + dispo_high_pos, 1.0 + dispo_high_neg)
        low = jnp.where(is_correct_bt, 1.0 - dispo_low_pos, 1.0 - dispo_low_neg)
        w_bt = jnp.where(is_pushed_up_bt, jnp.minimum(ratio_bt, high), jnp.maximum(ratio_bt, low))
        w_bt = ratios.zero_padding(w_bt, mask)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), w_bt != ratio_bt, mask)
    return _reinforce(w_bt, logp, adv_bt, mask), metrics


def dis(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    clip_low: Numeric = 0.3, clip_high: Numeric = 5.0,
) -> ppo.Loss:
    """Direct double-sided importance sampling of GLM-5 (arXiv:2602.15763) and SAO (arXiv:2607.07508
    eqs 1-3), l = -sg(f(r)) A log pi with f(r) = r within the band and 0 outside, whatever the sign
    of A.

    The papers' ratio is against the sampler, whose own log-probs stand for those of the old policy:
    the centre behav, weight none, and no old log-probs for stale samples. It is `reinforce` with the
    weight `token_mis` of the same band in that mode. SAO's advantage is `gae` of a critic, one
    sample per prompt, whose recursion steps over a tool's reply like ours; its lam grows with the
    length, which ours does not. Aggregation: token-mean.

    Unit: token. Trust region: 1 - clip_low < r < 1 + clip_high, for both signs of A. Gradient:
    through log pi; w = r is detached, and a token outside the band has 0, on the way back too. Use:
    asynchronous training where the policy that drew a token is no longer at hand; a good token that
    the policy has left by more than the band is not learned again.

    Args:
      clip_low: width of the band below 1; 0.3 as in SAO's reasoning runs, 0.8 in its coding runs.
      clip_high: width above 1; 5.0 as in the reasoning runs, 3.0 in the coding runs.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens outside the band.
    """
    del seg
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = weights.raw_token(log_ratio_bt, mask)
    is_inside_bt = (ratio_bt > 1.0 - clip_low) & (ratio_bt < 1.0 + clip_high)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), ~is_inside_bt, mask)
    return _reinforce(jnp.where(is_inside_bt, ratio_bt, 0.0), logp, adv_bt, mask), metrics


def _tapered(raw: Callable, logp, logp_old, adv, mask, seg, cap):
    """TOPR with the ratio that `raw` makes of the log-ratios."""
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = raw(log_ratio_bt, mask, seg)
    w_bt = jnp.where(adv_bt > 0, 1.0, jnp.minimum(ratio_bt, cap))
    is_truncated_bt = (adv_bt < 0) & (ratio_bt > cap)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), is_truncated_bt, mask)
    return _reinforce(w_bt, logp, adv_bt, mask), metrics


@Traits(takes_weight=False)
def topr(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = 1.0,
) -> ppo.Loss:
    """TOPR (arXiv:2503.14286), l = -A log pi for A > 0 and l = -sg(min(prod_t r_t, cap)) A log pi
    for A <= 0.

    The paper's ratio is against the sampler: the centre behav. Its aggregation is seq-mean-token-sum,
    the log-probability of a trajectory.

    Unit: sequence. Trust region: w = prod_t r_t <= cap where A <= 0; none where A > 0. Gradient:
    through log pi; w is detached, and fades without reaching 0 as the policy leaves a bad response.
    Use: asynchronous training without the policy that sampled; a good token that the policy left is
    not learned again.

    Args:
      cap: upper bound of the ratio of bad trajectories; 1.0 as in the paper.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens with A < 0 and a ratio above the
    cap.
    """
    return _tapered(weights.raw_seq, logp, logp_old, adv, mask, seg, cap)


@Traits(takes_weight=False)
def topr_token(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = 1.0,
) -> ppo.Loss:
    """TOPR (arXiv:2503.14286) with the ratio r_t of each token, as ROLL and Trinity-RFT have it.

    Arguments and result as `topr`. Aggregation: token-mean.

    Unit: token. Trust region: w = r <= cap where A <= 0; none where A > 0. Gradient: through log
    pi; w is detached and never 0. Use: `topr` for long responses; the ratio ignores the rest of the
    response.
    """
    return _tapered(weights.raw_token, logp, logp_old, adv, mask, seg, cap)


@Traits(takes_weight=False)
def topr_geo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = 1.0,
) -> ppo.Loss:
    """TOPR (arXiv:2503.14286) with the geometric mean of a sequence's ratios, as proposed for verl.

    Arguments and result as `topr`. Aggregation: seq-mean-token-mean.

    Unit: sequence. Trust region: w = exp(mean_t log r) <= cap where A <= 0; none where A > 0.
    Gradient: through log pi; w is detached and never 0. Use: `topr` with one weight of any length;
    over hundreds of tokens it is near 1.
    """
    return _tapered(weights.raw_geo, logp, logp_old, adv, mask, seg, cap)


def minpro(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = jnp.inf,
) -> ppo.Loss:
    """MinPRO (arXiv:2601.22718), l = -sg(min(r_t min_{s < t} r_s, cap)) A log pi.

    The weight is `prefix_weights.prefix_minpro` of the policy that is trained. It is taken from a
    survey; whether the paper truncates it, or lets a gradient through the minimum, could not be
    read. Aggregation: token-mean.

    Unit: prefix. Trust region: w = r_t min_{s < t} r_s <= cap, none by default. Gradient: through
    log pi; w is detached and never 0. Use: long responses whose prefix products explode; nothing
    bounds the step.

    Args:
      cap: upper bound of the weight; without a bound as the survey prints it.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens above the cap.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    w_bt = prefix_weights.prefix_minpro(log_ratio_bt, mask, seg)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), w_bt > cap, mask)
    return _reinforce(jnp.minimum(w_bt, cap), logp, adv_bt, mask), metrics


def _probabilities(logp, logp_old, mask):
    """pi and pi_old of the sampled tokens, without gradient; 1 at padding."""
    p_bt, p_old_bt = (jnp.exp(ratios.zero_padding(x, mask)) for x in (logp, logp_old))
    return jax.lax.stop_gradient(p_bt), jax.lax.stop_gradient(p_old_bt)


def _truncated(is_accepted_bt, logp, logp_old, adv, mask, cap):
    """-sg(min(r, cap) 1[is_accepted]) A log pi, and verl's metrics of DPPO."""
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    ratio_bt = weights.raw_token(log_ratio_bt, mask)
    w_bt = jnp.where(is_accepted_bt, jnp.minimum(ratio_bt, cap), 0.0)
    metrics = ppo.clip_metrics(_clamped(log_ratio_bt), ~is_accepted_bt, mask)
    lower = ratios.masked_mean(is_accepted_bt & (ratio_bt > cap), mask)
    return _reinforce(w_bt, logp, adv_bt, mask), metrics | {"actor/pg_clipfrac_lower": lower}


def dppo_tv(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = 20.0, dppo_tv_low: Numeric = 0.15, dppo_tv_high: Numeric = 0.15,
) -> ppo.Loss:
    """DPPO-Binary-TV (arXiv:2602.04879), l = -sg(min(r, cap) M) A log pi with M = 1[pi - pi_old <=
    dppo_tv_high] for A > 0 and M = 1[pi - pi_old >= -dppo_tv_low] else.

    The main variant of the authors' follow-up code is anchored at the sampler: the centre behav. The
    paper's aggregation is seq-mean-token-sum-norm, with an advantage that is not divided by its
    std.

    Unit: token. Trust region: pi - pi_old <= dppo_tv_high where A > 0, >= -dppo_tv_low else; w = r
    <= cap. Gradient: through log pi; w is detached, 0 outside the region and never on the way back.
    Use: a bound in probabilities, where a ratio clip holds rare tokens too early and likely ones
    too late.

    Args:
      cap: upper bound of r; 20 is the fallback in verl's loss, whose config makes it 3.0 and whose
        script 1e4.
      dppo_tv_low: largest fall of the probability, inclusive; 0.15 as in verl's script. verl reads
        it from clip_ratio_low, so that 0.2 applies if it is left alone.
      dppo_tv_high: largest rise, inclusive; likewise, from clip_ratio_high.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens masked and actor/pg_clipfrac_lower
    of those kept with r above the cap.
    """
    del seg
    p_bt, p_old_bt = _probabilities(logp, logp_old, mask)
    move_bt = p_bt - p_old_bt
    is_accepted_bt = jnp.where(
        ratios.zero_padding(adv, mask) > 0, move_bt <= dppo_tv_high, move_bt >= -dppo_tv_low
    )
    return _truncated(is_accepted_bt, logp, logp_old, adv, mask, cap)


def dppo_kl(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    cap: Numeric = 20.0, dppo_kl_low: Numeric = 0.05, dppo_kl_high: Numeric = 0.05,
) -> ppo.Loss:
    """DPPO-Binary-KL (arXiv:2602.04879): `dppo_tv` with the KL of the token against all others, D =
    p_o log(p_o / p) + (1 - p_o) log((1 - p_o) / (1 - p)).

    A token is kept where D is within the bound or the move is one back: p <= p_o for A > 0, p >=
    p_o else. The rest is as in `dppo_tv`.

    Unit: token. Trust region: KL of the token against all others <= dppo_kl_high where A > 0, <=
    dppo_kl_low else; w = r <= cap. Gradient: that of `dppo_tv`. Use: `dppo_tv`, stricter towards 0
    and 1.

    Args:
      cap: upper bound of r, as `dppo_tv`.
      dppo_kl_low: largest D for A <= 0, nats, inclusive; 0.05 as in verl's script.
      dppo_kl_high: largest D for A > 0, nats, inclusive; likewise.

    Returns loss_bt and the metrics of `dppo_tv`.
    """
    del seg
    p_bt, p_old_bt = _probabilities(logp, logp_old, mask)
    log_ratio_bt = jax.lax.stop_gradient(ratios.safe_log_ratio(logp, logp_old, mask))
    # Rounding may put a probability above 1.
    rest_bt, rest_old_bt = jnp.maximum(1.0 - p_bt, 0.0), jnp.maximum(1.0 - p_old_bt, 0.0)
    odds_bt = (rest_old_bt + PROBABILITY_EPS) / (rest_bt + PROBABILITY_EPS)
    kl_bt = -p_old_bt * log_ratio_bt + rest_old_bt * jnp.log(odds_bt)
    is_accepted_bt = jnp.where(
        ratios.zero_padding(adv, mask) > 0,
        (kl_bt <= dppo_kl_high) | (p_bt <= p_old_bt),
        (kl_bt <= dppo_kl_low) | (p_bt >= p_old_bt),
    )
    return _truncated(is_accepted_bt, logp, logp_old, adv, mask, cap)


def vespo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    vespo_k_pos: Numeric = 2.0, vespo_lambda_pos: Numeric = 3.0, vespo_k_neg: Numeric = 3.0,
    vespo_lambda_neg: Numeric = 2.0,
) -> ppo.Loss:
    """VESPO (arXiv:2602.10693), l = -sg(W^k exp(lambda (1 - W))) A log pi with W = prod_t r_t.

    The kernel is 1 at W = 1 and largest at W = k / lambda. The log-ratio of a token and their sum
    are clamped to +-20. k = lambda = 0 is REINFORCE and k = 1, lambda = 0 sequence importance
    sampling. The authors multiply a weight against the sampler into W: with the centre behav W holds it; a
    weight beside this entry stays outside the kernel. Aggregation: token-mean.

    Unit: sequence. Trust region: soft, the kernel W^k exp(lambda (1 - W)) of W = prod_t r_t: 0 at
    both ends, by default at most 1.21 (A >= 0) or 1.24 (A < 0). Gradient: through log pi; the
    kernel is detached, and fades for sequences far off. Use: stale batches, by the authors up to 64
    times the synchronous lag; the kernels act as a baseline that shifts with the gap
    (docs/oracle.md).

    Args:
      vespo_k_pos, vespo_lambda_pos: k and lambda where A >= 0; 2 and 3 as in the authors' code.
      vespo_k_neg, vespo_lambda_neg: k and lambda where A < 0; 3 and 2 as in the authors' code.

    Returns loss_bt; actor/pg_clipfrac is 0, as nothing is clipped.
    """
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    log_ratio_bt = _clamped(log_ratio_bt)
    log_w_bs = _clamped(ratios.sequence_sum(log_ratio_bt, mask, seg))
    log_w_bt = ratios.to_tokens(log_w_bs, seg, mask.shape[1])
    k_bt = jnp.where(adv_bt < 0, vespo_k_neg, vespo_k_pos)
    lambda_bt = jnp.where(adv_bt < 0, vespo_lambda_neg, vespo_lambda_pos)
    w_bt = jnp.exp(k_bt * log_w_bt - lambda_bt * jnp.expm1(log_w_bt))
    return _reinforce(w_bt, logp, adv_bt, mask), _drift(log_ratio_bt, mask)


OBJECTIVES = {
    "gpg": gpg,
    "reinforce": reinforce,
    "cispo": cispo,
    "dispo": dispo,
    "dis": dis,
    "topr": topr,
    "topr_token": topr_token,
    "topr_geo": topr_geo,
    "minpro": minpro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
}
