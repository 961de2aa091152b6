"""Processes that draw for a learner are killed while they do, and so is the learner; all start again."""

import os
import re
import signal
import socket
import time

import pytest

from jaxrl_tis.record import metrics
from tests import commands, forked

pytestmark = pytest.mark.faults
FIELDS = {
    "driver": "processes", "schedule": "in_flight(staleness=2)", "worker_timeout": "5.0",
    "max_new_tokens": "24",
}
FLAGS = [f"--config.rollout.{name}={value}" for name, value in FIELDS.items()]
STEPS, SEQUENCES = 6, 16


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(log, module, port, *flags):
    shared = ["--config=tests/small_run.py", *FLAGS, f"--config.rollout.listen=127.0.0.1:{port}"]
    return forked.Command(["-m", f"jaxrl_tis.{module}", *shared, *flags], log)


def until(command, pattern, count=1):
    """Waits until a command has said so, so many times."""
    end = time.monotonic() + forked.SECONDS
    while len(re.findall(pattern, command.text())) < count:
        assert time.monotonic() < end, command.text()[-3000:]
        time.sleep(0.02)


def steps(folder):
    if not (folder / "metrics.jsonl").exists():
        return []
    return [r["step"] for r in metrics.read(folder) if r["phase"] == "train"]


def until_step(folder, step, learner):
    end = time.monotonic() + forked.SECONDS
    while not steps(folder) or max(steps(folder)) < step:
        assert time.monotonic() < end, learner.text()[-3000:]
        time.sleep(0.02)


@pytest.mark.all
def test_workers_and_the_learner_are_killed_and_started_again(tmp_path):
    folder, port = tmp_path / "run", free_port()
    learn = lambda log: start(
        tmp_path / log, "main", port, f"--workdir={folder}", f"--config.steps={STEPS}"
    )
    draw = lambda log: start(
        tmp_path / log, "worker", port, f"--learner=127.0.0.1:{port}", f"--name={log}"
    )
    learner, first, second = learn("learner"), draw("first"), draw("second")
    until_step(folder, 1, learner)
    os.kill(first.pid, signal.SIGKILL)
    until(learner, "rollout worker first left, lost")
    again = draw("first")
    until(learner, "rollout worker first joined", 2)
    until_step(folder, 3, learner)
    os.kill(learner.pid, signal.SIGKILL)
    assert [p.wait(forked.SECONDS) for p in (again, second)] == [42, 42]
    learner, third = learn("learner2"), draw("third")
    assert learner.wait(forked.SECONDS) == 0, learner.text()[-3000:]
    assert third.wait(forked.SECONDS) == 0, third.text()[-3000:]
    assert "continuing" in learner.text()
    records = [r for r in metrics.read(folder) if r["phase"] == "train"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))


def test_a_worker_of_another_model_is_refused(tmp_path):
    port = free_port()
    learner = start(tmp_path / "learner", "main", port, f"--workdir={tmp_path / 'run'}")
    address = f"--learner=127.0.0.1:{port}"
    other = start(tmp_path / "other", "worker", port, address, "--config.model.mlp_dim=64")
    try:
        assert other.wait(forked.SECONDS) == 2, other.text()[-3000:]
        assert 'model.mlp_dim: learner "48", worker "64"' in other.text()
    finally:
        learner.kill()
        learner.wait(forked.SECONDS)


def test_a_worker_without_patience_finds_a_learner_that_is_there():
    worker = commands.load("worker")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        worker._wait_for(address, 0.0)
    with pytest.raises(worker.LearnerLost, match="no learner at 127.0.0.1"):
        worker._wait_for(address, 0.0)


def test_a_worker_whose_learner_does_not_come_ends_with_42_and_a_line(tmp_path):
    port = free_port()
    worker = start(
        tmp_path / "worker", "worker", port, f"--learner=127.0.0.1:{port}", "--patience=0.1"
    )
    assert worker.wait(forked.SECONDS) == 42
    [line] = worker.text().splitlines()
    assert line.startswith(f"no learner at 127.0.0.1:{port}: ")


def test_a_worker_that_is_interrupted_says_so_alone(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        worker = start(tmp_path / "worker", "worker", port, f"--learner=127.0.0.1:{port}")
        server.settimeout(forked.SECONDS)
        server.accept()[0].close()  # it only looks
        with server.accept()[0]:
            time.sleep(0.2)
            worker.send_signal(signal.SIGINT)
            assert worker.wait(forked.SECONDS) == 42
    assert worker.text() == "stopped; others go on with what it drew\n"
