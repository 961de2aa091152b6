"""Guesses a number: after each wrong guess the observation is "higher" or "lower".

The hidden number is the last number of the example's answer, so the prompt has to give its range:

    {"prompt": "Guess a whole number from 1 to 100. Reply with one number.", "answer": "37"}
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_tis.data import graders
from jaxrl_tis.environments.protocol import Messages, Step


class Guess:
    """One episode. The last number of an answer is the guess. Metrics: `guesses`."""

    def __init__(self, *, seed: int):
        self._guesses = 0

    def reset(self, example: Mapping[str, Any]) -> str | Messages:
        self._hidden = graders.number_of(example)
        return example["prompt"]

    def step(self, answer: str) -> Step:
        self._guesses += 1
        guess, metrics = graders.find_last_number(answer), {"guesses": self._guesses}
        if guess == self._hidden:
            return Step("", 1.0, True, metrics)
        if guess is None:
            return Step("no number", metrics=metrics)
        return Step("higher" if guess < self._hidden else "lower", metrics=metrics)
