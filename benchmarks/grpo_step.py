"""Time of one GRPO step (rollout + score + update), and of its correction and metrics.

    python -m benchmarks.grpo_step [--rounds=10] [--fuse_score=never]

A 4-layer, 256-wide random model with vocabulary 49,152; 4 prompts x 8 samples, 64 + 64 tokens.
"""

import argparse
import statistics
import time

import jax

from benchmarks import model
from jaxrl_tis import cli
from jaxrl_tis.rows import update_fields


def timed(function, *args) -> tuple[float, object]:
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fuse_score", choices=("auto", "never"), default="auto")
    args = parser.parse_args()
    step = model.Step(*model.setup(fuse_score=args.fuse_score))
    step(), step()
    prepared = lambda rows: step.trainer._prepare(rows | update_fields(len(rows["mask"]), 0, 1, 0))
    collisions = lambda rows: step.trainer._collisions(
        step.state["policy"].params, step.trainer.setup.micro_batches(rows)[0]
    )
    prepared(step.rows), collisions(step.rows)
    names = "rollout", "score", "correction", "variance proxies", "update", "step"
    parts = {name: [] for name in names}
    for index in range(args.rounds):
        seconds, samples = timed(step.rollout)
        parts["rollout"].append(seconds)
        seconds, rows = timed(step.score, samples)
        parts["score"].append(seconds)
        seconds, _ = timed(step.update, rows, 1 + 10 * index)
        parts["update"].append(seconds)
        # `update` runs the correction and its metrics too; timed alone for its share.
        correction, _ = timed(prepared, step.rows)
        parts["correction"].append(correction)
        # What a step takes longer where the profiles fall due; elsewhere no step has it.
        proxies, _ = timed(collisions, step.rows)
        parts["variance proxies"].append(proxies)
        parts["step"].append(parts["rollout"][-1] + parts["score"][-1] + seconds)
    for name, values in parts.items():
        print(f"{name:16s} median {statistics.median(values):.4f} s, max {max(values):.4f} s")
    share = statistics.median(parts["correction"]) / statistics.median(parts["step"])
    print(f"correction and metrics: {share:.2%} of the step")


if __name__ == "__main__":
    cli.run(main)
