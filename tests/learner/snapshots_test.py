"""The weights that drew old tokens: kept, let go, put back; and what the learner makes of them."""

import dataclasses
import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.doctor.case import THRESHOLDS
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.learner import snapshots
from jaxrl_tis.learner.snapshots import (
    Average, ReplicaSnapshots, RingSnapshots, averaged, num_snapshots,
)
from jaxrl_tis.learner.state import abstract_state, initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.record import checkpoint
from jaxrl_tis.rollouts.groups import Sample
from tests import tiny
from tests.record.checkpoint_test import assert_same

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("where arrays lie; a run: flax, optax, orbax and XLA together"),
]

# Three versions draw two tokens each.
INVARIANT = dict(
    model__numerics="invariant", engine__quantization="none", rollout__max_new_tokens=6,
    rollout__schedule="areal(staleness=2)", engine__slots=16, engine__prefill_batch=16,
    rollout__temperature=1.0, metrics__diagnostics_every=1,
)


def weights(value, dtype="float32"):
    return {"a": jnp.full((4, 2), value, dtype), "b": {"c": jnp.full(8, value, dtype)}}


def ring(count=2, **options):
    return RingSnapshots(count, snapshots.num_bytes(weights(0.0)), **{"max_bytes": 1e9, **options})


# Snapshots


@pytest.mark.parametrize("staleness", [1, 4])
def test_as_many_snapshots_as_versions_can_be_in_a_batch(staleness):
    kept = ring(count=num_snapshots(float(staleness)))
    for version in range(9):
        kept.publish(weights(float(version)), version)
        assert all(u in kept for u in range(max(0, version - staleness), version + 1))
    assert len(kept) == staleness + 1


def test_without_a_bound_on_staleness_no_number_is_enough():
    with pytest.raises(ValueError, match="set rollout.snapshots, or rollout.old_logp_source"):
        num_snapshots(float("inf"))


def test_a_ring_keeps_the_newest_and_drops_the_oldest():
    kept = ring(count=2)
    for version in (0, 1, 4):
        kept.publish(weights(float(version)), version)
    assert list(kept) == [1, 4] and len(kept) == 2 and 0 not in kept
    assert_same(kept[1], weights(1.0))
    with pytest.raises(KeyError):
        kept[0]
    with pytest.raises(ValueError, match="version 3 comes after 4"):
        kept.publish(weights(3.0), 3)


def test_the_newest_is_the_policy_itself_until_an_update_donates_it():
    kept, policy = ring(), weights(3.0)
    kept.publish(policy, 7)
    assert kept[7] is policy
    after = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(policy)
    assert policy["a"].is_deleted() and not after["a"].is_deleted()
    assert_same(kept[7], weights(3.0))
    assert kept[7]["a"].sharding.memory_kind == after["a"].sharding.memory_kind


def test_a_snapshot_lies_in_host_memory_and_comes_back_where_it_was():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    policy = {"w": jax.device_put(jnp.arange(16.0), sharding)}
    kept = ring()
    kept.publish(policy, 0)
    kept.publish(weights(1.0), 1)
    [on_host] = jax.tree.leaves(kept.state()[0]["0"])
    assert on_host.sharding.memory_kind == "pinned_host"
    assert kept[0]["w"].sharding == policy["w"].sharding
    np.testing.assert_array_equal(kept[0]["w"], policy["w"])


def test_too_many_bytes_are_refused_with_all_numbers():
    # 16 float32 are 64 bytes
    words = r"3 snapshots of 64 bytes .* are 192 bytes, and rollout.snapshot_gib allows 191"
    with pytest.raises(ValueError, match=words):
        ring(count=3, max_bytes=191.0)
    ring(count=3, max_bytes=192.0)
    with pytest.raises(ValueError, match="above 0"):
        ring(count=0)


def trajectory(id, versions):
    n = len(versions)
    zeros = np.zeros(n, np.float32)
    return Trajectory(
        id, np.array([1, 4], np.int32), np.arange(3, 3 + n, dtype=np.int32), zeros, zeros, zeros,
        np.array(versions, np.int32), "stop", 0, 0, "none", 1.0,
    )


