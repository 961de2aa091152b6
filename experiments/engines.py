"""Measures the gap of vLLM, and of this project's server, to the learner at SmolLM2-135M's weights.

Both samplers answer the same requests over HTTP, in the same formats, 16 at once. The learner scores
the answers in float32 and in bfloat16. What the sampler's own batching does is measured without a
learner, between two log-probs by the same sampler:

  repeat  the same requests and seeds again
  alone   the same requests and seeds one at a time
  cache   the next token after long prompts, read again from the prefix cache
  chunks  the next token after long prompts, read in chunks by another start of the server

Then runs of `configs/fig_engines.py` train with each. `./launch/figures.sh engines` does all of it, on
CPUs without AVX-512 and AMX for hours. vLLM's float8 cache needs AVX-512, its float8 weights AMX.

Examples:

    python -m experiments.engines .venv-vllm
    python -m experiments.engines .venv-vllm new/figures
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors

from configs import fig_engines
from experiments import parts, records
from jaxrl_tis import cli_flags, models
from jaxrl_tis.build import Setup, build
from jaxrl_tis.diagnostics import attribution
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.external import fleet
from jaxrl_tis.external.protocol import Answer, Kind
from jaxrl_tis.gate import engine, ladder, report
from jaxrl_tis.learner import scoring
from jaxrl_tis.learner.state import initial_policy
from jaxrl_tis.report.plots import COLORS
from jaxrl_tis.runtime import cli

CONFIG = "configs/smollm2_135m.py"
NAME = "engines_gap.jsonl"  # a line for each sampler and format
# int8: W8A8 products, float8: keys and values in float8_e4m3, the rest in bfloat16.
FORMATS = ("float32", "bfloat16", "int8", "float8")
SAMPLERS = ("vLLM", "own")
LEARNERS = ("float32", "bfloat16")
CONDITIONS = ("repeat", "alone", "cache", "chunks")
AT_ONCE = 16
PROMPTS = 16  # groups of eight
PAIRED = 32  # answers that are sampled again
LONG, LONG_COUNT, CHUNK, TOP = 200, 32, 64, 5  # tokens, prompts, tokens, likely tokens
WORK = pathlib.Path("runs/figures/engines")
START_S = 600.0  # in which a server answers
MEASURES = ("log_ratio_abs_mean", "token_fraction")  # of a bucket of entropy or position
VECTORS = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # flag of a CPU: its name
BUCKETS = {"entropy": "entropy, nats, from", "position": "position in the answer, from"}

Line = Mapping[str, Any]
Found = tuple[Sequence[Line], parts.Arms]


# Servers


def quantized(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Writes a model's folder with int8 weights, one scale for each output, in the layout of
    compressed-tensors, by which vLLM also quantizes activations token by token."""
    out.mkdir(parents=True)
    tensors = {}
    for name, x in safetensors.load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
            tensors[f"{name}_scale"], x = scale, np.rint(x / scale).astype(np.int8)
        tensors[name] = x
    safetensors.save_file(tensors, out / "model.safetensors", {"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    of_linear = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"all": of_linear},
    }
    (out / "config.json").write_text(json.dumps(config))


def folder_of(form: str) -> pathlib.Path:
    """Returns the folder of the model that vLLM serves in a format; it is made once."""
    whole, small = WORK / "model", WORK / "model-int8"
    if not whole.exists():
        config, params = models.load(cli_flags.parsed([f"--config={CONFIG}"]).model.path)
        models.save(whole, config, params, with_head=True)
    if form == "int8" and not small.exists():
        quantized(whole, small)
    return small if form == "int8" else whole


def token() -> pathlib.Path:
    """Returns the file of the token without which this project's server resets no cache."""
    path = WORK / "token"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex() + "\n")
    return path


