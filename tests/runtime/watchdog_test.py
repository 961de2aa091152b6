"""A process that hangs writes down where and ends; one that comes on is left alone."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from jaxrl_tis.runtime import watchdog
from jaxrl_tis.runtime.watchdog import Watchdog

ROOT = pathlib.Path(__file__).parents[2]
HANG = """
import pathlib, sys, threading
from jaxrl_tis.runtime.watchdog import Watchdog

def waits_for_a_collective():
    threading.Event().wait()

with Watchdog(pathlib.Path(sys.argv[1]), timeout=0.4) as dog:
    dog.heartbeat("step 7, rollout")
    waits_for_a_collective()
"""


def test_a_hanging_process_ends_with_42_and_its_stacks_on_disk(tmp_path):
    ended = subprocess.run([sys.executable, "-c", HANG, tmp_path], cwd=ROOT, timeout=60, text=True,
                           capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 42
    [stacks] = (tmp_path / "stacks").iterdir()
    assert stacks.name.startswith("process0-")
    said, shown = ended.stderr.split("\n", 1)
    assert said == f"step 7, rollout: no progress for 0.4 s; the stacks of all threads are in {stacks}"
    assert "in waits_for_a_collective" in shown
    text = stacks.read_text()
    assert text.startswith("step 7, rollout: no progress for 0.4 s\n")
    assert "in waits_for_a_collective" in text and "in _watch" in text


@pytest.mark.all
def test_beats_keep_a_process_alive_and_sign_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: exits.append(code))
    exits = []
    with Watchdog(tmp_path, timeout=4) as dog:
        for _ in range(90):  # for more than 4 s
            dog.heartbeat("step 3, score")
            time.sleep(0.05)
        sign = json.loads((tmp_path / "heartbeat.json").read_text())
    assert not exits
    assert (sign["pid"], sign["doing"]) == (os.getpid(), "step 3, score")
    assert abs(sign["time"] - time.time()) < 30 and 0 <= sign["seconds_since_progress"] < 4


def test_without_a_timeout_nothing_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: exits.append(code))
    exits = []
    with Watchdog(tmp_path, timeout=0):
        end = time.monotonic() + 30
        while not (tmp_path / "heartbeat.json").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not exits


@pytest.mark.all
def test_a_disk_that_hangs_keeps_nobody_alive(tmp_path):
    """Neither the file that says that the run lives nor the stacks can be written."""
    code = HANG.replace("with Watchdog", """
import time
from jaxrl_tis.runtime import watchdog
watchdog.END_SECONDS = 0.5
watchdog.write_json = lambda *_: time.sleep(60)
pathlib.Path.mkdir = lambda *_, **__: time.sleep(60)
with Watchdog""")
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, timeout=50,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 42
