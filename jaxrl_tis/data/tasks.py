"""Tasks: random-access sources of examples {"prompt", "answer", "id", and other columns}.

A task is a function of its parameters that returns a source with `len(source)` and `source[i]`.
`source[i]` depends only on the parameters and i, so a run can resume at any example.

A prompt is text or a list of messages {"role", "content"}. An example without an answer has no key
"answer".
"""

import difflib
import hashlib
import inspect
import json
import os
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl_tis.data import files
from jaxrl_tis.data.examples import SCALAR, Bad, answer_of, find, made, prompt_of, wanted

# Tenths of all problem texts in each split. "warmup" is for supervised steps before RL.
SPLITS = {"train": range(6), "warmup": range(6, 9), "eval": range(9, 10)}
MAX_DRAWS = 512
# reasoning-gym seeds problem i with seed + i, so seeds closer than a size share problems.
SEED_STRIDE = 2**20
class Examples(Protocol):
    """A sequence of examples; `bad` are unusable ones, which are not in it, and `is_late` says whether
    an example is made and rendered when it is read."""

    @property
    def is_late(self) -> bool:
        return False

    @property
    def bad(self) -> Sequence[Bad]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def digest(self) -> str:
        """Returns a digest that distinguishes these examples from others with the same parameters."""


class Source(Examples, Protocol):
    """The examples of a task, each with its origin."""

    def place(self, index: int) -> str:
        """Returns the origin of an example, for messages."""

    def row(self, index: int) -> int:
        """Returns the index of an example among all rows, unusable rows included."""


