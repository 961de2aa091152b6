"""Text to token ids and back, and messages to prompt text.

Padding is never found by its id: the rest of the code carries masks. `pad_id` only says what to
write into cells that a mask hides, so it may not be an id that ends a sequence.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxrl_tis.data import confined
from jaxrl_tis.runtime import hub

ARITHMETIC_CHARS = "0123456789+-*/= "
TEMPLATE_SECONDS = 5.0  # for one prompt
TEMPLATE_MEMORY = 512 << 20  # bytes
END = "<|end of the message that is continued|>"

# Token types of the GGUF specification that mark added tokens.
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4
GGUF_EOS_FIELDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# The name that templates know a special token by -> its field in a GGUF file.
GGUF_SPECIAL = {
    f"{name}_token": f"tokenizer.ggml.{field}_token_id"
    for name, field in {
        "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding",
        "cls": "cls", "mask": "mask",
    }.items()
}


class Tokenizer(Protocol):
    """What the code asks of a tokenizer.

    `decode` leaves special tokens (end, start, padding) out of the text, and ids that the tokenizer
    does not have. `chat` renders messages, each {"role", "content"}, to the text of a prompt; encode
    that with add_special=False, since a template writes its own special tokens. `encodes` and `chats`
    do many at once, and return in the place of a text that cannot be used the ValueError that says
    why; of a conversation that ends with an assistant's message, `chats` leaves that message open.
    `digest` tells a tokenizer from others. `vocab_size` is the largest id plus one; `ids` are those
    that it has, which may leave holes. `backend` is what tokenizer.json holds, `special` {name of a
    special token: its text}, `template` that of chats.
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

    def chat(self, messages: Sequence[dict], add_generation_prompt: bool = True) -> str: ...

    def encodes(
        self, texts: Sequence[str], add_special: bool = False
    ) -> list[list[int] | ValueError]: ...

    def chats(self, conversations: Sequence[Sequence[dict]]) -> list[str | ValueError]: ...

    def digest(self) -> str: ...


def _each(call: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int] | ValueError]:
    found = []
    for text in texts:
        try:
            found.append(call(text))
        except Exception as error:  # the tokenizers of a checkpoint raise bare ones
            found.append(ValueError(f"the tokenizer cannot encode it: {error}"))
    return found


def _marked(messages: Sequence[dict]) -> list[dict]:
    """Returns a conversation with END behind its last message."""
    *earlier, last = messages
    said = last["content"] if "content" in last else ""
    return [*earlier, {**last, "content": said + END}]


def _cut(text: str) -> str | ValueError:
    """Cuts a rendered conversation at END: a sample continues the last message."""
    begin, mark, _ = text.rpartition(END)
    refusal = "the chat template does not write the assistant's last message as it is"
    return begin if mark else ValueError(refusal)


