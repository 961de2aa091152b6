"""Weights and objectives on one response, at a small size."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from experiments import group_bias, oracle, sequence_bias


@pytest.mark.all
def test_rows_of_one_response():
    names = ("seq_vanilla", "geo_mis", "objective cispo")
    steps = {name: sequence_bias.STEPS[name] for name in names}
    rows = {row.name: row for row in sequence_bias.rows(steps, 2, 3)}
    assert rows["seq_vanilla"].scale == pytest.approx(1.0, abs=1e-9)
    assert rows["seq_vanilla"].bias < 1e-9 and rows["seq_vanilla"].turn < 1e-9
    row = rows["objective cispo"]
    # bias^2 is the error along the gradient squared and the one across it squared.
    across = row.turn * abs(row.scale) / np.sqrt(1 - row.turn**2)
    assert row.bias == pytest.approx(np.hypot(row.scale - 1, across)) and row.bias > 0.01
    # Its band of 1e-4 around 1 lets no response through, so there is no step.
    assert (rows["geo_mis"].scale, rows["geo_mis"].turn, rows["geo_mis"].bias) == (0.0, 0.0, 1.0)


@pytest.mark.all
def test_centred_scores_leave_out_what_the_mean_after_a_prefix_adds():
    names = ("token_vanilla", "token_tis")
    steps = {name: sequence_bias.STEPS[name] for name in names}
    steps |= {
        f"{name}, centred": dataclasses.replace(sequence_bias.STEPS[f"{name}, centred"], head=2)
        for name in names
    }
    rows = {row.name: row.bias for row in sequence_bias.rows(steps, 2, 3, drift=1.0)}
    assert rows["token_vanilla, centred"] == pytest.approx(rows["token_vanilla"], abs=1e-12)
    assert abs(rows["token_tis, centred"] - rows["token_tis"]) > 1e-3


@pytest.mark.all
def test_rows_of_masks_and_of_unclipped_ratios():
    """Only ratios of single tokens in both presets. The veto keeps every response."""
    names = ("mask veto", "mask seq_logprob_error", "preset ipo", "preset kpop", "token_vanilla")
    steps = {name: sequence_bias.STEPS[name] for name in names}
    bias = {row.name: row.bias for row in sequence_bias.rows(steps, 2, 3, drift=1.5)}
    assert bias["mask veto"] < 1e-9 < 1e-3 < bias["mask seq_logprob_error"]
    for name in ("preset ipo", "preset kpop"):
        assert bias[name] != pytest.approx(bias["token_vanilla"], abs=1e-4) and bias[name] < 1


@pytest.mark.all
def test_luspo_is_gspo_where_responses_have_one_length():
    steps = {name: sequence_bias.STEPS[name] for name in ("objective luspo", "objective gspo")}
    luspo, gspo = sequence_bias.rows(steps, 2, 3)
    assert (luspo.bias, luspo.variance) == pytest.approx((gspo.bias, gspo.variance))


@pytest.mark.all
def test_without_a_gap_every_row_is_the_gradient():
    names = ("geo_mis", "objective vespo", "preset ipo", "preset kpop", "mask seq_logprob_error")
    steps = {name: sequence_bias.STEPS[name] for name in names}
    for row in sequence_bias.rows(steps, 2, 3, drift=0.0):
        assert row.bias < 1e-9


@pytest.mark.all
def test_the_commands_print_their_tables(capsys, monkeypatch):
    for module in (group_bias, sequence_bias):
        monkeypatch.setattr(module, "STEPS", {"no weight": group_bias.Step()})
    monkeypatch.setattr(group_bias, "GROUP_SIZES", (2,))
    oracle.main(["--groups", "--drift=0"])
    oracle.main(["--sequences", "2", "2"])
    lines = capsys.readouterr().out.splitlines()
    # On-policy RLOO is exact; alone it has no others, its advantage is 0 and so is the step.
    assert lines[1].split()[3:6] == ["1.0000", "0.0000", "0.0000"]
    assert lines[3].split()[3:6] == ["0.0000", "0.0000", "1.0000"]


def test_the_reward_is_centred_under_the_behaviour():
    for centre in ("old", "behav"):
        case = sequence_bias.problem(centre, 2, 3)
        assert case.probabilities(case.behaviour) @ case.responses["rewards"] == pytest.approx(0.0)
        # The two responses without a change, 000 and 111, have the highest reward, 1.
        rewards = case.responses["rewards"]
        assert rewards[0] == rewards[-1] == rewards.max() and np.ptp(rewards) == pytest.approx(1.0)
        assert (case.old is case.behaviour) == (centre == "behav")


def test_a_row_by_hand():
    """The gradient (0, 2) and the step (3, 4): twice the gradient and 3 across, of a length of 5."""
    case = mock.Mock(group=(0, 0))
    case.moments.return_value = np.array([[3.0, 4.0]]), 12.0
    row = group_bias.against(np.array([[0.0, 2.0]]), "x", case, None)
    assert (row.group_size, row.scale, row.turn, row.variance) == (2, 2.0, 0.6, 3.0)
    assert row.bias == pytest.approx(np.sqrt(13) / 2)


def test_a_bypass_has_the_whole_gap():
    for centre in ("behav", "old"):
        case = group_bias.problem(group_bias.Step(centre=centre), 2, drift=0.5)
        assert case.old is (case.behaviour if centre == "behav" else case.policy)
