"""Calls reward functions and reads their results, in the process of the rewards.

    example     score(text, example)
    examples    score(texts, examples)
    verl        compute_score(data_source, solution_str, ground_truth, extra_info)
    verl_batch  compute_score(data_sources, solution_strs, ground_truths, extra_infos)
    trl         reward(prompts, completions, **columns)

This file imports the standard library only: see confined.py.
"""

import asyncio
import copy
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_tis.data import confined, graders

# Parameters that identify a signature; the first signature with a parameter of the function wins.
MARKS = {
    "trl": {"prompts", "completions", "completion_ids"},
    "verl_batch": {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
    "verl": {"data_source", "solution_str", "extra_info"},
    "examples": {"texts", "examples"},
}
BATCHED = ("examples", "verl_batch", "trl")
SIGNATURES = ("auto", "example", *MARKS)
# Words in the name of a second parameter that is the answer itself, and not the example.
ANSWER_WORDS = {
    "answer", "answers", "correct", "expected", "gold", "golden", "gt", "label", "labels", "ref",
    "reference", "solution", "target", "truth",
}
TEXTS = (str, bytes, bytearray)
ERROR_CHARACTERS, TRACEBACK_CHARACTERS = 1000, 4000
SCORE = "score"  # the component that is the reward, if present
LARGEST = 3e38  # rewards and metrics are float32 in the learner
OURS = os.path.dirname(__file__)

Item = tuple[str, dict[str, Any], list[int] | None]  # text, example, tokens of the text


def make(setup: Mapping[str, Any]) -> Callable[[list[Item]], list[dict[str, Any]]]:
    """Returns a function that scores a list of items, for a setting {"name", "signature", "timeout",
    "workers", "judge"}.

    The function never raises. It returns for each item {"value": see `reading`} or {"fault", "kind",
    "error", "traceback"}. Its attribute `traits` says whether it takes several items: "batched" in
    one call of the reward, "async" in concurrent calls.

    Raises:
        ImportError, AttributeError, ValueError: a function cannot be imported, or has no known
            signature.
    """
    rewards, names = {}, graders.names(setup["name"])
    for name in names:
        function: Any = graders.resolve(name, setup.get("judge", ""))
        function = function() if inspect.isclass(function) else function
        short = name.rpartition(":")[2]
        # The component "score" of a function's own mapping stands for all others.
        is_taken = short in rewards or short == "score" and len(names) > 1
        key = re.sub(r"\W", "_", name) if is_taken else short
        rewards[key] = called(function, name, setup["signature"])
    is_batched = any(reward.is_batched for reward in rewards.values())
    is_async = not is_batched and all(reward.is_async for reward in rewards.values())
    scorer = _Scorer(rewards, is_async, setup["timeout"], setup["workers"])
    scorer.traits = {
        "batched": is_batched, "async": is_async,
        "tokens": any(reward.takes("completion_ids") for reward in rewards.values()),
    }
    return scorer


def called(function: Callable, name: str, signature: str = "auto") -> "Called":
    """Returns the function with its signature; "auto" finds the signature from the parameters.

    Raises:
        ValueError: the signature is unknown.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] | None = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {} if signature == "auto" else None
    if parameters is not None:
        found = _inferred(parameters) if signature == "auto" else signature
        if found is None or not _fits(found, parameters):
            shown = "?" if not parameters else ", ".join(str(p) for p in parameters.values())
            raise ValueError(
                f"{name} takes ({shown}), which fits no reward signature: score(text, example), "
                "score(texts, examples), compute_score(data_source, solution_str, ground_truth, "
                "extra_info), compute_score(data_sources, solution_strs, ground_truths, "
                "extra_infos) or reward(prompts, completions, **columns). Change its parameters, "
                f"or set reward.signature to one of {', '.join(SIGNATURES)}"
            )
        signature = found
    return Called(function, signature, parameters)


def _inferred(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Returns the signature that a function's parameters imply, None if unclear."""
    for signature, marks in MARKS.items():
        if marks & parameters.keys():
            return signature
    first_two = list(parameters.values())[:2]
    is_plain = len(first_two) == 2 and all(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first_two
    )
    words = set(first_two[1].name.lower().split("_")) if is_plain else ANSWER_WORDS
    return None if words & ANSWER_WORDS else "example"


def _fits(signature: str, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Returns whether a function with these parameters accepts such a call."""
    if signature in ("example", "examples"):
        try:
            inspect.Signature(list(parameters.values())).bind("", {})
        except TypeError:
            return False
        return True
    arguments = set(_verl("", {})) if signature == "verl" else set(_verl_batch([]))
    needed = {
        p.name for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    # The columns of TRL's functions depend on the data, which is unknown here.
    by_name = all(p.kind != p.POSITIONAL_ONLY for p in parameters.values())
    return by_name and (signature == "trl" or needed <= arguments)


class WrongCount(ValueError):
    """A batched function did not return one value per text."""


class Called:
    """A reward function and its signature; `parameters` None: unknown."""

    def __init__(self, function: Callable, signature: str, parameters: Mapping | None):
        self._function, self._signature, self._parameters = function, signature, parameters
        self.is_batched = signature in BATCHED
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    def takes(self, name: str) -> bool:
        """Returns whether the function accepts an argument of this name."""
        kinds = [p.kind for p in (self._parameters or {}).values()]
        takes_any = self._parameters is None or inspect.Parameter.VAR_KEYWORD in kinds
        return self._signature == "trl" and takes_any or name in (self._parameters or {})

    def __call__(self, items: Sequence[Item]) -> Any:
        """Returns the value of one item, or a list for a batched function; an awaitable if async. What
        the function changes is its own copy."""
        items = [
            (text, copy.deepcopy(example), tokens and [*tokens]) for text, example, tokens in items
        ]
        if self._signature == "example":
            [(text, example, _)] = items
            return self._function(text, example)
        if self._signature == "examples":
            return self._function([i[0] for i in items], [i[1] for i in items])
        if self._signature == "verl":
            [(text, example, _)] = items
            return self._by_name(_verl(text, example))
        return self._by_name(_verl_batch(items) if self._signature == "verl_batch" else _trl(items))

    def _by_name(self, arguments: dict[str, Any]) -> Any:
        if self._parameters is None:
            return self._function(**arguments)
        if not any(p.kind == p.VAR_KEYWORD for p in self._parameters.values()):
            arguments = {n: x for n, x in arguments.items() if n in self._parameters}
        missing = [
            p.name for p in self._parameters.values() if p.default is p.empty
            and p.name not in arguments and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if missing:
            raise TypeError(
                f"the reward needs the parameters {', '.join(missing)}, and the available ones are "
                f"{', '.join(arguments)}; rename them or give them defaults"
            )
        return self._function(**arguments)


def _verl(text: str, example: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of verl's reward managers; in an example of another layout the answer is
    the ground truth."""
    model: Any = example.get("reward_model")
    has_truth = isinstance(model, dict) and "ground_truth" in model
    extra = example.get("extra_info")
    return {
        "data_source": example.get("data_source"), "solution_str": text,
        "ground_truth": model["ground_truth"] if has_truth else example.get("answer"),
        "extra_info": {**(extra if isinstance(extra, dict) else {}), "num_turns": None,
                       "rollout_reward_scores": {}},
    }


def _verl_batch(items: Sequence[Item]) -> dict[str, Any]:
    every = [_verl(text, example) for text, example, _ in items]
    names = "data_source", "solution_str", "ground_truth", "extra_info"
    return {f"{name}s": [arguments[name] for arguments in every] for name in names}


def _trl(items: Sequence[Item]) -> dict[str, Any]:
    """Returns the arguments of TRL's trainers, without the trainer's state. A completion is a list of
    one message if the prompt is a list of messages."""
    is_chat = lambda example: isinstance(example["prompt"], list)
    completions = [
        [{"role": "assistant", "content": text}] if is_chat(example) else text
        for text, example, _ in items
    ]
    # An answer or id that the data has as a number is a number here.
    examples = [{**example, **example.get("as_read", {})} for _, example, _ in items]
    columns = dict.fromkeys(name for example in examples for name in example)
    for name in ("prompt", "completion", "completion_ids", "as_read"):
        columns.pop(name, None)
    columns_by_name = {name: [example.get(name) for example in examples] for name in columns}
    if all(tokens is not None for _, _, tokens in items):
        columns_by_name["completion_ids"] = [tokens for _, _, tokens in items]
    ignore = lambda *_, **__: None
    return columns_by_name | {
        "prompts": [example["prompt"] for example in examples], "completions": completions,
        "log_extra": ignore, "log_metric": ignore,
    }


class _Scorer:
    """The function that `make` returns."""

    def __init__(
        self, rewards: dict[str, Called], is_async: bool, timeout: float, workers: int
    ):
        self.traits: dict[str, bool] = {}
        self._rewards, self._is_async = rewards, is_async
        self._timeout, self._workers = timeout, workers
        self._loop = asyncio.new_event_loop()
        self._seen: set[str] = set()  # kinds whose traceback was sent

    def __call__(self, items: list[Item]) -> list[dict[str, Any]]:
        outcomes = self._all(items)
        for outcome in outcomes:
            if "kind" in outcome and outcome["kind"] in self._seen:
                outcome["traceback"] = ""
            elif "kind" in outcome:
                self._seen.add(outcome["kind"])
        return outcomes

    def _all(self, items: list[Item]) -> list[dict[str, Any]]:
        if self._is_async:
            return self._loop.run_until_complete(self._at_once(items))
        try:
            columns = [self._column(reward, items) for reward in self._rewards.values()]
        except WrongCount as error:
            return [_failed(error) for _ in items]
        except BaseException as error:
            if len(items) == 1:
                return [_failed(error)]
        else:
            return self._outcomes(columns)
        return [outcome for item in items for outcome in self._all([item])]

    def _column(self, reward: Called, items: list[Item]) -> list[Any]:
        """Returns the values of one reward for all items."""
        if not reward.is_batched:
            return [self._finished(reward([item])) for item in items]
        values = list(self._finished(reward(items)))
        if len(values) != len(items):
            raise WrongCount(
                f"the reward returned {len(values)} values for {len(items)} texts; return one "
                "value per text"
            )
        return values

    def _finished(self, value: Any) -> Any:
        # Outside the loop until here, as a function may run one of its own.
        return self._loop.run_until_complete(_awaited(value)) if inspect.isawaitable(value) else value

    def _outcomes(self, columns: list[list[Any]]) -> list[dict[str, Any]]:
        if len(columns) == 1:
            return [{"value": reading(value)} for value in columns[0]]
        return [
            {"value": together(dict(zip(self._rewards, row, strict=True)))}
            for row in zip(*columns, strict=True)
        ]

    async def _at_once(self, items: list[Item]) -> list[dict[str, Any]]:
        room = asyncio.Semaphore(self._workers)

        async def score(item):
            async with room:
                limit = asyncio.timeout(self._timeout)
                try:
                    async with limit:
                        calls = [_awaited(reward([item])) for reward in self._rewards.values()]
                        values = await asyncio.gather(*calls)
                except TimeoutError as error:
                    if not limit.expired():  # the function's own
                        return _failed(error)
                    text = f"TimeoutError: no result within {self._timeout:g} s"
                    return {"fault": "timeouts", "kind": "TimeoutError", "error": text, "traceback": ""}
                except BaseException as error:
                    return _failed(error)
                return self._outcomes([[value] for value in values])[0]

        return await asyncio.gather(*map(score, items))


def _failed(error: BaseException) -> dict[str, Any]:
    kind, text = describe(error)
    message = confined.printable(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS]
    return {"fault": "errors", "kind": kind, "error": message, "traceback": text}


async def _awaited(value: Any) -> Any:
    return await value


def describe(error: BaseException) -> tuple[str, str]:
    """Returns an exception's kind (type and place), and its traceback without the frames that called
    the user's code."""
    trace = error.__traceback__
    ours = OURS, os.path.dirname(asyncio.__file__)
    while trace is not None and trace.tb_next:
        if os.path.dirname(trace.tb_frame.f_code.co_filename) not in ours:
            break
        trace = trace.tb_next
    frames = traceback.extract_tb(trace)
    text = "".join(traceback.format_exception(type(error), error, trace))
    kind = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
    return confined.printable(kind), confined.printable(text)[-TRACEBACK_CHARACTERS:]


class Unusable(ValueError):
    """The user's code returned something that cannot be used. The message says all."""


class Errors:
    """Describes the errors of one process's user code, and prints the first traceback of each
    kind."""

    def __init__(self):
        self._shown: set[str] = set()

    def text(self, error: BaseException) -> str:
        """Returns an error with its place; of Unusable the message alone."""
        if isinstance(error, Unusable):
            return confined.printable(str(error))[:ERROR_CHARACTERS]
        kind, trace = describe(error)
        if kind not in self._shown:
            self._shown.add(kind)
            print(trace, file=sys.stderr, flush=True)
        return f"{kind}: {confined.printable(str(error))}"[:ERROR_CHARACTERS]


def finite(value: Any) -> float | None:
    """Returns the value as a finite number of float32; None if it is none, or a text."""
    if isinstance(value, TEXTS):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def metrics(values: Any, who: str) -> dict[str, float]:
    """Returns the metrics of an episode or a session by their names as texts. `who` begins the
    message of an error: "step returned".

    Raises:
        Unusable: it is no mapping, a value is not finite, or a name is that of the reward.
    """
    if not isinstance(values, Mapping):
        raise Unusable(f"{who} a {type(values).__name__} as metrics; return a dict")
    found = {}
    for name, value in values.items():
        key, number = confined.printable(str(name)), finite(value)
        if number is None:
            text = f"{who} the metric {name!r}: {value!r}, not a finite number"
            raise Unusable(text[:ERROR_CHARACTERS])
        if key == SCORE:
            raise Unusable(f"{who} a metric called {SCORE!r}, the name of the reward; rename it")
        found[key] = number
    return found


def reading(value: Any) -> dict[str, Any]:
    """Reads the result of a reward: {"parts": {name: number or None}}, {"unsure": True}, or
    {"bad": description}.

    A number is named "reward". In a mapping, numbers and booleans are components and None is a
    missing one. Texts and other values are ignored, except for "score".
    """
    if _is_unsure(value):
        return {graders.UNSURE: True}
    if not isinstance(value, Mapping):
        number = _number(value)
        return {"bad": _named(value)} if number is None else {"parts": {"reward": number}}
    score = value.get("score")
    if _is_unsure(score):
        return {graders.UNSURE: True}
    if score is not None and _number(score) is None:
        return {"bad": f"{_named(score)} as the score"}
    parts = {confined.printable(str(n)): x if x is None else _number(x) for n, x in value.items()
             if x is None or _number(x) is not None}
    return {"parts": parts} if parts else {"bad": "a mapping without any number"}


def together(values: dict[str, Any]) -> dict[str, Any]:
    """Reads the results of several functions, each a number, None or "unsure", which all are then; see
    `reading`."""
    if any(map(_is_unsure, values.values())):
        return {graders.UNSURE: True}
    for name, value in values.items():
        if value is not None and _number(value) is None:
            return {"bad": f"{_named(value)} from {name}, one of several functions"}
    return reading(values)


def _is_unsure(value: Any) -> bool:
    return isinstance(value, str) and value == graders.UNSURE


def _named(value: Any) -> str:
    if isinstance(value, int):
        return "a number that is too large"
    return "None" if value is None else f"a {type(value).__name__}"


def _number(value: Any) -> float | None:
    """Returns the value as a number; None for other types, including text."""
    if value is None or isinstance(value, TEXTS):
        return None
    try:
        return float(value)
    except Exception:  # any type may raise any exception
        return None
