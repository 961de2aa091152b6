"""The record of a run: metrics.jsonl, the same values for TensorBoard, and timers.

metrics.jsonl is the run's only record, one JSON object per line: {"step", "phase", metric: value}.
Every metric that is a duration or a rate starts with "time/", so two runs of the same program are
equal once those are left out.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

FILE_NAME = "metrics.jsonl"
# JSON has no literal for these; written as strings, turned back into floats by `read`.
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(step: int, phase: str, values: Mapping[str, Any]) -> str:
    """Returns one line of metrics.jsonl: step and phase first, then the metrics sorted by name.

    Args:
      step: the training step that the values belong to.
      phase: "warmup", "train" or "eval".
      values: metric name -> scalar (Python, NumPy or JAX; any shape but () is an error).

    Raises:
      ValueError: a metric is called "step" or "phase", or is not a scalar.
    """
    record = {"step": int(step), "phase": phase}
    for name in sorted(values):
        if name in record:
            raise ValueError(f"metric {name!r} at step {step}: that name is the line's own")
        if getattr(values[name], "shape", ()) != ():
            raise ValueError(f"metric {name!r} at step {step} has shape {values[name].shape}, "
                             "reduce it to a scalar first")
        value = float(values[name])
        record[name] = value if math.isfinite(value) else str(value)
    return json.dumps(record, allow_nan=False)


def decode(line: str) -> dict[str, Any]:
    """Returns the record of one line, with "nan", "inf" and "-inf" turned back into floats."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} instead of an object")
    return {name: NON_FINITE[value] if name != "phase" and value in NON_FINITE else value
            for name, value in record.items()}


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the records of a run in the order written; a torn last line is left out.

    Raises:
      FileNotFoundError: the folder has no metrics.jsonl.
      ValueError: a line other than the last is no JSON object.
    """
    path = pathlib.Path(workdir) / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: is {workdir} the --workdir of a run?")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def records_on_resume(records: list[dict[str, Any]], resume_step: int) -> list[dict[str, Any]]:
    """Returns the records that a run resumed after `resume_step` keeps.

    Warm-up may count its own steps, so its lines stay whenever a line of a later phase stays.
    """
    is_early = lambda record: record["step"] <= resume_step
    has_begun = any(is_early(r) and r["phase"] != "warmup" for r in records)
    return [r for r in records if is_early(r) or (has_begun and r["phase"] == "warmup")]


class MetricsWriter:
    """Appends to WORKDIR/metrics.jsonl and mirrors every value to WORKDIR/tensorboard.

    Each line is handed to the system before `write` returns, so a killed process loses nothing but
    a torn last line, which the next writer drops.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int | None = None):
        """Opens the record.

        Args:
          workdir: folder of the run, made if missing.
          resume_step: step of the restored checkpoint; later lines are dropped, as the run writes
            them again. None: the run starts at its beginning, and a record that an earlier attempt
            left behind is renamed to metrics.jsonl.old.
        """
        self._path = pathlib.Path(workdir) / FILE_NAME
        with self._explained_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and resume_step is None:
                os.replace(self._path, f"{self._path}.old")
            elif self._path.exists():
                self._drop_after(resume_step)
            # Unbuffered: after a failed write no half line waits in memory for the next one.
            self._file = open(self._path, "ab", buffering=0)
            self._events = _open_events(self._path.parent / "tensorboard", resume_step)

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Appends one line; see `encode` for the arguments.

        Raises:
          ValueError: see `encode`.
          RuntimeError: the line cannot be written (disk full, read-only, ...).
        """
        line = encode(step, phase, values)
        with self._explained_errors():
            data = (line + "\n").encode()
            while data:
                data = data[self._file.write(data):]
            for name, value in decode(line).items():
                if name not in ("step", "phase"):
                    scalar = summary_pb2.Summary.Value(tag=f"{phase}/{name}", simple_value=value)
                    self._events.write_event(event_pb2.Event(
                        wall_time=time.time(), step=int(step),
                        summary=summary_pb2.Summary(value=[scalar])))
            self._events.flush()

    def close(self) -> None:
        """Closes both files."""
        with self._explained_errors():
            self._file.close()
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _drop_after(self, resume_step: int) -> None:
        """Rewrites the record without the lines after `resume_step`, all or nothing."""
        records = records_on_resume(read(self._path.parent), resume_step)
        new_path = self._path.with_suffix(".jsonl.new")
        with open(new_path, "w", encoding="utf-8") as file:
            for record in records:
                values = {name: record[name] for name in record if name not in ("step", "phase")}
                file.write(encode(record["step"], record["phase"], values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new_path, self._path)

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"cannot write the run's record {self._path}: {error}. The checkpoints beside it "
                "are intact; free space or make it writable, then start the same command again "
                "to resume from the newest one.") from error


def _open_events(folder: pathlib.Path, resume_step: int | None) -> event_file_writer.EventsWriter:
    """Opens a TensorBoard file that hides the values after `resume_step` of the files before it.

    tensorboardX's file class is used without its queue and thread: when that thread dies of a full
    disk, the next `add_scalar` but a few waits for ever.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))  # two files opened within a second need two names
    events = event_file_writer.EventsWriter(str(folder / "events"), f".{number}")
    restart_step = 0 if resume_step is None else resume_step + 1
    events.write_event(event_pb2.Event(
        wall_time=time.time(), step=restart_step,
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)))
    return events


class Timer:
    """Adds up wall-clock seconds per phase: `with timer("rollout"): ...`.

    Dispatched JAX work counts only once something in the block waits for it.
    """

    def __init__(self):
        self._seconds = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block, also when it raises; blocks of one phase add up."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._seconds[phase] = self._seconds.setdefault(phase, 0.0) + seconds

    def collect(self) -> dict[str, float]:
        """Returns {"time/<phase>_s": seconds} since the last call and starts again at zero."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}
