"""Writes golden_verl.json: numbers computed by verl 0.9.1 on a CPU, which golden_verl_test.py
compares with ours.

Run it in an environment of its own, with torch, numpy, tensordict, omegaconf and packaging, and
with VERL_ROOT set to the folder of the unpacked verl 0.9.1 wheel:

    VERL_ROOT=... python tests/estimators/make_golden_verl.py tests/estimators/golden_verl.json

Packages that verl imports and these functions never call (ray, transformers, ...) are replaced by
mocks.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from unittest import mock

UNUSED = """
    ray transformers transfer_queue datasets peft accelerate hydra codetiming requests psutil pandas
    tqdm msgspec zmq aiohttp fastapi uvicorn pydantic PIL filelock safetensors huggingface_hub
    orjson
""".split()


class MockedModule(types.ModuleType):
    """A module in which every name is a class: to inherit from, to call, to decorate with."""

    __path__ = []
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (mock.MagicMock,), {})


class MockedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of packages in UNUSED that are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MockedModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(MockedPackages())
sys.path.insert(0, os.environ["VERL_ROOT"])
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"

import numpy as np  # noqa: E402  (verl and its mocks must be importable first)
import torch  # noqa: E402

correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
algos = importlib.import_module("verl.trainer.ppo.core_algos")
actor = importlib.import_module("verl.workers.config.actor")
debug = importlib.import_module("verl.utils.debug.metrics")

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
GLOBAL = {"batch_num_tokens": 50.0, "global_batch_size": 8, "loss_scale_factor": 16}
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def make_batch(seed, mask):
    """Log-probs with a small sampler gap and a larger staleness; rewards sit on the last valid
    token."""
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    shape = mask.shape
    logp_behav = -rng.exponential(1.0, shape)
    logp_old = logp_behav + 0.5 * rng.normal(size=shape)
    rewards = np.zeros(shape)
    for row in range(shape[0]):
        if mask[row].any():
            rewards[row, np.flatnonzero(mask[row])[-1]] = rng.integers(0, 3) / 2
    batch = {
        "mask": mask,
        "logp_behav": logp_behav,
        "logp_old": logp_old,
        "logp": logp_old + 0.6 * rng.normal(size=shape),
        "logp_ref": logp_old + 0.5 * rng.normal(size=shape),
        "adv": rng.normal(size=shape),
        "rewards": rewards,
        "values": rng.normal(size=shape),
        "values_old": rng.normal(size=shape),
        "returns": rng.normal(size=shape),
        "weights": rng.exponential(1.0, shape),
    }
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in batch.items()}


def extreme_batch():
    """Log-ratios beyond +-20 both ways, and ratios of exactly 1, the end of one band below."""
    mask = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    log_probs = {
        "logp_behav": [
            [-1, -30, -2, -1, 0],
            [-25, -1, 0, 0, 0],
            [-1, -1, -3, -2, 0],
            [-1, -2, -3, -4, -1],
        ],
        "logp_old": [
            [-1, -5, -24, -1, 0],
            [-1, -28, 0, 0, 0],
            [-1, -1, -3, -2, 0],
            [-2, -1, -3, -26.5, -1],
        ],
        "logp": [
            [-22, -5, -1, -1, 0],
            [-1, -1, 0, 0, 0],
            [-1, -0.5, -30, -2, 0],
            [-2, -1, -3, -1, -1],
        ],
        "logp_ref": [
            [-1, -5, -24, -3, 0],
            [-2.5, -1, 0, 0, 0],
            [-1, -1, -3, -2, 0],
            [-5, -1, -3, -40, -1],
        ],
    }
    batch = make_batch(3, mask)
    return batch | {name: torch.tensor(x, dtype=torch.float32) for name, x in log_probs.items()}


FULL = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
EMPTY_ROW = [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 1, 0]]
BATCHES = {
    "full": make_batch(1, FULL),
    "empty_row": make_batch(2, EMPTY_ROW),
    "extreme": extreme_batch(),
}
GROUPS = {"full": [7, 3, 7, 7], "empty_row": [0, 0, 1, 1], "extreme": [4, 4, 4, 9]}


def plain(x):
    """Tensors and numpy scalars as JSON numbers with the nine digits that identify a float32."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, torch.Tensor):
        x = x.detach().numpy()
    return json.loads(
        json.dumps(np.asarray(x, np.float64).tolist()),
        parse_float=lambda s: float(f"{float(s):.9g}"),
    )


