"""Areas under curves by hand, and regressions on runs whose outcome follows from a signal."""

import dataclasses

import numpy as np
import pytest

from experiments import parts, predictor
from tests.experiments import made


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(predictor, "RESAMPLES", 200)


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


REWARD, ACCURACY = predictor.OUTCOMES


def test_outcomes_and_when_they_begin():
    bad, good = run(0, 1.0, True), run(0, 1.0, False)
    for outcome in predictor.OUTCOMES:
        assert outcome.happens(bad) and not outcome.happens(good) and np.isnan(outcome.falls_at(good))
    assert REWARD.falls_at(bad) == 56  # the seventh block is the first of 0.2
    # Evaluations at 0, 24, 48, ...: 0.3, 0.4, 0.1.
    assert ACCURACY.falls_at(bad) == 48
    # Worse than the best before, not than the best of all.
    assert ACCURACY.falls_at(made.run("a", 0, accuracy=(0.3, 0.25, 0.5, 0.5, 0.3))) == 96
    assert ACCURACY.falls_at(made.run("a", 0, accuracy=(0.4, 0.1, 0.4, 0.4, 0.4))) == 24


def test_signals_are_on_a_logarithmic_scale_where_they_span_decades():
    """asinh(x / 1e-6) is log(2 x / 1e-6) far from 0, and keeps the sign."""
    of = lambda value: predictor.early(run(0, value, True), "rollout_corr/chi2_token")
    assert of(100.0) == pytest.approx(np.log(2e8)) and of(-100.0) == -of(100.0) and of(0.0) == 0.0
    assert of(np.inf) == pytest.approx(np.log(2e12))
    assert np.isnan(predictor.early(made.run("a", 0, mismatch__ess_seq=np.nan), "mismatch/ess_seq"))
    assert predictor.early(made.run("a", 0, mismatch__ess_seq=0.25), "mismatch/ess_seq") == 0.25


def test_a_signal_that_tells_is_found_on_held_out_seeds():
    found = predictor.judged(RUNS, ACCURACY)
    assert found["rollout_corr/chi2_token"][0] > 0.95 and found["the four"][0] > 0.95
    assert set(found["response_length/mean"]) == {0.5}  # the same in every run, and in every draw
    area, low, high = parts.bootstrap(found["the four"])
    assert 0.8 < low < area < high <= 1.0


def test_a_signal_that_a_run_lacks_counts_as_the_mean():
    x = np.array([[0.0], [2.0], [np.nan]])
    score = predictor.fitted(x, np.array([False, True, True]))
    assert score(np.array([[np.nan]])) == pytest.approx(score(np.array([[1.0]])))


def test_runs_that_repeat_others_count_once():
    assert len(predictor.unique([made.run("a", 0), made.run("b", 0), made.run("b", 1)])) == 2


def test_a_regression_in_the_other_direction():
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    score = predictor.fitted(x, np.array([True, True, False, False]))(x)
    assert (np.diff(score) < 0).all()


def test_the_table_and_the_picture(monkeypatch):
    areas = {outcome: predictor.judged(RUNS, outcome) for outcome in predictor.OUTCOMES}
    text = predictor.table((RUNS, areas))
    assert "reward: 27 of 48 runs collapse, 14 of the 24 of held-out seeds. Within" in text
    assert "first 40 steps 0 of these 14 have" in text and "| all less the four | " in text
    monkeypatch.setattr(predictor, "EARLY", 7)  # up to step 56, the first at which rewards fall
    assert "first 56 steps 14 of these 14 have" in predictor.table((RUNS, areas))
    page = predictor.FIGURE.pictures["predictor"].page((RUNS, areas))
    assert [len(axes.lines) for axes in page.axes] == [2 * (len(predictor.SIGNALS) + 2) + 1] * 2


@pytest.mark.all
def test_the_figure(tmp_path, capsys):
    with pytest.raises(ValueError, match="needs runs of seeds"):
        predictor.FIGURE.write(tmp_path, "predictor")
    # Runs of two figures, one repeated; another file is no figure of it.
    distinct = [dataclasses.replace(r, series=r.series | {"reward/mean": r.series["reward/mean"] + 1e-4 * i})
                for i, r in enumerate(RUNS)]
    made.write(tmp_path / "rescue.jsonl", distinct)
    made.write(tmp_path / "causes.jsonl", distinct[:5])
    made.write(tmp_path / "other.jsonl", RUNS)
    predictor.FIGURE.write(tmp_path, "predictor")
    assert "of 48 runs" in capsys.readouterr().out and (tmp_path / "predictor.png").exists()
