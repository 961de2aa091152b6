"""The command line: one process per mistake, started together."""

import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest

from tests import commands

pytestmark = pytest.mark.by_jax("what jax prints")

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "--config=configs/quickstart.py"
COMMANDS = {
    "typo": [CONFIG, "--config.optimizer.lrr=1", "--workdir=unused"],
    "contradiction": [CONFIG, "--workdir=unused", "--config.rollout.group_size=1",
                      "--config.correction.centre=behav"],
}


@pytest.fixture(scope="module")
def results():
    """Exit code and output of every command, as on a machine where nothing is set."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_PLATFORMS", None)
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "jaxrl_tis.main", *arguments], cwd=ROOT, text=True,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for name, arguments in COMMANDS.items()
    }
    return {n: (p.communicate(timeout=120)[0], p.returncode) for n, p in started.items()}


@pytest.mark.all
@pytest.mark.parametrize("name, lines", [
    ("typo", ["config.optimizer has no field 'lrr'; did you mean 'lr'?"]),
    ("contradiction", ["the config contradicts itself:", "- rollout.prompts * rollout.group_size",
                       "- rollout.group_size is 1", "- the ratio of objective 'ppo' and the weight"]),
])
def test_a_mistake_is_told_alone_before_anything_is_written(results, name, lines):
    output, code = results[name]
    assert code == 2
    told = output.splitlines()
    assert len(told) == len(lines), output[-1500:]
    for line, beginning in zip(told, lines, strict=True):
        assert line.startswith(beginning)
    assert not (ROOT / "unused").exists()


def test_a_profile_of_no_step_is_refused():
    main = commands.load("main")
    steps = mock.Mock(value=["10", "x", "-3"])
    with mock.patch.object(main, "PROFILE_STEPS", steps):
        with pytest.raises(ValueError, match="--profile_steps=10,x,-3: x, -3 is not the number of a step"):
            main.main()
