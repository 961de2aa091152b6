"""The services' own packages, told to stay on this machine."""

import os
import subprocess
import sys

import pytest

from jaxrl_tis.record import sinks

WANDB = """
import sys
from jaxrl_tis.record import sinks
sink = sinks.make("wandb", sys.argv[1], "0123456789abcdef", {"name": "tiny", "optimizer": {"lr": 0.1}})
sink.log(0, {"train/reward/mean": 0.5})
sink.log(1, {"train/reward/mean": 0.75})
sink.close()
"""
TRACKIO = WANDB.replace('"wandb"', '"trackio"')


def run(script, workdir, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, str(workdir)], capture_output=True, text=True,
        env=os.environ | environment, timeout=120,
    )


@pytest.mark.all
def test_wandb_offline(tmp_path):
    done = run(WANDB, tmp_path / "run", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    assert "0123456789abcdef" in file.name
    written = file.read_bytes()
    assert b"train/reward/mean" in written and b"0.75" in written and b"0.1" in written


@pytest.mark.all
def test_trackio_on_this_machine(tmp_path):
    done = run(TRACKIO, tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    files = [p for p in (tmp_path / "trackio").rglob("*") if p.is_file()]
    assert b"train/reward/mean" in b"".join(p.read_bytes() for p in files)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"metrics.sinks names 'wandb'.*pip install 'jaxrl_tis\[wandb\]'"):
        sinks.check(("wandb",))


MODES = {"online": 2, "on": 2, "offline": 0}  # exit code of each
# Each mode in a fork: the packages are imported once.
KEYLESS = """
import os, sys
import trackio, wandb
from jaxrl_tis.record import sinks
from jaxrl_tis.runtime import cli
for mode in sys.argv[2:]:
    fork = os.fork()
    if fork == 0:
        os.environ["WANDB_MODE"] = mode
        sys.stderr = open(os.path.join(sys.argv[1], mode), "w")
        cli.run(lambda: sinks.check(("trackio", "wandb")))
        sys.exit(0)
    print(mode, os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
"""


@pytest.fixture(scope="module")
def keyless(tmp_path_factory):
    """{mode: (exit code, errors)} of a check without a key."""
    folder = tmp_path_factory.mktemp("keyless")
    home = {"HOME": str(folder), "WANDB_API_KEY": "", "NETRC": ""}
    done = subprocess.run(
        [sys.executable, "-c", KEYLESS, str(folder), *MODES], capture_output=True, text=True,
        env=os.environ | home, timeout=120,
    )
    assert done.returncode == 0, done.stderr
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {mode: (int(code), (folder / mode).read_text()) for mode, code in codes.items()}


@pytest.mark.parametrize("mode, code", MODES.items())
def test_wandb_without_a_key_is_named_before_anything_is_written(keyless, mode, code):
    ended, errors = keyless[mode]
    assert ended == code, errors
    assert ("set WANDB_API_KEY, log in by `wandb login`" in errors) == (code == 2)
    assert "Traceback" not in errors


@pytest.mark.parametrize("fails", ["open", "log", "close"])
def test_a_sink_that_fails_is_one_line_and_gets_nothing_more(monkeypatch, capsys, fails):
    said = []

    class Service:
        def __init__(self, *about):
            self._do("open")

        def log(self, step, values):
            self._do("log")

        def close(self):
            self._do("close")

        def _do(self, what):
            said.append(what)
            if what == fails:
                raise ConnectionError("no way\nto the host")

    monkeypatch.setitem(sinks.SINKS, "wandb", Service)
    sink = sinks.make("wandb", "run", "id", {})
    for step in range(2):
        sink.log(step, {"a": 1.0})
    sink.close()
    expected = {"open": ["open"], "log": ["open", "log"], "close": ["open", "log", "log", "close"]}
    assert said == expected[fails]
    assert capsys.readouterr().err.splitlines() == [
        "wandb has failed and gets no more values: ConnectionError: no way to the host; metrics.jsonl "
        "has all"
    ]
