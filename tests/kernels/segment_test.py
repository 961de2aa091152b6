"""Reductions, broadcasts and scans over segments against float64 loops; values and gradients."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.diagnostics import divergences, mismatch
from jaxrl_tis.estimators import loss, masks, ratios, weights
from jaxrl_tis.kernels import segment, segment_reference
from tests import compilation
from tests.kernels import segment_loops as loops

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp", "count")


def value_and_gradient(function, x, weight):
    """function(x) and the gradient of sum(weight * function(x))."""

    @jax.jit
    def both(x, weight):
        value, pull = jax.vjp(function, x)
        return value, pull(weight.astype(value.dtype))[0]

    return jax.device_get(both(x, weight))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op):
    batch = loops.make(7)
    weight = batch.weight_bs
    with jax.enable_x64(True):
        got, gradient = value_and_gradient(
            lambda x: segment.segment_reduce(x, batch.seg, loops.NUM_SEGMENTS, op), batch.x, weight
        )
    want, want_gradient = loops.reduce(batch.x, batch.seg, loops.NUM_SEGMENTS, op, weight)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-12, atol=1e-15)


SCANS = {"sum": [1, 1, 0, 1, 2, 0, 0, 1], "max": [1, 1, 0, 1, 1, 0, 0, 1],
         "min": [1, 0, 0, 1, 1, 0, 0, 0]}


def every_operation(x, seg):
    return (
        {op: segment.segment_reduce(x, seg, 3, op) for op in REDUCTIONS},
        {op: segment.segment_scan(x, seg, op) for op in SCANS},
        {"": segment.segment_broadcast(x[:, :3], seg)},
        segment.log_ratio_stats(x, seg > 0, seg, 3)._asdict(),
    )


@pytest.mark.cases("float32", "int64")
@pytest.mark.parametrize("kind", ["float32", "bool", "float64", "int32", "int64"])
def test_programs_with_64_bit_types_take_every_kind_of_operand(kind):
    """Kernels, which have 32 bits alone, are traced on every platform."""
    x, seg = np.array([[1, 0, 1, 1, 1, 0, 0, 1]], kind), np.array([[1, 1, 0, 2, 2, 3, 3, 3]])
    dtype = "float64" if kind == "float64" else "float32"
    with jax.enable_x64(True):
        for ids in ("int32", "int64"):
            found = jax.eval_shape(every_operation, x, seg.astype(ids))
            assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
        if kind != "int64":
            return
        found = jax.device_get(jax.jit(every_operation)(x, seg))
    totals, running, spread, stats = found
    want = {"sum": [1, 2, 1], "mean": [1 / 2, 1, 1 / 3], "max": [1, 1, 1], "min": [0, 1, 0],
            "count": [2, 2, 3], "logsumexp": np.log([1 + np.e, 2 * np.e, 2 + np.e])}
    for op in REDUCTIONS:
        np.testing.assert_allclose(totals[op][0], want[op], rtol=1e-6, err_msg=op)
    for op in SCANS:
        np.testing.assert_array_equal(running[op][0], SCANS[op], err_msg=op)
    np.testing.assert_array_equal(spread[""][0], [1, 1, 0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(stats["log_ratio_sum"][0], want["sum"])


@pytest.mark.all
def test_several_inputs_are_reduced_like_each_of_them():
    batch = loops.make(3)
    xs = batch.x.astype(np.float32), -batch.x.astype(np.float32)
    both = segment.segment_reduce(xs, batch.seg, loops.NUM_SEGMENTS, "max")
    for x, got in zip(xs, both, strict=True):
        alone = segment.segment_reduce(x, batch.seg, loops.NUM_SEGMENTS, "max")
        np.testing.assert_array_equal(got, alone)


def test_a_tie_shares_the_gradient_and_an_empty_segment_has_none():
    x, seg = jnp.array([[2.0, 2.0, 1.0, 5.0]]), jnp.array([[1, 1, 1, 0]])
    largest = lambda x: jnp.sum(segment.segment_reduce(x, seg, 3, "max"))
    np.testing.assert_array_equal(jax.grad(largest)(x), [[0.5, 0.5, 0.0, 0.0]])
    of_empty = {op: segment.segment_reduce(x, seg, 3, op)[0, 1] for op in REDUCTIONS}
    assert of_empty == {op: -np.inf if op == "logsumexp" else 0.0 for op in REDUCTIONS}


def test_broadcast():
    batch = loops.make(11)
    weight = np.where(batch.seg > 0, np.nan_to_num(batch.x), np.nan)  # padding may hold anything
    with jax.enable_x64(True):
        got, gradient = value_and_gradient(
            lambda x: segment.segment_broadcast(x, batch.seg), batch.weight_bs, weight
        )
    np.testing.assert_array_equal(got, loops.broadcast(batch.weight_bs, batch.seg))
    want, _ = loops.reduce(weight, batch.seg, loops.NUM_SEGMENTS, "sum", batch.weight_bs)
    np.testing.assert_allclose(gradient, want, rtol=1e-12)


@pytest.mark.all
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", ["sum", "min", "max", "decay"])
def test_scans(op, reverse):
    batch = loops.make(5, is_contiguous=True)
    decay = batch.decay if op == "decay" else None
    with jax.enable_x64(True):

        def scan(x):
            name = "sum" if op == "decay" else op
            return segment.segment_scan(x, batch.seg, name, decay=decay, reverse=reverse)

        got, gradient = value_and_gradient(scan, batch.x, batch.weight_bt)
    want, want_gradient, _ = loops.scan(
        batch.x, batch.seg, op, batch.decay, reverse, batch.weight_bt
    )
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradient_of_a_decay(reverse):
    batch = loops.make(6, is_contiguous=True)
    with jax.enable_x64(True):
        _, gradient = value_and_gradient(
            lambda a: segment.segment_scan(batch.x, batch.seg, decay=a, reverse=reverse),
            batch.decay, batch.weight_bt,
        )
    *_, want = loops.scan(batch.x, batch.seg, "decay", batch.decay, reverse, batch.weight_bt)
    np.testing.assert_allclose(gradient, want, rtol=1e-11, atol=1e-12)


@pytest.mark.all
def test_runs_may_be_given_by_where_they_begin():
    x, is_start = jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[False, False, True, False]])
    np.testing.assert_array_equal(segment.segment_scan(x, is_start), [[1, 3, 4, 12]])
    np.testing.assert_array_equal(
        segment.segment_scan(x, is_start, reverse=True), [[3, 2, 12, 8]]
    )
    with pytest.raises(ValueError, match="decay"):
        segment.segment_scan(x, is_start, "max", decay=x)


def test_doubling_and_positions_agree():
    batch = loops.make(8, is_contiguous=True)
    is_start = np.diff(batch.seg, axis=1, prepend=-1) != 0
    x, decay = np.nan_to_num(batch.x).astype(np.float32), batch.decay.astype(np.float32)
    for op, a in (("sum", None), ("sum", decay), ("min", None)):
        one, other = (
            np.asarray(jax.jit(f, static_argnums=0)(op, is_start, (x,), a)[0])
            for f in (segment_reference._scan_by_position, segment_reference._scan_by_doubling)
        )
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_ratio_stats():
    batch = loops.make(9)
    old, behav = loops.log_probs(batch)
    mask = batch.weight_bt > -0.5
    with jax.enable_x64(True):
        stats = jax.device_get(
            segment.ratio_stats(old, behav, mask, batch.seg, loops.NUM_SEGMENTS)
        )
        gap = np.where(mask & (batch.seg > 0), old - behav, np.nan)
        of_ratio = segment.log_ratio_stats(gap, mask, batch.seg, loops.NUM_SEGMENTS)
    wanted = loops.ratio_stats(old, behav, mask, batch.seg, loops.NUM_SEGMENTS)
    assert set(wanted) == set(stats._fields)
    for name, want in wanted.items():
        np.testing.assert_allclose(getattr(stats, name), want, rtol=1e-12, err_msg=name)
        if name in ("logp_behav_sum", "dp_sum", "dp_max"):
            assert getattr(of_ratio, name) is None
        else:
            np.testing.assert_allclose(getattr(of_ratio, name), want, rtol=1e-12, err_msg=name)


@pytest.mark.all
def test_bfloat16_is_computed_in_float32():
    x, seg = jnp.ones((1, 600), jnp.bfloat16), jnp.ones((1, 600), jnp.int32)
    total = segment.segment_reduce(x, seg, 1, "sum")  # bfloat16 would stop at 256
    assert total.dtype == jnp.float32 and total[0, 0] == 600.0
    assert segment.segment_scan(x, seg)[0, -1] == 600.0
    gradient = jax.grad(lambda x: jnp.sum(segment.segment_reduce(x, seg, 1, "sum")))(x)
    assert gradient.dtype == jnp.bfloat16


def test_the_references_lower_for_a_gpu():
    x, seg = jnp.ones((2, 40)), jnp.ones((2, 40), jnp.int32)

    def program(x):
        mean = segment.segment_reduce(x, seg, 3, "mean")
        return jnp.sum(segment.segment_broadcast(mean, seg) * segment.segment_scan(x, seg, "max"))

    module = jax.export.export(jax.jit(jax.grad(program)), platforms=["cuda"])(x).mlir_module()
    assert "stablehlo.scatter" in module and "tpu_custom_call" not in module


def test_weights_masks_and_metrics_share_their_reductions():
    """A compiled program has one scatter per statistic, whoever asks for it."""
    batch = loops.make(2)
    old, behav = (jnp.asarray(x, jnp.float32) for x in loops.log_probs(batch))

    def program(old, behav, mask, seg):
        log_ratio = ratios.safe_log_ratio(old, behav, mask)
        kept = [
            masks.MASKS[f"seq_{name}"](log_ratio, mask, seg, upper=2.0)
            for name in ("sum_k1", "mean_k1", "sum_k3", "mean_k3", "max_k3", "sum_ratio")
        ]
        found = [weights.seq_tis(log_ratio, mask, seg), weights.geo_mis(log_ratio, mask, seg)]
        metrics = divergences.divergence_metrics(log_ratio, mask, seg)
        metrics |= divergences.response_metrics(old, behav, mask, seg)
        metrics |= mismatch.offpolicy_metrics(old, behav, mask, seg)
        counts = loss.weight_counts(log_ratio, {"mask": mask, "seg": seg}, ("seq_tis", {"cap": 2.0}))
        return kept, found, masks.veto(log_ratio, mask, seg), metrics, counts

    seg = ratios.Segments(jnp.asarray(batch.seg), loops.NUM_SEGMENTS)
    lowered = jax.jit(program).lower(old, behav, batch.seg > 0, seg)
    text = lowered.compile(compiler_options=compilation.EMITTED_AS_IN_A_RUN).as_text()
    # Count, sums of l, k1, k3, log mu and |dp|, maxima of k1, k3 and |dp|; the sum of l once more,
    # as one is of the log-ratio that was given and one of the log-probs.
    assert text.count(" scatter(") == 10
