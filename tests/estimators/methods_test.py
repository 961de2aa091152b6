"""Methods as a config spells them."""

import math

import pytest

from jaxrl_tis.estimators import methods
from jaxrl_tis.estimators.traits import Traits, of


def test_a_name_takes_its_defaults():
    assert methods.parse("weight", "token_tis") == ("token_tis", {"cap": 2.0})
    assert methods.parse("weight", "none") == ("none", {})


def test_given_parameters_win():
    assert methods.parse("objective", "ppo(clip_high=0.28)") == (
        "ppo", {"clip_low": 0.2, "clip_high": 0.28})


def test_infinity_is_a_value():
    assert methods.parse("weight", "token_tis(cap=inf)") == ("token_tis", {"cap": float("inf")})


def test_a_text_needs_no_quotes():
    for text in ("kl_cov(form=survey)", "kl_cov(form='survey')"):
        assert methods.parse("objective", text)[1]["form"] == "survey"
    assert methods.parse("objective", "kl_cov")[1]["form"] == "paper"
    _, parameters = methods.parse("controller", "ess_scale(vcpo_rule=linear)")
    assert parameters["vcpo_rule"] == "linear"


def test_traits_stand_above_a_function():
    own = Traits(needs=("entropy",), at_update=True)
    function = own(lambda log_ratio, mask, seg=None, *, entropy: mask)
    assert of(function) == own and of(lambda: None) == of(None) == Traits()
    assert methods.traits("weight", "seq_tis").level == "seq"
    assert methods.traits("weight", "of other code") == Traits()


def test_a_name_that_is_no_python_name():
    assert methods.parse("kl", "k1+") == ("k1+", {})


def test_masks_are_joined_by_and_in_order():
    found = methods.parse_all("mask", "token_k3(upper=0.1) & veto & seq_mean_k1(upper=1.5)")
    assert found == (
        ("token_k3", {"upper": 0.1}), ("veto", {"veto_ratio": 1e-4, "veto_upper": math.inf}),
        ("seq_mean_k1", {"upper": 1.5, "lower": None}),
    )
    assert methods.parse_all("mask", "  ") == ()


@pytest.mark.parametrize("kind, text, words", [
    ("weight", "token_tiss", ["weight 'token_tiss' is unknown", "did you mean 'token_tis'?"]),
    ("weight", "zzz", ["choose one of none, "]),
    ("weight", "token_tis(capp=2.0)", ["'token_tis' has no parameter 'capp'", "'cap'?"]),
    ("weight", "none(cap=2.0)", ["has no parameter 'cap'", "it has none"]),
    ("weight", "turn_tis(turn=3)", ["has no parameter 'turn'"]),  # an input, not a parameter
    ("mask", "token_k3", ["'token_k3' has no published value for upper", "token_k3(upper=...)"]),
    ("weight", "token_tis(2.0)", ["neither a name nor name(key=value, ...)"]),
    ("weight", "token_tis(cap=", ["neither a name"]),
    ("weight", "token_tis(cap=open('x'))", ["neither a name"]),
    ("weight", "token_tis(cap=large)", ["neither a name"]),
    ("objective", "kl_cov(form=2)", ["'kl_cov' takes a text as form, not 2"]),
    ("mask", "veto | veto", ["neither a name"]),
    ("objective", "", ["neither a name"]),
])
def test_what_is_refused(kind, text, words):
    with pytest.raises(ValueError) as error:
        (methods.parse_all if kind == "mask" else methods.parse)(kind, text)
    for word in words:
        assert word in str(error.value)


def test_needs_are_no_parameters():
    assert methods.needs("weight", "turn_tis") == ("turn",)
    assert methods.needs("weight", "token_tis") == ()
    assert "turn" not in methods.parameters("weight", "turn_tis")


def test_examples_are_of_what_has_no_default():
    """token_k3 has no published bound; its lower one and the cap of token_tis have a default."""
    assert methods.example("weight", "token_tis") == {"cap": 2.0}
    assert methods.example("mask", "token_k3").keys() == methods.parameters("mask", "token_k3").keys()
    given = methods.traits("mask", "token_k3").example
    assert methods.example("mask", "token_k3")["upper"] == given["upper"]
