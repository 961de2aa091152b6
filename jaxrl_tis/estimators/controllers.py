"""Controllers: small state machines that set a learning rate, a gradient or a coefficient from the
measurements of a step.

A state is a NamedTuple of arrays, so it is a pytree: it can be carried through jit and scan, and it
can be saved with a checkpoint. An update is a pure function of the state and the measurement, with
the parameters as keywords. None of them carries a gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators.traits import Traits

# ESS-guided learning rate

ESS_POWERS = {"sqrt": 0.5, "linear": 1.0}


@Traits(of_policy=True)
def ess_scale(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    vcpo_ess_target: float = 1.0, vcpo_rule: str = "sqrt",
) -> tuple[Array, Array]:
    """Learning-rate factor of VCPO (arXiv:2602.17616), min(1, e / e_0)^(1/2), for this step alone.

    e = (sum_i w_i)^2 / (B sum_i w_i^2) with w_i = prod_t pi / mu, not truncated: the effective
    share of the batch's sequences, between 1 / B and 1. It does not depend on a common factor of
    the weights, so they are taken relative to the largest and need no bound. Stateless: the next
    step starts from the full learning rate again.

    Reads: log-ratios of the batch. Sets: the learning rate of this step. Use: stale batches, to
    step less when few sequences hold the weight; with long responses the step stays tiny.

    Args:
      log_ratio: [B, T] nats, the policy that the update starts from minus the sampler.
      mask: [B, T] valid tokens.
      seg: [B, T] sequence ids of packed rows, or None.
      vcpo_ess_target: e_0, the share at which the learning rate is still full; 1 in the authors'
        code.
      vcpo_rule: "sqrt", the authors' default, or "linear" for the power 1: their option, and what a
        survey means by a rate that falls proportionally.

    Returns (factor in [0, 1], e); both 0 for an empty mask, as an empty batch should change
    nothing.
    """
    ratios.check_choice("vcpo_rule", vcpo_rule, ESS_POWERS)
    if vcpo_ess_target <= 0.0:
        raise ValueError(f"vcpo_ess_target is {vcpo_ess_target}; a share must be above 0.")
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    sum_bs, is_sequence_bs = stats.log_ratio_sum, stats.count > 0
    w_bs = jnp.exp(jnp.where(is_sequence_bs, sum_bs - ratios.masked_max(sum_bs, is_sequence_bs), 0))
    ess = ratios.effective_sample_size(w_bs, is_sequence_bs)
    factor = jnp.minimum(ess / vcpo_ess_target, 1.0) ** ESS_POWERS[vcpo_rule]
    return jax.lax.stop_gradient((factor, ess))


# Learning-rate halving on a surge of the response length


class LengthSurge(NamedTuple):
    """State of `length_surge`; multiply the learning rate by `scale`."""

    lengths: Array  # [window] mean response length of the last steps, a ring
    step: Array  # updates so far
    cooldown: Array  # updates left in which no further cut is made
    scale: Array  # factor of the learning rate, 1 at the start


def length_surge_init(window: int = 100) -> LengthSurge:
    """The state before the first step. The length is compared with that of `window` steps ago, 100 in
    the survey of the rule."""
    if window < 1:
        raise ValueError(f"window is {window} in 'length_surge'; compare with at least 1 step ago.")
    return LengthSurge(
        lengths=jnp.zeros(window, jnp.float32),
        step=jnp.zeros((), jnp.int32),
        cooldown=jnp.zeros((), jnp.int32),
        scale=jnp.ones((), jnp.float32),
    )


def length_surge(
    state: LengthSurge, mean_length: Numeric, *,
    surge_cooldown: int, surge_floor: float, surge_ratio: float = 1.2, surge_factor: float = 0.5,
    window: int = 100,
) -> LengthSurge:
    """Cuts the learning rate when responses grow (arXiv:2602.01826): if L_t > 1.2 L_{t - 100}, lr
    halves.

    The rule and its numbers are those of a survey of the paper, whose own schedule was not read.
    The cool-down and the floor are ours and therefore required: the plain rule would halve at every
    step of a surge.

    Before a full window of steps there is nothing to compare with, and no cut. A length of 0, from
    a step without responses, is no reference.

    Reads: mean response length, now and `window` steps ago. Sets: the learning rate from
    here on. Use: as a brake, since a surge precedes a collapse by tens of steps in the survey;
    tasks that need longer answers brake too, and nothing raises the rate again.

    Args:
      state: from `length_surge_init` or the previous step.
      mean_length: mean number of response tokens of this step.
      surge_cooldown: steps after a cut in which no other is made; the window is a natural choice.
      surge_floor: smallest scale.
      surge_ratio: growth over the window above which it is a surge, strictly.
      surge_factor: what a cut multiplies the scale by.
      window: steps back to the length that is compared; the state has as many.

    Returns the new state.
    """
    mean_length = jnp.asarray(mean_length, state.lengths.dtype)
    if state.lengths.shape[0] != window:
        raise ValueError(f"window is {window}, and the state has {state.lengths.shape[0]} lengths.")
    slot = state.step % window
    reference = state.lengths[slot]
    has_grown = (reference > 0) & (mean_length > surge_ratio * reference)
    is_cut = has_grown & (state.step >= window) & (state.cooldown == 0)
    cut = jnp.minimum(state.scale, jnp.maximum(state.scale * surge_factor, surge_floor))
    cooldown = jnp.where(is_cut, surge_cooldown, jnp.maximum(state.cooldown - 1, 0))
    return LengthSurge(
        lengths=state.lengths.at[slot].set(mean_length),
        step=state.step + 1,
        cooldown=cooldown.astype(state.cooldown.dtype),
        scale=jnp.where(is_cut, cut, state.scale),
    )


# Gradient alignment


class GradientAlignment(NamedTuple):
    """State of `gradient_alignment`: the gradient of the previous step, before any change."""

    previous: Any


def gradient_alignment_init(gradient: Any) -> GradientAlignment:
    """The state before the first step: zeros, to which nothing is aligned; `gradient` is a pytree
    of the gradient's shapes and types, e.g. the parameters."""
    return GradientAlignment(jax.tree.map(jnp.zeros_like, gradient))


