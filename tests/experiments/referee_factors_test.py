"""Expected values by hand."""

import json

import numpy as np
import pytest

from configs import fig_referee
from experiments import referee_factors, referee_runs

FOLDED = {"folded TIS 2": [0.4, 0.6], "folded TIS 5": [0.2, 0.4], "folded MIS 2": [0.1, 0.1], "folded MIS 5": [0.3, 0.5]}


def gains(**more):
    arms = FOLDED | {"none": [0.0, 0.0], "GSPO at prox": [0.9, 0.4]} | more
    return {name: dict(enumerate(values)) for name, values in arms.items()}


def test_a_contrast_is_of_arms_that_differ_in_its_choice_alone():
    found = referee_factors.sides(gains())
    close = lambda name, *values: found[name] == pytest.approx(dict(enumerate(values)))
    assert close("truncated minus dropped +", 0.3, 0.5) and close("truncated minus dropped -", 0.2, 0.3)
    assert close("bound 5 minus bound 2 +", 0.25, 0.45) and close("bound 5 minus bound 2 -", 0.25, 0.35)
    assert close("GSPO minus PPO at prox +", 0.9, 0.4) and close("GSPO minus PPO at prox -", 0.3, 0.5)
    assert not any(name.startswith(("apart", "PPO bypass")) for name in found)


def test_an_arm_without_its_partner_is_in_no_contrast():
    found = referee_factors.sides(gains(**{"apart TIS 2": [0.7, 0.7]}))
    assert found["apart minus folded +"] == {0: 0.7, 1: 0.7}
    assert found["apart minus folded -"] == pytest.approx({0: 0.4, 1: 0.6})
    assert found["truncated minus dropped +"] == pytest.approx({0: 0.3, 1: 0.5})


SURE, UNSURE, WORSE = (0.2, 0.1, 0.3), (0.1, -0.1, 0.3), (-0.2, -0.3, -0.1)


@pytest.mark.parametrize(("mean", "parts", "side"), [
    (SURE, [SURE, UNSURE], "+"), (SURE, [SURE, WORSE], ""), (UNSURE, [SURE], ""), (WORSE, [UNSURE], "-"),
    (WORSE, [SURE], ""),
])
def test_a_choice_is_decided_by_the_mean_and_against_no_part(mean, parts, side):
    assert referee_factors.decides(mean, parts) == side


def test_every_factor_is_held_once():
    """Arms apart know the engine's factor; a folded weight needs the sampler's log-probs alone."""
    for part in fig_referee.FACTOR_PARTS:
        arms = fig_referee.factors_of(*part.split("/"))
        assert len(arms) == (13 if "int8" in part else 9)
        for name, arm in arms.items():
            weight, age = arm.get("correction.weight"), arm.get("correction.staleness_weight")
            if name.startswith("apart"):
                assert weight == age and arm["rollout.old_logp_source"] == "ring"
            elif name.startswith("folded"):
                assert age == "folded" and arm["rollout.old_logp_source"] == "none"
    assert arms["folded MIS 5"].items() >= fig_referee.DECOUPLED.items()


def test_the_page(tmp_path, monkeypatch):
    """Parts without all of their runs are named; the sides of a contrast differ by 0.125 in every seed."""
    arms = {"none": 0.25, "folded TIS 2": 0.5, "folded MIS 2": 0.375, fig_referee.EXACT: 0.5}
    monkeypatch.setattr(fig_referee, "factors_of", lambda gap, length: arms)
    monkeypatch.setattr(referee_runs, "SEEDS", (0, 1))
    (tmp_path / "referee_factors").mkdir()
    for part, names in (("stale/short", list(arms)), ("stale/long", ["none"])):
        lines = [
            {"arm": f"{part}/{name}", "seed": seed, "verdict": [], "findings": [], "eval/steps": [0, 20],
             "eval/sampled_reward": [0.25, 0.25 + arms[name]], "rollout_corr/k3_kl": [0.25]}
            for name in names for seed in range(2)
        ]
        path = referee_runs.path_of(tmp_path / "referee_factors", part)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = referee_factors.FIGURE.text(referee_factors.read(tmp_path))
    assert text.startswith("Not complete, and left out: stale/long (2 of 8 runs).\n")
    assert "| contrast | mean over parts | decides for | stale/short |" in text
    row = "| truncated minus dropped | +0.125 [-inf, +inf] | not decided | +0.125 [+0.125, +0.125] |"
    assert row in text
    assert "**stale/short**" in text and "**stale/long**" not in text


def test_without_a_run_the_page_says_so(tmp_path):
    assert referee_factors.FIGURE.text(referee_factors.read(tmp_path)) == "No run is stored."


def test_differences_hold_together():
    """Mean 0.15, standard error 0.05; quantile of six intervals with one degree of freedom 76.39."""
    found = referee_factors.differences(gains())["truncated minus dropped"]
    assert np.allclose(found, (0.15, 0.15 - 3.8195, 0.15 + 3.8195), atol=1e-3)