class CharTokenizer:
    """One id per character of `alphabet`, after padding 0, start 1 and end 2.

    It has no chat format: `chat` joins the contents of the messages.
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

    def chat(self, messages: Sequence[dict], add_generation_prompt: bool = True) -> str:
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
        """The same ids as a tokenizer that tokenizer.json can hold."""
        names = list(self.special.values())
        vocab = {name: index for index, name in enumerate(names)} | self._ids
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=names[0]))
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = _start(names[self.bos_id], self.bos_id)
        return backend


@dataclass(frozen=True)
class HFTokenizer:
    """A `tokenizers` tokenizer with the facts that its checkpoint keeps in other files.

    Attributes:
      special: {name that templates know a special token by: its text}.
      template_kwargs: more variables of the template.
      date: that its strftime_now gives, in ISO form; "" is the clock.
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
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(index) for index in ids])

    def chat(self, messages: Sequence[dict], add_generation_prompt: bool = True) -> str:
        """Renders messages with the checkpoint's template.

        Raises:
            ValueError: there is no template, or the template refuses these messages.
        """
        [result] = self._rendered([messages], add_generation_prompt)
        if isinstance(result, ValueError):
            raise result
        return result

    def chats(self, conversations: Sequence[Sequence[dict]]) -> list[str | ValueError]:
        is_open = [messages[-1]["role"] == "assistant" for messages in conversations]
        marked = [_marked(c) if x else c for c, x in zip(conversations, is_open, strict=True)]
        texts = self._rendered(marked, add_generation_prompt=True)
        return [
            _cut(text) if x and isinstance(text, str) else text for text, x in zip(texts, is_open)
        ]

    def _rendered(
        self, conversations: Sequence[Sequence[dict]], add_generation_prompt: bool
    ) -> list[str | ValueError]:
        if self.template is None:
            raise ValueError(
                f"{self.source} has no chat template; set task.chat to False, and use prompts that "
                "are text and no messages"
            )
        calls = [[list(messages), add_generation_prompt] for messages in conversations]
        failed = f"the chat template of {self.source} failed"
        return [
            ValueError(f"{failed}: {result['error']}") if result["error"] else result["value"]
            for result in self._template.calls(calls)
        ]

    def encodes(
        self, texts: Sequence[str], add_special: bool = False
    ) -> list[list[int] | ValueError]:
        try:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=add_special)
        except Exception:  # one of them is refused, by a bare exception
            return _each(lambda text: self.encode(text, add_special), texts)
        return [encoding.ids for encoding in found]

    def digest(self) -> str:
        fields = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "backend"]
        return hashlib.blake2b(f"{fields} {self.backend.to_str()}".encode()).hexdigest()

    @functools.cached_property
    def ids(self) -> np.ndarray:
        return np.array(sorted(self.backend.get_vocab(with_added_tokens=True).values()))

    @functools.cached_property
    def _template(self) -> confined.Confined:
        """The template in its process: it came with a downloaded checkpoint."""
        setting = {
            "template": self.template, "tokens": dict(self.special),
            "kwargs": dict(self.template_kwargs), "date": self.date,
        }
        return confined.Confined(
            "jaxrl_tis.data.templates:renderer", setting,
            what=f"the chat template of {self.source}", timeout=TEMPLATE_SECONDS,
            memory=TEMPLATE_MEMORY,
        )


