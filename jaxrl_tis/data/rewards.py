"""Rewards: plain functions of the sampled text and the task's record, scored in their own process.

A function returns a number, or several by name: their sum is the score, and an advantage such as
"gdpo" sees them one by one. It returns the same names for every text.

This file imports the standard library only, so the scoring process starts in tens of
milliseconds and never holds an accelerator.
"""

import functools
import importlib
import json
import math
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Reward = Callable[[str, dict[str, str]], float | Mapping[str, float]]

_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[-+])?(?:\$(?P<sign2>[-+])?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)
START_SECONDS = 60.0


def exact(text: str, record: dict[str, str]) -> float:
    """1 if the text is the answer but for white space around it, else 0."""
    return float(text.strip() == record["answer"].strip())


def find_last_number(text: str) -> Decimal | None:
    """The last number of a text: "-$1,234.50" is -1234.5, and "7-4" ends in 4, not in -4."""
    matches = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not matches:
        return None
    sign, sign2, digits = matches[-1].group("sign", "sign2", "digits")
    value = Decimal(digits.replace(",", ""))
    return value.copy_negate() if "-" in (sign, sign2) else value


def last_number(text: str, record: dict[str, str]) -> float:
    """1 if the last number of the text equals the answer's last number, else 0.

    Raises:
        ValueError: the answer holds no number.
    """
    answer = find_last_number(record["answer"])
    if answer is None:
        raise ValueError(f"the answer {record['answer']!r} of {record['id']} has no number")
    return float(find_last_number(text) == answer)


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, braces matched; None without one, or if it never closes."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start, depth = start + len(r"\boxed{"), 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def normalise_math(text: str) -> str:
    r"""A LaTeX answer without what does not change its value.

    Removes spacing, dollar and per cent signs, \left and \right, the names of text boxes, commas
    between thousands and a full stop at the end; \dfrac and \tfrac become \frac.
    """
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|\\?[$%]|\s|~", "", text)
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    return text.rstrip(".")


def boxed(text: str, record: dict[str, str]) -> float:
    r"""1 if the text's final answer equals the record's after `normalise_math`, else 0.

    The final answer is the last \boxed{...}, or where there is none the rest of the line after
    the last "Answer:", the format that DAPO's prompt asks for (2503.14476).
    """
    found = last_boxed(text)
    if found is None:
        lines = re.findall(r"(?i)answer[ \t]*:[ \t]*([^\n]+)", text)
        found = lines[-1] if lines else None
    answer = last_boxed(record["answer"])
    answer = record["answer"] if answer is None else answer
    return float(found is not None and normalise_math(found) == normalise_math(answer))


@functools.cache
def _reasoning_gym_scorer(name: str) -> Callable:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(name)


def reasoning_gym(text: str, record: dict[str, str]) -> float:
    """The package's own score, in [0, 1], of the stripped text as the answer to its problem.

    The metadata went through JSON, which has no tuples: arc_agi and rearc compare with tuples,
    so there a right answer scores as a wrong one.
    """
    metadata = json.loads(record["meta"])
    entry = {"question": record["prompt"], "answer": record["answer"], "metadata": metadata}
    return float(_reasoning_gym_scorer(metadata["source_dataset"])(text.strip(), entry))


def soft_overlong_penalty(length_tokens: int, max_length: int, buffer: int) -> float:
    """What to add to the reward of a long response (DAPO, 2503.14476, equation 13).

    0 up to max_length - buffer tokens, then linear down to -1 at max_length tokens, and -1 above.
    All three are in tokens of the response.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must be above 0 and at most max_length {max_length}")
    return max(-1.0, min(0.0, (max_length - buffer - length_tokens) / buffer))


REWARDS: dict[str, Reward] = {
    "boxed": boxed,
    "exact": exact,
    "last_number": last_number,
    "reasoning_gym": reasoning_gym,
}


def resolve(name: str) -> Reward:
    """The reward of a name in REWARDS, or of "module:function".

    Raises:
        ImportError, AttributeError: the module or its function cannot be had.
        ValueError: the name is neither.
    """
    if name == "reasoning_gym":
        importlib.import_module(name)  # Seconds, which must not count against the first item.
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(
            f"unknown reward {name!r}; use one of {', '.join(REWARDS)} or 'module:function'"
        )
    return getattr(importlib.import_module(module), function)


class RewardWorker:
    """Scores texts with one reward function in one process of its own.

    The function may hang, crash, raise or return NaN: the item then scores `on_error` and is
    counted in `counts`, the process is replaced where it has to be, and scoring goes on.
    Messages are JSON, so nothing that a reward does can run code on this side. This keeps a
    faulty function from stopping a run; it is no sandbox against a hostile one.

    The process is a new interpreter rather than a multiprocessing child, because the latter
    imports the main module again, and with it JAX. It leads its own process group: killing it
    also kills what the function started. If this process dies, it ends by itself (a function
    that hangs inside C code without releasing the interpreter lock is the exception).

    Args:
        function: a name in REWARDS, or "module:function" importable along this process's sys.path.
        timeout: seconds that one item may take.
        on_error: the score of an item that could not be scored.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(self, function: str, *, timeout: float, on_error: float):
        self.function, self.timeout, self.on_error = function, timeout, on_error
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0}
        self._names: list[str] = []  # of the components, from the first result
        self.last_error = ""
        self._process: subprocess.Popen | None = None
        self._start()

    def __enter__(self) -> "RewardWorker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def score(self, texts: Sequence[str], records: Sequence[dict[str, str]]) -> list[float]:
        """One score for each text, in order; blocks until all are scored or given up."""
        return [sum(parts.values()) for parts in self.components(texts, records)]

    def components(
        self, texts: Sequence[str], records: Sequence[dict[str, str]]
    ) -> list[dict[str, float]]:
        """The components of each score by name, {"reward": score} where there is only a number."""
        items = [[text, dict(record)] for text, record in zip(texts, records, strict=True)]
        scores: list[dict[str, float] | None] = []
        while len(scores) < len(items):
            if self._process is None:
                self._start()
            try:
                self._score_in_process(items[len(scores) :], scores)
            except (TimeoutError, EOFError, OSError) as fault:
                self.close()
                name = "timeouts" if isinstance(fault, TimeoutError) else "errors"
                scores.append(self._failed(name, f"{type(fault).__name__}: {fault}"))
        names = self._names or ["reward"]
        failed = {name: self.on_error / len(names) for name in names}
        return [failed if parts is None else parts for parts in scores]

    def close(self) -> None:
        """Ends the process and all that it started; a later `score` starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        # Before wait(): until then the id of the group cannot be given to another process.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _start(self) -> None:
        code = (
            "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
            "from jaxrl_tis.data import rewards; rewards.serve(sys.argv[2])"
        )
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, path, self.function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unread = b""
        try:
            [loaded] = self._read_lines(time.monotonic() + START_SECONDS)
        except (TimeoutError, EOFError) as fault:
            loaded = {"error": f"{type(fault).__name__}: {fault}"}
        if loaded["error"]:
            self.close()
            raise ValueError(f"the reward {self.function!r} cannot be loaded: {loaded['error']}")

    def _score_in_process(self, items: list, scores: list) -> None:
        """Appends to `scores` until all items are done; raises at the first that stops this."""
        self._write(json.dumps(items).encode() + b"\n", time.monotonic() + self.timeout)
        end = len(scores) + len(items)
        while len(scores) < end:
            for result in self._read_lines(time.monotonic() + self.timeout):
                scores.append(self._checked(result))

    def _checked(self, result: dict[str, Any]) -> dict[str, float] | None:
        if result["error"]:
            return self._failed("errors", result["error"])
        parts = result["score"]
        if not all(map(math.isfinite, parts.values())):
            return self._failed("non_finite", f"the score is {parts}")
        self._names = self._names or list(parts)
        if not parts or parts.keys() != set(self._names):
            return self._failed("errors", f"components {list(parts)}, before {self._names}")
        return {name: parts[name] for name in self._names}

    def _failed(self, name: str, error: str) -> None:
        self.counts[name] += 1
        self.last_error = error

    def _write(self, message: bytes, deadline: float) -> None:
        stdin = self._process.stdin.fileno()
        while message:
            _wait(stdin, select.POLLOUT, deadline)
            message = message[os.write(stdin, message) :]

    def _read_lines(self, deadline: float) -> list[dict[str, Any]]:
        """All complete lines that are there, after waiting for at least one."""
        stdout = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            _wait(stdout, select.POLLIN, deadline)
            data = os.read(stdout, 1 << 20)
            if not data:
                raise EOFError("the reward process ended")
            self._unread += data
        complete, _, self._unread = self._unread.rpartition(b"\n")
        return [json.loads(line) for line in complete.split(b"\n")]


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select() refuses descriptors above 1023.
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise TimeoutError("the reward function ran past its time limit")


def serve(function: str) -> None:
    """The scoring process: reads batches of items from stdin, writes one result line per item."""
    items, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # The function must not read our messages or write among them.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(score: dict[str, float], error: str) -> None:
        results.write(json.dumps({"score": score, "error": error}).encode() + b"\n")

    try:
        reward = resolve(function)
    except BaseException as error:
        send({}, f"{type(error).__name__}: {error}")
        return
    send({}, "")
    batches = queue.SimpleQueue()
    threading.Thread(target=_read_batches, args=(items, batches), daemon=True).start()
    while True:
        for text, record in batches.get():
            try:
                score, error = _named(reward(text, record)), ""
            except BaseException as fault:
                score, error = {}, f"{type(fault).__name__}: {fault}"[:1000]
            send(score, error)


def _named(reward: float | Mapping[str, float]) -> dict[str, float]:
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    return {str(name): float(value) for name, value in parts.items()}


def _read_batches(items, batches: queue.SimpleQueue) -> None:
    for line in items:
        batches.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)  # The other side is gone, and the function may be hanging.
