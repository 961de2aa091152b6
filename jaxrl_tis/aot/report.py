"""The report of jaxrl_tis.aot: memory and operations of compiled programs, as JSON and text."""

import re
from collections import Counter
from typing import Any

import jax

from jaxrl_tis.aot import work
from jaxrl_tis.aot.chips import GIB, Topology
from jaxrl_tis.aot.hlo import MOSAIC, Module
from jaxrl_tis.build import Setup
from jaxrl_tis.sharding import MESH_AXES, Layout, device_bytes

# Programs of an evaluation, see programs.py.
EVALUATION = ("reshard", "eval_prefill", "eval_insert", "eval_decode")
OF_EVALUATION = ("evaluation weights", "evaluation state")
OF_DRAFTER = ("draft_prefill", "draft_insert", "draft")
OF_SAMPLER = ("prefill", "insert", "decode", "verify", *OF_DRAFTER)
OF_LEARNER = ("train", "critic", "score", "weigh", "values", "distill")
BETWEEN = ("quantize", "reshard")  # begin in the learner's layout, and end in the sampler's
LARGEST = 8  # arrays named of a program
LARGE_DOT = 0.01  # share of a program's FLOPs from which on a product is listed


def header(setup: Setup, topology: Topology, resident: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the JSON that all programs share."""
    c = setup.model
    return {
        "config": setup.config.name,
        "topology": topology.name,
        "slices": topology.num_slices,
        "chips": topology.num_chips,
        "rented_as": topology.product_name,
        "devices_per_chip": _devices_per_chip(setup, topology),
        "hbm_bytes": _hbm(setup, topology),
        "mesh": {
            "train": dict(setup.training.layout.mesh.shape),
            "serve": dict(setup.engine.layout.mesh.shape),
        },
        "layers": c.num_layers,
        "sleeps": setup.sleeps,
        "resident_bytes": {name: device_bytes(tree) for name, tree in resident.items()},
    }


def entry(
    setup: Setup, topology: Topology, compiled: Any, resident: dict[str, Any]
) -> dict[str, Any]:
    """Returns the JSON entry of a `programs.Compiled`; all bytes are for one device."""
    hbm, job = _hbm(setup, topology), work.work(compiled.name, setup, compiled.args)
    others = beside(setup, compiled.name, compiled.args, resident)
    memory: dict[str, Any]
    result = {
        "name": compiled.name, "runs_on": runs_on(setup, compiled.name),
        "compile_seconds": round(compiled.seconds, 2),
        "model_flops": job.flops,
        "must_move_bytes": {
            "weights": job.weight_bytes, "kv": job.kv_bytes,
            "activations": job.activation_bytes,
        },
    }
    if compiled.refusal:
        memory, over, where = _refused(compiled, others, hbm)
        result |= {"refusal": compiled.refusal[:2000]}
    else:
        memory, where = _memory(compiled.memory, others, hbm), "hbm"
        over = memory["peak_bytes"] + others - hbm
        result |= _hlo(setup, topology, compiled, job)
    fits = not compiled.refusal and over <= 0
    return result | {
        "memory": memory, "fits": fits, "over_bytes": max(0, over), "over_in": where,
        "largest": largest(compiled),
    }


def runs_on(setup: Setup, program: str) -> str:
    """Returns the mesh of a program, "train" or "serve". Where evaluations have devices of the samplers
    alone, programs between them and the learner run on the learner's mesh, and the run moves their
    results."""
    learning, evaluating = (
        set(layout.mesh.devices.flat) for layout in (setup.training.layout, setup.learner_engine.layout)
    )
    is_learners = program in OF_LEARNER or (program in BETWEEN and learning.isdisjoint(evaluating))
    return "train" if is_learners else "serve"


def _layout(setup: Setup, program: str) -> Layout:
    """Returns the layout of a program: the learner's, the sampler's, or that of evaluations."""
    if runs_on(setup, program) == "train":
        return setup.training.layout
    is_samplers = program not in (*EVALUATION, *BETWEEN)
    return (setup.engine if is_samplers else setup.learner_engine).layout


def _devices_per_chip(setup: Setup, topology: Topology) -> int:
    return len(topology.devices()) // topology.num_chips


def _hbm(setup: Setup, topology: Topology) -> int:
    return topology.chip.hbm_bytes // _devices_per_chip(setup, topology)


# Memory


def beside(setup: Setup, program: str, args: tuple, resident: dict[str, Any]) -> int:
    """Returns the bytes on a device of the arrays that a run keeps while a program runs, without the
    program's arguments."""
    return _beside(args, _alive(program, args, resident, setup.sleeps))


def _alive(
    program: str, args: tuple, resident: dict[str, Any], sleeps: bool
) -> dict[str, Any]:
    """Returns the arrays that a run keeps on the devices of a program while the program runs.

    From `reshard` on an evaluation has its own weights and cache. The caches of sampler and drafter are
    freed during this time, and no weights arrive. A sampler that sleeps has weights and caches in its own
    programs alone, those of its drafter included.
    """
    caches = {"decode state", "drafter state"}
    arriving = {"arriving weights", "arriving drafter weights"}
    absent = caches | arriving if program in EVALUATION else set(OF_EVALUATION)
    if program == "reshard":
        absent |= set(OF_EVALUATION)
    if sleeps and program not in OF_SAMPLER:
        absent |= {"serving weights", "drafter weights", *caches}
    here = _devices(args)
    return {
        name: tree for name, tree in resident.items()
        if name not in absent and not here.isdisjoint(_devices(tree))
    }


def _devices(tree: Any) -> set:
    """Returns the devices of abstract arrays."""
    return set().union(*(x.sharding.device_set for x in jax.tree.leaves(tree) if _is_placed(x)))


def _is_placed(x: Any) -> bool:
    return getattr(x, "sharding", None) is not None


def _beside(args: tuple, resident: dict[str, Any]) -> int:
    """Returns the bytes of a run's arrays on a device that are no arguments of the program."""
    key = lambda x: (x.shape, x.dtype, getattr(x, "sharding", None))
    arguments = Counter(key(x) for x in jax.tree.leaves(args))
    rest = []
    for leaf in jax.tree.leaves(resident):
        if arguments[key(leaf)]:
            arguments[key(leaf)] -= 1
        else:
            rest.append(leaf)
    return device_bytes(rest)


def _memory(memory: Any, beside: int, hbm: int) -> dict[str, int]:
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "beside_bytes": beside,
        "hbm_bytes": hbm,
    }


