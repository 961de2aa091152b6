"""The metrics of a run: the name, the unit and the meaning of each, in one table.

`{a,b}` in a name stands for each of the words, `<x>` for any text, `<n>` for a number.
docs/make_metrics.py writes docs/metrics.md from this table.

Symbols: π the learner during the update, π_prox at the start of the update, π_old at the weights
that sampled, μ the sampler, all as log-probs of the sampled token; ρ = exp(π_old − μ);
Δp = |exp π_old − exp μ|.
"""

import dataclasses
import functools
import itertools
import re


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row: one metric, or several that differ in a word.

    Attributes:
      pattern: the name, see the top of the file.
      meaning: a plain sentence. A mean is over valid tokens unless the sentence says otherwise.
      source: "verl" where verl has the same name and formula, else a paper or a definition.
      is_compact: whether `metrics.record="compact"` keeps it.
    """

    pattern: str
    unit: str
    meaning: str
    source: str = ""
    is_compact: bool = False

    @functools.cached_property
    def names(self) -> list[str]:
        """The pattern with its braces expanded."""
        parts = re.split(r"\{([^}]*)\}", self.pattern)
        words = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*words)]


VERL = "verl"
compact = functools.partial(Metric, is_compact=True)

LEARNING = (
    compact("reward/mean", "reward",
            "Mean reward of the sampled answers, with penalties; absent if no reward is known."),
    compact("reward/std", "reward", "Standard deviation of the rewards of the answers."),
    compact("reward/score_mean", "reward", "Mean of the reward function, without penalties."),
    compact("reward/zero_std_group_ratio", "share",
            "Groups without a gradient: all known rewards are equal, or fewer than two are known.",
            "DAPO, 2503.14476"),
    compact("reward/component/<name>", "reward",
            "Mean of one component of a reward that has several, without its weight."),
    compact("reward/{timeouts,errors,non_finite}", "answers",
            "Rewards that took too long, raised an error or returned no number, or were not "
            "finite; of the answers scored since the step before."),
    compact("reward/dropped", "answers",
            'Failed rewards that stay unknown, with reward.on_error="drop"; of the answers scored '
            "since the step before, which may be for later batches where samplers run ahead."),
    compact("reward/learner_snis", "reward",
            "Estimate of the reward that the learner itself would get, Σ w R / Σ w, with the ratio "
            "w = Π ρ of learner to sampler; w = 1 for truncated answers that the loss leaves out.",
            "self-normalised importance sampling"),
    compact("reward/learner_snis_ess", "share",
            "Effective sample size of that estimate: 1 if all answers count the same.", "Kish"),
    compact("eval/{greedy,sampled}_reward", "reward",
            "Mean reward of the learner's held-out answers, of the known rewards."),
    compact("eval/{greedy,sampled}_accuracy", "share",
            "Held-out answers with a reward of at least eval.threshold. Failed rewards are left out; "
            "an episode that ended at a limit without a reward is wrong."),
    compact("eval/constant_accuracy", "share",
            "Accuracy of always giving the most common answer; for data with answers."),
    compact("eval/failed_rewards", "answers",
            "Held-out answers, greedy and sampled, with a failed reward."),
    compact("eval/n", "prompts", "Number of held-out prompts."),
    compact("eval/{greedy,sampled}_n", "answers", "Answers that the accuracy is of."),
    compact("{data,eval}/bad_records", "records",
            "Training and held-out records left out, with task.on_bad_record=skip; of a generated "
            "task also the records replaced while it was sampled, since the last start."),
    compact("warmup/loss", "nats per token",
            "Cross-entropy of the supervised steps before reinforcement learning."),
    Metric("critic/{score,rewards}/{mean,max,min}", "reward",
           "Rewards before and after the KL penalty, of the answers with a token. Both include the "
           "penalty of overlong answers.", VERL),
    Metric("critic/{advantages,returns}/{mean,max,min}", "reward",
           "Advantages and returns of the tokens.", VERL),
    Metric("critic/values/{mean,max,min}", "reward", "Values of the critic (GAE).", VERL),
    Metric("critic/vf_explained_var", "share",
           "Explained variance of the critic: 1 − var(R − V) / (var(R) + 1e-5).", VERL),
    compact("critic/vf_loss", "reward²", "Loss of the critic.", VERL),
    Metric("critic/vf_clipfrac", "share", "Tokens with a clipped critic loss.", VERL),
    Metric("critic/grad_norm", "norm", "Gradient norm of the critic before clipping.", VERL),
    Metric("critic/lr", "rate", "Learning rate of the critic.", VERL),
)

UPDATE = (
    compact("actor/pg_loss", "loss",
            "Aggregated objective. Its level says little; a jump says a lot.", VERL),
    compact("actor/left_out_ratio", "share",
            "Answers left out of the loss: the reward failed (for ReMax, also the greedy "
            "answer's), or the answer is truncated and train.mask_truncated is set.",
            "DAPO, 2503.14476"),
    compact("actor/grad_norm", "norm",
            "Norm before clipping; 0 for a skipped update. Spikes often precede a collapse.", VERL),
    compact("{actor,critic}/loss_scale", "factor",
            "Factor on the next loss, where the learner computes in float16.", "2510.26788"),
    compact("{actor,critic}/is_skipped", "share",
            "Updates skipped because the gradient was not finite.", "2510.26788"),
    Metric("alp/std_{mean,max}", "σ",
           "Noise of the layers, with layerwise_perturbation.", "2603.19470"),
    compact("actor/lr", "rate",
            "Learning rate of the last update that was not skipped, times control/lr_scale. "
            "Absent, as every value of an update, in a step with nothing to train on.", VERL),
    compact("actor/entropy", "nats per token",
            "Entropy of the learner's distribution at π_prox. A fall to 0 is a collapse.", VERL),
    compact("actor/sampler_kl_loss", "nats per token",
            "KL to the sampler by k2, with sampler_kl_coeff.", "prime-rl"),
    compact("actor/environment_ce_loss", "nats per token",
            "Cross-entropy of the tokens that the environment wrote, with environment_ce_coeff.",
            "ECHO"),
    compact("actor/entropy_loss", "nats per token", "Entropy term, with entropy_coeff.", VERL),
    compact("actor/ppo_kl", "nats per token",
            "Mean of π_c − π: how far the learner moved. π_c is the centre of the clipped ratio: "
            "π_old; π_prox with the objective decoupled; μ in bypass mode.", VERL),
    compact("actor/pg_clipfrac", "share", "Tokens clipped by the trust region.", VERL),
    compact("actor/pg_clipfrac_lower", "share", "Tokens at the bound of the dual clip.", VERL),
    Metric("actor/kl_loss", "nats per token", "KL term in the loss.", VERL),
    Metric("actor/kl_coef", "coefficient", "Coefficient of the KL term in the loss.", VERL),
    Metric("actor/kl_to_reference", "nats per token",
           "Mean over sequences of their mean KL from the reference to π_old, by the estimator of "
           "correction.kl; adaptive_kl follows it."),
    compact("lora/norm", "ratio",
            "Norm of the adapter's products s A B over the norm of their base weights, after the "
            "update."),
    Metric("actor/rejected_fraction", "share", "Tokens rejected by masks inside the update."),
    compact("centering/{learner,sampler}_mass", "probability",
            "Probability that learner and sampler give to the head: the recorded tokens of a "
            "position, which centre its score.", "2609.20807"),
    Metric("centering/{base_norm,norm}", "norm",
           "Size of a token's step, and of the part subtracted from it, as gradients for the "
           "logits; tokens outside the head count as one."),
    compact("centering/{drift,drift_left}", "nats",
            "How strongly a constant advantage would change the entropy: the mean of w (π + H), H "
            "the entropy. drift is before the subtraction, and 0 on policy. drift_left is after it, "
            "and 0 except for the approximation outside the head. One step is noisy: average many."),
    Metric("actor/ratio_variance", "ratio²",
           "Mean of (r − 1)² over tokens, with the objective r2vpo.", "docs/methods.md"),
    Metric("actor/quatro_lambda", "multiplier",
           "Mean multiplier of the prompts, with the objective quatro.", "2602.04620"),
    Metric("gac/cosine", "cosine",
           "Cosine of the gradient and the previous one, with gradient_alignment.",
           "docs/methods.md"),
    Metric("gac/is_skipped", "share", "Updates skipped by gradient_alignment."),
    Metric("packing/fill_ratio", "share", "Positions of the packed rows in use."),
    Metric("packing/rows", "rows", "Number of packed rows."),
    Metric("packing/shard_imbalance", "ratio", "Largest over mean number of tokens of the shards."),
    Metric("control/{lr_scale,kl_coeff,r2vpo_lambda}", "factor",
           "Value set by a controller for this step.", "docs/methods.md"),
)

_PROFILE = (
    "{dp_mean,dp_max,log_ratio_mean,log_ratio_abs_mean,token_fraction,fraction_clipped}"
)
MISMATCH = (
    compact("training/rollout_probs_diff_{mean,max,std}", "probability",
            "Δp, the difference of the sampler's and the learner's probability of a sampled token, "
            "both at the weights that sampled; 0 if they are bitwise equal.", VERL),
    compact("training/rollout_probs_diff_valid", "0 or 1",
            "Whether the batch has a valid token.", VERL),
    Metric("training/rollout_actor_probs_pearson_corr", "Pearson's r",
           "Correlation of the sampler's and the learner's probability of the sampled tokens.",
           VERL),
    compact("rollout_corr/kl", "nats per token",
            "KL(sampler ‖ learner) by k1, the mean of μ − π_old: unbiased, may be negative.",
            VERL),
    compact("rollout_corr/k3_kl", "nats per token",
            "The same KL by k3, the mean of ρ − 1 − log ρ: never negative, less noisy.", VERL),
    Metric("rollout_corr/{chi2_token,chi2_seq}", "χ²",
           "Mean squared ratio less 1, mean(ρ²) − 1 over tokens and with Π ρ over sequences: the "
           "variance that importance weights add.", VERL),
    Metric("rollout_corr/{training,rollout}_ppl", "perplexity",
           "Perplexity of the sampled tokens under the learner and the sampler, mean of sequences.",
           VERL),
    Metric("rollout_corr/{training,rollout}_log_ppl", "nats per token",
           "Logarithm of that perplexity, mean of sequences.", VERL),
    Metric("rollout_corr/{log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min}",
           "nats per token",
           "Differences of the two logarithms over sequences.", VERL),
    Metric("rollout_corr/ppl_ratio", "ratio",
           "Mean ratio of the learner's and the sampler's perplexity; 1 if the sampled tokens are "
           "equally likely for both.", VERL),
    Metric("mismatch/{log_ratio_abs_mean,log_ratio_abs_max}", "nats",
           "Absolute log-ratio, |log ρ|."),
    Metric("mismatch/{ratio_mean_token,ratio_mean_seq}", "ratio",
           "Mean of ρ and of Π ρ. Both are 1 in expectation if the recorded log-probs are exact."),
    Metric("mismatch/{tail_above,tail_below}", "share",
           "Tokens with ρ above 2, and below 1/2. The two cancel in a mean.", "AReaL"),
    Metric("mismatch/{tv_token,tv_seq,tv_seq_bound}", "probability",
           "Total variation: mean of max(0, 1 − ρ) over tokens, the same over sequences, and the "
           "bound of the latter from the tokens."),
    Metric("mismatch/{ess_token,ess_seq}", "share",
           "Effective sample size of ρ and Π ρ; 1 if all weights are equal.", "Kish"),
    Metric("mismatch/dp_{mean,max,p95,p99}/{mean,max}", "probability",
           "Statistic of Δp within a sequence, then over the sequences."),
    Metric("mismatch/dp_max/fraction_high", "share", "Sequences with a token of large Δp."),
    Metric(f"mismatch/position_<n>/{_PROFILE}", "of the measure",
           "The gap of the tokens from position n of the response to twice that."),
    Metric(f"mismatch/turn_<n>/{_PROFILE}", "of the measure",
           "The gap by turn, where a record has several."),
    Metric(f"mismatch/after_tool_<distance>/{_PROFILE}", "of the measure",
           "The gap by distance from a tool's last token, 1, 2 to 3, 4 to 7, ...; none before any. "
           "fraction_clipped is the share of tokens whose weight a bound changed."),
    Metric("mismatch/{engine,staleness,trust_region,product}/log_ratio_abs_mean", "nats",
           "Mean size of π_old − μ, π_prox − π_old, π − π_prox, and of their sum.",
           "3-policy factorisation"),
    Metric("mismatch/{engine,staleness,trust_region,product}/log_ratio_part", "nats²",
           "Mean of a factor times the sum; the parts add up to the mean square of the sum."),
    Metric("mismatch/{engine,staleness,trust_region}/share", "share",
           "Part of the mean squared log-ratio that a factor explains."),
    Metric("mismatch/{engine,staleness,trust_region,product}/fraction_capped", "share",
           "Tokens above the cap of the factor, with the weight capped_ratio."),
    Metric("mismatch/route_flip_expert", "share",
           "Chosen experts that the other side did not choose; 1 less this is the overlap.",
           "2510.11370"),
    Metric("mismatch/route_flip_delta", "share",
           "Experts whose choice differs, of all experts of a router.", "2510.11370"),
    Metric("mismatch/route_flip_router", "share",
           "Routers that flip: learner and sampler choose different sets of experts."),
    compact("mismatch/route_flip_token", "share", "Tokens with at least one flipped router."),
    Metric("mismatch/route_flip_layer_<n>", "share", "Tokens whose router of MoE layer n flips."),
    Metric("mismatch/route_flip_position_<n>", "share",
           "Routers that flip, of tokens from position n of the response to twice that."),
    Metric("mismatch/route_flip_layer_<n>_position_<n>", "share",
           "The same of one MoE layer, every diagnostics_every steps: up to 16 values a layer."),
    compact("mismatch/route_flip_{flipped,unflipped}/log_ratio_abs_mean", "nats",
            "Mean |log ρ| of the tokens with a flipped router, and of the others."),
    Metric("mismatch/route_flip_{flipped,unflipped}/k3_kl", "nats per token",
           "KL(sampler ‖ learner) by k3, of the tokens with a flipped router and of the others."),
    Metric("mismatch/route_flip_{flipped,unflipped}/icepop_dropped", "share",
           "Tokens outside IcePop's band 0.5 to 5, of those with a flipped router and of the others.",
           "2510.18855"),
    Metric("training/off_policy/trajectory_spans/{mean,max,min}", "versions",
           "Number of versions from the oldest to the newest token of a sequence.", VERL),
    Metric("training/off_policy/{trajectory_staleness,trajectory_staleness_worst}/{mean,max,min}",
           "versions",
           "Lag behind the learner of the newest and of the oldest token of a sequence.", VERL),
    Metric("old_logp/versions", "versions", "Weight versions that sampled tokens of the batch."),
    Metric("old_logp/recomputed_sequences", "sequences",
           "Sequences scored again under older weights than the policy's, once for each version."),
)

EXPERTS = (
    Metric("moe/load_max_over_mean/{mean,worst}", "ratio",
           "Tokens of the busiest expert over the mean of its layer's experts."),
    Metric("moe/load_cv/{mean,worst}", "ratio",
           "Standard deviation of the load of a layer's experts over its mean."),
    Metric("moe/load_entropy/{mean,worst}", "share",
           "Entropy of the load of a layer's experts, over its largest value; 1 is even."),
    Metric("moe/router_entropy/{mean,worst}", "share",
           "Entropy of a router's distribution for a token, over its largest value."),
    compact("moe/dead_experts", "experts", "Experts of all layers without a token in the batch."),
    Metric("moe/load_balance_loss", "loss",
           "E sum_e f_e p_e of the routers' own choices, mean over the layers; 1 at an even load.",
           "2101.03961"),
    Metric("moe/router_z_loss", "nats²", "Mean square of the logsumexp of a router's logits.",
           "2202.08906"),
    compact("moe/samples_without_routes", "samples",
            "Samples that routing r3 leaves out of the loss, as they lack a route of a token."),
    Metric("moe/reroute_rate", "share",
           "Choices of experts by a later pass over a token, of another set than the recorded one."),
)

WEIGHTS = (
    compact("correction/weight/num_tokens", "tokens", "Tokens for which the weight was computed."),
    compact("correction/weight/{changed_raw,changed}", "tokens",
            "Tokens with a weight other than 1 by more than 1e-5: before any cap, band or floor, "
            "and after; before a division by the batch's mean."),
    compact("correction/weight/{truncated,dropped}", "tokens",
            "Tokens with a weight changed by a bound, but not to 0; and tokens of weight 0."),
    compact("correction/mask/<mask>/{num_tokens,dropped}", "tokens",
            "Tokens judged by the mask, and tokens that it rejects whatever the others do; a "
            "second mask of one name is `<mask>_2`."),
    compact("rollout_corr/rollout_is_mean", "weight",
            "Mean weight as it is used. 1 in expectation without truncation; less is the bias of "
            "the truncation.", VERL),
    compact("rollout_corr/rollout_is_max", "weight",
            "Largest weight as it is used; of sequence weights before truncation. One answer far "
            "above the others dominates its step.", VERL),
    Metric("rollout_corr/rollout_is_{min,std}", "weight",
           "Smallest weight, before truncation for sequences, and standard deviation.", VERL),
    compact("rollout_corr/rollout_is_eff_sample_size", "share",
            "Effective sample size of the weights, mean(w)² / mean(w²), clamped to the cap.", VERL),
    Metric("rollout_corr/kept_eff_sample_size", "share",
           "Effective sample size of the weights in the gradient, with 0 for rejected tokens."),
    Metric("rollout_corr/rollout_is_{ratio_fraction_high,ratio_fraction_low}", "share",
           "Weights above the cap before truncation, and below its inverse or the band. Of turn_*, "
           "prefix_*, seq_mask_tis and capped ratios: tokens whose weight a bound lowers or raises.",
           VERL),
    Metric("rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}", "weight",
           "Mean weight of a sequence, over the sequences.", VERL),
    Metric("rollout_corr/rollout_is_seq_{fraction_high,fraction_low}", "share",
           "Sequences with a mean weight above the cap, and below its inverse or the band.", VERL),
    Metric("rollout_corr/rollout_is_oob_ratio", "share",
           "Tokens outside the band of a masked weight, or with weight 0 by seq_mask_tis.", VERL),
    Metric("rollout_corr/rollout_is_batch_norm_factor", "weight",
           "Mean that the weights were divided by.", VERL),
    compact("rollout_corr/rollout_rs_masked_fraction", "share",
            "Tokens rejected by a mask that is applied once; actor/rejected_fraction has the others.",
            VERL),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "share",
           "Sequences with a rejected token.", VERL),
    Metric("rollout_corr/rollout_rs_<mask>_<statistic>", "of the mask",
           "Distribution of the statistic of a mask, and the share that it rejects alone.", VERL),
    Metric("variance_proxy/{proxy1_signal_strength,proxy2_total_power,proxy3_pure_noise,"
           "expected_a_squared,expected_w}", "norm²",
           "Signal and noise of the gradient, every diagnostics_every steps.", "2602.07078"),
)

ROLLOUTS = (
    compact("response_length/mean", "tokens",
            "Sampled tokens of an answer, the end token included.", VERL),
    Metric("response_length/{max,min}", "tokens", "Longest and shortest answer.", VERL),
    Metric("response_length/clip_ratio", "share",
           "Answers as long as the limit; episodes and sessions with a turn as long, or without room "
           "for another token.", VERL),
    compact("response_length/truncated_ratio", "share",
            "Answers cut at the token limit; episodes with a turn that was cut, or at a limit of "
            "tokens or turns."),
    Metric("response_length_non_aborted/{mean,max,min}", "tokens",
           "Length of the answers with a token.", VERL),
    Metric("response_length_non_aborted/clip_ratio", "share",
           "Answers as long as the limit, of those with a token.", VERL),
    Metric("prompt_length/{mean,max,min}", "tokens", "Length of the prompts.", VERL),
    Metric("prompt_length/clip_ratio", "share", "Prompts as long as the limit.", VERL),
    Metric("response/aborted_ratio", "share", "Answers without a token.", VERL),
    Metric("num_turns/{mean,max,min}", "turns", "Turns of a conversation.", VERL),
    Metric("rollout/discarded_groups", "groups", "Groups replaced by dynamic sampling.", "DAPO"),
    Metric("rollout/occupancy", "share", "Slots that sampled, of all slots of all decode steps."),
    Metric("rollout/preempted", "sequences", "Sequences preempted to make room for others."),
    Metric("rollout/evicted", "pages", "Pages evicted, with engine.retention."),
    Metric("rollout/cached_prompt_tokens", "tokens",
           "Prompt tokens found in the cache, from an earlier prompt with the same weights."),
    Metric("rollout/shared_prompt_ratio", "share",
           "Prompt tokens shared with another sample of the group."),
    Metric("{,eval/}episodes/{done,max_turns,overlong,failed,timeout}", "episodes",
           "Episodes that the environment ended, that ended at task.max_turns, at a limit of tokens "
           "(a turn was cut, or no room was left), and whose environment failed or took too long. "
           "Also sessions of rollout.harness. In evaluations of greedy and sampled episodes."),
    Metric("{,eval/}episodes/given_ratio", "share",
           "Tokens of the responses that environments gave. The policy did not choose them."),
    Metric("{,eval/}episodes/template_{realigns,forks}", "turns",
           "Turns of episodes after which a render by the chat template would change the end of the "
           "answer, or more. The rows stay as sampled."),
    Metric("{,eval/}episodes/template_replaces", "turns",
           "Turns that ended with the first token of a message of another role than the "
           "observation's. The observation's own token replaced it."),
    Metric("harness/calls", "calls", "Answered calls of a session (mean)."),
    Metric("harness/retries", "calls", "Calls that repeated an earlier one, by an SDK's retry."),
    Metric("harness/restarted", "sessions",
           "Sessions that began anew, because a restart of the run ended their agents."),
    Metric("harness/forks", "rows", "Rows of sessions beside the longest of each, see rollout.on_fork."),
    Metric("harness/forked_tokens", "tokens", "Sampled tokens of these rows."),
    Metric("harness/fork_rows", "rows", "Forks that the batch trains on."),
    Metric("harness/left_out_forks", "rows",
           "Forks of samples in the loss for which the batch had no row."),
    Metric("harness/left_out_tokens", "tokens", "Sampled tokens of the forks without a row."),
    Metric("harness/realigned_tokens", "tokens",
           "Sampled tokens that the next prompt of a session changed. They are not trained on."),
    Metric("rollout/draft_acceptance", "share", "Drafted tokens that were accepted."),
    Metric("replay/uses_mean", "batches",
           "Batches that the groups of the batch were in, this one included.", "2604.16918"),
    Metric("replay/age_mean", "versions",
           "Versions since the groups of the batch were first trained on."),
    Metric("replay/size", "groups", "Groups in the replay buffer."),
    Metric("rollout/unknown_ids", "tokens",
           "Sampled ids that the tokenizer does not have, of a padded embedding."),
    Metric("rollout/{kept_overflow,kept_overflow_mass}", "share",
           "Tokens with a support too wide to record, and the probability mass dropped there."),
)

ASYNC = (
    Metric("async/queue_groups", "groups",
           "Groups begun and not trained on, after the batch was taken."),
    Metric("async/in_flight", "sequences", "Sequences of these groups in the samplers."),
    Metric("async/batches_ahead", "batches",
           "Groups begun and not trained on, in batches; the batch that is taken counts."),
    Metric("async/learner_idle", "share",
           "Time without a batch to train on, in seconds; with driver virtual in samplers' turns."),
    Metric("async/interrupted", "sequences", "Sequences interrupted before their end."),
    Metric("async/resumed", "sequences",
           "Interrupted sequences resumed from their sampled tokens."),
    Metric("async/resumed_tokens", "tokens", "Tokens that the resumed sequences already had."),
    Metric("async/discarded", "sequences", "Sequences cancelled because their group was complete."),
    Metric("async/syncs", "syncs", "Weight syncs, counted for each sampler."),
    Metric("async/sampler_idle", "share",
           "Time without a call of the engine, mean of the samplers; driver threads."),
    Metric("async/{workers,left,workers_evicted}", "workers",
           "Workers connected, workers lost since the last batch, and those of the lost ones that were "
           "restarted for an invalid report; driver ray."),
    Metric("sync/bytes", "bytes",
           "Serving parameters sent to the samplers; drivers threads and ray."),
    Metric("sync/seconds", "s",
           "Time to make these parameters and to move them to the samplers' devices, or into Ray's "
           "object store."),
    Metric("sync/pause_s", "s",
           "Pause of a sampler with sequences for new weights, mean of the syncs; driver threads."),
    Metric("gate/{total,engine,staleness}/{d_mean,d_p99,d_max,k3}", "nats",
           "Gap of the batch before its update, and its parts, every rollout.gap_probe_every "
           "steps.",
           "docs/gate.md"),
    Metric("gate/{total,engine,staleness}/dp_max", "probability",
           "Largest Δp of that gap.", "docs/gate.md"),
)

MACHINE = (
    compact("time/step_s", "s", "Wall-clock time of a whole step."),
    Metric("time/{data,sync,rollout,reward,score,update}_s", "s",
           "Phases of a step. The phase score is almost 0 if the update scores its batch itself."),
    Metric("time/environment_s", "s", "Time in which samplers waited for environments or agents."),
    Metric("time/compile_s", "s",
           "Lowering and compiling, or reading from the cache, since the last line."),
    Metric("time/checkpoint_s", "s", "Blocking part of the save after the step before."),
    Metric("time/eval_s", "s", "Time of an evaluation."),
    Metric("time/{init,restore,warm-up}_s", "s",
           "Time since the start of the program; in the first line."),
    Metric("time/lost_s", "s",
           "Time of steps lost to a fault and taken again; in the first line after the fault."),
    Metric("time/rollout_tokens_per_s", "tokens/s",
           "Sampled tokens of all processes over the time of the rollout phase."),
    Metric("time/host_peak_gib", "GiB", "Peak memory of the first process."),
    Metric("time/device_peak_gib", "GiB",
           "Peak memory in use on one device of the first process, where devices report it."),
)

SECTIONS = {
    "Learning": LEARNING, "The update": UPDATE, "Sampler against learner": MISMATCH,
    "Experts": EXPERTS, "Importance weights and rejection": WEIGHTS, "Rollouts": ROLLOUTS,
    "Samplers that run ahead": ASYNC, "The machine": MACHINE,
}
METRICS = tuple(itertools.chain.from_iterable(SECTIONS.values()))
_EXACT = {name: metric for metric in METRICS for name in metric.names}


def regex(name: str, placeholders: dict[str, str] | None = None) -> str:
    """Returns the regular expression of a name of `Metric.names`.

    Args:
      placeholders: expressions for some of the `<x>`; else `<n>` is digits, the others any text.
    """
    known = {"<n>": r"\d+"} | (placeholders or {})
    parts = re.split(r"(<[^>]*>)", name)
    return "".join(f"({known.get(p, '.+')})" if p.startswith("<") else re.escape(p) for p in parts)


_FAMILIES = [(re.compile(regex(name)), metric) for name, metric in _EXACT.items() if "<" in name]


@functools.cache
def find(name: str) -> Metric | None:
    """Returns the row of a metric: one with this very name before a family; None without either."""
    families = (metric for pattern, metric in _FAMILIES if pattern.fullmatch(name))
    return _EXACT[name] if name in _EXACT else next(families, None)


def is_compact(name: str) -> bool:
    """Whether the compact record keeps a metric."""
    metric = find(name)
    return metric is not None and metric.is_compact
