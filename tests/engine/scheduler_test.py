"""The scheduler on an engine made of arithmetic, whose every token can be predicted by hand."""

import collections
import dataclasses
import inspect
from unittest import mock

import numpy as np
import pytest

from jaxrl_tis.engine.policies import POLICIES, LongestFirst, ShortestPrompt
from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.endings import NonFinite
from jaxrl_tis.engine.scheduler import Full, Scheduler
from jaxrl_tis.engine.wait_queue import WaitQueue
from tests import arithmetic
from tests.arithmetic import (
    Engine, alone, assert_as_alone, being_filled, drain, request, started,
)


def mixed_requests(count=11):
    return [request(f"r{i}", np.arange(1 + i % 6), seed=i, max_tokens=1 + (5 * i) % 7,
                    stop_ids=(7 * i % arithmetic.VOCAB, 12)) for i in range(count)]


def order_of(engine):
    """Ids in the order in which they got slots."""
    return [id for rows in engine.inserted for id in rows.values()]


# Slots


def test_more_requests_than_slots_all_come_back_in_any_order_of_arrival():
    requests = mixed_requests()
    assert {alone(r)[1] for r in requests} == {"stop", "length"}
    for arrival in (requests, requests[::-1], requests[5:] + requests[:5]):
        engine = Engine()
        assert_as_alone(drain(started(engine, arrival)), requests)
        slots = [slot for rows in engine.inserted for slot in rows]
        assert min(slots.count(slot) for slot in range(3)) >= 2, "slots are reused"


def test_slots_are_refilled_while_others_run():
    requests = [request("long", max_tokens=6), request("short", max_tokens=1),
                request("late", max_tokens=2)]
    scheduler = started(Engine(slots=2, steps=1), requests)
    # `late` takes the slot of `short` at the second step and ends at the third.
    ended = [[t.id for t in scheduler.step()] for _ in range(6)]
    assert ended == [["short"], [], ["late"], [], [], ["long"]]


# Prompt (1, 2, 3) of keys 1 + 4 + 9 = 14; position 3 adds 9: 23 -> 0, whose key is 0. Position 4:
# 14 + 12 = 26 -> 3 of key 15. Position 5: 29 + 15 = 44 -> 21 of key 126. Position 6: 155 + 18 = 173
# -> 12 of key 84. Position 7: 239 + 21 = 260 -> 7.
TOKENS = [0, 3, 21, 12, 7]


def test_stop_ids_and_max_tokens_end_a_sequence():
    cases = {
        "never": (dict(max_tokens=5), TOKENS, "length"),
        "stop": (dict(max_tokens=5, stop_ids=(22, 21)), TOKENS[:3], "stop"),
        "at_once": (dict(max_tokens=5, stop_ids=(0,)), TOKENS[:1], "stop"),
        "one": (dict(max_tokens=1), TOKENS[:1], "length"),
        "stop_is_last": (dict(max_tokens=2, stop_ids=(3,)), TOKENS[:2], "stop"),
    }
    requests = [request(id, **sampling) for id, (sampling, _, _) in cases.items()]
    trajectories = drain(started(Engine(slots=2), requests))
    got = {t.id: (t.tokens.tolist(), t.stop_reason) for t in trajectories}
    assert got == {id: (tokens, reason) for id, (_, tokens, reason) in cases.items()}


def test_record_has_the_dtypes_and_provenance_of_the_contract():
    r = request("a", (5, 6), seed=9, temperature=0.5, max_tokens=3)
    scheduler = Scheduler(Engine(), 0, version=4)
    scheduler.add(r)
    (t,) = drain(scheduler)
    assert (t.id, t.seed, t.request) == ("a", 9, r.hash)
    assert (t.quant_id, t.temperature) == ("arithmetic", 0.5)
    np.testing.assert_array_equal(t.prompt, [5, 6])
    fields = dict(tokens=np.int32, mask=bool, turn=np.int32, logp_behav=np.float32,
                  logp_raw=np.float32, entropy=np.float32, version=np.int32,
                  kv_version=np.int32, segment=np.int32)
    for name, dtype in fields.items():
        assert getattr(t, name).dtype == dtype and getattr(t, name).shape == (3,), name
    assert t.mask.all() and not t.turn.any() and not t.segment.any()
    assert t.version.tolist() == t.kv_version.tolist() == [4, 4, 4]
    # 5 + 12 = 17, seed 45, position 2 adds 6: 68 -> 22, whose key is 66; position 3: 62 + 66 + 9.
    assert t.logp_behav.tolist()[:2] == [-68, -137]
    np.testing.assert_array_equal(t.logp_raw, t.logp_behav - 0.5)
    np.testing.assert_array_equal(t.entropy, -t.logp_behav)
    np.testing.assert_array_equal(t.logits, np.stack([t.logp_behav, t.logp_raw], axis=1))


