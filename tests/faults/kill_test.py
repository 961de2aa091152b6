"""SIGKILL at random moments: of start, compilation, rollout, update, checkpoint, resume; by default in
three places alone."""

import random
import signal
import threading
import time

import pytest

from tests import forked, tiny
from tests.resume_test import assert_same_run

pytestmark = pytest.mark.faults

KILLS = 12
SETTINGS = dict(
    steps=3, warmup__steps=2, eval__every=3, checkpoint__every=1, checkpoint__keep=2
)
CODE = f"""
import contextlib, jax, sys
from tests import tiny
jax.config.update("jax_numpy_rank_promotion", "raise")
tiny.run(sys.argv[1], children=contextlib.nullcontext, **{SETTINGS})
"""
# Kills the run where it calls a function for the second time.
KILLED = """
import itertools, os
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.record import checkpoint

owner, name = {place}
call, numbers = getattr(owner, name), itertools.count(1)

def killed(*args, **kwargs):
    if next(numbers) == 2:
        os.kill(os.getpid(), 9)
    return call(*args, **kwargs)

setattr(owner, name, killed)
"""


def run(workdir, seconds=None):
    """Runs for so many seconds at most and then kills; returns (exit code, seconds it took)."""
    start = time.monotonic()
    process = forked.Command(["-c", CODE, workdir], workdir.with_suffix(".log"))
    if seconds is not None:
        timer = threading.Timer(seconds, process.kill)
        timer.start()
    code = process.wait(forked.SECONDS)
    if seconds is not None:
        timer.cancel()
    assert code == 0 or (code == -signal.SIGKILL and seconds), process.text()[-3000:]
    return code, time.monotonic() - start


@pytest.mark.all
@pytest.mark.cases('Trainer, "update"')
@pytest.mark.parametrize("place", [
    'Trainer, "score"', 'Trainer, "update"', 'checkpoint, "write_manifest"',
])
def test_a_run_killed_in_its_second_step_or_save_is_the_uninterrupted_run(tmp_path, place):
    workdir, log = tmp_path / "run", tmp_path / "log"
    code, text = forked.run(["-c", KILLED.replace("{place}", place) + CODE, workdir], log)
    assert code == -signal.SIGKILL, text[-3000:]
    assert 0 < len(tiny.lines(workdir)) < len(tiny.lines(tiny.finished(**SETTINGS)))
    tiny.run(workdir, **SETTINGS)
    assert_same_run(workdir, **SETTINGS)


@pytest.mark.all
def test_a_run_killed_twelve_times_is_the_uninterrupted_run(tmp_path):
    for name in ("first", "second"):  # programs come from the cache from then on
        _, whole = run(tmp_path / name)
        assert_same_run(tmp_path / name, **SETTINGS)
    source, kills, workdirs = random.Random(0), 0, []
    while kills < KILLS:
        workdirs.append(tmp_path / f"run{len(workdirs)}")
        while kills < KILLS and run(workdirs[-1], source.uniform(0, whole))[0] != 0:
            kills += 1
    run(workdirs[-1])
    for workdir in workdirs:
        assert_same_run(workdir, **SETTINGS)
    assert not list(workdirs[0].glob("checkpoints/*tmp*"))
