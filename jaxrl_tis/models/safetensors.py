"""Strict reading and atomic writing of Hugging Face folders (config.json and safetensors)."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_tis.models import fused_experts, hf_config
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.stacking import Slot, Tensor, assemble, check_names, slots
from jaxrl_tis.models.transformer import abstract_params
from jaxrl_tis.runtime import hub

NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "router": "model.layers.{layer}.mlp.gate.weight",
    "router_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "shared_gate": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
}
# Names of one family: it has two more norms, and the others' name for the MLP's is that of attention's.
NAMES_OF = {
    "gemma3_text": {
        "attn_post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        "mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
    },
    "gpt_oss": {
        "o_bias": "model.layers.{layer}.self_attn.o_proj.bias",
        "sinks": "model.layers.{layer}.self_attn.sinks",
        "router": "model.layers.{layer}.mlp.router.weight",
        "router_logits_bias": "model.layers.{layer}.mlp.router.bias",
        "expert_gate_bias": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.bias",
        "expert_up_bias": "model.layers.{layer}.mlp.experts.{expert}.up_proj.bias",
        "expert_down_bias": "model.layers.{layer}.mlp.experts.{expert}.down_proj.bias",
    },
}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS, BYTES = ("F32", "F16", "BF16", "F64"), "U8"
OF_BYTES = ("_blocks", "_scales")  # of MXFP4
# Rotary frequencies that old llama checkpoints store; they follow from config.json.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
SHARD_BYTES = 5 * 10**9


def names(config: ModelConfig) -> dict[str, str]:
    """Returns {parameter: tensor name} of the family."""
    return NAMES | NAMES_OF.get(config.family, {})


def read_config(folder: str | os.PathLike) -> ModelConfig:
    """Returns the ModelConfig of a checkpoint folder.

    Raises:
      FileNotFoundError: the folder or its config.json does not exist.
      ValueError: config.json is not a JSON object or describes a model that is not implemented.
    """
    return ModelConfig.from_hf(_read_hf(_existing(pathlib.Path(folder))))


def load(
    folder: str | os.PathLike, sharding: Any = None, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the config and parameters of a checkpoint folder, read tensor by tensor.

    Args:
      folder: holds config.json and model.safetensors, or an index with its shards.
      sharding: see `stacking.assemble`.
      dtype: of the parameters, see `transformer.abstract_params`, whatever the dtype in the file.

    Returns: (config, parameters as `models.transformer.init` lays them out).

    Raises:
      FileNotFoundError: folder, config.json, weights or a shard are missing.
      ValueError: a file is damaged, or its tensors are not exactly those of the config.
    """
    folder = _existing(pathlib.Path(folder))
    hf = _read_hf(folder)
    config = ModelConfig.from_hf(hf)
    with contextlib.ExitStack() as files:
        tensors = _open_tensors(folder, files)
        for layer in range(hf_config.extra_layers(hf)):
            _drop_layer(tensors, config.num_layers + layer)
        if config.moe is not None:
            fused_experts.split(config, names(config), tensors, folder)
        if config.tie_embeddings and NAMES["head"] in tensors:
            _check_tied(tensors, folder)
        tree = slots(config, names(config))
        check_names(tree, tensors, str(folder))
        return config, assemble(config, tree, tensors, sharding, dtype)


def save(
    folder: str | os.PathLike, config: ModelConfig, params: dict[str, Any],
    tokenizer_files: Iterable[str | os.PathLike] | None = None,
    metadata: Mapping[str, str] | None = None, fields: Mapping[str, Any] | None = None,
    with_head: bool = False,
) -> None:
    """Writes a folder for `load` and transformers, under a temporary name until complete.

    Args:
      folder: must not exist yet.
      params: as `load` returns them, in the dtype to be written.
      tokenizer_files: files to copy beside the weights (tokenizer.json, ...).
      metadata: strings for the header of every weight file, e.g. the training step.
      fields: more entries of config.json, such as the ids of special tokens.
      with_head: write the head of a model with tied embeddings, too, for a reader that holds it
        apart.

    Raises:
      FileExistsError: the folder exists.
      ValueError: the parameters are not those of the config.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; give the export a folder of its own.")
    hf = dict(fields or {}) | config.to_hf() | {"torch_dtype": str(params["embed"].dtype)}
    stored = _stored_tensors(config, params)
    if with_head and config.tie_embeddings:
        [embed] = [tensor for tensor in stored if tensor.name == NAMES["embed"]]
        stored.append(dataclasses.replace(embed, name=NAMES["head"]))
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        _write_json(partial / "config.json", hf)
        _write_shards(partial, stored, {"format": "pt"} | dict(metadata or {}))
        for path in tokenizer_files or ():
            shutil.copy(path, partial)
        for path in [*partial.iterdir(), partial]:
            _fsync(path)
        partial.rename(folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _existing(folder: pathlib.Path) -> pathlib.Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"No model folder {folder}: put config.json, tokenizer.json and {SINGLE} (or {INDEX} with "
            "its shards) there.")
    return folder


def _read_hf(folder: pathlib.Path) -> dict[str, Any]:
    return _read_json(folder / "config.json")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; copy it from the checkpoint.")
    hub.check_whole(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _open_tensors(folder: pathlib.Path, files: contextlib.ExitStack) -> dict[str, Tensor]:
    """Returns stored name -> Tensor for all weight files, which stay open as long as `files`."""
    if (folder / SINGLE).is_file():
        return _open_file(folder / SINGLE, files)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}; put the weights there.")
    weight_map = _weight_map(folder)
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        opened = _open_file(folder / shard, files)
        indexed = {name for name, owner in weight_map.items() if owner == shard}
        if strays := indexed ^ opened.keys():
            raise ValueError(
                f"{folder / shard} and {INDEX} disagree about {', '.join(sorted(strays)[:8])}; "
                "copy both again from one checkpoint."
            )
        tensors |= opened
    return tensors


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Returns the index's {tensor: shard}; shards must be plain file names inside the folder."""
    index = _read_json(folder / INDEX)
    if "weight_map" not in index or not isinstance(index["weight_map"], dict):
        raise ValueError(f"{folder / INDEX} has no weight_map object; copy it again.")
    for name, shard in index["weight_map"].items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
            raise ValueError(
                f"{folder / INDEX} puts {name} into {shard!r}, which is not a plain file name; "
                "copy it again."
            )
    return {n: s for n, s in index["weight_map"].items() if not n.endswith(DERIVED_SUFFIX)}


