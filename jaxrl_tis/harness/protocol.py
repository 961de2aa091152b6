"""What a harness is: a function that plays one session with any OpenAI-style client.

    def harness(session: Session) -> float | Result

The function may be asynchronous. It sends its calls to `session.base_url` and returns the reward.
This file imports the standard library only. docs/harness.md explains how to write a harness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Session:
    """One run of the agent on one example.

    Attributes:
        id: unique among the sessions of a run.
        example: of the task, own_data.md.
        base_url: of the run's endpoint, for this session alone.
        api_key: of the endpoint.
        model: name of the model.
        seed: of the example and config.seed. The sessions of a group have the same seed.
    """

    id: str
    example: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The end of a session.

    Attributes:
        reward: a finite number; None if it is unknown.
        metrics: finite numbers by name, none of them called "score": that is the reward.
        calls: optional: (token ids, log-probs or None) of each answer that the harness got, in any
            order. The run refuses the session if they differ from its record.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    calls: Sequence[tuple[Sequence[int], Sequence[float] | None]] | None = None
