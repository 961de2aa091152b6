"""Sequences of tokens whose keys lie, or will lie, in pages that several samples share."""

import dataclasses

import numpy as np

from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.sequences import Sequence


@dataclasses.dataclass(eq=False)
class Prefix:
    """Tokens whose keys lie, or will lie, in pages of a shard.

    Attributes:
      key: by which it is found.
      filled: tokens whose keys are there, or in the pages of `base`.
      base: the prefix of its first tokens, whose pages it shares and which is to be filled first.
      waiters: sequences with a slot that start from it once it is filled.
      followers: prefixes whose base it is.
      logps: log-probs of the tokens after the first, as far as it is filled; None unless asked for.
    """

    key: bytes
    tokens: np.ndarray
    shard: int
    pages: list[int]
    filled: int = 0
    base: "Prefix | None" = None
    waiters: list[Sequence] = dataclasses.field(default_factory=list)
    followers: int = 0
    logps: list[np.ndarray] | None = None

    @property
    def is_filled(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def is_idle(self) -> bool:
        return not self.waiters and not self.followers

    def prompt_logps(self) -> np.ndarray:
        """Returns those of all its tokens, float32; NaN for the first."""
        logps = np.concatenate([[np.nan], *self.logps])
        return logps[: len(self.tokens)].astype(np.float32)


class Prefixes:
    """All prefixes; each shard has at most one of the same tokens. A sequence that drew tokens
    before its pages were lost has a prefix of its own, which follows the prefix of the prompt's
    full pages.

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
        """Returns the prefixes that some sequence waits for and that can be filled now."""
        return [
            p for p in self._prefixes.values()
            if not (p.is_idle or p.is_filled) and (p.base is None or p.base.is_filled)
        ]

    def filled(self) -> list[Prefix]:
        """Returns the filled prefixes whose waiting sequences can be put into their slots."""
        return [p for p in self._prefixes.values() if p.waiters and p.is_filled]

    def new_pages(self, sequence: Sequence, shard: int) -> int:
        """Counts the pages that `join` would take."""
        full, rest = divmod(sequence.length, self._size)
        if self.find(sequence.key, shard):
            return int(rest > 0)
        return full - self.shared(sequence, shard) // self._size + 2 * (rest > 0)

    def shared(self, sequence: Sequence, shard: int) -> int:
        """Counts the tokens that the sequence would take over from others."""
        prefixes = (self.find(key, shard) for key in (sequence.key, sequence.base_key))
        return next((len(prefix.tokens) for prefix in prefixes if prefix), 0)

    def join(self, sequence: Sequence, shard: int) -> None:
        """Gives the sequence the pages of its tokens. The last page will be its own copy, unless it
        is full."""
        full, rest = divmod(sequence.length, self._size)
        pages, tokens = self._pages[shard], sequence.tokens()
        base = None
        if sequence.base_key and self.find(sequence.key, shard) is None:
            count = len(sequence.request.prompt) // self._size * self._size
            base = self._prefix(sequence.base_key, tokens[:count], shard)
        prefix = self._prefix(sequence.key, tokens, shard, base, sequence.needs_scores)
        sequence.shard = shard
        sequence.pages = pages.share(prefix.pages[:full]) + pages.allocate(int(rest > 0))
        sequence.page_numbers = list(range(len(sequence.pages)))
        prefix.waiters.append(sequence)

    def _prefix(self, key, tokens, shard, base=None, is_scored=False) -> Prefix:
        """Returns the prefix of these tokens, a new one if there is none yet."""
        if self.find(key, shard) is None:
            pages, shared = self._pages[shard], base.pages if base else []
            own = pages.allocate(-(-len(tokens) // self._size) - len(shared))
            filled = len(base.tokens) if base else 0
            logps = [] if is_scored else None
            new = Prefix(key, tokens, shard, pages.share(shared) + own, filled, base, logps=logps)
            self._prefixes[key, shard] = new
            if base:
                base.followers += 1
        return self._prefixes[key, shard]

    def following(self) -> list[Sequence]:
        """Returns the sequences that wait for a prefix which shares the pages of another."""
        return [s for prefix in self._prefixes.values() if prefix.base for s in prefix.waiters]

    def forget(self) -> None:
        """Hears of new weights: all prefixes are to be filled anew, in other pages where somebody
        may still read the old ones. No sequence may be `following`."""
        for prefix in reversed(list(self._prefixes.values())):
            prefix.filled, prefix.logps = 0, prefix.logps and []
            if prefix.is_idle:
                self._drop(prefix)

    def drop(self, key: bytes) -> None:
        """Drops the prefixes of these tokens that nobody waits for."""
        for shard in range(len(self._pages)):
            prefix = self.find(key, shard)
            if prefix and prefix.is_idle:
                self._drop(prefix)

    def reclaim(self, shard: int, keep: tuple[bytes, ...]) -> bool:
        """Drops one prefix that nobody waits for, but none of the tokens `keep`; False if there is
        no such prefix."""
        idle = [
            prefix for (key, s), prefix in self._prefixes.items()
            if s == shard and key not in keep and prefix.is_idle
        ]
        if idle:
            self._drop(idle[0])
        return bool(idle)

    def _drop(self, prefix: Prefix) -> None:
        self._pages[prefix.shard].release(prefix.pages)
        del self._prefixes[prefix.key, prefix.shard]
        if prefix.base:
            prefix.base.followers -= 1
