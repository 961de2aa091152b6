"""Shared by the launchers: the plan of a run on TPU slices, and commands to print or run."""

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxrl_tis.runtime import cli  # noqa: E402
from jaxrl_tis.aot.chips import TOPOLOGIES, WORKERS, Topology, name_of  # noqa: E402
import external  # noqa: E402

OF_MAIN = ("--config.", "--change=", "--connect_seconds=")  # what is passed on to jaxrl_tis.main
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")  # taken from the environment, never shown


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run and the slices for it.

    Attributes:
      config: the value of --config, a path in the clone.
      overrides: further arguments of jaxrl_tis.main.
      topology: the slices; None if unknown, for commands that need only the name.
      workers: the machines of the rollout workers, a slice each; None if the run has none.
      engines: of others, on these machines or elsewhere; None if the run has none.
    """

    config: str
    overrides: tuple[str, ...]
    workdir: str
    topology: Any
    name: str
    workers: Topology | None = None
    engines: external.Engines | None = None

    @property
    def arguments(self) -> list[str]:
        """The arguments of jaxrl_tis.main."""
        return [f"--config={self.config}", f"--workdir={self.workdir}", *self.overrides]

    @property
    def hosts(self) -> int:
        return self.topology.hosts_per_slice * self.topology.num_slices

    @property
    def num_chips(self) -> int:
        return self.topology.num_chips + (self.workers.num_chips if self.workers else 0)

    @property
    def is_on_bucket(self) -> bool:
        return self.workdir.startswith("gs://")


def parser(about: str, commands: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a launcher's parser with the shared flags. `about` is the launcher's docstring, whose
    examples end the --help."""
    made = cli.once(argparse.ArgumentParser(
        description=about.partition("\n")[0], allow_abbrev=False,
        epilog="Further arguments go to jaxrl_tis.main: config fields as --config.NAME=VALUE,\n"
        f"--change and --connect_seconds.\n\n{cli.split_examples(about)[1]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ))
    made.add_argument("command", choices=commands)
    made.add_argument("--config", required=True, help="config file, a path in the clone")
    made.add_argument("--accelerator", help="v5litepod-8, v5p-128, ...; default: the config's")
    made.add_argument("--num_slices", type=int, default=1, help="number of such slices")
    made.add_argument("--workdir", help="gs://BUCKET/FOLDER, or a folder of the machine, which is lost "
                      "with it; default: runs/NAME")
    made.add_argument("--name", help="name of the machines; default: from the config")
    made.add_argument("--spot", action="store_true", help="cheaper machines that may be preempted")
    made.add_argument("--reservation", help="use the chips of this reservation")
    made.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    made.add_argument("--price_per_chip_hour", type=float, help="price, to print the cost with --dry-run")
    made.add_argument("--hours", type=float, default=1.0, help="hours of this cost")
    made.set_defaults(worker_accelerator=None, num_workers=None, **dict.fromkeys(external.FLAGS))
    return made


def add_workers(made: argparse.ArgumentParser) -> None:
    """Adds the flags for the machines of an asynchronous run's rollout workers."""
    made.add_argument("--worker_accelerator", help="machine of a rollout worker, as v5litepod-4; sets "
                      "--config.rollout.driver=ray, without --engine_kind; default: the config's")
    made.add_argument("--num_workers", type=int, help="number of these machines; default: the config's, or 1")


def make(given: argparse.Namespace, overrides: Sequence[str], needs_slice: bool) -> Plan:
    """Returns the plan of the parsed flags; only with `needs_slice` the slice must be known.

    Raises:
      ValueError: the flags contradict each other or name something unknown.
    """
    path, _, variant = given.config.partition(":")
    stem = pathlib.Path(path).stem
    if not (ROOT / path).is_file():
        raise ValueError(f"--config={given.config}: there is no file {path!r} in {ROOT}")
    if wrong := [word for word in overrides if not word.startswith(OF_MAIN)]:
        raise ValueError(f"unknown arguments {' '.join(wrong)}; fields are --config.NAME=VALUE")
    if refused := cli.repeated(word.partition("=")[0] for word in overrides):
        raise ValueError(refused)
    if given.spot and given.reservation is not None:
        raise ValueError(
            f"--spot and --reservation={given.reservation} exclude each other; give one of the two"
        )
    if given.reservation == "":
        raise ValueError("--reservation is empty; give a name, or leave it out")
    if given.num_slices < 1:
        raise ValueError(f"--num_slices={given.num_slices} is below 1; give at least 1")
    accelerator, known = given.accelerator, name_of(given.config)
    if accelerator is None and known in TOPOLOGIES:
        accelerator = Topology.parse(TOPOLOGIES[known]).accelerator
    if accelerator is None and needs_slice:
        raise ValueError(
            f"--accelerator is missing, and {path} has no slice of its own; give one, as in "
            "v5litepod-8"
        )
    topology = Topology.rented(accelerator, given.num_slices) if accelerator else None
    named = dict(word.partition("=")[::2] for word in overrides)
    is_own = not given.engine_kind and named.get("--config.rollout.driver", "ray") == "ray"
    workers, found = _workers(given, WORKERS.get(known) if is_own else None), None
    name = given.name or re.sub(r"[^a-z0-9]+", "-", f"{stem}-{variant}".lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ValueError(
            f"--name={name} is not a valid name; give at most 40 small letters, digits and dashes, "
            "with a letter first"
        )
    if needs_slice:
        found = external.make(given, named, workers, name)
        words = found.fields if found else _worker_fields(workers, named)
        overrides = [*(word for word in words if word.partition("=")[0] not in named), *overrides]
    workdir = given.workdir or f"runs/{name}"
    return Plan(given.config, tuple(overrides), workdir, topology, name, workers, found)


def _workers(given: argparse.Namespace, default: tuple[str, int] | None) -> Topology | None:
    """Returns the machines of the rollout workers, one slice of one host each. `default`: those of the
    config."""
    if given.worker_accelerator is None and default is not None:
        name, count = default
        return Topology.parse(name, _num_workers(given, count))
    if given.worker_accelerator is None:
        if given.num_workers is not None:
            raise ValueError(
                f"--num_workers={given.num_workers} needs --worker_accelerator; give the machine of a "
                "worker, as v5litepod-4"
            )
        return None
    workers = Topology.rented(given.worker_accelerator, _num_workers(given, 1))
    if workers.hosts_per_slice > 1:
        raise ValueError(
            f"--worker_accelerator={given.worker_accelerator} has {workers.hosts_per_slice} hosts, and "
            "a rollout worker uses one; give a smaller one, and more by --num_workers"
        )
    return workers


def _num_workers(given: argparse.Namespace, default: int) -> int:
    count = default if given.num_workers is None else given.num_workers
    if count < 1:
        raise ValueError(f"--num_workers={count} is below 1; give at least 1")
    return count


def _worker_fields(workers: Topology | None, named: Mapping[str, str]) -> list[str]:
    """Returns the fields that follow from the workers' machines."""
    driver = named.get("--config.rollout.driver")
    if workers is None:
        if driver == "ray":
            raise ValueError(
                "--config.rollout.driver=ray needs machines for the rollout workers; give "
                "--worker_accelerator to launch/tpu_vm.py or launch/gke/raycluster.py"
            )
        return []
    if driver not in (None, "ray"):
        raise ValueError(
            f"--worker_accelerator is for rollout.driver=ray, and --config.rollout.driver={driver} is "
            "given; leave one of the two out"
        )
    fields = {"driver": "ray", "workers": workers.num_slices, "tpus_per_worker": workers.chips_per_host}
    return [f"--config.rollout.{name}={value}" for name, value in fields.items()]


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: environment[name] for name in SECRETS if environment.get(name)}


def sizes(plan: Plan) -> str:
    topology = plan.topology
    hosts = "1 host" if plan.hosts == 1 else f"{plan.hosts} hosts"
    said = f"{topology.product_name}: {topology.num_chips} chips, {hosts}"
    if plan.workers is not None:
        workers = "engines" if plan.engines else "rollout workers"
        said += f"; {workers} on {plan.workers.product_name}: {plan.workers.num_chips} chips"
    return said


def cost(plan: Plan, given: argparse.Namespace) -> list[str]:
    """Returns a line with the cost of the plan, if the user gave a price."""
    if given.price_per_chip_hour is None:
        return []
    chips, price = plan.num_chips, given.price_per_chip_hour
    total = chips * price * given.hours
    return [f"{chips} chips x {given.hours:g} h x {price:g} a chip and hour = {total:,.2f}"]


class Expanded(str):
    """A word of a printed command that the shell expands, such as a variable."""


class Shell:
    """Runs commands, or prints them as a script in a dry run."""

    def __init__(self, is_dry: bool):
        self.is_dry = is_dry

    def report(self, text: str) -> None:
        """Prints a comment of the script, or a line of the log."""
        print(f"# {text}" if self.is_dry else text, flush=True)

    def run(self, command: Sequence[str]) -> None:
        """Runs a command; raises subprocess.CalledProcessError if it fails."""
        if self.is_dry:
            print(show(command), flush=True)
        else:
            subprocess.run(command, check=True)

    def run_all(self, commands: Sequence[Sequence[str]]) -> None:
        """Runs all commands, whichever fail; raises the error of the last that fails."""
        failed = None
        for command in commands:
            try:
                self.run(command)
            except subprocess.CalledProcessError as error:
                failed = error
        if failed is not None:
            raise failed

    def code(self, command: Sequence[str]) -> int:
        """Runs a command, also in a dry run, and returns its exit code."""
        return subprocess.run(command).returncode

    def read(self, command: Sequence[str]) -> tuple[int, str]:
        """Runs a read-only command, also in a dry run; returns its exit code and all output."""
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout.strip()


def show(command: Sequence[str]) -> str:
    """Returns the command as shell text, on several lines if it is long."""
    words = [f'"{word}"' if isinstance(word, Expanded) else shlex.quote(word) for word in command]
    if len(" ".join(words)) <= 96:
        return " ".join(words)
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) > 90:
            lines.append(line)
            line = " "
        line += f" {word}" if line else word
    return " \\\n".join([*lines, line])


def main(run) -> None:
    """Runs a launcher; errors of its user print one line and exit with 2."""
    try:
        with cli.piped():
            sys.exit(run() or 0)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        print(f"{show(error.cmd)} failed with {error.returncode}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
