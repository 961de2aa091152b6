"""The mismatch budget and the gains of corrections on made runs."""

import numpy as np

from experiments import mismatch
from tests.experiments import made


def arm(name, seed, gain, d95, flips=np.nan):
    return made.run(
        name, seed, accuracy=(0.3, *[0.4 + gain] * 3), mismatch__dp_p95__mean=d95, rollout_corr__chi2_seq=0.05,
        mismatch__route_flip_router=flips,
    )


ARMS = {
    name: [arm(name, seed, gain + 0.001 * seed * ("correct" in name), d95, flips) for seed in range(4)]
    for name, gain, d95, flips in (
        ("dense/int8/neither", 0.0, 1e-2, np.nan), ("dense/int8/correct", 0.1, 1e-2, np.nan),
        ("dense/int8/repair", 0.1, 1e-5, np.nan), ("dense/int8/both", 0.1, 1e-5, np.nan),
        ("experts/int8/neither", 0.0, 1e-5, 0.01),
    )
}


def test_a_budget_needs_all_measures():
    within = {name: mismatch.is_within(runs) for name, runs in ARMS.items()}
    assert [*within.values()] == [False, False, True, True, False]


def test_the_gain_of_a_correction():
    """Over seeds 0 to 3 the gain is 0.1 + 0.001 seed."""
    text = mismatch.budget(ARMS)
    assert "| dense/int8/neither | beyond | +0.101 [+0.099, +0.104] | 0.002 | gains |" in text
    assert "| dense/int8/repair | within | +0.000 [+0.000, +0.000] | 0.000 | does not |" in text
    within, beyond = "within the budget +0.000 [+0.000, +0.000]", "beyond the budget +0.101 [+0.099, +0.104]"
    assert mismatch.crossover(ARMS) == f"Gain of the correction: {within}, {beyond}."
    assert mismatch.verdict((0.01, -0.01, 0.03)) == "open"
