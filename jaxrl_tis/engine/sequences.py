"""The host's state of a live request: its tokens, its slot and its pages."""

import dataclasses
import itertools
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl_tis.engine.pages import NULL, content_keys
from jaxrl_tis.engine.protocol import Insertion, ResultTokens
from jaxrl_tis.engine.records import (
    NEVER, NO_DRAFTER, OF_DRAFTS, Request, SamplingParams, Trajectory, draft_fields,
)
from jaxrl_tis.engine.routes import SequenceRoutes
from jaxrl_tis.engine.text import StopSearch
from jaxrl_tis.fields import DRAWN

OF_RUN = ("version", "kv_version", "segment")  # the same for all tokens of a call


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The tokens of one slot in one `generate` call, the first `count` of its arrays.

    Attributes:
      drafter_version: see Trajectory; of the first `verified` tokens, if the slot had a draft.
      accepted: the number of these that equal the draft.
    """

    result: ResultTokens
    slot: int
    count: int
    version: int
    kv_version: int
    segment: int
    drafter_version: int = NO_DRAFTER
    verified: int = 0
    accepted: int = 0

    def of_draft(self, name: str) -> np.ndarray:
        """Returns a field of OF_DRAFTS of its tokens."""
        index = np.arange(self.count)
        if name == "accepted":
            return index < self.accepted
        return np.where(index < self.verified, self.drafter_version, NO_DRAFTER)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A live request, its sampled tokens, and its slot and pages.

    Attributes:
      order: number of its arrival.
      admitted_after: the number of admissions before it began to wait.
      key: bytes of its tokens when it began to wait, and whether their log-probs are needed.
        Sequences with equal keys share a Prefix.
      base_key: bytes of the tokens in the full pages of its prompt, if it has sampled tokens; b""
        otherwise.
      page_keys: content keys of its full pages, as far as `keys_of_pages` was asked.
      pieces: sampled tokens in order, by call.
      count: the number of sampled tokens.
      read: {field: (number of pieces read so far, their values)}.
      slot: its slot; -1 while it waits.
      shard, pages: its pages and their shard. A sequence without pages may get another shard.
      page_numbers: the index in the whole sequence of each of its pages.
      is_running: its slot decodes. False while its pages are being filled.
      gone: of each group of layers, the numbers of its pages that the group has evicted and another keeps.
      page_mass: [G,P] attention of each group of layers to each page that it keeps so far, see `weigh`; of
        the first pages, or empty.
      shift: positions evicted from its pages.
      evict_step: see Trajectory.
      segment: how often its pages were rebuilt.
      kv_version: version of the oldest weights that filled them.
      since_admission: tokens sampled since it last got a slot.
      in_flight: the most tokens that it samples in calls that have not been read.
      has_ended: its record is written.
      prompt_logps: see Trajectory; None before its prompt is prefilled.
      routes: the experts of its tokens; None unless recorded.
      turn_start: the number of tokens after the prompt before the first that the running turn
        samples.
      search: search for its stop strings in the tokens of the running turn.
      stop: the result of the last search.
    """

    request: Request
    order: int
    admitted_after: int
    pieces: list[Drawn | Trajectory]
    count: int
    read: dict[str, tuple[int, np.ndarray]] = dataclasses.field(default_factory=dict)
    key: bytes = b""
    base_key: bytes = b""
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    segment: int = 0
    is_running: bool = False
    slot: int = -1
    shard: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    page_numbers: list[int] = dataclasses.field(default_factory=list)
    gone: tuple[set[int], ...] = ()
    page_mass: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 0)))
    shift: int = 0
    evict_step: np.ndarray | None = None
    kv_version: int = 0
    since_admission: int = 0
    in_flight: int = 0
    has_ended: bool = False
    prompt_logps: np.ndarray | None = None
    routes: SequenceRoutes | None = None
    turn_start: int = 0
    search: StopSearch | None = None
    stop: Future | None = None

    @classmethod
    def of(
        cls, request: Request, order: int, admitted_after: int,
        routes: SequenceRoutes | None = None,
    ) -> "Sequence":
        partial = request.partial
        if partial is None or not len(partial.tokens):
            return cls(request, order, admitted_after, [], 0, routes=routes)
        given = np.flatnonzero(~partial.mask)
        return cls(
            request, order, admitted_after, [partial], len(partial.tokens),
            segment=int(partial.segment[-1]), prompt_logps=partial.prompt_logps, routes=routes,
            turn_start=max(request.start, int(given[-1]) + 1 if len(given) else 0),
        )

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def needs_scores(self) -> bool:
        """Whether its prefill has to give the log-probs of its prompt."""
        return self.sampling.prompt_logprobs and self.prompt_logps is None

    @property
    def length(self) -> int:
        return len(self.request.prompt) + self.count

    @property
    def remaining(self) -> int:
        return self.sampling.max_tokens - self.count

    def insertion(self, cached: int, copy: tuple[int, int] = (NULL, NULL)) -> Insertion:
        """Returns the content of its slot, see protocol.Insertion."""
        return Insertion(self.request, self.tokens(), self.remaining, cached, copy)

    def append(self, drawn: Drawn, in_flight: int) -> None:
        """Appends the tokens of a call, which had at most `in_flight` tokens for this sequence."""
        self.pieces.append(drawn)
        self.in_flight -= in_flight
        self.count += drawn.count
        self.since_admission += drawn.count

    def field(self, name: str) -> np.ndarray:
        """Returns a field of all sampled tokens, a cached array that callers must not change."""
        if not self.pieces:
            is_wide = name in DRAWN and DRAWN[name].width
            return np.zeros((0, 0) if is_wide else 0, _dtype(name))
        if name not in self.read:
            self.read[name] = len(self.pieces), _joined(self.pieces, name)
        number, read = self.read[name]
        if number < len(self.pieces):
            read = np.concatenate([read, _joined(self.pieces[number:], name)])
            self.read[name] = len(self.pieces), read
        return read

    def tokens(self) -> np.ndarray:
        """Returns the prompt and the sampled tokens."""
        return np.concatenate([self.request.prompt, self.field("tokens")])

    def keys_of_pages(self, size: int) -> list[bytes]:
        """Returns the keys of its full pages, see pages.content_keys."""
        if len(self.page_keys) < self.length // size:
            self.page_keys = content_keys(self.tokens(), size, self.page_keys)
        return self.page_keys

    def forget(self) -> None:
        """Called when its pages were freed. Its tokens stay, unless some of them saw evicted keys.
        A prefill cannot rebuild those, so the sequence starts again."""
        if self.shift:
            new = Sequence.of(self.request, self.order, self.admitted_after)
            if self.routes is not None:
                self.routes.restart()
            self.pieces, self.count, self.segment = new.pieces, new.count, new.segment
            self.read, self.page_keys = {}, []
            self.shift, self.evict_step, self.search, self.stop = 0, None, None, None
            self.page_mass, self.gone = np.zeros((1, 0)), ()

    def filled(self, version: int) -> None:
        """Called when a prefill with weights of this version wrote the keys of all its tokens."""
        self.kv_version = version
        self.segment += self.count > 0

    def kept(self, group: int) -> list[int]:
        """Returns the indices of its pages that a group of layers keeps: as many in every group."""
        gone = self.gone[group] if self.gone else set()
        return [i for i, number in enumerate(self.page_numbers) if number not in gone]

    @property
    def width(self) -> int:
        """The number of pages that each group of layers keeps."""
        return len(self.pages) - len(self.gone[0] if self.gone else ())

    def weigh(self, mass_gp: np.ndarray) -> None:
        """Adds the attention [G,P] of a call to its pages, see `ResultTokens.page_mass`."""
        mass, before = mass_gp[:, : self.width].astype(np.float64), self.page_mass[:, : self.width]
        mass[:, : before.shape[1]] += before
        self.page_mass = mass

    def lightest(self, group: int, first: int, stop: int) -> int:
        """Returns which page first..stop-1 of those that a group of layers keeps has the group's least
        attention so far, the oldest of equal ones."""
        mass = self.page_mass[group, first:stop]
        return first + int(np.argmin(mass)) if len(mass) else first

    def evict(self, indices: list[int], size: int, capacity: int) -> list[int]:
        """Evicts one page of each group of layers, by its index among those that the group keeps. Queries
        from the last token on do not see its keys. Returns the pages that no group keeps any more, without
        which the sequence goes on."""
        if self.evict_step is None:
            self.evict_step = np.full((capacity, len(indices)), NEVER, np.int32)
            self.gone = tuple(set() for _ in indices)
        for group, index in enumerate(indices):
            number = self.page_numbers[self.kept(group)[index]]
            self.gone[group].add(number)
            self.evict_step[number * size : (number + 1) * size, group] = self.length - 1
        self.shift += size
        without = lambda mass_p, index: np.concatenate([mass_p[:index], mass_p[index + 1 :]])
        self.page_mass = np.stack([*map(without, self.page_mass, indices)])
        unread = set.intersection(*self.gone)
        is_left = [number not in unread for number in self.page_numbers]
        released = [page for page, is_in in zip(self.pages, is_left, strict=True) if not is_in]
        self.pages = [*itertools.compress(self.pages, is_left)]
        self.page_numbers = [*itertools.compress(self.page_numbers, is_left)]
        for numbers in self.gone:
            numbers -= unread
        return released

    def found_stop(self) -> int | None:
        """Waits for the last search and returns the number of tokens up to the end of a stop
        string; None if there is none."""
        count = self.stop.result() if self.stop else None
        return None if count is None else self.turn_start + count

    def trajectory(self, stop_reason: str, quant_id: str, count: int) -> Trajectory:
        """Returns the record of its first `count` tokens."""
        request = self.request
        fields: dict[str, Any] = {name: self.field(name)[:count] for name in (*DRAWN, *OF_RUN)}
        evict_step: np.ndarray = np.zeros(0, np.int32)
        if self.evict_step is not None:
            evict_step = self.evict_step[: len(request.prompt) + count]
            evict_step = evict_step[:, 0] if len(self.gone) == 1 else evict_step
        if (self.field("drafter_version")[:count] != NO_DRAFTER).any():
            fields |= {name: self.field(name)[:count] for name in OF_DRAFTS}
        if self.prompt_logps is not None:
            fields["prompt_logps"] = self.prompt_logps
        if (partial := request.partial) is not None and len(partial.tokens):
            new = count - len(partial.tokens)
            fields["mask"] = np.concatenate([partial.mask, np.ones(new, bool)])
            fields["turn"] = np.concatenate([partial.turn, np.repeat(partial.turn[-1:], new)])
        if self.routes is not None:
            rows = self.routes.joined(len(request.prompt) + count)
            fields["routes"], fields["rerouted"] = rows
        return Trajectory(
            id=request.id, prompt=request.prompt, stop_reason=stop_reason, seed=request.seed,
            request=request.hash, quant_id=quant_id, evict_step=evict_step,
            temperature=request.sampling.temperature, **fields,
        )


