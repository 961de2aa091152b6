"""A calculator as a tool: an answer that ends in "=" is a call.

    prompt       "37*48+5="
    answer       "37*48="       a call
    observation  "1776 "        the value, and a space that ends it
    answer       "1781"         final, compared with the example's answer

All of this can be written in digits, operators, "=" and spaces (`tokenizer.ARITHMETIC_CHARS`).
These characters have no text for an error. A call that cannot be evaluated therefore ends the
episode with reward 0 and the metric `failed_calls`.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jaxrl_tis.data import graders
from jaxrl_tis.environments.protocol import Messages, Step

CALL = re.compile(r"([-+*/() 0-9]*)=\s*$", re.ASCII)
TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))", re.ASCII)
CHARACTERS = 200  # of an expression; its value is then about as long at most


class Calculator:
    """One episode. Metrics: `calls`, and `failed_calls` without a value."""

    def __init__(self, *, seed: int):
        self._calls = 0

    def reset(self, example: Mapping[str, Any]) -> str | Messages:
        self._example = example
        return example["prompt"]

    def step(self, answer: str) -> Step:
        call = CALL.search(answer)
        if call is None:
            reward = graders.exact(answer, self._example)
            return Step("", reward, True, {"calls": self._calls, "failed_calls": 0})
        self._calls += 1
        try:
            value = evaluate(call.group(1))
        except (ValueError, ZeroDivisionError):
            return Step("", 0.0, True, {"calls": self._calls, "failed_calls": 1})
        return Step(f"{value} ", metrics={"calls": self._calls, "failed_calls": 0})


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of numbers, + - * / and brackets: "7/2" is 7/2, not 3.5.

    Raises:
        ValueError: the text is no expression, or longer than CHARACTERS.
        ZeroDivisionError: a divisor is 0.
    """
    if len(expression) > CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters; at most {CHARACTERS}")
    tokens, end = [], 0
    expression = expression.rstrip()
    while end < len(expression):
        token = TOKEN.match(expression, end)
        if token is None:
            raise ValueError(f"no number or operator at {expression[end:]!r}")
        tokens.append(token.group(1) or token.group(2))
        end = token.end()
    tokens = [*reversed(tokens)]
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"nothing can follow a value but an operator, and {tokens[-1]!r} does")
    return value


def _sum(tokens: list[str]) -> Fraction:
    """Reads a sum from the end of `tokens`, which are in reverse order, and removes it."""
    value = _product(tokens)
    while tokens and tokens[-1] in ("+", "-"):
        sign = 1 if tokens.pop() == "+" else -1
        value += sign * _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[-1] in ("*", "/"):
        if tokens.pop() == "*":
            value *= _factor(tokens)
        else:
            value /= _factor(tokens)
    return value


def _factor(tokens: list[str]) -> Fraction:
    token = tokens.pop() if tokens else "the end"
    if token == "-":
        return -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a bracket is not closed")
        return value
    if not token[0].isdigit():
        raise ValueError(f"{token!r} where a number has to be")
    return Fraction(int(token))
