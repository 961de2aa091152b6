"""What the doctor says of a record, where it cannot know, and of files that are broken."""

import json
import math

import pytest

from jaxrl_tis.doctor.__main__ import main
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, ENGINE_SHARE, ESS, FLIPS, IS_VALID, KL, LAG, LENGTH, NOISE,
    PEARSON, PPL, PPO_KL, WEIGHTS_ESS,
)
from jaxrl_tis.doctor.diagnose import _skewed_t, describe, diagnose
from jaxrl_tis.record import failures
from tests.doctor.runs import late, names, write_run


# Evidence


def test_evidence_tells_metric_value_threshold_and_steps(tmp_path):
    values = {PEARSON: lambda s: {101: 0.96, 107: 0.8}.get(s, 0.93), KL: 0.06}
    [cause, _] = diagnose(write_run(tmp_path, values))["findings"]
    share, pearson, kl = cause["evidence"]
    assert share["metric"] == "run/engine_share" and share["steps"] is None
    # (0.96 + 0.8 + 18 * 0.93) / 20 = 0.925
    assert pearson.pop("value") == pytest.approx(0.925)
    assert pearson == {
        "metric": PEARSON, "statistic": "steady", "op": "<", "threshold": 0.95, "steps": [101, 120],
        "crossed": 19, "extreme_step": 107,
    }
    assert (kl["metric"], kl["crossed"]) == (KL, 20)
    printed = describe(diagnose(tmp_path))
    assert f"{PEARSON} 0.925 < 0.95  (mean of steps 101-120; crossed in 19 of them" in printed
    assert "farthest at step 107" in printed


@pytest.mark.parametrize("values", [
    {KL: 0.05}, {PEARSON: 0.95}, {PPL: 1.05}, {PPL: 0.98}, {KL: -0.02}, {DP_MAX: 0.5},
    {CHI2: 0.3}, {ESS: 0.5}, {CLIPPED: 0.2},
    {LENGTH: lambda s: 100.0 if s <= 100 else 120.0},  # exactly 1.2 times
])
def test_a_value_on_a_threshold_has_not_crossed_it(values, tmp_path):
    found = names(diagnose(write_run(tmp_path, values))["findings"])
    assert found in ({"healthy"}, {"watch"})


@pytest.mark.parametrize("sign", [1, -1])
def test_a_standard_error_of_skewed_values(sign):
    # Mean 1, standard deviation 2, so 1 error of 2 / sqrt(4) above 0. Third moment by sd^3: (3 (-0.5)^3 +
    # 1.5^3) / 4 = 0.75; a = 0.75 / (3 sqrt(4)) = 0.125, and 1 + a + a^2 / 3 + a / 2.
    assert _skewed_t([0.0, 0.0, 0.0, 4.0 * sign], 0.0) == pytest.approx(sign * (1.1875 + 0.015625 / 3))
    assert _skewed_t([2.0, 2.0], 2.0) == 0.0 and _skewed_t([2.0, 2.0], 2.0 + sign) == -sign * math.inf


@pytest.mark.parametrize("window, is_found", [
    # Errors above 0.3: 1.72, and 2.35 of skewed values.
    ([0.2] * 8 + [0.4] * 8 + [0.8] * 2 + [3.0] * 2, True),
    # A mean of 0.69 by two steps: 0.96 and 1.23.
    ([0.1] * 18 + [6.0] * 2, False),
])
def test_a_heavy_tail_is_no_reason_to_doubt_what_is_below_it(window, is_found, tmp_path):
    chi2 = {CHI2: lambda step: window[step - 101] if step > 100 else 0.05}
    assert ("C" in names(diagnose(write_run(tmp_path, chi2))["findings"])) == is_found


def test_steps_before_the_window_are_history(tmp_path):
    values = {PEARSON: late(0.5, 0.995), DP_MAX: late(0.9, 0.3), CHI2: late(9.0, 0.05)}
    assert diagnose(write_run(tmp_path, values))["verdict"] == ["healthy"]


def test_a_surge_compares_with_a_hundred_steps_ago(tmp_path):
    # Mean of 111-120 over mean of 11-20: 130 / 100, whatever lies between.
    lengths = {LENGTH: lambda s: 100.0 if s <= 20 else 130.0}
    [surge] = diagnose(write_run(tmp_path, lengths))["findings"]
    evidence, significance = surge["evidence"]
    assert significance["statistic"] == "surge_sigma" and significance["value"] == math.inf
    assert (evidence["value"], evidence["steps"]) == (pytest.approx(1.3), [111, 120])
    assert evidence["crossed"] is None
    lengths = {LENGTH: lambda s: 100.0 if s <= 10 else 130.0}
    assert diagnose(write_run(tmp_path, lengths))["verdict"] == ["healthy"]