def test_pending_counts_what_was_not_returned_and_ids_are_free_again():
    scheduler = Scheduler(Engine(slots=2, steps=1), 0)
    assert scheduler.pending == 0 and scheduler.step() == []
    for _ in range(2):
        for i in range(5):
            scheduler.add(request(f"r{i}", max_tokens=1))
        counts = [scheduler.pending]
        while scheduler.pending:
            scheduler.step()
            counts.append(scheduler.pending)
        assert counts == [5, 3, 1, 0]


def test_the_scheduler_calls_nothing_outside_the_protocol():
    methods = [name for name, _ in inspect.getmembers(EngineProtocol, inspect.isfunction)]
    names = {*EngineProtocol.__annotations__, *(n for n in methods if not n.startswith("_"))}

    class Strict:
        def __getattr__(self, name):
            assert name in names, f"EngineProtocol lacks {name}"
            return getattr(engine, name)

    engine = Engine(slots=1)
    scheduler = started(Strict(), [request("a", max_tokens=9), request("b", max_tokens=9)])
    scheduler.step()
    scheduler.abort("a")
    assert {t.id for t in drain(scheduler)} == {"a", "b"}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_whose_log_prob_is_not_finite_end_their_request_alone(async_scheduling):
    """The error names the requests and the tokens before; it searches once for each version."""
    good = [request(f"r{i}", seed=i, max_tokens=9) for i in range(3)]
    bad = [request(f"bad{i}", (4, 5), seed=i, max_tokens=9) for i in range(2)]
    engine = arithmetic.Overflowing(slots=3)
    scheduler = started(engine, [*bad, *good], async_scheduling=async_scheduling)
    records, raised = [], []
    while scheduler.pending:
        try:
            records += scheduler.step()
        except NonFinite as error:
            raised.append(error)
    assert_as_alone(records, good)
    assert [id for error in raised for id in error.ids] == ["bad0", "bad1"]
    before = [4, 5, *alone(bad[0])[0][:2]]
    assert "log-prob of token 2 of bad0" in str(raised[0])
    assert f"is not finite: weights 0 break after {before}" in str(raised[0])
    assert all(pages.used == 0 for pages in scheduler.pages) and not scheduler._endings._failed
    with mock.patch.object(engine, "non_finite", side_effect=AssertionError):
        scheduler.add(request("bad2", (4, 5), max_tokens=9))
        with pytest.raises(NonFinite, match="of bad2 is not finite: weights 0 break"):
            drain(scheduler)
    scheduler.set_params(7, 1)
    scheduler.add(request("bad3", (4, 5), max_tokens=9))
    with pytest.raises(NonFinite, match="weights 7 break"):
        drain(scheduler)


def test_a_failed_request_is_pending_until_a_step_has_said_so():
    """A pause between the call and the next step returns no record of it."""
    engine, requests = arithmetic.Overflowing(slots=1), [request("bad", max_tokens=9)]
    scheduler = started(engine, requests, async_scheduling=True)
    scheduler.step()
    scheduler.step()
    assert scheduler.pause("abort") == [] and scheduler.pending == 1
    with pytest.raises(NonFinite, match="of bad is not finite"):
        scheduler.step()
    assert scheduler.pending == 0


# Who is refused


PARTIAL = dict(
    tokens=np.array([0, 3]), mask=np.ones(2, bool), turn=np.zeros(2, int),
    stop_reason="abort", seed=0, request=0, quant_id="arithmetic", temperature=1.0,
    logits=np.zeros((2, 2)),
    **{name: np.zeros(2) for name in ("logp_behav", "logp_raw", "entropy", "version")},
)


def partial(id="p", prompt=(1, 2, 3), **changes):
    return Trajectory(id, np.array(prompt), **PARTIAL | changes)


