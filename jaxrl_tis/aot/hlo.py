"""Reads the operations of a compiled program from its HLO text: `Module(compiled.as_text())`.

A module lists collectives, matrix products, arrays outside fusions, host transfers, custom calls
and aliases with their numbers of runs. Loops multiply by their trip counts, and every branch of a
conditional counts, but not in the number of operations. Bytes are elements times width, without the
padding of tiles.
"""

import dataclasses
import math
import re
from collections import defaultdict

from jaxrl_tis.aot import hlo_groups
from jaxrl_tis.aot.hlo_flops import convolution_size, dot_size
from jaxrl_tis.aot.hlo_text import Instruction, Shape, read, root, trips

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all",
    "collective-permute", "collective-broadcast",
)
HOST_MEMORY = 5  # memory space of TPU layouts
MOSAIC = "tpu_custom_call"
# Results that are other arrays under another name.
_NO_BUFFER = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call",
    "after-all", "opt-barrier", "add-dependency", "partition-id", "replica-id",
}
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_HOST_CALL = re.compile(r"python_\w*callback|MoveTo(Host|Device)$|annotate_device_placement")
# Starts whose result has the operands before the results.
WITH_OPERANDS = ("all-gather-start", "collective-permute-start")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop. The kind of `trips` is "exact", "bound" (an upper bound) or "assumed" (given
    by the caller)."""

    name: str
    computation: str
    trips: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective; an asynchronous pair or chain counts once.

    Attributes:
      shapes: shapes of the result.
      bytes: bytes of the whole array on one device: the result of a gather, the operand of a
        scatter. Of a ragged-all-to-all the smaller of its two buffers: the rows that a device sends
        or receives if the load is even.
      group_size: number of devices (dcn: slices) in a group.
      axes: mesh axes of the groups; () without a mesh or if no axes match.
      network: "ici", or "dcn" between slices.
      runs: number of runs in one run of the program.
      is_conditional: whether it stands in a conditional branch.
    """

    name: str
    kind: str
    shapes: tuple[Shape, ...]
    bytes: int
    group_size: int
    axes: tuple[str, ...]
    network: str
    computation: str
    runs: int
    is_conditional: bool
    op_name: str


