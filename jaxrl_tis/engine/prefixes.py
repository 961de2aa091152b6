"""Sequences of tokens whose keys lie, or will lie, in pages that several samples share."""

import dataclasses

import numpy as np

from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.sequences import Sequence


@dataclasses.dataclass(eq=False)
class Prefix:
    """Tokens in pages of a shard.

    Attributes:
      filled: tokens whose keys are there.
      waiters: sequences with a slot that start from it once it is filled.
    """

    tokens: np.ndarray
    shard: int
    pages: list[int]
    filled: int = 0
    waiters: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        return self.filled == len(self.tokens)


class Prefixes:
    """At most one prefix of the same tokens in each shard.

    Args:
      pages: of each shard.
      size: positions of a page.
    """

    def __init__(self, pages: list[Pages], size: int):
        self._pages, self._size = pages, size
        self._prefixes: dict[tuple[bytes, int], Prefix] = {}

    def find(self, key: bytes, shard: int) -> Prefix | None:
        return self._prefixes.get((key, shard))

    def unfilled(self) -> list[Prefix]:
        """Those that somebody waits for."""
        return [p for p in self._prefixes.values() if p.waiters and not p.is_filled]

    def filled(self) -> list[Prefix]:
        """Those that somebody waits for."""
        return [p for p in self._prefixes.values() if p.waiters and p.is_filled]

    def new_pages(self, sequence: Sequence, shard: int) -> int:
        """How many pages `join` takes."""
        full, rest = divmod(sequence.length, self._size)
        is_new = self.find(sequence.key, shard) is None
        return is_new * (full + (rest > 0)) + (rest > 0)

    def join(self, sequence: Sequence, shard: int) -> int:
        """Gives the sequence the pages of its tokens, of which the last, unless it is full, will
        be its own copy; returns how many tokens it takes over from others."""
        full, rest = divmod(sequence.length, self._size)
        pages, prefix = self._pages[shard], self.find(sequence.key, shard)
        taken_over = 0 if prefix is None else sequence.length
        if prefix is None:
            prefix = Prefix(sequence.tokens(), shard, pages.allocate(full + (rest > 0)))
            self._prefixes[sequence.key, shard] = prefix
        sequence.shard = shard
        sequence.pages = pages.share(prefix.pages[:full]) + pages.allocate(int(rest > 0))
        sequence.page_numbers = list(range(len(sequence.pages)))
        prefix.waiters.append(sequence)
        return taken_over

    def forget(self) -> None:
        """New weights: all are to be filled anew, in other pages where somebody may read them."""
        for prefix in list(self._prefixes.values()):
            prefix.filled = 0
            if not prefix.waiters:
                self._drop(prefix)

    def drop(self, key: bytes) -> None:
        """Those of these tokens that nobody waits for."""
        for shard in range(len(self._pages)):
            prefix = self.find(key, shard)
            if prefix and not prefix.waiters:
                self._drop(prefix)

    def reclaim(self, shard: int, keep: bytes | None) -> bool:
        """Drops one that nobody waits for, but not of the tokens `keep`; False if there is none."""
        idle = [
            prefix for (key, s), prefix in self._prefixes.items()
            if s == shard and key != keep and not prefix.waiters
        ]
        if idle:
            self._drop(idle[0])
        return bool(idle)

    def _drop(self, prefix: Prefix) -> None:
        self._pages[prefix.shard].release(prefix.pages)
        del self._prefixes[prefix.tokens.tobytes(), prefix.shard]
