"""The synchronous rollout source: the learner waits while its batch is sampled."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.rollouts.groups import Sample, are_known, is_equal
from jaxrl_tis.rollouts.source import SourceParts, engine_metrics, generate


class SyncSource:
    """Samples each batch with the newest weights: rollout.prompts groups of rollout.group_size
    rewarded samples.

    Args:
      start: (serving parameters, version) -> a scheduler.
      sleeps: free the sampler's weights and KV cache after each batch. `publish` makes them again.
    """

    def __init__(
        self, parts: SourceParts, start: Callable[[Any, int], Scheduler], sleeps: bool = False
    ):
        self._config, self._groups, self._batches = parts.config, parts.groups, parts.batches
        self._timer, self._heartbeat = parts.timer, parts.heartbeat
        self._serving_params, self._start, self._sleeps = parts.serving_params, start, sleeps
        self._size = parts.config.rollout.prompts * parts.config.rollout.group_size
        self._scheduler: Any = None
        self._published: tuple[int | None, dict[str, Any]] = None, {}  # version, state before it
        self._metrics: dict[str, float] = {}

    def publish(self, params: Any, version: int) -> bool:
        self._published = version, self._state()
        serving = jax.block_until_ready(self._serving_params(params, version))
        if self._scheduler is None:
            self._scheduler = self._start(serving, version)
        else:
            self._scheduler.set_params(serving, version)
        return True

    def parts(self, step: int) -> Iterator[list[Sample]]:
        """Yields the whole batch.

        With dynamic_sampling, fresh prompts replace groups whose rewards are all equal, because
        such groups carry no gradient. After max_rounds rounds they are used as they are.
        """
        rollout, scheduler = self._config.rollout, self._scheduler
        failed, before = dict(self._groups.counts), dataclasses.replace(scheduler.stats)
        groups: list[list[Sample]] = []
        chosen: list[list[Sample]] = []
        for round_index in range(rollout.max_rounds if rollout.dynamic_sampling else 1):
            groups += self._sample_groups((step, round_index))
            is_useful = lambda g: not (rollout.dynamic_sampling and is_equal(g))
            chosen = self._fitting(g for g in groups if is_useful(g))
            if sum(map(len, chosen)) == self._size:
                break
        else:
            smallest = [g[: rollout.group_size] for g in groups if not any(g is c for c in chosen)]
            chosen = self._fitting([*chosen, *sorted(smallest, key=is_equal)])
        metrics: dict[str, float] = {
            f"reward/{name}": n - failed[name] for name, n in self._groups.counts.items()
        }
        metrics["rollout/discarded_groups"] = len(groups) - len(chosen)
        if rollout.extend_equal > 1:
            metrics["rollout/extended_groups"] = sum(len(g) > rollout.group_size for g in chosen)
        self._metrics = metrics | engine_metrics(self._config.engine, scheduler.stats.since(before))
        if self._sleeps:
            scheduler.sleep()
        for group in chosen:
            self._groups.learned(group)
        yield [
            dataclasses.replace(sample, group=index)
            for index, group in enumerate(chosen) for sample in group
        ]

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last batch: discarded groups, failed rewards, slot occupancy,
        cache hits of prompt tokens, and acceptance of drafted tokens."""
        return self._metrics

    def observe(self, values: Mapping[str, float]) -> None:
        """Does nothing: every batch is new."""

    def reduce_staleness(self) -> str:
        return "every token is of the weights that are updated already"

    def release_cache(self) -> None:
        if self._scheduler is not None:
            self._scheduler.release_cache()

    def get_state(self, version: int) -> dict[str, Any]:
        at, before = self._published
        # An abandoned step starts again.
        return before if version == at else self._state()

    def _state(self) -> dict[str, Any]:
        return {"batches": self._batches.get_state(), "groups": self._groups.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])
        self._groups.set_state(state.get("groups", {}))

    def sync_digest(self) -> dict[str, Any]:
        digest = {} if self._scheduler is None else self._scheduler.sync_digest()
        of_scheduler = {f"scheduler.{name}": value for name, value in digest.items()}
        return {"batches": self._batches.get_state()} | of_scheduler

    def close(self, is_over: bool) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def _fitting(self, groups: Iterable[list[Sample]]) -> list[list[Sample]]:
        """Returns the first groups that fit into a batch."""
        room, fitting = self._size, []
        for group in groups:
            if len(group) <= room:
                room -= len(group)
                fitting.append(group)
        return fitting

    def _sample_groups(self, tag: tuple[int, int]) -> list[list[Sample]]:
        """Samples a group of each of the next prompts. One of equal rewards grows by more samples of its
        prompt, up to extend_equal times group_size."""
        with self._timer("data"):
            named = dict(enumerate(self._batches.next_whole()))
        step, round_index = tag
        groups = self._sample(named, step, f"{step}/{round_index}")
        for extension in range(1, self._config.rollout.extend_equal):
            equal = {i: named[i] for i, g in groups.items() if is_equal(g) and are_known(g)}
            if not equal:
                break
            for i, more in self._sample(equal, step, f"{step}/{round_index}+{extension}").items():
                groups[i] = groups[i] + more
        return [*groups.values()]

    def _sample(
        self, examples: dict[int, dict[str, Any]], step: int, name: str
    ) -> dict[int, list[Sample]]:
        """Returns a rewarded group for each example, by its number; `name` is unique in a run."""
        requests = [
            request for i, example in examples.items()
            for request in self._groups.requests(example, f"{name}/{i}", step - 1)
        ]
        with self._timer("rollout"):
            trajectories = generate(self._scheduler, requests, heartbeat=self._heartbeat)
        with self._timer("reward"):
            rewarded = self._groups.rewarded([*examples.values()], trajectories)
        return dict(zip(examples, rewarded, strict=True))
