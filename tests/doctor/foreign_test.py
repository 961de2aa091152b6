"""Verdicts on the logs of other frameworks: whose they are, what is read, what is missing."""

import json
import math

import pytest

from jaxrl_tis.doctor import foreign
from jaxrl_tis.doctor.__main__ import main
from jaxrl_tis.doctor.case import (
    CHI2, CLIPPED, DP_MAX, ESS, K3, KL, LAG, LENGTH, PEARSON, PPL, PPO_KL, WEIGHTS_ESS,
)
from jaxrl_tis.doctor.diagnose import diagnose
from jaxrl_tis.doctor.frameworks import ABS_GAP, CORRECTED, FRAMEWORKS, RATIO
from tests.doctor import logs, runs
from tests.doctor.runs import late, names


def verl(tmp_path, changes=(), steps=range(1, 121)):
    return logs.write_verl(tmp_path / "verl.jsonl", logs.rows(logs.VERL, changes, steps))


def verdict(*paths, wanted="auto"):
    return foreign.diagnose(paths, wanted)["verdict"]


# Verdicts


@pytest.mark.parametrize("changes", [
    {}, {KL: 0.06}, {PEARSON: 0.94}, {PEARSON: 0.97}, {PPL: 1.1}, {DP_MAX: 1.1},
    {KL: -0.03}, {CHI2: 0.4}, {CHI2: 5.0}, {LENGTH: late(100.0, 130.0)},
    {CLIPPED: 0.1}, {KL: late(0.06, 0.01), K3: late(0.06, 0.01)},
])
def test_verls_verdict_is_that_of_a_run_of_ours(changes, tmp_path):
    values = runs.HEALTHY | {WEIGHTS_ESS: 0.95, ESS: None}
    ours = diagnose(runs.write_run(tmp_path, values | changes))
    theirs = foreign.diagnose([verl(tmp_path, changes)], "verl")
    assert theirs["verdict"] == ours["verdict"]
    evidence = lambda d: [(e["metric"], round(e["value"], 9), e["steps"])
                          for f in d["findings"] for e in f["evidence"] if e["steps"]]
    of_config = lambda metric: metric.startswith(("config/", "run/"))
    assert evidence(theirs) == [e for e in evidence(ours) if not of_config(e[0])]


def slime(tmp_path, changes=(), rollout=(), updates=1):
    """Of TensorBoard: the steps of rollouts and of updates are counted apart."""
    steps = range(120 * updates)
    return logs.write_events(
        tmp_path / "tb", [*logs.rows(logs.SLIME, changes, steps),
                          *logs.rows(logs.SLIME_ROLLOUT, rollout, range(120))])


def prime_rl(tmp_path, changes=(), orchestrator=()):
    return (
        logs.write_jsonl(tmp_path / "trainer.jsonl", logs.rows(logs.PRIME, changes)),
        logs.write_jsonl(tmp_path / "orchestrator.jsonl", logs.rows(logs.PRIME_ORCHESTRATOR, orchestrator)),
    )


