"""Runs of the referee on small settings: what several seeds in one process share changes no number."""

import contextlib
import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from configs import fig_referee
from jaxrl_tis.data.rewards import worker
from experiments import parts, records, referee_runs
from jaxrl_tis.learner import scoring
from jaxrl_tis.learner.trainer import Trainer

SMALL = {
    "steps": 8, "eval.every": 4, "eval.prompts": 16, "warmup.steps": 100, "rollout.prompts": 4,
    "train.microbatch_rows": 16, "engine.slots": 32, "checkpoint.every": 8,
}


def small(part, *names):
    """Returns these arms of a part, with little runs."""
    arms = fig_referee.arms_of(*part.split("/"))
    return {name: arms[name] | SMALL for name in names}


def test_weights_of_stale_arms_see_the_age():
    """The ratio to logp_old alone has no age."""
    for name, arm in fig_referee.arms_of("stale", "short").items():
        is_folded = arm.get("correction.staleness_weight") == "folded"
        assert arm["correction.centre"] == ("prox" if is_folded else "behav"), name
        assert is_folded == (name == "decoupled PPO")
        assert arm.get("rollout.old_logp_source") == (None if name == fig_referee.EXACT else "none")


def test_the_control_is_none_with_the_loss_of_the_stale_arms():
    for gap in ("int8", "noise"):
        control, none = fig_referee.control_of(gap, "long")["REINFORCE"], fig_referee.arms_of(gap, "long")["none"]
        assert dict(control.items() - none.items()) == {
            "correction.centre": "behav", "correction.objective": "reinforce",
        }
        assert none.items() <= control.items()
    assert fig_referee.control_of("stale", "long") == {} == fig_referee.control_of("int8", "short")


@pytest.mark.parametrize("length", ["short", "long"])
def test_a_stale_sampler_finishes_its_answers_during_an_update(length):
    """Then the bound of four steps is the age. With fewer turns the weights change within an answer."""
    arm = fig_referee.arms_of("stale", length)["none"]
    tokens = fig_referee.LENGTHS[length].get("rollout.max_new_tokens", fig_referee.get_config().rollout.max_new_tokens)
    assert arm["rollout.update_turns"] >= tokens
    assert fig_referee.arms_of("in-flight", "long")["none"]["rollout.update_turns"] < 24
    assert "rollout.update_turns" not in fig_referee.arms_of("stale", length)[fig_referee.EXACT]


@dataclasses.dataclass
class Parts:
    """In place of a setup, and of its learner's half."""

    config: types.SimpleNamespace
    training: "Parts | None" = None


def test_a_seed_changes_its_own_setup_alone():
    config = types.SimpleNamespace(seed=0, steps=[1])
    setup = Parts(config, Parts(config))
    own = referee_runs.with_seed(setup, 3)
    assert own.config.seed == own.training.config.seed == 3 and config.seed == 0
    trainer = types.SimpleNamespace(setup=setup.training)
    assert referee_runs.of_seed(trainer, own).setup is own.training
    assert trainer.setup is setup.training


def test_an_arm_is_trained_with_the_seeds_that_it_lacks(monkeypatch, tmp_path, capsys):
    lines = [{"step": 0, "phase": "eval", referee_runs.REWARD: 0.5}]
    setup = Parts(types.SimpleNamespace(seed=0, reward=None), Parts(None))
    monkeypatch.setattr(referee_runs, "Programs", lambda: mock.Mock(build=lambda arm: setup))
    monkeypatch.setattr(referee_runs, "Trainer", mock.Mock())
    monkeypatch.setattr(referee_runs, "worker", lambda reward: contextlib.nullcontext())
    monkeypatch.setattr(referee_runs, "trained", lambda own, trainer, params, rewards: lines)
    taught = mock.Mock()
    monkeypatch.setattr(parts, "taught", taught)
    path = referee_runs.path_of(tmp_path, "int8/short")
    path.write_text(referee_runs.line_of("int8/short/none", 0, lines) + "\n")
    referee_runs.train_part("int8/short", {"none": {}, "IPO": {}}, (0, 1), str(tmp_path))
    found = [(run.arm.rpartition("/")[2], run.seed) for run in records.read(path)[0]]
    assert found == [("none", 0), ("IPO", 0), ("none", 1), ("IPO", 1)]
    assert [call.args[0].config.seed for call in taught.call_args_list] == [0, 1]  # once a seed


@pytest.mark.all
@pytest.mark.parametrize("part", ["noise/short", "stale/short"])
def test_seeds_in_one_process_are_runs_of_their_own(tmp_path, part):
    referee_runs.train_part(part, small(part, "none", "token TIS"), [0, 1], tmp_path)
    referee_runs.train_part(part, small(part, "token TIS"), [1], tmp_path / "alone")
    runs, _ = records.read(referee_runs.path_of(tmp_path, part))
    [alone], _ = records.read(referee_runs.path_of(tmp_path / "alone", part))
    assert [(r.arm, r.seed) for r in runs] == [
        (f"{part}/{arm}", seed) for seed in (0, 1) for arm in ("none", "token TIS")
    ]
    for name in ("reward/mean", "response_length/mean", "actor/grad_norm", "eval/sampled_reward"):
        np.testing.assert_array_equal(runs[3].series[name], alone.series[name])
    ages = [run.series["training/off_policy/trajectory_staleness/mean"].max() for run in runs]
    assert all(age > 1 for age in ages) if part.startswith("stale") else not any(ages)
    lengths = [run.series["response_length/mean"][0] for run in runs]
    assert lengths[1] != lengths[3]


