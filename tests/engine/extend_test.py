"""Turns: an extended sequence is one long sequence in which the given tokens were forced.

The oracle samples that long sequence by itself: of the engine of arithmetic with a loop over its
sums, of a model with one fresh request for each token, whose prompt is everything before.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jaxrl_tis.engine import engine
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Full, Scheduler
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.rollouts import record_check, serialize
from tests import arithmetic, weights
from tests.arithmetic import Engine, request, started

STOP = 7
PER_TOKEN = (
    "tokens", "logp_behav", "logp_raw", "entropy", "version", "kv_version", "segment", "mask",
    "turn", "logits",
)


def long_sequence(asked, news, givens):
    """(tokens, mask, turn, log-probs) of one sequence that samples news[k] tokens in turn k, or up
    to a stop id, and reads givens[k] after it."""
    history, rows = list(asked.prompt), []
    for k, new in enumerate(news):
        for token in givens[k - 1] if k else ():
            rows.append((token, False, k, 0.0))
            history.append(token)
        for _ in range(new):
            total = sum(arithmetic.key(token, s, 0) for s, token in enumerate(history))
            token, logp = arithmetic.drawn(total, asked, len(history), 0)
            rows.append((token, True, k, logp))
            history.append(token)
            if token in asked.sampling.stop_ids:
                break
    return [list(column) for column in zip(*rows, strict=True)]


def step_until(scheduler, ids, limit=300):
    """The trajectories of these requests, by id."""
    out = {}
    for _ in range(limit):
        out |= {t.id: t for t in scheduler.step()}
        if ids <= out.keys():
            return out
    raise AssertionError(f"{ids - out.keys()} never ended")


def extend(scheduler, t, given, new, **sampling):
    """Extends a record by these tokens and a turn of at most `new`."""
    most = len(t.tokens) + len(given) + new
    scheduler.extend(t, given, SamplingParams(max_tokens=most, **sampling))


def assert_lengths(t):
    """One entry per token of everything, and a record that could come from elsewhere."""
    assert {name: len(getattr(t, name)) for name in PER_TOKEN} == dict.fromkeys(
        PER_TOKEN, len(t.tokens)
    )
    assert record_check.malformed(t) is None


def assert_turns(t, asked, news, givens):
    tokens, mask, turn, logp = long_sequence(asked, news, givens)
    assert t.tokens.tolist() == tokens, t.id
    assert (t.mask.tolist(), t.turn.tolist()) == (mask, turn), t.id
    np.testing.assert_array_equal(t.logp_behav, np.array(logp, np.float32), t.id)
    np.testing.assert_array_equal(t.logp_raw, np.where(mask, t.logp_behav - 0.5, 0))
    np.testing.assert_array_equal(t.entropy, -t.logp_behav)
    assert (t.id, t.seed, t.request) == (asked.id, asked.seed, asked.hash)
    assert_lengths(t)


# What is sampled

GIVENS = [[5], [6, 7, 8], [1, 2, 3, 4], [9, 9, 1, 0, 2], list(range(11))]


@pytest.mark.parametrize("length", [1, 4, 6])
@pytest.mark.parametrize("size", [2, 4])
def test_a_turn_of_every_length_continues_the_sequence(length, size):
    """The extension is shorter and longer than a page, and ends within and at the end of one."""
    for first in range(1, 6):
        asked = request("r", np.arange(length), seed=3, max_tokens=first)
        sampler = Engine(page_size=size, prefill_chunk=4 * size, max_length=60)
        scheduler, news = started(sampler, [asked]), [first]
        (t,) = step_until(scheduler, {"r"}).values()
        for k, given in enumerate(GIVENS):
            extend(scheduler, t, given, k + 1)
            (t,) = step_until(scheduler, {"r"}).values()
            news.append(k + 1)
            assert_turns(t, asked, news, GIVENS)
            assert t.stop_reason == "length" and scheduler.pages[0].used == 0


MODES = {
    "plain": ({}, {}),
    "read late": (dict(is_read_late=True), dict(async_scheduling=True)),
    "drafts": ({}, dict(drafts=Drafts(3, 3, 64))),
    "in chunks": (dict(prefill_chunk=4), dict(prefill_calls=1)),
    "few pages": (dict(page_size=2, num_pages=34, slots=5, steps=3), {}),
    "few pages, read late": (
        dict(page_size=2, num_pages=34, slots=5, steps=3, is_read_late=True), dict(async_scheduling=True)
    ),
    "shares of slots": (dict(slots=2), dict(preempt_after=2)),
    "no cache": ({}, dict(keeps_pages=False)),
    "two shards": (dict(shards=2, slots=4), {}),
    "routes": (dict(route_shape=(2, 2)), {}),
    "routes, few pages": (dict(route_shape=(2, 2), page_size=2, num_pages=34, slots=5, steps=3), {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_groups_take_turns_side_by_side(mode):
    """Two prompts of four samples each, with other given tokens for each sample."""
    sizes, options = MODES[mode]
    sampler = Engine(**dict(max_length=64) | sizes)
    asked = {
        f"{p}/{i}": request(f"{p}/{i}", prompt, seed=i, max_tokens=3 + 2 * i)
        for p, prompt in enumerate([(1, 2, 3, 4, 5), (8, 8)]) for i in range(4)
    }
    givens = {
        id: [[i, 3] * (i + 1), [i], [4, i, 4]] for i, id in enumerate(asked)
    }
    scheduler, ended, turns = started(sampler, asked.values(), **options), {}, dict.fromkeys(asked, 0)
    begun = dict.fromkeys(asked, 0)
    for _ in range(900):
        for t in scheduler.step():
            k = turns[t.id] = turns[t.id] + 1
            assert_turns(t, asked[t.id], [asked[t.id].sampling.max_tokens] * k, givens[t.id])
            if sampler.route_shape[0]:
                arithmetic.assert_first_routes(t, sampler.passes[begun[t.id] :], ended.get(t.id))
                begun[t.id] = len(sampler.passes)
            ended[t.id] = t
            if k < 4:
                extend(scheduler, t, givens[t.id][k - 1], asked[t.id].sampling.max_tokens)
        if not scheduler.pending:
            break
    assert set(turns.values()) == {4} and not any(pages.used for pages in scheduler.pages)
    assert scheduler.stats.preempted > 0 or "few pages" not in mode
    assert (scheduler.stats.cached > 0) == (mode != "no cache")


def test_a_retried_turn_is_the_turn_of_an_undisturbed_run():
    """The record that is extended stays as it was, and nothing of the first try is left."""
    asked = request("r", max_tokens=5)
    scheduler = started(Engine(max_length=60), [asked])
    (first,) = step_until(scheduler, {"r"}).values()
    copy = serialize.trajectory_text(first)
    extend(scheduler, first, [4, 4], 6)
    scheduler.step()
    (failed,) = scheduler.pause("abort")
    assert len(failed.tokens) > 7 and serialize.trajectory_text(first) == copy
    for _ in range(2):
        extend(scheduler, first, [4, 4], 6)
        (t,) = step_until(scheduler, {"r"}).values()
        assert_turns(t, asked, [5, 6], [[4, 4]])
    undisturbed = started(Engine(max_length=60), [asked])
    (same,) = step_until(undisturbed, {"r"}).values()
    extend(undisturbed, same, [4, 4], 6)
    (same,) = step_until(undisturbed, {"r"}).values()
    assert serialize.trajectory_text(same) == serialize.trajectory_text(t)


@pytest.mark.parametrize("mode", ["plain", "read late", "routes"])
def test_a_turn_goes_on_after_an_abort_and_after_a_checkpoint(mode):
    sizes, options = MODES[mode]
    asked = request("r", max_tokens=5)
    scheduler = started(Engine(max_length=60, **sizes), [asked], **options)
    (t,) = step_until(scheduler, {"r"}).values()
    extend(scheduler, t, [4, 4, 4], 9)
    (unread,) = scheduler.pause("abort")  # before the given tokens were read
    assert_lengths(unread)
    assert unread.tokens.tolist() == [*t.tokens, 4, 4, 4] and unread.num_given == 3
    again = lambda record: dataclasses.replace(
        asked, partial=serialize.read_trajectory(serialize.trajectory_text(record)),
        sampling=SamplingParams(max_tokens=17),
    )
    scheduler.add(again(unread))
    for _ in range(2):
        scheduler.step()
    (seen,) = scheduler.records()
    assert_lengths(seen)
    assert len(seen.tokens) > 9 and seen.turn[-1] == 1 and seen.mask[-1] and not seen.mask[7]
    (stopped,) = scheduler.pause("abort")
    assert_lengths(stopped)
    for record in (seen, stopped):
        scheduler.add(again(record))
        (t,) = step_until(scheduler, {"r"}).values()
        assert_turns(t, asked, [5, 9], [[4, 4, 4]])


# The end of a turn


def stopping_seed():
    """A request that samples STOP, but not as its first token."""
    for seed in range(99):
        tokens, _ = arithmetic.alone(request("r", seed=seed, max_tokens=9))
        if STOP in tokens[1:8] and tokens[0] != STOP:
            return seed, tokens.index(STOP) + 1


def test_a_sampled_stop_token_belongs_to_its_turn_and_is_sampled_once():
    seed, count = stopping_seed()
    asked = request("r", seed=seed, max_tokens=9, stop_ids=(STOP,))
    scheduler = started(Engine(max_length=60), [asked])
    (t,) = step_until(scheduler, {"r"}).values()
    assert (t.stop_reason, len(t.tokens), t.tokens[-1]) == ("stop", count, STOP)
    extend(scheduler, t, [STOP, 2], 5, stop_ids=(STOP,))  # a given one ends nothing
    (t,) = step_until(scheduler, {"r"}).values()
    assert_turns(t, asked, [9, 5], [[STOP, 2]])
    assert len(t.tokens) > count + 2 and t.mask[count - 1] and not t.mask[count]


def test_a_turn_that_was_cut_by_length_ends_without_a_stop_token():
    seed, count = stopping_seed()
    asked = request("r", seed=seed, max_tokens=count - 1, stop_ids=(STOP,))
    scheduler = started(Engine(max_length=60), [asked])
    (t,) = step_until(scheduler, {"r"}).values()
    assert t.stop_reason == "length" and STOP not in t.tokens
    extend(scheduler, t, [3], 2, stop_ids=(STOP,))
    (t,) = step_until(scheduler, {"r"}).values()
    assert_turns(t, asked, [count - 1, 2], [[3]])


@pytest.mark.parametrize("is_late", [False, True])
def test_stop_strings_end_in_the_running_turn(is_late):
    """Not in given tokens, and not across the border of a turn."""
    sampler = Engine(max_length=60, steps=3, is_read_late=is_late)
    asked = request("r", max_tokens=4)
    scheduler = started(sampler, [asked], decode=arithmetic.text_of, async_scheduling=is_late)
    (t,) = step_until(scheduler, {"r"}).values()
    text = arithmetic.text_of(long_sequence(asked, [4, 12], [[0, 1]])[0])
    inside = text[9:11]  # of the second turn
    assert inside not in text[6:10]
    for stops, count in [
        (("ab",), 18), ((text[3] + "a",), 18), (("b" + text[6],), 18), ((text[2:4],), 18),
        (("ab", inside), 11), ((text[6],), 7),
    ]:
        if count == 18 and stops[0] in text[6:]:
            continue  # by chance, also sampled
        extend(scheduler, t, [0, 1], 12, stop_strings=stops)
        (second,) = step_until(scheduler, {"r"}).values()
        assert second.stop_reason == ("length" if count == 18 else "stop"), stops
        assert arithmetic.text_of(second.tokens) == text[:count], stops
        assert_lengths(second)
        # And the turn after it, from a record whose last token was read.
        extend(scheduler, second, [2], 3)
        (third,) = step_until(scheduler, {"r"}).values()
        assert_turns(third, asked, [4, count - 6, 3], [[0, 1], [2]])


def test_least_tokens_count_all_of_the_record_as_most_do():
    for seed in range(99):
        asked = request("r", seed=seed, max_tokens=4)
        text = arithmetic.text_of(long_sequence(asked, [4, 12], [[0, 1]])[0])
        stop = text[8]  # the third token of the turn, and of none before
        if stop not in text[6:8] and stop in text[9:]:
            break
    scheduler = started(Engine(max_length=60), [asked], decode=arithmetic.text_of)
    (t,) = step_until(scheduler, {"r"}).values()
    for least, end in ((0, 9), (8, 9), (9, text.index(stop, 9) + 1)):
        extend(scheduler, t, [0, 1], 12, stop_strings=(stop,), min_tokens=least)
        (second,) = step_until(scheduler, {"r"}).values()
        assert len(second.tokens) == end, least


# What is read again


def second_turn(scheduler, sampler, given=(5, 5, 5, 5, 5), between=lambda: None):
    """The prefill calls of a second turn: prompt of 6, 5 sampled, `given`, 3 sampled."""
    (t,) = step_until(scheduler, {"r"}).values()
    between()
    count = len(sampler.prefilled)
    extend(scheduler, t, given, 3)
    (t,) = step_until(scheduler, {"r"}).values()
    return t, [(start, len(tokens)) for call in sampler.prefilled[count:] for start, tokens in call]


SIX = request("r", np.arange(6), max_tokens=5)


@pytest.mark.parametrize("given, start", [(5, 8), (1, 8), (12, 8)])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_pages_of_sampled_tokens_are_found(given, start, is_late):
    """11 tokens fill 2 pages; the key of the last token was never written."""
    sampler = Engine(max_length=60, prefill_chunk=40, is_read_late=is_late, steps=1)
    scheduler = started(sampler, [SIX], async_scheduling=is_late)
    t, calls = second_turn(scheduler, sampler, [5] * given)
    assert calls == [(start, 11 + given - start)] and scheduler.stats.cached == 8
    assert t.segment.tolist() == [0] * (5 + given) + [1] * 3
    assert_turns(t, SIX, [5, 3], [[5] * given])


def test_a_page_whose_last_key_is_missing_is_read_again():
    """12 tokens: the key of the twelfth is written when a thirteenth is sampled."""
    for sampled, start in ((6, 8), (7, 12)):
        sampler = Engine(max_length=60, prefill_chunk=40)
        asked = request("r", np.arange(6), max_tokens=sampled)
        t, calls = second_turn(started(sampler, [asked]), sampler, [3])
        assert calls == [(start, 7 + sampled - start)]
        assert_turns(t, asked, [sampled, 3], [[3]])


@pytest.mark.parametrize("when", ["between", "in the turn"])
def test_pages_of_older_weights_are_read_again(when):
    sampler = Engine(max_length=60, prefill_chunk=40, steps=2)
    scheduler = started(sampler, [SIX])
    if when == "in the turn":
        scheduler.step()
        scheduler.set_params(1, 1)
    update = lambda: when == "between" and scheduler.set_params(1, 1)
    t, calls = second_turn(scheduler, sampler, between=update)
    assert calls == [(0, 4), (4, 12)]  # the page of the prompt by itself, as for a group
    first = [0] * 5 if when == "between" else [0, 0, 1, 1, 1]
    assert t.version.tolist() == first + first[-1:] * 5 + [1] * 3
    assert t.kv_version.tolist() == [0] * 10 + [1] * 3 and t.segment.tolist() == [0] * 10 + [1] * 3
    arithmetic.assert_replays(t, SIX)


def test_pages_may_be_taken_meanwhile():
    """Four other sequences need all pages while the environment thinks."""
    for count, calls in ((0, [(8, 8)]), (1, [(8, 8)]), (4, [(0, 4), (4, 12)])):
        sampler = Engine(slots=4, max_length=40, prefill_chunk=40, num_pages=27)
        scheduler = started(sampler, [SIX])

        def others(count=count, scheduler=scheduler):
            asked = [request(f"o{i}", [9 + i], max_tokens=30) for i in range(count)]
            for r in asked:
                scheduler.add(r)
            if asked:
                step_until(scheduler, {r.id for r in asked})

        t, found = second_turn(scheduler, sampler, between=others)
        assert found == calls
        assert_turns(t, SIX, [5, 3], [[5] * 5])


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_dialogue_in_a_new_prompt_finds_the_pages_of_its_turns(is_rebuilt):
    """As a chat sends it: with the tokens of both turns, and the experts that they went through when
    their keys were written."""
    sampler = Engine(max_length=60, prefill_chunk=40, route_shape=(2, 3))
    scheduler = started(sampler, [SIX])
    (t,) = step_until(scheduler, {"r"}).values()
    extend(scheduler, t, [5] * 5, 5)
    scheduler.step()
    if is_rebuilt:  # with 18 tokens, two of them in the last page
        scheduler.pause("retract")
        scheduler.set_params(1, 1)
    (t,) = step_until(scheduler, {"r"}).values()
    first = len(sampler.passes)
    chat = request("chat", [*t.prompt, *t.tokens, 1, 2], max_tokens=2)
    scheduler.add(chat)
    (told,) = step_until(scheduler, {"chat"}).values()
    assert sampler.prefilled[-1][0][0] == 20  # of 21 + 2 tokens
    arithmetic.assert_first_routes(told, sampler.passes[first:])
    arithmetic.assert_replays(told, chat)
    if not is_rebuilt:
        np.testing.assert_array_equal(told.routes[:20], t.routes)


def test_a_prompt_that_is_half_filled_leaves_no_pages():
    scheduler, sampler, short, long = arithmetic.being_filled(16, 2)
    scheduler.step()
    assert 0 < sum(start == 0 for call in sampler.prefilled for start, _ in call[-1:]) < 4
    scheduler.abort("long")
    again = request("again", long.prompt, max_tokens=2)
    scheduler.add(again)
    ended = step_until(scheduler, {"again"})
    assert ended["again"].tokens.tolist() == arithmetic.alone(again)[0]


def test_evicted_sequences_leave_no_pages_and_are_not_extended():
    sampler = Engine(max_length=60, page_size=2, prefill_chunk=40)
    scheduler = started(sampler, [request("r", max_tokens=9)], retention=KVEviction(1, 1))
    (t,) = step_until(scheduler, {"r"}).values()
    assert len(t.evict_step) and scheduler.stats.evicted
    with pytest.raises(ValueError, match="request r: .* saw evicted keys, which cannot be rebuilt"):
        extend(scheduler, t, [1], 1)
    other = request("o", [*t.prompt, *t.tokens], max_tokens=1)
    scheduler.add(other)
    step_until(scheduler, {"o"})
    assert sampler.prefilled[-1][0][0] == 2  # of the prompt alone


def test_the_prompts_log_probs_stay():
    asked = request("r", np.arange(6), max_tokens=5, prompt_logprobs=True)
    scheduler = started(Engine(max_length=60), [asked])
    (t,) = step_until(scheduler, {"r"}).values()
    assert len(t.prompt_logps) == 6
    for is_asked in (True, False):
        extend(scheduler, t, [1, 2], 3, prompt_logprobs=is_asked)
        (second,) = step_until(scheduler, {"r"}).values()
        np.testing.assert_array_equal(second.prompt_logps, t.prompt_logps)


# The queue


def test_a_turn_goes_before_requests_that_have_not_begun():
    asked = [request(id, max_tokens=2) for id in "abcd"]
    sampler = Engine(slots=1, max_length=60)
    scheduler = started(sampler, asked)
    ended = step_until(scheduler, {"a"})
    extend(scheduler, ended["a"], [1], 2)
    ended |= step_until(scheduler, {"a"})
    extend(scheduler, ended["a"], [1], 2)
    step_until(scheduler, {"d"})
    assert [id for call in sampler.inserted for id in call.values()] == list("aaabcd")


def test_the_queue_may_be_full():
    scheduler = started(Engine(), [request("r", max_tokens=2)], max_pending=1)
    (t,) = step_until(scheduler, {"r"}).values()
    scheduler.add(request("o", max_tokens=2))
    with pytest.raises(Full):
        extend(scheduler, t, [1], 1)
    step_until(scheduler, {"o"})
    extend(scheduler, t, [1], 1)


@pytest.mark.parametrize("given, most, why", [
    ([], 9, "the extension is empty; give at least one token"),
    ([[1, 2]], 9, "the extension is int64 of shape (1, 2); give a sequence of token ids"),
    ([1, 1000], 9, "the extension has tokens beyond the vocabulary of 1000"),
    ([1, -1], 9, "extension ids from -1 to 1; token ids are 0 to 2147483647"),
    ([1] * 36, 80, "the record of 3 prompt tokens + 2 tokens and the extension of 36 tokens leave no "
     "room in the cache of 40 positions"),
    ([1] * 7, 9, "the record of 2 tokens and the extension of 7 tokens leave no room for a turn "
     "within max_tokens=9, which counts all of them; raise it"),
    ([1] * 7, 38, "3 prompt tokens + 38 new tokens exceed the cache of 40 positions"),
])
def test_what_cannot_be_extended(given, most, why):
    scheduler = started(Engine(), [request("r", max_tokens=2)])
    (t,) = step_until(scheduler, {"r"}).values()
    with pytest.raises(ValueError) as caught:
        scheduler.extend(t, given, SamplingParams(max_tokens=most))
    assert str(caught.value).startswith(f"request r: {why}") and not scheduler.pending


def test_a_record_without_tokens_or_in_the_queue_is_not_extended():
    scheduler = started(Engine(), [request("r", max_tokens=2)])
    (none,) = scheduler.pause("abort")
    with pytest.raises(ValueError, match="request r: the record to extend has no tokens"):
        extend(scheduler, none, [1], 1)
    scheduler.add(request("r", max_tokens=2))
    (t,) = step_until(scheduler, {"r"}).values()
    extend(scheduler, t, [1], 1)
    with pytest.raises(ValueError, match="request r: another live request has this id"):
        extend(scheduler, t, [1], 1)


# A model with experts, in invariant numerics

MODEL = ModelConfig(
    family="qwen3", vocab_size=48, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=128, norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tie_embeddings=True,
    moe=MoeConfig(num_experts=8, top_k=2, expert_dim=16),
)
BITS = ("tokens", "logp_behav", "logp_raw", "entropy", "kept", "top_ids", "top_logps")


@functools.cache
def model_engine():
    return engine.Engine(MODEL, EngineConfig(
        slots=4, steps=3, prefill_batch=2, max_length=96, page_size=16, num_pages=14,
        prefill_chunk=16, numerics="invariant", unroll=False, record_routes=True, num_kept=8,
        top_n=3,
    ))


@functools.cache
def served(version):
    return model_engine().load(weights.drawn(MODEL, seed=version))


def fresh(t, sampling, at, version):
    """The token at this place of a record, sampled by a request that has all before as its prompt,
    in empty pages."""
    prompt = np.concatenate([t.prompt, t.tokens[:at]])
    scheduler = Scheduler(model_engine(), served(version))
    scheduler.add(Request(t.id, prompt, t.seed, dataclasses.replace(sampling, max_tokens=1)))
    while scheduler.pending:
        for alone in scheduler.step():
            return alone


@pytest.mark.compiles
@pytest.mark.by_jax("bits depend on what XLA makes of the programs")
@pytest.mark.parametrize("options", [
    {}, dict(async_scheduling=True),
    pytest.param(dict(drafts=Drafts(4, 3, 64)), marks=pytest.mark.all),
], ids=["plain", "read late", "drafts"])
def test_every_bit_is_that_of_a_fresh_prefill(options):
    """Three turns, with new weights before the last one and an abort within the second."""
    rng, sampling = np.random.default_rng(0), SamplingParams(max_tokens=9, top_k=6, temperature=1.2)
    prompts = rng.integers(0, 48, (2, 13))
    scheduler, turns, ended = Scheduler(model_engine(), served(0), **options), 0, {}
    for i in range(4):
        scheduler.add(Request(f"r{i}", prompts[i % 2], i, sampling))
    for turns, given in enumerate([1, 20, 0]):
        ended = step_until(scheduler, {f"r{i}" for i in range(4)})
        if turns == 1:
            assert scheduler.stats.cached >= 4 * 16
            scheduler.set_params(served(1), 1)
        for t in ended.values() if given else ():
            tokens = rng.integers(0, 48, given)
            most = dataclasses.replace(sampling, max_tokens=len(t.tokens) + given + 9)
            scheduler.extend(t, tokens, most)
        if turns == 0:
            scheduler.step()
            partials = scheduler.pause("abort")
            assert any(0 < p.mask[-3:].sum() for p in partials)
            for p in partials:
                whole = SamplingParams(max_tokens=19, top_k=6, temperature=1.2)
                scheduler.add(Request(p.id, p.prompt, p.seed, whole, p))
    for t in ended.values():
        assert len(t.tokens) == 48 and t.mask.sum() == 27 and t.turn[-1] == 2
        assert t.version.tolist() == [0] * 39 + [1] * 9
        for at in np.flatnonzero(t.mask)[::4]:
            alone = fresh(t, sampling, at, t.version[at])
            for name in BITS:
                assert getattr(alone, name).tobytes() == getattr(t, name)[at].tobytes(), (name, at)
            if t.version[at] == 0:
                np.testing.assert_array_equal(alone.routes, t.routes[: 13 + at])
        assert len(t.routes) == 13 + 47 and record_check.malformed(t) is None