def _tree_dot(a, b):
    """Inner product of two pytrees, at least in float32."""
    products = jax.tree.map(lambda x, y: jnp.sum(ratios.as_float(x) * ratios.as_float(y)), a, b)
    return jax.tree.reduce(jnp.add, products)


def gradient_alignment(
    state: GradientAlignment, gradient: Any, *, gac_low: float, gac_high: float
) -> tuple[GradientAlignment, Any, dict[str, Array]]:
    """GAC (arXiv:2603.01501): removes from g_k its part along g_{k-1}, c = cos(g_k, g_{k-1}).

      c <= gac_low              g_k stays
      gac_low < c <= gac_high   the part along g_{k-1} shrinks until the cosine is gac_low
      c > gac_high              0, a step to skip

    That the method projects on one side, within thresholds, and skips is taken from secondary
    notes; the thresholds and the amount were not read, so the thresholds are required and the
    amount is ours. Opposed gradients and the first step stay as they are.

    Reads: the gradient and the previous step's. Sets: the gradient. Use: asynchronous training,
    where by the authors stale gradients align from step to step; it keeps a second gradient, and
    thresholds are to be found.

    Args:
      state: from `gradient_alignment_init` or the previous step; as large as the gradient.
      gradient: pytree of arrays.
      gac_low: cosine up to which nothing is done, at least 0.
      gac_high: cosine above which the step is skipped, at most 1.

    Returns (new state, new gradient, {"gac/cosine", "gac/is_skipped": 1 if skipped}). An optimizer
    with momentum moves on a zero gradient too: skip its step where is_skipped is 1.
    """
    if not 0.0 <= gac_low < gac_high <= 1.0:
        raise ValueError(
            f"gac_low is {gac_low} and gac_high {gac_high}; 0 <= gac_low < gac_high <= 1 is needed."
        )
    dot = _tree_dot(gradient, state.previous)
    previous_square = _tree_dot(state.previous, state.previous)
    norms = jnp.sqrt(_tree_dot(gradient, gradient)) * jnp.sqrt(previous_square)
    cosine = jnp.clip(ratios.safe_divide(dot, norms), -1.0, 1.0)
    # The part along g_{k-1} is c and the rest sqrt(1 - c^2), in units of |g_k|.
    wanted = gac_low * jnp.sqrt((1.0 - jnp.square(cosine)) / (1.0 - gac_low**2))
    removed = 1.0 - ratios.safe_divide(wanted, cosine)
    along = removed * ratios.safe_divide(dot, previous_square)
    is_aligned, is_skipped = cosine > gac_low, cosine > gac_high

    def control(g, previous):
        # A selection and not a factor of 0, so that a previous gradient with a NaN is left behind.
        reduced = jnp.where(is_aligned, g - (along * previous).astype(g.dtype), g)
        return jnp.where(is_skipped, jnp.zeros_like(g), reduced)

    metrics = {"gac/cosine": cosine, "gac/is_skipped": is_skipped.astype(jnp.float32)}
    new = jax.tree.map(control, gradient, state.previous)
    return GradientAlignment(gradient), new, metrics


