"""The buffer by itself, and in a source: who is drawn, how often, how old."""

import collections
import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxrl_tis.rollouts import replay, schedules
from jaxrl_tis.rollouts.replay import Replay
from jaxrl_tis.rollouts.source import next_batch
from tests import tiny
from tests.rollouts.virtual_test import source


def filled(way, ages, priorities, seed=0):
    """A buffer at version 100 whose groups were stored so many versions ago."""
    buffer = Replay(way, age=1000, seed=seed)
    for group, (age, priority) in enumerate(zip(ages, priorities, strict=True)):
        buffer.add(group, None, 100 - age, 100 - age, priority)
    return buffer


def frequencies(way, ages, priorities, draws=4000):
    """How often each group is the one that is drawn, over seeds."""
    counts = np.zeros(len(ages))
    for seed in range(draws):
        [drawn] = filled(way, ages, priorities, seed).sample(1, 100)
        counts[drawn.group] += 1
    return counts


def test_unknown_rewards_are_in_no_priority():
    nan = float("nan")
    assert replay.priority([1.0, -0.5, nan, nan]) == 0.75
    assert replay.priority([nan, nan]) == 0.0


def test_fresh_groups_are_drawn_in_proportion_to_priority_and_age():
    """Against (|r| + 1e-6) exp(-age / tau), which no static key appears in."""
    ages, rewards = np.array([0, 3, 3, 10, 20]), np.array([1.0, 1.0, -0.25, 2.0, 0.5])
    p = (np.abs(rewards) + 1e-6) * np.exp(-ages / 8.0)
    counts = frequencies(replay.fresh(tau=8), ages, rewards)
    expected = len(range(4000)) * p / p.sum()
    assert stats.chisquare(counts, expected).pvalue > 0.01
    # The test sees a priority that does not age.
    flat = np.abs(rewards) / np.abs(rewards).sum()
    assert stats.chisquare(counts, 4000 * flat).pvalue < 1e-6


def test_uniform_looks_at_nothing():
    counts = frequencies(replay.uniform(), [0, 3, 50], [1.0, 0.0, 9.0])
    assert stats.chisquare(counts).pvalue > 0.01


def test_groups_are_drawn_without_putting_back_in_proportion_to_what_is_left():
    """Of three groups with p = 1/2, 1/3, 1/6 two are drawn: the pair (0, 1) comes with probability
    1/2 * 2/3 + 1/3 * 3/4, (0, 2) with 1/2 * 1/3 + 1/6 * 3/5, (1, 2) with the rest."""
    pairs = collections.Counter()
    for seed in range(4000):
        buffer = filled(replay.fresh(tau=1e9), [0, 0, 0], [3.0, 2.0, 1.0], seed)
        pairs[tuple(s.group for s in buffer.sample(2, 100))] += 1
    counts = [pairs[0, 1], pairs[0, 2], pairs[1, 2]]
    p = np.array([1 / 3 + 1 / 4, 1 / 6 + 1 / 10, 0])
    p[2] = 1 - p.sum()
    assert stats.chisquare(counts, 4000 * p).pvalue > 0.01


def test_the_newest_come_first():
    drawn = filled(replay.newest(), [9, 5, 7, 1], [1.0] * 4).sample(2, 100)
    assert [s.group for s in drawn] == [2, 3]  # in the order of their numbers, which is that of arrival


def test_the_share_of_samples_that_counts_falls_with_age():
    """Groups of ages 0 to n, all alike: what a draw prefers is worth (sum p)^2 / (n sum p^2) of the
    buffer, exactly, and a long tau is worth all of it."""
    ages = np.arange(40)
    shares = []
    for tau in (1e6, 20.0, 5.0):
        buffer = filled(replay.fresh(tau=tau), ages, np.ones(40))
        p = np.exp([buffer._key(s) for s in buffer.stored.values()] - np.float64(100 / tau))
        np.testing.assert_allclose(p, (1 + 1e-6) * np.exp(-ages / tau), rtol=1e-9)
        shares.append(p.sum() ** 2 / (len(p) * (p**2).sum()))
    assert shares[0] > 0.999 and 0.7 < shares[1] < 0.8 and 0.2 < shares[2] < 0.3


def step_of(square, lags=(0.0, 4.0), tokens=50.0):
    """Metrics of a step whose tokens have one of some lags, by draws of a normal log-ratio of mean ratio 1."""
    rng = np.random.default_rng(3)
    draws = [rng.normal(-square * lag / 2, math.sqrt(square * lag), 40000) for lag in lags]
    return {replay.LAG: float(np.mean(lags)), replay.SQUARE: float(np.mean(np.square(draws))), replay.LENGTH: tokens}


