"""kubectl is a script that writes down its calls."""

import os
import pathlib
import re
import subprocess
import sys

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.launch.jobset_test import OBJECT, SCHEMA as JOBSET

ROOT = pathlib.Path(__file__).parents[2]
SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
SCRIPT = ROOT / "launch" / "gke" / "raycluster.py"
SHIPPED = (ROOT / "launch" / "gke" / "raycluster.yaml").read_text()
NAME = "gsm8k-qwen25-0p5b-grpo"
CONFIG = "--config=configs/gsm8k_qwen25_0p5b.py:grpo"
RUN = ["run", "--image=i", CONFIG, "--workdir=gs://b/x", "--worker_accelerator=v5litepod-4"]

# ray.io/v1 (ray-project/kuberay, ray-operator/config/crd/bases/ray.io_rayclusters.yaml), as far as a
# manifest here may use it; the templates of Pods are checked by kubernetes-validate.
COUNT = {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
TEMPLATE = OBJECT | {"required": ["spec"], "properties": {
    "metadata": {"type": "object"}, "spec": {"type": "object"}}}
SCHEMA = OBJECT | {
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": OBJECT | {
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"},
                "suspend": {"type": "boolean"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "authOptions": OBJECT | {"properties": {
                    "mode": {"enum": ["disabled", "token"]}, "secretName": {"type": "string"},
                    "enableK8sTokenAuth": {"type": "boolean"}}},
                "headGroupSpec": OBJECT | {"required": ["template"], "properties": {
                    "rayStartParams": STRINGS, "template": TEMPLATE, "labels": STRINGS,
                    "resources": STRINGS, "serviceType": {"type": "string"}}},
                "workerGroupSpecs": {"type": "array", "items": OBJECT | {
                    # By the CRD, and the operator needs both bounds where it does not scale.
                    "required": ["groupName", "minReplicas", "maxReplicas", "template"],
                    "properties": {
                        "groupName": {"type": "string"}, "replicas": COUNT, "minReplicas": COUNT,
                        "maxReplicas": COUNT, "numOfHosts": COUNT, "rayStartParams": STRINGS,
                        "template": TEMPLATE, "labels": STRINGS, "resources": STRINGS,
                        "suspend": {"type": "boolean"}},
                }},
            },
        },
    },
}


def call(*arguments, **environment):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
                          env=os.environ | environment, cwd=ROOT)


def check_pod(spec):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def variables(container):
    """Returns the environment of a container; what comes from a Secret as its name and its key."""
    return {
        entry["name"]: entry["value"] if "value" in entry
        else tuple(entry["valueFrom"]["secretKeyRef"].values()) for entry in container["env"]
    }


def parts(text):
    """Returns the RayCluster, the Pods of its head and its workers, the JobSet and its Pod."""
    cluster, jobset = yaml.safe_load_all(text)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    [group] = cluster["spec"]["workerGroupSpecs"]
    [replicated] = jobset["spec"]["replicatedJobs"]
    learner = replicated["template"]["spec"]["template"]["spec"]
    return cluster, head, group["template"]["spec"], jobset, learner


def test_the_shipped_manifest_is_valid():
    cluster, head, worker, jobset, learner = parts(SHIPPED)
    jsonschema.validate(cluster, SCHEMA)
    jsonschema.validate(jobset, JOBSET)
    for pod in (head, worker, learner):
        check_pod(pod)


