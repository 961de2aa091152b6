"""Runs a config on Cloud TPU VMs, which queued resources hand out:

    python launch/tpu_vm.py run --config=configs/gsm8k_qwen25_0p5b.py:grpo --accelerator=v5litepod-8 \\
      --workdir=gs://BUCKET/gsm8k [--spot] [--config.field=value ...]
    python launch/tpu_vm.py create | status | logs | delete --config=...

`run` does all there is to do: asks for the machines and waits, copies this clone's commit to every
host, makes an environment there, starts the run under launch/supervise.py on all of them, and shows
the log of host 0. Machines that are taken away are asked for anew, and the run continues from its
workdir. `create` ends once the machines are ready. Interrupting `run` or `logs` does not end the
run. With --dry-run everything is shown as a shell script, and nothing happens.

It needs gcloud, logged in; project and zone are gcloud's own unless --project and --zone say others.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator

import plan as plans

POLL_SECONDS = 30.0
WAITING = (
    "ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED", "DELETING",
)
LOST = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED")
LOST_TOUCH = 255  # of ssh
CHANGES = ["git", "-C", str(plans.ROOT), "status", "--porcelain", "--untracked-files=no"]


@dataclasses.dataclass
class Machines:
    """Decides what to do next from what is seen: no clock, no process.

    Attributes:
      max_creations: how often machines that are lost are asked for anew.
      creations: how often they were asked for.
      has_run: whether the run was started on those that are there.
      lost_touch: how often in a row nothing was heard of them, though they are said to be active.
    """

    max_creations: int = 20
    max_lost_touch: int = 20
    creations: int = 0
    has_run: bool = False
    lost_touch: int = 0

    def next(self, state: str | None) -> str:
        """Returns "create", "delete", "wait", "start", "follow" or "give up"; `state` is that of
        the queued resource, None if there is none."""
        if state is None:
            if self.creations >= self.max_creations:
                return "give up"
            self.creations += 1
            self.has_run = False
            return "create"
        if state in LOST:
            return "delete"
        if state != "ACTIVE":
            return "wait"
        if self.lost_touch >= self.max_lost_touch:
            return "give up"
        if not self.has_run:
            self.has_run = True
            return "start"
        return "follow"

    def is_over(self, code: int) -> bool:
        """Whether the run ended, by the exit code of following it."""
        self.lost_touch = self.lost_touch + 1 if code == LOST_TOUCH else 0
        return code != LOST_TOUCH


class Gcloud:
    """The commands of a plan."""

    def __init__(self, plan: plans.Plan, given: argparse.Namespace):
        self.plan, self.given = plan, given
        count = plan.topology.num_slices
        self.nodes = [plan.name] if count == 1 else [f"{plan.name}-{i}" for i in range(count)]
        where = {"project": given.project, "zone": given.zone}
        self._where = [f"--{name}={value}" for name, value in where.items() if value]

    def _queued(self, verb: str, *rest: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, self.plan.name, *self._where,
                *rest]

    def create(self) -> list[str]:
        topology = self.plan.topology
        nodes = [f"--node-id={self.plan.name}"]
        if topology.num_slices > 1:
            nodes = [f"--node-prefix={self.plan.name}", f"--node-count={topology.num_slices}"]
        return self._queued(
            "create", *nodes, f"--accelerator-type={topology.accelerator}",
            f"--runtime-version={self.given.runtime or topology.offer.runtime}",
            *["--spot"] * self.given.spot,
        )

    def state(self) -> list[str]:
        return self._queued("describe", "--format=value(state.state)")

    def delete(self) -> list[str]:
        return self._queued("delete", "--force", "--quiet")

    def ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *self._where,
                f"--worker={worker}", f"--command={script}"]

    def scp(self, source: str, node: str, target: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "scp", source, f"{node}:{target}",
                *self._where, "--worker=all"]


def run(shell: plans.Shell, gcloud: Gcloud, is_whole: bool = True) -> int:
    """Brings a run to its end and returns its exit code; without `is_whole`, only its machines."""
    plan = gcloud.plan
    if plan.hosts > 1 and not plan.is_on_bucket:
        raise ValueError(
            f"--workdir={plan.workdir}: {plan.topology.product_name} has {plan.hosts} hosts, which "
            "share one folder; give --workdir=gs://BUCKET/FOLDER"
        )
    if shell.is_dry:
        return _show_run(shell, gcloud, is_whole)
    machines = Machines()
    while True:
        state = _state(shell, gcloud)
        action = machines.next(state)
        if action == "give up":
            shell.say(f"given up: {machines.creations} times created, now {state}; see `status`, "
                      "and `delete` what is left")
            return 1
        if action == "create":
            shell.say(f"asking for {gcloud.plan.topology.product_name} as {gcloud.plan.name}")
            shell.run(gcloud.create())
        elif action == "delete":
            shell.say(f"{gcloud.plan.name} is {state}: deleting it, to ask for it anew")
            shell.run(gcloud.delete())
            time.sleep(POLL_SECONDS)
        elif action == "wait":
            shell.say(f"{gcloud.plan.name} is {state}")
            time.sleep(POLL_SECONDS)
        elif not is_whole:
            _install(shell, gcloud)
            return 0
        elif action == "start":
            try:
                if not _is_running(shell, gcloud):
                    _install(shell, gcloud)
                    _start(shell, gcloud)
            except subprocess.CalledProcessError as error:
                machines.has_run = False
                if machines.is_over(error.returncode) and _state(shell, gcloud) == "ACTIVE":
                    raise
                time.sleep(POLL_SECONDS)
        elif machines.is_over(code := shell.code(_follow(gcloud))):
            shell.say(f"the run ended with {code}; {gcloud.plan.name} is still there, and billed, "
                      f"until: python launch/tpu_vm.py delete --config={gcloud.plan.config}")
            return code
        else:
            time.sleep(POLL_SECONDS)


def _show_run(shell: plans.Shell, gcloud: Gcloud, is_whole: bool) -> int:
    plan = gcloud.plan
    print("set -euo pipefail")
    shell.say(plans.sizes(plan))
    for line in plans.cost(plan, gcloud.given):
        shell.say(line)
    if not plan.is_on_bucket:
        shell.say(f"{plan.workdir} is on the machine's disk and goes with it; gs://... stays")
    shell.say("1. ask for the machines, and wait until they are there")
    shell.run(gcloud.create())
    print(f'until [ "$({plans.show(gcloud.state())})" = ACTIVE ]; do sleep {POLL_SECONDS:g}; done')
    shell.say("2. this commit and its environment on every host")
    _install(shell, gcloud)
    if is_whole:
        shell.say("3. the run on every host under launch/supervise.py, and the log of host 0")
        _start(shell, gcloud)
        shell.run(_follow(gcloud))
        shell.say(f"then: whenever the state is one of {', '.join(LOST)}, delete --force and again "
                  "from 1; the run continues from its workdir")
    return 0


def _state(shell: plans.Shell, gcloud: Gcloud) -> str | None:
    code, text = shell.read(gcloud.state())
    if code == 0:
        return text.splitlines()[-1] if text else "STATE_UNSPECIFIED"
    if "NOT_FOUND" in text or "not found" in text:
        return None
    raise ValueError(f"{plans.show(gcloud.state())} failed with {code}:\n{text}")


def _is_running(shell: plans.Shell, gcloud: Gcloud) -> bool:
    """Whether a run is under way, which may have been started elsewhere."""
    _, text = shell.read(_ask(gcloud, gcloud.nodes[0]))
    return any(line.startswith("running: ") for line in text.splitlines())


def _ask(gcloud: Gcloud, node: str) -> list[str]:
    return gcloud.ssh(node, f"bash {gcloud.plan.name}/launch/on_vm.sh status", "0")


def _install(shell: plans.Shell, gcloud: Gcloud) -> None:
    """Puts the code and its environment on every host, and the secrets, if there are any."""
    clone = gcloud.plan.name
    if git := gcloud.given.git:
        url, _, revision = git.partition("#")
        fetch = f"git clone {shlex.quote(url)} {clone} && cd {clone}"
        fetch += f" && git checkout --quiet {shlex.quote(revision)}" if revision else ""
        fetch = f"rm -rf {clone} && {fetch}"
        for node in gcloud.nodes:
            shell.run(gcloud.ssh(node, fetch))
    else:
        if not shell.is_dry and shell.read(CHANGES)[1]:
            shell.say("what is not committed here is not copied")
        archive = f"{tempfile.gettempdir()}/{clone}.tar.gz"
        shell.run(["git", "-C", str(plans.ROOT), "archive", "--format=tar.gz",
                   f"--output={archive}", "HEAD"])
        unpack = f"mkdir -p {clone} && tar -xzf {clone}.tar.gz -C {clone}"
        for node in gcloud.nodes:
            shell.run(gcloud.scp(archive, node, f"{clone}.tar.gz"))
            shell.run(gcloud.ssh(node, unpack))
    with _secrets(shell) as path:
        for node in gcloud.nodes if path else []:
            shell.run(gcloud.scp(path, node, ".jaxrl_tis_env"))
    for node in gcloud.nodes:
        shell.run(gcloud.ssh(node, f"bash {clone}/launch/on_vm.sh setup"))


@contextlib.contextmanager
def _secrets(shell: plans.Shell) -> Iterator[str | None]:
    """Yields a file, readable by its owner alone, with the secrets of the environment."""
    found = plans.secrets()
    if not found:
        yield None
    elif shell.is_dry:
        shell.say(f"a file with {', '.join(found)} from the environment, which is not shown")
        yield "SECRETS_FILE"
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "environment"
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.writelines(f"{name}={shlex.quote(value)}\n" for name, value in found.items())
            yield str(path)


def _start(shell: plans.Shell, gcloud: Gcloud) -> None:
    plan = gcloud.plan
    words = ["bash", f"{plan.name}/launch/on_vm.sh", "start", plan.topology.kind, *plan.arguments]
    for node in gcloud.nodes:
        shell.run(gcloud.ssh(node, shlex.join(words)))


def _follow(gcloud: Gcloud) -> list[str]:
    return gcloud.ssh(gcloud.nodes[0], f"bash {gcloud.plan.name}/launch/on_vm.sh follow", "0")


def status(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the state of the machines, and of the run on host 0 of each slice."""
    commands = [_ask(gcloud, node) for node in gcloud.nodes]
    if shell.is_dry:
        for command in [gcloud.state(), *commands]:
            shell.run(command)
        return 0
    state = _state(shell, gcloud)
    shell.say(f"{gcloud.plan.name}: {state or 'there is none'}")
    for command in commands if state == "ACTIVE" else []:
        shell.run(command)
    return 0


def logs(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the log of host 0 until the run ends."""
    if shell.is_dry:
        shell.run(_follow(gcloud))
        return 0
    return shell.code(_follow(gcloud))


def delete(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Gives the machines back."""
    shell.run(gcloud.delete())
    return 0


COMMANDS = {
    "create": lambda shell, gcloud: run(shell, gcloud, is_whole=False),
    "run": run, "status": status, "logs": logs, "delete": delete,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], allow_abbrev=False,
        epilog="Other arguments are fields of the config: --config.NAME=VALUE.",
    )
    parser.add_argument("command", choices=COMMANDS)
    plans.add_flags(parser)
    parser.add_argument("--project")
    parser.add_argument("--zone")
    parser.add_argument("--runtime", help="image of the machines; default: that of the chip")
    parser.add_argument("--git", help="URL[#REVISION] to clone there instead of copying this clone")
    given, overrides = parser.parse_known_args()
    gcloud = Gcloud(plans.make(given, overrides), given)
    return COMMANDS[given.command](plans.Shell(given.dry_run), gcloud)


if __name__ == "__main__":
    plans.main(main)
