"""Expected values by hand; Student's quantiles from tables."""

import json

import numpy as np
import pytest

from configs import fig_referee
from experiments import records, referee, referee_runs
from experiments.records import Run


def run(arm, seed, rewards, k3=0.5):
    series = {"eval/steps": np.arange(len(rewards)) * 20.0, "eval/sampled_reward": np.array(rewards)}
    return Run(arm, seed, [], [], series | {"rollout_corr/k3_kl": np.array([k3, 9.0])})


def gains(**of_arms):
    return {name.replace("_", " "): dict(enumerate(values)) for name, values in of_arms.items()}


def test_the_gain_is_that_of_the_last_three_evaluations():
    assert referee.gain(run("a/b/none", 0, [0.2, 0.9, 0.3, 0.4, 0.8])) == pytest.approx(0.3)
    assert referee.gain(run("a/b/none", 0, [0.2, 0.5])) == pytest.approx(0.3)


def test_a_run_of_half_the_budget_ends_earlier():
    """Evaluations after 0, 20, ... 80 steps."""
    assert referee.gain(run("a/b/none", 0, [0.2, 0.9, 0.3, 0.4, 0.8]), 40) == pytest.approx(0.4)
    arms = {
        name: [run(f"a/b/{name}", seed, [0.2, x + 0.001 * seed, x, 0.2, 0.2, 0.2]) for seed in range(4)]
        for name, x in (("none", 0.2), ("token TIS", 0.4), ("exact engine", 0.2))
    }
    parts = {"a/b": arms}
    assert "| token TIS |" in referee.decisions(parts, 40)
    assert "| token TIS |" not in referee.decisions(parts)


@pytest.mark.parametrize(("last", "expected"), [(0.09, True), (0.11, False), (0.5, False)])
def test_a_run_that_loses_half_of_its_reward_has_collapsed(last, expected):
    assert referee.collapsed(run("a/b/none", 0, [0.2, 0.4, last])) is expected


