"""What figures share: gains, paired differences, tables, curves, and the command."""

import pytest

from experiments import figures
from tests.experiments import made


def test_a_gain_is_the_mean_of_the_last_three_evaluations_less_the_first():
    run = made.run("a", 0, accuracy=(0.2, 0.9, 0.3, 0.4, 0.5))
    assert figures.gain(run) == pytest.approx(0.4 - 0.2)
    assert figures.gain(made.run("a", 0, accuracy=(0.2, 0.4))) == pytest.approx(0.4 - 0.2)  # no third one
    run.series["eval/greedy_accuracy"] = run.series["eval/sampled_accuracy"] + 0.1
    assert figures.at_end(run, "greedy") == pytest.approx(0.5)


def ending(arm, seed, end):
    return made.run(arm, seed, accuracy=(0.0, end, end, end))


def test_arms_are_compared_over_the_seeds_that_both_have():
    runs = [ending("a", 0, 0.5), ending("a", 1, 0.7), ending("a", 2, 9.0)]
    others = [ending("b", 0, 0.4), ending("b", 1, 0.4)]
    mean, low, high = figures.beside(runs, others)
    assert mean == pytest.approx(0.2) and high - mean == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert figures.beside(runs, [ending("b", 7, 0.4)]) is None
    text = figures.comparisons(runs + others, [
        ("gain", figures.gain, "a", "b"), ("reward", figures.of("reward/mean"), "b", "a"),
        ("gain", figures.gain, "a", "absent"),
    ])
    assert text.splitlines()[2:] == [
        "| gain | a − b | +0.200 [-1.071, +1.471] |", "| reward | b − a | +0.000 [+0.000, +0.000] |"]


def test_means_and_intervals():
    assert figures.interval((0.1, -0.2, 0.4), ".1f") == "0.1 [-0.2, 0.4]"
    assert figures.interval(None) == "–"
    # 12.7062 * 0.1 of Student's t with one degree of freedom
    assert figures.mean([0.4, 0.6], ".2f") == "0.50 [-0.77, 1.77]"


def test_a_table():
    assert figures.rows(["a", "|b|"], [["1", "2"]]) == "| a | \\|b\\| |\n| --- | --- |\n| 1 | 2 |"


def test_the_command_of_a_figure(tmp_path, monkeypatch, capsys):
    runs = [made.run("a", s, accuracy=(0.1, 0.2 + 0.1 * s, 0.3, 0.4)) for s in range(2)]
    made.write(tmp_path / "x.jsonl", runs)

    def draw(page, found):
        axes = page.subplots()
        figures.curve(axes, [], "reward/mean", "absent", "red")
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


def test_what_is_not_there_is_told(tmp_path, monkeypatch, capsys):
    made.write(tmp_path / "x.jsonl", [made.run("a", 0)])
    with open(tmp_path / "x.jsonl", "a", encoding="utf-8") as file:
        file.write('{"arm": "b", "seed": 3, "unfinished": 7}\n')
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path)])
    figures.run("x", lambda found: "a table", {}, needed=("a",))
    assert "Not finished, and left out: b, seed 3." in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        figures.run("x", lambda found: "a table", {}, needed=("a", "b"))
    assert error.value.code == 2 and "has no finished run of b" in capsys.readouterr().err
