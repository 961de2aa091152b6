"""Pages: what is written where, and what a query sees of them, against float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import cache
from jaxrl_tis.models import attention as attention_of_models
from jaxrl_tis.models.config import ModelConfig, RopeConfig

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

CONFIG = ModelConfig(
    family="llama", vocab_size=20, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=64,
    norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True,
)
RNG = np.random.default_rng(0)
SIZE, PAGES, LAYER = 4, 12, 1
ATOL = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 4e-2, "float8_e4m3fn": 0.15}
FEW = pytest.mark.cases("float32-True", "bfloat16-False", "int8-False", "float8_e4m3fn-True")
FORMS = [(dtype, unrolled) for dtype in ATOL for unrolled in (True, False)]


def normal(*shape):
    return RNG.normal(0, 1, shape).astype(np.float32)


def pool(dtype, unrolled):
    """An empty pool as `attend` gets it: one layer, or all and the number of one."""
    made = cache.empty(CONFIG, PAGES, SIZE, dtype, unrolled)
    return made[LAYER] if unrolled else (made, jnp.int32(LAYER))


def handed_on(after, unrolled):
    return after if unrolled else (after, jnp.int32(LAYER))


def attention(q_hk, k_nsk, v_nsk):
    """[H,K] float64 attention of one query to all positions given."""
    n = len(k_nsk)
    q_ngk = q_hk.reshape(n, -1, q_hk.shape[-1]).astype(np.float64)
    scores = np.einsum("ngk,nsk->ngs", q_ngk, k_nsk) / np.sqrt(q_hk.shape[-1])
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("ngs,nsk->ngk", p / p.sum(axis=-1, keepdims=True), v_nsk)
    return out.reshape(q_hk.shape)


@jax.jit
def fill(q, k, v, layer_cache, starts, lengths, table):
    return cache.fill(starts, lengths, table, sharding.single_device())(q, k, v, layer_cache)


@jax.jit
def append(q, k, v, layer_cache, index, is_written, table):
    attend = cache.append(index[:, None], is_written[:, None], table, sharding.single_device())
    return attend(q, k, v, layer_cache)


# Row 0 fills two pages and a half in two chunks, row 1 one chunk that ends in a page's middle.
TABLE = np.array([[7, 2, 9, 4], [5, 11, 1, 0]], np.int32)
LENGTHS = np.array([10, 6])


def written(dtype, unrolled):
    """The sequences' q, k, v [2,10,...] and the pool that holds them."""
    q, k, v = normal(2, 12, 4, 8), normal(2, 12, 2, 8), normal(2, 12, 2, 8)
    out, state = np.zeros((2, 12, 4, 8)), pool(dtype, unrolled)
    for start, counts in ((0, [8, 6]), (8, [2, 0])):
        chunks = [
            np.pad(x, ((0, 0), (0, 8), (0, 0), (0, 0)))[:, start : start + 8] for x in (q, k, v)]
        part, after = fill(
            *chunks, state, np.full(2, start), np.array(counts), TABLE)
        for row, count in enumerate(counts):
            out[row, start : start + count] = part[row, :count]
        state = handed_on(after, unrolled)
    return q, k, v, out, state


@pytest.mark.cases("float32-True", "int8-False")
@FEW
@pytest.mark.parametrize("dtype, unrolled", FORMS)
def test_chunks_of_a_prompt_attend_to_all_before_them(dtype, unrolled):
    q, k, v, out, _ = written(dtype, unrolled)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            seen = lambda x, row=row, t=t: np.swapaxes(x[row, : t + 1], 0, 1)
            expected = attention(q[row, t], seen(k), seen(v))
            np.testing.assert_allclose(out[row, t], expected, atol=ATOL[dtype])
            # Another answer without the token itself.
            if t:
                seen = lambda x, row=row, t=t: np.swapaxes(x[row, :t], 0, 1)
                other = attention(q[row, t], seen(k), seen(v))
                assert np.abs(other - expected).max() > ATOL[dtype]


def test_a_chunk_that_ends_with_its_page_leaves_the_page_behind_it_alone():
    q, k, v = normal(2, 8, 4, 8), normal(2, 8, 2, 8), normal(2, 8, 2, 8)
    _, after = fill(q, k, v, pool("float32", True), np.zeros(2, int), np.array([4, 8]), TABLE)
    is_written = lambda page: [bool(np.any(x[page])) for x in (after.k, after.v)]
    assert is_written(TABLE[0, 0]) == is_written(TABLE[1, 1]) == [True, True]
    assert is_written(TABLE[0, 1]) == [False, False]


