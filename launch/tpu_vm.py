"""Runs a config on Cloud TPU VMs.

`run` does all steps. It requests the machines as a queued resource and waits for them. It copies
the commit of this clone to every host and makes an environment there. It starts the run under
launch/supervise.py on all hosts and shows the log of host 0. Preempted machines are requested
again, and the run continues from its workdir.

With --worker_accelerator the run is asynchronous. Each of --num_workers further machines is a queued
resource of its own. The learner's machines and these form a Ray cluster, and the rollout workers
sample on these alone. The run starts when its own machines and the first of these are there. `run`
adds the others as they come, and requests preempted ones again, beside the log.

With --engine_kind=vllm, too, the worker machines serve vLLM instead of Ray, and the run has
rollout.driver=external. It waits until all engines are healthy and see the share of
--weights_mount. --engine_hosts names hosts that ssh reaches, in the place of worker machines.

`create` ends when the machines of the run are ready. Interrupting `run` or `logs` does not end the run. `stop`
asks the run to save and to end. `delete` returns the machines. --dry-run prints the commands as a
shell script and runs nothing.

gcloud must be logged in. Its project and zone are used unless --project and --zone name others.

Examples:

    python launch/tpu_vm.py run --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=gs://BUCKET/gsm8k --dry-run
    python launch/tpu_vm.py logs --config=configs/gsm8k_qwen25_0p5b.py:grpo
"""

import argparse
import contextlib
import dataclasses
import datetime
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import clone
import external
import plan as plans
from gcloud import DURATION, SECRETS_FILE, Gcloud
from machines import LOST, UNKNOWN, Machines, Status

POLL_SECONDS = 30.0
HOSTS_SECONDS = 300.0  # between two looks at the other hosts of a run
LOST_TOUCH, MISUSED = 255, 2  # of ssh, of gcloud
RAY_PORT = 6379
# What gcloud says where asking again is of no use.
REFUSALS = (
    "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "active account",
    "Failed to find attribute", "required property",
)


class OutOfTouch(ValueError):
    """gcloud failed, and a retry may succeed."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The Ray cluster of an asynchronous run, or its engines.

    Attributes:
      environment: its address and token, for every host, or where engines are; empty without both.
      is_new: whether the token is new, and workers that run have another one.
    """

    environment: dict[str, str]
    is_new: bool


@dataclasses.dataclass
class Worker:
    """The machine of a rollout worker.

    Attributes:
      state: the state of the machine when it was last asked for.
      is_given_up: whether the machine is not requested any more.
    """

    gcloud: Gcloud
    machines: Machines
    state: str | None = None
    is_given_up: bool = False

    def tend(self, shell: plans.Shell, cluster: Cluster | None) -> None:
        """Requests the machine, or starts Ray or its engine, if needed and if there is a cluster to
        join. A failure is reported, and the next call tries again."""
        if self.is_given_up:
            return
        last, self.state = self.state, _state_or_unknown(shell, self.gcloud)
        if self.state == "ACTIVE" and cluster is None:
            return
        try:
            action = _advance(shell, self.gcloud, self.machines, self.state)
            if action == "start" and cluster and not self._join(shell, cluster):
                self.machines.missed()
        except subprocess.CalledProcessError as error:
            shell.report(f"{plans.show(error.cmd)} failed with {error.returncode}")
            self.machines.missed()
            return
        self.is_given_up = action in ("give up", "expire")
        if action == "wait" and self.state != last:
            shell.report(f"{self.gcloud.plan.name} is {self.state}")
        if action == "follow" and self.machines.ended(self._status(shell)) is not None:
            self.machines.missed()  # the head was away for long

    def _join(self, shell: plans.Shell, cluster: Cluster) -> bool:
        """Starts Ray or the engine on the machine unless it runs there; returns False if it is
        unreachable."""
        status = self._status(shell)
        if status is not None and not (status.is_running and not cluster.is_new):
            _install(shell, self.gcloud, cluster.environment)
            _start(shell, self.gcloud)
        return status is not None

    def _status(self, shell: plans.Shell) -> Status | None:
        return _status(shell, self.gcloud, self.gcloud.nodes[0])


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
    if plan.engines and is_whole:
        shell.run_all(plan.engines.starts(plan.name))
    is_bounded = gcloud.given.valid_until is not None
    workers = [Worker(one, Machines(is_bounded=is_bounded)) for one in gcloud.workers]
    return _run(shell, gcloud, Machines(is_bounded=is_bounded), workers, is_whole)


