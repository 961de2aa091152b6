"""Lines that frameworks print are read under colours, prefixes and bars; what is no metric is passed over."""

import math
import time

import pytest

from jaxrl_tis.doctor import console, foreign
from jaxrl_tis.doctor.case import K3, KL, LAG, LENGTH
from jaxrl_tis.doctor.frameworks import ABS_GAP
from tests.doctor import logs
from tests.doctor.runs import names

RAY = "\x1b[36m(TaskRunner pid=4711, ip=10.0.0.3)\x1b[0m "


def values(text):
    return [row.values for row in console.rows(text)]


# verl


@pytest.mark.parametrize("before, after", [
    ("", "\n"), (RAY, "\n"), (RAY, "\x1b[32m [repeated 2x across cluster]\x1b[0m\n"), ("", "\r\n"),
    ("Training Progress:   1%|1         | 4/435 [02:11<3:55:01, 32.7s/it]", "\n"),
    ("\rTraining Progress:   1%|1         | 4/435 [02:11<3:55:01, 32.7s/it]\r", "\rTraining: 1%|\n"),
    ("2026-08-01T10:00:00Z stdout F ", "\n"),
])
def test_verls_lines(before, after):
    line = ("step:3 - global_seqlen/min:1024 - actor/pg_loss:np.float64(-0.25) - actor/lr:1e-06 - "
            "rollout_corr/kl:nan - val-core/openai/gsm8k/reward/mean@1:0.5 - training/global_step:3")
    [row] = values("Initialising\n" + before + line + after)
    assert math.isnan(row.pop("rollout_corr/kl"))
    assert row == {
        "step": 3, "global_seqlen/min": 1024, "actor/pg_loss": -0.25, "actor/lr": 1e-6,
        "val-core/openai/gsm8k/reward/mean@1": 0.5, "training/global_step": 3,
    }


def test_a_value_that_is_being_written_is_left_out():
    assert values("step:1 - a:0.5 - b:0.2") == [{"step": 1, "a": 0.5}]
    assert values("step:1 - a:0.5 - b:0.2\n") == [{"step": 1, "a": 0.5, "b": 0.2}]


def test_what_is_no_number_is_kept_apart():
    [row] = console.rows("step:1 - a:True - b:0.5.1 - c:np.float32(inf)\n")
    assert row.values == {"step": 1, "c": math.inf} and row.texts == {"a", "b"}


@pytest.mark.parametrize("text", [
    "step 3 of 10", "loss: 0.5", "global_step:3 - a:1", "micro_step: {}", "def f(): return {'a': 1}",
    "sample: {'epoch': __import__('os').getcwd()", "",
])
def test_other_lines(text):
    assert not any(row.keys() - {"step"} for row in values(text + "\n"))


# Dicts


def test_slimes_dicts_count_rollouts_and_updates_apart():
    prefix = "[2026-08-01 10:00:00 RolloutManager] data.py:196 - "
    text = (prefix + "rollout 7: {'rollout/log_probs': -0.5, 'rollout/raw_reward': 0.25}\n"
            + prefix + "step 14: {'train/loss': np.float64(0.5), 'train/grad_norm': tensor(1.5, device='cuda:0'), "
            "'train/pg_clipfrac': nan, 'train/step': 14}\n"
            + prefix + "perf 7: {'perf/step_time': 3.0}\n")
    rollout, train, perf = values(text)
    assert rollout == {
        "step": 7, "rollout/step": 7, "rollout/log_probs": -0.5, "rollout/raw_reward": 0.25}
    assert math.isnan(train.pop("train/pg_clipfrac"))
    assert train == {
        "step": 14, "train/step": 14, "train/loss": 0.5, "train/grad_norm": 1.5}
    assert perf["rollout/step"] == 7


@pytest.mark.parametrize("head", ["✨ Global step 5: ", "INFO 08-01 10:00:00 a.py:547] Global step 5: "])
def test_openrlhfs_dicts(head):
    [row] = values(RAY + head + "{'vllm_kl': 0.001, 'ppo_kl': None, 'timing/generation': 3.5}\n")
    assert math.isnan(row.pop("ppo_kl"))
    assert row == {"step": 5, "vllm_kl": 0.001, "timing/generation": 3.5}


def test_skyrls_dicts_go_over_lines():
    prefix = "\x1b[36m(skyrl_entrypoint pid=12)\x1b[0m "
    lines = ["2026-08-01 10:00:00.000 | INFO | skyrl.train.utils.tracking:log:190 - Step 4: ",
             "{'async/staleness_mean': '1.5000',", " 'policy/final_loss': '-0.1250',",
             " 'trainer/epoch': 0}", "next"]
    assert values("".join(prefix + line + "\n" for line in lines)) == [
        {"step": 4, "async/staleness_mean": 1.5, "policy/final_loss": -0.125, "trainer/epoch": 0}]


