"""Runs a config on a GKE cluster, as a JobSet or through xpk.
`manifest` prints the JobSet that `run` applies: one Job for each slice, one Pod for each host. A
Pod that exits with 1 or 2 ends the run. Any other failure, such as 42 for an interruption, restarts
all Pods, at most --max_restarts times, and the run continues from its workdir. HF_TOKEN and other
secrets go from the environment into a Secret for the Pods. No manifest holds them. --dry-run prints
the commands and runs nothing.

Examples:

    python launch/gke/jobset.py run --image=IMAGE --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=gs://BUCKET/gsm8k
    python launch/gke/jobset.py logs --config=configs/gsm8k_qwen25_0p5b.py:grpo
"""

import argparse
import json
import math
import pathlib
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import plan as plans

from jaxrl_tis.aot.flags import init_args

# From the signal to the kill: config.checkpoint.grace, and 50 s to reach a place to stop and to save.
STEP_GRACE, SAVE_SECONDS = 10.0, 50
GRACE_FLAG = "--config.checkpoint.grace="
FINAL_CODES = [1, 2]

MANIFEST = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  annotations:
    # The Pods of a slice on the nodes of one slice.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: {max_restarts}
    rules:
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: {slices}
      template:
        spec:
          parallelism: {hosts}
          completions: {hosts}
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: run
                  operator: In
                  values: {final}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
{placement}\
              containers:
                - name: run
                  image: {image}
                  workingDir: /jaxrl_tis
                  command: [{command}]
                  args:
{args}
{environment}\
{device}\
{volumes}\
"""
# Of every Pod with chips.
PLACEMENT = """\
nodeSelector:
  cloud.google.com/gke-tpu-accelerator: {label}
  cloud.google.com/gke-tpu-topology: {shape}
{capacity}\
tolerations:
  - key: google.com/tpu
    operator: Exists
"""
ENVIRONMENT = """\
env:
  - name: LIBTPU_INIT_ARGS
    value: {flags}
  - name: PYTHONUNBUFFERED
    value: "1"
{variables}\
envFrom:
  - secretRef:
      name: {name}
      optional: true
"""
DEVICE = """\
securityContext:
  privileged: true
resources:
  limits:
    google.com/tpu: {chips}
volumeMounts:
  - name: shared-memory
    mountPath: /dev/shm
"""
VOLUMES = """\
volumes:
  - name: shared-memory
    emptyDir:
      medium: Memory
"""
SPOT = 'cloud.google.com/gke-spot: "true"\n'
RESERVATION = "cloud.google.com/reservation-name: {}\n"


def grace(plan: plans.Plan) -> int:
    """Returns the seconds from the signal to stop until a Pod is killed."""
    given = [word.removeprefix(GRACE_FLAG) for word in plan.overrides if word.startswith(GRACE_FLAG)]
    try:
        return math.ceil(float(given[-1] if given else STEP_GRACE)) + SAVE_SECONDS
    except (ValueError, OverflowError):
        raise ValueError(
            f"{GRACE_FLAG}{given[-1]} is not a number of seconds; give one, as in {GRACE_FLAG}30"
        ) from None


def pod(
    name: str, topology: plans.Topology, given: argparse.Namespace, depth: int, variables: str = ""
) -> dict[str, str]:
    """Returns the parts of a Pod of one host of a slice, by their names in a manifest.

    Args:
      name: of the Secret that it reads.
      depth: spaces before the fields of its spec; those of its container are 4 deeper.
      variables: further entries of the environment.
    """
    quoted, capacity = json.dumps, SPOT if given.spot else ""
    if given.reservation is not None:
        capacity = RESERVATION.format(quoted(given.reservation))
    inner = lambda text: textwrap.indent(text, "  ")
    parts = {
        "placement": PLACEMENT.format(
            label=topology.offer.label, shape=topology.shape, capacity=inner(capacity)
        ),
        "environment": ENVIRONMENT.format(
            name=name, flags=quoted(init_args(topology.kind)), variables=inner(variables)
        ),
        "device": DEVICE.format(chips=topology.chips_per_host),
        "volumes": VOLUMES,
    }
    depths = {"environment": depth + 4, "device": depth + 4}
    return {n: textwrap.indent(text, " " * depths.get(n, depth)) for n, text in parts.items()}


def manifest(
    plan: plans.Plan, given: argparse.Namespace, wrapper: Sequence[str] = (), variables: str = ""
) -> str:
    """Returns the JobSet of a plan. `wrapper` is a command that runs that of the Pods, `variables`
    further entries of their environment."""
    topology, quoted = plan.topology, json.dumps
    return MANIFEST.format(
        name=plan.name, max_restarts=given.max_restarts, slices=topology.num_slices,
        hosts=topology.hosts_per_slice, final=FINAL_CODES, grace=grace(plan),
        command=", ".join([*wrapper, "python", "-m", "jaxrl_tis.main"]), image=quoted(given.image),
        args="\n".join(f"                    - {quoted(word)}" for word in plan.arguments),
        **pod(plan.name, topology, given, 14, variables),
    )


def xpk(plan: plans.Plan, given: argparse.Namespace) -> list[str]:
    """Returns the xpk command that runs a plan. xpk has its own rule for exit codes: it restarts
    after 42 and signals."""
    flags = init_args(plan.topology.kind)
    return [
        "xpk", "workload", "create", f"--cluster={given.cluster}", f"--workload={plan.name}",
        f"--tpu-type={plan.topology.accelerator}", f"--num-slices={plan.topology.num_slices}",
        f"--docker-image={given.image}", f"--max-restarts={given.max_restarts}",
        f"--termination-grace-period-seconds={grace(plan)}",
        *[f"--env=LIBTPU_INIT_ARGS={flags}"] * bool(flags), *["--spot"] * given.spot,
        *_flags(given, "reservation", "project", "zone"),
        f"--command=cd /jaxrl_tis && python -m jaxrl_tis.main {shlex.join(plan.arguments)}",
    ]


def _flags(given: argparse.Namespace, *names: str) -> list[str]:
    return [f"--{name}={value}" for name in names if (value := getattr(given, name))]


def apply(shell: plans.Shell, text: str) -> None:
    """Gives the objects of a manifest to the cluster."""
    command = ["kubectl", "apply", "-f", "-"]
    if shell.is_dry:
        print(f"{plans.show(command)} <<'END'\n{text.rstrip()}\nEND")
    else:
        subprocess.run(command, input=text, text=True, check=True)


def keep_secrets(shell: plans.Shell, name: str, found: dict[str, str]) -> None:
    """Stores secrets in a Secret, by server-side apply: a client would copy them into an
    annotation."""
    create = ["kubectl", "create", "secret", "generic", name, "--from-env-file=/dev/stdin",
              "--dry-run=client", "--output=yaml"]
    apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "--filename=-"]
    if shell.is_dry:
        lines = " ".join(f'"{key}=${key}"' for key in found)
        print(f"printf '%s\\n' {lines} |\n  {plans.show(create)} |\n  {plans.show(apply)}")
    else:
        lines = "".join(f"{key}={value}\n" for key, value in found.items())
        made = subprocess.run(create, input=lines, text=True, check=True, stdout=subprocess.PIPE)
        subprocess.run(apply, input=made.stdout, text=True, check=True)


def show_plan(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Prints the head of a dry run's script."""
    if shell.is_dry:
        print("set -euo pipefail")
        shell.report(plans.sizes(plan))
        for line in plans.cost(plan, given):
            shell.report(line)


