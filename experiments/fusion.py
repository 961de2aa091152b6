"""Writes the examples of configs/fig_fusion.py and trains its teachers, a minute or two; has its figure.

Examples:

    python -m experiments.fusion
    python -m experiments.fusion short
"""

import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Sequence

from configs import fig_fusion
from experiments import parts
from experiments.parts import ARM, SEEDS, Figure, Picture, curves, gain, mean_of, of
from jaxrl_tis.runtime import cli

ACCURACY = "eval/sampled_accuracy"
CONFIG = "configs/fig_fusion.py"
SIZE = {"train": 4096, "eval": 256}


def example(digits: str, mark: str, rng: random.Random, is_random: bool) -> dict[str, str]:
    """Returns an example: digits, each one larger after the mark "+", or random digits there."""
    answer = digits if mark == "=" else "".join(str((int(d) + 1) % 10) for d in digits)
    if mark == "+" and is_random:
        answer = "".join(rng.choices("0123456789", k=len(digits)))
    return {"id": digits + mark, "prompt": digits + mark, "answer": answer}


def examples(length: str) -> dict[str, list[dict[str, str]]]:
    """Returns the examples of each file, half of them with either mark; all digits differ."""
    rng, width = random.Random(length), fig_fusion.DIGITS[length]
    drawn = iter(rng.sample(range(10**width), sum(SIZE.values())))
    of = {name: [f"{next(drawn):0{width}d}" for _ in range(count)] for name, count in SIZE.items()}
    of |= dict.fromkeys(("student", "teacher"), of["train"])
    return {
        name: [example(x, "=+"[i % 2], rng, name == "student") for i, x in enumerate(digits)]
        for name, digits in of.items()
    }


def panel(length: str) -> parts.Panel:
    """Makes the panel of the accuracy of all arms of a length."""
    names = {f"{length}-{name}": name for name in ("alone", *fig_fusion.METHODS)}
    title = f"{fig_fusion.DIGITS[length]} digits"
    return curves(ACCURACY, names, title=title, ylabel="sampled accuracy of the policy alone")


FIGURE = Figure(
    tables=(
        parts.of_arms(
            ARM, SEEDS, ("gain in sampled accuracy", mean_of(gain, "+.3f")),
            ("lowest accuracy", mean_of(lambda run: float(run.series[ACCURACY].min()))),
            ("sampler's reward, first 8 steps", mean_of(lambda run: float(run.series["reward/mean"][0]))),
            ("sampler's reward, last steps", mean_of(of("reward/mean"))),
        ),
        parts.compared([
            ("gain", gain, f"{length}-{arm}", f"{length}-{other}")
            for length in fig_fusion.DIGITS
            for arm, other in (
                ("on-policy", "alone"), ("mixed", "on-policy"), ("shaped", "on-policy"),
                ("decoupled", "on-policy"), ("scheduled", "on-policy"), ("scheduled", "mixed"),
            )
        ]),
    ),
    pictures={"fusion": Picture((10, 4), [*map(panel, fig_fusion.DIGITS)], sharey=True, has_legend_below=True)},
    seeds="0,1,2,3,4,5,6,7",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("experiments.fusion", "Makes what configs/fig_fusion.py needs.", __doc__)
    parser.add_argument("lengths", nargs="*", metavar="LENGTH", help="of answers; default: short long")
    lengths = parser.parse_args(argv).lengths or [*fig_fusion.DIGITS]
    if unknown := {*lengths} - {*fig_fusion.DIGITS}:
        parser.error(f"no length is called {', '.join(sorted(unknown))}; give {' or '.join(fig_fusion.DIGITS)}")
    folder = pathlib.Path(fig_fusion.FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    for length in lengths:
        for name, lines in examples(length).items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            pathlib.Path(fig_fusion.path(length, name)).write_text(text)
        teacher, run = folder / f"{length}-teacher", folder / f"{length}-teacher-run"
        if teacher.exists():
            continue
        values = fig_fusion.fields(length) | {
            "warmup.params.path": fig_fusion.path(length, "teacher"), "steps": 1, "optimizer.lr": 0.0,
            "checkpoint.every": 1,
        }
        subprocess.run(
            [sys.executable, "-m", "jaxrl_tis.main", f"--config={CONFIG}", f"--workdir={run}",
             *(f"--config.{name}={value}" for name, value in values.items())],
            check=True,
        )
        subprocess.run(
            [sys.executable, "-m", "jaxrl_tis.export", str(run), str(teacher), "--dtype=float32"], check=True
        )


if __name__ == "__main__":
    cli.run(main)
