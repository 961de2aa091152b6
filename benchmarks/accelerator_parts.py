"""The measurements of benchmarks/accelerator.py, which runs each in a process of its own.

Each part is a generator of its result so far. The last result is the whole one, and a part that is
stopped keeps the results before. benchmarks/accelerator_schema.json describes them.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from importlib import metadata
from typing import Any

import jax
import numpy as np

from benchmarks import accelerator_checks, grpo_step, kernels, model, peaks
from configs import quickstart as quickstart_config
from jaxrl_tis import build
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.gate import report
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.record import metrics

ROOT = pathlib.Path(__file__).parents[1]
SHAPE = ROOT / "configs" / "shapes" / "Qwen2.5-0.5B-Instruct.json"
FORMATS = {"bfloat16": "none", "W8A8": "w8a8"}  # of the sampler -> engine.quantization
QUICKSTART = {"steps": 30, "eval.every": 30}
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the parts.

    Attributes:
      name: of these sizes, for the report.
      description: of the model and the step, for the page.
      step: model and batch of the GRPO step; the other parts have the same model.
      batches: sequences that decode together.
      decode_tokens: prompt tokens, and sampled tokens, of a sequence.
      check_tokens: tokens of the compared logits.
      head_vocab: columns of the output head in the checks.
      gate_prompts: prompts of the gate, with 8 samples each.
      matrix: width of the timed matrix product.
      rounds: repetitions of each timed part.
      quickstart: fields of its config.
      copied: float32 numbers of the timed copy, more than any cache holds.
    """

    name: str
    description: str
    step: model.Sizes
    batches: tuple[int, ...]
    decode_tokens: int
    check_tokens: int
    head_vocab: int
    gate_prompts: int
    matrix: int
    rounds: int
    quickstart: Mapping[str, Any] = dataclasses.field(default_factory=QUICKSTART.copy)
    copied: int = 2**26


SMOKE = Sizes(
    "smoke", "1 layer, width 32, vocabulary 1,024", model.TINY, batches=(1, 2, 4), decode_tokens=16,
    check_tokens=4, head_vocab=64, gate_prompts=16, matrix=32, rounds=1,
    quickstart={
        "steps": 3, "eval.every": 3, "eval.prompts": 8, "warmup.steps": 2, "rollout.prompts": 16,
        "model.num_layers": 1,
    },
    copied=1024,
)


def sizes(is_smoke: bool = False) -> Sizes:
    """Returns the sizes for this device. A CPU gets the model of the learner's benchmarks, a quarter
    of the tokens and prompts, and smaller matrices. Other devices get the full sizes."""
    if is_smoke:
        return SMOKE
    if jax.default_backend() == "cpu":
        return Sizes(
            "cpu", "4 layers, width 256, vocabulary 49,152", model.SMALL, (1, 32, 128), 32, 16, 4096,
            16, 2048, 2,
        )
    shape = ModelConfig.from_hf(json.loads(SHAPE.read_text()))
    step = model.Sizes(
        shape, prompt_tokens=256, new_tokens=256, dtype="bfloat16", remat="dots"
    )
    return Sizes(
        "full", "Qwen2.5-0.5B's shape", step, (1, 32, 128), 128, 64, 151_936, 64, 8192, 3
    )


def device(of: Sizes) -> Iterator[Result]:
    """Yields the device, its driver, the versions, its published rates and measured rates."""
    first = jax.devices()[0]
    stats, peak = first.memory_stats() or {}, peaks.PEAKS.get(first.device_kind)
    found = {
        "platform": first.platform, "kind": first.device_kind, "count": jax.device_count(),
        "memory_bytes": stats.get("bytes_limit"), "runtime": first.client.platform_version,
        "driver": nvidia_driver(), "processor": processor(), "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {
            package: metadata.version(package) for package in ("jax", "jaxlib", "flax", "numpy")
        },
        "sizes": of.name, "model": of.description, "peak": peak and peak._asdict(),
        "matrix_rates": {},
    }
    yield found
    seconds, moved = kernels.seconds(lambda x: x + 1.0, (jax.numpy.ones(of.copied),), 5)
    found["copy_rate"] = moved / seconds
    for dtype in ("float32", "bfloat16", "int8"):
        found["matrix_rates"][dtype] = model.matrix_rate(dtype, of.matrix)
        yield found


