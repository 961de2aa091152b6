"""Plays episodes: sequences of several turns, between which an environment answers.

One episode goes through these functions of `EpisodeScheduler`:

1. `add` gives the request to the scheduler. `rollout.max_new_tokens` bounds one
   turn, and task.max_context_tokens the whole episode.
2. When the turn has ended, `_think` sends its text to the pool of environments, with all answers
   before it. The engine samples other sequences meanwhile.
3. `_answered` takes the reply. The episode ends, or `Scheduler.extend` goes on with the reply's
   tokens, which the policy did not choose.
4. `step` returns the episode as one record when it has ended.

An episode's state is its record alone. An interrupted episode is an aborted record. Its request
continues from there, at another scheduler as well, because the environment repeats the answers in
the record (`environments/pool.py`).
"""

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.engine.records import JOINS, OUTCOMES, Request, SamplingParams, Trajectory, cut
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.environments.continuity import Suffixes
from jaxrl_tis.environments.pool import Call, Lent, Pool, Reply, digest
from jaxrl_tis.environments.protocol import Step
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.rollouts.prompts import Prompt
from jaxrl_tis.rollouts.turn_scheduler import TurnScheduler
from jaxrl_tis.runtime import processes

PULSE_SECONDS = 0.5  # longest wait for a reply, if the sampler has nothing else to do
OPEN_AT_ONCE = 256  # environments that are made for their prompt alone
CACHED = 512  # prompts whose ids are kept; the episodes of a group have one
FAULTS = {"errors": "failed", "timeouts": "timeout"}  # of a reply -> outcome of the episode


