"""Losses without a hard clip: a gate or a penalty keeps the policy near the old one. Among them are
regressions of the log-ratio on the advantage.

`objectives` describes the shared arguments (logp, logp_old, adv, mask, seg) and the result.
r = exp(logp - logp_old), with the log-ratio clamped to +-20 first, and the gradient flows through r.
The regressions (`oapl`, `dro`) use the log-ratio without the clamp. Nothing is clipped, so
actor/pg_clipfrac is 0, except for a survey's form of `r2vpo`.
"""

import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import controllers, ppo, ratios, returns
from jaxrl_tis.estimators.traits import Traits


def _inputs(logp, logp_old, adv, mask):
    """(log-ratio clamped to +-20, adv) [B, T]."""
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    return ratios.clamp(log_ratio_bt, -ratios.LOG_BOUND, ratios.LOG_BOUND), adv_bt


def _drift(log_ratio_bt, mask):
    return ppo.clip_metrics(log_ratio_bt, jnp.zeros_like(log_ratio_bt), mask)


def sapo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    temperature_pos: Numeric = 1.0, temperature_neg: Numeric = 1.05,
) -> ppo.Loss:
    """SAPO (arXiv:2511.20347), l = -(4 / tau) sigmoid(tau (r - 1)) A.

    tau -> 0 is importance sampling without a clip. At r = 1 the loss is -2 A / tau, a constant that
    is no error. The aggregation of the paper and verl is seq-mean-token-mean.

    Unit: token. Trust region: soft, the factor 1 / cosh(tau (r - 1) / 2)^2, tau a temperature.
    Gradient: through r, -r A / cosh(tau (r - 1) / 2)^2 per log pi; fades on both sides, never 0.
    Use: tokens at the edge of a hard clip; at tau = 1 the gate is wide (half the gradient at r =
    4.5).

    Args:
      temperature_pos: tau where A > 0; 1.0 as in the paper.
      temperature_neg: tau where A <= 0; 1.05 as in the paper: bad tokens fade faster.

    Returns loss_bt; actor/ppo_kl is the mean of logp_old - logp.
    """
    del seg
    log_ratio_bt, adv_bt = _inputs(logp, logp_old, adv, mask)
    tau_bt = jnp.where(adv_bt > 0, temperature_pos, temperature_neg)
    gate_bt = 4.0 / tau_bt * jax.nn.sigmoid(tau_bt * (jnp.exp(log_ratio_bt) - 1.0))
    return -gate_bt * adv_bt, _drift(log_ratio_bt, mask)


def _group_variance(x_bt, group, mask, seg):
    """Variance of x [B, T] over the valid tokens of each token's group, [B, T], no gradient."""
    ids_n = returns.group_ids(ratios.sequence_group(group, mask, seg).reshape(-1))
    count_bs = ratios.sequence_count(x_bt, mask, seg)
    count_n = returns.group_sum(count_bs.reshape(-1), ids_n)

    def group_mean(y_bt):
        sum_bs = ratios.sequence_sum(jax.lax.stop_gradient(y_bt), mask, seg)
        mean_n = ratios.safe_divide(returns.group_sum(sum_bs.reshape(-1), ids_n), count_n)
        return ratios.to_tokens(mean_n.reshape(count_bs.shape), seg, mask.shape[1])

    return group_mean(jnp.square(x_bt - group_mean(x_bt)))


