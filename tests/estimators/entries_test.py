"""Entries made from one function: they look and behave like functions that are written out."""

import inspect

import pytest

from jaxrl_tis.estimators import entries
from jaxrl_tis.estimators.traits import Traits


def scaled(level, x, mask=None, *, factor, offset=0.0):
    return level, x * factor + offset


DOUBLED = entries.entry(
    scaled, "seq", "seq_doubled", "Twice x; no paper.", "w <= 2", "to test", Traits(level="seq"),
    "factor: 2 is ours.", factor=2.0,
)


def test_an_entry_calls_its_function():
    assert DOUBLED(3.0) == ("seq", 6.0)
    assert DOUBLED.traits == Traits(level="seq")
    assert DOUBLED(3.0, factor=4.0, offset=1.0) == ("seq", 13.0)
    with pytest.raises(TypeError, match="'scale'"):
        DOUBLED(3.0, scale=4.0)


def test_an_entry_shows_its_parameters_and_their_defaults():
    parameters = inspect.signature(DOUBLED).parameters
    assert list(parameters) == ["x", "mask", "factor", "offset"]
    assert parameters["factor"].default == 2.0 and parameters["offset"].default == 0.0
    assert parameters["factor"].kind is inspect.Parameter.KEYWORD_ONLY
    required = entries.entry(scaled, "token", "token_scaled", "x.", "none", "to test", Traits())
    assert inspect.signature(required).parameters["factor"].default is inspect.Parameter.empty


def test_an_entry_has_a_name_and_a_docstring():
    assert (DOUBLED.__name__, DOUBLED.__module__) == ("seq_doubled", __name__)
    assert DOUBLED.__doc__ == (
        "Twice x; no paper.\n\nUnit: sequence. Trust region: w <= 2. Use: to test.\n\n"
        "factor: 2 is ours."
    )
    token = entries.entry(scaled, "token", "token_scaled", "x " * 80, "none", "to test", Traits())
    assert "Unit: token." in token.__doc__
    assert max(map(len, token.__doc__.splitlines())) <= 100
