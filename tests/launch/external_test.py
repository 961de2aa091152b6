"""Engines of others beside a learner: scripts of dry runs against golden files, refusals, a run on
played states."""

import pathlib
import shlex
import subprocess
import sys

import pytest

from tests.launch.fakes import verb_of

ROOT = pathlib.Path(__file__).parents[2]
SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
RUN = ["--workdir=gs://b/x", "--weights_mount=10.0.0.2:/weights"]
LORA = ["--config=configs/gsm8k_qwen3_8b_lora.py", "--accelerator=v5litepod-8", *RUN]
FETCHED = "--config.model.path=hf://Qwen/Qwen3-8B"
VLLM = [
    *LORA, "--engine_kind=vllm", "--worker_accelerator=v6e-4", "--num_workers=2", "--max_lora_rank=32",
    FETCHED, "--engine_arguments=--max-model-len 2048 --dtype bfloat16",
]
SGLANG = [
    "--config=configs/gsm8k_qwen25_0p5b.py:grpo", *RUN, "--engine_kind=sglang",
    "--engine_hosts=me@10.0.0.7,10.0.0.8", "--engine_venv=/opt/sglang", "--engine_arguments=--tp-size 2",
    "--config.model.path=/mnt/weights/base",
]
MOUNTED = (
    "ENGINES=gsm8k-qwen3-8b-lora-worker-0,gsm8k-qwen3-8b-lora-worker-1\n"
    "WEIGHTS_FOLDER=/mnt/weights/gsm8k-qwen3-8b-lora\nWEIGHTS_MOUNT=10.0.0.2:/weights\n"
)


def without(arguments, *starts):
    return [word for word in arguments if not word.startswith(starts)]


@pytest.fixture
def clean(call, scripts, monkeypatch):
    """Lets the clone be one whose commit can run, in the folder CLONE."""
    monkeypatch.setattr(scripts("clone"), "problem", lambda shell, plan: "")
    monkeypatch.setattr(scripts("clone"), "changes", lambda shell: "")
    monkeypatch.setattr(scripts("clone"), "_git", lambda *words: ["git", "-C", "CLONE", *words])


@pytest.mark.parametrize("name, arguments", [("vllm", VLLM), ("sglang", SGLANG)])
def test_the_script_of_a_dry_run(launch, clean, cloud, scripts, monkeypatch, name, arguments):
    monkeypatch.setattr(scripts("external"), "__file__", "CLONE/launch/external.py")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    done = launch("tpu_vm", "run", "--dry-run", *arguments)
    assert (done.returncode, done.stderr, cloud.calls()) == (0, "", [])
    assert done.stdout == (ROOT / f"tests/launch/engines_{name}.sh").read_text()


HOSTS = ["--engine_hosts=h", "--engine_venv=/e"]
REFUSED = [
    (without(VLLM, "--weights_mount"), "--weights_mount= names no share, from which"),
    ([*without(VLLM, "--weights_mount"), "--weights_mount=/mnt/x"], "--weights_mount=/mnt/x names no"),
    ([*without(VLLM, "--engine_kind"), "--engine_kind=tgi"], "--engine_kind=tgi is unknown; give one of vllm"),
    ([*without(VLLM, "--num"), "--num_workers=0"], "--num_workers=0 is below 1"),
    (without(VLLM, "--worker", "--num"), "needs machines for the engines; give one of"),
    ([*VLLM, *HOSTS], "needs machines for the engines; give one of"),
    (without(VLLM, "--engine_kind"), "--engine_arguments needs --engine_kind"),
    (without(VLLM, "--max_lora_rank"), "vLLM on TPU has no method that reads whole weights"),
    ([*without(VLLM, "--max_lora"), "--max_lora_rank=24"], "--max_lora_rank=24 is no rank of vLLM; give one"),
    ([*without(VLLM, "--engine_kind"), "--engine_kind=sglang"], "sglang-jax has no route that reads weights"),
    (without(VLLM, FETCHED), "--config.model.path= is no model that every machine can read"),
    ([*without(VLLM, FETCHED), "--config.model.path=models/mine"], "models/mine is no model that"),
    ([*VLLM, "--config.rollout.weights_folder=/tmp/w"], "/tmp/w is not below /mnt/weights"),
    (without(SGLANG, "--engine_venv"), "--engine_venv= is no absolute path"),
    ([*SGLANG, "--max_lora_rank=0"], "--max_lora_rank=0 is below 1"),
]


