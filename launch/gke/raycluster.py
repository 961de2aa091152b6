"""Runs an asynchronous config on a GKE cluster: the learner as a JobSet, rollout workers on Ray.

`manifest` prints the two objects that `run` applies. A RayCluster of KubeRay has a head without
accelerators and one Pod for each rollout worker. The JobSet is that of launch/gke/jobset.py; each of
its Pods joins the Ray cluster without offering its chips. A lost worker Pod is replaced while the
learner continues. A new token, in a Secret NAME-ray, admits members to the cluster. --dry-run prints
the commands and runs nothing.

Examples:

    python launch/gke/raycluster.py run --image=IMAGE --config=CONFIG --workdir=gs://BUCKET/RUN --worker_accelerator=v5litepod-4
    python launch/gke/raycluster.py logs --config=CONFIG
"""  # noqa: E501

import argparse
import json
import pathlib
import secrets
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jobset
import plan as plans

RAY_PORT, NODE_PORT = 6379, 6380

TOKEN = """\
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {name}-ray
      key: auth_token
"""
ADDRESS = """\
- name: RAY_ADDRESS
  value: {name}-head-svc:{port}
"""
# Those of KubeRay ask a dashboard, which the image lacks.
PROBES = """\
readinessProbe:
  tcpSocket: {{port: {port}}}
livenessProbe:
  tcpSocket: {{port: {port}}}
  initialDelaySeconds: 60
"""
MANIFEST = """\
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: {name}
spec:
  headGroupSpec:
    rayStartParams:
      num-cpus: "0"
      port: "{ray_port}"
      include-dashboard: "false"
      disable-usage-stats: "true"
    template:
      spec:
        containers:
          - name: ray-head
            image: {image}
            workingDir: /jaxrl_tis
            env:
{head_token}\
            ports:
              - name: gcs-server
                containerPort: {ray_port}
{head_probes}\
            resources:
              limits:
                cpu: 2
                memory: 4Gi
  workerGroupSpecs:
    - groupName: rollout
      replicas: {workers}
      minReplicas: {workers}
      maxReplicas: {workers}
      numOfHosts: 1
      rayStartParams:
        node-manager-port: "{node_port}"
      template:
        spec:
{placement}\
          containers:
            - name: ray-worker
              image: {image}
              workingDir: /jaxrl_tis
{environment}\
{worker_probes}\
{device}\
{volumes}\
---
"""


def manifest(plan: plans.Plan, given: argparse.Namespace) -> str:
    """Returns the RayCluster and the JobSet of a plan."""
    workers, quoted = plan.workers, json.dumps
    token = TOKEN.format(name=plan.name)
    probes = lambda port, depth: textwrap.indent(PROBES.format(port=port), " " * depth)
    cluster = MANIFEST.format(
        name=plan.name, image=quoted(given.image), ray_port=RAY_PORT, node_port=NODE_PORT,
        head_token=textwrap.indent(token, " " * 14), head_probes=probes(RAY_PORT, 12),
        workers=workers.num_slices, worker_probes=probes(NODE_PORT, 14),
        **jobset.pod(plan.name, workers, given, 10, token),
    )
    joins = token + ADDRESS.format(name=plan.name, port=RAY_PORT)
    return cluster + jobset.manifest(plan, given, ["bash", "launch/on_ray.sh", "learner"], joins)


def run(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Starts the cluster and the run."""
    jobset.show_plan(shell, plan, given)
    if shell.is_dry:
        print("auth_token=$(python3 -c 'import secrets; print(secrets.token_hex(32))')")
    jobset.keep_secrets(shell, f"{plan.name}-ray", {"auth_token": secrets.token_hex(32)})
    if found := plans.secrets():
        jobset.keep_secrets(shell, plan.name, found)
    jobset.apply(shell, manifest(plan, given))


def status(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Shows the JobSet, the RayCluster and their Pods."""
    jobset.status(shell, plan, given)
    shell.run(["kubectl", "get", "raycluster", plan.name])
    shell.run(["kubectl", "get", "pods", f"--selector=ray.io/cluster={plan.name}", "--output=wide"])


def delete(shell: plans.Shell, plan: plans.Plan, given: argparse.Namespace) -> None:
    """Deletes the JobSet, the RayCluster and their Secrets; the workdir stays."""
    own = (("raycluster", plan.name), ("secret", f"{plan.name}-ray"))
    commands = [["kubectl", "delete", kind, name, "--ignore-not-found"] for kind, name in own]
    shell.run_all([*jobset.deletions(plan), *commands])


COMMANDS = {
    "manifest": lambda shell, plan, given: print(manifest(plan, given), end=""),
    "run": run, "status": status, "logs": jobset.logs, "delete": delete,
}


def main() -> None:
    parser = plans.parser(__doc__, COMMANDS)
    plans.add_workers(parser)
    jobset.add_flags(parser)
    parser.set_defaults(xpk=False)
    given, overrides = parser.parse_known_args()
    plan = jobset.checked_plan(given, overrides)
    if given.command in ("manifest", "run") and plan.workers is None:
        raise ValueError(
            "--worker_accelerator is missing; give the machine of a rollout worker, as v5litepod-4 "
            "(launch/gke/jobset.py runs a config without them)"
        )
    COMMANDS[given.command](plans.Shell(given.dry_run), plan, given)


if __name__ == "__main__":
    plans.main(main)
