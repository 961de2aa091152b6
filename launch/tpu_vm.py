"""Runs a config on Cloud TPU VMs.

`run` does all steps. It requests the machines as a queued resource and waits for them. It copies
the commit of this clone to every host and makes an environment there. It starts the run under
launch/supervise.py on all hosts and shows the log of host 0. Preempted machines are requested
again, and the run continues from its workdir.

`create` ends when the machines are ready. Interrupting `run` or `logs` does not end the run. `stop`
asks the run to save and to end. `delete` returns the machines. --dry-run prints the commands as a
shell script and runs nothing.

gcloud must be logged in. Its project and zone are used unless --project and --zone name others.

Examples:

    python launch/tpu_vm.py run --config=configs/dapo_qwen3_8b.py --workdir=gs://BUCKET/dapo --dry-run
    python launch/tpu_vm.py logs --config=configs/dapo_qwen3_8b.py
"""

import argparse
import contextlib
import dataclasses
import datetime
import re
import shlex
import subprocess
import time

import clone
import plan as plans
from gcloud import DURATION, SECRETS_FILE, Gcloud

POLL_SECONDS = 30.0
WAITING = (
    "ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED", "DELETING",
)
LOST = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED")
UNKNOWN = "UNKNOWN"  # the state of machines, where gcloud cannot say it for now
LOST_TOUCH, MISUSED = 255, 2  # of ssh, of gcloud
# What gcloud says where asking again is of no use.
REFUSALS = (
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "active account",
    "Failed to find attribute", "required property",
)


