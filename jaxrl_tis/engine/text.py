"""The text of tokens that come a few at a time, and the stop strings in it."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

INCOMPLETE = "\ufffd"  # decoders write it for the bytes of a character that has not ended

Decode = Callable[[np.ndarray], str]


class Text:
    """The text of all tokens so far. `decode` is asked for the newest tokens and a few before them
    alone.

    More tokens leave the text of a decoder as it is, but for INCOMPLETE at its end; and what they
    add depends on a few tokens that have a text before them (the first token of all may lose its
    space). Where the few show that it changed after all, as bytes do that turn out to be none of a
    character, everything is decoded.

    Attributes:
      tokens: all so far.
      same: characters at the beginning of the text that the newest tokens left as they were.
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


def settled_length(tokens: Sequence[int], decode: Decode) -> int:
    """Counts the characters of these tokens that further ones leave as they are."""
    return len(decode(np.array(tokens, np.int32)).rstrip(INCOMPLETE)) if len(tokens) else 0


def first_stop(text: str, stops: Iterable[str], start: int = 0) -> int | None:
    """Returns where the first stop string begins that ends beyond `start` characters; None if there
    is none."""
    places = [text.find(stop, max(0, start - len(stop) + 1)) for stop in stops]
    return min([place for place in places if place >= 0], default=None)


class StopSearch:
    """Finds where the text of a sequence first holds a stop string.

    Args:
      stops: the stop strings.
      decode: tokens -> text.
      tokens: those before the first call, which are known to end none.
      least: so many tokens end none, whatever their text.
    """

    def __init__(
        self, stops: tuple[str, ...], decode: Decode, tokens: Sequence[int] = (), least: int = 0
    ):
        self._stops, self._decode, self._least = stops, decode, least
        self._text, self._floor = Text(decode, tokens), None

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Returns how many tokens there are up to the one, of these, that ends a stop string; None
        if the text holds none."""
        known = max(len(self._text.tokens), self._least)
        text = self._text.add(tokens)
        everything = np.array(self._text.tokens, np.int32)
        if len(everything) <= known:
            return None
        if self._floor is None:
            self._floor = settled_length(everything[: self._least], self._decode)
        floor = self._floor
        # A stop string that ends in what is new, or in what changed.
        if first_stop(text, self._stops, max(self._text.same, floor)) is None:
            return None
        holds = lambda n: first_stop(self._decode(everything[:n]), self._stops, floor) is not None
        return next(n for n in range(known + 1, len(everything) + 1) if holds(n))