def _dtype(name: str) -> str:
    if name in OF_DRAFTS:
        return OF_DRAFTS[name][0]
    return "int32" if name in OF_RUN else DRAWN[name].dtype


def _joined(pieces: list, name: str) -> np.ndarray:
    """Returns a field of all tokens of the pieces. Only the first piece may be a Trajectory."""
    if not isinstance(pieces[0], Trajectory):
        return _drawn(pieces, name)
    earlier = getattr(pieces[0], name).astype(_dtype(name), copy=False)
    if name in OF_DRAFTS:
        earlier = draft_fields(pieces[0])[name]
    return np.concatenate([earlier, _drawn(pieces[1:], name)]) if pieces[1:] else earlier


def _drawn(pieces: list[Drawn], name: str) -> np.ndarray:
    """Returns a field of the tokens of at least one piece."""
    dtype, counts = _dtype(name), [p.count for p in pieces]
    if name in OF_DRAFTS:
        if all(p.drafter_version == NO_DRAFTER for p in pieces):
            return np.full(sum(counts), OF_DRAFTS[name][1], dtype)
        return np.concatenate([p.of_draft(name) for p in pieces], dtype=dtype, casting="unsafe")
    if name in OF_RUN:
        return np.array([getattr(p, name) for p in pieces], dtype).repeat(counts)
    if getattr(pieces[0].result, name) is None:
        return np.zeros((sum(counts), 0), dtype)
    parts = [getattr(p.result, name)[: p.count, p.slot] for p in pieces]
    # For one array `concatenate` takes three times as long.
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts[1:] else parts[0].astype(dtype)
