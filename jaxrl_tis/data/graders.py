"""The package's own rewards: functions of the sampled text and its example.

This file imports the standard library only, because it runs in the process of confined.py.
"""

import functools
import importlib
import json
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from jaxrl_tis.data import confined

Example = Mapping[str, Any]

PARSE_SECONDS, COMPARE_SECONDS = 1, 2  # of one expression, of a pair; math-verify takes whole ones

UNSURE = "unsure"
_VERDICT = re.compile(r"(?P<no>(\bnot|n't) +)?\b(?P<word>correct|wrong|unsure)\W*$")
VERDICTS: dict[str, float | str] = {"correct": 1.0, "wrong": 0.0, UNSURE: UNSURE}
QUESTION = (
    "Judge an answer by the reference.\n\nProblem:\n{prompt}\n\nReference:\n{answer}\n\nAnswer:\n{text}\n\n"
    "End with one word: correct, wrong, or unsure if you cannot tell."
)

_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[-+])?(?:\$(?P<sign2>[-+])?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def answer_of(example: Example) -> str:
    """Returns the answer of an example; raises ValueError for an example without one."""
    if "answer" not in example:
        raise ValueError(
            f"example {example['id']} has no answer to compare with; set task.params.answer_field "
            "to the column with the answer, or choose a reward that needs none"
        )
    return example["answer"]


def exact(text: str, example: Example) -> float:
    """Returns 1 if the stripped text equals the answer, else 0."""
    return float(text.strip() == answer_of(example).strip())


def parts(text: str, example: Example) -> float:
    """Returns the share of the answer's words that the text has in their places. Further words of
    the text count for nothing."""
    expected = answer_of(example).split()
    return sum(a == b for a, b in zip(text.split(), expected, strict=False)) / max(len(expected), 1)


def find_last_number(text: str) -> Decimal | None:
    """Returns the last number of a text: "-$1,234.50" is -1234.5, and "7-4" ends in 4, not in -4."""
    matches = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not matches:
        return None
    sign, sign2, digits = matches[-1].group("sign", "sign2", "digits")
    value = Decimal(digits.replace(",", ""))
    return value.copy_negate() if "-" in (sign, sign2) else value


def number_of(example: Example) -> Decimal:
    """Returns the last number of the example's answer.

    Raises:
        ValueError: the answer has no number.
    """
    answer = find_last_number(answer_of(example))
    if answer is None:
        raise ValueError(
            f"the answer {example['answer']!r} of {example['id']} has no number; give a number, or "
            "choose another reward or environment"
        )
    return answer


def last_number(text: str, example: Example) -> float:
    """Returns 1 if the last number of the text equals `number_of` the example, else 0."""
    return float(find_last_number(text) == number_of(example))


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} with matched braces; None if absent or unclosed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start, depth = start + len(r"\boxed{"), 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _in_box(expression: str) -> str:
    r"""Returns an expression in a box without dollars, which math-verify reads best."""
    return rf"\boxed{{{expression.strip(' *$')}}}"


def final_answer(text: str) -> str:
    r"""Returns the part of a text that math-verify reads.

    The last \boxed{...}, or without one the text after the last "Answer:", the format of DAPO's prompt
    (2503.14476), up to the end of its line, else the whole text. Of that line its only formula in
    dollars counts.
    """
    if r"\boxed{" in text:
        boxed = last_boxed(text)
        return "" if boxed is None else _in_box(boxed)
    named = list(re.finditer(r"(?i)answer[ \t]*:", text))
    lines = text[named[-1].end():].split("\n") if named else []
    line = next(filter(None, (line.lstrip(" \t*").rstrip(" \t\r*.,;!") for line in lines)), "")
    formulas = re.findall(r"\$+([^$]+)\$+", line)
    if not line or len(formulas) > 1:
        return line or text
    return _in_box(formulas[0] if formulas else line)


def _parsed(text: str, is_reference: bool) -> list:
    import math_verify
    from math_verify.errors import TimeoutException

    text = re.sub(r"(?<=[0-9])\\[,;:! ](?=[0-9]{3}(?![0-9]))", "", text)  # 1\,000
    read = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    read += [] if is_reference else [math_verify.ExprExtractionConfig()]
    try:
        return math_verify.parse(text, read, parsing_timeout=PARSE_SECONDS, raise_on_error=True)
    except TimeoutException:
        raise
    except Exception:
        return []