@pytest.mark.parametrize("bad, words", [
    (request("e", ()), ["request e:", "empty"]),
    (request("long", np.arange(37), max_tokens=4), ["long", "37", "4", "40", "engine.max_length"]),
    (request("stops", stop_ids=(1, 2, 3)), ["stops", "3 stop ids", "2"]),
    (request("text", stop_strings=("a",)), ["text", "decode"]),
    (request("live"), ["live", "another live request"]),
    (request("p", partial=partial("q")), ["p", "of another request"]),
    (request("p", (1, 2), partial=partial()), ["p", "of another request"]),
    (request("p", seed=1, partial=partial()), ["p", "of another request"]),
    (request("p", partial=partial(stop_reason="stop")), ["ended by itself (stop)"]),
    (request("p", partial=partial(evict_step=np.zeros(5, np.int32))), ["evicted"]),
    (request("p", partial=partial(), max_tokens=2), ["2 tokens", "(2)"]),
    (request("p", partial=partial(), temperature=0.5), ["temperature 1.0, not 0.5"]),
    (request("p", partial=partial(quant_id="w8a8")), ["drawn by w8a8, not arithmetic"]),
    (request("p", partial=partial(kept=np.zeros((2, 3), int))), ["'kept': 3", "'kept': 0"]),
    (request("v", (3, 1000)), ["beyond the vocabulary of 1000"]),
    (request("m", min_tokens=2, stop_ids=(1,)), ["min_tokens with stop ids", "penalties=True"]),
])
def test_requests_that_can_never_run_are_refused(bad, words):
    scheduler = started(Engine(max_length=40), [request("live", max_tokens=1)])
    with pytest.raises(ValueError) as error:
        scheduler.add(bad)
    assert all(word in str(error.value) for word in words), error.value
    assert scheduler.pending == 1
    assert [t.id for t in drain(scheduler)] == ["live"]


def test_the_longest_request_fits_into_the_fewest_pages():
    # 40 positions are 10 pages; a prompt that does not fill its last one needs a copy of that.
    for length in (36, 37):
        longest = [request(id, np.arange(length), max_tokens=40 - length) for id in "ab"]
        assert_as_alone(drain(started(Engine(num_pages=12), longest)), longest)


def test_beyond_max_pending_the_scheduler_is_full_until_something_is_returned():
    scheduler = Scheduler(Engine(slots=1, steps=1), 0, max_pending=2)
    scheduler.add(request("a", max_tokens=1))
    scheduler.add(request("b", max_tokens=1))
    with pytest.raises(Full, match="2 requests are pending, and at most 2"):
        scheduler.add(request("c", max_tokens=1))
    assert [t.id for t in scheduler.step()] == ["a"]
    scheduler.add(request("c", max_tokens=1))
    assert [t.id for t in drain(scheduler)] == ["b", "c"]


# Order of admission


def test_each_policy_admits_in_its_order():
    sizes = dict(a=((1, 2, 3), 2), b=((1,), 3), c=((1, 2), 5), d=((2,), 5))
    requests = [request(id, prompt, max_tokens=n) for id, (prompt, n) in sizes.items()]
    orders = {
        "first_come": "abcd", "shortest_prompt": "bdca", "longest_first": "cdba",
        "group_longest_first": "abcd",  # each is the probe of its group
    }
    assert orders.keys() == POLICIES.keys()
    for name, order in orders.items():
        engine = Engine(slots=1)
        assert_as_alone(drain(started(engine, requests, policy=POLICIES[name]())), requests)
        assert order_of(engine) == list(order), name


def test_probes_go_first_then_the_groups_whose_samples_were_longest():
    # The probe of x stops at its first token, TOKENS[0]; that of y draws 4 of 8 allowed tokens.
    x = [request(f"x{i}", max_tokens=8, stop_ids=(0,)) for i in range(3)]
    y = [request(f"y{i}", (1, 2), max_tokens=4) for i in range(2)]
    engine = Engine(slots=1)
    drain(started(engine, x + y, policy=POLICIES["group_longest_first"]()))
    assert order_of(engine) == ["x0", "y0", "y1", "x1", "x2"]


def test_an_aborted_probe_is_no_estimate_and_has_a_successor():
    policy = POLICIES["group_longest_first"]()
    x = [request(f"x{i}", max_tokens=8) for i in range(2)]
    y = [request(f"y{i}", (1, 2), max_tokens=4) for i in range(2)]
    engine = Engine(slots=1)
    scheduler = started(engine, x + y, policy=policy)
    scheduler.step()
    scheduler.abort("x0")
    drain(scheduler)
    assert order_of(engine) == ["x0", "x1", "y0", "y1"]


