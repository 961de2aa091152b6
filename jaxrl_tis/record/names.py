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
# Up to these a total variation per token is low, and a χ². The first is ours: sqrt(0.02 nats / 2), Pinsker's
# bound for the KL that the doctor takes for fine. Independent tokens of χ² 0.05 make it 130 in 100 tokens.
TV_LOW = 0.1
CHI2_HIGH = {"rollout_corr/chi2_token": 1.0, "rollout_corr/chi2_seq": 100.0}
compact = functools.partial(Metric, is_compact=True)

LEARNING = (
    compact("reward/mean", "reward",
            "Mean reward of the sampled answers, with penalties; absent if none is known."),
    compact("reward/std", "reward", "Standard deviation of the rewards."),
    compact("reward/score_mean", "reward", "Mean reward without penalties."),
    compact("reward/zero_std_group_ratio", "share",
            "Groups without a gradient: the known rewards are equal, or fewer than two.",
            "DAPO, 2503.14476"),
    compact("reward/component/<name>", "reward",
            "Mean of one component of the reward, without its weight."),
    compact("reward/{timeouts,errors,non_finite}", "answers",
            "Rewards that took too long, raised or returned no number, or were not finite; of the "
            "answers scored since the step before."),
    compact("reward/dropped", "answers",
            'Failed rewards that stay unknown, with reward.on_error="drop"; counted as those '
            "above."),
    compact("reward/unsure", "answers", "Answers that the reward returned as unsure; dropped, and no failure.",
            "2512.07710"),
    compact("reward/learner_snis", "reward",
            "Estimated reward of the learner itself: Σ w R / Σ w with w = Π ρ, and w = 1 for "
            "truncated answers that the loss leaves out.", "SNIS"),
    compact("reward/learner_snis_ess", "share",
            "Effective sample size of that estimate; 1 if all answers count the same.", "Kish"),
    compact("eval/{greedy,sampled}_reward", "reward", "Mean known reward of the held-out answers."),
    compact("eval/{greedy,sampled}_accuracy", "share",
            "Held-out answers with a reward of at least eval.threshold, without failed rewards. An "
            "episode that ended at a limit without a reward is wrong."),
    compact("eval/constant_accuracy", "share", "Accuracy of always giving the most common answer."),
    compact("eval/failed_rewards", "answers", "Held-out answers with a failed reward."),
    compact("eval/n", "prompts", "Held-out prompts."),
    compact("eval/{greedy,sampled}_n", "answers", "Answers that the accuracy counts."),
    compact("{data,eval}/bad_examples", "examples",
            "Training and held-out examples left out, with task.on_bad_example=skip; of a "
            "generated task also those replaced."),
    compact("warmup/loss", "nats/token", "Cross-entropy of the supervised steps."),
    Metric("critic/{score,rewards}/{mean,max,min}", "reward",
           "Rewards before and after the KL penalty, both with the overlong penalty, of the "
           "answers with a token.", VERL),
    Metric("critic/{advantages,returns}/{mean,max,min}", "reward",
           "Advantages and returns of the tokens.", VERL),
    Metric("critic/values/{mean,max,min}", "reward", "Values of the critic.", VERL),
    Metric("critic/vf_explained_var", "share",
           "Explained variance of the critic: 1 − var(R − V) / (var(R) + 1e-5).", VERL),
    compact("critic/vf_loss", "reward²", "Loss of the critic.", VERL),
    Metric("critic/vf_clipfrac", "share", "Tokens with a clipped critic loss.", VERL),
    Metric("critic/grad_norm", "norm", "Gradient norm of the critic before clipping.", VERL),
    Metric("critic/lr", "rate", "Learning rate of the critic.", VERL),
)

