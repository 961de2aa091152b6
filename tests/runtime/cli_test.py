"""How commands end: what a user can mend is told in its message alone, a bug with its traceback."""

import importlib.util
import resource
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import libtpu_flags, train
from jaxrl_tis.aot import chips
from jaxrl_tis.data import tasks
from jaxrl_tis.doctor.__main__ import _threshold, main as doctor_main
from experiments import oracle
from jaxrl_tis.gate import report
from jaxrl_tis.learner import state
from jaxrl_tis.report.__main__ import main as report_main
from jaxrl_tis.runtime import cli
from jaxrl_tis.serve import setup as serving
from tests import commands, forked, tiny

score = commands.load("score")


def ended(capsys, function, *arguments, **options):
    """(exit code, stderr) of a command."""
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: function(*arguments, **options))
    return end.value.code, capsys.readouterr().err


@pytest.mark.all
@pytest.mark.parametrize("command, message", [
    (lambda folder: tiny.run(folder / "run", engine__policy="fastest"),
     "the config contradicts itself:\n- engine.policy is 'fastest'; choose one of first_come"),
    (lambda folder: tiny.run(folder / "run", model__path=str(folder / "none")), "No model folder"),
    (lambda folder: tiny.run(folder / "run", task__max_prompt_tokens=3),
     "generated example 0 (id 'arithmetic-eval-0-0'): 5 prompt tokens, config.task.max_prompt_tokens is 3"),
    (lambda folder: tiny.run(folder / "run", reward__name="none:f"),
     "the reward 'none:f' cannot be loaded"),
    (lambda folder: tiny.run(folder / "run", mesh__serve=(3, 1, 5)), "mesh {'data': 3"),
    (lambda folder: tiny.run(folder / "broken", steps=1), "config.json, line 1: not JSON"),
    (lambda folder: tiny.run(folder / "file", steps=1), "cannot make"),
    (lambda folder: report_main([str(folder)]), "metrics.jsonl not found: is"),
    (lambda folder: report_main([str(folder / "broken")]), "metrics.jsonl, line 1: not a JSON object"),
    (lambda folder: doctor_main([str(folder)]), "metrics.jsonl not found: is"),
    (lambda folder: doctor_main([str(folder), "--threshold", "a=b"]), "invalid _threshold value"),
    (lambda folder: oracle.main(["--horizons", "0"]), "argument --horizons: 0 is not at least 1"),
    (lambda folder: oracle.main(["--horizons", "4", "--samples", "1"]), "1 samples are too few"),
    (lambda folder: score.read_tokens(folder / "none.npy"), "No such file or directory"),
    (lambda folder: score.read_tokens(folder / "file"), "file is not a .npy file of numbers"),
    (lambda folder: score.score(folder, np.zeros((1, 1), int), "x"), "has no config.json"),
    (lambda folder: serving.read_token(folder / "none"), "No such file or directory"),
    (lambda folder: state.read_params(tiny.setup().training, folder / "none"), "No model folder"),
    (lambda folder: chips.Topology.parse("v9:2x2"), "topology 'v9:2x2' is unknown; give one of the chips v4, v5e"),
    (lambda folder: cli.check_folder("json", folder / "none" / "x"), "its folder does not exist"),
    (lambda folder: cli.check_folder("json", folder / "broken"), "broken is a folder; give a file in it"),
    (lambda folder: report_main([""]), "the path of a folder is empty"),
    (lambda folder: doctor_main([""]), "the path of a folder is empty"),
])
def test_what_the_user_can_mend_ends_with_its_message_and_2(tmp_path, capsys, command, message):
    (tmp_path / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "broken" / "metrics.jsonl").write_text('["a"]\n{"step": 1}\n')
    code, told = ended(capsys, command, tmp_path)
    assert code == 2 and message in told and "Traceback" not in told


def test_an_unknown_chip_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["libtpu_flags", "v9"])
    code, told = ended(capsys, libtpu_flags.main)
    assert code == 2 and "invalid choice: 'v9'" in told


def test_a_run_that_cannot_go_on_ends_with_its_message_and_1(capsys, monkeypatch):
    nan = {"actor/pg_loss": float("nan")}
    assert ended(capsys, train.check_finite, 3, nan, 2) == (
        1, "step 3: actor/pg_loss is nan; the run stops here and the checkpoint of step 2 is "
        "intact\n")
    monkeypatch.setattr(report, "measure", lambda *_: {"largest": "decode"})
    monkeypatch.setattr(report, "table", lambda _: "")
    monkeypatch.setattr(report, "failures", lambda _: ["d_mean 1 not within 0.05"])
    code, told = ended(capsys, report.require, tiny.setup(), None)
    assert code == 1 and told.startswith("before step 0 the gap of sampler and learner is above its bounds")


