"""Measures the gain and the cost of samplers in threads or in an actor, against a synchronous run.

    python -m benchmarks.asynchrony                    # all schedules in rounds, each in a process
    python -m benchmarks.asynchrony --schedule='areal(staleness=2)'
    python -m benchmarks.asynchrony --measure=machine  # speed-up of two threads
    python -m benchmarks.asynchrony --measure=sync     # weight sync, bfloat16 and int8
    python -m benchmarks.asynchrony --measure=pause    # of a sampler during weight syncs
    python -m benchmarks.asynchrony --measure=control  # decisions for 128 groups of 8

Learner and sampler each have a simulated device with one thread. Response lengths are log-normal
and do not depend on the sampled tokens. In "sync" the two wait for each other. "sync, both" is the
same on one device with two threads. In "areal(staleness=2), ray" the sampler is a Ray actor, which
needs the extra `ray`. Rates count the tokens of all batches after the first, which compiles.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import time
from typing import Any

from benchmarks import arguments
from jaxrl_tis.runtime import cli

ARMS = ("sync", "one_step", "areal(staleness=2)", "in_flight(staleness=2)")
BOTH, RAY = "sync, both", "areal(staleness=2), ray"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
ONE_EACH = {"XLA_FLAGS": ONE_THREAD, "NPROC": "1", "JAX_PLATFORMS": "cpu"}
WARM, MOST = 5, 384
SMOLLM2 = "configs/shapes/SmolLM2-135M-Instruct.Q4_1.gguf.json"


def config(schedule: str, driver: str = "threads", most: int = MOST):
    """Returns a run's config whose responses have at most `most` tokens."""
    from configs import default

    c = default.get_config()
    c.name, c.steps = "asynchrony", 1000
    c.task.tokenizer = "char"
    c.task.max_prompt_tokens = 16
    c.rollout.prompts, c.rollout.group_size, c.rollout.max_new_tokens = 8, 4, most
    c.rollout.schedule = schedule
    c.correction.objective, c.correction.weight = "ppo", "none"
    if schedule != "sync":
        c.rollout.driver, c.rollout.old_logp_source = driver, "none"
        c.correction.objective = "a3po"
    c.engine.slots, c.engine.steps_per_call, c.engine.prefill_batch = 32, 8, 8
    c.train.microbatch_rows, c.train.fuse_old_logp, c.train.pack_length = 2, "never", most + 32
    return c


class LengthRewards:
    """Rewards by the length of the text, without a process that computes them."""

    counts = {"timeouts": 0, "errors": 0, "non_finite": 0, "dropped": 0}

    def results(self, texts, examples, tokens):
        from jaxrl_tis.data.rewards import Scored

        return [Scored(float(len(text) % 7), {}) for text in texts]


def long_tailed(setup):
    """Groups whose requests have log-normal lengths with median 48 and sigma 1."""
    import dataclasses
    import zlib

    import numpy as np

    from jaxrl_tis.rollouts.groups import Groups

    most = setup.config.rollout.max_new_tokens

    class LongTailed(Groups):
        def requests(self, example, name, step, redundant=0):
            return [self._cut(r) for r in super().requests(example, name, step, redundant)]

        def _cut(self, request):
            source = np.random.default_rng(zlib.crc32(request.id.encode()))
            length = int(np.clip(source.lognormal(np.log(48), 1.0), 1, most))
            sampling = dataclasses.replace(request.sampling, stop_ids=(), max_tokens=length)
            return dataclasses.replace(request, sampling=sampling)

    rewards: Any = LengthRewards()
    return LongTailed(setup.config, setup.prompter(), rewards, with_greedy=False)


def parts_of(setup, timer):
    from jaxrl_tis.data.pipeline import Batches
    from jaxrl_tis.rollouts.source import SourceParts

    c = setup.config
    batches = Batches(c.task.name, c.task.params, batch_size=c.rollout.prompts, seed=c.seed)
    has_threads = c.rollout.driver == "threads"
    serving_params = setup.served_params if has_threads else setup.serving_params
    return SourceParts(c, setup.schedule, None, long_tailed(setup), batches, timer, serving_params)