@pytest.mark.all
def test_what_is_done_is_not_trained_again(tmp_path, monkeypatch):
    arms = small("noise/short", "none")
    referee_runs.train_part("noise/short", arms, [0], tmp_path)
    before = referee_runs.path_of(tmp_path, "noise/short").read_text()
    monkeypatch.setattr(referee_runs, "trained", None)
    referee_runs.train_part("noise/short", arms, [0], tmp_path)
    assert referee_runs.path_of(tmp_path, "noise/short").read_text() == before


@pytest.mark.all
def test_a_run_whose_numbers_are_not_finite_ends_at_zero(monkeypatch):
    arm = small("noise/short", "none")["none"]
    setup = referee_runs.Programs().build(arm)
    trainer = Trainer(setup.training)
    update, steps = Trainer.update, []

    def broken(self, state, rows, step, version):
        steps.append(step)
        state, rows, measured = update(self, state, rows, step, version)
        return state, rows, measured | ({"actor/grad_norm": np.inf} if step == 3 else {})

    monkeypatch.setattr(Trainer, "update", broken)
    with contextlib.closing(worker(setup.config.reward)) as rewards:
        lines = referee_runs.trained(setup, trainer, parts.taught(setup), rewards)
    assert steps == [1, 2, 3]
    assert [r["eval/sampled_reward"] for r in lines if r["phase"] == "eval"][1:] == [0.0, 0.0]


@pytest.mark.all
def test_a_run_goes_on_where_a_mask_leaves_no_token():
    """The band around 1 holds no geometric mean, so no step has an update and the policy stays."""
    arm = small("noise/short", "geometric mask")["geometric mask"]
    nothing = {"correction.masks": "seq_mean_k1(lower=0.999999, upper=1.000001)"}
    setup = referee_runs.Programs().build(arm | nothing)
    trainer = Trainer(setup.training)
    with contextlib.closing(worker(setup.config.reward)) as rewards:
        lines = referee_runs.trained(setup, trainer, parts.taught(setup), rewards)
    steps = [r for r in lines if r["phase"] == "train"]
    assert len(steps) == 8 and not any("actor/grad_norm" in r for r in steps)
    first, *others = (r["eval/sampled_reward"] for r in lines if r["phase"] == "eval")
    assert others == [first] * 2


def test_measures_are_products_of_halves():
    """Four batches of two parameters; the halves' means are (1, 0), (3, 3) and (1, 1), (1, 3)."""
    found = np.array([[0.0, 0.0], [2.0, 0.0], [3.0, 1.0], [3.0, 5.0]])
    true = np.array([[1.0, 0.0], [1.0, 2.0], [0.0, 3.0], [2.0, 3.0]])
    assert referee_runs.measures(found, true) == pytest.approx({
        "true2": 1 * 1 + 1 * 3, "own2": 3.0, "dot": ((1 * 1 + 0 * 3) + (3 * 1 + 3 * 1)) / 2,
        "bias2": (1 - 1) * (3 - 1) + (0 - 1) * (3 - 3), "variance": 2.0 + 17 / 3,
    })


@pytest.mark.all
def test_the_gradient_of_an_arm_is_that_of_its_loss():
    """With token TIS: the mean over tokens of -min(p / q, 2) advantage grad log p, by autodiff of this
    sum, with advantages and ratios computed here."""
    arm = fig_referee.arms_of("noise", "short")["token TIS"] | SMALL | {"train.minibatches": 1}
    setup = referee_runs.descending(referee_runs.Programs().build(arm))
    with contextlib.closing(worker(setup.config.reward)) as rewards:
        params = parts.taught(setup)
        [samples] = referee_runs.drawn_from(setup, params, rewards, 1)
    for i, sample in enumerate(samples):  # rewards of the little taught model are all 0
        object.__setattr__(sample, "reward", float(i % 3))
    trainer = Trainer(setup.training)
    found = referee_runs.gradient(trainer, params, params, samples)

    rows = setup.training.rows([s.trajectory for s in samples])
    micro, flat = setup.training.micro_batches(rows)
    logp = flat(scoring.make_score(setup.training.learner)(params, micro)["logp"])
    reward, size = np.array([s.reward for s in samples]), setup.config.rollout.group_size
    groups = reward.reshape(-1, size)
    advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    ratio = np.where(rows["mask"], np.exp(logp - rows["logp_behav"]), 0.0)
    factor = np.minimum(ratio, 2.0) * advantage.reshape(-1, 1) * rows["mask"] / rows["mask"].sum()
    factor = jnp.asarray(factor, jnp.float32).reshape(len(micro["mask"]), -1, factor.shape[1])

    def loss(params):
        one = lambda batch, factor: jnp.sum(
            scoring.response_logprobs(params, setup.training.learner, batch) * factor
        )
        parts = [one(jax.tree.map(lambda x, i=i: x[i], micro), factor[i]) for i in range(len(factor))]
        return -sum(parts)

    expected = np.asarray(ravel_pytree(jax.grad(loss)(params))[0])
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max() + 1e-7)


@pytest.mark.all
def test_the_lines_of_a_seed(monkeypatch, tmp_path):
    real = fig_referee.arms_of
    few = ("none", "centering", fig_referee.EXACT)
    of_part = lambda *part: {n: a | SMALL for n, a in real(*part).items() if n in few}
    monkeypatch.setattr(fig_referee, "arms_of", of_part)
    monkeypatch.setattr(referee_runs, "CHECKPOINTS", (4, 5))
    monkeypatch.setattr(referee_runs, "BATCHES", 2)
    referee_runs.measure_part("stale/short", [0], tmp_path)
    lines = referee_runs.gradients_path(tmp_path, "stale/short").read_text().splitlines()
    assert len(lines) == 3 * 2
