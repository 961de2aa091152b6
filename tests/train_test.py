"""The loop: what each step records, at which weights, and what stops it."""

import dataclasses
import json
import math
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import rollouts, train
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.models import transformer
from jaxrl_tis.report import page
from tests import tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]

_score = train.Trainer.score


def learner_logp(config, params, rows):
    """log softmax(logits / temperature) of the masked tokens from whole logits, [B,T]."""
    logits = transformer.logits(params, config, rows["tokens"], None, rows["segment_ids"])
    logp = jax.nn.log_softmax(logits / rows["temperature"][..., None], axis=-1)
    taken = np.take_along_axis(
        np.asarray(logp)[:, :-1], rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    return np.where(rows["mask"], np.pad(taken, ((0, 0), (1, 0))), 0)


@dataclasses.dataclass
class Recorded:
    """A run with its report, and (parameters that sampled, rows, samples) of each of its steps."""

    workdir: pathlib.Path
    steps: list
    returned: dict


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    workdir, steps = tmp_path_factory.mktemp("recorded"), []

    def score(self, state, samples):
        rows = _score(self, state, samples)
        steps.append((jax.device_get(state["policy"].params), dict(rows), samples))
        return rows

    write = page.write
    with (
        mock.patch.object(train.Trainer, "score", score),
        tiny.one_device(),
        mock.patch.object(page, "write", write),
    ):
        return Recorded(workdir, steps, train.run(tiny.config(), str(workdir)))


# The policies are kept apart


def test_old_log_probs_are_those_of_the_weights_that_sampled_in_every_step(recorded):
    steps, model = recorded.steps, tiny.setup().model
    first = steps[0][0]
    for params, rows, _ in steps:
        expected = learner_logp(model, params, rows)
        np.testing.assert_allclose(rows["logp_learner"], expected, atol=1e-4)
    params, rows, _ = steps[-1]
    from_start = learner_logp(model, first, rows)
    assert np.abs(from_start - rows["logp_learner"]).max() > 1e-2  # no snapshot from the start


def test_the_sampler_ran_with_those_weights_too(recorded):
    """int8 against f32 at the same weights: a small gap, never the size of an update."""
    steps = recorded.steps
    for index, (_, rows, samples) in enumerate(steps):
        gap = (rows["logp_learner"] - rows["logp_behav"])[rows["mask"]]
        assert 1e-5 < np.abs(gap).max() < 0.2
        for sample in samples:
            assert set(sample.trajectory.version) == {index}
            assert sample.trajectory.quant_id == "w8a8"
            assert sample.trajectory.temperature == 0.8


def test_rows_hold_the_samples_in_order(recorded):
    _, rows, samples = recorded.steps[0]
    assert rows["group"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    np.testing.assert_allclose(rows["rewards"], [s.reward for s in samples], rtol=1e-6)
    for row, sample in enumerate(samples):
        n = len(sample.trajectory.prompt)
        np.testing.assert_array_equal(
            rows["tokens"][row, n : n + len(sample.trajectory.tokens)], sample.trajectory.tokens)


# Several minibatches and epochs


def fake_samples(count=16, vocab_size=0):
    """Random trajectories with random rewards, drawn from all tokens alike."""
    rng, out = np.random.default_rng(0), []
    for i in range(count):
        n = 1 + i % 3
        zeros = np.zeros(n, np.float32)
        trajectory = Trajectory(
            str(i), np.array([1, 4, 13, 5, 15], np.int32), rng.integers(3, 13, n).astype(np.int32),
            np.ones(n, bool), zeros.astype(np.int32), zeros - 2, zeros, zeros,
            zeros.astype(np.int32), "stop", 0, i, "none", 1.0,
            logits=np.full((n, vocab_size), -2, np.float32))
        reward = float(rng.random())
        parts = {"closeness": reward + 0.1 * i, "length": -0.1 * i}
        out.append(rollouts.Sample(trajectory, {}, "", 0.0, reward, i // 4, parts, 0.5))
    return out


def one_update(**changes):
    setup = tiny.setup(**changes)
    with tiny.one_device():
        trainer = train.Trainer(setup)
    state = train.initial_state(setup, train.initial_params(setup))
    # A copy on the device: a NumPy view of a buffer would keep it from being donated.
    before = jax.tree.map(jnp.copy, state["policy"].params)
    num_logits = setup.model.vocab_size if "logits_behav" in setup.correction.needs else 0
    rows = trainer.score(state, fake_samples(vocab_size=num_logits))
    state, metrics = trainer.update(state, rows, 1)
    return before, state, rows, metrics, trainer


def test_one_minibatch_and_one_epoch_is_on_policy():
    _, _, _, metrics, _ = one_update(train__minibatches=1, train__epochs=1)
    assert abs(metrics["actor/ppo_kl"]) < 1e-6 and metrics["actor/pg_clipfrac"] == 0


def test_later_minibatches_and_epochs_see_the_old_policy_of_the_rollout():
    *_, more, _ = one_update(train__minibatches=2, train__epochs=2)
    assert abs(more["actor/ppo_kl"]) > 1e-4  # the ratio left 1


def test_the_old_policy_stays_fixed_while_the_learner_moves():
    seen = []
    setup = tiny.setup()
    with tiny.one_device():
        trainer = train.Trainer(setup)
    step = trainer._train_step

    def spy(state, minibatch):
        seen.append(jax.device_get(minibatch))
        return step(state, minibatch)

    state = train.initial_state(setup, train.initial_params(setup))
    rows = trainer.score(state, fake_samples())
    with mock.patch.object(trainer, "_train_step", spy):
        trainer.update(state, rows, 1)
    assert [m["mask"].shape for m in seen] == [(2, 4, 8)] * 4  # 2 epochs x 2 minibatches of 2 x 4
    key = lambda m: m["tokens"].reshape(-1, 8)
    for epoch in (seen[:2], seen[2:]):
        tokens = np.concatenate([key(m) for m in epoch])
        assert sorted(map(bytes, tokens)) == sorted(map(bytes, rows["tokens"]))
        for minibatch in epoch:
            mask = minibatch["mask"]
            expected = {bytes(t): x for t, x in zip(rows["tokens"], rows["logp_learner"])}
            for tokens_t, old_t, mask_t in zip(
                key(minibatch), minibatch["logp_old"].reshape(-1, 8), mask.reshape(-1, 8)
            ):
                np.testing.assert_array_equal(old_t[mask_t], expected[bytes(tokens_t)][mask_t])
    assert not np.array_equal(key(seen[0]), key(seen[2]))  # another order in the next epoch


def test_the_value_head_is_there_with_gae_only_and_starts_at_zero():
    setup = tiny.setup(correction__advantage="gae")
    state = train.initial_state(setup, train.initial_params(setup))
    assert set(state) == {"policy", "critic"}
    assert not np.any(state["critic"].params["value"])
    setup = tiny.setup()
    assert set(train.initial_state(setup, train.initial_params(setup))) == {"policy"}


def test_a_reference_in_the_dtype_of_the_policy_survives_the_donation_of_the_policy():
    """With bfloat16 parameters the reference could share the policy's buffers, which updates
    donate."""
    changes = dict(model__param_dtype="bfloat16", correction__kl_coeff=0.1,
                   correction__advantage="gae", train__epochs=1)
    before, state, rows, metrics, trainer = one_update(**changes)
    reference = jax.device_get(state["reference"])
    assert reference["embed"].dtype == jnp.bfloat16
    for kept, first in zip(jax.tree.leaves(reference), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(kept, first)
    assert np.isfinite(trainer.score(state, fake_samples())["logp_ref"]).all()
    assert math.isfinite(metrics["actor/kl_loss"])


# The record


def test_phases_and_steps_of_the_record():
    lines = [(r["phase"], r["step"]) for r in tiny.lines(tiny.finished())]
    expected = [("warmup", i) for i in range(1, 13)] + [("eval", 0), ("train", 1)]
    expected += [("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    assert lines == expected + [("train", 5), ("eval", 5)]


def test_every_metric_that_the_report_and_the_readers_need():
    text = (tiny.finished() / "metrics.jsonl").read_text().splitlines()
    first = next(r for r in map(json.loads, text) if r["phase"] == "train")
    needed = {
        "reward/mean", "reward/learner_snis", "reward/learner_snis_ess", "reward/timeouts",
        "reward/errors", "reward/non_finite", "actor/entropy", "actor/grad_norm", "actor/pg_loss",
        "actor/pg_clipfrac", "actor/ppo_kl", "response_length/mean", "response_length/max",
        "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
        "training/rollout_actor_probs_pearson_corr", "rollout_corr/kl", "rollout_corr/k3_kl",
        "rollout_corr/chi2_token", "rollout_corr/ppl_ratio", "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_max", "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_is_ratio_fraction_high", "time/rollout_s", "time/update_s",
        "time/step_s", "time/rollout_tokens_per_s",
    }
    assert needed <= first.keys(), needed - first.keys()
    held_out = next(r for r in map(json.loads, text) if r["phase"] == "eval")
    assert {"eval/greedy_accuracy", "eval/sampled_accuracy", "eval/constant_accuracy",
            "eval/n"} <= held_out.keys()
    assert held_out["eval/n"] == 8


def test_metrics_of_the_samples_by_hand():
    samples = fake_samples(4)
    rewards = [1.0, 1.0, 0.0, 2.0]
    samples = [train.rollouts.Sample(s.trajectory, {}, "", 0.5, r, i // 2)
               for i, (s, r) in enumerate(zip(samples, rewards))]
    rows = {"rewards": np.array(rewards), "group": np.array([0, 0, 1, 1]),
            "entropy": np.array([[9.0, 1.0], [9.0, 2.0]]), "mask": np.array([[0, 1], [0, 1]], bool)}
    values = train.sample_metrics(samples, rows, limits=(5, 3))
    assert values["reward/mean"] == 1.0 and values["reward/score_mean"] == 0.5
    assert values["reward/std"] == pytest.approx(0.5**0.5)  # deviations 0, 0, -1, 1
    assert values["reward/equal_groups_ratio"] == 0.5
    alike = train.sample_metrics(samples, rows | {"rewards": np.ones(4)}, limits=(5, 3))
    assert alike["reward/equal_groups_ratio"] == 1.0
    assert values["response_length/mean"] == 1.75 and values["response_length/max"] == 3  # 1 2 3 1
    assert values["response_length/truncated_ratio"] == 0.0
    assert values["num_turns/max"] == 1
    assert values["response_length/clip_ratio"] == 0.25 and values["prompt_length/clip_ratio"] == 1
    assert values["actor/entropy"] == 1.5


def test_the_run_describes_itself():
    described = json.loads((tiny.finished() / "config.json").read_text())
    assert described["config"]["optimizer"]["lr"] == 3e-3
    assert described["config"]["task"]["params"]["digits"] == 1
    assert {"jax", "flax", "optax", "python"} <= described["versions"].keys()
    assert "git_revision" in described
    assert any((tiny.finished() / "tensorboard").iterdir())
    assert sorted(p.name for p in (tiny.finished() / "checkpoints").iterdir()) == ["4", "5"]


def test_the_warm_up_taught_the_format():
    losses = [r["warmup/loss"] for r in tiny.lines(tiny.finished()) if r["phase"] == "warmup"]
    assert losses[-1] < 0.5 * losses[0]


def test_run_returns_the_last_evaluation_and_writes_a_report(recorded):
    last = [r for r in tiny.lines(recorded.workdir) if r["phase"] == "eval"][-1]
    assert recorded.returned == {k: v for k, v in last.items() if k.startswith("eval/")}
    assert (recorded.workdir / "report.html").stat().st_size > 1000


def test_the_same_seed_twice_gives_the_same_record(recorded):
    assert tiny.lines(recorded.workdir) == tiny.lines(tiny.finished())


def test_a_warm_up_answer_longer_than_the_row_of_targets_is_refused(tmp_path):
    """A target that max_new_tokens cuts off would be taught without its end, in silence."""
    with (
        mock.patch.object(train, "initial_state", side_effect=RuntimeError("the warm-up passed")),
        pytest.raises(ValueError, match="max_new_tokens"),
    ):
        tiny.run(tmp_path, rollout__max_new_tokens=2, task__max_prompt_tokens=8, warmup__steps=1)


def test_a_jsonl_task_needs_no_warm_up_split(tmp_path):
    """As the shipped GSM8K config: files of the user, no supervised steps."""
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "id": str(a)} for a in range(9)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tiny.run(
        tmp_path / "run", steps=1, task__name="jsonl", warmup__steps=0,
        task__params={"path": str(tmp_path / "train.jsonl")},
        eval__params={"path": str(tmp_path / "train.jsonl")},
    )
    assert [r["phase"] for r in tiny.lines(tmp_path / "run")] == ["eval", "train", "eval"]


# What stops a run


@pytest.mark.parametrize("name", ["actor/pg_loss", "critic/vf_loss", "actor/grad_norm",
                                  "critic/grad_norm", "actor/kl_loss", "reward/mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_terms_are_named(name, value):
    with pytest.raises(FloatingPointError) as error:
        train.check_finite(7, {"reward/std": 1.0, name: value}, 4)
    assert f"step 7: {name} is {value}" in str(error.value)
    assert "checkpoint of step 4 is intact" in str(error.value)


def test_an_infinite_divergence_does_not_stop_a_run():
    train.check_finite(7, {"rollout_corr/k3_kl": math.inf, "actor/pg_loss": 0.1}, 4)


@pytest.mark.parametrize("changes", [
    dict(correction__advantage="remax", correction__masks="seq_mean_k3(upper=0.5) & veto"),
    dict(correction__mode="bypass", correction__objective="clip_cov", correction__weight="none",
         correction__advantage="gdpo", reward__name="tests.tiny_rewards:parts"),
    dict(correction__advantage="opob", correction__masks="trm(trm_delta=10.0)",
         correction__kl="exact_reverse", correction__kl_coeff=0.1),
    dict(correction__mode="bypass", correction__masks="trm(trm_delta=10.0)",
         correction__weight="none", correction__kl="exact_forward", correction__kl_coeff=0.1,
         correction__kl_placement="reward", correction__advantage="tir_otb",
         correction__objective="st_ppo"),
])
def test_methods_that_ask_for_more_than_the_usual(changes):
    _, _, rows, record, _ = one_update(metrics__percentile_every=1, **changes)
    assert np.isfinite(record["actor/pg_loss"]) and record["actor/grad_norm"] > 0
    assert 0 <= record["mismatch/dp_p95/mean"] <= record["mismatch/dp_p99/max"] <= 1
    # Three positions, from 0, 1 and 2 on.
    shares = [record[f"mismatch/position_{p}/token_fraction"] for p in (0, 1, 2)]
    assert sum(shares) == pytest.approx(1, abs=1e-5) and shares[0] >= shares[2]
    # Of tokens drawn by version 0 before the first step.
    assert record["training/off_policy/trajectory_staleness/max"] == 0
    shares = [record[f"mismatch/{f}/share"] for f in ("engine", "staleness", "trust_region")]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert ("rollout_corr/rollout_rs_masked_fraction" in record) == ("correction__masks" in changes)
    assert record["variance_proxy/expected_w"] > 0
    assert record["variance_proxy/proxy1_signal_strength"] > 0  # after two updates too


def test_variance_proxies_fall_due_with_the_gradient_of_the_first_update():
    """For any advantage and number of updates, at the weights that sampled; on due steps alone."""
    setup = tiny.setup()  # two epochs of two minibatches, due in every tenth step
    with tiny.one_device():
        trainer = train.Trainer(setup)
    norms, fields, train_step = [], set(), trainer._train_step
    proxies = mock.Mock(wraps=trainer._variance_proxies)

    def spy(state, minibatch):
        fields.update(minibatch)
        state, metrics = train_step(state, minibatch)
        norms.append(float(metrics["actor/grad_norm"]))
        return state, metrics

    state = train.initial_state(setup, train.initial_params(setup))
    params, rows = jax.device_get(state["policy"].params), trainer.score(state, fake_samples())
    with mock.patch.multiple(trainer, _train_step=spy, _variance_proxies=proxies):
        state, record = trainer.update(state, rows, 10)
        with mock.patch.object(trainer, "_collisions", side_effect=AssertionError("not due")):
            _, another = trainer.update(state, rows, 11)
    assert not any(name.startswith("variance_proxy/") for name in another)
    assert "sum_pi_squared" not in fields  # else due steps compile the update again
    proxy = {n.split("/")[1]: v for n, v in record.items() if n.startswith("variance_proxy/")}

    # |score|^2 of a token in logit space: (1 - pi(y))^2 + sum_{v != y} pi(v)^2, of whole logits.
    mask = rows["mask"][:, 1:]
    logits = transformer.logits(params, setup.model, rows["tokens"], None, rows["segment_ids"])
    pi = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)[:, :-1]
    taken = np.eye(pi.shape[-1])[rows["tokens"][:, 1:]]
    score = np.square(taken - pi).sum(-1) * mask
    # Drawn at -2 nats; token-level weights up to 2.
    w = np.minimum(np.sum(taken * pi, axis=-1) * np.exp(2), 2) * mask
    w_mean = w.sum(1) / mask.sum(1)
    # The advantage of a sequence: its reward among the four of its group, `grpo`.
    rewards = rows["rewards"].reshape(4, 4).astype(np.float64)
    std = rewards.std(1, ddof=1, keepdims=True)
    adv = ((rewards - rewards.mean(1, keepdims=True)) / (std + 1e-6)).ravel()
    power = np.mean((w_mean * adv) ** 2 * score.sum(1))
    assert proxy["expected_w"] == pytest.approx((score * w**2).sum(1).mean(), rel=1e-4)
    assert proxy["proxy2_total_power"] == pytest.approx(power, rel=1e-4)
    # The first of the four updates has 8 of the 16 sequences.
    assert proxy["proxy1_signal_strength"] == pytest.approx(norms[0] ** 2, rel=1e-5)
    assert min(abs(x / norms[0] - 1) for x in (*norms[1:4], np.mean(norms[:4]))) > 1e-3
    assert proxies.call_args.kwargs["num_sequences"] == 8


def test_components_of_the_rewards_are_recorded(tmp_path):
    tiny.run(
        tmp_path, steps=1, warmup__steps=1, correction__advantage="gdpo",
        reward__name="tests.tiny_rewards:parts", rollout__overlong_buffer=2,
    )
    [record] = [r for r in tiny.lines(tmp_path) if r["phase"] == "train"]
    parts = [record[f"reward/component/{name}"] for name in ("closeness", "length", "overlong")]
    assert sum(parts) == pytest.approx(record["reward/mean"], abs=1e-5) and parts[2] < 0


def test_logits_of_a_large_batch_are_refused_before_anything_is_made():
    config = tiny.config(correction__masks="trm(trm_delta=0.1)", rollout__prompts=1_000_000)
    with pytest.raises(ValueError, match=r"'trm' needs logits.* numbers a batch, where 268,435,456"):
        train.build(config)