@dataclasses.dataclass(frozen=True)
class Dot:
    """A matrix product; on TPU a convolution, mostly inside a fusion.

    Attributes:
      operands: arrays of the product.
      sources: arrays outside the fusion, before casts, slices and layout changes.
      precision: precision of the operands; on TPU "highest" takes several bfloat16 passes.
      flops: FLOPs of one run, 2 for each multiplication and addition.
    """

    name: str
    result: Shape
    operands: tuple[Shape, Shape]
    sources: tuple[Shape, Shape]
    precision: str
    flops: int
    computation: str
    runs: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array written outside fusions; with `in_place` it updates an operand."""

    name: str
    opcode: str
    shape: Shape
    in_place: bool
    computation: str
    runs: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """A custom call, such as a Pallas kernel; `flops` is its own estimate of one run, or None."""

    name: str
    target: str
    shapes: tuple[Shape, ...]
    flops: int | None
    computation: str
    runs: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """A transfer between device and host inside the program."""

    name: str
    kind: str
    shapes: tuple[Shape, ...]
    computation: str
    runs: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class Alias:
    """A donated parameter: output `output` (an index path) overwrites parameter `parameter`."""

    output: tuple[int, ...]
    parameter: int
    shape: Shape


class Module:
    """A compiled program, read from its HLO.

    Args:
      text: `compiled.as_text()`.
      assumed_trips: number of runs for loops without a known count.

    Attributes:
      num_devices: number of devices of the program.
      computations: name -> lines by name; entry: name of the first one.
      runs: computation -> number of runs; loops: every while loop.
    """

    def __init__(self, text: str, assumed_trips: int = 1):
        self.header = text.split("\n", 1)[0]
        self.num_devices = math.prod(
            int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", self.header)
        )
        self.computations, self.entry = read(text)
        self.loops: list[Loop] = []
        self.runs: dict[str, int] = defaultdict(int)
        self._caller: dict[str, Instruction] = {}
        self._fused: set[str] = set()
        self._conditional: set[str] = set()
        self._count(assumed_trips)

    def _count(self, assumed_trips: int) -> None:
        self.runs[self.entry] = 1
        for name in reversed(self.computations):  # callers before what they call
            for line in self.computations[name].values():
                for callee, times in self._calls(line, assumed_trips):
                    self.runs[callee] += self.runs[name] * times
                    self._caller[callee] = line
                    if line.opcode == "fusion" or name in self._fused:
                        self._fused.add(callee)
                    if line.opcode == "conditional" or name in self._conditional:
                        self._conditional.add(callee)

    def _calls(self, line: Instruction, assumed_trips: int) -> list[tuple[str, int]]:
        """Returns the computations of a line and their runs in one run of the line."""
        if line.opcode == "while":
            count, kind = trips(self.computations, line)
            if count is None:
                count, kind = assumed_trips, "assumed"
            self.loops.append(Loop(line.name, line.computation, count, kind))
            return [(name, count) for key in ("body", "condition") for name in line.names(key)]
        keys = {
            "fusion": ("calls",), "async-start": ("calls", "called_computation"),
            "call": ("to_apply",), "call-start": ("to_apply",),
            "conditional": ("branch_computations", "true_computation", "false_computation"),
        }
        return [(name, 1) for key in keys.get(line.opcode, ()) for name in line.names(key)]

    def _lines(self):
        """Yields every line that runs."""
        for name, lines in self.computations.items():
            if self.runs[name]:
                yield from lines.values()

    def _place(self, line: Instruction) -> dict:
        return {
            "computation": line.computation, "runs": self.runs[line.computation],
            "op_name": line.op_name,
        }

    def _operands(self, line: Instruction) -> list[Instruction]:
        return [self.computations[line.computation][name] for name in line.operands]

    # Collectives

    def collectives(self, mesh: dict[str, int] | None = None) -> list[Collective]:
        """Returns all collectives; `mesh` (axis -> size, in device order) names their axes."""
        collectives = []
        for line in self._lines():
            kind = line.opcode.removesuffix("-start")
            if kind in KINDS and not self._is_later_part(line):
                collectives.append(self._collective(line, kind, mesh))
            elif line.opcode == "send" and "xla_megascale" in line.attributes:
                collectives.append(self._between_slices(line))
        return collectives

    def _is_later_part(self, line: Instruction) -> bool:
        """Whether a line repeats a collective: a TPU chain has it in several fusions."""
        starts = lambda name: any(
            'custom_call_target="AsyncCollectiveStart"' in x.attributes
            for x in self.computations[name].values()
        )
        if line.computation not in self._fused or starts(line.computation):
            return False
        channel = line.attribute("channel_id")
        return any(
            starts(other.computation) for other in self._lines()
            if other.opcode == line.opcode and other.attribute("channel_id") == channel
        )

    def _collective(self, line: Instruction, kind: str, mesh) -> Collective:
        operands = self._operands(line)
        sent = sum(s.bytes for operand in operands for s in operand.shapes)
        shapes = _written(line) if line.opcode in WITH_OPERANDS else line.shapes
        if self._scatters(line):
            kind = "reduce-scatter"
        groups = hlo_groups.replica_groups(line.attributes, self.num_devices)
        return Collective(
            line.name, kind, shapes, self._collective_bytes(kind, operands, shapes, sent),
            max(map(len, groups)) if groups else 1,
            hlo_groups.mesh_axes(groups, mesh) if groups and mesh else (), "ici",
            is_conditional=line.computation in self._conditional, **self._place(line),
        )

    def _collective_bytes(self, kind, operands, shapes, sent: int) -> int:
        received = sum(s.bytes for s in shapes)
        if kind == "ragged-all-to-all":  # (input, output buffer, four arrays of sizes)
            return min(operands[0].shapes[0].bytes, received)
        return max(sent, received)

    def _scatters(self, line: Instruction) -> bool:
        """Whether a line is a reduce-scatter, on TPU a fusion of an all-reduce and a slice."""
        return line.computation.startswith("all-reduce-scatter")

    def _between_slices(self, line: Instruction) -> Collective:
        kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', line.attributes)
        slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}', line.attributes)
        return Collective(
            line.name, kind[1].lower().replace("_", "-") if kind else "send", line.shapes[:1],
            line.shapes[0].bytes, len(slices[1].split(",")) if slices else 2, (), "dcn",
            is_conditional=line.computation in self._conditional, **self._place(line),
        )

    # Matrix products

    def dots(self) -> list[Dot]:
        """Returns all matrix products and convolutions outside custom calls."""
        return [self._dot(x) for x in self._lines() if x.opcode in ("dot", "convolution")]

    def _dot(self, line: Instruction) -> Dot:
        lhs, rhs = self._operands(line)
        precision = re.search(r"operand_precision=\{([\w,]+)\}", line.attributes)
        precisions = set(precision[1].split(",")) if precision else {"default"}
        multiplications = dot_size if line.opcode == "dot" else convolution_size
        return Dot(
            line.name, line.shapes[0], (lhs.shapes[0], rhs.shapes[0]),
            (self._source(lhs), self._source(rhs)), "+".join(sorted(precisions)),
            2 * multiplications(line, lhs.shapes[0], rhs.shapes[0]), **self._place(line),
        )

    def _source(self, line: Instruction) -> Shape:
        """Returns the largest input of `line` outside the fusions around it."""
        while line.computation in self._fused:
            if line.opcode == "parameter":
                line = self._operands(self._caller[line.computation])[int(line.arguments)]
            elif line.opcode == "fusion":
                line = root(self.computations[line.names("calls")[0]])
            elif line.operands:
                line = max(self._operands(line), key=lambda x: sum(s.size for s in x.shapes))
            else:
                break
        return max(line.shapes, key=lambda s: s.size)

    def flops(self) -> int:
        """Returns the FLOPs of all matrix products in one run of the program, on one device."""
        return sum(dot.flops * dot.runs for dot in self.dots())

    # Arrays

    def buffers(self) -> list[Buffer]:
        """Returns the arrays of at least one element written outside fusions, in any memory."""
        return [
            Buffer(line.name, line.opcode, shape, in_place, **self._place(line))
            for line in self._lines()
            if line.computation not in self._fused and line.opcode not in _NO_BUFFER
            and not line.opcode.endswith("-done")
            for shape, in_place in zip(_written(line), self._updates(line), strict=False)
            if shape.size and shape.dtype != "token"
        ]

    def operations(self) -> int:
        """Returns how many operations a run starts one after the other: fusions, kernels, copies.

        Not counted are branches of conditionals, copies in the background, and single numbers.
        """
        names = {
            (b.computation, b.name): b.runs for b in self.buffers()
            if b.shape.size > 1 and not b.opcode.endswith("-start")
            and b.computation not in self._conditional and b.opcode not in ("constant", "iota")
        }
        return sum(names.values())

    def _updates(self, line: Instruction) -> list[bool]:
        """Returns for each array of the result whether it overwrites an operand."""
        if "output_to_operand_aliasing" in line.attributes:
            outputs = re.findall(r"output_to_operand_aliasing=\{(.*?\)\})", line.attributes)[0]
            aliased = {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", outputs)}
            return [i in aliased for i in range(len(line.shapes))]
        if line.opcode != "fusion":
            return [line.opcode in _IN_PLACE] * len(line.shapes)
        last = root(self.computations[line.names("calls")[0]])
        parts = self._operands(last) if last.opcode == "tuple" else [last]
        return [self._is_update(part) for part in parts]

    def _is_update(self, line: Instruction) -> bool:
        """Whether a line of a fusion updates a parameter of the fusion."""
        line = self._behind_views(line)
        if line.opcode not in _IN_PLACE:
            return False
        return self._behind_views(self._operands(line)[0]).opcode == "parameter"

    def _behind_views(self, line: Instruction) -> Instruction:
        """Returns the line before bitcasts and before inner fusions that only change the tiling."""
        while line.opcode == "bitcast" or "output_to_operand_aliasing" in line.attributes:
            line = self._operands(line)[0]
        return line

    def aliases(self) -> list[Alias]:
        """Returns the donated parameters that an output overwrites."""
        start = self.header.find("input_output_alias={")
        end = self.header.find("entry_computation_layout", start)
        pairs = re.findall(r"\{([\d, ]*)\}: \((\d+),", self.header[start:end]) if start >= 0 else []
        parameters = {
            int(x.arguments): x.shapes[0] for x in self.computations[self.entry].values()
            if x.opcode == "parameter"
        }
        return [
            Alias(tuple(map(int, re.findall(r"\d+", output))), int(n), parameters[int(n)])
            for output, n in pairs
        ]

    # What leaves the program

    def custom_calls(self) -> list[CustomCall]:
        """Returns all custom calls; target MOSAIC is a Pallas TPU kernel."""
        calls = []
        for line in self._lines():
            if line.opcode == "custom-call":
                target = re.findall(r'custom_call_target="([^"]*)"', line.attributes)[0]
                flops = re.search(r'"flops":"?(\d+)', line.config)
                calls.append(CustomCall(
                    line.name, target, line.shapes, int(flops[1]) if flops else None,
                    **self._place(line),
                ))
        return calls

    def host_transfers(self) -> list[HostTransfer]:
        """Returns sends, receives, feeds, callbacks and copies to or from host memory. Traffic
        between slices counts as collectives instead."""
        return [
            HostTransfer(line.name, kind, line.shapes, **self._place(line))
            for line in self._lines() if (kind := self._host_kind(line))
        ]

    def _host_kind(self, line: Instruction) -> str | None:
        if line.opcode in ("send", "recv"):
            return None if "xla_megascale" in line.attributes else line.opcode
        if line.opcode in ("infeed", "outfeed"):
            return line.opcode
        if line.opcode == "custom-call":
            target = re.findall(r'custom_call_target="([^"]*)"', line.attributes)[0]
            return target if _HOST_CALL.search(target) else None
        if line.opcode in ("copy", "copy-start"):
            from_host = any(
                s.memory_space == HOST_MEMORY for x in self._operands(line) for s in x.shapes
            )
            to_host = line.shapes[0].memory_space == HOST_MEMORY
            return {(True, False): "copy from host", (False, True): "copy to host"}.get(
                (from_host, to_host)
            )
        return None


def _written(line: Instruction) -> tuple[Shape, ...]:
    """Returns the arrays that a line writes, without the operands in an asynchronous start's
    result."""
    if line.opcode == "send":
        return ()
    if line.opcode in ("copy-start", "recv"):
        return line.shapes[:1]  # (result, operand, flags)
    if line.opcode in WITH_OPERANDS:
        return line.shapes[len(line.operands) : 2 * len(line.operands)]  # (operands, results, flags)
    with_operand = line.opcode.endswith("-start") and line.opcode != "all-reduce-start"
    return line.shapes[1:2] if with_operand else line.shapes