UPDATE = (
    compact("actor/pg_loss", "loss",
            "Aggregated objective. Its jumps matter, not its level.", VERL),
    compact("actor/left_out_ratio", "share",
            "Answers left out of the loss: their reward failed (for ReMax, also the greedy "
            "answer's), or train.mask_truncated.", "DAPO, 2503.14476"),
    compact("actor/grad_norm", "norm",
            "Norm before clipping; 0 for a skipped update. Spikes often precede a collapse.", VERL),
    compact("{actor,critic}/loss_scale", "factor",
            "Factor on the next loss, with float16.", "2510.26788"),
    compact("{actor,critic}/is_skipped", "share",
            "Updates skipped for a gradient that was not finite.", "2510.26788"),
    Metric("alp/std_{mean,max}", "σ",
           "Noise of the layers, with layerwise_perturbation.", "2603.19470"),
    compact("actor/lr", "rate",
            "Learning rate of the last update, times control/lr_scale. A step with nothing to "
            "train on has no value of an update.", VERL),
    compact("actor/entropy", "nats/token",
            "Entropy of the learner at π_prox. A fall to 0 is a collapse.", VERL),
    compact("actor/sampler_kl_loss", "nats/token",
            "KL to the sampler by k2, with sampler_kl_coeff.", "prime-rl"),
    compact("actor/dense_kl_loss", "nats/token", "KL of all keys to the kept ones, with dense_kl_coeff."),
    compact("actor/environment_ce_loss", "nats/token",
            "Cross-entropy of the environment's tokens, with environment_ce_coeff.", "ECHO"),
    compact("actor/entropy_loss", "nats/token", "Entropy term, with entropy_coeff.", VERL),
    compact("actor/ppo_kl", "nats/token",
            "Mean of π_c − π, how far the learner moved. The centre π_c is π_old, with the "
            "centre prox π_prox, of behav μ.", VERL),
    compact("actor/pg_clipfrac", "share", "Tokens clipped by the trust region.", VERL),
    compact("actor/pg_clipfrac_lower", "share", "Tokens at the bound of the dual clip.", VERL),
    Metric("actor/kl_loss", "nats/token", "KL term in the loss.", VERL),
    Metric("actor/kl_coef", "coefficient", "Coefficient of the KL term in the loss.", VERL),
    Metric("actor/kl_to_reference", "nats/token",
           "Mean over sequences of their mean KL from the reference to π_old, by correction.kl."),
    compact("lora/norm", "ratio",
            "Norm of the adapter's products over that of their base weights."),
    Metric("actor/rejected_fraction", "share", "Tokens rejected by masks inside the update."),
    compact("centering/{learner,sampler}_mass", "probability",
            "Probability of the head, the recorded tokens that centre a score.", "2609.20807"),
    Metric("centering/{base_norm,norm}", "norm",
           "Size of a token's step, and of the part subtracted, as gradients of the logits; tokens "
           "outside the head count as one."),
    compact("centering/{drift,drift_left}", "nats",
            "Effect of a constant advantage on the entropy H, the mean of w (π + H), before the "
            "subtraction (0 on policy) and after it. Average many steps."),
    Metric("actor/ratio_variance", "ratio²", "Mean of (r − 1)², with r2vpo."),
    Metric("actor/quatro_lambda", "multiplier",
           "Mean multiplier of the prompts, with quatro.", "2602.04620"),
    Metric("gac/cosine", "cosine",
           "Cosine of the gradient and the previous one, with gradient_alignment."),
    Metric("gac/is_skipped", "share", "Updates skipped by gradient_alignment."),
    Metric("packing/fill_ratio", "share", "Positions of the packed rows in use."),
    Metric("packing/rows", "rows", "Packed rows."),
    Metric("packing/shard_imbalance", "ratio", "Largest over mean tokens of a shard."),
    Metric("control/{lr_scale,kl_coeff,r2vpo_lambda}", "factor",
           "Value that a controller set for this step."),
)

