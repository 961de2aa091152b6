"""Answers without a reward, because its function, the environment or the harness failed. They are
grouped by kind: a count, the first error printed, the last ones in a file.

WORKDIR/reward_errors.jsonl has a line for each kind: {"kind", "count", "error", "traceback",
"last_at", "last": [{"id", "text", "error"}, ...]}. The error and the traceback are those of the
first failure. A run that continues adds to the file.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_tis.runtime.cli import Unwritable

FILE_NAME = "reward_errors.jsonl"
KINDS, LAST = 50, 3  # kinds that are kept apart, texts of each
TEXT_CHARACTERS = 2000
OTHERS = "other kinds"


@dataclasses.dataclass
class Failure:
    """Failures of one kind."""

    kind: str
    count: int
    error: str
    traceback: str
    last_at: str
    last: list[dict[str, str]]


class Failures:
    """Collects answers whose reward failed.

    Args:
      path: of the file, whose contents are kept and added to; None writes no file.
      say: prints a text.
    """

    def __init__(
        self, path: os.PathLike | None = None,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ):
        self._path, self._say = path, say
        self._kinds = {f.kind: f for f in ([] if path is None else read(path))}
        self._printed: set[str] = set()

    def add(self, kind: str, error: str, traceback: str, id: str, text: str) -> None:
        """Records that the response `text` to the example `id` has no reward."""
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind, traceback = OTHERS, ""
        if kind not in self._kinds:
            self._kinds[kind] = Failure(kind, 0, error, traceback, "", [])
        if kind not in self._printed:
            self._printed.add(kind)
            self._say(f"no reward, example {id}: {error} (further ones like it are counted)")
            if traceback:
                self._say(traceback.rstrip())
        failure = self._kinds[kind]
        failure.count += 1
        failure.last_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        failure.last.append({"id": id, "text": text[:TEXT_CHARACTERS], "error": error})
        del failure.last[:-LAST]

    def write(self) -> None:
        """Rewrites the file; raises Unwritable if that fails."""
        if self._path is None:
            return
        new = pathlib.Path(f"{os.fspath(self._path)}.new")
        lines = [json.dumps(dataclasses.asdict(failure)) + "\n" for failure in self._kinds.values()]
        try:
            new.write_text("".join(lines), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            raise Unwritable(
                f"cannot write the failed rewards to {self._path}: {error}. Free space or make it "
                "writable, then start the same command again"
            ) from error


def read(path: Any) -> list[Failure]:
    """Reads the file of failures; [] if it does not exist.

    Raises:
      ValueError: a line has another format.
    """
    if not path.exists():
        return []
    failures = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            failures.append(Failure(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: not a record of failed rewards: {error}; delete the file "
                "to start a new one"
            ) from error
    return failures


def described(failures: Sequence[Failure]) -> list[str]:
    """Returns a line of text for each kind of failure, the most frequent first."""
    by_count = sorted(failures, key=lambda f: -f.count)
    return [
        f"{f.count} x {f.kind}, the last at {f.last_at}, example {f.last[-1]['id']}: {f.last[-1]['error']}"
        for f in by_count
    ]
