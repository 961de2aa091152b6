"""The collection of rewarded groups, with a sampler made of arithmetic."""

import collections
import contextlib
import functools
import gc
import itertools
import math

import jax
import ml_collections
import numpy as np
import pytest

from jaxrl_tis.data.rewards import Scored
from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.rollouts import schedules
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from tests import tiny

TOKENIZER = CharTokenizer("0123456789+= ")


def fields(**changes):
    return tiny.config(rollout__prompts=2, rollout__group_size=3, **changes)


def task(**changes):
    base = dict(template="{prompt}", chat=False, system="", max_prompt_tokens=8)
    return ml_collections.ConfigDict(base | changes)


class FakeScheduler:
    """Ends requests in reverse order, two a step; a text is the last digit of its request's id."""

    def __init__(self):
        self.requests, self.waiting, self.stats = [], [], Stats()

    def add(self, request):
        self.requests.append(request)
        self.waiting.append(request)

    @property
    def pending(self):
        return len(self.waiting)

    def step(self):
        ended, self.waiting = self.waiting[-2:], self.waiting[:-2]
        # Each request: 3 of 4 slot steps drew; of two that share a prompt of 10 tokens one finds 2
        # of them in pages and has the others filled.
        self.stats.busy += 3 * len(ended)
        self.stats.slot_steps += 4 * len(ended)
        self.stats.prefilled += 4 * len(ended)
        self.stats.cached += len(ended)
        self.stats.shared += 5 * len(ended)
        return [self._trajectory(r) for r in reversed(ended)]

    def _trajectory(self, request):
        tokens = np.array(TOKENIZER.encode(request.id[-1]), np.int32)
        n = len(tokens)
        zeros = np.zeros(n, np.float32)
        return Trajectory(
            request.id, request.prompt, tokens, zeros, zeros, zeros, np.zeros(n, np.int32),
            "stop", request.seed, request.hash, "none", 1.0,
        )


class FakeRewards:
    """A reward computed in this process."""

    def __init__(self, function):
        self._function = function
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0, "dropped": 0}

    def results(self, texts, examples, tokens=None):
        values = [self._function(text, example) for text, example in zip(texts, examples, strict=True)]
        return [Scored(value, {"reward": value}) for value in values]

    def score(self, texts, examples, tokens=None):
        return [scored.score for scored in self.results(texts, examples)]


def batches():
    """Endless batches of two prompts: ids 0 1, 2 3, ..."""
    for i in itertools.count(step=2):
        yield [{"prompt": f"{j}+1=", "answer": str(j + 1), "id": str(j)} for j in (i, i + 1)]


class Batches:
    """Examples that come in batches, and how many batches were read."""

    def __init__(self, examples):
        self._examples, self.count = examples, 0

    def next_whole(self):
        self.count += 1
        return next(self._examples)

    def get_state(self):
        return self.count


def sync_source(
    config, reward, scheduler=None, timer=None, examples=None, with_greedy=False, sleeps=False,
    **options
):
    """A source that has published its first weights to the scheduler."""
    prompter = Prompter(TOKENIZER, config.task)
    parts = SourceParts(
        config, schedules.sync(), None, Groups(config, prompter, FakeRewards(reward), with_greedy),
        Batches(examples or batches()), timer or Timer(),
        serving_params=lambda params, version: params, **options,
    )
    c = SyncSource(parts, lambda params, version: scheduler or FakeScheduler(), sleeps)
    c.publish(None, 0)
    return c


class Timer:
    def __init__(self):
        self.phases = []

    def __call__(self, phase):
        self.phases.append(phase)
        return contextlib.nullcontext()


def test_groups_share_a_prompt_and_no_noise():
    scheduler, timer = FakeScheduler(), Timer()
    reward = lambda text, example: float(text) + 10 * int(example["id"])
    c = sync_source(fields(), reward, scheduler, timer)
    scheduler.stats = Stats(busy=9, slot_steps=99, preempted=2)  # of earlier steps
    samples, values = next_batch(c, 1)
    assert [s.group for s in samples] == [0, 0, 0, 1, 1, 1]
    assert [s.example["id"] for s in samples] == ["0", "0", "0", "1", "1", "1"]
    assert [s.text for s in samples] == ["0", "1", "2"] * 2
    assert [s.reward for s in samples] == [0, 1, 2, 10, 11, 12]
    assert values == {"rollout/discarded_groups": 0, "reward/timeouts": 0, "reward/errors": 0,
                      "reward/non_finite": 0, "reward/dropped": 0,
                      "rollout/occupancy": 0.75, "rollout/preempted": 0,
                      "rollout/shared_prompt_ratio": 0.5, "rollout/cached_prompt_tokens": 6}
    for group in (samples[:3], samples[3:]):
        assert len({s.trajectory.prompt.tobytes() for s in group}) == 1
    next_batch(c, 2)
    # One id and one 32-bit hash for every sample of the run.
    for name in ("id", "hash"):
        assert len({getattr(r, name) for r in scheduler.requests}) == 12
    assert timer.phases == ["data", "rollout", "reward"] * 2


