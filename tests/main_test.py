"""The command line: one process per mistake, started together."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.by_jax("what jax prints")

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "--config=configs/quickstart.py"
COMMANDS = {
    "typo": [CONFIG, "--config.optimizer.lrr=1", "--workdir=unused"],
    "type": [CONFIG, "--config.optimizer.lr=fast", "--workdir=unused"],
    "contradiction": [CONFIG, "--workdir=unused", "--config.rollout.group_size=1",
                      "--config.correction.mode=bypass"],
}


@pytest.fixture(scope="module")
def results():
    """Exit code and output of every command."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "jaxrl_tis.main", *arguments], cwd=ROOT, text=True,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for name, arguments in COMMANDS.items()
    }
    return {n: (p.communicate(timeout=120)[0], p.returncode) for n, p in started.items()}


@pytest.mark.parametrize("name, words", [
    ("typo", ["lrr", "lr"]),
    ("type", ["lr", "fast"]),
    ("contradiction", ["rollout.group_size is 1", "bypass"]),
])
def test_a_mistake_stops_before_anything_is_written(results, name, words):
    output, code = results[name]
    assert code not in (0, None)
    for word in words:
        assert word in output, output[-1500:]
    assert not (ROOT / "unused").exists()


def test_a_typo_names_the_nearest_field(results):
    assert 'Did you mean "lr"' in results["typo"][0] or "did you mean" in results["typo"][0].lower()
