"""The answers against the virtual clock and an integral, and those to the records of two runs."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.virtual_clock import simulate
from jaxrl_tis import provision
from jaxrl_tis.provision import lag_law, least_staleness, least_workers
from jaxrl_tis.rollouts import replay, schedules
from tests.experiments.virtual_clock_test import TINY


def idle(workers, staleness, train_s, pause_s=0.0, **changes):
    """The learner's idle share; a batch is a group of two responses of 8 s."""
    costs = dataclasses.replace(
        TINY, workers=workers, call_steps=1, train_s=train_s / 16, swap_s=pause_s, **changes
    )
    return simulate(schedules.in_flight(staleness=staleness), costs, 24, 12).learner_idle


def test_a_learner_is_busy_at_the_answer_and_idle_below_it():
    for train_s in (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 11.0):
        workers, staleness = least_workers(2, train_s, 2 / 8), least_staleness(train_s, 0.0, 8.0)
        assert (workers, staleness) == (math.ceil(8 / train_s), math.ceil(8 / train_s))
        assert idle(workers, staleness, train_s) == 0
        assert workers == 1 or idle(workers - 1, staleness, train_s) > 0
        assert staleness == 1 or idle(workers, staleness - 1, train_s) > 0
    # Rewards are a part of the tail: 3 s, in which the sampler draws the next.
    assert least_staleness(4.0, 0.0, 8.0) == 2 and least_staleness(4.0, 0.0, 11.0) == 3
    assert idle(3, 2, 4.0, reward_s=3.0) > 0 == idle(3, 3, 4.0, reward_s=3.0)
    # Pauses take time from the samplers: 8 / 3.5.
    assert least_workers(2, 4.0, 2 / 8) == 2 and least_workers(2, 4.0, 2 / 8, pause_s=0.5) == 3
    assert idle(2, 4, 4.0, pause_s=0.5) > 0 == idle(3, 4, 4.0, pause_s=0.5)


def test_the_learner_waits_as_long_as_on_the_virtual_clock():
    times = dict(samples=2, train_s=2.0, rate=2 / 8, batch_s=8.0, sync_s=0.0, pause_s=0.0)
    for workers, staleness in [(1, 8), (2, 8), (3, 8), (4, 4), (8, 1), (8, 2), (8, 3)]:
        found = provision.wait(workers, staleness, times)
        assert found == pytest.approx(idle(workers, staleness, 2.0), abs=1e-9), (workers, staleness)
    assert provision.wait(1, 0, times) == 0.8


def test_a_lag_by_hand():
    """s^2 = 2 (sqrt(1 + 0.0404) - 1) = 0.04; -log(0.5) / 0.04 = 17.3, and 4.16 if drifts line up."""
    drift = 0.04 + 0.04**2 / 4
    assert lag_law(0.5, drift) == 17 and lag_law(0.5, drift, growth=2.0) == 4
    assert lag_law(0.5, drift, tokens=100) == 0
    assert lag_law(0.3, 0.4 + 0.4**2 / 4) == 3  # 1.204 / 0.4 = 3.01
    assert lag_law(0.5, 0.0) == math.inf
    # The effective share (E w)^2 / E w^2 by quadrature, at the lag and one beyond.
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    for bound, tokens in ((0.5, 1), (0.9, 1), (0.5, 20)):
        lag = lag_law(bound, drift, tokens)
        w = [np.exp(np.sqrt(0.04 * tokens * k) * x - 0.02 * tokens * k) for k in (lag, lag + 1)]
        share, beyond = ((weight @ w) ** 2 / (weight @ w**2) / weight.sum() for w in w)
        assert share >= bound > beyond


def record(folder, schedule, **values):
    folder.mkdir()
    rollout = {"schedule": schedule, "prompts": 4, "group_size": 8}
    (folder / "config.json").write_text(json.dumps({"config": {"rollout": rollout}}))
    lines = [{"step": step, "phase": "train", "response_length/mean": 30.0} | values for step in (1, 2)]
    lines[0] |= dict.fromkeys(values, 99.0)  # the first one compiles
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_answers_to_records(tmp_path, capsys):
    phases = dict(update=3.0, score=1.0, data=0.0, rollout=8.0, reward=1.0, sync=0.5)
    run = record(tmp_path / "run", "sync", **{f"time/{name}_s": s for name, s in phases.items()})
    provision.main([str(run), f"--png={tmp_path}/wait.png"])
    out = capsys.readouterr().out
    assert "samples 32, train_s 4, rate 4, batch_s 9, sync_s 0.5, pause_s 0.5" in out
    # 32 / (4 (4 - 0.5)) = 2.3 samplers; (0.5 + 9) / 4 = 2.4 batches; 4 of 13.5, 6.75, 8.5 and 4.5 s
    assert "no wait from 3 samplers and areal(staleness=3) on" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "70%", "53%", "53%", "53%", "53%"] in lines and ["2", "70%", "41%", "11%", "11%", "11%"] in lines
    assert (tmp_path / "wait.png").stat().st_size > 1000
    # A mean square of 0.0628 at two versions: 0.0314 a version, -log(0.5) / 0.0312 = 22.2
    ahead = record(tmp_path / "ahead", "one_step", **{replay.LAG: 2.0, replay.SQUARE: 0.0628})
    provision.main([str(ahead)])
    assert "up to 22 versions behind; of sequence weights over 30 tokens: 0\n" in capsys.readouterr().out


def test_refusals(tmp_path):
    times = dict(samples=2, train_s=1.0, rate=1.0, batch_s=1.0)
    for changes, why in [
        ({"train_s": 0.0}, "train_s is 0.0"), ({"rate": 0.0}, "rate is 0.0"),
        ({"pause_s": 1.0}, "stops a sampler during an update of 1.0 s"), ({"sync_s": -1.0}, "sync_s is -1.0"),
        ({"drift": -0.1}, "drift -0.1"),
    ]:
        with pytest.raises(ValueError, match=why):
            provision.answer(times | changes, 0.5)
    with pytest.raises(ValueError, match="bound is 1.0"):
        provision.answer({"drift": 0.1}, 1.0)
    with pytest.raises(ValueError, match="--samples and --rate and --batch_s also must be known"):
        provision.answer({"train_s": 1.0}, 0.5)
    with pytest.raises(ValueError, match="neither times nor a drift are known"):
        provision.answer({}, 0.5)
    run = record(tmp_path / "short", "sync")
    (run / "metrics.jsonl").write_text("")
    compact = record(tmp_path / "compact", "sync()", **{"time/step_s": 3.0})
    with pytest.raises(ValueError, match="compact has no time/update_s, as with metrics.record = 'compact'"):
        provision.recorded(compact)
    odd = record(tmp_path / "odd", "one_step", **{replay.LAG: 0.0, replay.SQUARE: math.nan})
    assert provision.recorded(odd) == {"tokens": 30.0}
    with pytest.raises(ValueError, match="has no step yet"):
        provision.recorded(run)