# Dual variable of R2VPO


class R2VPODual(NamedTuple):
    """State of `r2vpo_dual`: the multiplier that the objective "r2vpo" takes."""

    r2vpo_lambda: Array


def r2vpo_dual_init(r2vpo_lambda: float = 0.0) -> R2VPODual:
    """The state before the first step; 0 is no penalty."""
    return R2VPODual(jnp.asarray(r2vpo_lambda, jnp.float32))


def ratio_variance(logp: Array, logp_old: Array, mask: Array) -> Array:
    """Mean of (r - 1)^2 over the valid tokens, r = exp(clamp(logp - logp_old, +-20)), no gradient.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats.
      logp_old: [B, T] log-probs of the centre of the trust region, nats.
      mask: [B, T] valid tokens.
    """
    log_ratio_bt = ratios.safe_log_ratio(logp, logp_old, mask)
    deviation_bt = jnp.expm1(ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND))
    return jax.lax.stop_gradient(ratios.masked_mean(jnp.square(deviation_bt), mask))


def r2vpo_dual(
    state: R2VPODual, variance: Numeric, *, r2vpo_bound: float, r2vpo_step: float
) -> R2VPODual:
    """Dual ascent of R2VPO (arXiv:2601.03320), lambda <- max(0, lambda + step (variance - bound)).

    Primal and dual are taken from the abstract and secondary notes; the constants were not read and
    are required, and neither was the granularity of r (`ratio_variance` takes tokens).

    Reads: the mean of (r - 1)^2. Sets: r2vpo_lambda of the objective "r2vpo". Use: a bound on the
    variance instead of its price; both constants are to be found.

    Args:
      state: from `r2vpo_dual_init` or the previous step.
      variance: measured mean of (r - 1)^2.
      r2vpo_bound: delta, the largest variance that is free.
      r2vpo_step: eta, step size of the dual, > 0.

    Returns the new state; hold it constant within a step.
    """
    if r2vpo_bound < 0.0 or r2vpo_step <= 0.0:
        raise ValueError(
            f"r2vpo_bound is {r2vpo_bound} and r2vpo_step {r2vpo_step}; give a bound of at least 0 "
            "and a step > 0."
        )
    moved = state.r2vpo_lambda + r2vpo_step * (variance - r2vpo_bound)
    moved = jnp.maximum(moved, 0.0).astype(state.r2vpo_lambda.dtype)
    return R2VPODual(jax.lax.stop_gradient(moved))


# Perturbation of the layers


