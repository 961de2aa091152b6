"""Several processes give what one gives, bit by bit, and end together."""

import json
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_tis import export
from jaxrl_tis.build import build
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.record import checkpoint, failures
from jaxrl_tis.runtime import processes
from tests import forked, hosts, small_run, tiny

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("jax.distributed, gloo and orbax connect the processes")

MAIN = [*hosts.MAIN, "--config=tests/small_run.py:cut"]
INVARIANT = ["--config.model.numerics=invariant", "--config.engine.quantization=none"]


# Process 0 takes longer to complete a save than the others wait at their end.
SLOW = """
processes.END_SECONDS = 1
write = checkpoint.write_manifest

def slow(folder):
    time.sleep(4)
    write(folder)

checkpoint.write_manifest = slow
"""
# Both wait within each step until a file is there: what happens before, happens before the step ends.
HELD = """
import pathlib
score = Trainer.score

def held(*args):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.02)
    return score(*args)

Trainer.score = held
"""


# The exchange


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes got."""
    folder = tmp_path_factory.mktemp("exchanges")
    with hosts.Hosts(folder, ["tests/exchanges.py", f"--folder={folder}"]) as pair:
        assert pair.codes() == [0, 0], pair.text(0) + pair.text(1)
    return [json.loads((folder / f"found{i}.json").read_text()) for i in range(2)]


@pytest.mark.all
@BY_JAX
def test_both_get_what_each_passed_in_their_order(found):
    for i, of in enumerate(found):
        assert (of["index"], of["first"], of["alone"]) == (i, i == 0, False)
        assert of["shard"] == {"shard_index": i, "shard_count": 2}
        assert of["exchange"] == [{"me": 0, "long": "", "x": 0.1},
                                  {"me": 1, "long": "é" * 3000, "x": 1.1}]
        assert of["gather"] == ["a", "b"]
        assert of["any"] == [False, True]


def test_each_does_its_share_and_gets_all(found):
    assert [of["did"] for of in found] == [[0, 1], [2, 3, 4]]
    for of in found:
        assert of["share"] == [[0, 0], [1, 0], [2, 1], [3, 1], [4, 1]]


def test_what_the_first_did_or_refused_holds_for_all(found):
    assert [of["told"] for of in found] == [{"by": 0}] * 2
    message = "--json=/none/x: its folder does not exist; create it, or give another path"
    assert [of["refused"] for of in found] == [["FileNotFoundError", message],
                                               ["ValueError", message]]
    assert [of["interrupted"] for of in found] == [["Interrupted", "the head is lost"]] * 2


def test_the_first_difference_is_named_with_both_values(found):
    for of in found:
        assert of["same"] is None
        assert of["other dtype"].startswith("a is not the same everywhere")
        assert of["other value"] == (
            "config.seed is not the same everywhere: 0 on process 0, 1 on process 1")
        assert of["of the second alone"] == (
            "b is not the same everywhere: nothing on process 0, 2 on process 1")
        assert of["missing"] == "b is not the same everywhere: 2 on process 0, nothing on process 1"


@BY_JAX
def test_nobody_leaves_before_all_came(found):
    starts, ends = zip(*(of["met"] for of in found), strict=True)
    assert starts[1] < starts[0] and min(ends) >= max(starts)
    processes.meet("alone", 0)


def test_one_process_has_nobody_to_ask():
    assert processes.exchange(3) == [3] and processes.gather([1, 2]) == [1, 2]
    assert processes.share([1, 2], lambda items: [-x for x in items]) == [-1, -2]
    assert processes.any_of(True) and not processes.any_of(False)
    assert processes.difference({"a": 1}) is None and processes.is_first()
    with pytest.raises(KeyError):
        processes.first(lambda: {}["a"])


@pytest.mark.parametrize("flags", [("a:1", 0, -1), ("", 2, 0), ("a:1", 2, -1), ("a:1", 2, 2)])
def test_half_a_connection_is_refused(flags):
    with pytest.raises(ValueError, match="give all three"), processes.connected(*flags, 10):
        pass


@pytest.mark.all
@BY_JAX
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_others_do_not_come_ends_with_42_and_a_line(tmp_path, index):
    """The coordinator waits for a late host; the late host comes when the coordinator has left."""
    connection = [f"--coordinator=127.0.0.1:{hosts.free_port()}", "--num_processes=2",
                  f"--process_id={index}", "--connect_seconds=1.5"]
    command = [*MAIN, f"--workdir={tmp_path / 'run'}", *connection]
    assert forked.run(command, tmp_path / "log") == (
        42, "not all processes came within 1.5 s (--connect_seconds); the same command on all "
        "hosts continues\n")
    assert not (tmp_path / "run").exists()


def test_the_time_to_connect_ends_once_all_came(monkeypatch):
    codes, is_over = [], threading.Event()
    monkeypatch.setattr(processes.os, "_exit", lambda code: (codes.append(code), is_over.set()))
    with processes._in_time(1.0):
        pass
    assert not is_over.wait(2.0)
    with processes._in_time(0.05):
        assert is_over.wait(forked.SECONDS)
    assert codes == [42]


# Runs


def run(folder, count, *arguments, per_host=None):
    """A run of `count` processes; returns their exit codes and what they printed."""
    command = [*MAIN, f"--workdir={folder}", *arguments]
    with hosts.Hosts(folder.with_suffix(".logs"), command, count, per_host=per_host) as all_hosts:
        return all_hosts.codes(), [all_hosts.text(i) for i in range(count)]


def state_of(workdir, arguments=()):
    config = small_run.get_config("cut")
    for argument in arguments:
        name, value = argument.removeprefix("--config.").split("=")
        config.update_from_flattened_dict({name: int(value) if value.isdigit() else value})
    with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
        return checkpoints.restore(abstract_state(build(config).training))


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> pathlib.Path:
    """The run of one process with eight devices, in invariant numerics."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    codes, texts = run(workdir, 1, *INVARIANT)
    assert codes == [0], texts
    assert all(r["actor/grad_norm"] > 1e-3 for r in tiny.lines(workdir) if r["phase"] == "train")
    return workdir


