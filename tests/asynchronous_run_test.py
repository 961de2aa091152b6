"""Whole runs whose samplers run ahead: a restart has the bits of the run that went on."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_tis import train
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.record import metrics
from jaxrl_tis.record.checkpoint import Checkpoints
from tests import tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]
EXPERTS = dict(
    model__num_experts=4, model__expert_dim=16, model__router="sigmoid",
    engine__record_routes=True,
)
RUNS = {
    "ring": dict(rollout__schedule="areal(staleness=2)"),
    "replica": dict(rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica"),
    "average": dict(rollout__schedule="one_step", rollout__old_logp_source="ewma"),
    "workers": dict(rollout__schedule="laminar(staleness=2, repack=0.9)", rollout__workers=2),
    "verl": dict(rollout__schedule="fully_async(trigger=2, threshold=0.5, partial=True)"),
    # The queue, partial rollouts and replayed groups keep the routes of their tokens.
    "experts, r3": EXPERTS | dict(
        rollout__schedule="areal(staleness=2)", correction__routing="r3",
        rollout__replay="uniform(uses=2)",
    ),
    "experts, r2": EXPERTS | dict(
        rollout__schedule="in_flight(staleness=2)", correction__routing="r2",
    ),
    "experts, replica": EXPERTS | dict(
        rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica",
        correction__routing="keep",
    ),
    # An interrupted episode repeats its answers in another process.
    "episodes": dict(
        rollout__schedule="in_flight(staleness=2)", **tiny.EPISODES
    ),
    "episodes, replica": dict(
        rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica",
        **tiny.EPISODES,
    ),
}


def params(folder, setup):
    with Checkpoints(folder, keep=2) as checkpoints:
        wanted = {"policy": {"params": abstract_state(setup.training)["policy"].params}}
        return checkpoints.restore(wanted, is_part=True)[0]["policy"]["params"]


@pytest.mark.parametrize("name", [
    name if name == "episodes" else pytest.param(name, marks=pytest.mark.all)
    for name in RUNS
])
def test_a_restart_has_the_bits_of_the_run_that_went_on(tmp_path, name, capsys):
    settings = RUNS[name] | dict(
        rollout__update_turns=2, rollout__max_new_tokens=5, eval__every=3, checkpoint__keep=5
    )
    tiny.run(tmp_path / "whole", steps=5, **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in ("4", "5"):
        shutil.rmtree(tmp_path / "cut/checkpoints" / step)
    record = tmp_path / "cut/metrics.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(x for x in lines if json.loads(x)["step"] <= 2))
    tiny.run(tmp_path / "cut", steps=5, **settings)
    assert f"continuing {tmp_path / 'cut'} after step 2" in capsys.readouterr().out
    steps = lambda folder: [r for r in tiny.lines(folder) if r["phase"] == "train"]
    whole, cut = steps(tmp_path / "whole"), steps(tmp_path / "cut")
    assert whole == cut and len(whole) == 5
    assert max(r["training/off_policy/trajectory_staleness_worst/max"] for r in whole) >= 1
    setup = tiny.setup(**settings)
    jax.tree.map(
        np.testing.assert_array_equal, params(tmp_path / "whole", setup),
        params(tmp_path / "cut", setup),
    )


@pytest.mark.all
def test_a_batch_may_be_complete_before_its_step(tmp_path):
    """All sequences end at about one time, and no sync is due, so a step takes no turn."""
    tiny.run(
        tmp_path / "run", rollout__schedule="fully_async(trigger=3, threshold=0)", rollout__update_turns=0,
        engine__slots=64, eval__every=3, steps=4,
    )
    steps = [r for r in metrics.read(tmp_path / "run") if r["phase"] == "train"]
    assert len(steps) == 4 and not all("time/rollout_tokens_per_s" in r for r in steps)


@pytest.mark.all
def test_a_replica_scores_episodes_as_kept_weights_do(tmp_path):
    settings = RUNS["episodes"] | dict(rollout__update_turns=2, rollout__max_new_tokens=5, eval__every=3)

    def run(way):
        tiny.run(tmp_path / way, rollout__old_logp_source=way, **settings)
        return {r["step"]: r for r in tiny.lines(tmp_path / way) if r["phase"] == "train"}

    ring, replica = run("ring"), run("replica")
    assert ring.keys() == replica.keys() and len(ring) == tiny.STEPS
    for step, expected in ring.items():
        assert expected["episodes/given_ratio"] > 0
        same = {n: x for n, x in expected.items() if n.startswith(("actor/", "reward/", "episodes/"))}
        assert {n: replica[step][n] for n in same} == pytest.approx(same, rel=1e-3, abs=1e-5), step
    assert max(r["training/off_policy/trajectory_staleness_worst/max"] for r in ring.values()) >= 1


@pytest.mark.all
def test_a_run_that_is_told_to_stop_within_a_step_loses_no_sample(tmp_path, monkeypatch):
    """It goes on with what was begun: six batches of four groups, none of which comes twice."""
    seen, calls = [], []
    score = train.Trainer.score

    def counted(self, state, samples, *args):
        seen.extend(sorted({s.group for s in samples}))
        return score(self, state, samples, *args)

    def stopped(self):
        calls.append(None)
        if len(calls) == 40:
            raise train.Interrupted

    settings = dict(rollout__schedule="areal(staleness=2)", rollout__update_turns=1, steps=6,
                    eval__every=6, checkpoint__every=6)
    monkeypatch.setattr(train.Trainer, "score", counted)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "heartbeat", stopped)
        with pytest.raises(train.Interrupted):
            tiny.run(tmp_path / "run", **settings)
    assert 0 < len(seen) < 24
    tiny.run(tmp_path / "run", **settings)
    assert len(set(seen)) == len(seen) == 24
