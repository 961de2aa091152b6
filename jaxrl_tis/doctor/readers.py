"""Reads metric logs of other frameworks into rows of numbers: JSONL, CSV, TensorBoard, trainer_state.json and
console output (`console`), all except TensorBoard also as .gz.

A row that cannot be read ends the reading, with its place. An incomplete last line or record is left
out. A text, a histogram or a table is not a metric; its name is kept apart. null is a number that JSON
cannot write: verl's logger `file` writes null for NaN.
"""

import csv
import dataclasses
import gzip
import io
import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath
from google.protobuf.message import DecodeError
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from jaxrl_tis.doctor import console

STEP = "step"  # the name of the step of TensorBoard's events
STATE, EVENTS = "trainer_state.json", "tfevents"
STDIN, GZIP = "-", ".gz"
PARTS = re.compile(r"(\D*)(\d*)")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")  # a folder of a Trainer of transformers in its output_dir
OURS = "metrics.jsonl"  # in the --workdir of a run of ours
# A column of a chart that was exported from Weights & Biases: "RUN - METRIC", perhaps "Name: RUN -
# METRIC", and the same with __MIN and __MAX for the points that were thinned out around it.
COLUMN = re.compile(r"(?:[\w ]+: )?(?P<run>.*\S) - (?P<metric>\S.*)")
NO_COLUMN = re.compile(r"|Unnamed: \d+")  # pandas writes its row numbers so
LARGEST = float(np.finfo(np.float32).max)  # beyond it a number is as good as infinite
MOST_DIGITS = 40  # of a whole number that is read as one
MASK_DELTA = 0xA282EAD8  # TFRecord's checksums are rotated and shifted
FLOAT, DOUBLE = 1, 2  # DataType of a TensorProto


class UnknownFormat(ValueError):
    """A text without a line of metrics."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a log. `place` is its place in the file; `values` are floats, NaN included."""

    place: str
    values: dict[str, float]


@dataclasses.dataclass
class Log:
    """The rows of a log in the order written, and the names without numbers.

    Attributes:
      rounded: names with a value printed as 0.0000 or 1.0000, which may be rounded.
      is_counted: whether no step is printed, and rows are counted instead.
    """

    path: str
    kind: str
    rows: list[Row]
    texts: set[str] = dataclasses.field(default_factory=set)
    rounded: set[str] = dataclasses.field(default_factory=set)
    is_counted: bool = False

    def add(self, place: str, values: dict[str, Any]) -> None:
        """Adds a row; null is NaN, except that a null step is no step."""
        numbers = {}
        for name, value in values.items():
            number = _number(value)
            if value is None and name.lower().endswith("step"):
                continue
            if number is not None:
                numbers[name] = number
            else:
                self.texts.add(name)
        self.rows.append(Row(place, numbers))


def read(path: epath.Path) -> list[Log]:
    """Reads one file, standard input, or a folder. In a folder it reads trainer_state.json, else the newest
    checkpoint's, else metrics.jsonl, else event files, else the logs, except texts without metrics.

    Raises:
      FileNotFoundError: there is no such file, or no log in the folder.
      ValueError: it is broken; names the file and the line, entry or record.
    """
    if str(path) == STDIN:
        return [_read_any("standard input", sys.stdin.buffer.read())]
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} not found; give the path of a log of metrics")
    if EVENTS in path.name:
        return [_read_events([path], path)]
    return [_read_any(path, path.read_bytes())]


def _read_any(path, data):
    """Reads the content of a file by its ending, or by its first line where the ending is unknown."""
    name = str(path)
    if name.endswith(GZIP) or data.startswith(b"\x1f\x8b"):
        name = name.removesuffix(GZIP)
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path}: not a complete gzip file ({error}); copy it again"
            ) from error
    text = data.decode(errors="replace").removeprefix("\ufeff")
    for ending, reader in READERS.items():
        if name.endswith(ending):
            return reader(path, text)
    return (_read_jsonl if _is_json(text) else _read_console)(path, text)


def _is_json(text):
    """Returns whether the first line is a JSON object."""
    try:
        return isinstance(_object(text.lstrip().partition("\n")[0]), dict)
    except json.JSONDecodeError:
        return False