def test_refusals_are_one_line(launch, clean, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "t")
    for arguments, said in REFUSED:
        done = launch("tpu_vm", "run", "--dry-run", *arguments)
        assert done.returncode == 2 and said in done.stderr, said
        assert len(done.stderr.splitlines()) == 1
    monkeypatch.delenv("HF_TOKEN")
    token = "HF_TOKEN is not set, and the engines fetch hf://Qwen/Qwen3-8B from the hub"
    assert f"# refused as it stands: {token}" in launch("tpu_vm", "run", "--dry-run", *VLLM).stdout
    done = launch("tpu_vm", "run", *VLLM)
    assert done.returncode == 2 and done.stderr.startswith(token)


@pytest.mark.parametrize(
    "verb, code", [pytest.param("status", 3, marks=pytest.mark.all), ("stop", 1)]
)
def test_the_hosts_of_engines_are_asked_and_stopped(call, cloud, verb, code):
    cloud.answer(**{"host-b__on_engines": [(3, "")], "describe": [(0, "ACTIVE")]})
    config = "--config=configs/gsm8k_qwen25_0p5b.py:grpo"
    assert call("tpu_vm", verb, config, "--name=n", "--engine_hosts=me@host-a,host-b") == code
    script = f"bash n/launch/on_engines.sh {verb}"
    assert cloud.calls()[-2:] == [["ssh", "me@host-a", script], ["ssh", "host-b", script]]


@pytest.mark.all
def test_a_run_starts_engines_again_and_its_learner_once(call, cloud, scripts, monkeypatch):
    """The machine of the second engine is preempted, and the process of the first ends."""
    monkeypatch.setattr(scripts("tpu_vm"), "POLL_SECONDS", 0.0)
    monkeypatch.setenv("HF_TOKEN", "t")
    active, none, no_code = (0, "ACTIVE"), (1, "NOT_FOUND"), (0, "not running: no code")
    running, crashed = (0, 'running: {"code": null} on h'), (0, 'not running: {"code": 1} on h')
    cloud.answer(**{
        "worker-0__describe": [none, active],
        "worker-0__status": [no_code, running, crashed, crashed, running],
        "worker-1__describe": [none, active, active, (0, "SUSPENDED"), none, active],
        "worker-1__status": [no_code, running, no_code, running],
        "describe": [active], "status": [no_code, *[running] * 12, (0, 'not running: {"code": 0} on h')],
    })
    assert call("tpu_vm", "run", *VLLM) == 0
    starts = [words[-1].partition("on_vm.sh ")[2] for words in cloud.calls()
              if verb_of(words) == "start" or "on_vm.sh engine" in words[-1]]
    names = [shlex.split(text)[1].rpartition("-lora-")[2] for text in starts]
    assert sorted(names) == ["v5e", "worker-0", "worker-0", "worker-1", "worker-1"]
    flags = "--tensor-parallel-size 4 --enable-lora --max-lora-rank 32 --max-loras 2 --max-model-len 2048"
    assert f"-worker-0 Qwen/Qwen3-8B {flags} --dtype bfloat16" in starts[names.index("worker-0")]
    assert (cloud.copies / ".jaxrl_tis_env").read_text() == f"HF_TOKEN=t\n{MOUNTED}"


@pytest.mark.all
@pytest.mark.parametrize("name, arguments", [("vllm", VLLM), ("sglang", SGLANG)])
def test_the_script_of_a_dry_run_runs(cloud, name, arguments, tmp_path):
    golden = ROOT / f"tests/launch/engines_{name}.sh"
    checked = subprocess.run([SHELLCHECK, "--shell=bash", str(golden)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    cloud.answer(describe=[(0, "ACTIVE")])
    text = golden.read_text().replace("CLONE", str(ROOT)).replace("sleep 30", "sleep 0")
    ran = subprocess.run(["bash", "-c", text], capture_output=True, text=True,
                         env={"PATH": cloud.path, "HF_TOKEN": "t", "TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    if name == "vllm":
        copied = (cloud.copies / ".jaxrl_tis_env").read_text()
        assert copied.replace("\\", "") == f"HF_TOKEN=t\n{MOUNTED}"
    else:
        assert len([words for words in cloud.calls() if words[0] == "ssh"]) == 4
        assert (cloud.copies / "venv.sh").exists()
