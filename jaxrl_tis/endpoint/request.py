"""Parses the JSON of a completion request into checked requests for the scheduler.

Fields are those of the OpenAI API, and of vLLM's servers: top_k, min_p, repetition_penalty,
min_tokens, ignore_eos, stop_token_ids, prompt_logprobs and return_token_ids. A null field counts as
absent. A field or value that this server does not support is refused, because the answer without it
would differ. Fields without influence on the answer are ignored.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint import prompts
from jaxrl_tis.engine.records import Request, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
MAX_SEED = 2**32 - 1
MAX_NUMBER = 100.0  # of a temperature, penalty or bias
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_TOKENS = ("max_tokens", "max_completion_tokens")  # two names of one field
WITHOUT = -1  # value of a seed or top_k that counts as absent, as in vLLM

# No answer depends on them: labels, billing, storage and scheduling of a request.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "request_id",
    "session_id", "cache_salt", "priority", "spaces_between_special_tokens",
}
# Fields of which only these values are supported.
ONLY = {
    "tool_choice": ["none", "auto"], "functions": [[]], "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}], "modalities": [["text"]], "audio": [], "prediction": [],
    "web_search_options": [], "moderation": [], "reasoning_effort": ["none"],
    "verbosity": ["medium"], "echo": [False], "suffix": [""], "use_beam_search": [False],
    "length_penalty": [1.0, 1], "include_stop_str_in_output": [False], "skip_special_tokens": [True],
    "truncate_prompt_tokens": [], "allowed_token_ids": [], "bad_words": [[]], "structured_outputs": [],
    "logits_processors": [[]], "documents": [[]], "return_tokens_as_token_ids": [False],
    "prompt_logprobs": [0],
}
ONLY_TEXT = ONLY | {"add_special_tokens": [True], "tools": [[]]}
ONLY_CHAT = ONLY | {
    "add_special_tokens": [False], "add_generation_prompt": [True],
    "continue_final_message": [False], "chat_template": [], "chat_template_kwargs": [{}],
}
WHERE = "; give --config.task.template_kwargs at the server's start"

# Type of a field, and its value when it is absent; see `_field`.
SAMPLING = {
    "n": (int, 1), "seed": (int, None), "max_tokens": (int, None), "temperature": (float, 1.0),
    "top_p": (float, 1.0), "top_k": (int, 0), "min_p": (float, 0.0), "stop": ((str, list), []),
    "logit_bias": (dict, {}), "presence_penalty": (float, 0.0), "frequency_penalty": (float, 0.0),
    "repetition_penalty": (float, 1.0), "min_tokens": (int, 0), "ignore_eos": (bool, False),
    "prompt_logprobs": (int, None), "stop_token_ids": (list, []),
}
COMMON = SAMPLING | {
    "model": (str, None), "stream": (bool, False), "stream_options": (dict, {}),
    "return_token_ids": (bool, False),
}
TEXT = COMMON | {
    "prompt": ((str, list), None), "logprobs": (int, None), "best_of": (int, None),
}
CHAT = COMMON | {
    "messages": (list, None), "logprobs": (bool, False), "top_logprobs": (int, 0),
    "max_completion_tokens": (int, None), "tools": (list, []), "tool_choice": (str, "auto"),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Upper limits of a request.

    Attributes:
      body_bytes: size of the body.
      context_tokens: tokens of a sequence, prompt and sampled tokens ("max_model_len").
      max_tokens: sampled tokens of a choice.
      choices: samples of all prompts of a request.
      logprobs: likeliest tokens returned per sampled token.
      seconds: time from arrival to answer; then the tokens so far are returned.
    """

    body_bytes: int
    context_tokens: int
    max_tokens: int
    choices: int
    logprobs: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Choice(Request):
    """A request with random keys from its seed and its index among the choices, not from its id. The
    same body with the same seed gives the same answer."""

    index: int = 0

    @property
    def hash(self) -> int:
        return self.index


