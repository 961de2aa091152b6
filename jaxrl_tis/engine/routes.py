"""Routes on the host: which experts each token passed through, by page and by sequence.

Shapes: n token, l layer with experts, k expert of a token.

A prefill call returns the routes of its chunks, and a decode call those of its input tokens. Pages
remember the routes of the pass that wrote their keys, so that prompts which share pages share these
routes too. Arrays of the device are read when a record needs them, or once their call is over.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_tis.engine.protocol import Chunk, EngineProtocol
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.fields import route_dtype


class Block:
    """The routes of the tokens of one page: a part of a larger array until it is read.

    Args:
      rows: returns the array [T,l,k], of a row of a prefill call or of a sequence.
      start: where the tokens of the page are in it.
    """

    def __init__(self, rows: Callable[[], np.ndarray], start: int):
        self._rows, self._start = rows, start
        self._values: np.ndarray | None = None

    def read(self, size: int) -> np.ndarray:
        """Returns the routes [size,l,k], and frees the whole array."""
        if self._values is None:
            self._values = self._rows()[self._start : self._start + size].copy()
            del self._rows
        return self._values


class PageRoutes:
    """The routes of the tokens in the pages of every shard."""

    def __init__(self, shards: int, size: int):
        self._size = size
        self._pages: list[dict[int, Block]] = [{} for _ in range(shards)]
        self._unread: list[Block] = []

    def write(self, chunks: list[Chunk], rows: list[int], result: Any) -> None:
        """Notes the routes [R,T,l,k] of the chunks of a prefill call, each in a row of it."""
        for chunk, row in zip(chunks, rows, strict=True):
            of_chunk = functools.partial(_row, result, row)
            for start in range(0, len(chunk.tokens), self._size):
                block = Block(of_chunk, start)
                self._pages[chunk.shard][chunk.pages[(chunk.start + start) // self._size]] = block
                self._unread.append(block)

    def keep(self, shard: int, pages: dict[int, int], routes: "SequenceRoutes") -> None:
        """Notes the routes of a sequence that ended for its pages {index: page}, which are full."""
        rows = functools.cache(routes.latest)  # few of these pages are ever read again
        for index, page in pages.items():
            self._pages[shard][page] = Block(rows, index * self._size)

    def of(self, shard: int, pages: list[int]) -> list[Block]:
        """Returns the routes in these pages, as the passes that wrote their keys chose them."""
        return [self._pages[shard][page] for page in pages]

    def pop_unread(self) -> list[Block]:
        """Returns what was written since the last time."""
        unread, self._unread = self._unread, []
        return unread

    def read(self, blocks: list[Block]) -> None:
        """Waits for the calls of these blocks, so that none of their results stays on the
        devices."""
        for block in blocks:
            block.read(self._size)

    def forget(self) -> None:
        """Frees all memory. No page may be in use."""
        self._pages, self._unread = [{} for _ in self._pages], []


def _row(result: Any, row: int) -> np.ndarray:
    return np.asarray(result)[row]


@dataclasses.dataclass
class Read:
    """A pass over consecutive tokens of a sequence.

    Attributes:
      start: position of the first token.
      rows: the routes of its tokens, [n,l,k] or by page.
      count: how many of them are of this sequence.
    """

    start: int
    rows: np.ndarray | list[Block]
    count: int

    def values(self, size: int) -> np.ndarray:
        if isinstance(self.rows, np.ndarray):
            return self.rows
        return np.concatenate([block.read(size) for block in self.rows])[: self.count]


class SequenceRoutes:
    """The routes of the tokens of one sequence.

    The first pass over a token after which the next token was sampled decides its route. A later
    pass over the token rebuilds its keys and may choose other experts. Such choices are counted.

    Args:
      size: positions of a page.
      begun: routes [n,l,k] of the tokens that an earlier record has.
      again: [2] of that record, see `Trajectory.rerouted`.
    """

    def __init__(self, size: int, begun: np.ndarray, again: np.ndarray):
        self._size, self._begun, self._again = size, begun, again
        self._reads: list[Read] = []
        self._filled: Read | None = None
        self._latest = 0  # index of the prefill that filled its pages

    @classmethod
    def of(cls, partial: Trajectory | None, engine: EngineProtocol) -> "SequenceRoutes | None":
        """Makes those of a request, which may continue a record; None if none are recorded."""
        if not any(engine.route_shape):
            return None
        if partial is not None and len(partial.tokens):
            return cls(engine.page_size, partial.routes, partial.rerouted)
        none = np.zeros((0, *engine.route_shape), route_dtype(engine.num_experts))
        return cls(engine.page_size, none, np.zeros(2, np.int32))

    def restart(self) -> None:
        """Called when the sequence starts again from the tokens of its request."""
        self._reads, self._latest = [], 0

    def filled(self, blocks: list[Block], count: int) -> None:
        """Notes a prefill of its first `count` tokens. It has no effect if the sequence loses its
        pages before a token is sampled."""
        self._filled = Read(0, blocks, count)

    def sampled(self, start: int, rows: np.ndarray) -> None:
        """Notes the routes [n,l,k] of the tokens from position `start` on. After each of them a
        token was sampled."""
        if self._filled:
            self._latest = len(self._reads)
            self._reads.append(self._filled)
            self._filled = None
        self._reads.append(Read(start, rows.copy(), len(rows)))

    def joined(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (routes [n,l,k] of at most the first `most` tokens, [2] int32: the choices of
        experts that were made again for these tokens, and how many of them chose another set)."""
        return self._merged(self._begun, self._reads, most)

    def latest(self) -> np.ndarray:
        """Returns the routes [n,l,k] of the passes that wrote the keys in its pages."""
        reads = self._reads[self._latest :]
        return self._merged(self._begun[:0], reads, max(r.start + r.count for r in reads))[0]

    def _merged(
        self, begun: np.ndarray, reads: list[Read], most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `joined` returns. The first of the passes over a token decides its route."""
        end = max([len(begun), *(read.start + read.count for read in reads)])
        found = np.empty((min(end, most), *begun.shape[1:]), begun.dtype)
        known, again = min(len(begun), most), self._again
        found[:known] = begun[:known]
        for read in reads:
            values = read.values(self._size)[: max(0, most - read.start)]
            if not len(values):
                continue
            assert read.start <= known, f"no pass over token {known}"
            both = min(known - read.start, len(values))
            if both:
                again = again + _changes(found[read.start : read.start + both], values[:both])
            found[read.start + both : read.start + len(values)] = values[both:]
            known = max(known, read.start + len(values))
        return found, again


def _changes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns (the number of choices of experts, how many of them differ as sets), [2] int32."""
    count, differing = old.size // old.shape[-1], 0
    if (old != new).any():
        is_other = np.any(np.sort(old, axis=-1) != np.sort(new, axis=-1), axis=-1)
        differing = is_other.sum()
    return np.array((count, differing), np.int32)
