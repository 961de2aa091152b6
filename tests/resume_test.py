"""An interrupted run ends with the bits of the uninterrupted one, wherever it was cut."""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import pathlib
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis import export, train
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.learner.warmup import warm_up
from jaxrl_tis.record import checkpoint, provenance
from jaxrl_tis.rollouts.synchronous import SyncSource
from jaxrl_tis.runtime.cli import Interrupted
from jaxrl_tis.runtime.interrupt import Interrupt
from tests import tiny

pytestmark = pytest.mark.compiles

CRITIC = dict(
    correction__advantage="gae", correction__kl_coeff=0.05,
    correction__objective="r2vpo(r2vpo_lambda=0.5)",
    correction__controllers=(
        "ess_scale & length_surge(surge_cooldown=2, surge_floor=0.1) "
        "& adaptive_kl(kl_target=0.001, kl_horizon=64.0) "
        "& r2vpo_dual(r2vpo_bound=0.0, r2vpo_step=1.0) "
        "& gradient_alignment(gac_low=0.2, gac_high=0.95) "
        "& layerwise_perturbation(perturb_std=0.01, perturb_lr=0.05)"
    ),
)
COUNTS = ("reward/dropped", "reward/errors", "reward/non_finite", "reward/timeouts")
_parts, _update = SyncSource.parts, Trainer.update


class Cut(Exception):
    """What the tests stop a run with."""


def without_counts(records):
    return [{k: v for k, v in r.items() if k not in COUNTS} for r in records]


def final_state(workdir, **overrides):
    """Everything in the newest checkpoint, and its meta."""
    setup = tiny.setup(**overrides)
    with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
        assert checkpoints.latest() == tiny.config(**overrides).steps
        return checkpoints.restore(abstract_state(setup.training))


def assert_same_run(workdir, reference=None, **overrides):
    """Every metric and every bit of the state of the uninterrupted run."""
    reference = reference or tiny.finished(**overrides)
    ours, theirs = tiny.lines(workdir), tiny.lines(reference)
    assert [(r["step"], r["phase"]) for r in ours] == [(r["step"], r["phase"]) for r in theirs]
    assert without_counts(ours) == without_counts(theirs)
    (state, meta), (expected, expected_meta) = (
        final_state(w, **overrides) for w in (workdir, reference)
    )
    assert meta == expected_meta
    for (path, a), (_, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (state, expected)), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@contextlib.contextmanager
def cut_at(step, how):
    """Stops a run while step `step` samples (a signal, an exception) or once it has updated."""

    def collect(self, now):
        if now == step:
            if how is Cut:
                raise Cut
            os.kill(os.getpid(), how)
        return _parts(self, now)

    def update(self, state, rows, now, version):
        out = _update(self, state, rows, now, version)
        if now == step:
            raise Cut
        return out

    if how == "after update":
        patch = mock.patch.object(Trainer, "update", update)
    else:
        patch = mock.patch.object(SyncSource, "parts", collect)
    with patch, pytest.raises(Cut if how in (Cut, "after update") else Interrupted):
        yield


@dataclasses.dataclass
class OftenCut:
    """A workdir, what its runs printed, and the newest checkpoint after each."""

    folder: pathlib.Path
    told: list[str] = dataclasses.field(default_factory=list)
    saved: list[int | None] = dataclasses.field(default_factory=list)

    def run(self):
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                tiny.run(self.folder)
        finally:
            self.told.append(out.getvalue())
            with checkpoint.Checkpoints(self.folder, keep=2) as checkpoints:
                self.saved.append(checkpoints.latest())


@pytest.fixture(scope="module")
def often_cut(tmp_path_factory):
    """One workdir stopped before step 1, by Ctrl-C in step 1, in step 4, and by SIGTERM in 4."""
    often = OftenCut(tmp_path_factory.mktemp("cut") / "run")
    with cut_at(1, Cut):
        often.run()
    with cut_at(1, signal.SIGINT):
        often.run()
    assert [r["step"] for r in tiny.lines(often.folder) if r["phase"] == "train"] == [1]
    with cut_at(4, "after update"):
        often.run()
    # Step 3 is on record, but the newest checkpoint is that of step 2.
    assert tiny.lines(often.folder)[-1]["step"] == 3
    with cut_at(4, signal.SIGTERM):
        often.run()
    often.run()
    return often


