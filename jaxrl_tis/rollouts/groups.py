"""Groups: makes the requests of an example's samples, and rewarded samples from the sequences."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from jaxrl_tis.data.rewards import SCORE, RewardWorker, Scored, soft_overlong_penalty
from jaxrl_tis.data.signatures import LARGEST
from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import (
    NO_DRAFTER, OF_DRAFTS, Request, SamplingParams, Trajectory, draft_fields,
)
from jaxrl_tis.rollouts import teaching
from jaxrl_tis.rollouts.episodes import FAULTS
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.teaching import Difficulty

OF_OUTCOMES = {outcome: fault for fault, outcome in FAULTS.items()}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished trajectory with its example, its reward and its group in the batch.

    Attributes:
      score: value of the reward function; NaN if unknown.
      reward: `score` plus the overlong penalty; NaN if unknown.
      components: named parts of the reward; NaN for a void part.
      greedy_reward: reward of the greedy response to the same prompt, if an advantage needs it.
      is_failed: the reward function or the environment failed, even if `score` has a substitute.
    """

    trajectory: Trajectory
    example: dict[str, str]
    text: str
    score: float
    reward: float
    group: int
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    greedy_reward: float = math.nan
    is_failed: bool = False


def components(samples: list[Sample]) -> dict[str, np.ndarray]:
    """Returns each reward component, [N]; NaN if the component is void or the reward unknown."""
    names = dict.fromkeys(name for s in samples for name in s.components)
    is_there = lambda sample, name: name in sample.components and not math.isnan(sample.reward)
    value = lambda sample, name: sample.components[name] if is_there(sample, name) else math.nan
    return {name: np.array([value(s, name) for s in samples], np.float32) for name in names}


def is_equal(samples: list[Sample]) -> bool:
    """Whether a group has no learning signal: all known rewards are equal, or fewer than two are
    known."""
    return len({s.reward for s in samples if not math.isnan(s.reward)}) < 2


def are_known(samples: list[Sample]) -> bool:
    """Whether all rewards of a group are known."""
    return not any(math.isnan(s.reward) for s in samples)


def sampling_params(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer, temperature: float, is_filtered: bool
) -> SamplingParams:
    """Returns sampling parameters that stop at the tokenizer's end ids or after max_new_tokens,
    with or without the filters of config.rollout (top_k, top_p, min_p)."""
    rollout = config.rollout
    filters = dict(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)
    return SamplingParams(
        temperature=temperature, stop_ids=tuple(tokenizer.eos_ids),
        max_tokens=rollout.max_new_tokens, **(filters if is_filtered else {}),
    )


def kept_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the share of tokens whose support was too wide to record, and the mean probability
    mass that the filters dropped at such tokens. Their ratios stay below 1 by that mass. {} without
    recorded supports."""
    drawn = [t for t in trajectories if len(t.tokens)]
    if not any(t.kept.shape[-1] for t in drawn):
        return {}
    is_wide = np.concatenate([np.all(t.kept[t.mask] < 0, axis=-1) for t in drawn])
    dropped = np.concatenate([1 - np.exp(t.logp_raw - t.logp_behav)[t.mask] for t in drawn])
    mass = np.where(is_wide, dropped, 0.0).mean()
    # An engine of others does not say a log-prob without its filters.
    known = {} if np.isnan(mass) else {"rollout/kept_overflow_mass": mass}
    return {"rollout/kept_overflow": is_wide.mean()} | known


def reroute_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the share of the choices of experts, among those that a later pass over a token made
    again, that chose another set; {} where none was made again."""
    counts = [t.rerouted for t in trajectories if len(t.rerouted)]
    again, changed = np.sum(counts, axis=0) if counts else (0, 0)
    return {"moe/reroute_rate": changed / again} if again else {}


