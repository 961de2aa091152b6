"""Reads rows of data files: JSON lines, a JSON array, CSV or parquet, each also as .gz.

A row has JSON values only, because it is sent to rewards and saved with a run. Other values become
text or null, see `plain`. An unusable row keeps its place, with the reason.
"""

import ast
import base64
import contextlib
import csv
import datetime
import gzip
import hashlib
import io
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from jaxrl_tis.runtime import hub

BROKEN = (EOFError, OSError, zlib.error)  # exceptions of reading a damaged file
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file. A row with a `reason` is unusable, and its values are as read."""

    place: str  # "file:line"; for parquet and JSON arrays the number of the row
    values: dict[str, Any]
    reason: str = ""


class NotText(ValueError):
    """A text with a lone surrogate, which no encoding can write."""


def read(
    paths: str | os.PathLike | Sequence[str], example: dict
) -> tuple[list[Row], str]:
    """Returns the rows of the files in order, and the digest of their uncompressed bytes.

    Args:
      paths: files or globs: local, on a bucket or on the hub.
      example: an example row for messages.

    Raises:
      FileNotFoundError: a file does not exist.
      ImportError: a file is parquet, and pyarrow is not installed.
      ValueError: a file has no row, or cannot be read.
    """
    named: Sequence = [paths] if isinstance(paths, str | os.PathLike) else paths
    rows, digest = [], hashlib.blake2b(digest_size=8)
    for name, path in [file for given in named for file in hub.data_files(given)]:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing; put a file there with one JSON object per line, such as "
                f"{json.dumps(example)}"
            )
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name its files, as in {path}/*.jsonl")
        hub.check_whole(path)
        before = len(rows)
        rows += _rows(name, path, digest)
        if len(rows) == before:
            raise ValueError(f"{name} is empty; one line looks like {json.dumps(example)}")
    return rows, digest.hexdigest()


def _rows(name: str, path: Any, digest) -> list[Row]:
    unpacked = name.lower().removesuffix(".gz")
    is_packed = len(unpacked) < len(name)
    reader = next((r for end, r in READERS.items() if unpacked.endswith(end)), _lines)
    opened: Callable = gzip.open if is_packed else lambda file: file
    with path.open("rb") as file:
        try:
            return list(reader(name, opened(file), digest))
        except BROKEN as error:
            if not is_packed:
                raise
            raise ValueError(
                f"{name} is not a readable gzip file: {error}; compress it again, or give the "
                "uncompressed file"
            ) from error


def _lines(name: str, file: BinaryIO, digest) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        digest.update(line)
        if line.strip():
            yield _parsed(f"{name}:{number}", line)


def _parsed(place: str, line: bytes) -> Row:
    try:
        return _row(place, json.loads(line))
    except (ValueError, RecursionError) as error:
        return Row(place, {}, f"the line is not JSON: {error}")


def _row(place: str, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(place, {}, f"the line is a {type(values).__name__}, not a JSON object")
    try:
        return Row(place, {plain(name, "name"): plain(x, name) for name, x in values.items()})
    except NotText as error:
        return Row(place, values, str(error))
    except RecursionError:
        return Row(place, {}, "its values are nested too deeply")


def _json(name: str, file: BinaryIO, digest) -> Iterator[Row]:
    """Returns the rows of a JSON array, or of JSON lines in a .json file."""
    data = file.read()
    if not data.removeprefix(BOM).lstrip().startswith(b"["):
        if b"\n" in data.strip() and _is_json(data):
            raise ValueError(
                f"{name} holds one JSON object; give an array of examples, or one example per line"
            )
        yield from _lines(name, io.BytesIO(data), digest)
        return
    digest.update(data)
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is not JSON: {error}; a .json file holds an array of examples, or one example "
            "per line"
        ) from error
    yield from (_row(f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _csv(name: str, file: BinaryIO, digest) -> Iterator[Row]:
    """Returns the rows below a CSV header. An empty cell is null."""
    data = file.read()
    digest.update(data)
    # A byte that is not UTF-8 becomes a lone surrogate, which is reported with its line.
    text = data.removeprefix(BOM).decode("utf-8", "surrogateescape")
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(
                f"{name}:1: the header {','.join(header)} has a column twice; rename one"
            )
        line = reader.line_num + 1
        for cells in reader:
            place, line = f"{name}:{line}", reader.line_num + 1
            if len(cells) == len(header):
                yield _cells(place, header, cells)
            elif cells:
                yield Row(place, {}, f"{len(cells)} fields, and the header has {len(header)}")
    except csv.Error as error:
        raise ValueError(
            f"{name}:{reader.line_num}: the line is not CSV: {error}; fix or remove this line"
        ) from error


def _cells(place: str, header: list[str], cells: list[str]) -> Row:
    try:
        return _row(place, dict(zip(header, map(_cell, cells), strict=True)))
    except ValueError as error:
        return Row(place, dict(zip(header, cells, strict=True)), str(error))


def _cell(text: str) -> Any:
    """Returns the value of a cell; an object or a list of objects may be JSON or a Python literal."""
    if not text.startswith(("{", "[{")):
        return text or None
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = parse(text)
            if all(isinstance(x, dict) for x in (value if isinstance(value, list) else [value])):
                return value
    if text.startswith("[{") and "role" in text:
        raise ValueError(
            f"a cell looks like a list of messages and is not JSON: {text[:60]!r}; write it with "
            "json.dumps"
        )
    return text


def _parquet(name: str, file: BinaryIO, digest) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{name} needs the package pyarrow: pip install 'jaxrl_tis[hub]'") from error
    data = file.read()
    digest.update(data)
    try:
        rows = parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(
            f"{name} is not a readable parquet file: {error}; write it again"
        ) from error
    yield from (_row(f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


# Reader by suffix; any other file is JSON lines.
READERS = {".parquet": _parquet, ".json": _json, ".csv": _csv}


def plain(value: Any, column: str) -> Any:
    """Returns a value converted to JSON types, recursively.

    Non-finite numbers become null, bytes base64, and dates, times, decimals and other types text.

    Raises:
      NotText: a text in `column` holds a lone surrogate.
    """
    if isinstance(value, str):
        return value if value.isascii() else _text(value, column)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {plain(str(k), column): plain(x, f"{column}.{k}") for k, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x, f"{column}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    is_time = isinstance(value, datetime.date | datetime.time)
    return value.isoformat() if is_time else str(value)


def _text(value: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotText(
            f"{ascii(column)} holds the lone surrogate {value[error.start]!r} at character "
            f"{error.start + 1}; remove it"
        ) from error
    return value