def _refused(compiled: Any, beside: int, hbm: int) -> tuple[dict[str, Any], int, str]:
    """Returns (memory, missing bytes, name of the memory space) of a refused program. For HBM the
    peak is the compiler's own sum. For smem and vmem only the arguments are known."""
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    number = r" ?([\d.]+)([KMGT]?)"
    said = lambda words: [
        int(float(n) * unit[u]) for n, u in re.findall(words + number, compiled.refusal)
    ]
    arguments = device_bytes(compiled.args)
    space = re.search(r"memory space (\w+)", compiled.refusal)
    where = space.group(1) if space else "hbm"
    memory: dict[str, Any] = {
        "argument_bytes": arguments, "output_bytes": None, "alias_bytes": None,
        "temp_bytes": None, "peak_bytes": arguments, "beside_bytes": beside, "hbm_bytes": hbm,
    }
    if where != "hbm":
        return memory, max(said(r"capacity by"), default=1), where
    memory["peak_bytes"] = max(said(r"(?:Used|temporaries \(|usage >=)"), default=hbm + 1)
    return memory, max(memory["peak_bytes"] + beside - hbm, 1), where


def largest(compiled: Any) -> list[dict[str, Any]]:
    """Returns the largest arrays on a device: arguments by name, other arrays by shape."""
    arguments = [
        {"bytes": device_bytes(leaf), "what": "argument" + jax.tree_util.keystr(path),
         "shape": f"{leaf.dtype}{list(leaf.shape)}"}
        for path, leaf in jax.tree_util.tree_flatten_with_path(compiled.args)[0]
    ]
    if compiled.module is None:
        arrays = _allocations(compiled.refusal)
    else:
        arrays = _buffers(compiled.module)
    return sorted(arguments + arrays, key=lambda x: -x["bytes"])[:LARGEST]


