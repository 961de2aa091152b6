"""Assembles stacked, sharded parameters from one checkpoint tensor per layer, and checks names.

A checkpoint format is a table {parameter: tensor name} (with "{layer}" for parameters of the
layers) and a dict of `Tensor`s. All formats store matrices as [out, in], and the model uses [in,
out]. The embedding is [vocab, embed] in both.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.transformer import abstract_params
from jaxrl_tis.sharding import box_of

MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor on disk: its stored shape, and a function that reads a slice."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The source of a parameter: one stored tensor per layer, or one tensor outside the layers."""

    names: tuple[str, ...]
    stored_shape: tuple[int, ...]
    is_stacked: bool
    is_transposed: bool


def slots(config: ModelConfig, table: Mapping[str, str]) -> dict[str, Any]:
    """Returns a tree like the parameters', with one `Slot` for each parameter."""

    def slot(path, leaf) -> Slot:
        key, is_stacked = path[-1].key, path[0].key == "layers"
        shape = leaf.shape[1:] if is_stacked else leaf.shape
        is_transposed = len(shape) == 2 and key != "embed"
        names = (table[key],)
        if is_stacked:
            names = tuple(table[key].format(layer=i) for i in range(config.num_layers))
        return Slot(names, shape[::-1] if is_transposed else shape, is_stacked, is_transposed)

    return jax.tree_util.tree_map_with_path(slot, abstract_params(config))


def check_names(tree: dict[str, Any], found: Mapping[str, Tensor], source: str) -> None:
    """Raises ValueError with the list of missing, unknown and wrong-shaped tensors.

    Args:
      tree: `slots(config, table)`.
      found: stored name -> Tensor.
      source: file or folder, for the message.
    """
    expected = {name: slot.stored_shape for slot in jax.tree.leaves(tree) for name in slot.names}
    problems = [
        *_listed("missing", sorted(expected.keys() - found.keys())),
        *_listed("unknown", sorted(found.keys() - expected.keys())),
        *_listed("wrong shape", [
            f"{name} {list(found[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name].shape) != tuple(shape)
        ]),
    ]
    if problems:
        raise ValueError(f"{source} does not hold the model of its config: " + "; ".join(problems))


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return [f"{what} ({len(items)}): " + ", ".join(items[:MAX_LISTED]) + more]


def assemble(
    config: ModelConfig, tree: dict[str, Any], tensors: Mapping[str, Tensor], sharding: Any,
    dtype: str,
) -> dict[str, Any]:
    """Returns the parameters, each read directly into its sharding.

    Only the slices of local devices are read, one parameter at a time: the host never holds the
    whole model.

    Args:
      tree: `slots(config, table)`, already checked.
      sharding: a jax Sharding, a tree of them like the parameters' (or a prefix of it), or None
        for the default device.
      dtype: of every parameter, e.g. "float32" or "bfloat16".
    """
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_params(config, dtype)
    shardings = jax.tree.broadcast(sharding, abstract)

    def parameter(leaf, slot, leaf_sharding):
        reads = {}

        def read(index):
            spans = box_of(index, leaf.shape)
            if spans not in reads:
                reads[spans] = _read_block(slot, tensors, spans, leaf.dtype)
            return reads[spans]

        return jax.make_array_from_callback(leaf.shape, leaf_sharding, read, dtype=leaf.dtype)

    return jax.tree.map(parameter, abstract, tree, shardings)


def _read_block(slot: Slot, tensors: Mapping[str, Tensor], spans, dtype: jnp.dtype) -> np.ndarray:
    """Returns a block of a (stacked) parameter by (start, stop) per axis, in the model's layout."""
    names, inner = slot.names, spans
    if slot.is_stacked:
        names, inner = slot.names[slice(*spans[0])], spans[1:]
    stored = tuple(slice(*span) for span in (inner[::-1] if slot.is_transposed else inner))
    block = np.empty((len(names), *(stop - start for start, stop in inner)), dtype)
    for i, name in enumerate(names):
        part = tensors[name].read(stored)
        block[i] = part.T if slot.is_transposed else part
    return block if slot.is_stacked else block[0]
