"""Compares LoRA with full training: accuracy, bytes of a weight sync, memory and time.

Three sizes are counted from the shapes of each arm's config: a weight sync after the first one; the trained
parameters with Adam's moments; the constant base beside them. The memory is the peak of the whole process, with
compilation and the warm-up, which trains all weights. The ratio of step times is the geometric mean over seeds.

SmolLM2-135M: the recorded runs of full training in docs/smollm2 have no record of memory, and their steps were
timed on another day. The shapes of the model are read from its file, see launch/smollm2.sh.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments import parts, records
from experiments.parts import ARM, SEEDS, Figure, Picture, curves, gain, mean_of, of, to_base
from experiments.records import Run
from jaxrl_tis.build import build
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.record import metrics

FULL = "full"  # the arm that trains all weights
RECORDED = pathlib.Path("docs/smollm2")
SIZES = ("bytes of a sync", "trained parameters and moments, bytes", "constant base, bytes")
seconds = of("time/step_s", 0.9)  # the first steps also compile


def start(run: Run) -> float:
    """Returns the greedy accuracy before the first step."""
    return float(run.series["eval/greedy_accuracy"][0])


def end(run: Run) -> float:
    """Returns the greedy accuracy at the end."""
    return parts.at_end(run, "greedy")


def sizes(config: ml_collections.ConfigDict) -> tuple[int, int, int]:
    """Returns the SIZES of a config, in bytes."""
    setup = build(config)
    state = abstract_state(setup.training)
    synced = setup.engine.abstract_params()
    if setup.adapter is not None:
        synced = setup.engine.abstract_factors(setup.adapter)
    return num_bytes(synced), num_bytes(state["policy"]), num_bytes(state.get("base", ()))


def num_bytes(tree: Any) -> int:
    """Returns the bytes of (abstract) arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def config_of(module: Any, arm: str) -> ml_collections.ConfigDict:
    """Returns the config of an arm of a config file; full training is the config without changes."""
    config = module.get_config()
    config.update_from_flattened_dict(module.sweep().get(arm, {}))
    return config.lock()


def recorded_runs(folder: pathlib.Path = RECORDED) -> list[Run]:
    """Returns the runs of full training in the folders seedN."""
    runs = []
    for workdir in sorted(folder.glob("seed*")):
        series = records.series_of(metrics.read(workdir))
        measured = {name: np.array(values, float) for name, values in series.items()}
        runs.append(Run(FULL, int(workdir.name.removeprefix("seed")), [], [], measured))
    return runs


def figure(name: str, module: Any, recorded: Callable[[], Sequence[Run]] | None = None) -> Figure:
    """Returns the figure of these arms.

    Args:
      module: the config file with the arms.
      recorded: returns runs of another machine or time, whose seconds are not compared.
    """
    arms = {FULL: FULL} | {arm: arm for arm in module.sweep()}
    costs = [
        ARM, ("k3", mean_of(of("rollout_corr/k3_kl", 1.0), ".1e")),
        ("peak memory of the process, GiB", mean_of(of("time/host_peak_gib"))),
    ]
    if recorded is None:
        costs += [
            ("seconds of a step", mean_of(seconds, ".2f")),
            ("over full", to_base(FULL, seconds, ".2f", parts.ratio)),
        ]
    counted = lambda found: [
        [arm, *(f"{size:,}" for size in sizes(config_of(module, arm)))] for arm in found
    ]
    panel = lambda kind: curves(
        f"eval/{kind}_accuracy", arms, title=f"Held-out accuracy, {kind}", has_legend=True
    )
    return Figure(
        tables=(
            parts.of_arms(
                ARM, SEEDS, ("greedy accuracy at the start", mean_of(start)), ("at the end", mean_of(end)),
                ("minus full", to_base(FULL, end)), ("gain in sampled accuracy", mean_of(gain, "+.3f")),
                ("minus full", to_base(FULL)),
            ),
            parts.of_arms(*costs),
            lambda found: parts.rows(["arm", *SIZES], counted(found)),
        ),
        pictures={name: Picture((10, 4), [panel("greedy"), panel("sampled")], sharey=True)},
        seeds="0,1" if recorded else "0,1,2,3,4", needed=(FULL,), order=list(arms).index,
        recorded=recorded or tuple,
    )
