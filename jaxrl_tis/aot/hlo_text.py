"""HLO text as data: shapes, instructions and the computations they stand in."""

import dataclasses
import math
import re
from collections.abc import Callable

WIDTHS = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8,
    "c128": 16, "f4e2m1fn": 0.5, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3b11fnuz": 1, "f8e8m0fnu": 1,
    "token": 0, "opaque": 0,
}
_PASSED_ON = {"copy", "convert", "bitcast", "reshape", "copy-done", "opt-barrier"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array; memory_space 0 is HBM, 1 on-chip memory, 5 the host (TPU)."""

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
    """One line; `shapes` are the arrays of its result, `arguments` the text of its operands,
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
        """Returns the text of an attribute, "" where the line has none of this name."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else ""

    def names(self, name: str) -> list[str]:
        """The names in an attribute, as in calls=%a or branch_computations={%a, %b}."""
        return re.findall(r"%([\w.\-]+)", self.attribute(name))


Computation = dict[str, Instruction]


def shapes_of(text: str) -> tuple[Shape, ...]:
    """The arrays of a shape, tuples flattened."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", text)
    spaces = (re.search(r"S\((\d+)\)", layout) for _, _, layout in found)
    return tuple(
        Shape(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d),
              int(space[1]) if space else 0)
        for (dtype, dims, _), space in zip(found, spaces)
    )


def read(text: str) -> tuple[dict[str, Computation], str]:
    """(computations by name, callees before callers, name of the entry)."""
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
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"no closing parenthesis in {text[start : start + 200]!r}")


def root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.is_root)


# Trip counts. A value of a loop is (index of the loop's state or None, constant added to it); None
# is anything else.

Value = tuple[int | None, int] | None


def trips(computations: dict[str, Computation], loop: Instruction) -> tuple[int | None, str]:
    """(runs of a while loop's body, "exact" | "bound" | "unknown").

    "bound": the condition has other parts than `counter < limit`, so that it may end earlier.
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.config)
    if known:
        return int(known[1]), "exact"
    condition = computations[loop.names("condition")[0]]
    parts = _comparisons(computations, condition, root(condition), None)
    counts = [c for part in parts if (c := _count(computations, loop, part)) is not None]
    if not counts:
        return None, "unknown"
    return min(counts), "exact" if len(parts) == 1 else "bound"


def _count(computations, loop: Instruction, comparison) -> int | None:
    if comparison is None or None in comparison:
        return None
    direction, counter, limit = comparison
    if counter[0] is None:
        counter, limit = limit, counter
    if counter[0] is None:
        return None
    start, end = (_start(computations, loop, v) for v in (counter, limit))
    step = _next(computations, loop, counter[0])
    if None in (start, end, step) or step[0] != counter[0] or not step[1]:
        return None
    if limit[0] is not None and _next(computations, loop, limit[0]) != (limit[0], 0):
        return None
    inclusive = direction in ("LE", "GE")
    return max(0, math.ceil((abs(end - start) + inclusive) / abs(step[1])))


def _start(computations, loop: Instruction, value: Value) -> int | None:
    """Returns a value as it is before the first run of a loop."""
    if value[0] is None:
        return value[1]
    caller = computations[loop.computation]
    state = caller[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    initial = _value(computations, caller, caller[state.operands[value[0]]], None)
    return None if initial is None or initial[0] is not None else initial[1] + value[1]


def _next(computations, loop: Instruction, index: int) -> Value:
    """Returns item `index` of the state after a run, in terms of the state before it."""
    body = computations[loop.names("body")[0]]
    state = root(body)
    if state.opcode != "tuple":
        return None
    return _value(computations, body, body[state.operands[index]], None)


def _comparisons(computations, scope: Computation, line: Instruction, inputs) -> list:
    """(direction, left, right) for each part of a conjunction, None for a part that is none."""
    if line.opcode == "compare":
        values = (_value(computations, scope, scope[x], inputs) for x in line.operands)
        return [(line.attribute("direction"), *values)]
    if line.opcode == "and":
        parts = (_comparisons(computations, scope, scope[x], inputs) for x in line.operands)
        return sum(parts, [])
    return _through(computations, scope, line, inputs, _comparisons) or [None]


def _value(computations, scope: Computation, line: Instruction, inputs) -> Value:
    """Value of a line of a loop (inputs None) or of a fusion in it (inputs: its operands')."""
    if line.opcode == "constant":
        return (None, int(line.arguments)) if re.fullmatch(r"-?\d+", line.arguments) else None
    if line.opcode == "parameter":
        return inputs and inputs[int(line.arguments)]
    if line.opcode == "get-tuple-element" and inputs is None:
        is_state = scope[line.operands[0]].opcode == "parameter"
        return (int(line.attribute("index")), 0) if is_state else None
    if line.opcode in _PASSED_ON:
        return _value(computations, scope, scope[line.operands[0]], inputs)
    if line.opcode in ("add", "subtract"):
        a, b = (_value(computations, scope, scope[x], inputs) for x in line.operands)
        sign = 1 if line.opcode == "add" else -1
        if None in (a, b) or b[0] is not None and (a[0] is not None or sign < 0):
            return None
        return (b[0] if a[0] is None else a[0], a[1] + sign * b[1])
    return _through(computations, scope, line, inputs, _value)


def _through(computations, scope: Computation, line: Instruction, inputs, read: Callable):
    """Returns what `read` says of the root of a fusion, and None for other lines."""
    if line.opcode != "fusion":
        return None
    values = [_value(computations, scope, scope[x], inputs) for x in line.operands]
    inner = computations[line.names("calls")[0]]
    return read(computations, inner, root(inner), values)