def is_log(path: epath.Path) -> bool:
    """Returns whether `read` can read this file or folder."""
    if str(path) == STDIN or path.is_file():
        return True
    return path.is_dir() and not _is_ours(path) and bool(_logs_in(path))


def _is_ours(folder):
    """Returns whether metrics.jsonl of a folder is not of another framework, whose lines have no phase."""
    if not (folder / OURS).exists():
        return False
    with (folder / OURS).open("rb") as file:
        line = file.readline().decode(errors="replace")
    return not _is_json(line) or "phase" in json.loads(line)


def _in_order(file):
    """Sorts a.9.log before a.10.log."""
    return [(text, int(number or -1)) for text, number in PARTS.findall(file.name)]


def _logs_in(path):
    """Returns the files of a folder to read: a state, metrics.jsonl, event files, or all logs."""
    files = sorted(path.iterdir(), key=_in_order)
    checkpoints = {int(found[1]): p for p in files if (found := CHECKPOINT.fullmatch(p.name))}
    states = [path / STATE, *(checkpoints[step] / STATE for step in sorted(checkpoints, reverse=True))]
    for state in states:  # of checkpoints the newest has the whole history
        if state.exists():
            return [state]
    if (path / OURS).exists():
        return [path / OURS]
    events = [p for p in files if EVENTS in p.name]
    return events or [p for p in files if p.is_file() and p.name.removesuffix(GZIP).endswith(LOGS)]


def _read_folder(path):
    logs = _logs_in(path)
    if not logs:
        raise FileNotFoundError(
            f"{path}: this folder has no log; give one with {STATE}, checkpoint-N/{STATE}, an "
            f"event file of TensorBoard or a {', '.join(LOGS)} file"
        )
    if EVENTS in logs[0].name:
        return [_read_events(logs, path)]
    found, unknown = [], []
    for file in logs:
        try:
            found.append(_read_any(file, file.read_bytes()))
        except UnknownFormat as error:  # the errors beside the output, or a text of another kind
            unknown.append(error)
    if not found:
        raise unknown[0]
    return found


def _number(value):
    """Returns a float, of a text too that is one, or None for a value that is not a number."""
    if value is None:
        return math.nan
    if type(value) not in (int, float, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number


def _object(text):
    """Parses JSON; whole numbers of any length are numbers."""
    return json.loads(text, parse_int=lambda t: int(t) if len(t) <= MOST_DIGITS else float(t))


# Text


def _read_jsonl(path, text):
    log, lines = Log(str(path), "JSONL", []), text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _object(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # still being written
            raise ValueError(
                f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})"
            ) from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        if isinstance(record.get("data"), dict):  # verl's: {"step": 1, "data": {...}}
            record = record["data"] | {name: x for name, x in record.items() if name != "data"}
        log.add(f"line {number}", record)
    return log


def _read_console(path, text):
    rows = console.rows(text)
    if not any(row.values for row in rows):
        raise UnknownFormat(
            f"{path}: the format is unknown; give JSONL, CSV, a TensorBoard event file, or a "
            "console log of verl, TRL, OpenRLHF, slime, SkyRL, prime-rl or NeMo-RL"
        )
    log = Log(str(path), "console", [], is_counted=any(row.is_counted for row in rows))
    for row in rows:
        log.add(f"line {row.line}", row.values)
        log.texts |= row.texts
        log.rounded |= row.rounded
    return log


