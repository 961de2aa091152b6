import json

import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.serve.request import Limits, UnknownModel, parse

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")
LIMITS = Limits(
    body_bytes=10_000, prompt_tokens=8, max_tokens=20, choices=3, logprobs=2, seconds=5.0
)
HI = [{"role": "user", "content": "hi"}]


def of(body, is_chat=False):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(body, is_chat, "m", 23, TOKENIZER, LIMITS)


def test_what_is_absent_or_null_has_its_default():
    for extra in ({}, {"n": None, "stop": None, "temperature": None, "max_tokens": None}):
        c = of({"prompt": "ab"} | extra)
        (choice,) = c.choices
        assert choice.sampling == SamplingParams(stop_ids=(2,), max_tokens=20)
        assert choice.prompt.tolist() == [1, 3, 4] and choice.prompt.dtype.name == "int32"
        assert not c.is_streamed and c.logprobs is None


def test_a_prompt_may_be_as_long_as_the_limit():
    assert len(of({"prompt": "abcdefg"}).prompt) == LIMITS.prompt_tokens


def test_every_field_arrives():
    c = of({
        "model": "m", "user": "u", "prompt": [3, 0, 22], "stream": True, "n": 2, "seed": 7,
        "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
        "stop": ["ab", "c"], "logit_bias": {"5": -100, "6": 1.5}, "presence_penalty": 1,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "logprobs": 2, "min_tokens": 4,
        "prompt_logprobs": 0,
    })
    assert c.choices[0].sampling == c.choices[1].sampling == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop_ids=(2,), stop_strings=("ab", "c"),
        max_tokens=4, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=0.25,
        logit_bias=((5, -100.0), (6, 1.5)), min_tokens=4, prompt_logprobs=True,
    )
    assert c.prompt.tolist() == [3, 0, 22] and c.seed == 7 and c.is_streamed and c.logprobs == 2


@pytest.mark.parametrize("extra", [
    {"echo": False}, {"suffix": None}, {"best_of": 1}, {"n": 2, "best_of": 2}, {"best_of": None},
    {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}},
])
def test_what_changes_nothing_is_taken(extra):
    plain, same = of({"prompt": "ab"}), of({"prompt": "ab"} | extra)
    assert same.choices[0].sampling == plain.choices[0].sampling and not same.includes_usage


def test_the_end_of_a_text_is_ignored_where_asked():
    assert of({"prompt": "ab", "ignore_eos": True}).choices[0].sampling.stop_ids == ()


def test_the_two_names_of_max_tokens_in_a_chat():
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3},
                   {"max_tokens": 3, "max_completion_tokens": 3}):
        c = of({"messages": HI} | fields, is_chat=True)
        assert c.choices[0].sampling.max_tokens == 3


def test_the_noise_is_of_the_seed_and_the_index_alone():
    first, second = (of({"prompt": "a", "n": 3, "seed": 1}) for _ in range(2))
    assert [c.hash for c in first.choices] == [c.hash for c in second.choices] == [0, 1, 2]
    assert not {c.id for c in first.choices} & {c.id for c in second.choices}
    assert of({"prompt": "a"}).seed != of({"prompt": "a"}).seed


def test_chat():
    c = of({"messages": HI, "logprobs": True, "top_logprobs": 1}, is_chat=True)
    assert c.prompt.tolist() == TOKENIZER.encode("hi") and c.logprobs == 1 and c.is_chat
    assert of({"messages": HI, "logprobs": True}, is_chat=True).logprobs == 0
    assert of({"messages": HI}, is_chat=True).logprobs is None


