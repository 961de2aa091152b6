"""The run's record survives kills, resumes and full disks; progress and timers."""

import errno
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from jaxrl_tis.record import metrics


def lines_of(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def scalars_of(workdir):
    """(tag, step, value) of every TensorBoard scalar, and the steps of the restart marks."""
    scalars, restarts = [], []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data, position = path.read_bytes(), 0
        while position < len(data):  # 8 bytes length, 4 crc, the event, 4 crc
            length = int.from_bytes(data[position:position + 8], "little")
            payload = data[position + 12:position + 12 + length]
            crc = int.from_bytes(data[position + 12 + length:position + 16 + length], "little")
            assert crc == record_writer.masked_crc32c(payload)
            event = event_pb2.Event.FromString(payload)
            scalars += [(scalar.tag, event.step, scalar.simple_value)
                        for scalar in event.summary.value]
            if event.session_log.status == event_pb2.SessionLog.START:
                restarts.append(event.step)
            position += 16 + length
    return scalars, restarts


def test_line_order_and_types(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(3, "train", {"reward/mean": jnp.float32(0.5), "actor/entropy": np.float64(0.1),
                                  "count": 7, "flag": np.bool_(True)})
        # Readable while the run goes on.
        assert lines_of(tmp_path) == [
            '{"step": 3, "phase": "train", "actor/entropy": 0.1, "count": 7.0, "flag": 1.0, '
            '"reward/mean": 0.5}']
    assert metrics.read(tmp_path)[0]["reward/mean"] == 0.5


def test_non_finite_values_are_strict_json_and_come_back(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"a": jnp.nan, "b": np.inf, "c": -np.inf, "d": 1e-300})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(lines_of(tmp_path)[0], parse_constant=refuse)["a"] == "nan"
    (record,) = metrics.read(tmp_path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 1e-300)
    assert record["phase"] == "train"


@pytest.mark.parametrize("values, message", [
    ({"step": 1.0}, "'step' at step 2: that name is the line's own"),
    ({"reward": np.zeros(3)}, r"'reward' at step 2 has shape \(3,\)"),
    ({"reward": np.zeros(1)}, r"'reward' at step 2 has shape \(1,\)"),
])
def test_wrong_metrics_are_named(tmp_path, values, message):
    with metrics.MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(2, "train", values)
    assert lines_of(tmp_path) == []


def test_tensorboard_holds_the_same_values(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"reward/mean": 0.25, "actor/entropy": 2.0})
        writer.write(1, "eval", {"eval/n": 64})
    scalars, _ = scalars_of(tmp_path)
    assert scalars == [("train/actor/entropy", 1, 2.0), ("train/reward/mean", 1, 0.25),
                       ("eval/eval/n", 1, 64.0)]


def test_resume_drops_later_and_torn_lines(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, "train", {"reward/mean": step / 10, "bad": math.nan})
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "phase": "tr')
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5]
    with metrics.MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.write(4, "train", {"reward/mean": 0.9, "bad": math.nan})
    # The kept lines are the old bytes, then the new line 4.
    assert lines_of(tmp_path)[:3] == text.splitlines()[:3]
    assert [(record["step"], record["reward/mean"]) for record in metrics.read(tmp_path)] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    assert os.listdir(tmp_path).count("metrics.jsonl.new") == 0
    scalars, restarts = scalars_of(tmp_path)
    assert restarts == [0, 4]  # TensorBoard hides the first file's steps from 4 on
    assert scalars[-1] == ("train/reward/mean", 4, pytest.approx(0.9))


def test_torn_line_at_the_very_step_of_the_checkpoint(tmp_path):
    """Only the newline is lost: the values of step 2 are whole and step 2 is not run again."""
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"a": 1})
        writer.write(2, "train", {"a": 2})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with metrics.MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, "train", {"a": 3})
    assert [record["a"] for record in metrics.read(tmp_path)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("resume_step, expected", [
    (1, [("warmup", 0), ("warmup", 50), ("eval", 0), ("train", 1)]),
    (0, [("warmup", 0), ("warmup", 50), ("eval", 0)]),
])
def test_warmup_counts_its_own_steps(resume_step, expected):
    written = [("warmup", 0), ("warmup", 50), ("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    kept = metrics.records_on_resume([{"step": step, "phase": phase} for phase, step in written],
                                  resume_step)
    assert [(record["phase"], record["step"]) for record in kept] == expected


def test_the_warm_up_has_steps_of_its_own():
    written = [{"step": step, "phase": "warmup"} for step in (0, 10, 20)]
    assert metrics.records_on_resume([*written, {"step": 1, "phase": "train"}], 0) == written


def test_a_new_start_sets_the_old_record_aside(tmp_path):
    for step in (1, 2):
        with metrics.MetricsWriter(tmp_path) as writer:
            writer.write(step, "train", {"a": step})
    assert [record["step"] for record in metrics.read(tmp_path)] == [2]
    assert '"step": 1' in (tmp_path / "metrics.jsonl.old").read_text()


def test_read_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="is .* the --workdir of a run"):
        metrics.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "pha\n{"step": 2, "phase": "train"}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 1: not JSON"):
        metrics.read(tmp_path)


