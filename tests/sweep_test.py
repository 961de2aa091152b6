import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxrl_tis import cli_flags, sweep
from jaxrl_tis.record import metrics, provenance
from jaxrl_tis.runtime import cli
from tests import forked

ROOT = pathlib.Path(__file__).parents[1]
SWEEPS = sorted([*(ROOT / "configs" / "sweeps").glob("*.py"), *(ROOT / "configs").glob("fig_*.py")])
SWEEPS.remove(ROOT / "configs" / "fig_base.py")


# Lists of arms


def test_grid():
    assert sweep.grid({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]


def test_zipped():
    assert sweep.zipped({"a": [1, 2], "b": [3, 4]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    with pytest.raises(ValueError, match=r"different numbers of values: \{'a': 2, 'b': 1\}"):
        sweep.zipped({"a": [1, 2], "b": [3]})


def test_product():
    assert sweep.product([{"a": 1}, {"a": 2}], [{"b": 3, "c": 4}], [{"d": 5}]) == [
        {"a": 1, "b": 3, "c": 4, "d": 5}, {"a": 2, "b": 3, "c": 4, "d": 5}]
    with pytest.raises(ValueError, match="a is set by two parts"):
        sweep.product([{"a": 1}], [{"a": 2}])


@pytest.mark.parametrize("arm, name", [
    ({"correction.preset": "tis_2", "train.epochs": 4}, "preset=tis_2,epochs=4"),
    ({"correction.masks": "a(x=1) & b"}, "masks=a_x=1_b"),
    ({"mesh.train": (1, 8, 1)}, "train=_1,_8,_1"), ({}, "base"),
])
def test_names(arm, name):
    assert sweep.names_of([arm]) == [name] and "/" not in name


def test_arms_may_have_names_of_their_own():
    assert sweep.names_of({"TIS-2": {"a.b": 1}, "no gap": {}}) == ["TIS-2", "no_gap"]


def test_fields_of_one_last_word_keep_their_groups():
    arms = [{"optimizer.lr": 1}, {"critic.lr": 1, "train.epochs": 2}]
    assert sweep.names_of(arms) == ["optimizer.lr=1", "critic.lr=1,epochs=2"]


def test_each_arm_runs_with_the_seed_that_it_sets(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = jobs([{"seed": 5}, {"seed": 6}, {}], seeds=())
    assert [job.seed for job in found] == [5, 6, 0]
    assert [job.workdir for job in found[:2]] == ["out/seed=5-seed5", "out/seed=6-seed6"]
    assert [cli_flags.parsed(job.arguments).seed for job in found] == [5, 6, 0]
    assert [job.arguments.count("--config.seed=5") for job in found] == [1, 0, 0]


def test_the_seed_of_the_command_line_is_that_of_every_arm(monkeypatch):
    monkeypatch.chdir(ROOT)
    [job] = jobs([{}], seeds=(), overrides=["--config.seed=5"])
    assert job.seed == 5 and job.workdir == "out/base-seed5"
    assert cli_flags.parsed(job.arguments).seed == 5


@pytest.mark.parametrize("arm, seeds, overrides, told", [
    ({"seed": 5}, (0,), (), "seed=5: the arm sets seed, and so does the command line"),
    ({}, (0,), ["--config.seed=5"], "--seeds and --config.seed both set the seed"),
    ({"optimizer.lr": 0.1}, (), ["--config.optimizer.lr=0.2"], "lr=0.1: the arm sets optimizer.lr, and"),
])
def test_a_field_that_is_set_twice_is_refused(monkeypatch, arm, seeds, overrides, told):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=told):
        jobs([arm], seeds, overrides)


def test_a_folder_with_a_run_of_another_configuration_is_refused(tmp_path, monkeypatch):
    """Its results would stand in the table as those of this sweep."""
    monkeypatch.chdir(ROOT)
    config = cli_flags.parsed(["--config=tests/small_run.py", "--config.optimizer.lr=0.1"])
    provenance.write_run_files(tmp_path / "lr=0.1-seed0", config.to_dict())
    arms = [{"optimizer.lr": 0.1}]
    assert len(jobs(arms, out=str(tmp_path))) == 1
    assert len(jobs(arms, out=str(tmp_path), overrides=["--config.steps=9"])) == 1
    with pytest.raises(ValueError, match="lr=0.1: .*another configuration: train.epochs: 2 -> 3"):
        jobs(arms, out=str(tmp_path), overrides=["--config.train.epochs=3"])


def test_a_change_that_is_named_goes_to_every_run(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = cli_flags.parsed(["--config=tests/small_run.py"])
    provenance.write_run_files(tmp_path / "base-seed0", config.to_dict())
    given = dict(out=str(tmp_path), overrides=["--config.train.epochs=3"])
    with pytest.raises(ValueError, match="base: .*--change=train.epochs"):
        jobs([{}], **given)
    [job] = jobs([{}], **given, change=["train.epochs", "seed"])
    assert "--change=train.epochs,seed" in job.command
    assert not any("--change" in word for word in jobs([{}], out=str(tmp_path))[0].command)


# Checks before anything runs


def jobs(arms, seeds=(0,), overrides=(), config="tests/small_run.py", out="out", change=()):
    return sweep.jobs_of(config, overrides, arms, seeds, out, change)


def test_jobs_of_arms_and_seeds(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = jobs([{"optimizer.lr": 0.1}, {"train.epochs": 3}], (0, 7), ["--config.steps=9"])
    assert [(j.arm, j.seed, j.workdir, j.steps) for j in found] == [
        ("lr=0.1", 0, "out/lr=0.1-seed0", 9), ("lr=0.1", 7, "out/lr=0.1-seed7", 9),
        ("epochs=3", 0, "out/epochs=3-seed0", 9), ("epochs=3", 7, "out/epochs=3-seed7", 9)]
    assert found[1].command == [
        "python", "-m", "jaxrl_tis.main", "--config=tests/small_run.py", "--config.steps=9",
        "--config.optimizer.lr=0.1", "--config.seed=7", "--workdir=out/lr=0.1-seed7"]


def test_an_arm_may_set_a_field_to_none(monkeypatch):
    monkeypatch.chdir(ROOT)
    arms = [{"correction.weight": None}, {"model.path": None}]
    [job] = sweep.jobs_of("configs/quickstart.py:off", [], arms[:1], [], "runs/x")
    assert job.arm == "weight=None" and "--config.correction.weight=None" in job.arguments
    with pytest.raises(ValueError, match="path=None: .*\n- model.path is None"):
        sweep.jobs_of("configs/quickstart.py:off", [], arms, [], "runs/x")


def test_every_mistake_of_every_arm_is_told(monkeypatch):
    monkeypatch.chdir(ROOT)
    arms = [{"optimizer.lr": 0.1}, {"optimzer.lr": 0.1}, {"correction.preset": "tis_9"},
            {"train.epochs": "four"}, {"optimizer.lr": 0.1}]
    with pytest.raises(ValueError) as error:
        jobs(arms)
    for part in ("two arms are called optimizer.lr=0.1", "did you mean 'optimizer'", "'tis_9'", "epochs=four"):
        assert part in str(error.value)


@pytest.mark.all
@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_the_shipped_sweeps_are_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = str(path.relative_to(ROOT))
    arms = sweep.arms_of(config)
    found = jobs(arms, (0, 1), config=config)
    assert len(found) == 2 * len(arms)


def test_a_file_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sweeps/staleness is no Python file; give the .py"):
        sweep.arms_of("configs/sweeps/staleness")
    path = tmp_path / "a.py"
    path.write_text("def get_config(): ...\n")
    with pytest.raises(ValueError, match=r"a.py has no sweep\(\)"):
        sweep.arms_of(str(path))
    path.write_text("def sweep(): return []\n")
    with pytest.raises(ValueError, match=r"sweep\(\) returned \[\]"):
        sweep.arms_of(str(path))


@pytest.mark.all
def test_commands_for_launchers():
    job = sweep.Job("lr=0.1", 3, "gs://b/lr=0.1-seed3",
                    ("--config=configs/sweeps/staleness.py", "--config.optimizer.lr=0.1",
                     "--change=optimizer.lr"), 5)
    for launcher, script in (("tpu_vm", "launch/tpu_vm.py"), ("gke", "launch/gke/jobset.py")):
        words = sweep.launch_command(job, 4, launcher, ["--spot", "--image=i", "--accelerator=v5litepod-4"])
        assert words[1:3] == [script, "run"] and "--name=staleness-4-s3" in words
        if launcher == "tpu_vm":
            words.remove("--image=i")
        done = subprocess.run([sys.executable, *words[1:], "--dry-run"], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--config.optimizer.lr=0.1" in done.stdout and "--change=optimizer.lr" in done.stdout


# Running


SCRIPT = """
import json, pathlib, signal, sys, time
folder = pathlib.Path({workdir!r})
folder.mkdir(parents=True, exist_ok=True)
(folder / "starts").open("a").write("x")
{body}
(folder / "metrics.jsonl").write_text(json.dumps({{"step": 2, "phase": "train", "reward/mean": {value}}})
    + "\\n" + json.dumps({{"step": 2, "phase": "eval", "eval/greedy_accuracy": {value}, "eval/n": 100}}) + "\\n")
"""


class Scripted(sweep.Job):
    """A job whose run is a few lines of Python."""

    @property
    def command(self):
        return ["python", "-c", self.arguments[0]]


def scripted(folder, arm, seed=0, value=0.5, body=""):
    workdir = str(folder / f"{arm}-seed{seed}")
    return Scripted(arm, seed, workdir, (SCRIPT.format(workdir=workdir, body=body, value=value),), 2)


def starts(job):
    return len((pathlib.Path(job.workdir) / "starts").read_text())


def test_a_failed_run_does_not_stop_the_others_and_is_reported(tmp_path, capsys):
    found = [scripted(tmp_path, "a"), scripted(tmp_path, "b", body="sys.exit(1)"),
             scripted(tmp_path, "c")]
    with pytest.raises(RuntimeError, match="1 of 3 runs failed: b, seed 0"):
        sweep._run_all(found, str(tmp_path), 2)
    out = capsys.readouterr().out
    assert "b, seed 0: ended with 1, see" in out and "| b | 0 | none finished" in out
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "table.md").read_text().splitlines()[2].startswith("| a | 1 | 0.5 [")


def test_a_sweep_goes_on_where_it_was(tmp_path, capsys):
    done, open_ = scripted(tmp_path, "a"), scripted(tmp_path, "b")
    assert sweep.Runner(1).run([done]) == {done: 0}
    sweep._run_all([done, open_], str(tmp_path), 1)
    assert (starts(done), starts(open_)) == (1, 1)
    assert "2 runs in" in capsys.readouterr().out


@pytest.mark.cases("steps0-False")
@pytest.mark.parametrize("steps, is_finished", [((), False), ((0,), False), ((0, 2), True), ((4,), True)])
def test_a_run_without_its_last_checkpoint_is_not_finished(tmp_path, steps, is_finished):
    job = scripted(tmp_path, "a")
    exec(job.arguments[0], {})
    assert job.is_finished()  # its checkpoints may be deleted as a whole
    folder = pathlib.Path(job.workdir) / "checkpoints"
    folder.mkdir()
    for step in steps:
        (folder / str(step)).mkdir()
        (folder / str(step) / "manifest.json").touch()
    (folder / "3").mkdir()  # a save that was killed
    assert job.is_finished() == is_finished


@pytest.mark.all
def test_the_table_of_a_shorter_sweep_leaves_later_steps_out(tmp_path):
    job = scripted(tmp_path, "a", body="", value=0.5)
    sweep.Runner(1).run([job])
    later = {"step": 9, "phase": "eval", "eval/greedy_accuracy": 0.9, "eval/n": 100}
    with open(pathlib.Path(job.workdir) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(later) + "\n")
    assert "| a | 1 | 0.5 [" in sweep.table([job])


def test_a_name_that_is_too_long_for_a_file_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep"])
    with pytest.raises(ValueError, match="the name of an arm has 219 characters, .*shorter names"):
        jobs([{"name": "x" * 214}])


@pytest.mark.all
def test_several_run_at_a_time(tmp_path):
    body = "import os\nfor _ in range(200):\n    if len(list(folder.parent.glob('*/starts'))) == 2: break\n    time.sleep(0.05)\nelse: sys.exit(1)"
    found = [scripted(tmp_path, name, body=body) for name in "ab"]
    assert set(sweep.Runner(2).run(found).values()) == {0}


def test_cores_are_dealt_out():
    assert sweep.shares([0, 1, 2, 3, 6], 2) == [{0, 2, 6}, {1, 3}]
    assert sweep.shares([4], 2) == [{4}, {4}]
    assert sweep.shares([], 2) == [set(), set()]  # a system that does not tell


@pytest.mark.all
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system deals out no cores")
def test_each_of_several_runs_has_its_share_of_the_cores(tmp_path):
    body = "import os\n(folder / 'cores').write_text(repr(sorted(os.sched_getaffinity(0))))\n"
    # The first two run at the same time: each ends after the other has begun.
    others = {"a": "b", "b": "a", "c": "c"}
    met = "while not (folder.parent / '{}-seed0' / 'cores').exists(): time.sleep(0.02)"
    found = [scripted(tmp_path, name, body=body + met.format(others[name])) for name in "abc"]
    assert set(sweep.Runner(2).run(found).values()) == {0}
    expected = sweep.shares(sorted(os.sched_getaffinity(0)), 2)
    cores = [set(json.loads(pathlib.Path(job.workdir, "cores").read_text())) for job in found]
    assert all(own in expected for own in cores)
    assert cores[0] != cores[1] or expected[0] == expected[1]


@pytest.mark.all
def test_a_log_that_cannot_be_opened_ends_the_sweep(tmp_path):
    found = [scripted(tmp_path, name) for name in "ab"]
    found[0].log.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        sweep.Runner(1).run(found)


@pytest.mark.all
def test_a_signal_reaches_the_runs_and_ends_the_sweep(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n(folder / 'ready').touch()\ntime.sleep(60)"
    found = [scripted(tmp_path, name, body=body) for name in "ab"]
    import threading

    def ask():
        while not pathlib.Path(found[0].workdir, "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(cli.Interrupted, match="the same command continues"):
        sweep.Runner(1).run(found)
    assert starts(found[0]) == 1 and not pathlib.Path(found[1].workdir).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# The table


@pytest.mark.all
def test_the_table(tmp_path):
    """Student's interval of 0.4 and 0.6: 0.5 -+ 12.7062 * 0.1; Wilson's of 0.5 of 100."""
    found = [scripted(tmp_path, "a", 0, 0.4), scripted(tmp_path, "a", 1, 0.6), scripted(tmp_path, "b")]
    assert set(sweep.Runner(1).run(found).values()) == {0}
    header, _, a, b = sweep.table(found).splitlines()
    assert header == "| arm | seeds | greedy accuracy | sampled accuracy | held-out reward | reward | max abs dp |"
    assert a == "| a | 2 | 0.5 [-0.7706, 1.771] | – | – | 0.5 [-0.7706, 1.771] | – |"
    assert b == "| b | 1 | 0.5 [0.4038, 0.5962] | – | – | 0.5 | – |"


def test_metrics_of_training_are_averaged_over_the_last_tenth(tmp_path):
    lines = [json.dumps({"step": i, "phase": "train", "reward/mean": float(i)}) for i in range(1, 21)]
    last = {"eval/greedy_accuracy": 1.0, "eval/sampled_reward": 0.75, "eval/n": 4}
    lines.append(json.dumps({"step": 20, "phase": "eval", **last}))
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    job = sweep.Job("a", 0, str(tmp_path / "a-seed0"), (), 20)
    assert "| 0.75 | 19.5 |" in sweep.table([job])  # Wilson's interval is of shares alone
    # All rewards of the last evaluation failed: that of an earlier step is not its result.
    lines.append(json.dumps({"step": 20, "phase": "eval", "eval/greedy_accuracy": 1.0, "eval/n": 4}))
    (tmp_path / "a-seed0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "| – | 19.5 |" in sweep.table([job])


# The command


def test_each_variant_of_a_config_has_a_folder():
    folders = map(sweep.default_folder, ("configs/sweeps/a.py", "configs/sweeps/a.py:b"))
    assert list(folders) == ["runs/sweep-a", "runs/sweep-a-b"]


@pytest.fixture
def call(tmp_path):
    """Runs the command with these flags; returns its exit code and what it printed."""
    command = ["-m", "jaxrl_tis.sweep", "--config=tests/small_sweep.py", f"--out={tmp_path}"]
    return lambda *words: forked.run([*command, *words], tmp_path.with_suffix(".log"))


@pytest.mark.all
def test_the_command_shows_its_runs_and_refuses_before_any_of_them(tmp_path, call):
    code, dry = call("--dry_run", "--seeds=0,1")
    assert code == 0 and len(dry.splitlines()) == 6, dry
    assert shlex.split(dry.splitlines()[0])[-1] == f"--workdir={tmp_path}/lr=0.001-seed0"
    assert not list(tmp_path.iterdir())
    flagfile = tmp_path.with_suffix(".flags")
    flagfile.write_text("--config.eval.prompts=7\n")
    code, dry = call(f"--flagfile={flagfile}", "--config.task.chat", "--dry_run", "--noconfig.reward.network")
    assert code == 0 and "--config.eval.prompts=7" in dry, dry
    assert "--config.task.chat=True" in dry and "--config.reward.network=False" in dry
    code, typo = call("--config.optimizer.lrr=1")
    assert code == 2 and "did you mean 'lr'" in typo and not list(tmp_path.iterdir())
    code, wrong = call("--seeds=0,x")
    assert code == 2 and "give whole numbers" in wrong


@pytest.mark.all
def test_the_command(tmp_path, call):
    code, done = call("--jobs=2")
    assert code == 1
    assert "1 of 3 runs failed: name=tests.tiny_rewards_absent, seed 0" in done
    assert "absent" in (tmp_path / "name=tests.tiny_rewards_absent-seed0.log").read_text()
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [row.split("|")[1:3] for row in rows] == [
        [" lr=0.001 ", " 1 "], [" lr=0.003 ", " 1 "], [" name=tests.tiny_rewards_absent ", " 0 "]]
    assert (tmp_path / "report.html").exists()
    rewards = [metrics.read(tmp_path / f"lr={lr}-seed0")[-1]["step"] for lr in ("0.001", "0.003")]
    assert np.all(np.array(rewards) == 1)
    _, again = call()
    assert "3 runs in" in again and "2 of them finished before" in again
