"""Tables of other frameworks' metrics: their names, and the doctor's metric that each one is.

Each row was made from the source line that computes the value, in the files that `source` names. Where a
name changed, each version's name has a row; tests/doctor/names.json has the names of each version. The KL to
the reference policy is never the sampler's gap. Left out, among others: is_ratio_min and is_ratio_std of
SkyRL, in which padding counts as a ratio of 0; policy_kl_error of NeMo-RL, which has the other direction;
the rs_mask fractions of slime, whose level is a setting; kl_policy_base of the Tinker cookbook, which is the
sampler's KL to the base and not the learner's, and its kl_sample_train_v2, half the mean square of log ratios.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxrl_tis.doctor.asynchrony import MEAN_LAG
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, IS_VALID, K3, KL, LAG, LENGTH, MEAN_GAP, OUT_OF_BAND, PEARSON,
    PPL, PPO_KL, REJECTED, TURNS, WEIGHTS_ESS,
)

ABS_GAP, ABS_GAP_MAX = "mismatch/log_ratio_abs_mean", "mismatch/log_ratio_abs_max"
DP_MEAN = "training/rollout_probs_diff_mean"
RATIO = "mismatch/ratio_mean_token"  # mean of the ratio before any bound, of tokens or sequences
WEIGHT_MEAN, WEIGHT_MIN, WEIGHT_MAX = (f"rollout_corr/rollout_is_{x}" for x in ("mean", "min", "max"))
KL_REF = "actor/kl_loss"  # of the policy to its reference
SAMPLER_LOGP = "rollout_corr/rollout_log_ppl"  # minus the sampler's mean log-prob of its own tokens
REWARD = "reward/mean"
# Not ours: whether their correction is on, and their clipped ratio of learner and old policy.
CORRECTED, PPO_MIN, PPO_MAX = "theirs/corrected", "theirs/ppo_ratio_min", "theirs/ppo_ratio_max"
NORMALIZED = "rollout_corr/rollout_is_batch_norm_factor"  # mean that the weights are divided by


@dataclasses.dataclass(frozen=True)
class Named:
    """One of our metrics as a function of the framework's: `value` of `theirs`, None where undefined.

    The first row for a metric of which a log has all names is the one that counts.
    """

    ours: str
    theirs: tuple[str, ...]
    value: Callable[..., float | None] = lambda x: x


@dataclasses.dataclass(frozen=True)
class Framework:
    """The metrics of a framework.

    Attributes:
      source: repository, version or commit, and files that were read.
      names: what is mapped.
      marks: names that only this framework writes; one of them in a log is enough.
      steps: names of its own step counters; "PREFIX/..." counts for the names with that prefix.
      prefix: text that some of its loggers put before all names.
      updates: prefix of names that are logged at each update, not for each batch.
      ahead: prefixes of names that only runs with samplers that run ahead have.
      assumes: (a name, what is assumed of a log without it).
      silent: our metrics of things that it may do without a log: their absence means nothing.
      switches: our metric -> the setting that logs it.
      notes: notes on its values, for the report.
    """

    source: str
    names: tuple[Named, ...]
    marks: tuple[str, ...]
    steps: tuple[str, ...] = ()
    prefix: str = ""
    updates: str | None = None
    ahead: tuple[str, ...] = ()
    assumes: tuple[tuple[str, str], ...] = ()
    silent: tuple[str, ...] = ()
    switches: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _rows(pairs):
    return tuple(Named(ours, (theirs,)) for ours, theirs in pairs.items())


def _alternatives(ours, *theirs):
    return tuple(Named(ours, (name,)) for name in theirs)


def _same(*names):
    return _rows({name: name for name in names})


def _turns(messages: float) -> float:
    """Returns the policy's turns in a conversation: half of the messages are its answers."""
    return messages / 2


def _not_zero(weight: float) -> float:
    """Returns a smallest weight of verl, which never sets one to 0: exp of a sum below -103 is 0 in float32."""
    return max(weight, TINY)


def _ratio_of(k1: float, k3: float) -> float:
    """Returns the mean ratio: k3 is mean(ratio - 1 - log ratio), k1 is mean(-log ratio)."""
    return 1.0 + k3 - k1


# verl