@pytest.mark.parametrize("old, new", [
    ("numOfHosts: 1", "numOfHost: 1"), ('num-cpus: "0"', "num-cpus: 0"), ("replicas: 2", 'replicas: "2"'),
    ("      maxReplicas: 2\n", ""), ("groupName: rollout", "groupname: rollout"),
])
def test_the_schema_would_see_a_mistake(old, new):
    cluster = next(yaml.safe_load_all(SHIPPED.replace(old, new, 1)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, SCHEMA)


def test_the_validator_would_see_a_mistake():
    _, head, worker, _, _ = parts(SHIPPED.replace("tcpSocket: {port: 6380}", "tcpSockets: {port: 6380}"))
    check_pod(head)
    with pytest.raises(kubernetes_validate.ValidationError, match="tcpSockets"):
        check_pod(worker)


def test_what_the_manifest_asks_for():
    cluster, head, worker, _, learner = parts(SHIPPED)
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert [group[name] for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")] == [2, 2, 2, 1]
    asked = [pod["containers"][0]["resources"]["limits"].get("google.com/tpu") for pod in (head, worker, learner)]
    assert asked == [None, 4, 8]
    shapes = [pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] for pod in (worker, learner)]
    assert shapes == ["2x2", "2x4"] and "nodeSelector" not in head
    for pod in (worker, learner):
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
        assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {"--config.rollout.driver=ray", "--config.rollout.workers=2",
            "--config.rollout.tpus_per_worker=4"} <= set(learner["containers"][0]["args"])


def test_the_learner_joins_the_cluster_and_offers_nothing():
    cluster, head, _, _, learner = parts(SHIPPED)
    name, [container] = cluster["metadata"]["name"], learner["containers"]
    assert container["command"] == ["bash", "launch/on_ray.sh", "learner", "python", "-m", "jaxrl_tis.main"]
    # The Service that KubeRay makes for the head, at the port of its container.
    port = head["containers"][0]["ports"][0]["containerPort"]
    assert variables(container)["RAY_ADDRESS"] == f"{name}-head-svc:{port}"
    started = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    assert started == {"num-cpus": "0", "port": f"{port}", "include-dashboard": "false",
                       "disable-usage-stats": "true"}


def test_all_members_have_one_token_of_a_secret():
    cluster, *pods = parts(SHIPPED)
    secret = f"{cluster['metadata']['name']}-ray", "auth_token"
    for pod in (pods[0], pods[1], pods[3]):
        told = variables(pod["containers"][0])
        assert (told["RAY_AUTH_MODE"], told["RAY_AUTH_TOKEN"]) == ("token", secret)


@pytest.mark.parametrize("port, index", [(6379, 0), (6380, 1)])
def test_the_probes_ask_ports_that_ray_listens_at(port, index):
    """Those that KubeRay adds ask a dashboard, which the image does not have."""
    cluster, *pods = parts(SHIPPED)
    [container] = pods[index]["containers"]
    for name in ("readinessProbe", "livenessProbe"):
        assert container[name]["tcpSocket"] == {"port": port}
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["rayStartParams"] == {"node-manager-port": "6380"}


@pytest.mark.all
def test_several_hosts_of_a_learner_are_one_jobset():
    done = call("manifest", "--image=i", "--config=configs/dapo_qwen25_32b.py", "--workdir=gs://b/x",
                "--worker_accelerator=v5p-8", "--num_workers=3")
    _, _, worker, jobset, learner = parts(done.stdout)
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 16
    assert worker["containers"][0]["resources"]["limits"]["google.com/tpu"] == 4
    assert variables(learner["containers"][0])["RAY_ADDRESS"] == "dapo-qwen25-32b-head-svc:6379"


# Commands


@pytest.mark.all
def test_run_gives_a_new_token_and_the_manifest_to_kubectl(cloud):
    cloud.answer(create=[(0, "kind: Secret")])
    shown = call("manifest", *RUN[1:]).stdout
    tokens = set()
    for _ in range(2):
        done = call(*RUN, HF_TOKEN="hf_very_secret")
        assert done.returncode == 0, done.stderr
        make, _, make_more, _, apply = cloud.calls()[-5:]
        assert make[4:6] == [f"{NAME}-ray", "--from-env-file=/dev/stdin"] and make_more[4] == NAME
        assert apply == ["kubectl", "apply", "-f", "-"] and cloud.inputs()[-1] == shown
        lines, _, more = cloud.inputs()[-5:-2]
        tokens.add(re.fullmatch(r"auth_token=([0-9a-f]{64})\n", lines)[1])
        assert more == "HF_TOKEN=hf_very_secret\n"
        assert not any(word in f"{done.stdout}{cloud.calls()}{shown}" for word in (*tokens, "hf_very_secret"))
    assert len(tokens) == 2


@pytest.mark.all
def test_the_script_of_a_dry_run_does_what_the_run_does(cloud, tmp_path):
    cloud.answer(create=[(0, "kind: Secret")])
    call(*RUN)
    calls, inputs = cloud.calls(), cloud.inputs()
    shown = call(*RUN, "--dry-run").stdout
    assert len(cloud.calls()) == len(calls)
    script = tmp_path / "script.sh"
    script.write_text(f"#!/usr/bin/env bash\n{shown}")
    checked = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    subprocess.run(["bash", str(script)], check=True)
    hidden = lambda told: re.sub(r"auth_token=[0-9a-f]{64}", "auth_token=...", told)
    told, said = map(str, cloud.calls()[len(calls):]), map(hidden, cloud.inputs()[len(calls):])
    both = sorted(zip(told, said, strict=True))
    assert both == sorted(zip(map(str, calls), map(hidden, inputs), strict=True))


@pytest.mark.cases("delete-words2")
@pytest.mark.parametrize("command, words", [
    ("status", [["get", "jobset", NAME], ["get", "pods"], ["get", "raycluster", NAME],
                ["get", "pods", f"--selector=ray.io/cluster={NAME}"]]),
    ("logs", [["logs", "--follow"]]),
    ("delete", [["delete", "jobset", NAME], ["delete", "secret", NAME], ["delete", "raycluster", NAME],
                ["delete", "secret", f"{NAME}-ray"]]),
])
def test_the_other_commands(cloud, command, words):
    assert call(command, CONFIG).returncode == 0
    for told, wanted in zip(cloud.calls(), words, strict=True):
        assert told[1:len(wanted) + 1] == wanted


@pytest.mark.all
@pytest.mark.parametrize("arguments, said", [
    (RUN[:-1], "--worker_accelerator is missing"),
    ([*RUN[:-1], "--worker_accelerator=v5litepod-16"], "has 4 hosts, and a rollout worker uses one"),
    ([*RUN, "--num_workers=0"], "--num_workers=0 is below 1"),
    ([*RUN[:3], RUN[4]], "would be lost with the Pod"),
    (["run", *RUN[2:]], "--image is missing"),
    ([*RUN, "--xpk"], "unknown arguments --xpk"),
])
def test_refusals_are_one_line(cloud, arguments, said):
    done = call(*arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert cloud.calls() == []
