"""Choices as a config spells them: "token_tis(cap=2.0)", "seq_mean_k1(upper=1.001) & veto".

A choice is the name of a function in a table, and its parameters: those that it takes by keyword
alone.
"""

import ast
import difflib
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

Choice = tuple[str, dict[str, Any]]
Table = Mapping[str, Callable]
Inputs = Mapping[str, tuple[str, ...]]  # name -> keywords of its function that are no parameters
Options = Mapping[str, tuple[str, ...]]
NO_INPUTS: Inputs = types.MappingProxyType({})
NO_OPTIONS: Options = types.MappingProxyType({})


def function(kind: str, name: str, table: Table) -> Callable:
    """The entry of a table; ValueError names the nearest where there is none."""
    if name not in table:
        raise ValueError(f"{kind} {name!r} is unknown; {_nearest(name, table)}")
    return table[name]


def parameters(kind: str, name: str, table: Table, inputs: Inputs = NO_INPUTS) -> dict[str, Any]:
    """Parameters of an entry with their defaults, `inspect.Parameter.empty` if required."""
    return {
        p.name: p.default
        for p in inspect.signature(function(kind, name, table)).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in inputs.get(name, ())
    }


def parse(
    kind: str, text: str, table: Table, inputs: Inputs = NO_INPUTS, of_all: Options = NO_OPTIONS
) -> Choice:
    """"name" or "name(key=value, ...)" -> (name, every parameter with its value).

    A value is a Python literal or inf; a text needs no quotes, as in "r2vpo(form=survey, ...)".
    `of_all` are texts that every entry may be given beside its own parameters, with their choices.

    Raises ValueError for an unknown name or parameter, a missing one, or text that is no such call.
    """
    return _choice(kind, text, _expression(kind, text, table), table, inputs, of_all)


def parse_all(
    kind: str, text: str, table: Table, inputs: Inputs = NO_INPUTS, of_all: Options = NO_OPTIONS
) -> tuple[Choice, ...]:
    """The choices of "a & b(key=value)", in order; none for an empty text."""
    if not text.strip():
        return ()
    node, reversed_choices = _expression(kind, text, table), []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        reversed_choices.append(_choice(kind, text, node.right, table, inputs, of_all))
        node = node.left
    return (_choice(kind, text, node, table, inputs, of_all), *reversed(reversed_choices))


def _expression(kind, text, table):
    if text in table:  # "k1+" is a name, though no Python name
        return ast.Name(text)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _malformed(kind, text) from None


def _malformed(kind, text):
    return ValueError(f"{kind} {text!r} is neither a name nor name(key=value, ...)")


def _choice(kind, text, node, table, inputs, of_all) -> Choice:
    keywords, call = [], node
    if isinstance(node, ast.Call) and not node.args:
        keywords, call = node.keywords, node.func
    if not isinstance(call, ast.Name):
        raise _malformed(kind, text)
    own = parameters(kind, call.id, table, inputs)
    known, written = own | dict.fromkeys(of_all, ""), {}
    for keyword in keywords:
        key = str(keyword.arg)
        if key not in known:
            raise ValueError(
                f"{kind} {call.id!r} has no parameter {keyword.arg!r}; {_nearest(key, known)}"
            )
        is_text = isinstance(known[key], str)
        try:
            value = _value(keyword.value, is_text)
        except ValueError:
            raise _malformed(kind, text) from None
        if isinstance(value, str) != is_text:
            kinds = "a text" if is_text else "a number"
            raise ValueError(f"{kind} {call.id!r} takes {kinds} as {key}, not {value!r}")
        if key in of_all and value not in of_all[key]:
            chosen = ", ".join(of_all[key])
            raise ValueError(f"{kind} {call.id!r} has {key}={value}; choose one of {chosen}")
        written[key] = value
    values = own | written
    missing = [name for name, value in values.items() if value is inspect.Parameter.empty]
    if missing:
        raise ValueError(
            f"{kind} {call.id!r} has no published value for {', '.join(missing)}; "
            f"write {call.id}({', '.join(f'{name}=...' for name in missing)})"
        )
    return call.id, values


def _value(node, is_text):
    if isinstance(node, ast.Name) and is_text:
        return node.id
    is_inf = isinstance(node, ast.Name) and node.id == "inf"
    return math.inf if is_inf else ast.literal_eval(node)


def _nearest(name, known):
    if not known:
        return "it has none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
