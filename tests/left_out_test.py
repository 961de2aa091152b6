"""Answers that are not trained on: those whose reward failed, and truncated ones where a run asks.

What their update is, under each aggregation, is in aggregation_test.py.
"""

import copy
import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.learner import arriving
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer, sample_metrics
from jaxrl_tis.rollouts.groups import Groups, components
from tests import tiny
from tests.learner.aggregation_test import FAILED, NAN, TRUNCATED, batch
from tests.learner.trainer_test import fake_samples

pytestmark = pytest.mark.compiles

ONE = dict(train__minibatches=1, train__epochs=1, metrics__diagnostics_every=1)
METHODS = {
    "masks": dict(correction__masks="seq_mean_k3(upper=0.5) & veto"),
    "ranks": dict(correction__centre="behav", correction__objective="clip_cov",
                  correction__weight="none"),
    "weights": dict(correction__batch_normalize=True, correction__weight="seq_tis(cap=2.0)",
                    correction__controllers="ess_scale"),
    "groups": dict(correction__objective="quatro(quatro_delta=0.1, quatro_floor=0.01)",
                   correction__advantage="dr_grpo", train__microbatch_rows=16),
    "reward": dict(correction__kl="k1", correction__kl_coeff=0.1, correction__kl_placement="reward",
                   correction__advantage="rloo"),
    "critic": dict(correction__advantage="gae"),
    "components": dict(correction__advantage="gdpo", reward__name="tests.tiny_rewards:parts"),
}


def with_other_text(samples: list, indices) -> list:
    """Samples of other tokens and log-probs at these places, as long as before."""
    def other(trajectory):
        tokens = trajectory.tokens[::-1] + np.int32(1)
        return dataclasses.replace(
            trajectory, tokens=tokens % 12, logp_behav=trajectory.logp_behav - 1
        )

    return [
        dataclasses.replace(s, trajectory=other(s.trajectory)) if i in indices else s
        for i, s in enumerate(samples)
    ]


@functools.cache
def made(changes: tuple):
    setup = tiny.setup(**ONE | dict(changes))
    with tiny.one_device():
        trainer = Trainer(setup.training)
    return trainer, initial_state(setup.training, initial_params(setup.training))


def begin(**changes):
    """(trainer, state that an update may donate)"""
    trainer, first = made(tuple(sorted(changes.items())))
    return copy.copy(trainer), jax.tree.map(jnp.copy, first)


def update(trainer, begun, samples, step=1):
    """(state, rows, metrics) of a step."""
    weights = {0: begun["policy"].params}
    if trainer.setup.schedule.on_arrival and arriving.accumulation_blocker(trainer.setup) is None:
        parts = [list(g) for _, g in itertools.groupby(samples, lambda s: s.group)]
        found, samples, rows, metrics = arriving.update_arriving(
            trainer, begun, parts, weights, step, 0
        )
    else:
        rows = trainer.score(begun, samples, weights)
        found, rows, metrics = trainer.update(begun, rows, step, 0)
    return found, rows, metrics | sample_metrics(samples, rows, trainer.setup.config)


@pytest.mark.all
@pytest.mark.cases("failed-left_out0-masks", "failed-left_out0-critic", "truncated-left_out1-masks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind, left_out", [("failed", FAILED), ("truncated", TRUNCATED)])
def test_what_an_answer_that_is_left_out_says_changes_nothing(method, kind, left_out):
    """Other tokens and log-probs there leave every weight where it was, and no number is NaN."""
    changes = METHODS[method] | dict(train__mask_truncated=True)
    told = []
    for samples in (batch(kind), with_other_text(batch(kind), left_out)):
        trainer, begun = begin(**changes)
        if method == "reward" and kind == "truncated":
            samples = batch(kind)  # the KL of a truncated answer is a part of its reward
        found, rows, metrics = update(trainer, begun, samples)
        told.append((jax.device_get(found["policy"].params), rows, metrics))
    (params, rows, metrics), (others, _, again) = told
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, others)
    is_in = ~np.isin(np.arange(16), left_out)
    assert not rows["mask"][~is_in].any()
    for name, x in metrics.items():
        assert np.isfinite(x), name
    for name in ("actor/grad_norm", "actor/pg_loss", "rollout_corr/kl", "critic/advantages/max"):
        assert again[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    assert metrics["actor/left_out_ratio"] == len(left_out) / 16
    rewards = [s.reward for s in batch(kind) if s.reward == s.reward]
    for name in ("reward/mean", "critic/score/mean"):
        assert metrics[name] == pytest.approx(np.mean(rewards), rel=1e-5), name
    assert metrics["reward/std"] == pytest.approx(np.std(rewards), rel=1e-5)
    assert metrics["response_length/truncated_ratio"] == (kind == "truncated") * len(left_out) / 16


@pytest.mark.cases("fused", "arriving")
@pytest.mark.parametrize("changes", [
    dict(), dict(train__fuse_old_logp="never"), dict(rollout__schedule="periodic"),
    dict(train__pack_length=24, train__minibatches=2, train__epochs=2),
    dict(correction__advantage="gae", correction__controllers="length_surge(surge_cooldown=1, "
         "surge_floor=0.1)"),
], ids=["fused", "scored", "arriving", "packed", "critic"])
def test_a_batch_without_a_reward_leaves_the_state_as_it_is(changes):
    """Bit by bit, also with the momentum and the decay that an update of zeros would apply."""
    trainer, begun = begin(optimizer__weight_decay=0.1, **changes)
    begun, *_ = update(trainer, begun, fake_samples())
    before = jax.device_get(begun)
    nothing = [dataclasses.replace(s, score=NAN, reward=NAN) for s in fake_samples()]
    found, rows, metrics = update(trainer, begun, nothing, step=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), before)
    assert not rows["mask"].any() and metrics["actor/left_out_ratio"] == 1
    assert "reward/mean" not in metrics and all(np.isfinite(x) for x in metrics.values())


