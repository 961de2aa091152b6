"""Measures the cost of experts, of recorded routes and of their replay; prints a Markdown table.

    python -m benchmarks.moe [--rounds=20] [--rows=64] [--width=128] [--json=out.json]
    python -m benchmarks.moe --torch_python=/path/to/venv/bin/python

The model is that of configs/quickstart_moe.py: 8 experts, 2 a token, and a shared one. The dense
model has the MLP that a token uses there, and so as many parameters a token. `--width` is the
width of both. The sampler is W8A8, the learner float32. Each program takes its turn, and times are
medians. `decode` is a call of the decode program, divided by its steps; `rollout` adds prefill
and the host; `update` is one update of --rows sequences.

With --torch_python a Qwen3-MoE of 8 experts and the dense model samples by this engine and by
transformers' generate(), see `speed` of benchmarks.rollout.
"""

import argparse
import json
from typing import Any

from ml_collections import ConfigDict

from benchmarks import arguments, numerics, rollout
from configs import quickstart_moe
from jaxrl_tis.runtime import cli

PARTS = "decode", "rollout", "update"
# Line of the table: part, the two programs, and the most that the ratio is to be.
LINES = (
    ("experts", "decode", "none", "dense", 1.5),
    ("experts", "update", "none", "dense", 1.5),
    ("recorded routes", "decode", "recorded", "none", 1.02),
    ("recorded routes", "rollout", "recorded", "none", 1.02),
    ("replay (r3)", "update", "r3", "recorded", 1.03),
)
PROGRAMS = "dense", "none", "recorded", "r3"


def config_of(program: str, width: int, new_tokens: int) -> ConfigDict:
    """Returns the configuration of a row of PROGRAMS."""
    c = quickstart_moe.get_config("r3" if program == "r3" else "none")
    c.rollout.max_new_tokens = new_tokens
    c.engine.record_routes = program in ("recorded", "r3")
    m, scale = c.model, width // c.model.embed_dim
    m.embed_dim, m.num_heads, m.num_kv_heads = width, scale * m.num_heads, scale * m.num_kv_heads
    m.expert_dim, m.shared_expert_dim = scale * m.expert_dim, scale * m.shared_expert_dim
    if program == "dense":
        m.mlp_dim = m.experts_per_token * m.expert_dim + m.shared_expert_dim
        m.num_experts = 0
    return c


def table(found: dict[tuple[str, str], float], tokens: dict[str, int]) -> str:
    """Returns the Markdown table of the ratios, with microseconds a token."""
    lines = ["| cost of | part | µs a token | without | ratio | target |", "|---|---|---|---|---|---|"]
    for cost, part, program, other, target in LINES:
        times = [1e6 * found[part, name] / tokens[part] for name in (program, other)]
        cells = [cost, part, *(f"{t:.2f}" for t in times), f"{times[0] / times[1]:.3f}", f"{target:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 128")
    parser.add_argument("--new", type=int, default=24, help="sampled tokens of a sequence")
    parser.add_argument("--torch_python", default="")
    parser.add_argument("--json", default="")
    args = arguments.parse(parser, rounds=1, rows=8, new=4)
    out: dict[str, Any]
    if args.torch_python:
        argv = dict(torch_python=args.torch_python, batches=str(args.rows), length=64, new=64,
                    rounds=args.rounds, only="")
        out = {shape: rollout.speed(argparse.Namespace(shape=shape, **argv)) for shape in ("moe", "dense")}
    else:
        configs = {name: config_of(name, args.width, args.new) for name in PROGRAMS}
        length = configs["dense"].task.max_prompt_tokens + args.new
        found = numerics.measure(configs, args.rounds, args.rows, PARTS)
        tokens = {"decode": args.rows, "rollout": args.rows * args.new, "update": args.rows * length}
        print(table(found, tokens))
        out = {f"{part} {name}": seconds for (part, name), seconds in found.items()}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    cli.run(main)
