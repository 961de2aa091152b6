"""What figures share: gains, paired differences, tables, curves, and the command."""

import pytest

from jaxrl_tis.experiments import figures
from tests.experiments import made


def test_a_gain_is_the_mean_of_the_last_three_evaluations_less_the_first():
    run = made.run("a", 0, accuracy=(0.2, 0.9, 0.3, 0.4, 0.5))
    assert figures.gain(run) == pytest.approx(0.4 - 0.2)
    assert figures.gains([run])["a"][0] == pytest.approx(0.2)


def test_arms_are_compared_over_the_seeds_that_both_have():
    mean, low, high = figures.beside({0: 0.5, 1: 0.7, 2: 9.0}, {0: 0.4, 1: 0.4})
    assert mean == pytest.approx(0.2) and high - mean == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert figures.interval((0.1, -0.2, 0.4), ".1f") == "0.1 [-0.2, 0.4]"


def test_a_table():
    assert figures.rows(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_command_of_a_figure(tmp_path, monkeypatch, capsys):
    runs = [made.run("a", s, accuracy=(0.1, 0.2 + 0.1 * s, 0.3, 0.4)) for s in range(2)]
    made.write(tmp_path / "x.jsonl", runs)

    def draw(page, found):
        axes = page.subplots()
        figures.curve(axes, found, "eval/sampled_accuracy", "a", "black")
        figures.curve(axes, found, "reward/mean", "a", "grey")
        line, other = axes.lines
        assert list(line.get_xdata()) == [0, 32, 64, 96] and list(other.get_xdata())[:2] == [8, 16]
        assert line.get_ydata()[1] == pytest.approx(0.25)

    monkeypatch.setattr("sys.argv", ["x", str(tmp_path)])
    figures.run("x", lambda found: f"{len(found)} runs", {"y": (draw, (4, 3))})
    assert (tmp_path / "x.md").read_text() == "2 runs\n"
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")
    assert "2 runs" in capsys.readouterr().out
