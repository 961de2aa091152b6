"""The environment of tiny runs. Standard library only: the pool's processes import this file."""

from jaxrl_tis.environments.protocol import Step
from tests.tiny_rewards import closeness


class Sums:
    """Repeats the problem until the answer is right or has one digit. It fails for some answers."""

    def __init__(self, *, seed: int):
        self._digit, self._turns = str(seed % 10), 0

    def reset(self, example):
        self._example = example
        return example["prompt"]

    def step(self, answer: str) -> Step:
        if answer.startswith("9"):
            raise RuntimeError("no nines")
        self._turns += 1
        value = closeness(answer + "0", self._example)
        is_done = answer == self._example["answer"] or len(answer) == 1
        return Step(f"{self._digit}+", value, is_done, {"turns": self._turns})


class Tools:
    """Three turns: after the first answer a tool says something, after the second one the user."""

    def __init__(self, *, seed: int):
        self._turns = 0

    def reset(self, example):
        return [{"role": "user", "content": example["prompt"]}]

    def step(self, answer: str) -> Step:
        self._turns += 1
        return Step(SAID[self._turns - 1], 1.0, self._turns == 3)


SAID = ([{"role": "tool", "content": "7"}], "8", "")
