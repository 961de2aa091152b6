"""Versions of the policy as folders that engines read: at most two at a time."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np

from jaxrl_tis import models
from jaxrl_tis.external.canary import Expected
from jaxrl_tis.models import lora, peft, transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.runtime import lock

KEPT = 2  # versions on disk: the newest, and the one before, which an engine may be reading
NAME = re.compile(r"(version|adapter)-(\d+)")


@dataclasses.dataclass(frozen=True)
class Version:
    """Weights that engines can be given.

    Attributes:
      path: the folder, as engines see it.
      version: of the policy.
      adapter: the name of the PEFT adapter that the folder holds; None for whole weights.
      expected: what the canary shall find.
    """

    path: str
    version: int
    adapter: str | None
    expected: Expected

    @property
    def nbytes(self) -> int:
        """The size of the files."""
        return sum(path.stat().st_size for path in pathlib.Path(self.path).iterdir())


class Folder:
    """Writes versions below a root.

    Args:
      dtype: of whole weights; adapters are float32.
    """

    def __init__(self, root: str, config: ModelConfig, dtype: str):
        self._root, self._config, self._dtype = pathlib.Path(root), config, dtype
        self._lock = contextlib.ExitStack()

    def open(self) -> None:
        """Locks the folder until `close`, and removes the versions of a run that ended. ValueError where
        another run uses it."""
        self.close()
        self._lock.enter_context(lock.locked(self._root, "rollout.weights_folder"))
        for path in self._root.iterdir():
            if NAME.fullmatch(path.name) or path.name.startswith(".") and ".partial-" in path.name:
                shutil.rmtree(path)

    def close(self) -> None:
        self._lock.close()

    def check_room(self, shapes: Any) -> None:
        """Raises ValueError where the disk has no room for `KEPT` versions of these parameters and the
        one that is written."""
        factors, base = lora.split(shapes)
        size = 4 * sum(x.size for x in jax.tree.leaves(factors))
        if base is None:
            head = self._config.tie_embeddings * shapes["embed"].size
            size = (head + sum(x.size for x in jax.tree.leaves(shapes))) * np.dtype(self._dtype).itemsize
        free = shutil.disk_usage(self._root).free
        if free < (KEPT + 1) * size:
            raise ValueError(
                f"rollout.weights_folder = {self._root} has {free / 1e9:.3g} GB free, and {KEPT + 1} "
                f"versions of the weights take {(KEPT + 1) * size / 1e9:.3g} GB; make room, or name "
                "another folder"
            )

    def write(self, params: Any, version: int) -> tuple[str, str | None]:
        """Writes a version and removes those before the last. Returns (its folder, the adapter's name
        or None)."""
        factors, base = lora.split(params)
        if base is None:
            path = self._root / f"version-{version}"
            shutil.rmtree(path, ignore_errors=True)
            # Without the head of tied embeddings vLLM on a CPU keeps its first one.
            weights = transformer.cast(params, self._dtype)
            models.save(path, self._config, weights, with_head=True)
        else:
            path = self._root / f"adapter-{version}"
            shutil.rmtree(path, ignore_errors=True)
            peft.save(path, lora.adapter_of(params, self._config), jax.device_get(factors))
        known = {int(m[2]): p for p in self._root.iterdir() if (m := NAME.fullmatch(p.name))}
        for old in sorted(known)[:-KEPT]:
            shutil.rmtree(known[old])
        return str(path.resolve()), None if base is None else path.name