def replica(max_sequences=2):
    """One whose learner gives every token the value of the weights, plus its position."""
    value = lambda params, ts: [
        np.arange(len(t.tokens), dtype=np.float32) + float(params["a"][0, 0]) for t in ts
    ]
    return ReplicaSnapshots(64, 64.0, value, max_sequences)


def test_a_replica_scores_what_its_weights_drew_and_gives_it_out_once():
    found = replica()
    found.publish(weights(100.0), 0)
    found.add_logps([trajectory("x", [0, 0])])
    found.publish(weights(200.0), 1)
    found.add_logps([trajectory("x", [0, 0, 1]), trajectory("y", [1])])
    assert list(found) == [1]
    batch = [trajectory("y", [1]), trajectory("x", [0, 0, 1, 2]), trajectory("z", [2])]
    y, x, z = found.pop_logps([batch[0], trajectory("x", [0, 0, 1]), batch[2]])
    np.testing.assert_array_equal(y, [200])
    np.testing.assert_array_equal(x, [100, 101, 202])
    found.add_logps([trajectory("u", [1, 1, 1])])
    found.publish(weights(300.0), 2)
    found.add_logps([trajectory("u", [2])])  # started again
    np.testing.assert_array_equal(found.pop_logps([trajectory("u", [2])])[0], [300])
    assert np.isnan(z).all() and np.isnan(found.pop_logps(batch[:1])[0]).all()


def test_a_replica_keeps_a_bounded_number_of_sequences():
    found = replica(max_sequences=2)
    found.publish(weights(0.0), 0)
    for id in "abc":
        found.add_logps([trajectory(id, [0])])
    a, b, c = found.pop_logps([trajectory(id, [0]) for id in "abc"])
    assert np.isnan(a[0]) and b[0] == c[0] == 0


@pytest.mark.parametrize("has_log_probs", [False, True])
@pytest.mark.parametrize("make", [ring, replica, snapshots.NewestSnapshots])
def test_what_is_kept_survives_a_checkpoint(make, has_log_probs, tmp_path):
    before, after = make(), make()
    for version in (3, 5):
        before.publish(weights(float(version), "bfloat16"), version)
        before.add_logps([trajectory("x", [3, 5]), trajectory("y", [5])][: 2 * has_log_probs])
    arrays, meta = before.state()
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, {"step": jnp.ones(1), **arrays}, json.loads(json.dumps(meta)))
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"step": jnp.ones(1), "params": weights(0.0, "bfloat16")},
        )
        wanted = {"step": abstract["step"], **after.abstract(meta, abstract["params"])}
        restored, meta = checkpoints.restore(wanted)
    restored.pop("step")
    after.restore(restored, meta)
    assert list(after) == [v for v in before if make is not snapshots.NewestSnapshots]
    for version in after:
        assert_same(after[version], before[version])
    batch = [trajectory("x", [3, 5]), trajectory("y", [5])]
    for x, y in zip(after.pop_logps(batch) or [], before.pop_logps(batch) or [], strict=True):
        np.testing.assert_array_equal(x, y)


# Averages