def _run(
    shell: plans.Shell, gcloud: Gcloud, machines: Machines, workers: Sequence[Worker], is_whole: bool
) -> int:
    cluster = begun = None
    while True:
        state = _state_or_unknown(shell, gcloud)
        action = _tried(shell, gcloud, machines, state)
        if action in ("give up", "expire"):
            _say_billed(shell, gcloud)
            return 1
        if action in ("create", "delete"):
            cluster = None
        if action not in ("follow", "fail"):
            for worker in workers:
                worker.tend(shell, cluster)
        if action == "wait":
            shell.report(f"{gcloud.plan.name} is {state}")
        elif action in ("start", "follow") and not is_whole:
            if _is_reached(shell, gcloud, lambda: _install(shell, gcloud, {})):
                return 0
            machines.missed()
        elif action == "start":
            begun, is_over = _begun(shell, gcloud, machines, workers)
            if is_over:
                _say_billed(shell, gcloud)
                return 1
            cluster = begun or cluster
        elif action == "follow":
            _follow(shell, gcloud, workers, cluster)
            code = _ended(shell, gcloud, machines)
            if code is not None:
                return code
        if action != "create" and not (action == "start" and begun):
            time.sleep(POLL_SECONDS)


def _tried(shell: plans.Shell, gcloud: Gcloud, machines: Machines, state: str | None) -> str:
    """Returns what `_advance` says, and "fail" where a later request than the first fails."""
    try:
        return _advance(shell, gcloud, machines, state)
    except subprocess.CalledProcessError as error:
        if not machines.creations:  # of the first request: a typo, or no quota
            raise
        shell.report(f"{plans.show(error.cmd)} failed with {error.returncode}; it is tried again")
        machines.missed()
        return "fail"


def _begun(
    shell: plans.Shell, gcloud: Gcloud, machines: Machines, workers: Sequence[Worker]
) -> tuple[Cluster | None, bool]:
    """Starts a run if it can start now. Returns (its cluster, None if it did not start; whether it
    never will, as no machine of a worker is requested any more)."""
    found = _cluster(shell, gcloud)
    if found is not None and found.is_new and not any(w.state == "ACTIVE" for w in workers):
        if all(worker.is_given_up for worker in workers):
            return None, True
        shell.report("the run starts as soon as the first worker machine is there")
        machines.has_run = False
        return None, False
    if found is None or not _begin(shell, gcloud, found.environment):
        machines.missed()
        return None, False
    for worker in workers:
        worker.machines.has_run &= not found.is_new
    return found, False


def _ended(shell: plans.Shell, gcloud: Gcloud, machines: Machines) -> int | None:
    """Returns the exit code of a run that has ended; None starts or follows it again."""
    code = machines.ended(_status(shell, gcloud, gcloud.nodes[0]))
    if code is not None:
        shell.report(f"the run ended with {code}; {gcloud.plan.name} is still there, and billed, "
                  f"until: {gcloud.again('delete')}")
    elif not machines.has_run:
        shell.report("its host knows nothing of the run any more: it is started again")
    return code


def _advance(shell: plans.Shell, gcloud: Gcloud, machines: Machines, state: str | None) -> str:
    """Requests or deletes machines as their state demands; returns what `Machines.next` says."""
    plan, action = gcloud.plan, machines.next(state)
    if action == "give up":
        shell.report(f"given up: {machines.creations} times created, {machines.lost_touch} times "
                  f"in a row nothing heard, now {state}; see `status`")
    elif action == "create":
        shell.report(f"asking for {plan.topology.product_name} as {plan.name}")
        try:
            shell.run(gcloud.create())
        except subprocess.CalledProcessError:
            machines.refused()
            raise
        machines.lost_touch = 0
    elif action == "expire":
        shell.report(f"{plan.name} is {state}, and --valid-until={gcloud.given.valid_until}: it is "
                  "deleted, and not asked for anew")
        _say_why(shell, gcloud)
        shell.code(gcloud.delete())
    elif action == "delete":
        shell.report(f"{plan.name} is {state}: deleting it, to ask for it anew")
        if state == "FAILED":
            _say_why(shell, gcloud)
        if shell.code(gcloud.delete()):
            machines.missed()
    return action


