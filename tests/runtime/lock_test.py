"""A second run in a folder is refused by name of the first; a dead one holds nothing."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_tis.runtime import processes
from jaxrl_tis.runtime.lock import check_shared, locked

ROOT = pathlib.Path(__file__).parents[2]
HOLD = """
import pathlib, subprocess, sys, time
from jaxrl_tis.runtime.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_the_second_is_refused_and_told_who_is_first(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(ValueError, match=rf"run is in use by process {os.getpid()} on .*, "
                           r"started 20\d\d-.*; wait for it, or choose another --workdir"):
            with locked(tmp_path / "run"):
                pass
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "run"):  # it was given back
        pass


@pytest.mark.all
def test_a_dead_owner_holds_nothing_though_its_children_live(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE)
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"process {owner.pid} "), locked(tmp_path):
            pass
        owner.kill()
        owner.wait()
        os.kill(child, 0)  # it is there
        with locked(tmp_path):
            pass
    finally:
        owner.stdout.close()
        os.kill(child, 9)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot make .*file/run/lock"):
        with locked(tmp_path / "file" / "run"):
            pass


def test_the_lock_names_its_last_owner_alone(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            assert (tmp_path / "lock").read_text().count("process ") == 1


def test_a_folder_of_another_machine_is_refused(tmp_path, monkeypatch):
    """As the second of two processes sees it."""
    monkeypatch.setattr(processes, "difference", lambda facts: "")
    monkeypatch.setattr(processes, "is_alone", lambda: False)
    monkeypatch.setattr(processes, "first", lambda call: "process 1 on first")
    monkeypatch.setattr(processes, "any_of", bool)
    lock = tmp_path / "lock"
    for is_same, text in ((True, "process 1 on first"), (False, "process 1 on second")):
        lock.write_text(text)
        with contextlib.nullcontext() if is_same else pytest.raises(ValueError, match="not one folder"):
            check_shared(str(tmp_path), tmp_path)
    lock.unlink()
    with pytest.raises(ValueError, match="not one folder for all processes"):
        check_shared(str(tmp_path), tmp_path)
