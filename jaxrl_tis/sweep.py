"""Runs what the `sweep()` of a config lists, each with every seed.

`sweep()` stands beside `get_config()` and returns a list of arms, each {dotted field: value}, made by
hand or with `grid`, `zipped` and `product`, or a dict of them by names of their own. Every arm is
checked before the first one runs. The same command continues a sweep: what is finished is not run
again, and what was interrupted goes on. At the end there are table.md and report.html in the folder of
the sweep; arms that failed are named, and the command then ends with 1. Without --seeds each arm runs
once, with the seed that it, the command line or the config sets.

Examples:

    python -m jaxrl_tis.sweep --config=configs/sweeps/correction.py --seeds=0,1,2
    python -m jaxrl_tis.sweep --config=configs/sweeps/correction.py --jobs=2     # two at a time, each on half the cores
    python -m jaxrl_tis.sweep --config=configs/sweeps/correction.py --dry_run    # the commands, one a line
    python -m jaxrl_tis.sweep --config=configs/sweeps/correction.py --launch=tpu_vm  # commands that launch them
"""

import collections
import contextlib
import itertools
import os
import pathlib
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from importlib import util
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags

from jaxrl_tis import cli_flags
from jaxrl_tis.record import changes, intervals, metrics
from jaxrl_tis.record.checkpoint import newest_step
from jaxrl_tis.record.provenance import date, saved
from jaxrl_tis.report import page
from jaxrl_tis.runtime import cli, hub, storage
from jaxrl_tis.validate import validate

Arm = dict[str, Any]
Arms = Sequence[Arm] | Mapping[str, Arm]

# Column of the table -> the metric, and the phase that it is of.
COLUMNS = {
    "greedy accuracy": ("eval", "eval/greedy_accuracy"),
    "sampled accuracy": ("eval", "eval/sampled_accuracy"),
    "held-out reward": ("eval", "eval/sampled_reward"),
    "reward": ("train", "reward/mean"),
    "max abs dp": ("train", "training/rollout_probs_diff_max"),
}
LONGEST_NAME = 200  # bytes; a file system has 255, with the seed and .log
LAST_SHARE = 0.1  # of the steps, over which metrics of training are averaged


def grid(values: Mapping[str, Sequence]) -> list[Arm]:
    """Returns every combination of the fields' values, the last field changing fastest."""
    rows = itertools.product(*values.values())
    return [dict(zip(values, chosen, strict=True)) for chosen in rows]


