import importlib
import pathlib
import sys

import pytest

from tests.launch import fakes

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a launcher by its name, as a script beside the others sees them."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    monkeypatch.syspath_prepend(str(LAUNCH / "gke"))
    yield importlib.import_module
    for name in ("plan", "supervise", "tpu_vm", "jobset"):
        sys.modules.pop(name, None)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    found = fakes.Cloud(tmp_path / "cloud", "gcloud", "kubectl", "xpk")
    monkeypatch.setenv("PATH", found.path)
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return found
