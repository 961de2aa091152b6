"""The scheduler on an engine made of arithmetic, whose every token can be predicted by hand."""

import collections
import dataclasses
import inspect

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_tis.engine.engine import EngineProtocol, ResultTokens
from jaxrl_tis.engine.records import Request
from jaxrl_tis.engine.sampling import SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler

MODULUS = 23


def token_of(prompt, seed, position, prefix_weights, weights):
    """What the fake model says; depends on all that a real token depends on."""
    history = int(np.dot(prompt, np.arange(1, len(prompt) + 1)))
    return (history + 5 * seed + 3 * position + 7 * prefix_weights + 11 * weights) % MODULUS


@dataclasses.dataclass
class FakeState:
    slots: list
    is_consumed: bool = False


class FakeEngine:
    """Parameters are an integer. A state is dead once it is passed on, as a donated one is."""

    max_stop_ids = 2
    quant_id = "arithmetic"

    def __init__(self, slots=3, steps=2, prefill_batch=2, max_length=40):
        self.slots, self.steps = slots, steps
        self.prefill_batch, self.max_length = prefill_batch, max_length
        self.prefilled, self.occupied = [], collections.Counter()

    def bucket(self, prompt_length):
        return 4 if prompt_length <= 4 else self.max_length

    def init_state(self):
        return FakeState([None] * self.slots)

    def prefill(self, params, prompts):
        assert 1 <= len(prompts) <= self.prefill_batch
        assert len({self.bucket(len(p)) for p in prompts}) == 1
        self.prefilled.append([tuple(p) for p in prompts])
        return [(params, np.array(p[:-1])) for p in prompts]

    def insert(self, prefix, state, rows):
        slots = self._use(state)
        for slot, (row, request) in rows.items():
            assert slots[slot] is None, "the slot is taken"
            weights, start = prefix[row]
            prompt = np.append(start, request.prompt[-1])
            slots[slot] = (request, prompt, weights, len(prompt), request.sampling.max_tokens)
            self.occupied[slot] += 1
        return FakeState(slots)

    def release(self, state, slots):
        released = self._use(state)
        for slot in slots:
            assert released[slot] is not None, "the slot is free already"
            released[slot] = None
        return FakeState(released)

    def generate(self, params, state):
        slots = self._use(state)
        shape = (self.steps, self.slots)
        tokens, logp, raw, entropy = np.full(shape, -9), *(np.full(shape, np.nan) for _ in range(3))
        valid, remaining = np.zeros(shape, bool), np.zeros(self.slots, int)
        for b, slot in enumerate(slots):
            for k in range(self.steps):
                if slots[b] is None:
                    continue
                request, prompt, weights, position, left = slots[b]
                token = token_of(prompt, request.seed, position, weights, params)
                tokens[k, b], valid[k, b] = token, True
                logp[k, b], raw[k, b], entropy[k, b] = -token, -token - 0.5, position
                left = 0 if token in request.sampling.stop_ids else left - 1
                slots[b] = (request, prompt, weights, position + 1, left) if left else None
            remaining[b] = slots[b][-1] if slots[b] else 0
        logits = np.stack([logp, raw], axis=-1)  # a vocabulary of two
        return FakeState(slots), ResultTokens(
            tokens, logp, raw, entropy, logits, valid, remaining
        )

    def _use(self, state):
        assert not state.is_consumed, "a donated state was used again"
        state.is_consumed = True
        return list(state.slots)


def request(id, prompt=(1, 2, 3), seed=0, **sampling):
    return Request(id, np.array(prompt, np.int32), seed, SamplingParams(**sampling))


def expected(r, weights=0):
    """(tokens, stop_reason) of a request that runs alone under one set of weights."""
    tokens = []
    for position in range(len(r.prompt), len(r.prompt) + r.sampling.max_tokens):
        tokens.append(token_of(r.prompt, r.seed, position, weights, weights))
        if tokens[-1] in r.sampling.stop_ids:
            return tokens, "stop"
    return tokens, "length"


