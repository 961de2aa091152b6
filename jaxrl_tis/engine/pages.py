"""Who holds which pages of the key/value cache: a free list with reference counts, on the host."""

import numpy as np

NULL = 0  # the page that takes what nobody reads


class Pages:
    """The pages 1..count-1 of one shard of the cache; page NULL belongs to nobody."""

    def __init__(self, count: int):
        self._references = np.zeros(count, np.int32)
        self._free = list(range(count - 1, NULL, -1))
        self.peak = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def order(self) -> list[int]:
        """The free pages, that which is taken next at the end."""
        return list(self._free)

    @property
    def used(self) -> int:
        return len(self._references) - 1 - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes free pages, with one reference each; None when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._references[taken] = 1
        self.peak = max(self.peak, self.used)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """Adds a reference to each of the pages and returns them."""
        assert NULL not in pages and (self._references[pages] > 0).all(), "a free page is shared"
        self._references[pages] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Takes one reference of each; a page without any is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
