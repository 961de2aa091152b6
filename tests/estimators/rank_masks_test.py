"""Selection over the batch: published examples, ties, and loops over sorted lists."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import rank_masks

NAN = float("nan")
m2po = jax.jit(rank_masks.m2po)
m2po_bounds = jax.jit(rank_masks.m2po_bounds)
clip_cov = jax.jit(rank_masks.clip_cov)
kl_cov = jax.jit(rank_masks.kl_cov)
top_entropy = jax.jit(rank_masks.top_entropy)


def kept_by_m2po(log_ratio, threshold):
    """Drops the largest square until the mean of the rest is below the threshold."""
    squares = sorted(min(abs(x), 20.0) ** 2 for x in log_ratio)
    while len(squares) > 1 and math.fsum(squares) / len(squares) >= threshold:
        squares.pop()
    return squares


def largest(x, mask, num):
    """True at the num largest valid entries of x; of equals, the first."""
    order = sorted(np.flatnonzero(mask), key=lambda i: (-x.flat[i], i))
    selected = np.zeros(x.size, bool)
    selected[order[:num]] = True
    return selected.reshape(x.shape)


def covariance(logp, adv, mask):
    logp_mean, adv_mean = logp[mask].mean(), adv[mask].mean()
    return np.where(mask, (adv - adv_mean) * (logp - logp_mean), 0.0)


@functools.cache
def example():
    """Random tokens, a third of them rounded so that many are equal; an empty row."""
    rng = np.random.default_rng(8)
    shape = (12, 16)
    mask = rng.random(shape) < 0.7
    mask[4] = False
    values = rng.normal(size=(3, *shape))
    values = np.where(rng.random(shape) < 0.4, np.round(values, 1), values)
    logp, adv, entropy = -np.abs(values[0]), values[1], np.abs(values[2])
    log_ratio = values[0] * np.where(rng.random(shape) < 0.05, 40.0, 0.3)
    return log_ratio, logp, adv, entropy, mask


def test_sortable_keeps_the_order_of_floats():
    x = jnp.array([-jnp.inf, -2.0, -1e-30, 0.0, 1e-30, 0.5, 3e38, jnp.inf])
    key = rank_masks.sortable(x)
    assert np.all(np.diff(np.asarray(key).astype(np.int64)) > 0)
    np.testing.assert_array_equal(rank_masks.from_sortable(key, x.dtype), x)


def test_m2po_keeps_as_many_equal_tokens_as_fit():
    # Five tokens of square 0.25 and three of square 0: 0.25 k / (k + 3) < 0.11 up to k = 2.
    log_ratio = jnp.array([[0.5, 0.0, -0.5, 0.0], [0.5, -0.0, 0.5, -0.5]])
    kept = m2po(log_ratio, jnp.ones((2, 4)), m2po_threshold=0.11)
    np.testing.assert_array_equal(kept, [[1, 1, 1, 1], [0, 1, 0, 0]])
    # At k = 3 the mean is exactly 0.125, which is not below 0.125.
    kept = m2po(log_ratio, jnp.ones((2, 4)), m2po_threshold=0.125)
    np.testing.assert_array_equal(kept, [[1, 1, 1, 1], [0, 1, 0, 0]])
    assert np.sum(m2po(log_ratio, jnp.ones((2, 4)), m2po_threshold=0.126)) == 6
    kept = m2po(log_ratio[:1, :2], jnp.ones((1, 2)), m2po_threshold=0.125)
    np.testing.assert_array_equal(kept, [[0, 1]])  # (0.25 + 0) / 2 is not below 0.125
    assert np.sum(m2po(jnp.full((2, 4), 0.5), jnp.ones((2, 4)))) == 1


@pytest.mark.parametrize("is_double", [False, True])
def test_m2po_equals_dropping_one_token_after_another(is_double):
    log_ratio, *_, mask = example()
    log_ratio = log_ratio if is_double else log_ratio.astype(np.float32)
    counts = []
    with jax.enable_x64(is_double):
        for threshold in (1e-4, 0.01, 0.04, 0.5, 4.0, 1e3):
            kept = m2po(np.where(mask, log_ratio, NAN), mask, m2po_threshold=threshold)
            expected = kept_by_m2po(log_ratio[mask].astype(float), threshold)
            squares = np.square(np.clip(log_ratio[np.asarray(kept)], -20, 20))
            np.testing.assert_allclose(np.sort(squares), expected, rtol=1e-5)
            assert not np.any(kept & ~mask)
            counts.append(len(squares))
    assert counts == sorted(counts) and counts[0] < counts[2] < counts[-1] == mask.sum()


def test_m2po_on_policy_and_on_nothing():
    mask = jnp.array([[1, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(m2po(jnp.zeros((2, 3)), mask), mask)
    np.testing.assert_array_equal(m2po(jnp.ones((2, 3)), 0 * mask), np.zeros((2, 3)))


def test_bounds_of_m2po_by_hand():
    # A > 0: harmful are 0.3 and 0.2, mean square 0.065 > 0.04; (0.04 + 0.04) / 2 = 0.04 gives
    # tau = 0.2, and e^-0.2 = 0.819, e^0.2 = 1.221 are inside [0.7, 1.5].
    log_ratio, mask, adv = (
        jnp.array([[0.3, -0.1, 0.2]]),
        jnp.ones((1, 3)),
        jnp.ones((1, 3)),
    )
    np.testing.assert_allclose(m2po_bounds(log_ratio, adv, mask), [0.3, 0.5], rtol=1e-6)
    free = {"m2po_low": 0.0, "m2po_high": 0.0}
    low, high = m2po_bounds(log_ratio, adv, mask, **free)
    np.testing.assert_allclose(
        [low, high], [1 - math.exp(-0.2), math.exp(0.2) - 1], rtol=1e-5
    )
    # A < 0: harmful is 0.1 alone, below the threshold.
    np.testing.assert_array_equal(m2po_bounds(log_ratio, -adv, mask), [1.0, np.inf])
    np.testing.assert_array_equal(m2po_bounds(log_ratio, 0 * adv, mask), [1.0, np.inf])
    # 1 and 1 with a threshold of 0.49: tau = 0.7, outside the floor on both sides.
    low, high = m2po_bounds(jnp.ones((1, 3)), adv, mask, m2po_threshold=0.49)
    np.testing.assert_allclose(
        [low, high], [1 - math.exp(-0.7), math.exp(0.7) - 1], rtol=1e-5
    )
    # A mean square that equals the threshold clips nothing.
    bounds = m2po_bounds(jnp.full((1, 3), 0.5), adv, mask, m2po_threshold=0.25)
    np.testing.assert_array_equal(bounds, [1.0, np.inf])


@pytest.mark.parametrize("threshold", [1e-3, 0.04, 0.3])
def test_bounds_of_m2po_solve_their_equation(threshold):
    log_ratio, _, adv, _, mask = example()
    poisoned = np.where(mask, log_ratio, NAN), np.where(mask, adv, NAN)
    with jax.enable_x64(True):
        low, high = m2po_bounds(
            *poisoned, mask, m2po_threshold=threshold, m2po_low=0.0, m2po_high=0.0
        )
    tau = math.log1p(high)
    np.testing.assert_allclose(math.log1p(-low), -tau, rtol=1e-9)
    clipped = np.clip(log_ratio, -20, 20)
    harmful = clipped[mask & (clipped * adv > 0)]
    mean = np.mean(np.minimum(np.square(harmful), tau**2))
    np.testing.assert_allclose(mean, threshold, rtol=1e-9)


def test_bounds_of_m2po_ignore_padding_and_carry_no_gradient():
    log_ratio, _, adv, _, mask = example()
    zeroed = [jnp.array(np.where(mask, x, 0.0), jnp.float32) for x in (log_ratio, adv)]
    expected = m2po_bounds(*zeroed, mask)
    for value in (NAN, 100.0, -np.inf):
        poisoned = [jnp.where(mask, x, value) for x in zeroed]
        np.testing.assert_array_equal(m2po_bounds(*poisoned, mask), expected)

    def width(log_ratio, adv):
        return sum(m2po_bounds(log_ratio, adv, mask))

    for gradient in jax.grad(width, (0, 1))(*zeroed):
        np.testing.assert_array_equal(gradient, np.zeros(mask.shape))


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 0.5, 1.0])
def test_kl_cov_takes_the_tokens_of_highest_covariance(ratio):
    _, logp, adv, _, mask = example()
    poisoned = [np.where(mask, x, NAN) for x in (logp, adv)]
    with jax.enable_x64(True):
        actual = kl_cov(*poisoned, mask, kl_cov_ratio=ratio)
        cov = np.asarray(rank_masks.covariance(*poisoned, mask))
    np.testing.assert_allclose(cov, covariance(logp, adv, mask), rtol=1e-12, atol=1e-15)
    expected = largest(cov, mask, max(1, int(ratio * mask.sum())))
    np.testing.assert_array_equal(actual, expected)


def test_equal_values_are_selected_in_their_order():
    mask = jnp.array([[1, 0, 1, 1], [1, 1, 1, 1]])
    entropy = jnp.array([[0.5, 9.0, -0.0, 0.5], [0.0, 0.5, 0.7, 0.5]])
    cases = {  # 7 valid tokens; 0.7 first, then 0.5 in order, then both zeros
        0.15: [[0, 0, 0, 0], [0, 0, 1, 0]],
        0.43: [[1, 0, 0, 1], [0, 0, 1, 0]],
        0.58: [[1, 0, 0, 1], [0, 1, 1, 0]],
        6 / 7: [[1, 0, 1, 1], [0, 1, 1, 1]],
    }
    for fraction, expected in cases.items():
        kept = top_entropy(
            entropy, mask, entropy=entropy, top_entropy_fraction=fraction
        )
        np.testing.assert_array_equal(kept, expected, err_msg=str(fraction))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.77, 1.0])
def test_top_entropy_equals_sorting(fraction):
    *_, entropy, mask = example()
    entropy = entropy.astype(np.float32)
    expected = largest(entropy, mask, max(1, int(fraction * mask.sum() + 1e-9)))
    for value in (NAN, np.inf, 100.0):
        kept = top_entropy(
            entropy,
            mask,
            entropy=np.where(mask, entropy, value),
            top_entropy_fraction=fraction,
        )
        np.testing.assert_array_equal(kept, expected)


def test_a_share_is_not_lost_to_rounding():
    # 0.2 * 35 is 7, though float32 has 0.2 * 5 * 7 a little above or below.
    for num in range(5, 500, 5):
        mask = jnp.arange(500)[None] < num
        kept = top_entropy(jnp.zeros((1, 500)), mask, entropy=jnp.ones((1, 500)))
        assert np.sum(kept) == num // 5


def clip_cov_of_example(key, **parameters):
    _, logp, adv, _, mask = example()
    fields = {
        "logp": 2.0 * logp,
        "logp_old": 2.0 * logp - 0.3 * np.sign(adv),
        "adv": adv,
    }
    return clip_cov(
        logp,
        mask,
        **{name: np.where(mask, x, NAN) for name, x in fields.items()},
        key=jax.random.key(key),
        **parameters,
    )


def test_clip_cov_draws_among_candidates():
    _, logp, adv, _, mask = example()
    cov = covariance(2.0 * logp, adv, mask)
    # log r = 0.3 sign(A): r = 1.35 for A > 0 and 0.74 for A < 0.
    for clip_low, clip_high, is_free in (
        (1.0, 1.0, np.ones(mask.shape, bool)),
        (1.0, 0.2, adv <= 0),
        (0.2, 1.0, adv >= 0),
    ):
        candidates = mask & is_free & (cov > 0.2) & (cov < 1.5)
        shape = {"clip_low": clip_low, "clip_high": clip_high}
        shape |= {"clip_cov_lower": 0.2, "clip_cov_upper": 1.5}
        num = int(0.05 * mask.sum())
        assert 1 < num < candidates.sum() < mask.sum()
        kept = np.asarray(clip_cov_of_example(0, clip_cov_ratio=0.05, **shape))
        assert np.sum(mask & ~kept) == num and not np.any(~kept & mask & ~candidates)
        np.testing.assert_array_equal(
            kept, clip_cov_of_example(0, clip_cov_ratio=0.05, **shape)
        )
        assert np.any(kept != clip_cov_of_example(1, clip_cov_ratio=0.05, **shape))
        everything = clip_cov_of_example(0, clip_cov_ratio=1.0, **shape)
        np.testing.assert_array_equal(everything, mask & ~candidates)
        one = clip_cov_of_example(0, clip_cov_ratio=0.0, **shape)
        assert np.sum(mask & ~np.asarray(one)) == 1
    empty = clip_cov_of_example(0, clip_cov_lower=1.0, clip_cov_upper=1.0)
    np.testing.assert_array_equal(empty, mask)


def test_clip_cov_draws_uniformly():
    # Means 0 and -4: cov = 9 at the tokens 0, 1, 4, 5 and -9 at the others. Two of the four are
    # drawn each time.
    adv, logp = jnp.array([[3.0, -3.0] * 4]), jnp.array([[-1.0, -7.0, -7.0, -1.0] * 2])

    @jax.jit
    @jax.vmap
    def draw(key):
        return ~rank_masks.clip_cov(
            logp,
            jnp.ones((1, 8)),
            logp=logp,
            logp_old=logp,
            adv=adv,
            key=key,
            clip_cov_ratio=0.25,
            clip_cov_upper=10.0,
        )

    drawn = np.asarray(draw(jax.random.split(jax.random.key(3), 2000)))[:, 0]
    np.testing.assert_array_equal(drawn.sum(axis=1), np.full(2000, 2))
    share = drawn.mean(axis=0)
    # Each has probability 1/2; the standard deviation of a share of 2000 draws is 0.011.
    np.testing.assert_allclose(share, [0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0], atol=0.05)
    pairs = {tuple(np.flatnonzero(row)) for row in drawn}
    assert len(pairs) == 6  # every pair of the four occurs