def drain(scheduler):
    """Trajectories of all that is pending; fails instead of running for ever."""
    out = []
    for _ in range(1000):
        if not scheduler.pending:
            return out
        out += scheduler.step()
    raise AssertionError(f"{scheduler.pending} requests never ended")


def assert_as_expected(trajectories, requests, weights=0):
    assert sorted(t.id for t in trajectories) == sorted(r.id for r in requests)
    by_id = {r.id: r for r in requests}
    for t in trajectories:
        tokens, stop_reason = expected(by_id[t.id], weights)
        assert (t.tokens.tolist(), t.stop_reason) == (tokens, stop_reason), t.id
        np.testing.assert_array_equal(t.logp_behav, -np.array(tokens))
        np.testing.assert_array_equal(t.logp_raw, -np.array(tokens) - 0.5)
        np.testing.assert_array_equal(t.entropy, len(t.prompt) + np.arange(len(tokens)))


def mixed_requests(count=11):
    return [request(f"r{i}", np.arange(1 + i % 6), seed=i, max_tokens=1 + (5 * i) % 7,
                    stop_ids=(7 * i % MODULUS, 12)) for i in range(count)]


def test_more_requests_than_slots_all_come_back_in_any_order_of_arrival():
    requests = mixed_requests()
    assert {expected(r)[1] for r in requests} == {"stop", "length"}
    for arrival in (requests, requests[::-1], requests[5:] + requests[:5]):
        engine = FakeEngine()
        scheduler = Scheduler(engine, 0)
        for r in arrival:
            scheduler.add(r)
        assert_as_expected(drain(scheduler), requests)
        assert min(engine.occupied[slot] for slot in range(3)) >= 2, "slots are reused"


def test_slots_are_refilled_while_others_run():
    scheduler = Scheduler(FakeEngine(slots=2, steps=1), 0)
    for id, max_tokens in dict(long=6, short=1, late=2).items():
        scheduler.add(request(id, max_tokens=max_tokens))
    # `late` takes the slot of `short` at the second step and ends at the third.
    ended = [[t.id for t in scheduler.step()] for _ in range(6)]
    assert ended == [["short"], [], ["late"], [], [], ["long"]]


