"""Simulated logs: that the simulation is what it says, and the doctor right on a few of them.

The page's table is of many more, by `python -m benchmarks.doctor --write`.
"""

import collections
import math
import re

import numpy as np
import pytest

from benchmarks import doctor
from jaxrl_tis.doctor.frameworks import FRAMEWORKS

LOGS = {"trl": 12}  # clean ones; of the others 2


def hand_made():
    """Two sequences of 2 tokens and 1: ratios 2 and 2, and 0.5."""
    recorded = np.log([0.1, 0.2, 0.4])
    return doctor.Batch(recorded, recorded + np.log([2.0, 2.0, 0.5]), np.array([0, 2]))


@pytest.mark.parametrize("mode, low, mean, high", [
    ("sequence_mask", 0.0, 0.25, 0.5),  # products 4, which is dropped, and 0.5
    ("sequence_truncate", 0.5, 1.75, 3.0), ("token_truncate", 0.5, 1.5, 2.0),
])
def test_trls_weights(mode, low, mean, high):
    ratio = "sampling/importance_sampling_ratio"
    found = doctor.trl(hand_made(), mode)
    assert [found[f"{ratio}/{x}"] for x in ("min", "mean", "max")] == pytest.approx([low, mean, high])
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(2))


def test_verls_and_slimes_means():
    found = doctor.verl(hand_made(), "token")
    assert found["rollout_corr/kl"] == pytest.approx(-math.log(2) / 3)  # of all tokens
    assert found["rollout_corr/chi2_token"] == pytest.approx((4 + 4 + 0.25) / 3 - 1)
    assert found["rollout_corr/chi2_seq"] == pytest.approx((16 + 0.25) / 2 - 1)
    assert doctor.slime(hand_made(), "tis")["train/tis"] == pytest.approx((2 + 0.5) / 2)  # of responses


def test_the_mean_ratio_is_the_mass_that_is_kept():
    rng = np.random.default_rng(0)
    assert doctor.policies(rng, None, 10.0).kept == pytest.approx(1.0)
    filtered = doctor.policies(rng, "mass", 10.0)
    drawn = np.isfinite(filtered.sampled)
    kept = np.sum(np.where(drawn, np.exp(filtered.learner), 0.0), -1)
    assert filtered.kept == pytest.approx(kept.mean()) and kept.mean() < 0.98


@pytest.mark.parametrize("framework", doctor.LAYOUTS)
def test_no_name_of_a_log_is_made_up(framework):
    theirs = "verl" if framework == doctor.OURS else framework
    rows = {name for row in FRAMEWORKS[theirs].names for name in row.theirs} | set(FRAMEWORKS[theirs].marks)
    log = doctor.simulate(np.random.default_rng(0), framework)
    known = {name for name in log.rows[0][1] if name in rows or name.removeprefix("train/") in rows}
    assert len(log.rows[0][1]) - len(known) <= 2


@pytest.mark.all
@pytest.mark.cases("trl", "this program", "verl")
@pytest.mark.parametrize("framework", doctor.LAYOUTS)
def test_a_few_logs(framework):
    counts = doctor.measure(LOGS.get(framework, 2), 1, (framework,))
    assert counts.wrong == {}
    causes = [cause for cause in doctor.BROKEN if framework in doctor.BROKEN[cause]]
    missed = [cause for cause in causes if not counts.right[cause, framework]]
    assert len(missed) <= 1


def test_the_pages_table_has_what_is_missed_or_wrong_and_meets_what_is_asked_for():
    right = {(name, f): 4 for name, of in doctor.BROKEN.items() for f in of} | {("C", "verl"): 3}
    counts = doctor.Counts(8, 4, collections.Counter({("A", "trl"): 1, ("new", "verl"): 2}), right)
    assert doctor.table(counts)[2:] == [
        "| `A` |  | trl 12.5 |", "| `C` | verl 75 |  |", "| `new` |  | verl 25 |",
    ]
    page = doctor.PAGE.read_text(encoding="utf-8").split(doctor.BEGIN)[1].split(doctor.END)[0]
    logs, broken, causes = map(int, re.match(
        r"\s*(\d+) clean logs of each framework, (\d+) with each of (\d+) causes", page).groups())
    assert logs >= 200 and broken >= 50 and causes == len(doctor.BROKEN)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shares = lambda column: [float(x) for row in rows for x in re.findall(r"\w+ ([\d.e+-]+)", row[column])]
    assert all(share >= 90 for share in shares(1)) and all(share < 1 for share in shares(2))
    assert len(shares(1)) > 10
