"""kubectl and xpk are scripts that write down their calls."""

import math
import os
import pathlib
import subprocess
import sys

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxrl_tis import cli_flags
from jaxrl_tis.learner import setup

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "gke" / "jobset.py"
SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
MANIFESTS = sorted(ROOT / "launch" / "gke" / f"{name}.yaml" for name in ("two-slices", "v5e-8", "v5p-128"))
DAPO = "--config=configs/dapo_qwen25_32b.py"

# jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go), as far as
# a manifest here may use it; what is inside a Job is checked by kubernetes-validate.
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMA = OBJECT | {
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": OBJECT | {
            "required": ["replicatedJobs"],
            "properties": {
                "replicatedJobs": {"type": "array", "minItems": 1, "items": OBJECT | {
                    "required": ["name", "template"],
                    "properties": {
                        "name": {"type": "string"}, "replicas": {"type": "integer", "minimum": 0},
                        "template": OBJECT | {"required": ["spec"], "properties": {
                            "metadata": {"type": "object"}, "spec": {"type": "object"}}},
                    },
                }},
                "failurePolicy": OBJECT | {"properties": {
                    "maxRestarts": {"type": "integer", "minimum": 0},
                    "restartStrategy": {"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
                    "rules": {"type": "array", "items": OBJECT | {
                        "required": ["action"],
                        "properties": {
                            "name": {"type": "string"},
                            "action": {"enum": [
                                "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts",
                                "RestartJob", "RestartJobAndIgnoreMaxRestarts"]},
                            "onJobFailureReasons": {"type": "array", "items": {"enum": [
                                "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes",
                                "MaxFailedIndexesExceeded", "PodFailurePolicy"]}},
                            "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                        },
                    }},
                }},
                "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                "suspend": {"type": "boolean"},
            },
        },
    },
}


def call(*arguments, **environment):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
                          env=os.environ | environment, cwd=ROOT)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_valid(path):
    jobset = yaml.safe_load(path.read_text())
    jsonschema.validate(jobset, SCHEMA)
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"},
               "spec": replicated["template"]["spec"]}
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_validator_would_see_a_mistake():
    jobset = yaml.safe_load(MANIFESTS[0].read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job},
            kubernetes_validate.latest_version(), strict=True)


def test_the_shipped_manifests_are_what_the_script_writes(tmp_path):
    shipped = sorted((ROOT / "launch" / "gke").glob("*.yaml"))
    assert [path.stem for path in shipped] == ["raycluster", "two-slices", "v5e-8", "v5p-128"]
    script = (ROOT / "launch" / "gke" / "manifests.sh").read_text()
    script = script.replace(">launch/gke/", f">{tmp_path}/")
    script = script.replace('cd "$(dirname "${BASH_SOURCE[0]}")/../.."', f"cd {ROOT}")
    subprocess.run(["bash", "-c", script], check=True)
    for path in shipped:
        assert path.read_text() == (tmp_path / path.name).read_text()


