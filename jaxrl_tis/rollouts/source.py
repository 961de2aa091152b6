"""The interface of a source of rollouts, and what all sources are made of.

The run publishes its weights under a version and asks for the batch of a step. Each token's record
holds the version that sampled it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts.groups import Groups, Sample
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.rollouts.replay import Way


@dataclasses.dataclass(frozen=True)
class SourceParts:
    """The arguments that all sources share.

    Attributes:
      schedule: who runs ahead of whom, config.rollout.schedule as read.
      replay: how groups are trained on again, config.rollout.replay as read; None: they are not.
      groups: makes the requests of an example and its rewarded samples.
      batches: records of prompts, the same on all processes.
      timer: of the phases "data", "rollout" and "reward".
      serving_params: (the policy's parameters, version) -> serving parameters, of one sampler or
        with the driver "threads" of each.
      heartbeat: called between calls of an engine and while the learner waits.
    """

    config: ml_collections.ConfigDict
    schedule: Schedule
    replay: Way | None
    groups: Groups
    batches: Batches
    timer: Timer
    serving_params: Callable[[Any, int], Any]
    heartbeat: Callable[[], None] = lambda: None


class RolloutSource(Protocol):
    """Where the batches of a run come from."""

    def publish(self, params: Any, version: int) -> bool:
        """Makes a version of the policy's parameters available to the samplers. Returns whether any
        tokens will be sampled with it."""

    def parts(self, step: int) -> Iterator[list[Sample]]:
        """Yields groups of a step's batch as they finish. All groups together are the batch."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call. Call it after the last part of a batch."""

    def reduce_staleness(self) -> str:
        """Lowers the bound on staleness by one version if the schedule allows it, and returns a
        message."""

    def release_cache(self) -> None:
        """Frees the memory of the samplers' caches until the next batch."""

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the JSON state from which `set_state` continues at this version of the policy:
        the last published version or the next one."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state."""

    def sync_digest(self) -> dict[str, Any]:
        """Returns by name all values that determine the next batch. They must be equal on every
        process."""

    def close(self, is_over: bool) -> None:
        """Ends the work in the background. `is_over`: the run is complete, not interrupted."""


def next_batch(source: RolloutSource, step: int) -> tuple[list[Sample], dict[str, float]]:
    """Waits for the batch of a step; returns its samples in the order of their groups, and the
    source's metrics."""
    samples = [sample for part in source.parts(step) for sample in part]
    return sorted(samples, key=lambda s: s.group), source.metrics()


def generate(
    scheduler: Scheduler, requests: list[Request], on_finished: Callable = lambda count: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> list[Trajectory]:
    """Steps the scheduler until all requests have finished, and returns their trajectories in the
    order of the requests. Calls `on_finished(n)` as requests finish and `heartbeat` after every
    step."""
    for request in requests:
        scheduler.add(request)
    done = {}
    while scheduler.pending:
        finished = scheduler.step()
        heartbeat()
        done.update({t.id: t for t in finished})
        if finished:
            on_finished(len(finished))
    return [done[request.id] for request in requests]


def engine_metrics(engine: ml_collections.ConfigDict, stats: Stats) -> dict[str, float]:
    """Returns the schedulers' counters for a batch as metrics."""
    prompts = stats.prefilled + stats.shared + stats.cached
    metrics = {
        "rollout/occupancy": stats.occupancy,
        "rollout/preempted": stats.preempted,
        "rollout/shared_prompt_ratio": stats.shared / max(prompts, 1),
        "rollout/cached_prompt_tokens": stats.cached,
    }
    if any(engine.retention):
        metrics["rollout/evicted"] = stats.evicted
    if engine.max_draft:
        metrics["rollout/draft_acceptance"] = stats.accepted / max(stats.drafted, 1)
    return metrics