@pytest.mark.parametrize("share, is_found", [(15, True), (14, False)])
def test_or_three_quarters_of_the_steps_are_beyond(share, is_found, tmp_path):
    """Of 20 steps, one of which spreads the mean."""
    values = {CHI2: lambda s: 50.0 if s == 101 else 0.31 if s < 101 + share else 0.2}
    verdict = diagnose(write_run(tmp_path, values))["verdict"]
    assert ("C" in verdict or "D" in verdict) == is_found


@pytest.mark.parametrize("spread, is_found", [(0.06, True), (0.07, False)])
def test_a_mean_counts_beyond_two_standard_errors(spread, is_found, tmp_path):
    """chi2 is 0.33 +- spread in turns: its standard error is spread / sqrt(19), so that of 0.3 the mean is
    2 of them away at a spread of 0.0654."""
    values = {CHI2: lambda s: 0.33 + spread * (-1) ** s}
    assert ("C" in diagnose(write_run(tmp_path, values))["verdict"]) == is_found


def test_one_infinite_step_is_no_evidence_and_many_are(tmp_path):
    for share, verdict in ((15, ["healthy"]), (2, ["D"])):
        values = {CHI2_SEQ: lambda s, share=share: (
            float("inf") if s % share == 0 else 1e3 if share == 2 else 1.0)}
        assert diagnose(write_run(tmp_path, values))["verdict"] == verdict


def test_infinite_values_are_evidence(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, {CHI2: float("inf")}))
    assert diagnosis["verdict"] == ["escalate.system", "D"]


@pytest.mark.parametrize("kept, weights, read", [
    (0.4, 1.0, ESS), (0.9, 0.4, ESS), (None, 0.4, WEIGHTS_ESS), (None, 0.9, WEIGHTS_ESS),
    (late(None, 0.4), 1.0, ESS),
    (lambda s: 0.4 if s > 111 else None, 0.3, WEIGHTS_ESS),  # 9 values are too few
])
def test_the_sample_size_is_that_after_rejection(kept, weights, read, tmp_path):
    diagnosis = diagnose(write_run(tmp_path, {ESS: kept, WEIGHTS_ESS: weights}))
    value = {ESS: kept, WEIGHTS_ESS: weights}[read]
    value = value(120) if callable(value) else value
    assert diagnosis["verdict"] == (["D"] if value < 0.5 else ["healthy"])
    evidence = [e for f in diagnosis["findings"] if f["name"] == "D" for e in f["evidence"]]
    found = [(e["metric"], e["value"]) for e in evidence]
    assert found == ([(read, pytest.approx(value))] if value < 0.5 else [])


# Not enough data


def test_few_steps_decide_nothing(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, {PEARSON: 0.1, CHI2: 9.0}, steps=9))
    assert diagnosis["verdict"] == ["not enough data"] and diagnosis["findings"] == []
    undecided = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert {"A", "D", "C", "F", "healthy", "engine.corrected"} <= set(undecided)
    assert undecided["C"].startswith(
        f"needs 10 values of {CHI2} in the 20 steps up to step 9, there are 9"
    )
    printed = describe(diagnosis)
    assert "not enough data" in printed and "needs 10 values" not in printed
    assert printed.count("too few steps, 9 of at least 10") == 1


def test_a_short_run_leaves_the_surge_open(tmp_path):
    values = {LENGTH: lambda s: 10.0 * s}
    diagnosis = diagnose(write_run(tmp_path, values, steps=109))
    assert diagnosis["verdict"] == ["healthy"]
    [surge] = diagnosis["undecided"]
    assert surge["name"] == "F"
    assert surge["reason"] == (
        f"needs 10 values of {LENGTH} in the 10 steps up to step 9, there are 9"
    )


@pytest.mark.parametrize("metric, lost", [
    (PEARSON, {"A", "healthy", "watch"}), (CHI2, {"C", "D", "healthy", "watch"}),
    (ESS, {"D", "healthy", "watch"}), (LENGTH, {"F"}),
])
def test_an_unrecorded_metric_leaves_open_what_hangs_on_it(metric, lost, tmp_path):
    undecided = names(diagnose(write_run(tmp_path, {metric: None}))["undecided"])
    assert lost <= undecided
    found = diagnose(write_run(tmp_path, {metric: float("nan"), "reward/x": float("nan")}))
    assert names(found["undecided"]) == undecided and found["nans"] == {metric: list(range(1, 121))}
    assert f"not finite: {metric}, 120 times, steps 1-120" in describe(found)


def test_a_stale_gap_that_was_not_split_is_not_blamed_on_either(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, {KL: 0.06, LAG: 2.0}))
    assert diagnosis["verdict"] == ["not enough data"]
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert ENGINE_SHARE in reasons["A"] and ENGINE_SHARE in reasons["B.lag"]


