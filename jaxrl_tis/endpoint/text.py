"""The part of an unfinished answer's text that cannot change any more, for streams."""

from collections.abc import Collection

import numpy as np

from jaxrl_tis.engine.text import INCOMPLETE, Decode, Text, first_stop, settled_length


def cut(text: str, stops: Collection[str], floor: int = 0) -> str:
    """Returns the text before the first stop string that ends beyond `floor` characters."""
    return text[: first_stop(text, stops, floor)]


def settled(text: str, stops: Collection[str], floor: int = 0) -> str:
    """Returns the part of an unfinished text that is final: a prefix of `cut` of the finished text.
    It ends before an incomplete character, a stop string, or the beginning of one."""
    ended = cut(text, stops, floor)
    if ended != text:
        return ended
    text = text.rstrip(INCOMPLETE)
    return text[: len(text) - begun(text, stops)]


def begun(text: str, marks: Collection[str]) -> int:
    """Returns the length of the longest end of a text that is the beginning of a mark."""
    counts = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return max(counts, default=0)


class Shown:
    """The settled text and tokens of a choice during sampling. It decodes only new tokens. No stop
    string counts within the first `least` tokens."""

    def __init__(self, stops: Collection[str], decode: Decode, least: int = 0):
        self._stops, self._decode, self._least = stops, decode, least
        self._text, self._count = Text(decode), 0

    def of(self, tokens: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns the settled text of all tokens so far, and the tokens that belong to the answer. They
        may be fewer than at the call before if the sequence had to start again."""
        seen = len(self._text.tokens)
        if not np.array_equal(tokens[:seen], self._text.tokens):
            self._text, self._count, seen = Text(self._decode), 0, 0
        floor = settled_length(tokens[: self._least], self._decode)
        text = self._text.add(tokens[seen:].tolist())
        if first_stop(text, self._stops, floor) is None:  # else the answer ends among the new tokens
            self._count = len(tokens)
        return settled(text, self._stops, floor), tokens[: self._count]


class Sent:
    """The text and tokens of a choice that a stream has sent."""

    def __init__(self):
        self._text, self._tokens = "", []

    def rest(self, text: str, tokens: np.ndarray, has_ended: bool) -> tuple[str, list[int]]:
        """Returns the text and tokens that are not sent yet, and counts them as sent.

        Raises:
          RuntimeError: the answer does not begin with what was sent. Its sequence lost keys of its cache
            and sampled other tokens when it started again.
        """
        old, new = self._tokens, tokens.tolist()
        if not has_ended and len(new) < len(old):
            return "", []  # it has started again
        rest = text[len(self._text) :], new[len(old) :]
        if new[: len(old)] != old or not text.startswith(self._text):
            raise RuntimeError("the sequence started again and differs from the tokens already sent")
        self._text, self._tokens = text, new
        return rest


def offsets(tokens: np.ndarray, decode: Decode) -> list[int]:
    """Returns the index at which each token begins in the text of all tokens. The tokens of one
    character share its index."""
    text, ends = Text(decode), [0]
    for token in tokens.tolist():
        ends.append(len(text.add([token]).rstrip(INCOMPLETE)))
    return ends[:-1]


def utf8(piece: str) -> list[int] | None:
    """Returns the bytes of a token's text; None if it contains a part of a character."""
    return None if INCOMPLETE in piece else list(piece.encode())
