"""Writes golden_verl.json: numbers computed by verl 0.9.1 on a CPU, which golden_verl_test.py
compares with ours.

Run it in an environment of its own, with torch, numpy, tensordict, omegaconf and packaging, and
with VERL_ROOT set to the folder of the unpacked verl 0.9.1 wheel:

    VERL_ROOT=... python tests/estimators/make_golden_verl.py tests/estimators/golden_verl.json

verl runs in float64 with a float32 mask: its counts + 1e-8 are then the counts themselves, and
nothing else is rounded. Each family is run again with int and bool masks, which must give the same
where verl accepts them.
"""

import json
import math
import sys
import types

import numpy as np
import torch
import verl_batches
import verl_bugs
import verl_losses
from verl_cpu import DataProto, algos, correction, debug, functional, metric_utils
from verl_losses import with_gradient

LEVELS = ("token", "sequence")
WEIGHT_THRESHOLDS = (2.0, 1.1, "0.5_5.0")
TIE_WEIGHT_THRESHOLDS = (1.0, "1.0_5.0", "0.5_1.0")
E_BAND = f"{1 / math.e!r}_{math.e!r}"
REJECTIONS = {
    "token_k1": ("0.6_2.5", 1.3),
    "token_k2": (0.1, 1e-9),
    "token_k3": (0.1, 0.03),
    "seq_sum_k1": ("0.3_1.5", 2.0),
    "seq_sum_k2": (0.4, 0.2),
    "seq_sum_k3": (0.4, 0.2),
    "seq_mean_k1": ("0.8_1.4", 1.2),
    "seq_mean_k2": (0.12, 0.06),
    "seq_mean_k3": (0.12, 0.06),
    "seq_max_k2": (0.4, 0.15),
    "seq_max_k3": (0.4, 0.15),
    "token_k1,seq_mean_k3": ("0.5_2.0,0.15",),
}
TIE_REJECTIONS = {
    "token_k1": (E_BAND, "1.0_1.6"),
    "token_k2": (0.5,),
    "token_k3": (0.8,),
    "seq_sum_k1": (E_BAND,),
    "seq_sum_k2": (1.25,),
    "seq_sum_k3": (1.5,),
    "seq_mean_k1": (E_BAND,),
    "seq_mean_k2": (0.5, 0.3125),
    "seq_mean_k3": (0.3,),
    "seq_max_k2": (0.5,),
    "seq_max_k3": (0.8,),
}


def tensors(batch, mask_type=torch.float32):
    """The batch as float64 tensors, the mask in mask_type, the group as an array."""
    return {
        key: x if key == "group" else torch.tensor(x, dtype=torch.float64)
        for key, x in batch.items()
    } | {"mask": torch.tensor(batch["mask"]).to(mask_type)}


def without_empty_rows(batch):
    """verl counts rows without valid tokens in its metrics of rows; we do not."""
    is_used = (batch["mask"] != 0).any(1)
    return {
        key: x[is_used.numpy()] if key == "group" else x[is_used] for key, x in batch.items()
    }


def weights(name, batch):
    log_ratio, mask = batch["logp_old"] - batch["logp_behav"], batch["mask"]
    rows = without_empty_rows(batch)
    cases = []
    for level in LEVELS:
        for threshold in TIE_WEIGHT_THRESHOLDS if name == "ties" else WEIGHT_THRESHOLDS:
            arguments = (level, threshold)
            compute = correction.compute_rollout_correction_weights
            w, _ = compute(log_ratio, mask, *arguments)
            normalized, metrics = compute(log_ratio, mask, *arguments, True)
            factor = metrics["rollout_is_batch_norm_factor"]
            torch.testing.assert_close(normalized * factor, w)
            _, metrics = compute(rows["logp_old"] - rows["logp_behav"], rows["mask"], *arguments)
            cases.append(
                {
                    "level": level,
                    "threshold": threshold,
                    "w": w,
                    "factor": factor,
                    "metrics": metrics,
                }
            )
    return cases


def rejection(name, batch):
    rows = without_empty_rows(batch)
    cases = []
    for options, thresholds in (TIE_REJECTIONS if name == "ties" else REJECTIONS).items():
        for threshold in thresholds:
            arguments = (options, threshold)
            compute = correction.compute_rollout_rejection_mask
            kept, _ = compute(batch["logp_old"] - batch["logp_behav"], batch["mask"], *arguments)
            _, metrics = compute(rows["logp_old"] - rows["logp_behav"], rows["mask"], *arguments)
            cases.append(
                {"options": options, "threshold": threshold, "kept": kept, "metrics": metrics}
            )
    return cases


