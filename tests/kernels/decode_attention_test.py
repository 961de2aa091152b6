"""The decode kernel, interpreted as a TPU would run it, against float64 numpy and other kernels."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import paged_attention, ragged_paged_attention

from jaxrl_tis.engine import cache
from jaxrl_tis.kernels import decode_attention
from jaxrl_tis.models import attention, transformer
from tests import jitted, races

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

LAYER, LAYERS, HEADS, GROUP, SIZE, PAGES = 1, 2, 2, 3, 128, 16
# First and last places of pages, blocks of two pages, and a table; tiles of values and of scales.
INDEX = np.array([0, 127, 128, 255, 256, 4 * SIZE - 1, 0, 300], np.int32)
SLOTS = len(INDEX)
# Pages 1 and 2 hold what slots 4, 5 and 7 begin with; 8, 11 and 15 nobody has.
TABLE = np.array([
    [3, 0, 0, 0], [4, 0, 0, 0], [5, 6, 0, 0], [7, 9, 0, 0], [1, 2, 10, 0], [1, 2, 12, 13],
    [0, 0, 0, 0], [1, 2, 14, 0],
], np.int32)
PAGE = TABLE[np.arange(len(INDEX)), INDEX // SIZE]
TOLERANCE = {
    "float32": dict(atol=3e-6), "bfloat16": dict(atol=1e-2, rtol=2**-7),
    "int8": dict(atol=1e-2, rtol=2**-7),
}


@jitted.function
def made(dtype, layers, unseen, q, key, value):
    """The fields of a case."""
    pool = cache.StackedKV(jnp.zeros(0, dtype), None)
    old = pool.beside(layers[:, 0], layers[:, 1])
    kv, scale = jax.tree.map(lambda x: x.reshape(LAYERS, PAGES, *x.shape[1:]), (old.kv, old.scale))
    if scale is None:
        kv = jnp.where(unseen[:, :, None, :, None], jnp.nan, kv)
    else:
        scale = jnp.where(unseen[:, :, None, None], jnp.nan, scale)
    q = q.astype("float32" if dtype == "float32" else "bfloat16")
    return q, pool.beside(key, value), cache.StackedKV(kv, scale)


@dataclasses.dataclass
class Case:
    """Of a decode step: queries, the new token and the pool, NaN where no slot may look."""

    q: jax.Array
    new: cache.StackedKV
    pool: cache.StackedKV

    @classmethod
    def of(cls, dtype, width, slots=SLOTS):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.normal(0, 1, shape).astype(np.float32)
        layers = normal(LAYERS * PAGES, 2, HEADS, SIZE, width)
        unseen = np.ones((LAYERS, PAGES, SIZE), bool)
        for index, table in zip(INDEX[:slots], TABLE[:slots], strict=True):
            for i, page in enumerate(table[: index // SIZE + 1]):
                unseen[LAYER, page] &= np.arange(i * SIZE, (i + 1) * SIZE) >= index
        new = [normal(slots, HEADS, GROUP, width), *normal(2, slots, HEADS, width)]
        return cls(*made(dtype, layers, unseen, *new))

    def run(self, *args, **options):
        """(attention, the pool after it) in blocks of so many pages; no race is found."""
        out, pool, _ = self.part(*args, **options)
        return np.asarray(out, np.float64), pool

    def part(
        self, index=INDEX, page=PAGE, table=TABLE, layer=LAYER, pages=2, cores=1, first=None, has=None,
        sinks=None, rotation=None,
    ):
        """What `run` returns, and the log of the softmax's sum with `has`. With a rotation the case's
        queries and key are those before it."""
        slots = len(self.q)
        is_written = np.minimum(page[:slots], 1)
        rows, new = self.q, self.new.kv.reshape(slots, HEADS, 2, -1)
        if rotation is not None:
            rows, new = jnp.concatenate([rows, new], axis=2), None
        with races.none():
            out, kv, scale, log_total = jax.block_until_ready(kernel(
                rows, new, self.new.scale, self.pool.kv, self.pool.scale, jnp.int32(layer),
                index[:slots], is_written, table[:slots], first, has, sinks, rotation,
                block_bytes=pages * self.pool.kv[0, 0].nbytes, cores=cores,
            ))
        return out, cache.StackedKV(kv, scale), log_total

    def expected(self, page=PAGE):
        """The same in float64, by a loop."""
        wide = lambda tree: jax.tree.map(lambda x: np.array(x, np.float64), tree)
        old, new = wide(self.pool), wide(self.new)
        out, width = np.zeros(self.q.shape), self.q.shape[-1]
        for slot, index in enumerate(INDEX[: len(self.q)]):
            pages = TABLE[slot, : index // SIZE + 1]
            for head in range(HEADS):
                kv = np.concatenate(old.kv[LAYER, pages, head])[: index + 1]
                kv[index] = new.kv[slot, head]
                key, value = kv[:, :width], kv[:, width:]
                if old.scale is not None:
                    scale = np.concatenate(old.scale[LAYER, pages, head], 1)[:, : index + 1]
                    scale[:, index] = new.scale[slot, head]
                    key, value = key * scale[0][:, None], value * scale[1][:, None]
                scores = np.asarray(self.q[slot, head], np.float64) @ key.T / np.sqrt(width)
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[slot, head] = p / p.sum(axis=1, keepdims=True) @ value
            if page[slot]:
                old.kv[LAYER, page[slot], :, index % SIZE] = new.kv[slot]
                if old.scale is not None:
                    old.scale[LAYER, page[slot], :, :, index % SIZE] = new.scale[slot]
        return out, old


@functools.partial(jax.jit, static_argnames=("block_bytes", "cores"))
def kernel(*args, block_bytes, cores):
    """What was not written is NaN."""
    interpret = pltpu.InterpretParams(num_cores_or_threads=cores, **races.DETECTED)
    with mock.patch.object(decode_attention, "BLOCK_BYTES", block_bytes):
        return decode_attention.decode_attention(*args, interpret=interpret)


def check(case, page=PAGE, **options):
    """Attention near float64, the pool exact, NaN included."""
    page = page[: len(case.q)]
    out, pool = case.run(page=page, **options)
    want, want_pool = case.expected(page)
    np.testing.assert_allclose(out, want, **TOLERANCE[str(case.pool.kv.dtype)])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x, y.dtype), y), pool,
                 want_pool)
    return out


@pytest.mark.cases("bfloat16-64-2-1", "float32-128-1-1", "int8-128-2-2")
@pytest.mark.parametrize("dtype, width, pages, cores", [
    ("bfloat16", 64, 2, 1), ("float32", 128, 1, 1), ("float32", 64, 4, 1), ("int8", 64, 3, 1),
    ("int8", 128, 2, 2),
])
def test_attention_and_pool_equal_float64(dtype, width, pages, cores):
    check(Case.of(dtype, width), pages=pages, cores=cores)


def test_other_places_pages_and_layers_are_another_answer():
    case = Case.of("float32", 64)
    out = check(case)
    for other in (dict(layer=0), dict(index=INDEX // 2), dict(table=TABLE[:, ::-1])):
        seen = case.run(page=0 * PAGE, **other)[0]
        assert not np.abs(seen - out)[4].max() < 0.1  # NaN where nobody may look


@pytest.mark.cases("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_page_0_changes_nothing_and_sees_the_new_token(dtype):
    """In some of the slots, an odd number of them."""
    case = Case.of(dtype, 64, slots=7)
    both = check(case), check(case, page=np.where(np.arange(8) % 2, PAGE, 0))
    np.testing.assert_array_equal(*both)


def test_a_slot_that_reads_what_another_writes_is_a_race():
    case, table = Case.of("float32", 64), TABLE.copy()
    table[5, 0] = TABLE[4, 2]
    with pytest.raises(AssertionError, match="races"):
        case.run(table=table)


def elsewhere(case, *of_layer):
    """(attention, the pool after it) of other platforms; the case then has their key and value."""
    rng, slots = np.random.default_rng(1), len(case.q)

    @jitted.function
    def run(q, pool, k, v):
        layer = cache.LayerOf(pool, jnp.int32(LAYER)).append(PAGE, INDEX % SIZE, k, v)
        rows = q.reshape(slots, 1, -1, 64)
        out = attention.paged_attention(rows, layer.read, TABLE, INDEX[:, None], *of_layer)
        return pool.beside(k, v), out.reshape(q.shape), layer.pool

    k, v = rng.normal(0, 1, (2, slots, HEADS, 64)).astype(case.q.dtype)
    case.new, out, pool = run(case.q, case.pool, k, v)
    return np.asarray(out, np.float64), pool


@pytest.mark.cases("int8")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_equals_the_attention_of_other_platforms(dtype):
    case = Case.of(dtype, 64)
    want, want_pool = elsewhere(case)
    found, pool = case.run()
    np.testing.assert_allclose(found, want, **TOLERANCE[dtype])
    own = lambda x: np.asarray(x[:, 1:], np.float32)  # page 0 takes the idle slot's token
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(own(x), own(y)), pool, want_pool)


@pytest.mark.cases("bfloat16-1-150")
@pytest.mark.parametrize("dtype, pages, window", [
    ("float32", 1, 1), ("bfloat16", 1, 150), ("int8", 2, 130), ("float32", 3, 200),
])
def test_a_window_hides_the_positions_before_it(dtype, pages, window):
    """As other platforms hide them, in blocks that begin before it, with sinks; the pool is that
    without it."""
    case, sinks = Case.of(dtype, 64), np.linspace(-2, 4, HEADS * GROUP).astype(np.float32)
    first = np.maximum(INDEX - window + 1, 0)
    want, _ = elsewhere(case, first[:, None], sinks)
    found, pool = case.run(pages=pages, first=first, sinks=sinks)
    np.testing.assert_allclose(found, want, **TOLERANCE[dtype])
    whole, whole_pool = case.run(pages=pages, sinks=sinks)
    assert (np.abs(whole - found).max(axis=(1, 2, 3)) > 0.05).tolist() == (first > 0).tolist()
    wide = lambda x: np.asarray(x, np.float32)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(wide(x), wide(y)), pool, whole_pool)


@pytest.mark.all
@pytest.mark.parametrize("dtype, rotated", [("bfloat16", 32), ("float32", 32), ("float32", 12)])
def test_queries_and_keys_are_rotated(dtype, rotated):
    """As the model rotates them, and no value."""
    case = Case.of(dtype, 64)
    angles = INDEX[:, None, None] * 10.0 ** -np.linspace(0, 4, rotated)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out, pool = case.run(rotation=(cos, sin))

    @jitted.function
    def turned(q, kv):
        rotate = lambda x: transformer._rotate(x[:, None], cos[:, None], sin[:, None])[:, 0]
        key = rotate(kv[..., :64])
        return rotate(q.reshape(SLOTS, -1, 64)).reshape(q.shape), jnp.concatenate([key, kv[..., 64:]], axis=-1)

    before = case.q
    case.q, kv = turned(case.q, case.new.kv)
    case.new = cache.StackedKV(kv, None)
    assert np.abs(np.asarray(case.q - before, np.float32)[4:6]).max(axis=(1, 2, 3)).min() > 0.5
    want, want_pool = case.run()
    np.testing.assert_allclose(out, want, **TOLERANCE[dtype])
    wide = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(wide(pool.kv), wide(want_pool.kv), rtol=2**-7, atol=1e-6)


@pytest.mark.all
def test_a_part_of_a_sequence_without_its_new_token():
    """Every second slot has its new token elsewhere: it attends to its pages, and its pool stays."""
    case, has = Case.of("int8", 64), (np.arange(SLOTS) % 2 | (INDEX == 0)).astype(np.int32)
    page, index = np.where(has, PAGE, 0), np.where(has, INDEX, INDEX - 1)
    first = np.zeros(SLOTS, np.int32)
    out, pool, log_total = case.part(index=index, page=page, first=first, has=has)

    @jitted.function
    def other(q, pool):
        layer, rows = cache.LayerOf(pool, jnp.int32(LAYER)), q.reshape(SLOTS, 1, -1, 64)
        found = attention.paged_attention(rows, layer.read, TABLE, index[:, None], is_part=True)
        return jax.tree.map(lambda x: x.reshape(SLOTS, HEADS, GROUP, *x.shape[3:]), found)

    want, want_log = other(case.q, pool)
    is_kept = (page > 0) | (has == 0)  # an idle slot's token is in no page
    for found, expected in ((out, want), (log_total, want_log)):
        found, expected = (np.asarray(x, np.float64)[is_kept] for x in (found, expected))
        np.testing.assert_allclose(found, expected, **TOLERANCE["int8"])
    changed = np.asarray(pool.kv) != np.asarray(case.pool.kv)
    assert set(np.flatnonzero(changed.any(axis=(0, 2, 3, 4)))) == set(page[page > 0])


@pytest.mark.all
def test_equals_the_paged_attention_of_jax():
    """Which takes pools [N,P,S,K] of keys and of values, of width 128, in bfloat16."""
    case = Case.of("bfloat16", 128, slots=6)
    out, pool = case.run()
    kv = jnp.nan_to_num(jnp.swapaxes(pool.kv[LAYER], 0, 1))
    queries = (case.q * 128**-0.5).reshape(6, -1, 128)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        want = paged_attention.paged_attention(
            queries, kv[..., :128], kv[..., 128:], INDEX[:6] + 1, TABLE[:6],
            pages_per_compute_block=2,
        )
    want = np.asarray(want.reshape(case.q.shape), np.float64)
    np.testing.assert_allclose(out, want, atol=2e-2, rtol=2**-7)


@pytest.mark.all
def test_equals_the_ragged_paged_attention_of_jax():
    """Which takes a pool [P,S,2N,K], keys and values of a head side by side."""
    case = Case.of("float32", 128, slots=6)
    out, pool = case.run()
    kv = jnp.swapaxes(pool.kv[LAYER], 1, 2).reshape(PAGES, SIZE, 2 * HEADS, 128)
    queries, starts = case.q.reshape(6, -1, 128), np.arange(7, dtype=np.int32)
    want = jax.jit(lambda q, kv: ragged_paged_attention.ref_ragged_paged_attention(
        q, kv, INDEX[:6] + 1, TABLE[:6], starts, starts[-1:], sm_scale=128**-0.5
    ))(queries, jnp.nan_to_num(kv))
    np.testing.assert_allclose(out, np.asarray(want, np.float64).reshape(out.shape), atol=1e-5)
