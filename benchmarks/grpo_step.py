"""Measures the time of one GRPO step (rollout, score, update) and of its correction and metrics.

    python -m benchmarks.grpo_step [--rounds=10] [--fuse_old_logp=never] \\
        [--trl_python=/path/to/python] [--tunix_python=/path/to/python]

The model is random, with 4 layers, width 256 and vocabulary 49,152. The batch has 4 prompts x 8
samples of 64 + 64 tokens. The last line divides the model FLOPs of a step by its time and by the
machine's own matrix rate: a float32 product of width 2,048, the best of five before and five after.
With --trl_python and --tunix_python TRL and Tunix run the same step (grpo_trl.py, grpo_tunix.py)
before and after the rounds of ours, and the ratio to ours is printed.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import time
from typing import Any

import jax

from benchmarks import arguments, model
from jaxrl_tis.learner.batch_layout import update_fields
from jaxrl_tis.runtime import cli


def timed(function, *args) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, result


# glibc keeps its memory, which spares torch its page faults: TRL takes two thirds of the time.
TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
PEERS = {"trl": (("as installed", {}), ("tuned allocator", {"GLIBC_TUNABLES": TUNED})),
         "tunix": (("as installed", {}),)}


def peer_seconds(name: str, python: str, steps: int) -> dict[str, float]:
    """Returns the seconds of another library's step, without its warm-up, for each way to start
    it."""
    script, found = pathlib.Path(__file__).with_name(f"grpo_{name}.py"), {}
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLIBC_TUNABLES")}
    for way, environment in PEERS[name]:
        done = subprocess.run(
            [python, "-P", script, f"--steps={steps}"], capture_output=True, text=True,
            env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        )
        median = re.search(r"median without the first two: ([\d.]+) s", done.stdout)
        if not median:
            raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-2000:]}")
        found[f"{name}, {way}"] = float(median[1])
    return found


def measure_peers(args: argparse.Namespace, found: dict[str, list[float]]) -> None:
    for name in PEERS:
        if python := getattr(args, f"{name}_python"):
            arguments.say(f"{args.peer_steps} steps of {name}")
            for way, seconds in peer_seconds(name, python, args.peer_steps).items():
                found.setdefault(way, []).append(seconds)


def step_seconds(step: model.Step, number: int) -> dict[str, float]:
    """Runs one step and returns the seconds of its parts."""
    rollout, samples = timed(step.rollout)
    score, rows = timed(step.score, samples)
    update, _ = timed(step.update, rows, number)
    return {"rollout": rollout, "score": score, "update": update}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fuse_old_logp", choices=("auto", "never"), default="auto")
    for name in PEERS:
        parser.add_argument(f"--{name}_python", default="")
    parser.add_argument("--peer_steps", type=int, default=6)
    args = arguments.parse(parser, rounds=1)
    sizes = model.TINY if args.smoke else model.SMALL
    peers = {}
    arguments.say("compiling the step")
    step = model.Step(*model.setup(sizes, fuse_old_logp=args.fuse_old_logp))

    prepared = lambda rows: step.trainer.prepare(rows | update_fields(len(rows["mask"]), 0, 1, 0))
    collisions = lambda rows: step.trainer.diagnostics.probe(step.state, rows, 0).collisions  # due at step 0
    step(), step(), prepared(step.rows), collisions(step.rows)
    measure_peers(args, peers)
    arguments.say(f"{args.rounds} rounds")
    names = "rollout", "score", "update", "step", "correction", "variance proxies"
    parts, rates = {name: [] for name in names}, [model.matrix_rate("float32", 2048)]
    for index in range(args.rounds):
        found = step_seconds(step, 1 + 10 * index)
        found["step"] = sum(found.values())
        # `update` runs the correction and its metrics too; timed alone for its share.
        found["correction"], _ = timed(prepared, step.rows)
        # What a step takes longer where the profiles fall due; elsewhere no step has it.
        found["variance proxies"], _ = timed(collisions, step.rows)
        for name, seconds in found.items():
            parts[name].append(seconds)
    rates.append(model.matrix_rate("float32", 2048))
    for name, values in parts.items():
        print(f"{name:16s} median {statistics.median(values):.4f} s, max {max(values):.4f} s")
    share = statistics.median(parts["correction"]) / statistics.median(parts["step"])
    print(f"correction and metrics: {share:.2%} of the step")
    is_fused = step.trainer.setup.recompute_reason is None
    work, rate = sum(model.flops(sizes, is_fused).values()), max(rates)
    median = statistics.median(parts["step"])
    print(f"model FLOPs of a step: {work / 1e9:.0f} GF in {median:.2f} s, "
          f"{work / median / rate:.0%} of the machine's {rate / 1e9:.0f} GF/s")
    measure_peers(args, peers)
    for way, seconds in peers.items():
        ratio = statistics.mean(seconds) / statistics.median(parts["step"])
        print(f"{way}: {', '.join(f'{s:.2f}' for s in seconds)} s, {ratio:.2f} times ours, whose rollouts are W8A8")


if __name__ == "__main__":
    cli.run(main)
