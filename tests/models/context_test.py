"""Rows cut over the mesh axis "context": the numbers of one device, with segments across shards."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.learner.scoring import Learner, response_scores
from jaxrl_tis.models import attention, placement, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests.models.attention_test import row_mask

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("the partitioner places the arrays and XLA compiles the programs"),
]

RNG = np.random.default_rng(0)
CONFIG = ModelConfig(
    family="qwen2", vocab_size=24, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=False,
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def train_layout(*shape):
    return sharding.layout(shape, sharding.TRAIN_RULES)


def packed(length, *ends):
    """Segment ids of a row whose segments end there, then padding."""
    ids = np.zeros(length, np.int32)
    for i, (start, end) in enumerate(itertools.pairwise((0, *ends)), 1):
        ids[start:end] = i
    return ids


def crossing(length):
    """Two rows: segments cross every edge of two or four shards, one covers two whole shards."""
    of = lambda *parts: packed(length, *(int(length * p) for p in parts))
    return np.stack([of(0.15, 0.3, 0.6, 0.9), of(0.2, 0.85, 1.0)])


# Attention


def value_and_gradients(attend, q, k, v, *sinks):
    @jax.jit
    def run(q, *others):
        out, pull = jax.vjp(attend, q, *others)
        return out, *pull(jnp.cos(q))

    return run(q, k, v, *sinks)


@jax.jit
def of_scores(q, k, v, sinks, segment_ids):
    """Value and gradients of all scores on one device."""
    of = lambda q, k, v, sinks: attention.attention(q, k, v, row_mask(segment_ids), sinks)
    out, pull = jax.vjp(of, q, k, v, sinks)
    return out, *pull(jnp.cos(q))


def check_context(length, shards, tensor=2):
    with mock.patch.object(attention, "_by_kv_head", wraps=attention._by_kv_head) as by_kv_head:
        check_equal(length, shards, tensor)
    assert by_kv_head.called == (shards == 4 and tensor == 1)


def balanced_attention(segment_ids, layout, *limits):
    """`row_attention` of rows as they are, whose tokens change places for it."""

    def attend(q, k, v, sinks=None):
        *x, ids = map(layout.balanced, (q, k, v, segment_ids))
        limited = map(layout.balanced, limits)
        return layout.in_order(attention.row_attention(*x, ids, layout, *limited, sinks_h=sinks))

    return attend


def check_equal(length, shards, tensor):
    """Equal to all scores on one device, with sinks; unequal where segments end with the shard, which
    is what one knows without the keys of the others."""
    normal = lambda heads: RNG.normal(0, 1, (2, length, heads, 8)).astype(np.float32)
    qkvs = normal(4), normal(2), normal(2), RNG.normal(0, 1, 4).astype(np.float32)
    segment_ids, layout = crossing(length), train_layout(1, 1, tensor, shards)
    of_row = balanced_attention(segment_ids, layout)
    sharded = value_and_gradients(of_row, *qkvs)
    assert sharded[0].sharding.shard_shape(qkvs[0].shape) == (2, length // shards, 4 // tensor, 8)
    for ours, expected in zip(sharded, of_scores(*qkvs, segment_ids), strict=True):
        close(ours, expected)
    cut = (segment_ids + 10 * (np.arange(length) // (length // shards))[None]).astype(np.int32)
    for ours, unexpected in zip(sharded, of_scores(*qkvs, cut), strict=True):
        with pytest.raises(AssertionError):
            close(ours, unexpected)


# Two shards gather all keys of a device at once, four those of one of its two heads at a time.
@pytest.mark.cases("2-2", "4-1")
@pytest.mark.parametrize("shards, tensor", [(2, 2), (4, 2), (4, 1)])
def test_scores(shards, tensor):
    check_context(32, shards, tensor)


def test_keys_that_become_unseen_in_another_shard():
    """Tokens of the first half are unseen from ten places after them on; the others stay."""
    length = 32
    normal = lambda heads: RNG.normal(0, 1, (2, length, heads, 8)).astype(np.float32)
    q, k, v = normal(4), normal(2), normal(2)
    place = np.arange(length)
    unseen = np.broadcast_to(np.where(place < 16, place + 10, length), (2, length))
    mask = row_mask(crossing(length)) & (place[:, None] < unseen[:, None])
    of_row = balanced_attention(crossing(length), train_layout(1, 1, 2, 4), unseen)
    expected = value_and_gradients(lambda *x: attention.attention(*x, mask), q, k, v)
    for a, b in zip(value_and_gradients(of_row, q, k, v), expected, strict=True):
        close(a, b)


def test_chunks_of_queries(monkeypatch):
    monkeypatch.setattr(attention, "LONG_ROW", 32)
    monkeypatch.setattr(attention, "QUERY_CHUNK", 12)
    check_context(80, 4)  # 20 queries in a shard: a whole chunk and a part of one


@pytest.mark.all
def test_a_row_of_8k_tokens():
    """Two chunks of queries a shard, beside float64 sums at the edges of all shards and segments."""
    length, shards = 8192, 8
    q, k, v = (RNG.normal(0, 1, (1, length, 1, 8)).astype(np.float32) for _ in range(3))
    segment_ids, layout = crossing(length)[1:], train_layout(1, 1, 1, shards)
    run = jax.jit(balanced_attention(segment_ids, layout))
    out = np.asarray(run(q, k, v))
    edges = np.r_[np.arange(shards) * (length // shards), np.flatnonzero(np.diff(segment_ids[0])) + 1]
    for t in np.unique(np.r_[edges, edges - 1, length - 1] % length):
        seen = np.flatnonzero(segment_ids[0, : t + 1] == segment_ids[0, t])
        scores = k[0, seen, 0].astype(np.float64) @ q[0, t, 0] * 8**-0.5
        probs = np.exp(scores - scores.max())
        close(out[0, t, 0], probs @ v[0, seen, 0] / probs.sum(), err_msg=str(t))


@pytest.mark.cases("256-2-2")
@pytest.mark.parametrize("length, shards, tensor", [(256, 2, 2), (512, 4, 1)])
def test_splash(monkeypatch, length, shards, tensor):
    """A TPU's program, its kernels interpreted; each shard has its own part of the causal mask."""
    kernel = attention._splash_kernel
    monkeypatch.setattr(attention, "_splash_kernel", lambda *a: kernel(*a, interpret=True))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, tpu, default: tpu(*arrays))
    check_context(length, shards, tensor)