CALCULATE = "actor_rollout_ref.rollout.calculate_log_probs=True"
GAP_NAMES = (
    KL, K3, PPL, MEAN_GAP, CHI2, CHI2_SEQ, WEIGHTS_ESS, WEIGHT_MEAN, WEIGHT_MAX, REJECTED, OUT_OF_BAND,
    NORMALIZED,
)
# In bypass mode the actor computes them; 0.7's engine workers, and all later ones, put this before its metrics.
BYPASS = "actor/"
V06 = "mismatch/"
TINY = 2.0**-149  # smallest number above 0 of float32
VERL = Framework(
    source="volcengine/verl, 0.5.0 to PyPI 0.9.1 and main b178a3cd5 (2026-01-29): "
    "verl/trainer/ppo/rollout_corr_helper.py, mismatch_helper.py (0.6.0), core_algos.py, "
    "metric_utils.py, ray_trainer.py, v1/trainer_base.py, verl/utils/debug/metrics.py, "
    "verl/utils/py_functional.py, verl/utils/tracking.py, verl/experimental/agent_loop",
    names=(
        *_same(PEARSON, DP_MAX, DP_MEAN, IS_VALID, CLIPPED, PPO_KL, LENGTH, LAG, MEAN_LAG),
        *_same(*GAP_NAMES, KL_REF),
        *_alternatives(
            SAMPLER_LOGP, SAMPLER_LOGP, BYPASS + SAMPLER_LOGP, V06 + "mismatch_rollout_log_ppl"
        ),
        Named(REWARD, ("critic/score/mean",)),
        *_rows({name: BYPASS + name for name in GAP_NAMES}),
        *(Named(WEIGHT_MIN, (name,), _not_zero) for name in (WEIGHT_MIN, BYPASS + WEIGHT_MIN)),
        *_rows({
            KL: V06 + "mismatch_kl", K3: V06 + "mismatch_k3_kl", PPL: V06 + "mismatch_ppl_ratio",
            MEAN_GAP: V06 + "mismatch_log_ppl_abs_diff",
            WEIGHTS_ESS: V06 + "rollout_is_eff_sample_size",
            REJECTED: V06 + "rollout_is_masked_fraction",
        }),
        *(
            Named(RATIO, (k1, k3), _ratio_of) for k1, k3 in (
                (KL, K3), (BYPASS + KL, BYPASS + K3), (V06 + "mismatch_kl", V06 + "mismatch_k3_kl"),
            )
        ),
        *_alternatives(
            CORRECTED, WEIGHT_MEAN, REJECTED, BYPASS + WEIGHT_MEAN, BYPASS + REJECTED,
            V06 + "rollout_is_mean",
        ),
        *(Named(TURNS, (name,), _turns) for name in ("num_turns/mean", "training/num_turns/mean")),
    ),
    marks=(
        "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/score/mean", PEARSON,
        "response_length/clip_ratio", "timing_s/step", KL, BYPASS + KL, V06 + "mismatch_kl",
    ),
    steps=("training/global_step",), ahead=("fully_async/",),
    switches={
        **dict.fromkeys((PEARSON, DP_MAX), CALCULATE + ", not in bypass mode"),
        **dict.fromkeys((KL, K3, PPL, MEAN_GAP, CHI2, CHI2_SEQ), CALCULATE),
        **dict.fromkeys((WEIGHTS_ESS, CORRECTED), "algorithm.rollout_correction.rollout_is=token"),
        REJECTED: "algorithm.rollout_correction.rollout_rs=seq_mean_k1 with rollout_rs_threshold",
        LAG: "logged by verl/trainer/ppo/v1 of 0.9.1, not by the trainers before",
    },
    notes=(
        "0.6.1 to 0.7.1, and main b178a3cd5: dp_actor.py logs rollout_corr/* a second time, for the current "
        "learner, and overwrites the values of the old policy. With several updates per batch these values "
        "include the update. The values of bypass mode include it in every version",
        "rollout_is_mean, _min and _max are measured before the bound up to 0.7.1, and after it from 0.8.0 "
        "on. For sequence weights _max and _min are measured before it in every version",
        "0.6.0 logs mismatch/* with rollout_is=False, too, so the log does not show whether weights are "
        "used",
    ),
)

# TRL

