"""Requests without a slot, and who of them comes next."""

import collections
from collections.abc import Iterator

from jaxrl_tis.engine.policies import Policy
from jaxrl_tis.engine.sequences import Sequence


class Waiting:
    """In the order of a policy, unless somebody was passed over too often.

    Args:
      policy: see policies.POLICIES.
      max_bypass: a request that has seen so many admissions since it began to wait goes first;
        None sets no bound.
      page_size: positions of a page.
    """

    def __init__(self, policy: Policy, max_bypass: int | None, page_size: int):
        self._policy, self._max_bypass, self._size = policy, max_bypass, page_size
        self._sequences: dict[str, Sequence] = {}
        self._keys = collections.Counter[bytes]()
        self.admissions = 0

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of their coming."""
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        prompt = sequence.request.prompt
        base = prompt[: len(prompt) // self._size * self._size] if sequence.count else prompt[:0]
        sequence.key, sequence.base_key = sequence.tokens().tobytes(), base.tobytes()
        self._sequences[sequence.request.id] = sequence
        self._keys.update((sequence.key, sequence.base_key))

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        for key in (sequence.key, sequence.base_key):
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def admit(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.admissions += 1

    def has(self, key: bytes) -> bool:
        """Whether one waits that would start from these tokens."""
        return key in self._keys

    def in_order(self) -> Iterator[Sequence]:
        by_policy = sorted(self, key=self.priority, reverse=True)
        by_age, seen = [], set()
        if self._max_bypass is not None:
            by_age = sorted(self, key=lambda s: (s.admitted_after, s.order), reverse=True)
        while by_policy:
            sequence = (by_age if by_age and self.is_overdue(by_age[-1]) else by_policy).pop()
            if sequence not in seen:
                seen.add(sequence)
                yield sequence

    def priority(self, sequence: Sequence) -> tuple:
        """The smallest comes first."""
        return (self._policy.key(sequence.request, sequence.count), sequence.order)

    def is_overdue(self, sequence: Sequence) -> bool:
        bypassed = self.admissions - sequence.admitted_after
        return self._max_bypass is not None and bypassed >= self._max_bypass
