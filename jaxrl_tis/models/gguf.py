"""Reads GGUF checkpoints (llama.cpp): the ModelConfig from metadata, dequantized parameters."""

import os
import pathlib
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig, SlidingConfig
from jaxrl_tis.models.hf_config import COMPUTES, SLIDING_PATTERN
from jaxrl_tis.models.hf_rope import GEMMA_THETA
from jaxrl_tis.models.stacking import Tensor, assemble, check_names, experts_of, slots
from jaxrl_tis.runtime import hub

# general.architecture -> family
FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}

NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{layer}.attn_norm.weight",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "o": "blk.{layer}.attn_output.weight",
    "q_bias": "blk.{layer}.attn_q.bias",
    "k_bias": "blk.{layer}.attn_k.bias",
    "v_bias": "blk.{layer}.attn_v.bias",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "attn_post_norm": "blk.{layer}.post_attention_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "mlp_post_norm": "blk.{layer}.post_ffw_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "router": "blk.{layer}.ffn_gate_inp.weight",
    # A file has one tensor for the experts of a layer; [expert] names its part here.
    "expert_gate": "blk.{layer}.ffn_gate_exps.weight[{expert}]",
    "expert_up": "blk.{layer}.ffn_up_exps.weight[{expert}]",
    "expert_down": "blk.{layer}.ffn_down_exps.weight[{expert}]",
}

# Metadata under "<architecture>." that decides the computation; any other key there is refused.
REQUIRED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.layer_norm_rms_epsilon",
)
OF_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
OPTIONAL = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "vocab_size",
)

FLOATS = (
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor",
)
LAYERS_OF_27B = 62  # by which llama.cpp recognises the model

# Of layers with a window, in files of Gemma 3 alone.
OF_WINDOWS = (
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
)

# Metadata with the only value that is read, as Qwen3-Coder's files have it.
ONLY_VALUE = {"expert_shared_feed_forward_length": 0}

# Architectures whose rows of Q and K are stored in llama.cpp's rotary order.
PERMUTED = ("llama",)


def read_config(path: str | os.PathLike) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file; raises as `load`."""
    return _config(_open(pathlib.Path(path)), str(path))


def load(
    path: str | os.PathLike, sharding: Any = None, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the config and parameters of a GGUF file, dequantized tensor by tensor.

    Args:
      path: the file.
      sharding: see `stacking.assemble`.
      dtype: of the parameters, see `transformer.abstract_params`.

    Returns: (config, parameters as `models.transformer.init` lays them out).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or holds an architecture, setting, tensor or tensor type
        that is not implemented.
    """
    reader = _open(pathlib.Path(path))
    config = _config(reader, str(path))
    tree = slots(config, NAMES)
    tensors = _tensors(reader, config)
    check_names(tree, tensors, str(path))
    return config, assemble(config, tree, tensors, sharding, dtype)


class _BoundedReader(GGUFReader):
    """A GGUFReader that refuses to read past the end of the file. The base class returns short
    slices silently, and would process a forged array length to its end."""

    def _get(self, offset, dtype, count=1, override_order=None):
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"it needs {end} bytes and has {self.data.size}")
        return super()._get(offset, dtype, count, override_order)


def _open(path: pathlib.Path) -> GGUFReader:
    if not path.is_file():
        raise FileNotFoundError(
            f"No GGUF file {path}: put the model there or correct the path "
            "(launch/smollm2.sh fetches SmolLM2).")
    hub.check_whole(path)
    try:
        return _BoundedReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a GGUF file, or is truncated ({error}); copy it again."
        ) from error