@pytest.mark.parametrize("slots, bound, place", [(1, 0, 0), (1, 2, 2), (3, 2, 2), (1, None, 6)])
def test_nobody_is_passed_over_more_often_than_max_wait_admissions(slots, bound, place):
    requests = [request("long", np.arange(9), max_tokens=1)]
    requests += [request(f"r{i}", (i,), max_tokens=1) for i in range(6)]
    engine = Engine(slots=slots, prefill_chunk=12, prefill_batch=3)
    drain(started(engine, requests, policy=ShortestPrompt(), max_wait_admissions=bound))
    ids = order_of(engine)
    # Within a step the slots tell the order.
    ids = [id for rows in engine.inserted for _, id in sorted(rows.items())]
    first = ids.index("long") // slots
    assert first == place // slots and len(ids) == 7


@pytest.mark.cases("3")
@pytest.mark.parametrize("preempt_after", [1, 3])
def test_the_bound_holds_over_shards_for_sequences_that_made_way(preempt_after, monkeypatch):
    """Sequences with pages in a shard whose slots stay taken."""
    overtakes = collections.Counter()

    def admit(waiting, sequence):
        age = lambda s: (s.admitted_after, s.order)
        passed = [s for s in waiting if age(s) < age(sequence)]
        overtakes.update((seed, s.request.id, s.admitted_after) for s in passed)
        plain(waiting, sequence)

    plain = WaitQueue.admit
    monkeypatch.setattr(WaitQueue, "admit", admit)
    for seed in range(15):
        rng = np.random.default_rng(seed)
        engine = Engine(slots=4, shards=2, max_length=60, num_pages=20)
        scheduler = started(engine, [], policy=LongestFirst(), max_wait_admissions=3, preempt_after=preempt_after)
        for i in range(120):
            if rng.random() < 0.4:
                prompt = rng.integers(20, size=rng.choice([1, 5, 20]))
                scheduler.add(request(f"r{i}", prompt, max_tokens=int(rng.integers(1, 40))))
            scheduler.step()
        drain(scheduler)
    assert max(overtakes.values()) == 3


def test_the_bound_counts_from_the_time_a_sequence_began_to_wait():
    engine = Engine(slots=1, steps=1)
    a, b, c = (request(id, np.arange(n), max_tokens=2) for id, n in dict(a=9, b=1, c=2).items())
    scheduler = started(engine, [a], policy=ShortestPrompt(), max_wait_admissions=1)
    scheduler.step()
    scheduler.pause("retract")
    scheduler.add(b)
    scheduler.add(c)
    assert_as_alone(drain(scheduler), [a, b, c])
    assert order_of(engine) == ["a", "b", "a", "c"]