@pytest.mark.parametrize("shown", [repr, lambda x: repr(f"{x:.4g}")])  # transformers 4; 5 prints strings
def test_trls_dicts_are_counted(shown):
    row = "{{'loss': {}, 'kl': {}, 'epoch': {}}}\n"
    bar = "  2%|2         | 10/500 [00:10<08:10,  1.00s/it]"
    text = "".join(
        (bar if i % 2 else "") + row.format(shown(0.5), shown(i / 8), shown(i / 64)) for i in range(1, 4))
    text += "{'eval_loss': 9.0, 'epoch': 0.05}\n{'train_runtime': 9.0, 'epoch': 0.05}\n"
    assert [(r["step"], r["kl"]) for r in values(text)] == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_a_continued_run_of_trl_prints_its_rows_again():
    """After a checkpoint at epoch 0.02 the third row comes again, and the last one counts."""
    row = "{{'kl': {}, 'epoch': {}}}\n"
    text = "".join(row.format(kl, epoch) for kl, epoch in (
        (1, 0.01), (2, 0.02), (3, 0.03), (4, 0.04), (5, 0.03), (6, 0.04), (7, 0.05)))
    assert [(r["step"], r["kl"]) for r in values(text)] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (3, 5), (4, 6), (5, 7)]


@pytest.mark.parametrize("line", [
    "\x1b[33m{'kl': 0.5, 'epoch': 0.1}\x1b[0m", "\x1b[1mstep:1\x1b[0m - kl:\x1b[32m0.5\x1b[0m",
    "\x1b[1mGlobal step 1:\x1b[22m \x1b[3m{'kl': 0.5}\x1b[0m", "Step \x1b[1m1\x1b[0m | Mismatch KL \x1b[1m0.5\x1b[0m",
])
def test_colours_are_cut_off(line):
    [row] = values(line + "\n")
    assert row.pop("epoch", 0.1) == 0.1
    assert set(row.values()) == {1, 0.5}


# Labels


def test_prime_rls_labels_become_names():
    text = (
        "10:00:00 SUCCESS Step 3 |  12.34s | Loss 0.5000 | Entropy 0.2 | Mismatch KL 0.0012 | LR 1.00e-06\n"
        "10:00:00   DEBUG Micro Step 3/8 | Loss 9.0 | Mismatch KL 9.0\n"
        "10:00:01 SUCCESS Step 4 | Time: 12.34s | Loss: 0.5000 | Mismatch KL: 0.0000 | Max Vio: 0.1\n"
        "10:00:02 SUCCESS Step 5 | 9s | Reward 0.5 | Turns 2.0 | Max Off-Policy 1 | Error 0.0%\n")
    first, second, third = console.rows(text)
    assert first.values == {"step": 3, "mismatch_kl/all/mean": 0.0012} and not first.rounded
    assert second.values["mismatch_kl/all/mean"] == 0 and second.rounded == {"mismatch_kl/all/mean"}
    assert third.values == {"step": 5, "train/agg/effective/num_turns/mean": 2, "off_policy/max": 1}


def test_nemo_rls_list_and_its_steps_that_begin_anew():
    step = ("\n========================= Step {}/2 =========================\n▶ Generating\n"
            "\n📊 Training Results:\n  • Loss: 0.1\n  • Generation KL Error: {}\n"
            "  • Mean Generation Length: 100.0000\n    • Accuracy: 0.5\n")
    epoch = "\n========================= Epoch {}/3 =========================\n"
    text = epoch.format(1) + step.format(1, 0.1) + step.format(2, 0.2) + epoch.format(2) + step.format(1, 0.3)
    assert [(r["step"], r["train/gen_kl_error"]) for r in values(text)] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert values(text)[0]["train/mean_gen_tokens_per_sample"] == 100


def test_a_text_that_looks_like_the_head_of_a_dict_takes_no_line():
    """An answer that verl prints. A dict begins on the line after its head or is none."""
    text = "step:1 - a:1\nStep 1:\nAdd {2} and {3}\nstep:2 - a:2\nStep 2:\nstep:3 - a:3\n"
    assert values(text) == [{"step": s, "a": s} for s in (1, 2, 3)]
    torn = "Step 1:\n{'a': 1,\n'b': 2,\nstep:2 - a:2\n"
    assert values(torn) == [{"step": 1, "a": 1, "b": 2}, {"step": 2, "a": 2}]


@pytest.mark.parametrize("text, expected", [
    ("Global step 7: {'a': 1, 'vllm_kl': 1.5", {"step": 7, "a": 1}),  # of 1.5e-05
    ("Step 7:\n{'a': 1,\n 'vllm_kl': 1.5", {"step": 7, "a": 1}),
    ("Step 7 | Turns 2.0 | Mismatch KL 0.0", {"step": 7, "train/agg/effective/num_turns/mean": 2}),
    ("Global step 7: {'a': 1, 'vllm_kl': 1.5e-05}", {"step": 7, "a": 1, "vllm_kl": 1.5e-05}),
])
def test_a_last_value_without_an_end_is_left_out(text, expected):
    assert values(text) == [expected]


# Verdicts


def printed(layout, line, changes=(), steps=range(1, 121)):
    return "".join(line(step, row) for step, row in logs.rows(layout, changes, steps))


def verl_line(step, row):
    return f"{RAY}step:{step} - " + " - ".join(f"{n}:np.float64({x})" for n, x in row.items()) + "\n"