def _config(reader: GGUFReader, source: str) -> ModelConfig:
    fields = {key: field.contents() for key, field in reader.fields.items()
              if not key.startswith("tokenizer.")}
    if "general.architecture" not in fields:
        raise ValueError(f"{source} has no general.architecture.")
    name = fields["general.architecture"]
    if name not in FAMILIES:
        raise ValueError(
            f"general.architecture={name!r} in {source} is not implemented; known: "
            f"{sorted(FAMILIES)}.")
    settings = {key.removeprefix(f"{name}."): value for key, value in fields.items()
                if key.startswith(f"{name}.")}
    has_experts, has_windows = (FAMILIES[name] == x for x in ("qwen3_moe", "gemma3_text"))
    required = REQUIRED + OF_EXPERTS if has_experts else REQUIRED
    for key, value in settings.items():
        is_only = has_experts and key in ONLY_VALUE and value == ONLY_VALUE[key]
        is_window = has_windows and key in OF_WINDOWS
        if key not in required and key not in OPTIONAL and not is_only and not is_window:
            raise ValueError(f"{name}.{key}={value!r} in {source} is not implemented.")
    for key in required:
        if key not in settings:
            raise ValueError(f"{source} has no {name}.{key}.")
    for key in (k for k in (*REQUIRED, *FLOATS) if k in settings):
        kind, words = (float, "a number") if key in FLOATS else (int, "one number for all layers")
        if type(settings[key]) is not kind:
            raise ValueError(f"{name}.{key}={settings[key]!r} must be {words}.")
    shapes = {t.name: _shape(t) for t in reader.tensors}
    return _config_from_settings(FAMILIES[name], settings, shapes)


