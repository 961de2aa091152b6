"""Forks of sessions as rows of a batch: their places, their rewards, their advantages, the update."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxrl_tis.estimators import methods, returns
from jaxrl_tis.estimators.advantages import ADVANTAGES
from jaxrl_tis.learner import correction, forks
from jaxrl_tis.learner.batch_layout import trajectory_rows
from jaxrl_tis.learner.setup import fork_rows
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer, sample_metrics
from jaxrl_tis.rollouts.groups import Sample
from tests import tiny
from tests.learner.turns_test import SHAPES, episode


def sample(i, group, reward, shapes=()):
    """A session whose record has the shape of `turns_test`, and forks of these shapes."""
    rows = [
        dataclasses.replace(episode(i, shape), fork=k, outcome="", turn_rewards=np.zeros(0, np.float32))
        for k, shape in enumerate(shapes, start=1)
    ]
    record = dataclasses.replace(episode(i, SHAPES[i % 8]), forks=tuple(rows))
    return Sample(record, {}, "", reward, reward, group)


ALL = np.ones(4, bool)
SESSIONS = [
    sample(0, 0, 1.0, ["1101", "11"]), sample(1, 0, 0.0), sample(2, 1, 2.0, ["111"]),
    sample(3, 1, 2.0),
]


def test_forks_stand_after_the_samples():
    rows = forks.fork_rows(SESSIONS, ALL, 4)
    shapes = [[int(x) for x in t.mask] for t in rows.trajectories]
    assert shapes == [[1, 1, 0, 1], [1, 1], [1, 1, 1], []]
    assert rows.owners.tolist() == [0, 1, 2, 3, 0, 0, 2, 0]
    assert forks.metrics(rows) == {
        "harness/fork_rows": 3, "harness/left_out_forks": 0, "harness/left_out_tokens": 0,
    }
    laid = trajectory_rows([s.trajectory for s in SESSIONS] + rows.trajectories, 13)
    assert laid["segment_ids"].any(axis=1).tolist() == [True] * 7 + [False]
    assert laid["temperature"][7].tolist() == [1.0] * 13 and not laid["mask"][7].any()


def test_forks_without_a_row_are_the_shortest_and_are_counted():
    """Sampled tokens of the forks: 3, 2 and 3."""
    rows = forks.fork_rows(SESSIONS, ALL, 2)
    assert [len(t.tokens) for t in rows.trajectories] == [4, 3]
    assert rows.owners.tolist() == [0, 1, 2, 3, 0, 2]
    assert (rows.num_placed, rows.num_left_out, rows.num_tokens_left_out) == (2, 1, 2)
    none = forks.fork_rows(SESSIONS, ALL, 0)
    assert (none.trajectories, none.owners.tolist()) == ([], [0, 1, 2, 3])
    assert (none.num_placed, none.num_left_out, none.num_tokens_left_out) == (0, 3, 8)


def test_a_batch_without_forks_has_no_further_row():
    plain = [sample(i, 0, 1.0) for i in range(4)]
    rows = forks.fork_rows(plain, ALL, 4)
    assert (rows.trajectories, rows.owners.tolist()) == ([], [0, 1, 2, 3])
    # Neither have the forks of a session that is not in the loss.
    rows = forks.fork_rows(SESSIONS, np.array([False, True, False, True]), 4)
    assert (rows.trajectories, rows.num_left_out) == ([], 0)


def rewarded():
    fields = {"rewards": np.float32([1, 0, 2, 2]), "group": np.int32([0, 0, 1, 1]),
              "reward_components": np.ones((4, 2), np.float32)}
    return forks.of_all_rows(fields, np.array([0, 1, 2, 3, 0, 2, 0], np.int32))


def test_a_fork_has_no_reward_and_no_group_of_its_sessions():
    rows = rewarded()
    assert rows["rewards"][:4].tolist() == [1, 0, 2, 2] and np.isnan(rows["rewards"][4:]).all()
    assert np.isnan(rows["reward_components"][4:]).all() and rows["reward_components"].shape == (7, 2)
    assert rows["group"].tolist() == [0, 0, 1, 1, 2, 3, 4] and rows["group"].dtype == np.int32


@pytest.mark.parametrize("name, expected", [
    # Group 0 has the rewards 1 and 0, each counted once. With the fork their mean would be 2 / 3.
    ("dr_grpo", [0.5, -0.5, 0, 0, 0.5, 0, 0]),
    ("rloo", [1.0, -1.0, 0, 0, 1.0, 0, 0]),
    # The mean of the batch is 5 / 4.
    ("batch_mean", [-0.25, -1.25, 0.75, 0.75, -0.25, 0.75, 0]),
    ("grpo", [2**-0.5, -(2**-0.5), 0, 0, 2**-0.5, 0, 0]),
])
def test_a_fork_has_the_advantage_of_its_session(name, expected):
    config = tiny.config(correction__advantage=name)
    c = correction.parse(config.correction)
    sampled = np.ones((7, 3), bool)
    sampled[:, 0], sampled[6] = False, False
    batch = rewarded() | {"mask": sampled, "sampled": sampled}
    adv = np.asarray(jax.jit(functools.partial(correction.credited, c))(batch)[0]["adv"])
    np.testing.assert_allclose(adv, np.where(sampled, np.array(expected)[:, None], 0), rtol=1e-5)


@pytest.mark.all
@pytest.mark.parametrize("name", sorted(
    name for name in ADVANTAGES
    if not (traits := methods.traits("advantage", name)).per_token and not traits.of_sequences
))
def test_an_advantage_of_sequences_is_one_number_per_row(name):
    """So `of_owner` can read it at the first token. Rows that own themselves keep their bits."""
    rng = np.random.default_rng(1)
    mask = rng.random((6, 5)) < 0.7
    mask[:, 3] = True
    rewards, group = rng.normal(size=6).astype(np.float32), np.array([0, 0, 0, 1, 1, 1])
    own = {"oapl_beta_value": 1.0} if name == "oapl" else {}
    adv = np.asarray(ADVANTAGES[name](rewards, mask, group, **own))
    same = returns.of_owner(adv, mask, np.arange(6))
    np.testing.assert_array_equal(same, adv)


def test_the_rows_for_forks_of_a_config():
    count = lambda **changes: fork_rows(tiny.config(**tiny.HARNESS | changes))
    config = tiny.config()
    samples = config.rollout.prompts * config.rollout.group_size
    assert count() == samples and count(rollout__fork_rows=8) == 8
    assert count(rollout__on_fork="longest") == count(rollout__on_fork="refuse") == 0
    assert fork_rows(config) == 0


@functools.cache
def trainer(**changes):
    setup = tiny.setup(**tiny.HARNESS | dict(
        rollout__max_new_tokens=8, train__minibatches=1, train__epochs=1, rollout__prompts=2,
        rollout__group_size=4, train__microbatch_rows=4, correction__advantage="dr_grpo",
        train__fuse_old_logp="never", rollout__fork_rows=4,
    ) | changes)
    return Trainer(dataclasses.replace(setup.training, optimizer=optax.sgd(1.0)))


def batch(has_forks=True):
    shapes = {1: ["110010"], 6: ["1", "1011"]}
    return [sample(i, i // 4, float(i % 3), shapes.get(i, ()) if has_forks else ()) for i in range(8)]


def updated(made, samples, change=lambda rows: rows):
    state = initial_state(made.setup, initial_params(made.setup))
    rows = change(made.score(state, samples, {0: state["policy"].params}))
    state, rows, metrics = made.update(state, rows, 1, 0)
    return jax.device_get((state["policy"].params, rows, metrics))


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.parametrize("packed", [0, 40])
def test_the_update_is_that_of_all_rows(packed):
    """Against rows that are samples of their own, whose rewards are the advantages by hand: rewards
    0 1 2 0 and 1 2 0 1 have the means 3 / 4 and 1."""
    adv = np.float32([-0.75, 0.25, 1.25, -0.75, 0, 1, -1, 0, 0.25, -1, -1, 0])

    def alone(rows):
        rows = {name: x for name, x in rows.items() if name != "owner"}
        return rows | {"rewards": adv, "group": np.arange(12, dtype=np.int32)}

    made = trainer(train__pack_length=packed)
    params, rows, metrics = updated(made, batch())
    expected, _, _ = updated(made, batch(), alone)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert rows["mask"].any(axis=1).tolist() == [True] * 11 + [False]
    assert metrics["harness/fork_rows"] == 3 and metrics["harness/left_out_forks"] == 0
    # Rows without tokens change nothing, and the forks do.
    more, *_ = updated(trainer(train__pack_length=packed, rollout__fork_rows=8), batch())
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, params, more)
    without, plain, _ = updated(made, batch(has_forks=False))
    assert len(plain["mask"]) == 8 and "owner" not in plain
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, without)
    assert max(jax.tree.leaves(moved)) > 1e-3
    # Rewards, lengths and groups are measured of the samples alone.
    measured, as_plain = (
        sample_metrics(batch(x), r, made.setup.config) for x, r in ((True, rows), (False, plain))
    )
    for name in as_plain.keys() - {"actor/entropy"}:
        assert measured[name] == as_plain[name], name


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.parametrize("packed", [0, 40])
def test_a_fork_counts_in_the_prompt_of_its_session(packed):
    """Against a sum over tokens, whose advantages are divided by the tokens of both prompts."""
    prompt = np.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0])
    adv = np.float32([-0.75, 0.25, 1.25, -0.75, 0, 1, -1, 0, 0.25, -1, -1, 0])

    def alone(rows):
        tokens = np.array([rows["mask"][prompt == p].sum() for p in prompt])
        rows = {name: x for name, x in rows.items() if name != "owner"}
        return rows | {"rewards": adv / np.float32(2 * tokens), "group": np.arange(12, dtype=np.int32)}

    means = trainer(train__pack_length=packed, correction__aggregation="prompt-mean")
    sums = trainer(train__pack_length=packed, correction__aggregation="token-sum")
    params, rows, metrics = updated(means, batch())
    expected, _, told = updated(sums, batch(), alone)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, params, expected)
    assert metrics["actor/grad_norm"] == pytest.approx(told["actor/grad_norm"], rel=1e-4)
    assert metrics["actor/grad_norm"] > 1e-3 and rows["group"][8:].tolist() == [2, 3, 4, 5]


@pytest.mark.all
@pytest.mark.compiles
def test_forks_without_room_leave_the_update_of_the_longest_rows():
    params, rows, metrics = updated(trainer(rollout__on_fork="longest"), batch())
    expected, *_ = updated(trainer(), batch(has_forks=False))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert len(rows["mask"]) == 8 and metrics["harness/fork_rows"] == 0
    assert (metrics["harness/left_out_forks"], metrics["harness/left_out_tokens"]) == (3, 7)


@pytest.mark.all
@pytest.mark.compiles
def test_several_updates_share_the_forks():
    made = trainer(train__minibatches=2, train__microbatch_rows=2)
    params, rows, metrics = updated(made, batch())
    assert rows["mask"].any(axis=1).sum() == 11 and np.isfinite(metrics["actor/grad_norm"])
