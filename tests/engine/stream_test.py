"""A short run of benchmarks/stream.py, and what its checks see."""

import dataclasses

import numpy as np
import pytest

from benchmarks import stream

pytestmark = [pytest.mark.compiles, pytest.mark.all]

COUNT = 50


@pytest.fixture(scope="module")
def streamed():
    """(records, requests, replays by id)."""
    engine, alone, weights = stream.engines("float32")
    run = stream.Stream(engine, weights, seed=1)
    run.run(COUNT)
    assert not any(pool.used for pool in run.scheduler.pages)
    replay = stream.Replay(alone, weights)
    return run, {id: replay(run.requests[id], t) for id, t in run.done.items()}


def test_records_of_a_stream_with_updates_and_aborts_are_those_of_each_request_alone(streamed):
    run, replays = streamed
    assert len(run.done) == COUNT
    for id, t in run.done.items():
        assert not stream.problems(run.requests[id], t, replays[id]), id
    events, stats = run.events, run.scheduler.stats
    assert min(events[kind] for kind in ("update", "abort", "pause", "resumed")) > 0, events
    assert min(stats.shared, stats.accepted) > 0, stats
    assert sum(len(set(t.version.tolist())) > 1 for t in run.done.values()) > 2


def cut(t):
    names = [f.name for f in dataclasses.fields(t) if np.ndim(getattr(t, f.name)) > 0]
    names = set(names) - {"prompt", "evict_step"}
    return dataclasses.replace(t, **{name: getattr(t, name)[:-1] for name in names})


@pytest.mark.parametrize("reason, problem", [
    ("stop", "do not end by stop"), ("length", "do not end by length"),
])
def test_a_lost_token_is_seen(streamed, reason, problem):
    run, replays = streamed
    t = next(t for t in run.done.values() if t.stop_reason == reason and len(t.tokens) > 1)
    short = {name: values[:-1] for name, values in replays[t.id].items()}
    (found,) = stream.problems(run.requests[t.id], cut(t), short)
    assert problem in found


def test_a_changed_bit_is_seen(streamed):
    run, replays = streamed
    t = next(t for t in run.done.values() if len(t.tokens) > 1)
    other = np.nextafter(t.logp_raw, 0)
    assert stream.problems(run.requests[t.id], dataclasses.replace(t, logp_raw=other),
                           replays[t.id]) == ["logp_raw differ"]
