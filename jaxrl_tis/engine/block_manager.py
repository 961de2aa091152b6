"""Slots and pages of an engine: admission, growth, preemption and eviction of sequences.

A waiting sequence is admitted to a slot once there are pages for its tokens so far. An older
sequence may take its pages, and a sequence with a higher priority may take its slot. It keeps its
tokens in both cases. All pages of a shard hold the longest sequence, and the oldest sequence of a
shard never loses its pages, so every sequence ends.
"""

import collections
import dataclasses
import operator
from typing import Any

import ml_collections
import numpy as np

from jaxrl_tis.engine.pages import NULL, Pages
from jaxrl_tis.engine.prefixes import Prefixes
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import NEVER
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.wait_queue import WaitQueue

ORDER = operator.attrgetter("order")  # the oldest sequence first


@dataclasses.dataclass(frozen=True)
class KVEviction:
    """Which full pages a sequence keeps: its first `sinks`, its last `window`, and `heavy` between.

    The first and last are those of StreamingLLM (arXiv:2309.17453). Those between have the most
    attention so far, as in H2O (arXiv:2306.14048): summed over all layers, heads and decode steps.
    H2O also counts the queries of the prompt, and evicts single keys in each head. The other pages are
    evicted in all layers and recorded as evict_step. With `groups` > 1 each of so many groups of
    consecutive layers keeps as many pages, chosen by its own attention. A page is free once no group keeps
    it.
    """

    sinks: int
    window: int
    heavy: int = 0
    groups: int = 1

    def __post_init__(self):
        if self.sinks < 0 or self.window < 1 or self.heavy < 0 or self.groups < 1:
            raise ValueError(f"{self}: keep at least one page of the window, and no negative number")

    @classmethod
    def of(cls, engine: ml_collections.ConfigDict) -> "KVEviction | None":
        """Returns that of `config.engine`; None if sequences keep all pages."""
        sinks, window = engine.retention
        return cls(sinks, window, engine.heavy_pages, engine.heavy_groups) if window else None

    def allows(self, evict_step: np.ndarray, start: int, stop: int, page_size: int) -> bool:
        """Whether a record can have this evict_step, see Trajectory. Each eviction is of one page in every
        group, at a step in start..stop-1, after the first pages and before the last ones of that time."""
        if evict_step.shape[1:] != ((self.groups,) if self.groups > 1 else ()):
            return False
        step_sg = evict_step.reshape(len(evict_step), -1)
        page_s = np.arange(len(step_sg)) // page_size
        is_evicted_sg = step_sg != NEVER
        is_before_sg = page_s[:, None] < step_sg // page_size - self.window
        is_in_time_sg = is_before_sg & (step_sg >= start) & (step_sg < stop)
        ordered_sg = np.sort(step_sg, axis=0)
        return bool(
            np.all(is_in_time_sg | ~is_evicted_sg) and not np.any(is_evicted_sg[page_s < self.sinks])
            and np.array_equal(step_sg, step_sg[page_s * page_size])
            and np.all(ordered_sg == ordered_sg[:, :1])
        )

    @property
    def most(self) -> int:
        """The number of full pages that a sequence keeps."""
        return self.sinks + self.heavy + self.window


