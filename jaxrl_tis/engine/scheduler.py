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

With `overlap` a step reads the tokens of the call before its own: the engine draws while the host
does the rest. A sequence that ends by a stop costs a row of one call more; one that must end by its
length gives its slot away before its last tokens are read. What needs to know all tokens (an
abort, a pause, making way, too few pages) reads them first.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine.block_manager import BlockManager, KVEviction
from jaxrl_tis.engine.drafts import Drafts, NoDrafts
from jaxrl_tis.engine.pages import NULL, Pages
from jaxrl_tis.engine.policies import FirstCome, Policy
from jaxrl_tis.engine.prefixes import Prefix
from jaxrl_tis.engine.protocol import Chunk, EngineProtocol, Insertion, ResultTokens
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.text import StopSearch
from jaxrl_tis.engine.wait_queue import WaitQueue
from jaxrl_tis.fields import DRAWN

PAUSES = ("abort", "retract", "in_place")


class Full(RuntimeError):
    """As many requests are pending as the scheduler takes; call `step` and try again."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the engine whose tokens have not been read.

    Attributes:
      result: its arrays; the host waits for them when it reads them.
      rows: the sequences that it draws for, their slots, and how many tokens each draws at most.
      version: of the weights; drafts: that it verifies.
    """

    result: ResultTokens
    rows: dict[Sequence, tuple[int, int]]
    version: int
    drafts: dict[Sequence, list[int]]


