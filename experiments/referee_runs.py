"""Trains the runs of the referee, configs/fig_referee.py, or measures its gradients: all of a part in one process.

A part is a gap and a length of answers, "int8/short". Its arms share the programs of sampler and evaluation and
the supervised steps of each seed, and the seeds of an arm share its update. All arms of one seed are trained
before those of the next. Each finished run is one line of FOLDER/GAP-LENGTH.jsonl, in the form of
experiments/records.py; the same command continues after an end.

With --gradients: bias and variance of each correction's gradient, against the gradient without a gap, in
FOLDER/GAP-LENGTH.gradients.jsonl. The arm without a gap is trained with one update a step. Its policy is kept at
the steps of CHECKPOINTS. There the sampler with the gap draws BATCHES batches, and the sampler without one draws
as many of the same prompts. For the gap "stale" the sampler's weights are those of LAG steps before. The gap
"in-flight" has no sampler of one version and is not measured.

Each correction's gradient of a batch is what its own update subtracts with plain descent at rate 1. The
gradient without a gap is the mean over the batches of the exact engine. Squares of means are products of the
means of two halves of the batches, so that the noise of one half adds nothing to them.

Examples:

    python -m experiments.referee_runs int8/short
    python -m experiments.referee_runs noise/long --seeds=0,1 --arms="none,token TIS"
    python -m experiments.referee_runs stale/long --gradients
    python -m experiments.referee_runs int8+stale/short --factors
    python -m experiments.referee_runs stale/long --objectives --seeds=0 --arms=GMPO
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from configs import fig_referee, fig_referee_objectives
from jaxrl_tis import cli_flags
from jaxrl_tis.build import Setup, build
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker, worker
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.evaluate import Evaluator
from experiments import parts, records
from jaxrl_tis.learner.state import initial_state, policy
from jaxrl_tis.learner.step import TrainState
from jaxrl_tis.learner.trainer import Trainer, sample_metrics
from jaxrl_tis.models.transformer import Params
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.rollouts.groups import Groups, Sample
from jaxrl_tis.rollouts.source import RolloutSource, SourceParts, next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.rollouts.virtual import VirtualSource
from jaxrl_tis.runtime import cli
from jaxrl_tis.sweep import Arm

CONFIG = "configs/fig_referee.py"
FOLDER = f"{parts.FOLDER}/referee"
FACTORS_FOLDER = f"{FOLDER}_factors"
OBJECTIVES_FOLDER = f"{FOLDER}_objectives"
SEEDS = tuple(range(8))
PARTS = fig_referee.PARTS
FACTOR_PARTS = fig_referee.FACTOR_PARTS
OBJECTIVE_PARTS = fig_referee_objectives.PARTS
REWARD = "eval/sampled_reward"
BROKEN = 0.0  # reward of a policy whose numbers are no longer finite

# Of the gradients.
LAG = 4
CHECKPOINTS = (LAG, 80)
BATCHES = 16
GRADIENT_SEEDS = tuple(range(4))
GRADIENT_PARTS = tuple(part for part in PARTS if not part.startswith("in-flight"))
SAMPLER = "sampler"
RECORDS_ALL = "centering"  # the arm whose engine records what every arm needs
SYNC = {"rollout.schedule": "sync", "rollout.update_turns": 0, "rollout.old_logp_source": "ring"}


def path_of(folder: str | os.PathLike, part: str) -> pathlib.Path:
    """Returns the file of a part's runs."""
    return pathlib.Path(folder) / f"{part.replace('/', '-')}.jsonl"


def gradients_path(folder: str | os.PathLike, part: str) -> pathlib.Path:
    """Returns the file of a part's gradients."""
    return path_of(folder, part).with_suffix(".gradients.jsonl")


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