class OutOfTouch(ValueError):
    """gcloud failed, and a retry may succeed."""


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of the run on one host.

    Attributes:
      code: exit code of the run. None while it runs, before it starts, or after a reboot of the
        host that lost the code.
      arguments: arguments of the run, None if none was started.
    """

    is_running: bool
    code: int | None = None
    arguments: list[str] | None = None

    @classmethod
    def parse(cls, text: str) -> "Status | None":
        """Reads the line of `on_vm.sh status` in the output of ssh; None if it is missing."""
        found = re.search(r"^(not )?running: (.*?)(?: on \S+(?: with (.*))?)?$", text, re.MULTILINE)
        if found is None:
            return None
        code = re.search(r'"code": (\d+)', found[2])
        return cls(found[1] is None, code and int(code[1]), found[3] and shlex.split(found[3]))


@dataclasses.dataclass
class Machines:
    """Decides the next action from the observed states, without a clock or a process.

    Attributes:
      max_creations: limit on the number of requests for machines.
      max_lost_touch: limit on `lost_touch`: an hour, in POLL_SECONDS.
      is_bounded: whether a failed request is final (--valid-until).
      creations: number of requests for machines.
      has_run: whether the run was started on the current machines.
      lost_touch: number of failed contacts in a row, including hosts that lost the run.
    """

    max_creations: int = 20
    max_lost_touch: int = 120
    is_bounded: bool = False
    creations: int = 0
    has_run: bool = False
    lost_touch: int = 0

    def next(self, state: str | None) -> str:
        """Returns "create", "delete", "wait", "start", "follow", "expire" or "give up".

        `state` is the state of the queued resource: None if it does not exist, UNKNOWN if gcloud
        could not read it.
        """
        if state is None:
            if self.creations >= self.max_creations:
                return "give up"
            self.creations += 1
            self.lost_touch = 0
            self.has_run = False
            return "create"
        if self.lost_touch >= self.max_lost_touch:
            return "give up"
        if state == "FAILED" and self.is_bounded and self.creations:
            return "expire"
        if state in LOST:
            return "delete"
        if state == UNKNOWN:
            self.lost_touch += 1
            return "wait"
        if state != "ACTIVE":
            self.lost_touch = 0
            return "wait"
        if not self.has_run:
            self.has_run = True
            return "start"
        return "follow"

    def missed(self) -> None:
        """Counts a failed contact with the machines, or a lost run."""
        self.has_run = False
        self.lost_touch += 1

    def ended(self, status: Status | None) -> int | None:
        """Returns the run's exit code if the run is over, else None.

        `status` is the host's answer after the log stopped, None without one. The exit code of ssh
        is not used: gcloud exits with 1 while a machine shuts down.
        """
        if status is None:
            self.lost_touch += 1
        elif status.is_running:
            self.lost_touch = 0
        elif status.code is None:
            self.missed()
        else:
            return status.code
        return None


def run(shell: plans.Shell, gcloud: Gcloud, is_whole: bool = True) -> int:
    """Runs a plan to its end and returns the exit code; without `is_whole`, only makes machines."""
    plan = gcloud.plan
    if plan.hosts > 1 and not plan.is_on_bucket:
        raise ValueError(
            f"--workdir={plan.workdir} is not shared by the {plan.hosts} hosts of "
            f"{plan.topology.product_name}; give --workdir=gs://BUCKET/FOLDER"
        )
    if shell.is_dry:
        return _show_run(shell, gcloud, is_whole)
    _look_at_clone(shell, gcloud)
    machines = Machines(is_bounded=gcloud.given.valid_until is not None)
    while True:
        state = _state_or_unknown(shell, gcloud)
        action = machines.next(state)
        if action == "give up":
            shell.report(f"given up: {machines.creations} times created, {machines.lost_touch} times "
                      f"in a row nothing heard, now {state}; see `status`; what is left is billed "
                      f"until: {gcloud.again('delete')}")
            return 1
        if action == "create":
            shell.report(f"asking for {plan.topology.product_name} as {plan.name}")
            shell.run(gcloud.create())
        elif action == "expire":
            shell.report(f"{plan.name} is {state}, and --valid-until={gcloud.given.valid_until}: it is "
                      "deleted, and not asked for anew")
            _say_why(shell, gcloud)
            shell.code(gcloud.delete())
            return 1
        elif action == "delete":
            shell.report(f"{plan.name} is {state}: deleting it, to ask for it anew")
            if state == "FAILED":
                _say_why(shell, gcloud)
            if shell.code(gcloud.delete()):
                machines.missed()
            time.sleep(POLL_SECONDS)
        elif action == "wait":
            shell.report(f"{plan.name} is {state}")
            time.sleep(POLL_SECONDS)
        elif not is_whole:
            _install(shell, gcloud)
            return 0
        elif action == "start":
            if not _begin(shell, gcloud):
                machines.missed()
                time.sleep(POLL_SECONDS)
        else:
            shell.code(gcloud.follow())
            code = machines.ended(_status(shell, gcloud, gcloud.nodes[0]))
            if code is not None:
                shell.report(f"the run ended with {code}; {plan.name} is still there, and billed, "
                          f"until: {gcloud.again('delete')}")
                return code
            if not machines.has_run:
                shell.report("its host knows nothing of the run any more: it is started again")
            time.sleep(POLL_SECONDS)


def _say_why(shell: plans.Shell, gcloud: Gcloud) -> None:
    if reason := shell.read(gcloud.reason())[1]:
        shell.report(reason)


def _show_run(shell: plans.Shell, gcloud: Gcloud, is_whole: bool) -> int:
    plan = gcloud.plan
    print("set -euo pipefail")
    shell.report(plans.sizes(plan))
    for line in plans.cost(plan, gcloud.given):
        shell.report(line)
    if not plan.is_on_bucket:
        shell.report(f"{plan.workdir} is on the machine's disk and goes with it; gs://... stays")
    _look_at_clone(shell, gcloud)
    shell.report("1. ask for the machines, and wait until they are there")
    shell.run(gcloud.create())
    print(f'until [ "$({plans.show(gcloud.state())})" = ACTIVE ]; do sleep {POLL_SECONDS:g}; done')
    shell.report("2. this commit and its environment on every host")
    _install(shell, gcloud)
    if is_whole:
        shell.report("3. the run on every host under launch/supervise.py, and the log of host 0")
        _start(shell, gcloud)
        shell.run(gcloud.follow())
        lost = [s for s in LOST if s != "FAILED" or gcloud.given.valid_until is None]
        shell.report(f"then: whenever the state is one of {', '.join(lost)}, delete --force and again "
                  "from 1; the run continues from its workdir")
    return 0


def _look_at_clone(shell: plans.Shell, gcloud: Gcloud) -> None:
    """Refuses a clone with a commit that cannot run; a dry run only prints the reason."""
    if gcloud.given.git:
        return
    if problem := clone.problem(shell, gcloud.plan):
        if not shell.is_dry:
            raise ValueError(problem)
        shell.report(f"refused as it stands: {problem}")
    if changes := clone.changes(shell):
        shell.report(f"what is not committed here is not copied: {changes}")


def _state(shell: plans.Shell, gcloud: Gcloud) -> str | None:
    """Returns the state of the machines, None if there are none.

    Raises:
      OutOfTouch: gcloud failed, and a retry may succeed.
      ValueError: gcloud failed, and a retry is useless.
    """
    code, text = shell.read(gcloud.state())
    if code == 0:
        return text.splitlines()[-1] if text else "STATE_UNSPECIFIED"
    if "NOT_FOUND" in text or "was not found" in text:
        return None
    is_final = code == MISUSED or any(words in text for words in REFUSALS)
    error = ValueError if is_final else OutOfTouch
    raise error(f"{plans.show(gcloud.state())} failed with {code}:\n{text}")


def _state_or_unknown(shell: plans.Shell, gcloud: Gcloud) -> str | None:
    try:
        return _state(shell, gcloud)
    except OutOfTouch as error:
        shell.report(str(error))
        return UNKNOWN


def _status(shell: plans.Shell, gcloud: Gcloud, node: str) -> Status | None:
    """Returns the status of the run on the first host of a node, None if it is unreachable."""
    code, text = shell.read(gcloud.ask(node, "0"))
    return Status.parse(text) if code == 0 else None


def _begin(shell: plans.Shell, gcloud: Gcloud) -> bool:
    """Starts the run unless it is active; returns False if the machines cannot be reached."""
    status = _status(shell, gcloud, gcloud.nodes[0])
    if status is None:
        return False
    if status.is_running:
        _check_same(gcloud.plan, status)
        return True
    try:
        _install(shell, gcloud)
        _start(shell, gcloud)
    except subprocess.CalledProcessError as error:
        can_ask = all(_status(shell, gcloud, node) is not None for node in gcloud.nodes)
        if error.returncode != LOST_TOUCH and can_ask:
            raise
        return False
    return True


def _check_same(plan: plans.Plan, status: Status) -> None:
    if status.arguments not in (None, plan.arguments):
        raise ValueError(
            f"{plan.name} runs already, with {shlex.join(status.arguments)}; this would be "
            f"{shlex.join(plan.arguments)}: see its `logs`, `stop` it, or give another --name"
        )


def _install(shell: plans.Shell, gcloud: Gcloud) -> None:
    """Installs the code, its environment and any secrets on every host."""
    name, git, secrets = gcloud.plan.name, gcloud.given.git, plans.secrets()
    with contextlib.nullcontext() if git and not secrets else clone.folder(shell) as folder:
        if git:
            for node in gcloud.nodes:
                shell.run(gcloud.ssh(node, clone.fetch(name, git)))
        else:
            archive = clone.inside(folder, "code.tar.gz")
            shell.run(clone.archive(archive))
            for node in gcloud.nodes:
                shell.run(gcloud.scp(archive, node, f"{name}.tar.gz"))
                shell.run(gcloud.ssh(node, f"mkdir -p {name} && tar -xzf {name}.tar.gz -C {name}"))
        if secrets:
            path = clone.inside(folder, "environment")
            clone.write_secrets(shell, path, secrets)
            for node in gcloud.nodes:
                shell.run(gcloud.scp(path, node, SECRETS_FILE))
    setup = f"bash {name}/launch/on_vm.sh setup"
    for node in gcloud.nodes:
        shell.run(gcloud.ssh(node, setup if secrets else f"rm -f {SECRETS_FILE} && {setup}"))


def _start(shell: plans.Shell, gcloud: Gcloud) -> None:
    plan = gcloud.plan
    for node in gcloud.nodes:
        shell.run(gcloud.on_vm(node, shlex.join(["start", plan.topology.kind, *plan.arguments])))


def status(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the state of the machines, and of the run on every host."""
    commands = [gcloud.ask(node) for node in gcloud.nodes]
    if shell.is_dry:
        for command in [gcloud.state(), *commands]:
            shell.run(command)
        return 0
    state = _state(shell, gcloud)
    shell.report(f"{gcloud.plan.name}: {state or 'there is none'}")
    return max([shell.code(command) for command in commands if state == "ACTIVE"], default=0)


