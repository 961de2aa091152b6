"""Counts of a scheduler by hand."""

import numpy as np
import pytest

from jaxrl_tis.engine.stats import Stats


def test_steps_in_which_a_slot_samples_count():
    """Three steps of four slots: 3 sample, 1 samples, none."""
    stats = Stats()
    stats.add_call(np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool))
    assert (stats.calls, stats.busy, stats.slot_steps, stats.occupancy) == (1, 4, 8, 0.5)
    stats.add_drafts(np.array([3, 0, 2]), np.array([2, 0, 2]), np.array([1, 0, 2]))
    assert (stats.drafted, stats.verified, stats.accepted) == (5, 4, 3)


def test_counts_of_several_and_since():
    one = Stats(tokens=3, seconds=4.0, engine_seconds=1.0, environment_seconds=2.0)
    both = Stats.sum([one, Stats(tokens=2, seconds=1.0)])
    assert (both.tokens, both.seconds, both.since(one).tokens) == (5, 5.0, 2)
    assert one.host_share == pytest.approx(0.75) and Stats.sum([]) == Stats()
    assert one.counts()["tokens"] == 3 and not any("seconds" in name for name in one.counts())
