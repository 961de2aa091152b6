"""Returns and reductions over groups, by hand."""

import jax
import numpy as np

from jaxrl_tis.estimators import returns
from tests import jitted

returns = jitted.Module(returns)

NAN = float("nan")


def test_a_sequence_reward_goes_to_the_last_valid_token():
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    per_token = returns.token_rewards(np.array([2.0, 3.0, 4.0]), mask)
    np.testing.assert_array_equal(per_token, [[0, 2, 0], [0, 0, 3], [0, 0, 0]])
    np.testing.assert_array_equal(
        returns.rewards_to_go(np.array([2, 3, 4]), mask), [[2, 2, 0], [0, 3, 3], [0, 0, 0]]
    )


def test_rewards_to_go_by_token():
    # The reward 9 sits on a token that is not valid, and so does the NaN.
    rewards = np.array([[1.0, 9.0, 0.25, 2.0], [0.5, NAN, NAN, NAN]])
    mask = np.array([[1, 0, 1, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(
        returns.rewards_to_go(rewards, mask), [[3.25, 0, 2.25, 2], [0.5, 0, 0, 0]]
    )


def test_group_moments_of_ragged_groups():
    group = np.array([5, -1, 5, 5, 9])
    count, mean, std, is_constant = returns.group_moments(
        np.array([1.0, 4.0, 2.0, 6.0, 7.0]), group
    )
    # Group 5: 1, 2, 6 with mean 3 and variance (4 + 1 + 9) / 2 = 7.
    np.testing.assert_array_equal(count, [3, 1, 3, 3, 1])
    np.testing.assert_allclose(mean, [3, 4, 3, 3, 7], rtol=1e-6)
    np.testing.assert_allclose(std, np.array([7, 0, 7, 7, 0]) ** 0.5, rtol=1e-6)
    np.testing.assert_array_equal(is_constant, [False, True, False, False, True])


def test_groups_are_named_by_their_first_row():
    groups = np.random.default_rng(0).integers(-5, 5, 40)
    expected = [list(groups).index(g) for g in groups]
    assert returns.group_ids(np.array(groups)).tolist() == expected


def test_groups_of_many_rows_need_little_memory():
    """Of 4,096 rows each pair would be 16.8 M numbers. Packed rows have as many sequences."""
    rows = jax.ShapeDtypeStruct((4096,), np.int32)
    program = jax.jit(returns.group_ids).lower(rows).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1e6


def test_group_reductions_keep_trailing_axes():
    x = np.array([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])
    ids = returns.group_ids(np.array([7, 2, 7]))
    np.testing.assert_array_equal(returns.group_sum(x, ids), [[-4, 4], [3, 4], [-4, 4]])
    np.testing.assert_array_equal(returns.group_max(x, ids), [[1, 6], [3, 4], [1, 6]])
