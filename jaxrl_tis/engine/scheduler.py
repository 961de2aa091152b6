"""Continuous batching on one thread. The way of a request:

1. `add` checks it and queues it.
2. `step` admits waiting requests, in the order of the policy, to free slots for which there are
   pages. Requests with the same prompt (a group) share its pages and its one prefill; each gets its
   own copy of the last page only, if the prompt does not fill it. Those that drew tokens and then
   lost their pages share those that the prompt fills.
3. `step` prefills at most `prefill_calls` chunks while others decode, and puts requests whose
   prompt is filled into their slots.
4. `step` proposes drafts, if it is to, and gives running sequences the pages that the next tokens
   need. When none are left, the youngest sequence of the shard loses its pages and waits again; the
   oldest never does, and all pages of a shard hold the longest sequence, so every request ends.
5. `step` calls `generate` or `verify` once, stamps the tokens with the weights' version, frees the
   slots of finished requests and returns their trajectories.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine.drafts import Drafts, NoDrafts
from jaxrl_tis.engine.pages import NULL, Pages
from jaxrl_tis.engine.policies import FirstCome, Policy
from jaxrl_tis.engine.prefixes import Prefix, Prefixes
from jaxrl_tis.engine.protocol import Chunk, EngineProtocol, Insertion, ResultTokens
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.engine.text import StopSearch
from jaxrl_tis.engine.waiting import Waiting
from jaxrl_tis.fields import DRAWN

PAUSES = ("abort", "retract", "in_place")


class Full(RuntimeError):
    """As many requests are pending as the scheduler takes; call `step` and try again."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Pages that a sequence keeps: its first `sinks` and its last `window` full ones (StreamingLLM,
    arXiv:2309.17453); what it loses is recorded as evict_step."""

    sinks: int
    window: int

    def __post_init__(self):
        if self.sinks < 0 or self.window < 1:
            raise ValueError(f"{self}: keep at least one page of the window and no negative sinks")


@dataclasses.dataclass
class Stats:
    """Counts since the scheduler was made.

    Attributes:
      tokens: drawn; busy: decode steps of a slot that drew, of slot_steps, all steps of all slots.
      drafted, accepted: tokens of drafts.
      prefilled, shared: prompt tokens computed, and taken over from another sample of the group.
      preempted: sequences that lost their pages to older ones; evicted: pages.
      engine_seconds: spent in or waiting for the engine; seconds: in `step`.
    """

    calls: int = 0
    tokens: int = 0
    busy: int = 0
    slot_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    prefilled: int = 0
    shared: int = 0
    preempted: int = 0
    evicted: int = 0
    engine_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        return self.busy / max(self.slot_steps, 1)

    def since(self, before: "Stats") -> "Stats":
        """What was counted after a copy was made."""
        return Stats(*(now - old for now, old in zip(*map(dataclasses.astuple, (self, before)))))


class Scheduler:
    """Feeds an engine; `step()` until `pending` is 0.

    Args:
      engine: see EngineProtocol.
      params: serving parameters.
      version: version of these parameters, stamped on every token they draw.
      policy: order of the waiting requests, see policies.POLICIES.
      max_bypass: a request that has seen so many admissions since it began to wait goes first,
        whatever the policy says; None sets no bound.
      max_pending: `add` raises Full beyond so many requests; None takes all.
      prefill_calls: prefill calls in a step while sequences are decoding.
      divide: a sequence that drew so many tokens since it got its slot makes room for a waiting
        one that now comes before it, and keeps its pages while there are enough; 0 never.
      retention: pages that a sequence keeps; None keeps all.
      drafts: proposes drafts that one pass of the engine verifies; None decodes token by token.
      decode: tokens -> text, for requests with stop strings; runs in a thread of its own.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        params: Any,
        version: int = 0,
        *,
        policy: Policy | None = None,
        max_bypass: int | None = None,
        max_pending: int | None = None,
        prefill_calls: int = 4,
        divide: int = 0,
        retention: Retention | None = None,
        drafts: Drafts | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
    ):
        self._engine = engine
        self._state = None
        self._params, self._version = params, version
        self._policy = policy or FirstCome()
        self._max_pending = max_pending
        self._prefill_calls, self._divide, self._retention = prefill_calls, divide, retention
        self._drafts = drafts or NoDrafts()
        self._decode, self._texts = decode, ThreadPoolExecutor(1)
        self._waiting = Waiting(self._policy, max_bypass, engine.page_size)
        self._slots: dict[int, Sequence] = {}
        self._left: set[int] = set()  # slots that are free here and still count in the engine
        self._ended: list[Trajectory] = []
        self._live: dict[str, Sequence] = {}
        self._arrivals = 0
        per_slot = -(-engine.max_length // engine.page_size)
        self._table = np.zeros((engine.slots, per_slot), np.int32)
        self._shift = np.zeros(engine.slots, np.int32)
        self.pages = [Pages(engine.num_pages) for _ in range(engine.shards)]
        self._prefixes = Prefixes(self.pages, engine.page_size)
        self.stats = Stats()

    # What callers do

    @property
    def pending(self) -> int:
        """Requests that have not been returned yet."""
        return len(self._live)

    def set_params(self, params: Any, version: int) -> None:
        """Weights of all tokens drawn from now on. Running sequences keep the keys that older
        weights wrote (`kv_version` says so), while prompts are filled anew: in other pages where
        running sequences may read the old ones."""
        self._params, self._version = params, version
        for sequence in self._prefixes.following():
            self._retract(sequence)
        self._prefixes.forget()
        self._drafts.forget()

    def add(self, request: Request) -> None:
        """Queues a request; ValueError when it can never run or its id is alive, Full when
        max_pending are pending."""
        self._check(request)
        if self._max_pending is not None and self.pending >= self._max_pending:
            raise Full(f"{self.pending} requests are pending, at most {self._max_pending} may be")
        sequence = Sequence.of(request, self._arrivals, self._waiting.admissions)
        self._live[request.id] = sequence
        self._waiting.add(sequence)
        self._arrivals += 1
        self._policy.added(request)
        self._drafts.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; the next step returns what it has, with stop_reason "abort" unless a
        stop string is in it. KeyError where none of this id is pending."""
        if request_id not in self._live:
            raise KeyError(f"no live request has the id {request_id!r}")
        if self._goes_on(self._live[request_id]):
            self._abort(self._live[request_id])

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        """The tokens that these requests have drawn so far, of those that have not ended. Later
        ones follow them; but a stop string may end the record before the last of them, and one
        that saw evicted keys may have to start again."""
        live = {id: self._live[id] for id in request_ids if id in self._live}
        return {id: s.field("tokens") for id, s in live.items() if self._goes_on(s)}

    def pause(self, mode: str) -> list[Trajectory]:
        """Interrupts everything between two steps, as new weights do.

        "abort" returns all live requests as they are, to be added again as `partial`; "retract"
        drops their keys, which the next steps rebuild under the weights of that time; "in_place"
        lets them go on with the keys they have.
        """
        if mode not in PAUSES:
            raise ValueError(f"pause mode {mode!r} is none of {', '.join(PAUSES)}")
        for sequence in self._sequences():
            if mode == "abort":
                self._abort(sequence)
            elif mode == "retract" and sequence.pages:
                self._retract(sequence)
        return self._returned() if mode == "abort" else []

    def step(self) -> list[Trajectory]:
        """Admits, prefills, generates once, and returns the trajectories that ended."""
        start = time.perf_counter()
        if self._state is None:
            self._state = self._engine.init_state()
        self._admit()
        self._fill()
        width, drafts = self._propose()
        self._grow(width)
        if self._running():
            self._collect(self._generate(width, drafts), drafts)
        finished = self._returned()
        self.stats.seconds += time.perf_counter() - start
        return finished

    def rest(self) -> None:
        """Gives the memory of slots and pages back until the next step; ValueError while requests
        are pending."""
        if self.pending:
            raise ValueError(f"{self.pending} requests are pending; step until there are none")
        self._prefixes.forget()
        self._state, self._left = None, set()

    # Requests

    def _check(self, request: Request) -> None:
        prompt, sampling, engine = len(request.prompt), request.sampling, self._engine
        problems = {
            "the prompt is empty; give at least one token": prompt == 0,
            f"the prompt has tokens beyond the vocabulary of {engine.vocab_size}":
                request.prompt.max(initial=0) >= engine.vocab_size,
            f"{prompt} prompt tokens + {sampling.max_tokens} new tokens exceed the cache of "
            f"{engine.max_length} positions; shorten the prompt or raise engine.max_length":
                prompt + sampling.max_tokens > engine.max_length,
            f"{len(sampling.stop_ids)} stop ids, at most {engine.max_stop_ids} are supported":
                len(sampling.stop_ids) > engine.max_stop_ids,
            "stop strings need a scheduler with a `decode` function":
                bool(sampling.stop_strings) and self._decode is None,
            "penalties and logit_bias need an engine with penalties=True":
                sampling.is_penalised and not engine.num_penalised,
            f"logit_bias names tokens beyond the vocabulary: {sampling.logit_bias}":
                any(id >= engine.num_penalised > 0 for id, _ in sampling.logit_bias),
            "another live request has this id": request.id in self._live,
        }
        if request.partial is not None:
            partial = request.partial
            problems |= {
                "the partial trajectory is of another request":
                    (partial.id, partial.seed) != (request.id, request.seed)
                    or not np.array_equal(partial.prompt, request.prompt),
                f"the partial trajectory ended by itself ({partial.stop_reason})":
                    partial.stop_reason != "abort",
                f"the partial trajectory has {len(partial.tokens)} tokens, as many as may be drawn "
                f"({sampling.max_tokens}) or more": len(partial.tokens) >= sampling.max_tokens,
                "the partial trajectory saw evicted keys, which cannot be rebuilt; start it again":
                    len(partial.evict_step) > 0,
            }
        if request.partial is not None and len(request.partial.tokens):
            # A record has one temperature, one quant_id and one width of each field.
            widths = {n: getattr(engine, f.width) for n, f in DRAWN.items() if f.width}
            has = {name: getattr(partial, name).shape[1] for name in widths}
            problems |= {
                f"the partial trajectory was drawn at temperature {partial.temperature}, not "
                f"{sampling.temperature}": partial.temperature != sampling.temperature,
                f"the partial trajectory was drawn by {partial.quant_id}, not {engine.quant_id}":
                    partial.quant_id != engine.quant_id,
                f"the partial trajectory records {has} numbers of a draw, this engine {widths}":
                    has != widths,
            }
        for problem, is_so in problems.items():
            if is_so:
                raise ValueError(f"request {request.id}: {problem}")

    def _goes_on(self, sequence: Sequence) -> bool:
        return sequence.slot >= 0 or sequence in self._waiting

    def _sequences(self) -> list[Sequence]:
        return sorted([*self._waiting, *self._slots.values()], key=lambda s: s.order)

    def _running(self, shard: int | None = None) -> list[Sequence]:
        """Oldest first."""
        is_in = lambda s: s.is_running and shard in (None, s.shard)
        return sorted(filter(is_in, self._slots.values()), key=lambda s: s.order)

    def _returned(self) -> list[Trajectory]:
        ended, self._ended = self._ended, []
        for trajectory in ended:
            del self._live[trajectory.id]
        return ended

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.is_running:
            self._left.add(sequence.slot)
        else:
            self._prefixes.find(sequence.key, sequence.shard).waiters.remove(sequence)
        self._table[sequence.slot], self._shift[sequence.slot] = 0, 0
        del self._slots[sequence.slot]
        sequence.slot, sequence.is_running = -1, False
        sequence.admitted_after = self._waiting.admissions

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of wherever it is; its pages go back."""
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.pages:
            self.pages[sequence.shard].release(sequence.pages)
        sequence.pages, sequence.page_numbers = [], []
        self._drop_idle(sequence)

    def _retract(self, sequence: Sequence) -> None:
        """Back to the waiting ones, without pages."""
        had_pages = bool(sequence.pages)
        self._leave(sequence)
        if had_pages:
            sequence.forget()
        self._waiting.add(sequence)

    # Admission

    def _admit(self) -> None:
        """A parked sequence waits for its shard's slots, unless too many passed it; one without
        room for its pages lets nobody pass."""
        if self._divide:
            self._make_way()
        if len(self._slots) == self._engine.slots:
            return
        free, parked = self._free(), {}
        for sequence in self._waiting.in_order():
            shards = [s for s in free if free[s]]
            if not shards:
                break
            if sequence.pages and sequence.shard not in shards:
                if not self._waiting.is_overdue(sequence):
                    continue
                self._retract(sequence)
            is_parked = bool(sequence.pages)
            if not is_parked and not self._find_pages(sequence, shards):
                break
            self._take_slot(sequence, free[sequence.shard].pop(0), is_parked)
            if is_parked:
                parked[sequence] = (sequence.length - 1, (NULL, NULL))
        self._insert(parked)

    def _make_way(self) -> None:
        """Sequences that have drawn their share wait again, with their pages, if others come before
        them. Those with evicted keys stay: they cannot be rebuilt, should their pages be needed."""
        is_done = lambda s: s.since_admission >= self._divide and not s.shift
        priority, left = self._waiting.priority, []
        done = sorted(filter(is_done, self._running()), key=priority, reverse=True)
        free = collections.Counter({shard: len(slots) for shard, slots in self._free().items()})
        for other in self._waiting.in_order() if done else ():
            is_before = lambda s: self._waiting.is_overdue(other) or priority(other) < priority(s)
            if not done or not is_before(done[0]):
                break  # nor is any other
            is_home = lambda shard: not other.pages or shard == other.shard
            shard, slots = max(((s, n) for s, n in free.items() if is_home(s)), key=lambda x: x[1])
            if slots:
                free[shard] -= 1
                continue
            sequence = next((s for s in done if is_home(s.shard)), None)
            if sequence is not None and is_before(sequence):
                done.remove(sequence)
                left.append(sequence)
        for sequence in left:
            self._leave_slot(sequence)
            self._waiting.add(sequence)

    def _free(self) -> dict[int, list[int]]:
        """Free slots of each shard."""
        free = {shard: [] for shard in range(self._engine.shards)}
        for slot in range(self._engine.slots):
            if slot not in self._slots:
                free[slot * self._engine.shards // self._engine.slots].append(slot)
        return free

    def _find_pages(self, sequence: Sequence, shards: list[int]) -> bool:
        """Pages for what it has so far in one of the shards, best where others have them."""
        shared = lambda shard: self._prefixes.shared(sequence, shard)
        preference = lambda shard: (-shared(shard), -self.pages[shard].free, shard)
        for shard in sorted(shards, key=preference):
            if self._has_room(sequence, shard):
                self.stats.shared += shared(shard)
                self._prefixes.join(sequence, shard)
                return True
        return False

    def _take_slot(self, sequence: Sequence, slot: int, is_running: bool) -> None:
        sequence.slot, sequence.is_running, sequence.since_admission = slot, is_running, 0
        self._slots[slot] = sequence
        self._waiting.admit(sequence)
        self._drop_idle(sequence)

    def _has_room(self, sequence: Sequence, shard: int) -> bool:
        """Whether its pages are free, and one more for each running sequence to grow into; makes
        them free, but not those it would share, if only waiting sequences are in the way."""
        running, needed = len(self._running(shard)), self._prefixes.new_pages(sequence, shard)
        while self.pages[shard].free < needed + running:
            if not self._reclaim(shard, (sequence.key, sequence.base_key)):
                return False
        return True

    def _reclaim(self, shard: int, keep: tuple[bytes, ...] = ()) -> bool:
        """Frees pages that no slot needs: of a prompt, not one of `keep`, that waits for more of
        its samples, or of the youngest sequence that made way."""
        if self._prefixes.reclaim(shard, keep):
            return True
        parked = self._waiting.parked(shard)
        if parked:
            self._retract(max(parked, key=lambda s: s.order))
        return bool(parked)

    def _drop_idle(self, sequence: Sequence) -> None:
        """Lets shared pages of its tokens go that nobody will ask for."""
        for key in (sequence.key, sequence.base_key):
            if not self._waiting.has(key):
                self._prefixes.drop(key)

    # Prefill

    def _fill(self) -> None:
        self._insert_filled()
        calls = 0
        while calls < self._prefill_calls or not self._running():
            unfilled = self._prefixes.unfilled()
            if not unfilled:
                return
            self._prefill(unfilled)
            self._insert_filled()
            calls += 1

    def _prefill(self, unfilled: list[Prefix]) -> None:
        """One chunk of each of the first prefixes, as far as they fit into one call."""
        engine = self._engine
        left = dict.fromkeys(range(engine.shards), engine.prefill_batch // engine.shards)
        next_chunk = lambda p: p.tokens[p.filled : p.filled + engine.prefill_chunk]
        length = engine.bucket(len(next_chunk(unfilled[0])))
        chunks = []
        for prefix in unfilled:
            tokens = next_chunk(prefix)
            if left[prefix.shard] and engine.bucket(len(tokens)) == length:
                left[prefix.shard] -= 1
                chunks.append(Chunk(prefix.shard, tokens, prefix.filled, prefix.pages))
                prefix.filled += len(tokens)
                self.stats.prefilled += len(tokens)
        self._state = self._timed(engine.prefill, self._params, self._state, chunks)

    def _insert_filled(self) -> None:
        rows, filled = {}, self._prefixes.filled()
        for prefix in filled:
            rest = len(prefix.tokens) % self._engine.page_size
            for sequence in prefix.waiters:
                copy = (prefix.pages[-1], sequence.pages[-1]) if rest else (NULL, NULL)
                rows[sequence] = (sequence.length, copy)
                sequence.filled(self._version)
            prefix.waiters = []
        self._insert(rows)
        for sequence in rows:
            self._drop_idle(sequence)

    def _insert(self, rows: dict[Sequence, tuple[int, tuple[int, int]]]) -> None:
        """Puts sequences into their slots, with the number of positions that their pages hold and
        the page to be copied into another."""
        if not rows:
            return
        insertions = {
            s.slot: Insertion(s.request, s.tokens(), s.remaining, cached, copy)
            for s, (cached, copy) in rows.items()
        }
        self._state = self._timed(self._engine.insert, self._state, insertions)
        self._left -= insertions.keys()
        for sequence in rows:
            sequence.is_running = True
            self._shift[sequence.slot] = sequence.shift
            self._tabulate(sequence)
            self._drafts.begin(sequence)

    def _tabulate(self, sequence: Sequence) -> None:
        self._table[sequence.slot] = NULL
        self._table[sequence.slot, : len(sequence.pages)] = sequence.pages

    # Decode

    def _propose(self) -> tuple[int, dict[Sequence, list[int]]]:
        """(tokens that the next call may draw, drafts if there are any)."""
        length, drafts = self._drafts.propose(self._running())
        return (length + 1 if drafts else self._engine.steps), drafts

    def _grow(self, width: int) -> None:
        """Pages for the next tokens of every running sequence, the oldest first."""
        size = self._engine.page_size
        for sequence in self._running():
            if not sequence.is_running:
                continue  # lost its slot to an older one
            end = sequence.length - 1 + min(width, sequence.remaining) - sequence.shift
            count = -(-end // size) - len(sequence.pages)
            if count <= 0:
                continue
            pages = self.pages[sequence.shard]
            while count > pages.free and self._preempt(sequence):
                pass
            if not sequence.is_running:
                continue
            number = (sequence.page_numbers or [-1])[-1] + 1
            sequence.page_numbers += range(number, number + count)
            sequence.pages += pages.allocate(count)
            self._tabulate(sequence)

    def _preempt(self, sequence: Sequence) -> bool:
        """Frees pages for a sequence: what nobody uses, else those of the youngest of its shard,
        which may be the sequence itself; then False."""
        if self._reclaim(sequence.shard):
            return True
        youngest = max(
            (s for s in self._slots.values() if s.shard == sequence.shard), key=lambda s: s.order
        )
        self._retract(youngest)
        self.stats.preempted += 1
        return youngest is not sequence

    def _generate(self, width: int, drafts: dict[Sequence, list[int]]) -> ResultTokens:
        engine, arrays = self._engine, (self._table, self._shift)
        if self._left:
            self._state = self._timed(engine.release, self._state, sorted(self._left))
            self._left.clear()
        call = engine.generate
        if drafts:
            tokens = np.zeros((engine.slots, width - 1), np.int32)
            counts = np.zeros(engine.slots, np.int32)
            for sequence, draft in drafts.items():
                if sequence.is_running:
                    tokens[sequence.slot, : len(draft)] = draft
                    counts[sequence.slot] = len(draft)
            call, arrays = engine.verify, (tokens, counts, *arrays)
        self._state, result = self._timed(call, self._params, self._state, *arrays)
        return self._timed(jax.tree.map, np.asarray, result)

    def _timed(self, call: Callable, *args) -> Any:
        start = time.perf_counter()
        out = call(*args)
        self.stats.engine_seconds += time.perf_counter() - start
        return out

    def _collect(self, result: ResultTokens, drafts: dict[Sequence, list[int]]) -> None:
        counts = result.valid.sum(axis=0)
        drew = result.valid[:1] if drafts else result.valid
        self.stats.calls += 1
        self.stats.busy += int(drew.sum())
        self.stats.slot_steps += int(drew.any(axis=1).sum()) * self._engine.slots
        for sequence in self._running():
            slot, count, sampling = sequence.slot, int(counts[sequence.slot]), sequence.sampling
            sequence.pieces.append(Drawn(
                result, slot, count, self._version, sequence.kv_version, sequence.segment
            ))
            sequence.count += count
            sequence.since_admission += count
            self.stats.tokens += count
            is_last = result.remaining[slot] == 0
            self._learn(sequence, result.tokens[:count, slot], drafts.get(sequence, []), is_last)
            stop = None
            if sampling.stop_strings:
                stop = self._stop(sequence, result.tokens[:count, slot].tolist(), is_last)
            if stop is not None:
                self._finish(sequence, "stop", stop)
            elif is_last:
                is_stop = result.tokens[count - 1, slot] in sampling.stop_ids
                self._finish(sequence, "stop" if is_stop else "length", sequence.count)
            elif self._retention:
                self._evict(sequence)
        self._left -= set(np.flatnonzero(result.remaining == 0).tolist())

    def _learn(self, sequence, drawn: np.ndarray, draft: list[int], is_last: bool) -> None:
        self._drafts.extend(sequence, drawn)
        if draft:
            self._drafts.observe(len(draft), len(drawn) - 1, is_last)
            self.stats.drafted += len(draft)
            self.stats.accepted += len(drawn) - 1

    def _stop(self, sequence: Sequence, drawn: list[int], is_last: bool) -> int | None:
        """Tokens up to a stop string, found in the text of the calls before, and for the last one
        of this one too: the others are searched while the engine goes on."""
        stop = sequence.found_stop()
        if stop is None:
            if sequence.search is None:
                before = sequence.field("tokens")[: sequence.count - len(drawn)].tolist()
                stops = sequence.sampling.stop_strings
                sequence.search = StopSearch(stops, self._decode, before)
            sequence.stop = self._texts.submit(sequence.search, drawn)
        return sequence.found_stop() if is_last else stop

    def _abort(self, sequence: Sequence) -> None:
        stop = sequence.found_stop()
        reason, count = ("abort", sequence.count) if stop is None else ("stop", stop)
        self._finish(sequence, reason, count)

    def _finish(self, sequence: Sequence, reason: str, count: int) -> None:
        self._leave(sequence)
        self._waiting.ended(sequence.request, None if reason == "abort" else count)
        self._drafts.remove(sequence.request)
        self._ended.append(sequence.trajectory(reason, self._engine.quant_id, count))

    def _evict(self, sequence: Sequence) -> None:
        size, kept = self._engine.page_size, self._retention.sinks + self._retention.window
        while (sequence.length - 1 - sequence.shift) // size > kept:
            page = sequence.evict(self._retention.sinks, size, self._engine.max_length)
            self.pages[sequence.shard].release([page])
            self.stats.evicted += 1
            self._shift[sequence.slot] = sequence.shift
            self._tabulate(sequence)
