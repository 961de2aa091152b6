"""The gcloud commands of launch/tpu_vm.py."""

import argparse
import dataclasses
import re
import shlex

import plan as plans

SECRETS_FILE = ".jaxrl_tis_env"
DURATION = r"(?=.*\d)P?(\d+[wd])*(T?(\d+[hms])+)?"  # as gcloud reads it: 2h, 1d12h, PT90M


class Gcloud:
    """Builds the gcloud commands of a plan.

    Attributes:
      workers: the commands for each machine of a rollout worker, a queued resource of its own.
      is_worker: whether these are the commands of such a machine.
    """

    def __init__(self, plan: plans.Plan, given: argparse.Namespace, is_worker: bool = False):
        self.plan, self.given, self.is_worker = plan, given, is_worker
        self.workers = [self._worker(i) for i in range(plan.workers.num_slices if plan.workers else 0)]
        count = 1 if is_worker else given.num_slices
        self.nodes = [plan.name] if count == 1 else [f"{plan.name}-{i}" for i in range(count)]
        where = {"project": given.project, "zone": given.zone}
        self._where = [f"--{name}={value}" for name, value in where.items() if value]
        self._within = [*self._where, *["--internal-ip"] * given.internal_ips]

    def _worker(self, index: int) -> "Gcloud":
        machine = dataclasses.replace(self.plan.workers, num_slices=1)
        name = f"{self.plan.name}-worker-{index}"
        plan = dataclasses.replace(self.plan, name=name, topology=machine, workers=None)
        return Gcloud(plan, self.given, is_worker=True)

    def _queued(self, verb: str, *rest: str, track: tuple[str, ...] = ()) -> list[str]:
        return ["gcloud", *track, "compute", "tpus", "queued-resources", verb, self.plan.name,
                *self._where, *rest]

    def create(self) -> list[str]:
        topology = self.plan.topology
        nodes = [f"--node-id={self.plan.name}"]
        if topology.num_slices > 1:
            nodes = [f"--node-prefix={self.plan.name}", f"--node-count={topology.num_slices}"]
        return self._queued(
            "create", *nodes, f"--accelerator-type={topology.accelerator}",
            f"--runtime-version={self.given.runtime or topology.offer.runtime}",
            *self._capacity(), *self._network(),
            track=("alpha",) * (self.given.reservation is not None),
        )

    def _capacity(self) -> list[str]:
        """Returns the flags for spot, reserved and time-limited machines. Only gcloud alpha
        accepts the name of a reservation."""
        given, flags = self.given, []
        if given.reservation is not None:
            flags = [f"--reservation={given.reservation}"]
        elif given.reserved or given.spot:
            flags = ["--reserved" if given.reserved else "--spot"]
        if given.valid_until is not None:
            kind = "duration" if re.fullmatch(DURATION, given.valid_until, re.I) else "time"
            flags.append(f"--valid-until-{kind}={given.valid_until}")
        return flags

    def _network(self) -> list[str]:
        """Returns the flags for the network and the service account of the machines."""
        values = {"network": self.given.network, "subnetwork": self.given.subnetwork,
                  "service-account": self.given.service_account}
        flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return [*flags, *["--internal-ips"] * self.given.internal_ips]

    def state(self) -> list[str]:
        return self._queued("describe", "--format=value(state.state)")

    def reason(self) -> list[str]:
        """Returns the command that prints why a request failed."""
        return self._queued("describe", "--format=value(state.failedData.error.message)")

    def delete(self) -> list[str]:
        return self._queued("delete", "--force", "--quiet")

    def ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *self._within,
                f"--worker={worker}", f"--command={script}"]

    def scp(self, source: str, node: str, target: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "scp", source, f"{node}:{target}",
                *self._within, "--worker=all"]

    def on_vm(self, node: str, verb: str, worker: str = "all") -> list[str]:
        return self.ssh(node, f"bash {self.plan.name}/launch/on_vm.sh {verb}", worker)

    def ask(self, node: str, worker: str = "all") -> list[str]:
        """Returns the command that prints the status of the run. Hosts without the code print a
        line too, unlike unreachable hosts."""
        script = f"{self.plan.name}/launch/on_vm.sh"
        return self.ssh(node, f"if [ -e {script} ]; then bash {script} status; "
                        "else echo not running: no code; fi", worker)

    def starts(self) -> list[list[str]]:
        """Returns the commands that start the run, or Ray or an engine on the machine of a worker."""
        plan, kind = self.plan, self.plan.topology.kind
        words = ["work", kind] if self.is_worker else ["start", kind, *plan.arguments]
        if self.is_worker and plan.engines:
            words = plan.engines.verb(plan.name)
        return [self.on_vm(node, shlex.join(words)) for node in self.nodes]

    def address(self) -> list[str]:
        """Returns the command that prints the internal address of host 0."""
        return ["gcloud", "compute", "tpus", "tpu-vm", "describe", self.nodes[0], *self._where,
                "--format=value(networkEndpoints[0].ipAddress)"]

    def token(self) -> list[str]:
        """Returns the command that prints Ray's token on host 0, if a run was started there."""
        read = f"sed -n s/^RAY_AUTH_TOKEN=//p {SECRETS_FILE}"
        return self.ssh(self.nodes[0], f"if [ -e {SECRETS_FILE} ]; then {read}; fi", "0")

    def follow(self) -> list[str]:
        return self.on_vm(self.nodes[0], "follow", "0")

    def again(self, command: str) -> str:
        """Returns the command line of this launcher for the same machines."""
        names = ("config", "name", "accelerator", "project", "zone", "worker_accelerator", "num_workers")
        words = {name: getattr(self.given, name) for name in names}
        if self.given.num_slices > 1:
            words["num_slices"] = self.given.num_slices
        flags = [f"--{name}={value}" for name, value in words.items() if value]
        flags += ["--internal-ips"] * self.given.internal_ips
        return shlex.join(["python", "launch/tpu_vm.py", command, *flags])
