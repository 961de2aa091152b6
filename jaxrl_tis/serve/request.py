"""The JSON of a completion request -> checked requests for the scheduler.

Every field is that of the OpenAI API, but for those that it lacks and vLLM's servers have: top_k,
min_p, repetition_penalty, min_tokens, ignore_eos and prompt_logprobs.
What is not served here, a field or one of its values, is refused: ignoring it would give another
answer than asked for.
"""

import dataclasses
import json
import secrets
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import Request, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
MAX_SEED = 2**32 - 1
MAX_NUMBER = 100.0  # of a temperature, penalty or bias
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_TOKENS = ("max_tokens", "max_completion_tokens")  # two names of one field

# What a field may be, and its value when it is absent or null; see `_field`.
COMMON = {
    "model": (str, None), "user": (str, None), "stream": (bool, False), "n": (int, 1),
    "seed": (int, None), "max_tokens": (int, None), "temperature": (float, 1.0),
    "top_p": (float, 1.0), "top_k": (int, 0), "min_p": (float, 0.0), "stop": ((str, list), []),
    "logit_bias": (dict, {}), "presence_penalty": (float, 0.0), "frequency_penalty": (float, 0.0),
    "repetition_penalty": (float, 1.0), "stream_options": (dict, {}), "min_tokens": (int, 0),
    "ignore_eos": (bool, False), "prompt_logprobs": (int, None),
}
TEXT = COMMON | {
    "prompt": ((str, list), None), "logprobs": (int, None), "echo": (bool, False),
    "best_of": (int, None), "suffix": (str, None),
}
CHAT = COMMON | {
    "messages": (list, None), "logprobs": (bool, False), "top_logprobs": (int, 0),
    "max_completion_tokens": (int, None),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
      body_bytes: of a request's body.
      prompt_tokens, max_tokens: of a prompt, and to be sampled for it.
      choices: samples of a prompt.
      logprobs: likeliest tokens that are returned of each draw.
      seconds: time from the arrival of a request to its end; what it has then is returned.
    """

    body_bytes: int
    prompt_tokens: int
    max_tokens: int
    choices: int
    logprobs: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Choice(Request):
    """A request whose noise is that of its seed and its index among the choices, whatever its id:
    the same body gives the same answer again."""

    index: int = 0

    @property
    def hash(self) -> int:
        return self.index


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request as it came in; `logprobs` None asks for none, and `includes_usage` for a last chunk
    that counts the tokens."""

    id: str
    choices: list[Choice]
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    logprobs: int | None

    @property
    def seed(self) -> int:
        return self.choices[0].seed

    @property
    def prompt(self) -> np.ndarray:
        return self.choices[0].prompt

    @property
    def min_tokens(self) -> int:
        return self.choices[0].sampling.min_tokens

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.choices[0].sampling.prompt_logprobs

    @property
    def stops(self) -> tuple[str, ...]:
        return self.choices[0].sampling.stop_strings


class UnknownModel(ValueError):
    """The request names a model that is not served here."""


def parse(
    body: bytes, is_chat: bool, model: str, vocab_size: int, tokenizer: Tokenizer, limits: Limits
) -> Completion:
    """Reads a body; ValueError says what is wrong with it."""
    values = _values(object_of(body), CHAT if is_chat else TEXT)
    if values["model"] not in (None, model):
        raise UnknownModel(f"the model {values['model']!r} is not here; this one is {model!r}")
    _check_unserved(values)
    prompt = _prompt(values, is_chat, tokenizer)
    if not 1 <= len(prompt) <= limits.prompt_tokens:
        raise ValueError(
            f"{len(prompt)} prompt tokens; give 1 to {limits.prompt_tokens} "
            "(config.task.max_prompt_tokens)"
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise ValueError(f"the prompt has tokens outside the vocabulary, 0 to {vocab_size - 1}")
    for name, low, high in (
        ("n", 1, limits.choices), ("seed", 0, MAX_SEED),
        *[(name, 1, limits.max_tokens) for name in MAX_TOKENS],
        ("top_k", 0, vocab_size), ("temperature", 0, MAX_NUMBER),
        *[(name, -MAX_NUMBER, MAX_NUMBER) for name in PENALTIES],
    ):
        value = values.get(name)
        if value is not None and not low <= value <= high:
            where = " (config.rollout.max_new_tokens)" if name in MAX_TOKENS else ""
            raise ValueError(f"{name} is {value!r}; give {low} to {high}{where}")
    sampling = _sampling(values, tokenizer, limits)
    seed = secrets.randbelow(MAX_SEED + 1) if values["seed"] is None else values["seed"]
    id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    prompt = np.array(prompt, np.int32)
    return Completion(
        id, [Choice(f"{id}/{i}", prompt, seed, sampling, index=i) for i in range(values["n"])],
        is_chat, values["stream"], bool(values["stream_options"].get("include_usage")),
        _logprobs(values, is_chat, limits),
    )


def object_of(body: bytes) -> dict[str, Any]:
    """Returns what the body holds."""

    def refuse(literal: str):
        raise ValueError(f"{literal} is no number of JSON")

    try:
        value = json.loads(body, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON in UTF-8: {error!r}") from error
    if not isinstance(value, dict):
        raise ValueError("the body is not a JSON object")
    return value


def _values(given: dict[str, Any], fields: dict[str, tuple]) -> dict[str, Any]:
    """Returns every field, checked for its type."""
    unknown = [name for name in given if name not in fields]
    if unknown:
        raise ValueError(
            f"unknown field {', '.join(map(repr, unknown))}; known are {', '.join(fields)}"
        )
    return {
        name: default if name not in given or given[name] is None
        else _field(name, given[name], kind)
        for name, (kind, default) in fields.items()
    }


def _field(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds:
        kinds = (int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} is a {type(value).__name__}; it must be {names}")
    return value


def _check_unserved(values: dict[str, Any]) -> None:
    """Raises ValueError for values that the API has, but not this server."""
    if values.get("echo"):
        raise ValueError("echo is True; the prompt is not repeated here")
    if values.get("suffix") is not None:
        raise ValueError(f"suffix is {values['suffix']!r}; nothing is inserted before a text here")
    if values.get("best_of") not in (None, 1, values["n"]):
        raise ValueError(f"best_of is {values['best_of']}; all choices are returned: give 1 or n")
    if values["prompt_logprobs"] not in (None, 0):
        raise ValueError(
            f"prompt_logprobs is {values['prompt_logprobs']}; those of the prompt's own tokens are "
            "returned, and of no likelier ones: give 0"
        )
    options = values["stream_options"]
    is_flag = isinstance(options.get("include_usage"), bool | None)
    if not options.keys() <= {"include_usage"} or not is_flag:
        raise ValueError(f"stream_options is {options}; give {{'include_usage': True or False}}")


def _prompt(values: dict[str, Any], is_chat: bool, tokenizer: Tokenizer) -> list[int]:
    if is_chat:
        messages = values["messages"] or []
        of_text = lambda m: isinstance(m, dict) and m.keys() == {"role", "content"} and all(
            isinstance(text, str) for text in m.values()
        )
        if not messages or not all(map(of_text, messages)):
            raise ValueError("messages must be a list of {'role': text, 'content': text}")
        return tokenizer.encode(tokenizer.chat(messages))
    prompt = values["prompt"]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special=True)
    if prompt is None or not all(type(token) is int for token in prompt):
        raise ValueError("prompt must be a text or a list of token ids")
    return prompt


def _sampling(values: dict[str, Any], tokenizer: Tokenizer, limits: Limits) -> SamplingParams:
    stops = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
    is_stop = lambda stop: isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH
    if len(stops) > MAX_STOPS or not all(map(is_stop, stops)):
        raise ValueError(
            f"stop must be a text or at most {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} "
            "characters"
        )
    asked = {values[name] for name in MAX_TOKENS if values.get(name) is not None}
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(MAX_TOKENS)} are one field by two names: give one")
    names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
    return SamplingParams(
        stop_ids=() if values["ignore_eos"] else tuple(tokenizer.eos_ids),
        stop_strings=tuple(stops), max_tokens=max(asked, default=limits.max_tokens),
        min_tokens=values["min_tokens"], prompt_logprobs=values["prompt_logprobs"] is not None,
        logit_bias=tuple(_bias(*item) for item in values["logit_bias"].items()),
        **{name: values[name] for name in names},
    )


def _bias(token: str, bias: Any) -> tuple[int, float]:
    is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
    if not (token.isascii() and token.isdecimal()) or not is_number or abs(bias) > MAX_NUMBER:
        raise ValueError(
            f"logit_bias has {token!r}: {bias!r}; it must map token ids to numbers between "
            f"{-MAX_NUMBER} and {MAX_NUMBER}"
        )
    return int(token), float(bias)


def _logprobs(values: dict[str, Any], is_chat: bool, limits: Limits) -> int | None:
    count = values["logprobs"]
    if is_chat:
        if values["top_logprobs"] and not values["logprobs"]:
            raise ValueError("top_logprobs needs logprobs = true")
        count = values["top_logprobs"] if values["logprobs"] else None
    if count is not None and not 0 <= count <= limits.logprobs:
        raise ValueError(f"{count} likeliest tokens of each draw; give 0 to {limits.logprobs}")
    return count
