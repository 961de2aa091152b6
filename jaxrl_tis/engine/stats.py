"""Counts and times of a scheduler."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass
class Stats:
    """Counts since the scheduler was made.

    Attributes:
      calls: decode calls.
      tokens: sampled tokens.
      busy: decode steps in which a slot sampled a token, summed over slots.
      slot_steps: decode steps times all slots.
      drafted: tokens of drafts; verified: those compared with a sampled token; accepted: equal to it.
      prefilled: prompt tokens that were computed.
      shared: prompt tokens whose pages another sample of the group computes.
      cached: tokens of prompts and earlier turns that were cache hits.
      preempted: sequences that lost their pages to older ones.
      evicted: pages that `retention` dropped.
      engine_seconds: seconds in the engine or waiting for it.
      seconds: seconds in `step`.
      environment_seconds: seconds that episodes had the sampler wait for an environment or a
        harness.
      sessions: sessions of a harness that ended; session_calls: their answered calls.
      session_retries: calls that repeated an earlier one; restarted_sessions: begun anew.
      forks: rows of sessions beside the longest; forked_tokens: their sampled tokens;
        realigned_tokens: sampled tokens that a later prompt changed.
    """

    calls: int = 0
    tokens: int = 0
    busy: int = 0
    slot_steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    prefilled: int = 0
    shared: int = 0
    cached: int = 0
    preempted: int = 0
    evicted: int = 0
    engine_seconds: float = 0.0
    seconds: float = 0.0
    environment_seconds: float = 0.0
    sessions: int = 0
    session_calls: int = 0
    session_retries: int = 0
    restarted_sessions: int = 0
    forks: int = 0
    forked_tokens: int = 0
    realigned_tokens: int = 0

    def add_call(self, is_drawn_kb: np.ndarray) -> None:
        """Counts a decode call.

        Args:
          is_drawn_kb: [K,B] bool, the slots that sampled a token in each decode step.
        """
        self.calls += 1
        self.busy += int(is_drawn_kb.sum())
        self.slot_steps += int(is_drawn_kb.any(axis=1).sum()) * is_drawn_kb.shape[1]

    def add_drafts(self, *counts_b: np.ndarray) -> None:
        """Counts the tokens of the drafts of a call: drafted, verified and accepted ones of each slot [B]."""
        drafted, verified, accepted = (int(count_b.sum()) for count_b in counts_b)
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted

    @property
    def occupancy(self) -> float:
        """The fraction of slot steps that sampled a token."""
        return self.busy / max(self.slot_steps, 1)

    @property
    def host_share(self) -> float:
        """The fraction of `seconds` outside the engine."""
        return 1 - self.engine_seconds / max(self.seconds, 1e-9)

    def counts(self) -> dict[str, int]:
        """Returns the counts without the seconds."""
        return {n: x for n, x in dataclasses.asdict(self).items() if not n.endswith("seconds")}

    @classmethod
    def sum(cls, parts: Iterable["Stats"]) -> "Stats":
        """Adds up the counts of several schedulers."""
        return cls(*map(sum, zip(*map(dataclasses.astuple, [cls(), *parts]), strict=True)))

    def since(self, before: "Stats") -> "Stats":
        """Returns the counts since an earlier copy."""
        pairs = zip(*map(dataclasses.astuple, (self, before)), strict=True)
        return Stats(*(now - old for now, old in pairs))
