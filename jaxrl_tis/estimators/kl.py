"""KL estimators per token, between the policy that is trained and a reference.

Each entry of `KL` maps (logp, logp_ref, **parameters) to kl_bt [B, T] in nats. Only logp carries a
gradient, in the exact forms only logits. Callers set padding to zero in every argument first
(`ratios.zero_padding`), and the reduction drops it. The traits of an entry name
its further keyword arguments.

Trust region: soft, kl_coeff per nat from the reference.

Write z = logp - logp_ref, r = pi / pi_old. In expectation, with the prefixes held fixed:

  name            value              gradient w.r.t. logp  value           gradient
  on samples of pi
  k1              z                  1                     KL(pi || ref)   0
  k2, k2+         z^2 / 2            z                     biased          grad KL(pi || ref)
  k3              exp(-z) - 1 + z    1 - exp(-z)           KL(pi || ref)   grad KL(ref || pi)
  abs             |z|                sign(z), 0 at z = 0   biased          biased
  k1+             z                  z                     KL(pi || ref)   grad KL(pi || ref)
  k3+             exp(-z) - 1 + z    z                     KL(pi || ref)   grad KL(pi || ref)
  abs+            |z|                z                     biased          grad KL(pi || ref)
  on samples of pi_old
  is_k3           r k3               r z                   KL(pi || ref)   grad KL(pi || ref)
  clipped_is_k2   max(r z, clip(r) z)  r z, 0 if clipped   as is_k3 while r is inside the band
  clipped_is_k3   the same of z' = 1 - exp(-z)             0; grad KL(ref || pi) inside the band
  whatever the samples
  exact_reverse   KL(pi || ref)      through the logits    KL(pi || ref)   grad KL(pi || ref)
  exact_forward   KL(ref || pi)      through the logits    KL(ref || pi)   grad KL(ref || pi)

So k1 belongs in a reward and teaches nothing as a loss. k2 is the loss with the reverse-KL gradient,
and the "+" forms report another value for the same gradient. Only the last two blocks hold for samples
of another policy than pi: after the first update, or with an engine gap.

"Prefixes held fixed" omits that a token changes the prefixes after it. The reward placement has this
part of the gradient of a sequence's KL: subtract k1 from the rewards per token (`penalized_rewards`),
and an advantage with a reward to go spreads it. The loss placement adds kl_coeff times the aggregated
entry to the policy loss.

Estimators: Schulman, "Approximating KL Divergence"; gradients: arXiv:2510.01555.
"""

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios, returns
from jaxrl_tis.estimators.traits import Traits

K3_BOUND = 10.0  # verl's bound on the k3 value


def _difference(logp: Array, logp_ref: Array) -> Array:
    chex.assert_rank([logp, logp_ref], 2)
    chex.assert_equal_shape([logp, logp_ref])
    return ratios.as_float(logp) - jax.lax.stop_gradient(ratios.as_float(logp_ref))


def _straight_through(value: Array, surrogate: Array) -> Array:
    """`value` forward, the gradient of `surrogate` backward."""
    return jax.lax.stop_gradient(value) + (surrogate - jax.lax.stop_gradient(surrogate))


def k1(logp: Array, logp_ref: Array) -> Array:
    """z = logp - logp_ref, [B, T]; Schulman 2020, "Approximating KL Divergence".

    Unit: token. Gradient: 1 per log pi, whose expectation on-policy is 0. Use: in the reward
    (kl_placement "reward"); as a loss it teaches nothing.
    """
    return _difference(logp, logp_ref)


def k2(logp: Array, logp_ref: Array) -> Array:
    """z^2 / 2, [B, T]; Schulman 2020, "Approximating KL Divergence". `k2+` is the same.

    Unit: token. Gradient: z per log pi, on-policy that of KL(pi || ref). Use: as a loss on fresh
    samples; its value is biased, and after the first update so is its gradient.
    """
    return 0.5 * jnp.square(_difference(logp, logp_ref))


def k3(logp: Array, logp_ref: Array) -> Array:
    """exp(-z) - 1 + z, [B, T]; Schulman 2020, "Approximating KL Divergence", verl's low_var_kl.

    -z is clamped to +-20 and the result to +-10.

    Unit: token. Gradient: 1 - exp(-z) per log pi, on-policy that of KL(ref || pi); 0 beyond a
    clamp. Use: to watch the KL, unbiased and of low variance; as a loss (GRPO's, verl's and our
    default) it descends the other KL.
    """
    log_ratio = ratios.clamp(-_difference(logp, logp_ref), -ratios.LOG_BOUND, ratios.LOG_BOUND)
    return ratios.clamp(jnp.expm1(log_ratio) - log_ratio, -K3_BOUND, K3_BOUND)


