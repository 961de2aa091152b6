"""Collapses and areas under curves by hand, and regressions on runs whose outcome follows from a signal."""

import dataclasses

import numpy as np
import pytest

from experiments import parts, predictor
from tests.experiments import made


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(predictor, "RESAMPLES", 100)


def test_an_area_is_the_share_of_ordered_pairs():
    """Pairs (0.9, 0.1), (0.9, 0.5), (0.5, 0.1) are ordered, (0.5, 0.5) is a tie: 3.5 of 4. If 0.9 counts twice,
    5.5 of 6. Of the pairs within (0.1, 0.9) and (0.5, 0.5) 1.5 of 2."""
    score, happened = np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, False, True, True])
    of = lambda group, *counts: predictor.auroc(score, happened, np.array(group), [*map(np.array, counts)]).tolist()
    assert of([0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 2]) == [3.5 / 4, 5.5 / 6]
    assert of([0, 1, 1, 0], [1, 1, 1, 1]) == [1.5 / 2]
    assert np.isnan(of([0, 0, 0, 0], [0, 0, 1, 1]))


def of(reward, **series):
    return made.run("a", 0, reward__mean=np.array(reward), **series)


def test_a_drop_lasts():
    """0.35 is 70 % of 0.5. The recovery after two blocks is too late, after one it is none."""
    reward = [0.5, 0.4, 0.3, 0.3, 0.3, *[0.6] * 7]
    assert predictor.collapse(of(reward), 2) == (2, "drop")
    assert predictor.collapse(of(reward), 3) is None
    assert predictor.collapse(of([0.5] * 9 + [0.3] * 3), 6) == (9, "drop")  # to the end, LEAST blocks on
    assert predictor.collapse(of([0.5] * 10 + [0.3] * 2), 6) is None
    assert predictor.collapse(of([0.0] * 12), 6) is None


def test_a_spike_is_followed_by_less_reward():
    norm = [1.0, 1.0, 3.0, 11.0, *[1.0] * 8]  # the median before is 1
    less = [0.5] * 4 + [0.44] * 8
    assert predictor.collapse(of(less, actor__grad_norm=norm), 6) == (3, "spike")
    assert predictor.collapse(of([0.5] * 4 + [0.46] * 8, actor__grad_norm=norm), 6) is None
    assert predictor.collapse(of(less, actor__grad_norm=[*norm[:3], 9.0, *norm[4:]]), 6) is None


def test_signals_are_on_a_logarithmic_scale_where_they_span_decades():
    """asinh(x / 1e-6) is log(2 x / 1e-6) far from 0, and keeps the sign. Values 0 to 11, windows of five."""
    run = of(np.linspace(1.0, 0.45, 12), mismatch__ess_seq=np.arange(12.0), rollout_corr__chi2_token=np.arange(12.0))
    assert predictor.signal(run, "mismatch/ess_seq", 7) == 5.0
    assert predictor.signal(run, "mismatch/ess_seq", 1) == 0.5
    assert predictor.signal(run, "rollout_corr/chi2_token", 7) == pytest.approx(np.log(2 * 6.8e6))
    assert predictor.signal(run, predictor.CONTROL, 11) == pytest.approx(0.55)
    assert predictor.signal(of(1.0, actor__ppo_kl=-np.inf), "actor/ppo_kl", 3) == pytest.approx(-np.log(2e12))
    assert np.isnan(predictor.signal(of(1.0, mismatch__ess_seq=np.nan), "mismatch/ess_seq", 3))


def test_updates_of_a_step():
    assert predictor.updates("rescue", "none") == 2 and predictor.updates("routing", "noise-r2-4") == 4
    assert predictor.updates("causes", "reuse") == 8 and predictor.updates("causes", "none") == 2
    assert predictor.blocks(200, 2) == 12 and predictor.blocks(100, 8) == 1 and predictor.blocks(100, 20) == 1


