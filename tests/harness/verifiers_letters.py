"""A taskset of verifiers 0.4 for runs: two turns, rewarded by the letters of the last answer."""

import verifiers.v1 as vf

from verifiers_client import Talk  # beside it on the path of the harness


class Prompt(vf.Task):
    @vf.reward(weight=1.0)
    async def early(self, trace) -> float:
        """The share of characters before "a"."""
        text = trace.nodes[-1].message.content or ""
        return sum(c < "a" for c in text) / max(len(text), 1)


class Letters(vf.Taskset[Prompt]):
    def load(self):
        for text in ("1+2?", "3+4?", "5+6?", "7+8?"):
            yield Prompt(vf.TaskData(prompt=text), self.config.task)


__all__ = ["Letters", "Talk"]