def command(sampler: str, form: str, chunk: int, venv: str, port: int) -> list[str]:
    """Returns the command of a server that reads prompts in chunks of so many tokens, 0: whole."""
    dtype = "float32" if form == "float32" else "bfloat16"
    if sampler == "vLLM":
        return [
            "launch/vllm.sh", "serve", venv, str(folder_of(form)), str(port), "--dtype", dtype,
            "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", str(4 * AT_ONCE),
            "--block-size", "32", *(("--kv-cache-dtype", "fp8_e4m3") if form == "float8" else ()),
            *(("--max-num-batched-tokens", str(chunk)) if chunk else ()),
        ]
    fields = {
        "engine.quantization": "w8a8" if form == "int8" else "none", "engine.dtype": dtype,
        "engine.cache_dtype": "float8_e4m3fn" if form == "float8" else dtype,
        "engine.slots": AT_ONCE, "engine.prefill_chunk": chunk or 256, "task.max_prompt_tokens": LONG,
    }
    return [
        sys.executable, "-m", "jaxrl_tis.serve", f"--config={CONFIG}", f"--port={port}",
        f"--token_file={token()}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


@contextlib.contextmanager
def serving(words: Sequence[str], url: str, log: pathlib.Path) -> Iterator[None]:
    """Starts a server, waits until it answers, and ends it with all that it started.

    Raises:
      RuntimeError: it ended or did not answer; the message names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        server = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{words[0]} does not answer at {url}; its log is {log}")
            time.sleep(1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


# Measures


def measured(
    logp: np.ndarray, behav: np.ndarray, entropy: np.ndarray, mask: np.ndarray
) -> dict[str, float]:
    """Returns the measures of docs/gate.md, the mean |log ratio| of sequences, and the gap by the
    learner's entropy and by position. All arguments are [N,T]."""
    log_ratio = np.where(mask, np.float64(logp) - behav, 0.0)
    found = ladder.gap(logp, behav, mask)
    found["d_seq_mean"] = float(np.abs(log_ratio.sum(axis=1)).mean())
    buckets = _buckets(logp, behav, entropy, mask)
    for name, value in buckets.items():
        bucket, _, measure = name.removeprefix("mismatch/").partition("/")
        if measure in MEASURES and buckets[f"mismatch/{bucket}/token_fraction"] > 0:
            found[f"{bucket}/{measure}"] = float(value)
    return found


@jax.jit
def _buckets(logp, behav, entropy, mask):
    by_entropy = attribution.entropy_metrics(logp, behav, entropy, mask)
    return by_entropy | attribution.position_metrics(logp, behav, mask)


def difference(pairs: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]]) -> dict[str, float]:
    """Compares two log-probs of the same things, {thing: nats} on either side of a pair: what only one
    side has is left out."""
    found = np.concatenate(
        [[abs(one[key] - other[key]) for key in one if key in other] for one, other in pairs]
    )
    return {"count": len(found), "mean": float(found.mean()), "max": float(found.max())}


def prefix(one: Trajectory, other: Trajectory) -> tuple[dict, dict]:
    """Returns the log-probs of the tokens before two answers part, by position."""
    count = min(len(one.tokens), len(other.tokens))
    is_same = one.tokens[:count] == other.tokens[:count]
    shared = count if is_same.all() else int(is_same.argmin())
    first, second = (dict(enumerate(t.logp_behav[:shared].tolist())) for t in (one, other))
    return first, second


def likely(answer: Answer) -> dict[int, float]:
    """Returns the likely first tokens of an answer and their log-probs."""
    return dict(zip(answer.top_ids[0].tolist(), answer.top_logps[0].tolist(), strict=True))


def next_tokens(kind: Kind, name: str, requests: Sequence[Request]) -> list[dict[int, float]]:
    """Returns the log-probs of the likely tokens after each prompt, asked for one at a time."""
    one = dataclasses.replace(requests[0].sampling, max_tokens=1)
    ask = lambda r: kind.generate(f"{name}/{r.id}", r.prompt, one, None, TOP, None)
    return [likely(ask(r)) for r in requests]


