"""What the scheduler knows of a live request."""

import dataclasses
from concurrent.futures import Future

import numpy as np

from jaxrl_tis.engine.pages import NULL, content_keys
from jaxrl_tis.engine.protocol import Insertion, ResultTokens
from jaxrl_tis.engine.records import NEVER, Request, SamplingParams, Trajectory
from jaxrl_tis.engine.text import StopSearch
from jaxrl_tis.fields import DRAWN

OF_RUN = ("version", "kv_version", "segment")  # the same for all tokens of a call


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The tokens of one slot in one `generate` call, cut out of its arrays when they are read."""

    result: ResultTokens
    slot: int
    count: int
    version: int
    kv_version: int
    segment: int

    def field(self, name: str) -> np.ndarray | None:
        """Returns a field of DRAWN for each token; None if it was not recorded."""
        values = getattr(self.result, name)
        return None if values is None else values[: self.count, self.slot]


@dataclasses.dataclass(eq=False)
class Sequence:
    """A live request, and where it lives.

    Attributes:
      order: number of its arrival; admitted_after: admissions before it began to wait.
      key: bytes of its tokens when it began to wait, and whether their log-probs are needed; those
        of equal keys share a Prefix.
      base_key: of the full pages of its prompt if it drew tokens already, which the others of its
        group have not; b"" otherwise.
      keyed: the keys of its pages, and the key that they belong to.
      pieces: what it drew, in order; count: how many tokens those are.
      read: {field: how many pieces were read, and their values}.
      slot, shard, pages: where it lives; a waiting sequence without pages has no shard.
      is_running: its slot decodes; false while its pages are being filled.
      shift: positions evicted from its pages; page_numbers: which pages of the whole sequence are
        left; evict_step: see Trajectory.
      segment: how often its pages were rebuilt; kv_version: of the oldest weights that filled them.
      since_admission: tokens drawn since it last got a slot.
      in_flight: most tokens that it draws in calls that have not been read.
      has_ended: its record is written.
      prompt_logps: see Trajectory; None before its prompt is read.
      search: of its stop strings, in the tokens drawn so far; stop: its last result.
    """

    request: Request
    order: int
    admitted_after: int
    pieces: list[Drawn | Trajectory]
    count: int
    read: dict[str, tuple[int, np.ndarray]] = dataclasses.field(default_factory=dict)
    key: bytes = b""
    base_key: bytes = b""
    keyed: tuple[bytes, list[bytes]] | None = None
    segment: int = 0
    is_running: bool = False
    slot: int = -1
    shard: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    page_numbers: list[int] = dataclasses.field(default_factory=list)
    shift: int = 0
    evict_step: np.ndarray | None = None
    kv_version: int = 0
    since_admission: int = 0
    in_flight: int = 0
    has_ended: bool = False
    prompt_logps: np.ndarray | None = None
    search: StopSearch | None = None
    stop: Future | None = None

    @classmethod
    def of(cls, request: Request, order: int, admitted_after: int) -> "Sequence":
        partial = request.partial
        if partial is None or not len(partial.tokens):
            return cls(request, order, admitted_after, [], 0)
        return cls(
            request, order, admitted_after, [partial], len(partial.tokens),
            segment=int(partial.segment[-1]), prompt_logps=partial.prompt_logps,
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
        """Returns what goes into its slot, see protocol.Insertion."""
        return Insertion(self.request, self.tokens(), self.remaining, cached, copy)

    def append(self, drawn: Drawn, in_flight: int) -> None:
        """Appends the tokens of a call, which had at most `in_flight` tokens for this sequence."""
        self.pieces.append(drawn)
        self.in_flight -= in_flight
        self.count += drawn.count
        self.since_admission += drawn.count

    def field(self, name: str) -> np.ndarray:
        """Returns a field of all that it drew so far, which nobody may change. What was read before
        is not cut out of the calls again."""
        if not self.pieces:
            is_wide = name in DRAWN and DRAWN[name].width
            return np.zeros((0, 0) if is_wide else 0, _dtype(name))
        number, read = self.read.get(name, (0, None))
        if number < len(self.pieces):
            new = _joined(self.pieces[number:], name)
            read = new if read is None else np.concatenate([read, new])
            self.read[name] = len(self.pieces), read
        return read

    def tokens(self) -> np.ndarray:
        """Returns the prompt and the drawn tokens."""
        return np.concatenate([self.request.prompt, self.field("tokens")])

    def page_keys(self, size: int) -> list[bytes]:
        """Returns the keys of its full pages, see pages.content_keys."""
        if self.keyed is None or self.keyed[0] != self.key:
            self.keyed = self.key, content_keys(self.tokens(), size)
        return self.keyed[1]

    def forget(self) -> None:
        """Notes that its pages are gone. What it drew stays, unless some of it saw evicted keys:
        that cannot be rebuilt by a prefill, so it starts again as it came."""
        if self.shift:
            new = Sequence.of(self.request, self.order, self.admitted_after)
            self.pieces, self.count, self.segment = new.pieces, new.count, new.segment
            self.read = {}
            self.shift, self.evict_step, self.search, self.stop = 0, None, None, None

    def filled(self, version: int) -> None:
        """Notes that weights of this version wrote the keys of all that it has so far."""
        self.kv_version = version
        self.segment += self.count > 0

    def evict(self, index: int, size: int, capacity: int) -> int:
        """Takes out page `index` and returns it; its keys are unseen from the last token on."""
        if self.evict_step is None:
            self.evict_step = np.full(capacity, NEVER, np.int32)
        first = self.page_numbers.pop(index) * size
        self.evict_step[first : first + size] = self.length - 1
        self.shift += size
        return self.pages.pop(index)

    def found_stop(self) -> int | None:
        """Returns how many tokens there are up to a stop string, as far as the text was searched;
        waits for the search."""
        return self.stop.result() if self.stop else None

    def trajectory(self, stop_reason: str, quant_id: str, count: int) -> Trajectory:
        """Returns the record of its first `count` tokens."""
        request = self.request
        fields = {name: self.field(name)[:count] for name in (*DRAWN, *OF_RUN)}
        evict_step = np.zeros(0, np.int32)
        if self.evict_step is not None:
            evict_step = self.evict_step[: len(request.prompt) + count]
        if request.sampling.prompt_logprobs and self.prompt_logps is not None:
            fields["prompt_logps"] = self.prompt_logps
        return Trajectory(
            id=request.id, prompt=request.prompt, stop_reason=stop_reason, seed=request.seed,
            request=request.hash, quant_id=quant_id, evict_step=evict_step,
            temperature=request.sampling.temperature, **fields,
        )


def _dtype(name: str) -> str:
    return "int32" if name in OF_RUN else DRAWN[name].dtype


def _joined(pieces: list[Drawn | Trajectory], name: str) -> np.ndarray:
    """Returns a field of all tokens of the pieces, of which the first alone may be a record."""
    parts = [getattr(p, name) for p in pieces[:1] if isinstance(p, Trajectory)]
    drawn = pieces[len(parts):]
    if name in OF_RUN:
        runs = np.array([(getattr(p, name), p.count) for p in drawn], np.int32).reshape(-1, 2)
        parts.append(np.repeat(*runs.T))
    elif drawn and drawn[0].field(name) is None:
        parts.append(np.zeros((sum(p.count for p in drawn), 0)))
    else:
        parts += [getattr(p.result, name)[: p.count, p.slot] for p in drawn]
    return np.concatenate(parts).astype(_dtype(name))