def every_tenth(before, after):
    """A metric of each tenth step, as metrics.diagnostics_every=10 records it."""
    return lambda step: None if step % 10 else before if step <= 200 else after


def test_a_periodic_metric_is_judged_over_as_many_values(tmp_path):
    quiet, rising = ({NOISE: every_tenth(1.0, x)} for x in (1.0, 2.0))
    short = diagnose(write_run(tmp_path, quiet, steps=210))
    assert short["verdict"] == ["healthy"]
    reasons = {u["name"]: u["reason"] for u in short["undecided"]}
    assert list(reasons) == ["D.noise"] and f"10 values of {NOISE} in the 200 steps" in reasons["D.noise"]
    long = diagnose(write_run(tmp_path, quiet, steps=400))
    assert long["verdict"] == ["healthy"] and long["undecided"] == []
    assert diagnose(write_run(tmp_path, rising, steps=400))["verdict"] == ["D.noise"]


def test_flips_of_every_tenth_step_name_the_router(tmp_path):
    values = {KL: 0.2, FLIPS: every_tenth(0.3, 0.3)}
    experts = {"model.num_experts": 8, "engine.record_routes": True}
    found = diagnose(write_run(tmp_path, values, experts, steps=100))
    assert "A.routing" in names(found["findings"])
    found = diagnose(write_run(tmp_path, values, experts, steps=99))
    assert "A.routing" in names(found["undecided"])


def test_a_compact_record_of_samplers_that_run_ahead_has_no_lag(tmp_path):
    values, ahead = {KL: 0.2}, {"rollout.schedule": "areal(staleness=4)"}
    full = diagnose(write_run(tmp_path, values, ahead))
    compact = diagnose(write_run(tmp_path, values, ahead | {"metrics.record": "compact"}))
    assert full["verdict"] == ["A"] and compact["verdict"] == ["not enough data"]
    assert LAG in {u["name"]: u["reason"] for u in compact["undecided"]}["A"]
    sync = diagnose(write_run(tmp_path, values, {"metrics.record": "compact"}))
    assert sync["verdict"] == ["A"]
    # Also where the steps before the judged window have a lag, and for the updates of a batch.
    values |= {LAG: lambda step: 0.0 if step < 90 else None, PPO_KL: 0.05}
    changes = ahead | {"metrics.record": "compact", "train.minibatches": 2}
    found = {u["name"] for u in diagnose(write_run(tmp_path, values, changes))["undecided"]}
    assert {"A", "B.reuse"} <= found


def test_a_periodic_metric_may_have_been_recorded_more_often_before(tmp_path):
    often = lambda step: 0.3 if step < 50 or step % 10 == 0 else None
    found = diagnose(write_run(
        tmp_path, {KL: 0.2, FLIPS: often}, {"model.num_experts": 8, "engine.record_routes": True},
        steps=200,
    ))
    assert "A.routing" in names(found["findings"])


def test_without_a_config_the_symptoms_still_count(tmp_path):
    write_run(tmp_path, {PEARSON: 0.9, CHI2: 1.5})
    (tmp_path / "config.json").unlink()
    diagnosis = diagnose(tmp_path)
    assert diagnosis["verdict"] == ["A", "D"]
    assert all(f["changes"] == [] for f in diagnosis["findings"])
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert reasons["A.quantized"] == "needs the field engine.quantization of config.json"
    assert "engine.corrected" in reasons


