"""The law of the lag on runs that follow one."""

import pytest
from matplotlib.figure import Figure

from jaxrl_tis.experiments import staleness
from tests.experiments import made


def runs(power=-2.0):
    """Lag = ESS^power; PPO improves up to a lag of 4, without a clip up to 0."""
    found = []
    for name, last in (("no-clip", 0), ("PPO", 4)):
        for lag in (0, 4, 16):
            for seed in range(3):
                end = 0.4 + 0.01 * seed if lag <= last else 0.1
                found.append(made.run(
                    f"{name}-{lag}", seed, accuracy=(0.3, 0.45, end, end, end),
                    **{staleness.LAG.replace("/", "__"): lag,
                       staleness.ESS.replace("/", "__"): lag ** (1 / power) if lag else 1.0},
                ))
    return found


def test_the_power_is_that_of_the_runs():
    assert staleness.power(runs(-2.0)) == pytest.approx((-2.0, -2.0, -2.0))


def test_the_largest_lags_and_the_table():
    first, second = staleness.largest_lags(runs())
    assert first[:3] == ["no-clip", "0", "4"] and second[:3] == ["PPO", "4", "16"]
    text = staleness.table(runs())
    assert "| PPO | 16 | 3 | 16.0 [16.0, 16.0] | 0.250 [0.250, 0.250] | -0.200 [-0.200, -0.200] | – |" in text
    assert "| no-clip | 4 | 3 |" in text and text.count("0.350 [0.350, 0.350]") == 3  # 0.45 less 0.1


def test_the_picture():
    page = Figure()
    staleness.draw(page, runs())
    assert len(page.axes) == 4 and len(page.axes[0].lines) == 2
