"""The six aggregation modes by hand, their denominators, packed rows and padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import reduce
from tests import jitted

reduce = jitted.Module(reduce)

NAN = float("nan")
LOSS = np.array([[1.0, 2.0, 6.0, NAN], [10.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
GROUP = np.array([[5] * 4, [3] * 4, [3] * 4])
# Sums 9 and 10, lengths 3 and 1, two sequences with tokens, of two prompts, width 4.
EXPECTED = {
    "token-mean": 19 / 4,
    "token-sum": 19.0,
    "seq-mean-token-sum": 19 / 2,
    "seq-mean-token-sum-norm": 19 / 2 / 4,
    "seq-mean-token-mean": (3 + 10) / 2,
    "prompt-mean": (3 + 10) / 2,
}


def test_every_mode_has_an_expected_value():
    assert set(EXPECTED) == set(reduce.MODES)


@pytest.mark.all
@pytest.mark.parametrize("mode", reduce.MODES)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_values_with_nan_at_padding(mode, dtype):
    np.testing.assert_allclose(
        reduce.aggregate(LOSS, MASK.astype(dtype), mode, group=GROUP), EXPECTED[mode], rtol=1e-6
    )


@pytest.mark.parametrize("mode", reduce.MODES)
def test_gradient_stays_inside_the_mask(mode):
    gradient = jitted.grad(lambda x: reduce.aggregate(x, MASK, mode, group=GROUP))(LOSS)
    share = {
        "token-mean": (1 / 4, 1 / 4),
        "token-sum": (1, 1),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
    }
    share |= {"seq-mean-token-sum-norm": (1 / 8, 1 / 8), "seq-mean-token-mean": (1 / 6, 1 / 2)}
    share["prompt-mean"] = share["seq-mean-token-mean"]
    long, short = share[mode]
    np.testing.assert_allclose(gradient, [[long] * 3 + [0], [short, 0, 0, 0], [0] * 4], rtol=1e-6)


def test_explicit_denominators():
    assert reduce.aggregate(LOSS, MASK, "token-mean", num_tokens=38) == 0.5
    assert reduce.aggregate(LOSS, MASK, "seq-mean-token-sum", num_seqs=4) == 4.75
    assert reduce.aggregate(LOSS, MASK, "seq-mean-token-sum-norm", num_seqs=4, scale=19) == 0.25
    assert reduce.aggregate(LOSS, MASK, "seq-mean-token-mean", num_seqs=4) == 3.25
    assert reduce.aggregate(LOSS, MASK, "prompt-mean", divisor=jnp.where(MASK == 1, 38.0, NAN)) == 0.5


@pytest.mark.all
@pytest.mark.parametrize("mode", reduce.MODES)
def test_micro_batches_add_up_to_the_full_batch(mode):
    rng = np.random.default_rng(0)
    loss, mask = rng.normal(size=(8, 5)).astype(np.float32), rng.random((8, 5)) < 0.5
    mask[3] = False
    counts = {"num_tokens": int(mask.sum()), "num_seqs": int(mask.any(axis=1).sum())}
    group = np.repeat([[4], [9], [4], [4], [9], [2], [2], [9]], 5, axis=1)
    divisor = reduce.prompt_divisor(mask, group)
    full = reduce.aggregate(loss, mask, mode, group=group)
    for parts in ([slice(0, 4), slice(4, 8)], [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 8)]):
        total = sum(
            reduce.aggregate(loss[p], mask[p], mode, divisor=divisor[p], **counts) for p in parts
        )
        np.testing.assert_allclose(total, full, rtol=1e-5)
        alone = sum(
            reduce.aggregate(loss[p], mask[p], mode, group=group[p]) for p in parts
        ) / len(parts)
        if mode != "token-sum":  # without the counts the micro-batches are weighed wrongly
            assert abs(alone - full) > 1e-3


@pytest.mark.parametrize("mode", reduce.MODES)
def test_packed_rows_equal_unpacked_rows(mode):
    rng = np.random.default_rng(1)
    lengths = (3, 1, 4, 2)
    dense, dense_mask = np.full((4, 4), NAN, np.float32), np.zeros((4, 4), bool)
    packed, seg = np.full((2, 6), NAN, np.float32), np.zeros((2, 6), int)
    group = np.repeat([[8], [6], [8], [6]], 4, axis=1)  # both prompts in both packed rows
    packed_group = np.array([[8, 8, 8, 6, 0, 0], [8, 8, 8, 8, 6, 6]])
    starts = ((0, 0), (0, 3), (1, 0), (1, 4))
    for i, (length, (row, start)) in enumerate(zip(lengths, starts, strict=True)):
        values = rng.normal(size=length)
        dense[i, :length], dense_mask[i, :length] = values, True
        packed[row, start : start + length], seg[row, start : start + length] = values, 1 + i % 2
    expected = reduce.aggregate(dense, dense_mask, mode, scale=4, group=group)
    actual = reduce.aggregate(
        packed, seg > 0, mode, seg=seg, scale=4, group=packed_group
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


PROMPTS = {"loss": np.array([[1.0, 2.0], [6.0, NAN], [10.0, 4.0], [8.0, NAN], [7.0, 3.0]]),
           "mask": np.array([[1, 1], [1, 0], [1, 1], [0, 0], [1, 0]]),
           "group": np.repeat(np.array([[30], [7], [30], [1], [7]]), 2, axis=1)}


def test_a_mean_over_prompts_of_the_mean_over_their_tokens():
    """Prompt 30 has 1 + 2 + 10 + 4 over 4 tokens, prompt 7 has 6 + 7 over 2, prompt 1 no token."""
    loss, mask, group = PROMPTS.values()
    value, gradient = jitted.value_and_grad(
        lambda x: reduce.aggregate(x, mask, "prompt-mean", group=group)
    )(loss)
    assert value == (17 / 4 + 13 / 2) / 2
    share = [[1 / 8, 1 / 8], [1 / 4, 0], [1 / 8, 1 / 8], [0, 0], [1 / 4, 0]]
    np.testing.assert_array_equal(gradient, share)
    divisor = reduce.prompt_divisor(mask, group)
    np.testing.assert_array_equal(np.where(mask, divisor, 0), [[8, 8], [4, 0], [8, 8], [0, 0], [4, 0]])


def test_a_mean_over_prompts_is_that_of_token_means():
    loss, mask, group = PROMPTS.values()
    alone = [reduce.aggregate(loss, mask * (group == p), "token-mean") for p in (30, 7)]
    value = reduce.aggregate(loss, mask, "prompt-mean", group=group)
    np.testing.assert_allclose(value, np.mean(alone), rtol=1e-6)
    one = reduce.aggregate(loss, mask, "prompt-mean", group=np.zeros_like(group))
    np.testing.assert_allclose(one, reduce.aggregate(loss, mask, "token-mean"), rtol=1e-6)


def test_a_mean_over_prompts_needs_them():
    with pytest.raises(ValueError, match="prompt-mean needs group"):
        reduce.aggregate(LOSS, MASK, "prompt-mean")
    with pytest.raises(ValueError, match="not their sum"):
        reduce.denominator("prompt-mean", 12.0, 4.0)


def test_packed_rows_do_not_know_the_width():
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm of packed rows needs scale"):
        reduce.aggregate(LOSS, MASK, "seq-mean-token-sum-norm", seg=MASK)


@pytest.mark.parametrize("mode", reduce.MODES)
def test_an_empty_mask_gives_zero(mode):
    none = np.zeros_like(MASK)
    value, gradient = jitted.value_and_grad(
        lambda x: reduce.aggregate(x, none, mode, group=GROUP)
    )(LOSS)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros(LOSS.shape))
    counts = {"num_tokens": 0, "num_seqs": 0, "divisor": np.zeros(LOSS.shape)}
    assert reduce.aggregate(LOSS, none, mode, **counts) == 0.0


def test_unknown_mode_lists_the_modes():
    with pytest.raises(ValueError, match="token_mean.*token-mean, token-sum"):
        reduce.aggregate(LOSS, MASK, "token_mean")


@pytest.mark.parametrize("mode, expected", [
    ("token-sum", 1.0), ("token-mean", 12.0), ("seq-mean-token-mean", 4.0),
    ("seq-mean-token-sum", 4.0), ("seq-mean-token-sum-norm", 4.0),
])
def test_what_the_sum_over_parts_of_a_batch_is_divided_by(mode, expected):
    assert reduce.denominator(mode, num_tokens=12.0, num_seqs=4.0) == expected


def test_a_zero_weight_stays_in_the_denominator():
    # A rejected token (loss 0) counts under its mask; taken out of the mask it does not.
    loss = np.array([[4.0, 0.0]])
    assert reduce.aggregate(loss, np.array([[1, 1]]), "token-mean") == 2.0
    assert reduce.aggregate(loss, np.array([[1, 0]]), "token-mean") == 4.0