def absolute(logp: Array, logp_ref: Array) -> Array:
    """|z|, [B, T], as in verl's `kl_penalty`.

    Unit: token. Gradient: sign(z) per log pi, 0 at z = 0; on-policy that of no KL. Use: configs of
    verl; value and gradient are biased.
    """
    difference = _difference(logp, logp_ref)
    return jax.lax.stop_gradient(jnp.sign(difference)) * difference


def k1_plus(logp: Array, logp_ref: Array) -> Array:
    """Value of k1, gradient of k2 (verl's "k1+"), [B, T].

    Unit: token. Gradient: z per log pi, on-policy that of KL(pi || ref). Use: `k2` as a loss with
    an unbiased, noisy value on fresh samples.
    """
    return _straight_through(k1(logp, logp_ref), k2(logp, logp_ref))


def k3_plus(logp: Array, logp_ref: Array) -> Array:
    """Value of k3 with its clamps, gradient of k2 without any (verl's "k3+"), [B, T].

    Unit: token. Gradient: z per log pi, on-policy that of KL(pi || ref). Use: a loss on fresh
    samples, with a value of low variance; biased after the first update or with an engine gap.
    """
    return _straight_through(k3(logp, logp_ref), k2(logp, logp_ref))


def absolute_plus(logp: Array, logp_ref: Array) -> Array:
    """Value |z|, gradient of k2 (verl's "abs+"), [B, T].

    Unit: token. Gradient: z per log pi, on-policy that of KL(pi || ref). Use: configs of verl; the
    value is biased, so prefer `k3+`.
    """
    return _straight_through(absolute(logp, logp_ref), k2(logp, logp_ref))


