"""Measures the gap of samplers that evict keys, with and without replay of the evictions, by context.

A small model is trained for a minute on texts of words that come again. Samplers with the same weights
write 4,096 tokens each and keep all keys, the last pages, or half last pages and half those with the
most attention. In float32 the learner scores each token twice: under the recorded evictions, and with
all keys. Relative positions beyond TRAINED tokens are new to the model.

Examples:

    python -m experiments.contexts
    python -m experiments.contexts new/figures
"""

import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import parts
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.learner.batch_layout import forward_fields, trajectory_rows
from jaxrl_tis.learner.scoring import Learner, response_scores
from jaxrl_tis.learner.step import TrainState, make_supervised_step
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import COLORS
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import cli

NAME = "contexts.jsonl"  # a line for each seed and sampler
SEEDS = range(3)
PAGE = 16  # tokens
ARMS = {  # all that evict keep 16 full pages, 256 tokens
    "all keys": None, "last pages": KVEviction(1, 15), "heavy pages": KVEviction(1, 7, heavy=8),
}
CONTEXTS = (512, 1024, 2048, 4096)  # the most tokens before a token of each bin
PROMPT, SEQUENCES = 64, 2
WORDS, IN_TEXT, LETTERS, VOCAB = 200, 8, 5, 64
STEPS, ROWS, TRAINED = 400, 4, 256
MEASURES = {"replayed": "under the evictions", "dense": "with all keys", "kl": "KL of all keys to the kept"}
MODEL = ModelConfig(
    family="llama", vocab_size=VOCAB, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, mlp_dim=128, rope=RopeConfig("default", 10000.0), max_position=CONTEXTS[-1],
    norm_eps=1e-6, qkv_bias=False, qk_norm=False, tie_embeddings=False,
)
Found = Mapping[str, Any]  # "arm", "seed", and measure -> mean of each of CONTEXTS


def text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Returns tokens [length] of IN_TEXT of the WORDS of LETTERS tokens, in random order."""
    words = np.random.default_rng(0).integers(0, VOCAB, (WORDS, LETTERS))
    of_text = rng.choice(WORDS, IN_TEXT, replace=False)
    return words[rng.choice(of_text, -(-length // LETTERS))].reshape(-1)[:length].astype(np.int32)


def trained(seed: int, steps: int = STEPS) -> transformer.Params:
    """Returns the parameters after `steps` supervised steps."""
    learner = Learner(MODEL, transformer.Program(), max_targets=TRAINED, chunk=1024)
    optimizer, rng = optax.adam(3e-3), np.random.default_rng(seed)
    params = transformer.init(MODEL, jax.random.key(seed))
    state, step = TrainState(params, optimizer.init(params)), make_supervised_step(learner, optimizer)
    shape = 1, ROWS, TRAINED
    fixed = {
        "positions": np.broadcast_to(np.arange(TRAINED, dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32), "temperature": np.ones(shape, np.float32),
        "mask": np.broadcast_to(np.arange(TRAINED) > 0, shape),
    }
    for _ in range(steps):
        tokens = np.stack([text(rng, TRAINED) for _ in range(ROWS)])[None]
        state, _ = step(state, fixed | {"tokens": tokens})
    return state.params


def sampled(params: transformer.Params, retention: KVEviction | None, seed: int, length: int) -> list[Trajectory]:
    """Returns SEQUENCES records of `length` tokens, prompt included."""
    config = EngineConfig(
        slots=SEQUENCES, max_length=length, page_size=PAGE, steps=PAGE,
        weighs_pages=retention is not None and retention.heavy > 0,
    )
    engine, rng = Engine(MODEL, config), np.random.default_rng((seed, 1))
    sampling = SamplingParams(max_tokens=length - PROMPT)
    requests = [Request(str(i), text(rng, PROMPT), i, sampling) for i in range(SEQUENCES)]
    return generate(Scheduler(engine, engine.load(params), 0, retention=retention), requests)


def measured(params: transformer.Params, records: list[Trajectory], length: int) -> dict[str, list[float]]:
    """Returns MEASURES of the records: the means of |log ratio|, and of the exact KL, in nats per
    token, of the tokens of each of CONTEXTS up to `length`."""
    learner = Learner(MODEL, transformer.Program(), max_targets=length, chunk=1024)
    rows = trajectory_rows(records, length, evict_axes=())
    score = jax.jit(lambda batch: response_scores(params, learner, batch, False, with_dense_kl=True))
    batch = {name: jnp.asarray(x) for name, x in forward_fields(rows).items()}
    under = score(batch)
    dense = score(batch | {"evict_step": jnp.full_like(batch["evict_step"], length)})
    fields = {
        "replayed": np.abs(under["logp"] - rows["logp_behav"]),
        "dense": np.abs(dense["logp"] - rows["logp_behav"]), "kl": np.asarray(under["dense_kl"]),
    }
    context = np.broadcast_to(np.arange(length), rows["mask"].shape)
    edges = [0, *(c for c in CONTEXTS if c < length), length]
    bins = [rows["mask"] & (context > low) & (context <= high) for low, high in itertools.pairwise(edges)]
    return {name: [float(x[is_in].mean()) for is_in in bins] for name, x in fields.items()}


def measure(seed: int, length: int = CONTEXTS[-1], steps: int = STEPS) -> list[Found]:
    """Returns the line of each sampler for a seed."""
    params, found = trained(seed, steps), list[Found]()
    for arm, retention in ARMS.items():
        records = sampled(params, retention, seed, length)
        entropy = float(np.mean([t.entropy.mean() for t in records]))
        found.append({"arm": arm, "seed": seed, "entropy": entropy} | measured(params, records, length))
    return found


def mean_of(found: Sequence[Found], arm: str, measure: str) -> list[parts.Interval]:
    """Returns the mean over seeds, with Student's interval, for each of CONTEXTS."""
    values = np.array([line[measure] for line in found if line["arm"] == arm])
    return [intervals.of_mean(column) for column in values.T]


