"""Chat templates: Jinja with the settings that they are written for, in a sandbox.

A template comes with a downloaded checkpoint: it must not reach Python objects, and it runs in a
process of its own (confined.py), as Jinja bounds neither its time nor its memory.
"""

import datetime
import json
from collections.abc import Callable

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def renderer(template: str) -> Callable[[list[dict], bool, dict[str, str]], str]:
    """Returns f(messages, add_generation_prompt, {name of a special token: its text}) -> text."""
    compiled = _environment().from_string(template)
    return lambda messages, add_generation_prompt, tokens: compiled.render(
        messages=messages, add_generation_prompt=add_generation_prompt, **tokens
    )


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment
