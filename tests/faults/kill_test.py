"""SIGKILL at random moments: of start, compilation, rollout, update, checkpoint, resume."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import tiny
from tests.resume_test import assert_same_run
from tests.forks import SETTINGS

pytestmark = pytest.mark.faults

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 20


@pytest.fixture
def forks(tmp_path):
    log = open(tmp_path / "forks.log", "w")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUMPY_RANK_PROMOTION": "raise"}
    with subprocess.Popen(
        [sys.executable, "tests/forks.py"], cwd=ROOT, text=True, bufsize=1, stderr=log,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    ) as server:
        yield server
        server.stdin.close()
    log.close()


def run(server, workdir, seconds=None):
    """Runs for so many seconds at most and then kills; returns (exit code, seconds it took)."""
    print(workdir, file=server.stdin)
    pid, start, timer = int(server.stdout.readline()), time.monotonic(), None
    if seconds is not None:
        timer = threading.Timer(seconds, _kill, (pid,))
        timer.start()
    code = int(server.stdout.readline())
    if timer is not None:
        timer.cancel()
    return code, time.monotonic() - start


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_run_killed_twenty_times_is_the_uninterrupted_run(forks, tmp_path):
    for name in ("first", "second"):  # programs come from the cache from then on
        code, whole = run(forks, tmp_path / name)
        assert code == 0, (tmp_path / "forks.log").read_text()[-3000:]
        assert_same_run(tmp_path / name, **SETTINGS)
    source, kills, workdirs = random.Random(0), 0, []
    while kills < KILLS:
        workdirs.append(tmp_path / f"run{len(workdirs)}")
        while kills < KILLS:
            code, _ = run(forks, workdirs[-1], source.uniform(0, whole))
            assert code in (0, -signal.SIGKILL), (tmp_path / "forks.log").read_text()[-3000:]
            if code == 0:
                break
            kills += 1
    assert run(forks, workdirs[-1])[0] == 0
    for workdir in workdirs:
        assert_same_run(workdir, **SETTINGS)
    assert not list(workdirs[0].glob("checkpoints/*tmp*"))
