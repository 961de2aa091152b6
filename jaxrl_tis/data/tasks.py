"""Tasks: random-access sources of examples {"prompt", "answer", "id"}.

A task is a function of its parameters that returns a source with `len(source)` and `source[i]`.
`source[i]` depends on the parameters and i alone, so a run can be resumed at any example.
"""

import difflib
import hashlib
import inspect
import json
import os
import random
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxrl_tis import hub

# Tenths of all problem texts that each split owns. "warmup" is for supervised steps before RL.
SPLITS = {"train": range(0, 6), "warmup": range(6, 9), "eval": range(9, 10)}
MAX_DRAWS = 512
# reasoning-gym seeds problem i with seed + i, so seeds closer than a size share problems.
SEED_STRIDE = 2**20


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, str]: ...

    def digest(self) -> str:
        """Returns what tells these examples from others with the same parameters."""


class Generated:
    """A source whose examples follow from its parameters and its code."""

    def digest(self) -> str:
        """Digests the first, middle and last example: the code may have changed."""
        probes = [self[index] for index in (0, len(self) // 2, len(self) - 1)]
        return _digest(json.dumps(probes, sort_keys=True).encode())


@dataclass(frozen=True)
class Examples:
    """Examples from files, with the digest of all bytes of these."""

    examples: list[dict[str, str]]
    of_files: str

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.examples[index]

    def digest(self) -> str:
        return self.of_files


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def in_split(problem: str, split: str) -> bool:
    """Whether `split` owns this problem text: exactly one split does, whatever seed drew it."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 in SPLITS[split]


def _check_split_and_size(split: str, size: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
    if size < 1:
        raise ValueError(f"size is {size}, but a task needs at least 1 example")


def _check_index(index: int, size: int) -> None:
    if not 0 <= index < size:
        raise IndexError(f"example {index} of a task with {size} examples")


def _sum_of_products(values: list[int], ops: list[str]) -> int:
    """Computes values[0] ops[0] values[1] ..., with products first."""
    total, term = 0, values[0]
    for op, value in zip(ops, values[1:], strict=True):
        if op == "*":
            term *= value
        else:
            total, term = total + term, value if op == "+" else -value
    return total + term


@dataclass(frozen=True)
class _Arithmetic(Generated):
    size: int
    split: str
    seed: int
    digits: int
    terms: int
    ops: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, str]:
        _check_index(index, self.size)
        rng = random.Random(f"arithmetic {self.seed} {self.split} {index}")
        for _ in range(MAX_DRAWS):
            values = [rng.randrange(10**self.digits) for _ in range(self.terms)]
            ops = [rng.choice(self.ops) for _ in range(self.terms - 1)]
            pairs = zip(ops, values[1:], strict=True)
            problem = f"{values[0]}" + "".join(f"{op}{value}" for op, value in pairs) + "="
            if in_split(problem, self.split):
                break
        else:
            raise ValueError(
                f"no problem for split {self.split!r} in {MAX_DRAWS} draws; use more digits"
            )
        return {
            "prompt": problem,
            "answer": str(_sum_of_products(values, ops)),
            "id": f"arithmetic-{self.split}-{self.seed}-{index}",
        }


def arithmetic(
    *,
    size: int,
    split: str = "train",
    seed: int = 0,
    digits: int = 2,
    terms: int = 2,
    ops: str = "+",
) -> Source:
    """Problems such as "37+48=" with answer "85".

    Operands are uniform over 0 .. 10^digits - 1 and `ops` holds the operators to draw from, of
    "+", "-" and "*". A problem's text decides its split, so no text is in two splits; "37+48="
    and "48+37=" are different texts. The same text can come twice within a split.
    """
    _check_split_and_size(split, size)
    if digits < 1 or terms < 2:
        raise ValueError(f"digits={digits} and terms={terms}, but at least 1 and 2 are needed")
    if not ops or set(ops) - set("+-*"):
        raise ValueError(f"ops={ops!r}, but the operators are one or more of '+-*'")
    return _Arithmetic(size, split, seed, digits, terms, ops)


def _read_lines(
    paths: str | os.PathLike | Sequence, example: dict
) -> tuple[list[tuple[str, dict]], str]:
    """(file:line, object) for every line that is not blank, and the digest of the files: JSON
    lines or parquet, here, on a bucket or on the hub.

    Raises:
        FileNotFoundError: a file is not there.
        ImportError: a file is parquet, and pyarrow is not installed.
        ValueError: a line is not a JSON object, or a file has no line.
    """
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    rows, digest = [], hashlib.blake2b(digest_size=8)
    for name, path in [file for path in paths for file in hub.data_files(path)]:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing; put a file there with one JSON object a line, such as "
                f"{json.dumps(example)}"
            )
        before = len(rows)
        rows += _parquet(name, path, digest) if path.suffix == ".parquet" else _lines(
            name, path, digest
        )
        if len(rows) == before:
            raise ValueError(f"{name} is empty; one line looks like {json.dumps(example)}")
    return rows, digest.hexdigest()


def _lines(name: str, path: Path, digest) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.strip():
                yield f"{name}:{number}", _parse_object(line, f"{name}:{number}")


def _parquet(name: str, path: Path, digest) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{name} needs the package pyarrow: pip install 'jaxrl_tis[hub]'") from error
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    try:
        with path.open("rb") as file:
            rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} is no parquet file that can be read: {error}") from error
    yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


def _parse_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: the line is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: the line is a {type(row).__name__}, not a JSON object")
    return row


def _text(row: dict, name: str, place: str) -> str:
    if name not in row:
        raise ValueError(f"{place}: no field {name!r}; the line has {', '.join(row) or 'none'}")
    if not isinstance(row[name], str | int | float):
        raise ValueError(f"{place}: {name!r} is a {type(row[name]).__name__}, not text or a number")
    return str(row[name])


def jsonl(
    *,
    path: str | os.PathLike | Sequence[str],
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    id_field: str | None = "id",
) -> Source:
    """Examples from files with one JSON object a line, or parquet; id_field=None uses "file:line"
    as the id.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: naming file and line, for a line that is not JSON, a missing field, an id
            that came before (equal ids would share sampling noise), or a file with no lines.
    """
    examples, places = [], {}
    rows, digest = _read_lines(path, {prompt_field: "2+3=", answer_field: "5", "id": "sum-1"})
    for place, row in rows:
        name = place if id_field is None else _text(row, id_field, place)
        if name in places:
            raise ValueError(f"{place}: the id {name!r} was already used at {places[name]}")
        places[name] = place
        prompt, answer = _text(row, prompt_field, place), _text(row, answer_field, place)
        examples.append({"prompt": prompt, "answer": answer, "id": name})
    return Examples(examples, digest)


def gsm8k_jsonl(*, path: str | os.PathLike | Sequence[str]) -> Source:
    """GSM8K's own files, {"question", "answer"}, whose final answer follows "####" (2110.14168),
    as JSON lines or as the parquet files of the hub."""
    examples = []
    rows, digest = _read_lines(path, {"question": "2+3?", "answer": "2 plus 3 is 5.\n#### 5"})
    for place, row in rows:
        prompt, solution = _text(row, "question", place), _text(row, "answer", place)
        _, mark, answer = solution.rpartition("####")
        if not mark:
            raise ValueError(f"{place}: 'answer' has no '####' before the final answer")
        answer = answer.strip().replace(",", "")
        examples.append({"prompt": prompt, "answer": answer, "id": place})
    return Examples(examples, digest)


@dataclass(frozen=True)
class _ReasoningGym(Generated):
    name: str
    size: int
    split: str
    seed: int
    params: dict[str, Any]
    datasets: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return self.size

    def dataset(self, draw: int) -> Any:
        """Returns the package's data set that gives every example its draw number `draw`."""
        if draw not in self.datasets:
            import reasoning_gym as package

            stream = (self.seed * len(SPLITS) + list(SPLITS).index(self.split)) * MAX_DRAWS + draw
            self.datasets[draw] = package.create_dataset(
                self.name, seed=stream * SEED_STRIDE, size=self.size, **self.params
            )
        return self.datasets[draw]

    def __getitem__(self, index: int) -> dict[str, str]:
        _check_index(index, self.size)
        for draw in range(MAX_DRAWS):
            entry = self.dataset(draw)[index]
            if in_split(entry["question"], self.split):
                break
        else:
            raise ValueError(
                f"reasoning_gym {self.name} has no problem for split {self.split!r} in {MAX_DRAWS} "
                "draws; its parameters allow too few problems"
            )
        return {
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "id": f"reasoning_gym-{self.name}-{self.split}-{self.seed}-{index}",
            "meta": json.dumps(entry["metadata"], default=str),
        }


def reasoning_gym(
    *, name: str, size: int, split: str = "train", seed: int = 0, **params: Any
) -> Source:
    """Problems of the package reasoning-gym (2505.24760), e.g. name="chain_sum".

    `params` go to the package's data set. Each (seed, split) has its own range of the package's
    seeds, and a problem's text decides its split as in `arithmetic`. An example also has "meta",
    the package's metadata as JSON, which the reward "reasoning_gym" reads.

    Raises:
        ImportError: the package is not installed.
        ValueError: unknown name, or parameters that the package refuses.
    """
    _check_split_and_size(split, size)
    if size > SEED_STRIDE:
        raise ValueError(f"size is {size}, above {SEED_STRIDE}, so that seeds would share problems")
    source = _ReasoningGym(name, size, split, seed, params)
    try:
        source.dataset(0)
    except ImportError as error:
        raise ImportError(
            "task 'reasoning_gym' needs the package reasoning-gym: pip install 'jaxrl_tis[tasks]'"
        ) from error
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym {name!r} with {params}: {error}") from error
    return source


TASKS = {
    "arithmetic": arithmetic,
    "gsm8k_jsonl": gsm8k_jsonl,
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
}


def parameters(task: str) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a task."""
    found = inspect.signature(TASKS[task]).parameters
    return {n: p for n, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check(task: str, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a task or a parameter that does not exist, is missing or of another
    type."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    known = parameters(task)
    takes_any = len(known) < len(inspect.signature(TASKS[task]).parameters)
    for name, value in params.items():
        if name not in known:
            if takes_any:
                continue
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? It has" if near else "it has"
            raise ValueError(
                f"task {task!r} has no parameter {name!r}; {hint} {', '.join(known)}"
            )
        kinds = typing.get_args(known[name].annotation) or (known[name].annotation,)
        if not isinstance(value, tuple(typing.get_origin(kind) or kind for kind in kinds)):
            wanted = " or ".join((typing.get_origin(kind) or kind).__name__ for kind in kinds)
            raise ValueError(
                f"task {task!r}: the parameter {name} is {value!r}; it must be {wanted}"
            )
    missing = [n for n, p in known.items() if p.default is p.empty and n not in params]
    if missing:
        raise ValueError(
            f"task {task!r} needs the parameters {', '.join(missing)}; it has {', '.join(known)}"
        )


def make(task: str, params: Mapping[str, Any]) -> Source:
    """Makes the source that a config names.

    Raises:
        ValueError: see `check`; or the task refuses the parameters.
    """
    check(task, params)
    return TASKS[task](**params)
