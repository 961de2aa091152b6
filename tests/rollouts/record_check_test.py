"""A record that cannot be of its request is refused by the names of its wrong fields."""

import copy
import dataclasses
import pickle
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.records import NEVER, Request, SamplingParams, Trajectory, cut
from jaxrl_tis.rollouts.record_check import EMPTY, malformed, problem

ENGINE = types.SimpleNamespace(
    vocab_size=10, quant_id="int8", num_logits=0, top_n=2, num_kept=0, num_teachers=0, route_shape=(0, 0),
    num_experts=0,
)
OLDEST, NEWEST = 3, 5  # versions that may have sampled the tokens
REQUEST = Request("7/0", [5, 6], 11, SamplingParams(stop_ids=(1,), max_tokens=4, temperature=0.5))
ints = lambda *values: np.array(values, np.int32)
floats = lambda *values: np.array(values, np.float32)
# Three tokens, the last of which is the stop token.
RECORD = Trajectory(
    id="7/0", prompt=ints(5, 6), tokens=ints(3, 9, 1), logp_behav=floats(-0.5, 0.0005, -2),
    logp_raw=floats(-0.5, -1, -2), entropy=floats(1, 1, 1), version=ints(3, 3, 5),
    stop_reason="stop", seed=11, request=REQUEST.hash, quant_id="int8", temperature=0.5,
    kv_version=ints(3, 3, 4), segment=ints(0, 0, 1), logits=np.zeros((3, 0), np.float32),
    top_ids=np.zeros((3, 2), np.int32), top_logps=np.zeros((3, 2), np.float32),
    kept=np.zeros((3, 0), np.int32), logp_student=np.zeros((3, 0), np.float32),
)


def changed(**fields):
    return dataclasses.replace(RECORD, **fields)


def why(record, request=REQUEST):
    return problem(record, request, ENGINE, OLDEST, NEWEST)


def first(count, **fields):
    """The first tokens of the record, as reported while it continues."""
    per_token = [
        f.name for f in dataclasses.fields(Trajectory)
        if f.name != "prompt" and isinstance(x := getattr(RECORD, f.name), np.ndarray) and len(x)
    ]
    cut = {name: getattr(RECORD, name)[:count] for name in per_token}
    return changed(**{"stop_reason": "abort"} | cut | fields)


def test_what_the_engine_samples_is_no_problem():
    assert why(RECORD) is None
    assert why(first(2)) is None
    assert why(first(0)) is None
    sampling = dataclasses.replace(REQUEST.sampling, max_tokens=2)
    shorter = dataclasses.replace(REQUEST, sampling=sampling)
    assert why(first(2, stop_reason="length"), shorter) is None
    assert why(first(2), shorter) == "7/0: wrong stop_reason"
    assert why(changed(prompt_logps=floats(np.nan, -1))) is None