def _buffers(module: Module) -> list[dict[str, Any]]:
    """Returns one entry for each shape and origin, without updates in place."""
    arrays = {}
    for b in module.buffers():
        if not b.in_place and b.shape.memory_space == 0:
            key = str(b.shape), b.op_name
            what = f"{b.opcode} {b.op_name}".strip()
            arrays[key] = {"bytes": b.shape.bytes, "what": what, "shape": str(b.shape)}
    return list(arrays.values())


def _allocations(refusal: str) -> list[dict[str, Any]]:
    """Returns the arrays that the compiler lists in a refusal."""
    unit = {"B": 1, "K": 2**10, "M": 2**20, "G": GIB}
    pattern = r"Size: ([\d.]+)([BKMG]).*?(?:Operator: op_name=\"([^\"]*)\".*?)?Shape: (\S+?)\{"
    return [
        {"bytes": int(float(n) * unit[u]), "what": op_name, "shape": shape}
        for n, u, op_name, shape in re.findall(pattern, refusal, re.DOTALL)
    ]


# Operations


def _hlo(setup: Setup, topology: Topology, compiled: Any, job: work.Work) -> dict[str, Any]:
    module = compiled.module
    layout = _layout(setup, compiled.name)
    collectives, dots = module.collectives(dict(layout.mesh.shape)), module.dots()
    kernels = [c for c in module.custom_calls() if c.target == MOSAIC]
    model = work.model_of(compiled.name, setup)
    flops_of = {k.name: work.kernel_flops(k, model, layout) for k in kernels}
    kernel_flops = sum(flops_of[k.name] * k.runs for k in kernels)
    passes = sum(flops_of[k.name] * k.runs * work.kernel_passes(k, setup) for k in kernels)
    flops = (module.flops() + kernel_flops) * layout.mesh.size
    limits = work.roofline(
        topology.chip, _devices_per_chip(setup, topology), dots, collectives, passes, job
    )
    return {
        "hlo_flops": flops,
        "model_flop_ratio": job.flops / flops if flops else None,
        "kernels": [
            {"name": k.name, "runs": k.runs, "flops": flops_of[k.name], "op_name": k.op_name}
            for k in kernels
        ],
        "loops": [{"trips": x.trips, "kind": x.kind} for x in module.loops],
        "collectives": _collectives(collectives),
        "dots": _dots(dots),
        "host_transfers": [{"kind": h.kind, "runs": h.runs} for h in module.host_transfers()],
        "roofline": {
            "is_model_output": True,
            "compute_seconds": limits.compute_seconds, "memory_seconds": limits.memory_seconds,
            "network_seconds": limits.network_seconds, "seconds": limits.seconds,
            "bound": limits.bound,
        },
    }


def _collectives(collectives: list) -> list[dict[str, Any]]:
    """Returns one entry for equal collectives, with their `count` in a run and `bytes` each. The
    entry with the most bytes in all comes first."""
    counts = Counter()
    for c in collectives:
        shapes = ", ".join(map(str, c.shapes))
        counts[c.kind, c.axes, c.network, c.group_size, c.bytes, shapes] += c.runs
    rows = [
        {"kind": kind, "axes": list(axes), "network": network, "group_size": size,
         "bytes": n_bytes, "shapes": shapes, "count": count}
        for (kind, axes, network, size, n_bytes, shapes), count in counts.items()
    ]
    return sorted(rows, key=lambda r: -r["bytes"] * r["count"])


def _dots(dots: list) -> list[dict[str, Any]]:
    """Returns the FLOPs of large products by dtypes, on one device in a run."""
    total = sum(d.flops * d.runs for d in dots)
    flops = Counter()
    for d in dots:
        key = (
            tuple(s.dtype for s in d.operands), tuple(s.dtype for s in d.sources), d.result.dtype,
            d.precision,
        )
        flops[key] += d.flops * d.runs
    return [
        {"operands": list(o), "sources": list(s), "result": r, "precision": p, "flops": n}
        for (o, s, r, p), n in flops.most_common() if n >= LARGE_DOT * total
    ]


# Text