VLLM = "GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=True)"
TRL = Framework(
    source="huggingface/trl, PyPI 1.16.0 and main f2cd57710 (2026-07-24): "
    "trl/trainer/grpo_trainer.py, grpo_config.py",
    names=(
        *_rows({
            ABS_GAP: "sampling/sampling_logp_difference/mean",
            ABS_GAP_MAX: "sampling/sampling_logp_difference/max",
            WEIGHT_MEAN: "sampling/importance_sampling_ratio/mean",
            WEIGHT_MIN: "sampling/importance_sampling_ratio/min",
            WEIGHT_MAX: "sampling/importance_sampling_ratio/max",
            CORRECTED: "sampling/importance_sampling_ratio/mean",
            KL_REF: "kl",
        }),
        *_alternatives(CLIPPED, "clip_ratio/region_mean", "clip_ratio"),
        *_alternatives(LENGTH, "completions/mean_length", "completion_length"),
    ),
    marks=(
        "completions/mean_length", "completions/mean_terminated_length", "frac_reward_zero_std",
        "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean",
        "sampling/importance_sampling_ratio/mean",
    ),
    steps=("global_step",), prefix="train/", silent=(REJECTED,),
    switches={ABS_GAP: VLLM, CORRECTED: VLLM},
    notes=(
        "sampling/importance_sampling_ratio/* are the weights after their bounds. In the modes sequence_mask "
        "(the default) and sequence_truncate they are products over sequences, else token weights",
        "with logging_steps above 1 each row is a mean over steps, for minima and maxima too",
    ),
)
TRL_ASYNC = Framework(
    source="huggingface/trl, PyPI 1.16.0 and main f2cd57710 (2026-07-24): "
    "trl/experimental/async_grpo/async_grpo_trainer.py",
    names=(
        *_rows({
            RATIO: "ratio", K3: "kl", KL: "kl", CORRECTED: "ratio",
            LAG: "sample/staleness_mean", MEAN_LAG: "sample/staleness_mean",
        }),
        *_alternatives(LENGTH, "completions/mean_length", "sample/trained_tokens_mean"),
        *_alternatives(CLIPPED, "clip_ratio/region_mean", "clip_ratio"),
    ),
    marks=("ratio",), steps=("global_step",), prefix="train/", ahead=("ratio",), silent=(REJECTED,),
    notes=(
        "kl is k3 of the current learner against the sampler, not against a reference. It contains "
        "staleness and the update. KL is read from it",
    ),
)

# OpenRLHF

IS_ENABLE = "--algo.advantage.is_correction_enable"
OPENRLHF = Framework(
    source="OpenRLHF/OpenRLHF 0.11.0, 3c3be623 (2026-08-13): openrlhf/models/loss.py, "
    "openrlhf/trainer/ray/ppo_actor.py, openrlhf/trainer/ppo_trainer.py, openrlhf/utils/logging_utils.py",
    names=(
        *_rows({
            KL: "vllm_kl", CORRECTED: "vllm_kl", PPO_KL: "ppo_kl", CLIPPED: "ppo_clip_ratio",
            KL_REF: "kl",
        }),
        *_alternatives(LENGTH, "rollout/response_length_mean", "response_length"),
    ),
    marks=(
        "ppo_clip_ratio", "vllm_kl", "rollout/response_length_mean", "rollout/truncated_rate",
        "actor_grad_norm", "timing/make_experience",
    ),
    steps=("global_step",), prefix="train/", silent=(REJECTED,),
    switches={KL: IS_ENABLE + " with --actor.policy_loss_type ppo", CORRECTED: IS_ENABLE},
    notes=("no metric has the age of the samples: with --train.async_enable a gap may be staleness",),
)

# slime

