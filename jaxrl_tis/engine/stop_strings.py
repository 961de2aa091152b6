"""The search for stop strings, in a thread that runs in parallel to the engine."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any


from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.text import StopSearch


class StopStrings:
    """Searches the text of sequences for their stop strings.

    Args:
      decode: tokens -> text; None where no request has stop strings.
    """

    def __init__(self, decode: Any):
        self._decode = decode
        self._thread: ThreadPoolExecutor | None = None

    def search(self, sequence: Sequence, tokens: list[int], is_last: bool) -> int | None:
        """Starts the search in new tokens of a sequence, already appended to it.

        Returns: the number of tokens up to the end of a stop string, None if none was found. The
        result covers the tokens of all calls before. It covers the new tokens only if `is_last`,
        because otherwise their search runs while the engine computes the next call.
        """
        stop = sequence.found_stop()
        if stop is None:
            if sequence.search is None:
                sequence.search = self._search_of(sequence, sequence.count - len(tokens))
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1)
            sequence.stop = self._thread.submit(sequence.search, tokens)
        return sequence.found_stop() if is_last else stop

    def _search_of(self, sequence: Sequence, count: int) -> StopSearch:
        """Returns the search in the running turn of a sequence, whose tokens among the first
        `count` hold no stop string."""
        start, sampling = sequence.turn_start, sequence.sampling
        before = sequence.field("tokens")[start:count].tolist()
        least = max(0, sampling.min_tokens - start)
        return StopSearch(sampling.stop_strings, self._decode, before, least)

    def close(self) -> None:
        """Ends the thread, if any request had stop strings."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