def sky_lines(step, row):
    texts = {name: f"{x:.4f}" for name, x in row.items()}
    return f"INFO - Step {step}: \n" + str(texts).replace(", ", ",\n ") + "\n"


PRINTED = {
    "verl": lambda kl: printed(logs.VERL, verl_line, {KL: kl}),
    "trl": lambda kl: printed(logs.TRL, lambda s, row: f"{row | {'epoch': s / 100}}\n"),
    "openrlhf": lambda kl: printed(
        {n.removeprefix("train/"): x for n, x in logs.OPENRLHF.items()},
        lambda s, row: f"✨ Global step {s}: {row}\n", {"vllm_kl": kl}),
    "slime": lambda kl: printed(logs.SLIME, lambda s, row: f"step {s}: {row}\n") + printed(
        logs.SLIME_ROLLOUT, lambda s, row: f"rollout {s}: {row}\n", {"rollout/log_probs": -0.5 - kl}),
    "skyrl": lambda kl: printed(logs.SKYRL, sky_lines),
    "prime_rl": lambda kl: printed({}, lambda s, _: f"Step {s} | 3.2s | Loss 0.1 | Mismatch KL {kl:.4f}\n"),
    "nemo_rl": lambda kl: printed(
        {}, lambda s, _: f"===== Step {s}/120 =====\n  • Loss: 0.1\n  • Generation KL Error: {kl:.4f}\n"),
}


@pytest.mark.parametrize("framework", PRINTED)
@pytest.mark.parametrize("kl, is_broken", [(0.01, False), (0.06, True)])
def test_what_is_printed_has_a_verdict(framework, kl, is_broken, tmp_path):
    path = tmp_path / "run.log"
    path.write_text("Starting\n" + PRINTED[framework](kl))
    found = foreign.diagnose([str(path)], "auto")
    assert (found["framework"], found["kinds"]) == (framework, ["console"])
    assert (found["steps"], found["rows"]) == ([1, 120], 120)
    metric = ABS_GAP if framework in ("trl", "skyrl") else K3 if framework == "prime_rl" else KL
    record = foreign.load([str(path)], "auto")
    if metric != ABS_GAP:
        assert record.series[metric][120] == pytest.approx(kl)
        # prime-rl's samplers run ahead, and its trainer does not log how far.
        assert ("A" in found["verdict"]) == (is_broken and framework != "prime_rl")
    else:
        assert record.series[ABS_GAP][120] == 0.01 and record.series[LENGTH][1] == 100
    assert ("rows are counted" in " ".join(found["assumed"])) == (framework == "trl")


def test_a_lag_that_is_printed_as_its_largest_leaves_the_cause_open(tmp_path):
    text = "".join(f"Step {s} | 3s | Mismatch KL 0.2\nStep {s} | 3s | Turns 1.0 | Max Off-Policy 2\n"
                   for s in range(1, 41))
    path = tmp_path / "run.log"
    path.write_text(text)
    record = foreign.load([str(path)], "auto")
    assert record.is_ahead and LAG not in record.series
    assert "A" in names(foreign.diagnose([str(path)], "auto")["undecided"])


def test_what_is_rounded_to_0_is_not_the_same_in_every_bit(tmp_path):
    """A gap below 0.00005 is printed as 0.0000."""
    path = tmp_path / "run.log"
    path.write_text(PRINTED["prime_rl"](0.00001))
    found = foreign.diagnose([str(path)], "auto")
    assert "inactive.copied" not in names(found["corrections"])
    assert f"values printed as 0 or 1 are rounded: {K3}, {KL}" in found["assumed"]
    path.write_text(PRINTED["prime_rl"](0).replace("0.0000", "0"))
    assert "inactive.copied" in names(foreign.diagnose([str(path)], "auto")["corrections"])


def test_what_is_rounded_to_1_is_not_a_weight_that_does_nothing(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(printed(logs.SKYRL, sky_lines, {"policy/loss_metrics/is_ratio_mean": 1.00004}))
    assert "inactive.ones" not in names(foreign.diagnose([str(path)], "auto")["corrections"])
    path.write_text(path.read_text().replace("'1.0000'", "1.0"))
    assert "inactive.ones" in names(foreign.diagnose([str(path)], "auto")["corrections"])


def test_steps_that_are_printed_again_after_a_resume(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(printed(logs.VERL, verl_line, {KL: 0.06, K3: 0.06}) + printed(
        logs.VERL, verl_line, {}, range(90, 121)))
    found = foreign.diagnose([str(path)], "auto")
    assert found["verdict"] == ["healthy"] and found["rows"] == 120 and found["repeated"] > 0


def test_a_long_log_is_read_in_a_few_seconds(tmp_path):
    """200,000 values, and a line of noise before each hundred of them."""
    line = " - ".join(f"some/metric_{i}:np.float64(0.12345678)" for i in range(100))
    text = "".join(f"Progress {s}\n{RAY}step:{s} - {line}\n" for s in range(2000))
    start = time.process_time()
    assert len(console.rows(text)) == 2000
    assert time.process_time() - start < 3