MIS = "--get-mismatch-metrics with --custom-tis-function-path examples/train_infer_mismatch_helper/mis.py"
SLIME = Framework(
    source="THUDM/slime 0.3.1, 624b824a8 (2026-08-21): slime/backends/megatron_utils/loss.py, model.py, "
    "slime/observability/train_metric_utils.py, rollout_metrics.py, "
    "examples/train_infer_mismatch_helper/mis.py",
    names=(
        *_rows({
            ABS_GAP: "train/train_rollout_logprob_abs_diff", K3: "train/mis_k3_kl",
            PPL: "train/mis_ppl_ratio", MEAN_GAP: "train/mis_log_ppl_abs_diff",
            CHI2: "train/mis_chi2_token", CHI2_SEQ: "train/mis_chi2_seq",
            PPO_KL: "train/ppo_kl", CLIPPED: "train/pg_clipfrac",
            LENGTH: "rollout/response_len/mean",
            WEIGHT_MEAN: "train/mis_tis_weight_after_bound", KL_REF: "train/kl_loss",
        }),
        Named(SAMPLER_LOGP, ("rollout/rollout_log_probs",), lambda logp: -logp),
        Named(SAMPLER_LOGP, ("train/mis_rollout_log_ppl",)),
        Named(KL, ("train/mis_kl",)),
        Named(
            KL, ("rollout/rollout_log_probs", "rollout/log_probs"),
            lambda sampler, learner: sampler - learner,
        ),
        Named(RATIO, ("train/tis",)),
        Named(RATIO, ("train/mis_kl", "train/mis_k3_kl"), _ratio_of),
        *_alternatives(CORRECTED, "train/tis", "train/mis_tis_weight_after_bound"),
        Named(NORMALIZED, ("train/mis_batch_norm_factor",)),
    ),
    marks=(
        "train/train_rollout_logprob_abs_diff", "train/ois", "train/tis", "train/pg_clipfrac",
        "rollout/response_len/mean", "rollout/rollout_log_probs", "train/mis_kl",
    ),
    steps=("train/step", "rollout/step"), updates="train/", silent=(REJECTED,),
    switches={
        KL: "rollout/rollout_log_probs and rollout/log_probs; the second is not logged with "
        "--use-rollout-logprobs, or when a single micro-batch takes old log-probs from the loss",
        **dict.fromkeys((K3, PPL, MEAN_GAP, CHI2, CHI2_SEQ), MIS),
        CORRECTED: "--use-tis", RATIO: "--use-tis",
    },
    notes=(
        "means are averages of response means, not of all tokens",
        "with --use-rollout-logprobs, ppo_kl and pg_clipfrac contain the sampler's gap",
    ),
)

# SkyRL

LOSS = "policy/loss_metrics/"
TIS_TYPE = "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
SKYRL = Framework(
    source="NovaSky-AI/SkyRL 0.3.0, a9564572e (2026-08-21): skyrl/train/trainer.py, "
    "skyrl/train/fully_async_trainer.py, skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py, "
    "skyrl/backends/skyrl_train/utils/ppo_utils.py, skyrl/train/generators/utils.py",
    names=(
        *_rows({
            ABS_GAP: "policy/rollout_train_logprobs_abs_diff_mean",
            ABS_GAP_MAX: "policy/rollout_train_logprobs_abs_diff_max",
            RATIO: LOSS + "is_ratio_mean", CORRECTED: LOSS + "is_ratio_mean",
            REJECTED: LOSS + "token_mask_ratio",
            LAG: "async/staleness_mean", MEAN_LAG: "async/staleness_mean",
            LENGTH: "generate/avg_num_tokens", KL_REF: "policy/policy_kl",
        }),
        *_alternatives(CLIPPED, LOSS + "clip_ratio", "policy/ppo_clip_ratio"),
    ),
    marks=(
        LOSS + "clip_ratio", LOSS + "is_ratio_mean", "policy/policy_entropy", "policy/final_loss",
        "policy/rollout_train_logprobs_abs_diff_mean", "generate/avg_num_tokens",
    ),
    ahead=("async/",),
    switches={
        ABS_GAP: "generator.sampling_params.logprobs=1",
        **dict.fromkeys((RATIO, CORRECTED), TIS_TYPE),
        REJECTED: "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low and _high",
    },
    notes=(
        "token_mask_ratio is the share of the token mask alone; sequence masks reject more",
        "the fully asynchronous trainer logs old log-probs under the weights of the update, not under "
        "those that sampled",
    ),
)

# prime-rl

