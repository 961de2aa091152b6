"""Aborts, pauses, new weights, divided rollouts, stop strings and evictions."""

import dataclasses
import weakref

import numpy as np
import pytest

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.policies import LongestFirst
from jaxrl_tis.engine.records import NEVER
from jaxrl_tis.engine.scheduler import Scheduler
from tests.arithmetic import (
    Engine, alone, assert_as_alone, assert_replays, attention, being_filled, drain, request, started,
    text_of,
)


def resumed(request, trajectory):
    return dataclasses.replace(request, partial=trajectory)


# Aborts


def test_abort_of_a_waiting_request_returns_an_empty_record():
    requests = [request(id, max_tokens=4) for id in "abc"]
    scheduler = started(Engine(slots=1), requests)
    scheduler.step()
    scheduler.abort("b")
    assert scheduler.pending == 3
    got = {t.id: t for t in drain(scheduler)}
    assert (len(got["b"].tokens), got["b"].stop_reason) == (0, "abort")
    assert got["b"].tokens.dtype == np.int32 and got["b"].logp_behav.dtype == np.float32
    assert_as_alone([got["a"], got["c"]], [requests[0], requests[2]])


def test_abort_of_a_request_that_is_being_filled_gives_its_pages_back():
    scheduler, _, short, _ = being_filled(17, max_tokens=1)
    scheduler.step()
    assert scheduler.pages[0].used == 1 + 5 + 5 - 4  # 5 pages of the prompt, 1 for the copy
    scheduler.abort("long")
    assert scheduler.pages[0].used == 1
    aborted, ended = drain(scheduler)
    assert (aborted.id, len(aborted.tokens), aborted.stop_reason) == ("long", 0, "abort")
    assert_as_alone([ended], [short])


def test_abort_of_a_running_request_returns_what_it_has_and_frees_the_slot():
    running, waiting = request("a", max_tokens=9), request("b", seed=3, max_tokens=4)
    scheduler = started(Engine(slots=1, steps=2), [running, waiting])
    scheduler.step()
    scheduler.abort("a")
    first, second = drain(scheduler)
    assert (first.id, first.stop_reason, first.tokens.tolist()) == ("a", "abort", [0, 3])
    assert_as_alone([second], [waiting])


def test_a_slot_that_was_left_decodes_nothing_while_it_is_free():
    engine = Engine(slots=2, steps=2)
    scheduler = started(engine, [request("a", max_tokens=9), request("b", max_tokens=9)])
    scheduler.step()
    scheduler.abort("a")
    drain(scheduler)
    # Two tokens of `a`, after prompt positions 2 and 3.
    assert [t for id, t in engine.reads if id == "a"] == [2, 3]


def parked():
    """`a` has made way for `b`, which is running, after 2 tokens."""
    requests = [request("a", max_tokens=5), request("b", (2, 4), max_tokens=4)]
    scheduler = started(Engine(slots=1, steps=2), requests, policy=LongestFirst(), preempt_after=2)
    scheduler.step()
    scheduler.step()
    return scheduler, requests


def test_abort_of_a_request_that_made_way_returns_what_it_has():
    scheduler, requests = parked()
    assert scheduler.pages[0].used == 2
    scheduler.abort("a")
    assert scheduler.pages[0].used == 1
    first, second = drain(scheduler)
    assert (first.id, first.stop_reason, first.tokens.tolist()) == ("a", "abort", [0, 3])
    assert_as_alone([second], [requests[1]])


def test_a_second_abort_before_the_next_step_changes_nothing():
    scheduler = started(Engine(), [request("a", max_tokens=9)])
    scheduler.step()
    scheduler.abort("a")
    scheduler.abort("a")
    assert [(t.id, t.stop_reason) for t in scheduler.step()] == [("a", "abort")]


