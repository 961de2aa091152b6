"""Environments of the tests. The confined processes import this file: standard library only."""

import os
import random
import socket
import sys
import time

from jaxrl_tis.environments.protocol import Step

IDENTITY = random.SystemRandom().getrandbits(60)  # of the process; its number may be of a namespace


class Echo:
    """Repeats what it got; some answers are faults. `note`: a file with a line for each close."""

    def __init__(self, *, seed: int, note: str = ""):
        self._seed, self._note, self._answers = seed, note, []

    def reset(self, example):
        self._example = example
        if example["prompt"] in FAULTS:
            return FAULTS[example["prompt"]]()
        return f"{example['prompt']} {self._seed}"

    def step(self, answer):
        self._answers.append(answer)
        if answer in FAULTS:
            return FAULTS[answer]()
        if answer.startswith("sleep"):
            time.sleep(float(answer.split()[1]))
        if answer == "done":
            return Step("", 1.0, True, {"turns": len(self._answers)})
        return Step(f"{self._example['prompt']} {self._seed}: {' '.join(self._answers)}")

    def close(self):
        if self._note:
            with open(self._note, "a") as file:
                file.write(f"{self._example['prompt']}\n")
        if "no close" in self._answers:
            raise OSError("it cannot be closed")
        if "long close" in self._answers:
            time.sleep(600)


def _raise():
    raise KeyError("no such key")


def _send():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))


async def _later():
    return Step("later")


FAULTS = {
    "raise": _raise,
    "exit": lambda: sys.exit(1),
    "hang": lambda: time.sleep(600),
    "crash": lambda: os._exit(3),
    "send": _send,
    "flood": lambda: Step("x" * 70_000),
    "flood of messages": lambda: Step([{"role": "user", "content": "x" * 40_000}] * 2),
    "none": lambda: None,
    "pair": lambda: ("text", 1.0),
    "coroutine": _later,
    "no text": lambda: Step(None),
    "no messages": lambda: Step([]),
    "no role": lambda: Step([{"content": "x"}]),
    "surrogate": lambda: Step("\ud800"),
    "nan": lambda: Step("", float("nan")),
    "inf": lambda: Step("", float("inf")),
    "beyond": lambda: Step("", 1e39),
    "large": lambda: Step("", 10**400),
    "text reward": lambda: Step("", "1"),
    "no bool": lambda: Step("", is_done="no"),
    "metric": lambda: Step("", metrics={"a": None}),
    "metrics": lambda: Step("", metrics=[1]),
    "score": lambda: Step("", 1.0, metrics={"score": 0.5}),
}


class Told(Echo):
    """Repeats which answers were cut, too."""

    def step(self, answer, is_cut=False):
        return super().step(answer + " (cut)" * is_cut)


class Unmade:
    """An environment that is never made."""

    def __init__(self, *, seed: int):
        raise LookupError(f"seed {seed}")

    def reset(self, example): ...

    def step(self, answer): ...


class Unprepared(Echo):
    @classmethod
    def prepare(cls, **params):
        raise FileNotFoundError("no index")


class Which:
    """Not repeatable: every process has other observations. It has no close."""

    def __init__(self, *, seed: int): ...

    def reset(self, example):
        return f"{IDENTITY}"

    def step(self, answer):
        return Step(f"{IDENTITY}")


class Ends:
    """Ends at the second answer in the process where it began, and at once in another."""

    def __init__(self, *, seed: int): ...

    def reset(self, example):
        self._first = example.setdefault("seen", True)
        return "begin"

    def step(self, answer):
        is_new = not os.path.exists(answer)
        open(answer, "a").close()
        return Step("", is_done=not is_new)
