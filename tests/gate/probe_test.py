"""The parts of a batch's gap, and what a run does above its budget."""

import json
import os
import signal
import types

import numpy as np
import pytest

from jaxrl_tis.gate import probe, report
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.record import metrics
from jaxrl_tis.runtime import cli
from tests import tiny

pytestmark = [pytest.mark.compiles]
BUSY = dict(rollout__schedule="areal(staleness=2)", rollout__update_turns=3, rollout__gap_probe_every=1,
            eval__every=50, checkpoint__every=50)


def rows():
    """Two tokens: the engine adds 0.1 and -0.3 nats, staleness 1 and 0."""
    behav = np.array([[-1.0, -2.0, 9.0]], np.float32)
    old = behav + np.array([[0.1, -0.3, 0.0]], np.float32)
    prox = old + np.array([[1.0, 0.0, 0.0]], np.float32)
    return {"logp_behav": behav, "logp_old": old, "logp_prox": prox,
            "mask": np.array([[True, True, False]])}


def test_the_gap_is_split_by_hand():
    parts = probe.split(tiny.setup(), rows(), None)
    found = {part: measured["d_mean"] for part, measured in parts.items()}
    assert found == {"total": pytest.approx((1.1 + 0.3) / 2), "engine": pytest.approx(0.2),
                     "staleness": pytest.approx(0.5)}
    assert probe.metrics(parts)["gate/staleness/d_max"] == pytest.approx(1.0)
    kept = rows() | {"mask": np.array([[False, True, False]]), "scored": rows()["mask"]}
    assert probe.split(tiny.setup(), kept, None) == parts  # the gap of rejected tokens counts


@pytest.mark.parametrize("bound, above, why", [
    (0.75, [], None), (0.6, ["d_mean"], "by staleness; the engine gap alone is within them"),
    (0.1, ["d_mean"], "and the engine gap alone is above them"),
])
def test_what_is_above_its_budget_and_why(bound, above, why):
    none = {f"gate__max_{name}": float("inf") for name in ("d_p99", "d_max", "dp_max", "k3")}
    setup = tiny.setup(gate__max_d_mean=bound, **none)
    parts = probe.split(setup, rows(), None)
    exceeded = probe.exceeded(setup, parts)
    assert exceeded["total"] == above
    verdict = probe.verdict(parts, exceeded)
    assert verdict is None if why is None else verdict.endswith(why) and "d_mean 0.7" in verdict


def test_a_measure_that_is_not_finite_is_above_every_budget():
    bad = rows() | {"logp_prox": np.full((1, 3), np.nan, np.float32)}
    setup = tiny.setup(gate__max_d_mean=1e9)
    assert "d_mean" in probe.exceeded(setup, probe.split(setup, bad, None))["total"]
    within = dict.fromkeys(report.MEASURES, 0.0)
    for value in (np.inf, -np.inf, np.nan):  # also where there is no bound, as d_max has none
        assert report.above(setup, within | {"d_max": value}) == ["d_max"]
    assert report.above(setup, within) == []


@pytest.mark.parametrize("action", ["warn", "sync", "stop"])
def test_probes_come_every_so_many_steps_and_a_run_reacts_as_told(action, monkeypatch, capsys):
    rollout = types.SimpleNamespace(gap_probe_every=2, on_gap_exceeded=action)
    setup = types.SimpleNamespace(config=types.SimpleNamespace(rollout=rollout))
    for name, value in (("split", {}), ("exceeded", {}), ("verdict", "k3 9 above"), ("metrics", {"a": 1.0})):
        monkeypatch.setattr(probe, name, lambda *_, value=value: value)
    lowered = []
    of = lambda step: probe.of_step(setup, step, {}, None, lambda: lowered.append(step) or "bound 1")
    assert of(3) == ({}, None) and not capsys.readouterr().err
    values, why = of(4)
    assert values == {"a": 1.0} and lowered == [4] * (action == "sync")
    assert (why is not None) == (action == "stop")
    assert capsys.readouterr().err == "step 4: k3 9 above" + "; bound 1" * (action == "sync") + "\n"
    rollout.gap_probe_every = 0
    assert of(4) == ({}, None)


@pytest.mark.all
def test_a_run_lowers_its_own_bound(tmp_path, capsys):
    tiny.run(tmp_path / "run", rollout__on_gap_exceeded="sync", gate__max_d_mean=1e-6, **BUSY)
    said = capsys.readouterr().err
    assert "samplers begin 1 batches ahead from now on, 2 before" in said
    records = [r for r in metrics.read(tmp_path / "run") if r["phase"] == "train"]
    stale = [r["training/off_policy/trajectory_staleness_worst/max"] for r in records]
    assert max(stale) >= 1 and stale[-1] == 0
    assert all(r["gate/total/d_mean"] > 0 for r in records)
    assert records[-1]["gate/staleness/d_mean"] == 0


def test_a_run_stops_above_its_budget_and_is_saved(tmp_path):
    with pytest.raises(MismatchError, match="step 1: d_mean .* above the bounds"):
        tiny.run(tmp_path / "run", rollout__on_gap_exceeded="stop", gate__max_d_mean=1e-6, **BUSY)
    assert (tmp_path / "run" / "checkpoints" / "1" / "manifest.json").exists()


@pytest.mark.all
def test_where_another_policy_stands_in_the_engine_is_measured_on_a_fresh_batch(tmp_path):
    tiny.run(tmp_path / "run", rollout__old_logp_source="none", steps=3, correction__preset="async",
             **BUSY)
    last = [r for r in metrics.read(tmp_path / "run") if r["phase"] == "train"][-1]
    assert 0 < last["gate/engine/d_mean"] < 0.1 * last["gate/total/d_mean"]
    assert "gate/staleness/d_mean" not in last


@pytest.mark.all
def test_a_stop_request_within_a_probe_waits_for_the_record_of_its_step(tmp_path, monkeypatch):
    def measure(setup, params, prompts, heartbeat):
        os.kill(os.getpid(), signal.SIGTERM)
        heartbeat()
        return {"total": dict.fromkeys(report.MEASURES, 0.0)}

    monkeypatch.setattr(report, "measure", measure)
    with pytest.raises(cli.Interrupted):
        tiny.run(
            tmp_path / "run", rollout__old_logp_source="none", correction__preset="async",
            checkpoint__grace=0.0, **BUSY)
    meta = json.loads((tmp_path / "run/checkpoints/1/meta/metadata").read_text())["meta"]
    assert meta["step"] == meta["version"] == 1
    assert [r["step"] for r in metrics.read(tmp_path / "run") if r["phase"] == "train"] == [1]


@pytest.mark.parametrize("way, is_fresh", [("none", True), ("ring", False)])
def test_a_fresh_batch_has_the_cache_of_the_rollouts_and_gives_signs_of_life(monkeypatch, way, is_fresh):
    calls, config = [], dict(rollout__old_logp_source=way, rollout__schedule="areal(staleness=2)")
    if is_fresh:
        config |= dict(
            correction__weight="none", correction__centre="behav", correction__objective="reinforce")
    setup = tiny.setup(**config)

    def measure(setup, params, prompts, heartbeat):
        heartbeat()
        return {"total": dict.fromkeys(report.MEASURES, 0.0)}

    monkeypatch.setattr(report, "measure", measure)
    probe.split(setup, rows(), None, lambda: calls.append("cache"), lambda: calls.append("beat"))
    assert calls == (["cache", "beat"] if is_fresh else [])
