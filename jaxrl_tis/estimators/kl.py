"""KL estimators per token, from samples of the policy that is trained.

Each entry of `KL` maps (logp, logp_ref) to kl_bt [B, T] in nats. Only logp carries a gradient.
Padding is the caller's concern: zero it in both arguments first (`ratios.zero_padding`), and the
reduction drops it.

Write z = logp - logp_ref. On samples of the current policy, with the prefixes held fixed:

  name  value              gradient w.r.t. logp   expectation of value   expectation of gradient
  k1    z                  1                      KL(pi || ref)          0
  k2    z^2 / 2            z                      biased                 grad KL(pi || ref)
  k3    exp(-z) - 1 + z    1 - exp(-z)            KL(pi || ref)          grad KL(ref || pi)
  abs   |z|                sign(z), 0 at z = 0    biased                 biased

So k1 belongs in a reward and teaches nothing as a loss; k2 is the loss with the reverse-KL
gradient. Estimators: Schulman, "Approximating KL Divergence"; gradients: arXiv:2510.01555.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.estimators import ratios

K3_BOUND = 10.0  # verl's bound on the k3 value


def _difference(logp: chex.Array, logp_ref: chex.Array) -> chex.Array:
    chex.assert_rank([logp, logp_ref], 2)
    chex.assert_equal_shape([logp, logp_ref])
    return ratios.as_float(logp) - jax.lax.stop_gradient(ratios.as_float(logp_ref))


def k1(logp: chex.Array, logp_ref: chex.Array) -> chex.Array:
    """z = logp - logp_ref, [B, T]; gradient 1, whose expectation on-policy is zero."""
    return _difference(logp, logp_ref)


def k2(logp: chex.Array, logp_ref: chex.Array) -> chex.Array:
    """z^2 / 2, [B, T]; gradient z, whose expectation on-policy is the gradient of KL(pi || ref)."""
    return 0.5 * jnp.square(_difference(logp, logp_ref))


def k3(logp: chex.Array, logp_ref: chex.Array) -> chex.Array:
    """exp(-z) - 1 + z, [B, T], with -z clamped to +-20 and the result to +-10 (verl's low_var_kl).

    Gradient 1 - exp(-z) inside both clamps, 0 outside.
    """
    log_ratio = ratios.clamp(-_difference(logp, logp_ref), -ratios.LOG_BOUND, ratios.LOG_BOUND)
    return ratios.clamp(jnp.expm1(log_ratio) - log_ratio, -K3_BOUND, K3_BOUND)


def absolute(logp: chex.Array, logp_ref: chex.Array) -> chex.Array:
    """|z|, [B, T]; gradient sign(z), and 0 at z = 0 (where `jnp.abs` would have 1)."""
    difference = _difference(logp, logp_ref)
    return jax.lax.stop_gradient(jnp.sign(difference)) * difference


KL = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
