"""One of two processes hangs, or holds another batch than the other."""

import json
import pathlib
import signal

import pytest

from tests import hosts, tiny

pytestmark = [pytest.mark.faults, pytest.mark.all]

ARGUMENTS = ["--config=tests/small_run.py:cut"]
FORGED = """
score = Trainer.score

def forged(self, state, samples, sampled_by, *known):
    out = score(self, state, samples, sampled_by, *known)
    if processes.index() == 1 and sampled_by.keys() == {1}:
        out["tokens"] = out["tokens"].copy()
        out["tokens"][3, 1] += 1
    return out

Trainer.score = forged
"""
HANGING = """
score = Trainer.score

def hanging(self, state, samples, *given):
    if processes.index() == 1:
        time.sleep(600)
    return score(self, state, samples, *given)

Trainer.score = hanging
"""
def stacks_of(folder):
    """{"process1": text}"""
    paths = sorted((folder / "run" / "stacks").iterdir())
    return {path.name.partition("-")[0]: path.read_text() for path in paths}


def test_a_process_that_hangs_ends_both_with_42(tmp_path):
    """The one that hangs ends by its watchdog, and the other one, which waits for it in a
    collective, by its own or by the loss."""
    command = [*hosts.changed(tmp_path, HANGING), *ARGUMENTS, f"--workdir={tmp_path / 'run'}",
               "--config.watchdog.timeout=30"]
    with hosts.Hosts(tmp_path / "logs", command) as pair:
        assert pair.codes() == [42, 42], pair.text(0) + pair.text(1)
        assert all("Traceback" not in pair.text(i) for i in range(2))
        assert "no progress for 30 s" in pair.text(1) and "in hanging" in pair.text(1)
    found = stacks_of(tmp_path)
    assert "step 1, score: no progress for 30 s" in found["process1"]
    assert "in hanging" in found["process1"]
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert beat["seconds_since_progress"] > 5


def test_a_process_that_waits_for_a_host_that_stands_still_ends_by_itself(tmp_path):
    command = [*hosts.MAIN, *ARGUMENTS, f"--workdir={tmp_path / 'run'}",
               "--config.watchdog.timeout=30"]
    with hosts.Hosts(tmp_path / "logs", command) as pair:
        pair.wait_for("step 0: held-out")
        pair.send(1, signal.SIGSTOP)
        assert pair.processes[0].wait(hosts.SECONDS) == 42, pair.text(0)
    found = stacks_of(tmp_path)
    assert list(found) == ["process0"] and "no progress for 30 s" in found["process0"]
    assert "jaxrl_tis/train.py" in found["process0"]


def test_another_token_on_one_process_stops_both_and_is_named(tmp_path):
    workdir = tmp_path / "run"
    command = [*hosts.changed(tmp_path, FORGED), *ARGUMENTS, f"--workdir={workdir}"]
    with hosts.Hosts(tmp_path / "logs", command) as pair:
        assert pair.codes() == [1, 1], pair.text(0) + pair.text(1)
        for i in range(2):
            told = pair.text(i)
            assert "step 2: batch.tokens is not the same everywhere" in told, told[-2000:]
            assert "the run stops, because the processes would diverge" in told and "Traceback" not in told
    assert max(r["step"] for r in tiny.lines(workdir) if r["phase"] == "train") == 1
    assert sorted(p.name for p in pathlib.Path(workdir, "checkpoints").iterdir()) == ["0", "1"]


def test_a_bad_example_ends_both_with_2(tmp_path):
    lines = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}' for i in range(9)] + ["nonsense"]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    command = [
        *hosts.MAIN, *ARGUMENTS, f"--workdir={tmp_path}/run", "--config.task.name=jsonl",
        f"--config.task.params.path={tmp_path}/data.jsonl",
        f"--config.eval.params.path={tmp_path}/data.jsonl",
    ]
    with hosts.Hosts(tmp_path / "logs", command) as pair:
        assert pair.codes() == [2, 2], pair.text(0) + pair.text(1)
        for i in range(2):
            assert "held-out data: 1 of 10 examples cannot be used:" in pair.text(i)