LIES = {
    "another prompt": (dict(prompt=ints(6, 5)), "prompt"),
    "a longer prompt": (dict(prompt=ints(5, 6, 7)), "prompt"),
    "another id": (dict(id="7/1"), "request"),
    "another seed": (dict(seed=12), "request"),
    "another hash": (dict(request=REQUEST.hash + 1), "request"),
    "another temperature": (dict(temperature=0.25), "temperature"),
    "other weights": (dict(quant_id="none"), "quant_id"),
    "a length below the limit": (dict(stop_reason="length"), "stop_reason"),
    "an end without its token": (dict(tokens=ints(3, 9, 2)), "stop_reason"),
    "an abort after its end": (dict(stop_reason="abort"), "stop_reason"),
    "a reason without a name": (dict(stop_reason=""), "stop_reason"),
    "a token beyond the vocabulary": (dict(tokens=ints(3, 10, 1)), "tokens"),
    "a token below 0": (dict(tokens=ints(-1, 9, 1)), "tokens"),
    "a token of others": (dict(mask=np.array([True, False, True])), "mask"),
    "a second turn": (dict(turn=ints(0, 0, 1)), "mask"),
    "evictions": (dict(evict_step=ints(9, 9, 9, 9, 9)), "evict_step"),
    "a log-prob that is NaN": (dict(logp_behav=floats(-0.5, np.nan, -2)), "logp_behav"),
    "a log-prob of -inf": (dict(logp_behav=floats(-0.5, -np.inf, -2)), "logp_behav"),
    "a log-prob above 0": (dict(logp_behav=floats(-0.5, 0.002, -2)), "logp_behav"),
    "too old a version": (dict(version=ints(2, 3, 5), kv_version=ints(2, 3, 4)), "version"),
    "too new a version": (dict(version=ints(3, 3, 6)), "version"),
    "versions that fall": (dict(version=ints(4, 3, 5)), "version"),
    "a cache of newer weights": (dict(kv_version=ints(3, 4, 4)), "kv_version"),
    "a cache of no weights": (dict(kv_version=ints()), "kv_version"),
    "segments that fall": (dict(segment=ints(1, 0, 1)), "segment"),
    "no segments": (dict(segment=ints()), "segment"),
    "an environment's end": (dict(outcome="done"), "mask"),
    "an environment's reward": (dict(turn_rewards=floats(1)), "mask"),
    "an environment's metric": (dict(metrics={"x": 1.0}), "mask"),
    "fewer of the likeliest": (dict(top_ids=np.zeros((3, 1), np.int32)), "top_ids"),
    "none of the likeliest": (dict(top_logps=np.zeros((0, 0), np.float32)), "top_logps"),
    "logits that nobody records": (dict(logits=np.zeros((3, 10), np.float32)), "logits"),
    "a mask that nobody records": (dict(kept=np.zeros((3, 4), np.int32)), "kept"),
    "a drafter newer than the weights": (dict(
        drafter_version=ints(-1, 4, 2), accepted=np.zeros(3, bool)), "drafter_version"),
    "a draft below no draft": (dict(
        drafter_version=ints(-2, 3, 2), accepted=np.zeros(3, bool)), "drafter_version"),
    "an accepted token without a draft": (dict(accepted=np.array([True, False, False])), "accepted"),
    "a fork": (dict(forks=(RECORD,)), "forks"),
    "the number of a fork": (dict(fork=1), "forks"),
    "two": (dict(seed=12, quant_id="none"), "request, quant_id"),
}


# Pages of one token, of which the first and the last full one stay. A prompt of 2 and 4 tokens: key 1 is
# unseen from the query at 3 on, key 2 from that at 4. In groups of layers with two pages between, another
# key goes, at the same time.
KEEPS, N = KVEviction(sinks=1, window=1), NEVER
EVICTIONS = {
    "one key": ((N, 3, N, N, N), KEEPS, True),
    "the next one, too": ((N, 3, 4, N, N), KEEPS, True),
    "at the last possible token": ((N, 3, 5, N, N), KEEPS, True),
    "after it": ((N, 3, 6, N, N), KEEPS, False),
    "a first page": ((3, 4, N, N, N), KEEPS, False),
    "a page of the window": ((N, 2, N, N, N), KEEPS, False),
    "before the key": ((N, N, N, 2, N), KEEPS, False),
    "below 0": ((N, -1, N, N, N), KEEPS, False),
    "at the first token": ((2, N, N, N, N), KVEviction(0, 1), True),
    "half a page": ((4, N, N, N, N), KVEviction(0, 1), False),
    "of no group": ((N, 3, N, N, N), KVEviction(1, 1, 1, groups=2), False),
    "other keys of each group": (
        ((N, N), (4, N), (N, 4), (N, N), (N, N)), KVEviction(1, 1, 1, groups=2), True),
    "in one group alone": (
        ((N, N), (4, N), (N, N), (N, N), (N, N)), KVEviction(1, 1, 1, groups=2), False),
    "of groups where all layers agree": (((N,), (3,), (N,), (N,), (N,)), KEEPS, False),
}


