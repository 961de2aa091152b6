"""The calculator against the interpreter's own arithmetic."""

import random
import re
from fractions import Fraction

import pytest

from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS
from jaxrl_tis.environments.calculator import CHARACTERS, Calculator, evaluate
from jaxrl_tis.environments.protocol import Step

EXAMPLE = {"prompt": "37*48+5=", "answer": "1781", "id": "x"}


def begun(example=EXAMPLE):
    play = Calculator(seed=3)
    assert play.reset(example) == example["prompt"]
    return play


def test_a_call_and_a_final_answer():
    play = begun()
    assert play.step("37*48=") == Step("1776 ", metrics={"calls": 1, "failed_calls": 0})
    assert play.step("1776+5= ") == Step("1781 ", metrics={"calls": 2, "failed_calls": 0})
    assert play.step(" 1781") == Step("", 1.0, True, {"calls": 2, "failed_calls": 0})


@pytest.mark.parametrize("answer", ["1782", "", "17 81", "=1781", "12=12"])
def test_a_wrong_answer(answer):
    assert begun().step(answer) == Step("", 0.0, True, {"calls": 0, "failed_calls": 0})


@pytest.mark.parametrize("answer", [
    "=", " =", "3+=", "*3=", "3 4=", "3++=", "1/0=", "1/(2-2)=", "(3=", "3)=", "()=", "2**3=",
    "7//2=", "1=2=3+=", "9" * (CHARACTERS + 1) + "=",
])
def test_a_call_without_a_value_ends_the_episode(answer):
    assert begun().step(answer) == Step("", 0.0, True, {"calls": 1, "failed_calls": 1})


@pytest.mark.parametrize("expression, value", [
    ("12*34", "408"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("7/2", "7/2"), ("6/2", "3"),
    ("1/3+1/6", "1/2"), ("2-3-4", "-5"), ("16/4/2", "2"), ("-3*-2", "6"), ("3--2", "5"),
    ("2*-(1+1)", "-4"), (" 1 + 1 ", "2"), ("007", "7"), ("0-0", "0"),
    ("9" * 99 + "*" + "9" * 100, str(int("9" * 99) * int("9" * 100))),
])
def test_values_by_hand(expression, value):
    assert str(evaluate(expression)) == value


def test_values_of_the_interpreter():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randrange(1, 50))
        text = f"{expression(depth - 1)}{rng.choice('+-*/')}{expression(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else text

    texts = [text for text in (expression(3) for _ in range(400)) if len(text) <= CHARACTERS]
    for text in texts:
        exact = re.sub(r"[0-9]+", r"Fraction(\g<0>)", text)
        try:
            value = eval(exact)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                evaluate(text)
        else:
            assert evaluate(text) == value, text
    assert len(texts) > 300


def test_brackets_are_bounded_by_the_length():
    deep = "(" * (CHARACTERS // 2 - 1) + "1" + ")" * (CHARACTERS // 2 - 1)
    assert evaluate(deep) == 1


@pytest.mark.parametrize("answer, value", [
    ("The sum: 12*34=", "408 "), ("12*34= or 3+4=", "7 "), ("1+1=2=", "2 "), ("٣+1=", None),
])
def test_the_expression_is_the_end_of_a_longer_text(answer, value):
    step = begun().step(answer)
    assert (step.is_done, step.observation) == ((False, value) if value else (True, ""))


def test_the_characters_of_sums_are_enough():
    play = begun()
    for answer in ("3-48=", "7/-2="):
        assert set(play.step(answer).observation) <= set(ARITHMETIC_CHARS)
    assert set("37*48=") <= set(ARITHMETIC_CHARS)


def test_an_example_without_an_answer():
    with pytest.raises(ValueError, match="example x has no answer"):
        begun({"prompt": "1+1=", "id": "x"}).step("2")


def test_episodes_repeat():
    answers = ["37*48=", "1+", "1="]
    played = [[begun().step(answer) for answer in answers] for _ in range(2)]
    assert played[0] == played[1]
    assert Fraction(evaluate("1/3")) == Fraction(1, 3)