def test_full_disk_is_explained(tmp_path, monkeypatch):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, "train", {"a": 1})

        class FullDisk(io.RawIOBase):
            def write(self, _):
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(writer._file, "_file", FullDisk())
        with pytest.raises(RuntimeError, match="metrics.jsonl: .*No space left.*checkpoints"):
            writer.write(2, "train", {"a": 2})
    assert [record["step"] for record in metrics.read(tmp_path)] == [1]


def test_short_writes_go_on(tmp_path, monkeypatch):
    """A raw write may take a part of the bytes, as on a disk that is all but full."""
    class FiveBytesAtATime(io.RawIOBase):
        taken = b""

        def write(self, data):
            self.taken += bytes(data[:5])
            return min(len(data), 5)

    file = FiveBytesAtATime()
    with metrics.MetricsWriter(tmp_path) as writer:
        monkeypatch.setattr(writer._file, "_file", file)
        writer.write(1, "train", {"a": 0.5})
    assert file.taken == b'{"step": 1, "phase": "train", "a": 0.5}\n'


FILE_SIZE_LIMIT = """
    import resource, sys
    from jaxrl_tis.record import metrics

    writer = metrics.MetricsWriter(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    try:
        for step in range(1, 100):
            writer.write(step, "train", {"reward": 0.5})
    except RuntimeError as error:
        print("REFUSED", step, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with metrics.MetricsWriter(sys.argv[1], resume_step=2) as writer:
        writer.write(3, "train", {"reward": 0.75})
"""


@pytest.mark.all
def test_file_size_limit_of_the_system(tmp_path):
    """A real short write: nothing hangs, the torn line is dropped on resume."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(FILE_SIZE_LIMIT), str(tmp_path)],
                            capture_output=True, text=True, timeout=60,
                            cwd=pathlib.Path(metrics.__file__).parents[2])
    assert result.returncode == 0, result.stderr
    assert "REFUSED" in result.stdout and "cannot write the run's record" in result.stdout
    assert [record["reward"] for record in metrics.read(tmp_path)] == [0.5, 0.5, 0.75]


def set_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_timer_adds_up_and_starts_again(monkeypatch):
    now, timer = set_clock(monkeypatch), metrics.Timer()
    for seconds in (1.0, 2.5):
        with timer("rollout"):
            now[0] += seconds
    with pytest.raises(KeyError), timer("reward"):
        now[0] += 0.5
        raise KeyError
    assert timer.collect() == {"time/rollout_s": 3.5, "time/reward_s": 0.5}
    assert timer.collect() == {}


def test_a_compact_record_keeps_what_is_marked(tmp_path):
    values = {"reward/mean": 0.5, "mismatch/tv_seq": 0.1, "time/step_s": 2.0}
    with metrics.MetricsWriter(tmp_path, is_compact=True) as writer:
        writer.write(1, "train", values)
    assert metrics.read(tmp_path) == [
        {"step": 1, "phase": "train", "reward/mean": 0.5, "time/step_s": 2.0}]


def test_sinks_get_everything(tmp_path):
    class Sink:
        logged, is_closed = [], False

        def log(self, step, values):
            self.logged.append((step, values))

        def close(self):
            self.is_closed = True

    sink = Sink()
    with metrics.MetricsWriter(tmp_path, sinks=[sink], is_compact=True) as writer:
        writer.write(3, "train", {"reward/mean": 0.5, "mismatch/tv_seq": float("nan")})
    [(step, values)] = sink.logged
    assert step == 3 and values["train/reward/mean"] == 0.5 and sink.is_closed
    assert np.isnan(values["train/mismatch/tv_seq"])


def test_lost_time_is_that_of_the_lines_that_are_dropped(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, "train", {"time/step_s": 10.0 * step})
        writer.write(3, "eval", {"time/eval_s": 5.0})
    with metrics.MetricsWriter(tmp_path, resume_step=1) as writer:
        assert writer.lost_seconds == 20 + 30 + 5
    with metrics.MetricsWriter(tmp_path, resume_step=1) as writer:
        assert writer.lost_seconds == 0


def test_compilation_is_a_phase_of_its_own():
    compiled = [0.0]
    timer = metrics.Timer(lambda: compiled[0])
    with timer("update"):
        time.sleep(0.03)
        compiled[0] += 0.02
    with timer("score"):
        pass
    times = timer.collect()
    assert times["time/compile_s"] == pytest.approx(0.02)
    assert 0.005 < times["time/update_s"] < 5 and times["time/score_s"] < 5
    assert "time/compile_s" not in timer.collect()


def test_a_run_has_ended_with_the_evaluation_after_its_last_step():
    lines = [{"phase": "train", "step": 9}, {"phase": "eval", "step": 5}]
    assert metrics.has_ended(lines, 5) and not metrics.has_ended(lines, 9)


def test_an_accuracy_is_of_the_answers_with_a_reward():
    line = {"eval/n": 512.0, "eval/greedy_n": 4.0}
    assert metrics.num_answers(line, "eval/greedy_accuracy") == 4
    assert metrics.num_answers(line, "eval/constant_accuracy") == 512
    assert metrics.num_answers({}, "eval/greedy_accuracy") is None