def test_intervals_hold_together():
    """Mean 2, standard deviation 1, n = 3: one interval is 4.303 / sqrt(3) wide on each side, and each
    of five has the quantile 0.995, 9.925."""
    values = np.array([1.0, 2.0, 3.0])
    assert referee.simultaneous(values, 1) == pytest.approx((2, 2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert referee.simultaneous(values, 5) == pytest.approx((2, 2 - 5.7301, 2 + 5.7301), abs=1e-3)
    assert referee.simultaneous(values[:1], 5) == (1.0, -np.inf, np.inf)


def test_seeds_are_paired():
    found = referee.paired({0: 1.0, 2: 5.0, 3: 7.0}, {3: 1.0, 0: 0.5, 1: 9.0})
    assert found.tolist() == [0.5, 6.0]


NOISE = np.array([0.001, -0.001, 0.002, -0.002])  # of four seeds
BASE = np.zeros(4)


def test_the_best_are_taken_and_the_worse_named():
    g = gains(
        none=BASE, token_TIS=0.3 + NOISE, token_MIS=0.3 - NOISE, sequence_TIS=0.1 + NOISE,
        IcePop=-0.2 + NOISE, KPop=0.5 * NOISE, exact_engine=0.9 + NOISE,
    )
    assert referee.decision(g) == ["token TIS", "token MIS"]
    better = ["token TIS", "token MIS", "sequence TIS", "exact engine"]
    assert referee.verdicts(g) == (better, ["IcePop"])
    assert referee.advice(g) == "token TIS (as good: token MIS)"


def test_the_order_of_the_arms_decides_among_equals():
    g = gains(none=BASE, KPop=0.3 + NOISE, token_TIS=0.3 - NOISE)
    assert referee.decision(g) == ["token TIS", "KPop"]


def test_where_nothing_is_better_than_none():
    g = gains(none=BASE, token_TIS=3 * NOISE, exact_engine=2 * NOISE)
    assert referee.decision(g) == []
    g["exact engine"] = {seed: x + 0.01 for seed, x in g["none"].items()}
    assert referee.advice(g) == "none: the gap costs less than 0.05"
    for cost in (0.06 + 0 * NOISE, 40 * NOISE):  # a cost, and an interval that is too wide
        g["exact engine"] = {seed: x + cost[seed] for seed, x in g["none"].items()}
        assert referee.advice(g) == "not decided"


def test_the_verdict_says_which_seeds_it_needs():
    """The fourth seed alone makes the interval wide."""
    g = gains(none=BASE, token_TIS=[0.1, 0.1, 0.1, -0.4])
    assert referee.verdicts(g) == ([], [])
    assert referee.without_a_seed(g) == [([3], ["token TIS"], [])]
    g = gains(none=BASE, token_TIS=[0.1, 0.1, -0.1, -0.1])
    assert referee.without_a_seed(g) == []
    g = gains(none=BASE, token_TIS=[-0.1, -0.1, -0.1, -0.15])
    assert referee.without_a_seed(g) == []


def test_seeds_that_change_a_verdict_alike_are_named_together():
    """Quantiles: 3.182 for four seeds, 4.303 for three."""
    # 0.125 +- 0.053; without one of the seeds 0.133 +- 0.087 (twice), 0.123 +- 0.101, 0.110 +- 0.043.
    g = gains(none=BASE, token_TIS=[0.1, 0.1, 0.13, 0.17])
    assert referee.without_a_seed(g) == []
    # 0.175 +- 0.158; without one of the seeds 0.200 +- 0.262 (twice), 0.170 +- 0.301, 0.130 +- 0.129.
    g = gains(none=BASE, token_TIS=[0.1, 0.1, 0.19, 0.31])
    assert referee.without_a_seed(g) == [([0, 1, 2], [], [])]


def test_the_cost_of_the_gap_is_one_comparison():
    """Mean 0.25, standard deviation 0.129, n = 4, quantile 3.182: half 0.2054."""
    g = gains(none=BASE, token_TIS=BASE, exact_engine=[0.1, 0.2, 0.3, 0.4])
    assert referee.cost_of_gap(g) == pytest.approx((0.25, 0.25 - 0.2054, 0.25 + 0.2054), abs=1e-3)


def test_the_mean_over_parts_counts_parts_and_seeds():
    """Part means 0.2 and 0.4, variance 0.02 / 2; seed means 0.2, 0.3, 0.4, variance 0.01 / 3. One degree of
    freedom: quantile 12.706, and 25.452 for two comparisons."""
    one, other = [0.1, 0.2, 0.3], [0.3, 0.4, 0.5]
    zero = np.zeros(3)
    parts = {"a": gains(none=zero, KPop=one), "b": gains(none=zero, KPop=other)}
    half = np.sqrt(0.02 / 2 + 0.01 / 3)
    for count, quantile in ((1, 12.706), (2, 25.452)):
        expected = (0.3, 0.3 - quantile * half, 0.3 + quantile * half)
        assert referee.overall(parts, "KPop", count) == pytest.approx(expected, abs=1e-3)
    assert referee.overall({"a": parts["a"]}, "KPop", 1) == (pytest.approx(0.2), -np.inf, np.inf)


def test_the_control_tells_the_loss_from_the_correction(monkeypatch):
    """Means and half widths by hand: two seeds, quantile of five intervals with one degree of freedom
    63.657, standard error of 0.1 and 0.3 0.1."""
    monkeypatch.setattr(referee_runs, "SEEDS", (0, 1))
    def made(name, *gained):
        return [run(f"int8/long/{name}", seed, [0.2, 0.2 + x]) for seed, x in enumerate(gained)]
    runs = [
        *made("none", 0.5, 0.5), *made("REINFORCE", 0.4, 0.4), *made("KPop", 0.5, 0.7), *made("IPO", 0.4, 0.4),
        *made("centering", 0.3, 0.3), *made("centering + TIS", 0.4, 0.4),
    ]
    table = referee.control_table(runs).splitlines()
    assert table[0].startswith("| part | REINFORCE minus none | KPop minus REINFORCE |")
    zero = "+0.000 [+0.000, +0.000]"
    assert table[2].replace("-0.000", "+0.000") == (
        "| int8/long | -0.100 [-0.100, -0.100] | +0.200 [-6.166, +6.566] | "
        f"{zero} | -0.100 [-0.100, -0.100] | {zero} | 0 of 2 |"
    )
    assert not referee.control_table([r for r in runs if r.seed == 0])
    assert "REINFORCE" not in referee.by_part([r for r in runs if not referee.is_control(r)])["int8/long"]


def test_gradients_are_relative_to_that_without_a_gap():
    """Sums over two lines: true2 4, own2 16, dot 6, bias2 1, variance 36."""
    line = {"arm": "int8/short/none", "true2": 1.0, "own2": 7.0, "dot": 2.0, "bias2": 3.0, "variance": 6.0}
    other = {"arm": "int8/short/none", "true2": 3.0, "own2": 9.0, "dot": 4.0, "bias2": -2.0, "variance": 30.0}
    assert referee.gradient_measures([line, other]) == {"none": ("0.50", "0.750", "3.00")}


def test_a_squared_bias_below_zero_is_none():
    line = {"arm": "int8/short/KPop", "true2": 1.0, "own2": 1.0, "dot": 1.0, "bias2": -2.0, "variance": 1.0}
    assert referee.gradient_measures([line])["KPop"] == ("0.00", "1.000", "1.00")


@pytest.mark.all
def test_the_page(tmp_path, monkeypatch):
    """Of the parts that have all of their runs."""
    arms = {"none": 0.0, "token TIS": 0.2, fig_referee.EXACT: 0.3}
    monkeypatch.setattr(fig_referee, "arms_of", lambda gap, length: arms)
    monkeypatch.setattr(referee_runs, "SEEDS", tuple(range(4)))
    (tmp_path / "referee").mkdir()
    for gap, names in (("int8", list(arms)), ("noise", ["none"])):
        lines = [
            {"arm": f"{gap}/short/{name}", "seed": seed, "verdict": [], "findings": [], "eval/steps": [0, 20],
             "eval/sampled_reward": [0.2, 0.3 + arms[name] + 0.002 * seed], "rollout_corr/k3_kl": [0.125, 0.375]}
            for name in names for seed in range(4)
        ]
        path = tmp_path / "referee" / f"{gap}-short.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    referee.FIGURE.write(tmp_path, "referee")
    text = (tmp_path / "referee.md").read_text()
    assert text.startswith("Not complete, and left out: noise/short (4 of 12 runs).\n")
    assert "| int8 | 0.25 | short | token TIS | – | +0.300 [+0.300, +0.300] |" in text
    assert "| noise | 0" not in text
    assert "mean over 1 part |" in text
    assert "| token TIS | +0.200 [-inf, +inf] |" in text
    assert "| token TIS | +0.303" in text and "0 of 4" in text
    assert (tmp_path / "referee.png").stat().st_size > 1000


def test_without_a_run_there_is_no_page(tmp_path):
    with pytest.raises(ValueError, match="no run of the referee"):
        referee.read(tmp_path)


def test_every_arm_is_of_a_part():
    assert len(fig_referee.sweep()) == (4 * 2 + 1) * 14
    assert all(arm.count("/") == 2 for arm in fig_referee.sweep())


def test_a_run_is_written_as_it_is_read(tmp_path):
    from experiments import referee_runs

    steps = [{"step": s, "phase": "train", "reward/mean": 0.5, "other": 1.0} for s in range(1, 9)]
    tests = [{"step": s, "phase": "eval", "eval/sampled_reward": s / 10} for s in (0, 8)]
    path = tmp_path / "a.jsonl"
    path.write_text(referee_runs.line_of("int8/short/none", 3, steps + tests) + "\n")
    [found], others = records.read(path)
    assert (found.arm, found.seed, others) == ("int8/short/none", 3, [])
    assert found.series["eval/sampled_reward"].tolist() == [0.0, 0.8]
    assert found.series["reward/mean"].tolist() == [0.5]
    assert "other" not in found.series
