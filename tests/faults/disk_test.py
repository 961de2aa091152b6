"""A disk that fills up, a folder that cannot be written: one clear error, and what was saved stays."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import tiny
from tests.resume_test import assert_same_run

pytestmark = pytest.mark.faults

ROOT = pathlib.Path(__file__).parents[2]
MOUNT = ("unshare", "--mount", "--map-root-user")
IS_ALLOWED = subprocess.run([*MOUNT, "true"], capture_output=True).returncode == 0
NEEDS = pytest.mark.skipif(not IS_ALLOWED, reason="the system lets nobody mount a file system")
SETTINGS = dict(steps=2, warmup__steps=2, checkpoint__every=1)
# Runs in the mounted folder and copies what is left of it out.
CODE = """
import json, shutil, sys, traceback
from jaxrl_tis.runtime import cli
from tests import tiny

workdir, kept = sys.argv[1:]
try:
    tiny.run(workdir + "/run", **{SETTINGS})
    print("ended")
except Exception as error:
    traceback.print_exc()
    print(json.dumps([type(error).__name__, str(error), cli.exit_code(error)]))
shutil.copytree(workdir + "/run", kept, dirs_exist_ok=True)
"""


def run_in_mount(folder, options):
    """Runs the tiny config in a mounted folder; returns the last line of stdout, and stderr; leaves
    what the folder held in FOLDER/kept."""
    mount, kept = folder / "mount", folder / "kept"
    mount.mkdir(exist_ok=True)
    code = CODE.replace("{SETTINGS}", repr(SETTINGS))
    command = f'mount -t tmpfs {options} none "$1" && shift && exec "$@"'
    done = subprocess.run(
        [*MOUNT, "bash", "-c", command, "_", mount, sys.executable, "-c", code, mount, kept],
        cwd=ROOT, text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUMPY_RANK_PROMOTION": "raise"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1], done.stderr


@pytest.fixture(scope="module")
def bytes_of_a_run():
    paths = tiny.finished(**SETTINGS).rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file())


@NEEDS
@pytest.mark.all
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_disk_that_fills_up_stops_the_run_and_more_room_continues_it(
    tmp_path, bytes_of_a_run, share
):
    """Wherever the room ends: in a checkpoint, between two, in the record."""
    line, told = run_in_mount(tmp_path, f"-o size={int(share * bytes_of_a_run)}")
    name, message, code = json.loads(line)
    assert (name, code) == ("Unwritable", 2), told
    assert "No space left on device" in message and "start the same command again" in message
    tiny.run(tmp_path / "kept", **SETTINGS)
    assert_same_run(tmp_path / "kept", **SETTINGS)


@pytest.mark.all
@NEEDS
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    (tmp_path / "mount").mkdir()
    command = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    done = subprocess.run(
        [*MOUNT, "bash", "-c", command, "_", tmp_path / "mount", sys.executable, "-m",
         "jaxrl_tis.main", "--config=tests/small_run.py", f"--workdir={tmp_path / 'mount' / 'run'}"],
        cwd=ROOT, text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "Read-only file system" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.returncode == 2, done.stderr