def test_evictions_are_those_that_the_retention_can_make():
    for case, (steps, retention, is_one) in EVICTIONS.items():
        engine = types.SimpleNamespace(**vars(ENGINE), page_size=2 if case == "half a page" else 1)
        record = changed(evict_step=ints(*steps))
        found = problem(record, REQUEST, engine, OLDEST, NEWEST, retention=retention)
        assert found == (None if is_one else "7/0: wrong evict_step"), case
    of_prompt = ints(3, N, N, N, N)
    assert [KVEviction(0, 1).allows(of_prompt, start, 6, 1) for start in (3, 4)] == [True, False]


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_cannot_be_of_its_request(lie):
    fields, named = LIES[lie]
    assert why(changed(**fields)) == f"7/0: wrong {named}"


def test_a_record_has_to_continue_its_partial():
    partial = first(2)
    assert why(RECORD, dataclasses.replace(REQUEST, partial=partial)) is None
    for name in (
        "tokens", "logp_behav", "logp_raw", "entropy", "top_ids", "top_logps", "version", "kv_version",
        "segment",
    ):
        other = np.array(getattr(partial, name))
        other[0] += 1
        request = dataclasses.replace(REQUEST, partial=dataclasses.replace(partial, **{name: other}))
        assert why(RECORD, request) == "7/0: wrong beginning", name


def test_a_first_draft_may_come_after_the_partial():
    request = dataclasses.replace(REQUEST, partial=first(2))
    of = lambda *versions: changed(drafter_version=ints(*versions), accepted=ints(*versions) > 0)
    assert why(of(-1, -1, 4), request) is None
    assert why(of(-1, 3, 4), request) == "7/0: wrong beginning"


def test_versions_bound_the_new_tokens_alone_and_so_does_the_stop_token():
    request = dataclasses.replace(REQUEST, partial=first(2))
    assert problem(RECORD, request, ENGINE, 5, 5) is None
    assert problem(RECORD, REQUEST, ENGINE, 5, 5) == "7/0: wrong version"
    # A record that has none of its partial's tokens, and one that adds none.
    assert why(first(0), request) == "7/0: wrong beginning"
    assert why(first(2), request) is None
    unended = changed(stop_reason="abort")
    assert why(unended, dataclasses.replace(REQUEST, partial=unended)) is None


# Turns

# The policy samples 3 and 9, the environment gives 8 and 1, the policy samples 2 and 1.
EPISODE = changed(
    tokens=ints(3, 9, 8, 1, 2, 1), mask=np.array([1, 1, 0, 0, 1, 1], bool),
    turn=ints(0, 0, 1, 1, 1, 1), version=ints(3, 3, 3, 3, 4, 5), kv_version=ints(3, 3, 3, 3, 4, 4),
    segment=ints(0, 0, 0, 0, 1, 1), logp_behav=floats(-1, -1, 0, 0, -1, -1),
    logp_raw=floats(-1, -1, 0, 0, -1, -1), entropy=floats(1, 1, 0, 0, 1, 1),
    logits=np.zeros((6, 0), np.float32), top_ids=np.zeros((6, 2), np.int32),
    top_logps=np.zeros((6, 2), np.float32), kept=np.zeros((6, 0), np.int32),
    logp_student=np.zeros((6, 0), np.float32),
    outcome="done", turn_rewards=floats(np.nan, 0.5), metrics={"tries": 2.0},
)


def why_episode(request=REQUEST, oldest=OLDEST, **fields):
    record = dataclasses.replace(EPISODE, **fields)
    return problem(record, request, ENGINE, oldest, NEWEST, is_episode=True)


