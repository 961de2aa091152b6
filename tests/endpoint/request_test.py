import dataclasses
import json

import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint.request import Limits, UnknownModel, parse
from jaxrl_tis.engine.records import SamplingParams

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")
LIMITS = Limits(
    body_bytes=10_000, context_tokens=28, max_tokens=20, choices=3, logprobs=2, seconds=5.0
)
HI = [{"role": "user", "content": "hi"}]


def of(body, is_chat=False):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(body, "m", 23, TOKENIZER, LIMITS, is_chat=is_chat)


def test_what_is_absent_or_null_has_its_default():
    for extra in ({}, {"n": None, "stop": None, "temperature": None, "max_tokens": None}):
        c = of({"prompt": "ab"} | extra)
        (choice,) = c.choices
        assert len(c.prompts) == 1 and choice.sampling == SamplingParams(stop_ids=(2,), max_tokens=20)
        assert choice.prompt.tolist() == [1, 3, 4] and choice.prompt.dtype.name == "int32"
        assert not c.is_streamed and c.logprobs is None


def test_a_prompt_may_be_as_long_as_the_limit():
    c = of({"prompt": "a" * 26})  # and the start token
    assert len(c.prompts[0]) == 27 and c.choices[0].sampling.max_tokens == 1


def test_an_answer_ends_where_the_context_does():
    limits = dataclasses.replace(LIMITS, choices=4)
    body = json.dumps({"prompt": [[3] * 9, [3] * 20], "n": 2, "max_tokens": 10}).encode()
    c = parse(body, "m", 23, TOKENIZER, limits, is_chat=False)
    assert [choice.sampling.max_tokens for choice in c.choices] == [10, 10, 8, 8]
    with pytest.raises(ValueError, match="min_tokens=9 must be an integer from 0 to max_tokens=8"):
        of({"prompt": [3] * 20, "min_tokens": 9})


def test_every_field_arrives():
    c = of({
        "model": "m", "user": "u", "prompt": [3, 0, 22], "stream": True, "n": 2, "seed": 7,
        "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
        "stop": ["ab", "c"], "logit_bias": {"5": -100, "6": 1.5}, "presence_penalty": 1,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "logprobs": 2, "min_tokens": 4,
        "prompt_logprobs": 0, "stop_token_ids": [9], "return_token_ids": True,
    })
    assert c.choices[0].sampling == c.choices[1].sampling == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop_ids=(2, 9), stop_strings=("ab", "c"),
        max_tokens=4, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=0.25,
        logit_bias=((5, -100.0), (6, 1.5)), min_tokens=4, prompt_logprobs=True,
    )
    assert c.prompts[0].tolist() == [3, 0, 22] and c.seed == 7 and c.is_streamed and c.logprobs == 2
    assert c.returns_ids and not of({"prompt": "a"}).returns_ids


