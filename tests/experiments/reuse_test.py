"""Gains after as many samples as an arm drew, and the sizes of its name, by hand."""

import numpy as np

from experiments import reuse
from tests.experiments import made


def test_a_gain_after_as_many_samples():
    """Evaluations at steps 0, 12, ... 96: half the updates end with step 48, a quarter with step 24."""
    accuracy = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    fresh = [made.run("fresh", seed, accuracy=accuracy) for seed in (0, 1)]
    np.testing.assert_array_equal(fresh[0].steps(reuse.ACCURACY)[[0, 4, -1]], [0, 48, 96])
    assert [round(reuse.early_gain(fresh[0], share), 9) for share in (1, 0.5, 0.25)] == [0.7, 0.3, 0.15]
    arms = {"fresh": fresh, "newest-2-16": [
        made.run("newest-2-16", seed, accuracy=(0.1, *[0.5 + 0.02 * seed] * 8)) for seed in (0, 1)
    ]}
    np.testing.assert_allclose(reuse.to_samples("newest-2-16", arms)[0], 0.11)  # 0.4 and 0.42, less 0.3
    assert reuse.to_samples("newest-2-16", {"newest-2-16": arms["newest-2-16"]}) is None
    assert (reuse.uses("fresh"), reuse.uses("uniform-4-16")) == (1, 4)
    assert reuse.room("uniform-4-16") == 16 * 32 / 4
    assert "+0.110" in reuse.FIGURE.text(arms)
