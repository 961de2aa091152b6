"""What verl 0.9.1 answers where we differ from it on purpose, for make_golden_verl.py.

golden_verl_bugs_test.py has one test for each entry of `bugs`.
"""

import math

import numpy as np
import torch
import verl_batches
from verl_cpu import DataProto, actor, algos, correction, debug

NAN = float("nan")


def t(rows):
    return torch.tensor(rows, dtype=torch.float64)


def ones(x):
    return torch.ones(x.shape, dtype=torch.float32)


def error(function, *arguments, **keywords):
    """The name of what the call raises."""
    try:
        function(*arguments, **keywords)
    except Exception as raised:  # whatever verl raises is the answer
        return type(raised).__name__
    raise AssertionError(f"{function} did not raise.")


def config(**settings):
    return actor.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )


def loss(name, logp, logp_old, adv, mask, mode="token-mean", settings=None, counts=None, w=None):
    """The loss and its gradient with respect to logp."""
    actor_config = settings or config()
    actor_config.global_batch_info.update(counts or {})
    logp = logp.clone().requires_grad_()
    value, _ = algos.get_policy_loss_fn(name)(logp_old, logp, adv, mask, mode, actor_config, w)
    value.backward()
    return {"loss": value, "gradient": logp.grad}


def importance(log_ratio, level="token", threshold=2.0, mask=None):
    mask = ones(log_ratio) if mask is None else mask
    return correction.compute_rollout_correction_weights(log_ratio, mask, level, threshold)


def kept(log_ratio, options, threshold, mask=None):
    mask = ones(log_ratio) if mask is None else mask
    return correction.compute_rollout_rejection_mask(log_ratio, mask, options, threshold)


def empty_rows():
    """Metrics of the batch "empty_row" as verl gives them, its row without tokens counted."""
    batch = verl_batches.BATCHES["empty_row"]
    old, behav, mask = t(batch["logp_old"]), t(batch["logp_behav"]), t(batch["mask"]).float()
    _, sequence = importance(old - behav, "sequence", 2.0, mask)
    return {
        "sequence": sequence,
        "offpolicy": correction.compute_offpolicy_metrics(old, behav, mask),
    }


def lost_reward():
    """Advantages after the last token of the first row, which has the reward, was rejected."""
    rewards, mask = t([[0, 0, 1], [0, 0, 0.5]]), t([[1, 1, 0], [1, 1, 1]]).float()
    group = np.array([0, 0])
    power = {"old_log_probs": t([[-1.0] * 3] * 2), "sum_pi_squared": t([[0.5] * 3] * 2)}
    _, gae_returns = algos.compute_gae_advantage_return(rewards, 0 * rewards, mask, 1.0, 1.0)
    return {
        "gae_returns": gae_returns * mask,
        "remax": algos.compute_remax_outcome_advantage(rewards, t([0, 0]), mask)[0],
        "otb_returns": algos.compute_optimal_token_baseline_advantage(
            rewards, mask, group, **power
        )[1],
        "dr_grpo": algos.compute_grpo_outcome_advantage(
            rewards, mask, group, norm_adv_by_std_in_grpo=False
        )[0],
        "rloo": algos.compute_rloo_outcome_advantage(rewards, mask, group)[0],
        "opo": algos.compute_opo_outcome_advantage(rewards, mask, group)[0],
        "gpg": algos.compute_gpg_outcome_advantage(rewards, mask, group)[0],
    }


def clip_settings():
    """PPO's loss at ratio 1.35 when only clip_ratio is raised, and DPPO's at ratio 10."""
    arguments = t([[math.log(1.35) - 1]]), t([[-1]]), t([[1]]), t([[1]]).float()
    wide = {"clip_ratio_low": 0.5, "clip_ratio_high": 0.5}
    rare = t([[math.log(10) - 5]]), t([[-5]]), t([[1]]), t([[1]]).float()
    return {
        "clip_ratio": loss("vanilla", *arguments, settings=config(clip_ratio=0.5))["loss"],
        "low_and_high": loss("vanilla", *arguments, settings=config(**wide))["loss"],
        "dppo_default": loss("dppo_tv", *rare)["loss"],
        "dppo_cap_20": loss("dppo_tv", *rare, settings=config(clip_ratio_c=20.0))["loss"],
    }


def nan_padding():
    logp_old, adv, mask = t([[-1, -1]]), t([[1, 1]]), t([[1, 0]]).float()
    logp = t([[-1, NAN]])
    return {
        "token-mean": loss("vanilla", logp, logp_old, adv, mask)["loss"],
        "seq-mean-token-sum": loss("vanilla", logp, logp_old, adv, mask, "seq-mean-token-sum")[
            "loss"
        ],
        "weights": importance(t([[0.5, NAN]]), mask=mask)[0],
    }


def all_rejected():
    x = t([[-1, -2]])
    arguments = x, x, t([[1, 1]]), t([[0, 0]]).float()
    counts = {"batch_num_tokens": 4.0, "global_batch_size": 2}
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    return {
        "local": [loss("vanilla", *arguments, mode)["loss"] for mode in modes],
        "global": [loss("vanilla", *arguments, mode, counts=counts)["loss"] for mode in modes],
    }


