"""Expected values by hand; z = 1.959964, z^2 = 3.841459."""

import numpy as np
import pytest

from jaxrl_tis.record import intervals


@pytest.mark.parametrize("p, n, low, high", [
    (0.0, 10, 0.0, 0.27753),  # z^2/n / (1 + z^2/n) = 0.384146 / 1.384146
    (1.0, 10, 0.72247, 1.0),  # 1 / 1.384146
    (0.5, 100, 0.40383, 0.59617),
])
def test_wilson(p, n, low, high):
    np.testing.assert_allclose(intervals.wilson(p, n), (low, high), atol=2e-5)


def test_shares_of_zero_and_one_are_trials():
    mean, low, high = intervals.of_shares([1, 0, 1, 0] * 25)
    assert mean == 0.5
    np.testing.assert_allclose((low, high), intervals.wilson(0.5, 100))


def test_means_of_several_draws_count_for_more():
    """0.4 and 0.6 have the variance 0.01; a mean of 10 of them 0.001, as of 250 fair coins."""
    mean, low, high = intervals.of_shares([0.4, 0.6] * 5)
    np.testing.assert_allclose((low, high), intervals.wilson(0.5, 250))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_that_are_all_alike_still_have_an_interval(share):
    mean, low, high = intervals.of_shares([share] * 10)
    assert mean == share
    np.testing.assert_allclose((low, high), intervals.wilson(share, 10))


def test_the_interval_of_a_mean():
    """1, 2, 3: s = 1, t(0.975, 2) = 4.302653, half = 4.302653 / sqrt(3) = 2.484138."""
    np.testing.assert_allclose(intervals.of_mean([1, 2, 3]), (2, -0.484138, 4.484138), atol=1e-5)
    assert intervals.of_mean([5.0]) == (5.0, -np.inf, np.inf)
