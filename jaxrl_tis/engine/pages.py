"""Allocation of the pages of the key/value cache: a free list with reference counts, on the host.

A full page is found by the hash of its content, also while it is free (prefix caching).
A free page with content is reused only when no other page is free, the least recently used first.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

NULL = 0  # the page for writes that nobody reads


def content_keys(tokens: np.ndarray, size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns the content key of each full page of these tokens: a hash of its tokens and of the
    key of the page before, because keys and values depend on all tokens before. `known`: the keys
    of the first pages."""
    keys = list(known)
    for end in range((len(keys) + 1) * size, len(tokens) + 1, size):
        before = keys[-1] if keys else b""
        key = hashlib.blake2b(before + tokens[end - size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class Pages:
    """The pages 1..count-1 of one shard of the cache. Page NULL is never allocated.

    Attributes:
      peak: the most pages that were in use at once.
    """

    def __init__(self, count: int):
        self._references = np.zeros(count, np.int32)
        self._free = list(range(count - 1, NULL, -1))  # without content, the next at the end
        self._idle: dict[int, None] = {}  # free ones with content, the next first
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self.peak = 0

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def order(self) -> list[int]:
        """The free pages in the reverse order of their allocation."""
        return [*reversed(self._idle), *self._free]

    @property
    def used(self) -> int:
        return len(self._references) - 1 - self.free

    def allocate(self, count: int) -> list[int] | None:
        """Allocates pages with one reference each; None if fewer are free."""
        if count > self.free:
            return None
        pages = [self._take() for _ in range(count)]
        self._references[pages] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page = next(iter(self._idle))
        del self._idle[page], self._pages[self._keys.pop(page)]
        return page

    def share(self, pages: list[int]) -> list[int]:
        """Adds a reference to each page and returns the pages. Each is in use or has content."""
        for page in pages:
            is_there = page != NULL and (self._references[page] > 0 or page in self._idle)
            assert is_there, "a free page is shared"
            self._idle.pop(page, None)
            self._references[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Removes one reference of each page. A page without references is free. Of pages with
        content the last is reused first, since it is a cache hit only after the pages before."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, pages: list[int], keys: list[bytes]) -> dict[int, int]:
        """Registers the content keys of full pages in use, so that `found` finds them. Returns
        {index: page} of the pages that had no key and whose content no other page has."""
        new = {}
        for index, (page, key) in enumerate(zip(pages, keys, strict=False)):
            assert self._references[page] > 0, f"page {page} is free"
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key
                new[index] = page
        return new

    def found(self, keys: list[bytes]) -> list[int]:
        """Returns the pages with these contents, in order, up to the first cache miss."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def held(self, pages: list[int]) -> int:
        """Returns how many of the pages are in use."""
        return int((self._references[pages] > 0).sum())

    def forget(self) -> None:
        """Forgets all contents."""
        self._free += self._idle
        self._idle, self._pages, self._keys = {}, {}, {}