COHORT = "train/agg/effective/"
PRIME_RL = Framework(
    source="PrimeIntellect-ai/prime-rl 0.8.0, 559b44772 (2026-08-21): src/prime_rl/trainer/rl/loss.py, "
    "train.py, src/prime_rl/trainer/utils.py, src/prime_rl/orchestrator/orchestrator.py, metrics.py, "
    "src/prime_rl/monitors/file.py",
    names=(
        *_rows({LAG: "off_policy/mean", MEAN_LAG: "off_policy/mean"}),
        *(
            Named(ours, (name,)) for ours in (K3, KL, CORRECTED)
            for name in ("mismatch_kl/all/mean", "mismatch_kl/mean")
        ),
        *_alternatives(
            LENGTH, COHORT + "num_output_tokens/mean", "decode_len/all/mean", "completion_len/mean"
        ),
        *_alternatives(TURNS, COHORT + "num_turns/mean", "num_turns/all/mean", "num_turns/mean"),
    ),
    marks=("mismatch_kl/all/mean", "mismatch_kl/mean", "kl_ent_ratio/mean", "off_policy/in_queue/mean",
           "off_policy/mean", "off_policy/max", COHORT + "num_output_tokens/mean", "decode_len/all/mean",
           "completion_len/mean"),
    ahead=("mismatch_kl/", "off_policy/", "off_policy_level/", "batch/off_policy_level/", "dispatcher/off_policy"),
    switches={LAG: "logged by the orchestrator: give its metrics.jsonl together with the trainer's"},
    notes=(
        "mismatch_kl is k3 of the current learner against the sampler, staleness included. KL is read "
        "from it",
        "is_masked is the trust region of prime-rl, not a rejection of the sampler's gap",
        "metrics.jsonl leaves out values that are not finite",
    ),
)

# NeMo-RL


def _per_update(value: float, ratio: float) -> float | None:
    """Returns a mean over updates of a sum over them: of the mean ratio, too, they log the sum."""
    return value / max(round(ratio), 1) if math.isfinite(ratio) else None


def _unbounded(value: float, out: float, ratio: float) -> float | None:
    """Returns the mean weight of a step in which no weight was out of bounds."""
    return _per_update(value, ratio) if out == 0 else None


SUM = "train/probs_ratio"
NEMO_RL = Framework(
    source="NVIDIA-NeMo/RL 0.6.0, 7ea279abf (2026-08-22): nemo_rl/algorithms/loss/loss_functions.py, "
    "nemo_rl/algorithms/grpo.py, nemo_rl/algorithms/utils.py, nemo_rl/experience/rollouts.py, "
    "nemo_rl/models/policy/workers/dtensor_policy_worker.py",
    names=(
        *(Named(ours, ("train/gen_kl_error", SUM), _per_update) for ours in (K3, KL)),
        *(Named(ours, ("train/gen_kl_error",)) for ours in (K3, KL)),
        Named(RATIO, ("train/sampling_importance_ratio", "train/is_oob_ratio", SUM), _unbounded),
        Named(RATIO, ("train/sampling_importance_ratio", SUM), _per_update),
        Named(
            WEIGHT_MEAN, ("train/sampling_importance_ratio", "train/is_oob_ratio", SUM),
            lambda weight, out, ratio: _per_update(weight, ratio),
        ),
        *_rows({
            PPO_MIN: "train/probs_ratio_min", PPO_MAX: "train/probs_ratio_max",
            LAG: "train/avg_trajectory_age", MEAN_LAG: "train/avg_trajectory_age",
            LENGTH: "train/mean_gen_tokens_per_sample", KL_REF: "train/kl_penalty",
        }),
    ),
    marks=(
        "train/token_mult_prob_error", "train/gen_kl_error", "train/probs_ratio_clamped",
        "train/sampling_importance_ratio", "train/js_divergence_error",
    ),
    silent=(REJECTED, CORRECTED, CLIPPED),
    assumes=((SUM, f"each step has one update, because {SUM} is not logged. With several, gen_kl_error is "
              "their sum, and the KL is too large"),),
    notes=(
        "the values of a step are sums over its updates. They are divided by the rounded probs_ratio, "
        "where it is logged",
        "gen_kl_error is k3 with the default reference_policy_kl_type. KL is read from it",
        "sampling_importance_ratio is logged with use_importance_sampling_correction=False, too, so the "
        "log does not show whether the weights are used",
    ),
)

# Tunix

