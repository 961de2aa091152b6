"""Converts text to token ids and back, and messages to prompt text.

Masks mark padding, never `pad_id`. `pad_id` fills masked cells, so it may not be an id that ends a
sequence.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxrl_tis.data import confined

ARITHMETIC_CHARS = "0123456789+-*/= "
TEMPLATE_SECONDS = 5.0  # for one prompt
TEMPLATE_MEMORY = 512 << 20  # bytes
END = "<|end of the message that is continued|>"


class Tokenizer(Protocol):
    """Interface of a tokenizer.

    `decode` omits special tokens (end, start, padding) and unknown ids. `chat` renders messages, each
    {"role", "content"}, to the text of a prompt. `tools` are JSON schemas of functions for the
    template. Encode this text with add_special=False, because a template writes its own special
    tokens. `encodes` and `chats` are the batched forms; an unusable text becomes the ValueError that
    explains it. If a conversation ends with an assistant's message, `chats` leaves the message open.
    `digest` identifies the tokenizer. `vocab_size` is the largest id plus one; `ids` are the existing
    ids, possibly with holes. `backend` is the content of tokenizer.json, `special` {name of a special
    token: text}, `template` the chat template.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    ids: np.ndarray
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special: Mapping[str, str]
    template: str | None

    def encode(self, text: str, add_special: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def chat(
        self, messages: Sequence[dict], add_generation_prompt: bool = True,
        tools: Sequence[dict] | None = None,
    ) -> str: ...

    def encodes(
        self, texts: Sequence[str], add_special: bool = False
    ) -> list[list[int] | ValueError]: ...

    def chats(self, conversations: Sequence[Sequence[dict]]) -> list[str | ValueError]: ...

    def digest(self) -> str: ...


def _each(call: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int] | ValueError]:
    results = []
    for text in texts:
        try:
            results.append(call(text))
        except Exception as error:  # tokenizers of a checkpoint raise bare exceptions
            results.append(ValueError(f"the tokenizer cannot encode it: {error}"))
    return results


def _marked(messages: Sequence[dict]) -> list[dict]:
    """Returns a conversation with END appended to its last message."""
    *earlier, last = messages
    return [*earlier, {**last, "content": _said(last) + END}]


def _said(message: Mapping[str, Any]) -> str:
    return message["content"] if "content" in message else ""


def _cut(text: str, last: Mapping[str, Any]) -> str | ValueError:
    """Cuts a rendered conversation at END, so that a sample continues the last message. A template may
    remove the space before the message, and nothing else."""
    if last.get("tool_calls"):
        return ValueError("the last message has tool calls, and a sample cannot continue it")
    begin, mark, _ = text.rpartition(END)
    refusal = "the chat template changes the assistant's last message, and a sample cannot continue it"
    return begin if mark and begin.endswith(_said(last).lstrip()) else ValueError(refusal)


def start_processor(bos: str, bos_id: int) -> processors.TemplateProcessing:
    """Returns a post-processor that puts a start token before a text."""
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


