"""Prompts, sampling parameters, rewarded samples."""

import dataclasses

import numpy as np
import pytest

from jaxrl_tis import rollouts
from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine.records import Request, SamplingParams
from tests.rollouts.collector_test import TOKENIZER, FakeScheduler, collector, fields, task


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


def test_sampling_parameters():
    config = fields(rollout__top_k=5, rollout__top_p=0.9, rollout__min_p=0.1,
                    rollout__temperature=0.7)
    filtered = rollouts.sampling_params(config, TOKENIZER, 0.7, is_filtered=True)
    assert filtered == SamplingParams(0.7, 5, 0.9, 0.1, stop_ids=(2,), max_tokens=3)
    plain = rollouts.sampling_params(config, TOKENIZER, 0.0, is_filtered=False)
    assert plain == SamplingParams(0.0, 0, 1.0, 0.0, stop_ids=(2,), max_tokens=3)


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
    found, nan = rollouts.components(mixed), float("nan")
    for name, x in {"a": [2.0, nan], "b": [1.0, nan], "reward": [nan, -1.0]}.items():
        np.testing.assert_array_equal(found[name], x)
    c._groups._rewards.components = lambda texts, records: [{"overlong": 1.0}] * len(texts)
    with pytest.raises(ValueError, match="component 'overlong'"):
        c.next(2)
