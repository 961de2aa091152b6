"""Prompts and the collection of rewarded groups, with a sampler made of arithmetic."""

import contextlib
import dataclasses
import itertools
import math

import ml_collections
import numpy as np
import pytest

from jaxrl_tis import rollouts
from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.engine.stats import Stats
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
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0}

    def components(self, texts, records):
        return [{"reward": self._function(text, record)}
                for text, record in zip(texts, records, strict=True)]

    def score(self, texts, records):
        return [parts["reward"] for parts in self.components(texts, records)]


def batches():
    """Endless batches of two prompts: ids 0 1, 2 3, ..."""
    for i in itertools.count(step=2):
        yield [{"prompt": f"{j}+1=", "answer": str(j + 1), "id": str(j)} for j in (i, i + 1)]


def collector(config, reward, scheduler=None, timer=None, examples=None, **options):
    """A collector that has published its first weights to the scheduler."""
    c = rollouts.Collector(
        config, rollouts.Prompter(TOKENIZER, config.task), examples or batches(),
        FakeRewards(reward), timer or Timer(), load=lambda params, version: params,
        start=lambda params, version: scheduler or FakeScheduler(), **options,
    )
    c.publish(None, 0)
    return c


class Timer:
    def __init__(self):
        self.phases = []

    def __call__(self, phase):
        self.phases.append(phase)
        return contextlib.nullcontext()


# Prompts


def test_template_and_start_token():
    ids = rollouts.Prompter(TOKENIZER, task(template="{prompt} 0")).ids(
        {"prompt": "1+2=", "answer": "3", "id": "x"})
    assert TOKENIZER.decode(ids) == "1+2= 0" and ids[0] == TOKENIZER.bos_id
    assert ids.dtype == np.int32


def test_chat_uses_the_template_of_the_tokenizer_and_no_second_start_token():
    class Chat(CharTokenizer):
        def chat(self, messages, add_generation_prompt=True):
            return "+".join(m["role"][0].translate({ord("s"): "0", ord("u"): "1"}) + m["content"]
                            for m in messages)

    tokenizer = Chat("0123456789+= ")
    record = {"prompt": "7", "answer": "", "id": "x"}
    ids = rollouts.Prompter(tokenizer, task(chat=True)).ids(record)
    assert list(ids) == tokenizer.encode("17")
    ids = rollouts.Prompter(tokenizer, task(chat=True, system="9")).ids(record)
    assert list(ids) == tokenizer.encode("09+17")


def test_a_long_prompt_is_refused_by_name_with_both_numbers():
    prompter = rollouts.Prompter(TOKENIZER, task(max_prompt_tokens=4))
    with pytest.raises(ValueError, match="example sum-7: 5 prompt tokens.*max_prompt_tokens is 4"):
        prompter.ids({"prompt": "1+2=", "answer": "3", "id": "sum-7"})


# Sampling


def test_trajectories_come_back_in_the_order_of_the_requests():
    scheduler, ended = FakeScheduler(), []
    sampling = SamplingParams(max_tokens=2)
    requests = [Request(str(i), np.array([1], np.int32), 0, sampling) for i in range(5)]
    out = rollouts.run(scheduler, requests, ended.append)
    assert [t.id for t in out] == ["0", "1", "2", "3", "4"]
    assert ended == [2, 2, 1]


def test_sampling_parameters():
    config = fields(rollout__top_k=5, rollout__top_p=0.9, rollout__min_p=0.1,
                    rollout__temperature=0.7)
    filtered = rollouts.sampling_params(config, TOKENIZER, 0.7, is_filtered=True)
    assert filtered == SamplingParams(0.7, 5, 0.9, 0.1, stop_ids=(2,), max_tokens=3)
    plain = rollouts.sampling_params(config, TOKENIZER, 0.0, is_filtered=False)
    assert plain == SamplingParams(0.0, 0, 1.0, 0.0, stop_ids=(2,), max_tokens=3)


def test_groups_share_a_prompt_and_no_noise():
    scheduler, timer = FakeScheduler(), Timer()
    reward = lambda text, record: float(text) + 10 * int(record["id"])
    c = collector(fields(), reward, scheduler, timer)
    scheduler.stats = Stats(busy=9, slot_steps=99, preempted=2)  # of earlier steps
    samples, values = c.next(1)
    assert [s.group for s in samples] == [0, 0, 0, 1, 1, 1]
    assert [s.record["id"] for s in samples] == ["0", "0", "0", "1", "1", "1"]
    assert [s.text for s in samples] == ["0", "1", "2"] * 2
    assert [s.reward for s in samples] == [0, 1, 2, 10, 11, 12]
    assert values == {"rollout/discarded_groups": 0, "reward/timeouts": 0, "reward/errors": 0,
                      "reward/non_finite": 0,
                      "rollout/occupancy": 0.75, "rollout/preempted": 0,
                      "rollout/shared_prompt_ratio": 0.5, "rollout/cached_prompt_tokens": 6}
    for group in (samples[:3], samples[3:]):
        assert len({s.trajectory.prompt.tobytes() for s in group}) == 1
    c.next(2)
    # One id and one 32-bit hash for every sample of the run.
    for name in ("id", "hash"):
        assert len({getattr(r, name) for r in scheduler.requests}) == 12
    assert timer.phases == ["data", "rollout", "reward"] * 2