class LayerwisePerturbation(NamedTuple):
    """State of `layerwise_perturbation`: log of sigma, [layers]."""

    log_std: Array


def layerwise_perturbation(
    num_layers: int, *, perturb_std: float = 1e-2, perturb_lr: float = 5e-4
) -> LayerwisePerturbation:
    """The first state of adaptive layerwise perturbation, ALP (arXiv:2603.19470 and its
    repository): the input h of layer l is h + sigma_l eps in the update's own forward pass, eps ~
    N(0, 1).

    The ratio of the loss then has the perturbed policy above and one that nothing perturbs below:
    with the centre behav, as in the paper, the sampler; with the centre old the policy before the update.
    sigma_l = exp(log_std_l) is a parameter of the loss like any other, with an Adam of its own. The
    noise depends on the row of the minibatch, the update and the layer, and not on how rows are cut
    into micro-batches or over devices. Old log-probs need a forward pass before the update.

    Reads: the gradient by sigma. Sets: the noise of the layers. Use: sharp policies, whose ratios
    have heavy tails; its start is to be found (the authors use 1e-6, which 16-bit activations do
    not see, to 2e-2).

    Args:
      num_layers: of the model.
      perturb_std: sigma at the first update, > 0.
      perturb_lr: learning rate of log_std, at least 0; 0 keeps sigma.
    """
    if perturb_std <= 0.0 or perturb_lr < 0.0:
        raise ValueError(
            f"perturb_std is {perturb_std} and perturb_lr {perturb_lr}; give a deviation > 0 and a "
            "learning rate of at least 0."
        )
    return LayerwisePerturbation(jnp.full((num_layers,), jnp.log(perturb_std), jnp.float32))


# Coefficient of the KL penalty


class KLCoefficient(NamedTuple):
    """State of `adaptive_kl`: the coefficient of the KL penalty, per nat."""

    kl_coeff: Array


def kl_coefficient_init(kl_coeff: float = 0.001) -> KLCoefficient:
    """The state before the first step; 0.001 is verl's default."""
    return KLCoefficient(jnp.asarray(kl_coeff, jnp.float32))


def adaptive_kl(
    state: KLCoefficient, kl: Numeric, num_seqs: Numeric, *,
    kl_target: float = 0.1, kl_horizon: float = 10000.0,
) -> KLCoefficient:
    """Proportional control of the KL (arXiv:1909.08593), coeff *= 1 + clip(kl / target - 1, +-0.2)
    n / horizon.

    Reads: the KL of the step. Sets: kl_coeff. Use: to hold a KL that is known to be right; it
    reacts over kl_horizon sequences, and needs an unbiased KL (`k1` or `k3` on fresh samples).

    Args:
      state: from `kl_coefficient_init` or the previous step.
      kl: measured KL of the step in nats, `kl.sequence_kl`.
      num_seqs: n, sequences of the step.
      kl_target: wanted KL in nats, > 0; 0.1 is verl's default.
      kl_horizon: sequences over which a coefficient at full error changes by 20 %, > 0; 10000 is
        verl's default.

    Returns the new state; penalise the step itself with the coefficient before it.
    """
    if kl_target <= 0.0 or kl_horizon <= 0.0:
        raise ValueError(f"kl_target is {kl_target} and kl_horizon {kl_horizon}; give both > 0.")
    error = jnp.clip(kl / kl_target - 1.0, -0.2, 0.2)
    moved = state.kl_coeff * (1.0 + error * num_seqs / kl_horizon)
    moved = moved.astype(state.kl_coeff.dtype)
    return KLCoefficient(jax.lax.stop_gradient(moved))


CONTROLLERS = {
    "ess_scale": ess_scale,
    "length_surge": length_surge,
    "gradient_alignment": gradient_alignment,
    "layerwise_perturbation": layerwise_perturbation,
    "r2vpo_dual": r2vpo_dual,
    "adaptive_kl": adaptive_kl,
}
