"""Expected values by hand; Student's quantiles from tables."""

import dataclasses
import json

import pytest

from configs import fig_referee
from configs import fig_referee_objectives as config
from experiments import referee_objectives, referee_runs
from jaxrl_tis.estimators.objectives import OBJECTIVES
from tests.experiments.referee_test import run

# Others train these: figures fusion and asynchrony, and the first table.
ELSEWHERE = {"fusion_cap", "fusion_shaped", "reinforce", "ppo"}


def test_every_objective_has_an_arm():
    trained = {arm.get("correction.objective", "ppo").partition("(")[0] for arm in config.METHODS.values()}
    assert trained | ELSEWHERE == set(OBJECTIVES)


def test_a_method_holds_the_gap_once():
    """With age the ratio to the sampler has it, and a weight of a source would count it twice."""
    for name, arm in config.objectives_of("stale", "long").items():
        weight, centre = arm["correction.weight"], arm["correction.centre"]
        assert (centre == "behav") == (name == "none" or name not in config.AGE), name
        if centre != "old":
            assert weight == "none" or arm["correction.staleness_weight"] == "folded", name
    first, sync = fig_referee.arms_of("stale", "long"), config.objectives_of("noise", "long")
    assert sync["CTPO"]["correction.weight"] == "seq_tis(cap=5.0)" and "correction.centre" not in sync["CTPO"]
    assert {*config.METHODS} - {*sync} == {*config.NEEDS_AGE}
    age = config.objectives_of("stale", "long")
    assert age["none"].items() >= first["none"].items() and age["async"].items() >= first["decoupled PPO"].items()


def test_the_runs_are_those_of_the_first_table():
    for part in config.PARTS:
        first = fig_referee.arms_of(*part.split("/"))["none"]
        common = {k: x for k, x in first.items() if not k.startswith("correction.")}
        for name, arm in config.objectives_of(*part.split("/")).items():
            own = (config.BASES | config.METHODS)[name].keys() | config.AGE.get(name, {}).keys()
            assert common.items() - arm.items() <= {(k, common.get(k)) for k in own}, name


def arms(*ends, name="GMPO"):
    """`none` stays at 0.4; the other arm of a seed has this reward at both evaluations after the start."""
    return {
        "none": [run("a/b/none", seed, [0.4, 0.4, 0.4]) for seed in range(len(ends))],
        name: [run(f"a/b/{name}", seed, [0.4, end, end]) for seed, end in enumerate(ends)],
    }


def test_the_words_of_the_protocol():
    for ends, expected in (
        ((0.409, 0.4, 0.391, 0.4), ["never moves"]), ((0.409, 0.4, 0.38, 0.4), []),
        ((0.19, 0.1, 0.5, 0.6), ["collapses"]), ((0.19, 0.21, 0.5, 0.6), []),
        ((0.5, 0.51, 0.5, 0.51), ["better"]), ((0.3, 0.31, 0.3, 0.31), ["worse"]),
    ):
        a = arms(*ends)
        assert referee_objectives.words("GMPO", a, referee_objectives.differences(a)) == expected, ends


def test_a_difference_that_holds_alone_is_a_question():
    """Mean 0.1, standard error 0.0289; half 0.092 with the quantile 3.182 of one interval, and of two
    0.120 with 4.177."""
    a = arms(0.45, 0.45, 0.55, 0.55) | {"GPG": [run("a/b/GPG", 0, [0.4, 0.4, 0.4])]}
    found = referee_objectives.differences(a)
    assert found["GMPO"][0] == pytest.approx((0.1, 0.1 - 0.1206, 0.1 + 0.1206), abs=1e-3)
    assert found["GMPO"][1] == pytest.approx((0.1, 0.1 - 0.0919, 0.1 + 0.0919), abs=1e-3)
    assert referee_objectives.words("GMPO", a, found) == ["better?"]


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "PARTS", ("stale/long", "int8/long"))
    for part, name, end in (
        ("stale/long", "none", 0.25), ("int8/long", "none", 0.25), ("stale/long", "A-3PO", 0.375),
        ("int8/long", "GMPO", 0.0625),
    ):
        path = referee_runs.path_of(tmp_path / "referee_objectives", part)
        path.parent.mkdir(exist_ok=True)
        line = {"arm": f"{part}/{name}", "verdict": [], "findings": [], "eval/steps": [0, 20],
                "eval/sampled_reward": [0.25, end], "actor/pg_clipfrac": [0.5, "nan"]}
        with path.open("a") as file:
            file.writelines(json.dumps(line | {"seed": seed}) + "\n" for seed in range(3))
    text = referee_objectives.FIGURE.text(referee_objectives.read(tmp_path))
    assert "| method | stale/long | int8/long |" in text
    assert "| GMPO | – | -0.188 collapses, worse |" in text
    assert "| A-3PO | +0.125 better | needs age |" in text
    assert "| GMPO | 3 | -0.188 [-0.188, -0.188] |" in text and "| 3 of 3 | 0.188 | 0.5 | – | collapses, worse |" in text


def test_a_picture_has_the_intervals_of_two_seeds_and_more():
    """A line of each interval, in red where a method collapses."""
    runs = [run for own in (arms(0.1, 0.1) | {"GPG": [run("a/b/GPG", 0, [0.4, 0.5, 0.5])]}).values() for run in own]
    runs = [dataclasses.replace(r, arm=r.arm.replace("a/b", "stale/long")) for r in runs]
    page = referee_objectives.FIGURE.pictures["referee_objectives"].page(runs)
    empty, axes, _ = page.axes
    assert len(empty.containers) == 0 and len(axes.containers) == 2
    colors = {bool(c.has_xerr): c[0].get_color() for c in axes.containers}
    assert colors == {True: "C3", False: "C0"}


def test_without_a_run_the_page_says_so(tmp_path):
    assert referee_objectives.FIGURE.text(referee_objectives.read(tmp_path)) == "No run is stored."
