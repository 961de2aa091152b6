"""Logs as other frameworks write them, for the tests of the doctor."""

import json

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

# Layouts by framework: every name that is read, at values without a finding but for what is inherent.
VERL = {
    "training/rollout_actor_probs_pearson_corr": 0.995, "training/rollout_probs_diff_max": 0.3,
    "training/rollout_probs_diff_mean": 0.003, "training/rollout_probs_diff_valid": 1,
    "rollout_corr/kl": 0.01, "rollout_corr/k3_kl": 0.01, "rollout_corr/ppl_ratio": 1.01,
    "rollout_corr/log_ppl_abs_diff": 0.002, "rollout_corr/chi2_token": 0.05,
    "rollout_corr/chi2_seq": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.95,
    "rollout_corr/rollout_is_mean": 0.99, "rollout_corr/rollout_is_min": 0.2,
    "rollout_corr/rollout_is_max": 2.0, "actor/pg_clipfrac": 0.01, "actor/ppo_kl": 0.001,
    "response_length/mean": 100.0, "critic/score/mean": 0.5, "timing_s/step": 3.0,
}
TRL = {
    "sampling/sampling_logp_difference/mean": 0.01, "sampling/sampling_logp_difference/max": 0.3,
    "sampling/importance_sampling_ratio/min": lambda s: 0.9 - 0.0001 * s,
    "sampling/importance_sampling_ratio/mean": 1.0,
    "sampling/importance_sampling_ratio/max": lambda s: 1.1 + 0.0001 * s,
    "clip_ratio/region_mean": 0.0, "completions/mean_length": 100.0, "reward": 0.5,
}
OPENRLHF = {
    "train/vllm_kl": 0.01, "train/ppo_kl": 0.001, "train/ppo_clip_ratio": 0.01,
    "train/rollout/response_length_mean": 100.0, "train/actor_grad_norm": 1.0,
}
SLIME = {
    "train/train_rollout_logprob_abs_diff": 0.01, "train/ppo_kl": 0.001, "train/pg_clipfrac": 0.01,
    "train/tis": lambda s: 1.0 + 0.0001 * (-1) ** s, "train/tis_clipfrac": 0.001, "train/ois": 1.0,
}
SLIME_ROLLOUT = {
    "rollout/rollout_log_probs": -0.50, "rollout/log_probs": -0.51, "rollout/response_len/mean": 100.0,
}
SKYRL = {
    "policy/rollout_train_logprobs_abs_diff_mean": 0.01,
    "policy/rollout_train_logprobs_abs_diff_max": 0.3, "policy/policy_entropy": 0.4,
    "policy/loss_metrics/is_ratio_mean": lambda s: 1.0 + 0.0001 * (-1) ** s,
    "policy/loss_metrics/clip_ratio": 0.01, "generate/avg_num_tokens": 100.0,
}
PRIME = {"mismatch_kl/all/mean": 0.01, "kl_ent_ratio/mean": 0.02, "is_masked/mean": 0.001}
PRIME_ORCHESTRATOR = {
    "off_policy/mean": lambda s: s % 3, "train/agg/effective/num_output_tokens/mean": 100.0,
}
NEMO = {
    "train/token_mult_prob_error": 1.01, "train/gen_kl_error": 0.01, "train/probs_ratio": 1.0,
    "train/probs_ratio_min": 0.7, "train/probs_ratio_max": 1.4,
    "train/sampling_importance_ratio": lambda s: 1.0 + 0.0001 * (-1) ** s,
    "train/mean_gen_tokens_per_sample": 100.0,
}
TUNIX = {
    "sampler_trainer/train/probs_pearson_corr": 0.995, "sampler_trainer/train/prob_diff_max": 0.3,
    "sampler_trainer/train/prob_diff_mean": 0.003, "sampler_trainer/train/logp_diff_mean": 0.01,
    "sampler_trainer/train/logp_diff_max": 0.4, "sampler_is/train/weight_mean": 0.99,
    "sampler_is/train/weight_max": lambda s: 1.5 + 0.001 * (s % 7),
    "sampler_is/train/frac_clipped_at_threshold": 0.01, "actor/train/sampler_is/weight_min": 0.4,
    "actor/train/pg_clipfrac": 0.01, "actor/train/ppo_kl": 0.001,
    "actor/train/is_ratio/min": 0.8, "actor/train/is_ratio/max": 1.2,
    "completions/train/mean_length": 100.0,
}
TINKER = {
    "optim/kl_sample_train_v1": 0.01, "optim/kl_sample_train_v2": 0.01, "optim/entropy": 0.4,
    "env/all/total_ac_tokens": 6400, "env/all/total_episodes": 64, "env/all/turns_per_episode": 1.0,
    "env/all/reward/total": 0.5, "progress/batch": lambda s: s,
}


def rows(layout, changes=(), steps=range(1, 121)):
    """[(step, {name: value})]; a value may be a function of the step, None leaves the name out."""
    values = layout | dict(changes)
    found = [
        (step, {name: v(step) if callable(v) else v for name, v in values.items()}) for step in steps
    ]
    return [(s, {name: v for name, v in row.items() if v is not None}) for s, row in found]


def write_jsonl(path, rows, key="step"):
    path.write_text("".join(json.dumps({key: step} | row) + "\n" for step, row in rows))
    return str(path)


def write_verl(path, rows):
    """As verl's logger `file` does."""
    path.write_text("".join(json.dumps({"step": s, "data": row}) + "\n" for s, row in rows))
    return str(path)


def write_state(path, rows):
    """As a Trainer of transformers does."""
    path.write_text(json.dumps({"global_step": 1, "log_history": [r | {"step": s} for s, r in rows]}))
    return str(path)


def write_csv(path, rows, title="{}"):
    """As Weights & Biases exports; `title` names a column."""
    names = sorted({name for _, row in rows for name in row})
    lines = [",".join(['"Step"', *(f'"{title.format(name)}"' for name in names)])]
    lines += [",".join([str(s), *(str(row.get(name, "")) for name in names)]) for s, row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_events(folder, rows, suffix=""):
    """As a SummaryWriter does."""
    folder.mkdir(exist_ok=True)
    writer = event_file_writer.EventsWriter(str(folder / "events"), suffix)
    for step, row in rows:
        values = [summary_pb2.Summary.Value(tag=n, simple_value=x) for n, x in row.items()]
        writer.write_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    return str(folder)
