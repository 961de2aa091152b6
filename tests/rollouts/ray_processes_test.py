"""A learner of two processes whose samplers are Ray actors."""

import os
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.record import metrics
from jaxrl_tis.rollouts import ray_processes
from jaxrl_tis.rollouts.ray_processes import ProcessesSource
from jaxrl_tis.runtime import fingerprint, processes
from tests import hosts, ray_nodes

STEPS = 8
FIELDS = {
    "rollout.driver": "ray", "rollout.workers": "2", "rollout.cpus_per_worker": "0.5",
    "rollout.schedule": "in_flight(staleness=2)", "steps": f"{STEPS}",
    # Each process holds one half of most weights. A worker holds all on its one device.
    "model.num_kv_heads": "2", "mesh.train": "(1,2,1)", "mesh.serve": "(1,1,-1)",
}


# Without Ray: the source of one process, whose parts are made by hand.


def source(is_first):
    made = object.__new__(ProcessesSource)
    made._source, made._board = mock.Mock() if is_first else None, mock.Mock()
    made._part, made._is_complete, made._base = [], False, None
    return made


def test_a_batch_ends_with_what_is_replayed():
    process, posted = source(is_first=True), []
    process._post = lambda name, value: posted.append(value)
    books = process._source.books
    books.lacks_groups, books.replayed.return_value = False, ["old"]
    assert [process._poll(), process._poll()] == ["ready", "complete"] and posted == [["old"]]
    process._is_complete, books.replayed.return_value = False, []
    assert process._poll() == "complete" and posted == [["old"]]


def test_the_pieces_of_all_processes_are_read_when_all_are_there(monkeypatch):
    process, calls = source(is_first=True), []
    monkeypatch.setattr(processes, "exchange", lambda value: calls.append("exchange"))
    monkeypatch.setattr(processes, "index", lambda: 0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(ray_processes, "pieces", lambda served: served)
    monkeypatch.setattr(ray_processes.ray, "get", lambda refs: refs)
    process._post = lambda name, value: calls.append(name)
    process._board.read.remote = lambda name: calls.append(f"read {name}") or [name]
    assert process._put("weights") == ("pieces 0", "pieces 1")
    assert calls == ["exchange", "pieces 0", "exchange", "read pieces 0", "read pieces 1"]
    process._source = None  # another process reads nothing
    assert process._put("weights") == () and calls[5:] == ["exchange", "pieces 0", "exchange"]


def test_another_process_puts_the_base_once(monkeypatch):
    process, put = source(is_first=False), []
    monkeypatch.setattr(processes, "first", lambda call: True)  # what process 0 has returned
    monkeypatch.setattr(ray_processes, "moving", lambda served: (served["factors"], served["base"]))
    monkeypatch.setattr(fingerprint, "digest", lambda tree: None)
    process._put = put.append
    process._serving_params = lambda params, version: {
        "factors": np.float32(version), "base": np.float32(-1)
    }
    for version in range(2):
        process.publish(None, version)
    assert put == [-1, 0, 1]


# Whole runs.


@pytest.mark.faults
@pytest.mark.all
def test_processes_evaluate_the_same_episodes(tmp_path):
    """Process 0 plays them for both: replies that come at other times would be other inputs of one
    program. The environment of the second process is never made."""
    fields = FIELDS | {
        "steps": "2", "task.environment": "tests.tiny_environment:Sums", "task.max_context_tokens": "20",
        "task.max_turns": "3", "task.environment_workers": "1", "reward.name": "exact",
    }
    command = [
        *hosts.MAIN, "--config=tests/small_run.py", f"--workdir={tmp_path / 'run'}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]
    with hosts.Hosts(tmp_path / "first", command, devices=2) as pair:
        assert pair.codes() == [0, 0], pair.text(0) + pair.text(1)
    records = metrics.read(tmp_path / "run")
    assert [r["step"] for r in records if r["phase"] == "train"] == [1, 2]
    assert all(r["num_turns/mean"] > 1 for r in records if r["phase"] == "train")


@pytest.mark.faults
@pytest.mark.all
@pytest.mark.parametrize("lora", ["none", "lora(rank=4, alpha=8)"])
def test_both_processes_train_on_the_same_batches_and_stop_together(tmp_path, lora):
    """processes.consistency_every of the config is 1: each step compares the processes' batches.
    The fingerprint at the workers is of the whole tree, whose halves two processes have put. With
    adapters the base goes to the workers once, and the factors at each update."""
    command = [
        *hosts.MAIN, "--config=tests/small_run.py", f"--workdir={tmp_path / 'run'}",
        f"--config.model.lora={lora}",
        *(f"--config.{name}={value}" for name, value in FIELDS.items()),
    ]
    with hosts.Hosts(tmp_path / "first", command, devices=2) as pair:
        pair.wait_for("step 2: held-out accuracy")
        pair.send(1, signal.SIGTERM)
        assert pair.codes() == [42, 42], pair.text(0) + pair.text(1)
        assert all("Traceback" not in pair.text(i) for i in range(2))
    with hosts.Hosts(tmp_path / "second", command, devices=2) as pair:
        pair.wait_for("step 4: held-out accuracy")
        os.kill(ray_nodes.named(os.getpid(), "ray::RolloutWorker")[0], signal.SIGKILL)
        assert pair.codes() == [0, 0], pair.text(0) + pair.text(1)
        assert "continuing" in pair.text(0) and "sequences continue elsewhere" in pair.text(0)
    records = [r for r in metrics.read(tmp_path / "run") if r["phase"] == "train"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert {r["async/workers"] for r in records} <= {1.0, 2.0}
    assert max(r["training/off_policy/trajectory_staleness/mean"] for r in records) <= 2
