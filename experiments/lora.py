"""Compares LoRA with full training: accuracy, bytes of a weight sync, memory and time.

Reads docs/experiments/lora.jsonl, the runs of `configs/fig_lora.py`. Three sizes are counted from the shapes
of each arm's config: a weight sync after the first one; the trained parameters with Adam's moments; the
constant base beside them. The memory is the peak of the whole process, with compilation and the warm-up, which
trains all weights. The ratio of step times is the geometric mean over seeds.

Examples:

    python -m experiments.lora
    python -m experiments.lora docs/experiments
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from matplotlib.figure import Figure

from configs import fig_lora
from jaxrl_tis.build import build
from experiments import figures, records
from experiments.records import Run
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.report.plots import palette

FULL = "full"  # the arm that trains all weights
SECONDS = "seconds of a step"
# Column -> metric, share of the run whose mean is taken, format
COSTS = {
    "k3": ("rollout_corr/k3_kl", 1.0, ".1e"),
    "peak memory of the process, GiB": ("time/host_peak_gib", 0.1, ".3f"),
    SECONDS: ("time/step_s", 0.9, ".2f"),  # the first steps also compile
}
SIZES = ("bytes of a sync", "trained parameters and moments, bytes", "constant base, bytes")


def start(run: Run) -> float:
    """Returns the greedy accuracy before the first step."""
    return float(run.series["eval/greedy_accuracy"][0])


def end(run: Run) -> float:
    """Returns the greedy accuracy at the end."""
    return figures.at_end(run, "greedy")


def log_seconds(run: Run) -> float:
    """Returns log10 of the mean seconds of a step."""
    name, share, _ = COSTS[SECONDS]
    return float(np.log10(records.at_end(run, name, share)))


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


def configs_of(module: Any) -> dict[str, ml_collections.ConfigDict]:
    """Returns {arm: its config} of a config file with arms, the first one full training."""
    configs = {}
    for arm, fields in ({FULL: {}} | module.sweep()).items():
        configs[arm] = module.get_config()
        configs[arm].update_from_flattened_dict(fields)
        configs[arm].lock()
    return configs


def table(
    runs: Sequence[Run], sizes_by_arm: Mapping[str, Sequence[int]], is_timed: bool = True
) -> str:
    """Returns Markdown tables of the arms: accuracies, measured costs, sizes.

    Args:
      is_timed: whether the seconds of a step of all arms can be compared.
    """
    by_arm = records.by_arm(runs)
    by_arm = {arm: by_arm[arm] for arm in sizes_by_arm if arm in by_arm}  # in the order of the config
    columns = COSTS if is_timed else {n: x for n, x in COSTS.items() if n != SECONDS}
    accuracies, costs = [], []
    for arm, own in by_arm.items():
        mean = lambda measure, form=".3f", own=own: figures.mean([measure(r) for r in own], form)
        base = None if arm == FULL else by_arm[FULL]
        beside = lambda measure, own=own, base=base: base and figures.beside(own, base, measure)
        accuracies.append([
            arm, str(len(own)), mean(start), mean(end), figures.interval(beside(end)),
            mean(figures.gain, "+.3f"), figures.interval(beside(figures.gain)),
        ])
        costs.append([arm, *(
            mean(figures.of(name, share), form) if all(name in r.series for r in own) else "–"
            for name, share, form in columns.values()
        )])
        if is_timed:
            ratio = beside(log_seconds)
            costs[-1].append(figures.interval(ratio and tuple(10.0**x for x in ratio), ".2f"))
    header = [
        "arm", "seeds", "greedy accuracy at the start", "at the end", "minus full",
        "gain in sampled accuracy", "minus full",
    ]
    cost_header = ["arm", *columns] + ["over full"] * is_timed
    counted = [[arm, *(f"{size:,}" for size in sizes_by_arm[arm])] for arm in by_arm]
    return "\n\n".join([
        figures.rows(header, accuracies), figures.rows(cost_header, costs),
        figures.rows(["arm", *SIZES], counted),
    ])


def draw(page: Figure, runs: Sequence[Run]) -> None:
    """Draws greedy and sampled held-out accuracy of each arm by step."""
    by_arm = records.by_arm(runs)
    for axes, kind in zip(page.subplots(1, 2, sharey=True), ("greedy", "sampled"), strict=True):
        for (arm, own), color in zip(by_arm.items(), palette(len(by_arm)), strict=True):
            figures.curve(axes, own, f"eval/{kind}_accuracy", arm, color)
        axes.set(title=f"Held-out accuracy, {kind}", xlabel="step")
        axes.legend()


def run(name: str, module: Any, recorded: Sequence[Run] = ()) -> None:
    """Runs the command of a figure of these arms.

    Args:
      module: the config file with the arms.
      recorded: further runs, of another machine or time.
    """

    def text(runs: Sequence[Run]) -> str:
        sizes_by_arm = {arm: sizes(config) for arm, config in configs_of(module).items()}
        return table([*recorded, *runs], sizes_by_arm, is_timed=not recorded)

    picture = lambda page, runs: draw(page, [*recorded, *runs])
    needed = () if recorded else (FULL,)
    figures.run(name, text, {name: (picture, (10, 4))}, needed)


if __name__ == "__main__":
    run("lora", fig_lora)
