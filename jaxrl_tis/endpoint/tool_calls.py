"""Reads tool calls from the text of an answer.

The form of the calls is that of the chat template: the template renders one call, and a form has
to read this text back. If one call of an answer cannot be read, the answer is text.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint.text import begun

Json = dict[str, Any]
QUESTION = {"role": "user", "content": "question-2c80"}
CONTENT, NAME, ARGUMENTS = "content-9d13", "name-71e4", {"key-f0a2": "value-58cb"}
ID_LENGTH = 9  # templates of Mistral accept no other length
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\s*", re.DOTALL)
# Types of a JSON schema, but for text.
TYPES = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float),
    "array": (list,), "object": (dict,),
}
LITERALS = {"True": True, "False": False, "None": None}  # as some templates write them


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function. `id` is "" if the model wrote none."""

    name: str
    arguments: Json
    id: str = ""


def _object(key: str) -> Callable[[str, Sequence[Json]], list[Call]]:
    """Returns a reader of {"name": text, key: arguments}."""
    return lambda text, tools: [_call(_json(text), key)]


def _list(key: str) -> Callable[[str, Sequence[Json]], list[Call]]:
    """Returns a reader of a list of such objects."""

    def read(text: str, tools: Sequence[Json]) -> list[Call]:
        found = _json(text)
        if not isinstance(found, list) or not found:
            raise ValueError("not a list of calls")
        return [_call(each, key) for each in found]

    return read


def _call(given: Any, key: str) -> Call:
    if not isinstance(given, dict) or not {"name", key} <= given.keys() <= {"name", key, "id"}:
        raise ValueError("not a call")
    call = Call(given["name"], given[key], given.get("id", ""))
    is_text = isinstance(call.name, str) and isinstance(call.id, str)
    if not is_text or not isinstance(call.arguments, dict):
        raise ValueError("not a call")
    return call


def _elements(text: str, tools: Sequence[Json]) -> list[Call]:
    """Reads <function=NAME> with <parameter=NAME> elements. A value is text, unless the schema of
    the tool gives the parameter another type. Where the schema allows text and others, text is what
    is no value of another type."""
    function = FUNCTION.fullmatch(text)
    if not function:
        raise ValueError("not a call")
    name, body = function.groups()
    arguments, start = {}, 0
    while start < len(body):
        parameter = PARAMETER.match(body, start)
        if not parameter:
            raise ValueError("not a parameter")
        key, value = parameter.groups()
        arguments[key] = _argument(value, _type(tools, name, key))
        start = parameter.end()
    return [Call(name, arguments)]


def _argument(text: str, kind: Any) -> Any:
    if kind in ("string", None):
        return text
    if not (isinstance(kind, list) and "string" in kind):
        return _value(text)
    try:
        value = _value(text)
    except ValueError:
        return text
    return value if any(type(value) in TYPES.get(name, ()) for name in kind) else text


def _value(text: str) -> Any:
    return LITERALS[text] if text in LITERALS else _json(text)


def _type(tools: Sequence[Json], name: str, parameter: str) -> Any:
    """Returns the type of a parameter in the schema of its tool, or None."""
    found = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    for key in ("parameters", "properties", parameter, "type"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _json(text: str) -> Any:
    """Returns the value of a JSON text. ValueError for a text that is none."""

    def refuse(literal: str):
        raise ValueError(f"{literal} is not a number of JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


@dataclasses.dataclass(frozen=True)
class Form:
    """How a family of models writes calls.

    Attributes:
      read: the text of a call and the tools of the request -> its calls. ValueError for another text.
      opening, closing: texts around a call. Without `closing` the whole answer is a call, and
        `opening` can be missing: it is a special token, which decoded text omits.
      begin: the first character of a call without `closing`.
      separator: text between the content of a message and its first call.
    """

    read: Callable[[str, Sequence[Json]], list[Call]]
    opening: str
    closing: str = ""
    begin: str = ""
    separator: str = ""

    def parse(self, text: str, tools: Sequence[Json] = ()) -> tuple[str, list[Call]]:
        """Returns the content of an answer and its calls; (text, []) if one cannot be read."""
        try:
            if self.closing:
                return self._marked(text, tools)
            return "", self.read(text.strip().removeprefix(self.opening), tools)
        except ValueError:
            return text, []

    def settled(self, text: str) -> str:
        """Returns the part of an unfinished text that is content for certain."""
        if not self.closing:
            start, marks = text.lstrip(), (self.opening, self.begin)
            is_call = any(start.startswith(m) or m.startswith(start) for m in marks)
            return "" if is_call else text
        before, mark, _ = text.partition(self.opening)
        if mark:
            return before.removesuffix(self.separator)
        return text[: len(text) - begun(text, (self.opening, self.separator + self.opening))]

    def _marked(self, text: str, tools: Sequence[Json]) -> tuple[str, list[Call]]:
        before, mark, rest = text.partition(self.opening)
        if not mark:
            return text, []
        content, calls = before.removesuffix(self.separator), []
        while mark:
            found, rest = self._first(rest, tools)
            calls += found
            between, mark, rest = rest.partition(self.opening)
            content += between if between.strip() else ""
        return content, calls

    def _first(self, text: str, tools: Sequence[Json]) -> tuple[list[Call], str]:
        """Returns the call at the start and the text after it. A value can contain `closing`."""
        end = text.find(self.closing)
        while end >= 0:
            try:
                return self.read(text[:end], tools), text[end + len(self.closing) :]
            except ValueError:
                end = text.find(self.closing, end + 1)
        raise ValueError("no call")


FORMS = {
    "hermes": Form(_object("arguments"), "<tool_call>", "</tool_call>"),
    "qwen3_coder": Form(_elements, "<tool_call>", "</tool_call>"),
    "llama3": Form(_object("parameters"), "<|python_tag|>", begin="{"),
    "mistral": Form(_list("arguments"), "[TOOL_CALLS]", begin="["),
}


def form_of(tokenizer: Tokenizer) -> Form | None:
    """Returns the form in which the chat template writes calls; None if it is in none of FORMS."""
    function = {"name": NAME, "arguments": ARGUMENTS}
    call = {"id": "0" * ID_LENGTH, "type": "function", "function": function}
    answer = {"role": "assistant", "content": CONTENT, "tool_calls": [call]}
    if tokenizer.template is None:
        return None
    try:
        prompt = tokenizer.chat([QUESTION])
        talk = tokenizer.chat([QUESTION, answer], add_generation_prompt=False)
    except ValueError:
        return None
    begin = len(os.path.commonprefix([prompt, talk]))
    text = tokenizer.decode(tokenizer.encode(talk[begin:]))  # without special tokens, as answers are
    for form in FORMS.values():
        content, calls = form.parse(text)
        if [(call.name, call.arguments) for call in calls] == [(NAME, ARGUMENTS)]:
            return dataclasses.replace(form, separator=content.partition(CONTENT)[2])
    return None


def described(calls: Sequence[Call], prompt: np.ndarray, tokens: np.ndarray) -> list[Json]:
    """Returns calls as in the API. Equal answers to equal prompts have calls with equal ids."""
    start = hashlib.blake2b(np.concatenate([prompt, tokens]).astype(np.int64).tobytes())

    def id(place: int) -> str:
        digest = start.copy()
        digest.update(bytes([place % 256]))
        return digest.hexdigest()[:ID_LENGTH]

    return [
        {"id": call.id or id(place), "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
        for place, call in enumerate(calls)
    ]
