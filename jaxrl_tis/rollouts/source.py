"""The interface of a source of rollouts.

The run publishes its weights under a version and asks for the batch of a step; which versions drew
the tokens of that batch is written in its records, and nowhere else.
"""

from collections.abc import Callable
from typing import Any, Protocol

import ml_collections

from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.rollouts.groups import Sample


def generate(
    scheduler: Scheduler, requests: list[Request], on_finished: Callable = lambda count: None,
    pulse: Callable[[], None] = lambda: None,
) -> list[Trajectory]:
    """Steps the scheduler until all requests have ended, and returns their trajectories in the
    order of the requests; `on_finished(n)` is called as they end, `pulse` after every step."""
    for request in requests:
        scheduler.add(request)
    done = {}
    while scheduler.pending:
        finished = scheduler.step()
        pulse()
        done.update({t.id: t for t in finished})
        if finished:
            on_finished(len(finished))
    return [done[request.id] for request in requests]


def engine_metrics(engine: ml_collections.ConfigDict, stats: Stats) -> dict[str, float]:
    """Returns what schedulers have counted for a batch, with the settings of config.engine."""
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


class RolloutSource(Protocol):
    """Where the batches of a run come from."""

    def publish(self, params: Any, version: int) -> bool:
        """Hands over the policy's parameters; tokens drawn with them carry this version. Returns
        whether any will be drawn with them."""

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples of a step in group order, and metrics of how they came about."""

    def tighten(self) -> str:
        """Bounds staleness by less, if that can be, and says what is new."""

    def rest(self) -> None:
        """Gives the memory of the sampler's cache back until the next batch."""

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns what JSON can hold and `set_state` needs to go on from this version of the policy
        as if there had been no break: the last that was published, or the one after it."""

    def set_state(self, state: dict[str, Any]) -> None: ...

    def close(self, is_over: bool) -> None:
        """Ends what works for it in the background; `is_over`: the run has come to its end, and was
        not interrupted."""

    def facts(self) -> dict[str, Any]:
        """Returns by name what decides about the next batch, the same on every process."""
