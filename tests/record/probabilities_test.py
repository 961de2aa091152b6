"""Tokens by their two probabilities, counted by hand."""

import numpy as np

from jaxrl_tis.record import probabilities


def test_tokens_are_counted_by_both_probabilities(tmp_path):
    # Cells of 0.02. A difference of 0.5 is not above 0.5, and a log-prob above 0 is one of 0.
    behav, old = np.log([0.03, 0.03, 0.25, 0.9]), np.log([0.03, 0.035, 0.75, 0.31])
    behav, old = np.append(behav, 1e-4), np.append(old, 0.0)
    line = probabilities.counted(7, behav, old)
    assert line == {
        "step": 7, "tokens": 5, "high": 1, "cells": [[1, 1, 2], [12, 37, 1], [45, 15, 1], [49, 49, 1]]
    }
    plane = probabilities.plane([line, line])
    assert (plane[1, 1], plane[45, 15], plane.sum()) == (4, 2, 10)
    assert probabilities.read(tmp_path) == []
    assert probabilities.counted(7, behav[:0], old[:0]) == {"step": 7, "tokens": 0, "high": 0, "cells": []}