def test_a_run_cut_at_four_places_is_the_uninterrupted_run(often_cut):
    assert_same_run(often_cut.folder)


def test_failed_rewards_are_counted_the_same_after_a_resume(often_cut):
    counts = lambda w: [{n: r[n] for n in COUNTS} for r in tiny.lines(w) if r["phase"] == "train"]
    expected = counts(tiny.finished())
    assert any(r["reward/non_finite"] for r in expected)
    assert counts(often_cut.folder) == expected


def test_the_learner_moved_at_every_step():
    """Otherwise equal bits would prove little."""
    train_lines = [r for r in tiny.lines(tiny.finished()) if r["phase"] == "train"]
    assert len(train_lines) == tiny.STEPS
    assert all(r["actor/grad_norm"] > 1e-4 for r in train_lines)


@pytest.mark.all
def test_another_seed_gives_another_run(tmp_path):
    with mock.patch.object(train, "initial_state", side_effect=Cut), pytest.raises(Cut):
        tiny.run(tmp_path, seed=1)
    ours, theirs = tiny.lines(tmp_path)[0], tiny.lines(tiny.finished())[0]
    assert ours["warmup/loss"] != theirs["warmup/loss"]


@pytest.mark.all
def test_with_a_critic_a_reference_and_controllers(tmp_path):
    with cut_at(2, signal.SIGINT):
        tiny.run(tmp_path, **CRITIC)
    with cut_at(4, Cut):
        tiny.run(tmp_path, **CRITIC)
    tiny.run(tmp_path, **CRITIC)
    assert_same_run(tmp_path, **CRITIC)
    state, _ = final_state(tmp_path, **CRITIC)
    assert {"policy", "critic", "reference", "controllers"} == set(state)
    moved = lambda a, b: float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max())
    policy, critic = state["policy"].params, state["critic"].params
    assert moved(policy["embed"], state["reference"]["embed"]) > 1e-3
    assert moved(policy["embed"], critic["decoder"]["embed"]) > 1e-3


@pytest.mark.all
def test_with_episodes_of_an_environment(tmp_path):
    with cut_at(2, signal.SIGINT):
        tiny.run(tmp_path, **tiny.EPISODES)
    with cut_at(4, Cut):
        tiny.run(tmp_path, **tiny.EPISODES)
    tiny.run(tmp_path, **tiny.EPISODES)
    assert_same_run(tmp_path, **tiny.EPISODES)
    records = [r for r in tiny.lines(tmp_path) if r["phase"] == "train"]
    assert all(r["num_turns/max"] > 1 and r["episodes/done"] > 0 for r in records)


SLEEPERS = {
    "plain": {}, "episodes": tiny.EPISODES,
    "rounds": dict(rollout__dynamic_sampling=True, engine__async_scheduling=True),
}


@pytest.mark.all
@pytest.mark.parametrize("overrides", SLEEPERS.values(), ids=SLEEPERS)
def test_a_run_whose_sampler_never_sleeps_is_the_same_run(tmp_path, overrides):
    assert tiny.setup(**overrides).sleeps
    tiny.run(tmp_path, engine__sleep="never", **overrides)
    assert_same_run(tmp_path, tiny.finished(**overrides), **overrides)


@pytest.mark.all
def test_a_base_that_is_quantised_again_at_every_sync_is_the_same_run(tmp_path):
    """Every record: that of step 5 has the losses of the weights after 4 updates."""
    overrides = dict(model__lora="lora(rank=4, alpha=32)")
    assert tiny.setup(**overrides).sleeps
    tiny.run(tmp_path, engine__sleep="never", **overrides)
    assert tiny.lines(tmp_path) == tiny.lines(tiny.finished(**overrides))


@pytest.mark.all
def test_a_run_may_sleep_from_some_step_on(tmp_path):
    with cut_at(3, Cut):
        tiny.run(tmp_path, engine__sleep="never")
    tiny.run(tmp_path)
    assert_same_run(tmp_path)


@pytest.mark.parametrize("overrides", [
    dict(engine__sleep="never"), dict(rollout__schedule="one_step"),
    dict(rollout__replay="uniform(uses=2, most=4)"),
])
def test_a_sampler_does_not_sleep(overrides):
    """It is told not to, has sequences in flight, or samples for a replay."""
    assert not tiny.setup(**overrides).sleeps