LOGS = {
    "verl": lambda p, **x: [verl(p, **x)],
    "trl": lambda p, **x: [logs.write_state(p / "trainer_state.json", logs.rows(logs.TRL, **x))],
    "openrlhf": lambda p, **x: [logs.write_events(p / "tb", logs.rows(logs.OPENRLHF, **x))],
    "slime": lambda p, **x: [slime(p, **x)],
    "skyrl": lambda p, **x: [logs.write_csv(p / "a.csv", logs.rows(logs.SKYRL, **x))],
    "prime_rl": prime_rl,
    "nemo_rl": lambda p, **x: [logs.write_csv(p / "a.csv", logs.rows(logs.NEMO, **x), "run-1 - {}")],
    "tunix": lambda p, **x: [logs.write_events(p / "tb", logs.rows(logs.TUNIX, **x))],
    "tinker": lambda p, **x: [logs.write_jsonl(p / "metrics.jsonl", logs.rows(logs.TINKER, **x))],
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_is_recognised_by_its_names(name, tmp_path):
    found = foreign.diagnose(list(LOGS[name](tmp_path)), "auto")
    assert found["framework"] == name and found["marks"]
    assert not {"A", "C", "D", "E", "F"} & set(found["verdict"])
    printed = foreign.describe(found, False)
    assert f"framework: {name}, recognised by {found['marks'][0]}" in printed


@pytest.mark.parametrize("name, changes, found", [
    ("openrlhf", {"train/vllm_kl": 0.06}, "A"),
    ("openrlhf", {"train/vllm_kl": -0.03}, "A"),  # k1, and it may be below 0
    ("openrlhf", {"train/rollout/response_length_mean": late(100.0, 130.0)}, "F"),
    ("slime", {"train/mis_chi2_token": 1.5}, "D"),
    ("skyrl", {"generate/avg_num_tokens": late(100.0, 130.0)}, "F"),
    ("skyrl", {"policy/loss_metrics/token_mask_ratio": 0.3}, "escalate.system"),
    ("nemo_rl", {"train/gen_kl_error": 0.06}, "A"),
    ("tunix", {"sampler_trainer/train/probs_pearson_corr": 0.9}, "A"),
    ("trl", {"completions/mean_length": late(100.0, 130.0)}, "F"),
    ("tinker", {"optim/kl_sample_train_v1": 0.06}, "A"),
    ("tinker", {"optim/kl_sample_train_v1": -0.03}, "A"),
    ("tinker", {"env/all/total_ac_tokens": late(6400, 8320)}, "F"),  # 100 and 130 per episode
])
def test_a_finding_by_their_names(name, changes, found, tmp_path):
    assert found in verdict(*LOGS[name](tmp_path, changes=changes))


def test_nemo_rls_two_updates_halve_its_sums(tmp_path):
    twice = {"train/gen_kl_error": 0.08, "train/probs_ratio": 2.0}
    assert "A" not in verdict(*LOGS["nemo_rl"](tmp_path, changes=twice))
    assert "A" in verdict(*LOGS["nemo_rl"](tmp_path, changes=twice | {"train/gen_kl_error": 0.12}))


def test_slimes_gap_is_of_two_names_and_its_updates_are_averaged(tmp_path):
    path = slime(tmp_path, {"train/ppo_kl": lambda s: 0.004 * (s % 2)},
                 {"rollout/log_probs": -0.56}, updates=2)
    record = foreign.load([path], "auto")
    assert record.updates == 2 and record.steps == tuple(range(120))
    assert {round(value, 6) for value in record.series[PPO_KL].values()} == {0.002}
    found = foreign.diagnose([path], "auto")
    assert found["verdict"] == ["A"]  # -0.5 + 0.56 = 0.06
    [kl] = [e for e in found["findings"][0]["evidence"] if e["metric"] == KL]
    assert kl["value"] == pytest.approx(0.06) and kl["steps"] == [100, 119]
    assert kl["theirs"] == ["rollout/rollout_log_probs", "rollout/log_probs"]
    assert "averaged over the 2 updates of a batch" in foreign.describe(found, False)
    printed = foreign.describe(found, False)
    assert f"{KL} [rollout/rollout_log_probs, rollout/log_probs] 0.06 > 0.05" in printed


def test_a_gap_of_stale_samples_is_neither_as_nor_bs(tmp_path):
    """Two policies: what of prime-rl's gap is the engine's is not logged."""
    found = foreign.diagnose(prime_rl(tmp_path, {"mismatch_kl/all/mean": 0.2}), "auto")
    undecided = names(found["undecided"])
    assert found["verdict"] == ["not enough data"] and {"A", "B.lag"} <= undecided
    fresh = prime_rl(tmp_path, {"mismatch_kl/all/mean": 0.2}, {"off_policy/mean": 0})
    assert verdict(*fresh) == ["A"]


def test_tinkers_lag_is_the_difference_of_two_steps(tmp_path):
    """Its asynchronous loop logs both steps and no batch. The batch of a synchronous loop is a lag of 0."""
    ahead = {"progress/batch": None, "optim/kl_sample_train_v1": 0.2, "training_client/step": lambda s: s,
             "sampling_client/step_mean": lambda s: s - 0.5 * (s % 5),
             "async/staleness_mean": lambda s: 0.5 * (s % 5)}  # SkyRL has this name, too
    [path] = LOGS["tinker"](tmp_path, changes=ahead)
    record = foreign.load([path], "auto")
    assert record.name == "tinker" and record.is_ahead and set(record.series[LAG].values()) == {0.0, 0.5, 1.0, 1.5, 2.0}
    assert record.theirs[LAG] == ("training_client/step", "sampling_client/step_mean")
    found = foreign.diagnose([path], "auto")
    assert found["verdict"] == ["not enough data"] and {"A", "B.lag"} <= names(found["undecided"])
    [path] = LOGS["tinker"](tmp_path, changes={"optim/kl_sample_train_v1": 0.2})
    assert set(foreign.load([path], "auto").series[LAG].values()) == {0.0}
    found = foreign.diagnose([path], "auto")
    assert found["verdict"] == ["A"] and found["assumed"] == []


def test_samplers_that_run_ahead_without_a_lag_leave_it_open(tmp_path):
    changes = {KL: 0.06, "fully_async/count/current_param_version": 3}
    found = foreign.diagnose([verl(tmp_path, changes)], "auto")
    assert "A" in names(found["undecided"]) and "A" not in found["verdict"]
    assert "samplers run ahead, and no lag is logged" in found["assumed"][0]
    assert verdict(verl(tmp_path, changes | {LAG: 0})) == ["A"]
    [fresh] = foreign.diagnose([verl(tmp_path, {KL: 0.06})], "auto")["assumed"]
    assert "samples come from the current weights" in fresh


def test_trls_two_trainers_mean_two_things_by_kl(tmp_path):
    """GRPO's is to the reference; asynchronous GRPO's is k3 against the sampler."""
    plain = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows(logs.TRL, {"kl": 0.5}))
    assert KL not in foreign.load([plain], "auto").series
    names_of = {"ratio": 1.0, "kl": 0.5, "clip_ratio/region_mean": 0.0, "completions/mean_length": 9.0}
    ahead = logs.write_jsonl(tmp_path / "b.jsonl", logs.rows(names_of))
    record = foreign.load([ahead], "auto")
    assert record.series[KL][1] == 0.5 and record.is_ahead and record.name == "trl"


