"""Published asynchronous schedules, each defined by a few numbers; docs/async.md has the table.

A step trains on one batch of groups. Version v of the policy is the policy after v batches, and
batch v starts from version v. A token that version u sampled is v - u versions stale in batch v.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxrl_tis import choices

ON_SYNC = ("drain", "interrupt", "in_place")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule: how far samplers may run ahead, and how new weights affect running sequences.

    Attributes:
      ahead: number of batches beyond batch u that workers with weights of version u may start. It
        counts whole groups and may be fractional.
      sync_every: updates between two weight syncs.
      on_sync: "drain": a worker's sequences finish first, so each has one version. "interrupt":
        they continue under the new weights after a new prefill. "in_place": they continue with the
        keys and values of the old weights.
      on_arrival: the learner starts with the part of its batch that is available.
      redundant: candidates started per prompt beyond the group size. The first to finish form the
        group, and the others are cancelled.
      repack: a worker whose sequences fill less than this share of its slots passes them to another
        worker of its version, and syncs.
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
            raise ValueError(
                "on_arrival accumulates gradients of the current weights, and samplers that run "
                "ahead use older ones; set one of them only"
            )
        if self.sync_every > self.ahead + 1:
            raise ValueError(
                f"weights are synced every {self.sync_every} updates, and samplers may start only "
                f"{self.ahead + 1:g} batches with each version, so the learner would wait forever; "
                f"allow at least {self.sync_every} batches"
            )

    @property
    def is_sync(self) -> bool:
        """Whether no token is sampled during updates."""
        return self == Schedule()

    @property
    def staleness(self) -> float:
        """Largest number of versions between a token and the policy training on it; inf: no
        bound."""
        return math.ceil(self.ahead) if self.ahead < math.inf else math.inf


def _is_whole(x, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _versions(staleness: float) -> float:
    ahead = float(staleness)
    if ahead < math.inf and ahead % 1:
        raise ValueError(f"staleness is {staleness}; give a whole number of versions, or inf")
    return ahead


def sync() -> Schedule:
    """On-policy: the learner waits for a batch of its own weights, and samplers wait for
    updates."""
    return Schedule()


def periodic() -> Schedule:
    """Periodic asynchrony (2511.18871): on-policy. Samplers sync at the start of a step, and the
    learner accumulates gradients of groups as they arrive."""
    return Schedule(on_arrival=True)


def one_step() -> Schedule:
    """One-step off-policy (2410.18252; verl's recipe): version v samples batch v + 1 while the
    learner trains on batch v."""
    return Schedule(ahead=1.0)


def fully_async(*, trigger=4, threshold=0.5, partial=True) -> Schedule:
    """verl's fully asynchronous recipe. Its four modes are: on policy (trigger 1, threshold 0),
    stream (trigger > 1, threshold 0), stale samples (threshold > 0), and partial rollouts.

    Args:
      trigger: updates between two weight syncs.
      threshold: samples started beyond those of `trigger` updates, as a share of them.
      partial: sequences continue under new weights; otherwise they finish before a sync.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; give a share of the samples of at least 0")
    if not _is_whole(trigger, 1):
        raise ValueError(f"trigger is {trigger}; give a whole number of updates from 1")
    on_sync = "interrupt" if partial else "drain"
    return Schedule(ahead=(1 + threshold) * trigger - 1, sync_every=trigger, on_sync=on_sync)


def areal(*, staleness=4) -> Schedule:
    """AReaL (2505.24298): request N of batches of B starts when floor((N - 1) / B) is at most
    version + staleness. New weights interrupt running sequences."""
    return Schedule(ahead=_versions(staleness), on_sync="interrupt")


def in_flight(*, staleness=4) -> Schedule:
    """PipelineRL (2509.19128): the running engine takes new weights, and keeps the keys and values
    of the old weights."""
    return Schedule(ahead=_versions(staleness), on_sync="in_place")


def dora(*, staleness=2) -> Schedule:
    """DORA (2604.26256): each trajectory has one version. Workers may have different versions at
    the same time, and no sample is dropped."""
    return Schedule(ahead=_versions(staleness))


def roll_flash(*, alpha=1, redundant=0) -> Schedule:
    """ROLL Flash (2510.11345): a buffer of (1 + alpha) batches bounds every sample's age by alpha
    versions. Redundant candidates cut the slowest responses, which favours short ones."""
    return Schedule(ahead=float(alpha), on_sync="interrupt", redundant=redundant)


def laminar(*, staleness=4, repack=0.5) -> Schedule:
    """Laminar (2510.12633): each worker syncs on its own once its trajectories have finished. The
    last trajectories move to few workers, and the other workers need not wait."""
    return Schedule(ahead=_versions(staleness), repack=repack)


def oapl(*, lag=400) -> Schedule:
    """OAPL (2602.19362): a sampler keeps its weights for `lag` updates. The learner trains on all its
    samples before the next sync."""
    if not _is_whole(lag, 1):
        raise ValueError(f"lag is {lag}; give a whole number of updates from 1")
    return Schedule(ahead=lag - 1.0, sync_every=lag)


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
    "oapl": oapl,
}


def parse(text: str) -> Schedule:
    """Parses `config.rollout.schedule`, such as "areal(staleness=4)". Raises ValueError for
    an unknown name or parameter, or a number out of range."""
    name, parameters = choices.parse("schedule", text, SCHEDULES)
    try:
        return SCHEDULES[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule {text!r}: {error}") from error