_PROFILE = (
    "{dp_mean,dp_max,log_ratio_mean,log_ratio_abs_mean,token_fraction,fraction_clipped}"
)
MISMATCH = (
    compact("training/rollout_probs_diff_{mean,max,std}", "probability",
            "Δp; 0 if learner and sampler are bitwise equal.", VERL),
    compact("training/rollout_probs_diff_valid", "0/1",
            "Whether the batch has a valid token.", VERL),
    Metric("training/rollout_actor_probs_pearson_corr", "r",
           "Correlation of exp μ and exp π_old.", VERL),
    compact("rollout_corr/kl", "nats/token",
            "KL(sampler ‖ learner) by k1, the mean of μ − π_old; unbiased, may be negative.", VERL),
    compact("rollout_corr/k3_kl", "nats/token",
            "The same KL by k3, the mean of ρ − 1 − log ρ; never negative, less noisy.", VERL),
    Metric("rollout_corr/{chi2_token,chi2_seq}", "χ²",
           "Variance that importance weights add: mean(ρ²) − 1 over tokens, and with Π ρ over "
           "sequences.", VERL),
    Metric("rollout_corr/{training,rollout}_ppl", "perplexity",
           "Perplexity under the learner and the sampler, mean of sequences.", VERL),
    Metric("rollout_corr/{training,rollout}_log_ppl", "nats/token",
           "Its logarithm, mean of sequences.", VERL),
    Metric("rollout_corr/{log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min}",
           "nats/token",
           "Differences of the two logarithms over sequences.", VERL),
    Metric("rollout_corr/ppl_ratio", "ratio",
           "Mean perplexity of the learner over the sampler's; 1 if the tokens are equally likely "
           "for both.", VERL),
    Metric("mismatch/{log_ratio_abs_mean,log_ratio_abs_max}", "nats",
           "Absolute log-ratio |log ρ|."),
    Metric("mismatch/{ratio_mean_token,ratio_mean_seq}", "ratio",
           "Mean of ρ and of Π ρ. Both are 1 in expectation if the record is exact."),
    Metric("mismatch/{tail_above,tail_below}", "share",
           "Tokens with ρ above 2, and below 1/2. They cancel in a mean.", "AReaL"),
    Metric("mismatch/{tv_token,tv_seq,tv_seq_bound}", "probability",
           "Total variation: mean of max(0, 1 − ρ) over tokens, over sequences, and its bound from "
           "the tokens."),
    Metric("mismatch/{ess_token,ess_seq}", "share",
           "Effective sample size of ρ and Π ρ; 1 if all are equal.", "Kish"),
    Metric("mismatch/dp_{mean,max,p95,p99}/{mean,max}", "probability",
           "Statistic of Δp within a sequence, then over the sequences."),
    Metric("mismatch/dp_high", "share", "Tokens with Δp above 0.5."),
    Metric("mismatch/dp_max/fraction_high", "share", "Sequences with a token of large Δp."),
    Metric(f"mismatch/position_<n>/{_PROFILE}", "its own",
           "The gap from position n of the response to twice that."),
    Metric(f"mismatch/entropy_{{0,0.1,0.5,2}}/{_PROFILE}", "its own",
           "The gap of tokens with an entropy of the learner from this value on to the next, nats."),
    Metric(f"mismatch/turn_<n>/{_PROFILE}", "its own", "The gap by turn."),
    Metric(f"mismatch/after_tool_<distance>/{_PROFILE}", "its own",
           "The gap by distance from a tool's last token, 1, 2 to 3, 4 to 7, ... fraction_clipped: "
           "tokens whose weight a bound changed."),
    Metric("mismatch/{engine,staleness,trust_region,product}/log_ratio_abs_mean", "nats",
           "Mean size of π_old − μ, π_prox − π_old, π − π_prox, and of their sum."),
    Metric("mismatch/{engine,staleness,trust_region,product}/log_ratio_square_mean", "nats²",
           "Mean square of the same."),
    Metric("mismatch/{engine,staleness,trust_region,product}/log_ratio_part", "nats²",
           "Mean of a factor times the sum; they add up to the mean square of the sum."),
    Metric("mismatch/mixing/{log_ratio_abs_mean,log_ratio_square_mean,log_ratio_part}", "its own",
           "The same of a teacher's part, log-prob of the policy in the sampler minus μ."),
    Metric("mismatch/{engine,staleness,trust_region}/share", "share",
           "Part of the mean squared log-ratio that a factor explains."),
    Metric("mismatch/route_flip_expert", "share",
           "Chosen experts that the other side did not choose.", "2510.11370"),
    Metric("mismatch/route_flip_delta", "share",
           "Experts whose choice differs, of all experts of a router.", "2510.11370"),
    Metric("mismatch/route_flip_router", "share",
           "Routers that flip: both sides choose other sets of experts."),
    compact("mismatch/route_flip_token", "share", "Tokens with a flipped router."),
    Metric("mismatch/route_flip_layer_<n>", "share", "Tokens whose router of MoE layer n flips."),
    Metric("mismatch/route_flip_position_<n>", "share",
           "Flipped routers from position n of the response to twice that."),
    Metric("mismatch/route_flip_layer_<n>_position_<n>", "share",
           "The same of one layer, every diagnostics_every steps."),
    compact("mismatch/route_flip_{flipped,unflipped}/log_ratio_abs_mean", "nats",
            "Mean |log ρ| of tokens with a flipped router, and of the others."),
    Metric("mismatch/route_flip_{flipped,unflipped}/k3_kl", "nats/token", "KL by k3 of both."),
    Metric("mismatch/route_flip_{flipped,unflipped}/icepop_dropped", "share",
           "Tokens of both outside IcePop's band 0.5 to 5.", "2510.18855"),
    Metric("training/off_policy/trajectory_spans/{mean,max,min}", "versions",
           "Versions from the oldest to the newest token of a sequence.", VERL),
    Metric("training/off_policy/{trajectory_staleness,trajectory_staleness_worst}/{mean,max,min}",
           "versions",
           "Lag behind the learner of a sequence's newest and oldest token.", VERL),
    Metric("training/off_policy/token_staleness/mean", "versions", "Lag behind the learner, over tokens."),
    Metric("old_logp/versions", "versions", "Weight versions that sampled the batch."),
    Metric("old_logp/recomputed_sequences", "sequences",
           "Sequences scored again under older weights, once for each version."),
)

