"""The queue between samplers and learner: a table of samples with their tokens and rewards.

It follows the control plane of AsyncFlow's TransferQueue (2507.01663) in one process. Each producer
fills a column of the table. A consumer names the columns that it needs, and receives each sample
once, as soon as these columns are filled. The learner receives whole groups.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

Key = tuple[int, int]  # number of the group, of the sample within it


class Full(RuntimeError):
    """The queue holds its maximum number of groups; take some and try again."""


@dataclasses.dataclass
class Entry:
    """A group in the queue.

    Attributes:
      number: of the group, in order of starting.
      deadline: the last batch that may train on the group.
      prompt: the example that its samples answer.
      columns: sample -> column -> value. The group consists of the samples that finish first.
      claimed: (consumer, sample) pairs that were returned by `claim`.
    """

    number: int
    deadline: float
    prompt: Any = None
    columns: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    claimed: set[tuple[str, int]] = dataclasses.field(default_factory=set)


class Queue:
    """Groups of samples between sampling and training.

    Args:
      size: number of samples in a group.
      capacity: largest number of groups; beyond it `add` raises Full.
      needs: consumer -> columns that a sample needs before the consumer may claim it. The column
        "tokens" makes a sample part of its group.
    """

    def __init__(self, size: int, capacity: float, needs: Mapping[str, tuple[str, ...]]):
        self.size, self.capacity, self._needs = size, capacity, dict(needs)
        self.entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, group: int, deadline: float) -> None:
        """Opens a group. Raises ValueError if it is open already, Full if there is no room."""
        if group in self.entries:
            raise ValueError(f"group {group} is in the queue")
        if len(self.entries) >= self.capacity:
            raise Full(f"the queue holds {len(self.entries)} groups, at most {self.capacity}")
        self.entries[group] = Entry(group, deadline)

    def put(self, key: Key, column: str, value: Any) -> bool:
        """Writes a column of a sample. Returns False, and writes nothing, if the group is gone, is
        complete without the sample, or has this column already."""
        group, sample = key
        if group not in self.entries:
            return False
        columns = self.entries[group].columns
        if sample not in columns and (column != "tokens" or len(columns) == self.size):
            return False
        row = columns.setdefault(sample, {})
        if column in row:
            return False
        row[column] = value
        return True

    def get(self, key: Key, column: str) -> Any:
        return self.entries[key[0]].columns[key[1]][column]

    def has_tokens(self, group: int) -> bool:
        """Whether a group has the tokens of all of its samples."""
        return len(self.entries[group].columns) == self.size

    def is_open(self, group: int) -> bool:
        """Whether a group is in the queue and lacks samples."""
        return group in self.entries and not self.has_tokens(group)

    def claim(self, consumer: str) -> list[Key]:
        """Hands out, once, the samples that have what the consumer needs, oldest group first."""
        found = []
        for group in sorted(self.entries):
            entry = self.entries[group]
            for sample in sorted(entry.columns):
                has_all = all(name in entry.columns[sample] for name in self._needs[consumer])
                if has_all and (consumer, sample) not in entry.claimed:
                    entry.claimed.add((consumer, sample))
                    found.append((group, sample))
        return found

    def is_ready(self, group: int, consumer: str) -> bool:
        """Whether all samples of a group have the columns that the consumer needs."""
        rows = self.entries[group].columns.values()
        return self.has_tokens(group) and all(
            name in row for row in rows for name in self._needs[consumer]
        )

    def take(self, groups: Iterable[int]) -> list[Entry]:
        """Removes groups and returns them, their samples in the order of their numbers."""
        taken = []
        for group in groups:
            entry = self.entries.pop(group)
            entry.columns = dict(sorted(entry.columns.items()))
            taken.append(entry)
        return taken
