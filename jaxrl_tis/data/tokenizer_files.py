"""Loads tokenizers from the files of a checkpoint: a Hugging Face folder or a GGUF file."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxrl_tis.data.tokenizer import (
    ARITHMETIC_CHARS,
    CharTokenizer,
    HFTokenizer,
    Tokenizer,
    start_processor,
)
from jaxrl_tis.runtime import hub

# Token types of the GGUF specification that mark added tokens.
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4
GGUF_EOS_FIELDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Name of a special token in templates -> its field in a GGUF file.
GGUF_SPECIAL = {
    f"{name}_token": f"tokenizer.ggml.{field}_token_id"
    for name, field in {
        "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding",
        "cls": "cls", "mask": "mask",
    }.items()
}


def _make(backend, eos_ids, pad_id, bos_id, special, template, source) -> HFTokenizer:
    eos_ids = tuple(dict.fromkeys(index for index in eos_ids if index is not None))
    if not eos_ids:
        raise ValueError(
            f"{source} has no end-of-sequence token, and no sample could end; add eos_token to its "
            "tokenizer_config.json"
        )
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


def _read_text(path: Path) -> str:
    hub.check_whole(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; copy it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in `path`; {} if the file does not exist."""
    if not path.exists():
        return {}
    text = _read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or is cut: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; copy it again")
    return value


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_read_text(path))
    except Exception as error:  # tokenizers raises bare exceptions
        _read_json(path)  # says where a file that is cut ends
        raise ValueError(
            f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; if a newer "
            "release wrote it: pip install -U tokenizers"
        ) from error


def _token_id(backend: tokenizers.Tokenizer, token: str | dict | None, path: Path) -> int | None:
    """Returns the id of a token of tokenizer_config.json, given as text or {"content": text}."""
    if token is None:
        return None
    text = _text(token)
    index = backend.token_to_id(text)
    if index is None:
        raise ValueError(
            f"{path} names the token {text!r}, which is not in tokenizer.json; use both files of "
            "one checkpoint"
        )
    return index


def _text(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _special(config: dict[str, Any], of_ids: Mapping[str, str | None]) -> dict[str, str]:
    """Returns {name: text} of the special tokens that transformers passes to a template.

    Args:
      config: tokenizer_config.json, which may also name model-specific tokens.
      of_ids: {name: text} of tokens given by id in other files, for names without an entry in
        `config`.
    """
    named = {name: x for name, x in {**of_ids, **config}.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    is_token = lambda x: isinstance(x, str) or isinstance(x, dict) and "content" in x
    return {name: _text(token) for name, token in named.items() if is_token(token)}


def _folder_template(folder: Path, tokenizer_config: dict) -> str | None:
    """Returns chat_template.jinja if it exists, else the (default) template of
    tokenizer_config.json."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return _read_text(separate)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return template.get("default") if isinstance(template, dict) else template


def from_folder(folder: str | os.PathLike) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face checkpoint folder.

    A sequence ends at any end-of-sequence id of tokenizer_config.json, generation_config.json or
    config.json (checkpoints disagree). Templates receive the first of these.

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a file is cut, too new, or a pointer of Git LFS, or names an unknown token; or no
            file names an end token.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; a tokenizer folder holds tokenizer.json and tokenizer_config.json"
        )
    backend = _read_backend(path)
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
    named = _special(config, of_ids)
    backend.add_special_tokens([
        AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(named.values())
        if backend.token_to_id(text) is not None
    ])  # so that they are one token in a text, as in transformers
    return _make(
        backend, eos_ids, pad_id, bos_id, named, _folder_template(folder, config), str(folder)
    )


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])


# tokenizer.ggml.pre -> pattern that splits text before byte-pair merging.
GGUF_PRE_TOKENIZERS = {
    "smollm": _smollm_pre_tokenizer,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


def _gguf_fields(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    hub.check_whole(path)
    try:
        fields = GGUFReader(path).fields
    except Exception as error:  # of any kind, by where the file ends
        raise ValueError(
            f"{path} is not a GGUF file, or is cut ({error}); copy it again"
        ) from error
    return {name: field.contents() for name, field in fields.items() if "tokenizer." in name}


def _byte_pair_backend(fields: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in GGUF_PRE_TOKENIZERS:
        raise ValueError(
            f"{path} has a tokenizer of model {kind!r} with pre-tokenizer {pre!r}; only model "
            f"'gpt2' with {sorted(GGUF_PRE_TOKENIZERS)} can be read: use a folder with "
            "tokenizer.json"
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


def from_gguf(path: str | os.PathLike) -> HFTokenizer:
    """Reads the byte-level BPE tokenizer in a GGUF file's metadata, with the same ids as Hugging
    Face.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unsupported tokenizer model or pre-tokenizer, or a missing field.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; put a tokenizer there, or run launch/smollm2.sh to fetch a small "
            "model"
        )
    fields = _gguf_fields(path)
    names = ("model", "pre", "tokens", "token_type", "merges")
    missing = [f"tokenizer.ggml.{n}" for n in names if f"tokenizer.ggml.{n}" not in fields]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; use a folder with tokenizer.json")
    backend = _byte_pair_backend(fields, path)
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token"):
        bos = backend.id_to_token(bos_id)
        if bos is None:
            raise ValueError(
                f"{path}: tokenizer.ggml.bos_token_id is {bos_id}, which is no token of its "
                f"{len(fields['tokenizer.ggml.tokens'])}; convert the model again"
            )
        backend.post_processor = start_processor(bos, bos_id)
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
    path_or_spec: str | os.PathLike, template_kwargs: Mapping[str, Any] = {}, date: str = "",
    escapes: bool = False,
) -> Tokenizer:
    """Loads the tokenizer of `path_or_spec`: "char", a .gguf file, or a checkpoint folder, local or on
    the hub.

    Args:
      template_kwargs, date, escapes: see HFTokenizer.

    Raises:
      ValueError: variables are set without a template; or see `from_folder`.
    """
    tokenizer = _load(path_or_spec, escapes)
    if isinstance(tokenizer, HFTokenizer) and tokenizer.template is not None:
        # Without the clock, runs of different days have equal tokenizers.
        date = date if "strftime_now" in tokenizer.template else ""
        return dataclasses.replace(tokenizer, template_kwargs=template_kwargs, date=date)
    if template_kwargs:
        raise ValueError(
            f"the tokenizer {path_or_spec} has no chat template, and nothing reads "
            f"{', '.join(template_kwargs)}; leave task.template_kwargs empty"
        )
    return tokenizer


def _load(path_or_spec: str | os.PathLike, escapes: bool) -> Tokenizer:
    if path_or_spec == "char":
        return CharTokenizer(ARITHMETIC_CHARS)
    path = hub.local(path_or_spec, weights=False)
    tokenizer = from_gguf(path) if path.suffix == ".gguf" else from_folder(path)
    return dataclasses.replace(tokenizer, escapes=escapes)