# Whose log it is


def test_names_of_nobody(tmp_path):
    path = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows({"loss": 1.0}))
    with pytest.raises(ValueError, match=r"the 2 names of this log match no framework.*pg_clipfrac \(verl"):
        foreign.diagnose([path], "auto")
    with pytest.raises(ValueError, match="this log has no metric name of verl"):
        foreign.diagnose([path], "verl")


def test_names_of_several(tmp_path):
    path = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows(logs.VERL | logs.SKYRL))
    with pytest.raises(ValueError, match=r"match several frameworks \(verl: actor/pg_clipfrac.*; skyrl: policy/"):
        foreign.diagnose([path], "auto")
    assert foreign.diagnose([path], "skyrl")["framework"] == "skyrl"


def test_a_few_names_are_enough_where_the_framework_is_told(tmp_path):
    path = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows({CHI2: 5.0}))
    found = foreign.diagnose([path], "verl")
    assert "escalate.system" in found["verdict"]
    assert "framework: verl, as requested" in foreign.describe(found, False)


def test_a_record_of_ours_is_not_anothers(tmp_path):
    runs.write_run(tmp_path)
    with pytest.raises(ValueError, match="is a record of jaxrl_tis; give the folder of one run"):
        foreign.diagnose([str(tmp_path / "metrics.jsonl")], "auto")


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_a_logger_may_put_a_prefix_before_names(prefix, tmp_path):
    rows = [(s, {prefix + n: x for n, x in row.items()}) for s, row in logs.rows(logs.TRL)]
    record = foreign.load([logs.write_csv(tmp_path / "a.csv", rows)], "auto")
    assert record.name == "trl" and record.series[LENGTH][120] == 100.0
    assert record.unread == (prefix + "reward",)


# Steps and values


def test_steps_are_counted_as_they_are_logged(tmp_path):
    """Every tenth: 20 rows are judged, and named by their steps."""
    kl = {KL: lambda s: 0.06 if s > 1000 else 0.01}
    found = foreign.diagnose([verl(tmp_path, kl, range(10, 1201, 10))], "auto")
    assert found["verdict"] == ["A"]
    assert (found["steps"], found["window"]) == ([10, 1200], [1010, 1200])
    [evidence] = [e for e in found["findings"][0]["evidence"] if e["metric"] == KL]
    assert evidence["steps"] == [1010, 1200] and evidence["extreme_step"] == 1010
    assert evidence["value"] == pytest.approx(0.06)


