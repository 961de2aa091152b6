"""Kills a worker and reports what happened to its sequences, for launch/async_local.sh.

    async_local.py kill FOLDER NAME PID   # kills worker NAME after KILL_STEP steps of learner PID
    async_local.py report FOLDER          # reports on the sequences; 1 if a batch was incomplete
"""

import collections
import json
import os
import pathlib
import signal
import sys
import time

KILL_STEP = 5
INTO_STEP = 0.25  # seconds into the next one, when its weights are there and samplers draw with them


def lines(path: pathlib.Path) -> list[dict]:
    """Returns the complete lines of a record that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def trained(folder: pathlib.Path) -> list[dict]:
    return [r for r in lines(folder / "run" / "metrics.jsonl") if r["phase"] == "train"]


def kill(folder: pathlib.Path, name: str, learner: int) -> None:
    while len(trained(folder)) < KILL_STEP:
        os.kill(learner, 0)  # ProcessLookupError where it is gone
        time.sleep(0.01)
    time.sleep(INTO_STEP)
    pid = json.loads((folder / f"{name}.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    print(f"worker {name}, process {pid}, was killed after step {len(trained(folder))}", flush=True)


def report(folder: pathlib.Path) -> int:
    steps = trained(folder)
    config = json.loads((folder / "run" / "config.json").read_text())["config"]
    answers = [r for r in lines(folder / "run" / "samples.jsonl") if r["phase"] == "train"]
    groups = collections.Counter(r["step"] for r in answers)
    prompts = len({r["id"] for r in answers})
    total = lambda name: int(sum(r[name] for r in steps))
    print(
        f"{len(steps)} of {config['steps']} steps; workers left {total('async/left')} times; "
        f"{total('async/resumed')} sequences were gone on with elsewhere, from "
        f"{total('async/resumed_tokens')} tokens; {total('async/workers_evicted')} workers were "
        "evicted"
    )
    whole = config["rollout"]["prompts"]
    is_whole = len(steps) == config["steps"] and set(groups.values()) == {whole}
    is_whole &= prompts == whole * config["steps"]
    print(
        f"every batch had its {whole} groups, of {prompts} different prompts" if is_whole
        else f"a batch was not whole: groups by step {dict(groups)}, {prompts} different prompts"
    )
    return 0 if is_whole else 1


def main() -> int:
    command, folder, *rest = sys.argv[1:]
    if command == "kill":
        name, learner = rest
        kill(pathlib.Path(folder), name, int(learner))
        return 0
    return report(pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