def all_of(gap: str, length: str) -> dict[str, Arm]:
    """Returns the arms of a part of the first table, and its control."""
    return fig_referee.arms_of(gap, length) | fig_referee.control_of(gap, length)


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
        shared = SourceParts(
            config, setup.schedule, None, groups, batches, Timer(), setup.serving_params
        )
        start = functools.partial(setup.scheduler, setup.engine)
        snapshots = trainer.weight_snapshots()
        source: RolloutSource
        if setup.schedule.is_sync:
            source = SyncSource(shared, start)
        else:
            source = VirtualSource(shared, start, setup.engine.slots, snapshots.add_logps)
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
    part: str, arms: Mapping[str, Arm], seeds: Sequence[int], folder: str = FOLDER,
) -> None:
    """Trains the runs of a part that its file does not have yet: all arms of a seed, then the next seed."""
    path = path_of(folder, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(r.arm, r.seed) for r in records.read(path)[0]} if path.exists() else set()
    programs, built, taught = Programs(), {}, {}
    for seed, name in itertools.product(seeds, arms):
        if (f"{part}/{name}", seed) in done:
            continue
        if name not in built:
            setup = programs.build(arms[name])
            built[name] = setup, Trainer(setup.training)
        setup, trainer = built[name]
        start, own = time.monotonic(), with_seed(setup, seed)
        if seed not in taught:
            taught[seed] = parts.taught(own)
        with worker(setup.config.reward) as rewards:
            lines = trained(own, of_seed(trainer, own), taught[seed], rewards)
        with path.open("a") as file:
            file.write(line_of(f"{part}/{name}", seed, lines) + "\n")
        at_end = [r[REWARD] for r in lines if r["phase"] == "eval"]
        print(
            f"{part}/{name}, seed {seed}: reward {at_end[0]:.3f} to {at_end[-1]:.3f}, "
            f"{time.monotonic() - start:.0f} s", flush=True,
        )


def policies(
    setup: Setup, trainer: Trainer, params: Params, rewards: RewardWorker
) -> dict[int, Params]:
    """Trains without a gap; returns the policy after each of the steps that CHECKPOINTS need."""
    kept = {}
    wanted = {step - lag for step in CHECKPOINTS for lag in (0, LAG)}
    with sampling(setup, trainer, rewards) as (source, snapshots, _):
        state = initial_state(setup.training, params)
        for step in range(1, max(CHECKPOINTS) + 2):
            current = policy(setup.training, state)
            if step - 1 in wanted:
                kept[step - 1] = jax.device_get(current)
            source.publish(current, step - 1)
            snapshots.publish(current, step - 1)
            drawn, _ = next_batch(source, step)
            rows = trainer.score(state, drawn, snapshots)
            state, *_ = trainer.update(state, rows, step, step - 1)
    return kept


def drawn_from(
    setup: Setup, params: Params, rewards: RewardWorker, count: int
) -> list[list[Sample]]:
    """Returns batches of rewarded samples of these weights; equal prompts for every setup of a seed."""
    with sampling(setup, Trainer(setup.training), rewards) as (source, *_):
        assert isinstance(source, SyncSource)
        source.publish(params, 0)
        return [next_batch(source, step)[0] for step in range(1, count + 1)]


def descending(setup: Setup) -> Setup:
    """Returns the setup whose update subtracts its gradient."""
    training = dataclasses.replace(setup.training, optimizer=optax.sgd(1.0))
    return dataclasses.replace(setup, training=training)


def gradient(
    trainer: Trainer, params: Params, sampled_by: Params, samples: list[Sample]
) -> np.ndarray:
    """Returns the gradient of a batch at `params` as one vector [parameters], float64."""
    optimizer = trainer.setup.optimizer
    # A copy, as the update donates its state.
    state = {"policy": TrainState(jax.tree.map(jax.numpy.array, params), optimizer.init(params))}
    own = policy(trainer.setup, state)
    rows = trainer.score(state, samples, {0: own if sampled_by is params else sampled_by})
    state, *_ = trainer.update(state, rows, 1, 0)
    flat = lambda tree: np.asarray(ravel_pytree(jax.device_get(tree))[0], np.float64)
    return flat(params) - flat(state["policy"].params)


