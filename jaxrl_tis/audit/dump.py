"""Reads a dump: sequences of token log-probs of any trainer, as JSONL or NPZ.

JSONL has an object per line and sequence. NPZ has the same columns, in one of two layouts:

  padded  columns of tokens [B,T] beside `mask` [B,T], columns of sequences [B]
  flat    columns of tokens [N], one sequence after the other, beside `lengths` [B]

Routes are [B,R,L,k] in both, with rows of -1 after the last row of a sequence.

The columns are in `columns`; docs/audit.md explains them. A dump with anything malformed is refused
as a whole, with the number of bad lines and the first few of them.
"""

import dataclasses
import gzip
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from jaxrl_tis.audit import columns
from jaxrl_tis.audit.route_columns import Routes

MOST_TOKENS = 2**24  # up to here float32 counts exactly
SHOWN = 5  # bad lines that the message has


@dataclasses.dataclass(frozen=True)
class Dump:
    """The content of a dump.

    Attributes:
      path: the file.
      lengths: [B] stored tokens of each sequence, those that the mask leaves out too.
      tokens: column -> [N] of all sequences, one after the other; `top` is [N,K,2]. Always has
        logp_behav, logp_old and mask.
      sequences: column -> [B]; groups are numbered.
      columns: names of the columns in the file.
      routes: column -> the routes of each sequence.
    """

    path: str
    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    sequences: dict[str, np.ndarray]
    columns: tuple[str, ...]
    routes: dict[str, list[Routes]]


def read(
    path: str, renamed: Mapping[str, str] | None = None, routes_shape: tuple[int, int] | None = None
) -> Dump:
    """Reads a dump; `renamed` maps columns to the names that they have in the file. `routes_shape` is
    (L, k) of routes in base64 without a shape.

    Raises:
      ValueError: the file is of another kind, or something in it is malformed.
      FileNotFoundError: there is no such file.
    """
    renamed = dict(renamed or {})
    for column in renamed:
        if column not in (*columns.COLUMNS, "lengths"):
            raise ValueError(f"there is no column {column!r}; {columns.nearest(column)}")
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file; give the path of a dump")
    ours = {theirs: column for column, theirs in renamed.items()}
    if len(ours) < len(renamed):
        raise ValueError("--columns reads two columns from one name; give each a name of its own")
    hidden = renamed.keys() - ours.keys()  # the file's own, in whose place another is read
    if path.endswith((".jsonl", ".jsonl.gz")):
        dump = _collect(path, "line", _lines(path, ours, hidden), routes_shape)
    elif path.endswith(".npz"):
        dump = _collect(path, "row", enumerate(_rows(path, ours, hidden)), routes_shape)
    else:
        raise ValueError(f"{path}: the ending is unknown; give a .jsonl, .jsonl.gz or .npz file")
    if routes_shape is not None and not dump.routes:
        raise ValueError("--routes_shape needs the column routes_behav or routes_old")
    for column, theirs in renamed.items():
        if column not in (*dump.columns, "lengths"):
            raise ValueError(f"{path} has no {theirs!r}, which --columns names for {column}")
    return dump


# JSONL


def _lines(path: str, ours: Mapping[str, str], hidden: Set[str]) -> Iterator[tuple[int, Any]]:
    """Yields (line number, its object, or what is wrong with it)."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(_whole(path, file), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:  # bytes that are no text, too
                yield number, f"not JSON ({error})"
                continue
            if not isinstance(record, dict):
                yield number, "not a JSON object"
                continue
            yield number, {ours.get(k, k): x for k, x in record.items() if k not in hidden}


def _whole(path, file):
    """Yields the lines; ValueError where a gzip file ends early or is none."""
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error}); write it again") from error


# NPZ


def _rows(path: str, ours: Mapping[str, str], hidden: Set[str]) -> Iterator[dict[str, Any]]:
    """Returns the columns of each sequence; ValueError where the arrays are of neither layout."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {ours.get(k, k): file[k] for k in file.files if k not in hidden}
    except (AttributeError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a .npz file of numbers: {error}; write it with numpy.savez"
        ) from error
    lengths = arrays.pop("lengths", None)
    for name in arrays:
        if name not in columns.COLUMNS:
            raise ValueError(f"{path}: unknown column {name!r}; {columns.nearest(name)}")
    for name in columns.REQUIRED:
        if name not in arrays:
            raise ValueError(f"{path}: column {name!r} is missing; the file has {', '.join(arrays)}")
    if lengths is None and "mask" not in arrays:
        raise ValueError(
            f"{path}: there is neither `mask` nor `lengths`; add `mask` for columns [B,T], or "
            "`lengths` for columns [N]"
        )
    starts, ends = _padded(path, arrays) if lengths is None else _flat(path, arrays, lengths)
    shape = arrays["logp_behav"].shape
    is_of_tokens = {name: _is_of_tokens(path, name, x, shape, len(ends))
                    for name, x in arrays.items()}
    at = lambda i: (i, slice(starts[i], ends[i])) if lengths is None else slice(starts[i], ends[i])
    return (
        {name: x[at(i)] if is_of_tokens[name] else x[i] for name, x in arrays.items()}
        for i in range(len(ends))
    )


