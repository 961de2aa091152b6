"""The tensors of all experts of a layer in a checkpoint, and one `Tensor` for each expert of them.

transformers 5 holds gate above up, [E, out, in]. GPT-OSS has [E, in, out] in which gate and up
alternate, with biases [E, out], or MXFP4 in place of floats: bytes [E, out, in / 32, 16] in
`..._blocks` and exponents [E, out, in / 32] in `..._scales`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_tis.kernels import mxfp4
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.stacking import Tensor, experts_of

EXPERTS = "model.layers.{layer}.mlp.experts."
# Tensor -> the parameters in it.
FUSED = {
    f"{EXPERTS}gate_up_proj": ("expert_gate", "expert_up"), f"{EXPERTS}down_proj": ("expert_down",),
}
BIASES = {
    f"{EXPERTS}gate_up_proj_bias": ("expert_gate_bias", "expert_up_bias"),
    f"{EXPERTS}down_proj_bias": ("expert_down_bias",),
}


def split(config: ModelConfig, table: dict[str, str], tensors: dict[str, Tensor], source: Any) -> None:
    """Replaces tensors of all experts of a layer by one for each expert.

    Args:
      table: {parameter: name of an expert's tensor}.
      source: the folder, for messages.

    Raises:
      ValueError: such a tensor has another shape. The shapes of both tell the layout, as one alone
        may be square.
    """
    of = _of_gpt_oss if config.family == "gpt_oss" else _of_transformers
    templates = FUSED | (BIASES if config.experts.has_biases else {})
    for layer in config.stacks["layers"]:
        for template, parts in templates.items():
            by_part = of(config, tensors, template.format(layer=layer), len(parts), source)
            for part, of_experts in zip(parts, by_part, strict=bool(by_part)):
                for expert, tensor in enumerate(of_experts):
                    tensors[table[part].format(layer=layer, expert=expert)] = tensor


def _of_transformers(config, tensors, name: str, parts: int, source) -> list[list[Tensor]]:
    """Returns the experts' tensors of each part; none where the name is absent."""
    if name not in tensors:
        return []
    e, d, f = config.experts.num_experts, config.embed_dim, config.experts.expert_dim
    fused = tensors.pop(name)
    _check(name, fused, [e, d, f] if parts == 1 else [e, parts * f, d], "transformers 5", source)
    return experts_of(fused, parts)


def _of_gpt_oss(config, tensors, name: str, parts: int, source) -> list[list[Tensor]]:
    e, d, f = config.experts.num_experts, config.embed_dim, config.experts.expert_dim
    out, width = (2 * f, d) if parts == 2 else (d, f)
    shapes: dict[str, list[int]] = {name: [e, out] if name.endswith("_bias") else [e, width, out]}
    read: Callable = _bias if name.endswith("_bias") else _floats
    if name not in tensors:
        blocks = -(-width // mxfp4.BLOCK)
        shapes = {f"{name}_blocks": [e, out, blocks, mxfp4.BLOCK // 2], f"{name}_scales": [e, out, blocks]}
        read = _decoded
    if not shapes.keys() <= tensors.keys():
        return []
    for key, shape in shapes.items():
        _check(key, tensors[key], shape, "GPT-OSS", source)
    stored = [tensors.pop(key).read for key in shapes]
    own_shape = (out // parts, width)[: 1 if read is _bias else 2]

    def tensor(part: int, expert: int) -> Tensor:
        own = slice(expert, expert + 1)

        def of_expert(index):
            first, stop, _ = index[0].indices(own_shape[0])
            rows = slice(first * parts, stop * parts)
            return read(stored, own, rows, slice(part, None, parts), *index[1:])

        return Tensor(own_shape, of_expert)

    return [[tensor(part, expert) for expert in range(e)] for part in range(parts)]


def _bias(stored: list[Callable], own: slice, rows: slice, every: slice) -> np.ndarray:
    return stored[0]((own, rows))[0, every]


def _floats(stored: list[Callable], own: slice, rows: slice, every: slice, columns: slice) -> np.ndarray:
    return stored[0]((own, columns, rows))[0, :, every].T


def _decoded(stored: list[Callable], own: slice, rows: slice, every: slice, columns: slice) -> np.ndarray:
    blocks, scales = stored
    first = (columns.start or 0) // mxfp4.BLOCK
    last = None if columns.stop is None else -(-columns.stop // mxfp4.BLOCK)
    index = own, rows, slice(first, last)
    values = mxfp4.decode(blocks((*index, slice(None)))[0, every], scales(index)[0, every])
    skipped = first * mxfp4.BLOCK
    until = None if columns.stop is None else columns.stop - skipped
    return values[:, (columns.start or 0) - skipped : until]


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor of all experts of a layer of GPT-OSS, to be written.

    Attributes:
      parts: the stacked parameters in it [L,E,...], still on their devices.
      place: of the layer in the stack.
    """

    name: str
    parts: tuple[Any, ...]
    place: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes // len(x) for x in self.parts)

    def to_numpy(self) -> np.ndarray:
        columns = np.stack([np.asarray(x[self.place]) for x in self.parts], axis=-1)
        return columns.reshape(*columns.shape[:-2], -1)


def joined(config: ModelConfig, params: dict[str, Any]) -> list[Joined]:
    """Returns every tensor of experts of GPT-OSS."""
    stack = params["layers"]
    return [
        Joined(template.format(layer=layer), tuple(stack[name] for name in parts), place)
        for place, layer in enumerate(config.stacks["layers"])
        for template, parts in (FUSED | BIASES).items()
    ]


def _check(name: str, tensor: Tensor, shape: list[int], layout: str, source) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(
            f"{name} in {source} has shape {list(tensor.shape)}, an unknown layout of fused experts; "
            f"only {shape} is read, as {layout} has it.")
