"""What running ahead is worth: every schedule against a synchronous run on the same devices.

Controller and queue are the code of a run. Samplers and learner are the cost model `costs.Costs`: its
numbers are hardware limits and assumptions, not measurements. In the synchronous run all devices
sample, then all train. In the others the devices are divided.

Examples:

    python -m experiments.async_clock
    python -m experiments.async_clock --schedule "areal(staleness=2)" --schedule dora --json out.json
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.costs import Costs
from experiments.virtual_clock import Outcome, simulate
from jaxrl_tis.rollouts import schedules
from jaxrl_tis.runtime import cli

Row = dict[str, Any]

# Pairs with one difference: new weights interrupt or wait, sequences continue or are awaited, last
# sequences are packed together or not, redundant candidates or none, keys and values are kept or
# recomputed.
PAIRS = (
    "areal(staleness=4)", "dora(staleness=4)", "in_flight(staleness=4)",
    "fully_async(trigger=1, threshold=1.0, partial=True)",
    "fully_async(trigger=1, threshold=1.0, partial=False)",
    "laminar(staleness=4, repack=0.5)", "laminar(staleness=4, repack=0.0)",
    "roll_flash(alpha=1, redundant=0)", "roll_flash(alpha=1, redundant=4)",
)
STALENESS = (0, 1, 2, 4, 8)
MEDIANS = (1280.0, 2560.0, 5120.0)  # tokens
TRAINERS = (1, 2, 3, 4)  # of 8 devices


def outcome(schedule: str, costs: Costs, steps: int, skip: int, seed: int) -> Outcome:
    """Simulates a schedule; the synchronous one has all devices for both."""
    parsed = schedules.parse(schedule)
    return simulate(parsed, costs.colocated() if parsed.is_sync else costs, steps, skip, seed)


def rows(
    names: Iterable[str], costs: Costs, steps: int = 24, skip: int = 8, seed: int = 0
) -> list[Row]:
    """Returns a row for each schedule; `speedup` is in tokens per second over those of "sync"."""
    base = outcome("sync", costs, steps, skip, seed)
    lines = []
    for name in names:
        o = base if name == "sync" else outcome(name, costs, steps, skip, seed)
        lines.append({
            "schedule": name, "speedup": o.tokens_per_s / base.tokens_per_s,
            "step_s": o.seconds / (steps - skip), "learner_idle": o.learner_idle,
            "sampler_idle": o.sampler_idle, "mean_staleness": o.mean_staleness,
            "max_staleness": o.max_staleness, "partial": o.partial,
            **dataclasses.asdict(o.counts), "longest_pause_s": o.longest_pause,
        })
    return lines


def table(found: Sequence[Row]) -> str:
    """Returns rows as text; tokens are thousands."""
    lines = [
        f"{'schedule':54} {'speedup':>7} {'s/step':>7} {'learner':>8} {'sampler':>8} "
        f"{'staleness':>11} {'partial':>7} {'interr.':>7} {'re-pref.':>8} {'restarted':>9} "
        f"{'discarded':>9} {'pause s':>7}",
        f"{'':54} {'':>7} {'':>7} {'idle':>8} {'idle':>8} {'mean max':>11} "
        f"{'share':>7} {'':>7} {'k tokens':>8} {'k tokens':>9} {'k tokens':>9}",
    ]
    for row in found:
        staleness = f"{row['mean_staleness']:.2f} {row['max_staleness']:3d}"
        tokens = [row[f"{name}_tokens"] / 1000 for name in ("reprefilled", "restarted", "discarded")]
        lines.append(
            f"{row['schedule']:54} {row['speedup']:7.2f} {row['step_s']:7.1f} "
            f"{row['learner_idle']:8.1%} {row['sampler_idle']:8.1%} {staleness:>11} "
            f"{row['partial']:7.1%} {row['interrupted']:7d} {tokens[0]:8.0f} {tokens[1]:9.0f} "
            f"{tokens[2]:9.0f} {row['longest_pause_s']:7.2f}"
        )
    return "\n".join(lines)


def studies(costs: Costs, **run: int) -> dict[str, list[Row]]:
    """Returns the tables of a command without a schedule, by title."""
    median = lambda m: dataclasses.replace(costs, median_tokens=m)
    total = costs.workers + costs.trainers
    divided = lambda n: dataclasses.replace(costs, workers=total - n, trainers=n)
    named = lambda what, found: [row | {"schedule": f"{row['schedule']}, {what}"} for row in found]
    return {
        "schedules, as published": rows(schedules.SCHEDULES, costs, **run),
        "one difference at a time": rows(PAIRS, costs, **run),
        "staleness": rows([f"areal(staleness={n})" for n in STALENESS], costs, **run),
        "lengths": [
            row for m in MEDIANS
            for row in named(f"median {m:.0f}", rows(["sync", "areal", "in_flight"], median(m), **run))
        ],
        "division of the devices": [
            row for n in TRAINERS if n < total
            for row in named(f"{total - n} + {n}", rows(["areal", "in_flight"], divided(n), **run))
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "experiments.async_clock",
        "Throughput, idle time and staleness of asynchronous schedules by a cost model.", __doc__,
    )
    parser.add_argument("--schedule", action="append", help="only these, as rollout.schedule spells them")
    parser.add_argument("--steps", type=int, default=24, help="updates; the first third is not counted")
    parser.add_argument("--seed", type=int, default=0, help="seed of the response lengths")
    parser.add_argument("--json", help="write the rows here, too")
    args = parser.parse_args(argv)
    if args.steps < 2:
        raise ValueError(f"--steps={args.steps}: give at least 2, of which one is counted")
    cli.check_folder("json", args.json)
    costs, run = Costs(), {"steps": args.steps, "skip": args.steps // 3, "seed": args.seed}
    if args.schedule:
        tables = {"schedules": rows(args.schedule, costs, **run)}
    else:
        tables = studies(costs, **run)
    for title, part in tables.items():
        print(f"{title}\n{table(part)}\n")
    if args.json:
        text = json.dumps({"costs": dataclasses.asdict(costs), "run": run, "rows": tables}, indent=1)
        pathlib.Path(args.json).write_text(text)


if __name__ == "__main__":
    cli.run(main)