EXPERTS = (
    Metric("moe/load_max_over_mean/{mean,worst}", "ratio",
           "Tokens of the busiest expert over the layer's mean."),
    Metric("moe/load_cv/{mean,worst}", "ratio",
           "Standard deviation of the experts' load over its mean."),
    Metric("moe/load_entropy/{mean,worst}", "share",
           "Entropy of the experts' load over its largest value; 1 is even."),
    Metric("moe/router_entropy/{mean,worst}", "share",
           "Entropy of a router's distribution over its largest value."),
    compact("moe/dead_experts", "experts", "Experts without a token in the batch."),
    Metric("moe/load_balance_loss", "loss",
           "E sum_e f_e p_e, mean over the layers; 1 at an even load.", "2101.03961"),
    Metric("moe/router_z_loss", "nats²",
           "Mean square of the logsumexp of a router's logits.", "2202.08906"),
    compact("moe/samples_without_routes", "samples",
            "Samples that routing r3 leaves out, as they lack a route."),
    Metric("moe/reroute_rate", "share",
           "Choices by a later pass over a token of another set than the recorded one."),
)

WEIGHTS = (
    compact("correction/{weight,staleness_weight}/num_tokens", "tokens",
            "Tokens for which the weight was computed."),
    compact("correction/{weight,staleness_weight}/{changed_raw,changed}", "tokens",
            "Tokens with a weight other than 1 by more than 1e-5, before and after caps, bands and "
            "floors; before a division by the batch's mean."),
    compact("correction/{weight,staleness_weight}/{truncated,dropped}", "tokens",
            "Tokens with a weight that a bound changed, but not to 0; and with weight 0."),
    compact("correction/mask/<mask>/{num_tokens,dropped}", "tokens",
            "Tokens that the mask judged, and that it rejects; a second of one name is `<mask>_2`."),
    compact("rollout_corr/rollout_is_mean", "weight",
            "Mean weight as used; 1 in expectation, less by the bias of truncation.", VERL),
    compact("rollout_corr/rollout_is_max", "weight",
            "Largest weight; of sequence weights before truncation. One far above the others "
            "dominates its step.", VERL),
    Metric("rollout_corr/rollout_is_{min,std}", "weight",
           "Smallest weight, of sequence weights before truncation, and standard deviation.", VERL),
    compact("rollout_corr/rollout_is_eff_sample_size", "share",
            "Effective sample size mean(w)² / mean(w²) of the capped weights.", VERL),
    Metric("rollout_corr/kept_eff_sample_size", "share",
           "The same of the weights in the gradient, 0 for rejected tokens."),
    Metric("rollout_corr/rollout_is_{ratio_fraction_high,ratio_fraction_low}", "share",
           "Weights above the cap before truncation, and below its inverse or the band; of turn_*, "
           "prefix_* and seq_mask_tis those that a bound lowers or raises.", VERL),
    Metric("rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}", "weight",
           "A sequence's mean weight, over the sequences.", VERL),
    Metric("rollout_corr/rollout_is_seq_{fraction_high,fraction_low}", "share",
           "Sequences whose mean weight is above the cap, and below its inverse or the band.",
           VERL),
    Metric("rollout_corr/rollout_is_oob_ratio", "share",
           "Tokens outside the band of a masked weight, or with weight 0 by seq_mask_tis.", VERL),
    Metric("rollout_corr/rollout_is_batch_norm_factor", "weight",
           "Mean that the weights were divided by.", VERL),
    compact("rollout_corr/rollout_rs_masked_fraction", "share",
            "Tokens rejected by masks applied once; actor/rejected_fraction has the others.", VERL),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "share",
           "Sequences with a rejected token.", VERL),
    Metric("rollout_corr/rollout_rs_<mask>_<statistic>", "its own",
           "Distribution of a mask's statistic, and the share that it rejects alone.", VERL),
    Metric("variance_proxy/{proxy1_signal_strength,proxy2_total_power,proxy3_pure_noise,"
           "expected_a_squared,expected_w}", "norm²",
           "Signal and noise of the gradient, every diagnostics_every steps.", "2602.07078"),
)

