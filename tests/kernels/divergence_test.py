"""The exact KL of two hidden states against an enumeration of the vocabulary in float64."""

import jax
import numpy as np
import pytest

from jaxrl_tis.kernels.divergence import token_kl
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import Kept

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

B, N, V, D, CHUNK = 2, 5, 7, 3, 4  # chunks of two positions of each row; the last one is padded
RNG = np.random.default_rng(0)
X, TARGET, WEIGHT = (RNG.normal(0, 1, s) for s in ((B, N, D), (B, N, D), (V, D)))
TEMPERATURE, COTANGENT = RNG.uniform(0.5, 1.5, (B, N)), RNG.normal(0, 1, (B, N))
MASK = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]], bool)


def enumerated(sets):
    """(KL of each token, its gradients for X, TARGET and WEIGHT under COTANGENT), one token at a time."""
    kl, gradients = np.zeros((B, N)), [np.zeros_like(x) for x in (X, TARGET, WEIGHT)]
    for b, n in zip(*np.nonzero(MASK), strict=True):
        ids = sets.get((b, n), range(V))
        logits = [{v: WEIGHT[v] @ h[b, n] / TEMPERATURE[b, n] for v in ids} for h in (X, TARGET)]
        p, q = ({v: np.exp(z[v]) / sum(map(np.exp, z.values())) for v in ids} for z in logits)
        kl[b, n] = sum(p[v] * np.log(p[v] / q[v]) for v in ids)
        for v in ids:
            pull = p[v] * (np.log(p[v] / q[v]) - kl[b, n]) / TEMPERATURE[b, n] * COTANGENT[b, n]
            gradients[0][b, n] += pull * WEIGHT[v]
            gradients[2][v] += pull * X[b, n]
    return kl, gradients


def test_value_and_gradient_are_those_of_the_enumerated_vocabulary():
    x, target = (np.where(MASK[..., None], h, np.nan).astype(np.float32) for h in (X, TARGET))

    @jax.jit
    def found(x, target, weight, kept):
        kl = lambda x, target, w: token_kl(
            Head(w, vocab_axis=0), x, target, np.float32(TEMPERATURE), MASK, CHUNK, kept
        )
        value, pull = jax.vjp(kl, x, target, weight)
        return value, pull(np.float32(COTANGENT))

    ids = np.full((B, N, 2), -1)
    ids[0, 0], ids[1, 2] = (2, 5), (6, 0)
    some = Kept(ids, np.all(ids < 0, axis=-1)), {(0, 0): (2, 5), (1, 2): (6, 0)}
    whole = Kept(ids, np.ones((B, N), bool)), {}
    for kept, sets in (whole, some):
        value, gradients = found(x, target, np.float32(WEIGHT), kept)
        expected, pulls = enumerated(sets)
        assert expected[MASK].min() > 1e-3
        np.testing.assert_allclose(value, expected, atol=1e-6)
        for gradient, pull in zip(gradients, pulls, strict=True):
            np.testing.assert_allclose(gradient, pull, atol=2e-6)
