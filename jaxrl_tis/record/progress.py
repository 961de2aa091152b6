"""Progress of a phase on the terminal: a bar, or lines of text."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import tqdm

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows the progress of one phase: a bar on a terminal, elsewhere at most one line in five
    seconds."""

    def __init__(
        self, total: int, title: str, stream: TextIO | None = None, is_shown: bool = True
    ):
        """Starts at 0 of `total` units (prompts, steps, ...); `stream` defaults to stderr."""
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_shown
        self._total, self._title, self._done = total, title, 0
        self._start = self._printed_at = time.monotonic()
        self._printed_done, self._values = 0, {}
        self._bar = None
        if is_shown and self._stream.isatty():
            self._bar = tqdm.tqdm(total=total, desc=title, file=self._stream, dynamic_ncols=True)

    def update(self, n: int = 1, **values: float) -> None:
        """Adds `n` units and shows `values` (numbers) next to the count."""
        self._done += n
        self._values = values
        if self._bar is not None:
            self._bar.set_postfix(_shown(values), refresh=False)
            self._bar.update(n)
        elif (self._done >= self._total
              or time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES):
            self._print_line()

    def close(self) -> None:
        """Ends the phase. Without a terminal, prints the last state unless it is printed
        already."""
        if self._bar is not None:
            self._bar.close()
        elif self._done != self._printed_done:
            self._print_line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _print_line(self) -> None:
        if not self._is_shown:
            return
        self._printed_at, self._printed_done = time.monotonic(), self._done
        seconds = self._printed_at - self._start
        left = seconds / max(self._done, 1) * max(self._total - self._done, 0)
        text = (f"{self._title}: {self._done}/{self._total}, {clock(seconds)} gone, "
                f"{clock(left)} left")
        shown = "".join(f", {name}={value}" for name, value in _shown(self._values).items())
        print(text + shown, file=self._stream, flush=True)


def _shown(values: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{float(value):z.4g}" for name, value in values.items()}


def clock(seconds: float) -> str:
    """Returns a duration as 4s, 3m12s or 2h05m."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
