"""Continuous batching on one thread. One request goes through these functions:

1. `Scheduler.add` checks the request (`request_check.check`) and queues it (`WaitQueue.add`).
2. `_admit`: `BlockManager.admit` gives it a free slot and pages, in the order of the policy.
   Requests with the same prompt (a group) share the pages of the prompt and its one prefill
   (`Prefixes.join`).
3. `_prefill`: `Prefiller.run` computes its prompt chunk by chunk, at most `prefill_calls` calls per
   step while other sequences decode.
4. `_insert`: once the prompt is filled, its slot gets the request's state and its own copy of the
   last page, if the prompt does not fill that page (`Runner.insert`).
5. `_generate`, once per step: `BlockManager.grow` adds the pages of the next tokens, then
   `Runner.generate` samples up to `steps` tokens of every running slot. With drafts `Runner.verify`
   does.
6. `_collect` reads the tokens, stamps them with the version of the weights, and looks for the end:
   a stop id, a stop string (`StopStrings.search`) or `max_tokens`.
7. `Endings.finish_or_evict` leaves full pages in the cache (`Prefixes.keep`) and frees slot and pages, and `step`
   returns the trajectory. A sequence that goes on drops its evicted pages (`BlockManager.evict`)
   and is back at 5.
8. `extend` adds the request again, with the trajectory and the tokens of an environment. It is back
   at 1, and 2 finds the pages that have not been taken.

When a shard has no page left, its youngest sequence loses its pages and goes back to 2. It keeps
its tokens. The oldest sequence never loses its pages, and all pages of a shard hold the longest
sequence, so every request ends.

With `async_scheduling`, `step` reads the tokens of the call before its own, so the engine samples
while the host works. A sequence that ends by a stop wastes one row of the next call. A sequence
that must end by its length frees its slot before its last tokens are read (`_free_ending`). An
abort, a pause, a preemption and a lack of pages depend on every token, so each reads the call
first.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxrl_tis.engine import request_check
from jaxrl_tis.engine.block_manager import BlockManager, KVEviction
from jaxrl_tis.engine.endings import Endings, aborted
from jaxrl_tis.engine.drafts import NoDrafts, Paced, verified
from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.policies import FirstCome, Policy
from jaxrl_tis.engine.prefiller import Prefiller
from jaxrl_tis.engine.protocol import EngineProtocol, Insertion, ResultTokens
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory, extended
from jaxrl_tis.engine.routes import Block, PageRoutes, SequenceRoutes
from jaxrl_tis.engine.runner import Runner
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.wait_queue import WaitQueue

PAUSES = ("abort", "retract", "in_place")
OLDER = 2**60  # number of arrivals by which a sequence of several turns is older than the others


class Full(RuntimeError):
    """As many requests are pending as the scheduler takes; call `step` and try again."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A decode call whose tokens have not been read.

    Attributes:
      result: arrays on the device.
      rows: {sequence: (its slot, the most tokens that it samples)}.
      version: version of the weights.
      drafts: tokens [slots, n] of the drafts that the call verifies, and how many each slot has [slots];
        () without drafts.
      prefilled: the routes that prefill calls wrote between the call before and this one.
      start: seconds of the clock before its drafts were made.
    """

    result: ResultTokens
    rows: dict[Sequence, tuple[int, int]]
    version: int
    drafts: tuple
    prefilled: list[Block]
    start: float


class Scheduler:
    """Feeds an engine: call `step()` until `pending` is 0.

    Args:
      engine: see EngineProtocol.
      params: serving parameters.
      version: version of these parameters, stamped on every token they sample.
      policy: order of the waiting requests, see policies.POLICIES.
      max_wait_admissions: a request that has waited for this many admissions goes first, whatever
        the policy says; None sets no bound.
      max_pending: `add` raises Full beyond this number of requests; None takes all.
      prefill_calls: prefill calls per step while sequences are decoding.
      preempt_after: tokens since it got its slot after which a sequence makes room for a waiting
        one that comes before it. It keeps its pages while there are enough. 0 turns this off.
      retention: pages that a sequence keeps; None keeps all.
      keeps_pages: prefix caching: full pages of prompts, and of sequences that ended, stay for later
        sequences that begin with the same tokens, until their room is needed or the weights change.
      drafts: proposes drafts that one pass of the engine verifies; None decodes token by token.
      decode: tokens -> text, for requests with stop strings. Runs in a thread of its own.
      async_scheduling: read the tokens of a call after the next one has been sent off. Has no
        effect with drafts or retention, which depend on the tokens.
      teacher: version of the weights -> serving parameters of the teacher whose logits are mixed in,
        None without one.
      clock: tells seconds; drafts may depend on the times of calls.
    """

    def __init__(
        self, engine: EngineProtocol, params: Any, version: int = 0, *,
        policy: Policy | None = None, max_wait_admissions: int | None = None,
        max_pending: int | None = None, prefill_calls: int = 4, preempt_after: int = 0,
        retention: KVEviction | None = None, keeps_pages: bool = True, drafts: Paced | None = None,
        decode: Callable[[np.ndarray], str] | None = None, async_scheduling: bool = False,
        teacher: Callable[[int], Any] = lambda version: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.stats, self._clock = Stats(), clock
        self._engine = engine
        self._policy, self._drafts = policy or FirstCome(), drafts or NoDrafts()
        self._max_pending, self._preempt_after = max_pending, preempt_after
        self._async_scheduling = async_scheduling and drafts is None and retention is None
        self._can_decode, self._prefill_calls = decode is not None, prefill_calls
        self._waiting = WaitQueue(self._policy, max_wait_admissions, engine.page_size)
        self._blocks = BlockManager(
            engine, self._waiting, self.stats, preempt_after, retention, keeps_pages
        )
        self._runner = Runner(engine, params, version, self.stats, teacher, self._drafts)
        self._routes = PageRoutes(engine.shards, engine.page_size)
        self._prefiller = Prefiller(
            engine, self._runner, self._blocks.prefixes, self.stats, self._routes
        )
        self._call: Call | None = None
        self._live: dict[str, Sequence] = {}
        self._endings = Endings(
            engine, self._runner, self._blocks, self._waiting, self._drafts, self._routes, self._live,
            decode,
        )
        self._arrivals = 0

    # For callers

    @property
    def pending(self) -> int:
        """The number of requests that have not been returned yet."""
        return len(self._live)

    @property
    def pages(self) -> list[Pages]:
        """The pages of each shard."""
        return self._blocks.pages

    def add(self, request: Request) -> None:
        """Queues a request. ValueError if it can never run or its id is pending already, Full if
        max_pending requests are pending."""
        request_check.check(request, self._engine, self._live, self._can_decode)
        if self._max_pending is not None and self.pending >= self._max_pending:
            raise Full(
                f"{self.pending} requests are pending, and at most {self._max_pending} may be; "
                "retry later"
            )
        routes = SequenceRoutes.of(request.partial, self._engine)
        is_extended = request.partial is not None and request.partial.num_turns > 1
        order = self._arrivals - OLDER * is_extended
        sequence = Sequence.of(request, order, self._waiting.admissions, routes)
        self._live[request.id] = sequence
        self._waiting.add(sequence)
        self._arrivals += 1
        self._policy.added(request)
        self._drafts.add(request)

    def extend(
        self, ended: Trajectory, tokens: list[int] | np.ndarray, sampling: SamplingParams
    ) -> None:
        """Queues the request of a record again, with tokens of an environment after the record and
        before the next turn. It goes before requests without turns: its pages may be cached.
        ValueError if the sequence can never run or its id is pending; Full: see `add`.

        Args:
          ended: a record that `step` or `pause` returned. Nothing else of its sequence is needed.
          tokens: the given tokens, see records.extended.
          sampling: of the next turn. Its max_tokens and min_tokens count all tokens of the next
            record after the prompt: these of `ended`, these given and those of the turn.
        """
        partial = extended(ended, tokens)
        request_check.check_extension(partial, sampling, self._engine)
        self.add(Request(ended.id, ended.prompt, ended.seed, sampling, partial))

    def abort(self, request_id: str) -> None:
        """Ends a request. The next step returns its tokens so far, with stop_reason "abort" unless
        a stop string is in them. KeyError if no request of this id is pending."""
        if request_id not in self._live:
            raise KeyError(f"no live request has the id {request_id!r}")
        self._collect()
        if self._blocks.holds(self._live[request_id]):
            self._endings.abort(self._live[request_id])

    def pop_ended(self) -> list[Trajectory]:
        """Returns the trajectories that ended since the last step, by `abort` for example, without a
        step. Raises NonFinite, see `step`."""
        self._endings.raise_failed()
        return self._endings.pop()

    def pause(self, mode: str) -> list[Trajectory]:
        """Interrupts everything between two steps, as new weights do.

        "abort" returns all live requests as they are, to be added again as `partial`. "retract"
        drops their keys, which the next steps rebuild under the weights of that time. "in_place"
        lets them go on with the keys they have.
        """
        if mode not in PAUSES:
            raise ValueError(f"pause mode {mode!r} is none of {', '.join(PAUSES)}")
        self._collect()
        for sequence in self._blocks.sequences():
            if mode == "abort":
                self._endings.abort(sequence)
            elif mode == "retract" and sequence.pages:
                self._blocks.retract(sequence)
        return self._endings.pop() if mode == "abort" else []

    def set_params(self, params: Any, version: int) -> None:
        """Replaces the weights of all tokens sampled from now on. Running sequences keep the keys
        that older weights wrote (`kv_version` says so). Prompts that wait for their prefill are
        filled anew, in other pages where running sequences may read the old ones."""
        self._runner.set_params(params, version)
        self.forget_pages()
        self._drafts.forget()

    def forget_pages(self) -> None:
        """Empties the prefix cache. Running sequences keep their own keys."""
        for sequence in self._blocks.prefixes.following():
            self._blocks.retract(sequence)
        self._blocks.prefixes.forget()

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Returns the tokens read so far of the requests among these that have not ended. A stop
        string may end the record before the last of these tokens, and a sequence that saw evicted
        keys may have to start again."""
        live = {id: self._live[id] for id in request_ids if id in self._live}
        return {id: s.field("tokens") for id, s in live.items() if self._blocks.holds(s)}

    def records(self) -> list[Trajectory]:
        """Returns the records, as an abort would write them, of all sequences that have sampled a
        token. The sequences go on."""
        self._collect()
        ends = {s: aborted(s) for s in self._blocks.sequences() if s.count}
        return [s.trajectory(why, self._engine.quant_id, n) for s, (why, n) in ends.items()]

    def sync_digest(self) -> dict[str, Any]:
        """Returns all counts and everything that decides the next step, by name. Schedulers of
        several processes with equal digests take equal steps."""
        own = {"live": list(self._live), "waiting": [s.request.id for s in self._waiting]}
        return self.stats.counts() | own | self._blocks.sync_digest()

    def release_cache(self) -> None:
        """Frees the memory of slots and pages until the next step. ValueError while requests are
        pending."""
        if self.pending:
            raise ValueError(f"{self.pending} requests are pending; step until there are none")
        self._blocks.prefixes.forget()
        self._blocks.to_release = set()
        self._routes.forget()
        self._runner.release_cache()

    def sleep(self) -> None:
        """Frees the memory of slots, pages and weights; call `set_params` before the next step.
        ValueError while requests are pending."""
        self.release_cache()
        self._runner.release_params()

    def close(self) -> None:
        """Ends the thread that searches for stop strings."""
        self._endings.close()

    # One step

    def step(self) -> list[Trajectory]:
        """Admits, prefills, inserts, generates once, and returns the trajectories that ended.
        Raises NonFinite for tokens whose log-prob is not finite; the next step returns what ended
        beside them."""
        start = time.perf_counter()
        self._runner.start()
        self._admit()
        self._prefill()
        call = self._generate()
        self._collect()
        self._call = call
        if not self._async_scheduling:
            self._collect()
        finished = self.pop_ended()
        if not self._live:
            self._call = None  # its tokens belong to no request
        self.stats.seconds += time.perf_counter() - start
        return finished

    def _admit(self) -> None:
        """Gives waiting sequences slots and pages. Those that kept their pages decode at once."""
        if self._preempt_after and any(self._waiting):
            self._collect()
        self._free_ending()
        parked = self._blocks.admit()
        # The last token's key is not in its pages yet: decode writes it.
        self._insert({s: s.insertion(s.length - 1) for s in parked})

    def _free_ending(self) -> None:
        """Frees slots and pages of the sequences that must end in a call that has not been read.
        Their tokens cannot change that."""
        for sequence in self._call.rows if self._call else ():
            if sequence.is_running and sequence.in_flight == sequence.remaining:
                self._endings.keep_pages(sequence)
                self._blocks.free_ending(sequence)

    def _prefill(self) -> None:
        """Prefills in at most `prefill_calls` calls, or until a sequence decodes, and inserts the
        sequences whose prompt is filled."""
        for calls in itertools.count():
            self._insert_filled()
            has_enough = calls >= self._prefill_calls and self._blocks.running()
            if has_enough or not self._prefiller.run():
                return

    def _insert_filled(self) -> None:
        rows = self._prefiller.pop_filled()
        self._insert(rows)
        for sequence in rows:
            self._blocks.drop_idle(sequence)

    def _insert(self, rows: dict[Sequence, Insertion]) -> None:
        """Puts sequences into their slots."""
        if rows:
            self._runner.insert({sequence.slot: row for sequence, row in rows.items()})
        for sequence in rows:
            self._blocks.settle(sequence)
            self._drafts.begin(sequence)

    def _generate(self) -> Call | None:
        """Sends off one decode call of all running sequences, with drafts if there are any. None if
        every sequence has all its tokens in flight."""
        engine, blocks, start = self._engine, self._blocks, self._clock()
        length, drafts = self._drafts.propose(blocks.running())
        width = length + 1 if drafts else engine.steps
        if not blocks.can_grow(width):
            self._collect()
        blocks.grow(width)
        active = [s for s in blocks.running() if s.in_flight < s.remaining]
        if not active:
            return None
        # Copies: the engine may read them while the next step changes them.
        table, shift = blocks.table.copy(), blocks.shift.copy()
        if blocks.to_release:
            self._runner.release(sorted(blocks.to_release))
            blocks.to_release.clear()
        rows: tuple = ()
        if drafts:
            rows = self._drafts.rows(drafts, length, self._runner.state, table, shift)
            result = self._runner.verify(*rows, table, shift)
        else:
            result = self._runner.generate(table, shift)
        taken = {s: (s.slot, min(width, s.remaining - s.in_flight)) for s in active}
        for sequence, (_, most) in taken.items():
            sequence.in_flight += most
        return Call(result, taken, self._runner.version, rows, self._routes.pop_unread(), start)

    def _collect(self) -> None:
        """Waits for the call that has not been read, if there is one, and appends its tokens to
        their sequences. Each sequence then ends or goes on."""
        call, self._call = self._call, None
        if not call:
            return
        result: Any = self._runner.read(call.result)  # arrays of numpy
        # Pieces of sequences keep the result, and so the tokens of all slots.
        routes, page_mass = result.routes, result.page_mass
        result = dataclasses.replace(result, routes=None, page_mass=None)
        self._routes.read(call.prefilled)
        counts = result.valid.sum(axis=0)
        is_bad = result.valid & ~np.isfinite(result.logp_behav)
        self.stats.add_call(result.valid[:1] if call.drafts else result.valid)
        compared = accepted = np.zeros_like(counts)
        width = call.drafts[0].shape[1] if call.drafts else 0
        passes = 1 if call.drafts else int(result.valid.any(axis=1).sum())
        self._drafts.timed(width, (self._clock() - call.start) / max(passes, 1))
        if call.drafts:
            guessed, drafted = map(np.asarray, call.drafts)
            compared, accepted = verified(guessed, drafted, result.tokens, counts)
            self._drafts.observe(int(compared.sum()), int(accepted.sum()))
            self.stats.add_drafts(drafted, compared, accepted)
        for sequence, (slot, most) in call.rows.items():
            if sequence.has_ended:
                continue  # by a stop string, in the call before
            count = int(counts[slot])
            sequence.append(Drawn(
                result, slot, count, call.version, sequence.kv_version, sequence.segment,
                self._drafts.version, int(compared[slot]), int(accepted[slot]),
            ), most)
            if routes is not None and sequence.routes is not None and count:
                sequence.routes.sampled(sequence.length - count - 1, routes[:count, slot])
            if page_mass is not None:
                sequence.weigh(page_mass[slot])
            self.stats.tokens += count
            tokens, is_last = result.tokens[:count, slot], result.remaining[slot] == 0
            self._drafts.extend(sequence, tokens)
            if is_bad[:, slot].any():
                index = sequence.count - count + int(is_bad[:, slot].argmax())
                self._endings.fail(sequence, index)
            else:
                self._endings.finish_or_evict(sequence, tokens, is_last)
        self._blocks.to_release -= set(np.flatnonzero(result.remaining == 0).tolist())