@pytest.mark.parametrize("extra", [
    {"echo": False}, {"suffix": None}, {"suffix": ""}, {"best_of": 1}, {"n": 2, "best_of": 2},
    {"best_of": None}, {"stream_options": None}, {"stream_options": {}},
    {"stream_options": {"include_usage": False}}, {"stream_options": {"include_obfuscation": True}},
    {"stream_options": {"include_usage": None}}, {"stream_options": {"continuous_usage_stats": False}},
    {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"},
    {"functions": []}, {"function_call": "auto"}, {"response_format": {"type": "text"}},
    {"modalities": ["text"]}, {"audio": None}, {"reasoning_effort": "none"}, {"verbosity": "medium"},
    {"top_k": -1}, {"top_k": 0}, {"top_k": None}, {"temperature": 1}, {"presence_penalty": 0},
    {"seed": None}, {"seed": -1}, {"logit_bias": None}, {"logit_bias": {}}, {"stop": []},
    {"stop": None}, {"logprobs": None}, {"prompt_logprobs": None}, {"stop_token_ids": []},
    {"user": "u"}, {"metadata": {"run": "7"}}, {"store": True}, {"service_tier": "flex"},
    {"parallel_tool_calls": True}, {"safety_identifier": "x"}, {"prompt_cache_key": "x"},
    {"request_id": "r"}, {"priority": 3}, {"use_beam_search": False}, {"length_penalty": 1.0},
    {"skip_special_tokens": True}, {"include_stop_str_in_output": False}, {"bad_words": []},
    {"truncate_prompt_tokens": None}, {"structured_outputs": None}, {"temprature": None},
])
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_changes_nothing_is_taken(is_chat, extra):
    if is_chat and extra.keys() & {"best_of"}:
        extra = {}
    body = {"messages": HI} if is_chat else {"prompt": "ab"}
    plain, same = of(body, is_chat), of(body | extra, is_chat)
    assert same.choices[0].sampling == plain.choices[0].sampling and not same.includes_usage
    assert same.logprobs is None and [p.tolist() for p in same.prompts] == [plain.prompts[0].tolist()]


@pytest.mark.parametrize("extra", [
    {"add_generation_prompt": True}, {"continue_final_message": False}, {"chat_template": None},
    {"add_special_tokens": False}, {"chat_template_kwargs": {}}, {"documents": []},
    {"top_logprobs": None}, {"top_logprobs": 0}, {"logprobs": False}, {"max_completion_tokens": None},
])
def test_what_changes_nothing_in_a_chat_is_taken(extra):
    plain, same = of({"messages": HI}, True), of({"messages": HI} | extra, True)
    assert same.choices[0].sampling == plain.choices[0].sampling and same.logprobs is None


def test_special_tokens_are_added_to_a_text_and_not_to_a_chat():
    assert of({"prompt": "a", "add_special_tokens": True}).prompts[0].tolist() == [1, 3]
    for body, is_chat in (({"prompt": "a"}, False), ({"messages": HI}, True)):
        with pytest.raises(ValueError, match="add_special_tokens is"):
            of(body | {"add_special_tokens": is_chat}, is_chat)


def test_numbers_as_clients_write_them():
    c = of({"prompt": "a", "max_tokens": 4.0, "n": 2.0, "top_k": 10**6, "stop_token_ids": [5, 2]})
    assert len(c.choices) == 2 and c.choices[0].sampling == SamplingParams(
        max_tokens=4, top_k=23, stop_ids=(2, 5))  # of 23 tokens, all
    assert of({"prompt": "a", "ignore_eos": True, "stop_token_ids": [5]}).choices[0].sampling.stop_ids == (5,)


def test_seeds_of_64_bits_are_folded():
    seed = lambda given: of({"prompt": "a", "seed": given}).seed
    assert seed(2**32 - 1) == 2**32 - 1 and seed(2**32 + 5) == 5 and seed(-2) == 2**32 - 2
    assert len({seed(-1) for _ in range(4)}) == 4, "-1 is no seed"


@pytest.mark.parametrize("prompt, ids", [
    (["a", "b"], [[1, 3], [1, 4]]), (["a"], [[1, 3]]), ([[3, 4], [5]], [[3, 4], [5]]),
    ([[3, 4]], [[3, 4]]), (["a", [5]], [[1, 3], [5]]),
])
def test_a_list_of_prompts(prompt, ids):
    c = of({"prompt": prompt})
    assert [p.tolist() for p in c.prompts] == ids == [c.prompt.tolist() for c in c.choices]


def test_the_choices_of_a_list_are_those_of_its_first_prompt_and_then_of_the_next():
    limits = dataclasses.replace(LIMITS, choices=6)
    body = json.dumps({"prompt": ["a", "b"], "n": 3, "seed": 1}).encode()
    c = parse(body, "m", 23, TOKENIZER, limits, is_chat=False)
    assert [choice.prompt.tolist() for choice in c.choices] == [[1, 3]] * 3 + [[1, 4]] * 3
    assert [choice.hash for choice in c.choices] == list(range(6)) and len(c.prompts) == 2
    assert len({choice.id for choice in c.choices}) == 6


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
    assert c.prompts[0].tolist() == TOKENIZER.encode("hi") and c.logprobs == 1 and c.is_chat
    assert of({"messages": HI, "logprobs": True}, is_chat=True).logprobs == 0
    assert of({"messages": HI}, is_chat=True).logprobs is None


@pytest.mark.parametrize("body, words", [
    (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[1]", "not a JSON object"),
    (b"[" * 100_000, "not JSON"), (b'{"prompt": "a", "top_p": NaN}', "NaN is not a number"),
    (b'{"prompt": "\\ud800"}', "surrogates"),
    ({}, "prompt must be"), ({"prompt": {}}, "prompt is a dict"), ({"prompt": ["a", 3]}, "token ids"),
    ({"prompt": [[]]}, "0 prompt tokens"), ({"prompt": ["a", []]}, "prompt 1: 0 prompt tokens"),
    ({"prompt": ["a", "A"]}, "alphabet"), ({"prompt": [[3], [23]]}, "prompt 1: the prompt has tokens"),
    ({"prompt": ["a", None]}, "token ids"), ({"prompt": [[[3]]]}, "token ids"),
    ({"prompt": [10**30]}, "0 to 22"),
    ({"prompt": ["a"] * 2, "n": 2}, "2 prompts with 2 choices each; give at most 3 choices in all"),
    ({"prompt": "a", "tools": [{"type": "function"}]}, "tools is [{'type': 'function'}], which is not"),
    ({"prompt": "a", "tool_choice": "required"}, 'leave it out, or give "none" or "auto"'),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format is"),
    ({"prompt": "a", "modalities": ["audio"]}, "modalities is"), ({"prompt": "a", "audio": {}}, "audio is"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search is True"),
    ({"prompt": "a", "length_penalty": 2}, "length_penalty is 2"),
    ({"prompt": "a", "bad_words": ["b"]}, "bad_words is"),
    ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs is"),
    ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids is ['a']; give a list of token ids"),
    ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'"),
    ({"prompt": [True]}, "token ids"), ({"prompt": []}, "0 prompt tokens; give 1 to 27"),
    ({"prompt": "a" * 27}, "28 prompt tokens; give 1 to 27, one less than max_model_len"),
    ({"prompt": "A"}, "alphabet"), ({"prompt": "a", "return_token_ids": 1}, "return_token_ids is a int"),
    ({"prompt": [23]}, "0 to 22"), ({"prompt": [-1]}, "0 to 22"),
    ({"prompt": "a", "logit_bias_": {}}, "unknown field 'logit_bias_'"),
    ({"prompt": "a", "max_completion_tokens": 2}, "unknown field 'max_completion_tokens'"),
    ({"prompt": "a", "echo": True}, "echo is True"), ({"prompt": "a", "echo": 0}, "echo is 0"),
    ({"prompt": "a", "suffix": "b"}, "suffix is 'b'"),
    ({"prompt": "a", "best_of": 3, "n": 2}, "best_of is 3"),
    ({"prompt": "a", "best_of": 0}, "best_of is 0"),
    ({"prompt": "a", "stream_options": {"continuous_usage_stats": True}}, "stream_options is"),
    ({"prompt": "a", "stream_options": {"include": True}}, "stream_options is"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options is"),
    ({"prompt": "a", "n": 0}, "n is 0; give 1 to 3"), ({"prompt": "a", "n": 4}, "n is 4"),
    ({"prompt": "a", "n": True}, "n is a bool"), ({"prompt": "a", "n": 1.5}, "n is a float"),
    ({"prompt": "a", "seed": 2**63}, "seed is"), ({"prompt": "a", "seed": -(2**63) - 1}, "seed is"),
    ({"prompt": "a", "top_k": -2}, "top_k is -2; give -1"),
    ({"prompt": "a", "max_tokens": 21}, "max_tokens is 21; give 1 to 20"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "min_tokens": 4, "max_tokens": 3}, "min_tokens=4 must be an integer from 0"),
    ({"prompt": "a", "min_tokens": 21}, "max_tokens=20"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens=-1"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is a int"),
    ({"prompt": "a", "prompt_logprobs": 2}, "prompt_logprobs is 2"),
    ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs is True"),
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
    ({"messages": HI, "chat_template_kwargs": {"a": 1}}, "--config.task.template_kwargs at the server"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message is True"),
    ({"messages": HI, "best_of": 1}, "unknown field 'best_of'"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages must be"),
    ({"messages": ["hi"]}, "messages must be"),
    ({"messages": HI, "top_logprobs": 1}, "needs logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 3}, "give 0 to 2"),
    ({"messages": HI, "prompt": "a"}, "unknown field 'prompt'"),
    ({"messages": HI, "max_completion_tokens": 21}, "max_completion_tokens is 21; give 1 to 20"),
    ({"messages": HI, "max_completion_tokens": 2, "max_tokens": 3}, "give one"),
    ({"messages": HI, "tools": {}}, "tools is a dict; it must be list"),
    ({"messages": HI, "tools": [{"type": "function"}]}, r"tools\[0\] is .*; give .*'parameters'"),
    ({"messages": HI, "tools": [{"function": {"name": "f"}}]}, "no chat template, and nothing reads"),
    ({"messages": HI, "tool_choice": "required"}, 'give "none" or "auto"'),
])
def test_what_is_wrong_with_a_chat_is_said(body, words):
    with pytest.raises(ValueError, match=words):
        of(body, is_chat=True)


def test_another_model():
    with pytest.raises(UnknownModel, match="'other' is not served; use 'm'"):
        of({"prompt": "a", "model": "other"})