def advantages(name, batch):
    rewards, mask, group = batch["rewards"], batch["mask"], batch["group"]
    otb = {"old_log_probs": batch["logp_old"], "sum_pi_squared": batch["sum_pi_squared"]}
    pairs = np.array(verl_batches.PAIRS)
    grouped = (rewards, mask, group)
    cases = {
        "grpo": algos.compute_grpo_outcome_advantage(*grouped),
        "dr_grpo": algos.compute_grpo_outcome_advantage(*grouped, norm_adv_by_std_in_grpo=False),
        "grpo_vectorized": algos.compute_grpo_vectorized_outcome_advantage(*grouped),
        "grpo_passk": algos.compute_grpo_passk_outcome_advantage(rewards, mask, pairs, config={}),
        "grpo_passk_raw": algos.compute_grpo_passk_outcome_advantage(
            rewards, mask, pairs, config={"norm_adv_by_std_in_grpo": False}
        ),
        "rloo": algos.compute_rloo_vectorized_outcome_advantage(*grouped),
        "rloo_loop": algos.compute_rloo_outcome_advantage(*grouped),
        "opo": algos.compute_opo_outcome_advantage(*grouped),
        "gpg": algos.compute_gpg_outcome_advantage(*grouped),
        "remax": algos.compute_remax_outcome_advantage(rewards, batch["greedy_rewards"], mask),
        "tir_otb": algos.compute_multi_turn_optimal_token_baseline_advantage(*grouped, **otb),
        "tir_otb_weighted": algos.compute_multi_turn_optimal_token_baseline_advantage(
            *grouped, **otb, rollout_is_weights=batch["weights"], handle_zero_tail=False
        ),
    }
    if name not in ("random", "lone"):  # verl reads lengths as positions, so holes mislead it
        compute = algos.compute_optimal_token_baseline_advantage
        cases["otb"] = compute(*grouped, **otb)
        cases["otb_weighted"] = compute(
            *grouped, **otb, rollout_is_weights=batch["weights"], handle_zero_tail=False
        )
    return {key: adv * mask for key, (adv, _) in cases.items()}


def whitened(name, batch):
    if name == "lone":  # verl refuses to whiten one token
        return {}
    rewards, mask, group = batch["rewards"], batch["mask"], batch["group"]
    gae, returns = algos.compute_gae_advantage_return(rewards, batch["values"], mask, 0.9, 0.8)
    discounted = types.SimpleNamespace(gamma=0.9)
    components = batch["reward_components"]
    several = algos.compute_gdpo_outcome_advantage(
        rewards,
        mask,
        group,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": components[:, 0].numpy(), "b": components[:, 1].numpy()},
        batch={
            "prompts": torch.zeros(len(group), 1),
            "attention_mask": torch.cat([torch.ones(len(group), 1), mask], 1).long(),
        },
    )
    cases = {
        "gae": (gae, None),
        "gae_returns": (returns, None),
        "reinforce_plus_plus": algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=discounted
        ),
        "reinforce_plus_plus_baseline": (
            algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, group)
        ),
        "gdpo": algos.compute_gdpo_outcome_advantage(rewards, mask, group),
        "gdpo_components": several,
    }
    return {key: adv * mask for key, (adv, _) in cases.items()}


def kl(name, batch):
    cases = {}
    for kind in ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"):
        value, gradient = with_gradient(
            lambda x, kind=kind: algos.kl_penalty(x, batch["logp_ref"], kind), batch["logp"]
        )
        cases[kind] = {"value": value, "gradient": gradient}
    for alias, kind in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("mse+", "k2+")):
        value = algos.kl_penalty(batch["logp"], batch["logp_ref"], alias)
        assert torch.equal(value, cases[kind]["value"]), alias
    return cases


def kl_reward(name, batch):
    """Penalised rewards, the mean KL that a controller sees, three updates of the controller."""
    kl_bt = algos.kl_penalty(batch["logp_old"], batch["logp_ref"], "kl")
    rewards = algos.compute_rewards(batch["rewards"], batch["logp_old"], batch["logp_ref"], 0.1)
    rows = without_empty_rows(batch | {"kl": kl_bt})
    current = functional.masked_mean(rows["kl"], rows["mask"], axis=-1).mean().item()
    controller = algos.AdaptiveKLController(0.1, 6.0, 10000)
    updates = []
    for measured in (12.0, 6.6, 0.0):
        controller.update(measured, 256)
        updates.append(controller.value)
    return {"rewards": rewards * batch["mask"], "current_kl": current, "updates": updates}


