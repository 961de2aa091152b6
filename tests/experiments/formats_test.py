"""The table of number formats."""

from matplotlib.figure import Figure

from experiments import formats
from tests.experiments import made

GAP = "mismatch__engine__log_ratio_abs_mean"


def runs():
    return [
        made.run(arm, seed, accuracy=(0.3, *[end] * 3), **{GAP: gap})
        for arm, gap, end in (("float32", 1e-7, 0.5), ("W8A8", 0.02, 0.4), ("QaRL", 0.001, 0.4))
        for seed in range(3)
    ]


def test_the_table_is_beside_float32():
    text = formats.table(runs())
    plain, quantised, _ = text.splitlines()[2:5]
    assert plain.endswith("| +0.200 [+0.200, +0.200] | – |")
    assert "2.00e-02 [2.00e-02, 2.00e-02]" in quantised
    assert "| QaRL / W8A8 | 0.05 [0.05, 0.05] |" in text
    assert quantised.endswith("| +0.100 [+0.100, +0.100] | -0.100 [-0.100, -0.100] |")


def test_the_picture():
    page = Figure()
    formats.draw(page, runs())
    assert [x.get_text() for x in page.axes[0].get_yticklabels()] == [
        "float32", "W8A8", "QaRL"]