@pytest.mark.parametrize("written", [None, float("nan"), "nan", "NaN"])
def test_what_is_not_a_number_is_counted_and_not_judged(written, tmp_path):
    """verl's logger `file` writes NaN as null, by orjson."""
    rows = [(s, row | {KL: written if s % 2 else 0.06}) for s, row in logs.rows(logs.VERL)]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert found["verdict"] == ["A"] and found["nans"] == {KL: list(range(1, 120, 2))}
    assert f"not finite: {KL}, 60 times, steps 1-119" in foreign.describe(found, False)


def write_nan_state(path, rows):
    return logs.write_state(path.with_name("trainer_state.json"), rows)


def test_trl_without_a_finite_value(tmp_path):
    """TRL 1.16.0 logs None where no value of a step is a number."""
    changes = {name: lambda s: float("nan") for name in logs.TRL if name.startswith("sampling/")}
    rows = logs.rows(logs.TRL, changes)
    for path in (write_nan_state(tmp_path / "a", rows), logs.write_csv(tmp_path / "a.csv", rows),
                 logs.write_events(tmp_path / "tb", rows)):
        found = foreign.diagnose([path], "auto")
        assert len(found["nans"]["sampling/sampling_logp_difference/mean"]) == 120
        assert "inactive.unrecorded" not in names(found["corrections"])


def test_log_probs_that_are_nan_are_logged_and_no_number(tmp_path):
    """Every measure of the gap is null: it is recorded, and nothing can be said of it."""
    rows = [(s, {n: None if n.startswith(("rollout_corr/", "training/rollout")) else x
                 for n, x in row.items()}) for s, row in logs.rows(logs.VERL)]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert found["verdict"] == ["not enough data"]
    assert not names(found["corrections"]) & {"inactive.unrecorded", "inactive.uncorrected"}
    [switch] = {entry["switch"] for entry in found["missing"] if entry["metric"] in (KL, PEARSON, CHI2)}
    assert switch == "logged, but never as a number"
    assert not any("no weight is logged" in text for text in found["assumed"])


@pytest.mark.parametrize("value, first, verdict", [
    (float("inf"), 101, ["A"]), (float("inf"), 119, ["watch"]), ("both", 119, ["healthy"]),
])
def test_infinite_values_are_named(value, first, verdict, tmp_path):
    """Two of them are no verdict yet. Of both signs there is no mean: they are left out."""
    at = lambda s: float("-inf") if value == "both" and s == 119 else float("inf")
    changes = {KL: lambda s: at(s) if s >= first else 0.01, "rollout_corr/rollout_is_mean": 1.0}
    found = foreign.diagnose([verl(tmp_path, changes)], "auto")
    assert found["nans"] == {KL: list(range(first, 121))} and found["verdict"] == verdict


def test_a_number_that_is_logged_again_replaces_one_that_was_not(tmp_path):
    rows = [*logs.rows(logs.VERL, {KL: float("nan")}), *logs.rows(logs.VERL, {}, range(1, 121))]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert found["nans"] == {} and found["verdict"] == ["healthy"]


# Versions of verl


@pytest.mark.parametrize("rename", [
    lambda name: name.replace("rollout_corr/", "actor/rollout_corr/"),  # 0.8 and later, in bypass mode
    lambda name: name.replace("rollout_corr/rollout_is", "mismatch/rollout_is").replace(
        "rollout_corr/", "mismatch/mismatch_"),  # 0.6.0
])
def test_verls_other_names_of_its_correction(rename, tmp_path):
    rows = [(s, {rename(n): x for n, x in row.items() if "chi2" not in n})
            for s, row in logs.rows(logs.VERL, {KL: 0.06, K3: 0.06})]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert found["verdict"] == ["A"] and "inactive.uncorrected" not in names(found["corrections"])
    [kl] = [e for e in found["findings"][0]["evidence"] if e["metric"] == KL]
    assert kl["theirs"] == [rename(KL)]


def test_two_messages_are_one_turn(tmp_path):
    turns = lambda messages: names(foreign.diagnose(
        [verl(tmp_path, {"num_turns/mean": messages})], "auto")["setup"])
    assert "trajectory.single" in turns(2) and "trajectory.agentic" not in turns(2)
    assert "trajectory.agentic" in turns(4) and "trajectory.single" not in turns(4)


