"""Logit fusion: rollouts sampled from a mixture of teacher and student, and losses for them.

Zhang et al. 2026, "Learning from Mixed Rollouts: Logit Fusion as a Bridge Between Imitation and
Exploration" (a Notion page without an arXiv id) and the authors' trainer. The behaviour policy is
off-policy by construction, pi_mix ~ pi_teacher^alpha pi_student^(1 - alpha), with alpha falling
from 0.5 to 0 over 1000 steps. `objectives` describes the shared arguments (logp, logp_old, adv, mask,
seg) and the result.

The ratio of both losses is r = pi / pi_mix from the sampler's recorded log-probs, with the log-ratio
clamped to +-20. It is the whole correction, so use weight "none". The losses are meant for alpha > 0;
afterwards the authors continue with PPO-clip.
"""

import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ppo, ratios
from jaxrl_tis.estimators.traits import Traits


@Traits(needs=("logp_behav",), of_mixture=True)
def fusion_cap(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, cap: Numeric = 3.0,
) -> ppo.Loss:
    """Logit fusion with a capped ratio (Zhang et al. 2026), l = -min(r, cap) A.

    No lower clip and no pessimistic minimum. logp_old is not used. An infinite cap is plain
    importance sampling. Aggregation: token-mean.

    Unit: token. Trust region: r = pi / pi_mix <= cap. Gradient: through r; 0 above the cap,
    whatever the sign of A. Use: rollouts mixed with a teacher; the cap also stops bad tokens on
    their way back.

    Args:
      logp_behav: [B, T] log-probs of the mixture that sampled the tokens, nats.
      cap: largest ratio with a gradient, inclusive; 3.0 as in the authors' config.

    Returns loss_bt; actor/pg_clipfrac is the fraction of tokens above the cap and actor/ppo_kl is
    taken against the mixture.
    """
    del logp_old, seg
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_behav, adv, mask)
    ratio_bt = ratios.bounded_exp(log_ratio_bt)
    loss_bt = -ratios.clamp(ratio_bt, 0.0, cap) * adv_bt
    return loss_bt, ppo.clip_metrics(log_ratio_bt, ratio_bt > cap, mask)


@Traits(needs=("logp_behav",), of_mixture=True)
def fusion_shaped(
    logp: Array, logp_old: Array, adv: Array, mask: Array, seg: Array | None = None, *,
    logp_behav: Array, fusion_gamma: Numeric = 0.1,
) -> ppo.Loss:
    """Logit fusion with a shaped ratio (Zhang et al. 2026), l = -r / (r + fusion_gamma) A.

    The gradient is -A gamma r / (r + gamma)^2 per log pi. On policy it is gamma / (1 + gamma)^2 of
    the usual one, so learning rates do not carry over. The value is below 1, out of reach of the
    authors' cap. logp_old is not used. Aggregation: token-mean.

    Unit: token. Trust region: r / (r + fusion_gamma) < 1, r = pi / pi_mix. Gradient: through r;
    largest at r = fusion_gamma, fading on both sides, never 0. Use: rollouts mixed with a teacher,
    to learn from tokens that surprise the student; a survey reports instability.

    Args:
      logp_behav: [B, T] log-probs of the mixture that sampled the tokens, nats.
      fusion_gamma: ratio of the largest gradient; 0.1 as in the authors' config.

    Returns loss_bt; actor/ppo_kl is taken against the mixture and actor/pg_clipfrac is 0.
    """
    del logp_old, seg
    log_ratio_bt, adv_bt = ppo.token_inputs(logp, logp_behav, adv, mask)
    ratio_bt = ratios.bounded_exp(log_ratio_bt)
    loss_bt = -ratio_bt / (ratio_bt + fusion_gamma) * adv_bt
    return loss_bt, ppo.clip_metrics(log_ratio_bt, jnp.zeros_like(ratio_bt), mask)


OBJECTIVES = {"fusion_cap": fusion_cap, "fusion_shaped": fusion_shaped}