def metrics(name, batch):
    rows = without_empty_rows(batch)
    proxies = {
        "old_log_probs": rows["logp_old"],
        "advantages": rows["adv"],
        "sum_pi_squared": rows["sum_pi_squared"],
        "response_mask": rows["mask"],
    }
    compute = metric_utils.compute_variance_proxy_metrics
    return {
        "offpolicy": correction.compute_offpolicy_metrics(
            rows["logp_old"], rows["logp_behav"], rows["mask"]
        ),
        "probabilities": debug.calculate_debug_metrics(
            DataProto.from_dict(
                {
                    "old_log_probs": batch["logp_old"],
                    "rollout_log_probs": batch["logp_behav"],
                    "response_mask": batch["mask"],
                    "responses": batch["mask"],
                }
            )
        ),
        "variance": compute(DataProto.from_dict(proxies), 0.7),
        "variance_weighted": compute(
            DataProto.from_dict(proxies | {"rollout_is_weights": rows["weights"]})
        ),
        "data": data_metrics(batch),
    }


def data_metrics(batch):
    prompt_mask = torch.tensor([[0, 1, 1]] * 5 + [[1, 1, 1]])
    return metric_utils.compute_data_metrics(
        DataProto.from_dict(
            {
                "token_level_scores": batch["rewards"],
                "token_level_rewards": batch["rewards"] - 0.25,
                "advantages": batch["adv"],
                "returns": batch["returns"],
                "values": batch["values"],
                "prompts": prompt_mask,
                "responses": batch["mask"],
                "response_mask": batch["mask"],
                "attention_mask": torch.cat([prompt_mask, batch["mask"].long()], 1),
            }
        )
    )


FAMILIES = {
    "weights": weights,
    "rejection": rejection,
    "policy": verl_losses.policy,
    "aggregation": verl_losses.aggregation,
    "bypass": verl_losses.bypass,
    "advantages": advantages,
    "whitened": whitened,
    "kl": kl,
    "kl_reward": kl_reward,
    "value": verl_losses.value,
    "metrics": metrics,
}


def plain(x):
    """Tensors as JSON numbers with twelve digits; whole numbers without a point."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return plain(x.tolist())
    if isinstance(x, (int, float, np.generic)) and not isinstance(x, bool):
        x = float(f"{float(x):.12g}")
        return int(x) if x.is_integer() and abs(x) < 1e9 else x
    return x


def assert_same(x, y, path):
    if isinstance(x, dict):
        for key in x:
            assert_same(x[key], y[key], f"{path} {key}")
    elif isinstance(x, str) or x is None:
        assert x == y, path
    else:
        atol = 1e-4 if path.endswith("_std") else 1e-6  # a root of a difference near 0
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=atol, err_msg=path)


def check_masks(name, family, expected):
    """verl's result with int and bool masks is that with float ones, or verl refuses the type.

    Their counts + 1e-8 are the counts themselves while float32 is torch's default.
    """
    for mask_type in (torch.int64, torch.bool):
        torch.set_default_dtype(torch.float32)
        try:
            result = plain(FAMILIES[family](name, tensors(verl_batches.BATCHES[name], mask_type)))
        except (RuntimeError, TypeError) as error:
            print(f"{name} {family}: refuses {mask_type}: {error}")
            continue
        finally:
            torch.set_default_dtype(torch.float64)
        cases = zip(expected, result, strict=True) if isinstance(expected, list) else [(expected, result)]
        for x, y in cases:
            assert_same(x, y, f"{name} {family} {mask_type}")


def golden(name):
    batch = verl_batches.BATCHES[name]
    result = {"inputs": plain(batch)}
    for family, function in FAMILIES.items():
        result[family] = plain(function(name, tensors(batch)))
        check_masks(name, family, result[family])
    return result


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    content = {
        "verl": "0.9.1",
        "global": verl_losses.GLOBAL,
        "pairs": verl_batches.PAIRS,
        "batches": {name: golden(name) for name in verl_batches.BATCHES},
        "bugs": plain(verl_bugs.bugs()),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(content, file, separators=(",", ":"))
        file.write("\n")
