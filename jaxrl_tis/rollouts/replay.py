"""Replay: a bounded buffer of groups that are trained on more than once.

A batch of rollout.prompts groups has prompts / uses fresh groups. The rest is sampled from earlier
groups: each group is used `uses` times on average and at most `most` times. Groups older than
rollout.max_age are dropped. Every group is trained on when it arrives, so none is lost unused.

"fresh" is experience replay with aging priorities (arXiv:2604.16918): p = (|r| + 1e-6)
exp(-age / tau). The age is the present version minus `stored_at`. Up to a constant that all groups
share, log p is therefore log(|r| + 1e-6) + stored_at / tau, a key that changes only with tau. Adding Gumbel
noise to the keys and taking the largest samples in proportion to p without replacement.

In "fresh_by_ess" a priority falls as the effective sample size of sequences does. From version to
version the log-ratio of a token is taken as normal with variance s^2, so after k versions that size is
exp(-n k s^2) of n tokens (`drift`), and tau is 1 / (n s^2), by the mean of the run's last steps.

There is no clock, thread or random state here: a choice depends on the seed, the version and tau only.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_tis import choices
from jaxrl_tis.rollouts import schedules

EPSILON = 1e-6  # added to priorities
STREAM = 0x5EED  # of random numbers, apart from those of prompts and minibatches
START = 500.0  # tau before the first measurement
MEMORY = 0.9  # decay of a measurement per step
LAG, SQUARE = "training/off_policy/token_staleness/mean", "mismatch/staleness/log_ratio_square_mean"
LENGTH = "response_length/mean"
DEFAULT_AGE = 4  # versions beyond what the schedule allows, where rollout.max_age is 0


@dataclasses.dataclass(frozen=True)
class Way:
    """How groups are chosen for replay.

    Attributes:
      order: "uniform", "newest" or "fresh".
      uses: average number of batches that a group is in; 1 replays nothing.
      most: largest number of batches that a group is in.
      tau: number of versions in which a priority falls to 1 / e.
      is_measured: whether the run's record replaces tau.
    """

    order: str
    uses: int
    most: int
    tau: float = math.inf
    is_measured: bool = False

    def __post_init__(self):
        for name in ("uses", "most"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value}; give a whole number from 1")
        if self.most <= self.uses:
            raise ValueError(
                f"a group is used at most {self.most} times and {self.uses} times on average, "
                "which leaves no choice; set most above uses"
            )
        if not self.tau > 0:
            raise ValueError(f"tau is {self.tau}; give a number of versions above 0")


def uniform(*, uses=2, most=4) -> Way:
    """Chooses earlier groups with equal probability."""
    return Way("uniform", uses, most)


def newest(*, uses=2, most=4) -> Way:
    """Chooses the newest earlier groups."""
    return Way("newest", uses, most)


def fresh(*, uses=2, most=4, tau=500) -> Way:
    """Chooses groups by mean absolute reward, discounted by age: (|r| + 1e-6) exp(-age / tau)."""
    return Way("fresh", uses, most, float(tau))


def fresh_by_ess(*, uses=2, most=4) -> Way:
    """Chooses as `fresh`, with the tau at which the run's own effective sample size falls."""
    return Way("fresh", uses, most, START, is_measured=True)


WAYS: dict[str, Callable[..., Way]] = {
    "uniform": uniform, "newest": newest, "fresh": fresh, "fresh_by_ess": fresh_by_ess,
}


def parse(text: str) -> Way | None:
    """Parses `config.rollout.replay`, such as "fresh(uses=2, tau=500)"; None for "". Raises
    ValueError for an unknown name or parameter, or a number out of range."""
    if not text:
        return None
    name, parameters = choices.parse("replay", text, WAYS)
    try:
        return WAYS[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"replay {text!r}: {error}") from error


def max_age(schedule: schedules.Schedule, way: Way | None, age: int) -> float:
    """Returns the largest staleness of a token in versions. Without replay it is the schedule's
    bound. With replay it is `age`, or if `age` is 0 the schedule's bound plus DEFAULT_AGE."""
    if way is None or way.uses == 1:
        return schedule.staleness
    return age or schedule.staleness + DEFAULT_AGE


def drift(values: Mapping[str, float]) -> float | None:
    """Returns the mean squared log-ratio of a token between two consecutive versions, nats squared, by the
    metrics of a step; None where nothing is old or known. Tokens may be of any ages."""
    lag, square = float(values.get(LAG, 0.0)), float(values.get(SQUARE, math.nan))
    return square / lag if lag > 0 and math.isfinite(square) else None


