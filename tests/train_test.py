"""The loop: what each step records, at which weights, and what stops it."""

import collections
import contextlib
import dataclasses
import io
import json
import logging
import math
import pathlib
import re
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis import train
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import transformer
from jaxrl_tis.record import failures
from jaxrl_tis.report import page
from jaxrl_tis.runtime import cli
from tests import tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]

_score = Trainer.score


def learner_logp(config, params, rows):
    """log softmax(logits / temperature) of the masked tokens from whole logits, [B,T]."""
    logits = transformer.logits(params, config, rows["tokens"], None, rows["segment_ids"])
    logp = jax.nn.log_softmax(logits / rows["temperature"][..., None], axis=-1)
    taken = np.take_along_axis(
        np.asarray(logp)[:, :-1], rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    return np.where(rows["mask"], np.pad(taken, ((0, 0), (1, 0))), 0)


@dataclasses.dataclass
class Recorded:
    """A run with its report, whose rewards are of a process of their own, (parameters that sampled,
    rows, samples) of each of its steps, and the names of the programs that were compiled for it."""

    workdir: pathlib.Path
    steps: list
    programs: list
    returned: dict


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    workdir, steps, programs = tmp_path_factory.mktemp("recorded"), [], []
    found = lambda record: programs.extend(re.findall(r"^Compiling jit\((\w+)\)", record.getMessage()))
    logger = logging.getLogger("jax._src.interpreters.pxla")

    def score(self, state, samples, *given):
        rows = _score(self, state, samples, *given)
        steps.append((jax.device_get(state["policy"].params), dict(rows), samples))
        return rows

    write = page.write
    with (
        mock.patch.object(Trainer, "score", score),
        tiny.one_device(contextlib.nullcontext),
        mock.patch.object(page, "write", write),
        mock.patch.object(logger, "handle", found), jax.log_compiles(),
    ):
        return Recorded(workdir, steps, programs, train.run(tiny.config(), str(workdir)))


# The policies are kept apart


@pytest.mark.all
def test_old_log_probs_are_those_of_the_weights_that_sampled_in_every_step(recorded):
    steps, model = recorded.steps, tiny.setup().model
    first = steps[0][0]
    for params, rows, _ in steps:
        expected = learner_logp(model, params, rows)
        np.testing.assert_allclose(rows["logp_old"], expected, atol=1e-4)
    params, rows, _ = steps[-1]
    from_start = learner_logp(model, first, rows)
    assert np.abs(from_start - rows["logp_old"]).max() > 1e-2  # no snapshot from the start


def test_the_sampler_ran_with_those_weights_too(recorded):
    """int8 against f32 at the same weights: a small gap, never the size of an update."""
    steps = recorded.steps
    for index, (_, rows, samples) in enumerate(steps):
        gap = (rows["logp_old"] - rows["logp_behav"])[rows["mask"]]
        assert 1e-5 < np.abs(gap).max() < 0.2
        for sample in samples:
            assert set(sample.trajectory.version) == {index}
            assert sample.trajectory.quant_id == "w8a8"
            assert sample.trajectory.temperature == 0.8


def test_updates_make_no_program_anew(recorded):
    """The engines that sample and evaluate have a program each; warm-up and update share the name."""
    counts = collections.Counter(recorded.programs)
    assert counts["prepare"] == 1
    assert max(counts[name] for name in ("load", "_prefill_rows", "_decode", "train_step")) == 2


def test_rows_hold_the_samples_in_order(recorded):
    _, rows, samples = recorded.steps[0]
    assert rows["group"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    np.testing.assert_allclose(rows["rewards"], [s.reward for s in samples], rtol=1e-6)
    for row, sample in enumerate(samples):
        n = len(sample.trajectory.prompt)
        np.testing.assert_array_equal(
            rows["tokens"][row, n : n + len(sample.trajectory.tokens)], sample.trajectory.tokens)


# The record


def test_phases_and_steps_of_the_record():
    lines = [(r["phase"], r["step"]) for r in tiny.lines(tiny.finished())]
    expected = [("warmup", i) for i in range(1, 13)] + [("eval", 0), ("train", 1)]
    expected += [("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    assert lines == expected + [("train", 5), ("eval", 5)]


def test_every_metric_that_the_report_and_the_readers_need():
    text = (tiny.finished() / "metrics.jsonl").read_text().splitlines()
    first = next(r for r in map(json.loads, text) if r["phase"] == "train")
    needed = {
        "reward/mean", "reward/learner_snis", "reward/learner_snis_ess", "reward/timeouts",
        "reward/errors", "reward/non_finite", "reward/dropped", "actor/entropy", "actor/grad_norm", "actor/pg_loss",
        "actor/pg_clipfrac", "actor/ppo_kl", "response_length/mean", "response_length/max",
        "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
        "training/rollout_actor_probs_pearson_corr", "rollout_corr/kl", "rollout_corr/k3_kl",
        "rollout_corr/chi2_token", "rollout_corr/ppl_ratio", "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_max", "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_is_ratio_fraction_high", "time/rollout_s", "time/update_s",
        "time/step_s", "time/rollout_tokens_per_s",
    }
    assert needed <= first.keys(), needed - first.keys()
    held_out = next(r for r in map(json.loads, text) if r["phase"] == "eval")
    assert {"eval/greedy_accuracy", "eval/sampled_accuracy", "eval/constant_accuracy",
            "eval/n"} <= held_out.keys()
    assert held_out["eval/n"] == 8


def test_the_run_describes_itself():
    described = json.loads((tiny.finished() / "config.json").read_text())
    assert described["config"]["optimizer"]["lr"] == 3e-3
    assert described["config"]["task"]["params"]["digits"] == 1
    assert {"jax", "flax", "optax", "python"} <= described["versions"].keys()
    assert "git_revision" in described
    assert any((tiny.finished() / "tensorboard").iterdir())
    assert sorted(p.name for p in (tiny.finished() / "checkpoints").iterdir()) == ["4", "5"]


def test_run_returns_the_last_evaluation_and_writes_a_report(recorded):
    last = [r for r in tiny.lines(recorded.workdir) if r["phase"] == "eval"][-1]
    assert recorded.returned == {k: v for k, v in last.items() if k.startswith("eval/")}
    assert (recorded.workdir / "report.html").stat().st_size > 1000


def test_the_same_seed_twice_gives_the_same_record(recorded):
    assert tiny.lines(recorded.workdir) == tiny.lines(tiny.finished())


@pytest.mark.all
def test_a_jsonl_task_needs_no_warm_up_split(tmp_path):
    """As the shipped GSM8K config: files of the user, no supervised steps."""
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "id": str(a)} for a in range(9)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tiny.run(
        tmp_path / "run", steps=1, task__name="jsonl", warmup__steps=0,
        task__params={"path": str(tmp_path / "train.jsonl")},
        eval__params={"path": str(tmp_path / "train.jsonl")},
    )
    assert [r["phase"] for r in tiny.lines(tmp_path / "run")] == ["eval", "train", "eval"]


# What stops a run


def test_a_first_batch_without_any_reward_ends_the_run_and_a_later_one_is_told(capsys):
    failed, scored = mock.Mock(is_failed=True), mock.Mock(is_failed=False)
    train.check_rewards(1, [failed, scored], "KeyError: 'x'", is_first=True, field="reward.name")
    with pytest.raises(ValueError, match="step 1: all 2 rewards failed. The last error: KeyError: 'x'"):
        train.check_rewards(1, [failed] * 2, "KeyError: 'x'", is_first=True, field="reward.name")
    with pytest.raises(ValueError, match="it failed. Fix what rollout.harness names; WORKDIR/reward"):
        train.check_rewards(1, [failed] * 2, "it failed", is_first=True, field="rollout.harness")
    assert capsys.readouterr().err == ""
    train.check_rewards(2, [failed] * 2, "KeyError: 'x'", is_first=False, field="reward.name")
    assert capsys.readouterr().err.startswith("step 2: all 2 rewards failed")


@pytest.mark.parametrize("source", [
    {}, {"rollout__schedule": "areal(staleness=1)"}, {"rollout__schedule": "periodic"},
])
def test_a_reward_that_always_fails_ends_the_run_with_its_error(tmp_path, capfd, source):
    """Whatever a failure is worth, and with every source: a run on zeros would learn nothing."""
    with pytest.raises(ValueError, match="all 16 rewards failed. The last error: KeyError: 'gold'") as e:
        tiny.run(tmp_path, reward__name="tests.tiny_rewards:always_raises", **source)
    assert cli.exit_code(e.value) == 2
    [kind] = failures.read(tmp_path / failures.FILE_NAME)
    assert kind.kind.startswith("KeyError at ") and kind.count >= 16
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1 and 'example["gold"]' in printed


@pytest.mark.parametrize("name", ["actor/pg_loss", "critic/vf_loss", "actor/grad_norm",
                                  "critic/grad_norm", "actor/kl_loss", "reward/mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_terms_are_named(name, value):
    with pytest.raises(FloatingPointError) as error:
        train.check_finite(7, {"reward/std": 1.0, name: value}, 4)
    assert f"step 7: {name} is {value}" in str(error.value)
    assert "checkpoint of step 4 is intact" in str(error.value)


def test_the_cause_of_a_term_that_is_not_finite_is_named():
    with pytest.raises(FloatingPointError, match="step 7: actor/pg_loss is nan. 3 of 9; the run stops"):
        train.check_finite(7, {"actor/pg_loss": math.nan}, None, lambda: "3 of 9")
    train.check_finite(7, {"actor/pg_loss": 0.1}, None, lambda: 1 / 0)  # searched for a fault alone


def test_log_probs_that_are_not_finite_stop_a_run_before_its_update():
    train.check_scores(7, "", 4)
    with pytest.raises(FloatingPointError, match="step 7: 3 of 9; the run .*step 4 is intact"):
        train.check_scores(7, "3 of 9", 4)


def test_an_infinite_divergence_does_not_stop_a_run():
    train.check_finite(7, {"rollout_corr/k3_kl": math.inf, "actor/pg_loss": 0.1}, 4)


@dataclasses.dataclass
class Compact:
    """A run with a compact record, parts of rewards, a profile, and data of which a part is bad."""

    workdir: pathlib.Path
    data: pathlib.Path
    told: str

    def lines(self, phase):
        return [r for r in tiny.lines(self.workdir) if r["phase"] == phase]


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compact")
    data, workdir = folder / "data.jsonl", folder / "run"
    good = [json.dumps({"prompt": "1+1=", "answer": "2", "id": str(i)}) for i in range(8)]
    data.write_text("\n".join([*good, "nonsense", '{"prompt": "1+1+1=", "answer": "3"}']))
    of_data = {"path": str(data)}
    config = tiny.config(
        steps=2, warmup__steps=0, correction__advantage="gdpo", metrics__record="compact",
        reward__name="tests.tiny_rewards:parts", rollout__overlong_buffer=2, task__name="jsonl",
        task__params=of_data, eval__params=of_data, task__on_bad_example="skip",
    )
    with tiny.one_device(), contextlib.redirect_stdout(io.StringIO()) as out:
        train.run(config, str(workdir), profile_steps={2})
    return Compact(workdir, data, out.getvalue())


def test_components_of_rewards_and_bad_examples_are_recorded(compact):
    records = compact.lines("train")
    assert len(records) == 2
    for record in records:
        parts = [record[f"reward/component/{name}"] for name in ("closeness", "length", "overlong")]
        assert sum(parts) == pytest.approx(record["reward/mean"], abs=1e-5) and parts[2] < 0
    assert [r["data/bad_examples"] for r in compact.lines("train")] == [2, 2]
    assert {r["eval/bad_examples"] for r in compact.lines("eval")} == {2}
    for data in ("training data", "held-out data"):
        said = f"{data}: 2 of 10 examples are left out:\n- {compact.data}:9: the line is not"
        assert said in compact.told


def test_logits_of_a_large_batch_are_refused_before_anything_is_made():
    config = tiny.config(correction__masks="trm(trm_delta=0.1)", rollout__prompts=1_000_000)
    with pytest.raises(ValueError, match=r"'trm' needs logits.* numbers per batch, and at most 268,435,456"):
        train.build(config)


def test_profiled_steps_leave_a_trace_with_named_phases(compact):
    assert [p.name for p in (compact.workdir / "profile").iterdir()] == ["step2"]
    [trace] = (compact.workdir / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for phase in (b"sync", b"rollout", b"score", b"update", b"step"):
        assert phase in content


def test_a_compact_record_and_an_unknown_sink(compact, tmp_path):
    for line in compact.lines("train"):
        assert "reward/mean" in line and "mismatch/tv_seq" not in line
        assert len(json.dumps(line)) < 1500
    with pytest.raises(ValueError, match="metrics.sinks names 'wandbb'; choose among trackio, wandb"):
        tiny.run(tmp_path / "other", metrics__sinks=("wandbb",))
