"""benchmarks/arguments.py: --smoke makes a published command small."""

import argparse
import sys

import pytest

from benchmarks import arguments


def parsed(monkeypatch, *argv, **smoke):
    monkeypatch.setattr(sys, "argv", ["benchmark", *argv])
    parser = argparse.ArgumentParser("benchmark")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return vars(arguments.parse(parser, **smoke))


def test_smoke_replaces_the_sizes_of_the_command_line(monkeypatch):
    assert parsed(monkeypatch, "--rows=9", rows=2) == {"rows": 9, "seed": 0, "smoke": False}
    found = parsed(monkeypatch, "--rows=9", "--seed=5", "--smoke", rows=2)
    assert found == {"rows": 2, "seed": 5, "smoke": True}


def test_a_size_that_no_argument_has_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--smoke sets lines, which benchmark has not"):
        parsed(monkeypatch, lines=2)


@pytest.mark.all
def test_a_process_of_its_own_returns_its_last_line(tmp_path):
    text = "import sys\nprint(1)\nprint('{\"a\": 1}')\nsys.exit(len(sys.argv) - 1)\n"
    (tmp_path / "told.py").write_text(text)
    environment = {"PYTHONPATH": str(tmp_path)}
    assert arguments.result(["told"], environment) == {"a": 1}
    with pytest.raises(SystemExit, match="python -m told b ended with 1"):
        arguments.result(["told", "b"], environment)