def test_abort_of_an_unknown_or_finished_request_names_it():
    scheduler = started(Engine(), [request("a", max_tokens=1)])
    scheduler.step()
    for id in ("a", "zebra"):
        with pytest.raises(KeyError, match=id):
            scheduler.abort(id)


# Pauses


@pytest.mark.parametrize("steps", range(6))
def test_resumed_requests_draw_the_tokens_of_no_interruption(steps):
    requests = [request(f"r{i}", np.arange(1 + i % 6), seed=i, max_tokens=3 + i)
                for i in range(6)]
    scheduler = started(Engine(), requests)
    out = [t for _ in range(steps) for t in scheduler.step()]
    partials = scheduler.pause("abort")
    assert scheduler.pending == 0 and scheduler.pages[0].used == 0
    assert {t.stop_reason for t in partials} <= {"abort"}
    by_id = {r.id: r for r in requests}
    for t in partials:
        scheduler.add(resumed(by_id[t.id], t))
    out += drain(scheduler)
    assert_as_alone(out, requests)
    cut = {t.id: len(t.tokens) for t in partials}
    for t in out:  # what was drawn after the cut belongs to rebuilt pages
        n = cut[t.id] if t.id in cut and cut[t.id] else len(t.tokens)
        assert t.segment.tolist() == [0] * n + [1] * (len(t.tokens) - n)


def test_retract_takes_the_pages_of_those_that_made_way():
    scheduler, requests = parked()
    scheduler.pause("retract")
    assert scheduler.pages[0].used == 0
    out = {t.id: t for t in drain(scheduler)}
    assert_as_alone(out.values(), requests)
    assert out["a"].segment.tolist() == [0, 0, 1, 1, 1]


def test_retract_takes_the_pages_that_are_being_filled():
    scheduler, _, _, long = being_filled(17, max_tokens=2)
    scheduler.step()
    scheduler.pause("retract")
    assert scheduler.pages[0].used == 0
    scheduler.set_params(1, 1)
    (found,) = (t for t in drain(scheduler) if t.id == long.id)
    assert_replays(found, long)
    assert found.kv_version.tolist() == [1, 1] and found.segment.tolist() == [0, 0]


def test_new_weights_make_acceptance_unknown():
    drafts = Drafts(slots=1, max_length=3, free_batch_rows=4)
    scheduler = started(Engine(slots=1), [], drafts=drafts)
    drafts.observe(3, 3)
    assert drafts.acceptance > 0.5
    scheduler.set_params(1, 1)
    assert drafts.acceptance == 0.5


