"""Sampling parameters, rewarded samples."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl_tis.data.rewards import Scored
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.rollouts.groups import (
    components, draft_metrics, kept_metrics, reroute_metrics, sampling_params, unknown_ids,
)
from jaxrl_tis.rollouts.source import next_batch
from tests.rollouts.synchronous_test import TOKENIZER, FakeScheduler, fields, sync_source


def test_sampling_parameters():
    config = fields(rollout__top_k=5, rollout__top_p=0.9, rollout__min_p=0.1,
                    rollout__temperature=0.7)
    filtered = sampling_params(config, TOKENIZER, 0.7, is_filtered=True)
    assert filtered == SamplingParams(0.7, 5, 0.9, 0.1, stop_ids=(2,), max_tokens=3)
    plain = sampling_params(config, TOKENIZER, 0.0, is_filtered=False)
    assert plain == SamplingParams(0.0, 0, 1.0, 0.0, stop_ids=(2,), max_tokens=3)


def test_a_greedy_answer_is_the_baseline_of_its_group_and_no_sample():
    config = fields(rollout__top_k=5, rollout__temperature=0.7)
    source = sync_source(config, lambda text, _: float(text), with_greedy=True)
    requests = source._groups.requests({"prompt": "1+1=", "id": "0"}, "a group", 0, redundant=1)
    assert [r.sampling.temperature for r in requests] == [0.7, 0.7, 0.7, 0.0, 0.7]
    assert [r.sampling.top_k for r in requests] == [5, 5, 5, 0, 5]
    mixed = fields(rollout__teacher="t", rollout__alpha="linear(start=0.4, steps=8, difficulty=reward)")
    taught = sync_source(mixed, lambda text, _: float(text) / 2, with_greedy=True)
    example = {"prompt": "1+1=", "id": "0"}
    alphas = lambda step: [r.sampling.alpha for r in taught._groups.requests(example, "g", step, redundant=1)]
    assert alphas(6) == pytest.approx([0.1, 0.1, 0.1, 0, 0.1]) and alphas(8) == [0] * 5
    taught._groups.learned(taught._groups.samples([example] * 2, [
        FakeScheduler()._trajectory(Request(f"{i}", np.array([3]), 0, SamplingParams())) for i in range(2)
    ]))
    before = taught._groups.get_state()
    assert before == {"0": [pytest.approx(0.25)]} and alphas(6)[0] == pytest.approx(0.075)
    samples, _ = next_batch(source, 1)
    assert [s.reward for s in samples] == [0, 1, 2] * 2
    assert [s.greedy_reward for s in samples] == [3] * 6


def test_ids_that_the_tokenizer_lacks_are_counted():
    request = Request("3", np.array([3]), 0, SamplingParams())
    drawn = lambda *ids: dataclasses.replace(
        FakeScheduler()._trajectory(request), tokens=np.array(ids, np.int32)
    )
    size = TOKENIZER.vocab_size
    found = unknown_ids([drawn(3, size, 2), drawn(size + 40, size - 1), drawn()], TOKENIZER)
    assert found == {"rollout/unknown_ids": 2.0}
    assert unknown_ids([drawn()], TOKENIZER) == {"rollout/unknown_ids": 0.0}


def test_the_mass_that_sets_too_wide_to_record_have_dropped():
    # Two draws: a set of one token that kept 0.9 of the mass, and one too wide that kept 0.6.
    request = Request("3", np.array([3]), 0, SamplingParams())
    drawn = dataclasses.replace(
        FakeScheduler()._trajectory(request), tokens=np.array([3, 4], np.int32),
        kept=np.array([[3, -1], [-1, -1]], np.int32),
        logp_raw=np.log([0.9, 0.6]), logp_behav=np.zeros(2), mask=np.ones(2, bool),
    )
    found = kept_metrics([drawn])
    assert found == {"rollout/kept_overflow": 0.5,
                     "rollout/kept_overflow_mass": pytest.approx(0.4 / 2)}


def test_what_records_say_of_routes_and_drafts():
    """Of 8 + 4 choices made again, 1 + 2 chose another set; a sample without routes adds none. Drafts are
    of lags 0, 0, 3, 2, 1, 4: of the two from 2 to 3 the first is accepted."""
    plain = FakeScheduler()._trajectory(Request("3", np.array([3]), 0, SamplingParams()))
    routed = [
        dataclasses.replace(plain, rerouted=np.array(counts, np.int32)) for counts in ((8, 1), (4, 2))
    ]
    assert reroute_metrics([*routed, plain]) == {"moe/reroute_rate": 0.25}
    assert reroute_metrics([plain]) == {}
    ints = lambda *values: np.array(values, np.int32)
    of = lambda version, drafter, *accepted: dataclasses.replace(
        plain, tokens=version, version=version, drafter_version=drafter, accepted=np.array(accepted, bool)
    )
    drafted = [
        of(ints(5, 5, 6), ints(5, 5, 3), True, False, True), of(ints(6, 7, 7, 8), ints(4, 6, 3, -1), 0, 1, 0, 0)
    ]
    assert draft_metrics([*drafted, of(ints(9), ints())]) == {
        "rollout/drafter_lag": 10 / 6, "rollout/draft_acceptance_lag_0": 0.5,
        "rollout/draft_acceptance_lag_1": 1.0, "rollout/draft_acceptance_lag_2": 0.5,
        "rollout/draft_acceptance_lag_4": 0.0,
    }
    assert draft_metrics([of(ints(9), ints())]) == {}


def test_overlong_penalty_counts_tokens_and_leaves_the_score():
    """Every text has 1 token; with max_new_tokens 3 and a buffer of 3 the penalty is -1/3."""
    config = fields(rollout__overlong_buffer=3)
    samples, _ = next_batch(sync_source(config, lambda text, _: float(text)), 1)
    assert [s.score for s in samples[:3]] == [0, 1, 2]
    np.testing.assert_allclose([s.reward for s in samples[:3]], [-1 / 3, 2 / 3, 5 / 3])


def test_a_sample_has_what_its_reward_says():
    """The penalty of 1 token of 3 with a buffer of 3 is -1/3; a reward that is none stays none."""
    c = sync_source(fields(rollout__overlong_buffer=3), lambda text, example: 1.0)
    given, tokens = [Scored(0.5, {"score": 0.5, "acc": 1.0}),
                     Scored(math.nan, {"score": math.nan, "acc": math.nan}, is_failed=True)], []

    def results(texts, examples, of_texts):
        tokens.extend(of_texts)
        return [given[i % 2] for i in range(len(texts))]

    c._groups._rewards.results = results
    [scored, failed, *rest], _ = next_batch(c, 1)
    assert scored.score == 0.5 and scored.reward == pytest.approx(0.5 - 1 / 3)
    assert scored.components == {"score": 0.5, "acc": 1.0, "overlong": pytest.approx(-1 / 3)}
    assert not scored.is_failed and failed.is_failed
    assert math.isnan(failed.score) and math.isnan(failed.reward)
    assert math.isnan(failed.components["acc"])
    for sample, ids in zip([scored, failed, *rest], tokens, strict=True):
        np.testing.assert_array_equal(sample.trajectory.tokens, ids)


def test_a_failed_sample_stays_in_its_group():
    """Two groups of three, a sample of the first without a reward: no sample changes its group."""
    groups = sync_source(fields(), lambda text, example: 0.0)._groups
    examples = [{"prompt": "1+1=", "id": "a"}, {"prompt": "1+2=", "id": "b"}]
    trajectories = [
        FakeScheduler()._trajectory(request)
        for example in examples for request in groups.requests(example, example["id"], 0)
    ]
    scored = [Scored(float(i), {}) for i in range(len(trajectories))]
    scored[1] = Scored(math.nan, {}, is_failed=True)
    groups._rewards.results = lambda texts, examples, tokens: scored
    first, second = groups.rewarded(examples, trajectories)
    np.testing.assert_array_equal([s.score for s in first], [0, math.nan, 2])
    assert [s.score for s in second] == [3, 4, 5]
    assert [s.example["id"] for s in first + second] == ["a"] * 3 + ["b"] * 3


def test_components_of_a_reward_that_failed_and_a_name_that_is_taken():
    c = sync_source(fields(rollout__overlong_buffer=2), lambda text, example: 1.0)
    samples, _ = next_batch(c, 1)
    assert all(s.reward == sum(s.components.values()) for s in samples)
    found = components(samples)
    assert set(found) == {"reward", "overlong"} and found["reward"].tolist() == [1.0] * 6
    mixed = [dataclasses.replace(samples[0], components={"a": 2.0, "b": 1.0}),
             dataclasses.replace(samples[1], components={"reward": -1.0})]
    found, nan = components(mixed), float("nan")
    for name, x in {"a": [2.0, nan], "b": [1.0, nan], "reward": [nan, -1.0]}.items():
        np.testing.assert_array_equal(found[name], x)
    parts = Scored(1.0, {"overlong": 1.0})
    c._groups._rewards.results = lambda texts, examples, tokens: [parts] * len(texts)
    with pytest.raises(ValueError, match="component 'overlong'"):
        next_batch(c, 2)
