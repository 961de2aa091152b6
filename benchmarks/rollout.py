"""Measures the speed of rollouts, compared with transformers and with static batching.

    python -m benchmarks.rollout --torch_python=/path/to/venv/bin/python --json=out.json

`--parts` selects among these parts:

speed: a model with random weights, shaped as SmolLM2-135M or as `--shape`, compared with
  transformers' generate() in the same run. The other interpreter needs torch and transformers;
  without it only this engine runs.
  Each engine has its own process, which compiles, warms up and waits. Then the engines take turns.
  A round samples `--new` tokens for each of `--prompts` prompts of `--length` tokens at temperature
  1, prefill included. "host" is the scheduler's share of the time. Our engine runs on one simulated
  device with all cores and, as "by core", on one device per core, each with its part of the slots.
oversubscribed: 256 requests of 8 to 512 new tokens, log-uniform, over 32 `--slots` in bfloat16, as the
  scheduler runs them, reading tokens at once or a call late (`async_scheduling`), and in static
  batches of 32: the ratio of the median times, of the decode steps, and that of an ideal first-come schedule
  of the same lengths. That depends on the draw:
  2.47 to 3.35 over 12 seeds, 2.94 on average over 200 and for the seed taken here. `--model`
  chooses between a small model and the SmolLM2-shaped one, of which a round takes minutes.
shared: pages and prefilled tokens of 16 samples of one prompt, compared with one sample.
overlap: tokens/s of the small model in bfloat16 over 32 slots, and the host's share, where tokens
  are read at once and a call late; the two take turns. 64 requests of 64 tokens each, by the decode
  steps of a call; and 128 that a stop id ends, after 64 tokens on average (of 512 in the vocabulary
  8 are stop ids).
prefill: milliseconds of a prefill call of the SmolLM2-shaped model in bfloat16 with room for 8
  prompts of `--length` tokens, by the number of prompts.
teacher: milliseconds of a decode step of the small model in bfloat16 over `--slots` slots, prefill included, with
  a teacher of its size or of twice the width, in turns with each alone.
drafts: tokens/s and acceptance of drafts with the SmolLM2-shaped model (W8A8). Sampling is greedy:
  random weights then repeat themselves, and drafts are accepted.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import arguments
from jaxrl_tis.runtime import cli

SHAPE = dict(vocab=49152, dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536)
SMALL = dict(vocab=4096, dim=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=1024)
TINY = SMALL | dict(dim=64, layers=1, heads=2, kv_heads=1, head_dim=32, mlp=64)
MODELS = {"small": SMALL, "smollm2": SHAPE, "tiny": TINY}
# Qwen3-MoE: 8 layers of 8 experts, 2 a token. The dense model has as many parameters a token.
MOE = dict(vocab=8192, dim=512, layers=8, heads=8, kv_heads=4, head_dim=64)
SHAPES: dict[str, dict[str, Any]] = MODELS | {
    "moe": MOE | dict(mlp=512, experts=8, per_token=2), "dense": MOE | dict(mlp=1024),
}
BF16: dict[str, Any] = dict(dtype="bfloat16", cache_dtype="bfloat16")
OURS: dict[str, dict[str, Any]] = {
    "ours f32": dict(dtype="float32", cache_dtype="float32"),
    "ours bf16": BF16,
    "ours w8a8": BF16 | dict(quantization="w8a8"),
    "ours bf16 by core": BF16 | dict(devices=os.cpu_count()),
    "ours w8a8 by core": BF16 | dict(quantization="w8a8", devices=os.cpu_count()),
}
THEIRS = {"transformers f32": "float32", "transformers bf16": "bfloat16"}


def serve(round_of_tokens) -> None:
    """Runs a round for every line on stdin, in a child process; prints tokens/s and the host's
    share of the time."""
    round_of_tokens()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        tokens, host = round_of_tokens()
        print(tokens / (time.perf_counter() - start), host, flush=True)


def serve_ours(options: dict, shape: dict, prompts: int, length: int, new: int) -> None:
    devices = math.gcd(options.pop("devices", 1), prompts)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import numpy as np

    from jaxrl_tis import sharding
    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    engine, params = random_engine(
        shape, slots=prompts, max_length=length + new, steps=8, prefill_batch=prompts,
        page_size=64, layout=sharding.layout((devices, 1, 1), sharding.SERVE_RULES), **options,
    )
    scheduler = Scheduler(engine, params)
    rng = np.random.default_rng(0)
    count = iter(range(10**9))

    def round_of_tokens():
        for _ in range(prompts):
            prompt = rng.integers(0, shape["vocab"], length).astype(np.int32)
            scheduler.add(Request(str(next(count)), prompt, 0, SamplingParams(max_tokens=new)))
        tokens = 0
        while scheduler.pending:
            tokens += sum(len(t.tokens) for t in scheduler.step())
        return tokens, scheduler.stats.host_share

    serve(round_of_tokens)


def serve_transformers(dtype: str, shape: dict, prompts: int, length: int, new: int) -> None:
    import torch
    import transformers

    fields = dict(
        vocab_size=shape["vocab"], hidden_size=shape["dim"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"], intermediate_size=shape["mlp"], tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    if "experts" in shape:
        config = transformers.Qwen3MoeConfig(
            num_experts=shape["experts"], num_experts_per_tok=shape["per_token"],
            moe_intermediate_size=shape["mlp"], norm_topk_prob=True, **fields,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model = model.to(getattr(torch, dtype)).eval()

    def round_of_tokens():
        ids = torch.randint(0, shape["vocab"], (prompts, length))
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
        )
        return out[:, length:].numel(), 0.0

    with torch.inference_mode():
        serve(round_of_tokens)


def start(python: str, kind: str, name: str, shape: str, sizes: list[int]) -> subprocess.Popen:
    argv = [python, "-m", "benchmarks.rollout", "--serve", kind, name, shape, *map(str, sizes)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    if child.stdout is None or child.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{name} did not start; run by hand: {' '.join(argv)}")
    print(f"  {name} is ready", file=sys.stderr, flush=True)
    return child


def measure(children: dict[str, subprocess.Popen], rounds: int) -> dict[str, list[float]]:
    rates = {name: [] for name in children}
    for _ in range(rounds):
        for name, child in children.items():
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            rate, host = map(float, child.stdout.readline().split())
            rates[name].append(rate)
            print(f"  {name}: {rate:.0f} tokens/s, host {host:.1%}", file=sys.stderr, flush=True)
    return rates


def speed(args: argparse.Namespace) -> dict:
    out = {}
    for batch in map(int, args.batches.split(",")):
        sizes = [batch, args.length, args.new]
        plan = [(name, sys.executable, "ours") for name in OURS]
        plan += [(name, args.torch_python, "theirs") for name in THEIRS if args.torch_python]
        wanted = args.only.split(",") if args.only else [name for name, *_ in plan]
        children = {
            name: start(python, kind, name, args.shape, sizes)
            for name, python, kind in plan if name in wanted
        }
        rates = measure(children, args.rounds)
        for child in children.values():
            if child.stdin is not None:
                child.stdin.close()
            child.wait()
        out[f"batch {batch}"] = rates
        for name, values in rates.items():
            shown = " ".join(f"{v:.0f}" for v in values)
            middle = statistics.median(values)
            print(f"batch {batch:3d}  {name:18s} {middle:7.0f} tokens/s  ({shown})")
    return out


def random_engine(shape: dict, layout=None, teacher: dict | None = None, **options):
    """An engine of a model of this shape, with a teacher of another or none, and its parameters, which are
    random."""
    import jax

    from jaxrl_tis.engine.config import EngineConfig
    from jaxrl_tis.engine.engine import Engine
    from jaxrl_tis.engine.fusion import Pair
    from jaxrl_tis.models import transformer

    config, theirs = config_of(shape), config_of(teacher) if teacher else None
    engine = Engine(config, EngineConfig(**options), layout, theirs)
    drawn = lambda config: jax.jit(lambda: transformer.init(config, jax.random.key(0)))()
    params = engine.load(drawn(config))
    return engine, Pair(params, engine.load_teacher(drawn(theirs))) if theirs else params


def config_of(shape: dict):
    from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig

    moe = None
    if "experts" in shape:
        moe = MoeConfig(shape["experts"], shape["per_token"], shape["mlp"], "softmax")
    return ModelConfig(
        family="qwen3_moe" if moe else "llama", vocab_size=shape["vocab"], embed_dim=shape["dim"],
        num_layers=shape["layers"], num_heads=shape["heads"], num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"], mlp_dim=shape["mlp"], rope=RopeConfig("default", 1e5),
        max_position=2048, norm_eps=1e-5, qkv_bias=False, qk_norm=moe is not None, tie_embeddings=True, moe=moe,
    )


def oversubscribed(args: argparse.Namespace) -> dict:
    import numpy as np

    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    slots, count = args.slots, 8 * args.slots
    engine, params = random_engine(
        MODELS[args.model], slots=slots, max_length=16 + 512, steps=4, prefill_batch=2,
        page_size=16, **BF16,
    )
    rng = np.random.default_rng(3)
    lengths = np.exp(rng.uniform(np.log(8), np.log(513), count)).astype(int)
    prompts = rng.integers(0, 4096, (count, 16)).astype(np.int32)
    ends = np.zeros(slots)
    for length in lengths:
        ends[np.argmin(ends)] += length
    static_steps = lengths.reshape(-1, slots).max(axis=1).sum()
    schedulers = {
        "static": Scheduler(engine, params), "continuous": Scheduler(engine, params),
        "overlap": Scheduler(engine, params, async_scheduling=True),
    }

    def seconds(batches, scheduler, tag):
        start = time.perf_counter()
        for batch in batches:
            for i in batch:
                sampling = SamplingParams(max_tokens=int(lengths[i]))
                scheduler.add(Request(f"{tag}/{i}", prompts[i], 0, sampling))
            while scheduler.pending:
                scheduler.step()
        scheduler.release_cache()
        return time.perf_counter() - start

    static, continuous = np.arange(count).reshape(-1, slots), [np.arange(count)]
    for scheduler in schedulers.values():
        seconds(static[:1], scheduler, "warm")
    times, stats = {name: [] for name in schedulers}, {}
    for round_index in range(args.rounds):
        for name, scheduler in schedulers.items():
            before = dataclasses.replace(scheduler.stats)
            batches = static if name == "static" else continuous
            times[name].append(seconds(batches, scheduler, f"{name}{round_index}"))
            stats[name] = scheduler.stats.since(before)
            shown = f"{times[name][-1]:.2f} s, host {stats[name].host_share:.1%}"
            print(f"  {name}: {shown}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    found = {
        "ratio": medians["static"] / medians["continuous"],
        "ratio of overlap": medians["static"] / medians["overlap"],
        "ratio of steps": stats["static"].slot_steps / stats["continuous"].slot_steps,
        "ideal": static_steps / ends.max(), "occupancy": stats["continuous"].occupancy,
    }
    print(
        f"{count} requests, {slots} slots: static {medians['static']:.1f} s, continuous "
        f"{medians['continuous']:.1f} s, with overlap {medians['overlap']:.1f} s; "
        + ", ".join(f"{k} {v:.2f}" for k, v in found.items())
    )
    return times | found


def shared(args: argparse.Namespace) -> dict:
    import numpy as np

    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    engine, params = random_engine(
        MODELS[args.model], slots=16, max_length=512 + 2, steps=1, prefill_batch=1, page_size=16
    )
    out = {}
    for length in (512, 500):
        prompt = np.arange(length, dtype=np.int32)
        for group in (1, 16):
            scheduler = Scheduler(engine, params)
            for i in range(group):
                scheduler.add(Request(str(i), prompt, 0, SamplingParams(max_tokens=2)))
            scheduler.step()
            pages, prefilled = scheduler.pages[0].used, scheduler.stats.prefilled
            out[f"{length} tokens, {group} samples"] = {"pages": pages, "prefilled": prefilled}
            print(
                f"prompt of {length} tokens, {group:2d} samples: {pages} pages, {prefilled} tokens "
                "prefilled"
            )
            scheduler.pause("abort")
    return out


def overlap(args: argparse.Namespace) -> dict:
    import numpy as np

    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    out, prompts = {}, np.random.default_rng(0).integers(0, 512, (128, 16)).astype(np.int32)
    by_length: dict[str, Any] = dict(count=64, vocab=4096, sampling=SamplingParams(max_tokens=64))
    by_stop = SamplingParams(max_tokens=256, stop_ids=tuple(range(8)))
    kinds: dict[str, dict[str, Any]] = {
        f"{steps} steps a call": dict(steps=steps, **by_length) for steps in (1, 4, 8)
    }
    kinds["4 steps a call, ended by stops"] = dict(
        steps=4, count=128, vocab=512, sampling=by_stop
    )
    for kind, of in kinds.items():
        engine, params = random_engine(
            MODELS[args.model] | dict(vocab=of["vocab"]), slots=32,
            max_length=16 + of["sampling"].max_tokens,
            steps=of["steps"], prefill_batch=32, page_size=16, **BF16,
        )
        schedulers = {
            name: Scheduler(engine, params, async_scheduling=is_late)
            for name, is_late in (("at once", False), ("a call late", True))
        }
        rates, shares = ({name: [] for name in schedulers} for _ in range(2))
        for round_index in range(args.rounds + 1):  # the first compiles
            for name, scheduler in schedulers.items():
                before, start = dataclasses.replace(scheduler.stats), time.perf_counter()
                for i, prompt in enumerate(prompts[: of["count"]]):
                    request = Request(f"{round_index}/{i}", prompt, 0, of["sampling"])
                    scheduler.add(request)
                while scheduler.pending:
                    scheduler.step()
                seconds, stats = time.perf_counter() - start, scheduler.stats.since(before)
                rates[name].append(stats.tokens / seconds)
                shares[name].append(stats.host_share)
        median = lambda values: statistics.median(values[1:])
        for name in schedulers:
            found = {"tokens/s": median(rates[name]), "host": median(shares[name])}
            out[f"{kind}, read {name}"] = found
            rate, host = found["tokens/s"], found["host"]
            print(f"{kind}, read {name}: {rate:.0f} tokens/s, host {host:.1%}")
    return out


def prefill(args: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from jaxrl_tis.engine.protocol import Chunk

    engine, params = random_engine(
        SHAPES[args.shape], slots=8, max_length=args.length + 16, prefill_batch=8, page_size=16, **BF16
    )
    state, pages = engine.init_state(), engine.pages_per_slot
    times = {count: [] for count in (1, 2, 4, 8)}
    for _ in range(args.rounds + 1):  # the first compiles
        for count in times:
            chunks = [
                Chunk(0, np.arange(args.length, dtype=np.int32), 0,
                      list(range(1 + i * pages, 1 + (i + 1) * pages)))
                for i in range(count)
            ]
            start = time.perf_counter()
            state, _ = jax.block_until_ready(engine.prefill(params, state, chunks))
            times[count].append(1e3 * (time.perf_counter() - start))
    found = {f"{count} prompts": statistics.median(ms[1:]) for count, ms in times.items()}
    shown = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items())
    print(f"prefill of {args.length} tokens: {shown}")
    return found


def drafts(args: argparse.Namespace) -> dict:
    import numpy as np

    from jaxrl_tis.engine.drafts import Drafts
    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    out = {}
    for slots in (1, 4, 16):
        engine, params = random_engine(
            SHAPES[args.shape], slots=slots, max_length=64 + args.new, steps=8, prefill_batch=slots,
            page_size=64, **OURS["ours w8a8"],
        )
        for length in (0, 1, 3, 7):
            # No number of rows is too large: drafts are as long as they may be.
            guesses = Drafts(slots, length, free_batch_rows=10**6) if length else None
            scheduler = Scheduler(engine, params, drafts=guesses)
            for round_index in range(2):  # the first compiles
                before, start = dataclasses.replace(scheduler.stats), time.perf_counter()
                for i in range(slots):
                    prompt = np.arange(i, i + 64, dtype=np.int32)
                    sampling = SamplingParams(temperature=0.0, max_tokens=args.new)
                    scheduler.add(Request(f"{round_index}/{i}", prompt, 0, sampling))
                while scheduler.pending:
                    scheduler.step()
                seconds, stats = time.perf_counter() - start, scheduler.stats.since(before)
            found = {
                "tokens/s": stats.tokens / seconds,
                "acceptance": stats.accepted / max(stats.verified, 1),
            }
            out[f"{slots} slots, drafts of {length}"] = found
            shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
            print(f"{slots:2d} slots, drafts of {length}: {shown}")
    return out


def teacher(args: argparse.Namespace) -> dict:
    import numpy as np

    from jaxrl_tis.engine.records import Request, SamplingParams
    from jaxrl_tis.engine.scheduler import Scheduler

    small = MODELS[args.model]
    large = small | {name: 2 * small[name] for name in ("dim", "heads", "kv_heads", "mlp")}
    kinds = {
        "policy": (small, None), "larger model": (large, None),
        "policy with a teacher of its size": (small, small), "policy with the larger model": (small, large),
    }
    sizes = dict(slots=args.slots, max_length=16 + args.new, steps=8, prefill_batch=args.slots, page_size=16)
    prompts = np.random.default_rng(0).integers(0, 512, (args.slots, 16)).astype(np.int32)
    schedulers = {
        name: Scheduler(*random_engine(shape, teacher=other, **sizes, **BF16))
        for name, (shape, other) in kinds.items()
    }
    times = {name: [] for name in kinds}
    for round_index in range(args.rounds + 1):  # the first compiles
        for name, scheduler in schedulers.items():
            sampling = SamplingParams(max_tokens=args.new, alpha=0.5 * (kinds[name][1] is not None))
            start = time.perf_counter()
            for i, prompt in enumerate(prompts):
                scheduler.add(Request(f"{round_index}/{i}", prompt, 0, sampling))
            while scheduler.pending:
                scheduler.step()
            times[name].append(1e3 * (time.perf_counter() - start) / args.new)
    found = {name: statistics.median(ms[1:]) for name, ms in times.items()}
    for name, ms in found.items():
        print(f"{name}: {ms:.1f} ms a step")
    return found


PARTS = {
    "speed": speed, "teacher": teacher, "oversubscribed": oversubscribed, "shared": shared, "prefill": prefill,
    "overlap": overlap, "drafts": drafts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--serve", nargs=6)
    parser.add_argument("--torch_python", default="")
    parser.add_argument("--batches", default="64,16,1")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", choices=MODELS, default="small", help="for oversubscribed, shared, overlap, teacher"
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="for speed, prefill, drafts")
    parser.add_argument("--slots", type=int, default=32, help="for oversubscribed, teacher")
    parser.add_argument("--only", default="", help="engines, separated by commas")
    parser.add_argument("--json", default="")
    args = arguments.parse(
        parser, batches="2", length=16, new=8, rounds=1, model="tiny", shape="tiny", slots=4
    )
    if args.serve:
        kind, name, shape, *sizes = args.serve
        sizes = list(map(int, sizes))
        if kind == "ours":
            return serve_ours(OURS[name], SHAPES[shape], *sizes)
        return serve_transformers(THEIRS[name], SHAPES[shape], *sizes)
    machine = platform.processor() or platform.machine()
    out: dict[str, Any] = {"machine": machine, "cores": os.cpu_count()}
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts={args.parts}: choose of {', '.join(PARTS)}")
    for part in parts:
        arguments.say(part)
        out[part] = PARTS[part](args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    cli.run(main)