def test_an_episode_is_no_problem_where_there_is_an_environment():
    assert why_episode() is None
    assert why_episode(
        outcome="", turn_rewards=floats(), metrics={}, stop_reason="abort"
    ) is None
    assert why(EPISODE) == "7/0: wrong mask"
    # The last turn was cut: by the end of the episode, by its bounds, or by a failure.
    cut = ints(3, 9, 8, 1, 2, 2)
    assert why_episode(tokens=cut) is None
    assert why_episode(tokens=cut, outcome="overlong", stop_reason="length") is None
    assert why_episode(outcome="max_turns", stop_reason="length") is None
    assert why_episode(tokens=cut, outcome="timeout", stop_reason="length") is None
    assert why_episode(outcome="failed", stop_reason="stop") is None
    # It failed on the turn with which its partial ended.
    partial = dataclasses.replace(EPISODE, outcome="", turn_rewards=floats(), metrics={}, stop_reason="abort")
    given = dataclasses.replace(REQUEST, partial=partial)
    assert why_episode(given, outcome="failed", stop_reason="stop") is None
    assert why_episode(given, outcome="failed", stop_reason="length") == "7/0: wrong stop_reason"
    none = first(0, outcome="")
    assert problem(none, REQUEST, ENGINE, OLDEST, NEWEST, is_episode=True) is None
    sampling = dataclasses.replace(REQUEST.sampling, max_tokens=2)
    assert why_episode(dataclasses.replace(REQUEST, sampling=sampling)) is None


def test_given_tokens_keep_the_version_before_them():
    begun = dataclasses.replace(EPISODE, stop_reason="abort", **{
        name: getattr(EPISODE, name)[:2] for name in (
            "tokens", "mask", "turn", "version", "kv_version", "segment", "logp_behav", "logp_raw",
            "entropy", "logits", "top_ids", "top_logps", "kept",
        )
    })
    request = dataclasses.replace(REQUEST, partial=begun)
    assert why_episode(request, oldest=4) is None
    assert why_episode(oldest=4) == "7/0: wrong version"
    other = dataclasses.replace(request, partial=dataclasses.replace(begun, turn=ints(0, 1)))
    assert why_episode(other) == "7/0: wrong beginning"


def test_a_partials_last_token_may_be_replaced():
    """By an environment, where it ended a turn: here 1 by 8."""
    begun = dataclasses.replace(
        cut(EPISODE, 3), stop_reason="abort", outcome="", metrics={}, turn_rewards=floats(),
        tokens=ints(3, 9, 1), mask=np.ones(3, bool), turn=ints(0, 0, 0), logp_behav=floats(-1, -1, -2),
    )
    request = dataclasses.replace(REQUEST, partial=begun)
    assert why_episode(request, joins=("replace",)) is None
    assert why_episode(request, joins=("append",)) == "7/0: wrong beginning"
    assert why_episode(request, joins=("replace",), tokens=ints(3, 8, 8, 1, 2, 1)) == "7/0: wrong beginning"
    whole = dataclasses.replace(request, partial=dataclasses.replace(begun, tokens=ints(3, 9, 2)))
    assert why_episode(whole, joins=("replace",)) == "7/0: wrong beginning"  # it ended no turn


@pytest.mark.parametrize("fields, named", [
    (dict(mask=np.array([0, 1, 0, 0, 1, 1], bool)), "mask"),  # the prompt is longer
    (dict(mask=np.array([1, 1, 0, 1, 0, 1], bool)), "mask"),  # three turns
    (dict(turn=ints(0, 0, 0, 0, 1, 1)), "mask"),
    (dict(turn=ints(0, 0, 1, 1, 2, 2)), "mask"),
    (dict(turn=ints(1, 1, 2, 2, 2, 2)), "mask"),
    (dict(logp_behav=floats(-1, -1, -1, 0, -1, -1)), "mask"),
    (dict(logp_raw=floats(-1, -1, 0, -1, -1, -1)), "mask"),
    (dict(entropy=floats(1, 1, 1, 0, 1, 1)), "mask"),
    (dict(stop_reason="length"), "stop_reason"),
    (dict(stop_reason="abort"), "stop_reason"),
    (dict(outcome="", stop_reason="stop"), "stop_reason"),
    (dict(outcome="overlong"), "stop_reason"),
    (dict(outcome="failed", stop_reason="length"), "stop_reason"),
    (dict(tokens=ints(3, 9, 8, 1, 2, 2), outcome="failed"), "stop_reason"),
])
def test_an_episode_that_cannot_be(fields, named):
    assert why_episode(**fields) == f"7/0: wrong {named}"


