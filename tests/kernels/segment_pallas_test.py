"""The TPU kernels: against float64 loops in interpret mode, and compiled for chips that are not
there."""

import contextlib
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_tis.kernels import segment, segment_pallas
from tests import races, tpu
from tests.kernels import segment_loops as loops

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

SHAPE, OFFSET, NUM_SEGMENTS = (9, 300), 124, 132  # ids on both sides of lane 128
OPS = ("sum", "max", "min", "logsumexp")
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
settings = hypothesis.settings(max_examples=3, deadline=None, derandomize=True, database=None)
SEED = st.integers(0, 2**32 - 1)


@contextlib.contextmanager
def interpreted(**params):
    """Tiles of 128 tokens, kernels wherever there is a choice. Reads out of bounds raise, what was
    not written is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REDUCE_TILE", "SCAN_TILE", "CHUNK"):
            patch.setattr(segment_pallas, name, 128)
        patch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, **_: tpu(*x))
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**params)):
            yield


@contextlib.contextmanager
def on_two_cores():
    """The same, each core with blocks of rows of its own, which must not race."""
    with races.none(), interpreted(num_cores_or_threads=2, **races.DETECTED):
        yield


def make(seed, is_contiguous=False):
    """Eight segments with ids from 125 to 132 in three tiles and two blocks of rows."""
    batch = loops.make(seed, SHAPE, NUM_SEGMENTS - OFFSET, is_contiguous)
    weight_bs = np.pad(batch.weight_bs, ((0, 0), (OFFSET, 0)))
    return batch._replace(
        seg=np.where(batch.seg > 0, batch.seg + OFFSET, 0).astype(np.int32), weight_bs=weight_bs
    )


@jax.jit
def reductions(x, low, seg):
    terms = lambda x, low: [x, x, x, x, low]
    return segment_pallas.reduce((x, low), seg, NUM_SEGMENTS, terms, (*OPS, "sum"))


def check_reductions(batch, seg):
    low = batch.x.astype(jnp.bfloat16)
    with interpreted():
        *found, of_low = jax.device_get(reductions(batch.x.astype(np.float32), low, seg))
    for op, got in zip(OPS, found, strict=True):
        want, _ = loops.reduce(batch.x, batch.seg, NUM_SEGMENTS, op, batch.weight_bs)
        is_empty = loops.reduce(batch.x, batch.seg, NUM_SEGMENTS, "count", batch.weight_bs)[0] == 0
        close(got, np.where(is_empty, segment_pallas.NEUTRAL[op], want), err_msg=op)
    want, _ = loops.reduce(low.astype(float), batch.seg, NUM_SEGMENTS, "sum", batch.weight_bs)
    close(of_low, want)


@settings
@hypothesis.given(SEED)
def test_reductions(seed):
    batch = make(seed)
    check_reductions(batch, batch.seg)


def test_the_check_sees_one_wrong_id():
    """Negative control."""
    batch = make(0)
    wrong = batch.seg.copy()
    row, column = np.argwhere(batch.seg == OFFSET + 1)[-1]
    wrong[row, column] = OFFSET + 3
    with pytest.raises(AssertionError):
        check_reductions(batch, wrong)


@jax.jit
def mean_on_tokens(x, seg, weight):
    """Means and the gradient of their weighted sum: a reduction, and a broadcast for the rule."""
    mean = lambda x: segment.segment_reduce(x, seg, NUM_SEGMENTS, "mean")
    value, pull = jax.vjp(mean, x)
    return value, pull(weight)[0]


@settings
@hypothesis.given(SEED)
def test_means_and_their_gradient(seed):
    batch = make(seed)
    arrays = batch.x.astype(np.float32), batch.seg, batch.weight_bs.astype(np.float32)
    with interpreted():
        got, gradient = jax.device_get(mean_on_tokens(*arrays))
    want, of_x = loops.reduce(batch.x, batch.seg, NUM_SEGMENTS, "mean", batch.weight_bs)
    close(got, want)
    close(gradient, of_x)


# Segmentations that hypothesis draws: how long each run of a row is, and of which segment.
RUNS = st.lists(st.tuples(st.integers(1, 140), st.integers(0, 6)), min_size=1, max_size=8)
OF_RUNS = hypothesis.settings(settings, max_examples=4)


def of_runs(rows, seed):
    """A batch [2, 200] of these runs, in which a segment may come back; 0 and 6 are padding."""
    batch = loops.make(seed, (2, 200), 5)
    seg = np.zeros((2, 200), np.int32)
    for row, runs in zip(seg, rows, strict=True):
        ids = np.repeat([i for _, i in runs], [n for n, _ in runs])[:200]
        row[: len(ids)] = ids
    is_padding = (seg == 0) | (seg > 5)
    x = np.where(is_padding, np.nan, np.nan_to_num(batch.x) + batch.weight_bt)
    return batch._replace(seg=seg, x=x)


@functools.partial(jax.jit, static_argnums=0)
def pulled_reduction(op, x, seg, weight):
    value, pull = jax.vjp(lambda x: segment.segment_reduce(x, seg, 5, op), x)
    return value, pull(weight)[0]


@pytest.mark.all
@OF_RUNS
@hypothesis.given(st.tuples(RUNS, RUNS), SEED, st.sampled_from(["sum", "mean", *OPS[1:]]))
def test_reductions_of_any_segments_and_their_gradients(rows, seed, op):
    batch = of_runs(rows, seed)
    arrays = batch.x.astype(np.float32), batch.seg, batch.weight_bs.astype(np.float32)
    with interpreted():
        found = jax.device_get(pulled_reduction(op, *arrays))
    want = loops.reduce(batch.x, batch.seg, 5, op, batch.weight_bs)
    for a, b in zip(found, want, strict=True):
        close(a, b, err_msg=op)


@functools.partial(jax.jit, static_argnums=(0, 1))
def pulled_scan(op, reverse, x, seg, decay, weight):
    scan = functools.partial(segment.segment_scan, reverse=reverse)
    if op == "decay":
        value, pull = jax.vjp(lambda x, decay: scan(x, seg, decay=decay), x, decay)
    else:
        value, pull = jax.vjp(lambda x: scan(x, seg, op), x)
    return value, *pull(weight)


@pytest.mark.all
@OF_RUNS
@hypothesis.given(
    st.tuples(RUNS, RUNS), SEED, st.sampled_from(["sum", "min", "max", "decay"]), st.booleans()
)
def test_scans_of_any_runs_and_their_gradients(rows, seed, op, reverse):
    batch = of_runs(rows, seed)
    batch = batch._replace(
        seg=np.where(batch.seg > 5, 0, batch.seg), decay=np.minimum(batch.decay, 0.95)
    )
    arrays = (x.astype(np.float32) for x in (batch.x, batch.decay, batch.weight_bt))
    x, decay, weight = arrays
    with interpreted():
        found = jax.device_get(pulled_scan(op, reverse, x, batch.seg, decay, weight))
    want = loops.scan(batch.x, batch.seg, op, batch.decay, reverse, batch.weight_bt)
    for a, b in zip(found, want, strict=False):  # a gradient of the decay where there is one
        close(a, b, rtol=1e-3, atol=1e-3, err_msg=op)


@pytest.mark.all
def test_broadcasts_and_their_gradient():
    batch = of_runs([[(30, 1), (100, 3), (20, 0), (50, 5)], [(200, 2)]], 3)
    x, weight = batch.weight_bs.astype(np.float32), batch.weight_bt.astype(np.float32)
    with on_two_cores():
        value, pull = jax.vjp(lambda x: segment.segment_broadcast(x, batch.seg), x)
        gradient = jax.block_until_ready(pull(weight)[0])
    close(value, loops.broadcast(batch.weight_bs, batch.seg))
    close(gradient, loops.reduce(batch.weight_bt, batch.seg, 5, "sum", batch.weight_bs)[0])


def test_an_infinite_value_is_the_logsumexp_of_its_segment():
    x = jnp.asarray([[0.0, jnp.inf, 1.0, -jnp.inf, -jnp.inf, 2.0]])
    seg = jnp.asarray([[1, 1, 2, 2, 3, 4]])
    with interpreted():
        found = segment.segment_reduce(x, seg, 5, "logsumexp")
    np.testing.assert_array_equal(found, [[jnp.inf, 1.0, -jnp.inf, 2.0, -jnp.inf]])


@functools.partial(jax.jit, static_argnums=3)
def decayed(x, seg, decay, reverse):
    return segment.segment_scan(x, seg, decay=decay, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_with_a_decay(reverse):
    batch = make(4, is_contiguous=True)
    x, decay = batch.x.astype(np.float32), batch.decay.astype(np.float32)
    with on_two_cores():
        got = jax.block_until_ready(decayed(x, batch.seg, decay, reverse))
    close(got, loops.scan(batch.x, batch.seg, "decay", batch.decay, reverse, batch.weight_bt)[0])


@jax.jit
def lowest(x, low, seg):
    return segment.segment_scan((x, low), seg, "min", reverse=True)


@settings
@hypothesis.given(SEED)
def test_scans_of_minima(seed):
    batch = make(seed, is_contiguous=True)
    low = batch.x.astype(jnp.bfloat16)
    with interpreted():
        found = lowest(batch.x.astype(np.float32), low, batch.seg)
    for x, got in zip((batch.x, low.astype(float)), found, strict=True):
        close(got, loops.scan(x, batch.seg, "min", batch.decay, True, batch.weight_bt)[0])


@jax.jit
def statistics(old, behav, mask, seg):
    return segment.ratio_stats(old, behav, mask, seg, NUM_SEGMENTS)


@pytest.mark.all
def test_ratio_stats():
    batch = make(9)
    old, behav = loops.log_probs(batch)
    mask = batch.weight_bt > -0.5
    arrays = old.astype(np.float32), behav.astype(np.float32), mask, batch.seg
    with on_two_cores():
        stats = jax.device_get(statistics(*arrays))
    for name, want in loops.ratio_stats(old, behav, mask, batch.seg, NUM_SEGMENTS).items():
        np.testing.assert_allclose(getattr(stats, name), want, rtol=2e-4, atol=1e-4, err_msg=name)


def test_expm1_near_zero_and_far():
    x = np.concatenate([np.geomspace(1e-8, 20.0, 200), -np.geomspace(1e-8, 20.0, 200)])
    got = segment_pallas.expm1(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, np.expm1(x), rtol=2e-6)


@pytest.mark.all
@pytest.mark.parametrize("topology, is_wide", [
    ("v5e:2x2", False), ("v5p:2x2x1", False), ("v5e:2x2", True),
])
def test_kernels_compile_for_rows_on_four_chips(topology, is_wide):
    """In a program with 64-bit types too."""
    mesh = Mesh(np.array(tpu.devices(topology)).reshape(4), "d", axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    array = lambda dtype: jax.ShapeDtypeStruct((36, 1000), dtype, sharding=rows)

    def program(x, low, seg):
        reduce = lambda op: segment.segment_reduce((x, low), seg, 130, op, rows=rows)
        scan = lambda op, **more: segment.segment_scan((x, low), seg, op, rows=rows, **more)
        stats = segment.ratio_stats(x, low, seg > 1, seg, 130, rows=rows)
        return (
            reduce("mean"), reduce("logsumexp"), stats, scan("max"),
            scan("sum", decay=low, reverse=True), segment.segment_broadcast(
                stats.count, seg, rows=rows),
        )

    arrays = array(jnp.float32), array(jnp.bfloat16), array(jnp.int32)
    with jax.enable_x64(is_wide):
        text = jax.jit(program).lower(*arrays).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 6
    assert "scatter(" not in text and "all-gather" not in text
