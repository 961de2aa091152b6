"""Writes docs/accelerators.md from docs/accelerators/*.json: python docs/make_accelerators.py."""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

FOLDER = pathlib.Path(__file__).with_name("accelerators")
PAGE = FOLDER.with_suffix(".md")
sys.path.insert(0, str(FOLDER.parents[1]))  # of `python docs/make_accelerators.py`

from benchmarks import accelerator  # noqa: E402  (of the line above)

HEAD = """\
# Accelerators

One command checks and measures the package on one GPU, one TPU chip or a CPU. It takes at most eight minutes after the
installation, and downloads nothing meanwhile:

```
./launch/accelerator.sh NAME
```

`docs/accelerators/NAME.json` is the report, and `python docs/make_accelerators.py` writes this page from all reports.
In an installed environment `python -m benchmarks.accelerator --json=docs/accelerators/NAME.json` makes the same report.
[accelerator_schema.json](../benchmarks/accelerator_schema.json) describes its fields. The exit code is 1 if logits,
kernels or the gate failed. Times and rates never decide it.

Each part has a process and a share of the eight minutes. The other parts go on after one that fails or is stopped.
Models are random, and their sizes depend on the device:

| sizes | device | model | decode | GRPO step | gate |
|---|---|---|---|---|---|
| `cpu` | a CPU | 4 layers, width 256, vocabulary 49,152 | 32 + 32 tokens | 32 x (64 + 64), float32 | 16 prompts |
| `full` | every other | Qwen2.5-0.5B's shape | 128 + 128 tokens | 32 x (256 + 256), bfloat16 | 64 prompts |

| column | meaning |
|---|---|
| logits | error relative to float64 on the host, root mean square: float32 at precision HIGHEST, bfloat16 |
| kernels | kernels within their bound of float64, of all |
| gate | the [gate](gate.md) of a bfloat16 and of a W8A8 sampler, the quickstart's random model |
| decode | tokens/s of 1, 32 and 128 sequences, scheduler included, prefill excluded |
| step | seconds of a GRPO step with a W8A8 sampler: logp_old within the update (fused), and scored before it |
| MFU | model FLOPs of the step over its time and the published bfloat16 rate; empty for an unknown device |
| sync | milliseconds of a weight sync to a bfloat16 and to a W8A8 sampler on the same device |
| quickstart | seconds of 30 steps with warm-up, two evaluations and compilation |

A step for a TPU v5e chip was compiled and never run: the update of `full` takes 13.2 of 15.75 GiB.
"Beside other work" means that other processes kept the machine busy at the start. `benchmarks/peaks.py` has the
published rates and their sources.
"""
TITLES = {
    "cpu": "CPUs, sizes `cpu`", "full": "Accelerators, sizes `full`", None: "Reports without a device",
}
MISSING = {
    "full": "No accelerator has run this script yet: there was none to borrow. No number here is from a chip.\n",
    "cpu": "No CPU has run this script yet.\n",
}