def source_of(setup, timer):
    import functools

    from jaxrl_tis import build
    from jaxrl_tis.rollouts import ray_cluster
    from jaxrl_tis.rollouts.synchronous import SyncSource
    from jaxrl_tis.rollouts.threads import thread_source

    parts, rollout = parts_of(setup, timer), setup.config.rollout
    if rollout.driver == "ray":
        address = ray_cluster.connect(rollout)
        from jaxrl_tis.rollouts.ray_source import ray_source  # which needs Ray

        served, facts = setup.abstract_served, setup.identity
        return ray_source(parts, setup.engine, served, facts, build.build_sampling, address)
    starts = [functools.partial(setup.scheduler, engine) for engine in setup.engines]
    if setup.schedule.is_sync:
        return SyncSource(parts, starts[0])
    return thread_source(parts, starts, setup.engine.slots)


CALLS = ("stage", "publish", "decide", "check", "stats", "metrics")  # by the learner's thread


class Timed:
    """A driver whose calls by the learner's thread are timed."""

    def __init__(self, driver):
        self._driver, self.seconds = driver, 0.0

    def __getattr__(self, name):
        call = getattr(self._driver, name)

        def timed(*args):
            start = time.monotonic()
            result = call(*args)
            self.seconds += time.monotonic() - start
            return result

        return timed if name in CALLS else call


def thread_seconds() -> dict[str, float]:
    """Returns the CPU seconds of each thread of this process that is not of XLA's pools."""
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if not (task / "comm").read_text().startswith(("tf_", "llvm")):
                found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def train(schedule: str, steps: int, driver: str, most: int = MOST) -> dict[str, float]:
    """Trains one arm and returns its tokens per second, the waiting times, and the driver's share
    of the learner's time."""
    from jaxrl_tis import build
    from jaxrl_tis.learner.state import initial_params, initial_state
    from jaxrl_tis.learner.trainer import Trainer
    from jaxrl_tis.record.metrics import Timer
    from jaxrl_tis.rollouts.source import next_batch

    setup = build.build(config(schedule, driver, most))
    training = setup.training
    state, trainer = initial_state(training, initial_params(training)), Trainer(training)
    timer, known = Timer(), set(thread_seconds())
    source, old = source_of(setup, timer), trainer.weight_snapshots()
    if not setup.schedule.is_sync:
        source.driver = timed = Timed(source.driver)
    tokens, waited, metrics = 0, 0.0, []
    for step in range(1, WARM + steps + 1):
        if step == WARM + 1:
            start, tokens, waited = time.monotonic(), 0, 0.0
            timer.collect()
            if not setup.schedule.is_sync:
                before, timed.seconds = thread_seconds(), 0.0
        policy = state["policy"].params
        source.publish(policy, step - 1)
        old.publish(policy, step - 1)
        begun = time.monotonic()
        samples, values = next_batch(source, step)
        waited += time.monotonic() - begun
        logps = old.pop_logps([s.trajectory for s in samples])
        rows = trainer.score(state, samples, old, logps)
        state, rows, _ = trainer.update(state, rows, step, step - 1)
        tokens += int(rows["mask"].sum())
        metrics.append(values)
    seconds, after = time.monotonic() - start, thread_seconds()
    source.close(is_over=True)
    metrics = metrics[WARM:]
    found = {
        "tokens_per_s": tokens / seconds, "step_s": seconds / steps, "learner_idle": waited / seconds,
        "occupancy": statistics.mean(m["rollout/occupancy"] for m in metrics),
    }
    if setup.schedule.is_sync:
        return found | {"sampler_idle": 1 - timer.collect()["time/rollout_s"] / seconds}
    names = "async/sampler_idle", "sync/seconds", "sync/pause_s", "sync/bytes"
    named = [name for name in names if name in metrics[0]]
    found |= {n.split("/")[1]: statistics.mean(m[n] for m in metrics) for n in named}
    found["driver_learner_thread_share"] = timed.seconds / seconds
    if driver == "ray":  # the new threads are the driver's and Ray's
        spent = sum(s - before.get(t, 0.0) for t, s in after.items() if t not in known)
        found["driver_threads_cpu_share"] = spent / seconds
    return found