def title(setup: Setup, topology: Topology) -> str:
    meshes = (setup.training.layout.mesh.shape, setup.engine.layout.mesh.shape)
    train, serve = ("x".join(str(n) for n in m.values()) for m in meshes)
    where = " on other devices" if setup.is_apart else ""
    if setup.config.rollout.driver == "ray":
        where = f" on each of {setup.config.rollout.workers} workers"
    sleeps = " The sampler sleeps." if setup.sleeps else ""
    drafts = ""
    if setup.drafters:
        drafts = f" {setup.config.engine.drafter} drafts, {setup.drafters[0].model.num_layers} layers."
    return (
        f"{setup.config.name} for {topology.num_chips} chips {topology.name} "
        f"({topology.product_name}), {setup.model.num_layers} layers. "
        f"Mesh {' x '.join(MESH_AXES)}: {train} to train, {serve} to serve{where}."
        f"{sleeps}{drafts}"
    )


def text(entry: dict[str, Any]) -> str:
    """Returns the full text about one program."""
    memory = entry["memory"]
    lines = [
        f"\n{entry['name']}: compiled in {entry['compile_seconds']} s; "
        f"peak {gib(memory['peak_bytes'])} + {gib(memory['beside_bytes'])} beside it of "
        f"{gib(memory['hbm_bytes'])}"
    ]
    if not entry["fits"]:
        lines.append(
            f"  DOES NOT FIT in {entry['over_in']}: {_bytes(entry['over_bytes'])} too much; "
            "largest arrays:"
        )
        lines += [
            f"    {gib(x['bytes'])}  {x['shape']}  {x['what']}" for x in entry["largest"]
        ]
    if "refusal" in entry:
        return "\n".join(lines + [f"  {entry['refusal'].splitlines()[0]}"])
    for c in entry["collectives"][:LARGEST]:
        along = "+".join(c["axes"]) or f"groups of {c['group_size']}"
        lines.append(
            f"  {c['count']:6d} x {c['kind']} ({c['network']}, {along}) of {c['shapes']}, "
            f"{c['bytes'] / 2**20:.3g} MiB"
        )
    for d in entry["dots"]:
        lines.append(
            f"  {d['flops']:9.3g} FLOPs {' x '.join(d['operands'])} -> {d['result']} "
            f"({d['precision']}), from {' x '.join(d['sources'])}"
        )
    for kernel in entry["kernels"]:
        lines.append(
            f"  {kernel['runs']:6d} x kernel {kernel['name']}, {kernel['flops']:.3g} FLOPs"
        )
    lines += [f"  HOST: {h['runs']} x {h['kind']}" for h in entry["host_transfers"]]
    return "\n".join(lines)


COLUMNS = (
    "program", "compile s", "arguments", "temporaries", "peak", "beside", "HBM use",
    "HLO FLOPs", "model / HLO", "moves", "at best (model)", "bound",
)


def table(result: dict[str, Any], markdown: bool = False) -> str:
    """Returns the table of programs. Bytes are for one device, FLOPs for all devices."""
    return grid([COLUMNS, *(_row(e) for e in result["programs"].values())], markdown)


def grid(rows: list[tuple[str, ...]], markdown: bool = False) -> str:
    """Returns rows of cells, the heading first, as columns of text or as Markdown."""
    if markdown:
        head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    memory = entry["memory"]
    use = (memory["peak_bytes"] + memory["beside_bytes"]) / memory["hbm_bytes"]
    start = (
        entry["name"], f"{entry['compile_seconds']:.1f}", gib(memory["argument_bytes"]),
        gib(memory["temp_bytes"]), gib(memory["peak_bytes"]), gib(memory["beside_bytes"]),
        f"{use:.0%}" + ("" if entry["fits"] else " DOES NOT FIT"),
    )
    if "refusal" in entry:
        return (*start, "", "", "", "", "")
    ratio, limits = entry["model_flop_ratio"], entry["roofline"]
    return (
        *start, f"{entry['hlo_flops']:.3g}", "" if not ratio else f"{ratio:.2f}",
        gib(sum(entry["must_move_bytes"].values())), _seconds(limits["seconds"]), limits["bound"],
    )


def gib(n_bytes: float | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.2f} GiB"


def _bytes(n: int) -> str:
    return gib(n) if n >= GIB // 100 else f"{n / 2**10:.0f} KiB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