def test_each_turn_is_bounded():
    sampling = dataclasses.replace(REQUEST.sampling, max_tokens=1)
    assert why_episode(dataclasses.replace(REQUEST, sampling=sampling)) == "7/0: wrong mask"


@pytest.mark.parametrize("fields, sentence", [
    (dict(outcome="lost"), "outcome is 'lost', none of '', 'done', 'max_turns', 'overlong', "
     "'failed', 'timeout'"),
    (dict(turn_rewards=floats(1, 2, 3)), "turn_rewards has 3 entries for 2 turns"),
    (dict(turn_rewards=floats(1, np.inf)), "turn_rewards has an infinite entry"),
    (dict(turn_rewards=np.zeros(2)), "turn_rewards is float64 of 1 dimensions, not float32 of 1"),
    (dict(metrics={"x": 1}), "metrics has 'x': 1, not a text and a float"),
    (dict(metrics={1: 1.0}), "metrics has 1: 1.0, not a text and a float"),
    (dict(metrics=[]), "metrics is list, not dict"),
    (dict(routes=np.zeros((5, 0, 0), np.uint8)), "routes has 5 rows for 8 tokens"),
])
def test_a_malformed_episode(fields, sentence):
    assert why_episode(**fields) == f"7/0: {sentence}"


def test_routes_end_before_given_tokens():
    given = dict(tokens=EPISODE.tokens[:4], mask=EPISODE.mask[:4])
    cut = {
        name: getattr(EPISODE, name)[:4] for name in (
            "turn", "version", "kv_version", "segment", "logp_behav", "logp_raw", "entropy",
            "logits", "top_ids", "top_logps", "kept", "logp_student",
        )
    }
    for rows, sentence in ((3, None), (4, None), (5, "routes has 5 rows for 4 tokens")):
        routes = np.zeros((rows, 0, 0), np.uint8)
        record = dataclasses.replace(EPISODE, **given, **cut, routes=routes)
        assert malformed(record) == sentence


# Routes


def routed(experts=8, **fields):
    """The record with routes [4,2,2] of an engine with this number of experts, and that engine."""
    dtype = np.uint8 if experts <= 256 else np.uint16
    # In each layer two experts that differ, the last expert among them.
    ids = (np.arange(8).reshape(4, 2, 1) * [1, 3] + [experts - 1, experts - 2]) % experts
    record = changed(**{"routes": ids.astype(dtype), "rerouted": ints(6, 2)} | fields)
    return record, types.SimpleNamespace(**vars(ENGINE) | dict(route_shape=(2, 2), num_experts=experts))


def why_routed(experts=8, request=REQUEST, **fields):
    record, engine = routed(experts, **fields)
    return problem(record, request, engine, OLDEST, NEWEST)


@pytest.mark.parametrize("experts", [8, 256, 257, 2**16])
def test_routes_of_every_number_of_experts_are_no_problem(experts):
    record, engine = routed(experts)
    assert record.routes.max() == experts - 1 or experts == 8
    assert why_routed(experts) is None
    # A stop string cut the record: its last token was read.
    more = np.concatenate([record.routes, record.routes[:1]])
    assert why_routed(experts, routes=more) is None
    # Nothing was sampled.
    none = dict(tokens=ints(), routes=record.routes[:0], rerouted=ints(0, 0))
    empty = first(0, **none)
    assert problem(empty, REQUEST, engine, OLDEST, NEWEST) is None


ROUTES = routed()[0].routes
WRONG_ROUTES = {
    "fewer experts of a token": ROUTES[..., :1],
    "more layers": ROUTES.repeat(2, axis=1),
    "no rows": ROUTES[:0],
    "a wider dtype than it needs": ROUTES.astype(np.uint16),
    "an expert beyond the last": np.where(ROUTES == 7, np.uint8(8), ROUTES),
    "padding": ROUTES * (np.arange(4) < 3).astype(np.uint8)[:, None, None],
    "one route with an expert twice": np.concatenate([ROUTES[:3], ROUTES[3:, :, :1].repeat(2, 2)]),
}