class Generated(Source):
    """A source that generates its examples from parameters."""

    bad = ()

    def place(self, index: int) -> str:
        return f"generated example {index}"

    def row(self, index: int) -> int:
        return index

    def digest(self) -> str:
        """Returns a digest of the first, middle and last example, which changes if the code changes them."""
        probes = [self[index] for index in (0, len(self) // 2, len(self) - 1)]
        return _digest(json.dumps(probes, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def in_split(problem: str, split: str) -> bool:
    """Returns whether this problem text belongs to `split`; each text belongs to one split, for any seed."""
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
    """Returns values[0] ops[0] values[1] ..., with products first."""
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
    calls: float
    problems: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, str]:
        _check_index(index, self.size)
        rng = random.Random(f"arithmetic {self.seed} {self.split} {index}")
        for _ in range(MAX_DRAWS):
            drawn = [self._problem(rng) for _ in range(self.problems)]
            problem = " ".join(text for text, _ in drawn) + "="
            if in_split(problem, self.split):
                break
        else:
            raise ValueError(
                f"no problem for split {self.split!r} after {MAX_DRAWS} attempts; use more digits"
            )
        value = " ".join(str(value) for _, value in drawn)
        example = {
            "prompt": problem, "answer": value,
            "id": f"arithmetic-{self.split}-{self.seed}-{index}",
        }
        if rng.random() >= self.calls:
            return example
        more: tuple[dict[str, Any], ...] = {"answer": problem}, {"turns": [[problem, f"{value} "]]}
        return example | rng.choice(more)

    def _problem(self, rng: random.Random) -> tuple[str, int]:
        values = [rng.randrange(10**self.digits) for _ in range(self.terms)]
        ops = [rng.choice(self.ops) for _ in range(self.terms - 1)]
        pairs = zip(ops, values[1:], strict=True)
        text = f"{values[0]}" + "".join(f"{op}{value}" for op, value in pairs)
        return text, _sum_of_products(values, ops)


def arithmetic(
    *, size: int, split: str = "train", seed: int = 0, digits: int = 2, terms: int = 2,
    ops: str = "+", calls: float = 0.0, problems: int = 1,
) -> Source:
    """Problems such as "37+48=" with answer "85".

    Operands are uniform over 0 .. 10^digits - 1, and operators are sampled from `ops` ("+", "-",
    "*"). A problem's text decides its split, so no text is in two splits; "37+48=" and "48+37=" are
    different texts. A split can contain a text twice.

    A share `calls` of the examples is for the warm-up of `environments/calculator.py`. Half of these
    have the problem itself as the answer, which is a call. The others have the call and its reply as
    "turns" before the answer.

    With several `problems` an example is a list of them, "3+4 5+8=" with answer "7 13".
    """
    _check_split_and_size(split, size)
    if problems < 1:
        raise ValueError(f"problems={problems}; give at least 1")
    if digits < 1 or terms < 2:
        raise ValueError(f"digits={digits} and terms={terms}; give at least 1 digit and 2 terms")
    if not ops or set(ops) - set("+-*"):
        raise ValueError(f"ops={ops!r}; give one or more of the operators '+-*'")
    if not 0 <= calls <= 1:
        raise ValueError(f"calls={calls}; give a share from 0 to 1")
    return _Arithmetic(size, split, seed, digits, terms, ops, calls, problems)


def jsonl(
    *, path: str | os.PathLike | Sequence[str], prompt_field: str = "prompt",
    answer_field: str | None = None, id_field: str | None = "id",
) -> Source:
    """Examples from files: JSON lines, a JSON array, CSV, parquet, each also as .gz; see files.py.

    An example is the whole row, overridden by "prompt", "id" and, if present, "answer". A field is
    a column or a dotted path such as "reward_model.ground_truth". A prompt is text or a list of
    messages. Without `answer_field` the answer is the first of ANSWER_FIELDS that a row has. Without
    a column "id", and with id_field=None, the id is "file:line". `bad` has unusable rows, and rows
    with the id of an earlier row.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file has no row, or cannot be read.
    """
    def name_of(row):
        if id_field is None or id_field == "id" and find(row.values, "id") is None:
            return row.place
        return str(wanted(row, id_field, SCALAR))

    def fields_of(row):
        example_fields = {"prompt": prompt_of(wanted(row, prompt_field, SCALAR | list))}
        answer = answer_of(row, answer_field)
        return example_fields if answer is None else example_fields | {"answer": answer}

    example = {prompt_field: "2+3=", answer_field or "answer": "5", "id": "sum-1"}
    return made(*files.read(path, example), name_of, fields_of)


def gsm8k_jsonl(*, path: str | os.PathLike | Sequence[str]) -> Source:
    """GSM8K's own files, {"question", "answer"}, whose final answer follows "####" (2110.14168),
    in any format that `jsonl` reads."""
    def fields_of(row):
        prompt, solution = (str(wanted(row, n, SCALAR)) for n in ("question", "answer"))
        _, mark, answer = solution.rpartition("####")
        if not mark:
            raise ValueError("'answer' has no '####' before the final answer; write it as in GSM8K")
        return {"prompt": prompt, "answer": answer.strip().replace(",", "")}

    example = {"question": "2+3?", "answer": "2 plus 3 is 5.\n#### 5"}
    return made(*files.read(path, example), lambda row: row.place, fields_of)


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
        """Returns the package's data set for attempt number `draw` of every example."""
        if draw not in self.datasets:
            import reasoning_gym as package

            stream = (self.seed * len(SPLITS) + list(SPLITS).index(self.split)) * MAX_DRAWS + draw
            self.datasets[draw] = package.create_dataset(
                self.name, seed=stream * SEED_STRIDE, size=self.size, **self.params
            )
        return self.datasets[draw]

    def _entry(self, draw: int, index: int) -> dict[str, Any]:
        try:
            return self.dataset(draw)[index]
        except Exception as error:
            raise ValueError(
                f"reasoning_gym {self.name} fails at example {index}: {type(error).__name__}: {error}"
            ) from error

    def __getitem__(self, index: int) -> dict[str, str]:
        _check_index(index, self.size)
        for draw in range(MAX_DRAWS):
            entry = self._entry(draw, index)
            if in_split(entry["question"], self.split):
                break
        else:
            raise ValueError(
                f"reasoning_gym {self.name} has no problem for split {self.split!r} after "
                f"{MAX_DRAWS} attempts; choose parameters that allow more problems"
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
    """Problems of the package reasoning-gym (2505.24760), for example name="chain_sum".

    The package's data set receives `params`. Each (seed, split) has its own range of the package's
    seeds, and a problem's text decides its split as in `arithmetic`. An example also has "meta",
    the package's metadata as JSON, which the reward "reasoning_gym" reads.

    Raises:
        ImportError: the package is not installed.
        ValueError: unknown name, or parameters that the package refuses.
    """
    _check_split_and_size(split, size)
    if size > SEED_STRIDE:
        raise ValueError(
            f"size is {size}; give at most {SEED_STRIDE}, as seeds share problems above that"
        )
    source = _ReasoningGym(name, size, split, seed, params)
    try:
        source.dataset(0)
    except ImportError as error:
        raise ImportError(
            "task 'reasoning_gym' needs the package reasoning-gym: pip install 'jaxrl_tis[tasks]'"
        ) from error
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"reasoning_gym {name!r} does not accept the parameters {params}: {error}"
        ) from error
    return source


TASKS: dict[str, Callable[..., Source]] = {
    "arithmetic": arithmetic,
    "gsm8k_jsonl": gsm8k_jsonl,
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
}


def parameters(task: str) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a task."""
    arguments = inspect.signature(TASKS[task]).parameters
    return {n: p for n, p in arguments.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check(task: str, params: Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown task, or an unknown, missing or mistyped parameter."""
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
    """Returns the source of a config's task.

    Raises:
        ValueError: see `check`, or the task refuses the parameters.
    """
    check(task, params)
    return TASKS[task](**params)
