"""Fields of a row, messages and answers; tasks_test has whole examples."""

import pytest

from jaxrl_tis.data.files import Row
from jaxrl_tis.data.examples import Bad, answer_of, find, listed, prompt_of


def test_a_column_comes_before_a_path():
    assert find({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert find({"a": {"b.c": 3}}, "a.b.c") == 3 and find({"a": {"b.c": 3}}, "a.b") is None
    assert find({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    assert find({"a": [1]}, "a.b") is None and find({}, "a") is None


@pytest.mark.parametrize("values, answer", [
    ({"answer": "a", "solution": "b"}, "a"), ({"answer": None, "solution": "b"}, "b"),
    ({"reward_model": {"ground_truth": 7}}, "7"), ({"reward_model": {"ground_truth": None}}, None),
    ({"ground_truth": True}, "True"), ({"answer": ["a", 1]}, '["a", 1]'), ({"answer": ""}, ""),
    ({"solution": {"x": "é"}}, '{"x": "é"}'), ({}, None),
    ({"answer": 0.00001}, "0.00001"), ({"answer": 1e20}, "100000000000000000000"), ({"answer": 2.0}, "2.0"),
    ({"answer": -0.125}, "-0.125"), ({"answer": float("nan")}, "nan"),
])
def test_where_an_answer_is_found(values, answer):
    assert answer_of(Row("a:1", values), None) == answer


def test_messages_lose_null_fields_and_join_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = prompt_of([
        {"role": "system", "content": "s", "tool_calls": None}, {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ])
    assert found == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "ab"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]


@pytest.mark.parametrize("message, reason", [
    ({"content": "a"}, "has no role and content"), ({"role": "user"}, "content that is a NoneType"),
    ({"role": "user", "content": 5}, "content that is a int"),
    ({"role": "user", "content": ["a"]}, "a part of type None"),
])
def test_what_is_no_message(message, reason):
    with pytest.raises(ValueError, match=f"message 2 of the prompt has .*{reason.split('has ')[-1]}"):
        prompt_of([{"role": "user", "content": "a"}, message])


def test_five_bad_examples_are_shown():
    bad = [Bad(f"a:{i}", f"{i}", "no", i) for i in range(7)]
    assert listed(bad).splitlines()[1:] == [*(f"- a:{i} (id '{i}'): no" for i in range(5)), "- and 2 more"]
    assert "more" not in listed(bad[:5]) and str(Bad("a:1", "a:1", "no", 1)) == "a:1: no"
