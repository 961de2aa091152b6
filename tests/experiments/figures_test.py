"""The rows of the table of figures: the words of the protocol, laws, columns and pictures."""

import json
import pathlib

import numpy as np
import pytest

from configs import fig_routing, fig_staleness
from experiments import figures, parts
from experiments.figures import FIGURES
from tests.doctor.runs import write_run
from tests.experiments import made


@pytest.mark.parametrize("names", [
    ("rescue", "critic", "staleness", "formats", "causes", "routing", "referee", "referee_factors",
     "referee_objectives", "engines", "fusion", "contexts", "drafter", "replay", "routing_penalty", "length_sweep"),
    pytest.param(("threshold", "lora", "predictor", "long"), marks=pytest.mark.all),
])
def test_the_stored_rows_give_the_stored_pages(names):
    folder = pathlib.Path(__file__).parents[2] / parts.FOLDER
    for name in names:
        data, notes = FIGURES[name].data(folder, name)
        found = "\n\n".join([FIGURES[name].text(data), *notes])
        assert found + "\n" == (folder / f"{name}.md").read_text(encoding="utf-8"), name


def arms(name, runs):
    by_arm = figures.records.by_arm(runs)
    return {arm: by_arm[arm] for arm in sorted(by_arm, key=FIGURES[name].order or list(by_arm).index)}


def page(name, runs, picture=None):
    return FIGURES[name].pictures[picture or name].page(arms(name, runs))


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
    assert figures.verdict(gain, beside, is_collapse) == words


RESCUE = [
    made.run(arm, seed, accuracy=(0.3, *[end + 0.001 * seed] * 3), actor__ppo_kl=[-1.0] * 3 + [1.0] * 9)
    for arm, end in {
        "no-gap": 0.6, "none": 0.2, "PPO-IS": 0.05, "TIS-2": 0.4, "int8": 0.6, "int8-TIS-2": 0.5,
    }.items() for seed in range(3)
]


def test_the_pictures_of_rescue_show_the_arms():
    drawn, story = page("rescue", RESCUE), page("rescue", RESCUE, "collapse")
    labels = [line.get_label() for line in drawn.axes[0].lines]
    assert labels == ["no-gap", "none", "PPO-IS", "TIS-2", "int8, no injected gap"]
    assert [line.get_label() for line in drawn.axes[4].lines][2] == "TIS-2"  # no k1 of PPO-IS
    log, learned = story.axes
    assert (len(log.lines), len(learned.lines)) == (4, 4 + 1)  # the last at 0
    np.testing.assert_allclose(learned.lines[1].get_ydata(), [0.0, -0.099, -0.099, -0.099])


def stale(power=-0.5):
    """ESS = lag^power; PPO improves up to a lag of 4, without a clip up to 0."""
    return [
        made.run(
            f"{name}-{lag}", seed,
            accuracy=(0.3, 0.45, 0.45, 0.45, *[0.4 + 0.01 * seed if lag <= last else 0.1] * 3),
            training__off_policy__trajectory_staleness__mean=lag,
            mismatch__ess_seq=lag**power if lag else 1.0,
        )
        for name, last in (("no-clip", 0), ("PPO", 4)) for lag in (0, 16, 4) for seed in range(3)
    ]


def test_the_power_is_that_of_the_runs():
    assert figures.power(stale(-0.5)) == pytest.approx((-0.5, -0.5, -0.5))
    assert figures.power([r for r in stale() if r.arm in ("PPO-0", "PPO-4")]) is None  # one lag


def test_the_picture_of_staleness():
    drawn = page("staleness", stale())
    assert len(drawn.axes) == 4 + 1 and len(drawn.axes[0].lines) == 2 + 1  # and one at 0
    assert {f"{name}-{lag}" for name in figures.OBJECTIVES for lag in figures.LAGS} == {*fig_staleness.sweep()}


def test_the_picture_of_formats():
    runs = [made.run(arm, 0, mismatch__engine__log_ratio_abs_mean=gap)
            for arm, gap in (("float32", 1e-7), ("W8A8", 0.02), ("QaRL", 0.001))]
    ticks = page("formats", runs).axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["float32", "W8A8", "QaRL"]


def test_the_order_of_arms_of_routing():
    every = {arm: [] for arm in fig_routing.sweep()}
    assert [*sorted(every, key=FIGURES["routing"].order)][3:5] == ["none-2", "r2-2"]


def test_the_command(tmp_path, capsys):
    """It lists the figures, and makes one from a sweep of one run."""
    figures.main([])
    listed = capsys.readouterr().out.splitlines()
    assert {"causes 0,1,2,3,4,5,6,7,8,9", "routing 0,1", "turns computed", "referee stored"} <= {*listed}
    (tmp_path / "sweep" / "none-1-seed0").mkdir(parents=True)
    workdir = tmp_path / "sweep" / "none-1-seed0"
    write_run(workdir, {}, {"steps": 8}, 8)
    with open(workdir / "metrics.jsonl", "a", encoding="utf-8") as file:
        for step in (0, 8):
            line = {"step": step, "phase": "eval", **dict.fromkeys(figures.records.ACCURACIES, step / 16)}
            file.write(json.dumps(line) + "\n")
    figures.main(["routing", str(tmp_path), f"--runs={tmp_path / 'sweep'}"])
    assert "| none-1 | 1 | 0.500 (0.500 to 0.500) |" in (tmp_path / "routing.md").read_text()
    with pytest.raises(SystemExit):
        figures.main(["rescu"])
