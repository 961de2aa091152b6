"""Measures episodes of several turns, compared with one long sequence of the same tokens.

    python -m benchmarks.turns

The model is the small one of benchmarks.rollout with random weights in float32. Environments answer
at once. Three tables:

episodes: seconds of `--episodes` episodes in 16 slots. An episode has a prompt of 64 tokens, samples
  192 to 312 tokens in 1, 4 or 8 turns, and is given 16 tokens before each turn but the first. The
  long sequence has the given tokens in its prompt. "no cache" keeps no pages. The rows take turns,
  and the ratio is the median over `--rounds` rounds.
extend: milliseconds from `extend` by 16 tokens to the end of the step that samples the first ones,
  by the length of the record, with its pages in the cache and without. "decode" is a step without
  an extension.
host: milliseconds that a sequence takes to leave its pages of 16 positions in the cache when it ends,
  with 1 token sampled in each call, and then to write its record.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import host
from benchmarks.rollout import SMALL, random_engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.runtime import cli

SLOTS, PROMPT, GIVEN, TURNS = 16, 64, 16, (1, 4, 8)


def lengths(count: int) -> list[int]:
    """Returns the number of sampled tokens of each episode, multiples of 8."""
    return [192 + 8 * (i % SLOTS) for i in range(count)]


def episodes(scheduler: Scheduler, count: int, turns: int) -> float:
    """Returns the seconds of episodes that an environment answers at once."""
    rng, start, left = np.random.default_rng(0), time.perf_counter(), {}
    for i, new in enumerate(lengths(count)):
        prompt = rng.integers(0, SMALL["vocab"], PROMPT)
        scheduler.add(Request(f"{i}", prompt, 0, SamplingParams(max_tokens=new // turns)))
        left[f"{i}"] = turns - 1, new // turns
    while scheduler.pending:
        for t in scheduler.step():
            more, new = left[t.id]
            if more:
                left[t.id] = more - 1, new
                given = rng.integers(0, SMALL["vocab"], GIVEN)
                most = len(t.tokens) + GIVEN + new
                scheduler.extend(t, given, SamplingParams(max_tokens=most))
    return time.perf_counter() - start


def long_sequences(scheduler: Scheduler, count: int, turns: int) -> float:
    """Returns the seconds of sequences of the same tokens, which are sampled in one turn."""
    rng, start = np.random.default_rng(0), time.perf_counter()
    for i, new in enumerate(lengths(count)):
        prompt = rng.integers(0, SMALL["vocab"], PROMPT + GIVEN * (turns - 1))
        scheduler.add(Request(f"{i}", prompt, 0, SamplingParams(max_tokens=new)))
    while scheduler.pending:
        scheduler.step()
    return time.perf_counter() - start


def extensions(scheduler: Scheduler, params: Any, length: int, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of an extension of a record with and without its pages, and
    of a decode step."""
    rng, times = np.random.default_rng(0), {"cached": [], "fresh": [], "decode": []}
    for i in range(rounds + 1):
        prompt = rng.integers(0, SMALL["vocab"], length - 8)
        scheduler.add(Request(f"{i}", prompt, 0, SamplingParams(max_tokens=8)))
        while scheduler.pending:
            ended = scheduler.step()
        for kind in ("cached", "fresh"):
            if kind == "fresh":
                scheduler.set_params(params, i)  # empties the cache
            (record,) = ended
            start = time.perf_counter()
            scheduler.extend(record, prompt[:GIVEN], SamplingParams(max_tokens=8 + GIVEN + 17))
            scheduler.step()
            times[kind].append(time.perf_counter() - start)
            start = time.perf_counter()
            scheduler.step()
            times["decode"].append(time.perf_counter() - start)
            while scheduler.pending:
                scheduler.step()
    return {kind: 1e3 * statistics.median(of[1:]) for kind, of in times.items()}


def host_times(length: int, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds to keep the pages of a sequence and to write its record."""
    sizes = host.Engine()
    sizes.page_size, sizes.num_pages = 16, host.LENGTH // 16 + 2
    column = lambda dtype: np.zeros((1, host.SLOTS), dtype)
    wide = np.zeros((1, host.SLOTS, 0), np.float32)
    result = host.ResultTokens(
        column(np.int32), *[column(np.float32)] * 3, wide, valid=column(bool),
        remaining=np.zeros(host.SLOTS, np.int32),
    )
    times = {"keep": [], "record": []}
    for _ in range(rounds):
        scheduler = Scheduler(sizes, 0)
        request = Request("r", np.arange(64), 0, SamplingParams(max_tokens=host.LENGTH - 64))
        sequence = Sequence.of(request, 0, 0)
        sequence.pieces = [Drawn(result, 0, 1, 0, 0, 0)] * (length - 64)
        sequence.count, sequence.is_running, sequence.shard = length - 64, True, 0
        sequence.pages = scheduler.pages[0].allocate(-(-length // sizes.page_size))
        start = time.perf_counter()
        scheduler._keep_pages(sequence)
        middle = time.perf_counter()
        sequence.trajectory("length", "", sequence.count)
        times["keep"].append(middle - start)
        times["record"].append(time.perf_counter() - middle)
    return {kind: 1e3 * statistics.median(of) for kind, of in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine, params = random_engine(
        SMALL, slots=SLOTS, max_length=1280, steps=8, prefill_batch=SLOTS, page_size=16,
        num_pages=SLOTS * 80 + 2, dtype="float32", cache_dtype="float32",
    )
    rows = {(turns, kind): [] for turns in TURNS for kind in ("episodes", "no cache", "long")}
    for i in range(args.rounds + 1):
        for (turns, kind), seconds in rows.items():
            scheduler = Scheduler(engine, params, keeps_pages=kind != "no cache")
            run = long_sequences if kind == "long" else episodes
            took = run(scheduler, args.episodes, turns)
            seconds += [took] if i else []  # the first round compiles
    print("turns  episodes s  ratio to one long sequence  ratio without the cache")
    for turns in TURNS:
        ratio = lambda kind: statistics.median(
            a / b for a, b in zip(rows[turns, kind], rows[turns, "long"])
        )
        seconds = statistics.median(rows[turns, "episodes"])
        print(f"{turns:5} {seconds:11.2f} {ratio('episodes'):27.3f} {ratio('no cache'):24.3f}")
    print("\nrecord  extend ms, cached  fresh prefill ms  decode ms")
    scheduler = Scheduler(engine, params)
    for length in (128, 512, 1024):
        found = extensions(scheduler, params, length, args.rounds)
        print(f"{length:6} {found['cached']:18.1f} {found['fresh']:17.1f} {found['decode']:10.1f}")
    print("\ntokens  keep ms  record ms")
    for length in (512, 1024, 4096):
        found = host_times(length, args.rounds)
        print(f"{length:6} {found['keep']:8.3f} {found['record']:10.3f}")


if __name__ == "__main__":
    cli.run(main)
