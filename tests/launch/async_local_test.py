"""What launch/async_local.sh tells at its end."""

import json

import pytest

GROUPS, STEPS = 2, 3


@pytest.fixture
def run(tmp_path):
    """Writes the record of a run of three batches of two groups, of which some may be missing."""
    def write(missing=()):
        folder = tmp_path / "run"
        folder.mkdir()
        config = {"steps": STEPS, "rollout": {"prompts": GROUPS}}
        (folder / "config.json").write_text(json.dumps({"config": config}))
        counts = {"async/left": 1, "async/resumed": 2, "async/resumed_tokens": 5, "async/workers_evicted": 0}
        steps = [{"step": step + 1, "phase": "train"} | counts for step in range(STEPS)]
        answers = [
            {"step": step + 1, "phase": "train", "id": f"{step}-{group}"}
            for step in range(STEPS) for group in range(GROUPS) if (step, group) not in missing
        ]
        for name, records in (("metrics", steps), ("samples", answers)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(text + '{"step": ')  # being written to
        return tmp_path
    return write


def test_a_whole_run(run, scripts, capsys):
    assert scripts("async_local").report(run()) == 0
    out = capsys.readouterr().out
    assert "3 of 3 steps; workers left 3 times; 6 sequences were gone on with elsewhere, from 15" in out
    assert "every batch had its 2 groups, of 6 different prompts" in out


def test_a_batch_that_is_not_whole(run, scripts, capsys):
    assert scripts("async_local").report(run(missing={(1, 0)})) == 1
    assert "a batch was not whole: groups by step {1: 2, 2: 1, 3: 2}" in capsys.readouterr().out
