import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.serve import prompts

TOKENIZER = CharTokenizer("abcd\n")


def user(content, **others):
    return {"role": "user", "content": content} | others


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
    (user("a", tool_call_id=1), "has tool_call_id: 1"), (user("a", name=1), "has name: 1"),
])
def test_what_is_wrong_with_a_message_is_said(given, words):
    with pytest.raises(ValueError, match=words):
        prompts.message("messages[3]", given)


def test_messages_become_the_ids_of_their_template():
    messages = [{"role": "system", "content": "a"}, user(text("b", "c"))]
    assert prompts.of_chat(messages, TOKENIZER) == TOKENIZER.encode("ab\nc")
    for nothing in (None, []):
        with pytest.raises(ValueError, match="messages must be a list"):
            prompts.of_chat(nothing, TOKENIZER)


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
