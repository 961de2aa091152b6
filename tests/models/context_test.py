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


def check_context(length, shards, tensor=2):
    with mock.patch.object(attention, "_by_kv_head", wraps=attention._by_kv_head) as by_kv_head:
        check_equal(length, shards, tensor)
    assert by_kv_head.called == (shards == 4 and tensor == 1)


def check_equal(length, shards, tensor):
    """Equal to all scores on one device, with sinks; unequal where segments end with the shard, which
    is what one knows without the keys of the others."""
    normal = lambda heads: RNG.normal(0, 1, (2, length, heads, 8)).astype(np.float32)
    qkvs = normal(4), normal(2), normal(2), RNG.normal(0, 1, 4).astype(np.float32)
    segment_ids, layout = crossing(length), train_layout(1, 1, tensor, shards)
    of_row = lambda q, k, v, sinks: attention.row_attention(
        q, k, v, segment_ids, layout, sinks_h=sinks
    )
    of_scores = lambda ids: lambda q, k, v, sinks: attention.attention(q, k, v, row_mask(ids), sinks)
    sharded = value_and_gradients(of_row, *qkvs)
    assert sharded[0].sharding.shard_shape(qkvs[0].shape) == (2, length // shards, 4 // tensor, 8)
    for ours, expected in zip(sharded, value_and_gradients(of_scores(segment_ids), *qkvs), strict=True):
        close(ours, expected)
    cut = segment_ids + 10 * (np.arange(length) // (length // shards))[None]
    for ours, unexpected in zip(sharded, value_and_gradients(of_scores(cut), *qkvs), strict=True):
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
    of_row = lambda *x: attention.row_attention(
        *x, crossing(length), train_layout(1, 1, 2, 4), unseen
    )
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
    run = jax.jit(lambda *x: attention.row_attention(*x, segment_ids, layout))
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


def test_serving_has_no_context_axis():
    with pytest.raises(ValueError, match="'context': 4.* 4 context shards"):
        sharding.layout((1, 2, 1, 4), sharding.SERVE_RULES)
    assert train_layout(1, 2, 2).mesh.shape["context"] == 1