def test_a_batch_without_a_valid_token_says_nothing(tmp_path):
    changes = {"training/rollout_probs_diff_valid": lambda s: s != 120, KL: lambda s: 9.0 * (s == 120)}
    rows = [(s, row | {"training/rollout_probs_diff_valid": int(s != 120)})
            for s, row in logs.rows(logs.VERL, changes)]
    record = foreign.load([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert 120 not in record.steps and set(record.series[KL].values()) == {0.0}


def test_the_last_of_two_values_of_a_step_counts(tmp_path):
    rows = [*logs.rows(logs.VERL, {KL: 0.06, K3: 0.06}), *logs.rows(logs.VERL, {}, range(90, 121))]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert found["verdict"] == ["healthy"]
    read = {n for row in FRAMEWORKS["verl"].names for n in row.theirs} & logs.VERL.keys()
    assert found["repeated"] == 31 * len(read)


@pytest.mark.parametrize("row, message", [
    ({"kl": 1}, "line 121: no step; add one of global_step, "),
    ({"step": 1.5, "kl": 1}, "1.5, not a whole number"),
    ({"step": "nan", "kl": 1}, "nan, not a whole number"),
])
def test_a_value_has_a_step(row, message, tmp_path):
    path = tmp_path / "a.jsonl"
    logs.write_jsonl(path, logs.rows(logs.TRL))
    row = {"completions/mean_length" if n == "kl" else n: x for n, x in row.items()}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        foreign.diagnose([str(path)], "auto")


def test_names_that_nobody_reads_may_have_no_step(tmp_path):
    path = tmp_path / "a.jsonl"
    logs.write_jsonl(path, logs.rows(logs.TRL))
    path.write_text(path.read_text() + '{"system/gpu": 1, "text": "x"}\n')
    found = foreign.diagnose([str(path)], "auto")
    assert found["unread"] == ["reward", "system/gpu"] and found["texts"] == ["text"]
    assert "metrics not read: 2 (--verbose)" in foreign.describe(found, False)
    assert "metrics not read: reward, system/gpu" in foreign.describe(found, True)


@pytest.mark.parametrize("wanted", [{}, {"min_steps": 1.0}])
def test_a_step_makes_no_verdict_unless_it_is_asked_to(wanted, tmp_path):
    found = foreign.diagnose([verl(tmp_path, {KL: 0.06}, range(1, 2))], "auto", wanted)
    is_asked = bool(wanted)
    assert found["verdict"] == (["A"] if is_asked else ["not enough data"])
    assert "mass" not in names(found["corrections"])  # a mean has no error without a second value
    printed = foreign.describe(found, False)
    assert ("too few steps: 1 are logged, a verdict needs 10" in printed) != is_asked
    assert (": too few steps, 1 of at least 10" in printed) != is_asked
    assert is_asked or "needs 10 values" not in printed


# What is missing


def missing(found):
    return {entry["metric"]: entry for entry in found["missing"]}


def test_what_is_missing_is_listed_with_the_setting_that_logs_it(tmp_path):
    gone = {name: None for name in logs.VERL if name.startswith(("training/", "rollout_corr/"))}
    found = missing(foreign.diagnose([verl(tmp_path, gone)], "auto"))
    assert found[PEARSON]["switch"].startswith("actor_rollout_ref.rollout.calculate_log_probs=True")
    assert {"A", "healthy"} <= set(found[PEARSON]["serves"])
    assert found[WEIGHTS_ESS]["switch"] == "algorithm.rollout_correction.rollout_is=token"
    assert LENGTH not in found and "rollout_corr/rollout_rs_masked_fraction" not in found  # none is none
    whole = missing(foreign.diagnose([verl(tmp_path)], "auto"))
    assert set(whole) == {LAG}


def test_what_a_framework_never_logs_is_said(tmp_path):
    found = missing(foreign.diagnose(LOGS["trl"](tmp_path), "auto"))
    assert found[PEARSON]["switch"] == "not logged by trl"
    assert ABS_GAP not in found and RATIO not in found  # its bounded weights are enough
    assert missing(foreign.diagnose(LOGS["openrlhf"](tmp_path), "auto"))[RATIO]["serves"] == ["mass"]
    bare = {name: None for name in logs.TRL if name.startswith("sampling/")}
    found = missing(foreign.diagnose(LOGS["trl"](tmp_path, changes=bare), "auto"))
    assert "use_vllm=True" in found[ABS_GAP]["switch"] and CORRECTED in found


def test_without_weights_the_sample_is_whole(tmp_path):
    bare = {name: None for name in logs.VERL if "rollout_is" in name}
    found = foreign.diagnose([verl(tmp_path, bare)], "auto")
    assert found["verdict"] == ["healthy"] and "every weight counts as 1" in found["assumed"][1]
    # OpenRLHF's record does not tell what its masks reject, nor a sample size.
    assert WEIGHTS_ESS in missing(foreign.diagnose(LOGS["openrlhf"](tmp_path), "auto"))


@pytest.mark.parametrize("name, is_open", [("openrlhf", True), ("trl", True), ("skyrl", False)])
def test_a_share_that_is_not_logged_is_none_where_it_would_be(name, is_open, tmp_path):
    """SkyRL logs what its masks reject; OpenRLHF and TRL do not."""
    found = foreign.diagnose(LOGS[name](tmp_path), "auto")
    assert ("rejected.many" in names(found["undecided"])) == is_open


# The command


def test_a_restart_ends_the_branch_before_it(tmp_path):
    """Steps 61 to 100 were broken, and the run goes on from step 50."""
    broken = {PEARSON: 0.8, KL: 0.3, K3: 0.3}
    rows = [*logs.rows(logs.VERL, {}, range(1, 61)), *logs.rows(logs.VERL, broken, range(61, 101)),
            *logs.rows(logs.VERL, {}, range(51, 81))]
    found = foreign.diagnose([logs.write_verl(tmp_path / "a.jsonl", rows)], "auto")
    assert (found["verdict"], found["steps"]) == (["healthy"], [1, 80])


def test_a_restart_at_a_step_without_a_number(tmp_path):
    """Step 10 was NaN. The run goes on from there, and what it had logged after is void."""
    rows = [*logs.rows(logs.VERL, {}, range(1, 10)), *logs.rows(logs.VERL, {KL: math.nan}, range(10, 11)),
            *logs.rows(logs.VERL, {KL: 0.3}, range(11, 21)), *logs.rows(logs.VERL, {}, range(10, 13))]
    record = foreign.load([str(logs.write_verl(tmp_path / "a.jsonl", rows))], "auto")
    assert sorted(record.series[KL]) == [*range(1, 13)] and not record.nans


@pytest.mark.parametrize("changes, fault", [
    (dict.fromkeys((KL, K3, CHI2, DP_MAX, "rollout_corr/chi2_seq", "training/rollout_probs_diff_mean"), 0.0)
     | {PPL: 1.0, PEARSON: 1.0}, "inactive.copied"),
    ({KL: 0.015, K3: 0.0003}, "mass"),
])
def test_no_log_with_a_fault_of_its_correction_is_healthy(changes, fault, tmp_path):
    found = foreign.diagnose([verl(tmp_path, changes)], "auto")
    assert fault in found["verdict"] and "healthy" not in names(found["findings"]) | set(found["verdict"])
    assert "engine.same" not in names(found["setup"])


def test_a_gap_that_is_logged_at_some_steps_alone(tmp_path):
    """verl's test frequency, and TRL's several updates of one generation."""
    for every in (2, 3, 5):
        rows = [(s, {n: x for n, x in row.items() if s % every == 0 or "rollout" not in n})
                for s, row in logs.rows(logs.VERL, {}, range(1, 401))]
        found = foreign.diagnose([logs.write_verl(tmp_path / f"{every}.jsonl", rows)], "auto")
        assert "weights.sync" not in found["verdict"] and found["rows"] == 400


@pytest.mark.parametrize("layout, name, value", [
    (logs.TRL, "sampling/importance_sampling_ratio/max", None),
    (logs.NEMO, "train/probs_ratio", float("inf")),
    (logs.NEMO, "train/gen_kl_error", -0.001),
    (logs.VERL, "rollout_corr/chi2_seq", 1.5e308),
    (logs.VERL, "rollout_corr/kl", 10**400),
])
def test_odd_values_end_no_diagnosis(layout, name, value, tmp_path):
    rows = logs.rows(layout | {"train/is_oob_ratio": 0.01} if layout is logs.NEMO else layout)
    for _, row in rows[100::7]:
        row[name] = value
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": s} | row) + "\n" for s, row in rows))
    assert foreign.diagnose([str(path)], "auto")["rows"] == 120


def test_numbers_as_text_are_numbers(tmp_path):
    rows = [(s, row | {KL: str(row[KL])}) for s, row in logs.rows(logs.VERL, {KL: 0.06})]
    assert verdict(logs.write_verl(tmp_path / "a.jsonl", rows)) == ["A"]


def test_a_metric_that_begins_late_makes_no_updates(tmp_path):
    rows = [(s, row | {"train/step": s}) for s, row in logs.rows(logs.SLIME, {}, range(100))]
    rows += [(s, row | {"rollout/step": s}) for s, row in logs.rows(logs.SLIME_ROLLOUT, {}, range(50, 100))]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _, row in rows))
    record = foreign.load([str(path)], "auto")
    assert record.updates == 1 and len(record.steps) == 100


