"""Packed rows: every sequence placed once, and the same update as one sequence a row."""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from configs import default
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.batch_layout import (
    Packer, forward_fields, sequence_lengths, split_by_length, update_fields,
)
from jaxrl_tis.learner.scoring import Learner, make_score
from jaxrl_tis.learner.step import TrainState, _segments, make_packed_weigh, make_train_step
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.validate import validate
from tests import tiny
from tests.learner.correction_test import update_loss

pytestmark = pytest.mark.compiles

B, T, V = 8, 9, 19
CONFIG = ModelConfig(
    family="llama", vocab_size=V, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_dim=24, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=False,
)
LEARNER = Learner(CONFIG, transformer.Program(), max_targets=6, chunk=10)
PACKER = Packer(max_length=T, length=20, microbatch_rows=2, shards=2, max_segments=4)
PACKED = dataclasses.replace(LEARNER, max_targets=20, max_segments=4)
PLAN = Packer(max_length=50, length=128, microbatch_rows=4, shards=2, max_segments=3)


# Placing


def cells(packing):
    """Each sequence's tokens as (row, first, last + 1)."""
    return list(zip(packing.row, packing.offset, packing.offset + packing.lengths, strict=True))


@hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_sequence_stands_once_and_none_is_cut(lengths):
    packing = PLAN.plan(np.array(lengths))
    m, r, t = packing.shape
    assert (m, r, t) == (-(-len(lengths) // 8), 4, 128)  # two of the longest fit a row
    for row in range(m * r):
        inside = sorted(c[1:] for c in cells(packing) if c[0] == row)
        assert len(inside) <= 3
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(inside))
        assert all(0 <= start < end <= t for start, end in inside)
        numbers = sorted(packing.segment[packing.row == row])
        assert numbers == list(range(1, len(inside) + 1))
    assert packing.row.max() < m * r


@hypothesis.given(st.integers(0, 2**31), st.integers(1, 30))
@hypothesis.settings(max_examples=20, deadline=None)
def test_unpacking_gives_back_what_was_packed(seed, count):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 51, count)
    inside = np.arange(50)[None] < lengths[:, None]
    rows = {
        "logp": np.where(inside, rng.normal(size=(count, 50)), np.nan),
        "logits": np.where(inside[..., None], rng.normal(size=(count, 50, 3)), np.nan),
        "version": np.where(inside, 1 + rng.integers(0, 9, (count, 50)), -1),
    }
    packing = PLAN.plan(lengths)
    for name, x in packing.pack(rows).items():
        assert x.shape[:3] == packing.shape and np.isfinite(x).all(), name
        if name in rows:
            kept = inside.reshape(inside.shape + (1,) * (x.ndim - 3))
            np.testing.assert_array_equal(packing.unpack(x, 50), np.where(kept, rows[name], 0))


def test_each_cell_of_a_packed_batch():
    """Lengths 2, 5, 3, 4 into rows of 7: first-fit decreasing gives (5, 2) and (4, 3)."""
    packer = Packer(max_length=5, length=7, microbatch_rows=2, shards=1, max_segments=2)
    tokens = np.array([[1, 2, 9, 9, 9], [3, 4, 5, 6, 7], [8, 1, 2, 9, 9], [3, 4, 5, 6, 9]])
    packing = packer.plan(np.array([2, 5, 3, 4]))
    packed = packing.pack({
        "tokens": tokens, "positions": np.tile(np.arange(5), (4, 1)),
        "lr_scale": np.full(4, 0.5), "current_version": np.full((4, 1), 7),
    })
    assert packing.shape == (2, 2, 7)
    expected = {
        "tokens": [[3, 4, 5, 6, 7, 1, 2], [3, 4, 5, 6, 8, 1, 2]],
        "positions": [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]],
        "segment_ids": [[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2, 2]],
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(packed[name][0], value, err_msg=name)
    assert not packed["segment_ids"][1].any() and not packed["tokens"][1].any()  # an empty one
    np.testing.assert_array_equal(packed["lr_scale"], np.full((2, 2), 0.5))
    np.testing.assert_array_equal(packed["current_version"], np.full((2, 2, 1), 7))
    assert packing.metrics(shards=1) == {
        "packing/rows": 2, "packing/fill_ratio": 1.0, "packing/shard_imbalance": 1.0,
    }


