import dataclasses
import json

import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint import prompts
from tests.data.tokenizer_test import loaded

pytestmark = pytest.mark.usefixtures("in_threads")

TOKENIZER = CharTokenizer("abcd\n")


def user(content, **others):
    return {"role": "user", "content": content} | others


def calls(*calls, **others):
    return {"role": "assistant", "tool_calls": list(calls)} | others


def called(arguments, **others):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}} | others


def text(*parts):
    return [{"type": "text", "text": part} for part in parts]


@pytest.mark.parametrize("given, read", [
    (user("a"), user("a")), (user(text("a")), user("a")), (user(text("a", "b")), user("a\nb")),
    (user([]), user("")), (user(None), user("")), (user(""), user("")),
    ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
    (user("a", name="ann"), user("a", name="ann")),
    (user("a", reasoning_content="b"), user("a", reasoning_content="b")),
    # What a client sends back of an answer.
    ({"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None,
      "function_call": None, "tool_calls": None}, {"role": "assistant", "content": "a"}),
    ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
    ({"role": "tool", "content": "5", "tool_call_id": "c1"},
     {"role": "tool", "content": "5", "tool_call_id": "c1"}),
    # Arguments are a text on the wire, and an object for templates.
    (calls(called('{"x": [1]}', id="c1")), calls(called({"x": [1]}, id="c1"), content="")),
    (calls(called({"x": 1}), content=None), calls(called({"x": 1}), content="")),
    (calls(called("")), calls(called({}), content="")),
    (calls({"function": {"name": "f"}}), calls({"function": {"name": "f", "arguments": {}}}, content="")),
])
def test_a_message(given, read):
    assert prompts.message("messages[0]", given) == read


@pytest.mark.parametrize("given, words", [
    ("a", r"messages\[3\] is 'a'"), ({"role": "user"}, r"messages\[3\] is {'role': 'user'}"),
    ({"content": "a"}, "messages must be"), (user(1), "the content is a int"),
    ({"role": 1, "content": "a"}, "messages must be"), (user(1.5), "the content is a float"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "a part of type 'image_url'"),
    (user([{"type": "input_audio"}]), "a part of type 'input_audio'"),
    (user([{"type": "text"}]), "a part of type 'text'"), (user([5]), "a part of type 5"),
    (user("a", tool_calls=[{"id": "1"}]), "has tool_calls: .*only text messages"),
    ({"role": "assistant"}, "messages must be"), ({"role": "assistant", "tool_calls": []}, "messages must"),
    (calls("f"), r"messages\[3\].tool_calls\[0\] is 'f'; give"),
    (calls({"function": {"name": 1}}), r"tool_calls\[0\] is .*'arguments': a JSON object as text"),
    (calls(called("{}") | {"type": "custom"}), r"tool_calls\[0\] is {'type': 'custom'"),
    (calls(called("{")), r"tool_calls\[0\] has arguments '{'"),
    (calls(called("[1]")), "has arguments .*a JSON object"), (calls(called("[" * 9999)), "has arguments"),
    ({"role": "assistant", "tool_calls": {"a": 1}}, "tool_calls is a dict; it must be a list"),
    (user("a", tool_call_id=1), "has tool_call_id: 1"), (user("a", name=1), "has name: 1"),
])
def test_what_is_wrong_with_a_message_is_said(given, words):
    with pytest.raises(ValueError, match=words):
        prompts.message("messages[3]", given)


def test_messages_become_the_ids_of_their_template():
    messages = [{"role": "system", "content": "a"}, user(text("b", "c"))]
    assert prompts.of_chat(messages, [], TOKENIZER) == TOKENIZER.encode("ab\nc")
    assert prompts.of_chat(messages, [], TOKENIZER, add_special=True)[0] == TOKENIZER.bos_id
    for nothing in (None, []):
        with pytest.raises(ValueError, match="messages must be a list"):
            prompts.of_chat(nothing, [], TOKENIZER)


@pytest.mark.parametrize("given, split", [
    ("a", ["a"]), ([3, 4], [[3, 4]]), ([], [[]]), (["a"], ["a"]), (["a", "b"], ["a", "b"]),
    ([[3], [4]], [[3], [4]]), ([[]], [[]]), (["a", [3]], ["a", [3]]),
])
def test_prompts_are_told_apart(given, split):
    assert prompts.split(given) == split


@pytest.mark.parametrize("given", [None, 3, [True], [3.0], ["a", 3], [[3], 4], [[[3]]], [[True]], [{}]])
def test_what_is_no_prompt(given):
    with pytest.raises(ValueError, match="a list of such prompts"):
        prompts.split(given)


def test_a_text_gets_special_tokens_and_ids_stay():
    assert prompts.of_text("a", TOKENIZER) == [1, 3] and prompts.of_text([3], TOKENIZER) == [3]


def test_messages_of_users_and_tools_are_escaped_on_request(tmp_path):
    jinja = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    made = [loaded(tmp_path / f"{x}", escapes=x) for x in (False, True)]
    made = [dataclasses.replace(tokenizer, template=jinja) for tokenizer in made]
    talk = [{"role": role, "content": "<|im_end|>"} for role in ("user", "assistant", "tool")]
    became, escaped = (prompts.of_chat(talk, [], tokenizer, False).count(2) for tokenizer in made)
    assert (became, escaped) == (6, 4)


class Rendered(CharTokenizer):
    """Its chat template writes its arguments as JSON."""

    def __init__(self):
        super().__init__("".join(map(chr, range(32, 127))))

    def chat(self, *arguments):
        return json.dumps(arguments)


def test_tools_and_the_generation_prompt_reach_the_template():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    tokenizer = Rendered()
    read = lambda *given: json.loads(tokenizer.decode(prompts.of_chat([user("a")], *given)))
    assert read([tool], tokenizer) == [[user("a")], True, [tool]]
    assert read([], tokenizer, False) == [[user("a")], False, None]


@pytest.mark.parametrize("tool", [
    "f", {}, {"type": "function"}, {"type": "function", "function": {}},
    {"type": "function", "function": {"name": 1}}, {"type": "custom", "function": {"name": "f"}},
])
def test_what_is_no_tool_is_said(tool):
    with pytest.raises(ValueError, match=r"tools\[1\] is .*; give {'type': 'function', 'function'"):
        prompts.of_chat([user("a")], [{"function": {"name": "f"}}, tool], Rendered())
