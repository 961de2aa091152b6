"""Kills a rollout worker and reports what happened to its sequences, for launch/async_local.sh.

    async_local.py kill WORKDIR PID   # kills a worker of learner PID after KILL_STEP steps
    async_local.py report WORKDIR     # reports on the sequences; 1 if a batch was incomplete
"""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

KILL_STEP = 5
INTO_STEP = 0.25  # seconds into the next one: its weights have arrived, and workers sample
TITLE = "ray::RolloutWorker"  # first letters of the command line that Ray gives a worker's process


def lines(path: pathlib.Path) -> list[dict]:
    """Returns the complete lines of a record that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def trained(workdir: pathlib.Path) -> list[dict]:
    return [r for r in lines(workdir / "metrics.jsonl") if r["phase"] == "train"]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def workers(learner: int) -> list[int]:
    """Returns the rollout workers among the descendants of a process, by their ids."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    children, titles = collections.defaultdict(list), {}
    for own, parent, title in (line.split(maxsplit=2) for line in listed.splitlines()):
        children[int(parent)].append(int(own))
        titles[int(own)] = title
    found = [learner]
    for pid in found:  # which grows
        found += children[pid]
    return sorted(pid for pid in found if titles.get(pid, "").startswith(TITLE))


def kill(workdir: pathlib.Path, learner: int) -> int:
    while len(trained(workdir)) < KILL_STEP:
        if not is_running(learner):
            print(f"the learner ended before step {KILL_STEP}", file=sys.stderr)
            return 1
        time.sleep(0.01)
    time.sleep(INTO_STEP)
    found = workers(learner)
    if not found:
        print(f"process {learner} has no {TITLE} among its descendants", file=sys.stderr)
        return 1
    os.kill(found[0], signal.SIGKILL)
    print(
        f"one of {len(found)} workers, process {found[0]}, was killed after step "
        f"{len(trained(workdir))}", flush=True,
    )
    return 0


def report(workdir: pathlib.Path) -> int:
    steps = trained(workdir)
    config = json.loads((workdir / "config.json").read_text())["config"]
    answers = [r for r in lines(workdir / "samples.jsonl") if r["phase"] == "train"]
    groups = collections.Counter(r["step"] for r in answers)
    prompts = len({r["id"] for r in answers})
    total = lambda name: int(sum(r[name] for r in steps))
    print(
        f"steps: {len(steps)} of {config['steps']}; workers lost: {total('async/left')}, evicted: "
        f"{total('async/workers_evicted')}, at the last step: {steps[-1]['async/workers']:g} of "
        f"{config['rollout']['workers']}; sequences continued from reported tokens: "
        f"{total('async/resumed')}, with {total('async/resumed_tokens')} tokens"
    )
    whole = config["rollout"]["prompts"]
    is_whole = len(steps) == config["steps"] and set(groups.values()) == {whole}
    is_whole &= prompts == whole * config["steps"]
    print(
        f"every batch had its {whole} groups, of {prompts} different prompts" if is_whole
        else f"a batch was incomplete: groups by step {dict(groups)}, {prompts} different prompts"
    )
    return 0 if is_whole else 1


def main() -> int:
    command, workdir, *rest = sys.argv[1:]
    if command == "kill":
        [learner] = rest
        return kill(pathlib.Path(workdir), int(learner))
    return report(pathlib.Path(workdir))


if __name__ == "__main__":
    sys.exit(main())
