"""Fields of a config.json: absent, of another kind, with two names."""

import math

import pytest

from jaxrl_tis.models import hf_fields


def test_null_is_absent():
    for hf in ({}, {"a": None}):
        assert not hf_fields.is_set(hf, "a") and hf_fields.either(hf, "a", "b", 7) == 7
        assert hf_fields.flag(hf, "a", otherwise=True) and not hf_fields.flag(hf, "a")
        with pytest.raises(ValueError, match="config.json has no 'a'"):
            hf_fields.integer(hf, "a")
    assert not hf_fields.flag({"a": False}, "a", otherwise=True)


@pytest.mark.parametrize("read, value", [
    (hf_fields.integer, True), (hf_fields.integer, 3.0), (hf_fields.number, math.inf),
    (hf_fields.number, math.nan), (hf_fields.number, True), (hf_fields.number, "3"),
    (hf_fields.boolean, 1), (hf_fields.boolean, "true"),
])
def test_a_field_of_another_kind_is_refused(read, value):
    with pytest.raises(ValueError, match="^a=.* in config.json must be "):
        read({"a": value}, "a")


def test_two_names_of_a_field_agree():
    assert hf_fields.either({"a": 3, "b": 3}, "a", "b") == hf_fields.either({"b": 3}, "a", "b") == 3
    with pytest.raises(ValueError, match="two values: a=3 and b=4; remove one"):
        hf_fields.either({"a": 3, "b": 4}, "a", "b")
    with pytest.raises(ValueError, match="no 'a'"):
        hf_fields.either({}, "a", "b")
    assert hf_fields.number({"a": 3}, "a") == 3.0 and hf_fields.integer({"a": 3}, "a") == 3
