"""Where half of the runs fail, by hand."""

import numpy as np
import pytest

from experiments import records, threshold
from tests.experiments import made


def test_the_half_point_lies_in_the_middle_of_what_is_symmetric():
    log_scale = np.log([1.0, 2.0, 4.0, 8.0])
    assert np.exp(threshold.half_point(log_scale, np.array([0, 0, 1, 1.0]))) == pytest.approx(8**0.5, rel=1e-3)
    # one of the two at 2 fails, and one of the two at 4 does not
    twice = np.repeat(log_scale, 2)
    mixed = np.array([0, 0, 0, 1, 0, 1, 1, 1.0])
    assert np.exp(threshold.half_point(twice, mixed)) == pytest.approx(8**0.5, rel=1e-3)


def test_where_all_or_none_fail_there_is_no_half_point():
    log_scale = np.log([1.0, 2.0])
    assert threshold.half_point(log_scale, np.ones(2)) == -np.inf
    assert threshold.half_point(log_scale, np.zeros(2)) == np.inf


@pytest.mark.parametrize("failed, end", [
    ([1, 0, 0, 0.0], np.inf),  # fewer at larger sizes, and no majority
    ([1, 1, 1, 0.0], -np.inf),  # a majority: below all sizes
    ([1, 0, 1, 1, 1, 1, 1, 1.0], -np.inf),  # beyond the smallest size by extrapolation
    ([0, 0, 0, 0, 0, 0, 0, 1.0], np.inf),
])
def test_what_the_sizes_do_not_enclose_is_not_extrapolated(failed, end):
    log_scale = np.log(np.repeat([1.0, 2.0, 4.0, 8.0], len(failed) // 4))
    assert threshold.half_point(log_scale, np.array(failed)) == end


def runs():
    fails = lambda name, scale: scale > {"none": 0.15, "TIS-2": 0.35}[name]
    return [
        made.run(f"{name}-{scale}", seed, accuracy=(0.3, *[0.2 if fails(name, scale) else 0.4] * 3))
        for name in ("none", "TIS-2") for scale in (0.1, 0.2, 0.3, 0.5) for seed in range(3)
    ]


def test_the_threshold_and_its_interval():
    none = [r for r in runs() if r.arm.startswith("none")]
    found = threshold.threshold(none, threshold.MEASURES["scale of the noise"])
    # every resample has the same points: failures from 0.2 on; about the geometric middle of 0.1 and 0.2
    with_tis = [r for r in runs() if r.arm.startswith("TIS-2")]
    assert threshold.share_below(none, with_tis, threshold.MEASURES["scale of the noise"]) == 1.0
    assert 0.12 < found[0] < 0.17 and found[1] == pytest.approx(found[2]) == pytest.approx(found[0], rel=0.02)


def test_the_table_and_the_picture():
    natural = [made.run("int8", seed, rollout_corr__k3_kl=0.001) for seed in range(3)]
    arms = records.by_arm(runs() + natural)
    arms = {arm: arms[arm] for arm in sorted(arms, key=threshold.FIGURE.order)}
    text = threshold.FIGURE.text(arms)
    assert "| none | 0.5 | 1 [1, 1] | 3 of 3 | -0.100 [-0.100, -0.100] |" in text
    assert "| TIS-2 | 0.3 | 1 [1, 1] | 0 of 3 | +0.100 [+0.100, +0.100] |" in text
    assert "| none, int8 alone | – | 0.001 [0.001, 0.001] | 0 of 3 |" in text
    assert text.endswith("| gain | TIS-2-0.5 − none-0.5 | +0.000 [+0.000, +0.000] |")
    page = threshold.FIGURE.pictures["threshold"].page(arms)
    labels = [text.get_text() for text in page.axes[0].get_legend().get_texts()]
    assert labels == ["TIS-2", "none", "none, int8 alone"]