@Traits(needs=("group",), is_grouped="survey", example={"r2vpo_lambda": 0.04})
def r2vpo(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    r2vpo_lambda: Numeric, group: Array | None = None, form: str = "paper",
    r2vpo_clip: Numeric = 0.2,
) -> ppo.Loss:
    """R2VPO (arXiv:2601.03320), l = -(r A - r2vpo_lambda (r - 1)^2).

    The Lagrangian of max E[r A] under E[(r - 1)^2] <= bound; lambda = 0 is importance sampling
    without a clip. `controllers.r2vpo_dual` moves lambda from step to step. The paper's abstract
    and notes on it state the constraint and the primal-dual method; constants and granularity were
    not read: r is per token here, and lambda is required. Aggregation: token-mean, the expectation
    of the constraint. A survey describes another method, a clip that is tighter in groups whose
    ratios vary more, against the paper's abstract (no clip): form="survey".

    Unit: token. Trust region: soft, r2vpo_lambda (r - 1)^2; a token rests at r = 1 + A / (2
    lambda). Gradient: through r, -r (A - 2 lambda (r - 1)) per log pi; lambda is detached. Use: a
    penalty in place of a clip; lambda must be found, or moved by its controller.

    Args:
      r2vpo_lambda: multiplier of the constraint, >= 0, without gradient; a third party fixes 0.04.
      group: [B, T] int, equal for the samples of one prompt; for the survey's form, whose call must
        hold all of them.
      form: "paper", or "survey": PPO-clip with the widths r2vpo_clip / (1 + r2vpo_lambda V), V the
        variance of r over the group's tokens, detached. The survey says so in words; the formula is
        ours, and lambda = 0 makes it `ppo`.
      r2vpo_clip: width of the survey's band on both sides where V = 0; 0.2 as in PPO.

    Returns loss_bt; "actor/ratio_variance" is the mean of (r - 1)^2, which the dual takes. In the
    survey's form actor/pg_clipfrac is the fraction of tokens on the clipped branch.
    """
    ratios.check_choice("form", form, ("paper", "survey"))
    log_ratio_bt, adv_bt = _inputs(logp, logp_old, adv, mask)
    ratio_bt = jnp.exp(log_ratio_bt)
    variance = {"actor/ratio_variance": controllers.ratio_variance(logp, logp_old, mask)}
    r2vpo_lambda = jax.lax.stop_gradient(r2vpo_lambda)
    if form == "paper":
        penalty_bt = r2vpo_lambda * jnp.square(ratio_bt - 1.0)
        return penalty_bt - ratio_bt * adv_bt, _drift(log_ratio_bt, mask) | variance
    if group is None:
        raise ValueError("r2vpo(form='survey') compares the samples of a prompt: pass group.")
    width_bt = r2vpo_clip / (1.0 + r2vpo_lambda * _group_variance(ratio_bt, group, mask, seg))
    loss_bt, is_clipped_bt = ppo.pessimistic(ratio_bt, adv_bt, 1.0 - width_bt, 1.0 + width_bt)
    return loss_bt, ppo.clip_metrics(log_ratio_bt, is_clipped_bt, mask) | variance


def _tilt_divergence(excess_b, count_b, ids, weight_b):
    """KL(tilt || uniform) in nats of each row's group, [N], for excess = (score - best) / lambda.

    Small divergences keep their digits: the log of the mean of exp(excess) is taken by log1p of the
    mean of expm1.

    Args:
      excess_b: [N] <= 0, log of the tilt, not normalised.
      count_b: [N] size of the row's group.
      ids: [N] groups, from `returns.group_ids`.
      weight_b: [N] 1 for a row that counts and 0 for one that does not.
    """
    mean_b = returns.group_sum(weight_b * jnp.expm1(excess_b), ids) / count_b
    log_p_b = excess_b - jnp.log1p(mean_b)  # log of the tilt relative to uniform
    return returns.group_sum(weight_b * jnp.exp(log_p_b) * log_p_b, ids) / count_b