def _is_equal(reference: list, found: list) -> bool:
    import math_verify
    from math_verify.errors import TimeoutException

    compared = functools.partial(
        math_verify.verify, reference, found, timeout_seconds=COMPARE_SECONDS
    )
    try:
        return compared(raise_on_error=True)
    except TimeoutException:
        raise
    except Exception:  # one pair fails, and with it the comparison of all pairs
        return compared()


def math(text: str, example: Example) -> float:
    """Returns 1 if math-verify finds the text's final answer equal to the example's answer, else 0.

    Raises:
        ValueError: the example's answer cannot be read.
        TimeoutError: reading or comparing takes too long.
    """
    from math_verify.errors import TimeoutException

    answer = answer_of(example)
    try:
        boxed = last_boxed(answer)
        reference = _parsed(_in_box(answer if boxed is None else boxed), is_reference=True)
        if not reference:
            raise ValueError(
                f"math-verify cannot read the answer {answer!r} of {example['id']}; write it as a "
                "number or in LaTeX"
            )
        return float(_is_equal(reference, _parsed(final_answer(text), is_reference=False)))
    except TimeoutException:
        raise TimeoutError(f"math-verify took too long over an answer to {answer!r}") from None


@functools.cache
def _reasoning_gym_scorer(name: str) -> Callable:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(name)


def reasoning_gym(text: str, example: Example) -> float:
    """Returns the score of reasoning-gym, in [0, 1], for the stripped text.

    The metadata went through JSON, which has no tuples. arc_agi and rearc compare with tuples, and
    score a right answer as wrong.
    """
    metadata = json.loads(example["meta"])
    entry = {"question": example["prompt"], "answer": example["answer"], "metadata": metadata}
    return float(_reasoning_gym_scorer(metadata["source_dataset"])(text.strip(), entry))


class Judge:
    """Asks a generative reward model: 1 for correct, 0 for wrong, UNSURE where it cannot tell.

    The last word of the reply is the verdict. After CompassMax (arXiv:2512.07710), whose prompt is not
    published. JUDGE_TOKEN in the environment is the server's key.

    Args:
        address: "http://host:port", of an OpenAI-compatible server, or "http://host:port MODEL" for one of
            its models.

    Raises:
        OSError: the server does not answer.
        ValueError: the reply ends without a verdict.
    """

    def __init__(self, address: str):
        self._url, _, self._model = address.partition(" ")

    def __call__(self, text: str, example: Example) -> float | str:
        prompt = example["prompt"]
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message["content"]) for message in prompt)
        content = QUESTION.format(prompt=prompt, answer=answer_of(example), text=text)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        if self._model:
            body["model"] = self._model
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get("JUDGE_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        url = f"{self._url.rstrip('/')}/v1/chat/completions"
        asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked) as reply:
            choice = json.load(reply)["choices"][0]
        said = choice["message"]["content"] or ""
        found = _VERDICT.search(said.lower())
        if choice.get("finish_reason") == "length" or found is None or found["no"]:
            raise ValueError(f"the judge's reply ends with none of {', '.join(VERDICTS)}: {said[-200:]!r}")
        return VERDICTS[found["word"]]


REWARDS: dict[str, Callable] = {
    "exact": exact,
    "judge": Judge,
    "last_number": last_number,
    "math": math,
    "parts": parts,
    "reasoning_gym": reasoning_gym,
}
NEEDS = {"math": ("math_verify", "math"), "reasoning_gym": ("reasoning_gym", "tasks")}


def names(rewards: str) -> list[str]:
    """Returns the comma-separated names in `reward.name`."""
    return [name.strip() for name in rewards.split(",")]


def resolve(name: str, judge: str = "") -> Callable:
    """Returns the reward function of a name in REWARDS, or of "module:function"; `judge`: see Judge.

    Raises:
        ImportError, AttributeError: the module or function cannot be imported.
        ValueError: the name is neither.
    """
    if name in NEEDS:
        package, extra = NEEDS[name]
        try:  # Takes seconds, which must not count against the first item.
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"{error}: pip install 'jaxrl_tis[{extra}]'") from error
    if name in REWARDS:
        return Judge(judge) if name == "judge" else REWARDS[name]
    if ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}; use one of {', '.join(REWARDS)} or 'module:function'"
        )
    return confined.function(name)
