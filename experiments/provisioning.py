"""Computes how many samplers, how much staleness and how much lag a run needs or tolerates.

A learner that trains on a batch every T seconds is never idle under two conditions:

1. Samplers generate a batch in T seconds, apart from the time that weight syncs stop them.
2. Batch v + S, which may start when version v is published, arrives S updates later: S T is at least
   the time of the weight sync plus the time to generate the batch up to its last reward.

This is the overlap of ECHO-2 (arXiv:2602.02192). The derivation is ours, without ECHO-2's formula.
`experiments.virtual_clock` tests it.
"""

import math


def least_workers(samples: float, train_s: float, rate: float, pause_s: float = 0.0) -> int:
    """Returns the smallest number of samplers that keeps the learner busy.

    Args:
      samples: samples of a batch.
      train_s: seconds of an update.
      rate: samples per second of one sampler.
      pause_s: seconds that a weight sync stops a sampler, once per update.

    Raises:
      ValueError: the sync takes the whole update.
    """
    _check(samples=samples, train_s=train_s, rate=rate)
    if not 0 <= pause_s < train_s:
        raise ValueError(
            f"a weight sync of {pause_s} s stops a sampler during an update of {train_s} s, and no "
            "number of samplers is enough; sync weights less often"
        )
    return max(_ceil(samples / (rate * (train_s - pause_s))), 1)


def least_staleness(train_s: float, sync_s: float, batch_s: float) -> int:
    """Returns the smallest staleness bound, in versions, at which the learner never waits.

    Args:
      train_s: seconds of an update.
      sync_s: seconds from the end of an update until samplers have the weights.
      batch_s: seconds from the start of a batch to its last reward. If all of the batch starts at
        once this is the longest response, else the sampling time of a synchronous run.
    """
    _check(train_s=train_s)
    if sync_s < 0 or batch_s < 0:
        raise ValueError(f"sync_s is {sync_s} and batch_s {batch_s}; a time is 0 or more")
    return _ceil((sync_s + batch_s) / train_s)


def lag_law(bound: float, drift: float, tokens: int = 1, growth: float = 1.0) -> float:
    """Returns the largest lag, in whole versions, at which the ESS share of the ratios is at least
    `bound`; inf without drift.

    The log-ratio of a token after one version is assumed normal with variance s^2. The ratio has mean 1
    under the sampling policy, so the log-ratio has mean -s^2 / 2 and mean square s^2 + s^4 / 4.
    Variances of n independent tokens add, and k versions multiply them by k^growth. The effective share
    (E w)^2 / E w^2 of lognormal weights is then exp(-n k^growth s^2) (Kong 1992).

    Args:
      bound: in (0, 1).
      drift: mean squared log-ratio per token of two consecutive versions, nats squared, as measured
        between logp_old and logp_prox of tokens that are one version stale.
      tokens: number of factors of the ratio: 1 for token weights, the length for sequence weights.
      growth: 1 if updates have independent directions, 2 if they have the same direction.
    """
    if not 0 < bound < 1:
        raise ValueError(f"bound is {bound}; give a share of the samples between 0 and 1")
    if drift < 0 or tokens < 1 or growth <= 0:
        raise ValueError(
            f"drift {drift} must be 0 or more, tokens {tokens} at least 1, growth {growth} above 0"
        )
    variance = tokens * 2 * (math.sqrt(1 + drift) - 1)
    if variance == 0:
        return math.inf
    return float(math.floor((-math.log(bound) / variance) ** (1 / growth) * (1 + 1e-12)))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; give a finite number above 0")


def _ceil(x: float) -> int:
    """Rounds up, and ignores floating-point error."""
    return math.ceil(x * (1 - 1e-12))
