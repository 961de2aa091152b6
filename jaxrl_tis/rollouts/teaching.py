"""The share of a teacher in what is sampled: how it falls, and how hard a prompt is.

Zhang et al. 2026: alpha(x) = start * max(0, 1 - k / steps) * d(x), for step k and the difficulty d of
the prompt in [0, 1]. It is fixed when a sample begins.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_tis import choices
from jaxrl_tis.data.examples import find

LAST = 4  # groups of a prompt whose mean reward tells its difficulty
REWARD = "reward"  # difficulty: one minus that mean reward


@dataclasses.dataclass(frozen=True)
class Alpha:
    """How alpha falls.

    Attributes:
      start: alpha of the first step, above 0 and at most 1; steps: those until it is 0.
      falls: "linear" or "cosine".
      difficulty: "" for the same alpha for all prompts, "reward", or a field of the data, as "a.b",
        with a number in [0, 1].
    """

    start: float
    steps: int
    falls: str
    difficulty: str

    def __post_init__(self):
        if not 0 < self.start <= 1:
            raise ValueError(f"start is {self.start}; give a share above 0 and at most 1")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give a whole number from 1")

    def at(self, step: int) -> float:
        """Returns alpha of the hardest prompt after `step` updates; 0 from `steps` on."""
        left = max(0.0, 1.0 - step / self.steps)
        return self.start * (left if self.falls == "linear" else (1.0 - math.cos(math.pi * left)) / 2)


def linear(*, start=0.5, steps=1000, difficulty="") -> Alpha:
    """Falls in a straight line."""
    return Alpha(start, steps, "linear", difficulty)


def cosine(*, start=0.5, steps=1000, difficulty="") -> Alpha:
    """Falls along half a cosine, slowly at both ends."""
    return Alpha(start, steps, "cosine", difficulty)


FALLS: dict[str, Callable[..., Alpha]] = {"linear": linear, "cosine": cosine}


def parse(text: str) -> Alpha:
    """Parses config.rollout.alpha, such as "linear(start=0.5, steps=1000)". ValueError for an unknown
    name or parameter, or a number out of range."""
    name, parameters = choices.parse("alpha", text, FALLS)
    try:
        return FALLS[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"alpha {text!r}: {error}") from error


class Difficulty:
    """The difficulty of prompts, from their rewards or from the data.

    Args:
      name: see `Alpha.difficulty`.
    """

    def __init__(self, name: str):
        self._name = name
        self._rewards: dict[str, list[float]] = {}  # id of an example -> means of its last groups

    def add(self, id: str, rewards: list[float]) -> None:
        """Adds the rewards of a group; unknown ones (NaN) do not count."""
        known = [reward for reward in rewards if not math.isnan(reward)]
        if self._name == REWARD and known:
            means = self._rewards.setdefault(id, [])
            means.append(sum(known) / len(known))
            del means[:-LAST]

    def of(self, example: dict[str, Any]) -> float:
        """Returns the difficulty of an example in [0, 1]; 1 for one without rewards so far. ValueError
        where the data has no such number."""
        if not self._name:
            return 1.0
        if self._name == REWARD:
            means = self._rewards.get(str(example["id"]))
            return 1.0 if means is None else min(max(1.0 - sum(means) / len(means), 0.0), 1.0)
        value = find(example, self._name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"example {example.get('id')} has the difficulty {value!r} at {self._name!r}; give a "
                "number from 0 to 1, or another field in rollout.alpha"
            )
        return float(value)

    def get_state(self) -> dict[str, list[float]]:
        return {id: [*means] for id, means in self._rewards.items()}

    def set_state(self, state: Mapping[str, list[float]]) -> None:
        self._rewards = {id: [*means] for id, means in state.items()}


class Teacher:
    """A teacher as one engine serves it, in memory until the last step that needs it.

    Args:
      load: makes its serving parameters.
    """

    def __init__(self, alpha: Alpha, load: Callable[[], Any]):
        self._alpha, self._load = alpha, load
        self._served: Any = None

    def __call__(self, version: int) -> Any:
        """Returns the serving parameters for samples that begin with this version; None once alpha is
        0."""
        if not self._alpha.at(version):
            self._served = None
        elif self._served is None:
            self._served = self._load()
        return self._served