def reports() -> list[dict[str, Any]]:
    """Returns all reports, by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def sizes_of(report: Mapping[str, Any]) -> str | None:
    found = report["parts"]["device"]["result"]
    return found["sizes"] if found else None


def table(heads: list[str], rows: list[list[Any]]) -> str:
    head, *lines = [f"| {' | '.join(map(str, cells))} |\n" for cells in (heads, *rows)]
    return "".join([head, "|" + "---|" * len(heads) + "\n", *lines])


def share(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


def _device(found: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {x}" for name, x in found["versions"].items())
    driver = f", driver {found['driver']}" if found["driver"] else ""
    runtime = found["runtime"].splitlines()[0] if found["runtime"] else ""
    rates = [f"{1e-9 * x:,.0f}" for x in found["matrix_rates"].values()]
    peak = found["peak"] or dict.fromkeys(("bfloat16", "int8", "memory"))
    published = ["", *("" if x is None else f"{1e-9 * x:,.0f}" for x in peak.values())]
    return [
        f"{found['kind']} ({found['platform']}{driver}, {runtime}). Host: {found['cores']} cores "
        f"of {found['processor']}. Versions: {versions}.\n",
        table(
            ["rates", "float32 GF/s", "bfloat16 GF/s", "int8 GOP/s", "memory GB/s"],
            [["measured", *rates, f"{1e-9 * found['copy_rate']:,.1f}"], ["published", *published]],
        ),
    ]


def _step(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            name, *(f"{x:.2f}" for x in way["seconds"].values()),
            f"{1e-9 * way['model_flops']['step']:,.0f}", share(way["mfu"]),
            share(way["update_mfu"]), share(way["matrix_share"]),
        ]
        for name in ("fused", "separate") if (way := found.get(name))
    ]
    return [table(
        ["GRPO step, s", "rollout", "score", "update", "step", "model GF", "MFU", "of the update",
         f"of the measured {1e-9 * found['matrix_rate']:,.0f} GF/s"], rows,
    )]


def _decode(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in dict.fromkeys(x["format"] for x in found["rows"]):
        of = [x for x in found["rows"] if x["format"] == name]
        moved = ", ".join(f"{1e-6 * x['bytes_per_token']:.2f}" for x in of)
        rows.append([name, moved, ", ".join(filter(None, (share(x["bandwidth_share"]) for x in of)))])
    return [table(["decode", "MB a token", "share of the bandwidth"], rows)]


def _gate(found: Mapping[str, Any]) -> list[str]:
    names = "d_mean", "d_p99", "dp_max", "k3"
    return [table(
        ["gate", *(f"`{name}`" for name in names), "largest cause"],
        [[sampler, *(accelerator.number(x[name], ".2g") for name in names), f"`{x['largest']}`"]
         for sampler, x in found.items()],
    )]


def _quickstart(found: Mapping[str, Any]) -> list[str]:
    return [
        f"Quickstart: {found['steps']} steps, {found['step_seconds']:.2f} s a step, greedy accuracy "
        f"{found['first_accuracy']:.3f} to {found['last_accuracy']:.3f}.\n"
    ]


def _correctness(found: Mapping[str, Any]) -> list[str]:
    of = lambda names: ", ".join(
        f"{x} ({accelerator.number(kernels[x]['error'], '.1e')} of {kernels[x]['bound']:.0e})" for x in names
    )
    kernels = found["kernels"]
    bad = [name for name, x in kernels.items() if not x["is_ok"]]
    most = max(kernels, key=lambda x: (kernels[x]["error"] or 0.0) / kernels[x]["bound"])
    text = f"Kernels above their bound: {of(bad)}." if bad else f"Kernel nearest to its bound: {of([most])}."
    return [text + "\n"]


PARTS = {
    "device": _device, "step": _step, "decode": _decode, "gate": _gate,
    "quickstart": _quickstart, "correctness": _correctness,
}


def details(report: Mapping[str, Any]) -> str:
    """Returns the tables of one report. A part that failed has none, unless it is `step`: what it measured
    before it failed is shown."""
    parts = report["parts"]
    texts = [f"### {accelerator.name_of(report)}\n"]
    outcome = "Logits, kernels and the gate passed" if report["passed"] else "The checks failed"
    texts.append(f"{report['date']}, {report['seconds']:.0f} s in all. {outcome}.\n")
    if failed := {n: x["error"] for n, x in parts.items() if not x["is_ok"]}:
        last = {name: error.strip().splitlines()[-1] for name, error in failed.items()}
        texts.append(table(["failed part", "error"], [[f"`{n}`", x] for n, x in last.items()]))
    for name, tables in PARTS.items():
        part = parts.get(name, {})
        if (found := part.get("result")) and (part["is_ok"] or name == "step"):
            texts += tables(found)
    return "\n".join(texts)


def page() -> str:
    """Returns the page of all reports."""
    found, texts = reports(), [HEAD]
    for sizes, title in TITLES.items():
        of_sizes = [report for report in found if sizes_of(report) == sizes]
        if of_sizes:
            rows = "\n".join(map(accelerator.row, of_sizes))
            texts.append(f"## {title}\n\n{table(list(accelerator.COLUMNS), [])}{rows}\n")
            texts += map(details, of_sizes)
        elif sizes in MISSING:
            texts.append(f"## {title}\n\n{MISSING[sizes]}")
    return "\n".join(texts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