def measures(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Returns unbiased estimates from gradients of batches.

    Args:
      found, true: [batches, parameters] of a correction, and without a gap; an even number of batches.

    Returns "true2" and "own2", the squared norms of the two mean gradients; "dot", their inner
    product; "bias2", the squared norm of their difference; "variance", the summed variance of one
    batch's gradient.
    """
    halves = lambda g: (g[: len(g) // 2].mean(axis=0), g[len(g) // 2 :].mean(axis=0))
    (a, b), (p, q) = halves(found), halves(true)
    return {
        "true2": float(p @ q), "own2": float(a @ b), "dot": float(a @ q + b @ p) / 2,
        "bias2": float((a - p) @ (b - q)), "variance": float(found.var(axis=0, ddof=1).sum()),
    }


def gradients_of(
    setups: Mapping[str, Setup], learner: Trainer, descents: Mapping[str, Trainer], part: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns the lines of one seed: of each checkpoint and arm.

    Args:
      setups: of the arms and of SAMPLER.
      learner: trains without a gap; descents: of each arm, see `descending`.
    """
    own = {name: with_seed(setup, seed) for name, setup in setups.items()}
    exact, sampler, lines = own[fig_referee.EXACT], own.pop(SAMPLER), []
    lag = LAG if part.startswith("stale") else 0
    learner = of_seed(learner, exact)
    trainers = {name: of_seed(trainer, descending(own[name])) for name, trainer in descents.items()}
    with worker(exact.config.reward) as rewards:
        kept = policies(exact, learner, parts.taught(exact), rewards)
        for step in CHECKPOINTS:
            params = jax.device_put(kept[step])
            older = jax.device_put(kept[step - lag]) if lag else params
            without = drawn_from(exact, params, rewards, BATCHES)
            batches = drawn_from(sampler, older, rewards, BATCHES)
            true = np.array([
                gradient(trainers[fig_referee.EXACT], params, params, batch) for batch in without
            ])
            for name, trainer in trainers.items():
                found = true
                if name != fig_referee.EXACT:
                    found = np.array([gradient(trainer, params, older, b) for b in batches])
                lines.append({"arm": f"{part}/{name}", "seed": seed, "step": step} | measures(found, true))
    return lines


def measure_part(part: str, seeds: Sequence[int], folder: str = FOLDER) -> None:
    """Measures the seeds of a part that its file does not have yet."""
    path = gradients_path(folder, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {json.loads(line)["seed"] for line in lines}
    programs, arms = Programs(), fig_referee.arms_of(*part.split("/"))
    once = {"train.minibatches": 1}  # the update of a whole batch
    setups = {name: programs.build(arm | once) for name, arm in arms.items()}
    learner = Trainer(setups[fig_referee.EXACT].training)
    descents = {name: Trainer(descending(setup).training) for name, setup in setups.items()}
    # The lag of "stale" is in the sampler's weights.
    setups[SAMPLER] = programs.build(arms[RECORDS_ALL] | once | SYNC)
    for seed in seeds:
        if seed not in done:
            found = gradients_of(setups, learner, descents, part, seed)
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in found)
            print(f"{part}, seed {seed}: {len(found)} gradients", flush=True)


def main() -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "experiments.referee_runs", "Trains the runs of the referee, or measures its gradients.", __doc__
    )
    parser.add_argument("parts", nargs="+", help=f"GAP/LENGTH: {', '.join(PARTS)}")
    of_runs = parser.add_mutually_exclusive_group()
    of_runs.add_argument("--gradients", action="store_true", help="measure the gradients of all arms")
    of_runs.add_argument(
        "--factors", action="store_true", help=f"the arms of the factors; parts: {', '.join(FACTOR_PARTS)}"
    )
    of_runs.add_argument(
        "--objectives", action="store_true",
        help=f"the published methods; parts: {', '.join(OBJECTIVE_PARTS)}",
    )
    parser.add_argument("--seeds", help="default: 0 to 7, of gradients and of published methods 0 to 3")
    parser.add_argument("--arms", default="", help="names of corrections; default: all")
    parser.add_argument("--folder", help=f"default: {FOLDER}, {FACTORS_FOLDER} or {OBJECTIVES_FOLDER}")
    args = parser.parse_args()
    known, folder, seeds, arms_of = PARTS, FOLDER, SEEDS, all_of
    if args.gradients:
        known, seeds = GRADIENT_PARTS, GRADIENT_SEEDS
    elif args.factors:
        known, folder, arms_of = FACTOR_PARTS, FACTORS_FOLDER, fig_referee.factors_of
    elif args.objectives:
        known, folder, arms_of = OBJECTIVE_PARTS, OBJECTIVES_FOLDER, fig_referee_objectives.objectives_of
        seeds = fig_referee_objectives.SEEDS
    if unknown := sorted({*args.parts} - {*known}):
        raise ValueError(f"no part is called {', '.join(unknown)}; choose from {', '.join(known)}")
    folder = args.folder or folder
    if args.seeds:
        seeds = tuple(int(seed) for seed in args.seeds.split(","))
    chosen = [name for name in args.arms.split(",") if name]
    for part in args.parts:
        if args.gradients:
            measure_part(part, seeds, folder)
        else:
            arms = arms_of(*part.split("/"))
            train_part(part, {name: arms[name] for name in chosen or arms}, seeds, folder)


if __name__ == "__main__":
    cli.run(main)
