"""Who generates when: the interface of a source of rollouts, and the synchronous one.

The run publishes its weights under a version and asks for the batch of a step; which versions drew
the tokens of that batch is written in its records, and nowhere else.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import ml_collections
import numpy as np

from jaxrl_tis import processes
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker, soft_overlong_penalty
from jaxrl_tis.data.tasks import Source
from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.metrics import Timer

CHECKED = 20_000  # a few seconds


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished trajectory with the example it answers, its reward and its group in the batch.

    `score` is the reward function's value; `reward` adds the overlong penalty; `components` are
    what it is the sum of; `greedy_reward` is the reward of the greedy answer to the same prompt,
    where an advantage asks for it.
    """

    trajectory: Trajectory
    record: dict[str, str]
    text: str
    score: float
    reward: float
    group: int
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    greedy_reward: float = math.nan


def components(samples: list[Sample]) -> dict[str, np.ndarray]:
    """Returns each component of the rewards, [N]; 0 where a reward that failed has other names."""
    names = dict.fromkeys(name for s in samples for name in s.components)
    value = lambda sample, name: sample.components[name] if name in sample.components else 0.0
    return {name: np.array([value(s, name) for s in samples], np.float32) for name in names}


@dataclasses.dataclass(frozen=True)
class Prompter:
    """Turns examples into prompt ids: by a template and, where asked for, the model's chat
    format."""

    tokenizer: Tokenizer
    task: ml_collections.ConfigDict

    def ids(self, record: dict[str, str]) -> np.ndarray:
        """Returns the prompt of a record; ValueError when it is longer than max_prompt_tokens."""
        text = self.task.template.format(prompt=record["prompt"])
        if self.task.chat:
            system = [{"role": "system", "content": self.task.system}] if self.task.system else []
            text = self.tokenizer.chat([*system, {"role": "user", "content": text}])
        ids = self.tokenizer.encode(text, add_special=not self.task.chat)
        if len(ids) > self.task.max_prompt_tokens:
            raise ValueError(
                f"example {record['id']}: {len(ids)} prompt tokens, config.task.max_prompt_tokens "
                f"is {self.task.max_prompt_tokens}; raise it or shorten the prompt"
            )
        return np.array(ids, np.int32)

    def check(self, source: Source) -> None:
        """Raises now what `ids` would raise in the middle of a run; reads at most CHECKED
        examples, as generated tasks can be endless."""
        for index in range(min(len(source), CHECKED)):
            self.ids(source[index])


