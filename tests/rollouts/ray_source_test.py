"""Workers on Ray: good ones sample what a synchronous run samples, bad ones cost time alone."""

import contextlib
import functools
import json

import pytest

from jaxrl_tis.build import build_sampling
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.rollouts import ray_cluster, schedules
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.rollouts.ray_source import ray_source
from jaxrl_tis.rollouts.source import SourceParts, next_batch
from tests import tiny
from tests.rollouts import ray_builds
from tests.rollouts.virtual_test import assert_same, drawn, in_order, made
from tests.rollouts.synchronous_test import FakeRewards, Timer


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    import ray

    ray_cluster.connect(tiny.config().rollout)
    yield
    ray.shutdown()


@pytest.fixture
def learner():
    with contextlib.ExitStack() as stack:
        def make(schedule="areal(staleness=1)", build=build_sampling, timeout=20.0, **overrides):
            setup, params = made()
            config = tiny.config(
                rollout__schedule=schedule, rollout__max_new_tokens=6, rollout__driver="ray",
                rollout__worker_timeout=timeout, rollout__cpus_per_worker=0.01, **overrides,
            )
            prompter = Prompter(setup.tokenizer, config.task)
            groups = Groups(
                config, prompter, FakeRewards(lambda text, _: float(len(text))), with_greedy=False
            )
            batches = Batches(
                config.task.name, config.task.params, batch_size=config.rollout.prompts,
                seed=config.seed,
            )
            parts = SourceParts(
                config, schedules.parse(schedule), None, groups, batches, Timer(),
                setup.serving_params,
            )
            source = ray_source(parts, setup.engine, setup.identity, build)
            stack.callback(source.close, is_over=True)
            return source, params
        yield make


@pytest.mark.parametrize("schedule", ["one_step", "areal(staleness=2)", "in_flight(staleness=2)"])
def test_with_unchanged_weights_workers_sample_what_a_synchronous_run_samples(schedule, learner):
    source, params = learner(schedule, rollout__workers=2)
    found = drawn(source, params, 1, 5)
    assert_same(found, in_order())
    versions = {int(v) for s in found.values() for v in s.trajectory.version}
    assert versions > {0} and max(versions) <= 4


FAULTS = {  # whether the worker is evicted
    "killed": False, "stopped": False, "failed": False, "lie": True, "foreign": True,
    "damaged": True, "not a record": True, "not finite": True, "twice": True,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_worker_costs_time_alone(fault, learner, tmp_path):
    build = functools.partial(ray_builds.once, str(tmp_path / "flag"), fault)
    source, params = learner("areal(staleness=1)", build, timeout=3.0)
    left = evicted = 0
    source.publish(params, 0)
    for step in (1, 2, 3):
        samples, values = next_batch(source, step)
        assert_same({s.trajectory.id: s for s in samples}, in_order())
        left, evicted = left + values["async/left"], evicted + values["async/workers_evicted"]
        source.publish(params, step)
    assert (left, evicted) == (1, FAULTS[fault])
