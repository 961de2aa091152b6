"""Measures the host time of a scheduler step, with an engine that takes no time.

    python -m benchmarks.host

Prints the median milliseconds of a step of 64 slots with 8 tokens each. The first lines have 500 or
10,000 waiting requests, for each scheduling policy and with preemption. The next lines search the
text of every sequence for a stop string, by length. In a run this search overlaps with the engine;
here all of its time counts. The last lines are for one sequence: reading its tokens after every
call, as drafts do, and making its record.
"""

import argparse
import itertools
import time
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks import arguments
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.engine.protocol import Prefilled, ResultTokens
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.runtime import cli

SLOTS, STEPS, LENGTH, VOCAB = 64, 8, 4096, 256


class Engine:
    """Samples random tokens and takes no time."""

    slots, steps, shards, max_length, page_size = SLOTS, STEPS, 1, LENGTH, 64
    num_pages = SLOTS * LENGTH // page_size + 2
    prefill_batch, prefill_chunk, quant_id, vocab_size = 64, 512, "none", VOCAB
    max_stop_ids, num_penalised, num_logits, top_n, num_kept = 8, 0, 0, 0, 0
    route_shape, num_experts, weighs_pages = (0, 0), 0, False

    def __init__(self):
        self.random, self.remaining = np.random.default_rng(0), np.zeros(SLOTS, np.int32)

    def bucket(self, length):
        return self.prefill_chunk

    def init_state(self):
        return 0

    def prefill(self, params, state, chunks):
        return 0, Prefilled()

    def insert(self, state, rows):
        for slot, row in rows.items():
            self.remaining[slot] = row.remaining
        return 0

    def release(self, state, slots):
        self.remaining[slots] = 0
        return 0

    def generate(self, params, state, table, shift):
        valid = np.arange(STEPS)[:, None] < self.remaining
        tokens = self.random.integers(64, 90, valid.shape, np.int32)  # letters of `decoder`
        self.remaining = np.maximum(self.remaining - STEPS, 0)
        none = np.zeros(valid.shape, np.float32)
        wide = np.zeros((*valid.shape, 0), np.float32)
        return 0, ResultTokens(
            tokens, none, none, none, wide, valid=valid, remaining=self.remaining.copy()
        )


def requests(count: int, lengths: tuple[int, int], group: int = 8, **sampling) -> list[Request]:
    """Returns requests for prompts of 64 tokens, `group` for each, with random numbers of new
    tokens."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, VOCAB, (-(-count // group), 64))
    limits = rng.integers(*lengths, count, endpoint=True).tolist()
    return [
        Request(f"r{i}", prompts[i // group], i, SamplingParams(max_tokens=n, **sampling))
        for i, n in enumerate(limits)
    ]


def step_ms(scheduler: Scheduler, steps: int) -> tuple[float, float]:
    """Returns the median and the largest time of the steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        scheduler.step()
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times)), max(times)


def queue(policy: str, preempt_after: int, waiting: int, steps: int) -> tuple[float, float]:
    engine: Any = Engine()
    scheduler = Scheduler(
        engine, 0, policy=POLICIES[policy](), max_wait_admissions=100, preempt_after=preempt_after
    )
    for request in requests(SLOTS + waiting, (1, 128)):
        scheduler.add(request)
    scheduler.step()
    return step_ms(scheduler, steps)


def decoder():
    """Returns a tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=alphabet[0]))
    backend.decoder = decoders.ByteLevel()
    return lambda tokens: backend.decode([int(token) for token in tokens])


def stops(lengths: list[int], steps: int) -> dict[int, tuple[float, float]]:
    engine: Any = Engine()
    scheduler = Scheduler(engine, 0, decode=decoder())
    for request in requests(SLOTS, (LENGTH - 64, LENGTH - 64), stop_strings=("\n\n", "END")):
        scheduler.add(request)
    found, drawn = {}, itertools.count(0, STEPS)
    for length in lengths:
        while next(drawn) < length:
            scheduler.step()
        found[length] = step_ms(scheduler, steps)
        for _ in range(steps):
            next(drawn)
    return found


def reads(calls: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the milliseconds to read one sequence with one token from each call."""
    token, none = np.zeros((1, SLOTS), np.int32), np.zeros((1, SLOTS), np.float32)
    wide = np.zeros((1, SLOTS, 0), np.float32)
    result = ResultTokens(token, none, none, none, wide, valid=token == 0, remaining=token[0])
    times = {"tokens after every call": [], "the record": []}
    for _ in range(rounds):
        for name, seconds in times.items():
            request, total = Request("r", np.array([1]), 0, SamplingParams()), 0.0
            sequence = Sequence.of(request, 0, 0)
            for count in range(1, calls + 1):
                sequence.pieces.append(Drawn(result, 0, 1, 0, 0, 0))
                sequence.count = count
                start = time.perf_counter()
                if name != "the record":
                    sequence.tokens()
                elif count == calls:
                    sequence.trajectory("length", "", count)
                total += time.perf_counter() - start
            seconds.append(1e3 * total)
    return {name: (float(np.median(s)), max(s)) for name, s in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[500, 10_000])
    parser.add_argument("--steps", type=int, default=30)
    args = arguments.parse(parser, waiting=[50], steps=2)
    show = lambda name, of: print(f"{name:56} {of[0]:8.2f} {of[1]:8.2f}", flush=True)
    print(f"{'ms a step':56} {'median':>8} {'largest':>8}")
    for policy, preempt_after, waiting in itertools.product(POLICIES, (0, 32), args.waiting):
        way = f", preempt_after {preempt_after}" if preempt_after else ""
        name = f"{waiting} waiting, {policy}{way}"
        show(name, queue(policy, preempt_after, waiting, args.steps))
    arguments.say("stop strings")
    for length, of in stops([100, 500, 2000], args.steps).items():
        show(f"stop strings at {length} tokens", of)
    for name, of in reads(512, 5).items():
        show(f"{name} of 512 calls", of)


if __name__ == "__main__":
    cli.run(main)
