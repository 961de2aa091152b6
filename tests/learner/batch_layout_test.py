"""Rows of trajectories, each cell by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.learner.batch_layout import (
    minibatches, num_sequences, supervised_rows, trajectory_rows, update_fields,
)

FIRST = Trajectory(
    id="a", prompt=np.array([5, 6, 7], np.int32), tokens=np.array([8, 0, 9], np.int32),
    mask=np.array([True, False, True]), turn=np.array([0, 0, 1], np.int32),
    logp_behav=np.array([-0.5, -9.0, -1.5], np.float32),
    logp_raw=np.array([-0.7, -9.0, -1.7], np.float32),
    entropy=np.array([0.1, 0.2, 0.3], np.float32), version=np.array([4, 4, 5], np.int32),
    stop_reason="stop", seed=1, request=2, quant_id="w8a8", temperature=0.7,
)
SECOND = dataclasses.replace(
    FIRST, id="b", prompt=np.array([3], np.int32), tokens=np.array([4], np.int32),
    mask=np.array([True]), turn=np.array([0], np.int32), logp_behav=np.array([-2.0], np.float32),
    entropy=np.array([0.4], np.float32), version=np.array([6], np.int32), temperature=1.0,
)


def test_each_cell_of_two_rows():
    rows = trajectory_rows([FIRST, SECOND], length=7)
    expected = {
        "tokens": [[5, 6, 7, 8, 0, 9, 0], [3, 4, 0, 0, 0, 0, 0]],
        "positions": [[0, 1, 2, 3, 4, 5, 6]] * 2,
        "segment_ids": [[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]],
        # The hole in the first response (a token the policy did not choose) stays a hole.
        "mask": [[0, 0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0, 0]],
        "turn": [[0, 0, 0, 0, 0, 1, 0], [0] * 7],
        "version": [[-1, -1, -1, 4, 4, 5, -1], [-1, 6, -1, -1, -1, -1, -1]],
        "temperature": [[0.7] * 7, [1.0] * 7],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(rows[name], value, err_msg=name, rtol=1e-6)
    np.testing.assert_allclose(rows["logp_behav"][0, [3, 5]], [-0.5, -1.5])
    assert rows["logp_behav"][1, 1] == -2.0
    assert rows["mask"].dtype == bool and rows["tokens"].dtype == np.int32


def test_pad_token_inside_a_prompt_or_response_is_kept():
    """Padding is never found by its id: token 0 belongs to the sequence."""
    trajectory = dataclasses.replace(FIRST, prompt=np.array([0, 0, 7], np.int32))
    rows = trajectory_rows([trajectory], length=8)
    np.testing.assert_array_equal(rows["segment_ids"], [[1, 1, 1, 1, 1, 1, 0, 0]])


def test_a_row_too_short_names_the_trajectory_and_both_numbers():
    with pytest.raises(ValueError, match="trajectory a has 3 prompt .* 3 response tokens, a row 5"):
        trajectory_rows([FIRST], length=5)
    assert trajectory_rows([FIRST], length=6)["mask"].shape == (1, 6)


def test_supervised_rows():
    rows = supervised_rows([([5, 6], [7, 2]), ([3], [4, 9, 2])], length=5)
    np.testing.assert_array_equal(rows["tokens"], [[5, 6, 7, 2, 0], [3, 4, 9, 2, 0]])
    np.testing.assert_array_equal(rows["mask"], [[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(rows["segment_ids"], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(rows["temperature"], np.ones((2, 5)))
    with pytest.raises(ValueError, match="4 tokens, a row 3"):
        supervised_rows([([5, 6], [7, 2])], length=3)


def test_minibatches_hold_every_row_once_in_a_seeded_order():
    data = {"mask": np.ones((24, 3), bool), "draw": np.arange(24), "group": 5 * np.arange(24),
            "tokens": np.arange(72).reshape(24, 3), "segment_ids": np.ones((24, 3), np.int32)}
    split, numbers = zip(*minibatches(data, count=3, microbatch_rows=2, seed=(0, 5, 1)), strict=True)
    assert [m["tokens"].shape for m in split] == [(4, 2, 3)] * 3
    ids = np.concatenate([m["draw"].ravel() for m in split])
    assert ids.tolist() == np.random.default_rng((0, 5, 1)).permutation(24).tolist()
    for minibatch, number in zip(split, numbers, strict=True):
        np.testing.assert_array_equal(minibatch["draw"].ravel(), number)
    # Fields stay together, and a value of a sequence stands on each of its tokens.
    np.testing.assert_array_equal(split[1]["tokens"][..., 0], 3 * split[1]["draw"])
    np.testing.assert_array_equal(split[1]["group"], 5 * split[1]["draw"][..., None].repeat(3, -1))
    again, _ = zip(*minibatches(data, count=3, microbatch_rows=2, seed=(0, 5, 1)), strict=True)
    other, _ = zip(*minibatches(data, count=3, microbatch_rows=2, seed=(0, 5, 2)), strict=True)
    assert all((a["draw"] == b["draw"]).all() for a, b in zip(split, again, strict=True))
    assert any((a["draw"] != b["draw"]).any() for a, b in zip(split, other, strict=True))


def test_rows_without_a_token_are_the_last_of_their_minibatch():
    """7 sequences and 9 empty rows, in 2 minibatches of 8: 4 and 3 sequences come first."""
    segments = np.zeros((16, 3), np.int32)
    segments[[0, 2, 3, 7, 8, 11, 15]] = 1
    data = {"mask": segments > 0, "segment_ids": segments, "draw": np.arange(16)}
    split, numbers = zip(*minibatches(data, count=2, microbatch_rows=4, seed=(3,)), strict=True)
    is_sequence = [m["segment_ids"][..., 0].ravel().tolist() for m in split]
    assert is_sequence == [[1] * 4 + [0] * 4, [1] * 3 + [0] * 5]
    assert sorted(np.concatenate(numbers)) == list(range(16))


def test_sequences_with_a_valid_token_are_counted():
    """Two micro-batches of two rows: 2 and 1 sequences in the first, none and 1 in the second."""
    segments = np.array([[[1, 1, 2, 2], [1, 1, 1, 0]], [[1, 2, 3, 3], [1, 1, 0, 0]]])
    mask = np.array([[[0, 1, 1, 0], [0, 1, 1, 0]], [[0, 0, 0, 0], [0, 1, 0, 0]]], bool)
    assert num_sequences({"mask": mask, "segment_ids": segments}) == 4
    rows = {"mask": mask.reshape(4, 4), "segment_ids": np.ones((4, 4), np.int32)}
    assert num_sequences(rows) == 3
    assert num_sequences({"mask": mask[:0], "segment_ids": segments[:0]}) == 0


def test_what_an_update_adds():
    added = update_fields(3, version=7, step=5, seed=1)
    np.testing.assert_array_equal(added["current_version"], [[7], [7], [7]])
    assert added["draw"].dtype == np.uint32 and len(set(added["draw"].tolist())) == 3
    draw = lambda *step_and_seed: update_fields(3, 7, *step_and_seed)["draw"]
    np.testing.assert_array_equal(draw(5, 1), added["draw"])
    assert (draw(6, 1) != added["draw"]).all() and (draw(5, 2) != added["draw"]).all()
