"""Converts queue entries and trajectories to JSON and back, for checkpoints."""

import base64
import math
from typing import Any

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.rollouts import wire
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry

REWARDED = ("text", "score", "reward", "components")  # of a Sample, without its trajectory


def trajectory_text(trajectory: Trajectory) -> str:
    return base64.b64encode(wire.trajectory_message(trajectory)).decode()


def read_trajectory(text: str) -> Trajectory:
    return wire.read_trajectory(base64.b64decode(text))


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
