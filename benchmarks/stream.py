"""Replays each record of a random request stream and checks that the tokens are bitwise equal.

    python -m benchmarks.stream --requests=2000 --seed=0 --dtype=bfloat16

The stream has random weight updates, pauses and aborts, preemption and verified drafts. The model
is the quickstart's, with random weights of many versions and invariant numerics. A replay uses an
engine with one slot and one token a call. It prefills the start of each segment under the segment's
`kv_version` and samples every token under its `version`. The replay must also end as the record
says. Exits with 1 if any record is wrong.
"""

import argparse
import collections
import dataclasses
import random
import time
from typing import Any

import jax
import numpy as np

from benchmarks import arguments
from configs import quickstart
from jaxrl_tis import build
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.protocol import Chunk, Insertion
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.engine.scheduler import PAUSES, Scheduler
from jaxrl_tis.models import transformer
from jaxrl_tis.runtime import cli

STOP = 1
FIELDS = ("tokens", "logp_behav", "logp_raw", "entropy", "kept")
LENGTH, NEW, VERSIONS = 64, 40, 12


class Stream:
    """Random events on one scheduler; `done` holds the records of `requests`."""

    def __init__(self, engine: Engine, weights: list, seed: int):
        self.rng, self.engine, self.weights = random.Random(seed), engine, weights
        drafts = Drafts(engine.slots, 3, free_batch_rows=64)
        self.scheduler = Scheduler(
            engine, weights[0], 0, preempt_after=25, max_wait_admissions=20, drafts=drafts
        )
        self.requests: dict[str, Request] = {}
        self.done: dict[str, Trajectory] = {}
        self.events = collections.Counter()
        self.version = 0
        vocab = engine.vocab_size
        self.prompts = [
            np.array([self.rng.randrange(vocab) for _ in range(self.rng.randint(1, 24))], np.int32)
            for _ in range(200)
        ]

    def run(self, count: int) -> None:
        kinds = {"add": 40, "step": 40, "update": 3, "abort": 3, "pause": 1}
        while len(self.requests) < count or self.scheduler.pending:
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            if kind == "add" and len(self.requests) == count:
                kind = "step"
            self.events[kind] += 1
            getattr(self, f"_{kind}")(count)

    def _add(self, count: int) -> None:
        prompt = self.rng.choice(self.prompts)
        for _ in range(min(self.rng.choice([1, 4]), count - len(self.requests))):
            filters: dict[str, Any] = self.rng.choice([{}, {}, dict(top_k=5), dict(top_p=0.8)])
            sampling = SamplingParams(
                temperature=self.rng.choice([0.0, 0.7, 1.0, 1.0]), stop_ids=(STOP,),
                max_tokens=self.rng.randint(1, NEW), **filters,
            )
            id = f"r{len(self.requests)}"
            self.requests[id] = Request(id, prompt, self.rng.randrange(2**31), sampling)
            self.scheduler.add(self.requests[id])

    def _step(self, _) -> None:
        self._take(self.scheduler.step())

    def _update(self, _) -> None:
        """Syncs new weights, after one of the three pauses or none."""
        pause = self.rng.choice([None, *PAUSES])
        if pause:
            self._take(self.scheduler.pause(pause))
        self.version += 1
        self.scheduler.set_params(self.weights[self.version % len(self.weights)], self.version)

    def _pause(self, _) -> None:
        self._take(self.scheduler.pause(self.rng.choice(PAUSES)))

    def _abort(self, _) -> None:
        alive = sorted(self.requests.keys() - self.done.keys())
        if alive:
            self.scheduler.abort(self.rng.choice(alive))

    def _take(self, trajectories: list[Trajectory]) -> None:
        """Stores finished records; most aborted requests continue."""
        for t in trajectories:
            if t.stop_reason == "abort" and self.rng.random() < 0.8:
                self.events["resumed"] += 1
                self.scheduler.add(dataclasses.replace(self.requests[t.id], partial=t))
            else:
                self.done[t.id] = t


