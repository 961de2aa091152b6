"""Areas under curves by hand, and regressions on runs whose outcome follows from a signal."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxrl_tis.experiments import predictor
from tests.experiments import made


def test_an_area_is_the_share_of_ordered_pairs():
    """Pairs (0.9, 0.1), (0.9, 0.5), (0.5, 0.1) are ordered, (0.5, 0.5) is a tie: 3.5 of 4."""
    score, happened = np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, False, True, True])
    assert predictor.auroc(score, happened) == 3.5 / 4
    assert np.isnan(predictor.auroc(score, np.ones(4, bool)))


def run(seed, chi2, collapses):
    reward = np.where(np.arange(12) < 6, 0.5, 0.2 if collapses else 0.5)
    return made.run(
        "a", seed, accuracy=(0.3, 0.4, *[0.1 if collapses else 0.4] * 3), reward__mean=reward,
        rollout_corr__chi2_token=chi2,
    )


RUNS = [
    run(seed, 10.0 ** (i - 3), i + seed % 2 >= 4) for seed in range(6) for i in range(8)
]


def test_outcomes_and_lead():
    bad, good = run(0, 1.0, True), run(0, 1.0, False)
    for outcome in predictor.OUTCOMES.values():
        assert outcome(bad) and not outcome(good)
    assert predictor.lead(bad) == 8.0  # block 7 is the second after the first five
    assert np.isnan(predictor.lead(good))


def test_signals_are_logarithms_where_they_span_decades():
    assert predictor.early(run(0, 100.0, True), "rollout_corr/chi2_token") == 2.0
    assert predictor.early(run(0, 0.0, True), "rollout_corr/chi2_token") == -8.0
    assert predictor.early(run(0, np.inf, True), "rollout_corr/chi2_token") == 6.0
    assert predictor.early(made.run("a", 0, mismatch__ess_seq=np.nan), "mismatch/ess_seq") == 0.0


def test_a_signal_that_tells_is_found_on_held_out_seeds():
    found = predictor.judged(RUNS, predictor.loses_accuracy)
    assert found["rollout_corr/chi2_token"][0] > 0.95 and found["the four"][0] > 0.95
    assert found["response_length/mean"][0] == 0.5  # the same in every run
    area, low, high = found["the four"]
    assert low <= area <= high <= 1.0


def test_a_regression_in_the_other_direction():
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    score = predictor.fitted(x, np.array([True, True, False, False]))(x)
    assert (np.diff(score) < 0).all()


def test_the_table_and_the_picture():
    text = predictor.table(RUNS)
    assert "reward: 27 of 48 runs collapse, 14 of 24 of the held-out seeds; median lead 8 steps." in text
    page = Figure()
    predictor.draw(page, RUNS)
    assert len(page.axes) == 2


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["predictor", str(tmp_path)])
    with pytest.raises(ValueError, match="no record of runs"):
        predictor.main()
    made.write(tmp_path / "a.jsonl", RUNS)
    predictor.main()
    assert "the four" in capsys.readouterr().out and (tmp_path / "predictor.png").exists()
