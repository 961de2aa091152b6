"""A sampler obeys, with a scheduler made of arithmetic."""

import numpy as np

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.rollouts.sampler import Drop, GiveBack, NewRequests, NewWeights, Sampler
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


def test_orders():
    made = []
    sampler = Sampler(lambda *weights: made.append(Scheduler(*weights)) or made[-1])
    assert sampler.pending == 0 and sampler.obey(GiveBack()) == []
    sampler.obey(NewWeights("a", 3))
    sampler.obey(NewWeights("b", 4))
    assert len(made) == 1 and made[0].weights == [("a", 3), ("b", 4)]
    sampler.obey(NewRequests(requests("1", "2", "3", "4")))
    sampler.obey(Drop(("2",)))
    assert [t.id for t in sampler.step()] == ["4", "3"] and sampler.pending == 1
    assert [t.id for t in sampler.obey(GiveBack())] == ["1"] and sampler.pending == 0
    assert sampler.stats is made[0].stats