def _make(backend, eos_ids, pad_id, bos_id, special, template, source) -> HFTokenizer:
    eos_ids = tuple(dict.fromkeys(index for index in eos_ids if index is not None))
    if not eos_ids:
        raise ValueError(f"{source} names no end-of-sequence token, so no sample could ever end")
    # A saved file may truncate, pad, or merge at random: no prompt wants any of these.
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None
    return HFTokenizer(
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        pad_id=0 if pad_id is None or pad_id in eos_ids else pad_id,
        bos_id=bos_id,
        eos_ids=eos_ids,
        special=special,
        template=template,
        source=source,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in `path`; {} where the checkpoint has no such file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _token_id(backend: tokenizers.Tokenizer, token: str | dict | None, path: Path) -> int | None:
    """Returns the id of a token that tokenizer_config.json gives as text or as {"content":
    text}."""
    if token is None:
        return None
    text = _text(token)
    index = backend.token_to_id(text)
    if index is None:
        raise ValueError(f"{path} names the token {text!r}, which tokenizer.json does not hold")
    return index


def _text(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _special(config: dict[str, Any], of_ids: Mapping[str, str | None]) -> dict[str, str]:
    """Returns {name: text} of the special tokens that transformers gives to a template.

    Args:
      config: tokenizer_config.json, which may name tokens of the model's own kinds, too.
      of_ids: {name: text} of tokens that other files give by id, where `config` has no entry.
    """
    named = {name: x for name, x in {**of_ids, **config}.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    is_token = lambda x: isinstance(x, str) or isinstance(x, dict) and "content" in x
    return {name: _text(token) for name, token in named.items() if is_token(token)}


def _folder_template(folder: Path, tokenizer_config: dict) -> str | None:
    """Returns chat_template.jinja if it is there, else the (default) one in
    tokenizer_config.json."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return template.get("default") if isinstance(template, dict) else template


def from_folder(folder: str | os.PathLike) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face checkpoint folder.

    A sequence ends at any id that tokenizer_config.json, generation_config.json or config.json
    calls end of sequence (checkpoints disagree); templates see the first of them.

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a file is not JSON, names an unknown token, or no end token is named.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; a tokenizer folder holds tokenizer.json and tokenizer_config.json"
        )
    backend = tokenizers.Tokenizer.from_file(str(path))
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path)
    if "added_tokens_decoder" not in config:  # written before transformers 4.34
        config |= _read_json(folder / "special_tokens_map.json")
    model_configs = [_read_json(folder / f"{n}.json") for n in ("generation_config", "config")]

    eos_ids = [_token_id(backend, config.get("eos_token"), config_path)]
    for model_config in model_configs:
        eos = model_config.get("eos_token_id")
        eos_ids += eos if isinstance(eos, list) else [eos]

    def special(name: str) -> int | None:
        if name in config:
            return _token_id(backend, config[name], config_path)
        ids = [model_config.get(f"{name}_id") for model_config in model_configs]
        return next((index for index in ids if index is not None), None)

    pad_id, bos_id = special("pad_token"), special("bos_token")
    end = next((index for index in eos_ids if index is not None), None)
    of_ids = {
        name: None if index is None else backend.id_to_token(index)
        for name, index in (("bos_token", bos_id), ("eos_token", end))
    }
    return _make(
        backend, eos_ids, pad_id, bos_id, _special(config, of_ids),
        _folder_template(folder, config), str(folder),
    )


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])


# tokenizer.ggml.pre -> how text is cut before byte-pair merging.
GGUF_PRE_TOKENIZERS = {
    "smollm": _smollm_pre_tokenizer,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


def _gguf_fields(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if "tokenizer." in name}


def _byte_pair_backend(fields: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in GGUF_PRE_TOKENIZERS:
        raise ValueError(
            f"{path} has a tokenizer of model {kind!r} with pre-tokenizer {pre!r}; read here are "
            f"model 'gpt2' with {sorted(GGUF_PRE_TOKENIZERS)}; use a folder with tokenizer.json"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = GGUF_PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind == GGUF_CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == GGUF_USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return backend


def _start(bos: str, bos_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


def from_gguf(path: str | os.PathLike) -> HFTokenizer:
    """Reads the byte-level BPE tokenizer in a GGUF file's metadata, id for id as Hugging Face has
    it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another tokenizer model or pre-tokenizer, or a field is missing.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; launch/smollm2.sh fetches a small model")
    fields = _gguf_fields(path)
    names = ("model", "pre", "tokens", "token_type", "merges")
    missing = [f"tokenizer.ggml.{n}" for n in names if f"tokenizer.ggml.{n}" not in fields]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; use a folder with tokenizer.json")
    backend = _byte_pair_backend(fields, path)
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token"):
        backend.post_processor = _start(backend.id_to_token(bos_id), bos_id)
    eos_ids = [fields.get(name) for name in GGUF_EOS_FIELDS]
    pad_id = fields.get("tokenizer.ggml.padding_token_id")
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        name: tokens[fields[field]]
        for name, field in GGUF_SPECIAL.items() if field in fields and fields[field] < len(tokens)
    }
    return _make(
        backend, eos_ids, pad_id, bos_id, special, fields.get("tokenizer.chat_template"), str(path)
    )


def load_tokenizer(
    path_or_spec: str | os.PathLike, template_kwargs: Mapping[str, Any] = {}, date: str = ""
) -> Tokenizer:
    """Loads the tokenizer that `path_or_spec` names: "char", a .gguf file, or a checkpoint
    folder, also of the hub.

    Args:
      template_kwargs, date: see HFTokenizer.

    Raises:
      ValueError: there are variables for a template, and no template; or see `from_folder`.
    """
    found = _load(path_or_spec)
    if found.template is not None:
        # Without the clock, runs of different days have equal tokenizers.
        date = date if "strftime_now" in found.template else ""
        return dataclasses.replace(found, template_kwargs=template_kwargs, date=date)
    if template_kwargs:
        raise ValueError(
            f"the tokenizer {path_or_spec} has no chat template that could read "
            f"{', '.join(template_kwargs)}; leave task.template_kwargs empty"
        )
    return found


def _load(path_or_spec: str | os.PathLike) -> Tokenizer:
    if path_or_spec == "char":
        return CharTokenizer(ARITHMETIC_CHARS)
    path = hub.local(path_or_spec, weights=False)
    return from_gguf(path) if path.suffix == ".gguf" else from_folder(path)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer with ids that the model's embedding of `vocab_size` rows lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocabulary has "
            f"{vocab_size}; use the tokenizer that was trained with this model"
        )
