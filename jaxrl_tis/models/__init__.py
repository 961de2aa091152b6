"""Loads language models from a Hugging Face folder, a GGUF file or a path of the hub
(jaxrl_tis.runtime.hub)."""

import os
import pathlib
from typing import Any

from jaxrl_tis.models import gguf, safetensors
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.safetensors import save
from jaxrl_tis.runtime import hub

__all__ = ["ModelConfig", "load", "read_config", "save"]


def load(
    folder_or_gguf: str | os.PathLike, sharding: Any = None, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns a model's config and its parameters, read directly into their sharding.

    Args:
      folder_or_gguf: a folder with config.json and safetensors files, a .gguf file, or either of
        the hub.
      sharding: a jax Sharding, a tree of them like the parameters' (or a prefix of it), or None
        for the default device.
      dtype: of every parameter but the router's bias, which is float32.

    Returns: (config, parameters as `models.transformer.init` lays them out).

    Raises:
      FileNotFoundError, ValueError: see `safetensors.load` and `gguf.load`.
    """
    path = hub.local(folder_or_gguf)
    return _format(path).load(path, sharding, dtype)


def read_config(folder_or_gguf: str | os.PathLike) -> ModelConfig:
    """Returns only the model's config, for example to make the sharding that `load` needs."""
    path = hub.local(folder_or_gguf, weights=False)
    return _format(path).read_config(path)


def _format(path: pathlib.Path):
    return gguf if path.suffix == ".gguf" else safetensors