def test_an_average_is_its_closed_form():
    """centre 1: decay 1/2. p = 1, 3, 7: (1/4 + 3/2 + 7) / (1/4 + 1/2 + 1) = 8.75 / 1.75 = 5."""
    average = Average.of(weights(1.0, "bfloat16"))
    for value in (3.0, 7.0):
        average = averaged(average, weights(value, "bfloat16"), 1.0)
    np.testing.assert_allclose(average.mean["b"]["c"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(average.weight, 1.75)
    assert average.mean["a"].dtype == jnp.float32
    assert average.params(like=weights(0.0, "bfloat16"))["a"].dtype == jnp.bfloat16


def test_the_centre_is_the_mean_age():
    decay = 1 - 1 / (10 + 1)
    age = np.arange(1000)
    assert np.average(age, weights=decay**age) == pytest.approx(10)
    average = Average.of(weights(0.0))
    for value in range(1, 400):
        average = averaged(average, weights(float(value)), 10.0)
    np.testing.assert_allclose(average.mean["a"], 399 - 10, rtol=1e-5)


# Batches of several versions, drawn by the engine


@functools.cache
def drawn(**changes):
    """(setup, trainer, the policies of versions 0, 1, 2, a ring and a replica that have seen how
    they drew, the samples)."""
    setup = tiny.setup(**INVARIANT, **changes)
    with tiny.one_device():
        trainer = Trainer(setup.training)
    first = initial_params(setup.training)
    policies = [jax.tree.map(lambda x, v=v: x * (1 + 0.4 * v), first) for v in range(3)]
    kept = trainer.weight_snapshots()
    size = snapshots.num_bytes(first)
    scoring = ReplicaSnapshots(size, size, trainer.log_probs, 16)
    scheduler = setup.scheduler(setup.engine, None, 0)
    sampling = SamplingParams(max_tokens=6, stop_ids=tuple(setup.tokenizer.eos_ids))
    requests = {
        str(i): Request(str(i), np.array([1, 4, 13, 5, 15][: 3 + i % 3]), 0, sampling)
        for i in range(16)
    }
    done, live = {}, dict(requests)
    for version, params in enumerate(policies):
        scheduler.set_params(setup.serving_params(params, version), version)
        for request in live.values():
            scheduler.add(request)
        ended = []
        while scheduler.pending:
            ended += scheduler.step()
            longest = max((len(x) for x in scheduler.drawn(live).values()), default=0)
            if version < 2 and longest >= 2 * (version + 1):
                ended += scheduler.pause("abort")
        for old in (kept, scoring):
            old.publish(params, version)
            old.add_logps(ended)
        done |= {t.id: t for t in ended if t.stop_reason != "abort"}
        live = {
            t.id: dataclasses.replace(requests[t.id], partial=t)
            for t in ended if t.stop_reason == "abort"
        }
    samples = [
        Sample(done[id], {}, "", 0.0, float(i % 3), i // 4) for i, id in enumerate(requests)
    ]
    return setup, trainer, policies, kept, scoring, samples


def state_of(setup, params):
    copied = jax.tree.map(jnp.copy, params)
    return initial_state(setup, copied)


@pytest.mark.all
def test_sequences_are_of_several_versions():
    *_, samples = drawn()
    spans = [set(s.trajectory.version.tolist()) for s in samples]
    assert {0, 1, 2} in spans and sum(map(len, spans)) > 2 * len(spans)


@pytest.mark.all
@pytest.mark.cases("changes1")
@pytest.mark.parametrize("changes", [{}, {"train__pack_length": 128}])
def test_the_ring_scores_every_segment_at_the_weights_that_drew_it(changes):
    """In invariant numerics sampler and learner agree bit by bit: k is 1 wherever a token was drawn,
    and k r is pi / mu."""
    setup, trainer, policies, kept, _, samples = drawn(**changes)
    state = state_of(setup.training, policies[2])
    rows = trainer.score(state, samples, kept)
    mask = rows["mask"]
    np.testing.assert_array_equal(rows["logp_old"][mask], rows["logp_behav"][mask])
    pi = trainer.log_probs(policies[2], [s.trajectory for s in samples])
    k = np.exp(rows["logp_old"] - rows["logp_behav"])[mask]
    r = np.exp(rows["logp_prox"] - rows["logp_old"])[mask]
    np.testing.assert_allclose(k * r, np.exp(np.concatenate(pi) - rows["logp_behav"][mask]), rtol=1e-6)
    assert np.abs(r - 1)[rows["version"][mask] < 2].max() > 0.05
    _, _, metrics = trainer.update(state, rows, 1, 2)
    assert metrics["mismatch/engine/log_ratio_abs_mean"] == 0
    assert metrics["mismatch/staleness/log_ratio_abs_mean"] > 0.01
    assert metrics["old_logp/versions"] == 3


def test_a_replica_knows_the_same_log_probs():
    setup, trainer, policies, kept, scoring, samples = drawn()
    state = state_of(setup.training, policies[2])
    known = scoring.pop_logps([s.trajectory for s in samples])
    assert not any(np.isnan(x).any() for x in known)
    with mock.patch.object(trainer, "_score", wraps=trainer._score) as score:
        rows = trainer.score(state, samples, {}, known)
    assert score.call_count == 1  # that of logp_prox
    exact = trainer.score(state, samples, kept)
    mask = rows["mask"]
    np.testing.assert_array_equal(rows["logp_old"][mask], exact["logp_old"][mask])
    known[3][-1] = np.nan
    with pytest.raises(ValueError, match=r"weights of version \d, and only those of  are kept"):
        trainer.score(state, samples, {}, known)


@pytest.mark.all
def test_weights_of_another_version_are_seen():
    """The negative control: snapshots that are one version off show as the engine's gap, beyond what
    the doctor takes for a bug at equal weights."""
    setup, trainer, policies, kept, _, samples = drawn()
    measured = {}
    for name, sampled_by in {
        "right": kept, "wrong": {0: kept[1], 1: kept[2], 2: kept[2]},
    }.items():
        state = state_of(setup.training, policies[2])
        rows = trainer.score(state, samples, sampled_by)
        _, _, measured[name] = trainer.update(state, rows, 1, 2)
    gap = {name: m["mismatch/engine/log_ratio_abs_mean"] for name, m in measured.items()}
    assert gap["right"] == 0 and gap["wrong"] > 0.01
    assert measured["right"]["rollout_corr/kl"] == 0
    assert measured["wrong"]["rollout_corr/kl"] > THRESHOLDS["kl_bug"]
    pearson = measured["wrong"]["training/rollout_actor_probs_pearson_corr"]
    assert pearson < THRESHOLDS["pearson_broken"]


@pytest.mark.all
@pytest.mark.parametrize("changes, micro_batches", [
    # Version 0 drew of 3 rows and version 1 of 9; a micro-batch has 4 rows of one sequence each, or a
    # row of 128 tokens.
    ({}, [4, 1, 3]), ({"train__pack_length": 128, "train__microbatch_rows": 1}, [2, 1, 1]),
])
def test_only_rows_with_tokens_of_a_version_are_scored_for_it(changes, micro_batches):
    setup, trainer, policies, *_, samples = drawn(**changes)
    state = state_of(setup.training, policies[2])
    first = lambda i: 0 if i in (2, 7, 11) else 1 if i < 12 else 2
    mixed = [
        dataclasses.replace(s, trajectory=dataclasses.replace(
            s.trajectory, version=np.where(np.arange(len(s.trajectory.tokens)) == 0, first(i), 2)
            .astype(np.int32)
        )) for i, s in enumerate(samples)
    ]
    by_version = {0: policies[0], 1: policies[1], 2: state["policy"].params}
    seen, score = [], trainer._score

    def spy(params, micro):
        seen.append(np.asarray(micro["mask"]))
        return score(params, micro)

    with mock.patch.object(trainer, "_score", spy):
        rows = trainer.score(state, mixed, by_version)
    assert [int(m.any((1, 2)).sum()) for m in seen] == micro_batches
    assert len({m.shape for m in seen}) == 1  # one program
    whole = [trainer.log_probs(p, [s.trajectory for s in mixed]) for p in by_version.values()]
    for row, s, *logps in zip(rows["logp_old"], mixed, *whole, strict=True):
        t = s.trajectory
        drawn_at = row[len(t.prompt) : len(t.prompt) + len(t.tokens)]
        np.testing.assert_array_equal(drawn_at, np.choose(t.version, logps))
    _, _, metrics = trainer.update(state, rows, 1, 2)
    assert metrics["old_logp/recomputed_sequences"] == 3 + 9


@pytest.mark.all
def test_the_policy_can_stand_in_for_all_versions():
    """With the weight of the objective itself, which needs no more."""
    setup = tiny.setup(**INVARIANT, rollout__old_logp_source="none", correction__preset="async")
    with tiny.one_device():
        trainer = Trainer(setup.training)
    _, _, policies, _, _, samples = drawn()
    kept = trainer.weight_snapshots()
    assert isinstance(kept, snapshots.NewestSnapshots) and len(kept) == 0
    state = state_of(setup.training, policies[2])
    rows = trainer.score(state, samples, kept)
    np.testing.assert_array_equal(rows["logp_old"], rows["logp_prox"])
    _, _, metrics = trainer.update(state, rows, 1, 2)
    assert metrics["old_logp/versions"] == 3 and metrics["old_logp/recomputed_sequences"] == 0
    assert metrics["mismatch/engine/log_ratio_abs_mean"] > 0.01  # with the staleness in it


@pytest.mark.parametrize("changes, kind", [
    (dict(rollout__schedule="sync"), snapshots.NewestSnapshots),
    (dict(rollout__schedule="periodic"), snapshots.NewestSnapshots),
    (dict(rollout__schedule="one_step"), RingSnapshots),
    (dict(rollout__old_logp_source="replica"), ReplicaSnapshots),
    (dict(rollout__old_logp_source="ewma"), snapshots.NewestSnapshots),
])
def test_a_run_makes_what_its_config_says(changes, kind):
    setup = tiny.setup(**INVARIANT | changes)
    with tiny.one_device():
        assert isinstance(Trainer(setup.training).weight_snapshots(), kind)


def test_too_many_snapshots_are_refused_before_anything_is_drawn():
    setup = tiny.setup(**INVARIANT, rollout__snapshot_gib=1e-6)
    with tiny.one_device(), pytest.raises(ValueError, match="3 snapshots .* allows 1,073"):
        Trainer(setup.training).weight_snapshots()


@pytest.mark.all
def test_an_average_of_policies_is_the_centre_and_stands_in():
    setup = tiny.setup(**INVARIANT, rollout__old_logp_source="ewma")
    with tiny.one_device():
        trainer = Trainer(setup.training)
    *_, samples = drawn()
    state = state_of(setup.training, initial_params(setup.training))
    described = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_state(setup.training))
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    steps, train_step = [jax.device_get(state["policy"].params)], trainer._train_step

    def spy(policy, minibatch, base=None):
        policy, *rest = train_step(policy, minibatch)
        steps.append(jax.tree.map(np.array, policy.params))
        return policy, *rest

    rows = trainer.score(state, samples, snapshots.NewestSnapshots())
    with mock.patch.object(trainer, "_train_step", spy):
        state, _, _ = trainer.update(state, rows, 1, 2)
    assert len(steps) == 5  # 2 epochs of 2 minibatches
    decays = (10 / 11) ** np.arange(4, -1, -1)
    expected = jax.tree.map(lambda *p: np.average(np.stack(p), axis=0, weights=decays), *steps)
    for mean, x in zip(*map(jax.tree.leaves, (state["ewma"].mean, expected)), strict=True):
        np.testing.assert_allclose(mean, x, rtol=1e-5, atol=1e-7)
    assert not np.allclose(state["ewma"].mean["embed"], steps[-1]["embed"], rtol=1e-5)
    rows = trainer.score(state, samples, snapshots.NewestSnapshots())
    at_mean = trainer.log_probs(state["ewma"].mean, [s.trajectory for s in samples])
    np.testing.assert_array_equal(rows["logp_prox"][rows["mask"]], np.concatenate(at_mean))
    np.testing.assert_array_equal(rows["logp_old"], rows["logp_prox"])


@pytest.mark.all
@pytest.mark.cases("changes1")
@pytest.mark.parametrize("changes", [
    dict(correction__controllers="ess_scale"),
    dict(correction__controllers="length_surge(surge_cooldown=2, surge_floor=0.1)"),
    dict(correction__controllers="gradient_alignment(gac_low=0.1, gac_high=0.9)"),
    dict(correction__advantage="opob"),
])
def test_controllers_and_opob_take_batches_of_several_versions(changes):
    setup = tiny.setup(**INVARIANT, **changes)
    with tiny.one_device():
        trainer = Trainer(setup.training)
    _, _, policies, kept, _, samples = drawn()
    state = state_of(setup.training, policies[2])
    rows = trainer.score(state, samples, kept)
    state, rows, metrics = trainer.update(state, rows, 1, 2)
    assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 2
    assert np.isfinite(metrics["actor/pg_loss"]) and metrics["actor/grad_norm"] > 0
    if "ess_scale" in changes.get("correction__controllers", ""):
        log_w = np.where(rows["mask"], rows["logp_prox"] - rows["logp_behav"], 0).sum(axis=1)
        share = np.exp(log_w).mean() ** 2 / np.exp(2 * log_w).mean()
        assert metrics["control/lr_scale"] == pytest.approx(share**0.5, rel=1e-4)
        assert share < 0.9999  # the sampler is the learner's program: all of it is staleness
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state["policy"].params, policies[2])
    assert any(jax.tree.leaves(moved))
