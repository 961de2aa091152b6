"""A batch whose gradient is accumulated from parts as they arrive."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import methods
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner.arriving import _joined, accumulation_blocker, update_arriving
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from tests import tiny
from tests.learner.trainer_test import fake_samples

pytestmark = pytest.mark.compiles


@pytest.mark.cases("dense")
@pytest.mark.parametrize("settings", [
    dict(),
    dict(correction__aggregation="seq-mean-token-mean", correction__centre="behav",
         correction__weight="none"),
    dict(train__pack_length=16, train__microbatch_rows=2),
    dict(correction__kl_coeff=0.05, correction__entropy_coeff=0.01, correction__masks="veto",
         correction__rejected_in_denominator=True),
    dict(metrics__diagnostics_every=1),
    dict(correction__preset="factored"),
], ids=["dense", "sequences", "packed", "kl", "diagnosed", "factored"])
def test_any_order_of_arrival_gives_the_update_of_the_whole_batch(settings):
    made = tiny.setup(train__minibatches=1, train__epochs=1, rollout__schedule="periodic", **settings).training
    trainer = Trainer(made)
    assert accumulation_blocker(made) is None
    batch = fake_samples(vocab_size=0)
    groups = sorted({s.group for s in batch})
    state = lambda: initial_state(made, initial_params(made))
    start = state()
    rows = trainer.score(start, batch, {0: start["policy"].params})
    whole, rows, measured = trainer.update(start, rows, 1, 0)
    for order in (groups, groups[::-1], [1, 3, 0, 2]):
        parts = [[s for s in batch if s.group == g] for g in order]
        begun = state()
        found, drawn, found_rows, values = update_arriving(
            trainer, begun, iter([parts[0] + parts[1], *parts[2:]]), {0: begun["policy"].params},
            1, 0,
        )
        assert [s.group for s in drawn] == sorted(s.group for s in batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
        jax.tree.map(close, found["policy"].params, whole["policy"].params)
        for name in ("logp_old", "adv", "mask"):
            close(found_rows[name], rows[name])
        assert measured.keys() - values.keys() <= {
            n for n in measured if n.startswith(("packing/", "train/", "control/"))
        }
        has_diagnostics = any(name.startswith("variance_proxy/") for name in values)
        assert has_diagnostics == ("metrics__diagnostics_every" in settings)
        for name in values.keys() & measured.keys():
            np.testing.assert_allclose(
                values[name], measured[name], rtol=1e-3, atol=1e-5, err_msg=name
            )


def trained_on(made, batch, monkeypatch):
    """The advantage of each sample in the gradients, and that in the record, by id."""
    trainer, seen = Trainer(made), {}
    credit = trainer.credit

    def watched(rows):
        fields, metrics = credit(rows)
        advs, found = np.asarray(fields["adv"]), {}
        for group, adv, is_sampled in zip(rows["group"], advs, rows["sampled"], strict=True):
            found.setdefault(int(group), []).append(float(adv[is_sampled][0]))
        seen.update(found | seen)  # the last call measures the whole batch
        return fields, metrics

    monkeypatch.setattr(trainer, "credit", watched)
    state = initial_state(made, initial_params(made))
    groups = sorted({s.group for s in batch})
    parts = [[s for s in batch if s.group == g] for g in groups]
    rows = update_arriving(trainer, state, iter(parts), {0: state["policy"].params}, 1, 0)[2]
    recorded = {}
    for group, adv, is_sampled in zip(rows["group"], rows["adv"], rows["sampled"], strict=True):
        recorded.setdefault(int(group), []).append(float(adv[is_sampled][0]))
    return seen, recorded


def test_no_group_is_cut_by_micro_batches(monkeypatch):
    """Micro-batches of four and groups of six: the first group alone is one and a half of them."""
    made = tiny.setup(
        train__minibatches=1, train__epochs=1, rollout__schedule="periodic", rollout__group_size=6,
        rollout__prompts=2, train__microbatch_rows=4, mesh__train=(1, 1, 1, 1, 1),
    ).training
    batch = [dataclasses.replace(s, group=i // 6) for i, s in enumerate(fake_samples(12))]
    seen, recorded = trained_on(made, batch, monkeypatch)
    assert seen.keys() == recorded.keys()
    for group in seen:
        np.testing.assert_allclose(seen[group], recorded[group], rtol=1e-5)


@pytest.mark.all
@pytest.mark.parametrize("name", [n for n in methods.TABLES["advantage"] if n != "gae"])  # has a critic
def test_advantages_of_parts_are_those_of_the_batch_or_wait_for_it(name):
    """Two groups of three and one without any reward, one after the other and together."""
    rng, group, mask = np.random.default_rng(0), np.repeat([0, 1, 2], 3), np.ones((9, 2), bool)
    rewards = np.append(rng.random(6), [0.0] * 3).astype(np.float32)
    shapes = {"greedy_rewards": (9,), "grad_norms": (9,), "reward_components": (9, 3)}
    fields = {n: rng.random(shapes.get(n, (9, 2)), np.float32) for n in methods.needs("advantage", name)}
    parameters = {"oapl": {"oapl_beta_value": 1.0}}.get(name, {})
    function = methods.function("advantage", name)

    def of(rows):
        own = {n: x[rows] for n, x in fields.items()} | parameters
        return np.asarray(function(rewards[rows], mask[rows], group[rows], **own))

    parts = np.concatenate([of(group == g) for g in range(3)])
    assert np.allclose(parts, of(group >= 0), rtol=1e-4) == (not methods.traits("advantage", name).of_batch)


def test_a_part_without_a_token_has_padding_for_what_others_recorded():
    full = {"mask": np.ones((1, 2), bool), "kept": np.ones((1, 2, 3), np.int32)}
    rows = _joined([full, {"mask": np.zeros((2, 2), bool)}], np.array([2, 0, 1]))
    assert rows["kept"].shape == (3, 2, 3) and rows["kept"].dtype == np.int32
    assert (rows["kept"][1] == 1).all() and (rows["kept"][[0, 2]] == FIELDS["kept"].padding).all()
    assert rows["mask"].tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize("changes, reason", [
    (dict(), None),
    (dict(correction__advantage="batch_mean"), "the advantage batch_mean looks at all groups of the batch"),
    (dict(train__fuse_old_logp="never"), "train.fuse_old_logp is never"),
    (dict(correction__masks="clip_cov", correction__rejected_in_denominator=True),
     "the mask clip_cov ranks the tokens of the batch"),
    (dict(correction__aggregation="prompt-mean"),
     "the aggregation prompt-mean counts the tokens of each prompt in the batch"),
    (dict(correction__environment_ce_coeff=0.1, **tiny.EPISODES),
     "the cross-entropy of environment tokens is a mean over those of the batch"),
    (dict(correction__objective="kl_cov"), "the objective kl_cov ranks the tokens of the batch"),
    (dict(correction__centre="behav", correction__objective="reinforce", correction__batch_normalize=True,
          train__pack_length=16, train__microbatch_rows=16),
     "weights are divided by their mean over the batch"),
    (dict(correction__objective="clip_cov"), "clip_cov samples at random from the whole batch"),
    (dict(correction__advantage="gae", rollout__group_size=1, rollout__prompts=16),
     "the critic is updated after the policy"),
    (dict(correction__controllers="ess_scale"), "ess_scale looks at the batch before its update"),
    (dict(correction__controllers="gradient_alignment(gac_low=0.1, gac_high=0.9)"), None),
])
def test_what_keeps_a_learner_waiting_for_the_whole_batch(changes, reason):
    settings = dict(rollout__schedule="periodic", train__minibatches=1, train__epochs=1)
    assert accumulation_blocker(tiny.setup(**settings | changes).training) == reason
