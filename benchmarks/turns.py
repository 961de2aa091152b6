"""Measures episodes of several turns, compared with one long sequence of the same tokens.

    python -m benchmarks.turns

The model is the small one of benchmarks.rollout with random weights in float32. Environments answer
at once, except in the last table. Four tables:

episodes: seconds of `--episodes` episodes in 16 slots. An episode has a prompt of 64 tokens, samples
  192 to 312 tokens in 1, 4 or 8 turns, and is given 16 tokens before each turn but the first. The
  long sequence has the given tokens in its prompt. "no cache" keeps no pages. The rows take turns,
  and the ratio is the median over `--rounds` rounds.
extend: milliseconds from `extend` by 16 tokens to the end of the step that samples the first ones,
  by the length of the record, with its pages in the cache and without. "decode" is a step without
  an extension.
host: milliseconds that a sequence takes to leave its pages of 16 positions in the cache when it ends,
  with 1 token sampled in each call, and then to write its record.
delays: episodes of 8 turns whose environments think for random times, exponential with the given mean
  and all in parallel. With "waits" each step waits for all of them (driver virtual), without it the
  engine samples other sequences (threads, ray). "busy" is the share of slots that sample, as a mean over
  the whole time, prefill and waiting included.
"""

import argparse
import heapq
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import arguments, host
from benchmarks.rollout import SMALL, random_engine
from jaxrl_tis.engine.block_manager import BlockManager
from jaxrl_tis.engine.policies import FirstCome
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.sequences import Drawn, Sequence
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.wait_queue import WaitQueue
from jaxrl_tis.environments.pool import Call, Reply
from jaxrl_tis.environments.protocol import Step
from jaxrl_tis.rollouts.episodes import EpisodeScheduler
from jaxrl_tis.runtime import cli

SLOTS, PROMPT, GIVEN, TURNS = 16, 64, 16, (1, 4, 8)
DELAYS = (0.0, 0.01, 0.05, 0.2)  # mean seconds that an environment thinks


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
                scheduler.step()  # type: ignore[unreachable]
    return {kind: 1e3 * statistics.median(of[1:]) for kind, of in times.items()}


