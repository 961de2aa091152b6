"""Order of the waiting requests: the smallest key first, ties in the order of arrival."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Protocol

from jaxrl_tis.engine.records import Request


class Policy(Protocol):
    """Order of the waiting requests: the smallest `key` of (request, number of sampled tokens) is
    admitted first.

    `added` and `removed` are called once per request. `removed` gets the number of sampled tokens,
    or None if the request was aborted. It returns whether the keys of the other requests with this
    prompt may have changed; keys change at no other time.
    """

    def added(self, request: Request) -> None: ...
    def key(self, request: Request, drawn: int) -> tuple: ...
    def removed(self, request: Request, drawn: int | None) -> bool: ...


class FirstCome:
    """Admits requests in the order of their arrival."""

    def added(self, request: Request) -> None:
        pass

    def key(self, request: Request, drawn: int) -> tuple:
        return ()

    def removed(self, request: Request, drawn: int | None) -> bool:
        return False


class ShortestPrompt(FirstCome):
    """Admits the request with the fewest tokens to prefill first, for early first tokens."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (len(request.prompt) + drawn,)


class LongestFirst(FirstCome):
    """Admits the request that may still sample the most tokens first, so no long sequence starts
    last."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (drawn - request.sampling.max_tokens,)


@dataclasses.dataclass
class Group:
    """The samples of one prompt: how many are `live`, and the `longest` length of a finished one."""

    live: int = 0
    probe: str | None = None
    longest: int | None = None


class GroupLongestFirst:
    """Seer's order (arXiv:2511.14617): admits the groups with the longest expected samples first.

    A group is the samples of one prompt, and one of its requests is the probe. Probes go first, the
    probe with the fewest tokens ahead. The length of the other requests is estimated as the longest
    finished sample of the group, or max_tokens before there is one. A group is forgotten with its
    last request.
    """

    def __init__(self):
        self._groups = collections.defaultdict[bytes, Group](Group)

    def added(self, request: Request) -> None:
        self._groups[request.prompt.tobytes()].live += 1

    def key(self, request: Request, drawn: int) -> tuple:
        group = self._groups[request.prompt.tobytes()]
        group.probe = group.probe or request.id
        if group.probe == request.id:
            return (0, drawn)
        length = request.sampling.max_tokens
        if group.longest is not None:
            length = min(length, group.longest)
        return (1, drawn - length)

    def removed(self, request: Request, drawn: int | None) -> bool:
        group = self._groups[request.prompt.tobytes()]
        before = group.probe, group.longest
        group.live -= 1
        if drawn is not None:
            group.longest = max(group.longest or 0, drawn)
        elif group.probe == request.id:
            group.probe = None
        if not group.live:
            del self._groups[request.prompt.tobytes()]
        return (group.probe, group.longest) != before


POLICIES: dict[str, Callable[[], Policy]] = {
    "first_come": FirstCome,
    "shortest_prompt": ShortestPrompt,
    "longest_first": LongestFirst,
    "group_longest_first": GroupLongestFirst,
}