@pytest.mark.parametrize("policy", [LongestFirst, POLICIES["group_longest_first"]])
@pytest.mark.parametrize("preempt_after", [0, 2])
def test_a_step_asks_the_policy_about_few_of_those_who_wait(policy, preempt_after, monkeypatch):
    calls, plain = [], policy.key
    monkeypatch.setattr(policy, "key", lambda *args: calls.append(1) or plain(*args))
    requests = [request(f"r{i}", (i // 4 % 20, i // 80), max_tokens=1 + i % 7) for i in range(1500)]
    scheduler = started(Engine(max_length=60), requests, policy=policy(), max_wait_admissions=9,
                        preempt_after=preempt_after)
    scheduler.step()
    assert len(calls) >= 1500  # all came
    for _ in range(30):
        calls.clear()
        scheduler.step()
        assert len(calls) < 60
    assert scheduler.stats.tokens > 100


# Prefill


def test_a_long_prompt_is_filled_chunk_by_chunk_while_others_decode():
    scheduler, engine, short, _ = being_filled(17, max_tokens=1)
    seen = []
    for _ in range(5):
        ended = [t.id for t in scheduler.step()]
        seen.append((engine.prefilled[-1][0][0], scheduler.stats.tokens, ended))
    # Chunks begin at 0, 4, 8, 12, 16; `short` draws a token in each step, the last one is shared.
    assert seen == [(0, 2, []), (4, 3, []), (8, 4, []), (12, 5, []), (16, 7, ["long"])]
    assert_as_alone(drain(scheduler), [short])
    assert scheduler.stats.prefilled == 3 + 17


def test_a_prompt_is_filled_at_once_when_nobody_decodes():
    engine = Engine(slots=2, steps=1, prefill_chunk=4)
    scheduler = started(engine, [request("long", np.arange(17), max_tokens=1)], prefill_calls=1)
    assert [t.id for t in scheduler.step()] == ["long"]
    assert [call[0][0] for call in engine.prefilled] == [0, 4, 8, 12, 16]


def test_chunks_of_one_bucket_are_prefilled_together():
    engine = Engine(slots=6, prefill_batch=2)
    prompts = [(1,), (2,), (3,), (1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), (1,)]
    requests = [request(f"r{i}", p, max_tokens=1) for i, p in enumerate(prompts)]
    assert_as_alone(started(engine, requests).step(), requests)
    calls = [[tokens for _, tokens in call] for call in engine.prefilled]
    assert calls == [[(1,), (2,)], [(3,)], [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]]


@pytest.mark.parametrize("length, used, peak", [
    (512, 32, 32),  # 32 pages of 16 for all
    (500, 31 + 16, 32 + 16),  # the last page of the prompt is copied by each, then given back
])
def test_a_group_shares_the_pages_and_the_prefill_of_its_prompt(length, used, peak):
    engine = Engine(slots=16, steps=1, max_length=520, page_size=16, prefill_chunk=512)
    group = [request(f"g{i}", np.arange(length) % 23, seed=i, max_tokens=2) for i in range(16)]
    scheduler = started(engine, group)
    scheduler.step()
    (pages,), stats = scheduler.pages, scheduler.stats
    assert (pages.used, pages.peak) == (used, peak)
    assert (stats.prefilled, stats.shared) == (length, 15 * length)
    assert len(engine.prefilled) == 1
    assert_as_alone(drain(scheduler), group)


def test_a_group_is_prefilled_once_also_when_it_spans_admissions():
    engine = Engine(slots=3, steps=1)
    group = [request(f"g{i}", (1, 2, 3), seed=i, max_tokens=2 + i) for i in range(8)]
    trajectories = drain(started(engine, group))
    assert_as_alone(trajectories, group)
    assert engine.prefilled == [[(0, (1, 2, 3))]]
    assert len({tuple(t.tokens[:2]) for t in trajectories}) == 8, "samples of a group differ"


def test_a_prompt_is_not_dropped_to_make_room_for_its_own_sample():
    # Of 9 pages 7 hold the prompt, 1 the copy of `a` and 1 the prompt of `x`, which ends first.
    # Then `b` needs 1 for its copy, and `a` 1 to grow: only the last page of the prompt itself
    # could be freed. So `b` waits for the end of `a`, and finds the prompt filled.
    engine = Engine(slots=2, steps=1, page_size=4, max_length=28, num_pages=10)
    a, b = [request(id, np.arange(25), max_tokens=3) for id in "ab"]
    x = request("x", (1, 2, 3, 4), max_tokens=1)
    scheduler = started(engine, [a, x, b])
    assert_as_alone(drain(scheduler), [a, x, b])
    assert scheduler.stats.prefilled == 25 + 4 and scheduler.stats.shared == 25


def test_a_prompt_that_a_long_partial_does_not_share_is_dropped_for_it():
    """`b` and `c` leave the prompt with pages of its own. `d` has more of its tokens in cached pages,
    uses these, and needs those of the prompt."""
    def cut(ask, count):
        scheduler = started(Engine(slots=1, max_length=40, steps=1), [ask])
        for _ in range(count):
            scheduler.step()
        return dataclasses.replace(ask, partial=scheduler.pause("abort")[0])

    prompt = range(1, 10)
    b = request("b", prompt, max_tokens=27)
    c = cut(request("c", prompt, max_tokens=5), 2)
    d = cut(request("d", prompt, max_tokens=31), 29)
    for num_pages in (12, 13, 14):
        engine = Engine(
            slots=2, max_length=40, num_pages=num_pages, prefill_chunk=12, prefill_batch=4, steps=2)
        assert_as_alone(drain(started(engine, [b, c, d])), [b, c, d])


# Pages of earlier prompts


def of_prompts(*prompts, **options):
    """(scheduler, engine) that answered requests with these prompts, one after the other."""
    engine = Engine(prefill_chunk=4)
    scheduler = started(engine, [], **options)
    for i, prompt in enumerate(prompts):
        r = request(f"r{i}", prompt, seed=i, max_tokens=2)
        scheduler.add(r)
        assert_as_alone(drain(scheduler), [r])
    return scheduler, engine


def test_a_later_prompt_has_only_what_is_new_filled():
    first = tuple(range(10))
    scheduler, engine = of_prompts(first, first, (*first[:9], 5, 5), first[:8], (7, *first[1:]))
    calls = [call[0] for call in engine.prefilled]
    assert calls == [
        (0, first[:4]), (4, first[4:8]), (8, first[8:]), (8, first[8:]), (8, (8, 5, 5)),
        # Nothing of the prompt that ends with a page, all of that which begins otherwise.
        (0, (7, *first[1:4])), (4, first[4:8]), (8, first[8:]),
    ]
    assert (scheduler.stats.prefilled, scheduler.stats.cached) == (10 + 2 + 3 + 10, 8 + 8 + 8)
    without, _ = of_prompts(first, first, keeps_pages=False)
    assert (without.stats.prefilled, without.stats.cached) == (20, 0)


def test_prompts_that_begin_alike_are_filled_once_though_they_came_together():
    prompts = [(*range(8), *rest) for rest in ((1, 2), (3,), (4, 5, 6), ())]
    requests = [request(f"r{i}", p, seed=i, max_tokens=3) for i, p in enumerate(prompts)]
    engine = Engine(slots=4, prefill_batch=1)
    scheduler = started(engine, requests, prefill_calls=9)
    scheduler.step()
    assert [call[0][0] for call in engine.prefilled] == [0, 8, 8, 8]
    # 2 pages of all, and one more of each: that of the prompt's end, or of what was drawn.
    assert scheduler.pages[0].used == 2 + 4
    assert_as_alone(drain(scheduler), requests)
    assert (scheduler.stats.prefilled, scheduler.stats.cached) == (8 + 2 + 1 + 3, 3 * 8)


def test_no_page_is_found_under_new_weights_nor_after_a_rest():
    prompt = tuple(range(9))
    scheduler, engine = of_prompts(prompt)
    for forget in (lambda: scheduler.set_params(1, 1), scheduler.release_cache):
        forget()
        r = request("again", prompt, max_tokens=1)
        scheduler.add(r)
        assert_as_alone(drain(scheduler), [r], weights=1)
    assert scheduler.stats.prefilled == 27 and scheduler.stats.cached == 0


def test_prompts_that_are_scored_are_filled_whole():
    scheduler, engine = of_prompts(tuple(range(8)))
    scheduler.add(request("s", range(8), max_tokens=1, prompt_logprobs=True))
    drain(scheduler)
    assert scheduler.stats.prefilled == 16 and scheduler.stats.cached == 0


# Log-probs of prompts


def test_prompts_are_scored_where_asked():
    # Keys of (5, 6, 7, 2, 1, 3): 5, 12, 21, 8, 5, 18, so sums 5, 17, 38, 46, 51 before the targets.
    prompt, scores = (5, 6, 7, 2, 1, 3), [-11, -24, -40, -47, -54]
    engine = Engine(prefill_chunk=4)
    asked = [request(id, prompt, max_tokens=2, prompt_logprobs=True) for id in "ab"]
    plain = [request("c", prompt, max_tokens=2), request("d", prompt, max_tokens=2)]
    short = request("e", (9,), max_tokens=1, prompt_logprobs=True)
    scheduler = started(engine, [asked[0], plain[0], asked[1], plain[1], short])
    found = {t.id: t for t in drain(scheduler)}
    assert_as_alone(found.values(), [*asked, *plain, short])
    for id in "ab":
        logps = found[id].prompt_logps
        assert logps.dtype == np.float32 and logps[1:].tolist() == scores and np.isnan(logps[0])
    assert len(found["c"].prompt_logps) == len(found["d"].prompt_logps) == 0
    assert len(found["e"].prompt_logps) == 1 and np.isnan(found["e"].prompt_logps[0])
    # Those of a kind share a prefill; the plain ones find a page of the others.
    assert scheduler.stats.prefilled == 6 + 2 + 1 and scheduler.stats.shared == 6 + 6


def test_an_interrupted_sequence_keeps_the_log_probs_of_its_prompt():
    r = request("a", (5, 6, 7), max_tokens=6, prompt_logprobs=True)
    scheduler = started(Engine(steps=1), [r])
    scheduler.step()
    scheduler.set_params(1, 1)
    scheduler.pause("retract")
    scheduler.step()
    (cut,) = scheduler.pause("abort")
    scheduler.add(dataclasses.replace(r, partial=cut))
    (t,) = drain(scheduler)
    assert cut.prompt_logps[1:].tolist() == t.prompt_logps[1:].tolist() == [-11, -24]
    assert t.segment.max() == 2
    without = dataclasses.replace(cut, prompt_logps=np.zeros(0, np.float32))
    with pytest.raises(ValueError, match="lacks the prompt's log-probs"):
        scheduler.add(dataclasses.replace(r, partial=without))


def test_a_prompt_that_new_weights_meet_half_filled_is_scored_anew():
    scheduler, engine, short, _ = being_filled(6, max_tokens=1)
    scheduler.abort("long")
    scheduler.add(request("x", (5, 6, 7, 2, 1, 3), max_tokens=1, prompt_logprobs=True))
    scheduler.step()
    assert engine.prefilled[-1] == [(0, (5, 6, 7, 2))]
    scheduler.set_params(1, 1)
    found = {t.id: t for t in drain(scheduler)}
    # Every key is 7 more.
    assert found["x"].prompt_logps[1:].tolist() == [-18, -38, -61, -75, -89]


# Shards


def test_shards_have_their_own_slots_and_pages():
    engine = Engine(slots=4, shards=2, prefill_batch=2, steps=1)
    requests = [request("a", (1, 2), max_tokens=3), request("b", (3,), max_tokens=3)]
    group = [request(f"g{i}", np.arange(6), seed=i, max_tokens=4) for i in range(4)]
    scheduler = started(engine, requests + group)
    scheduler.step()
    # `b` goes where more pages are free, then one of the group to each shard.
    slots = {id: slot for rows in engine.inserted for slot, id in rows.items()}
    assert slots == {"a": 0, "b": 2, "g0": 1, "g1": 3}
    # 1 page of a, of b; the group's 6 tokens: a shared page, a copy, and the kept last page.
    assert [pages.used for pages in scheduler.pages] == [4, 4]
    assert_as_alone(drain(scheduler), requests + group)
    assert scheduler.stats.prefilled == 2 + 1 + 6 + 6 and scheduler.stats.shared == 6 + 6


def test_a_group_goes_where_its_prompt_is():
    engine = Engine(slots=6, shards=2, steps=1)
    group = [request(f"g{i}", np.arange(8), seed=i, max_tokens=3) for i in range(3)]
    scheduler = started(engine, group)
    assert_as_alone(drain(scheduler), group)
    assert scheduler.stats.prefilled == 8 and {s for r in engine.inserted for s in r} == {0, 1, 2}


# Too few pages


def test_a_request_leaves_a_page_to_each_of_those_that_run():
    # 3 pages. `a` holds one and needs another for its third token, `b` needs two.
    a, b = request("a", max_tokens=5), request("b", np.arange(8), max_tokens=1)
    scheduler = started(Engine(slots=2, steps=2, num_pages=4), [a])
    scheduler.step()
    scheduler.add(b)
    assert_as_alone(drain(scheduler), [a, b])
    assert scheduler.stats.preempted == 0


def test_the_youngest_loses_its_pages_and_the_oldest_never_does():
    # 9 pages; each of the three needs 1 + ceil(19 / 4) = 6 in the end.
    engine = Engine(slots=3, steps=4, max_length=24, num_pages=10)
    requests = [request(id, (1, 2, i), max_tokens=20) for i, id in enumerate("abc")]
    scheduler = started(engine, requests)
    trajectories = drain(scheduler)
    assert_as_alone(trajectories, requests)
    assert [t.id for t in trajectories] == ["a", "b", "c"]
    ids, segments = order_of(engine), {t.id: set(t.segment.tolist()) for t in trajectories}
    # The third call needs 4 pages each: `c` goes. The fifth needs 6 of `a` and 5 of `b`: `b` goes.
    # When `a` has ended both come back, with 5 and 4 pages, and `b` grows to 6: `c` goes again.
    assert [ids.count(id) for id in "abc"] == [1, 2, 3] and scheduler.stats.preempted == 3
    assert segments == {"a": {0}, "b": {0, 1}, "c": {0, 1, 2}}