def environment_seed(seed: int, example: Mapping[str, Any]) -> int:
    """Returns the seed of an example's environments. All samples of a group have the same one."""
    text = f"{seed} {example['id']}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Openings:
    """Reads the prompts of examples: the first observations of their environments.

    Args:
      make_pool: starts or lends the pool, when the first prompt is read.
      seed: config.seed.
    """

    def __init__(self, make_pool: Callable[[], Pool | Lent], seed: int):
        self._make_pool, self._seed = make_pool, seed
        self._pool: Pool | Lent | None = None

    def __call__(
        self, examples: Sequence[dict[str, Any]], heartbeat: Callable[[], None] = lambda: None
    ) -> list[Prompt | ValueError]:
        """Returns the prompt of each example, or the reason why it has none. Shows the progress of
        several.

        Raises:
          ValueError: the first of several environments hangs, as all others would.
        """
        is_shown = len(examples) > 1 and processes.is_first()
        title = "prompts of the environment"
        with Progress(len(examples), title, is_shown=is_shown) as progress:
            opened = lambda some: self._opened(some, heartbeat, progress.update)
            replies = opened(examples[:1])
            if len(examples) > 1 and replies[0].fault == "timeouts":
                raise ValueError(f"the environment has no prompt: {replies[0].error}")
            for start in range(1, len(examples), OPEN_AT_ONCE):
                replies += opened(examples[start : start + OPEN_AT_ONCE])
        failed = lambda reply: ValueError(f"its environment has no prompt: {reply.error}")
        return [failed(r) if r.step is None else r.step.observation for r in replies]

    def _opened(
        self, examples: Sequence[dict[str, Any]], heartbeat: Callable[[], None],
        count: Callable[[int], None],
    ) -> list[Reply]:
        self._pool = self._pool or self._make_pool()
        for i, example in enumerate(examples):
            self._pool.submit(
                Call(f"{i}", example, environment_seed(self._seed, example), (), ())
            )
        found: dict[str, Reply] = {}
        while len(found) < len(examples):
            replies = self._pool.ready(PULSE_SECONDS)
            found |= {reply.id: reply for reply in replies}
            count(len(replies))
            heartbeat()
        self._pool.forget(found)
        return [found[f"{i}"] for i in range(len(examples))]

    def close(self) -> None:
        """Closes the pool; a later call makes another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


@dataclasses.dataclass
class Episode:
    """An episode that has not ended.

    Attributes:
      request: as it was added.
      answers: the texts of the turns that the environment has got.
      cuts: whether each of these turns was cut at a limit of tokens.
      digests: of the prompt and the observations, in order; "" for those that this scheduler has
        not seen.
      rewards: the reward of each turn that the environment has answered.
      metrics: the last ones of the environment.
      joins: of the record.
      ended: the record up to the turn that the environment answers; None while the engine samples.
      is_compared: the environment has given the prompt and the observations of the record here.
      is_cancelled: nobody wants it; it ends with its turn.
    """

    request: Request
    answers: list[str]
    cuts: list[bool]
    rewards: list[float]
    metrics: dict[str, float]
    digests: list[str]
    joins: list[str] = dataclasses.field(default_factory=list)
    ended: Any = None
    is_compared: bool = False
    is_cancelled: bool = False

    def record(self, trajectory: Trajectory, **changes: Any) -> Trajectory:
        """Returns the record with what the environment has said so far."""
        rewards = np.array(self.rewards, np.float32)
        return dataclasses.replace(
            trajectory, turn_rewards=rewards, metrics=dict(self.metrics), joins=tuple(self.joins),
            **changes,
        )


class EpisodeScheduler(TurnScheduler):
    """A scheduler of episodes.

    Args:
      scheduler: samples the turns.
      make_pool: starts or lends the environments' processes, when the first turn has ended.
      suffixes: the token ids between two turns.
      decode: tokens -> text, without special tokens.
      prompt_ids: the prompt of an environment -> its token ids.
      max_turns: most turns of an episode.
      options: of TurnScheduler. With on_fork "refuse" an episode fails where a render by the chat
        template would fork.
    """

    def __init__(
        self, scheduler: Scheduler, make_pool: Callable[[], Pool | Lent], suffixes: Suffixes,
        decode: Callable[[Sequence[int]], str], prompt_ids: Callable[[Prompt], np.ndarray], *,
        max_turns: int, **options: Any,
    ):
        super().__init__(scheduler, **options)
        self._suffixes, self._decode, self._max_turns = suffixes, decode, max_turns
        self._prompt_ids = functools.lru_cache(CACHED)(lambda text: prompt_ids(json.loads(text)))
        self._make_pool = make_pool
        self._pool: Pool | Lent | None = None
        self._episodes: dict[str, Episode] = {}
        self._thinking: dict[str, None] = {}  # ids, in the order of their calls

    # For callers

    @property
    def pending(self) -> int:
        """The number of requests that have not been returned yet."""
        return self._scheduler.pending + len(self._thinking) + len(self._ended)

    def _add(self, request: Request) -> None:
        """An episode whose `partial` ends with a whole turn goes on with the environment's answer."""
        if request.id in self._episodes:
            raise ValueError(f"request {request.id}: another live request has this id")
        partial, sampling = request.partial, request.sampling
        if partial is None or not len(partial.tokens):
            room = min(sampling.max_tokens, self._max_length - len(request.prompt))
            self._scheduler.add(
                dataclasses.replace(request, sampling=_bounded(sampling, room), partial=None)
            )
            self._episodes[request.id] = Episode(request, [], [], [], {}, [""])
            return
        rewards = partial.turn_rewards.tolist()
        answers = [self._answer(partial, turn) for turn in range(len(rewards))]
        cuts = [_is_cut(partial, turn, sampling.stop_ids) for turn in range(len(rewards))]
        unseen = [""] * (1 + len(answers))
        episode = Episode(
            request, answers, cuts, rewards, dict(partial.metrics), unseen, list(partial.joins)
        )
        most = self._turn_end(partial, sampling)
        is_stopped = partial.tokens[-1] in sampling.stop_ids
        if partial.mask[-1] and (is_stopped or len(partial.tokens) >= most):
            self._episodes[request.id] = episode
            reason = "stop" if is_stopped else "length"  # of the turn, which was then interrupted
            self._think(episode, dataclasses.replace(partial, stop_reason=reason))
            return
        self._scheduler.add(dataclasses.replace(request, sampling=_bounded(sampling, most)))
        self._episodes[request.id] = episode

    def abort(self, request_id: str) -> None:
        """Ends a request, see `Scheduler.abort`."""
        episode = self._episodes.get(request_id)
        if episode is not None and request_id in self._thinking:
            self._ended.append(self._paused(episode, episode.ended))
            return
        self._scheduler.abort(request_id)
        if episode is not None:
            episode.is_cancelled = True  # its turn may have ended by itself in the last call

    def _aborted(self, paused: list[Trajectory]) -> list[Trajectory]:
        ended = []
        thinking = [self._episodes[id].ended for id in self._thinking]
        for trajectory in paused + thinking:
            episode = self._episodes.get(trajectory.id)
            ended.append(trajectory if episode is None else self._paused(episode, trajectory))
        return ended

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Returns the tokens so far of the requests among these that have not ended."""
        thinking = {id: self._episodes[id].ended.tokens for id in request_ids if id in self._thinking}
        return self._scheduler.drawn(request_ids) | thinking

    def records(self) -> list[Trajectory]:
        """Returns the records, as an abort would write them, of all sequences that have sampled a
        token. The sequences go on."""
        records = []
        for trajectory in self._scheduler.records():
            episode = self._episodes.get(trajectory.id)
            records.append(trajectory if episode is None else episode.record(trajectory))
        thinking = [self._episodes[id] for id in self._thinking]
        return records + [e.record(e.ended, stop_reason="abort") for e in thinking]

    def sync_digest(self) -> dict[str, Any]:
        """Returns everything that decides the next step, by name, see `Scheduler.sync_digest`."""
        turns = {id: len(episode.answers) for id, episode in self._episodes.items()}
        return self._scheduler.sync_digest() | {"thinking": list(self._thinking), "turns": turns}

    def close(self) -> None:
        """Closes the pool of the environments, and ends the scheduler's thread."""
        if self._pool is not None:
            self._pool.close()
        super().close()

    # One step

    def step(self) -> list[Trajectory]:
        """Makes one step of the scheduler if it has work, takes the replies of environments, and
        returns the records that ended."""
        for trajectory in self._scheduler.step() if self._scheduler.pending else ():
            episode = self._episodes.get(trajectory.id)
            if episode is None:
                self._ended.append(trajectory)
            elif trajectory.stop_reason == "abort" or episode.is_cancelled:
                self._ended.append(self._paused(episode, trajectory))
            else:
                self._think(episode, trajectory)
        for reply in self._replies():  # the heartbeat may raise; what has ended is kept
            if (ended := self._answered(reply)) is not None:
                self._ended.append(ended)
        finished, self._ended = self._ended, []
        return finished

    def _think(self, episode: Episode, trajectory: Trajectory) -> None:
        """Sends the last turn of a record to the environment."""
        request, example = episode.request, episode.request.example or {}
        episode.ended = trajectory
        episode.answers.append(self._answer(trajectory, len(episode.answers)))
        episode.cuts.append(trajectory.stop_reason == "length")
        self._thinking[request.id] = None
        self._pool = self._pool or self._make_pool()
        self._pool.submit(Call(
            request.id, example, environment_seed(request.seed, example),
            tuple(episode.answers), tuple(episode.digests), tuple(episode.cuts),
            is_last=len(episode.answers) >= self._max_turns,
        ))

    def _replies(self) -> list[Reply]:
        """Returns the replies that are there; with `waits` those to all calls, in the order of the
        calls. It waits for one if the scheduler has nothing to do."""
        if not self._thinking:
            return []
        start, found = time.perf_counter(), {}
        wait = PULSE_SECONDS if self._waits or not self._scheduler.pending else 0.0
        pool: Any = self._pool  # which an episode has started
        while True:
            for reply in pool.ready(wait):
                if reply.id in self._thinking and reply.answers == len(self._episodes[reply.id].answers):
                    found[reply.id] = reply  # others are of calls that were aborted
            if not self._waits or len(found) == len(self._thinking):
                break
            self._heartbeat()
        self.stats.environment_seconds += time.perf_counter() - start
        return [found[id] for id in self._thinking if id in found]

    def _answered(self, reply: Reply) -> Trajectory | None:
        """Goes on with an episode. Returns its record if it has ended."""
        episode = self._episodes[reply.id]
        trajectory, episode.ended = episode.ended, None
        del self._thinking[reply.id]
        if reply.fault:
            return self._failed(episode, trajectory, FAULTS[reply.fault], reply.error)
        if not episode.is_compared:
            if differs := self._differs(episode, trajectory, reply):
                why = f"the environment is not repeatable: {differs} differs from that of the record"
                return self._failed(episode, trajectory, "failed", why)
            episode.is_compared = True
            episode.digests = [digest(Step(text)) for text in reply.observations[:-1]]
        step: Any = reply.step
        episode.digests.append(reply.digest)
        episode.rewards.append(math.nan if step.reward is None else step.reward)
        episode.metrics = dict(step.metrics) or episode.metrics
        if step.is_done:
            return self._finish(episode, trajectory, "overlong" if any(episode.cuts) else "done")
        if len(episode.answers) >= self._max_turns:
            return self._finish(episode, trajectory, "max_turns")
        sampling = episode.request.sampling
        end = None if episode.cuts[-1] else int(trajectory.tokens[-1])
        try:
            suffix = self._suffixes.after(step.observation, end, sampling.stop_ids)
            is_other = self._suffixes.replaces(step.observation, end, sampling.stop_ids)
        except ValueError as error:
            return self._failed(episode, trajectory, "failed", f"{error}")
        if not suffix:
            return self._failed(episode, trajectory, "failed", "an observation has no tokens")
        # A turn keeps its only token: a row needs one of each turn.
        is_only = np.sum(trajectory.mask & (trajectory.turn == trajectory.turn[-1])) == 1
        kept = len(trajectory.tokens) - (is_other and not is_only)
        length = kept + len(suffix)
        room = self._max_length - len(trajectory.prompt) - length
        if room < 1:
            return self._finish(episode, trajectory, "overlong")
        join = self._suffixes.join(episode.answers, reply.observations[1:])
        join = "fork" if is_other and is_only else join
        if join == "fork" and self._on_fork == "refuse":
            why = "the chat template rewrites earlier turns, and rollout.on_fork is 'refuse'"
            return self._failed(episode, trajectory, "failed", why)
        if kept < len(trajectory.tokens):
            trajectory, join = cut(trajectory, kept), "replace"
        episode.joins.append(join)
        most = length + min(sampling.max_tokens, room)
        self._scheduler.extend(episode.record(trajectory), suffix, _bounded(sampling, most))
        return None

    def _differs(self, episode: Episode, trajectory: Trajectory, reply: Reply) -> str:
        """Returns what the environment has said here otherwise than in the record; "" for
        nothing."""
        stop_ids = episode.request.sampling.stop_ids
        try:
            prompt = self._prompt_ids(json.dumps(reply.observations[0]))
        except ValueError:
            prompt = np.zeros(0, np.int32)
        if not np.array_equal(prompt, trajectory.prompt):
            return "the prompt"
        for turn, observation in enumerate(reply.observations[1 : reply.answers], 1):
            sampled = trajectory.tokens[trajectory.mask & (trajectory.turn == turn - 1)]
            given = trajectory.tokens[~trajectory.mask & (trajectory.turn == turn)]
            end = int(sampled[-1]) if sampled[-1] in stop_ids else None
            try:
                suffix = self._suffixes.after(observation, end, stop_ids)
            except ValueError:
                return "an observation"
            if given.tolist() != list(suffix):
                return "an observation"
        return ""

    def _failed(
        self, episode: Episode, trajectory: Trajectory, outcome: str, error: str
    ) -> Trajectory:
        """Ends an episode whose environment failed on the last turn."""
        episode.rewards = [*episode.rewards[: len(episode.answers) - 1], math.nan]
        return self._finish(episode, dataclasses.replace(trajectory, error=error), outcome)

    def _finish(self, episode: Episode, trajectory: Trajectory, outcome: str) -> Trajectory:
        """Returns the record of an episode that has ended. A bound on turns or tokens counts as
        the stop reason "length", the environment's end as "stop"."""
        reasons = {"done": "stop", "max_turns": "length", "overlong": "length"}
        reason = reasons.get(outcome, trajectory.stop_reason)
        self._forget(episode)
        return episode.record(trajectory, outcome=outcome, stop_reason=reason)

    def _paused(self, episode: Episode, trajectory: Trajectory) -> Trajectory:
        """Returns the record of an episode that another request may continue."""
        self._forget(episode)
        return episode.record(trajectory, stop_reason="abort")

    def _forget(self, episode: Episode) -> None:
        id = episode.request.id
        del self._episodes[id]
        self._thinking.pop(id, None)
        if self._pool is not None:  # a continued episode may end before its first call
            self._pool.forget([id])

    def _answer(self, trajectory: Trajectory, turn: int) -> str:
        """Returns the text of a turn, without special tokens."""
        return self._decode(trajectory.tokens[trajectory.mask & (trajectory.turn == turn)])

    def _turn_end(self, partial: Trajectory, sampling: SamplingParams) -> int:
        """Returns the most response tokens that a record has when its last turn ends."""
        sampled = partial.mask & (partial.turn == partial.turn[-1])
        start = len(partial.tokens) - int(sampled.sum())
        return start + min(sampling.max_tokens, self._max_length - len(partial.prompt) - start)


