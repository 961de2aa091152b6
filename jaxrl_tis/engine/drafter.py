"""A small model whose tokens are drafts for a larger one.

Its engine has as many slots and pages as the policy's, so one page table serves both. It samples with
the policy's random numbers: equal distributions always agree. The policy verifies every draft
(drafts.py), so the samples do not change.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine.drafts import Paced
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.protocol import Chunk, Insertion
from jaxrl_tis.engine.records import Request
from jaxrl_tis.engine.sequences import Sequence


@dataclasses.dataclass
class Drafting:
    """The small model that drafts for one engine.

    Attributes:
      engine: of the small model; its `steps` are one more than a draft has tokens.
      served: (its serving parameters, their version, see Trajectory.drafter_version). A Drafter takes
        new ones when the policy's weights change.
    """

    engine: Engine
    served: tuple[Any, int]

    def offload(self) -> None:
        """Moves the parameters to the memory of the host."""
        self._move("pinned_host")

    def awake(self) -> tuple[Any, int]:
        """Returns `served`, on the devices."""
        self._move("device")
        return self.served

    def _move(self, memory: str) -> None:
        params, version = served = self.served
        if all(x.sharding.memory_kind == memory for x in jax.tree.leaves(params)):
            return
        move = lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory))
        moved = jax.block_until_ready(jax.tree.map(move, params)), version
        if self.served is served:  # the learner has given no newer ones meanwhile
            self.served = moved


class Drafter(Paced):
    """Proposes drafts of a small model, or none while they do not pay.

    Args:
      drafting: the small model.
      free_batch_rows: see Paced.
      cost: time of one of its steps, relative to a step of the policy.
    """

    def __init__(self, drafting: Drafting, free_batch_rows: int, cost: float):
        self._drafting, self._engine, self._cost = drafting, drafting.engine, cost
        super().__init__(self._engine.slots, free_batch_rows)
        self._length = self._engine.steps - 1
        self._state: Any = None
        self._known: dict[str, int] = {}  # request -> the number of its first tokens with keys
        self._lacking: set[tuple[int, int]] = set()  # (shard, page): cached, and some keys are missing
        self._filled: set[str] = set()  # requests inserted after a prefill
        self._is_drafting = False

    def forget(self) -> None:
        """Resets the measured acceptance, and takes new weights. Keys of older ones stay: they change
        which drafts are made, and no sample."""
        super().forget()
        self._params, self.version = self._drafting.awake()

    def release_params(self) -> None:
        self._params = None
        self._drafting.offload()

    def start(self) -> None:
        self._state = self._engine.init_state()

    def release_cache(self) -> None:
        self._state = None
        self._lacking.clear()

    def prefill(self, chunks: list[Chunk]) -> None:
        own = [dataclasses.replace(chunk, targets=None) for chunk in chunks]
        self._state, _ = self._engine.prefill(self._params, self._state, own)
        size = self._engine.page_size
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            pages = chunk.pages[chunk.start // size : -(-end // size)]
            self._lacking.difference_update((chunk.shard, page) for page in pages)

    def insert(self, rows: dict[int, Insertion]) -> None:
        self._state = self._engine.insert(self._state, rows)
        # Parked sequences keep their pages and their count.
        self._filled = {row.request.id for row in rows.values() if row.cached == len(row.tokens)}

    def begin(self, sequence: Sequence) -> None:
        if sequence.request.id in self._filled:
            lacking = [(sequence.shard, page) in self._lacking for page in sequence.pages]
            size = self._engine.page_size
            first = lacking.index(True) * size if any(lacking) else sequence.length
            self._known[sequence.request.id] = min(first, sequence.length)

    def keep(self, sequence: Sequence) -> None:
        known, shard = self._known.get(sequence.request.id, 0), sequence.shard
        whole = known // self._engine.page_size
        self._lacking.difference_update((shard, page) for page in sequence.pages[:whole])
        self._lacking.update((shard, page) for page in sequence.pages[whole:])

    def extend(self, sequence: Sequence, drawn: np.ndarray) -> None:
        if self._is_drafting:
            self._known[sequence.request.id] = sequence.length - 1

    def remove(self, request: Request) -> None:
        self._known.pop(request.id, None)

    def propose(self, sequences: list[Sequence]) -> tuple[int, dict[Sequence, range]]:
        lengths = np.array([min(self._length, s.remaining - 1) for s in sequences])
        length = self._best(lengths, (self._length,))
        self._fade()
        self._is_drafting = bool(length and lengths.any())
        if not self._is_drafting:
            return 0, {}
        self._catch_up([s for s in sequences if self._known[s.request.id] < s.length - 1])
        return self._length, {s: range(n) for s, n in zip(sequences, lengths, strict=True) if n}

    def rows(self, drafts, length, state, table, shift):
        self._state, *rows = self._engine.draft(self._params, self._state, state.slots, table, shift)
        return tuple(rows)

    def _rows_time(self, length: int) -> float:
        own = self._cost * (length + 1) * super()._rows_time(0) if length else 0.0
        return super()._rows_time(length) + own

    def _catch_up(self, behind: list[Sequence]) -> None:
        """Computes the keys of tokens that were sampled without drafts."""
        engine, known = self._engine, self._known
        room = engine.prefill_batch // engine.shards
        while behind:
            chunks, count = [], [0] * engine.shards
            for s in behind:
                if count[s.shard] == room:
                    continue
                count[s.shard] += 1
                start = known[s.request.id] // engine.page_size * engine.page_size
                tokens = s.tokens()[start : len(s.pages) * engine.page_size][: engine.prefill_chunk]
                chunks.append(Chunk(s.shard, tokens, start, s.pages))
                known[s.request.id] = start + len(tokens)
            self.prefill(chunks)
            behind = [s for s in behind if known[s.request.id] < s.length - 1]
