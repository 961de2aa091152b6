"""The text of an answer while it is being written: what can be shown and stays as it is."""

from collections.abc import Collection

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