def nvidia_driver() -> str | None:
    """Returns the version of NVIDIA's driver, None without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def processor() -> str:
    """Returns the name of the host's processor."""
    path = pathlib.Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def correctness(of: Sizes) -> Iterator[Result]:
    """Yields the errors of logits and kernels against float64 on the host."""
    found = {"kernels": {}, "logits": accelerator_checks.logits(of.step.model, of.check_tokens)}
    yield found
    width = -(-of.step.model.embed_dim // 128) * 128
    for name, case in accelerator_checks.cases(width, of.head_vocab).items():
        found["kernels"][name] = accelerator_checks.check(case)
        yield found


def gate(of: Sizes) -> Iterator[Result]:
    """Yields the gate's measures of samplers in two formats, with the quickstart's random model."""
    found = {}
    for name, quantization in FORMATS.items():
        config = quickstart_config.get_config()
        config.engine.update(
            quantization=quantization, dtype="bfloat16", cache_dtype="bfloat16"
        )
        setup = build.build(config.lock())
        measured = report.measure(setup, initial_params(setup.training), of.gate_prompts)
        found[name] = {measure: measured["total"][measure] for measure in report.MEASURES} | {
            "largest": measured["largest"], "failures": report.failures(measured),
        }
        yield found


def decode(of: Sizes) -> Iterator[Result]:
    """Yields tokens/s of decoding, the scheduler included and prefill excluded.

    The bytes of a token are the least that must move: the served weights once for all sequences,
    and the keys and values of the sequence at its mean length. The programs of all engines are
    compiled at the same time, before the first is timed.
    """
    shape, length = of.step.model, of.decode_tokens
    params = transformer.init(shape, jax.random.key(0))
    found: dict[str, Any] = {"tokens": length, "rows": []}
    peak = peaks.PEAKS.get(jax.devices()[0].device_kind)
    cases = list(itertools.product(FORMATS, of.batches))
    engines = [
        Engine(shape, model.engine_config(
            "bfloat16", slots=batch, max_length=2 * length, steps=length // 8,
            prefill_batch=min(batch, 32), quantization=FORMATS[name],
        ))
        for name, batch in cases
    ]

    def compiled(engine: Engine) -> Any:
        served = engine.load(params)
        decode_rates(engine, served, length, 1)
        return served

    with futures.ThreadPoolExecutor(len(engines)) as pool:
        of_engines = list(pool.map(compiled, engines))
    for (name, batch), engine, served in zip(cases, engines, of_engines, strict=True):
        rate = statistics.median(decode_rates(engine, served, length, of.rounds))
        bytes_per_token = weight_bytes(served) / batch + kv_bytes(shape, length + length // 2)
        found["rows"].append({
            "format": name, "batch": batch, "tokens_per_s": rate,
            "bytes_per_token": bytes_per_token,
            "bandwidth_share": peaks.share(rate * bytes_per_token, peak and peak.memory),
        })
        yield found


def decode_rates(engine: Engine, served: Any, length: int, rounds: int) -> list[float]:
    """Returns the sampled tokens per second of all slots after the first call of each round."""
    scheduler, rates = Scheduler(engine, served), []
    shape = engine.slots, length
    prompts = np.random.default_rng(0).integers(0, 1000, shape).astype(np.int32)
    for number in range(rounds):
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(f"{number}/{i}", prompt, 0, SamplingParams(max_tokens=length)))
        scheduler.step()
        before, start = scheduler.stats.tokens, time.perf_counter()
        while scheduler.pending:
            scheduler.step()
        rates.append((scheduler.stats.tokens - before) / (time.perf_counter() - start))
        scheduler.release_cache()
    return rates


def weight_bytes(served: dict[str, Any]) -> int:
    """Returns the bytes of the served weights that a decode step reads: all but a token table in a
    model that also has a head."""
    read = {name: x for name, x in served.items() if name != "embed" or "head" not in served}
    return sum(x.nbytes for x in jax.tree.leaves(read))


def kv_bytes(shape: ModelConfig, length: int) -> int:
    """Returns the bytes of so many positions of keys and values in bfloat16."""
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * length


def step(of: Sizes) -> Iterator[Result]:
    """Yields seconds and model FLOPs of a GRPO step with a W8A8 sampler, fused and not.

    A fused update also computes logp_old, so nothing is scored before it. `mfu` and `update_mfu`
    are shares of the published rate of bfloat16. `matrix_share` is the share of the matrix rate that
    this process measured in the learner's dtype.
    """
    rate = model.matrix_rate(of.step.dtype, of.matrix)
    found = {
        "rows": of.step.rows, "prompt_tokens": of.step.prompt_tokens,
        "new_tokens": of.step.new_tokens, "dtype": of.step.dtype, "matrix_rate": rate,
    }
    peak = peaks.PEAKS.get(jax.devices()[0].device_kind)
    for name, fuse in {"fused": "auto", "separate": "never"}.items():
        run, parts = model.Step(*model.setup(of.step, fuse_old_logp=fuse)), []
        for number in range(of.rounds + 2):  # two compile
            parts.append(grpo_step.step_seconds(run, 1 + 10 * number))
        del run
        seconds = {
            part: statistics.median(x[part] for x in parts[2:]) for part in parts[0]
        }
        flops = model.flops(of.step, is_fused=name == "fused")
        whole, total = sum(seconds.values()), sum(flops.values())
        found[name] = {
            "seconds": seconds | {"step": whole}, "model_flops": flops | {"step": total},
            "mfu": peaks.share(total / whole, peak and peak.bfloat16),
            "update_mfu": peaks.share(flops["update"] / seconds["update"], peak and peak.bfloat16),
            "matrix_share": total / whole / rate,
        }
        yield found


def sync(of: Sizes) -> Iterator[Result]:
    """Yields seconds and bytes of a weight sync: float32 parameters of the learner to those of a
    sampler on the same device, quantized there."""
    shape, found = of.step.model, {}
    params = transformer.init(shape, jax.random.key(0))
    for name, quantization in FORMATS.items():
        engine = Engine(shape, model.engine_config(
            "bfloat16", slots=8, max_length=256, quantization=quantization
        ))
        size = sum(x.nbytes for x in jax.tree.leaves(engine.load(params)))  # compiles
        times = [grpo_step.timed(engine.load, params)[0] for _ in range(of.rounds + 2)]
        found[name] = {"seconds": statistics.median(times), "bytes": size}
        yield found


def quickstart(of: Sizes) -> Iterator[Result]:
    """Yields seconds and accuracies of a run of the quickstart. This process leaves the device to the
    run."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "jaxrl_tis.main", "--config=configs/quickstart.py",
             f"--workdir={folder}/run", *(f"--config.{n}={x}" for n, x in of.quickstart.items())],
            cwd=ROOT, stdout=sys.stderr, check=True,
        )
        seconds, lines = time.monotonic() - start, metrics.read(f"{folder}/run")
    accuracies = [x["eval/greedy_accuracy"] for x in lines if x["phase"] == "eval"]
    steps = [x["time/step_s"] for x in lines if x["phase"] == "train"]
    yield {
        "steps": len(steps), "seconds": seconds,
        "step_seconds": statistics.median(steps[len(steps) // 3 :]),
        "first_accuracy": accuracies[0], "last_accuracy": accuracies[-1],
    }


PARTS = {
    "device": device, "correctness": correctness, "gate": gate, "decode": decode, "step": step,
    "sync": sync, "quickstart": quickstart,
}
