"""The queue of sequences without a slot, in the order in which they are admitted."""

import collections
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from jaxrl_tis.engine.policies import Policy
from jaxrl_tis.engine.records import Request
from jaxrl_tis.engine.sequences import Sequence

SCORED = b"s"  # makes a key that is no row of tokens


class WaitQueue:
    """Orders waiting sequences by a policy; a sequence that has waited too long goes first.

    Both orders are kept sorted from call to call: adding or removing a sequence is a binary search.

    Args:
      policy: see policies.POLICIES.
      max_wait_admissions: admissions after which a waiting sequence is overdue; None sets no bound.
      page_size: positions of a page.

    Attributes:
      admissions: the number of admissions so far.
    """

    def __init__(self, policy: Policy, max_wait_admissions: int | None, page_size: int):
        self._policy, self._max_wait_admissions, self._size = policy, max_wait_admissions, page_size
        # By number of arrival, in the order of `add`: all sequences, those that kept their pages,
        # those of each prompt, and those whose priority may have changed.
        self._sequences: dict[int, Sequence] = {}
        self._parked: dict[int, Sequence] = {}
        self._of_prompt = collections.defaultdict[bytes, dict[int, Sequence]](dict)
        self._unranked: dict[int, Sequence] = {}
        self._priorities: dict[int, tuple] = {}
        self._by_policy: list[tuple] = []  # (policy's key, arrival), sorted
        self._by_age: list[tuple] = []  # (admissions before it began to wait, arrival), sorted
        self._keys = collections.Counter[bytes]()  # how many sequences would share each prefix
        self.admissions = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all waiting sequences in the order in which they were added."""
        return iter(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, and sets the keys of the prefixes that it would share."""
        prompt, order = sequence.request.prompt, sequence.order
        base = prompt[: len(prompt) // self._size * self._size] if sequence.count else prompt[:0]
        key = sequence.tokens().tobytes() + SCORED * sequence.needs_scores
        sequence.key, sequence.base_key = key, base.tobytes()
        self._keys.update((sequence.key, sequence.base_key))
        self._sequences[order] = self._unranked[order] = sequence
        self._of_prompt[prompt.tobytes()][order] = sequence
        if sequence.pages:
            self._parked[order] = sequence
        insort(self._by_age, _age(sequence))

    def remove(self, sequence: Sequence) -> None:
        order, prompt = sequence.order, sequence.request.prompt.tobytes()
        del self._sequences[order], self._of_prompt[prompt][order]
        if not self._of_prompt[prompt]:
            del self._of_prompt[prompt]
        self._parked.pop(order, None)
        self._unranked.pop(order, None)
        _take(self._by_age, _age(sequence))
        if order in self._priorities:
            _take(self._by_policy, self._priorities.pop(order))
        for key in (sequence.key, sequence.base_key):
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def admit(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.admissions += 1

    def ended(self, request: Request, drawn: int | None) -> None:
        """Reports the end of a request to the policy, see Policy.removed."""
        if self._policy.removed(request, drawn):
            for order, sequence in self._of_prompt.get(request.prompt.tobytes(), {}).items():
                self._unranked.pop(order, None)  # ranked in the order in which they were added
                self._unranked[order] = sequence

    def has(self, key: bytes) -> bool:
        """Whether a waiting sequence would share the prefix with this key."""
        return key in self._keys

    def parked(self, shard: int) -> list[Sequence]:
        """Returns the waiting sequences that kept pages in this shard."""
        return [s for s in self._parked.values() if s.shard == shard]

    def in_order(self) -> Iterator[Sequence]:
        """Yields each waiting sequence once, in the order of admission. Meanwhile sequences may be
        removed and added again, but no new ones."""
        seen = set()
        by_policy: tuple = ()  # sorts before all
        by_age: tuple = ()
        while True:
            self._rank()
            old = _after(self._by_age, by_age)
            is_over = old is not None and self._is_over(old[0])
            entry = old if is_over else _after(self._by_policy, by_policy)
            if entry is None:
                return
            by_policy, by_age = (by_policy, entry) if is_over else (entry, by_age)
            order = entry[-1]
            if order not in seen:
                seen.add(order)
                yield self._sequences[order]

    def _rank(self) -> None:
        for order, sequence in self._unranked.items():
            old, new = self._priorities.get(order), self.priority(sequence)
            if new != old:
                if old:
                    _take(self._by_policy, old)
                insort(self._by_policy, new)
                self._priorities[order] = new
        self._unranked.clear()

    def priority(self, sequence: Sequence) -> tuple:
        """Returns the sort key of a sequence in the policy's order; the smallest comes first."""
        return (self._policy.key(sequence.request, sequence.count), sequence.order)

    def is_overdue(self, sequence: Sequence) -> bool:
        """Whether `max_wait_admissions` admissions have passed since the sequence began to wait."""
        return self._is_over(sequence.admitted_after)

    def _is_over(self, admitted_after: int) -> bool:
        bypassed = self.admissions - admitted_after
        return self._max_wait_admissions is not None and bypassed >= self._max_wait_admissions


def _age(sequence: Sequence) -> tuple:
    return (sequence.admitted_after, sequence.order)


def _after(entries: list[tuple], last: tuple) -> tuple | None:
    """Returns the entry of a sorted list that follows `last`."""
    index = bisect_right(entries, last)
    return entries[index] if index < len(entries) else None


def _take(entries: list[tuple], entry: tuple) -> None:
    """Removes an entry from a sorted list."""
    del entries[bisect_left(entries, entry)]