@pytest.mark.parametrize("mode", ["abort", "retract"])
@pytest.mark.parametrize("length, full", [(16, 16), (18, 16), (3, 0)])
def test_an_interrupted_group_shares_the_full_pages_of_its_prompt_again(length, full, mode):
    """The third prompt and a drawn token fill a page, which an abort leaves in the cache."""
    own = 4 if length == 3 and mode == "abort" else 0
    group = [request(f"g{i}", np.arange(length), seed=i, max_tokens=6) for i in range(4)]
    scheduler = started(Engine(slots=4, steps=2), group)
    scheduler.step()
    partials = {t.id: t for t in scheduler.pause(mode)}
    assert len(partials) == (4 if mode == "abort" else 0) and scheduler.pages[0].used == 0
    for r in group:
        if mode == "abort":
            scheduler.add(resumed(r, partials[r.id]))
    before = dataclasses.replace(scheduler.stats)
    assert_as_alone(drain(scheduler), group)
    stats = scheduler.stats.since(before)
    assert stats.prefilled == 4 * (length + 2 - full - own)
    assert (stats.cached, stats.shared) == (full + 4 * own, 3 * full)
    # A last page, and a copy of it, of each beside the shared ones.
    most = max(-(-(length + 2) // 4) - full // 4 + 1, -(-(length + 6) // 4) - full // 4)
    assert scheduler.pages[0].used == 0 and scheduler.pages[0].peak <= full // 4 + 4 * most


def test_new_weights_leave_the_pages_that_are_read_while_a_follower_is_filled():
    fresh, cut, other = [request(id, np.arange(8), seed=i, max_tokens=9)
                         for i, id in enumerate(["fresh", "cut", "other"])]
    scheduler = started(Engine(slots=1), [cut])
    scheduler.step()
    (partial,) = scheduler.pause("abort")
    engine = Engine(slots=3, steps=1, prefill_batch=1, prefill_chunk=4)
    scheduler = started(engine, [other], prefill_calls=1, keeps_pages=False)
    scheduler.step()
    scheduler.add(fresh)
    scheduler.add(resumed(cut, partial))
    while "fresh" not in {id for rows in engine.inserted for id in rows.values()}:
        scheduler.step()
    assert "cut" not in {id for rows in engine.inserted for id in rows.values()}
    scheduler.set_params(1, 1)
    out = {t.id: t for t in drain(scheduler)}
    for r in (fresh, cut, other):
        assert_replays(out[r.id], r)
    assert out["fresh"].kv_version.tolist() == [0] * 9 and out["cut"].kv_version[-1] == 1


def test_new_weights_leave_the_pages_that_are_read_while_their_finder_is_filled():
    reader = request("reader", np.arange(8), max_tokens=9)
    finder = request("finder", np.arange(21), seed=1, max_tokens=3)
    engine = Engine(slots=2, steps=1, prefill_batch=1, prefill_chunk=4)
    scheduler = started(engine, [reader], prefill_calls=1)
    scheduler.step()
    scheduler.add(finder)
    scheduler.step()
    assert engine.prefilled[-1] == [(8, (8, 9, 10, 11))] and scheduler.stats.cached == 8
    scheduler.set_params(1, 1)
    out = {t.id: t for t in drain(scheduler)}
    for r in (reader, finder):
        assert_replays(out[r.id], r)
    assert out["reader"].kv_version.tolist() == [0] * 9
    assert out["finder"].kv_version.tolist() == [1] * 3 and scheduler.stats.cached == 8


def test_a_request_may_be_interrupted_many_times():
    r = request("a", max_tokens=9)
    scheduler = Scheduler(Engine(slots=1, steps=2), 0)
    scheduler.add(r)
    for _ in range(4):
        scheduler.step()
        (partial,) = scheduler.pause("abort")
        scheduler.add(resumed(r, partial))
    (t,) = drain(scheduler)
    assert_as_alone([t], [r])
    assert t.segment.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("mode, calls", [("retract", 2), ("in_place", 1)])
def test_other_pauses_return_nothing_and_change_no_token(mode, calls):
    engine = Engine(slots=2)
    requests = [request(f"r{i}", seed=i, max_tokens=5) for i in range(2)]
    scheduler = started(engine, requests)
    scheduler.step()
    assert scheduler.pause(mode) == [] and scheduler.pending == 2
    trajectories = drain(scheduler)
    assert_as_alone(trajectories, requests)
    assert len(engine.inserted) == calls
    for t in trajectories:
        assert t.segment.tolist() == [0, 0] + 3 * [calls - 1]


def test_an_unknown_pause_is_refused():
    with pytest.raises(ValueError, match="'drain' is none of abort, retract, in_place"):
        Scheduler(Engine(), 0).pause("drain")


# Weights


def update(scheduler, version):
    scheduler.set_params(version, version)


@pytest.mark.parametrize("mode, kv_version, segment", [
    ("in_place", [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]), ("retract", [0, 0, 1, 1, 2], [0, 0, 1, 1, 2]),
])
def test_every_token_carries_the_weights_that_drew_it_and_the_oldest_it_read(
    mode, kv_version, segment
):
    r = request("a", max_tokens=5)
    scheduler = started(Engine(slots=1, steps=2), [r])
    for version in (1, 2):
        scheduler.step()
        scheduler.pause(mode)
        update(scheduler, version)
    (t,) = drain(scheduler)
    assert t.version.tolist() == [0, 0, 1, 1, 2]
    assert t.kv_version.tolist() == kv_version and t.segment.tolist() == segment
    # Weights 0: keys 14, tokens 0 and 3. Weights 1 read position 5: 14 + 15 of token 3, written by
    # them: + 7; or all written by them: + 7 * 5. Then 15 + 11: 62 -> 16, or 90 -> 21.
    assert t.tokens.tolist()[:3] == [0, 3, 16 if mode == "in_place" else 21]
    assert_replays(t, r)


def test_a_resumed_request_is_rebuilt_under_the_weights_of_then():
    r = request("a", max_tokens=4)
    scheduler = started(Engine(slots=1, steps=2), [r])
    scheduler.step()
    (partial,) = scheduler.pause("abort")
    update(scheduler, 1)
    scheduler.add(resumed(r, partial))
    (t,) = drain(scheduler)
    assert t.version.tolist() == t.kv_version.tolist() == t.segment.tolist() == [0, 0, 1, 1]
    assert t.tokens.tolist()[:3] == [0, 3, 21]
    assert_replays(t, r)


def test_new_weights_fill_a_half_filled_prompt_anew():
    scheduler, engine, short, long = being_filled(12, max_tokens=2)
    scheduler.step()
    update(scheduler, 1)
    got = {t.id: t for t in drain(scheduler)}
    assert [call[0][0] for call in engine.prefilled] == [0, 0, 0, 4, 8]
    assert_as_alone([got["long"]], [long], weights=1)
    assert got["long"].kv_version.tolist() == [1, 1]
    assert_replays(got["short"], short)


def test_running_samples_do_not_notice_that_their_prompt_is_filled_under_new_weights():
    engine = Engine(slots=2, steps=1)
    first = request("g0", np.arange(8), max_tokens=6)
    short = request("x", (1,), max_tokens=2)
    second = request("g1", np.arange(8), seed=1, max_tokens=3)
    scheduler = started(engine, [first, short, second])
    scheduler.step()
    update(scheduler, 1)
    got = {t.id: t for t in drain(scheduler)}  # g1 takes the slot of x while g0 runs
    for r in (first, short, second):
        assert_replays(got[r.id], r)
    assert got["g1"].kv_version.tolist() == [1, 1, 1]
    assert [call[0][1] for call in engine.prefilled].count(tuple(range(8))) == 2


# Divided rollouts


def test_a_sequence_draws_its_share_each_time_it_gets_a_slot():
    requests = [request(id, seed=i, max_tokens=6) for i, id in enumerate("ab")]
    engine = Engine(slots=1, steps=1)
    out = drain(started(engine, requests, policy=LongestFirst(), preempt_after=2))
    assert_as_alone(out, requests)
    assert [id for rows in engine.inserted for id in rows.values()] == list("ababab")


def test_a_sequence_makes_way_for_one_that_was_passed_over_too_often():
    requests = [request("long", max_tokens=6), request("short", (2, 4), max_tokens=1)]
    engine = Engine(slots=1, steps=1)
    scheduler = started(engine, requests, policy=LongestFirst(), preempt_after=2, max_wait_admissions=0)
    assert_as_alone(drain(scheduler), requests)
    assert [id for rows in engine.inserted for id in rows.values()] == ["long", "short", "long"]


@pytest.mark.parametrize("preempt_after", [1, 2, 5])
@pytest.mark.parametrize("shards", [1, 2])
def test_divided_rollouts_draw_the_same_tokens(preempt_after, shards):
    engine = Engine(slots=2, shards=shards)
    requests = [request(f"r{i}", np.arange(1 + i % 5), seed=i, max_tokens=3 + i)
                for i in range(6)]
    scheduler = started(engine, requests, policy=LongestFirst(), preempt_after=preempt_after)
    trajectories = drain(scheduler)
    assert_as_alone(trajectories, requests)
    assert sum(map(len, engine.inserted)) > len(requests), "somebody made way"
    assert all(not t.segment.any() for t in trajectories), "and kept its pages"


def test_a_sequence_makes_way_only_for_one_that_comes_before_it():
    scheduler, requests = parked()
    assert_as_alone(drain(scheduler), requests)
    engine = Engine(slots=1, steps=2)
    scheduler = started(engine, requests, preempt_after=2)  # first come, first served
    drain(scheduler)
    assert engine.inserted == [{0: "a"}, {0: "b"}]


def test_a_sequence_that_made_way_loses_its_pages_to_one_that_needs_them():
    # 5 pages hold `a` after 8 tokens (3 pages), not `b` of 13 tokens beside it.
    requests = [request("a", max_tokens=9), request("b", np.arange(13), max_tokens=3)]
    scheduler = started(
        Engine(slots=1, steps=7, max_length=16, num_pages=6, prefill_chunk=16), requests,
        policy=LongestFirst(), preempt_after=1,
    )
    got = {t.id: t for t in drain(scheduler)}
    assert_as_alone(got.values(), requests)
    assert got["a"].segment.tolist() == [0] * 7 + [1] * 2


def test_of_those_that_made_way_the_youngest_loses_its_pages():
    # 6 pages. `a` makes way for `b` and `b` for `c`, with a page each. `c` takes the other four
    # and, with 6 tokens, a fifth: that of `b`. Then `a` goes on from its own and makes way again;
    # now its pages go, the only ones, when `c` is rebuilt.
    requests = [
        request("a", max_tokens=5), request("b", (4, 5, 6), max_tokens=4),
        request("c", np.arange(12), max_tokens=9),
    ]
    scheduler = started(
        Engine(slots=1, steps=2, max_length=24, num_pages=7), [], policy=LongestFirst(),
        preempt_after=1
    )
    for r in requests:
        scheduler.add(r)
        scheduler.step()
    got = {t.id: t for t in drain(scheduler)}
    assert_as_alone(got.values(), requests)
    assert [got[id].segment.tolist() for id in "ab"] == [[0, 0, 0, 0, 1], [0, 0, 1, 1]]


def test_no_prompt_is_kept_for_a_sequence_that_made_way():
    # `a` makes way when its tokens are 1, 2, 3, 0, 3, which are the prompt of `b`.
    # They take turns; at the end of its second `a` waits under another key.
    requests = [request("a", max_tokens=12), request("b", (1, 2, 3, 0, 3), max_tokens=12)]
    scheduler = started(Engine(slots=1, steps=2), requests, policy=LongestFirst(), preempt_after=2)
    assert_as_alone(drain(scheduler), requests)


def test_a_slot_is_not_kept_for_a_sequence_whose_pages_are_in_another_shard():
    # `x` makes way for `b` in shard 1. When `a` ends, `x` comes before `c` but has no pages there.
    first = [request("a", max_tokens=6), request("x", (2,), max_tokens=3)]
    then = [request("b", (3,), max_tokens=9), request("c", (4,), max_tokens=1)]
    engine = Engine(slots=2, shards=2, steps=2)
    scheduler = started(engine, first, policy=LongestFirst(), preempt_after=2)
    ended = [[t.id for t in scheduler.step()]]
    for r in then:
        scheduler.add(r)
    ended += [[t.id for t in scheduler.step()] for _ in range(3)]
    assert ended == [[], [], ["a"], ["c"]]
    assert {t.id for t in drain(scheduler)} == {"x", "b"}


def test_a_sequence_with_evicted_keys_makes_no_way():
    engine = Engine(slots=1, steps=4, page_size=2)
    requests = [request("a", max_tokens=20), request("b", max_tokens=30)]
    scheduler = started(
        engine, requests[:1], policy=LongestFirst(), preempt_after=1, retention=KVEviction(0, 1)
    )
    scheduler.step()
    scheduler.add(requests[1])
    assert [len(t.tokens) for t in drain(scheduler)] == [20, 30]
    assert engine.inserted == [{0: "a"}, {0: "b"}]


# What live requests have drawn


def test_what_was_drawn_so_far_is_what_the_record_begins_with():
    requests = [request(id, max_tokens=5) for id in ("a", "b", "waiting")]
    scheduler = started(Engine(slots=2, steps=2), requests)
    everyone = {"a", "b", "waiting", "unknown"}
    drawn = []
    for _ in range(2):
        assert scheduler.step() == []
        drawn.append({id: t.tolist() for id, t in scheduler.drawn(everyone).items()})
    tokens = [0, 3, 21, 12, 7]  # TOKENS of scheduler_test.py
    assert drawn == [
        {"a": tokens[:2], "b": tokens[:2], "waiting": []},
        {"a": tokens[:4], "b": tokens[:4], "waiting": []},
    ]
    assert scheduler.drawn({"b"}).keys() == {"b"} and scheduler.drawn({}) == {}
    assert {t.id for t in scheduler.step()} == {"a", "b"}
    assert scheduler.drawn(everyone).keys() == {"waiting"}


# Stop strings


# TOKENS of scheduler_test.py as text, and on: 0 3 21 12 7 are "a d v m h".
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stops, count", [
    (("d",), 2), (("dv",), 3), (("vm", "x"), 4), (("mh", "vmh"), 5), (("zz", "a"), 1),
])
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(steps, stops, count):
    r = request("a", stop_strings=stops, max_tokens=8)
    (t,) = drain(started(Engine(slots=1, steps=steps), [r], decode=text_of))
    assert t.tokens.tolist() == [0, 3, 21, 12, 7][:count] and t.stop_reason == "stop"
    assert len(t.logp_behav) == len(t.version) == len(t.mask) == count


