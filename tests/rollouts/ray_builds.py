"""What workers of tests sample with: good ones, slow ones, and ones that go wrong once."""

import dataclasses
import os
import pathlib
import signal
import time

import numpy as np

from jaxrl_tis.build import build_sampling
from jaxrl_tis.rollouts import ray_worker
from jaxrl_tis.runtime.cli import Interrupted


class Changed:
    """Something whose scheduler is another one."""

    def __init__(self, sampling, scheduler):
        self._sampling, self._scheduler = sampling, scheduler

    def __getattr__(self, name):
        return getattr(self._sampling, name)

    def scheduler(self, *args):
        return self._scheduler(self._sampling.scheduler(*args))


class Stepping:
    """A scheduler with another step; `step` takes the scheduler and returns trajectories."""

    def __init__(self, scheduler, step):
        self._scheduler, self._step = scheduler, step

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def step(self):
        return self._step(self._scheduler)


def once(flag, fault, config):
    """Commits a fault at the third call of the engine, in the first process that gets there."""
    calls = []

    def step(scheduler):
        calls.append(1)
        if len(calls) == 3 and not pathlib.Path(flag).exists():
            pathlib.Path(flag).touch()
            return FAULTS[fault](scheduler)
        return scheduler.step()

    return Changed(build_sampling(config), lambda scheduler: Stepping(scheduler, step))


def slow_loads(seconds, config):
    """Takes its time before weights are used."""
    check = ray_worker.fingerprint.check
    ray_worker.fingerprint.check = lambda *args: time.sleep(seconds) or check(*args)
    return build_sampling(config)


def waiting(flag, go, config):
    """In the first process, no call of the engine returns before a file is there."""
    is_first = not pathlib.Path(flag).exists()
    pathlib.Path(flag).touch()

    def step(scheduler):
        while is_first and not pathlib.Path(go).exists():
            time.sleep(0.05)
        return scheduler.step()

    return Changed(build_sampling(config), lambda scheduler: Stepping(scheduler, step))


def unbuilt(flag, config):
    """In the first process, no engine is ever there."""
    if not pathlib.Path(flag).exists():
        pathlib.Path(flag).touch()
        time.sleep(600)
    return build_sampling(config)


def interrupted(flag, config):
    """The first process cannot be built for now."""
    if not pathlib.Path(flag).exists():
        pathlib.Path(flag).touch()
        raise Interrupted("the hub cannot answer now")
    return build_sampling(config)


def with_facts(facts, config):
    sampling = Changed(build_sampling(config), lambda scheduler: scheduler)
    sampling.identity = sampling._sampling.identity | facts
    return sampling


def _until(scheduler):
    """Returns finished trajectories with a token or more."""
    while not (found := [t for t in scheduler.step() if len(t.tokens) > 1]):
        pass
    return found


def _lie(change):
    def fault(scheduler):
        first, *others = _until(scheduler)
        return [change(first), *others]
    return fault


def _raise(scheduler):
    raise ValueError("the engine is broken")


FAULTS = {
    "killed": lambda scheduler: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda scheduler: os.kill(os.getpid(), signal.SIGSTOP),
    "failed": _raise,
    "hangs": lambda scheduler: time.sleep(600),
    "lie": _lie(lambda t: dataclasses.replace(t, prompt=t.prompt[::-1].copy())),
    "foreign": _lie(lambda t: dataclasses.replace(t, id="another")),
    "damaged": _lie(lambda t: dataclasses.replace(t, tokens=[0, 1])),
    "not a record": _lie(lambda t: {"tokens": np.zeros(3)}),
    "not finite": _lie(lambda t: dataclasses.replace(t, logp_behav=t.logp_behav + np.float32("nan"))),
    "twice": lambda scheduler: (found := _until(scheduler)) + found,
}
