"""Counts of sampled tokens by their two probabilities: WORKDIR/probabilities.jsonl, one step per line.

A line is {"step", "tokens", "high", "cells"}: the number of tokens, the number of those whose probabilities
differ by more than HIGH, and [i, j, tokens] of each cell of a BINS x BINS plane that has tokens. The
probability is in i/BINS..(i+1)/BINS in the sampler, in j/BINS..(j+1)/BINS in the learner.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_tis.record.metrics import LineFile, open_objects, read_objects

FILE_NAME = "probabilities.jsonl"
BINS = 50
HIGH = 0.5


def counted(step: int, logp_behav_n: np.ndarray, logp_old_n: np.ndarray) -> dict[str, Any]:
    """Returns the line of a step, from the log-probs [n] in nats of sampler and learner."""
    # Rounding may lift a log-prob above 0.
    behav_n, old_n = (np.exp(np.minimum(x, 0.0)) for x in (logp_behav_n, logp_old_n))
    plane, _, _ = np.histogram2d(behav_n, old_n, bins=BINS, range=((0, 1), (0, 1)))
    cells = [[int(i), int(j), int(plane[i, j])] for i, j in np.argwhere(plane)]
    high = int(np.sum(np.abs(behav_n - old_n) > HIGH))
    return {"step": step, "tokens": len(behav_n), "high": high, "cells": cells}


def plane(lines: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Returns the sum of the lines' planes [BINS, BINS], sampler first."""
    total = np.zeros((BINS, BINS))
    for line in lines:
        for i, j, count in line["cells"]:
            total[i, j] += count
    return total


def open_file(workdir: str | os.PathLike, resume_step: int | None) -> LineFile:
    """Opens the file, see `metrics.open_objects`."""
    return open_objects(workdir, FILE_NAME, resume_step)


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the lines of a run, see `metrics.read_objects`."""
    return read_objects(workdir, FILE_NAME)
