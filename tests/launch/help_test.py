"""--help of every launcher ends with 0, its head and two examples."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(p.name for p in (ROOT / "launch").glob("*.sh") if p.name != "venv.sh")
LAUNCHERS = (
    "launch/tpu_vm.py", "launch/gke/jobset.py", "launch/gke/raycluster.py", "launch/supervise.py",
)


def said(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.all
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_head(name):
    about, _, examples = said("bash", f"launch/{name}", "--help").partition("\nExamples:\n")
    assert about and "set -euo" not in about
    lines = examples.splitlines()
    assert len(lines) == 2 and all(f"./launch/{name}" in line for line in lines)
    named = re.findall(r"--(?!config\.)\w+", examples)
    assert all(flag in about for flag in named)


@pytest.mark.all
@pytest.mark.parametrize("path", LAUNCHERS)
def test_a_launcher_ends_with_examples(path):
    about, _, examples = said(sys.executable, path, "--help").partition("\nexamples:\n")
    lines = examples.splitlines()
    assert len(lines) == 2 and all(f"python {path}" in line for line in lines)
    own = " ".join(line.partition(" -- ")[0] for line in lines)
    assert set(re.findall(r"--[\w-]+", own)) <= set(re.findall(r"--[\w-]+", about))
