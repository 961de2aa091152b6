"""A compilation cache whose files are damaged costs compilations, and no result."""

import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from tests import tiny
from tests.resume_test import assert_same_run

pytestmark = pytest.mark.faults

ROOT = pathlib.Path(__file__).parents[2]
CODE = "import sys; from tests import tiny; tiny.run(sys.argv[1])"


def run(workdir, cache):
    done = subprocess.run(
        [sys.executable, "-c", CODE, workdir], cwd=ROOT, text=True, capture_output=True,
        timeout=300, env=os.environ | {
            "PYTHONPATH": str(ROOT), "JAX_NUMPY_RANK_PROMOTION": "raise",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(workdir, tiny.finished())


def test_flipped_cut_and_emptied_files(tmp_path):
    cache, source = tmp_path / "cache", random.Random(0)
    run(tmp_path / "first", cache)
    files = sorted(path for path in cache.rglob("*-cache"))
    assert len(files) > 20
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        elif number % 3 == 1:
            del data[source.randrange(len(data)) :]
        else:
            data.clear()
        path.write_bytes(data)
    run(tmp_path / "second", cache)
    shutil.rmtree(cache)