def run(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Starts the run."""
    show_plan(shell, plan, given)
    if given.xpk:
        if plans.secrets():
            shell.report("xpk writes an environment into its manifest: secrets are not passed; "
                      "without --xpk they are")
        shell.run(xpk(plan, given))
        return
    if found := plans.secrets():
        keep_secrets(shell, plan.name, found)
    apply(shell, manifest(plan, given))


def status(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Shows the JobSet and its Pods."""
    shell.run(["kubectl", "get", "jobset", plan.name])
    shell.run(["kubectl", "get", "pods", f"--selector={_selector(plan)}", "--output=wide"])


def logs(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Shows the log of the first host."""
    first = f"{_selector(plan)},jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    shell.run(["kubectl", "logs", "--follow", "--tail=-1", f"--selector={first}"])


def delete(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Deletes the JobSet and its Secret; the workdir stays."""
    if given.xpk:
        shell.run(["xpk", "workload", "delete", f"--cluster={given.cluster}",
                   f"--workload={plan.name}", *_flags(given, "project", "zone")])
        return
    shell.run_all(deletions(plan))


def deletions(plan: plans.Plan) -> list[list[str]]:
    return [["kubectl", "delete", kind, plan.name, "--ignore-not-found"] for kind in ("jobset", "secret")]


def _selector(plan: plans.Plan) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={plan.name}"


COMMANDS = {
    "manifest": lambda shell, plan, given: print(manifest(plan, given), end=""),
    "run": run, "status": status, "logs": logs, "delete": delete,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", help="image built from launch/gke/Dockerfile")
    parser.add_argument("--max_restarts", type=int, default=20, help="limit on restarts")


def checked_plan(given: argparse.Namespace, overrides: Sequence[str]) -> plans.Plan:
    """Returns the plan of the parsed flags; ValueError if the Pods could not run it."""
    if given.command in ("manifest", "run") and not given.image:
        raise ValueError("--image is missing; build one with launch/gke/Dockerfile")
    plan = plans.make(given, overrides, given.command in ("manifest", "run"))
    if given.command in ("manifest", "run") and not plan.is_on_bucket:
        raise ValueError(
            f"--workdir={plan.workdir} would be lost with the Pod; give "
            "--workdir=gs://BUCKET/FOLDER"
        )
    return plan


def main() -> None:
    parser = plans.parser(__doc__, COMMANDS)
    add_flags(parser)
    parser.add_argument("--xpk", action="store_true", help="use xpk; needs --cluster")
    for name in ("cluster", "project", "zone"):
        parser.add_argument(f"--{name}", help="passed on to xpk")
    given, overrides = parser.parse_known_args()
    if given.xpk and not given.cluster:
        raise ValueError("--xpk needs a cluster; give --cluster=NAME")
    plan = checked_plan(given, overrides)
    if plan.workers is not None:
        raise ValueError(
            f"--config={given.config} samples on {plan.workers.num_slices} workers, and a JobSet has none; "
            "use launch/gke/raycluster.py"
        )
    COMMANDS[given.command](plans.Shell(given.dry_run), plan, given)


if __name__ == "__main__":
    plans.main(main)