def test_a_greedy_answer_per_prompt_where_it_is_asked_for():
    scheduler = FakeScheduler()
    reward = lambda text, record: float(text) + 10 * int(record["id"])
    samples, _ = collector(fields(), reward, scheduler, with_greedy=True).next(1)
    # The fourth request of each prompt is the greedy one; its text is "3".
    assert [s.reward for s in samples] == [0, 1, 2, 10, 11, 12]
    assert [s.greedy_reward for s in samples] == [3, 3, 3, 13, 13, 13]
    temperatures = [r.sampling.temperature for r in scheduler.requests]
    assert temperatures == [fields().rollout.temperature] * 3 + [0] + [
        fields().rollout.temperature] * 3 + [0]
    plain, _ = collector(fields(), lambda text, record: 0.0).next(1)
    assert all(math.isnan(s.greedy_reward) for s in plain)


def test_a_repeated_example_within_a_batch_does_not_repeat_its_noise():
    config = fields()
    same = itertools.repeat([{"prompt": "1+1=", "answer": "2", "id": "7"}] * 2)
    scheduler = FakeScheduler()
    collector(config, lambda *_: 0.0, scheduler, examples=same).next(1)
    assert len({r.hash for r in scheduler.requests}) == 6
    # Nor does one that comes again when its equal group was put aside.
    config = fields(rollout__dynamic_sampling=True, rollout__max_rounds=2)
    collector(config, lambda *_: 0.0, scheduler, examples=same).next(2)
    assert len({r.hash for r in scheduler.requests}) == 6 + 2 * 6


def test_the_mass_that_sets_too_wide_to_record_have_dropped():
    # Two draws: a set of one token that kept 0.9 of the mass, and one too wide that kept 0.6.
    request = Request("3", np.array([3]), 0, SamplingParams())
    drawn = dataclasses.replace(
        FakeScheduler()._trajectory(request), tokens=np.array([3, 4], np.int32),
        kept=np.array([[3, -1], [-1, -1]], np.int32),
        logp_raw=np.log([0.9, 0.6]), logp_behav=np.zeros(2),
    )
    found = rollouts.kept_metrics([drawn])
    assert found == {"rollout/kept_overflow": 0.5,
                     "rollout/kept_overflow_mass": pytest.approx(0.4 / 2)}


# Dynamic sampling


def test_equal_groups_are_replaced_by_fresh_prompts():
    """Groups 0, 1 and 3 are all equal: rounds give (0 1), (2 3), (4 5), and 2 and 4 are kept."""
    spread = {2, 4, 5}
    reward = lambda text, record: float(text) if int(record["id"]) in spread else 1.0
    scheduler = FakeScheduler()
    config = fields(rollout__dynamic_sampling=True)
    samples, values = collector(config, reward, scheduler).next(3)
    assert [s.record["id"] for s in samples] == ["2"] * 3 + ["4"] * 3
    assert [s.group for s in samples] == [0] * 3 + [1] * 3
    assert len({r.hash for r in scheduler.requests}) == 18
    assert values["rollout/discarded_groups"] == 4  # 0, 1, 3, and 5, which was one too many


def test_equal_groups_are_kept_when_the_rounds_are_used_up():
    config = fields(rollout__dynamic_sampling=True, rollout__max_rounds=2)
    reward = lambda text, record: float(text) if record["id"] == "3" else 1.0
    samples, _ = collector(config, reward).next(1)
    assert [s.record["id"] for s in samples] == ["3"] * 3 + ["0"] * 3  # a full batch either way


def test_without_dynamic_sampling_equal_groups_stay():
    samples, _ = collector(fields(), lambda *_: 1.0).next(1)
    assert [s.record["id"] for s in samples] == ["0"] * 3 + ["1"] * 3


def test_overlong_penalty_counts_tokens_and_leaves_the_score():
    """Every text has 1 token; with max_new_tokens 3 and a buffer of 3 the penalty is -1/3."""
    config = fields(rollout__overlong_buffer=3)
    samples, _ = collector(config, lambda text, _: float(text)).next(1)
    assert [s.score for s in samples[:3]] == [0, 1, 2]
    np.testing.assert_allclose([s.reward for s in samples[:3]], [-1 / 3, 2 / 3, 5 / 3])


def test_components_of_a_reward_that_failed_and_a_name_that_is_taken():
    c = collector(fields(rollout__overlong_buffer=2), lambda text, record: 1.0)
    samples, _ = c.next(1)
    assert all(s.reward == sum(s.components.values()) for s in samples)
    found = rollouts.components(samples)
    assert set(found) == {"reward", "overlong"} and found["reward"].tolist() == [1.0] * 6
    mixed = [dataclasses.replace(samples[0], components={"a": 2.0, "b": 1.0}),
             dataclasses.replace(samples[1], components={"reward": -1.0})]
    found = {name: x.tolist() for name, x in rollouts.components(mixed).items()}
    assert found == {"a": [2.0, 0.0], "b": [1.0, 0.0], "reward": [0.0, -1.0]}
    c._rewards.components = lambda texts, records: [{"overlong": 1.0}] * len(texts)
    with pytest.raises(ValueError, match="component 'overlong'"):
        c.next(2)