def test_a_log_of_another_framework_is_refused(tmp_path):
    """Both have a metric of the name kl."""
    path = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows(logs.TRL, {"kl": 0.01}))
    with pytest.raises(ValueError, match="this log is of trl .* use --from=trl"):
        foreign.load([path], "openrlhf")


def test_two_runs_are_refused_and_a_continued_one_is_read(tmp_path):
    both, continued = tmp_path / "both", tmp_path / "continued"
    for folder, starts in ((both, (1, 1)), (continued, (1, 91))):
        folder.mkdir()
        for number, start in zip((9, 10), starts, strict=True):
            logs.write_verl(folder / f"{number}.jsonl", logs.rows(logs.VERL, {}, range(start, start + 100)))
    with pytest.raises(ValueError, match="9.jsonl and .*10.jsonl both have .* from step 1 on"):
        foreign.load([str(both)], "auto")
    assert foreign.load([str(continued)], "auto").steps[-1] == 190


def test_texts_without_metrics_beside_a_log_are_passed_over(tmp_path):
    (tmp_path / "a.err").write_text("")
    (tmp_path / "requirements.txt").write_text("vllm==0.11\n")
    with pytest.raises(ValueError, match="the format is unknown"):
        foreign.load([str(tmp_path)], "auto")
    (tmp_path / "a.out").write_text("step:1 - actor/pg_clipfrac:0.1 - critic/score/mean:1\n")
    assert foreign.load([str(tmp_path)], "auto").steps == (1,)


