"""The calls of an engine that is none: its state, its weights, its seconds."""

from unittest import mock

import pytest

from jaxrl_tis.engine import runner
from jaxrl_tis.engine.stats import Stats


def made(stats=None):
    engine = mock.Mock(num_teachers=0)
    engine.init_state.side_effect = ["first", "second"]
    return engine, runner.Runner(engine, "weights", 3, stats or Stats())


def test_a_state_is_made_once():
    engine, run = made()
    run.start()
    run.start()
    assert run.state == "first" and engine.init_state.call_count == 1
    run.release_cache()
    run.release_params()
    with pytest.raises(RuntimeError, match="no weights since it slept"):
        run.start()
    run.params = "others"
    run.start()
    assert run.state == "second"


def test_seconds_of_all_calls_add_up(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(times))
    stats = Stats()
    engine, run = made(stats)
    engine.insert.return_value, engine.generate.return_value = "inserted", ("generated", "tokens")
    run.insert({})
    assert run.generate("table", "shift") == "tokens" and run.state == "generated"
    assert engine.generate.call_args.args == ("weights", "inserted", "table", "shift")
    assert stats.engine_seconds == 7.0
