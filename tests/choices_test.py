"""Choices of a table of two functions."""

import math

import pytest

from jaxrl_tis import choices

TABLE = {"plain": lambda x, *, low=0.5, form="a": None, "k1+": lambda x, *, seg: None,
         "bare": lambda *, bound: None}


def test_parameters_are_those_by_keyword_that_are_no_inputs():
    assert choices.parse("thing", "plain", TABLE) == ("plain", {"low": 0.5, "form": "a"})
    assert choices.parse("thing", "plain(low=inf, form=b)", TABLE) == (
        "plain", {"low": math.inf, "form": "b"})
    assert choices.parse("thing", "k1+", TABLE, {"k1+": ("seg",)}) == ("k1+", {})


def test_joined_choices_keep_their_order():
    found = choices.parse_all("thing", "bare(bound=1) & plain & bare(bound=2)", TABLE)
    assert [(name, p.get("bound")) for name, p in found] == [
        ("bare", 1), ("plain", None), ("bare", 2)]
    assert choices.parse_all("thing", " ", TABLE) == ()


@pytest.mark.parametrize("text, why", [
    ("plane", "thing 'plane' is unknown; did you mean 'plain'"),
    ("plain(lo=1)", "has no parameter 'lo'; did you mean 'low'"),
    ("plain(low=b)", "neither a name nor"), ("plain(0.1)", "neither a name nor"),
    ("plain(", "neither a name nor"), ("plain(form=1)", "takes a text as form, not 1"),
    ("bare", "no published value for bound; write bare.bound=...."),
])
def test_what_is_no_choice_is_named(text, why):
    with pytest.raises(ValueError, match=why):
        choices.parse("thing", text, TABLE)
