"""Tokens that are read after the next call has been sent off: the order of calls, what a late end
costs, and that every record is the one of a scheduler that reads at once."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.policies import LongestFirst
from jaxrl_tis.engine.scheduler import Scheduler
from tests import arithmetic
from tests.arithmetic import alone, assert_as_alone, assert_replays, drain, request, started


class Unread:
    """An array that notes when it is read."""

    def __init__(self, array, note):
        self._array, self._note = array, note

    def __array__(self, dtype=None, copy=None):
        self._note()
        return self._array


class Engine(arithmetic.Engine):
    """Notes its calls and when their tokens are read: +1, -1, +2, ..."""

    def __init__(self, **options):
        super().__init__(**options)
        self.log, self.calls = [], 0

    def _noted(self, state, result):
        self.calls += 1
        call = self.calls
        self.log.append(call)
        note = lambda: -call in self.log or self.log.append(-call)
        return state, jax.tree.map(lambda x: Unread(x, note), result)

    def generate(self, *args):
        return self._noted(*super().generate(*args))

    def verify(self, *args):
        return self._noted(*super().verify(*args))


def both(requests, events=lambda scheduler, step: [], **options):
    """Records of a scheduler that reads at once and of one that reads late, and their engines."""
    found = []
    for async_scheduling in (False, True):
        engine = Engine(is_read_late=async_scheduling, **options)
        scheduler = started(engine, requests, async_scheduling=async_scheduling, decode=arithmetic.text_of)
        done = []
        for step in range(200):
            done += events(scheduler, step)
            if not scheduler.pending:
                break
            done += scheduler.step()
        done += drain(scheduler)
        found += [{t.id: t for t in done}, engine]
    return found


def assert_same(late, found):
    assert late.keys() == found.keys()
    for id, t in found.items():
        for field in dataclasses.fields(t):
            np.testing.assert_array_equal(
                getattr(late[id], field.name), getattr(t, field.name), f"{id} {field.name}"
            )


def test_a_call_is_sent_off_before_the_one_before_is_read():
    requests = [request("a", max_tokens=5), request("b", max_tokens=7)]
    found, at_once, late_found, late = both(requests, slots=2)
    assert at_once.log == [1, -1, 2, -2, 3, -3, 4, -4]
    # `b` must end in the fourth call, so there is no fifth.
    assert late.log == [1, 2, -1, 3, -2, 4, -3, -4]
    assert_same(late_found, found)


@pytest.mark.parametrize("options", [
    dict(drafts=Drafts(1, 3, free_batch_rows=9)), dict(retention=KVEviction(1, 1)),
])
def test_what_needs_the_tokens_reads_them_at_once(options):
    engine = Engine(slots=1)
    drain(started(engine, [request("a", max_tokens=9)], async_scheduling=True, **options))
    assert engine.log == [x for call in range(1, engine.calls + 1) for x in (call, -call)]


def test_who_ends_by_its_length_gives_its_slot_away_at_once():
    requests = [request(f"r{i}", (i, 2), seed=i, max_tokens=1 + i % 3) for i in range(9)]
    found, at_once, late_found, late = both(requests, slots=2, steps=1)
    assert at_once.inserted == late.inserted and at_once.calls == late.calls
    assert_same(late_found, found)


def test_a_stop_costs_at_most_one_call_of_its_row():
    prompts = [(1, 2, 3), (4,), (5, 6), (7, 8)]
    requests = [
        request(f"r{i}", prompt, max_tokens=12, stop_ids=alone(request("", prompt))[0][4:5])
        for i, prompt in enumerate(prompts)
    ]
    found, at_once, late_found, late = both(requests, slots=1, steps=1)
    assert {t.stop_reason for t in found.values()} == {"stop"}
    assert at_once.calls < late.calls <= at_once.calls + len(requests)
    assert_same(late_found, found)


def test_a_sequence_that_ended_by_a_stop_string_draws_into_nobodys_record():
    """The text is searched one call late in either way; its slot and pages are another's then."""
    text = arithmetic.text_of(alone(request("", (1, 2, 3), max_tokens=12))[0])
    requests = [
        request("a", (1, 2, 3), max_tokens=12, stop_strings=(text[4:6],)),
        *[request(f"r{i}", (i, i), seed=i, max_tokens=6) for i in range(6)],
    ]
    found, _, late_found, _ = both(requests, slots=2, steps=1)
    assert (found["a"].stop_reason, len(found["a"].tokens)) == ("stop", 6)
    assert_same(late_found, found)