def test_a_greedy_answer_per_prompt_where_it_is_asked_for():
    scheduler = FakeScheduler()
    reward = lambda text, example: float(text) + 10 * int(example["id"])
    samples, _ = next_batch(sync_source(fields(), reward, scheduler, with_greedy=True), 1)
    # The fourth request of each prompt is the greedy one; its text is "3".
    assert [s.reward for s in samples] == [0, 1, 2, 10, 11, 12]
    assert [s.greedy_reward for s in samples] == [3, 3, 3, 13, 13, 13]
    temperatures = [r.sampling.temperature for r in scheduler.requests]
    assert temperatures == [fields().rollout.temperature] * 3 + [0] + [
        fields().rollout.temperature] * 3 + [0]
    plain, _ = next_batch(sync_source(fields(), lambda text, example: 0.0), 1)
    assert all(math.isnan(s.greedy_reward) for s in plain)


def test_a_repeated_example_within_a_batch_does_not_repeat_its_noise():
    config = fields()
    same = itertools.repeat([{"prompt": "1+1=", "answer": "2", "id": "7"}] * 2)
    scheduler = FakeScheduler()
    next_batch(sync_source(config, lambda *_: 0.0, scheduler, examples=same), 1)
    assert len({r.hash for r in scheduler.requests}) == 6
    # Nor does one that comes again when its equal group was put aside.
    config = fields(rollout__dynamic_sampling=True, rollout__max_rounds=2)
    next_batch(sync_source(config, lambda *_: 0.0, scheduler, examples=same), 2)
    assert len({r.hash for r in scheduler.requests}) == 6 + 2 * 6


def test_equal_groups_are_replaced_by_fresh_prompts():
    """Groups 0, 1 and 3 are all equal: rounds give (0 1), (2 3), (4 5), and 2 and 4 are kept."""
    spread = {2, 4, 5}
    reward = lambda text, example: float(text) if int(example["id"]) in spread else 1.0
    scheduler = FakeScheduler()
    config = fields(rollout__dynamic_sampling=True)
    samples, values = next_batch(sync_source(config, reward, scheduler), 3)
    assert [s.example["id"] for s in samples] == ["2"] * 3 + ["4"] * 3
    assert [s.group for s in samples] == [0] * 3 + [1] * 3
    assert len({r.hash for r in scheduler.requests}) == 18
    assert values["rollout/discarded_groups"] == 4  # 0, 1, 3, and 5, which was one too many


def test_a_group_without_two_different_known_rewards_is_replaced():
    """Answers are "0", "1", "2": groups 0 and 1 have one or equal known rewards; 2 has 1 and 2."""
    nan = math.nan
    known = {"0": (nan, nan, 5.0), "1": (1.0, nan, 1.0), "2": (nan, 1.0, 2.0), "3": (nan, nan, nan)}
    reward = lambda text, example: known.get(example["id"], (0.0, 1.0, nan))[int(text)]
    samples, values = next_batch(sync_source(fields(rollout__dynamic_sampling=True), reward), 3)
    assert [s.example["id"] for s in samples] == ["2"] * 3 + ["4"] * 3
    assert math.isnan(samples[0].reward) and math.isnan(samples[0].score)
    assert values["rollout/discarded_groups"] == 4


def test_equal_groups_are_kept_when_the_rounds_are_used_up():
    config = fields(rollout__dynamic_sampling=True, rollout__max_rounds=2)
    reward = lambda text, example: float(text) if example["id"] == "3" else 1.0
    samples, _ = next_batch(sync_source(config, reward), 1)
    assert [s.example["id"] for s in samples] == ["3"] * 3 + ["0"] * 3  # a full batch either way


    # Without dynamic sampling there is one round.
    samples, _ = next_batch(sync_source(fields(), lambda *_: 1.0), 1)
    assert [s.example["id"] for s in samples] == ["0"] * 3 + ["1"] * 3