def run(arm, seed, chi2, collapses, blocks=30):
    reward = np.where(np.arange(blocks) < 8, 0.5, 0.2 if collapses else 0.5) + 1e-4 * seed + 1e-5 * arm
    made_run = made.run(f"arm {arm}", seed)
    series = {name: np.ones(blocks) for name in made_run.series}
    return dataclasses.replace(
        made_run, series=series | {"reward/mean": reward, "rollout_corr/chi2_token": np.full(blocks, chi2)}
    )


RUNS = [run(i, seed, 10.0 ** (i - 3), i + seed % 2 >= 4) for seed in range(6) for i in range(8)]


def test_predictions_up_to_the_collapse():
    """A collapse at block 8: 8 predictions, all within 12 blocks. 11 of 30 - 12 - 6 and more are whole without one."""
    data = predictor.predictions({"rescue": [run(0, 0, 1.0, True), run(1, 0, 1.0, False)]})
    assert data.is_before.tolist() == [True] * 8 + [False] * 27
    assert data.is_whole.sum() == 8 + 12 and data.kinds == ["drop"] and data.num_runs == 2
    assert data.arm.tolist() == [0] * 8 + [1] * 27


def test_a_signal_that_tells_is_found_on_held_out_seeds():
    data = predictor.predictions({"rescue": RUNS})
    everything = np.ones(len(data.x), bool)
    of = lambda label: predictor.scores(predictor.of_set(data, label), data, everything, "seeds")
    area = lambda label: predictor.drawn(of(label), data, "seeds")
    found = area("the four")
    assert 0.9 < parts.bootstrap(found)[1] < found[0] <= 1.0
    assert set(area("response_length/mean")) == {0.5}  # the same in every run, and in every draw
    score = of("the four")
    assert np.isnan(score[data.seed < 3]).all() and np.isfinite(score[data.seed >= 3]).all()
    assert np.isfinite(predictor.scores(data.x[:, :1], data, everything, "arms")).all()


def test_a_signal_that_a_run_lacks_counts_as_the_mean():
    x = np.array([[0.0], [2.0], [np.nan]])
    score = predictor.fitted(x, np.array([False, True, True]))
    assert score(np.array([[np.nan]])) == pytest.approx(score(np.array([[1.0]])))


def test_a_regression_in_the_other_direction():
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    score = predictor.fitted(x, np.array([True, True, False, False]))(x)
    assert (np.diff(score) < 0).all()


def test_squares_and_products():
    x = np.array([[1.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(predictor.squares(x), [[-1, -1, 1, 1, 1], [1, 1, 1, 1, 1]])


def test_the_rule():
    of = lambda four, more: predictor.verdict({"the four": np.array(four), "all": np.array(four) + more})
    assert of([0.95, 0.92, 0.97], 0.01).startswith("0.90 reached") and "0.03: no" in of([0.95, 0.92, 0.97], 0.01)
    assert of([0.8, 0.7, 0.85], 0.04).startswith("0.90 missed") and "0.03: yes" in of([0.8, 0.7, 0.85], 0.04)
    assert of([0.8, 0.7, 0.95], 0.0).startswith("0.90 undecided")


@pytest.mark.all
def test_the_figure(tmp_path, capsys):
    with pytest.raises(ValueError, match="has no run of rescue"):
        predictor.FIGURE.write(tmp_path, "predictor")
    # Runs of two figures, one repeated; another file is no figure of it.
    made.write(tmp_path / "rescue.jsonl", RUNS)
    made.write(tmp_path / "causes.jsonl", RUNS[:5])
    made.write(tmp_path / "other.jsonl", [run(20, 20, 1.0, True)])
    predictor.FIGURE.write(tmp_path, "predictor")
    out = capsys.readouterr().out
    assert "27 of 48 runs collapse: 27 by a drop, 0 by a spike" in out
    assert "whole, held-out arms: " in out and (tmp_path / "predictor.png").exists()