def logs(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the log of host 0 until the run ends."""
    if shell.is_dry:
        shell.run(gcloud.follow())
        return 0
    return shell.code(gcloud.follow())


def stop(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Asks the run to save and to end, on every host."""
    for node in gcloud.nodes:
        shell.run(gcloud.on_vm(node, "stop"))
    return 0


def delete(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Returns the machines to the cloud."""
    shell.run(gcloud.delete())
    return 0


COMMANDS = {
    "create": lambda shell, gcloud: run(shell, gcloud, is_whole=False),
    "run": run, "status": status, "logs": logs, "stop": stop, "delete": delete,
}


def _check(given: argparse.Namespace) -> None:
    """Raises ValueError for flags that gcloud would refuse or misread."""
    if given.spot and given.reserved:
        raise ValueError("--spot and --reserved exclude each other; give one of the two")
    for name in ("network", "subnetwork", "service_account", "valid_until"):
        if getattr(given, name) == "":
            raise ValueError(f"--{name.replace('_', '-')} is empty; give a value, or leave it out")
    if given.service_account is not None and "@" not in given.service_account:
        raise ValueError(
            f"--service-account={given.service_account} is not an email address; give that of the "
            "account"
        )
    until = given.valid_until
    if until is not None and not re.fullmatch(DURATION, until, re.IGNORECASE):
        try:
            datetime.datetime.fromisoformat(until)
        except ValueError:
            raise ValueError(
                f"--valid-until={until} is neither a duration nor a time; give one such as 2h, "
                "1d12h or 2030-01-31T08:00:00Z"
            ) from None


def main() -> int:
    parser = plans.parser(__doc__, COMMANDS)
    parser.add_argument("--project", help="default: gcloud's")
    parser.add_argument("--zone", help="default: gcloud's")
    parser.add_argument("--runtime", help="image of the machines; default: the image for the chip")
    parser.add_argument("--reserved", action="store_true", help="any reservation of the project")
    parser.add_argument("--valid-until", help="duration or time limit of the request")
    parser.add_argument("--network", help="network of the machines; default: 'default'")
    parser.add_argument("--subnetwork", help="subnetwork of the machines")
    parser.add_argument("--internal-ips", action="store_true",
                        help="no external addresses; repeat it for status, logs and stop")
    parser.add_argument("--service-account", help="email of the machines' service account")
    parser.add_argument("--git", help="URL[#REVISION] that the hosts clone instead")
    given, overrides = parser.parse_known_args()
    _check(given)
    needs_slice = given.command in ("create", "run")
    gcloud = Gcloud(plans.make(given, overrides, needs_slice), given)
    return COMMANDS[given.command](plans.Shell(given.dry_run), gcloud)


if __name__ == "__main__":
    plans.main(main)
