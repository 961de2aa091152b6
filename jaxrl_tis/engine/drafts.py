"""Drafts for speculative decoding, by prompt lookup in the samples of a group.

A draft is the continuation of an earlier occurrence of the last tokens: in the prompt, in the
sequence itself or in another sample of its prompt (grouped drafts of Seer, arXiv:2511.14617). The
engine samples the token of every position with the key of that position, and accepts a drafted
token if it equals the sampled one. So the acceptance rate is that of rejection sampling, and the
sampled distribution does not change.
"""

import collections
import dataclasses
import statistics
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_tis.engine.protocol import Chunk, Insertion
from jaxrl_tis.engine.records import NO_DRAFTER, Request
from jaxrl_tis.engine.sequences import Sequence

NGRAMS = (3, 2)  # lengths of the matches, the longer one first
MEMORY = 0.95  # decay of the measured acceptance per pass
LAST, FEW = 5, 3  # passes whose median time counts, and the fewest of them; the first one may compile


@dataclasses.dataclass
class Group:
    """The live samples of one prompt, and the last occurrence of each of their n-grams.

    Attributes:
      members: the number of live samples.
      places: {n-gram: (list of tokens, index after the n-gram)}.
    """

    members: int = 0
    places: dict[tuple, tuple[list[int], int]] = dataclasses.field(default_factory=dict)

    def learn(self, tokens: list[int], start: int) -> None:
        """Registers the n-grams before each token of a list from `start` on. The list may grow
        later."""
        for n in NGRAMS:
            for i in range(max(start, n), len(tokens)):
                self.places[tuple(tokens[i - n : i])] = tokens, i

    def guess(self, tokens: list[int], length: int) -> list[int]:
        """Returns a draft of at most `length` tokens that continues the tokens."""
        last, draft = tuple(tokens[-NGRAMS[0] :]), []
        while len(draft) < length:
            known = [last[-n:] for n in NGRAMS if last[-n:] in self.places]
            if not known:
                break
            found, place = self.places[known[0]]
            new = found[place : place + length - len(draft)]
            draft += new
            last = (*last, *new)[-NGRAMS[0] :]
        return draft


def lengths(longest: int) -> list[int]:
    """Returns the lengths that drafts may have: 1, 3, 7, ... Each is a compiled program."""
    return [2**i - 1 for i in range(1, (longest + 1).bit_length())]