@functools.cache
def learner(dtype: str) -> Setup:
    """Returns the run whose learner has this dtype."""
    config = cli_flags.parsed([f"--config={CONFIG}"])
    config.model.dtype, config.engine.slots = dtype, AT_ONCE
    config.rollout.engine_token_file = str(token())
    return build(config.lock())


def scored(setup: Setup, params: Any, rows: dict[str, np.ndarray]) -> dict[str, float]:
    micro, flat = setup.training.micro_batches(rows)
    of = scoring.make_score(setup.training.learner)(params, micro)
    return measured(flat(of["logp"]), rows["logp_behav"], flat(of["entropy"]), rows["mask"])


def cpu() -> str:
    """Returns the widest of VECTORS that this machine's cores have."""
    words = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    return next((name for flag, name in VECTORS.items() if flag in words), "other")


def line_of(sampler: str, form: str, venv: str, port: int) -> Line:
    """Starts a sampler twice and returns its line of the file NAME."""
    url, setup = f"http://127.0.0.1:{port}", learner("float32")
    wanted = report.requests(setup, PROMPTS)
    again = wanted[:PAIRED]
    long = engine.long_prompts(wanted[:: setup.config.rollout.group_size], LONG, LONG_COUNT)
    kind = fleet.connect(url, "vllm", setup.config.rollout)
    log = WORK / f"{sampler}-{form}.log"
    with serving(command(sampler, form, 0, venv, port), url, log):
        kind.facts()  # whose model requests name
        program = kind.numerics().program
        ask = engine.Sampler(setup, url, kind, None).ask
        answers = ask("run", wanted, AT_ONCE)
        repeated, alone = ask("repeat", again, AT_ONCE), ask("alone", again, 1)
        kind.reset_cache()
        miss, hit = (next_tokens(kind, name, long) for name in ("miss", "hit"))
    with serving(command(sampler, form, CHUNK, venv, port), url, log):
        kind.facts()
        chunked = next_tokens(kind, "chunks", long)
    together = answers[:PAIRED]
    pairs = {
        "repeat": [prefix(*x) for x in zip(together, repeated, strict=True)],
        "alone": [prefix(*x) for x in zip(together, alone, strict=True)],
        "cache": list(zip(miss, hit, strict=True)), "chunks": list(zip(miss, chunked, strict=True)),
    }
    rows, gap = setup.training.rows(answers), {}
    for dtype in LEARNERS:
        other = learner(dtype)
        gap[dtype] = scored(other, initial_policy(other.training), rows)
    return {
        "sampler": sampler, "format": form, "cpu": cpu(), "sequences": len(answers),
        "tokens": int(rows["mask"].sum()), "program": program, "gap": gap,
        "conditions": {name: difference(of) for name, of in pairs.items()},
    }


# The figure


def read(folder: pathlib.Path) -> Found:
    """Reads both files of the figure; what is not measured yet is left out."""
    lines, runs = [], []
    if (folder / NAME).exists():
        lines = [json.loads(text) for text in (folder / NAME).read_text().splitlines()]
    if (folder / "engines.jsonl").exists():
        runs, _ = records.read(folder / "engines.jsonl")
    return lines, records.by_arm(runs)


def gap_table(found: Found) -> str:
    """Returns the table of the gap by sampler, format and learner."""
    columns = {
        "mean |d|": "d_mean", "99 %": "d_p99", "largest": "d_max", "largest |dp|": "dp_max",
        "mean |d| of answers": "d_seq_mean", "k3": "k3", "chi2, tokens": "chi2_token",
        "chi2, answers": "chi2_seq",
    }
    cells = [
        [
            line["sampler"], line["format"], line["cpu"], dtype,
            *(f"{gap[name]:.2g}" for name in columns.values()),
        ]
        for line in found[0] for dtype, gap in line["gap"].items()
    ]
    return parts.rows(["sampler", "format", "CPU", "learner", *columns], cells)