def test_stop_strings_of_tokens_that_complete_nothing_end_nothing():
    r = request("a", stop_strings=("da", "aa"), max_tokens=4)
    (t,) = drain(started(Engine(slots=1), [r], decode=text_of))
    assert_as_alone([t], [r])


def test_a_step_decodes_what_is_new_of_a_long_sequence():
    sizes = []
    decode = lambda tokens: sizes.append(len(tokens)) or text_of(tokens)
    r = request("a", stop_strings=("zz",), max_tokens=150)
    (t,) = drain(started(Engine(slots=1, steps=2, max_length=160), [r], decode=decode))
    assert len(t.tokens) == 150
    assert max(sizes) <= 3 * 2  # two calls of context and the new one, of two tokens each


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_a_stop_string_that_was_drawn_counts_more_than_the_abort(how):
    r = request("a", stop_strings=("d",), max_tokens=9)
    scheduler = started(Engine(slots=1, steps=3), [r], decode=text_of)
    assert scheduler.step() == []
    if how == "abort":
        scheduler.abort("a")
    (t,) = scheduler.step() if how == "abort" else scheduler.pause("abort")
    assert (t.stop_reason, t.tokens.tolist()) == ("stop", [0, 3])


def test_a_stop_string_may_begin_before_the_interruption():
    r = request("a", stop_strings=("dv",), max_tokens=9)
    scheduler = started(Engine(slots=1, steps=2), [r], decode=text_of)
    scheduler.step()
    (partial,) = scheduler.pause("abort")
    assert partial.tokens.tolist() == [0, 3]
    scheduler.add(resumed(r, partial))
    (t,) = drain(scheduler)
    assert (t.stop_reason, t.tokens.tolist()) == ("stop", [0, 3, 21])