def _cluster(shell: plans.Shell, gcloud: Gcloud) -> Cluster | None:
    """Returns the Ray cluster of a run, None if its machines cannot be reached."""
    if gcloud.plan.engines:
        return Cluster(gcloud.plan.engines.environment, is_new=False)
    if not gcloud.workers:
        return Cluster({}, is_new=False)
    (no_address, address), (no_token, text) = shell.read(gcloud.address()), shell.read(gcloud.token())
    if no_address or no_token or not address:
        return None
    kept = re.search(r"^[0-9a-f]{64}$", text, re.MULTILINE)
    return Cluster({
        "RAY_ADDRESS": f"{address.splitlines()[-1]}:{RAY_PORT}",
        "RAY_AUTH_TOKEN": kept[0] if kept else secrets.token_hex(32),
    }, is_new=kept is None)


def _follow(
    shell: plans.Shell, gcloud: Gcloud, workers: Sequence[Worker], cluster: Cluster | None
) -> None:
    """Shows the log of host 0 until it stops, and meanwhile tends the machines of the workers and
    hosts that were started anew."""
    log, looked_at = subprocess.Popen(gcloud.follow()), time.monotonic()
    has_others = gcloud.plan.hosts > 1
    try:
        while log.poll() is None:
            for worker in workers:
                worker.tend(shell, cluster)
            if has_others and time.monotonic() - looked_at > HOSTS_SECONDS:
                looked_at = time.monotonic()
                with contextlib.suppress(subprocess.CalledProcessError):
                    _start_idle(shell, gcloud)
            with contextlib.suppress(subprocess.TimeoutExpired):
                log.wait(POLL_SECONDS if workers or has_others else None)
    finally:
        log.kill()
        log.wait()


def _say_billed(shell: plans.Shell, gcloud: Gcloud) -> None:
    shell.report(f"machines of {gcloud.plan.name} that are left are billed until: {gcloud.again('delete')}")


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
    for part in (gcloud, *gcloud.workers):
        shell.run(part.create())
    _show_wait(gcloud)
    environment = _show_cluster(shell, gcloud) if is_whole else {}
    shell.report("2. this commit and its environment on every host")
    _install(shell, gcloud, environment)
    if is_whole:
        shell.report("3. the run on every host under launch/supervise.py, and the log of host 0")
        _start(shell, gcloud)
        if gcloud.workers:
            what = "the engine" if plan.engines else "Ray"
            shell.report(f"beside the log: {what} on each worker machine, as soon as it is there")
        for worker in gcloud.workers:
            _show_wait(worker)
            _install(shell, worker, environment)
            _start(shell, worker)
        shell.run(gcloud.follow())
        lost = [s for s in LOST if s != "FAILED" or gcloud.given.valid_until is None]
        shell.report(f"then: whenever the state is one of {', '.join(lost)}, delete --force and again "
                  "from 1; the run continues from its workdir")
    return 0


def _show_wait(gcloud: Gcloud) -> None:
    print(f'until [ "$({plans.show(gcloud.state())})" = ACTIVE ]; do sleep {POLL_SECONDS:g}; done')


def _show_cluster(shell: plans.Shell, gcloud: Gcloud) -> dict[str, str]:
    if found := gcloud.plan.engines:
        for command in found.starts(gcloud.plan.name):
            shell.run(command)
        shell.report("the engines and their folder, for every host")
        for name, value in found.environment.items():
            print(f"{name}={shlex.quote(value)}")
        return found.environment
    if not gcloud.workers:
        return {}
    shell.report("the address and the token of Ray, for every host")
    print(f"RAY_ADDRESS=$({plans.show(gcloud.address())}):{RAY_PORT}")
    print("RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')")
    return {"RAY_ADDRESS": "", "RAY_AUTH_TOKEN": ""}


def _look_at_clone(shell: plans.Shell, gcloud: Gcloud) -> None:
    """Refuses engines without a token, and a clone with a commit that cannot run; a dry run only
    prints the reason."""
    plan, problems = gcloud.plan, []
    if plan.engines:
        problems.append(external.problem(plan.engines, plans.secrets()))
    if not gcloud.given.git:
        problems.append(clone.problem(shell, plan))
    for problem in filter(None, problems):
        if not shell.is_dry:
            raise ValueError(problem)
        shell.report(f"refused as it stands: {problem}")
    if gcloud.given.git:
        return
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


