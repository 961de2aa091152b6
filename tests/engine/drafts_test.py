"""What is guessed, how far, and when it pays; on the scheduler and with a real engine."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_tis import sharding
from jaxrl_tis.engine.drafts import Drafts, Group, verified
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.models import transformer
from tests import arithmetic
from tests.engine import engine_test

pytestmark = pytest.mark.compiles


def begun(drafts, id, prompt, drawn=(), max_tokens=30):
    request = arithmetic.request(id, prompt, max_tokens=max_tokens)
    sequence = Sequence.of(request, 0, 0)
    drafts.add(request)
    drafts.begin(sequence)
    drafts.extend(sequence, np.array(drawn, np.int32))
    sequence.count = len(drawn)
    return sequence


def made(slots=1, max_length=7, free_batch_rows=1000):
    return Drafts(slots, max_length, free_batch_rows)


# What is guessed


@pytest.mark.parametrize("prompt, drawn, draft", [
    ((5, 6, 7, 8, 9, 1, 5, 6), (7,), [8, 9, 1, 5, 6, 7, 8]),  # after 5 6 7
    ((5, 6, 7, 8, 4, 6, 7, 9, 3), (6, 7), [9, 3, 6, 7, 9, 3, 6]),  # 6 7 last stood before 9
    ((5, 6, 7, 1, 6, 7, 2, 5), (6, 7), [1, 6, 7, 2, 5, 6, 7]),  # three are better than two
    ((1, 2, 3, 4), (), []),
    ((1, 2), (1, 2), [1, 2, 1, 2, 1, 2, 1]),
    ((3,), (), []),
])
def test_a_draft_is_what_followed_the_same_tokens_last(prompt, drawn, draft):
    drafts = made()
    sequence = begun(drafts, "a", prompt, drawn)
    length, found = drafts.propose([sequence])
    assert found.get(sequence, []) == draft and length == (7 if draft else 0)


def test_a_draft_of_several_pieces_is_that_of_single_tokens():
    group = Group()
    for tokens in ([1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [7, 4, 5, 9]):
        group.learn(tokens, 0)
    assert group.guess([1, 2, 3], 3) == [4, 5, 6]


def test_samples_of_a_prompt_learn_from_each_other_and_from_nobody_else():
    drafts = made()
    first = begun(drafts, "a", (1, 2), (10, 11, 12, 13, 14))
    second, other = begun(drafts, "b", (1, 2), (10, 11)), begun(drafts, "c", (1, 3), (10, 11))
    _, found = drafts.propose([second, other])
    assert found == {second: [12, 13, 14]}
    drafts.remove(first.request)  # what it drew is still known
    assert drafts.propose([second])[1] == {second: [12, 13, 14]}
    drafts.remove(second.request)
    drafts.remove(other.request)
    again = begun(drafts, "d", (1, 2), (10, 11))
    assert drafts.propose([again]) == (0, {})


def test_each_of_the_tokens_drawn_one_by_one_is_known():
    drafts = made()
    first, second = begun(drafts, "a", (1, 2)), begun(drafts, "b", (1, 2), (10, 11))
    for token in (10, 11, 12):
        drafts.extend(first, np.array([token], np.int32))
    assert drafts.propose([second])[1] == {second: [12]}


def test_a_draft_leaves_room_for_the_token_after_it():
    drafts = made()
    sequence = begun(drafts, "a", (5, 6, 7, 8, 9, 5, 6), (7,), max_tokens=3)
    assert drafts.propose([sequence])[1] == {sequence: [8]}


def test_drafts_of_no_token_are_refused():
    with pytest.raises(ValueError, match="max_length of drafts is 0; give at least 1"):
        Drafts(1, 0, 1000)


def test_a_draft_is_verified_up_to_its_first_wrong_token_or_the_end():
    """Slots: two right and one wrong of three; all right; the first is a stop, right and then wrong;
    no draft."""
    drafts = np.array([[5, 6, 9], [5, 6, 7], [5, 6, 7], [8, 6, 7], [7, 0, 0]])
    drawn = np.array([[5, 6, 7, 0], [5, 6, 7, 8], [5, 0, 0, 0], [5, 0, 0, 0], [7, 0, 0, 0]]).T
    compared, accepted = verified(drafts, np.array([3, 3, 3, 3, 0]), drawn, np.array([3, 4, 1, 1, 1]))
    assert compared.tolist() == [3, 3, 1, 1, 0] and accepted.tolist() == [2, 3, 1, 0, 0]


# How far


def test_acceptance_is_measured_and_forgotten():
    drafts = made()
    assert drafts.acceptance == 1 / 2
    drafts.observe(7, 7)
    assert drafts.acceptance == 8 / 9
    drafts.observe(3, 2)
    assert drafts.acceptance == 10 / 12
    drafts.propose([])
    assert drafts.acceptance == pytest.approx((1 + 9 * 0.95) / (2 + 10 * 0.95))
    drafts.forget()
    assert drafts.acceptance == 1 / 2


def best(acceptance, slots, free_batch_rows):
    """The length of the most expected tokens per time, counted out."""
    def speed(n):
        return sum(acceptance**i for i in range(n + 1)) / max(free_batch_rows, slots * (n + 1))
    return max((0, 1, 3, 7), key=speed)


@pytest.mark.parametrize("slots, free_batch_rows, expected", [
    (1, 1000, 7), (1, 4, 3), (1, 2, 1), (1, 1, 0), (16, 128, 7), (64, 128, 1), (128, 128, 0)])
def test_the_length_gives_the_most_tokens(slots, free_batch_rows, expected):
    for accepted, rejected in ((30, 1), (2, 2), (0, 30)):
        drafts = made(slots, 7, free_batch_rows)
        sequence = begun(drafts, "a", (5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6), (7,))
        drafts.observe(accepted + rejected, accepted)
        length, _ = drafts.propose([sequence])
        assert length == best((1 + accepted) / (2 + accepted + rejected), slots, free_batch_rows)
        if accepted > rejected:
            assert length == expected


def test_measured_times_decide_once_each_kind_of_pass_has_some():
    """Each kind is measured three times, in order of the lengths; the first, which compiles, is no
    median. At acceptance 1/2 drafts of 1 and 3 tokens give 1.5 and 1.875. The last five of each count."""
    drafts = made(max_length=3, free_batch_rows=0)
    sequence = begun(drafts, "a", (5, 6, 7, 8, 9, 5, 6), (7,))
    tried, seconds = [], {0: 1.0, 1: 1.4, 3: 1.7}
    for i in range(9):
        tried.append(drafts.propose([sequence])[0])
        drafts.timed(tried[-1], 100.0 if i % 3 == 0 else seconds[tried[-1]])
    assert tried == [0] * 3 + [1] * 3 + [3] * 3
    assert drafts.propose([sequence])[0] == 3  # 1, 1.07 and 1.10 tokens per second
    for _ in range(3):
        drafts.timed(3, 2.0)
    assert drafts.propose([sequence])[0] == 1  # 0.94
    for _ in range(3):
        drafts.timed(1, 1.6)
    assert drafts.propose([sequence])[0] == 0


def test_few_sequences_with_a_draft_do_not_make_all_others_pay():
    drafts = made(slots=128, free_batch_rows=64)
    guessing = begun(drafts, "a", (5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6), (7,))
    others = [begun(drafts, f"b{i}", (1, 2 + i)) for i in range(127)]
    assert drafts.propose([guessing, *others]) == (0, {})


# On the scheduler


@pytest.mark.parametrize("shards, steps", [(1, 2), (2, 3)])
def test_tokens_are_those_without_drafts(shards, steps):
    engine = arithmetic.Engine(slots=2 * shards, steps=steps, shards=shards, num_pages=14)
    requests = [
        arithmetic.request(f"r{i}", prompt, seed=i % 2, max_tokens=5 + i, stop_ids=(3,))
        for i, prompt in enumerate([(1, 2, 3), (4, 4, 4, 4)] * 4)
    ]
    drafts = Drafts(engine.slots, 7, 1000)
    scheduler = arithmetic.started(engine, requests, drafts=drafts)
    arithmetic.assert_as_alone(arithmetic.drain(scheduler), requests)
    stats = scheduler.stats
    assert 0 < stats.accepted < stats.verified < stats.drafted == sum(map(sum, engine.verified))
    assert stats.busy < stats.tokens and 0 < stats.occupancy <= 1
    assert_empty(drafts)


def test_the_scheduler_measures_the_time_of_a_pass(monkeypatch):
    """A clock that ticks at each look: a call of a few steps is a tick, and each of its steps a part."""
    monkeypatch.setattr(Group, "guess", lambda group, tokens, n: [0] * n)
    request = arithmetic.request("a", (1, 2, 3, 1, 2), max_tokens=34)
    ticks, times, drafts = itertools.count(), [], made(1, 3, free_batch_rows=0)
    drafts.timed = lambda *args: (times.append(args), Drafts.timed(drafts, *args))
    engine = arithmetic.Engine(slots=1, steps=4)
    scheduler = arithmetic.started(engine, [request], drafts=drafts, clock=lambda: float(next(ticks)))
    arithmetic.assert_as_alone(arithmetic.drain(scheduler), [request])
    assert times[:3] == [(0, 0.25)] * 3 and set(times[3:]) >= {(1, 1.0), (3, 1.0)}


def assert_empty(drafts):
    assert not drafts._groups and not drafts._tokens


def test_nothing_is_kept_of_requests_that_ended():
    drafts = made(slots=3)
    requests = [arithmetic.request(f"r{i}", (i // 2, 4), max_tokens=8) for i in range(6)]
    scheduler = arithmetic.started(arithmetic.Engine(), requests, drafts=drafts)
    scheduler.step()
    assert len(drafts._groups) == len(drafts._tokens) == 3  # a group waits, and has drawn nothing
    scheduler.abort("r0")
    scheduler.step()
    scheduler.pause("abort")
    assert not scheduler.pending
    assert_empty(drafts)


@pytest.mark.parametrize("is_right, slots, free_batch_rows, lengths", [
    # A draft of 3 costs 40 rows, of 1 costs 35. At acceptance 1/2 they give 1.875 and 1.5 tokens,
    # at 1/3 and below at most 1.481 and 1.333.
    (False, 10, 35, [3] + 6 * [1]),
    # A draft of 3 costs 6 rows, of 7 costs 8. At 1/2 they give 1.875 and 1.992, at 4/5 2.952 and
    # 4.161.
    (True, 1, 6, [3, 7]),
])
def test_the_length_follows_what_the_scheduler_saw(
    is_right, slots, free_batch_rows, lengths, monkeypatch
):
    request = arithmetic.request("a", max_tokens=sum(n * is_right + 1 for n in lengths) + 1)
    known = [*request.prompt.tolist(), *arithmetic.alone(request)[0]]
    change = 0 if is_right else 1
    guess = lambda group, tokens, n: [
        (x + change) % arithmetic.VOCAB for x in known[len(tokens) : len(tokens) + n]
    ]
    monkeypatch.setattr(Group, "guess", guess)
    engine = arithmetic.Engine(slots=slots)
    scheduler = arithmetic.started(engine, [request], drafts=made(slots, 7, free_batch_rows))
    arithmetic.assert_as_alone(arithmetic.drain(scheduler), [request])
    assert [max(counts) for counts in engine.verified] == lengths


# With a real engine


def asked(count=6, **sampling):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150, n).astype(np.int32) for n in (9, 16)]
    for i in range(count):
        params = SamplingParams(max_tokens=9 + i, **sampling)
        yield Request(f"r{i}", prompts[i % 2], 7, params)


class Oracle(Drafts):
    """Knows what will be drawn, but for every third token: drafts are accepted and rejected. The
    last of them go as far as the last token, so that nothing is left to draw after them."""

    def __init__(self, slots, known):
        super().__init__(slots, 3, 1000)
        self.known = known

    def propose(self, sequences):
        drafts = {}
        for s in sequences:
            draft = self.known[s.request.id].tokens[s.count : s.count + 3]
            drafts[s] = [int(x) ^ (i % 3 == 2) for i, x in enumerate(draft, s.count)]
        return 3, {s: draft for s, draft in drafts.items() if draft}


def sampled(engine, requests, drafts=None, version=0):
    params = engine.load(engine_test.params_of(0))
    scheduler = Scheduler(engine, params, version, drafts=drafts)
    for request in requests:
        scheduler.add(request)
    out = {}
    while scheduler.pending:
        out |= {t.id: t for t in scheduler.step()}
    return out, scheduler.stats


SIZES = dict(slots=4, max_length=48, steps=3, prefill_batch=2, page_size=16)
FIELDS = ("tokens", "logp_behav", "logp_raw", "entropy", "top_ids", "top_logps", "kept")


def both(engine, **sampling):
    """Trajectories without and with drafts that are right two times out of three."""
    requests = list(asked(**sampling))
    plain, _ = sampled(engine, requests)
    drafted, stats = sampled(engine, requests, Oracle(engine.slots, plain))
    assert 0 < stats.accepted < stats.drafted and stats.busy < stats.tokens
    return [(plain[r.id], drafted[r.id]) for r in requests]


@functools.cache
def invariant_engine():
    return Engine(engine_test.CONFIG, EngineConfig(
        numerics="invariant", dtype="bfloat16", cache_dtype="bfloat16", unroll=False,
        penalties=True, top_n=2, num_kept=20, **SIZES,
    ))


def test_a_stop_token_ends_a_draft():
    engine, requests = invariant_engine(), list(asked())
    plain, _ = sampled(engine, requests)
    stopped = [
        dataclasses.replace(r, sampling=dataclasses.replace(
            r.sampling, stop_ids=(int(plain[r.id].tokens[3]),)
        )) for r in requests
    ]
    drafted, stats = sampled(engine, stopped, Oracle(engine.slots, plain))
    assert stats.accepted > 0
    for r in stopped:
        tokens = plain[r.id].tokens.tolist()
        end = tokens.index(r.sampling.stop_ids[0]) + 1
        assert (drafted[r.id].tokens.tolist(), drafted[r.id].stop_reason) == (tokens[:end], "stop")
        assert not len(drafted[r.id].drafter_version)  # n-grams are of no model


def test_in_invariant_numerics_drafts_change_no_bit():
    engine = invariant_engine()
    sampling = dict(top_k=20, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2,
                    logit_bias=((3, 2.0),))
    for plain, drafted in both(engine, **sampling):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(drafted, name), getattr(plain, name), name)


def distance(plain, drafted):
    """The largest difference of two trajectories of the same tokens and sets."""
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.kept, plain.kept)
    values = lambda t: np.stack([t.logp_behav, t.logp_raw, t.entropy])
    return np.abs(values(drafted) - values(plain)).max()


@pytest.mark.all
def test_in_fast_numerics_on_a_mesh_drafts_change_rounding_alone():
    engine = Engine(engine_test.CONFIG, EngineConfig(
        unroll=False, penalties=True, num_kept=8, **SIZES,
    ), sharding.layout((2, 1, 2), sharding.SERVE_RULES))
    pairs = both(engine, temperature=0.7, top_k=8, presence_penalty=0.5)
    assert max(distance(*pair) for pair in pairs) < 2e-5


@pytest.mark.all
def test_eight_bit_keys_round_alike_but_for_one_beside_the_middle_of_two_codes():
    distances = sorted(distance(*p) for p in both(engine_test.engine("kv8"), temperature=0.7))
    assert distances[-2] < 2e-5 and distances[-1] < 0.02


@pytest.mark.all
def test_n_grams_of_what_was_drawn_are_accepted():
    """Greedy: a random model soon repeats itself."""
    engine = engine_test.engine("f32")
    requests = list(asked(temperature=0.0))
    plain, _ = sampled(engine, requests)
    drafted, stats = sampled(engine, requests, Drafts(engine.slots, 3, 1000))
    for r in requests:
        np.testing.assert_array_equal(drafted[r.id].tokens, plain[r.id].tokens)
    assert stats.accepted > 5


@pytest.mark.all
def test_a_draft_is_accepted_as_often_as_it_is_likely_and_changes_no_distribution():
    """Two tokens of a vocabulary of six: all 36 probabilities by teacher forcing."""
    config = dataclasses.replace(engine_test.CONFIG, vocab_size=6)
    params = jax.tree.map(lambda x: 2 * x, transformer.init(config, jax.random.key(1)))
    prompt, vocab, count = np.array([1, 2, 3], np.int32), config.vocab_size, 3000
    rows = np.array([[*prompt, first] for first in range(vocab)], np.int32)
    logp = jax.nn.log_softmax(transformer.logits(params, config, jnp.asarray(rows)))
    first_v, second_vv = np.exp(np.float64(logp[0, -2])), np.exp(np.float64(logp[:, -1]))
    guess = int(np.argmax(first_v))

    class Same(Drafts):
        def propose(self, sequences):
            drafts = {s: [guess] for s in sequences if s.remaining > 1}
            return (1, drafts) if drafts else (0, {})

    engine = Engine(config, EngineConfig(slots=500, max_length=8, page_size=8, prefill_batch=4))
    drafts = Same(engine.slots, 1, 1000)
    scheduler = Scheduler(engine, engine.load(params), drafts=drafts)
    for i in range(count):
        scheduler.add(Request(f"{i}", prompt, 0, SamplingParams(max_tokens=2)))
    counts = np.zeros((vocab, vocab))
    while scheduler.pending:
        for t in scheduler.step():
            counts[tuple(t.tokens)] += 1
    expected = first_v[:, None] * second_vv
    expected *= count / expected.sum()
    likely = expected > 5
    cells = lambda x: [*x[likely], x[~likely].sum()]
    assert likely.sum() > 9
    assert scipy.stats.chisquare(cells(counts), cells(expected)).pvalue > 1e-3
    accepted = scheduler.stats.accepted
    assert scheduler.stats.drafted == count and accepted == counts[guess].sum()
    assert scipy.stats.binomtest(accepted, count, first_v[guess]).pvalue > 1e-3
    assert 0.1 < first_v[guess] < 0.9