def in_process(arm: str, steps: int, most: int = MOST) -> dict[str, float]:
    """Trains one arm in a process of its own with a limited number of threads."""
    of_both = {"XLA_FLAGS": "", "NPROC": "2"} if arm == BOTH else {}
    environment = os.environ | ONE_EACH | of_both
    driver = "ray" if arm == RAY else "threads"
    return arguments.result(
        ["benchmarks.asynchrony", f"--schedule={arm.partition(', ')[0]}", f"--steps={steps}",
         f"--driver={driver}", f"--most={most}"], environment,
    )


def compare(rounds: int, steps: int, most: int, arms: tuple[str, ...]) -> None:
    """Runs all arms in turns and prints their medians and the load of the machine."""
    found = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            arguments.say(f"{arm}: a process compiles and trains")
            found[arm].append(in_process(arm, steps, most))
            print(arm, found[arm][-1], "load", os.getloadavg()[0], flush=True)
    rate = lambda arm: statistics.median(r["tokens_per_s"] for r in found[arm])
    for arm in arms:
        of_arm = {n: statistics.median(r[n] for r in found[arm]) for n in found[arm][0]}
        told = ", ".join(f"{name} {value:.4g}" for name, value in of_arm.items())
        gains = f"{rate(arm) / rate('sync'):.2f} x sync, {rate(arm) / rate(BOTH):.2f} x both"
        print(f"{arm}: {gains}; {told}")


def machine(rounds: int) -> None:
    """Prints the speed-up of two threads on two devices over one. It bounds what an overlap of
    learner and sampler can gain."""
    import threading

    import jax
    import jax.numpy as jnp

    def chain(x):
        for _ in range(200):
            x = jnp.tanh(x @ x * 0.01)
        return x

    step, inputs = jax.jit(chain), [jax.device_put(jnp.ones((256, 256)), d) for d in jax.devices()]

    def seconds(count: int) -> float:
        work = lambda x: [step(x).block_until_ready() for _ in range(20)]
        threads = [threading.Thread(target=work, args=(x,)) for x in inputs[:count]]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start

    seconds(2)  # compiles
    gains = [2 * seconds(1) / seconds(2) for _ in range(rounds)]
    print(f"two threads do {statistics.median(gains):.2f} times what one does")


def sync(rounds: int, layers: int) -> None:
    """Prints the time of a weight sync of SmolLM2-135M, or its first layers, to another device."""
    import jax

    from jaxrl_tis.engine.config import EngineConfig
    from jaxrl_tis.engine.engine import Engine
    from jaxrl_tis.models import placement, transformer
    from jaxrl_tis.models.config import ModelConfig
    from jaxrl_tis.sharding import SERVE_RULES, TRAIN_RULES, layout

    model = ModelConfig.from_hf(json.loads(pathlib.Path(SMOLLM2).read_text()))
    model = dataclasses.replace(model, num_layers=min(layers, model.num_layers))
    home, away = jax.devices()[:1], jax.devices()[1:]
    training = layout((1, 1, 1), TRAIN_RULES, home, model.vocab_size)
    params = placement.put(transformer.init(model, jax.random.key(0)), training, model)
    for name, quantization in (("bfloat16", "none"), ("int8", "w8a8")):
        recipe = EngineConfig(8, 64, dtype="bfloat16", quantization=quantization)
        engine = Engine(model, recipe, layout((1, 1, 1), SERVE_RULES, away, model.vocab_size))
        seconds = []
        for _ in range(rounds + 1):
            start = time.monotonic()
            served = jax.block_until_ready(engine.load(params))
            seconds.append(time.monotonic() - start)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(served))
        print(f"{name}: {size:,} bytes, {statistics.median(seconds[1:]):.3f} s")


