"""Turns the prompts, messages and tools of a request into token ids."""

import json
from typing import Any

from jaxrl_tis.data.tokenizer import Tokenizer, escaped

SAME_ROLE = {"developer": "system"}  # the newer name, which chat templates do not know
# Further text fields of a message, for chat templates that use them.
OTHERS = ("name", "reasoning_content", "tool_call_id")
FORM = "messages must be a list of {'role': text, 'content': text}"
TOOL_FORM = "give {'type': 'function', 'function': {'name': text, 'parameters': JSON schema}}"
CALL_FORM = (
    "give {'type': 'function', 'function': {'name': text, 'arguments': a JSON object as text}}"
)


def split(given: Any) -> list[str | list[int]]:
    """Returns the list of prompts in a `prompt` field: a text, a list of ids, or a list of either."""
    is_list = isinstance(given, list) and any(isinstance(each, (str, list)) for each in given)
    prompts = given if is_list else [given]
    is_ids = lambda ids: isinstance(ids, list) and all(type(token) is int for token in ids)
    if not all(isinstance(each, str) or is_ids(each) for each in prompts):
        raise ValueError("prompt must be a text or a list of token ids, or a list of such prompts")
    return prompts


def of_text(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt


def of_chat(
    messages: list | None, tools: list, tokenizer: Tokenizer, add_generation_prompt: bool = True,
    add_special: bool = False,
) -> list[int]:
    """Returns the token ids of a conversation, with its tools, in the chat template."""
    if not messages:
        raise ValueError(FORM)
    read = [message(f"messages[{i}]", each) for i, each in enumerate(messages)]
    for i, tool in enumerate(tools):
        if not _is_function(tool):
            raise ValueError(f"tools[{i}] is {tool!r:.80}; {TOOL_FORM}")
    text = tokenizer.chat(escaped(tokenizer, read), add_generation_prompt, tools or None)
    return tokenizer.encode(text, add_special)


def message(where: str, given: Any) -> dict[str, Any]:
    """Returns a checked message for the chat template; `where` names it in errors.

    Null or empty fields count as absent, and a null content as empty. A message with tool calls needs
    no content. The parts of a content are joined by newlines, as in vLLM.
    """
    is_message = isinstance(given, dict) and isinstance(given.get("role"), str)
    calls = is_message and given["role"] == "assistant" and given.get("tool_calls")
    if not is_message or not calls and "content" not in given:
        raise ValueError(f"{where} is {given!r:.80}; {FORM}")
    content = "" if given.get("content") is None else given["content"]
    if isinstance(content, list):
        content = "\n".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: the content is a {type(content).__name__}; {FORM}")
    others = {
        name: value for name, value in given.items()
        if name not in ("role", "content") and value not in (None, [], {})
    }
    if calls:
        del others["tool_calls"]
    for name, value in others.items():
        if name not in OTHERS or not isinstance(value, str):
            raise ValueError(f"{where} has {name}: {value!r:.80}; only text messages are served")
    if calls:
        others["tool_calls"] = _tool_calls(where, calls)
    role = SAME_ROLE[given["role"]] if given["role"] in SAME_ROLE else given["role"]
    return {"role": role, "content": content} | others


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Returns the tool calls of a message with their arguments as objects, which templates expect."""
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls is a {type(calls).__name__}; it must be a list")
    return [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    if not _is_function(call):
        raise ValueError(f"{where} is {call!r:.80}; {CALL_FORM}")
    given = call["function"].get("arguments") or {}
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} has arguments {given!r:.80}; {CALL_FORM}")
    return call | {"function": call["function"] | {"arguments": arguments}}


def _is_function(given: Any) -> bool:
    """Whether this is a tool or a tool call: a function with a name."""
    function = given.get("function") if isinstance(given, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and given.get("type", "function") == "function"


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(
        f"{where} has a part of type {kind!r:.80}; give {{'type': 'text', 'text': text}}"
    )
