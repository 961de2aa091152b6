"""A compilation cache whose files are damaged costs compilations, and no result."""

import random
import shutil

import pytest

from tests import forked, tiny
from tests.resume_test import assert_same_run

pytestmark = [pytest.mark.faults, pytest.mark.all]

CODE = """
import jax, sys
from tests import tiny
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_numpy_rank_promotion", "raise")
tiny.run(sys.argv[1])
"""


def run(workdir, cache):
    code, text = forked.run(["-c", CODE, workdir, cache], workdir.with_suffix(".log"))
    assert code == 0, text[-3000:]
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
