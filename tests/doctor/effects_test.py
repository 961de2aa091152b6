"""Corrections that do nothing, or nearly all: found from the counts of a record."""

import pytest

from jaxrl_tis.doctor.case import CHI2, KL
from jaxrl_tis.doctor.diagnose import diagnose
from jaxrl_tis.doctor.frameworks import WEIGHT_MEAN, WEIGHT_MIN
from tests.doctor.runs import names, write_run

WEIGHT = "correction/weight/"
MASK = {"correction.masks": "veto & token_k1(upper=2.0) & token_k1(upper=3.0)"}
IDLE_WEIGHT = {f"{WEIGHT}changed": 0, f"{WEIGHT}truncated": 0, f"{WEIGHT}dropped": 0}


def found(path, values, changes=()):
    diagnosis = diagnose(write_run(path, values, dict(changes)))
    evidence = {f["name"]: [(e["metric"], e["value"]) for e in f["evidence"]]
                for f in diagnosis["findings"]}
    return evidence, diagnosis


@pytest.mark.parametrize("gap", [{KL: 0.03}, {CHI2: 0.5}])
def test_a_weight_that_changes_nothing_beside_a_gap(gap, tmp_path):
    evidence, diagnosis = found(tmp_path, gap | IDLE_WEIGHT)
    assert evidence["correction.inactive"][0] == (f"{WEIGHT}changed", 0.0)
    assert "correction.inactive" in diagnosis["verdict"]


def test_a_mask_that_drops_nothing_is_named(tmp_path):
    evidence, _ = found(tmp_path, {KL: 0.03, "correction/mask/token_k1_2/dropped": 0}, MASK)
    assert evidence["correction.inactive"][0] == ("correction/mask/token_k1_2/dropped", 0.0)


@pytest.mark.parametrize("values, changes", [
    (IDLE_WEIGHT, {}),  # without a gap there is nothing to change
    ({KL: 0.03} | IDLE_WEIGHT | {f"{WEIGHT}changed": lambda s: float(s == 3)}, {}),  # once is enough
    ({KL: 0.03}, MASK), ({KL: 0.03}, {"correction.weight": "none"}),
    ({KL: 0.03, "correction/mask/top_entropy/dropped": 0}, {"correction.masks": "top_entropy"}),
])
def test_what_acts_or_has_nothing_to_act_on_is_not_inactive(values, changes, tmp_path):
    evidence, diagnosis = found(tmp_path, values, changes)
    assert not {"correction.inactive", "correction.most"} & evidence.keys()
    assert diagnosis["undecided"] == []


def test_a_method_without_counts_is_not_taken_for_active(tmp_path):
    _, diagnosis = found(tmp_path, {KL: 0.03, "correction/mask/veto/num_tokens": None}, MASK)
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert reasons["correction.inactive"] == "needs correction/mask/veto/num_tokens"
    assert reasons["correction.most"] == "needs correction/mask/veto/num_tokens"


@pytest.mark.parametrize("values, changes, expected", [
    # 300 truncated and 210 dropped of 1,000
    ({f"{WEIGHT}truncated": 300, f"{WEIGHT}dropped": 210}, {}, f"{WEIGHT}truncated"),
    ({"correction/mask/veto/dropped": 510}, MASK, "correction/mask/veto/dropped"),
])
def test_a_bound_that_takes_most_tokens(values, changes, expected, tmp_path):
    evidence, diagnosis = found(tmp_path, values, changes)
    assert evidence == {"correction.most": [(expected, pytest.approx(0.51))]}
    assert diagnosis["verdict"] == ["correction.most"]  # and not healthy
    half = {name: x - 10 for name, x in values.items()}
    if len(half) == 1:
        assert names(diagnose(write_run(tmp_path, half, changes))["findings"]) == {"healthy"}


def test_only_the_window_counts_for_most(tmp_path):
    values = {f"{WEIGHT}truncated": lambda s: 900 if s <= 100 else 0}
    assert found(tmp_path, values)[1]["verdict"] == ["healthy"]


SMALL = {WEIGHT_MEAN: 0.04, WEIGHT_MIN: 1e-6, "mismatch/log_ratio_abs_mean": 0.02}


def test_weights_that_shrink_the_steps_of_a_run(tmp_path):
    told = {f["name"]: f for f in diagnose(write_run(tmp_path, SMALL))["findings"]}
    assert {"shrunk", "shrunk.product"} <= set(told) and "shrunk.masked" not in told
    assert told["shrunk"]["evidence"][1]["value"] == pytest.approx(25.0)
    assert told["shrunk"]["changes"] == [
        {"field": "correction.batch_normalize", "value": True, "now": False}
    ]
    bypass = {"correction.preset": "bypass_ppo_clip"}
    told = {f["name"]: f for f in diagnose(write_run(tmp_path, SMALL, bypass))["findings"]}
    assert told["shrunk"]["changes"] == []  # divides by the mean of the whole batch alone


@pytest.mark.parametrize("values", [
    {}, {WEIGHT_MEAN: 0.51}, SMALL | {"rollout_corr/rollout_is_batch_norm_factor": 0.04},
    {WEIGHT_MEAN: lambda s: 0.0 if s % 2 else 0.99},  # 0.495 +- 0.11
])
def test_other_weights_shrink_no_step(values, tmp_path):
    assert "shrunk" not in names(diagnose(write_run(tmp_path, values))["findings"])