# KV eviction


def test_evicted_positions_are_recorded_as_the_engine_saw_them():
    engine = Engine(slots=1, steps=1, page_size=4, max_length=40)
    r = request("a", np.arange(10), max_tokens=14)
    scheduler = started(engine, [r], retention=KVEviction(sinks=1, window=1))
    (t,) = drain(scheduler)
    # Pages 0, 1, 2 are full when position 11 is written: the query at 12 is the first without
    # page 1; that at 16 without page 2, that at 20 without page 3.
    never, evicted = [NEVER] * 4, [[12] * 4, [16] * 4, [20] * 4]
    assert t.evict_step.tolist() == never + sum(evicted, []) + [NEVER] * 8
    assert scheduler.stats.evicted == 3
    assert_replays(t, r)


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("sinks, window", [(0, 1), (1, 2), (2, 1)])
def test_the_engine_read_what_evict_step_says(steps, sinks, window):
    engine = Engine(slots=2, steps=steps, page_size=4, max_length=60)
    requests = [request("a", np.arange(21), max_tokens=35), request("b", (1,), max_tokens=40)]
    scheduler = started(engine, requests, retention=KVEviction(sinks, window))
    for t, r in zip(sorted(drain(scheduler), key=lambda t: t.id), requests, strict=True):
        start, length = len(t.prompt), len(t.prompt) + len(t.tokens)
        assert len(t.evict_step) == length and t.evict_step.min() < NEVER
        for query in range(start - 1, length - 1):
            seen = [s for s in range(query + 1) if query < t.evict_step[s]]
            assert engine.reads[t.id, query] == seen
            if query >= start + steps:
                assert len(seen) <= (sinks + window + 1) * 4 + steps
        assert_replays(t, r)
    # And two pages between, by their attention.
    engine = Engine(slots=2, steps=steps, page_size=4, max_length=60, weighs_pages=True)
    scheduler = started(engine, requests, retention=KVEviction(sinks, window, heavy=2))
    for t, r in zip(sorted(drain(scheduler), key=lambda t: t.id), requests, strict=True):
        by_age = np.sort(t.evict_step[t.evict_step < NEVER])
        assert not np.array_equal(t.evict_step[: len(by_age)], by_age), "some old page is kept"
        assert t.evict_step.tolist() == evictions_by_attention(t, steps, 4, sinks, window, heavy=2)
        start, stop = len(t.prompt), len(t.prompt) + len(t.tokens)
        assert KVEviction(sinks, window, heavy=2).allows(t.evict_step, start, stop, 4)
        assert_replays(t, r)