def zipped(values: Mapping[str, Sequence]) -> list[Arm]:
    """Returns the first values of all fields, the second values, and so on.

    Raises:
      ValueError: the fields have different numbers of values.
    """
    counts = {name: len(column) for name, column in values.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"zipped fields have different numbers of values: {counts}; give all of them equally "
            "many"
        )
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def product(*sweeps: Sequence[Arm]) -> list[Arm]:
    """Returns every combination of an arm of each sweep.

    Raises:
      ValueError: two of the sweeps set one field.
    """
    fields = [name for sweep in sweeps for name in dict.fromkeys(f for arm in sweep for f in arm)]
    if twice := sorted({name for name in fields if fields.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is set by two parts of a product; set it in one part")
    return [
        {name: value for arm in chosen for name, value in arm.items()}
        for chosen in itertools.product(*sweeps)
    ]


@dataclass(frozen=True)
class Job:
    """An arm with a seed.

    Attributes:
      arm: its name.
      arguments: of jaxrl_tis.main, but --workdir.
      steps: of the config.
    """

    arm: str
    seed: int
    workdir: str
    arguments: tuple[str, ...]
    steps: int

    @property
    def log(self) -> pathlib.Path:
        """On this machine, beside the workdir or, if that is on a bucket, under runs/."""
        return pathlib.Path(f"{self.workdir.replace('gs://', 'runs/')}.log")

    @property
    def command(self) -> list[str]:
        return ["python", "-m", "jaxrl_tis.main", *self.arguments, f"--workdir={self.workdir}"]

    def is_finished(self) -> bool:
        """Whether the run has evaluated and saved its last step. Checkpoints may be deleted since."""
        try:
            records = metrics.read(self.workdir)
        except FileNotFoundError:
            return False
        newest = newest_step(self.workdir)
        return metrics.has_ended(records, self.steps) and (newest is None or newest >= self.steps)


def names_of(arms: Arms) -> list[str]:
    """Returns the names of arms, which are names of folders, too: their own, or what they set, as in
    "preset=tis_2,epochs=4". A field goes by its last word where no other field of the sweep has that."""
    words = list(arms) if isinstance(arms, Mapping) else _settings(arms)
    return [re.sub(r"[^\w.=,+-]+", "_", word).strip("_") or "base" for word in words]


def _listed(arms: Arms) -> Sequence[Arm]:
    return list(arms.values()) if isinstance(arms, Mapping) else arms


def _settings(arms: Sequence[Arm]) -> list[str]:
    fields = dict.fromkeys(field for arm in arms for field in arm)
    last = collections.Counter(field.rpartition(".")[2] for field in fields)
    short = lambda field: field.rpartition(".")[2] if last[field.rpartition(".")[2]] == 1 else field
    return [",".join(f"{short(field)}={value}" for field, value in arm.items()) for arm in arms]


def jobs_of(
    config: str, overrides: Sequence[str], arms: Arms, seeds: Sequence[int], out: str,
    change: Sequence[str] = (),
) -> list[Job]:
    """Checks all arms and returns their jobs.

    Args:
      overrides: fields that the command line sets for every arm, as --config.field=value.
      change: fields that runs which go on may change, as --change of jaxrl_tis.main has them.
      seeds: of every arm; none: each arm has the seed of its own configuration.

    Raises:
      ValueError: an arm has a field that does not exist, or is refused; it sets one that the command
        line sets; two are the same; a folder holds a run of another configuration. All such problems
        are in the message.
    """
    names = names_of(arms)
    problems = [f"two arms are called {name}" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems += [
        f"the name of an arm has {len(name)} characters, {name[:40]}...; return a dict of shorter names"
        for name in names if len(name.encode()) > LONGEST_NAME
    ]
    named = set(cli_flags.overrides(overrides))
    if seeds and "seed" in named:
        problems.append("--seeds and --config.seed both set the seed: give one of them")
    named |= {"seed"} if seeds else set()
    jobs = []
    for name, arm in zip(names, _listed(arms), strict=True):
        if twice := sorted(named & arm.keys()):
            problems.append(f"{name}: the arm sets {', '.join(twice)}, and so does the command line")
            continue
        fields = [f"--config.{field}={value}" for field, value in arm.items()]
        arguments = [f"--config={config}", *overrides, *fields]
        try:
            found = cli_flags.parsed(arguments)
            validate(found)
        except (flags.Error, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        for seed in seeds or [found.seed]:
            workdir = f"{out}/{name}-seed{seed}"
            others = [word for word in arguments if not word.startswith("--config.seed=")]
            own = (*others, f"--config.seed={seed}", *[f"--change={','.join(change)}"] * bool(change))
            jobs.append(Job(name, seed, workdir, own, found.steps))
            try:
                found.seed = seed
                _check_same(workdir, found.to_dict(), change)
            except ValueError as error:
                problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("nothing was run, as the sweep has mistakes:\n" + "\n".join(problems))
    return jobs


def _check_same(workdir: str, values: dict[str, Any], change: Sequence[str]) -> None:
    """Raises ValueError where the folder holds a run of another configuration."""
    if storage.is_remote(workdir) or saved(workdir, "config") is None:
        return  # the run itself looks at what is on a bucket
    values = hub.replaced(values, saved(workdir, "pins"))
    values["task"]["date"] = date(values, workdir)
    changes.find(workdir, values, change)


def arms_of(config: str) -> Arms:
    """Returns what `sweep()` of a config file lists.

    Raises:
      ValueError: the file is no .py file, has no sweep(), or lists no arms.
    """
    path = config.partition(":")[0]
    spec = util.spec_from_file_location("swept", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config={path} is no Python file; give the .py file of a sweep")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "sweep"):
        raise ValueError(f"{path} has no sweep(); it returns a list or dict of {{field: value}}")
    arms = module.sweep()
    if not arms or not all(isinstance(arm, dict) for arm in _listed(arms)):
        raise ValueError(f"{path}: sweep() returned {arms!r}, not a list or dict of {{field: value}}")
    return arms


def launch_command(job: Job, index: int, launcher: str, more: Sequence[str]) -> list[str]:
    """Returns the command that runs a job on Cloud TPU."""
    script = {"tpu_vm": "launch/tpu_vm.py", "gke": "launch/gke/jobset.py"}[launcher]
    stem = pathlib.Path(job.arguments[0].partition("=")[2].partition(":")[0]).stem
    name = re.sub(r"[^a-z0-9]+", "-", f"{stem[:24]}-{index}-s{job.seed}".lower())
    return ["python", script, "run", *job.arguments, f"--workdir={job.workdir}", f"--name={name}", *more]


def shares(cores: Sequence[int], count: int) -> list[set[int]]:
    """Deals cores out to `count` runs at a time; all to each where there are fewer cores than runs."""
    return [set(cores[i::count]) if count <= len(cores) else set(cores) for i in range(count)]


class Runner:
    """Runs jobs, some at a time, each a process of its own with a log beside its workdir.

    Those that run together each have their share of the cores this process may use: two XLA programs
    that both take all of them wait for each other. What a program is compiled to can hang on how many
    it has, and so can its roundings.
    """

    def __init__(self, jobs: int):
        self._jobs, self._running, self._is_stopping = jobs, set(), False
        self._shares = queue.SimpleQueue()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # of Linux
        for share in shares(cores, jobs):
            self._shares.put(share)

    def run(self, jobs: Sequence[Job]) -> dict[Job, int]:
        """Returns the exit code of each.

        Raises:
          Interrupted: by a signal, once all that ran have saved and ended.
        """
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            with futures.ThreadPoolExecutor(self._jobs) as pool:
                codes = dict(zip(jobs, pool.map(self._run, jobs), strict=True))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._is_stopping:
            raise cli.Interrupted("stopped; the same command continues")
        return codes

    def _run(self, job: Job) -> int:
        if self._is_stopping:
            return cli.RESTART
        start, share = time.monotonic(), self._shares.get()
        try:
            code = self._code(job, share)
        finally:
            self._shares.put(share)
        ended = "done" if code == 0 else f"ended with {code}, see {job.log}"
        print(f"{job.arm}, seed {job.seed}: {ended} ({time.monotonic() - start:.0f} s)", flush=True)
        return code

    def _code(self, job: Job, share: Sequence[int]) -> int:
        """Runs a job on these cores, and returns its exit code."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *job.command[1:]], stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.add(process)
        if share:
            with contextlib.suppress(OSError):  # it has ended, or the system forbids it
                os.sched_setaffinity(process.pid, share)
        if self._is_stopping:  # asked since it was looked at above
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self._running.discard(process)
        return code

    def _stop(self, number: int, _) -> None:
        self._is_stopping = True
        for process in list(self._running):
            process.send_signal(number)


def table(jobs: Sequence[Job]) -> str:
    """Returns the table of the finished jobs, in Markdown: the mean over seeds of each column and
    its 95 % interval, Student's over seeds or, of one seed's accuracy, Wilson's."""
    lines = [f"| arm | seeds | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for arm in dict.fromkeys(job.arm for job in jobs):
        finished = [job for job in jobs if job.arm == arm and job.is_finished()]
        records = [[r for r in metrics.read(j.workdir) if r["step"] <= j.steps] for j in finished]
        cells = [_cell(records, *column) for column in COLUMNS.values()] if records else []
        cells = cells or ["none finished", *[""] * (len(COLUMNS) - 1)]
        lines.append(f"| {arm} | {len(records)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(runs: list[list[dict]], phase: str, metric: str) -> str:
    values, trials = [], None
    for records in runs:
        records = [r for r in records if r["phase"] == phase]
        if phase == "train":
            records = [r for r in records if metric in r]  # not every step has every metric
        if not records or metric not in records[-1]:
            return "–"
        first = int((1 - LAST_SHARE) * len(records)) if phase == "train" else -1
        values.append(np.mean([r[metric] for r in records[first:]]))
        trials = metrics.num_answers(records[-1], metric) if metric.endswith("_accuracy") else None
    mean, low, high = intervals.of_mean(values)
    if len(values) == 1:
        if trials is None:
            return f"{mean:z.4g}"
        low, high = map(float, intervals.wilson(mean, trials))
    return f"{mean:z.4g} [{low:z.4g}, {high:z.4g}]"


def default_folder(config: str) -> str:
    """Returns where the runs of a config go: each variant of it has a folder."""
    path, _, variant = config.partition(":")
    return f"runs/sweep-{pathlib.Path(path).stem}" + (f"-{variant}" if variant else "")


def main() -> None:
    """Command line: see the top of the file."""
    cli_flags.define_config()
    seeds = flags.DEFINE_list("seeds", [], "Seeds of every arm; default: its config's.")
    count = flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1)
    out = flags.DEFINE_string("out", None, "Folder of the sweep; default runs/sweep-NAME[-VARIANT].")
    dry_run = flags.DEFINE_boolean("dry_run", False, "Show the commands and run none.")
    launcher = flags.DEFINE_enum("launch", None, ["tpu_vm", "gke"], "Show commands that launch them.")
    change = flags.DEFINE_list("change", [], "Fields that runs which go on may change; see main.")
    more = flags.DEFINE_string("launch_flags", "", "Further flags of the launcher.")

    def run() -> None:
        config = config_flags.get_config_filename(flags.FLAGS["config"])
        folder = out.value or default_folder(config)
        given = cli_flags.overrides(flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False))
        overrides = [f"--config.{field}={text}" for field, text in given.items()]
        if not all(re.fullmatch(r"\d+", seed) for seed in seeds.value):
            raise ValueError(f"--seeds={','.join(seeds.value)}: give whole numbers, as in 0,1,2")
        numbers = list(dict.fromkeys(map(int, seeds.value)))
        jobs = jobs_of(config, overrides, arms_of(config), numbers, folder, change.value)
        if launcher.value:
            for i, job in enumerate(jobs):
                print(shlex.join(launch_command(job, i, launcher.value, shlex.split(more.value))))
        elif dry_run.value:
            print("\n".join(shlex.join(job.command) for job in jobs))
        else:
            _run_all(jobs, folder, count.value)

    cli_flags.run(run, required=["config"])


def _run_all(jobs: Sequence[Job], folder: str, count: int) -> None:
    waiting = [job for job in jobs if not job.is_finished()]
    print(f"{len(jobs)} runs in {folder}, {len(jobs) - len(waiting)} of them finished before")
    codes = Runner(count).run(waiting)
    finished = [job for job in jobs if job.is_finished()]
    text = table(jobs)
    place = storage.folder(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "table.md").write_text(text)
    print(text, end="")
    if finished:
        print(f"report: {page.write([j.workdir for j in finished], place / 'report.html')}")
    if failed := [f"{job.arm}, seed {job.seed}" for job in waiting if codes[job]]:
        raise RuntimeError(f"{len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
