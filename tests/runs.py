"""Whole runs that many tests read: each is made once in a session, by the process that asks first.

A pytest plugin, see tests/conftest.py.
"""

import fcntl
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable

from tests import budget

FOLDER = "JAXRL_TIS_TEST_RUNS"  # variable of the environment, which all processes of a session share


def pytest_configure(config):
    """Makes the folder of a session, in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="jaxrl_tis_runs_")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def shared(key: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Returns the folder that `make(folder)` has filled; do not write there. Its cost is no file's:
    which one asks first is chance."""
    place = pathlib.Path(os.environ[FOLDER]) / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    place.mkdir(exist_ok=True)
    folder, done = place / "run", place / "done"
    with open(place / "lock", "w") as lock, budget.uncounted():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            make(folder)
            done.touch()
    return folder
