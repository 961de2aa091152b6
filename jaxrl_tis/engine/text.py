"""Incremental decoding of tokens to text, and the search for stop strings in it."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

INCOMPLETE = "\ufffd"  # decoders write it for the bytes of a character that has not ended

Decode = Callable[[np.ndarray], str]


class Text:
    """The text of a growing list of tokens. It decodes only the newest tokens and a few before them.

    Two facts make this possible. Further tokens change a decoder's text only at a final INCOMPLETE.
    And the text that they add depends on a few tokens before them (the first token of all may lose
    its space). If the text of these few tokens changes after all, everything is decoded again.

    Attributes:
      tokens: all tokens so far.
      same: characters at the beginning of the text that the newest tokens did not change.
    """

    def __init__(self, decode: Decode, tokens: Sequence[int] = ()):
        self.tokens, self.same = list(tokens), 0
        self._decode = decode
        self._start = self._end = 0  # tokens between them have the text `_context`
        self._known = self._context = ""  # text of the tokens before `_end`, which stays

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text of all tokens, these included."""
        self.tokens += tokens
        recent = self._of(self._start)
        if not recent.startswith(self._context):
            self._start = self._end = 0
            self._known = self._context = ""
            recent = self._of(0)
        self.same = len(self._known)
        text = self._known + recent[len(self._context) :]
        if text and not text.endswith(INCOMPLETE):
            newest = self._of(self._end)
            self._start = self._end if newest else self._start
            self._context, self._known = newest or recent, text
            self._end = len(self.tokens)
        return text

    def _of(self, start: int) -> str:
        return self._decode(np.array(self.tokens[start:], np.int32))


def settled_length(tokens: Sequence[int] | np.ndarray, decode: Decode) -> int:
    """Counts the characters of these tokens that further tokens cannot change."""
    return len(decode(np.array(tokens, np.int32)).rstrip(INCOMPLETE)) if len(tokens) else 0


def first_stop(text: str, stops: Iterable[str], start: int = 0) -> int | None:
    """Returns the index of the first stop string that ends beyond `start` characters; None if there
    is none."""
    places = [text.find(stop, max(0, start - len(stop) + 1)) for stop in stops]
    return min([place for place in places if place >= 0], default=None)


class StopSearch:
    """Finds the token that completes the first stop string of a sequence.

    Args:
      stops: the stop strings.
      decode: tokens -> text.
      tokens: tokens before the first call, which complete no stop string.
      least: no stop string counts within this many tokens.
    """

    def __init__(
        self, stops: tuple[str, ...], decode: Decode, tokens: Sequence[int] = (), least: int = 0
    ):
        self._stops, self._decode, self._least = stops, decode, least
        self._text = Text(decode, tokens)
        self._floor: int | None = None

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Appends tokens and returns the number of tokens up to the one that completes a stop string;
        None if no stop string is complete."""
        known = max(len(self._text.tokens), self._least)
        text = self._text.add(tokens)
        everything = np.array(self._text.tokens, np.int32)
        if len(everything) <= known:
            return None
        if self._floor is None:
            self._floor = settled_length(everything[: self._least], self._decode)
        floor = start = self._floor
        # A stop string that ends in new or changed text.
        if first_stop(text, self._stops, max(self._text.same, floor)) is None:
            return None
        holds = lambda n: first_stop(self._decode(everything[:n]), self._stops, start) is not None
        return next(n for n in range(known + 1, len(everything) + 1) if holds(n))
