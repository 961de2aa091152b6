"""launch/async_local.py: which process it kills, and what it reports at the end."""

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest

GROUPS, STEPS = 2, 3
SECONDS = 30.0
WORKER = "exec -a ray::RolloutWorker.report sleep 60"


@pytest.fixture
def run(tmp_path):
    """Writes the record of a run of batches of two groups, of which some may be missing."""
    def write(missing=(), count=STEPS):
        config = {"steps": STEPS, "rollout": {"prompts": GROUPS, "workers": 2}}
        (tmp_path / "config.json").write_text(json.dumps({"config": config}))
        counts = {
            "async/left": 1, "async/resumed": 2, "async/resumed_tokens": 5, "async/workers": 2.0,
            "async/workers_evicted": 0,
        }
        steps = [{"step": step + 1, "phase": "train"} | counts for step in range(count)]
        answers = [
            {"step": step + 1, "phase": "train", "id": f"{step}-{group}"}
            for step in range(count) for group in range(GROUPS) if (step, group) not in missing
        ]
        for name, records in (("metrics", steps), ("samples", answers)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / f"{name}.jsonl").write_text(text + '{"step": ')  # being written to
        return tmp_path
    return write


@contextlib.contextmanager
def learner(command):
    """A shell with a process group of its own, as a learner."""
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def found(module, pid, count):
    """The workers of a learner, once there are so many."""
    end = time.monotonic() + SECONDS
    while len(pids := module.workers(pid)) != count:
        assert time.monotonic() < end, pids
        time.sleep(0.02)
    return pids


def test_a_whole_run(run, scripts, capsys):
    assert scripts("async_local").report(run()) == 0
    assert capsys.readouterr().out == (
        "steps: 3 of 3; workers lost: 3, evicted: 0, at the last step: 2 of 2; sequences continued "
        "from reported tokens: 6, with 15 tokens\n"
        "every batch had its 2 groups, of 6 different prompts\n"
    )


def test_a_batch_that_is_not_whole(run, scripts, capsys):
    assert scripts("async_local").report(run(missing={(1, 0)})) == 1
    assert "a batch was incomplete: groups by step {1: 2, 2: 1, 3: 2}" in capsys.readouterr().out


@pytest.mark.all
def test_one_worker_of_this_learner_is_killed(run, scripts, capsys):
    module = scripts("async_local")
    folder = run(count=module.KILL_STEP)
    nested = f"({WORKER}) & bash -c '({WORKER}) & wait' & exec -a ray::IDLE sleep 60"
    with learner(nested) as ours, learner(f"({WORKER}) & wait") as other:
        first, second = found(module, ours.pid, 2)
        [foreign] = found(module, other.pid, 1)
        assert module.kill(folder, ours.pid) == 0
        out = capsys.readouterr().out
        assert out == f"one of 2 workers, process {first}, was killed after step {module.KILL_STEP}\n"
        assert found(module, ours.pid, 1) == [second]
        assert module.workers(other.pid) == [foreign]


@pytest.mark.all
def test_a_learner_without_workers(run, scripts, capsys):
    module = scripts("async_local")
    with learner("sleep 60") as process:
        assert module.kill(run(count=module.KILL_STEP), process.pid) == 1
    assert "has no ray::RolloutWorker among its descendants" in capsys.readouterr().err


@pytest.mark.all
def test_a_learner_that_ends_early(run, scripts, capsys):
    with learner("true") as process:
        process.wait()
        assert scripts("async_local").kill(run(count=0), process.pid) == 1
    assert capsys.readouterr().err == "the learner ended before step 5\n"