def _begin(shell: plans.Shell, gcloud: Gcloud, environment: Mapping[str, str]) -> bool:
    """Starts the run unless it is active; returns False if the machines cannot be reached."""
    status = _status(shell, gcloud, gcloud.nodes[0])
    if status is None:
        return False
    if status.is_running:
        _check_same(gcloud.plan, status)
        return _is_reached(shell, gcloud, lambda: _start_idle(shell, gcloud))

    def start():
        _install(shell, gcloud, environment)
        _start(shell, gcloud)

    return _is_reached(shell, gcloud, start)


def _is_reached(shell: plans.Shell, gcloud: Gcloud, act: Callable[[], None]) -> bool:
    """Does what `act` does on the machines; returns False if they cannot be reached."""
    try:
        act()
    except subprocess.CalledProcessError as error:
        can_ask = all(_status(shell, gcloud, node) is not None for node in gcloud.nodes)
        if error.returncode != LOST_TOUCH and can_ask:
            raise
        return False
    return True


def _start_idle(shell: plans.Shell, gcloud: Gcloud) -> None:
    """Starts the run on all hosts if one of them was started anew, and has no run."""
    if gcloud.plan.hosts == 1:
        return
    texts = [shell.read(gcloud.ask(node))[1] for node in gcloud.nodes]
    statuses = [status for text in texts for status in Status.parse_all(text)]
    if any(not status.is_running and status.code is None for status in statuses):
        shell.report("the run is started on the hosts that do not have it")
        _start(shell, gcloud)


def _check_same(plan: plans.Plan, status: Status) -> None:
    if status.arguments not in (None, plan.arguments):
        raise ValueError(
            f"{plan.name} runs already, with {shlex.join(status.arguments)}; this would be "
            f"{shlex.join(plan.arguments)}: see its `logs`, `stop` it, or give another --name"
        )


def _install(shell: plans.Shell, gcloud: Gcloud, environment: Mapping[str, str]) -> None:
    """Installs the code, its packages, and any secrets and `environment` on every host."""
    name, git, private = gcloud.plan.name, gcloud.given.git, plans.secrets() | environment
    with contextlib.nullcontext() if git and not private else clone.folder(shell) as folder:
        if git:
            for node in gcloud.nodes:
                shell.run(gcloud.ssh(node, clone.fetch(name, git)))
        else:
            archive = clone.inside(folder, "code.tar.gz")
            shell.run(clone.archive(archive))
            for node in gcloud.nodes:
                shell.run(gcloud.scp(archive, node, f"{name}.tar.gz"))
                shell.run(gcloud.ssh(node, f"mkdir -p {name} && tar -xzf {name}.tar.gz -C {name}"))
        if private:
            path = clone.inside(folder, "environment")
            clone.write_secrets(shell, path, private)
            for node in gcloud.nodes:
                shell.run(gcloud.scp(path, node, SECRETS_FILE))
    setup = f"bash {name}/launch/on_vm.sh setup"
    for node in gcloud.nodes:
        shell.run(gcloud.ssh(node, setup if private else f"rm -f {SECRETS_FILE} && {setup}"))


def _start(shell: plans.Shell, gcloud: Gcloud) -> None:
    for command in gcloud.starts():
        shell.run(command)


def status(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the state of the machines, and of the run on every host."""
    codes = []
    for part in (gcloud, *gcloud.workers):
        commands = [part.ask(node) for node in part.nodes]
        if shell.is_dry:
            for command in [part.state(), *commands]:
                shell.run(command)
            continue
        state = _state(shell, part)
        shell.report(f"{part.plan.name}: {state or 'there is none'}")
        codes += [shell.code(command) for command in commands if state == "ACTIVE"]
    for host in external.hosts_of(gcloud.given):
        command = external.command(host, gcloud.plan.name, "status")
        codes.append(shell.run(command) or 0 if shell.is_dry else shell.code(command))
    return max(codes, default=0)


def logs(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Shows the log of host 0 until the run ends."""
    if shell.is_dry:
        shell.run(gcloud.follow())
        return 0
    return shell.code(gcloud.follow())


def stop(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Asks the run to save and to end, on every host."""
    name, hosts = gcloud.plan.name, external.hosts_of(gcloud.given)
    shell.run_all([
        *(part.on_vm(node, "stop") for part in (gcloud, *gcloud.workers) for node in part.nodes),
        *(external.command(host, name, "stop") for host in hosts),
    ])
    return 0


def delete(shell: plans.Shell, gcloud: Gcloud) -> int:
    """Returns the machines to the cloud."""
    shell.run_all([part.delete() for part in (gcloud, *gcloud.workers)])
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
    plans.add_workers(parser)
    external.add_flags(parser)
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
