"""The commands of docs/launch.md are taken by the launchers, and its table is that of chips.py."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl_tis.aot import chips

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [line for line in BLOCKS.replace("\\\n", " ").splitlines() if line.startswith("python launch")]


def test_the_page_has_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.all
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_taken(command):
    words = shlex.split(command.replace("BUCKET", "bucket"))[1:]
    done = subprocess.run([sys.executable, *words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_the_table_of_commands(scripts):
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == set(scripts("tpu_vm").COMMANDS)


@pytest.mark.all
def test_the_commands_that_a_sweep_emits_are_taken():
    text = BLOCKS.replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if "jaxrl_tis.sweep" in line]
    words = shlex.split(line.replace("BUCKET", "bucket"))[1:]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    commands = done.stdout.splitlines()
    assert len(commands) > 5, done.stderr
    for command in (commands[0], commands[-1]):
        words = shlex.split(command)[1:]
        launched = subprocess.run(
            [sys.executable, *words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert launched.returncode == 0 and "on_vm.sh start v5e" in launched.stdout, launched.stderr


def test_the_table_of_slices():
    rows = re.findall(r"^\| `(v\w+-\d+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for name, rest in rows:
        found = chips.Topology.rented(name, 1)
        assert rest.split(" | ") == [
            str(found.num_chips), found.shape, str(found.hosts_per_slice), str(found.chips_per_host),
            f"`{found.machine_type}`"]
