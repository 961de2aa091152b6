"""Token prefixes with pages that several samples share."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.sequences import Sequence


@dataclasses.dataclass(eq=False)
class Prefix:
    """Tokens and the pages of a shard that hold, or will hold, their keys and values.

    Attributes:
      key: identifies the prefix within its shard.
      page_keys: content keys of its full pages.
      filled: the number of tokens whose keys are in its pages or in the pages of `base`.
      found: the number of its pages that were cache hits.
      base: the prefix of its first tokens, whose pages it shares. It is filled first.
      waiters: sequences with a slot that are inserted once it is filled.
      followers: the number of prefixes whose base it is.
      logps: log-probs of the tokens after the first, as far as it is filled; None unless requested.
    """

    key: bytes
    page_keys: list[bytes]
    tokens: np.ndarray
    shard: int
    pages: list[int]
    filled: int = 0
    base: "Prefix | None" = None
    waiters: list[Sequence] = dataclasses.field(default_factory=list)
    followers: int = 0
    found: int = 0
    logps: list[np.ndarray] | None = None

    @property
    def is_filled(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def is_idle(self) -> bool:
        return not self.waiters and not self.followers

    def prompt_logps(self) -> np.ndarray:
        """Returns the log-probs of all its tokens, float32; NaN for the first."""
        logps = np.concatenate([[np.nan], *(self.logps or ())])
        return logps[: len(self.tokens)].astype(np.float32)


class Prefixes:
    """All prefixes; each shard has at most one of the same tokens.

    A sequence that has tokens after its prompt has a prefix of its own. This prefix follows the
    prefix of the prompt's full pages, unless more pages of its tokens are cached. A new prefix
    starts with the cached pages that hold its first tokens (prefix caching), and only the rest is
    filled.

    Args:
      pages: the pages of each shard.
      size: positions of a page.
      keeps_pages: whether prefix caching is on.
    """

    def __init__(self, pages: list[Pages], size: int, keeps_pages: bool = True):
        self._pages, self._size, self._keeps_pages = pages, size, keeps_pages
        self._prefixes: dict[tuple[bytes, int], Prefix] = {}

    def find(self, key: bytes, shard: int) -> Prefix | None:
        return self._prefixes.get((key, shard))

    def unfilled(self) -> list[Prefix]:
        """Returns the prefixes that a sequence waits for and whose base is filled."""
        return [
            p for p in self._prefixes.values()
            if not (p.is_idle or p.is_filled) and (p.base is None or p.base.is_filled)
        ]

    def filled(self) -> list[Prefix]:
        """Returns the filled prefixes whose sequences can be inserted."""
        return [p for p in self._prefixes.values() if p.waiters and p.is_filled]

    def fill(self, prefix: Prefix, count: int) -> None:
        """Marks `count` more tokens as filled."""
        prefix.filled += count
        if prefix.is_filled and self._keeps_pages:
            self._pages[prefix.shard].keep(prefix.pages, prefix.page_keys)

    def adopt(self, prefix: Prefix) -> int:
        """Replaces its next pages by pages that were filled with the same tokens since it was made.
        Returns the number of tokens that need no prefill any more."""
        if not self._keeps_pages or prefix.logps is not None or prefix.followers:
            return 0
        pages, first = self._pages[prefix.shard], prefix.filled // self._size
        hits = pages.found(prefix.page_keys)[first:]
        holders: list[Any] = [prefix, *prefix.waiters]
        for holder in holders if hits else ():
            place = slice(first, first + len(hits))
            own, holder.pages[place] = holder.pages[place], pages.share(hits)
            pages.release(own)
        prefix.found += len(hits)
        prefix.filled += len(hits) * self._size
        return len(hits) * self._size

    def new_pages(self, sequence: Sequence, shard: int) -> int:
        """Returns the number of free pages that `join` would take."""
        full, rest = divmod(sequence.length, self._size)
        prefix, hits = self.start(sequence, shard)
        if prefix and prefix.key == sequence.key:
            return int(rest > 0)
        known = prefix.pages if prefix else hits
        return full - self._pages[shard].held(known) + 2 * (rest > 0)

    def start(self, sequence: Sequence, shard: int) -> tuple[Prefix | None, list[int]]:
        """Returns the prefix that the sequence would share: of all its tokens, or of its prompt.
        Without one, or with more cached pages than the prompt has, (None, the cached pages)."""
        if prefix := self.find(sequence.key, shard):
            return prefix, []
        base, hits = self.find(sequence.base_key, shard), self._found(sequence, shard)
        return (base, []) if base and len(hits) <= len(base.pages) else (None, hits)

    def cached(self, sequence: Sequence, shard: int) -> int:
        """Returns the number of tokens in cached pages that the sequence would start with; 0 if it
        would share a prefix."""
        return len(self.start(sequence, shard)[1]) * self._size

    def _found(self, sequence: Sequence, shard: int) -> list[int]:
        """Returns the cached pages of the sequence's first tokens."""
        if not self._keeps_pages or sequence.needs_scores:
            return []
        return self._pages[shard].found(sequence.keys_of_pages(self._size))

    def shared(self, sequence: Sequence, shard: int) -> int:
        """Returns the number of tokens of the prefix that the sequence would share."""
        prefix, _ = self.start(sequence, shard)
        return len(prefix.tokens) if prefix else 0

    def keep(self, sequence: Sequence) -> dict[int, int]:
        """Puts the full pages of a sequence into the cache, prompt and sampled tokens. Their keys
        must be of the weights of now. The key of the last token is not in its page yet. Returns
        {index: page} of the pages that were not in the cache."""
        if not self._keeps_pages:
            return {}
        keys = sequence.keys_of_pages(self._size)[: (sequence.length - 1) // self._size]
        return self._pages[sequence.shard].keep(sequence.pages, keys)

    def join(self, sequence: Sequence, shard: int) -> None:
        """Gives the sequence the pages of its tokens: shared ones, and a page of its own for the
        copy of the last one if that is not full."""
        full, rest = divmod(sequence.length, self._size)
        pages, tokens = self._pages[shard], sequence.tokens()
        keys, (base, hits) = sequence.keys_of_pages(self._size), self.start(sequence, shard)
        whole = len(sequence.request.prompt) // self._size
        if base is None and sequence.base_key and len(hits) <= whole:
            base = self._prefix(
                sequence.base_key, keys[:whole], tokens[: whole * self._size], shard, found=hits
            )
        prefix = self._prefix(
            sequence.key, keys, tokens, shard, base, [] if base else hits, sequence.needs_scores
        )
        sequence.shard = shard
        copy = pages.allocate(int(rest > 0))
        assert copy is not None  # the admission has counted it
        sequence.pages = pages.share(prefix.pages[:full]) + copy
        sequence.page_numbers = list(range(len(sequence.pages)))
        prefix.waiters.append(sequence)

    def _prefix(
        self, key, page_keys, tokens, shard, base=None, found=(), is_scored=False
    ) -> Prefix:
        """Returns the prefix of these tokens. A new one starts with the pages of its base, or with
        the cached pages."""
        if self.find(key, shard) is None:
            pages = self._pages[shard]
            shared = pages.share(base.pages if base else found)
            own = pages.allocate(-(-len(tokens) // self._size) - len(shared))
            self._prefixes[key, shard] = Prefix(
                key, page_keys, tokens, shard, shared + own,
                len(shared) * self._size, base, found=len(found), logps=[] if is_scored else None,
            )
            if base:
                base.followers += 1
        return self._prefixes[key, shard]

    def following(self) -> list[Sequence]:
        """Returns the sequences with a prefix that uses other pages: of a base, or cached ones."""
        shares = lambda prefix: prefix.base or prefix.found
        return [s for prefix in self._prefixes.values() if shares(prefix) for s in prefix.waiters]

    def forget(self) -> None:
        """Empties the cache after new weights: all prefixes are filled anew. No sequence may be
        `following`."""
        for pages in self._pages:
            pages.forget()
        for prefix in reversed(list(self._prefixes.values())):
            prefix.filled, prefix.logps = 0, prefix.logps and []
            if prefix.is_idle:
                self._drop(prefix)

    def drop(self, key: bytes) -> None:
        """Drops the prefixes with this key that no sequence waits for."""
        for shard in range(len(self._pages)):
            prefix = self.find(key, shard)
            if prefix and prefix.is_idle:
                self._drop(prefix)

    def reclaim(self, shard: int, keep: tuple[bytes, ...]) -> bool:
        """Drops one prefix that no sequence waits for and whose key is not in `keep`. Returns False
        if there is none."""
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
