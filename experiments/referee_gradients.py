"""Measures bias and variance of each correction's gradient, against the gradient without a gap.

For a part of the referee and a seed the arm without a gap is trained with one update a step. Its policy is kept
at the steps of CHECKPOINTS. There the sampler with the gap draws BATCHES batches, and the sampler without one
draws as many of the same prompts. For the gap "stale" the sampler's weights are those of LAG steps before. The
gap "in-flight" has no sampler of one version and is not measured.

Each correction's gradient of a batch is what its own update subtracts with plain descent at rate 1. The
gradient without a gap is the mean over the batches of the exact engine. Squares of means are products of the
means of two halves of the batches, so that the noise of one half adds nothing to them.

Examples:

    python -m experiments.referee_gradients int8/short
    python -m experiments.referee_gradients noise/long stale/long --seeds=0,1
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from configs import fig_referee
from jaxrl_tis.build import Setup
from jaxrl_tis.data.rewards import RewardWorker, worker
from experiments import figures, referee_runs
from jaxrl_tis.learner.state import initial_state, policy
from jaxrl_tis.learner.step import TrainState
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models.transformer import Params
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.source import next_batch
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.runtime import cli

LAG = 4
CHECKPOINTS = (LAG, 80)
BATCHES = 16
SEEDS = tuple(range(4))
PARTS = tuple(part for part in fig_referee.PARTS if not part.startswith("in-flight"))
SAMPLER = "sampler"
RECORDS_ALL = "centering"  # the arm whose engine records what every arm needs
SYNC = {"rollout.schedule": "sync", "rollout.update_turns": 0, "rollout.old_logp_source": "ring"}


def path_of(folder: str | os.PathLike, part: str) -> pathlib.Path:
    """Returns the file of a part's gradients."""
    return referee_runs.path_of(folder, part).with_suffix(".gradients.jsonl")


def policies(
    setup: Setup, trainer: Trainer, params: Params, rewards: RewardWorker
) -> dict[int, Params]:
    """Trains without a gap; returns the policy after each of the steps that CHECKPOINTS need."""
    kept = {}
    wanted = {step - lag for step in CHECKPOINTS for lag in (0, LAG)}
    with referee_runs.sampling(setup, trainer, rewards) as (source, snapshots, _):
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
    with referee_runs.sampling(setup, Trainer(setup.training), rewards) as (source, *_):
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


def of_seed(
    setups: Mapping[str, Setup], learner: Trainer, descents: Mapping[str, Trainer], part: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns the lines of one seed: of each checkpoint and arm.

    Args:
      setups: of the arms and of SAMPLER.
      learner: trains without a gap; descents: of each arm, see `descending`.
    """
    own = {name: referee_runs.with_seed(setup, seed) for name, setup in setups.items()}
    exact, sampler, lines = own[fig_referee.EXACT], own.pop(SAMPLER), []
    lag = LAG if part.startswith("stale") else 0
    learner = referee_runs.of_seed(learner, exact)
    trainers = {
        name: referee_runs.of_seed(trainer, descending(own[name]))
        for name, trainer in descents.items()
    }
    with worker(exact.config.reward) as rewards:
        kept = policies(exact, learner, figures.taught(exact), rewards)
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


def measure_part(part: str, seeds: Sequence[int], folder: str = referee_runs.FOLDER) -> None:
    """Measures the seeds of a part that its file does not have yet."""
    path = path_of(folder, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {json.loads(line)["seed"] for line in lines}
    programs, arms = referee_runs.Programs(), fig_referee.arms_of(*part.split("/"))
    once = {"train.minibatches": 1}  # the update of a whole batch
    setups = {name: programs.build(arm | once) for name, arm in arms.items()}
    learner = Trainer(setups[fig_referee.EXACT].training)
    descents = {name: Trainer(descending(setup).training) for name, setup in setups.items()}
    # The lag of "stale" is in the sampler's weights.
    setups[SAMPLER] = programs.build(arms[RECORDS_ALL] | once | SYNC)
    for seed in seeds:
        if seed not in done:
            found = of_seed(setups, learner, descents, part, seed)
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in found)
            print(f"{part}, seed {seed}: {len(found)} gradients", flush=True)


def main() -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "experiments.referee_gradients", "Measures the gradients of the referee.", __doc__
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, help="GAP/LENGTH")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="default: %(default)s")
    parser.add_argument("--folder", default=referee_runs.FOLDER, help="default: %(default)s")
    args = parser.parse_args()
    for part in args.parts:
        measure_part(part, [int(s) for s in args.seeds.split(",")], args.folder)


if __name__ == "__main__":
    cli.run(main)