class CharTokenizer:
    """One id per character of `alphabet`, after padding 0, start 1 and end 2.

    There is no chat format: `chat` joins the contents of the messages.
    """

    pad_id, bos_id, eos_ids = 0, 1, (2,)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    template = None

    def __init__(self, alphabet: str):
        if len(set(alphabet)) != len(alphabet):
            raise ValueError(f"the alphabet {alphabet!r} repeats a character; list each one once")
        self._chars = dict(enumerate(alphabet, start=3))
        self._ids = {char: index for index, char in self._chars.items()}
        self.vocab_size = 3 + len(alphabet)
        self.ids = np.arange(self.vocab_size)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        unknown = next((char for char in text if char not in self._ids), None)
        if unknown is not None:
            raise ValueError(
                f"the character {unknown!r} of {text[:80]!r} is not in the tokenizer's alphabet "
                f"{''.join(self._ids)!r}; add it there or change the task's text"
            )
        return [self.bos_id] * add_special + [self._ids[char] for char in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._chars[index] for index in map(int, ids) if index in self._chars)

    def chat(
        self, messages: Sequence[dict], add_generation_prompt: bool = True,
        tools: Sequence[dict] | None = None,
    ) -> str:
        if tools is not None:
            raise ValueError("this tokenizer has no chat template, and nothing reads tools")
        return "".join(message["content"] for message in messages if "content" in message)

    def encodes(
        self, texts: Sequence[str], add_special: bool = False
    ) -> list[list[int] | ValueError]:
        return _each(lambda text: self.encode(text, add_special), texts)

    def chats(self, conversations: Sequence[Sequence[dict]]) -> list[str | ValueError]:
        return [self.chat(messages) for messages in conversations]

    def digest(self) -> str:
        return "".join(self._ids)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Returns a `tokenizers` tokenizer with the same ids, for tokenizer.json."""
        names = list(self.special.values())
        vocab = {name: index for index, name in enumerate(names)} | self._ids
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=names[0]))
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = start_processor(names[self.bos_id], self.bos_id)
        return backend


@dataclass(frozen=True)
class HFTokenizer:
    """A `tokenizers` tokenizer with the settings from other files of its checkpoint.

    Attributes:
      special: {name of a special token in templates: text}.
      template_kwargs: more variables of the template.
      date: ISO date of the template's strftime_now; "" is the clock.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special: Mapping[str, str]
    template: str | None
    source: str
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    date: str = ""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=add_special).ids
        except Exception as error:  # tokenizers of a checkpoint raise bare exceptions
            raise ValueError(f"the tokenizer cannot encode it: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        # Not every file marks its end tokens as special.
        return self.backend.decode([int(index) for index in ids if index not in self.eos_ids])

    def chat(
        self, messages: Sequence[dict], add_generation_prompt: bool = True,
        tools: Sequence[dict] | None = None,
    ) -> str:
        """Renders messages with the checkpoint's template.

        Raises:
            ValueError: no template, or the template refuses these messages or does not read tools.
        """
        [result] = self._rendered([messages], add_generation_prompt, tools)
        if isinstance(result, ValueError):
            raise result
        return result

    def chats(self, conversations: Sequence[Sequence[dict]]) -> list[str | ValueError]:
        is_open = [messages[-1]["role"] == "assistant" for messages in conversations]
        marked = [_marked(c) if x else c for c, x in zip(conversations, is_open, strict=True)]
        texts = self._rendered(marked, add_generation_prompt=True)
        return [
            _cut(text, messages[-1]) if x and isinstance(text, str) else text
            for text, x, messages in zip(texts, is_open, conversations)
        ]

    def _rendered(
        self, conversations: Sequence[Sequence[dict]], add_generation_prompt: bool,
        tools: Sequence[dict] | None = None,
    ) -> list[str | ValueError]:
        if self.template is None:
            raise ValueError(
                f"{self.source} has no chat template; set task.chat to False, and use text prompts "
                "instead of messages"
            )
        calls = [[list(messages), add_generation_prompt, tools] for messages in conversations]
        failed = f"the chat template of {self.source} failed"
        return [
            ValueError(f"{failed}: {result['error']}") if result["error"] else result["value"]
            for result in self._template.calls(calls)
        ]

    def encodes(
        self, texts: Sequence[str], add_special: bool = False
    ) -> list[list[int] | ValueError]:
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special)
        except Exception:  # a refused text raises a bare exception
            encode = functools.partial(self.backend.encode, add_special_tokens=add_special)
            return _each(lambda text: encode(text).ids, texts)
        return [encoding.ids for encoding in encodings]

    def digest(self) -> str:
        fields = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "backend"]
        return hashlib.blake2b(f"{fields} {self.backend.to_str()}".encode()).hexdigest()

    @functools.cached_property
    def ids(self) -> np.ndarray:
        return np.array(sorted(self.backend.get_vocab(with_added_tokens=True).values()))

    @functools.cached_property
    def _template(self) -> confined.Confined:
        """Returns the template in its own process, because it came with a downloaded checkpoint."""
        setting = {
            "template": self.template, "tokens": dict(self.special),
            "kwargs": dict(self.template_kwargs), "date": self.date,
        }
        return confined.Confined(
            "jaxrl_tis.data.templates:renderer", setting,
            what=f"the chat template of {self.source}", timeout=TEMPLATE_SECONDS,
            memory=TEMPLATE_MEMORY,
        )


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer with ids outside the model's embedding of `vocab_size` rows."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocabulary has "
            f"{vocab_size}; use the tokenizer that was trained with this model"
        )
