import json

import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint.request import Limits, UnknownModel
from jaxrl_tis.endpoint.tokenization import detokenize, tokenize
from tests.endpoint.app_test import ask

TOKENIZER = CharTokenizer("abcd")
LIMITS = Limits(
    body_bytes=10_000, context_tokens=28, max_tokens=20, choices=3, logprobs=2, seconds=5.0
)
USER = {"role": "user", "content": "ab"}


class Chat(CharTokenizer):
    """Each message ends with "d"; tools are "c"; the generation prompt is "dd"."""

    def chat(self, messages, add_generation_prompt=True, tools=None):
        ends = "".join(message["content"] + "d" for message in messages)
        return "c" * len(tools or ()) + ends + "dd" * add_generation_prompt


def ids(body, tokenizer=TOKENIZER):
    return tokenize(json.dumps(body).encode(), "m", tokenizer, LIMITS)


def text(body):
    return detokenize(json.dumps(body).encode(), "m", 7, TOKENIZER)


@pytest.mark.parametrize("body, tokens", [
    ({"prompt": "ab"}, [1, 3, 4]), ({"prompt": "ab", "add_special_tokens": False}, [3, 4]),
    ({"prompt": "ab", "model": "m", "return_token_strs": False}, [1, 3, 4]), ({"prompt": ""}, [1]),
    ({"messages": [USER]}, [3, 4, 6, 6, 6]), ({"messages": [USER], "prompt": None}, [3, 4, 6, 6, 6]),
    ({"messages": [USER], "add_generation_prompt": False}, [3, 4, 6]),
    ({"messages": [USER], "add_special_tokens": True}, [1, 3, 4, 6, 6, 6]),
    ({"messages": [USER, {"role": "tool", "content": "b"}], "tools": [{"function": {"name": "f"}}]},
     [5, 3, 4, 6, 4, 6, 6, 6]),
])
def test_ids_of_a_text_or_a_conversation(body, tokens):
    assert ids(body, Chat("abcd")) == {"tokens": tokens, "count": len(tokens), "max_model_len": 28}


@pytest.mark.parametrize("body, words", [
    ({}, "give a prompt, a text, or messages"), ({"prompt": [3]}, "prompt is a list; it must be str"),
    ({"prompt": "x"}, "alphabet"), ({"messages": []}, "messages must be"),
    ({"messages": [USER], "prompt": "a"}, "unknown field 'prompt'"),
    ({"messages": [USER], "tools": ["f"]}, r"tools\[0\] is 'f'"),
    ({"messages": [USER], "continue_final_message": True}, "continue_final_message is True, which"),
    ({"prompt": "a", "return_token_strs": True}, "return_token_strs is True, which is not served"),
    ({"prompt": "a", "tools": []}, "unknown field 'tools'"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens is a int"),
])
def test_what_is_wrong_is_said(body, words):
    with pytest.raises(ValueError, match=words):
        ids(body)


@pytest.mark.parametrize("tokens, expected", [
    ([1, 3, 4, 2], "<s>ab</s>"), ([], ""), ([0], "<pad>"),
])
def test_text_of_ids_has_special_tokens(tokens, expected):
    assert text({"tokens": tokens}) == {"prompt": expected}


@pytest.mark.parametrize("body, words", [
    ({}, "tokens must be a list of token ids, 0 to 6"), ({"tokens": [7]}, "0 to 6"),
    ({"tokens": [-1]}, "0 to 6"), ({"tokens": [True]}, "0 to 6"), ({"tokens": ["a"]}, "0 to 6"),
    ({"tokens": "a"}, "tokens is a str"), ({"prompt": "a"}, "unknown field 'prompt'"),
])
def test_what_is_wrong_with_ids_is_said(body, words):
    with pytest.raises(ValueError, match=words):
        text(body)


def test_another_model():
    for call, body in ((ids, {"prompt": "a"}), (text, {"tokens": [3]})):
        with pytest.raises(UnknownModel, match="'other' is not served; use 'm'"):
            call(body | {"model": "other"})


def test_the_routes():
    found = ask({"prompt": "ab"}, "/tokenize").json
    assert found == {"tokens": [1, 3, 4], "count": 3, "max_model_len": 30}
    assert ask({"tokens": found["tokens"]}, "/detokenize").json == {"prompt": "<s>ab"}
    for path in ("/tokenize", "/detokenize"):
        assert ask({}, path).status == 400 and ask(None, path).status == 405
        assert ask(b" " * 501, path).status == 413
