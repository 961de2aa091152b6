"""Converts queue entries and trajectories to JSON and back, for checkpoints."""

import base64
import dataclasses
import json
import math
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry
from jaxrl_tis.rollouts.record_check import EMPTY, malformed

REWARDED = ("text", "score", "reward", "components", "is_failed")  # of a Sample, without its trajectory


def trajectory_text(trajectory: Trajectory) -> str:
    """Returns a trajectory as JSON, with its arrays as safetensors in base64, and its forks as the
    texts of trajectories."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    # safetensors writes the memory of an array as it lies there, whatever its strides.
    arrays = {n: np.asarray(x, order="C") for n, x in fields.items() if isinstance(x, np.ndarray)}
    scalars = {name: x for name, x in fields.items() if name not in arrays}
    scalars["forks"] = [trajectory_text(fork) for fork in trajectory.forks]
    packed = base64.b64encode(safetensors.numpy.save(arrays)).decode()
    return json.dumps({"scalars": scalars, "arrays": packed})


def read_trajectory(text: str) -> Trajectory:
    """Returns the trajectory that `trajectory_text` wrote.

    Raises:
      ValueError: the text is damaged, or another version of jaxrl_tis wrote it.
    """
    which = f"whose text begins with {str(text)[:40]!r}"
    try:
        saved = json.loads(text)
        which = saved["scalars"]["id"]
        packed = base64.b64decode(saved["arrays"], validate=True)
        fields = saved["scalars"] | safetensors.numpy.load(packed)
        if missing := [name for name in vars(EMPTY) if name not in fields]:
            raise ValueError(f"it has no {', '.join(missing)}")
        fields["joins"] = tuple(fields["joins"])
        fields["forks"] = tuple(map(read_trajectory, fields["forks"]))
        why = malformed(trajectory := Trajectory(**fields))
    except (ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ValueError(
            f"cannot read trajectory {which}: {why}. The checkpoint is damaged, or another version "
            "of jaxrl_tis wrote it: use that version, or a new workdir"
        )
    return trajectory


def written(entry: Entry) -> dict[str, Any]:
    """Returns an entry of the queue as JSON."""
    rows = []
    for sample, row in sorted(entry.columns.items()):
        rewarded = None
        if "reward" in row:
            rewarded = {name: getattr(row["reward"], name) for name in REWARDED}
        rows.append([sample, trajectory_text(row["tokens"]), rewarded])
    deadline = None if entry.deadline == math.inf else entry.deadline
    return {"number": entry.number, "deadline": deadline, "prompt": entry.prompt, "rows": rows}


def read(saved: dict[str, Any]) -> Entry:
    deadline = math.inf if saved["deadline"] is None else saved["deadline"]
    entry = Entry(saved["number"], deadline, saved["prompt"])
    for sample, text, rewarded in saved["rows"]:
        trajectory = read_trajectory(text)
        entry.columns[sample] = {"tokens": trajectory}
        entry.claimed |= {("reward", sample)} if rewarded else set()
        if rewarded:
            entry.columns[sample]["reward"] = Sample(trajectory, entry.prompt, group=0, **rewarded)
    return entry