def _open_file(path: pathlib.Path, files: contextlib.ExitStack) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; copy all shards that {INDEX} names.")
    hub.check_whole(path)
    try:
        handle = files.enter_context(safetensors.safe_open(path, framework="numpy"))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); copy it again.") from error
    tensors = {}
    for name in handle.keys():
        if name.endswith(DERIVED_SUFFIX):
            continue
        stored = handle.get_slice(name)
        of_bytes = stored.get_dtype() == BYTES and name.endswith(OF_BYTES)
        if stored.get_dtype() not in FLOATS and not of_bytes:
            raise ValueError(
                f"{name} in {path} is {stored.get_dtype()}; only {', '.join(FLOATS)} are read.")
        tensors[name] = Tensor(tuple(stored.get_shape()), stored.__getitem__)
    return tensors


def _drop_layer(tensors: dict[str, Tensor], layer: int) -> None:
    prefix = f"model.layers.{layer}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def _check_tied(tensors: dict[str, Tensor], folder: pathlib.Path) -> None:
    """Drops a stored head of a tied model after checking that it is the embedding."""
    head = tensors.pop(NAMES["head"])
    if NAMES["embed"] not in tensors:
        return
    embed = tensors[NAMES["embed"]]
    everything = (slice(None), slice(None))
    if head.shape != embed.shape or not np.array_equal(head.read(everything),
                                                       embed.read(everything)):
        raise ValueError(
            f"{folder} has tie_word_embeddings true, but its {NAMES['head']} {list(head.shape)} "
            f"differs from {NAMES['embed']} {list(embed.shape)}; set it to false in config.json."
        )


def _stored_tensors(config: ModelConfig, params: dict[str, Any]) -> list["_Stored | fused_experts.Joined"]:
    """Yields every tensor to write, in order, still on its device.

    Raises:
      ValueError: a parameter is missing, unknown, quantised or of the wrong shape.
    """
    abstract = abstract_params(config)
    structure, expected = jax.tree.structure(params), jax.tree.structure(abstract)
    if structure != expected:  # type: ignore[operator]
        raise ValueError(f"Parameters {structure} are not those of the config: {expected}.")
    stored: list[_Stored | fused_experts.Joined] = []
    trees = slots(config, names(config)), abstract, params
    for slot, leaf, param in zip(*map(jax.tree.leaves, trees), strict=True):
        if param.shape != leaf.shape:
            raise ValueError(
                f"The parameter of {slot.names.flat[0]} has shape {list(param.shape)}, expected "
                f"{list(leaf.shape)}.")
        nbytes = param.nbytes // slot.names.size
        stored += [
            _Stored(name, slot, param, place, nbytes) for place, name in np.ndenumerate(slot.names)
        ]
    if config.family == "gpt_oss":
        alone = [x for x in stored if isinstance(x, _Stored) and len(x.place) < 2]
        return [*alone, *fused_experts.joined(config, params)]
    return stored


@dataclasses.dataclass(frozen=True)
class _Stored:
    """One tensor of the file: of a layer, or of an expert of it, or outside the layers."""

    name: str
    slot: Slot
    param: Any
    place: tuple[int, ...]
    nbytes: int

    def to_numpy(self) -> np.ndarray:
        value = np.asarray(self.param[self.place])
        return np.ascontiguousarray(value.T if self.slot.is_transposed else value)


def _write_shards(
    folder: pathlib.Path, stored: list["_Stored | fused_experts.Joined"], metadata: dict[str, str]
) -> None:
    """Writes one file up to SHARD_BYTES, else numbered shards and their index."""
    shards, room = [], 0
    for tensor in stored:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        arrays = {tensor.name: tensor.to_numpy() for tensor in shard}
        safetensors.numpy.save_file(arrays, folder / name, metadata=metadata)
        shutil.copymode(folder / "config.json", folder / name)  # the library writes mode 0600
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in stored)}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _fsync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