def test_a_group_of_equal_rewards_grows_before_it_is_replaced():
    """Prompt 0 has its first other reward among its seventh to ninth answers; 1 has none among nine. The
    batch of 12 has the nine answers of 0 and three of 2, and no room for the six of 3."""
    calls = collections.Counter()

    def reward(text, example):
        calls[example["id"]] += 1
        last = {"0": 7, "2": 3, "3": 5}.get(example["id"], 99)
        return float(calls[example["id"]] == last)

    config = fields(rollout__dynamic_sampling=True, rollout__extend_equal=3)
    config.rollout.prompts = 4
    scheduler = FakeScheduler()
    samples, values = next_batch(sync_source(config, reward, scheduler), 1)
    assert [s.example["id"] for s in samples] == ["0"] * 9 + ["2"] * 3
    assert [s.group for s in samples] == [0] * 9 + [1] * 3
    assert calls == {"0": 9, "1": 9, "2": 3, "3": 6}
    assert len({r.hash for r in scheduler.requests}) == 27  # all with noise of their own
    assert values["rollout/discarded_groups"] == 2 and values["rollout/extended_groups"] == 1
    # The last round: groups that do not fit are cut, those with different rewards first.
    calls.clear()
    config.rollout.max_rounds, config.rollout.prompts = 1, 2
    samples, _ = next_batch(sync_source(config, reward), 1)
    assert [s.example["id"] for s in samples] == ["0"] * 3 + ["1"] * 3
    # A reward that fails is no reason for more answers.
    scheduler = FakeScheduler()
    next_batch(sync_source(config, lambda text, example: math.nan if text == "1" else 0.0, scheduler), 1)
    assert len(scheduler.requests) == 6


# Sleep


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_a_sampler_sleeps_after_the_last_round_of_a_batch():
    class Sleeping(FakeScheduler):
        slept_after = ()  # so many requests

        def sleep(self):
            assert not self.pending
            self.slept_after += (len(self.requests),)

    config = fields(rollout__dynamic_sampling=True)
    reward = lambda text, example: float(text) if int(example["id"]) > 1 else 1.0
    for sleeps, slept_after in ((True, (12, 18)), (False, ())):
        scheduler = Sleeping()
        source = sync_source(config, reward, scheduler, sleeps=sleeps)
        for step in (1, 2):  # of two rounds and one, each of two prompts with three samples
            assert len(next_batch(source, step)[0]) == 6
        assert scheduler.slept_after == slept_after


@pytest.mark.all
@pytest.mark.compiles
def test_a_sampler_that_sleeps_frees_its_weights_and_pages_and_samples_the_same(monkeypatch):
    """Two batches under two versions. The freed bytes are those of weights and decode state."""
    setup = tiny.setup(rollout__prompts=2)
    config, params = setup.config, initial_params(setup.training)
    versions = [params, jax.tree.map(lambda x: x + 0.05, params)]
    freed, held = [], []

    def sleep(scheduler, _sleep=Scheduler.sleep):
        parts = scheduler._runner.params, scheduler._runner.state
        held.append(sum(x.nbytes for x in jax.tree.leaves(parts)))
        del parts
        before = live_bytes()
        _sleep(scheduler)
        freed.append(before - live_bytes())

    monkeypatch.setattr(Scheduler, "sleep", sleep)

    def sampled(sleeps):
        groups = Groups(config, Prompter(setup.tokenizer, config.task), FakeRewards(lambda *_: 1.0), False)
        parts = SourceParts(
            config, schedules.sync(), None, groups, Batches(batches()), Timer(), setup.serving_params
        )
        source = SyncSource(parts, functools.partial(setup.scheduler, setup.engine), sleeps)
        tokens, logps = [], []
        for step, version in enumerate(versions):
            source.publish(version, step)
            for sample in next_batch(source, step)[0]:
                tokens.append(sample.trajectory.tokens.tolist())
                logps.append(sample.trajectory.logp_behav.tolist())
        digest = source.sync_digest()
        source.close(True)
        return tokens, logps, str(digest)

    awake = sampled(False)
    assert not freed and sampled(True) == awake
    assert len(freed) == 2 and freed == held and min(held) > 0