def test_a_missing_number_of_updates_is_assumed(tmp_path):
    path = logs.write_jsonl(tmp_path / "a.jsonl", logs.rows(logs.NEMO, {"train/probs_ratio": None}))
    assert "each step has one update" in foreign.diagnose([path], "auto")["assumed"][0]


@pytest.mark.parametrize("text, least", [
    ("min_steps=0", "at least 1"), ("window=0", "at least 1"), ("kl_bug=nan", "a number"),
])
def test_thresholds_that_judge_nothing(text, least, tmp_path):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"threshold {name} is {value}; it must be {least}"):
        foreign.diagnose([verl(tmp_path, {})], "auto", {name: float(value)})


def test_the_command(tmp_path, capsys):
    path = verl(tmp_path, {KL: 0.06, K3: 0.06})
    main([path, "--json", str(tmp_path / "out.json")])
    assert f"{path} (JSONL; steps 101-120 of 1-120): A" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["framework"], written["verdict"], written["rows"]) == ("verl", ["A"], 120)
    main([path, "--from=verl", "--threshold", "kl_bug=0.1", "--verbose"])
    out = capsys.readouterr().out
    assert ": watch" in out and "metrics not read: timing_s/step" in out


def test_standard_input(tmp_path, capsys, monkeypatch):
    with open(verl(tmp_path, {KL: 0.06})) as log:
        monkeypatch.setattr("sys.stdin", log)
        main(["-"])
    assert "- (JSONL; steps 101-120 of 1-120): A" in capsys.readouterr().out


def test_an_output_dir_of_trl_needs_no_flag(tmp_path, capsys):
    for number in (60, 120):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        logs.write_state(folder / "trainer_state.json", logs.rows(logs.TRL, steps=range(1, number + 1)))
    main([str(tmp_path)])
    assert "(trainer_state.json; steps 101-120 of 1-120)" in capsys.readouterr().out


def test_a_folder_of_events_needs_no_flag(tmp_path, capsys):
    main(LOGS["tunix"](tmp_path))
    assert "framework: tunix" in capsys.readouterr().out