def test_a_field_that_the_config_lacks_is_not_guessed(tmp_path):
    write_run(tmp_path, {CLIPPED: late(0.25, 0.3), CHI2: 0.5})
    content = json.loads((tmp_path / "config.json").read_text())
    correction = content["config"]["correction"]
    correction |= {"masks": "", "objective": "ppo"}
    del correction["preset"], correction["centre"], content["config"]["engine"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    diagnosis = diagnose(tmp_path)
    assert {"C", "E"} == names(diagnosis["findings"])
    assert {"E.bypass", "E.pressure"} <= names(diagnosis["undecided"])
    fields = {c["field"] for f in diagnosis["findings"] for c in f["changes"]}
    assert fields == {"correction.masks"}


def test_batches_without_a_valid_token_are_left_out(tmp_path):
    values = {IS_VALID: lambda s: s % 2, PEARSON: lambda s: 0.995 * (s % 2)}
    diagnosis = diagnose(write_run(tmp_path, values))
    assert diagnosis["verdict"] == ["healthy"] and diagnosis["steps"] == [1, 119]


# Broken files


@pytest.mark.parametrize("bad, problem", [
    ('{"step": 3, "pha', "not JSON (Unterminated string starting at, column 13)"),
    ("", "not JSON (Expecting value, column 1)"),
    ("[1, 2]", "not a JSON object"),
    ('{"phase": "train"}', 'no "phase" or no whole number "step"'),
    ('{"step": 3}', 'no "phase" or no whole number "step"'),
    ('{"step": "3", "phase": "train"}', 'no "phase" or no whole number "step"'),
    ('{"step": 3, "phase": "train", "a": "x"}', "metric 'a' is 'x', not a number"),
    ('{"step": 3, "phase": "train", "a": null}', "metric 'a' is None, not a number"),
    ('{"step": 3, "phase": "train", "a": true}', "metric 'a' is True, not a number"),
    ('{"step": 3, "phase": "train", "a": [1]}', "metric 'a' is [1], not a number"),
])
def test_a_broken_line_is_named(bad, problem, tmp_path):
    path = write_run(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = bad + "\n"
    path.write_text("".join(lines))
    with pytest.raises(ValueError) as error:
        diagnose(tmp_path)
    assert str(error.value) == f"{path}, line 3: {problem}"


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = write_run(tmp_path) / "metrics.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 121, "pha')
    assert diagnose(tmp_path)["steps"] == [1, 120]
    path.write_text(path.read_text() + "\n")  # a whole line now, and broken
    with pytest.raises(ValueError, match="line 121: not JSON"):
        diagnose(tmp_path)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl not found: is .* the --workdir"):
        diagnose(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    diagnosis = diagnose(tmp_path)
    assert (diagnosis["verdict"], diagnosis["steps"]) == (["not enough data"], None)
    assert "no steps" in describe(diagnosis)


@pytest.mark.parametrize("content, problem", [
    ('{\n"config": {\n', "line 3: not JSON"), ("[]", "line 1: no object under"),
    ('{"config": 3}', "line 1: no object under"), ("{}", "line 1: no object under"),
])
def test_a_broken_config_is_named(content, problem, tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json, {problem}"):
        diagnose(tmp_path)


# Command line


def test_the_command_prints_and_writes_the_same(tmp_path, capsys):
    write_run(tmp_path, {PEARSON: 0.9, CHI2: float("inf")}, {"engine.quantization": "w8a8"})
    out = tmp_path / "diagnosis.json"
    main([str(tmp_path), "--json", str(out)])
    printed = capsys.readouterr().out
    assert 'c.engine.quantization = \'none\'  # now \'w8a8\'' in printed
    assert "A.quantized: sampler and learner are quantized" in printed
    assert "do not: read rollout_corr/kl as learning" in printed

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads(out.read_text(), parse_constant=refuse)
    assert list(written) == [
        "workdir", "steps", "window", "verdict", "findings", "undecided", "setup", "nans", "thresholds",
        "reward_errors",
    ]
    assert written["verdict"] == ["A", "escalate.system", "D"]
    assert all(
        set(f) == {"name", "title", "parent", "advice", "mistake", "evidence", "changes"}
        for f in (*written["findings"], *written["setup"])
    )
    assert [e["value"] for f in written["findings"] for e in f["evidence"]].count("inf") == 2
    assert printed.startswith(f"{tmp_path} (steps 101-120 of 1-120): A, escalate.system, D\n")


def test_thresholds_are_set_by_name(tmp_path, capsys):
    write_run(tmp_path, {PEARSON: 0.94})
    main([str(tmp_path), "--threshold", "pearson_broken=0.9"])
    assert "watch: the gap is between healthy and broken" in capsys.readouterr().out
    main([str(tmp_path), "--threshold", "window=5", "--threshold", "min_steps=5"])
    assert "steps 116-120 of 1-120): A" in capsys.readouterr().out
    message = "unknown threshold 'pearson'; choose one of window, min_steps, pearson_healthy"
    with pytest.raises(ValueError, match=message):
        main([str(tmp_path), "--threshold", "pearson=0.9"])


def test_rewards_that_failed_are_shown(tmp_path):
    write_run(tmp_path, {KL: 0.06})
    assert diagnose(tmp_path)["reward_errors"] == []
    assert "failed rewards" not in describe(diagnose(tmp_path))
    failed = failures.Failures(tmp_path / failures.FILE_NAME, lambda text: None)
    failed.add("KeyError at f.py:3", "KeyError: 'gold'", "Traceback", "sum-1", "5")
    failed.write()
    diagnosis = diagnose(tmp_path)
    assert [(f["kind"], f["count"]) for f in diagnosis["reward_errors"]] == [("KeyError at f.py:3", 1)]
    printed = describe(diagnosis)
    assert "failed rewards\n  1 x KeyError at f.py:3, the last at 2" in printed
    assert "example sum-1: KeyError: 'gold'" in printed