@pytest.mark.parametrize("body, words", [
    (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[1]", "not a JSON object"),
    (b"[" * 100_000, "not JSON"), (b'{"prompt": "a", "top_p": NaN}', "NaN is no number"),
    (b'{"prompt": "\\ud800"}', "surrogates"),
    ({}, "prompt must be"), ({"prompt": {}}, "prompt is a dict"), ({"prompt": ["a"]}, "token ids"),
    ({"prompt": [True]}, "token ids"), ({"prompt": []}, "0 prompt tokens; give 1 to 8"),
    ({"prompt": "abcdefgh"}, "9 prompt tokens; give 1 to 8"), ({"prompt": "A"}, "alphabet"),
    ({"prompt": [23]}, "0 to 22"), ({"prompt": [-1]}, "0 to 22"),
    ({"prompt": "a", "logit_bias_": {}}, "unknown field 'logit_bias_'"),
    ({"prompt": "a", "max_completion_tokens": 2}, "unknown field 'max_completion_tokens'"),
    ({"prompt": "a", "echo": True}, "echo is True"), ({"prompt": "a", "echo": 0}, "echo is a int"),
    ({"prompt": "a", "suffix": ""}, "suffix is ''"),
    ({"prompt": "a", "best_of": 3, "n": 2}, "best_of is 3"),
    ({"prompt": "a", "best_of": 0}, "best_of is 0"),
    ({"prompt": "a", "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options is"),
    ({"prompt": "a", "n": 0}, "n is 0; give 1 to 3"), ({"prompt": "a", "n": 4}, "n is 4"),
    ({"prompt": "a", "n": True}, "n is a bool"), ({"prompt": "a", "n": 1.0}, "n is a float"),
    ({"prompt": "a", "seed": 2**32}, "seed is"), ({"prompt": "a", "seed": -1}, "seed is"),
    ({"prompt": "a", "max_tokens": 21}, "max_tokens is 21; give 1 to 20"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "min_tokens": 4, "max_tokens": 3}, "min_tokens=4 must be an integer from 0"),
    ({"prompt": "a", "min_tokens": 21}, "max_tokens=20"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens=-1"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is a int"),
    ({"prompt": "a", "prompt_logprobs": 2}, "prompt_logprobs is 2"),
    ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs is a bool"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1"),
    ({"prompt": "a", "temperature": "hot"}, "temperature is a str"),
    ({"prompt": "a", "top_k": 10**30}, "top_k is"), ({"prompt": "a", "top_p": 0}, "top_p=0"),
    ({"prompt": "a", "min_p": 1}, "min_p=1"),
    ({"prompt": "a", "presence_penalty": 1e300}, "presence_penalty is"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty=0"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias has 'x'"),
    ({"prompt": "a", "logit_bias": {"1": 1e9}}, "logit_bias has '1'"),
    ({"prompt": "a", "logit_bias": {"1": True}}, "logit_bias has '1'"),
    ({"prompt": "a", "stop": [""]}, "stop must be"), ({"prompt": "a", "stop": ["x"] * 5}, "stop"),
    ({"prompt": "a", "stop": "x" * 257}, "stop must be"), ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "logprobs": 3}, "give 0 to 2"), ({"prompt": "a", "logprobs": -1}, "give 0"),
])
def test_what_is_wrong_is_said(body, words):
    with pytest.raises(ValueError) as error:
        of(body)
    assert words in str(error.value)
    str(error.value).encode()


@pytest.mark.parametrize("body, words", [
    ({}, "messages must be"), ({"messages": []}, "messages must be"),
    ({"messages": [{"role": "user"}]}, "messages must be"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages must be"),
    ({"messages": ["hi"]}, "messages must be"),
    ({"messages": HI, "top_logprobs": 1}, "needs logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 3}, "give 0 to 2"),
    ({"messages": HI, "prompt": "a"}, "unknown field 'prompt'"),
    ({"messages": HI, "max_completion_tokens": 21}, "max_completion_tokens is 21; give 1 to 20"),
    ({"messages": HI, "max_completion_tokens": 2, "max_tokens": 3}, "give one"),
])
def test_what_is_wrong_with_a_chat_is_said(body, words):
    with pytest.raises(ValueError, match=words):
        of(body, is_chat=True)


def test_another_model():
    with pytest.raises(UnknownModel, match="'other' is not here; this one is 'm'"):
        of({"prompt": "a", "model": "other"})
