"""A second run in a folder is refused by name of the first; a dead one holds nothing."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_tis.runtime.lock import locked

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