def run(
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


def sampling_params(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer, temperature: float, is_filtered: bool
) -> SamplingParams:
    """Returns parameters that stop at the tokenizer's end ids or after max_new_tokens, with the
    rollouts' filters or without."""
    rollout = config.rollout
    filters = dict(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)
    return SamplingParams(
        temperature=temperature, stop_ids=tuple(tokenizer.eos_ids),
        max_tokens=rollout.max_new_tokens, **(filters if is_filtered else {}),
    )


def kept_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Measures, over all tokens, how often what could be drawn was too wide to be recorded, and the
    mean mass that the filters dropped there: by so much the ratios stay below 1. {} without kept
    sets."""
    drawn = [t for t in trajectories if len(t.tokens)]
    if not any(t.kept.shape[-1] for t in drawn):
        return {}
    is_wide = np.concatenate([np.all(t.kept < 0, axis=-1) for t in drawn])
    dropped = np.concatenate([1 - np.exp(t.logp_raw - t.logp_behav) for t in drawn])
    return {
        "rollout/kept_overflow": is_wide.mean(),
        "rollout/kept_overflow_mass": np.where(is_wide, dropped, 0.0).mean(),
    }


class RolloutSource(Protocol):
    """Where the batches of a run come from."""

    def publish(self, params: Any, version: int) -> None:
        """Hands over the policy's parameters; tokens drawn with them carry this version."""

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples of a step in group order, and metrics of how they came about."""

    def rest(self) -> None:
        """Gives the memory of the sampler's cache back until the next batch."""

    def get_state(self) -> dict[str, Any]:
        """Returns what JSON can hold and `set_state` needs to go on as if there had been no
        break."""

    def set_state(self, state: dict[str, Any]) -> None: ...

    def facts(self) -> dict[str, Any]:
        """Returns by name what decides about the next batch, the same on every process."""


class Collector:
    """The synchronous source: the learner waits while it fills one batch of rollout.prompts groups
    of rollout.group_size rewarded samples, all drawn by the weights that were published last.

    Args:
      batches: records of prompts.
      timer: of the phases "data", "rollout" and "reward".
      load: (the policy's parameters, version) -> serving parameters.
      start: (serving parameters, version) -> a scheduler.
      with_greedy: also answer each prompt once at temperature 0, for the baseline of ReMax.
      pulse: called between two calls of the engine.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        prompter: Prompter,
        batches: Batches,
        rewards: RewardWorker,
        timer: Timer,
        load: Callable[[Any, int], Any],
        start: Callable[[Any, int], Scheduler],
        with_greedy: bool = False,
        pulse: Callable[[], None] = lambda: None,
    ):
        self._config, self._prompter = config, prompter
        self._batches, self._rewards, self._timer = batches, rewards, timer
        self._load, self._start, self._scheduler, self._pulse = load, start, None, pulse
        self._sampling = sampling_params(
            config, prompter.tokenizer, config.rollout.temperature, is_filtered=True
        )
        self._greedy = sampling_params(config, prompter.tokenizer, 0.0, is_filtered=False)
        self._with_greedy = with_greedy

    def publish(self, params: Any, version: int) -> None:
        serving = jax.block_until_ready(self._load(params, version))
        if self._scheduler is None:
            self._scheduler = self._start(serving, version)
        else:
            self._scheduler.set_params(serving, version)

    def next(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Fills the batch. Its metrics are the groups discarded, the rewards that failed, and the
        shares of the slots that drew, of the prompt tokens that were taken over, and of the drafted
        tokens that were accepted.

        With dynamic_sampling, groups whose rewards are all equal carry no gradient: they are
        replaced by fresh prompts, for at most max_rounds rounds, then taken as they are.
        """
        rollout, scheduler = self._config.rollout, self._scheduler
        failed, before = dict(self._rewards.counts), dataclasses.replace(scheduler.stats)
        useful: list[list[Sample]] = []
        others: list[list[Sample]] = []
        for round_index in range(rollout.max_rounds if rollout.dynamic_sampling else 1):
            groups = self._sample_groups((step, round_index))
            is_useful = lambda g: not rollout.dynamic_sampling or len({s.reward for s in g}) > 1
            useful += [g for g in groups if is_useful(g)]
            others += [g for g in groups if not is_useful(g)]
            if len(useful) >= rollout.prompts:
                break
        chosen = (useful + others)[: rollout.prompts]
        samples = [
            dataclasses.replace(sample, group=index)
            for index, group in enumerate(chosen) for sample in group
        ]
        metrics = {f"reward/{name}": n - failed[name] for name, n in self._rewards.counts.items()}
        metrics["rollout/discarded_groups"] = len(useful) + len(others) - len(chosen)
        stats = scheduler.stats.since(before)
        metrics["rollout/occupancy"] = stats.occupancy
        metrics["rollout/preempted"] = stats.preempted
        if any(self._config.engine.retention):
            metrics["rollout/evicted"] = stats.evicted
        if self._config.engine.max_draft:
            metrics["rollout/draft_acceptance"] = stats.accepted / max(stats.drafted, 1)
        prompts = stats.prefilled + stats.shared + stats.cached
        metrics["rollout/shared_prompt_ratio"] = stats.shared / max(prompts, 1)
        metrics["rollout/cached_prompt_tokens"] = stats.cached
        return samples, metrics

    def rest(self) -> None:
        if self._scheduler is not None:
            self._scheduler.rest()

    def get_state(self) -> dict[str, Any]:
        return {"batches": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state["batches"])

    def facts(self) -> dict[str, Any]:
        facts = {} if self._scheduler is None else self._scheduler.facts()
        return self.get_state() | {f"scheduler.{name}": fact for name, fact in facts.items()}

    def _sample_groups(self, tag) -> list[list[Sample]]:
        with self._timer("data"):
            records = processes.gather(next(self._batches))
        size = self._config.rollout.group_size
        samplings = [self._sampling] * size + [self._greedy] * self._with_greedy
        requests = [
            Request(f"{tag[0]}/{tag[1]}/{i}/{record['id']}/{g}", ids, self._config.seed, sampling)
            for i, record in enumerate(records)
            for ids in [self._prompter.ids(record)]
            for g, sampling in enumerate(samplings)
        ]
        with self._timer("rollout"):
            trajectories = run(self._scheduler, requests, pulse=self._pulse)
        with self._timer("reward"):
            repeated = [record for record in records for _ in samplings]
            texts = [self._prompter.tokenizer.decode(t.tokens) for t in trajectories]
            scored = self._rewards.components(texts, repeated)
        samples = [
            self._sample(*sample)
            for sample in zip(trajectories, repeated, texts, scored, strict=True)
        ]
        groups = [samples[i : i + len(samplings)] for i in range(0, len(samples), len(samplings))]
        if self._with_greedy:
            groups = [
                [dataclasses.replace(s, greedy_reward=group[-1].reward) for s in group[:-1]]
                for group in groups
            ]
        return groups

    def _sample(self, trajectory, record, text, components) -> Sample:
        rollout, score = self._config.rollout, sum(components.values())
        if rollout.overlong_buffer:
            if "overlong" in components:
                raise ValueError(
                    "the reward has a component 'overlong', which is the name of the penalty that "
                    "rollout.overlong_buffer adds; give it another one"
                )
            components = components | {"overlong": soft_overlong_penalty(
                len(trajectory.tokens), rollout.max_new_tokens, rollout.overlong_buffer
            )}
        return Sample(
            trajectory, record, text, score, sum(components.values()), group=0,
            components=components,
        )