def test_a_measured_priority_falls_as_the_effective_sample_size():
    """Tokens drift by a variance of 4e-4 a version: of sequences of 50 the size falls to 1 / e in 50."""
    buffer = Replay(replay.fresh_by_ess(), age=1000, seed=0)
    buffer.observe({replay.LAG: 0.0, replay.SQUARE: 0.0, replay.LENGTH: 50.0})  # nothing is old
    buffer.observe({replay.LAG: 1.0, replay.SQUARE: math.nan, replay.LENGTH: 50.0})
    assert buffer.tau == 500
    buffer.observe(step_of(4e-4))
    assert buffer.tau == pytest.approx(50, rel=0.02)
    age = round(buffer.tau)
    logs = np.random.default_rng(4).normal(-2e-4 * age * 50, math.sqrt(4e-4 * age * 50), 400000)
    weights = np.exp(logs)
    assert weights.mean() ** 2 / (weights**2).mean() == pytest.approx(math.exp(-1), rel=0.05)
    for _ in range(30):
        buffer.observe(step_of(1e-4))
    assert buffer.tau == pytest.approx(200, rel=0.15) and buffer.copy().tau == buffer.tau
    constant = Replay(replay.fresh(tau=7), age=1000, seed=0)
    constant.observe(step_of(4e-4))
    assert constant.tau == 7


def test_a_group_is_used_so_often_and_dropped_when_it_is_too_old():
    buffer = Replay(replay.uniform(uses=2, most=3), age=4, seed=0)
    uses = collections.Counter()
    for version in range(60):
        fresh = [2 * version, 2 * version + 1]
        for group in fresh:
            buffer.add(group, None, oldest=version, version=version, priority=1.0)
        drawn = buffer.sample(2, version, fresh)
        uses.update([*fresh, *(s.group for s in drawn)])
        assert all(version - s.oldest <= 4 for s in buffer.stored.values())
        assert len(buffer) <= 2 * 5
        if version > 1:
            assert len({*fresh, *(s.group for s in drawn)}) == 4  # nobody twice
    assert max(uses.values()) <= 3 and min(uses.values()) == 1
    assert sum(uses.values()) == 60 * 4
    assert uses.keys() == set(range(120))


def test_the_age_is_that_of_the_oldest_token():
    buffer = Replay(replay.newest(uses=2, most=9), age=4, seed=0)
    buffer.add(0, None, oldest=1, version=3, priority=1.0)
    assert [s.group for s in buffer.sample(1, 5)] == [0]
    with pytest.raises(ValueError, match="to replay 1 groups, and 0 are all"):
        buffer.sample(1, 6)


def test_the_first_batch_repeats_what_it_has():
    buffer = Replay(replay.newest(uses=3, most=4), age=9, seed=0)
    for group in range(2):
        buffer.add(group, None, 0, 0, 1.0)
    assert [s.group for s in buffer.sample(4, 0, [0, 1])] == [0, 0, 1, 1]
    assert [s.uses for s in buffer.stored.values()] == [3, 3]
    with pytest.raises(ValueError, match="to replay 3 groups, and 2 are all that are not used 4 times"):
        buffer.sample(3, 1)


def test_a_buffer_goes_on_from_its_state():
    way = replay.fresh(uses=2, most=5, tau=3)
    ours = filled(way, [3, 2, 2, 1, 0], [1.0, 0.5, 2.0, 0.1, 1.0], seed=7)
    ours.sample(2, 100)
    theirs = Replay(way, 1000, seed=7)
    theirs.set_state(json.loads(json.dumps(ours.get_state(lambda x: x))), lambda x: x)
    before = ours.copy()
    for version in (101, 102, 103):
        assert ours.sample(2, version) == theirs.sample(2, version)
    assert ours.stored == theirs.stored != before.stored
    with pytest.raises(ValueError, match="group 0 is in the buffer"):
        before.add(0, None, 0, 0, 1.0)


def test_draws_differ_by_version_and_seed():
    draw = lambda seed, version: [
        s.group for s in filled(replay.uniform(), [1] * 50, [1.0] * 50, seed).sample(5, version)
    ]
    assert draw(0, 100) == draw(0, 100)
    assert draw(0, 100) != draw(1, 100) and draw(0, 100) != draw(0, 101)


@pytest.mark.parametrize("text, why", [
    ("uniform(uses=2.5)", "uses is 2.5"),
    ("uniform(uses=4)", "at most 4 times and 4 times on average"),
    ("fresh(tau=0)", "tau is 0.0"),
    ("oldest", "replay 'oldest' is unknown"),
    ("newest(tau=5)", "has no parameter 'tau'"),
])
def test_spelling(text, why):
    with pytest.raises(ValueError, match=why):
        replay.parse(text)


def test_ages():
    areal, way = schedules.areal(staleness=2), replay.uniform()
    assert replay.parse("") is None
    assert replay.max_age(areal, None, 0) == replay.max_age(areal, replay.uniform(uses=1), 0) == 2
    assert replay.max_age(areal, way, 0) == 6 and replay.max_age(areal, way, 9) == 9
    assert replay.max_age(schedules.areal(staleness=math.inf), way, 0) == math.inf


