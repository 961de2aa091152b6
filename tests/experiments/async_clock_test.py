"""The command that compares the schedules."""

import dataclasses
import json

import pytest

from experiments import async_clock
from jaxrl_tis.rollouts import schedules
from tests.experiments.virtual_clock_test import SMALL, TINY


def test_speedups_are_against_a_synchronous_run_on_all_devices():
    """One group of two responses: on two devices no faster than on one, as they share the device
    they begin on, but trained on in 2 s instead of 4; 10.5 s a step against 8.5 s."""
    sync, one_step = async_clock.rows(["sync", "one_step"], TINY, steps=6, skip=3)
    assert (sync["step_s"], sync["speedup"], sync["learner_idle"]) == (10.5, 1, 1 - 2 / 10.5)
    assert one_step["step_s"] == 8.5 and one_step["speedup"] == pytest.approx(10.5 / 8.5)


def test_a_step_with_in_flight_weights_never_waits_for_the_longest_response():
    """Where it may run far enough ahead, and the learner is not what it waits for."""
    costs = dataclasses.replace(SMALL, train_s=0.0)
    found = async_clock.rows(
        ["sync", "one_step", "in_flight(staleness=4)", "in_flight(staleness=16)"], costs, 12, 4
    )
    speeds = [row["speedup"] for row in found]
    assert speeds == sorted(speeds) and found[-1]["sampler_idle"] < 0.01 < found[0]["sampler_idle"]


@pytest.mark.all
def test_studies_name_what_they_change(monkeypatch):
    monkeypatch.setattr(async_clock, "MEDIANS", (20.0, 40.0))
    monkeypatch.setattr(async_clock, "TRAINERS", (1, 2, 4))
    found = async_clock.studies(SMALL, steps=3, skip=1)
    assert [row["schedule"] for row in found["schedules, as published"]] == list(schedules.SCHEDULES)
    assert [row["schedule"] for row in found["lengths"]][::3] == ["sync, median 20", "sync, median 40"]
    assert {row["schedule"] for row in found["division of the devices"]} == {
        "areal, 3 + 1", "in_flight, 3 + 1", "areal, 2 + 2", "in_flight, 2 + 2",
    }
    ages = [row["max_staleness"] for row in found["staleness"]]
    assert all(age <= bound for age, bound in zip(ages, async_clock.STALENESS, strict=True))
    for part in found.values():
        assert len(async_clock.table(part).splitlines()) == 2 + len(part)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(async_clock, "Costs", lambda: SMALL)
    path = tmp_path / "out.json"
    async_clock.main(["--schedule", "areal(staleness=1)", "--schedule=sync", "--steps=4", f"--json={path}"])
    written = json.loads(path.read_text())
    assert [row["schedule"] for row in written["rows"]["schedules"]] == ["areal(staleness=1)", "sync"]
    assert written["rows"]["schedules"][1]["speedup"] == 1 and written["costs"]["slots"] == 6
    assert "areal(staleness=1)" in capsys.readouterr().out


@pytest.mark.all
@pytest.mark.parametrize("arguments, why", [
    (["--schedule=aral"], "schedule 'aral' is unknown; did you mean 'areal'"),
    (["--steps=1"], "--steps=1: give at least 2"),
    (["--json=/nowhere/a.json"], "its folder does not exist"),
])
def test_refusals(arguments, why):
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        async_clock.main(arguments)