def quatro_multiplier(
    scores_b: Array, group_b: Array, is_valid_b: Array, *, quatro_delta: float, quatro_floor: float
) -> Array:
    """QUATRO's multiplier of a prompt (arXiv:2602.04620), argmin over lambda of lambda delta +
    lambda log mean_i exp(R_i / lambda).

    There the group's weights exp(R_i / lambda) have KL quatro_delta from uniform, which falls as
    lambda grows; it is found by bisection of log lambda. For small delta it is std(R) / sqrt(2
    delta). A group whose rewards are equal, or of which too large a share has the best reward for
    any tilt to reach delta, gets the floor.

    Args:
      scores_b: [N] reward of each sequence; a constant added to a group changes nothing.
      group_b: [N] int, equal for the samples of one prompt.
      is_valid_b: [N] bool, sequences that count.
      quatro_delta: the KL allowed, nats, > 0.
      quatro_floor: smallest multiplier, in reward units, > 0.

    Returns lambda [N] without gradient, the same on all rows of a group.
    """
    if quatro_delta <= 0.0 or quatro_floor <= 0.0:
        raise ValueError(
            f"quatro_delta is {quatro_delta} and quatro_floor {quatro_floor}; give both > 0."
        )
    ids = returns.group_ids(group_b)
    scores_b = jax.lax.stop_gradient(ratios.as_float(scores_b))
    weight_b = is_valid_b.astype(scores_b.dtype)
    count_b = jnp.maximum(returns.group_sum(weight_b, ids), 1.0)
    best_b = returns.group_max(jnp.where(is_valid_b, scores_b, -jnp.inf), ids)
    worst_b = -returns.group_max(jnp.where(is_valid_b, -scores_b, -jnp.inf), ids)
    is_empty_b = best_b < worst_b
    gap_b = jnp.where(is_valid_b, scores_b - best_b, 0.0)
    # The KL of a tilt is at most (best - worst)^2 / (8 lambda^2), so the root is below this.
    spread_b = jnp.where(is_empty_b, 0.0, best_b - worst_b)
    high_b = jnp.log(jnp.maximum(spread_b / jnp.sqrt(8.0 * quatro_delta), quatro_floor))

    def halve(_, bounds):
        low_b, high_b = bounds
        middle_b = 0.5 * (low_b + high_b)
        excess_b = jnp.maximum(gap_b * jnp.exp(-middle_b), -80.0)  # exp(-80) counts as 0
        is_over_b = _tilt_divergence(excess_b, count_b, ids, weight_b) > quatro_delta
        return jnp.where(is_over_b, middle_b, low_b), jnp.where(is_over_b, high_b, middle_b)

    low_b = jnp.full_like(high_b, jnp.log(quatro_floor))
    _, high_b = jax.lax.fori_loop(0, 50, halve, (low_b, high_b))
    return jnp.maximum(jnp.exp(high_b), quatro_floor)


@Traits(needs=("group",), is_grouped=True, example={"quatro_delta": 0.1, "quatro_floor": 1e-3})
def quatro(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    group: Array, quatro_delta: float, quatro_floor: float,
) -> ppo.Loss:
    """QUATRO (arXiv:2602.04620), l = -(r A - lambda_q (r log r - r)) with a multiplier per prompt.

    The Lagrangian of max E[R] under KL(pi || pi_old) <= quatro_delta; lambda_q solves its dual over
    the group, see `quatro_multiplier`. The advantage is R - mean(R), not divided by the std:
    lambda_q is in its units, and a sequence's score is the mean of its tokens' advantages. A call
    must hold all samples of a prompt: a micro-batch that splits them has another lambda_q. Only
    abstract and notes were read: this loss is derived from them, the ratio is per token as in a
    survey, and both constants are required. Aggregation: token-mean.

    Unit: token (ratio), group (multiplier). Trust region: soft, lambda_q for KL(pi || pi_old) <=
    quatro_delta per prompt. Gradient: through r, -r (A - lambda_q log r) per log pi; lambda_q is
    detached. Use: prompts whose rewards spread differently; derived from the abstract alone, and a
    call needs whole groups.

    Args:
      group: [B, T] int, equal for the samples of one prompt.
      quatro_delta: KL allowed per prompt, nats, > 0.
      quatro_floor: smallest multiplier, in reward units, > 0; ours, for groups without a spread.

    Returns loss_bt; "actor/quatro_lambda" is the mean of lambda_q over the valid tokens.
    """
    log_ratio_bt, adv_bt = _inputs(logp, logp_old, adv, mask)
    is_sequence_bs = ratios.sequence_count(adv_bt, mask, seg) > 0
    lambda_n = quatro_multiplier(
        ratios.sequence_mean(adv_bt, mask, seg).reshape(-1),
        ratios.sequence_group(group, mask, seg).reshape(-1),
        is_sequence_bs.reshape(-1),
        quatro_delta=quatro_delta,
        quatro_floor=quatro_floor,
    )
    lambda_bt = ratios.to_tokens(lambda_n.reshape(is_sequence_bs.shape), seg, mask.shape[1])
    lambda_bt = ratios.zero_padding(lambda_bt, mask)
    ratio_bt = jnp.exp(log_ratio_bt)
    loss_bt = lambda_bt * ratio_bt * (log_ratio_bt - 1.0) - ratio_bt * adv_bt
    metrics = {"actor/quatro_lambda": ratios.masked_mean(lambda_bt, mask)}
    return loss_bt, _drift(log_ratio_bt, mask) | metrics