def test_a_value_of_a_sequence_stands_on_each_of_its_tokens():
    """Three sequences of 2, 3 and 2 tokens in two rows of 4: none of the three values is lost, and
    none is taken for a scalar of the step."""
    packer = Packer(max_length=3, length=4, microbatch_rows=2, shards=1, max_segments=2)
    packed = packer.plan(np.array([2, 3, 2])).pack({  # and a micro-batch that stays empty
        "tokens": np.array([[1, 2, 0], [3, 4, 5], [6, 7, 0]]),
        "rewards": np.array([10.0, 20.0, 30.0]),
        "reward_components": np.array([[1, 10], [2, 20], [3, 30]]),
    })
    np.testing.assert_array_equal(packed["tokens"][0], [[1, 2, 6, 7], [3, 4, 5, 0]])
    np.testing.assert_array_equal(packed["rewards"][0], [[10, 10, 30, 30], [20, 20, 20, 0]])
    assert packed["reward_components"].shape == (2, 2, 4, 2)
    np.testing.assert_array_equal(packed["reward_components"][0, 0, :, 1], [10, 10, 30, 30])


def test_a_field_that_is_in_no_table_is_refused_by_name():
    packing = PLAN.plan(np.array([2, 3]))
    with pytest.raises(KeyError, match="called 'scores': give it a line of fields.FIELDS"):
        packing.pack({"scores": np.array([10.0, 20.0])})


def test_padding_is_that_of_the_field():
    packer = Packer(max_length=2, length=4, microbatch_rows=1, shards=1, max_segments=2)
    packed = packer.plan(np.array([2])).pack({
        "tokens": np.array([[7, 8]]), "version": np.array([[3, 3]]),
        "temperature": np.array([[0.5, 0.5]]), "kept": np.array([[[4, -1], [5, 6]]]),
    })
    found = {name: x[0, 0].tolist() for name, x in packed.items()}
    assert found == {
        "tokens": [7, 8, 0, 0], "version": [3, 3, -1, -1], "temperature": [0.5, 0.5, 1, 1],
        "kept": [[4, -1], [5, 6], [-1, -1], [-1, -1]], "segment_ids": [1, 1, 0, 0],
    }


def test_a_sequence_longer_than_planned_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="a sequence has 51 tokens, .* at most 50"):
        PLAN.plan(np.array([3, 51]))


def test_rows_are_whole_blocks():
    packer = Packer.of(length=130, max_length=100, microbatch_rows=4, shards=2)
    assert packer.length == 256 and packer.num_microbatches(9) == 2
    # Each of four context shards has two chunks of whole blocks.
    assert Packer.of(130, 100, 4, 2, context=4).length == 1024


def test_a_row_holds_no_more_sequences_than_it_has_numbers_for():
    packer = Packer.of(length=1024, max_length=8, microbatch_rows=1, shards=1)
    packing = packer.plan(np.full(128, 8))
    assert packing.shape == (2, 1, 1024)
    assert np.bincount(packing.row).tolist() == [64, 64] and packing.segment.max() == 64


