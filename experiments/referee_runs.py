"""Trains the runs of the referee, configs/fig_referee.py: all arms and seeds of a part in one process.

A part is a gap and a length of answers, "int8/short". Its arms share the programs of sampler and evaluation and
the supervised steps of each seed, and the seeds of an arm share its update. Each finished run is one line of
FOLDER/GAP-LENGTH.jsonl, in the form of experiments/records.py; the same command continues after an end.

Examples:

    python -m experiments.referee_runs int8/short
    python -m experiments.referee_runs noise/long --seeds=0,1 --arms="none,token TIS"
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from configs import fig_referee
from jaxrl_tis import cli_flags
from jaxrl_tis.build import Setup, build
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker, worker
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.evaluate import Evaluator
from experiments import figures, records
from jaxrl_tis.learner.state import initial_state, policy
from jaxrl_tis.learner.trainer import Trainer, sample_metrics
from jaxrl_tis.models.transformer import Params
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.source import RolloutSource, SourceParts, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.virtual import VirtualSource
from jaxrl_tis.runtime import cli

CONFIG = "configs/fig_referee.py"
FOLDER = f"{figures.FOLDER}/referee"
SEEDS = tuple(range(8))
PARTS = fig_referee.PARTS
REWARD = "eval/sampled_reward"
BROKEN = 0.0  # reward of a policy whose numbers are no longer finite


def path_of(folder: str | os.PathLike, part: str) -> pathlib.Path:
    """Returns the file of a part's runs."""
    return pathlib.Path(folder) / f"{part.replace('/', '-')}.jsonl"


class Programs:
    """Builds the arms of a part; engines of equal settings are made once."""

    def __init__(self):
        self._engines: dict[Any, Engine] = {}

    def build(self, arm: dict[str, Any]) -> Setup:
        """Returns the setup of an arm."""
        fields = [f"--config.{name}={value}" for name, value in arm.items()]
        setup = build(cli_flags.parsed([f"--config={CONFIG}", *fields]))
        shared = lambda engine: self._engines.setdefault(engine.config, engine)
        return dataclasses.replace(
            setup, engines=tuple(map(shared, setup.engines)),
            learner_engine=shared(setup.learner_engine),
        )


def with_seed(setup: Setup, seed: int) -> Setup:
    """Returns the setup with another seed and the same programs."""
    config = copy.deepcopy(setup.config)
    config.seed = seed
    return dataclasses.replace(
        setup, config=config, training=dataclasses.replace(setup.training, config=config)
    )


def of_seed(trainer: Trainer, setup: Setup) -> Trainer:
    """Returns a trainer of this setup with the programs of another one."""
    trainer = copy.copy(trainer)
    trainer.setup = setup.training
    return trainer


@contextlib.contextmanager
def sampling(setup: Setup, trainer: Trainer, rewards: RewardWorker) -> Iterator[tuple]:
    """Opens (source of rollouts, snapshots of the weights that sampled, evaluator) of a run."""
    config = setup.config
    with contextlib.ExitStack() as stack:
        prompter = stack.enter_context(contextlib.closing(setup.prompter()))
        batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts, seed=config.seed
        )
        groups = Groups(config, prompter, rewards, with_greedy=False)
        parts = SourceParts(
            config, setup.schedule, None, groups, batches, Timer(), setup.serving_params
        )
        start = functools.partial(setup.scheduler, setup.engine)
        snapshots = trainer.weight_snapshots()
        source: RolloutSource
        if setup.schedule.is_sync:
            source = SyncSource(parts, start)
        else:
            source = VirtualSource(parts, start, setup.engine.slots, snapshots.add_logps)
        stack.callback(source.close, is_over=True)
        yield source, snapshots, Evaluator(config, prompter)


def evaluated(
    setup: Setup, evaluator: Evaluator, params: Params, rewards: RewardWorker, step: int
) -> dict[str, Any]:
    """Returns the record of an evaluation of the learner itself."""
    engine, record = setup.learner_engine, {"step": step, "phase": "eval"}
    scheduler = setup.scheduler(engine, engine.load(params), step)
    with contextlib.closing(scheduler), Progress(0, "evaluation", is_shown=False) as progress:
        return record | evaluator.run(scheduler, rewards, step, progress)


