"""Who comes next: the policy's choice, unless somebody was passed over too often."""

import dataclasses
import random

import numpy as np
import pytest

from jaxrl_tis.engine.policies import POLICIES, FirstCome, GroupLongestFirst, ShortestPrompt
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.wait_queue import WaitQueue
from tests import arithmetic


def sequence(id, length, order, admitted_after=0):
    return Sequence.of(arithmetic.request(id, prompt=[1] * length), order, admitted_after)


def ids(waiting):
    return [s.request.id for s in waiting.in_order()]


@pytest.mark.parametrize("policy, expected", [(FirstCome, "abc"), (ShortestPrompt, "cab")])
def test_the_order_is_the_policys_then_that_of_arrival(policy, expected):
    waiting = WaitQueue(policy(), None, 4)
    for id, length, order in (("b", 4, 1), ("c", 2, 2), ("a", 4, 0)):
        waiting.add(sequence(id, length, order))
    assert ids(waiting) == list(expected)


@pytest.mark.parametrize("admissions, expected", [(2, "cba"), (3, "acb"), (4, "abc")])
def test_who_was_passed_over_too_often_goes_first(admissions, expected):
    waiting = WaitQueue(ShortestPrompt(), max_wait_admissions=3, page_size=4)
    for order, (id, length, since) in enumerate([("a", 5, 0), ("b", 4, 1), ("c", 2, 2)]):
        waiting.add(sequence(id, length, order, since))
    waiting.admissions = admissions
    assert ids(waiting) == list(expected)


class Sorted:
    """The same by sorting all that wait, by the policy and by age, whenever somebody asks."""

    def __init__(self, policy, max_wait_admissions):
        self.policy, self.max_wait_admissions = policy, max_wait_admissions
        self.sequences, self.admissions = [], 0

    def __iter__(self):
        return iter(self.sequences)

    def add(self, sequence):
        self.sequences.append(sequence)

    def remove(self, sequence):
        self.sequences.remove(sequence)

    def admit(self, sequence):
        self.remove(sequence)
        self.admissions += 1

    def ended(self, request, drawn):
        self.policy.removed(request, drawn)

    def in_order(self):
        by_policy = [(self.policy.key(s.request, s.count), s.order, s) for s in self.sequences]
        by_policy = [s for *_, s in sorted(by_policy, key=lambda x: x[:2])]
        by_age = sorted(self.sequences, key=lambda s: (s.admitted_after, s.order))
        while by_policy:
            bypassed = self.admissions - by_age[0].admitted_after
            is_overdue = self.max_wait_admissions is not None and bypassed >= self.max_wait_admissions
            first = (by_age if is_overdue else by_policy)[0]
            by_policy.remove(first)
            by_age.remove(first)
            yield first


def play(waiting, policy, seed):
    """What is yielded, and who waits, while requests come, are admitted, are passed over, lose
    their pages or their slots, finish and are aborted. The choices depend on the seed alone."""
    rng, log, running, count = random.Random(seed), [], [], 0
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 5])):
            prompt = [rng.randrange(3)] * rng.randint(1, 4)
            r = arithmetic.request(f"r{count}", prompt, max_tokens=rng.randint(1, 9))
            waiting.add(Sequence.of(r, count, waiting.admissions))
            policy.added(r)
            count += 1
        for s in waiting.in_order():
            log.append(s.request.id)
            event = rng.random()
            if event < 0.5:
                waiting.admit(s)
                s.count += rng.randint(0, 2)
                running.append(s)
            elif event < 0.6:
                other = rng.choice(list(waiting))
                waiting.remove(other)
                waiting.add(other)
            elif event < 0.8:
                break
        for s in rng.sample(running, rng.randint(0, len(running))):
            running.remove(s)
            if rng.random() < 0.4:
                s.admitted_after = waiting.admissions
                waiting.add(s)
            else:
                waiting.ended(s.request, rng.choice([None, s.count]))
        for s in rng.sample(list(waiting), min(1, len(list(waiting)))):
            if rng.random() < 0.3:
                waiting.remove(s)
                waiting.ended(s.request, None)
        log.append([s.request.id for s in waiting])
    return log


@pytest.mark.all
@pytest.mark.parametrize("max_wait_admissions", [None, 0, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_the_order_that_is_kept_is_that_of_sorting_anew(name, max_wait_admissions):
    for seed in range(12):
        mine, oracle = POLICIES[name](), POLICIES[name]()
        kept = play(WaitQueue(mine, max_wait_admissions, 4), mine, seed)
        assert kept == play(Sorted(oracle, max_wait_admissions), oracle, seed), seed


def test_who_comes_and_goes_costs_no_look_at_those_who_wait():
    """Of 2,000 in groups of 8, four are admitted and four finish in each step."""
    calls = []

    class Counted(GroupLongestFirst):
        def key(self, request, drawn):
            calls.append(request.id)
            return super().key(request, drawn)

    policy = Counted()
    waiting = WaitQueue(policy, None, 4)
    for i in range(2000):
        s = sequence(f"r{i}", 1, i)
        s.request.prompt[:] = i // 8
        waiting.add(s)
        policy.added(s.request)
    next(waiting.in_order())
    calls.clear()
    for _ in range(50):
        admitted = []
        for s in waiting.in_order():
            waiting.admit(s)
            admitted.append(s)
            if len(admitted) == 4:
                break
        for s in admitted:
            waiting.ended(s.request, 3)
    # A probe that finished tells the other seven of its group how long they are, at the next step.
    assert len(calls) == 49 * 4 * 7


def test_those_with_pages_are_known_by_their_shard():
    waiting = WaitQueue(FirstCome(), None, 4)
    a, b, c = (sequence(id, 3, order) for order, id in enumerate("abc"))
    a.pages, a.shard, b.pages, b.shard = [7], 1, [8], 0
    for s in (a, b, c):
        waiting.add(s)
    assert waiting.parked(1) == [a] and waiting.parked(0) == [b] and c in waiting
    waiting.remove(a)
    assert waiting.parked(1) == [] and a not in waiting


def test_tokens_are_awaited_as_long_as_one_waits_with_them():
    waiting = WaitQueue(FirstCome(), None, 4)
    a, b = sequence("a", 3, 0), sequence("b", 3, 1)
    waiting.add(a)
    waiting.add(b)
    waiting.admit(a)
    assert waiting.has(b.key) and waiting.admissions == 1
    waiting.remove(b)
    assert not waiting.has(b.key) and waiting.admissions == 1 and not list(waiting)


def test_a_sequence_with_tokens_also_awaits_the_full_pages_of_its_prompt():
    waiting = WaitQueue(FirstCome(), None, 4)
    prompt = np.array([1, 2, 3, 4, 5, 6], np.int32)
    new = Sequence.of(arithmetic.request("a", prompt), 0, 0)
    partial = dataclasses.replace(
        new.trajectory("abort", "", 0), tokens=np.array([9], np.int32),
        segment=np.zeros(1, np.int32),
    )
    drew = Sequence.of(arithmetic.request("b", prompt, partial=partial), 1, 0)
    for s in (new, drew):
        waiting.add(s)
    assert (new.key, new.base_key) == (prompt.tobytes(), b"")
    assert drew.key == np.append(prompt, np.int32(9)).tobytes()
    assert drew.base_key == prompt[:4].tobytes() and waiting.has(drew.base_key)