def pause(rounds: int, most: int = MOST) -> None:
    """Prints how long weight syncs pause a sampler, with a learner that takes no time."""
    from jaxrl_tis import build
    from jaxrl_tis.learner.state import initial_params
    from jaxrl_tis.record.metrics import Timer
    from jaxrl_tis.rollouts.source import next_batch

    for schedule in ("areal(staleness=2)", "in_flight(staleness=2)"):
        for name, quantization in (("bfloat16", "none"), ("int8", "w8a8")):
            arguments.say(f"{schedule}, {name}")
            c = config(schedule, most=most)
            c.engine.dtype, c.engine.quantization = "bfloat16", quantization
            setup = build.build(c)
            source, params = source_of(setup, Timer()), initial_params(setup.training)
            stood, syncs = 0.0, 0.0
            for step in range(1, WARM + rounds + 1):
                source.publish(params, step - 1)
                _, values = next_batch(source, step)
                if step > WARM:
                    stood += values["sync/pause_s"] * values["async/syncs"]
                    syncs += values["async/syncs"]
            source.close(is_over=True)
            size, seconds = values["sync/bytes"], values["sync/seconds"]
            print(f"{schedule}, {name}: {size:,} bytes in {seconds:.4f} s, "
                  f"stood {stood / syncs:.5f} s")


def control(rounds: int, groups: int = 128, size: int = 8) -> None:
    """Prints the seconds of decisions, queue and controller for a batch, without an engine."""
    from jaxrl_tis.rollouts import schedules
    from jaxrl_tis.rollouts.controller import Begin, Controller, SyncWeights
    from jaxrl_tis.rollouts.queue import Queue

    needs = {"reward": ("tokens",), "learner": ("reward",)}
    controller = Controller(schedules.areal(staleness=1), groups, Queue(size, 2 * groups, needs))
    controller.joined("sampler", groups * size)
    seconds, running = [], []
    for version in range(rounds + 1):
        start = time.monotonic()
        controller.published(version)
        while (entries := controller.take()) is None:
            for decision in controller.decisions():
                if isinstance(decision, SyncWeights):
                    controller.synced("sampler", decision.version)
                elif isinstance(decision, Begin):
                    running += decision.keys
                else:
                    for key in decision.keys:
                        controller.preempted("sampler", key, version - 1)
                        running.remove(key)
            ended, running = running[:16], running[16:]  # of one call of the engine
            for key in ended:
                controller.finished("sampler", key)
                controller.queue.put(key, "tokens", None)
            for key in controller.queue.claim("reward"):
                controller.queue.put(key, "reward", 0.0)
        assert len(entries) == groups
        seconds.append(time.monotonic() - start)
    print(f"{groups} groups of {size}: {statistics.median(seconds[1:]):.4f} s a batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="")
    parser.add_argument("--driver", choices=("threads", "ray"), default="threads")
    parser.add_argument("--measure", choices=("machine", "sync", "pause", "control"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--most", type=int, default=MOST, help="tokens of the longest response")
    parser.add_argument("--layers", type=int, default=100, help="most layers of the model of a sync")
    given = arguments.parse(parser, rounds=1, steps=1, most=24, layers=1)
    if given.measure or "XLA_FLAGS" not in os.environ:  # `in_process` gives it
        os.environ |= ONE_EACH
    if given.schedule:
        print(json.dumps(train(given.schedule, given.steps, given.driver, given.most)))
    elif given.measure == "control":
        control(given.rounds)
    elif given.measure:
        if given.measure == "pause":
            pause(given.rounds, given.most)
        elif given.measure == "sync":
            sync(given.rounds, given.layers)
        else:
            machine(given.rounds)
    else:
        arms = ("sync", BOTH, RAY) if given.smoke else (BOTH, *ARMS, RAY)
        compare(given.rounds, given.steps, given.most, arms)


if __name__ == "__main__":
    cli.run(main)