@pytest.mark.parametrize("case", WRONG_ROUTES)
def test_routes_that_this_engine_cannot_record(case):
    assert why_routed(routes=WRONG_ROUTES[case]) == "7/0: wrong routes"


@pytest.mark.parametrize("fields, sentence", [
    (dict(routes=ROUTES[:3]), "routes has 3 rows for 5 tokens"),
    (dict(routes=ROUTES.repeat(2, 0)), "routes has 8 rows for 5 tokens"),
    (dict(routes=ROUTES[:, 0]), "routes is uint8 of 2 dimensions, not uint8 of 3"),
    (dict(routes=ROUTES.astype(np.int16)), "routes is int16 of 3 dimensions, not uint8 of 3"),
    (dict(routes=ROUTES[:, :0]), "rerouted has 2 entries"),
    (dict(rerouted=ints(6)), "rerouted has 1 entries"),
    (dict(rerouted=ints()), "rerouted has 0 entries"),
    (dict(rerouted=np.zeros(2)), "rerouted is float64 of 1 dimensions, not int32 of 1"),
    (dict(rerouted=ints(2, 6)), "wrong rerouted"),
    (dict(rerouted=ints(2, -1)), "wrong rerouted"),
])
def test_malformed_routes(fields, sentence):
    assert why_routed(**fields) == f"7/0: {sentence}"


def test_routes_of_an_engine_that_records_none():
    for experts in (8, 300):
        engine = types.SimpleNamespace(**vars(ENGINE) | dict(num_experts=experts))
        assert problem(RECORD, REQUEST, engine, OLDEST, NEWEST) is None
    record, _ = routed()
    assert why(record) == "7/0: wrong routes"
    assert why(changed(rerouted=ints(0, 0))) == "7/0: rerouted has 2 entries"


def test_a_record_has_to_continue_the_routes_of_its_partial():
    partial = first(2, routes=ROUTES[:3], rerouted=ints(4, 0))
    request = dataclasses.replace(REQUEST, partial=partial)
    assert why_routed(request=request) is None
    other = dataclasses.replace(partial, routes=ROUTES[1:4])
    assert why_routed(request=dataclasses.replace(REQUEST, partial=other)) == "7/0: wrong beginning"


# Damaged and foreign objects


def with_attribute(name, value):
    record = copy.copy(RECORD)
    object.__setattr__(record, name, value)
    return record


def without(name):
    record = copy.copy(RECORD)
    object.__delattr__(record, name)
    return record