def _read_state(path, text):
    try:
        state = _object(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError(f'{path}: no list "log_history", which a {STATE} has')
    log = Log(str(path), STATE, [])
    for number, entry in enumerate(history):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, log_history[{number}]: not a JSON object")
        log.add(f"log_history[{number}]", entry)
    return log


def _read_csv(path, text):
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if not lines:
        raise ValueError(f"{path}, line 1: the names of the columns are missing")
    names = _columns(path, lines[0][1])
    cells = []
    for number, line in lines[1:]:
        if len(line) != len(names):
            raise ValueError(f"{path}, line {number}: {len(line)} cells for {len(names)} columns")
        named = zip(names, line, strict=True)
        cells.append({n: cell.strip() for n, cell in named if n and cell.strip()})
    texts = _texts(path, [number for number, _ in lines[1:]], cells)
    log = Log(str(path), "CSV", [], texts)
    for (number, _), row in zip(lines[1:], cells, strict=True):
        log.add(f"line {number}", {n: float(cell) for n, cell in row.items() if n not in texts})
    return log


def _columns(path, header):
    """Returns the metric name of each column, "" for other columns; ValueError for several runs."""
    names, runs = [], set()
    for title in header:
        found = COLUMN.fullmatch(title)
        if found:
            runs.add(found["run"])
            title = found["metric"]
        is_range = title.endswith(("__MIN", "__MAX"))
        names.append("" if is_range or NO_COLUMN.fullmatch(title) else title)
    if len(runs) > 1:
        raise ValueError(
            f"{path}, line 1: columns of several runs: {', '.join(sorted(runs))}; export one run"
        )
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        twice = sorted({name for name in named if named.count(name) > 1})
        raise ValueError(
            f"{path}, line 1: duplicate columns: {', '.join(twice)}; rename or remove one"
        )
    return names


def _texts(path, numbers, cells):
    """Returns the columns without any number; ValueError for a text between numbers."""
    bad, good = {}, set()
    for number, row in zip(numbers, cells, strict=True):
        for name, cell in row.items():
            try:
                float(cell)
                good.add(name)
            except ValueError:
                bad.setdefault(name, (number, cell))
    for name in bad.keys() & good:
        number, cell = bad[name]
        raise ValueError(f"{path}, line {number}: {name!r} is {cell!r}, not a number")
    return set(bad)


READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".csv": _read_csv, ".json": _read_state}
LOGS = (".jsonl", ".ndjson", ".csv", ".log", ".txt", ".out", ".err")  # that a folder is searched for

# TensorBoard


def _masked(data):
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & 0xFFFFFFFF


def tfrecords(data: bytes, path: epath.Path) -> Iterator[tuple[str, bytes]]:
    """Yields (place, content) of TFRecords, which have length, checksum, content, checksum."""
    start, number = 0, 0
    while start + 12 <= len(data):
        number += 1
        place = f"record {number} at byte {start}"
        length, checksum = struct.unpack("<QI", data[start:start + 12])
        if _masked(data[start:start + 8]) != checksum:
            raise ValueError(
                f"{path}, {place}: the checksum of its length is wrong; copy the file again"
            )
        content = data[start + 12:start + 12 + length]
        end = start + 12 + length + 4
        if end > len(data):
            return  # still being written
        if _masked(content) != struct.unpack("<I", data[end - 4:end])[0]:
            raise ValueError(
                f"{path}, {place}: the checksum of its content is wrong; copy the file again"
            )
        yield place, content
        start = end


def _read_events(paths, path):
    log = Log(str(path), "TensorBoard", [])
    for file in paths:
        for place, content in tfrecords(file.read_bytes(), file):
            try:
                event = event_pb2.Event.FromString(content)
            except DecodeError as error:
                raise ValueError(f"{file}, {place}: not an event ({error})") from error
            if event.session_log.status == event_pb2.SessionLog.START:  # later ones are hidden
                log.rows = [row for row in log.rows if row.values[STEP] < event.step]
            values = {value.tag: _scalar(value) for value in event.summary.value}
            if values:
                log.add(f"{file.name}, {place}", values | {STEP: event.step})
    return log


def _scalar(value):
    """Returns a scalar as float, any other value unchanged."""
    if value.WhichOneof("value") == "simple_value":
        return value.simple_value
    tensor = value.tensor
    kinds = {FLOAT: (tensor.float_val, "<f4"), DOUBLE: (tensor.double_val, "<f8")}
    if value.WhichOneof("value") != "tensor" or tensor.dtype not in kinds:
        return value
    listed, dtype = kinds[tensor.dtype]
    sizes = [dim.size for dim in tensor.tensor_shape.dim]
    numbers = list(listed) or np.frombuffer(tensor.tensor_content, dtype).tolist()
    return float(numbers[0]) if math.prod(sizes) == 1 and len(numbers) == 1 else value
