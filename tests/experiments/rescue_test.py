"""The words of the protocol, the table and the pictures of collapse and rescue."""

import runpy

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import rescue
from tests.experiments import made


@pytest.mark.parametrize("gain, beside, is_collapse, words", [
    ((-0.1, -0.2, -0.01), None, True, "collapses"),
    ((-0.05, -0.2, 0.1), None, False, "neither"),
    ((0.1, 0.01, 0.2), (0.1, -0.1, 0.3), True, "improves"),
    ((0.0, -0.1, 0.1), (0.1, 0.05, 0.2), False, "neither, better than none"),
    ((0.0, -0.1, 0.1), (0.1, 0.05, 0.2), True, "neither, rescues"),
    ((-0.1, -0.2, -0.05), (0.1, 0.05, 0.2), True, "collapses, better than none"),
    ((-0.2, -0.3, -0.1), (-0.1, -0.2, -0.05), True, "collapses, worse than none"),
])
def test_the_words_of_the_protocol(gain, beside, is_collapse, words):
    assert rescue.verdict(gain, beside, is_collapse) == words


def arms():
    ends = {
        "no-gap": 0.6, "none": 0.2, "PPO-IS": 0.05, "TIS-2": 0.4, "int8": 0.6, "int8-TIS-2": 0.5,
    }
    return [
        made.run(arm, seed, accuracy=(0.3, *[end + 0.001 * seed] * 3), actor__ppo_kl=[-1.0] * 3 + [1.0] * 9)
        for arm, end in ends.items() for seed in range(3)
    ]


def test_the_table():
    lines = {line.split(" | ")[0]: line for line in rescue.table(arms()).splitlines()}
    assert lines["| none"].endswith("| 0.25 | 1.000 [1.000, 1.000] | collapses |")
    assert "| -0.099 [-0.101, -0.097] | – |" in lines["| none"]
    assert lines["| TIS-2"].endswith("| improves, rescues |")
    assert "+0.101 [+0.099, +0.103] | +0.200 [+0.200, +0.200]" in lines["| TIS-2"]
    assert lines["| PPO-IS"].endswith("| – | 1.000 [1.000, 1.000] | collapses, worse than none |")
    # Without an injected gap the uncorrected arm is another one.
    assert "| -0.100 [-0.100, -0.100] |" in lines["| int8-TIS-2"]
    assert lines["| no-gap"].endswith("| improves |") and lines["| int8"].endswith("| improves |")
    assert "| gain | no-gap − TIS-2 | +0.200 [+0.200, +0.200] |" in rescue.table(arms())
    assert rescue.negative_share(arms()[0]) == 0.25


def test_the_pictures_show_the_arms():
    page, story = Figure(), Figure()
    rescue.draw(page, arms())
    labels = [line.get_label() for line in page.axes[0].lines]
    assert labels == ["no-gap", "none", "PPO-IS", "TIS-2", "int8, no injected gap"]
    assert [line.get_label() for line in page.axes[4].lines][2] == "TIS-2"  # no k1 of PPO-IS
    rescue.draw_story(story, arms())
    log, learned = story.axes
    assert (len(log.lines), len(learned.lines)) == (4, 4 + 1)  # the last at 0
    np.testing.assert_allclose(learned.lines[1].get_ydata(), [0.0, -0.099, -0.099, -0.099])


@pytest.mark.all
def test_runs_with_a_critic_are_drawn_alike(tmp_path, monkeypatch, capsys):
    made.write(tmp_path / "critic.jsonl", [run for run in arms() if not run.arm.startswith("int8")])
    monkeypatch.setattr("sys.argv", ["critic", str(tmp_path)])
    runpy.run_module("experiments.critic", run_name="__main__")
    assert (tmp_path / "critic.png").exists() and "| TIS-2 | 3 |" in capsys.readouterr().out
