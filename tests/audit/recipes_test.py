"""The recipes of docs/audit.md, run beside objects in the layout of each framework: the dump that
they write is read, and holds what the framework held."""

import collections
import json
import pathlib
import re
import sys
import types

import numpy as np
import pytest

from jaxrl_tis.audit import dump

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "audit.md"
CODE = dict(re.findall(r"^### (\S+)\n(?:(?!^###).)*?```python\n(.*?)```", PAGE.read_text(), re.M | re.S))

BEHAV = [[-1, -2, -3, 0], [-0.5, 0, 0, 0], [-1.5, -2.5, 0, 0], [-1, -1, -1, -1]]
MASK = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
LENGTHS, REWARDS, GROUPS = [3, 1, 2, 4], [1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1]
OLD = (np.array(BEHAV) - 0.125 * np.array(MASK)).tolist()


class Tensor(np.ndarray):
    """An array with the methods of torch that the recipes call."""

    def cpu(self):
        return self

    numpy = detach = cpu

    def float(self):
        return self.astype(np.float32)

    def int(self):
        return self.astype(np.int32)


def tensor(x, dtype=np.float32):
    return np.asarray(x, dtype).view(Tensor)


class Module:
    """A framework's base class: its method returns what it was made with."""

    def __init__(self, out, **attributes):
        self.out = out
        self.__dict__.update(attributes)

    def _generate_and_score_completions(self, inputs):
        return self.out

    fwd_logprobs_values_reward = _generate_and_score_completions

    def _sampler_trainer_agreement(self, rollout, trainer, mask):
        return self.out


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """(name, modules of the framework) -> what the recipe defines; it writes into tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(name, **modules):
        for module, attributes in modules.items():
            path = module.replace("__", ".").split(".")
            for i in range(1, len(path)):
                monkeypatch.setitem(sys.modules, ".".join(path[:i]), types.ModuleType(path[0]))
            monkeypatch.setitem(sys.modules, ".".join(path), types.SimpleNamespace(**attributes))
        namespace = {}
        exec(CODE[name], namespace)
        return namespace
    return run


def holds(path, lengths=LENGTHS, behav=BEHAV, old=OLD, mask=MASK):
    """Whether the dump has the valid tokens of the lists above, in order; returns it."""
    found = dump.read(str(path))
    is_valid, kept = np.array(mask) != 0, found.tokens["mask"]
    assert kept.sum() == sum(lengths)
    np.testing.assert_array_equal(found.tokens["logp_behav"][kept], np.array(behav, "f")[is_valid])
    np.testing.assert_array_equal(found.tokens["logp_old"][kept], np.array(old, "f")[is_valid])
    return found


def rewarded(found):
    assert found.sequences["reward"].tolist() == REWARDS
    assert found.sequences["group"].tolist() == GROUPS


def test_the_page_has_every_recipe_and_they_are_short():
    names = ["TRL", "verl", "OpenRLHF", "slime", "SkyRL", "prime-rl", "NeMo-RL", "Tunix"]
    assert list(CODE) == names
    for name, code in CODE.items():
        lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
        assert len(lines) < 10, name


def test_trl(recipe, tmp_path):
    scores = {"a": collections.deque([9, 1, 0, 0, 0]), "b": collections.deque([0, 0, 0.5, 0.25])}
    made = recipe("TRL", trl={"GRPOTrainer": Module})["Dumping"](
        {"completion_mask": tensor(MASK, int), "sampling_per_token_logps": tensor(BEHAV),
         "old_per_token_logps": tensor(OLD)},
        _logs={"rewards": scores}, num_generations=2)
    assert made._generate_and_score_completions([]) is made.out
    rewarded(holds(tmp_path / "dump.npz"))


def test_trl_leaves_a_tools_text_out(recipe, tmp_path):
    tools = np.array(MASK)
    tools[3, 1] = 0
    recipe("TRL", trl={"GRPOTrainer": Module})["Dumping"](
        {"completion_mask": tensor(MASK, int), "sampling_per_token_logps": tensor(BEHAV),
         "old_per_token_logps": tensor(OLD), "tool_mask": tensor(tools, int)},
        _logs={"rewards": {"a": REWARDS}}, num_generations=2)._generate_and_score_completions([])
    assert holds(tmp_path / "dump.npz", [3, 1, 2, 3], mask=tools).lengths.tolist() == LENGTHS


def test_verl(recipe, tmp_path):
    scores = np.zeros((4, 4))
    scores[range(4), [n - 1 for n in LENGTHS]] = REWARDS
    batch = types.SimpleNamespace(
        batch={"rollout_log_probs": tensor(BEHAV), "old_log_probs": tensor(OLD),
               "response_mask": tensor(MASK, int), "token_level_scores": tensor(scores)},
        non_tensor_batch={"uid": np.array(["b", "b", "c", "c"], object)})
    recipe("verl")["dump"](batch, tmp_path / "d.npz")
    rewarded(holds(tmp_path / "d.npz"))


def test_openrlhf(recipe, tmp_path):
    part = lambda rows: types.SimpleNamespace(
        rollout_log_probs=tensor(BEHAV)[rows], action_log_probs=tensor(OLD)[rows],
        action_mask=tensor(MASK, bool)[rows], info={"reward": tensor(REWARDS)[rows]},
        index=list(range(4))[rows])
    recipe("OpenRLHF")["dump"]([part(slice(0, 3)), part(slice(3, 4))], tmp_path / "d.jsonl", 2)
    rewarded(holds(tmp_path / "d.jsonl"))


def test_slime(recipe, tmp_path):
    cut = lambda x, i: tensor(x[i][: LENGTHS[i]])
    samples = [{"rollout_log_probs": cut(BEHAV, i), "log_probs": cut(OLD, i), "rollout_position": i,
                "loss_masks": tensor(MASK[i][: LENGTHS[i]], int)} for i in range(4)]
    saved = {"format_version": 2, "samples": samples, "raw_reward": REWARDS}
    recipe("slime", torch={"load": lambda path, weights_only: saved})["convert"](
        "train_0.pt", tmp_path / "d.jsonl", 2)
    rewarded(holds(tmp_path / "d.jsonl"))


def test_skyrl(recipe, tmp_path):
    """Its rows are padded on the left."""
    turn = lambda rows: [row[n:] + row[:n] for row, n in zip(rows, LENGTHS, strict=True)]
    batch = dict(rollout_logprobs=tensor(turn(BEHAV)), action_log_probs=tensor(turn(OLD)),
                 loss_mask=tensor(turn(MASK)), rewards=tensor([[r, 0.0] for r in REWARDS]))
    out = collections.UserDict(batch)
    out.metadata = {"uids": ["q1", "q1", "q7", "q7"]}
    module = {"skyrl__train__trainer": {"RayPPOTrainer": Module}}
    made = recipe("SkyRL", **module)["Dumping"](out, global_step=3)
    assert made.fwd_logprobs_values_reward(None) is out
    rewarded(holds(tmp_path / "dump-3.npz"))


def test_prime_rl(recipe, tmp_path):
    loss = lambda inputs, config: ("loss", config)
    dumping = recipe(
        "prime-rl", prime_rl__configs__trainer={"DefaultLossConfig": lambda: "config"},
        prime_rl__trainer__rl__loss={"default_loss_fn": loss})["dumping"]
    for i, n in enumerate(LENGTHS):
        inputs = types.SimpleNamespace(
            trainer_logprobs=tensor(OLD[i][:n]), inference_logprobs=tensor(BEHAV[i][:n]),
            loss_mask=tensor(MASK[i][:n], bool))
        assert dumping(inputs) == ("loss", "config")
    assert holds(tmp_path / "dump.jsonl").sequences == {}


def test_nemo_rl(recipe, tmp_path):
    """Its log has lists of one row, in which the prompt stands too."""
    log = tmp_path / "train_data_step1.jsonl"
    log.write_text("".join(json.dumps({
        "content": ["text"], "rewards": [REWARDS[i]], "sample_loss_mask": [1.0], "idx": i,
        "token_loss_mask": [[0, 0, *MASK[i]]], "generation_logprobs": [[0.0, 0.0, *BEHAV[i]]],
        "prev_logprobs": [[0.0, -5.0, *OLD[i]]],
    }) + "\n" for i in range(4)))
    recipe("NeMo-RL")["convert"](log, tmp_path / "d.jsonl", 2)
    rewarded(holds(tmp_path / "d.jsonl"))


def test_tunix(recipe, tmp_path):
    module = {"tunix__rl__agentic__agentic_grpo_learner": {"GRPOLearner": Module}}
    made = recipe("Tunix", **module)["Dumping"]("metrics")
    assert made._sampler_trainer_agreement(None, None, np.array(MASK)) == "metrics"
    made._sampler_trainer_agreement(np.array(BEHAV), np.array(OLD), np.array(MASK))
    holds(tmp_path / "dump-0.npz")
