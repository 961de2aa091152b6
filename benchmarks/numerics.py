"""Measures the cost of invariant numerics in the parts of a step of the quickstart.

    python -m benchmarks.numerics [--dtypes=float32,bfloat16] [--rounds=5] [--rows=128]

Sampler and learner use the quickstart's random model in one float dtype. `decode` samples one token
in each of --rows slots, and `prefill` computes their prompts. `score` and `update` are the
learner's forward pass and update of as many rows. Fast and invariant numerics take turns, and times
are medians.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import arguments
from configs import quickstart
from jaxrl_tis import build
from jaxrl_tis.engine.protocol import Chunk, Insertion
from jaxrl_tis.engine.records import Request
from jaxrl_tis.engine.sampling import SamplingParams
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import cli

NUMERICS = ("fast", "invariant")


class Parts:
    """The timed parts of a run; `names` lists methods that return seconds."""

    names = ("prefill", "decode", "score", "update")

    def __init__(self, config: ConfigDict, rows: int):
        config.engine.slots = config.engine.prefill_batch = config.train.microbatch_rows = rows
        config.rollout.prompts = rows // config.rollout.group_size
        self.setup = build.build(config.lock())
        self.engine = self.setup.engine
        training = self.setup.training
        self.state = initial_state(training, initial_params(training))
        self.trainer = Trainer(training)
        self.params = self.engine.load(self.state["policy"].params)
        self.slots, rng = self.engine.init_state(), np.random.default_rng(0)
        length = config.task.max_prompt_tokens
        vocab = self.setup.model.vocab_size
        self.prompts = rng.integers(0, vocab, (rows, length)).astype(np.int32)
        pages = 1 + np.arange(rows * self.engine.pages_per_slot, dtype=np.int32)
        self.table = pages.reshape(rows, -1)
        self.requests = [
            Request(f"{i}", prompt, i, SamplingParams(max_tokens=config.rollout.max_new_tokens))
            for i, prompt in enumerate(self.prompts)
        ]
        self.samples()
        self.rows = self._scored()

    def samples(self) -> list[Sample]:
        """Returns one rollout with different rewards within each group."""
        done = generate(self.setup.scheduler(self.engine, self.params, 0), self.requests)
        size = self.setup.config.rollout.group_size
        self.scored = [
            Sample(t, {}, "", float(i % 2), float(i % 2), i // size)
            for i, t in enumerate(done)
        ]
        return self.scored

    def rollout(self) -> float:
        """Returns the seconds of one rollout by the scheduler: prefill, decode and the host's work."""
        start = time.perf_counter()
        self.samples()
        return time.perf_counter() - start

    def prefill(self) -> float:
        plan = zip(self.prompts, self.table, strict=True)
        chunks = [Chunk(0, prompt, 0, list(pages)) for prompt, pages in plan]
        start = time.perf_counter()
        self.slots, _ = jax.block_until_ready(
            self.engine.prefill(self.params, self.slots, chunks)
        )
        return time.perf_counter() - start

    def decode(self) -> float:
        """Returns the seconds of one decode step, a call divided by its steps."""
        steps = self.engine.steps
        inserted = {
            i: Insertion(request, request.prompt, steps, len(request.prompt) - 1)
            for i, request in enumerate(self.requests)
        }
        slots = jax.block_until_ready(self.engine.insert(self.slots, inserted))
        shift = np.zeros(len(self.table), np.int32)
        start = time.perf_counter()
        self.slots, _ = jax.block_until_ready(
            self.engine.generate(self.params, slots, self.table, shift)
        )
        return (time.perf_counter() - start) / steps

    def _scored(self) -> Rows:
        return self.trainer.score(self.state, self.scored, {0: self.state["policy"].params})

    def score(self) -> float:
        start = time.perf_counter()
        self._scored()
        return time.perf_counter() - start

    def update(self) -> float:
        start = time.perf_counter()
        self.state, *_ = self.trainer.update(self.state, self.rows, 1, 0)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def measure(
    configs: Mapping[str, ConfigDict], rounds: int, rows: int, parts: Sequence[str] = Parts.names
) -> dict[tuple[str, str], float]:
    """Returns median seconds by (part, name of a config). The configs take turns; the first round
    compiles and does not count."""
    runs = {}
    for name, config in configs.items():
        arguments.say(f"compiling {name}")
        runs[name] = Parts(config, rows)
    found = {(part, name): [] for part in parts for name in configs}
    arguments.say(f"{rounds} rounds of {', '.join(parts)}")
    for _ in range(rounds + 1):
        for part, name in found:
            found[part, name].append(getattr(runs[name], part)())
    return {key: statistics.median(seconds[1:]) for key, seconds in found.items()}


def config_of(numerics: str, dtype: str) -> ConfigDict:
    config = quickstart.get_config("f32")
    config.model.numerics, config.model.dtype = numerics, dtype
    config.engine.dtype = config.engine.cache_dtype = dtype
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128)
    args = arguments.parse(parser, dtypes="float32", rounds=1, rows=8)
    print(f"{'':18s}" + "".join(f"{numerics:>12s}" for numerics in NUMERICS) + f"{'ratio':>8s}")
    for dtype in args.dtypes.split(","):
        configs = {numerics: config_of(numerics, dtype) for numerics in NUMERICS}
        found = measure(configs, args.rounds, args.rows)
        for part in Parts.names:
            fast, invariant = (found[part, numerics] for numerics in NUMERICS)
            print(
                f"{dtype:10s}{part:8s}{1e3 * fast:9.1f} ms{1e3 * invariant:9.1f} ms"
                f"{invariant / fast:8.1f}", flush=True,
            )


if __name__ == "__main__":
    cli.run(main)