ROLLOUTS = (
    compact("response_length/mean", "tokens",
            "Sampled tokens of an answer, with the end token.", VERL),
    Metric("response_length/{max,min}", "tokens", "Longest and shortest answer.", VERL),
    Metric("response_length/clip_ratio", "share",
           "Answers as long as the limit; episodes and sessions with such a turn, or without room "
           "for another token.", VERL),
    compact("response_length/truncated_ratio", "share",
            "Answers cut at the token limit; episodes with a cut turn, or at a limit of tokens or "
            "turns."),
    Metric("response_length_non_aborted/{mean,max,min}", "tokens",
           "Length of the answers with a token.", VERL),
    Metric("response_length_non_aborted/clip_ratio", "share",
           "Answers as long as the limit, of those with a token.", VERL),
    Metric("prompt_length/{mean,max,min}", "tokens", "Length of the prompts.", VERL),
    Metric("prompt_length/clip_ratio", "share", "Prompts as long as the limit.", VERL),
    Metric("response/aborted_ratio", "share", "Answers without a token.", VERL),
    Metric("num_turns/{mean,max,min}", "turns", "Turns of a conversation.", VERL),
    Metric("rollout/discarded_groups", "groups", "Groups replaced by dynamic sampling.", "DAPO"),
    Metric("rollout/extended_groups", "groups", "Groups of the batch that extend_equal made larger.",
           "2512.07710"),
    Metric("rollout/occupancy", "share", "Slots that sampled, of all slots of all decode steps."),
    Metric("rollout/preempted", "sequences", "Sequences preempted to make room for others."),
    Metric("rollout/evicted", "pages", "Pages evicted, with engine.retention."),
    Metric("rollout/cached_prompt_tokens", "tokens",
           "Prompt tokens cached from an earlier prompt with the same weights."),
    Metric("rollout/shared_prompt_ratio", "share", "Prompt tokens shared within the group."),
    Metric("{,eval/}episodes/{done,max_turns,overlong,failed,timeout}", "episodes",
           "Episodes and sessions that the environment ended, at task.max_turns, at a limit of "
           "tokens, and whose environment failed or took too long. In evaluations both greedy and "
           "sampled."),
    Metric("{,eval/}episodes/given_ratio", "share",
           "Tokens of the responses that environments wrote."),
    Metric("{,eval/}episodes/template_{realigns,forks}", "turns",
           "Turns after which the chat template would render the end of the answer differently, or "
           "more."),
    Metric("{,eval/}episodes/template_replaces", "turns",
           "Turns whose last token began a message of another role, and was replaced by the "
           "observation's."),
    Metric("harness/calls", "calls", "Answered calls of a session (mean)."),
    Metric("harness/retries", "calls", "Calls that an SDK repeated."),
    Metric("harness/restarted", "sessions", "Sessions begun anew after a restart of the run."),
    Metric("harness/forks", "rows",
           "Rows of sessions beside the longest of each (rollout.on_fork)."),
    Metric("harness/forked_tokens", "tokens", "Sampled tokens of these rows."),
    Metric("harness/fork_rows", "rows", "Forks that the batch trains on."),
    Metric("harness/left_out_forks", "rows",
           "Forks of samples in the loss without a row in the batch."),
    Metric("harness/left_out_tokens", "tokens", "Sampled tokens of these forks."),
    Metric("harness/realigned_tokens", "tokens",
           "Sampled tokens that the next prompt of a session changed, not trained on."),
    Metric("rollout/draft_acceptance", "share",
           "Drafted tokens, of each draft up to its first rejection, that were accepted."),
    Metric("rollout/draft_acceptance_lag_<n>", "share",
           "The same at a lag of the drafter from n to twice that."),
    Metric("rollout/drafter_lag", "versions", "Mean lag of the drafter."),
    Metric("drafter/kl", "nats/token", "KL from the sampler to the drafter, before its updates."),
    Metric("drafter/{grad_norm,lr}", "its own", "Of the drafter's update."),
    Metric("replay/uses_mean", "batches",
           "Batches that a group was in, with this one.", "2604.16918"),
    Metric("replay/age_mean", "versions", "Versions since a group was first trained on."),
    Metric("replay/size", "groups", "Groups in the replay buffer."),
    Metric("replay/tau", "versions", "Measured versions in which the ESS falls to 1 / e, with fresh_by_ess."),
    Metric("rollout/unknown_ids", "tokens",
           "Sampled ids that the tokenizer lacks, of a padded embedding."),
    Metric("rollout/{kept_overflow,kept_overflow_mass}", "share",
           "Tokens whose support was too wide to record, and the probability dropped there."),
)