def priority(rewards: Iterable[float]) -> float:
    """Returns the mean absolute value of a group's known rewards, 0 if none is known."""
    sizes = [abs(reward) for reward in rewards if not math.isnan(reward)]
    return float(np.mean(sizes)) if sizes else 0.0


@dataclasses.dataclass
class Stored:
    """A group in the buffer.

    Attributes:
      group: its number. samples: whatever it is.
      oldest: version of its oldest token. stored_at: version that was first trained on it.
      priority: size of its reward. uses: times that it was trained on.
    """

    group: int
    samples: Any
    oldest: int
    stored_at: int
    priority: float
    uses: int = 1


class Replay:
    """The replay buffer. It holds at most the groups that arrive within `age` versions.

    Args:
      age: largest staleness of a token, in versions.
      seed: of the random choices.
    """

    def __init__(self, way: Way, age: float, seed: int):
        self.way, self._age, self._seed = way, age, seed
        self.stored: dict[int, Stored] = {}
        self.measured = 0.0, 0.0  # fading sums of 1 / tau by step, and of their number

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def tau(self) -> float:
        total, count = self.measured
        return count / total if total else self.way.tau

    def observe(self, values: Mapping[str, float]) -> None:
        """Measures tau by the metrics of a step."""
        if not self.way.is_measured or (square := drift(values)) is None:
            return
        # A ratio of mean 1 has a log-ratio of mean -s^2 / 2, and mean square s^2 + s^4 / 4.
        variance = 2 * (math.sqrt(1 + square) - 1)
        total, count = self.measured
        self.measured = MEMORY * total + float(values[LENGTH]) * variance, MEMORY * count + 1

    def add(self, group: int, samples: Any, oldest: int, version: int, priority: float) -> Stored:
        """Stores a group that `version` trains on for the first time."""
        if group in self.stored:
            raise ValueError(f"group {group} is in the buffer")
        self.stored[group] = Stored(group, samples, oldest, version, abs(priority))
        return self.stored[group]

    def sample(self, count: int, version: int, others: Iterable[int] = ()) -> list[Stored]:
        """Chooses groups for the batch of `version`, sorted by number, and counts their use.

        First removes groups that are too old for `version` or used `most` times. No group is chosen
        twice, and none of `others` (already in the batch), unless there are too few groups.

        Raises:
          ValueError: there are too few uses left, even with repeated groups.
        """
        is_left = lambda s: s.uses < self.way.most and version - s.oldest <= self._age
        self.stored = {group: s for group, s in self.stored.items() if is_left(s)}
        order, taken, drawn = self._order(version), set(others), []
        while len(drawn) < count:
            able = [group for group in order if self.stored[group].uses < self.way.most]
            if not able:
                raise ValueError(
                    f"version {version} is to replay {count} groups, and {len(drawn)} are all that are "
                    f"not used {self.way.most} times"
                )
            ahead = [group for group in able if group not in taken]
            if not ahead:
                taken.clear()
            for group in ahead[: count - len(drawn)]:
                self.stored[group].uses += 1
                taken.add(group)
                drawn.append(self.stored[group])
        return sorted(drawn, key=lambda s: s.group)

    def _order(self, version: int) -> list[int]:
        """Returns the group numbers in the order in which they are chosen."""
        groups = sorted(self.stored)
        if self.way.order == "newest":
            return groups[::-1]
        noise = np.random.default_rng((self._seed, version, STREAM)).gumbel(size=len(groups))
        keys = noise + [self._key(self.stored[group]) for group in groups]
        return [groups[i] for i in np.argsort(-keys, kind="stable")]

    def _key(self, stored: Stored) -> float:
        """Returns the logarithm of a group's priority, up to a constant that all groups share."""
        if self.way.order == "uniform":
            return 0.0
        return math.log(stored.priority + EPSILON) + stored.stored_at / self.tau

    def copy(self) -> "Replay":
        """Returns a buffer of the same groups with independent counts."""
        other = Replay(self.way, self._age, self._seed)
        other.measured = self.measured
        other.stored = {group: dataclasses.replace(s) for group, s in self.stored.items()}
        return other

    def get_state(self, written: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """Returns the buffer as JSON; `written` converts samples."""
        fields = [f.name for f in dataclasses.fields(Stored)]
        return [
            {name: getattr(s, name) for name in fields} | {"samples": written(s.samples)}
            for s in self.stored.values()
        ]

    def set_state(self, state: list[dict[str, Any]], read: Callable[[Any], Any]) -> None:
        """Restores a state; `read` is the inverse of `written`."""
        found = [Stored(**saved | {"samples": read(saved["samples"])}) for saved in state]
        self.stored = {stored.group: stored for stored in found}