@Traits(needs=("logp_old",))
def is_k3(logp: Array, logp_ref: Array, *, logp_old: Array) -> Array:
    """Unbiased KL of DeepSeek-V3.2 (arXiv:2512.02556, eq. 7), r (exp(-z) - 1 + z), r = pi / pi_old.

    On samples of pi_old, value and gradient have the expectations KL(pi || ref) and its gradient.
    The gradient flows through the ratio as well, and the two terms add up to r z; it is computed in
    that form, because their sum in float32 loses every digit where exp(-z) is large. With the ratio
    detached it would be the one of k3.

    The log-ratio and -z are clamped to +-20 before exp. The value has no other bound. Multiply by
    no further weight: the ratio is in it.

    Unit: token. Gradient: r z per log pi, that of KL(pi || ref) on samples of pi_old; 0 where log r
    is clamped. Use: several updates per batch; r is unbounded, and an engine gap stays outside
    the centre behav.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats; the only input with a gradient.
      logp_ref: [B, T] log-probs of the reference, nats.
      logp_old: [B, T] log-probs of the policy that sampled, nats; the sampler's own (logp_behav) if
        the engine gap is to be corrected too.

    Returns kl_bt [B, T] in nats.
    """
    ratio = ratios.bounded_exp(_difference(logp, logp_old))
    difference = jax.lax.stop_gradient(_difference(logp, logp_ref))
    log_ratio = ratios.clamp(-difference, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    return _straight_through(ratio * (jnp.expm1(log_ratio) - log_ratio), ratio * difference)


@Traits(needs=("logp_old",))
def clipped_is_k2(
    logp: Array, logp_ref: Array, *,
    logp_old: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> Array:
    """KL loss for several updates per batch (arXiv:2510.01555, arXiv:2503.01491), max(r z, clip(r) z), z
    detached.

    z is the gradient coefficient of k2 as a loss, i.e. k1 as a reward; r = pi / pi_old and its band
    are those of the policy term, so this is PPO-clip's loss with the advantage -z. Inside the band
    the value and the gradient have the expectations KL(pi || ref) and its gradient on samples of
    pi_old.

    Taken from a survey, which prints min(r z, clip(r) z) as it stands in an objective that is
    maximised; a loss that is minimised needs the maximum, or the clip would hold r outside the
    band.

    Unit: token. Gradient: r z per log pi, that of KL(pi || ref) on samples of pi_old; 0 where r has
    moved beyond the band towards a lower KL. Use: `is_k3` with a bounded step; beyond the band it
    is biased.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats; the only input with a gradient.
      logp_ref: [B, T] log-probs of the reference, nats.
      logp_old: [B, T] log-probs of the policy at the start of the updates, nats.
      clip_low, clip_high: widths of the band below and above 1; 0.2 as for the policy term.

    Returns kl_bt [B, T] in nats.
    """
    difference = jax.lax.stop_gradient(_difference(logp, logp_ref))
    return _clipped(difference, logp, logp_old, clip_low, clip_high)


def _clipped(coefficient, logp, logp_old, clip_low, clip_high):
    """max(r c, clip(r) c), the gradient through r alone."""
    ratio = ratios.bounded_exp(_difference(logp, logp_old))
    clipped = ratios.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(ratio * coefficient, clipped * coefficient)


@Traits(needs=("logp_old",))
def clipped_is_k3(
    logp: Array, logp_ref: Array, *,
    logp_old: Array, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
) -> Array:
    """`clipped_is_k2` with the gradient coefficient of k3 as a loss, c = 1 - exp(-z)
    (arXiv:2510.01555).

    The coefficient of k1 is 1 and knows no reference, so that form does not exist here.

    Unit: token. Gradient: r c per log pi, that of KL(ref || pi) on samples of pi_old; 0 where r has
    moved beyond the band towards a lower KL. Use: the forward KL over several updates; its value says
    nothing of the size of the KL.

    Args:
      logp, logp_ref, logp_old, clip_low, clip_high: as `clipped_is_k2`.

    Returns kl_bt [B, T].
    """
    difference = jax.lax.stop_gradient(_difference(logp, logp_ref))
    difference = ratios.clamp(difference, -ratios.LOG_BOUND, ratios.LOG_BOUND)
    return _clipped(-jnp.expm1(-difference), logp, logp_old, clip_low, clip_high)


def _full_kl(logits_p, logits_q):
    """KL(softmax(logits_p) || softmax(logits_q)) over the last axis; a logit of -inf in p adds
    0."""
    chex.assert_rank([logits_p, logits_q], 3)
    chex.assert_equal_shape([logits_p, logits_q])
    logp_btv = jax.nn.log_softmax(ratios.as_float(logits_p))
    logq_btv = jax.nn.log_softmax(ratios.as_float(logits_q))
    is_possible_btv = logp_btv > -jnp.inf
    gap_btv = jnp.where(is_possible_btv, logp_btv, 0.0) - jnp.where(is_possible_btv, logq_btv, 0.0)
    return jnp.sum(jnp.exp(logp_btv) * gap_btv, axis=-1)


@Traits(needs=("logits", "logits_ref"))
def exact_reverse(logp: Array, logp_ref: Array, *, logits: Array, logits_ref: Array) -> Array:
    """KL(pi || ref) over the whole vocabulary, [B, T].

    As in the trust-region masking of arXiv:2512.23075, there between sampler and learner. Infinite
    where pi can draw a token that the reference cannot.

    Unit: token. Gradient: through the logits, p_v (z_v - KL) each. Use: a KL without sampling
    error; costs the logits of both models.

    Args:
      logp, logp_ref: not used.
      logits: [B, T, V] of the policy at the temperature of sampling; the gradient flows through it.
      logits_ref: [B, T, V] of the reference, likewise; -inf for tokens outside a kept set.

    Returns kl_bt [B, T] in nats.
    """
    del logp, logp_ref
    return _full_kl(logits, jax.lax.stop_gradient(logits_ref))


@Traits(needs=("logits", "logits_ref"))
def exact_forward(logp: Array, logp_ref: Array, *, logits: Array, logits_ref: Array) -> Array:
    """KL(ref || pi) over the whole vocabulary, [B, T]. Source as `exact_reverse`, and so are the
    arguments.

    Unit: token. Gradient: through the logits, p_v - q_v each. Use: to keep what the reference can
    say (it covers modes); costs as `exact_reverse`.
    """
    del logp, logp_ref
    return _full_kl(jax.lax.stop_gradient(logits_ref), logits)


def penalized_rewards(rewards: Array, mask: Array, kl_bt: Array, kl_coeff: Numeric) -> Array:
    """Rewards per token minus kl_coeff times the KL: the reward placement, without gradient.

    With k1 of the policy that sampled (k1(logp_old, logp_ref)) a policy gradient on these rewards
    descends the KL of whole sequences.

    Args:
      rewards: [B] (put on the last valid token) or [B, T].
      mask: [B, T] valid tokens.
      kl_bt: [B, T] nats.
      kl_coeff: reward units per nat.

    Returns rewards [B, T], 0 at padding.
    """
    chex.assert_equal_shape([kl_bt, mask])
    penalty_bt = kl_coeff * ratios.zero_padding(kl_bt, mask)
    return jax.lax.stop_gradient(returns.token_rewards(rewards, mask) - penalty_bt)


def sequence_kl(kl_bt: Array, mask: Array, seg: Array | None = None) -> Array:
    """Mean over sequences of the mean over tokens, a scalar in nats, for a controller.

    verl counts a row without valid tokens as 0; here it is not counted.
    """
    is_sequence_bs = ratios.sequence_count(kl_bt, mask, seg) > 0
    return jax.lax.stop_gradient(
        ratios.masked_mean(ratios.sequence_mean(kl_bt, mask, seg), is_sequence_bs)
    )


KL = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": k1_plus,
    "k2+": k2,
    "k3+": k3_plus,
    "abs+": absolute_plus,
    "is_k3": is_k3,
    "clipped_is_k2": clipped_is_k2,
    "clipped_is_k3": clipped_is_k3,
    "exact_reverse": exact_reverse,
    "exact_forward": exact_forward,
}
