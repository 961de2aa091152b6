"""How many samplers, how much staleness, and how much lag: what numbers of a run have to be.

A learner that trains on a batch every T seconds is never idle if two things hold. Samplers draw a
batch in T seconds: their rates add up to batch / T, over the time in which new weights do not stop
them. And a batch that may begin when version v is published, that is batch v + S, is there S updates
later: S T >= the time to sync the weights, and from then on to draw the batch to its last
reward. This is the overlap of ECHO-2 (arXiv:2602.02192), whose own formula was not read: the
derivation is ours, and `experiments.virtual_clock` is its test.
"""

import math


def least_workers(samples: float, train_s: float, rate: float, pause_s: float = 0.0) -> int:
    """Returns the fewest samplers that keep the learner busy.

    Args:
      samples: of a batch.
      train_s: of an update, seconds.
      rate: samples that one draws per second.
      pause_s: for which new weights stop a sampler, once an update.

    Raises:
      ValueError: they stop it for the whole update.
    """
    _check(samples=samples, train_s=train_s, rate=rate)
    if not 0 <= pause_s < train_s:
        raise ValueError(
            f"a weight sync of {pause_s} s stops a sampler during an update of {train_s} s, and no "
            "number of samplers is enough; sync weights less often"
        )
    return max(_ceil(samples / (rate * (train_s - pause_s))), 1)


def least_staleness(train_s: float, sync_s: float, batch_s: float) -> int:
    """Returns the smallest bound on staleness, in versions, with which the learner never waits.

    Args:
      train_s: of an update, seconds.
      sync_s: from the end of an update until samplers have its weights.
      batch_s: from when a batch may begin to its last reward. Where all of it begins at once this is
        the tail, the longest response; else as long as a synchronous run draws.
    """
    _check(train_s=train_s)
    if sync_s < 0 or batch_s < 0:
        raise ValueError(f"sync_s is {sync_s} and batch_s {batch_s}; a time is 0 or more")
    return _ceil((sync_s + batch_s) / train_s)


def lag_law(bound: float, drift: float, tokens: int = 1, growth: float = 1.0) -> float:
    """Returns the largest lag, in whole versions, at which the effective sample size of the ratios
    stays at `bound` or above, as a share of the samples; inf where nothing drifts.

    The log-ratio of a token after one version is taken as normal. Its ratio has mean 1 under the
    policy that drew it, so that its mean is -s^2 / 2 for a variance s^2, and its mean square
    s^2 + s^4 / 4. Variances of n independent tokens add, and over k versions they are k^growth times
    that of one. The effective share (E w)^2 / E w^2 is then exp(-n k^growth s^2): lognormal weights
    (Kong 1992, for the effective sample size).

    Args:
      bound: in (0, 1).
      drift: mean squared log-ratio per token of two versions that follow each other, nats squared:
        as measured between logp_old and logp_prox of tokens that are one version stale.
      tokens: that the ratio is a product of: 1 for token weights, the length for those of sequences.
      growth: 1 where updates go in directions of their own; 2 where they go on in the same.
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
    """Rounds up, but for what rounding itself has added."""
    return math.ceil(x * (1 - 1e-12))
