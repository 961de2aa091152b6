"""Assembles stacked, sharded parameters from the tensors of a checkpoint, and checks names.

A checkpoint format is a table {parameter: tensor name} (with "{layer}" for parameters of the
layers, and "{expert}" for those of experts) and a dict of `Tensor`s. All formats store matrices as
[out, in], and the model uses [in, out]. The embedding is [vocab, embed] in both. A format that
stores the experts of a layer in one tensor has a `Tensor` for each of them all the same, see
`experts_of`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.transformer import abstract_params
from jaxrl_tis.sharding import Box, box_of

MAX_LISTED = 8
# Parameters of a layer with experts that a table has under other names: a dense layer has them too.
SHARED = {"gate": "shared_gate", "up": "shared_up", "down": "shared_down"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor on disk: its stored shape, and a function that reads a slice."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The source of a parameter: one stored tensor for each index of its leading axes.

    Attributes:
      names: of the tensors: [layers], [layers, experts], or [] outside the layers.
    """

    names: np.ndarray
    stored_shape: tuple[int, ...]
    is_transposed: bool


def slots(config: ModelConfig, table: Mapping[str, str]) -> dict[str, Any]:
    """Returns a tree like the parameters', with one `Slot` for each parameter."""

    def slot(path, leaf) -> Slot:
        key, stack = path[-1].key, path[0].key
        leading: dict[str, Sequence[int]] = {}
        if stack in config.stacks:
            leading["layer"] = config.stacks[stack]
            if key.startswith("expert_"):
                leading["expert"] = range(config.experts.num_experts)
            elif config.moe is not None and stack == "layers" and key in SHARED:
                key = SHARED[key]
        names = np.empty(tuple(map(len, leading.values())), object)
        for place in np.ndindex(names.shape):
            ids = {axis: leading[axis][i] for axis, i in zip(leading, place, strict=True)}
            names[place] = table[key].format(**ids)
        shape = leaf.shape[names.ndim :]
        is_transposed = len(shape) == 2 and key != "embed"
        return Slot(names, shape[::-1] if is_transposed else shape, is_transposed)

    return jax.tree_util.tree_map_with_path(slot, abstract_params(config))


def experts_of(tensor: Tensor, parts: int = 1) -> list[list[Tensor]]:
    """Returns, for each part of a tensor [E, parts * rows, columns], a `Tensor` [rows, columns] for
    each expert; each reads its own values alone."""
    experts, all_rows, columns = tensor.shape
    rows = all_rows // parts

    def expert(part: int, e: int) -> Tensor:
        def read(index):
            first, stop, _ = index[0].indices(rows)
            of_part = slice(part * rows + first, part * rows + stop)
            return tensor.read((slice(e, e + 1), of_part, index[1]))[0]

        return Tensor((rows, columns), read)

    return [[expert(part, e) for e in range(experts)] for part in range(parts)]


def check_names(tree: dict[str, Any], found: Mapping[str, Tensor], source: str) -> None:
    """Raises ValueError with the list of missing, unknown and wrong-shaped tensors.

    Args:
      tree: `slots(config, table)`.
      found: stored name -> Tensor.
      source: file or folder, for the message.
    """
    expected = {
        name: slot.stored_shape for slot in jax.tree.leaves(tree) for name in slot.names.flat
    }
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

    Only the slices of local devices are read, for one device and one parameter at a time: the host
    never holds the whole model, nor a parameter that is cut over devices.

    Args:
      tree: `slots(config, table)`, already checked.
      sharding: a jax Sharding, a tree of them like the parameters' (or a prefix of it), or None
        for the default device.
      dtype: as of `abstract_params`, e.g. "float32" or "bfloat16".
    """
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_params(config, dtype)
    shardings = jax.tree.broadcast(sharding, abstract)
    return jax.tree.map(
        lambda leaf, slot, to: _parameter(leaf, slot, tensors, to), abstract, tree, shardings
    )


def _parameter(
    leaf: jax.ShapeDtypeStruct, slot: Slot, tensors: Mapping[str, Tensor],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    devices: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        devices.setdefault(box_of(index or (), leaf.shape), []).append(device)
    arrays = []
    for box, with_box in devices.items():
        block = _read_block(slot, tensors, box, leaf.dtype)
        for device in with_box:
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(block, place))
        jax.block_until_ready(arrays)  # or blocks of several devices would wait on the host
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _read_block(
    slot: Slot, tensors: Mapping[str, Tensor], box: Box, dtype: jnp.dtype
) -> np.ndarray:
    """Returns a block of a parameter in the model's layout, read tensor by tensor."""
    leading, inner = box[: slot.names.ndim], box[slot.names.ndim :]
    names = slot.names[tuple(slice(*span) for span in leading)]
    stored = tuple(slice(*span) for span in (inner[::-1] if slot.is_transposed else inner))
    block = np.empty([stop - start for start, stop in box], dtype)
    for place, name in np.ndenumerate(names):
        part = tensors[name].read(stored)
        block[place] = part.T if slot.is_transposed else part
    return block
