"""The text of an answer while it is being written: what can be shown and stays as it is."""

from collections.abc import Callable, Collection

import numpy as np

INCOMPLETE = "\ufffd"  # decoders write it for the bytes of a character that has not ended


def cut(text: str, stops: Collection[str]) -> str:
    """The text before the first stop string."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=None)]


def settled(text: str, stops: Collection[str]) -> str:
    """The part of an unfinished text that `cut` of the finished one begins with: it ends before a
    character that lacks bytes, a stop string, and what may become one."""
    ended = cut(text, stops)
    if ended != text:
        return ended
    text = text.rstrip(INCOMPLETE)
    begun = [
        count for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count])
    ]
    return text[: len(text) - max(begun, default=0)]


def offsets(tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[int]:
    """Where each token begins in the text of all; those of one character share where it begins."""
    return [len(decode(tokens[:i]).rstrip(INCOMPLETE)) for i in range(len(tokens))]


def utf8(piece: str) -> list[int] | None:
    """The bytes of a token's text, None where it has bytes of a character that other tokens end."""
    return None if INCOMPLETE in piece else list(piece.encode())