def blocks_per_shard(kernel, shards):
    """The blocks of scores that forward, dq and dk-dv kernels of each shard compute, from the arrays
    that tell the kernels which ones to skip."""
    of = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    masks = [np.asarray(info.block_mask)[0] for info in of if info is not None]
    return np.array([[(part > 0).sum() for part in np.split(mask, shards)] for mask in masks])


def test_shards_compute_as_many_blocks(monkeypatch):
    """Sixteen chunks of a block see 1, 2, ... 16 blocks of keys, two chunks 17 together. Contiguous
    shards would compute up to 15 / 8 of the mean."""
    length, shards = 2048, 8
    kernel = attention._splash_kernel.__wrapped__
    counts = blocks_per_shard(kernel(length, shards), shards)
    assert len(counts) == 3 and (counts == 17).all()
    contiguous = lambda length, shards: np.arange(length, dtype=np.int32)
    monkeypatch.setattr(attention, "balanced_order", contiguous)
    counts = blocks_per_shard(kernel(length, shards), shards)
    np.testing.assert_array_equal(counts[:, [0, -1]], [[3, 31]] * 3)


@pytest.mark.all
def test_tokens_change_places_and_come_back():
    """Of eight chunks of 3 tokens shard 1 of four has the chunks 1 and 6."""
    layout, rows = train_layout(2, 1, 1, 4), np.arange(48).reshape(2, 24)
    assert (layout.row_shards, layout.row_unit) == (4, 8)
    sampler = sharding.layout((1, 2, 1, 4), sharding.SERVE_RULES)
    assert (sampler.row_shards, sampler.row_unit) == (1, 1)  # it cuts no rows
    moved = jax.jit(layout.balanced)(rows)
    np.testing.assert_array_equal(moved[0, 6:12], [3, 4, 5, 18, 19, 20])
    np.testing.assert_array_equal(moved, rows[:, sharding.balanced_order(24, 4)])
    np.testing.assert_array_equal(jax.jit(layout.in_order)(moved), rows)
    total = lambda x: jnp.sum(layout.in_order(x[None], lead=1)[0] * rows)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(jnp.zeros((2, 24))), moved)