class Scheduler:
    """Feeds an engine: call `step()` until `pending` is 0.

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
      keeps_pages: full pages of prompts stay, for later ones that begin with the same tokens, until
        their room is needed or the weights change.
      drafts: proposes drafts that one pass of the engine verifies; None decodes token by token.
      decode: tokens -> text, for requests with stop strings; runs in a thread of its own.
      overlap: read the tokens of a call after the next one has been sent off; not with drafts or
        retention, which need them.
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
        retention: KVEviction | None = None,
        keeps_pages: bool = True,
        drafts: Drafts | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
        overlap: bool = False,
    ):
        self._engine = engine
        self._state = None
        self._params, self._version = params, version
        self._policy = policy or FirstCome()
        self._max_pending, self._prefill_calls = max_pending, prefill_calls
        self._drafts, self._divide = drafts or NoDrafts(), divide
        self._overlap = overlap and drafts is None and retention is None
        self._call: Call | None = None
        self._decode, self._texts = decode, None
        self._waiting = WaitQueue(self._policy, max_bypass, engine.page_size)
        self._ended: list[Trajectory] = []
        self._live: dict[str, Sequence] = {}
        self._arrivals = 0
        self.stats = Stats()
        self._blocks = BlockManager(
            engine, self._waiting, self.stats, divide, retention, keeps_pages
        )

    # What callers do

    @property
    def pending(self) -> int:
        """The number of requests that have not been returned yet."""
        return len(self._live)

    @property
    def pages(self) -> list[Pages]:
        """The pages of each shard."""
        return self._blocks.pages

    def set_params(self, params: Any, version: int) -> None:
        """Replaces the weights of all tokens that are drawn from now on. Running sequences keep the
        keys that older weights wrote (`kv_version` says so), while prompts are filled anew, in
        other pages where running sequences may read the old ones."""
        self._params, self._version = params, version
        for sequence in self._blocks.prefixes.following():
            self._blocks.retract(sequence)
        self._blocks.prefixes.forget()
        self._drafts.forget()

    def facts(self) -> dict[str, Any]:
        """Returns by name what it has counted and what decides its next step: who waits and lives,
        and the pages in the order in which they will be taken, which tells of all that was given
        back."""
        blocks = self._blocks
        return self.stats.counts() | {
            "live": list(self._live), "waiting": [s.request.id for s in self._waiting],
            "free_pages": [pages.order for pages in blocks.pages], "table": blocks.table,
            "shift": blocks.shift,
        }

    def add(self, request: Request) -> None:
        """Queues a request. ValueError when it can never run or its id is alive, Full when
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
        self._read()
        if self._blocks.holds(self._live[request_id]):
            self._abort(self._live[request_id])

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Returns the tokens that those of these requests have drawn so far that have not ended, as
        far as they have been read. Later ones follow them; but a stop string may end the record
        before the last of them, and a sequence that saw evicted keys may have to start again."""
        live = {id: self._live[id] for id in request_ids if id in self._live}
        return {id: s.field("tokens") for id, s in live.items() if self._blocks.holds(s)}

    def records(self) -> list[Trajectory]:
        """Returns the records, as an abort would write them, of the sequences that have drawn a
        token; they go on."""
        self._read()
        drawn = [s for s in self._blocks.sequences() if s.count]
        return [s.trajectory("abort", self._engine.quant_id, s.count) for s in drawn]

    def pause(self, mode: str) -> list[Trajectory]:
        """Interrupts everything between two steps, as new weights do.

        "abort" returns all live requests as they are, to be added again as `partial`; "retract"
        drops their keys, which the next steps rebuild under the weights of that time; "in_place"
        lets them go on with the keys they have.
        """
        if mode not in PAUSES:
            raise ValueError(f"pause mode {mode!r} is none of {', '.join(PAUSES)}")
        self._read()
        for sequence in self._blocks.sequences():
            if mode == "abort":
                self._abort(sequence)
            elif mode == "retract" and sequence.pages:
                self._blocks.retract(sequence)
        return self._returned() if mode == "abort" else []

    def step(self) -> list[Trajectory]:
        """Admits, prefills, generates once, and returns the trajectories that ended."""
        start = time.perf_counter()
        if self._state is None:
            self._state = self._engine.init_state()
        if self._divide and any(self._waiting):
            self._read()
        self._let_go()
        # The last token's key is not in its pages yet: decode writes it.
        parked = self._blocks.admit()
        self._insert({s: (s.length - 1, (NULL, NULL)) for s in parked})
        self._fill()
        width, drafts = self._propose()
        if not self._blocks.can_grow(width):
            self._read()
        self._blocks.grow(width)
        call = self._generate(width, drafts)
        self._read()
        self._call = call
        if not self._overlap:
            self._read()
        finished = self._returned()
        if not self._live:
            self._call = None  # it draws for nobody
        self.stats.seconds += time.perf_counter() - start
        return finished

    def release_cache(self) -> None:
        """Gives the memory of slots and pages back until the next step; ValueError while requests
        are pending."""
        if self.pending:
            raise ValueError(f"{self.pending} requests are pending; step until there are none")
        self._blocks.prefixes.forget()
        self._state, self._blocks.left = None, set()

    def close(self) -> None:
        """Ends the thread that looks for stop strings, if any request had one."""
        if self._texts is not None:
            self._texts.shutdown()
            self._texts = None

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
            "penalties, logit_bias and min_tokens with stop ids need an engine with penalties=True":
                sampling.is_penalised and not engine.num_penalised,
            "min_tokens bars every token of the vocabulary, as all are stop ids":
                sampling.min_tokens > 0 and len(set(sampling.stop_ids)) >= engine.vocab_size,
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
                "the partial trajectory lacks the prompt's log-probs; start it again":
                    sampling.prompt_logprobs and len(partial.tokens) > 0
                    and not len(partial.prompt_logps),
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

    def _returned(self) -> list[Trajectory]:
        ended, self._ended = self._ended, []
        for trajectory in ended:
            del self._live[trajectory.id]
        return ended

    # Prefill

    def _fill(self) -> None:
        self._insert_filled()
        calls = 0
        while calls < self._prefill_calls or not self._blocks.running():
            unfilled = self._blocks.prefixes.unfilled()
            if not unfilled:
                return
            self._prefill(unfilled)
            self._insert_filled()
            calls += 1

    def _prefill(self, unfilled: list[Prefix]) -> None:
        """Prefills one chunk of each of the first prefixes, as far as they fit into one call."""
        engine, prefixes = self._engine, self._blocks.prefixes
        left = dict.fromkeys(range(engine.shards), engine.prefill_batch // engine.shards)
        next_chunk = lambda p: p.tokens[p.filled : p.filled + engine.prefill_chunk]
        kind = lambda p: (engine.bucket(len(next_chunk(p))), p.logps is None)
        chunks, chosen = [], []
        for prefix in unfilled:
            if not left[prefix.shard]:
                continue
            self.stats.cached += prefixes.adopt(prefix)
            if not prefix.is_filled and (not chosen or kind(prefix) == needed):
                needed = kind(prefix)
                left[prefix.shard] -= 1
                tokens, targets = next_chunk(prefix), None
                if prefix.logps is not None:
                    targets = prefix.tokens[prefix.filled + 1 :][: engine.prefill_chunk]
                chunks.append(Chunk(prefix.shard, tokens, prefix.filled, prefix.pages, targets))
                chosen.append(prefix)
                prefixes.fill(prefix, len(tokens))
                self.stats.prefilled += len(tokens)
        args = self._params, self._state, chunks
        if chosen and chosen[0].logps is None:
            self._state = self._timed(engine.prefill, *args)
        elif chosen:
            self._state, logps = self._timed(engine.prefill_scored, *args)
            for prefix, logps_of_chunk in zip(chosen, logps, strict=True):
                prefix.logps.append(logps_of_chunk)

    def _insert_filled(self) -> None:
        rows, filled = {}, self._blocks.prefixes.filled()
        for prefix in filled:
            rest = len(prefix.tokens) % self._engine.page_size
            for sequence in prefix.waiters:
                copy = (prefix.pages[-1], sequence.pages[-1]) if rest else (NULL, NULL)
                rows[sequence] = (sequence.length, copy)
                sequence.filled(self._version)
                if sequence.needs_scores:
                    sequence.prompt_logps = prefix.prompt_logps()
            prefix.waiters = []
        self._insert(rows)
        for sequence in rows:
            self._blocks.drop_idle(sequence)

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
        for sequence in rows:
            self._blocks.settle(sequence)
            self._drafts.begin(sequence)

    # Decode

    def _propose(self) -> tuple[int, dict[Sequence, list[int]]]:
        """Returns (how many tokens the next call may draw, the drafts if there are any)."""
        length, drafts = self._drafts.propose(self._blocks.running())
        return (length + 1 if drafts else self._engine.steps), drafts

    def _let_go(self) -> None:
        """Frees the slots and pages of those that end in the call that has not been read, however
        their tokens fall: what comes into them is written after it."""
        for sequence, (slot, _) in self._call.rows.items() if self._call else ():
            if sequence.is_running and sequence.in_flight == sequence.remaining:
                self._blocks.leave(sequence)
                self._blocks.left.discard(slot)

    def _generate(self, width: int, drafts: dict[Sequence, list[int]]) -> Call | None:
        engine, blocks = self._engine, self._blocks
        going_on = [s for s in blocks.running() if s.in_flight < s.remaining]
        if not going_on:
            return None
        # Copies: the engine may read them while the next step changes them.
        arrays = blocks.table.copy(), blocks.shift.copy()
        if blocks.left:
            self._state = self._timed(engine.release, self._state, sorted(blocks.left))
            blocks.left.clear()
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
        rows = {s: (s.slot, min(width, s.remaining - s.in_flight)) for s in going_on}
        for sequence, (_, most) in rows.items():
            sequence.in_flight += most
        return Call(result, rows, self._version, drafts)

    def _read(self) -> None:
        """Waits for the call that has not been read, if there is one, and takes its tokens."""
        call, self._call = self._call, None
        if call:
            result = self._timed(jax.tree.map, np.asarray, call.result)
            self._collect(dataclasses.replace(call, result=result))

    def _timed(self, call: Callable, *args) -> Any:
        start = time.perf_counter()
        out = call(*args)
        self.stats.engine_seconds += time.perf_counter() - start
        return out

    def _collect(self, call: Call) -> None:
        result, drafts = call.result, call.drafts
        counts = result.valid.sum(axis=0)
        drew = result.valid[:1] if drafts else result.valid
        self.stats.calls += 1
        self.stats.busy += int(drew.sum())
        self.stats.slot_steps += int(drew.any(axis=1).sum()) * self._engine.slots
        for sequence, (slot, most) in call.rows.items():
            if sequence.has_ended:
                continue  # by a stop string, in the call before
            count, sampling = int(counts[slot]), sequence.sampling
            sequence.pieces.append(Drawn(
                result, slot, count, call.version, sequence.kv_version, sequence.segment
            ))
            sequence.in_flight -= most
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
            else:
                self._blocks.evict(sequence)
        self._blocks.left -= set(np.flatnonzero(result.remaining == 0).tolist())

    def _learn(self, sequence, drawn: np.ndarray, draft: list[int], is_last: bool) -> None:
        self._drafts.extend(sequence, drawn)
        if draft:
            self._drafts.observe(len(draft), len(drawn) - 1, is_last)
            self.stats.drafted += len(draft)
            self.stats.accepted += len(drawn) - 1

    def _stop(self, sequence: Sequence, drawn: list[int], is_last: bool) -> int | None:
        """Returns how many tokens there are up to a stop string. The text of the calls before has
        been searched, and for the last call this one too; the others are searched while the engine
        goes on."""
        stop = sequence.found_stop()
        if stop is None:
            if sequence.search is None:
                before = sequence.field("tokens")[: sequence.count - len(drawn)].tolist()
                stops = sequence.sampling.stop_strings
                sequence.search = StopSearch(
                    stops, self._decode, before, sequence.sampling.min_tokens
                )
            if self._texts is None:
                self._texts = ThreadPoolExecutor(1)
            sequence.stop = self._texts.submit(sequence.search, drawn)
        return sequence.found_stop() if is_last else stop

    def _abort(self, sequence: Sequence) -> None:
        stop = sequence.found_stop()
        reason, count = ("abort", sequence.count) if stop is None else ("stop", stop)
        self._finish(sequence, reason, count)

    def _finish(self, sequence: Sequence, reason: str, count: int) -> None:
        if self._blocks.holds(sequence):
            self._blocks.leave(sequence)
        sequence.has_ended = True
        self._waiting.ended(sequence.request, None if reason == "abort" else count)
        self._drafts.remove(sequence.request)
        self._ended.append(sequence.trajectory(reason, self._engine.quant_id, count))
