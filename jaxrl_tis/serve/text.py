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
    begun = [
        count for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count])
    ]
    return text[: len(text) - max(begun, default=0)]


class Shown:
    """The settled text of a choice during sampling. It decodes only new tokens. No stop string counts
    within the first `least` tokens."""

    def __init__(self, stops: Collection[str], decode: Decode, least: int = 0):
        self._stops, self._decode, self._least = stops, decode, least
        self._text = Text(decode)

    def of(self, tokens: np.ndarray) -> str:
        """Returns the settled text of all tokens so far. It may be shorter than at the call before
        if the sequence had to start again."""
        seen = len(self._text.tokens)
        if not np.array_equal(tokens[:seen], self._text.tokens):
            self._text, seen = Text(self._decode), 0
        floor = settled_length(tokens[: self._least], self._decode)
        return settled(self._text.add(tokens[seen:].tolist()), self._stops, floor)


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
