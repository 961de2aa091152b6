"""Metrics of a batch's correction: gap of the sampler, weights, rejection, drift of the updates.

Every function works under jit and returns a dict of scalars. Batches may be packed, with `seg`; those
of `profile_metrics` hold one sequence a row.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.diagnostics import attribution, divergences, mismatch
from jaxrl_tis.estimators import counts, loss, methods, ratios, returns
from jaxrl_tis.estimators.methods import Method

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

NUM_TURNS = 8  # metrics by turn; later turns join the last


def sampler_logp(batch: Mapping[str, Any]) -> Any:
    """Returns the sampler's log-probs [B,T] of the policy alone: without a teacher, what it drew from."""
    if "logp_student" in batch:
        return batch["logp_student"][..., 0]
    return batch["logp_behav"]


def gap_metrics(weight: Method, outputs: loss.MethodOutputs, batch: Batch) -> Metrics:
    """Measures the sampler's gap: divergences, |dp|, weights, and the learner's expected reward.

    With a teacher the gap is that of the policy alone, and the weights are of what was drawn from.

    The estimate is over all answers with a reward; answers that are not trained on have weight 1.

    Args:
      weight: name in `weights.WEIGHTS` and its parameters.
      outputs: of `loss.apply_methods` for this weight.
      batch: `mask`, `sampled`, `logp_prox`, `logp_old`, `logp_behav` [B,T], `rewards` [B], and the
        fields that the weight needs. With `seg` rewards stand on the tokens [B,T].
    """
    seg, mask, sampler, learner = batch.get("seg"), batch["mask"], sampler_logp(batch), batch["logp_old"]
    log_ratio, (name, _) = outputs.log_ratio, weight
    gap = ratios.safe_log_ratio(learner, sampler, mask)
    lower, upper = _band(weight)
    rewards, is_rewarded = _known_rewards(batch, seg)
    snis, ess = mismatch.snis_reward(rewards, log_ratio, is_rewarded, seg)
    return (
        mismatch.offpolicy_metrics(learner, sampler, mask, seg)
        | mismatch.probability_metrics(learner, sampler, mask)
        | mismatch.importance_weight_metrics(
            outputs.engine, log_ratio, mask,
            level=methods.traits("weight", name).level, upper=upper, lower=lower, seg=seg,
        )
        | _changed_by_bounds(log_ratio, batch, weight)
        | divergences.divergence_metrics(gap, mask, seg)
        | divergences.response_metrics(learner, sampler, mask, seg)
        | {"reward/learner_snis": snis, "reward/learner_snis_ess": ess}
    )


def _known_rewards(batch: Batch, seg: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (rewards of the sequences, [B] or with seg [B,S]; the tokens of those that have one)."""
    rewards, sampled = batch["rewards"], batch["sampled"]
    if seg is None:
        return returns.known(rewards, sampled)
    is_known = sampled & ~jnp.isnan(rewards)
    return ratios.sequence_max(rewards, is_known, seg), is_known


def rejection_metrics(
    spec: loss.LossSpec, outputs: loss.MethodOutputs, mask: jax.Array,
    seg: jax.Array | None = None,
) -> Metrics:
    """Measures the rejected share, and the statistic of each criterion that has one; {} without masks.

    Args:
      spec: has the masks.
      outputs: of `loss.apply_methods`.
      mask: [B,T] valid tokens, before any rejection.
      seg: sequence ids of packed rows, or None.
    """
    if not spec.masks:
        return {}
    metrics = mismatch.rejected_fractions(outputs.is_accepted, mask, seg)
    for name, parameters in spec.masks:
        log_ratio = outputs.judged.get(spec.seen((name, parameters)))
        if name in mismatch.REJECTION_OPTIONS and log_ratio is not None:
            bounds = methods.own(parameters)
            metrics |= mismatch.rejection_metrics(log_ratio, mask, seg, option=name, **bounds)
    return metrics


def drift_metrics(logp: jax.Array, batch: Batch) -> Metrics:
    """Measures how far the policy of an update is from the sampler, by factor of the ratio.

    Tokens that were rejected before the update have no logp, and are left out.

    Args:
      logp: [B,T] log-probs of the policy that is trained, nats.
      batch: `logp_prox`, `logp_old`, `logp_behav`, `mask` [B,T], and `logp_student` with a teacher.
    """
    chain = logp, batch["logp_prox"], batch["logp_old"], batch["logp_behav"], batch["mask"]
    student = sampler_logp(batch) if "logp_student" in batch else None
    return attribution.factor_metrics(*chain, student)


def profile_metrics(weight: Method, batch: Batch, has_turns: bool) -> Metrics:
    """Measures where the gap is, and where bounds change weights: percentiles within a response, by
    position in it, by entropy and, in conversations, by turn and by distance from the last tool
    token. This sorts the batch.

    Args:
      weight: name in `weights.WEIGHTS` and its parameters.
      batch: `logp_old`, `logp_behav`, `entropy` (the learner's), `mask` [N,T], fields that the weight
        needs, and `turn` with has_turns.
      has_turns: static.
    """
    inputs = batch["logp_old"], sampler_logp(batch)
    mask, num_buckets = batch["mask"], 1 + batch["mask"].shape[1].bit_length()
    log_ratio = ratios.safe_log_ratio(*inputs, mask)
    is_clipped = counts.is_bounded(*loss.with_and_without_bounds(log_ratio, batch, weight))
    metrics = divergences.percentile_metrics(*inputs, mask)
    by_octave = dict(num_buckets=num_buckets, is_clipped=is_clipped)
    metrics |= attribution.position_metrics(*inputs, mask, **by_octave)
    metrics |= attribution.entropy_metrics(*inputs, batch["entropy"], mask, is_clipped=is_clipped)
    if not has_turns:
        return metrics
    metrics |= attribution.turn_metrics(
        *inputs, batch["turn"], mask, num_turns=NUM_TURNS, is_clipped=is_clipped
    )
    return metrics | attribution.after_tool_metrics(*inputs, mask, **by_octave)


def _band(weight: Method) -> tuple[float | None, float]:
    """Returns the bounds (lower, upper) of a weight, None and inf without; upper is 2 for "none"."""
    name, parameters = weight
    if name == "none":
        return None, 2.0
    if name == "seq_mask_tis":  # its band is of another ratio than its weight
        return None, math.inf
    upper: float = parameters.get("upper", math.inf)
    cap: float = parameters.get("cap", upper)
    return parameters.get("lower"), cap


def _changed_by_bounds(log_ratio: jax.Array, batch: Batch, weight: Method) -> Metrics:
    """Counts what the bounds change of a weight that is no bounded ratio of a token, a sequence or
    its geometric mean: tokens with a larger, a smaller or another weight without bounds. {} for
    those."""
    name, parameters = weight
    if name == "none" or methods.traits("weight", name).is_bounded_ratio:
        return {}
    w_bt, raw_bt = loss.with_and_without_bounds(log_ratio, batch, weight)
    is_changed_bt, is_kept_bt = counts.is_bounded(w_bt, raw_bt), w_bt > 0
    shares = {
        "ratio_fraction_high": is_changed_bt & is_kept_bt & (w_bt < raw_bt),
        "ratio_fraction_low": is_changed_bt & is_kept_bt & (w_bt > raw_bt),
    }
    if "lower" in parameters:
        shares["oob_ratio"] = ~is_kept_bt & (raw_bt > 0)
    means = {name: ratios.masked_mean(x, batch["mask"]) for name, x in shares.items()}
    return mismatch.detached(means, "rollout_corr/rollout_is_")
