"""Who of the waiting requests runs next: the smallest key first, ties in the order of arrival."""

from typing import Protocol

from jaxrl_tis.engine.records import Request


class Policy(Protocol):
    """`key` of a waiting request that has drawn `drawn` tokens; `finished` hears of every request
    that ended by itself, with the tokens it drew."""

    def key(self, request: Request, drawn: int) -> tuple: ...
    def finished(self, request: Request, drawn: int) -> None: ...


class FirstCome:
    """In the order of arrival."""

    def key(self, request: Request, drawn: int) -> tuple:
        return ()

    def finished(self, request: Request, drawn: int) -> None:
        pass


class ShortestPrompt(FirstCome):
    """The least to prefill first: the first tokens come soonest."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (len(request.prompt) + drawn,)


class LongestFirst(FirstCome):
    """The most tokens still allowed first, so that no long sequence starts last."""

    def key(self, request: Request, drawn: int) -> tuple:
        return (drawn - request.sampling.max_tokens,)


class GroupLongestFirst:
    """Seer (arXiv:2511.14617): one request of each group, the samples of one prompt, is its probe.
    Probes run first, those with the fewest tokens ahead. A group is estimated as long as its
    longest finished sample, or at its limit before there is one; the longest estimates go first.
    """

    def __init__(self):
        self._probes: dict[bytes, str] = {}
        self._longest: dict[bytes, int] = {}

    def key(self, request: Request, drawn: int) -> tuple:
        group = request.prompt.tobytes()
        if self._probes.setdefault(group, request.id) == request.id:
            return (0, drawn)
        length = self._longest.get(group, request.sampling.max_tokens)
        return (1, drawn - min(length, request.sampling.max_tokens))

    def finished(self, request: Request, drawn: int) -> None:
        group = request.prompt.tobytes()
        self._longest[group] = max(self._longest.get(group, 0), drawn)


POLICIES = {
    "first_come": FirstCome,
    "shortest_prompt": ShortestPrompt,
    "longest_first": LongestFirst,
    "group_longest_first": GroupLongestFirst,
}
