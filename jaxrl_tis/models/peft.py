"""Reads and writes LoRA adapters as folders of PEFT: adapter_config.json, adapter_model.safetensors.

Reading is strict. A key that would change the arithmetic and is not implemented is refused by name,
every tensor must bind a module of the model, and every targeted module must have its tensors.
"""

import collections
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_tis.models import lora
from jaxrl_tis.models.config import STACKS, ModelConfig
from jaxrl_tis.models.safetensors import names
from jaxrl_tis.models.stacking import slots
from jaxrl_tis.models.transformer import abstract_params
from jaxrl_tis.runtime import hub

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"
READ = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern",
    "exclude_modules", "layers_to_transform", "layers_pattern", "use_rslora",
    "base_model_name_or_path", "revision",
)
# Keys without an effect on a loaded adapter.
UNREAD = (
    "auto_mapping", "eva_config", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size",
)
# Values of init_lora_weights that leave the base as it is.
PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


def save(
    folder: str | os.PathLike, adapter: lora.Adapter, factors: Mapping[str, Any], base: str = ""
) -> None:
    """Writes the factors of an adapter as a folder that PEFT reads, in float32.

    Args:
      folder: must not exist yet.
      base: path of the base; its name and revision are written.

    Raises:
      FileExistsError: the folder exists.
      ValueError: experts have factors, which PEFT's names do not cover.
    """
    folder, ranks, scales = pathlib.Path(folder), dict(adapter.ranks), dict(adapter.scales)
    if experts := [name for name in ranks if name.startswith("expert_")]:
        raise ValueError(
            f"the adapter has factors of {', '.join(experts)}, and a folder of PEFT has no names for "
            "those of experts; export it with --merged"
        )
    if folder.exists():
        raise FileExistsError(f"{folder} exists; give the adapter a folder of its own.")
    # The most frequent setting stands for all; the others are patterns of single modules.
    settings = {name: (rank, _alpha(scales[name] * rank)) for name, rank in ranks.items()}
    (rank, alpha), _ = collections.Counter(settings.values()).most_common(1)[0]
    tensors, targets, rank_pattern, alpha_pattern = {}, set(), {}, {}
    for module, name, stack, i in _modules(adapter.config):
        if name not in ranks:
            continue
        pair = factors[stack][name] if stack else factors[name]
        a, b = (np.asarray(pair[x][i] if stack else pair[x], np.float32) for x in "ab")
        tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b.T)
        targets.add(module.rpartition(".")[2])
        own_rank, own_alpha = settings[name]
        rank_pattern |= {module: own_rank} if own_rank != rank else {}
        alpha_pattern |= {module: own_alpha} if own_alpha != alpha else {}
    base, revision = hub.name_and_revision(base)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "revision": revision or None, "r": rank, "lora_alpha": alpha, "use_rslora": False,
        "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern,
        "target_modules": sorted(targets), "lora_dropout": 0.0, "bias": "none",
        "init_lora_weights": True, "inference_mode": True,
    }
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _alpha(alpha: float) -> float:
    """Returns alpha without the rounding of a scale times its rank."""
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def load(folder: str | os.PathLike, config: ModelConfig) -> tuple[lora.Adapter, dict[str, Any]]:
    """Returns the adapter in a folder of PEFT and its factors, in float32.

    Layers without factors get factors of zeros. Where the scale differs from layer to layer, B is
    multiplied by it. A copy of the base's head, which PEFT writes beside factors of it, is left out.

    Raises:
      FileNotFoundError: the folder or one of its files does not exist.
      ValueError: a file is damaged, a key is not implemented, or the tensors do not fit the model.
    """
    folder = pathlib.Path(folder)
    fields = _read_fields(folder)
    try:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}); copy it again.") from error
    tensors.pop(HEAD_COPY, None)
    modules = list(_modules(config))
    bound = {m[0] for m in modules if f"{PREFIX}{m[0]}.lora_A.weight" in tensors}
    _check_tensors(folder, fields, tensors, bound, [m[0] for m in modules])
    if config.tie_embeddings and "lm_head" in bound:
        raise ValueError(
            f"{folder} adapts lm_head, and the model's head is its embedding; train the adapter "
            "without it"
        )
    shapes, ranks, scales, factors = abstract_params(config), {}, {}, {}
    for name in sorted({m[1] for m in modules if m[0] in bound}):
        of_name = [m for m in modules if m[1] == name]
        found = [_setting(fields, m[0]) for m in of_name if m[0] in bound]
        ranks[name], alike = max(rank for rank, _ in found), len({scale for _, scale in found}) == 1
        scales[name] = found[0][1] if alike else 1.0
        for stack in {m[2] for m in of_name}:
            leaf = (shapes[stack] if stack else shapes)[name]
            a = np.zeros((*leaf.shape[:-1], ranks[name]), np.float32)
            b = np.zeros((*leaf.shape[:-2], ranks[name], leaf.shape[-1]), np.float32)
            for module, _, _, i in (m for m in of_name if m[2] == stack and m[0] in bound):
                rank, scale = _setting(fields, module)
                place = i if stack else ...
                expected = {"A": (rank, leaf.shape[-2]), "B": (leaf.shape[-1], rank)}
                pair = {x: tensors[f"{PREFIX}{module}.lora_{x}.weight"] for x in "AB"}
                for x, shape in expected.items():
                    if pair[x].shape != shape:
                        raise ValueError(
                            f"{folder} is of another base or rank: lora_{x} of {module} is "
                            f"{list(pair[x].shape)}, and this model needs {list(shape)}"
                        )
                    is_float = jnp.issubdtype(pair[x].dtype, jnp.floating)
                    if not (is_float and np.isfinite(pair[x].astype(np.float32)).all()):
                        raise ValueError(
                            f"{folder}: lora_{x} of {module} must have finite floats, and its dtype is "
                            f"{pair[x].dtype}; copy {WEIGHTS} again, or export the adapter again"
                        )
                a[place][:, :rank] = pair["A"].astype(np.float32).T
                b[place][:rank] = pair["B"].astype(np.float32).T * (1.0 if alike else scale)
            home = factors.setdefault(stack, {}) if stack else factors
            home[name] = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    adapter = lora.Adapter(config, tuple(sorted(ranks.items())), tuple(sorted(scales.items())))
    return adapter, factors


