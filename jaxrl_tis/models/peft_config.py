"""The file adapter_config.json of a PEFT folder: what it must say, its base, and the modules it names."""

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_tis.runtime import hub

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "use_rslora",
    "base_model_name_or_path", "revision",
)
# Keys without an effect on a loaded adapter.
UNREAD = (
    "auto_mapping", "eva_config", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size",
)
# Values of init_lora_weights that leave the base as it is.
PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


def local(path: str | os.PathLike) -> pathlib.Path:
    """Returns the folder of this machine with an adapter, which is downloaded for a path of the hub."""
    return hub.local_files(path, (CONFIG, WEIGHTS))


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the checked fields of a folder's adapter_config.json. Raises as `peft.load`."""
    folder = local(path)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{path} has no {name}: is it the folder of a PEFT adapter?")
        hub.check_whole(folder / name)
    path = folder / CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again.") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not a LoRA adapter: its peft_type must be 'LORA'")
    init = fields.get("init_lora_weights", True)
    if init not in PLAIN_INIT:
        raise ValueError(f"{path} has init_lora_weights {init!r}, which changes the base")
    unread = {n: x for n, x in fields.items() if n not in (*READ, *UNREAD, "init_lora_weights")}
    for name, value in unread.items():
        if value and not (name == "bias" and value == "none"):
            raise ValueError(f"{path} has {name} = {value!r}, which is not implemented")
    for name in ("r", "lora_alpha", "target_modules"):
        if fields.get(name) is None:
            raise ValueError(f"{path} has no {name}; write it, since its default differs by version")
    for name, (is_one, words) in KINDS.items():
        if (value := fields.get(name)) is not None and not is_one(value):
            raise ValueError(f"{path} has {name} = {value!r}, which must be {words}")
    return fields


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_pattern(of: Callable[[Any], bool], value: Any) -> bool:
    """Whether a value maps regular expressions to values of a kind."""
    return isinstance(value, dict) and all(_is_regex(k) and of(x) for k, x in value.items())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _are_regexes(value: Any) -> bool:
    return all(map(_is_regex, value)) if isinstance(value, list) else _is_regex(value)


def _are_modules(value: Any) -> bool:
    return _is_regex(value) or _are_names(value)


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return all(type(x) is int and x >= 0 for x in layers)


_MODULES = _are_modules, "a list of names or a regular expression"
_TEXT = lambda value: isinstance(value, str), "a text"
# Fields that are read, and what they must be where they are not null.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_count, "a whole number of at least 1"),
    "lora_alpha": (_is_alpha, "a finite number above 0"),
    "rank_pattern": (
        functools.partial(_is_pattern, _is_count),
        "regular expressions with whole numbers of at least 1",
    ),
    "alpha_pattern": (
        functools.partial(_is_pattern, _is_alpha), "regular expressions with finite numbers above 0",
    ),
    "target_modules": _MODULES, "exclude_modules": _MODULES,
    "target_parameters": (_are_names, "a list of names"), "layers_pattern": (_are_regexes, "regular expressions"),
    "layers_to_transform": (_are_layers, "a layer's number or a list of them"),
    "base_model_name_or_path": _TEXT, "revision": _TEXT,
}


def base_of(path: str | os.PathLike) -> tuple[str, str]:
    """Returns (name, revision) of the base that an adapter was trained on, "" if the folder has none."""
    fields = read(path)
    return fields.get("base_model_name_or_path") or "", fields.get("revision") or ""


def other_base(path: str | os.PathLike, model: str | os.PathLike) -> str:
    """Returns a sentence if an adapter names another base than the path of a model, else "". A name
    or a revision that one side lacks is no difference."""
    (name, revision), model = base_of(path), os.fspath(model)
    own_name, own_revision = hub.name_and_revision(model)
    is_other_revision = bool(revision and own_revision) and revision != own_revision
    if not (name and model) or name == own_name and not is_other_revision:
        return ""
    at = f" at revision {revision}" if revision else ""
    return f"{path} was trained on {name}{at}, and the model is {model}"


def setting(fields: Mapping[str, Any], key: str) -> tuple[int, float]:
    """Returns (rank, s) of the module or parameter that is targeted by a name."""

    def of(pattern, default):
        matches = lambda name: re.match(rf"(.*\.)?({name})$", key)
        return next((x for name, x in (fields.get(pattern) or {}).items() if matches(name)), default)

    rank, alpha = of("rank_pattern", fields["r"]), of("alpha_pattern", fields["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def is_target(fields: Mapping[str, Any], module: str) -> bool:
    """Whether `target_modules` of adapter_config.json name a module."""
    wanted, excluded = fields["target_modules"], fields.get("exclude_modules")
    matches = lambda x: re.fullmatch(x, module) if isinstance(x, str) else _is_named(x, module)
    if excluded and matches(excluded):
        return False
    if wanted == "all-linear":
        return module != "lm_head"
    layers = fields.get("layers_to_transform")
    # A module that is targeted by its whole name is adapted in any layer.
    if layers in (None, []) or isinstance(wanted, str) or module in wanted or not matches(wanted):
        return bool(matches(wanted))
    patterns = fields.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = (re.match(rf"(?:^|.*?\.)(?:{x})\.(\d+)\.", module) for x in patterns)
    index = next((int(x[1]) for x in found if x), None)
    return index in ([layers] if isinstance(layers, int) else layers)


def is_target_parameter(fields: Mapping[str, Any], name: str) -> bool:
    """Whether `target_parameters` name a tensor."""
    return _is_named(fields.get("target_parameters") or (), name)


def _is_named(names: Iterable[str], key: str) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names)