def reshaped(*, size: int) -> list:
    return jnp.zeros(size).reshape(size + 1)


@pytest.mark.parametrize("kind, function, arguments", [
    (TypeError, tasks.make, ("broken", {"size": 3})),  # JAX refuses the shape
    (ValueError, _threshold, ("pearson=high",)),  # float() fails in a line of the package
    (ValueError, "a,b".index, ("c",)),
    (FileNotFoundError, lambda: (_ for _ in ()).throw(FileNotFoundError("no name")), ()),
    (KeyError, {}.__getitem__, ("a",)),
])
def test_a_bug_keeps_its_traceback(monkeypatch, kind, function, arguments):
    monkeypatch.setitem(tasks.TASKS, "broken", reshaped)
    with pytest.raises(kind):
        cli.run(lambda: function(*arguments))


# Platforms


@pytest.fixture
def machine(monkeypatch):
    """(paths of devices, JAX's platforms, environment) -> platforms after the start, where libtpu
    is installed and JAX was imported."""
    def start(devices=(), platforms=None, libtpu=True, **environment):
        config = types.SimpleNamespace(jax_platforms=platforms)
        config.update = lambda name, value: setattr(config, name, value)
        for name in ("JAX_PLATFORMS", *cli.TPU_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(config=config))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu or None)
        matches = lambda pattern: [d for d in devices if cli.pathlib.PurePath(d).match(pattern)]
        monkeypatch.setattr(cli.glob, "glob", matches)
        cli.run(lambda: None)
        return config.jax_platforms
    return start


def test_libtpu_is_left_out_where_there_is_no_accelerator(machine):
    assert machine() == "cpu"
    assert machine(devices=["/dev/vfio/vfio", "/dev/null"]) == "cpu"  # the driver, no device


@pytest.mark.parametrize("device", [
    "/dev/accel0", "/dev/vfio/0", "/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg",
])
def test_jax_chooses_where_there_is_an_accelerator(machine, device):
    assert machine(devices=[device]) is None


def test_what_was_chosen_before_stays(machine):
    assert machine(platforms="tpu,cpu") == "tpu,cpu"  # by JAX, which found a TPU
    assert machine(TPU_WORKER_ID="0") is None
    assert machine(libtpu=False) is None
    assert machine(JAX_PLATFORMS="cuda", platforms="cuda") == "cuda"


def test_ctrl_c_ends_with_a_line_and_130(capsys):
    def stopped():
        raise KeyboardInterrupt

    assert ended(capsys, stopped) == (130, "\nstopped at once by Ctrl-C\n")


# A pipe that nobody reads


READER_GONE = """
import os, runpy, sys
for number in {numbers}:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, number)
sys.argv = {argv}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("argv, numbers, code", [
    (["jaxrl_tis.sweep", "--config=tests/small_sweep.py", "--dry_run"], [1], 141),
    (["jaxrl_tis.report", "none"], [1, 2], 2),
])
def test_output_that_nobody_reads_ends_a_command_without_a_word(tmp_path, argv, numbers, code):
    command = ["-c", READER_GONE.format(numbers=numbers, argv=argv)]
    assert forked.run(command, tmp_path / "log") == (code, "")


def test_a_lost_connection_is_no_unread_output(capsys):
    def lost():
        raise BrokenPipeError("a socket")

    with pytest.raises(BrokenPipeError, match="a socket"):
        cli.run(lost)


def test_a_command_may_open_as_many_files_as_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    found = []
    try:
        cli.run(lambda: found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        assert found == [before[1]]
        most = sys.maxsize if before[1] == resource.RLIM_INFINITY else before[1]
        assert cli.raise_file_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_option_is_given_once_at_most(capsys):
    parser = cli.parser("jaxrl_tis.a", "A.", "A.\n\nExamples:\n\n    a\n")
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append")
    for _ in range(2):  # a parser reads several command lines
        found = parser.parse_args(["a", "b", "--seed=1", "--only=a", "--only=b"])
        assert (found.paths, found.seed, found.only) == (["a", "b"], 1, ["a", "b"])
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["a", "--seed=0", "--se", "2"])
    assert "error: --seed given more than once; give one value" in capsys.readouterr().err
