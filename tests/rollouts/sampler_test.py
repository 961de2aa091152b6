"""A sampler executes, with a scheduler made of arithmetic."""

import numpy as np

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.rollouts.sampler import Cancel, NewRequests, Preempt, Sampler, SetParams
from tests.rollouts.synchronous_test import FakeScheduler


class Scheduler(FakeScheduler):
    def __init__(self, params, version):
        super().__init__()
        self.weights = [(params, version)]

    def set_params(self, params, version):
        self.weights.append((params, version))

    def pause(self, mode):
        assert mode == "abort"
        ended, self.waiting = self.waiting, []
        return [self._trajectory(r) for r in ended]

    def abort(self, id):
        self.waiting = [r for r in self.waiting if r.id != id]


def requests(*ids):
    return tuple(Request(id, np.array([1]), 0, SamplingParams()) for id in ids)


def test_commands():
    made = []
    sampler = Sampler(lambda *weights: made.append(Scheduler(*weights)) or made[-1])
    assert sampler.pending == 0 and sampler.execute(Preempt()) == []
    sampler.execute(SetParams("a", 3))
    sampler.execute(SetParams("b", 4))
    assert len(made) == 1 and made[0].weights == [("a", 3), ("b", 4)]
    sampler.execute(NewRequests(requests("1", "2", "3", "4")))
    sampler.execute(Cancel(("2",)))
    assert [t.id for t in sampler.step()] == ["4", "3"] and sampler.pending == 1
    assert [t.id for t in sampler.execute(Preempt())] == ["1"] and sampler.pending == 0
    assert sampler.stats is made[0].stats


def test_what_has_ended_is_cancelled_without_an_error():
    class Strict(Scheduler):
        def abort(self, id):
            if id not in {r.id for r in self.waiting}:
                raise KeyError(id)
            super().abort(id)

    sampler = Sampler(Strict)
    sampler.execute(SetParams("a", 0))
    sampler.execute(NewRequests(requests("1", "2")))
    assert sampler.execute(Cancel(("gone", "1"))) == [] and sampler.pending == 1
