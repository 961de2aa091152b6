"""Routes on the host: which experts each token passed through, by page and by sequence.

Shapes: n token, l layer with experts, k expert of a token.

A prefill call returns the routes of its chunks, and a decode call those of its input tokens. Pages
remember the routes of the pass that wrote their keys, so that prompts which share pages share these
routes too. Arrays of the device are read when a record needs them, or once their call is over.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_tis.engine.protocol import Chunk, EngineProtocol
from jaxrl_tis.engine.records import Trajectory


class Block:
    """The routes of the tokens of one page: a part of a prefill's result until it is read.

    Args:
      result: [R,T,l,k] routes of a prefill call.
      row, start: where the tokens of the page are in it.
    """

    def __init__(self, result: Any, row: int, start: int):
        self._result, self._row, self._start = result, row, start
        self._values: np.ndarray | None = None

    def read(self, size: int) -> np.ndarray:
        """Returns the routes [size,l,k], and frees the result of the whole call."""
        if self._values is None:
            rows = np.asarray(self._result)[self._row, self._start : self._start + size]
            self._values, self._result = rows.copy(), None
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
            for start in range(0, len(chunk.tokens), self._size):
                block = Block(result, row, start)
                self._pages[chunk.shard][chunk.pages[(chunk.start + start) // self._size]] = block
                self._unread.append(block)

    def of(self, shard: int, pages: list[int]) -> list[Block]:
        """Returns the routes in these pages, as the last prefill of each wrote them."""
        return [self._pages[shard][page] for page in pages]

    def read(self) -> None:
        """Reads what the finished calls returned, so that none of it stays on the devices."""
        for block in self._unread:
            block.read(self._size)
        self._unread = []


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
            return self.rows[: self.count]
        return np.concatenate([block.read(size) for block in self.rows])[: self.count]


class SequenceRoutes:
    """The routes of the tokens of one sequence.

    The first pass over a token decides its route: the next token was sampled after it. A later pass
    over the token, which rebuilds its keys, may choose other experts. Such choices are counted.

    Args:
      size: positions of a page.
      begun: routes [n,l,k] of the tokens that an earlier record has.
      again: [2] of that record, see `Trajectory.rerouted`.
    """

    def __init__(self, size: int, begun: np.ndarray, again: np.ndarray):
        self._size, self._begun, self._again = size, begun, again
        self._reads: list[Read] = []

    @classmethod
    def of(cls, partial: Trajectory | None, engine: EngineProtocol) -> "SequenceRoutes | None":
        """Makes those of a request, which may continue a record; None if none are recorded."""
        if not any(engine.route_shape):
            return None
        if partial is not None and len(partial.routes):
            return cls(engine.page_size, partial.routes, partial.rerouted)
        dtype = "uint8" if engine.num_experts <= 256 else "uint16"
        none = np.zeros((0, *engine.route_shape), dtype)
        return cls(engine.page_size, none, np.zeros(2, np.int32))

    def restart(self) -> None:
        """Called when the sequence starts again from the tokens of its request."""
        self._reads = []

    def add(self, start: int, rows: np.ndarray | list[Block], count: int) -> None:
        """Notes a pass over `count` tokens from position `start` on."""
        self._reads.append(Read(start, rows, count))

    def joined(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (routes [n,l,k] of at most the first `most` tokens, [2] int32: the choices of
        experts that were made again for a token, and how many of them chose another set)."""
        found, again = self._begun, self._again
        for read in self._reads:
            values = read.values(self._size)
            both = min(len(found) - read.start, len(values))
            if both:
                old = np.sort(found[read.start : read.start + both], axis=-1)
                changed = np.any(old != np.sort(values[:both], axis=-1), axis=-1)
                again = again + np.array((changed.size, changed.sum()), np.int32)
            found = np.concatenate([found, values[both:]])
        return found[:most], again
