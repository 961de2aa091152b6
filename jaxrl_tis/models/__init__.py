"""Language models: `load` and `read_config` take a Hugging Face folder or a GGUF file."""

import os
import pathlib
from typing import Any

from jaxrl_tis.models import gguf, safetensors
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.safetensors import save

__all__ = ["load", "read_config", "save"]


def load(
    folder_or_gguf: str | os.PathLike, sharding: Any = None, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a model straight into its sharding.

    Args:
      folder_or_gguf: a folder with config.json and safetensors files, or a .gguf file.
      sharding: a jax Sharding, a tree of them like the parameters' (or a prefix of it), or None
        for the default device.
      dtype: of every parameter.

    Returns: (config, parameters as `models.transformer.init` lays them out).

    Raises:
      FileNotFoundError, ValueError: see `safetensors.load` and `gguf.load`.
    """
    return _format(folder_or_gguf).load(folder_or_gguf, sharding, dtype)


def read_config(folder_or_gguf: str | os.PathLike) -> ModelConfig:
    """The model's config alone, e.g. to lay out the sharding that `load` takes."""
    return _format(folder_or_gguf).read_config(folder_or_gguf)


def _format(path: str | os.PathLike):
    return gguf if pathlib.Path(path).suffix == ".gguf" else safetensors