class BlockManager:
    """Assigns slots and pages of an engine to sequences.

    Args:
      engine: sizes, see EngineProtocol.
      waiting: sequences without a slot.
      stats: where cache hits, preemptions and evictions are counted.
      preempt_after, retention, keeps_pages: see Scheduler.

    Attributes:
      to_release: slots that are free here but still decode in the engine.
      table: [slots, n] int32, pages of each slot in order; [slots, G, n] with G > 1 groups of layers.
      shift: [slots] int32, positions evicted from each slot.
      pages: the pages of each shard.
      prefixes: tokens whose pages several sequences share.
    """

    def __init__(
        self, engine: EngineProtocol, waiting: WaitQueue, stats: Stats, preempt_after: int = 0,
        retention: KVEviction | None = None, keeps_pages: bool = True,
    ):
        if retention is not None and retention.heavy and not engine.weighs_pages:
            raise ValueError(
                f"{retention} keeps pages by their attention, which the engine does not record; set "
                "EngineConfig.weighs_pages, or heavy to 0"
            )
        self._engine, self._waiting, self._stats = engine, waiting, stats
        self._preempt_after, self._retention = preempt_after, retention
        self._slots: dict[int, Sequence] = {}
        self.to_release: set[int] = set()
        per_slot = -(-engine.max_length // engine.page_size)
        self._groups = retention.groups if retention is not None else 1
        of_groups = (self._groups,) if self._groups > 1 else ()
        self.table = np.zeros((engine.slots, *of_groups, per_slot), np.int32)
        self.shift = np.zeros(engine.slots, np.int32)
        self.pages = [Pages(engine.num_pages) for _ in range(engine.shards)]
        self.prefixes = Prefixes(self.pages, engine.page_size, keeps_pages)

    def sync_digest(self) -> dict[str, Any]:
        """Returns the pages by name. The order of the free ones reflects every allocation and
        release so far."""
        orders = [pages.order for pages in self.pages]
        return {"free_pages": orders, "table": self.table, "shift": self.shift}

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence has a slot or waits for one."""
        return sequence.slot >= 0 or sequence in self._waiting

    def sequences(self) -> list[Sequence]:
        """Returns all sequences, in a slot or waiting, the oldest first."""
        return sorted([*self._waiting, *self._slots.values()], key=ORDER)

    def running(self, shard: int | None = None) -> list[Sequence]:
        """Returns the sequences that decode, in one shard or in all, the oldest first."""
        running = [s for s in self._slots.values() if s.is_running and shard in (None, s.shard)]
        return sorted(running, key=ORDER)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.is_running:
            self.to_release.add(sequence.slot)
        else:
            prefix = self.prefixes.find(sequence.key, sequence.shard)
            assert prefix is not None
            prefix.waiters.remove(sequence)
        self.table[sequence.slot], self.shift[sequence.slot] = 0, 0
        del self._slots[sequence.slot]
        sequence.slot, sequence.is_running = -1, False
        sequence.admitted_after = self._waiting.admissions

    def free(self, sequence: Sequence) -> None:
        """Takes a sequence out of its slot or of the queue, and frees its pages."""
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.pages:
            self.pages[sequence.shard].release(sequence.pages)
        sequence.pages, sequence.page_numbers = [], []
        self.drop_idle(sequence)

    def keep(self, sequence: Sequence, version: int) -> dict[int, int]:
        """Puts the full pages of a sequence that ends into the cache, if all their keys are of the
        weights of this version and none was evicted. Returns {index: page} of the pages that were
        not there."""
        is_filled = sequence.is_running or sequence.slot < 0 and bool(sequence.pages)
        if not is_filled or sequence.shift or sequence.kv_version != version:
            return {}
        return self.prefixes.keep(sequence)

    def free_ending(self, sequence: Sequence) -> None:
        """Frees slot and pages of a sequence that must end in a call that has not been read. Every
        later write into slots or pages comes after the call."""
        slot = sequence.slot
        self.free(sequence)
        self.to_release.discard(slot)

    def retract(self, sequence: Sequence) -> None:
        """Frees the slot and the pages of a sequence and queues it again."""
        had_pages = bool(sequence.pages)
        self.free(sequence)
        if had_pages:
            sequence.forget()
        self._waiting.add(sequence)

    # Into a slot

    def admit(self) -> list[Sequence]:
        """Gives waiting sequences slots and pages, in the order of the policy.

        A parked sequence, which kept its pages, waits for a slot of its shard. An overdue one gives
        its pages up for a slot of any shard. Admission stops at the first sequence that finds no
        pages.

        Returns: the parked sequences among them, whose pages are filled already.
        """
        if self._preempt_after:
            self._preempt_for_waiting()
        if len(self._slots) == self._engine.slots:
            return []
        free, parked = self._free(), []
        for sequence in self._waiting.in_order():
            shards = [s for s in free if free[s]]
            if not shards:
                break
            if sequence.pages and sequence.shard not in shards:
                if not self._waiting.is_overdue(sequence):
                    continue
                self.retract(sequence)
            is_parked = bool(sequence.pages)
            if not is_parked and not self._find_pages(sequence, shards):
                break
            self._take_slot(sequence, free[sequence.shard].pop(0), is_parked)
            if is_parked:
                parked.append(sequence)
        return parked

    def _preempt_for_waiting(self) -> None:
        """Queues sequences that sampled `preempt_after` tokens again, with their pages, if a
        waiting one comes before them. Sequences with evicted keys stay, because they could not be
        rebuilt if their pages were needed."""
        is_done = lambda s: s.since_admission >= self._preempt_after and not s.shift
        priority, left = self._waiting.priority, []
        done = sorted(filter(is_done, self.running()), key=priority, reverse=True)
        free = collections.Counter({shard: len(slots) for shard, slots in self._free().items()})
        is_before = lambda a, b: self._waiting.is_overdue(a) or priority(a) < priority(b)
        for other in self._waiting.in_order() if done else ():
            if not done or not is_before(other, done[0]):
                break  # nor is any other
            is_home = lambda shard, other=other: not other.pages or shard == other.shard
            shard, slots = max(((s, n) for s, n in free.items() if is_home(s)), key=lambda x: x[1])
            if slots:
                free[shard] -= 1
                continue
            sequence = next((s for s in done if is_home(s.shard)), None)
            if sequence is not None and is_before(other, sequence):
                done.remove(sequence)
                left.append(sequence)
        for sequence in left:
            self._leave_slot(sequence)
            self._waiting.add(sequence)

    def _free(self) -> dict[int, list[int]]:
        """Returns the free slots of each shard."""
        free = {shard: [] for shard in range(self._engine.shards)}
        for slot in range(self._engine.slots):
            if slot not in self._slots:
                free[slot * self._engine.shards // self._engine.slots].append(slot)
        return free

    def _find_pages(self, sequence: Sequence, shards: list[int]) -> bool:
        """Allocates pages for the tokens of a sequence, in the shard with the most cache hits among
        those with room. Returns False if no shard has room."""
        shared = lambda shard: self.prefixes.shared(sequence, shard)
        cached = lambda shard: self.prefixes.cached(sequence, shard)
        preference = lambda shard: (
            -shared(shard) - cached(shard), -self.pages[shard].free, shard
        )
        for shard in sorted(shards, key=preference):
            if self._has_room(sequence, shard):
                self._stats.shared += shared(shard)
                self._stats.cached += cached(shard)
                self.prefixes.join(sequence, shard)
                return True
        return False

    def _take_slot(self, sequence: Sequence, slot: int, is_running: bool) -> None:
        sequence.slot, sequence.is_running, sequence.since_admission = slot, is_running, 0
        self._slots[slot] = sequence
        self._waiting.admit(sequence)
        self.drop_idle(sequence)

    def _has_room(self, sequence: Sequence, shard: int) -> bool:
        """Whether a shard has the pages of the sequence free, and one more for each running
        sequence to grow into. Frees pages that only waiting sequences hold, but not the ones that
        it would share."""
        running = len(self.running(shard))
        while self.pages[shard].free < self.prefixes.new_pages(sequence, shard) + running:
            prefix, _ = self.prefixes.start(sequence, shard)
            if not self._reclaim(shard, (prefix.key,) if prefix else ()):
                return False
        return True

    def _reclaim(self, shard: int, keep: tuple[bytes, ...] = ()) -> bool:
        """Frees pages that no slot needs: of a prompt kept for samples that still wait, unless its
        key is in `keep`, or of the youngest parked sequence. Returns False if there are none."""
        if self.prefixes.reclaim(shard, keep):
            return True
        parked = self._waiting.parked(shard)
        if parked:
            self.retract(max(parked, key=ORDER))
        return bool(parked)

    def drop_idle(self, sequence: Sequence) -> None:
        """Drops the prefixes of its tokens if no waiting sequence would share them."""
        for key in (sequence.key, sequence.base_key):
            if not self._waiting.has(key):
                self.prefixes.drop(key)

    def settle(self, sequence: Sequence) -> None:
        """Marks an inserted sequence as decoding, and fills its row of the table."""
        self.to_release.discard(sequence.slot)
        sequence.is_running = True
        self.shift[sequence.slot] = sequence.shift
        self._tabulate(sequence)

    def _tabulate(self, sequence: Sequence) -> None:
        rows = self.table[sequence.slot].reshape(self._groups, -1)  # a view
        rows[:] = NULL
        for group in range(self._groups):
            rows[group, : sequence.width] = [sequence.pages[i] for i in sequence.kept(group)]

    # More pages, and fewer

    def can_grow(self, width: int) -> bool:
        """Whether there are free pages for the next `width` tokens of every running sequence."""
        counts = collections.Counter()
        for sequence in self.running():
            counts[sequence.shard] += self._missing(sequence, width)
        return all(count <= self.pages[shard].free for shard, count in counts.items())

    def _missing(self, sequence: Sequence, width: int) -> int:
        """Returns the number of pages that it lacks for `width` tokens after those in flight."""
        drawn = min(sequence.in_flight + width, sequence.remaining)
        end = sequence.length - 1 + drawn - sequence.shift
        return max(0, -(-end // self._engine.page_size) - sequence.width)

    def grow(self, width: int) -> None:
        """Gives every running sequence the pages of its next `width` tokens, the oldest first. One
        that finds none preempts the youngest."""
        for sequence in self.running():
            if not sequence.is_running:
                continue  # lost its slot to an older one
            count = self._missing(sequence, width)
            if not count:
                continue
            pages = self.pages[sequence.shard]
            while count > pages.free and self._preempt(sequence):
                pass
            if not sequence.is_running:
                continue  # type: ignore[unreachable]
            number = (sequence.page_numbers or [-1])[-1] + 1
            sequence.page_numbers += range(number, number + count)
            more = pages.allocate(count)
            assert more is not None
            sequence.pages += more
            self._tabulate(sequence)

    def _preempt(self, sequence: Sequence) -> bool:
        """Frees pages for a sequence: unused ones, or else the pages of the youngest sequence of
        its shard. Returns False if that was the sequence itself."""
        if self._reclaim(sequence.shard):
            return True
        youngest = max((s for s in self._slots.values() if s.shard == sequence.shard), key=ORDER)
        self.retract(youngest)
        self._stats.preempted += 1
        return youngest is not sequence

    def evict(self, sequence: Sequence) -> None:
        """Frees the pages that `retention` does not keep."""
        if self._retention is None:
            return
        size, kept = self._engine.page_size, self._retention
        while (full := (sequence.length - 1 - sequence.shift) // size) > kept.most:
            stop = full - kept.window
            indices = [sequence.lightest(g, kept.sinks, stop) for g in range(self._groups)]
            released = sequence.evict(indices, size, self._engine.max_length)
            self.pages[sequence.shard].release(released)
            self._stats.evicted += 1
            self.shift[sequence.slot] = sequence.shift
            self._tabulate(sequence)
