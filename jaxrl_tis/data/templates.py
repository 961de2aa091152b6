"""Renders chat templates like transformers (compared with 5.24), in a sandbox.

A template comes with a downloaded checkpoint. It must not reach Python objects. It runs in its own
process (confined.py), because Jinja limits neither time nor memory.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field of a message

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]  # JSON schemas of functions


def renderer(setting: dict[str, Any]) -> Callable[..., str]:
    """Returns f(messages, add_generation_prompt, tools=None) -> text. Without `tools` the template has
    those of "kwargs". f raises ValueError for tools that the template does not read.

    Args:
      setting: {"template": text of the template, "tokens": {name of a special token: text}, "kwargs":
        more variables, "date": an ISO date for strftime_now, "" for the clock}.

    Raises:
      ValueError: "kwargs" names a variable that the template does not read.
    """
    environment = _environment(setting["date"])
    read = meta.find_undeclared_variables(environment.parse(setting["template"]))
    read -= environment.globals.keys()
    if unread := sorted(setting["kwargs"].keys() - read):
        raise ValueError(
            f"it does not read {', '.join(unread)}; set only variables that it reads: "
            f"{', '.join(sorted(read))}"
        )
    template = environment.from_string(setting["template"])
    variables = {"tools": None, "documents": None} | setting["tokens"] | setting["kwargs"]

    def render(
        messages: Messages, add_generation_prompt: bool, tools: Tools | None = None
    ) -> str:
        if not messages:
            raise ValueError("there is no message")
        if tools is not None and "tools" not in read:
            raise ValueError("it does not read tools; describe them in a message")
        given = {} if tools is None else {"tools": tools}
        return template.render(
            variables | given, messages=list(map(_message, messages)),
            add_generation_prompt=add_generation_prompt,
        )

    return render


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Removes fields that are None, and gives reasoning both names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = [message[name] for name in REASONING if name in message]
    if not reasoning:
        return message
    return {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}


class _Generation(Extension):
    """Renders the body of {% generation %}, which marks the assistant's text for training masks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _environment(date: str) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        now = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now()
        return now.strftime(form)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )

    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    return environment
