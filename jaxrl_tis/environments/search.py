"""Search in a local corpus: an answer whose last line is "search: words" is a call.

The observation has the best passages by BM25 (the library bm25s). Any other answer is final. Its
text after the last "answer:", or all of it, is compared with the example's answer, without case and
additional spaces.

The corpus is a file of JSON lines with the column "text" and optionally "title".
"""

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

from jaxrl_tis.data import files, graders
from jaxrl_tis.environments.protocol import Messages, Step

# bm25s uses jax where it can import it. Here the accelerator belongs to the run.
_jax = sys.modules.get("jax")
sys.modules["jax"] = None  # type: ignore[assignment]
try:
    import bm25s
except ImportError as error:
    raise ImportError(f"{error}: pip install 'jaxrl_tis[environments]'") from error
finally:
    del sys.modules["jax"]
    if _jax is not None:
        sys.modules["jax"] = _jax

CALL = re.compile(r"(?im)^[ \t]*search:([^\n]*)\s*\Z")
PASSAGE_CHARACTERS = 2000
MOST_PASSAGES = 20
NOTHING = "no passage found"


class Search:
    """One episode. Metrics: `searches`, and `empty_searches` without a passage.

    Args:
        corpus: the path of the corpus.
        passages: the number of passages of an observation, at most 20.
    """

    @classmethod
    def prepare(cls, *, corpus: str, passages: int = 3) -> None:
        if not 1 <= passages <= MOST_PASSAGES:
            raise ValueError(f"passages={passages}; give 1 to {MOST_PASSAGES}")
        index(corpus)

    def __init__(self, *, seed: int, corpus: str, passages: int = 3):
        self._index, self._passages = index(corpus), passages
        self._searches = self._empty = 0

    def reset(self, example: Mapping[str, Any]) -> str | Messages:
        self._answer = _plain(graders.answer_of(example))
        return example["prompt"]

    def step(self, answer: str) -> Step:
        call = CALL.search(answer)
        if call is None:
            final = re.split(r"(?i)answer:", answer)[-1]
            return Step("", float(_plain(final) == self._answer), True, self._metrics())
        self._searches += 1
        found = self._index.best(call.group(1), self._passages)
        self._empty += not found
        return Step("\n\n".join(found) or NOTHING, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {"searches": self._searches, "empty_searches": self._empty}


class Index:
    """The passages of a corpus, and their BM25 scores for a query."""

    def __init__(self, passages: list[str]):
        self._passages = passages
        self._bm25 = bm25s.BM25()
        self._bm25.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)

    def best(self, query: str, count: int) -> list[str]:
        """Returns up to `count` passages with a score above 0, best first; of equal ones the first
        of the corpus."""
        [words] = bm25s.tokenize([query], return_ids=False, show_progress=False)
        known = self._bm25.get_tokens_ids(words)
        if not known:
            return []
        scores = self._bm25.get_scores_from_ids(known)
        order = (-scores).argsort(kind="stable")[:count]
        return [self._passages[i] for i in order if scores[i] > 0]


@functools.cache
def index(corpus: str) -> Index:
    """Returns the index of a file, made once per process; ValueError for an unusable line."""
    rows, _ = files.read(corpus, {"title": "Lisbon", "text": "Lisbon is the capital of Portugal."})
    passages = []
    for row in rows:
        text, title = row.values.get("text"), row.values.get("title")
        if row.reason or not isinstance(text, str):
            raise ValueError(f"{row.place}: {row.reason or 'no text in the column text'}")
        titled = text if title is None else f"{title}: {text}"
        passages.append(titled[:PASSAGE_CHARACTERS])
    return Index(passages)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
