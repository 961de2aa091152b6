"""What is drawn: the right numbers, in the right place, for every run."""

import numpy as np
import pytest
from matplotlib import figure

from jaxrl_tis.record import probabilities
from jaxrl_tis.report import plots

GREEDY = "eval/greedy_accuracy"


def make_run(label, steps, gap, color):
    """Run of `steps` steps of 4 s whose largest gap grows by `gap` a step, with two evaluations."""
    records = [
        {"step": 0, "phase": "eval", GREEDY: 0.2, "eval/n": 100},
        *({"step": step, "phase": "train",
           "training/rollout_probs_diff_max": gap * step,
           "training/rollout_probs_diff_mean": gap / 2,
           "time/rollout_s": 2.0, "time/update_s": 1.0, "time/step_s": 4.0}
          for step in range(1, steps + 1)),
        {"step": steps, "phase": "eval", GREEDY: 0.5, "eval/n": 100, "time/eval_s": 30.0},
    ]
    return plots.Run(label, color, records, {})


INT8 = make_run("int8", 4, 0.125, plots.COLORS[0])
EXACT = make_run("exact", 60, 0.0, plots.COLORS[1])


def test_curves_are_drawn_for_both_runs():
    axes = figure.Figure().add_subplot()
    plot = next(plot for plot in plots.PLOTS if plot.title == "Probability difference")
    plots.draw(axes, plot, [INT8, EXACT])
    curves = {(line.get_color(), line.get_linestyle()): line.get_xydata() for line in axes.lines
              if line.get_alpha() is None}
    # gap 0.125: largest 0.125, 0.25, 0.375, 0.5 at steps 1 to 4; mean 0.0625.
    np.testing.assert_array_equal(curves[plots.COLORS[0], "-"],
                                  [[1, 0.125], [2, 0.25], [3, 0.375], [4, 0.5]])
    np.testing.assert_array_equal(curves[plots.COLORS[0], "--"][:, 1], [0.0625] * 4)
    np.testing.assert_array_equal(curves[plots.COLORS[1], "-"][:, 1], [0.0] * 60)
    # Exact zeros are the best result there is: they must be on the axis.
    assert axes.get_yscale() == "symlog" and axes.get_ylim()[0] <= 0
    assert axes.yaxis.get_transform().linthresh == 0.0625  # logarithmic from the smallest on


def test_runs_beyond_a_number_are_not_named_in_every_plot():
    """With 70 of them the names would take all of the picture."""
    plot = next(p for p in plots.PLOTS if p.title == "Probability difference")
    runs = [make_run(f"run {i}", 4, 0.1, "black") for i in range(plots.MOST_NAMED + 1)]
    few, many = (plots.legend_entries(plot, some) for some in (runs[:-1], runs))
    assert len(few) == plots.MOST_NAMED + 2  # and the two metrics
    assert [entry.get_label() for entry in many] == ["largest", "mean"]


def test_accuracy_band_is_the_wilson_interval():
    axes = figure.Figure().add_subplot()
    plot = next(plot for plot in plots.PLOTS if GREEDY in plot.series)
    plots.draw(axes, plot, [INT8])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    # p = 0.2, n = 100: (0.2 + 0.0192073 -+ 1.959964 sqrt(0.0016 + 0.0000960)) / 1.0384146
    assert heights.min() == pytest.approx(0.13337, abs=2e-5)
    # p = 0.5: (0.5 + 0.0192073 + 1.959964 sqrt(0.0025 + 0.0000960)) / 1.0384146
    assert heights.max() == pytest.approx(0.59617, abs=2e-5)


def test_time_by_phase():
    seconds = plots.phase_seconds(INT8)
    # Of 4 x 4 s: 8 s rollout, 4 s update, 4 s unnamed; the evaluation comes on top.
    assert {phase: value for phase, value in seconds.items() if value} == {
        "rollout": 8.0, "update": 4.0, "rest of the step": 4.0, "eval": 30.0}


def grid_run(*rates):
    """A run whose steps record flip rates of two layers at positions 0, 1 and 2."""
    records = [
        {"step": step, "phase": "train", **{
            f"mismatch/route_flip_layer_{layer}_position_{at}": x
            for layer, row in enumerate(step_rates) for at, x in enumerate(row)}}
        for step, step_rates in enumerate(rates, start=1)
    ]
    return plots.Run("experts", "black", records, {})


def test_flips_by_layer_and_position():
    run = grid_run([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]], [[0.3, 0.4, 0.0], [0.5, 0.0, 0.0]])
    rates, layers, positions = plots.flip_rates(run)
    np.testing.assert_allclose(rates, [[0.2, 0.3], [0.4, 0.0]])  # no response has position 2
    assert layers == [0, 1] and positions == [0, 1]
    axes = figure.Figure().add_subplot()
    plots.draw_flips(axes, rates, layers, positions)
    np.testing.assert_allclose(axes.collections[0].get_array(), rates)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]