@pytest.mark.all
def test_a_run_that_loses_processes_and_changes_their_number_is_the_run_of_one(
    reference, tmp_path
):
    """Two processes of which one is asked to stop, a worker and then the coordinator killed, one
    process, and four at the end: every metric and every bit of the state."""
    workdir = tmp_path / "run"
    command = [*MAIN, f"--workdir={workdir}", *INVARIANT]

    def held(name, command, change=""):
        folder = tmp_path / name
        folder.mkdir()
        change += HELD.replace("{gate!r}", repr(f"{folder / 'gate'}"))
        return [*hosts.changed(folder, change), *command[len(hosts.MAIN):]]

    with hosts.Hosts(tmp_path / "asked", held("asked", command, SLOW)) as pair:
        pair.wait_for("step 0: held-out")
        pair.send(1, signal.SIGTERM)
        (tmp_path / "asked" / "gate").touch()
        assert pair.codes() == [42, 42], pair.text(0)
        assert all("the same command continues" in pair.text(i) for i in range(2))
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())
    assert (workdir / "checkpoints" / f"{steps[-1]}" / "manifest.json").exists()
    assert steps[-1] < 3 and len(tiny.lines(workdir)) < len(tiny.lines(reference))
    for killed, left in ((1, 0), (0, 1)):
        name = f"killed{killed}"
        waiting = held(name, command)
        with hosts.Hosts(tmp_path / name, waiting, heartbeat=hosts.HEARTBEAT) as pair:
            pair.wait_for("continuing")
            pair.send(killed, signal.SIGKILL)
            (tmp_path / name / "gate").touch()
            codes = pair.codes()
            assert codes[killed] == -9 and codes[left] in (42, -signal.SIGABRT), pair.text(left)
    assert run(workdir, 1, *INVARIANT, "--config.steps=2")[0] == [0]
    codes, texts = run(workdir, 4, *INVARIANT)
    assert codes == [0] * 4, texts
    assert (workdir / "report.html").stat().st_mtime > (workdir / "config.json").stat().st_mtime
    assert "continuing" in texts[0] and "continuing" not in texts[1]
    assert tiny.lines(workdir) == tiny.lines(reference)
    (ours, meta), (theirs, expected) = (state_of(w, INVARIANT) for w in (workdir, reference))
    assert meta == expected
    for (path, a), (_, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (ours, theirs)), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.all
