"""A gap that grows with the depth of the context."""

import numpy as np
import pytest

from jaxrl_tis.audit import dump, measure, verdict
from jaxrl_tis.doctor.case import THRESHOLDS, Case
from jaxrl_tis.doctor.depth import FACTS
from jaxrl_tis.doctor.diagnose import describe, diagnose
from tests.audit import dumps
from tests.doctor.runs import write_run


def profile(gaps, kind="position"):
    """Metrics of {first position: (mean |log ratio|, share of the tokens)}."""
    return {
        f"mismatch/{kind}_{start}/{name}": value
        for start, pair in gaps.items()
        for name, value in zip(("log_ratio_abs_mean", "token_fraction"), pair, strict=True)
    }


def facts(metrics):
    case = Case({name: {1: x} for name, x in metrics.items()}, {}, THRESHOLDS, 1)
    return FACTS["record/deep_gap"](case), FACTS["record/gap_by_depth"](case)


DEEP = {0: (0.01, 0.1), 64: (0.02, 0.3), 128: (0.05, 0.2), 512: (0.08, 0.2), 1024: (0.16, 0.2)}


def test_depth_by_hand():
    """Shallow are positions before 1024 / 8 = 128: (0.01 * 0.1 + 0.02 * 0.3) / 0.4 = 0.0175."""
    (deep, where), (rise, beside) = facts(profile(DEEP))
    assert (deep, where) == (0.16, "mean |log ratio| from position 1024 on, nats")
    assert rise == pytest.approx(0.16 / 0.0175) and beside == "by that before position 128"


def test_a_gap_has_the_weight_of_its_own_step():
    """Where a step has no gap, its share of the tokens is not that of the next step."""
    series = {name: {1: x, 2: x} for name, x in profile(DEEP).items()}
    last = "mismatch/position_1024/"
    series[last + "log_ratio_abs_mean"] = {2: 0.1, 3: 0.4}
    series[last + "token_fraction"] = {1: 0.5, 2: 0.3, 3: 0.1}
    assert FACTS["record/deep_gap"](Case(series, {}, THRESHOLDS, 3))[0] == pytest.approx(0.07 / 0.4)


def test_few_tokens_are_no_depth():
    (deep, where), _ = facts(profile(DEEP | {4096: (9.0, 0.009)}))
    assert deep == 0.16 and "1024" in where


@pytest.mark.parametrize("gaps", [
    {0: (0.01, 0.5), 256: (0.9, 0.5)},  # not deep
    {512: (0.9, 1.0)},  # nothing shallow
    {},
])
def test_where_there_is_nothing_to_compare(gaps):
    assert [value for value, _ in facts(profile(gaps))] == [0.0, 0.0]


def test_positions_in_the_context_come_first():
    (deep, _), _ = facts(profile(DEEP) | profile({0: (0.1, 0.5), 2048: (0.3, 0.5)}, "context"))
    assert deep == 0.3
    (deep, _), _ = facts(profile(DEEP) | profile({8192: (0.3, 1.0)}, "context"))  # nothing shallow there
    assert deep == 0.16


@pytest.mark.parametrize("changes, is_found", [
    ({}, True),
    ({1024: (0.069, 0.2)}, False),  # 3.9 times 0.0175
    ({n: (gap / 10, share) for n, (gap, share) in DEEP.items()}, False),  # 0.016 nats
])
def test_the_finding_in_a_run(changes, is_found, tmp_path):
    diagnosis = diagnose(write_run(tmp_path, profile(DEEP | changes)))
    assert ("depth" in diagnosis["verdict"]) is is_found
    assert "depth" not in {u["name"] for u in diagnosis["undecided"]}
    assert ("the gap grows with the depth of the context" in describe(diagnosis)) is is_found


@pytest.mark.all
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_dump_with_a_fault_beyond_a_window(is_wrong, tmp_path):
    """Past 256 tokens the sampler's log-probs have ten times the noise, or everywhere the same."""
    rng, length = np.random.default_rng(0), 1200
    lines = []
    for _ in range(8):
        old = -rng.exponential(0.5, length)
        size = np.where(np.arange(length) < 256, 0.02, 0.2) if is_wrong else np.full(length, 0.02)
        behav = np.minimum(old + size * rng.normal(size=length), 0.0)
        lines.append({
            "mask": [1] * length, "logp_behav": behav.tolist(),
            "logp_old": old.tolist(), "position": list(range(30, 30 + length)),
        })
    report = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", lines)))
    found = verdict.verdict(report)["verdict"]
    assert ("depth" in found) is is_wrong
