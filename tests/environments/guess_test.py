import pytest

from jaxrl_tis.environments.guess import Guess
from jaxrl_tis.environments.protocol import Step

EXAMPLE = {"prompt": "Guess a number from 1 to 100.", "answer": "37", "id": "x"}


def begun(example=EXAMPLE, seed=1):
    play = Guess(seed=seed)
    assert play.reset(example) == example["prompt"]
    return play


def test_hints_and_the_number():
    play = begun()
    assert play.step("50") == Step("lower", metrics={"guesses": 1})
    assert play.step("from 1 to 50 it is 25") == Step("higher", metrics={"guesses": 2})
    assert play.step("no idea") == Step("no number", metrics={"guesses": 3})
    assert play.step("37.0!") == Step("", 1.0, True, {"guesses": 4})


def test_the_number_is_the_examples():
    for seed in (1, 2):
        assert begun(seed=seed).step("37").is_done
    assert begun(EXAMPLE | {"answer": "-4"}).step("0").observation == "lower"


def test_an_example_without_a_number():
    with pytest.raises(ValueError, match="the answer 'blue' of x has no number"):
        begun(EXAMPLE | {"answer": "blue"})
    with pytest.raises(ValueError, match="example x has no answer"):
        begun({"prompt": "p", "id": "x"})