# The learner


def minibatch(length):
    """Two packed rows; a third of the tokens is sampled, never the first of a segment."""
    ids = crossing(length)
    starts = np.diff(ids, axis=1, prepend=0) != 0
    begin = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)
    return {
        "tokens": RNG.integers(0, CONFIG.vocab_size, ids.shape).astype(np.int32),
        "positions": (np.arange(length) - begin).astype(np.int32),
        "segment_ids": ids,
        "mask": (RNG.random(ids.shape) < 0.33) & (ids > 0) & ~starts,
        "temperature": np.repeat(np.array([[0.7], [1.0]], np.float32), length, axis=1),
    }


def losses(layout, params, batch):
    """(log-probs, entropies, gradients of a weighted sum of both) by the learner's forward pass."""
    program = transformer.Program(remat="full", layout=layout)
    learner = Learner(CONFIG, program, max_targets=20, chunk=8)
    weights = np.cos(np.arange(batch["mask"].size)).reshape(batch["mask"].shape)

    def loss(params):
        found = response_scores(params, learner, batch, with_entropy=True)
        logp, entropy = found["logp"], found["entropy"]
        return jnp.sum(weights * (logp + 0.1 * entropy)), (logp, entropy)

    gradients, values = jax.jit(jax.grad(loss, has_aux=True))(params)
    return values, gradients


@pytest.mark.all
def test_the_learner_gives_the_numbers_of_one_device():
    params, batch = transformer.init(CONFIG, jax.random.key(0)), minibatch(48)
    assert batch["mask"].sum(1).max() <= 20 and batch["mask"].sum(1).min() > 8
    layout = train_layout(1, 2, 1, 4)
    placed = {name: jax.device_put(x, layout.sharding(("batch", "length")[: x.ndim]))
              for name, x in batch.items()}
    (logp, entropy), gradients = losses(layout, placement.put(params, layout, CONFIG), placed)
    (expected_logp, expected_entropy), expected = losses(None, params, batch)
    close(logp, expected_logp)
    close(entropy, expected_entropy)
    assert np.abs(logp).max() > 1
    jax.tree.map(close, gradients, expected)


@pytest.mark.all
def test_noise_and_residuals_are_those_of_one_device():
    params, layout = transformer.init(CONFIG, jax.random.key(0)), train_layout(1, 2, 1, 4)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16) % CONFIG.vocab_size
    place, program = layout.put(tokens, ("batch", None)), transformer.Program(layout=layout)
    placed = placement.put(params, layout, CONFIG)
    streams = [
        transformer.residuals(*x)
        for x in ((params, CONFIG, transformer.Program(), tokens), (placed, CONFIG, program, place))
    ]
    for one, many in zip(*streams, strict=True):
        close(many, one)

    def noisy(params, program, tokens):
        positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
        params = params | {"perturbation": jnp.full(2, -1.0)}
        return jax.jit(functools.partial(transformer.rows_hidden, config=CONFIG, program=program))(
            params, tokens_bt=tokens, positions_bt=positions, segment_ids_bt=tokens * 0 + 1,
            seed_b=jnp.arange(2, dtype=jnp.uint32),
        )

    close(noisy(placed, program, place), noisy(params, transformer.Program(), tokens))
