"""Compares LoRA with full training on SmolLM2-135M: accuracy, bytes of a weight sync and memory.

Reads docs/experiments/lora_smollm2.jsonl, the runs of `configs/fig_lora_smollm2.py`, and the recorded runs of
full training in docs/smollm2. These have no record of memory, and their steps were timed on another day. The
shapes of the model are read from its file, see launch/smollm2.sh. experiments/lora.py explains the columns.

Examples:

    python -m experiments.lora_smollm2
    python -m experiments.lora_smollm2 docs/experiments
"""

import pathlib

import numpy as np

from configs import fig_lora_smollm2
from experiments import lora, records
from experiments.records import Run
from jaxrl_tis.record import metrics

RECORDED = pathlib.Path("docs/smollm2")


def recorded_runs(folder: pathlib.Path = RECORDED) -> list[Run]:
    """Returns the runs of full training in the folders seedN."""
    runs = []
    for workdir in sorted(folder.glob("seed*")):
        series = records.series_of(metrics.read(workdir))
        measured = {n: np.array(x, float) for n, x in series.items() if not np.isnan(x).all()}
        runs.append(Run(lora.FULL, int(workdir.name.removeprefix("seed")), [], [], measured))
    return runs


if __name__ == "__main__":
    lora.run("lora_smollm2", fig_lora_smollm2, recorded_runs())