# In a source

SCHEDULES = ["sync", "one_step", "areal(staleness=2)", "in_flight(staleness=2)"]


def made(schedule, text, **overrides):
    return source(schedule, rollout__replay=text, rollout__max_age=0 if "uses=1" in text else 5, **overrides)


def turns(schedule):
    return {} if schedule == "sync" else {"rollout__update_turns": 2}


@pytest.mark.all
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("text", [
    "uniform(uses=2, most=3)", "newest(uses=2, most=4)", "fresh(uses=4, most=6)",
])
def test_a_batch_is_whole_and_within_its_age(schedule, text):
    c, params = made(schedule, text, **turns(schedule))
    uses, most = collections.Counter(), replay.parse(text).most
    for step in range(1, 9):
        c.publish(params, step - 1)
        samples, values = next_batch(c, step)
        assert [n for _, n in sorted(collections.Counter(s.group for s in samples).items())] == [4] * 4
        assert [s.group for s in samples] == sorted(s.group for s in samples)
        ages = [step - 1 - s.trajectory.version.min() for s in samples]
        assert 0 <= min(ages) <= max(ages) <= 5
        uses.update(samples[4 * g].trajectory.id for g in range(4))
        assert 1 <= values["replay/uses_mean"] <= most and 0 <= values["replay/age_mean"] <= 5
        assert values["replay/size"] == len(c.sync_digest()["replay"]) > 0
    assert len(uses) == 8 * 4 // replay.parse(text).uses and max(uses.values()) <= most


@pytest.mark.all
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", ["a step", "the middle of a step"])
def test_a_run_that_replays_goes_on_from_its_state(schedule, at):
    text = "fresh_by_ess(uses=2, most=4)"
    c, params = made(schedule, text, **turns(schedule))
    for step in range(1, 4):
        c.publish(params, step - 1)
        next_batch(c, step)
        c.observe(step_of(0.1 * step))
    if at == "the middle of a step":
        c.publish(params, 3)
        expected = [s.trajectory.id for s in next_batch(c, 4)[0]]
    state = json.loads(json.dumps(c.get_state(3)))
    resumed, _ = made(schedule, text, **turns(schedule))
    resumed.set_state(state)
    for step in range(4, 7):
        resumed.publish(params, step - 1)
        theirs, values = next_batch(resumed, step)
        if at == "the middle of a step":
            assert [s.trajectory.id for s in theirs] == expected
            return
        c.publish(params, step - 1)
        ours, own = next_batch(c, step)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.trajectory.id, a.reward, a.group) == (b.trajectory.id, b.reward, b.group)
            for name in ("tokens", "logp_behav", "version"):
                np.testing.assert_array_equal(
                    getattr(a.trajectory, name), getattr(b.trajectory, name))
        assert 0 < own["replay/tau"] < 1
        assert {n: v for n, v in own.items() if n.startswith("replay/")} == {
            n: v for n, v in values.items() if n.startswith("replay/")}


@pytest.mark.cases("areal(staleness=1)")
@pytest.mark.compiles
@pytest.mark.parametrize("schedule", ["sync", "areal(staleness=1)"])
def test_to_use_groups_once_is_not_to_replay(schedule, tmp_path):
    """Every number of the record that both runs write is the same, bit by bit."""
    tiny.run(tmp_path / "once", steps=2, rollout__schedule=schedule, rollout__replay="uniform(uses=1)")
    tiny.run(tmp_path / "plain", steps=2, rollout__schedule=schedule)
    for once, plain in zip(tiny.lines(tmp_path / "once"), tiny.lines(tmp_path / "plain"), strict=True):
        shared = once.keys() & plain.keys()
        added = {n for n in once.keys() - plain.keys() if not n.startswith(("replay/", "async/"))}
        assert not added and not plain.keys() - once.keys()
        assert {n: once[n] for n in shared} == {n: plain[n] for n in shared}


@pytest.mark.all
@pytest.mark.compiles
def test_a_synchronous_run_that_replays_scores_old_tokens_at_the_weights_that_drew_them(tmp_path):
    tiny.run(
        tmp_path / "run", steps=4, rollout__replay="fresh_by_ess(uses=2, most=4)", rollout__max_age=3,
        train__minibatches=1, train__epochs=1,
    )
    steps = [line for line in tiny.lines(tmp_path / "run") if line["phase"] == "train"]
    assert steps[0]["replay/uses_mean"] == 2 and steps[0]["replay/age_mean"] == 0
    assert steps[3]["replay/age_mean"] > 0
    assert steps[0]["replay/tau"] == 500 != steps[3]["replay/tau"] > 0
