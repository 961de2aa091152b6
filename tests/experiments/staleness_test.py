"""The law of the lag on runs that follow one."""

import pytest
from matplotlib.figure import Figure

from experiments import staleness
from tests.experiments import made


def runs(power=-0.5):
    """ESS = lag^power; PPO improves up to a lag of 4, without a clip up to 0."""
    found = []
    for name, last in (("no-clip", 0), ("PPO", 4)):
        for lag in (0, 4, 16):
            for seed in range(3):
                end = 0.4 + 0.01 * seed if lag <= last else 0.1
                found.append(made.run(
                    f"{name}-{lag}", seed, accuracy=(0.3, 0.45, 0.45, 0.45, end, end, end),
                    **{staleness.LAG.replace("/", "__"): lag,
                       staleness.ESS.replace("/", "__"): lag**power if lag else 1.0},
                ))
    return found


def test_the_power_is_that_of_the_runs():
    assert staleness.power(runs(-0.5)) == pytest.approx((-0.5, -0.5, -0.5))
    assert staleness.power([r for r in runs() if r.arm in ("PPO-0", "PPO-4")]) is None  # one lag


def test_the_bounds_and_the_table():
    first, second = staleness.bounds(runs())
    assert first == ["no-clip", "0, 1.000 [1.000, 1.000]", "4, 0.500 [0.500, 0.500]", "-0.50 [-0.50, -0.50]"]
    assert second[1:3] == ["4, 0.500 [0.500, 0.500]", "16, 0.250 [0.250, 0.250]"]
    text = staleness.table(runs())
    line = "| PPO | 16 | 3 | 16.0 [16.0, 16.0] | 0.250 [0.250, 0.250] | +0.150 [+0.150, +0.150] | -0.200 "
    assert line in text and text.count("0.350 [0.350, 0.350]") == 3  # 0.45 less 0.1
    assert "| early gain | no-clip-4 − PPO-4 | +0.000 [+0.000, +0.000] |" in text
    assert "| gain | no-clip-4 − PPO-4 | -0.310 " in text


def test_the_picture():
    page = Figure()
    staleness.draw(page, runs())
    assert len(page.axes) == 4 and len(page.axes[0].lines) == 2 + 1  # and one at 0
