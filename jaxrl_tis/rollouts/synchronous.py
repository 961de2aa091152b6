"""The synchronous source of rollouts: the learner waits while its batch is drawn."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts.groups import Groups, Sample, is_equal
from jaxrl_tis.rollouts.source import engine_metrics, run
from jaxrl_tis.runtime import processes


class Collector:
    """The synchronous source: the learner waits while it fills one batch of rollout.prompts groups
    of rollout.group_size rewarded samples, all drawn by the weights that were published last.

    Args:
      batches: records of prompts.
      timer: of the phases "data", "rollout" and "reward".
      load: (the policy's parameters, version) -> serving parameters.
      start: (serving parameters, version) -> a scheduler.
      pulse: called between two calls of the engine.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        groups: Groups,
        batches: Batches,
        timer: Timer,
        load: Callable[[Any, int], Any],
        start: Callable[[Any, int], Scheduler],
        pulse: Callable[[], None] = lambda: None,
    ):
        self._config, self._groups, self._batches, self._timer = config, groups, batches, timer
        self._load, self._start, self._scheduler, self._pulse = load, start, None, pulse
        self._published: tuple[int | None, dict[str, Any]] = None, {}

    def publish(self, params: Any, version: int) -> bool:
        self._published = version, self._batches.get_state()
        serving = jax.block_until_ready(self._load(params, version))
        if self._scheduler is None:
            self._scheduler = self._start(serving, version)
        else:
            self._scheduler.set_params(serving, version)
        return True

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Fills the batch. Its metrics are the groups discarded, the rewards that failed, and the
        shares of the slots that drew, of the prompt tokens that were taken over, and of the drafted
        tokens that were accepted.

        With dynamic_sampling, groups whose rewards are all equal carry no gradient: they are
        replaced by fresh prompts, for at most max_rounds rounds, then taken as they are.
        """
        rollout, scheduler = self._config.rollout, self._scheduler
        failed, before = dict(self._groups.counts), dataclasses.replace(scheduler.stats)
        useful: list[list[Sample]] = []
        others: list[list[Sample]] = []
        for round_index in range(rollout.max_rounds if rollout.dynamic_sampling else 1):
            groups = self._sample_groups((step, round_index))
            is_useful = lambda g: not (rollout.dynamic_sampling and is_equal(g))
            useful += [g for g in groups if is_useful(g)]
            others += [g for g in groups if not is_useful(g)]
            if len(useful) >= rollout.prompts:
                break
        chosen = (useful + others)[: rollout.prompts]
        samples = [
            dataclasses.replace(sample, group=index)
            for index, group in enumerate(chosen) for sample in group
        ]
        metrics = {f"reward/{name}": n - failed[name] for name, n in self._groups.counts.items()}
        metrics["rollout/discarded_groups"] = len(useful) + len(others) - len(chosen)
        return samples, metrics | engine_metrics(self._config.engine, scheduler.stats.since(before))

    def tighten(self) -> str:
        return "every token is of the weights that are updated already"

    def rest(self) -> None:
        if self._scheduler is not None:
            self._scheduler.release_cache()

    def close(self, is_over: bool) -> None:
        """Ends nothing, as all happens in the calls of the run."""

    def get_state(self, version: int) -> dict[str, Any]:
        at, batches = self._published
        # A step that was given up is begun again.
        return {"batches": batches if version == at else self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])

    def facts(self) -> dict[str, Any]:
        facts = {} if self._scheduler is None else self._scheduler.facts()
        return {"batches": self._batches.get_state()} | {f"scheduler.{name}": fact for name, fact in facts.items()}

    def _sample_groups(self, tag) -> list[list[Sample]]:
        with self._timer("data"):
            records = processes.gather(next(self._batches))
        requests = [
            request for i, record in enumerate(records)
            for request in self._groups.requests(record, f"{tag[0]}/{tag[1]}/{i}")
        ]
        with self._timer("rollout"):
            trajectories = run(self._scheduler, requests, pulse=self._pulse)
        with self._timer("reward"):
            return self._groups.rewarded(records, trajectories)
