"""The interface of a rollout source, and the parts that all sources share.

A run publishes its weights under a version, and asks the source for the batch of each step. Every
token's record has the weight version that sampled it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
    """The parts that every source is built from.

    Attributes:
      schedule: who runs ahead of whom, config.rollout.schedule as read.
      replay: config.rollout.replay as parsed; None without replay.
      groups: makes requests of examples, and rewarded samples of trajectories.
      batches: of examples, the same on all processes.
      timer: of the phases "data", "rollout" and "reward".
      serving_params: (policy parameters, version) -> serving parameters, of one sampler, or a list
        for all samplers with the driver "threads".
      heartbeat: called between engine calls and while the learner waits.
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
    """The source of a run's training batches."""

    def publish(self, params: Any, version: int) -> bool:
        """Makes a version of the policy's parameters available to the samplers. Returns whether
        samplers will use this version."""

    def parts(self, step: int) -> Iterator[list[Sample]]:
        """Yields the batch of a step in parts of whole groups, as they become available."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call. Call it after all parts of a batch."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Takes the metrics of the step that trained on the last batch."""

    def reduce_staleness(self) -> str:
        """Lowers the staleness bound by one version if possible; returns a message for the user."""

    def release_cache(self) -> None:
        """Frees the samplers' KV caches until the next batch."""

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the state as JSON, from which `set_state` continues exactly. `version` is the
        last published version of the policy, or the next one."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state of `get_state`."""

    def sync_digest(self) -> dict[str, Any]:
        """Returns named values that determine the next batch; they must be equal on all
        processes."""

    def close(self, is_over: bool) -> None:
        """Ends all background work. `is_over`: the run is complete, not interrupted."""


def next_batch(source: RolloutSource, step: int) -> tuple[list[Sample], dict[str, float]]:
    """Waits for the batch of a step. Returns its samples sorted by group, and the source's
    metrics."""
    samples = [sample for part in source.parts(step) for sample in part]
    return sorted(samples, key=lambda s: s.group), source.metrics()


def generate(
    scheduler: Scheduler, requests: list[Request], on_finished: Callable = lambda count: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> list[Trajectory]:
    """Runs the scheduler until all requests have finished. Returns their trajectories in the order
    of the requests. Calls `on_finished(n)` after n requests finish, and `heartbeat` after every
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
    """Returns the engine's metrics of a batch: slot occupancy, preemptions, cache hits, evictions
    and draft acceptance. `engine`: config.engine; `stats`: counts of the batch."""
    prompts = stats.prefilled + stats.shared + stats.cached
    metrics = {
        "rollout/occupancy": stats.occupancy,
        "rollout/preempted": stats.preempted,
        "rollout/shared_prompt_ratio": stats.shared / max(prompts, 1),
        "rollout/cached_prompt_tokens": stats.cached,
    }
    if stats.environment_seconds:
        metrics["time/environment_s"] = stats.environment_seconds
    if stats.sessions:
        metrics |= {
            "harness/calls": stats.session_calls / stats.sessions,
            "harness/retries": stats.session_retries,
            "harness/restarted": stats.restarted_sessions,
            "harness/forks": stats.forks,
            "harness/forked_tokens": stats.forked_tokens,
            "harness/realigned_tokens": stats.realigned_tokens,
        }
    if any(engine.retention):
        metrics["rollout/evicted"] = stats.evicted
    if stats.verified:
        metrics["rollout/draft_acceptance"] = stats.accepted / stats.verified
    return metrics
