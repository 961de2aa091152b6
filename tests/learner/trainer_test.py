"""The score and the update of a step: which policy is which, and every method reachable."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.estimators.counts import is_count
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner import trainer
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.step import TrainState
from jaxrl_tis.learner.trainer import Trainer, first_sequence, reward_fields, sample_metrics
from jaxrl_tis.models import transformer
from jaxrl_tis.rollouts.groups import Sample
from tests import tiny
from tests.weights import exploding

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


def fake_samples(count=16, vocab_size=0, top_n=0):
    """Random trajectories with random rewards, drawn from all tokens alike."""
    rng, out = np.random.default_rng(0), []
    for i in range(count):
        n = 1 + i % 3
        zeros = np.zeros(n, np.float32)
        trajectory = Trajectory(
            str(i), np.array([1, 4, 13, 5, 15], np.int32), rng.integers(3, 13, n).astype(np.int32),
            zeros - 2, zeros, zeros, zeros.astype(np.int32), "stop", 0, i, "none", 1.0,
            logits=np.full((n, vocab_size), -2, np.float32),
            top_ids=np.tile(np.arange(top_n, dtype=np.int32), (n, 1)),
            top_logps=np.full((n, top_n), -3, np.float32))
        reward = float(rng.random())
        parts = {"closeness": reward + 0.1 * i, "length": -0.1 * i}
        out.append(Sample(trajectory, {}, "", 0.0, reward, i // 4, parts, 0.5))
    return out


def one_update(optimizer=None, **changes):
    setup = tiny.setup(**changes)
    if optimizer is not None:
        training = dataclasses.replace(setup.training, optimizer=optimizer)
        setup = dataclasses.replace(setup, training=training)
    with tiny.one_device():
        trainer = Trainer(setup.training)
    state = initial_state(setup.training, initial_params(setup.training))
    # A copy on the device: a NumPy view of a buffer would keep it from being donated.
    before = jax.tree.map(jnp.copy, state["policy"].params)
    num_logits = setup.model.vocab_size if "logits_behav" in setup.training.correction.needs else 0
    samples = fake_samples(vocab_size=num_logits, top_n=setup.engine.top_n)
    rows = trainer.score(state, samples, {0: state["policy"].params})
    state, rows, metrics = trainer.update(state, rows, 1, 0)
    assert rows.keys() <= FIELDS.keys()  # else no pass can take them again
    return before, state, rows, metrics, trainer


# Which policy is which


def test_log_probs_are_those_of_the_weights_that_drew_each_token():
    """Version 0 drew some tokens and 1 the others; the update starts from version 1."""
    setup = tiny.setup()
    with tiny.one_device():
        trainer = Trainer(setup.training)
    now = initial_state(setup.training, initial_params(setup.training))
    before = jax.tree.map(lambda x: 1.3 * x, now["policy"].params)
    mixed = [
        dataclasses.replace(s, trajectory=dataclasses.replace(
            s.trajectory, version=np.arange(len(s.trajectory.tokens), dtype=np.int32) % 2
        )) for s in fake_samples()
    ]
    alone = lambda params: trainer.score(
        now | {"policy": TrainState(params, None)}, mixed, {0: params, 1: params}
    )
    old, new = alone(before), alone(now["policy"].params)
    rows = trainer.score(now, mixed, {0: before, 1: now["policy"].params})
    mask, is_first = rows["mask"], rows["version"] == 0
    assert (mask & is_first).any() and (mask & ~is_first).any()
    np.testing.assert_array_equal(rows["logp_prox"], new["logp_prox"])
    np.testing.assert_array_equal(
        rows["logp_old"][mask], np.where(is_first, old["logp_prox"], new["logp_prox"])[mask]
    )
    assert np.abs(rows["logp_old"] - rows["logp_prox"])[mask & is_first].min() > 1e-3
    # The staleness of those tokens is in the record, and nothing else was stale.
    _, _, metrics = trainer.update(now, rows, 2, 1)
    assert metrics["mismatch/staleness/log_ratio_abs_mean"] > 1e-3
    assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 1


def test_weights_that_are_gone_are_named():
    setup = tiny.setup()
    with tiny.one_device():
        trainer = Trainer(setup.training)
    state = initial_state(setup.training, initial_params(setup.training))
    with pytest.raises(ValueError, match=r"weights of version 0, and only those of 3, 4 are kept"):
        trainer.score(state, fake_samples(), dict.fromkeys((3, 4), state["policy"].params))


# Several minibatches and epochs


def test_log_probs_that_are_not_finite_are_named_with_their_layer():
    setup = tiny.setup(model__num_layers=2, model__dtype="float16", train__fuse_old_logp="never")
    with tiny.one_device():
        trainer = Trainer(setup.training)
    params = initial_params(setup.training)
    score = lambda params: (
        state := initial_state(setup.training, params),
        trainer.score(state, fake_samples(), {0: state["policy"].params}),
    )
    assert trainer.non_finite(*score(params)) == ""
    state, rows = score(exploding(params))
    said, count = trainer.non_finite(state, rows), rows["mask"].sum()
    assert f"{count} of {count} log-probs of the learner (logp_prox) are not finite" in said
    assert "in layer 1 (of layers 0 to 1)" in said
    rows["mask"][:] = False  # nothing is trained on
    assert trainer.non_finite(state, rows) == ""


def test_the_sequence_of_a_bad_token_is_whole():
    """A token of row 1 that overflows makes earlier ones NaN, too."""
    rows = {"tokens": np.array([[1, 2, 3, 0], [4, 5, 6, 0]]), "segment_ids": np.array([[1, 1, 1, 0]] * 2)}
    bad = np.array([[0, 0, 0, 0], [0, 1, 0, 0]], bool)
    assert first_sequence(rows, bad).tolist() == [4, 5, 6]


@pytest.mark.all
def test_one_minibatch_and_one_epoch_is_on_policy():
    _, _, _, metrics, _ = one_update(train__minibatches=1, train__epochs=1)
    assert abs(metrics["actor/ppo_kl"]) < 1e-6 and metrics["actor/pg_clipfrac"] == 0


@pytest.mark.all
def test_later_minibatches_and_epochs_see_the_old_policy_of_the_rollout():
    *_, more, _ = one_update(train__minibatches=2, train__epochs=2)
    assert abs(more["actor/ppo_kl"]) > 1e-4  # the ratio left 1


@pytest.mark.all
def test_the_old_policy_stays_fixed_while_the_learner_moves():
    seen = []
    setup = tiny.setup()
    with tiny.one_device():
        trainer = Trainer(setup.training)
    step = trainer._train_step

    def spy(state, minibatch, base=None):
        seen.append(jax.device_get(minibatch))
        return step(state, minibatch)

    state = initial_state(setup.training, initial_params(setup.training))
    rows = trainer.score(state, fake_samples(), {0: state["policy"].params})
    with mock.patch.object(trainer, "_train_step", spy):
        trainer.update(state, rows, 1, 0)
    assert [m["mask"].shape for m in seen] == [(2, 4, 8)] * 4  # 2 epochs x 2 minibatches of 2 x 4
    key = lambda m: m["tokens"].reshape(-1, 8)
    for epoch in (seen[:2], seen[2:]):
        tokens = np.concatenate([key(m) for m in epoch])
        assert sorted(map(bytes, tokens)) == sorted(map(bytes, rows["tokens"]))
        for minibatch in epoch:
            mask = minibatch["mask"]
            expected = {bytes(t): x for t, x in zip(rows["tokens"], rows["logp_old"], strict=True)}
            for tokens_t, old_t, mask_t in zip(
                key(minibatch), minibatch["logp_old"].reshape(-1, 8), mask.reshape(-1, 8), strict=True
            ):
                np.testing.assert_array_equal(old_t[mask_t], expected[bytes(tokens_t)][mask_t])
    assert not np.array_equal(key(seen[0]), key(seen[2]))  # another order in the next epoch


def test_components_stand_in_the_order_of_their_names():
    sample = lambda parts: Sample(None, {}, "", 0.0, 0.0, 0, components=parts)
    columns = lambda *parts: reward_fields([sample(x) for x in parts], {"reward_components": "gdpo"})
    np.testing.assert_array_equal(
        columns({"b": 1.0}, {"a": 3.0, "b": 2.0})["reward_components"], [[np.nan, 1.0], [3.0, 2.0]]
    )
    assert np.isnan(columns({}, {})["reward_components"]).tolist() == [[True], [True]]


def test_metrics_of_the_samples_by_hand():
    samples = fake_samples(4)
    rewards = [1.0, 1.0, 0.0, 2.0]
    samples = [Sample(s.trajectory, {}, "", 0.5, r, i // 2)
               for i, (s, r) in enumerate(zip(samples, rewards, strict=True))]
    rows = {"rewards": np.array(rewards), "group": np.array([0, 0, 1, 1]),
            "entropy": np.array([[9.0, 1.0], [9.0, 2.0]]), "mask": np.array([[0, 1], [0, 1]], bool)}
    config = tiny.config()  # at most 5 and 3 tokens
    values = sample_metrics(samples, rows, config)
    assert values["reward/mean"] == 1.0 and values["reward/score_mean"] == 0.5
    assert values["reward/std"] == pytest.approx(0.5**0.5)  # deviations 0, 0, -1, 1
    assert values["reward/zero_std_group_ratio"] == 0.5
    assert values["actor/entropy"] == 1.5
    rejected = rows | {"scored": np.ones((2, 2), bool)}
    assert sample_metrics(samples, rejected, config)["actor/entropy"] == 5.25  # of 9, 1, 9 and 2
    alike = sample_metrics(samples, rows | {"rewards": np.ones(4)}, config)
    assert alike["reward/zero_std_group_ratio"] == 1.0
    assert values["response_length/mean"] == 1.75 and values["response_length/max"] == 3  # 1 2 3 1
    assert values["response_length/truncated_ratio"] == 0.0
    assert values["num_turns/max"] == 1
    assert values["response_length/clip_ratio"] == 0.25 and values["prompt_length/clip_ratio"] == 1
    assert values["actor/entropy"] == 1.5


@pytest.mark.all
@pytest.mark.cases("changes0")
@pytest.mark.parametrize("changes", [
    dict(correction__advantage="remax", correction__masks="seq_mean_k3(upper=0.5) & veto"),
    dict(correction__centre="behav", correction__objective="clip_cov", correction__weight="none",
         correction__advantage="gdpo", reward__name="tests.tiny_rewards:parts"),
    dict(correction__advantage="opob", correction__masks="trm(trm_delta=10.0)",
         correction__kl="exact_reverse", correction__kl_coeff=0.1),
    dict(correction__centre="behav", correction__masks="trm(trm_delta=10.0)",
         correction__weight="none", correction__kl="exact_forward", correction__kl_coeff=0.1,
         correction__kl_placement="reward", correction__advantage="tir_otb",
         correction__objective="st_ppo"),
])
def test_methods_that_ask_for_more_than_the_usual(changes):
    _, _, rows, record, _ = one_update(metrics__diagnostics_every=1, **changes)
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


@pytest.mark.cases("old")
@pytest.mark.parametrize("centre", ["old", "behav"])
def test_counts_are_of_the_whole_batch(centre):
    """31 tokens in minibatches of micro-batches; an update sees them once in each of two epochs."""
    *_, rows, metrics, _ = one_update(
        correction__centre=centre, correction__weight="token_tis",
        correction__rejected_in_denominator=True,
        correction__masks="veto & opsm(opsm_delta=-9.0) & token_ratio(lower=1, upper=9) & "
        "token_ratio(upper=9)", correction__objective="reinforce",
        train__epochs=2, train__minibatches=2, train__microbatch_rows=4,
    )
    seen = 62 if centre == "behav" else 31
    assert rows["mask"].sum() == 31
    tokens = {name.removeprefix("correction/"): x for name, x in metrics.items() if is_count(name)}
    assert [tokens.pop(f"mask/{name}/num_tokens") for name in ("veto", "token_ratio", "token_ratio_2")] == [
        seen] * 3
    assert tokens.pop("mask/opsm/num_tokens") == 62  # of the policy of each update
    # It drops all tokens of negative advantages.
    assert tokens.pop("mask/opsm/dropped") == 2 * (rows["adv"] < 0)[rows["mask"]].sum() > 0
    is_less = (rows["logp_old"] < rows["logp_behav"])[rows["mask"]]
    dropped = tokens.pop("mask/token_ratio/dropped")
    assert dropped == is_less.sum() if centre == "old" else 31 < dropped <= 62
    assert tokens.pop("mask/veto/dropped") == tokens.pop("mask/token_ratio_2/dropped") == 0
    assert tokens.pop("weight/num_tokens") == tokens.pop("weight/changed_raw") == seen
    assert tokens.keys() == {"weight/changed", "weight/truncated", "weight/dropped"}


@pytest.mark.all
def test_variance_proxies_fall_due_with_the_gradient_of_the_first_update():
    """For any advantage and number of updates, at the weights that sampled; on due steps alone."""
    setup = tiny.setup()  # two epochs of two minibatches, due in every tenth step
    with tiny.one_device():
        trainer = Trainer(setup.training)
    norms, fields, train_step = [], set(), trainer._train_step
    proxies = mock.Mock(wraps=trainer.diagnostics._variance_proxies)

    def spy(state, minibatch, base=None):
        fields.update(minibatch)
        state, metrics = train_step(state, minibatch)
        norms.append(float(metrics["actor/grad_norm"]))
        return state, metrics

    state = initial_state(setup.training, initial_params(setup.training))
    params = jax.device_get(state["policy"].params)
    rows = trainer.score(state, fake_samples(), {0: state["policy"].params})
    measures = mock.patch.object(trainer.diagnostics, "_variance_proxies", proxies)
    with measures, mock.patch.object(trainer, "_train_step", spy):
        state, _, record = trainer.update(state, rows, 10, 9)
        with mock.patch.object(trainer.diagnostics, "_collisions", side_effect=AssertionError("not due")):
            _, _, another = trainer.update(state, rows, 11, 10)
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


def test_the_updates_of_a_step_are_joined():
    assert trainer._of_step("critic/lr", [1.0, 3.0]) == 3.0
    assert trainer._of_step("correction/weight/num_tokens", [1.0, 3.0]) == 4.0
    assert trainer._of_step("actor/pg_loss", [1.0, 3.0]) == 2.0
