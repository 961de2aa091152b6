"""The record of a run: metrics.jsonl, the same values for TensorBoard and other sinks, and timers.

metrics.jsonl is the primary record, one JSON object per line: {"step", "phase", metric: value}.
Durations, rates and memory have names that start with "time/". Two runs of the same program are
equal in all other metrics. docs/metrics.md explains each metric.
"""

import contextlib
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from etils import epath
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from jaxrl_tis.record import names
from jaxrl_tis.runtime import storage
from jaxrl_tis.runtime.cli import Unwritable

FILE_NAME = "metrics.jsonl"
# JSON has no literal for these; written as strings, turned back into floats by `read`.
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Sink(Protocol):
    """A service that receives the metrics of a run in addition to metrics.jsonl."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def has_ended(records: Sequence[Mapping[str, Any]], steps: int) -> bool:
    """Whether the records include the evaluation after the last of `steps`."""
    return any((r["phase"], r["step"]) == ("eval", steps) for r in records)


def num_answers(record: Mapping[str, Any], accuracy: str) -> float | None:
    """Returns the number of answers that an accuracy of an evaluation is of; None if it is not known."""
    name = accuracy.replace("_accuracy", "_n")
    return record[name] if name in record else record.get("eval/n")


def seconds_of(record: Mapping[str, Any]) -> float:
    """Returns the seconds of a line's step or evaluation."""
    return sum(record[name] for name in ("time/step_s", "time/eval_s") if name in record)


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
    """Returns the record of one line, with "nan", "inf" and "-inf" turned back into floats.

    Raises:
      ValueError: the line is not one that `encode` writes; the message names the fault.
    """
    record = parse_object(line)
    if not {"step", "phase"} <= record.keys() or type(record["step"]) is not int:
        raise ValueError('no "phase" or no whole number "step"')
    for name, value in record.items():
        is_number = type(value) in (int, float) or value in tuple(NON_FINITE)
        if name != "phase" and not is_number:
            raise ValueError(f"metric {name!r} is {value!r}, not a number")
    return {name: NON_FINITE[value] if name != "phase" and value in NON_FINITE else value
            for name, value in record.items()}


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the records of a run in the order written; a torn last line is left out.

    Raises:
      FileNotFoundError: the folder has no metrics.jsonl.
      ValueError: a line is not a record, see `decode`; names the file and the line.
    """
    path = storage.folder(workdir) / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: is {workdir} the --workdir of a run?")
    return read_lines(path, decode)


def read_lines(path: epath.Path, parse: Callable[[str], Any]) -> list[Any]:
    """Returns the parsed lines of a file; an incomplete last line is left out.

    Raises:
      ValueError: `parse` raised it for another line.
    """
    lines, records = path.read_bytes().decode(errors="replace").split("\n"), []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def parse_object(line: str) -> dict[str, Any]:
    """Returns the JSON object of a line; raises ValueError if there is none."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def records_on_resume(records: list[dict[str, Any]], resume_step: int) -> list[dict[str, Any]]:
    """Returns the records that a run resumed after `resume_step` keeps: those until then, and the
    warm-up, which has steps of its own and no checkpoint within it."""
    return [r for r in records if r["phase"] == "warmup" or r["step"] <= resume_step]


class LineFile:
    """A file of lines that grows. Each line goes to the operating system before `write` returns, so
    a killed process leaves at most one incomplete last line.

    Args:
      path: of the file; a missing folder is created.
      kept: lines that replace the present contents; None renames a file of an earlier attempt to
        NAME.old.
    """

    def __init__(self, path: pathlib.Path, kept: Sequence[str] | None):
        self._path = path
        with self.explained_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and kept is None:
                os.replace(path, f"{path}.old")
            elif kept is not None and path.exists():
                storage.write_text(path, "".join(f"{line}\n" for line in kept))
            # Unbuffered: after a failed write no half line waits in memory for the next one.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (`close` ends it)

    def write(self, line: str) -> None:
        """Raises Unwritable where the line cannot be written (disk full, read-only, ...)."""
        with self.explained_errors():
            data = (line + "\n").encode()
            while data:
                data = data[self._file.write(data):]

    def close(self) -> None:
        with self.explained_errors():
            self._file.close()

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unwritable(
                f"cannot write the run's record {self._path}: {error}. The checkpoints in the "
                "same folder are intact; free space or make it writable, then start the same command again "
                "to resume from the newest one.") from error