def with_gradient(function, x):
    """The result of function(x) and the gradient of its scalar (or its sum) with respect to x."""
    x = x.clone().requires_grad_()
    result = function(x)
    value = result[0] if isinstance(result, tuple) else result
    value.sum().backward()
    return result, x.grad


def weight_cases(batch):
    log_ratio = batch["logp_old"] - batch["logp_behav"]
    cases = []
    for level, name in (("token", "token"), ("sequence", "seq")):
        for threshold in (2.0, "0.5_5.0", "1.0_5.0"):
            for is_normalized in (False, True):
                w, metrics = correction.compute_rollout_correction_weights(
                    log_ratio, batch["mask"], level, threshold, is_normalized
                )
                case = {
                    "level": name,
                    "threshold": threshold,
                    "is_normalized": is_normalized,
                    "w": w,
                }
                if not is_normalized:
                    case["metrics"] = metrics
                cases.append(plain_case(case))
    return cases


def plain_case(case):
    return {
        name: value if isinstance(value, (str, bool)) else plain(value)
        for name, value in case.items()
    }


def policy_cases(batch):
    cases = []
    for aggregation in AGGREGATIONS:
        for is_global in (False, True):
            for is_weighted in (False, True):
                config = actor.ActorConfig(
                    strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **CLIPS
                )
                config.global_batch_info.update(GLOBAL if is_global else {})
                w = batch["weights"] if is_weighted else None
                (loss, metrics), gradient = with_gradient(
                    lambda logp: algos.compute_policy_loss_vanilla(
                        batch["logp_old"], logp, batch["adv"], batch["mask"], aggregation, config, w
                    ),
                    batch["logp"],
                )
                cases.append(
                    plain_case(
                        {
                            "aggregation": aggregation,
                            "is_global": is_global,
                            "is_weighted": is_weighted,
                            "loss": loss,
                            "gradient": gradient * batch["mask"],
                            "metrics": metrics,
                        }
                    )
                )
    return cases


def advantage_cases(batch, group):
    rewards, mask = batch["rewards"], batch["mask"]
    labels = np.array(group)
    gae, returns = algos.compute_gae_advantage_return(rewards, batch["values"], mask, 0.9, 0.8)
    return plain(
        {
            "grpo": algos.compute_grpo_outcome_advantage(rewards, mask, labels)[0],
            "dr_grpo": algos.compute_grpo_outcome_advantage(
                rewards, mask, labels, norm_adv_by_std_in_grpo=False
            )[0],
            "rloo": algos.compute_rloo_vectorized_outcome_advantage(rewards, mask, labels)[0],
            "gae": gae * mask,
            "gae_returns": returns * mask,
        }
    )


def kl_cases(batch):
    cases = {}
    for name in ("k1", "k2", "k3", "abs"):
        value, gradient = with_gradient(
            lambda x: algos.kl_penalty(x, batch["logp_ref"], name), batch["logp"]
        )
        cases[name] = {"value": value, "gradient": gradient}
    return plain(cases)


def value_case(batch):
    (loss, clipfrac), gradient = with_gradient(
        lambda v: algos.compute_value_loss(
            v, batch["returns"], batch["values_old"], batch["mask"], 0.5
        ),
        batch["values"],
    )
    return plain({"loss": loss, "clipfrac": clipfrac, "gradient": gradient * batch["mask"]})


def debug_case(batch):
    data = mock.MagicMock()
    data.batch = {
        "old_log_probs": batch["logp_old"],
        "rollout_log_probs": batch["logp_behav"],
        "response_mask": batch["mask"],
        "responses": batch["mask"],
    }
    return plain(debug.calculate_debug_metrics(data))


def golden(name):
    batch, group = BATCHES[name], GROUPS[name]
    return {
        "inputs": plain(batch) | {"group": group},
        "weights": weight_cases(batch),
        "policy": policy_cases(batch),
        "advantages": advantage_cases(batch, group),
        "kl": kl_cases(batch),
        "value": value_case(batch),
        "offpolicy": plain(
            correction.compute_offpolicy_metrics(
                batch["logp_old"], batch["logp_behav"], batch["mask"]
            )
        ),
        "probabilities": debug_case(batch),
    }


if __name__ == "__main__":
    content = {
        "verl": "0.9.1",
        "clips": CLIPS,
        "global": GLOBAL,
        "batches": {name: golden(name) for name in BATCHES},
    }
    with open(sys.argv[1], "w") as file:
        json.dump(content, file, separators=(",", ":"))
        file.write("\n")
