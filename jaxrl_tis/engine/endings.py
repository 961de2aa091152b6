"""The end of a sequence: it leaves its slot and pages, and its record is written."""

from collections.abc import Callable, Collection

import numpy as np

from jaxrl_tis.engine.block_manager import BlockManager
from jaxrl_tis.engine.drafts import NoDrafts
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.routes import PageRoutes
from jaxrl_tis.engine.runner import Runner
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.stop_strings import StopStrings
from jaxrl_tis.engine.wait_queue import WaitQueue


class NonFinite(FloatingPointError):
    """Sampled tokens have log-probs that are not finite. The requests `ids` have ended without a
    record, and the others go on."""

    def __init__(self, message: str, ids: Collection[str]):
        super().__init__(message)
        self.ids = ids


class Endings:
    """Ends sequences for a scheduler, which gives its own parts.

    Args:
      live: {id: sequence} of all requests that have not been returned yet.
      decode: tokens -> text, for stop strings.
    """

    def __init__(
        self, engine: EngineProtocol, runner: Runner, blocks: BlockManager, waiting: WaitQueue,
        drafts: NoDrafts, routes: PageRoutes, live: dict[str, Sequence],
        decode: Callable[[np.ndarray], str] | None,
    ):
        self._engine, self._runner, self._blocks, self._waiting = engine, runner, blocks, waiting
        self._drafts, self._routes, self._stop_strings = drafts, routes, StopStrings(decode)
        self._live = live
        self._ended: list[Trajectory] = []
        self._failed: dict[Sequence, int] = {}  # index of its first token that is not finite
        self._causes: dict[int, str] = {}  # of such tokens, by version

    def finish_or_evict(self, sequence: Sequence, tokens: np.ndarray, is_last: bool) -> None:
        """Ends a sequence after its last token or a stop string. Otherwise frees the pages that
        `retention` drops."""
        stop = None
        if sequence.sampling.stop_strings:
            stop = self._stop_strings.search(sequence, tokens.tolist(), is_last)
        if stop is not None:
            self._finish(sequence, "stop", stop)
        elif is_last:
            is_stop = tokens[-1] in sequence.sampling.stop_ids
            self._finish(sequence, "stop" if is_stop else "length", sequence.count)
        else:
            self._blocks.evict(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence as it is now."""
        self._finish(sequence, *aborted(sequence))

    def _finish(self, sequence: Sequence, reason: str, count: int) -> None:
        """Frees slot and pages, and writes the record of the first `count` tokens."""
        if self._blocks.holds(sequence):
            self.keep_pages(sequence)
        self._leave(sequence, reason, count)
        self._ended.append(sequence.trajectory(reason, self._engine.quant_id, count))

    def fail(self, sequence: Sequence, index: int) -> None:
        """Ends a sequence whose token `index` is not finite."""
        self._failed[sequence] = index
        self._leave(sequence, "abort")

    def _leave(self, sequence: Sequence, reason: str, count: int = 0) -> None:
        """Frees slot and pages of a sequence that ends."""
        if self._blocks.holds(sequence):
            self._blocks.free(sequence)
        sequence.has_ended = True
        self._waiting.ended(sequence.request, None if reason == "abort" else count)
        self._drafts.remove(sequence.request)

    def raise_failed(self) -> None:
        """Raises NonFinite if sequences have failed. The cause is searched once for each version of
        the weights."""
        failed, self._failed = self._failed, {}
        if not failed:
            return
        for sequence in failed:
            del self._live[sequence.request.id]
        sequence, index = next(iter(failed.items()))
        ids, version = [s.request.id for s in failed], self._runner.version
        if version not in self._causes:
            tokens = sequence.tokens()[: len(sequence.request.prompt) + index]
            self._causes[version] = self._engine.non_finite(self._runner.params, tokens)
        named = ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} others"
        raise NonFinite(
            f"the log-prob of token {index} of {named} is not finite: "
            f"{self._causes[version]}", ids
        )

    def keep_pages(self, sequence: Sequence) -> None:
        """Leaves the full pages of a sequence that ends in the cache, where `extend` finds them."""
        self._drafts.keep(sequence)
        new = self._blocks.keep(sequence, self._runner.version)
        if new and sequence.routes is not None:
            self._routes.keep(sequence.shard, new, sequence.routes)

    def close(self) -> None:
        """Ends the thread that searches for stop strings."""
        self._stop_strings.close()

    def pop(self) -> list[Trajectory]:
        """Returns the records of the sequences that have ended since the last call."""
        ended, self._ended = self._ended, []
        for trajectory in ended:
            del self._live[trajectory.id]
        return ended


def aborted(sequence: Sequence) -> tuple[str, int]:
    """Returns (the reason, the number of tokens) of a sequence that is aborted now. A stop string that
    the last call has completed ends it before."""
    stop = sequence.found_stop()
    return ("abort", sequence.count) if stop is None else ("stop", stop)