def conditions_table(found: Found) -> str:
    """Returns the table of what a sampler's own batching does: mean and largest difference in nats."""
    cells = [
        [line["sampler"], line["format"], line["cpu"]] + [
            f"{of['mean']:.2g}, {of['max']:.2g} ({of['count']})"
            for of in map(line["conditions"].__getitem__, CONDITIONS)
        ]
        for line in found[0]
    ]
    return parts.rows(["sampler", "format", "CPU", *CONDITIONS], cells)


def runs_table(found: Found) -> str:
    """Returns the table of the runs."""
    accuracy = lambda kind, index: lambda run: float(run.series[f"eval/{kind}_accuracy"][index])
    columns = {
        f"{kind} {when}": accuracy(kind, index)
        for kind in ("greedy", "sampled") for when, index in (("before", 0), ("after", -1))
    } | {
        "reward, last steps": parts.of("reward/mean"),
        "largest |dp|": lambda run: float(run.series["training/rollout_probs_diff_max"].max()),
        "mean |d|, last steps": parts.of("mismatch/engine/log_ratio_abs_mean"),
    }

    def cell(measure: parts.Measure) -> parts.Column:
        return lambda arm, arms: f"{np.mean([measure(run) for run in arms[arm]]):.3g}"

    of = tuple((name, cell(measure)) for name, measure in columns.items())
    return parts.of_arms(parts.ARM, parts.SEEDS, *of)(found[1])


def panel(kind: str) -> parts.Panel:
    """Makes the panel of the gap to the float32 learner by the buckets of a kind."""

    def draw(axes, found):
        named = set()
        for line in found[0]:
            gap, name = line["gap"]["float32"], f"{line['sampler']}, {line['format']}"
            start = lambda name: float(name.partition("/")[0].rpartition("_")[2])
            buckets = [x for x in gap if x.startswith(kind) and x.endswith(MEASURES[0])]
            buckets.sort(key=start)
            axes.plot(
                [f"{start(x):g}" for x in buckets], [gap[x] for x in buckets],
                color=COLORS[FORMATS.index(line["format"])],
                marker="s" if line["cpu"] == "AVX2" else "o",
                linestyle="-" if line["sampler"] == "vLLM" else "--",
                label=None if name in named else name,
            )
            named.add(name)
        axes.set(yscale="log", xlabel=BUCKETS[kind], ylabel="mean |log ratio|, nats")

    return draw


FIGURE = parts.Figure(
    tables=(gap_table, conditions_table, runs_table),
    pictures={"engines": parts.Picture((12, 3.8), [panel("entropy"), panel("position")],
                                       has_legend_below=True)},
    read=read,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("experiments.engines", "Measures and trains with vLLM on CPUs.", __doc__)
    parser.add_argument("venv", help="folder that launch/vllm.sh install made")
    parser.add_argument("folder", nargs="?", default=parts.FOLDER, help="default: %(default)s")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `serving` then ends its server
    folder = pathlib.Path(args.folder)
    port = int(fig_engines.URL.rpartition(":")[2])
    done = {(line["sampler"], line["format"]) for line in read(folder)[0]}
    for form in FORMATS:
        for sampler in SAMPLERS:
            if (sampler, form) not in done:
                print(f"measuring {sampler} in {form}", flush=True)
                line = line_of(sampler, form, args.venv, port)
                with (folder / NAME).open("a") as file:
                    file.write(json.dumps(line) + "\n")
    runs = WORK / "runs"
    with serving(command("vLLM", "bfloat16", 0, args.venv, port), fig_engines.URL, WORK / "vLLM.log"):
        subprocess.run(
            [sys.executable, "-m", "jaxrl_tis.sweep", "--config=configs/fig_engines.py", "--seeds=0",
             f"--out={runs}"],
            check=True,
        )
    records.gather(runs, folder / "engines.jsonl")


if __name__ == "__main__":
    cli.run(main)
