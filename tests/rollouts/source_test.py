"""Running requests to their end."""

import numpy as np

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.rollouts.source import generate
from tests.rollouts.synchronous_test import FakeScheduler


def test_trajectories_come_back_in_the_order_of_the_requests():
    scheduler, ended = FakeScheduler(), []
    sampling = SamplingParams(max_tokens=2)
    requests = [Request(str(i), np.array([1], np.int32), 0, sampling) for i in range(5)]
    out = generate(scheduler, requests, ended.append)
    assert [t.id for t in out] == ["0", "1", "2", "3", "4"]
    assert ended == [2, 2, 1]
