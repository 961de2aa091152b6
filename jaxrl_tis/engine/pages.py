"""Who holds which pages of the key/value cache: a free list with reference counts, on the host.

A page whose content has a key keeps it while it is free, so that who needs the same content finds
it there; it is taken for another when no page without such content is free, that which was held
least recently first.
"""

import hashlib

import numpy as np

NULL = 0  # the page that takes what nobody reads


def content_keys(tokens: np.ndarray, size: int) -> list[bytes]:
    """Returns the key of the content of each full page of these tokens: a hash of the tokens in it
    and of the key of the page before, as keys and values depend on all that came before."""
    keys, key = [], b""
    for end in range(size, len(tokens) + 1, size):
        key = hashlib.blake2b(key + tokens[end - size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class Pages:
    """The pages 1..count-1 of one shard of the cache; page NULL belongs to nobody."""

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
        """The free pages, that which is taken next at the end."""
        return [*reversed(self._idle), *self._free]

    @property
    def used(self) -> int:
        return len(self._references) - 1 - self.free

    def allocate(self, count: int) -> list[int] | None:
        """Takes free pages, with one reference each; None when fewer are free."""
        if count > self.free:
            return None
        taken = [self._take() for _ in range(count)]
        self._references[taken] = 1
        self.peak = max(self.peak, self.used)
        return taken

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page = next(iter(self._idle))
        del self._idle[page], self._pages[self._keys.pop(page)]
        return page

    def share(self, pages: list[int]) -> list[int]:
        """Adds a reference to each of the pages, which are held or have content, and returns
        them."""
        for page in pages:
            is_there = page != NULL and (self._references[page] > 0 or page in self._idle)
            assert is_there, "a free page is shared"
            self._idle.pop(page, None)
            self._references[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Takes one reference of each; a page without any is free again. Of pages with content the
        last will be taken first: it is of use only to who has those before."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, pages: list[int], keys: list[bytes]) -> None:
        """Says what pages hold that somebody has, each all of it."""
        for page, key in zip(pages, keys):
            assert self._references[page] > 0, f"page {page} is free"
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key

    def found(self, keys: list[bytes]) -> list[int]:
        """Returns the pages with these contents, in order, up to the first that is not there."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def held(self, pages: list[int]) -> int:
        """Counts those of the pages that somebody holds."""
        return int((self._references[pages] > 0).sum())

    def forget(self) -> None:
        """No page has the content that it was said to have."""
        self._free += self._idle
        self._idle, self._pages, self._keys = {}, {}, {}