def ignored_modes():
    batch = verl_batches.BATCHES["random"]
    names = ("logp", "logp_old", "adv", "mask")
    logp, logp_old, adv, mask = (t(batch[name]) for name in names)
    return {
        name: [
            loss(name, logp, logp_old, adv, mask.float(), mode)["loss"]
            for mode in ("token-mean", "seq-mean-token-mean")
        ]
        for name in ("geo_mean", "sapo")
    }


def unclamped():
    """Losses at log-ratio 25 with A = -1, where ours stop at 20."""
    arguments = t([[-1, -1]]), t([[-26, -26]]), t([[-1, -1]]), t([[1, 1]]).float()
    return {name: loss(name, *arguments) for name in ("clip_cov", "kl_cov", "geo_mean")}


def value_tie():
    """Gradient of the value loss where the value has moved by exactly the clip."""
    values = t([[0.5, 0.25]]).requires_grad_()
    loss_value, _ = algos.compute_value_loss(
        values, t([[2, 2]]), t([[0, 0]]), t([[1, 1]]).float(), 0.5
    )
    loss_value.backward()
    return values.grad


def constant_returns():
    """The optimal token baseline where both responses of a group have the return 1."""
    power = {"old_log_probs": t([[-1.0] * 2] * 2), "sum_pi_squared": t([[0.2] * 2] * 2)}
    rewards, group = t([[0, 1], [0, 1]]), np.array([0, 0])
    return algos.compute_optimal_token_baseline_advantage(rewards, ones(rewards), group, **power)[0]


def otb_empty_rows():
    """A group of which one row has tokens, without the zero tail."""
    power = {"old_log_probs": t([[-1.0] * 2] * 2), "sum_pi_squared": t([[0.2] * 2] * 2)}
    mask, group = t([[1, 1], [0, 0]]).float(), np.array([0, 0])
    arguments = t([[0, 1], [0, 0]]), mask, group
    otb = algos.compute_optimal_token_baseline_advantage
    tir_otb = algos.compute_multi_turn_optimal_token_baseline_advantage
    return {
        "otb": otb(*arguments, **power, handle_zero_tail=False)[0],
        "tir_otb": tir_otb(*arguments, **power, handle_zero_tail=False)[0],
    }


def one_token():
    """Whitening, and the standard deviation and correlation of one token's probabilities."""
    x, mask = t([[-1, -1]]), t([[1, 0]]).float()
    batch = {
        "old_log_probs": x,
        "rollout_log_probs": x - 0.5,
        "response_mask": mask,
        "responses": mask,
    }
    return {
        "gae": error(algos.compute_gae_advantage_return, x, x, mask, 1.0, 1.0),
        "probabilities": debug.calculate_debug_metrics(DataProto.from_dict(batch)),
    }


def bugs():
    single = t([[0.7]]), t([[1]]).float(), np.array([0])
    with_empty = t([[1, 1], [0, 0]]).float()
    empty_group = t([[0.5], [1.0]]), t([[0], [0]]).float(), np.array([0, 0])
    zero_weight = t([[-1, -1]]), t([[-1, -1]]), t([[1, 1]]), t([[1, 1]]).float()
    return {
        "icepop_all_out": error(importance, t([[2, 3]]), "token", "0.5_2.0"),
        "ess_above_one": importance(t([[-20, -20]]))[1]["rollout_is_eff_sample_size"],
        "inverse_band": {
            band: kept(t([[math.log(3)]]), "token_k1", band)[0] for band in ("0.25_1.5", "0.5_4.0")
        },
        "clamped_sum": {
            "kept": kept(t([[30, -25]]), "seq_sum_k1", "0.5_2.0")[0],
            "weight": importance(t([[30, -25]]), "sequence", 1e9)[0],
        },
        "unclamped_min": [
            importance(t([[x]]), "sequence")[1]["rollout_is_min"] for x in (200.0, -200.0)
        ],
        "empty_rows": empty_rows(),
        "lost_reward": lost_reward(),
        "clip_settings": clip_settings(),
        "nan_padding": nan_padding(),
        "all_rejected": all_rejected(),
        "rloo_singleton": {
            "loop": algos.compute_rloo_outcome_advantage(*single)[0],
            "vectorized": algos.compute_rloo_vectorized_outcome_advantage(*single)[0],
        },
        "ignored_modes": ignored_modes(),
        "seq_masked_fraction": kept(t([[3, 0], [0, 0]]), "token_k1", 2.0, with_empty)[1],
        "zero_weight": loss("geo_mean", *zero_weight, w=t([[0, 1]]))["loss"],
        "unclamped": unclamped(),
        "unclamped_k3": correction.compute_offpolicy_metrics(
            t([[-1]]), t([[-101]]), t([[1]]).float()
        )["k3_kl"],
        "value_tie": value_tie(),
        "constant_returns": constant_returns(),
        "otb_empty_rows": otb_empty_rows(),
        "opo_empty_group": algos.compute_opo_outcome_advantage(*empty_group)[0],
        "passk_single": error(algos.compute_grpo_passk_outcome_advantage, *single, config={}),
        "one_token": one_token(),
    }
