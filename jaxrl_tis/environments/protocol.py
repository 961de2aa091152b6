"""What an environment is: a class with `reset` and `step`, made anew for each episode.

This file imports the standard library only, because environments run in the process of
data/confined.py. docs/environments.md explains how to write one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, Any]]  # each {"role": text, "content": text}, other keys allowed


@dataclass(frozen=True)
class Step:
    """The environment's reply to one answer.

    Attributes:
        observation: the text or messages that the policy reads before its next answer. Nobody reads
            the observation of a last step: of one with is_done, or at task.max_turns. It may be
            anything there.
        reward: of this turn, a finite number; None for no reward. The reward of an episode is the
            sum over its turns.
        is_done: whether the episode ends here.
        metrics: finite numbers by name, none of them called "score": that is the reward. An episode
            has the metrics of its last step with any.
    """

    observation: str | Messages
    reward: float | None = None
    is_done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Interface of an environment; a class needs no base class.

    An instance plays one episode. It has to be *repeatable*: equal parameters, example, seed and
    answers give equal observations. Its state is never saved. After a restart another instance
    repeats the answers so far, and the episode fails if an observation differs. Take random numbers
    from `seed`, never from the clock, a process id or an unseeded generator.

    The episodes of a group have one example, one seed and one prompt, so their rewards are
    comparable.

    An exception of any method but `close` fails the episode; its reward is then unknown, not 0. The
    module is imported once per process, and the process plays many episodes, one call at a time.

    A class may also have a class method `prepare(**params)`. Each process calls it once, before its
    first episode, for what all episodes share, such as an index. An exception refuses the run.
    """

    def __init__(self, *, seed: int, **params: Any): ...

    def reset(self, example: dict[str, Any]) -> str | Messages:
        """Returns the prompt, text or messages, of an example of the task, own_data.md."""
        ...

    def step(self, answer: str, is_cut: bool = False) -> Step:
        """Takes the policy's answer of one turn, without special tokens.

        `is_cut` is optional: a method with a parameter of this name learns by it whether the answer
        was cut at rollout.max_new_tokens or task.max_context_tokens.
        """
        ...

    def close(self) -> None:
        """Frees the resources of the episode. Optional. Called once, also after an exception; not
        called if the process was killed."""
        ...
