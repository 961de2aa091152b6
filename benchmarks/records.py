"""Measures how many records a second reach the learner with the driver "ray", on one machine.

Workers return records of 512 tokens without an engine. The learner checks the records and takes
batches of 2,048. It neither decodes nor trains. Needs the extra `ray`.

Examples:

    python -m benchmarks.records
    python -m benchmarks.records --workers=2 --seconds=30
"""

import dataclasses
import json
import time
from typing import Any

import jax
import numpy as np

from benchmarks import arguments, asynchrony
from configs import default
from jaxrl_tis import build
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.fields import DRAWN
from jaxrl_tis.models import placement, transformer
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts import ray_cluster
from jaxrl_tis.rollouts.groups import Groups, Sample
from jaxrl_tis.rollouts.source import next_batch
from jaxrl_tis.runtime import cli, fingerprint

LENGTH = 512  # tokens of a record
WARM = 3  # batches that fill the queue


class Plain(Groups):
    """Groups whose examples are neither decoded nor rewarded."""

    def samples(self, examples, trajectories):
        pairs = zip(trajectories, examples, strict=True)
        return [Sample(t, e, "", 0.0, 0.0, group=0) for t, e in pairs]


class Instant:
    """A scheduler whose requests end in the next step, 64 at a time."""

    def __init__(self, engine, params, version):
        self._engine, self._version, self._requests, self.stats = engine, version, [], Stats()

    pending = property(lambda self: len(self._requests))

    def set_params(self, params, version):
        self._version = version

    def add(self, request):
        self._requests.append(request)

    def records(self):
        return []

    def step(self):
        now, self._requests = self._requests[:64], self._requests[64:]
        return [self._record(request) for request in now]

    def _record(self, request):
        width = lambda field: (getattr(self._engine, field.width),) if field.width else ()
        drawn: dict[str, Any] = {
            name: np.zeros((LENGTH, *width(f)), f.dtype) for name, f in DRAWN.items()
        }
        drawn["tokens"] += 3  # no end token
        version = np.full(LENGTH, self._version, np.int32)
        return Trajectory(
            id=request.id, prompt=request.prompt, stop_reason="length", seed=request.seed,
            request=request.hash, quant_id=self._engine.quant_id,
            temperature=request.sampling.temperature, version=version, kv_version=version,
            segment=np.zeros(LENGTH, np.int32), **drawn,
        )


class InstantSampling(build.Sampling):
    """The sampler's half of a run, without the time of its engine."""

    def scheduler(self, engine, params, version, *args, **options):
        return Instant(engine, params, version)


def config(workers: int, schedule: str):
    c = default.get_config()
    c.task.tokenizer, c.task.max_prompt_tokens = "char", 16
    c.rollout.update(schedule=schedule, driver="ray", workers=workers, old_logp_source="none")
    c.correction.objective, c.correction.weight = "a3po", "none"
    return c


def opened(c, sampling: type):
    """Returns random parameters of the learner, a source that it publishes them to, and the time of
    the requests for actors.

    Args:
      sampling: class of the sampler's half of a run, in each actor.
    """
    setup = build.build(c.lock())
    params = transformer.init(setup.model, jax.random.key(0))
    params = placement.put(params, setup.training.layout, setup.model)
    fingerprint.hex(fingerprint.digest(setup.serving_params(params, 0)))  # compiles
    rewards: Any = asynchrony.LengthRewards()
    groups = Plain(c, setup.prompter(), rewards, False)
    parts = dataclasses.replace(asynchrony.parts_of(setup, Timer()), groups=groups)
    address, start = ray_cluster.connect(c.rollout), time.monotonic()
    from jaxrl_tis.rollouts.ray_source import ray_source  # which needs Ray

    make = lambda c: sampling(**vars(build.build_sampling(c)))
    source = ray_source(
        parts, setup.engine, setup.abstract_served, setup.identity, make, address
    )
    return params, source, start


def measure(workers: int, seconds: float) -> dict[str, float]:
    """Returns records per second, and the CPU seconds of the learner's process per second."""
    c = config(workers, "in_flight(staleness=2)")
    c.model.update(num_layers=1, embed_dim=32, mlp_dim=48)
    c.rollout.update(prompts=64, group_size=32, max_new_tokens=LENGTH)
    c.engine.slots = 512
    params, source, _ = opened(c, InstantSampling)
    source.publish(params, 0)
    while len(source.books.controller.workers) < workers:
        time.sleep(0.1)
    done, version, end = 0, 0, float("inf")
    while (now := time.monotonic()) < end:
        if version == WARM:
            done, start, end, spent = 0, now, now + seconds, time.process_time()
        version += 1
        done += len(next_batch(source, version)[0])
        source.publish(params, version)
    passed, spent = time.monotonic() - start, time.process_time() - spent
    source.close(is_over=True)
    return {"records_per_s": done / passed, "learner_cpu_share": spent / passed}


def main() -> None:
    parser = cli.parser("benchmarks.records", __doc__.partition("\n")[0], __doc__)
    parser.add_argument("--workers", type=int, default=1, help="actors")
    parser.add_argument("--seconds", type=float, default=12.0, help="after the first batches")
    given = arguments.parse(parser, seconds=1.0)
    arguments.say(f"{given.workers} workers, {given.seconds:g} s after the first batches")
    print(json.dumps(measure(given.workers, given.seconds)))


if __name__ == "__main__":
    cli.run(main)
