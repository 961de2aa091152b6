"""Who of the waiting requests runs next: the smallest key first, ties in the order of arrival."""

import collections
import dataclasses
from typing import Protocol

from jaxrl_tis.engine.records import Request


class Policy(Protocol):
    """Who of the waiting requests comes first: the one whose `key` is smallest, given how many
    tokens it has drawn. `added` and `removed` hear of every request once, the latter with the
    tokens it drew, or None if it did not end by itself.

    A key changes only where `removed` says so: it returns whether those of the other requests with
    this prompt may be others now.
    """

    def added(self, request: Request) -> None: ...
    def key(self, request: Request, drawn: int) -> tuple: ...
    def removed(self, request: Request, drawn: int | None) -> bool: ...


class FirstCome:
    """Runs requests in the order of arrival."""

    def added(self, request: Request) -> None:
        pass

    def key(self, request: Request, drawn: int) -> tuple:
        return ()

    def removed(self, request: Request, drawn: int | None) -> bool:
        return False


class ShortestPrompt(FirstCome):
    """The request with the least to prefill comes first, so that first tokens come soon."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (len(request.prompt) + drawn,)


class LongestFirst(FirstCome):
    """The request that may still draw the most tokens comes first, so that no long sequence starts
    last."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (drawn - request.sampling.max_tokens,)


@dataclasses.dataclass
class Group:
    """One prompt: how many of its samples are `live`, and the `longest` of those that finished."""

    live: int = 0
    probe: str | None = None
    longest: int | None = None


class GroupLongestFirst:
    """Seer (arXiv:2511.14617): one request of each group, the samples of one prompt, is its probe.
    Probes run first, those with the fewest tokens ahead. A group is estimated as long as its
    longest finished sample, or at its limit before there is one; the longest estimates go first.
    A group is forgotten with the last of its requests.
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


POLICIES = {
    "first_come": FirstCome,
    "shortest_prompt": ShortestPrompt,
    "longest_first": LongestFirst,
    "group_longest_first": GroupLongestFirst,
}
