"""Measures the cost of centred scores in rollouts and updates.

    python -m benchmarks.centering [--rounds=10] [--head=32]

Arms with and without centred scores take turns. Model of `benchmarks.grpo_step`, preset
centered_tis_2.
"""

import argparse
import statistics

from benchmarks import arguments, model
from benchmarks.grpo_step import timed
from jaxrl_tis.runtime import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="steps of each arm")
    parser.add_argument("--head", type=int, default=32, help="other tokens at each position")
    args = arguments.parse(parser, rounds=1, head=4)
    sizes = model.TINY if args.smoke else model.SMALL
    steps = {
        text: model.Step(*model.setup(sizes, preset="centered_tis_2", centering=text))
        for text in ("none", f"top({args.head})")
    }
    for text, step in steps.items():
        arguments.say(f"compiling with {text}")
        step(), step()
    arguments.say(f"{args.rounds} rounds")
    times = {(text, part): [] for text in steps for part in ("rollout", "update")}
    for index in range(args.rounds):
        for text, step in steps.items():
            rollout, samples = timed(step.rollout)
            update, _ = timed(step.update, step.score(samples), 1 + 10 * index)
            times[text, "rollout"].append(rollout)
            times[text, "update"].append(update)
    without, centred = steps
    for part in ("rollout", "update"):
        pairs = [b / a - 1 for a, b in zip(times[without, part], times[centred, part], strict=True)]
        medians = [statistics.median(times[text, part]) for text in steps]
        print(
            f"{part:8s} {medians[0]:.3f} s without, {medians[1]:.3f} s with {centred}; "
            f"median of the rounds {statistics.median(pairs):+.1%}"
        )


if __name__ == "__main__":
    cli.run(main)
