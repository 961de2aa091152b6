"""Chunked log-probabilities against the plain formula in float64, and against its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.kernels.logprob import collision_probability, token_logprob

B, N, D, V = 3, 10, 6, 50
RNG = np.random.default_rng(0)
X = RNG.normal(0, 1, (B, N, D)).astype(np.float32)
W = RNG.normal(0, 1, (D, V)).astype(np.float32)
TARGETS = RNG.integers(0, V, (B, N)).astype(np.int32)
TEMPERATURE = np.array([1.0, 0.5, 2.0], np.float32)
CHUNKS = [1, 9, 12, 1000]  # 1, 3, 4 and all 10 positions of a row: 3 and 4 do not divide 10

# Tests of values and gradients need no fast programs, and compiling dominates here.
QUICK = {"xla_backend_optimization_level": 0}


def reference():
    """(log-probabilities, entropies) [B,N] in float64."""
    logits = np.einsum("bnd,dv->bnv", X.astype(np.float64), W) / TEMPERATURE[:, None, None]
    logits -= logits.max(axis=-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(logp, TARGETS[..., None], axis=-1)[..., 0]
    return chosen, -(np.exp(logp) * logp).sum(axis=-1)


def unchunked(x, w):
    logits = jnp.einsum("bnd,dv->bnv", x, w) / TEMPERATURE[:, None, None]
    logp = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logp, TARGETS[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def head(w, x):
    return x @ w


def chunked(x, w, chunk, with_entropy=True):
    return token_logprob(head, w, x, TARGETS, TEMPERATURE, chunk, with_entropy)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_equal_log_softmax_in_float64(chunk):
    logp, entropy = jax.jit(chunked, static_argnums=2, compiler_options=QUICK)(X, W, chunk)
    assert logp.dtype == entropy.dtype == jnp.float32
    expected_logp, expected_entropy = reference()
    np.testing.assert_allclose(logp, expected_logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=3e-5)


def test_by_hand():
    # Logits (0, log 3) are 1/4, 3/4; at temperature 1/2 they are 1/10, 9/10.
    w = jnp.array([[0.0, np.log(3.0)]])
    x, targets = jnp.ones((2, 1, 1)), jnp.array([[0], [1]])
    logp, entropy = token_logprob(head, w, x, targets, jnp.array([[1.0], [0.5]]), 8, True)
    np.testing.assert_allclose(logp, np.log([[0.25], [0.9]]), rtol=1e-6)
    hand = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), -(0.1 * np.log(0.1) + 0.9 * np.log(0.9))
    np.testing.assert_allclose(entropy[:, 0], hand, rtol=1e-5)


def test_without_entropy_the_logprobs_are_the_same_and_the_entropies_zero():
    logp, entropy = chunked(X, W, 12, with_entropy=False)
    np.testing.assert_allclose(logp, reference()[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(entropy, np.zeros((B, N)))


@pytest.mark.parametrize("chunk", [1, 12])
def test_gradients_equal_the_unchunked_ones(chunk):
    weights = RNG.normal(0, 1, (2, B, N)).astype(np.float32)

    def loss(both, *args):
        logp, entropy = both(*args)
        return jnp.sum(weights[0] * logp + weights[1] * entropy)

    run = lambda f: jax.jit(jax.grad(f, (0, 1)), compiler_options=QUICK)(X, W)
    expected = run(lambda x, w: loss(unchunked, x, w))
    actual = run(lambda x, w: loss(chunked, x, w, chunk))
    for a, e in zip(actual, expected):
        assert np.abs(e).max() > 0.1
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def all_sizes(jaxpr):
    """Elements of every array that an equation makes, nested programs included."""
    for eqn in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in eqn.outvars)
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(param, "jaxpr"):
                yield from all_sizes(param.jaxpr)
            elif hasattr(param, "eqns"):
                yield from all_sizes(param)


def test_no_program_holds_all_the_logits():
    # B N V = 1,536,000; a chunk of 16 positions holds 16 V = 32,000.
    b, n, d, v, chunk = 4, 192, 8, 2000, 16
    x, w = jnp.zeros((b, n, d)), jnp.zeros((d, v))
    targets, ones = jnp.zeros((b, n), jnp.int32), jnp.ones(b)

    def loss(x, w, chunk):
        logp, entropy = token_logprob(head, w, x, targets, ones, chunk, True)
        return jnp.sum(logp) + jnp.sum(entropy)

    step = jax.value_and_grad(loss, (0, 1))
    sizes = lambda chunk: max(all_sizes(jax.make_jaxpr(lambda x, w: step(x, w, chunk))(x, w).jaxpr))
    assert sizes(b * n) == b * n * v
    assert sizes(chunk) == chunk * v

    def temporaries(chunk):
        compiled = jax.jit(lambda x, w: step(x, w, chunk)).lower(x, w).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(chunk) < 4 * b * n * v / 8 < 4 * b * n * v <= temporaries(b * n)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_collision_probability_is_the_sum_of_squares(chunk):
    logits = np.einsum("bnd,dv->bnv", X.astype(np.float64), W) / TEMPERATURE[:, None, None]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    actual = collision_probability(head, W, X, TEMPERATURE, chunk)
    np.testing.assert_allclose(actual, (p**2).sum(axis=-1), rtol=1e-5)