def verified(
    drafts_bg: np.ndarray, drafted_b: np.ndarray, drawn_tb: np.ndarray, counts_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens of each slot's draft a pass compared with a sampled token, and how many
    of these are equal [slots]. The last comparison is the first that fails, or that at the end of the
    sequence.

    Args:
      drafts_bg: drafted tokens; drafted_b: how many each slot has.
      drawn_tb: sampled tokens, T at least G + 1; counts_b: how many each slot has.
    """
    compared_b = np.minimum(drafted_b, counts_b)
    is_equal_bg = drafts_bg == drawn_tb[: drafts_bg.shape[1]].T
    is_compared_bg = np.arange(drafts_bg.shape[1])[None] < compared_b[:, None]
    return compared_b, np.sum(is_equal_bg & is_compared_bg, axis=1)


class NoDrafts:
    """Proposes no drafts: the engine decodes token by token.

    Attributes:
      version: of the model that drafts, see Trajectory.drafter_version.
    """

    version: int = NO_DRAFTER

    def start(self) -> None:
        """Called when there are pages."""

    def release_cache(self) -> None:
        """Called when there are no pages any more."""

    def release_params(self) -> None:
        """Called when the weights are freed, until `forget`."""

    def prefill(self, chunks: list[Chunk]) -> None:
        """Called with what the engine prefills."""

    def insert(self, rows: dict[int, Insertion]) -> None:
        """Called with what the engine puts into slots."""

    def forget(self) -> None:
        """Called when the weights have changed."""

    def add(self, request: Request) -> None:
        """Called when a request is queued."""

    def remove(self, request: Request) -> None:
        """Called when a request has ended."""

    def begin(self, sequence: Sequence) -> None:
        """Called when a sequence is inserted, with all its tokens so far."""

    def keep(self, sequence: Sequence) -> None:
        """Called before the pages of a sequence stay in the cache for later ones."""

    def extend(self, sequence: Sequence, drawn: np.ndarray) -> None:
        """Called with the newly sampled tokens of a sequence."""

    def propose(self, sequences: list[Sequence]) -> tuple[int, Mapping[Sequence, Collection[int]]]:
        """Returns (length, drafts of at most `length` tokens), or (0, {}) if plain decoding is
        expected to sample more tokens in the same time."""
        return 0, {}

    def rows(
        self, drafts: Mapping[Sequence, Collection[int]], length: int, state: Any, table: np.ndarray,
        shift: np.ndarray,
    ) -> tuple[Any, Any]:
        """Returns the drafts that `propose` returned as arguments of `verify`: (tokens [slots, length] int32,
        how many of them each slot has [slots] int32).

        Args:
          state: of the engine; table, shift: as `verify` takes them.
        """
        raise NotImplementedError

    def observe(self, verified: int, accepted: int) -> None:
        """Called with the sums of what `verified` returns of a pass."""

    def timed(self, length: int, seconds: float) -> None:
        """Called with the time of a pass with drafts of a length, or without drafts, length 0."""


class Paced(NoDrafts):
    """Drafts for as long as they pay, by the measured acceptance.

    Args:
      slots: rows of a pass without drafts.
      free_batch_rows: the number of rows, slots * (length + 1), up to which a pass takes the same
        time, because it is bound by reading weights. Beyond, its time grows with the rows. 0: the
        measured times of passes decide.
    """

    def __init__(self, slots: int, free_batch_rows: int):
        self._slots, self._free_batch_rows = slots, free_batch_rows
        self._seconds: dict[int, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=LAST)
        )
        self.forget()

    @property
    def acceptance(self) -> float:
        """The probability that the next token of a draft is accepted; 1/2 before the first
        measurement."""
        return (1 + self._accepted) / (2 + self._accepted + self._rejected)

    def forget(self) -> None:
        """Resets the measured acceptance, and has each length measured again, once."""
        self._accepted = self._rejected = 0.0
        for seconds in self._seconds.values():
            while len(seconds) >= FEW:
                seconds.popleft()

    def observe(self, verified: int, accepted: int) -> None:
        self._accepted += accepted
        self._rejected += verified - accepted

    def timed(self, length: int, seconds: float) -> None:
        self._seconds[length].append(seconds)

    def _best(self, lengths: np.ndarray, allowed: Collection[int]) -> int:
        """Returns the length of most expected tokens per time; one whose time is to be measured first.

        Args:
          lengths: tokens that the draft of each sequence may have.
          allowed: lengths of drafts beside 0, no draft.
        """
        if not self._free_batch_rows:
            for length in (0, *allowed):
                if len(self._seconds[length]) < FEW:
                    return length
        return max((0, *allowed), key=lambda n: self._speed(lengths, n))

    def _fade(self) -> None:
        """Lets the measured acceptance count less."""
        self._accepted, self._rejected = MEMORY * self._accepted, MEMORY * self._rejected

    def _speed(self, lengths: np.ndarray, length: int) -> float:
        """Returns the expected tokens of a pass per unit of its time: 1 + a + a^2 + ... of each
        sequence, with acceptance a and as many terms as its draft has tokens."""
        a = self.acceptance
        accepted = a * (1 - a ** np.minimum(lengths, length)) / (1 - a)
        return (len(lengths) + accepted.sum()) / self._time(length)

    def _time(self, length: int) -> float:
        """Returns the time of a pass with drafts of a length, in rows or seconds."""
        if not self._free_batch_rows:
            return statistics.median(self._seconds[length])
        return self._rows_time(length)

    def _rows_time(self, length: int) -> float:
        """Returns the time of a pass with drafts of a length, in rows."""
        return max(self._free_batch_rows, self._slots * (length + 1))


class Drafts(Paced):
    """Proposes drafts of n-grams, with a length that follows the measured acceptance.

    Args:
      slots, free_batch_rows: see Paced; max_length: longest draft, see `lengths`.
    """

    def __init__(self, slots: int, max_length: int, free_batch_rows: int):
        if max_length < 1:
            raise ValueError(f"max_length of drafts is {max_length}; give at least 1")
        super().__init__(slots, free_batch_rows)
        self._lengths = lengths(max_length)
        self._groups: dict[bytes, Group] = {}
        self._tokens: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        prompt = request.prompt.tobytes()
        if prompt not in self._groups:
            self._groups[prompt] = Group()
            self._groups[prompt].learn(request.prompt.tolist(), 0)
        self._groups[prompt].members += 1

    def remove(self, request: Request) -> None:
        prompt, group = request.prompt.tobytes(), self._groups[request.prompt.tobytes()]
        group.members -= 1
        if not group.members:
            del self._groups[prompt]
        self._tokens.pop(request.id, None)

    def begin(self, sequence: Sequence) -> None:
        self._tokens[sequence.request.id] = sequence.request.prompt.tolist()
        self.extend(sequence, sequence.field("tokens"))

    def extend(self, sequence: Sequence, drawn: np.ndarray) -> None:
        tokens = self._tokens[sequence.request.id]
        start = len(tokens)
        tokens += drawn.tolist()
        self._groups[sequence.request.prompt.tobytes()].learn(tokens, start)

    def propose(self, sequences: list[Sequence]) -> tuple[int, dict[Sequence, list[int]]]:
        longest = self._lengths[-1]
        drafts = {}
        for s in sequences:
            group, tokens = self._groups[s.request.prompt.tobytes()], self._tokens[s.request.id]
            drafts[s] = group.guess(tokens, min(longest, s.remaining - 1))
        lengths = np.array([len(draft) for draft in drafts.values()])
        length = self._best(lengths, self._lengths)
        self._fade()
        if not length:
            return 0, {}
        return length, {s: draft[:length] for s, draft in drafts.items() if draft}

    def rows(self, drafts, length, state, table, shift):
        tokens, counts = np.zeros((self._slots, length), np.int32), np.zeros(self._slots, np.int32)
        for sequence, draft in drafts.items():
            if sequence.is_running:
                tokens[sequence.slot, : len(draft)] = draft
                counts[sequence.slot] = len(draft)
        return tokens, counts