def _is_of_tokens(path, name, x, shape, num_sequences):
    """Whether a column has a value for each token; ValueError where it has the shape of nothing."""
    if name in columns.TOKEN and x.shape[: len(shape)] == shape:
        return True
    if name in (*columns.SEQUENCE, "version") and x.shape == (num_sequences,):
        return False
    if name in columns.ROUTES and x.ndim == 4 and len(x) == num_sequences:
        return False
    raise ValueError(
        f"{path}, column {name}: shape {list(x.shape)} does not match {list(shape)} of logp_behav "
        f"and {num_sequences} sequences"
    )


def _padded(path, arrays):
    """(first, end) of what each row stores: from its first valid token to its last."""
    shape, mask = arrays["logp_behav"].shape, arrays["mask"]
    if len(shape) != 2 or mask.shape != shape or not shape[1]:
        raise ValueError(
            f"{path}, column mask: logp_behav has shape {list(shape)} and mask {list(mask.shape)}; "
            "give both as [B,T], T at least 1"
        )
    is_valid = mask != 0
    first = is_valid.argmax(axis=1)
    end = shape[1] - is_valid[:, ::-1].argmax(axis=1)
    return first, np.where(is_valid.any(axis=1), end, 1)  # without any a row keeps one token


def _flat(path, arrays, lengths):
    """(first, end) of each sequence."""
    shape = arrays["logp_behav"].shape
    is_count = lengths.ndim == 1 and lengths.dtype.kind in "iu" and (lengths >= 0).all()
    if len(shape) != 1 or not is_count or lengths.sum() != shape[0]:
        raise ValueError(
            f"{path}, column lengths: give whole numbers [B] that add up to the tokens of logp_behav "
            f"{list(shape)}"
        )
    ends = np.cumsum(lengths)
    return ends - lengths, ends


# Both


def _collect(
    path: str, unit: str, records: Iterable[tuple[int, Any]], routes_shape: tuple[int, int] | None
) -> Dump:
    """Puts checked sequences together; `unit` is what the numbers of the records count."""
    good, problems, count, first, shapes = [], [], 0, None, {}
    for number, record in records:
        count += 1
        if isinstance(record, str):
            problems.append((number, [record]))
            continue
        if first is None:
            first = number, tuple(record)
        record_values, wrong = columns.check(record, routes_shape)
        wrong += _unlike(unit, first, record)
        if good and "top" in record_values and "top" in good[0]:
            wrong += _unlike_head(record_values["top"].shape[1], good[0]["top"].shape[1])
        wrong += _unlike_routes(record_values, shapes)
        if wrong:
            problems.append((number, wrong))
        else:
            good.append(record_values)
    if problems:
        raise ValueError(_refusal(path, unit, problems, count))
    if first is None or not good:
        raise ValueError(f"{path}: there is no sequence in it; write at least one")
    lengths = np.array([len(record_values["mask"]) for record_values in good])
    if lengths.sum() > MOST_TOKENS:
        raise ValueError(
            f"{path}: {lengths.sum()} tokens are too many, because float32 counts up to "
            f"{MOST_TOKENS}; audit a part"
        )
    tokens, sequences, routes = {}, {}, {}
    for name in good[0]:
        values = [record_values[name] for record_values in good]
        if name in columns.TOKEN:
            tokens[name] = np.concatenate(values)
        elif name in columns.ROUTES:
            routes[name] = values
        elif name in columns.COUNTS:
            sequences[name] = np.array(values, np.int64)
        elif name == "group":
            numbers = {group: i for i, group in enumerate(dict.fromkeys(values))}
            sequences[name] = np.array([numbers[group] for group in values], np.int32)
        else:
            sequences[name] = np.array(values, np.float32)
    if not tokens["mask"].any():
        raise ValueError(
            f"{path}, column mask: no token is valid; set it to 1 for the tokens of the answers"
        )
    return Dump(path, lengths, tokens, sequences, first[1], routes)


def _unlike(unit, first, record):
    """Lists columns that not all sequences have."""
    number, names = first
    known = lambda there, here: [c for c in there if c in columns.COLUMNS and c not in here]
    differences = [f"{c}: missing, but {unit} {number} has it" for c in known(names, record)
             if c not in columns.REQUIRED]
    differences += [f"{c}: present, but {unit} {number} lacks it" for c in known(record, names)]
    return differences


def _unlike_head(here, there):
    return [] if here == there else [f"top: {here} pairs per token, but {there} before"]


def _unlike_routes(values, shapes):
    """Lists routes of another L or k than those before, which `shapes` keeps."""
    wrong = []
    for name in columns.ROUTES:
        if name in values and len(values[name].ids):
            here = values[name].ids.shape[1:]
            there = shapes.setdefault(name, here)
            if here != there:
                wrong.append(f"{name}: rows of {list(here)} experts, but {list(there)} before")
    return wrong


def _refusal(path, unit, problems, count):
    """Names the first few bad lines, and says how many there are."""
    shown = [f"  {path}, {unit} {number}, {wrong}"
             for number, found in problems[:SHOWN] for wrong in found]
    if len(problems) > SHOWN:
        shown.append(f"  and {len(problems) - SHOWN} more")
    head = f"{path}: {len(problems)} of {count} {unit}s are malformed; nothing was measured"
    return "\n".join([head, *shown])