@pytest.mark.parametrize("name, slices, hosts, chips, label, shape", [
    ("v5e-8", 1, 1, 8, "tpu-v5-lite-podslice", "2x4"),
    ("v5p-128", 1, 16, 4, "tpu-v5p-slice", "4x4x4"),
    ("two-slices", 2, 16, 4, "tpu-v5p-slice", "4x4x4"),
])
def test_what_the_manifests_ask_for(name, slices, hosts, chips, label, shape):
    text = (ROOT / "launch" / "gke" / f"{name}.yaml").read_text()
    [replicated] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (slices, hosts, hosts)
    assert container["resources"]["limits"]["google.com/tpu"] == chips
    selector = pod["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == label
    assert selector["cloud.google.com/gke-tpu-topology"] == shape
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert container["args"][1].startswith("--workdir=gs://")


@pytest.mark.all
def test_run_gives_the_manifest_to_kubectl(cloud):
    shown = call("manifest", "--image=i", DAPO, "--workdir=gs://b/x").stdout
    done = call("run", "--image=i", DAPO, "--workdir=gs://b/x")
    assert done.returncode == 0, done.stderr
    assert cloud.calls() == [["kubectl", "apply", "-f", "-"]] and cloud.inputs() == [shown]


SECRETS = {"HF_TOKEN": "hf_very_secret", "WANDB_API_KEY": "very 'secret' too"}
LINES = "".join(f"{name}={value}\n" for name, value in SECRETS.items())
MADE = "kind: Secret"


def test_a_secret_goes_to_the_cluster_and_into_no_manifest(cloud, launch, monkeypatch):
    cloud.answer(create=[(0, MADE)])
    done = call("run", "--image=i", DAPO, "--workdir=gs://b/x", **SECRETS)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    dry = launch("jobset", "run", "--dry-run", "--image=i", DAPO, "--workdir=gs://b/x")
    through_xpk = launch(
        "jobset", "run", "--xpk", "--cluster=c", "--image=i", DAPO, "--workdir=gs://b/x"
    )
    create, apply, manifest, _ = cloud.calls()
    assert create == ["kubectl", "create", "secret", "generic", "dapo-qwen25-32b",
                      "--from-env-file=/dev/stdin", "--dry-run=client", "--output=yaml"]
    # A client that applies leaves the whole object in an annotation.
    assert apply[:3] == ["kubectl", "apply", "--server-side"] and manifest[-1] == "-"
    lines, secret, jobset, _ = cloud.inputs()
    assert lines == LINES and secret == f"{MADE}\n"
    seen = f"{jobset}{done.stdout}{dry.stdout}{through_xpk.stdout}{cloud.calls()}"
    assert not any(value in seen for value in SECRETS.values())
    assert "secrets are not passed" in through_xpk.stdout


@pytest.mark.all
def test_the_script_of_a_dry_run_does_what_the_run_does(cloud, tmp_path):
    cloud.answer(create=[(0, MADE)])
    arguments = ["run", "--image=i", DAPO, "--workdir=gs://b/x"]
    call(*arguments, **SECRETS)
    calls, inputs = cloud.calls(), cloud.inputs()
    shown = call(*arguments, "--dry-run", **SECRETS).stdout
    script = tmp_path / "script.sh"
    script.write_text(f"#!/usr/bin/env bash\n{shown}")
    checked = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    subprocess.run(["bash", str(script)], check=True, env=os.environ | SECRETS)
    told = sorted(zip(map(str, cloud.calls()[len(calls):]), cloud.inputs()[len(calls):], strict=True))
    assert told == sorted(zip(map(str, calls), inputs, strict=True))


@pytest.mark.all
def test_xpk_gets_the_same_run(cloud):
    call("run", "--xpk", "--cluster=c", "--zone=z", "--image=i", "--spot", "--max_restarts=3",
         "--config=configs/gsm8k_qwen25_0p5b.py:ppo", "--workdir=gs://b/x", "--config.steps=7")
    [words] = cloud.calls()
    assert words == [
        "xpk", "workload", "create", "--cluster=c", "--workload=gsm8k-qwen25-0p5b-ppo",
        "--tpu-type=v5litepod-8", "--num-slices=1", "--docker-image=i", "--max-restarts=3",
        "--termination-grace-period-seconds=60",
        "--env=LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000", "--spot",
        "--zone=z", "--command=cd /jaxrl_tis && python -m jaxrl_tis.main "
        "--config=configs/gsm8k_qwen25_0p5b.py:ppo --workdir=gs://b/x --config.steps=7",
    ]


@pytest.mark.all
def test_xpk_deletes_where_it_ran(cloud):
    call("delete", "--xpk", "--cluster=c", "--zone=z", "--project=p", "--config=configs/gsm8k_qwen25_0p5b.py:ppo")
    assert cloud.calls() == [[
        "xpk", "workload", "delete", "--cluster=c", "--workload=gsm8k-qwen25-0p5b-ppo", "--project=p",
        "--zone=z",
    ]]


@pytest.fixture
def written(scripts):
    """(arguments) -> the Pod of the manifest, and the words for xpk."""
    jobset, plans = scripts("jobset"), scripts("plan")

    def read(*arguments):
        parser = plans.parser(jobset.__doc__, jobset.COMMANDS)
        given, overrides = parser.parse_known_args(["run", DAPO, "--workdir=gs://b/x", *arguments])
        vars(given).update(image="i", max_restarts=1, cluster="c", project=None, zone=None)
        plan = plans.make(given, overrides, True)
        [replicated] = yaml.safe_load(jobset.manifest(plan, given))["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"], jobset.xpk(plan, given)
    return read


def test_the_grace_period_is_that_of_the_config(scripts):
    from configs import default

    assert scripts("jobset").STEP_GRACE == default.get_config().checkpoint.grace


@pytest.mark.parametrize("arguments, seconds", [
    ([], 60), (["--config.checkpoint.grace=0"], 50), (["--config.checkpoint.grace=120.5"], 171),
])
def test_the_manifest_and_xpk_give_the_same_time_to_save(written, arguments, seconds):
    pod, words = written(*arguments)
    assert pod["terminationGracePeriodSeconds"] == seconds
    assert f"--termination-grace-period-seconds={seconds}" in words


@pytest.mark.parametrize("flag, label, value, word", [
    ("--spot", "cloud.google.com/gke-spot", "true", "--spot"),
    ("--reservation=r", "cloud.google.com/reservation-name", "r", "--reservation=r"),
])
def test_which_nodes_are_taken(written, flag, label, value, word):
    pod, words = written(flag)
    assert pod["nodeSelector"][label] == value and word in words
    plain, words = written()
    assert label not in plain["nodeSelector"] and word not in words


@pytest.mark.all
@pytest.mark.parametrize("command, verbs", [
    ("status", ["get", "get"]), ("logs", ["logs"]), ("delete", ["delete", "delete"]),
])
def test_the_other_commands(cloud, command, verbs):
    assert call(command, DAPO).returncode == 0
    assert [words[1] for words in cloud.calls()] == verbs
    assert all("--ignore-not-found" in words for words in cloud.calls()) == (command == "delete")
    dry = call(command, DAPO, "--dry-run")
    assert dry.stdout.count("kubectl") == len(verbs) and len(cloud.calls()) == len(verbs)


@pytest.mark.all
@pytest.mark.parametrize("command", ["status", "logs", "delete"])
def test_the_other_commands_need_no_slice(cloud, command):
    done = call(command, "--config=configs/default.py", "--name=mine")
    assert done.returncode == 0 and "mine" in f"{cloud.calls()}", done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_rows_of_a_manifest_divide_its_chips(path):
    """Else all Pods end with code 2 once the slices are there."""
    [replicated] = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    config = cli_flags.parsed([word for word in container["args"] if word.startswith("--config")])
    chips = replicated["replicas"] * job["completions"] * container["resources"]["limits"]["google.com/tpu"]
    axes = "data", "fsdp", "tensor", "context", "expert"
    mesh = dict(zip(axes, (*config.mesh.train, 1, 1, 1), strict=False))
    known = math.prod(n for n in mesh.values() if n > 0)
    mesh = {axis: n if n > 0 else chips // known for axis, n in mesh.items()}
    assert math.prod(mesh.values()) == chips
    shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    assert list(setup.uncut_rows(config, shards, mesh["context"])) == []


def test_the_large_manifests_find_model_and_data_outside_the_image():
    for name in ("v5p-128", "two-slices"):
        text = (ROOT / "launch" / "gke" / f"{name}.yaml").read_text()
        [replicated] = yaml.safe_load(text)["spec"]["replicatedJobs"]
        [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
        given = dict(word.split("=", 1) for word in container["args"])
        assert given["--config.model.path"].startswith("hf://")
        data = [given["--config.task.params.path"], given["--config.eval.params.path"]]
        assert all(path.startswith("gs://") for path in data)
        assert not any(path.startswith(f"{given['--workdir']}/") for path in data)


def test_a_flag_that_is_given_twice_is_refused(cloud, launch):
    done = launch("jobset", "run", DAPO, "--image=i", "--workdir=gs://b/x", "--image=j")
    assert done.returncode == 2 and cloud.calls() == []
    assert done.stderr.endswith("error: --image given more than once; give one value\n")


@pytest.mark.parametrize("arguments, said", [
    (["run", DAPO, "--workdir=gs://b/x"], "--image is missing"),
    (["run", DAPO, "--image=i"], "would be lost with the Pod"),
    (["run", DAPO, "--image=i", "--workdir=gs://b/x", "--spot", "--reservation=r"], "one of the two"),
    (["run", DAPO, "--image=i", "--workdir=gs://b/x", "--config.checkpoint.grace=x"],
     "--config.checkpoint.grace=x is not a number of seconds"),
    (["run", DAPO, "--image=i", "--workdir=gs://b/x", "--xpk"], "--xpk needs a cluster; give --cluster"),
    (["run", DAPO, "--image=i", "--workdir=gs://b/x", "--sopt"], "unknown arguments --sopt"),
    (["run", DAPO, "--image=i", "--workdir=gs://b/x", "--config.steps=1", "--config.steps=2"],
     "--config.steps given more than once; give one value"),
])
def test_refusals_are_one_line(launch, arguments, said):
    done = launch("jobset", *arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.all
def test_a_failure_of_kubectl_is_passed_on(cloud):
    cloud.answer(apply=[(1, "no such kind")])
    done = call("run", "--image=i", DAPO, "--workdir=gs://b/x")
    assert done.returncode == 1 and "kubectl apply -f - failed with 1" in done.stderr
