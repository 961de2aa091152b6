"""Thinned records of runs: what a line holds, and what is left out."""

import json
import math

import numpy as np
import pytest

from experiments import records
from tests.doctor.runs import write_run
from tests.experiments import made


def finished(folder, name, steps=20, **values):
    """A workdir of the doctor's tests that has its evaluation after the last step."""
    path = folder / name
    path.mkdir()
    write_run(path, {"reward/mean": lambda step: float(step)} | values, {"steps": steps}, steps)
    with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
        for step, accuracy in ((0, 0.25), (steps, 0.5)):
            line = {"step": step, "phase": "eval", **dict.fromkeys(records.ACCURACIES, accuracy)}
            file.write(json.dumps(line) + "\n")
    return path


def test_blocks_by_hand():
    """Blocks of eight: steps 1-8 have mean 4.5, 9-16 12.5; 17-20 are no whole block."""
    lines = [{"step": s, "x/mean": float(s), "x/max": float(-s)} for s in range(1, 21)]
    assert records.thinned("x/mean", lines) == [4.5, 12.5]
    assert records.thinned("x/max", lines) == [-1.0, -9.0]
    sparse = [{"step": s, **({"y": 3.0} if s == 12 else {})} for s in range(1, 21)]
    assert records.thinned("y", sparse)[1] == 3.0 and math.isnan(records.thinned("y", sparse)[0])


def test_runs_are_gathered_and_read_again(tmp_path):
    finished(tmp_path, "TIS-2-seed3")
    finished(tmp_path, "none-seed12", **{"rollout_corr/kl": 0.3})
    for name, steps in (("none-seed0", 20), ("none-seed1", None)):  # one before its first step
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, {}, {"steps": 30}, steps or 1)
        if steps is None:
            (tmp_path / name / "metrics.jsonl").unlink()
    finished(tmp_path, "none-seed2-kept")  # no run of the sweep
    out = tmp_path / "out.jsonl"
    assert [line["seed"] for line in records.gather(tmp_path, out)] == [3, 0, 1, 12]
    assert [line.get("unfinished") for line in map(json.loads, out.read_text().splitlines())] == [
        None, 20, 0, None]
    (first, second), unfinished = records.read(out)
    assert unfinished == ["none, seed 0", "none, seed 1"]
    assert (first.arm, first.seed, first.verdict) == ("TIS-2", 3, ["healthy"])
    assert (second.arm, second.seed, second.verdict) == ("none", 12, ["A"])
    assert "A.kernels" in second.findings
    np.testing.assert_array_equal(first.series["reward/mean"], [4.5, 12.5])
    np.testing.assert_array_equal(first.steps("reward/mean"), [8, 16])
    np.testing.assert_array_equal(first.series["eval/sampled_accuracy"], [0.25, 0.5])
    assert np.isnan(first.series["mismatch/ess_seq"]).all()  # this record has none


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        records.gather(tmp_path, tmp_path / "out.jsonl")


@pytest.mark.parametrize("line", ["{", "[]", '{"arm": "a"}', '{"arm": "a", "seed": 0, "verdict": [], '
                                  '"findings": [], "reward/mean": [[1], "x"]}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    made.write(path, [made.run("a", 0)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="x.jsonl:2 is not the line of a run"):
        records.read(path)


def test_the_end_is_the_last_tenth_without_nan():
    run = made.run("a", 0, reward__mean=[*range(10), np.nan, 7.0])
    assert records.at_end(run, "reward/mean") == 7.0  # ceil(1.2) = 2 blocks
    assert records.at_end(run, "reward/mean", 1.0) == pytest.approx((45 + 7) / 11)
    assert np.isnan(records.at_end(made.run("a", 0, reward__mean=np.nan), "reward/mean"))


def test_runs_by_arm():
    runs = [made.run("b", 0), made.run("a", 0), made.run("b", 1)]
    assert [(arm, len(own)) for arm, own in records.by_arm(runs).items()] == [("b", 2), ("a", 1)]
