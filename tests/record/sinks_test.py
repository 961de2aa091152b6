"""The services' own packages, told to stay on this machine."""

import os
import subprocess
import sys

import pytest

from jaxrl_tis.record import sinks

WANDB = """
import sys
from jaxrl_tis.record import sinks
sink = sinks.make("wandb", sys.argv[1], "0123456789abcdef", {"name": "tiny", "optimizer": {"lr": 0.1}})
sink.log(0, {"train/reward/mean": 0.5})
sink.log(1, {"train/reward/mean": 0.75})
sink.close()
"""
TRACKIO = WANDB.replace('"wandb"', '"trackio"')


def run(script, workdir, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, str(workdir)], capture_output=True, text=True,
        env=os.environ | environment, timeout=120,
    )


def test_wandb_offline(tmp_path):
    done = run(WANDB, tmp_path / "run", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    assert "0123456789abcdef" in file.name
    written = file.read_bytes()
    assert b"train/reward/mean" in written and b"0.75" in written and b"0.1" in written


def test_trackio_on_this_machine(tmp_path):
    done = run(TRACKIO, tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    files = [p for p in (tmp_path / "trackio").rglob("*") if p.is_file()]
    assert b"train/reward/mean" in b"".join(p.read_bytes() for p in files)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"metrics.sinks names 'wandb'.*pip install 'jaxrl_tis\[wandb\]'"):
        sinks.make("wandb", str(tmp_path), "id", {"name": "a"})
