"""Rewards: plain functions of the sampled text and the task's record, scored in their own process.

A function returns a number, or several by name: their sum is the score, and an advantage such as
"gdpo" sees them one by one. It returns the same names for every text.

This file imports the standard library only: see confined.py, whose process it runs in.
"""

import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from jaxrl_tis.data import confined

Reward = Callable[[str, dict[str, str]], float | Mapping[str, float]]

_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[-+])?(?:\$(?P<sign2>[-+])?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


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
    if ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}; use one of {', '.join(REWARDS)} or 'module:function'"
        )
    return confined.function(name)


class RewardWorker:
    """Scores texts with one reward function in one process of its own: see confined.Confined.

    The function may hang, crash, raise or return NaN: the item then scores `on_error` and is
    counted in `counts`, the process is replaced where it has to be, and scoring goes on.

    Args:
        function: a name in REWARDS, or "module:function" importable along this process's sys.path.
        timeout: seconds that one item may take.
        on_error: the score of an item that could not be scored.
        share: (items, f: items -> results) -> results; where several processes have the same texts,
            each calls f with its part and gets the results of all.
        pulse: called whenever results come.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(
        self, function: str, *, timeout: float, on_error: float,
        share: Callable[[list, Callable], list] = lambda items, f: f(items),
        pulse: Callable[[], None] = lambda: None,
    ):
        self.on_error, self._share, self._pulse = on_error, share, pulse
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0}
        self._names: list[str] = []  # of the components, from the first result
        self.last_error = ""
        self._confined = confined.Confined(
            "jaxrl_tis.data.rewards:scorer", function, what=f"the reward {function!r}",
            timeout=timeout,
        )

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
        call = lambda items: self._confined.calls(items, self._pulse)
        scores = [self._checked(result) for result in self._share(items, call)]
        names = self._names or ["reward"]
        failed = {name: self.on_error / len(names) for name in names}
        return [failed if parts is None else parts for parts in scores]

    def close(self) -> None:
        """Ends the process and all that it started; a later `score` starts a new one."""
        self._confined.close()

    def _checked(self, result: dict[str, Any]) -> dict[str, float] | None:
        if result["fault"]:
            return self._failed(result["fault"], result["error"])
        parts = result["value"]
        if not all(map(math.isfinite, parts.values())):
            return self._failed("non_finite", f"the score is {parts}")
        self._names = self._names or list(parts)
        if not parts or parts.keys() != set(self._names):
            return self._failed("errors", f"components {list(parts)}, before {self._names}")
        return {name: parts[name] for name in self._names}

    def _failed(self, name: str, error: str) -> None:
        self.counts[name] += 1
        self.last_error = error


def scorer(name: str) -> Callable[[str, dict[str, str]], dict[str, float]]:
    """The reward of this name, which gives its components: what runs in the process."""
    reward = resolve(name)
    return lambda text, record: _named(reward(text, record))


def _named(reward: float | Mapping[str, float]) -> dict[str, float]:
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    return {str(name): float(value) for name, value in parts.items()}
