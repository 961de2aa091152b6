"""Grouped-query attention against float64 numpy, and its isolation from what is masked."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import cache
from jaxrl_tis.models import attention, placement, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

RNG = np.random.default_rng(0)
attend = jax.jit(attention.attention)


def arrays(b, t, s, h, n, k):
    normal = lambda *shape: RNG.normal(0, 1, shape).astype(np.float32)
    return normal(b, t, h, k), normal(b, s, n, k), normal(b, s, n, k)


def reference(q, k, v, mask_bts, sinks=(-np.inf,) * 8):
    """Loop over batch, heads and queries; query head i reads key/value head i // (H / N)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask_bts[b, t])
        scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
        p = np.exp(np.append(scores, sinks[h]) - scores.max())
        out[b, t, h] = (p / p.sum())[:-1] @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("h, n", [(4, 4), (6, 2), (4, 1)])
def test_grouped_queries_equal_numpy(h, n):
    q, k, v = arrays(2, 5, 7, h, n, 8)
    mask = RNG.random((2, 5, 7)) < 0.5
    mask[..., 0] = True
    out = attend(q, k, v, mask)
    assert out.shape == q.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(q, k, v, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.cases("16-64", "24-64", "24-96", "16-4096")
@pytest.mark.parametrize("size, block", [
    (16, 64), (24, 64), (64, 64), (100, 64), (24, 96), (16, 4096),
])
def test_pages_in_blocks_equal_numpy(size, block):
    """Blocks of four pages, two, one, one, four and all; the last of a table is not whole."""
    pages, places = 5, np.array([[5 * size - 1, 0], [size, 2 * size + 3], [7, 8]])
    q, k, v = arrays(3, 2, pages * size, 4, 2, 8)
    table = 1 + RNG.permutation(3 * pages).reshape(3, pages)
    pool = np.full((2, 1 + 3 * pages, 2, size, 8), np.nan, np.float32)
    for row, last in enumerate(places.max(axis=1)):
        for i, x in enumerate((k, v)):
            kept = np.where(np.arange(pages * size)[:, None, None] <= last, x[row], np.nan)
            pool[i, table[row]] = np.swapaxes(kept.reshape(pages, size, 2, 8), 1, 2)
    read = lambda numbers: cache.KV(*jnp.asarray(pool), None, None).read(numbers)
    attend = lambda q, **weighs: attention.paged_attention(
        q, read, jnp.asarray(table), jnp.asarray(places), block_size=block, **weighs
    )
    has_loop = "while" in str(jax.make_jaxpr(attend)(q))
    assert has_loop == (block < pages * size)
    mask = np.arange(pages * size) <= places[..., None]
    sinks = np.float32([-2, 0, 1, 3])
    out, (weighed, mass), sunk = jax.jit(lambda q: (
        attend(q), attend(q, weighs=True), attend(q, sinks_h=sinks)
    ))(q)
    np.testing.assert_allclose(out, reference(q, k, v, mask), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sunk, reference(q, k, v, mask, sinks), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(weighed, out)
    np.testing.assert_allclose(mass, page_mass(q, k, mask, size), rtol=1e-4, atol=1e-5)


def page_mass(q, k, mask, size):
    """The attention [B,T,P] to each page of `size` positions, summed over heads."""
    k = np.repeat(k.astype(np.float64), q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bthk,bshk->bhts", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    weights = np.where(mask[:, None], np.exp(scores), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights.sum(axis=1).reshape(*q.shape[:2], -1, size).sum(axis=-1)


@pytest.mark.all
def test_rows_by_length_give_the_attention_to_each_page():
    b, pages, size = 33, 9, 32
    places = (np.arange(b) * 8 % (pages * size))[:, None]
    q, k, v = arrays(b, 1, pages * size, 2, 1, 4)
    pool = np.stack([np.swapaxes(x.reshape(b * pages, size, 1, 4), 1, 2) for x in (k, v)])
    kv = cache.KV(*jnp.asarray(pool), None, None)
    table = jnp.arange(b * pages).reshape(b, pages)
    out, mass = jax.jit(lambda q: attention.paged_attention_by_length(
        q, kv.read, table, jnp.asarray(places), weighs=True
    ))(q)
    mask = np.arange(pages * size) <= places[..., None]
    np.testing.assert_allclose(out, reference(q, k, v, mask), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mass, page_mass(q, k, mask, size), rtol=1e-4, atol=1e-5)


@pytest.mark.cases("32-9")
@pytest.mark.parametrize("b, pages", [(31, 9), (32, 9), (37, 9), (32, 4)])
def test_rows_by_length_equal_numpy(b, pages):
    """Of any lengths in any order, all together and in groups, the last of which may lack rows."""
    size = 32
    end = pages * size
    places = np.stack([RNG.permutation(np.arange(b) * end // b), RNG.integers(0, 8, b)], axis=1)
    q, k, v = arrays(b, 2, pages * size, 2, 1, 4)
    table = 1 + RNG.permutation(b * pages).reshape(b, pages)
    pool = np.full((2, 1 + b * pages, 1, size, 4), np.nan, np.float32)
    for i, x in enumerate((k, v)):
        pool[i, table] = np.swapaxes(x.reshape(b, pages, size, 1, 4), 2, 3)
    kv, count = cache.KV(*jnp.asarray(pool), None, None), []

    def read(numbers):
        jax.debug.callback(lambda x: count.append(x.size), numbers)
        return kv.read(numbers)

    attend = jax.jit(lambda q, table, places: attention.paged_attention_by_length(
        q, read, table, places
    ))
    out = attend(q, jnp.asarray(table), jnp.asarray(places))
    mask = np.arange(end) <= places[..., None]
    np.testing.assert_allclose(out, reference(q, k, v, mask), rtol=1e-4, atol=1e-5)
    jax.effects_barrier()
    blocks = places.max(axis=1) // attention.PAGED_BLOCK + 1
    saved = 1 - sum(count) * size / attention.PAGED_BLOCK / (b * blocks.max())
    assert saved > 0.2 if b >= 32 and pages > 4 else saved == 0
    # Where all others are as long as the longest, each row has the bits that it had.
    for row in (0, b // 2, b - 1):
        company = np.full_like(places, end - 1)
        company[row] = places[row]
        other = attend(q, jnp.asarray(table), jnp.asarray(company))
        np.testing.assert_array_equal(other[row], out[row])


def row_mask(ids):
    """[B,T,T]: causal within a segment, never across."""
    return (ids[:, :, None] == ids[:, None, :]) & np.tri(ids.shape[1], dtype=bool)[None]


@pytest.mark.all
def test_segments_are_isolated_bit_by_bit():
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    mask = row_mask(segment_ids)
    q, k, v = arrays(2, 8, 8, 4, 2, 8)
    before = np.asarray(attend(q, k, v, mask))
    for changed in ([0, 1, 2], [3, 4, 5], [6, 7]):
        q2, k2, v2 = (x.copy() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[0, changed] = 1e4 * RNG.normal(size=x[0, changed].shape)
        after = np.asarray(attend(q2, k2, v2, mask))
        others = [t for t in range(8) if t not in changed]
        np.testing.assert_array_equal(after[0, others], before[0, others])
        np.testing.assert_array_equal(after[1], before[1])
        assert np.abs(after[0, changed] - before[0, changed]).max() > 1


@pytest.mark.all
def test_rows_that_may_attend_to_nothing_are_finite_in_value_and_gradient():
    q, k, v = arrays(1, 3, 4, 2, 2, 4)
    mask = np.zeros((1, 3, 4), bool)
    mask[0, 1, :2] = True
    total = lambda q, k, v: jnp.sum(attention.attention(q, k, v, mask)[0, 1])
    assert np.isfinite(attend(q, k, v, mask)).all()
    for gradient in jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v):
        assert np.isfinite(gradient).all()
    padding = row_mask(jnp.zeros((1, 3), int))
    assert np.isfinite(attend(q, k[:, :3], v[:, :3], padding)).all()


def test_bfloat16_inputs_are_reduced_in_float32():
    # Equal scores over 512 values of one: each probability is 2^-9 and a bfloat16 sum of them
    # would stall at 0.5 = 256 * 2^-9.
    q = jnp.zeros((1, 1, 2, 8), jnp.bfloat16)
    k, v = jnp.ones((1, 512, 1, 8), jnp.bfloat16), jnp.ones((1, 512, 1, 8), jnp.bfloat16)
    out = attend(q, k, v, np.ones((1, 1, 512), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones((1, 1, 2, 8)))


# Rows


def segmentation(rows, length):
    """Rows of random segments, in order, then padding; the last row is padding alone."""
    out = np.zeros((rows, length), np.int32)
    for row in out[:-1]:
        cuts = np.sort(RNG.choice(np.arange(1, length), 5, replace=False))
        for i, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            row[start - cuts[0]:end - cuts[0]] = i
    return out


def row_reference(q, k, v, segment_ids, cotangent, *, with_segments=True, causal=True,
                  unseen=None):
    """(out, dq, dk, dv) in float64, by the formulas of a softmax's gradient."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    q, do = (np.swapaxes(x.astype(np.float64), 1, 2) for x in (q, cotangent))
    k, v = (np.repeat(np.swapaxes(x.astype(np.float64), 1, 2), group, axis=1) for x in (k, v))
    mask = np.ones((len(q), 1, q.shape[2], q.shape[2]), bool)
    if with_segments:
        mask &= (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if causal:
        mask &= np.tri(q.shape[2], dtype=bool)
    if unseen is not None:
        mask &= (np.arange(q.shape[2])[:, None] < unseen[:, None])[:, None]
    scores = np.where(mask, q @ np.swapaxes(k, 2, 3) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ np.swapaxes(v, 2, 3)
    ds = p * (dp - np.sum(dp * p, -1, keepdims=True)) * scale
    heads = lambda x: x.reshape(len(x), -1, group, *x.shape[2:]).sum(2)
    results = p @ v, ds @ k, heads(np.swapaxes(ds, 2, 3) @ q), heads(np.swapaxes(p, 2, 3) @ do)
    return [np.swapaxes(x, 1, 2) for x in results]


@pytest.fixture
def interpreted_splash(monkeypatch):
    """The program of a TPU, its kernels interpreted."""
    kernel = attention._splash_kernel
    monkeypatch.setattr(attention, "_splash_kernel", lambda *a: kernel(*a, interpret=True))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, tpu, default: tpu(*arrays))


@pytest.fixture
def chunks_of_32(monkeypatch):
    monkeypatch.setattr(attention, "LONG_ROW", 64)
    monkeypatch.setattr(attention, "QUERY_CHUNK", 32)


def value_and_gradients(q, k, v, segment_ids, cotangent, attend=attention.row_attention):
    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(lambda *x: attend(*x, segment_ids), q, k, v)
        return out, *pull(cotangent)

    return run(q, k, v)


def check_rows(length, h, n, k):
    """Equal to the reference; unequal to one that ignores segments, and to one that looks ahead."""
    arrays_qkv = arrays(2, length, length, h, n, k)
    segment_ids = segmentation(2, length)
    cotangent = RNG.normal(size=arrays_qkv[0].shape).astype(np.float32)
    results = value_and_gradients(*arrays_qkv, segment_ids, cotangent)
    reference = functools.partial(row_reference, *arrays_qkv, segment_ids, cotangent)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    for ours, expected in zip(results, reference(), strict=True):
        close(ours, expected)
    for wrong in (reference(with_segments=False), reference(causal=False)):
        for ours, unexpected in zip(results, wrong, strict=True):
            with pytest.raises(AssertionError):
                close(ours, unexpected)


def test_short_rows_equal_numpy():
    check_rows(48, 6, 2, 8)


@pytest.mark.parametrize("length", [48, 80])
def test_keys_that_become_unseen_equal_numpy(length, chunks_of_32):
    """In one piece and in chunks; the last row's padding is a segment of its own."""
    arrays_qkv = arrays(2, length, length, 4, 2, 8)
    segment_ids = segmentation(2, length)
    unseen = np.arange(length) + RNG.integers(1, 20, (2, length))
    cotangent = RNG.normal(size=arrays_qkv[0].shape).astype(np.float32)
    attend = lambda *x: attention.row_attention(*x, unseen_bt=jnp.asarray(unseen))
    results = value_and_gradients(*arrays_qkv, segment_ids, cotangent, attend)
    reference = functools.partial(row_reference, *arrays_qkv, segment_ids, cotangent)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    for ours, expected, unexpected in zip(results, reference(unseen=unseen), reference(), strict=True):
        close(ours, expected)
        with pytest.raises(AssertionError):
            close(ours, unexpected)


def test_chunked_rows_equal_numpy(chunks_of_32):
    check_rows(80, 6, 2, 8)  # three chunks, the last half full


@pytest.mark.parametrize("length, heads, kv_heads", [
    (256, 2, 1), pytest.param(384, 4, 2, marks=pytest.mark.all),
])
def test_splash_attention_equals_numpy(interpreted_splash, length, heads, kv_heads):
    check_rows(length, heads, kv_heads, 64)  # two blocks of 128, or three


@pytest.mark.parametrize("is_used", [True, False])
def test_a_window_in_the_splash_kernel(interpreted_splash, is_used):
    """Equal to the other path, which golden_test.py compares with transformers; values and gradients,
    with sinks."""
    qkvs = *arrays(2, 256, 256, 2, 1, 64), np.float32([-1.0, 2.0])
    segment_ids = segmentation(2, 256)
    attend = lambda q, k, v, sinks: attention.row_attention(
        q, k, v, segment_ids, window=attention.Window(100, jnp.asarray(is_used)), sinks_h=sinks
    )
    position = np.arange(256)
    is_seen = position[:, None] - position < (100 if is_used else 256)
    mask = row_mask(segment_ids) & is_seen

    def run(attend):
        out, pull = jax.vjp(attend, *qkvs)
        return out, *pull(qkvs[0])

    found = jax.jit(lambda: run(attend))()
    want = jax.jit(lambda: run(lambda *x: attention.attention(*x[:3], mask, x[3])))()
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_short_rows_keep_their_bits():
    """Recorded runs on CPU rely on it, up to 1,024 tokens."""
    q, k, v = arrays(2, 1024, 1024, 2, 1, 4)
    segment_ids = segmentation(2, 1024)
    of_scores = lambda q, k, v, ids: attention.attention(q, k, v, row_mask(ids))
    ours = value_and_gradients(q, k, v, segment_ids, q)
    for a, b in zip(ours, value_and_gradients(q, k, v, segment_ids, q, of_scores), strict=True):
        np.testing.assert_array_equal(a, b)


def temporaries(length):
    like = lambda *shape: jax.ShapeDtypeStruct((1, length, *shape), jnp.float32)
    q, k, ids = like(4, 8), like(2, 8), jax.ShapeDtypeStruct((1, length), jnp.int32)
    total = lambda *x: jnp.sum(attention.row_attention(*x) ** 2)
    program = jax.jit(jax.grad(total, (0, 1, 2)))
    return program.lower(q, k, k, ids).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.all
def test_memory_of_long_rows_is_linear(monkeypatch):
    """Values and gradients; the scores alone of 6,000 tokens would be 4 x 6000^2 x 4 bytes."""
    assert temporaries(6000) < 2.2 * temporaries(3000)
    assert temporaries(6000) < 0.5 * 4 * 6000**2 * 4
    monkeypatch.setattr(attention, "LONG_ROW", 6000)
    assert temporaries(6000) > 3.5 * temporaries(3000)


# TPU programs

CONFIG = ModelConfig(
    family="qwen2", vocab_size=32, embed_dim=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, mlp_dim=128, rope=RopeConfig("default", 10000.0), max_position=512, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)


def tpu_program(topology, length, head_dims):
    """Values and gradients of rows on two data and two tensor shards, one per head size; lowered,
    not compiled."""
    layout = sharding.layout((1, 2, 2), sharding.TRAIN_RULES, tpu.devices(topology))

    def like(shape, axes, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes))

    def total(q, k, v, ids):
        return jnp.sum(attention.row_attention(q, k, v, ids, layout).astype(jnp.float32) ** 2)

    def heads(h, name, k):
        return like((2, length, h, k), ("batch", "length", name, None), jnp.bfloat16)

    ids = like((2, length), ("batch", "length"), jnp.int32)
    inputs = [(heads(4, "heads", k), *[heads(2, "kv_heads", k)] * 2) for k in head_dims]
    gradients = lambda inputs, ids: [jax.value_and_grad(total, (0, 1, 2))(*x, ids) for x in inputs]
    return jax.jit(gradients).lower(inputs, ids)


@pytest.mark.cases("v5e:2x2-768-2")
@pytest.mark.parametrize("topology, length, kernels", [("v5e:2x2", 768, 2), ("v5p:2x2x1", 2560, 3)])
def test_kernels_compile_for_tpu(topology, length, kernels):
    """For each head size forward and one with all gradients; in more than four blocks forward, dq,
    and dk with dv. No scores are stored."""
    text = tpu_program(topology, length, (64, 128)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * kernels
    assert f"{length},{length}]" not in text


def test_rows_that_are_no_whole_tiles_take_scores_on_tpu():
    text = tpu_program("v5e:2x2", 200, (64,)).as_text()
    assert "tpu_custom_call" not in text and "200x200x" in text


@pytest.mark.all
@pytest.mark.parametrize("remat, forwards", [("none", 1), ("dots", 1), ("full", 2)])
def test_what_remat_recomputes(remat, forwards):
    """Only "full" runs the kernel again in the backward pass."""
    layout = sharding.layout((1, 1, 1), sharding.TRAIN_RULES, tpu.devices("v5e:2x2")[:1])
    program = transformer.Program("bfloat16", remat, layout=layout)
    like = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    where = placement.shardings(layout, CONFIG)
    params = jax.tree.map(like, transformer.abstract_params(CONFIG), where)
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32, sharding=layout.sharding(("batch", "length")))
    total = lambda p, x: jnp.sum(transformer.rows_hidden(p, CONFIG, program, x, x, x) ** 2)
    text = jax.jit(jax.grad(total)).lower(params, ids).as_text()
    assert text.count('kernel_name = "splash_mha_fwd') == forwards
    assert text.count('kernel_name = "splash_mha_dkv') == 1