class Replay:
    """Runs one request after the other, on an engine with one slot and one token a call."""

    def __init__(self, engine: Engine, weights: list):
        self.engine, self.weights, self.state = engine, weights, engine.init_state()
        self.table = np.arange(1, engine.pages_per_slot + 1, dtype=np.int32)[None]

    def __call__(self, request: Request, t: Trajectory) -> dict[str, np.ndarray]:
        """Returns FIELDS sampled under the record's versions."""
        drawn = collections.defaultdict(list)
        for i in range(len(t.tokens)):
            if i == 0 or t.segment[i] != t.segment[i - 1]:
                history = np.concatenate([t.prompt, np.array(drawn["tokens"], np.int32)])
                self._begin(request, history, self._of(t.kv_version[i]), len(t.tokens) - i)
            self.state, result = self.engine.generate(
                self._of(t.version[i]), self.state, self.table, np.zeros(1, np.int32)
            )
            for name in FIELDS:
                drawn[name].append(np.asarray(getattr(result, name))[0, 0])
        return {name: np.array(values) for name, values in drawn.items()}

    def _of(self, version: int):
        return self.weights[version % len(self.weights)]

    def _begin(self, request: Request, history: np.ndarray, weights, remaining: int) -> None:
        engine, size = self.engine, self.engine.prefill_chunk
        pages = self.table[0].tolist()
        for start in range(0, len(history), size):
            chunk = Chunk(0, history[start : start + size], start, pages)
            self.state, _ = engine.prefill(weights, self.state, [chunk])
        insertion = Insertion(request, history, remaining, len(history))
        self.state = engine.insert(self.state, {0: insertion})


def problems(request: Request, t: Trajectory, replayed: dict[str, np.ndarray]) -> list[str]:
    """Returns the differences between a record and its replay."""
    count, limit = len(t.tokens), request.sampling.max_tokens
    stops = np.flatnonzero(t.tokens == STOP).tolist()
    ends = {
        "stop": stops == [count - 1], "length": not stops and count == limit,
        "abort": not stops and count < limit,
    }
    bad = [] if ends[t.stop_reason] else [f"{count} tokens do not end by {t.stop_reason}"]
    differ = lambda name: not np.array_equal(getattr(t, name), replayed[name])
    return bad + [f"{name} differ" for name in FIELDS if count and differ(name)]


def engines(dtype: str) -> tuple[Engine, Engine, list]:
    """Returns (engine of the stream, engine of the replays, serving weights of all versions)."""
    config = quickstart.get_config()
    model = build.small_model(config, load_tokenizer(config.task.tokenizer).vocab_size)
    options: dict[str, Any] = dict(
        max_length=LENGTH, dtype=dtype, cache_dtype=dtype, numerics="invariant", unroll=False,
        num_kept=8,
    )
    stream = Engine(model, EngineConfig(
        slots=24, num_pages=20, steps=8, prefill_batch=4, prefill_chunk=32, **options,
    ))
    replay = Engine(model, EngineConfig(
        slots=1, steps=1, prefill_batch=1, prefill_chunk=16, **options,
    ))
    weights = []
    for version in range(VERSIONS):
        params = transformer.init(model, jax.random.key(version))
        weights.append(stream.load(jax.tree.map(lambda x: 2 * x, params)))
    return stream, replay, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = arguments.parse(parser, requests=12)
    arguments.say("engines and weights")
    engine, alone, weights = engines(args.dtype)
    start = time.monotonic()
    arguments.say(f"the stream of {args.requests} requests")
    stream = Stream(engine, weights, args.seed)
    stream.run(args.requests)
    print(f"stream: {time.monotonic() - start:.0f} s, {dict(stream.events)}")
    print(stream.scheduler.stats)
    arguments.say("the replays")
    replay, wrong, tokens = Replay(alone, weights), 0, 0
    spans = collections.Counter()
    for count, (id, t) in enumerate(stream.done.items(), 1):
        bad = problems(stream.requests[id], t, replay(stream.requests[id], t))
        tokens += len(t.tokens)
        spans[len(set(t.version.tolist()))] += 1
        wrong += bool(bad)
        if bad:
            print(f"{id}: {', '.join(bad)}")
        if count % 200 == 0:
            seconds = time.monotonic() - start
            print(f"{seconds:.0f} s: {count} replayed, {wrong} are wrong", flush=True)
    pages = [pool.used for pool in stream.scheduler.pages]
    assert len(stream.done) == args.requests and not any(pages), (len(stream.done), pages)
    print(f"requests by number of versions: {dict(sorted(spans.items()))}")
    print(f"{len(stream.done)} requests, {tokens} tokens: {wrong} records are wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    cli.run(main)