def beside(
    params: dict[str, Any], folder: str | os.PathLike, config: ModelConfig
) -> dict[str, Any]:
    """Returns parameters with the adapter in a folder of PEFT, in place of any that they have. Raises as
    `load` and `join`."""
    return join(params, folder, *load(folder, config))


def join(
    params: dict[str, Any], folder: str | os.PathLike, adapter: lora.Adapter, factors: dict[str, Any]
) -> dict[str, Any]:
    """Returns parameters with the adapter that `load` has read from a folder, in place of any that they
    have. ValueError if the folder has a copy of another head."""
    base = lora.split(params)[1] or params
    with safetensors.safe_open(pathlib.Path(folder) / WEIGHTS, framework="numpy") as file:
        copy = file.get_tensor(HEAD_COPY) if HEAD_COPY in file.keys() else None
    if copy is not None and not _is_rounded(copy.T, np.asarray(base["head"])):
        raise ValueError(f"{folder} is of another base: its {HEAD_COPY} is not this model's head")
    return adapter.join(base, factors)


def _is_rounded(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal in the narrower of their dtypes."""
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return np.array_equal(one.astype(narrow), other.astype(narrow))


def base_of(folder: str | os.PathLike) -> tuple[str, str]:
    """Returns (name, revision) of the base that an adapter was trained on, "" if the folder has none."""
    fields = _read_fields(pathlib.Path(folder))
    return fields.get("base_model_name_or_path") or "", fields.get("revision") or ""


def other_base(folder: str | os.PathLike, path: str | os.PathLike) -> str:
    """Returns a sentence if an adapter names another base than the model at `path`, else "". A name
    or a revision that one side lacks is no difference."""
    (name, revision), path = base_of(folder), os.fspath(path)
    own_name, own_revision = hub.name_and_revision(path)
    is_other_revision = bool(revision and own_revision) and revision != own_revision
    if not (name and path) or name == own_name and not is_other_revision:
        return ""
    at = f" at revision {revision}" if revision else ""
    return f"{folder} was trained on {name}{at}, and the model is {path}"


def _modules(config: ModelConfig) -> Iterator[tuple[str, str, str, int]]:
    """Yields (name of a module in a checkpoint, parameter, its stack or "", its place there) of every
    weight that can have factors, but for experts."""
    tree = slots(config, names(config))
    for stack in STACKS:
        for name, slot in tree.get(stack, {}).items():
            if name in lora.MODULES and slot.names.ndim == 1:
                for i, tensor in enumerate(slot.names):
                    yield tensor.removesuffix(".weight"), name, stack, i
    yield "lm_head", lora.HEAD, "", 0


def _read_fields(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the checked fields of a folder's adapter_config.json. Raises as `load`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: is it the folder of a PEFT adapter?")
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


def _are_modules(value: Any) -> bool:
    return _is_regex(value) or isinstance(value, list) and all(isinstance(x, str) for x in value)


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return all(type(x) is int and x >= 0 for x in layers)


_MODULES = _are_modules, "a list of names or a regular expression"
_TEXT = lambda value: isinstance(value, str), "a text"
# Fields that are read, and what they must be where they are not null.
KINDS = {
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
    "layers_to_transform": (_are_layers, "a layer's number or a list of them"),
    "base_model_name_or_path": _TEXT, "revision": _TEXT,
}


def _setting(fields: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Returns (rank, s) of a module."""

    def of(pattern, default):
        matches = lambda key: re.match(rf"(.*\.)?({key})$", module)
        return next((x for key, x in (fields.get(pattern) or {}).items() if matches(key)), default)

    rank, alpha = of("rank_pattern", fields["r"]), of("alpha_pattern", fields["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _is_target(fields: Mapping[str, Any], module: str) -> bool:
    """Whether adapter_config.json names a module."""

    def is_named(wanted):
        if isinstance(wanted, str):
            return re.fullmatch(wanted, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in wanted)

    wanted, excluded = fields["target_modules"], fields.get("exclude_modules")
    if excluded and is_named(excluded):
        return False
    is_wanted = module != "lm_head" if wanted == "all-linear" else is_named(wanted)
    layers = fields.get("layers_to_transform")
    if layers in (None, []) or not is_wanted:
        return is_wanted
    index = re.search(r"\.layers\.(\d+)\.", f".{module}")
    return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)


def _check_tensors(folder, fields, tensors, bound: set[str], modules: list[str]) -> None:
    """Raises ValueError for tensors that bind no module, and modules without tensors."""
    expected = {f"{PREFIX}{m}.lora_{x}.weight" for m in bound for x in "AB"}
    if strays := sorted(tensors.keys() - expected):
        raise ValueError(
            f"{folder} has {len(strays)} tensors that bind no module of this model, such as "
            f"{strays[0]}; it is an adapter of another base"
        )
    if missing := sorted(expected - tensors.keys()):
        raise ValueError(f"{folder} has no tensor {missing[0]}; copy {WEIGHTS} again")
    wanted = {m for m in modules if _is_target(fields, m)}
    if not bound:
        raise ValueError(f"{folder} binds no module of this model; it is an adapter of another base")
    if wanted != bound:
        raise ValueError(
            f"{folder}: {CONFIG} targets {len(wanted)} modules of this model and {WEIGHTS} has "
            f"{len(bound)}; they differ in {sorted(wanted ^ bound)[0]}"
        )
