import importlib
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.launch import clones, fakes

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a launcher by its name, as a script beside the others sees them."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    monkeypatch.syspath_prepend(str(LAUNCH / "gke"))
    yield importlib.import_module
    for name in ("plan", "external", "clone", "gcloud", "machines", "supervise", "tpu_vm", "jobset", "raycluster"):
        sys.modules.pop(name, None)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    found = fakes.Cloud(tmp_path / "cloud", "gcloud", "kubectl", "xpk", "ssh", "scp")
    monkeypatch.setenv("PATH", found.path)
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture(scope="session")
def committed(tmp_path_factory):
    """A git clone with the configs of this one; to be read."""
    folder = tmp_path_factory.mktemp("committed")
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    return clones.commit(folder)


@pytest.fixture
def call(scripts, cloud, request, monkeypatch):
    """Runs a launcher, `call("tpu_vm", "run", ...)`, in this process; returns its exit code."""
    def git(*words):
        return ["git", "-C", str(request.getfixturevalue("committed")), *words]

    monkeypatch.setattr(scripts("clone"), "_git", git)

    def run(name, *arguments):
        plan, script = scripts("plan"), scripts(name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as exited:
            plan.main(script.main)
        return exited.value.code
    return run


@pytest.fixture
def launch(call, capfd):
    """As `call`; returns the finished process, as if there had been one."""
    def run(name, *arguments):
        capfd.readouterr()
        code = call(name, *arguments)
        return subprocess.CompletedProcess([name, *arguments], code, *capfd.readouterr())
    return run


@pytest.fixture
def play(call, scripts, cloud, monkeypatch):
    """Runs tpu_vm.py on played answers; returns its exit code and the verbs of the calls."""
    monkeypatch.setattr(scripts("tpu_vm"), "POLL_SECONDS", 0.0)

    def run(*arguments, **answers):
        cloud.answer(**answers)
        code = call("tpu_vm", *arguments)
        return code, [fakes.verb_of(words) for words in cloud.calls()]
    return run