def test_two_processes_train_to_the_parameters_of_one(tmp_path):
    """In fast numerics with an int8 sampler."""
    for count in (1, 2):
        codes, texts = run(
            tmp_path / f"run{count}", count, "--config.steps=2", "--config.eval.every=2"
        )
        assert codes == [0] * count, texts
    (ours, _), (theirs, _) = (state_of(tmp_path / f"run{n}") for n in (2, 1))
    for a, b in zip(*map(jax.tree.leaves, (ours["policy"].params, theirs["policy"].params)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)


@pytest.mark.all
def test_two_processes_train_and_export_the_adapter_of_one(tmp_path):
    """Each holds a part of the factors. A fresh process exports and compares what both have saved."""
    adapters = []
    for count in (1, 2):
        workdir, adapter = tmp_path / f"run{count}", tmp_path / f"adapter{count}"
        codes, texts = run(
            workdir, count, "--config.steps=2", "--config.eval.every=2",
            "--config.model.lora=lora(rank=4, alpha=32)",
        )
        assert codes == [0] * count, texts
        export.export_adapter(str(workdir), str(adapter))
        adapters.append(safetensors.numpy.load_file(adapter / "adapter_model.safetensors"))
    alone, both = adapters
    assert alone.keys() == both.keys() and any(np.abs(x).max() > 1e-4 for x in alone.values())
    for name, x in alone.items():
        np.testing.assert_allclose(both[name], x, rtol=0, atol=1e-5)


@pytest.mark.all
def test_the_gate_of_two_processes_is_that_of_one(tmp_path):
    reports = []
    for count in (1, 2):
        path = tmp_path / f"gate{count}.json"
        command = ["-m", "jaxrl_tis.gate", MAIN[2], f"--json={path}", "--prompts=8", *INVARIANT]
        with hosts.Hosts(tmp_path / f"gate{count}", command, count) as all_hosts:
            assert all_hosts.codes() == [0] * count, all_hosts.text(0)
            assert all_hosts.text(count - 1).count("d_mean") == (1 if count == 1 else 0)
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]


@pytest.mark.all
@pytest.mark.parametrize("case, arguments, per_host, code, told", [
    ("another seed", [], {1: ["--config.seed=1"]}, 2,
     "config.seed is not the same everywhere: 0 on process 0, 1 on process 1"),
    ("another change", ["--change=seed"], {1: ["--change=optimizer.lr"]}, 2,
     "--change is not the same everywhere: ('seed',) on process 0, ('optimizer.lr',) on process 1"),
    ("too few devices", ["--config.mesh.serve=(3,1,5)"], {}, 2, "does not fit 8 devices"),
    ("an idle process", ["--config.mesh.train=(1,4,1)"], {}, 2, "leaves out the devices of process 1"),
    ("no such reward", ["--config.reward.name=none:f"], {}, 2, "'none:f' cannot be loaded"),
])
def test_a_mistake_ends_all_with_its_message_and_2(
    tmp_path, case, arguments, per_host, code, told
):
    codes, texts = run(tmp_path / "run", 2, *arguments, per_host=per_host)
    assert codes == [code] * 2, texts
    assert all(told in text and "Traceback" not in text for text in texts)


@pytest.mark.all
def test_a_reward_that_always_fails_ends_all_and_is_told_by_one(tmp_path):
    codes, texts = run(
        tmp_path / "run", 2, "--config.reward.name=tests.tiny_rewards:always_raises"
    )
    assert codes == [2] * 2, texts
    assert all("rewards failed. The last error: KeyError: 'gold'" in text for text in texts)
    assert [text.count("Traceback") for text in texts] == [1, 0]
    [kind] = failures.read(tmp_path / "run" / failures.FILE_NAME)
    assert kind.count > 0 and "always_raises" in kind.traceback