@Traits(needs=("logp_behav",), is_per_sequence=True, example={"oapl_beta": 0.5})
def oapl(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, oapl_beta: float = 1e-3,
) -> ppo.Loss:
    """OAPL (arXiv:2602.19362), l = (oapl_beta log(pi(y) / mu(y)) - A)^2 of a sequence, on each of
    its valid tokens.

    A regression on A = R - V, the advantage "oapl"; use weight "none". logp_old is not used. The
    gradient under seq-mean-token-mean, the authors' aggregation, is 2 beta (beta log(pi / mu) - A)
    per token: on policy 2 beta times the usual one. Formula, aggregation and beta agree with the
    authors' code (danieldritter/OAPL at 6153219b).

    Unit: sequence. Trust region: soft, log(pi / mu) is drawn to A / oapl_beta. Gradient: through
    the sequence's log pi; 0 at log(pi / mu) = A / oapl_beta. Use: samplers far behind (by the
    authors beyond 400 updates), without ratios or critic, under the schedule `oapl`.

    Args:
      logp_behav: [B, T] log-probs of the sampler as it reported them, nats.
      oapl_beta: reward per nat of log-ratio, > 0; the authors' default.

    Returns loss_bt; actor/ppo_kl is taken against the sampler.
    """
    del logp_old
    if oapl_beta <= 0.0:
        raise ValueError(f"oapl_beta is {oapl_beta}; the log-ratio needs a scale above 0.")
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_behav, adv, mask)
    target_bs = ratios.sequence_mean(adv_bt, mask, seg)
    error_bs = oapl_beta * ratios.sequence_sum(log_ratio_bt, mask, seg) - target_bs
    loss_bt = ratios.to_tokens(jnp.square(error_bs), seg, mask.shape[1])
    return ratios.zero_padding(loss_bt, mask), _drift(log_ratio_bt, mask)


@Traits(example={"dro_beta": 0.1})
def dro(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    dro_beta: float,
) -> ppo.Loss:
    """DRO (arXiv:2405.19107; per token as in verl), l = -(A log pi - dro_beta / 2 (log r)^2).

    The log-ratio is not clamped, so the spring pulls at any distance. Aggregation: token-mean.

    Unit: token. Trust region: soft, dro_beta / 2 (log r)^2; a token rests at log r = A / dro_beta.
    Gradient: through log pi, -A + dro_beta log r. Use: old data, by REINFORCE with a spring to the
    old policy; verl has no default for the spring.

    Args:
      dro_beta: stiffness per nat, > 0; verl has no default.

    Returns loss_bt; actor/ppo_kl is the mean of logp_old - logp.
    """
    del seg
    if dro_beta <= 0.0:
        raise ValueError(f"dro_beta is {dro_beta}; without a pull to the old policy use gpg.")
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_old, adv, mask)
    spring_bt = 0.5 * dro_beta * jnp.square(log_ratio_bt)
    loss_bt = spring_bt - adv_bt * ratios.zero_padding(logp, mask)
    return loss_bt, _drift(log_ratio_bt, mask)


OBJECTIVES = {"sapo": sapo, "r2vpo": r2vpo, "quatro": quatro, "oapl": oapl, "dro": dro}
