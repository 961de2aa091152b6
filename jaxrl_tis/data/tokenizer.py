"""Converts text to token ids and back, and messages to prompt text.

Masks mark padding, never `pad_id`. `pad_id` fills masked cells, so it may not be an id that ends a
sequence.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxrl_tis.data import confined
from jaxrl_tis.runtime import processes

ARITHMETIC_CHARS = "0123456789+-*/= "
TEMPLATE_SECONDS = 5.0  # for one prompt
TEMPLATE_MEMORY = 512 << 20  # bytes
END = "<|end of the message that is continued|>"
BREAK = "\ufdd0"  # within a special token that is plain text; Unicode reserves it for internal use
OWN_ROLES = ("system", "assistant")  # their messages come from the run and its model
CACHED = 512  # texts whose special tokens are known


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

    @property
    def backend(self) -> tokenizers.Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special(self) -> Mapping[str, str]: ...

    @property
    def template(self) -> str | None: ...

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

    def escaped(self, text: str) -> str: ...

    def digest(self) -> str: ...


def _each(call: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int] | ValueError]:
    results: list[list[int] | ValueError] = []
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
    return message.get("content", "")


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

    def escaped(self, text: str) -> str:
        return text  # no text has special tokens

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
      num_rows: rows of the model's embedding. A text with a token beyond them is refused.
      escapes: whether `escaped` makes special tokens plain text.
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
    num_rows: int | None = None
    escapes: bool = False

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        [ids] = self.encodes([text], add_special)
        if isinstance(ids, ValueError):
            raise ids
        return ids

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
            for text, x, messages in zip(texts, is_open, conversations, strict=True)
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
        if self.escapes and any(BREAK in text for text in texts):
            return [self._of_pieces(text.split(BREAK), add_special) for text in texts]
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special)
            found: list[list[int] | ValueError] = [encoding.ids for encoding in encodings]
        except Exception:  # a refused text raises a bare exception
            encode = functools.partial(self.backend.encode, add_special_tokens=add_special)
            found = _each(lambda text: encode(text).ids, texts)
        return [x if isinstance(x, ValueError) else self._mended(x, add_special) for x in found]

    def escaped(self, text: str) -> str:
        """Returns a text whose special tokens are encoded as plain text, if the tokenizer escapes
        them. Otherwise returns the text unchanged, and says once that its special tokens stay special.

        Raises:
            ValueError: a special token is a single character.
        """
        spans = self._special_spans(text)
        if not spans:
            return text
        (start, end), *_ = spans
        if not self.escapes:
            processes.report_once(
                f"special tokens of {self.source}",
                f"{self.source}: an observation or a request has the text {text[start:end]!r}, which "
                "becomes a control token; --config.task.escape_special_tokens=True encodes such "
                "texts as plain text"
            )
            return text
        if single := [text[a] for a, b in spans if b - a == 1]:
            raise ValueError(f"the special token {single[0]!r} is one character, and cannot be escaped")
        cuts = [start + 1 for start, _ in spans]
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        # The rest of one special token and the next text can be another one.
        return BREAK.join(map(self.escaped, pieces))

    def _of_pieces(self, pieces: Sequence[str], add_special: bool) -> list[int] | ValueError:
        """Returns the ids of pieces that are encoded one by one, so that no token spans two."""
        found = [*self.encodes(pieces[:1], add_special), *self.encodes(pieces[1:])]
        joined = []
        for ids in found:
            if isinstance(ids, ValueError):
                return ids
            joined += ids
        return joined

    def _mended(self, ids: list[int], add_special: bool) -> list[int] | ValueError:
        """Returns the ids of a text with one start token; ValueError for an id that the model lacks."""
        if add_special and self._adds_start and ids[1:2] == [self.bos_id]:
            processes.report_once(
                f"start token of {self.source}",
                f"{self.source}: a text begins with the start token "
                f"{self.backend.id_to_token(ids[1])!r}, which the tokenizer adds; it is written once"
            )
            ids = ids[1:]
        if self.num_rows is not None and max(ids, default=0) >= self.num_rows:
            index = next(index for index in ids if index >= self.num_rows)
            return ValueError(
                f"the text has the token {self.backend.id_to_token(index)!r} of id {index}, and the "
                f"model's vocabulary has {self.num_rows} ids; remove it from the text"
            )
        return ids

    @functools.cached_property
    def _adds_start(self) -> bool:
        return self.bos_id is not None and self.backend.encode("").ids[:1] == [self.bos_id]

    @functools.cached_property
    def _special_spans(self) -> Callable[[str], list[tuple[int, int]]]:
        """Returns a function from a text to the (start, end) of its special tokens."""
        added = self.backend.get_added_tokens_decoder().items()
        special = {index for index, token in added if token.special or index in self.eos_ids}

        @functools.lru_cache(CACHED)
        def spans(text: str) -> list[tuple[int, int]]:
            try:
                found = self.backend.encode(text, add_special_tokens=False)
            except Exception:  # `encodes` says why
                return []
            pairs = zip(found.ids, found.offsets, strict=True)
            return [span for index, span in pairs if index in special]

        return spans

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


def escaped(tokenizer: Tokenizer, given: str | Sequence[dict]) -> Any:
    """Returns a text, or messages of users and tools, as `Tokenizer.escaped` prepares them."""
    if isinstance(given, str):
        return tokenizer.escaped(given)
    is_outside = lambda m: m.get("role") not in OWN_ROLES and isinstance(m.get("content"), str)
    return [
        {**m, "content": tokenizer.escaped(m["content"])} if is_outside(m) else m for m in given
    ]


def fitted(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer for a model whose embedding has `vocab_size` rows.

    Added tokens may have ids beyond the rows, as Gemma 3's token of an image does. The result refuses
    each text with such a token.

    Raises:
        ValueError: an end token, or a token of ordinary text, is beyond the rows.
    """
    if ends := [index for index in tokenizer.eos_ids if index >= vocab_size]:
        raise ValueError(
            f"the end token of id {ends[0]} is beyond the model's vocabulary of {vocab_size} ids, and "
            "no sample could end with it; correct eos_token_id in the model's files, or eos_token in "
            "tokenizer_config.json"
        )
    beyond = set(tokenizer.ids[tokenizer.ids >= vocab_size].tolist())
    if beyond - tokenizer.backend.get_added_tokens_decoder().keys():
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocabulary has "
            f"{vocab_size}; use the tokenizer that was trained with this model"
        )
    if not beyond or not isinstance(tokenizer, HFTokenizer):
        return tokenizer
    pad_id = tokenizer.pad_id if tokenizer.pad_id < vocab_size else 0
    return dataclasses.replace(tokenizer, num_rows=vocab_size, pad_id=pad_id)
