"""Scores of one tile of rows, by hand."""

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.kernels import logprob_invariant


def test_scores_of_a_tile_by_hand():
    """Weights 1, 2, 1 and 4, 2, 2 at the temperature 2, each behind a common factor."""
    p = np.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    logits, target, ids = 2 * np.log(p) + 3.0, [1, 2], [[0, 1], [2, 0]]
    logp, entropy, collision, others, normaliser = logprob_invariant._tile(
        jnp.asarray(logits, jnp.float32), jnp.array(target), jnp.full(2, 2.0), jnp.array(ids), True, True,
        (), 1,
    )
    np.testing.assert_allclose(logp, np.log([0.5, 0.25]), rtol=1e-5)
    np.testing.assert_allclose(entropy, [1.5 * np.log(2)] * 2, rtol=1e-5)
    np.testing.assert_allclose(collision, [0.375] * 2, rtol=1e-5)
    np.testing.assert_allclose(others, np.log([[0.25, 0.5], [0.25, 0.5]]), rtol=1e-5)
    np.testing.assert_allclose(normaliser, [1.5] * 2, rtol=1e-5)  # log sum exp(logits / 2) = 3 / 2
