"""Text to token ids and back, without sampling: POST /tokenize and /detokenize. The form is vLLM's."""

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint import prompts
from jaxrl_tis.endpoint.answer import Json
from jaxrl_tis.endpoint.request import Limits, check_model, known, object_of

TEXT = {"model": (str, None), "prompt": (str, None), "add_special_tokens": (bool, True)}
CHAT = {
    "model": (str, None), "messages": (list, None), "tools": (list, []),
    "add_generation_prompt": (bool, True), "add_special_tokens": (bool, False),
}
ONLY_TEXT = {"return_token_strs": [False]}
ONLY_CHAT = ONLY_TEXT | {
    "continue_final_message": [False], "chat_template": [], "chat_template_kwargs": [{}],
    "media_io_kwargs": [{}], "mm_processor_kwargs": [{}],
}
IDS = {"model": (str, None), "tokens": (list, None)}


def tokenize(body: bytes, model: str, tokenizer: Tokenizer, limits: Limits) -> Json:
    """Returns the token ids of a text, or of a conversation in the chat template. ValueError with the
    problem if the body is invalid."""
    given = object_of(body)
    is_chat = given.get("messages") is not None
    values = known(given, *((CHAT, ONLY_CHAT) if is_chat else (TEXT, ONLY_TEXT)))
    check_model(values["model"], model)
    if is_chat:
        tokens = prompts.of_chat(
            values["messages"], values["tools"], tokenizer, values["add_generation_prompt"],
            values["add_special_tokens"],
        )
    elif values["prompt"] is None:
        raise ValueError("give a prompt, a text, or messages")
    else:
        tokens = tokenizer.encode(values["prompt"], values["add_special_tokens"])
    return {"tokens": tokens, "count": len(tokens), "max_model_len": limits.context_tokens}


def detokenize(body: bytes, model: str, vocab_size: int, tokenizer: Tokenizer) -> Json:
    """Returns the text of token ids, special tokens included. ValueError with the problem if the body
    is invalid."""
    values = known(object_of(body), IDS, {})
    check_model(values["model"], model)
    tokens = values["tokens"]
    is_id = lambda token: type(token) is int and 0 <= token < vocab_size
    if tokens is None or not all(map(is_id, tokens)):
        raise ValueError(f"tokens must be a list of token ids, 0 to {vocab_size - 1}")
    return {"prompt": tokenizer.backend.decode(tokens, skip_special_tokens=False)}
