"""Parses HLO text into shapes, instructions and computations."""

import dataclasses
import math
import re
from typing import Any

WIDTHS = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8,
    "c128": 16, "f4e2m1fn": 0.5, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3b11fnuz": 1, "f8e8m0fnu": 1,
    "token": 0, "opaque": 0,
}
_PASSED_ON = {"copy", "convert", "bitcast", "reshape", "copy-done", "opt-barrier"}
_EVALUATED = _PASSED_ON | {"tuple", "fusion", "get-tuple-element", "add", "subtract"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array; on TPU memory_space 0 is HBM, 1 on-chip memory, 5 the host."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.size * WIDTHS[self.dtype])

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. `shapes` are its result arrays, `arguments` the text of its operands,
    `config` its backend_config."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    config: str
    op_name: str
    computation: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute, "" if the line does not have it."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else ""

    def names(self, name: str) -> list[str]:
        """Returns the names in an attribute such as calls=%a or branch_computations={%a, %b}."""
        return re.findall(r"%([\w.\-]+)", self.attribute(name))


Computation = dict[str, Instruction]


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a shape, with tuples flattened."""
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", text)
    spaces = (re.search(r"S\((\d+)\)", layout) for _, _, layout in arrays)
    return tuple(
        Shape(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d),
              int(space[1]) if space else 0)
        for (dtype, dims, _), space in zip(arrays, spaces, strict=True)
    )


def read(text: str) -> tuple[dict[str, Computation], str]:
    """Returns (computations by name, callees first; name of the entry)."""
    computations, current, entry = {}, None, ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = header[2]
            computations[current] = {}
            entry = current if header[1] else entry
        elif current and (parsed := _instruction(line, current)):
            computations[current][parsed.name] = parsed
    return computations, entry


def _instruction(line: str, computation: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = re.match(r" *([\w\-]+)\(", line[end:])
    assert opcode is not None, line
    opening = end + opcode.end() - 1
    closing = _closing(line, opening)
    arguments, rest = line[opening + 1 : closing], line[closing + 1 :]
    attributes, _, config = rest.partition(", backend_config=")
    attributes, _, metadata = attributes.partition(", metadata={")
    op_name = re.search(r'op_name="([^"]*)"', metadata)
    return Instruction(
        head[2], opcode[1], shapes_of(line[start:end]),
        tuple(re.findall(r"%([\w.\-]+)", arguments)), arguments, attributes, config,
        op_name[1] if op_name else "", computation, head[1] is not None,
    )


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for parenthesis in re.compile(r"[()]").finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    raise ValueError(f"no closing parenthesis in {text[start : start + 200]!r}")


def root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.is_root)


# Trip counts. The CPU's compiler prints them, libtpu does not.

Value = Any  # int | list | None: of an integer, of a tuple; None: not known before the program runs


def trips(computations: dict[str, Computation], loop: Instruction) -> tuple[int | None, str]:
    """Returns (runs of a while loop's body, "exact" | "bound" | "unknown").

    If the text does not give the count, it is the distance of a counter to its limit before the
    loop, divided by the counter's change in one run of the body. "bound" means that the condition
    has other parts besides `counter < limit` and may end the loop earlier.
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.config)
    if known:
        return int(known[1]), "exact"
    condition, body = (root(computations[loop.names(x)[0]]) for x in ("condition", "body"))
    states = [_value(computations, computations[loop.computation][loop.operands[0]], None)]
    for _ in range(2):
        states.append(_value(computations, body, [states[-1]]))
    distances = (_distances(computations, condition, [state]) for state in states)
    parts = list(zip(*distances, strict=True))
    counts = [
        max(0, math.ceil(first / (first - second))) for first, second, third in parts
        if None not in (first, second, third) and first - second == second - third > 0
    ]
    if not counts:
        return None, "unknown"
    return min(counts), "exact" if len(parts) == 1 else "bound"


def _distances(computations, line: Instruction, inputs: list[Value]) -> list[int | None]:
    """Returns the distance of each comparison in a conjunction from failing; None if unknown."""
    scope = computations[line.computation]
    if line.opcode == "and":
        return sum((_distances(computations, scope[x], inputs) for x in line.operands), [])
    values = [_value(computations, scope[x], inputs) for x in line.operands]
    if line.opcode == "fusion":
        return _distances(computations, _fused_root(computations, line), values)
    direction = line.attribute("direction")
    if line.opcode != "compare" or direction[0] not in "LG" or None in values:
        return [None]
    left, right = values  # scalars
    distance = right - left if direction[0] == "L" else left - right
    return [distance + (direction in ("LE", "GE"))]


def _value(computations, line: Instruction, inputs: list[Value] | None) -> Value:
    """Returns the value of a line in a computation with the parameters `inputs`."""
    if len(line.shapes) == 1 and (line.shapes[0].size > 1 or line.shapes[0].dtype[0] not in "su"):
        return None
    if line.opcode == "constant":
        return int(line.arguments) if re.fullmatch(r"-?\d+", line.arguments) else None
    if line.opcode == "parameter":
        return inputs and inputs[int(line.arguments)]
    if line.opcode not in _EVALUATED:
        return None
    scope = computations[line.computation]
    values = [_value(computations, scope[x], inputs) for x in line.operands]
    if line.opcode == "tuple":
        return values
    if line.opcode == "fusion":
        return _value(computations, _fused_root(computations, line), values)
    if None in values:
        return None
    if line.opcode == "get-tuple-element":
        return values[0][int(line.attribute("index"))]
    if line.opcode in _PASSED_ON:
        return values[0]
    return values[0] + values[1] if line.opcode == "add" else values[0] - values[1]


def _fused_root(computations, line: Instruction) -> Instruction:
    return root(computations[line.names("calls")[0]])