@pytest.mark.parametrize("is_late", [True, False])
def test_records_of_what_runs_are_those_of_an_abort(is_late):
    """Also where the last call has completed a stop string."""
    text, seen = arithmetic.text_of(alone(request("", (1, 2, 3), max_tokens=12))[0]), set()
    ask = request("a", (1, 2, 3), max_tokens=12, stop_strings=(text[2:4],))
    for steps in range(1, 5):
        engine = arithmetic.Engine(slots=1, is_read_late=is_late)
        scheduler = Scheduler(engine, 0, decode=arithmetic.text_of, async_scheduling=is_late)
        scheduler.add(ask)
        for _ in range(steps):
            scheduler.step()
        records, aborted = scheduler.records(), scheduler.pause("abort")
        # A step whose tokens are read late has no record at first.
        for one, other in zip(records, aborted, strict=False):
            assert (one.stop_reason, one.tokens.tolist()) == (other.stop_reason, other.tokens.tolist())
            seen.add(one.stop_reason)
    assert seen == {"abort", "stop"}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_interruptions_and_new_weights_see_every_token(mode):
    requests = [request(f"r{i}", (i, 3), seed=i, max_tokens=9 + i) for i in range(3)]

    def events(scheduler, step):
        if step == 2:
            scheduler.set_params(1, 1)
        if step == 3:
            scheduler.abort("r1")
        if step != 4:
            return []
        returned = scheduler.pause(mode)
        for t in returned:
            if t.id != "r1":
                scheduler.add(dataclasses.replace(requests[int(t.id[1])], partial=t))
        scheduler.set_params(2, 2)
        return [t for t in returned if t.id == "r1"]

    found, _, late_found, _ = both(requests, events, slots=3, steps=1)
    assert_same(late_found, found)
    assert len(found["r1"].tokens) == 3 and found["r1"].version.tolist() == [0, 0, 1]
    for id in ("r0", "r2"):
        assert_replays(late_found[id], requests[int(id[1])])
        assert set(late_found[id].version) == {0, 1, 2}


def test_where_pages_are_few_tokens_are_read_before_a_sequence_loses_its_own():
    requests = [request(id, (1, 2, i), max_tokens=20) for i, id in enumerate("abc")]
    found, at_once, late_found, late = both(
        requests, slots=3, steps=4, max_length=24, num_pages=10
    )
    assert_as_alone(late_found.values(), requests)
    assert_same(late_found, found)
    assert max(t.segment.max() for t in found.values()) == 2, "some lost their pages"
    assert late.log != sorted(late.log, key=abs), "others are read late"


def test_a_sample_that_loses_its_pages_is_no_fresh_one():
    """It drew tokens that nobody has read, while others of its prompt still wait."""
    group = [request(f"g{i}", seed=i, max_tokens=20) for i in range(5)]
    options = dict(slots=3, steps=4, max_length=24, num_pages=8)
    found, _, late_found, _ = both(group, **options)
    assert_as_alone(late_found.values(), group)
    assert_same(late_found, found)
    assert max(t.segment.max() for t in found.values()) > 0, "some lost their pages"


def test_who_makes_way_has_been_read():
    requests = [request(f"r{i}", (i,), seed=i, max_tokens=12) for i in range(4)]
    engine = Engine(slots=2, steps=2, is_read_late=True)
    trajectories = drain(started(
        engine, requests, preempt_after=3, async_scheduling=True, policy=LongestFirst()
    ))
    assert_as_alone(trajectories, requests)
    order = [id for rows in engine.inserted for id in rows.values()]
    assert max(map(order.count, order)) > 1, "some made way"