@pytest.mark.all
def test_controllers_act_on_every_step():
    records = [r for r in tiny.lines(tiny.finished(**CRITIC)) if r["phase"] == "train"]
    column = lambda name: [r[name] for r in records]
    assert all(0 < scale < 1 for scale in column("control/lr_scale"))
    kl, coeff = column("actor/kl_to_reference"), column("control/kl_coeff")
    variance, dual = column("actor/ratio_variance"), column("control/r2vpo_lambda")
    assert coeff[0] == pytest.approx(0.05) and dual[0] == pytest.approx(0.5)
    assert max(variance) > 0 and coeff[-1] != coeff[0]
    for i in range(len(records) - 1):  # 16 sequences of 64, and a step of 1
        error = min(max(kl[i] / 0.001 - 1, -0.2), 0.2)
        assert coeff[i + 1] == pytest.approx(coeff[i] * (1 + error / 4), rel=1e-5)
        assert dual[i + 1] == pytest.approx(dual[i] + variance[i], rel=1e-5)
    assert column("gac/cosine")[0] != 0
    state, _ = final_state(tiny.finished(**CRITIC), **CRITIC)
    lengths = state["controllers"]["length_surge"].lengths[: len(records)]
    np.testing.assert_allclose(lengths, column("response_length/mean"), rtol=1e-6)


def test_ctrl_c_finishes_the_step_saves_and_says_so(often_cut):
    assert "SIGINT: stopping after this step" in often_cut.told[1]
    assert often_cut.saved[1] == 1
    assert f"continuing {often_cut.folder} after step 1" in often_cut.told[2]


@pytest.mark.all
def test_ctrl_c_during_the_warm_up_starts_no_reinforcement_learning(tmp_path):
    """The warm-up cannot be resumed half way, so it is finished and saved as step 0."""
    def pressed(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return warm_up(*arguments)

    with mock.patch.object(train, "warm_up", pressed), pytest.raises(Interrupted):
        tiny.run(tmp_path)
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 0
    assert not [r for r in tiny.lines(tmp_path) if r["phase"] == "train"]


def test_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(grace=10) as interrupt, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@contextlib.contextmanager
def clock_at(date):
    clock = mock.Mock(datetime=mock.Mock(now=lambda: datetime.datetime.fromisoformat(date)))
    with mock.patch.object(provenance, "datetime", clock):
        yield


@pytest.mark.all
def test_a_template_that_reads_the_clock_gives_the_same_prompts_on_another_day(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    path = export._described(load_tokenizer("char"), tmp_path / "tokenizer")
    (path / "chat_template.jinja").write_text(
        "{{ strftime_now('%d')[1] }}{{ messages[0].content }}"
    )
    own = dict(task__tokenizer=str(path), task__chat=True, task__date="", warmup__steps=2)
    with clock_at("2026-03-04T05:06:07"):
        tiny.run(tmp_path / "whole", steps=2, **own)
        tiny.run(tmp_path / "cut", steps=1, **own)
    with clock_at("2026-03-09"):
        tiny.run(tmp_path / "cut", steps=2, **own)
        tiny.run(tmp_path / "later", steps=2, **own)
    record = lambda name: without_counts(tiny.lines(tmp_path / name))
    of_step = lambda name, step: [r for r in record(name) if r["step"] == step and r["phase"] == "train"]
    assert of_step("cut", 2) == of_step("whole", 2) != of_step("later", 2)
    config = json.loads((tmp_path / "cut" / "config.json").read_text())["config"]
    assert config["task"]["date"] == "2026-03-04T05:06:07"


@pytest.mark.all
def test_checkpoints_of_another_version_of_the_code_are_refused_in_one_line(tmp_path):
    tiny.run(tmp_path, steps=1)
    restore = checkpoint.Checkpoints.restore

    def as_once(self, abstract, optional):
        state, meta = restore(self, abstract, optional=optional)
        return state, {"step": meta["step"], "batches": meta["source"]["batches"]}

    with (
        mock.patch.object(checkpoint.Checkpoints, "restore", as_once),
        pytest.raises(ValueError, match="have no version and source and .*: another version .* a new workdir") as error,
    ):
        tiny.run(tmp_path, steps=2)
    assert "\n" not in str(error.value)
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    assert config["steps"] == 1  # what is refused writes nothing
