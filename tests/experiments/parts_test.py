"""What figures share: gains, paired differences, tables, curves, and what is written."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import parts
from tests.experiments import made


def test_a_gain_is_the_mean_of_the_last_three_evaluations_less_the_first():
    run = made.run("a", 0, accuracy=(0.2, 0.9, 0.3, 0.4, 0.5))
    assert parts.gain(run) == pytest.approx(0.4 - 0.2)
    assert parts.gain(made.run("a", 0, accuracy=(0.2, 0.4))) == pytest.approx(0.4 - 0.2)  # no third one
    run.series["eval/greedy_accuracy"] = run.series["eval/sampled_accuracy"] + 0.1
    assert parts.at_end(run, "greedy") == pytest.approx(0.5)


def ending(arm, seed, end, **series):
    return made.run(arm, seed, accuracy=(0.0, end, end, end), **series)


RUNS = [ending("a", 0, 0.5), ending("a", 1, 0.7), ending("a", 2, 9.0)]
OTHERS = [ending("b", 0, 0.4), ending("b", 1, 0.4)]


def test_arms_are_compared_over_the_seeds_that_both_have():
    mean, low, high = parts.beside(RUNS, OTHERS)
    assert mean == pytest.approx(0.2) and high - mean == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert parts.beside(RUNS, [ending("b", 7, 0.4)]) is None
    table = parts.compared([
        ("gain", parts.gain, "a", "b"), ("reward", parts.of("reward/mean"), "b", "a"),
        ("gain", parts.gain, "a", "absent"),
    ])
    assert table({"a": RUNS, "b": OTHERS}).splitlines()[2:] == [
        "| gain | a − b | +0.200 [-1.071, +1.471] |", "| reward | b − a | +0.000 [+0.000, +0.000] |"]


def test_a_ratio_is_a_geometric_mean():
    """Ratios 2 and 8: the mean of their logarithms is log10(4), +- 12.7062 * log10(2)."""
    some, others = ([ending("a", s, x) for s, x in enumerate(ends)] for ends in ((0.2, 0.8), (0.1, 0.1)))
    mean, low, high = parts.ratio(some, others, parts.gain)
    assert mean == pytest.approx(4) and low == pytest.approx(4 / 2**12.7062, rel=1e-3)
    assert parts.ratio(some, [ending("b", 7, 0.4)], parts.gain) is None


def test_a_table_of_arms():
    """Ratios 1.25 and 1.75: the mean of their logarithms is 0.391, +- 12.7062 * 0.168."""
    arms = {"a": RUNS[:2], "b": [ending("b", s, 0.4, reward__mean=np.nan) for s in range(2)], "c": RUNS[2:]}
    table = parts.of_arms(
        parts.ARM, parts.SEEDS, ("reward", parts.mean_of(parts.of("reward/mean"), ".1f")),
        ("to b", parts.to_base("b")), ("over", parts.to_base("b", form=".2f", compare=parts.ratio)),
        ("to its own", parts.to_base(lambda arm: {"a": "b"}.get(arm, "none"))),
    )
    header, _, a, b, c = table(arms).splitlines()
    assert header == "| arm | seeds | reward | to b | over | to its own |"
    assert a == (
        "| a | 2 | 1.0 [1.0, 1.0] | +0.200 [-1.071, +1.471] | 1.48 [0.17, 12.54] | +0.200 [-1.071, +1.471] |")
    assert b == "| b | 2 | – | – | – | – |" and c.endswith("| – | – | – |")  # no common seed


def test_means_and_intervals():
    assert parts.interval((0.1, -0.2, 0.4), ".1f") == "0.1 [-0.2, 0.4]"
    assert parts.interval(None) == "–"
    # 12.7062 * 0.1 of Student's t with one degree of freedom
    assert parts.mean([0.4, 0.6], ".2f") == "0.50 [-0.77, 1.77]"
    # The first is the estimate; of the resampled 0, 1, ... 40 the quantiles are 1 and 39.
    assert parts.bootstrap(np.array([7.0, *range(41)])) == (7, 1, 39)


def test_a_table():
    assert parts.rows(["a", "|b|"], [["1", "2"]]) == "| a | \\|b\\| |\n| --- | --- |\n| 1 | 2 |"


def test_curves_are_means_over_seeds():
    arms = {"a": [made.run("a", s, accuracy=(0.1, 0.2 + 0.1 * s, 0.3, 0.4)) for s in range(2)]}
    axes = Figure().subplots()
    parts.curves("eval/sampled_accuracy", {"absent": "x", "a": "label"}, title="t")(axes, arms)
    parts.curves("reward/mean", {"a": "b"}, is_change=True, has_zero=True, has_legend=True)(axes, arms)
    line, other, _ = axes.lines
    assert list(line.get_xdata()) == [0, 32, 64, 96] and list(other.get_xdata())[:2] == [8, 16]
    assert line.get_ydata()[1] == pytest.approx(0.25) and set(other.get_ydata()) == {0}
    assert [text.get_text() for text in axes.get_legend().texts] == ["label", "b"]
    assert (axes.get_title(), axes.get_xlabel()) == ("t", "step")


def panel(axes, arms):
    axes.plot([0, 1], label=f"{len(arms)} arms")


FIGURE = parts.Figure(
    (lambda arms: f"{[*arms]}", lambda arms: "a table"),
    {"y": parts.Picture((4, 3), [panel, panel], num_rows=2, has_legend_below=True)},
    needed=("a",), order=lambda arm: -ord(arm), recorded=lambda: [made.run("c", 0)],
)


def test_what_is_written(tmp_path, capsys):
    """Arms in their order, with recorded runs and without unfinished ones; or other data."""
    made.write(tmp_path / "x.jsonl", [made.run("a", 0), made.run("b", 0)])
    FIGURE.write(tmp_path, "x")
    assert (tmp_path / "x.md").read_text() == "['c', 'b', 'a']\n\na table\n"
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")
    assert "a table" in capsys.readouterr().out
    page = FIGURE.pictures["y"].page({"a": []})
    assert len(page.axes) == 2 and [text.get_text() for text in page.legends[0].texts] == ["1 arms"]
    with open(tmp_path / "x.jsonl", "a", encoding="utf-8") as file:
        file.write('{"arm": "d", "seed": 3, "unfinished": 7}\n')
    FIGURE.write(tmp_path, "x")
    assert (tmp_path / "x.md").read_text().endswith("a table\n\nNot finished, and left out: d, seed 3.\n")
    made.write(tmp_path / "x.jsonl", [made.run("b", 0)])
    with pytest.raises(ValueError, match="has no finished run of a; ./launch/figures.sh trains them"):
        FIGURE.write(tmp_path, "x")
    parts.Figure((str,), read=lambda folder: folder.name).write(tmp_path, "z")
    assert (tmp_path / "z.md").read_text() == f"{tmp_path.name}\n"