def _config_from_settings(family: str, settings: dict[str, Any], shapes: dict[str, tuple]):
    """Returns the ModelConfig; a missing head means tied, and the token table gives the
    vocabulary."""
    if NAMES["embed"] not in shapes:
        raise ValueError(f"The file has no tensor {NAMES['embed']}.")
    is_gemma = family == "gemma3_text"
    num_heads = settings["attention.head_count"]
    num_kv_heads = _stated(settings, "attention.head_count_kv", num_heads)
    one_number = lambda x: type(x) is int and x >= 1
    for name, heads in (("head_count", num_heads), ("head_count_kv", num_kv_heads)):
        if not one_number(heads):
            raise ValueError(f"attention.{name}={heads!r} must be one number for all layers.")
    embed_dim = settings["embedding_length"]
    head_dim = _stated(settings, "attention.key_length", embed_dim // num_heads)
    if not one_number(head_dim):
        raise ValueError(f"attention.key_length={head_dim!r} must be one number for all layers.")
    if is_gemma and settings["block_count"] == LAYERS_OF_27B and embed_dim // num_heads != head_dim:
        raise ValueError(
            f"Gemma 3 27B scales its queries by {embed_dim // num_heads}, not by the head size "
            f"{head_dim}, which is not implemented.")
    for key in ("attention.value_length", "rope.dimension_count"):
        if _stated(settings, key, head_dim) != head_dim:
            raise ValueError(f"{key}={settings[key]} must equal the head size {head_dim}.")
    return ModelConfig(
        family=family,
        vocab_size=shapes[NAMES["embed"]][0],
        embed_dim=embed_dim,
        num_layers=settings["block_count"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=settings["feed_forward_length"],
        rope=_rope(settings, GEMMA_THETA if is_gemma else 10000.0),
        max_position=settings["context_length"],
        norm_eps=_decimal(settings["attention.layer_norm_rms_epsilon"]),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        tie_embeddings=NAMES["head"] not in shapes,
        moe=_moe(settings) if family == "qwen3_moe" else None,
        sliding=_sliding(settings) if is_gemma else None,
        **COMPUTES.get(family, {}),
    )


def _sliding(settings: dict[str, Any]) -> SlidingConfig:
    """Returns the layers with a window: all but every sixth, as llama.cpp computes every file of
    the architecture that does not say otherwise."""
    every = SLIDING_PATTERN["gemma3_text"]
    pattern = _stated(settings, "attention.sliding_window_pattern", every)
    window = _stated(settings, "attention.sliding_window", None)
    if not isinstance(window, int) or not isinstance(pattern, int) or pattern < 2:
        raise ValueError(
            f"attention.sliding_window={window!r} and its pattern {pattern!r} must be one number for "
            "all layers, the pattern at least 2.")
    layers = tuple(i for i in range(settings["block_count"]) if (i + 1) % pattern)
    theta = _decimal(_stated(settings, "rope.freq_base_swa", 10000.0))
    return SlidingConfig(window, layers, RopeConfig(kind="default", theta=theta))


def _moe(settings: dict[str, Any]) -> MoeConfig:
    """Returns the experts: in all layers, and with gates that sum to one, as llama.cpp computes
    every file of the architecture."""
    for key in OF_EXPERTS:
        if not isinstance(settings[key], int):
            raise ValueError(f"{key}={settings[key]!r} must be one number for all layers.")
    num_experts, top_k, expert_dim = (settings[key] for key in OF_EXPERTS)
    return MoeConfig(num_experts, top_k, expert_dim)


def _decimal(value: float) -> float:
    """Returns the shortest decimal of a float32, as a config.json has it."""
    return float(str(np.float32(value)))


def _stated(settings: dict[str, Any], key: str, otherwise: Any) -> Any:
    """Returns a setting, or the default of the format."""
    return settings.get(key, otherwise)


def _rope(settings: dict[str, Any], default_theta: float) -> RopeConfig:
    default = "linear" if "rope.scaling.factor" in settings else "none"  # as llama.cpp reads it
    kind = _stated(settings, "rope.scaling.type", default)
    theta = _decimal(_stated(settings, "rope.freq_base", default_theta))
    if kind == "none":
        return RopeConfig(kind="default", theta=theta)
    if kind == "linear" and "rope.scaling.factor" in settings:
        factor = _decimal(settings["rope.scaling.factor"])
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    raise ValueError(f"rope.scaling.type={kind!r} (factor "
                     f"{_stated(settings, 'rope.scaling.factor', None)}) is not implemented for "
                     "GGUF files; use the safetensors checkpoint.")


def _shape(tensor) -> tuple[int, ...]:
    """Returns a tensor's shape in numpy order, [out, in] for a matrix; GGUF has the reverse
    order."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _tensors(reader: GGUFReader, config: ModelConfig) -> dict[str, Tensor]:
    """Returns stored name -> Tensor in the Hugging Face row order."""
    heads = {}
    if config.family in PERMUTED:
        for layer in range(config.num_layers):
            heads[NAMES["q"].format(layer=layer)] = config.num_heads
            heads[NAMES["k"].format(layer=layer)] = config.num_kv_heads

    def reader_of(tensor):
        def read(index):
            if config.zero_centered_norms and tensor.name.endswith("norm.weight"):
                return _dequantize(tensor, index) - 1  # stored as the factor itself
            if tensor.name not in heads:
                return _dequantize(tensor, index)
            everything = (slice(None),) * len(index)
            return unpermute(_dequantize(tensor, everything), heads[tensor.name])[index]

        return read

    tensors = {t.name: Tensor(_shape(t), reader_of(t)) for t in reader.tensors}
    for layer in config.stacks["layers"] if config.moe is not None else ():
        for key in ("expert_gate", "expert_up", "expert_down"):
            name = NAMES[key].removesuffix("[{expert}]").format(layer=layer)
            if name in tensors and len(tensors[name].shape) == 3:
                [of_experts] = experts_of(tensors.pop(name))
                for expert, tensor in enumerate(of_experts):
                    tensors[NAMES[key].format(layer=layer, expert=expert)] = tensor
    return tensors


def _dequantize(tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor. Of all axes but the last, which the types of numbers pack, the
    rest is not read."""
    try:
        return dequantize(tensor.data[index[:-1]], tensor.tensor_type)[..., index[-1]]
    except NotImplementedError as error:
        raise ValueError(
            f"{tensor.name} has type {tensor.tensor_type.name}, which cannot be read; use a file "
            "of another quantization."
        ) from error


def unpermute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns a Q or K matrix [heads * K, in] with its rows in Hugging Face order.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rotates (i, i + K/2). The
    converter therefore stored row i at 2i and row i + K/2 at 2i + 1.
    """
    rows, width = w.shape
    pairs = w.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)