@dataclasses.dataclass(frozen=True)
class Completion:
    """A parsed completion request.

    Attributes:
      choices: choices of the first prompt, then of the next.
      includes_usage: the stream ends with a chunk that counts the tokens.
      logprobs: number of likeliest tokens to return per sampled token; None: no log-probs.
      returns_ids: the answer has the token ids of prompts and choices.
      tools: functions whose calls are read from the answer's text.
    """

    id: str
    choices: list[Choice]
    num_prompts: int
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    logprobs: int | None
    returns_ids: bool
    tools: Sequence[dict]

    @property
    def seed(self) -> int:
        return self.choices[0].seed

    @property
    def prompts(self) -> list[np.ndarray]:
        return [choice.prompt for choice in self.choices[:: len(self.choices) // self.num_prompts]]

    @property
    def min_tokens(self) -> int:
        return self.choices[0].sampling.min_tokens

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.choices[0].sampling.prompt_logprobs

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.choices[0].sampling.stop_ids

    @property
    def stops(self) -> tuple[str, ...]:
        return self.choices[0].sampling.stop_strings


class UnknownModel(ValueError):
    """The request names another model than the served one."""


class NoRoom(ValueError):
    """The prompt leaves no room for a token."""


def parse(
    body: bytes, model: str, vocab_size: int, tokenizer: Tokenizer, limits: Limits, *, is_chat: bool
) -> Completion:
    """Parses a body. ValueError with the problem if it is invalid."""
    values = known(object_of(body), *((CHAT, ONLY_CHAT) if is_chat else (TEXT, ONLY_TEXT)))
    check_model(values["model"], model)
    check_values(values, limits)
    includes_usage = _includes_usage(values["stream_options"])
    logprobs = _chat_logprobs(values) if is_chat else values["logprobs"]
    check_logprobs(logprobs, limits)
    ids = _prompts(values, is_chat, tokenizer, limits)
    id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return Completion(
        id, choices(id, ids, values, vocab_size, tokenizer, limits), len(ids), is_chat,
        values["stream"], includes_usage, logprobs, values["return_token_ids"],
        values["tools"] if is_chat and values["tool_choice"] == "auto" else (),
    )


def object_of(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body."""

    def refuse(literal: str):
        raise ValueError(f"{literal} is not a number of JSON")

    try:
        value = json.loads(body, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON in UTF-8: {error!r}") from error
    if not isinstance(value, dict):
        raise ValueError("the body is not a JSON object")
    return value


def known(
    given: dict[str, Any], fields: dict[str, tuple], only: Mapping[str, Any],
    ignores_unknown: bool = False,
) -> dict[str, Any]:
    """Returns the value of every supported field, with its type checked.

    Args:
      fields: {name: (type, value when absent)}.
      only: {name: supported values} of fields that are not supported otherwise.
    """
    given = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in given if name not in {*fields, *only, *IGNORED}]
    if unknown and not ignores_unknown:
        raise ValueError(
            f"unknown field {', '.join(map(repr, unknown))}; known are {', '.join(fields)}"
        )
    for name in given.keys() & only.keys():
        _check_served(name, given[name], only[name])
    return {
        name: _field(name, given[name], kind) if name in given else default
        for name, (kind, default) in fields.items()
    }


def _check_served(name: str, value: Any, served: list) -> None:
    """Raises ValueError for a value that the API has and this server does not support."""
    texts = list(map(json.dumps, served))  # JSON tells 1 and true apart
    if json.dumps(value) not in texts:
        other = f", or give {' or '.join(texts)}" if texts else ""
        where = WHERE if name == "chat_template_kwargs" else ""
        raise ValueError(
            f"{name} is {value!r:.80}, which is not served here: leave it out{other}{where}"
        )


def _field(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in kinds:
        kinds = (int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} is a {type(value).__name__}; it must be {names}")
    return value


def check_model(name: str | None, model: str) -> None:
    """Raises UnknownModel for another name than that of the served model."""
    if name not in (None, model):
        raise UnknownModel(f"the model {name!r} is not served; use {model!r}")


def check_values(values: dict[str, Any], limits: Limits) -> None:
    """Raises ValueError for values out of range and for contradictory values."""
    for name, low, high in (
        ("n", 1, limits.choices), ("seed", -(2**63), 2**63 - 1),
        *[(name, 1, limits.max_tokens) for name in MAX_TOKENS],
        ("top_k", WITHOUT, 2**63 - 1), ("temperature", 0, MAX_NUMBER),
        *[(name, -MAX_NUMBER, MAX_NUMBER) for name in PENALTIES],
    ):
        value = values.get(name)
        if value is not None and not low <= value <= high:
            where = " (config.rollout.max_new_tokens)" if name in MAX_TOKENS else ""
            raise ValueError(f"{name} is {value!r}; give {low} to {high}{where}")
    if values.get("best_of") not in (None, 1, values["n"]):
        raise ValueError(f"best_of is {values['best_of']}; all choices are returned: give 1 or n")


def _includes_usage(given: dict[str, Any]) -> bool:
    """Returns whether these stream_options ask for a last chunk that counts the tokens."""
    options = {name: flag for name, flag in given.items() if flag is not None}
    names = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    is_flags = all(isinstance(flag, bool) for flag in options.values())
    if not options.keys() <= names or not is_flags or options.get("continuous_usage_stats"):
        raise ValueError(f"stream_options is {options}; give {{'include_usage': True or False}}")
    return bool(options.get("include_usage"))


def _prompts(
    values: dict[str, Any], is_chat: bool, tokenizer: Tokenizer, limits: Limits
) -> list[list[int]]:
    """Returns the token ids of each prompt."""
    if is_chat:
        return [prompts.of_chat(values["messages"], values["tools"], tokenizer)]
    prompt_list, n = prompts.split(values["prompt"]), values["n"]
    if len(prompt_list) * n > limits.choices:
        raise ValueError(
            f"{len(prompt_list)} prompts with {n} choices each; give at most {limits.choices} choices in "
            "all (--max_choices, --max_pending)"
        )
    return [prompts.of_text(prompt, tokenizer) for prompt in prompt_list]


def choices(
    id: str, ids: list[list[int]], values: dict[str, Any], vocab_size: int, tokenizer: Tokenizer,
    limits: Limits,
) -> list[Choice]:
    """Returns the checked choices of each prompt. An answer ends where the context does."""
    for place, prompt in enumerate(ids):
        _check_prompt(prompt, f"prompt {place}: " if len(ids) > 1 else "", vocab_size, limits)
    sampling = _sampling(values, vocab_size, tokenizer, limits)
    has_seed = values["seed"] not in (None, WITHOUT)
    seed = values["seed"] % (MAX_SEED + 1) if has_seed else secrets.randbelow(MAX_SEED + 1)
    rows = [np.array(prompt, np.int32) for prompt in ids for _ in range(values["n"])]
    most = [min(sampling.max_tokens, limits.context_tokens - len(row)) for row in rows]
    return [
        Choice(f"{id}/{i}", row, seed, dataclasses.replace(sampling, max_tokens=count), index=i)
        for i, (row, count) in enumerate(zip(rows, most, strict=True))
    ]


def _check_prompt(prompt: list[int], which: str, vocab_size: int, limits: Limits) -> None:
    if not 1 <= len(prompt) < limits.context_tokens:
        kind = NoRoom if prompt else ValueError
        raise kind(
            f"{which}{len(prompt)} prompt tokens; give 1 to {limits.context_tokens - 1}, one less "
            "than max_model_len; docs/server.md names the fields of the config that raise it"
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise ValueError(
            f"{which}the prompt has tokens outside the vocabulary, 0 to {vocab_size - 1}"
        )


def _sampling(
    values: dict[str, Any], vocab_size: int, tokenizer: Tokenizer, limits: Limits
) -> SamplingParams:
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
    if not all(type(token) is int for token in values["stop_token_ids"]):
        raise ValueError(f"stop_token_ids is {values['stop_token_ids']}; give a list of token ids")
    ends = () if values["ignore_eos"] else tokenizer.eos_ids
    names = ("temperature", "top_p", "min_p", *PENALTIES)
    return SamplingParams(
        top_k=0 if values["top_k"] == WITHOUT else min(values["top_k"], vocab_size),
        stop_ids=tuple(dict.fromkeys([*ends, *values["stop_token_ids"]])),
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


def _chat_logprobs(values: dict[str, Any]) -> int | None:
    if values["top_logprobs"] and not values["logprobs"]:
        raise ValueError("top_logprobs needs logprobs = true")
    return values["top_logprobs"] if values["logprobs"] else None


def check_logprobs(count: int | None, limits: Limits) -> None:
    if count is not None and not 0 <= count <= limits.logprobs:
        raise ValueError(f"{count} top log-probs for each token; give 0 to {limits.logprobs}")