@pytest.mark.cases("float32-True")
@FEW
@pytest.mark.parametrize("dtype, unrolled", FORMS)
def test_decode_goes_on_in_the_pages_and_writes_one_place(dtype, unrolled):
    q, k, v, _, state = written(dtype, unrolled)
    before = jax.tree.map(np.array, state)
    new = normal(2, 1, 4, 8), normal(2, 1, 2, 8), normal(2, 1, 2, 8)
    # Row 0 appends position 10; row 1 looks again at position 5, whose key is there already.
    out, after = append(*new, state, np.array([10, 5]), np.array([True, False]), TABLE)
    for row, (length, own) in enumerate(((10, True), (6, False))):
        seen = [np.concatenate([x[row, :length], fresh[row]] if own else [x[row, :length]])
                for x, fresh in ((k, new[1]), (v, new[2]))]
        expected = attention(new[0][row, 0], *(np.swapaxes(x, 0, 1) for x in seen))
        np.testing.assert_allclose(out[row, 0], expected, atol=ATOL[dtype])
    for x, y in zip(*map(jax.tree.leaves, (before, handed_on(after, unrolled))), strict=True):
        if x.ndim == 0:
            continue
        axis = 0 if unrolled else 1
        changed = np.moveaxis(np.asarray(x != y), axis, 0).reshape(PAGES, -1).any(axis=1)
        # Page 9 holds position 10; page 0 took what nobody reads.
        assert set(np.flatnonzero(changed)) == {0, 9}


def test_nan_in_pages_beyond_a_sequence_has_no_influence():
    q, k, v, _, state = written("float32", True)
    new = normal(2, 1, 4, 8), normal(2, 1, 2, 8), normal(2, 1, 2, 8)
    args = np.array([10, 5]), np.array([True, False])
    clean, _ = append(*new, state, *args, TABLE)
    nan = lambda x, page: x.at[page].set(jnp.nan)
    free = dataclasses.replace(state, k=nan(state.k, 3), v=nan(state.v, 3))
    dirty, _ = append(*new, free, *args, np.where(TABLE == 1, 3, TABLE))
    np.testing.assert_array_equal(clean, dirty)
    rest = state.v.at[11, :, 2:].set(jnp.nan)  # of row 1's last page
    dirty, _ = append(*new, dataclasses.replace(state, v=rest), *args, TABLE)
    np.testing.assert_array_equal(clean, dirty)
    own = dataclasses.replace(state, v=nan(state.v, 7))
    assert np.isnan(append(*new, own, *args, TABLE)[0][0]).any()


def test_a_decode_on_a_gpu_has_no_loop(monkeypatch):
    """Every turn of a loop waits for the host there."""
    pages = 4096 // SIZE
    state = cache.empty(CONFIG, pages + 1, SIZE, "float32", True)[LAYER]
    new = normal(1, 1, 4, 8), normal(1, 1, 2, 8), normal(1, 1, 2, 8)
    args = np.array([4000]), np.array([True])
    program = lambda table: str(jax.make_jaxpr(
        lambda state: append(*new, state, *args, table)[0]
    )(state))
    monkeypatch.setattr(sharding.Layout, "platform", "gpu")
    assert "while" not in program(np.arange(pages)[None])
    assert "while" in program(np.arange(pages + 1)[None])


@FEW
@pytest.mark.parametrize("dtype, unrolled", FORMS)
def test_copies_of_pages(dtype, unrolled):
    *_, state = written(dtype, unrolled)
    made = state if unrolled else state[0]
    copy = jax.jit(lambda kv, sources, targets: kv.copy(sources, targets))
    copied = copy(made, np.array([9, 0, 11]), np.array([8, 0, 6]))
    axis = 0 if unrolled else 1
    for x, y in zip(*map(jax.tree.leaves, (made, copied)), strict=True):
        x, y = (np.moveaxis(np.asarray(a), axis, 0) for a in (x, y))
        np.testing.assert_array_equal(y[[8, 6]], x[[9, 11]])
        others = [page for page in range(PAGES) if page not in (8, 6)]
        np.testing.assert_array_equal(y[others], x[others])
        assert x[9].any()


