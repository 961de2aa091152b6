"""Makes, plays and closes environments, in the confined process of pool.py.

This file imports the standard library only: see data/confined.py.
"""

import copy
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_tis.data import confined, signatures
from jaxrl_tis.data.signatures import ERROR_CHARACTERS, Unusable
from jaxrl_tis.environments.protocol import Environment, Messages, Step

OBSERVATION_CHARACTERS = 64 << 10  # of a text, or of all messages as JSON


def make(setup: Mapping[str, Any]) -> "Host":
    """Returns the Host for a setting {"environment": "module:Class", "params": keyword arguments}.

    Raises:
        ImportError, AttributeError: the class cannot be imported.
        TypeError: the class is no environment, or does not accept the parameters.
    """
    name, params = setup["environment"], setup["params"]
    environment = confined.function(name)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(f"{name} has no method {method}; docs/environments.md has an example")
    try:
        inspect.signature(environment).bind(seed=0, **params)
    except TypeError as error:
        shown = ", ".join(["seed", *params])
        raise TypeError(f"{name} cannot be made with the parameters {shown}: {error}") from error
    if hasattr(environment, "prepare"):
        environment.prepare(**params)
    return Host(environment, params)


class Host:
    """Plays the episodes of one process; a call is (action, id of the episode, arguments).

        reset, id, example, seed            makes an environment; the observation is the prompt
        step, id, answer, is_cut, is_last   takes one answer; nobody reads the observation of the last
        forget, id                          closes the environment

    A call never raises. It returns {"step": fields of a Step or None, "error": text}. A failed
    environment is closed at once.
    """

    def __init__(self, environment: type[Environment], params: Mapping[str, Any]):
        self._class, self._params = environment, params
        self._is_told = "is_cut" in inspect.signature(environment.step).parameters
        self._episodes: dict[str, Environment] = {}
        self._errors = signatures.Errors()

    def __call__(self, action: str, id: str, *arguments: Any) -> dict[str, Any]:
        actions: dict[str, Callable[..., Any]] = {
            "reset": self._reset, "step": self._step, "forget": self._forget,
        }
        try:
            return {"step": actions[action](id, *arguments), "error": ""}
        except BaseException as error:
            self._forget(id)
            return {"step": None, "error": self._errors.text(error)}

    def _reset(self, id: str, example: dict[str, Any], seed: int) -> dict[str, Any]:
        self._forget(id)
        self._episodes[id] = self._class(seed=seed, **self._params)
        prompt = self._episodes[id].reset(copy.deepcopy(example))
        return reading(Step(prompt), "reset", "prompt")

    def _step(
        self, id: str, answer: str, is_cut: bool = False, is_last: bool = False
    ) -> dict[str, Any]:
        step = self._episodes[id].step
        said = step(answer, is_cut=is_cut) if self._is_told else step(answer)
        return reading(said, "step", "observation", is_last)

    def _forget(self, id: str) -> None:
        """Closes an environment. An error of `close` is printed, because its episode is over."""
        close = getattr(self._episodes.pop(id, None), "close", None)
        try:
            if close is not None:
                close()
        except BaseException as error:
            text = f"an environment failed to close: {self._errors.text(error)}"
            print(text, file=sys.stderr, flush=True)


def reading(step: Any, method: str, what: str, is_last: bool = False) -> dict[str, Any]:
    """Returns the fields of a Step as JSON values; `what` names its observation, which is "" after
    the last answer.

    Raises:
        Unusable: a field has another type, a number is not finite, a metric has the name of the
            reward, or the observation is too long.
    """
    if not isinstance(step, Step):
        raise Unusable(f"{method} returned {_kind(step)}; return a Step")
    if type(step.is_done).__name__ != "bool":  # Python's or NumPy's
        raise Unusable(f"{method} returned {_kind(step.is_done)} as is_done; return a bool")
    is_rewarded, is_last = step.reward is not None, is_last or bool(step.is_done)
    return {
        "observation": "" if is_last else _observation(step.observation, method, what),
        "reward": _number(step.reward, f"{method} returned the reward") if is_rewarded else None,
        "is_done": bool(step.is_done),
        "metrics": signatures.metrics(step.metrics, f"{method} returned"),
    }


def _observation(value: Any, method: str, what: str) -> str | Messages:
    is_text = isinstance(value, str)
    if not is_text and not (isinstance(value, list) and value and all(map(_is_message, value))):
        raise Unusable(f"{method} returned {_kind(value)} as the {what}; return text, or a list of "
                       "messages with role and content")
    length = len(value) if is_text else len(json.dumps(value, ensure_ascii=False))
    if length > OBSERVATION_CHARACTERS:
        raise Unusable(f"{method} returned {length:,} characters as the {what}, above the limit of "
                       f"{OBSERVATION_CHARACTERS:,}")
    try:
        (value if is_text else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise Unusable(f"{method} returned a lone surrogate in the {what}: {error}") from error
    return value


def _is_message(value: Any) -> bool:
    fields = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None,)
    return all(isinstance(field, str) for field in fields)


def _number(value: Any, what: str) -> float:
    number = signatures.finite(value)
    if number is None:
        raise Unusable(f"{what} {value!r}, not a finite number of float32"[:ERROR_CHARACTERS])
    return number


def _kind(value: Any) -> str:
    return {"NoneType": "None"}.get(type(value).__name__, f"a {type(value).__name__}")
