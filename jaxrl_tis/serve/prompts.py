"""Turns the prompts and messages of a request into token ids."""

from typing import Any

from jaxrl_tis.data.tokenizer import Tokenizer

SAME_ROLE = {"developer": "system"}  # the newer name, which chat templates do not know
# Further text fields of a message, for chat templates that use them.
OTHERS = ("name", "reasoning_content", "tool_call_id")
FORM = "messages must be a list of {'role': text, 'content': text}"


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


def of_chat(messages: list | None, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids of a conversation in the chat template."""
    if not messages:
        raise ValueError(FORM)
    read = [message(f"messages[{i}]", each) for i, each in enumerate(messages)]
    return tokenizer.encode(tokenizer.chat(read))


def message(where: str, given: Any) -> dict[str, str]:
    """Returns a checked message for the chat template; `where` names it in errors.

    Null or empty fields count as absent, and a null content as empty. The parts of a content are
    joined by newlines, as in vLLM.
    """
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or "content" not in given:
        raise ValueError(f"{where} is {given!r:.80}; {FORM}")
    content = given["content"] or ""
    if isinstance(content, list):
        content = "\n".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: the content is a {type(content).__name__}; {FORM}")
    others = {
        name: value for name, value in given.items()
        if name not in ("role", "content") and value not in (None, [], {})
    }
    for name, value in others.items():
        if name not in OTHERS or not isinstance(value, str):
            raise ValueError(f"{where} has {name}: {value!r:.80}; only text messages are served")
    role = SAME_ROLE[given["role"]] if given["role"] in SAME_ROLE else given["role"]
    return {"role": role, "content": content} | others


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(
        f"{where} has a part of type {kind!r:.80}; give {{'type': 'text', 'text': text}}"
    )