def table(found: Sequence[Found]) -> str:
    """Returns the table of all samplers and measures."""
    lines = [
        [arm, label, *(parts.interval(x, ".2e") for x in mean_of(found, arm, measure))]
        for arm in ARMS for measure, label in MEASURES.items()
    ]
    edges = [0, *CONTEXTS]
    names = [f"{low + 1:,} to {high:,}" for low, high in itertools.pairwise(edges)]
    return parts.rows(["sampler", "nats per token", *names], lines)


def panel(axes, found: Sequence[Found]) -> None:
    """Draws the mean |log ratio| by context: dashed under the evictions, solid with all keys."""
    for arm, color in zip(ARMS, COLORS, strict=False):
        for measure, style in (("dense", "-"), ("replayed", "--")):
            mean, low, high = np.array(mean_of(found, arm, measure)).T
            axes.errorbar(
                CONTEXTS, mean, [mean - low, high - mean], marker="o", markersize=3, capsize=2,
                linewidth=1, color=color, linestyle=style, label=f"{arm}, {MEASURES[measure]}",
            )
    axes.set(
        xscale="log", yscale="log", xlabel="tokens before, at most", ylabel="mean |log ratio|, nats",
        xticks=CONTEXTS, xticklabels=[f"{c:,}" for c in CONTEXTS],
    )
    axes.minorticks_off()
    axes.legend(fontsize="x-small")


def read(folder: pathlib.Path) -> list[Found]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


FIGURE = parts.Figure(
    tables=(table,), pictures={"contexts": parts.Picture((6, 4), [panel])}, read=read,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("experiments.contexts", "Measures the gap of evicted keys by context.", __doc__)
    parser.add_argument("folder", nargs="?", default=parts.FOLDER, help="default: %(default)s")
    folder = pathlib.Path(parser.parse_args(argv).folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("w") as file:
        for seed in SEEDS:
            for line in measure(seed):
                print(json.dumps(line), file=file, flush=True)
                print(line["arm"], seed, {name: line[name] for name in MEASURES}, flush=True)


if __name__ == "__main__":
    cli.run(main)