def test_parts_without_a_token_are_left_out():
    gap, share = "mismatch/turn_2/log_ratio_abs_mean", "mismatch/turn_2/token_fraction"
    records = [{"step": s, "phase": "train", gap: 0.1 * x, share: x} for s, x in ((1, 0.0), (2, 0.5))]
    steps, values = plots.Run("a", "black", records, {}).curve("train", gap)
    assert steps.tolist() == [2] and values.tolist() == [0.05]
    run = grid_run([[0.3, 0.0, 0.0]] * 2, [[0.0, 0.0, 0.0]] * 2)
    run.records[1]["mismatch/position_0/token_fraction"] = 0.0
    np.testing.assert_allclose(plots.flip_rates(run)[0], [[0.3], [0.3]])


def test_the_picture_of_flips_is_drawn_where_they_are_recorded():
    notes = lambda *runs: [note for drawn in plots.figures(runs).values() for _, note in drawn]
    of_flips = [note for note in notes(grid_run([[0.1] * 3] * 2)) if note.startswith("experts: ")]
    assert of_flips == ["experts: share of the tokens whose router chooses other experts in the sampler."]
    assert not [note for note in notes(INT8) if "experts" in note]
    assert plots.flip_rates(INT8) is None
    none, _, positions = plots.flip_rates(grid_run([[0.0] * 3] * 2))  # with replay
    assert none.shape == (2, 1) and positions == [0]


def test_both_probabilities_and_the_quadrants_are_drawn_where_they_are_recorded():
    pictures = lambda run: [note for drawn in plots.figures([run]).values() for _, note in drawn]
    assert not [note for note in pictures(INT8) if "dashed" in note or note == plots.QUADRANT_NOTE]
    line = {"step": 5, "tokens": 4, "high": 1, "cells": [[0, 0, 3], [40, 10, 1]]}
    planes = [line | {"step": step} for step in range(1, 13)]  # the last ten are drawn
    values = {plots.TV: 0.2, "rollout_corr/chi2_token": 0.0, "rollout_corr/chi2_seq": 150.0}
    records = [{"step": step, "phase": "train"} | values for step in (1, 2)]
    run = plots.Run("tis", "black", [*records, {"step": 2, "phase": "eval"}], {}, planes=planes)
    [plane] = [note for note in pictures(run) if "dashed" in note]
    assert plane.startswith("tis: 40 tokens of 10 steps up to 12.") and "10 tokens (25 %)" in plane
    assert plots.QUADRANT_NOTE in pictures(run)
    axes = figure.Figure().add_subplot()
    plots.draw_probabilities(axes, probabilities.plane(planes))
    drawn = axes.collections[0].get_array()
    assert (drawn[10, 40], drawn[0, 0]) == (12, 36)  # rows are the learner
    dashed = [curve.get_xydata().tolist() for curve in axes.lines if curve.get_linestyle() == "--"]
    assert dashed == [[[0, 0.5], [0.5, 1]], [[0.5, 0], [1, 0.5]]]
    axes = figure.Figure().add_subplot()
    plots.draw_quadrants(axes, [run])
    ends = [curve.get_xydata().tolist() for curve in axes.lines if curve.get_marker() == "o"]
    assert ends == [[[0.2, plots.LEAST]], [[0.2, 150.0]]]


def test_smooth():
    values = np.arange(75.0)  # window 75 // 25 = 3
    values[10] = np.nan
    average = plots.smooth(values)
    assert average[20] == 20.0
    assert average[9] == (8 + 9) / 2  # the missing neighbour is left out
    assert average[74] == (73 + 74) / 2
    np.testing.assert_array_equal(plots.smooth(np.arange(20.0)), np.arange(20.0))


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.write_png([plots.Run("empty", "black", [], {})], tmp_path / "overview.png")


def test_a_caption_names_the_metrics_that_mean_different_things():
    of = {plot.title: plot for plot in plots.PLOTS}
    assert of["KL divergence, KL(sampler ‖ learner)"].caption.startswith("k1: KL(sampler ‖ learner)")
    assert " k3: " in of["KL divergence, KL(sampler ‖ learner)"].caption
    assert of["Probability difference"].caption.startswith("Δp; 0 if")  # of both
    assert of["Held-out accuracy, greedy"].caption.endswith(" Band: 95 % Wilson interval.")
    assert of["Probability difference"].unit == "probability"


def test_plots_are_well_formed():
    keys = [(plot.phase, key, plot.title) for plot in plots.PLOTS for key in plot.series]
    assert len(keys) == len(set(keys)) and len({plot.title for plot in plots.PLOTS}) == len(
        plots.PLOTS)
    assert all(len(plot.series) <= len(plots.LINE_STYLES) for plot in plots.PLOTS)
    assert all(plot.unit for plot in plots.PLOTS)
    assert sum(plot.in_overview for plot in plots.PLOTS) == 6


def test_every_curve_has_a_color_of_its_own():
    for count in (0, 6, 7):
        assert len({str(color) for color in plots.palette(count)}) == count