def trained(
    setup: Setup, trainer: Trainer, params: Params, rewards: RewardWorker
) -> list[dict[str, Any]]:
    """Trains from the taught parameters; returns the records of its steps and evaluations. A run whose
    loss or gradient is not finite ends there, with reward `BROKEN` in all evaluations after it."""
    config, lines, is_broken = setup.config, [], False
    with sampling(setup, trainer, rewards) as (source, snapshots, evaluator):
        state = initial_state(setup.training, params)
        for step in range(config.steps + 1):
            if step and not is_broken:
                start, current = time.monotonic(), policy(setup.training, state)
                if source.publish(current, step - 1):
                    snapshots.publish(current, step - 1)
                drawn, _ = next_batch(source, step)
                known = snapshots.pop_logps([s.trajectory for s in drawn])
                rows = trainer.score(state, drawn, snapshots, known)
                state, rows, measured = trainer.update(state, rows, step, step - 1)
                values = measured | sample_metrics(drawn, rows, config)
                values |= {"time/step_s": time.monotonic() - start}
                kept = {n: float(v) for n, v in values.items() if n in records.METRICS}
                lines.append({"step": step, "phase": "train"} | kept)
                # Without a gradient where the mask leaves no token: such a step has no update.
                is_broken = not math.isfinite(float(measured.get("actor/grad_norm", 0.0)))
            if step % config.eval.every == 0:
                line = {"step": step, "phase": "eval", REWARD: BROKEN}
                if not is_broken:
                    source.release_cache()
                    current = policy(setup.training, state)
                    line = evaluated(setup, evaluator, current, rewards, step)
                lines.append(line)
    return lines


def line_of(arm: str, seed: int, lines: Sequence[dict[str, Any]]) -> str:
    """Writes a run as the line that `records.read` reads."""
    steps = [r for r in lines if r["phase"] == "train"]
    series = {name: records.thinned(name, steps) for name in records.METRICS}
    series = {n: x for n, x in series.items() if not all(map(math.isnan, x))}
    tests = [r for r in lines if r["phase"] == "eval"]
    series |= {"eval/steps": [r["step"] for r in tests], REWARD: [r[REWARD] for r in tests]}
    rounded = {name: [records.rounded(x) for x in values] for name, values in series.items()}
    return json.dumps({"arm": arm, "seed": seed, "verdict": [], "findings": []} | rounded)


def train_part(
    part: str, seeds: Sequence[int], folder: str = FOLDER, chosen: Sequence[str] = ()
) -> None:
    """Trains the runs of a part that its file does not have yet."""
    path = path_of(folder, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(r.arm, r.seed) for r in records.read(path)[0]} if path.exists() else set()
    arms = fig_referee.arms_of(*part.split("/")) | fig_referee.control_of(*part.split("/"))
    programs, taught = Programs(), {}
    for name in chosen or arms:
        missing = [seed for seed in seeds if (f"{part}/{name}", seed) not in done]
        if not missing:
            continue
        setup = programs.build(arms[name])
        trainer = Trainer(setup.training)
        with worker(setup.config.reward) as rewards:
            for seed in missing:
                start, own = time.monotonic(), with_seed(setup, seed)
                if seed not in taught:
                    taught[seed] = figures.taught(own)
                lines = trained(own, of_seed(trainer, own), taught[seed], rewards)
                with path.open("a") as file:
                    file.write(line_of(f"{part}/{name}", seed, lines) + "\n")
                at_end = [r[REWARD] for r in lines if r["phase"] == "eval"]
                print(
                    f"{part}/{name}, seed {seed}: reward {at_end[0]:.3f} to {at_end[-1]:.3f}, "
                    f"{time.monotonic() - start:.0f} s", flush=True,
                )


def main() -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "experiments.referee_runs", "Trains the runs of the referee.", __doc__
    )
    parser.add_argument("parts", nargs="+", help=f"GAP/LENGTH: {', '.join(PARTS)}")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="default: %(default)s")
    parser.add_argument("--arms", default="", help="names of corrections; default: all")
    parser.add_argument("--folder", default=FOLDER, help="default: %(default)s")
    args = parser.parse_args()
    if unknown := sorted({*args.parts} - {*PARTS}):
        raise ValueError(f"no part is called {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    arms = [name for name in args.arms.split(",") if name]
    for part in args.parts:
        train_part(part, [int(s) for s in args.seeds.split(",")], args.folder, arms)


if __name__ == "__main__":
    cli.run(main)