@pytest.mark.all
def test_a_minibatch_without_a_reward_is_no_update():
    """Two minibatches of two epochs; seven of the eight answers of one have failed, and then all."""
    trainer, begun = begin(train__minibatches=2, train__epochs=1)
    failed = [
        dataclasses.replace(s, reward=NAN) if i > 3 else s for i, s in enumerate(fake_samples())
    ]
    steps, step = [], trainer._train_step

    def spy(state, minibatch, base=None):
        steps.append(int(np.asarray(minibatch["mask"]).any(-1).sum()))
        return step(state, minibatch)

    trainer._train_step = spy
    rows = trainer.score(begun, failed, {0: begun["policy"].params})
    order = np.random.default_rng((0, 1, 0)).permutation(16).reshape(2, 8)
    counts = [int((part < 4).sum()) for part in order]
    trainer.update(begun, rows, 1, 0)
    assert steps == [n for n in counts if n]


@pytest.mark.all
def test_a_failed_greedy_answer_takes_its_prompt_out_of_the_loss():
    trainer, begun = begin(correction__advantage="remax")
    samples = [
        dataclasses.replace(s, greedy_reward=NAN) if s.group == 1 else s for s in fake_samples()
    ]
    _, rows, metrics = update(trainer, begun, samples)
    np.testing.assert_array_equal(rows["mask"].any(1), np.repeat([True, False, True, True], 4))
    assert np.isfinite(metrics["actor/pg_loss"]) and metrics["actor/left_out_ratio"] == 0.25


def test_components_are_void_by_themselves_or_with_their_reward():
    samples = [dataclasses.replace(s, components=parts, reward=reward) for s, parts, reward in zip(
        fake_samples(3), ({"a": 1.0, "b": NAN}, {"a": 2.0, "b": 3.0, "overlong": 0.0}, {"overlong": -1.0}),
        (1.0, 5.0, NAN), strict=True,
    )]
    found = components(samples)
    np.testing.assert_array_equal(found["a"], [1, 2, NAN])
    np.testing.assert_array_equal(found["b"], [NAN, 3, NAN])
    np.testing.assert_array_equal(found["overlong"], [NAN, 0, NAN])


def test_a_run_says_so_and_goes_on(tmp_path, capsys):
    """The second of three batches has no reward at all."""
    rewarded = Groups.samples

    def samples(self, examples, trajectories):
        found = rewarded(self, examples, trajectories)
        is_second = trajectories[0].id.startswith("2/")
        return [dataclasses.replace(s, score=NAN, reward=NAN) if is_second else s for s in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "samples", samples)
        tiny.run(tmp_path, steps=3, warmup__steps=0, train__minibatches=1, train__epochs=1,
                 metrics__samples_every=1, eval__every=3, checkpoint__every=3)
    assert "step 2: nothing to train on" in capsys.readouterr().err
    first, second, third = (x for x in tiny.lines(tmp_path) if x["phase"] == "train")
    assert "reward/mean" not in second and {"reward/mean", "actor/pg_loss"} <= first.keys() & third.keys()
    lines = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    of_second = [x for x in lines if (x["step"], x["phase"]) == (2, "train")]
    assert [x["reward"] for x in of_second] == [None] * 4
    assert all(x["logp_old"] is None and x["logp_behav"] for x in of_second)