def evictions_by_attention(t, steps, size, sinks, window, heavy):
    """evict_step of a record in calls of `steps` tokens, one query and one key at a time."""
    start, length = len(t.prompt), len(t.prompt) + len(t.tokens)
    evicted, mass = [NEVER] * length, dict.fromkeys(range(length // size + 1), 0.0)
    for query in range(start - 1, length - 1):
        for position in range(query + 1):
            if evicted[position] == NEVER:
                mass[position // size] += attention(query, position)
        if (query - start + 2) % steps or query == length - 2:
            continue  # the call goes on, or is the last one
        while True:
            full = [p for p in range((query + 1) // size) if evicted[p * size] == NEVER]
            if len(full) <= sinks + heavy + window:
                break
            page = min(full[sinks : len(full) - window], key=lambda p: (mass[p], p))
            evicted[page * size : (page + 1) * size] = [query + 1] * size
    return evicted


def test_nothing_is_evicted_of_short_sequences():
    (t,) = drain(started(Engine(), [request("a", max_tokens=9)], retention=KVEviction(1, 2)))
    assert t.evict_step.shape == (0,) and t.tokens.tolist() == alone(request("a", max_tokens=9))[0]


def test_a_sequence_that_saw_evicted_keys_starts_again_when_its_pages_are_lost():
    r = request("a", stop_strings=("zz",), max_tokens=20)
    scheduler = started(
        Engine(slots=1, steps=4), [r], retention=KVEviction(0, 1), decode=text_of
    )
    for _ in range(3):
        scheduler.step()
    scheduler.pause("retract")
    update(scheduler, 1)
    (t,) = drain(scheduler)
    assert set(t.version.tolist()) == {1} and not t.segment.any()
    assert len(t.tokens) == 20
    assert_replays(t, r)


def test_a_sequence_that_starts_again_forgets_what_was_found_in_its_old_text():
    def run(stops, steps_before):
        r = request("a", stop_strings=stops, max_tokens=12)
        engine = Engine(slots=1, steps=4, page_size=2)
        scheduler = started(engine, [r], retention=KVEviction(0, 1), decode=text_of)
        assert [t for _ in range(steps_before) for t in scheduler.step()] == []
        if steps_before:
            scheduler.pause("retract")
            update(scheduler, 1)
        (t,) = drain(scheduler)
        assert_replays(t, r)
        return text_of(t.tokens), t.stop_reason

    old, new = run((), 0)[0], run((), 2)[0]
    # Drawn by the second call of the old weights, never by the new ones.
    (stop, *_) = [c for c in old[4:8] if c not in old[:4] + new]
    assert run((stop,), 0) == (old[: old.index(stop) + 1], "stop")
    assert run((stop,), 2) == (new, "length")


@pytest.mark.parametrize("sinks, window", [(-1, 1), (0, 0)])
def test_a_retention_that_keeps_nothing_is_refused(sinks, window):
    with pytest.raises(ValueError, match="keep at least one page of the window"):
        KVEviction(sinks, window)
    with pytest.raises(ValueError, match="no negative number"):
        KVEviction(1, 1, heavy=-1)
    with pytest.raises(ValueError, match="heavy=1.* which the engine does not record; set"):
        started(Engine(), [], retention=KVEviction(1, 1, heavy=1))


# Memory between two phases of a run


def test_a_scheduler_at_rest_holds_no_cache_and_goes_on():
    class Counted(Engine):
        made = 0

        def init_state(self):
            self.made += 1
            return super().init_state()

    engine, requests = Counted(slots=2), [request(i, max_tokens=6) for i in "abc"]
    scheduler = started(engine, requests)
    with pytest.raises(ValueError, match="3 requests are pending"):
        scheduler.release_cache()
    drain(scheduler)
    state = weakref.ref(scheduler._runner.state)
    scheduler.release_cache()
    assert state() is None and engine.made == 1
    assert all(pages.free == engine.num_pages - 1 for pages in scheduler.pages)
    again = [request(i, max_tokens=6) for i in "ad"]
    for r in again:
        scheduler.add(r)
    for t in drain(scheduler):
        assert_replays(t, next(r for r in again if r.id == t.id))
    assert engine.made == 2


def test_a_scheduler_that_sleeps_holds_no_weights_and_needs_others():
    scheduler = started(Engine(slots=2), [request(i, max_tokens=6) for i in "abc"])
    with pytest.raises(ValueError, match="3 requests are pending"):
        scheduler.sleep()
    drain(scheduler)
    state = weakref.ref(scheduler._runner.state)
    scheduler.sleep()
    assert scheduler._runner.params is None and state() is None
    scheduler.add(request("d", max_tokens=6))
    with pytest.raises(RuntimeError, match="the sampler has no weights"):
        scheduler.step()
    scheduler.set_params(1, 1)
    [found] = drain(scheduler)
    assert set(found.version.tolist()) == {1}


# Statistics


def test_statistics_count_slots_tokens_and_time():
    # Two slots, 3 steps a call: `a` draws 3 + 1, `b` 2; the second call ends after one step.
    requests = [request("a", max_tokens=4), request("b", max_tokens=2)]
    scheduler = started(Engine(slots=2, steps=3), requests)
    drain(scheduler)
    stats = scheduler.stats
    assert (stats.calls, stats.tokens, stats.slot_steps) == (2, 6, 2 * (3 + 1))
    assert stats.occupancy == 6 / 8
    assert (stats.prefilled, stats.shared, stats.preempted, stats.evicted) == (3, 3, 0, 0)
    assert 0 < stats.engine_seconds < stats.seconds