def _is_cut(trajectory: Trajectory, turn: int, stop_ids: Collection[int]) -> bool:
    """Whether a turn, which another one follows, was cut at a limit of tokens."""
    sampled = trajectory.tokens[trajectory.mask & (trajectory.turn == turn)]
    return sampled[-1] not in stop_ids and trajectory.joins[turn : turn + 1] != ("replace",)


def _bounded(sampling: SamplingParams, most: int) -> SamplingParams:
    return dataclasses.replace(sampling, max_tokens=most)


def episode_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the number of episodes with each outcome, the share of response tokens that
    environments gave (if there are tokens), and the number of turns after which a render by the chat
    template would differ from the row; {} without episodes."""
    episodes = [t for t in trajectories if t.outcome]
    if not episodes:
        return {}
    counts = dict.fromkeys(OUTCOMES[1:], 0)
    for trajectory in episodes:
        counts[trajectory.outcome] += 1
    masks = np.concatenate([t.mask for t in episodes])
    joins = [join for t in episodes for join in t.joins]
    return {
        **({"episodes/given_ratio": float(1 - masks.mean())} if len(masks) else {}),
        **{f"episodes/{outcome}": count for outcome, count in counts.items()},
        **({f"episodes/template_{j}s": joins.count(j) for j in JOINS[1:]} if joins else {}),
    }