def test_a_request_in_a_just_freed_slot_gets_all_of_its_tokens():
    scheduler = Scheduler(FakeEngine(slots=1, steps=3), 0)
    requests = [request(f"r{i}", seed=i, max_tokens=5) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    assert_as_expected(drain(scheduler), requests)


def test_stop_ids_and_max_tokens_end_a_sequence():
    # Prompt (1, 2, 3): 1 + 4 + 9 = 14; positions 3, 4, 5.. add 9, 12, 15..: tokens 0, 3, 6, 9, 12.
    cases = {
        "never": (dict(max_tokens=5), [0, 3, 6, 9, 12], "length"),
        "stop": (dict(max_tokens=5, stop_ids=(22, 6)), [0, 3, 6], "stop"),
        "at_once": (dict(max_tokens=5, stop_ids=(0,)), [0], "stop"),
        "one": (dict(max_tokens=1), [0], "length"),
        "stop_is_last": (dict(max_tokens=2, stop_ids=(3,)), [0, 3], "stop"),
    }
    scheduler = Scheduler(FakeEngine(slots=2), 0)
    for id, (sampling, _, _) in cases.items():
        scheduler.add(request(id, **sampling))
    got = {t.id: (t.tokens.tolist(), t.stop_reason) for t in drain(scheduler)}
    assert got == {id: (tokens, reason) for id, (_, tokens, reason) in cases.items()}


def test_record_has_the_dtypes_and_provenance_of_the_contract():
    scheduler = Scheduler(FakeEngine(), 0, version=4)
    r = request("a", (5, 6), seed=9, temperature=0.5, max_tokens=3)
    scheduler.add(r)
    (t,) = drain(scheduler)
    assert (t.id, t.seed, t.request) == ("a", 9, r.hash)
    assert (t.quant_id, t.temperature) == ("arithmetic", 0.5)
    np.testing.assert_array_equal(t.prompt, [5, 6])
    fields = dict(tokens=np.int32, mask=bool, turn=np.int32, logp_behav=np.float32,
                  logp_raw=np.float32, entropy=np.float32, version=np.int32)
    for name, dtype in fields.items():
        assert getattr(t, name).dtype == dtype and getattr(t, name).shape == (3,), name
    assert t.mask.all() and not t.turn.any() and t.version.tolist() == [4, 4, 4]


def test_a_group_is_prefilled_once_also_when_it_spans_admissions():
    engine = FakeEngine(slots=3, steps=1)
    scheduler = Scheduler(engine, 0)
    group = [request(f"g{i}", (1, 2, 3), seed=i, max_tokens=2 + i) for i in range(8)]
    for r in group:
        scheduler.add(r)
    trajectories = drain(scheduler)
    assert_as_expected(trajectories, group)
    assert engine.prefilled == [[(1, 2, 3)]]
    assert len({tuple(t.tokens[:2]) for t in trajectories}) == 8, "samples of a group differ"


def test_prompts_are_prefilled_in_batches_that_share_a_bucket():
    engine = FakeEngine(slots=8, prefill_batch=2)
    scheduler = Scheduler(engine, 0)
    prompts = [(1,), (2,), (3,), (1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), (1,)]
    requests = [request(f"r{i}", p, max_tokens=1) for i, p in enumerate(prompts)]
    for r in requests:
        scheduler.add(r)
    assert_as_expected(scheduler.step(), requests)
    assert sorted(len(call) for call in engine.prefilled) == [1, 2, 2]
    assert sorted(p for call in engine.prefilled for p in call) == sorted(set(prompts))


def test_every_token_carries_the_version_of_the_weights_that_drew_it():
    scheduler = Scheduler(FakeEngine(slots=2, steps=2), 0, version=10)
    scheduler.add(request("a", max_tokens=5))
    scheduler.step()
    scheduler.set_params(1, version=11)
    scheduler.add(request("b", max_tokens=3))
    scheduler.step()
    scheduler.set_params(2, version=12)
    got = {t.id: t for t in drain(scheduler)}
    # "a" as above, plus 11 for weights 1, plus 22 for weights 2: 0, 3, 6 + 11, 9 + 11, 12 + 22.
    assert got["a"].tokens.tolist() == [0, 3, 17, 20, 34 % MODULUS]
    assert got["a"].version.tolist() == [10, 10, 11, 11, 12]
    # "b" was prefilled with weights 1 (7): 0 + 18, 3 + 18, 6 + 7 + 22.
    assert got["b"].tokens.tolist() == [18, 21, 35 % MODULUS]
    assert got["b"].version.tolist() == [11, 11, 12]


def test_no_request_starts_from_a_prefix_of_older_weights():
    engine = FakeEngine(slots=1, steps=1)
    scheduler = Scheduler(engine, 0)
    first, second = request("a", max_tokens=1), request("b", seed=1, max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert_as_expected(scheduler.step(), [first])
    scheduler.set_params(1, version=1)
    assert_as_expected(drain(scheduler), [second], weights=1)
    assert engine.prefilled == [[(1, 2, 3)], [(1, 2, 3)]]


def test_abort_of_a_waiting_request_returns_an_empty_record():
    scheduler = Scheduler(FakeEngine(slots=1), 0)
    requests = [request(id, max_tokens=4) for id in ("a", "b", "c")]
    for r in requests:
        scheduler.add(r)
    scheduler.step()
    scheduler.abort("b")
    assert scheduler.pending == 3
    got = {t.id: t for t in drain(scheduler)}
    assert (len(got["b"].tokens), got["b"].stop_reason) == (0, "abort")
    assert got["b"].tokens.dtype == np.int32 and got["b"].logp_behav.dtype == np.float32
    assert_as_expected([got["a"], got["c"]], [requests[0], requests[2]])


def test_abort_of_a_running_request_returns_what_it_has_and_frees_the_slot():
    engine = FakeEngine(slots=1, steps=2)
    scheduler = Scheduler(engine, 0)
    running, waiting = request("a", max_tokens=9), request("b", seed=3, max_tokens=4)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.step()
    scheduler.abort("a")
    first, second = drain(scheduler)
    assert (first.id, first.stop_reason, first.tokens.tolist()) == ("a", "abort", [0, 3])
    assert_as_expected([second], [waiting])


def test_abort_of_an_unknown_or_finished_request_names_it():
    scheduler = Scheduler(FakeEngine(), 0)
    scheduler.add(request("a", max_tokens=1))
    scheduler.step()
    for id in ("a", "zebra"):
        with pytest.raises(KeyError, match=id):
            scheduler.abort(id)


def test_the_scheduler_calls_nothing_outside_the_protocol():
    methods = [name for name, _ in inspect.getmembers(EngineProtocol, inspect.isfunction)]
    names = {*EngineProtocol.__annotations__, *(n for n in methods if not n.startswith("_"))}

    class Strict:
        def __getattr__(self, name):
            assert name in names, f"EngineProtocol lacks {name}"
            return getattr(engine, name)

    engine = FakeEngine(slots=1)
    scheduler = Scheduler(Strict(), 0)
    for id in ("a", "b"):
        scheduler.add(request(id, max_tokens=9))
    scheduler.step()
    scheduler.abort("a")
    assert {t.id for t in drain(scheduler)} == {"a", "b"}


@pytest.mark.parametrize("bad, words", [
    (request("e", ()), ["e:", "empty"]),
    (request("long", np.arange(37), max_tokens=4), ["long", "37", "4", "40"]),
    (request("stops", stop_ids=(1, 2, 3)), ["stops", "3", "2"]),
    (request("live"), ["live"]),
])
def test_requests_that_can_never_run_are_refused(bad, words):
    scheduler = Scheduler(FakeEngine(max_length=40), 0)
    scheduler.add(request("live", max_tokens=1))
    with pytest.raises(ValueError) as error:
        scheduler.add(bad)
    assert all(word in str(error.value) for word in words)
    assert scheduler.pending == 1
    assert [t.id for t in drain(scheduler)] == ["live"]


def test_the_longest_request_fits_and_an_id_is_free_again_when_returned():
    scheduler = Scheduler(FakeEngine(max_length=40), 0)
    longest = request("a", np.arange(36), max_tokens=4)
    for _ in range(2):
        scheduler.add(longest)
        assert_as_expected(drain(scheduler), [longest])


def test_pending_counts_what_was_not_returned():
    scheduler = Scheduler(FakeEngine(slots=2, steps=1), 0)
    assert scheduler.pending == 0 and scheduler.step() == []
    for i in range(5):
        scheduler.add(request(f"r{i}", max_tokens=1))
    counts = [scheduler.pending]
    while scheduler.pending:
        scheduler.step()
        counts.append(scheduler.pending)
    assert counts == [5, 3, 1, 0]


REQUESTS = st.lists(st.fixed_dictionaries(dict(
    prompt=st.sampled_from([(1,), (2,), (1, 2), (0, 0, 3), (4, 4, 4, 4, 4), tuple(range(7))]),
    seed=st.integers(0, 50), max_tokens=st.integers(1, 8),
    stop_ids=st.lists(st.integers(0, MODULUS - 1), max_size=2).map(tuple),
    arrival=st.integers(0, 6),
)), max_size=14)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(REQUESTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_random_arrivals_are_all_returned_once_and_exact(specs, slots, steps, prefill_batch):
    engine = FakeEngine(slots, steps, prefill_batch)
    scheduler = Scheduler(engine, 2)
    arrivals = [(spec.pop("arrival"), request(f"r{i}", **spec)) for i, spec in
                enumerate(dict(spec) for spec in specs)]
    out = []
    for step in range(7):
        for arrival, r in arrivals:
            if arrival == step:
                scheduler.add(r)
        out += scheduler.step()
    out += drain(scheduler)
    assert_as_expected(out, [r for _, r in arrivals], weights=2)
