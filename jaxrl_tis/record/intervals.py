"""95 % confidence intervals of means and fractions from few measurements."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Z_95 = 1.959964


def wilson(p: Any, n: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 95 % Wilson score interval of a fraction `p` seen in `n` trials.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z2n = Z_95**2 / n
    center = (p + z2n / 2) / (1 + z2n)
    half = Z_95 / (1 + z2n) * np.sqrt(p * (1 - p) / n + z2n / (4 * n))
    return center - half, center + half


def of_shares(shares: ArrayLike) -> tuple[float, float, float]:
    """Returns the mean of independent `shares` [n], each in 0 .. 1, and its Wilson interval.

    The number of trials is chosen to match the observed variance of the mean: n if each share is 0
    or 1, more if each share is a mean of several samples.
    """
    shares = np.asarray(shares, float)
    mean, variance = shares.mean(), shares.var() / len(shares)
    trials = len(shares) if variance == 0 else max(mean * (1 - mean) / variance, len(shares))
    low, high = wilson(mean, trials)
    return float(mean), float(low), float(high)


def of_mean(values: ArrayLike) -> tuple[float, float, float]:
    """Returns the mean of `values` [n] and its Student-t interval, which is infinite for n = 1."""
    values = np.asarray(values, float)
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return mean, -np.inf, np.inf
    from scipy import stats  # takes as long to import as half of jax does

    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)
    return mean, float(mean - half), float(mean + half)