def host_times(length: int, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds to keep the pages of a sequence and to write its record."""
    sizes: Any = host.Engine()
    sizes.page_size, sizes.num_pages = 16, host.LENGTH // 16 + 2
    column = lambda dtype: np.zeros((1, host.SLOTS), dtype)
    wide = np.zeros((1, host.SLOTS, 0), np.float32)
    result = host.ResultTokens(
        column(np.int32), column(np.float32), column(np.float32), column(np.float32), wide,
        valid=column(bool),
        remaining=np.zeros(host.SLOTS, np.int32),
    )
    times = {"keep": [], "record": []}
    for _ in range(rounds):
        waiting = WaitQueue(FirstCome(), None, sizes.page_size)
        blocks = BlockManager(sizes, waiting, Stats())
        request = Request("r", np.arange(64), 0, SamplingParams(max_tokens=host.LENGTH - 64))
        sequence = Sequence.of(request, 0, 0)
        sequence.pieces = [Drawn(result, 0, 1, 0, 0, 0)] * (length - 64)
        sequence.count, sequence.is_running, sequence.shard = length - 64, True, 0
        sequence.pages = blocks.pages[0].allocate(-(-length // sizes.page_size)) or []
        start = time.perf_counter()
        blocks.keep(sequence, 0)
        middle = time.perf_counter()
        sequence.trajectory("length", "", sequence.count)
        times["keep"].append(middle - start)
        times["record"].append(time.perf_counter() - middle)
    return {kind: 1e3 * statistics.median(of) for kind, of in times.items()}


class Thinking:
    """A pool of environments that answer after random times, and say nothing."""

    def __init__(self, mean: float):
        self._rng, self._mean = np.random.default_rng(0), mean
        self._due: list[tuple[float, str, tuple]] = []

    def submit(self, call: Call) -> None:
        due = time.perf_counter() + self._rng.exponential(self._mean)
        said = (call.example["prompt"], *[""] * len(call.answers))
        heapq.heappush(self._due, (due, call.id, said))

    def ready(self, wait: float) -> list[Reply]:
        if self._due:
            time.sleep(min(wait, max(0.0, self._due[0][0] - time.perf_counter())))
        replies, now = [], time.perf_counter()
        while self._due and self._due[0][0] <= now:
            _, id, said = heapq.heappop(self._due)
            replies.append(Reply(id, len(said) - 1, Step(""), "", observations=said))
        return replies

    def forget(self, ids) -> None:
        """Nothing: every call was answered."""


class Given:
    """The tokens between two turns: GIVEN random ones."""

    def __init__(self):
        self._rng = np.random.default_rng(1)

    def after(self, observation: str, end: int | None, stop_ids) -> list[int]:
        return self._rng.integers(0, SMALL["vocab"], GIVEN).tolist()

    def replaces(self, observation: str, end: int | None, stop_ids) -> bool:
        return False

    def join(self, answers: list[str], observations: list[str]) -> str:
        return "append"


def delayed(scheduler: Scheduler, count: int, mean: float, waits: bool) -> tuple[float, float]:
    """Returns the share of busy slots, and the sampled tokens per second, of episodes whose
    environments think."""
    environments: Any = lambda: Thinking(mean)
    suffixes: Any = Given()
    ids: Any = lambda prompt: prompt
    player = EpisodeScheduler(
        scheduler, environments, suffixes, lambda tokens: "", ids,
        max_turns=TURNS[-1], max_length=1280, on_fork="rows", waits=waits,
    )
    rng, start = np.random.default_rng(0), time.perf_counter()
    for i, new in enumerate(lengths(count)):
        prompt = rng.integers(0, SMALL["vocab"], PROMPT)
        sampling = SamplingParams(max_tokens=new // TURNS[-1])
        player.add(Request(f"{i}", prompt, 0, sampling, example={
            "id": f"{i}", "prompt": prompt.tolist(),
        }))
    while player.pending:
        player.step()
    took, stats = time.perf_counter() - start, scheduler.stats
    return stats.occupancy * stats.seconds / took, stats.tokens / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = arguments.parse(parser, episodes=2, rounds=1)
    arguments.say("episodes and long sequences")
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
        ratio = lambda kind, turns=turns: statistics.median(
            a / b for a, b in zip(rows[turns, kind], rows[turns, "long"], strict=True)
        )
        seconds = statistics.median(rows[turns, "episodes"])
        print(f"{turns:5} {seconds:11.2f} {ratio('episodes'):27.3f} {ratio('no cache'):24.3f}")
    print("\nrecord  extend ms, cached  fresh prefill ms  decode ms")
    scheduler = Scheduler(engine, params)
    for length in (128, 512, 1024):
        arguments.say(f"extensions of {length} tokens")
        found = extensions(scheduler, params, length, args.rounds)
        print(f"{length:6} {found['cached']:18.1f} {found['fresh']:17.1f} {found['decode']:10.1f}")
    print("\ntokens  keep ms  record ms")
    for length in (512, 1024, 4096):
        found = host_times(length, args.rounds)
        print(f"{length:6} {found['keep']:8.3f} {found['record']:10.3f}")
    print("\nmean delay s  waits: busy  tokens/s  otherwise: busy  tokens/s  ratio")
    for mean in DELAYS:
        arguments.say(f"delays of {mean} s")
        rounds = [
            [delayed(Scheduler(engine, params), args.episodes, mean, waits) for waits in (True, False)]
            for _ in range(args.rounds)
        ]
        (busy, speed), (other_busy, other_speed) = np.median(rounds, axis=0)
        print(
            f"{mean:12} {busy:12.3f} {speed:9.0f} {other_busy:16.3f} {other_speed:9.0f} "
            f"{other_speed / speed:6.2f}"
        )


if __name__ == "__main__":
    cli.run(main)
