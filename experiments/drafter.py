"""Trains the drafter of configs/fig_drafter.py, half a minute; has its figure.

Examples:

    python -m experiments.drafter
    python -m experiments.drafter runs/figures/drafter-model
"""

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from configs import fig_drafter
from experiments import parts
from experiments.parts import ARM, SEEDS, Figure, Picture, curves, gain, mean_of, of
from jaxrl_tis.runtime import cli

CONFIG = "configs/fig_drafter.py"
ACCEPTANCE, SPEED = "rollout/draft_acceptance", "time/rollout_tokens_per_s"
DRAFTED = {name: name for name in ("frozen", "distilled", "measured")}

FIGURE = Figure(
    tables=(
        parts.of_arms(
            ARM, SEEDS, ("acceptance, first 8 steps", mean_of(lambda run: float(run.series[ACCEPTANCE][0]))),
            ("last steps", mean_of(of(ACCEPTANCE))), ("KL(policy ‖ drafter), last", mean_of(of("drafter/kl"))),
            ("tokens per second, second half", mean_of(of(SPEED, 0.5), ".0f")),
            ("gain in sampled accuracy", mean_of(gain, "+.3f")),
        ),
        parts.compared([
            ("acceptance, last steps", of(ACCEPTANCE), "distilled", "frozen"),
            *(("tokens per second", of(SPEED, 0.5), arm, "none") for arm in DRAFTED),
        ]),
    ),
    pictures={"drafter": Picture((10, 4), [
        curves(ACCEPTANCE, DRAFTED, title="Drafted tokens", ylabel="share accepted", ylim=(0, 1)),
        curves(
            SPEED, DRAFTED | {"none": "none"}, has_legend=True, title="Sampling", ylabel="tokens per second",
            ylim=(0, 3000),
        ),
    ])},
    seeds="0,1",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("experiments.drafter", "Trains the drafter of configs/fig_drafter.py.", __doc__)
    parser.add_argument(
        "folder", nargs="?", default=fig_drafter.FOLDER, help="where to write it; default: %(default)s"
    )
    folder = pathlib.Path(parser.parse_args(argv).folder)
    if folder.exists():
        return
    run = folder.with_name(f"{folder.name}-run")
    values = fig_drafter.SMALL | {
        "steps": 1, "optimizer.lr": 0.0, "checkpoint.every": 1, "warmup.steps": 600, "warmup.lr": 1e-3,
        "seed": 100,
    }
    subprocess.run(
        [sys.executable, "-m", "jaxrl_tis.main", f"--config={CONFIG}", f"--workdir={run}",
         *(f"--config.{name}={value}" for name, value in values.items())],
        check=True,
    )
    subprocess.run(
        [sys.executable, "-m", "jaxrl_tis.export", str(run), str(folder), "--dtype=float32"], check=True
    )


if __name__ == "__main__":
    cli.run(main)