@pytest.mark.all
def test_int8_codes_are_exact_at_the_largest_value_of_a_head():
    k = normal(1, 2, SIZE, 8)
    kv = cache.KV.empty(CONFIG, 2, SIZE, jnp.dtype("int8")).write(jnp.array([1]), k, k)
    scale = np.abs(k[0]).max(axis=-1) / 127
    np.testing.assert_allclose(kv.k_scale[1], scale, rtol=1e-6)
    np.testing.assert_allclose(kv.k[1] * kv.k_scale[1][..., None], k[0], atol=scale.max() * 0.51)
    at_top = np.abs(k[0]) == np.abs(k[0]).max(axis=-1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(kv.k[1])[at_top], 127 * np.sign(k[0][at_top]))


def test_float8_codes_are_those_of_the_format():
    """448 at the largest value of a head, and everywhere ml_dtypes' nearest float8."""
    k = normal(1, 2, SIZE, 8)
    kv = cache.KV.empty(CONFIG, 2, SIZE, jnp.dtype("float8_e4m3fn")).write(jnp.array([1]), k, k)
    scale = np.abs(k[0]).max(axis=-1, keepdims=True) / np.float32(448)
    np.testing.assert_allclose(kv.k_scale[1], scale[..., 0], rtol=1e-6)
    codes = np.asarray(kv.read(jnp.array([1])).k[0])
    assert codes.dtype == jnp.float8_e4m3fn
    expected = (k[0] / scale).astype(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(codes.astype(np.float32), expected)
    assert np.abs(codes.astype(np.float32)).max(axis=-1).tolist() == [[448.0] * SIZE] * 2


def test_pages_belong_to_a_part_of_the_batch_and_heads_to_a_part_of_the_mesh():
    for unrolled in (True, False):
        pool = cache.empty(CONFIG, PAGES, SIZE, "int8", unrolled)
        for path, x in jax.tree_util.tree_leaves_with_path(pool):
            axes = cache.axes(path, x)
            assert len(axes) == x.ndim
            sizes = {name: size for name, size in zip(axes, x.shape, strict=True) if name}
            assert sizes == {"batch": PAGES, "kv_heads": CONFIG.num_kv_heads, "positions": SIZE}


@pytest.mark.all
@pytest.mark.parametrize("dtype, unrolled", FORMS)
@pytest.mark.parametrize("window", [None, 3])
def test_four_devices_that_share_the_positions_of_a_page_attend_as_one(dtype, unrolled, window):
    """A prompt of two chunks, then a token of every slot: one device has no position of row 1's
    last page, and with the window some have none at all."""
    spread = sharding.layout((1, 1, 2, 4), sharding.SERVE_RULES)
    q, k, v = normal(2, 16, 4, 8), normal(2, 16, 2, 8), normal(2, 16, 2, 8)
    of_layer = None if window is None else attention_of_models.Window(window, True)

    def run(layout):
        @jax.jit
        def attended(q, k, v):
            state, out = pool(dtype, unrolled), []
            for start, counts in ((0, [8, 6]), (8, [2, 0])):
                rows = np.full(2, start), np.array(counts), TABLE
                attend = cache.fill(*map(jnp.asarray, rows), layout)
                part = slice(start, start + 8)
                found, after = attend(q[:, part], k[:, part], v[:, part], state, of_layer)
                out += [found[row, :count] for row, count in enumerate(counts)]
                state = handed_on(after, unrolled)
            is_written = jnp.array([[True], [False]])
            attend = cache.append(jnp.array([[10], [5]]), is_written, jnp.asarray(TABLE), layout)
            return out, *attend(q[:, -1:], k[:, -1:], v[:, -1:], state, of_layer)

        return attended(q, k, v)

    (prompts, token, after), (want, want_token, want_after) = map(run, (spread, sharding.single_device()))
    close = lambda x, y: np.testing.assert_allclose(
        np.asarray(x, np.float32), np.asarray(y, np.float32), atol=1e-5, rtol=1e-5)
    jax.tree.map(close, (prompts, token), (want, want_token))
    read = lambda x, axis: np.delete(np.asarray(x, np.float32), 0, axis)  # without page 0
    for x, y in zip(*map(jax.tree.leaves, (after, want_after)), strict=True):
        np.testing.assert_array_equal(read(x, x.ndim > 4), read(y, y.ndim > 4))
