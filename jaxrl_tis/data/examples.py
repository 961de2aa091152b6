"""Converts rows of files to examples, or says why a row is unusable."""

import decimal
import json
import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_tis.data.files import Row

SCALAR = str | int | float
# Fields of an answer: this package's files, verl, TRL.
ANSWER_FIELDS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
SHOWN = 5  # unusable examples in an error message


@dataclass(frozen=True)
class Bad:
    """An unusable example, with the reason."""

    place: str  # file and line, or the id of a generated one
    id: str
    reason: str
    row: int  # index over all files, or the number of the example

    def __str__(self) -> str:
        name = "" if self.id == self.place else f" (id {self.id!r})"
        return f"{self.place}{name}: {self.reason}"


@dataclass(frozen=True)
class FileExamples:
    """Examples of files with their places, and the digest of the files."""

    is_late = False

    examples: list[dict[str, Any]]
    rows: list[tuple[int, str]]  # of each example: its index over all files, and its place
    of_files: str
    bad: list[Bad]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.examples[index]

    def place(self, index: int) -> str:
        return self.rows[index][1]

    def row(self, index: int) -> int:
        return self.rows[index][0]

    def digest(self) -> str:
        return self.of_files


def listed(bad: Sequence[Bad]) -> str:
    """Returns the first unusable examples, one per line, and the number of others."""
    more = f"\n- and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return "".join(f"\n- {b}" for b in bad[:SHOWN]) + more


def find(values: dict, name: str) -> Any:
    """Returns the value of a column or of a dotted path into nested columns; None if absent."""
    if name in values:
        return values[name]
    outer, _, inner = name.partition(".")
    return find(values[outer], inner) if inner and isinstance(values.get(outer), dict) else None


def wanted(row: Row, name: str, kinds: type | types.UnionType) -> Any:
    """Returns a required field of a row; raises ValueError without it."""
    value = find(row.values, name)
    if value is None:
        has = ", ".join(map(str, row.values)) or "none"
        raise ValueError(f"no field {name!r}; the line has {has}")
    if not isinstance(value, kinds):
        allowed = "text or a number" if kinds is SCALAR else "text, a number or a list of messages"
        raise ValueError(f"{name!r} is a {type(value).__name__}, not {allowed}")
    return value


def _message(message: Any) -> dict[str, Any]:
    """Returns a message with its content as one text and without null fields; raises ValueError for a
    value that is no message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("has no role and content")
    fields = {name: x for name, x in message.items() if x is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if other := [p for p in parts if p.get("type") != "text" or not isinstance(p.get("text"), str)]:
            raise ValueError(
                f"has a part of type {other[0].get('type')!r}; only parts of type 'text' are "
                "supported"
            )
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) and not (content is None and "tool_calls" in fields):
        raise ValueError(f"has content that is a {type(content).__name__}, not text")
    return fields if content is None else fields | {"content": content}


def prompt_of(value: Any) -> str | list[dict[str, Any]]:
    if not isinstance(value, list):
        return str(value)
    if not value:
        raise ValueError("the prompt is an empty list of messages; give at least one message")
    messages = []
    for number, message in enumerate(value, start=1):
        try:
            messages.append(_message(message))
        except ValueError as error:
            raise ValueError(f"message {number} of the prompt {error}") from error
    return messages


def answer_of(row: Row, name: str | None) -> str | None:
    """Returns the answer as text, None without one: a list or an object as JSON, a float without an
    exponent."""
    if name is not None:
        value = wanted(row, name, object)
    else:
        found = (find(row.values, field) for field in ANSWER_FIELDS)
        value = next((x for x in found if x is not None), None)
    if isinstance(value, float) and math.isfinite(value):
        return format(decimal.Decimal(repr(value)), "f")  # 0.00001, and not 1e-05
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return None if value is None else str(value)


def made(
    rows: Iterable[Row], digest: str, name_of: Callable[[Row], str],
    fields_of: Callable[[Row], dict[str, Any]],
) -> FileExamples:
    """Converts rows to examples: all columns of the row, overridden by id, prompt and answer.
    "as_read" has an id or answer that the row has in another form."""
    examples, bad, places = [], [], {}
    for number, row in enumerate(rows):
        name = row.place
        try:
            if row.reason and not row.values:
                raise ValueError(row.reason)
            name = name_of(row)
            if row.reason:
                raise ValueError(row.reason)
            if name in places:
                raise ValueError(
                    f"the id was already used at {places[name][1]}; task.params.id_field=None uses "
                    "file and line as the id"
                )
            example = {n: x for n, x in row.values.items() if n != "answer"}
            example |= fields_of(row) | {"id": name}
            both = {n for n in ("answer", "id") if n in example and n in row.values}
            as_read = {n: row.values[n] for n in sorted(both) if row.values[n] != example[n]}
            examples.append(example | ({"as_read": as_read} if as_read else {}))
            places[name] = number, row.place
        except ValueError as error:
            bad.append(Bad(row.place, name, str(error), number))
    return FileExamples(examples, list(places.values()), digest, bad)