def draft_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the mean lag of the drafter behind the policy over the tokens with a verified draft, and
    the share of accepted ones from each lag on to twice that: 0, 1, 2 to 3, 4 to 7, ... {} without
    drafts of engine.drafter."""
    drafts = [draft_fields(t) for t in trajectories]
    drafter, accepted = (np.concatenate([d[name] for d in drafts]) for name in OF_DRAFTS)
    # Samplers in threads may have a drafter newer than their weights for a moment.
    lag = np.maximum(np.concatenate([t.version for t in trajectories]) - drafter, 0)
    is_drafted = drafter != NO_DRAFTER
    if not is_drafted.any():
        return {}
    lag, accepted = lag[is_drafted], accepted[is_drafted]
    starts = np.where(lag > 0, 2 ** np.log2(np.maximum(lag, 1)).astype(int), 0)
    shares = {start: accepted[starts == start].mean() for start in np.unique(starts)}
    return {"rollout/drafter_lag": lag.mean()} | {
        f"rollout/draft_acceptance_lag_{start}": share for start, share in shares.items()
    }


def unknown_ids(trajectories: list[Trajectory], tokenizer: Tokenizer) -> dict[str, float]:
    """Counts sampled ids that the tokenizer does not have, from the padding of an embedding. They
    count as tokens of the response and add no text."""
    drawn = [t.tokens for t in trajectories if len(t.tokens)]
    known = np.isin(np.concatenate(drawn), tokenizer.ids) if drawn else np.ones(0)
    return {"rollout/unknown_ids": float(known.size - known.sum())}


def request(
    config: ml_collections.ConfigDict, id: str, prompt: np.ndarray, sampling: SamplingParams,
    example: dict[str, Any],
) -> Request:
    """Returns the request of a sample of an example; with an environment or a harness, of an episode
    or a session."""
    is_played = config.task.environment or config.rollout.harness
    return Request(id, prompt, config.seed, sampling, example=example if is_played else None)


def scores(
    rewards: RewardWorker, texts: Sequence[str], examples: Sequence[dict[str, Any]],
    trajectories: Sequence[Trajectory],
) -> list[Scored]:
    """Returns the reward of each trajectory, of its environment or of the reward function. The
    reward of an episode is the sum of its known turn rewards. It is unknown if the environment
    failed, or gave none to any turn."""
    of_function = [i for i, t in enumerate(trajectories) if not t.outcome]
    scored: list[Any] = [
        _of_episode(rewards, *played) if played[0].outcome else None
        for played in zip(trajectories, texts, examples, strict=True)
    ]
    if any(result is not None and result.is_failed for result in scored):
        rewards.failures.write()
    if of_function:
        chosen = lambda values: [values[i] for i in of_function]
        tokens = [t.tokens for t in chosen(trajectories)]
        results = rewards.results(chosen(texts), chosen(examples), tokens)
        for i, result in zip(of_function, results, strict=True):
            scored[i] = result
    return scored


def _of_episode(
    rewards: RewardWorker, trajectory: Trajectory, text: str, example: dict[str, Any]
) -> Scored:
    failed = functools.partial(rewards.failed, text=text, example=example)
    known = trajectory.turn_rewards[~np.isnan(trajectory.turn_rewards)]
    if trajectory.outcome in OF_OUTCOMES:
        return failed(OF_OUTCOMES[trajectory.outcome], trajectory.error)
    if not len(known) and trajectory.outcome == "done":
        return failed("non_finite", "the environment or harness gave no reward")
    score = float(known.sum(dtype=np.float64)) if len(known) else math.nan
    if len(known) and not abs(score) <= LARGEST:
        return failed("non_finite", "the turns' rewards have no finite sum in float32")
    return Scored(score, trajectory.metrics | {SCORE: score} if trajectory.metrics else {"reward": score})


class Groups:
    """Makes the requests of a group and its rewarded samples.

    Args:
      with_greedy: also generate one response per prompt at temperature 0, the baseline of ReMax.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, prompter: Prompter, rewards: RewardWorker,
        with_greedy: bool,
    ):
        self._config, self._prompter, self._rewards = config, prompter, rewards
        self._with_greedy = with_greedy
        tokenizer, rollout = prompter.tokenizer, config.rollout
        sampling = sampling_params(config, tokenizer, rollout.temperature, is_filtered=True)
        greedy = sampling_params(config, tokenizer, 0.0, is_filtered=False)
        self._alpha = teaching.parse(rollout.alpha) if rollout.teacher else None
        self._difficulty = Difficulty(self._alpha.difficulty if self._alpha else "")
        self._samplings = [sampling] * rollout.group_size + [greedy] * with_greedy

    @property
    def size(self) -> int:
        """The number of requests of a group."""
        return len(self._samplings)

    def requests(
        self, example: dict[str, str], name: str, step: int, redundant: int = 0
    ) -> list[Request]:
        """Returns the requests of an example, including redundant ones. `name` is unique to the group in a
        run and determines the sampling noise; `step` counts the batches before the group's."""
        ids, samplings = self._prompter.ids(example), self._samplings
        if self._alpha is not None and (alpha := self._alpha.at(step)):
            alpha *= self._difficulty.of(example)
            mixed = dataclasses.replace(samplings[0], alpha=alpha)
            size = self._config.rollout.group_size
            samplings = [mixed] * size + samplings[size:]
        return [
            request(self._config, f"{name}/{example['id']}/{g}", ids, sampling, example)
            for g, sampling in enumerate(samplings + samplings[:1] * redundant)
        ]

    def rewarded(
        self, examples: list[dict[str, str]], trajectories: list[Trajectory]
    ) -> list[list[Sample]]:
        """Returns the rewarded groups of these examples; `trajectories` are those of all requests
        in order."""
        repeated = [example for example in examples for _ in self._samplings]
        samples = self.samples(repeated, trajectories)
        return [
            self.group(samples[i : i + self.size]) for i in range(0, len(samples), self.size)
        ]

    def samples(
        self, examples: list[dict[str, str]], trajectories: list[Trajectory]
    ) -> list[Sample]:
        """Returns a rewarded sample for each trajectory and its example. Calls the reward once for
        all samples. An episode's environment has rewarded it."""
        texts = [self._prompter.tokenizer.decode(t.tokens) for t in trajectories]
        scored = scores(self._rewards, texts, examples, trajectories)
        return [
            self._sample(*sample)
            for sample in zip(trajectories, examples, texts, scored, strict=True)
        ]

    def group(self, samples: list[Sample]) -> list[Sample]:
        """Returns the samples of a group that are trained on; drops the greedy one."""
        if not self._with_greedy:
            return samples
        return [dataclasses.replace(s, greedy_reward=samples[-1].reward) for s in samples[:-1]]

    def learned(self, samples: Sequence[Sample]) -> None:
        """Takes the rewards of a group that is trained on: the prompt's difficulty follows them."""
        self._difficulty.add(str(samples[0].example["id"]), [s.reward for s in samples])

    def get_state(self) -> dict[str, Any]:
        """Returns what the requests to come depend on; {} where on nothing."""
        return self._difficulty.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._difficulty.set_state(state)

    @property
    def counts(self) -> dict[str, int]:
        """Number of failed rewards by reason."""
        return self._rewards.counts

    def _sample(self, trajectory, example, text, scored: Scored) -> Sample:
        rollout, components, reward = self._config.rollout, scored.components, scored.score
        if rollout.overlong_buffer:
            if "overlong" in components:
                raise ValueError(
                    "the reward has a component 'overlong', which is the name of the penalty of "
                    "rollout.overlong_buffer; rename the component"
                )
            penalty = soft_overlong_penalty(
                len(trajectory.tokens), rollout.max_new_tokens, rollout.overlong_buffer
            )
            reward, components = reward + penalty, components | {"overlong": penalty}
        return Sample(
            trajectory, example, text, scored.score, reward, group=0, components=components,
            is_failed=scored.is_failed,
        )
