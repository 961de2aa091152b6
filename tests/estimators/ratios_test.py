"""Masked reductions, the clamp and sums over sequences, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import ratios
from tests import jitted

ratios = jitted.Module(ratios)

NAN = float("nan")


def test_reductions_ignore_what_stands_outside_the_mask():
    x = np.array([[1.0, NAN, 4.0], [np.inf, 7.0, -np.inf]])
    mask = np.array([[1, 0, 1], [0, 1, 0]])
    assert ratios.masked_sum(x, mask) == 12.0
    assert ratios.masked_mean(x, mask) == 4.0
    np.testing.assert_array_equal(ratios.masked_mean(x, mask, axis=1), [2.5, 7.0])
    assert ratios.masked_max(x, mask) == 7.0
    assert ratios.masked_min(x, mask) == 1.0
    # Deviations -3, 0, 3: sqrt(18 / 3) and, with ddof 1, sqrt(18 / 2).
    np.testing.assert_allclose(ratios.masked_std(x, mask), np.sqrt(6.0), rtol=1e-6)
    np.testing.assert_allclose(ratios.masked_std(x, mask, ddof=1), 3.0, rtol=1e-6)


def test_reductions_of_an_empty_mask_are_zero():
    x, mask = np.full((2, 3), NAN), np.zeros((2, 3), bool)
    reductions = (
        ratios.masked_sum,
        ratios.masked_mean,
        ratios.masked_max,
        ratios.masked_min,
        ratios.masked_std,
    )
    for reduction in reductions:
        assert reduction(x, mask) == 0.0, reduction.__name__
    one = np.array([[True, False, False], [False] * 3])
    assert ratios.masked_std(np.ones((2, 3)), one, ddof=1) == 0.0


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_masks_of_any_type_are_the_same_mask(dtype):
    mask = np.array([[1, 0, 1]]).astype(dtype)
    x = np.array([[1.0, NAN, 5.0]])
    assert ratios.masked_mean(x, mask) == 3.0
    assert ratios.masked_count(x, mask) == 2.0
    np.testing.assert_array_equal(ratios.safe_log_ratio(x, x - 1.0, mask), [[1.0, 0.0, 1.0]])


def test_compute_dtype_goes_up_to_float32_and_never_down():
    assert ratios.as_float(np.ones(2, jnp.bfloat16)).dtype == np.float32
    assert ratios.as_float(np.ones(2, np.int32)).dtype == np.float32
    # 300 ones summed in bfloat16 stop at 256.
    assert ratios.masked_sum(np.ones(300, jnp.bfloat16), np.ones(300)) == 300.0
    with jax.enable_x64(True):
        x = np.ones((1, 2), np.float64)
        assert ratios.masked_mean(x, x).dtype == np.float64
        assert ratios.safe_divide(np.ones(2, np.float32), np.arange(2)).dtype == np.float32


def test_clamp_passes_the_gradient_on_the_closed_interval():
    x = np.array([-3.0, -2.0, 0.5, 2.0, 3.0])
    np.testing.assert_array_equal(ratios.clamp(x, -2.0, 2.0), [-2.0, -2.0, 0.5, 2.0, 2.0])
    gradient = jitted.grad(lambda x: jnp.sum(ratios.clamp(x, -2.0, 2.0)))(x)
    np.testing.assert_array_equal(gradient, [0.0, 1.0, 1.0, 1.0, 0.0])


def test_log_ratio_of_padding_is_zero_before_exp():
    logp = np.array([[-1.0, NAN, -1000.0, np.inf]])
    base = np.array([[-1.5, -1.0, 1000.0, -np.inf]])
    mask = np.array([[True, False, False, False]])

    def total(logp, base):
        return jnp.sum(jnp.exp(ratios.safe_log_ratio(logp, base, mask)))

    value, gradients = jitted.value_and_grad(total, (0, 1))(logp, base)
    np.testing.assert_allclose(value, np.exp(0.5) + 3.0, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], [[np.exp(0.5), 0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [[-np.exp(0.5), 0, 0, 0]], rtol=1e-6)


def test_sums_over_the_sequences_of_packed_rows():
    x = np.array([[1.0, 2.0, 4.0, 8.0, NAN], [16.0, 32.0, NAN, 64.0, 128.0]])
    seg = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 2]])
    mask = np.array([[1, 1, 0, 1, 0], [1, 1, 0, 1, 0]])
    np.testing.assert_array_equal(
        ratios.sequence_sum(x, mask, seg), [[3, 8, 0, 0, 0], [112, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        ratios.sequence_count(x, mask, seg), [[2, 1, 0, 0, 0], [3, 0, 0, 0, 0]]
    )
    mean_bs = ratios.sequence_mean(x, mask, seg)
    np.testing.assert_allclose(mean_bs, [[1.5, 8, 0, 0, 0], [112 / 3, 0, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(ratios.to_tokens(mean_bs[:1], seg[:1], 5), [[1.5, 1.5, 8, 8, 0]])


def test_sums_of_unpacked_rows_are_one_sequence_each():
    x = np.array([[1.0, 2.0, NAN], [NAN, NAN, NAN]])
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(ratios.sequence_sum(x, mask), [[3.0], [0.0]])
    np.testing.assert_array_equal(ratios.sequence_mean(x, mask), [[1.5], [0.0]])
    np.testing.assert_array_equal(
        ratios.to_tokens(np.array([[1.5], [0.0]]), None, 2), [[1.5, 1.5], [0, 0]]
    )


def test_every_token_may_be_its_own_sequence():
    x, seg = np.array([[1.0, 2.0, 3.0]]), np.array([[1, 2, 3]])
    sums = ratios.sequence_sum(x, np.ones_like(x), seg)
    np.testing.assert_array_equal(sums, x)
    np.testing.assert_array_equal(ratios.to_tokens(sums, seg, 3), x)


def test_largest_value_of_a_sequence():
    x = np.array([[-3.0, -1.0, 9.0, NAN, 2.0], [NAN, NAN, np.inf, 7.0, 1.0]])
    mask = np.array([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(ratios.sequence_max(x, mask), [[2.0], [0.0]])
    seg = np.array([[1, 1, 1, 2, 3], [1, 1, 0, 0, 0]])
    expected = [[-1, 0, 2, 0, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(ratios.sequence_max(x, mask, seg), expected)


def test_running_results_start_anew_with_every_sequence():
    x = np.array([[1.0, 2.0, 4.0, 8.0, 16.0], [5.0, 3.0, 4.0, 1.0, 2.0]])
    seg = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 2, 3]])
    starts = ratios.segment_starts(x, seg)
    np.testing.assert_array_equal(starts, [[1, 0, 1, 0, 1], [1, 1, 0, 0, 1]])
    for ids in (seg, ratios.Segments(seg, 3)):
        sums = ratios.running("sum", x, seg, ids)
        np.testing.assert_array_equal(sums, [[1, 3, 4, 12, 16], [5, 3, 7, 8, 2]])
        minima = ratios.running("min", x, seg, ids)
        np.testing.assert_array_equal(minima, [[1, 1, 4, 4, 16], [5, 3, 3, 1, 2]])
    np.testing.assert_array_equal(ratios.segment_starts(x), [[1, 0, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(ratios.running("sum", x, seg), np.cumsum(x, axis=1))


def test_prefix_sums():
    x, mask = np.array([[1.0, NAN, 2.0, 4.0, NAN]]), np.array([[1, 0, 1, 1, 0]])
    sums, counts = ratios.prefix_sums(x, mask, np.array([[1, 1, 1, 2, 0]]))
    np.testing.assert_array_equal(sums[:, :4], [[1, 1, 3, 4]])
    np.testing.assert_array_equal(counts[:, :4], [[1, 1, 2, 1]])


def test_detached_log_ratio():
    x, mask = np.array([[25.0, -30.0, 1.5, NAN]]), np.array([[1, 1, 1, 0]])
    np.testing.assert_array_equal(ratios.detached_log_ratio(x, mask), [[20.0, -20.0, 1.5, 0.0]])
    gradient = jitted.grad(lambda x: jnp.sum(ratios.detached_log_ratio(x, mask)))(x)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


def test_effective_sample_size():
    ones = np.ones(4)
    assert ratios.effective_sample_size(ones, ones) == 1.0
    # (.5 + 1 + 2 + 4)^2 / (4 * (.25 + 1 + 4 + 16)) = 56.25 / 85
    np.testing.assert_allclose(
        ratios.effective_sample_size(np.array([0.5, 1, 2, 4]), ones), 0.6617647, rtol=1e-6
    )
    np.testing.assert_allclose(
        ratios.effective_sample_size(np.array([1.0, 0, 0, 0]), ones), 0.25, rtol=1e-6
    )
    # Weights of any size, also where their square leaves float32.
    for scale in (2e-9, 1e-30, 1e30):
        np.testing.assert_allclose(
            ratios.effective_sample_size(scale * ones, ones), 1.0, rtol=1e-6
        )
    assert ratios.effective_sample_size(0.0 * ones, ones) == 0.0
    assert ratios.effective_sample_size(ones, 0.0 * ones) == 0.0
