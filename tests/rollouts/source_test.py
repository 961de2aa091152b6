"""The interface of a source, and running requests to their end."""

import ast
import inspect
import pathlib

import numpy as np
import pytest

from jaxrl_tis import train
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.rollouts.concurrent import ConcurrentSource, Driver
from jaxrl_tis.rollouts.ray_processes import ProcessesSource
from jaxrl_tis.rollouts.ray_source import RayDriver
from jaxrl_tis.rollouts.source import RolloutSource, generate, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.threads import ThreadDriver
from jaxrl_tis.rollouts.virtual import VirtualSource
from tests.rollouts.synchronous_test import FakeScheduler


def methods(cls):
    return {name: f for name, f in vars(cls).items() if inspect.isfunction(f) and name[0] != "_"}


@pytest.mark.parametrize("cls, protocol", [
    (SyncSource, RolloutSource), (VirtualSource, RolloutSource), (ConcurrentSource, RolloutSource),
    (ProcessesSource, RolloutSource), (ThreadDriver, Driver), (RayDriver, Driver),
])
def test_a_class_has_the_methods_of_its_protocol_and_no_others(cls, protocol):
    found, wanted = methods(cls), methods(protocol)
    # What the source of several processes calls one by one.
    steps = {ConcurrentSource: {"is_sync_due", "send", "sync", "poll"}, RayDriver: {"look"}}
    assert found.keys() == wanted.keys() | steps.get(cls, set())
    for name, method in wanted.items():
        assert list(inspect.signature(found[name]).parameters) == list(
            inspect.signature(method).parameters
        ), name


def used_of_the_source(module):
    """Names of attributes that are taken of something called `source`."""
    tree = ast.parse(pathlib.Path(module).read_text())
    is_source = lambda node: "source" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if is_source(node.value)}


def test_the_run_uses_the_whole_protocol_and_nothing_beyond_it():
    used = used_of_the_source(train.__file__) | used_of_the_source(inspect.getfile(next_batch))
    assert used == methods(RolloutSource).keys()


def test_a_batch_is_all_of_its_parts_in_the_order_of_the_groups():
    class Sample:
        def __init__(self, group):
            self.group = group

    class Source:
        def parts(self, step):
            assert step == 7
            yield [Sample(3), Sample(3)]
            yield [Sample(1), Sample(1)]
            self.is_through = True

        def metrics(self):
            assert self.is_through
            return {"async/syncs": 1}

    samples, values = next_batch(Source(), 7)
    assert [s.group for s in samples] == [1, 1, 3, 3] and values == {"async/syncs": 1}


def test_trajectories_come_back_in_the_order_of_the_requests():
    scheduler, ended = FakeScheduler(), []
    sampling = SamplingParams(max_tokens=2)
    requests = [Request(str(i), np.array([1], np.int32), 0, sampling) for i in range(5)]
    out = generate(scheduler, requests, ended.append)
    assert [t.id for t in out] == ["0", "1", "2", "3", "4"]
    assert ended == [2, 2, 1]