def open_objects(workdir: str | os.PathLike, name: str, resume_step: int | None) -> LineFile:
    """Opens a file of JSON objects with a "step". Lines after `resume_step` are dropped, because the run
    writes them again."""
    kept = None
    if resume_step is not None:
        kept = [json.dumps(x) for x in read_objects(workdir, name) if x["step"] <= resume_step]
    return LineFile(pathlib.Path(workdir) / name, kept)


def read_objects(workdir: str | os.PathLike, name: str) -> list[dict[str, Any]]:
    """Returns the lines of such a file, [] without a file; an incomplete last line is left out.

    Raises:
      ValueError: another line is not JSON.
    """
    path = storage.folder(workdir) / name
    return read_lines(path, parse_object) if path.exists() else []


class MetricsWriter:
    """Appends to WORKDIR/metrics.jsonl and mirrors every value to WORKDIR/tensorboard and the sinks.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, workdir: str | os.PathLike, resume_step: int | None = None,
        sinks: Sequence[Sink] = (), is_compact: bool = False,
    ):
        """Opens the record.

        Args:
          workdir: folder of the run, made if missing.
          resume_step: step of the restored checkpoint; later lines are dropped, because the run
            writes them again. None: the run starts from the beginning, and the record of an earlier
            attempt is renamed to metrics.jsonl.old.
          sinks: additional receivers of all values.
          is_compact: metrics.jsonl has only the compact metrics of names.py; sinks get all.
        """
        path = pathlib.Path(workdir) / FILE_NAME
        kept, self.lost_seconds = None, 0.0
        if path.exists() and resume_step is not None:
            records = read(workdir)
            kept = records_on_resume(records, resume_step)
            dropped = [r for r in records if r["step"] > resume_step and r["phase"] != "warmup"]
            self.lost_seconds = sum(seconds_of(record) for record in dropped)
        lines = kept if kept is None else [encode(r.pop("step"), r.pop("phase"), r) for r in kept]
        self._file = LineFile(path, lines)
        with self._file.explained_errors():
            self._events = _open_events(path.parent / "tensorboard", resume_step)
        self._sinks, self._is_compact = sinks, is_compact

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Appends one line; see `encode` for the arguments.

        Raises:
          ValueError: see `encode`.
          Unwritable: the line cannot be written (disk full, read-only, ...).
        """
        line = encode(step, phase, values)
        kept = {name: x for name, x in values.items() if names.is_compact(name)}
        self._file.write(encode(step, phase, kept) if self._is_compact else line)
        numbers = {n: x for n, x in decode(line).items() if n not in ("step", "phase")}
        with self._file.explained_errors():
            for name, value in numbers.items():
                scalar = summary_pb2.Summary.Value(tag=f"{phase}/{name}", simple_value=value)
                self._events.write_event(event_pb2.Event(
                    wall_time=time.time(), step=int(step),
                    summary=summary_pb2.Summary(value=[scalar])))
            self._events.flush()
        for sink in self._sinks:
            sink.log(step, {f"{phase}/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        """Closes the record, the TensorBoard file and all sinks."""
        for sink in self._sinks:
            sink.close()
        self._file.close()
        with self._file.explained_errors():
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class NoRecord:
    """Replaces MetricsWriter on processes that do not write the record."""

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Checks the values as MetricsWriter does, and writes nothing."""
        encode(step, phase, values)

    def close(self) -> None: ...

    def __enter__(self) -> "NoRecord":
        return self

    def __exit__(self, *_) -> None: ...


def _open_events(folder: pathlib.Path, resume_step: int | None) -> event_file_writer.EventsWriter:
    """Opens a TensorBoard file that hides the values after `resume_step` of the files before it.

    Uses tensorboardX's file class without its queue and thread: once a full disk has ended that
    thread, a later `add_scalar` would wait for ever.
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

    Dispatched JAX work counts only if something in the block waits for it. Threads may share a
    timer.

    Args:
      compile_seconds: a counter of compile time. Its growth during a block counts as the phase
        "compile" instead of the block's phase.
    """

    def __init__(self, compile_seconds: Callable[[], float] = lambda: 0.0):
        self._seconds, self._compile_seconds = {}, compile_seconds
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block, even if it raises; times of one phase add up."""
        start, compiled_before = time.monotonic(), self._compile_seconds()
        try:
            yield
        finally:
            compiled = self._compile_seconds() - compiled_before
            self.add(phase, max(time.monotonic() - start - compiled, 0.0))
            if compiled:
                self.add("compile", compiled)

    def add(self, phase: str, seconds: float) -> None:
        with self._lock:
            self._seconds[phase] = self._seconds.setdefault(phase, 0.0) + seconds

    def collect(self) -> dict[str, float]:
        """Returns {"time/<phase>_s": seconds} since the last call, and resets to zero."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}
