"""One of two processes hangs, or holds another batch than the other."""

import json
import pathlib

import pytest

from tests import hosts, tiny

pytestmark = [
    pytest.mark.faults,
    pytest.mark.by_jax("jax.distributed and gloo connect the processes"),
]

MAIN = ["-m", "jaxrl_tis.main", "--config=tests/small_run.py:cut"]
# Started in the place of jaxrl_tis.main: one process forges a token of its second batch.
FORGED = """
import sys
from jaxrl_tis import cli_flags, main, processes, rows
from jaxrl_tis.trainer import Trainer

score = Trainer.score

def forged(self, state, samples, sampled_by):
    out = score(self, state, samples, sampled_by)
    if processes.index() == 1 and sampled_by.keys() == {1}:
        out["tokens"] = out["tokens"].copy()
        out["tokens"][3, 1] += 1
    return out

Trainer.score = forged
cli_flags.run(main.main, required=["config", "workdir"])
"""
HANGING = '''
import os, time
from tests.tiny_rewards import closeness

def reward(text, record):
    if os.environ.get("HANGS") and os.path.exists(os.environ["HANGS"]):
        time.sleep(600)
    return closeness(text, record)
'''


def test_a_hang_in_one_process_ends_both_with_42_and_their_stacks(tmp_path, monkeypatch):
    """Its reward never returns: the other waits in a collective for what it does not send."""
    (tmp_path / "hanging.py").write_text(HANGING)
    workdir, sign = tmp_path / "run", tmp_path / "now"
    command = [*MAIN, f"--workdir={workdir}", "--config.reward.name=hanging:reward",
               "--config.reward.timeout=600", "--config.watchdog.timeout=12"]
    environment = {"PYTHONPATH": f"{hosts.ROOT}:{tmp_path}", "HANGS": str(sign)}
    with hosts.Hosts(tmp_path / "logs", command, **environment) as pair:
        pair.wait_for("step 0: held-out")
        sign.touch()
        assert pair.codes() == [42, 42], pair.text(0) + pair.text(1)
        texts = [pair.text(i) for i in range(2)]
    stacks = sorted((workdir / "stacks").iterdir())
    assert stacks and all("no progress for 12 s" in path.read_text() for path in stacks)
    named = {path.name.partition("-")[0] for path in stacks}
    assert named <= {"process0", "process1"} and "Traceback" not in "".join(texts)
    sign.unlink()
    beat = json.loads((workdir / "heartbeat.json").read_text())
    assert beat["seconds_since_progress"] > 5


def test_another_token_on_one_process_stops_both_and_is_named(tmp_path):
    script = tmp_path / "forged.py"
    script.write_text(FORGED)
    workdir = tmp_path / "run"
    command = [str(script), "--config=tests/small_run.py:cut", f"--workdir={workdir}"]
    with hosts.Hosts(tmp_path / "logs", command) as pair:
        assert pair.codes() == [1, 1], pair.text(0) + pair.text(1)
        for i in range(2):
            told = pair.text(i)
            assert "step 2: batch.tokens is not the same everywhere" in told, told[-2000:]
            assert "the run stops, as it would diverge" in told and "Traceback" not in told
    assert max(r["step"] for r in tiny.lines(workdir) if r["phase"] == "train") == 1
    assert sorted(p.name for p in pathlib.Path(workdir, "checkpoints").iterdir()) == ["0", "1"]
