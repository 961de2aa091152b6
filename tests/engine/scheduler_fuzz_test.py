"""Random arrivals, turns, aborts, weight updates and pauses: whatever happens, every record is
exact."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.engine.records import extended
from jaxrl_tis.engine.scheduler import Full, Scheduler
from jaxrl_tis.rollouts import serialize
from tests import arithmetic

RUNS, EVENTS = 10, 800
PROMPTS = [(1,), (2,), (1, 2), (0, 0, 3), (4, 4, 4, 4), tuple(range(7)), tuple(range(12)),
           tuple(range(3, 20))]


def engine_of(rng):
    shards = rng.choice([1, 1, 2])
    page_size, max_length = rng.choice([2, 4]), 40
    least = -(-max_length // page_size) + 2
    return arithmetic.Engine(
        slots=shards * rng.randint(2, 5), steps=rng.randint(1, 6), shards=shards,
        max_length=max_length, page_size=page_size, num_pages=least + rng.randint(0, 6),
        prefill_batch=shards * rng.randint(1, 3), prefill_chunk=page_size * rng.randint(1, 4),
        is_read_late=rng.random() < 0.6, route_shape=rng.choice([(1, 1), (2, 2), (2, 4)]),
        num_experts=rng.choice([arithmetic.EXPERTS, 257]),
    )


class Run:
    """One scheduler and all that was asked of it and came back."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.engine = engine_of(rng)
        self.scheduler = Scheduler(
            self.engine, 0, 0, policy=POLICIES[rng.choice(list(POLICIES))](),
            max_wait_admissions=rng.choice([None, 0, 3]), max_pending=rng.choice([None, 12]),
            prefill_calls=rng.randint(1, 3), preempt_after=rng.choice([0, 1, 5]),
            retention=rng.choice([None, None, KVEviction(1, 2), KVEviction(0, 1)]),
            keeps_pages=rng.random() < 0.8, async_scheduling=self.engine.is_read_late,
            decode=arithmetic.text_of,
            drafts=rng.choice([None, Drafts(self.engine.slots, 7, rng.randint(1, 60))]),
        )
        self.version = self.added = self.idle = 0
        self.requests, self.alive, self.done = {}, set(), {}
        self.added_at = {}  # id -> passes of the engine before it was added
        self.events, self.rerouted = collections.Counter(), np.zeros(2, int)

    def add(self):
        rng, id = self.rng, f"r{self.added}"
        request = arithmetic.request(
            id, rng.choice(PROMPTS), rng.randint(0, 9), max_tokens=rng.randint(1, 23),
            stop_ids=tuple(rng.sample(range(arithmetic.VOCAB), rng.choice([0, 1]))),
            stop_strings=rng.choice([(), (), ("ab", "q"), ("c",)]),
            prompt_logprobs=rng.random() < 0.1,
        )
        self.submit(request)
        self.added += 1

    def submit(self, request, add=None):
        try:
            (add or self.scheduler.add)(request)
        except Full:
            assert self.scheduler.pending >= 12
            return self.take(self.scheduler.step())
        self.requests[request.id] = request
        self.added_at[request.id] = len(self.engine.passes)
        self.alive.add(request.id)

    def abort(self):
        waiting = sorted(self.alive)
        if waiting:
            id = self.rng.choice(waiting)
            self.alive.remove(id)
            self.scheduler.abort(id)

    def update(self):
        self.version += 1
        self.scheduler.set_params(self.version, self.version)

    def pause(self):
        self.take(self.scheduler.pause(self.rng.choice(["abort", "retract", "in_place"])))

    def step(self):
        self.take(self.scheduler.step())

    def take(self, trajectories):
        resumed = []
        for t in trajectories:
            assert t.id not in self.done, f"{t.id} came back twice"
            self.check(t)
            share = 0.7 if t.stop_reason == "abort" else 0.25
            if not len(t.evict_step) and self.rng.random() < share:
                resumed.append(serialize.read_trajectory(serialize.trajectory_text(t)))
            else:
                self.done[t.id] = t
            self.alive.discard(t.id)
        for t in resumed:
            if t.stop_reason == "abort":
                self.submit(dataclasses.replace(self.requests[t.id], partial=t))
            else:
                self.extend(t)
            if t.id not in self.alive:
                self.done[t.id] = t

    def extend(self, t):
        """Some tokens and a turn, if there is room."""
        old, rng, begun = self.requests[t.id], self.rng, len(t.tokens)
        given = [rng.randrange(arithmetic.VOCAB) for _ in range(rng.choice([1, 2, 3, 7]))]
        most = begun + len(given) + rng.randint(1, 9)
        if len(t.prompt) + most > self.engine.max_length:
            return
        sampling = dataclasses.replace(old.sampling, max_tokens=most)
        request = dataclasses.replace(old, partial=extended(t, given), sampling=sampling)
        self.events["turns"] += 1
        self.submit(request, lambda _: self.scheduler.extend(t, given, sampling))

    def check(self, t):
        request = self.requests[t.id]
        arithmetic.assert_replays(t, request)
        passes = self.engine.passes[self.added_at[t.id] :]
        arithmetic.assert_first_routes(t, passes, request.partial)
        self.rerouted += t.rerouted
        np.testing.assert_array_equal(t.logp_raw, np.where(t.mask, t.logp_behav - 0.5, 0))
        tokens = t.tokens.tolist()
        assert len(t.logits) == len(t.mask) == len(t.version) == len(tokens)
        assert (np.diff(t.version) >= 0).all() and (np.diff(t.segment) >= 0).all()
        assert (t.kv_version <= t.version).all()
        partial = request.partial
        turn, mask = np.zeros(len(tokens), int), np.ones(len(tokens), bool)
        if partial is not None and len(partial.tokens):
            begun = len(partial.tokens)
            assert t.tokens[:begun].tolist() == partial.tokens.tolist()
            turn[:begun], mask[:begun], turn[begun:] = partial.turn, partial.mask, partial.turn[-1]
        assert t.turn.tolist() == turn.tolist() and t.mask.tolist() == mask.tolist()
        if request.sampling.prompt_logprobs and len(tokens):
            targets, places = t.prompt[1:], np.arange(len(t.prompt) - 1)
            scores = lambda w: -np.cumsum(arithmetic.key(t.prompt[:-1], places, w)) - targets
            assert np.isnan(t.prompt_logps[0]) and len(t.prompt_logps) == len(t.prompt)
            assert any((t.prompt_logps[1:] == scores(w)).all() for w in range(self.version + 1))
        sampling, start = request.sampling, max([0, *(np.flatnonzero(~t.mask) + 1)])
        text = arithmetic.text_of(tokens[start:])
        stops = [count for count in range(start + 1, len(tokens) + 1)
                 if tokens[count - 1] in sampling.stop_ids
                 or any(stop in text[: count - start] for stop in sampling.stop_strings)]
        if t.stop_reason == "stop":
            assert stops == [len(tokens)]
        elif t.stop_reason == "length":
            assert not stops and len(tokens) == sampling.max_tokens
        else:
            assert not stops and len(tokens) < sampling.max_tokens

    def go(self):
        kinds = {self.add: 30, self.step: 60, self.abort: 4, self.update: 4, self.pause: 2}
        for _ in range(EVENTS):
            (event,) = self.rng.choices(list(kinds), kinds.values())
            self.events[event.__name__] += 1
            event()
        for _ in range(200 * (len(self.alive) + 1)):
            if not self.scheduler.pending:
                return self
            self.step()
        raise AssertionError(f"{self.scheduler.pending} requests never ended")

    def assert_empty(self):
        assert all(pages.used == 0 for pages in self.scheduler.pages)
        assert set(self.done) == set(self.requests)


@pytest.mark.all
def test_random_events_lose_no_token_no_page_and_no_request():
    events, stats = collections.Counter(), collections.Counter()
    for seed in range(RUNS):
        print(f"seed {seed}")  # shown when it fails
        run = Run(seed).go()
        run.assert_empty()
        events += run.events
        stats.update(dataclasses.asdict(run.scheduler.stats))
        stats.update(rerouted=int(run.rerouted[1]))
    assert events.total() > 7_000 and min(events.values()) > 50, events
    for name in ("preempted", "evicted", "shared", "cached", "drafted", "accepted", "rerouted"):
        assert stats[name] > 50, (name, stats[name])
