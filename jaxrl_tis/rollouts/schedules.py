"""The published ways of running ahead, each a point among a few numbers; docs/async.md has the table.

A step trains on one batch of groups, so that versions of the policy and batches are counted alike:
version v is what v batches have made of it, and batch v is trained on from it. A token that version
u drew is v - u versions stale then.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxrl_tis import choices

ON_SYNC = ("drain", "interrupt", "in_place")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How far samplers may run ahead of the learner, and what a weight sync does to unfinished
    sequences.

    Attributes:
      ahead: batches that workers with the weights of version u may begin beyond batch u. Whole
        groups count, so that half a batch is a number here, too.
      sync_every: updates between two weight syncs.
      on_sync: "drain" lets a worker's sequences end first, so that each is of one version;
        "interrupt" goes on with them under the new weights, which read them anew; "in_place" goes
        on with the keys and values that the old weights have written.
      on_arrival: the learner begins with the part of its batch that is there.
      redundant: candidates of a prompt that are begun beyond a group's samples; the first to end
        are the group, and the others are given up.
      repack: a worker whose sequences fill less than this share of its slots hands them on to
        another of its version, and takes new weights.
    """

    ahead: float = 0.0
    sync_every: int = 1
    on_sync: str = "drain"
    on_arrival: bool = False
    redundant: int = 0
    repack: float = 0.0

    def __post_init__(self):
        problems = {
            f"it runs {self.ahead} batches ahead; the bound is 0 or more": not self.ahead >= 0,
            f"on_sync is {self.on_sync!r}, none of {', '.join(ON_SYNC)}":
                self.on_sync not in ON_SYNC,
            f"weights are synced every {self.sync_every} updates; give a whole number from 1":
                not _is_whole(self.sync_every, 1),
            f"{self.redundant} redundant candidates; give a whole number from 0":
                not _is_whole(self.redundant, 0),
            f"repack is {self.repack}; give a share of the slots from 0 to below 1":
                not 0 <= self.repack < 1,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ValueError(problem)
        if self.on_arrival and self.ahead:
            raise ValueError("a learner that begins before its batch is there trains on policy")
        if self.sync_every > self.ahead + 1:
            raise ValueError(
                f"weights are synced every {self.sync_every} updates, but samplers may begin "
                f"only {self.ahead + 1:g} batches with each: the learner would wait for ever"
            )

    @property
    def is_sync(self) -> bool:
        """Whether nothing is ever drawn while the learner updates."""
        return self == Schedule()

    @property
    def staleness(self) -> float:
        """The most versions that a token is behind the policy that trains on it; inf: no bound."""
        return math.ceil(self.ahead) if self.ahead < math.inf else math.inf


def _is_whole(x, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _versions(staleness: float) -> float:
    ahead = float(staleness)
    if ahead < math.inf and ahead % 1:
        raise ValueError(f"staleness is {staleness}; give a whole number of versions, or inf")
    return ahead


def sync() -> Schedule:
    """The learner waits for a batch by its own weights, and samplers wait for the learner."""
    return Schedule()


def periodic() -> Schedule:
    """Periodic asynchrony (2511.18871): on-policy; samplers get the weights at the start of a step,
    and the learner accumulates the gradient of what has arrived."""
    return Schedule(on_arrival=True)


def one_step() -> Schedule:
    """One-step off-policy (2410.18252; verl's recipe): batch v + 1 is drawn by version v while
    batch v is trained on."""
    return Schedule(ahead=1.0)


def fully_async(*, trigger=4, threshold=0.5, partial=True) -> Schedule:
    """verl's fully asynchronous recipe, whose four modes are points of it: on policy (1, 0), stream
    (trigger > 1, 0), with stale samples (threshold > 0), and with partial rollouts.

    Args:
      trigger: updates between two weight syncs.
      threshold: samples that are begun beyond those of `trigger` updates, as a share of them.
      partial: sequences go on under new weights; else a worker waits until its own have ended.
    """
    if not 0 <= threshold:
        raise ValueError(f"threshold is {threshold}; the share of samples ahead is 0 or more")
    if not _is_whole(trigger, 1):
        raise ValueError(f"trigger is {trigger}; give a whole number of updates from 1")
    on_sync = "interrupt" if partial else "drain"
    return Schedule(ahead=(1 + threshold) * trigger - 1, sync_every=trigger, on_sync=on_sync)


def areal(*, staleness=4) -> Schedule:
    """AReaL (2505.24298): request N of batches of B begins when floor((N - 1) / B) is at most
    version + staleness; new weights interrupt what is being drawn."""
    return Schedule(ahead=_versions(staleness), on_sync="interrupt")


def in_flight(*, staleness=4) -> Schedule:
    """PipelineRL (2509.19128): new weights come into the running engine, which keeps the keys and
    values that older ones have written."""
    return Schedule(ahead=_versions(staleness), on_sync="in_place")


def dora(*, staleness=2) -> Schedule:
    """DORA (2604.26256): each trajectory is of one version, several versions are alive at once on
    as many workers, and nothing is dropped."""
    return Schedule(ahead=_versions(staleness))


def roll_flash(*, alpha=1, redundant=0) -> Schedule:
    """ROLL Flash (2510.11345): a buffer of (1 + alpha) batches bounds every sample's age by alpha
    versions; redundant candidates cut the tail of a group, which favours short answers."""
    return Schedule(ahead=float(alpha), on_sync="interrupt", redundant=redundant)


def laminar(*, staleness=4, repack=0.5) -> Schedule:
    """Laminar (2510.12633): every worker takes new weights by itself once its own trajectories have
    ended; the last ones are packed onto few workers, so that the others need not wait."""
    return Schedule(ahead=_versions(staleness), repack=repack)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "sync": sync,
    "periodic": periodic,
    "one_step": one_step,
    "fully_async": fully_async,
    "areal": areal,
    "in_flight": in_flight,
    "dora": dora,
    "roll_flash": roll_flash,
    "laminar": laminar,
}


def parse(text: str) -> Schedule:
    """Reads `config.rollout.schedule`, such as "areal(staleness=4)"; ValueError for a name, a
    parameter or a number that there is not."""
    name, parameters = choices.parse("schedule", text, SCHEDULES)
    try:
        return SCHEDULES[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule {text!r}: {error}") from error