SAMPLER_IS = 'GRPOConfig(sampler_is="token", use_rollout_logps=True)'
TUNIX = Framework(
    source="google/tunix 0.1.8, c7d8950f (2026-08-21): tunix/rl/algo_core.py, "
    "tunix/rl/grpo/grpo_learner.py, tunix/rl/agentic/agentic_grpo_learner.py, tunix/rl/rl_cluster.py, "
    "tunix/sft/metrics_logger.py",
    names=(
        *_rows({
            PEARSON: "sampler_trainer/train/probs_pearson_corr",
            DP_MAX: "sampler_trainer/train/prob_diff_max",
            DP_MEAN: "sampler_trainer/train/prob_diff_mean",
            ABS_GAP: "sampler_trainer/train/logp_diff_mean",
            ABS_GAP_MAX: "sampler_trainer/train/logp_diff_max",
            CORRECTED: "sampler_is/train/weight_mean", WEIGHT_MAX: "sampler_is/train/weight_max",
            WEIGHT_MIN: "actor/train/sampler_is/weight_min",
            CLIPPED: "actor/train/pg_clipfrac", PPO_KL: "actor/train/ppo_kl",
            PPO_MIN: "actor/train/is_ratio/min", PPO_MAX: "actor/train/is_ratio/max",
            KL_REF: "actor/train/kl", REWARD: "rewards/train/score/mean",
        }),
        *_alternatives(WEIGHT_MEAN, "sampler_is/train/weight_mean", "actor/train/sampler_is/weight_mean"),
        Named(
            RATIO, ("sampler_is/train/weight_mean", "sampler_is/train/frac_clipped_at_threshold"),
            lambda mean, clipped: mean if clipped == 0 else None,
        ),
        *_alternatives(
            LENGTH, "generation/train/completions/mean_length", "completions/train/mean_length"
        ),
    ),
    marks=(
        "actor/train/pg_clipfrac", "actor/train/sampler_is/weight_mean",
        "sampler_trainer/train/probs_pearson_corr", "sampler_is/train/weight_mean",
        "completions/train/mean_length", "generation/train/completions/mean_length",
    ),
    updates="actor/",
    switches={
        **dict.fromkeys((PEARSON, DP_MAX, ABS_GAP), SAMPLER_IS + ", RolloutConfig(return_logprobs=True)"),
        CORRECTED: SAMPLER_IS,
    },
    notes=(
        "actor/train/sampler_is/weight_mean is 1 without any correction",
        "sampler_is/train/weight_* are the weights after their bound, sampler_is_threshold",
    ),
)

# Tinker cookbook

V1, BATCH, SAMPLED_AT = "optim/kl_sample_train_v1", "progress/batch", "sampling_client/step_mean"
TINKER = Framework(
    source="thinking-machines-lab/tinker-cookbook, PyPI 0.6.1 and 0.5.5, 9dfcc3a2 (2026-08-19): "
    "tinker_cookbook/rl/metrics.py, metric_util.py, train.py, data_processing.py, "
    "tinker_cookbook/utils/ml_log.py, tinker_cookbook/stores/training_store.py",
    names=(
        *_rows({
            KL: V1, CORRECTED: V1, SAMPLER_LOGP: "optim/entropy", REWARD: "env/all/reward/total",
            TURNS: "env/all/turns_per_episode",
        }),
        Named(
            LENGTH, ("env/all/total_ac_tokens", "env/all/total_episodes"),
            lambda tokens, episodes: tokens / episodes if episodes else None,
        ),
        *(
            Named(ours, ("training_client/step", SAMPLED_AT), lambda step, sampled: step - sampled)
            for ours in (LAG, MEAN_LAG)
        ),
        # The synchronous loops alone log the batch. They sample with the weights of this step.
        *(Named(ours, (BATCH,), lambda batch: 0.0) for ours in (LAG, MEAN_LAG)),
    ),
    marks=(V1, "optim/kl_sample_train_v2", "env/all/turns_per_episode", SAMPLED_AT),
    steps=("training/step",), ahead=("training_client/",), silent=(REJECTED, CLIPPED),
    switches={
        LAG: f"training_client/step and {SAMPLED_AT}, which async_config logs; {BATCH} of a synchronous run",
    },
    notes=(
        "kl_sample_train_v1 is k1 of the learner of the update against the sampler. It includes staleness, "
        "and with num_substeps above 1 the update of the earlier substeps",
        "no weight, clipped share or rejected share is logged. The default loss_fn, importance_sampling, "
        "weighs every token and bounds nothing; ppo and cispo bound the ratio. From 0.6 on, asynchronous runs "
        "use stable_reinforce, which the service computes",
    ),
)

FRAMEWORKS = {
    "verl": VERL, "trl": TRL, "openrlhf": OPENRLHF, "slime": SLIME, "skyrl": SKYRL,
    "prime_rl": PRIME_RL, "nemo_rl": NEMO_RL, "tunix": TUNIX, "tinker": TINKER,
}
VARIANTS = {"trl": TRL_ASYNC}  # takes the place where a log has one of its marks