FOREIGN = {
    "nothing": (None, "a record is a NoneType, not a Trajectory"),
    "a request": (REQUEST, "a record is a Request, not a Trajectory"),
    "the fields alone": (vars(RECORD), "a record is a dict, not a Trajectory"),
    "a list": (with_attribute("tokens", [3, 9, 1]), "tokens is list, not ndarray"),
    "a number": (with_attribute("entropy", 1.0), "entropy is float, not ndarray"),
    "no mask": (with_attribute("mask", None), "mask is NoneType, not ndarray"),
    "no seed": (without("seed"), "seed is NoneType, not int"),
    "no kept": (without("kept"), "kept is NoneType, not ndarray"),
    "an id that is a number": (with_attribute("id", 7), "id is int, not str"),
    "a reason that cannot be a key": (with_attribute("stop_reason", []),
        "stop_reason is list, not str"),
    "a seed that is a float": (with_attribute("seed", 11.0), "seed is float, not int"),
    "a seed that is a bool": (with_attribute("seed", True), "seed is bool, not int"),
    "a temperature in words": (with_attribute("temperature", "0.5"),
        "temperature is str, not float"),
    "an array for a number": (with_attribute("temperature", floats(0.5, 0.5)),
        "temperature is ndarray, not float"),
    "wider numbers": (changed(logp_behav=np.zeros(3)),
        "logp_behav is float64 of 1 dimensions, not float32 of 1"),
    "numbers in the other order of bytes": (changed(version=np.zeros(3, ">i4")),
        "version is >i4 of 1 dimensions, not int32 of 1"),
    "objects": (changed(segment=np.array([None] * 3)),
        "segment is object of 1 dimensions, not int32 of 1"),
    "a mask of numbers": (changed(mask=np.ones(3, np.int32)),
        "mask is int32 of 1 dimensions, not bool of 1"),
    "a mask of other bytes": (changed(mask=np.array([1, 2, 1], np.uint8).view(bool)),
        "mask is bool and holds bytes other than 0 and 1"),
    "one number": (with_attribute("tokens", np.array(3, np.int32)),
        "tokens is int32 of 0 dimensions, not int32 of 1"),
    "a column": (changed(turn=np.zeros((3, 1), np.int32)),
        "turn is int32 of 2 dimensions, not int32 of 1"),
    "a row": (changed(kept=ints(1, 2, 3)), "kept is int32 of 1 dimensions, not int32 of 2"),
    "too few": (changed(logp_raw=floats(-1, -2)), "logp_raw has 2 entries and needs 3"),
    "none": (changed(entropy=floats()), "entropy has 0 entries and needs 3"),
    "too many": (changed(kv_version=ints(3, 3, 3, 3)), "kv_version has 4 entries and needs 3"),
    "evictions of the prompt alone": (changed(evict_step=ints(9, 9)),
        "evict_step has 2 entries and needs 5"),
    "log-probs of another prompt": (changed(prompt_logps=floats(-1)),
        "prompt_logps has 1 entries and needs 2"),
    "a fork of other lengths": (changed(forks=(RECORD, changed(entropy=floats()))),
        "a fork: entropy has 0 entries and needs 3"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_object_that_is_no_record(case):
    record, sentence = FOREIGN[case]
    assert malformed(record) == sentence
    assert why(record) == f"7/0: {sentence}"


def test_every_kind_of_record_is_well_formed():
    evicted = changed(evict_step=ints(9, 9, 9, 9, 9), temperature=1, prompt_logps=floats(0, -1))
    bare = changed(**{name: getattr(EMPTY, name) for name in (
        "kv_version", "segment", "logits", "evict_step", "top_ids", "top_logps", "kept",
        "prompt_logps",
    )})
    read_only = pickle.loads(pickle.dumps(RECORD))
    read_only.tokens.flags.writeable = False
    of_numpy = changed(temperature=np.float64(0.5))
    for record in (RECORD, evicted, bare, read_only, of_numpy, EMPTY, changed(prompt=ints())):
        assert malformed(record) is None


VALUES = st.sampled_from([
    None, True, 3, -1.5, 2**70, float("nan"), "x", b"x", [], {}, (), [[1], [1, 2]], object(), len,
    np.int32(1), np.float64("nan"), np.array(1), np.array("x"), np.array([{}, None]), np.zeros(3),
    np.zeros((3, 2), np.int32), np.zeros((0, 7), np.float32), np.zeros((3, 0), bool),
    np.array([1, 2, 3], np.int32), np.array([2**31 - 1] * 4, np.int32), np.zeros(2**10, np.float32),
    np.array(["2026"], "M8[Y]"), np.zeros(3, [("a", "i4")]), np.float32([np.nan, np.inf, -np.inf]),
])


@pytest.mark.all
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.dictionaries(st.sampled_from(list(vars(RECORD))), VALUES, min_size=1),
    st.sampled_from([None, first(0), first(2)]),
)
def test_no_value_of_a_field_raises(fields, partial):
    record = copy.copy(RECORD)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    found = why(record, dataclasses.replace(REQUEST, partial=partial))
    assert found is None or any(name in found for name in (*fields, "beginning", "request"))