def test_tokens_are_balanced_over_shards_and_minibatches():
    rng = np.random.default_rng(0)
    packer = Packer.of(length=1024, max_length=1024, microbatch_rows=16, shards=8)
    lengths = np.minimum(rng.lognormal(5.5, 1, 1024).astype(int) + 2, 1024)
    split = split_by_length(lengths, 4, seed=(0, 1))
    assert sorted(split.ravel()) == list(range(1024))
    tokens = lengths[split].sum(axis=1)
    assert tokens.max() < 1.02 * tokens.mean()
    assert (split != split_by_length(lengths, 4, seed=(0, 2))).any()
    for index in split:
        metrics = packer.plan(lengths[index]).metrics(8)
        assert metrics["packing/shard_imbalance"] < 1.01
        # No micro-batch more than the tokens need.
        assert metrics["packing/rows"] == 16 * -(-lengths[index].sum() // (16 * 1024))


@pytest.mark.parametrize("shards", [4, 8])
def test_shards_of_a_single_row_are_balanced_too(shards):
    """First-fit would leave the last row of eight nearly empty."""
    rng = np.random.default_rng(1)
    packer = Packer.of(1024, 512, microbatch_rows=shards, shards=shards)
    lengths = rng.integers(20, 200, 8 * shards)
    packing = packer.plan(lengths)
    metrics = packing.metrics(shards)
    assert metrics["packing/rows"] == shards
    assert metrics["packing/shard_imbalance"] < 1.05
    assert metrics["packing/fill_ratio"] == lengths.sum() / (shards * 1024)


def test_the_fullest_and_the_emptiest_row_go_to_one_shard():
    # Four rows of one sequence each: 9 and 6 in one shard, 8 and 7 in the other.
    packer = Packer(max_length=9, length=10, microbatch_rows=4, shards=2, max_segments=4)
    packing = packer.plan(np.array([9, 8, 7, 6]))
    np.testing.assert_array_equal(packing.row, [0, 2, 3, 1])
    assert packing.metrics(2)["packing/shard_imbalance"] == 1.0


def test_first_fit_stays_where_even_rows_have_no_place_for_all():
    """Into two rows of 10: 6 4 | 5 3 2 by first-fit; evenly, 6 2 | 5 4 has no place for 3."""
    packer = Packer(max_length=6, length=10, microbatch_rows=2, shards=2, max_segments=4)
    packing = packer.plan(np.array([6, 5, 4, 3, 2]))
    np.testing.assert_array_equal(packing.row, [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(packing.offset, [0, 0, 6, 5, 8])


# The same update


@functools.cache
def params():
    p = transformer.init(CONFIG, jax.random.key(0))
    return jax.device_get({**p, "head": 1.5 * p["head"], "embed": 4.0 * p["embed"]})


@functools.cache
def data():
    """Ragged rows with holes in the masks, turns, groups of two, NaN wherever nothing is meant;
    row 5 has only its prompt, row 7 no token at all."""
    rng = np.random.default_rng(1)
    lengths = np.array([9, 7, 8, 5, 9, 3, 6, 0])
    starts = np.array([3, 2, 4, 4, 3, 3, 1, 0])
    t = np.broadcast_to(np.arange(T), (B, T))
    inside = t < lengths[:, None]
    mask = (t >= starts[:, None]) & inside
    mask[0, 5] = mask[4, 6] = mask[6, 2] = False
    field = lambda mean, scale: np.where(
        mask, rng.normal(mean, scale, (B, T)), np.nan
    ).astype(np.float32)
    fields = {
        "tokens": np.where(inside, rng.integers(0, V, (B, T)), 0).astype(np.int32),
        "positions": t.astype(np.int32), "segment_ids": inside.astype(np.int32), "mask": mask,
        "temperature": np.repeat(rng.uniform(0.6, 1.4, (B, 1)), T, 1).astype(np.float32),
        "turn": np.where(inside, (t - starts[:, None] > 3), 0).astype(np.int32),
        "group": np.repeat(np.arange(B)[:, None] // 2, T, 1).astype(np.int32),
        "entropy": np.abs(field(1, 0.5)), "adv": field(0, 1),
        "values": field(0, 0.3), "returns": field(0, 1), "weights": np.exp(field(0, 0.3)),
        "kl_coeff": np.full(B, 0.2, np.float32),
    }
    now = make_score(LEARNER)(params(), {n: x[None] for n, x in forward_fields(fields).items()})
    old = np.where(mask, now["logp"][0], np.nan) + field(0, 0.1)
    return fields | {
        "logp_old": old, "logp_behav": old + field(0, 0.2), "logp_ref": old + field(0, 0.3),
        "logp_prox": old + field(0, 0.1),
    }


def by_sequence(fields):
    """The fields as a rollout batch has them: a group is one of a sequence, not of its tokens."""
    return fields | ({"group": fields["group"][:, 0]} if "group" in fields else {})


def minibatches(fields, microbatches):
    """The same minibatch with one sequence a row and packed, in so many micro-batches of each, and
    for the packed rows one more without any token."""
    dense = {n: x.reshape(microbatches, -1, *x.shape[1:]) for n, x in fields.items()}
    packer = dataclasses.replace(PACKER, microbatch_rows=4 // microbatches, shards=1)
    packing = packer.plan(sequence_lengths(fields))
    assert packing.shape[0] == microbatches and len(set(packing.row)) == 4
    packed = packing.pack(by_sequence(fields))
    return dense, {n: np.concatenate([x, np.zeros_like(x[:1])]) for n, x in packed.items()}


CASES = {
    "token": {},
    "token, mean of sequences": dict(aggregation="seq-mean-token-mean", kl_coeff=0.1),
    "token, fixed length": dict(aggregation="seq-mean-token-sum-norm", scale=9.0),
    "token, prefix": dict(objective="ctpo"),
    "sequence": dict(objective="gspo", aggregation="seq-mean-token-mean"),
    "sequence, of entropy": dict(objective="espo(vocab_size=19)"),
    "sequence, bypass": dict(
        centre="behav", weight="seq_tis", masks="seq_mean_k3(upper=0.05) & token_k1(upper=1.6)",
        objective="reinforce", aggregation="seq-mean-token-sum",
    ),
    "sequence, every factor": dict(
        centre="prox", weight="seq_tis(cap=1.3)", staleness_weight="seq_tis(cap=1.2)",
        masks="seq_mean_k3(upper=0.05, of=staleness) & seq_sum_ratio(upper=3.0, of=policy)",
        rejected_in_denominator=True,
    ),
    "turn": dict(objective="turn_ppo"),
    "turn, clipping bias": dict(objective="st_ppo"),
    "group": dict(objective="quatro(quatro_delta=0.3, quatro_floor=0.5)"),
    "group, mean of prompts": dict(aggregation="prompt-mean", kl_coeff=0.1),
}


def chosen(case):
    """(correction, fields)"""
    c = default.get_config().correction
    c.weight, c.objective = "none", "ppo"
    c.update(CASES[case])
    c, fields = correction.parse(c), dict(data())
    if c.is_bypassed or c.centre == "prox":
        del fields["weights"]
    return c, fields


@pytest.mark.all
@pytest.mark.parametrize("case", [c for c in CASES if "bias" not in c])  # that one needs a model
def test_packed_rows_give_the_same_loss_and_gradient(case):
    c, fields = chosen(case)
    packing = dataclasses.replace(PACKER, microbatch_rows=4, shards=1).plan(
        sequence_lengths(fields)
    )
    fields["logp"] = np.where(
        fields["mask"], fields["logp_old"] + 0.02 * (-1) ** np.arange(T), np.nan
    ).astype(np.float32)
    num_seqs = np.float32(fields["mask"].any(1).sum())

    @functools.partial(jax.jit, static_argnums=1)
    def computed(rows, is_packed):
        if is_packed:
            rows = rows | {"seg": _segments(PACKED, rows["segment_ids"])}
        loss = lambda logp: update_loss(
            c, logp, rows["entropy"], rows, rows["mask"].sum(), num_seqs
        )
        return jax.value_and_grad(loss, has_aux=True)(rows["logp"])

    (value, metrics), gradient = jax.device_get(computed(fields, False))
    packed = {name: x[0] for name, x in packing.pack(by_sequence(fields)).items()}
    (packed_value, packed_metrics), packed_gradient = jax.device_get(computed(packed, True))
    assert packed_value == pytest.approx(value, abs=1e-6, rel=1e-5)
    back, mask = packing.unpack(packed_gradient[None], T), fields["mask"]
    np.testing.assert_allclose(back[mask], gradient[mask], atol=1e-6)
    assert np.abs(back[mask]).max() > 1e-3
    for name, value in metrics.items():
        assert packed_metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


WEIGHED = {
    "token": dict(preset="tis_2", kl_coeff=0.1),
    "sequence": dict(weight="seq_tis(cap=1.3)", masks="seq_mean_k3(upper=0.05) & veto", batch_normalize=True),
    "rejected": dict(weight="token_tis(cap=2.0)", masks="seq_max_k2(upper=0.02)", rejected_in_denominator=False),
    "every factor": CASES["sequence, every factor"],
    "bypass": CASES["sequence, bypass"],
    "turn": dict(weight="turn_tis(cap=1.2)", masks="token_dp(upper=0.05)"),
    "prefix": dict(weight="prefix_ctpo", masks="m2po(m2po_threshold=0.01)"),
    "after its update": dict(preset="tis_2"),
}


@pytest.mark.all
@pytest.mark.parametrize("case", WEIGHED)
def test_packed_rows_have_the_weights_the_masks_and_the_metrics_of_one_sequence_a_row(case):
    """A reward is unknown, one sequence is left out of the loss, tokens are of two versions."""
    c, fields = default.get_config().correction, dict(data())
    c.update(WEIGHED[case])
    c, sampled = correction.parse(c), fields["mask"]
    fields |= {
        "sampled": sampled, "mask": sampled & (np.arange(B) != 2)[:, None],
        "version": np.where(np.arange(T) < 6, 3, 4)[None].repeat(B, axis=0).astype(np.int32),
        "rewards": np.array([1, -2, 0.5, np.nan, 2, 3, -1, 0], np.float32),
    } | update_fields(B, version=5, step=3, seed=0)
    del fields["weights"]
    if case == "after its update":
        fields |= {"weights": data()["weights"], "accepted": sampled & (np.arange(T) != 4)}
    expected, metrics = jax.device_get(jax.jit(functools.partial(correction.weighed, c))(fields))
    packing = dataclasses.replace(PACKER, microbatch_rows=4, shards=1).plan(sequence_lengths(fields))
    assert len(set(packing.row)) < B - 1
    taken = {name: x for name, x in by_sequence(fields).items() if c.is_weighed(name)}
    found, packed_metrics = jax.device_get(make_packed_weigh(PACKED, c)(packing.pack(taken)))
    assert found.keys() == expected.keys() and packed_metrics.keys() == metrics.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(packing.unpack(found[name], T), x, rtol=1e-5, err_msg=name)
    for name, value in metrics.items():
        assert packed_metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


@pytest.mark.all
@pytest.mark.cases("sequence, bypass", "group, mean of prompts")
@pytest.mark.parametrize(
    "case", ["sequence, bypass", "turn, clipping bias", "group, mean of prompts"]
)
def test_packed_rows_give_the_same_update(case):
    (c, fields), tx = chosen(case), optax.sgd(1.0)
    dense, packed = minibatches(fields, 2)
    (state, metrics), (packed_state, packed_metrics) = (
        updated(make_train_step(learner, c, tx), tx, minibatch)
        for learner, minibatch in ((LEARNER, dense), (PACKED, packed))
    )
    assert_same(state, packed_state)
    for name, value in metrics.items():
        assert packed_metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def updated(train_step, tx, minibatch):
    p = jax.tree.map(jax.numpy.array, params())
    return jax.device_get(train_step(TrainState(p, tx.init(p)), minibatch))


def assert_same(state, packed_state):
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, params())
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, packed_state.params
    )


def test_a_token_that_sees_its_neighbour_in_the_row_would_be_noticed():
    fields = forward_fields(data())
    dense, packed = minibatches(fields, 2)
    score = make_score(PACKED)
    packing = dataclasses.replace(PACKER, shards=1).plan(sequence_lengths(fields))
    plain = np.asarray(make_score(LEARNER)(params(), dense)["logp"]).reshape(B, T)
    same = packing.unpack(np.asarray(score(params(), packed)["logp"])[:2], T)
    np.testing.assert_allclose(same, plain, atol=1e-5)
    joined = packed | {"segment_ids": np.minimum(packed["segment_ids"], 1)}
    other = packing.unpack(np.asarray(score(params(), joined)["logp"])[:2], T)
    assert np.abs(other - plain).max() > 0.05


# In a run


@pytest.mark.all
def test_a_run_on_packed_rows(tmp_path):
    """The first step sees the same samples and scores as a run with one sequence a row."""
    shared = dict(steps=1, train__epochs=1, train__minibatches=1, metrics__diagnostics_every=1)
    plain = tiny.finished(**shared)
    tiny.run(tmp_path / "packed", train__pack_length=40, **shared)
    (before,), (after,) = (
        [line for line in tiny.lines(path) if line["phase"] == "train"]
        for path in (plain, tmp_path / "packed")
    )
    # 16 sequences of at most 8 tokens; a micro-batch is four rows of a block of 128 tokens.
    assert after.pop("packing/rows") == 4 and 0.5 < 4 * after.pop("packing/fill_ratio") <= 1
    after.pop("packing/shard_imbalance")
    assert before.keys() == after.keys() and before["variance_proxy/proxy1_signal_strength"] > 0
    assert before.pop("phase") == after.pop("phase")
    for name, value in before.items():
        assert after[name] == pytest.approx(value, abs=2e-4, rel=2e-3), name


def test_what_packing_refuses():
    for changes, message in (
        (dict(train__pack_length=7), "train.pack_length = 7 is shorter than a sequence, .* = 8"),
        (dict(train__pack_length=40, train__minibatches=3), "16 sequences cannot be divided into"),
        (dict(train__pack_length=40, correction__advantage="opob"), "set train.pack_length to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(tiny.config(**changes))