ASYNC = (
    Metric("async/queue_groups", "groups",
           "Groups begun and not trained on, without the taken batch."),
    Metric("async/in_flight", "sequences", "Their sequences in the samplers."),
    Metric("async/batches_ahead", "batches",
           "Groups begun and not trained on, in batches, with the taken one."),
    Metric("async/learner_idle", "share",
           "Time without a batch to train on; with driver virtual in samplers' turns."),
    Metric("async/interrupted", "sequences", "Sequences interrupted."),
    Metric("async/resumed", "sequences", "Sequences resumed from their sampled tokens."),
    Metric("async/resumed_tokens", "tokens", "Tokens that these already had."),
    Metric("async/lost_tokens", "tokens",
           "Tokens of interrupted sequences that begin again, as the sampler evicted their keys."),
    Metric("async/discarded", "sequences", "Sequences cancelled as their group was complete."),
    Metric("async/syncs", "syncs", "Weight syncs of all samplers."),
    Metric("async/sampler_idle", "share",
           "Time without an engine call, mean of the samplers; driver threads."),
    Metric("async/{workers,left,workers_evicted}", "workers",
           "Workers connected, lost since the last batch, and of these restarted for an invalid "
           "report; driver ray."),
    Metric("sync/bytes", "bytes", "Serving parameters sent; drivers threads and ray."),
    Metric("sync/seconds", "s",
           "Time to make them and to move them to the samplers' devices or Ray's object store."),
    Metric("sync/pause_s", "s",
           "Pause of a busy sampler for new weights, mean of the syncs; driver threads."),
    Metric("gate/{total,engine,staleness}/{d_mean,d_p99,d_max,k3}", "nats",
           "Gap of the batch before its update, and its parts."),
    Metric("gate/{total,engine,staleness}/dp_max", "probability", "Largest Δp of that gap."),
)

MACHINE = (
    compact("time/step_s", "s", "Wall-clock time of a step."),
    Metric("time/{data,sync,rollout,reward,score,update,distill}_s", "s",
           "Phases of a step. Score is almost 0 if the update scores its batch itself."),
    Metric("time/environment_s", "s", "Time that samplers waited for environments or agents."),
    Metric("time/compile_s", "s",
           "Lowering and compiling, or reading the cache, since the last line."),
    Metric("time/checkpoint_s", "s", "Blocking part of the last save."),
    Metric("time/eval_s", "s", "Time of an evaluation."),
    Metric("time/{init,restore,warm-up}_s", "s",
           "Time since the start of the program; first line only."),
    Metric("time/lost_s", "s",
           "Time of steps lost to a fault and taken again; first line after it."),
    Metric("time/rollout_tokens_per_s", "tokens/s",
           "Sampled tokens of all processes over the rollout phase."),
    Metric("time/host_peak_gib", "GiB", "Peak memory of the first process."),
    Metric("time/device_peak_gib", "GiB",
           "Peak memory of one of its devices, where devices report it."),
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
